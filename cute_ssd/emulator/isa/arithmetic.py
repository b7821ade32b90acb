"""add, sub, mul, mad, fma, div, rem, min, max and their kin, in integer and in float types.

An opcode's integer and float forms share only the opcode: the integer ones are here, the float ones in `floating.py`.
"""

from __future__ import annotations

from ..decode import Decoder, Modifiers, instruction
from ..syntax import Immediate, Instruction, Operand
from . import floating
from .operands import INTEGERS, hidden_predicate, result, size_of, source

CARRY = " carry"
WIDE = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}


def _integer_type(d: Decoder, m: Modifiers, allowed: tuple[str, ...] = INTEGERS) -> str:
    kind = m.type()
    if kind not in allowed:
        raise d.unsupported(f"not in type .{kind}")
    return kind


def _is_float(m: Modifiers) -> bool:
    """Float forms end in a float type, also the mixed ones (.f32.bf16)."""
    return bool(m.left) and (m.left[-1].startswith(("f", "bf")))


def simple(d: Decoder, i: Instruction, handler: str, kind: str) -> None:
    """One record: destination and up to three sources of one type."""
    slots = [source(d, operand, kind) for operand in i.operands[1:]]
    d.emit(handler, result(d, i.operands[0], kind), *slots)


@instruction("add", "sub", count_as="integer")
def add(d: Decoder, i: Instruction, m: Modifiers) -> None:
    if _is_float(m):
        return floating.arithmetic(d, i, m)
    if m.flag("cc"):
        return _carry_chain(d, i, m, f"{i.opcode}.cc", carry_in=False, carry_out=True)
    saturate = m.flag("sat")
    kind = _integer_type(d, m, (*INTEGERS, "u16x2", "s16x2") if i.opcode == "add" else INTEGERS)
    if saturate:
        if kind != "s32":
            raise d.unsupported(".sat only with .s32")
        return simple(d, i, f"{i.opcode}.sat.s32", kind)
    simple(d, i, f"{i.opcode}.{'b16x2' if kind.endswith('x2') else size_of(kind)}", kind)


@instruction("addc", "subc", count_as="integer")
def addc(d: Decoder, i: Instruction, m: Modifiers) -> None:
    _carry_chain(d, i, m, f"{i.opcode[:-1]}.cc", carry_in=True, carry_out=m.flag("cc"))


@instruction("madc", count_as="integer")
def madc(d: Decoder, i: Instruction, m: Modifiers) -> None:
    _carry_chain(d, i, m, f"mad.{m.one_of('lo', 'hi')}.cc", carry_in=True, carry_out=m.flag("cc"))


def _carry_chain(d: Decoder, i: Instruction, m: Modifiers, handler: str, *, carry_in: bool, carry_out: bool) -> None:
    kind = _integer_type(d, m, ("s32", "u32", "s64", "u64"))
    a, b, *rest = (source(d, operand, kind) for operand in i.operands[1:])
    c = rest[0] if rest else -1
    name = f"{handler}.{kind if 'hi' in handler else size_of(kind)}"
    mode = carry_in | carry_out << 1
    d.emit(name, result(d, i.operands[0], kind), a, b, c, hidden_predicate(d, CARRY), i0=mode)


@instruction("mul", "mad", count_as="integer")
def mul(d: Decoder, i: Instruction, m: Modifiers) -> None:
    if _is_float(m):
        return floating.arithmetic(d, i, m)
    part = m.one_of("lo", "hi", "wide")
    if i.opcode == "mad" and m.flag("cc"):
        return _carry_chain(d, i, m, f"mad.{part}.cc", carry_in=False, carry_out=True)
    saturate = i.opcode == "mad" and part == "hi" and m.flag("sat")
    kind = _integer_type(d, m)
    if saturate:
        if kind != "s32":
            raise d.unsupported(".sat only with .s32")
        return simple(d, i, "mad.hi.sat.s32", kind)
    if part == "lo":
        return simple(d, i, f"{i.opcode}.lo.{size_of(kind)}", kind)
    if part == "hi":
        return simple(d, i, f"{i.opcode}.hi.{kind}", kind)
    if kind not in WIDE:
        raise d.unsupported(f".wide of .{kind}")
    slots = [source(d, operand, kind) for operand in i.operands[1:3]]
    slots += [source(d, operand, WIDE[kind]) for operand in i.operands[3:]]
    d.emit(f"{i.opcode}.wide.{kind}", result(d, i.operands[0], WIDE[kind]), *slots)


@instruction("mul24", "mad24", count_as="integer")
def mul24(d: Decoder, i: Instruction, m: Modifiers) -> None:
    part = m.one_of("lo", "hi")
    kind = _integer_type(d, m, ("s32", "u32"))
    simple(d, i, f"{i.opcode}.{part}.{kind}", kind)


@instruction("div", count_as="integer")
def div(d: Decoder, i: Instruction, m: Modifiers) -> None:
    if _is_float(m):
        return floating.div(d, i, m)
    kind = _integer_type(d, m)
    simple(d, i, f"div.{kind}", kind)


@instruction("rem", "sad", count_as="integer")
def rem(d: Decoder, i: Instruction, m: Modifiers) -> None:
    kind = _integer_type(d, m)
    simple(d, i, f"{i.opcode}.{kind}", kind)


@instruction("abs", "neg", count_as="integer")
def sign(d: Decoder, i: Instruction, m: Modifiers) -> None:
    if _is_float(m):
        return floating.sign(d, i, m)
    kind = _integer_type(d, m, ("s16", "s32", "s64"))
    simple(d, i, f"abs.{kind}" if i.opcode == "abs" else f"neg.{size_of(kind)}", kind)


@instruction("min", "max", count_as="integer")
def minmax(d: Decoder, i: Instruction, m: Modifiers) -> None:
    if _is_float(m):
        return floating.minmax(d, i, m)
    relu = m.flag("relu")
    kind = _integer_type(d, m, (*INTEGERS, "u16x2", "s16x2"))
    if relu and kind not in ("s32", "s16x2"):
        raise d.unsupported(f".relu of .{kind}")
    simple(d, i, f"{i.opcode}{'.relu' if relu else ''}.{kind}", kind)


@instruction("dp4a", "dp2a", count_as="integer")
def dot_product(d: Decoder, i: Instruction, m: Modifiers) -> None:
    part = "." + m.one_of("lo", "hi") if i.opcode == "dp2a" else ""
    second, first = m.type(), m.type()
    if first not in ("s32", "u32") or second not in ("s32", "u32"):
        raise d.unsupported("its types are .s32 or .u32")
    simple(d, i, f"{i.opcode}{part}.{first}.{second}", "b32")


# ---- logic, shifts, bits ---------------------------------------------------------------------------------------------


@instruction("and", "or", "xor", count_as="integer")
def logic(d: Decoder, i: Instruction, m: Modifiers) -> None:
    kind = m.type()
    if kind == "pred":
        target, left, right = i.operands
        (a, not_a), (b, not_b) = _predicate(d, left), _predicate(d, right)
        return d.emit(f"{i.opcode}.pred", d.predicate(target), a, b, i0=not_a | not_b << 1, count_as="predicate")
    _bits(d, kind)
    simple(d, i, f"{i.opcode}.{kind}", kind)


@instruction("not", "cnot", count_as="integer")
def invert(d: Decoder, i: Instruction, m: Modifiers) -> None:
    kind = m.type()
    if kind == "pred" and i.opcode == "not":
        number, negated = _predicate(d, i.operands[1])
        return d.emit("mov.pred", d.predicate(i.operands[0]), number, i0=not negated, count_as="predicate")
    _bits(d, kind)
    simple(d, i, f"{i.opcode}.{kind}", kind)


def _predicate(d: Decoder, operand: Operand) -> tuple[int, bool]:
    """A predicate source; a literal becomes a predicate that always holds, negated for 0."""
    if isinstance(operand, Immediate):
        always = hidden_predicate(d, " literal")
        d.emit("mov.pred.constant", always, i0=1, count_as="predicate")
        return always, operand.bits == 0
    return d.predicate_source(operand)


def _bits(d: Decoder, kind: str) -> None:
    if kind not in ("b16", "b32", "b64"):
        raise d.unsupported(f"not in type .{kind}")


@instruction("shl", "shr", count_as="integer")
def shift(d: Decoder, i: Instruction, m: Modifiers) -> None:
    kind = m.type()
    if i.opcode == "shl":
        _bits(d, kind)
    elif kind not in INTEGERS:
        _bits(d, kind)
        kind = "u" + kind[1:]
    a, count = source(d, i.operands[1], kind), source(d, i.operands[2], "u32")
    d.emit(f"{i.opcode}.{kind}", result(d, i.operands[0], kind), a, count)


@instruction("shf", count_as="integer")
def funnel_shift(d: Decoder, i: Instruction, m: Modifiers) -> None:
    direction, mode = m.one_of("l", "r"), m.one_of("wrap", "clamp")
    m.require("b32")
    simple(d, i, f"shf.{direction}.{mode}", "b32")


@instruction("lop3", count_as="integer")
def lop3(d: Decoder, i: Instruction, m: Modifiers) -> None:
    m.require("b32")  # the forms with a predicate (.and, .or) do not pass: they leave a modifier
    target, *sources, table = i.operands
    if len(sources) != 3 or not isinstance(table, Immediate):
        raise d.unsupported("needs three sources and a literal table")
    slots = [source(d, operand, "b32") for operand in sources]
    d.emit("lop3", result(d, target, "b32"), *slots, i0=table.bits & 0xFF)


@instruction("prmt", count_as="integer")
def prmt(d: Decoder, i: Instruction, m: Modifiers) -> None:
    m.require("b32")
    mode = m.one_of("f4e", "b4e", "rc8", "ecl", "ecr", "rc16", default="")
    simple(d, i, f"prmt.{mode}" if mode else "prmt", "b32")


@instruction("popc", "clz", count_as="integer")
def count_bits(d: Decoder, i: Instruction, m: Modifiers) -> None:
    kind = m.type()
    a = source(d, i.operands[1], kind)
    d.emit(f"{i.opcode}.{_wide_bits(d, kind)}", result(d, i.operands[0], "u32"), a)


@instruction("brev", count_as="integer")
def brev(d: Decoder, i: Instruction, m: Modifiers) -> None:
    kind = _wide_bits(d, m.type())
    simple(d, i, f"brev.{kind}", kind)


def _wide_bits(d: Decoder, kind: str) -> str:
    if kind not in ("b32", "b64"):
        raise d.unsupported(f"not in type .{kind}")
    return kind


@instruction("bfind", count_as="integer")
def bfind(d: Decoder, i: Instruction, m: Modifiers) -> None:
    amount = ".shiftamt" if m.flag("shiftamt") else ""
    kind = _integer_type(d, m, ("s32", "u32", "s64", "u64"))
    a = source(d, i.operands[1], kind)
    d.emit(f"bfind{amount}.{kind}", result(d, i.operands[0], "u32"), a)


@instruction("bfe", count_as="integer")
def bfe(d: Decoder, i: Instruction, m: Modifiers) -> None:
    kind = _integer_type(d, m, ("s32", "u32", "s64", "u64"))
    slots = [source(d, operand, k) for operand, k in zip(i.operands[1:], (kind, "u32", "u32"), strict=True)]
    d.emit(f"bfe.{kind}", result(d, i.operands[0], kind), *slots)


@instruction("bfi", count_as="integer")
def bfi(d: Decoder, i: Instruction, m: Modifiers) -> None:
    kind = _wide_bits(d, m.type())
    a, b, c, e = (source(d, operand, k) for operand, k in zip(i.operands[1:], (kind, kind, "u32", "u32"), strict=True))
    d.emit(f"bfi.{kind}", result(d, i.operands[0], kind), a, b, c, e)


@instruction("bmsk", count_as="integer")
def bmsk(d: Decoder, i: Instruction, m: Modifiers) -> None:
    m.require("b32")
    simple(d, i, f"bmsk.{m.one_of('clamp', 'wrap')}", "b32")


@instruction("szext", count_as="integer")
def szext(d: Decoder, i: Instruction, m: Modifiers) -> None:
    mode = m.one_of("clamp", "wrap")
    kind = _integer_type(d, m, ("s32", "u32"))
    simple(d, i, f"szext.{mode}.{kind}", kind)


@instruction("fns", count_as="integer")
def fns(d: Decoder, i: Instruction, m: Modifiers) -> None:
    m.require("b32")
    simple(d, i, "fns.b32", "b32")
