"""The launches of a CuTe DSL script, for the timing model."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from .. import prepare
from ..script import run_script
from .constants import Model
from .grid import Recording


def replay(path: str | Path, argv: list[str], model: Model, *, sampled: bool = True) -> list[Recording]:
    """What the script at `path` launches, with `argv` as its arguments.

    NVIDIA's examples rely on implicit waits. The sanitizer is off. With `sampled` only representative CTAs are
    executed: the script must not look at its results then (`--skip_ref_check` of NVIDIA's).
    """
    report, session = prepare("sm_100a", sanitize=False, implicit_waits=True, timing=model, sampled=sampled)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        run_script(path, argv, session)
    return report.recordings
