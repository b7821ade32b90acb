"""mov in all its forms, and cvt.

Classes: "move" is a real instruction on the device; "pack" is not, registers of 64 bits are pairs there.
"""

from __future__ import annotations

from ..decode import SIZES, Decoder, Modifiers, instruction
from ..syntax import Immediate, Instruction, Operand, Sink, Special, Vector
from .operands import INTEGERS, ROUNDINGS, result, source

CLOCKS = {"%clock": 0, "%clock_lo": 0, "%clock_hi": 1, "%clock64": 2}
CLOCKS |= {"%globaltimer": 3, "%globaltimer_lo": 4, "%globaltimer_hi": 5}
BYTES = ("s8", "u8")
FLOATS = {"f16": 0, "bf16": 1, "f32": 2, "f64": 3}
NARROW = {"e4m3x2": 0, "e5m2x2": 1, "e2m3x2": 2, "e3m2x2": 3, "e2m1x2": 4, "ue8m0x2": 5}
"""Two values in 16 bits (e2m1x2: in 8)."""
WHOLE = {"rni": 0, "rzi": 1, "rmi": 2, "rpi": 3}
FTZ, SAT, RELU, SATFINITE = 8, 16, 32, 64
"""Bits of i0 above the rounding mode, as in convert.cpp."""


# ---- mov -------------------------------------------------------------------------------------------------------------


@instruction("mov", count_as="move")
def mov(d: Decoder, i: Instruction, m: Modifiers) -> None:
    kind = m.type()
    target, value = i.operands
    if kind == "pred":
        return _mov_predicate(d, target, value)
    if isinstance(value, Vector):
        return _pack(d, kind, target, value.items)
    if isinstance(target, Vector):
        return _unpack(d, kind, target.items, value)
    if isinstance(value, Special) and value.name in CLOCKS:
        wide = value.name in ("%clock64", "%globaltimer")
        if wide != (SIZES[kind] == 8):
            raise d.unsupported("its type does not fit the clock")
        return d.emit("mov.clock", result(d, target, kind), i0=CLOCKS[value.name])
    if kind not in (*INTEGERS, "b16", "b32", "b64", "b128", "f32", "f64"):
        raise d.unsupported(f"not in type .{kind}")
    a = source(d, value, kind)
    to = result(d, target, kind)
    if kind == "b128":
        d.emit("mov.two", to, a, a + 1, e=to + 1, copies=True)
        return d.emit("mov.two", to + 2, a + 2, a + 3, e=to + 3, copies=True)
    d.emit("mov.b64" if SIZES[kind] == 8 else "mov.b32", to, a, copies=True)


def _mov_predicate(d: Decoder, target: Operand, value: Operand) -> None:
    to = d.predicate(target)
    if isinstance(value, Immediate):
        return d.emit("mov.pred.constant", to, i0=value.bits != 0, count_as="predicate")
    number, negated = d.predicate_source(value)
    d.emit("mov.pred", to, number, i0=negated, count_as="predicate")


def _part(d: Decoder, kind: str, count: int) -> str:
    """The type of one of `count` parts of a register."""
    size, rest = divmod(SIZES.get(kind, 0), count)
    if kind[0] != "b" or rest or size not in (1, 2, 4, 8) or count == 1:
        raise d.unsupported(f".{kind} has no {count} parts")
    return f"b{8 * size}"


def _pack(d: Decoder, kind: str, target: Operand, items: tuple[Operand, ...]) -> None:
    part = _part(d, kind, len(items))
    slots = [source(d, item, part) for item in items]
    to = result(d, target, kind)
    if part in ("b32", "b64"):
        words = [slot + k for slot in slots for k in range(SIZES[part] // 4)]
        return _move_words(d, [to + k for k in range(len(words))], words)
    if len(slots) == 4 and part == "b8":
        return d.emit("mov.pack.b8x4", to, pool=d.list(slots), copies=True, count_as="pack")
    if part == "b8":
        raise d.unsupported("two bytes in 16 bits")
    for k in range(0, len(slots), 2):
        d.emit("mov.pack.b16x2", to + k // 2, *slots[k : k + 2], copies=True, count_as="pack")


def _unpack(d: Decoder, kind: str, items: tuple[Operand, ...], value: Operand) -> None:
    part = _part(d, kind, len(items))
    a = source(d, value, kind)
    if part in ("b32", "b64"):
        words = SIZES[part] // 4
        targets, sources = [], []
        for n, item in enumerate(items):
            if not isinstance(item, Sink):
                slot = result(d, item, part)
                targets += [slot + k for k in range(words)]
                sources += [a + n * words + k for k in range(words)]
        return _move_words(d, targets, sources)
    slots = [result(d, item, part) for item in items]
    if len(slots) == 4 and part == "b8":
        return d.emit("mov.unpack.b8x4", a=a, pool=d.list(slots), copies=True, count_as="pack")
    if part == "b8":
        raise d.unsupported("two bytes in 16 bits")
    for k in range(0, len(slots), 2):
        d.emit("mov.unpack.b16x2", slots[k], a + k // 2, e=slots[k + 1], copies=True, count_as="pack")


def _move_words(d: Decoder, targets: list[int], words: list[int]) -> None:
    if len(targets) == 1:
        d.emit("mov.b32", targets[0], words[0], copies=True, count_as="pack")
    elif len(targets) == 2:
        d.emit("mov.two", targets[0], words[0], words[1], e=targets[1], copies=True, count_as="pack")
    else:
        d.emit("mov.list", pool=d.list(targets + words), i0=len(targets), copies=True, count_as="pack")


# ---- cvt -------------------------------------------------------------------------------------------------------------


@instruction("cvt", count_as="convert")
def cvt(d: Decoder, i: Instruction, m: Modifiers) -> None:
    if m.flag("pack"):
        return _pack_integers(d, i, m)
    if len(m.left) < 2:
        raise d.unsupported("needs two types")
    of, to = m.left.pop(), m.left.pop()
    integers = (*INTEGERS, *BYTES)
    if of in integers and to in integers:
        _integer(d, i, m, of, to)
    elif of in FLOATS and to in integers:
        _to_integer(d, i, m, of, to)
    elif of in integers and to in FLOATS:
        _from_integer(d, i, m, of, to)
    elif of in FLOATS and to in FLOATS:
        _float(d, i, m, of, to)
    elif of == "f32" and to in ("f16x2", "bf16x2"):
        _two_halves(d, i, m, to)
    elif of == "f32" and to == "tf32":
        _tf32(d, i, m)
    elif to in NARROW:
        _to_narrow(d, i, m, of, to)
    elif of in NARROW:
        _from_narrow(d, i, m, of, to)
    else:
        raise d.unsupported("this conversion")


def _narrow_source(d: Decoder, operand: Operand, kind: str) -> int:
    """A source that may sit in a wider register: its low bits count."""
    width = d.width(operand)
    if width is not None and width < SIZES[kind]:
        raise d.unsupported("a source register narrower than its type")
    return d.slot(operand, kind)


def _register_bytes(d: Decoder, operand: Operand, kind: str) -> int:
    width = d.width(operand) or SIZES[kind]
    if width < SIZES[kind]:
        raise d.unsupported("a destination register narrower than its type")
    return width


def _integer(d: Decoder, i: Instruction, m: Modifiers, of: str, to: str) -> None:
    saturate = m.flag("sat")
    target, value = i.operands
    width = _register_bytes(d, target, to)
    a = _narrow_source(d, value, of)
    register = d.target(target, to)
    if not saturate and SIZES[of] == SIZES[to] == width:
        return d.emit("mov.b64" if width == 8 else "mov.b32", register, a)
    if not saturate and width == SIZES[to] == 4 and SIZES[of] == 8:
        return d.emit("mov.b32", register, a)
    if not saturate and SIZES[of] == 4 and SIZES[to] == width == 8:
        return d.emit("cvt.u64.u32" if of == "u32" else "cvt.s64.s32", register, a)
    how = [8 * SIZES[of], of[0] == "s", 8 * SIZES[to], to[0] == "s", width, saturate]
    d.emit("cvt.integer", register, a, pool=d.list([int(x) for x in how]))


def _to_integer(d: Decoder, i: Instruction, m: Modifiers, of: str, to: str) -> None:
    """Results out of range are clamped, with and without .sat."""
    whole = WHOLE[m.one_of(*WHOLE)]
    ftz = of == "f32" and m.flag("ftz")
    m.drop("sat")
    target, value = i.operands
    width = _register_bytes(d, target, to)
    how = d.list([8 * SIZES[to], int(to[0] == "s"), width, whole, int(ftz)])
    d.emit("cvt.integer.float", d.target(target, to), source(d, value, of), pool=how, i0=FLOATS[of])


def _from_integer(d: Decoder, i: Instruction, m: Modifiers, of: str, to: str) -> None:
    rounding = ROUNDINGS[m.one_of("rn", "rz", "rm", "rp")]
    sat = m.flag("sat")
    target, value = i.operands
    a = _narrow_source(d, value, of)
    how = d.list([8 * SIZES[of], int(of[0] == "s")])
    d.emit("cvt.float.integer", result(d, target, to), a, pool=how, i0=rounding | SAT * sat, i1=FLOATS[to])


def _float(d: Decoder, i: Instruction, m: Modifiers, of: str, to: str) -> None:
    whole, rounding = 0, "rn"
    if of == to:
        named = m.one_of(*WHOLE, default="")
        whole = 1 + WHOLE[named] if named else 0
    elif SIZES[to] < SIZES[of] or SIZES[to] == SIZES[of] == 2:
        rounding = m.one_of("rn", "rz", "rm", "rp")
    else:
        m.flag("rn")  # widening is exact; some forms are written with a rounding mode all the same
    mode = ROUNDINGS[rounding] | FTZ * ("f32" in (of, to) and m.flag("ftz")) | SAT * m.flag("sat")
    if to in ("f16", "bf16") and of == "f32":
        mode |= RELU * m.flag("relu") | SATFINITE * m.flag("satfinite")
    target, value = i.operands
    a = source(d, value, of)
    if (of, to) in (("bf16", "f32"), ("f16", "f32")) and not mode:
        return d.emit(f"cvt.f32.{of}", result(d, target, to), a)
    d.emit("cvt.float", result(d, target, to), a, i0=mode, i1=FLOATS[of] | FLOATS[to] << 4 | whole << 8)


def _two_halves(d: Decoder, i: Instruction, m: Modifiers, to: str) -> None:
    """d = a above b; .rs, which takes random bits as a third source, leaves an operand."""
    mode = ROUNDINGS[m.one_of("rn", "rz")] | RELU * m.flag("relu") | SATFINITE * m.flag("satfinite")
    target, upper, lower = i.operands
    a, b = source(d, upper, "f32"), source(d, lower, "f32")
    if mode == 0:
        return d.emit(f"cvt.{to}.f32", result(d, target, "b32"), a, b)
    d.emit("cvt.float", result(d, target, "b32"), a, b, i0=mode, i1=FLOATS["f32"] | FLOATS[to[:-2]] << 4)


def _tf32(d: Decoder, i: Instruction, m: Modifiers) -> None:
    rounding = m.one_of("rna", "rn", "rz")
    mode = ROUNDINGS[rounding] | RELU * (rounding != "rna" and m.flag("relu")) | SATFINITE * m.flag("satfinite")
    target, value = i.operands
    a = source(d, value, "f32")
    d.emit("cvt.tf32.f32", result(d, target, "b32"), a, i0=mode)


def _to_narrow(d: Decoder, i: Instruction, m: Modifiers, of: str, to: str) -> None:
    kinds = {"f32": 2, "bf16x2": 1} if to == "ue8m0x2" else {"f32": 2, "f16x2": 0}
    if of not in kinds or (of == "f16x2" and to not in ("e4m3x2", "e5m2x2")):
        raise d.unsupported("this conversion")
    if to == "ue8m0x2":
        mode = ROUNDINGS[m.one_of("rz", "rp")] | SATFINITE * m.flag("satfinite")
    else:
        m.require("rn", "satfinite")
        mode = RELU * m.flag("relu")
    target, *values = i.operands
    if len(values) != (2 if of == "f32" else 1):
        raise d.unsupported("its number of operands")
    slots = [source(d, value, of) for value in values]
    d.emit("cvt.to_narrow", result(d, target, _container(to)), *slots, i0=mode, i1=kinds[of] | NARROW[to] << 4)


def _from_narrow(d: Decoder, i: Instruction, m: Modifiers, of: str, to: str) -> None:
    if to != ("bf16x2" if of == "ue8m0x2" else "f16x2"):
        raise d.unsupported("this conversion")
    m.require("rn")
    mode = RELU * (of != "ue8m0x2" and m.flag("relu"))
    target, value = i.operands
    a = source(d, value, _container(of))
    d.emit("cvt.from_narrow", result(d, target, "b32"), a, i0=mode, i1=NARROW[of] | FLOATS[to[:-2]] << 4)


def _container(kind: str) -> str:
    return "b8" if kind == "e2m1x2" else "b16"


def _pack_integers(d: Decoder, i: Instruction, m: Modifiers) -> None:
    """cvt.pack.sat: two clamped integers beside each other, below the low bits of a third."""
    m.require("sat")
    last = m.left.pop()
    three = last == "b32"
    of = m.left.pop() if three else last
    to = m.left.pop()
    if of != "s32" or to not in (("u2", "s2", "u4", "s4", "u8", "s8") if three else ("u16", "s16")):
        raise d.unsupported("this packing")
    slots = [source(d, operand, "b32") for operand in i.operands[1:]]
    if len(slots) != 2 + three:
        raise d.unsupported("its number of operands")
    bits = int(to[1:])
    d.emit("cvt.pack", result(d, i.operands[0], "b32"), *slots, i0=-bits if to[0] == "s" else bits)
