"""What bound each kernel: speed of light of every resource, bytes against those that had to move, tcgen05 counts.

    python -m profiling.report out/case9.ncu-rep --out out/case9.report

It reads a .ncu-rep (with the package ncu-report) or the CSV of ncu's raw page, prints markdown, and writes
out/case9.report.json, .csv and .md. Where profiling.ncu_profile left case9.case.json beside it, it compares with that.
"""

import argparse
import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

from . import ProfilingError, metrics, ncu_files, results

CASE_SUFFIX = ".case.json"
# In the order of the tables.
RESOURCES = ("HBM", "L2", "shared", "tensor", "MUFU", "FMA", "ALU", "issue")
# A resource binds from here on; below, kernels wait for latencies, for each other or for the launch.
BINDS = 60.0
MORE_BYTES = 1.10


def analyse(kernel: ncu_files.Kernel) -> dict[str, Any]:
    """One kernel as plain values; None where the report has not what it takes."""
    m = kernel.metrics
    percent = {name: _largest(m, names) for name, names in metrics.PERCENT.items()}
    wavefronts = _wavefronts(m)
    cycles = m.get(metrics.SM_CYCLES)
    percent["shared"] = None
    if wavefronts["lsu"] is not None and cycles:
        percent["shared"] = 100 * sum(count or 0.0 for count in wavefronts.values()) / cycles
    dram = _sum(m, (metrics.DRAM_READ, metrics.DRAM_WRITE))
    seconds, clock = m.get(metrics.TIME), m.get(metrics.CLOCK)
    row: dict[str, Any] = {
        "number": kernel.number,
        "kernel": kernel.name,
        "grid": kernel.grid,
        "block": kernel.block,
        "time_us": None if seconds is None else seconds * 1e6,
        "clock_mhz": None if clock is None else clock / 1e6,
        "percent": {name: percent[name] for name in RESOURCES},
        "shared_wavefronts": wavefronts,
        "dram_bytes": m.get(metrics.DRAM) if dram is None else dram,
        "l2_bytes": m.get("lts__t_bytes.sum"),
        "l2_hit_percent": m.get("lts__t_sector_hit_rate.pct"),
        "mufu": m.get("sm__inst_executed_pipe_xu.sum"),
        "tcgen05": _sum(m, metrics.TCGEN05),
    }
    row["binding"], row["flags"] = _binding(row["percent"], m)
    return row


def _largest(m: dict[str, float], names: tuple[str, ...]) -> float | None:
    return max((m[name] for name in names if name in m), default=None)


def _sum(m: dict[str, float], names: tuple[str, ...]) -> float | None:
    """The sum where all are known."""
    return sum(m[name] for name in names) if all(name in m for name in names) else None


def _wavefronts(m: dict[str, float]) -> dict[str, float | None]:
    """Wavefronts in shared memory by who made them; on sm_90 wgmma's operands are among those of the LSU."""
    copied = [m[name] for name in metrics.TMA_BYTES if name in m]
    return {
        "tensor": m.get(metrics.TENSOR_WAVEFRONTS),
        "lsu": m.get(metrics.LSU_WAVEFRONTS),
        "tma": sum(copied) / metrics.WAVEFRONT_BYTES if copied else None,
    }


def _binding(percent: dict[str, float | None], m: dict[str, float]) -> tuple[str | None, list[str]]:
    known = {name: value for name, value in percent.items() if value is not None}
    if not known:
        return None, ["the report has none of the resources' metrics; profile with profiling.ncu_profile"]
    top = max(known, key=lambda name: known[name])
    binding, flags = top, []
    if missing := [name for name in RESOURCES if name not in known]:
        flags.append(f"not in the report: {', '.join(missing)}")
    if known[top] < BINDS:
        binding = f"unknown ({top} {known[top]:.0f} %)" if missing else f"latency ({top})"
        if not missing:
            flags.append(f"no resource above {BINDS:.0f} %: latency, synchronisation or too few CTAs")
    blocks, sms = m.get("launch__grid_size"), m.get("device__attribute_multiprocessor_count")
    if blocks and sms and blocks < sms:
        flags.append(f"{blocks:.0f} CTAs on {sms:.0f} SMs")
    for name, value in known.items():
        if value > 100.5:
            flags.append(f"{name} above 100 %: passes of a replay that differed, or a counter that counts otherwise")
    return binding, flags


def whole(kernels: list[ncu_files.Kernel], case: dict[str, Any] | None) -> dict[str, Any]:
    """Every kernel, and their sums against what the case had to move."""
    rows = [analyse(kernel) for kernel in kernels]
    if all(value is None for row in rows for value in (row["time_us"], *row["percent"].values())):
        raise ProfilingError(
            "The report has neither times nor metrics of a resource, expected those of profiling.ncu_profile; profile "
            "with it."
        )

    def total(name: str) -> float | None:
        values = [row[name] for row in rows]
        return None if None in values else sum(values)

    calls = (case or {}).get("repeat", 1)
    sums: dict[str, Any] = {"calls": calls, "kernels_per_call": len(rows) / calls}
    for name in ("time_us", "dram_bytes", "tcgen05"):
        value = total(name)
        sums[name] = None if value is None else value / calls
    flags = []
    if case is not None:
        compulsory, expected = case["compulsory_bytes"], case.get("tcgen05")
        sums["compulsory_bytes"], sums["tcgen05_planned"] = compulsory, expected
        if sums["dram_bytes"] is not None:
            sums["bytes_over_compulsory"] = sums["dram_bytes"] / compulsory
            if sums["bytes_over_compulsory"] > MORE_BYTES:
                flags.append(f"{sums['bytes_over_compulsory']:.2f} times the compulsory bytes came from or went to HBM")
        if expected is not None and sums["tcgen05"] is not None and sums["tcgen05"] != expected:
            flags.append(f"{sums['tcgen05']:.0f} tcgen05.mma were executed, the plan says {expected}")
    return {"case": case, "kernels": rows, "sums": sums, "flags": flags}


def markdown(report: dict[str, Any]) -> str:
    header = ["kernel", "grid", "µs", *(f"{name} %" for name in RESOURCES), "HBM MB", "tcgen05", "binding"]
    rows = []
    for row in report["kernels"]:
        percent = [_cell(row["percent"][name]) for name in RESOURCES]
        moved = None if row["dram_bytes"] is None else row["dram_bytes"] / 1e6
        counts = [_cell(moved, 2), _cell(row["tcgen05"], 0)]
        rows.append(
            [_short(row["kernel"]), row["grid"], _cell(row["time_us"], 2), *percent, *counts, row["binding"] or "-"]
        )
    lines = [results.table(header, rows)]
    s, case = report["sums"], report["case"]
    if case is not None:
        lines.insert(0, f"{case['name']}, {case['implementation']}: {case['backend']}\n")
    lines.append(
        f"\nA call: {s['kernels_per_call']:g} kernels, {_cell(s['time_us'], 2)} µs in them (gaps are not in it)"
    )
    if "bytes_over_compulsory" in s:
        lines[-1] += (
            f", {s['dram_bytes'] / 1e6:.2f} MB to and from HBM against {s['compulsory_bytes'] / 1e6:.2f} MB compulsory "
            f"({s['bytes_over_compulsory']:.2f} x)"
        )
    if s["tcgen05"] is not None and s.get("tcgen05_planned") is not None:
        lines[-1] += f", {s['tcgen05']:.0f} tcgen05.mma against {s['tcgen05_planned']} planned"
    lines[-1] += "."
    for row in report["kernels"]:
        lines += [f"* {_short(row['kernel'])} ({row['number']}): {flag}" for flag in row["flags"]]
    lines += [f"* {flag}" for flag in report["flags"]]
    return "\n".join(lines)


def _cell(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _short(name: str) -> str:
    """CuTe DSL spells every argument into a kernel's name."""
    first = name.split("(")[0]
    return first if len(first) <= 48 else first[:45] + "..."


def as_csv(report: dict[str, Any]) -> str:
    """A line for each kernel."""
    plain = ("number", "kernel", "grid", "block", "time_us", "clock_mhz")
    counts = ("dram_bytes", "l2_bytes", "l2_hit_percent", "mufu", "tcgen05", "binding")
    waves = ("tensor", "lsu", "tma")
    header = [
        *plain,
        *(f"{n}_percent" for n in RESOURCES),
        *(f"shared_wavefronts_{n}" for n in waves),
        *counts,
        "flags",
    ]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    for row in report["kernels"]:
        percent, shared = (row["percent"][n] for n in RESOURCES), (row["shared_wavefronts"][n] for n in waves)
        cells = [*(row[n] for n in plain), *percent, *shared, *(row[n] for n in counts), "; ".join(row["flags"])]
        writer.writerow(["" if cell is None else cell for cell in cells])
    return out.getvalue()


def read_case(path: Path, given: Path | None) -> dict[str, Any] | None:
    """What the case had to move: of the file given, or of the one beside the report; None without one."""
    beside = path.with_name(path.name.removesuffix(path.suffix) + CASE_SUFFIX)
    source = given or (beside if beside.is_file() else None)
    if source is None:
        return None
    try:
        case: dict[str, Any] = json.loads(source.read_text())
        for name in ("name", "compulsory_bytes", "repeat", "backend", "implementation"):
            _ = case[name]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ProfilingError(
            f"{source} does not describe a case ({type(error).__name__}: {error}), expected what profiling.run_case "
            "--describe writes; write it again."
        ) from None
    return case


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path, help="a .ncu-rep, or a CSV of ncu --page raw --csv")
    parser.add_argument(
        "--case-file", type=Path, metavar="FILE", help="of run_case --describe (default: beside the report)"
    )
    parser.add_argument("--out", type=Path, metavar="PREFIX", help="write PREFIX.json, PREFIX.csv and PREFIX.md")
    parser.add_argument("--json", action="store_true", help="print JSON instead of markdown")
    arguments = parser.parse_args(argv)
    try:
        case = read_case(arguments.report, arguments.case_file)
        report = whole(ncu_files.read(arguments.report), case)
    except ProfilingError as error:
        print(error, file=sys.stderr)
        return 2
    forms = {".json": json.dumps(report, indent=1) + "\n", ".csv": as_csv(report), ".md": markdown(report) + "\n"}
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        for suffix, content in forms.items():
            arguments.out.with_name(arguments.out.name + suffix).write_text(content)
    print(forms[".json" if arguments.json else ".md"], end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
