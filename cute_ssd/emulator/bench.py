"""Speed of the emulator, measured on somebody else's kernel: NVIDIA's example mamba2_ssd, which is not part of this."""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..bench import Figure
from . import engine
from .decode import decode
from .launch import KernelLaunch
from .ptx import parse_kernel
from .report import Report
from .runner import Runner
from .script import run_script
from .session import Session

GROUPS, BATCH, HEADS, CHUNKS = 1, 2, 4, 16
"""gbehc of the example: groups, batch, heads per group, chunks; with 64 x 128 x 128 (headdim, chunk length, dstate)."""
PTX_LINES = 5000


def figures(script: Path) -> Iterator[Figure]:
    """Of `mamba2_ssd.py`: milliseconds per chunk and head without and with checks; how many times longer it takes where
    the timing model's trace is kept; seconds to decode 5,000 lines."""
    if not script.is_file():
        raise FileNotFoundError(
            f"There is no script {script}: pass the path of mamba2_ssd.py, one of the CuTe DSL examples in NVIDIA's "
            "cutlass repository."
        )
    return _measure(script)


def _measure(script: Path) -> Iterator[Figure]:
    texts: list[tuple[str, str]] = []
    detail = f"{CHUNKS} chunks x {BATCH * HEADS} heads of 64 x 128 x 128, {os.cpu_count()} threads"

    def milliseconds(**options: Any) -> float:
        return min(_milliseconds(script, engine.Options(**options), texts) for _ in range(2))

    plain = milliseconds(sanitize=False)
    yield Figure("mamba2_ssd", plain, "ms per chunk and head", "max", 0.5, detail)
    yield Figure("mamba2_ssd, with checks", milliseconds(), "ms per chunk and head", "max", 1.5, detail)
    traced = milliseconds(sanitize=False, traced=tuple(range(BATCH * HEADS)))
    yield Figure("time with the timing model's trace over without", traced / plain, "x", "max", 3, "of all CTAs")
    ptx, kernel = texts[0]
    lines = ptx.count("\n")
    seconds = min(_decode_seconds(ptx, kernel) for _ in range(5)) * PTX_LINES / lines
    yield Figure("decoding", seconds, f"s per {PTX_LINES} PTX lines", "max", 0.1, f"measured on {lines} lines")


def _milliseconds(script: Path, options: engine.Options, texts: list[tuple[str, str]]) -> float:
    report = Report("sm_100a")
    runner = Runner(report, options)

    def capture(launch: KernelLaunch) -> None:
        texts.append((launch.ptx, launch.kernel_name))
        runner(launch)

    sizes = f"{GROUPS},{BATCH},{HEADS},1,{CHUNKS},64,128,128"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        run_script(script, ["--gbehcdln", sizes], Session("sm_100a", capture))
    longest = max(report.launches, key=lambda launch: launch.warp_instructions)
    return longest.seconds * 1e3 / (BATCH * HEADS * CHUNKS)


def _decode_seconds(ptx: str, kernel: str) -> float:
    begin = time.perf_counter()
    decode(parse_kernel(ptx, kernel), engine.handlers())
    return time.perf_counter() - begin
