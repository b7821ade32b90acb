"""Atomic operations of the emulator, stores and reductions that complete on an mbarrier, and cp.async."""

import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ptx_runner import on_silicon
from tests.test_emulator_memory import VARIABLES, launch, noise

pytestmark = pytest.mark.silicon

# ---- atomics --------------------------------------------------------------------------------------------------------

INTEGER_OPERATIONS = {
    "add": operator.add, "min": min, "max": max, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "exch": lambda old, b: b, "inc": lambda old, b: 0 if old >= b else old + 1,
    "dec": lambda old, b: b if old == 0 or old > b else old - 1,
}  # fmt: skip
NOT_PTX = pytest.mark.emulator_only("PTX has no atom.add.s64")
INTEGER_CASES = [
    pytest.param(op, kind, marks=[NOT_PTX] if (op, kind) == ("add", "s64") else [])
    for op in INTEGER_OPERATIONS
    for kind in {"inc": ["u32"], "dec": ["u32"]}.get(
        op, ["b32", "b64"] if op in ("and", "or", "xor", "exch") else ["u32", "s32", "u64", "s64"]
    )
]
SPACES = ["global", "shared", "shared::cluster", "generic"]


def on_rows(instruction: str, kind: str, space: str, memory: np.ndarray, *operands: np.ndarray):
    """Each lane applies an atom to its own row of memory; returns (old values, memory afterwards)."""
    size, vector = memory.itemsize, memory.shape[1]
    letter, bits = {2: "h", 4: "r", 8: "d"}[size], f"b{8 * size}"

    def name(first: int) -> str:
        names = [f"%{letter}{first + k}" for k in range(vector)]
        return names[0] if vector == 1 else "{" + ", ".join(names) + "}"

    def moves(opcode: str, address: str, first: int) -> str:  # one element after the other
        items = [(f"[{address}+{k * size}]", f"%{letter}{first + k}") for k in range(vector)]
        return "".join(f"{opcode}.{bits} {', '.join(item if opcode[:2] == 'st' else item[::-1])};" for item in items)

    old, after = np.zeros_like(memory), memory.copy()
    local = space.startswith("shared")
    body = "".join(moves("ld.global", f"%g{k + 1}", 8 + 8 * k) for k in range(len(operands)))
    body += moves("ld.global", "%g0", 24) + moves("st.shared", "%s", 24) if local else ""
    dot, v = "" if space == "generic" else "." + space, f".v{vector}" if vector > 1 else ""
    values = ", ".join(name(8 + 8 * k) for k in range(len(operands)))
    body += f"atom{dot}.{instruction}{v}.{kind} {name(24)}, [{'%s' if local else '%g0'}], {values};"
    body += moves("st.global", f"%g{len(operands) + 1}", 24)
    body += moves("ld.shared", "%s", 24) + moves("st.global", "%g0", 24) if local else ""
    launch(body, after, *operands, old, sanitize=True)
    return old, after


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("operation, kind", INTEGER_CASES)
def test_integer_atomics(operation, kind, space):
    bits, signed = int(kind[1:]), kind[0] == "s"
    rng = np.random.default_rng(1)
    edges = [0, 1, (1 << bits) - 1, 1 << bits - 1, (1 << bits - 1) - 1, 5]
    memory = np.array(edges * 5 + rng.integers(0, 9, 2).tolist(), f"u{bits // 8}")[:, None]
    operand = np.array([e for e in edges for _ in range(5)] + [4, 4], f"u{bits // 8}")[:, None]
    old, after = on_rows(operation, kind, space, memory, operand)
    view = [a[:, 0].astype(f"{'i' if signed else 'u'}{bits // 8}").tolist() for a in (memory, operand)]
    expected = [INTEGER_OPERATIONS[operation](x, y) % (1 << bits) for x, y in zip(*view, strict=True)]
    assert (old == memory).all() and after[:, 0].tolist() == expected


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("bits", [16, 32, 64])
def test_compare_and_swap(bits, space):
    memory = np.arange(32, dtype=f"u{bits // 8}")[:, None]
    compare, swap = memory // 2 * 2, memory + 100
    old, after = on_rows("cas", f"b{bits}", space, memory, compare, swap)
    assert (old == memory).all() and (after == np.where(memory % 2 == 0, swap, memory)).all()


def bf16(values: np.ndarray) -> np.ndarray:
    """float64 to the bits of the nearest bf16, ties to even; what is left of a sum in float64 decides it."""
    x = np.asarray(values, np.float64)
    exponent = np.clip(np.frexp(x)[1] - 1, -126, 127)
    unit = np.ldexp(1.0, exponent - 7)
    rounded = (np.rint(x / unit) * unit).astype(np.float32)
    bits = (rounded.view(np.uint32) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), bits)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


HALVES = st.lists(st.integers(0, 0xFFFF), min_size=64, max_size=64)


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
@settings(deadline=None, max_examples=20)
@given(bits=HALVES)
def test_half_atomics_round_once(bits, kind, space):
    memory, operand = np.array(bits, np.uint16).reshape(2, 32, 1)
    with np.errstate(all="ignore"):
        if kind == "f16":
            total = memory.view(np.float16) + operand.view(np.float16)
            expected = np.where(np.isnan(total), np.uint16(0x7FFF), total.view(np.uint16))
        else:
            expected = bf16(from_bf16(memory).astype(np.float64) + from_bf16(operand))
    old, after = on_rows("add.noftz", kind, space, memory, operand)
    assert (old == memory).all() and (after == expected).all()


@pytest.mark.parametrize("kind, vector", [
    ("f16x2", 1), ("bf16x2", 1), ("f16x2", 2), ("bf16x2", 4), ("f16", 2), ("f16", 8), ("bf16", 4),
])  # fmt: skip
def test_packed_and_vector_half_atomics(kind, vector):
    halves = vector * (2 if kind.endswith("x2") else 1)
    a, b = np.random.default_rng(2).integers(-16, 16, (2, 32, halves)).astype(np.float32)
    encode = (lambda x: x.astype(np.float16).view(np.uint16)) if kind.startswith("f16") else (lambda x: bf16(x))
    item = np.uint32 if kind.endswith("x2") else np.uint16
    memory, operand = (encode(x).reshape(32, halves).view(item) for x in (a, b))
    old, after = on_rows("add.noftz", kind, "global", memory, operand)
    assert (old == memory).all() and (after == encode(a + b).view(item)).all()


@pytest.mark.parametrize("kind", ["f16", "bf16", "f16x2", "bf16x2"])
@pytest.mark.parametrize("operation", ["min", "max"])
def test_half_minimum_and_maximum(operation, kind):
    one = 0x3C00 if kind[0] == "f" else 0x3F80
    nan, infinity = 0x7FC1, 0x7C00 if kind[0] == "f" else 0x7F80
    values = [0, 0x8000, one, 0x8000 | one, nan, infinity, 1, 0x8001]
    item = np.uint32 if kind.endswith("x2") else np.uint16
    pairs = np.array([(x, y) for x in values for y in values] * (item().itemsize // 2), np.uint16)
    order = {x: k for k, x in enumerate([0x8000 | one, 0x8001, 0x8000, 0, 1, one, infinity])}

    def extreme(x: int, y: int) -> int:
        if nan in (x, y):
            return 0x7FFF if x == y else x if y == nan else y
        return (min if operation == "min" else max)(x, y, key=order.__getitem__)

    memory, operand = (pairs[:, k].copy().view(item).reshape(32, 2) for k in (0, 1))
    _, after = on_rows(f"{operation}.noftz", kind, "global", memory, operand)
    assert after.view(np.uint16).ravel().tolist() == [extreme(int(x), int(y)) for x, y in pairs]


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_float_atomics(kind, space):
    dtype = np.dtype(f"f{int(kind[1:]) // 8}")
    tiny = np.finfo(dtype).smallest_subnormal
    special = [0.0, -0.0, 1.5, np.inf, -np.inf, np.nan, tiny, -np.finfo(dtype).tiny]
    a = np.array(special * 4, dtype)
    b = np.array([x for x in (-0.0, tiny, np.inf, 1e30) for _ in range(8)], dtype)
    flush = kind == "f32" and space in ("global", "generic")  # only global memory flushes, and only f32

    def flushed(x: np.ndarray) -> np.ndarray:
        return np.where((abs(x) < np.finfo(dtype).tiny) & flush, np.copysign(dtype.type(0), x), x)

    with np.errstate(all="ignore"):
        expected = flushed(flushed(a) + flushed(b))
    bits = f"u{dtype.itemsize}"
    _, after = on_rows("add", kind, space, a.view(bits)[:, None], b.view(bits)[:, None])
    result = after[:, 0].view(dtype)
    numbers = ~np.isnan(expected)
    assert (np.isnan(result) == ~numbers).all()
    assert (result.view(bits)[numbers] == expected.view(bits)[numbers]).all()
    assert kind == "f64" or (result.view(bits)[~numbers] == 0x7FFFFFFF).all()


def test_vector_float_atomics():
    a, b = np.random.default_rng(3).standard_normal((2, 32, 4)).astype(np.float32)
    old, after = on_rows("add", "f32", "global", a.view(np.uint32), b.view(np.uint32))
    assert (old == a.view(np.uint32)).all() and (after.view(np.float32) == a + b).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_atomics_of_many_threads_lose_nothing(threads):
    """Lanes in ascending order; red and atom; many CTAs, also where several host threads are offered."""
    counter, tickets = np.zeros((1, 2), np.uint32), np.zeros((64 * 64, 1), np.uint32)
    body = """ld.param.u64 %d1, [p0]; atom.global.add.u32 %r3, [%d1], 1; red.relaxed.gpu.global.max.s32 [%d1+4], %t;
    st.global.b32 [%g1], %r3;"""
    launch(body, counter, tickets, grid=64, block=(64, 1, 1), threads=threads)
    assert counter.tolist() == [[4096, 4095]]
    assert sorted(tickets[:, 0].tolist()) == list(range(4096))
    assert on_silicon() or (np.diff(tickets.reshape(-1, 32).astype(int), axis=1) > 0).all()


def test_a_lock_over_acquire_and_release():
    """CTAs add to a plain counter, one at a time."""
    lock, counter = np.zeros((1, 1), np.uint32), np.zeros((1, 1), np.uint32)
    body = """ld.param.u64 %d1, [p0]; ld.param.u64 %d2, [p1]; setp.ne.u32 %p1, %r0, 0; @%p1 bra DONE;
    TAKE: atom.acquire.gpu.global.cas.b32 %r3, [%d1], 0, 1; setp.ne.u32 %p2, %r3, 0; @%p2 bra TAKE;
    ld.global.u32 %r4, [%d2]; add.u32 %r4, %r4, 1; st.global.u32 [%d2], %r4;
    atom.release.gpu.global.exch.b32 %r3, [%d1], 0; DONE:"""
    launch(body, lock, counter, grid=50, threads=2)
    assert counter[0, 0] == 50


# ---- asynchronous stores, reductions and copies ---------------------------------------------------------------------

WAIT = "WAIT{0}: mbarrier.try_wait.parity.shared::cta.b64 %p7, [bar], {1}; @!%p7 bra WAIT{0};"
BARRIER_VARIABLES = VARIABLES + " .shared .align 8 .b64 bar;"


@pytest.mark.parametrize("schedule", ["eager", "late", "priority"])
@pytest.mark.parametrize("instruction, operation, values, size, expected", [
    ("st.async.weak", "b32", "%t", 4, lambda t: [t, 7, 7, 7]),
    ("st.async", "v2.b64", "{%d8, 5}", 16, lambda t: [t, 0, 5, 0]),
    ("st.async", "v4.f32", "{%t, 1, 2, 3}", 16, lambda t: [t, 1, 2, 3]),
    ("red.async.relaxed.cluster", "add.u32", "%t", 4, lambda t: [t + 7, 7, 7, 7]),
    ("red.async.relaxed.cluster", "add.u64", "%d8", 8, lambda t: [t + 7, 7, 7, 7]),
    ("red.async.relaxed.cluster", "max.s32", "-3", 4, lambda t: [7, 7, 7, 7]),
    ("red.async.relaxed.cluster", "inc.u32", "%t", 4,
     lambda t: [np.where(t <= 7, 0, 8), 7, 7, 7]),
    ("red.async.relaxed.cluster", "xor.b32", "1", 4, lambda t: [6, 7, 7, 7]),
    ("red.async.relaxed.cluster", "and.b32", "13", 4, lambda t: [5, 7, 7, 7]),
    ("red.async.relaxed.cluster", "or.b32", "8", 4, lambda t: [15, 7, 7, 7]),
    ("red.async.relaxed.cluster", "min.s32", "-3", 4, lambda t: [2**32 - 3, 7, 7, 7]),
    ("red.async.relaxed.cluster", "min.u32", "%t", 4, lambda t: [np.minimum(t, 7), 7, 7, 7]),
    ("red.async.relaxed.cluster", "max.u32", "%t", 4, lambda t: [np.maximum(t, 7), 7, 7, 7]),
    ("red.async.relaxed.cluster", "dec.u32", "%t", 4, lambda t: [np.where(t < 7, t, 6), 7, 7, 7]),
])  # fmt: skip
def test_asynchronous_stores_and_reductions(instruction, operation, values, size, expected, schedule):
    """Every thread writes into the other CTA of its cluster, whose mbarrier counts the bytes."""
    result = np.zeros((64, 4), np.uint32)
    body = f"""st.shared.v4.b32 [%s], {{7, 7, 7, 7}}; setp.eq.u32 %p1, %r0, 0; cvt.u64.u32 %d8, %t;
    @%p1 mbarrier.init.shared.b64 [bar], 1; @%p1 mbarrier.arrive.expect_tx.shared.b64 %d1, [bar], {32 * size};
    fence.mbarrier_init.release.cluster; barrier.cluster.arrive; barrier.cluster.wait;
    mov.u32 %r3, %cluster_ctarank; xor.b32 %r3, %r3, 1; mov.u32 %r4, bar;
    mapa.shared::cluster.u32 %r5, %s, %r3; mapa.shared::cluster.u32 %r6, %r4, %r3;
    {instruction}.shared::cluster.mbarrier::complete_tx::bytes.{operation} [%r5], {values}, [%r6];
    {WAIT.format(0, 0)} ld.shared.v4.b32 {{%r7, %r8, %r9, %r10}}, [%s];
    st.global.v4.b32 [%g0], {{%r7, %r8, %r9, %r10}};
    barrier.cluster.arrive; barrier.cluster.wait;"""
    launch(body, result, grid=2, cluster=(2, 1, 1), variables=BARRIER_VARIABLES, schedule=schedule, seed=3)
    for column, value in zip(result.T, expected(np.arange(64) ^ 32), strict=True):
        assert (column == value).all()


COPIES = {  # operands behind the addresses -> (bytes per copy, bytes that are not zero)
    "ca 4": ("4", 4, 4), "ca 8": ("8", 8, 8), "ca 16": ("16", 16, 16), "cg 16": ("16", 16, 16),
    "ca 16 hint": ("16, %d9", 16, 16), "cg 16 size and hint": ("16, %r3, %d9", 16, 5), "ca 8 size": ("8, %r3", 8, 5),
    "cg 16 zero": ("16, 0", 16, 0), "ca 4 ignored": ("4, %p1", 4, 0), "ca 4 not ignored": ("4, !%p1", 4, 4),
}  # fmt: skip


@pytest.mark.parametrize("schedule", ["eager", "late"])
@pytest.mark.parametrize("case", COPIES)
def test_copies_fill_with_zeros(case, schedule):
    operands, size, kept = COPIES[case]
    source, result = noise(32, 16), np.zeros((32, 16), np.uint8)
    hint = ".L2::cache_hint" if "hint" in case else ".L2::128B"
    body = f"""mov.u32 %r3, 5; setp.lt.u32 %p1, %t, 32; createpolicy.fractional.L2::evict_first.b64 %d9;
    cp.async.{case[:2]}.shared::cta.global{hint} [%s], [%g0], {operands}; cp.async.wait_all;
    ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%s]; st.global.v4.b32 [%g1], {{%r4, %r5, %r6, %r7}};"""
    launch(body, source, result, schedule=schedule, sanitize=size == 16)
    assert (
        (result[:, :kept] == source[:, :kept]).all()
        and not result[:, kept:size].any()
        and (on_silicon() or (result[:, size:] == 255).all())  # what nothing wrote
    )


def test_a_copy_of_nothing_reads_nothing():
    launch("mov.u64 %d1, 0; cp.async.cg.shared.global [%s], [%d1], 16, 0; cp.async.wait_all;")


@pytest.mark.emulator_only("a device need not be late")
@pytest.mark.parametrize("sanitize", [False, True])
def test_groups_of_copies_arrive_in_order_and_late(sanitize):
    """A late schedule shows what is not awaited yet: nothing there before the wait, the older group after it."""
    source, result = noise(32, 8).view(np.uint32) & 0xFFFF, np.zeros((32, 6), np.uint32)
    look = "ld.shared.v2.b32 {%r4, %r5}, [%s]; st.global.v2.b32 [%g1+%d], {%r4, %r5};"
    body = f"""cp.async.ca.shared.global [%s], [%g0], 4; cp.async.commit_group;
    cp.async.ca.shared.global [%s+4], [%g0+4], 4; cp.async.commit_group; {look.replace("%d", "0")}
    cp.async.wait_group 1; {look.replace("%d", "8")} cp.async.wait_group 0; {look.replace("%d", "16")}"""
    outcome = launch(body, source, result, schedule="late", sanitize=sanitize, check=not sanitize)
    assert [event.kind for event in outcome.events] == ["race", "race"] * sanitize  # the two looks that come too early
    nothing = 0xFFFFFFFF
    assert (result[:, :2] == nothing).all()
    assert (result[:, 2] == source[:, 0]).all() and (result[:, 3] == nothing).all() and (result[:, 4:] == source).all()


@pytest.mark.parametrize("schedule", ["eager", "late", "priority"])
@pytest.mark.parametrize("noinc", [False, True])
def test_copies_arrive_on_an_mbarrier(noinc, schedule):
    source, result = noise(64, 4).view(np.uint32), np.zeros((64, 1), np.uint32)
    count, arrive = (64, ".noinc") if noinc else (1, "")
    body = f"""setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [bar], {count}; bar.sync 0;
    mad.lo.u32 %r4, %r0, 4, 0; mov.u32 %r5, buf; add.u32 %r4, %r4, %r5;
    cp.async.ca.shared.global [%r4], [%g0], 4; cp.async.mbarrier.arrive{arrive}.shared.b64 [bar]; bar.sync 0;
    {"" if noinc else "@%p1 mbarrier.arrive.shared.b64 %d1, [bar];"} {WAIT.format(0, 0)}
    xor.b32 %r4, %r4, 4; ld.shared.b32 %r6, [%r4]; st.global.b32 [%g1], %r6;"""
    launch(
        body, source, result, block=(64, 1, 1), variables=BARRIER_VARIABLES, schedule=schedule, sanitize=True, seed=5
    )
    assert (result == source.reshape(32, 2)[:, ::-1].reshape(64, 1)).all()


def test_an_mbarrier_elsewhere_cannot_count_the_bytes():
    body = """setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [bar], 1;
    barrier.cluster.arrive; barrier.cluster.wait;
    mapa.shared::cluster.u32 %r5, %s, 1; mov.u32 %r6, bar; mapa.shared::cluster.u32 %r6, %r6, 0;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r5], %t, [%r6];"""
    outcome = launch(body, grid=2, cluster=(2, 1, 1), variables=BARRIER_VARIABLES, check=False)
    assert outcome.events[0].kind == "mbarrier" and outcome.events[0].fatal


def test_copies_that_nobody_awaits_are_found():
    body = "cp.async.ca.shared.global [%s], [%g0], 4; cp.async.commit_group;"
    outcome = launch(body, noise(32, 4), sanitize=True, check=False)
    assert [event.kind for event in outcome.events] == ["unfinished copy"]
