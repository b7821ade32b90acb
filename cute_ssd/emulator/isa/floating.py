"""Float arithmetic: f32, f64, f16, bf16, their packed forms, mixed precision, and the approximated functions.

Handlers: `add.f32` and `add.ftz.f32` round to nearest and are fast; `add.any.f32` takes rounding mode, flushing and
saturation from the record (i0: rounding, bit 3 .ftz, bit 4 .sat) and changes the host's rounding mode for it.
"""

from __future__ import annotations

from ..decode import SIZES, Decoder, Modifiers, instruction
from ..syntax import Instruction
from .operands import HALVES, ROUNDINGS, result, size_of, source

CLASS = {"f32": "float", "f32x2": "float x2", "f64": "double", **dict.fromkeys(HALVES, "half")}
FTZ, SAT, RELU, WHOLE_WORD = 8, 16, 32, 64
"""Bits of i0 beside the rounding mode; WHOLE_WORD: both halves of a packed 16-bit type."""


def _float_type(d: Decoder, m: Modifiers, allowed: tuple[str, ...]) -> str:
    kind = m.type()
    if kind not in allowed:
        raise d.unsupported(f"not in type .{kind}")
    return kind


def arithmetic(d: Decoder, i: Instruction, m: Modifiers) -> None:
    """add, sub, mul, fma and the float mad, which is fma."""
    kind = _float_type(d, m, tuple(CLASS))
    if m.left and m.left[-1] == "f32" and kind in ("f16", "bf16"):
        return _mixed(d, i, m, kind)
    opcode = "fma" if i.opcode == "mad" else i.opcode
    if kind in HALVES:
        return _half(d, i, m, opcode, kind)
    rounding = m.one_of("rn", "rz", "rm", "rp", default="rn")
    ftz = kind != "f64" and m.flag("ftz")
    sat = kind == "f32" and m.flag("sat")
    _emit(d, i, opcode, kind, rounding, ftz, sat)


def _emit(d: Decoder, i: Instruction, opcode: str, kind: str, rounding: str, ftz: bool, sat: bool = False) -> None:
    slots = [source(d, operand, kind) for operand in i.operands[1:]]
    _emit_slots(d, opcode, kind, result(d, i.operands[0], kind), slots, rounding, ftz, sat)


def _emit_slots(
    d: Decoder, opcode: str, kind: str, target: int, slots: list[int], rounding: str, ftz: bool, sat: bool
) -> None:
    if rounding == "rn" and not sat:
        d.emit(f"{opcode}{'.ftz' if ftz else ''}.{kind}", target, *slots, count_as=CLASS[kind])
    else:
        mode = ROUNDINGS[rounding] | FTZ * ftz | SAT * sat
        d.emit(f"{opcode}.any.{kind}", target, *slots, i0=mode, count_as=CLASS[kind])


def _half(d: Decoder, i: Instruction, m: Modifiers, opcode: str, kind: str) -> None:
    m.flag("rn")  # there is no other rounding
    is_f16 = kind.startswith("f16")
    mode = FTZ * (is_f16 and m.flag("ftz")) | SAT * (is_f16 and m.flag("sat"))
    mode |= RELU * (opcode == "fma" and m.flag("relu")) | WHOLE_WORD * kind.endswith("x2")
    slots = [source(d, operand, kind) for operand in i.operands[1:]]
    d.emit(f"{opcode}.{kind.removesuffix('x2')}", result(d, i.operands[0], kind), *slots, i0=mode, count_as="half")


def _mixed(d: Decoder, i: Instruction, m: Modifiers, kind: str) -> None:
    """fma.f32.bf16 d, a, b, c and add.f32.bf16 d, a, c: 16-bit operands are exact in f32, so they are converted."""
    m.require("f32")
    opcode = i.opcode
    if opcode not in ("fma", "add", "sub"):
        raise d.unsupported("no mixed precision")
    rounding, sat = m.one_of("rn", "rz", "rm", "rp", default="rn"), m.flag("sat")
    *narrow, wide = i.operands[1:]
    slots = []
    for operand in narrow:
        slots.append(d.new_slots(1))
        d.emit(f"cvt.f32.{kind}", slots[-1], source(d, operand, kind), count_as="float")
    slots.append(source(d, wide, "f32"))
    _emit_slots(d, opcode, "f32", result(d, i.operands[0], "f32"), slots, rounding, False, sat)


@instruction("fma", count_as="float")
def fma(d: Decoder, i: Instruction, m: Modifiers) -> None:
    arithmetic(d, i, m)


def div(d: Decoder, i: Instruction, m: Modifiers) -> None:
    """div.full errs by less than two ulps: the rounded quotient does. div.approx has a rule for large divisors."""
    kind = _float_type(d, m, ("f32", "f64"))
    if kind == "f32" and m.flag("full"):
        return _emit(d, i, "div", kind, "rn", m.flag("ftz"))
    if kind == "f32" and m.flag("approx"):
        return _emit(d, i, "div.approx", kind, "rn", m.flag("ftz"))
    rounding = m.one_of("rn", "rz", "rm", "rp")
    _emit(d, i, "div", kind, rounding, kind == "f32" and m.flag("ftz"))


def sign(d: Decoder, i: Instruction, m: Modifiers) -> None:
    """abs and neg only touch sign bits; the result for a NaN is some NaN."""
    kind = _float_type(d, m, ("f32", "f64", *HALVES))
    ftz = kind in ("f32", "f16", "f16x2") and m.flag("ftz")
    bits = {"f32": 1 << 31, "f64": 1 << 63}.get(kind, 0x8000_8000 if kind.endswith("x2") else 0x8000)
    size = size_of(kind)
    a, target = source(d, i.operands[1], kind), result(d, i.operands[0], kind)
    if ftz:
        d.emit(f"flush.{kind}", target, a, count_as=CLASS[kind])
        a = target
    if i.opcode == "abs":
        mask = d.constant_slot((1 << 8 * SIZES[kind]) - 1 & ~bits, 2 if kind == "f64" else 1)
        d.emit(f"and.{size}", target, a, mask, count_as=CLASS[kind])
    else:
        d.emit(f"xor.{size}", target, a, d.constant_slot(bits, 2 if kind == "f64" else 1), count_as=CLASS[kind])


@instruction("copysign", count_as="float")
def copysign(d: Decoder, i: Instruction, m: Modifiers) -> None:
    """The sign of a, the rest of b: lop3 with the sign bit as the choice."""
    kind = _float_type(d, m, ("f32", "f64"))
    a, b = (source(d, operand, kind) for operand in i.operands[1:])
    target = result(d, i.operands[0], kind)
    upper = kind == "f64"
    d.emit("lop3", target + upper, a + upper, b + upper, d.constant_slot(1 << 31), i0=0xE4, count_as=CLASS[kind])
    if upper:
        d.emit("mov.b32", target, b)


def minmax(d: Decoder, i: Instruction, m: Modifiers) -> None:
    """i0: bit 0 .NaN, bit 1 .xorsign, bit 2 .abs, bit 3 .ftz, bit 6 both halves."""
    kind = _float_type(d, m, ("f32", "f64", *HALVES))
    nan = kind != "f64" and m.flag("NaN")
    ftz = kind in ("f32", "f16", "f16x2") and m.flag("ftz")
    xorsign = kind != "f64" and m.flag("xorsign")
    absolute = kind != "f64" and m.flag("abs")
    slots = [source(d, operand, kind) for operand in i.operands[1:]]
    if (len(slots) == 3 and (kind != "f32" or xorsign)) or (xorsign and not absolute):
        raise d.unsupported("three operands only in .f32, .xorsign only with .abs")
    if absolute and not xorsign and len(slots) != 3:
        raise d.unsupported(".abs alone only with three operands")
    target = result(d, i.operands[0], kind)
    mode = nan | xorsign << 1 | absolute << 2 | FTZ * ftz | WHOLE_WORD * kind.endswith("x2")
    base = kind.removesuffix("x2")
    if kind == "f32" and mode in (0, 1):  # the hot ones
        handler = f"{i.opcode}{'.NaN' if nan else ''}.f32{'x3' if len(slots) == 3 else ''}"
        return d.emit(handler, target, *slots, count_as="float")
    if len(slots) == 3:
        between = d.new_slots(1)
        d.emit(f"{i.opcode}.any.f32", between, *slots[:2], i0=mode, count_as="float")
        slots = [between, slots[2]]
    d.emit(f"{i.opcode}.any.{base}", target, *slots, i0=mode, count_as=CLASS[kind])


# ---- functions -------------------------------------------------------------------------------------------------------


@instruction("rcp", "sqrt", "rsqrt", count_as="special function")
def root(d: Decoder, i: Instruction, m: Modifiers) -> None:
    """Approximations may err by an ulp or two: the rounded function will do. f64 ones see and give upper words."""
    kind = _float_type(d, m, ("f32", "f64"))
    if m.flag("approx"):
        ftz = m.flag("ftz")
        if kind == "f64" and (i.opcode == "sqrt" or (i.opcode == "rcp" and not ftz)):
            raise d.unsupported("no approximation in f64")
        handler = f"{i.opcode}{'.gross' if kind == 'f64' and ftz else '.ftz' if ftz else ''}.{kind}"
        a = source(d, i.operands[1], kind)
        return d.emit(handler, result(d, i.operands[0], kind), a)
    if i.opcode == "rsqrt":
        raise d.unsupported("only .approx")
    rounding = m.one_of("rn", "rz", "rm", "rp")
    _emit(d, i, i.opcode, kind, rounding, kind == "f32" and m.flag("ftz"))


@instruction("ex2", "lg2", "sin", "cos", "tanh", count_as="special function")
def function(d: Decoder, i: Instruction, m: Modifiers) -> None:
    m.require("approx")
    half = i.opcode in ("ex2", "tanh")
    kind = _float_type(d, m, ("f32", *HALVES) if half else ("f32",))
    a = source(d, i.operands[1], kind)
    target = result(d, i.operands[0], kind)
    if kind in HALVES:
        if i.opcode == "ex2" and kind.startswith("bf16"):
            m.require("ftz")  # it has no other form, and bf16 has none without
        mode = FTZ * (i.opcode == "ex2" and kind.startswith("bf16")) | WHOLE_WORD * kind.endswith("x2")
        return d.emit(f"{i.opcode}.{kind.removesuffix('x2')}", target, a, i0=mode)
    ftz = i.opcode != "tanh" and m.flag("ftz")  # tanh.approx.f32 keeps denormals
    d.emit(f"{i.opcode}{'.ftz' if ftz else ''}.f32", target, a)
