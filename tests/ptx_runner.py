"""Runs hand-written PTX on the emulator's engine: the tests of instructions build on it."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from cute_ssd.emulator import engine
from cute_ssd.emulator.decode import decode
from cute_ssd.emulator.ptx import parse_kernel

HEADER = ".version 8.8\n.target sm_100a\n.address_size 64\n"


@dataclass
class Pointer:
    """A device pointer into an array that is not a parameter of its own (its memory is known to the bounds check)."""

    array: np.ndarray
    offset: int = 0


def pack(args: tuple[object, ...]) -> tuple[bytes, list[tuple[int, int]]]:
    """Parameters (arrays become pointers, ints 32-bit, bytes 64-byte aligned blobs) and the known memory ranges."""
    params, ranges = b"", []
    for arg in args:
        if isinstance(arg, np.ndarray):
            arg = Pointer(arg)
        if isinstance(arg, Pointer):
            begin = arg.array.ctypes.data
            ranges.append((begin, begin + arg.array.nbytes))
            value, align = struct.pack("<Q", begin + arg.offset), 8
        elif isinstance(arg, bytes):
            value, align = arg, 64
        elif isinstance(arg, float):
            value, align = struct.pack("<f", arg), 4
        else:
            value, align = struct.pack("<I", int(arg) & 0xFFFFFFFF), 4  # type: ignore[call-overload]
        params = params.ljust(-(-len(params) // align) * align, b"\0") + value
    return params, ranges


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
    """Launches `.entry k` of a PTX text (the header is added). With `check` any event is an AssertionError."""
    text = text if ".version" in text else HEADER + text
    program = decode(parse_kernel(text, name), engine.handlers())
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
