"""What a head costs for a tile of 128 tokens, per resource of a multiprocessor, counted from executed instructions.

One CTA per multiprocessor, each with the same work: the difference between a longer and a shorter sequence, so that
what happens once for a CTA does not count. Modelled, as are the costs of single instructions; see emulator/timing.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import modelled
from .api import mamba_chunk_scan_combined
from .device import MULTIPROCESSORS
from .emulator import emulate
from .emulator.timing import ChainTime, Model, chain_time
from .emulator.timing.scripts import replay
from .kernels.sm100.config import Q

ARCH = "sm_100a"
HEADDIM, HEADS = 64, 4  # heads: of a work item
ALL_SMS = MULTIPROCESSORS[ARCH]
TILES = (2, 4)
CHUNKS = 16  # of the sequence that is timed beside peers
SHARED_GOAL = {128: 1600, 256: 2400}  # clocks by dstate, chunk_state and chunk_scan together
MUFU_GOAL = 350
MMA_GOAL = 1.05  # times the formula
MULTIPLY_ADDS = 4096  # a clock, of the tensor core: 16-bit operands
RESOURCES = {
    "shared": "shared memory",
    "tensor": "tensor core",
    "MMA": "mma",
    "MUFU": "xu",
    "ALU": "alu",
    "issue": "issue",
}
HEADER = f"{'per head and 128 tokens, clocks':<44}" + "".join(name.rjust(9) for name in RESOURCES)


class Count(NamedTuple):
    name: str
    busy: dict[str, float]  # clocks by the names of RESOURCES

    def __str__(self) -> str:
        return f"{self.name:<44}" + "".join(f"{clocks:9.0f}" for clocks in self.busy.values())


class Script(NamedTuple):
    """A script with one SSD kernel for headdim 64 and dstate 128, whose CTAs have one head each, and its arguments,
    with {chunks} for its chunks of 128 tokens."""

    path: str
    arguments: list[str]

    @property
    def name(self) -> str:
        return Path(self.path).name

    def time(self, chunks: int, model: Model) -> ChainTime:
        arguments = [word.replace("{chunks}", str(chunks)) for word in self.arguments]
        recordings = replay(self.path, arguments, model)
        if not recordings:
            raise ValueError(
                f"peer {self.name} with the arguments {shlex.join(arguments)!r} launched nothing, expected a kernel; "
                "python -m cute_ssd emulate runs it alone and shows why."
            )
        return chain_time(recordings, model)


def script(command: str) -> Script:
    """Of a command line."""
    if "{chunks}" not in command:
        raise ValueError(f"peer is {command!r}, which has no {{chunks}}; put it where the script takes its chunks.")
    path, *arguments = shlex.split(command)
    if not Path(path).is_file():
        raise ValueError(f"peer is {command!r}, but {path!r} is not a file; begin with the path of a Python script.")
    return Script(path, arguments)


class Compared(NamedTuple):
    """This package or another's kernel: what a head's tile costs, and the time of the problem that all are given."""

    name: str
    cost: Count
    time: ChainTime

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "launches": len(self.time.launches),
            "ctas": max(launch.ctas for launch in self.time.launches),
            "modelled_us": self.time.us,
            "binding": self.time.binding,
            "bound_us": self.time.bound_us,
            "clocks": self.cost.busy,
        }

    def __str__(self) -> str:
        _, launches, ctas, us, binding, bound, _ = self.as_json().values()
        return f"{self.name:<44}{launches:8}  {ctas:5}  {us:11.2f}  {binding:>13}  {bound:8.2f}"


def problem() -> str:
    """Of the times of `Compared`, and the head of their table."""
    return (
        f"{CHUNKS * Q} tokens of {ALL_SMS} heads of one group, headdim {HEADDIM}, dstate 128\n{'':<44}"
        f"{'launches':>8}  {'CTAs':>5}  {'modelled us':>11}  {'bound by':>13}  {'bound us':>8}"
    )


def mine(model: Model, kernels: list[Count] | None = None) -> Compared:
    """`kernels`: what `ours` counted at dstate 128, where that is known."""
    time = modelled.call(1, CHUNKS * Q, ALL_SMS, HEADDIM, 1, 128, model)
    return Compared("cute_ssd", _both("cute_ssd", kernels or ours(128, model)), time)


def other(peer: Script, model: Model) -> Compared:
    cost = _marginal(lambda chunks: peer.time(chunks, model), (3, 6), 1, f" of {peer.name}")[-1]
    return Compared(peer.name, cost, peer.time(CHUNKS, model))


def lines(model: Model, peers: list[Script]) -> Iterator[str]:
    """The table: this package at dstate 128 and 256, then `peers`, then the times of one problem by all of them."""
    yield HEADER
    counted = {}
    for dstate in (128, 256):
        counted[dstate] = kernels = ours(dstate, model)
        yield from map(str, kernels)
        both = _both(f"chunk_state and chunk_scan, dstate {dstate}", kernels)
        most = MMA_GOAL * mma_formula(dstate)
        yield f"{both}  goals: shared <= {SHARED_GOAL[dstate]}, MMA <= {most:.0f}, MUFU <= {MUFU_GOAL}"
    if not peers:
        return
    compared = [mine(model, counted[128])]
    for peer in peers:
        compared.append(other(peer, model))
        busy = compared[-1].cost.busy
        binding = max(busy, key=busy.__getitem__)
        ratio = max(compared[0].cost.busy.values()) / busy[binding]
        yield f"{compared[-1].cost}  binds: {binding}; what binds here needs {100 * ratio:.0f} % of that (goal 50 %)"
    yield f"\n{problem()}"
    yield from map(str, compared)


def ours(dstate: int, model: Model) -> list[Count]:
    """chunk_state, state_passing and chunk_scan, of four heads with D, bias and softplus."""

    def run(tiles: int) -> ChainTime:
        groups = ALL_SMS
        nheads, seqlen = groups * HEADS, tiles * Q
        g = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=g)

        x, B, C = (normal(1, seqlen, n, size).bfloat16() for n, size in
                   ((nheads, HEADDIM), (groups, dstate), (groups, dstate)))  # fmt: skip
        dt, A = normal(1, seqlen, nheads), -torch.rand(nheads, generator=g)
        with emulate(ARCH, sanitize=False, timing=model, sampled=True) as report:
            mamba_chunk_scan_combined(
                x, dt, A, B, C, Q, D=normal(nheads), dt_bias=normal(nheads) - 4, dt_softplus=True,
                return_final_states=True,
            )  # fmt: skip
        return chain_time(report.recordings, model)

    return _marginal(run, TILES, HEADS, f", dstate {dstate}")


def mma_formula(dstate: int) -> float:
    """Clocks that the multiplications of a head and tile take at the tensor core's peak: C Bᵀ, which HEADS heads share,
    M X', C S and X'ᵀ B."""
    return (Q * Q * (dstate / HEADS + HEADDIM) + 2 * Q * HEADDIM * dstate) / MULTIPLY_ADDS


def _marginal(run: Callable[[int], ChainTime], tiles: tuple[int, int], heads: int, where: str) -> list[Count]:
    short, long = (run(n).launches for n in tiles)
    more = (tiles[1] - tiles[0]) * heads
    return [
        Count(
            _name(b.kernel) + where,
            {name: (b.busy.get(key, 0.0) - a.busy.get(key, 0.0)) / more for name, key in RESOURCES.items()},
        )
        for a, b in zip(short, long, strict=True)
    ]


def _name(kernel: str) -> str:
    return next((name for name in ("chunk_state", "state_passing", "chunk_scan") if kernel.startswith(name)), "kernel")


def _both(name: str, kernels: list[Count]) -> Count:
    """chunk_state and chunk_scan of what `ours` returns, without state_passing."""
    state, _, scan = kernels
    return Count(name, {resource: state.busy[resource] + scan.busy[resource] for resource in RESOURCES})
