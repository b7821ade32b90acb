"""The command line: each command, in process and as a user starts it."""

import csv
import io
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import cute_ssd
from cute_ssd import bench, info, models, suite
from cute_ssd import compile as compiler
from cute_ssd.__main__ import FUNCTIONS, main

ROOT = Path(__file__).parent.parent


def started(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m cute_ssd` in a process of its own."""
    command = [sys.executable, "-m", "cute_ssd", *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)


@pytest.fixture
def short_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite with sequences of at most 20 tokens and two rows."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # what `check` sets where it is unset, so that it leaves nothing
    full = suite.cases

    def short(numbers: list[int] | None = None) -> list[suite.Case]:
        return [c._replace(batch=min(c.batch, 2), seqlen=c.seqlen % 17 + 4) for c in full(numbers)]

    monkeypatch.setattr(suite, "cases", short)


def wrong(**kwargs: Any) -> Any:
    y, states = cute_ssd.ssd_chunk_scan(**kwargs)
    return y + (kwargs["x"].shape[1] == 8), states


@pytest.mark.usefixtures("short_suite")
def test_check_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0
    captured = capsys.readouterr()
    header, *rows, summary = captured.out.splitlines()
    assert header.split() == ["case", "batch", "seqlen", "device", "time", "max", "error", "matched", "result"]
    assert [row.split()[0] for row in rows] == [str(n) for n in range(16)]
    assert all(row.split()[3] == "cpu" and row.endswith("pass") for row in rows)
    assert summary == "16 of 16 cases passed on cpu"
    assert captured.err == ""  # no progress bar: stderr is not a terminal


@pytest.mark.usefixtures("short_suite")
def test_check_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--json", "--case", "3", "--case", "10", "--seed", "4"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] == 2 and report["device"] == "cpu"
    assert [c["case"] for c in report["cases"]] == [3, 10]
    first = report["cases"][0]
    assert {"case", "batch", "seqlen", "device", "us", "max_error", "matched", "pass"} <= set(first)
    assert first["pass"] is True and first["us"] > 0 and first["matched"] >= 0.99


@pytest.mark.usefixtures("short_suite")
def test_check_csv(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--csv", "--case", "0", "--case", "12"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["case"] for row in rows] == ["0", "12"] and {row["pass"] for row in rows} == {"True"}
    assert list(rows[0])[:8] == ["case", "batch", "seqlen", "device", "us", "max_error", "matched", "pass"]


@pytest.mark.usefixtures("short_suite")
@pytest.mark.parametrize("form", ["", "--json", "--csv"])
def test_check_fails_on_a_wrong_backend(
    form: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of cases 0 and 3 only the first, shortened to 8 tokens, is wrong."""
    monkeypatch.setattr(suite, "ssd_chunk_scan", wrong)
    assert main(["check", "--case", "0", "--case", "3", *filter(None, [form])]) == 1
    out = capsys.readouterr().out
    if form == "--json":
        assert [c["pass"] for c in json.loads(out)["cases"]] == [False, True]
    elif form == "--csv":
        assert [row["pass"] for row in csv.DictReader(io.StringIO(out))] == ["False", "True"]
    else:
        assert "FAIL" in out and out.endswith("1 of 2 cases passed on cpu\n")


@pytest.mark.usefixtures("short_suite")
def test_check_reports_a_backend_that_raises(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(**kwargs: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(suite, "ssd_chunk_scan", broken)
    assert main(["check", "--json", "--case", "0"]) == 1
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    assert case["pass"] is False and case["us"] is None and case["message"] == "RuntimeError: out of luck"
    assert main(["check", "--case", "0"]) == 1
    assert "FAIL  RuntimeError: out of luck" in capsys.readouterr().out


@pytest.mark.usefixtures("short_suite")
def test_check_json_has_no_nan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(suite, "ssd_chunk_scan", lambda **kw: [t * float("nan") for t in cute_ssd.ssd_chunk_scan(**kw)])
    assert main(["check", "--json", "--case", "0"]) == 1
    (case,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["cases"]
    assert case["max_error"] is None and case["matched"] == 0 and case["pass"] is False


@pytest.mark.usefixtures("short_suite")
def test_check_on_the_emulator(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The kernels' own numbers; there is no time to show. `--sanitize` and the seed reach the emulator."""
    pytest.importorskip("cutlass")
    sessions = []
    real = suite.emulate
    monkeypatch.setattr(suite, "emulate", lambda arch, **how: sessions.append((arch, how)) or real(arch, **how))
    assert main(["check", "--emulate", "--sanitize", "--seed", "1", "--case", "3", "--case", "8"]) == 0
    _, *rows, summary = capsys.readouterr().out.splitlines()
    assert [row.split()[3:5] for row in rows] == [["sm_100a", "-"]] * 2 and all(row.endswith("pass") for row in rows)
    assert summary == "2 of 2 cases passed on sm_100a"
    assert sessions == [("sm_100a", {"seed": 1, "sanitize": True})] * 2
    assert main(["check", "--emulate", "--arch", "cpu"]) == 2
    assert "arch is 'cpu', expected a GPU architecture" in capsys.readouterr().err
    assert main(["check", "--emulate", "--arch", "sm_1"]) == 2


@pytest.mark.usefixtures("short_suite")
def test_check_says_which_device_it_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suite, "best_device", lambda: ("cpu", "A GPU is not used: no kernel."))
    assert main(["check", "--case", "0"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "A GPU is not used: no kernel.\n" and "on cpu" in captured.out


@pytest.mark.usefixtures("short_suite")
def test_check_refuses_what_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--case", "99"]) == 2
    assert "case is 99, expected 0 to 15" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["check", "--device", "cuda"]) == 2
    assert capsys.readouterr().err == "device is cuda, but torch finds no CUDA device; pass --device cpu.\n"


@pytest.mark.parametrize("given", [["--arch", "sm_90a", "--sanitize"], ["--arch", "sm_100a"], ["--sanitize"]])
def test_check_takes_options_of_the_emulator_with_it_only(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--device", "cpu"]):
        assert main(["check", *given, *more]) == 2
        captured = capsys.readouterr()
        assert captured.err == f"{given[0]} is of the emulated GPU, but --emulate is not given; add --emulate.\n"
        assert not captured.out


def test_check_as_a_user_starts_it() -> None:
    done = started("check", "--case", "3", "--json")
    assert done.returncode == 0 and done.stderr == ""
    (case,) = json.loads(done.stdout)["cases"]
    assert case["pass"] and (case["batch"], case["seqlen"]) == (1, 256) and case["matched"] > 0.9999


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["cute_ssd"] == cute_ssd.__version__
    assert described["packages"]["torch"] == {"version": torch.__version__, "status": "ok"}
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    needed = {distribution for _, distribution, needed in info.PACKAGES if needed}
    assert needed == {re.split(r"[^\w-]", requirement)[0] for requirement in declared} <= set(described["packages"])
    cpu = described["backends"][0]
    assert cpu["device"] == "cpu" and cpu["status"] == "ok" and f"{torch.get_num_threads()} threads" in cpu["name"]


@pytest.fixture
def no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares the seconds that importing each package in a process of its own takes."""
    monkeypatch.setattr(info, "PACKAGES", [("json", distribution, needed) for _, distribution, needed in info.PACKAGES])


@pytest.mark.usefixtures("no_packages")
def test_info_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"cute_ssd {cute_ssd.__version__} on Python 3.")
    assert "OMP_NUM_THREADS = 2" in out and "CUDA_VISIBLE_DEVICES = unset" in out


@pytest.mark.usefixtures("no_packages")
def test_info_lists_each_gpu_and_why_it_is_not_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, device.index))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"GPU {device}")
    assert main(["info", "--json"]) == 0
    _, first, second = json.loads(capsys.readouterr().out)["backends"]
    assert first["name"] == "GPU 0" and first["status"] == "ok"
    assert second["device"] == "cuda:1" and "(sm_101a)" in second["status"]


@pytest.mark.parametrize("module, distribution", [("cutlass", "nvidia-cutlass-dsl"), ("tvm_ffi", "apache-tvm-ffi")])
def test_info_does_not_promise_a_gpu_without_what_launches(
    module: str, distribution: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    others = [("json", name, needed) for _, name, needed in info.PACKAGES if name != distribution]
    monkeypatch.setattr(info, "PACKAGES", [*others, ("json.no_such_module", distribution, True)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA B200")
    assert main(["info", "--json"]) == 0
    cpu, gpu = json.loads(capsys.readouterr().out)["backends"]
    assert cpu["status"] == "ok"
    assert gpu["status"].startswith(f"unavailable: {distribution} is broken: ModuleNotFoundError")
    monkeypatch.setitem(sys.modules, module, None)
    device, note = suite.best_device()
    assert device == "cpu" and note.startswith(
        f"NVIDIA B200 is not used: {distribution} is broken: ModuleNotFoundError"
    )


def test_the_environment_that_is_read() -> None:
    """What the sources read is what `info` shows and the README lists; the rest of both is torch's."""
    read = set()
    for source in (ROOT / "cute_ssd").rglob("*"):
        if source.suffix in (".py", ".c", ".h", ".cpp"):
            text = source.read_text()
            names = re.findall(r"(?:environ\.\w+\(|environ\[|getenv\()\s*[\"'](\w+)[\"']", text)
            # Without a name: info shows its own list, and compile.py takes what the CuTe DSL reads into its key.
            nameless = len(re.findall(r"environ\.(?:get\(name\)|items\(\))", text))
            assert len(names) + nameless == len(re.findall(r"environ\b[.\[]|getenv\(", text)), source
            read |= set(names)
    section = (ROOT / "README.md").read_text().split("## Environment variables")[1]
    assert {"XDG_CACHE_HOME", "CC"} <= read <= set(info.ENVIRONMENT)
    assert set(re.findall(r"`([A-Z]+(?:_[A-Z]+)*)(?:=\w+)?`", section)) == set(info.ENVIRONMENT)


def test_info_works_with_broken_parts(tmp_path: Path) -> None:
    """One part that raises and one that takes its process with it, found before the installed ones."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.path.insert(0, {str(tmp_path)!r})")
    (tmp_path / "torch.py").write_text("raise ImportError('library gone')")
    (tmp_path / "cutlass.py").write_text("import os; os.abort()")
    done = started("info", "--json", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0
    described = json.loads(done.stdout)
    packages = described["packages"]
    assert packages["torch"]["status"] == "broken: ImportError: library gone"
    assert packages["nvidia-cutlass-dsl"]["status"] == "broken: import ended with exit code -6"
    assert packages["numpy"]["status"] == "ok"
    (cpu,) = described["backends"]
    assert cpu["status"] == "unavailable: torch is broken: ImportError: library gone"


def test_info_with_a_broken_cutlass_still_scans(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.path.insert(0, {str(tmp_path)!r})")
    (tmp_path / "cutlass.py").write_text("raise OSError('no driver')")
    done = started("info", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0
    assert re.search(r"nvidia-cutlass-dsl +\S+ +broken: OSError: no driver\n", done.stdout)
    assert re.search(r"cpu .* threads: ok\n", done.stdout)


def test_info_without_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "PACKAGES", (("no_such_module", "no-such-package", True), ("none_such", "none", False)))
    missing, optional = info._packages().values()
    assert missing == {"version": None, "status": "not installed"}
    assert optional == {"version": None, "status": "not installed (optional)"}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_explain(function: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--batch", "3", "--seqlen", "70", "--nheads", "8", "--headdim", "32", "--ngroups", "2", "--dstate", "128"]
    assert main(["explain", "--function", function, *sizes, "--dtype", "fp16"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{function} on cpu\n") and "float16 inputs" in out
    assert "nheads 8, headdim 32, ngroups 2, dstate 128" in out
    assert "3 packed sequence(s), 210 tokens" in out if "varlen" in function else "batch 3" in out


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_100a"])
def test_explain_for_a_gpu(arch: str, function: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--function", function, "--arch", arch]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{function} on {arch}\n")
    if "update" in function:
        assert "backend   recurrence: a decode step reads and writes each state once" in out
    elif arch == "sm_80":
        assert "backend   recurrence: token by token" in out
    else:
        assert "backend   chunked: 2048 token(s) a sequence" in out and "kernel    chunk_scan: " in out


def test_compile(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each kernel and one for all; here they were compiled before, but for one that fails."""
    asked = ["compile", "--model", "nemotron-nano-9b-v2", "--arch", "sm_90a", "--dtype", "fp16"]
    monkeypatch.setattr(compiler, "is_cached", lambda kernel, arch: (kernel.dtype, arch) == ("float16", "sm_90a"))
    assert main(asked) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 + 2 * 5 + 2 * 3 and all(line.endswith("  was there") for line in lines)
    assert last == "20 kernels: 0 compiled, 20 were there"
    assert lines[0].startswith("transformers: prefill ") and lines[-1].startswith("pool: decode, float16 states ")
    monkeypatch.setattr(compiler, "is_cached", lambda kernel, arch: True)
    some = ["--for", "transformers", "--for", "vllm", "--state-dtype", "fp32"]
    assert main(["compile", "--model", "nemotron-nano-9b-v2", *some]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    tiled = [line for line in lines if " tiles of " in line]
    assert len(tiled) == (3 + 2) * 4  # 1, 2, 4 and 8 heads for each kind of prefill
    assert len(lines) == 4 + 5 + len(tiled) and last.startswith(f"{len(lines)} kernels: ")
    outcome = {"prefill": "compiled", "decode": "failed: no room", "more": "was there"}
    monkeypatch.setattr(models, "warm_up", lambda *arguments: outcome)
    assert main(asked) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split(maxsplit=1) == ["decode", "failed: no room"]
    assert lines[-1] == "3 kernels: 1 compiled, 1 were there, 1 failed"


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--model", "gpt-2"], "model is 'gpt-2', expected one of mamba2-130m"),
        (["--model", "bamba-9b", "--arch", "sm_1"], "arch is 'sm_1', expected 'cpu' or one of sm_80"),
        (["--model", "bamba-9b", "--arch", "cpu"], "arch is 'cpu', expected a GPU architecture: sm_80"),
    ],
)
def test_compile_refuses_in_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", *arguments]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.err.count("\n") == 1 and not captured.out


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (
            ["--arch", "sm_100a", "--dstate", "512"],
            "no kernel on sm_100a for this call: dstate is 512, expected at most",
        ),
        (["--arch", "sm_1"], "arch is 'sm_1', expected 'cpu' or one of"),
        (["--ngroups", "3"], "ngroups (axis 2) 3, expected a divisor of nheads 16"),
        (["--headdim", "-64"], "headdim is -64, expected"),
        (["--nheads", "99999999999999"], "sizes make a tensor of shape (1, 2048, 99999999999999, 64), expected less"),
        (["--batch", "99999999999999999999", "--seqlen", "0"], "expected less than 2^63 bytes"),
    ],
)
def test_explain_refuses_in_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *arguments]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.err.count("\n") == 1 and not captured.out


def figures(name: str, value: float | None, kind: str = "min") -> Any:
    return lambda: iter([bench.Figure(name, value, "x", kind, 1.0, "why")])


def test_bench_table_and_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    measures = [figures("fast", 2.0), figures("slow", 0.5), figures("big", 2.0, "max"), figures("absent", None)]
    for i, measure in enumerate(measures):
        measure.__name__ = f"measure {i}"
    monkeypatch.setattr(bench, "_MEASURES", measures)
    assert main(["bench", "--cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:5]
    assert [next((w for w in ("met", "MISSED", "skipped") if w in line), "") for line in lines] == [
        "met",
        "MISSED",
        "MISSED",
        "skipped",
    ]
    assert main(["bench", "--cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["figures"]
    assert [f["met"] for f in found] == [True, False, False, None]
    assert found[0] == {
        "name": "fast",
        "value": 2.0,
        "unit": "x",
        "kind": "min",
        "goal": 1.0,
        "detail": "why",
        "met": True,
    }


def test_bench_measures_every_goal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each comparison on one short round; the long sequences and the big state have the same code and smaller sizes."""
    monkeypatch.setattr(bench, "BUDGET", 0.0)
    monkeypatch.setattr(bench, "SEQLEN", 64)
    monkeypatch.setattr(bench, "LENGTHS", (64, 128))
    monkeypatch.setattr(bench, "MEMORY_SEQLEN", 256)
    monkeypatch.setattr(bench, "DECODE", (2, 4, 8, 16))
    assert main(["bench", "--cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["figures"]
    assert [f["goal"] for f in found] == [8.0, 3.0, 0.5, 1.3, 2.0, 1.15, 1.5, 1.5, 1.5, 0.4, 40.0, 30.0]
    assert all(f["value"] is None or f["value"] > 0 or f["unit"] == "us" for f in found)


def test_bench_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(bench, "BUDGET", 0.0)
    monkeypatch.setattr(bench, "SEQLEN", 8)
    theirs, recurrence = bench._peers()
    assert theirs.value is None and theirs.met is None and "transformers 5.24 is not installed" in theirs.detail
    assert recurrence.value is not None


def test_no_command_and_an_unknown_one(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["fly"], ["bench"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and cute_ssd.__version__ in capsys.readouterr().out


def test_options_of_another_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    for option in (["--case", "1"], ["--peer", "kernel.py"]):
        assert main(["bench", "--cpu", *option]) == 2
        assert f"{option[0]} is of the modelled suite, but --modelled is not given" in capsys.readouterr().err


def test_modelled_calls_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    for size, reason in (
        (["--nheads", "99999999999999"], "expected a call that fits into memory; pass smaller sizes."),
        (["--headdim", "-3"], "headdim is -3, expected a positive number"),
    ):
        assert main(["model", "call", *size]) == 2
        assert reason in capsys.readouterr().err
