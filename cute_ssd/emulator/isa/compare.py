"""setp, set, selp, slct, testp: comparisons and what follows from them."""

from __future__ import annotations

from ..decode import Decoder, Modifiers, instruction
from ..syntax import Immediate, Instruction, Operand
from .operands import HALVES, INTEGERS, hidden_predicate, result, size_of, source

BOOLEAN = {"and": 1, "or": 2, "xor": 3}
# comparison: (the one the engine makes, operands exchanged, result inverted)
ORDERED = {
    "eq": ("eq", False, False), "ne": ("eq", False, True),
    "lt": ("lt", False, False), "ge": ("lt", False, True), "gt": ("lt", True, False), "le": ("lt", True, True),
}  # fmt: skip
UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
# With a NaN the first ones are false and their opposites, the `u` ones, true. `lg` is less or greater, `nan` unordered.
FLOAT = {
    "eq": ("eq", False, False), "neu": ("eq", False, True), "ne": ("lg", False, False), "equ": ("lg", False, True),
    "lt": ("lt", False, False), "geu": ("lt", False, True), "le": ("le", False, False), "gtu": ("le", False, True),
    "gt": ("lt", True, False), "leu": ("lt", True, True), "ge": ("le", True, False), "ltu": ("le", True, True),
    "nan": ("nan", False, False), "num": ("nan", False, True),
}  # fmt: skip


def _compare(d: Decoder, m: Modifiers, kind: str) -> tuple[str, bool, bool]:
    """(handler, operands exchanged, result inverted) of the comparison among the modifiers."""
    if kind in (*HALVES, "f32", "f64"):
        made, exchanged, inverted = FLOAT[m.one_of(*FLOAT)]
        ftz = ".ftz" if kind in ("f32", "f16", "f16x2") and m.flag("ftz") else ""
        return f"setp.{made}{ftz}.{kind}", exchanged, inverted
    if kind not in (*INTEGERS, "b16", "b32", "b64"):
        raise d.unsupported(f"no comparison of .{kind}")
    comparison = m.one_of(*ORDERED, *UNSIGNED)
    if (comparison in UNSIGNED and kind[0] != "u") or (kind[0] == "b" and comparison not in ("eq", "ne")):
        raise d.unsupported(f".{comparison} of .{kind}")
    made, exchanged, inverted = ORDERED[UNSIGNED.get(comparison, comparison)]
    return f"setp.{made}.{size_of(kind) if made == 'eq' else kind}", exchanged, inverted


def _emit_compare(d: Decoder, m: Modifiers, kind: str, p: int, q: int, operands: tuple[Operand, ...]) -> None:
    boolean = m.one_of(*BOOLEAN, default="")
    handler, exchanged, inverted = _compare(d, m, kind)
    a, b = (source(d, operand, kind) for operand in operands[:2])
    if exchanged:
        a, b = b, a
    other, negated = d.predicate_source(operands[2]) if boolean else (-1, False)
    if len(operands) != (3 if boolean else 2):
        raise d.unsupported("its number of operands")
    d.emit(handler, p, a, b, other, q, i0=BOOLEAN.get(boolean, 0), i1=negated | inverted << 1)


@instruction("setp", count_as="compare")
def setp(d: Decoder, i: Instruction, m: Modifiers) -> None:
    kind = m.type()
    first, second = d.pair(i.operands[0])
    q = d.predicate(second)
    _emit_compare(d, m, kind, d.predicate(first), -1 if q == len(d.predicates) else q, i.operands[1:])


@instruction("set", count_as="compare")
def set_(d: Decoder, i: Instruction, m: Modifiers) -> None:
    """A comparison whose result is all ones (integer types) or 1.0."""
    kind, target = m.type(), m.type()
    ones = {"u32": 0xFFFFFFFF, "s32": 0xFFFFFFFF, "f32": 0x3F800000}
    if target not in ones or kind.endswith("x2"):
        raise d.unsupported(f"its result in .{target}")
    p = hidden_predicate(d, " set")
    _emit_compare(d, m, kind, p, -1, i.operands[1:])
    d.emit("selp.b32", result(d, i.operands[0], "b32"), d.constant_slot(ones[target]), d.constant_slot(0), p)


@instruction("selp", count_as="select")
def selp(d: Decoder, i: Instruction, m: Modifiers) -> None:
    kind = m.type()
    if kind not in (*INTEGERS, "b16", "b32", "b64", "f32", "f64"):
        raise d.unsupported(f"not in type .{kind}")
    target, a, b, choice = i.operands
    yes, no = source(d, a, kind), source(d, b, kind)
    if isinstance(choice, Immediate):
        raise d.unsupported("a literal predicate")
    number, negated = d.predicate_source(choice)
    if negated:
        yes, no = no, yes
    d.emit("selp.b64" if size_of(kind) == "b64" else "selp.b32", result(d, target, kind), yes, no, number)


@instruction("slct", count_as="select")
def slct(d: Decoder, i: Instruction, m: Modifiers) -> None:
    """a if c >= 0 else b; a NaN chooses b, -0.0 a."""
    sign, kind = m.type(), m.type()
    if sign not in ("s32", "f32"):
        raise d.unsupported(f"its choice in .{sign}")
    if kind not in (*INTEGERS, "b16", "b32", "b64", "f32", "f64"):
        raise d.unsupported(f"not in type .{kind}")
    target, a, b, c = i.operands
    p = hidden_predicate(d, " slct")
    ftz = ".ftz" if sign == "f32" and m.flag("ftz") else ""
    choice = source(d, c, sign)
    if sign == "s32":
        d.emit("setp.lt.s32", p, choice, d.constant_slot(0), i1=2)
    else:
        d.emit(f"setp.le{ftz}.f32", p, d.constant_slot(0), choice)
    yes, no = source(d, a, kind), source(d, b, kind)
    d.emit("selp.b64" if size_of(kind) == "b64" else "selp.b32", result(d, target, kind), yes, no, p)


@instruction("testp", count_as="compare")
def testp(d: Decoder, i: Instruction, m: Modifiers) -> None:
    kind = m.type()
    if kind not in ("f32", "f64"):
        raise d.unsupported(f"not in type .{kind}")
    tests = ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    number = tests.index(m.one_of(*tests))
    d.emit(f"testp.{kind}", d.predicate(i.operands[0]), source(d, i.operands[1], kind), i0=number)
