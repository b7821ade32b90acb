"""The public suite: SOL-ExecBench L2/043, sixteen calls of `ssd_chunk_scan`, and its own rule of what is right."""

import json
import statistics
import time
from collections.abc import Iterator
from importlib.resources import files
from typing import Any, NamedTuple

import nvtx
import torch
from torch import Tensor

from . import reference
from .api import ssd_chunk_scan
from .emulator import emulate
from .errors import ShapeError
from .info import unsupported

# The suite's own default: the fraction of each output's elements that must match.
REQUIRED_MATCH = 0.99
# A case is timed this often, or as often as fits in so many seconds.
RUNS, SECONDS = 5, 2.0


class Case(NamedTuple):
    """One call: its sizes and the tolerances that the suite publishes for it."""

    case: int
    batch: int
    seqlen: int
    nheads: int
    headdim: int
    ngroups: int
    dstate: int
    atol: float
    rtol: float


class Outcome(NamedTuple):
    """How one case went. `max_error` is the largest |out - ref| and `matched` the smallest fraction of matching
    elements of the two outputs; both are None where the call raised, and `message` says what."""

    case: int
    batch: int
    seqlen: int
    device: str
    us: float | None
    max_error: float | None
    matched: float | None
    passed: bool
    message: str = ""


def cases(numbers: list[int] | None = None) -> list[Case]:
    """The cases of the suite, or those of these numbers."""
    table = _table()
    sizes = {name: table["fixed"][name] for name in ("nheads", "headdim", "ngroups", "dstate")}
    every = {
        c["case"]: Case(c["case"], c["batch"], c["seqlen"], **sizes, atol=c["atol"], rtol=c["rtol"])
        for c in table["cases"]
    }
    for number in numbers or ():
        if number not in every:
            raise ShapeError(f"case is {number}, expected 0 to {max(every)}; pass a number of the suite.")
    return [every[number] for number in numbers] if numbers else list(every.values())


def published() -> dict[int, tuple[float, float]]:
    """case -> (bound, baseline), both in µs, as the suite publishes them for a B200."""
    return {c["case"]: (c["sol_us"], c["baseline_us"]) for c in _table()["cases"]}


def score(us: float, sol_us: float, baseline_us: float) -> float:
    """The suite's score of one case: 1 at the bound, 0.5 at the published baseline."""
    return 1 / (1 + (us - sol_us) / (baseline_us - sol_us))


def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(files("cute_ssd").joinpath("data/sol_suite.json").read_text())
    return table


def inputs(case: Case, seed: int = 0, device: str = "cpu") -> dict[str, Any]:
    """The arguments of `ssd_chunk_scan`: bf16, the same on every device for one seed."""
    made = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made).to(device, torch.bfloat16)

    projection = (case.batch, case.seqlen, case.ngroups, case.dstate)
    decay = torch.empty(case.batch, case.nheads, case.seqlen).uniform_(-1.0, -0.001, generator=made)
    return {
        "x": normal(case.batch, case.seqlen, case.nheads, case.headdim),
        "log_decay": decay.to(device, torch.bfloat16),
        "B": normal(*projection),
        "C": normal(*projection),
        "D": normal(case.nheads),
        "initial_states": normal(case.batch, case.nheads, case.headdim, case.dstate),
    }


def expected(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """y and final states of the recurrence in fp32, rounded once to bf16."""
    per_row = ("x", "log_decay", "B", "C", "initial_states")
    rows = []
    threads = torch.get_num_threads()
    # Tokens are too little work to share: threads that wait for each other at every one of them take many times as
    # long when another process keeps a core busy.
    torch.set_num_threads(1)
    try:
        # One row at a time, so that its state stays in the cache: ten times faster on a large batch.
        for row in range(arguments["x"].shape[0]):
            part = {n: t[row : row + 1].cpu() if n in per_row else t.cpu() for n, t in arguments.items()}
            rows.append(reference.ssd_chunk_scan(**part, dtype=torch.float32))
    finally:
        torch.set_num_threads(threads)
    y, states = (torch.cat(parts).bfloat16() for parts in zip(*rows, strict=True))
    return y, states


def compare(out: Tensor, ref: Tensor, atol: float, rtol: float) -> tuple[float, float]:
    """(largest |out - ref|, fraction of elements with |out - ref| <= atol + rtol |ref|); 0 matches an output that
    has a NaN or an infinity or another shape or dtype than `ref`."""
    if out.shape != ref.shape or out.dtype != ref.dtype:
        return float("nan"), 0.0
    out, ref = out.cpu().float(), ref.float()
    error = (out - ref).abs()
    if not torch.isfinite(out).all():
        return float(error.max()), 0.0
    return float(error.max()), float((error <= atol + rtol * ref.abs()).float().mean(dtype=torch.float64))


def check(chosen: list[Case], device: str = "cpu", seed: int = 0, sanitize: bool = False) -> Iterator[Outcome]:
    """Runs the cases one by one. A case that raises has failed; the next one runs all the same. `device` is a torch
    device, or the architecture of an emulated GPU ("sm_100a") with `seed` also the seed of its schedule; there is no
    time to measure on it, but with `sanitize` it looks for races."""
    for case in chosen:
        with nvtx.annotate(f"case {case.case}", domain="cute_ssd"):
            yield _check(case, device, seed, sanitize)


def _check(case: Case, device: str, seed: int, sanitize: bool) -> Outcome:
    named = (case.case, case.batch, case.seqlen, device)
    us: float | None = None
    try:
        if device.startswith("sm_"):
            arguments = inputs(case, seed)
            with emulate(device, seed=seed, sanitize=sanitize):
                outputs = call(arguments)
        else:
            arguments = inputs(case, seed, device)
            outputs, us = _timed(arguments, device)
        pairs = zip(outputs, expected(arguments), strict=True)
        found = [compare(out, ref, case.atol, case.rtol) for out, ref in pairs]
    except Exception as error:
        return Outcome(*named, None, None, None, False, f"{type(error).__name__}: {error}")
    matched = min(fraction for _, fraction in found)
    # max() would pass over a NaN that is not the first.
    worst = float(torch.tensor([error for error, _ in found]).max())
    return Outcome(*named, us, worst, matched, matched >= REQUIRED_MATCH)


def call(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """y and final states in bf16, of arguments from `inputs`."""
    y, states = ssd_chunk_scan(**arguments, return_final_states=True, state_dtype=torch.bfloat16)
    return y, states


def _timed(arguments: dict[str, Any], device: str) -> tuple[tuple[Tensor, Tensor], float]:
    """The outputs and the median time in µs of a few calls after a warm-up."""

    def finished() -> tuple[Tensor, Tensor]:
        result = call(arguments)
        if device != "cpu":
            torch.cuda.synchronize()
        return result

    outputs = finished()
    seconds: list[float] = []
    while len(seconds) < RUNS and sum(seconds) < SECONDS:
        start = time.perf_counter()
        finished()
        seconds.append(time.perf_counter() - start)
    return outputs, statistics.median(seconds) * 1e6


def best_device() -> tuple[str, str]:
    """(device to run on, a sentence where a CUDA device exists but cannot be used, else "")."""
    if not torch.cuda.is_available():
        return "cpu", ""
    reason = unsupported("cuda")
    if reason is None:
        return "cuda", ""
    return "cpu", f"{torch.cuda.get_device_name()} is not used: {reason}"
