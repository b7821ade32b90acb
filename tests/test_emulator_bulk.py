"""Bulk copies of the emulator that need no tensor map: hand-written PTX against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from cute_ssd.emulator.decode import UnsupportedInstruction

from .bulk_copies import DRAIN, ELEMENTS, SCHEDULES, SHARED_TO_GLOBAL, WAIT, aligned, numbers, reference, run_bulk

pytestmark = pytest.mark.silicon


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("space", ["shared::cta", "shared::cluster"])
def test_there_and_back(space: str, schedule: str, seed: int) -> None:
    """Every lane copies 32 bytes of its own into shared memory, one lane copies all of them out again."""
    source, out = aligned(np.arange(256, dtype=np.uint32)), aligned(np.zeros(256, np.uint32))
    body = f"""
    @%first mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 1024; mul.lo.u32 %r0, %t, 32; mul.wide.u32 %d2, %t, 32;
    xor.b32 %r0, %r0, 32;
    add.u32 %r0, %r0, %r7; add.s64 %d2, %d2, %d0;
    cp.async.bulk.{space}.global.mbarrier::complete_tx::bytes.L2::cache_hint [%r0], [%d2], 32, [%r8], %policy;
    {WAIT} @%first {SHARED_TO_GLOBAL} [%d1], [%r7], 1024; {DRAIN}
    """
    run_bulk(body, source, out, schedule=schedule, seed=seed)
    np.testing.assert_array_equal(out.reshape(-1, 2, 8)[:, ::-1].reshape(-1), source)


REDUCTIONS = [
    *[("u32", "u32", op) for op in ("add", "min", "max", "inc", "dec")],
    *[("u32", "b32", op) for op in ("and", "or", "xor")],
    *[("s32", "s32", op) for op in ("add", "min", "max")], *[("u64", "u64", op) for op in ("add", "min", "max")],
    *[("s64", "s64", op) for op in ("min", "max")], *[("u64", "b64", op) for op in ("and", "or", "xor")],
    ("f32", "f32", "add"), ("f64", "f64", "add"), ("f16", "noftz.f16", "add"), ("bf16", "noftz.bf16", "add"),
    *[(t, t, op) for t in ("f16", "bf16") for op in ("min", "max")],
]  # fmt: skip


@pytest.mark.parametrize(("element", "name", "op"), REDUCTIONS)
def test_plain_reductions(element: str, name: str, op: str) -> None:
    n = 256 // np.dtype(ELEMENTS[element][0]).itemsize
    source, out = aligned(numbers(element, (n,), 3)), aligned(numbers(element, (n,), 4))
    expected = reference(op, element, out, source)
    body = f"""
    @%first mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 256;
    @%first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r7], [%d0], 256, [%r8];
    {WAIT} @%first cp.reduce.async.bulk.global.shared::cta.bulk_group.{op}.{name} [%d1], [%r7], 256; {DRAIN}
    """
    run_bulk(body, source, out)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("reduce", [False, True])
def test_between_the_ctas_of_a_cluster(reduce: bool, schedule: str, seed: int) -> None:
    """Each CTA sends its data to the next one, whose mbarrier counts the bytes."""
    source, out = aligned(np.arange(96, dtype=np.uint32).reshape(3, 32) + 7), aligned(np.zeros((3, 32), np.uint32))
    name = "cp.reduce.async.bulk" if reduce else "cp.async.bulk"
    body = f"""
    mul.wide.u32 %d2, %rank, 128; add.s64 %d0, %d0, %d2; add.s64 %d1, %d1, %d2; mul.wide.u32 %d2, %t, 4;
    add.s64 %d0, %d0, %d2;
    ld.global.u32 %r0, [%d0]; mad.lo.u32 %r1, %t, 4, %r7; st.shared.u32 [%r1], %r0; st.shared.u32 [%r1+128], %t;
    fence.proxy.async;
    @%first mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 128; barrier.cluster.arrive; barrier.cluster.wait;
    add.u32 %r2, %rank, 1; rem.u32 %r2, %r2, 3; mapa.shared::cluster.u32 %r3, %r7, %r2;
    mapa.shared::cluster.u32 %r4, %r8, %r2;
    @%first {name}.shared::cluster.shared::cta.mbarrier::complete_tx::bytes{".add.u32" if reduce else ""}
        [%r3+128], [%r7], 128, [%r4];
    {WAIT} add.u32 %r5, %r7, 128; @%first {SHARED_TO_GLOBAL} [%d1], [%r5], 128; {DRAIN} barrier.cluster.arrive;
    barrier.cluster.wait;
    """
    run_bulk(body, source, out, ctas=3, schedule=schedule, seed=seed)
    np.testing.assert_array_equal(out, np.roll(source, 1, axis=0) + (np.arange(32, dtype=np.uint32) if reduce else 0))


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_multicast_of_bytes(schedule: str, seed: int) -> None:
    source, out = aligned(np.arange(64, dtype=np.uint32)), aligned(np.zeros((4, 64), np.uint32))
    body = f"""
    mul.wide.u32 %d2, %rank, 256; add.s64 %d1, %d1, %d2; setp.eq.u32 %p, %rank, 1; mov.u16 %mask, 13;
    selp.u32 %r6, 0, 256, %p;
    @%first mbarrier.arrive.expect_tx.shared.b64 _, [%r8], %r6; barrier.cluster.arrive; barrier.cluster.wait;
    @%p bra SEND;
    {WAIT} @%first {SHARED_TO_GLOBAL} [%d1], [%r7], 256; {DRAIN} bra DONE;
    SEND: @%first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
        [%r7], [%d0], 256, [%r8], %mask;
    DONE: barrier.cluster.arrive; barrier.cluster.wait;
    """
    run_bulk(body, source, out, ctas=4, schedule=schedule, seed=seed)
    np.testing.assert_array_equal(out, source * np.array([[1], [0], [1], [1]], np.uint32))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (f"@%first {SHARED_TO_GLOBAL} [%d0], [%r7], 24;", "misaligned: a bulk copy of 24 bytes"),
        (f"@%first {SHARED_TO_GLOBAL} [%d0+8], [%r7], 16;", "misaligned: the destination of a bulk copy"),
        (f"@%first {SHARED_TO_GLOBAL} [%d0], [%r7+8], 16;", "misaligned: shared+8"),
        (f"@%first {SHARED_TO_GLOBAL} [%d0+1008], [%r7], 32;", "out of bounds: the destination of a bulk copy"),
        (
            "@%first cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r7], [%d0], 2064, [%r8];",
            "out of bounds: ",
        ),
        (
            "mapa.shared::cluster.u32 %r0, %r7, 1; "
            "@%first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r0], [%d0], 16, [%r8];",
            "mbarrier: the copy goes to CTA rank 1, its mbarrier is in rank 0",
        ),
        (
            "mapa.shared::cluster.u32 %r0, %r7, 1; "
            "@%first cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r0], 16;",
            "shared address: ",
        ),
    ],
)
def test_misuse_of_bulk_copies(body: str, message: str) -> None:
    data = aligned(np.zeros(1024, np.uint8))
    outcome = run_bulk(
        "setp.ne.u32 %p, %rank, 0; @%p bra DONE;" + body + "DONE:", data, ctas=2, check=False, sanitize=False
    )
    assert f"{outcome.events[0].kind}: {outcome.events[0].message}".startswith(message)


def test_sanitizer_sees_bulk_copies() -> None:
    """A store without a proxy fence, a buffer overwritten before the store read it, a load used before its mbarrier."""
    data, out = aligned(np.zeros(1024, np.uint8)), aligned(np.zeros(1024, np.uint8))
    write = "mad.lo.u32 %r0, %t, 4, %r7; st.shared.u32 [%r0], %t;"
    send = f"bar.sync 0; @%first {SHARED_TO_GLOBAL} [%d1], [%r7], 128; cp.async.bulk.commit_group;"
    drain = "cp.async.bulk.wait_group.read 0;"
    load = (
        "@%first mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 128; "
        "@%first cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r7], [%d0], 128, [%r8];"
    )
    kernels = {
        "": write + "fence.proxy.async;" + send + drain + "bar.sync 0;" + write,
        "missing proxy fence": write + send + drain,
        "race": write + "fence.proxy.async;" + send + write + drain,
        "race ": load + "mad.lo.u32 %r0, %t, 4, %r7; ld.shared.u32 %r1, [%r0];" + WAIT,
    }
    for kind, kernel in kernels.items():
        events = run_bulk(kernel, data, out, check=False).events
        assert [event.kind for event in events][:1] == ([kind.strip()] if kind else []), (kind, events)


@pytest.mark.parametrize(
    "text",
    [
        "cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%d0], [%r7], 16, %mask;",
        "cp.async.bulk.global.global.bulk_group [%d0], [%d0], 16;",
        "cp.async.bulk.shared::cta.shared::cta.mbarrier::complete_tx::bytes [%r7], [%r7], 16, [%r8];",
        "cp.async.bulk.shared::cta.global.bulk_group [%r7], [%d0], 16, [%r8];",
        "cp.async.bulk.global.shared::cta.bulk_group.L2::evict_last [%d0], [%r7], 16;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f16 [%d0], [%r7], 16;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.max.f32 [%d0], [%r7], 16;",
        "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.f32 [%r7], [%r7], "
        "16, [%r8];",
        "cp.async.bulk.wait_group.read %r0;",
        "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes [%r7], [%d0, "
        "{%r0, %r0, %r0, %r0, %r0}], [%r8];",
        "cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%r7], [%d0, {%r0, "
        "%r0, %r0}], [%r8], {%mask};",
        "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r7], [%d0, {%r0}], [%r8];",
        "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r7], [%d0, {%r0, %r0}], "
        "[%r8], %policy;",
        "tensormap.replace.tile.fill_mode.global.b1024.b32 [%d0], 1;",
        "tensormap.replace.tile.global_dim.global.b1024.b32 [%d0], 5, %r0;",
        "tensormap.replace.im2col.rank.global.b1024.b32 [%d0], 1;",
    ],
)
def test_refused(text: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        run_bulk(text, np.zeros(16, np.uint8))


def test_prefetches_do_nothing() -> None:
    data = aligned(np.zeros(1024, np.uint8))
    run_bulk(
        "cp.async.bulk.prefetch.L2.global [%d0], 64; "
        "cp.async.bulk.prefetch.L2.global.L2::cache_hint [%d0], 64, %policy;"
        "mov.u32 %r0, 0; cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%d0, {%r0, %r0}];",
        data,
    )
