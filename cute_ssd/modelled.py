"""Modelled times of the public suite on a B200, without one: what the plan launches, on the emulator's timing model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from . import suite
from .api import explain, ssd_chunk_scan
from .emulator import emulate
from .emulator.timing import CLOCKS, ChainTime, Model, chain_time
from .errors import ShapeError

ARCH = "sm_100a"
CLOCK = "locked"
"""The clock at which the suite's figures were published."""


class Row(NamedTuple):
    """One case: what runs, its modelled time from the first kernel's start to the last one's end, its score."""

    case: int
    batch: int
    seqlen: int
    launches: int
    heads: int  # of a work item of the scan; 0: one CTA for each head
    ctas: int  # of the largest launch
    time: ChainTime
    sol_us: float
    baseline_us: float

    @property
    def modelled_us(self) -> float:
        return self.time.us

    @property
    def score(self) -> float:
        return suite.score(self.time.us, self.sol_us, self.baseline_us)

    def as_json(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "modelled_us": self.modelled_us,
            "binding": self.time.binding,
            "bound_us": self.time.bound_us,
            "score": self.score,
        }


def rows(numbers: list[int] | None = None, model: Model | None = None) -> Iterator[Row]:
    """The cases of the suite, one after the other. Only the CTAs that stand for a whole grid are executed."""
    model = model or Model(CLOCKS[CLOCK])
    published = suite.published()
    for case in suite.cases(numbers):
        arguments = suite.inputs(case)
        how = explain(ssd_chunk_scan, **arguments, arch=ARCH, return_final_states=True, state_dtype=torch.bfloat16)
        time = _time(arguments, model)
        yield Row(
            case.case,
            case.batch,
            case.seqlen,
            len(time.launches),
            how.chunks.scan_heads if how.chunks else 0,
            max(launch.ctas for launch in time.launches),
            time,
            *published[case.case],
        )


def call(
    batch: int, seqlen: int, nheads: int, headdim: int, ngroups: int, dstate: int, model: Model | None = None
) -> ChainTime:
    """Modelled time of `ssd_chunk_scan` on bf16 of these sizes, with D and final states, without initial states."""
    model = model or Model()
    case = suite.Case(0, batch, seqlen, nheads, headdim, ngroups, dstate, 0.0, 0.0)
    try:
        arguments = suite.inputs(case)
    except RuntimeError as error:  # torch's, of sizes that cannot be allocated
        shape = (batch, seqlen, nheads, headdim)
        raise ShapeError(f"x has shape {shape}, expected a call that fits into memory; pass smaller sizes.") from error
    return _time(arguments | {"initial_states": None}, model)


def _time(arguments: dict[str, Any], model: Model) -> ChainTime:
    with emulate(ARCH, sanitize=False, timing=model, sampled=True) as report:
        suite.call(arguments)
    return chain_time(report.recordings, model)


def totals(found: list[Row]) -> dict[str, Any]:
    """The JSON form: the cases, the geometric mean of their times, the mean of their scores."""
    times = [row.modelled_us for row in found]
    return {
        "cases": [row.as_json() for row in found],
        "geomean_us": math.exp(math.fsum(map(math.log, times)) / len(times)),
        "score": math.fsum(row.score for row in found) / len(found),
    }


HEADER = ("case", "batch", "seqlen", "launches", "heads", "CTAs", "modelled us", "bound by", "bound us", "score")
_WIDTHS = (4, 5, 6, 8, 5, 5, 11, 13, 8, 6)


def header() -> str:
    return "  ".join(name.rjust(width) for name, width in zip(HEADER, _WIDTHS, strict=True))


def line(row: Row) -> str:
    """One case of the printed table."""
    cells = (
        *map(str, (row.case, row.batch, row.seqlen, row.launches, row.heads or "-", row.ctas)),
        *(f"{row.modelled_us:.2f}", row.time.binding, f"{row.time.bound_us:.2f}", f"{row.score:.4f}"),
    )
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))


def summary(found: list[Row], model: Model) -> str:
    """The last lines of the printed table."""
    total = totals(found)
    replayed = sum(launch.replayed for row in found for launch in row.time.launches)
    ctas = sum(launch.ctas for row in found for launch in row.time.launches)
    return (
        f"modelled at {model.clock_ghz:g} GHz, cold L2: geometric mean {total['geomean_us']:.2f} us, mean score "
        f"{total['score']:.4f}\n{replayed} clusters were executed and replayed for all {ctas} CTAs; identical ones "
        "share a schedule"
    )
