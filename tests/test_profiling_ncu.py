"""profiling.run_case and profiling.ncu_profile: the range, the command, and what is said where it cannot run."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import nvtx
import pytest

import cute_ssd
from cute_ssd import asked, plan
from profiling import ProfilingError, baselines, cases, chip_metrics, metrics, ncu_profile, run_case

from .ncu_reports import FIXTURES


def test_metrics_of_each_architecture() -> None:
    assert metrics.metrics("sm_100a") == metrics.metrics("sm_103a")
    blackwell, hopper, ampere = (set(metrics.metrics(arch)) for arch in ("sm_100a", "sm_90a", "sm_80"))
    assert metrics.TENSOR_WAVEFRONTS in blackwell and metrics.TENSOR_WAVEFRONTS not in hopper | ampere
    assert set(metrics.TMA_BYTES) < hopper and not set(metrics.TMA_BYTES) & ampere
    for arch in metrics.CHIPS:
        asked = metrics.metrics(arch)
        assert len(set(asked)) == len(asked)
        assert {names[0] for names in metrics.PERCENT.values()} < set(asked) and metrics.SM_CYCLES in asked
    with pytest.raises(ProfilingError, match="arch is 'sm_70', expected one of sm_80, "):
        metrics.metrics("sm_70")


def test_what_the_design_asks_for() -> None:
    """sm100_performance.md, §4. `..._utcmma_matrix_b` is two counters, by CTA group."""
    wavefronts = "l1tex__data_pipe_tc_wavefronts_mem_shared_op_utcmma_matrix"
    sectors = "l1tex__m_xbar2l1tex_read_sectors_mem_global_op_tma_ld"
    elapsed, active = "avg.pct_of_peak_sustained_elapsed", "avg.pct_of_peak_sustained_active"
    stalls = ("long_scoreboard", "short_scoreboard", "barrier", "math_pipe_throttle", "wait", "membar")
    named = {
        *("gpu__time_duration.sum", "sm__cycles_elapsed.avg", "sm__cycles_elapsed.avg.per_second"),
        *(f"sm__throughput.{elapsed}", f"gpu__compute_memory_throughput.{elapsed}"),
        *(f"sm__pipe_{pipe}_cycles_active.{elapsed}" for pipe in ("tc", "tensor")),
        f"sm__mem_tensor_cycles_active.{elapsed}",
        *(f"sm__inst_executed_pipe_{pipe}.sum" for pipe in ("tc", "tensor", "tmem")),
        *("sm__mem_tensor_reads_op_ldt.sum", "sm__mem_tensor_reads_op_utcmma_matrix_c.sum"),
        *(f"{wavefronts}_{operand}.sum" for operand in ("a", "b_scope_1cta", "b_scope_2cta")),
        *(f"l1tex__data_pipe_lsu_wavefronts_mem_shared_op_{op}.sum" for op in ("ld", "st")),
        *(f"l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_{op}.sum" for op in ("ld", "st")),
        *(
            f"sm__inst_executed_pipe_{pipe}.{form}"
            for pipe in ("xu", "alu", "fma", "fmaheavy", "fmalite", "lsu", "uniform")
            for form in (active, "sum")
        ),
        *(f"sm__inst_issued.{active}", f"smsp__issue_active.{active}"),
        *("dram__bytes_read.sum", "dram__bytes_write.sum", f"dram__throughput.{elapsed}"),
        *("lts__t_bytes.sum", "lts__t_sector_hit_rate.pct", f"{sectors}.sum", f"{sectors}_dest_multicast.sum"),
        *(f"smsp__average_warp_latency_issue_stalled_{reason}.ratio" for reason in stalls),
    }
    assert not named - set(metrics.metrics("sm_100a"))
    memory = [f"MemoryWorkloadAnalysis{part}" for part in ("", "_Chart", "_Tables")]
    sections = {"SpeedOfLight", "SpeedOfLight_RooflineChart", "ComputeWorkloadAnalysis", *memory, "LaunchStats"}
    assert {*metrics.SECTIONS, metrics.SOURCE_SECTION} == {*sections, "Occupancy", "WarpStateStats", "SourceCounters"}


def test_nvidia_knows_every_metric(capsys: pytest.CaptureFixture[str]) -> None:
    if chip_metrics.library() is None:
        pytest.skip("no package with libnvperf_host.so is installed")
    assert chip_metrics.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(metrics.CHIPS) and all(line.endswith("metrics") for line in lines)
    # The check would find one that does not exist.
    chips = chip_metrics.Chips(chip_metrics.library() or Path())
    assert chip_metrics.unknown("sm_100a", chips.names("GH100")) != []
    assert chip_metrics.main(["X1"]) == 2


def test_one_call_in_a_range(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    order: list[str] = []

    class Range:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            order.append(f"<{self.name}>")

        def __exit__(self, *_: Any) -> None:
            order.append(f"</{self.name}>")

    original = cases.call
    monkeypatch.setattr(nvtx, "annotate", Range)
    monkeypatch.setattr(baselines, "call", lambda *given: order.append("call") or original(*given))
    monkeypatch.setattr(run_case, "describe", lambda work, arguments, device: {"backend": "cpu"})
    described = tmp_path / "case.json"
    sizes = ["--batch", "2", "--seqlen", "70", "--nheads", "4", "--headdim", "8", "--dstate", "16"]
    options = ["--device", "cpu", "--warmup", "2", "--repeat", "2", "--describe", str(described)]
    assert run_case.main([*sizes, *options]) == 0
    assert order == ["call", "call", "<ssd>", "call", "</ssd>", "<ssd>", "call", "</ssd>"]
    assert capsys.readouterr().out == "sizes/2x70x4x8x1x16: 2 x cute_ssd on cpu, cpu\n"


@pytest.mark.parametrize(
    "what",
    [
        ["--case", "3"],
        ["--model", "falcon-h1-90m", "--seqlen", "64"],
        ["--model", "falcon-h1-90m", "--decode", "--batch", "2"],
    ],
)
def test_the_description_is_what_report_compares_with(what: list[str], tmp_path: Path) -> None:
    path = tmp_path / "x.case.json"
    assert run_case.main([*what, "--device", "cpu", "--warmup", "0", "--describe", str(path)]) == 0
    (work,) = cases.selected(run_case.parser().parse_args(what))
    described = json.loads(path.read_text())
    assert described["compulsory_bytes"] == work.compulsory_bytes and described["case"] == work.key
    assert (described["repeat"], described["backend"], described["tcgen05"]) == (1, "cpu", None)
    from profiling import report

    assert report.main([str(FIXTURES / "b200.csv"), "--case-file", str(path)]) == 0


@pytest.mark.parametrize(
    ("sizes", "heads"),
    [
        ({"seqlen": 149}, None),
        ({"seqlen": 301, "batch": 2, "nheads": 8, "ngroups": 2, "dstate": 128}, 4),
        ({"seqlen": 129, "batch": 3, "nheads": 6, "ngroups": 2, "dstate": 256}, 1),
    ],
)
def test_the_plan_s_count_is_what_is_executed(
    sizes: dict[str, int], heads: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without --emulate the description has the plan's number; `heads`: of a work item."""
    pytest.importorskip("cutlass")
    monkeypatch.setattr(asked, "_ASKED", {})
    if heads is not None:
        monkeypatch.setattr(plan, "_heads_of_an_item", lambda problem, device: heads)
    path = tmp_path / "x.case.json"
    words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    with cute_ssd.emulate("sm_100a", sanitize=False) as report:
        assert run_case.main([*words, "--device", "cpu", "--warmup", "0", "--describe", str(path)]) == 0
    described = json.loads(path.read_text())
    assert described["backend"] == "chunked"
    assert described["tcgen05"] == sum(launch.instructions.get(run_case.MMA, 0) for launch in report.launches) > 0


def test_counts_of_the_emulator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.case.json"
    sizes = ["--seqlen", "3", "--nheads", "1", "--headdim", "8", "--dstate", "16"]
    assert run_case.main([*sizes, "--emulate", "sm_80", "--describe", str(path)]) == 0
    assert capsys.readouterr().out == "sizes/1x3x1x8x1x16: 1 x cute_ssd on sm_80, recurrence\n"
    described = json.loads(path.read_text())
    assert (described["tcgen05"], described["repeat"], described["backend"]) == (0, 1, "recurrence")
    assert run_case.main([*sizes, "--emulate", "sm_1"]) == 2
    assert "arch is 'sm_1', expected" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case", "3"], "device is cuda, but torch finds no CUDA device, expected an NVIDIA GPU"),
        (["--device", "cpu"], "16 cases are asked for, expected one"),
        (["--device", "cpu", "--case", "16"], "case is 16, expected 0 to 15"),
        (["--device", "cpu", "--model", "gpt"], "model is 'gpt', expected one of mamba2-130m"),
        (["--device", "cpu", "--seqlen", "0"], "seqlen is 0, expected a positive number"),
        (["--device", "cpu", "--case", "1", "--seqlen", "9"], "--case and sizes are both given"),
        (["--device", "cpu", "--decode"], "given without --model, expected a model"),
        (["--device", "cpu", "--model", "mamba2-130m", "--nheads", "3"], "nheads is 3, expected that of the model"),
        (["--device", "cpu", "--model", "mamba2-130m", "--decode", "--seqlen", "3"], "expected 1 for a decode step"),
        (["--device", "cpu", "--ngroups", "3"], "nheads is 16, expected a multiple of ngroups 3"),
        (["--device", "cpu", "--case", "3", "--repeat", "0"], "repeat is 0 and warmup 3, expected 1 and 0 or more"),
        (
            ["--device", "cpu", "--case", "3", "--implementation", "mamba_ssm"],
            "implementation is mamba_ssm, but mamba_ssm",
        ),
    ],
)
def test_requests_that_cannot_be_met(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "cuda" in message and __import__("torch").cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert run_case.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "c9"
    assert ncu_profile.main(["--case", "9", "--arch", "sm_100a", "--dry-run", "--out", str(out), "--repeat", "2"]) == 0
    profile, export = capsys.readouterr().out.splitlines()
    words = shlex.split(profile)
    assert words[0] == "ncu"
    assert [words[i + 1] for i, word in enumerate(words) if word == "--section"] == list(metrics.SECTIONS)
    assert "--set" not in words
    for option, value in (
        ("--nvtx-include", "ssd/"),
        ("--clock-control", "none"),
        ("--cache-control", "all"),
        ("--replay-mode", "kernel"),
        ("--export", str(out)),
        ("--metrics", ",".join(metrics.metrics("sm_100a"))),
    ):
        assert words[words.index(option) + 1] == value
    program = words[words.index(sys.executable) :]
    assert program[1:] == ["-m", "profiling.run_case", "--case", "9", "--repeat", "2", "--describe", f"{out}.case.json"]
    assert export == f"ncu --import {out}.ncu-rep --page raw --csv > {out}.csv"
    assert not list(tmp_path.iterdir())


def test_stalls_by_instruction_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for options, times in (([], 0), (["--source"], 1)):
        assert ncu_profile.main(["--case", "9", "--arch", "sm_100a", "--dry-run", *options]) == 0
        assert capsys.readouterr().out.count("--section SourceCounters") == times


def test_a_dry_run_states_the_clock_control(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "bamba-9b", "--arch", "sm_90a", "--dry-run", "--clock-control", "base", "--ncu", "/x/ncu"]
    assert ncu_profile.main(arguments) == 0
    profile = capsys.readouterr().out.splitlines()[0]
    assert profile.startswith("/x/ncu ") and "--clock-control base" in profile and "pipe_tc_cycles" not in profile


def test_without_ncu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["--case", "3", "--arch", "sm_100a", "--out", str(tmp_path / "x"), "--ncu", "no-such-ncu"]
    assert ncu_profile.main(arguments) == 2
    assert "ncu is 'no-such-ncu', which is not on PATH, expected Nsight Compute's" in capsys.readouterr().err


def test_without_an_architecture(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert ncu_profile.main(["--case", "3", "--dry-run"]) == 2
    assert "arch is not given and torch finds no CUDA device" in capsys.readouterr().err


def fake_ncu(tmp_path: Path, says: str, code: int) -> str:
    """A program that takes ncu's two commands: profiling says `says`, import prints the stored CSV."""
    program = tmp_path / "ncu"
    program.write_text(
        f'#!/bin/sh\nif [ "$1" = --import ]; then cat {FIXTURES / "b200.csv"}; exit 0; fi\n'
        f'printf "%s\\n" "{says}" >&2; exit {code}\n'
    )
    program.chmod(0o755)
    return str(program)


def test_from_profile_to_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ncu = fake_ncu(tmp_path, "==PROF== Profiling kernel_cutlass: 0%....50%....100% - 9 passes", 0)
    out = tmp_path / "deep" / "c9"
    assert ncu_profile.main(["--case", "9", "--arch", "sm_100", "--out", str(out), "--ncu", ncu]) == 0
    shown = capsys.readouterr()
    assert "9 passes" in shown.err and "clock control none" in shown.err
    assert " 74.9 " in shown.out and (out.parent / "c9.csv").read_bytes() == (FIXTURES / "b200.csv").read_bytes()


@pytest.mark.parametrize(
    ("says", "code", "message"),
    [
        (
            "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters",
            1,
            "ncu may not read the GPU's performance counters (ERR_NVGPUCTRPERM), expected permission; run it as root",
        ),
        ("==WARNING== No kernels were profiled.", 0, "ncu profiled no kernel, expected those in the NVTX range 'ssd/'"),
        (
            "==ERROR== Profiling failed because a driver resource was unavailable. Ensure that no other tool",
            1,
            "Another profiler holds the GPU's counters",
        ),
        ("==ERROR== Failed to find metric sm__x.sum", 1, "ncu does not know the metric sm__x.sum, expected those"),
        ("==ERROR== something else", 9, "ncu ended with exit code 9, expected 0: ==ERROR== something else"),
        ("", 3, "ncu ended with exit code 3, expected 0: no output"),
    ],
)
def test_what_ncu_says_is_explained(
    says: str, code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ncu = fake_ncu(tmp_path, says, code)
    assert ncu_profile.main(["--case", "3", "--arch", "sm_100a", "--out", str(tmp_path / "x"), "--ncu", ncu]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "x.csv").exists()
