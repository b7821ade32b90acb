"""The launch side of the emulator: what a compiled host function hands over, without executing any of it."""

import gc
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from cute_ssd.emulator.build import EmulatorError, shared_library
from cute_ssd.emulator.launch import ANSWERED, EmulatedDevice, KernelLaunch, redirected, runtime
from cute_ssd.emulator.script import run_script
from cute_ssd.emulator.session import Session

cutlass = pytest.importorskip("cutlass")
cute = pytest.importorskip("cutlass.cute")
from_dlpack = pytest.importorskip("cutlass.cute.runtime").from_dlpack

SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
NAMED_OUTSIDE = "was compiled outside"
needs_ffi = pytest.mark.skipif(find_spec("tvm_ffi") is None, reason="needs apache-tvm-ffi")


@cute.kernel
def scale_kernel(x: cute.Tensor, y: cute.Tensor, offset: cutlass.Int32, factor: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    index = block * 32 + thread + offset
    y[index] = x[index] * factor


@cute.jit
def scale(x: cute.Tensor, y: cute.Tensor, offset: cutlass.Int32, factor: cutlass.Constexpr):
    scale_kernel(x, y, offset, factor).launch(grid=[2, 1, 1], block=[32, 1, 1])


@cute.jit
def scale_in_clusters(x: cute.Tensor, y: cute.Tensor, offset: cutlass.Int32, factor: cutlass.Constexpr):
    scale_kernel(x, y, offset, factor).launch(
        grid=[8, 4, 2], block=[32, 2, 3], cluster=[2, 4, 1], smem=5000, use_pdl=True
    )


@cute.jit
def scale_twice(x: cute.Tensor, y: cute.Tensor, offset: cutlass.Int32, factor: cutlass.Constexpr):
    scale_kernel(x, y, offset, factor).launch(grid=[2, 1, 1], block=[32, 1, 1])
    scale_kernel(y, x, offset, factor).launch(grid=[3, 1, 1], block=[32, 1, 1])


@cute.kernel
def pointer_kernel(pointer: cute.Pointer):
    cute.make_tensor(pointer, cute.make_layout(1))[0] = cutlass.Float32(1.0)


@cute.jit
def through_pointer(pointer: cute.Pointer):
    pointer_kernel(pointer).launch(grid=[1, 1, 1], block=[1, 1, 1])


class Recorder:
    """Stands in for the engine; reads the parameters while they are there."""

    def __init__(self) -> None:
        self.launches: list[KernelLaunch] = []
        self.parameters: list[list[bytes]] = []

    def __call__(self, launch: KernelLaunch) -> None:
        self.launches.append(launch)
        sizes = parameter_sizes(launch.ptx, launch.kernel_name)
        self.parameters.append([launch.parameter(index, size) for index, size in enumerate(sizes)])


def parameter_sizes(ptx: str, kernel: str) -> list[int]:
    text = ptx[re.search(rf"\.entry\s+{re.escape(kernel)}\(", ptx).end() :]
    found = re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.[bfsu](\d+)\s+\w+(?:\[(\d+)\])?", text[: text.index("\n)")])
    return [SIZES[bits] * int(count or 1) for bits, count in found]


def storage(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def pair() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(64.0), torch.zeros(64)


def compile_scale(pair: tuple[torch.Tensor, torch.Tensor], factor: float = 2.0, function=scale, **options):
    return cute.compile(function, *map(from_dlpack, pair), cutlass.Int32(0), factor, **options)


def test_a_launch_is_what_the_host_function_asked_for(recorder, pair):
    with Session("sm_100a", recorder):
        compile_scale(pair, function=scale_in_clusters)(*map(from_dlpack, pair), 7)
    (launch,) = recorder.launches
    assert (launch.grid, launch.block, launch.cluster) == ((8, 4, 2), (32, 2, 3), (2, 4, 1))
    assert (launch.shared_bytes, launch.programmatic, launch.cooperative) == (5000, True, False)
    assert f".entry {launch.kernel_name}(" in launch.ptx and ".target sm_100a" in launch.ptx


def test_ptx_names_the_lines_of_the_source(recorder, pair):
    with Session("sm_100a", recorder):
        compile_scale(pair)(*pair, 0)
    assert os.path.basename(__file__) in launch_files(recorder.launches[0])
    assert re.search(r"\.loc\s+\d+ \d+", recorder.launches[0].ptx)


def launch_files(launch: KernelLaunch) -> list[str]:
    return [os.path.basename(name) for name in re.findall(r'\.file\s+\d+\s+"([^"]+)"', launch.ptx)]


def test_parameters_are_the_bytes_of_the_arguments(recorder, pair):
    with Session("sm_100a", recorder):
        compile_scale(pair)(*map(from_dlpack, pair), 41)
    x, y, offset = recorder.parameters[0]
    assert [int.from_bytes(pointer[:8], "little") for pointer in (x, y)] == [tensor.data_ptr() for tensor in pair]
    assert int.from_bytes(offset, "little") == 41


def test_parameters_are_gone_after_the_launch(recorder, pair):
    with Session("sm_100a", recorder):
        compile_scale(pair)(*pair, 0)
    with pytest.raises(EmulatorError, match="live as long as its launch"):
        recorder.launches[0].parameter(0, 8)


def test_cpu_tensors_are_global_memory(recorder, pair):
    with Session("sm_100a", recorder):
        compile_scale(pair)(*pair, 0)
    assert "ld.global" in recorder.launches[0].ptx and "st.global" in recorder.launches[0].ptx


@pytest.mark.parametrize("wrap", [from_dlpack, lambda tensor: tensor, lambda tensor: tensor.numpy()])
def test_tensors_of_a_call_are_whole_storages(recorder, wrap):
    x, y = torch.zeros(3, 100)[1, 4:68], torch.zeros(64)
    with Session("sm_100a", recorder):
        compiled = compile_scale((x, y))
        bystander = from_dlpack(torch.zeros(64))
        compiled(wrap(x), wrap(y), 0)
        assert recorder.launches[0].tensors == sorted([storage(x) if wrap(x) is x else extent(wrap, x), storage(y)])
        assert recorder.launches[0].views == sorted([(x.data_ptr(), 256), (y.data_ptr(), 256)])
        assert not recorder.launches[0].unknown_extents
        del bystander


def extent(wrap: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> tuple[int, int]:
    """numpy knows no storage, so its arrays count for what they are."""
    if wrap is from_dlpack:
        return storage(tensor)
    return tensor.data_ptr(), tensor.nbytes


def test_a_pointer_stands_for_the_tensor_it_points_into(recorder):
    x = torch.zeros(100)

    def pointer(address: int):
        return cute.runtime.make_ptr(cutlass.Float32, address, cute.AddressSpace.gmem)

    with Session("sm_100a", recorder):
        compiled = cute.compile(through_pointer, pointer(x.data_ptr()))
        compiled(pointer(x.data_ptr() + 40))
        compiled(pointer(1 << 40))
    assert recorder.launches[0].views == recorder.launches[1].views == []
    assert recorder.launches[0].tensors == [storage(x)] and not recorder.launches[0].unknown_extents
    assert recorder.launches[1].tensors == [] and recorder.launches[1].unknown_extents


def test_integers_that_are_addresses_stand_for_tensors_too(recorder):
    target = torch.zeros(1000)
    addresses, y = torch.zeros(64, dtype=torch.int64), torch.zeros(64, dtype=torch.int64)
    with Session("sm_100a", recorder):
        compiled = compile_scale((addresses, y), factor=2)
        compiled(addresses, y, 0)
        addresses[3] = target.data_ptr() + 8
        compiled(addresses, y, 0)
    assert storage(target) not in recorder.launches[0].tensors
    assert storage(target) in recorder.launches[1].tensors


def test_same_kernel_name_and_another_constant_have_their_own_ptx(recorder, pair):
    names = set()
    with Session("sm_100a", recorder):
        compiled = [compile_scale(pair, Factor(value)) for value in (3.0, 5.0, 7.0)]
        for function in reversed(compiled):
            function(*pair, 0)
    for launch, value in zip(recorder.launches, (7.0, 5.0, 3.0), strict=True):
        assert f"0f{torch.tensor(value).view(torch.int32).item():08X}" in launch.ptx
        names.add(launch.kernel_name)
    assert len(names) == 1


class Factor(float):
    """Prints as nothing, so that the DSL mangles every value of it into the same name."""

    def __str__(self) -> str:
        return "factor"

    __repr__ = __str__


def test_every_launch_of_a_host_function_in_order(recorder, pair):
    with Session("sm_100a", recorder):
        compile_scale(pair, function=scale_twice)(*pair, 0)
    assert [launch.grid for launch in recorder.launches] == [(2, 1, 1), (3, 1, 1)]
    assert recorder.launches[0].ptx == recorder.launches[1].ptx


def test_functions_run_in_a_later_session_of_their_arch_only(recorder, pair):
    with Session("sm_90a", recorder):
        compiled = compile_scale(pair)
        compiled(*pair, 0)
    with Session("sm_80", recorder):
        compile_scale(pair)(*pair, 0)
        with pytest.raises(EmulatorError, match="compiled for sm_90a, and the emulated device is sm_80"):
            compiled(*pair, 0)
    with Session("sm_90a", recorder):
        compiled(*pair, 0)
    targets = [re.search(r"\.target (\w+)", launch.ptx)[1] for launch in recorder.launches]
    assert targets == ["sm_90a", "sm_80", "sm_90a"]
    with pytest.raises(cutlass.base_dsl.common.DSLCudaRuntimeError, match="NoDevice"):
        compiled(*pair, 0)


@pytest.mark.parametrize("options", ["", pytest.param("--enable-tvm-ffi", marks=needs_ffi)])
def test_the_shim_is_found_where_the_real_runtime_was_loaded_first(options):
    """Symbols of libraries that are loaded are seen by every later host function, and the first library wins."""
    code = f"""
import torch, cutlass, cutlass.cute as cute
from cute_ssd.emulator.session import Session
from tests.test_emulator_launch import fake, scale
def compile(): return cute.compile(scale, fake((64,)), fake((64,)), cutlass.Int32(0), 2.0, options={options!r})
outside = compile()
launches = []
with Session("sm_100a", launches.append):
    arguments = [torch.zeros(64), torch.zeros(64)]
    compile()(*(arguments if {options!r} else map(cute.runtime.from_dlpack, arguments)), 0)
    assert len(launches) == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


def test_an_object_file_is_told_the_names_of_the_shim():
    names = b"\0_cudaLaunchKernel\0my_cudaLaunchKernel\0_cudaLaunchKernelEx\0_cudaMalloc\0"
    renamed = b"\0_emulLaunchKernel\0my_cudaLaunchKernel\0_emulLaunchKernelEx\0_cudaMalloc\0"
    assert redirected(names) == renamed
    assert all(len(name) == len(answer) and name != answer for name, answer in ANSWERED.items())


def test_a_function_compiled_for_another_arch_is_refused(recorder, pair):
    with Session("sm_100a", recorder):
        compiled = compile_scale(pair, options="--gpu-arch sm_90a")
        with pytest.raises(EmulatorError, match="compiled for sm_90a"):
            compiled(*pair, 0)
    assert recorder.launches == []


def test_a_function_compiled_before_the_session_is_refused(recorder, pair):
    compiled = compile_scale(pair)
    with Session("sm_100a", recorder), pytest.raises(EmulatorError, match=NAMED_OUTSIDE):
        compiled(*pair, 0)


@pytest.mark.parametrize("error", [ZeroDivisionError("from the engine"), KeyboardInterrupt()])
@pytest.mark.parametrize("implicit", [False, True], ids=["compiled", "implicit"])
def test_what_the_engine_raises_comes_out_of_the_call(pair, error, implicit):
    def run(launch: KernelLaunch) -> None:
        launches.append(launch)
        raise error

    launches: list[KernelLaunch] = []
    arguments = [*map(from_dlpack, pair), cutlass.Int32(0)]
    with Session("sm_100a", run):
        compiled = compile_scale(pair, function=scale_twice)
        with pytest.raises(type(error)) as caught:
            scale_twice(*map(from_dlpack, pair), cutlass.Int32(0), 2.0) if implicit else compiled(*arguments)
        assert caught.value is error
        assert "run" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert len(launches) == 1  # the second launch of the host function is not made
        error.__traceback__ = None
        with pytest.raises(type(error)):  # and nothing is left over from the first call
            compiled(*arguments)
        assert len(launches) == 2


def test_a_session_inside_a_session_is_refused(recorder):
    with Session("sm_100a", recorder), pytest.raises(EmulatorError, match="one at a time"), Session("sm_80", recorder):
        pass


def test_an_unknown_arch_is_refused(recorder):
    with pytest.raises(ValueError, match="arch is 'sm_999', expected one of sm_80, "):
        Session("sm_999", recorder)


@pytest.mark.parametrize(
    "arguments", [{"grid": [0, 1, 1]}, {"grid": [3, 1, 1], "cluster": [2, 1, 1]}, {"smem": 300000}]
)
def test_impossible_launches_are_refused(recorder, arguments):
    with (
        pytest.raises(EmulatorError, match=r"^Kernel \S+ cannot be launched with grid .*\.$"),
        Session("sm_100a", recorder),
    ):
        launch_with(from_dlpack(torch.zeros(64)), **{"grid": [1, 1, 1], "cluster": [1, 1, 1], "smem": 0} | arguments)


@cute.jit
def launch_with(x: cute.Tensor, grid: list[cutlass.Int32], cluster: cutlass.Constexpr, smem: cutlass.Int32):
    scale_kernel(x, x, 0, 2.0).launch(grid=grid, block=[32, 1, 1], cluster=cluster, smem=smem)


def test_a_tensor_elsewhere_is_refused(recorder, pair):
    with Session("sm_100a", recorder):
        compiled = compile_scale(pair)
        with pytest.raises(ValueError, match="on device 'meta', expected 'cpu'"):
            compiled(pair[0].to("meta"), pair[1], 0)


def state() -> dict[str, object]:
    from cutlass.base_dsl import dsl, jit_executor
    from cutlass.cute import runtime as tensors
    from cutlass.cutlass_dsl import cuda_jit_executor
    from cutlass.cutlass_dsl import cutlass as dsls
    from cutlass.utils.hardware_info import HardwareInfo

    classes = [
        dsl.BaseDSL,
        dsls.CutlassBaseDSL,
        jit_executor.JitExecutor,
        jit_executor.JitCompiledFunction,
        cuda_jit_executor.CudaDialectJitCompiledFunction,
        tensors._Tensor,
        tensors._Pointer,
        HardwareInfo,
    ]
    dsl = dsls.CuTeDSL._get_dsl()
    return {
        **{owner.__qualname__: dict(vars(owner)) for owner in classes},
        "environment": dict(os.environ),
        "settings": dict(vars(dsl.envar)),
        "options": dsl.compile_options,
        "default options": cute.compile._compile_options.to_str(),
        "torch": (torch.cuda.is_available, torch.cuda.Stream),
    }


def test_everything_is_as_it_was_after_a_session(recorder, pair):
    before = state()
    with Session("sm_100a", recorder):
        compile_scale(pair)(*pair, 0)
        assert state() != before
    assert state() == before
    with pytest.raises(ZeroDivisionError), Session("sm_90a", recorder):
        raise ZeroDivisionError
    assert state() == before


def test_kept_files_do_not_pile_up(recorder, pair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Session("sm_100a", recorder) as session:
        compile_scale(pair)
        assert os.listdir(session._dump) == []
        dump = session._dump
    assert not os.path.exists(dump) and os.listdir(tmp_path) == []


def test_hardware_info_answers_for_the_emulated_device(recorder):
    from cutlass.utils import HardwareInfo

    for arch, count in (("sm_100a", 148), ("sm_90a", 132), ("sm_80", 108)):
        with Session(arch, recorder):
            info = HardwareInfo()
            assert info.get_device_multiprocessor_count() == count
            assert info.get_max_active_clusters(2) == count // 2


def test_device_attributes():
    assert [EmulatedDevice.of(arch).attribute(97) for arch in ("sm_103a", "sm_86", "sm_80")] == [232448, 101376, 166912]
    assert EmulatedDevice.of("sm_120a").capability == (12, 0)
    with pytest.raises(EmulatorError, match="device attribute 9999"):
        EmulatedDevice.of("sm_80").attribute(9999)


@needs_ffi
def test_tvm_ffi(recorder):
    x, y = torch.zeros(200)[8:72], torch.zeros(64)
    with Session("sm_100a", recorder):
        compiled = compile_scale((x, y), options="--enable-tvm-ffi")
        compiled(x, y, 9)
    (launch,), ((first, second, offset),) = recorder.launches, recorder.parameters
    assert [int.from_bytes(pointer[:8], "little") for pointer in (first, second)] == [x.data_ptr(), y.data_ptr()]
    assert int.from_bytes(offset, "little") == 9
    assert launch.tensors == sorted([storage(x), storage(y)])
    assert "ld.global" in launch.ptx


@needs_ffi
@pytest.mark.parametrize("error", [ZeroDivisionError("from the engine"), KeyboardInterrupt()])
def test_what_the_engine_raises_comes_through_tvm_ffi(pair, error):
    def run(launch: KernelLaunch) -> None:
        raise error

    with Session("sm_100a", run):
        compiled = compile_scale(pair, options="--enable-tvm-ffi")
        with pytest.raises(type(error)) as caught:
            compiled(*pair, 0)
    assert caught.value is error
    assert "run" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]


@needs_ffi
def test_tvm_ffi_functions_of_elsewhere_are_refused(recorder, pair):
    outside = compile_scale(pair, options="--enable-tvm-ffi --gpu-arch sm_100a")
    with Session("sm_100a", recorder):
        with pytest.raises(EmulatorError, match=NAMED_OUTSIDE):
            outside(*pair, 0)
        compiled = compile_scale(pair, options="--enable-tvm-ffi")
    with Session("sm_90a", recorder), pytest.raises(EmulatorError, match="compiled for sm_100a"):
        compiled(*pair, 0)


def fake(shape: tuple[object, ...]):
    return cute.runtime.make_fake_compact_tensor(cutlass.Float32, shape, assumed_align=4)


@pytest.mark.parametrize("options", ["", pytest.param("--enable-tvm-ffi", marks=needs_ffi)])
def test_compiled_for_fake_tensors(recorder, pair, options):
    length = cute.sym_int()
    with Session("sm_100a", recorder):
        compiled = cute.compile(scale, fake((length,)), fake((length,)), cutlass.Int32(0), 2.0, options=options)
        for x, y in (pair, (torch.zeros(100), torch.zeros(100))):
            compiled(x, y, 0) if options else compiled(*(dynamic(tensor) for tensor in (x, y)), 0)
            assert recorder.launches[-1].tensors == sorted([storage(x), storage(y)])
            assert int.from_bytes(recorder.parameters[-1][0][:8], "little") == x.data_ptr()


def dynamic(tensor: torch.Tensor):
    return from_dlpack(tensor).mark_layout_dynamic()


@needs_ffi
@pytest.mark.parametrize("as_argument", [dynamic, lambda tensor: tensor], ids=["dlpack", "torch"])
def test_tvm_ffi_takes_wrapped_tensors(recorder, pair, as_argument):
    def wrapped():
        return [from_dlpack(tensor, enable_tvm_ffi=True).mark_layout_dynamic() for tensor in pair]

    with Session("sm_100a", recorder):
        compiled = cute.compile(scale, *wrapped(), cutlass.Int32(0), 2.0, options="--enable-tvm-ffi")
        compiled(*(wrapped() if as_argument is dynamic else pair), 0)
    assert recorder.launches[0].tensors == sorted(map(storage, pair))


SCRIPT = """
import sys
import cuda.bindings.driver as driver
import torch
import cutlass, cutlass.cute as cute
from cutlass.cute.runtime import from_dlpack
from cutlass.testing import JitArguments, benchmark

@cute.kernel
def kernel(x: cute.Tensor):
    x[0] = x[0] + 1.0

@cute.jit
def host(x: cute.Tensor, stream: driver.CUstream):
    kernel(x).launch(grid=[1, 1, 1], block=[int(sys.argv[1]), 1, 1], stream=stream)

if __name__ == "__main__":
    assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    torch.cuda.set_device(0)
    on_host = torch.randn(64)
    x = on_host.cuda()
    assert x.data_ptr() != on_host.data_ptr() and torch.zeros(4, device=torch.device("cuda", 0)).sum().to("cuda:0") == 0
    error, stream = driver.cuStreamCreate(0)
    assert error == driver.CUresult.CUDA_SUCCESS
    compiled = cute.compile(host, from_dlpack(x), stream)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(torch.cuda.Stream()):
        start.record()
        compiled(from_dlpack(x), stream)
        end.record()
    torch.cuda.synchronize()
    start.elapsed_time(end)
    benchmark(compiled, kernel_arguments=JitArguments(from_dlpack(x), stream), stream=stream)
    try:
        driver.cuMulticastCreate(None)
    except RuntimeError as error:
        print(error)
    sys.exit(3)
"""


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "example.py"
    path.write_text(SCRIPT)
    yield path
    gc.collect()


def test_an_unmodified_script(recorder, script, capsys):
    import cuda.bindings.driver as driver

    before = state(), list(sys.argv), list(sys.path), driver.cuStreamCreate
    with pytest.raises(SystemExit, match="3"):
        run_script(script, ["64"], Session("sm_90a", recorder))
    assert [launch.block for launch in recorder.launches] == [(64, 1, 1)] * 2
    assert "does not answer cuMulticastCreate" in capsys.readouterr().out
    assert (state(), list(sys.argv), list(sys.path), driver.cuStreamCreate) == before


def test_a_script_that_is_not_there(recorder, tmp_path):
    with pytest.raises(FileNotFoundError, match="no script"):
        run_script(tmp_path / "missing.py", [], Session("sm_90a", recorder))


def test_importing_does_not_import_cutlass():
    code = "import cute_ssd.emulator.launch, cute_ssd.emulator.script, sys; sys.exit('cutlass' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "one.c").write_text('#include "two.h"\nint one(void) { return TWO - 1; }\n')
    (tmp_path / "two.h").write_text("#define TWO 2\n")
    return tmp_path


def test_a_library_is_built_once_for_its_sources_headers_and_flags(cache):
    def build(*flags: str) -> Path:
        return shared_library("numbers", [cache / "one.c"], flags, ["", "cc"])

    first = build("-O1")
    stamp = first.stat().st_mtime_ns
    assert build("-O1") == first and first.stat().st_mtime_ns == stamp
    assert first.parent == cache / "cache" / "cute_ssd"
    assert build("-O2") != first
    (cache / "two.h").write_text("#define TWO 3\n")
    assert build("-O1") != first
    assert {path.suffix for path in first.parent.iterdir()} == {".lock", ".o", ".so"}  # no scratch directory


def test_no_compiler(cache, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EmulatorError, match=r"^The emulator compiles .* no compiler: tried cc, gcc\.$"):
        shared_library("numbers", [cache / "one.c"], [], ["", "cc", "gcc"])


def test_what_the_compiler_says_is_passed_on(cache):
    (cache / "one.c").write_text("int one(void) { return two; }\n")
    with pytest.raises(EmulatorError, match=r"could not compile one\.c:\n(.|\n)*two"):
        shared_library("numbers", [cache / "one.c"], [], ["cc"])


def test_the_shim_is_cached():
    assert runtime() is runtime() and runtime().library.is_file()
