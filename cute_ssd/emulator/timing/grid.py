"""From one SM to a launch, and from launches to a chain of them.

Few clusters of a grid are executed and replayed: the first, the last and one in the middle of each dimension. The
others are taken to behave like the one in the middle. Every SM gets its share of L2 and HBM.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..program import Program
from .constants import Model
from .sm import Region, SmTime, Trace, simulate, traffic

Dim3 = tuple[int, int, int]

SHARED_BYTES = 228 * 1024  # of an SM; every CTA reserves 1 KiB of it
THREADS, REGISTERS, MOST_CTAS, TMEM_COLUMNS = 2048, 65536, 32, 512
ASSUMED_REGISTERS = 64  # per thread, where there is no machine code to tell
MOST_REPRESENTATIVES = 9
SIMULATED_ROUNDS = 4  # of resident clusters on an SM; further rounds take as long as the last ones


@dataclass(frozen=True)
class Recording:
    """One launch: its geometry, and the traces of its representative clusters."""

    program: Program
    kernel: str
    grid: Dim3
    block: Dim3
    cluster: Dim3
    shared_bytes: int
    programmatic: bool
    tensors: tuple[tuple[int, int], ...]  # address, bytes
    traces: tuple[Trace, ...]
    registers: int = 0  # per thread; 0: unknown
    ptx: str = field(default="", repr=False)  # of its module

    @property
    def clusters(self) -> Dim3:
        x, y, z = (g // c for g, c in zip(self.grid, self.cluster, strict=True))
        return x, y, z


@dataclass(frozen=True)
class LaunchTime:
    """The modelled time of one launch, alone: clocks from the first CTA's start to the last write."""

    kernel: str
    cycles: float
    dependents: float  # clocks until the next launch may start, where programmatic dependent launch lets it
    clock_ghz: float
    ctas: int
    multiprocessors: int  # at work
    resident: int  # CTAs per multiprocessor
    rounds: int  # how often the busiest multiprocessor is filled
    replayed: int  # clusters whose traces stand for all of them
    busy: dict[str, float]  # clocks, of the busiest multiprocessor
    hbm_bytes: float
    l2_bytes: float
    waited: float = 0.0  # clocks beside the launch before, until that is complete (programmatic dependent launch)

    @property
    def us(self) -> float:
        """Without what a launch costs by itself."""
        return self.cycles / self.clock_ghz / 1e3

    @property
    def occupancy(self) -> dict[str, float]:
        """The fraction of its own time that each resource is busy."""
        return {name: clocks / (self.cycles - self.waited) for name, clocks in self.busy.items()}

    @property
    def binding(self) -> str:
        """The busiest resource; "latency" where none is busy for half of the time."""
        name = max(self.busy, key=lambda key: self.busy[key])
        return name if self.busy[name] >= 0.5 * (self.cycles - self.waited) else "latency"

    @property
    def bound_us(self) -> float:
        """What the busiest resource alone would take."""
        return max(self.busy.values()) / self.clock_ghz / 1e3

    def __str__(self) -> str:
        shares = ", ".join(
            f"{name} {share:.0%}"
            for name, share in sorted(self.occupancy.items(), key=lambda i: -i[1])
            if share >= 0.01
        )
        return (
            f"modelled {self.cycles:.0f} cycles, {self.us:.2f} us at {self.clock_ghz:g} GHz"
            + (f", {self.waited:.0f} cycles of them beside the launch before" if self.waited else "")
            + f"; bound by {self.binding} "
            f"({self.bound_us:.2f} us); {shares}; {self.ctas} CTAs on {self.multiprocessors} SMs, {self.resident} "
            f"resident, {self.rounds} round(s); {self.replayed} cluster(s) replayed for all"
        )


@dataclass(frozen=True)
class ChainTime:
    """Modelled time of launches in order, as CUPTI would span them: from the first's start to the last's end."""

    us: float
    launches: list[LaunchTime]
    starts_us: list[float]

    @property
    def busy_us(self) -> dict[str, float]:
        """How long each resource is busy in all launches."""
        total: dict[str, float] = {}
        for launch in self.launches:
            for name, clocks in launch.busy.items():
                total[name] = total.get(name, 0.0) + clocks / launch.clock_ghz / 1e3
        return total

    @property
    def binding(self) -> str:
        """The busiest resource; "latency" where none is busy for half of the time."""
        busy = self.busy_us
        name = max(busy, key=lambda key: busy[key], default="latency")
        return name if busy.get(name, 0.0) >= 0.5 * self.us else "latency"

    @property
    def bound_us(self) -> float:
        """The sum of what the busiest resource of each launch would take alone."""
        return sum(launch.bound_us for launch in self.launches)

    def __str__(self) -> str:
        lines = [f"modelled {self.us:.2f} us for {len(self.launches)} launch(es), bound by {self.binding}"]
        for start, launch in zip(self.starts_us, self.launches, strict=True):
            lines.append(f"  from {start:.2f} us  {launch}")
        return "\n".join(lines)


def representatives(grid: Dim3, cluster: Dim3) -> tuple[int, ...]:
    """Numbers of the clusters that stand for a grid: first, middle and last in each dimension."""
    return tuple(sorted({number for number, _ in _classes(_divided(grid, cluster))}))


def _divided(grid: Dim3, cluster: Dim3) -> Dim3:
    x, y, z = (g // c for g, c in zip(grid, cluster, strict=True))
    return x, y, z


def _classes(clusters: Dim3) -> list[tuple[int, int]]:
    """(number of a representative, how many clusters it stands for)."""
    choices = [_positions(n, 3) for n in clusters]
    while math.prod(map(len, choices)) > MOST_REPRESENTATIVES:
        longest = max(range(3), key=lambda k: (len(choices[k]) == 3, -clusters[k]))
        choices[longest] = _positions(clusters[longest], len(choices[longest]) - 1)
    x, y, _ = clusters
    return [(i + x * (j + y * k), a * b * c) for (k, a), (j, b), (i, c) in itertools.product(*reversed(choices))]


def _positions(n: int, most: int) -> list[tuple[int, int]]:
    """(index, how many indices it stands for): of n indices the first, one in the middle and the last."""
    if n == 1 or most == 1:
        return [(n // 2 if n > 1 else 0, n)]
    if n == 2 or most == 2:
        return [(0, n - 1), (n - 1, 1)]
    return [(0, 1), (n // 2, n - 2), (n - 1, 1)]


def resident_clusters(recording: Recording) -> int:
    """How many clusters' CTAs one SM (each of a cluster's SMs) holds at a time."""
    threads = -(-math.prod(recording.block) // 32) * 32
    limits = [
        SHARED_BYTES // (recording.shared_bytes + 1024),
        THREADS // threads,
        REGISTERS // (threads * -(-(recording.registers or ASSUMED_REGISTERS) // 8) * 8),
        MOST_CTAS,
    ]
    if columns := max(trace.tmem_columns for trace in recording.traces):
        limits.append(TMEM_COLUMNS // columns)
    return max(1, min(limits))


class L2:
    """How much of each tensor the launches so far have left in L2: what was touched last, as far as it fits."""

    def __init__(self, model: Model) -> None:
        self.capacity = model["l2_capacity"] * 2**20
        self.held: dict[tuple[int, int], float] = {}

    def share(self, tensor: tuple[int, int]) -> float:
        """The part of a tensor [begin, end) that is there."""
        return min(1.0, self.held.get(tensor, 0.0) / (tensor[1] - tensor[0]))

    def touch(self, tensor: tuple[int, int], nbytes: float) -> None:
        self.held[tensor] = max(nbytes, self.held.pop(tensor, 0.0))
        excess = sum(self.held.values()) - self.capacity
        for oldest in list(self.held):
            if excess <= 0:
                break
            gone = min(excess, self.held[oldest])
            self.held[oldest] -= gone
            excess -= gone


def _regions(recording: Recording, l2: L2) -> tuple[list[Region], float, float]:
    """Per tensor the part of its traffic that goes to HBM; bytes to L2 and to HBM of the whole grid.

    The first access to a byte misses, later ones hit: with every CTA at work on nearby data they come close together.
    A write of what L2 does not hold costs HBM as much as a read: a line that the cache flush left dirty makes room.
    """
    ranges = sorted((address, address + nbytes) for address, nbytes in recording.tensors if nbytes)
    reads, writes = np.zeros(len(ranges) + 1), np.zeros(len(ranges) + 1)
    by_number = {trace.number: trace for trace in recording.traces}
    for number, count in _classes(recording.clusters):
        if number in by_number:
            r, w = traffic(recording.program, by_number[number], ranges)
            reads += count * r
            writes += count * w
    regions, hbm, touched = [], 0.0, []
    for k, (begin, end) in enumerate(ranges):
        total = reads[k] + writes[k]
        if not total:
            continue
        first = min(max(reads[k], writes[k]), float(end - begin))
        far = first * (1.0 - l2.share((begin, end)))
        regions.append(Region(begin, end, min(1.0, far / total)))
        hbm += far
        touched.append(((begin, end), first))
    for tensor, nbytes in touched:
        l2.touch(tensor, nbytes)
    return regions, float(reads.sum() + writes.sum()), hbm + float(reads[-1] + writes[-1])


def launch_time(recording: Recording, model: Model, l2: L2 | None = None, dependency: float = 0.0) -> LaunchTime:
    """The modelled time of one launch; `l2` (by default cold) is updated. After another launch HBM is not cold."""
    if l2 is not None and l2.held:
        model = model.with_values(hbm_cold_bytes=0.0)
    regions, l2_bytes, hbm_bytes = _regions(recording, L2(model) if l2 is None else l2)
    size = math.prod(recording.cluster)
    total = math.prod(recording.clusters)
    units = int(model["multiprocessors"]) // size
    share = -(-total // units)  # clusters of the busiest unit
    resident = min(resident_clusters(recording), share)
    active = min(total, units) * size

    def run(count: int) -> SmTime:
        order = _order(recording, units, count)
        return simulate(
            recording.program,
            recording.traces,
            model,
            order=order,
            resident=resident,
            regions=regions,
            active_sms=active,
            dependency=dependency,
        )

    rounds = -(-share // resident)
    if rounds <= SIMULATED_ROUNDS:
        time = run(share)
        cycles, busy = time.cycles, time.busy
    else:
        few, time = run(SIMULATED_ROUNDS // 2 * resident), run(SIMULATED_ROUNDS * resident)
        more = (share - SIMULATED_ROUNDS * resident) / ((SIMULATED_ROUNDS - SIMULATED_ROUNDS // 2) * resident)
        cycles = time.cycles + more * (time.cycles - few.cycles)
        busy = {name: clocks + more * (clocks - few.busy[name]) for name, clocks in time.busy.items()}
    # HBM serves every SM, however the work is spread.
    busy["hbm"] = hbm_bytes / model.clocks("hbm_bytes")
    cycles = max(cycles, busy["hbm"])
    return LaunchTime(
        recording.kernel,
        cycles,
        min(time.dependents, cycles) if rounds == 1 else cycles,
        model.clock_ghz,
        math.prod(recording.grid),
        active,
        resident,
        rounds,
        len(recording.traces),
        busy,
        hbm_bytes,
        l2_bytes,
        dependency if dependency < cycles else 0.0,
    )


def _order(recording: Recording, units: int, count: int) -> list[int]:
    """The traces that stand for the `count` clusters that the busiest unit runs: every units-th one from the first."""
    index = {trace.number: i for i, trace in enumerate(recording.traces)}
    total = math.prod(recording.clusters)
    return [index[_stands_for(recording.clusters, number % total)] for number in range(0, count * units, units)]


def _stands_for(clusters: Dim3, number: int) -> int:
    """The representative of a cluster."""
    known = {n for n, _ in _classes(clusters)}
    x, y, z = clusters
    at = (number % x, number // x % y, number // (x * y))
    axes = [sorted({n // step % size for n in known}) for step, size in ((1, x), (x, y), (x * y, z))]
    chosen = []
    for place, size, axis in zip(at, clusters, axes, strict=True):
        inner = [p for p in axis if p not in (0, size - 1)] or axis[:1]
        chosen.append(place if place in axis else inner[0])
    return chosen[0] + x * (chosen[1] + y * chosen[2])


def chain_time(recordings: Sequence[Recording], model: Model) -> ChainTime:
    """Modelled time of launches one after the other in a stream, L2 cold before the first.

    A launch with the attribute for programmatic dependent launch starts when every CTA of the one before has executed
    griddepcontrol.launch_dependents, if its shared memory fits beside; its griddepcontrol.wait ends a little after the
    end of the launch before.
    """
    l2 = L2(model)
    launches: list[LaunchTime] = []
    starts: list[float] = []
    clock = model.clock_ghz * 1e3  # clocks per us
    end = model["launch_first"] * clock
    for i, recording in enumerate(recordings):
        start, dependency = end, 0.0
        if i:
            before, previous = recordings[i - 1], launches[-1]
            start = end + model["launch_gap"] * clock
            if recording.programmatic:
                ready = end + model["launch_gap_dependent"] * clock
                fits = before.shared_bytes + recording.shared_bytes + 2048 <= SHARED_BYTES
                start = starts[-1] + previous.dependents if fits else end
                start = min(ready, start + model["cta_launch"])
                dependency = ready - start
        time = launch_time(recording, model, l2, dependency)
        launches.append(time)
        starts.append(start)
        end = max(end, start + time.cycles)
    total = end + model["launch_last"] * clock if recordings else 0.0
    return ChainTime(total / clock, launches, [start / clock for start in starts])
