"""The C++ engine: built on first use, called with a decoded program and a launch. Only here Python meets C++."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from .build import shared_library
from .program import RECORD, Program
from .report import short_name

SOURCES = Path(__file__).parent / "engine"
# Strict IEEE: no -ffast-math. -fno-math-errno and -fno-trapping-math let loops over lanes vectorise without changing
# a result.
FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-pthread")

SCHEDULES = {"eager": 0, "late": 1, "priority": 2}


class _Program(ctypes.Structure):
    _fields_ = (
        ("records", ctypes.c_void_p),
        ("nrecords", ctypes.c_int32),
        ("pool", ctypes.c_void_p),
        ("nslots", ctypes.c_int32),
        ("npredicates", ctypes.c_int32),
        ("initial", ctypes.c_void_p),
        ("constant", ctypes.c_void_p),
        ("specials", ctypes.c_void_p),
        ("nspecials", ctypes.c_int32),
        ("shared_symbols", ctypes.c_void_p),
        ("nshared_symbols", ctypes.c_int32),
        ("param_symbols", ctypes.c_void_p),
        ("nparam_symbols", ctypes.c_int32),
        ("local_bytes", ctypes.c_int32),
    )


class _Options(ctypes.Structure):
    _fields_ = (
        ("schedule", ctypes.c_int32),
        ("sanitize", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
        ("threads", ctypes.c_int32),
        ("implicit_waits", ctypes.c_int32),
        ("tensor_fences", ctypes.c_int32),
        ("time_limit", ctypes.c_double),
        ("traced", ctypes.c_void_p),
        ("ntraced", ctypes.c_int32),
        ("only_traced", ctypes.c_int32),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_int32 * 3),
        ("block", ctypes.c_int32 * 3),
        ("cluster", ctypes.c_int32 * 3),
        ("shared_bytes", ctypes.c_int32),
        ("dynamic_bytes", ctypes.c_int32),
        ("params", ctypes.c_void_p),
        ("ranges", ctypes.c_void_p),
        ("nranges", ctypes.c_int32),
        ("sm_version", ctypes.c_int32),
        ("programmatic", ctypes.c_int32),
        ("name", ctypes.c_char_p),
    )


class _Finding(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_char_p),
        ("message", ctypes.c_char_p),
        ("who", ctypes.c_char_p),
        ("line", ctypes.c_int),
        ("fatal", ctypes.c_int),
    )


class _Result(ctypes.Structure):
    _fields_ = (
        ("findings", ctypes.POINTER(_Finding)),
        ("nfindings", ctypes.c_int),
        ("printed", ctypes.POINTER(ctypes.c_char_p)),
        ("nprinted", ctypes.c_int),
        ("instructions", ctypes.c_uint64),
    )


@dataclass(frozen=True)
class Options:
    """How to execute: the order of asynchronous work, its seed, the checks, host threads; the clusters (numbers in the
    grid) whose traces are kept for the timing model, and whether only they are executed."""

    schedule: str = "eager"
    seed: int = 0
    sanitize: bool = True
    threads: int = field(default_factory=lambda: os.cpu_count() or 1)
    implicit_waits: bool = False
    tensor_fences: bool = False
    time_limit: float = math.inf
    traced: tuple[int, ...] = ()
    only_traced: bool = False


@dataclass(frozen=True)
class Event:
    """What the engine noticed: kind, sentence, warp, PTX line, and whether it ended the launch."""

    kind: str
    message: str
    who: str
    line: int
    fatal: bool


@dataclass(frozen=True)
class Outcome:
    """Of one grid: events, executions per record, printed text, warp instructions."""

    events: list[Event]
    counts: np.ndarray
    printed: list[str]
    instructions: int


@cache
def library() -> ctypes.CDLL:
    """The engine, compiled with the system's C++ compiler on first use and kept in the cache."""
    path = shared_library("engine", sorted(SOURCES.glob("*.cpp")), FLAGS, ("c++", "g++", "clang++"))
    lib = ctypes.CDLL(str(path))
    lib.emu_handler_name.restype = ctypes.c_char_p
    if lib.emu_record_size() != RECORD.itemsize:
        raise RuntimeError(f"the engine's record has {lib.emu_record_size()} bytes, decode.py's {RECORD.itemsize}")
    return lib


@cache
def handlers() -> dict[str, int]:
    """The engine's handlers: name to index."""
    lib = library()
    return {lib.emu_handler_name(i).decode(): i for i in range(lib.emu_handler_count())}


def _address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def merge_ranges(ranges: Sequence[tuple[int, int]]) -> np.ndarray:
    """[begin, end) pairs sorted; overlapping ones become one (adjacent ones stay apart: their border is a border)."""
    merged: list[list[int]] = []
    for begin, end in sorted(ranges):
        if merged and begin < merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return np.array(merged, np.uint64).reshape(-1, 2)


def c_layout(program: Program) -> ctypes.Structure:
    """core.h's Program: addresses of the arrays of `program`, which must stay alive."""
    return _Program(
        records=_address(program.records),
        nrecords=len(program.records),
        pool=_address(program.pool),
        nslots=len(program.initial),
        npredicates=program.npredicates,
        initial=_address(program.initial),
        constant=_address(program.constant),
        specials=_address(program.specials),
        nspecials=len(program.specials) // 2,
        shared_symbols=_address(program.shared_symbols),
        nshared_symbols=len(program.shared_symbols),
        param_symbols=_address(program.param_symbols),
        nparam_symbols=len(program.param_symbols) // 2,
        local_bytes=program.local_bytes,
    )


def run(
    program: Program,
    grid: Sequence[int],
    block: Sequence[int],
    cluster: Sequence[int],
    dynamic_bytes: int,
    params: bytes,
    ranges: Sequence[tuple[int, int]],
    options: Options,
    sm_version: int = 100,
    programmatic: bool = False,
) -> Outcome:
    """Executes a grid.

    `params` are the kernel's parameters laid out as its PTX declares them; `ranges` the global memory [begin, end) that
    the launch may touch, and that of each numbered pointer (Note [Numbered pointers]). `programmatic`: it may start
    before the last run of this thread is over. Raises nothing for what a kernel does wrong: the events say it (a fatal
    one ended the launch early).
    """
    lib = library()
    buffer = np.zeros(len(params) + 128, np.uint8)  # 128: tensor maps are 64-byte aligned parameters
    start = -_address(buffer) % 128
    buffer[start : start + len(params)] = np.frombuffer(params, np.uint8)
    base = _address(buffer) + start
    known = merge_ranges([*ranges, *program.global_ranges, (base, base + max(len(params), 1))])
    c_program = c_layout(program)
    traced = np.array(options.traced, np.int64)
    c_launch = _Launch(
        grid=tuple(grid),
        block=tuple(block),
        cluster=tuple(cluster),
        shared_bytes=program.shared_bytes(dynamic_bytes),
        dynamic_bytes=dynamic_bytes,
        params=base,
        ranges=_address(known),
        nranges=len(known),
        sm_version=sm_version,
        programmatic=programmatic,
        name=short_name(program.kernel.name).encode(),
    )
    c_options = _Options(
        schedule=SCHEDULES[options.schedule],
        sanitize=options.sanitize,
        seed=options.seed,
        threads=1 if program.ctas_meet else options.threads,  # a run is reproducible from its seed
        implicit_waits=options.implicit_waits,
        tensor_fences=options.tensor_fences,
        time_limit=options.time_limit,
        traced=_address(traced),
        ntraced=len(traced),
        only_traced=options.only_traced,
    )
    counts = np.zeros(len(program.records), np.uint64)
    result = _Result()
    lib.emu_run(
        ctypes.byref(c_program),
        ctypes.byref(c_launch),
        ctypes.byref(c_options),
        ctypes.c_void_p(_address(counts)),
        ctypes.byref(result),
    )
    found = [result.findings[i] for i in range(result.nfindings)]
    events = [Event(f.kind.decode(), f.message.decode(), f.who.decode(), f.line, bool(f.fatal)) for f in found]
    printed = [result.printed[i].decode(errors="replace") for i in range(result.nprinted)]
    return Outcome(events, counts, printed, int(result.instructions))


def written(address: int, nbytes: int) -> np.ndarray:
    """Which bytes of a tensor the last sanitized run on this thread wrote: one flag per two, from an even address."""
    flags = np.zeros(nbytes // 2 + 1, np.uint8)
    library().emu_written(ctypes.c_uint64(address), ctypes.c_uint64(nbytes), ctypes.c_void_p(_address(flags)))
    return flags


def forget() -> None:
    """Frees the memory that is kept of the last runs on this thread, for `written` and for launches behind them."""
    if library.cache_info().currsize:
        library().emu_forget()
