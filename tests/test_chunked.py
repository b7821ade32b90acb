"""The chunked tensor-core kernels on the emulator: numbers, isolation, memory. What a plan says of them is in
test_plan.py; the bodies that the CPU backend passes run on them too (`emulated("sm_100a:tiles")`, see conftest.py);
those of published models are in test_models.py. `AXES` has the axes of coverage."""

import itertools
import random
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import cute_ssd
from cute_ssd import launch, reference
from cute_ssd import plan as planning
from cute_ssd.compile import compiled
from cute_ssd.device import Device
from cute_ssd.kernels.sm100.config import Q
from cute_ssd.kernels.sm100.scan_layout import scan_layout
from cute_ssd.machine_code import kernel_resources
from cute_ssd.plan import Chunks
from cute_ssd.problem import Problem

from .common import check, eager_tiles, inputs, packed
from .conftest import on_tiles
from .executors import on_gpu
from .test_gpu import far
from .test_kernel_recurrence import BF16, F16, F32, INF, KERNEL, Call, Case, bits, build, expected

pytest.importorskip("cutlass")

ARCH = "sm_100a"
NAN = float("nan")


def planned(call: Call, heads: tuple[int, int], chunk_tiles: int = 0) -> Chunks:
    """The plan of these operands, but with `heads` of a work item of chunk_state and of chunk_scan."""
    o = call.operands
    packed = None if o.offsets is None else o.num_seqs
    dtype = F32 if o.final is None else o.final.dtype
    ngroups, dstate = o.B.shape[2:]
    problem = Problem("call", *o.x.shape, ngroups, dstate, o.x.dtype, dtype, packed, chunk_size=128)
    chunks = planning._chunks(problem, Device.from_arch(ARCH))
    return chunks._replace(state_heads=heads[0], scan_heads=heads[1], chunk_tiles=chunk_tiles)


def run(call: Call, heads: tuple[int, int], seed: int = 0, chunk_states: Tensor | None = None, tiles: int = 0) -> Any:
    call.y.watch()
    if call.final is not None:
        call.final.watch()
    options = {name: value for name, value in call.options.items() if name != "single"}
    with on_gpu(ARCH, seed=seed, tensor_fences=True) as report:
        launch.chunked(call.operands, ARCH, planned(call, heads, tiles), chunk_states=chunk_states, **options)
    assert not report.findings and len(report.launches) == 3
    call.y.assert_intact()
    if call.final is not None:
        call.final.assert_intact()
    return report


def truths(call: Call) -> list[tuple[Tensor, Tensor | None]]:
    """y and states by the recurrence in fp64, and as eager torch computes them in the dtype of x."""
    exact = expected(call, torch.float64)
    with patch.object(reference, "recurrence", eager_tiles(call.operands.x.dtype)):
        return [exact, expected(call, F32)]


def compare(call: Call, heads: tuple[int, int], seed: int = 0, chunk_tiles: int = 0) -> None:
    """y, final states and chunk states within `check`'s bounds of what eager torch computes in the dtype of x. The
    tokens behind the last sequence are NaN, and stay unwritten."""
    o = call.operands
    if o.offsets is not None:
        for tensor in (o.x, o.dt, o.B, o.C, o.z):
            if tensor is not None:
                tensor[:, int(o.offsets[-1]) :] = NAN
    untouched = call.operands.y.clone()
    (y, final), (eager_y, eager_final) = truths(call)
    size = chunk_tiles * Q
    ends = chunk_ends(call, size) if size else []
    chunks = [truths(part) for part in ends]
    states = None
    if size:
        rows, dtype = o.x.shape[1] // size + o.num_seqs, F32 if o.final is None else o.final.dtype
        states = torch.zeros(rows, *o.x.shape[2:], o.B.shape[-1], dtype=dtype)
    run(call, heads, seed, states, chunk_tiles)
    written = ~y.isnan()
    assert torch.equal(bits(call.operands.y)[~written], bits(untouched)[~written])
    check(call.operands.y[written], y[written], eager_y[written])
    if final is not None and eager_final is not None and call.operands.final is not None:
        check(call.operands.final, final, eager_final)
    if states is not None:
        for row, ((_, exact), (_, eager)) in enumerate(chunks):
            assert exact is not None and eager is not None
            check(states[row : row + 1], exact, eager)
        assert (states[len(chunks) :] == 0).all()


def chunk_ends(call: Call, size: int) -> list[Call]:
    """Of packed sequences, the calls that end where chunks of `size` tokens do, one sequence in each."""
    o, found = call.operands, []
    assert o.offsets is not None
    for s in range(o.num_seqs):
        begin, length = int(o.offsets[s]), int(o.offsets[s + 1] - o.offsets[s])
        state = s if o.slots is None else int(o.slots[s])
        start = torch.zeros(1, *o.x.shape[2:], o.B.shape[-1])
        if o.initial is not None and 0 <= state < o.initial.shape[0] and (o.flags is None or bool(o.flags[s])):
            start = o.initial[state : state + 1].clone()
        for end in [*range(size, length, size), *([length] if length else [])]:
            part = slice(begin, begin + end)
            z = None if o.z is None else o.z[:, part]
            cut = o._replace(
                x=o.x[:, part], dt=o.dt[:, part], B=o.B[:, part], C=o.C[:, part], z=z, offsets=None, slots=None,
                flags=None, initial=start, final=torch.empty(start.shape),
            )  # fmt: skip
            found.append(call._replace(operands=cut))
    return found


# Numbers

# The axes of coverage, for the three kernels together. Not every combination: each value of each axis together with
# each value of each other axis, somewhere in the slow rows. Two rows that differ in most values run by default.
AXES: dict[str, tuple[Any, ...]] = {
    "headdim": (32, 64, 80, 96, 128),
    "dstate": (64, 128, 256),
    "dtype": (BF16, F16),
    "wide": (True, False),  # states in fp32, or in the dtype of x
    "heads": ((4, 4), (2, 2), (1, 1), (3, 3), (8, 8), (4, 2)),  # of an item of chunk_state and of chunk_scan
    "ngroups": (2, 1),
    # Of packed sequences, of rows: tails of one token and of one less than a tile, whole tiles, empty sequences.
    "lengths": (((130, 0, 1, 128, 255), 100), ((0, 0, 300, 17), 257), ((256,), 128)),
    "chunk_tiles": (0, 1, 2),  # of packed sequences: chunk states, after as many tiles
    "steps": ("softplus", "plain", "log_decay"),
    "D": ("head", "channel", "none"),
    "z": (True, False),
    "sequences": ("rows", "packed", "pool"),
    "start": (True, False),
    "parameters": (F32, BF16),
    "index": (torch.int32, torch.int64),
    "pad": (0, 8),
    "seed": (0, 1, 2),
}


def pairwise(axes: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Rows in which every two values of different axes meet. Greedy: of random rows the one with the most new pairs."""
    drawn = random.Random(0)
    missing = {
        (a, i, b, j)
        for (a, m), (b, n) in itertools.combinations(((name, len(v)) for name, v in axes.items()), 2)
        for i in range(m)
        for j in range(n)
    }

    def pairs(row: dict[str, int]) -> set[Any]:
        return {(a, i, b, j) for (a, i), (b, j) in itertools.combinations(row.items(), 2)}

    rows = []
    while missing:
        a, i, b, j = min(missing)
        candidates = [{n: drawn.randrange(len(v)) for n, v in axes.items()} | {a: i, b: j} for _ in range(200)]
        best = max(candidates, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        rows.append({name: axes[name][index] for name, index in best.items()})
    return rows


def case_of(row: dict[str, Any]) -> tuple[Case, tuple[int, int]]:
    heads, (lengths, seqlen) = row["heads"], row["lengths"]
    return Case(
        seed=row["seed"],
        lengths=None if row["sequences"] == "rows" else lengths,
        batch=2,
        seqlen=seqlen,
        nheads=row["ngroups"] * max(heads),
        ngroups=row["ngroups"],
        headdim=row["headdim"],
        dstate=row["dstate"],
        dtype=row["dtype"],
        parameters=row["parameters"],
        states=F32 if row["wide"] else row["dtype"],
        initial=row["start"],
        pool=row["sequences"] == "pool",
        flags=row["start"],
        index=row["index"],
        D=row["D"],
        z=row["z"],
        bias=row["steps"] == "softplus",
        softplus=row["steps"] == "softplus",
        limit=(0.01, 0.2) if row["steps"] == "softplus" else (0.0, INF),
        log_decay=row["steps"] == "log_decay",
        pad=row["pad"],
    ), heads


FIRST = {name: values[0] for name, values in AXES.items()}
ROWS = [FIRST, {**FIRST, "sequences": "pool", "dtype": F16, "z": False, "headdim": 64, "dstate": 128, "seed": 1}]
SLOW = [pytest.param(row, marks=pytest.mark.slow, id=str(n)) for n, row in enumerate(pairwise(AXES))]


@KERNEL
@pytest.mark.parametrize("row", [*ROWS, *SLOW])
def test_numbers(row: dict[str, Any]) -> None:
    case, heads = case_of(row)
    compare(build(case), heads, case.seed, 0 if case.lengths is None else row["chunk_tiles"])


# What a prefill on a pool does and does not touch


POOL = Case(
    lengths=(130, 0, 1, 128, 255), nheads=4, ngroups=2, headdim=64, dstate=64, pool=True, flags=True, softplus=True,
    bias=True, D="head", z=True, seed=1, pad=8,
)  # fmt: skip
HEADS = (2, 2)


def outputs(call: Call, seed: int = 0) -> list[Tensor]:
    run(call, HEADS, seed)
    return [t.clone() for t in (call.operands.y, call.operands.final) if t is not None]


@KERNEL
def test_bits_do_not_depend_on_the_schedule_or_the_other_sequences() -> None:
    first = outputs(build(POOL))
    for seed in (1, 2, 3):
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(first, outputs(build(POOL), seed), strict=True))
    call = build(POOL)
    assert POOL.lengths is not None and call.operands.offsets is not None
    for s, length in enumerate(POOL.lengths):
        if not length:
            continue
        begin = int(call.operands.offsets[s])
        tokens = slice(begin, begin + length)
        o = build(POOL).operands
        assert o.slots is not None and o.flags is not None and o.final is not None and o.z is not None
        alone = o._replace(
            x=o.x[:, tokens], dt=o.dt[:, tokens], B=o.B[:, tokens], C=o.C[:, tokens], z=o.z[:, tokens],
            y=o.y[:, tokens], offsets=torch.tensor([0, length], dtype=torch.int32), slots=o.slots[s : s + 1],
            flags=o.flags[s : s + 1],
        )  # fmt: skip
        run(call._replace(operands=alone), HEADS)
        assert torch.equal(bits(alone.y), bits(first[0][:, tokens]))
        if o.slots[s] >= 0:
            assert torch.equal(bits(o.final[o.slots[s]]), bits(first[1][o.slots[s]]))


@KERNEL
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("sequence", [0, 2])
def test_one_sequence_and_head_never_see_another(poison: float, sequence: int) -> None:
    """Whatever is in its tokens, and with B and C in all heads of its group, and in its state."""
    clean, call = outputs(build(POOL)), build(POOL)
    o = call.operands
    assert o.offsets is not None and o.slots is not None and o.final is not None and o.z is not None
    begin, end = int(o.offsets[sequence]), int(o.offsets[sequence + 1])
    for tensor in (o.x[:, begin:end, :2], o.dt[:, begin:end, :2], o.z[:, begin:end, :2], o.B[:, begin:end, 0],
                   o.C[:, begin:end, 0]):  # fmt: skip
        tensor.fill_(poison)
    o.final[o.slots[sequence], :2] = poison
    y, final = outputs(call)
    same = torch.ones(y.shape, dtype=torch.bool)
    same[:, begin:end, :2] = False
    assert torch.equal(bits(y)[same], bits(clean[0])[same])
    same = torch.ones(final.shape, dtype=torch.bool)
    same[o.slots[sequence], :2] = False
    assert torch.equal(bits(final)[same], bits(clean[1])[same])


@pytest.mark.parametrize(("dtype", "D"), [(BF16, 1.0273), (BF16, 1e5), (F16, 1.00244)])
def test_D_keeps_its_digits(tiles: cute_ssd.emulator.Report, dtype: torch.dtype, D: float) -> None:
    """Where D x is all of y, the error is that of rounding y: these D lie between two numbers of 16 bits."""
    made = inputs(1, 130, 4, 64, 1, 64, dtype=dtype)
    made |= {"dt": torch.full((1, 130, 4), 1e-5), "D": torch.full((4,), D)}
    y = cute_ssd.mamba_chunk_scan_combined(**made, chunk_size=64).double()
    true = reference.mamba_chunk_scan_combined(**{n: t.double() for n, t in made.items()})[0]
    assert (y - true).norm() < 1.1 * (true.to(dtype) - true).norm()


@KERNEL
def test_nan_in_a_step_is_seen() -> None:
    """By its own token and those behind it, and by no other head or sequence."""
    call = build(POOL)
    call.operands.dt[0, 40, 1] = NAN
    y, _ = outputs(call)
    assert y[0, 40:130, 1].isnan().all() and not y[0, :130, [0, 2, 3]].isnan().any() and not y[0, 130:-2].isnan().any()


@KERNEL
@pytest.mark.parametrize("slot", [-1, 8, 2**31 - 1, -(2**31)])
def test_slots_outside_of_the_pool_are_padding(slot: int) -> None:
    clean, call = build(POOL), build(POOL)
    o = call.operands
    assert o.slots is not None and o.final is not None and clean.operands.slots is not None
    clean.operands.slots[0] = -1
    o.slots[0] = slot
    before = o.final.clone()
    run(call, HEADS)
    assert torch.equal(bits(o.y), bits(outputs(clean)[0]))
    changed = (bits(before) != bits(o.final)).flatten(1).any(1).nonzero().flatten().tolist()
    used = [s for s, length in zip(o.slots.tolist(), POOL.lengths or (), strict=True) if length and 0 <= s < 8]
    assert changed == sorted(used)


@pytest.mark.parametrize("offsets", [[0, -5, 10, 12, 20, 570], [0, 40, 10, 99, 3, 2**31 - 1], [50, 51, 52, 58, 60, 70]])
def test_wrong_offsets_stay_inside_of_the_tensors(offsets: list[int]) -> None:
    call = build(POOL)
    assert call.operands.offsets is not None
    call.operands.offsets.copy_(torch.tensor(offsets))
    call.y.watch()
    options = {name: value for name, value in call.options.items() if name != "single"}
    with cute_ssd.emulate(ARCH, keep_going=True, tensor_fences=True) as report:
        launch.chunked(call.operands, ARCH, planned(call, HEADS), **options)
    assert not [f for f in report.findings if "race" not in f.kind]  # sequences may overlap
    call.y.assert_intact()


def test_the_host_reads_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a call can be captured in a CUDA graph."""
    call = build(POOL)
    chunks = planned(call, HEADS)

    def reads(self: Tensor, *args: Any) -> Any:
        raise AssertionError("the host reads data")

    with monkeypatch.context() as patches:
        for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__index__"):
            patches.setattr(Tensor, name, reads)
        patches.setattr(launch, "compiled", lambda kernels, arch: lambda *arguments: None)
        launch.chunked(call.operands, ARCH, chunks, softplus=True)


# Accuracy


@KERNEL
@pytest.mark.slow
def test_slow_decay_over_8192_tokens_keeps_the_accuracy_of_fp32_states() -> None:
    """TRT-LLM#14600: the error does not grow along the sequence, as that of a state does which every tile rounds."""
    case = Case(seqlen=8192, nheads=2, headdim=64, dstate=64, initial=False)
    call = build(case)
    o = call.operands
    assert o.A is not None and o.final is not None
    o.A.fill_(-1e-2)
    o.dt.fill_(1e-2)
    exact, final = expected(call, torch.float64)
    assert final is not None
    run(call, HEADS)
    error = (o.y.double() - exact)[0].view(8, -1).norm(dim=1) / exact[0].view(8, -1).norm(dim=1)
    assert error.max() < 2 * error[0] and error.max() < 5e-3
    state_error = float((o.final.double() - final).norm() / final.norm())
    narrow = build(case._replace(states=BF16))
    assert narrow.operands.A is not None and narrow.operands.final is not None
    narrow.operands.A.fill_(-1e-2)
    narrow.operands.dt.fill_(1e-2)
    run(narrow, HEADS)
    narrow_error = float((narrow.operands.final.double() - final).norm() / final.norm())
    assert state_error < 2e-3 < 1.5 * state_error + narrow_error


# Chunk states


@KERNEL
@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [128, 384])
def test_chunk_states(chunk_size: int) -> None:
    """After every chunk_size tokens of a sequence and after its last one; rows that no sequence has stay zero."""
    case = Case(lengths=(130, 0, 384, 1, 513), nheads=2, headdim=64, dstate=64, softplus=True, bias=True)
    compare(build(case), HEADS, chunk_tiles=chunk_size // Q)


# Where tensors lie


def through_the_api(made: dict[str, Any], **more: Any) -> Any:
    return cute_ssd.mamba_chunk_scan_varlen(**made, **more)


def prefill(*lengths: int) -> dict[str, Any]:
    made = packed(inputs(1, sum(lengths), 4, 64, 2, 64, dtype=BF16))
    made["query_start_loc"] = torch.tensor([0, *lengths]).cumsum(0).int()
    return made


@pytest.fixture
def tiles() -> Iterator[cute_ssd.emulator.Report]:
    """Calls go to the chunked kernels, however short they are. Findings raise."""
    with on_tiles(), cute_ssd.emulate(ARCH, tensor_fences=True) as report:
        yield report


@pytest.mark.parametrize("pad", [0, 8, 24])
def test_views_of_one_projection(tiles: cute_ssd.emulator.Report, pad: int) -> None:
    """As a model's projection leaves them, also behind a gate; dt anywhere. The same bits, nothing copied."""
    made = prefill(100, 33)
    made["dt"] = made["dt"].bfloat16()
    plain = through_the_api(made)
    widths = {"x": 256, "B": 128, "C": 128, "dt": 4}
    wide = torch.full((133, 8 + sum(widths.values()) + 4 + pad), NAN, dtype=BF16)
    column = 8
    for name, width in widths.items():
        view = wide[:, column : column + width].view(made[name].shape)
        made[name] = view.copy_(made[name])
        column += width
    assert torch.equal(through_the_api(made), plain) and len(tiles.launches) == 6


def test_one_row_with_any_stride(tiles: cute_ssd.emulator.Report) -> None:
    """torch allows any stride in a dimension of one element; TMA does not."""
    made = inputs(1, 100, 2, 64, 1, 64, dtype=BF16)
    plain = cute_ssd.mamba_chunk_scan_combined(**made, chunk_size=64)
    for name in ("x", "B", "C"):
        shape = made[name].shape
        strides = (7, shape[2] * shape[3], 64 if shape[2] > 1 else 3, 1)
        made[name] = made[name].as_strided(shape, strides)
    assert torch.equal(cute_ssd.mamba_chunk_scan_combined(**made, chunk_size=64), plain)
    assert len(tiles.launches) == 6


def test_misaligned_rows_go_to_the_recurrence(tiles: cute_ssd.emulator.Report) -> None:
    made = prefill(20, 3)
    wide = torch.zeros(23, 257, dtype=BF16)
    made["x"] = wide[:, 1:].view(23, 4, 64).copy_(made["x"])
    y = through_the_api(made)
    assert [launch.kernel for launch in tiles.launches] == ["recurrence_0"] and torch.isfinite(y).all()


def test_a_state_in_other_16_bits_is_the_fp32_one_rounded_once(tiles: cute_ssd.emulator.Report) -> None:
    made = prefill(100, 33)
    y, exact = through_the_api(made, return_final_states=True)
    y16, half = through_the_api(made, return_final_states=True, state_dtype=F16)
    assert torch.equal(half, exact.half()) and torch.equal(y, y16)


def test_offsets_beyond_31_bits() -> None:
    """mamba#1015, #987: row pitch times tokens beyond 2^31 elements; vllm#48109: so a slot times its size."""
    made = prefill(4)
    made["dt"] = made["dt"].half()
    pool, slots = torch.randn(2, 4, 64, 64).half(), torch.tensor([1], dtype=torch.int32)
    state = {"cache_indices": slots, "has_initial_state": torch.tensor([True]), "dt_softplus": False}
    distant, wide = far(pool, 0, 2**31 + 64), {n: far(made[n], 0, 2**30 + 8) for n in ("x", "dt", "B", "C")}
    with on_tiles(), cute_ssd.emulate(ARCH, sanitize=False) as report:  # its shadow of such memory would be dense
        want = cute_ssd.mamba_chunk_scan_varlen_inplace(**made, **state, ssm_pool=pool)
        got = cute_ssd.mamba_chunk_scan_varlen_inplace(**{**made, **wide}, **state, ssm_pool=distant)
    assert len(report.launches) == 6
    assert torch.equal(got, want) and torch.equal(distant, pool)


# Structure


@pytest.mark.parametrize(("headdim", "dstate"), [(64, 128), (64, 256)])
def test_resources_are_as_planned(headdim: int, dstate: int) -> None:
    """Three kernels, no spills; shared memory of the launches as the plan says."""
    call = build(Case(seqlen=130, nheads=8, headdim=headdim, dstate=dstate, D="head", softplus=True, bias=True))
    chunks = planned(call, (4, 4))
    report = run(call, (4, 4))
    kernels = launch.chunked_kernels(call.operands, chunks, softplus=True)
    found = kernel_resources(compiled(kernels, ARCH).machine_code)
    assert len(found) == 3 and all(resources.local_bytes == 0 for resources in found.values())
    state, _, scan = (launched.shared_bytes for launched in report.launches)
    assert state == kernels.state_sizes.shared_bytes and scan == scan_layout(kernels).shared_bytes
