"""The workflows and the scripts that their steps run: what of them needs no GPU."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SCRIPTS = sorted((ROOT / ".ci").iterdir())
QUICK = ["--device", "cpu", "--case", "3"]


def test_the_commands_of_the_readme() -> None:
    readme = (ROOT / "profiling" / "README.md").read_text()
    named = set(re.findall(r"python -m profiling\.(\w+)", readme))
    scripts = {path.stem for path in (ROOT / "profiling").glob("*.py") if "__main__" in path.read_text()}
    assert named <= scripts
    assert {"bench", "compare", "roofline", "ncu_profile", "report", "run_case", "environment", "chip_metrics"} <= named
    for command in re.findall(r"`python -m profiling\.(\w+ [^`]*)`", readme):
        module, *options = command.split()
        source = (ROOT / "profiling" / f"{module}.py").read_text() + (ROOT / "profiling" / "cases.py").read_text()
        assert all(f'"{option}"' in source for option in options if option.startswith("--")), command
    assert set(re.findall(r"`\.ci/(\w+)", readme)) <= {path.name for path in SCRIPTS}


def test_the_package_does_not_know_of_profiling() -> None:
    for source in (ROOT / "cute_ssd").rglob("*.py"):
        assert not re.search(r"^\s*(from|import) profiling\b", source.read_text(), re.M), source


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, **environment}
    return subprocess.run([ROOT / ".ci" / script, *arguments], cwd="/", env=given, capture_output=True, text=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts(script: Path) -> None:
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash" and "set -euo pipefail" in lines


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_each_step_is_a_script(workflow: Path) -> None:
    yaml = pytest.importorskip("yaml")
    described: dict[str, Any] = yaml.safe_load(workflow.read_text())
    assert described["permissions"] == {"contents": "read"}
    steps = [step for job in described["jobs"].values() for step in job["steps"]]
    commands = [step["run"] for step in steps if "run" in step]
    assert commands and all((ROOT / command).is_file() for command in commands)
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in steps if "uses" in step)


def test_the_gpu_job_keeps_its_results_also_when_a_step_fails() -> None:
    yaml = pytest.importorskip("yaml")
    (job,) = yaml.safe_load((ROOT / ".github/workflows/gpu.yml").read_text())["jobs"].values()
    assert {"self-hosted", "gpu"} <= set(job["runs-on"])
    *steps, kept = job["steps"]
    assert [step.get("run") for step in steps] == [None, ".ci/gpu_tests", ".ci/gpu_suite", ".ci/gpu_bench"]
    assert kept["with"]["path"].rstrip("/") == job["env"]["OUT"] and "cancelled" in kept["if"]
    assert all("cancelled" in step["if"] for step in steps[2:])


@pytest.mark.parametrize("script", ["gpu_tests", "gpu_suite", "gpu_bench"])
def test_without_a_gpu(script: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = run(script)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("device is cuda, but torch finds no CUDA device") and done.stderr.count("\n") == 1


def test_the_suite_step(tmp_path: Path) -> None:
    done = run("gpu_suite", *QUICK, OUT=str(tmp_path / "kept"))
    assert (done.returncode, done.stdout) == (0, "1 of 1 cases passed\n"), done.stderr
    assert json.loads((tmp_path / "kept" / "check.json").read_text())["passed"] == 1


def test_the_benchmark_step(tmp_path: Path) -> None:
    """Against a result in which the same case took a tenth of a microsecond."""
    before = tmp_path / "before.json"
    fast = {"median_us": 0.1, "p10_us": 0.1, "p90_us": 0.1}
    before.write_text(json.dumps({"cases": [{"case": 3, "results": {"cute_ssd": fast}}]}))
    short = [*QUICK, "--iterations", "2", "--warmup", "1", "--buffers", "1"]
    done = run("gpu_bench", *short, OUT=str(tmp_path / "kept"), BASELINE=str(before))
    assert done.returncode == 1 and "SLOWER" in done.stdout, done.stderr
    kept = json.loads((tmp_path / "kept" / "bench.json").read_text())
    assert kept["cases"][0]["case"] == 3 and kept["environment"]["device"] == "cpu"
