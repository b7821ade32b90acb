// Typed views of slots, and the loops of handlers that compute each lane on its own.
#pragma once
#include <type_traits>
#include <utility>
#include "core.h"

namespace emu {

// The slots of a register as 32 values of type T; float and double are read and written as bit patterns.
template <class T> struct Lanes {
    u32* low;
    Lanes(Warp& w, i32 slot) : low(w.reg(slot)) {}
    T operator[](int lane) const {
        if constexpr (std::is_same_v<T, float>) return as_float(low[lane]);
        else if constexpr (std::is_same_v<T, double>) return as_double(low[lane] | (u64)low[lane + LANES] << 32);
        else if constexpr (sizeof(T) == 8) return (T)(low[lane] | (u64)low[lane + LANES] << 32);
        else return (T)low[lane];
    }
    void set(int lane, T value) const {
        if constexpr (std::is_same_v<T, float>) low[lane] = as_bits(value);
        else if constexpr (sizeof(T) == 8) {
            u64 bits;
            if constexpr (std::is_same_v<T, double>) bits = as_bits(value);
            else bits = (u64)value;
            low[lane] = (u32)bits;
            low[lane + LANES] = (u32)(bits >> 32);
        } else low[lane] = (u32)(std::make_unsigned_t<T>)value;      // the bits above a narrow value are zero
    }
};

// Op() applied to the operands a, b, c of type T; the result has type D.
template <class T, class Op, class D = T> Flow unary(Warp& w, const Record& r, u32 mask) {
    const Lanes<T> a(w, r.a);
    const Lanes<D> d(w, r.d);
    each_lane(mask, [=](int lane) { d.set(lane, (D)Op()(a[lane])); });
    return Flow::next;
}
template <class T, class Op, class D = T> Flow binary(Warp& w, const Record& r, u32 mask) {
    const Lanes<T> a(w, r.a), b(w, r.b);
    const Lanes<D> d(w, r.d);
    each_lane(mask, [=](int lane) { d.set(lane, (D)Op()(a[lane], b[lane])); });
    return Flow::next;
}
template <class T, class Op, class D = T> Flow ternary(Warp& w, const Record& r, u32 mask) {
    const Lanes<T> a(w, r.a), b(w, r.b);
    const Lanes<D> c(w, r.c), d(w, r.d);
    each_lane(mask, [=](int lane) { d.set(lane, (D)Op()(a[lane], b[lane], c[lane])); });
    return Flow::next;
}

// Bit `lane` of the result says whether Op() holds there. All lanes are looked at: comparisons have no effects.
template <class T, class Op> u32 compare_lanes(Warp& w, const Record& r) {
    const Lanes<T> a(w, r.a), b(w, r.b);
    u32 bits = 0;
    for (int lane = 0; lane < LANES; ++lane) bits |= (u32)(bool)Op()(a[lane], b[lane]) << lane;
    return bits;
}

// The tail of setp: d is p, e is q (or -1). i0: 0 nothing, 1 and, 2 or, 3 xor with predicate c.
// i1 bit 0: c is negated; bit 1: p takes the opposite of the comparison that was made (`geu` is not `lt`), q the comparison.
inline Flow set_predicates(Warp& w, const Record& r, u32 mask, u32 holds, u32 otherwise) {
    if (r.i1 & 2) std::swap(holds, otherwise);
    if (r.i0) {
        const u32 other = r.i1 & 1 ? ~w.preds[r.c] : w.preds[r.c];
        if (r.i0 == 1) holds &= other, otherwise &= other;
        else if (r.i0 == 2) holds |= other, otherwise |= other;
        else holds ^= other, otherwise ^= other;
    }
    w.set_pred(r.d, mask, holds);
    if (r.e >= 0) w.set_pred(r.e, mask, otherwise);
    return Flow::next;
}
template <class T, class Op> Flow setp(Warp& w, const Record& r, u32 mask) {
    const u32 holds = compare_lanes<T, Op>(w, r);
    return set_predicates(w, r, mask, holds, ~holds);
}

}  // namespace emu
