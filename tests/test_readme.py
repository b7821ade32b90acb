"""README.md: its code runs, its commands exist, its names and paths are those of the package."""

import re
import runpy
import shlex
from pathlib import Path

import pytest

import cute_ssd
from cute_ssd.__main__ import _parser

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
SHELL = re.findall(r"^```sh\n(.*?)^```", README, re.M | re.S)


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_code_runs(code: str, tmp_path: Path) -> None:
    if "transformers import" in code:
        pytest.importorskip("transformers")
    (tmp_path / "example.py").write_text(code)  # the CuTe DSL reads the source of kernels
    names = runpy.run_path(str(tmp_path / "example.py"))
    if "report" in names:
        found = [
            (finding.kind, code.splitlines()[int(finding.source.split(":")[1]) - 1])
            for finding in names["report"].findings
        ]
        assert ("race", "    x[thread] = shared[63 - thread]") in found
    if "y_next" in names:
        assert names["y"].isfinite().all() and names["y_next"].isfinite().all()
        assert names["state"].shape == (2, 16, 64, 128)


def test_there_is_an_example_of_fifteen_lines() -> None:
    assert PYTHON and len([line for line in PYTHON[0].splitlines() if line]) <= 15


def test_commands_exist() -> None:
    commands = [
        found.replace("[arguments]", "one two") for found in re.findall(r"python -m cute_ssd ([^`\n]+)", README)
    ]
    assert {c.split()[0] for c in commands} == {"check", "info", "explain", "compile", "emulate", "model", "bench"}
    for command in commands:
        _parser().parse_args(shlex.split(command))
    (check,) = (line for line in README.splitlines() if line.startswith("| `python -m cute_ssd check`"))
    known = vars(_parser().parse_args(["check"]))
    for option in re.findall(r"`--([a-z]+)", check):
        assert option in known


def test_ci_runs_the_test_command() -> None:
    install, test = (block.strip() for block in SHELL)
    assert install == "pip install torch==2.13.0 && pip install . && python -m cute_ssd check"
    assert test in (ROOT / ".ci" / "run").read_text().splitlines()


def test_every_function_is_described() -> None:
    described = set(re.findall(r"^\| `(\w+)\(", README, re.M))
    functions = {name for name in cute_ssd.__all__ if callable(getattr(cute_ssd, name)) and name.islower()}
    assert described == functions


def test_named_files_exist() -> None:
    for name in set(re.findall(r"\b[\w/]+\.py\b", README)) - {"script.py", "mamba2_ssd.py"}:
        assert (ROOT / ("" if "/" in name else "cute_ssd") / name).exists(), name
    for name in ("LICENSE", "CHANGELOG.md", ".ci/run"):
        assert (ROOT / name).exists()
