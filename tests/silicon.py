"""Launches PTX on a CUDA device through its driver: what ptx_runner.py does on the emulator's engine.

A launch is a `Job` that a process of its own executes: after a fault nothing more runs in a CUDA process, and a kernel
that hangs can only be killed with it. The tests after it get a new one.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import multiprocessing.pool
import re
from dataclasses import dataclass

import numpy as np
import pytest
from cuda.bindings import driver  # comes with the CuTe DSL

from .ptx_runner import Pointer, TensorMap, pack

SECONDS = 60.0
"""For a launch with its compilation; far more than any test needs."""


class DeviceError(AssertionError):
    """The driver refuses a call, or the kernel fails or does not end."""


class NotOnThisDevice(Exception):
    """The device's architecture lacks what the test needs."""


# ---- what goes to the process ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Address:
    """Byte `offset` of the job's memory `index`."""

    index: int
    offset: int


@dataclass(frozen=True)
class Tile:
    """A tensor map of the job's memory."""

    address: Address
    description: TensorMap


@dataclass(frozen=True)
class Memory:
    """Bytes of the host, and their address there: on the device it is the same modulo 1024."""

    begin: int
    data: bytes

    @property
    def end(self) -> int:
        return self.begin + len(self.data)


@dataclass(frozen=True)
class Job:
    text: str
    name: str
    parameters: tuple[object, ...]  # as `pack` takes them, but `Address` and `Tile`
    memories: tuple[Memory, ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared: int


def whole(array: np.ndarray) -> tuple[int, int]:
    """[begin, end) of the allocation that an array is a view of: arrays that alias lie in the same."""
    owner: object = array
    while owner is not None:  # strided views have owners that are no arrays, between them and one
        array = owner if isinstance(owner, np.ndarray) else array
        owner = getattr(owner, "base", None)
    return np.lib.array_utils.byte_bounds(array)


def job_of(text: str, name: str, args: tuple[object, ...], *sizes: tuple[int, int, int], shared: int) -> Job:
    pointers = [Pointer(arg) if isinstance(arg, np.ndarray) else arg for arg in args]
    spans = sorted({whole(arg.array) for arg in pointers if isinstance(arg, Pointer)})
    memories = tuple(Memory(begin, ctypes.string_at(begin, end - begin)) for begin, end in spans)

    def placed(address: int) -> Address:
        for index, memory in enumerate(memories):
            if memory.begin <= address < memory.end or address == memory.begin:
                return Address(index, address - memory.begin)
        raise ValueError(f"address {address:#x} is in no array of the call: pass the array it belongs to")

    def parameter(arg: object) -> object:
        if isinstance(arg, Pointer):
            return placed(arg.array.ctypes.data + arg.offset)
        return Tile(placed(arg.address), arg) if isinstance(arg, TensorMap) else arg

    return Job(text, name, tuple(map(parameter, pointers)), memories, *sizes, shared)


# ---- in the process --------------------------------------------------------------------------------------------------

_FEATURE = re.compile(r"not supported on \.target|requires \.target|, for arch '")
_TILE_TYPES = (*range(8), 10, 8, 9, 11, 12, 13, 14, 15)
"""PTX's numbers of tensor maps' elements have f32.ftz in the middle; the driver has it behind bf16."""


def call(name: str, *arguments: object) -> object:
    status, *values = getattr(driver, name)(*arguments)
    if status:
        raise DeviceError(f"{name}: {status.name}")
    return values[0] if values else None


@functools.cache
def architecture() -> str:
    """Of device 0, whose context becomes current; with its own instructions where the architecture has some."""
    call("cuInit", 0)
    device = call("cuDeviceGet", 0)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", device))
    attribute = driver.CUdevice_attribute
    major = call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
    minor = call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


@functools.lru_cache(maxsize=64)
def function(text: str, name: str) -> object:
    """Compiled for this device, whatever the text's own target."""
    image = re.sub(r"(?m)^(\s*\.target\s+)\w+", rf"\g<1>{architecture()}", text).encode() + b"\0"
    log, option = bytearray(1 << 14), driver.CUjit_option
    options = {option.CU_JIT_ERROR_LOG_BUFFER: log, option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES: len(log)}
    status, *module = driver.cuModuleLoadDataEx(image, len(options), list(options), list(options.values()))
    if status:
        said = log.rstrip(b"\0").decode(errors="replace").strip()
        if missing := [line for line in said.splitlines() if _FEATURE.search(line)]:
            raise NotOnThisDevice(f"{architecture()}: {missing[0].split('; ')[-1]}")
        raise DeviceError(f"cuModuleLoadDataEx for {architecture()}: {status.name}\n{said}")
    return call("cuModuleGetFunction", *module, name.encode())


def tensor_map(tile: TensorMap, address: int) -> bytes:
    """The driver's own, of the same description."""
    if (tile.element > 12 or tile.swizzle > 3) and int(re.sub(r"\D", "", architecture())) < 100:
        raise NotOnThisDevice(f"{architecture()}: tensor maps of elements {tile.element} and swizzle {tile.swizzle}")
    rank, small = len(tile.sizes), driver.cuuint32_t
    made = call(
        "cuTensorMapEncodeTiled",
        driver.CUtensorMapDataType(_TILE_TYPES[tile.element]),
        rank,
        address,
        [driver.cuuint64_t(n) for n in tile.sizes],
        [driver.cuuint64_t(n) for n in tile.strides or (16,)],  # of rank 1: not read
        [small(n) for n in tile.box],
        [small(1)] * rank,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle(tile.swizzle),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return np.array([int(word) for word in made.opaque], np.uint64).tobytes()  # type: ignore[attr-defined]


def execute(job: Job) -> list[bytes]:
    """What the memories hold after the launch."""
    with contextlib.ExitStack() as allocated:
        return _execute(job, allocated)


def _execute(job: Job, allocated: contextlib.ExitStack) -> list[bytes]:
    kernel = function(job.text, job.name)
    begins = []
    for memory in job.memories:
        block = call("cuMemAlloc", len(memory.data) + 1024)
        allocated.callback(driver.cuMemFree, block)
        begins.append(int(block) + (memory.begin - int(block)) % 1024)  # type: ignore[call-overload]
        call("cuMemcpyHtoD", begins[-1], memory.data, len(memory.data))

    def parameter(arg: object) -> object:
        if isinstance(arg, Address):
            return np.uint64(begins[arg.index] + arg.offset)
        if isinstance(arg, Tile):
            return tensor_map(arg.description, begins[arg.address.index] + arg.address.offset)
        return arg

    parameters, _ = pack(tuple(map(parameter, job.parameters)))
    if job.shared:
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call("cuFuncSetAttribute", kernel, limit, job.shared)
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = job.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = job.block
    config.sharedMemBytes = job.shared
    if job.cluster != (1, 1, 1):  # an attribute that devices before sm_90 do not know
        attribute, size = driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
        size.clusterDim.x, size.clusterDim.y, size.clusterDim.z = job.cluster
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value = size
        config.attrs, config.numAttrs = [attribute], 1
    values, size_of = ctypes.create_string_buffer(parameters, len(parameters)), ctypes.c_size_t(len(parameters))
    extra = (ctypes.c_void_p * 5)(  # the parameters as one buffer, laid out as the kernel declares them
        driver.CU_LAUNCH_PARAM_BUFFER_POINTER_AS_INT, ctypes.addressof(values),
        driver.CU_LAUNCH_PARAM_BUFFER_SIZE_AS_INT, ctypes.addressof(size_of),
        driver.CU_LAUNCH_PARAM_END_AS_INT,
    )  # fmt: skip
    call("cuLaunchKernelEx", config, kernel, 0, ctypes.addressof(extra))
    call("cuCtxSynchronize")
    after = [bytearray(len(memory.data)) for memory in job.memories]
    for begin, data in zip(begins, after, strict=True):
        call("cuMemcpyDtoH", data, begin, len(data))
    return list(map(bytes, after))


# ---- in the tests' process -------------------------------------------------------------------------------------------


class Device:
    """CUDA device 0 and the process that works on it, which is started when it is needed."""

    def __init__(self) -> None:
        self.launches = 0
        self.process: multiprocessing.pool.Pool | None = None

    def started(self) -> multiprocessing.pool.Pool:
        return multiprocessing.get_context("spawn").Pool(1)

    def end(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.join()
        self.process = None

    def launch(self, text: str, name: str, args: tuple[object, ...], *sizes: tuple[int, int, int], shared: int) -> None:
        """Executes `text` on the device; the arrays hold its results afterwards. Skips the test where the device's
        architecture does not have what it needs."""
        wanted = job_of(text, name, args, *sizes, shared=shared)
        self.process = self.process or self.started()
        try:
            after = self.process.apply_async(execute, (wanted,)).get(SECONDS)
        except multiprocessing.TimeoutError:
            self.end()
            raise DeviceError(f"the kernel has not ended after {SECONDS:.0f} s, or its process died") from None
        except DeviceError:
            self.end()
            raise
        except NotOnThisDevice as error:
            pytest.skip(str(error))
        self.launches += 1
        for memory, data in zip(wanted.memories, after, strict=True):
            if data != memory.data:  # constants may lie in memory that cannot be written
                ctypes.memmove(memory.begin, data, len(data))


def problem() -> str | None:
    """Why --gpu cannot work here."""
    remedy = "install NVIDIA's driver and let the process see a device, or leave --gpu or -m gpu away"
    try:
        call("cuInit", 0)
        count = call("cuDeviceGetCount")
    except DeviceError as error:
        return f"--gpu: {error}, expected a CUDA device: {remedy}"
    except RuntimeError:  # what cuda.bindings raises where it cannot load the library
        return f"--gpu: libcuda.so.1 cannot be loaded, expected the driver of a CUDA device: {remedy}"
    return None if count else f"--gpu: there are 0 CUDA devices, expected one: {remedy}"
