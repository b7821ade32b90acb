"""Bulk copies and reductions, plain and through tensor maps; bulk groups; tensor maps that a kernel edits."""

from __future__ import annotations

from ..decode import SIZES, Decoder, Modifiers, Place, instruction
from ..syntax import Immediate, Instruction, Operand, TensorAddress
from .barriers import shared_place

OPERATIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")  # as in engine/reduction.h
TYPES = {"u32": 2, "b32": 2, "s32": 3, "u64": 4, "b64": 4, "s64": 5, "f16": 6, "f32": 7, "f64": 9, "bf16": 10}
"""The numbers of tensor maps for element types."""

ORDERED, BITWISE = ("add", "min", "max"), ("and", "or", "xor")
REDUCTIONS = {
    "u32": OPERATIONS[:5], "s32": ORDERED, "b32": BITWISE, "u64": ORDERED, "b64": BITWISE, "s64": ("min", "max"),
    "f16": ORDERED, "bf16": ORDERED, "f32": ("add",), "f64": ("add",),
}  # fmt: skip
"""PTX ISA, cp.reduce.async.bulk: the operations of each type in global memory."""
SHARED_REDUCTIONS = {"u32": OPERATIONS[:5], "s32": ORDERED, "b32": BITWISE, "u64": ("add",)}
"""In the shared memory of the cluster."""

CTA_PAIR, OWN_CTA, MULTICAST = 1, 2, 4  # flags of loads, as in engine/bulk.h


@instruction("cp", count_as="bulk copy")
def copy(d: Decoder, i: Instruction, m: Modifiers) -> None:
    """Everything that begins with cp; cp.async without .bulk belongs to memory.py."""
    if "bulk" not in i.modifiers:
        from .memory import copy_async

        return copy_async(d, i, m)
    reduces = m.flag("reduce")
    m.require("async", "bulk")
    if m.flag("commit_group"):
        d.emit("bulk.commit", count_as="bulk group")
    elif m.flag("wait_group"):
        (pending,) = i.operands
        if not isinstance(pending, Immediate):
            raise d.unsupported("the number of pending groups is not a constant")
        d.emit("bulk.wait", i0=pending.bits, i1=int(m.flag("read")), count_as="bulk group")
    elif m.flag("prefetch"):
        prefetch(d, i, m)
    elif m.flag("tensor"):
        tensor(d, i, m, reduces)
    else:
        plain(d, i, m, reduces)
    return None


def prefetch(d: Decoder, i: Instruction, m: Modifiers) -> None:
    m.require("L2", "global")
    if m.flag("tensor"):
        mode(d, m)
        policy(d, m, list(i.operands[1:]))
    else:
        policy(d, m, list(i.operands[2:]))
    d.emit("nothing", count_as="prefetch")


def policy(d: Decoder, m: Modifiers, rest: list[Operand]) -> None:
    """The operand of .L2::cache_hint; nothing else may be left."""
    if m.flag("L2::cache_hint"):
        if not rest:
            raise d.unsupported("no cache policy")
        d.slot(rest.pop(), "b64")  # the emulator has no cache
    if rest:
        raise d.unsupported(f"{len(d.instruction.operands)} operands")


def list_places(d: Decoder, *places: Place) -> list[int]:
    return [value for place in places for value in (place.slot, place.offset)]


def global_place(d: Decoder, operand: Operand) -> Place:
    place = d.address(operand)
    if not place.wide:
        raise d.unsupported("a 32-bit address of global memory")
    return place


# ---- plain bulk copies -----------------------------------------------------------------------------------------------


def plain(d: Decoder, i: Instruction, m: Modifiers, reduces: bool) -> None:
    spaces = ("shared::cluster", "shared::cta", "global")
    to, source = m.one_of(*spaces), m.one_of(*spaces)
    rest = list(i.operands)
    if to == "global":
        m.require("bulk_group")
        if source != "shared::cta":
            raise d.unsupported("from shared::cta only")
        destination, origin = global_place(d, rest.pop(0)), shared_place(d, rest.pop(0), source)
    else:
        m.require("mbarrier::complete_tx::bytes")
        if source != "global" and (source, to) != ("shared::cta", "shared::cluster"):
            raise d.unsupported("between global memory, shared::cta and shared::cluster")
        destination = shared_place(d, rest.pop(0), to)
        origin = (global_place if source == "global" else _shared_cta)(d, rest.pop(0))
    pool = [*list_places(d, destination, origin), d.slot(rest.pop(0), "u32")]
    mask, flags = -1, OWN_CTA if to == "shared::cta" else 0
    if to != "global":
        pool += list_places(d, shared_place(d, rest.pop(0), "shared::cluster"))
        if m.flag("multicast::cluster"):
            if reduces or source != "global":
                raise d.unsupported("multicast of a load only")
            mask, flags = d.slot(rest.pop(0), "b16"), flags | MULTICAST
    if reduces:
        operation, kind = m.one_of(*OPERATIONS), m.type()
        if operation not in (REDUCTIONS if to == "global" else SHARED_REDUCTIONS).get(kind, ()) or source == "global":
            raise d.unsupported(f".{operation}.{kind} does not exist here")
        if kind in ("f16", "bf16") and operation == "add":
            m.require("noftz")
        pool += [OPERATIONS.index(operation), TYPES[kind], SIZES[kind]]
    d.ctas_meet |= reduces and to == "global"
    policy(d, m, rest)
    name = ("load" if source == "global" else "copy") if to != "global" else "store"
    d.emit(f"bulk.{'reduce.' if reduces else ''}{name}", b=mask, i1=flags, pool=d.list(pool))


def _shared_cta(d: Decoder, operand: Operand) -> Place:
    return shared_place(d, operand, "shared::cta")


# ---- tensors ---------------------------------------------------------------------------------------------------------


def mode(d: Decoder, m: Modifiers) -> int:
    """The number of dimensions; only tiles are executed."""
    rank = int(m.one_of("1d", "2d", "3d", "4d", "5d")[0])
    m.drop("tile")  # the default
    if set(m.left) & {"im2col", "im2col::w", "im2col::w::128", "im2col_no_offs", "tile::gather4", "tile::scatter4"}:
        raise d.unsupported("only tile mode")
    return rank


def tensor(d: Decoder, i: Instruction, m: Modifiers, reduces: bool) -> None:
    rank = mode(d, m)
    spaces = ("shared::cluster", "shared::cta", "global")
    to, source = m.one_of(*spaces), m.one_of(*spaces)
    rest = list(i.operands)
    if source == "global":
        if reduces or to == "global":
            raise d.unsupported("into global memory from shared::cta only")
        m.require("mbarrier::complete_tx::bytes")
        shared = shared_place(d, rest.pop(0), to)
        target, coordinates = tensor_address(d, rest.pop(0), rank)
        barrier = shared_place(d, rest.pop(0), "shared::cluster")
        flags = OWN_CTA if to == "shared::cta" else 0
        if m.one_of("cta_group::1", "cta_group::2", default="cta_group::1") == "cta_group::2":
            flags |= CTA_PAIR
        mask = -1
        if m.flag("multicast::cluster"):
            mask, flags = d.slot(rest.pop(0), "b16"), flags | MULTICAST
        policy(d, m, rest)
        pool = d.list([*list_places(d, shared, barrier), *coordinates])
        d.emit(
            "tensor.load",
            a=target.slot,
            b=mask,
            i0=target.offset,
            i1=rank | flags << 8,
            pool=pool,
            count_as="tensor load",
        )
        return
    if (to, source) != ("global", "shared::cta"):
        raise d.unsupported("between global memory and shared memory only")
    m.require("bulk_group")
    operation = OPERATIONS.index(m.one_of(*OPERATIONS)) if reduces else 0
    target, coordinates = tensor_address(d, rest.pop(0), rank)
    shared = shared_place(d, rest.pop(0), source)
    policy(d, m, rest)
    pool = d.list([*list_places(d, shared), *coordinates])
    d.ctas_meet |= reduces
    name = "reduce" if reduces else "store"
    d.emit(
        f"tensor.{name}",
        a=target.slot,
        i0=target.offset,
        i1=rank | operation << 8,
        pool=pool,
        count_as=f"tensor {name}",
    )


def tensor_address(d: Decoder, operand: Operand, rank: int) -> tuple[Place, list[int]]:
    """`[map, {coordinates}]`."""
    if not isinstance(operand, TensorAddress):
        raise d.unsupported("a tensor map and coordinates are expected")
    if len(operand.coordinates) != rank:
        raise d.unsupported(f"{len(operand.coordinates)} coordinates in {rank} dimensions")
    place = global_place(d, operand.map)
    return place, [d.slot(coordinate, "s32") for coordinate in operand.coordinates]


# ---- tensor maps -----------------------------------------------------------------------------------------------------

FIELDS = (
    *("global_address", "rank", "box_dim", "global_dim", "global_stride", "element_stride", "elemtype"),
    *("swizzle_mode", "swizzle_atomicity", "interleave_layout", "fill_mode"),
)
"""Fields of tensormap.replace, as engine/tensor_map.h numbers them; of the last two only the value 0 is executed."""


@instruction("tensormap", count_as="tensor map")
def tensormap(d: Decoder, i: Instruction, m: Modifiers) -> None:
    if m.flag("cp_fenceproxy"):
        m.require("global", "shared::cta", "tensormap::generic", "release", "sync", "aligned")
        m.one_of("cta", "cluster", "gpu", "sys")
        to, source, _ = i.operands  # the size can only be 128
        target, origin = global_place(d, to), shared_place(d, source, "shared::cta")
        d.emit("tensormap.copy", a=target.slot, b=origin.slot, i0=target.offset, i1=origin.offset)
        return
    m.require("replace", "tile", "b1024")
    kind, field = m.type(), m.one_of(*FIELDS)
    if kind != ("b64" if field in ("global_address", "global_stride") else "b32"):
        raise d.unsupported(f"{field} is not .{kind}")
    space = m.one_of("global", "shared::cta", default="global")
    address, *order, value = i.operands
    place = shared_place(d, address, space) if space == "shared::cta" else global_place(d, address)
    index = 0
    if order:
        if not isinstance(order[0], Immediate) or not 0 <= order[0].bits < (4 if field == "global_stride" else 5):
            raise d.unsupported("the dimension is not a constant that exists")
        index = order[0].bits
    if bool(order) != (field in ("box_dim", "global_dim", "global_stride", "element_stride")):
        raise d.unsupported(f"{len(i.operands)} operands")
    if FIELDS.index(field) >= 9:
        if not isinstance(value, Immediate) or value.bits != 0:
            raise d.unsupported(f"only {field} 0")
        d.emit("nothing")
        return
    where = FIELDS.index(field) | index << 8 | (space != "global") << 16
    d.emit("tensormap.replace", a=place.slot, b=d.slot(value, kind), i0=place.offset, i1=where)
