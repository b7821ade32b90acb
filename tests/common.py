"""Inputs as models have them, and the measure of error."""

from typing import Any

import torch
from torch import Tensor

from cute_ssd import reference

SHAPES = [
    # batch, seqlen, nheads, headdim, ngroups, dstate
    (1, 1, 1, 1, 1, 1),
    (2, 63, 4, 8, 2, 16),
    (1, 64, 3, 5, 1, 7),
    (2, 65, 8, 16, 8, 16),
    (1, 197, 6, 8, 3, 12),
    (3, 130, 4, 16, 1, 32),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def inputs(
    batch: int = 2,
    seqlen: int = 100,
    nheads: int = 4,
    headdim: int = 8,
    ngroups: int = 2,
    dstate: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, Tensor]:
    """x, dt, A, B, C of `mamba_chunk_scan_combined`: A in [-16, -1] and dt log-uniform in [0.001, 0.1], as Mamba-2
    initialises them; raw dt and dt_bias that softplus turns into such steps are made by `raw_steps`."""
    g = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=wide).to(dtype)

    made = {
        "x": normal(batch, seqlen, nheads, headdim),
        "dt": torch.exp(torch.rand(batch, seqlen, nheads, generator=g, dtype=wide) * 4.6 - 6.9),
        "A": -1 - 15 * torch.rand(nheads, generator=g, dtype=wide),
        "B": normal(batch, seqlen, ngroups, dstate),
        "C": normal(batch, seqlen, ngroups, dstate),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}


def extras(made: dict[str, Tensor], D_per_channel: bool = False, seed: int = 1) -> dict[str, Any]:
    """D, z, dt_bias, initial_states, softplus and a limit for `inputs`; replaces dt by a raw one."""
    g = torch.Generator().manual_seed(seed)
    x = made["x"]
    batch, _, nheads, headdim = x.shape
    wide = made["A"].dtype
    dt = made["dt"]
    made["dt"] = dt + torch.log(-torch.expm1(-dt)) + 0.5  # softplus of it, less the bias of about 0.5, is dt
    return {
        "D": torch.randn((nheads, headdim) if D_per_channel else (nheads,), generator=g, dtype=wide).to(x.device),
        "z": torch.randn(x.shape, generator=g, dtype=wide).to(x.device, x.dtype),
        "dt_bias": (torch.randn(nheads, generator=g, dtype=wide) * 0.1 - 0.5).to(x.device),
        "initial_states": torch.randn(batch, nheads, headdim, made["B"].shape[-1], generator=g, dtype=wide).to(
            x.device
        ),
        "dt_softplus": True,
        "dt_limit": (0.002, 0.09),
    }


def packed(made: dict[str, Any]) -> dict[str, Any]:
    """A batch of one row without its batch dimension."""
    return {name: t[0] if name in ("x", "dt", "B", "C", "z") else t for name, t in made.items()}


def check(actual: Tensor, truth: Tensor, eager: Tensor) -> None:
    """`actual` against the fp64 `truth`: at most twice the error of `eager` torch in the same dtype, plus an ulp of the
    largest value, and in the mean square at most a few roundings."""
    assert actual.shape == truth.shape
    assert torch.isfinite(actual).all()
    if not actual.numel():
        return
    eager = eager.to(actual.dtype).double()
    ulp = torch.finfo(actual.dtype).eps
    actual, truth = actual.cpu().double(), truth.cpu().double()
    scale = truth.abs().max().clamp(min=1e-30)
    worst, allowed = (
        (actual - truth).abs().max(),
        2 * (eager.cpu() - truth).abs().max() + (64 if ulp < 1e-12 else 8) * min(ulp, 1e-6) * scale,
    )
    assert worst <= allowed, f"error {worst:.3e}, allowed {allowed:.3e}"
    size = truth.norm().clamp(min=1e-30)
    ratio, eager_ratio = (actual - truth).norm() / size, (eager.cpu() - truth).norm() / size
    # In fp64 the truth has roundings of its own.
    allowed = max((16 if ulp < 1e-12 else 4) * ulp, 2 * eager_ratio)
    assert ratio <= allowed, f"rms ratio {ratio:.3e}, allowed {allowed:.3e}"


def truth_and_eager(function: str, *args: Any, **kwargs: Any) -> list[tuple[Tensor, Tensor]]:
    """[(fp64 result, result in the compute dtype)] of a function of `reference`."""
    run = getattr(reference, function)
    wide = torch.float64 if args[0].dtype == torch.float64 else torch.float32
    return list(zip(run(*args, **kwargs), run(*args, **kwargs, dtype=wide), strict=True))
