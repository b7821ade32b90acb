"""Rounding in exact arithmetic, for float formats of any size: the reference of the emulator's number tests."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

import numpy as np


class Format(NamedTuple):
    """A binary float format: significant bits, smallest normal exponent, largest finite value."""

    precision: int
    smallest: int
    largest: Fraction


F32 = Format(24, -126, Fraction(float(np.finfo(np.float32).max)))
F64 = Format(53, -1022, Fraction(float(np.finfo(np.float64).max)))
F16 = Format(11, -14, Fraction(65504))
BF16 = Format(8, -126, Fraction(255) * 2**120)
TF32 = Format(11, -126, Fraction(2047) * 2**117)
E4M3 = Format(4, -6, Fraction(448))
E5M2 = Format(3, -14, Fraction(57344))
E2M3 = Format(4, 0, Fraction(15, 2))
E3M2 = Format(3, -2, Fraction(28))
E2M1 = Format(2, 0, Fraction(6))


def round_to(x: Fraction, form: Format, mode: str = "rn", saturate: bool = False) -> float:
    """x in the format, rounded once; beyond the largest value infinity, or the largest value."""
    if x == 0:
        return 0.0
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    exponent -= abs(x) < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, form.smallest) - form.precision + 1)
    q = abs(x) / unit
    up = {"rp": x > 0, "rm": x < 0}.get(mode)
    if mode == "rn":
        whole = round(q)  # ties to even
    elif mode == "rna":
        whole = math.floor(q + Fraction(1, 2))
    else:
        whole = math.ceil(q) if up else math.floor(q)
    magnitude = whole * unit
    if magnitude > form.largest:
        magnitude_or_infinity = float(form.largest) if saturate or mode == "rz" or up is False else math.inf
        return math.copysign(magnitude_or_infinity, x)
    return math.copysign(float(magnitude), x)


def fractions(values: Iterable[float]) -> list[Fraction]:
    return [Fraction(float(v)) for v in values]


def f32(bits: Iterable[int]) -> np.ndarray:
    return np.array(list(bits), np.uint32).view(np.float32)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bits_of(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(f"u{values.itemsize}")


def same(got: np.ndarray, want: np.ndarray) -> None:
    """Equal as numbers, zeros with their sign; a NaN equals any NaN."""
    np.testing.assert_array_equal(got, want)
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(want[numbers]))


_SPECIAL = """
0 1 007FFFFF 00800000 3F7FFFFF 3F800000 3F800001 33800000 34000000 4B800000 7F7FFFFF 7F800000 7F800001 00400000 00400001
38800000 387FFFFF 477FEFFF 477FF000 33000000 33000001 7FC12345 40490FDB
"""
SPECIAL_F32 = f32(int(word, 16) for word in _SPECIAL.split())
SPECIAL_F32 = np.concatenate([SPECIAL_F32, -SPECIAL_F32])
"""Zeros, denormals, numbers beside powers of two, ties, infinities, NaNs, of both signs."""


def f32_samples(n: int, seed: int = 0, special: bool = True) -> np.ndarray:
    """Numbers of all exponents, of middle ones (many are ties of bf16 or tf32), and special ones, in random order."""
    rng = np.random.default_rng(seed)
    any_bits = rng.integers(0, 2**32, n // 2, np.uint32).view(np.float32)
    middle = (rng.standard_normal(n - n // 2) * 2.0 ** rng.integers(-12, 12, n - n // 2)).astype(np.float32)
    tie = rng.choice(np.array([0, 0x1000, 0x8000], np.uint32), len(middle))
    middle = np.where(tie > 0, middle.view(np.uint32) & ~(tie - np.uint32(1)) | tie, middle.view(np.uint32)).view(
        np.float32
    )
    values = np.concatenate([any_bits, middle, SPECIAL_F32])
    rng.shuffle(values)
    return values if special else values[np.isfinite(values)]
