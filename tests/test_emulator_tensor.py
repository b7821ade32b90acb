"""tcgen05 without its product: allocation, ld and st, cp, what is reported and what is refused."""

import numpy as np
import pytest

from cute_ssd.emulator.decode import UnsupportedInstruction
from tests import ptx_runner
from tests.tensor_images import (
    B_START,
    K_LAYOUTS,
    LANE,
    SETUP,
    WAIT,
    Images,
    Layout,
    instruction_descriptor,
    mma,
    shifted,
    single,
)

pytestmark = pytest.mark.silicon

# ---- ld and st -------------------------------------------------------------------------------------------------------

REGISTERS = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}


def place(shape: str, i: int, half: int) -> tuple[np.ndarray, np.ndarray]:
    """Lane (relative) and column of register i of the 32 threads."""
    t = LANE
    return {
        "32x32b": (t, np.full(32, i)),
        "16x64b": (t // 4 + 8 * (t % 2), t // 2 % 2 + 2 * i),
        "16x128b": (t // 4 + 8 * (i % 2), t % 4 + 4 * (i // 2)),
        "16x256b": (t // 4 + 8 * (i // 2 % 2), 2 * (t % 4) + i % 2 + 8 * (i // 4)),
        "16x32bx2": (t % 16, t // 16 * half + i),
    }[shape]


CASES = [("32x32b", x) for x in (1, 2, 4, 8, 16, 32, 64, 128)] + [("16x64b", x) for x in (1, 8, 128)]
CASES += [("16x128b", x) for x in (1, 2, 16, 64)] + [("16x256b", x) for x in (1, 4, 16, 32)]
CASES += [("16x32bx2", x) for x in (1, 4, 64)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("shape", "repetitions"), CASES)
def test_load(shape: str, repetitions: int, packed: bool) -> None:
    n = REGISTERS[shape] * repetitions
    half, upper = (200, 16) if shape != "32x32b" else (0, 0)
    column = 0 if repetitions * REGISTERS[shape] == 128 else 7
    operands = "{" + ", ".join(f"%r{k}" for k in range(n)) + "}"
    second = f", {half}" if shape == "16x32bx2" else ""
    body = f"""add.u32 %x5, %wt, {upper << 16}; ld.param.u64 %out, [extra]; mad.wide.u32 %out, %t, {4 * n}, %out;
    tcgen05.ld.sync.aligned.{shape}.x{repetitions}{".pack::16b" * packed}.b32 {operands}, [%x5+{column}]{second};
    tcgen05.wait::ld.sync.aligned;
    """ + "".join(f"st.global.b32 [%out+{4 * k}], %r{k};\n" for k in range(n))
    images = Images()
    out = np.zeros((4, 32, n), np.uint32)
    after = images.run(body, extra=out, registers=n, sanitize=repetitions == 4)
    np.testing.assert_array_equal(after, images.tmem)
    for i in range(n):
        lane, c = place(shape, i, half // 2 if packed else half)
        for warp in range(4):
            rows = images.tmem[0, 32 * warp + upper + lane]
            if packed:
                low, high = (rows[LANE, column + 2 * c + k] for k in range(2))
                expected = low & 0xFFFF | high << 16
            else:
                expected = rows[LANE, column + c]
            np.testing.assert_array_equal(out[warp, :, i], expected)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("shape", "repetitions"), CASES)
def test_store(shape: str, repetitions: int, packed: bool) -> None:
    n = REGISTERS[shape] * repetitions
    half, upper = (202, 16) if shape != "32x32b" else (0, 0)
    column = 0 if repetitions * REGISTERS[shape] == 128 else 5
    operands = "{" + ", ".join(f"%r{k}" for k in range(n)) + "}"
    second = f", {half}" if shape == "16x32bx2" else ""
    body = f"add.u32 %x5, %wt, {upper << 16 | column};"
    body += f"ld.param.u64 %out, [extra]; mad.wide.u32 %out, %t, {4 * n}, %out;\n"
    body += "".join(f"ld.global.b32 %r{k}, [%out+{4 * k}];\n" for k in range(n))
    body += f"""
    tcgen05.st.sync.aligned.{shape}.x{repetitions}{".unpack::16b" * packed}.b32 [%x5]{second}, {operands};
    tcgen05.wait::st.sync.aligned;"""
    images = Images()
    values = np.random.default_rng(1).integers(0, 2**32, (4, 32, n), dtype=np.uint32)
    late = "late" if repetitions in (1, 16) else "eager"
    after = images.run(body, extra=values, registers=n, sanitize=repetitions == 4, schedule=late)
    expected = images.tmem.copy()
    for i in range(n):
        lane, c = place(shape, i, half // 2 if packed else half)
        for warp in range(4):
            rows = expected[0, 32 * warp + upper : 32 * warp + upper + 32]
            if packed:
                rows[lane, column + 2 * c] = values[warp, :, i] & 0xFFFF
                rows[lane, column + 2 * c + 1] = values[warp, :, i] >> 16
            else:
                rows[lane, column + c] = values[warp, :, i]
    np.testing.assert_array_equal(after, expected)


# ---- cp --------------------------------------------------------------------------------------------------------------

COPIES = [
    ("128x256b", "", 128, 8),
    ("4x256b", "", 4, 8),
    ("128x128b", "", 128, 4),
    ("64x128b", ".warpx2::02_13", 64, 4),
]
COPIES += [("64x128b", ".warpx2::01_23", 64, 4), ("32x128b", ".warpx4", 32, 4)]


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(("shape", "multicast", "rows", "columns"), COPIES)
@pytest.mark.parametrize("layout", [K_LAYOUTS[1], K_LAYOUTS[4]], ids=str)
def test_copy(shape: str, multicast: str, rows: int, columns: int, layout: Layout, group: int) -> None:
    images = Images(ctas=group)
    text = f"tcgen05.cp.cta_group::{group}.{shape}{multicast} [%x6], %desc0;"
    after = images.run(SETUP + single(text, group), *layout.descriptor(), 0, 0, 0, 40, sanitize=True, schedule="late")
    expected = images.tmem.copy()
    r, k = np.meshgrid(np.arange(rows), np.arange(4 * columns), indexing="ij")
    at = layout.bytes_at(r, k, 1)
    for cta in range(group):
        words = np.ascontiguousarray(images.shared[cta][at]).view(np.uint32)
        lanes = {
            "": [np.arange(4) * 32 if rows == 4 else np.arange(rows)],
            ".warpx2::02_13": [np.arange(64), np.arange(64) + 64],
            ".warpx2::01_23": [np.arange(64) % 32 + np.arange(64) // 32 * 64 + shift for shift in (0, 32)],
            ".warpx4": [np.arange(32) + shift for shift in (0, 32, 64, 96)],
        }[multicast]
        for target in lanes:
            expected[cta, target, 40 : 40 + columns] = words
    np.testing.assert_array_equal(after, expected)


# ---- shift -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("schedule", ["eager", "late"])
def test_shift(schedule: str, times: int, group: int) -> None:
    """In each quarter of the lanes rows 1..31 of 8 columns move to 0..30, and row 31 stays."""
    images = Images(ctas=group)
    text = SETUP
    for phase in range(times):
        issue = single(f"tcgen05.shift.cta_group::{group}.down [%x6];", group)
        text += f"{{ {issue.replace('[%mb], 0', f'[%mb], {phase}')} }}"
    after = images.run(text, 0, 0, 0, 0, 0, 40, sanitize=True, schedule=schedule)
    expected = images.tmem.copy()
    source = np.minimum(LANE + times, 31)
    for quarter in range(4):
        expected[:, 32 * quarter + LANE, 40:48] = images.tmem[:, 32 * quarter + source, 40:48]
    np.testing.assert_array_equal(after, expected)


def test_shift_needs_the_first_lane() -> None:
    (event,) = events_of(SETUP + single("tcgen05.shift.cta_group::1.down [%x6];"), 0, 0, 0, 0, 0, 0x200000)
    assert event.kind == "tensor memory" and "from lane 32 on" in event.message


# ---- allocation ------------------------------------------------------------------------------------------------------


def allocation_kernel(body: str) -> str:
    """`body` is run by two warps; head[0..] is shared memory for addresses, %o where thread 0 may write words."""
    return f""".shared .align 8 .b8 head[64];
.visible .entry k(.param .u64 out) {{
  .reg .b32 %x<16>, %t, %warp, %head; .reg .b64 %o; .reg .pred %p, %q;
  ld.param.u64 %o, [out]; mov.u32 %t, %tid.x; shr.u32 %warp, %t, 5; mov.u32 %head, head; setp.ne.u32 %p, %warp, 0;
  {body}
  ret;
}}"""


def alloc(columns: object, at: int) -> str:
    """The address goes into head[at / 4] and %x<1 + at / 4>."""
    allocate = f"mov.b32 %x0, {columns}; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%head+{at}], %x0;"
    return allocate + f"bar.warp.sync -1; ld.shared.b32 %x{1 + at // 4}, [%head+{at}];\n"


def dealloc(register: int, columns: int) -> str:
    return f"mov.b32 %x0, {columns}; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %x{register}, %x0;\n"


def run_allocation(body: str, check: bool = False, **options: object):
    out = np.zeros(8, np.uint32)
    outcome = ptx_runner.run(allocation_kernel(body), out, block=(64, 1, 1), check=check, **options)
    return out, outcome.events


@pytest.mark.emulator_only("where an allocation lies is not specified")
def test_alloc_finds_holes() -> None:
    body = "@%p ret;" + alloc(64, 0) + alloc(128, 4) + alloc(32, 8) + dealloc(2, 128)
    body += alloc(32, 12) + alloc(128, 16)
    body += "".join(f"st.global.b32 [%o+{4 * k}], %x{1 + k};" for k in range(5))
    body += dealloc(1, 64) + dealloc(3, 32) + dealloc(4, 32) + dealloc(5, 128)
    out, events = run_allocation(body, sanitize=True)
    assert not events
    np.testing.assert_array_equal(out[:5], [0, 64, 192, 64, 224])


@pytest.mark.parametrize("schedule", ["eager", "late", "priority"])
def test_alloc_waits_for_dealloc(schedule: str) -> None:
    """Two warps want 512 columns each: one waits until the other has given them back."""
    body = "mad.lo.u32 %head, %warp, 4, %head;" + alloc(512, 0) + "nanosleep.u32 20;" + dealloc(1, 512)
    run_allocation(body, check=True, schedule=schedule)


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (alloc(48, 0), "tensor memory", "power of two"),
        (alloc(16, 0), "tensor memory", "power of two"),
        (alloc(64, 0), "tensor memory leak", "not deallocated"),
        (alloc(64, 0) + dealloc(1, 32), "tensor memory", "matches no allocation"),
        (alloc(64, 0) + "add.u32 %x1, %x1, 32;" + dealloc(1, 32), "tensor memory", "matches no allocation"),
        (alloc(64, 0) + dealloc(1, 64) + dealloc(1, 64), "tensor memory", "matches no allocation"),
        (
            "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" + alloc(64, 0) + dealloc(1, 64),
            "tensor memory",
            "after tcgen05.relinquish_alloc_permit",
        ),
        (alloc(512, 0) + alloc(32, 4), "deadlock", ""),
        (alloc(64, 0) + dealloc(1, 64).replace("::1", "::2"), "cta_group", "must not mix"),
    ],
)
def test_allocation_errors(body: str, kind: str, words: str) -> None:
    _, events = run_allocation("@%p ret;" + body)
    assert [e.kind for e in events] == [kind]
    assert words in events[0].message


# ---- what is reported ------------------------------------------------------------------------------------------------


def events_of(body: str, *values: int, **options: object):
    return Images().run(body, *values, check=False, **options)[1].events


def product_of(m: int, n: int) -> int:
    return instruction_descriptor(m, n, "f16", "f16")


GOOD = (*K_LAYOUTS[4].descriptor(), *shifted(K_LAYOUTS[4], B_START).descriptor(), product_of(128, 32), 0)


def changed(index: int, value: int) -> tuple[int, ...]:
    return (*GOOD[:index], value, *GOOD[index + 1 :])


LOAD = "tcgen05.ld.sync.aligned.32x32b.x4.b32 {%r0, %r1, %r2, %r3}, "
PRODUCT = SETUP + single(mma("f16"))
BY_A_WARP = SETUP + f"setp.ne.u32 %p, %warp, 0; @!%p {mma('f16')} bar.sync 0;"


@pytest.mark.parametrize(
    ("body", "values", "kind", "words"),
    [
        (LOAD + "[%tm];", (), "tensor memory", "may access lanes"),
        (LOAD + "[%wt+510];", (), "tensor memory", "it has 512"),
        ("add.u32 %wt, %wt, %t;" + LOAD + "[%wt];", (), "tensor memory", "different addresses"),
        (PRODUCT, changed(5, 500), "tensor memory", "it has 512"),
        (PRODUCT, changed(5, 16 << 16), "tensor memory", "begins at lane 16"),
        (PRODUCT, changed(4, GOOD[4] | 4), "instruction descriptor", "sparse"),
        (PRODUCT, changed(4, GOOD[4] | 8), "instruction descriptor", "saturation"),
        (PRODUCT, changed(4, GOOD[4] | 7 << 7), "instruction descriptor", "element type 7"),
        (PRODUCT, changed(4, GOOD[4] & ~0x10 | 1 << 7), "instruction descriptor", "bf16"),
        (PRODUCT, changed(4, product_of(256, 32)), "instruction descriptor", "M = 256"),
        (PRODUCT, changed(4, product_of(128, 24)), "instruction descriptor", "N = 24"),
        (PRODUCT, changed(1, GOOD[1] & ~(1 << 14)), "matrix descriptor", "version 0"),
        (PRODUCT, changed(1, GOOD[1] | 3 << 29), "matrix descriptor", "swizzle mode 3"),
        (PRODUCT, changed(1, GOOD[1] | 0x3FFF), "out of bounds", "operand A"),
        (PRODUCT, changed(0, 0), "out of bounds", "operand A"),
        (SETUP + single(mma("f16", group=2)), GOOD, "cta_group", "no peer"),
        (BY_A_WARP, GOOD, "single thread", "tcgen05.mma"),
    ],
)
def test_errors(body: str, values: tuple[int, ...], kind: str, words: str) -> None:
    events = events_of(body, *values)
    assert [e.kind for e in events] == [kind], events
    assert words in events[0].message


def test_column_outside_every_allocation() -> None:
    text = f".reg .b32 %r<4>; {alloc(32, 0)} tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r0}}, [%x1+31];"
    text += "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r0, %r1}, [%x1+31];"
    _, events = run_allocation("@%p ret;" + text)
    assert "column 32 is not allocated" in events[0].message


@pytest.mark.parametrize("schedule", ["late", "priority"])
def test_tensor_memory_that_changes_under_a_load(schedule: str) -> None:
    """Warp 0 loads what a product overwrites before it waits: the second reading differs."""
    body = SETUP + LOAD + "[%wt];" + single(mma("f16")) + "tcgen05.wait::ld.sync.aligned;"
    assert "tensor memory race" in {e.kind for e in events_of(body, *GOOD, schedule=schedule)}
    body = SETUP + LOAD + "[%wt]; tcgen05.wait::ld.sync.aligned; bar.sync 0;" + single(mma("f16"))
    assert not events_of(body, *GOOD, schedule=schedule)


def test_registers_in_flight() -> None:
    moves = "mov.b64 %w0, {%r0, %r1}; mov.b64 {%r4, %r5}, %w0;"
    use = "add.u32 %r6, %r4, 1;"
    assert not events_of(LOAD + "[%wt];" + moves + "tcgen05.wait::ld.sync.aligned;" + use, sanitize=True)
    events = events_of(LOAD + "[%wt];" + moves + use + "tcgen05.wait::ld.sync.aligned;", sanitize=True)
    assert [e.kind for e in events] == ["register in flight"]


def test_unordered_product_is_a_race() -> None:
    """Without the wait on the mbarrier the loads at the end do not know that the product is over."""
    body = SETUP + single(mma("f16")).replace(WAIT, "")
    assert events_of(body, *GOOD, sanitize=True)
    assert not events_of(SETUP + single(mma("f16")), *GOOD, sanitize=True)


@pytest.mark.parametrize(
    "text",
    [
        "tcgen05.mma.cta_group::1.kind::mxf4.block_scale [%x6], %desc0, %desc1, %v4, [%x7], [%x7], %no;",
        "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [%x6], %desc0, %desc1, %v4, [%x7], [%x7], %no;",
        "tcgen05.mma.sp.cta_group::1.kind::f16 [%x6], %desc0, %desc1, [%x7], %v4, %no;",
        "tcgen05.mma.ws.cta_group::1.kind::f16 [%x6], %desc0, %desc1, %v4, %no;",
        "tcgen05.mma.cta_group::1.kind::f8f6f4 [%x6], %desc0, %desc1, %v4, %no, 2;",
        "tcgen05.mma.cta_group::2.kind::f16 [%x6], %desc0, %desc1, %v4, {%x0, %x0, %x0, %x0}, %no;",
        "tcgen05.shift.cta_group::1.up [%x6];",
        "tcgen05.cp.cta_group::1.128x256b.b8x16.b4x16_p64 [%x6], %desc0;",
        "tcgen05.cp.cta_group::1.64x128b [%x6], %desc0;",
        "tcgen05.ld.sync.aligned.16x256b.x64.b32 {%r0}, [%x6];",
        "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r0}, [%x6];",
        "tcgen05.ld.red.sync.aligned.32x32b.x2.min.f32 {%r0, %r1}, %r2, [%x6];",
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64.bogus [%mb];",
    ],
)
def test_refused(text: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        Images().run(text)
