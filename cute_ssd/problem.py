"""Problem: what was asked, and all checks that need no data.

Each constructor takes the arguments of a public function, raises `ShapeError`, `DtypeError` or `UnsupportedError` on
bad ones, and returns the frozen description of the call. It runs in eager calls and, on symbolic sizes, in the fake
implementations that torch.compile uses. Checks of one argument are in `checks.py`; what needs data (offsets, slots,
ids) is checked in `sequences.py`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import checks
from .errors import DtypeError, ShapeError
from .kernels.dims import rows_are_aligned

INF = float("inf")

_ROWS = ("batch", "seqlen")
_STATE = ("nheads", "headdim", "dstate")
_HEAD = _STATE[:2]


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
    seq_idx: bool = False
    chunk_states: str = "none"  # none, spaced (after every chunk_size tokens), own (at cu_chunk_seqlens)
    refused: tuple[str, ...] = ()  # what no GPU kernel takes of the tensors
    misaligned: tuple[str, ...] = ()  # tensors whose rows do not all start at multiples of 16 bytes

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
        flags += [name for name in ("z", "initial_states", "pool", "seq_idx") if getattr(self, name)]
        flags += [f"chunk states {self.chunk_states}"] if self.chunk_states != "none" else []
        return (
            f"{size}, nheads {self.nheads}, headdim {self.headdim}, ngroups {self.ngroups}, dstate {self.dstate}, "
            f"{checks.short(self.dtype)} inputs, {checks.short(self.state_dtype)} state, {', '.join(flags)}"
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
    batch, seqlen, nheads, headdim = _sizes(x, (*_ROWS, *_HEAD))
    rows = (batch, seqlen)
    ngroups, dstate = _projections(x, B, C, _ROWS, rows, nheads)
    if log_decay is not None:
        checks.floating("log_decay", log_decay, x, ("batch", "nheads", "seqlen"), (batch, nheads, seqlen))
    _discretisation(x, dt, A, dt_bias, dt_limit, _ROWS, rows, nheads)
    _skip_and_gate(x, D, z, (nheads, headdim))
    if initial_states is not None:
        sizes = (batch, nheads, headdim, dstate)
        checks.floating("initial_states", initial_states, x, ("batch", *_STATE), sizes)
    if seq_idx is not None:
        checks.index("seq_idx", seq_idx, x, _ROWS, rows)
    num_seqs = None
    if cu_seqlens is not None:
        num_seqs = checks.offsets("cu_seqlens", cu_seqlens, x)
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
        checks.returned_dtype(state_dtype, x),
        num_seqs,
        checks.positive("chunk_size", chunk_size),
        _dt_kind(dt, dt_softplus),
        _d_kind(D),
        z is not None,
        initial_states is not None,
        seq_idx=seq_idx is not None,
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
    if initial_states is not None:
        sizes = (problem.num_seqs, *problem.state_shape)
        checks.floating("initial_states", initial_states, x, ("num_seqs", *_STATE), sizes)
    if cu_chunk_seqlens is not None:
        checks.offsets("cu_chunk_seqlens", cu_chunk_seqlens, x)
    wanted = "none"
    if return_chunk_states:
        wanted = "spaced" if cu_chunk_seqlens is None else "own"
    return problem._replace(
        initial_states=initial_states is not None,
        state_dtype=checks.returned_dtype(state_dtype, x),
        chunk_states=wanted,
    )


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
    checks.floating("ssm_pool", ssm_pool, x, ("num_slots", *_STATE), (None, *problem.state_shape))
    checks.writable("ssm_pool", ssm_pool)
    checks.index("cache_indices", cache_indices, x, ("num_seqs",), (problem.num_seqs,))
    if has_initial_state is not None:
        checks.shape("has_initial_state", has_initial_state, ("num_seqs",), (problem.num_seqs,))
        checks.same_device("has_initial_state", has_initial_state, x)
        if has_initial_state.dtype != torch.bool:
            found = checks.short(has_initial_state.dtype)
            raise DtypeError(f"has_initial_state is {found}, expected bool; pass has_initial_state.bool().")
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
    batch, nheads, headdim = _sizes(x, ("batch", *_HEAD))
    ngroups, dstate = _projections(x, B, C, ("batch",), (batch,), nheads)
    slots, first = (batch, "batch") if state_batch_indices is None else (None, "num_slots")
    checks.floating("state", state, x, (first, *_STATE), (slots, nheads, headdim, dstate))
    checks.writable("state", state)
    checks.one_of_ranks("dt", dt, x, ("batch", *_HEAD), (batch, nheads, headdim), (2, 3))
    checks.one_of_ranks("A", A, x, _STATE, (nheads, headdim, dstate), (1, 3))
    for name, tensor in (("D", D), ("dt_bias", dt_bias)):
        if tensor is not None:
            checks.one_of_ranks(name, tensor, x, _HEAD, (nheads, headdim), (1, 2))
    if z is not None:
        checks.like_x("z", z, x)
    if state_batch_indices is not None:
        checks.index("state_batch_indices", state_batch_indices, x, ("batch",), (batch,))
    if out is not None:
        checks.output(out, x)
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


# What kernels read and write by rows, and the parameters of heads and tokens.
_ROW_TENSORS = ("x", "B", "C", "z", "out", "initial_states", "ssm_pool", "state")
_PARAMETERS = ("dt", "A", "log_decay", "D", "dt_bias", "initial_states")
_PER_HEAD = {"dt": 2, "A": 1, "dt_bias": 1}  # dimensions in which a decode step may vary


def with_layout(problem: Problem, tensors: dict[str, Any]) -> Problem:
    """Adds what a GPU kernel has to know of the tensors' dtypes and of where they lie, by their names in the public
    functions. Not for symbolic sizes: it reads strides and addresses."""
    given = {name: t for name, t in tensors.items() if isinstance(t, Tensor)}
    refused = []
    for name in _PARAMETERS:
        if name in given and given[name].dtype.itemsize > 4 >= problem.dtype.itemsize:
            refused.append(f"{name} is {checks.short(given[name].dtype)}, expected float32, bfloat16 or float16")
    rows = {name: given[name] for name in _ROW_TENSORS if name in given}
    for name, t in rows.items():
        if t.shape[-1] > 1 and t.stride(-1) != 1:
            refused.append(f"the last dimension of {name} has stride {t.stride(-1)}, expected 1")
    if problem.decode:
        for name, rank in _PER_HEAD.items():
            if name in given and varies_inside_a_head(given[name], rank):
                refused.append(
                    f"{name} must have one value for each head: pass (…, nheads) tensors, or expand them (stride 0) "
                    "over headdim and dstate"
                )
    misaligned = tuple(name for name, t in rows.items() if not _is_aligned(t))
    return problem._replace(refused=tuple(refused), misaligned=misaligned)


def varies_inside_a_head(tensor: Tensor, rank: int) -> bool:
    """Whether the dimensions behind the first `rank` hold more than one value."""
    inner = zip(tensor.shape[rank:], tensor.stride()[rank:], strict=True)
    return any(size > 1 and stride != 0 for size, stride in inner)


def _is_aligned(tensor: Tensor) -> bool:
    item = tensor.dtype.itemsize
    start = int(tensor.storage_offset()) * item if tensor.device.type == "meta" else tensor.data_ptr()
    return rows_are_aligned(item, tensor.shape, tensor.stride(), start)


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
    total_len, nheads, headdim = _sizes(x, ("total_len", *_HEAD))
    ngroups, dstate = _projections(x, B, C, ("total_len",), (total_len,), nheads)
    _discretisation(x, dt, A, dt_bias, dt_limit, ("total_len",), (total_len,), nheads)
    _skip_and_gate(x, D, z, (nheads, headdim))
    num_seqs = checks.offsets("query_start_loc", query_start_loc, x)
    if out is not None:
        checks.output(out, x)
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
        checks.positive("chunk_size", chunk_size),
        _dt_kind(dt, dt_softplus),
        _d_kind(D),
        z is not None,
    )


def _sizes(x: Tensor, axes: checks.Names) -> tuple[int, ...]:
    """The sizes of x, the tensor that all others are measured against."""
    sizes = tuple(x.shape)  # a plain tuple is taken apart several times faster than a torch.Size
    if len(sizes) != len(axes):
        raise ShapeError(f"x has {len(sizes)} dimensions {sizes}, expected {len(axes)} ({', '.join(axes)}); reshape x.")
    checks.floating("x", x, x, axes, sizes)
    for axis in (-2, -1):
        if sizes[axis] < 1:
            raise ShapeError(f"x has {axes[axis]} (axis {len(axes) + axis}) 0, expected at least 1; pass x with heads.")
    return sizes


def _projections(
    x: Tensor, B: Tensor, C: Tensor, leading: checks.Names, sizes: tuple[int, ...], nheads: int
) -> tuple[int, int]:
    """ngroups and dstate, from B and C of shape (*leading, ngroups, dstate)."""
    axes, axis = (*leading, "ngroups", "dstate"), len(leading)
    checks.like_dtype("B", B, x)
    checks.shape("B", B, axes, (*sizes, None, None))
    *_, ngroups, dstate = B.shape
    if dstate < 1:
        raise ShapeError(f"B has dstate (axis {axis + 1}) 0, expected at least 1; pass B with a state dimension.")
    if ngroups < 1 or nheads % ngroups:
        raise ShapeError(
            f"B has ngroups (axis {axis}) {ngroups}, expected a divisor of nheads {nheads}; "
            "pass B and C with one row for each group of heads."
        )
    checks.like_dtype("C", C, x)
    checks.shape("C", C, axes, (*sizes, ngroups, dstate))
    return ngroups, dstate


def _discretisation(
    x: Tensor,
    dt: Tensor | None,
    A: Tensor | None,
    dt_bias: Tensor | None,
    dt_limit: tuple[float, float],
    leading: checks.Names,
    sizes: tuple[int, ...],
    nheads: int,
) -> None:
    if dt is not None:
        checks.floating("dt", dt, x, (*leading, "nheads"), (*sizes, nheads))
    if A is not None:
        checks.floating("A", A, x, ("nheads",), (nheads,))
    if dt_bias is not None:
        checks.floating("dt_bias", dt_bias, x, ("nheads",), (nheads,))
    checks.bounds(dt_limit)


def _skip_and_gate(x: Tensor, D: Tensor | None, z: Tensor | None, head: tuple[int, int]) -> None:
    if D is not None:
        checks.one_of_ranks("D", D, x, _HEAD, head, (1, 2))
    if z is not None:
        checks.like_x("z", z, x)


def _dt_kind(dt: Tensor | None, softplus: bool) -> str:
    return "none" if dt is None else "softplus" if softplus else "plain"


def _d_kind(D: Tensor | None) -> str:
    return "none" if D is None else "head" if D.ndim == 1 else "channel"
