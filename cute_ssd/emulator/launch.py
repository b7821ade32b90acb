"""The fake CUDA runtime: what a compiled host function hands over when it loads and launches a kernel.

Note [Images]: a host function carries its kernels as machine code, and the emulator needs their PTX. Names do not tell
which PTX it is, since two compiles that differ in a constexpr share them. So a compile inside a session also keeps the
machine code, and `FakeRuntime.add_image` files the PTX under its hash; when a host function loads an image, the hash of
the machine code in it finds the PTX again. Equal machine code under two PTX texts would be the same program.
"""

import ctypes
import functools
import hashlib
import os
import re
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..device import KNOWN_ARCHS
from ..errors import ShapeError
from .build import EmulatorError, shared_library
from .report import short_name

Dim3 = tuple[int, int, int]

LAUNCH_FAILURE = 719  # cudaErrorLaunchFailure
MAX_CLUSTER = 16  # CTAs, with the non-portable sizes that every CuTe DSL kernel allows itself
ATTRIBUTE_BYTES, ATTRIBUTE_VALUE = 72, 8  # sizeof(cudaLaunchAttribute), offset of its value
COOPERATIVE, CLUSTER_DIMENSION, PROGRAMMATIC_SERIALIZATION = 2, 4, 6  # cudaLaunchAttributeID


ANSWERED = {
    name: name.replace("cuda", "emul") if "cuda" in name else name.replace("cu", "em")
    for name in (
        *("_cudaLibraryLoadData", "_cudaLibraryGetKernel", "_cudaLaunchKernelEx", "_cudaLaunchKernel"),
        *("_cuKernelGetAttribute", "_cudaFuncSetAttribute", "_cudaKernelSetAttributeForDevice"),
        *("_cudaDeviceGetAttribute", "_cudaGetDevice", "_cudaSetDevice", "_cudaGetDeviceCount"),
        *("_cudaDeviceSynchronize", "_cudaStreamSynchronize", "_cuTensorMapEncodeTiled"),
        *("cuda_dialect_init_library_once", "cuda_dialect_unload_library_once"),
    )
}
"""What a host function calls, and the shim's name for it. They are equally long, so that an object file can be told."""


class EmulatedDevice(NamedTuple):
    """What programs ask of a device before they launch anything; figures of the largest common part of each arch."""

    arch: str
    name: str
    multiprocessors: int
    shared_bytes: int  # per CTA, after the opt-in that every CuTe DSL kernel makes
    l2_bytes: int
    threads: int  # resident per multiprocessor

    @classmethod
    def of(cls, arch: str) -> "EmulatedDevice":
        same = _SAME_DEVICE.get(arch, arch)
        if same not in _DEVICES:
            raise ShapeError(f"arch is {arch!r}, expected one of {', '.join(KNOWN_ARCHS)}.")
        return cls(arch, *_DEVICES[same])

    @property
    def capability(self) -> tuple[int, int]:
        digits = self.arch.removeprefix("sm_").rstrip("af")
        return int(digits[:-1]), int(digits[-1])

    def attribute(self, number: int) -> int:
        """The value of a cudaDevAttr, numbered as CUdevice_attribute is."""
        major, minor = self.capability
        values = {
            **{1: 1024, 2: 1024, 3: 1024, 4: 64},  # threads per CTA, and in x, y, z
            **{5: 2**31 - 1, 6: 65535, 7: 65535},  # CTAs in x, y, z
            8: 49152,  # shared memory per CTA without opt-in
            9: 65536,  # constant memory
            10: 32,  # warp size
            12: 65536,  # registers per CTA
            13: 1_500_000,  # clock in kHz
            16: self.multiprocessors,
            38: self.l2_bytes,
            39: self.threads,
            41: 1,  # unified addressing
            75: major,
            76: minor,
            81: self.shared_bytes + 1024,  # shared memory per multiprocessor; each CTA reserves 1 KB of it
            82: 65536,  # registers per multiprocessor
            95: 1,  # cooperative launch
            97: self.shared_bytes,
            106: 32 if self.threads == 2048 else 24,  # resident CTAs per multiprocessor
            111: 1024,  # reserved shared memory per CTA
            120: int(major >= 9),  # clusters
        }
        if number not in values:
            raise EmulatorError(f"The emulated device has no value for device attribute {number}.")
        return values[number]


_DEVICES = {
    "sm_80": ("NVIDIA A100 (emulated)", 108, 166912, 40 << 20, 2048),
    "sm_86": ("NVIDIA A40 (emulated)", 84, 101376, 6 << 20, 1536),
    "sm_89": ("NVIDIA L40S (emulated)", 142, 101376, 96 << 20, 1536),
    "sm_90a": ("NVIDIA H100 (emulated)", 132, 232448, 50 << 20, 2048),
    "sm_100a": ("NVIDIA B200 (emulated)", 148, 232448, 126 << 20, 2048),
    "sm_103a": ("NVIDIA B300 (emulated)", 148, 232448, 126 << 20, 2048),
    "sm_120a": ("NVIDIA GeForce RTX 5090 (emulated)", 170, 101376, 96 << 20, 1536),
}

_SAME_DEVICE = {
    "sm_90": "sm_90a",
    **{f"sm_{number}{suffix}": f"sm_{number}a" for number in (100, 103, 120) for suffix in ("", "f")},
}
"""Targets without the instructions that only one architecture, or one family, has: the device is the same."""


@dataclass
class KernelLaunch:
    """One launch, as the host function asked for it; `parameter` works only until `run` returns.

    `tensors` are (address, bytes) of the whole storages that the call was given, so that views and strided tensors lie
    inside: those of tensor arguments, and those of live torch tensors that an address among the arguments points into,
    also an address stored in an integer tensor (an array of pointers). An argument object of the user's own that
    builds its descriptors itself is not seen. `views` are (address, bytes) of the tensor arguments themselves, from
    the first element to the last, without those whose address the call was also given bare. With `unknown_extents` an
    address was given that lies in no known tensor, so that an access outside of `tensors` proves nothing.

    `follows`: the launch before it is the last thing before it in the stream, as far as is known (`Client.follows`).
    """

    kernel_name: str
    ptx: str
    grid: Dim3
    block: Dim3
    cluster: Dim3
    shared_bytes: int
    programmatic: bool
    follows: bool = False
    cooperative: bool = False
    tensors: list[tuple[int, int]] = field(default_factory=list)
    views: list[tuple[int, int]] = field(default_factory=list)
    unknown_extents: bool = False
    machine_code: bytes = field(default=b"", repr=False)
    _parameters: Any = field(default=None, repr=False)

    def parameter(self, index: int, size: int) -> bytes:
        """The first `size` bytes of a kernel parameter; how many there are stands in the PTX."""
        if self._parameters is None:
            raise EmulatorError(
                f"The parameters of {short_name(self.kernel_name)} are gone: they live as long as its launch."
            )
        return ctypes.string_at(self._parameters[index], size)


class Image(NamedTuple):
    ptx: str
    arch: str
    machine_code: bytes = b""


class Client(threading.local):
    """The session that the runtime works for, in each thread that calls host functions.

    `tensors`, `views`, `unknown_extents`: see KernelLaunch; of the present call. `follows`: since the last launch the
    host has done nothing that would keep the next one apart from it. `failure` is what happened inside a callback,
    where nothing can be raised through the C frames of the host function; the session raises it when they have
    returned.
    """

    def __init__(self, device: EmulatedDevice, run: Callable[[KernelLaunch], None]) -> None:
        self.device, self.run = device, run
        self.tensors: list[tuple[int, int]] = []
        self.views: list[tuple[int, int]] = []
        self.unknown_extents = self.follows = False
        self.failure: BaseException | None = None


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint32),
    )


_LOAD = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)
_GET_KERNEL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, ctypes.c_char_p)
_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(_LaunchConfig), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
)
_ATTRIBUTE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.c_int)


class _Callbacks(ctypes.Structure):
    _fields_ = (("load", _LOAD), ("get_kernel", _GET_KERNEL), ("launch", _LAUNCH), ("attribute", _ATTRIBUTE))


class FakeRuntime:
    """What the shim's entry points do. There is one per process, because a library is loaded once and host functions
    keep the handles of libraries and kernels they were given for as long as they live, across sessions."""

    def __init__(self) -> None:
        compilers = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
        self.library = shared_library(
            "shim", [Path(__file__).with_name("shim.c")], ["-O1", "-std=c11", "-Wall", "-Wextra"], compilers
        )
        self.client: Client | None = None
        self._stream = threading.Lock()  # all launches go into one stream, also those of several threads
        self._images: dict[bytes, Image] = {}
        # Handles are one more than an index, as null is no handle.
        self._libraries: list[Image] = []
        self._kernels: list[tuple[Image, str]] = []
        self._callbacks = _Callbacks(
            _LOAD(functools.partial(self._enter, self._load_library)),
            _GET_KERNEL(functools.partial(self._enter, self._get_kernel)),
            _LAUNCH(functools.partial(self._enter, self._launch)),
            _ATTRIBUTE(functools.partial(self._enter, self._device_attribute)),
        )
        shim = ctypes.CDLL(str(self.library))
        shim.cute_ssd_set_callbacks(ctypes.byref(self._callbacks))
        self.symbols = {name: ctypes.cast(getattr(shim, answer), ctypes.c_void_p) for name, answer in ANSWERED.items()}

    def add_image(self, machine_code: bytes, image: Image) -> None:
        self._images[hashlib.sha256(machine_code).digest()] = image._replace(machine_code=machine_code)

    def _enter(self, callback: Callable[..., None], *arguments: Any) -> int:
        client = self.client
        if client is None:
            return 100  # cudaErrorNoDevice, as the shim itself says
        if client.failure is not None:  # the host function has not looked at the status of the call before
            return LAUNCH_FAILURE
        try:
            callback(client, *arguments)
        except BaseException as error:
            client.failure = error
            return LAUNCH_FAILURE
        return 0

    def _load_library(self, client: Client, library: Any, address: int) -> None:
        image = self._images.get(hashlib.sha256(_machine_code(address)).digest())
        if image is None:
            raise EmulatorError("A kernel was loaded whose PTX is not known: compile it inside the emulator's session.")
        self._libraries.append(image)
        library[0] = len(self._libraries)

    def _get_kernel(self, client: Client, kernel: Any, library: int, name: bytes) -> None:
        image, kernel_name = self._libraries[library - 1], name.decode()
        if not re.search(rf"\.entry\s+{re.escape(kernel_name)}\s*\(", image.ptx):
            raise EmulatorError(f"The kept PTX has no kernel {kernel_name}, which its host function launches.")
        self._kernels.append((image, kernel_name))
        kernel[0] = len(self._kernels)

    def _launch(self, client: Client, config_pointer: Any, kernel: int, parameters: Any) -> None:
        image, name = self._kernels[kernel - 1]
        if not runs_on(image.arch, client.device.arch):
            raise EmulatorError(
                f"Kernel {short_name(name)} was compiled for {image.arch}, not for the emulated {client.device.arch}."
            )
        config = config_pointer.contents
        attributes = _launch_attributes(config)
        launch = KernelLaunch(
            kernel_name=name,
            ptx=image.ptx,
            grid=_dim3(config.grid),
            block=_dim3(config.block),
            cluster=struct.unpack_from("<III", attributes.get(CLUSTER_DIMENSION, struct.pack("<III", 1, 1, 1))),
            shared_bytes=config.shared_bytes,
            programmatic=any(attributes.get(PROGRAMMATIC_SERIALIZATION, b"")[:4]),
            follows=client.follows,
            cooperative=any(attributes.get(COOPERATIVE, b"")[:4]),
            tensors=list(client.tensors),
            views=list(client.views),
            unknown_extents=client.unknown_extents,
            machine_code=image.machine_code,
            _parameters=parameters,
        )
        _check_geometry(launch, client.device)
        client.follows = True
        try:
            with self._stream:
                client.run(launch)
        finally:
            launch._parameters = None

    def _device_attribute(self, client: Client, value: Any, attribute: int) -> None:
        value[0] = client.device.attribute(attribute)


def redirected(object_file: bytes) -> bytes:
    """A compiled host function that calls the shim and nothing else of these names that the process may have loaded."""
    for name, answer in ANSWERED.items():
        object_file = object_file.replace(b"\0%s\0" % name.encode(), b"\0%s\0" % answer.encode())
    return object_file


@functools.cache
def runtime() -> FakeRuntime:
    return FakeRuntime()


def runs_on(built: str, emulated: str) -> bool:
    """Whether machine code for `built` runs on `emulated`: the same or, if built for a family, a later member."""
    return built == emulated or (built[-1] == "f" and built[:-2] == emulated[:-2] and built[-2] <= emulated[-2])


def _dim3(values: Any) -> Dim3:
    x, y, z = values
    return x, y, z


def _launch_attributes(config: _LaunchConfig) -> dict[int, bytes]:
    attributes = {}
    for index in range(config.attribute_count):
        raw = ctypes.string_at(config.attributes + index * ATTRIBUTE_BYTES, ATTRIBUTE_BYTES)
        attributes[int.from_bytes(raw[:4], "little")] = raw[ATTRIBUTE_VALUE:]
    return attributes


def _check_geometry(launch: KernelLaunch, device: EmulatedDevice) -> None:
    """Refuses what the driver refuses with no more than "invalid argument"."""
    limits = [device.attribute(number) for number in range(2, 8)]
    sizes = [*launch.block, *launch.grid]
    cluster = launch.cluster[0] * launch.cluster[1] * launch.cluster[2]
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    problem = ""
    if any(not 0 < size <= limit for size, limit in zip(sizes, limits, strict=True)) or threads > 1024:
        problem = "a size is 0 or too large"
    elif not 0 < cluster <= (MAX_CLUSTER if device.attribute(120) else 1):
        problem = f"{device.arch} has no clusters of {cluster} CTAs"
    elif any(size % part for size, part in zip(launch.grid, launch.cluster, strict=True)):
        problem = "the grid is not a multiple of the cluster"
    elif launch.shared_bytes > device.shared_bytes:
        problem = f"a CTA has at most {device.shared_bytes} bytes of shared memory on {device.arch}"
    if problem:
        raise EmulatorError(
            f"Kernel {short_name(launch.kernel_name)} cannot be launched with grid {launch.grid}, block {launch.block},"
            f" cluster {launch.cluster} and {launch.shared_bytes} bytes of shared memory: {problem}."
        )


def _machine_code(address: int) -> bytes:
    """The ELF file in the image that a host function holds: a fat binary of one entry, uncompressed."""
    magic, _, header_bytes, content_bytes = struct.unpack("<IHHQ", ctypes.string_at(address, 16))
    if magic != 0xBA55ED50:
        raise EmulatorError(f"A kernel image starts with {magic:#x}, which is not a fat binary.")
    entry = address + header_bytes
    _, _, entry_header, entry_bytes = struct.unpack("<HHIQ", ctypes.string_at(entry, 16))
    if entry_header + entry_bytes > content_bytes:
        raise EmulatorError("A kernel image is a fat binary whose first entry is larger than the whole.")
    return ctypes.string_at(entry + entry_header, entry_bytes)
