"""Runs compiled CuTe DSL kernels on a CPU, and finds what a GPU would hide.

    with cute_ssd.emulate("sm_100a") as report:
        compiled = cute.compile(kernel, tensor)     # targets sm_100a, no GPU needed
        compiled(tensor)                            # executes the PTX on CPU tensors
    print(report)

See README.md beside this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .build import EmulatorError
from .report import Finding, KernelError, LaunchReport, Report

if TYPE_CHECKING:
    from .decode import UnsupportedInstruction
    from .session import Session
    from .timing import Model

__all__ = ["EmulatorError", "Finding", "KernelError", "LaunchReport", "Report", "UnsupportedInstruction", "emulate"]

SCHEDULES = ("eager", "late", "priority")


def __getattr__(name: str) -> object:
    if name == "UnsupportedInstruction":
        from .decode import UnsupportedInstruction

        return UnsupportedInstruction
    raise AttributeError(f"module {__name__} has no attribute {name}")


def prepare(
    arch: str,
    *,
    seed: int = 0,
    sanitize: bool = True,
    schedule: str | None = None,
    keep_going: bool = False,
    implicit_waits: bool = False,
    tensor_fences: bool = False,
    threads: int | None = None,
    time_limit: float = 3600.0,
    timing: Model | bool = False,
    sampled: bool = False,
) -> tuple[Report, Session]:
    """The report and the (not yet entered) session of an emulation; arguments as for `emulate`."""
    from ..errors import ShapeError
    from .engine import Options
    from .runner import Runner
    from .session import Session
    from .timing import Model

    if schedule is None:
        schedule = "eager" if seed == 0 else SCHEDULES[2 - seed % 2]
    if schedule not in SCHEDULES:
        raise ShapeError(f"schedule is {schedule!r}, expected one of {', '.join(SCHEDULES)}.")
    if seed < 0:
        raise ShapeError(f"seed is {seed}, expected 0 or more.")
    if timing and schedule != "eager":
        raise ShapeError(f"schedule is {schedule!r} with timing, expected 'eager'; leave out the seed.")
    if sampled and not timing:
        raise ShapeError("sampled is True without timing, expected both: only the timing model can do with a few CTAs.")
    model = Model() if timing is True else timing or None
    report = Report(arch, keep_going=keep_going, records_writes=sanitize and not sampled)
    threads = threads or Options().threads
    options = Options(schedule, seed, sanitize, threads, implicit_waits, tensor_fences, time_limit)
    return report, Session(arch, Runner(report, options, keep_going, model, sampled))


@contextmanager
def emulate(
    arch: str = "sm_100a",
    *,
    seed: int = 0,
    sanitize: bool = True,
    schedule: str | None = None,
    keep_going: bool = False,
    implicit_waits: bool = False,
    tensor_fences: bool = False,
    threads: int | None = None,
    time_limit: float = 3600.0,
    timing: Model | bool = False,
    sampled: bool = False,
) -> Iterator[Report]:
    """Inside it `cute.compile` targets `arch` and compiled functions, called with CPU tensors, run on the emulator.

    Args:
        arch: sm_80, sm_86, sm_89, sm_90a, sm_100a, sm_103a or sm_120a; of the last four also the base and family
            names that CuTe DSL knows (sm_90, sm_100, sm_100f, ...): the same device without what is its own.
        seed: chooses the order of events; the same seed gives the same run (README.md: Schedules and seeds). 0 is the
            eager schedule (asynchronous work is done when it is issued), odd seeds are late (it is done when nothing
            else can go on, polls may fail), other even ones priority schedules (always the runnable warp or engine of
            highest random priority). Test with several.
        sanitize: look for races, missing fences, uninitialised reads; about three times slower.
        schedule: "eager", "late" or "priority", instead of the one that the seed implies.
        keep_going: collect findings in the report; else a launch with findings raises KernelError when it is over. What
            the kernel could not survive (out of bounds, deadlock) always raises.
        implicit_waits: the use of a tcgen05.ld result waits for the load, as the code that ptxas makes does. By default
            only tcgen05.wait::ld does, as the PTX ISA says, and a use before it is a finding.
        tensor_fences: tcgen05 operations of two threads need tcgen05.fence::before_thread_sync and after_thread_sync
            around what synchronises them, as the PTX ISA says. By default they do not: NVIDIA's kernels leave them out.
        threads: host threads, by default one per core. Kernels whose CTAs meet in global memory get one. Only where
            they race there, what they leave and which side is named depends on more than one.
        time_limit: seconds that a launch may take; a larger grid is given up early with an estimate.
        timing: model the time of each launch on a B200, at its boost clock or as a `timing.Model` says; up to three
            times slower. Needs the eager schedule.
        sampled: with `timing`, execute only the CTAs whose traces stand for all: fast, and the outputs are incomplete.

    Yields:
        Report: per launch the geometry, instruction counts by class, findings, printed text; with `timing` modelled
            cycles.

    Raises:
        ShapeError: an unknown arch or a wrong value. EmulatorError: no C/C++ compiler, a kernel compiled for another
        arch, launches the device would refuse. UnsupportedInstruction: PTX that the emulator does not execute, with its
        Python line. KernelError: findings.
    """
    from .engine import forget

    report, session = prepare(
        arch,
        seed=seed,
        sanitize=sanitize,
        schedule=schedule,
        keep_going=keep_going,
        implicit_waits=implicit_waits,
        tensor_fences=tensor_fences,
        threads=threads,
        time_limit=time_limit,
        timing=timing,
        sampled=sampled,
    )
    with session:
        try:
            yield report
        finally:
            forget()
