"""A modelled timeline of one CTA for Perfetto or chrome://tracing: a row per warp with its role, and one per engine.

    python -m profiling.timeline --case 13 --launch 2 --out timeline.json
    python -m profiling.timeline --script mamba2_ssd.py --out timeline.json -- --gbehcdln 1,1,2,1,8,64,128,128

A warp is at work or waits. A wait names the barrier: for the kernels of this package with the name that their table of
pipes gives it ("full x[2]": stage 2 of the pipe x, until it is full), for any kernel with its offset in shared memory;
and who let it go on. Python lines are the innermost ones, which is all that the PTX has: of an inlined helper its own.
Times are modelled (cute_ssd/emulator/timing), nothing is measured.
"""

import argparse
import ast
import json
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

from cute_ssd import suite
from cute_ssd.compile import configuration_of
from cute_ssd.emulator import EmulatorError, UnsupportedInstruction, emulate
from cute_ssd.emulator.program import Program
from cute_ssd.emulator.report import short_name
from cute_ssd.emulator.timing import CLOCKS, Barrier, Model, Recording, Segment, Trace, simulate
from cute_ssd.emulator.timing.scripts import replay
from cute_ssd.emulator.timing.sm import PAYLOAD_SHIFT, PC_MASK

from . import ProfilingError

ENGINES = ("tensor core", "TMA loads", "TMA stores")
ENGINES_PER_CTA = 4  # rows of engines that the model counts for each CTA
LANES = 64  # rows of the timeline for one row of the model
PIPED = {"chunk_state": "state", "chunk_scan": "scan"}  # kernels with a table of pipes, and what `build` calls them


def timeline(recording: Recording, model: Model, cluster: int = 0) -> dict[str, Any]:
    """The trace events of the `cluster`-th replayed cluster of a launch, alone on its SMs, everything missing L2."""
    if not 0 <= cluster < len(recording.traces):
        raise ProfilingError(
            f"cluster is {cluster}, expected 0 to {len(recording.traces) - 1}: those that the launch was replayed from."
        )
    program, trace = recording.program, recording.traces[cluster]
    time = simulate(program, [trace], model, active_sms=int(model["multiprocessors"]), detailed=True)
    warps = len(trace.warps)
    names = barrier_names(trace, pipe_barriers(recording))
    rows = {row: f"warp {row}{role}" for row, role in enumerate(_roles(program, trace))}
    lanes: dict[int, list[float]] = {}
    placed: list[tuple[int, Segment]] = []  # what an engine does at the same time goes to rows of its own
    for segment in sorted(time.segments, key=lambda s: s.begin):
        tid = segment.row * LANES
        if segment.row >= warps:
            ends = lanes.setdefault(segment.row, [])
            lane = next((k for k, end in enumerate(ends) if end <= segment.begin), len(ends))
            ends[lane : lane + 1] = [segment.end]
            tid += min(lane, LANES - 1)
            cta, engine = divmod(segment.row - warps, ENGINES_PER_CTA)
            rows[segment.row] = ENGINES[engine] + (f" of CTA {cta}" if trace.nctas > 1 else "")
        placed.append((tid, segment))
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": f"modelled {short_name(recording.kernel)}"}}
    ]
    for tid in sorted({tid for tid, _ in placed}):
        common = {"ph": "M", "pid": 0, "tid": tid}
        events.append({"name": "thread_name", **common, "args": {"name": rows[tid // LANES]}})
        events.append({"name": "thread_sort_index", **common, "args": {"sort_index": tid}})
    scale = 1 / (model.clock_ghz * 1e3)  # Chrome's unit is the microsecond
    for tid, segment in placed:
        events.append(
            {
                "name": _name(program, segment, rows, names, warps),
                "cat": "wait" if segment.waits else "engine" if segment.row >= warps else "work",
                "ph": "X",
                "pid": 0,
                "tid": tid,
                "ts": segment.begin * scale,
                "dur": (segment.end - segment.begin) * scale,
                "args": _details(program, segment, rows, names),
            }
        )
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "kernel": recording.kernel,
            "modelled_cycles": time.cycles,
            "clock_ghz": model.clock_ghz,
            "cluster": trace.number,
        },
    }


def pipe_barriers(recording: Recording) -> list[str]:
    """Names of the mbarriers of a kernel of this package, in the order of their addresses; [] for any other."""
    configuration, kernel = configuration_of(recording.ptx), PIPED.get(recording.kernel.rpartition("_")[0])
    if configuration is None or kernel is None:
        return []
    table = getattr(configuration.build()[0], kernel).pipes
    names = []
    for name, pipe in table.pipes.items():
        for state in ("full", "empty") if pipe.consumers else ("full",):
            names += [f"{state} {name}[{stage}]" for stage in range(pipe.stages)]
    return names


def barrier_names(trace: Trace, pipes: list[str]) -> dict[Barrier, str]:
    """What every barrier of a cluster is called. `pipes` are the names of each CTA's mbarriers, if they have any."""
    barriers = sorted({trace.barrier(token) for token in range(len(trace.barriers))})
    names = {}
    for cta in range(trace.nctas):
        mine = [barrier for barrier in barriers if barrier.kind == "mbarrier" and barrier.cta == cta]
        known = pipes if len(pipes) == len(mine) else [""] * len(mine)
        suffix = f" of CTA {cta}" if trace.nctas > 1 else ""
        for barrier, pipe in zip(mine, known, strict=True):
            place = f"mbarrier at shared+{barrier.place:#x}{suffix}"
            names[barrier] = f"{pipe} ({place})" if pipe else place
    for barrier in barriers:
        number = f" {barrier.place}" if barrier.kind == "named barrier" else ""
        names.setdefault(barrier, f"{barrier.kind}{number}")
    return names


def _place(program: Program, record: int) -> str:
    """file:line of a record, or its PTX line where the compiler names none."""
    line = int(program.records["line"][record])
    instruction = program.instruction_at(line)
    if instruction is None or not instruction.source:
        return f"PTX line {line}"
    return f"{Path(instruction.source[0]).name}:{instruction.source[1]}"


def _text(program: Program, record: int) -> str:
    instruction = program.instruction_at(int(program.records["line"][record]))
    return instruction.text if instruction else ""


def _name(program: Program, segment: Segment, rows: dict[int, str], names: dict[Barrier, str], warps: int) -> str:
    opcode = _text(program, segment.record).split()[:1]
    if segment.row >= warps:
        return f"{''.join(opcode).split('.')[0]} {_place(program, segment.record)}"
    if not segment.waits:
        return "at work"
    if segment.barrier is None:
        return f"waits at {_place(program, segment.record)}: {''.join(opcode)}"
    released = f"{rows[segment.releaser_row]} at {_place(program, segment.releaser_record)}"
    return f"waits for {names[segment.barrier]}, released by {released}"


def _details(program: Program, segment: Segment, rows: dict[int, str], names: dict[Barrier, str]) -> dict[str, str]:
    details = {"ptx": _text(program, segment.record), "source": _place(program, segment.record)}
    if segment.barrier is not None:
        details["barrier"] = names[segment.barrier]
        details["released by"] = rows[segment.releaser_row]
        details["released at"] = _place(program, segment.releaser_record)
        details["released with"] = _text(program, segment.releaser_record)
    return details


def _roles(program: Program, trace: Trace) -> list[str]:
    """For each warp the Python function that most of its lines are in: with one method per role, its role. Lines and
    not instructions, of which an unrolled helper has more; and not what all the warps do before they part."""
    found = []
    for words in trace.warps:
        records, at = set(), 0
        listed = words.tolist()
        while at < len(listed):
            records.add(listed[at] & PC_MASK)
            at += 1 + (listed[at] >> PAYLOAD_SHIFT)
        executed = (program.instruction_at(int(program.records["line"][record])) for record in records)
        lines = {instruction.source for instruction in executed if instruction is not None and instruction.source}
        found.append(Counter(_function_at(*line) for line in sorted(lines)))
    common = set.intersection(*map(set, filter(None, found))) if len(found) > 1 and any(found) else set()
    chosen = []
    for functions in found:
        own = [name for name, _ in functions.most_common() if name not in common | {"", "kernel"}]
        chosen.append(f" ({own[0]})" if own else "")
    return chosen


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def _functions(path: str) -> tuple[tuple[int, int, str], ...]:
    try:
        tree = ast.parse(Path(path).read_text())
    except (OSError, SyntaxError, ValueError):
        return ()
    prefixes = {}  # of the methods of a part of a kernel, which may all be called `run`
    for owner in ast.walk(tree):
        methods = [n for n in ast.iter_child_nodes(owner) if isinstance(n, FUNCTIONS)]
        if isinstance(owner, ast.ClassDef) and all(method.name != "kernel" for method in methods):
            prefixes.update(dict.fromkeys(methods, f"{owner.name}."))
    functions = [n for n in ast.walk(tree) if isinstance(n, FUNCTIONS)]
    return tuple((n.lineno, n.end_lineno or n.lineno, prefixes.get(n, "") + n.name) for n in functions)


def _function_at(path: str, line: int) -> str:
    """The innermost function around a line; "" where there is none."""
    around = [(end - begin, name) for begin, end, name in _functions(path) if begin <= line <= end]
    return min(around)[1] if around else ""


def recordings(arguments: argparse.Namespace, model: Model) -> list[Recording]:
    """The launches of a suite case, or of a script."""
    if arguments.script is not None:
        if not Path(arguments.script).is_file():
            raise ProfilingError(
                f"script is {arguments.script!r}, which is not a file; give the path of a Python script."
            )
        return replay(arguments.script, arguments.arguments, model)
    with emulate("sm_100a", sanitize=False, timing=model, sampled=True) as report:
        suite.call(suite.inputs(suite.cases([arguments.case])[0]))
    return report.recordings


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m profiling.timeline", description=(__doc__ or "").split("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--case", type=int, help="a case of the public suite")
    what.add_argument("--script", help="a CuTe DSL script; its arguments follow after --")
    parser.add_argument("--launch", type=int, default=-1, help="number of the launch (default: the last)")
    parser.add_argument("--cluster", type=int, default=0, help="which of the replayed clusters (default 0)")
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="locked", help="1.5 GHz (default) or 1.965")
    parser.add_argument("--out", type=Path, default=Path("timeline.json"), help="default timeline.json")
    parser.add_argument("arguments", nargs="*", help="of the script")
    arguments = parser.parse_args(argv)
    model = Model(CLOCKS[arguments.clock])
    try:
        launches = recordings(arguments, model)
        if not -len(launches) <= arguments.launch < len(launches):
            raise ProfilingError(
                f"launch is {arguments.launch}, expected 0 to {len(launches) - 1}; there are {len(launches)}."
            )
        trace = timeline(launches[arguments.launch], model, arguments.cluster)
    except (ProfilingError, EmulatorError, UnsupportedInstruction, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(trace))
    cycles = trace["otherData"]["modelled_cycles"]
    print(f"{arguments.out}: {len(trace['traceEvents'])} events, modelled {cycles:.0f} cycles")
    return 0


if __name__ == "__main__":
    sys.exit(main())
