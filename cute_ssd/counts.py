"""What a head costs for a tile of 128 tokens, per resource of a multiprocessor, counted from executed instructions.

One CTA per multiprocessor, each with the same work: the difference between a longer and a shorter sequence, so that
what happens once for a CTA does not count. Modelled, as are the costs of single instructions; see emulator/timing.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from . import modelled
from .api import mamba_chunk_scan_combined
from .device import Device
from .emulator import emulate
from .emulator.timing import ChainTime, Model, chain_time
from .emulator.timing.scripts import replay
from .kernels.sm100.config import Q

ARCH = "sm_100a"
HEADDIM, HEADS = 64, 4  # heads: of a work item
TILES = (2, 4)
CHUNKS = 16  # of the sequence that is timed beside peers
SHARED_GOAL = {128: 1600, 256: 2400}  # clocks by dstate, chunk_state and chunk_scan together
MUFU_GOAL = 350
MMA_GOAL = 1.05  # times the formula
MULTIPLY_ADDS = 4096  # a clock, of the tensor core: 16-bit operands
RESOURCES = {"shared": "shared memory", "tensor": "tensor core", "MMA": "mma", "MUFU": "xu", "ALU": "alu", "issue": "issue"}
HEADER = f"{'per head and 128 tokens, clocks':<44}" + "".join(name.rjust(9) for name in RESOURCES)


class Count(NamedTuple):
    name: str
    busy: dict[str, float]  # clocks by the names of RESOURCES

    def __str__(self) -> str:
        return f"{self.name:<44}" + "".join(f"{clocks:9.0f}" for clocks in self.busy.values())


def lines(model: Model, peers: list[str]) -> Iterator[str]:
    """The table: this package at dstate 128 and 256, then `peers`: commands of scripts with one kernel at headdim 64
    and dstate 128 whose CTAs have one head each, with {chunks} for their chunks of 128 tokens."""
    yield HEADER
    least = None
    for dstate in (128, 256):
        kernels = ours(dstate, model)
        yield from map(str, kernels)
        both = _total(f"chunk_state and chunk_scan, dstate {dstate}", [kernels[0], kernels[-1]])
        most = MMA_GOAL * mma_formula(dstate)
        yield f"{both}  goals: shared <= {SHARED_GOAL[dstate]}, MMA <= {most:.0f}, MUFU <= {MUFU_GOAL}"
        least = least or both
    for command in peers:
        found = peer(command, model)
        assert least is not None
        binding = max(found.busy, key=found.busy.__getitem__)
        ratio = max(least.busy.values()) / found.busy[binding]
        yield f"{found}  binds: {binding}; what binds here needs {100 * ratio:.0f} % of that (goal 50 %)"
    if peers:
        heads = Device.from_arch(ARCH).multiprocessors
        yield f"modelled us for {CHUNKS * Q} tokens and {heads} heads of one group, headdim {HEADDIM}, dstate 128"
        yield f"{'cute_ssd':<44}{modelled.call(1, CHUNKS * Q, heads, HEADDIM, 1, 128, model).us:9.2f}"
        for command in peers:
            yield f"{_script(command):<44}{_peer_time(command, CHUNKS, model).us:9.2f}"


def ours(dstate: int, model: Model) -> list[Count]:
    """chunk_state, state_passing and chunk_scan, of four heads with D, bias and softplus."""
    groups = Device.from_arch(ARCH).multiprocessors

    def run(tiles: int) -> ChainTime:
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


def peer(command: str, model: Model) -> Count:
    """The only kernel of a script."""
    if "{chunks}" not in command:
        raise ValueError(f"peer is {command!r}, which has no {{chunks}}; put it where the script takes its chunks.")
    return _marginal(lambda chunks: _peer_time(command, chunks, model), (3, 6), 1, f" of {_script(command)}")[-1]


def _peer_time(command: str, chunks: int, model: Model) -> ChainTime:
    path, *argv = shlex.split(command)
    return chain_time(replay(path, [word.replace("{chunks}", str(chunks)) for word in argv], model), model)


def _script(command: str) -> str:
    return shlex.split(command)[0].rpartition("/")[2]


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


def _total(name: str, counts: list[Count]) -> Count:
    busy = {resource: sum(count.busy[resource] for count in counts) for resource in RESOURCES}
    return Count(name, busy)
