"""Tiles of tensor memory, a row for each thread of a warpgroup, to and from registers."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import tcgen05

from .config import Q

LANE = 1 << 16  # stride of the lanes


def tile(tmem: Any, column: Any, width: int) -> Any:
    return cute.make_tensor(tmem + column, cute.make_layout((Q, width), stride=(LANE, 1)))


def load(tmem: Any, column: Any, target: Any, row: Any) -> None:
    """Row `row` of the columns from `column` on, as many as `target` has; it must be waited for."""
    width = cute.size(target)
    source = tile(tmem, column, width)
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(width)), Float32)
    copy = tcgen05.make_tmem_copy(atom, source)
    registers = cute.make_tensor(target.iterator, ((width, 1), 1, 1))
    cute.copy(copy, copy.get_slice(row).partition_S(source), registers)


def store(tmem: Any, column: Any, source: Any, row: Any) -> None:
    """Of fp32, or of pairs of 16-bit elements; it must be waited for."""
    words = cute.recast_tensor(source, Float32) if source.element_type is not Float32 else source
    width = cute.size(words)
    target = tile(tmem, column, width)
    atom = cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(width)), Float32)
    copy = tcgen05.make_tmem_copy(atom, target)
    registers = cute.make_tensor(words.iterator, ((width, 1), 1, 1))
    cute.copy(copy, registers, copy.get_slice(row).partition_D(target))


def part(values: Any, first: int, width: int) -> Any:
    """`width` neighbouring registers."""
    return cute.make_tensor(values.iterator + first, cute.make_layout(width))
