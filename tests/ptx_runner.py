"""Runs hand-written PTX: the tests of instructions build on it.

On the emulator's engine; with --gpu the tests of the marker `silicon` once more on a CUDA device (silicon.py).
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from cute_ssd.emulator import engine
from cute_ssd.emulator.decode import Program, decode
from cute_ssd.emulator.pointers import Pointers
from cute_ssd.emulator.ptx import parse_kernel

HEADER = ".version 8.8\n.target sm_100a\n.address_size 64\n"

device_launch: Callable[..., None] | None = None
"""How a launch is done on a CUDA device, where the fixture `executor` puts this test on one."""


def on_silicon() -> bool:
    return device_launch is not None


def bound(*, ours: float, documented: float) -> float:
    """Of an error: the emulator is held to its own, a device to what the PTX ISA says of the instruction."""
    return documented if on_silicon() else ours


@dataclass
class Pointer:
    """A device pointer into an array that is not a parameter of its own (its memory is known to the bounds check)."""

    array: np.ndarray
    offset: int = 0


class TensorMap(bytes):
    """A tensor map as the hardware holds it, and what it describes: a device's own is made from that by its driver.

    Dimension 0 first; `strides` in bytes, from dimension 1 on; `element` and `swizzle` as PTX's tensormap.replace
    counts them, but 4 is the 128-byte swizzle with 32-byte atoms.
    """

    address: int
    element: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


def pack(args: tuple[object, ...]) -> tuple[bytes, list[tuple[int, int]]]:
    """Parameters (arrays become pointers, ints 32-bit, np.uint64 64-bit, bytes 64-byte aligned blobs) and the known
    memory ranges."""
    args = tuple(Pointer(arg) if isinstance(arg, np.ndarray) else arg for arg in args)
    arrays = [(arg.array.ctypes.data, arg.array.nbytes) for arg in args if isinstance(arg, Pointer)]
    pointers = Pointers(arrays, views=arrays)
    params = b""
    for arg in args:
        if isinstance(arg, Pointer):
            arg = np.uint64(arg.array.ctypes.data + arg.offset)
        if isinstance(arg, np.uint64):
            value, align = arg.tobytes(), 8
        elif isinstance(arg, bytes):
            value, align = arg, 64
        elif isinstance(arg, float):
            value, align = struct.pack("<f", arg), 4
        else:
            value, align = struct.pack("<I", int(arg) & 0xFFFFFFFF), 4  # type: ignore[call-overload]
        params = params.ljust(-(-len(params) // align) * align, b"\0") + pointers.numbered(value)
    return params, [*((begin, begin + nbytes) for begin, nbytes in arrays), *pointers.ranges]


@functools.lru_cache(maxsize=64)
def compiled(text: str, name: str) -> Program:
    return decode(parse_kernel(text, name), engine.handlers())


def run(
    text: str,
    *args: object,
    grid=(1, 1, 1),
    block=(32, 1, 1),
    cluster=(1, 1, 1),
    shared=0,
    name="k",
    sanitize=False,
    schedule="eager",
    seed=0,
    threads=1,
    check=True,
) -> engine.Outcome:
    """Launches `.entry k` of a PTX text (the header is added). With `check` any event is an AssertionError.

    What the emulator refuses is refused on a device too, so that a test of that means the same on both.
    """
    text = text if ".version" in text else HEADER + text
    program = compiled(text, name)
    if device_launch is not None:
        if not check:
            pytest.skip("about findings: a device reports none")
        device_launch(text, name, args, tuple(grid), tuple(block), tuple(cluster), shared=shared)
        return engine.Outcome([], np.zeros(0, np.uint64), [], 0)
    params, ranges = pack(args)
    options = engine.Options(schedule=schedule, seed=seed, sanitize=sanitize, threads=threads)
    outcome = engine.run(program, grid, block, cluster, shared, params, ranges, options)
    if check:
        assert not outcome.events, outcome.events
    return outcome


def elementwise(instructions: str, inputs: list[np.ndarray], out_dtype: np.dtype, **options: object) -> np.ndarray:
    """Applies PTX to vectors: element i of input k sits in `%in<k>`, the result is taken from `%out`.

    Registers: `%in<k>` and `%out` are .b16/.b32/.b64 by item size (8-bit items sit in .b16); the snippet may declare
    more in its own braces. The number of elements may be anything; a thread handles one.
    """
    n = len(inputs[0])
    kind = {1: "b16", 2: "b16", 4: "b32", 8: "b64"}
    load = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}
    out = np.zeros(n, out_dtype)
    declare = [f".reg .{kind[a.itemsize]} %in{k};" for k, a in enumerate(inputs)]
    declare.append(f".reg .{kind[out.itemsize]} %out;")
    params = ", ".join(f".param .u64 p{k}" for k in range(len(inputs) + 1)) + ", .param .u32 n"
    body = [
        "mov.u32 %t, %tid.x; mov.u32 %c, %ctaid.x; mad.lo.s32 %i, %c, 256, %t;",
        "ld.param.u32 %n, [n]; setp.ge.u32 %p, %i, %n; @%p ret;",
    ]
    for k, a in enumerate([*inputs, out]):
        if a is out:
            body.append("{ " + instructions + " }")
        access = "st.global.{} [%a], %out;" if a is out else "ld.global.{} %in" + str(k) + ", [%a];"
        body.append(f"ld.param.u64 %a, [p{k}]; mad.wide.u32 %a, %i, {a.itemsize}, %a;")
        body.append(access.format(load[a.itemsize]))
    text = (
        f".visible .entry k({params}) {{ .reg .pred %p; .reg .b32 %t, %c, %i, %n; .reg .b64 %a; {' '.join(declare)}\n"
        + "\n".join(body)
        + "\nret; }"
    )
    arrays = [np.ascontiguousarray(a) for a in inputs]
    run(text, *arrays, out, n, grid=(-(-n // 256), 1, 1), block=(256, 1, 1), **options)  # type: ignore[arg-type]
    return out
