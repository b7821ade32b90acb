"""chunk_scan alone: its resources from the machine code, its numbers and manners on the emulator.

Axes of coverage: headdim, dstate, heads of an item, items of a tile, groups, dtypes of x and of the parameters, D, z,
form of the decays and bias, rows or packed sequences with tails of any length, unused slots, pitch of the rows, CTAs.
By default two cases, packed bf16 of 64 x 128 and fp16 of 80 x 128 with an odd number of heads. Slow ones have every
headdim with every dstate, and every value of the other axes somewhere. Every two values of different axes meet in
test_chunked.py, where the three kernels run one after the other.
"""

import mmap
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_ssd
from cute_ssd.compile import compiled
from cute_ssd.kernels.sm100.config import DSTATES, HEADDIMS, SHARED_BYTES, TENSOR_COLUMNS, Q
from cute_ssd.kernels.sm100.scan_layout import (
    EPILOGUE_REGISTERS,
    SEGSUM_REGISTERS,
    THIN_REGISTERS,
    THREADS,
    ScanLayout,
    scan_layout,
    special_functions,
)
from cute_ssd.machine_code import resources, stack_frames

from .executors import on_gpu
from .kernels.chunk_scan import BF16, F16, Call, Case, build, expected

pytest.importorskip("cutlass")

NAN, INF = float("nan"), float("inf")
KERNEL = pytest.mark.kernel
REGISTERS = 65536  # of a multiprocessor
SEEDS = (0, 1, 2)  # an eager, a late and a priority schedule

PACKED = Case(lengths=(300, 1, 130), unused=1, softplus=True, bias=True, D="head", heads=4, ctas=2)
LOG_DECAY = Case(headdim=64, dstate=64, heads=2, log_decay=True, seqlen=Q, limit=(0.0, INF))
CASES = [PACKED, Case(headdim=80, dstate=128, heads=3, seqlen=129, dtype=F16, D="channel", z=True, ctas=2)]
MORE_CASES = [
    Case(headdim=32, dstate=64, heads=4, items=2, seqlen=129, D="head", softplus=True),
    Case(headdim=32, dstate=128, heads=8, seqlen=300, batch=2, ctas=1, parameters=BF16, dtype=F16),
    Case(headdim=32, dstate=256, heads=6, seqlen=1, z=True, D="channel", log_decay=True),
    Case(headdim=64, dstate=64, heads=1, seqlen=15, D="channel", pad=8, limit=(0.01, 0.05)),
    Case(headdim=64, dstate=128, heads=3, items=2, seqlen=260, ngroups=2, log_decay=True, D="head", ctas=3, dtype=F16),
    Case(headdim=64, dstate=256, heads=4, seqlen=300, D="channel", z=True, bias=True, softplus=True, ctas=2, pad=16),
    Case(headdim=80, dstate=64, heads=4, seqlen=16, D="head", bias=True, parameters=BF16, items=2),
    Case(headdim=80, dstate=128, heads=2, lengths=(17, 129), unused=1, dtype=F16, z=True, ctas=1),
    Case(headdim=80, dstate=128, heads=4, lengths=(40, 129), D="head", z=True, softplus=True, bias=True),
    Case(headdim=80, dstate=256, heads=7, lengths=(40, 129), D="head", z=True, softplus=True, bias=True, ctas=3),
    Case(headdim=80, dstate=256, heads=1, items=3, seqlen=127, softplus=True, positive=False, D="head", ctas=2),
    Case(headdim=96, dstate=64, heads=1, items=3, seqlen=128, log_decay=True, D="head", parameters=BF16, z=True),
    Case(headdim=96, dstate=128, heads=4, lengths=(1, 16, 127), ngroups=2, D="channel", softplus=True, pad=8),
    Case(headdim=96, dstate=256, heads=2, seqlen=257, dtype=F16, bias=True, D="head", ctas=1),
    Case(headdim=128, dstate=64, heads=8, seqlen=400, dtype=F16, D="channel", parameters=BF16, ctas=2),
    Case(headdim=128, dstate=128, heads=2, seqlen=17, ngroups=2, z=True, softplus=True, bias=True, D="head"),
    Case(headdim=128, dstate=256, heads=3, lengths=(200, 129), positive=False, log_decay=True, ctas=2, unused=2),
]
ALL = [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE_CASES)]


def text(case: Any) -> str:
    return ",".join(f"{name}={value}" for name, value in case._asdict().items() if value != Case._field_defaults[name])


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16)


def run(call: Call, seed: int = 0, **options: Any) -> Tensor:
    """y, with NaN where nothing was written; no finding, and no byte around y has changed."""
    storage = call.y.untyped_storage()
    whole = torch.empty(0, dtype=call.y.dtype).set_(storage)
    whole.fill_(NAN)
    with on_gpu("sm_100a", exactly=True, seed=seed, tensor_fences=True, **options) as report:
        call()
    assert not report.findings
    found = call.y.clone()
    call.y.fill_(NAN)
    assert whole.isnan().all()
    return found


def compare(y: Tensor, call: Call) -> None:
    """Written where it should be, at most twice as wrong as torch in 16 bits, as a whole and where it is worst."""
    truth, eager = expected(call), expected(call, eager=True)
    written = ~truth.isnan()
    assert torch.equal(~y.isnan(), written)
    y, truth, eager = y.double()[written], truth[written], eager[written]
    assert (y - truth).norm() <= 2 * (eager - truth).norm()
    ulp = torch.finfo(call.y.dtype).eps * truth.abs().max()
    assert (y - truth).abs().max() <= 2 * (eager - truth).abs().max() + ulp


@KERNEL
@pytest.mark.parametrize("case", ALL, ids=text)
def test_numbers(case: Case) -> None:
    call = build(case)
    outputs = [run(call, seed) for seed in SEEDS]
    compare(outputs[0], call)
    assert all(torch.equal(bits(outputs[0]), bits(y)) for y in outputs)


@KERNEL
def test_every_tail() -> None:
    """On one compiled kernel: a tile may have any number of tokens and begin anywhere."""
    case = PACKED._replace(lengths=(1, 15, 16, 17, 31, 33, 127, 128, 129, 64), heads=4, unused=0, ctas=3)
    call = build(case)
    compare(run(call), call)


# ---- what belongs to others ------------------------------------------------------------------------------------------


@KERNEL
@pytest.mark.parametrize("poison", [NAN, INF])
def test_sequences_and_heads_never_see_another(poison: float) -> None:
    case = PACKED._replace(lengths=(130, 17, 16, 130, 145), D="head")
    clean = run(build(case))
    call = build(case)
    at, same = 0, torch.ones(clean.shape, dtype=torch.bool)
    for number, length in enumerate(case.lengths or ()):
        if number % 2:
            for tensor in (call.x, call.B, call.C, call.dt):
                tensor[:, at : at + length] = poison
            same[:, at : at + length] = False
        at += length
    for tensor in (call.x, call.B, call.C, call.dt):  # behind the last sequence
        tensor[:, at:] = poison
    assert call.table is not None
    for slot, (_, _, valid, _) in enumerate(call.table.tolist()):
        if not valid:
            call.incoming[slot] = poison
    call.x[:, :, 1] = call.dt[:, :, 1] = call.incoming[:, 1] = poison
    same[:, :, 1] = False
    y = run(call)
    assert torch.equal(bits(y)[same], bits(clean)[same])


@KERNEL
def test_no_slot_in_use() -> None:
    call = build(PACKED)
    assert call.table is not None
    call.table.zero_()
    for seed in SEEDS:
        assert run(call, seed).isnan().all()


# ---- decays that are not ordinary ------------------------------------------------------------------------------------


@KERNEL
@pytest.mark.parametrize("log_decay", [-1e-5, -0.7, -3.0, -200.0, -1e30, 0.3, 0.0])
def test_log_decays(log_decay: float) -> None:
    """That hardly do anything, vanish within a tile or a token, and let the state grow."""
    call = build(LOG_DECAY)
    noise = torch.rand(call.dt.shape, generator=torch.Generator().manual_seed(1))
    call.dt.copy_(log_decay * (0.5 + noise))
    compare(run(call), call)


@KERNEL
def test_log_decays_of_all_sizes() -> None:
    """A token that forgets everything must not spoil the decays between others."""
    call = build(LOG_DECAY)
    call.dt[:, ::5] = -1e4
    call.dt[:, 3::7] = 0.2
    call.dt[:, 4::11] = -INF
    y, truth = run(call).double(), expected_by_recurrence(call)
    assert (y - truth).norm() <= 4e-3 * truth.norm()


def expected_by_recurrence(call: Call) -> Tensor:
    """Of log decays: no sums of them, which float64 would lose small ones in as well."""
    y = torch.empty(call.x.shape, dtype=torch.float64)
    group = torch.arange(call.case.nheads) // call.case.heads
    x, B, C = call.x.double(), call.B[:, :, group].double(), call.C[:, :, group].double()
    for row, first, valid, slot in call.tiles():
        state = call.incoming[slot].double()
        for t in range(first, first + valid):
            state = call.dt[row, t].double().exp()[:, None, None] * state + x[row, t, :, :, None] * B[row, t, :, None]
            y[row, t] = (state * C[row, t, :, None]).sum(-1)
    return y


@KERNEL
@pytest.mark.parametrize("positive", [True, False])
def test_steps(positive: bool) -> None:
    """Zero, tiny and huge steps; where they may be negative, also such."""
    call = build(Case(headdim=64, dstate=64, heads=2, seqlen=Q, positive=positive, limit=(-INF, INF), D="head"))
    g = torch.Generator().manual_seed(2)
    values = torch.tensor([0.0, 1e-30, 1e-5, 0.01, 0.1, 1.0, 30.0, 1e4])
    call.dt.copy_(values[torch.randint(len(values), call.dt.shape, generator=g)])
    if not positive:
        assert call.A is not None
        call.A.fill_(-0.01)
        call.dt.copy_(torch.randn(call.dt.shape, generator=g))
    compare(run(call), call)


@KERNEL
@pytest.mark.parametrize("case", [LOG_DECAY, PACKED._replace(lengths=(Q,), unused=0)], ids=text)
@pytest.mark.parametrize("token", [0, 5, 37, 100])
def test_a_nan_step_reaches_y(case: Case, token: int) -> None:
    call = build(case)
    clean = run(call)
    call.dt[:, token, 0] = NAN
    y = run(call)
    assert y[:, token:Q, 0].isnan().all()
    assert torch.equal(bits(y[:, :, 1:]), bits(clean[:, :, 1:]))


def test_offsets_beyond_31_bits() -> None:
    """Rows of the batch further apart than 2^31 elements, in memory that is mostly not there."""

    def far(tensor: Tensor) -> Tensor:
        pitch = 2**31 + 64
        memory = mmap.mmap(-1, (pitch + tensor[0].numel()) * tensor.element_size())
        storage = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype)
        return storage.as_strided(tensor.shape, (pitch, *tensor.stride()[1:])).copy_(tensor)

    case = Case(headdim=32, dstate=64, heads=1, batch=2, seqlen=20, z=True, D="channel")
    call = build(case)
    near = run(call)
    moved = {name: far(getattr(call, name)) for name in ("x", "B", "C", "z", "y", "dt")}
    call = call._replace(**moved)
    with cute_ssd.emulate("sm_100a", sanitize=False):
        call()
    assert torch.equal(bits(call.y), bits(near))


# ---- structure -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ALL, ids=text)
def test_structure(case: Case) -> None:
    """No spills; registers, memory, tensor-core, TMA and MUFU instructions as scan_layout has them."""
    call, layout = build(case), scan_layout(case.config)
    with cute_ssd.emulate("sm_100a", sanitize=False) as report:
        call()
        made = compiled(case.config, "sm_100a")
    found = stack_frames(made.machine_code)
    assert found and not any(found.values())
    # All threads start with as many as the machine code says; then each warpgroup takes what its role has.
    assert resources(made.machine_code).registers * THREADS <= REGISTERS
    budgets = [int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+);", made.ptx)]
    assert sorted(budgets) == sorted([THIN_REGISTERS, SEGSUM_REGISTERS, EPILOGUE_REGISTERS])
    assert 128 * (THIN_REGISTERS + 2 * SEGSUM_REGISTERS + EPILOGUE_REGISTERS) <= REGISTERS
    (columns,) = re.findall(r"tcgen05\.alloc\S*\s+\[\S+\], (%r\d+);", made.ptx)
    assert re.search(rf"mov\.b32\s+{columns}, {layout.tensor_columns};", made.ptx)
    assert layout.tensor_columns <= TENSOR_COLUMNS
    (launch,) = report.launches
    assert launch.shared_bytes == layout.shared_bytes
    tiles = [valid for _, _, valid, _ in call.tiles()]
    groups = case.nheads // case.heads
    counts = launch.instructions
    assert counts["tensor mma"] == groups * sum(map(layout.mma_instructions, tiles))
    assert counts["tensor load"] == groups * len(tiles) * layout.tma_instructions
    assert counts["special function"] == case.nheads * len(tiles) * special_functions(case.config)


def test_layouts() -> None:
    for headdim in HEADDIMS:
        for dstate in DSTATES:
            for heads in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16):
                layout = ScanLayout(headdim, dstate, heads)
                assert layout.shared_bytes <= SHARED_BYTES
                assert layout.slabs >= 2 and layout.slab_column + layout.slabs * layout.slab_columns <= 512
                assert layout.x_stages >= max(2, layout.slab_heads)  # else the vectors of a slab might never come
                assert layout.c_stages >= layout.blocks and layout.ring_stages >= 2


def test_traffic_of_shared_memory() -> None:
    """Clocks of its port for a head of a tile, at 128 bytes a clock; see the bench."""
    for dstate, limit in ((128, 1010), (256, 1650)):
        case = Case(headdim=64, dstate=dstate, heads=4, softplus=True, bias=True, D="head", ctas=1)
        counts = []
        for seqlen in (2 * Q, 4 * Q):
            call = build(case._replace(seqlen=seqlen))
            with cute_ssd.emulate("sm_100a", sanitize=False) as report:
                call()
            counts.append(report.launches[0].instructions)
        accesses = sum(counts[1][kind] - counts[0][kind] for kind in ("load shared", "store shared")) / (2 * case.heads)
        layout = scan_layout(case.config)
        assert accesses + (layout.tma_bytes + layout.mma_bytes()) / case.heads / 128 <= limit
        assert special_functions(case.config) * 8 / 4 <= 300
