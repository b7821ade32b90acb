"""A modelled timeline of one CTA for Perfetto or chrome://tracing: a row per warp with its role, and one per engine.

    python -m profiling.timeline --case 13 --launch 2 --out timeline.json
    python -m profiling.timeline --script mamba2_ssd.py --out timeline.json -- --gbehcdln 1,1,2,1,8,64,128,128

A warp is at work or waits; a wait names the instruction that waits and the one that let it go on, with their Python
lines. Times are modelled (cute_ssd/emulator/timing), nothing is measured.
"""

import argparse
import ast
import json
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cute_ssd import suite
from cute_ssd.emulator import EmulatorError, UnsupportedInstruction, emulate
from cute_ssd.emulator.program import Program
from cute_ssd.emulator.report import short_name
from cute_ssd.emulator.timing import CLOCKS, Model, Recording, Segment, simulate
from cute_ssd.emulator.timing.scripts import replay
from cute_ssd.emulator.timing.sm import PAYLOAD_SHIFT, PC_MASK

from . import ProfilingError

ENGINES = ("tensor core", "TMA loads", "TMA stores")
ENGINES_PER_CTA = 4  # rows of engines that the model counts for each CTA
LANES = 64  # rows of the timeline for one row of the model


def timeline(recording: Recording, model: Model, cluster: int = 0) -> dict[str, Any]:
    """The trace events of the `cluster`-th replayed cluster of a launch, alone on its SMs, everything missing L2."""
    if not 0 <= cluster < len(recording.traces):
        raise ProfilingError(
            f"cluster is {cluster}, expected 0 to {len(recording.traces) - 1}: those that the launch was replayed from."
        )
    program, trace = recording.program, recording.traces[cluster]
    time = simulate(program, [trace], model, active_sms=int(model["multiprocessors"]), detailed=True)
    warps = len(trace.warps)
    rows = {row: f"warp {row}{_role(program, words)}" for row, words in enumerate(trace.warps) if len(words)}
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
                "name": _name(program, segment, rows, warps),
                "cat": "wait" if segment.waits else "engine" if segment.row >= warps else "work",
                "ph": "X",
                "pid": 0,
                "tid": tid,
                "ts": segment.begin * scale,
                "dur": (segment.end - segment.begin) * scale,
                "args": _details(program, segment, rows),
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


def _name(program: Program, segment: Segment, rows: dict[int, str], warps: int) -> str:
    opcode = _text(program, segment.record).split()[:1]
    if segment.row >= warps:
        return f"{''.join(opcode).split('.')[0]} {_place(program, segment.record)}"
    if not segment.waits:
        return "at work"
    if segment.releaser_row < 0:
        return f"waits at {_place(program, segment.record)}"
    return f"waits at {_place(program, segment.record)} for {rows.get(segment.releaser_row, 'an engine')}"


def _details(program: Program, segment: Segment, rows: dict[int, str]) -> dict[str, str]:
    details = {"ptx": _text(program, segment.record), "source": _place(program, segment.record)}
    if segment.releaser_row >= 0:
        details["released by"] = rows.get(segment.releaser_row, "")
        details["released at"] = _place(program, segment.releaser_record)
        details["released with"] = _text(program, segment.releaser_record)
    return details


def _role(program: Program, words: np.ndarray) -> str:
    """The Python function that most of a warp's code comes from: with one method per role, its role."""
    records, at = set(), 0
    listed = words.tolist()
    while at < len(listed):
        records.add(listed[at] & PC_MASK)
        at += 1 + (listed[at] >> PAYLOAD_SHIFT)
    functions = Counter[str]()
    for record in records:
        instruction = program.instruction_at(int(program.records["line"][record]))
        if instruction is not None and instruction.source:
            functions[_function_at(instruction.source[0], instruction.source[1])] += 1
    functions.pop("", None)
    functions.pop("kernel", None)
    return f" ({functions.most_common(1)[0][0]})" if functions else ""


@cache
def _functions(path: str) -> tuple[tuple[int, int, str], ...]:
    try:
        tree = ast.parse(Path(path).read_text())
    except (OSError, SyntaxError, ValueError):
        return ()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return tuple((n.lineno, n.end_lineno or n.lineno, n.name) for n in ast.walk(tree) if isinstance(n, kinds))


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
