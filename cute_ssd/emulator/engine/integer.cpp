// Integer arithmetic, carry chains, bits, predicates, selection.
#include <algorithm>
#include "lanes.h"

namespace emu {
namespace {

template <class T> using Signed = std::make_signed_t<T>;
template <class T> using Unsigned = std::make_unsigned_t<T>;
template <class T> using Twice = std::conditional_t<sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, i32, u32>,
    std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, i64, u64>,
                       std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>>>;
template <class T> constexpr int BITS = 8 * sizeof(T);

// ---- arithmetic: unsigned inside, because signed overflow wraps in PTX and is undefined in C++ -----------------------

struct Add { template <class T> T operator()(T a, T b) const { return a + b; } };
struct Sub { template <class T> T operator()(T a, T b) const { return a - b; } };
struct MulLo { template <class T> T operator()(T a, T b) const { return (T)((u64)a * (u64)b); } };
struct MadLo { template <class T> T operator()(T a, T b, T c) const { return (T)((u64)a * (u64)b + c); } };
struct MulWide { template <class T> Twice<T> operator()(T a, T b) const { return (Twice<T>)a * (Twice<T>)b; } };
struct MulHi { template <class T> T operator()(T a, T b) const { return (T)(MulWide()(a, b) >> BITS<T>); } };
struct MadHi { template <class T> T operator()(T a, T b, T c) const { return (T)((Unsigned<T>)MulHi()(a, b) + (Unsigned<T>)c); } };
struct MadWide {
    template <class T> Twice<T> operator()(T a, T b, Twice<T> c) const { return (Twice<T>)((Unsigned<Twice<T>>)MulWide()(a, b) + (Unsigned<Twice<T>>)c); }
};
struct AddSat { i32 operator()(i32 a, i32 b) const { return (i32)std::clamp<i64>((i64)a + b, INT32_MIN, INT32_MAX); } };
struct SubSat { i32 operator()(i32 a, i32 b) const { return (i32)std::clamp<i64>((i64)a - b, INT32_MIN, INT32_MAX); } };
struct MadHiSat { i32 operator()(i32 a, i32 b, i32 c) const { return AddSat()(MulHi()(a, b), c); } };

// mul24 and mad24 take the low 24 bits of each factor; hi is bits 16..47 of the product.
template <bool high> struct Mul24 {
    template <class T> T operator()(T a, T b) const {
        const i64 x = std::is_signed_v<T> ? (i64)((i32)((u32)a << 8) >> 8) : (i64)(a & 0xffffff);
        const i64 y = std::is_signed_v<T> ? (i64)((i32)((u32)b << 8) >> 8) : (i64)(b & 0xffffff);
        return (T)(high ? x * y >> 16 : x * y);
    }
};
template <bool high> struct Mad24 {
    template <class T> T operator()(T a, T b, T c) const { return (T)((u32)Mul24<high>()(a, b) + (u32)c); }
};

// Division by zero and INT_MIN / -1 have no specified result: all ones, and the wrapped quotient, as the device's code gives.
struct Div {
    template <class T> T operator()(T a, T b) const {
        if (b == 0) return (T)-1;
        if (std::is_signed_v<T> && b == (T)-1) return (T)(0 - (Unsigned<T>)a);
        return (T)(a / b);
    }
};
struct Rem {
    template <class T> T operator()(T a, T b) const {
        if (b == 0) return a;
        if (std::is_signed_v<T> && b == (T)-1) return 0;
        return (T)(a % b);
    }
};
struct Abs { template <class T> T operator()(T a) const { return a < 0 ? (T)(0 - (Unsigned<T>)a) : a; } };
struct Neg { template <class T> T operator()(T a) const { return (T)(0 - a); } };
struct Min { template <class T> T operator()(T a, T b) const { return a < b ? a : b; } };
struct Max { template <class T> T operator()(T a, T b) const { return a < b ? b : a; } };
struct MinRelu { template <class T> T operator()(T a, T b) const { return Max()(Min()(a, b), (T)0); } };
struct MaxRelu { template <class T> T operator()(T a, T b) const { return Max()(Max()(a, b), (T)0); } };
struct Sad { template <class T> T operator()(T a, T b, T c) const { return (T)((Unsigned<T>)c + (a < b ? (Unsigned<T>)b - (Unsigned<T>)a : (Unsigned<T>)a - (Unsigned<T>)b)); } };

// Both 16-bit halves of a word.
template <class T, class Op> struct Halves {
    u32 operator()(u32 a, u32 b) const {
        return (u16)Op()((T)a, (T)b) | (u32)(u16)Op()((T)(a >> 16), (T)(b >> 16)) << 16;
    }
};

// Dot products of four bytes, or of two 16-bit and two (low or high) bytes, with a sum. A is the type of a's parts, B of b's.
template <class A, class B> struct Dp4a {
    u32 operator()(u32 a, u32 b, u32 c) const {
        for (int i = 0; i < 4; ++i) c += (u32)((i32)(A)(a >> 8 * i) * (i32)(B)(b >> 8 * i));
        return c;
    }
};
template <class A, class B, bool high> struct Dp2a {
    u32 operator()(u32 a, u32 b, u32 c) const {
        for (int i = 0; i < 2; ++i) c += (u32)((i32)(A)(a >> 16 * i) * (i32)(B)(b >> (8 * i + (high ? 16 : 0))));
        return c;
    }
};

// ---- logic and shifts ------------------------------------------------------------------------------------------------

struct And { template <class T> T operator()(T a, T b) const { return a & b; } };
struct Or { template <class T> T operator()(T a, T b) const { return a | b; } };
struct Xor { template <class T> T operator()(T a, T b) const { return a ^ b; } };
struct Not { template <class T> T operator()(T a) const { return ~a; } };
struct Cnot { template <class T> T operator()(T a) const { return a == 0; } };

// The count is always 32 bits and clamped to the width.
template <class T, class Op> Flow shift(Warp& w, const Record& r, u32 mask) {
    const Lanes<T> a(w, r.a), d(w, r.d);
    const u32* count = w.reg(r.b);
    each_lane(mask, [=](int lane) { d.set(lane, Op()(a[lane], count[lane])); });
    return Flow::next;
}
struct Shl { template <class T> T operator()(T a, u32 n) const { return n >= (u32)BITS<T> ? (T)0 : (T)((u64)a << (n & 63)); } };
struct Shr {
    template <class T> T operator()(T a, u32 n) const {
        if constexpr (std::is_signed_v<T>) return (T)(a >> (n >= (u32)BITS<T> ? BITS<T> - 1 : n));
        else return n >= (u32)BITS<T> ? (T)0 : (T)(a >> (n & (BITS<T> - 1)));
    }
};

// Funnel shifts of b:a, b above a: left gives the upper word, right the lower one.
struct ShfLeftWrap { u32 operator()(u32 a, u32 b, u32 c) const { return (u32)(((u64)b << 32 | a) << (c & 31) >> 32); } };
struct ShfLeftClamp { u32 operator()(u32 a, u32 b, u32 c) const { return (u32)(((u64)b << 32 | a) << std::min(c, 32u) >> 32); } };
struct ShfRightWrap { u32 operator()(u32 a, u32 b, u32 c) const { return (u32)(((u64)b << 32 | a) >> (c & 31)); } };
struct ShfRightClamp { u32 operator()(u32 a, u32 b, u32 c) const { return (u32)(((u64)b << 32 | a) >> std::min(c, 32u)); } };

// ---- counting and finding bits ---------------------------------------------------------------------------------------

struct Popc { template <class T> u32 operator()(T a) const { return (u32)__builtin_popcountll(a); } };
struct Clz { template <class T> u32 operator()(T a) const { return a ? (u32)__builtin_clzll(a) - (64 - BITS<T>) : (u32)BITS<T>; } };
struct Brev {
    template <class T> T operator()(T a) const {
        T reversed = 0;
        for (int i = 0; i < BITS<T>; ++i) reversed |= (a >> i & 1) << (BITS<T> - 1 - i);
        return reversed;
    }
};
// Position of the highest bit that is not a sign bit, 0xffffffff when there is none; shiftamt: how far left it can move.
template <bool shift_amount> struct Bfind {
    template <class T> u32 operator()(T a) const {
        const Unsigned<T> bits = (Unsigned<T>)(a < 0 ? ~a : a);
        if (!bits) return 0xffffffffu;
        const u32 position = 63 - (u32)__builtin_clzll(bits);
        return shift_amount ? BITS<T> - 1 - position : position;
    }
};
template <bool clamp> struct Bmsk {
    u32 operator()(u32 a, u32 b) const {
        if (!clamp) a &= 31, b &= 31;
        return a >= 32 ? 0 : b >= 32 ? ~0u << a : ((1u << b) - 1) << a;
    }
};
template <bool clamp> struct Szext {
    template <class T> T operator()(T a, T b) const {
        u32 n = clamp ? std::min((u32)b, 32u) : (u32)b & 31;
        if (n == 0) return 0;
        return n == 32 ? a : (T)((T)((u32)a << (32 - n)) >> (32 - n));
    }
};

// bfe: b is the position, c the length (8 bits each). Above the top of a come sign bits (s) or zeros (u).
template <class T> Flow bfe(Warp& w, const Record& r, u32 mask) {
    const Lanes<T> a(w, r.a), d(w, r.d);
    const u32 *b = w.reg(r.b), *c = w.reg(r.c);
    each_lane(mask, [=](int lane) {
        const int position = b[lane] & 0xff, length = c[lane] & 0xff;
        const u64 value = (u64)(Unsigned<T>)a[lane];
        const int top = BITS<T> - 1, sign_at = std::min(position + length - 1, top);
        const bool sign = std::is_signed_v<T> && length && value >> sign_at & 1;
        u64 result = sign ? ~0ull : 0;
        for (int i = 0; i <= top && i < length && position + i <= top; ++i)
            result = (result & ~(1ull << i)) | (value >> (position + i) & 1) << i;
        d.set(lane, (T)result);
    });
    return Flow::next;
}
// bfi: d is b with `e` bits of a from position c on.
template <class T> Flow bfi(Warp& w, const Record& r, u32 mask) {
    const Lanes<T> a(w, r.a), b(w, r.b), d(w, r.d);
    const u32 *c = w.reg(r.c), *e = w.reg(r.e);
    each_lane(mask, [=](int lane) {
        const u32 position = c[lane] & 0xff, length = e[lane] & 0xff;
        const u64 field = length >= 64 ? ~0ull : (1ull << length) - 1;
        const u64 where = position >= 64 ? 0 : field << position, value = position >= 64 ? 0 : (u64)a[lane] << position;
        d.set(lane, (T)(((u64)b[lane] & ~where) | (value & where)));
    });
    return Flow::next;
}
// The c-th set bit of a from position b on (c > 0 upwards, c < 0 downwards, c = 0: bit b itself), 0xffffffff: none.
struct Fns {
    u32 operator()(u32 a, u32 b, u32 c) const {
        const i32 offset = (i32)c;
        const u32 base = b & 31;
        if (offset == 0) return a >> base & 1 ? base : ~0u;
        const int step = offset > 0 ? 1 : -1;
        int left = std::abs(offset);
        for (int i = (int)base; i >= 0 && i < 32; i += step)
            if (a >> i & 1 && --left == 0) return (u32)i;
        return ~0u;
    }
};

// ---- prmt ------------------------------------------------------------------------------------------------------------

// Selects bytes of b:a. `selector` has one nibble per byte: its number and, in bit 3, whether to spread its sign.
inline u32 permute(u32 a, u32 b, u32 selector) {
    const u64 bytes = (u64)b << 32 | a;
    u32 result = 0;
    for (int i = 0; i < 4; ++i) {
        const u32 byte = (u32)(bytes >> 8 * (selector >> 4 * i & 7)) & 0xff;
        result |= (selector >> (4 * i + 3) & 1 ? (byte >> 7) * 0xffu : byte) << 8 * i;
    }
    return result;
}
struct Prmt { u32 operator()(u32 a, u32 b, u32 c) const { return permute(a, b, c); } };
// The special modes translate the two low bits of c to a selector (table of the PTX ISA, section prmt).
template <u16... selectors> struct PrmtMode {
    u32 operator()(u32 a, u32 b, u32 c) const {
        constexpr u16 table[] = {selectors...};
        return permute(a, b, table[c & 3]);
    }
};

// ---- handlers --------------------------------------------------------------------------------------------------------

// `kinds`: which types a name has; the second letter counts bits.
#define B16_32_64(form, name, Op) {name ".b16", form<u16, Op>}, {name ".b32", form<u32, Op>}, {name ".b64", form<u64, Op>}
#define SIGNED(form, name, Op) {name ".s16", form<i16, Op>}, {name ".s32", form<i32, Op>}, {name ".s64", form<i64, Op>}
#define UNSIGNED(form, name, Op) {name ".u16", form<u16, Op>}, {name ".u32", form<u32, Op>}, {name ".u64", form<u64, Op>}
#define ALL_SIX(form, name, Op) SIGNED(form, name, Op), UNSIGNED(form, name, Op)

template <class T, class Op> Flow widening(Warp& w, const Record& r, u32 mask) { return binary<T, Op, Twice<T>>(w, r, mask); }
template <class T, class Op> Flow widening3(Warp& w, const Record& r, u32 mask) { return ternary<T, Op, Twice<T>>(w, r, mask); }
template <class T, class Op> Flow counting(Warp& w, const Record& r, u32 mask) { return unary<T, Op, u32>(w, r, mask); }

const Registration registrations[] = {
    B16_32_64(binary, "add", Add), B16_32_64(binary, "sub", Sub), B16_32_64(binary, "mul.lo", MulLo), B16_32_64(ternary, "mad.lo", MadLo),
    ALL_SIX(binary, "mul.hi", MulHi), ALL_SIX(ternary, "mad.hi", MadHi),
    {"mul.wide.s16", widening<i16, MulWide>}, {"mul.wide.u16", widening<u16, MulWide>},
    {"mul.wide.s32", widening<i32, MulWide>}, {"mul.wide.u32", widening<u32, MulWide>},
    {"mad.wide.s16", widening3<i16, MadWide>}, {"mad.wide.u16", widening3<u16, MadWide>},
    {"mad.wide.s32", widening3<i32, MadWide>}, {"mad.wide.u32", widening3<u32, MadWide>},
    {"add.sat.s32", binary<i32, AddSat>}, {"sub.sat.s32", binary<i32, SubSat>}, {"mad.hi.sat.s32", ternary<i32, MadHiSat>},
    {"mul24.lo.s32", binary<i32, Mul24<false>>}, {"mul24.lo.u32", binary<u32, Mul24<false>>},
    {"mul24.hi.s32", binary<i32, Mul24<true>>}, {"mul24.hi.u32", binary<u32, Mul24<true>>},
    {"mad24.lo.s32", ternary<i32, Mad24<false>>}, {"mad24.lo.u32", ternary<u32, Mad24<false>>},
    {"mad24.hi.s32", ternary<i32, Mad24<true>>}, {"mad24.hi.u32", ternary<u32, Mad24<true>>},
    ALL_SIX(binary, "div", Div), ALL_SIX(binary, "rem", Rem), SIGNED(unary, "abs", Abs), B16_32_64(unary, "neg", Neg),
    ALL_SIX(binary, "min", Min), ALL_SIX(binary, "max", Max), ALL_SIX(ternary, "sad", Sad),
    {"min.relu.s32", binary<i32, MinRelu>}, {"max.relu.s32", binary<i32, MaxRelu>},
    {"add.b16x2", binary<u32, Halves<u16, Add>>},
    {"min.s16x2", binary<u32, Halves<i16, Min>>}, {"min.u16x2", binary<u32, Halves<u16, Min>>},
    {"max.s16x2", binary<u32, Halves<i16, Max>>}, {"max.u16x2", binary<u32, Halves<u16, Max>>},
    {"min.relu.s16x2", binary<u32, Halves<i16, MinRelu>>}, {"max.relu.s16x2", binary<u32, Halves<i16, MaxRelu>>},
    {"dp4a.s32.s32", ternary<u32, Dp4a<i8, i8>>}, {"dp4a.s32.u32", ternary<u32, Dp4a<i8, u8>>},
    {"dp4a.u32.s32", ternary<u32, Dp4a<u8, i8>>}, {"dp4a.u32.u32", ternary<u32, Dp4a<u8, u8>>},
    {"dp2a.lo.s32.s32", ternary<u32, Dp2a<i16, i8, false>>}, {"dp2a.lo.s32.u32", ternary<u32, Dp2a<i16, u8, false>>},
    {"dp2a.lo.u32.s32", ternary<u32, Dp2a<u16, i8, false>>}, {"dp2a.lo.u32.u32", ternary<u32, Dp2a<u16, u8, false>>},
    {"dp2a.hi.s32.s32", ternary<u32, Dp2a<i16, i8, true>>}, {"dp2a.hi.s32.u32", ternary<u32, Dp2a<i16, u8, true>>},
    {"dp2a.hi.u32.s32", ternary<u32, Dp2a<u16, i8, true>>}, {"dp2a.hi.u32.u32", ternary<u32, Dp2a<u16, u8, true>>},

    B16_32_64(binary, "and", And), B16_32_64(binary, "or", Or), B16_32_64(binary, "xor", Xor),
    B16_32_64(unary, "not", Not), B16_32_64(unary, "cnot", Cnot), B16_32_64(shift, "shl", Shl), ALL_SIX(shift, "shr", Shr),
    {"shf.l.wrap", ternary<u32, ShfLeftWrap>}, {"shf.l.clamp", ternary<u32, ShfLeftClamp>},
    {"shf.r.wrap", ternary<u32, ShfRightWrap>}, {"shf.r.clamp", ternary<u32, ShfRightClamp>},

    {"popc.b32", counting<u32, Popc>}, {"popc.b64", counting<u64, Popc>}, {"clz.b32", counting<u32, Clz>}, {"clz.b64", counting<u64, Clz>},
    {"brev.b32", unary<u32, Brev>}, {"brev.b64", unary<u64, Brev>},
    {"bfind.s32", counting<i32, Bfind<false>>}, {"bfind.u32", counting<u32, Bfind<false>>},
    {"bfind.s64", counting<i64, Bfind<false>>}, {"bfind.u64", counting<u64, Bfind<false>>},
    {"bfind.shiftamt.s32", counting<i32, Bfind<true>>}, {"bfind.shiftamt.u32", counting<u32, Bfind<true>>},
    {"bfind.shiftamt.s64", counting<i64, Bfind<true>>}, {"bfind.shiftamt.u64", counting<u64, Bfind<true>>},
    {"bmsk.clamp", binary<u32, Bmsk<true>>}, {"bmsk.wrap", binary<u32, Bmsk<false>>},
    {"szext.clamp.s32", binary<i32, Szext<true>>}, {"szext.clamp.u32", binary<u32, Szext<true>>},
    {"szext.wrap.s32", binary<i32, Szext<false>>}, {"szext.wrap.u32", binary<u32, Szext<false>>},
    {"bfe.s32", bfe<i32>}, {"bfe.u32", bfe<u32>}, {"bfe.s64", bfe<i64>}, {"bfe.u64", bfe<u64>},
    {"bfi.b32", bfi<u32>}, {"bfi.b64", bfi<u64>}, {"fns.b32", ternary<u32, Fns>},

    {"prmt", ternary<u32, Prmt>},
    {"prmt.f4e", ternary<u32, PrmtMode<0x3210, 0x4321, 0x5432, 0x6543>>}, {"prmt.b4e", ternary<u32, PrmtMode<0x5670, 0x6701, 0x7012, 0x0123>>},
    {"prmt.rc8", ternary<u32, PrmtMode<0x0000, 0x1111, 0x2222, 0x3333>>}, {"prmt.ecl", ternary<u32, PrmtMode<0x3210, 0x3211, 0x3222, 0x3333>>},
    {"prmt.ecr", ternary<u32, PrmtMode<0x0000, 0x1110, 0x2210, 0x3210>>}, {"prmt.rc16", ternary<u32, PrmtMode<0x1010, 0x3232, 0x1010, 0x3232>>},
};

}  // namespace

// ---- carry chains: the condition code is the predicate e; i0 bit 0: it comes in, bit 1: it goes out -------------------

template <class T, class Sum> Flow carry_chain(Warp& w, const Record& r, u32 mask, Sum sum) {
    const Lanes<T> d(w, r.d);
    const u32 in = r.i0 & 1 ? w.preds[r.e] : 0;
    u32 out = 0;
    each_lane(mask, [&, d](int lane) {
        const unsigned __int128 total = sum(lane, in >> lane & 1);
        d.set(lane, (T)total);
        out |= (u32)(total >> BITS<T> & 1) << lane;
    });
    if (r.i0 & 2) w.set_pred(r.e, mask, out);
    return Flow::next;
}
template <class T> Flow add_carry(Warp& w, const Record& r, u32 mask) {
    const Lanes<T> a(w, r.a), b(w, r.b);
    return carry_chain<T>(w, r, mask, [=](int lane, u32 in) { return (unsigned __int128)a[lane] + b[lane] + in; });
}
template <class T> Flow sub_borrow(Warp& w, const Record& r, u32 mask) {                // the borrow is the carry out
    const Lanes<T> a(w, r.a), b(w, r.b);
    return carry_chain<T>(w, r, mask, [=](int lane, u32 in) { return (unsigned __int128)a[lane] - b[lane] - in; });
}
template <class T, class Product> Flow mad_carry(Warp& w, const Record& r, u32 mask) {
    const Lanes<T> a(w, r.a), b(w, r.b), c(w, r.c);
    return carry_chain<std::make_unsigned_t<T>>(w, r, mask, [=](int lane, u32 in) {
        using U = std::make_unsigned_t<T>;
        return (unsigned __int128)(U)Product()(a[lane], b[lane]) + (U)c[lane] + in;
    });
}
static const Registration carries[] = {
    {"add.cc.b32", add_carry<u32>}, {"add.cc.b64", add_carry<u64>}, {"sub.cc.b32", sub_borrow<u32>}, {"sub.cc.b64", sub_borrow<u64>},
    {"mad.lo.cc.b32", mad_carry<u32, MulLo>}, {"mad.lo.cc.b64", mad_carry<u64, MulLo>},
    {"mad.hi.cc.s32", mad_carry<i32, MulHi>}, {"mad.hi.cc.u32", mad_carry<u32, MulHi>},
    {"mad.hi.cc.s64", mad_carry<i64, MulHi>}, {"mad.hi.cc.u64", mad_carry<u64, MulHi>},
};

// lop3: bit (a, b, c) of the table i0.
HANDLER(lop3, "lop3") {
    const u32 *a = w.reg(r.a), *b = w.reg(r.b), *c = w.reg(r.c);
    u32* d = w.reg(r.d);
    u32 table[8];
    for (int i = 0; i < 8; ++i) table[i] = r.i0 >> i & 1 ? ~0u : 0;
    each_lane(mask, [=](int lane) {
        const u32 x = a[lane], y = b[lane], z = c[lane];
        const u32 zero = (~y & ((~z & table[0]) | (z & table[1]))) | (y & ((~z & table[2]) | (z & table[3])));
        const u32 one = (~y & ((~z & table[4]) | (z & table[5]))) | (y & ((~z & table[6]) | (z & table[7])));
        d[lane] = (~x & zero) | (x & one);
    });
    return Flow::next;
}

// ---- predicates and selection ----------------------------------------------------------------------------------------

// i0 bit 0: a is negated, bit 1: b is.
static u32 predicate_operand(const Warp& w, i32 number, bool negated) { return negated ? ~w.preds[number] : w.preds[number]; }
template <class Op> static Flow combine(Warp& w, const Record& r, u32 mask) {
    w.set_pred(r.d, mask, Op()(predicate_operand(w, r.a, r.i0 & 1), predicate_operand(w, r.b, r.i0 & 2)));
    return Flow::next;
}
HANDLER(mov_pred, "mov.pred") {
    w.set_pred(r.d, mask, predicate_operand(w, r.a, r.i0 & 1));
    return Flow::next;
}
HANDLER(set_pred, "mov.pred.constant") {
    w.set_pred(r.d, mask, r.i0 ? ALL_LANES : 0);
    return Flow::next;
}

// d = predicate c ? a : b.
template <class T> static Flow selp(Warp& w, const Record& r, u32 mask) {
    const Lanes<T> a(w, r.a), b(w, r.b), d(w, r.d);
    const u32 choice = w.preds[r.c];
    each_lane(mask, [=](int lane) { d.set(lane, choice >> lane & 1 ? a[lane] : b[lane]); });
    return Flow::next;
}

struct Eq { template <class T> bool operator()(T a, T b) const { return a == b; } };
struct Lt { template <class T> bool operator()(T a, T b) const { return a < b; } };

static const Registration selections[] = {
    {"and.pred", combine<And>}, {"or.pred", combine<Or>}, {"xor.pred", combine<Xor>},
    {"selp.b32", selp<u32>}, {"selp.b64", selp<u64>},
    B16_32_64(setp, "setp.eq", Eq), ALL_SIX(setp, "setp.lt", Lt),
};

}  // namespace emu
