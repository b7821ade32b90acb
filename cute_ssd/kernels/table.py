"""The table of README.md: `python -m cute_ssd.kernels.table [--arch sm_100a] [--dstate 128]`.

For each architecture and dstate, what the recurrence kernel takes and what bounds it: registers from the machine code,
instructions executed by the emulator between two lengths, and a model of the rest. Nothing here was measured on a GPU.
"""

import argparse
from collections.abc import Iterator
from typing import NamedTuple

import torch

from .. import emulator, launch
from ..compile import compiled
from ..machine_code import resources
from .dims import ITEMSIZE, WARP, Recurrence
from .resources import resident_ctas

HEADDIM = 64
TOKENS = 64  # a multiple of every tile
FP32_LOAD = 2 * 4  # bytes of an fp32 state element read and written


class Chip(NamedTuple):
    multiprocessors: int
    gigahertz: float
    terabytes: float  # of its memory, per second
    fma_cycles: float  # of a part of a multiprocessor, for one warp instruction on one fp32 number in each lane


CHIPS = {
    "sm_80": Chip(108, 1.41, 1.94, 2.0),  # A100
    "sm_90a": Chip(132, 1.76, 3.35, 1.0),  # H100
    "sm_100a": Chip(148, 1.85, 8.0, 1.0),  # B200
    "sm_103a": Chip(148, 1.85, 8.0, 1.0),  # B300
    "sm_120a": Chip(170, 2.41, 1.79, 1.0),  # GeForce RTX 5090
}
PARTS = 4  # of a multiprocessor, each with its own scheduler


class Row(NamedTuple):
    kernel: str
    arch: str
    dstate: int
    registers: int
    instructions: float  # of a token and state element
    load_bytes: str  # of one access to the state | B and C | x
    warps: int  # resident on a multiprocessor
    bound: str


def rows(archs: list[str], dstates: list[int]) -> Iterator[Row]:
    for arch in archs:
        for dstate in dstates:
            yield _scan(arch, dstate)
            yield _step(arch, dstate)


def _operands(dstate: int, batch: int, seqlen: int) -> launch.Operands:
    """bfloat16 inputs, fp32 parameters and states, as the models have them."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g)

    x, B, C = (normal(batch, seqlen, 1, size).bfloat16() for size in (HEADDIM, dstate, dstate))
    states = normal(batch, 1, HEADDIM, dstate)
    D = normal(1, 1).expand(1, HEADDIM)
    return launch.Operands(
        x, normal(batch, seqlen, 1), torch.tensor([-1.0]), B, C, D, None, normal(1), torch.empty_like(x),
        initial=states, final=states,
    )  # fmt: skip


def _counts(arch: str, dstate: int, seqlen: int, single: bool = False) -> dict[str, int]:
    """Executed warp instructions by class. Packs only name the halves of a register pair: they are none."""
    with emulator.emulate(arch, sanitize=False) as report:
        launch.recurrence(_operands(dstate, 1, seqlen), arch, softplus=True, single=single)
    return {name: count for name, count in report.launches[0].instructions.items() if name != "pack"}


def _scan(arch: str, dstate: int) -> Row:
    """A long sequence: the steady state of one token after the other."""
    kernel, chip = launch.recurrence_kernel(_operands(dstate, 1, 2), arch, softplus=True, single=False), CHIPS[arch]
    before, after = _counts(arch, dstate, TOKENS), _counts(arch, dstate, 2 * TOKENS)
    counts = {name: (after[name] - before.get(name, 0)) / TOKENS for name in after}
    issued = sum(counts.values()) / PARTS  # cycles for a token of a head, the work spread over the parts
    arithmetic = (counts.get("float", 0) + 2 * counts.get("float x2", 0)) * chip.fma_cycles / PARTS
    moved = 2 * (2 * HEADDIM + 2 * dstate) + 4  # x, y, B, C and dt of the token
    memory = moved / (chip.terabytes * 1e3 / chip.gigahertz / chip.multiprocessors)
    cycles, binds = max((issued, "issue"), (arithmetic, "fp32 arithmetic"), (memory, "memory"))
    rate = chip.multiprocessors * chip.gigahertz / cycles
    return _row("scan", kernel, arch, sum(counts.values()), f"{rate:.1f} tokens x heads / ns: {binds}")


def _step(arch: str, dstate: int) -> Row:
    """A decode step, of so many rows that the memory is busy; the instructions are all of a row's."""
    kernel, chip = launch.recurrence_kernel(_operands(dstate, 2, 1), arch, softplus=True, single=True), CHIPS[arch]
    warps = _warps(kernel, arch)
    flight = warps * WARP * kernel.layout.thread_elements * ITEMSIZE["float32"] / 1024
    nanoseconds = HEADDIM * dstate * FP32_LOAD / (chip.terabytes * 1e3)
    bound = f"{nanoseconds:.1f} ns a head: memory, {flight:.0f} KB in flight on a multiprocessor"
    return _row("step", kernel, arch, sum(_counts(arch, dstate, 1, single=True).values()), bound)


def _warps(kernel: Recurrence, arch: str) -> int:
    threads = kernel.layout.warps * WARP
    found = resources(compiled(kernel, arch).machine_code)
    return resident_ctas(found, threads, kernel.shared_bytes, arch) * kernel.layout.warps


def _row(name: str, kernel: Recurrence, arch: str, executed: float, bound: str) -> Row:
    """`executed`: warp instructions for a token of a head."""
    found = resources(compiled(kernel, arch).machine_code)
    loads = [kernel.access_bytes(operand) for operand in ("initial", "B", "x")]
    instructions = executed * WARP / (HEADDIM * kernel.dstate)
    return Row(name, arch, kernel.dstate, found.registers, instructions, " / ".join(map(str, loads)),
               _warps(kernel, arch), bound)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="The table of the recurrence kernel's README.")
    parser.add_argument("--arch", nargs="+", default=list(CHIPS), choices=list(CHIPS))
    parser.add_argument("--dstate", nargs="+", type=int, default=[16, 32, 64, 128, 256])
    arguments = parser.parse_args()
    print("| kernel | arch | dstate | registers | instructions | bytes a load | warps | modelled bound: what binds |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows(arguments.arch, arguments.dstate):
        print("|", " | ".join(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row), "|", flush=True)


if __name__ == "__main__":
    main()
