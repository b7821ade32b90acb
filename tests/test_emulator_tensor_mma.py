"""tcgen05.mma against numpy: layouts, formats, sizes, pairs of CTAs."""

import numpy as np
import pytest

from tests.ptx_runner import bound, on_silicon
from tests.tensor_images import (
    B_START,
    FORMATS,
    K_LAYOUTS,
    SETUP,
    Images,
    Layout,
    as_float,
    draw,
    instruction_descriptor,
    mma,
    mn_layouts,
    put,
    shifted,
    single,
)

pytestmark = pytest.mark.silicon


def check_product(actual: np.ndarray, expected: np.ndarray, scale: np.ndarray) -> None:
    """Float32 sums of at most 33 terms: `scale` is the sum of the magnitudes. A device may add them in any order and
    round each sum in any way (PTX ISA: at least single precision)."""
    assert np.all(np.abs(actual - expected) <= bound(ours=1e-6, documented=33 * 2.0**-23) * scale + 1e-30)


def run_product(
    a_layout: Layout,
    b_layout: Layout,
    a: str,
    b: str,
    m: int = 128,
    n: int = 64,
    column: int = 32,
    d: str = "f32",
    accumulate: bool = False,
    negate: tuple[bool, bool] = (False, False),
    **options: object,
) -> None:
    """One product of cta_group::1 with both operands in shared memory; all of tensor memory is compared."""
    images = Images()
    rng = np.random.default_rng(3)
    depth = 32 // FORMATS[a][2]
    bits_a, values_a = draw(rng, (m, depth), a)
    bits_b, values_b = draw(rng, (n, depth), b)
    b_layout = shifted(b_layout, B_START)
    put(images.shared[0], a_layout, bits_a, a)
    put(images.shared[0], b_layout, bits_b, b)
    lanes = np.arange(128) if m == 128 else np.arange(64) // 16 * 32 + np.arange(64) % 16
    old = rng.normal(size=(m, n)).astype(np.float32)
    if d == "f16":
        old = old.astype(np.float16).astype(np.float32)
        images.tmem[0, lanes, column : column + n] = old.astype(np.float16).view(np.uint16)
    else:
        images.tmem[0, lanes, column : column + n] = old.view(np.uint32)
    descriptor = instruction_descriptor(m, n, a, b, d, (a_layout.mn_major, b_layout.mn_major), negate)
    body = SETUP + single(mma(FORMATS[a][0], predicate="%yes" if accumulate else "%no"))
    after = images.run(body, *a_layout.descriptor(), *b_layout.descriptor(), descriptor, column, **options)
    sign = -1 if negate[0] != negate[1] else 1
    expected = sign * values_a.astype(np.float64) @ values_b.T.astype(np.float64) + (old if accumulate else 0)
    scale = np.abs(values_a) @ np.abs(values_b).T + np.abs(old)
    region = after[0, lanes, column : column + n]
    if d == "f16":
        got = region.astype(np.uint16).view(np.float16)
        assert np.all(region >> 16 == 0)
        # PTX ISA: at least half precision.
        allowed = 17 * 2**-10 * scale if on_silicon() else 2**-10 * (np.abs(expected) + 1)
        assert np.all(np.abs(got - expected) <= allowed)
    else:
        check_product(as_float(region), expected, scale)
    untouched = images.tmem.copy()
    untouched[0, lanes, column : column + n] = region
    np.testing.assert_array_equal(after, untouched)


@pytest.mark.parametrize("layout", K_LAYOUTS, ids=str)
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("s8", "u8")])
def test_k_major(name: str, layout: Layout) -> None:
    others = {"e4m3": "e5m2", "e5m2": "e4m3", "e2m3": "e2m1", "e3m2": "e2m3", "e2m1": "e3m2"}
    run_product(layout, layout, name, others.get(name, name))


@pytest.mark.parametrize(("name", "index"), [(n, i) for n in ("f16", "tf32", "e4m3") for i in range(5)] + [("tf32", 5)])
def test_mn_major(name: str, index: int) -> None:
    layout = mn_layouts(FORMATS[name][2])[index]
    run_product(layout, layout, name, name)


def test_one_major_each() -> None:
    run_product(K_LAYOUTS[4], mn_layouts(2)[4], "bf16", "bf16", accumulate=True)
    run_product(mn_layouts(2)[3], K_LAYOUTS[0], "bf16", "bf16", accumulate=True)


SIZES = [(128, n) for n in (16, 48, 80, 112, 128, 256)] + [(64, n) for n in (8, 24, 64, 104, 256)]


@pytest.mark.parametrize(("m", "n"), SIZES)
@pytest.mark.parametrize("d", ["f32", "f16"])
def test_sizes(m: int, n: int, d: str) -> None:
    layout = Layout("128B", False, 16, 1024)
    run_product(layout, Layout("none", False, 4096, 128), "f16", "f16", m=m, n=n, d=d, accumulate=n % 3 == 2, column=3)
    run_product(layout, mn_layouts(2)[1], "f16", "f16", m=m, n=n, d=d, accumulate=True, column=0)


@pytest.mark.parametrize("negate", [(True, False), (False, True), (True, True)])
def test_negate(negate: tuple[bool, bool]) -> None:
    run_product(K_LAYOUTS[0], K_LAYOUTS[0], "bf16", "bf16", negate=negate, accumulate=True)


def test_schedules_and_sanitizer_agree() -> None:
    for schedule in ("late", "priority"):
        run_product(K_LAYOUTS[4], K_LAYOUTS[4], "bf16", "bf16", accumulate=True, schedule=schedule, sanitize=True)
    run_product(mn_layouts(2)[4], mn_layouts(2)[4], "bf16", "bf16", m=64, schedule="late", sanitize=True)


@pytest.mark.parametrize("name", ["f16", "bf16", "tf32", "e4m3", "e2m3", "e2m1"])
@pytest.mark.parametrize("m", [64, 128])
def test_a_in_tensor_memory(name: str, m: int) -> None:
    """32-bit columns hold 1, 2 or 4 elements of a row; fp4 sits in bits 2..5 of its byte."""
    images, n, source = Images(), 32, 300
    rng = np.random.default_rng(4)
    kind, _, size = FORMATS[name]
    depth = 32 // size
    bits_a, values_a = draw(rng, (m, depth), name)
    bits_b, values_b = draw(rng, (n, depth), name)
    b_layout = shifted(K_LAYOUTS[0], B_START)
    put(images.shared[0], b_layout, bits_b, name)
    upper = 16 if m == 64 else 0
    lanes = np.arange(128) if m == 128 else np.arange(64) // 16 * 32 + np.arange(64) % 16 + upper
    containers = (bits_a << 2 if name == "e2m1" else bits_a).astype({1: np.uint8, 2: np.uint16, 4: np.uint32}[size])
    images.tmem[0, lanes, source : source + 8] = np.ascontiguousarray(containers).view(np.uint32)
    body = SETUP + single(mma(kind, a="[%x7+4]"))
    column = upper << 16 | 64
    descriptor = instruction_descriptor(m, n, name, name)
    values = (0, 0, *b_layout.descriptor(), descriptor, column, upper << 16 | source - 4)
    after = images.run(body, *values, sanitize=True)
    expected = values_a.astype(np.float64) @ values_b.T
    check_product(as_float(after[0, lanes, 64 : 64 + n]), expected, np.abs(values_a) @ np.abs(values_b).T)


@pytest.mark.parametrize("m", [64, 128])
def test_disabled_lanes(m: int) -> None:
    images, n = Images(), 16
    rng = np.random.default_rng(5)
    bits, values = draw(rng, (m, 16), "f16")
    bits_b, values_b = draw(rng, (n, 16), "f16")
    a_layout, b_layout = K_LAYOUTS[4], shifted(K_LAYOUTS[4], B_START)
    put(images.shared[0], a_layout, bits, "f16")
    put(images.shared[0], b_layout, bits_b, "f16")
    masks = [0x0F0F00FF, 0, 0xFFFFFFFF, 0x80000001]
    lanes = "".join(f"mov.b32 %x{8 + k}, {mask};" for k, mask in enumerate(masks))
    body = SETUP + lanes + single(mma("f16", lanes=" {%x8, %x9, %x10, %x11},"))
    descriptor = instruction_descriptor(m, n, "f16", "f16")
    after = images.run(body, *a_layout.descriptor(), *b_layout.descriptor(), descriptor, 0)
    product = (values @ values_b.T).astype(np.float32)
    for row in range(m):
        lane = row if m == 128 else row // 16 * 32 + row % 16
        got = after[0, lane, :n]
        if masks[lane // 32] >> lane % 32 & 1:
            np.testing.assert_array_equal(got, images.tmem[0, lane, :n])
        else:
            np.testing.assert_allclose(as_float(got), product[row], rtol=1e-5, atol=bound(ours=1e-5, documented=1e-4))


def test_scaled_accumulator_and_sum_before_adding() -> None:
    """K products are summed first: 16 ones reach a D of 2^24, and scale-input-d divides the old D by a power of two."""
    images = Images()
    ones = np.full((128, 16), 0x3C00)
    put(images.shared[0], K_LAYOUTS[4], ones, "f16")
    b_layout = shifted(K_LAYOUTS[4], B_START)
    put(images.shared[0], b_layout, ones[:16], "f16")
    images.tmem[0, :, :16] = np.float32(2.0**27).view(np.uint32)
    descriptor = instruction_descriptor(128, 16, "f16", "f16")
    body = SETUP + single(mma("f16", predicate="%yes", scale=", 3"))
    after = images.run(body, *K_LAYOUTS[4].descriptor(), *b_layout.descriptor(), descriptor, 0)
    rtol = bound(ours=0, documented=17 * 2.0**-23)
    np.testing.assert_allclose(as_float(after[0, :, :16]), 2.0**24 + 16, rtol=rtol)


def test_one_hot_operands_show_every_place() -> None:
    """A = identity columns: D[r, n] = B[n, r % 16], exactly."""
    images = Images()
    a = np.eye(16, dtype=np.float16)[np.arange(128) % 16]
    b = np.arange(256 * 16).reshape(256, 16) % 2039
    layout = Layout("none", False, 4096, 128)
    put(images.shared[0], K_LAYOUTS[4], a.view(np.uint16), "f16")
    b_layout = shifted(layout, B_START)
    put(images.shared[0], b_layout, b.astype(np.float16).view(np.uint16), "f16")
    descriptor = instruction_descriptor(128, 256, "f16", "f16")
    after = images.run(SETUP + single(mma("f16")), *K_LAYOUTS[4].descriptor(), *b_layout.descriptor(), descriptor, 128)
    np.testing.assert_array_equal(as_float(after[0, :, 128:384]), b[:, np.arange(128) % 16].T.astype(np.float32))


@pytest.mark.parametrize("saturate", [False, True])
def test_integers(saturate: bool) -> None:
    """u8 * s8 into s32, which wraps around or saturates."""
    images, n = Images(), 32
    rng = np.random.default_rng(7)
    bits_a, values_a = draw(rng, (128, 32), "u8")
    bits_b, values_b = draw(rng, (n, 32), "s8")
    a_layout, b_layout = mn_layouts(1)[4], shifted(K_LAYOUTS[4], B_START)
    put(images.shared[0], a_layout, bits_a, "u8")
    put(images.shared[0], b_layout, bits_b, "s8")
    old = rng.choice(np.array([2**31 - 1, -(2**31), 5]), (128, n))
    images.tmem[0, :, :n] = old.astype(np.int32).view(np.uint32)
    descriptor = instruction_descriptor(128, n, "u8", "s8", "s32", (True, False)) | saturate << 3
    body = SETUP + single(mma("i8", predicate="%yes"))
    after = images.run(body, *a_layout.descriptor(), *b_layout.descriptor(), descriptor, 0)
    exact = values_a.astype(np.int64) @ values_b.T.astype(np.int64) + old
    expected = np.clip(exact, -(2**31), 2**31 - 1) if saturate else exact
    np.testing.assert_array_equal(after[0, :, :n].view(np.int32), expected.astype(np.int32))


@pytest.mark.parametrize("n", [16, 24])
def test_nan_is_the_devices(n: int) -> None:
    images, m = Images(), 64
    put(images.shared[0], K_LAYOUTS[4], np.full((m, 16), 0xFF81), "bf16")
    put(images.shared[0], shifted(K_LAYOUTS[4], B_START), np.full((n, 16), 0x3F80), "bf16")
    values = (*K_LAYOUTS[4].descriptor(), *shifted(K_LAYOUTS[4], B_START).descriptor())
    after = images.run(SETUP + single(mma("f16")), *values, instruction_descriptor(m, n, "bf16", "bf16"), 0)
    assert np.all(after[0, :16, :n] == 0x7FFFFFFF)


# ---- pairs of CTAs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("b_mn", [False, True])
@pytest.mark.parametrize(("m", "n"), [(256, 16), (256, 48), (256, 128), (128, 32), (128, 48), (128, 256)])
@pytest.mark.parametrize("from_tmem", [False, True])
def test_pair(m: int, n: int, from_tmem: bool, b_mn: bool) -> None:
    """Each CTA holds half of the rows of A and D and half of the columns of B.

    M = 128: the first half of N lies in lanes 0..63, the second in lanes 64..127.
    """
    images = Images(ctas=2)
    rng = np.random.default_rng(6)
    bits_a, values_a = draw(rng, (m, 16), "bf16")
    bits_b, values_b = draw(rng, (n, 16), "bf16")
    rows, half = m // 2, n // 2
    b_layout = shifted(mn_layouts(2)[1] if b_mn else Layout("none", False, 4096, 128), B_START)
    old = rng.normal(size=(m, n)).astype(np.float32)

    def view(tmem: np.ndarray, cta: int) -> list[tuple[np.ndarray, slice]]:
        if m == 256:
            return [(tmem[cta, :, 64 : 64 + n], slice(0, n))]
        return [(tmem[cta, 64 * h : 64 * h + 64, 64 : 64 + half], slice(half * h, half * h + half)) for h in range(2)]

    for cta in range(2):
        own = bits_a[rows * cta : rows * cta + rows]
        put(images.shared[cta], K_LAYOUTS[4], own, "bf16")
        packed = np.ascontiguousarray(own.astype(np.uint16)).view(np.uint32)
        images.tmem[cta, :, 400:408] = packed if m == 256 else np.tile(packed, (2, 1))
        put(images.shared[cta], b_layout, bits_b[half * cta : half * cta + half], "bf16")
        for region, columns in view(images.tmem, cta):
            region[:] = old[rows * cta : rows * cta + rows, columns].view(np.uint32)
    disabled = {8: 1, 15: 1 << 31}  # the first lane of the first CTA, the last one of the second
    setup = SETUP + "".join(f"mov.b32 %x{k}, {disabled.get(k, 0)};" for k in range(8, 16))
    words = " {" + ", ".join(f"%x{k}" for k in range(8, 16)) + "},"
    text = mma("f16", a="[%x7]" if from_tmem else "%desc0", predicate="%yes", group=2, lanes=words)
    descriptor = instruction_descriptor(m, n, "bf16", "bf16", major=(False, b_mn))
    values = (*K_LAYOUTS[4].descriptor(), *b_layout.descriptor(), descriptor, 64, 400)
    schedule = "late" if from_tmem else "eager"
    after = images.run(setup + single(text, 2), *values, sanitize=True, schedule=schedule)
    product = values_a.astype(np.float64) @ values_b.T + old
    expected = images.tmem.copy()
    for cta in range(2):
        for (region, columns), (got, _) in zip(view(expected, cta), view(after, cta), strict=True):
            keep = region[[0, -1]].copy()
            rounded = product[rows * cta : rows * cta + rows, columns]
            atol = bound(ours=1e-5, documented=1e-4)
            np.testing.assert_allclose(as_float(got.copy())[1:-1], rounded[1:-1], rtol=1e-5, atol=atol)
            region[:] = got
            disabled_first, disabled_last = cta == 0 and columns.start == 0, cta == 1 and columns.stop == n
            if disabled_first:
                region[0] = keep[0]
            if disabled_last:
                region[-1] = keep[1]
    np.testing.assert_array_equal(after, expected)
