"""As torch sees the operators: opcheck, torch.compile, fake and meta tensors."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import cute_ssd
from cute_ssd import api  # noqa: F401  (registers the operators)

from .common import extras, inputs, packed

OPCHECK = torch.library.opcheck


# 12 runs of 11 flags in which any three flags take all their eight values (Plackett and Burman 1946).
_GENERATOR = (True, True, False, True, True, True, False, False, False, True, False)
COVERING = [*(_GENERATOR[i:] + _GENERATOR[:i] for i in range(11)), (False,) * 11]


class Flags(NamedTuple):
    """Of a call of `chunk_scan`; `varlens` counts where sequences are packed."""

    D: bool
    z: bool
    bias: bool
    softplus: bool
    start: bool
    ids: bool
    packs: bool
    finals: bool
    varlens: bool
    bf16_states: bool


def scan_args(flags: Flags, seqlen: int = 9) -> list[Any]:
    made = inputs(1 if flags.packs else 2, seqlen, 2, 2, 1, 3)
    more = extras(made)
    offsets = torch.tensor([0, 4, seqlen], dtype=torch.int32) if flags.packs else None
    seq_idx = (torch.arange(seqlen)[None].expand(made["x"].shape[0], -1) >= 4).int() if flags.ids else None
    floats = [made["x"], made["dt"], made["A"], None, made["B"], made["C"]]
    floats += [more["D"] if flags.D else None, more["z"] if flags.z else None]
    floats += [more["dt_bias"] if flags.bias else None, more["initial_states"] if flags.start else None]
    floats = [None if t is None else t.detach().requires_grad_() for t in floats]
    returned = [flags.finals, flags.varlens and flags.packs, torch.bfloat16 if flags.bf16_states else None]
    return [*floats, seq_idx, offsets, 64, flags.softplus, 0.0, 1.0, *returned]


@pytest.mark.parametrize("flags", [Flags(*run[:10]) for run in COVERING], ids=lambda f: "".join(str(int(x)) for x in f))
def test_opcheck_chunk_scan(flags: Flags) -> None:
    OPCHECK(torch.ops.cute_ssd.chunk_scan.default, tuple(scan_args(flags)))


@pytest.mark.long
@pytest.mark.parametrize("some", list(itertools.product([False, True], repeat=4)))
def test_opcheck_chunk_scan_in_every_combination(some: tuple[bool, ...]) -> None:
    for others in itertools.product([False, True], repeat=6):
        flags = Flags(*some, *others)
        if flags.packs or not flags.varlens:
            OPCHECK(torch.ops.cute_ssd.chunk_scan.default, tuple(scan_args(flags)))


@pytest.mark.parametrize("run", COVERING, ids=range(12))
def test_opcheck_log_decay_and_backward(run: tuple[bool, ...]) -> None:
    D, z, start, finals, bf16_states = run[:5]
    args = scan_args(Flags(D, z, False, False, start, False, False, finals, False, bf16_states))
    args[1:4] = [None, None, -torch.rand(2, 2, 9).requires_grad_()]
    OPCHECK(torch.ops.cute_ssd.chunk_scan.default, tuple(args))
    plain = [t.detach() if isinstance(t, torch.Tensor) else t for t in args[:16]]
    dfinal = torch.randn(2, 2, 2, 3) if finals else None
    OPCHECK(torch.ops.cute_ssd.chunk_scan_backward.default, (torch.randn(2, 9, 2, 2), dfinal, None, *plain))


@pytest.mark.parametrize("run", COVERING, ids=range(12))
def test_opcheck_varlen(run: tuple[bool, ...]) -> None:
    D, z, bias, softplus, start, own, finals, chunks, bf16_states = run[:9]
    made = inputs(1, 9, 2, 2, 1, 3)
    more = extras(made)
    p = packed({**made, **more})
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    states = torch.randn(2, 2, 2, 3) if start else None
    own_chunks = torch.tensor([0, 1, 4, 9], dtype=torch.int32) if own else None
    args = (p["x"], p["dt"], p["A"], p["B"], p["C"], offsets, 4, p["D"] if D else None, p["z"] if z else None)
    args += (p["dt_bias"] if bias else None, softplus, 0.0, 1.0, states, own_chunks, finals, chunks)
    args += (torch.bfloat16 if bf16_states else None, torch.zeros(9, 2, 2))
    OPCHECK(torch.ops.cute_ssd.chunk_scan_varlen.default, args)


@pytest.mark.parametrize("run", COVERING, ids=range(12))
def test_opcheck_pool_and_decode(run: tuple[bool, ...]) -> None:
    """Padding among the slots, flags and their absence, a pool of 16 bits."""
    D, z, bias, softplus, flagged, slotted, pads, bf16_states, channel_D = run[:9]
    made = inputs(1, 9, 2, 2, 1, 3)
    more = extras(made, channel_D)
    p = packed({**made, **more})
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    slots = torch.tensor([2, -1 if pads else 0], dtype=torch.int32)
    flags = torch.tensor([True, False]) if flagged else None
    pool = torch.randn(3, 2, 2, 3, dtype=torch.bfloat16 if bf16_states else torch.float32)
    skip, gate = p["D"] if D else None, p["z"] if z else None
    dt_bias = p["dt_bias"] if bias else None
    args = (p["x"], p["dt"], p["A"], p["B"], p["C"], pool.clone(), slots, offsets, flags, -1)
    args += (64, skip, gate, dt_bias, softplus, 0.0, 1.0, torch.zeros(9, 2, 2))
    OPCHECK(torch.ops.cute_ssd.chunk_scan_varlen_inplace.default, args)
    step = (pool if slotted else pool[:2].clone(), p["x"][:2], p["dt"][:2], p["A"], p["B"][:2], p["C"][:2])
    step += (skip, gate[:2] if z else None, dt_bias, softplus, slots if slotted else None, -1, torch.zeros(2, 2, 2))
    OPCHECK(torch.ops.cute_ssd.selective_state_update.default, step)


def count_compiles(function: Callable[..., Any], calls: list[dict[str, Any]]) -> int:
    """Graphs that torch.compile(fullgraph, dynamic) made for these calls; checks each result against eager."""
    torch._dynamo.reset()
    graphs = 0

    def backend(gm: torch.fx.GraphModule, example: list[Any]) -> Any:
        nonlocal graphs
        graphs += 1
        return gm.forward

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    for call in calls:
        eager = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in call.items()}
        torch.testing.assert_close(compiled(**call), function(**eager))
        torch.testing.assert_close(call, eager)
    return graphs


@pytest.mark.emulated("sm_100a")
def test_compile_scan_once_for_all_lengths(device: str) -> None:
    lengths = (20, 30, 40, 200)
    calls = [{**inputs(2, n, device=device), "chunk_size": 64, "return_final_states": True} for n in lengths]
    assert count_compiles(cute_ssd.mamba_chunk_scan_combined, calls) == 1


@pytest.mark.emulated("sm_100a")
def test_compile_ssd_once_for_all_lengths(device: str) -> None:
    calls = []
    for n in (20, 30, 40):
        made = inputs(2, n, device=device)
        log_decay = -torch.rand(2, 4, n, device=device)
        calls.append({"x": made["x"], "log_decay": log_decay, "B": made["B"], "C": made["C"]})
    assert count_compiles(cute_ssd.ssd_chunk_scan, calls) == 1


@pytest.mark.emulated("sm_100a")
def test_compile_varlen_and_pool_once_for_all_lengths(device: str) -> None:
    calls = []
    for n in (20, 30, 40):
        p = packed(inputs(1, n, device=device))
        offsets = torch.tensor([0, 7, n], dtype=torch.int32, device=device)
        calls.append({**p, "query_start_loc": offsets, "return_final_states": True})
    assert count_compiles(cute_ssd.mamba_chunk_scan_varlen, calls) == 1
    for call in calls:
        del call["return_final_states"]
        slots = torch.tensor([4, 2], dtype=torch.int32, device=device)
        call.update(ssm_pool=torch.randn(5, 4, 8, 16, device=device), cache_indices=slots)
    assert count_compiles(cute_ssd.mamba_chunk_scan_varlen_inplace, calls) == 1


@pytest.mark.emulated("sm_100a")
def test_compile_decode_once_for_all_batches(device: str) -> None:
    calls = []
    for n in (3, 5, 6):
        step = {name: t[:, 0] if name != "A" else t for name, t in inputs(n, 1, device=device).items()}
        calls.append({**step, "state": torch.randn(n, 4, 8, 16, device=device)})
    assert count_compiles(cute_ssd.selective_state_update, calls) == 1


def test_compile_with_gradients() -> None:
    torch._dynamo.reset()
    made = inputs(2, 30)

    def loss(**kwargs: Any) -> torch.Tensor:
        y, final = cute_ssd.mamba_chunk_scan_combined(**kwargs, chunk_size=64, return_final_states=True)
        return y.square().sum() + final.sum()

    grads = []
    for function in (loss, torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")):
        floats = {n: t.clone().requires_grad_() for n, t in made.items()}
        function(**floats).backward()
        grads.append([t.grad for t in floats.values()])
    torch.testing.assert_close(*grads)


def test_meta_tensors_give_shapes() -> None:
    made = {n: t.to("meta") for n, t in inputs(2, 30).items()}
    y, final = cute_ssd.mamba_chunk_scan_combined(**made, chunk_size=64, return_final_states=True)
    assert y.shape == (2, 30, 4, 8) and final.shape == (2, 4, 8, 16) and y.is_meta


@pytest.mark.parametrize("kind", ["cuda"])
def test_cuda_is_refused_openly(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(cute_ssd.UnsupportedError, match="CPU"):
        made = {n: torch.empty(t.shape, dtype=t.dtype, device=kind) for n, t in inputs(2, 30).items()}
        cute_ssd.mamba_chunk_scan_combined(**made, chunk_size=64)
