"""Modelled times of the public suite: the table, the JSON, and one case in earnest."""

import json
import math

import pytest

from cute_ssd import modelled
from cute_ssd.__main__ import main
from cute_ssd.emulator.timing import ChainTime, LaunchTime, Model


def row(case: int, us: float, sol: float = 2.0, baseline: float = 400.0) -> modelled.Row:
    launch = LaunchTime("k", us * 1500, us * 1500, 1.5, 80, 80, 1, 1, 3, {"hbm": us * 900, "alu": us * 600}, 0, 0)
    return modelled.Row(case, 1, 1024, 1, 4, 80, ChainTime(us, [launch], [0.0]), sol, baseline)


def test_totals_are_those_of_the_suite():
    total = modelled.totals([row(0, 2.0), row(1, 400.0), row(2, 20.0)])
    assert list(total) == ["cases", "geomean_us", "score"]
    assert [list(case) for case in total["cases"]] == [["case", "modelled_us", "binding", "bound_us", "score"]] * 3
    assert [case["score"] for case in total["cases"][:2]] == [1.0, 0.5]
    assert total["geomean_us"] == pytest.approx(math.pow(2 * 400 * 20, 1 / 3))
    assert total["score"] == pytest.approx(sum(case["score"] for case in total["cases"]) / 3)
    assert total["cases"][2]["binding"] == "hbm" and total["cases"][2]["bound_us"] == pytest.approx(12.0)


def test_the_table_says_that_it_is_modelled_and_that_schedules_are_shared():
    rows = [row(0, 12.0)]
    assert len(modelled.line(rows[0])) == len(modelled.header())
    assert "12.00" in modelled.line(rows[0])
    text = modelled.summary(rows, Model(1.5))
    assert "modelled at 1.5 GHz" in text and "share a schedule" in text


@pytest.mark.slow
def test_a_case_is_modelled(capsys):
    assert main(["bench", "--modelled", "--case", "3", "--json"]) == 0
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    assert case["case"] == 3
    assert 2 < case["modelled_us"] < 400 and case["bound_us"] <= case["modelled_us"]
    assert 0.5 < case["score"] < 1


def test_an_unknown_case_is_refused(capsys):
    assert main(["bench", "--modelled", "--case", "99"]) == 2
    assert "case is 99" in capsys.readouterr().err
