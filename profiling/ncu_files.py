"""What Nsight Compute counted, kernel by kernel, from a .ncu-rep or from the CSV of its raw page."""

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from . import ProfilingError

_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_UNITS = {
    **{f"{prefix}{unit}": (factor, unit) for prefix, factor in _PREFIXES.items() for unit in ("byte", "hz")},
    **dict.fromkeys(("ns", "nsecond"), (1e-09, "s")),
    **dict.fromkeys(("us", "usecond"), (1e-06, "s")),
    **dict.fromkeys(("ms", "msecond"), (0.001, "s")),
    **dict.fromkeys(("s", "sec", "second"), (1.0, "s")),
}


class Kernel(NamedTuple):
    """One profiled launch. Metrics are in base units: seconds, bytes, hertz, percent, counts."""

    number: int
    name: str
    grid: str
    block: str
    metrics: dict[str, float]


def read(path: Path) -> list[Kernel]:
    """The kernels of a file in the order of their launch."""
    if not path.is_file():
        raise ProfilingError(f"There is no file {path}, expected a .ncu-rep or a CSV of ncu's raw page; give its path.")
    if path.suffix == ".ncu-rep":
        return read_report(path)
    return read_csv(path.read_text(errors="replace"), str(path))


def scale(unit: str) -> float:
    """What a value in this unit is multiplied by to be in base units: 1e9 for "cycle/nsecond", 1000 for "Kbyte"."""
    over, _, under = unit.partition("/")
    return _UNITS.get(over, (1.0, over))[0] / _UNITS.get(under, (1.0, under))[0]


def number(cell: str) -> float | None:
    """A cell's number, with or without separators of thousands; None where it is no number, such as "n/a"."""
    try:
        return float(cell.replace(",", ""))
    except ValueError:
        return None


def read_csv(text: str, path: str) -> list[Kernel]:
    """`ncu --page raw --csv`: a header, a line of units, a line for each kernel; other output may come before it."""
    rows = list(csv.reader(io.StringIO(text)))
    start = next((i for i, row in enumerate(rows) if row[:1] == ["ID"] and "Kernel Name" in row), None)
    if start is None:
        raise ProfilingError(
            f"{path} has no header of ncu's raw page, expected a line with ID and Kernel Name; write it again with ncu "
            "--import REPORT --page raw --csv."
        )
    header = rows[start]
    if "Metric Name" in header:
        raise ProfilingError(
            f"{path} is ncu's details page, expected the raw page; write it again with ncu --import REPORT --page raw "
            "--csv."
        )
    body = [row for row in rows[start + 1 :] if row and not row[0].startswith("==")]
    if not body or body[0][0]:
        raise ProfilingError(
            f"{path} has no line of units below its header, expected one; write it again with ncu --import REPORT "
            "--page raw --csv."
        )
    units, lines = body[0], body[1:]
    if not lines:
        raise ProfilingError(f"{path} has no kernel, expected one at least; see whether the call ran on the GPU.")
    kernels: list[Kernel] = []
    for line in lines:
        if len(line) != len(header) or len(units) != len(header):
            raise ProfilingError(
                f"{path} is damaged: kernel {line[0]!r} has {len(line)} of {len(header)} cells, expected all; write it "
                "again."
            )
        cells = dict(zip(header, line, strict=True))
        found = {
            name: value * scale(unit)
            for name, unit, cell in zip(header, units, line, strict=True)
            if "__" in name and (value := number(cell)) is not None
        }
        launch = (cells.get("Grid Size", ""), cells.get("Block Size", ""))
        kernels.append(Kernel(len(kernels), cells["Kernel Name"], *launch, found))
    return kernels


def read_report(path: Path, load: Callable[[str], Any] | None = None) -> list[Kernel]:
    """A .ncu-rep, through NVIDIA's reader; `load` stands in for its `load_report`."""
    if load is None:
        try:
            import ncu_report
        except ImportError:
            raise ProfilingError(
                f"{path} needs the package ncu-report, which is not installed, to be read; pip install ncu-report, or "
                "give the CSV of ncu --import REPORT --page raw --csv."
            ) from None
        load = ncu_report.load_report
    try:
        context = load(str(path))
        actions = [action for part in context for action in part]
    except Exception as error:
        raise ProfilingError(f"{path} cannot be read ({error}), expected a report of ncu; profile again.") from None
    if not actions:
        # A file that is damaged is an empty report to NVIDIA's reader, which says so on stderr only.
        raise ProfilingError(f"{path} is damaged or has no kernel, expected one at least; profile again.")
    return [_action(number, action) for number, action in enumerate(actions)]


def _action(number: int, action: Any) -> Kernel:
    found, texts = {}, {}
    for name in action.metric_names():
        metric = action.metric_by_name(name)
        value = metric.value() if metric is not None else None
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found[name] = float(value) * scale(metric.unit() or "")
        elif isinstance(value, str):
            texts[name] = value

    def shape(what: str) -> str:
        sides = [found.get(f"launch__{what}_dim_{axis}") for axis in "xyz"]
        return f"({', '.join(f'{side:.0f}' for side in sides if side is not None)})" if None not in sides else ""

    return Kernel(number, action.name(), shape("grid"), shape("block"), found)
