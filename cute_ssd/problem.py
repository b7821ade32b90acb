"""Problem: what was asked, and all checks that need no data.

Each constructor takes the arguments of a public function, raises `ShapeError`, `DtypeError` or `UnsupportedError` on
bad ones, and returns the frozen description of the call. It runs in eager calls and, on symbolic sizes, in the fake
implementations that torch.compile uses. What needs data (offsets, slots, ids) is checked in `sequences.py`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .errors import DtypeError, ShapeError, UnsupportedError

INF = float("inf")
_INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INDEX_DTYPES = (torch.int32, torch.int64, torch.uint32)

Axes = tuple[tuple[str, int | None], ...]


class Problem(NamedTuple):
    """One call. `batch` rows of `seqlen` tokens; packed calls are one row, `num_seqs` their sequences (else None)."""

    function: str
    batch: int
    seqlen: int
    nheads: int
    headdim: int
    ngroups: int
    dstate: int
    dtype: torch.dtype
    state_dtype: torch.dtype
    num_seqs: int | None = None
    chunk_size: int = 0
    dt: str = "none"  # none (log_decay given), plain, softplus
    D: str = "none"  # none, head, channel
    z: bool = False
    initial_states: bool = False
    pool: bool = False
    decode: bool = False

    @property
    def compute_dtype(self) -> torch.dtype:
        """Accumulation: fp64 for fp64 inputs, else fp32."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return (self.nheads, self.headdim, self.dstate)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state as it is accumulated."""
        return self.nheads * self.headdim * self.dstate * self.compute_dtype.itemsize

    def __str__(self) -> str:
        size = f"batch {self.batch}, seqlen {self.seqlen}"
        if self.num_seqs is not None:
            size = f"{self.num_seqs} packed sequence(s), {self.seqlen} tokens"
        flags = [f"dt {self.dt}"] if self.dt != "none" else ["log_decay"]
        flags += [f"D per {self.D}"] if self.D != "none" else []
        flags += [name for name in ("z", "initial_states", "pool") if getattr(self, name)]
        return (
            f"{size}, nheads {self.nheads}, headdim {self.headdim}, ngroups {self.ngroups}, dstate {self.dstate}, "
            f"{_short(self.dtype)} inputs, {_short(self.state_dtype)} state, {', '.join(flags)}"
        )


def chunk_scan(
    x: Tensor,
    dt: Tensor | None,
    A: Tensor | None,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, INF),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
    *,
    log_decay: Tensor | None = None,
) -> Problem:
    """Of `mamba_chunk_scan_combined`, and with `log_decay` instead of dt and A of `ssd_chunk_scan`."""
    batch, seqlen, nheads, headdim = _sizes("x", x, ("batch", "seqlen", "nheads", "headdim"))
    ngroups, dstate = _projections(x, B, C, ("batch", "seqlen"), nheads)
    tokens = (("batch", batch), ("seqlen", seqlen))
    if log_decay is not None:
        _floating("log_decay", log_decay, x, (("batch", batch), ("nheads", nheads), ("seqlen", seqlen)))
    _discretisation(x, dt, A, dt_bias, dt_limit, tokens, nheads)
    _skip_and_gate(x, D, z, nheads, headdim)
    state = (("nheads", nheads), ("headdim", headdim), ("dstate", dstate))
    if initial_states is not None:
        _floating("initial_states", initial_states, x, (("batch", batch), *state))
    if seq_idx is not None:
        _index("seq_idx", seq_idx, x, tokens)
    num_seqs = None
    if cu_seqlens is not None:
        num_seqs = _offsets("cu_seqlens", cu_seqlens, x)
        if batch != 1:
            raise ShapeError(
                f"cu_seqlens packs sequences into one row, but x has batch (axis 0) {batch}, expected 1; "
                "reshape x to (1, total_len, nheads, headdim)."
            )
    elif return_varlen_states:
        raise ShapeError("return_varlen_states is True but cu_seqlens is None, expected offsets; pass cu_seqlens.")
    return Problem(
        "ssd_chunk_scan" if log_decay is not None else "mamba_chunk_scan_combined",
        batch,
        seqlen,
        nheads,
        headdim,
        ngroups,
        dstate,
        x.dtype,
        _state_dtype(state_dtype, x),
        num_seqs,
        _positive("chunk_size", chunk_size),
        _dt_kind(dt, dt_softplus),
        _d_kind(D),
        z is not None,
        initial_states is not None,
    )


def varlen(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    query_start_loc: Tensor,
    *,
    chunk_size: int = 256,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, INF),
    initial_states: Tensor | None = None,
    out: Tensor | None = None,
    return_final_states: bool = False,
    return_chunk_states: bool = False,
    state_dtype: torch.dtype | None = None,
    cu_chunk_seqlens: Tensor | None = None,
) -> Problem:
    """Of `mamba_chunk_scan_varlen`."""
    problem = _packed(
        "mamba_chunk_scan_varlen",
        x,
        dt,
        A,
        B,
        C,
        query_start_loc,
        chunk_size,
        D,
        z,
        dt_bias,
        dt_softplus,
        dt_limit,
        out,
    )
    state = zip(("nheads", "headdim", "dstate"), problem.state_shape, strict=True)
    if initial_states is not None:
        _floating("initial_states", initial_states, x, (("num_seqs", problem.num_seqs), *state))
    if cu_chunk_seqlens is not None:
        _offsets("cu_chunk_seqlens", cu_chunk_seqlens, x)
    return problem._replace(initial_states=initial_states is not None, state_dtype=_state_dtype(state_dtype, x))


def varlen_inplace(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    ssm_pool: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    *,
    has_initial_state: Tensor | None = None,
    pad_slot_id: int = -1,
    chunk_size: int = 256,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, INF),
    out: Tensor | None = None,
) -> Problem:
    """Of `mamba_chunk_scan_varlen_inplace`."""
    name = "mamba_chunk_scan_varlen_inplace"
    problem = _packed(name, x, dt, A, B, C, query_start_loc, chunk_size, D, z, dt_bias, dt_softplus, dt_limit, out)
    state = zip(("nheads", "headdim", "dstate"), problem.state_shape, strict=True)
    _floating("ssm_pool", ssm_pool, x, (("num_slots", None), *state))
    _writable("ssm_pool", ssm_pool)
    _index("cache_indices", cache_indices, x, (("num_seqs", problem.num_seqs),))
    if has_initial_state is not None:
        _shape("has_initial_state", has_initial_state, (("num_seqs", problem.num_seqs),))
        _same_device("has_initial_state", has_initial_state, x)
        if has_initial_state.dtype != torch.bool:
            raise DtypeError(
                f"has_initial_state is {_short(has_initial_state.dtype)}, expected bool; pass has_initial_state.bool()."
            )
    return problem._replace(pool=True, initial_states=has_initial_state is not None, state_dtype=ssm_pool.dtype)


def state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    out: Tensor | None = None,
) -> Problem:
    """Of `selective_state_update`, with a head dimension everywhere (see `api.selective_state_update`)."""
    batch, nheads, headdim = _sizes("x", x, ("batch", "nheads", "headdim"))
    ngroups, dstate = _projections(x, B, C, ("batch",), nheads)
    slots = batch if state_batch_indices is None else None
    head = (("nheads", nheads), ("headdim", headdim))
    _floating("state", state, x, (("batch" if slots is not None else "num_slots", slots), *head, ("dstate", dstate)))
    _writable("state", state)
    per_head = {1: head[:1], 2: head}
    _floating("dt", dt, x, (("batch", batch), *(head[:1] if dt.ndim == 2 else head)))
    _floating("A", A, x, head[:1] if A.ndim == 1 else (*head, ("dstate", dstate)))
    if D is not None:
        _floating("D", D, x, per_head.get(D.ndim, head))
    if dt_bias is not None:
        _floating("dt_bias", dt_bias, x, per_head.get(dt_bias.ndim, head))
    if z is not None:
        _like_x("z", z, x)
    if state_batch_indices is not None:
        _index("state_batch_indices", state_batch_indices, x, (("batch", batch),))
    if out is not None:
        _out(out, x)
    return Problem(
        "selective_state_update",
        batch,
        1,
        nheads,
        headdim,
        ngroups,
        dstate,
        x.dtype,
        state.dtype,
        None,
        1,
        _dt_kind(dt, dt_softplus),
        _d_kind(D),
        z is not None,
        True,
        state_batch_indices is not None,
        True,
    )


def require_types(
    tensors: dict[str, Any],
    optional: dict[str, Any],
    integers: dict[str, Any] | None = None,
    state_dtype: Any = None,
) -> None:
    """The types of arguments, which torch would otherwise refuse in words of its own."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise DtypeError(f"{name} is {_kind(value)}, expected a torch tensor; pass {name} as a tensor.")
    for name, value in optional.items():
        if value is not None and not isinstance(value, Tensor):
            raise DtypeError(f"{name} is {_kind(value)}, expected a torch tensor or None; pass {name} as a tensor.")
    for name, value in (integers or {}).items():
        if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
            raise DtypeError(f"{name} is {_kind(value)}, expected an integer; pass {name} as an int.")
        if not isinstance(value, torch.SymInt) and abs(value) >= 2**63:
            raise ShapeError(f"{name} is {value}, expected an integer of 64 bits; pass a smaller one.")
    if state_dtype is not None and not isinstance(state_dtype, torch.dtype):
        raise DtypeError(f"state_dtype is {_kind(state_dtype)}, expected a torch dtype; pass torch.float32 or None.")


def bounds(dt_limit: Any) -> tuple[float, float]:
    """(low, high) of dt_limit."""
    if not isinstance(dt_limit, (tuple, list)) or len(dt_limit) != 2:
        raise ShapeError(
            f"dt_limit is {dt_limit!r}, expected two numbers (low, high); pass (0.0, float('inf')) for none."
        )
    for bound in dt_limit:
        if not isinstance(bound, (int, float)):
            raise DtypeError(f"dt_limit has {_kind(bound)}, expected two numbers (low, high); pass floats.")
    if not dt_limit[0] <= dt_limit[1]:
        raise ShapeError(f"dt_limit is {dt_limit}, expected (low, high) with low <= high; swap or correct the bounds.")
    return float(dt_limit[0]), float(dt_limit[1])


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def with_heads(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    out: Tensor | None,
) -> tuple[Any, ...]:
    """The tensors of a decode step with a head dimension: those without one are the single head of theirs."""
    if state.ndim != 3:
        return state, x, dt, A, B, C, D, z, dt_bias, out
    ranks = {
        "x": (x, 2),
        "dt": (dt, 2),
        "A": (A, 2),
        "D": (D, 1),
        "z": (z, 2),
        "dt_bias": (dt_bias, 1),
        "out": (out, 2),
    }
    for name, (tensor, rank) in ranks.items():
        if tensor is not None and tensor.ndim != rank:
            raise ShapeError(
                f"{name} has {tensor.ndim} dimensions {tuple(tensor.shape)}, expected {rank} with a state "
                f"{tuple(state.shape)} without heads; reshape {name}, or the state to (batch, nheads, headdim, dstate)."
            )

    def at(axis: int, t: Tensor | None) -> Tensor | None:
        return None if t is None else t.unsqueeze(axis)

    grouped = (t.unsqueeze(1) if t.ndim == 2 else t for t in (B, C))
    return at(1, state), at(1, x), at(1, dt), at(0, A), *grouped, at(0, D), at(1, z), at(0, dt_bias), at(1, out)


def refuse_gradient(function: str, *tensors: Tensor | None) -> None:
    """Inference functions raise when the call would have to record a gradient."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise UnsupportedError(
            f"{function} is for inference and has no gradient, but an input requires one; call it under "
            "torch.no_grad(), or use mamba_chunk_scan_combined, which is differentiable."
        )


def _packed(
    function: str,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    query_start_loc: Tensor,
    chunk_size: int,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    out: Tensor | None,
) -> Problem:
    total_len, nheads, headdim = _sizes("x", x, ("total_len", "nheads", "headdim"))
    ngroups, dstate = _projections(x, B, C, ("total_len",), nheads)
    _discretisation(x, dt, A, dt_bias, dt_limit, (("total_len", total_len),), nheads)
    _skip_and_gate(x, D, z, nheads, headdim)
    num_seqs = _offsets("query_start_loc", query_start_loc, x)
    if out is not None:
        _out(out, x)
    return Problem(
        function,
        1,
        total_len,
        nheads,
        headdim,
        ngroups,
        dstate,
        x.dtype,
        x.dtype,
        num_seqs,
        _positive("chunk_size", chunk_size),
        _dt_kind(dt, dt_softplus),
        _d_kind(D),
        z is not None,
    )


def _sizes(name: str, tensor: Tensor, axes: tuple[str, ...]) -> tuple[int, ...]:
    """The sizes of x, the tensor that all others are measured against."""
    shape = tensor.shape
    if len(shape) != len(axes):
        raise ShapeError(
            f"{name} has {len(shape)} dimensions {tuple(shape)}, expected {len(axes)} ({', '.join(axes)}); "
            f"reshape {name}."
        )
    if tensor.dtype not in _INPUT_DTYPES:
        raise DtypeError(
            f"{name} is {_short(tensor.dtype)}, expected float32, bfloat16, float16 or float64; "
            f"cast {name} to one of them."
        )
    for axis in range(len(axes) - 2, len(axes)):
        if shape[axis] < 1:
            raise ShapeError(f"{name} has {axes[axis]} (axis {axis}) 0, expected at least 1; pass {name} with heads.")
    return tuple(shape)


def _projections(x: Tensor, B: Tensor, C: Tensor, leading: tuple[str, ...], nheads: int) -> tuple[int, int]:
    """ngroups and dstate, from B and C of shape (*leading, ngroups, dstate)."""
    known = tuple(zip(leading, x.shape, strict=False))
    _like_dtype("B", B, x)
    _shape("B", B, (*known, ("ngroups", None), ("dstate", None)))
    ngroups, dstate = B.shape[-2:]
    axis = len(leading)
    if dstate < 1:
        raise ShapeError(f"B has dstate (axis {axis + 1}) 0, expected at least 1; pass B with a state dimension.")
    if ngroups < 1 or nheads % ngroups:
        raise ShapeError(
            f"B has ngroups (axis {axis}) {ngroups}, expected a divisor of nheads {nheads}; "
            "pass B and C with one row for each group of heads."
        )
    _like_dtype("C", C, x)
    _shape("C", C, (*known, ("ngroups", ngroups), ("dstate", dstate)))
    return ngroups, dstate


def _discretisation(
    x: Tensor,
    dt: Tensor | None,
    A: Tensor | None,
    dt_bias: Tensor | None,
    dt_limit: tuple[float, float],
    tokens: Axes,
    nheads: int,
) -> None:
    if dt is not None:
        _floating("dt", dt, x, (*tokens, ("nheads", nheads)))
    if A is not None:
        _floating("A", A, x, (("nheads", nheads),))
    if dt_bias is not None:
        _floating("dt_bias", dt_bias, x, (("nheads", nheads),))
    bounds(dt_limit)


def _skip_and_gate(x: Tensor, D: Tensor | None, z: Tensor | None, nheads: int, headdim: int) -> None:
    if D is not None:
        head = (("nheads", nheads), ("headdim", headdim))
        _floating("D", D, x, head[:1] if D.ndim == 1 else head)
    if z is not None:
        _like_x("z", z, x)


def _like_x(name: str, tensor: Tensor, x: Tensor) -> None:
    _like_dtype(name, tensor, x)
    if tensor.shape != x.shape:
        raise ShapeError(
            f"{name} has shape {tuple(tensor.shape)}, expected that of x, {tuple(x.shape)}; reshape {name}."
        )


def _like_dtype(name: str, tensor: Tensor, x: Tensor) -> None:
    _same_device(name, tensor, x)
    if tensor.dtype != x.dtype:
        raise DtypeError(f"{name} is {_short(tensor.dtype)}, expected {_short(x.dtype)} as x is; cast {name} or x.")


def _floating(name: str, tensor: Tensor, x: Tensor, axes: Axes) -> None:
    _same_device(name, tensor, x)
    if tensor.dtype not in _INPUT_DTYPES:
        raise DtypeError(
            f"{name} is {_short(tensor.dtype)}, expected float32, bfloat16, float16 or float64; "
            f"cast {name} to one of them."
        )
    _shape(name, tensor, axes)


def _index(name: str, tensor: Tensor, x: Tensor, axes: Axes) -> None:
    _same_device(name, tensor, x)
    if tensor.dtype not in _INDEX_DTYPES:
        raise DtypeError(f"{name} is {_short(tensor.dtype)}, expected int32 or int64; pass {name}.int().")
    _shape(name, tensor, axes)


def _offsets(name: str, tensor: Tensor, x: Tensor) -> int:
    """The number of sequences that (num_seqs + 1,) offsets bound."""
    _index(name, tensor, x, (("num_seqs + 1", None),))
    if tensor.shape[0] < 1:
        raise ShapeError(f"{name} is empty, expected num_seqs + 1 offsets that start at 0; pass at least [0].")
    return tensor.shape[0] - 1


def _shape(name: str, tensor: Tensor, axes: Axes) -> None:
    shape = tensor.shape
    if len(shape) != len(axes):
        raise ShapeError(
            f"{name} has {len(shape)} dimensions {tuple(shape)}, expected {len(axes)} ({_named(axes)}); reshape {name}."
        )
    for axis, (label, size) in enumerate(axes):
        if size is not None and shape[axis] != size:
            raise ShapeError(
                f"{name} has {label} (axis {axis}) {shape[axis]}, expected {size}; "
                f"pass {name} of shape ({_named(axes)})."
            )


def _out(out: Tensor, x: Tensor) -> None:
    _like_x("out", out, x)
    if not out.is_contiguous():
        raise ShapeError(
            f"out has strides {tuple(out.stride())}, expected a contiguous tensor; "
            "pass torch.empty(x.shape, dtype=x.dtype)."
        )


def _writable(name: str, tensor: Tensor) -> None:
    reach = 0  # of the axes seen so far, from the densest outwards; the next must step over it
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            break
        reach += (size - 1) * stride
    else:
        return
    if tensor.numel():
        raise ShapeError(
            f"{name} has strides {tuple(tensor.stride())}, "
            "expected every element at its own address since it is written; "
            f"pass {name}.contiguous()."
        )


def _same_device(name: str, tensor: Tensor, x: Tensor) -> None:
    if tensor.device != x.device:
        raise ShapeError(f"{name} is on {tensor.device}, expected {x.device} where x is; move {name} there.")


def _state_dtype(state_dtype: torch.dtype | None, x: Tensor) -> torch.dtype:
    if state_dtype is None:
        return torch.float64 if x.dtype == torch.float64 else torch.float32
    if state_dtype not in _INPUT_DTYPES:
        raise DtypeError(
            f"state_dtype is {_short(state_dtype)}, expected float32, bfloat16, float16 or float64; pass one of them."
        )
    return state_dtype


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ShapeError(f"{name} is {value}, expected at least 1; pass 128 or 256 (results do not depend on it).")
    return value


def _dt_kind(dt: Tensor | None, softplus: bool) -> str:
    return "none" if dt is None else "softplus" if softplus else "plain"


def _d_kind(D: Tensor | None) -> str:
    return "none" if D is None else "head" if D.ndim == 1 else "channel"


def _named(axes: Axes) -> str:
    return ", ".join(label if size is None else f"{label}={size}" for label, size in axes)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
