"""chunk_state and state_passing: inputs, a host function, and the definition. Also a subject of mutation_score."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_ssd.compile import compiled
from cute_ssd.kernels.sm100.config import Chunked, Q, batched_tiles, packed_tiles

INF = float("inf")
EXTRA = 3  # tokens behind the last packed sequence
LOG2_E = 1.4426950408889634
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class States(Chunked):
    """chunk_state and state_passing without chunk_scan."""

    def build(self) -> tuple[Any, list[Any]]:
        import cutlass.cute as cute
        from cutlass import Float32, Int32, Int64

        from cute_ssd.kernels.arithmetic import numeric
        from cute_ssd.kernels.sm100.chunked import fake_operands

        tensors = fake_operands(self)
        for unused in ("C", "D", "z", "y"):
            del tensors[unused]
        nheads, tiles, dense = tensors["x"].shape[2], cute.sym_int32(), cute.runtime.make_fake_compact_tensor

        def states(dtype: str) -> Any:
            shape = (tiles, nheads, self.headdim, self.dstate)
            return dense(numeric(dtype), shape, stride_order=(3, 2, 1, 0), assumed_align=128)

        decay = dense(Float32, (tiles, nheads), stride_order=(1, 0), assumed_align=16)
        table = dense(Int32, (tiles, 4), stride_order=(1, 0), assumed_align=16) if self.offsets else None
        numbers = (Float32(0.0), Float32(0.0), Int64(0), Int32(0))
        stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
        return _kernels()(self), [
            *tensors.values(), states(self.local), states(self.dtype), decay, table, *numbers, stream,
        ]  # fmt: skip


@lru_cache
def _kernels() -> Any:
    """The compiler is imported when it is needed."""
    import cutlass.cute as cute
    from cutlass import Float32, Int32, Int64

    from cute_ssd.kernels.sm100.chunk_state import ChunkStateKernel
    from cute_ssd.kernels.sm100.state_passing import StatePassingKernel
    from cute_ssd.kernels.sm100.steps import Steps

    class Kernels:
        def __init__(self, config: Chunked) -> None:
            self.state, self.passing = ChunkStateKernel(config), StatePassingKernel(config)

        @cute.jit
        def __call__(self, x: cute.Tensor, dt: cute.Tensor, A: Any, B: cute.Tensor, dt_bias: Any, offsets: Any,
                     initial: Any, final: Any, slots: Any, flags: Any, chunk_states: Any, local: cute.Tensor,
                     incoming: cute.Tensor, decay: cute.Tensor, table: Any, dt_min: Float32, dt_max: Float32,
                     pad_slot: Int64, ctas: Int32, stream: Any) -> None:  # fmt: skip
            self.state(x, B, Steps(dt, A, dt_bias, dt_min, dt_max), offsets, local, decay, table, ctas, stream)
            self.passing(local, decay, x.shape[0], x.shape[1], offsets, initial, slots, flags, pad_slot, incoming,
                         final, chunk_states, ctas, stream)  # fmt: skip

    return Kernels


class Case(NamedTuple):
    """One call. `lengths` of packed sequences, or None: `batch` rows of `seqlen` tokens."""

    headdim: int = 64
    dstate: int = 64
    heads: int = 2  # of a work item
    nheads: int = 4
    ngroups: int = 1
    dtype: torch.dtype = BF16
    local: torch.dtype = F32
    lengths: tuple[int, ...] | None = None
    batch: int = 1
    seqlen: int = 200
    parameters: torch.dtype = F32  # of dt, A and dt_bias
    index: torch.dtype = torch.int32
    log_decay: bool = False
    odd_decays: bool = False  # growth, and resets
    softplus: bool = False
    bias: bool = False
    limit: tuple[float, float] = (0.0, INF)
    initial: torch.dtype | None = None
    final: torch.dtype | None = None
    pool: bool = False
    flags: bool = False
    chunk_tiles: int = 0
    pad: int = 0  # elements more in every row of x, B and dt
    ctas: int = 2
    seed: int = 0

    def __str__(self) -> str:
        changed = (f"{k}={v}" for k, v in self._asdict().items() if v != self._field_defaults[k])
        return " ".join(changed).replace("torch.", "") or "plain"

    @property
    def num_seqs(self) -> int:
        return self.batch if self.lengths is None else len(self.lengths)

    @property
    def all_lengths(self) -> tuple[int, ...]:
        return (self.seqlen,) * self.batch if self.lengths is None else self.lengths

    @property
    def slots(self) -> int:
        if self.lengths is None:
            return batched_tiles(self.batch, self.seqlen)
        return packed_tiles(sum(self.lengths) + EXTRA, self.num_seqs)

    def name(self, dtype: torch.dtype | None) -> str | None:
        return None if dtype is None else str(dtype).removeprefix("torch.")

    @property
    def config(self) -> States:
        parameters = self.name(self.parameters)
        assert parameters is not None
        return States(
            headdim=self.headdim,
            dstate=self.dstate,
            dtype=self.name(self.dtype) or "",
            dt=parameters,
            A=None if self.log_decay else parameters,
            dt_bias=parameters if self.bias else None,
            softplus=self.softplus,
            D=None,
            channel_D=False,
            z=False,
            initial=self.name(self.initial),
            final=self.name(self.final),
            offsets=None if self.lengths is None else self.name(self.index),
            slots=self.name(self.index) if self.pool else None,
            flags=self.flags,
            local=self.name(self.local) or "",
            state_heads=self.heads,
            scan_heads=self.heads,
            chunk_states="float32" if self.chunk_tiles else None,
            chunk_tiles=self.chunk_tiles,
        )


def aligned(*shape: int, dtype: torch.dtype, fill: float = float("nan")) -> Tensor:
    """Memory as a GPU aligns it, in the middle of more: `filled` says whether that is intact."""
    size, item = torch.Size(shape).numel(), dtype.itemsize
    storage = torch.full((size + 512 // item,), fill, dtype=dtype)
    start = (-storage.data_ptr()) % 128 // item + 128 // item
    return storage[start : start + size].view(shape)


def surroundings(tensor: Tensor) -> Tensor:
    """The bits of the storage outside of the tensor."""
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    outside = torch.ones(storage.shape, dtype=torch.bool)
    outside.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(False)
    return bits(storage[outside])


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


class Call(NamedTuple):
    x: Tensor
    dt: Tensor
    A: Tensor | None
    B: Tensor
    dt_bias: Tensor | None
    offsets: Tensor | None
    initial: Tensor | None
    final: Tensor | None
    slots: Tensor | None
    flags: Tensor | None
    chunk_states: Tensor | None
    local: Tensor
    incoming: Tensor
    decay: Tensor
    table: Tensor | None

    def __call__(self, case: "Case") -> None:
        """Inside of a session of the emulator."""
        compiled(case.config, "sm_100a")(*self, *case.limit, -1, case.ctas)


OUTPUTS = ("final", "chunk_states", "local", "incoming", "decay", "table")


def build(case: Case) -> Call:
    g = torch.Generator().manual_seed(case.seed)
    H, P, N = case.nheads, case.headdim, case.dstate
    lengths = case.all_lengths
    batch, seqlen = (case.batch, case.seqlen) if case.lengths is None else (1, sum(lengths) + EXTRA)
    tiles = case.slots

    def rows(count: int, size: int, dtype: torch.dtype) -> Tensor:
        wide = aligned(batch, seqlen, count * size + case.pad, dtype=dtype)
        view = wide[..., : count * size].unflatten(-1, (count, size))
        return view.copy_(torch.randn(view.shape, generator=g))

    dt = rows(H, 1, case.parameters)[..., 0]
    if case.log_decay:
        dt.copy_(dt.float() * 0.05 if case.odd_decays else -dt.float().abs() * 0.05)
        if case.odd_decays:
            dt[:, 70::250] = -INF
    elif not case.softplus:
        dt.copy_(dt.float().abs() * 0.1)
    offsets = slots = flags = initial = final = None
    if case.lengths is not None:
        offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=case.index)
    states = case.num_seqs + 2 * case.pool
    if case.pool:
        slots = torch.randperm(states, generator=g)[: case.num_seqs].to(case.index)
        slots[-1] = -1
        if case.num_seqs > 2:
            slots[1] = states + 5  # not in the pool
    if case.flags:
        flags = torch.rand(case.num_seqs, generator=g) < 0.5
    for dtype in {case.initial, case.final} - {None}:
        assert dtype is not None
        state = aligned(states, H * P * N + 8, dtype=dtype)[:, : H * P * N].unflatten(1, (H, P, N))
        state.copy_(torch.randn(state.shape, generator=g))
        initial = state if dtype == case.initial else initial
        final = state if dtype == case.final else final
    if not case.pool and initial is final and initial is not None:
        assert final is not None
        final = aligned(states, H, P, N, dtype=final.dtype)
    chunks = None
    if case.chunk_tiles:
        size = case.chunk_tiles * Q
        chunks = aligned(sum(lengths) // size + case.num_seqs, H, P, N, dtype=F32, fill=0.0)
    local = aligned(tiles, H, P, N, dtype=case.local)
    table = None
    if offsets is not None:
        table = torch.full((tiles, 4), -1, dtype=torch.int32)
    return Call(
        x=rows(H, P, case.dtype),
        dt=dt,
        A=None if case.log_decay else (-1 - 7 * torch.rand(H, generator=g)).to(case.parameters),
        B=rows(case.ngroups, N, case.dtype),
        dt_bias=torch.randn(H, generator=g).to(case.parameters) if case.bias else None,
        offsets=offsets,
        initial=initial,
        final=final,
        chunk_states=chunks,
        slots=slots,
        flags=flags,
        local=local,
        incoming=local if case.local == case.dtype else aligned(tiles, H, P, N, dtype=case.dtype),
        decay=aligned(tiles, H, dtype=F32),
        table=table,
    )


class TileOf(NamedTuple):
    slot: int
    sequence: int
    where: Any  # in (batch, seqlen)
    valid: int
    first: int


def tiles_of(case: Case) -> list[TileOf]:
    found, start = [], 0
    for s, length in enumerate(case.all_lengths):
        for t in range(-(-length // Q)):
            valid = min(Q, length - t * Q)
            if case.lengths is None:
                first, row, slot = t * Q, s, s * -(-case.seqlen // Q) + t
            else:
                first, row, slot = start + t * Q, 0, start // Q + s + t
            found.append(TileOf(slot, s, (row, slice(first, first + valid)), valid, first))
        start += length
    return found


def local_reference(case: Case, call: Call, tile: TileOf) -> tuple[Tensor, Tensor]:
    """(local (H, P, N), log2 of the decay (H,)) in fp64."""
    x, B, dt = (t[tile.where].double() for t in (call.x, call.B, call.dt))
    if call.A is None:
        step, log_decay = torch.ones_like(dt), dt
    else:
        step = dt if call.dt_bias is None else dt + call.dt_bias.double()
        step = torch.nn.functional.softplus(step) if case.softplus else step
        step = step.clamp(*case.limit)
        log_decay = step * call.A.double()
    total = log_decay.sum(0)
    behind = torch.cat((log_decay.flip(0).cumsum(0).flip(0)[1:], torch.zeros_like(total)[None]))
    weights = torch.exp(behind) * step
    B = B.repeat_interleave(case.nheads // case.ngroups, 1)
    return torch.einsum("jh,jhp,jhn->hpn", weights, x, B), total * LOG2_E


def close(actual: Tensor, truth: Tensor, worst: float, rms: float) -> None:
    assert torch.isfinite(actual).all()
    error = (actual.double() - truth).abs()
    assert error.max() <= worst * truth.abs().max(), (error.max() / truth.abs().max()).item()
    ratio = error.norm() / truth.norm().clamp(min=1e-30)
    assert ratio <= rms, ratio.item()


ROUNDING = {F32: 2.0**-24, BF16: 2.0**-8, F16: 2.0**-11}  # relative, at most; 0.4 of it in the mean square


def verify(case: Case, call: Call, start: Tensor | None, old: Tensor | None) -> None:
    """`start`, `old`: the initial and the final states before the call."""
    tiles = tiles_of(case)
    rounding, narrow = ROUNDING[case.dtype], ROUNDING[case.local]
    if call.table is not None:
        expected = torch.zeros_like(call.table)
        for tile in tiles:
            expected[tile.slot, 1], expected[tile.slot, 2] = tile.first, tile.valid
        assert torch.equal(call.table, expected)
    unused = sorted(set(range(call.local.shape[0])) - {tile.slot for tile in tiles})
    for tensor in (call.local, call.incoming, call.decay):
        assert tensor[unused].isnan().all()
    carries = {}
    chunk = 0
    chunks = None if call.chunk_states is None else torch.zeros_like(call.chunk_states, dtype=torch.float64)
    for s in range(case.num_seqs):
        state = s if call.slots is None else int(call.slots[s])
        there = start is not None and 0 <= state < start.shape[0] and (call.flags is None or bool(call.flags[s]))
        carries[s] = (
            start[state].double() if there and start is not None else torch.zeros(call.local.shape[1:]).double()
        )
        mine = [tile for tile in tiles if tile.sequence == s]
        for index, tile in enumerate(mine):
            local, decay = local_reference(case, call, tile)
            close(call.decay[tile.slot].clamp(min=-126), decay.clamp(min=-126), 2e-6, 2e-6)  # less is 0 in fp32
            if call.local is not call.incoming:
                close(call.local[tile.slot], local, rounding + narrow, 0.6 * (rounding + narrow))
                local, decay = call.local[tile.slot].double(), call.decay[tile.slot].double()
            if carries[s].any():
                close(call.incoming[tile.slot], carries[s], 2 * rounding, rounding)
            else:
                assert not call.incoming[tile.slot].any()
            carries[s] = torch.exp2(decay)[:, None, None] * carries[s] + local
            if chunks is not None and ((index + 1) % case.chunk_tiles == 0 or index + 1 == len(mine)):
                chunks[chunk] = carries[s]
                chunk += 1
    exact = 1e-6 if call.local is not call.incoming else 2 * rounding
    if chunks is not None and call.chunk_states is not None:
        close(call.chunk_states, chunks, exact, exact)
    if call.final is not None and old is not None:
        expected = old.double()
        for s in range(case.num_seqs):
            state = s if call.slots is None else int(call.slots[s])
            if call.slots is None or (0 <= state < old.shape[0] and case.all_lengths[s]):
                expected[state] = carries[s]
        touched = (expected != old.double()).flatten(1).any(1)
        assert torch.equal(bits(call.final[~touched]), bits(old[~touched]))
        allowed = exact + ROUNDING[call.final.dtype]
        close(call.final[touched], expected[touched], allowed, allowed)


# Few CTAs with several items of three slabs, so that every ring goes round inside of an item and across; tails.
SUBJECTS = {
    "packed": Case(
        dstate=128, heads=6, nheads=6, lengths=(140, 300, 0, 61, 256), softplus=True, bias=True, initial=F32
    ),
    "wide": Case(
        headdim=80, dstate=256, heads=3, nheads=3, batch=2, seqlen=450, log_decay=True, final=BF16, local=BF16
    ),
}


def run(subject: str) -> tuple[Case, Call, Tensor | None, Tensor | None]:
    case = SUBJECTS[subject]
    call = build(case)
    start, old = (None if t is None else t.clone() for t in (call.initial, call.final))
    call(case)
    return case, call, start, old


def check(result: tuple[Case, Call, Tensor | None, Tensor | None]) -> None:
    verify(*result)
