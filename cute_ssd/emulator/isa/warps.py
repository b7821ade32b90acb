"""What lanes of a warp tell each other: shfl, vote, match, redux, elect, activemask; bar.warp.sync is in barriers."""

from __future__ import annotations

from ..decode import Decoder, Modifiers, instruction
from ..syntax import Immediate, Instruction, Operand


def members(d: Decoder, operand: Operand) -> int:
    """The slot of a member mask; -1 for the constant that names every lane."""
    if isinstance(operand, Immediate) and operand.bits & 0xFFFFFFFF == 0xFFFFFFFF:
        return -1
    return d.slot(operand, "b32")


@instruction("shfl", count_as="shuffle")
def shfl(d: Decoder, i: Instruction, m: Modifiers) -> None:
    m.require("sync", "b32")
    mode = m.one_of("up", "down", "bfly", "idx")
    result, source, lane, clamp, mask = i.operands
    target, inside = d.pair(result)
    paired = target is not result
    a, b, c, e = d.slot(source, "b32"), d.slot(lane, "b32"), d.slot(clamp, "b32"), members(d, mask)
    d.emit(f"shfl.{mode}", d=d.target(target, "b32"), a=a, b=b, c=c, e=e, i0=d.predicate(inside) if paired else -1)


@instruction("vote", count_as="vote")
def vote(d: Decoder, i: Instruction, m: Modifiers) -> None:
    m.require("sync")
    mode = m.one_of("all", "any", "uni", "ballot")
    m.require("b32" if mode == "ballot" else "pred")
    target, source, mask = i.operands
    number, negated = d.predicate_source(source)
    if mode == "ballot":
        d.emit("vote.ballot", d=d.target(target, "b32"), a=number, e=members(d, mask), i0=int(negated))
    else:
        kind = ("all", "any", "uni").index(mode)
        d.emit("vote", d=d.predicate(target), a=number, e=members(d, mask), i0=int(negated), i1=kind)


@instruction("match", count_as="vote")
def match(d: Decoder, i: Instruction, m: Modifiers) -> None:
    m.require("sync")
    mode, kind = m.one_of("any", "all"), m.one_of("b32", "b64")
    result, source, mask = i.operands
    target, same = d.pair(result)
    if mode == "any" and target is not result:
        raise d.unsupported("match.any has no predicate")
    a, e = d.slot(source, kind), members(d, mask)
    d.emit(f"match.{mode}", d=d.target(target, "b32"), a=a, e=e, i0=d.predicate(same), i1=2 if kind == "b64" else 1)


@instruction("redux", count_as="reduce warp")
def redux(d: Decoder, i: Instruction, m: Modifiers) -> None:
    m.require("sync")
    operation = m.one_of("add", "min", "max", "and", "or", "xor")
    kind = m.one_of("b32", "u32", "s32", "f32")
    absolute, nan = m.flag("abs"), m.flag("NaN")
    ordered = ("u32", "s32", "f32")
    allowed = {"add": ("u32", "s32"), "min": ordered, "max": ordered}.get(operation, ("b32",))
    if kind not in allowed or ((absolute or nan) and kind != "f32"):
        raise d.unsupported(f"{operation} of .{kind}")
    handler = f"redux.{operation}.{kind}" if operation in ("min", "max") else f"redux.{operation}"
    target, source, mask = i.operands
    a, e = d.slot(source, "b32"), members(d, mask)
    d.emit(handler, d=d.target(target, "b32"), a=a, e=e, i0=int(absolute), i1=int(nan))


@instruction("elect", count_as="vote")
def elect(d: Decoder, i: Instruction, m: Modifiers) -> None:
    m.require("sync")
    result, mask = i.operands
    target, leads = d.pair(result)
    e = members(d, mask)
    d.emit("elect", d=d.target(target, "b32"), e=e, i0=d.predicate(leads))


@instruction("activemask", count_as="vote")
def activemask(d: Decoder, i: Instruction, m: Modifiers) -> None:
    m.require("b32")
    d.emit("activemask", d=d.target(i.operands[0], "b32"))
