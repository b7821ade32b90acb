"""mov, packs and unpacks, and every kind of cvt, against Python integers and exact fractions."""

import math

import numpy as np
import pytest

from cute_ssd.emulator.decode import UnsupportedInstruction

from .number_formats import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    F16,
    F32,
    F64,
    SPECIAL_F32,
    TF32,
    Format,
    Fraction,
    bits_of,
    f32,
    f32_samples,
    from_bf16,
    round_to,
    same,
)
from .ptx_runner import elementwise, on_silicon, run

pytestmark = pytest.mark.silicon

SHORT, WORD, LONG, FLOAT, DOUBLE = (np.dtype(t) for t in (np.uint16, np.uint32, np.uint64, np.float32, np.float64))
INTEGERS = ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"]
FORMATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}
STORED = {"f16": SHORT, "bf16": SHORT, "f32": FLOAT, "f64": DOUBLE}
MODES = ["rn", "rz", "rm", "rp"]


def number(bits: np.ndarray, kind: str) -> np.ndarray:
    """Registers of a float type as f64."""
    values = {"f16": lambda: bits.view(np.float16), "bf16": lambda: from_bf16(bits)}.get(kind, lambda: bits)()
    with np.errstate(invalid="ignore"):
        return values.astype(np.float64)


def samples(kind: str, n: int = 600) -> np.ndarray:
    """Registers of a float type with all sorts of values."""
    if kind == "f64":
        rng = np.random.default_rng(0)
        any_size = rng.standard_normal(n) * 2.0 ** rng.integers(-160, 160, n)
        return np.concatenate([any_size, number(f32_samples(n, 8), "f32"), [1e300, 5e-324]])
    return f32_samples(n, 8) if kind == "f32" else np.random.default_rng(1).integers(0, 2**16, n, SHORT)


# ---- mov -------------------------------------------------------------------------------------------------------------


def test_moves_of_registers_and_literals():
    x = np.arange(70, dtype=np.uint64) * 0x123456789AB
    for kind, dtype in (("b16", SHORT), ("u32", WORD), ("f32", WORD), ("b64", LONG), ("f64", LONG)):
        a = x.astype(dtype)
        np.testing.assert_array_equal(elementwise(f"mov.{kind} %out, %in0;", [a], dtype, sanitize=True), a)
    np.testing.assert_array_equal(elementwise("mov.s32 %out, -2;", [x], np.dtype(np.int32)), [-2] * 70)
    np.testing.assert_array_equal(elementwise("mov.b64 %out, -2;", [x], np.dtype(np.int64)), [-2] * 70)
    np.testing.assert_array_equal(elementwise("mov.f32 %out, 0f3FC00000;", [x], FLOAT), [1.5] * 70)
    np.testing.assert_array_equal(elementwise("mov.b16 %out, 0x8001;", [x], SHORT), [0x8001] * 70)


def test_guarded_moves_touch_active_lanes_only():
    text = """.reg .pred %odd; .reg .b32 %x; and.b32 %x, %in0, 1; setp.ne.u32 %odd, %x, 0;
        mov.b32 %out, 7; @%odd mov.b32 %out, %in0;"""
    a = np.arange(64, dtype=np.uint32)
    np.testing.assert_array_equal(elementwise(text, [a], WORD), np.where(a % 2, a, 7))


def test_special_registers():
    a = np.zeros(300, np.uint32)
    np.testing.assert_array_equal(elementwise("mov.u32 %out, %laneid;", [a], WORD), np.arange(300) % 32)
    np.testing.assert_array_equal(elementwise("mov.u32 %out, %ctaid.x;", [a], WORD), np.arange(300) // 256)
    np.testing.assert_array_equal(elementwise("cvt.u64.u32 %out, %tid.x;", [a], LONG), np.arange(300) % 256)


def test_clocks_go_forward():
    """Between two reads another warp may run: only the order is certain."""
    for clock in ("%clock64", "%globaltimer"):
        text = f""".reg .b64 %x, %y; .reg .pred %p; mov.u64 %x, {clock}; bar.sync 0; mov.u64 %y, {clock};
            setp.le.u64 %p, %x, %y; selp.u32 %out, 1, 0, %p;"""
        np.testing.assert_array_equal(elementwise(text, [np.zeros(256, np.uint32)], WORD), [1] * 256)
    elementwise("mov.u32 %out, %clock;", [np.zeros(3, np.uint32)], WORD)


def test_packs_and_unpacks():
    rng = np.random.default_rng(0)
    words, halves = (rng.integers(0, 2**32, (2, 70), np.uint32), rng.integers(0, 2**16, (4, 70), np.uint16))
    pair = elementwise("mov.b64 %out, {%in0, %in1};", [*words], LONG, sanitize=True)
    np.testing.assert_array_equal(pair, words[0] | words[1].astype(np.uint64) << np.uint64(32))
    swap = elementwise(".reg .b32 %a, %b; mov.b64 {%a, %b}, %in0; mov.b64 %out, {%b, %a};", [pair], LONG, sanitize=True)
    np.testing.assert_array_equal(swap, words[1] | words[0].astype(np.uint64) << np.uint64(32))
    np.testing.assert_array_equal(elementwise("mov.b64 {_, %out}, %in0;", [pair], WORD), words[1])
    np.testing.assert_array_equal(elementwise("mov.b64 {%out, _}, %in0;", [pair], WORD), words[0])
    two = elementwise("mov.b32 %out, {%in0, %in1};", [*halves[:2]], WORD)
    np.testing.assert_array_equal(two.view(SHORT).reshape(-1, 2).T, halves[:2])
    np.testing.assert_array_equal(elementwise("mov.b32 {_, %out}, %in0;", [two], SHORT), halves[1])
    four = elementwise("mov.b64 %out, {%in0, %in1, %in2, %in3};", [*halves], LONG)
    np.testing.assert_array_equal(four.view(SHORT).reshape(-1, 4).T, halves)
    text = ".reg .b16 %a<4>; mov.b64 {%a0, %a1, %a2, %a3}, %in0; mov.b64 %out, {%a3, %a2, %a1, %a0};"
    np.testing.assert_array_equal(elementwise(text, [four], LONG).view(SHORT).reshape(-1, 4).T, halves[::-1])
    text = ".reg .b8 %a<4>; mov.b32 {%a0, %a1, %a2, %a3}, %in0; mov.b32 %out, {%a3, %a2, %a1, %a0};"
    np.testing.assert_array_equal(elementwise(text, [words[0]], WORD), words[0].byteswap())


def test_pairs_of_64_bits():
    text = """.reg .b128 %q, %s; .reg .b64 %a, %b; mov.b128 %q, {%in0, %in1}; mov.b128 %s, %q;
        mov.b128 {%a, %b}, %s; sub.u64 %out, %b, %a;"""
    a = np.arange(40, dtype=np.uint64) * 0x1234567890
    np.testing.assert_array_equal(elementwise(text, [a, a[::-1].copy()], LONG, sanitize=True), a[::-1] - a)


# ---- integers --------------------------------------------------------------------------------------------------------


def wrap(x: int, kind: str) -> int:
    n = int(kind[1:])
    x &= (1 << n) - 1
    return x - (x >> (n - 1) << n) if kind[0] == "s" else x


def integer_values(of: str) -> list[int]:
    edges = [s * (2**k + e) for k in (0, 2, 7, 8, 15, 16, 31, 32, 63) for s in (1, -1) for e in (-1, 0, 1)]
    return sorted({wrap(x, of) for x in edges})


def register(kind: str) -> np.dtype:
    """8-bit values live in 16-bit registers."""
    return np.dtype(f"u{max(2, int(kind[1:]) // 8)}")


@pytest.mark.parametrize("of", INTEGERS)
@pytest.mark.parametrize("to", INTEGERS)
def test_integers(of, to):
    numbers = integer_values(of)
    low, high = wrap(1 << int(to[1:]) - 1, to) if to[0] == "s" else 0, 2 ** (int(to[1:]) - (to[0] == "s")) - 1
    sources = np.array([x & (1 << int(of[1:])) - 1 for x in numbers], register(of))
    if of == "s8":
        sources |= np.uint16(0x5A00)  # the upper bits of the register do not count
    for width in {register(to).itemsize, 8}:
        mask = (1 << 8 * width) - 1
        got = elementwise(f"cvt.{to}.{of} %out, %in0;", [sources], np.dtype(f"u{width}"))
        np.testing.assert_array_equal(got, np.array([wrap(x, to) & mask for x in numbers], f"u{width}"))
        if on_silicon() and low <= numbers[0] and numbers[-1] <= high:
            continue  # PTX has no .sat where nothing can saturate
        got = elementwise(f"cvt.sat.{to}.{of} %out, %in0;", [sources], np.dtype(f"u{width}"))
        np.testing.assert_array_equal(got, np.array([min(max(x, low), high) & mask for x in numbers], f"u{width}"))


ROUND = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


@pytest.mark.parametrize("of", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("to", INTEGERS)
def test_floats_to_integers(of, to):
    n, signed = int(to[1:]), to[0] == "s"
    low, high = -(2 ** (n - 1)) if signed else 0, 2 ** (n - signed) - 1
    sources = samples(of, 200)
    if of == "f32":
        ties = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 254.5, 255.5], np.float32)
        limits = np.array([2.0**31, 2.0**63, 2.0**64, -(2.0**31)], np.float32)
        sources = np.concatenate([sources, ties, limits])
    of_nan = 1 << (n - 1) if of == "f64" or n == 64 else 0
    for rounding, function in ROUND.items():
        text = f"cvt.{rounding}.{to}.{of} %out, %in0;"
        if of == "bf16" and n == 8:  # which PTX has with 8-bit registers only
            text = f".reg .b8 %x; {text.replace('%out', '%x')} cvt.{to[0]}16.{to} %out, %x;"
        got = elementwise(text, [sources], register(to))
        numbers = [x if math.isnan(x) else min(max(x, -1e30), 1e30) for x in number(sources, of).tolist()]
        want = [of_nan if math.isnan(x) else min(max(function(x), low), high) for x in numbers]
        wanted = np.array([wrap(w, to) & (1 << 8 * got.itemsize) - 1 for w in want], got.dtype)
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("to", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("of", INTEGERS)
def test_integers_to_floats(of, to, mode):
    rng = np.random.default_rng(0)
    n = int(of[1:])
    ties = [2**24 + 1, 2**24 + 3, 2**53 + 1, 2**53 + 3, 2**62 + 2**38, 2**62 + 2**38 + 1, 65519, 65520]
    ties += [int(x) >> int(s) for x, s in zip(rng.integers(0, 2**63, 60), rng.integers(0, 60, 60), strict=True)]
    numbers = integer_values(of) + [wrap(x, of) for x in ties]
    sources = np.array([x & (1 << n) - 1 for x in numbers], register(of))
    text = f"cvt.{mode}.{to}.{of} %out, %in0;"
    if to == "bf16" and n == 8:  # which PTX has with 8-bit registers only
        text = f".reg .b8 %x; cvt.u8.u16 %x, %in0; {text.replace('%in0', '%x')}"
    got = number(elementwise(text, [sources], STORED[to]), to)
    np.testing.assert_array_equal(got, [round_to(Fraction(x), FORMATS[to], mode) for x in numbers])


# ---- floats ----------------------------------------------------------------------------------------------------------


def rounded(values: np.ndarray, form: Format, mode: str = "rn", saturate: bool = False) -> np.ndarray:
    """Finite numbers rounded exactly; the others stay, infinities saturate if they must."""
    largest = float(form.largest)
    return np.array([
        round_to(Fraction(x), form, mode, saturate) or math.copysign(0, x) if math.isfinite(x)
        else math.copysign(largest, x) if saturate and math.isinf(x) else x for x in values.tolist()
    ])  # fmt: skip


NARROWING = "f16 f32, bf16 f32, f16 f64, bf16 f64, f32 f64, bf16 f16, f16 bf16"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("to", "of"), [pair.split() for pair in NARROWING.split(", ")])
def test_narrowing(to, of, mode):
    sources = samples(of)
    got = elementwise(f"cvt.{mode}.{to}.{of} %out, %in0;", [sources], STORED[to], sanitize=mode == "rn")
    same(number(got, to), rounded(number(sources, of), FORMATS[to], mode))
    nan = bits_of(got)[np.isnan(number(got, to))]
    assert set(nan.tolist()) <= {0x7FFF, 0x7FFFFFFF}


@pytest.mark.parametrize(
    ("to", "of"), [("f32", "f16"), ("f64", "f16"), ("f32", "bf16"), ("f64", "bf16"), ("f64", "f32")]
)
def test_widening_is_exact(to, of):
    sources = np.arange(65536, dtype=SHORT) if of != "f32" else samples("f32")
    same(number(elementwise(f"cvt.{to}.{of} %out, %in0;", [sources], STORED[to]), to), number(sources, of))


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("rounding", ROUND)
def test_rounding_to_whole_numbers(kind, rounding):
    sources = samples(kind)
    function = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[rounding]
    got = elementwise(f"cvt.{rounding}.{kind}.{kind} %out, %in0;", [sources], STORED[kind])
    with np.errstate(invalid="ignore"):
        want = function(number(sources, kind))
    same(number(got, kind), want)


def test_modifiers():
    x = f32([0, 0x80000000, 1, 0x3E800000, 0xBE800000, 0x40000000, 0x7F800000, 0x7FC00000])
    for text, want in [
        ("cvt.sat.f32.f32", [0, 0, 2.0**-149, 0.25, 0, 1, 1, 0]),
        ("cvt.ftz.f32.f32", [0, -0.0, 0, 0.25, -0.25, 2, np.inf, np.nan]),
        ("cvt.rpi.ftz.f32.f32", [0, -0.0, 0, 1, -0.0, 2, np.inf, np.nan]),
        ("cvt.rpi.f32.f32", [0, -0.0, 1, 1, -0.0, 2, np.inf, np.nan]),
    ]:
        same(elementwise(f"{text} %out, %in0;", [x], FLOAT), np.array(want, np.float32))
    for text, want in [
        ("cvt.rn.relu.f16.f32", [0, 0, 0, 0.25, 0, 2, np.inf, np.nan]),
        ("cvt.rn.satfinite.f16.f32", [0, -0.0, 0, 0.25, -0.25, 2, 65504, np.nan]),
        ("cvt.rn.sat.f16.f32", [0, 0, 0, 0.25, 0, 1, 1, 0]),
        ("cvt.rp.f16.f32", [0, -0.0, 2.0**-24, 0.25, -0.25, 2, np.inf, np.nan]),
        ("cvt.rp.ftz.f16.f32", [0, -0.0, 0, 0.25, -0.25, 2, np.inf, np.nan]),
    ]:
        same(number(elementwise(f"{text} %out, %in0;", [x], SHORT), "f16"), np.array(want))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("modifiers", ["rn", "rz", "rn.relu", "rn.satfinite", "rz.relu.satfinite"])
def test_two_floats_become_a_pair(kind, modifiers):
    a, b = f32_samples(500, 1), f32_samples(500, 2)
    packed = elementwise(f"cvt.{modifiers}.{kind}x2.f32 %out, %in0, %in1;", [a, b], WORD)
    for half, source in ((packed & 0xFFFF, b), (packed >> 16, a)):
        want = rounded(number(source, "f32"), FORMATS[kind], modifiers[:2], saturate="satfinite" in modifiers)
        if "relu" in modifiers:
            want = np.where(np.signbit(want) & ~np.isnan(want), 0, want)
        same(number(half.astype(SHORT), kind), want)
        assert np.all(half[np.isnan(source)] == 0x7FFF)


@pytest.mark.parametrize("mode", ["rna", "rn", "rz"])
def test_tf32(mode):
    x = f32_samples(1000, 3)
    got = elementwise(f"cvt.{mode}.tf32.f32 %out, %in0;", [x], FLOAT)
    same(number(got, "f32"), rounded(number(x, "f32"), TF32, mode))
    assert not np.any(bits_of(got[~np.isnan(got)]) & 0x1FFF)
    got = elementwise(f"cvt.{mode}.satfinite.tf32.f32 %out, %in0;", [x], FLOAT)
    same(number(got, "f32"), rounded(number(x, "f32"), TF32, mode, saturate=True))


# ---- narrow formats --------------------------------------------------------------------------------------------------

NARROW = {  # format, bits, exponent bits, codes of NaNs, NaN becomes
    "e4m3": (E4M3, 8, 4, {0x7F}, 0x7F),
    "e5m2": (E5M2, 8, 5, {0x7D, 0x7E, 0x7F}, 0x7F),
    "e2m3": (E2M3, 6, 2, set(), 0x1F),
    "e3m2": (E3M2, 6, 3, set(), 0x1F),
    "e2m1": (E2M1, 4, 2, set(), 0x7),
}


def decoded(kind: str, code: int) -> float:
    """The value of a code, from the format's definition."""
    form, size, exponent_bits, nans, _ = NARROW[kind]
    magnitude, mantissa_bits = code & (1 << (size - 1)) - 1, form.precision - 1
    if magnitude in nans:
        return math.nan
    if kind == "e5m2" and magnitude == 0x7C:
        return math.copysign(math.inf, -(code >> 7) or 1)
    exponent, mantissa = magnitude >> mantissa_bits, magnitude & (1 << mantissa_bits) - 1
    bias = (1 << (exponent_bits - 1)) - 1
    value = math.ldexp(mantissa + (bool(exponent) << mantissa_bits), max(exponent, 1) - bias - mantissa_bits)
    return -value if code >> (size - 1) else value


def field(kind: str) -> int:
    """Bits between the two values of a pair."""
    return 4 if kind == "e2m1" else 8


@pytest.mark.parametrize("kind", NARROW)
def test_narrow_to_f16(kind):
    codes = np.arange(1 << NARROW[kind][1], dtype=SHORT)
    pairs = codes | codes[::-1] << field(kind)
    load = ".reg .b8 %x; cvt.u8.u16 %x, %in0;" if kind == "e2m1" else ".reg .b16 %x; mov.b16 %x, %in0;"
    got = elementwise(f"{load} cvt.rn.f16x2.{kind}x2 %out, %x;", [pairs], WORD)
    values = np.array([decoded(kind, int(code)) for code in codes])
    same(number((got & 0xFFFF).astype(SHORT), "f16"), values)
    same(number((got >> 16).astype(SHORT), "f16"), values[::-1])
    relu = elementwise(f"{load} cvt.rn.relu.f16x2.{kind}x2 %out, %x;", [pairs], WORD)
    same(number((relu & 0xFFFF).astype(SHORT), "f16"), np.where(np.signbit(values) & ~np.isnan(values), 0, values))


@pytest.mark.parametrize("kind", NARROW)
@pytest.mark.parametrize("relu", ["", ".relu"])
def test_f32_to_narrow(kind, relu):
    form, size, _, nans, nan = NARROW[kind]
    codes = [decoded(kind, code) for code in range(1 << (size - 1)) if code not in nans]
    finite = np.array([x for x in codes if math.isfinite(x)], np.float32)
    ties = (finite[1:] + finite[:-1]) / 2
    near_ties = [ties, np.nextafter(ties, FLOAT.type(0)), np.nextafter(ties, FLOAT.type(1e9))]
    x = np.concatenate([finite, *near_ties, f32_samples(300, 4)])
    a, b = np.concatenate([x, -x]), np.concatenate([-x, x])[::-1].copy()
    text = f"cvt.rn.satfinite{relu}.{kind}x2.f32 %out, %in0, %in1;"
    if kind == "e2m1":
        text = f".reg .b8 %x; {text.replace('%out', '%x')} cvt.u16.u8 %out, %x;"
    got = elementwise(text, [a, b], SHORT)
    for half, source in ((got >> field(kind), a), (got & (1 << field(kind)) - 1, b)):
        isnan = np.isnan(source)
        want = rounded(number(source, "f32"), form, saturate=True)
        if relu:
            want = np.where(np.signbit(want), 0, want)
        same(np.array([decoded(kind, int(code)) for code in half[~isnan]]), want[~isnan])
        assert set(half[isnan].tolist()) <= {nan}


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_f16_to_narrow(kind):
    codes = np.arange(0, 65536, 11, dtype=SHORT)
    pairs = codes | codes[::-1].astype(WORD) << 16
    got = elementwise(f"cvt.rn.satfinite.{kind}x2.f16x2 %out, %in0;", [pairs], SHORT)
    values = number(codes, "f16")
    want = rounded(values, NARROW[kind][0], saturate=True)
    same(np.array([decoded(kind, int(code)) for code in got & 0xFF]), want)
    np.testing.assert_array_equal(got & 0xFF, (got >> 8)[::-1])


def test_powers_of_two():
    powers = [np.exp2(np.arange(-149.0, 128)), np.exp2(np.arange(-126.0, 127)) * 1.25]
    x = np.concatenate([*powers, SPECIAL_F32[~np.isnan(SPECIAL_F32)]]).astype(np.float32)
    for mode in ("rz", "rp"):
        got = elementwise(f"cvt.{mode}.satfinite.ue8m0x2.f32 %out, %in0, %in1;", [x, x[::-1].copy()], SHORT)
        whole = math.floor if mode == "rz" else math.ceil
        exponents = [-127 if v == 0 else 127 if math.isinf(v) else whole(math.log2(abs(v))) for v in x.tolist()]
        want = np.clip(exponents, -127, 127) + 127
        exact = bits_of(x) & 0x7FFFFFFF
        want[exact == 0x7F7FFFFF] = 254  # its log2 rounds up
        want[exact == 0x3F7FFFFF] = 126 if mode == "rz" else 127
        want[exact == 0x007FFFFF] = 0 if mode == "rz" else 1
        np.testing.assert_array_equal(got >> 8, want)
        np.testing.assert_array_equal(got & 0xFF, want[::-1])
    large = f32([0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x7F000000])
    unbounded = elementwise("cvt.rp.ue8m0x2.f32 %out, %in0, %in0;", [large], SHORT)
    np.testing.assert_array_equal(unbounded, [0xFFFF, 0xFFFF, 0xFFFF, 0xFEFE])
    back = elementwise("cvt.rn.bf16x2.ue8m0x2 %out, %in0;", [np.arange(256, dtype=SHORT)], WORD)
    same(number((back & 0xFFFF).astype(SHORT), "bf16"), np.append(np.exp2(np.arange(-127.0, 128)), np.nan))
    halves = np.array([0x3F80, 0x3F81, 0x7F80, 0x0040], SHORT) | np.uint32(0x40000000)
    got = elementwise("cvt.rp.satfinite.ue8m0x2.bf16x2 %out, %in0;", [halves], SHORT)
    np.testing.assert_array_equal(got, 128 << 8 | np.array([127, 128, 254, 0]))


def test_pack_of_integers():
    a = np.array([0, 1, -1, 200, -200, 40000, -40000, 2**31 - 1, -(2**31)], np.int32)
    b = a[::-1].copy()
    for kind, n in (("s16", 16), ("u16", 16), ("s8", 8), ("u8", 8), ("s4", 4), ("u2", 2)):
        low, high = (-(2 ** (n - 1)), 2 ** (n - 1) - 1) if kind[0] == "s" else (0, 2**n - 1)
        fields = [np.clip(x, low, high).astype(np.int64) & (1 << n) - 1 for x in (a, b)]
        want = fields[0] << n | fields[1]
        if n == 16:
            got = elementwise(f"cvt.pack.sat.{kind}.s32 %out, %in0, %in1;", [a, b], WORD)
        else:
            got = elementwise(f"cvt.pack.sat.{kind}.s32.b32 %out, %in0, %in1, %in0;", [a, b], WORD)
            want |= a.astype(np.int64) << 2 * n
        np.testing.assert_array_equal(got, want & 0xFFFFFFFF)


REFUSED = """
cvt.f16.f32 %h, %r
cvt.s32.f32 %r, %r
cvt.f32.s32 %r, %r
cvt.rn.f32.f16.wrong %r, %h
cvt.rs.f16x2.f32 %r, %r, %r, %r
cvt.rn.e4m3x2.f32 %h, %r, %r
cvt.rn.satfinite.e2m3x2.f16x2 %h, %r
cvt.u64.u32 %r, %r
cvt.u32.u64 %r, %r
cvt.rna.f16.f32 %h, %r
cvt.rn.satfinite.e4m3x4.f32 %r, {%r, %r, %r, %r}
cvt.relu.f32.f32 %r, %r
cvt.pack.sat.u8.s32 %r, %r, %r
mov.b64 %d, %r
mov.b32 %r, {%h, %h, %h}
mov.u32 %r, %clock64
mov.f16 %h, %h
mov.u32 %r, %nosuchregister
"""


@pytest.mark.parametrize("text", REFUSED.strip().split("\n"))
def test_what_is_not_executed_is_refused(text):
    with pytest.raises(UnsupportedInstruction):
        run(f".visible .entry k() {{ .reg .b16 %h; .reg .b32 %r; .reg .b64 %d; {text}; ret; }}")
