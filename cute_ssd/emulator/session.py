"""A session: inside it, functions compiled by CuTe DSL run on the emulator, on CPU tensors.

What is changed for that, and put back on leaving, is listed in `Session._enter_dsl`; nothing here imports cutlass
before a session is entered. Note [Images] in launch.py says how a launch finds its PTX.
"""

import contextlib
import copy
import ctypes
import dataclasses
import functools
import gc
import os
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from ..errors import ShapeError
from .build import EmulatorError
from .launch import Client, EmulatedDevice, Image, KernelLaunch, redirected, runs_on, runtime
from .pointers import LARGEST_INDEX, LOWEST_ADDRESS, host_addresses

KDL_CPU, KDL_CUDA = 1, 2  # DLDeviceType
DEVICE_OFFSETS = {b"dltensor": 8, b"dltensor_versioned": 40}  # of DLTensor.device in a DLPack capsule
_ABSENT = object()

Addresses = npt.NDArray[np.int64]


class Patches(contextlib.ExitStack):
    """Replaces attributes, and puts exactly what was there back when it is closed."""

    def attribute(self, owner: object, name: str, value: object) -> None:
        original = vars(owner).get(name, _ABSENT)  # not getattr, which would bind it or find a parent's
        setattr(owner, name, value)
        if original is _ABSENT:
            self.callback(delattr, owner, name)
        else:
            self.callback(setattr, owner, name, original)


class Session:
    """A context manager inside which compiled kernels are handed to `run`, one launch at a time, in launch order.

    `cute.compile` targets `arch` and keeps PTX with line information; CPU tensors count as global memory of the
    device. What `run` raises comes out of the call that launched the kernel. One session at a time in a process; a
    function compiled in one works in a later one with the same arch, and nowhere outside.

    ShapeError for an arch that is not known, EmulatorError for everything else that cannot work.
    """

    _active: "Session | None" = None

    def __init__(self, arch: str, run: Callable[[KernelLaunch], None]) -> None:
        self.device = EmulatedDevice.of(arch)
        self._client = Client(self.device, run)
        self._arguments: dict[int, tuple[weakref.ref[Any], _Extent]] = {}
        self._patches = Patches()
        self._ffi_ready = False
        self.host_work_is_seen = False
        """Whether `host_works` is called when it should be; else every call may come behind something of that kind."""

    def __enter__(self) -> Self:
        if Session._active is not None:
            raise EmulatorError("An emulator session is active already, and a process has one at a time.")
        with Patches() as patches:
            self._ffi_ready = False
            # Kept files are read back and removed at every compile; the directory is private to this session.
            self._dump = patches.enter_context(tempfile.TemporaryDirectory(prefix="cute_ssd-"))
            self._enter_dsl(patches)
            patches.attribute(runtime(), "client", self._client)
            patches.attribute(Session, "_active", self)
            self._patches = patches.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._client.failure = None
        self._arguments.clear()
        self._patches.close()

    def _enter_dsl(self, patches: Patches) -> None:
        import_module("cutlass.cute")
        dsl_module = import_module("cutlass.base_dsl.dsl")
        cutlass_dsl = import_module("cutlass.cutlass_dsl.cutlass")
        base_executor = import_module("cutlass.base_dsl.jit_executor")
        executor = import_module("cutlass.cutlass_dsl.cuda_jit_executor")
        tensors = import_module("cutlass.cute.runtime")
        hardware = import_module("cutlass.utils.hardware_info").HardwareInfo

        # Compiling: for the emulated arch, linked against the shim, keeping PTX and machine code.
        for dsl in (cutlass_dsl.CuTeDSL._get_dsl(), cutlass_dsl.CuteExperimentalDSL._get_dsl()):
            patches.attribute(dsl.envar, "_arch", self.device.arch)
            patches.attribute(dsl.envar, "disable_file_caching", True)
            patches.attribute(dsl, "compile_options", dsl.compile_options)
        compiler = dsl_module.BaseDSL
        patches.attribute(compiler, "_prepare_compilation", self._preparing(compiler._prepare_compilation))
        compiler = cutlass_dsl.CutlassBaseDSL
        patches.attribute(compiler, "compile_and_cache", self._compiling(compiler.compile_and_cache))
        compiler = import_module("cutlass.base_dsl.compiler").Compiler
        patches.attribute(compiler, "jit", _linking(compiler.jit))
        engines = import_module("cutlass._mlir._mlir_libs._cutlass_ir._execution_engine")
        provider = import_module("cutlass.base_dsl.export").ExternalBinaryModule.load_provider
        engine = _redirecting(engines.BinaryExecutionEngine)
        patches.attribute(engines, "BinaryExecutionEngine", engine)  # of TVM-FFI functions
        patches.attribute(provider, "execution_engine_constructor", engine)  # of functions loaded from a file

        # Calling: one device, libraries that are never unloaded (the driver would be asked to), errors of `run`.
        function = executor.CudaDialectJitCompiledFunction
        load = function._load_cuda_library
        patches.attribute(function, "num_devices", 1)
        patches.attribute(function, "_load_cuda_library", lambda self: load(self) and [])
        patches.attribute(function, "to", self._surfacing(self._loading(function.to)))
        launcher = base_executor.JitExecutor
        patches.attribute(
            launcher, "run_compiled_program", self._surfacing(self._calling(launcher.run_compiled_program))
        )
        if "cutlass.cutlass_dsl.tvm_ffi_provider" in sys.modules:
            self._enter_ffi(patches)

        # Arguments: CPU tensors as global memory, and what memory a call may touch.
        tensor = tensors._Tensor
        patches.attribute(tensor, "__init__", _wrapping(tensor.__init__))
        patches.attribute(tensor, "__c_pointers__", self._recording(tensor.__c_pointers__, _tensor_extent))
        for pointer, address in ((tensors._Pointer, "_pointer"), (base_executor._RuntimePointerArg, "_desc")):
            extent = functools.partial(_pointer_extent, attribute=address)
            patches.attribute(pointer, "__c_pointers__", self._recording(pointer.__c_pointers__, extent))
        numbers = import_module("cutlass.base_dsl.typing")
        for integer in (numbers.Int64, numbers.Uint64):
            record = self._recording(integer.__c_pointers__, lambda argument: _integer_extent(int(argument.value)))
            patches.attribute(integer, "__c_pointers__", record)

        device = self.device
        patches.attribute(hardware, "__init__", lambda self, device_id=0: None)
        for name, answer in {
            "get_max_active_clusters": lambda self, cluster_size, stream=None: _active_clusters(device, cluster_size),
            "get_l2_cache_size_in_bytes": lambda self: device.l2_bytes,
            "get_device_multiprocessor_count": lambda self: device.multiprocessors,
        }.items():
            patches.attribute(hardware, name, answer)

    def _enter_ffi(self, patches: Patches) -> None:
        """TVM-FFI has functions of its own, which check the device of their tensors in compiled code. It takes a second
        to import, so this waits until somebody uses it."""
        if self._ffi_ready:
            return
        self._ffi_ready = True
        provider = import_module("cutlass.cutlass_dsl.tvm_ffi_provider")
        builder = import_module("cutlass.base_dsl.tvm_ffi_builder.tvm_ffi_builder").TVMFFIBuilder
        patches.attribute(builder, "load_dltensor_device_type", lambda self, tensor: self.i32(KDL_CUDA))
        for function in (provider.TVMFFIJitCompiledFunction, provider.TVMFFIJitCompiledFunctionWithKwargs):
            patches.attribute(function, "__call__", self._surfacing(self._calling_ffi(function.__call__)))

    def _preparing(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(prepare)
        def prepare_kept(dsl: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            options_module = import_module("cutlass.base_dsl.compiler")
            dsl.compile_options = copy.deepcopy(dsl.compile_options)  # `cute.compile` has one for all its calls
            options = dsl.compile_options.options
            for option in (options_module.KeepPTX, options_module.KeepCUBIN, options_module.GenerateLineInfo):
                options[option].value = True
            options[options_module.DumpDir].value = self._dump
            if options[options_module.EnableTVMFFI].value or dsl.envar.enable_tvm_ffi:
                self._enter_ffi(self._patches)
            return prepare(dsl, function, *args, **kwargs)

        return prepare_kept

    def _compiling(self, compile_and_cache: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compile_and_cache)
        def compile_filed(dsl: Any, *args: Any, **kwargs: Any) -> Any:
            function = compile_and_cache(dsl, *args, **kwargs)
            arch = dsl.compile_options.gpu_arch or self.device.arch
            function._emulated_arch = arch
            if isinstance(function.__cubin__, bytes) and function.__ptx__ is not None:
                runtime().add_image(function.__cubin__, Image(function.__ptx__, arch))
                # The next compile may have the same names, and must not find these files if it writes none.
                os.unlink(dsl.compile_options.full_ptx_path)
                os.unlink(dsl.compile_options.full_cubin_path)
            return function

        return compile_filed

    def _surfacing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, raising what a callback of the runtime could not; the host function only saw a status."""

        @functools.wraps(call)
        def raise_failure(*args: Any, **kwargs: Any) -> Any:
            result = None
            self._client.failure = None  # that of a function which nothing here wraps, such as one loaded from a file
            try:
                result = call(*args, **kwargs)
            except Exception:
                if self._client.failure is None:
                    raise
            failure, self._client.failure = self._client.failure, None
            if failure is not None:
                raise failure
            return result

        return raise_failure

    def _loading(self, to: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(to)
        def load(function: Any, *args: Any, **kwargs: Any) -> Any:
            self._check_compiled(function, function.function_name)
            executor = to(function, *args, **kwargs)
            executor.jit_module._emulated_arch = function._emulated_arch
            return executor

        return load

    def _calling(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def run_with_extents(executor: Any, descriptors: list[Any]) -> Any:
            self._check_compiled(executor.jit_module, executor.jit_module.execution_args.function_name)
            places = map(_place, descriptors)
            records = [self._arguments[place] for place in places if place in self._arguments]
            self._set_extents([extent for owner, extent in records if owner() is not None])
            return run(executor, descriptors)

        return run_with_extents

    def _calling_ffi(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def call_with_extents(function: Any, *args: Any, **kwargs: Any) -> Any:
            self._check_compiled(function, function.function_name)
            self._set_extents(list(_extents([*args, *kwargs.values()])))
            return call(function, *args, **kwargs)

        return call_with_extents

    def _check_compiled(self, holder: Any, name: str) -> None:
        """Before the host function runs: one that was compiled outside calls the driver, whatever is patched here."""
        arch = getattr(holder, "_emulated_arch", None)
        if arch is None:
            raise EmulatorError(f"{name} was compiled outside of the emulator's session; compile it inside.")
        if not runs_on(arch, self.device.arch):
            raise EmulatorError(f"{name} was compiled for {arch}, and the emulated device is {self.device.arch}.")

    def _recording(self, pointers: Callable[..., Any], extent: Callable[[Any], "_Extent"]) -> Callable[..., Any]:
        """`__c_pointers__` of an argument, noting what memory the descriptors it hands out stand for. A call gives the
        host function nothing but descriptors, in whatever containers the arguments came."""

        @functools.wraps(pointers)
        def record(argument: Any) -> Any:
            descriptors = pointers(argument)
            for descriptor in descriptors:
                owner = descriptor if isinstance(descriptor, ctypes.c_void_p) else argument
                self._arguments[_place(descriptor)] = (weakref.ref(owner), extent(argument))
            return descriptors

        return record

    def _set_extents(self, extents: "list[_Extent]") -> None:
        if not self.host_work_is_seen:
            host_works()
        spans = {(extent.address, extent.nbytes) for extent in extents if extent.nbytes}
        bare = [extent for extent in extents if extent.address and not extent.nbytes]
        pointers = np.array([extent.address for extent in bare], np.int64)
        stored = [_stored_addresses(extent) for extent in extents if extent.integers and extent.nbytes]
        unknown = False
        if bare or any(addresses.size for addresses in stored):
            known = _live_storages() | spans
            pointed_at, inside = _containing(pointers, known)
            spans |= pointed_at.union(*(_containing(addresses, known)[0] for addresses in stored))
            unknown = any(not known and extent.is_address for extent, known in zip(bare, inside, strict=True))
        views = {extent.view for extent in extents if extent.nbytes and extent.view[0] not in pointers}
        self._client.tensors, self._client.views, self._client.unknown_extents = sorted(spans), sorted(views), unknown


def _place(descriptor: Any) -> int:
    """Where the value of an argument lies that the host function is given."""
    return int((descriptor.value if isinstance(descriptor, ctypes.c_void_p) else descriptor) or 0)


def host_works() -> None:
    """The host waits for the device, or makes it do something else: the next launch does not overlap earlier ones."""
    if Session._active is not None:
        Session._active._client.follows = False


class _Extent(NamedTuple):
    """Memory that an argument gives access to; without `nbytes` a bare address. 64-bit `integers` may be addresses:
    those in a tensor, or the argument. Of a tensor it is the whole storage, and `view` (address, bytes) is the tensor.
    """

    address: int
    nbytes: int = 0
    integers: bool = False
    view: tuple[int, int] = (0, 0)

    @property
    def is_address(self) -> bool:
        """Whether a bare address is one even where no tensor is: not what may be an index."""
        return not self.integers or self.address >= LARGEST_INDEX


class _OnDevice:
    """A CPU tensor that says it is on the device, in the way that libraries ask each other: its pointers are then
    compiled as pointers to global memory, as on a GPU."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack__(self, **options: Any) -> object:
        capsule = self._tensor.__dlpack__()
        _relabel(capsule)
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return KDL_CUDA, 0


def _linking(jit: Callable[..., Any]) -> Callable[..., Any]:
    """`Compiler.jit`, whose engine finds the shim's functions before anything that the process has loaded."""

    @functools.wraps(jit)
    def link(*args: Any, **kwargs: Any) -> Any:
        engine = jit(*args, **kwargs)
        for name, address in runtime().symbols.items():
            engine.raw_register_runtime(name, address)
        return engine

    return link


def _redirecting(engine: Callable[..., Any]) -> Callable[..., Any]:
    """The constructor of engines for object files, which know no symbols but those of libraries."""

    def construct(object_file: bytes, libraries: Sequence[str], *options: Any) -> Any:
        return engine(redirected(object_file), [str(runtime().library), *libraries], *options)

    return construct


def _wrapping(init: Callable[..., None]) -> Callable[..., None]:
    """`_Tensor.__init__`, for CPU tensors."""

    @functools.wraps(init)
    def wrap(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        _require_cpu(tensor)
        init(self, _OnDevice(tensor) if hasattr(tensor, "__dlpack__") else tensor, *args, **kwargs)
        self._emulated_extent = _dlpack_extent(tensor)

    return wrap


def _require_cpu(tensor: Any) -> None:
    device = getattr(tensor, "device", None)
    if isinstance(device, torch.device) and device.type != "cpu":
        raise ShapeError(f"a tensor is on device {str(device)!r}, expected 'cpu': the emulator runs on CPU tensors.")


def _relabel(capsule: object) -> None:
    get_name, get_pointer = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    name = get_name(capsule)
    device = ctypes.c_int32.from_address(get_pointer(capsule, name) + DEVICE_OFFSETS[name])
    if device.value != KDL_CPU:
        raise ShapeError(f"a tensor is on DLPack device {device.value}, expected {KDL_CPU}, the CPU.")
    device.value = KDL_CUDA


def _dlpack_extent(tensor: Any) -> _Extent | None:
    """The whole storage of a tensor, or None where torch cannot import it."""
    if isinstance(tensor, np.ndarray):  # torch ends the process where a stride is negative
        low, high = np.lib.array_utils.byte_bounds(tensor)
        return _Extent(low, high - low, tensor.dtype in (np.int64, np.uint64), (low, high - low))
    try:
        return _torch_extent(tensor if isinstance(tensor, torch.Tensor) else torch.utils.dlpack.from_dlpack(tensor))
    except (RuntimeError, TypeError, BufferError):
        return None


def _torch_extent(tensor: torch.Tensor) -> _Extent:
    storage = tensor.untyped_storage()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    view = (tensor.data_ptr(), (last + 1) * tensor.element_size() if tensor.numel() else 0)
    return _Extent(storage.data_ptr(), storage.nbytes(), tensor.dtype in (torch.int64, torch.uint64), view)


def _tensor_extent(argument: Any) -> _Extent:
    return getattr(argument, "_emulated_extent", None) or _Extent(argument.data_ptr)  # wrapped before the session


def _pointer_extent(argument: Any, attribute: str) -> _Extent:
    pointer = getattr(argument, attribute)
    return _Extent(int(getattr(pointer, "value", pointer) or 0))


def _integer_extent(value: int) -> _Extent:
    return _Extent(value if LOWEST_ADDRESS <= value < 1 << 63 else 0, integers=True)


def _extents(values: Iterable[Any]) -> Iterator[_Extent]:
    """Of the arguments of a TVM-FFI call, which reads them itself."""
    for value in values:
        if isinstance(value, torch.Tensor):
            _require_cpu(value)
            yield _torch_extent(value)
        elif isinstance(value, list | tuple):
            yield from _extents(value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _extents([getattr(value, item.name) for item in dataclasses.fields(value)])
        elif hasattr(value, "_emulated_extent"):
            yield _tensor_extent(value)
        elif hasattr(value, "_pointer"):
            yield _pointer_extent(value, "_pointer")
        elif isinstance(value, int):
            yield _integer_extent(value)
        elif isinstance(value, ctypes.c_void_p):
            yield _integer_extent(value.value or 0)._replace(integers=False)
        elif hasattr(value, "__dlpack__") and (extent := _dlpack_extent(value)) is not None:
            yield extent


def _stored_addresses(extent: _Extent) -> Addresses:
    words = np.ctypeslib.as_array((ctypes.c_int64 * (extent.nbytes // 8)).from_address(extent.address))
    return host_addresses(words)


def _live_storages() -> set[tuple[int, int]]:
    """(address, bytes) of every torch tensor that python knows. `type`, because proxies lie about their class."""
    tensors = [item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter)]
    dense = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.layout == torch.strided]
    return {(extent.address, extent.nbytes) for extent in map(_torch_extent, dense)}


def _containing(
    addresses: Addresses, spans: set[tuple[int, int]]
) -> tuple[set[tuple[int, int]], npt.NDArray[np.bool_]]:
    """Those of `spans` that some address lies in, and which addresses lie in one. Of spans that overlap, the one that
    reaches furthest."""
    table = np.array(sorted({(0, 0), *spans}), np.int64)  # (0, 0) is what comes before the first, and contains nothing
    ends = table.sum(axis=1)
    furthest = np.maximum.accumulate(ends)
    owner = np.maximum.accumulate(np.where(ends == furthest, np.arange(len(ends)), 0))
    index = np.searchsorted(table[:, 0], addresses, side="right") - 1
    inside = addresses < furthest[index]
    return {(start, size) for start, size in table[np.unique(owner[index[inside]])].tolist()}, inside


def _active_clusters(device: EmulatedDevice, cluster_size: int) -> int:
    if not 1 <= cluster_size <= 32:
        raise ValueError(f"cluster_size is {cluster_size}, expected 1 to 32.")
    return device.multiprocessors // cluster_size
