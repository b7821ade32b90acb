"""One call in an NVTX range, to be looked at by a profiler; warm-up and compilation lie outside it. It times nothing.

    python -m profiling.run_case --case 9
    python -m profiling.run_case --model nemotron-nano-9b-v2 --decode --repeat 3
    python -m profiling.run_case --case 3 --emulate sm_100a --describe case3.case.json

The last one runs it on the emulated GPU, without one, and counts the tcgen05.mma that it executes.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nvtx
import torch

import cute_ssd
from cute_ssd.errors import ShapeError, UnsupportedError

from . import ProfilingError, baselines, cases

# What the emulator calls tcgen05.mma.
MMA = "tensor mma"
# Push/pop range of the default domain: Nsight Compute's filter for it is "ssd/".
RANGE = "ssd"


def describe(work: cases.Work, arguments: dict[str, Any], device: str) -> dict[str, Any]:
    """What profiling.report holds the counters against: sizes, compulsory bytes, operations and the plan."""
    function = getattr(cute_ssd, work.function)
    given = {**arguments, "chunk_size": 256} if work.function == "mamba_chunk_scan_combined" else arguments
    plan = cute_ssd.explain(function, **given)
    described = work._asdict() | {"case": work.key, "device": device}
    described |= {"flops": work.flops, "compulsory_bytes": work.compulsory_bytes, "backend": plan.backend}
    return described | {"tcgen05": plan.tcgen05, "plan": str(plan)}


def run(work: cases.Work, options: argparse.Namespace) -> dict[str, Any]:
    """Warms up, then calls `repeat` times inside the range; returns the description."""
    arguments = cases.inputs(work, options.seed, options.device)
    call = baselines.IMPLEMENTATIONS[options.implementation].prepare(work, arguments)
    if options.emulate:
        with torch.inference_mode(), cute_ssd.emulate(options.emulate, sanitize=False) as report:
            described = describe(work, arguments, options.device)
            call()
        counted = sum(launch.instructions.get(MMA, 0) for launch in report.launches)
        return described | {"implementation": options.implementation, "repeat": 1, "tcgen05": counted}
    wait: Callable[[], None] = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    with torch.inference_mode():
        described = describe(work, arguments, options.device)
        for _ in range(options.warmup):
            call()
        wait()
        for _ in range(options.repeat):
            with nvtx.annotate(RANGE):
                call()
                wait()
    return described | {"implementation": options.implementation, "repeat": options.repeat}


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    if options.emulate:
        options.device = "cpu"
    try:
        cases.require_device(options.device)
        (work,) = one(cases.selected(options))
        if options.repeat < 1 or options.warmup < 0:
            raise ProfilingError(
                f"repeat is {options.repeat} and warmup {options.warmup}, expected 1 and 0 or more; pass --repeat and "
                "--warmup so."
            )
        if (reason := baselines.installed(options.implementation, options.device)) is not None:
            raise ProfilingError(f"implementation is {options.implementation}, but {reason}")
        described = run(work, options)
    except (ProfilingError, ShapeError, UnsupportedError) as error:
        print(error, file=sys.stderr)
        return 2
    if options.describe:
        options.describe.write_text(json.dumps(described, indent=1) + "\n")
    where = options.emulate or options.device
    print(f"{work.name}: {described['repeat']} x {options.implementation} on {where}, {described['backend']}")
    return 0


def one(works: list[cases.Work]) -> list[cases.Work]:
    if len(works) != 1:
        raise ProfilingError(f"{len(works)} cases are asked for, expected one; pass one --case, one --model or sizes.")
    return works


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m profiling.run_case", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cases.add_arguments(made)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the path")
    made.add_argument("--emulate", metavar="ARCH", help="run once on the emulated GPU, to describe what it executes")
    made.add_argument("--implementation", choices=baselines.IMPLEMENTATIONS, default="cute_ssd")
    made.add_argument("--warmup", type=int, default=3, help="calls before the range (default 3)")
    made.add_argument("--repeat", type=int, default=1, help="calls, each in a range of its own (default 1)")
    made.add_argument("--seed", type=int, default=0, help="of the inputs (default 0)")
    made.add_argument("--describe", type=Path, metavar="FILE", help="write what profiling.report compares with here")
    return made


if __name__ == "__main__":
    sys.exit(main())
