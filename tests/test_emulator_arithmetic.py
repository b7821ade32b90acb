"""Integer arithmetic, carry chains, bits, comparisons and selection, against Python's integers."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_ssd.emulator.decode import UnsupportedInstruction

from .number_formats import SPECIAL_F32, bits_of, f32
from .ptx_runner import elementwise, run

pytestmark = pytest.mark.silicon

DTYPES = {
    "s16": np.dtype(np.int16), "u16": np.dtype(np.uint16), "s32": np.dtype(np.int32),
    "u32": np.dtype(np.uint32), "s64": np.dtype(np.int64), "u64": np.dtype(np.uint64),
}  # fmt: skip
WORD = DTYPES["u32"]
EDGES = [0, 1, 2, 3, 7, 8, 15, 16, 31, 32, 33, 63, 64, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x10000]


def bits(kind: str) -> int:
    return int(kind[1:])


def values(kind: str, seed: int = 0) -> list[int]:
    """Edge cases of a type and a few random numbers."""
    n, rng = bits(kind), np.random.default_rng(seed)
    low, high = (-(2 ** (n - 1)), 2 ** (n - 1) - 1) if kind[0] == "s" else (0, 2**n - 1)
    numbers = {*EDGES, *(-x for x in EDGES), low, low + 1, high, high - 1, high // 2}
    numbers.update(int(x) for x in rng.integers(low, high, 5, DTYPES[kind], endpoint=True))
    return sorted(x for x in numbers if low <= x <= high)


def columns(*kinds: str) -> list[np.ndarray]:
    """All combinations of the values of one or two types; the third of three types is random."""
    rows = list(itertools.product(*(values(kind, seed) for seed, kind in enumerate(kinds[:2]))))
    arrays = [np.array(column, DTYPES[kind]) for column, kind in zip(zip(*rows, strict=True), kinds[:2], strict=True)]
    if len(kinds) > 2:
        info = np.iinfo(DTYPES[kinds[2]])
        arrays.append(np.random.default_rng(9).integers(info.min, info.max, len(rows), DTYPES[kinds[2]], endpoint=True))
    return arrays


def check(ptx: str, out: str, inputs: list[np.ndarray], expected: Callable[..., int], **options: object) -> None:
    """The instruction's results are Python's, wrapped to the type `out`."""
    operands = ", ".join(f"%in{k}" for k in range(len(inputs)))
    text = ptx if ";" in ptx else f"{ptx} %out, {operands};"
    got = elementwise(text, inputs, DTYPES[out], **options)
    want = [expected(*row) for row in zip(*(a.tolist() for a in inputs), strict=True)]
    wrapped = np.array([w & (1 << bits(out)) - 1 for w in want], f"u{bits(out) // 8}")
    np.testing.assert_array_equal(bits_of(got), wrapped)


def quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "min": min,
    "max": max,
}


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic(name, kind):
    check(f"{name}.{kind}", kind, columns(kind, kind), ARITHMETIC[name], sanitize=kind == "s32")


@pytest.mark.parametrize("kind", DTYPES)
def test_high_products_and_sums(kind):
    n = bits(kind)
    check(f"mul.hi.{kind}", kind, columns(kind, kind), lambda a, b: a * b >> n)
    check(f"mad.lo.{kind}", kind, columns(kind, kind, kind), lambda a, b, c: a * b + c)
    check(f"mad.hi.{kind}", kind, columns(kind, kind, kind), lambda a, b, c: (a * b >> n) + c)
    check(f"sad.{kind}", kind, columns(kind, kind, kind), lambda a, b, c: abs(a - b) + c)


@pytest.mark.parametrize(("kind", "wide"), [("s16", "s32"), ("u16", "u32"), ("s32", "s64"), ("u32", "u64")])
def test_wide_products(kind, wide):
    check(f"mul.wide.{kind}", wide, columns(kind, kind), lambda a, b: a * b)
    check(f"mad.wide.{kind}", wide, columns(kind, kind, wide), lambda a, b, c: a * b + c)


@pytest.mark.parametrize("kind", DTYPES)
def test_division(kind):
    a, b = columns(kind, kind)
    a, b = a[b != 0], b[b != 0]
    check(f"div.{kind}", kind, [a, b], quotient)  # the least number over -1 wraps
    check(f"rem.{kind}", kind, [a, b], lambda a, b: a - b * quotient(a, b))


@pytest.mark.parametrize("kind", ["s16", "s32", "s64"])
def test_signs(kind):
    check(f"abs.{kind}", kind, columns(kind), abs)
    check(f"neg.{kind}", kind, columns(kind), lambda a: -a)


def clamp(x: int) -> int:
    return min(max(x, -(2**31)), 2**31 - 1)


def test_saturation():
    check("add.sat.s32", "s32", columns("s32", "s32"), lambda a, b: clamp(a + b))
    check("sub.sat.s32", "s32", columns("s32", "s32"), lambda a, b: clamp(a - b))
    check("mad.hi.sat.s32", "s32", columns("s32", "s32", "s32"), lambda a, b, c: clamp((a * b >> 32) + c))
    check("min.relu.s32", "s32", columns("s32", "s32"), lambda a, b: max(min(a, b), 0))
    check("max.relu.s32", "s32", columns("s32", "s32"), lambda a, b: max(a, b, 0))


def signed(x: int, n: int) -> int:
    x &= (1 << n) - 1
    return x - (x >> (n - 1) << n)


@pytest.mark.parametrize("kind", ["s32", "u32"])
def test_24_bits(kind):
    def low(x: int) -> int:
        return signed(x, 24) if kind == "s32" else x & 0xFFFFFF

    check(f"mul24.lo.{kind}", kind, columns(kind, kind), lambda a, b: low(a) * low(b))
    check(f"mul24.hi.{kind}", kind, columns(kind, kind), lambda a, b: low(a) * low(b) >> 16)
    check(f"mad24.lo.{kind}", kind, columns(kind, kind, kind), lambda a, b, c: low(a) * low(b) + c)
    check(f"mad24.hi.{kind}", kind, columns(kind, kind, kind), lambda a, b, c: (low(a) * low(b) >> 16) + c)


def halves(x: int, is_signed: bool) -> tuple[int, int]:
    low, high = x & 0xFFFF, x >> 16 & 0xFFFF
    return (signed(low, 16), signed(high, 16)) if is_signed else (low, high)


PAIRS: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b, "min": min, "max": max,
    "min.relu": lambda a, b: max(min(a, b), 0), "max.relu": lambda a, b: max(a, b, 0),
}  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), [*((n, "s16x2") for n in PAIRS), *((n, "u16x2") for n in [*PAIRS][:3])])
def test_pairs_of_16_bits(name, kind):
    function = PAIRS[name]

    def both(a: int, b: int) -> int:
        low, high = (function(*pair) for pair in zip(halves(a, kind[0] == "s"), halves(b, kind[0] == "s"), strict=True))
        return low & 0xFFFF | (high & 0xFFFF) << 16

    a, b = columns("u32", "u32")
    check(f"{name}.{kind}", "u32", [a * np.uint32(2654435761), b * np.uint32(40503)], both)


@pytest.mark.parametrize("first", ["s32", "u32"])
@pytest.mark.parametrize("second", ["s32", "u32"])
def test_dot_products(first, second):
    def part(x: int, at: int, n: int, kind: str) -> int:
        return signed(x >> at, n) if kind == "s32" else x >> at & (1 << n) - 1

    rng = np.random.default_rng(1)
    inputs = [rng.integers(0, 2**32, 300, np.uint32) for _ in range(3)]
    four = range(0, 32, 8)
    check(
        f"dp4a.{first}.{second}",
        "u32",
        inputs,
        lambda a, b, c: c + sum(part(a, k, 8, first) * part(b, k, 8, second) for k in four),
    )
    for mode, start in (("lo", 0), ("hi", 16)):

        def expected(a: int, b: int, c: int, start: int = start) -> int:
            return c + sum(part(a, 16 * k, 16, first) * part(b, start + 8 * k, 8, second) for k in (0, 1))

        check(f"dp2a.{mode}.{first}.{second}", "u32", inputs, expected)


# ---- carries ---------------------------------------------------------------------------------------------------------

SPLIT = ".reg .b32 %a<2>, %b<2>, %c<2>; mov.b64 {%a0, %a1}, %in0; mov.b64 {%b0, %b1}, %in1;"


def test_carry_chain_adds_and_subtracts():
    inputs = columns("u64", "u64")
    for name, function in (("add", lambda a, b: a + b), ("sub", lambda a, b: a - b)):
        chain = f"{name}.cc.u32 %c0, %a0, %b0; {name}c.u32 %c1, %a1, %b1; mov.b64 %out, {{%c0, %c1}};"
        check(SPLIT + chain, "u64", inputs, function, sanitize=True)


def test_carry_chain_in_64_bits():
    """Bit 64 of a + b."""
    text = ".reg .b64 %x; add.cc.u64 %x, %in0, %in1; addc.u64 %out, 0, 0;"
    check(text, "u64", columns("u64", "u64"), lambda a, b: a + b >> 64)
    text = ".reg .b64 %x; sub.cc.u64 %x, %in0, %in1; subc.u64 %out, 0, 0;"
    check(text, "u64", columns("u64", "u64"), lambda a, b: a - b >> 64)


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("part", ["lo", "hi"])
def test_a_product_and_a_sum_with_a_carry(part, kind):
    n = bits(kind)

    def total(a: int, b: int, c: int) -> int:
        half = a * b >> n if part == "hi" else a * b
        return half % 2**n + c % 2**n

    inputs = columns(kind, kind, kind)
    check(f"mad.{part}.cc.{kind}", kind, inputs, total)
    text = f".reg .b{n} %x; mad.{part}.cc.{kind} %x, %in0, %in1, %in2; addc.u{n} %out, 0, 0;"
    check(text, kind, inputs, lambda a, b, c: total(a, b, c) >> n)


def test_carry_of_products():
    """The upper word of a 64-bit product, as libraries write it: partial products with carries."""
    text = (
        SPLIT
        + """.reg .b32 %p<4>;
        mul.lo.u32 %p0, %a0, %b0; mul.hi.u32 %p1, %a0, %b0;
        mad.lo.cc.u32 %p1, %a0, %b1, %p1; madc.hi.u32 %p2, %a0, %b1, 0;
        mad.lo.cc.u32 %p1, %a1, %b0, %p1; madc.hi.cc.u32 %p2, %a1, %b0, %p2; addc.u32 %p3, 0, 0;
        mad.lo.cc.u32 %p2, %a1, %b1, %p2; madc.hi.u32 %p3, %a1, %b1, %p3;
        mov.b64 %out, {%p2, %p3};"""
    )
    check(text, "u64", columns("u64", "u64"), lambda a, b: a * b >> 64)


def test_the_carry_belongs_to_the_lanes_that_compute_it():
    text = """.reg .b32 %x; .reg .pred %odd; and.b32 %x, %in0, 1; setp.ne.u32 %odd, %x, 0;
        add.cc.u32 %x, 0, 0; @%odd add.cc.u32 %x, 0xffffffff, 1; addc.u32 %out, 0, 0;"""
    check(text, "u32", [np.arange(75, dtype=np.uint32)], lambda a: a & 1)


# ---- logic and bits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["u16", "u32", "u64"])
def test_logic(kind):
    untyped, both = "b" + kind[1:], columns(kind, kind)
    check(f"and.{untyped}", kind, both, lambda a, b: a & b)
    check(f"or.{untyped}", kind, both, lambda a, b: a | b)
    check(f"xor.{untyped}", kind, both, lambda a, b: a ^ b)
    check(f"not.{untyped}", kind, both[:1], lambda a: ~a)
    check(f"cnot.{untyped}", kind, both[:1], lambda a: int(a == 0))


@pytest.mark.parametrize("kind", DTYPES)
def test_shift_counts_are_clamped(kind):
    inputs = columns(kind, "u32")
    check(f"shr.{kind}", kind, inputs, lambda a, n: a >> min(n, 64))
    check(f"shl.b{kind[1:]}", kind, inputs, lambda a, n: a << min(n, 64))
    check(f"shr.b{kind[1:]}", kind, inputs, lambda a, n: (a & (1 << bits(kind)) - 1) >> min(n, 64))


@pytest.mark.parametrize(("mode", "count"), [("wrap", lambda n: n & 31), ("clamp", lambda n: min(n, 32))])
def test_funnel_shift(mode, count):
    inputs = [*columns("u32", "u32"), np.arange(len(columns("u32", "u32")[0]), dtype=np.uint32) % 70]
    check(f"shf.l.{mode}.b32", "u32", inputs, lambda a, b, n: (b << 32 | a) << count(n) >> 32)
    check(f"shf.r.{mode}.b32", "u32", inputs, lambda a, b, n: (b << 32 | a) >> count(n))


@pytest.mark.parametrize("table", [0x96, 0xE8, 0xE4, 0x01, 0x80, 0x3C])
def test_lop3(table):
    def expected(a: int, b: int, c: int) -> int:
        return sum((table >> ((a >> k & 1) << 2 | (b >> k & 1) << 1 | c >> k & 1) & 1) << k for k in range(32))

    check(f"lop3.b32 %out, %in0, %in1, %in2, {table};", "u32", [x[::9] for x in columns("u32", "u32", "u32")], expected)


def test_counting_bits():
    for kind in ("u32", "u64"):
        n, one = bits(kind), columns(kind)
        check(f"popc.b{n}", "u32", one, int.bit_count)
        check(f"clz.b{n}", "u32", one, lambda a, n=n: n - a.bit_length())
        check(f"brev.b{n}", kind, one, lambda a, n=n: int(f"{a:0{n}b}"[::-1], 2))


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
def test_bfind(kind):
    def position(a: int) -> int:
        return (~a if a < 0 else a).bit_length() - 1

    check(f"bfind.{kind}", "u32", columns(kind), position)
    top = bits(kind) - 1
    check(f"bfind.shiftamt.{kind}", "u32", columns(kind), lambda a: top - position(a) if position(a) >= 0 else -1)


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
def test_bfe(kind):
    def expected(a: int, position: int, length: int) -> int:
        """The ISA's definition, bit by bit."""
        n, position, length = bits(kind), position & 0xFF, length & 0xFF
        a &= (1 << n) - 1
        sign = a >> min(position + length - 1, n - 1) & 1 if kind[0] == "s" and length else 0
        return sum((a >> (k + position) & 1 if k < length and k + position < n else sign) << k for k in range(n))

    positions, lengths = columns("u32", "u32")
    a = np.random.default_rng(0).integers(0, 2**63, len(positions)).astype(DTYPES[kind])
    check(f"bfe.{kind}", kind, [a, positions, lengths], expected)


@pytest.mark.parametrize("kind", ["u32", "u64"])
def test_bfi(kind):
    def expected(a: int, b: int, position: int, length: int) -> int:
        n, position, length = bits(kind), position & 0xFF, length & 0xFF
        for k in range(min(length, n)):
            if position + k < n:
                b = b & ~(1 << (position + k)) | (a >> k & 1) << (position + k)
        return b

    positions, lengths = columns("u32", "u32")
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 2 ** bits(kind), len(positions), DTYPES[kind]) for _ in range(2))
    check(f"bfi.b{bits(kind)}", kind, [a, b, positions, lengths], expected)


def test_masks_and_extensions():
    small = [x % np.uint32(70) for x in columns("u32", "u32")]
    check("bmsk.clamp.b32", "u32", small, lambda a, b: (1 << min(b, 32)) - 1 << min(a, 32))
    check("bmsk.wrap.b32", "u32", small, lambda a, b: (1 << (b & 31)) - 1 << (a & 31))
    a, n = columns("u32", "u32")
    check("szext.wrap.u32", "u32", [a, n], lambda a, n: a & (1 << (n & 31)) - 1)
    check("szext.clamp.u32", "u32", [a, n], lambda a, n: a & (1 << min(n, 32)) - 1)
    check("szext.clamp.s32", "u32", [a, n], lambda a, n: signed(a, min(n, 32)) if n else 0)
    check("szext.wrap.s32", "u32", [a, n], lambda a, n: signed(a, n & 31) if n & 31 else 0)


def test_fns():
    """Bits 0, 13, 15, 20..23 are set; the n-th from a position on."""
    found = {(0, 0): 0, (0, 1): 0, (1, 1): 13, (1, 4): 21, (31, -1): 23, (5, 0): -1, (13, -1): 13, (13, -3): -1}
    base, n = (np.array(column) for column in zip(*found, strict=True))
    inputs = [base.astype(np.uint32), n.astype(np.int32)]
    check("fns.b32 %out, 0x00f0a001, %in0, %in1;", "u32", inputs, lambda a, b: found[a, b])


def permuted(a: int, b: int, selector: int) -> int:
    source, result = (b << 32 | a).to_bytes(8, "little"), 0
    for k in range(4):
        nibble = selector >> 4 * k & 15
        byte = source[nibble & 7]
        result |= ((0xFF if byte & 0x80 else 0) if nibble & 8 else byte) << 8 * k
    return result


@given(st.lists(st.tuples(*[st.integers(0, 2**32 - 1)] * 3), min_size=1, max_size=64))
@settings(deadline=None, max_examples=20)
def test_prmt(rows):
    check("prmt.b32", "u32", [np.array(column, np.uint32) for column in zip(*rows, strict=True)], permuted)


PRMT_MODES = {  # the ISA's tables, selectors for c = 0..3
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}


@pytest.mark.parametrize("mode", PRMT_MODES)
def test_prmt_modes(mode):
    a, b = np.full(8, 0x83828180, np.uint32), np.full(8, 0x87868584, np.uint32)
    c = np.arange(8, dtype=np.uint32)
    check(f"prmt.b32.{mode}", "u32", [a, b, c], lambda a, b, c: permuted(a, b, PRMT_MODES[mode][c & 3]))


# ---- comparison and selection ----------------------------------------------------------------------------------------

COMPARE: dict[str, Callable[[float, float], bool]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip
BOTH = """.reg .pred %p, %q, %r; .reg .b32 %x; {setp}
    selp.b32 %out, 1, 0, %p; selp.b32 %x, 2, 0, %q; or.b32 %out, %out, %x;"""
CHOOSE = ".reg .pred %p; {setp} selp.u32 %out, 1, 0, %p;"


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("name", COMPARE)
def test_setp(name, kind):
    setp = f"setp.{name}.{kind} %p|%q, %in0, %in1;"
    check(BOTH.format(setp=setp), "u32", columns(kind, kind), lambda a, b: 1 if COMPARE[name](a, b) else 2)


@pytest.mark.parametrize("boolean", ["and", "or", "xor"])
def test_setp_combines_both_results(boolean):
    combine = {"and": int.__and__, "or": int.__or__, "xor": int.__xor__}[boolean]
    for sign in ("", "!"):
        setp = f"setp.ne.u32 %r, %in2, 0; setp.ge.{boolean}.s32 %p|%q, %in0, %in1, {sign}%r;"

        def expected(a: int, b: int, c: int, sign: str = sign) -> int:
            other = int((c != 0) != (sign == "!"))
            return combine(int(a >= b), other) | combine(int(a < b), other) << 1

        inputs = [*columns("s32", "s32"), np.arange(len(columns("s32", "s32")[0]), dtype=np.uint32) % 2]
        check(BOTH.format(setp=setp), "u32", inputs, expected)


def test_unsigned_spellings():
    for spelling, name in (("lo", "lt"), ("ls", "le"), ("hi", "gt"), ("hs", "ge")):
        setp = f"setp.{spelling}.u32 %p|%q, %in0, %in1;"
        function = COMPARE[name]
        check(BOTH.format(setp=setp), "u32", columns("u32", "u32"), lambda a, b, f=function: 1 if f(a, b) else 2)


def float_inputs(kind: str) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """All pairs of special values as registers, and as numbers."""
    number = np.append(SPECIAL_F32, f32([0x33800000, 0xB8000000]))  # denormals of f16
    if kind == "bf16":
        stored = (bits_of(number) >> 16).astype(np.uint16)
        number = (stored.astype(np.uint32) << 16).view(np.float32)
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            number = number.astype({"f16": np.float16, "f32": np.float32, "f64": np.float64}[kind])
        stored = number
    i, j = np.indices((len(number), len(number))).reshape(2, -1)
    return [stored[i], stored[j]], number[i], number[j]


def compared(name: str, kind: str, *numbers: np.ndarray) -> np.ndarray:
    """What setp finds; .ftz takes denormals for zeros."""
    tiny = {"ftz.f32": 2.0**-126, "ftz.f16": 2.0**-14}.get(kind, 0)
    a, b = (np.where(np.abs(x) < tiny, 0, x) for x in numbers)
    unordered = np.isnan(a) | np.isnan(b)
    if name in ("num", "nan"):
        return unordered == (name == "nan")
    return COMPARE[name[:2]](a, b) & ~unordered | (unordered & name.endswith("u"))


FLOAT_COMPARISONS = [*COMPARE, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]


@pytest.mark.parametrize("kind", ["f32", "ftz.f32", "f64", "f16", "ftz.f16", "bf16"])
@pytest.mark.parametrize("name", FLOAT_COMPARISONS)
def test_setp_of_floats(name, kind):
    inputs, a, b = float_inputs(kind.removeprefix("ftz."))
    setp = f"setp.{name}.{kind} %p|%q, %in0, %in1;"
    if kind.endswith("f16"):  # one of them has one result
        setp = f"setp.{name}.{kind} %p, %in0, %in1; not.pred %q, %p;"
    got = elementwise(BOTH.format(setp=setp), inputs, WORD)
    np.testing.assert_array_equal(got, np.where(compared(name, kind, a, b), 1, 2))


@pytest.mark.parametrize("kind", ["f16", "ftz.f16", "bf16"])
@pytest.mark.parametrize("name", FLOAT_COMPARISONS)
def test_setp_of_packed_halves(name, kind):
    """A result for each half."""
    inputs, a, b = float_inputs(kind.removeprefix("ftz."))
    packed = [x[: len(x) // 2 * 2].view(np.uint32) for x in inputs]
    got = elementwise(BOTH.format(setp=f"setp.{name}.{kind}x2 %p|%q, %in0, %in1;"), packed, WORD)
    want = compared(name, kind, a, b)[: 2 * len(got)].reshape(-1, 2)
    np.testing.assert_array_equal(got, want @ [1, 2])


def test_set_gives_all_ones_or_one():
    inputs = columns("s32", "s32")
    check("set.lt.u32.s32", "u32", inputs, lambda a, b: -1 if a < b else 0)
    check("set.ge.f32.s32", "u32", inputs, lambda a, b: 0x3F800000 if a >= b else 0)


def test_selection():
    for kind in ("s32", "s64"):
        text = f".reg .pred %p; setp.gt.{kind} %p, %in0, %in1; selp.b{kind[1:]} %out, %in0, %in1, %p;"
        check(text, kind, columns(kind, kind), max)
    check("slct.s32.s32", "s32", columns("s32", "s32", "s32"), lambda a, b, c: a if c >= 0 else b)


def test_slct_of_a_float():
    c = f32([0, 0x80000000, 0x3F800000, 0xBF800000, 0x7FC00000, 0x80000001])
    got = elementwise("slct.u32.f32 %out, 1, 2, %in0;", [c], WORD)
    np.testing.assert_array_equal(got, [1, 1, 1, 2, 2, 2])
    got = elementwise("slct.ftz.u32.f32 %out, 1, 2, %in0;", [c], WORD)
    np.testing.assert_array_equal(got, [1, 1, 1, 2, 2, 1])


CLASSES = {
    "finite": math.isfinite,
    "infinite": math.isinf,
    "number": lambda x: not math.isnan(x),
    "notanumber": math.isnan,
}


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("test", [*CLASSES, "normal", "subnormal"])
def test_testp(test, kind):
    with np.errstate(invalid="ignore"):  # signalling NaNs
        special = SPECIAL_F32.astype(kind)
    x = np.concatenate([special, [kind(2.0**-1074), kind(-(2.0**-1022)), kind(2.0**-1030)]])
    got = elementwise(CHOOSE.format(setp=f"testp.{test}.f{kind().itemsize * 8} %p, %in0;"), [x], WORD)
    least = np.finfo(kind).tiny
    subnormal = (x != 0) & (np.abs(x) < least)
    sizes = {"subnormal": subnormal, "normal": np.isfinite(x) & (np.abs(x) >= least)}
    np.testing.assert_array_equal(got, sizes[test] if test in sizes else [CLASSES[test](float(value)) for value in x])


def test_predicate_logic():
    text = """.reg .pred %p<9>; .reg .b32 %x<3>;
        and.b32 %x0, %in0, 1; setp.ne.u32 %p0, %x0, 0; and.b32 %x0, %in0, 2; setp.ne.u32 %p1, %x0, 0;
        and.pred %p2, %p0, %p1; or.pred %p3, %p0, !%p1; xor.pred %p4, %p0, %p1; not.pred %p5, %p0; mov.pred %p6, %p1;
        mov.pred %p7, -1;
        @%p0 mov.pred %p7, 0; mov.u32 %out, 0;
        @%p2 or.b32 %out, %out, 1; @%p3 or.b32 %out, %out, 2; @%p4 or.b32 %out, %out, 4; @%p5 or.b32 %out, %out, 8;
        @%p6 or.b32 %out, %out, 16; @!%p7 or.b32 %out, %out, 32;"""
    got = elementwise(text, [np.arange(4, dtype=np.uint32)], np.dtype(np.uint32), sanitize=True)
    want = [(p & q) | (p | 1 - q) << 1 | (p ^ q) << 2 | (1 - p) << 3 | q << 4 | p << 5 for q in (0, 1) for p in (0, 1)]
    np.testing.assert_array_equal(got, want)


def test_a_sink_and_a_hidden_predicate_do_not_meet():
    """setp into a sink before and after the first carry: the carry survives."""
    text = """.reg .b32 %x; .reg .pred %p; setp.eq.u32 %p|_, 0, 0;
        add.cc.u32 %x, 0xffffffff, 1; setp.ne.u32 %p|_, 0, 0; addc.u32 %out, %in0, 0;"""
    check(text, "u32", [np.arange(40, dtype=np.uint32)], lambda a: a + 1)


REFUSED = """
add.sat.u32 %r, %r, %r
add.s32 %r, %h, %r
mul.s32 %r, %r, %r
shf.l.b32 %r, %r, %r, %r
setp.lo.s32 %p, %r, %r
setp.lt.b32 %p, %r, %r
add.s32.wrong %r, %r, %r
min.relu.u32 %r, %r, %r
lop3.or.b32 %r, %r, %r, %r, 1
mul.wide.s64 %d, %d, %d
selp.f16 %h, %h, %h, %p
popc.b16 %r, %h
and.s32 %r, %r, %r
testp.finite.f16 %p, %h
"""


@pytest.mark.parametrize("text", REFUSED.strip().split("\n"))
def test_what_is_not_executed_is_refused(text):
    with pytest.raises(UnsupportedInstruction):
        run(f".visible .entry k() {{ .reg .pred %p; .reg .b16 %h; .reg .b32 %r; .reg .b64 %d; {text}; ret; }}")
