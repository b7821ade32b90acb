"""Times of the public suite and of model shapes, cute_ssd beside what else is installed, in one run.

    python -m profiling.bench --out results.json                    the suite
    python -m profiling.bench --model nemotron-nano-9b-v2           a model's prefill; --decode its decode step

Every implementation is measured in the same process, case by case.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from cute_ssd import suite
from cute_ssd.errors import ShapeError

from . import ProfilingError, baselines, cases, environment, results, timing


def measure(works: list[cases.Work], names: list[str], device: str, options: argparse.Namespace) -> dict[str, Any]:
    """The whole result, as it is written."""
    flush, flushed = timing.flusher(device)
    measured = []
    with torch.inference_mode(), tqdm(total=len(works), unit="case", disable=None, leave=False) as bar:
        for work in works:
            measured.append(_case(work, names, device, flush, options))
            bar.update()
    protocol = {
        "timer": options.timer,
        "span": "first kernel's start to last kernel's end" if options.timer == "cupti" else "around the call",
        "iterations": options.iterations,
        "warmup": options.warmup,
        "buffers": options.buffers,
        "l2_flush_bytes": flushed,
        "seed": options.seed,
    }
    whole: dict[str, Any] = {"kind": "measured", "device": device, "environment": environment.describe(device)}
    whole |= {"protocol": protocol, "cases": measured}
    by_name = {name: [_row(case, name) for case in measured] for name in names}
    whole["totals"] = {name: results.totals(rows) for name, rows in by_name.items()}
    ours = whole["totals"].get(results.OURS, {})
    return whole | {"geomean_us": ours.get("geomean_us"), "score": ours.get("score")}


def _row(case: dict[str, Any], name: str) -> results.Row:
    r = case["results"][name]
    return results.Row(case["case"], r["median_us"], r["p10_us"], r["p90_us"], message=r["message"])


def _case(
    work: cases.Work, names: list[str], device: str, flush: Callable[[], Any], options: argparse.Namespace
) -> dict[str, Any]:
    # Every call takes the next of several sets of buffers, at other addresses, as in use.
    sets = [cases.inputs(work, options.seed + number, device) for number in range(options.buffers)]
    found: dict[str, Any] = {}
    for name in names:
        found[name] = _implementation(name, work, sets, device, flush, options)
    described = work._asdict() | {"case": work.key, "flops": work.flops, "compulsory_bytes": work.compulsory_bytes}
    if work.case is not None:
        described["bound_us"], described["baseline_us"] = suite.published()[work.case]
        for r in found.values():
            r["score"] = 0.0
            if r["median_us"] is not None:
                r["score"] = suite.score(r["median_us"], described["bound_us"], described["baseline_us"])
    return described | {"results": found}


def _implementation(
    name: str,
    work: cases.Work,
    sets: list[dict[str, Any]],
    device: str,
    flush: Callable[[], Any],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """One side of one case. What it raises is its result: the others go on."""
    clocks = environment.Clocks(device)
    try:
        if (reason := baselines.installed(name, device)) is not None:
            raise ProfilingError(reason)
        calls = [baselines.IMPLEMENTATIONS[name].prepare(work, given) for given in sets]
        for number in range(max(options.warmup, len(calls))):
            calls[number % len(calls)]()
        if device == "cuda":
            torch.cuda.synchronize()
        timed = timing.TIMERS[options.timer](calls, flush, options.iterations)
        clocks.sample(lambda: (flush(), calls[0]()))
    except Exception as error:
        message = str(error) if isinstance(error, ProfilingError) else f"{type(error).__name__}: {error}"
        nothing = dict.fromkeys(timing.Timing._fields)
        return {**nothing, "clocks": clocks.range(), "message": message}
    return {**timed._asdict(), "clocks": clocks.range(), "message": ""}


def text(whole: dict[str, Any]) -> str:
    """The result as markdown: a row for each case, a time and spread for each implementation."""
    names = list(whole["totals"])
    header = ["case", "batch", "seqlen", "bound µs"]
    for name in names:
        header += [f"{name} µs", "p10 to p90"]
    header += ["score", "GB/s"]
    rows = []
    for case in whole["cases"]:
        bound = case.get("bound_us")
        cells = [str(case["case"]), str(case["batch"]), str(case["seqlen"]), "" if bound is None else f"{bound:.1f}"]
        for name in names:
            r = case["results"][name]
            spread = "" if r["median_us"] is None else f"{r['p10_us']:.1f} to {r['p90_us']:.1f}"
            cells += ["-" if r["median_us"] is None else f"{r['median_us']:.1f}", spread]
        first = case["results"][names[0]]
        rate = case["compulsory_bytes"] / first["median_us"] / 1e3 if first["median_us"] else None
        cells += [f"{first['score']:.3f}" if "score" in first else "", f"{rate:.0f}" if rate else "-"]
        rows.append(cells)
    for label, key, digits in (("total", "total_us", 1), ("geomean", "geomean_us", 2), ("score", "score", 4)):
        values = [whole["totals"][name][key] for name in names]
        if any(value is not None for value in values):
            cells = ["" if value is None else f"{value:.{digits}f}" for value in values]
            rows.append([label, "", "", "", *(part for cell in cells for part in (cell, "")), "", ""])
    lines = [_headline(whole), "", results.table(header, rows)]
    reasons: dict[str, list[str]] = {}
    for case in whole["cases"]:
        for name in names:
            if message := case["results"][name]["message"]:
                reasons.setdefault(f"{name}: {message}", []).append(str(case["case"]))
    lines += [f"\n{reason} (case {', '.join(where)})" for reason, where in reasons.items()]
    return "\n".join(lines)


def _headline(whole: dict[str, Any]) -> str:
    e, p = whole["environment"], whole["protocol"]
    if whole["device"] != "cuda":
        return (
            f"CPU ({e['machine']}, {e['threads']} threads): this tries the path only; the times are not a GPU's, the "
            "bounds and the score are those of a B200."
        )
    samples = [r["clocks"] for case in whole["cases"] for r in case["results"].values() if r["clocks"]]
    clock = "SM clock unknown"
    if samples:
        low, high = min(s["min_mhz"] for s in samples), max(s["max_mhz"] for s in samples)
        clock = f"SM clock {low:.0f} to {high:.0f} MHz"
    cold = f"cold L2 ({p['l2_flush_bytes'] / 2**20:.0f} MiB written before each call)"
    return (
        f"{e['gpu']} ({e['arch']}), driver {e.get('driver')}, {clock}, {p['timer']} times of {p['iterations']} calls, "
        f"{cold}, {p['buffers']} sets of buffers"
    )


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        cases.require_device(options.device)
        options.timer = options.timer or ("cupti" if options.device == "cuda" else "host")
        if (options.timer == "host") != (options.device == "cpu"):
            raise ProfilingError(
                f"timer is {options.timer} on {options.device}, expected cupti or events on cuda and host on cpu; "
                "leave --timer out."
            )
        for name, least in (("iterations", 1), ("warmup", 0), ("buffers", 1)):
            if getattr(options, name) < least:
                raise ProfilingError(f"{name} is {getattr(options, name)}, expected {least} or more; pass --{name} so.")
        works = cases.selected(options)
    except (ProfilingError, ShapeError) as error:
        print(error, file=sys.stderr)
        return 2
    names = list(dict.fromkeys([results.OURS, *(options.baseline or _available(options.device))]))
    whole = measure(works, names, options.device, options)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(whole, indent=1) + "\n")
    print(json.dumps(whole, indent=1) if options.json else text(whole))
    return 0 if all(case["results"][results.OURS]["median_us"] is not None for case in whole["cases"]) else 1


def _available(device: str) -> list[str]:
    return [name for name in baselines.IMPLEMENTATIONS if baselines.installed(name, device) is None]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cases.add_arguments(parser)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the path")
    parser.add_argument(
        "--baseline",
        action="append",
        choices=[name for name in baselines.IMPLEMENTATIONS if name != results.OURS],
        help="measure against this; may be repeated (default: all that are installed)",
    )
    parser.add_argument("--timer", choices=timing.TIMERS, help="default cupti (on the CPU: host)")
    parser.add_argument("--iterations", type=int, default=50, help="timed calls (default 50)")
    parser.add_argument("--warmup", type=int, default=10, help="calls before them (default 10)")
    parser.add_argument("--buffers", type=int, default=3, help="sets of inputs that calls take in turn (default 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (default 0)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON here")
    parser.add_argument("--json", action="store_true", help="print the JSON instead of the table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
