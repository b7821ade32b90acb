"""Timers and their statistics.

What is timed is the span of one call on the device: from the start of its first kernel to the end of its last, as the
public suite counts it, so that gaps between kernels count and what the host needs before the first one does not.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import ProfilingError

RANGE = "ssd_iteration"
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_CALLS = ("cuda_runtime", "cuda_driver")


class Timing(NamedTuple):
    """Of one call, in µs. `kernels` is the number of launches, copies and fills of a call, None where unknown."""

    median_us: float
    p10_us: float
    p90_us: float
    iterations: int
    kernels: int | None = None


def percentile(values: Iterable[float], fraction: float) -> float:
    """Linear between the two nearest of the sorted values, as numpy's default."""
    ordered = sorted(values)
    if not ordered:
        raise ProfilingError("No time was measured, expected at least one; raise --iterations.")
    place = fraction * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def summary(us: list[float], kernels: int | None = None) -> Timing:
    return Timing(percentile(us, 0.5), percentile(us, 0.1), percentile(us, 0.9), len(us), kernels)


def spans(trace: dict[str, Any], name: str = RANGE) -> list[tuple[float, int]]:
    """[(µs from the first device activity's start to the last one's end, activities)] for each range `name` of a Chrome
    trace of torch's profiler, which takes its device times from CUPTI.

    An activity belongs to the range in which the host launched it; the launch is found by its correlation number. One
    whose launch was not traced belongs where the activity before it on the device does; a flush counts as the range
    behind it.
    """
    events = [e for e in trace.get("traceEvents", ()) if e.get("ph") == "X"]
    ranges = sorted(
        (float(e["ts"]), float(e["ts"]) + float(e["dur"]))
        for e in events
        if e.get("cat") == "user_annotation" and e.get("name") == name
    )
    launched = {
        e["args"]["correlation"]: float(e["ts"])
        for e in events
        if e.get("cat") in HOST_CALLS and "correlation" in e.get("args", {})
    }
    work: list[list[tuple[float, float]]] = [[] for _ in ranges]
    current: int | None = None
    for event in sorted((e for e in events if e.get("cat") in DEVICE_WORK), key=lambda e: float(e["ts"])):
        at = launched.get(event.get("args", {}).get("correlation"))
        if at is not None:
            current = next((n for n, (_, end) in enumerate(ranges) if at <= end), None)
            if current is None or at < ranges[current][0]:
                continue
        if current is not None:
            start = float(event["ts"])
            work[current].append((start, start + float(event["dur"])))
    return [(max(e for _, e in done) - min(s for s, _ in done), len(done)) for done in work if done]


def cupti(calls: list[Callable[[], Any]], flush: Callable[[], Any], iterations: int) -> Timing:
    """Device times of CUPTI, through torch's profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for number in range(iterations):
            flush()
            with torch.profiler.record_function(RANGE):
                calls[number % len(calls)]()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trace.json"
        profiler.export_chrome_trace(str(path))
        found = spans(json.loads(path.read_text()))
    if len(found) != iterations:
        raise ProfilingError(
            f"CUPTI gave device times of {len(found)} of {iterations} calls, expected all: another profiler may hold "
            "it, or this user may not trace; pass --timer events."
        )
    return summary([us for us, _ in found], max(kernels for _, kernels in found))


def events(calls: list[Callable[[], Any]], flush: Callable[[], Any], iterations: int) -> Timing:
    """CUDA events around the call. They also count what a launch adds where the host is slower than the flush."""
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(iterations)]
    for number, (start, end) in enumerate(pairs):
        flush()
        start.record()
        calls[number % len(calls)]()
        end.record()
    torch.cuda.synchronize()
    return summary([start.elapsed_time(end) * 1e3 for start, end in pairs])


def host(calls: list[Callable[[], Any]], flush: Callable[[], Any], iterations: int) -> Timing:
    """The CPU's clock around a call that is over when it returns."""
    us = []
    for number in range(iterations):
        flush()
        start = time.perf_counter()
        calls[number % len(calls)]()
        us.append((time.perf_counter() - start) * 1e6)
    return summary(us)


TIMERS = {"cupti": cupti, "events": events, "host": host}


def flusher(device: str) -> tuple[Callable[[], Any], int]:
    """(what evicts everything from the L2, the bytes that it writes: twice the L2's size)."""
    if device != "cuda":
        return lambda: None, 0
    size = 2 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    buffer = torch.empty(size, dtype=torch.int8, device=device)
    return buffer.zero_, size
