"""Huge pages for large outputs: which memory the advice is for, and that nothing but the time depends on it."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_ssd
from cute_ssd import pages

ROWS = pages.LARGE // (4 * 64 * 4)  # tokens of 4 heads of 64 floats whose y is just large


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """[begin, end) of what huge pages are asked for."""
    asked: list[tuple[int, int]] = []
    real = pages._madvise()
    if real is None:
        pytest.skip("this system has no huge pages on request")

    def madvise(begin: int, size: int, advice: int) -> int:
        asked.append((begin, begin + size))
        return real(begin, size, advice)

    monkeypatch.setattr(pages, "_madvise", lambda: madvise)
    return asked


def packed(tokens: int) -> dict[str, torch.Tensor]:
    return {
        "x": torch.randn(tokens, 4, 64),
        "dt": torch.rand(tokens, 4) / 10,
        "A": -torch.rand(4),
        "B": torch.randn(tokens, 1, 4),
        "C": torch.randn(tokens, 1, 4),
        "query_start_loc": torch.tensor([0, tokens - 1]),
    }


def test_whole_pages_inside_large_outputs(advised: list[tuple[int, int]]) -> None:
    given = packed(ROWS)
    y = cute_ssd.mamba_chunk_scan_varlen(**given)
    ((begin, end),) = advised
    assert begin % pages.PAGE == end % pages.PAGE == 0
    assert y.data_ptr() <= begin < end <= y.data_ptr() + y.nbytes
    assert end - begin > y.nbytes - 2 * pages.PAGE
    del given["query_start_loc"]
    batched = {n: t if n == "A" else t[None] for n, t in given.items()}
    advised.clear()
    scanned, _ = cute_ssd.mamba_chunk_scan_combined(**batched, chunk_size=64, return_final_states=True)
    assert len(advised) == 1  # y; the state is small
    torch.testing.assert_close(y[:-1], scanned[0, :-1])
    assert not y[-1].any()


def test_small_outputs_are_left_alone(advised: list[tuple[int, int]]) -> None:
    cute_ssd.mamba_chunk_scan_varlen(**packed(ROWS - 1))
    assert advised == []


def test_without_madvise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("mmap.MADV_HUGEPAGE", raising=False)
    pages._madvise.cache_clear()
    try:
        assert cute_ssd.mamba_chunk_scan_varlen(**packed(ROWS)).isfinite().all()
    finally:
        pages._madvise.cache_clear()


def test_no_memory_to_advise() -> None:
    with FakeTensorMode():
        assert pages.zeros_like(torch.empty(pages.LARGE)).shape == (pages.LARGE,)
    assert pages.zeros_like(torch.empty(pages.LARGE, device="meta")).is_meta
    zeros = torch.compile(pages.zeros_like, fullgraph=True, backend="eager")(torch.empty(pages.LARGE))
    assert zeros.shape == (pages.LARGE,) and not zeros.any()
