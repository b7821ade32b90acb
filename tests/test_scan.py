"""Whole rows: mamba_chunk_scan_combined and ssd_chunk_scan against the fp64 recurrence."""

import itertools
from itertools import pairwise
from typing import Any

import pytest
import torch

import cute_ssd
from cute_ssd import reference

from .common import DTYPES, SHAPES, check, extras, fitting, inputs, truth_and_eager


@pytest.mark.emulated_slowly("sm_100a:tiles", "sm_100a:tiles:1", "sm_100a:tiles:2")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("full", [False, True])
def test_combined(device: str, shape: tuple[int, ...], dtype: torch.dtype, full: bool) -> None:
    made = inputs(*fitting(*shape), dtype=dtype, device=device)
    kwargs = extras(made, D_per_channel=shape[1] % 2 == 0) if full else {}
    y, final = cute_ssd.mamba_chunk_scan_combined(**made, chunk_size=64, return_final_states=True, **kwargs)
    assert y.dtype == dtype and y.is_contiguous()
    assert final.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    (y_true, y_eager), (f_true, f_eager) = _pairs(made, kwargs)
    check(y, y_true, y_eager)
    check(final, f_true, f_eager)


def _pairs(made: dict[str, Any], kwargs: dict[str, Any]) -> list[Any]:
    names = ("x", "dt", "A", "B", "C")
    wide = torch.float64 if made["x"].dtype == torch.float64 else torch.float32
    true = reference.mamba_chunk_scan_combined(*(made[n] for n in names), **kwargs)[:2]
    eager = reference.mamba_chunk_scan_combined(*(made[n] for n in names), **kwargs, dtype=wide)[:2]
    return list(zip(true, eager, strict=True))


@pytest.mark.emulated_slowly("sm_100a:tiles")
@pytest.mark.parametrize("flags", list(itertools.product([False, True], repeat=5)))
def test_every_flag(device: str, flags: tuple[bool, ...]) -> None:
    made = inputs(2, 70, device=device)
    every = extras(made, D_per_channel=True)
    names = ("D", "z", "dt_bias", "initial_states", "dt_softplus")
    kwargs = {name: every[name] for name, wanted in zip(names, flags, strict=True) if wanted}
    y = cute_ssd.mamba_chunk_scan_combined(**made, chunk_size=128, **kwargs)
    check(y, *_pairs(made, kwargs)[0])


@pytest.mark.emulated_slowly("sm_100a:tiles")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_ssd(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = inputs(*fitting(*shape), dtype=dtype, device=device)
    x, B, C = made["x"], made["B"], made["C"]
    log_decay = (made["dt"] * made["A"]).transpose(1, 2).to(dtype)
    more = extras(made)
    args = (x, log_decay, B, C, more["D"], more["z"], more["initial_states"])
    y, final = cute_ssd.ssd_chunk_scan(*args, return_final_states=True)
    pairs = truth_and_eager("ssd_chunk_scan", *args)
    check(y, *pairs[0])
    check(final, *pairs[1])


@pytest.mark.emulated_slowly("sm_100a:tiles")
@pytest.mark.parametrize("other", [torch.float64, torch.float16])
def test_mixed_float_dtypes(device: str, other: torch.dtype) -> None:
    """x decides; dt, A, D, dt_bias and states may be of any float dtype (float64 on the CPU only)."""
    made = inputs(dtype=torch.bfloat16, device=device)
    kwargs = extras(made)
    made["dt"], made["A"] = made["dt"].bfloat16(), made["A"].half()
    kwargs.update(
        D=kwargs["D"].to(other), dt_bias=kwargs["dt_bias"].bfloat16(), initial_states=kwargs["initial_states"].half()
    )
    y, final = cute_ssd.mamba_chunk_scan_combined(**made, chunk_size=64, return_final_states=True, **kwargs)
    (y_true, y_eager), (f_true, f_eager) = _pairs(made, kwargs)
    check(y, y_true, y_eager)
    check(final, f_true, f_eager)


@pytest.mark.emulated_slowly("sm_100a:tiles")
@pytest.mark.parametrize("state_dtype", [None, *DTYPES])
def test_state_dtype(device: str, state_dtype: torch.dtype | None) -> None:
    made = inputs(1, 90, device=device)
    offsets = torch.tensor([0, 30, 90], dtype=torch.int32, device=device)
    _, final, varlen = cute_ssd.mamba_chunk_scan_combined(
        **made,
        chunk_size=64,
        cu_seqlens=offsets,
        return_final_states=True,
        return_varlen_states=True,
        state_dtype=state_dtype,
    )
    full, _ = cute_ssd.mamba_chunk_scan_combined(
        **made, chunk_size=64, cu_seqlens=offsets, return_final_states=True, return_varlen_states=True
    )[1:]
    assert final.dtype == varlen.dtype == (state_dtype or torch.float32)
    assert torch.equal(final, full.to(final.dtype))


@pytest.mark.emulated("sm_100a")
@pytest.mark.emulated_slowly("sm_100a:tiles")
def test_returns(device: str) -> None:
    made = inputs(1, 20, device=device)
    offsets = torch.tensor([0, 20], dtype=torch.int64, device=device)
    call = lambda **kw: cute_ssd.mamba_chunk_scan_combined(**made, chunk_size=64, cu_seqlens=offsets, **kw)  # noqa: E731
    assert isinstance(call(), torch.Tensor)
    y, final = call(return_final_states=True)
    y2, varlen = call(return_varlen_states=True)
    y3, final3, varlen3 = call(return_final_states=True, return_varlen_states=True)
    assert torch.equal(y, y2) and torch.equal(y, y3) and torch.equal(final, final3) and torch.equal(varlen, varlen3)
    assert torch.equal(final, varlen)


@pytest.mark.parametrize("full", [False, True])
def test_seq_idx(device: str, full: bool) -> None:
    """A change of id starts a sequence, also back to an earlier id; rows differ; initial states feed the first."""
    made = inputs(3, 150, device=device)
    kwargs = extras(made) if full else {}
    ids = torch.zeros(3, 150, dtype=torch.int32, device=device)
    ids[0, 40:70], ids[0, 70:] = 1, 0
    ids[1, 1:] = 7
    y, final = cute_ssd.mamba_chunk_scan_combined(
        **made, chunk_size=64, seq_idx=ids, return_final_states=True, **kwargs
    )
    (y_true, y_eager), (f_true, f_eager) = _pairs(made, {**kwargs, "seq_idx": ids})
    check(y, y_true, y_eager)
    check(final, f_true, f_eager)


@pytest.mark.emulated("sm_100a", "sm_100a:tiles")
@pytest.mark.emulated_slowly("sm_100a:tiles:1", "sm_100a:tiles:2")
@pytest.mark.parametrize("bounds", [[0, 100], [0, 0, 37, 37, 100, 100], [0, 1, 2, 99], [0, 50, 80], [0, 0]])
@pytest.mark.parametrize("with_ids", [False, True])
def test_cu_seqlens(device: str, bounds: list[int], with_ids: bool) -> None:
    """Also separates y; empty sequences anywhere; rows after the last offset are zero."""
    made = inputs(1, 100, device=device)
    kwargs = extras(made)
    offsets = torch.tensor(bounds, dtype=torch.int32, device=device)
    ids = None
    if with_ids:
        ids = torch.zeros(1, 100, dtype=torch.int32, device=device)
        for s, (low, high) in enumerate(pairwise(bounds)):
            ids[:, low:high] = s
    y, final, varlen = cute_ssd.mamba_chunk_scan_combined(
        **made,
        chunk_size=64,
        cu_seqlens=offsets,
        seq_idx=ids,
        return_final_states=True,
        return_varlen_states=True,
        **kwargs,
    )
    names = ("x", "dt", "A", "B", "C")
    for got, true, eager in zip(
        (y, final, varlen),
        reference.mamba_chunk_scan_combined(*(made[n] for n in names), **kwargs, cu_seqlens=offsets),
        reference.mamba_chunk_scan_combined(
            *(made[n] for n in names), **kwargs, cu_seqlens=offsets, dtype=torch.float32
        ),
        strict=True,
    ):
        check(got, true, eager)
    assert (y[:, bounds[-1] :] == 0).all()


@pytest.mark.emulated("sm_100a")
@pytest.mark.emulated_slowly("sm_100a:tiles")
@pytest.mark.parametrize("seqlen", [0, 1])
def test_no_and_one_token(device: str, seqlen: int) -> None:
    made = inputs(2, seqlen, device=device)
    kwargs = extras(made)
    start = kwargs["initial_states"]
    y, final = cute_ssd.mamba_chunk_scan_combined(**made, chunk_size=64, return_final_states=True, **kwargs)
    assert y.shape == made["x"].shape
    if seqlen == 0:
        assert torch.equal(final, start)
        assert final.data_ptr() != start.data_ptr()
    _, zero = cute_ssd.mamba_chunk_scan_combined(**inputs(2, 0, device=device), chunk_size=64, return_final_states=True)
    assert (zero == 0).all()


@pytest.mark.emulated_slowly("sm_100a:tiles")
@pytest.mark.parametrize(("nheads", "ngroups"), [(150, 1), (150, 2), (131, 1), (260, 130)])
def test_many_heads_in_blocks(device: str, nheads: int, ngroups: int) -> None:
    """More heads than the backend works on at once, also when they do not divide evenly."""
    made = inputs(*fitting(1, 70, nheads, 2, ngroups, 4), device=device)
    y, final = cute_ssd.mamba_chunk_scan_combined(**made, chunk_size=64, return_final_states=True)
    (y_true, y_eager), (f_true, f_eager) = _pairs(made, {})
    check(y, y_true, y_eager)
    check(final, f_true, f_eager)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(device: str, dtype: torch.dtype) -> None:
    """fp32 inputs keep fp32 sums: backend products are not the caller's matmuls."""
    for seqlen in (10, 100):
        made = inputs(1, seqlen, device=device)
        floats = [{n: t.clone().requires_grad_() for n, t in made.items()} for _ in range(2)]
        plain = cute_ssd.mamba_chunk_scan_combined(**floats[0], chunk_size=64)
        with torch.autocast(device, dtype=dtype):
            cast = cute_ssd.mamba_chunk_scan_combined(**floats[1], chunk_size=64)
            cast.sum().backward()
        plain.sum().backward()
        assert torch.equal(plain, cast)
        assert all(torch.equal(floats[0][n].grad, floats[1][n].grad) for n in made)


@pytest.mark.parametrize("order", [(0, 1, 3, 2), (0, 3, 2, 1), (3, 2, 1, 0)])
def test_strided_states(device: str, order: tuple[int, ...]) -> None:
    """Initial states and the gradient of final states in any layout."""
    made = inputs(2, 70, device=device)
    start = torch.randn(2, 4, 8, 16, device=device)
    shape = [start.shape[axis] for axis in order]
    strided = torch.empty(shape, device=device).permute([order.index(axis) for axis in range(4)]).copy_(start)
    results = []
    for states in (start, strided):
        leaf = states.clone(memory_format=torch.preserve_format).requires_grad_()
        y, final = cute_ssd.mamba_chunk_scan_combined(
            **made, chunk_size=64, initial_states=leaf, return_final_states=True
        )
        final.permute(order).square().sum().backward()
        results.append((y, final, leaf.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.emulated("sm_100a")
@pytest.mark.emulated_slowly("sm_100a:tiles")
def test_inputs_are_not_written(device: str) -> None:
    made = inputs(device=device)
    kwargs = extras(made)
    before = {name: t.clone() for name, t in {**made, **kwargs}.items() if isinstance(t, torch.Tensor)}
    cute_ssd.mamba_chunk_scan_combined(**made, chunk_size=64, return_final_states=True, **kwargs)
    for name, t in before.items():
        assert torch.equal(t, {**made, **kwargs}[name]), name


@pytest.mark.emulated("sm_100a")
@pytest.mark.emulated_slowly("sm_100a:tiles")
def test_repeats_bit_for_bit(device: str) -> None:
    made = inputs(2, 300, dtype=torch.bfloat16, device=device)
    first = cute_ssd.mamba_chunk_scan_combined(**made, chunk_size=64, return_final_states=True)
    for _ in range(3):
        again = cute_ssd.mamba_chunk_scan_combined(**made, chunk_size=64, return_final_states=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_any_strides(device: str) -> None:
    """Column slices of one fused projection, transposed states, expanded dt."""
    made = inputs(2, 90, 4, 8, 2, 16, device=device)
    width = 4 * 8 + 2 * 2 * 16 + 4
    for pad in (1, 8, 32):
        fused = torch.full((2, 90, width + pad), float("nan"), device=device)
        parts = torch.split(fused, [4 * 8, 2 * 16, 2 * 16, 4, pad], dim=-1)
        views = {
            "x": parts[0].unflatten(-1, (4, 8)),
            "B": parts[1].unflatten(-1, (2, 16)),
            "C": parts[2].unflatten(-1, (2, 16)),
            "dt": parts[3],
        }
        for name, view in views.items():
            view.copy_(made[name])
        got = cute_ssd.mamba_chunk_scan_combined(**views, A=made["A"], chunk_size=64)
        assert torch.equal(got, cute_ssd.mamba_chunk_scan_combined(**made, chunk_size=64))
