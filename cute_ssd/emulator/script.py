"""Running somebody's script for a GPU, unmodified, on the emulator.

Such a script is the best test of a kernel that exists: it makes inputs, launches, and compares with its own reference.
What it asks of CUDA besides launching is answered here: tensors "on cuda" live on the CPU, streams and events are
objects without effect because a launch returns after it has run, and times are NaN because nothing here has one.
"""

import ctypes
import os
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from .build import EmulatorError
from .engine import forget
from .launch import EmulatedDevice
from .session import Patches, Session, host_works

MEMORY_BYTES = 1 << 34  # of the emulated device
ALIGNMENT = 256  # of memory on a CUDA device; torch aligns to 64 bytes on a CPU, and kernels assume more
LOOKS = {
    *("__get__", "__dlpack__", "__dlpack_device__", "data_ptr", "size", "stride", "dim", "numel", "element_size"),
    *("storage_offset", "untyped_storage", "is_contiguous", "detach", "view", "permute", "transpose", "unsqueeze"),
    *("squeeze", "expand", "as_strided", "__getitem__"),
}
"""Functions of torch that leave the memory of a tensor alone, by name."""
CUDA_NAME = re.compile(r"cuda(:\d+)?")


def run_script(path: str | os.PathLike[str], argv: Sequence[str], session: Session) -> None:
    """Runs the script at `path` as __main__ with `argv` after its name, inside `session`, which this enters.

    SystemExit and whatever else the script or a launch raises comes through.
    """
    script = Path(path)
    if not script.is_file():
        raise FileNotFoundError(f"There is no script {script}.")
    session.host_work_is_seen = True
    with session, Patches() as patches, _CudaOnCpu():
        patches.attribute(sys, "argv", [str(script), *argv])
        patches.attribute(sys, "path", [str(script.resolve().parent), *sys.path])
        patches.callback(forget)
        _answer_torch(patches, session.device)
        _answer_driver(patches, session.device)
        _answer_benchmark(patches)
        runpy.run_path(str(script), run_name="__main__")


class _CudaOnCpu(TorchFunctionMode):
    """Takes "cuda" for the CPU wherever torch takes a device. A move between the two still copies, as it does on a
    machine that has both: scripts keep the host's tensor as it was before the launch. Whatever torch does to tensors
    lies between two launches in the stream."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") not in LOOKS:
            host_works()
        if func in (torch.Tensor.cuda, torch.Tensor.cpu, torch.Tensor.pin_memory):
            return _aligned(args[0].clone(), args)
        kwargs = {**(kwargs or {})}
        if func is torch.Tensor.to and any(map(_is_device, (*args, kwargs.get("device")))):
            kwargs["copy"] = True
        if _is_device(kwargs.get("device")) or isinstance(kwargs.get("device"), int):
            kwargs["device"] = "cpu"
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        result = func(*("cpu" if _is_device(value) else value for value in args), **kwargs)
        fresh = "device" in kwargs or func in (
            torch.Tensor.to,
            torch.clone,
            torch.Tensor.clone,
            torch.Tensor.contiguous,
        )
        return _aligned(result, args) if fresh or getattr(func, "__name__", "").endswith("_like") else result


def _aligned(result: Any, arguments: tuple[Any, ...]) -> Any:
    """A new tensor where a device would have put it: a copy of `result`, unless that is memory of an argument."""
    if type(result) is not torch.Tensor or result.layout != torch.strided or result.data_ptr() % ALIGNMENT == 0:
        return result
    storage = result.untyped_storage()
    known = [item.untyped_storage().data_ptr() for item in arguments if isinstance(item, torch.Tensor)]
    if result.requires_grad or result.storage_offset() or storage.data_ptr() in known:
        return result
    memory = np.empty(storage.nbytes() + ALIGNMENT, np.uint8)
    memory = memory[-memory.ctypes.data % ALIGNMENT :][: storage.nbytes()]
    moved = torch.frombuffer(memory, dtype=result.dtype).as_strided(result.shape, result.stride())
    return moved.copy_(result)


def _is_device(value: object) -> bool:
    """Whether `value` names the CPU or a CUDA device, as scripts do."""
    if isinstance(value, torch.device):
        return value.type in ("cuda", "cpu")
    return isinstance(value, str) and (value == "cpu" or CUDA_NAME.fullmatch(value) is not None)


def _rest(*args: Any, **kwargs: Any) -> None:
    """What waits for the device, or makes the device wait."""
    host_works()


class _Stream:
    """A torch.cuda.Stream, and the context manager that makes it current."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    synchronize = _rest

    def query(self) -> bool:
        return True

    wait_stream = wait_event = _rest

    def record_event(self, event: Any = None) -> Any:
        host_works()
        return event or _Event()


class _Event:
    """A torch.cuda.Event."""

    cuda_event = 1  # 0 is an event that has not been created

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    record = wait = _rest

    synchronize = _rest

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return float("nan")


def _answer_torch(patches: Patches, device: EmulatedDevice) -> None:
    stream = _Stream()
    properties = SimpleNamespace(
        name=device.name,
        major=device.capability[0],
        minor=device.capability[1],
        multi_processor_count=device.multiprocessors,
        total_memory=MEMORY_BYTES,
        L2_cache_size=device.l2_bytes,
        shared_memory_per_block=device.attribute(8),
        shared_memory_per_block_optin=device.shared_bytes,
        shared_memory_per_multiprocessor=device.attribute(81),
        regs_per_multiprocessor=device.attribute(82),
        max_threads_per_multi_processor=device.threads,
        warp_size=32,
    )
    answers = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": device.capability,
        "get_device_name": device.name,
        "get_device_properties": properties,
        "mem_get_info": (MEMORY_BYTES, MEMORY_BYTES),
        "current_stream": stream,
        "default_stream": stream,
        "can_device_access_peer": False,
        **dict.fromkeys(("init", "set_device", "empty_cache", "reset_peak_memory_stats")),
        **dict.fromkeys(("max_memory_allocated", "memory_allocated", "memory_reserved"), 0),
    }
    for name, answer in answers.items():
        patches.attribute(torch.cuda, name, lambda *args, _answer=answer, **kwargs: _answer)
    patches.attribute(torch.cuda, "synchronize", _rest)
    patches.attribute(torch.cuda, "Stream", _Stream)
    patches.attribute(torch.cuda, "ExternalStream", _Stream)
    patches.attribute(torch.cuda, "Event", _Event)
    for context in ("stream", "device", "device_of"):
        patches.attribute(torch.cuda, context, lambda *args, **kwargs: stream)


def _answer_driver(patches: Patches, device: EmulatedDevice) -> None:
    """cuda-python. A function that has no answer here raises instead of telling the script a story."""
    driver, runtime = import_module("cuda.bindings.driver"), import_module("cuda.bindings.runtime")
    memory: dict[int, Any] = {}

    def allocate(size: int, *args: Any) -> int:
        buffer = ctypes.create_string_buffer(max(int(size), 1) + 256)
        address = (ctypes.addressof(buffer) + 255) & ~255
        memory[address] = buffer
        return address

    def free(address: Any, *args: Any) -> None:
        memory.pop(int(address), None)

    def copy(target: Any, source: Any, size: int, *args: Any) -> None:
        host_works()
        ctypes.memmove(int(target), int(source), int(size))

    def fill(address: Any, value: int, size: int, *args: Any) -> None:
        host_works()
        ctypes.memset(int(address), int(value), int(size))

    def fill_words(address: Any, value: int, count: int, *args: Any) -> None:
        host_works()
        ctypes.memmove(int(address), int(value).to_bytes(4, "little") * int(count), 4 * int(count))

    def attribute(number: Any, *args: Any) -> int:
        return device.attribute(int(number))

    def nothing(*args: Any) -> None:
        pass

    both: dict[str, Callable[..., Any]] = {
        "GetDeviceCount": lambda: 1,
        "DeviceGetAttribute": attribute,
        "DriverGetVersion": lambda: 13000,
        "EventElapsedTime": lambda *args: float("nan"),
        "StreamQuery": nothing,
        **dict.fromkeys(("StreamSynchronize", "StreamWaitEvent", "EventRecord", "EventSynchronize"), _rest),
        **dict.fromkeys(("StreamDestroy", "EventDestroy", "EventQuery"), nothing),
        **dict.fromkeys(("ProfilerStart", "ProfilerStop"), nothing),
    }
    of_driver: dict[str, Callable[..., Any]] = {
        **{f"cu{name}": answer for name, answer in both.items()},
        "cuInit": nothing,
        "cuDeviceGetCount": lambda: 1,
        "cuDeviceGet": lambda number: driver.CUdevice(number),
        "cuDeviceGetName": lambda size, *args: device.name.encode().ljust(size, b"\0")[:size],
        "cuDeviceTotalMem": lambda *args: MEMORY_BYTES,
        "cuDeviceComputeCapability": lambda *args: device.capability,
        "cuCtxGetDevice": lambda *args: driver.CUdevice(0),
        **dict.fromkeys(
            ("cuCtxGetCurrent", "cuCtxCreate", "cuDevicePrimaryCtxRetain", "cuCtxPopCurrent"),
            lambda *args: driver.CUcontext(0),
        ),
        **dict.fromkeys(("cuCtxSetCurrent", "cuCtxPushCurrent", "cuCtxDestroy"), nothing),
        "cuCtxSynchronize": _rest,
        "cuDevicePrimaryCtxRelease": nothing,
        "cuStreamCreate": lambda *args: driver.CUstream(0),
        "cuStreamCreateWithPriority": lambda *args: driver.CUstream(0),
        "cuEventCreate": lambda *args: driver.CUevent(0),
        **dict.fromkeys(("cuMemAlloc", "cuMemAllocAsync"), lambda *args: driver.CUdeviceptr(allocate(*args))),
        **dict.fromkeys(("cuMemFree", "cuMemFreeAsync"), free),
        **dict.fromkeys(("cuMemcpy", "cuMemcpyAsync", "cuMemcpyDtoD", "cuMemcpyDtoDAsync"), copy),
        **dict.fromkeys(("cuMemcpyHtoD", "cuMemcpyHtoDAsync", "cuMemcpyDtoH", "cuMemcpyDtoHAsync"), copy),
        **dict.fromkeys(("cuMemsetD8", "cuMemsetD8Async"), fill),
        **dict.fromkeys(("cuMemsetD32", "cuMemsetD32Async"), fill_words),
    }
    of_runtime: dict[str, Callable[..., Any]] = {
        **{f"cuda{name}": answer for name, answer in both.items()},
        **dict.fromkeys(("cudaSetDevice", "cudaGetLastError"), nothing),
        "cudaDeviceSynchronize": _rest,
        "cudaGetDevice": lambda: 0,
        **dict.fromkeys(
            ("cudaStreamCreate", "cudaStreamCreateWithFlags", "cudaStreamCreateWithPriority"),
            lambda *args: runtime.cudaStream_t(0),
        ),
        **dict.fromkeys(("cudaEventCreate", "cudaEventCreateWithFlags"), lambda *args: runtime.cudaEvent_t(0)),
        **dict.fromkeys(("cudaMalloc", "cudaMallocAsync", "cudaMallocHost", "cudaMallocManaged"), allocate),
        **dict.fromkeys(("cudaFree", "cudaFreeAsync", "cudaFreeHost"), free),
        **dict.fromkeys(("cudaMemcpy", "cudaMemcpyAsync"), copy),
        **dict.fromkeys(("cudaMemset", "cudaMemsetAsync"), fill),
    }
    _answer_module(patches, driver, re.compile("cu[A-Z]"), of_driver, driver.CUresult(0))
    _answer_module(patches, runtime, re.compile("cuda[A-Z]"), of_runtime, runtime.cudaError_t(0))


PURE = {"cuGetErrorName", "cuGetErrorString", "cudaGetErrorName", "cudaGetErrorString"}  # answer without a driver


def _answer_module(
    patches: Patches, module: Any, pattern: re.Pattern[str], answers: dict[str, Callable[..., Any]], success: Any
) -> None:
    for name, original in list(vars(module).items()):
        if pattern.match(name) and callable(original) and not isinstance(original, type) and name not in PURE:
            patches.attribute(module, name, _answer(name, answers.get(name), success))


def _answer(name: str, answer: Callable[..., Any] | None, success: Any) -> Callable[..., tuple[Any, ...]]:
    def call(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        if answer is None:
            raise EmulatorError(f"The emulated device does not answer {name}.")
        result = answer(*args, **kwargs)
        if result is None:
            return (success,)
        return (success, *result) if isinstance(result, tuple) else (success, result)

    return call


def _answer_benchmark(patches: Patches) -> None:
    """One call instead of a hundred timed ones."""
    modules = [import_module("cutlass.testing"), import_module("cutlass.cute.testing")]

    def benchmark(
        callable: Callable[..., Any], *, kernel_arguments: Any = None, workspace_generator: Any = None, **options: Any
    ) -> float:
        arguments = kernel_arguments if workspace_generator is None else workspace_generator()
        callable(*arguments.args, **arguments.kwargs)
        return float("nan")

    for module in modules:
        patches.attribute(module, "benchmark", benchmark)
