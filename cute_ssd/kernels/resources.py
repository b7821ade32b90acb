"""How many CTAs of a kernel a multiprocessor holds."""

from typing import NamedTuple

from ..machine_code import Resources
from .dims import WARP


class Multiprocessor(NamedTuple):
    """Limits of a multiprocessor that decide how many CTAs it holds."""

    shared_bytes: int
    threads: int
    ctas: int
    registers: int = 65536


MULTIPROCESSORS = {
    "sm_80": Multiprocessor(164 << 10, 2048, 32),
    "sm_90a": Multiprocessor(228 << 10, 2048, 32),
    "sm_100a": Multiprocessor(228 << 10, 2048, 32),
    "sm_103a": Multiprocessor(228 << 10, 2048, 32),
    "sm_120a": Multiprocessor(100 << 10, 1536, 24),
}


def resident_ctas(found: Resources, threads: int, shared_bytes: int, arch: str) -> int:
    """CTAs of this size that a multiprocessor holds at a time."""
    limits = MULTIPROCESSORS[arch]
    warp_registers = -(-found.registers * WARP // 256) * 256  # registers are handed out in units of 256 to a warp
    warps = limits.registers // warp_registers // 4 * 4  # evenly to its four parts
    return min(
        warps // (threads // WARP), limits.shared_bytes // (shared_bytes + 1024), limits.threads // threads, limits.ctas
    )
