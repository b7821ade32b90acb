"""Around the launches of a call: which kernels the tensors need, and the views and the workspace that these take."""

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .compile import compiled
from .device import MULTIPROCESSORS
from .errors import UnsupportedError
from .kernels.dims import MAX_SIZE, ROWS, VECTOR_BYTES, Recurrence, has_f32x2, rows_are_aligned
from .kernels.sm100.config import Chunked
from .plan import Chunks
from .problem import varies_inside_a_head

_DTYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint32: "uint32",
}


class Operands(NamedTuple):
    """The tensors of one launch. Without `offsets` each row of the batch is a sequence, with them the sequences are
    packed in row 0 and `batch` is 1. Sequence s has state s, or state slots[s]. Strides are free, but for the last
    dimension of x, B, C, z, y and the states."""

    x: Tensor  # (batch, seqlen, nheads, headdim)
    dt: Tensor  # (batch, seqlen, nheads); the log decay where A is None
    A: Tensor | None  # (nheads,)
    B: Tensor  # (batch, seqlen, ngroups, dstate)
    C: Tensor
    D: Tensor | None  # (nheads, headdim)
    z: Tensor | None
    dt_bias: Tensor | None  # (nheads,)
    y: Tensor  # written; rows behind the last sequence stay as they are
    offsets: Tensor | None = None  # (num_seqs + 1,)
    initial: Tensor | None = None  # (states, nheads, headdim, dstate)
    final: Tensor | None = None  # written; may be `initial`
    slots: Tensor | None = None  # (num_seqs,)
    flags: Tensor | None = None  # (num_seqs,) bool: whether the sequence starts from its state

    @property
    def num_seqs(self) -> int:
        return self.x.shape[0] if self.offsets is None else self.offsets.shape[0] - 1


class Packed(NamedTuple):
    """What the recurrence kernel may leave of packed sequences besides their states. It also takes fewer initial states
    than there are sequences: those behind start from zero."""

    last: Tensor | None = None  # (1, nheads, headdim, dstate), written: the state behind the last token of all
    # (rows, nheads, headdim, dstate), written: states after every chunk of a sequence, its last token ends one.
    chunk_states: Tensor | None = None
    chunk_offsets: Tensor | None = None  # (rows + 1,): the chunks; without it they are every chunk_size tokens
    chunk_size: int = 0

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.last, self.chunk_states, self.chunk_offsets


NOTHING = Packed()
_LEFT = ("last", "chunk_states", "chunk_offsets")  # tensors of `Packed`
_TENSORS = (*Operands._fields, *_LEFT)


def recurrence(
    operands: Operands,
    arch: str,
    *,
    packed: Packed = NOTHING,
    softplus: bool = False,
    dt_limit: tuple[float, float] = (-float("inf"), float("inf")),
    pad_slot_id: int = -1,
    single: bool = False,
) -> None:
    """Runs the recurrence kernel on the current stream. `single`: a decode step, one token for each sequence."""
    if operands.num_seqs == 0:
        return
    tensors = (*operands, *packed.tensors)
    kernel, odd = _kernel(_geometries(tensors), operands.num_seqs, arch, softplus, single)
    if odd:
        named = zip(_TENSORS, tensors, strict=True)
        tensors = tuple(t if t is None or name not in odd else _dense_last(t) for name, t in named)
    chunk_size = min(packed.chunk_size, max(operands.x.shape[1], 1))  # a longer one ends with its sequence anyway
    compiled(kernel, arch)(*tensors, chunk_size, *dt_limit, pad_slot_id)


def chunked(
    operands: Operands,
    arch: str,
    chunks: Chunks,
    chunk_states: Tensor | None = None,
    softplus: bool = False,
    dt_limit: tuple[float, float] = (-float("inf"), float("inf")),
    pad_slot_id: int = -1,
    remembered: dict[Any, Any] | None = None,
) -> None:
    """Runs the chunked kernels on the current stream, as planned. `chunk_states` (rows, nheads, headdim, dstate) is
    written where the plan has them. `remembered` is for calls that differ in nothing but in whether they want states.
    """
    if operands.num_seqs == 0:
        return
    wanted = (operands.final is None, chunk_states is None)
    found = None if remembered is None else remembered.get(wanted)
    if found is None:
        states = None if chunk_states is None else chunk_states.dtype
        positive = dt_limit[1] >= 0 and (softplus or dt_limit[0] >= 0)
        kernels, odd = _chunked(_geometries(operands), chunks[:4], states, softplus, positive)
        found = compiled(kernels, arch), odd, _multiprocessors(operands.x.device, arch)
        if remembered is not None:
            remembered[wanted] = found
    function, odd, ctas = found
    if odd:
        operands = operands._replace(**{name: _dense_strides(getattr(operands, name)) for name in odd})
    workspace = torch.empty(chunks.workspace_bytes, dtype=torch.uint8, device=operands.x.device)
    function(*operands, chunk_states, workspace, chunks.tiles, *dt_limit, pad_slot_id, ctas)


def chunked_kernels(operands: Operands, chunks: Chunks, *, softplus: bool) -> Chunked:
    """The kernels that these tensors need where the plan is `chunks` and dt has no negative limit."""
    return _chunked(_geometries(operands), chunks[:4], None, softplus, True)[0]


def _multiprocessors(device: torch.device, arch: str) -> int:
    """CTAs that run at a time."""
    if device.type != "cuda":
        return MULTIPROCESSORS[arch]
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=4096)
def _chunked(
    geometries: tuple[Any, ...],
    choice: tuple[int, int, str, int],
    states: torch.dtype | None,
    softplus: bool,
    positive_steps: bool,
) -> tuple[Chunked, tuple[str, ...]]:
    """The kernels, and the operands with strides that no element needs and that the kernels do not take."""
    o = _named(geometries)
    D = o["D"]
    state_heads, scan_heads, local, chunk_tiles = choice
    kernels = Chunked(
        **_of_operands(o),
        softplus=softplus,
        channel_D=D is not None and D.strides[-1] != 0,
        local=local,
        state_heads=state_heads,
        scan_heads=scan_heads,
        chunk_tiles=chunk_tiles,
        chunk_states=None if states is None else _DTYPES[states],
        positive_steps=positive_steps and o["A"] is not None,
    )
    return kernels, tuple(name for name in ROWS if (row := o[name]) is not None and row.has_odd_strides)


def recurrence_kernel(
    operands: Operands, arch: str, *, packed: Packed = NOTHING, softplus: bool, single: bool
) -> Recurrence:
    """The kernel that these tensors need on `arch`; `UnsupportedError` with every reason why there is none."""
    tensors = (*operands, *packed.tensors)
    return _kernel(_geometries(tensors), operands.num_seqs, arch, softplus, single)[0]


def obstacles(operands: Operands) -> list[str]:
    """Why the recurrence kernel cannot run on these tensors, whatever the architecture."""
    return _obstacles(_named(_geometries(operands)), operands.num_seqs)


class _Geometry(NamedTuple):
    """What decides about kernels, of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    misalignment: int

    @property
    def name(self) -> str:
        return _DTYPES[self.dtype]

    def is_aligned(self, nbytes: int) -> bool:
        return rows_are_aligned(self.dtype.itemsize, self.shape, self.strides, self.misalignment, nbytes)

    @property
    def has_odd_strides(self) -> bool:
        """Whether some stride is no multiple of 16 bytes: where all rows are aligned, in a dimension of one element,
        for which torch allows any."""
        return any(stride * self.dtype.itemsize % VECTOR_BYTES for stride in self.strides[:-1])


def _geometries(tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    """The fields of a `_Geometry` for each tensor. They are looked up at every call: tuples without names, because
    those take twice as long to make."""
    return tuple([None if t is None else (t.dtype, t.shape, t.stride(), t.data_ptr() % VECTOR_BYTES) for t in tensors])


def _named(geometries: tuple[Any, ...]) -> dict[str, _Geometry | None]:
    """Those that are not given are None, as some may be that are."""
    named = (None if fields is None else _Geometry(*fields) for fields in geometries)
    return dict.fromkeys(_TENSORS) | dict(zip(_TENSORS, named, strict=False))


def _of_operands(o: dict[str, _Geometry | None]) -> dict[str, Any]:
    """What the configuration of any kernel says of its operands."""
    x, B = o["x"], o["B"]
    assert x is not None and B is not None
    dtypes = ("dt", "A", "dt_bias", "D", "initial", "final", "offsets", "slots")
    return {
        "headdim": x.shape[-1],
        "dstate": B.shape[-1],
        "dtype": x.name,
        "z": o["z"] is not None,
        "flags": o["flags"] is not None,
        **_dtypes(o, dtypes),
    }


def _dtypes(o: dict[str, _Geometry | None], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: None if (given := o[name]) is None else given.name for name in names}


@lru_cache(maxsize=4096)  # a call from a model's loop has been here before
def _kernel(
    geometries: tuple[Any, ...], num_seqs: int, arch: str, softplus: bool, single: bool
) -> tuple[Recurrence, tuple[str, ...]]:
    """The kernel, and the tensors whose last dimension has a stride that it does not take."""
    o = _named(geometries)
    if reasons := _obstacles(o, num_seqs):
        raise UnsupportedError(f"The recurrence kernel cannot run this call: {'; '.join(reasons)}.")
    rows = {name: row for name in ROWS if (row := o[name]) is not None}
    kernel = Recurrence(
        **_of_operands(o), **_dtypes(o, _LEFT), softplus=softplus, single=single, aligned=True, f32x2=has_f32x2(arch)
    )
    aligned = kernel.has_vectors and all(row.is_aligned(kernel.access_bytes(name)) for name, row in rows.items())
    odd = tuple(name for name, row in rows.items() if row.strides[-1] != 1)
    return replace(kernel, aligned=aligned), odd


def _obstacles(operands: dict[str, _Geometry | None], num_seqs: int) -> list[str]:
    found = []
    for name, tensor in operands.items():
        if tensor is None or tensor.dtype == torch.bool:
            continue
        if tensor.dtype not in _DTYPES:
            found.append(f"{name} is {str(tensor.dtype).removeprefix('torch.')}, expected float32, bfloat16 or float16")
        if name in ROWS and tensor.strides[-1] != 1 and tensor.shape[-1] > 1:
            found.append(f"the last dimension of {name} has stride {tensor.strides[-1]}, expected 1")
    x, B = operands["x"], operands["B"]
    assert x is not None and B is not None
    for name, size in (("headdim", x.shape[-1]), ("dstate", B.shape[-1])):
        if size > MAX_SIZE:
            found.append(f"{name} is {size}, expected at most {MAX_SIZE}")
    if max(num_seqs * x.shape[2] * -(-x.shape[-1] // 4), x.shape[1]) >= 2**31:
        found.append(f"{num_seqs} sequences of up to {x.shape[1]} tokens, expected fewer than 2^31")
    return found


def step_operands(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state_batch_indices: Tensor | None,
    out: Tensor,
) -> Operands:
    """Of `selective_state_update` (shapes as in `problem.state_update`), whose dt, A and dt_bias may be expanded;
    `UnsupportedError` where they vary inside a head."""
    slim = {"dt": (dt, 2), "A": (A, 1), "dt_bias": (dt_bias, 1)}
    heads = {name: None if tensor is None else per_head(tensor, rank) for name, (tensor, rank) in slim.items()}
    varying = [name for name, (tensor, _) in slim.items() if tensor is not None and heads[name] is None]
    if varying:
        raise UnsupportedError(
            f"{' and '.join(varying)} must have one value for each head on a GPU: pass (…, nheads) tensors, or expand "
            "them (stride 0) over headdim and dstate."
        )
    if D is not None and D.ndim == 1:
        D = D.unsqueeze(1).expand(-1, x.shape[-1])
    steps = heads["dt"]
    assert steps is not None
    return Operands(
        x=x.unsqueeze(1),
        dt=steps.unsqueeze(1),
        A=heads["A"],
        B=B.unsqueeze(1),
        C=C.unsqueeze(1),
        D=D,
        z=None if z is None else z.unsqueeze(1),
        dt_bias=heads["dt_bias"],
        y=out.unsqueeze(1),
        initial=state,
        final=state,
        slots=state_batch_indices,
    )


def per_head(tensor: Tensor, rank: int) -> Tensor | None:
    """The first `rank` dimensions of a tensor that is the same along the others, or None where it varies."""
    if varies_inside_a_head(tensor, rank):
        return None
    while tensor.ndim > rank:
        tensor = tensor[..., 0]
    return tensor


def _dense_strides(tensor: Tensor) -> Tensor:
    """With stride 0 in the dimensions of one element, but for the last dimension."""
    strides = (0 if size == 1 else stride for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False))
    return tensor.as_strided(tensor.shape, (*strides, 1))


def _dense_last(tensor: Tensor) -> Tensor:
    """With a stride of 1: the last dimension has one element, for which torch allows any."""
    return tensor.as_strided(tensor.shape, (*tensor.stride()[:-1], 1))
