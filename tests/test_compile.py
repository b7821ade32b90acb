"""The compile cache: memory, disk, other processes, damage, and the emulator behind it."""

import os
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import cute_ssd
from cute_ssd import compile as compiler
from cute_ssd import launch, models
from cute_ssd.kernels.dims import Recurrence
from cute_ssd.kernels.sm100.config import Chunked
from cute_ssd.machine_code import kernel_resources

pytest.importorskip("cutlass")

SMALL = Recurrence(
    headdim=8,
    dstate=8,
    dtype="float32",
    dt="float32",
    A="float32",
    dt_bias=None,
    softplus=False,
    D=None,
    z=False,
    initial=None,
    final="float32",
    offsets=None,
    slots=None,
    flags=False,
    single=True,
    aligned=True,
    f32x2=False,
)

TILES = Chunked(
    headdim=64,
    dstate=64,
    dtype="bfloat16",
    dt="float32",
    A="float32",
    dt_bias=None,
    softplus=False,
    D=None,
    channel_D=False,
    z=False,
    initial=None,
    final="float32",
    offsets=None,
    slots=None,
    flags=False,
    local="float32",
    state_heads=2,
    scan_heads=2,
)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(compiler, "cache_directory", lambda: tmp_path)
    monkeypatch.setattr(compiler, "_compiled", {})
    return tmp_path / "kernels"


def forget() -> None:
    compiler._compiled.clear()


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


def refuse(*arguments: object, **options: object) -> None:
    raise AssertionError("compiled again")


def test_memory_then_disk(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiler.compiled(SMALL, "sm_90a")
    assert compiler.compiled(SMALL, "sm_90a") is first
    forget()
    monkeypatch.setattr(compiler, "_compile", refuse)
    again = compiler.compiled(SMALL, "sm_90a")
    assert again is not first and again.machine_code == first.machine_code
    assert ".entry recurrence" in again.ptx and ".target sm_90a" in again.ptx
    assert entries(empty_cache) == [first.directory.name]


def test_three_kernels_behind_one_function() -> None:
    found = compiler.compiled(TILES, "sm_100a")
    assert found.ptx.count(".visible .entry") == 3 and ".target sm_100a" in found.ptx
    names = kernel_resources(found.machine_code)
    assert [name.rstrip("_0123456789") for name in names] == ["chunk_state", "state_passing", "chunk_scan"]


def test_key_holds_everything_that_goes_into_a_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keys = {compiler._key(SMALL, "sm_90a"), compiler._key(SMALL, "sm_80")}
    keys.add(compiler._key(replace(SMALL, dstate=16), "sm_90a"))
    with cute_ssd.emulate("sm_90a"):
        keys.add(compiler._key(SMALL, "sm_90a"))
    installed, python = compiler.metadata.version, compiler.platform.python_version()
    for changed in ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu12", "apache-tvm-ffi"):
        with monkeypatch.context() as patch:
            patch.setattr(compiler.metadata, "version", lambda name, c=changed: "0" if name == c else installed(name))
            patch.setattr(compiler, "_packages", compiler._packages.__wrapped__)  # as another process would look
            keys.add(compiler._key(SMALL, "sm_90a"))
    with monkeypatch.context() as patch:
        patch.setattr(compiler.platform, "python_version", lambda: f"{python}1")
        keys.add(compiler._key(SMALL, "sm_90a"))
    with monkeypatch.context() as patch:
        patch.setenv("CUTE_DSL_LINEINFO", "1")
        keys.add(compiler._key(SMALL, "sm_90a"))
    with monkeypatch.context() as patch:
        (tmp_path / "kernels" / "sm100").mkdir(parents=True)
        options = tmp_path / "compile.py"
        options.write_text("# other options")
        patch.setattr(compiler, "__file__", str(options))
        keys.add(compiler._key(SMALL, "sm_90a"))
        (tmp_path / "kernels" / "recurrence.py").write_text("# another source")
        keys.add(compiler._key(SMALL, "sm_90a"))
        chunked = {compiler._key(TILES, "sm_100a")}
        for change in ("# a source of theirs", "# another one"):
            (tmp_path / "kernels" / "sm100" / "chunked.py").write_text(change)
            chunked.add(compiler._key(TILES, "sm_100a"))
        assert len(chunked) == 3 and compiler._key(SMALL, "sm_90a") in keys  # the recurrence has nothing of them
    assert len(keys) == 11
    assert compiler._key(SMALL, "sm_90a") in keys


@pytest.mark.parametrize("name", [compiler.OBJECT, compiler.PTX, compiler.MACHINE_CODE, compiler.HASHES])
def test_a_damaged_entry_is_thrown_away(name: str, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiles = []

    def fake(kernel: Recurrence, arch: str, directory: Path) -> None:
        compiles.append(kernel)
        for file in (compiler.OBJECT, compiler.PTX, compiler.MACHINE_CODE):
            (directory / file).write_text(f"{file} of {kernel}")

    monkeypatch.setattr(compiler, "_compile", fake)
    directory = compiler.compiled(SMALL, "sm_90a").directory
    for damage in (lambda path: path.write_bytes(path.read_bytes()[:-9]), lambda path: path.unlink()):
        damage(directory / name)
        forget()
        compiler.compiled(SMALL, "sm_90a")
        assert compiler._intact(directory)
    assert len(compiles) == 3
    assert entries(empty_cache) == [directory.name]


def test_a_failed_compile_leaves_nothing(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_compile", refuse)
    with pytest.raises(AssertionError, match="compiled again"):
        compiler.compiled(SMALL, "sm_90a")
    assert entries(empty_cache) == []
    assert not compiler._compiled


PROCESS = """
import sys, time
import cutlass.cute, tvm_ffi
from tests.test_compile import SMALL
from cute_ssd import compile as compiler
real, compiles = compiler._compile, []
def counted(*arguments):
    compiles.append(arguments)
    return real(*arguments)
compiler._compile = counted
print("ready", flush=True)
sys.stdin.readline()
begin = time.perf_counter()
compiler.compiled(SMALL, "sm_90a").function
print(len(compiles), time.perf_counter() - begin)
"""


def test_processes_share_one_compile(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            cwd=Path(__file__).parents[1],
        )  # fmt: skip

    both, compiles_and_seconds = [start(), start()], []
    for process in both:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in both:  # both wait at the same line
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in both:
        compiles_and_seconds.append(process.communicate()[0].split())
        assert process.returncode == 0
    assert sorted(int(compiles) for compiles, _ in compiles_and_seconds) == [0, 1]
    compiles, seconds = start().communicate("go\n")[0].split()[1:]  # behind "ready"
    print(f"found on the disk and loaded by a later process in {1e3 * float(seconds):.1f} ms")
    assert compiles == "0" and len(entries(tmp_path / "cute_ssd" / "kernels")) == 1


def test_the_emulator_runs_what_the_disk_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> tuple[torch.Tensor, cute_ssd.emulator.Report]:
        torch.manual_seed(0)
        x, B, C, dt = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8), torch.rand(1, 1, 1)
        y, final = torch.empty_like(x), torch.empty(1, 1, 8, 8)
        operands = launch.Operands(x, dt, torch.tensor([-1.0]), B, C, None, None, None, y, final=final)
        with cute_ssd.emulate("sm_90a") as report:
            launch.recurrence(operands, "sm_90a", single=True)
        return y, report

    first, _ = step()
    forget()
    from cute_ssd.emulator.launch import runtime

    monkeypatch.setattr(runtime(), "_images", {})  # as in a new process
    monkeypatch.setattr(compiler, "_compile", refuse)
    again, report = step()
    assert torch.equal(first, again)
    assert len(report.launches) == 1 and not report.findings
    again, _ = step()  # from memory, in another session
    assert torch.equal(first, again)
    outside = compiler._compiled
    assert all(emulated for _, _, emulated in outside)


def test_warm_up_starts_no_process_for_what_is_there(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call compiles, the second only looks, one after some damage compiles what is damaged."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent))  # of the processes; theirs is a directory below it
    home = tmp_path.parent / "cute_ssd"
    monkeypatch.setattr(compiler, "cache_directory", lambda: home)
    wanted = {"decode": SMALL, "decode on a pool": replace(SMALL, slots="int32")}
    monkeypatch.setattr(models, "kernels", lambda *asked: wanted)
    (home / "kernels").mkdir(parents=True, exist_ok=True)
    compiler.compiled(SMALL, "sm_90a")
    started = []

    class Counted(models.ProcessPoolExecutor):
        def __init__(self, jobs: int, **options: Any) -> None:
            started.append(jobs)
            super().__init__(jobs, **options)

    monkeypatch.setattr(models, "ProcessPoolExecutor", Counted)
    done = {"decode": "was there", "decode on a pool": "compiled"}
    assert models.warm_up("any", "sm_90a", jobs=2) == done and started == [1]
    monkeypatch.setattr(models, "ProcessPoolExecutor", refuse)
    assert models.warm_up("any", "sm_90a") == dict.fromkeys(wanted, "was there")
    assert len(entries(home / "kernels")) == 2 and all(compiler.is_cached(k, "sm_90a") for k in wanted.values())
    assert not compiler.is_cached(SMALL, "sm_80")
    damaged = home / "kernels" / compiler._key(SMALL, "sm_90a") / compiler.OBJECT
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert not compiler.is_cached(SMALL, "sm_90a")
    with pytest.raises(AssertionError, match="compiled again"):  # a process was asked for
        models.warm_up("any", "sm_90a")


def test_warm_up_says_what_failed(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a kernel for an architecture that the compiler does not know."""

    class Broken:
        def __init__(self, jobs: int, **options: Any) -> None: ...

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: object) -> None: ...

        def submit(self, function: Any, *arguments: Any) -> Any:
            future: Future[None] = Future()
            future.set_exception(RuntimeError("no such arch"))
            return future

    monkeypatch.setattr(models, "ProcessPoolExecutor", Broken)
    outcome = models.warm_up("nemotron-nano-9b-v2", "sm_100a")
    assert len(outcome) > 6 and set(outcome.values()) == {"failed: no such arch"}
    with pytest.raises(cute_ssd.ShapeError, match=r"model is 'gpt-2', expected one of mamba2-130m, .*nano-9b-v2"):
        models.warm_up("gpt-2", "sm_100a")
