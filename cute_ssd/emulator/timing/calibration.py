"""The model beside published measurements of a B200: `python -m cute_ssd model calibration`.

Measurements: b200/ (from SemiAnalysisAI/microbench-blackwell, Apache-2.0) and the FlashAttention-4 paper. The constants
come from the bf16 rows of the same tables: these groups show how well few constants describe many shapes, not how well
the model predicts. No constant is fitted to the groups in fp8 and int8 and to attention (three rows of the main loops
in fp8 were looked at when the rule was chosen by which products and TMA writes share the shared memory).
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from pathlib import Path

from . import microbenchmarks
from .constants import MEASURED_GHZ, Model
from .grid import launch_time


@dataclass(frozen=True)
class Comparison:
    """One figure, modelled and measured."""

    group: str
    what: str
    modelled: float
    measured: float
    unit: str

    @property
    def error(self) -> float:
        """modelled / measured - 1."""
        return self.modelled / self.measured - 1


@cache
def _rows(name: str) -> tuple[dict[str, str], ...]:
    text = files(__package__).joinpath(f"b200/{name}.csv").read_text()
    return tuple(row for row in csv.DictReader(text.splitlines()) if all(row.values()))  # one file has bare lines


FORMATS = {"BF16": "", "E4M3": ", fp8", "S8": ", int8"}
"""Element types of the tcgen05.mma tables, and what their groups are called. Left out are those of kinds that the
emulator refuses: F4 (64 elements of K, two to a byte), MXF8 and MXF4 (block scaling). fp16 and tf32 are in no table."""


def _products(name: str, dtype: str) -> Iterator[tuple[dict[str, str], str, tuple[int, int, bool, int, str]]]:
    for row in _rows(name):
        if row["Format"] == dtype:
            m, n, group = int(row["M"]), int(row["N"]), int(row["CTAGroup"])
            what = f"{row['ABLayout']} {'two CTAs ' if group == 2 else ''}M = {m}, N = {n}"
            yield row, what, (m, n, row["ABLayout"] == "TS", group, dtype)


def product_rates(dtype: str = "BF16") -> Iterator[Comparison]:
    for row, what, shape in _products("umma_throughput_tput_results_max", dtype):
        modelled = microbenchmarks.product_rate(*shape)
        yield Comparison(f"tcgen05.mma rate{FORMATS[dtype]}", what, modelled, float(row["CyclesPerMMA"]), "clocks")


def product_latencies(dtype: str = "BF16") -> Iterator[Comparison]:
    for row, what, shape in _products("umma_latency_fit_results", dtype):
        modelled = microbenchmarks.product_latency(*shape)
        yield Comparison(f"tcgen05.mma latency{FORMATS[dtype]}", what, modelled, float(row["Latency"]), "clocks")


def copy_rates() -> Iterator[Comparison]:
    for row in _rows("throughput_tma2d_tput_results"):
        stages = int(row["NumStages"])
        nbytes = int(row["BytesInFlightPerSM"]) // stages
        modelled = microbenchmarks.copy_clocks(nbytes, stages)
        yield Comparison(
            "TMA in a steady state",
            f"{stages} x {nbytes} bytes in flight",
            modelled,
            float(row["CyclesPerTMA"]),
            "clocks",
        )


def copy_latencies() -> Iterator[Comparison]:
    for row in _rows("latency_tma2d_lat_results"):
        nbytes = int(row["TileBytes"])
        modelled = microbenchmarks.first_copy(nbytes)
        yield Comparison("TMA cold", f"first {nbytes} bytes", modelled, float(row["LatencyCyclesMedian"]), "clocks")


LOOPS = {"BF16": "CUTLASS GEMM main loop", "FP8_E4M3": "CUTLASS GEMM main loop, fp8"}


def main_loops(dtype: str = "BF16", stages: tuple[int, ...] = ()) -> Iterator[Comparison]:
    """Those with a given number of stages (of `stages`, or any). One in fp8 is executed as that in bf16 with half of K:
    the same bytes, instructions and clocks."""
    for row in _rows("cutlass_gemm_mainloop_results"):
        m, n, k, depth = (int(row[name]) for name in ("TILE_M", "TILE_N", "TILE_K", "STAGES"))
        if row["dtype"] != dtype or not depth or (stages and depth not in stages):
            continue
        length, width = int(row["K"]), 2 if dtype == "BF16" else 1
        modelled = microbenchmarks.tile_clocks(m, n, k * width // 2, depth, width * (m + n) * length)
        measured = float(row["time_ms"]) * 1e6 * MEASURED_GHZ / (length / k)
        yield Comparison(LOOPS[dtype], f"{m} x {n} x {k}, {depth} stages", modelled, measured, "clocks per tile")


GROUPS: dict[str, Callable[[], Iterator[Comparison]]] = {
    **{f"tcgen05.mma rate{name}": partial(product_rates, dtype) for dtype, name in FORMATS.items()},
    **{f"tcgen05.mma latency{name}": partial(product_latencies, dtype) for dtype, name in FORMATS.items()},
    "TMA in a steady state": copy_rates,
    "TMA cold": copy_latencies,
    "CUTLASS GEMM main loop": main_loops,
    "CUTLASS GEMM main loop, fp8": lambda: main_loops("FP8_E4M3"),
}

FMHA = "cute/blackwell/kernel/attention/fmha/fmha.py"
FMHA_MEASURED = 0.71
"""Of the tensor core's peak: FlashAttention-4, head dimension 128, bf16, long sequences; the paper and its blog."""


def attention(examples: Path) -> Comparison:
    """NVIDIA's fmha.py (head dimension 128, 256 queries) in a steady state, as a fraction of the tensor core's peak.

    Not the kernel that was measured, but of the same design.
    """
    from .scripts import replay

    model, clocks = Model(MEASURED_GHZ), []
    keys = (1024, 2048)
    for count in keys:
        shapes = ["--q_shape", "1,256,1,128", "--k_shape", f"1,{count},1,128", "--skip_ref_check"]
        recordings = replay(examples / FMHA, ["--in_dtype", "Float16", "--out_dtype", "Float16", *shapes], model)
        clocks.append(max(launch_time(recording, model).cycles for recording in recordings))
    flops = 4 * 256 * 128 * (keys[1] - keys[0])
    modelled = flops / (clocks[1] - clocks[0]) / 8192
    return Comparison("attention forward", "d = 128, long sequences", modelled, FMHA_MEASURED, "of the peak")


MISSES = (
    "bf16 GEMM tiles with M + N of 256 or more, K = 16 or 32 and up to 4 stages (and one with K = 64 and 2): 22 are "
    "modelled 10 to 25 % too fast. Their operands do not fit into L2, and rows of 32 and 64 bytes at a pitch of "
    "256 KiB cost HBM more than the model knows (presumably every row opens another DRAM page).",
    "TMA cold: up to 26 %. The measured medians do not rise steadily with the size (512 bytes take longer than 1024), "
    "and minimum and maximum lie a factor of three apart.",
    "TMA, 4 x 8192 bytes: 12 % too fast, just where HBM begins to be full.",
    "FlashInfer's SSD timings (issues 4576 and 4921) are no calibration: about 71 us for one chunk whatever the heads, "
    "on a GB300, at the level of the Python API, so they time the host.",
    "cp.async is not compared with its published latencies and rates: the kernels here and those that are compared "
    "load by TMA. It is modelled as a load of its lanes whose bytes then go through the shared-memory port.",
    "No device time of any SSD kernel on a B200 is published with its shape; SSD kernels are modelled, not calibrated.",
    "Launch overheads and gaps (launch_first, launch_gap, launch_gap_dependent) are estimates: no source gives them "
    "better than to a factor of two.",
)
"""What is further off than 10 %, or cannot be compared, and why."""


def summary(found: list[Comparison]) -> str:
    """Per group: how many, how many within 10 %, mean and largest error."""
    lines = []
    for group in dict.fromkeys(c.group for c in found):
        errors = [c.error for c in found if c.group == group]
        close = sum(abs(error) <= 0.1 for error in errors)
        worst = max(errors, key=abs)
        lines.append(
            f"{group}: {close} of {len(errors)} within 10 %, mean |error| "
            f"{statistics.mean(map(abs, errors)):.1%}, largest {worst:+.1%}"
        )
    return "\n".join(lines)


def text(found: list[Comparison]) -> str:
    """The whole table, and what misses."""
    width = max(len(c.what) for c in found)
    lines, group = [], ""
    for c in found:
        if c.group != group:
            group = c.group
            lines += ["", f"{group} ({c.unit})", f"{'':<{width}}  {'modelled':>9}  {'measured':>9}  {'error':>7}"]
        lines.append(f"{c.what:<{width}}  {c.modelled:9.4g}  {c.measured:9.4g}  {c.error:+7.1%}")
    misses = "\n".join(f"* {sentence}" for sentence in MISSES)
    return "\n".join([*lines[1:], "", summary(found), "", "What misses:", misses])
