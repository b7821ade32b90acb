"""Two results side by side, what became slower flagged: `python -m profiling.compare before.json after.json`.

Each is a JSON of profiling.bench or of `python -m cute_ssd bench --modelled --json`. The exit code is 1 with a
regression, 2 where the two cannot be compared.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from . import ProfilingError, results

# What makes times of two runs comparable.
SAME = ("gpu", "driver", "cuda", "device")
CLOCK_TOLERANCE = 0.02


class Change(NamedTuple):
    """One case in both. `change` is after / before - 1; the verdict is "slower", "faster", "same", "missing", "failed"
    or "new"."""

    key: int | str
    before_us: float | None
    after_us: float | None
    change: float | None
    verdict: str


def changes(before: list[results.Row], after: list[results.Row], threshold: float) -> list[Change]:
    """A case is slower or faster where its median moved by more than `threshold` and, where both files know their
    spread, beyond it: the 10th to 90th percentiles do not overlap."""
    olds, news = {row.key: row for row in before}, {row.key: row for row in after}
    found = []
    for key in [*olds, *(k for k in news if k not in olds)]:
        old, new = olds.get(key), news.get(key)
        if old is None or old.us is None:
            found.append(Change(key, None, new.us if new else None, None, "new" if new and new.us else "failed"))
            continue
        if new is None or new.us is None:
            found.append(Change(key, old.us, None, None, "missing" if new is None else "failed"))
            continue
        change = new.us / old.us - 1
        moved = abs(change) > threshold and not _overlap(old, new)
        verdict = "same" if not moved else "slower" if change > 0 else "faster"
        found.append(Change(key, old.us, new.us, change, verdict))
    return found


def _overlap(a: results.Row, b: results.Row) -> bool:
    if a.p10_us is None or b.p10_us is None or a.p90_us is None or b.p90_us is None:
        return False
    return a.p10_us <= b.p90_us and b.p10_us <= a.p90_us


def regressed(found: list[Change]) -> bool:
    """A case that failed, or is no longer there, is a regression too; one that failed before as well is not."""
    return any(c.verdict in ("slower", "missing") or (c.verdict == "failed" and c.before_us) for c in found)


def differences(before: results.Results, after: results.Results) -> list[str]:
    """Sentences on what makes the two runs hard to compare."""
    said = []
    if before.kind != after.kind:
        said.append(f"{before.path} is {before.kind} and {after.path} is {after.kind}.")
        return said
    for name in SAME:
        a, b = before.environment.get(name), after.environment.get(name)
        if a != b:
            said.append(f"{name} was {a}, and is {b}.")
    a, b = _clock(before), _clock(after)
    if a and b and abs(a / b - 1) > CLOCK_TOLERANCE:
        said.append(f"The SM clock was {a:.0f} MHz, and is {b:.0f} MHz; lock it (nvidia-smi -lgc) to compare.")
    return said


def _clock(whole: results.Results) -> float | None:
    """The mean of the sampled clocks in MHz."""
    means = [(s["min_mhz"] + s["max_mhz"]) / 2 for s in whole.clocks]
    return sum(means) / len(means) if means else None


def text(found: list[Change], before: list[results.Row], after: list[results.Row]) -> str:
    def us(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    rows = [
        [
            str(c.key),
            us(c.before_us),
            us(c.after_us),
            "" if c.change is None else f"{c.change:+.1%}",
            {"slower": "SLOWER", "failed": "FAILED", "missing": "MISSING", "same": ""}.get(c.verdict, c.verdict),
        ]
        for c in found
    ]
    both = {c.key for c in found if c.change is not None}
    olds, news = (results.totals(row for row in rows_ if row.key in both) for rows_ in (before, after))
    for label, key in (("geomean", "geomean_us"), ("score", "score")):
        a, b = olds[key], news[key]
        if a and b:
            digits = 4 if key == "score" else 2
            rows.append([f"{label} of {len(both)}", f"{a:.{digits}f}", f"{b:.{digits}f}", f"{b / a - 1:+.1%}", ""])
    return results.table(["case", "before µs", "after µs", "change", "verdict"], rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--implementation", default=results.OURS, help="of the second file (default cute_ssd)")
    parser.add_argument("--against", metavar="NAME", help="implementation of the first file (default: the same one)")
    parser.add_argument("--threshold", type=float, default=3.0, metavar="PERCENT", help="of a change (default 3)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    try:
        before, after = results.load(arguments.before), results.load(arguments.after)
        olds = before.of(arguments.against or arguments.implementation)
        news = after.of(arguments.implementation)
        found = changes(olds, news, arguments.threshold / 100)
        if all(c.change is None for c in found):
            raise ProfilingError(
                f"{before.path} and {after.path} have no case with a time in both, expected one at least; compare "
                "results of the same cases."
            )
    except ProfilingError as error:
        print(error, file=sys.stderr)
        return 2
    notes, failed = differences(before, after), regressed(found)
    if arguments.json:
        whole: dict[str, Any] = {"regressed": failed, "notes": notes, "cases": [c._asdict() for c in found]}
        print(json.dumps(whole, indent=1))
    else:
        print(text(found, olds, news))
        print("".join(f"\nNote: {note}" for note in notes), end="\n" if notes else "")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
