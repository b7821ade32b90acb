"""What must hold for any problem, as Hypothesis properties."""

from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import cute_ssd
from cute_ssd import reference

from .common import check, extras, inputs, packed

PROPERTY = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def sizes(draw: Any) -> dict[str, int]:
    ngroups = draw(st.integers(1, 3))
    return {
        "batch": draw(st.integers(1, 3)),
        "seqlen": draw(st.integers(2, 200)),
        "nheads": ngroups * draw(st.integers(1, 4)),
        "headdim": draw(st.sampled_from([1, 3, 8, 16])),
        "ngroups": ngroups,
        "dstate": draw(st.sampled_from([1, 5, 16, 32])),
        "seed": draw(st.integers(0, 1000)),
    }


def scan(made: dict[str, Any], **kwargs: Any) -> tuple[Tensor, Tensor]:
    return cute_ssd.mamba_chunk_scan_combined(**made, **{"chunk_size": 256, **kwargs}, return_final_states=True)


def close(actual: Tensor, expected: Tensor) -> None:
    scale = expected.abs().max().clamp(min=1e-30) if expected.numel() else 1
    torch.testing.assert_close(actual / scale, expected / scale, rtol=0, atol=1e-5)


@PROPERTY
@given(sizes(), st.data())
def test_causality(size: dict[str, int], data: st.DataObject) -> None:
    """Outputs before a perturbed token keep their bits."""
    made = inputs(**size)
    t = data.draw(st.integers(0, size["seqlen"] - 1))
    before, _ = scan(made)
    changed = {n: v.clone() for n, v in made.items()}
    for name in ("x", "dt", "B", "C"):
        changed[name][:, t] *= 3
    after, _ = scan(changed)
    assert torch.equal(before[:, :t], after[:, :t])
    assert not torch.equal(before[:, t], after[:, t])


@PROPERTY
@given(sizes(), st.integers(1, 300), st.integers(1, 300))
def test_chunk_size_does_not_matter(size: dict[str, int], one: int, other: int) -> None:
    made = inputs(**size)
    for a, b in zip(scan(made, chunk_size=one), scan(made, chunk_size=other), strict=True):
        assert torch.equal(a, b)


@PROPERTY
@given(sizes(), st.data())
def test_splitting_a_sequence(size: dict[str, int], data: st.DataObject) -> None:
    made = inputs(**size)
    more = extras(made)
    cut = data.draw(st.integers(0, size["seqlen"]))
    whole, final = scan(made, **more)
    parts, state = [], more.pop("initial_states")
    z = more.pop("z")
    for part in (slice(0, cut), slice(cut, None)):
        piece = {n: t[:, part] if n != "A" else t for n, t in made.items()}
        y, state = scan(piece, **more, z=z[:, part], initial_states=state)
        parts.append(y)
    close(torch.cat(parts, 1), whole)
    close(state, final)


@PROPERTY
@given(sizes(), st.lists(st.sampled_from([0, 1, 2, 3, 17, 63, 64, 65, 130]), min_size=1, max_size=6))
def test_packed_equals_one_by_one(size: dict[str, int], lengths: list[int]) -> None:
    """Bit for bit, also next to NaN, at the sizes that models have as well as at small ones."""
    total = sum(lengths)
    big = {"nheads": 24, "headdim": 64, "ngroups": 1, "dstate": 128} if size["seed"] % 5 == 0 else {}
    made = inputs(**{**size, **big, "batch": 1, "seqlen": total})
    more = extras(made)
    names = ("x", "dt", "B", "C", "z")
    if size["seed"] % 2:  # columns of a wider buffer
        more["z"] = torch.stack((more["z"], more["z"]), -1)[..., 0]
        made["x"] = torch.stack((made["x"], made["x"]), -1)[..., 0]
    del more["initial_states"]
    made = packed({**made, **more})
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    y, final = cute_ssd.mamba_chunk_scan_varlen(**made, query_start_loc=offsets, return_final_states=True)
    for s, length in enumerate(lengths):
        mine = slice(int(offsets[s]), int(offsets[s + 1]))
        alone = {n: t[mine] if n in names else t for n, t in made.items()}
        y_s, final_s = cute_ssd.mamba_chunk_scan_varlen(
            **alone, query_start_loc=torch.tensor([0, length]), return_final_states=True
        )
        assert torch.equal(y[mine], y_s) and torch.equal(final[s], final_s[0])
        batched = {n: t[None] if n in names else t for n, t in alone.items()}
        y_b, final_b = scan(batched)
        assert torch.equal(y_s, y_b[0]) and torch.equal(final_s, final_b)
    victim = len(lengths) // 2
    mine = slice(int(offsets[victim]), int(offsets[victim + 1]))
    dirty = {n: torch.full_like(t, float("nan")) if n in names else t for n, t in made.items()}
    for name in names:
        dirty[name][mine] = made[name][mine]
    y_n, final_n = cute_ssd.mamba_chunk_scan_varlen(**dirty, query_start_loc=offsets, return_final_states=True)
    assert torch.equal(y_n[mine], y[mine]) and torch.equal(final_n[victim], final[victim])


@PROPERTY
@given(sizes())
def test_batch_rows_are_independent(size: dict[str, int]) -> None:
    """Each row alone gives the same bits, so that permuting rows permutes results."""
    made = inputs(**size)
    y, final = scan(made)
    for row in range(size["batch"]):
        y_r, final_r = scan({n: t[row : row + 1] if n != "A" else t for n, t in made.items()})
        assert torch.equal(y[row], y_r[0]) and torch.equal(final[row], final_r[0])


@PROPERTY
@given(sizes(), st.randoms(use_true_random=False))
def test_permuting_heads_of_a_group(size: dict[str, int], random: Any) -> None:
    made = inputs(**size)
    per_group = size["nheads"] // size["ngroups"]
    order: list[int] = []
    for group in range(size["ngroups"]):
        heads = list(range(group * per_group, (group + 1) * per_group))
        random.shuffle(heads)
        order += heads
    y, final = scan(made)
    y_p, final_p = scan({**made, "x": made["x"][:, :, order], "dt": made["dt"][:, :, order], "A": made["A"][order]})
    close(y_p, y[:, :, order])
    close(final_p, final[:, order])


@PROPERTY
@given(sizes())
def test_group_broadcast(size: dict[str, int]) -> None:
    """Group h // (nheads // ngroups) feeds head h: the same as B and C repeated for every head."""
    made = inputs(**size)
    per_group = size["nheads"] // size["ngroups"]
    y, final = scan(made)
    wide = {n: made[n].repeat_interleave(per_group, dim=2) for n in ("B", "C")}
    y_w, final_w = scan({**made, **wide})
    close(y_w, y)
    close(final_w, final)


@PROPERTY
@given(sizes())
def test_dt_zero_leaves_the_state(size: dict[str, int]) -> None:
    made = inputs(**size)
    made["dt"] = torch.zeros_like(made["dt"])
    start = torch.randn(size["batch"], size["nheads"], size["headdim"], size["dstate"])
    _, final = scan(made, initial_states=start)
    assert torch.equal(final, start)


@PROPERTY
@given(sizes(), st.floats(-3, 3))
def test_linear_in_x(size: dict[str, int], factor: float) -> None:
    made = inputs(**size)
    other = torch.randn_like(made["x"])
    y, final = scan(made)
    y_o, final_o = scan({**made, "x": other})
    y_sum, final_sum = scan({**made, "x": made["x"] + factor * other})
    for got, a, b in ((y_sum, y, y_o), (final_sum, final, final_o)):
        scale = max(a.abs().max().item(), abs(factor) * b.abs().max().item(), 1e-30)
        torch.testing.assert_close(got / scale, (a + factor * b) / scale, rtol=0, atol=1e-5)


@PROPERTY
@given(st.integers(0, 300), st.integers(0, 1000))
def test_any_length(seqlen: int, seed: int) -> None:
    made = inputs(1, seqlen, 2, 4, 1, 8, seed=seed)
    args = tuple(made[n] for n in ("x", "dt", "A", "B", "C"))
    true = reference.mamba_chunk_scan_combined(*args)
    eager = reference.mamba_chunk_scan_combined(*args, dtype=torch.float32)
    for i, got in enumerate(scan(made)):
        check(got, true[i], eager[i])
