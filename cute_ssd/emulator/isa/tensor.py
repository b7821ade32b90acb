"""tcgen05: tensor memory and the fifth generation's matrix product.

PTX ISA, "TensorCore 5th Generation Family Instructions". Sparse, block-scaled and weight-stationary products are
refused: none of them has a place in a scan.
"""

from __future__ import annotations

from ..decode import Decoder, Modifiers, instruction
from ..syntax import Address, Immediate, Instruction, Vector

# Registers per repetition and the most repetitions of the shapes of ld and st.
SHAPES = {"32x32b": (1, 128), "16x64b": (1, 128), "16x128b": (2, 64), "16x256b": (4, 32), "16x32bx2": (1, 128)}
REPETITIONS = {f"x{2**k}": 2**k for k in range(8)}

KINDS = {"kind::f16": 0, "kind::tf32": 1, "kind::f8f6f4": 2, "kind::i8": 3}
REFUSED_KINDS = {
    "kind::mxf8f6f4": "block-scaled products",
    "kind::mxf4": "block-scaled products of packed fp4",
    "kind::mxf4nvf4": "block-scaled products of packed fp4",
}
# (shape, multicast) of cp -> rows, columns of 32 bits, how rows map to lanes (tensor.cpp)
COPIES = {
    ("128x256b", ""): (128, 8, 0), ("4x256b", ""): (4, 8, 4), ("128x128b", ""): (128, 4, 0),
    ("64x128b", "warpx2::02_13"): (64, 4, 2), ("64x128b", "warpx2::01_23"): (64, 4, 3),
    ("32x128b", "warpx4"): (32, 4, 1),
}  # fmt: skip


def _group(m: Modifiers) -> int:
    return int(m.one_of("cta_group::1", "cta_group::2")[-1])


@instruction("tcgen05", count_as="tensor control")
def tcgen05(d: Decoder, i: Instruction, m: Modifiers) -> None:
    action = m.left.pop(0) if m.left else ""
    decode = ACTIONS.get(action)
    if decode is None:
        raise d.unsupported(f"unknown operation .{action}")
    decode(d, i, m)


def alloc(d: Decoder, i: Instruction, m: Modifiers) -> None:
    group = _group(m)
    m.require("sync", "aligned", "b32")
    m.drop("shared::cta")  # a generic address is told from a shared one by its width
    place = d.address(i.operands[0])
    columns = d.slot(i.operands[1], "b32")
    d.emit("tcgen05.alloc", a=place.slot, b=place.wide, c=columns, e=group, i0=place.offset)


def dealloc(d: Decoder, i: Instruction, m: Modifiers) -> None:
    group = _group(m)
    m.require("sync", "aligned", "b32")
    address, columns = (d.slot(operand, "b32") for operand in i.operands)
    d.emit("tcgen05.dealloc", a=address, c=columns, e=group)


def relinquish(d: Decoder, i: Instruction, m: Modifiers) -> None:
    _group(m)
    m.require("sync", "aligned")
    d.emit("tcgen05.relinquish_alloc_permit")


def wait_ld(d: Decoder, i: Instruction, m: Modifiers) -> None:
    m.require("sync", "aligned")
    d.emit("tcgen05.wait::ld")


def wait_st(d: Decoder, i: Instruction, m: Modifiers) -> None:
    m.require("sync", "aligned")
    d.emit("tcgen05.wait::st")


def fence_before(d: Decoder, i: Instruction, m: Modifiers) -> None:
    d.emit("tcgen05.fence", i0=1)


def fence_after(d: Decoder, i: Instruction, m: Modifiers) -> None:
    d.emit("tcgen05.fence", i0=0)


def _load_or_store(d: Decoder, i: Instruction, m: Modifiers, name: str, packing: str, count_as: str) -> None:
    """ld: results, address, [half]; st: address, [half], values. `half` is where 16x32bx2 finds its second half."""
    m.require("sync", "aligned")
    shape = m.one_of(*SHAPES)
    repetitions = REPETITIONS[m.one_of(*REPETITIONS)]
    packed = m.flag(packing)
    m.require("b32")
    per_repetition, most = SHAPES[shape]
    if repetitions > most:
        raise d.unsupported(f".{shape} goes up to .x{most}")
    load = name == "ld"
    operands = list(i.operands)
    half = 0
    if shape == "16x32bx2":
        split = operands.pop(2 if load else 1)
        if not isinstance(split, Immediate):
            raise d.unsupported("the offset of the second half is not an immediate")
        half = split.bits
    registers, address = operands if load else operands[::-1]
    items = d.items(registers)
    if len(items) != per_repetition * repetitions:
        raise d.unsupported(f"needs {per_repetition * repetitions} registers")
    place = d.address(address)
    slots = [d.target(item, "b32") if load else d.slot(item, "b32") for item in items]
    handler = f"tcgen05.{name}.{shape}" + ("." + packing.split("::")[0] if packed else "")
    d.emit(handler, a=place.slot, c=len(slots), e=half, i0=place.offset, pool=d.list(slots), count_as=count_as)


def load(d: Decoder, i: Instruction, m: Modifiers) -> None:
    if m.flag("red"):
        raise d.unsupported("loads with a reduction do not exist for sm_100a")
    _load_or_store(d, i, m, "ld", "pack::16b", "load tensor")


def store(d: Decoder, i: Instruction, m: Modifiers) -> None:
    _load_or_store(d, i, m, "st", "unpack::16b", "store tensor")


def commit(d: Decoder, i: Instruction, m: Modifiers) -> None:
    group = _group(m)
    m.require("mbarrier::arrive::one", "b64")
    cluster_address = m.flag("shared::cluster")
    multicast = m.flag("multicast::cluster")
    if len(i.operands) != 1 + multicast:
        raise d.unsupported("the mask of CTAs goes with .multicast::cluster")
    place = d.address(i.operands[0])
    targets = d.slot(i.operands[1], "b16") if multicast else -1
    # The low half of a 64-bit register with a shared address is that address.
    generic = place.wide and not cluster_address
    d.emit("tcgen05.commit", a=place.slot, b=generic, c=targets, e=group, i0=place.offset)


def copy(d: Decoder, i: Instruction, m: Modifiers) -> None:
    group = _group(m)
    shape = m.one_of("128x256b", "4x256b", "128x128b", "64x128b", "32x128b")
    multicast = m.one_of("warpx2::02_13", "warpx2::01_23", "warpx4", default="")
    if (shape, multicast) not in COPIES:
        raise d.unsupported(f".{shape} does not go with this multicast")
    if m.flag("b8x16"):
        raise d.unsupported("it unpacks fp6 or fp4, which only block-scaled products need")
    rows, columns, mapping = COPIES[shape, multicast]
    place = d.address(i.operands[0])
    descriptor = d.slot(i.operands[1], "b64")
    d.emit(
        "tcgen05.cp",
        d=columns,
        a=place.slot,
        b=descriptor,
        c=rows,
        e=group,
        i0=place.offset,
        i1=mapping,
        count_as="tensor copy",
    )


def shift(d: Decoder, i: Instruction, m: Modifiers) -> None:
    group = _group(m)
    m.require("down")
    place = d.address(i.operands[0])
    d.emit("tcgen05.shift", a=place.slot, e=group, i0=place.offset, count_as="tensor copy")


def mma(d: Decoder, i: Instruction, m: Modifiers) -> None:
    """[D], A, descriptor of B, instruction descriptor, {disabled lanes}, predicate: add D, log2 of a divisor of D."""
    for flag, reason in (("ws", "weight-stationary products"), ("sp", "sparse products"), ("ashift", "shifted A")):
        if m.flag(flag):
            raise d.unsupported(f"{reason} are not emulated")
    group = _group(m)
    kind = m.one_of(*KINDS, *REFUSED_KINDS)
    if kind in REFUSED_KINDS:
        raise d.unsupported(f"{REFUSED_KINDS[kind]} are not emulated")
    # Hints for the buffer that holds A between products.
    m.drop("collector::a::fill", "collector::a::use", "collector::a::lastuse", "collector::a::discard")
    destination, a, b, description, *rest = i.operands
    disabled = d.items(rest.pop(0)) if rest and isinstance(rest[0], Vector) else ()
    if len(disabled) not in (0, 4 * group):
        raise d.unsupported(f"{len(disabled)} words of disabled lanes, cta_group::{group} has {4 * group}")
    if not rest:
        raise d.unsupported("needs the predicate enable-input-d")
    predicate, negated = d.predicate_source(rest.pop(0))
    divisor = 0
    if rest:
        scale = rest.pop(0)
        scalable = kind in ("kind::f16", "kind::tf32")
        if rest or not scalable or not isinstance(scale, Immediate) or not 0 <= scale.bits <= 15:
            raise d.unsupported("scale-input-d is an immediate from 0 to 15, of kind::f16 and kind::tf32")
        divisor = scale.bits
    place = d.address(destination)
    if isinstance(a, Address):
        source = d.address(a)
        a_slot, a_offset = source.slot, source.offset
    else:
        a_slot, a_offset = d.slot(a, "b64"), 0
    b_slot = d.slot(b, "b64")
    description_slot = d.slot(description, "b32")
    lanes = [d.slot(item, "b32") for item in disabled]
    values = [group, isinstance(a, Address), place.offset, a_offset, predicate, negated, len(lanes), *lanes]
    d.emit(
        "tcgen05.mma",
        d=description_slot,
        a=place.slot,
        b=a_slot,
        c=b_slot,
        e=KINDS[kind],
        i0=divisor,
        pool=d.list(values),
        count_as="tensor mma",
    )


ACTIONS = {
    "alloc": alloc, "dealloc": dealloc, "relinquish_alloc_permit": relinquish,
    "ld": load, "st": store, "wait::ld": wait_ld, "wait::st": wait_st,
    "fence::before_thread_sync": fence_before, "fence::after_thread_sync": fence_after,
    "commit": commit, "cp": copy, "shift": shift, "mma": mma,
}  # fmt: skip
