// Arithmetic and functions of f16 and bf16, alone or two in a word.
//
// i0 of every record: bit 3 .ftz, bit 4 .sat, bit 5 .relu, bit 6 both halves of a word (floating.py).
#include <cmath>
#include "lanes.h"
#include "numbers.h"

namespace emu {
namespace {

constexpr i64 FTZ = 8, SAT = 16, RELU = 32, WHOLE_WORD = 64;

struct F16 {
    static float from(u32 bits) { return from_f16_bits(bits); }
    static u32 to(float x) { return to_f16_bits(x); }
    static constexpr u32 exponent = 0x7c00;
};
struct Bf16 {
    static float from(u32 bits) { return as_float(bits << 16); }
    static u32 to(float x) { return to_bf16_bits(x); }
    static constexpr u32 exponent = 0x7f80;
};

// Results are doubles that a later rounding turns into the right 16 bits: exact, or rounded to odd. A product of two is exact.
struct Add { double operator()(double a, double b, double) const { return add_odd(a, b); } };
struct Sub { double operator()(double a, double b, double) const { return add_odd(a, -b); } };
struct Mul { double operator()(double a, double b, double) const { return a * b; } };
struct Fma { double operator()(double a, double b, double c) const { return add_odd(a * b, c); } };
struct Ex2 { double operator()(double a, double, double) const { return std::exp2(a); } };
struct Tanh { double operator()(double a, double, double) const { return std::tanh(a); } };

template <class H> u32 flush_half(u32 bits) { return bits & H::exponent ? bits : bits & 0x8000; }

template <class H, class Op> [[gnu::always_inline]] inline u32 half(u32 a, u32 b, u32 c) {   // else no loop vectorises
    return H::to(to_float_odd(Op()(H::from(a), H::from(b), H::from(c))));
}
template <class H, class Op> u32 half(u32 a, u32 b, u32 c, i64 how) {
    if (how & FTZ) a = flush_half<H>(a), b = flush_half<H>(b), c = flush_half<H>(c);
    u32 bits = half<H, Op>(a, b, c);
    const float value = H::from(bits);
    if (how & FTZ) bits = flush_half<H>(bits);
    if (how & SAT) bits = value > 1 ? H::to(1.0f) : value > 0 ? bits : 0;             // a NaN becomes 0
    if (how & RELU && value == value && bits >> 15) bits = 0;
    return bits;
}
template <class H, class Op, int arity> Flow halves(Warp& w, const Record& r, u32 mask) {
    const u32 *a = w.reg(r.a), *b = w.reg(arity > 1 ? r.b : r.a), *c = w.reg(arity > 2 ? r.c : r.a);
    u32* d = w.reg(r.d);
    const i64 how = r.i0;
    auto lower = [=](int lane, auto... modifiers) -> u32 { return half<H, Op>(a[lane] & 0xffff, b[lane] & 0xffff, c[lane] & 0xffff, modifiers...); };
    auto upper = [=](int lane, auto... modifiers) -> u32 {
        return half<H, Op>(a[lane] >> 16, b[lane] >> 16, c[lane] >> 16, modifiers...) << 16;
    };
    if (how == 0) each_lane(mask, [=](int lane) { d[lane] = lower(lane); });
    else if (how == WHOLE_WORD) each_lane(mask, [=](int lane) { d[lane] = lower(lane) | upper(lane); });
    else each_lane(mask, [=](int lane) { d[lane] = lower(lane, how) | (how & WHOLE_WORD ? upper(lane, how) : 0); });
    return Flow::next;
}

#define BOTH(name, Op, arity) {name ".f16", halves<F16, Op, arity>}, {name ".bf16", halves<Bf16, Op, arity>}

const Registration registrations[] = {
    BOTH("add", Add, 2), BOTH("sub", Sub, 2), BOTH("mul", Mul, 2), BOTH("fma", Fma, 3), BOTH("ex2", Ex2, 1), BOTH("tanh", Tanh, 1),
};

}  // namespace
}  // namespace emu
