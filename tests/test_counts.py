"""Counts of what a tile costs: the goals of the chunked kernels, and what the table says of peers."""

import pytest

from cute_ssd import counts
from cute_ssd.emulator.timing import Model


@pytest.mark.parametrize("dstate", [128, 256])
def test_a_tile_stays_within_its_budget(dstate: int) -> None:
    state, passing, scan = counts.ours(dstate, Model())
    assert [name.split(",")[0] for name in (state.name, passing.name, scan.name)] == [
        "chunk_state",
        "state_passing",
        "chunk_scan",
    ]
    assert 0 < state.busy["shared"] + scan.busy["shared"] <= counts.SHARED_GOAL[dstate]
    assert 0 < state.busy["MUFU"] + scan.busy["MUFU"] <= counts.MUFU_GOAL
    mma = state.busy["MMA"] + scan.busy["MMA"]
    formula = counts.mma_formula(dstate)
    assert formula == {128: 896, 256: 1536}[dstate] and formula <= mma <= counts.MMA_GOAL * formula
    assert mma <= state.busy["tensor"] + scan.busy["tensor"]
    assert passing.busy["shared"] == passing.busy["tensor"] == 0


def test_a_peer_needs_a_place_for_its_chunks() -> None:
    with pytest.raises(ValueError, match=r"has no \{chunks\}"):
        counts.peer("script.py --length 128", Model())
