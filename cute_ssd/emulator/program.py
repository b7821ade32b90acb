"""A decoded kernel: the flat records and tables that `decode.py` makes and the engine reads."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .syntax import Instruction, Kernel

RECORD = np.dtype(
    [(name, np.int32) for name in ("handler", "guard", "guard_negated", "line", "d", "a", "b", "c", "e", "pool")]
    + [("i0", np.int64), ("i1", np.int64)]
    + [(name, np.int32) for name in ("sources", "nsources", "targets", "ntargets", "use", "opcode_class")]
)
"""The layout of core.h's Record."""

SHARED_BASE = 1024
"""Offset of the first byte of shared memory that a kernel may use (core.h)."""


@dataclass
class Program:
    """What the engine needs of a kernel, as arrays (`engine.py` passes their addresses), and what a report needs."""

    kernel: Kernel
    records: np.ndarray
    pool: np.ndarray
    initial: np.ndarray  # of every slot, and whether the slot is constant
    constant: np.ndarray
    specials: np.ndarray  # pairs: special register, slot
    shared_symbols: np.ndarray
    param_symbols: np.ndarray
    npredicates: int
    local_bytes: int
    static_shared_end: int
    dynamic_start: int | None
    global_addresses: dict[str, int]
    keep_alive: list[object]  # the memory behind `global_addresses`
    ctas_meet: (
        bool  # the order of CTAs can show: in atomics, reductions and strong accesses of global memory, in prints
    )
    _lines: dict[int, Instruction] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._lines = {instruction.line: instruction for instruction in self.kernel.instructions}

    @property
    def classes(self) -> np.ndarray:
        """For each record the class that it is counted under; -1 for all but the first of an instruction."""
        classes: np.ndarray = self.records["opcode_class"]
        return classes

    @property
    def global_ranges(self) -> list[tuple[int, int]]:
        """[begin, end) of the module's variables in global and constant memory."""
        variables = self.kernel.variables
        return [(at, at + max(variables[name].size, 1)) for name, at in self.global_addresses.items()]

    def instruction_at(self, line: int) -> Instruction | None:
        """The instruction on a line of the PTX text."""
        return self._lines.get(line)

    def shared_bytes(self, dynamic_bytes: int) -> int:
        """Shared memory of a CTA, static and dynamic, for a launch with `dynamic_bytes`."""
        start = self.static_shared_end if self.dynamic_start is None else self.dynamic_start
        return max(self.static_shared_end, start + dynamic_bytes) - SHARED_BASE
