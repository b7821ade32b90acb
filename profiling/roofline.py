"""Roofline of measured or modelled results, as PNG and SVG: a point for each case below its roofs.

    python -m profiling.roofline results.json --out out/roofline
    python -m profiling.roofline modelled.json --device b200 --clock 1500 --out out/roofline

The roofs are those of the algorithm, not of a kernel: `least` says what it takes of each resource.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from cute_ssd import suite

from . import ProfilingError, cases, results


class Peaks(NamedTuple):
    """What a GPU can do: HBM and L2 in bytes/s, the rest for each SM and clock."""

    label: str
    sms: int
    mhz: float
    hbm: float
    l2: float
    tensor: int  # bf16 operations, dense
    shared: int = 128  # bytes
    mufu: int = 16  # exponentials


# Vendors' data sheets and white papers, unless said otherwise. The clock is the highest, for the B200 the one that the
# public suite locks; its HBM rate is the one that the suite's bounds are made with. L2 rates are measured ones
# (ademeure/QuickRunCUDA for the B200; 64 bytes a clock and SM elsewhere), good to a fifth.
PEAKS = {
    "a100": Peaks("A100 80 GB", 108, 1410, 2.04e12, 5.1e12, 2048),
    "h100": Peaks("H100 SXM", 132, 1830, 3.35e12, 5.5e12, 4096),
    "h200": Peaks("H200", 132, 1830, 4.8e12, 5.5e12, 4096),
    "b200": Peaks("B200", 148, 1500, 7.68e12, 13.3e12, 8192),
    "b300": Peaks("B300", 148, 1500, 7.68e12, 13.3e12, 8192, mufu=32),
}
TILE, DIAGONAL, WIDEST = 128, 32, 256
ROOFS = ("HBM", "L2", "shared", "tensor", "MUFU")
COLOURS = dict(zip(ROOFS, ("#1f6fb4", "#3a9d5d", "#c8792b", "#8a4fa3", "#b5403f"), strict=True))


class Point(NamedTuple):
    """One case: operations, time in µs, and what its roofs allow, in µs."""

    key: int | str
    intensity: float  # useful operations for each compulsory byte
    flops: float
    us: float
    roofs_us: dict[str, float]


def least(work: cases.Work) -> dict[str, float]:
    """What the algorithm takes of each resource: bytes, operations, exponentials. HBM and L2 are compulsory bytes.

    Shared memory, with tiles of 128 tokens whose products are tensor instructions 256 columns wide: x, B and C are
    written once, B and C read for scores, x for y_diag and state_in, B for state_in and C for y_off once for the heads
    of an instruction, the state written and read as an operand once. MUFU: a decay for each pair of tokens in the
    diagonal blocks of 32, and those of a token against the four anchors of its tile.
    """
    width, tokens = cases.DTYPES[work.dtype].itemsize, work.batch * work.seqlen
    rows, columns = work.nheads * work.headdim, work.ngroups * work.dstate
    found: dict[str, float] = {"HBM": work.compulsory_bytes, "L2": work.compulsory_bytes, "tensor": work.flops}
    if work.function == "selective_state_update":  # the state stays in registers
        return found | {"shared": 2 * tokens * (rows + 2 * columns) * width, "MUFU": tokens * work.nheads}
    shares = max(work.ngroups, -(-rows // WIDEST))  # B and C are read once for each
    elements = tokens * (3 * rows + 4 * columns + 2 * shares * work.dstate)
    states = work.batch * -(-work.seqlen // TILE) * 2 * rows * work.dstate
    exponentials = tokens * work.nheads * (DIAGONAL + TILE // DIAGONAL)
    return found | {"shared": (elements + states) * width, "MUFU": exponentials}


def roofs_us(work: cases.Work, peaks: Peaks) -> dict[str, float]:
    """µs that each resource alone needs for the call."""
    clocks = peaks.sms * peaks.mhz * 1e6
    rates = {
        "HBM": peaks.hbm,
        "L2": peaks.l2,
        "shared": peaks.shared * clocks,
        "tensor": peaks.tensor * clocks,
        "MUFU": peaks.mufu * clocks,
    }
    taken = least(work)
    return {name: taken[name] / rates[name] * 1e6 for name in ROOFS}


def works(whole: results.Results) -> dict[int | str, cases.Work]:
    """The sizes of each case: as the file gives them, or the suite's."""
    found = {}
    for case in whole.cases:
        key = case["case"]
        if "nheads" in case:
            known = {name: case[name] for name in cases.Work._fields}
            found[key] = cases.Work(**known | {"case": key if isinstance(key, int) else None})
        elif isinstance(key, int) and key in suite.published():
            found[key] = cases.suite_work(key)
    return found


def points(whole: results.Results, peaks: Peaks, implementation: str = results.OURS) -> list[Point]:
    """A point for each case that has a time and a size."""
    sizes = works(whole)
    made = []
    for row in whole.of(implementation):
        if row.us is not None and (work := sizes.get(row.key)) is not None:
            intensity = work.flops / work.compulsory_bytes
            made.append(Point(row.key, intensity, work.flops, row.us, roofs_us(work, peaks)))
    if not made:
        raise ProfilingError(
            f"{whole.path} has no case with a time and sizes, expected one at least; give results of profiling.bench "
            "or of cute_ssd bench --modelled --json."
        )
    return made


def peaks_of(whole: results.Results, device: str | None, mhz: float | None) -> Peaks:
    """Of the GPU that is named, or that the results were measured on; at the clock given, or that was sampled."""
    name = str(whole.environment.get("gpu") or "")
    key = device or next((k for k in PEAKS if k.upper() in name.upper()), None)
    if key is None:
        if whole.kind == "measured" and name:
            raise ProfilingError(
                f"gpu is {name!r}, expected one of {', '.join(PEAKS)}; pass --device with one of them."
            )
        key = "b200"
    sampled = max((s["max_mhz"] for s in whole.clocks), default=None)
    return PEAKS[key]._replace(mhz=mhz or sampled or PEAKS[key].mhz)


def text(made: list[Point]) -> str:
    """The same as a table: the time against every roof, and the highest of them."""
    rows = []
    for p in made:
        top = max(p.roofs_us, key=lambda name: p.roofs_us[name])
        cells = [f"{p.roofs_us[name]:.2f}" for name in ROOFS]
        rows.append([str(p.key), f"{p.intensity:.0f}", f"{p.us:.2f}", *cells, top, f"{p.roofs_us[top] / p.us:.1%}"])
    return results.table(["case", "FLOP/B", "µs", *(f"{n} µs" for n in ROOFS), "roof", "reached"], rows)


def draw(made: list[Point], peaks: Peaks, title: str, out: Path) -> list[Path]:
    """Writes out.png and out.svg."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ProfilingError(
            "matplotlib is not installed, expected it for the picture; pip install '.[profiling]', or pass --table."
        ) from None
    figure, axes = pyplot.subplots(figsize=(9, 6), layout="constrained")
    clocks = peaks.sms * peaks.mhz * 1e6
    flat = peaks.tensor * clocks
    ends = [min(p.intensity for p in made) / 4, max(max(p.intensity for p in made) * 4, 2 * flat / peaks.hbm)]
    for name, rate in (("HBM", peaks.hbm), ("L2", peaks.l2)):
        axes.plot(ends, [min(x * rate, flat) / 1e12 for x in ends], alpha=0)  # for the limits of the axes
        knee = flat / rate
        xs = [ends[0], min(knee, ends[1])]
        axes.plot(xs, [x * rate / 1e12 for x in xs], color=COLOURS[name], label=f"{name} {rate / 1e12:.2f} TB/s")
    axes.plot(ends, [flat / 1e12] * 2, color=COLOURS["tensor"], label=f"tensor {flat / 1e12:.0f} TFLOP/s")
    for name, what in (("shared", "shared memory"), ("MUFU", "MUFU")):
        for number, p in enumerate(made):
            height = p.flops / p.roofs_us[name] / 1e6
            sides = [p.intensity / 1.15, p.intensity * 1.15]
            label = f"{what}, tiles of {TILE} tokens" if number == 0 else None
            axes.plot(sides, [height] * 2, color=COLOURS[name], linewidth=1.2, label=label)
    axes.plot([p.intensity for p in made], [p.flops / p.us / 1e6 for p in made], "o", color="black", markersize=4)
    for p in made:
        axes.annotate(str(p.key), (p.intensity, p.flops / p.us / 1e6), (4, 2), textcoords="offset points", fontsize=7)
    axes.set(
        xscale="log", yscale="log", xlabel="useful FLOP for each compulsory byte", ylabel="useful TFLOP/s", title=title
    )
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(loc="lower right", fontsize=8)
    paths = [out.with_name(out.name + suffix) for suffix in (".png", ".svg")]
    out.parent.mkdir(parents=True, exist_ok=True)
    for path in paths:
        figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return paths


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.roofline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="JSON of profiling.bench or of cute_ssd bench --modelled --json")
    parser.add_argument("--implementation", default=results.OURS, help="default cute_ssd")
    parser.add_argument(
        "--device", choices=PEAKS, help="whose roofs (default: the results' GPU; b200 where they have none)"
    )
    parser.add_argument("--clock", type=float, metavar="MHZ", help="default: the highest sampled, else the table's")
    parser.add_argument("--out", type=Path, default=Path("roofline"), metavar="PREFIX", help="of the .png and .svg")
    parser.add_argument("--table", action="store_true", help="print the table only")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    arguments = parser.parse_args(argv)
    try:
        whole = results.load(arguments.results)
        peaks = peaks_of(whole, arguments.device, arguments.clock)
        made = points(whole, peaks, arguments.implementation)
        title = f"{arguments.implementation}, {whole.kind}, roofs of {peaks.label} at {peaks.mhz:.0f} MHz"
        drawn: list[Path] = [] if arguments.table else draw(made, peaks, title, arguments.out)
    except ProfilingError as error:
        print(error, file=sys.stderr)
        return 2
    described: dict[str, Any] = {"title": title, "peaks": peaks._asdict(), "points": [p._asdict() for p in made]}
    print(json.dumps(described, indent=1) if arguments.json else f"{title}\n\n{text(made)}")
    for path in drawn:
        print(f"wrote {path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
