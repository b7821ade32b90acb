"""profiling.report and what it reads: stored reports in both of Nsight Compute's forms, whole, damaged and empty."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from profiling import ProfilingError, metrics, ncu_files, report

from .ncu_reports import B200, CASE, FIXTURES, SCAN, STATE, files, kernel, raw_csv


def test_the_stored_reports_are_those_that_are_generated() -> None:
    made = files()
    assert {path.name for path in FIXTURES.iterdir()} == set(made)
    for name, content in made.items():
        assert (FIXTURES / name).read_bytes() == content, name


@pytest.mark.parametrize("form", ["csv", "ncu-rep"])
def test_both_forms_give_the_same_kernels(form: str) -> None:
    if form == "ncu-rep":
        pytest.importorskip("ncu_report")
    state, scan = ncu_files.read(FIXTURES / f"b200.{form}")
    assert (state.name, scan.name) == (STATE, SCAN)
    assert (state.number, scan.number) == (0, 1)
    assert (state.grid, scan.block) == ("(64, 1, 1)", "(512, 1, 1)")
    assert state.metrics[metrics.TIME] == pytest.approx(5.12e-6)
    assert state.metrics[metrics.DRAM_READ] == pytest.approx(12_400_000)
    assert scan.metrics[metrics.CLOCK] == pytest.approx(1.5e9)
    assert scan.metrics[metrics.TENSOR_WAVEFRONTS] == 1_100_000
    assert scan.metrics["lts__t_sector_hit_rate.pct"] == pytest.approx(61.25)


def test_output_of_the_program_and_unknown_values_are_passed_over() -> None:
    (only,) = ncu_files.read(FIXTURES / "h100.csv")
    assert only.metrics[metrics.TIME] == pytest.approx(1234.5e-6)
    assert only.metrics[metrics.DRAM] == 600_000_000
    assert metrics.TMA_BYTES[1] not in only.metrics


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("damaged.csv", "is damaged: kernel '1' has 15 of 46 cells, expected all; write it again"),
        ("no_units.csv", "has no line of units below its header"),
        ("no_kernel.csv", "has no kernel, expected one at least"),
        ("details.csv", "is ncu's details page, expected the raw page"),
        ("empty.csv", "has no header of ncu's raw page"),
        ("absent.csv", "There is no file"),
        ("damaged.ncu-rep", "is damaged or has no kernel, expected one at least; profile again"),
        ("empty.ncu-rep", "is damaged or has no kernel, expected one at least; profile again"),
    ],
)
def test_what_cannot_be_read(name: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    if name.endswith("ncu-rep"):
        pytest.importorskip("ncu_report")
    assert report.main([str(FIXTURES / name)]) == 2
    out, err = capfd.readouterr()
    assert out == "" and message in err and "Traceback" not in err


class Metric:
    """A metric as ncu_report gives it."""

    def __init__(self, value: Any, unit: str) -> None:
        self._value, self._unit = value, unit

    def value(self) -> Any:
        return self._value

    def unit(self) -> str:
        return self._unit


class Action:
    """A kernel as ncu_report gives it."""

    def __init__(self, name: str, found: dict[str, Metric]) -> None:
        self._name, self._found = name, found

    def name(self) -> str:
        return self._name

    def metric_names(self) -> list[str]:
        return list(self._found)

    def metric_by_name(self, name: str) -> Metric:
        return self._found[name]


def test_a_context_of_several_ranges(tmp_path: Path) -> None:
    found = {
        metrics.TIME: Metric(2500.0, "ns"),
        "launch__grid_size": Metric(7, ""),
        "device__attribute_display_name": Metric("NVIDIA B200", ""),
        "launch__uses_green_context": Metric(None, ""),
        **{f"launch__grid_dim_{axis}": Metric(size, "") for axis, size in zip("xyz", (7, 1, 1), strict=True)},
    }
    context = [[Action("one", found)], [], [Action("two", {metrics.DRAM: Metric(3, "Kbyte")})]]
    one, two = ncu_files.read_report(tmp_path / "x.ncu-rep", lambda path: context)
    assert (one.name, one.grid, one.block) == ("one", "(7, 1, 1)", "")
    assert one.metrics[metrics.TIME] == pytest.approx(2.5e-6) and "device__attribute_display_name" not in one.metrics
    assert (two.number, two.metrics) == (1, {metrics.DRAM: 3000.0})


def test_a_report_that_the_reader_refuses(tmp_path: Path) -> None:
    def refuse(path: str) -> Any:
        raise RuntimeError("bad magic")

    with pytest.raises(ProfilingError, match=r"cannot be read \(bad magic\), expected a report of ncu"):
        ncu_files.read_report(tmp_path / "x.ncu-rep", refuse)
    with pytest.raises(ProfilingError, match="is damaged or has no kernel"):
        ncu_files.read_report(tmp_path / "x.ncu-rep", lambda path: [])


def test_without_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ncu_report", None)
    with pytest.raises(ProfilingError, match="needs the package ncu-report, which is not installed"):
        ncu_files.read(FIXTURES / "b200.ncu-rep")


@pytest.mark.parametrize(
    ("unit", "factor"),
    [
        ("ns", 1e-9),
        ("usecond", 1e-6),
        ("ms", 1e-3),
        ("byte", 1),
        ("Kbyte", 1e3),
        ("Gbyte/s", 1e9),
        ("Tbyte/second", 1e12),
        ("cycle/nsecond", 1e9),
        ("Ghz", 1e9),
        ("%", 1),
        ("", 1),
        ("register/thread", 1),
    ],
)
def test_units(unit: str, factor: float) -> None:
    assert ncu_files.scale(unit) == pytest.approx(factor)


def test_numbers() -> None:
    assert [ncu_files.number(c) for c in ("1,234,567.5", "12", "n/a", "", "(1, 1, 1)")] == [
        1234567.5,
        12,
        None,
        None,
        None,
    ]


def test_speed_of_light_of_each_resource() -> None:
    state, scan = (report.analyse(k) for k in ncu_files.read(FIXTURES / "b200.csv"))
    assert scan["percent"]["HBM"] == 31.5 and scan["percent"]["issue"] == 37.25
    assert state["percent"]["tensor"] == 41.0 and scan["percent"]["tensor"] == 52.5  # the busier of the two pipes
    # Shared memory is one port: operands of tensor instructions, loads and stores, and copies go through it.
    assert scan["shared_wavefronts"] == {"tensor": 1_100_000, "lsu": 300_000, "tma": 25_200_000 / 128}
    assert scan["percent"]["shared"] == pytest.approx(100 * (1_400_000 + 196_875) / (9.6 * 1500 * 148))
    assert (scan["binding"], scan["flags"]) == ("shared", [])
    assert state["binding"] == "latency (shared)"
    assert state["flags"] == [
        "no resource above 60 %: latency, synchronisation or too few CTAs",
        "64 CTAs on 148 SMs",
    ]
    assert (state["tcgen05"], scan["tcgen05"]) == (8192, 20480)


def test_what_a_report_lacks_is_no_claim() -> None:
    (one,) = ncu_files.read_csv(raw_csv([kernel("k", 500, 3.0, 1000, 100, {"L2": 40.0, "MUFU": 1.0})], "8.6"), "x")
    row = report.analyse(one)
    assert row["binding"] == "unknown (L2 40 %)"
    assert row["flags"] == ["not in the report: HBM, shared, tensor, FMA, ALU, issue"]
    assert (row["dram_bytes"], row["tcgen05"], row["percent"]["shared"]) == (None, None, None)


def test_more_than_all_is_flagged() -> None:
    percent = dict.fromkeys(metrics.PERCENT, 20.0) | {"HBM": 103.0}
    busy = kernel("k", 500, 3.0, 1000, 100, percent, **{metrics.LSU_WAVEFRONTS: 1})
    row = report.analyse(ncu_files.read_csv(raw_csv([busy], "8.0"), "x")[0])
    assert row["binding"] == "HBM" and "HBM above 100 %" in row["flags"][0]


def test_a_report_without_any_resource() -> None:
    empty = ncu_files.Kernel(0, "k", "", "", {"launch__grid_size": 3.0})
    with pytest.raises(ProfilingError, match="neither times nor metrics of a resource"):
        report.whole([empty], None)


def test_against_what_the_case_had_to_move() -> None:
    kernels = ncu_files.read(FIXTURES / "b200.csv")
    found = report.whole(kernels, CASE)
    sums = found["sums"]
    assert sums["time_us"] == pytest.approx(14.72) and sums["dram_bytes"] == pytest.approx(37.5e6)
    assert sums["bytes_over_compulsory"] == pytest.approx(37.5e6 / 22_151_200)
    assert (sums["tcgen05"], sums["tcgen05_planned"]) == (28_672, 28_672)
    assert found["flags"] == ["1.69 times the compulsory bytes came from or went to HBM"]
    twice = report.whole(kernels + kernels, CASE | {"repeat": 2, "tcgen05": 100, "compulsory_bytes": 37_000_000})
    assert twice["sums"]["kernels_per_call"] == 2 and twice["sums"]["time_us"] == pytest.approx(14.72)
    assert twice["flags"] == ["28672 tcgen05.mma were executed, the plan says 100"]


def test_forms_of_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = tmp_path / "made" / "b200"
    assert report.main([str(FIXTURES / "b200.csv"), "--out", str(prefix)]) == 0
    shown = capsys.readouterr().out
    assert prefix.with_suffix(".md").read_text() == shown
    lines = shown.splitlines()
    assert lines[0] == "suite/9, cute_ssd: chunked"
    assert lines[2].split("|")[1].strip() == "kernel" and "shared %" in lines[2]
    assert " 74.9 " in lines[5] and lines[5].rstrip(" |").endswith("shared")
    assert "37.50 MB to and from HBM against 22.15 MB compulsory (1.69 x), 28672 tcgen05.mma against 28672" in shown
    whole = json.loads(prefix.with_suffix(".json").read_text())
    assert whole["case"] == CASE and [k["kernel"] for k in whole["kernels"]] == [STATE, SCAN]
    with prefix.with_suffix(".csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["kernel"] for row in rows] == [STATE, SCAN]
    assert float(rows[1]["shared_percent"]) == pytest.approx(74.93, abs=0.01) and rows[1]["binding"] == "shared"
    assert report.main([str(FIXTURES / "b200.csv"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == whole


def test_a_case_file_of_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content in ("{}", "[1]", "not JSON"):
        (tmp_path / "x.json").write_text(content)
        assert report.main([str(FIXTURES / "b200.csv"), "--case-file", str(tmp_path / "x.json")]) == 2
        assert "does not describe a case" in capsys.readouterr().err


def test_the_fixtures_have_only_metrics_that_are_asked_for() -> None:
    asked = set(metrics.metrics("sm_100a"))
    for invented in B200:
        known = {name for name in invented.counts if not name.startswith(("launch__", "device__"))}
        assert known <= asked, known - asked
