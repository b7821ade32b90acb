"""compat.vllm and compat.mamba_ssm: signatures, semantics against a token loop, and patching of stand-in packages."""

import inspect
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_ssd
from cute_ssd import DtypeError, ShapeError, UnsupportedError
from cute_ssd.compat import mamba_ssm, vllm

# The parameter lists of state-spaces/mamba 2.3.2 and of vLLM's main branch in mid 2026.
MAMBA_SCAN = (
    "x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, cu_seqlens=None, "
    "dt_softplus=False, dt_limit=(0.0, inf), return_final_states=False, return_varlen_states=False, state_dtype=None"
)
MAMBA_STEP = "state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None"
VLLM_SCAN = (
    "x, dt, A, B, C, chunk_size, cu_seqlens, cu_chunk_seqlens, last_chunk_indices, seq_idx, out, D=None, z=None, "
    "dt_bias=None, initial_states=None, dt_softplus=False, dt_limit=(0.0, inf), return_intermediate_states=False, "
    "state_dtype=None"
)
VLLM_STEP = (
    "state, x, dt, A, B, C, D, dt_bias, z=None, dt_softplus=False, state_batch_indices=None, "
    "dst_state_batch_indices=None, null_block_id=0, out=None, num_accepted_tokens=None, cu_seqlens=None, "
    "is_blackwell=False, enable_stochastic_rounding=False, cache_philox_rounds=0"
)
# Older or forked versions: without cu_seqlens, and with z before dt_bias and pad_slot_id.
VLLM_SCAN_WITHOUT_CU_SEQLENS = VLLM_SCAN.replace("cu_seqlens, cu_chunk", "cu_chunk")
VLLM_STEP_2025 = (
    "state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None, "
    "dst_state_batch_indices=None, pad_slot_id=-1, out=None, num_accepted_tokens=None, cu_seqlens=None"
)


def bare(function: Callable[..., Any]) -> str:
    """The parameter list without annotations."""
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(parameters))[1:-1]


def test_signatures_of_mamba_ssm() -> None:
    assert bare(mamba_ssm.mamba_chunk_scan_combined) == MAMBA_SCAN
    assert bare(mamba_ssm.selective_state_update) == MAMBA_STEP
    assert bare(cute_ssd.mamba_chunk_scan_combined) == MAMBA_SCAN
    assert bare(cute_ssd.selective_state_update).startswith(MAMBA_STEP)


@pytest.mark.parametrize(
    ("function", "theirs"),
    [(vllm.mamba_chunk_scan_combined_varlen, VLLM_SCAN), (vllm.selective_state_update, VLLM_STEP)],
)
def test_signatures_of_vllm(function: Callable[..., Any], theirs: str) -> None:
    """The same names in the same order with the same defaults; what vLLM requires may be left out here."""
    ours = [parameter.split("=")[0] for parameter in bare(function).replace("(0.0, inf)", "LIMIT").split(", ")]
    wanted = [parameter.partition("=") for parameter in theirs.replace("(0.0, inf)", "LIMIT").split(", ")]
    assert ours == [name for name, _, _ in wanted]
    parameters = inspect.signature(function).parameters
    for name, _, default in wanted:
        if default:
            assert parameters[name].default == eval(default, {"LIMIT": (0.0, float("inf"))})


# vLLM's scan


def token_loop(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    bounds: list[int],
    start: Tensor | None,
    stops: set[int],
    **more: Any,
) -> tuple[Tensor, dict[int, Tensor], Tensor]:
    """y, the states after the tokens `stops`, and the last state of each sequence; float64, one head at a time."""
    x, dt, A, B, C = (t.double() for t in (x, dt, A, B, C))
    nheads, headdim = x.shape[1:]
    per_group = nheads // B.shape[1]
    y = torch.zeros_like(x)
    inside: dict[int, Tensor] = {}
    finals = torch.zeros(len(bounds) - 1, nheads, headdim, B.shape[2], dtype=torch.float64)
    low, high = more.get("dt_limit", (0.0, float("inf")))
    for s, (first, stop) in enumerate(pairwise(bounds)):
        if start is not None:
            finals[s] = start[s].double()
        for t in range(first, stop):
            for h in range(nheads):
                step = dt[t, h] + (more["dt_bias"][h].double() if "dt_bias" in more else 0)
                if more.get("dt_softplus"):
                    step = torch.log1p(torch.exp(step))
                step = step.clamp(low, high)
                g = h // per_group
                finals[s, h] = torch.exp(A[h] * step) * finals[s, h] + step * torch.outer(x[t, h], B[t, g])
                y[t, h] = finals[s, h] @ C[t, g]
                if "D" in more:
                    y[t, h] += more["D"][h].double() * x[t, h]
                if "z" in more:
                    gate = more["z"][t, h].double()
                    y[t, h] *= gate / (1 + torch.exp(-gate))
            if t + 1 in stops:
                inside[t + 1] = finals[s].clone()
    return y, inside, finals


def packed(lengths: list[int], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    g = torch.Generator().manual_seed(sum(lengths))
    total, nheads, headdim, ngroups, dstate = sum(lengths), 4, 6, 2, 8
    return {
        "x": torch.randn(total, nheads, headdim, generator=g).to(dtype),
        "dt": torch.randn(total, nheads, generator=g),
        "A": -torch.rand(nheads, generator=g) * 4 - 0.1,
        "B": torch.randn(total, ngroups, dstate, generator=g).to(dtype),
        "C": torch.randn(total, ngroups, dstate, generator=g).to(dtype),
        "D": torch.randn(nheads, generator=g),
        "z": torch.randn(total, nheads, headdim, generator=g).to(dtype),
        "dt_bias": torch.randn(nheads, generator=g) - 1,
        "dt_softplus": True,
        "dt_limit": (0.01, 2.0),
    }


def metadata(lengths: list[int], chunk_size: int, first_chunk: int | None = None) -> dict[str, Tensor]:
    """Chunks as vLLM makes them: none across a sequence, the first of a sequence shorter when it continues one."""
    chunks, seq_idx, last = [0], [], []
    position = 0
    for s, length in enumerate(lengths):
        done = 0
        while done < length:
            size = first_chunk if done == 0 and first_chunk is not None else chunk_size
            size = min(size, length - done)
            done += size
            chunks.append(position + done)
            seq_idx.append(s)
        position += length
        last.append(len(chunks) - 2 if length else -1)
    int32 = {"dtype": torch.int32}
    return {
        "cu_chunk_seqlens": torch.tensor(chunks, **int32),
        "last_chunk_indices": torch.tensor(last, **int32),
        "seq_idx": torch.tensor(seq_idx, **int32),
    }


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


LENGTHS = [[1], [16], [5, 1, 17, 2], [9, 0, 24, 0], [0, 30, 3]]


@pytest.mark.parametrize("first_chunk", [None, 3])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_vllm_scan(lengths: list[int], first_chunk: int | None) -> None:
    """Every way of describing the sequences: y in `out`, the states of sequences and of chunks, from a given start."""
    made, chunks, cu_seqlens = packed(lengths), metadata(lengths, 8, first_chunk), offsets(lengths)
    start = torch.randn(len(lengths), 4, 6, 8)
    ends = chunks["cu_chunk_seqlens"][1:].tolist()
    y, inside, finals = token_loop(**made, bounds=cu_seqlens.tolist(), start=start, stops=set(ends))
    for given in (
        {"cu_seqlens": cu_seqlens, **chunks},
        {"cu_seqlens": cu_seqlens},
        {"cu_seqlens": None, **chunks},
        {"cu_seqlens": cu_seqlens, "cu_chunk_seqlens": chunks["cu_chunk_seqlens"]},
    ):
        out = torch.full_like(made["x"], float("nan"))
        pointer = out.data_ptr()
        states = vllm.mamba_chunk_scan_combined_varlen(chunk_size=8, out=out, initial_states=start, **given, **made)
        assert out.data_ptr() == pointer
        torch.testing.assert_close(out.double(), y, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(states.double(), finals, atol=1e-5, rtol=1e-5)
        assert states.dtype == torch.float32
        again = torch.empty_like(out)
        every = vllm.mamba_chunk_scan_combined_varlen(
            chunk_size=8, out=again, initial_states=start, return_intermediate_states=True, **given, **made
        )
        assert torch.equal(again, out)
        if "cu_chunk_seqlens" in given or first_chunk is None:
            assert every.shape == (len(ends), 4, 6, 8)
            want = torch.stack([inside[end] for end in ends])
            torch.testing.assert_close(every.double(), want, atol=1e-5, rtol=1e-5)


def test_vllm_scan_without_states_or_gates() -> None:
    lengths = [7, 12]
    made = {name: packed(lengths)[name] for name in ("x", "A", "B", "C")}
    made["dt"] = packed(lengths)["dt"].abs()
    out = torch.empty_like(made["x"])
    states = vllm.mamba_chunk_scan_combined_varlen(**made, chunk_size=256, cu_seqlens=offsets(lengths), out=out)
    y, _, finals = token_loop(**made, bounds=[0, 7, 19], start=None, stops=set())
    torch.testing.assert_close(out.double(), y, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states.double(), finals, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("state_dtype", [None, torch.float16, torch.bfloat16])
def test_vllm_scan_is_our_packed_scan(state_dtype: torch.dtype | None) -> None:
    lengths = [300, 1, 77]
    made, start = packed(lengths, torch.bfloat16), torch.randn(3, 4, 6, 8).to(torch.bfloat16)
    y, states = cute_ssd.mamba_chunk_scan_varlen(
        query_start_loc=offsets(lengths),
        initial_states=start,
        return_final_states=True,
        state_dtype=state_dtype,
        **made,
    )
    out = torch.empty_like(made["x"])
    got = vllm.mamba_chunk_scan_combined_varlen(
        chunk_size=128,
        cu_seqlens=offsets(lengths),
        **metadata(lengths, 128),
        out=out,
        initial_states=start,
        state_dtype=state_dtype,
        **made,
    )
    assert torch.equal(out, y) and torch.equal(got, states)
    assert got.dtype == (state_dtype or torch.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out": None}, "out is None"),
        ({"cu_seqlens": None, "last_chunk_indices": None}, "cu_seqlens and last_chunk_indices are None"),
        ({"cu_seqlens": None, "cu_chunk_seqlens": None}, "cu_seqlens and cu_chunk_seqlens are None"),
        ({"cu_seqlens": None, "last_chunk_indices": torch.tensor([2, 9])}, "last_chunk_indices runs from 2 to 9"),
        ({"cu_seqlens": None, "last_chunk_indices": torch.tensor([4, 1])}, "seq_idx.3. is 1"),
        ({"last_chunk_indices": torch.tensor([1, 4])}, "expected one that ends at 20"),
        ({"last_chunk_indices": torch.tensor([2, -1])}, "last_chunk_indices\\[1\\] is -1"),
        ({"last_chunk_indices": torch.tensor([2])}, "last_chunk_indices has shape"),
        ({"last_chunk_indices": torch.tensor([2, 7])}, "last_chunk_indices runs from 2 to 7"),
        ({"seq_idx": torch.tensor([0, 0, 1, 1, 1])}, "seq_idx\\[2\\] is 1"),
        ({"seq_idx": torch.tensor([0, 0, 0, 1, 5])}, "seq_idx\\[4\\] is 5"),
        ({"seq_idx": torch.tensor([0, 0, 0, 1])}, "seq_idx has shape"),
        ({"cu_chunk_seqlens": torch.tensor([0, 8, 16, 21, 28, 32])}, "no boundary at 20"),
        (
            {"cu_chunk_seqlens": torch.tensor([0, 8, 16, 21, 28, 32]), "return_intermediate_states": True},
            "no boundary at 20|ends at 21",
        ),
        ({"cu_seqlens": torch.tensor([0, 20, 40])}, "no boundary at 40|ends at 40"),
        ({"cu_seqlens": torch.tensor([[0, 20, 32]])}, "cu_seqlens has 2 dimensions"),
        ({"cu_seqlens": torch.tensor(32)}, "cu_seqlens has 0 dimensions"),
        ({"cu_chunk_seqlens": torch.tensor([[0, 20, 32]])}, "cu_chunk_seqlens has 2 dimensions"),
        ({"last_chunk_indices": torch.tensor([[2, 4]]), "cu_seqlens": None}, "last_chunk_indices has 2 dimensions"),
        ({"seq_idx": torch.tensor([[0, 0, 0, 1, 1]])}, "seq_idx has 2 dimensions"),
    ],
)
def test_vllm_scan_refuses_contradictions(changes: dict[str, Any], message: str) -> None:
    lengths = [20, 12]
    made = packed(lengths)
    out = torch.full_like(made["x"], 7.0)
    arguments = {"chunk_size": 8, "cu_seqlens": offsets(lengths), **metadata(lengths, 8), "out": out, **made, **changes}
    with pytest.raises(ShapeError, match=message):
        vllm.mamba_chunk_scan_combined_varlen(**arguments)
    assert (out == 7.0).all()


@pytest.mark.parametrize("name", ["cu_seqlens", "cu_chunk_seqlens", "last_chunk_indices", "seq_idx"])
def test_vllm_scan_refuses_other_types(name: str) -> None:
    lengths = [20, 12]
    made = packed(lengths)
    arguments = {"chunk_size": 8, "cu_seqlens": offsets(lengths), **metadata(lengths, 8), **made}
    arguments["out"] = out = torch.full_like(made["x"], 7.0)
    for value, message in (([0, 20], "is a list, expected a torch tensor"), (arguments[name].float(), "is float32")):
        with pytest.raises(DtypeError, match=f"^{name} {message}"):
            vllm.mamba_chunk_scan_combined_varlen(**{**arguments, name: value})
    assert (out == 7.0).all()


# vLLM's decode step


def step_inputs(batch: int = 3, slots: int = 6) -> tuple[Tensor, dict[str, Any]]:
    made = packed([batch])
    headdim, dstate = made["x"].shape[2], made["B"].shape[2]
    return torch.randn(slots, 4, headdim, dstate), {
        "x": made["x"],
        "dt": made["dt"][:, :, None].expand(-1, -1, headdim),
        "A": made["A"][:, None, None].expand(-1, headdim, dstate),
        "B": made["B"],
        "C": made["C"],
        "D": made["D"][:, None].expand(-1, headdim),
        "dt_bias": made["dt_bias"][:, None].expand(-1, headdim),
        "z": made["z"],
        "dt_softplus": True,
    }


def stepped(state: Tensor, made: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """y and new states of the rows by the token loop."""
    plain = {"x": made["x"], "dt": made["dt"][..., 0], "A": made["A"][:, 0, 0], "B": made["B"], "C": made["C"]}
    more = {"D": made["D"][:, 0], "dt_bias": made["dt_bias"][:, 0], "z": made["z"], "dt_softplus": True}
    y, _, finals = token_loop(**plain, **more, bounds=list(range(len(state) + 1)), start=state, stops=set())
    return y, finals


@pytest.mark.parametrize("shape", [(3,), (3, 1), (5,)])
@pytest.mark.parametrize("same", ["none", "identical", "equal"])
def test_vllm_step(shape: tuple[int, ...], same: str) -> None:
    state, made = step_inputs()
    slots = torch.tensor([4, 0, 2, 5, 5][: shape[0]], dtype=torch.int32).view(shape)
    before, out = state.clone(), torch.full_like(made["x"], float("nan"))
    write = {"none": None, "identical": slots, "equal": slots.clone()}[same]
    result = vllm.selective_state_update(
        state, **made, state_batch_indices=slots, dst_state_batch_indices=write, out=out, is_blackwell=True
    )
    assert result is None
    y, finals = stepped(before[[4, 0, 2]], made)
    live = [0, 2]
    torch.testing.assert_close(out[live].double(), y[live], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state[[4, 2]].double(), finals[live], atol=1e-5, rtol=1e-5)
    assert (out[1] == 0).all()  # slot 0 is vLLM's null block
    assert torch.equal(state[[0, 1, 3, 5]], before[[0, 1, 3, 5]])


def test_vllm_step_writes_elsewhere() -> None:
    state, made = step_inputs()
    before, out = state.clone(), torch.empty_like(made["x"])
    read, write = torch.tensor([4, 4, -1]), torch.tensor([1, 0, 3])
    vllm.selective_state_update(
        state, **made, state_batch_indices=read, dst_state_batch_indices=write, null_block_id=-1, out=out
    )
    y, finals = stepped(before[[4, 4, 4]], made)
    torch.testing.assert_close(out[:2].double(), y[:2], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state[[1, 0]].double(), finals[:2], atol=1e-5, rtol=1e-5)
    assert (out[2] == 0).all() and torch.equal(state[2:], before[2:])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_accepted_tokens": torch.ones(3)}, UnsupportedError, "num_accepted_tokens"),
        ({"cu_seqlens": torch.arange(4)}, UnsupportedError, "cu_seqlens"),
        ({"cu_seqlens": torch.arange(4), "enable_stochastic_rounding": True}, UnsupportedError, "cu_seq.*stochastic"),
        ({"state_batch_indices": torch.ones(3, 2).int()}, UnsupportedError, "several slots"),
        ({"out": None}, ShapeError, "out is None"),
        ({"state_batch_indices": None, "dst_state_batch_indices": torch.arange(3)}, ShapeError, "expected both"),
        ({"dst_state_batch_indices": torch.tensor([1, 1, 2])}, ShapeError, r"dst_state_batch_indices\[1\] is 1"),
        ({"dst_state_batch_indices": torch.tensor([1, 9, 2])}, ShapeError, r"dst_state_batch_indices\[1\] is 9"),
        ({"state_batch_indices": torch.tensor([1, 9, 2])}, ShapeError, r"state_batch_indices\[1\] is 9"),
        ({"state_batch_indices": torch.tensor([1, 2])}, ShapeError, r"^state_batch_indices has batch \(axis 0\) 2"),
        ({"state_batch_indices": torch.tensor(1)}, ShapeError, "^state_batch_indices has 0 dimensions"),
        ({"dst_state_batch_indices": torch.tensor([2])}, ShapeError, r"dst_state_batch_indices has batch \(axis 0\) 1"),
        ({"dst_state_batch_indices": torch.tensor(2)}, ShapeError, "dst_state_batch_indices has 0 dimensions"),
        ({"dst_state_batch_indices": torch.tensor([4.0, 5.0, 0.0])}, DtypeError, "dst_state_batch_indices is float32"),
        ({"dst_state_batch_indices": [4, 5, 0]}, DtypeError, "dst_state_batch_indices is a list"),
        ({"state_batch_indices": [1, 2, 3]}, DtypeError, "state_batch_indices is a list"),
    ],
)
def test_vllm_step_refuses(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    state, made = step_inputs()
    before, out = state.clone(), torch.full_like(made["x"], 7.0)
    arguments = {**made, "state_batch_indices": torch.tensor([1, 2, 3]), "out": out, **changes}
    with pytest.raises(error, match=message):
        vllm.selective_state_update(state, **arguments)
    assert torch.equal(state, before) and (out == 7.0).all()


# mamba_ssm


def test_mamba_ssm_functions_are_ours() -> None:
    made = packed([40])
    batched = {name: made[name][None] if name in ("x", "dt", "B", "C", "z") else value for name, value in made.items()}
    seq_idx = torch.tensor([[0] * 15 + [1] * 25], dtype=torch.int32)
    more = {"chunk_size": 16, "seq_idx": seq_idx, "cu_seqlens": torch.tensor([0, 15, 40])}
    flags = {"return_final_states": True, "return_varlen_states": True, "state_dtype": torch.bfloat16}
    got = mamba_ssm.mamba_chunk_scan_combined(**batched, **more, **flags)
    want = cute_ssd.mamba_chunk_scan_combined(**batched, **more, **flags)
    assert len(got) == 3 and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    state, step = step_inputs()
    other = state.clone()
    slots = torch.tensor([4, -1, 2])
    y = mamba_ssm.selective_state_update(state, **step, state_batch_indices=slots)
    assert torch.equal(y, cute_ssd.selective_state_update(other, **step, state_batch_indices=slots))
    assert torch.equal(state, other)


# Patching of stand-ins


def stand_in(name: str, parameters: str) -> Callable[..., Any]:
    scope: dict[str, Any] = {"inf": float("inf"), "__name__": "stand_in"}
    exec(f"def {name}({parameters}):\n    return 'the original'", scope)
    found: Callable[..., Any] = scope[name]
    return found


def package(monkeypatch: pytest.MonkeyPatch, path: str, **contents: Any) -> ModuleType:
    """A module at `path` in sys.modules, and its parents."""
    names = path.split(".")
    for i in range(1, len(names) + 1):
        name = ".".join(names[:i])
        if name not in sys.modules:
            made = ModuleType(name)
            made.__path__ = []
            monkeypatch.setitem(sys.modules, name, made)
    vars(sys.modules[path]).update(contents)
    return sys.modules[path]


@pytest.fixture
def stub_mamba_ssm(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ModuleType]]:
    """The modules of mamba_ssm that define or import the functions, and one outside that does under other names."""
    scan, step = stand_in("mamba_chunk_scan_combined", MAMBA_SCAN), stand_in("selective_state_update", MAMBA_STEP)
    fused = stand_in("mamba_split_conv1d_scan_combined", "zxbcdt, conv1d_weight")
    scans = {"mamba_chunk_scan_combined": scan, "mamba_split_conv1d_scan_combined": fused}
    yield [
        package(monkeypatch, "mamba_ssm.ops.triton.ssd_combined", **scans),
        package(monkeypatch, "mamba_ssm.ops.triton.selective_state_update", selective_state_update=step),
        package(monkeypatch, "mamba_ssm.modules.mamba2", selective_state_update=step, **scans),
        package(monkeypatch, "mamba_ssm.modules.mamba2_simple", mamba_chunk_scan_combined=scan),
        package(monkeypatch, "a_users_model", ssd=scan, ssu=step),
    ]


def contents(modules: list[ModuleType]) -> list[dict[str, Any]]:
    return [dict(vars(module)) for module in modules]


def test_enable_mamba_ssm(stub_mamba_ssm: list[ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    scan, step, mamba2, simple, user = stub_mamba_ssm
    before = contents(stub_mamba_ssm)
    made = packed([20])
    batched = {name: made[name][None] if name in ("x", "dt", "B", "C", "z") else value for name, value in made.items()}
    expected = cute_ssd.mamba_chunk_scan_combined(**batched, chunk_size=16)
    handle = mamba_ssm.enable()
    for module in (scan, mamba2, simple):
        assert torch.equal(module.mamba_chunk_scan_combined(**batched, chunk_size=16), expected)
    assert torch.equal(user.ssd(**batched, chunk_size=16), expected)
    state, arguments = step_inputs(3, 3)
    want = cute_ssd.selective_state_update(state.clone(), **arguments)
    for update in (step.selective_state_update, mamba2.selective_state_update, user.ssu):
        assert torch.equal(update(state.clone(), **arguments), want)
    with pytest.raises(UnsupportedError, match="use_mem_eff_path=False"):
        mamba2.mamba_split_conv1d_scan_combined(None, None)
    late = package(monkeypatch, "a_late_import", scan=scan.mamba_chunk_scan_combined)
    handle.disable()
    assert contents(stub_mamba_ssm) == before
    assert late.scan is scan.mamba_chunk_scan_combined


def test_enable_twice_and_nesting(stub_mamba_ssm: list[ModuleType]) -> None:
    scan, before = stub_mamba_ssm[0], contents(stub_mamba_ssm)
    original = scan.mamba_chunk_scan_combined
    first, second = mamba_ssm.enable(), mamba_ssm.enable()
    assert scan.mamba_chunk_scan_combined.__wrapped__ is original
    second.disable()
    assert contents(stub_mamba_ssm) == before
    first.disable()
    with mamba_ssm.enable():
        with mamba_ssm.enable():
            pass
        assert scan.mamba_chunk_scan_combined is not original
    assert contents(stub_mamba_ssm) == before


def test_our_own_functions_stay_ours(stub_mamba_ssm: list[ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that imported cute_ssd's functions on purpose keeps them when patching is undone."""
    mine = package(monkeypatch, "on_purpose", scan=mamba_ssm.mamba_chunk_scan_combined)
    mamba_ssm.enable().disable()
    assert mine.scan is mamba_ssm.mamba_chunk_scan_combined


def stub_vllm(monkeypatch: pytest.MonkeyPatch, scan: str, step: str, dispatch: bool) -> list[ModuleType]:
    ops = "vllm.model_executor.layers.mamba.ops"
    scan_function = stand_in("mamba_chunk_scan_combined_varlen", scan)
    step_function = stand_in("selective_state_update", step)
    found = [
        package(monkeypatch, f"{ops}.ssd_combined", mamba_chunk_scan_combined_varlen=scan_function),
        package(monkeypatch, f"{ops}.mamba_ssm", selective_state_update=step_function),
    ]
    if dispatch:
        step_function = stand_in("selective_state_update", step.split(", enable_stochastic")[0])
        found.append(package(monkeypatch, f"{ops}.ssu_dispatch", selective_state_update=step_function))
    mixer = {"mamba_chunk_scan_combined_varlen": scan_function, "selective_state_update": step_function}
    found.append(package(monkeypatch, "vllm.model_executor.layers.mamba.mamba_mixer2", **mixer))
    return found


@pytest.mark.parametrize("today", [True, False])
def test_enable_vllm(monkeypatch: pytest.MonkeyPatch, today: bool) -> None:
    """Today's order of arguments, and an older one, called by position."""
    versions = (VLLM_SCAN, VLLM_STEP) if today else (VLLM_SCAN_WITHOUT_CU_SEQLENS, VLLM_STEP_2025)
    modules = stub_vllm(monkeypatch, *versions, dispatch=today)
    mixer, before = modules[-1], contents(modules)
    lengths = [9, 4]
    made, chunks, out = packed(lengths), metadata(lengths, 8), torch.empty(13, 4, 6)
    y, states = cute_ssd.mamba_chunk_scan_varlen(query_start_loc=offsets(lengths), return_final_states=True, **made)
    first = [made.pop(name) for name in ("x", "dt", "A", "B", "C")]
    sequences = [offsets(lengths)] if today else []
    state, arguments = step_inputs()
    want_state, slots = state.clone(), torch.tensor([1, 2, 3])
    want = cute_ssd.selective_state_update(want_state, **arguments, state_batch_indices=slots)
    with vllm.enable():
        got = mixer.mamba_chunk_scan_combined_varlen(*first, 8, *sequences, *chunks.values(), out, **made)
        assert torch.equal(got, states) and torch.equal(out, y)
        row = torch.empty_like(arguments["x"])
        tensors = [arguments.pop(name) for name in ("x", "dt", "A", "B", "C", "D")]
        gates = [arguments["dt_bias"], arguments["z"]] if today else [arguments["z"], arguments["dt_bias"]]
        pad = {"null_block_id": 0} if today else {"pad_slot_id": -1}
        assert mixer.selective_state_update(state, *tensors, *gates, True, slots, out=row, **pad) is None
        assert torch.equal(row, want) and torch.equal(state, want_state)
        if not today:
            padded = torch.tensor([1, -1, 2])
            mixer.selective_state_update(state, *tensors, *gates, True, padded, out=row)
            assert (row[1] == 0).all()
    assert contents(modules) == before


def test_enable_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("vllm", "mamba_ssm")]:
        monkeypatch.delitem(sys.modules, name)
    for name, compat in (("vllm", vllm), ("mamba_ssm", mamba_ssm)):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(UnsupportedError, match=f"importing {name}.* failed.*expected an installed"):
            compat.enable()
        monkeypatch.delitem(sys.modules, name)
    modules = stub_vllm(monkeypatch, VLLM_SCAN.replace("cu_chunk_seqlens", "chunk_indices"), VLLM_STEP, dispatch=False)
    before = contents(modules)
    with pytest.raises(UnsupportedError, match="takes chunk_indices, expected the parameters"):
        vllm.enable()
    assert contents(modules) == before
    del modules[0].mamba_chunk_scan_combined_varlen
    with pytest.raises(UnsupportedError, match="install a newer vLLM"):
        vllm.enable()
