"""One SM, or the SMs of a cluster: traces of the engine replayed on modelled resources (engine/timing.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .. import engine
from ..build import EmulatorError
from ..program import SHARED_BASE, Program
from .constants import Model
from .costs import ACTIONS, COST, costs

RESOURCES = (
    *("issue", "fma", "alu", "xu", "lsu", "tensor memory", "shared memory"),
    *("tensor core", "mma", "tma", "l2", "hbm"),
)
"""timing.h's Resource. "tensor core" is multiplying ("mma") or kept from it by copies that write operands."""

PC_MASK, PAYLOAD_SHIFT = (1 << 24) - 1, 24
MOST_SEGMENTS = 1 << 20

BARRIERS = ("mbarrier", "named barrier", "cluster barrier")
"""trace.h's BarrierKind."""

PLACE_BITS = 30


class Barrier(NamedTuple):
    """What warps wait at. `place`: of an mbarrier its offset in the shared memory of its CTA, as findings and PTX have
    it; of a named barrier its number."""

    kind: str
    cta: int  # rank in the cluster
    place: int


@dataclass(frozen=True)
class Trace:
    """What the warps of one cluster executed, word lists as engine/trace.h lays them out."""

    number: int  # of the cluster in the grid
    nctas: int
    warps: list[np.ndarray]
    contributions: np.ndarray  # per token
    tmem_columns: int = 0  # that a CTA allocates in all
    barriers: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint32), repr=False)  # per token

    @property
    def words(self) -> int:
        return sum(map(len, self.warps))

    def barrier(self, token: int) -> Barrier:
        """Of whose phases a token is one."""
        word = int(self.barriers[token])
        kind, place = word >> PLACE_BITS, word & (1 << PLACE_BITS) - 1
        if kind == 0:
            return Barrier(BARRIERS[kind], place >> 24, (place & (1 << 24) - 1) * 8 - SHARED_BASE)
        return Barrier(BARRIERS[kind], place >> 4, place & 15)


@dataclass(frozen=True)
class Region:
    """Global memory [begin, end), and which part of the accesses to it misses L2."""

    begin: int
    end: int
    missing: float


@dataclass(frozen=True)
class Segment:
    """A stretch of a row of the timeline. `row`: a warp of the cluster, or warps + 4 * CTA + 0 (tensor core), 1 (TMA
    loads), 2 (TMA stores). `waits`: it waits; then `barrier` says at which (None: at none), and `releaser_row` and
    `releaser_record` for whom (-1: unknown)."""

    begin: float
    end: float
    row: int
    record: int
    waits: bool
    barrier: Barrier | None
    releaser_row: int
    releaser_record: int


@dataclass(frozen=True)
class SmTime:
    """Modelled clocks of the SMs of one cluster, and for how many of them each resource was busy."""

    cycles: float
    dependents: float  # when every CTA has let the next launch start
    busy: dict[str, float]
    l2_bytes: float
    hbm_bytes: float
    stalls: float
    segments: list[Segment] = field(default_factory=list, repr=False)

    @property
    def binding(self) -> str:
        """The busiest resource; "latency" where none is busy for half of the time."""
        name = max(self.busy, key=lambda key: self.busy[key])
        return name if self.busy[name] >= 0.5 * self.cycles else "latency"


class _View(ctypes.Structure):
    _fields_ = (
        ("number", ctypes.c_int64),
        ("nctas", ctypes.c_int32),
        ("nwarps", ctypes.c_int32),
        ("contributions", ctypes.c_void_p),
        ("ncontributions", ctypes.c_uint64),
        ("tmem_columns", ctypes.c_int32),
        ("barriers", ctypes.c_void_p),
    )


class _Data(ctypes.Structure):
    _fields_ = (
        ("number", ctypes.c_int64),
        ("nctas", ctypes.c_int32),
        ("nwarps", ctypes.c_int32),
        ("words", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
        ("contributions", ctypes.c_void_p),
        ("ncontributions", ctypes.c_uint64),
    )


class _Work(ctypes.Structure):
    _fields_ = (
        ("traces", ctypes.c_void_p),
        ("ntraces", ctypes.c_int32),
        ("order", ctypes.c_void_p),
        ("norder", ctypes.c_int32),
        ("resident", ctypes.c_int32),
        ("ctas", ctypes.c_int32),
        ("regions", ctypes.c_void_p),
        ("nregions", ctypes.c_int32),
        ("dependency", ctypes.c_double),
        ("detailed", ctypes.c_int32),
    )


class _Outcome(ctypes.Structure):
    _fields_ = (
        ("cycles", ctypes.c_double),
        ("dependents", ctypes.c_double),
        ("busy", ctypes.c_double * len(RESOURCES)),
        ("bytes_l2", ctypes.c_double),
        ("bytes_hbm", ctypes.c_double),
        ("stalls", ctypes.c_double),
    )


_SEGMENT = np.dtype(
    [("begin", float), ("end", float)]
    + [(name, np.int32) for name in ("row", "pc", "waits", "token", "releaser_row", "releaser_pc")]
)
_REGION = np.dtype([("begin", np.uint64), ("end", np.uint64), ("missing", float)])


def _array(address: int | None, size: int) -> np.ndarray:
    if not size:
        return np.zeros(0, np.uint32)
    return np.ctypeslib.as_array((ctypes.c_uint32 * size).from_address(address or 0)).copy()


def recorded() -> list[Trace]:
    """The traces of the last run on this thread, in the order of their clusters."""
    lib = engine.library()
    lib.emu_trace_warp.restype = ctypes.c_void_p
    traces = []
    for i in range(lib.emu_trace_count()):
        view, size = _View(), ctypes.c_uint64()
        lib.emu_trace(i, ctypes.byref(view))
        warps = []
        for warp in range(view.nwarps):
            address = lib.emu_trace_warp(i, warp, ctypes.byref(size))
            warps.append(_array(address, size.value))
        contributions = _array(view.contributions, view.ncontributions)
        barriers = _array(view.barriers, view.ncontributions)
        traces.append(Trace(view.number, view.nctas, warps, contributions, view.tmem_columns, barriers))
    return sorted(traces, key=lambda trace: trace.number)


def engine_constants() -> list[str]:
    """The names of the constants that the engine's part of the model takes, in its order."""
    lib = engine.library()
    lib.emu_timing_constant.restype = ctypes.c_char_p
    names: list[str] = []
    while (name := lib.emu_timing_constant(len(names))) is not None:
        names.append(name.decode())
    return names


def _c_traces(traces: Sequence[Trace]) -> tuple[ctypes.Array[_Data], list[object]]:
    """Traces as the engine takes them, and what must stay alive meanwhile."""
    held: list[object] = []
    data = (_Data * len(traces))()
    for i, trace in enumerate(traces):
        pointers = np.array([warp.ctypes.data for warp in trace.warps], np.uint64)
        sizes = np.array([len(warp) for warp in trace.warps], np.uint64)
        contributions = np.ascontiguousarray(trace.contributions, np.uint32)
        held += [pointers, sizes, contributions]
        data[i] = _Data(
            trace.number,
            trace.nctas,
            len(trace.warps),
            pointers.ctypes.data,
            sizes.ctypes.data,
            contributions.ctypes.data,
            len(contributions),
        )
    return data, held


def traffic(program: Program, trace: Trace, ranges: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that a cluster reads from and writes to each of the sorted `ranges` [begin, end), and elsewhere (last)."""
    lib = engine.library()
    table = costs(program, Model())
    known = np.array([(begin, end, 0.0) for begin, end in ranges], _REGION)
    reads, writes = np.zeros(len(ranges) + 1), np.zeros(len(ranges) + 1)
    data, held = _c_traces([trace])
    lib.emu_traffic(
        ctypes.c_void_p(table.ctypes.data),
        data,
        ctypes.c_void_p(known.ctypes.data),
        ctypes.c_int32(len(ranges)),
        ctypes.c_void_p(reads.ctypes.data),
        ctypes.c_void_p(writes.ctypes.data),
    )
    del held
    return reads, writes


def simulate(
    program: Program,
    traces: Sequence[Trace],
    model: Model,
    *,
    order: Sequence[int] = (0,),
    resident: int = 1,
    regions: Sequence[Region] = (),
    active_sms: int = 1,
    dependency: float = 0.0,
    detailed: bool = False,
) -> SmTime:
    """Modelled time of the clusters traces[order[0]], traces[order[1]], ..., `resident` of them at a time.

    Args:
        regions: known global memory; accesses elsewhere miss L2.
        active_sms: SMs that share L2 and HBM at the time.
        dependency: clocks until the launch before is complete, for griddepcontrol.wait.
        detailed: keep the segments of a timeline of the first cluster.
    """
    lib = engine.library()
    if lib.emu_cost_size() != COST.itemsize or lib.emu_timing_actions() != len(ACTIONS):
        raise RuntimeError("timing/costs.py and engine/timing.h do not agree about a record's cost")
    lib.emu_timing.restype = ctypes.c_int64
    values = np.array([_engine_value(model, name, active_sms) for name in engine_constants()], float)
    table = costs(program, model)
    data, held = _c_traces(traces)
    numbers = np.array(order, np.int32)
    known = np.array(sorted((r.begin, r.end, r.missing) for r in regions), _REGION)
    work = _Work(
        order=numbers.ctypes.data,
        norder=len(numbers),
        resident=resident,
        ctas=traces[0].nctas,
        regions=known.ctypes.data,
        nregions=len(known),
        dependency=dependency,
        detailed=detailed,
    )
    segments = np.zeros(MOST_SEGMENTS if detailed else 1, _SEGMENT)
    outcome, error = _Outcome(), ctypes.create_string_buffer(512)
    c_program = engine.c_layout(program)
    count = lib.emu_timing(
        ctypes.byref(c_program),
        ctypes.c_void_p(table.ctypes.data),
        ctypes.c_void_p(values.ctypes.data),
        data,
        len(traces),
        ctypes.byref(work),
        ctypes.byref(outcome),
        ctypes.c_void_p(segments.ctypes.data),
        ctypes.c_int64(len(segments)),
        error,
        len(error),
    )
    del held
    if count < 0:
        raise EmulatorError(f"The timing model cannot replay the trace: {error.value.decode()}.")
    found = segments[: min(count, len(segments))] if detailed else segments[:0]
    first = traces[order[0]]
    return SmTime(
        outcome.cycles,
        outcome.dependents,
        dict(zip(RESOURCES, map(float, outcome.busy), strict=True)),
        outcome.bytes_l2,
        outcome.bytes_hbm,
        outcome.stalls,
        [
            Segment(begin, end, row, pc, bool(waits), None if token < 0 else first.barrier(token), by, by_pc)
            for begin, end, row, pc, waits, token, by, by_pc in found.tolist()
        ],
    )


def _engine_value(model: Model, name: str, active_sms: int) -> float:
    """A constant as the engine takes it: L2 and HBM by the SM's share of them."""
    if name in ("hbm_bytes", "hbm_cold_rate"):
        return min(model.clocks(name) / active_sms, model["l2_bytes_per_sm"])
    if name == "l2_bytes":
        return min(model.clocks(name) / active_sms, model["l2_bytes_per_sm"])
    return model.clocks(name)
