"""Results of `profiling.bench` and of `python -m cute_ssd bench --modelled --json`, read as one thing; their scores."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cute_ssd import suite

from . import ProfilingError

OURS = "cute_ssd"


class Row(NamedTuple):
    """One case of one implementation. p10 and p90 are None for modelled results, `us` is None where it failed."""

    key: int | str
    us: float | None
    p10_us: float | None = None
    p90_us: float | None = None
    binding: str = ""
    message: str = ""


class Results(NamedTuple):
    """One file: its rows by implementation, each in the file's order."""

    path: str
    kind: str  # "measured" or "modelled"
    environment: dict[str, Any]
    rows: dict[str, list[Row]]
    cases: list[dict[str, Any]]

    def of(self, implementation: str) -> list[Row]:
        if implementation not in self.rows:
            raise ProfilingError(
                f"implementation is {implementation!r}, expected one of {self.path}: {', '.join(self.rows)}; pass one "
                "of them."
            )
        return self.rows[implementation]

    @property
    def clocks(self) -> list[dict[str, float]]:
        """The sampled clocks of every timing."""
        return [r["clocks"] for case in self.cases for r in case.get("results", {}).values() if r.get("clocks")]


def load(path: Path | str) -> Results:
    """Raises ProfilingError where the file is missing, damaged or something else."""
    try:
        data = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise ProfilingError(f"There is no file {path}, expected a JSON of results; give the path of one.") from None
    except (OSError, ValueError) as error:
        raise ProfilingError(f"{path} is not JSON ({error}), expected results; write them again.") from None
    cases = data.get("cases") if isinstance(data, dict) else None
    if not isinstance(cases, list) or not cases or not all(isinstance(c, dict) and "case" in c for c in cases):
        raise ProfilingError(
            f"{path} has no cases, expected results of profiling.bench or of cute_ssd bench --modelled --json; give "
            "the path of such a file."
        )
    try:
        if "modelled_us" in cases[0]:
            rows = {OURS: [Row(c["case"], float(c["modelled_us"]), binding=c.get("binding") or "") for c in cases]}
            return Results(str(path), "modelled", data.get("environment", {}), rows, cases)
        rows = {}
        for case in cases:
            for name, r in case["results"].items():
                row = Row(case["case"], r["median_us"], r["p10_us"], r["p90_us"], message=r.get("message") or "")
                rows.setdefault(name, []).append(row)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProfilingError(
            f"{path} lacks a field of results ({type(error).__name__}: {error}), expected a file as profiling.bench "
            "writes it; write it again."
        ) from None
    return Results(str(path), "measured", data.get("environment", {}), rows, cases)


def geomean(values: Iterable[float]) -> float | None:
    """The geometric mean; None of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs)) if logs else None


def mean_score(times: Mapping[int | str, float | None]) -> float | None:
    """The mean of the scores of the suite's cases among these; None without one. A case that failed scores 0."""
    table = suite.published()
    scores = [
        0.0 if us is None else suite.score(us, *table[key])
        for key, us in times.items()
        if isinstance(key, int) and key in table
    ]
    return math.fsum(scores) / len(scores) if scores else None


def totals(rows: Iterable[Row]) -> dict[str, float | None]:
    """Sum and geometric mean of the times, and the mean score; None for all where a case has no time."""
    rows = list(rows)
    times = [row.us for row in rows if row.us is not None]
    whole = len(times) == len(rows) and bool(rows)
    return {
        "total_us": math.fsum(times) if whole else None,
        "geomean_us": geomean(times) if whole else None,
        "score": mean_score({row.key: row.us for row in rows}),
    }


def table(header: list[str], rows: list[list[str]]) -> str:
    """A markdown table, its columns aligned; the first to the left, the others to the right."""
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        padded = [c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])
