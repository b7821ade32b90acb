"""Float arithmetic in every type and rounding against exact fractions, approximated functions against float64."""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_ssd.emulator.decode import UnsupportedInstruction

from .number_formats import (
    BF16,
    F16,
    F32,
    F64,
    SPECIAL_F32,
    Format,
    bits_of,
    f32,
    f32_samples,
    fractions,
    from_bf16,
    round_to,
    same,
)
from .ptx_runner import bound, elementwise, on_silicon, run

pytestmark = pytest.mark.silicon

FLOAT, DOUBLE, HALF, WORD, LONG = (np.dtype(t) for t in (np.float32, np.float64, np.float16, np.uint32, np.uint64))
MODES = ["rn", "rz", "rm", "rp"]
EXACT: dict[str, Callable[..., Fraction]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "fma": lambda a, b, c: a * b + c,
    "div": lambda a, b: a / b, "rcp": lambda a: 1 / a,
}  # fmt: skip


def arity(name: str) -> int:
    return {"fma": 3, "rcp": 1, "sqrt": 1}.get(name, 2)


def operands(name: str) -> str:
    return ", ".join(f"%in{k}" for k in range(arity(name)))


def finite_inputs(name: str) -> list[np.ndarray]:
    """Operands of similar size, so that roundings, cancellations, ties and denormal results happen, and of any size."""
    n, rng = 400, np.random.default_rng(len(name))
    inputs = [f32_samples(n, seed, special=False)[: n - 20] for seed in range(arity(name))]
    short = [rng.integers(-64, 64, n) * 2.0 ** rng.integers(-140, -120, n) for _ in inputs] if name != "mul" else []
    inputs = [np.concatenate([a, s]) for a, s in zip(inputs, short, strict=True)] if short else inputs
    inputs = [a.astype(np.float32) for a in inputs]
    if name in ("div", "rcp"):
        inputs[-1][inputs[-1] == 0] = 3
    return inputs


def compare_to_exact(got: np.ndarray, exact: list[Fraction], form: Format, mode: str) -> None:
    want = np.array([round_to(x, form, mode) for x in exact])
    np.testing.assert_array_equal(got.astype(np.float64), want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", EXACT)
def test_every_rounding_of_f32(name, mode):
    inputs = finite_inputs(name)
    got = elementwise(f"{name}.{mode}.f32 %out, {operands(name)};", inputs, FLOAT, sanitize=name == "add")
    compare_to_exact(got, [EXACT[name](*row) for row in zip(*map(fractions, inputs), strict=True)], F32, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", EXACT)
def test_every_rounding_of_f64(name, mode):
    rng = np.random.default_rng(3)
    inputs = [rng.standard_normal(200) * 2.0 ** rng.integers(-30, 30, 200) for _ in range(arity(name))]
    got = elementwise(f"{name}.{mode}.f64 %out, {operands(name)};", inputs, DOUBLE)
    compare_to_exact(got, [EXACT[name](*row) for row in zip(*map(fractions, inputs), strict=True)], F64, mode)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
@pytest.mark.parametrize("modifiers", ["rn", "rz", "rm.ftz", "rn.ftz"])
def test_packed_f32_is_two_f32(name, modifiers):
    inputs = [f32_samples(300, seed) for seed in range(arity(name))]
    inputs = [a[: len(a) // 2 * 2] for a in inputs]
    packed = elementwise(f"{name}.{modifiers}.f32x2 %out, {operands(name)};", [a.view(LONG) for a in inputs], LONG)
    single = elementwise(f"{name}.{modifiers}.f32 %out, {operands(name)};", inputs, FLOAT)
    np.testing.assert_array_equal(packed.view(WORD), bits_of(single))


def flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


@pytest.mark.parametrize("name", ["add", "mul", "fma", "div"])
def test_special_values_ftz_and_sat(name):
    function = {"add": np.add, "mul": np.multiply, "div": np.divide, "fma": None}[name]
    i, j = np.indices((len(SPECIAL_F32),) * 2).reshape(2, -1)
    inputs = [SPECIAL_F32[i], SPECIAL_F32[j], SPECIAL_F32[(i * 7 + j) % len(SPECIAL_F32)]][: arity(name)]
    rounding = ".rn" if name in ("fma", "div") else ""

    def plain(*x: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            if function:
                return function(*x)
            wide = [v.astype(np.float64) for v in x]
            return (wide[0] * wide[1] + wide[2]).astype(np.float32)

    got = elementwise(f"{name}{rounding}.f32 %out, {operands(name)};", inputs, FLOAT)
    want = plain(*inputs)
    if name != "fma":  # its sum in f64 may round twice
        same(got, want)
    assert set(bits_of(got[np.isnan(want)])) == {0x7FFFFFFF}
    ftz = elementwise(f"{name}{rounding}.ftz.f32 %out, {operands(name)};", inputs, FLOAT)
    same(ftz, flushed(plain(*map(flushed, inputs)))) if name != "fma" else None
    assert not np.any((ftz != 0) & (np.abs(ftz) < np.float32(2.0**-126)))
    if name != "div":
        sat = elementwise(f"{name}{rounding}.sat.f32 %out, {operands(name)};", inputs, FLOAT)
        np.testing.assert_array_equal(sat, np.clip(np.nan_to_num(got, nan=0.0), 0, 1))


def test_exact_zeros_take_their_sign_from_the_rounding():
    a, b = f32([0x3F800000, 0x80000000, 0x80000000]), f32([0xBF800000, 0x80000000, 0])
    for mode, signs in (("rn", [0, 1, 0]), ("rz", [0, 1, 0]), ("rp", [0, 1, 0]), ("rm", [1, 1, 1])):
        got = elementwise(f"add.{mode}.f32 %out, %in0, %in1;", [a, b], FLOAT)
        np.testing.assert_array_equal(np.signbit(got), np.array(signs, bool))


@pytest.mark.parametrize("mode", MODES)
def test_square_roots(mode):
    x = np.abs(f32_samples(300, 5, special=False))
    got = elementwise(f"sqrt.{mode}.f32 %out, %in0;", [x], FLOAT)
    for value, root in zip(x, got, strict=True):  # the neighbours decide: no rounding of a reference is needed
        square, exact = Fraction(float(root)) ** 2, Fraction(float(value))
        below = Fraction(float(np.nextafter(root, np.float32(-1))))
        above = Fraction(float(np.nextafter(root, np.float32(np.inf))))
        if mode in ("rz", "rm"):
            assert square <= exact < above**2
        elif mode == "rp":
            assert square >= exact > below**2 or exact == 0
        else:
            middle = Fraction(float(root))
            assert exact == 0 or ((below + middle) / 2) ** 2 <= exact <= ((above + middle) / 2) ** 2
    got = elementwise(f"sqrt.{mode}.f64 %out, %in0;", [np.array([6.25, -1.0, np.inf])], DOUBLE)
    np.testing.assert_array_equal(got, [2.5, np.nan, np.inf])


# ---- f16 and bf16 ----------------------------------------------------------------------------------------------------


def widened(x: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return x.astype(np.float64)


def halves(kind: str, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """16-bit patterns (all classes of numbers) and their values."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**16, n, np.uint16)
    near = rng.integers(0x3000, 0x4400, n // 2) if kind == "f16" else rng.integers(0x3E00, 0x4100, n // 2)
    bits[: n // 2] = near.astype(np.uint16) | (bits[: n // 2] & 0x8000)
    return bits, widened(bits.view(np.float16) if kind == "f16" else from_bf16(bits))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
def test_halves_round_once(name, kind):
    form = F16 if kind == "f16" else BF16
    columns = [halves(kind, 1200, seed) for seed in range(arity(name))]
    keep = np.all([np.isfinite(values) for _, values in columns], axis=0)
    inputs = [bits[keep] for bits, _ in columns]
    exact = [EXACT[name](*row) for row in zip(*(fractions(values[keep]) for _, values in columns), strict=True)]
    got = elementwise(
        f"{name}{'.rn' if name == 'fma' else ''}.{kind} %out, {operands(name)};", inputs, np.dtype(np.uint16)
    )
    compare_to_exact(got.view(np.float16) if kind == "f16" else from_bf16(got), exact, form, "rn")


def test_a_summand_far_below_a_tie_decides():
    """7 * 37 and 9 * 29 lie between two neighbours in bf16; what is added is too small for f64."""
    rows = [(s * a, b, t * 2.0**-100) for a, b in ((7, 37), (9, 29)) for s in (1, -1) for t in (1, 0, -1)]
    columns = [np.array(column, np.float32) for column in zip(*rows, strict=True)]
    inputs = [(bits_of(column) >> 16).astype(np.uint16) for column in columns]
    got = elementwise("fma.rn.bf16 %out, %in0, %in1, %in2;", inputs, np.dtype(np.uint16))
    compare_to_exact(from_bf16(got), [Fraction(a) * b + Fraction(c) for a, b, c in rows], BF16, "rn")


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["add", "mul", "fma", "max", "min"])
def test_packed_halves_are_two_halves(name, kind):
    inputs = [halves(kind, 600, seed)[0] for seed in range(arity(name))]
    rn = ".rn" if name == "fma" else ""
    single = elementwise(f"{name}{rn}.{kind} %out, {operands(name)};", inputs, np.dtype(np.uint16))
    packed = elementwise(f"{name}{rn}.{kind}x2 %out, {operands(name)};", [a.view(WORD) for a in inputs], WORD)
    np.testing.assert_array_equal(packed.view(np.uint16), single)


def test_modifiers_of_halves():
    # denormals, 1, -1, 4, NaN, infinity
    a = np.array([0x0001, 0x8001, 0x3C00, 0xBC00, 0x4400, 0x7E01, 0x7C00], np.uint16)
    one, zero = np.full(7, 0x3C00, np.uint16), np.zeros(7, np.uint16)
    for text, want in [
        ("fma.rn.f16 %out, %in0, %in1, %in2;", [0x0001, 0x8001, 0x3C00, 0xBC00, 0x4400, 0x7FFF, 0x7C00]),
        ("fma.rn.ftz.f16 %out, %in0, %in1, %in2;", [0, 0, 0x3C00, 0xBC00, 0x4400, 0x7FFF, 0x7C00]),
        ("fma.rn.sat.f16 %out, %in0, %in1, %in2;", [1, 0, 0x3C00, 0, 0x3C00, 0, 0x3C00]),
        ("fma.rn.relu.f16 %out, %in0, %in1, %in2;", [1, 0, 0x3C00, 0, 0x4400, 0x7FFF, 0x7C00]),
        ("add.ftz.f16 %out, %in0, %in2;", [0, 0, 0x3C00, 0xBC00, 0x4400, 0x7FFF, 0x7C00]),
        ("abs.f16 %out, %in0;", [1, 1, 0x3C00, 0x3C00, 0x4400, 0x7E01, 0x7C00]),
        ("neg.f16 %out, %in0;", [0x8001, 0x0001, 0xBC00, 0x3C00, 0xC400, 0xFE01, 0xFC00]),
        ("neg.ftz.f16 %out, %in0;", [0x8000, 0x0000, 0xBC00, 0x3C00, 0xC400, 0xFE01, 0xFC00]),
    ]:
        got = elementwise(text, [a, one, zero], np.dtype(np.uint16))
        if on_silicon() and text[:3] in ("abs", "neg"):  # PTX leaves the bits of a NaN open
            assert np.isnan(got.view(np.float16)[5])
            got[5] = want[5]
        np.testing.assert_array_equal(got, np.array(want, np.uint16), err_msg=text)
    packed = elementwise("neg.ftz.f16x2 %out, %in0;", [a[:4].view(WORD)], WORD)
    np.testing.assert_array_equal(packed.view(np.uint16), [0x8000, 0x0000, 0xBC00, 0x3C00])


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_mixed_precision(kind):
    (a, x), (b, y) = halves(kind, 500, 0), halves(kind, 500, 1)
    c = f32_samples(500, 2)[:500]
    keep = np.isfinite(x) & np.isfinite(y) & np.isfinite(c)
    a, b, c, x, y = a[keep], b[keep], c[keep], x[keep], y[keep]
    columns = list(zip(fractions(x), fractions(y), fractions(c), strict=True))
    for mode in ("rn", "rz"):
        got = elementwise(f"fma.{mode}.f32.{kind} %out, %in0, %in1, %in2;", [a, b, c], FLOAT)
        compare_to_exact(got, [p * q + s for p, q, s in columns], F32, mode)
    got = elementwise(f"sub.f32.{kind} %out, %in0, %in1;", [a, c], FLOAT, sanitize=True)
    compare_to_exact(got, [p - s for p, _, s in columns], F32, "rn")


# ---- signs, minimum, maximum -----------------------------------------------------------------------------------------


def test_signs():
    x, y = f32_samples(200, 1), f32_samples(200, 2)
    if on_silicon():  # PTX leaves the bits of a NaN open
        x, y = np.nan_to_num(x), np.nan_to_num(y)
    np.testing.assert_array_equal(bits_of(elementwise("neg.f32 %out, %in0;", [x], FLOAT)), bits_of(x) ^ 0x80000000)
    np.testing.assert_array_equal(bits_of(elementwise("abs.f32 %out, %in0;", [x], FLOAT)), bits_of(x) & 0x7FFFFFFF)
    same(elementwise("neg.ftz.f32 %out, %in0;", [x], FLOAT), -flushed(x))
    copied = elementwise("copysign.f32 %out, %in0, %in1;", [x, y], FLOAT)
    np.testing.assert_array_equal(bits_of(copied), (bits_of(x) & 0x80000000) | (bits_of(y) & 0x7FFFFFFF))
    a, b = widened(x), widened(y)
    same(elementwise("neg.f64 %out, %in0;", [a], DOUBLE), -a)
    same(elementwise("abs.f64 %out, %in0;", [a], DOUBLE), np.abs(a))
    same(elementwise("copysign.f64 %out, %in0, %in1;", [a, b], DOUBLE), np.copysign(b, a))


def extreme(name: str, nan: bool, *values: float) -> float:
    numbers = [v for v in values if not math.isnan(v)]
    if not numbers or (nan and len(numbers) < len(values)):
        return math.nan
    return (max if name == "max" else min)(numbers, key=lambda v: (v, math.copysign(1, v)))


def extremes(name: str, nan: str, *columns: np.ndarray) -> np.ndarray:
    return np.array([extreme(name, bool(nan), *map(float, row)) for row in zip(*columns, strict=True)], np.float32)


@pytest.mark.parametrize("name", ["min", "max"])
@pytest.mark.parametrize("nan", ["", ".NaN"])
def test_extremes(name, nan):
    i, j = np.indices((len(SPECIAL_F32),) * 2).reshape(2, -1)
    a, b, c = SPECIAL_F32[i], SPECIAL_F32[j], SPECIAL_F32[(3 * i + j) % len(SPECIAL_F32)]
    two, three = extremes(name, nan, a, b), extremes(name, nan, a, b, c)
    got = elementwise(f"{name}{nan}.f32 %out, %in0, %in1;", [a, b], FLOAT)
    same(got, two)
    assert set(bits_of(got[np.isnan(got)]).tolist()) == {0x7FFFFFFF}
    same(elementwise(f"{name}{nan}.f32 %out, %in0, %in1, %in2;", [a, b, c], FLOAT), three)
    sign = np.where(np.signbit(a) != np.signbit(b), -1, 1).astype(np.float32)
    absolute = extremes(name, nan, np.abs(a), np.abs(b))
    same(elementwise(f"{name}{nan}.xorsign.abs.f32 %out, %in0, %in1;", [a, b], FLOAT), absolute * sign)
    same(
        elementwise(f"{name}{nan}.ftz.f32 %out, %in0, %in1;", [a, b], FLOAT),
        extremes(name, nan, flushed(a), flushed(b)),
    )
    if not nan:
        same(elementwise(f"{name}.f64 %out, %in0, %in1;", [widened(a), widened(b)], DOUBLE), two.astype(np.float64))


@pytest.mark.parametrize("nan", ["", ".NaN"])
def test_extremes_of_halves(nan):
    (a, x), (b, y) = halves("f16", 400, 4), halves("f16", 400, 5)
    got = elementwise(f"max{nan}.f16 %out, %in0, %in1;", [a, b], np.dtype(np.uint16)).view(np.float16)
    want = np.array([extreme("max", bool(nan), *row) for row in zip(x, y, strict=True)])
    same(got.astype(np.float64), want)


# ---- approximated functions ------------------------------------------------------------------------------------------


def test_ex2():
    x = np.concatenate([np.random.default_rng(0).uniform(-150, 130, 30000), np.arange(-150, 129)]).astype(np.float32)
    exact = np.exp2(x.astype(np.float64))
    got = elementwise("ex2.approx.ftz.f32 %out, %in0;", [x], FLOAT).astype(np.float64)
    normal = (exact >= 2.0**-126) & (exact < 2.0**128)
    # PTX ISA: 2 ulp of f32.
    assert np.max(np.abs(got[normal] / exact[normal] - 1)) < bound(ours=2.0**-22.5, documented=2.0**-22)
    assert np.all(got[exact >= 2.0**128] == np.inf) and np.all(got[exact < 2.0**-126 * (1 - 2.0**-24)] == 0)
    whole = (x == np.round(x)) & normal
    np.testing.assert_allclose(got[whole], exact[whole], rtol=bound(ours=0, documented=2.0**-22))
    kept = elementwise("ex2.approx.f32 %out, %in0;", [x], FLOAT).astype(np.float64)
    tiny = exact < 2.0**-126
    np.testing.assert_allclose(kept[tiny], exact[tiny], rtol=0, atol=bound(ours=2.0**-149, documented=2.0**-148))


def test_ex2_of_special_values():
    x = f32([0xFF800000, 0x7F800000, 0x7FC00000, 0, 0x80000000, 1, 0xC3160000, 0xF149F2CA, 0x7149F2CA])
    got = elementwise("ex2.approx.ftz.f32 %out, %in0;", [x], FLOAT)
    same(got, np.array([0, np.inf, np.nan, 1, 1, 1, 0, 0, np.inf], np.float32))
    assert bits_of(got)[2] == 0x7FFFFFFF


FUNCTIONS = [
    ("rcp", lambda x: 1 / x, 2.0**-23),
    ("rsqrt", lambda x: 1 / np.sqrt(x), 2.0**-22),
    ("sqrt", np.sqrt, 2.0**-22),
    ("lg2", np.log2, 2.0**-22),
    ("tanh", np.tanh, 2.0**-11),
    ("sin", np.sin, 2.0**-20),
    ("cos", np.cos, 2.0**-20),
]


@pytest.mark.parametrize(("name", "function", "tolerance"), FUNCTIONS)
def test_functions(name, function, tolerance):
    x = (np.random.default_rng(1).standard_normal(2000) * 3).astype(np.float32)
    if name in ("rsqrt", "sqrt", "lg2"):
        x = np.abs(x)
    for ftz in ("", ".ftz") if name != "tanh" else ("",):
        got = elementwise(f"{name}.approx{ftz}.f32 %out, %in0;", [x], FLOAT)
        exact = function(x.astype(np.float64))
        allowed = tolerance * np.abs(exact) + 2.0**-22
        if on_silicon() and name in ("sin", "cos"):  # PTX ISA; the tolerances of the others are not below its own
            allowed = np.where(np.abs(x) <= 2 * np.pi, 2.0**-20.5, 2.0**-14.7)
        assert np.all(np.abs(got - exact) <= allowed)


@pytest.mark.parametrize(("name", "inputs", "want"), [
    ("rcp", [0, -0.0, np.inf, -np.inf, np.nan, 2.0**-140], [np.inf, -np.inf, 0, -0.0, np.nan, np.inf]),
    ("rsqrt", [0, -0.0, np.inf, -1, np.nan, 2.0**-140], [np.inf, -np.inf, 0, np.nan, np.nan, np.inf]),
    ("sqrt", [0, -0.0, np.inf, -1, np.nan, 2.0**-140], [0, -0.0, np.inf, np.nan, np.nan, 0]),
    ("lg2", [0, -0.0, np.inf, -1, np.nan, 2.0**-140], [-np.inf, -np.inf, np.inf, np.nan, np.nan, -np.inf]),
    ("sin", [0, -0.0, np.inf, -np.inf, np.nan, 2.0**-140], [0, -0.0, np.nan, np.nan, np.nan, 0]),
    ("cos", [0, -0.0, np.inf, -np.inf, np.nan, 2.0**-140], [1, 1, np.nan, np.nan, np.nan, 1]),
])  # fmt: skip
def test_functions_of_special_values(name, inputs, want):
    got = elementwise(f"{name}.approx.ftz.f32 %out, %in0;", [np.array(inputs, np.float32)], FLOAT)
    same(got, np.array(want, np.float32))
    assert set(bits_of(got[np.isnan(got)])) <= {0x7FFFFFFF}


def test_quick_divisions():
    a, b = f32_samples(1000, 7), f32_samples(1000, 8)
    with np.errstate(all="ignore"):
        exact = a / b
    middle = (np.abs(b) >= 2.0**-126) & (np.abs(b) <= 2.0**126)
    with np.errstate(all="ignore"):
        ftz = flushed(flushed(a) / flushed(b))
    for name, quotient in (("div.full", exact), ("div.approx", exact), ("div.full.ftz", ftz), ("div.approx.ftz", ftz)):
        got, want = elementwise(f"{name}.f32 %out, %in0, %in1;", [a, b], FLOAT)[middle], quotient[middle]
        if on_silicon():  # PTX ISA: 2 ulp
            with np.errstate(invalid="ignore"):  # infinities and NaNs
                near = np.abs(widened(got) - widened(want)) <= 2 * np.spacing(np.abs(want))
            got = np.where(near, want, got)
        same(got, want)
    large, dividend = np.full(3, 2.0**127, np.float32), np.array([2.0**127, -1, np.inf], np.float32)
    got = elementwise("div.approx.f32 %out, %in0, %in1;", [dividend, large], FLOAT)
    same(got, np.array([0, -0.0, np.nan], np.float32))


def test_f64_approximations_work_on_upper_words():
    x = np.array([3.0, -7.1, 1e300, 0.0, np.inf, np.nan, 2.0**-1023, 1.5 * 2.0**1023])
    got = elementwise("rcp.approx.ftz.f64 %out, %in0;", [x], DOUBLE)
    np.testing.assert_allclose(got[:3], 1 / x[:3], rtol=2.0**-20)
    np.testing.assert_array_equal(got[3:], [np.inf, 0, np.nan, np.inf, 0])
    assert not np.any(bits_of(got[:5]) & 0xFFFFFFFF)
    y = x[[0, 2]]
    got = elementwise("rsqrt.approx.f64 %out, %in0;", [y], DOUBLE)
    np.testing.assert_allclose(got, 1 / np.sqrt(y), rtol=2.0**-50)
    got = elementwise("rsqrt.approx.ftz.f64 %out, %in0;", [y], DOUBLE)
    np.testing.assert_allclose(got, 1 / np.sqrt(y), rtol=2.0**-20)
    assert not np.any(bits_of(got) & 0xFFFFFFFF)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["ex2", "tanh"])
def test_functions_of_halves(name, kind):
    bits, values = halves(kind, 1000, 6)
    ftz = ".ftz" if (name, kind) == ("ex2", "bf16") else ""
    got = elementwise(f"{name}.approx{ftz}.{kind} %out, %in0;", [bits], np.dtype(np.uint16))
    number = (got.view(np.float16) if kind == "f16" else from_bf16(got)).astype(np.float64)
    with np.errstate(over="ignore"):
        exact = {"ex2": np.exp2, "tanh": np.tanh}[name](values)
    smallest, digits, limit = (2.0**-14, 11, 65504) if kind == "f16" else (2.0**-126, 8, 3.3e38)
    fits = (np.abs(exact) >= smallest) & (np.abs(exact) <= limit)
    rtol, atol = 2.0**-digits * 1.01, 0.0
    if on_silicon():  # PTX ISA: of ex2 the relative error, of tanh the absolute one
        largest = {"ex2 f16": 2.0**-9.9, "ex2 bf16": 2.0**-7, "tanh f16": 2.0**-10.987, "tanh bf16": 2.0**-8}
        rtol, atol = (largest[f"{name} {kind}"] * (name == f) for f in ("ex2", "tanh"))
    np.testing.assert_allclose(number[fits], exact[fits], rtol=rtol, atol=atol)
    assert np.all(np.isnan(number) == np.isnan(values))
    packed = elementwise(f"{name}.approx{ftz}.{kind}x2 %out, %in0;", [bits.view(WORD)], WORD)
    np.testing.assert_array_equal(packed.view(np.uint16), got)


# ---- properties ------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(*[st.integers(0, 2**32 - 1)] * 3), min_size=32, max_size=96), st.sampled_from(MODES))
@settings(deadline=None, max_examples=20)
def test_fma_of_any_bits(rows, mode):
    inputs = [np.array(column, np.uint32).view(np.float32) for column in zip(*rows, strict=True)]
    got = elementwise(f"fma.{mode}.f32 %out, %in0, %in1, %in2;", inputs, FLOAT)
    for result, *values in zip(got, *inputs, strict=True):
        if all(math.isfinite(v) for v in values):
            a, b, c = fractions(values)
            assert float(result) == round_to(a * b + c, F32, mode)


REFUSED = """
add.rna.f32 %r, %r, %r
add.sat.f64 %d, %d, %d
fma.rn.relu.f32 %r, %r, %r, %r
div.f32 %r, %r, %r
ex2.f32 %r, %r
ex2.approx.bf16 %h, %h
tanh.approx.f64 %d, %d
max.xorsign.f32 %r, %r, %r
mul.f32.f16 %r, %h, %r
rcp.approx.f64 %d, %d
add.f32 %r, %r, %d
fma.rn.oob.f16 %h, %h, %h, %h
sqrt.f32 %r, %r
add.ftz.bf16 %h, %h, %h
max.NaN.f64 %d, %d, %d
"""


@pytest.mark.parametrize("text", REFUSED.strip().split("\n"))
def test_what_is_not_executed_is_refused(text):
    with pytest.raises(UnsupportedInstruction):
        run(f".visible .entry k() {{ .reg .b16 %h; .reg .b32 %r; .reg .b64 %d; {text}; ret; }}")


def test_literals():
    got = elementwise("fma.rn.f32 %out, %in0, 0f40000000, 0d3FE0000000000000;", [np.ones(3, np.float32)], FLOAT)
    np.testing.assert_array_equal(got, [2.5] * 3)
    got = elementwise("fma.rn.f64 %out, %in0, 0d4000000000000000, 0d3FE0000000000000;", [np.ones(3)], DOUBLE)
    np.testing.assert_array_equal(got, [2.5] * 3)
