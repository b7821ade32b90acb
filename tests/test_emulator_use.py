"""`cute_ssd.emulate()` and `python -m cute_ssd emulate` as their users meet them, on small kernels."""

import ctypes
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import cute_ssd
from cute_ssd.__main__ import main
from cute_ssd.emulator import Finding, UnsupportedInstruction
from cute_ssd.emulator.engine import Options
from cute_ssd.emulator.launch import FakeRuntime, KernelLaunch
from cute_ssd.emulator.report import KernelError, LaunchReport, Report, short_name
from cute_ssd.emulator.runner import Runner

cutlass = pytest.importorskip("cutlass")
cute = pytest.importorskip("cutlass.cute")
from_dlpack = pytest.importorskip("cutlass.cute.runtime").from_dlpack

THREADS = 64
needs_ffi = pytest.mark.skipif(find_spec("tvm_ffi") is None, reason="needs apache-tvm-ffi")


# ---- the kernels -----------------------------------------------------------------------------------------------------


@cute.kernel
def add_one_kernel(x: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    index = block * THREADS + thread
    if index < cute.size(x):
        y[index] = x[index] + 1.0


@cute.jit
def add_one(x: cute.Tensor, y: cute.Tensor):
    add_one_kernel(x, y).launch(grid=[cute.ceil_div(cute.size(x), THREADS), 1, 1], block=[THREADS, 1, 1])


@cute.kernel
def off_by_one_kernel(x: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    y[thread + 1] = x[thread]  # the wrong index


@cute.jit
def off_by_one(x: cute.Tensor, y: cute.Tensor):
    off_by_one_kernel(x, y).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])


@cute.kernel
def reverse_kernel(x: cute.Tensor, y: cute.Tensor, synchronised: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    shared = cutlass.memory.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(THREADS))
    shared[thread] = x[thread]  # the write
    if cutlass.const_expr(synchronised):
        cute.arch.sync_threads()
    y[thread] = shared[THREADS - 1 - thread]  # the read of what the other warp wrote


@cute.jit
def reverse(x: cute.Tensor, y: cute.Tensor):
    reverse_kernel(x, y, True).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])


@cute.jit
def racy_reverse(x: cute.Tensor, y: cute.Tensor):
    reverse_kernel(x, y, False).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])


@cute.kernel
def printing_kernel(x: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    if thread == 3:
        cute.printf("x[%d] is %f", thread, x[thread])


@cute.jit
def printing(x: cute.Tensor):
    printing_kernel(x).launch(grid=[1, 1, 1], block=[32, 1, 1])


@cute.kernel
def cluster_kernel(y: cute.Tensor):
    block, _, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        y[block] = cutlass.Float32(cute.arch.block_idx_in_cluster())


@cute.jit
def in_clusters(y: cute.Tensor):
    cluster_kernel(y).launch(grid=[8, 1, 1], block=[32, 2, 1], cluster=[4, 1, 1], smem=1024)


@cute.kernel
def inline_kernel(y: cute.Tensor, ptx: cutlass.Constexpr):
    y[0] = cute.arch.inline_ptx(ptx, write_only_types=[cutlass.Int32], read_only_args=[y[0], y[1]])


@cute.jit
def inline(y: cute.Tensor, ptx: cutlass.Constexpr):
    inline_kernel(y, ptx).launch(grid=[1, 1, 1], block=[1, 1, 1])


@cute.kernel
def spinning_kernel(y: cute.Tensor):
    value = y[0]
    for _ in cutlass.range(20000):
        value = value * 0.5 + 1.0
    y[0] = value


@cute.jit
def spinning(y: cute.Tensor, blocks: cutlass.Int32):
    spinning_kernel(y).launch(grid=[blocks, 1, 1], block=[128, 1, 1])


def line_of(code: str) -> int:
    """The number of the first line of this file that contains `code`."""
    return 1 + next(k for k, line in enumerate(Path(__file__).read_text().splitlines()) if code in line)


def call(function: Callable[..., None], *tensors: torch.Tensor) -> None:
    arguments = [from_dlpack(tensor) for tensor in tensors]
    cute.compile(function, *arguments)(*arguments)


@pytest.fixture
def pair() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(float(THREADS)), torch.empty(THREADS)  # empty is NaN here, as conftest.py has it


# ---- calls and the report --------------------------------------------------------------------------------------------


def test_a_call_runs_on_cpu_tensors_and_is_reported(pair):
    x, y = pair
    with cute_ssd.emulate("sm_100a") as report:
        call(add_one, x, y)
    assert torch.equal(y, x + 1)
    (launch,) = report
    assert report.launches == [launch] and report.arch == "sm_100a" and report.findings == []
    assert (launch.grid, launch.block, launch.cluster, launch.shared_bytes) == ((1, 1, 1), (64, 1, 1), (1, 1, 1), 0)
    assert launch.instructions["store global"] == launch.instructions["load global"] == 2  # one for each warp
    assert launch.warp_instructions == sum(launch.instructions.values()) > 10
    assert launch.seconds > 0 and launch.cycles is None and launch.printed == []
    assert str(report).startswith("emulated sm_100a: 1 launches, 0 findings\nadd_one_kernel#")


def test_geometry_of_a_launch_with_clusters():
    y = torch.empty(8)
    with cute_ssd.emulate("sm_90a") as report:
        call(in_clusters, y)
    assert y.tolist() == [0, 1, 2, 3] * 2
    (launch,) = report
    assert (launch.grid, launch.block, launch.cluster, launch.shared_bytes) == ((8, 1, 1), (32, 2, 1), (4, 1, 1), 1024)


@needs_ffi
@pytest.mark.parametrize("options", ["", "--enable-tvm-ffi"])
def test_functions_of_fake_tensors_plain_and_through_tvm_ffi(options):
    fakes = [cute.runtime.make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(),)) for _ in range(2)]
    with cute_ssd.emulate() as report:
        compiled = cute.compile(add_one, *fakes, options=options)
        for size in (1, 100, 1000):
            x, y = torch.randn(size), torch.empty(size)
            compiled(*((x, y) if options else (from_dlpack(t).mark_layout_dynamic() for t in (x, y))))
            assert torch.equal(y, x + 1)
    assert [launch.grid[0] for launch in report] == [1, 2, 16]


def test_outputs_that_are_not_written_are_a_finding():
    x, y, z = torch.arange(40.0), torch.empty(8, 8), torch.empty(40)
    with cute_ssd.emulate() as report:
        call(add_one, x, y.flatten())
        call(add_one, x, z)
        report.expect_written(y[:5], z)
        with pytest.raises(KernelError) as caught:
            report.expect_written(z, y)
    assert report.findings == caught.value.findings
    message = r"24 of the 64 elements of an output \(8, 8\) of torch.float32 were never written, the first at \(5, 0\)"
    assert re.fullmatch(f"unwritten: add_one_kernel\\S*: {message}", str(caught.value))
    with cute_ssd.emulate(keep_going=True) as report:
        report.expect_written(z, y)
    assert [finding.kind for finding in report.findings] == ["unwritten", "unwritten"]
    with cute_ssd.emulate(sanitize=False) as report, pytest.raises(cute_ssd.ShapeError, match="sanitize is False"):
        report.expect_written(y)


def test_strided_views(pair):
    x, y = torch.randn(50, 3)[:, 1], torch.zeros(50, 2)[:, 1]
    with cute_ssd.emulate() as report:
        call(add_one, x, y)
    assert torch.equal(y, x + 1) and report.unwritten(y) == 0
    assert torch.equal(y._base[:, 0], torch.zeros(50)) and report.unwritten(y._base) == 50


def test_printed_text(capsys):
    with cute_ssd.emulate() as report:
        call(printing, torch.full((32,), 0.5))
    assert report.launches[0].printed == ["x[3] is 0.500000\n"]
    assert capsys.readouterr().out == "x[3] is 0.500000\n"


def test_what_a_kernel_leaves_out_stays_nan_and_is_counted():
    x, y = torch.arange(40.0), torch.empty(64)
    with cute_ssd.emulate() as report:
        call(add_one, x, y)
        assert report.unwritten(y) == 24
        call(add_one, x, y[20:])
        assert report.unwritten(y) == 4  # over all launches
    assert torch.isnan(y[60:]).all() and not torch.isnan(y[:60]).any()


@pytest.mark.parametrize("schedule", ["eager", "late", "priority"])
def test_schedules(pair, schedule):
    x, y = pair
    with cute_ssd.emulate(schedule=schedule, seed=5, threads=1) as report:
        call(reverse, x, y)
    assert torch.equal(y, x.flip(0)) and not report.findings


def test_a_run_is_reproducible_from_its_seed(pair):
    def findings(seed: int) -> list[Finding]:
        with cute_ssd.emulate(seed=seed, keep_going=True) as report:
            call(racy_reverse, *pair)
        return report.findings

    assert all(findings(seed) == findings(seed) for seed in (0, 1, 2))


# ---- findings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_a_race_is_an_error_that_names_both_sides(pair, seed):
    with cute_ssd.emulate(seed=seed) as report, pytest.raises(KernelError) as caught:
        call(racy_reverse, *pair)
    assert caught.value.findings == report.findings == report.launches[0].findings
    finding = report.findings[0]
    assert finding.kind in ("race", "uninitialised")
    assert re.fullmatch(r"warp [01] of CTA \(0, 0, 0\)", finding.who)
    assert finding.source in [f"{__file__}:{line_of(code)}" for code in ("# the write", "# the read")]
    assert finding.ptx_line > 0 and "shared" in finding.ptx
    assert f"reverse_kernel at {finding.source}: " in re.sub(r"_tensorptr\w*|#\w{4}", "", str(caught.value))
    assert f"(PTX line {finding.ptx_line}: {finding.ptx})" in str(caught.value)


def test_keep_going_collects_findings(pair):
    with cute_ssd.emulate(keep_going=True) as report:
        call(racy_reverse, *pair)
        call(reverse, *pair)
        call(racy_reverse, *pair)
    counts = [len(launch.findings) for launch in report]
    assert counts[0] == counts[2] > 0 and counts[1] == 0 and len(report.findings) == 2 * counts[0]
    assert all(str(finding) in str(report) for finding in report.findings)


def test_without_checks_a_race_goes_unnoticed(pair):
    with cute_ssd.emulate(sanitize=False) as report:
        call(racy_reverse, *pair)
    assert not report.findings


@pytest.mark.parametrize("keep_going", [False, True])
@pytest.mark.parametrize("sanitize", [False, True])
def test_out_of_bounds_names_the_line_and_always_ends_the_launch(pair, sanitize, keep_going):
    with cute_ssd.emulate(sanitize=sanitize, keep_going=keep_going), pytest.raises(KernelError) as caught:
        call(off_by_one, *pair)
    finding = caught.value.findings[0]
    assert finding.kind == "out of bounds" and finding.who == "warp 1 of CTA (0, 0, 0)"
    assert finding.source == f"{__file__}:{line_of('# the wrong index')}"
    assert finding.ptx.startswith("st.global") and "256" in finding.message  # bytes into the tensor, its size


def test_many_findings_are_shown_in_part():
    findings = [Finding("race", f"number {k}", "kernel", "warp 0", k, "", "") for k in range(45)]
    text = str(KernelError(findings))
    assert text.count("\n") == 20 and "number 19" in text and "number 20" not in text
    assert text.endswith("\nand 25 more findings")


MANGLED = "kernel_cutlass_{}_TiledMMA_ThrLayoutVMNK11110000_PermutationMNK____MMAAtom_ThrID10_ShapeMNK{}_0"


@pytest.mark.parametrize(
    ("kernel", "short"),
    [
        ("ssd_forward_0", "ssd_forward_0"),
        (MANGLED.format("kernel___main__DenseGemm_object_at_", 128), "DenseGemm.kernel#"),
        (MANGLED.format("gemm", 64), "gemm#"),
        ("prefix_" * 5 + "kernel_cutlass_add_tensorptrf32gmemo16128i641i64div16128_0", "add#"),
        ("a" * 200, "a" * 64 + "#"),
    ],
)
def test_names_of_kernels_are_short_in_messages_and_different(kernel, short):
    assert short_name(kernel).startswith(short) and len(short_name(kernel)) <= len(short) + 4
    assert short_name(kernel + "1") != short_name(kernel)
    assert str(Finding("race", "so", kernel, "warp 0", 0, "", "")) == f"race: warp 0 of {short_name(kernel)}: so"
    assert str(Finding("memory", "so", kernel, "", 0, "", "")) == f"memory: {short_name(kernel)}: so"
    launch = LaunchReport(kernel, (1, 1, 1), (1, 1, 1), (1, 1, 1), 0)
    assert str(launch).startswith(short_name(kernel) + ":") and launch.kernel == kernel


# ---- what cannot be done ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ptx", "reason"),
    [
        ("vadd.s32.s32.s32 {$w0}, {$r0}, {$r1};", "unknown instruction"),
        ("add.s32 {$w0}, {$r0}, {$r1}; vmax.u32.u32.u32 {$w0}, {$r0}, {$r1};", "unknown instruction"),
        ("mad24.hi.sat.s32 {$w0}, {$r0}, {$r1}, {$r0};", r"unknown modifier \.sat"),
    ],
)
def test_unknown_ptx_is_refused_with_both_lines(ptx, reason):
    y = torch.zeros(2, dtype=torch.int32)
    with cute_ssd.emulate() as report, pytest.raises(UnsupportedInstruction, match=reason) as caught:
        cute.compile(inline, from_dlpack(y), ptx)(from_dlpack(y))
    source = re.escape(f"{__file__}:{line_of('cute.arch.inline_ptx(')}")
    assert re.fullmatch(rf"PTX line \d+: `\w[^`]*` \([^()]+\), from {source}", str(caught.value))
    assert report.launches == []


def test_a_tensor_map_that_is_not_executed_is_refused_when_it_is_met():
    """Its fields are no part of the PTX."""
    ptx = """.version 8.8\n.target sm_100a\n.address_size 64\n.visible .entry k(.param .align 64 .b8 map[128]) {
    .reg .b64 %m; .reg .b32 %c; .shared .align 128 .b8 data[128]; mov.b64 %m, map; cvta.param.u64 %m, %m; mov.u32 %c, 0;
    cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%m, {%c}], [data];
    ret; }"""
    tensor_map = (ctypes.c_uint64 * 16)(0, 0x802)  # interleaved
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(tensor_map))
    launch = KernelLaunch("k", ptx, (1, 1, 1), (1, 1, 1), (1, 1, 1), 0, False, _parameters=parameters)
    with pytest.raises(UnsupportedInstruction, match=r"PTX line 6: `cp.async.bulk.tensor.1d.* not know \(0x800\)"):
        Runner(Report("sm_100a"), Options())(launch)


def test_unknown_arch_and_wrong_values():
    for arguments, message in [
        ({"arch": "sm_999"}, "arch is 'sm_999', expected one of sm_80, "),
        ({"schedule": "lazy"}, "schedule is 'lazy', expected one of eager, late, priority"),
        ({"seed": -1}, "seed is -1, expected 0 or more"),
    ]:
        with pytest.raises(cute_ssd.ShapeError, match=message), cute_ssd.emulate(**arguments):
            pass


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_100f", "sm_103f", "sm_120f"])
def test_base_and_family_names(pair, arch):
    x, y = pair
    with cute_ssd.emulate(arch) as report:
        call(add_one, x, y)
    assert torch.equal(y, x + 1) and report.arch == arch


def test_one_emulation_at_a_time():
    with (
        cute_ssd.emulate(),
        pytest.raises(cute_ssd.EmulatorError, match="is active already, and a process has one at a time"),
        cute_ssd.emulate(),
    ):
        pass
    with cute_ssd.emulate():  # the attempt has left nothing behind
        pass


def test_compiled_outside(pair):
    compiled = cute.compile(add_one, *map(from_dlpack, pair))
    with cute_ssd.emulate(), pytest.raises(cute_ssd.EmulatorError, match="was compiled outside of the emulator"):
        compiled(*map(from_dlpack, pair))


def test_compiled_for_another_arch(pair):
    with cute_ssd.emulate("sm_90a"):
        compiled = cute.compile(add_one, *map(from_dlpack, pair))
    with (
        cute_ssd.emulate("sm_100a"),
        pytest.raises(cute_ssd.EmulatorError, match=r"for sm_90a, .* device is sm_100a\."),
    ):
        compiled(*map(from_dlpack, pair))


def test_a_tensor_on_another_device(pair):
    with (
        cute_ssd.emulate(),
        pytest.raises(cute_ssd.ShapeError, match="on device 'meta', expected 'cpu': the emulator runs on CPU tensors"),
    ):
        call(add_one, pair[0].to("meta"), pair[1])


def test_a_grid_too_large_is_estimated():
    y = torch.zeros(1)
    with cute_ssd.emulate(sanitize=False, time_limit=10), pytest.raises(KernelError) as caught:
        cute.compile(spinning, from_dlpack(y), cutlass.Int32(1))(from_dlpack(y), 10_000_000)
    message = caught.value.findings[0].message
    assert re.search(r"the grid of 10000000 clusters would take about \d+ s .* more than the limit of 10 s", message)


def in_a_process(code: str) -> subprocess.CompletedProcess[str]:
    header = "import torch, cute_ssd\nfrom tests.test_emulator_use import *\n"
    root = Path(__file__).parents[1]
    return subprocess.run([sys.executable, "-c", header + code], capture_output=True, text=True, cwd=root)


def test_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("cute_ssd.emulator.session.runtime", FakeRuntime)  # as in a new process
    message = r"^The emulator compiles a library on first use and found no compiler: tried cc, gcc, clang\.$"
    with pytest.raises(cute_ssd.EmulatorError, match=message), cute_ssd.emulate():
        pass


@pytest.mark.parametrize("threads", [1, 2])
def test_running_out_of_memory(threads):
    """The checks keep a mark for every byte that a launch touches."""
    done = in_a_process(
        f"threads = {threads}\n"
        """
import resource
x, y = torch.zeros(1 << 26), torch.zeros(1 << 26)
with cute_ssd.emulate(threads=threads):
    call(add_one, x[:64], y[:64])
    compiled = cute.compile(add_one, from_dlpack(x), from_dlpack(y))
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    try:
        compiled(from_dlpack(x), from_dlpack(y))
    except KernelError as error:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(error)
"""
    )
    assert re.fullmatch(r"memory: add_one_kernel\S*: the host has not enough memory [^\n]+\n", done.stdout), done.stderr


# ---- the command line ------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
import torch
import cutlass, cutlass.cute as cute
from cutlass.cute.runtime import from_dlpack

@cute.kernel
def kernel(x: cute.Tensor, y: cute.Tensor, synchronised: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    shared = cutlass.memory.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(64))
    shared[thread] = x[thread]
    if cutlass.const_expr(synchronised):
        cute.arch.sync_threads()
    y[thread] = shared[63 - thread]

@cute.jit
def reverse(x: cute.Tensor, y: cute.Tensor, synchronised: cutlass.Constexpr):
    kernel(x, y, synchronised).launch(grid=[1, 1, 1], block=[64, 1, 1])

if __name__ == "__main__":
    x, y = torch.arange(64.0).cuda(), torch.empty(64, device="cuda")
    half = x[:32]
    assert x.data_ptr() % 256 == y.data_ptr() % 256 == torch.empty_like(half).data_ptr() % 256 == 0
    assert half.to("cuda", torch.float16).data_ptr() % 256 == 0 and half.data_ptr() == x.data_ptr()
    arguments = from_dlpack(x, assumed_align=128), from_dlpack(y, assumed_align=128)
    cute.compile(reverse, *arguments, "racy" not in sys.argv[1:])(*arguments)
    torch.cuda.synchronize()
    if "racy" not in sys.argv[1:]:
        assert torch.equal(y.cpu(), x.cpu().flip(0))
    print("arguments", sys.argv[1:], "on", torch.cuda.get_device_name())
    if "fail" in sys.argv[1:]:
        sys.exit("failed")
    if "exit" in sys.argv[1:]:
        sys.exit(0)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def run_command(*arguments: str) -> int:
    try:
        return main(["emulate", *arguments])
    except SystemExit as stop:
        return 0 if stop.code in (None, 0) else stop.code if isinstance(stop.code, int) else 1


def test_a_script_gets_its_arguments_and_is_main(script, capsys):
    assert run_command("--arch", "sm_90a", "--seed", "3", script, "--seed", "7", "word") == 0
    out, err = capsys.readouterr()
    assert out == "arguments ['--seed', '7', 'word'] on NVIDIA H100 (emulated)\n"
    assert "emulated sm_90a: 1 launches, 0 findings" in err


@pytest.mark.parametrize(
    ("options", "arguments", "code", "finished"),
    [
        ([], ["racy"], 1, False),
        (["--seed", "1"], ["racy"], 1, False),
        (["--keep-going"], ["racy"], 1, True),
        (["--keep-going"], ["racy", "exit"], 1, True),  # also where the script says that all is well
        (["--no-sanitize"], ["racy"], 0, True),
        ([], ["fail"], 1, True),
        ([], ["exit"], 0, True),
    ],
)
def test_exit_codes(script, capsys, options, arguments, code, finished):
    assert run_command(*options, script, *arguments) == code
    out, err = capsys.readouterr()
    assert ("arguments" in out) == finished
    found = code == 1 and "racy" in arguments
    assert ("0 findings" not in err.splitlines()[0]) == found
    assert (f"{script}:" in err) == found  # each finding once, with its line in the script
    assert len(set(err.splitlines())) == len(err.splitlines())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "script is 'missing.py', which is not a file"),
        (["--arch", "sm_7", __file__], "arch is 'sm_7', expected one of sm_80"),
        (["--seed", "-1", __file__], "seed is -1, expected 0 or more"),
    ],
)
def test_requests_that_cannot_be_met(arguments, message, capsys):
    assert run_command(*arguments) == 2
    assert message in capsys.readouterr().err


def test_the_module_runs_as_a_program(script):
    done = subprocess.run(
        [sys.executable, "-m", "cute_ssd", "emulate", "--keep-going", script, "racy"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 1 and done.stdout.startswith("arguments ['racy']"), done.stderr


# ---- kernels of quack ------------------------------------------------------------------------------------------------

QUACK = """
import os, sys, types
import torch._dynamo  # before the stand-in: it looks for triton too
if __import__("importlib.util").util.find_spec("triton") is None:
    cache = types.SimpleNamespace(FileCacheManager=object)  # the autotuner's base class, all that is asked for
    sys.modules["triton"] = types.ModuleType("triton")
    sys.modules["triton"].runtime = types.SimpleNamespace(cache=cache)
os.environ["QUACK_CACHE_ENABLED"] = "0"
import torch.nn.functional as F
from quack.cross_entropy import cross_entropy_fwd
from quack.rmsnorm import rmsnorm_fwd
from quack.softmax import softmax_bwd, softmax_fwd

def near(result, expected):
    assert result.shape == expected.shape
    torch.testing.assert_close(result.float(), expected, rtol=2e-2, atol=2e-3)

for seed in range(3):
    for rows in (16, 13):  # four to a CTA; those beyond the end are computed from memory that nothing wrote
        x, dy = torch.randn(2, rows, 1000, dtype=torch.bfloat16)
        weight, target = torch.randn(1000), torch.randint(1000, (rows,))
        with cute_ssd.emulate(seed=seed, keep_going=rows % 4 > 0) as report:
            y = softmax_fwd(x)
            dx = softmax_bwd(dy, y)
            norm = rmsnorm_fwd(x, weight)[0]
            loss = cross_entropy_fwd(x, target)
        p = y.float()
        near(y, x.float().softmax(-1))
        near(dx, p * (dy.float() - (p * dy.float()).sum(-1, keepdim=True)))
        near(norm, F.rms_norm(x.float(), (1000,), weight, 1e-6))
        near(loss, F.cross_entropy(x.float(), target, reduction="none"))
        assert len(report.launches) == 4
        assert {finding.kind for finding in report.findings} <= ({"uninitialised"} if rows % 4 else set())
        assert report.unwritten(norm) == report.unwritten(y) == 0
print("quack passes")
"""


@needs_ffi
@pytest.mark.skipif(find_spec("quack") is None, reason="needs quack-kernels")
def test_kernels_of_quack():
    """In a process of its own, because quack changes CuTe's tensor classes when it is imported."""
    done = in_a_process(QUACK)
    assert done.stdout.endswith("quack passes\n"), done.stderr
