"""Speed of the CPU backend as ratios: both sides of each are measured side by side in one run, beside its goal.

Times are the shortest of several runs that alternate between the two sides, so that what else the machine does
disturbs neither more than the other.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import nvtx
import torch
from tqdm import tqdm

from . import asked, cpu, launch, reference
from .api import (
    mamba_chunk_scan_combined,
    mamba_chunk_scan_varlen,
    mamba_chunk_scan_varlen_inplace,
    selective_state_update,
)
from .device import Device
from .emulator import emulate
from .kernels.sm100.config import Chunked
from .plan import plan
from .problem import chunk_scan
from .sequences import whole_rows

# The sizes of the public suite's heads.
NHEADS, HEADDIM, NGROUPS, DSTATE = 16, 64, 1, 256
SEQLEN = 2048
LENGTHS = (8192, 32768, 131072)
MEMORY_SEQLEN = 32768
DECODE = (64, 128, 64, 128)  # batch, nheads, headdim, dstate
# Seconds for each comparison.
BUDGET = 8.0


class Figure(NamedTuple):
    """One measured figure. `goal` is what it should at least be ("min") or at most ("max"); `value` is None where
    it could not be measured, and `detail` says why."""

    name: str
    value: float | None
    unit: str
    kind: str
    goal: float
    detail: str

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.goal if self.kind == "min" else self.value <= self.goal


def run(table: bool = True) -> list[Figure]:
    """Measures every figure; with `table` prints each as it comes."""
    figures = []
    if table:
        print(f"cute_ssd on the CPU, {torch.get_num_threads()} threads")
    with torch.inference_mode(), tqdm(total=len(_MEASURES), disable=None, leave=False) as bar:
        for measure in _MEASURES:
            with nvtx.annotate(measure.__name__, domain="cute_ssd"):
                for figure in measure():
                    figures.append(figure)
                    if table:
                        with bar.external_write_mode():
                            print(_line(figure))
            bar.update()
    if table and os.getloadavg()[0] > torch.get_num_threads() + 0.5:
        print("Other processes used the cores meanwhile: these figures are not those of a quiet machine.")
    return figures


def show(figures: Iterable[Figure], table: bool) -> list[Figure]:
    """Collects figures; with `table` prints each as it comes."""
    shown = []
    for figure in figures:
        shown.append(figure)
        if table:
            print(_line(figure), flush=True)
    return shown


def _line(f: Figure) -> str:
    value = "skipped" if f.value is None else f"{f.value:.2f} {f.unit}"
    goal = f"{'>=' if f.kind == 'min' else '<='} {f.goal:g}"
    met = {True: "met", False: "MISSED", None: ""}[f.met]
    return f"  {f.name:<46} {value:>10}  goal {goal:<8} {met:<7} {f.detail}"


def _fastest(*sides: Callable[[], Any], turns: int = 3) -> list[float]:
    """Seconds of the shortest run of each side; they take turns for BUDGET seconds, `turns` times or more."""
    best = [float("inf")] * len(sides)
    rounds, begin = 0, time.perf_counter()
    while rounds < turns or time.perf_counter() - begin < BUDGET:
        for side, function in enumerate(sides):
            start = time.perf_counter()
            function()
            best[side] = min(best[side], time.perf_counter() - start)
        rounds += 1
    return best


def _inputs(
    seqlen: int, batch: int = 1, nheads: int = NHEADS, headdim: int = HEADDIM, dstate: int = DSTATE
) -> dict[str, Any]:
    """fp32 x, dt, A, B, C of `mamba_chunk_scan_combined`, dt and A as Mamba-2 initialises them."""
    g = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(batch, seqlen, nheads, headdim, generator=g),
        "dt": torch.exp(torch.rand(batch, seqlen, nheads, generator=g) * 4.6 - 6.9),
        "A": -1 - 15 * torch.rand(nheads, generator=g),
        "B": torch.randn(batch, seqlen, NGROUPS, dstate, generator=g),
        "C": torch.randn(batch, seqlen, NGROUPS, dstate, generator=g),
    }


def _scan(made: dict[str, Any]) -> Any:
    return mamba_chunk_scan_combined(**made, chunk_size=256, return_final_states=True)


def _peers() -> Iterator[Figure]:
    made = _inputs(SEQLEN)
    name, goal = "speed over transformers' mamba2_chunk_scan", 8.0
    try:
        from transformers import logging
        from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
    except ImportError as error:
        yield Figure(name, None, "x", "min", goal, f"transformers 5.24 is not installed ({error}).")
    else:
        logging.set_verbosity_error()  # it says at length that it has no kernels

        def theirs() -> Any:
            A, B, C = made["A"], made["B"], made["C"]
            return mamba2_chunk_scan(made["x"], made["dt"], A, B, C, chunk_size=256, return_final_states=True)

        ours, peer = _fastest(lambda: _scan(made), theirs)
        yield Figure(name, peer / ours, "x", "min", goal, f"{ours * 1e3:.1f} ms against {peer * 1e3:.1f} ms")

    def recurrence() -> Any:
        return reference.mamba_chunk_scan_combined(**made, dtype=torch.float32)

    ours, peer = _fastest(lambda: _scan(made), recurrence)
    detail = f"{ours * 1e3:.1f} ms against {peer * 1e3:.1f} ms"
    yield Figure("speed over the recurrence", peer / ours, "x", "min", 3.0, detail)


def _matmul_rate() -> Iterator[Figure]:
    made = _inputs(SEQLEN)
    a, b, c = (torch.randn(256, 256) for _ in range(3))
    products = 64

    def matmuls() -> None:
        for _ in range(products):
            torch.mm(a, b, out=c)

    ours, theirs = _fastest(lambda: _scan(made), matmuls)
    rate = cpu.useful_flops(1, SEQLEN, NHEADS, HEADDIM, NGROUPS, DSTATE) / ours
    full = products * 2 * 256**3 / theirs
    detail = f"{rate / 1e9:.0f} of {full / 1e9:.0f} GFLOP/s, useful operations over 256x256x256 fp32 products"
    yield Figure("fraction of the matmul rate", rate / full, "", "min", 0.5, detail)


def _bfloat16() -> Iterator[Figure]:
    made = _inputs(SEQLEN)
    narrow = {name: t.bfloat16() if name in ("x", "B", "C") else t for name, t in made.items()}
    bf16, fp32 = _fastest(lambda: _scan(narrow), lambda: _scan(made))
    detail = f"{bf16 * 1e3:.1f} ms against {fp32 * 1e3:.1f} ms"
    yield Figure("time of bf16 inputs over fp32's", bf16 / fp32, "x", "max", 1.3, detail)


def _memory() -> Iterator[Figure]:
    name = "peak extra memory over inputs and outputs"
    if not Path("/proc/self/clear_refs").exists():
        yield Figure(name, None, "x", "max", 2.0, "this system does not tell a process its peak memory.")
        return
    # A process of its own, whose memory nothing else has touched.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        extra, given = pool.submit(peak_extra_memory, MEMORY_SEQLEN).result()
    detail = f"{extra / 2**20:.0f} MiB, outputs included, over {given / 2**20:.0f} MiB at seqlen {MEMORY_SEQLEN}"
    yield Figure(name, extra / given, "x", "max", 2.0, detail)


def peak_extra_memory(seqlen: int) -> tuple[int, int]:
    """(bytes a scan of `seqlen` tokens takes at its peak beyond what was there before, bytes of inputs and outputs)."""

    def kilobytes(field: str) -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split(f"{field}:")[1].split()[0])

    made = _inputs(seqlen)
    with torch.inference_mode():
        _scan({n: t[:, :1] if n != "A" else t for n, t in made.items()})  # what the first call loads
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = kilobytes("VmRSS")
        outputs = _scan(made)
        extra = (kilobytes("VmHWM") - before) * 1024
    return extra, sum(t.nbytes for t in (*made.values(), *outputs))


def _linearity() -> Iterator[Figure]:
    """All sides scan the same tokens, in pieces: what lasts longer rarely meets the machine at its best throughout, and
    a short sequence over and over would lie in the cache."""
    total = LENGTHS[-1]
    longest = _inputs(total)

    def scans_of(length: int) -> Callable[[], None]:
        starts = range(0, total, length)
        pieces = [{n: t[:, i : i + length] if n != "A" else t for n, t in longest.items()} for i in starts]

        def scans() -> None:
            for piece in pieces:
                _scan(piece)

        return scans

    per_token = [seconds / total * 1e6 for seconds in _fastest(*map(scans_of, LENGTHS), turns=6)]
    steps = ", ".join(f"{us:.1f} us at {length}" for us, length in zip(per_token, LENGTHS, strict=True))
    worst = max(per_token) / per_token[0]
    yield Figure("time of a token in a long sequence over a short", worst, "x", "max", 1.15, f"{steps} tokens")


def _packed() -> Iterator[Figure]:
    """A prefill among decode tokens, as a server batches them: y alone, with fresh states, with states in a pool."""
    single, long = 64, SEQLEN
    made = {n: t[0] if n != "A" else t for n, t in _inputs(single + long).items()}
    pool = torch.randn(single + 1, NHEADS, HEADDIM, DSTATE)

    def sides(mixed: bool) -> tuple[Callable[[], Any], ...]:
        part = made if mixed else {n: t[single:] if n != "A" else t for n, t in made.items()}
        offsets = [*range(single + 1), single + long] if mixed else [0, long]
        part = {**part, "query_start_loc": torch.tensor(offsets, dtype=torch.int32)}
        slots: dict[str, Any] = {
            "ssm_pool": pool,
            "cache_indices": torch.arange(len(offsets) - 1, dtype=torch.int32),
            "has_initial_state": torch.ones(len(offsets) - 1, dtype=torch.bool),
            "dt_softplus": False,
        }
        return (
            lambda: mamba_chunk_scan_varlen(**part),
            lambda: mamba_chunk_scan_varlen(**part, return_final_states=True),
            lambda: mamba_chunk_scan_varlen_inplace(**part, **slots),
        )

    names = (
        f"{single} one-token sequences and {long} over {long} alone",
        "the same with fresh final states",
        "the same on a pool of states",
    )
    for name, mixed, alone in zip(names, sides(True), sides(False), strict=True):
        both, one = _fastest(mixed, alone)
        yield Figure(name, both / one, "x", "max", 1.5, f"{both * 1e3:.1f} ms against {one * 1e3:.1f} ms")


def _decode() -> Iterator[Figure]:
    batch, nheads, headdim, dstate = DECODE
    made = {n: t[:, 0] if n != "A" else t for n, t in _inputs(1, batch, nheads, headdim, dstate).items()}
    state, other = torch.randn(2, batch, nheads, headdim, dstate).unbind()
    step, copy = _fastest(lambda: selective_state_update(state, **made), lambda: other.copy_(state))
    moved = 2 * state.nbytes / 1e9
    detail = f"{moved / step:.1f} of {moved / copy:.1f} GB/s, state read and written once"
    yield Figure("fraction of copy_'s bandwidth in a decode step", copy / step, "", "min", 0.4, detail)


def _overhead() -> Iterator[Figure]:
    """What an API call takes beyond the backend's arithmetic on the same prepared inputs."""
    made, calls = _inputs(4, nheads=2, headdim=4, dstate=4), 200
    wanted = chunk_scan(**made, chunk_size=256)
    prepared = cpu.Inputs(made["x"], made["B"], made["C"], torch.float32, dt=made["dt"], A=made["A"])
    rows, how = whole_rows(1, 4), plan(wanted, Device("cpu"))

    def api() -> None:
        for _ in range(calls):
            mamba_chunk_scan_combined(**made, chunk_size=256)

    def bare() -> None:
        for _ in range(calls):
            cpu.scan(prepared, rows, how, torch.empty_like(made["x"]), None, None)

    called, computed = (seconds / calls * 1e6 for seconds in _fastest(api, bare))
    detail = f"{called:.0f} us a call, {computed:.0f} us of them the backend's torch operations"
    yield Figure("host overhead of a tiny eager call", called - computed, "us", "max", 40.0, detail)


def _launch() -> Iterator[Figure]:
    """A prefill on the chunked kernels, for a GPU that is not there: checks, plan, outputs, workspace, all but the
    compiled call, which does nothing here."""
    packed = {n: t[0] if n != "A" else t for n, t in _inputs(512, dstate=64).items()}
    calls = 20  # less than a time slice: other processes hardly count
    for name in ("x", "B", "C"):
        packed[name] = packed[name].bfloat16()
    pool = torch.zeros(2, NHEADS, HEADDIM, 64)
    packed |= {
        "ssm_pool": pool,
        "cache_indices": torch.tensor([0, 1]),
        "query_start_loc": torch.tensor([0, 200, 512]),
        "out": torch.empty_like(packed["x"]),
    }

    def prefill() -> None:
        for _ in range(calls):
            mamba_chunk_scan_varlen_inplace(**packed)

    reached: list[object] = []

    def nothing(kernels: object, arch: str) -> Callable[..., None]:
        return lambda *arguments: reached.append(kernels)

    with emulate("sm_100a"), patch.object(launch, "compiled", nothing), patch.dict(asked._ASKED):
        (seconds,) = _fastest(prefill)
    assert isinstance(reached[0], Chunked)
    us = seconds / calls * 1e6
    yield Figure("host time of a prefill up to its launch", us, "us", "max", 30.0, "the chunked kernels")


_MEASURES = (_peers, _matmul_rate, _bfloat16, _memory, _linearity, _packed, _decode, _overhead, _launch)
