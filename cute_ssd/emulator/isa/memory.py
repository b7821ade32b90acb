"""Loads and stores of every state space, address conversion (cvta, mapa, isspacep), prefetches and cache policies."""

from __future__ import annotations

from ..decode import SIZES, Decoder, Modifiers, Place, instruction
from ..syntax import Address, Immediate, Instruction, Operand, Predicate, Register, Sink, Symbol

SPACES = {
    "shared": "shared", "shared::cta": "shared", "shared::cluster": "cluster", "global": "global", "local": "local",
    "const": "global", "param": "param", "param::entry": "param", "param::func": "param",
}  # fmt: skip
"""State spaces of PTX, and the engine's (constants and parameters lie in host memory, as global data does)."""

GENERIC_WINDOWS = {"shared": 0x7F00 << 48, "local": (0x7F00 << 48) + (1 << 40)}
"""Where generic addresses of these spaces start (core.h); those of the other spaces are global addresses already."""

STRONG, ORDERED = 1, 2  # as in engine/addresses.h, and the flags of scopes too
SCOPES = {"cta": 0, "cluster": 128, "gpu": 4, "sys": 4}

# Where data is cached and for how long changes no value: the emulator has no caches.
CACHE_HINTS = (
    *("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "L2::64B", "L2::128B", "L2::256B"),
    *("L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last", "L1::no_allocate"),
    *("L2::evict_normal", "L2::evict_first", "L2::evict_last"),
)


def space_of(d: Decoder, m: Modifiers, operand: Operand) -> str:
    """The engine's state space of an access; without one, a variable's name says it."""
    space = SPACES.get(m.one_of(*SPACES, default="generic"), "generic")
    base = operand.base if isinstance(operand, Address) else None
    if isinstance(base, Symbol) and space == "generic":
        if base.name in d.shared_offsets:
            return "shared"
        return "local" if base.name in d.local_offsets else "global"
    return space


def ordering(m: Modifiers, strong: str) -> int:
    """The flags of `.weak`, `.relaxed`, `.volatile`, `.mmio` and `strong` (.acquire or .release) with their scopes."""
    m.drop("mmio")  # how often the device is asked; the emulator asks once per lane
    if m.flag("volatile"):
        return STRONG | SCOPES["sys"]
    kind = m.one_of("weak", "relaxed", strong, default="weak")
    if kind == "weak":
        return 0
    return STRONG | (ORDERED if kind == strong else 0) | SCOPES[m.one_of(*SCOPES)]


def note_meeting(d: Decoder, space: str, flags: int) -> None:
    """A strong access to global memory: there CTAs see what others did, and it depends on the order."""
    d.ctas_meet |= bool(flags & STRONG) and space in ("global", "generic")


def vector_length(m: Modifiers) -> int:
    return int(m.one_of("v2", "v4", "v8", default="v1")[1:])


def cache_policy(d: Decoder, m: Modifiers, operands: tuple[Operand, ...], n: int) -> None:
    """Reads the operand that `.L2::cache_hint` adds behind the first `n`; there must be no others."""
    hinted = m.flag("L2::cache_hint")
    if len(operands) != n + hinted:
        raise d.unsupported(f"{len(operands)} operands")
    if hinted:
        d.slot(operands[n], "b64")


def value(d: Decoder, operand: Operand, kind: str) -> int:
    """The slot of a value that is stored; a register must not be narrower than its type."""
    if (d.width(operand) or 16) < SIZES[kind]:
        raise d.unsupported("a register narrower than its type")
    if isinstance(operand, Immediate) and operand.kind != "int" and SIZES[kind] != {"f32": 4, "f64": 8}[operand.kind]:
        raise d.unsupported("a floating-point constant of another size")
    return d.slot(operand, kind)


def words(slots: list[int], size: int) -> list[int]:
    """The slots of elements, one for each 4 bytes or fewer."""
    return [slot + k for slot in slots for k in range(max(1, size // 4))]


def place(d: Decoder, operand: Operand, space: str) -> Place:
    """An address operand whose register is wide enough for its space."""
    found = d.address(operand)
    if space in ("generic", "global") and not found.wide:
        raise d.unsupported("a 32-bit address: global and generic addresses have 64 bits")
    return found


def parameter(d: Decoder, operand: Operand, size: int) -> tuple[bool, int]:
    """`[name + offset]` in .param space: (True, slot) of a call parameter, (False, offset) in the kernel's."""
    if not isinstance(operand, Address) or not isinstance(operand.base, Symbol):
        raise d.unsupported("a parameter's name is expected")
    name, offset = operand.base.name, operand.offset
    called = name in d.kernel.call_parameters
    found = d.kernel.call_parameters.get(name) or next((p for p in d.kernel.parameters if p.name == name), None)
    if found is None:
        raise d.unsupported(f"{name} is not a parameter")
    if not 0 <= offset <= found.size - size:
        raise d.unsupported(f"{size} bytes at {name}+{offset} lie outside its {found.size} bytes")
    if not called:
        return False, found.offset + offset
    if offset % 4:
        raise d.unsupported("a call parameter at an offset that is not a multiple of 4")
    return True, d.call_parameter(operand.base, found.size) + offset // 4


@instruction("ld", "ldu", count_as="load global")
def load(d: Decoder, i: Instruction, m: Modifiers) -> None:
    kind = m.type()
    flags = ordering(m, "acquire")
    m.drop("unified", *CACHE_HINTS)  # unified: the address is the same in all lanes
    n, size = vector_length(m), SIZES[kind]
    space = space_of(d, m, i.operands[1])
    items = d.items(i.operands[0])
    if len(items) != n:
        raise d.unsupported(f"{len(items)} registers for .v{n}")
    check_shape(d, n, size)
    if any((d.width(item) or 16) < size for item in items):
        raise d.unsupported("a register narrower than its type")
    slots = [d.target(item, kind) for item in items]
    targets, address = words(slots, size), i.operands[1]
    cache_policy(d, m, i.operands, 2)
    if space == "param" and isinstance(address, Address) and isinstance(address.base, Symbol):
        called, at = parameter(d, address, n * size)
        if called:
            move_parameter(d, [(to, at + k) for k, to in enumerate(targets)], size)
        elif at % (n * size):
            raise d.unsupported("a parameter that is not aligned to its type")
        else:
            element = min(size, 4)
            d.emit("ld.param", e=len(targets), i0=at, i1=element, pool=d.list(targets), count_as="load parameter")
    else:
        space = "global" if space == "param" else space
        p = place(d, address, space)
        note_meeting(d, space, flags)
        d.emit(
            f"ld.{space}.{min(size, 4)}x{len(targets)}",
            a=p.slot,
            i0=p.offset,
            i1=flags,
            pool=d.list(targets),
            count_as="load shared" if space in ("shared", "cluster") else f"load {space}",
        )
    for item, slot in zip(items, slots, strict=True):
        width, signed = d.width(item) or size, kind[0] == "s"
        if width == 16 and size < 16:
            raise d.unsupported("a load into a register of 128 bits")
        if width > size and (signed or width == 8):  # otherwise the slot is right: what was not loaded is zero
            d.emit("ld.extend", d=slot, a=int(signed), i0=8 * size, i1=width)


@instruction("st", count_as="store global")
def store(d: Decoder, i: Instruction, m: Modifiers) -> None:
    kind = m.type()
    flags = ordering(m, "release")
    m.drop(*CACHE_HINTS)
    n, size = vector_length(m), SIZES[kind]
    if m.flag("async"):
        return store_async(d, i, m, kind, n)
    space = space_of(d, m, i.operands[0])
    items = d.items(i.operands[1])
    if len(items) != n:
        raise d.unsupported(f"{len(items)} values for .v{n}")
    check_shape(d, n, size)
    if any(isinstance(item, Sink) for item in items):
        raise d.unsupported("a sink as a value")
    values = words([value(d, item, kind) for item in items], size)
    cache_policy(d, m, i.operands, 2)
    if space == "param":
        called, at = parameter(d, i.operands[0], n * size)
        if not called:
            raise d.unsupported("a store to a parameter of the kernel")
        move_parameter(d, [(at + k, source) for k, source in enumerate(values)], size)
        return
    p = place(d, i.operands[0], space)
    note_meeting(d, space, flags)
    d.emit(
        f"st.{space}.{min(size, 4)}x{len(values)}",
        a=p.slot,
        i0=p.offset,
        i1=flags,
        pool=d.list(values),
        count_as="store shared" if space in ("shared", "cluster") else f"store {space}",
    )


def check_shape(d: Decoder, n: int, size: int) -> None:
    if n * size > 32 or (n == 8 and size != 4) or (size == 16 and n > 1):
        raise d.unsupported(f"{n} elements of {size} bytes")


def move_parameter(d: Decoder, pairs: list[tuple[int, int]], size: int) -> None:
    """Moves between registers and the slots of a call parameter."""
    if size < 4 and len(pairs) > 1:
        raise d.unsupported("a vector of small elements as a call parameter")
    pool = d.list([slot for pair in pairs for slot in pair])
    d.emit("param.move", e=len(pairs), pool=pool, copies=True, count_as="move")
    if size < 4:
        d.emit("ld.extend", d=pairs[0][0], a=0, i0=8 * size, i1=4)


# ---- atomics --------------------------------------------------------------------------------------------------------

RELEASE, SPACE_SHIFT, COUNT_SHIFT = 8, 4, 8  # engine/atomics.cpp
SPACE_NUMBERS = {"generic": 0, "shared": 1, "cluster": 2, "global": 3}  # engine/addresses.h

_HALVES = ("f16", "bf16", "f16x2", "bf16x2")
_INTEGERS = ("u32", "s32", "u64", "s64")
ATOMIC_TYPES = {
    "add": (*_INTEGERS, "f32", "f64", *_HALVES),
    "min": (*_INTEGERS, *_HALVES), "max": (*_INTEGERS, *_HALVES),
    "and": ("b32", "b64"), "or": ("b32", "b64"), "xor": ("b32", "b64"),
    "inc": ("u32",), "dec": ("u32",),
    "exch": ("b32", "b64"), "cas": ("b16", "b32", "b64"),
}  # fmt: skip
ASYNC_TYPES = {
    "add": ("u32", "s32", "u64"), "min": ("u32", "s32"), "max": ("u32", "s32"), "inc": ("u32",), "dec": ("u32",),
    "and": ("b32",), "or": ("b32",), "xor": ("b32",),
}  # fmt: skip


def atomic_handler(d: Decoder, m: Modifiers, allowed: dict[str, tuple[str, ...]], kind: str) -> str:
    """The name of the operation in the engine: addition does not tell signed from unsigned."""
    operation = m.one_of(*allowed)
    if kind not in allowed[operation]:
        raise d.unsupported(f"{operation} of .{kind}")
    if operation == "add" and kind in _INTEGERS:
        kind = "b" + kind[1:]
    return f"{operation}.{kind}"


@instruction("atom", "red", count_as="atomic")
def atomic(d: Decoder, i: Instruction, m: Modifiers) -> None:
    kind, fetches = m.type(), i.opcode == "atom"
    if m.flag("async"):
        return reduce_async(d, i, m, kind)
    semantics = m.one_of("relaxed", "acquire", "release", "acq_rel", default="relaxed")
    flags = STRONG | SCOPES[m.one_of(*SCOPES, default="gpu")]
    flags |= {"relaxed": 0, "acquire": ORDERED, "release": RELEASE, "acq_rel": ORDERED | RELEASE}[semantics]
    operands = i.operands if fetches else (Sink(), *i.operands)
    n = vector_length(m)
    handler = atomic_handler(d, m, ATOMIC_TYPES, kind)
    operation, size = handler.partition(".")[0], SIZES[kind]
    if m.flag("noftz") != (kind in _HALVES):
        raise d.unsupported("halves are added with .noftz, others without")
    only_vectors = operation in ("min", "max") and kind in _HALVES
    if n * size > 16 or (n > 1 and kind not in ("f32", *_HALVES)) or (n == 1 and only_vectors):
        raise d.unsupported(f"{n} elements of .{kind}")
    compares = operation == "cas"
    if compares and not fetches:
        raise d.unsupported("cas without a result")
    cache_policy(d, m, operands, 4 if compares else 3)
    space = space_of(d, m, operands[1])
    if space not in SPACE_NUMBERS or (n > 1 and space in ("shared", "cluster")):
        raise d.unsupported("an atomic operation in this state space")
    p = place(d, operands[1], space)
    note_meeting(d, space, flags)
    values = [value(d, item, kind) for item in d.items(operands[2])]
    c = value(d, operands[3], kind) if compares else -1
    results = [] if isinstance(operands[0], Sink) else [d.target(item, kind) for item in d.items(operands[0])]
    if len(values) != n or (results and len(results) != n):
        raise d.unsupported(f"vectors of other lengths than {n}")
    if any(d.width(item) not in (None, max(2, size)) for item in d.items(operands[0])):
        raise d.unsupported("a result register of another size")
    d.emit(
        f"atom.{handler}",
        a=p.slot,
        c=c,
        e=int(bool(results)),
        i0=p.offset,
        i1=flags | SPACE_NUMBERS[space] << SPACE_SHIFT | n << COUNT_SHIFT,
        pool=d.list(values + results),
    )


def completion(d: Decoder, m: Modifiers, operands: tuple[Operand, ...]) -> tuple[Place, Place]:
    """Destination and mbarrier, both in shared memory of the cluster."""
    m.require("mbarrier::complete_tx::bytes", "shared::cluster")
    if len(operands) != 3:
        raise d.unsupported(f"{len(operands)} operands")
    return place(d, operands[0], "cluster"), place(d, operands[2], "cluster")


def reduce_async(d: Decoder, i: Instruction, m: Modifiers, kind: str) -> None:
    m.drop("relaxed", "cluster")  # the only semantics that complete on an mbarrier
    to, mbarrier = completion(d, m, i.operands)
    handler = atomic_handler(d, m, ASYNC_TYPES, kind)
    d.emit(
        f"red.async.{handler}",
        a=to.slot,
        i0=to.offset,
        b=mbarrier.slot,
        i1=mbarrier.offset,
        c=value(d, i.operands[1], kind),
        e=1,
    )


def store_async(d: Decoder, i: Instruction, m: Modifiers, kind: str, n: int) -> None:
    to, mbarrier = completion(d, m, i.operands)
    items, size = d.items(i.operands[1]), SIZES[kind]
    if len(items) != n or size not in (4, 8) or n * size > 16:
        raise d.unsupported(f"{len(items)} values of .v{n}.{kind}")
    slots = words([value(d, item, kind) for item in items], size)
    d.emit(
        "st.async",
        a=to.slot,
        i0=to.offset,
        b=mbarrier.slot,
        i1=mbarrier.offset,
        d=len(slots),
        e=0,
        pool=d.list(slots),
        count_as="store shared",
    )


# ---- cp.async -------------------------------------------------------------------------------------------------------


def copy_async(d: Decoder, i: Instruction, m: Modifiers) -> None:
    """cp.async without bulk (`cp` itself belongs to the bulk copies)."""
    m.require("async")
    if m.flag("commit_group"):
        d.emit("cp.async.commit_group", count_as="copy wait")
    elif m.flag("wait_group"):
        (pending,) = i.operands
        if not isinstance(pending, Immediate):
            raise d.unsupported("the number of groups is a constant")
        d.emit("cp.async.wait_group", i0=pending.bits, count_as="copy wait")
    elif m.flag("wait_all"):
        d.emit("cp.async.commit_group", count_as="copy wait")
        d.emit("cp.async.wait_group", i0=0)
    elif m.flag("mbarrier"):
        m.require("arrive", "b64")
        m.one_of("shared", "shared::cta")
        p = place(d, i.operands[0], "shared")
        d.emit("cp.async.mbarrier.arrive", a=p.slot, i0=p.offset, i1=int(m.flag("noinc")), count_as="barrier")
    else:
        _copy(d, i, m)


def _copy(d: Decoder, i: Instruction, m: Modifiers) -> None:
    level = m.one_of("ca", "cg")
    m.one_of("shared", "shared::cta")
    m.require("global")
    m.drop("L2::64B", "L2::128B", "L2::256B")  # how much the cache prefetches
    to, source, size, *rest = i.operands
    if not isinstance(size, Immediate) or size.bits not in ((16,) if level == "cg" else (4, 8, 16)):
        raise d.unsupported("it copies 4, 8 or 16 bytes (.cg: 16)")
    if m.flag("L2::cache_hint"):
        d.slot(rest.pop(), "b64")
    if len(rest) > 1:
        raise d.unsupported(f"{len(i.operands)} operands")
    a, b = place(d, to, "shared"), place(d, source, "global")
    c = ignored = -1
    negated = False
    for operand in rest:
        if isinstance(operand, Predicate) or (isinstance(operand, Register) and operand.name in d.predicates):
            ignored, negated = d.predicate_source(operand)
        else:
            c = value(d, operand, "u32")
    d.emit(
        "cp.async",
        a=a.slot,
        i0=a.offset,
        b=b.slot,
        i1=b.offset,
        c=c,
        d=ignored,
        e=size.bits | (64 if negated else 0),
        count_as="copy",
    )


# ---- addresses and caches -------------------------------------------------------------------------------------------


@instruction("cvta", count_as="integer")
def cvta(d: Decoder, i: Instruction, m: Modifiers) -> None:
    if m.type() != "u64":
        raise d.unsupported("generic addresses have 64 bits")
    to = m.flag("to")
    space = m.one_of(*SPACES)
    window = GENERIC_WINDOWS.get("shared" if space.startswith("shared") else space, 0)
    target, source = i.operands
    d.emit("cvta", d=d.target(target, "u64"), a=d.slot(source, "u64"), i0=-window if to else window)


@instruction("isspacep", count_as="compare")
def isspacep(d: Decoder, i: Instruction, m: Modifiers) -> None:
    space = m.one_of("shared", "shared::cta", "shared::cluster", "global", "local")
    number = {"shared": 1, "cluster": 2, "global": 3, "local": 4}[SPACES[space]]  # engine/addresses.h
    target, address = i.operands
    d.emit("isspacep", d=d.predicate(target), a=d.slot(address, "u64"), i0=number)


@instruction("mapa", count_as="integer")
def mapa(d: Decoder, i: Instruction, m: Modifiers) -> None:
    kind = m.type()
    generic = not m.flag("shared::cluster")
    target, address, rank = i.operands
    if kind not in ("u32", "u64") or (generic and kind != "u64"):
        raise d.unsupported("an address of another size")
    if isinstance(address, Symbol) and generic:
        raise d.unsupported("a variable's name as a generic address")
    d.emit(
        "mapa",
        d=d.target(target, kind),
        a=d.slot(address, kind),
        b=d.slot(rank, "u32"),
        i0=int(generic),
        i1=SIZES[kind],
    )


@instruction("getctarank", count_as="integer")
def getctarank(d: Decoder, i: Instruction, m: Modifiers) -> None:
    kind = m.type()
    m.drop("shared::cluster")  # the rank's bits are the same in a generic address
    if kind not in ("u32", "u64"):
        raise d.unsupported("an address of another size")
    target, address = i.operands
    d.emit("getctarank", d=d.target(target, "u32"), a=d.slot(address, kind))


@instruction("prefetch", "prefetchu", "applypriority", "discard", count_as="no effect")
def prefetch(d: Decoder, i: Instruction, m: Modifiers) -> None:
    """Caches change no value. (What `discard` leaves behind is any value: here the old one.)"""
    m.drop("global", "local", "const", "param", "L1", "L2", "L2::evict_last", "L2::evict_normal", "tensormap")
    d.address(i.operands[0])
    d.emit("nothing")


@instruction("createpolicy", count_as="move")
def createpolicy(d: Decoder, i: Instruction, m: Modifiers) -> None:
    m.require("b64")
    m.one_of("fractional", "range", "cvt")
    m.drop("L2", "L2::evict_last", "L2::evict_normal", "L2::evict_first", "L2::evict_unchanged", "global")  # hints
    for operand in i.operands[1:]:
        if not isinstance(operand, Address | Immediate):
            d.slot(operand, "b32")
    d.emit("createpolicy", d=d.target(i.operands[0], "b64"), i0=1 << 60)  # CUTLASS's EVICT_NORMAL


@instruction("multimem", count_as="atomic")
def multimem(d: Decoder, i: Instruction, m: Modifiers) -> None:
    raise d.unsupported("multimem addresses the memory of several devices")
