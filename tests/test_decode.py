"""selective_state_update against the fp64 step and against a one-token scan."""

from typing import Any

import pytest
import torch
from torch import Tensor

import cute_ssd
from cute_ssd import reference

from .common import DTYPES, check, inputs


def step(
    batch: int = 5,
    nheads: int = 4,
    headdim: int = 8,
    ngroups: int = 2,
    dstate: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> dict[str, Any]:
    g = torch.Generator().manual_seed(3)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=wide)

    made = {
        "state": normal(batch, nheads, headdim, dstate),
        "x": normal(batch, nheads, headdim).to(dtype),
        "dt": torch.rand(batch, nheads, generator=g, dtype=wide) * 0.1,
        "A": -1 - 15 * torch.rand(nheads, generator=g, dtype=wide),
        "B": normal(batch, ngroups, dstate).to(dtype),
        "C": normal(batch, ngroups, dstate).to(dtype),
        "D": normal(nheads),
        "z": normal(batch, nheads, headdim).to(dtype),
        "dt_bias": normal(nheads) * 0.1,
    }
    return {**{name: tensor.to(device) for name, tensor in made.items()}, "dt_softplus": True}


def expected(made: dict[str, Any], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return reference.selective_state_update(**made, dtype=dtype)


@pytest.mark.emulated("sm_80", "sm_100a")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (5, 4, 8, 2, 16), (3, 6, 5, 1, 7), (2, 40, 64, 8, 128)])
def test_against_recurrence(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = step(*shape, dtype=dtype, device=device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    true, eager = expected(made), expected(made, wide)
    y = cute_ssd.selective_state_update(**made)
    check(y, true[0], eager[0])
    check(made["state"], true[1], eager[1])


@pytest.mark.emulated("sm_100a")
@pytest.mark.parametrize("missing", ["D", "z", "dt_bias", "dt_softplus"])
def test_without(device: str, missing: str) -> None:
    made = step(device=device)
    made[missing] = False if missing == "dt_softplus" else None
    true, eager = expected(made), expected(made, torch.float32)
    check(cute_ssd.selective_state_update(**made), true[0], eager[0])
    check(made["state"], true[1], eager[1])


def expand(made: dict[str, Any]) -> dict[str, Any]:
    """A, dt, D and dt_bias expanded as Hugging Face passes them."""
    _, nheads, headdim, dstate = made["state"].shape
    return {
        **made,
        "A": made["A"][:, None, None].expand(nheads, headdim, dstate),
        "dt": made["dt"][..., None].expand(-1, -1, headdim),
        "D": made["D"][:, None].expand(nheads, headdim),
        "dt_bias": made["dt_bias"][:, None].expand(nheads, headdim),
    }


def test_expanded_arguments(device: str) -> None:
    plain = step(device=device)
    wide = expand({**plain, "state": plain["state"].clone()})
    full = {
        n: t.contiguous() if isinstance(t, Tensor) else t
        for n, t in expand({**plain, "state": plain["state"].clone()}).items()
    }
    y = cute_ssd.selective_state_update(**plain)
    assert torch.equal(y, cute_ssd.selective_state_update(**wide)) and torch.equal(plain["state"], wide["state"])
    torch.testing.assert_close(cute_ssd.selective_state_update(**full), y)


def test_full_A_and_per_channel_dt(device: str) -> None:
    """A of each (head, channel, state) and dt of each channel, as mamba_ssm allows."""
    made = expand(step(device=device))
    for name in ("A", "dt", "D", "dt_bias"):
        made[name] = made[name] * (1 + 0.1 * torch.rand(made[name].shape, device=device))
    true, eager = expected(made), expected(made, torch.float32)
    check(cute_ssd.selective_state_update(**made), true[0], eager[0])
    check(made["state"], true[1], eager[1])


def test_without_head_dimension(device: str) -> None:
    """mamba_ssm's Mamba-1 form: every tensor without nheads."""
    batch, dim, dstate = 3, 10, 6
    made = {
        "state": torch.randn(batch, dim, dstate),
        "x": torch.randn(batch, dim),
        "dt": torch.rand(batch, dim),
        "A": -torch.rand(dim, dstate),
        "B": torch.randn(batch, dstate),
        "C": torch.randn(batch, dstate),
        "D": torch.randn(dim),
        "z": torch.randn(batch, dim),
        "dt_bias": torch.randn(dim),
    }
    made = {name: tensor.to(device) for name, tensor in made.items()}
    headed = {n: t.unsqueeze(0) if n in ("A", "D", "dt_bias") else t.unsqueeze(1) for n, t in made.items()}
    true, eager = expected(headed), expected(headed, torch.float32)
    y = cute_ssd.selective_state_update(**made)
    assert y.shape == (batch, dim)
    check(y, true[0][:, 0], eager[0][:, 0])
    check(made["state"], true[1][:, 0], eager[1][:, 0])
    out = torch.empty(batch, dim, device=device)
    assert cute_ssd.selective_state_update(**made, out=out) is out and torch.isfinite(out).all()


@pytest.mark.emulated("sm_90a", "sm_100a")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_slots(device: str, dtype: torch.dtype) -> None:
    """Chosen slots are updated, padding rows give zeros, no other slot changes a bit."""
    made = step(device=device)
    pool = torch.randn(9, 4, 8, 16).to(device, dtype)
    pool[1] = float("nan")
    before = pool.clone()
    slots = torch.tensor([8, -1, 0, 3, -1], device=device)
    y = cute_ssd.selective_state_update(**{**made, "state": pool}, state_batch_indices=slots)
    rows = {**made, "state": before[slots]}
    true, eager = expected(rows), expected(rows, torch.float32)
    live = [0, 2, 3]
    check(y[live], true[0][live], eager[0][live])
    check(pool[slots[live]], true[1][live], eager[1][live])
    assert (y[[1, 4]] == 0).all()
    others = [1, 2, 4, 5, 6, 7]
    assert torch.equal(pool[others].nan_to_num(), before[others].nan_to_num())


@pytest.mark.emulated("sm_100a")
def test_equals_one_token_scan(device: str) -> None:
    made = step(device=device)
    start = made["state"].clone()
    y = cute_ssd.selective_state_update(**made)
    names = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "dt_softplus")
    scan = {n: made[n][:, None] if n in ("x", "dt", "B", "C", "z") else made[n] for n in names}
    y2, final = cute_ssd.mamba_chunk_scan_combined(
        **scan, chunk_size=256, initial_states=start, return_final_states=True
    )
    torch.testing.assert_close(y, y2[:, 0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(made["state"], final, rtol=1e-5, atol=1e-6)


@pytest.mark.emulated("sm_120a")
def test_decode_continues_prefill(device: str) -> None:
    """Sixteen tokens at once equal ten at once and six one by one."""
    made = step(device=device)
    g = torch.Generator().manual_seed(0)
    x, B, C = (torch.randn(5, 16, *shape, generator=g).to(device) for shape in ((4, 8), (2, 16), (2, 16)))
    dt = torch.rand(5, 16, 4, generator=g).to(device) * 0.1
    whole = cute_ssd.mamba_chunk_scan_combined(x, dt, made["A"], B, C, 256)
    first, state = cute_ssd.mamba_chunk_scan_combined(
        x[:, :10], dt[:, :10], made["A"], B[:, :10], C[:, :10], 256, return_final_states=True
    )
    rest = [
        cute_ssd.selective_state_update(state, x[:, t], dt[:, t], made["A"], B[:, t], C[:, t]) for t in range(10, 16)
    ]
    torch.testing.assert_close(torch.cat([first, torch.stack(rest, 1)], 1), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.emulated("sm_100a")
def test_out_and_strided_state(device: str) -> None:
    made = step(device=device)
    wide = torch.full((5, 4, 8, 40), 2.0, device=device)
    wide[..., 8:24] = made["state"]
    out = torch.empty_like(made["x"])
    y = cute_ssd.selective_state_update(**{**made, "state": wide[..., 8:24]}, out=out)
    assert y is out
    assert torch.equal(y, cute_ssd.selective_state_update(**made))
    assert torch.equal(wide[..., 8:24], made["state"])
    assert (wide[..., :8] == 2).all() and (wide[..., 24:] == 2).all()


@pytest.mark.emulated("sm_100a")
def test_no_rows(device: str) -> None:
    made = step(batch=0, device=device)
    assert cute_ssd.selective_state_update(**made).shape == (0, 4, 8)


@pytest.mark.parametrize("layout", ["batch", "heads", "both", "no heads"])
def test_x_of_any_strides(layout: str) -> None:
    """y is contiguous where x is not."""
    made = {name: t[:, 0] if name != "A" else t for name, t in inputs(3, 1, 2, 4, 1, 5).items()}
    state = torch.randn(3, 2, 4, 5)
    axes = {"batch": (1, 0, 2), "heads": (0, 2, 1), "both": (2, 1, 0)}.get(layout)
    if axes is None:  # (batch, dim), the transpose of (dim, batch)
        state, made = state[:, 0], {"x": made["x"][:, 0], "dt": made["x"][:, 0].abs(), "B": made["B"], "C": made["C"]}
        made["A"] = -torch.rand(4, 5)
        moved = made["x"].t().contiguous().t()
    else:
        moved = made["x"].permute(axes).contiguous().permute(axes)
    assert not moved.is_contiguous()
    wanted = cute_ssd.selective_state_update(state.clone(), **made)
    found = cute_ssd.selective_state_update(state.clone(), **{**made, "x": moved})
    assert found.is_contiguous() and torch.equal(found, wanted)
