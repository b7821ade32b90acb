// cvt: conversions between integers, floats and the packed narrow formats.
//
// The conversions that kernels do all the time have handlers of their own; the others read what to do from the record, slowly.
#include <algorithm>
#include <cmath>
#include "lanes.h"
#include "numbers.h"

namespace emu {

// ---- integer to integer ----------------------------------------------------------------------------------------------

static u64 low_bits(u64 value, int bits, bool is_signed) {
    const u64 shifted = value << (64 - bits);
    return is_signed ? (u64)((i64)shifted >> (64 - bits)) : shifted >> (64 - bits);
}

// The two conversions of addresses; narrowing to 32 bits is a move.
HANDLER(extend_u32, "cvt.u64.u32") {
    const Lanes<u32> a(w, r.a);
    const Lanes<u64> d(w, r.d);
    each_lane(mask, [=](int lane) { d.set(lane, a[lane]); });
    return Flow::next;
}
HANDLER(extend_s32, "cvt.s64.s32") {
    const Lanes<i32> a(w, r.a);
    const Lanes<i64> d(w, r.d);
    each_lane(mask, [=](int lane) { d.set(lane, a[lane]); });
    return Flow::next;
}

// pool: source bits, source signed, target bits, target signed, bytes of the target register, saturate.
HANDLER(cvt_integer, "cvt.integer") {
    const i32* how = w.cta->cluster->program.pool + r.pool;
    const int from = how[0], to = how[2], width = how[4];
    const bool from_signed = how[1], to_signed = how[3], saturate = how[5];
    const i64 lowest = to_signed ? -1 - (i64)(~0ull >> 1 >> (64 - to)) : 0;
    const u64 highest = to_signed ? ~0ull >> 1 >> (64 - to) : ~0ull >> (64 - to);
    const u32 *low = w.reg(r.a), *high = w.reg(from == 64 ? r.a + 1 : r.a);
    u32 *d = w.reg(r.d), *d_high = w.reg(width == 8 ? r.d + 1 : r.d);
    const u32 keep = width == 1 ? 0xff : width == 2 ? 0xffff : ~0u;
    each_lane(mask, [=](int lane) {
        u64 value = low_bits(low[lane] | (u64)high[lane] << 32, from, from_signed);
        if (saturate) {
            if (from_signed && (i64)value < lowest) value = (u64)lowest;
            else if (!(from_signed && (i64)value < 0) && value > highest) value = highest;
        }
        value = low_bits(value, to, to_signed);
        d_high[lane] = (u32)(value >> 32);
        d[lane] = (u32)value & keep;                             // last: without an upper word both are the same slot
    });
    return Flow::next;
}


// ---- between floats --------------------------------------------------------------------------------------------------

enum Kind : int { F16 = 0, BF16 = 1, F32 = 2, F64 = 3 };                              // convert.py's FLOATS
constexpr i64 FTZ = 8, SAT = 16, RELU = 32, SATFINITE = 64;                          // bits of i0 above the rounding mode

static double load(Warp& w, i32 slot, int lane, int kind, bool ftz) {
    const u32 bits = w.reg(slot, lane);
    switch (kind) {
        case F16: return from_f16((u16)bits);
        case BF16: return from_bf16((u16)bits);
        case F32: return as_float(ftz ? flush(bits) : bits);
        default: return as_double(w.wide(slot, lane));
    }
}

static float step(float x, bool up) { return as_float(as_bits(x) + ((as_bits(x) >> 31) == (u32)up ? -1 : 1)); }

static float to_float(double x, Rounding mode) {
    const float nearest = (float)x;
    if (x != x || (double)nearest == x) return nearest;
    const bool above = nearest > x;
    const bool wrong = mode == Rounding::rm ? above : mode == Rounding::rp ? !above : mode == Rounding::rz && above == (x > 0);
    return wrong ? step(nearest, !above) : nearest;
}

static double to_whole(double x, i64 mode) {
    switch (mode) {
        case 0: {
            const double below = std::floor(x), rest = x - below;
            const double even = std::fmod(below, 2) == 0 ? below : below + 1;
            return std::copysign(rest < 0.5 ? below : rest > 0.5 ? below + 1 : even, x);
        }
        case 1: return std::trunc(x);
        case 2: return std::floor(x);
        default: return std::ceil(x);
    }
}

// x as `kind`, rounded once, with the modifiers in `how`; x may be rounded to odd when the target is narrower.
static u64 store_bits(double x, int kind, i64 how) {
    const Rounding mode = (Rounding)(how & 7);
    if (how & SAT) x = x > 1 ? 1 : x > 0 ? x : 0;                                    // a NaN becomes 0
    if (how & RELU && x == x && std::signbit(x)) x = 0;
    if (kind == F64) return as_bits(x);
    if (kind == F32) {
        const u32 bits = canonical(to_float(x, mode));
        return how & FTZ ? flush(bits) : bits;
    }
    const float narrow = to_float_odd(x);
    u16 bits = kind == F16 ? to_f16(narrow, mode) : to_bf16(narrow, mode);
    const u16 infinity = kind == F16 ? 0x7c00 : 0x7f80;
    if (how & SATFINITE && (bits & 0x7fff) == infinity) --bits;
    return bits;
}

HANDLER(cvt_f32_bf16, "cvt.f32.bf16") {
    const u32* a = w.reg(r.a);
    u32* d = w.reg(r.d);
    each_lane(mask, [=](int lane) { d[lane] = a[lane] << 16; });
    return Flow::next;
}
HANDLER(cvt_f32_f16, "cvt.f32.f16") {
    const u32* a = w.reg(r.a);
    u32* d = w.reg(r.d);
    each_lane(mask, [=](int lane) { d[lane] = canonical(from_f16((u16)a[lane])); });
    return Flow::next;
}
// cvt.rn.bf16x2.f32 and cvt.rn.f16x2.f32: the upper half is a, the lower b.
HANDLER(cvt_bf16x2, "cvt.bf16x2.f32") {
    const Lanes<float> a(w, r.a), b(w, r.b);
    u32* d = w.reg(r.d);
    each_lane(mask, [=](int lane) { d[lane] = (u32)to_bf16(a[lane]) << 16 | to_bf16(b[lane]); });
    return Flow::next;
}
HANDLER(cvt_f16x2, "cvt.f16x2.f32") {
    const Lanes<float> a(w, r.a), b(w, r.b);
    u32* d = w.reg(r.d);
    each_lane(mask, [=](int lane) { d[lane] = (u32)to_f16(a[lane]) << 16 | to_f16(b[lane]); });
    return Flow::next;
}
// i0: modifiers; i1: source kind, target kind << 4, 1 + rounding to whole numbers << 8. With b two sources become a packed pair.
HANDLER(cvt_float, "cvt.float") {
    const int of = (int)(r.i1 & 15), to = (int)(r.i1 >> 4 & 15);
    const i64 whole = r.i1 >> 8;
    each_lane(mask, [&](int lane) {
        auto converted = [&](i32 slot) {
            double x = load(w, slot, lane, of, r.i0 & FTZ);
            if (whole) x = to_whole(x, whole - 1);
            return store_bits(x, to, r.i0);
        };
        const u64 bits = r.b >= 0 ? converted(r.a) << 16 | converted(r.b) : converted(r.a);
        if (to == F64) w.set_wide(r.d, lane, bits);
        else w.reg(r.d, lane) = (u32)bits;
    });
    return Flow::next;
}
// i0: modifiers.
HANDLER(cvt_tf32, "cvt.tf32.f32") {
    const Lanes<float> a(w, r.a);
    u32* d = w.reg(r.d);
    each_lane(mask, [&, d](int lane) {
        u32 bits = to_tf32(a[lane], (Rounding)(r.i0 & 7));
        if (r.i0 & RELU && bits >> 31) bits = 0;
        if (r.i0 & SATFINITE && (bits & 0x7fffffff) == 0x7f800000) bits -= 0x2000;
        d[lane] = bits;
    });
    return Flow::next;
}

// ---- narrow formats, two in 8 or 16 bits -----------------------------------------------------------------------------

enum Narrow : int { E4M3 = 0, E5M2 = 1, E2M3 = 2, E3M2 = 3, E2M1 = 4, UE8M0 = 5 };    // convert.py's NARROW

static u32 to_narrow(float x, int kind, i64 how) {
    if (how & RELU && x == x && std::signbit(x)) x = 0;
    switch (kind) {
        case E4M3: return to_e4m3(x);
        case E5M2: return to_e5m2(x);
        case E2M3: return to_e2m3(x);
        case E3M2: return to_e3m2(x);
        case E2M1: return to_e2m1(x);
        default: return to_ue8m0(x, (Rounding)(how & 7), how & SATFINITE);
    }
}
static float from_narrow(u8 bits, int kind) {
    switch (kind) {
        case E4M3: return from_e4m3(bits);
        case E5M2: return from_e5m2(bits);
        case E2M3: return from_e2m3(bits);
        case E3M2: return from_e3m2(bits);
        case E2M1: return from_e2m1(bits);
        default: return from_ue8m0(bits);
    }
}
// i0: modifiers; i1: source kind (F32: a above b; F16, BF16: the halves of a), target << 4.
HANDLER(cvt_to_narrow, "cvt.to_narrow") {
    const int of = (int)(r.i1 & 15), to = (int)(r.i1 >> 4), bits = to == E2M1 ? 4 : 8;
    each_lane(mask, [&](int lane) {
        const u32 a = w.reg(r.a, lane);
        auto half = [&](u16 x) { return of == F16 ? from_f16(x) : from_bf16(x); };
        const float upper = of == F32 ? as_float(a) : half((u16)(a >> 16));
        const float lower = of == F32 ? as_float(w.reg(r.b, lane)) : half((u16)a);
        w.reg(r.d, lane) = to_narrow(upper, to, r.i0) << bits | to_narrow(lower, to, r.i0);
    });
    return Flow::next;
}
// i0: modifiers; i1: source, target kind << 4 (F16, BF16). Every value is exact in the target.
HANDLER(cvt_from_narrow, "cvt.from_narrow") {
    const int of = (int)(r.i1 & 15), to = (int)(r.i1 >> 4), bits = of == E2M1 ? 4 : 8;
    each_lane(mask, [&](int lane) {
        const u32 a = w.reg(r.a, lane), field = (1u << bits) - 1;
        const float upper = from_narrow((u8)(a >> bits & field), of), lower = from_narrow((u8)(a & field), of);
        w.reg(r.d, lane) = (u32)(store_bits(upper, to, r.i0) << 16 | store_bits(lower, to, r.i0));
    });
    return Flow::next;
}

// ---- between floats and integers -------------------------------------------------------------------------------------

// i0: source kind; pool: target bits, target signed, bytes of the target register, rounding to whole numbers, .ftz.
HANDLER(cvt_float_integer, "cvt.integer.float") {
    const i32* how = w.cta->cluster->program.pool + r.pool;
    const int to = how[0], width = how[2];
    const bool is_signed = how[1];
    const u64 highest = is_signed ? ~0ull >> 1 >> (64 - to) : ~0ull >> (64 - to);
    const double lowest = is_signed ? -std::ldexp(1.0, to - 1) : 0, beyond = std::ldexp(1.0, is_signed ? to - 1 : to);
    // Section cvt: a NaN becomes 0 unless one of the types has 64 bits, then the upper bit alone.
    const u64 of_nan = r.i0 == F64 || to == 64 ? 1ull << (to - 1) : 0;
    each_lane(mask, [&](int lane) {
        const double x = to_whole(load(w, r.a, lane, (int)r.i0, how[4]), how[3]);
        u64 value = of_nan;
        if (x >= beyond) value = highest;
        else if (x < lowest) value = is_signed ? (u64)(i64)lowest : 0;
        else if (x == x) value = x < 0 ? (u64)(i64)x : (u64)x;
        value = low_bits(value, to, is_signed);
        if (width == 8) w.set_wide(r.d, lane, value);
        else w.reg(r.d, lane) = (u32)low_bits(value, 8 * width, false);
    });
    return Flow::next;
}

// A magnitude as a double with at most `digits` significant bits; `odd` keeps all 53, the last says what was cut off.
static double whole_to_double(u64 magnitude, bool negative, int digits, Rounding mode, bool odd) {
    const int shift = magnitude ? 64 - __builtin_clzll(magnitude) - digits : 0;
    if (shift <= 0) return (double)magnitude;
    u64 kept = magnitude >> shift;
    const u64 rest = magnitude & ((1ull << shift) - 1), half = 1ull << (shift - 1);
    if (odd) kept |= rest != 0;
    else if (mode == Rounding::rn) kept += rest > half || (rest == half && kept & 1);
    else kept += rest && (mode == Rounding::rp ? !negative : mode == Rounding::rm && negative);
    return std::ldexp((double)kept, shift);
}
// i0: modifiers; i1: target kind; pool: source bits, source signed.
HANDLER(cvt_integer_float, "cvt.float.integer") {
    const i32* how = w.cta->cluster->program.pool + r.pool;
    const int digits = r.i1 == F32 ? 24 : 53;
    each_lane(mask, [&](int lane) {
        const u64 value = low_bits(how[0] == 64 ? w.wide(r.a, lane) : w.reg(r.a, lane), how[0], how[1]);
        const bool negative = how[1] && (i64)value < 0;
        const double magnitude = whole_to_double(negative ? 0 - value : value, negative, digits, (Rounding)(r.i0 & 7), r.i1 < F32);
        const u64 bits = store_bits(negative ? -magnitude : magnitude, (int)r.i1, r.i0);
        if (r.i1 == F64) w.set_wide(r.d, lane, bits);
        else w.reg(r.d, lane) = (u32)bits;
    });
    return Flow::next;
}

// cvt.pack.sat: a above b, each clamped to i0 bits (negative: signed); c, if there, moves up to make room.
HANDLER(cvt_pack, "cvt.pack") {
    const int bits = (int)std::abs(r.i0);
    const i64 lowest = r.i0 < 0 ? -(1ll << (bits - 1)) : 0, highest = r.i0 < 0 ? (1ll << (bits - 1)) - 1 : (1ll << bits) - 1;
    each_lane(mask, [&](int lane) {
        auto part = [&](i32 slot) { return (u32)std::clamp<i64>((i32)w.reg(slot, lane), lowest, highest) & ((1u << bits) - 1); };
        const u32 rest = r.c >= 0 ? w.reg(r.c, lane) << 2 * bits : 0;
        w.reg(r.d, lane) = rest | part(r.a) << bits | part(r.b);
    });
    return Flow::next;
}

}  // namespace emu
