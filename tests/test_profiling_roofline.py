"""profiling.roofline: roofs, points of measured and of modelled results, pictures."""

import json
from pathlib import Path

import pytest

from cute_ssd import suite
from profiling import ProfilingError, cases, results, roofline

from .test_profiling_bench import gpu_result, written


def modelled(path: Path) -> str:
    rows = [
        {"case": c.case, "modelled_us": 15.0 + c.case, "binding": "shared", "bound_us": 3.0, "score": 0.97}
        for c in suite.cases()
    ]
    return written(path, {"cases": rows, "geomean_us": 20.0, "score": 0.97})


def test_roofs_are_what_the_suite_publishes() -> None:
    peaks = roofline.PEAKS["b200"]
    for number, (bound_us, _) in suite.published().items():
        us = roofline.roofs_us(cases.suite_work(number), peaks)
        # The suite's bound is the compulsory bytes' time and 0.43 µs.
        assert us["HBM"] + 0.43 == pytest.approx(bound_us, abs=0.1), number
        assert us["L2"] < us["HBM"] and us["MUFU"] < us["shared"]


def test_shared_memory_of_a_tile() -> None:
    # One group, four heads of one tile: 256 columns of x fill one instruction.
    work = cases.sized_work(batch=1, seqlen=128, nheads=4, headdim=64, ngroups=1, dstate=128)
    tokens, rows, dstate = 128, 256, 128
    written_once = tokens * (rows + 2 * dstate)
    read = tokens * (2 * dstate + rows + rows + dstate + dstate)  # scores; y_diag; state_in; y_off
    assert roofline.least(work)["shared"] == 2 * (written_once + read + 2 * rows * dstate)
    assert roofline.least(work)["MUFU"] == 128 * 4 * 36
    doubled = roofline.least(work._replace(nheads=8))["shared"]
    assert doubled < 2 * roofline.least(work)["shared"]  # the scores are shared
    step = cases.model_work("mamba2-2.7b", decode=True)
    assert all(value > 0 for value in roofline.least(step).values())


def test_points_of_modelled_results(tmp_path: Path) -> None:
    whole = results.load(modelled(tmp_path / "x.json"))
    assert whole.kind == "modelled"
    peaks = roofline.peaks_of(whole, None, None)
    assert peaks == roofline.PEAKS["b200"]
    points = roofline.points(whole, peaks)
    assert [p.key for p in points] == list(range(16)) and points[3].us == 18.0
    assert points[9].intensity == cases.suite_work(9).flops / cases.suite_work(9).compulsory_bytes
    assert "shared" in roofline.text(points).splitlines()[11]  # case 9: long, one row


def test_points_of_measured_results(tmp_path: Path) -> None:
    measured = gpu_result(mhz=1850.0)
    measured["cases"][1]["results"]["cute_ssd"]["median_us"] = None
    whole = results.load(written(tmp_path / "x.json", measured))
    peaks = roofline.peaks_of(whole, None, None)
    assert (peaks.label, peaks.mhz) == ("B200", 1850.0)
    assert [p.key for p in roofline.points(whole, peaks)] == [0, "mamba2-2.7b/prefill"]
    assert roofline.peaks_of(whole, "h100", 1000.0)[:3] == ("H100 SXM", 132, 1000.0)
    unknown = whole._replace(environment={"gpu": "GeForce"})
    with pytest.raises(ProfilingError, match="gpu is 'GeForce', expected one of a100, h100"):
        roofline.peaks_of(unknown, None, None)


def test_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "made" / "roof"
    assert roofline.main([modelled(tmp_path / "x.json"), "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith("cute_ssd, modelled, roofs of B200 at 1500 MHz\n\n| case ")
    assert out.with_suffix(".png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    picture = out.with_suffix(".svg").read_text()
    assert picture.lstrip().startswith("<?xml") and "</svg>" in picture
    assert roofline.main([written(tmp_path / "y.json", gpu_result()), "--out", str(out), "--json"]) == 0
    assert [p["key"] for p in json.loads(capsys.readouterr().out)["points"]] == [0, 1, "mamba2-2.7b/prefill"]


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = written(tmp_path / "x.json", {"cases": [{"case": "other", "modelled_us": 1.0}]})
    assert roofline.main([nothing, "--table"]) == 2
    assert "has no case with a time and sizes" in capsys.readouterr().err
    assert roofline.main([modelled(tmp_path / "y.json"), "--table", "--implementation", "torch"]) == 2
    assert "implementation is 'torch', expected one of" in capsys.readouterr().err
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert roofline.main([modelled(tmp_path / "y.json"), "--out", str(tmp_path / "z")]) == 2
    assert "matplotlib is not installed" in capsys.readouterr().err
    assert roofline.main([modelled(tmp_path / "y.json"), "--table"]) == 0
