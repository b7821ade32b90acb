"""profiling.bench, its timers and statistics, its baselines, and profiling.compare; on the CPU."""

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_ssd import reference, suite
from profiling import ProfilingError, baselines, bench, cases, compare, environment, results, timing

SMALL = ["--batch", "2", "--seqlen", "70", "--nheads", "4", "--headdim", "8", "--dstate", "16"]
QUICK = ["--device", "cpu", "--iterations", "3", "--warmup", "1", "--buffers", "2"]


def test_statistics() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [timing.percentile(values, f) for f in (0, 0.1, 0.5, 0.9, 1)] == pytest.approx([1, 1.4, 3, 4.6, 5])
    assert timing.summary(values) == timing.Timing(3.0, pytest.approx(1.4), pytest.approx(4.6), 5)
    assert timing.percentile([7.0], 0.9) == 7.0
    with pytest.raises(ProfilingError, match="No time was measured"):
        timing.percentile([], 0.5)


def test_scores() -> None:
    sol, baseline = suite.published()[0]
    assert (suite.score(sol, sol, baseline), suite.score(baseline, sol, baseline)) == (1.0, 0.5)
    assert suite.score(2 * baseline, sol, baseline) < 0.5
    # The figures that the suite publishes for the geometric means of its record and of its last entry.
    assert suite.score(48.5, 2.905, 683.75) == pytest.approx(0.937, abs=1e-3)
    assert suite.score(473.4, 2.905, 683.75) == pytest.approx(0.591, abs=1e-3)
    assert results.mean_score({0: sol, 1: None, "mamba2-2.7b": 3.0}) == pytest.approx(0.5)
    assert results.mean_score({"mamba2-2.7b": 3.0}) is None


def test_totals() -> None:
    rows = [results.Row(0, 10.0), results.Row(1, 40.0)]
    assert results.totals(rows)["total_us"] == 50.0
    assert results.totals(rows)["geomean_us"] == pytest.approx(20.0)
    failed = results.totals([*rows, results.Row(2, None)])
    assert failed["geomean_us"] is None and failed["total_us"] is None and (failed["score"] or 1) < 2 / 3
    assert results.totals([]) == {"total_us": None, "geomean_us": None, "score": None}


def trace(*calls: list[tuple[float, float]]) -> dict[str, Any]:
    """What torch's profiler exports of calls of these (start, duration) on the device, each behind a flush; what the
    host does comes 1000 µs before."""
    made: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}, {"ph": "X", "cat": "cpu_op", "ts": 1, "dur": 2}]
    correlation = 0
    for number, call in enumerate(calls):
        begin = 100.0 * number
        for inside, (start, length) in [(False, (begin + 1001, 3.0)), *((True, work) for work in call)]:
            correlation += 1
            at = begin + (11 if inside else 1)
            host, device = ("cuda_driver", "kernel") if inside else ("cuda_runtime", "gpu_memset")
            link = {"args": {"correlation": correlation}}
            made.append({"ph": "X", "cat": host, "name": "launch", "ts": at, "dur": 2, **link})
            made.append({"ph": "X", "cat": device, "name": "k", "ts": start, "dur": length, **link})
        made.append({"ph": "X", "cat": "user_annotation", "name": timing.RANGE, "ts": begin + 10, "dur": 20})
        made.append({"ph": "X", "cat": "gpu_user_annotation", "name": timing.RANGE, "ts": 0, "dur": 9999})
    return {"traceEvents": made}


def test_spans_of_a_trace() -> None:
    found = timing.spans(trace([(1010, 5), (1020, 2.5)], [(1105, 4)], []))
    assert found == [(12.5, 2), (4.0, 1)]  # the third call launched nothing, the flushes count for none
    untraced = trace([(1010, 5), (1020, 2.5)], [(1105, 4)])
    untraced["traceEvents"] = [e for e in untraced["traceEvents"] if e.get("cat") != "cuda_driver"]
    assert timing.spans(untraced) == [(12.5, 2), (4.0, 1)]
    assert timing.spans({}) == [] and timing.spans(trace([(5, 1)]), "other") == []


def test_torch_writes_such_a_trace(tmp_path: Path) -> None:
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu) as profiler, torch.profiler.record_function(timing.RANGE):
        torch.ones(3).add_(1)
    profiler.export_chrome_trace(str(tmp_path / "x.json"))
    events = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    (found,) = (e for e in events if e.get("cat") == "user_annotation" and e["name"] == timing.RANGE)
    assert found["ph"] == "X" and found["dur"] > 0 and "ts" in found


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_trace_without_device_times(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    with pytest.raises(ProfilingError, match=r"CUPTI gave device times of 0 of 3 calls, .* --timer events"):
        timing.cupti([lambda: called.append(0), lambda: called.append(1)], lambda: None, 3)
    assert called == [0, 1, 0]  # the sets of buffers in turn


@pytest.mark.parametrize(
    "work",
    [
        cases.suite_work(3),
        cases.model_work("falcon-h1-90m", seqlen=33),
        cases.model_work("mamba2-130m", dtype="fp32", batch=2, seqlen=5),
        cases.model_work("mamba2-130m", decode=True, batch=3),
    ],
    ids=lambda work: work.name,
)
def test_compulsory_bytes_are_those_of_the_tensors(work: cases.Work) -> None:
    given = cases.inputs(work)
    outputs = cases.call(work, given)
    tensors = [*given.values(), *([outputs] if isinstance(outputs, torch.Tensor) else outputs)]
    if work.function == "selective_state_update":
        tensors.append(given["state"])  # it is written as well
    assert sum(t.nbytes for t in tensors) == work.compulsory_bytes and work.flops > 0


def test_inputs_are_the_suite_s() -> None:
    mine, theirs = cases.inputs(cases.suite_work(3), seed=4), suite.inputs(suite.cases([3])[0], seed=4)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs) and mine.keys() == theirs.keys()
    step = torch.nn.functional.softplus(cases.inputs(cases.model_work("mamba2-130m", seqlen=9))["dt_bias"])
    assert step.min() > 0.00099 and step.max() < 0.101


@pytest.mark.parametrize("initial", [True, False])
def test_the_torch_baseline_is_right(initial: bool) -> None:
    work = cases.sized_work(batch=2, seqlen=300, nheads=4, headdim=8, ngroups=2, dstate=16)
    given = cases.inputs(work)
    D, states = given.pop("D"), given.pop("initial_states")
    wide = {name: t.double() for name, t in given.items()}
    if initial:
        given["initial_states"], wide["initial_states"] = states, states.double()
    y, final = baselines.chunked(**given, chunk_size=128)
    truth, last = reference.ssd_chunk_scan(**wide, dtype=torch.float64)
    assert D.shape == (4,)
    torch.testing.assert_close(y.double(), truth, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(final.double(), last, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "work",
    [
        cases.sized_work(seqlen=70, nheads=2, dstate=16),
        cases.model_work("falcon-h1-90m", seqlen=70),
        cases.model_work("falcon-h1-90m", decode=True, batch=2),
    ],
    ids=lambda work: work.function,
)
def test_the_torch_baseline_computes_the_same_call(work: cases.Work) -> None:
    theirs = baselines.IMPLEMENTATIONS["torch"].prepare(work, cases.inputs(work))()
    ours = cases.call(work, cases.inputs(work))
    for a, b in zip(*((t,) if isinstance(t, torch.Tensor) else t for t in (theirs, ours)), strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-2)


def test_what_a_baseline_does_not_take() -> None:
    prepare = baselines.IMPLEMENTATIONS["flashinfer"].prepare
    with pytest.raises(ProfilingError, match="headdim 80, dstate 128, bf16 and seqlen 4096, expected 64, 128, bf16"):
        prepare(cases.model_work("nemotron-nano-9b-v2"), {})
    with pytest.raises(ProfilingError, match="takes no decay for each token"):
        prepare(cases.sized_work(dstate=128), {})
    assert baselines.installed("mamba_ssm", "cpu") is not None and baselines.installed("torch", "cpu") is None


def test_a_run_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made" / "x.json"
    assert bench.main([*SMALL, *QUICK, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("CPU (") and "the times are not a GPU's" in shown and "torch µs" in shown
    whole = json.loads(out.read_text())
    assert (whole["kind"], whole["device"], whole["protocol"]["timer"]) == ("measured", "cpu", "host")
    assert {"commit", "python", "versions", "cute_ssd", "time"} <= whole["environment"].keys()
    (case,) = whole["cases"]
    assert case["case"] == "sizes/2x70x4x8x1x16" and case["results"].keys() == whole["totals"].keys() >= {
        "cute_ssd",
        "torch",
    }
    ours = case["results"]["cute_ssd"]
    assert 0 < ours["p10_us"] <= ours["median_us"] <= ours["p90_us"] and ours["iterations"] == 3
    assert whole["geomean_us"] == pytest.approx(ours["median_us"]) and whole["score"] is None
    (row,) = results.load(out).of("torch")
    assert row.us == case["results"]["torch"]["median_us"]


def test_a_suite_case_has_a_score(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--case", "3", *QUICK, "--baseline", "mamba_ssm", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    (case,) = whole["cases"]
    us = case["results"]["cute_ssd"]["median_us"]
    assert whole["score"] == case["results"]["cute_ssd"]["score"] == suite.score(us, *suite.published()[3])
    # What cannot run is in the result with its reason, and does not stop the others.
    assert "mamba_ssm" in case["results"]["mamba_ssm"]["message"] and case["results"]["mamba_ssm"]["score"] == 0
    assert "mamba_ssm: mamba_ssm" in bench.text(whole) and "(case 3)" in bench.text(whole)


def test_a_case_that_raises(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(work: cases.Work, given: dict[str, Any]) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setitem(baselines.IMPLEMENTATIONS, "cute_ssd", baselines.Implementation("cute_ssd", fail))
    assert bench.main([*SMALL, *QUICK]) == 1
    assert "cute_ssd: RuntimeError: out of memory (case sizes/2x70x4x8x1x16)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "device is cuda, but torch finds no CUDA device, expected an NVIDIA GPU"),
        (["--device", "cpu", "--timer", "cupti"], "timer is cupti on cpu, expected cupti or events on cuda"),
        (["--device", "cpu", "--iterations", "0"], "iterations is 0, expected 1 or more"),
        (["--device", "cpu", "--case", "99"], "case is 99, expected 0 to 15"),
    ],
)
def test_what_is_refused(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert bench.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def gpu_result(factor: float = 1.0, mhz: float = 1500.0) -> dict[str, Any]:
    """A result as a GPU gives it, of three cases."""
    made = []
    for number, us in ((0, 10.0), (1, 12.0), ("mamba2-2.7b/prefill", 50.0)):
        work = cases.suite_work(number) if isinstance(number, int) else cases.model_work("mamba2-2.7b", seqlen=2048)
        clocks = {"min_mhz": mhz, "max_mhz": mhz}
        one = {"median_us": us * factor, "p10_us": us * factor * 0.99, "p90_us": us * factor * 1.01, "clocks": clocks}
        described = work._asdict() | {"case": number, "flops": work.flops, "compulsory_bytes": work.compulsory_bytes}
        made.append(described | {"results": {"cute_ssd": one | {"message": ""}, "torch": one | {"message": ""}}})
    where = {"gpu": "NVIDIA B200", "arch": "sm_100", "driver": "580.1", "cuda": "13.0", "device": "cuda"}
    return {"kind": "measured", "device": "cuda", "environment": where, "cases": made}


def written(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_compare_flags_what_became_slower(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = gpu_result()
    slow, fast = (new["cases"][i]["results"]["cute_ssd"] for i in (0, 1))
    for name in ("median_us", "p10_us", "p90_us"):
        slow[name] *= 1.10
        fast[name] *= 0.90
    before, after = written(tmp_path / "a.json", gpu_result()), written(tmp_path / "b.json", new)
    assert compare.main([before, after]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "+10.0%" in lines[2] and "SLOWER" in lines[2] and "-10.0%" in lines[3] and "faster" in lines[3]
    assert "+0.0%" in lines[4] and "geomean of 3" in lines[5] and "score of 3" in lines[6]
    assert compare.main([before, after, "--threshold", "15"]) == 0
    assert compare.main([after, before, "--json"]) == 1
    shown = capsys.readouterr().out
    assert json.loads(shown[shown.index("{") :])["cases"][1]["verdict"] == "slower"
    assert compare.main([before, before]) == 0


def test_a_change_within_the_spread_is_none(tmp_path: Path) -> None:
    wide = [results.Row(0, 10.0, 8.0, 12.0)]
    assert compare.changes(wide, [results.Row(0, 11.5, 9.0, 14.0)], 0.03)[0].verdict == "same"
    assert compare.changes(wide, [results.Row(0, 13.5, 12.5, 14.0)], 0.03)[0].verdict == "slower"
    assert compare.changes([results.Row(0, 10.0)], [results.Row(0, 10.4)], 0.03)[0].verdict == "slower"
    assert compare.changes([results.Row(0, 10.0)], [results.Row(0, 10.2)], 0.03)[0].verdict == "same"


def test_cases_that_are_not_in_both() -> None:
    some, none = results.Row(0, 10.0), results.Row(0, None)

    def verdict(before: list[results.Row], after: list[results.Row]) -> tuple[str, bool]:
        found = compare.changes(before, after, 0.03)
        return found[0].verdict, compare.regressed(found)

    assert verdict([some], []) == ("missing", True)
    assert verdict([some], [none]) == ("failed", True)
    assert verdict([none], [none]) == ("failed", False)
    assert verdict([none], [some]) == verdict([], [some]) == ("new", False)


def test_compare_says_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = gpu_result(mhz=1900.0)
    other["environment"]["driver"] = "590.2"
    files = written(tmp_path / "a.json", gpu_result()), written(tmp_path / "b.json", other)
    assert compare.main([*files]) == 0
    shown = capsys.readouterr().out
    assert "Note: driver was 580.1, and is 590.2." in shown and "clock was 1500 MHz, and is 1900 MHz" in shown


def test_compare_takes_modelled_results_and_implementations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    modelled = {"cases": [{"case": 0, "modelled_us": 9.5, "binding": "shared", "bound_us": 1.3, "score": 0.97}]}
    files = [written(tmp_path / "a.json", modelled), written(tmp_path / "b.json", gpu_result())]
    assert compare.main(files) == 1
    assert "a.json is modelled and" in capsys.readouterr().out
    assert compare.main([files[1], files[1], "--against", "torch"]) == 0
    assert compare.main([files[1], files[1], "--against", "cuda"]) == 2
    assert "implementation is 'cuda', expected one of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not JSON"),
        ("[]", "has no cases"),
        ('{"cases": []}', "has no cases"),
        ('{"cases": [{"us": 1}]}', "has no cases"),
        ('{"cases": [{"case": 0}]}', "lacks a field of results (KeyError: 'results')"),
        ('{"cases": [{"case": 0, "modelled_us": "x"}]}', "lacks a field of results (ValueError"),
        ('{"cases": [{"case": 77, "modelled_us": 1.0}]}', "have no case with a time in both"),
    ],
)
def test_what_compare_cannot_read(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main([written(tmp_path / "a.json", gpu_result()), written(tmp_path / "b.json", content)]) == 2
    assert message in capsys.readouterr().err
    assert compare.main([str(tmp_path / "absent.json"), str(tmp_path / "a.json")]) == 2
    assert "There is no file" in capsys.readouterr().err


def test_the_headline_of_a_gpu() -> None:
    whole = gpu_result()
    whole["protocol"] = {"timer": "cupti", "iterations": 50, "buffers": 3, "l2_flush_bytes": 252 * 2**20}
    whole["totals"] = {
        name: results.totals(results.Row(c["case"], 10.0) for c in whole["cases"]) for name in ("cute_ssd",)
    }
    first = bench.text(copy.deepcopy(whole)).splitlines()[0]
    assert first == (
        "NVIDIA B200 (sm_100), driver 580.1, SM clock 1500 to 1500 MHz, cupti times of 50 calls, cold L2 (252 MiB "
        "written before each call), 3 sets of buffers"
    )


def test_nvidia_smi() -> None:
    line = "NVIDIA B200, 580.65.06, 1500, 1965, 3996, 41, 212.35, 0x0000000000000001\n"
    assert environment.parse_smi(line) == {
        "gpu": "NVIDIA B200",
        "driver": "580.65.06",
        "sm_mhz": 1500.0,
        "sm_max_mhz": 1965.0,
        "memory_mhz": 3996.0,
        "celsius": 41.0,
        "watts": 212.35,
        "throttle_reasons": "0x0000000000000001",
    }
    partly = environment.parse_smi("NVIDIA T4, 535.1, [N/A], 1590, [Not Supported], x, 9, [N/A]\nsecond GPU")
    assert (partly["sm_mhz"], partly["memory_mhz"], partly["celsius"], partly["watts"]) == (None, None, None, 9.0)
    assert environment.parse_smi("") == {} == environment.parse_smi("No devices were found")
    assert environment.Clocks("cpu").range() is None


def test_the_clock_is_read_while_the_gpu_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the reading takes."""
    calls = 0

    def work() -> None:
        nonlocal calls
        calls += 1

    clocks = environment.Clocks("cuda")
    seen = []

    def read() -> float:
        seen.append(calls)
        while calls < seen[0] + 100:  # comes back only if the calls go on
            time.sleep(0)
        return 1500.0

    monkeypatch.setattr(environment, "AT_WORK_SECONDS", 0.01)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr(clocks, "_read", read)
    clocks.sample(work)
    assert seen[0] > 0 and clocks.range() == {"min_mhz": 1500.0, "max_mhz": 1500.0}


def test_the_environment_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert environment.main([]) == 0
    assert json.loads(capsys.readouterr().out)["device"] == "cpu"
    assert environment.main(["--require-gpu"]) == 2
    assert "expected an NVIDIA GPU" in capsys.readouterr().err
