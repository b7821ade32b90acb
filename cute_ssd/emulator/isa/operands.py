"""Operands of instructions whose registers must have the size of the instruction's type."""

from __future__ import annotations

import struct

from ..decode import SIZES, Decoder
from ..syntax import Immediate, Operand

INTEGERS = ("s16", "u16", "s32", "u32", "s64", "u64")
HALVES = ("f16", "bf16", "f16x2", "bf16x2")
ROUNDINGS = {"rn": 0, "rz": 1, "rm": 2, "rp": 3, "rna": 4}
"""Numbers of rounding modes; numbers.h has the same."""


def check_size(d: Decoder, operand: Operand, kind: str) -> None:
    """A register must be as wide as the type."""
    width = d.width(operand)
    if width is not None and width != SIZES[kind]:
        raise d.unsupported(f"a register of {8 * width} bits where .{kind} is expected")


def source(d: Decoder, operand: Operand, kind: str) -> int:
    """The slot of a source of exactly the type `kind`; float literals become a pattern of that type."""
    check_size(d, operand, kind)
    if isinstance(operand, Immediate) and operand.kind != "int":
        operand = Immediate(float_bits(d, operand, kind), "int")
    return d.slot(operand, kind)


def float_bits(d: Decoder, literal: Immediate, kind: str) -> int:
    """The bits of a float literal in the type of the instruction: an f64 literal may stand for an f32."""
    size = SIZES[kind]
    if size == int(literal.kind[1:]) // 8:
        return literal.bits
    if literal.kind == "f64" and size == 4:
        (value,) = struct.unpack("<d", struct.pack("<Q", literal.bits))
        (bits,) = struct.unpack("<I", struct.pack("<f", value))
        return int(bits)
    raise d.unsupported(f"an {literal.kind} literal where .{kind} is expected")


def result(d: Decoder, operand: Operand, kind: str) -> int:
    """The slot of a destination of exactly the type `kind`."""
    check_size(d, operand, kind)
    return d.target(operand, kind)


def size_of(kind: str) -> str:
    """The untyped type of the same size: b16, b32 or b64."""
    return f"b{8 * SIZES[kind]}"


def hidden_predicate(d: Decoder, name: str) -> int:
    """A predicate register that PTX does not name, such as the carry flag."""
    if name not in d.predicates:
        d.predicates[f"unused before {name}"] = len(d.predicates)  # sinks so far have this number
        d.predicates[name] = len(d.predicates)
    return d.predicates[name]
