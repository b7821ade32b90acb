"""Gradients of both chunk scans with respect to every float input, through y and every returned state."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

import cute_ssd
from cute_ssd import reference

from .common import extras, inputs

NAMES = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")


def leaves(made: dict[str, Any]) -> dict[str, Tensor]:
    return {n: t.detach().requires_grad_() for n, t in made.items() if isinstance(t, Tensor) and t.is_floating_point()}


@pytest.mark.parametrize("D_per_channel", [False, True])
@pytest.mark.parametrize("softplus", [False, True])
@pytest.mark.parametrize("seqlen", [1, 3, 67])
def test_gradcheck_combined(device: str, seqlen: int, softplus: bool, D_per_channel: bool) -> None:
    made = inputs(2, seqlen, 2, 2, 1, 3, dtype=torch.float64, device=device)
    steps = made["dt"]
    kwargs = extras(made, D_per_channel)
    if not softplus:
        made["dt"] = steps
        kwargs.update(dt_softplus=False, dt_bias=kwargs["dt_bias"].abs() * 0.1, dt_limit=(0.0, 1.0))
    floats = leaves({**made, **kwargs})
    fixed = {n: v for n, v in kwargs.items() if n not in floats}

    def call(*values: Tensor) -> tuple[Tensor, ...]:
        return cute_ssd.mamba_chunk_scan_combined(
            **dict(zip(floats, values, strict=True)), **fixed, chunk_size=64, return_final_states=True
        )

    assert torch.autograd.gradcheck(call, tuple(floats.values()), fast_mode=seqlen > 3)


@pytest.mark.parametrize("seqlen", [2, 130])
def test_gradcheck_ssd(device: str, seqlen: int) -> None:
    made = inputs(2, seqlen, 4, 3, 2, 2, dtype=torch.float64, device=device)
    kwargs = extras(made)
    floats = leaves(
        {
            "x": made["x"],
            "log_decay": -torch.rand(2, 4, seqlen, dtype=torch.float64),
            "B": made["B"],
            "C": made["C"],
            **{n: kwargs[n] for n in ("D", "z", "initial_states")},
        }
    )

    def call(*values: Tensor) -> tuple[Tensor, ...]:
        return cute_ssd.ssd_chunk_scan(*values, return_final_states=True)

    assert torch.autograd.gradcheck(call, tuple(floats.values()), fast_mode=seqlen > 3)


@pytest.mark.parametrize("how", ["seq_idx", "cu_seqlens"])
def test_gradcheck_sequences(device: str, how: str) -> None:
    made = inputs(1, 70, 2, 2, 1, 3, dtype=torch.float64, device=device)
    kwargs = extras(made)
    floats = leaves({**made, **kwargs})
    fixed = {n: v for n, v in kwargs.items() if n not in floats}
    if how == "seq_idx":
        fixed["seq_idx"] = (torch.arange(70)[None] // 30).int()
    else:
        fixed.update(cu_seqlens=torch.tensor([0, 5, 5, 68], dtype=torch.int32), return_varlen_states=True)

    def call(*values: Tensor) -> tuple[Tensor, ...]:
        return cute_ssd.mamba_chunk_scan_combined(
            **dict(zip(floats, values, strict=True)), **fixed, chunk_size=64, return_final_states=True
        )

    assert torch.autograd.gradcheck(call, tuple(floats.values()), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch, nheads", [(3, 4), (1, 150)])
def test_against_autograd_of_the_recurrence(device: str, batch: int, nheads: int, dtype: torch.dtype) -> None:
    made = inputs(batch, 150, nheads, 8, 2, 16, dtype=dtype, device=device)
    kwargs = extras(made)
    dy, dfinal = torch.randn_like(made["x"]), torch.randn_like(kwargs["initial_states"])

    def gradients(wide: bool) -> dict[str, Tensor]:
        floats = leaves({**made, **kwargs})
        fixed = {n: v for n, v in kwargs.items() if n not in floats}
        if wide:
            y, final, _ = reference.mamba_chunk_scan_combined(**floats, **fixed)
        else:
            y, final = cute_ssd.mamba_chunk_scan_combined(**floats, **fixed, chunk_size=64, return_final_states=True)
        torch.autograd.backward((y, final), (dy.to(y.dtype), dfinal.to(final.dtype)))
        return {n: t.grad for n, t in floats.items() if t.grad is not None}

    ours, true = gradients(False), gradients(True)
    assert set(ours) == set(NAMES) == set(true)
    for name, grad in ours.items():
        assert grad.dtype == {**made, **kwargs}[name].dtype
        error = (grad.double() - true[name].double()).norm() / true[name].double().norm()
        assert error <= (1e-5 if grad.dtype == torch.float32 else 8e-3), name


def test_only_some_inputs(device: str) -> None:
    made = inputs(device=device)
    B = made["B"].requires_grad_()
    cute_ssd.mamba_chunk_scan_combined(**{**made, "B": B}, chunk_size=64).sum().backward()
    assert B.grad is not None and made["x"].grad is None


@pytest.mark.parametrize("small", [0, 3])
def test_no_nan_from_masked_exponentials(device: str, small: int) -> None:
    """mamba#352, #449, #558: above the diagonal exp(difference) overflows at large steps. Of every four, `small` are
    small, over which decays and their gradients do not vanish."""
    made = inputs(1, 200, dtype=torch.bfloat16, device=device)
    made["dt"], made["A"] = torch.full_like(made["dt"], 10.0), torch.full_like(made["A"], -16.0)
    made["dt"][:, torch.arange(200) % 4 < small] = -6.0  # softplus of it is 0.0025
    made["dt_bias"] = torch.linspace(-0.1, 0.1, 4, device=device)
    weights = torch.randn_like(made["x"]), torch.randn(1, 4, 8, 16, device=device)
    ours, true = leaves(made), leaves(made)
    got = cute_ssd.mamba_chunk_scan_combined(**ours, chunk_size=50, dt_softplus=True, return_final_states=True)
    want = reference.mamba_chunk_scan_combined(**true, dt_softplus=True)
    for y, final in (got, want[:2]):
        torch.autograd.backward((y, final), (weights[0].to(y.dtype), weights[1].to(final.dtype)))
    for name in made:
        grad, exact = ours[name].grad, true[name].grad
        assert grad is not None and exact is not None and torch.isfinite(grad).all(), name
        error = (grad.double() - exact.double()).norm() / max(exact.double().norm(), 1e-30)
        assert error <= (1e-5 if grad.dtype == torch.float32 else 8e-3), name


def test_memory_is_linear_in_the_sequence(device: str) -> None:
    """Saved for the backward are the inputs alone, whatever the length."""
    made = inputs(1, 512, device=device)
    saved: list[int] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t.numel())
        return t

    floats = leaves(made)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        cute_ssd.mamba_chunk_scan_combined(**floats, chunk_size=64)
    assert sum(saved) == sum(t.numel() for t in floats.values())


def backward_memory(seqlen: int) -> tuple[int, int]:
    """(bytes that a backward takes at its peak beyond what was there before, bytes of the gradients)."""

    def kilobytes(field: str) -> int:
        return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0])

    made = inputs(1, seqlen, 16, 64, 1, 128)
    kwargs = extras(made)
    floats = leaves({**made, **kwargs})
    fixed = {n: v for n, v in kwargs.items() if n not in floats}

    def backward(tokens: int) -> int:
        part = {n: t[:, :tokens] if n in ("x", "dt", "B", "C", "z") else t for n, t in floats.items()}
        outputs = cute_ssd.mamba_chunk_scan_combined(**part, **fixed, chunk_size=64, return_final_states=True)
        ones = [torch.ones_like(t) for t in outputs]
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = kilobytes("VmRSS")
        grads = torch.autograd.grad(outputs, list(part.values()), ones)
        assert sum(t.nbytes for t in grads) == sum(t.nbytes for t in part.values())
        return (kilobytes("VmHWM") - before) * 1024

    backward(1)  # what the first call loads
    return backward(seqlen), sum(t.nbytes for t in floats.values())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no peak memory of a process on this system")
def test_backward_takes_memory_linear_in_the_sequence() -> None:
    """Each more token takes at most three times its gradients at the peak: beside them stand the copies that they are
    collected in and the states between steps. One matrix of decays between all tokens would take a hundred times it."""
    found = []
    for seqlen in (4096, 16384):  # processes of their own, whose memory nothing else has touched
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            found.append(pool.submit(backward_memory, seqlen).result())
    (less, few), (more, many) = found
    assert more - less <= 3 * (many - few), found


def test_inference_functions_refuse(device: str) -> None:
    made = inputs(1, 10, device=device)
    packed = {n: t[0] if n != "A" else t for n, t in made.items()}
    packed["x"].requires_grad_()
    offsets = torch.tensor([0, 10], dtype=torch.int32, device=device)
    pool = torch.zeros(1, 4, 8, 16, device=device)
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    step = {n: t[:, 0] if n != "A" else t for n, t in made.items()}
    step["x"] = step["x"].detach().requires_grad_()
    calls = [
        lambda: cute_ssd.mamba_chunk_scan_varlen(**packed, query_start_loc=offsets),
        lambda: cute_ssd.mamba_chunk_scan_varlen_inplace(
            **packed, query_start_loc=offsets, ssm_pool=pool, cache_indices=slots
        ),
        lambda: cute_ssd.selective_state_update(state=pool, **step),
    ]
    for call in calls:
        with pytest.raises(cute_ssd.UnsupportedError, match="no_grad"):
            call()
        with torch.no_grad():
            call()


def test_second_order_is_refused(device: str) -> None:
    made = inputs(device=device)
    x = made["x"].requires_grad_()
    (grad,) = torch.autograd.grad(
        cute_ssd.mamba_chunk_scan_combined(**{**made, "x": x}, chunk_size=64).square().sum(), x, create_graph=True
    )
    with pytest.raises(cute_ssd.UnsupportedError, match="create_graph"):
        grad.sum().backward()


def test_activation_checkpointing(device: str) -> None:
    made = inputs(device=device)

    def run(x: Tensor) -> Tensor:
        return cute_ssd.mamba_chunk_scan_combined(**{**made, "x": x}, chunk_size=64)

    grads = []
    for call in (run, lambda x: torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)):
        x = made["x"].clone().requires_grad_()
        call(x).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_forward_mode_is_refused() -> None:
    made = inputs(1, 5, 2, 2, 1, 3)

    def scan(x: torch.Tensor) -> Any:
        return cute_ssd.mamba_chunk_scan_combined(**{**made, "x": x}, chunk_size=4)

    with pytest.raises(cute_ssd.UnsupportedError, match="An input has a tangent"):
        torch.func.jvp(scan, (made["x"],), (torch.ones_like(made["x"]),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(made["x"], torch.ones_like(made["x"]))
        with pytest.raises(cute_ssd.UnsupportedError, match="An input has a tangent"):
            scan(dual)
        token = {n: t if n == "A" else t[:, 0] for n, t in made.items()}
        token["x"] = dual[:, 0]
        with pytest.raises(cute_ssd.UnsupportedError, match="An input has a tangent"):
            cute_ssd.selective_state_update(torch.zeros(1, 2, 2, 3), **token)
        assert scan(made["x"]).isfinite().all()  # others have none
