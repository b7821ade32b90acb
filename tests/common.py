"""Inputs as models have them, and the measure of error."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_ssd import reference

_recurrence = reference.recurrence

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


class Sizes(NamedTuple):
    """Of inputs whose test does not mind."""

    headdim: int
    dstate: int
    dtype: torch.dtype


SIZES = SMALL = Sizes(8, 16, torch.float32)
TILES = Sizes(64, 64, torch.bfloat16)  # that the chunked kernels take


def on_tiles() -> bool:
    return SIZES is TILES


def fitting(*shape: int) -> tuple[int, ...]:
    """A shape as in SHAPES, on tiles with the headdim and dstate that they have."""
    return (*shape[:3], TILES.headdim, shape[4], TILES.dstate) if on_tiles() else shape


def close(actual: Tensor, expected: Tensor) -> None:
    """Two computations of the same, whose sums are cut in different places."""
    if on_tiles():
        torch.testing.assert_close(actual, expected, rtol=2**-6, atol=2**-6 * float(expected.abs().max()))
    else:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def states(count: int, device: str = "cpu") -> Tensor:
    """Of as many sequences, for the inputs of a test that does not mind their sizes."""
    return torch.randn(count, 4, SIZES.headdim, SIZES.dstate, device=device)


def inputs(
    batch: int = 2,
    seqlen: int = 100,
    nheads: int = 4,
    headdim: int | None = None,
    ngroups: int = 2,
    dstate: int | None = None,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, Tensor]:
    """x, dt, A, B, C of `mamba_chunk_scan_combined`: A in [-16, -1] and dt log-uniform in [0.001, 0.1], as Mamba-2
    initialises them; raw dt and dt_bias that softplus turns into such steps are made by `raw_steps`."""
    g = torch.Generator().manual_seed(seed)
    headdim, dstate, dtype = headdim or SIZES.headdim, dstate or SIZES.dstate, dtype or SIZES.dtype
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


def eager_tiles(dtype: torch.dtype, tile: int = 128) -> Callable[..., tuple[Tensor, Tensor]]:
    """In place of `reference.recurrence` in fp32: the chunked algorithm as eager torch computes it in `dtype`, whose
    matrix products round their operands and their results to it. Decays, sums and the state between tiles stay fp32.
    """

    def near(t: Tensor) -> Tensor:
        return t.to(dtype).float()

    def recurrence(
        x: Tensor, scale: Tensor, log_decay: Tensor, B: Tensor, C: Tensor, state: Tensor,
        D: Tensor | None = None, z: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if x.dtype != torch.float32:
            return _recurrence(x, scale, log_decay, B, C, state, D, z)
        heads = x.shape[2] // B.shape[2]
        B, C = B.repeat_interleave(heads, 2), C.repeat_interleave(heads, 2)
        parts = [x[:, :0]]
        for low in range(0, x.shape[1], tile):
            x_t, s_t, a_t, B_t, C_t = (t[:, low : low + tile] for t in (x, scale, log_decay, B, C))
            before = torch.ones(x_t.shape[1], x_t.shape[1], dtype=torch.bool).tril(-1)[None, :, :, None]
            segments = torch.where(before, a_t[:, :, None], 0.0).cumsum(1)  # (batch, i, j, H): sums over (j, i]
            decay = torch.where(before.transpose(1, 2), 0.0, segments.exp())
            scores = near(torch.einsum("bihn,bjhn->bijh", near(C_t), near(B_t)))
            own = near(torch.einsum("bijh,bjhp->bihp", near(scores * decay * s_t[:, None]), near(x_t)))
            come = near(torch.einsum("bihn,bhpn->bihp", near(C_t), near(state)))
            parts.append(own + come * a_t.cumsum(1).exp()[..., None])
            steps = near(x_t * (s_t * segments[:, -1].exp())[..., None])
            leave = near(torch.einsum("bjhp,bjhn->bhpn", steps, near(B_t)))
            state = state * a_t.sum(1).exp()[..., None, None] + leave
        y = torch.cat(parts, 1)
        if D is not None:
            y = y + x * (D[:, None] if D.ndim == 1 else D)
        if z is not None:
            y = y * torch.nn.functional.silu(z)
        return y, state

    return recurrence


def packed(made: dict[str, Any]) -> dict[str, Any]:
    """A batch of one row without its batch dimension."""
    return {name: t[0] if name in ("x", "dt", "B", "C", "z") else t for name, t in made.items()}


def check(actual: Tensor, truth: Tensor, eager: Tensor) -> None:
    """`actual` against the fp64 `truth`: at most twice the error of `eager` torch in the same dtype, in the largest
    element and in the mean square. What may come on top is for other orders of sums, a few ulp of fp32 or fp64; and a
    mean square of half an ulp is always allowed, the most that rounding to 16 bits can have."""
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
    always = 16 * ulp if ulp < 1e-12 else 4 * ulp if ulp < 1e-6 else ulp / 2
    allowed = max(always, 2 * eager_ratio)
    assert ratio <= allowed, f"rms ratio {ratio:.3e}, allowed {allowed:.3e}"


def truth_and_eager(function: str, *args: Any, **kwargs: Any) -> list[tuple[Tensor, Tensor]]:
    """[(fp64 result, result in the compute dtype)] of a function of `reference`."""
    run = getattr(reference, function)
    wide = torch.float64 if args[0].dtype == torch.float64 else torch.float32
    return list(zip(run(*args, **kwargs), run(*args, **kwargs, dtype=wide), strict=True))
