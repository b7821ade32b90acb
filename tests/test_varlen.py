"""Packed sequences, chunk states and the in-place pool."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_ssd
from cute_ssd import reference

from .common import DTYPES, check, extras, inputs, packed, states

LENGTHS = [[100], [1] * 7, [37, 0, 1, 62], [0, 0, 64, 64, 65, 0], [5, 1, 17, 2], [130, 3, 130, 3]]


def problem(
    lengths: list[int], dtype: torch.dtype | None = None, device: str = "cpu", spare: int = 0
) -> tuple[dict[str, Any], Tensor]:
    """Arguments of `mamba_chunk_scan_varlen` for sequences of these lengths and `spare` tokens behind them."""
    made = inputs(1, sum(lengths) + spare, dtype=dtype, device=device)
    more = extras(made)
    del more["initial_states"]
    arguments = packed({**made, **more})
    arguments["query_start_loc"] = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    start = states(len(lengths), device)
    return arguments, start


def explain(**arguments: Any) -> Any:
    return cute_ssd.explain(cute_ssd.mamba_chunk_scan_varlen, **arguments)


def truth(arguments: dict[str, Any], start: Tensor | None, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return reference.mamba_chunk_scan_varlen(**arguments, initial_states=start, dtype=dtype)


@pytest.mark.emulated("sm_80", "sm_100a", "sm_100a:tiles")
@pytest.mark.emulated_slowly("sm_100a:tiles:1", "sm_100a:tiles:2")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_against_recurrence(device: str, lengths: list[int], dtype: torch.dtype) -> None:
    arguments, start = problem(lengths, dtype, device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    y, final = cute_ssd.mamba_chunk_scan_varlen(**arguments, initial_states=start, return_final_states=True)
    for got, true, eager in zip((y, final), truth(arguments, start), truth(arguments, start, wide), strict=True):
        check(got, true, eager)
    empty = [s for s, length in enumerate(lengths) if length == 0]
    assert torch.equal(final[empty], start[empty].to(final.dtype))


@pytest.mark.emulated("sm_100a", "sm_100a:tiles")
@pytest.mark.parametrize("lengths", LENGTHS)
def test_one_by_one_bit_for_bit(device: str, lengths: list[int]) -> None:
    """A sequence's bits do not depend on its neighbours, not even on NaN in them."""
    arguments, start = problem(lengths, device=device)
    y, final = cute_ssd.mamba_chunk_scan_varlen(**arguments, initial_states=start, return_final_states=True)
    bounds = arguments["query_start_loc"].tolist()
    for s, (low, high) in enumerate(pairwise(bounds)):
        alone = {n: t[low:high] if n in ("x", "dt", "B", "C", "z") else t for n, t in arguments.items()}
        alone["query_start_loc"] = torch.tensor([0, high - low], dtype=torch.int32, device=device)
        y_s, final_s = cute_ssd.mamba_chunk_scan_varlen(
            **alone, initial_states=start[s : s + 1], return_final_states=True
        )
        assert torch.equal(y[low:high], y_s) and torch.equal(final[s], final_s[0])
        dirty = {n: t.clone() if isinstance(t, Tensor) else t for n, t in arguments.items()}
        for name in ("x", "dt", "B", "C", "z"):
            dirty[name][:low] = float("nan")
            dirty[name][high:] = float("nan")
        others = start.clone()
        others[:s], others[s + 1 :] = float("nan"), float("nan")
        y_n, final_n = cute_ssd.mamba_chunk_scan_varlen(**dirty, initial_states=others, return_final_states=True)
        assert torch.equal(y_n[low:high], y_s) and torch.equal(final_n[s], final_s[0])


@pytest.mark.emulated("sm_100a")
@pytest.mark.emulated_slowly("sm_100a:tiles")
def test_rows_behind_the_last_sequence(device: str) -> None:
    arguments, _ = problem([20, 30], device=device, spare=10)
    assert (cute_ssd.mamba_chunk_scan_varlen(**arguments)[50:] == 0).all()
    out = torch.full_like(arguments["x"], 7.0)
    y = cute_ssd.mamba_chunk_scan_varlen(**arguments, out=out)
    assert y is out and (out[50:] == 7).all()
    assert torch.equal(out[:50], cute_ssd.mamba_chunk_scan_varlen(**arguments)[:50])


@pytest.mark.emulated("sm_100a", "sm_100a:tiles")
def test_no_sequences(device: str) -> None:
    arguments, _ = problem([], device=device, spare=5)
    arguments["query_start_loc"] = torch.zeros(1, dtype=torch.int32, device=device)
    y, final, chunks = cute_ssd.mamba_chunk_scan_varlen(**arguments, return_final_states=True, return_chunk_states=True)
    assert (y == 0).all() and final.shape == chunks.shape == states(0).shape


@pytest.mark.emulated("sm_90a", "sm_100a:tiles")
@pytest.mark.emulated_slowly("sm_100a")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("chunk_size", [1, 7, 32, 64, 128, 1000])
@pytest.mark.parametrize("lengths", [[100], [37, 0, 1, 62], [128, 64, 130]])
def test_chunk_states(device: str, lengths: list[int], chunk_size: int, dtype: torch.dtype) -> None:
    """The state at each boundary equals that of the truncated sequence; y and final states keep their bits."""
    arguments, start = problem(lengths, dtype, device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    plain = cute_ssd.mamba_chunk_scan_varlen(**arguments, initial_states=start, return_final_states=True)
    wanted = {"chunk_size": chunk_size, "return_final_states": True, "return_chunk_states": True}
    y, final, chunks = cute_ssd.mamba_chunk_scan_varlen(**arguments, initial_states=start, **wanted)
    backends = {explain(**arguments, initial_states=start, **more).backend for more in ({}, wanted)}
    if len(backends) == 1:  # tiles do not leave states after any number of tokens
        assert torch.equal(y, plain[0]) and torch.equal(final, plain[1])
    assert chunks.shape == states(sum(lengths) // chunk_size + len(lengths)).shape
    row, bounds = 0, arguments["query_start_loc"].tolist()
    for s, length in enumerate(lengths):
        for end in [*range(chunk_size, length, chunk_size), *([length] if length else [])]:
            cut = {
                n: t[bounds[s] : bounds[s] + end] if n in ("x", "dt", "B", "C", "z") else t
                for n, t in arguments.items()
            }
            cut["query_start_loc"] = torch.tensor([0, end], dtype=torch.int32)
            true, eager = truth(cut, start[s : s + 1])[1], truth(cut, start[s : s + 1], wide)[1]
            check(chunks[row : row + 1], true, eager)
            row += 1
    assert (chunks[row:] == 0).all()


@pytest.mark.emulated("sm_80", "sm_100a")
def test_chunk_states_at_own_boundaries(device: str) -> None:
    arguments, start = problem([50, 0, 80], device=device)
    own = torch.tensor([0, 3, 50, 60, 124, 130], dtype=torch.int32, device=device)
    _, chunks = cute_ssd.mamba_chunk_scan_varlen(
        **arguments, initial_states=start, return_chunk_states=True, cu_chunk_seqlens=own
    )
    assert chunks.shape[0] == 5
    for row, (s, low, high) in enumerate([(0, 0, 3), (0, 0, 50), (2, 50, 60), (2, 50, 124), (2, 50, 130)]):
        cut = {n: t[low:high] if n in ("x", "dt", "B", "C", "z") else t for n, t in arguments.items()}
        cut["query_start_loc"] = torch.tensor([0, high - low], dtype=torch.int32)
        check(chunks[row : row + 1], truth(cut, start[s : s + 1])[1], truth(cut, start[s : s + 1], torch.float32)[1])


@pytest.mark.emulated("sm_103a", "sm_100a:tiles")
@pytest.mark.emulated_slowly("sm_100a:tiles:1", "sm_100a:tiles:2")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pool(device: str, dtype: torch.dtype, pool_dtype: torch.dtype) -> None:
    lengths = [37, 0, 1, 62, 5, 1]
    arguments, _ = problem(lengths, dtype, device)
    pool = states(12, device).to(pool_dtype)
    slots = torch.tensor([11, 3, 0, 5, -1, 7], dtype=torch.int32, device=device)
    started = torch.tensor([True, True, False, True, True, False], device=device)
    before = pool.clone()
    y = cute_ssd.mamba_chunk_scan_varlen_inplace(
        **arguments, ssm_pool=pool, cache_indices=slots, has_initial_state=started
    )
    start = torch.where(started[:, None, None, None], before[slots.long()].float(), 0.0)
    start[4] = 0  # padding starts from zero
    for got, true, eager in zip(
        (y, pool[slots.long()][[0, 2, 3, 5]]),
        truth(arguments, start),
        truth(arguments, start, torch.float32),
        strict=True,
    ):
        chosen = slice(None) if got is y else [0, 2, 3, 5]
        check(got, true[chosen], eager[chosen])
    untouched = [s for s in range(12) if s not in (11, 0, 5, 7)]
    assert torch.equal(pool[untouched], before[untouched])


@pytest.mark.emulated("sm_100a")
@pytest.mark.emulated_slowly("sm_100a:tiles")
def test_pool_defaults(device: str) -> None:
    """has_initial_state None starts at zero and still writes; a NaN in an unread slot reaches nothing."""
    arguments, _ = problem([10, 20], device=device)
    pool = torch.full_like(states(3, device), float("nan"))
    slots = torch.tensor([2, 0], dtype=torch.int64, device=device)
    y = cute_ssd.mamba_chunk_scan_varlen_inplace(**arguments, ssm_pool=pool, cache_indices=slots)
    expected, final = cute_ssd.mamba_chunk_scan_varlen(**arguments, return_final_states=True)
    assert torch.equal(y, expected) and torch.equal(pool[[2, 0]], final) and pool[1].isnan().all()


@pytest.mark.emulated("sm_100a")
@pytest.mark.emulated_slowly("sm_100a:tiles")
def test_strided_pool_and_guard_bands(device: str) -> None:
    """The pool is a slice of a wider buffer (slot pitch); bytes around it stay."""
    arguments, _ = problem([10, 20], device=device)
    state = states(1).shape[1:]
    buffer = torch.full((4, state.numel() + 32), 3.0, device=device)
    pool = buffer[1:, 16:-16].unflatten(1, state)
    slots = torch.tensor([2, 0], dtype=torch.uint32, device=device)
    cute_ssd.mamba_chunk_scan_varlen_inplace(**arguments, ssm_pool=pool, cache_indices=slots)
    _, final = cute_ssd.mamba_chunk_scan_varlen(**arguments, return_final_states=True)
    assert torch.equal(pool[[2, 0]], final)
    assert (
        (buffer[0] == 3).all() and (buffer[:, :16] == 3).all() and (buffer[:, -16:] == 3).all() and (pool[1] == 3).all()
    )


@pytest.mark.emulated_slowly("sm_100a:tiles")
def test_state_dtype(device: str) -> None:
    """Rounded once. (Not in the dtype of x: then tiles pass states on in it.)"""
    arguments, start = problem([10, 140], device=device)
    kwargs = {"initial_states": start, "return_final_states": True, "return_chunk_states": True, "chunk_size": 128}
    _, final, chunks = cute_ssd.mamba_chunk_scan_varlen(**arguments, **kwargs)
    _, final16, chunks16 = cute_ssd.mamba_chunk_scan_varlen(**arguments, **kwargs, state_dtype=torch.float16)
    assert torch.equal(final16, final.half()) and torch.equal(chunks16, chunks.half())


@pytest.mark.parametrize("order", ["behind", "reversed", "apart", "inside", "permuted"])
def test_states_of_one_token_sequences_go_where_they_belong(order: str) -> None:
    """Fresh states one behind the other are written at once, others one by one; what lies between stays."""
    made = packed(inputs(1, 5, 2, 3, 1, 4))
    whole = torch.full((16, 2, 3, 8), 7.0)
    dense = whole.view(-1, 2, 3, 4)
    pools = {"inside": whole[..., :4], "permuted": whole.view(-1, 4, 2, 3).permute(0, 2, 3, 1)}
    slots = {"reversed": [7, 6, 5, 4, 3], "apart": [3, 5, 7, 9, 11]}
    pool = pools.get(order, dense)
    before, taken = pool.clone(), slots.get(order, [3, 4, 5, 6, 7])
    cute_ssd.mamba_chunk_scan_varlen_inplace(
        **made, ssm_pool=pool, cache_indices=torch.tensor(taken), query_start_loc=torch.arange(6), dt_softplus=False
    )
    for token, slot in enumerate(taken):
        alone = {name: t if name == "A" else t[token : token + 1] for name, t in made.items()}
        options = {"query_start_loc": torch.tensor([0, 1]), "return_final_states": True}
        assert torch.equal(pool[slot], cute_ssd.mamba_chunk_scan_varlen(**alone, **options)[1][0])
    others = [slot for slot in range(len(pool)) if slot not in taken]
    assert torch.equal(pool[others], before[others]) and (order != "inside" or (whole[..., 4:] == 7).all())


@pytest.mark.parametrize("lengths", [[1, 2], [1, 1, 1], [1], [5]])
@pytest.mark.parametrize("layout", ["every other", "layer", "permuted"])
def test_pools_of_any_strides(layout: str, lengths: list[int]) -> None:
    """A pool may be one layer's of a larger one; one-token sequences read and write their slot in place."""
    arguments, _ = problem(lengths)
    made = {name: t for name, t in arguments.items() if name in ("x", "dt", "A", "B", "C", "query_start_loc")}
    state, slots = (made["x"].shape[1], made["x"].shape[2], made["B"].shape[2]), len(lengths)
    pool = {
        "every other": torch.randn(2 * slots, *state)[::2],
        "layer": torch.randn(slots, 3, *state)[:, 1],
        "permuted": torch.randn(*state[::-1], slots).permute(3, 2, 1, 0),
    }[layout]
    dense = pool.clone(memory_format=torch.contiguous_format)
    options = {"cache_indices": torch.arange(slots), "has_initial_state": torch.ones(slots, dtype=torch.bool)}
    found, wanted = (cute_ssd.mamba_chunk_scan_varlen_inplace(**made, ssm_pool=p, **options) for p in (pool, dense))
    torch.testing.assert_close((found, pool), (wanted, dense), rtol=1e-5, atol=1e-5)
