"""Barriers of a CTA and of a cluster, mbarriers, fences."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from ..decode import Decoder, Modifiers, Place, instruction
from ..syntax import Address, Instruction, Operand, Sink, Symbol
from .memory import SCOPES

SHARED, GLOBAL = 1, 2  # state spaces of fence.proxy, as in engine/barriers.cpp

# What a lane waits for, as engine/barriers.cpp keeps it: the named barrier and its generation; its vote; the generation
# of the cluster's barrier; when a poll was last allowed to time out. One set per kernel: a lane waits at one barrier at
# a time, and warps meet at any instruction.
_waiting: WeakKeyDictionary[Decoder, int] = WeakKeyDictionary()


def waiting_slots(d: Decoder) -> int:
    if d not in _waiting:
        _waiting[d] = d.new_slots(4)
    return _waiting[d]


def shared_place(d: Decoder, operand: Operand, space: str | None) -> Place:
    """An address in shared memory: `space` is the modifier, None is generic. Call it before other operands are read."""
    if isinstance(operand, Address) and isinstance(operand.base, Symbol) and operand.base.name in d.shared_offsets:
        return d.address(operand)
    place = d.address(operand)
    if space is not None:
        return place  # 64-bit registers may hold addresses of shared memory: the low half is the address
    if not place.wide:
        raise d.unsupported("a 32-bit generic address")
    slot = d.new_slots(1)
    d.emit("shared address", d=slot, a=place.slot, i0=place.offset)
    return Place(slot, 0, False)


@instruction("bar", "barrier", count_as="barrier")
def barrier(d: Decoder, i: Instruction, m: Modifiers) -> None:
    if m.flag("warp"):
        m.require("sync")
        (members,) = i.operands
        d.emit("warp.sync", a=d.slot(members, "b32"))
    elif m.flag("cluster"):
        cluster_barrier(d, i, m)
    else:
        cta_barrier(d, i, m)


def cta_barrier(d: Decoder, i: Instruction, m: Modifiers) -> None:
    """`bar` is `barrier.aligned`. Without .aligned the lanes of a warp may come one by one."""
    m.drop("cta")  # the only scope
    aligned = m.flag("aligned") or i.opcode == "bar"
    kind = m.one_of("sync", "arrive", "red")
    operands = list(i.operands)
    operation, target, vote, negated = "popc", -1, -1, False
    if kind == "red":
        operation = m.one_of("popc", "and", "or")
        m.require("u32" if operation == "popc" else "pred")
        if len(operands) < 3:
            raise d.unsupported("too few operands")
        result = operands.pop(0)
        target = d.target(result, "u32") if operation == "popc" else d.predicate(result)
        vote, negated = d.predicate_source(operands.pop())
    if not (2 if kind == "arrive" else 1) <= len(operands) <= 2:
        raise d.unsupported("a barrier and a number of threads are expected")
    number = d.slot(operands[0], "u32")
    count = d.slot(operands[1], "u32") if len(operands) == 2 else -1
    d.emit(
        f"bar.{kind}",
        d=target,
        a=number,
        b=count,
        c=waiting_slots(d),
        e=vote,
        i0=("popc", "and", "or").index(operation) | negated << 2,
        i1=int(aligned),
    )


def cluster_barrier(d: Decoder, i: Instruction, m: Modifiers) -> None:
    kind = m.one_of("arrive", "wait")
    ordered = m.one_of(*(("release", "relaxed") if kind == "arrive" else ("acquire",)), default="ordered")
    d.emit(f"cluster.{kind}", c=waiting_slots(d), i0=int(ordered != "relaxed"), i1=int(m.flag("aligned")))


# ---- mbarriers -------------------------------------------------------------------------------------------------------

# Flags of arrivals and of waits, as in engine/barriers.cpp.
EXPECT, DROP, NO_COMPLETE, RELEASE, REMOTE, CTA_SCOPE = 1, 2, 4, 8, 16, 32
PARITY, ACQUIRE = 1, 2


def memory_model(m: Modifiers, *semantics: str) -> tuple[str, str]:
    """`.sem.scope`: both or neither; the first of `semantics` is the default, and "" the scope then."""
    found = m.one_of(*semantics, default="")
    if not found:
        return semantics[0], ""
    return found, m.one_of("cta", "cluster")


@instruction("mbarrier", count_as="mbarrier")
def mbarrier(d: Decoder, i: Instruction, m: Modifiers) -> None:
    operation = m.one_of(
        "init", "inval", "arrive", "arrive_drop", "expect_tx", "complete_tx", "test_wait", "try_wait", "pending_count"
    )
    m.require("b64")
    if operation == "pending_count":
        count, state = i.operands
        d.emit("mbarrier.pending_count", d=d.target(count, "u32"), a=d.slot(state, "b64"))
    elif operation in ("init", "inval"):
        place = local_place(d, m, i.operands[0])
        if len(i.operands) != (2 if operation == "init" else 1):
            raise d.unsupported(f"{len(i.operands)} operands")
        count_slot = d.slot(i.operands[1], "u32") if operation == "init" else -1
        d.emit(f"mbarrier.{operation}", a=place.slot, b=count_slot, i0=place.offset)
    elif operation in ("arrive", "arrive_drop"):
        arrive(d, i, m, operation == "arrive_drop")
    elif operation in ("expect_tx", "complete_tx"):
        memory_model(m, "relaxed")
        address, size = i.operands
        place, remote = any_place(d, m, address)
        flags = remote | (EXPECT if operation == "expect_tx" else 0)
        d.emit("mbarrier.tx", a=place.slot, b=d.slot(size, "u32"), i0=place.offset, i1=flags)
    else:
        wait(d, i, m, operation)


def local_place(d: Decoder, m: Modifiers, operand: Operand) -> Place:
    """The address of an mbarrier of the own CTA."""
    return shared_place(d, operand, m.one_of("shared", "shared::cta", default="") or None)


def any_place(d: Decoder, m: Modifiers, operand: Operand) -> tuple[Place, int]:
    """The address of an mbarrier of the cluster and the flag REMOTE if it may be another CTA's."""
    space = m.one_of("shared", "shared::cta", "shared::cluster", default="") or None
    return shared_place(d, operand, space), REMOTE if space in ("shared::cluster", None) else 0


def arrive(d: Decoder, i: Instruction, m: Modifiers, drop: bool) -> None:
    flags = DROP if drop else 0
    if m.flag("expect_tx"):
        flags |= EXPECT
    elif m.flag("noComplete"):
        flags |= NO_COMPLETE
    semantics, scope = memory_model(m, "release", "relaxed")
    if semantics == "release":
        flags |= RELEASE
    if scope == "cta":  # without a scope, which kernels leave out for other CTAs' mbarriers too, it is the cluster
        flags |= CTA_SCOPE
    operands = list(i.operands)
    state = Sink() if isinstance(operands[0], Address) else operands.pop(0)
    place, remote = any_place(d, m, operands[0])
    if "shared::cluster" in i.modifiers and not isinstance(state, Sink):
        raise d.unsupported("an arrival at another CTA's mbarrier gives no state")
    if not (2 if flags & (EXPECT | NO_COMPLETE) else 1) <= len(operands) <= 2:
        raise d.unsupported(f"{len(i.operands)} operands")
    number = d.slot(operands[1], "u32") if len(operands) == 2 else -1
    target = -1 if isinstance(state, Sink) else d.target(state, "b64")
    d.emit("mbarrier.arrive", d=target, a=place.slot, b=number, i0=place.offset, i1=flags | remote)


def wait(d: Decoder, i: Instruction, m: Modifiers, operation: str) -> None:
    flags = PARITY if m.flag("parity") else 0
    semantics, _ = memory_model(m, "acquire", "relaxed")  # kernels wait for other CTAs' arrivals with .cta as well
    if semantics == "acquire":
        flags |= ACQUIRE
    done, address, phase, *hint = i.operands
    if len(hint) > (operation == "try_wait"):
        raise d.unsupported(f"{len(i.operands)} operands")
    place = local_place(d, m, address)
    phase_slot = d.slot(phase, "u32" if flags & PARITY else "b64")
    for time in hint:
        d.slot(time, "u32")  # how long the device suspends the thread: the schedule decides here
    slots = waiting_slots(d)
    d.emit(f"mbarrier.{operation}", d=d.predicate(done), a=place.slot, b=phase_slot, c=slots, i0=place.offset, i1=flags)


# ---- fences ----------------------------------------------------------------------------------------------------------


@instruction("fence", count_as="fence")
def fence(d: Decoder, i: Instruction, m: Modifiers) -> None:
    if m.flag("proxy"):
        proxy_fence(d, i, m)
    elif m.flag("mbarrier_init"):
        m.require("release", "cluster")
        d.emit("fence.mbarrier_init")
    else:
        m.one_of("sc", "acq_rel", "acquire", "release", default="acq_rel")
        m.drop("sync_restrict::shared::cluster", "sync_restrict::shared::cta")  # orders less than a plain fence
        d.emit("fence", i1=SCOPES[m.one_of(*SCOPES)])


@instruction("membar", count_as="fence")
def membar(d: Decoder, i: Instruction, m: Modifiers) -> None:
    if m.flag("proxy"):
        proxy_fence(d, i, m)
    else:
        d.emit("fence", i1=SCOPES["cta" if m.one_of("cta", "gl", "sys") == "cta" else "gpu"])


def proxy_fence(d: Decoder, i: Instruction, m: Modifiers) -> None:
    proxy = m.one_of("async", "alias", "async::generic", "tensormap::generic")
    if proxy == "async":
        space = m.one_of("global", "shared::cta", "shared::cluster", default="all")
        d.emit("fence.proxy", i0={"global": GLOBAL, "all": SHARED | GLOBAL}.get(space, SHARED))
    elif proxy == "async::generic":
        m.one_of("acquire", "release")
        m.one_of("sync_restrict::shared::cluster", "sync_restrict::shared::cta")
        m.require("cluster")
        d.emit("fence.proxy", i0=SHARED)
    elif proxy == "tensormap::generic":
        tensor_map_fence(d, i, m)
    else:
        d.emit("nothing")  # virtual aliases of an address: a kernel cannot make one here


def tensor_map_fence(d: Decoder, i: Instruction, m: Modifiers) -> None:
    """A tensor map is decoded when an instruction uses it, so only the order between threads matters."""
    kind = m.one_of("acquire", "release")
    scope = SCOPES[m.one_of(*SCOPES)]
    if kind == "release":
        d.emit("fence", i1=scope)
        return
    address, _ = i.operands  # the size can only be 128
    place = d.address(address)
    if not place.wide:
        raise d.unsupported("a 32-bit generic address")
    d.emit("fence.tensormap", a=place.slot, i0=place.offset, i1=scope)
