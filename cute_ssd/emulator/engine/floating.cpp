// f32, f64 and packed f32: arithmetic in every rounding, functions, comparisons.
#include <cfenv>
#include <cmath>
#include "lanes.h"
#include "numbers.h"

namespace emu {
namespace {

// ---- arithmetic ------------------------------------------------------------------------------------------------------

struct Add { template <class T> T operator()(T a, T b, T) const { return a + b; } };
struct Sub { template <class T> T operator()(T a, T b, T) const { return a - b; } };
struct Mul { template <class T> T operator()(T a, T b, T) const { return a * b; } };
struct Div { template <class T> T operator()(T a, T b, T) const { return a / b; } };
struct Rcp { template <class T> T operator()(T a, T, T) const { return 1 / a; } };
struct Sqrt {
    float operator()(float a, float, float) const { return __builtin_sqrtf(a); }
    double operator()(double a, double, double) const { return __builtin_sqrt(a); }
};
struct Fma {
    float operator()(float a, float b, float c) const { return __builtin_fmaf(a, b, c); }
    double operator()(double a, double b, double c) const { return __builtin_fma(a, b, c); }
};
struct Rsqrt { template <class T> T operator()(T a, T, T) const { return (T)(1 / std::sqrt((double)a)); } };
// a / b as a * (1 / b) does it: a reciprocal that would be denormal is zero.
struct DivApprox {
    float operator()(float a, float b, float) const {
        const float magnitude = std::fabs(b);
        return magnitude > 0x1p126f && magnitude < INFINITY ? a * std::copysign(0.0f, b) : a / b;
    }
};

// Rounded to nearest; Op takes three operands and looks at `arity` of them. The words of a packed pair follow each other.
template <class Op, int arity, bool ftz, int words = 1> Flow nearest(Warp& w, const Record& r, u32 mask) {
    for (int k = 0; k < words; ++k) {
        const Lanes<float> a(w, r.a + k), b(w, (arity > 1 ? r.b : r.a) + k), c(w, (arity > 2 ? r.c : r.a) + k);
        u32* d = w.reg(r.d + k);
        each_lane(mask, [=](int lane) {
            float x = a[lane], y = b[lane], z = c[lane];
            if (ftz) x = flush(x), y = flush(y), z = flush(z);
            const u32 bits = canonical(Op()(x, y, z));
            d[lane] = ftz ? flush(bits) : bits;
        });
    }
    return Flow::next;
}
template <class Op, int arity> Flow nearest64(Warp& w, const Record& r, u32 mask) {
    const Lanes<double> a(w, r.a), b(w, arity > 1 ? r.b : r.a), c(w, arity > 2 ? r.c : r.a), d(w, r.d);
    each_lane(mask, [=](int lane) { d.set(lane, Op()(a[lane], b[lane], c[lane])); });
    return Flow::next;
}

// The rounding mode of the host's thread while an object of this class lives.
struct HostRounding {
    explicit HostRounding(i64 mode) {
        constexpr int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
        std::fesetround(modes[mode & 3]);
    }
    ~HostRounding() { std::fesetround(FE_TONEAREST); }
};

#if defined(__GNUC__) && !defined(__clang__)
#define OPAQUE [[gnu::noipa]]
#else
#define OPAQUE [[gnu::noinline]]
#endif

template <class T> struct Operands { T a[LANES], b[LANES], c[LANES], result[LANES]; };

// The compiler knows of one rounding mode only: it must see no arithmetic between the changes of mode, just a call.
template <class T, class Op> OPAQUE void in_current_rounding(Operands<T>& x) {
    for (int lane = 0; lane < LANES; ++lane) x.result[lane] = Op()(x.a[lane], x.b[lane], x.c[lane]);
}

constexpr i64 FTZ = 8, SAT = 16;           // bits of i0 above the rounding mode (floating.py)

template <class T, class Op, int arity, int words = 1> Flow any_rounding(Warp& w, const Record& r, u32 mask) {
    const bool ftz = r.i0 & FTZ, saturate = r.i0 & SAT;
    for (int k = 0; k < words; ++k) {
        const Lanes<T> a(w, r.a + k), b(w, (arity > 1 ? r.b : r.a) + k), c(w, (arity > 2 ? r.c : r.a) + k), d(w, r.d + k);
        Operands<T> x;
        for (int lane = 0; lane < LANES; ++lane) x.a[lane] = a[lane], x.b[lane] = b[lane], x.c[lane] = c[lane];
        if constexpr (sizeof(T) == 4)
            if (ftz) for (int lane = 0; lane < LANES; ++lane) x.a[lane] = flush(x.a[lane]), x.b[lane] = flush(x.b[lane]), x.c[lane] = flush(x.c[lane]);
        {
            const HostRounding rounding(r.i0);
            in_current_rounding<T, Op>(x);
        }
        each_lane(mask, [&](int lane) {
            T value = x.result[lane];
            if constexpr (sizeof(T) == 4) {
                value = as_float(canonical(value));
                if (ftz) value = flush(value);
                if (saturate) value = value > 1 ? 1 : value > 0 ? value : 0;      // a NaN becomes 0
            }
            d.set(lane, value);
        });
    }
    return Flow::next;
}

// ---- minimum and maximum ---------------------------------------------------------------------------------------------

// A NaN loses unless `nan`; -0 is less than +0.
template <bool maximum, bool nan> struct Extreme {
    float operator()(float a, float b) const {
        const u32 x = as_bits(a), y = as_bits(b);
        const bool a_nan = a != a, b_nan = b != b;
        u32 chosen = pick(maximum ? a > b : a < b, x, y);
        chosen = pick(a == b, maximum ? x & y : x | y, chosen);
        if constexpr (nan) chosen = pick(a_nan | b_nan, NAN_F32, chosen);
        else chosen = pick(b_nan, pick(a_nan, NAN_F32, x), pick(a_nan, y, chosen));
        return as_float(chosen);
    }
    float operator()(float a, float b, float c) const { return (*this)((*this)(a, b), c); }
};
template <bool maximum> float extreme(float a, float b, i64 how) {                 // how: i0 of floating.py's minmax
    if (how & FTZ) a = flush(a), b = flush(b);
    const u32 sign = (as_bits(a) ^ as_bits(b)) & 0x80000000u;
    if (how & 4) a = std::fabs(a), b = std::fabs(b);
    const float value = how & 1 ? Extreme<maximum, true>()(a, b) : Extreme<maximum, false>()(a, b);
    return how & 2 && value == value ? as_float(as_bits(value) | sign) : value;
}
template <bool maximum> Flow extremes(Warp& w, const Record& r, u32 mask) {
    const Lanes<float> a(w, r.a), b(w, r.b), d(w, r.d);
    each_lane(mask, [=, &r](int lane) { d.set(lane, extreme<maximum>(a[lane], b[lane], r.i0)); });
    return Flow::next;
}
// f16 and bf16, through f32: nothing is rounded. The hot case has neither modifiers but .NaN nor denormals to flush.
template <bool maximum, u32 (*narrow)(float), float (*widen)(u32)> Flow half_extremes(Warp& w, const Record& r, u32 mask) {
    const u32 *a = w.reg(r.a), *b = w.reg(r.b);
    u32* d = w.reg(r.d);
    const i64 how = r.i0;
    const u32 upper = how & 64 ? 0xffff0000u : 0;
    auto both = [=](int lane, auto one) { d[lane] = one(a[lane] & 0xffff, b[lane] & 0xffff) | (one(a[lane] >> 16, b[lane] >> 16) << 16 & upper); };
    auto general = [=](u32 x, u32 y) {
        if (how & FTZ) {                                   // f16 only
            if (!(x & 0x7c00)) x &= 0x8000;
            if (!(y & 0x7c00)) y &= 0x8000;
        }
        return narrow(extreme<maximum>(widen(x), widen(y), how & 7));
    };
    if (how & (FTZ | 6)) each_lane(mask, [=](int lane) { both(lane, general); });
    else if (how & 1) each_lane(mask, [=](int lane) { both(lane, [](u32 x, u32 y) { return narrow(Extreme<maximum, true>()(widen(x), widen(y))); }); });
    else each_lane(mask, [=](int lane) { both(lane, [](u32 x, u32 y) { return narrow(Extreme<maximum, false>()(widen(x), widen(y))); }); });
    return Flow::next;
}
inline float widen_bf16(u32 bits) { return as_float(bits << 16); }

template <bool maximum> struct Extreme64 {
    double operator()(double a, double b, double) const {
        if (a != a) return b;
        if (b != b) return a;
        if (a == b) return std::signbit(a) == maximum ? b : a;
        return (a < b) == maximum ? b : a;
    }
};

// ---- functions -------------------------------------------------------------------------------------------------------

// 2^x for ex2.approx: a polynomial for 2^f, |f| <= 1/2, times a power of two in two steps, so that overflow and denormals
// come out as they should. Relative error below 2^-23.
struct Ex2 {
    float operator()(float x, float, float) const {
        const float bounded = x > 130.0f ? 130.0f : x < -160.0f ? -160.0f : x;
        const float shifted = bounded + 0x1.8p23f;         // the whole part in the low bits
        const float f = bounded - (shifted - 0x1.8p23f);
        const i32 n = (i32)(as_bits(shifted) - as_bits(0x1.8p23f)), half = n >> 1;
        float p = 0.00015461447765f;
        p = __builtin_fmaf(p, f, 0.00133908668067f);
        p = __builtin_fmaf(p, f, 0.00961805693805f);
        p = __builtin_fmaf(p, f, 0.0555035695434f);
        p = __builtin_fmaf(p, f, 0.240226507187f);
        p = __builtin_fmaf(p, f, 0.69314718246f);
        p = __builtin_fmaf(p, f, 1.0f);
        const float scaled = p * as_float((u32)(half + 127) << 23) * as_float((u32)(n - half + 127) << 23);
        return x != x ? x : scaled;
    }
};
struct Lg2 { float operator()(float a, float, float) const { return (float)std::log2((double)a); } };
struct Sin { float operator()(float a, float, float) const { return (float)std::sin((double)a); } };
struct Cos { float operator()(float a, float, float) const { return (float)std::cos((double)a); } };
struct Tanh { float operator()(float a, float, float) const { return (float)std::tanh((double)a); } };

// rcp.approx.ftz.f64 and rsqrt.approx.ftz.f64 read and write upper words only.
template <class Op> struct Gross {
    static u64 upper(double x) {
        const u64 bits = as_bits(x) & 0xffffffff00000000ull;
        return bits & 0x7ff0000000000000ull ? bits : bits & 0x8000000000000000ull;
    }
    double operator()(double a, double, double) const {
        const double exact = Op()(as_double(a != a ? as_bits(a) : upper(a)), 0.0, 0.0);
        return exact != exact ? exact : as_double(upper(exact));
    }
};

// ---- comparisons -----------------------------------------------------------------------------------------------------

struct Eq { template <class T> bool operator()(T a, T b) const { return a == b; } };
struct Lg { template <class T> bool operator()(T a, T b) const { return a < b || a > b; } };
struct Lt { template <class T> bool operator()(T a, T b) const { return a < b; } };
struct Le { template <class T> bool operator()(T a, T b) const { return a <= b; } };
struct Unordered { template <class T> bool operator()(T a, T b) const { return a != a || b != b; } };
template <class Op> struct Flushed { bool operator()(float a, float b) const { return Op()(flush(a), flush(b)); } };
template <class Op, float (*widen)(u16), bool ftz> struct Halves {
    static float load(u16 bits) { return widen(ftz && !(bits & 0x7c00) ? bits & 0x8000 : bits); }
    bool operator()(u16 a, u16 b) const { return Op()(load(a), load(b)); }
};
// Packed: p is about the lower halves, q about the upper ones.
template <class Op> Flow setp_halves(Warp& w, const Record& r, u32 mask) {
    const u32 *a = w.reg(r.a), *b = w.reg(r.b);
    u32 lower = 0, upper = 0;
    for (int lane = 0; lane < LANES; ++lane) {
        lower |= (u32)Op()((u16)a[lane], (u16)b[lane]) << lane;
        upper |= (u32)Op()((u16)(a[lane] >> 16), (u16)(b[lane] >> 16)) << lane;
    }
    if (!(r.i1 & 2)) return set_predicates(w, r, mask, lower, upper);
    Record inverted = r;
    inverted.i1 &= ~2;
    return set_predicates(w, inverted, mask, ~lower, ~upper);
}

// i0: finite, infinite, number, notanumber, normal, subnormal.
bool classify(double x, bool subnormal, i64 test) {
    switch (test) {
        case 0: return std::isfinite(x);
        case 1: return std::isinf(x);
        case 2: return x == x;
        case 3: return x != x;
        case 4: return std::isfinite(x) && x != 0 && !subnormal;
        default: return subnormal;
    }
}
template <class T> Flow testp(Warp& w, const Record& r, u32 mask) {
    const Lanes<T> a(w, r.a);
    u32 holds = 0;
    for (int lane = 0; lane < LANES; ++lane)
        holds |= (u32)classify(a[lane], std::fpclassify(a[lane]) == FP_SUBNORMAL, r.i0) << lane;
    w.set_pred(r.d, mask, holds);
    return Flow::next;
}

template <u32 exponents> struct Flush16 {                  // exponents: the exponent fields of the halves that count
    u32 operator()(u32 a) const {
        u32 keep = 0x80008000u;
        if (a & exponents & 0x7c00u) keep |= 0xffffu;
        if (a & exponents & 0x7c000000u) keep |= 0xffff0000u;
        return a & keep;
    }
};
struct Flush { u32 operator()(u32 a) const { return flush(a); } };

// ---- handlers --------------------------------------------------------------------------------------------------------

#define ARITHMETIC(name, Op, arity)                                                                                          \
    {name ".f32", nearest<Op, arity, false>}, {name ".ftz.f32", nearest<Op, arity, true>}, {name ".f64", nearest64<Op, arity>}, \
    {name ".any.f32", any_rounding<float, Op, arity>}, {name ".any.f64", any_rounding<double, Op, arity>}
#define PACKED(name, Op, arity)                                                                                              \
    {name ".f32x2", nearest<Op, arity, false, 2>}, {name ".ftz.f32x2", nearest<Op, arity, true, 2>},                           \
    {name ".any.f32x2", any_rounding<float, Op, arity, 2>}
#define FUNCTION(name, Op) {name ".f32", nearest<Op, 1, false>}, {name ".ftz.f32", nearest<Op, 1, true>}
#define EXTREMES(name, maximum)                                                                                              \
    {name ".f32", binary<float, Extreme<maximum, false>>}, {name ".NaN.f32", binary<float, Extreme<maximum, true>>},           \
    {name ".f32x3", ternary<float, Extreme<maximum, false>>}, {name ".NaN.f32x3", ternary<float, Extreme<maximum, true>>},     \
    {name ".any.f32", extremes<maximum>}, {name ".any.f64", nearest64<Extreme64<maximum>, 2>},                                 \
    {name ".any.f16", half_extremes<maximum, to_f16_bits, from_f16_bits>}, {name ".any.bf16", half_extremes<maximum, to_bf16_bits, widen_bf16>}
#define COMPARISONS(name, Op)                                                                                                \
    {name ".f32", setp<float, Op>}, {name ".ftz.f32", setp<float, Flushed<Op>>}, {name ".f64", setp<double, Op>},              \
    {name ".f16", setp<u16, Halves<Op, from_f16, false>>}, {name ".ftz.f16", setp<u16, Halves<Op, from_f16, true>>},           \
    {name ".bf16", setp<u16, Halves<Op, from_bf16, false>>}, {name ".f16x2", setp_halves<Halves<Op, from_f16, false>>},        \
    {name ".ftz.f16x2", setp_halves<Halves<Op, from_f16, true>>}, {name ".bf16x2", setp_halves<Halves<Op, from_bf16, false>>}

const Registration registrations[] = {
    ARITHMETIC("add", Add, 2), ARITHMETIC("sub", Sub, 2), ARITHMETIC("mul", Mul, 2), ARITHMETIC("fma", Fma, 3), ARITHMETIC("div", Div, 2),
    ARITHMETIC("rcp", Rcp, 1), ARITHMETIC("sqrt", Sqrt, 1), PACKED("add", Add, 2), PACKED("sub", Sub, 2), PACKED("mul", Mul, 2), PACKED("fma", Fma, 3),
    {"div.approx.f32", nearest<DivApprox, 2, false>}, {"div.approx.ftz.f32", nearest<DivApprox, 2, true>},
    FUNCTION("rsqrt", Rsqrt), {"rsqrt.f64", nearest64<Rsqrt, 1>}, {"rcp.gross.f64", nearest64<Gross<Rcp>, 1>}, {"rsqrt.gross.f64", nearest64<Gross<Rsqrt>, 1>},
    FUNCTION("ex2", Ex2), FUNCTION("lg2", Lg2), FUNCTION("sin", Sin), FUNCTION("cos", Cos), {"tanh.f32", nearest<Tanh, 1, false>},
    EXTREMES("min", false), EXTREMES("max", true), {"testp.f32", testp<float>}, {"testp.f64", testp<double>},
    COMPARISONS("setp.eq", Eq), COMPARISONS("setp.lg", Lg), COMPARISONS("setp.lt", Lt), COMPARISONS("setp.le", Le), COMPARISONS("setp.nan", Unordered),
    {"flush.f32", unary<u32, Flush>}, {"flush.f16", unary<u32, Flush16<0x7c00>>}, {"flush.f16x2", unary<u32, Flush16<0x7c007c00>>},
};

}  // namespace
}  // namespace emu
