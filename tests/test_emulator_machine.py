"""The machine below the instructions: lanes that diverge and meet, shapes of grids, schedules, deadlock."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cute_ssd.emulator import engine
from cute_ssd.emulator.decode import decode
from cute_ssd.emulator.engine import Options, Outcome
from cute_ssd.emulator.ptx import parse_kernel

from .ptx_runner import HEADER, pack, run

SCHEDULES = [("eager", 0), ("late", 1), ("priority", 2), ("priority", 3)]
BOTH = [("eager", 0), ("priority", 5)]

FRAME = """
.visible .entry k(.param .u64 out) {
    .reg .pred %p, %q; .reg .b32 %t, %l, %i, %n, %r<10>; .reg .b64 %out, %o, %d<6>;
    .shared .align 8 .b64 bar; .shared .align 4 .b32 word[64]; .local .align 8 .b8 depot[64];
    mov.u32 %t, %tid.x; mov.u32 %l, %laneid; mov.u32 %r0, %ctaid.x; mov.u32 %n, %ntid.x; mad.lo.u32 %i, %r0, %n, %t;
    ld.param.u64 %out, [out]; mad.wide.u32 %o, %i, 4, %out; mov.u32 %r9, 0;
"""
END = " st.global.u32 [%o], %r9; ret; }"


def launch(body: str, n: int = 32, ctas: int = 1, check: bool = True, **options: object) -> tuple[np.ndarray, Outcome]:
    """What each thread of `ctas` CTAs of n threads leaves in %r9, and the outcome."""
    out = np.zeros(n * ctas + 64, np.uint32)
    options = {"sanitize": True, "block": (n, 1, 1), "grid": (ctas, 1, 1), **options}
    outcome = run(FRAME + body + END, out, check=check, **options)
    return out[: n * ctas], outcome


def threads(body: str, n: int = 32, ctas: int = 1, **options: object) -> np.ndarray:
    return launch(body, n, ctas, **options)[0]


def problem(body: str, n: int = 32, ctas: int = 1, **options: object) -> str:
    """The first event."""
    event = launch(body, n, ctas, check=False, **options)[1].events[0]
    return f"{event.kind}: {event.message}"


# ---- divergence ------------------------------------------------------------------------------------------------------

LANE = np.arange(32)


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("n", [1, 7, 32, 45, 96])
def test_nested_branches(n: int, schedule: str, seed: int) -> None:
    body = """
    and.b32 %r1, %t, 1; setp.eq.u32 %p, %r1, 0; @%p bra EVEN;
    and.b32 %r1, %t, 2; setp.eq.u32 %p, %r1, 0; @%p bra ONE; add.u32 %r9, %r9, 3; bra JOIN3; ONE: add.u32 %r9, %r9, 1;
    JOIN3: add.u32 %r9, %r9, 100; bra JOIN;
    EVEN: add.u32 %r9, %r9, 50; setp.gt.u32 %p, %t, 10; @%p bra JOIN; add.u32 %r9, %r9, 5;
    JOIN: activemask.b32 %r2; popc.b32 %r2, %r2; mad.lo.u32 %r9, %r2, 1000, %r9;
    """
    t = np.arange(n)
    values = np.where(t % 2 == 0, 50 + 5 * (t <= 10), 100 + np.where(t & 2, 3, 1))
    full = np.minimum(32, n - t // 32 * 32)
    np.testing.assert_array_equal(threads(body, n, schedule=schedule, seed=seed), values + 1000 * full)


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_loops_of_different_length(schedule: str, seed: int) -> None:
    """Every lane its own trip count, a loop in a loop; the lanes are together again behind it."""
    body = """
    mov.u32 %r1, 0; OUTER: setp.ge.u32 %p, %r1, %l; @%p bra DONE; mov.u32 %r2, 0;
    INNER: add.u32 %r9, %r9, 1; add.u32 %r2, %r2, 1; setp.le.u32 %p, %r2, %r1; @%p bra INNER;
    add.u32 %r1, %r1, 1; bra OUTER; DONE: vote.sync.ballot.b32 %r3, %p, -1; popc.b32 %r3, %r3;
    mad.lo.u32 %r9, %r3, 1000, %r9;
    """
    np.testing.assert_array_equal(threads(body, schedule=schedule, seed=seed), 32000 + LANE * (LANE + 1) // 2)


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_indexed_branch(schedule: str, seed: int) -> None:
    body = """
    rem.u32 %r1, %l, 3; TABLE: .branchtargets A, B, C; setp.ne.u32 %p, %l, 31; @%p brx.idx %r1, TABLE;
    add.u32 %r9, %r9, 7;
    C: add.u32 %r9, %r9, 100; A: add.u32 %r9, %r9, 10; B: add.u32 %r9, %r9, 1; bar.warp.sync -1;
    """
    expected = np.choose(LANE % 3, [11, 1, 111])
    expected[31] = 118
    np.testing.assert_array_equal(threads(body, schedule=schedule, seed=seed), expected)


def test_index_beyond_the_table() -> None:
    body = "TABLE: .branchtargets A, B; brx.idx %l, TABLE; A: B:"
    assert problem(body).startswith("branch: brx.idx index 2 of a table of 2")


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_lanes_that_exit_early(schedule: str, seed: int) -> None:
    """The others go on, meet in .sync instructions of the whole warp and at barriers."""
    body = """
    setp.lt.u32 %p, %l, 5; @%p ret; setp.eq.u32 %p, %l, 20; @%p exit; bar.sync 0; vote.sync.ballot.b32 %r1, %p, -1;
    activemask.b32 %r9; bar.sync 0;
    """
    alive = 0xFFFFFFFF & ~0x1F & ~(1 << 20)
    expected = np.where((LANE < 5) | (LANE == 20), 0, alive)
    np.testing.assert_array_equal(threads(body, 64, schedule=schedule, seed=seed), np.tile(expected, 2))


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize(
    "poll",
    [
        "W: mbarrier.try_wait.parity.shared.b64 %q, [bar], 0; @!%q bra W;",
        "W: mbarrier.test_wait.parity.shared.b64 %q, [bar], 0; @!%q bra W;",
        "W: ld.volatile.shared.u32 %r1, [word]; setp.eq.u32 %q, %r1, 0; @%q bra W;",
        "W: atom.shared.add.u32 %r1, [word], 0; setp.eq.u32 %q, %r1, 0; @%q bra W;",
    ],
)
def test_lanes_wait_for_lanes_of_their_own_warp(poll: str, schedule: str, seed: int) -> None:
    """Independent thread scheduling: those who wait come first in the program, the one they wait for comes later."""
    body = f"""
    setp.eq.u32 %p, %l, 0; @%p mbarrier.init.shared.b64 [bar], 1; @%p st.volatile.shared.u32 [word], 0;
    bar.warp.sync -1;
    @%p bra LATER; {poll} add.u32 %r9, %r9, 1; bra JOIN;
    LATER: mov.u32 %r9, 2; st.volatile.shared.u32 [word], 1; mbarrier.arrive.shared.b64 _, [bar];
    JOIN: bar.warp.sync -1;
    """
    np.testing.assert_array_equal(threads(body, schedule=schedule, seed=seed), np.where(LANE, 1, 2))


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_a_lock(schedule: str, seed: int) -> None:
    """Every thread takes it once; a thread that holds it is not starved by those that spin."""
    body = """
    mov.u32 %r5, word; setp.eq.u32 %p, %t, 0; @%p st.shared.u32 [word], 0; @%p st.shared.u32 [word+4], 0; bar.sync 0;
    L: atom.shared.acquire.cta.cas.b32 %r1, [word], 0, 1; setp.ne.u32 %p, %r1, 0; @%p bra L;
    ld.volatile.shared.u32 %r2, [word+4]; add.u32 %r2, %r2, 1; st.volatile.shared.u32 [word+4], %r2;
    atom.shared.release.cta.exch.b32 %r1, [word], 0; bar.sync 0; ld.volatile.shared.u32 %r9, [word+4];
    """
    assert (threads(body, 8, schedule=schedule, seed=seed) == 8).all()


# ---- shapes ----------------------------------------------------------------------------------------------------------

SPECIALS = [
    *(f"{name}.{axis}" for name in ("tid", "ctaid", "ntid", "nctaid") for axis in "xyz"),
    *(f"{name}.{axis}" for name in ("cluster_ctaid", "cluster_nctaid", "clusterid", "nclusterid") for axis in "xyz"),
    *(
        "cluster_ctarank",
        "cluster_nctarank",
        "laneid",
        "warpid",
        "nwarpid",
        "lanemask_lt",
        "lanemask_le",
        "lanemask_eq",
    ),
    *("lanemask_ge", "lanemask_gt", "total_smem_size", "dynamic_smem_size"),
]


@pytest.mark.parametrize(
    ("grid", "block", "cluster"),
    [((3, 2, 2), (5, 3, 2), (1, 1, 1)), ((4, 2, 3), (33, 1, 2), (2, 1, 3)), ((2, 6, 2), (8, 4, 2), (2, 3, 1))],
)
def test_special_registers(grid, block, cluster) -> None:
    """In every thread of a three-dimensional grid of three-dimensional blocks with a partial last warp."""
    n, ctas, k = math.prod(block), math.prod(grid), len(SPECIALS)
    out = np.zeros((ctas, n, k), np.uint32)
    reads = "".join(f"mov.u32 %r0, %{name}; st.global.u32 [%o+{4 * i}], %r0;" for i, name in enumerate(SPECIALS))
    text = f"""
    .extern .shared .align 16 .b8 smem[];
    .visible .entry k(.param .u64 out) {{ .reg .b32 %r<8>; .reg .b64 %o; ld.param.u64 %o, [out];
    mov.u32 %r0, %tid.z; mov.u32 %r1, %ntid.y; mov.u32 %r2, %tid.y; mad.lo.u32 %r0, %r0, %r1, %r2;
    mov.u32 %r1, %ntid.x;
    mov.u32 %r2, %tid.x; mad.lo.u32 %r0, %r0, %r1, %r2; mov.u32 %r3, %ctaid.z; mov.u32 %r1, %nctaid.y;
    mov.u32 %r2, %ctaid.y;
    mad.lo.u32 %r3, %r3, %r1, %r2; mov.u32 %r1, %nctaid.x; mov.u32 %r2, %ctaid.x; mad.lo.u32 %r3, %r3, %r1, %r2;
    mad.lo.u32 %r0, %r3, {n}, %r0; mad.wide.u32 %o, %r0, {4 * k}, %o; {reads} ret; }}"""
    run(text, out, grid=grid, block=block, cluster=cluster, shared=160)
    got = {name: out[:, :, i] for i, name in enumerate(SPECIALS)}
    cta, thread = np.meshgrid(np.arange(ctas), np.arange(n), indexing="ij")
    at = [cta % grid[0], cta // grid[0] % grid[1], cta // (grid[0] * grid[1])]
    rank = [at[i] % cluster[i] for i in range(3)]
    lane = (thread % 32).astype(np.uint64)
    one = np.uint64(1)
    expected = {
        "tid": [thread % block[0], thread // block[0] % block[1], thread // (block[0] * block[1])],
        "ctaid": at, "ntid": block, "nctaid": grid, "cluster_ctaid": rank, "cluster_nctaid": cluster,
        "clusterid": [at[i] // cluster[i] for i in range(3)], "nclusterid": [grid[i] // cluster[i] for i in range(3)],
    }  # fmt: skip
    for name, values in expected.items():
        for axis, value in zip("xyz", values, strict=True):
            assert (got[f"{name}.{axis}"] == value).all(), name
    below = (one << lane) - one
    scalars = {
        "cluster_ctarank": rank[0] + cluster[0] * (rank[1] + cluster[1] * rank[2]),
        "cluster_nctarank": math.prod(cluster), "laneid": lane, "warpid": thread // 32, "nwarpid": -(-n // 32),
        "lanemask_lt": below, "lanemask_le": below * 2 + 1, "lanemask_eq": one << lane,
        "lanemask_ge": 0xFFFFFFFF - below, "lanemask_gt": 0xFFFFFFFF - (below * 2 + 1), "total_smem_size": 160,
        "dynamic_smem_size": 160,
    }  # fmt: skip
    for name, value in scalars.items():
        np.testing.assert_array_equal(got[name], np.broadcast_to(value, got[name].shape), name)


def test_local_memory_is_private() -> None:
    body = """
    mov.u64 %d0, depot; cvta.local.u64 %d1, %d0; st.local.u32 [depot+8], %i; mul.lo.u32 %r1, %i, 3;
    st.u32 [%d1+60], %r1; bar.sync 0;
    ld.u32 %r2, [%d1+8]; ld.local.u32 %r3, [depot+60]; add.u32 %r9, %r2, %r3;
    """
    np.testing.assert_array_equal(threads(body, 64, 3), 4 * np.arange(192))


def test_local_memory_has_an_end() -> None:
    assert problem("st.local.u32 [depot+64], 1;").startswith("out of bounds: 4 bytes at local+64")


def test_trap() -> None:
    event = problem("setp.eq.u32 %p, %l, 9; @%p trap;")
    assert event == "trap: lane 9 executes trap"


def test_a_fault_says_who_and_where() -> None:
    body = "\nsetp.eq.u32 %p, %t, 41;\n@%p st.global.u32 [%out+4000], 1;"
    (event,) = launch(body, 64, 2, check=False)[1].events
    assert (event.kind, event.who, event.fatal) == ("out of bounds", "warp 1 of CTA (0, 0, 0)", True)
    line = (HEADER + FRAME + body).splitlines()[event.line - 1]
    assert line == "@%p st.global.u32 [%out+4000], 1;"


def test_what_was_found_before_a_fault_is_kept() -> None:
    events = launch("st.shared.u32 [word], %t; ld.global.u32 %r9, [%out+2];", 64, check=False)[1].events
    assert [event.kind for event in events] == ["misaligned"]
    events = launch("ld.shared.u32 %r9, [word]; ld.global.u32 %r9, [%out+2];", 64, check=False)[1].events
    assert [event.kind for event in events] == ["misaligned", "uninitialised"]
    assert [event.fatal for event in events] == [True, False]


# ---- vprintf ---------------------------------------------------------------------------------------------------------


def printed(pattern: str, stores: str, n: int = 1) -> list[str]:
    data = pattern.encode() + b"\0"
    text = f"""
    .global .align 1 .b8 pattern[{len(data)}] = {{{", ".join(map(str, data))}}};
    .extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);
    .visible .entry k() {{ .reg .b32 %t, %r0; .reg .b64 %d<4>; .reg .f64 %f; .local .align 8 .b8 depot[64];
    mov.u32 %t, %tid.x; {stores} mov.u64 %d0, pattern; cvta.global.u64 %d0, %d0; mov.u64 %d1, depot;
    cvta.local.u64 %d1, %d1;
    {{ .param .b64 p0; .param .b64 p1; .param .b32 r; st.param.b64 [p0], %d0; st.param.b64 [p1], %d1;
    call.uni (r), vprintf, (p0, p1); ld.param.b32 %r0, [r]; }} ret; }}"""
    return run(text, block=(n, 1, 1)).printed


def put(kind: str, *values: object) -> str:
    """Stores values of a type side by side where vprintf looks for them."""
    size = int(kind[1:]) // 8
    move = "mov.f64 %f, {}; st.local.f64 [depot+{}], %f;" if kind == "f64" else "st.local.{2} [depot+{1}], {0};"
    return "".join(move.format(value, size * k, kind) for k, value in enumerate(values))


DOUBLES = ("0d3FF8000000000000", "0d40C81C8000000000", "0d3FD0000000000000")
MIXED = "st.local.u32 [depot], 1; st.local.s64 [depot+8], -5000000000; st.local.u64 [depot+16], 5000000000;"


@pytest.mark.parametrize(
    ("pattern", "stores", "text"),
    [
        ("plain 100%%", "", "plain 100%"),
        ("%d|%5d|%-5d|%05d|%+d", put("s32", -3, 42, 42, 42, 42), "-3|   42|42   |00042|+42"),
        ("%u %x %X %#x %o", put("u32", *[2**32 - 1] * 5), "4294967295 ffffffff FFFFFFFF 0xffffffff 37777777777"),
        ("%c%c", put("u32", 72, 105), "Hi"),
        ("%d %lld %lu", MIXED, "1 -5000000000 5000000000"),
        ("%f %.2e %g", put("f64", *DOUBLES), "1.500000 1.23e+04 0.25"),
        ("%hd %hhu %i", put("s32", -2, 200, 7), "-2 200 7"),
    ],
)
def test_formats_of_vprintf(pattern: str, stores: str, text: str) -> None:
    assert printed(pattern, stores) == [text]


def test_every_thread_prints() -> None:
    assert printed("t=%u\n", "st.local.u32 [depot], %t;", 40) == [f"t={t}\n" for t in range(40)]


# ---- schedules and determinism ---------------------------------------------------------------------------------------

MIX = """
    setp.eq.u32 %p, %t, 0; @%p mbarrier.init.shared.b64 [bar], 96; @%p fence.mbarrier_init.release.cluster;
    bar.sync 0;
    mad.lo.u32 %r1, %t, 7, %i; rem.u32 %r1, %r1, 13; L: add.u32 %r9, %r9, %r1; setp.eq.u32 %p, %r1, 0; @%p bra E;
    sub.u32 %r1, %r1, 1; bra L; E: and.b32 %r2, %t, 63; atom.shared.add.u32 %r3, [word], %r2;
    mbarrier.arrive.shared.b64 _, [bar];
    W: mbarrier.test_wait.parity.shared.b64 %q, [bar], 0; @!%q bra W; ld.shared.u32 %r4, [word];
    add.u32 %r9, %r9, %r4;
"""
MIX = MIX.replace("bar.sync 0;", "@%p st.shared.u32 [word], 0; bar.sync 0;", 1)


COUNTER = "mov.u32 %r1, %nctaid.x; mul.lo.u32 %r2, %r1, %n; mad.wide.u32 %d0, %r2, 4, %out;"
FLOAT = ".reg .f32 %f; cvt.rn.f32.u32 %f, %i; fma.rn.f32 %f, %f, 0f3DCCCCCD, 0f3F000000;"
MEETINGS = {
    "tickets": "atom.global.add.u32 %r9, [%d0], 1;",
    "generic": "atom.exch.b32 %r9, [%d0], %i;",
    "sum": f"{{ {FLOAT} red.global.add.f32 [%d0], %f; }}",
    "strong": "ld.volatile.global.u32 %r9, [%d0]; add.u32 %r9, %r9, 1; st.volatile.global.u32 [%d0], %r9;",
    "relaxed": "ld.relaxed.gpu.global.u32 %r9, [%d0]; st.relaxed.gpu.global.u32 [%d0], %i;",
    "bulk sum": f"""{{ {FLOAT} st.shared.f32 [word+8], %f; st.shared.f32 [word+12], %f; st.shared.f32 [word+16], %f;
        st.shared.f32 [word+20], %f; fence.proxy.async; setp.ne.u32 %p, %t, 0; @%p bra D;
        cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d0], [word+8], 16; cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0; D: }}""",
}
"""CTAs whose order shows in what they read, or in the last bits of a sum."""


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize(("body", "ctas"), [(MIX, 5), *((COUNTER + body, 300) for body in MEETINGS.values())])
def test_a_seed_decides_everything(body: str, ctas: int, schedule: str, seed: int) -> None:
    def once(host_threads: int) -> tuple[np.ndarray, Outcome]:
        out = np.zeros(96 * ctas + 64, np.uint32)
        options = {"grid": (ctas, 1, 1), "block": (96 if body is MIX else 32, 1, 1), "sanitize": body is MIX}
        outcome = run(FRAME + body + END, out, schedule=schedule, seed=seed, threads=host_threads, **options)
        return out, outcome

    out, outcome = once(1)
    for host_threads in (1, 3, 3, 3):
        again, same = once(host_threads)
        np.testing.assert_array_equal(again, out)
        np.testing.assert_array_equal(same.counts, outcome.counts)
        assert same.instructions == outcome.instructions


@pytest.mark.parametrize(
    ("body", "meet"),
    [
        *((COUNTER + body, True) for body in MEETINGS.values()),
        (MIX, False),
        ("ld.volatile.shared.u32 %r9, [word]; atom.shared.add.u32 %r9, [word], 1;", False),
        ("ld.global.u32 %r9, [%o]; st.global.u32 [%o+4], %r9; fence.acq_rel.gpu;", False),
        ("fence.proxy.async; cp.async.bulk.global.shared::cta.bulk_group [%out], [word+8], 16;", False),
    ],
)
def test_programs_whose_ctas_meet(body: str, meet: bool) -> None:
    """Only they cannot use several host threads."""
    assert decode(parse_kernel(HEADER + FRAME + body + END, "k"), engine.handlers()).ctas_meet == meet


SLOW_FIRST = """
    setp.ne.u32 %p, %r0, {first}; @%p bra GO; mov.u32 %r1, 0;
    S: add.u32 %r1, %r1, 1; setp.lt.u32 %p, %r1, 300000; @%p bra S; GO:
"""


def test_the_first_cta_is_named_whoever_was_faster() -> None:
    """With several host threads the other CTAs are long done when it finds the same."""
    for host_threads in (1, 4):
        finds = SLOW_FIRST.format(first=0) + "ld.shared.u32 %r9, [word];"
        events = launch(finds, 32, 9, check=False, threads=host_threads)[1].events
        assert [(event.kind, event.who) for event in events] == [("uninitialised", "warp 0 of CTA (0, 0, 0)")]
        fails = SLOW_FIRST.format(first=5) + "mov.u64 %d1, 0; setp.ge.u32 %p, %r0, 5; @%p ld.global.u32 %r9, [%d1];"
        fails += "setp.gt.u32 %p, %r0, 5; @%p ld.shared.u32 %r9, [word];"
        events = launch(fails, 32, 9, check=False, threads=host_threads)[1].events
        assert [(event.kind, event.who) for event in events] == [("out of bounds", "warp 0 of CTA (5, 0, 0)")]


def test_clocks_begin_with_the_cta() -> None:
    """Not with the host thread, which ran others before."""
    assert len(set(threads("mov.u32 %r9, %clock;", 32, 50, threads=2))) == 1


def test_seeds_give_different_schedules() -> None:
    counts = {launch(MIX, 96, 2, schedule="priority", seed=seed)[1].instructions for seed in range(8)}
    assert len(counts) > 2


@pytest.mark.parametrize("threads_", [1, 4])
def test_many_ctas_on_some_threads(threads_: int) -> None:
    result = threads("mul.lo.u32 %r9, %i, 3;", 32, 500, threads=threads_)
    np.testing.assert_array_equal(result, 3 * np.arange(16000, dtype=np.uint32))


FLAG = """
    mov.u32 %r1, %nctaid.x; mul.lo.u32 %r2, %r1, %n; mad.wide.u32 %d0, %r2, 4, %out; setp.ne.u32 %p, %t, 0; @%p bra D;
    sub.u32 %r3, %r1, 1; setp.eq.u32 %q, %r0, %r3; @%q bra LAST;
    {poll} bra D;
    LAST: st.release.gpu.global.u32 [%d0], 1;
    D: bar.sync 0; mov.u32 %r9, 5;
"""
POLLS = [
    "W: ld.global.u32 %r4, [%d0]; setp.eq.u32 %q, %r4, 0; @%q bra W;",
    "W: ld.acquire.gpu.global.u32 %r4, [%d0]; setp.eq.u32 %q, %r4, 0; @%q bra W;",
    "W: ld.volatile.global.u32 %r4, [%d0]; setp.eq.u32 %q, %r4, 0; @%q bra W;",
    "W: atom.global.acquire.gpu.or.b32 %r4, [%d0], 0; setp.eq.u32 %q, %r4, 0; @%q bra W;",
    "W: nanosleep.u32 20; ld.relaxed.gpu.global.u32 %r4, [%d0]; setp.eq.u32 %q, %r4, 0; @%q bra W;",
]


@pytest.mark.parametrize(("schedule", "seed"), BOTH)
@pytest.mark.parametrize("threads_", [1, 3])
@pytest.mark.parametrize("poll", POLLS)
def test_ctas_that_wait_for_a_later_one(poll: str, threads_: int, schedule: str, seed: int) -> None:
    options = {"sanitize": poll is not POLLS[0]}  # which is a race, and uses all threads
    result = threads(FLAG.format(poll=poll), 64, 6, schedule=schedule, seed=seed, threads=threads_, **options)
    assert (result == 5).all()


# ---- deadlock --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "seed"), BOTH)
@pytest.mark.parametrize("threads_", [1, 3])
@pytest.mark.parametrize("poll", POLLS)
def test_polling_in_vain(poll: str, threads_: int, schedule: str, seed: int) -> None:
    body = FLAG.format(poll=poll).replace("[%d0], 1;", "[%d0+4], 1;")
    options = {"sanitize": poll is not POLLS[0]}
    event = problem(body, 64, 3, schedule=schedule, seed=seed, threads=threads_, **options)
    assert event.startswith("deadlock: no CTA can go on: warp 0 of CTA (")
    assert ("repeats a loop" if poll is POLLS[0] else "polls memory") in event
    assert "waits at barrier 0 (32 of 64 threads arrived)" in event


def test_a_loop_for_ever() -> None:
    event = problem("L: bra L;", 32, 3)
    assert event.startswith("deadlock: no CTA can go on: ") and "repeats a loop that changes nothing" in event


INIT = "setp.eq.u32 %p, %t, 0; @%p mbarrier.init.shared.b64 [bar], 3; bar.sync 0;"
INIT += "@%p mbarrier.arrive.expect_tx.shared.b64 _, [bar], 16;"
TRY = "W: mbarrier.try_wait.parity.shared.b64 %q, [bar], 0; @!%q bra W;"


def test_instructions_that_change_nothing() -> None:
    """Budgets of registers, dependent launches and sleep."""
    body = """setmaxnreg.inc.sync.aligned.u32 64; setmaxnreg.dec.sync.aligned.u32 24; griddepcontrol.wait;
    nanosleep.u32 5; griddepcontrol.launch_dependents; mov.u32 %r9, 3;"""
    assert (threads(body) == 3).all()


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize(
    ("body", "parts"),
    [
        (
            INIT + TRY,
            [
                "warp 0 of CTA (0, 0, 0) at PTX line",
                "warp 1 of CTA (0, 0, 0) at PTX line",
                "waits for the mbarrier at shared+0",
                "phase 0, 2 of 3 arrivals pending, 16 bytes expected",
            ],
        ),
        (
            INIT + TRY.replace("try_wait", "test_wait"),
            [
                "warp 0 of CTA (0, 0, 0) at PTX line",
                "warp 1 of CTA (0, 0, 0) at PTX line",
                "waits for the mbarrier at shared+0",
                "phase 0, 2 of 3 arrivals pending, 16 bytes expected",
            ],
        ),
        ("setp.lt.u32 %p, %t, 32; @%p bra D; bar.sync 3, 64; D:", ["warp 1 of CTA", "waits at barrier 3 (32 of 64"]),
        (
            "setp.lt.u32 %p, %t, 32; @%p bra B; bar.sync 3, 64; bra D; B: bar.sync 4, 64; D:",
            ["waits at barrier 3 (32 of 64", "waits at barrier 4 (32 of 64"],
        ),
        (
            INIT + "setp.gt.u32 %p, %l, 8; @%p bra S;" + TRY + "S: bar.warp.sync -1;",
            ["waits for the lanes 0x000001ff of its warp", "waits for the mbarrier at shared+0"],
        ),
        (
            "setp.lt.u32 %p, %t, 32; @%p bra B; barrier.cluster.arrive; barrier.cluster.wait; B: bar.sync 5;",
            ["waits at the barrier of the cluster (32 threads arrived)", "waits at barrier 5"],
        ),
    ],
)
def test_deadlocks_are_described(body: str, parts: list[str], schedule: str, seed: int) -> None:
    event = problem(body, 64, schedule=schedule, seed=seed)
    assert event.startswith("deadlock: no warp can go on: ")
    assert [part for part in parts if part not in event] == [], event


COUNTING = """
    setp.lt.u32 %p, %t, 32; @%p bra D; mov.u32 %r1, 0; L: {look} add.u32 %r1, %r1, 1; setp.lt.u32 %q, %r1, {n};
    @%q bra L; mov.u32 %r9, %r1;
    D: bar.sync 0;
"""


@pytest.mark.parametrize("look", ["", "ld.global.u32 %r2, [%o];"])
@pytest.mark.parametrize("n", [400_000, pytest.param(70_000_000, marks=pytest.mark.slow)])
def test_a_long_computation_is_no_deadlock(n: int, look: str) -> None:
    """One warp computes for long without any effect, another waits for it."""
    for schedule, seed in BOTH:
        result = threads(COUNTING.format(n=n, look=look), 64, schedule=schedule, seed=seed, sanitize=False)
        np.testing.assert_array_equal(result, np.repeat([0, n], 32))


@pytest.mark.slow
def test_polls_that_count_how_often_end_as_well() -> None:
    """Its registers change all the time."""
    event = problem(COUNTING.format(n=0xFFFFFFFF, look="ld.volatile.global.u32 %r2, [%o];"), 64, sanitize=False)
    assert event.startswith("deadlock: no CTA can go on: ") and "polls memory" in event


# ---- limits ----------------------------------------------------------------------------------------------------------


def outcome_of(text: str, *args: object, options: Options, grid: int = 1, shared: int = 0) -> Outcome:
    program = decode(parse_kernel(HEADER + text, "k"), engine.handlers())
    params, ranges = pack(args)
    return engine.run(program, (grid, 1, 1), (32, 1, 1), (1, 1, 1), shared, params, ranges, options)


def test_too_large_for_the_time_limit() -> None:
    loop = """.visible .entry k() { .reg .pred %p; .reg .b32 %r0; mov.u32 %r0, 0; L: add.u32 %r0, %r0, 1;
    setp.lt.u32 %p, %r0, 1000000; @%p bra L; ret; }"""
    (event,) = outcome_of(loop, options=Options(sanitize=False, threads=1, time_limit=60), grid=1_000_000).events
    assert event.kind == "too large" and event.fatal
    assert (
        event.message.startswith("the grid of 1000000 clusters would take about ")
        and "the limit of 60 s" in event.message
    )


@pytest.mark.parametrize(("schedule", "seed"), BOTH)
def test_one_cta_that_takes_too_long(schedule: str, seed: int) -> None:
    loop = """.visible .entry k() { .reg .pred %p; .reg .b32 %r0; mov.u32 %r0, 0; L: add.u32 %r0, %r0, 1;
    setp.lt.u32 %p, %r0, 4000000000; @%p bra L; ret; }"""
    options = Options(schedule=schedule, seed=seed, sanitize=False, time_limit=0.5)
    (event,) = outcome_of(loop, options=options).events
    assert event.kind == "too large" and event.fatal
    assert event.message.startswith("the launch takes longer than the limit of 0.5 s: warp 0 of CTA (0, 0, 0) at PTX")
