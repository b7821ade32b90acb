"""The public suite: its cases, its inputs and its rule of what is right."""

import json
from importlib.resources import files
from typing import Any

import pytest
import torch

import cute_ssd
from cute_ssd import reference, suite


def small(case: int = 3, seqlen: int = 40) -> suite.Case:
    """A case of the suite, shortened."""
    return suite.cases([case])[0]._replace(seqlen=seqlen)


def test_cases_are_the_published_ones() -> None:
    sizes = [(1, 1024), (1, 997), (16, 512), (1, 256), (4, 541), (4, 1879), (4, 256), (2, 512), (8, 1024), (1, 4096)]
    sizes += [(16, 256), (32, 256), (2, 293), (4, 2048), (2, 1321), (4, 1024)]
    cases = suite.cases()
    assert [c.case for c in cases] == list(range(16))
    assert [(c.batch, c.seqlen) for c in cases] == sizes
    assert {c[3:7] for c in cases} == {(16, 64, 1, 256)}
    assert (cases[3].atol, cases[10].atol, cases[0].rtol) == (0.014, 0.046, 0.05)
    table = json.loads(files("cute_ssd").joinpath("data/sol_suite.json").read_text())
    assert len(table["cases"]) == 16 and "99%" in table["match"]


def test_unknown_case() -> None:
    with pytest.raises(cute_ssd.ShapeError, match="case is 16, expected 0 to 15"):
        suite.cases([3, 16])


def test_inputs() -> None:
    made = suite.inputs(small()._replace(batch=2), seed=5)
    assert {n: tuple(t.shape) for n, t in made.items()} == {
        "x": (2, 40, 16, 64),
        "log_decay": (2, 16, 40),
        "B": (2, 40, 1, 256),
        "C": (2, 40, 1, 256),
        "D": (16,),
        "initial_states": (2, 16, 64, 256),
    }
    assert {t.dtype for t in made.values()} == {torch.bfloat16}
    assert made["log_decay"].min() >= -1 and made["log_decay"].max() <= -0.00099
    assert 0.95 < made["x"].float().std() < 1.05
    again, other = suite.inputs(small()._replace(batch=2), seed=5), suite.inputs(small()._replace(batch=2), seed=6)
    assert all(torch.equal(made[n], again[n]) and not torch.equal(made[n], other[n]) for n in made)


def test_expected_is_the_recurrence_rounded_once() -> None:
    made = suite.inputs(small()._replace(batch=2))
    y, states = reference.ssd_chunk_scan(**made, dtype=torch.float32)
    got = suite.expected(made)
    torch.testing.assert_close(got[0].float(), y, rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(got[1].float(), states, rtol=2**-8, atol=1e-6)
    assert got[0].dtype == got[1].dtype == torch.bfloat16


def test_expected_leaves_the_threads_alone() -> None:
    threads = torch.get_num_threads()
    suite.expected(suite.inputs(small(seqlen=2)))
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("wrong, passes", [(0, True), (10, True), (11, False)])
def test_one_element_in_a_hundred_may_differ(wrong: int, passes: bool) -> None:
    ref = torch.full((1000,), 2.0, dtype=torch.bfloat16)
    out = ref.clone()
    out[:wrong] = 1000.0
    error, matched = suite.compare(out, ref, 0.01, 0.05)
    assert (matched >= suite.REQUIRED_MATCH) is passes
    assert matched == pytest.approx(1 - wrong / 1000) and error == (998.0 if wrong else 0.0)


def test_the_tolerance_is_the_sum_of_both() -> None:
    ref = torch.tensor([0.0, 0.0, 4.0, -4.0])
    out = torch.tensor([0.0625, 0.0627, 4.28125, -4.3125])
    _, matched = suite.compare(out, ref, 0.0625, 0.0625)
    assert matched == 0.75


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_value_that_is_not_finite_fails(bad: float) -> None:
    ref = torch.zeros(1000, dtype=torch.bfloat16)
    out = ref.clone()
    out[7] = bad
    assert suite.compare(out, ref, 0.1, 0.1)[1] == 0


def test_another_shape_or_dtype_fails() -> None:
    ref = torch.zeros(10, 4, dtype=torch.bfloat16)
    assert suite.compare(ref[:5], ref, 1, 1)[1] == 0
    assert suite.compare(ref.float(), ref, 1, 1)[1] == 0


def test_check_passes_on_the_cpu() -> None:
    first, second = suite.check([small(3), small(10, 3)])
    assert first.passed and second.passed and (first.case, second.case) == (3, 10)
    assert first.us is not None and first.us > 0
    assert first.matched is not None and first.matched > 0.99 and first.max_error is not None
    assert first.device == "cpu" and not first.message


def altered(change: Any) -> Any:
    def scan(**kwargs: Any) -> Any:
        return change(*cute_ssd.ssd_chunk_scan(**kwargs))

    return scan


@pytest.mark.parametrize(
    "change",
    [
        lambda y, s: (y * 1.2, s),
        lambda y, s: (y, s * 1.2),
        lambda y, s: (y, s.float()),
        lambda y, s: (y[:, :-1], s),
        lambda y, s: (y, torch.where(s == s.max(), torch.nan, s)),
    ],
    ids=["y", "state", "dtype", "shape", "nan"],
)
def test_check_fails_on_a_wrong_backend(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    monkeypatch.setattr(suite, "ssd_chunk_scan", altered(change))
    (outcome,) = suite.check([small()])
    assert not outcome.passed and outcome.matched is not None and outcome.matched < 0.99


def test_a_case_that_raises_fails_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def scan(**kwargs: Any) -> Any:
        if kwargs["x"].shape[1] == 40:
            raise cute_ssd.UnsupportedError("no kernel today.")
        return cute_ssd.ssd_chunk_scan(**kwargs)

    monkeypatch.setattr(suite, "ssd_chunk_scan", scan)
    first, second = suite.check([small(), small(seqlen=8)])
    assert not first.passed and first.us is None and first.message == "UnsupportedError: no kernel today."
    assert second.passed


def test_the_best_device_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert suite.best_device() == ("cpu", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "A GPU")
    device, note = suite.best_device()
    assert device == "cpu" and note.startswith("A GPU is not used: ssd_chunk_scan has no kernel")
    assert "sm_75" in note
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert suite.best_device() == ("cuda", "")
