"""A driver of CUDA devices that are not there: silicon.py's calls, launches by the emulator's engine.

`pytest --gpu -p tests.stand_in_driver` runs the tests of instructions as on a device. Where ptxas is installed it
assembles each text, as a real driver would, and what it refuses is refused.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

from cute_ssd.emulator import engine

from . import silicon
from .bulk_copies import ELEMENTS, encode
from .ptx_runner import compiled

OK = driver.CUresult.CUDA_SUCCESS
ELEMENT_OF = {
    "UINT8": "u8", "UINT16": "u16", "UINT32": "u32", "INT32": "s32", "UINT64": "u64", "INT64": "s64", "FLOAT16": "f16",
    "FLOAT32": "f32", "FLOAT64": "f64", "BFLOAT16": "bf16", "16U4_ALIGN8B": "b4x16",
}  # fmt: skip
STATIC_LIMIT = 48 * 1024  # dynamic shared memory beyond it is asked for


class StandIn:
    """One device. `calls` has the names and arguments; `log` is what its compiler says of the next text, if not None;
    `fails` are errors of calls by name."""

    def __init__(self, capability: tuple[int, int] = (10, 0), devices: int = 1) -> None:
        self.capability, self.devices = capability, devices
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.memory: dict[int, np.ndarray] = {}
        self.dynamic_limit: dict[object, int] = {}
        self.log: str | None = None
        self.fails: dict[str, driver.CUresult] = {}
        self.pending = OK

    def __getattr__(self, name: str) -> Any:
        """Types and constants are the real ones, functions this class's own."""
        if not name.startswith("cu") or name.startswith("cuuint"):
            return getattr(driver, name)
        function = getattr(self, f"_{name}", lambda *_: ())

        def recorded(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, arguments))
            result = self.fails[name] if name in self.fails else function(*arguments)
            return (result,) if isinstance(result, driver.CUresult) else (OK, *result)

        return recorded

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [arguments for called, arguments in self.calls if called == name]

    def _cuDeviceGetCount(self) -> Any:
        return (self.devices,)

    def _cuDeviceGet(self, ordinal: int) -> Any:
        return (driver.CUdevice(ordinal),)

    def _cuDevicePrimaryCtxRetain(self, device: object) -> Any:
        return (driver.CUcontext(),)

    def _cuDeviceGetAttribute(self, attribute: Any, device: object) -> Any:
        return (self.capability[attribute.name.endswith("MINOR")],)

    def _cuModuleLoadDataEx(self, image: bytes, count: int, options: list[Any], values: list[Any]) -> Any:
        text = image.removesuffix(b"\0").decode()
        said = self.log if self.log is not None else assembled(text)
        if not said:
            return (text,)
        log = dict(zip(options, values, strict=True))[driver.CUjit_option.CU_JIT_ERROR_LOG_BUFFER]
        log[: len(said)] = said.encode()
        return driver.CUresult.CUDA_ERROR_INVALID_PTX

    def _cuModuleGetFunction(self, module: str, name: bytes) -> Any:
        return ((module, name.decode()),)

    def _cuFuncSetAttribute(self, function: object, attribute: Any, value: int) -> Any:
        assert attribute == driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.dynamic_limit[function] = value
        return ()

    def _cuMemAlloc(self, size: int) -> Any:
        block = np.full(size, 0xA5, np.uint8)
        self.memory[block.ctypes.data] = block
        return (driver.CUdeviceptr(block.ctypes.data),)

    def _cuMemFree(self, pointer: Any) -> Any:
        del self.memory[int(pointer)]
        return ()

    def _within(self, address: int, size: int) -> int:
        inside = (b.ctypes.data <= address and address + size <= b.ctypes.data + b.nbytes for b in self.memory.values())
        assert any(inside), "no such device memory"
        return address

    def _cuMemcpyHtoD(self, target: int, source: bytes, size: int) -> Any:
        ctypes.memmove(self._within(target, size), source, size)
        return ()

    def _cuMemcpyDtoH(self, target: bytearray, source: int, size: int) -> Any:
        target[:] = ctypes.string_at(self._within(source, size), size)
        return ()

    def _cuTensorMapEncodeTiled(
        self, kind: Any, rank: int, address: int, sizes: Any, strides: Any, box: Any, steps: Any, *rest: Any
    ) -> Any:
        interleave, swizzle, promotion, fill = map(int, rest)
        assert (interleave, promotion, fill) == (0, 0, 0) and [int(n) for n in steps] == [1] * rank
        element = ELEMENT_OF[kind.name.removeprefix("CU_TENSOR_MAP_DATA_TYPE_")]
        lists = [tuple(map(int, values)) for values in (sizes, strides[: rank - 1], box)]
        made = driver.CUtensorMap()
        words = np.frombuffer(encode(address, ELEMENTS[element][1], *lists, swizzle), np.uint64)
        made.opaque = [driver.cuuint64_t(int(word)) for word in words]
        return (made,)

    def _cuLaunchKernelEx(self, config: Any, function: tuple[str, str], parameters: int, extra: int) -> Any:
        if config.sharedMemBytes > max(STATIC_LIMIT, self.dynamic_limit.get(function, 0)):
            return driver.CUresult.CUDA_ERROR_INVALID_VALUE
        keys = ctypes.cast(extra, ctypes.POINTER(ctypes.c_void_p))
        assert (keys[0], keys[2], keys[4]) == (1, 2, None) and not parameters
        size = ctypes.cast(keys[3] or 0, ctypes.POINTER(ctypes.c_size_t))[0]
        cluster = (1, 1, 1)
        for attribute in config.attrs[: config.numAttrs]:
            assert attribute.id == driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dim = attribute.value.clusterDim
            cluster = (dim.x, dim.y, dim.z)
        outcome = engine.run(
            compiled(*function),
            (config.gridDimX, config.gridDimY, config.gridDimZ),
            (config.blockDimX, config.blockDimY, config.blockDimZ),
            cluster,
            config.sharedMemBytes,
            ctypes.string_at(keys[1] or 0, size),
            [(address, address + block.nbytes) for address, block in self.memory.items()],
            engine.Options(sanitize=False, threads=1),
        )
        if outcome.events:
            self.pending = driver.CUresult.CUDA_ERROR_LAUNCH_FAILED
        return ()

    def _cuCtxSynchronize(self) -> Any:
        status, self.pending = self.pending, OK
        return status if status else ()


def assembled(text: str) -> str:
    """ptxas's errors; none where there is no ptxas."""
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        return ""
    target = text.split(".target", 1)[1].split()[0]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "text.ptx"
        source.write_text(text)
        command = [ptxas, "-arch", target, "-O0", str(source), "-o", str(source.with_suffix(".cubin"))]
        done = subprocess.run(command, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr or f"ptxas exits with {done.returncode}"


def install(patch: pytest.MonkeyPatch, device: StandIn) -> None:
    for cached in (silicon.architecture, silicon.function):
        cached.cache_clear()
    patch.setattr(silicon, "driver", device)
    patch.setattr(silicon.Device, "started", lambda _: ThreadPool(1))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    patch = pytest.MonkeyPatch()
    install(patch, StandIn())
    config.add_cleanup(patch.undo)
