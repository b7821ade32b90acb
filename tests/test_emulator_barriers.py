"""Barriers, mbarriers and fences of the emulator: hand-written PTX against what the PTX ISA says."""

from __future__ import annotations

import numpy as np
import pytest

from cute_ssd.emulator.decode import UnsupportedInstruction

from .ptx_runner import on_silicon, run

pytestmark = pytest.mark.silicon

SCHEDULES = [("eager", 0), ("late", 1), ("priority", 2), ("priority", 3)]

PROLOGUE = """
.visible .entry k(.param .u64 out) {
    .reg .pred %p, %q, %lane0, %first; .reg .b32 %t, %w, %l, %r<10>; .reg .b64 %o, %d<10>;
    .shared .align 8 .b64 bar[4]; .shared .align 4 .b32 data[256];
    mov.u32 %t, %tid.x; shr.u32 %w, %t, 5; and.b32 %l, %t, 31; mov.u32 %r0, %ctaid.x; mov.u32 %r1, %ntid.x;
    setp.eq.u32 %lane0, %l, 0; setp.eq.u32 %first, %t, 0;
    mad.lo.s32 %r1, %r0, %r1, %t; ld.param.u64 %o, [out]; mad.wide.u32 %o, %r1, 4, %o;
"""
STORE = " st.global.u32 [%o], %r9; ret; }"


def threads(body: str, n: int = 64, ctas: int = 1, **options: object) -> np.ndarray:
    """Runs `body` in CTAs of n threads that form one cluster; what each thread leaves in %r9 is the result."""
    out = np.zeros(n * ctas, np.uint32)
    options = {"sanitize": True, **options}
    run(PROLOGUE + body + STORE, out, block=(n, 1, 1), grid=(ctas, 1, 1), cluster=(ctas, 1, 1), **options)  # type: ignore[arg-type]
    return out


def problem(body: str, n: int = 64, ctas: int = 1, **options: object) -> str:
    """The kind and message of the first event that `body` causes."""
    out = np.zeros(n * ctas, np.uint32)
    options = {"check": False, **options}
    outcome = run(PROLOGUE + body + STORE, out, block=(n, 1, 1), grid=(ctas, 1, 1), cluster=(ctas, 1, 1), **options)  # type: ignore[arg-type]
    assert outcome.events
    return f"{outcome.events[0].kind}: {outcome.events[0].message}"


MIRROR = """
    mul.lo.u32 %r2, %t, 4; mov.u32 %r3, data; add.u32 %r2, %r2, %r3; st.shared.u32 [%r2], %t;
    {barrier}
    mov.u32 %r4, %ntid.x; sub.u32 %r4, %r4, %t; sub.u32 %r4, %r4, 1; mul.lo.u32 %r4, %r4, 4; add.u32 %r4, %r4, %r3;
    ld.shared.u32 %r9, [%r4];
"""
"""Every thread reads what its mirror image has written."""


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("n", [32, 40, 128, 200])
@pytest.mark.parametrize(
    "barrier", ["bar.sync 0;", "barrier.sync 3;", "barrier.cta.sync.aligned 15;", "mov.u32 %r5, 7; bar.cta.sync %r5;"]
)
def test_sync_of_a_cta(barrier: str, n: int, schedule: str, seed: int) -> None:
    result = threads(MIRROR.replace("{barrier}", barrier), n, schedule=schedule, seed=seed)
    np.testing.assert_array_equal(result, np.arange(n)[::-1])


@pytest.mark.parametrize("seed", range(4))
def test_missing_sync_is_found(seed: int) -> None:
    event = problem(MIRROR.replace("{barrier}", ""), 64, sanitize=True, schedule="priority", seed=seed)
    assert event.startswith(("race", "uninitialised"))


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_sync_of_some_warps(schedule: str, seed: int) -> None:
    """Two pairs of warps with a barrier each, many phases."""
    body = """
    and.b32 %r5, %w, 1; add.u32 %r5, %r5, 4; mov.u32 %r6, 0; mov.u32 %r9, 0;
    mul.lo.u32 %r2, %w, 4; mov.u32 %r3, data; add.u32 %r2, %r2, %r3; xor.b32 %r4, %w, 2; mul.lo.u32 %r4, %r4, 4;
    add.u32 %r4, %r4, %r3;
    LOOP: @%lane0 st.shared.u32 [%r2], %r6; bar.sync %r5, 64;
    ld.shared.u32 %r7, [%r4]; add.u32 %r9, %r9, %r7; bar.sync %r5, 64;
    add.u32 %r6, %r6, 1; setp.lt.u32 %p, %r6, 10; @%p bra LOOP;
    """
    assert (threads(body, 128, schedule=schedule, seed=seed) == 45).all()


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_arrive_orders_producers_before_consumers(schedule: str, seed: int) -> None:
    body = """
    mov.u32 %r3, data; mov.u32 %r9, 0; setp.ge.u32 %p, %w, 1; @%p bra CONSUMER;
    setp.eq.u32 %q, %l, 5; @%q st.shared.u32 [%r3], 99; bar.arrive 2, 64; bra DONE;
    CONSUMER: bar.sync 2, 64; ld.shared.u32 %r9, [%r3];
    DONE:
    """
    np.testing.assert_array_equal(threads(body, 64, schedule=schedule, seed=seed), [0] * 32 + [99] * 32)


def test_a_barrier_of_the_cta_does_not_wait_for_exited_threads() -> None:
    """Exits before it, exits while the others wait, and (not aligned) exits of single lanes."""
    body = """
    mov.u32 %r9, 7; setp.eq.u32 %p, %w, 1; @%p ret;
    setp.ne.u32 %p, %w, 2; @%p bra WAIT; mov.u32 %r2, 0;
    SPIN: add.u32 %r2, %r2, 1; setp.lt.u32 %p, %r2, 70000; @%p bra SPIN; ret;
    WAIT: setp.eq.u32 %p, %l, 3; @%p ret;
    barrier.sync 0;
    """
    result = threads(body, 128)
    expected = np.full(128, 7)
    expected[[*range(32, 96), 3, 99]] = 0
    np.testing.assert_array_equal(result, expected)


def test_lanes_of_a_warp_may_come_one_by_one() -> None:
    """barrier.sync without .aligned in both branches of a divergent if, and behind a guard."""
    body = """
    setp.lt.u32 %p, %l, 10; @%p bra FEW; barrier.sync 1; mov.u32 %r9, 1; bra DONE;
    FEW: barrier.sync 1; mov.u32 %r9, 2;
    DONE: @%p barrier.sync 2, 64; @!%p barrier.sync 2, 64;
    """
    np.testing.assert_array_equal(threads(body, 64), np.where(np.arange(64) % 32 < 10, 2, 1))


@pytest.mark.parametrize("aligned", ["", ".aligned"])
@pytest.mark.parametrize("n", [64, 80])
def test_votes_over_a_cta(aligned: str, n: int) -> None:
    count = f", {-(-n // 32) * 32}"
    body = f"""
    setp.lt.u32 %p, %t, 41; barrier.cta.red.popc{aligned}.u32 %r2, 0{count}, %p;
    barrier.red.popc{aligned}.u32 %r3, 1, !%p;
    setp.lt.u32 %q, %t, 1000; barrier.red.and{aligned}.pred %q, 2{count}, %q; selp.u32 %r4, 1, 0, %q;
    barrier.red.and{aligned}.pred %q, 2, %p; selp.u32 %r5, 1, 0, %q;
    setp.eq.u32 %q, %t, 63; barrier.red.or{aligned}.pred %q, 3{count}, %q; selp.u32 %r6, 1, 0, %q;
    setp.eq.u32 %q, %t, 1000; barrier.red.or{aligned}.pred %q, 3, %q; selp.u32 %r7, 1, 0, %q;
    mad.lo.u32 %r9, %r3, 1000, %r2; mad.lo.u32 %r8, %r4, 8, 0; mad.lo.u32 %r8, %r5, 4, %r8; mad.lo.u32 %r8, %r6, 2, %r8;
    add.u32 %r8, %r8, %r7; mad.lo.u32 %r9, %r8, 1000000, %r9;
    """
    assert (threads(body, n) == 10_000_000 + (n - 41) * 1000 + 41).all()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("bar.sync 16;", "barrier: barrier 16: a CTA has the barriers 0 to 15"),
        ("bar.sync 1, 33;", "barrier: barrier 1 for 33 threads"),
        ("bar.sync 1, 96;", "barrier: barrier 1 for 96 threads in a CTA of 64"),
        ("bar.sync 1, 0;", "barrier: barrier 1 for 0 threads"),
        (
            "setp.eq.u32 %p, %w, 1; @%p bra B; bar.arrive 1, 64; bra D; B: bar.sync 1, 32; D:",
            "barrier: barrier 1 for 32 threads, but who came first expects 64",
        ),
        ("setp.eq.u32 %p, %w, 0; @%p bra D; bar.sync 1, 64; D:", "deadlock: no warp can go on: warp 1"),
        ("@%lane0 bar.sync 0;", "divergent barrier: only some lanes"),
        ("setp.lt.u32 %p, %l, 9; @%p bra B; barrier.sync 1, 32; B: @%first barrier.sync 1, 32;", "barrier: "),
        ("@%first bra B; bar.sync 0; bra D; B: bar.sync 0; D:", "deadlock: "),
        (
            "setp.eq.u32 %p, %w, 1; @%p bra B; barrier.red.popc.u32 %r2, 1, 64, %p; bra D; B: bar.sync 1, 64; D:",
            "barrier: barrier.red and barrier.sync meet at barrier 1",
        ),
    ],
)
def test_misuse_of_named_barriers(body: str, message: str) -> None:
    assert problem("mov.u32 %r9, 0;" + body).startswith(message)


# ---- clusters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("suffix", ["", ".aligned"])
def test_cluster_barrier(suffix: str, schedule: str, seed: int) -> None:
    """Every CTA reads what the next one wrote, five times over."""
    body = f"""
    mov.u32 %r3, data; mul.lo.u32 %r2, %t, 4; add.u32 %r2, %r2, %r3; mov.u32 %r4, %cluster_ctarank;
    add.u32 %r5, %r4, 1; rem.u32 %r5, %r5, 3;
    mapa.shared::cluster.u32 %r5, %r2, %r5; mov.u32 %r9, 0; mov.u32 %r6, 0;
    LOOP: mad.lo.u32 %r7, %r4, 100, %r6; st.shared.u32 [%r2], %r7;
    barrier.cluster.arrive{suffix}; barrier.cluster.wait{suffix};
    ld.shared::cluster.u32 %r7, [%r5]; add.u32 %r9, %r9, %r7;
    barrier.cluster.arrive.release{suffix}; barrier.cluster.wait.acquire{suffix};
    add.u32 %r6, %r6, 1; setp.lt.u32 %p, %r6, 5; @%p bra LOOP;
    """
    expected = np.repeat([510, 1010, 10], 64)
    np.testing.assert_array_equal(threads(body, 64, 3, schedule=schedule, seed=seed), expected)


def test_cluster_barrier_does_not_wait_for_exited_threads() -> None:
    body = """
    mov.u32 %r9, 1; setp.eq.u32 %p, %r0, 1; @%p ret; setp.eq.u32 %p, %t, 3; @%p ret;
    setp.eq.u32 %p, %w, 1; @%p barrier.cluster.arrive.relaxed; @%p ret;
    barrier.cluster.arrive; barrier.cluster.wait;
    """
    expected = np.zeros(128)
    expected[:32] = 1
    expected[3] = 0
    np.testing.assert_array_equal(threads(body, 64, 2), expected)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("barrier.cluster.wait;", "barrier: waits at the barrier of the cluster without having arrived"),
        ("barrier.cluster.arrive; barrier.cluster.arrive;", "barrier: arrives twice"),
        (
            "setp.ne.u32 %p, %r0, 0; @%p bra HANG; barrier.cluster.arrive; barrier.cluster.wait; bra DONE;"
            "HANG: setp.eq.u32 %q, %w, 0; @%q bar.sync 1, 64; DONE:",
            "deadlock: ",
        ),
        ("@%lane0 barrier.cluster.arrive.aligned;", "divergent barrier"),
    ],
)
def test_misuse_of_the_cluster_barrier(body: str, message: str) -> None:
    assert problem("mov.u32 %r9, 0;" + body, ctas=2).startswith(message)


# ---- mbarriers -------------------------------------------------------------------------------------------------------


def with_mbarrier(count: int, body: str) -> str:
    """`body` after an mbarrier of `count` arrivals has been initialised and all threads know it; "
    "its address is in %r8."""
    return f"mov.u32 %r8, bar; mov.u32 %r9, 0; @%first mbarrier.init.shared.b64 [%r8], {count}; bar.sync 0;" + body


WAIT = "W{n}: mbarrier.try_wait.parity.shared::cta.b64 %q, [%r8], {parity}; @!%q bra W{n};"


def wait(parity: int, n: int = 0) -> str:
    return WAIT.format(n=n, parity=parity)


NEXT_WARP = """
    mul.lo.u32 %r2, %t, 4; mov.u32 %r3, data; add.u32 %r2, %r2, %r3; st.shared.u32 [%r2], %t; bar.warp.sync -1;
    {barrier}
    mov.u32 %r4, %ntid.x; add.u32 %r2, %t, 32; rem.u32 %r4, %r2, %r4; mul.lo.u32 %r4, %r4, 4; add.u32 %r4, %r4, %r3;
    ld.shared.u32 %r9, [%r4];
"""
"""Every thread reads what the same lane of the next warp has written."""


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize(
    ("count", "arrive"),
    [
        (96, "mbarrier.arrive.shared.b64 _, [%r8];"),
        (96, "mbarrier.arrive.release.cta.shared::cta.b64 %d1, [%r8];"),
        (3, "@%lane0 mbarrier.arrive.shared.b64 _, [%r8];"),
        (21, "@%lane0 mbarrier.arrive.shared.b64 %d1, [%r8], 7;"),
        (6, "add.u32 %r5, %w, 1; @%lane0 mbarrier.arrive.shared::cluster.b64 _, [%r8], %r5;"),
        (96, "cvta.shared.u64 %d1, bar; mbarrier.arrive.b64 _, [%d1];"),
    ],
)
def test_arrivals_order_memory(count: int, arrive: str, schedule: str, seed: int) -> None:
    body = NEXT_WARP.replace("{barrier}", arrive + wait(0))
    result = threads(with_mbarrier(count, body), 96, schedule=schedule, seed=seed)
    np.testing.assert_array_equal(result, (np.arange(96) + 32) % 96)


def test_a_relaxed_arrival_orders_nothing() -> None:
    body = NEXT_WARP.replace("{barrier}", "mbarrier.arrive.relaxed.cta.shared.b64 _, [%r8];" + wait(0))
    assert "race" in problem(with_mbarrier(64, body), sanitize=True)


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_a_ring_of_two_mbarriers(schedule: str, seed: int) -> None:
    """A producer warp and a consumer warp, 20 items through one slot."""
    body = """
    mov.u32 %r8, bar; mov.u32 %r2, data; mov.u32 %r9, 0; mov.u32 %r3, 0;
    @%first mbarrier.init.shared.b64 [%r8], 1; @%first mbarrier.init.shared.b64 [%r8+8], 32; bar.sync 0;
    setp.eq.u32 %p, %w, 1; @%p bra CONSUMER;
    P: and.b32 %r4, %r3, 1; xor.b32 %r4, %r4, 1;
    PW: mbarrier.try_wait.parity.shared.b64 %q, [%r8+8], %r4, 1000; @!%q bra PW;
    setp.eq.u32 %p, %l, 0; @%p st.shared.u32 [%r2], %r3; @%p mbarrier.arrive.shared.b64 _, [%r8];
    add.u32 %r3, %r3, 1; setp.lt.u32 %p, %r3, 20; @%p bra P; bra DONE;
    CONSUMER: and.b32 %r4, %r3, 1;
    CW: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %q, [%r8], %r4; @!%q bra CW;
    ld.shared.u32 %r5, [%r2]; mad.lo.u32 %r9, %r9, 3, %r5; mbarrier.arrive.shared.b64 _, [%r8+8];
    add.u32 %r3, %r3, 1; setp.lt.u32 %p, %r3, 20; @%p bra CONSUMER;
    DONE:
    """
    expected = 0
    for item in range(20):
        expected = (expected * 3 + item) % 2**32
    np.testing.assert_array_equal(threads(body, schedule=schedule, seed=seed), [0] * 32 + [expected] * 32)


def test_state_and_pending_count() -> None:
    """noComplete gives the pending count before it; the state tells the phase."""
    body = """
    @!%first bra DONE;
    mbarrier.arrive.noComplete.shared.b64 %d1, [%r8], 2; mbarrier.pending_count.b64 %r2, %d1;
    mbarrier.arrive.noComplete.release.cta.shared::cta.b64 %d1, [%r8], 1; mbarrier.pending_count.b64 %r3, %d1;
    mbarrier.test_wait.shared.b64 %p, [%r8], %d1; selp.u32 %r4, 1, 0, %p;
    mbarrier.arrive.shared.b64 %d2, [%r8], 2;
    mbarrier.test_wait.acquire.cta.shared::cta.b64 %p, [%r8], %d2; selp.u32 %r5, 1, 0, %p;
    mbarrier.try_wait.shared::cta.b64 %p, [%r8], %d1, 0; selp.u32 %r6, 1, 0, %p;
    mbarrier.test_wait.parity.shared.b64 %p, [%r8], 1; selp.u32 %r7, 1, 0, %p;
    mul.lo.u32 %r9, %r2, 100000; mad.lo.u32 %r9, %r3, 10000, %r9; mad.lo.u32 %r9, %r4, 1000, %r9;
    mad.lo.u32 %r9, %r5, 100, %r9;
    mad.lo.u32 %r9, %r6, 10, %r9; add.u32 %r9, %r9, %r7;
    DONE:
    """
    assert threads(with_mbarrier(5, body))[0] == 530110


def test_transactions_hold_the_phase() -> None:
    body = f"""
    @!%first bra OTHERS;
    mbarrier.arrive.expect_tx.shared.b64 %d1, [%r8], 64; mbarrier.test_wait.shared.b64 %p, [%r8], %d1;
    selp.u32 %r9, 1, 0, %p;
    mbarrier.expect_tx.relaxed.cta.shared.b64 [%r8], 16; mbarrier.complete_tx.shared.b64 [%r8], 64;
    mbarrier.test_wait.shared.b64 %p, [%r8], %d1; selp.u32 %r2, 10, 0, %p; add.u32 %r9, %r9, %r2;
    mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r8], 16;
    mbarrier.test_wait.shared.b64 %p, [%r8], %d1; selp.u32 %r2, 100, 0, %p; add.u32 %r9, %r9, %r2;
    OTHERS: {wait(0)}
    """
    assert threads(with_mbarrier(1, body))[0] == 100


def test_dropping_out() -> None:
    """arrive_drop counts as an arrival and lowers the count of later phases, down to none."""
    body = f"""
    setp.eq.u32 %p, %w, 1; @%p mbarrier.arrive_drop.shared.b64 _, [%r8]; setp.eq.u32 %p, %w, 0;
    @%p mbarrier.arrive.shared.b64 _, [%r8]; {wait(0, 0)} bar.sync 0; @!%p bra DONE;
    mbarrier.arrive.shared.b64 _, [%r8]; {wait(1, 1)}
    mbarrier.arrive_drop.release.cta.shared::cta.b64 %d1, [%r8], 1; {wait(0, 2)} mov.u32 %r9, 5;
    DONE:
    """
    np.testing.assert_array_equal(threads(with_mbarrier(64, body)), [5] * 32 + [0] * 32)


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_remote_arrivals(schedule: str, seed: int) -> None:
    """Rank 0 waits for the threads of all three CTAs."""
    body = """
    mov.u32 %r8, bar; mov.u32 %r9, 0; mov.u32 %r2, %cluster_ctarank;
    @%first mbarrier.init.shared.b64 [%r8], 97; @%first fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive; barrier.cluster.wait;
    mapa.shared::cluster.u32 %r3, %r8, 0; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r3];
    setp.eq.u32 %p, %r2, 1; @%p bra ONE; setp.ne.u32 %p, %r2, 0; @%p bra DONE;
    @%first mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 8;
    W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %q, [%r8], 0; @!%q bra W; mov.u32 %r9, 1;
    bra DONE;
    ONE: @%first mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%r3], 8;
    DONE: barrier.cluster.arrive; barrier.cluster.wait;
    """
    np.testing.assert_array_equal(threads(body, 32, 3, schedule=schedule, seed=seed), [1] * 32 + [0] * 64)


def test_lanes_wait_for_different_phases() -> None:
    """One instruction, two mbarriers and both parities: each lane gets its own answer."""
    body = """
    @%first mbarrier.init.shared.b64 [%r8+8], 1; bar.sync 0; @%first mbarrier.arrive.shared.b64 _, [%r8+8]; bar.sync 0;
    and.b32 %r2, %l, 1; mad.lo.u32 %r3, %r2, 8, %r8; shr.u32 %r4, %l, 1; and.b32 %r4, %r4, 1;
    mbarrier.test_wait.parity.shared.b64 %p, [%r3], %r4; selp.u32 %r5, 1, 0, %p;
    mbarrier.try_wait.parity.shared.b64 %p, [%r3], %r4; selp.u32 %r6, 2, 0, %p; add.u32 %r9, %r5, %r6;
    """
    lane = np.arange(32)
    complete = (lane & 1) != (lane >> 1 & 1)
    np.testing.assert_array_equal(threads(with_mbarrier(1, body), 32), complete * 3)


def test_polls_time_out() -> None:
    """A try_wait that nobody answers returns false at last, and the thread does something else."""
    body = """
    L: mbarrier.try_wait.parity.shared.b64 %p, [%r8], 0; @%p bra DONE;
    add.u32 %r9, %r9, 1; setp.eq.u32 %p, %r9, 3; @%p mbarrier.arrive.shared.b64 _, [%r8]; bra L;
    DONE:
    """
    polls = threads(with_mbarrier(32, body), 32)
    assert (polls >= 3).all() and (on_silicon() or (polls == 3).all())  # there lanes need not go together


def test_reuse_of_memory() -> None:
    body = f"""
    @!%first bra DONE; mbarrier.arrive.shared.b64 _, [%r8]; {wait(0)} mbarrier.inval.shared.b64 [%r8];
    mbarrier.init.shared.b64 [%r8], 2; mbarrier.arrive.shared.b64 _, [%r8], 2; {wait(0, 1)}
    mbarrier.init.shared.b64 [%r8], 1; mbarrier.arrive.shared.b64 _, [%r8]; {wait(0, 2)} mov.u32 %r9, 1;
    DONE:
    """
    assert threads(with_mbarrier(1, body))[0] == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "mbarrier.arrive.shared.b64 _, [%r8+8];",
            "mbarrier: the mbarrier at shared+8 of CTA rank 0 is not initialised",
        ),
        ("mbarrier.inval.shared.b64 [%r8]; mbarrier.arrive.shared.b64 _, [%r8];", "mbarrier: the mbarrier at shared+0"),
        ("mbarrier.arrive.shared.b64 _, [%r8], 3;", "over-arrival: "),
        ("mbarrier.arrive.shared.b64 _, [%r8], 0;", "mbarrier: 0 arrivals"),
        ("mbarrier.init.shared.b64 [%r8+8], 0;", "mbarrier: the mbarrier at shared+8 of CTA rank 0 gets the count 0"),
        (
            "mbarrier.init.shared.b64 [%r8+8], 1048576;",
            "mbarrier: the mbarrier at shared+8 of CTA rank 0 gets the count 1048576",
        ),
        ("mbarrier.init.shared.b64 [%r8+4], 1;", "misaligned: "),
        (
            "mbarrier.arrive.shared.b64 _, [%r8]; mbarrier.init.shared.b64 [%r8], 2;",
            "mbarrier: the mbarrier at shared+0 of CTA rank 0, ",
        ),
        (
            "mbarrier.arrive.shared.b64 _, [%r8]; mbarrier.inval.shared.b64 [%r8];",
            "mbarrier: the mbarrier at shared+0 of CTA rank 0 is invalidated",
        ),
        ("mbarrier.arrive.noComplete.shared.b64 %d1, [%r8], 2;", "mbarrier: arrive.noComplete completes phase 0"),
        ("mbarrier.expect_tx.relaxed.cta.shared.b64 [%r8], 1048576;", "transaction count: "),
        (
            "mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 8; mbarrier.complete_tx.shared.b64 [%r8], 16; "
            "mbarrier.arrive.shared.b64 _, [%r8];",
            "transaction count: the mbarrier at shared+0 of CTA rank 0 got 8 bytes more",
        ),
        (
            "L: mbarrier.try_wait.parity.shared.b64 %p, [%r8], 0; @!%p bra L;",
            "deadlock: no warp can go on: warp 0 of CTA (0, 0, 0) at PTX line",
        ),
        ("L: mbarrier.test_wait.parity.shared.b64 %p, [%r8], 0; @!%p bra L;", "deadlock: "),
        ("mbarrier.test_wait.parity.shared.b64 %p, [%r8], 2;", "mbarrier: the phase parity is 2"),
        ("mov.b64 %d1, 7; mbarrier.test_wait.shared.b64 %p, [%r8], %d1;", "mbarrier: waits for phase 7"),
        ("or.b32 %r8, %r8, 0x1000000; mbarrier.arrive.shared.b64 _, [%r8];", "shared address: "),
        ("or.b32 %r8, %r8, 0x1000000; mbarrier.arrive.shared::cluster.b64 _, [%r8];", "shared address: "),
        ("mov.u64 %d1, 4096; mbarrier.arrive.b64 _, [%d1];", "shared address: generic address 0x1000 does not"),
    ],
)
def test_misuse_of_mbarriers(body: str, message: str) -> None:
    assert problem(with_mbarrier(2, f"@!%first bra DONE; {body} DONE:")).startswith(message)


def test_initialisation_must_be_ordered() -> None:
    body = "mov.u32 %r8, bar; @%first mbarrier.init.shared.b64 [%r8], 64; mbarrier.arrive.shared.b64 _, [%r8];"
    assert "initialisation" in problem("mov.u32 %r9, 0;" + body, sanitize=True)


# ---- fences and what is refused --------------------------------------------------------------------------------------

FENCES = [
    "fence.acq_rel.cta",
    "fence.sc.gpu",
    "fence.acquire.cluster",
    "fence.release.sys",
    "fence.gpu",
    "membar.cta",
    "membar.gl",
    "membar.sys",
    "fence.proxy.async",
    "fence.proxy.async.shared::cta",
    "fence.proxy.async.shared::cluster",
    "fence.proxy.async.global",
    "fence.proxy.alias",
    "membar.proxy.alias",
    "fence.mbarrier_init.release.cluster",
    "fence.proxy.tensormap::generic.release.gpu",
    "fence.proxy.tensormap::generic.acquire.gpu [%o], 128",
    "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster",
    "fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster",
    "fence.acquire.sync_restrict::shared::cluster.cluster",
    "fence.release.sync_restrict::shared::cta.cluster",
]


def test_fences() -> None:
    assert (threads("mov.u32 %r9, 3;" + "".join(f"{fence};" for fence in FENCES)) == 3).all()


@pytest.mark.parametrize(
    "text",
    [
        "bar.sync.relaxed 0;",
        "bar.arrive 0;",
        "bar.red.xor.pred %p, 0, %q;",
        "barrier.cluster.wait.relaxed;",
        "barrier.cluster.arrive.acquire;",
        "fence;",
        "fence.acq_rel.warp;",
        "fence.proxy.texture;",
        "membar.gpu;",
        "mbarrier.init.shared::cluster.b64 [%r8], 1;",
        "mbarrier.init.shared.b32 [%r8], 1;",
        "mbarrier.arrive.acquire.cta.shared.b64 _, [%r8];",
        "mbarrier.arrive.shared::cluster.b64 %d1, [%r8];",
        "mbarrier.arrive.release.gpu.shared.b64 _, [%r8];",
        "mbarrier.try_wait.parity.shared::cluster.b64 %p, [%r8], 0;",
        "mbarrier.test_wait.parity.shared.b64 %p, [%r8], 0, 100;",
        "mbarrier.arrive.expect_tx.shared.b64 _, [%r8];",
        "mbarrier.arrive.b64 _, [%r8];",
    ],
)
def test_refused(text: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        threads(text)
