"""The recurrence kernel: its resources from the machine code, its numbers and manners on the emulator."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import cute_ssd
from cute_ssd import launch, reference
from cute_ssd.compile import compiled
from cute_ssd.kernels.dims import ROWS, Recurrence, has_f32x2
from cute_ssd.launch import Operands
from cute_ssd.machine_code import resources

from .common import check
from .executors import on_gpu

pytest.importorskip("cutlass")

KERNEL = pytest.mark.kernel
ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_103a", "sm_120a")
INF = float("inf")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

PLAIN = Recurrence(
    headdim=64,
    dstate=128,
    dtype="bfloat16",
    dt="float32",
    A="float32",
    dt_bias="float32",
    softplus=True,
    D="float32",
    z=True,
    initial="float32",
    final="float32",
    offsets=None,
    slots=None,
    flags=False,
    single=False,
    aligned=True,
    f32x2=True,
)
POOL = {"offsets": "int32", "slots": "int32", "flags": True}
SPACED = {"offsets": "int32", "last": "float32", "chunk_states": "float32"}
OWN = {"offsets": "int32", "chunk_states": "float32", "chunk_offsets": "int32"}
STEP = {"single": True, "slots": "int32", "D": "float32"}
VARIANTS = [*((arch, POOL) for arch in ARCHS), ("sm_80", STEP), ("sm_100a", STEP)]
VARIANTS += [("sm_90a", SPACED), ("sm_100a", OWN)]
MORE_VARIANTS: list[dict[str, Any]] = [
    {"dstate": 256, **POOL},
    {"dstate": 64},
    {"dstate": 16, "initial": None},
    {"headdim": 80, "initial": "bfloat16", "final": "bfloat16", "slots": "int64"},
    {"headdim": 128, "dstate": 256, "single": True},
    {"headdim": 256, "dstate": 256, **POOL},
    {"dtype": "float16", "initial": "float16", "final": "float16"},
    {"dtype": "float32", "dt": "bfloat16"},
    {"dtype": "float32", "dstate": 256, "headdim": 256},
    {"aligned": False, "dstate": 77, "headdim": 5},
    {"aligned": False, "dstate": 256, "headdim": 81, **POOL},
    {"dstate": 248, "headdim": 200, **POOL},
    {"A": None, "dt_bias": None, "softplus": False, "dt": "float16"},
    SPACED,
    OWN,
    {"headdim": 256, "dstate": 256, **SPACED},
    {"dstate": 64, "chunk_states": "bfloat16", "final": None, "offsets": "int64", "chunk_offsets": "int64"},
    {"dstate": 100, "headdim": 20, **POOL},
    {"dstate": 254, "headdim": 42, "initial": "bfloat16", "final": "bfloat16"},
    {"aligned": False, **OWN},
    {"dstate": 253, "headdim": 256, **POOL},
    {"dstate": 253, "headdim": 128, "dtype": "float32", "z": True},
    {"dstate": 129, "headdim": 64, "dtype": "float32", "z": True, **POOL},
]


def without_spills(arch: str, changes: dict[str, Any]) -> None:
    kernel = replace(PLAIN, f32x2=has_f32x2(arch), **changes)
    found = resources(compiled(kernel, arch).machine_code)
    assert found.local_bytes == 0, (kernel, found)
    # Two warps on each of the four parts of a multiprocessor; for a decode step, which waits for memory, three.
    assert found.registers <= (168 if kernel.single else 255), (kernel, found)


@pytest.mark.parametrize(("arch", "changes"), VARIANTS, ids=str)
def test_no_spills(arch: str, changes: dict[str, Any]) -> None:
    without_spills(arch, changes)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("changes", [STEP, *MORE_VARIANTS], ids=str)
def test_no_spills_in_any_variant(arch: str, changes: dict[str, Any]) -> None:
    without_spills(arch, changes)


class Case(NamedTuple):
    """One call. `lengths` of packed sequences, or None: `batch` rows of `seqlen` tokens."""

    arch: str = "sm_100a"
    seed: int = 0
    lengths: tuple[int, ...] | None = None
    batch: int = 1
    seqlen: int = 21
    nheads: int = 2
    ngroups: int = 1
    headdim: int = 16
    dstate: int = 32
    dtype: torch.dtype = BF16
    parameters: torch.dtype = F32  # of dt, A, D and dt_bias
    states: torch.dtype | None = F32
    initial: bool = True
    pool: bool = False
    flags: bool = False
    index: torch.dtype = torch.int32
    D: str = "none"
    z: bool = False
    bias: bool = False
    softplus: bool = False
    limit: tuple[float, float] = (0.0, INF)
    log_decay: bool = False
    single: bool = False
    pad: int = 0  # elements more in every row of x, B, C, z and dt
    shift: int = 0  # elements by which the first one is off an aligned address

    @property
    def num_seqs(self) -> int:
        return self.batch if self.lengths is None else len(self.lengths)


CASES = [
    Case(batch=2, nheads=4, ngroups=2, D="head", bias=True, softplus=True, z=True, pad=8, limit=(0.01, 0.2)),
    Case(lengths=(3, 0, 17, 1, 33), headdim=64, dstate=128, pool=True, flags=True, softplus=True, D="channel", seed=1),
    Case(single=True, seqlen=1, batch=3, headdim=64, dstate=64, pool=True, z=True, bias=True, softplus=True, D="head"),
    Case(single=True, seqlen=1, batch=2, dtype=F16, states=F16, headdim=32, dstate=128, index=torch.int64, pool=True),
    Case(dtype=F32, states=F32, lengths=(20, 5), headdim=40, dstate=100, z=True, seed=2, D="head", index=torch.int64),
    Case(log_decay=True, batch=2, dtype=BF16, parameters=BF16, states=BF16, headdim=16, dstate=16, D="head", seed=3),
    Case(headdim=5, dstate=7, nheads=3, lengths=(9, 2), shift=1, pad=1, states=BF16, pool=True, initial=True, D="head"),
    Case(headdim=1, dstate=1, dtype=F32, parameters=F32, z=True, softplus=True, bias=True, seqlen=5),
    Case(arch="sm_80", headdim=24, dstate=24, dtype=F16, lengths=(18, 1), parameters=F16, softplus=True, D="channel"),
    Case(arch="sm_90a", headdim=80, dstate=128, nheads=1, states=BF16, z=True, softplus=True, bias=True, seqlen=17),
    Case(arch="sm_120a", headdim=16, dstate=256, nheads=1, seqlen=9, initial=False, states=F32, D="head"),
    Case(arch="sm_103a", headdim=72, dstate=256, nheads=1, seqlen=10, states=None, initial=False, parameters=BF16),
    Case(arch="sm_86", headdim=20, dstate=100, lengths=(19, 2), pool=True, flags=True, z=True, D="channel", seed=4),
    Case(arch="sm_89", headdim=34, dstate=12, states=BF16, z=True, D="head", seed=5),
    Case(headdim=12, dstate=50, dtype=F16, lengths=(18, 0, 3), pool=True, D="head", pad=4, shift=4),
]
SLOW_CASES = [
    Case(
        arch=arch,
        seed=seed,
        lengths=(1, 16, 0, 17, 40),
        nheads=4,
        ngroups=ngroups,
        headdim=headdim,
        dstate=dstate,
        dtype=dtype,
        parameters=F32 if seed % 2 else dtype,
        states=states,
        pool=pool,
        flags=seed > 1,
        z=seed < 2,
        D=("none", "head", "channel")[seed % 3],
        bias=True,
        softplus=True,
        pad=pad,
        shift=shift,
    )
    for seed, (arch, headdim, dstate, dtype, states, ngroups, pool, pad, shift) in enumerate(
        (
            ("sm_80", 64, 128, BF16, F32, 1, True, 0, 0),
            ("sm_90a", 80, 128, BF16, BF16, 2, False, 8, 0),
            ("sm_100a", 80, 128, BF16, F32, 4, True, 32, 0),
            ("sm_103a", 128, 256, F16, F16, 1, True, 0, 0),
            ("sm_120a", 32, 64, F32, F32, 2, False, 4, 0),
            ("sm_100a", 200, 256, F32, BF16, 1, True, 1, 1),
            ("sm_100a", 3, 254, BF16, F32, 4, True, 3, 3),
            ("sm_80", 256, 12, F16, F32, 2, True, 0, 0),
            ("sm_100a", 200, 128, BF16, F32, 1, True, 0, 0),  # rows of x in a CTA: as many as columns
        )
    )
]


def rows(generator: torch.Generator, case: Case, *shape: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers as a view of wider, shifted rows whose other elements are NaN."""
    width = shape[-1] * shape[-2]
    wide = torch.full((*shape[:-2], width + case.pad), float("nan"), dtype=dtype).flatten()
    storage = torch.cat((torch.full((case.shift,), float("nan"), dtype=dtype), wide))
    view = storage[case.shift :].view(*shape[:-2], width + case.pad)[..., :width].view(shape)
    return view.copy_(torch.randn(shape, generator=generator, dtype=F32).to(dtype))


class Guarded:
    """A tensor in the middle of memory whose bytes around it, and between its rows, must not change."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, shift: int = 0, gap: int = 0) -> None:
        pitch = torch.Size(shape[1:]).numel() + gap
        self.storage = torch.full((64 + shift + shape[0] * pitch + 64,), float("nan"), dtype=dtype)
        self.tensor = self.storage[64 + shift : 64 + shift + shape[0] * pitch].view(shape[0], pitch)
        self.tensor = self.tensor[:, : pitch - gap].unflatten(1, shape[1:])

    def watch(self) -> None:
        self.before = self.storage.clone()

    def assert_intact(self) -> None:
        """Apart from the tensor itself."""
        self.before.as_strided(self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset()).copy_(self.tensor)
        assert torch.equal(bits(self.before), bits(self.storage))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


class Call(NamedTuple):
    operands: Operands
    y: Guarded
    final: Guarded | None
    options: dict[str, Any]


def build(case: Case) -> Call:
    g = torch.Generator().manual_seed(case.seed)
    batch, seqlen = (case.batch, case.seqlen) if case.lengths is None else (1, sum(case.lengths) + 2)
    H, P, N = case.nheads, case.headdim, case.dstate
    offsets = None
    if case.lengths is not None:
        offsets = torch.tensor([0, *torch.tensor(case.lengths).cumsum(0).tolist()], dtype=case.index)
    dt = rows(g, case, batch, seqlen, H, 1, dtype=case.parameters)[..., 0]
    if case.log_decay:
        dt.copy_(-dt.float().abs())
    elif not case.softplus:
        dt.copy_(dt.float().abs() * 0.1)
    y = Guarded((batch, seqlen, H, P), case.dtype, case.shift)
    final = initial = slots = flags = None
    if case.pool:
        order = torch.randperm(case.num_seqs + 3, generator=g)[: case.num_seqs]
        slots = order.to(case.index)
        if case.num_seqs > 1:
            slots[-1] = -1
        final = Guarded((case.num_seqs + 3, H, P, N), case.states or F32, case.shift, 8 if case.shift == 0 else 1)
        final.tensor.copy_(torch.randn(final.tensor.shape, generator=g))
        initial = final.tensor
        flags = torch.rand(case.num_seqs, generator=g) < 0.6 if case.flags else None
    elif case.states is not None:
        final = Guarded((case.num_seqs, H, P, N), case.states, case.shift)
        if case.initial:
            initial = torch.randn(case.num_seqs, H, P, N, generator=g).to(case.states)
    D = None
    if case.D == "channel":
        D = torch.randn(H, P, generator=g).to(case.parameters)
    elif case.D == "head":
        D = torch.randn(H, generator=g).to(case.parameters)[:, None].expand(H, P)
    operands = Operands(
        x=rows(g, case, batch, seqlen, H, P, dtype=case.dtype),
        dt=dt,
        A=None if case.log_decay else (-1 - 15 * torch.rand(H, generator=g)).to(case.parameters),
        B=rows(g, case, batch, seqlen, case.ngroups, N, dtype=case.dtype),
        C=rows(g, case, batch, seqlen, case.ngroups, N, dtype=case.dtype),
        D=D,
        z=rows(g, case, batch, seqlen, H, P, dtype=case.dtype) if case.z else None,
        dt_bias=torch.randn(H, generator=g).to(case.parameters) if case.bias else None,
        y=y.tensor,
        offsets=offsets,
        initial=initial,
        final=None if final is None else final.tensor,
        slots=slots,
        flags=flags,
    )
    return Call(operands, y, final, {"softplus": case.softplus, "dt_limit": case.limit, "single": case.single})


def run(call: Call, arch: str, seed: int = 0) -> None:
    """On the emulated `arch`, or on a CUDA device whatever its architecture."""
    call.y.watch()
    if call.final is not None:
        call.final.watch()
    with on_gpu(arch, seed=seed) as report:
        launch.recurrence(call.operands, arch, **call.options)
    assert not report.findings
    call.y.assert_intact()
    if call.final is not None:
        call.final.assert_intact()


def expected(call: Call, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """y and the states, by the definition in `dtype`. Rows of y behind the last sequence are NaN."""
    o = call.operands
    y, final = torch.full(o.x.shape, float("nan"), dtype=dtype), None
    if o.final is not None:
        final = (o.initial if o.slots is not None and o.initial is not None else o.final).to(dtype).clone()
    for s in range(o.num_seqs):
        where: Any = (slice(s, s + 1), slice(None))
        if o.offsets is not None:
            where = (slice(0, 1), slice(int(o.offsets[s]), int(o.offsets[s + 1])))
        slot = s if o.slots is None else int(o.slots[s])
        start = None
        if o.initial is not None and slot >= 0 and (o.flags is None or o.flags[s]):
            start = o.initial[slot : slot + 1]
        x, dt, B, C = (t[where] for t in (o.x, o.dt, o.B, o.C))
        z = None if o.z is None else o.z[where]
        if o.A is None:
            log_decay = dt.transpose(1, 2)
            y[where], last = reference.ssd_chunk_scan(x, log_decay, B, C, o.D, z, start, dtype=dtype)
        else:
            limit = call.options["dt_limit"]
            y[where], last, _ = reference.mamba_chunk_scan_combined(
                x, dt, o.A, B, C, o.D, z, o.dt_bias, start, None, None, call.options["softplus"], limit, dtype=dtype
            )
        if call.options["single"] and slot < 0:
            y[where] = 0
        if final is not None and slot >= 0 and (o.slots is None or x.shape[1]):
            final[slot] = last[0]
    return y, final


def compare(call: Call, arch: str, seed: int) -> None:
    untouched = call.operands.y.clone()
    (y, final), (eager_y, eager_final) = (expected(call, dtype) for dtype in (torch.float64, F32))
    run(call, arch, seed)
    written = ~y.isnan()
    assert torch.equal(bits(call.operands.y)[~written], bits(untouched)[~written])
    check(call.operands.y[written], y[written], eager_y[written])
    if final is not None and eager_final is not None and call.operands.final is not None:
        check(call.operands.final, final, eager_final)


@KERNEL
@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers(case: Case) -> None:
    compare(build(case), case.arch, case.seed)


@KERNEL
@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_CASES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_numbers_in_schedules(case: Case, seed: int) -> None:
    compare(build(case), case.arch, seed)


def instructions(dstate: int, seqlen: int) -> int:
    """Executed warp instructions for one head of 64 rows. Packs name the halves of a register pair in PTX, where the
    machine code has nothing to do: they are no instructions."""
    case = Case(headdim=64, dstate=dstate, nheads=1, seqlen=seqlen, initial=False, D="head", bias=True, softplus=True)
    call = build(case)
    with cute_ssd.emulate("sm_100a", sanitize=False) as report:
        launch.recurrence(call.operands, "sm_100a", **call.options)
    counts = report.launches[0].instructions
    return sum(counts.values()) - counts.get("pack", 0)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("dstate", [pytest.param(64, marks=SLOW), 128, pytest.param(256, marks=SLOW)])
def test_instructions_of_a_token(dstate: int) -> None:
    tokens = 64
    executed = instructions(dstate, 32 + tokens) - instructions(dstate, 32)
    assert executed * 32 / (tokens * 64 * dstate) <= 2.2  # 1.5 is the least that packed arithmetic can do with


@pytest.mark.parametrize("dstate", [64, 128])
def test_a_decode_step_moves_each_state_byte_once(dstate: int) -> None:
    """In accesses of 16 bytes a lane: all lanes of a warp instruction have bytes of their own."""
    call = build(Case(single=True, seqlen=1, batch=3, headdim=64, dstate=dstate, D="head"))

    def accesses(operands: Operands) -> tuple[int, int]:
        with cute_ssd.emulate("sm_100a", sanitize=False) as report:
            launch.recurrence(operands, "sm_100a", **call.options)
        counts = report.launches[0].instructions
        return counts["load global"], counts["store global"]

    loads, stores = accesses(call.operands)
    state = 3 * 2 * 64 * dstate * 4 // (32 * 16)
    assert loads - accesses(call.operands._replace(initial=None))[0] == state
    assert stores - accesses(call.operands._replace(final=None))[1] == state


def outputs(call: Call, seed: int = 0) -> list[Tensor]:
    run(call, "sm_100a", seed)
    return [t.clone() for t in (call.operands.y, call.operands.final) if t is not None]


PACKED = CASES[1]


@KERNEL
def test_bits_do_not_depend_on_the_schedule_or_the_other_sequences() -> None:
    first = outputs(build(PACKED))
    for seed in (1, 2, 3):
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(first, outputs(build(PACKED), seed), strict=True))
    call = build(PACKED)
    assert PACKED.lengths is not None and call.operands.offsets is not None
    for s, length in enumerate(PACKED.lengths):
        begin = int(call.operands.offsets[s])
        tokens = slice(begin, begin + length)
        o = build(PACKED).operands
        assert o.slots is not None and o.flags is not None and o.final is not None and call.operands.final is not None
        alone = o._replace(
            x=o.x[:, tokens], dt=o.dt[:, tokens], B=o.B[:, tokens], C=o.C[:, tokens], y=o.y[:, tokens],
            offsets=torch.tensor([0, length], dtype=torch.int32), slots=o.slots[s : s + 1], flags=o.flags[s : s + 1],
        )  # fmt: skip
        with on_gpu("sm_100a"):
            launch.recurrence(alone, "sm_100a", **call.options)
        assert torch.equal(bits(alone.y), bits(first[0][:, tokens]))
        if length and o.slots[s] >= 0:
            assert torch.equal(bits(o.final[o.slots[s]]), bits(first[1][o.slots[s]]))


@KERNEL
@pytest.mark.parametrize("poison", [float("nan"), INF, -INF])
def test_one_sequence_and_head_never_see_another(poison: float) -> None:
    clean, call = outputs(build(PACKED)), build(PACKED)
    o = call.operands
    assert o.offsets is not None and o.slots is not None and o.final is not None
    begin, end = int(o.offsets[2]), int(o.offsets[3])
    for tensor in (o.x[:, begin:end, 0], o.dt[:, begin:end, 0]):
        tensor.fill_(poison)
    o.final[o.slots[2], 0] = poison
    y, final = outputs(call)
    same = torch.ones(y.shape, dtype=torch.bool)
    same[:, begin:end, 0] = False
    assert torch.equal(bits(y)[same], bits(clean[0])[same])
    same = torch.ones(final.shape, dtype=torch.bool)
    same[o.slots[2], 0] = False
    assert torch.equal(bits(final)[same], bits(clean[1])[same])


@KERNEL
@pytest.mark.parametrize("slot", [-1, 6, 2**31 - 1, -(2**31)])
def test_slots_outside_of_the_pool_are_padding(slot: int) -> None:
    case = CASES[2]
    call = build(case)
    assert call.operands.slots is not None and call.operands.final is not None
    call.operands.slots[0] = slot
    before = call.operands.final.clone()
    run(call, "sm_100a")
    assert (call.operands.y[0] == 0).all()
    changed = (bits(before) != bits(call.operands.final)).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == [s for s in call.operands.slots.tolist() if 0 <= s < 6]


@KERNEL
@pytest.mark.parametrize("offsets", [[0, -5, 10, 12, 20, 57], [0, 40, 10, 99, 3, 2**31 - 1], [50, 51, 52, 58, 60, 70]])
def test_wrong_offsets_stay_inside_of_the_tensors(offsets: list[int]) -> None:
    call = build(PACKED)
    assert call.operands.offsets is not None
    call.operands.offsets.copy_(torch.tensor(offsets))
    with on_gpu("sm_100a", keep_going=True) as report:
        launch.recurrence(call.operands, "sm_100a", **call.options)
    assert not [f for f in report.findings if "race" not in f.kind]  # sequences may overlap


@KERNEL
def test_extreme_steps() -> None:
    """Softplus far below 0 and above its linear bound, decays that vanish and that are lost in rounding."""
    case = Case(headdim=64, dstate=64, nheads=2, dtype=F32, softplus=True, bias=True, seqlen=24)
    call = build(case)
    o = call.operands
    assert o.dt_bias is not None and o.A is not None
    o.dt_bias.zero_()
    o.dt[0, :, 0] = torch.tensor([-100.0, -88.0, -30, -17, -12, -5, -1, -1e-3, 0, 1e-3, 1, 5, 10, 15, 19.99, 20, 20.01,
                                  30, 88, 90, 200, 1e4, 1e-30, -1e-30])  # fmt: skip
    o.dt[0, :, 1] = o.dt[0, :, 0].flip(0)
    o.A.copy_(torch.tensor([-1e-4, -1e6]))
    compare(call, "sm_100a", 0)


def test_offsets_beyond_31_bits() -> None:
    """Rows, heads and slots further apart than 2^31 elements, in memory that is mostly not there."""
    import mmap

    def far(shape: tuple[int, ...], axis: int, dtype: torch.dtype) -> Tensor:
        pitch = 2**31 + 64
        strides = list(torch.empty(shape, device="meta").stride())
        strides[axis] = pitch
        memory = mmap.mmap(-1, ((shape[axis] - 1) * pitch + torch.Size(shape).numel()) * dtype.itemsize)
        storage = torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
        return storage.as_strided(shape, strides)

    case = Case(headdim=16, dstate=16, seqlen=2, nheads=2, states=F16, pool=True, batch=2, dtype=F16, z=True)
    call = build(case)
    o = call.operands
    assert o.final is not None and o.slots is not None and o.initial is not None
    o.slots.copy_(torch.tensor([1, 0]))
    assert o.z is not None
    x, z, y = (far(o.x.shape, 1, F16) for _ in range(3))
    B, pool = far(o.B.shape, 1, F16), far(o.final.shape, 0, F16)[:2]
    for target, source in ((x, o.x), (z, o.z), (B, o.B), (pool, o.final[:2])):
        target.copy_(source)
    near = o._replace(initial=o.initial[:2], final=o.final[:2])
    want, final = expected(call._replace(operands=near), torch.float64)
    with cute_ssd.emulate("sm_100a", sanitize=False):
        launch.recurrence(near._replace(x=x, B=B, z=z, y=y, initial=pool, final=pool), "sm_100a", **call.options)
    check(y, want, want.to(F16))
    assert final is not None
    check(pool, final, final.to(F16))


@KERNEL
def test_a_decode_step_as_hugging_face_calls_it() -> None:
    """A, dt, D and dt_bias expanded to all elements, as the model code passes them: no copy, the same kernel."""
    g = torch.Generator().manual_seed(0)
    batch, H, P, N = 3, 2, 64, 64
    state = torch.randn(batch + 3, H, P, N, generator=g)
    x, z, out = (torch.randn(batch, H, P, generator=g).to(BF16) for _ in range(3))
    B, C = (torch.randn(batch, 1, N, generator=g).to(BF16) for _ in range(2))
    dt, A, D, bias = (torch.randn(*size, generator=g) for size in ((batch, H), (H,), (H,), (H,)))
    A = -A.exp()
    wide = (dt[..., None].expand(-1, -1, P), A[:, None, None].expand(-1, P, N), D[:, None].expand(-1, P),
            bias[:, None].expand(-1, P))  # fmt: skip
    slots = torch.tensor([4, 0, 2], dtype=torch.int32)
    truth = [
        reference.selective_state_update(
            state[slots], x, wide[0], wide[1], B, C, wide[2], z, wide[3], dt_softplus=True, dtype=dtype
        )
        for dtype in (torch.float64, F32)
    ]
    operands = launch.step_operands(state, x, wide[0], wide[1], B, C, wide[2], z, wide[3], slots, out)
    with on_gpu("sm_100a") as report:
        launch.recurrence(operands, "sm_100a", softplus=True, dt_limit=(-INF, INF), single=True)
    assert len(report.launches) == 1
    check(out, truth[0][0], truth[1][0])
    check(state[slots], truth[0][1], truth[1][1])


def test_what_the_kernel_refuses() -> None:
    o = build(CASES[0]).operands
    with pytest.raises(cute_ssd.UnsupportedError, match=r"x is float64.*the last dimension of B has stride 2"):
        launch.recurrence(o._replace(x=o.x.double(), B=o.B.repeat_interleave(2, -1)[..., ::2]), "sm_100a")
    x = torch.zeros(1, 2, 300)
    with pytest.raises(cute_ssd.UnsupportedError, match="dt and A must have one value for each head"):
        launch.step_operands(
            torch.zeros(1, 2, 300, 4), x, torch.zeros(1, 2, 300), torch.zeros(2, 300, 4), torch.zeros(1, 1, 4),
            torch.zeros(1, 1, 4), None, None, None, None, x,
        )  # fmt: skip
    operands = launch.step_operands(
        torch.zeros(1, 2, 300, 4), x, torch.zeros(1, 2), torch.zeros(2), torch.zeros(1, 1, 4), torch.zeros(1, 1, 4),
        None, None, None, None, x,
    )  # fmt: skip
    with pytest.raises(cute_ssd.UnsupportedError, match="headdim is 300, expected at most 256"):
        launch.recurrence(operands, "sm_100a", single=True)


def test_two_kernels_for_all_alignments() -> None:
    """Not one for each address that a view may have."""
    kernels = {
        launch.recurrence_kernel(build(Case(dtype=F16, states=F16, shift=shift, pad=pad)).operands, "sm_100a",
                                 softplus=False, single=False)
        for shift in range(9) for pad in (0, 1, 2, 4, 8)
    }  # fmt: skip
    assert sorted(kernel.aligned for kernel in kernels) == [False, True]


@pytest.mark.parametrize(
    ("headdim", "dstate", "accesses"),
    [(16, 128, (16, 16, 16)), (20, 100, (16, 8, 8)), (64, 12, (16, 8, 16)), (6, 20, (16, 8, 4)), (5, 50, (8, 4, 2))],
)
def test_every_access_is_as_wide_as_rows_allow(headdim: int, dstate: int, accesses: tuple[int, ...]) -> None:
    """Bytes of an access to an fp32 state, to bfloat16 B and C, and to x. One narrow row narrows no other tensor."""
    case = Case(headdim=headdim, dstate=dstate)
    kernel = launch.recurrence_kernel(build(case).operands, "sm_100a", softplus=False, single=False)
    assert kernel.aligned and tuple(kernel.access_bytes(name) for name in ("initial", "B", "x")) == accesses
    for shift in range(1, 8):  # what the widest access of any tensor forbids
        shifted = build(case._replace(shift=shift)).operands
        kernel = launch.recurrence_kernel(shifted, "sm_100a", softplus=False, single=False)
        fits = shift * 2 % max(accesses[1:]) == 0 and shift * 4 % accesses[0] == 0
        assert kernel.aligned == fits
        if not fits:
            assert {kernel.access_bytes(name) for name in ("initial", "B", "x")} == {2, 4}


def test_states_of_single_elements_need_one_kernel() -> None:
    kernel = launch.recurrence_kernel(build(Case(dstate=7)).operands, "sm_100a", softplus=False, single=True)
    assert not kernel.aligned


@KERNEL
def test_dimensions_of_one_element_may_have_any_stride() -> None:
    case = Case(headdim=1, dstate=1, dtype=F32, parameters=F32, z=True, softplus=True, bias=True, seqlen=5)
    call = build(case)
    odd = {name: tensor.as_strided(tensor.shape, (*tensor.stride()[:-1], 7))
           for name in ROWS if (tensor := getattr(call.operands, name, None)) is not None}  # fmt: skip
    compare(call._replace(operands=call.operands._replace(**odd)), "sm_100a", 0)


@KERNEL
@pytest.mark.slow
@pytest.mark.parametrize("index", [torch.int32, torch.int64, torch.uint32])
def test_index_dtypes(index: torch.dtype) -> None:
    call = build(Case(lengths=(3, 0, 17), pool=True, flags=True))
    o = call.operands
    assert o.slots is not None and o.offsets is not None
    slots = torch.where(o.slots < 0, 5, o.slots).to(index)  # uint32 has no padding of -1
    compare(call._replace(operands=o._replace(slots=slots, offsets=o.offsets.to(index))), "sm_100a", 0)
