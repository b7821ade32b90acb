"""Registers per thread, as ptxas chose them: they stand in the machine code beside the PTX."""

from __future__ import annotations

from ...machine_code import kernel_resources


def registers(machine_code: bytes) -> dict[str, int]:
    """Registers per thread of each kernel in a cubin; {} for anything else."""
    try:
        return {name: found.registers for name, found in kernel_resources(machine_code).items()}
    except ValueError:
        return {}
