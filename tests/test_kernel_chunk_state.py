"""chunk_state and state_passing: their resources from the machine code, their numbers and manners on the emulator.

Axes of coverage: headdim, dstate, heads of an item, groups, dtypes of x, of the parameters, of what passes between
tiles and of the states, rows or packed sequences, their lengths, the pool with its slots and flags, chunk states, form
of the decays and bias, pitch of the rows, CTAs. By default `CASES`, in which every value of an axis occurs somewhere,
each under one schedule. Slow ones have every headdim with every dstate, packed, under three schedules. Every two values
of different axes meet in test_chunked.py, where the three kernels run one after the other.
"""

import re

import pytest
import torch
from torch import Tensor

import cute_ssd
from cute_ssd.compile import compiled
from cute_ssd.kernels.sm100.config import (
    DSTATES,
    HEADDIMS,
    SHARED_BYTES,
    TENSOR_COLUMNS,
    state_special_functions,
)
from cute_ssd.kernels.sm100.state_passing import PIECES, RESIDENT, THREADS, VECTOR, StatePassingKernel
from cute_ssd.machine_code import kernel_resources

from .executors import on_gpu
from .kernels.chunk_state import BF16, F16, F32, INF, OUTPUTS, Call, Case, bits, build, surroundings, tiles_of, verify

pytest.importorskip("cutlass")

ARCH = "sm_100a"
SLOW, KERNEL = pytest.mark.slow, pytest.mark.kernel


def run(case: Case, call: Call, seed: int = 0) -> None:
    outputs = [t for name in OUTPUTS if (t := getattr(call, name)) is not None]
    before = [surroundings(t) for t in outputs]
    with on_gpu(ARCH, exactly=True, seed=seed, tensor_fences=True) as report:
        call(case)
    assert not report.findings
    assert all(torch.equal(a, surroundings(t)) for a, t in zip(before, outputs, strict=True))


def compare(case: Case, seed: int) -> Call:
    call = build(case)
    start, old = (None if t is None else t.clone() for t in (call.initial, call.final))
    run(case, call, seed)
    verify(case, call, start, old)
    return call


LENGTHS = (1, 15, 0, 16, 17, 0, 0, 127, 128, 129)
CASES = [
    Case(),
    Case(dstate=128, heads=4, nheads=8, seqlen=300, batch=2, initial=F32, final=F32, bias=True, softplus=True, pad=8),
    Case(dstate=256, heads=2, nheads=2, seqlen=257, local=BF16, final=BF16, initial=F32, seed=1, limit=(0.02, 0.09)),
    Case(lengths=LENGTHS, pool=True, flags=True, initial=F32, final=F32, seed=2, pad=16, heads=1, nheads=2),
    Case(headdim=32, heads=4, lengths=(0, 300, 65), index=torch.int64, chunk_tiles=1, final=F32, log_decay=True),
    Case(headdim=32, heads=3, nheads=6, ngroups=2, dtype=F16, local=F16, parameters=F16, initial=F16, final=F16),
    Case(headdim=32, heads=2, nheads=2, dtype=F16, parameters=BF16, dstate=128, seqlen=17, batch=3, seed=2),
    Case(headdim=80, heads=2, dstate=128, lengths=(129, 40), initial=BF16, final=BF16, pool=True, seed=1, pad=8),
    Case(headdim=96, heads=1, nheads=2, ngroups=2, dtype=F16, seqlen=127, log_decay=True, parameters=F16, ctas=9),
    Case(headdim=128, heads=2, dstate=256, lengths=(16, 200), dtype=F16, local=F16, chunk_tiles=2, initial=F32),
    Case(headdim=128, heads=1, nheads=1, seqlen=64, batch=4, final=F32, softplus=True, parameters=BF16, seed=2),
    Case(heads=3, nheads=3, dstate=128, lengths=(128, 1, 256), index=torch.int64, pool=True, initial=F32, final=F32),
    Case(log_decay=True, odd_decays=True, seqlen=400, initial=F32, final=F32),
    Case(nheads=2, seqlen=1300, initial=F32, final=F32, chunk_tiles=3, batch=2),
]
SLOW_CASES = [
    Case(
        headdim=headdim,
        dstate=dstate,
        heads=heads,
        nheads=2 * heads,
        ngroups=1 + seed % 2,
        dtype=(BF16, F16)[seed % 2],
        local=F32 if seed % 3 else (BF16, F16)[seed % 2],
        lengths=(*LENGTHS, 300, 31),
        parameters=(F32, BF16, F16)[seed % 3],
        index=(torch.int32, torch.int64)[seed % 2],
        log_decay=seed % 4 == 3,
        softplus=seed % 4 < 2,
        bias=seed % 4 < 3,
        initial=(F32, BF16, F16, F32)[seed % 4],
        final=(F32, BF16, F16, BF16)[seed % 4],
        pool=seed % 4 < 3,
        flags=seed % 2 == 0,
        chunk_tiles=seed % 3,
        pad=8 * (seed % 3),
        ctas=1 + seed % 3,
        seed=seed,
    )
    for seed, (headdim, dstate, heads) in enumerate(
        (headdim, dstate, heads)
        for headdim in HEADDIMS
        for dstate, heads in zip(DSTATES, (5, 1, 4) if headdim in (32, 96) else (2, 6, 3), strict=True)
    )
]


PASSING_KINDS = ("load global", "store global", "float x2", "shuffle", "special function")


def passing_instructions(case: Case, call: Call) -> dict[str, int]:
    """Warp instructions of state_passing. A thread has 16 elements of a state: loads of 8 of a tile, other accesses of
    16 bytes, a multiply-add for two. A power of 2 and a load of decays are for as many tiles as are on their way."""
    kernel = StatePassingKernel(case.config)
    groups = max(1, min(case.num_seqs, RESIDENT * case.ctas // (kernel.blocks * case.nheads)))
    found = dict.fromkeys(PASSING_KINDS, 0)
    # What describes a sequence is read for each, and once more by those that share a head, behind their last one.
    described = 2 * (call.offsets is not None) + (call.slots is not None) + (call.flags is not None)
    found["load global"] = (case.num_seqs + groups) * described

    def accesses(states: Tensor | None) -> int:
        return 0 if states is None else PIECES * VECTOR * states.element_size() // 16

    for s in range(case.num_seqs):
        tiles = sum(tile.sequence == s for tile in tiles_of(case))
        rounds, chunks = -(-tiles // kernel.ahead), -(-tiles // case.chunk_tiles) if case.chunk_tiles else 0
        states = call.initial if call.initial is not None else call.final
        live = call.slots is None or (states is not None and tiles > 0 and 0 <= int(call.slots[s]) < states.shape[0])
        read = live and (call.flags is None or bool(call.flags[s]))
        found["load global"] += tiles * PIECES + rounds + read * accesses(call.initial)
        if call.chunk_states is not None and call.offsets is not None:  # the sum, over lanes, of the rows before
            found["load global"] += 2 * -(-s // 32)
            found["shuffle"] += 5
        stored = tiles * accesses(call.incoming) + live * accesses(call.final) + chunks * accesses(call.chunk_states)
        found["store global"] += stored
        found["float x2"] += tiles * PIECES * VECTOR // 2
        found["shuffle"] += tiles  # a decay from the lane that loaded it
        found["special function"] += rounds
    warps = kernel.blocks * case.nheads * THREADS // 32
    return {kind: warps * count for kind, count in found.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_structure(case: Case) -> None:
    """No spills; shared and tensor memory, tensor-core, TMA and MUFU instructions as `config` has them."""
    config = case.config
    sizes = config.state_sizes
    assert sizes.shared_bytes <= SHARED_BYTES and sizes.tensor_columns <= TENSOR_COLUMNS
    with cute_ssd.emulate(ARCH, sanitize=False) as report:
        build(case)(case)
        made = compiled(config, ARCH)
    found = kernel_resources(made.machine_code)
    assert not any(kernel.local_bytes for kernel in found.values()), found
    assert found["chunk_state_0"].registers <= 96 and found["state_passing_1"].registers <= 128, found
    (columns,) = re.findall(r"tcgen05\.alloc\S*\s+\[\S+\], (%r\d+);", made.ptx)
    assert re.search(rf"mov\.b32\s+{columns}, {sizes.tensor_columns};", made.ptx)
    state, passing = report.launches
    assert state.shared_bytes == sizes.shared_bytes and not passing.shared_bytes
    tiles = [tile.valid for tile in tiles_of(case)]
    groups = case.nheads // case.heads
    assert {kind: passing.instructions[kind] for kind in PASSING_KINDS} == passing_instructions(case, build(case))
    counts = state.instructions
    assert counts["tensor mma"] == groups * sum(map(sizes.mma_instructions, tiles))
    assert counts["tensor load"] == groups * sum(map(sizes.tma_instructions, tiles))
    assert counts["special function"] == case.nheads * len(tiles) * state_special_functions(config)
    # A load of 64 columns reaches the lanes of a warp, a store and an ldmatrix half as many.
    items, parts = groups * len(tiles) * sizes.slabs, groups * sum(-(-valid // 64) for valid in tiles) * sizes.slabs
    assert counts["load tensor"] == items * -(-sizes.lanes // 32) * case.dstate // 64
    assert counts["load matrix"] == parts * sizes.lanes // 16 * 4
    cleared = (128 - sizes.lanes) // 16 * sizes.a_stages * min(case.ctas, groups * case.slots)
    assert counts["store tensor"] == parts * sizes.lanes // 16 + cleared


@pytest.mark.parametrize("case", CASES[1:3], ids=str)
def test_no_spills_on_sm_103a(case: Case) -> None:
    found = kernel_resources(compiled(case.config, "sm_103a").machine_code)
    assert not any(kernel.local_bytes for kernel in found.values()), found


@SLOW
@pytest.mark.parametrize("case", SLOW_CASES, ids=str)
def test_no_spills_elsewhere(case: Case) -> None:
    found = kernel_resources(compiled(case.config, ARCH).machine_code)
    assert not any(kernel.local_bytes for kernel in found.values()), found


@KERNEL
@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers(case: Case) -> None:
    compare(case, case.seed % 3)


@KERNEL
@SLOW
@pytest.mark.parametrize("case", SLOW_CASES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_numbers_in_schedules(case: Case, seed: int) -> None:
    compare(case, seed)


PACKED = CASES[3]
SCHEDULED = [CASES[1], PACKED, CASES[9]]


def outputs(case: Case, seed: int) -> list[Tensor]:
    call = build(case)
    run(case, call, seed)
    return [bits(t) for name in OUTPUTS if (t := getattr(call, name)) is not None]


@KERNEL
@pytest.mark.parametrize("case", SCHEDULED, ids=str)
def test_bits_do_not_depend_on_the_schedule(case: Case) -> None:
    first = outputs(case, 0)
    for seed in (1, 2):
        assert all(torch.equal(a, b) for a, b in zip(first, outputs(case, seed), strict=True))


@KERNEL
@pytest.mark.parametrize("junk", [float("nan"), INF])
def test_sequences_do_not_see_each_other(junk: float) -> None:
    case = PACKED._replace(flags=False)
    alone, together = build(case), build(case)
    run(case, alone)
    assert case.lengths is not None and together.offsets is not None and together.slots is not None
    for s in range(0, case.num_seqs, 2):
        mine = slice(int(together.offsets[s]), int(together.offsets[s + 1]))
        for tensor in (together.x, together.B, together.dt):
            tensor[:, mine] = junk
    for tensor in (together.x, together.B, together.dt):
        tensor[:, int(together.offsets[-1]) :] = junk
    run(case, together)
    clean = [tile.slot for tile in tiles_of(case) if tile.sequence % 2]
    for name in ("local", "incoming", "decay"):
        assert torch.equal(bits(getattr(alone, name)[clean]), bits(getattr(together, name)[clean]))
    states = [int(together.slots[s]) for s in range(1, case.num_seqs, 2) if 0 <= int(together.slots[s]) < case.num_seqs]
    assert alone.final is not None and together.final is not None
    assert torch.equal(bits(alone.final[states]), bits(together.final[states]))


@KERNEL
def test_heads_and_rows_do_not_see_each_other() -> None:
    case = Case(headdim=32, heads=4, ngroups=2, nheads=8, batch=2)
    alone, together = build(case), build(case)
    run(case, alone)
    together.x[:, :, 1::2], together.x[0] = float("nan"), float("nan")
    together.dt[:, :, 1::2] = float("nan")
    run(case, together)
    assert torch.equal(bits(alone.local[2:, ::2]), bits(together.local[2:, ::2]))


@KERNEL
def test_nan_steps_reach_the_state() -> None:
    case = Case(softplus=True, bias=True, limit=(0.001, 0.1), seqlen=256, final=F32)
    call = build(case)
    call.dt[:, 5, 1] = float("nan")
    run(case, call)
    assert call.final is not None
    assert call.local[0, 1].isnan().all() and call.final[0, 1].isnan().all()
    assert not call.local[1].isnan().any() and not call.final[0, ::2].isnan().any()


@pytest.mark.parametrize(
    "offsets", [(0, 2000, 90, 300), (0, -70, 10**6, 5), (350, 340, 2**31 - 1, -(2**31)), (7, 7, 9, 9)]
)
def test_wrong_offsets_stay_inside(offsets: tuple[int, ...]) -> None:
    case = Case(lengths=(100, 150, 101), final=F32, initial=F32, chunk_tiles=1)
    call = build(case)
    assert call.offsets is not None
    call.offsets.copy_(torch.tensor(offsets))
    written = [t for name in OUTPUTS if (t := getattr(call, name)) is not None]
    before = [surroundings(t) for t in written]
    with cute_ssd.emulate(ARCH, keep_going=True, tensor_fences=True) as report:
        call(case)
    # Sequences that overlap write the same states.
    assert {finding.kind for finding in report.findings} <= {"global race"}
    assert all(torch.equal(a, surroundings(t)) for a, t in zip(before, written, strict=True))
