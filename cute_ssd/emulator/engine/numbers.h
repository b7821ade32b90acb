// Number formats: bit patterns to float and back, in portable C++ and without branches where loops over lanes use them.
//
// Every narrow format is exact in float, so `from_*` never rounds. `to_*` rounds once. Canonical NaNs are the device's:
// 0x7fffffff (f32), 0x7fff (f16, bf16), 0x7f (e4m3, e5m2), 0xff (ue8m0); the 6- and 4-bit formats have none.
#pragma once
#include <cmath>
#include "core.h"

namespace emu {

// rn to nearest even, rna to nearest away from zero, rz towards zero, rm down, rp up. decode.py writes these numbers.
enum class Rounding : int { rn = 0, rz = 1, rm = 2, rp = 3, rna = 4 };

constexpr u32 NAN_F32 = 0x7fffffffu;
constexpr u16 NAN_16 = 0x7fff;

inline u32 canonical(float x) { return x != x ? NAN_F32 : as_bits(x); }        // bits of an arithmetic result
inline u32 flush(u32 bits) { return (bits & 0x7f800000u) ? bits : bits & 0x80000000u; }   // .ftz: denormals become signed zeros
inline float flush(float x) { return as_float(flush(as_bits(x))); }

// condition ? yes : no, without a branch whatever the compiler thinks of it: g++ does not vectorise chains of them.
inline u32 pick(bool condition, u32 yes, u32 no) {
    const u32 all = 0u - (u32)condition;
    return (yes & all) | (no & ~all);
}

// Drops the low `shift` bits (1..31) of a magnitude: the carry of rounding may go into the exponent above, which is right.
inline u32 round_magnitude(u32 magnitude, int shift, bool negative, Rounding mode) {
    const u32 kept = magnitude >> shift, rest = magnitude & ((1u << shift) - 1), half = 1u << (shift - 1);
    switch (mode) {
        case Rounding::rn: return kept + (rest > half || (rest == half && (kept & 1)));
        case Rounding::rna: return kept + (rest >= half);
        case Rounding::rm: return kept + (negative && rest);
        case Rounding::rp: return kept + (!negative && rest);
        case Rounding::rz: break;
    }
    return kept;
}

// ---- bf16 ------------------------------------------------------------------------------------------------------------

// `*_bits` work on 32 bits throughout: g++ vectorises no loop that mixes 16-bit values and doubles.

inline float from_bf16(u16 bits) { return as_float((u32)bits << 16); }

inline u32 to_bf16_bits(float x) {
    const u32 bits = as_bits(x);
    return pick((bits & 0x7fffffffu) > 0x7f800000u, NAN_16, (bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
inline u16 to_bf16(float x) { return (u16)to_bf16_bits(x); }

inline u16 to_bf16(float x, Rounding mode) {
    const u32 bits = as_bits(x), magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return NAN_16;
    return (u16)(bits >> 16 & 0x8000u) | (u16)round_magnitude(magnitude, 16, bits >> 31, mode);
}

// ---- f16 -------------------------------------------------------------------------------------------------------------

inline float from_f16_bits(u32 bits) {                                           // the upper 16 bits are zero
    const u32 scaled = as_bits(as_float((bits & 0x7fffu) << 13) * as_float(0x77800000u));   // times 2^112: denormals become right as well
    const u32 special = 0x7f800000u | (bits & 0x3ffu) << 13;                     // infinity; a NaN keeps its payload
    return as_float(pick((bits & 0x7c00u) == 0x7c00u, special, scaled) | (bits & 0x8000u) << 16);
}
inline float from_f16(u16 bits) { return from_f16_bits(bits); }

inline u32 to_f16_bits(float x) {
    const u32 bits = as_bits(x), magnitude = bits & 0x7fffffffu;
    const u32 normal = (magnitude + 0xc8000fffu + (magnitude >> 13 & 1)) >> 13;
    const u32 denormal = as_bits(as_float(magnitude) + 0.5f) - 0x3f000000u;      // the addition rounds at 2^-24
    const u32 finite = pick(magnitude < 0x38800000u, denormal, normal);
    const u32 result = pick(magnitude >= 0x47800000u, 0x7c00u, finite);
    return pick(magnitude > 0x7f800000u, NAN_16, result | (bits >> 16 & 0x8000u));
}
inline u16 to_f16(float x) { return (u16)to_f16_bits(x); }

inline u16 to_f16(float x, Rounding mode) {
    const u32 bits = as_bits(x), magnitude = bits & 0x7fffffffu;
    const bool negative = bits >> 31;
    if (magnitude > 0x7f800000u) return NAN_16;
    const u16 sign = (u16)(bits >> 16 & 0x8000u);
    if (magnitude == 0x7f800000u) return sign | 0x7c00u;
    const int exponent = (int)(magnitude >> 23) - 127;
    if (exponent > 15) {                                                          // beyond the largest number of any rounding
        const bool down = mode == Rounding::rz || (mode == Rounding::rm && !negative) || (mode == Rounding::rp && negative);
        return sign | (down ? 0x7bffu : 0x7c00u);
    }
    if (exponent >= -14) return sign | (u16)round_magnitude(magnitude - (112u << 23), 13, negative, mode);
    const u32 mantissa = (magnitude & 0x7fffffu) | (magnitude >> 23 ? 0x800000u : 0u);
    const int shift = magnitude >> 23 ? -1 - exponent : 126;                      // 2^-24 is the last bit
    const u32 sticky = shift > 26 ? (mantissa != 0) : mantissa;                   // far below: only whether it is zero matters
    return sign | (u16)round_magnitude(sticky, shift > 26 ? 26 : shift, negative, mode);
}

// ---- 8, 6 and 4 bits -------------------------------------------------------------------------------------------------

// `exponent` and `mantissa` bits with the usual bias, denormals included; no infinity and no NaN.
template <int exponent, int mantissa> inline float from_small(u32 bits) {
    constexpr int bias = (1 << (exponent - 1)) - 1;
    const u32 magnitude = bits & ((1u << (exponent + mantissa)) - 1), sign = bits >> (exponent + mantissa) & 1;
    const float scale = as_float((u32)(127 + 127 - bias) << 23);
    return as_float(as_bits(as_float(magnitude << (23 - mantissa)) * scale) | sign << 31);
}

// The magnitude's code, rounded to nearest even; the caller knows that x is no NaN. Beyond the last code: `largest` + 1 or more.
template <int exponent, int mantissa> inline u32 to_small(float x) {
    constexpr int bias = (1 << (exponent - 1)) - 1;
    const float magnitude = std::fabs(x);
    constexpr u32 overflow = 1u << (exponent + mantissa);
    if (!(magnitude < as_float((u32)(127 + (1 << exponent) - bias) << 23))) return overflow;
    const float smallest_normal = as_float((u32)(127 + 1 - bias) << 23);
    if (magnitude < smallest_normal) return (u32)std::nearbyint(magnitude * as_float((u32)(127 + bias - 1 + mantissa) << 23));
    return round_magnitude(as_bits(magnitude) - ((u32)(127 - bias) << 23), 23 - mantissa, false, Rounding::rn);
}

inline u32 sign_of(float x, int position) { return as_bits(x) >> 31 << position; }

inline float from_e4m3(u8 bits) { return (bits & 0x7f) == 0x7f ? as_float(NAN_F32) : from_small<4, 3>(bits); }
inline float from_e5m2(u8 bits) { return from_f16((u16)(bits << 8)); }
inline float from_e2m3(u8 bits) { return from_small<2, 3>(bits); }
inline float from_e3m2(u8 bits) { return from_small<3, 2>(bits); }
inline float from_e2m1(u8 bits) { return from_small<2, 1>(bits); }

// satfinite: what is too large becomes the largest number, otherwise NaN (e4m3) or infinity (e5m2).
inline u8 to_e4m3(float x, bool satfinite = true) {
    if (x != x) return 0x7f;
    const u32 code = to_small<4, 3>(x);
    return (u8)((code > 0x7e ? (satfinite ? 0x7e : 0x7f) : code) | sign_of(x, 7));
}
inline u8 to_e5m2(float x, bool satfinite = true) {
    if (x != x) return 0x7f;
    const u32 code = to_small<5, 2>(x);
    return (u8)((code > 0x7b ? (satfinite ? 0x7b : 0x7c) : code) | sign_of(x, 7));
}
template <int exponent, int mantissa> inline u8 to_finite(float x) {              // always satfinite; NaN becomes the largest
    constexpr u32 largest = (1u << (exponent + mantissa)) - 1;
    if (x != x) return (u8)largest;
    const u32 code = to_small<exponent, mantissa>(x);
    return (u8)((code > largest ? largest : code) | sign_of(x, exponent + mantissa));
}
inline u8 to_e2m3(float x) { return to_finite<2, 3>(x); }
inline u8 to_e3m2(float x) { return to_finite<3, 2>(x); }
inline u8 to_e2m1(float x) { return to_finite<2, 1>(x); }

// ue8m0, a power of two: 2^(bits - 127). The sign of x is dropped, zero becomes 2^-127.
inline float from_ue8m0(u8 bits) { return bits == 0xff ? as_float(NAN_F32) : bits ? as_float((u32)bits << 23) : as_float(0x400000u); }
inline u8 to_ue8m0(float x, Rounding mode, bool satfinite) {                      // rz or rp
    const u32 magnitude = as_bits(x) & 0x7fffffffu, exponent = magnitude >> 23, mantissa = magnitude & 0x7fffffu;
    if (magnitude > 0x7f800000u) return 0xff;
    const bool up = mode == Rounding::rp && (exponent ? mantissa != 0 : mantissa > 0x400000u);
    const u32 code = exponent + up;
    return (u8)(code >= 0xff ? (satfinite ? 0xfe : 0xff) : code);
}

// ---- tf32: f32 with 10 bits of mantissa in the upper bits ------------------------------------------------------------

inline u32 to_tf32(float x, Rounding mode) {
    const u32 bits = as_bits(x), magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return NAN_F32;
    return (bits & 0x80000000u) | round_magnitude(magnitude, 13, bits >> 31, mode) << 13;
}
inline float truncate_tf32(u32 bits) { return as_float(bits & 0xffffe000u); }     // what the tensor cores do to f32 operands

// ---- one rounding instead of two -------------------------------------------------------------------------------------

// Rounding to odd keeps every later rounding to fewer bits right: the last bit says whether anything was cut off.

// a + b to double, to odd.
inline double add_odd(double a, double b) {
    const double sum = a + b, part = sum - a, error = (a - (sum - part)) + (b - part);       // Knuth's exact error
    const u64 bits = as_bits(sum), inexact = (error < 0) | (error > 0), finite = std::fabs(sum) < INFINITY;
    const u64 away = (error > 0) == (sum > 0);                                                // the sum was rounded towards zero
    return as_double(bits + (inexact & finite & ~bits & 1) * (2 * away - 1));
}

// double to float, to odd.
inline float to_float_odd(double x) {
    const float nearest = (float)x;
    const u32 bits = as_bits(nearest), too_large = std::fabs((double)nearest) > std::fabs(x);
    return as_float(pick(((double)nearest == x) | (x != x), bits, (bits - too_large) | 1));
}

}  // namespace emu
