"""Counts of what a tile costs: the goals of the chunked kernels, and what the table says of peers."""

import json
from pathlib import Path

import pytest

from cute_ssd import counts, modelled
from cute_ssd.__main__ import main
from cute_ssd.emulator.timing import ChainTime, LaunchTime, Model


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


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("script.py --length 128", "has no {chunks}; put it where"),
        ("no_such_script.py {chunks}", "'no_such_script.py' is not a file; begin with the path of a Python script."),
    ],
)
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_wrong_peer_is_refused_before_anything_runs(
    command: str, message: str, form: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(modelled, "rows", pytest.fail)
    assert main(["bench", "--modelled", "--peer", command, *form]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and message in shown.err and shown.err.count("\n") == 1


def test_a_peer_that_launches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "peer.py"
    path.write_text("import sys\nsys.exit(2)\n")
    with pytest.raises(ValueError, match=r"peer peer\.py with the arguments '--n 3' launched nothing, expected"):
        counts.script(f"{path} --n {{chunks}}").time(3, Model())


def time(us: float, kernels: int = 1) -> ChainTime:
    """Of launches that share memory binds for 60 % of their time."""
    clocks = us * 1500 / kernels
    busy = {"shared memory": 0.6 * clocks, "alu": 0.3 * clocks}
    launch = LaunchTime("k", clocks, clocks, 1.5, 148, 148, 1, 1, 3, busy, 0, 0)
    return ChainTime(us, [launch] * kernels, [0.0] * kernels)


def test_peers_stand_beside_this_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the table and in the JSON; 2000 clocks of shared memory for a head's tile against 500."""
    path = tmp_path / "peer.py"
    path.write_text("")
    count = counts.Count("chunk_scan", dict.fromkeys(counts.RESOURCES, 250.0))
    case = modelled.Row(0, 1, 1024, 3, 4, 80, time(12.0, 3), 2.0, 400.0)
    monkeypatch.setattr(modelled, "rows", lambda cases, model: iter([case]))
    monkeypatch.setattr(modelled, "call", lambda *sizes: time(30.0, 3))
    monkeypatch.setattr(counts, "ours", lambda dstate, model: [count] * 3)
    monkeypatch.setattr(counts.Script, "time", lambda script, chunks, model: time(chunks * 2000 / 1500 / 0.6))
    command = ["bench", "--modelled", "--peer", f"{path} {{chunks}}"]
    assert main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result) == ["cases", "geomean_us", "score", "peers"]
    ours, theirs = result["peers"]
    assert ours["name"] == "cute_ssd" and (ours["launches"], ours["modelled_us"]) == (3, 30.0)
    assert ours["clocks"]["shared"] == 500.0 and theirs["clocks"]["shared"] == pytest.approx(2000.0)
    assert (theirs["name"], theirs["launches"], theirs["ctas"]) == ("peer.py", 1, 148)
    assert theirs["binding"] == "shared memory" and theirs["bound_us"] == pytest.approx(16 * 2000 / 1500)
    assert main(command) == 0
    *_, count_line, _, problem, _, first, second = capsys.readouterr().out.splitlines()
    assert "what binds here needs 25 % of that (goal 50 %)" in count_line
    assert problem == "2048 tokens of 148 heads of one group, headdim 64, dstate 128"
    assert first.split() == ["cute_ssd", "3", "148", "30.00", "shared", "memory", "18.00"]
    assert second.split() == ["peer.py", "1", "148", "35.56", "shared", "memory", "21.33"]
