"""What the GPU path adds around its kernel: on CPU tensors and the emulated sm_100a, or a CUDA device (executors.py).
The numbers of the kernel itself are in test_kernel_recurrence.py, the bodies that run on the CPU backend too where
their fixture `device` is."""

import mmap
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import cute_ssd
from cute_ssd import UnsupportedError, launch, reference
from cute_ssd.emulator import Report

from . import common, test_reports
from .common import check, extras, inputs, packed
from .conftest import on_tiles
from .executors import on_gpu
from .test_kernel_recurrence import KERNEL, Guarded, bits

pytest.importorskip("cutlass")

NAMES = ("x", "dt", "A", "B", "C")
TOKENS = ("x", "dt", "B", "C", "z")
F32 = torch.float32


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Iterator[Report]:
    """The GPU; a parameter is the seed of the emulated one's schedules. Findings raise."""
    with on_gpu("sm_100a", seed=getattr(request, "param", 0)) as report:
        yield report
    assert not report.findings


def scan(made: dict[str, Any], **kwargs: Any) -> Any:
    return cute_ssd.mamba_chunk_scan_combined(**made, chunk_size=64, **kwargs)


def truths(made: dict[str, Any], **kwargs: Any) -> list[tuple[Tensor, Tensor]]:
    """[(fp64, fp32)] of y, final states and, with cu_seqlens, states of the sequences."""
    run = reference.mamba_chunk_scan_combined
    both = (run(*(made[n] for n in NAMES), **kwargs, dtype=dtype) for dtype in (torch.float64, F32))
    return list(zip(*both, strict=True))


def compare(results: Any, expected: Any) -> None:
    for actual, (true, eager) in zip(results, expected, strict=False):
        check(actual, true, eager)


def offsets(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def prefill(lengths: tuple[int, ...] = (7, 0, 18, 1), spare: int = 0) -> tuple[dict[str, Any], Tensor]:
    """Arguments of the packed functions and states for the sequences."""
    made = inputs(1, sum(lengths) + spare)
    more = extras(made)
    del more["initial_states"]
    arguments = packed({**made, **more}) | {"query_start_loc": offsets(*lengths)}
    return arguments, torch.randn(len(lengths), 4, 8, 16)


def step(rows: int = 3) -> dict[str, Any]:
    made = inputs(rows, 1)
    return {name: t if name == "A" else t[:, 0] for name, t in made.items()}


# The whole row, and sequences packed into one


@KERNEL
def test_rows_of_a_batch(gpu: Report) -> None:
    made = inputs(3, 33)
    kwargs = extras(made, D_per_channel=True)
    compare(scan(made, **kwargs, return_final_states=True), truths(made, **kwargs))


@KERNEL
@pytest.mark.parametrize("gpu", range(4), indirect=True)
def test_schedules(gpu: Report) -> None:
    """Eager, late and random orders of the warps; each is its own test of races."""
    made = inputs(1, 40)
    kwargs = {**extras(made), "cu_seqlens": offsets(17, 0, 3, 16)}
    results = scan(made, **kwargs, return_final_states=True, return_varlen_states=True)
    compare(results, truths(made, **kwargs))
    assert (results[0][:, 36:] == 0).all() and len(gpu.launches) == 1


@KERNEL
@pytest.mark.parametrize("lengths", [(), (0,), (0, 0), (0, 5), (5, 0, 0), (1, 1, 2)])
@pytest.mark.parametrize("start", [pytest.param(False, marks=pytest.mark.slow), True])
def test_sequences_of_a_row(gpu: Report, lengths: tuple[int, ...], start: bool) -> None:
    """Empty sequences and offsets that end early: rows behind are zero, the first sequence has the initial state."""
    made = inputs(1, 8)
    kwargs = extras(made)
    if not start:
        kwargs["initial_states"] = None
    kwargs["cu_seqlens"] = offsets(*lengths)
    y, final, varlen = scan(made, **kwargs, return_final_states=True, return_varlen_states=True)
    assert (y[:, sum(lengths) :] == 0).all() and varlen.shape[0] == len(lengths)
    if lengths:
        compare((y, final, varlen), truths(made, **kwargs))
        assert torch.equal(scan(made, **kwargs, return_final_states=True)[1], final)
    else:
        assert torch.equal(final, kwargs["initial_states"] if start else torch.zeros(1, 4, 8, 16))
        assert not start or final.data_ptr() != kwargs["initial_states"].data_ptr()


@KERNEL
def test_packed_equals_alone_whatever_the_others_hold(gpu: Report) -> None:
    """Bit for bit, also beside NaN (SkyRL#2056), and from run to run."""
    made = inputs(1, 40, dtype=torch.bfloat16)
    start, bounds = torch.randn(1, 4, 8, 16), (0, 17, 18, 40)
    packs = {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32), "return_varlen_states": True}
    y, varlen = scan(made, initial_states=start, **packs)
    again = scan(made, initial_states=start, **packs)
    assert torch.equal(y, again[0]) and torch.equal(varlen, again[1])
    for s, (low, high) in enumerate(pairwise(bounds)):
        alone = {n: t if n == "A" else t[:, low:high] for n, t in made.items()}
        y_s, state_s = scan(
            alone, initial_states=start if s == 0 else torch.zeros_like(start), return_final_states=True
        )
        assert torch.equal(y[:, low:high], y_s) and torch.equal(varlen[s : s + 1], state_s)
        dirty = {n: t.clone() for n, t in made.items()}
        for name in TOKENS[:4]:
            dirty[name][:, :low], dirty[name][:, high:] = float("nan"), float("nan")
        y_n, varlen_n = scan(dirty, initial_states=start if s == 0 else start * float("nan"), **packs)
        assert torch.equal(y_n[:, low:high], y_s) and torch.equal(varlen_n[s : s + 1], state_s)


@KERNEL
@pytest.mark.parametrize("D", ["head", "channel"])
def test_log_decay(gpu: Report, D: str) -> None:
    made = inputs(2, 19)
    more = extras(made, D_per_channel=D == "channel")
    log_decay = -torch.rand(2, 4, 19)
    args = (made["x"], log_decay, made["B"], made["C"], more["D"], more["z"])
    results = cute_ssd.ssd_chunk_scan(*args, more["initial_states"], return_final_states=True)
    both = [reference.ssd_chunk_scan(*args, more["initial_states"], dtype=dtype) for dtype in (torch.float64, F32)]
    compare(results, zip(*both, strict=True))


@KERNEL
def test_limit_without_softplus(gpu: Report) -> None:
    made = inputs(1, 20)
    made["dt"][0, :5] = torch.tensor([-1.0, 0.0, 5.0, 0.02])
    kwargs = {"dt_limit": (0.01, 0.05)}
    compare(scan(made, **kwargs, return_final_states=True), truths(made, **kwargs))


@KERNEL
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_state_dtype(gpu: Report, dtype: torch.dtype) -> None:
    """The fp32 state, rounded once."""
    made = inputs(2, 20)
    _, exact = scan(made, return_final_states=True)
    _, final = scan(made, return_final_states=True, state_dtype=dtype)
    assert final.dtype == dtype and torch.equal(final, exact.to(dtype))


@KERNEL
def test_nothing_to_do(gpu: Report) -> None:
    made = inputs(0, 5)
    y, final = scan(made, return_final_states=True)
    assert y.shape == (0, 5, 4, 8) and final.shape == (0, 4, 8, 16)
    arguments, _ = prefill((), spare=3)
    assert (cute_ssd.mamba_chunk_scan_varlen(**arguments) == 0).all()
    assert cute_ssd.selective_state_update(torch.zeros(0, 4, 8, 16), **step(0)).shape == (0, 4, 8)
    assert not gpu.launches


# What a call makes beside its launches


class Made(TorchDispatchMode):
    """The results of all operators but views, also of those inside of this package's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Tensor] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator.namespace == "cute_ssd":
            with self:
                return operator._op_dk(torch._C.DispatchKey.CPU, *args)
        result = operator(*args, **kwargs or {})
        if not operator.is_view:
            self.results.append(result)
        return result


def rows_of_a_batch(**kwargs: Any) -> Callable[[], Any]:
    made = inputs(2, 9)
    more = extras(made)
    return lambda: scan(made, **more, **kwargs)


def sequences_of_a_row(start: bool, **kwargs: Any) -> Callable[[], Any]:
    made = inputs(1, 9)
    more = {**extras(made), "cu_seqlens": offsets(4, 0, 3)}
    if not start:
        del more["initial_states"]
    return lambda: scan(made, **more, **kwargs)


def log_decays() -> Callable[[], Any]:
    made, log_decay = inputs(1, 9), -torch.rand(1, 4, 9)
    return lambda: cute_ssd.ssd_chunk_scan(made["x"], log_decay, made["B"], made["C"], return_final_states=True)


def packed_sequences(**kwargs: Any) -> Callable[[], Any]:
    arguments, _ = prefill()
    start = torch.randn(4, 4, *common.SIZES[:2])
    return lambda: cute_ssd.mamba_chunk_scan_varlen(**arguments, initial_states=start, **kwargs)


def on_a_pool() -> Callable[[], Any]:
    arguments, _ = prefill()
    pool, slots = torch.randn(5, 4, *common.SIZES[:2]), torch.tensor([4, 0, -1, 2])
    started = torch.tensor([True, False, True, True])
    more = {"ssm_pool": pool, "cache_indices": slots, "has_initial_state": started}
    return lambda: cute_ssd.mamba_chunk_scan_varlen_inplace(**arguments, **more)


def decode_step() -> Callable[[], Any]:
    made, state = step(), torch.randn(3, 4, 8, 16)
    return lambda: cute_ssd.selective_state_update(state, **made)


BOTH = {"return_final_states": True, "return_varlen_states": True}
OWN = {"return_chunk_states": True, "cu_chunk_seqlens": offsets(3, 4, 18, 1)}
FORMS: dict[str, Callable[[], Callable[[], Any]]] = {
    "rows of a batch": lambda: rows_of_a_batch(return_final_states=True),
    "y only": rows_of_a_batch,
    "sequences of a row, final states": lambda: sequences_of_a_row(True, return_final_states=True),
    "sequences of a row, their states": lambda: sequences_of_a_row(True, return_varlen_states=True),
    "sequences of a row, both": lambda: sequences_of_a_row(True, **BOTH),
    "sequences of a row from zero": lambda: sequences_of_a_row(False, return_final_states=True),
    "log decays": log_decays,
    "packed sequences": lambda: packed_sequences(return_final_states=True),
    "chunk states": lambda: packed_sequences(return_chunk_states=True, chunk_size=5),
    "own chunks": lambda: packed_sequences(**OWN),
    "pool": on_a_pool,
    "decode": decode_step,
}


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_made_but_what_is_returned(gpu: Report, form: str) -> None:
    """One launch, without a temporary tensor: a call fits into a CUDA graph and its memory is the caller's own."""
    call = FORMS[form]()
    with Made() as made:
        found = call()
    returned = {t.data_ptr() for t in (found if isinstance(found, tuple) else (found,))}
    results = [t.data_ptr() for t in made.results if t.numel()]
    assert sorted(results) == sorted(returned) and len(gpu.launches) == 1


@pytest.mark.slow
@pytest.mark.parametrize("form", ["rows of a batch", "log decays", "packed sequences", "pool"])
def test_tiles_make_a_workspace_too(gpu: Report, form: str) -> None:
    with on_tiles():
        call = FORMS[form]()
        with Made() as made:
            found = call()
    returned = {t.data_ptr() for t in (found if isinstance(found, tuple) else (found,))}
    results = {t.data_ptr(): t for t in made.results if t.numel()}
    (workspace,) = (t for place, t in results.items() if place not in returned)
    assert workspace.dtype == torch.uint8 and len(gpu.launches) == 3


# The pool


@KERNEL
@pytest.mark.parametrize("started", [None, True])
def test_pool_and_out_inside_guard_bands(gpu: Report, started: bool | None) -> None:
    """Padding, slots that are not in the pool and empty sequences write nothing, and nothing writes beside a slot."""
    arguments, _ = prefill((7, 0, 5, 18, 1, 2), spare=2)
    pool, out = Guarded((6, 4, 8, 16), F32, gap=8), Guarded((35, 4, 8), F32)
    pool.tensor.copy_(torch.randn(pool.tensor.shape))
    out.tensor.fill_(7)
    slots = torch.tensor([5, 3, -1, 0, 6, 2**31 - 1], dtype=torch.int32)  # 6 and 2^31 - 1 are beyond it
    flags = None if started is None else torch.tensor([True, True, True, False, True, True])
    before = pool.tensor.clone()
    for guarded in (pool, out):
        guarded.watch()
    y = cute_ssd.mamba_chunk_scan_varlen_inplace(
        **arguments, ssm_pool=pool.tensor, cache_indices=slots, has_initial_state=flags, out=out.tensor
    )
    pool.assert_intact()
    out.assert_intact()
    assert y is out.tensor and (y[33:] == 7).all()
    start = torch.zeros(6, 4, 8, 16)
    if started:
        start[0] = before[5]
    both = [
        reference.mamba_chunk_scan_varlen(**arguments, initial_states=start, dtype=dtype)
        for dtype in (torch.float64, F32)
    ]
    check(y[:33], both[0][0][:33], both[1][0][:33])
    check(pool.tensor[[5, 0]], both[0][1][[0, 3]], both[1][1][[0, 3]])
    assert torch.equal(bits(pool.tensor[1:5]), bits(before[1:5]))


@KERNEL
def test_decode_writes_named_slots_only(gpu: Report) -> None:
    pool, made = Guarded((6, 4, 8, 16), F32, gap=8), step(5)
    pool.tensor.copy_(torch.randn(pool.tensor.shape))
    before = pool.tensor.clone()
    pool.watch()
    slots = torch.tensor([4, 2, 6, 2, 0], dtype=torch.int32)  # 2 is the padding, twice
    y = cute_ssd.selective_state_update(pool.tensor, **made, state_batch_indices=slots, pad_slot_id=2)
    pool.assert_intact()
    live = {n: t if n == "A" else t[[0, 4]] for n, t in made.items()}
    both = [reference.selective_state_update(before[[4, 0]], **live, dtype=dtype) for dtype in (torch.float64, F32)]
    compare((y[[0, 4]], pool.tensor[[4, 0]]), zip(*both, strict=True))
    assert (y[1:4] == 0).all() and torch.equal(bits(pool.tensor[[1, 2, 3, 5]]), bits(before[[1, 2, 3, 5]]))


@KERNEL
def test_decode_has_no_limit(gpu: Report) -> None:
    """Without softplus a negative dt is taken as it is."""
    made, state = step(), torch.randn(3, 4, 8, 16)
    made["dt"] = -made["dt"]
    both = [reference.selective_state_update(state, **made, dtype=dtype) for dtype in (torch.float64, F32)]
    compare((cute_ssd.selective_state_update(state, **made), state), zip(*both, strict=True))


@KERNEL
def test_decode_with_expanded_arguments(gpu: Report) -> None:
    """As Hugging Face passes them: the same bits, nothing copied; what varies inside a head is refused."""
    made, state, out = step(), torch.randn(3, 4, 8, 16), torch.empty(3, 4, 8)
    more = {"D": torch.randn(4), "dt_bias": torch.randn(4), "dt_softplus": True}
    plain_state = state.clone()
    plain = cute_ssd.selective_state_update(plain_state, **made, **more)
    wide = {
        **made,
        **more,
        "A": made["A"][:, None, None].expand(4, 8, 16),
        "dt": made["dt"][..., None].expand(3, 4, 8),
        "D": more["D"][:, None].expand(4, 8),
        "dt_bias": more["dt_bias"][:, None].expand(4, 8),
    }
    assert cute_ssd.selective_state_update(state, **wide, out=out) is out
    assert torch.equal(out, plain) and torch.equal(state, plain_state)
    for name in ("A", "dt", "dt_bias"):
        with pytest.raises(UnsupportedError, match=rf"{name} must have one value for each head.*stride 0"):
            cute_ssd.selective_state_update(state, **{**wide, name: wide[name].contiguous()})
    assert torch.equal(state, plain_state) and len(gpu.launches) == 2


@pytest.mark.parametrize("own", [(0, 3, 50, -9, 7), (5, 5, 5, 99, 26), (2**31 - 1, 0, 1, -(2**31), 26), (26, 25, 9)])
def test_wrong_chunks_stay_inside_of_the_tensors(own: tuple[int, ...]) -> None:
    arguments, start = prefill()
    kwargs = {"return_chunk_states": True, "cu_chunk_seqlens": torch.tensor(own, dtype=torch.int32)}
    with cute_ssd.emulate("sm_100a", keep_going=True) as report:
        y, _ = cute_ssd.mamba_chunk_scan_varlen(**arguments, initial_states=start, **kwargs)
    assert len(report.launches) == 1
    assert not [f for f in report.findings if "race" not in f.kind]  # sequences may have the same chunk
    with cute_ssd.emulate("sm_100a"):
        assert torch.equal(y, cute_ssd.mamba_chunk_scan_varlen(**arguments, initial_states=start))


# Where tensors lie


def fused(made: dict[str, Any], column: int, pad: int) -> dict[str, Any]:
    """x, B, C and dt as columns of one projection, from `column` on, with `pad` columns behind them."""
    tokens = made["x"].shape[0]
    widths = {n: made[n][0].numel() for n in ("x", "B", "C", "dt")}
    memory = torch.full((tokens, column + sum(widths.values()) + pad), float("nan"), dtype=made["x"].dtype)
    views = dict(made)
    for name, width in widths.items():
        views[name] = memory[:, column : column + width].view(tokens, *made[name].shape[1:])
        views[name].copy_(made[name])
        column += width
    return views


@KERNEL
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(F32, marks=pytest.mark.slow)])
def test_views_of_one_projection(gpu: Report, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """vllm#32710, TRT-LLM#14439, vllm#48363: odd row pitches and addresses off by an element, with two kernels for all.
    These sum y in orders of their own, so that its last bit may differ between them, and only there."""
    asked = []
    real = launch.compiled
    monkeypatch.setattr(launch, "compiled", lambda kernel, arch: asked.append(kernel) or real(kernel, arch))
    made = packed(inputs(1, 24, dtype=dtype))
    made["dt"], made["query_start_loc"] = made["dt"].to(dtype), offsets(13, 11)
    plain = cute_ssd.mamba_chunk_scan_varlen(**made)
    by_alignment = {True: plain}
    for column, pad in ((0, 4), (0, 1), (1, 0), (2, 2), (3, 8), (5, 32), (8, 4), (7, 7)):
        got = cute_ssd.mamba_chunk_scan_varlen(**fused(made, column, pad))
        torch.testing.assert_close(got, plain, rtol=torch.finfo(dtype).eps, atol=1e-6)
        assert torch.equal(got, by_alignment.setdefault(asked[-1].aligned, got))
    assert sorted(kernel.aligned for kernel in set(asked)) == [False, True]


def far(tensor: Tensor, axis: int, pitch: int) -> Tensor:
    """A copy whose elements along `axis` are `pitch` apart, in memory of which only the pages in use exist."""
    strides = list(tensor.contiguous().stride())
    strides[axis] = pitch
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True)) + 1
    memory = torch.frombuffer(mmap.mmap(-1, reach * tensor.element_size()), dtype=torch.uint8).view(tensor.dtype)
    return memory.as_strided(tensor.shape, strides).copy_(tensor)


def test_offsets_beyond_31_bits() -> None:
    """mamba#1015, #987: dt, x, B and C are columns of a wide projection, seqlen * row pitch > 2^31 (four rows of 2^30
    here instead of many); vllm#48109: slot * nheads * headdim * dstate > 2^31."""
    made = packed(inputs(1, 4, dtype=torch.float16))
    made["dt"], made["query_start_loc"], made["z"] = made["dt"].half(), offsets(4), torch.randn_like(made["x"])
    pool, slots = torch.randn(2, 4, 8, 16).half(), torch.tensor([1], dtype=torch.int32)
    state = {"cache_indices": slots, "has_initial_state": torch.tensor([True]), "dt_softplus": False}
    distant, wide = far(pool, 0, 2**31 + 64), {n: far(made[n], 0, 2**30 + 8) for n in ("x", "dt", "B", "C", "z")}
    with cute_ssd.emulate("sm_100a", sanitize=False):  # the sanitizer's shadow of such memory would be dense
        want = cute_ssd.mamba_chunk_scan_varlen_inplace(**made, **state, ssm_pool=pool)
        got = cute_ssd.mamba_chunk_scan_varlen_inplace(**{**made, **wide}, **state, ssm_pool=distant)
        assert torch.equal(got, want) and torch.equal(distant, pool)
        one = {n: {**made, **wide}[n] if n == "A" else {**made, **wide}[n][3:] for n in (*NAMES, "z")}
        near = {n: made[n] if n == "A" else made[n][3:] for n in (*NAMES, "z")}
        got = cute_ssd.selective_state_update(distant, **one, state_batch_indices=slots)
        want = cute_ssd.selective_state_update(pool, **near, state_batch_indices=slots)
        assert torch.equal(got, want) and torch.equal(distant, pool)


@pytest.mark.slow
@pytest.mark.parametrize("report", ["test_offsets_beyond_two_to_the_31", "test_slot_offsets_beyond_two_to_the_31"])
def test_reports_of_large_tensors(report: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with the sizes of the reports: 115800 tokens of a projection of 18560 columns, 2050 slots of 2 MiB."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    with cute_ssd.emulate("sm_100a", sanitize=False) as ran:
        getattr(test_reports, report)("cpu", None)
    assert ran.launches


@KERNEL
def test_strided_last_dimension_is_refused(gpu: Report) -> None:
    made = inputs(1, 5)
    for name in ("x", "B", "C"):
        strided = made[name].repeat_interleave(2, -1)[..., ::2]
        with pytest.raises(UnsupportedError, match=f"the last dimension of {name} has stride 2, expected 1"):
            scan({**made, name: strided})
    assert not gpu.launches


# What is refused, before anything is compiled or launched


def compiles(*args: Any) -> None:
    raise AssertionError("compiled")


@pytest.fixture
def no_kernel(gpu: Report, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launch, "compiled", compiles)
    yield
    assert not gpu.launches


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize(
    "sizes, reason",
    [
        ({"dtype": torch.float64}, "x is float64, expected float32, bfloat16 or float16"),
        ({"headdim": 257}, "headdim is 257, expected at most 256"),
        ({"dstate": 300}, "dstate is 300, expected at most 256"),
        ({"headdim": 300, "dstate": 300}, "headdim is 300, expected at most 256; dstate is 300"),
    ],
)
def test_the_plan_refuses(sizes: dict[str, Any], reason: str) -> None:
    made = inputs(1, 3, **sizes)
    with pytest.raises(UnsupportedError, match=f"no kernel on sm_100a for this call: {reason}.*pass CPU tensors"):
        scan(made)
    row = packed(made)
    with pytest.raises(UnsupportedError, match=reason):
        cute_ssd.mamba_chunk_scan_varlen(**row, query_start_loc=offsets(3))
    state = torch.zeros(3, *made["x"].shape[2:], made["B"].shape[3])
    with pytest.raises(UnsupportedError, match=reason):
        cute_ssd.selective_state_update(state, **row)
    assert (state == 0).all()
    with pytest.raises(UnsupportedError, match=reason):
        cute_ssd.explain(cute_ssd.mamba_chunk_scan_combined, **made, chunk_size=64)


@pytest.mark.usefixtures("no_kernel")
def test_what_needs_another_kernel_is_refused() -> None:
    made = inputs(1, 5)
    with pytest.raises(UnsupportedError, match=r"seq_idx makes sequences that only the data know \(pass cu_seqlens"):
        scan(made, seq_idx=torch.zeros(1, 5, dtype=torch.int32))


@pytest.mark.usefixtures("no_kernel")
def test_other_float64_tensors_are_refused() -> None:
    made = inputs(1, 5)
    with pytest.raises(UnsupportedError, match="dt is float64, expected float32"):
        scan({**made, "dt": made["dt"].double()})
    with pytest.raises(UnsupportedError, match="for this call: the state is float64, expected float32"):
        scan(made, return_final_states=True, state_dtype=torch.float64)
    state = torch.zeros(3, 4, 8, 16, dtype=torch.float64)
    with pytest.raises(UnsupportedError, match="for this call: the state is float64"):
        cute_ssd.explain(cute_ssd.selective_state_update, state, **step())


def test_a_gradient_is_refused_before_the_forward_runs(gpu: Report) -> None:
    made = inputs(1, 3)
    leaf = {**made, "x": made["x"].clone().requires_grad_()}
    for call in (scan, lambda made: cute_ssd.explain(cute_ssd.mamba_chunk_scan_combined, **made, chunk_size=64)):
        with pytest.raises(
            UnsupportedError, match=r"no gradient on a GPU yet.*torch\.no_grad\(\), or on CPU tensors\."
        ):
            call(leaf)
    log_decay = -torch.rand(1, 4, 3).requires_grad_()
    with pytest.raises(UnsupportedError, match="no gradient on a GPU yet"):
        cute_ssd.ssd_chunk_scan(made["x"], log_decay, made["B"], made["C"])
    assert not gpu.launches
    with torch.no_grad():
        y = scan(leaf)
    assert torch.equal(y, scan(made)) and not y.requires_grad


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_103a", "sm_120a"])
def test_explain(arch: str) -> None:
    """The same anywhere, without a GPU and without emulate()."""
    scan_plan = cute_ssd.explain(cute_ssd.mamba_chunk_scan_combined, **inputs(2, 50), chunk_size=64, arch=arch)
    assert scan_plan.backend == "recurrence" and scan_plan.device.arch == arch
    lines = str(scan_plan).splitlines()
    assert lines[0] == f"mamba_chunk_scan_combined on {arch}"
    why = "float32 inputs are never rounded" if arch in ("sm_100a", "sm_103a") else f"{arch} has no tensor-core kernel"
    assert f"recurrence: token by token, the state in registers; {why}" in lines[2]
    state = torch.zeros(3, 4, 8, 16)
    decode = cute_ssd.explain(cute_ssd.selective_state_update, state, **step(), arch=arch)
    assert "recurrence: a decode step reads and writes each state once" in str(decode)


# A model


@KERNEL
def test_decode_loop_of_a_model(gpu: Report) -> None:
    """Two Mamba-2 layers of transformers, token by token: each SSM step is a launch, the logits are the model's own."""
    pytest.importorskip("transformers")
    from cute_ssd.compat.transformers import enable

    from .test_compat_transformers import TOKENS, TOLERANCE, build, error

    def logits(model: Any) -> Tensor:
        cache, found = None, []
        for t in range(6):
            output = model(TOKENS[:, t : t + 1], cache=cache, use_cache=True)
            cache = output.cache
            found.append(output.logits)
        return torch.cat(found, 1)

    model = build("Mamba2")
    with torch.no_grad():
        own = logits(model)
        assert not gpu.launches
        with enable(model):
            ours = logits(model)
    assert error(ours, own) < TOLERANCE
    assert len(gpu.launches) == 2 * 6


# A CUDA graph


def serving_step(
    seed: int, lengths: tuple[int, int], slots: tuple[int, int], started: tuple[bool, bool], sizes: tuple[Any, ...]
) -> dict[str, Tensor]:
    """Tensors on the CUDA device: sequences for the pool, and a token more for each of its slots."""
    headdim, dstate, dtype = sizes
    made = inputs(1, sum(lengths), 4, headdim, 2, dstate, dtype, "cuda", seed)
    token = inputs(2, 1, 4, headdim, 2, dstate, dtype, "cuda", seed + 1)
    g = torch.Generator().manual_seed(seed)
    pool = torch.randn(5, 4, headdim, dstate, generator=g)
    others = {"ssm_pool": pool, "cache_indices": torch.tensor(slots, dtype=torch.int32),
              "query_start_loc": offsets(*lengths), "has_initial_state": torch.tensor(started)}  # fmt: skip
    tokens = {f"next {name}": token[name][:, 0] for name in TOKENS[:4]}
    return {**packed(made), **{name: t.cuda() for name, t in others.items()}, **tokens}


def serve(step: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """y of the sequences, y of the tokens behind them, and the pool."""
    y = cute_ssd.mamba_chunk_scan_varlen_inplace(**{n: t for n, t in step.items() if not n.startswith("next ")})
    tokens = {name: step[f"next {name}"] for name in TOKENS[:4]}
    pool, slots = step["ssm_pool"], step["cache_indices"]
    return y, cute_ssd.selective_state_update(pool, **tokens, A=step["A"], state_batch_indices=slots), pool


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("sizes", [(8, 16, F32), (64, 128, torch.bfloat16)], ids=["recurrence", "tiles"])
def test_a_captured_step_serves_other_sequences(sizes: tuple[Any, ...]) -> None:
    """Nothing of a call depends on what the host knows: other tokens, offsets, slots and flags in the same memory give
    the bits of an eager call."""
    static = serving_step(0, (500, 600), (3, 1), (True, False), sizes)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles and loads the kernels
        serve(static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = serve(static)
    for seed, lengths, slots, started in (
        (1, (500, 600), (3, 1), (True, False)),
        (2, (1, 1099), (0, 4), (False, True)),
        (3, (1100, 0), (2, -1), (True, True)),
        (4, (129, 971), (-1, 0), (False, False)),
    ):
        other = serving_step(seed, lengths, slots, started, sizes)
        for name, tensor in static.items():
            tensor.copy_(other[name])
        graph.replay()
        for got, want in zip(captured, serve(other), strict=True):
            assert torch.equal(bits(got), bits(want))
