// atom and red, synchronous and asynchronous; st.async. Lanes take their turn in ascending order.
#include "addresses.h"
#include "numbers.h"

namespace emu {

// Further flags of atomics, above those of addresses.h. A red is an atom without destinations.
constexpr i64 RELEASE = 8;                       // and ORDERED: acquire
constexpr int SPACE_SHIFT = 4, COUNT_SHIFT = 8;  // i1 also holds the space (three bits) and the number of elements

template <class U> struct Operands { U a, b; bool global; };

static Space space_of(const Record& r) { return (Space)(r.i1 >> SPACE_SHIFT & 7); }

template <Space S> static u32 find_in(Warp& w, const Record& r, u32 mask, u32 n, Pointers& lanes) {
    u32 shared = S == Space::shared || S == Space::cluster ? mask : 0;
    if constexpr (S == Space::generic)
        for (u32 m = mask; m; m &= m - 1) {
            const u64 address = w.wide(r.a, first_lane(m)) + (u64)r.i0;
            if (is_local(address)) fault("local atomic", w, r.line, format("lane %d: an atomic operation on local memory", first_lane(m)));
            if (is_shared(address)) shared |= m & -m;
        }
    find_lanes<S>(w, {r.a, r.i0}, mask, n, lanes, r.line);
    if (Sanitizer* s = w.cta->cluster->sanitizer) {
        if (r.i1 & RELEASE) order<S>(*s, w, r, mask, false);
        report<S>(*s, w, r, mask, false, n, Access::atomic);
        if (r.i1 & ORDERED) order<S>(*s, w, r, mask, true);
    }
    return shared;
}

// Host addresses of the lanes; returns the lanes that point to shared memory, which only this host thread touches.
static u32 find(Warp& w, const Record& r, u32 mask, u32 n, Pointers& lanes) {
    switch (space_of(r)) {
        case Space::shared: return find_in<Space::shared>(w, r, mask, n, lanes);
        case Space::cluster: return find_in<Space::cluster>(w, r, mask, n, lanes);
        case Space::global: return find_in<Space::global>(w, r, mask, n, lanes);
        default: return find_in<Space::generic>(w, r, mask, n, lanes);
    }
}

template <class U> static U operand(Warp& w, i32 slot, int lane) {
    if constexpr (sizeof(U) == 8) return w.wide(slot, lane);
    else return (U)w.reg(slot, lane);
}

// Returns the old value; `changed` is set if the new one differs.
template <class U, auto F> static U apply(u8* at, Operands<U> x, bool& changed) {
    U old;
    if (!x.global) {
        std::memcpy(&old, at, sizeof old);
        const U fresh = F(old, x);
        std::memcpy(at, &fresh, sizeof fresh);
        changed |= fresh != old;
        return old;
    }
    U* const place = (U*)at;
    old = __atomic_load_n(place, __ATOMIC_SEQ_CST);
    while (!__atomic_compare_exchange_n(place, &old, F(old, x), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
    changed |= F(old, x) != old;
    return old;
}

// a, i0: address; pool: slots of the operands, then of the results when e is 1; c: second operand of cas.
template <class U, auto F> static Flow atom(Warp& w, const Record& r, u32 mask) {
    const int count = (int)(r.i1 >> COUNT_SHIFT);
    const i32* from = w.cta->cluster->program.pool + r.pool;
    Pointers lanes;
    const u32 shared = find(w, r, mask, sizeof(U) * count, lanes);
    bool changed = false;                                      // an atomic that polls changes nothing
    for (u32 m = mask; m; m &= m - 1) {
        const int lane = first_lane(m);
        U old[8];
        for (int k = 0; k < count; ++k) {
            const U b = r.c >= 0 ? operand<U>(w, r.c, lane) : 0;
            old[k] = apply<U, F>(lanes.at[lane] + k * sizeof(U), {operand<U>(w, from[k], lane), b, !(shared >> lane & 1)}, changed);
        }
        for (int k = 0; r.e && k < count; ++k) {                        // after all operands: a result may go to an operand's register
            if constexpr (sizeof(U) == 8) w.set_wide(from[count + k], lane, old[k]);
            else w.reg(from[count + k], lane) = old[k];
        }
    }
    if (changed) ++w.cta->cluster->events;
    return Flow::next;
}

// ---- operations that complete on an mbarrier --------------------------------------------------------------------------

// The mbarrier (slot b + i1 bytes) must lie in the CTA that the data goes to.
static u32 completion(Warp& w, const Record& r, int lane, u32 address, u32 n) {
    Cluster& cluster = *w.cta->cluster;
    const u32 mbarrier = w.reg(r.b, lane) + (u32)r.i1;
    if (mbarrier >> RANK_SHIFT != address >> RANK_SHIFT)
        fault("mbarrier", w, r.line, format("lane %d writes to CTA rank %u and completes on an mbarrier of CTA rank %u", lane, address >> RANK_SHIFT, mbarrier >> RANK_SHIFT));
    cluster.mbarrier(mbarrier, w, r.line);
    if (Sanitizer* s = cluster.sanitizer) {
        s->mbarrier_use(w, r, lane, mbarrier);
        s->begin_async(w, r, lane, Engine::store, mbarrier);
        s->async_shared(address, n, r.e ? Access::atomic : Access::write);
    }
    return mbarrier;
}

// a, i0: address; b, i1: mbarrier; pool: slot of each word, d: words.
HANDLER(st_async, "st.async") {
    Cluster& cluster = *w.cta->cluster;
    struct Words { u32 at[8]; };
    const u32 n = (u32)r.d * 4;
    for (u32 m = mask; m; m &= m - 1) {
        const int lane = first_lane(m);
        const u32 address = w.reg(r.a, lane) + (u32)r.i0;
        u8* to = cluster.shared_bytes(address, n, n, w, r.line);
        const u32 mbarrier = completion(w, r, lane, address, n);
        Words words{};
        for (int k = 0; k < r.d; ++k) words.at[k] = w.reg(cluster.program.pool[r.pool + k], lane);
        cluster.issue_tma(cluster.cta_of(address, w, r.line), [&cluster, &w, &r, to, n, words, mbarrier] {
            std::memcpy(to, words.at, n);
            cluster.mbarrier_complete(mbarrier, n, w, r.line);
        });
    }
    ++cluster.events;
    return Flow::next;
}

// a, i0: address; b, i1: mbarrier; c: operand, e: 1.
template <class U, auto F> static Flow red_async(Warp& w, const Record& r, u32 mask) {
    Cluster& cluster = *w.cta->cluster;
    for (u32 m = mask; m; m &= m - 1) {
        const int lane = first_lane(m);
        const u32 address = w.reg(r.a, lane) + (u32)r.i0;
        u8* to = cluster.shared_bytes(address, sizeof(U), sizeof(U), w, r.line);
        const u32 mbarrier = completion(w, r, lane, address, sizeof(U));
        const Operands<U> x{operand<U>(w, r.c, lane), 0, false};
        cluster.issue_tma(cluster.cta_of(address, w, r.line), [&cluster, &w, &r, to, x, mbarrier] {
            bool changed = false;
            apply<U, F>(to, x, changed);
            cluster.mbarrier_complete(mbarrier, sizeof(U), w, r.line);
        });
    }
    ++cluster.events;
    return Flow::next;
}

// ---- what they compute ------------------------------------------------------------------------------------------------

using Half = u16 (*)(u16, u16);

static u16 add_f16(u16 a, u16 b) { return to_f16(from_f16(a) + from_f16(b)); }     // f32 has the bits that make two roundings one
static u16 add_bf16(u16 a, u16 b) { return to_bf16(from_bf16(a) + from_bf16(b)); }

// min and max of f16 and bf16: a number wins over a NaN, -0 is less than +0.
template <float (*from)(u16), bool max> static u16 extreme(u16 a, u16 b) {
    const float x = from(a), y = from(b);
    if (x != x) return y != y ? NAN_16 : b;
    if (y != y) return a;
    const bool less = x < y || (x == y && a >> 15 > b >> 15);
    return less == max ? b : a;
}

template <Half f> static u32 pairwise(u32 a, u32 b) { return f((u16)a, (u16)b) | (u32)f((u16)(a >> 16), (u16)(b >> 16)) << 16; }

// On global memory atom.add.f32 flushes denormals, on shared memory it does not (PTX ISA, atom).
static u32 add_f32(u32 old, Operands<u32> x) {
    if (!x.global) return canonical(as_float(old) + as_float(x.a));
    return flush(canonical(flush(as_float(old)) + flush(as_float(x.a))));
}

static u64 add_f64(u64 old, Operands<u64> x) {
    const double sum = as_double(old) + as_double(x.a);
    return sum != sum ? 0x7fffffffffffffffull : as_bits(sum);
}

template <class U, auto F> static void add(const char* operation) { Registration(("atom." + std::string(operation)).c_str(), atom<U, F>); }

template <class U, auto F> static void add_both(const char* operation) {
    add<U, F>(operation);
    Registration(("red.async." + std::string(operation)).c_str(), red_async<U, F>);
}

template <Half f, Half g> static void add_halves(const std::string& operation) {
    add<u16, [](u16 old, Operands<u16> x) { return f(old, x.a); }>((operation + ".f16").c_str());
    add<u16, [](u16 old, Operands<u16> x) { return g(old, x.a); }>((operation + ".bf16").c_str());
    add<u32, [](u32 old, Operands<u32> x) { return pairwise<f>(old, x.a); }>((operation + ".f16x2").c_str());
    add<u32, [](u32 old, Operands<u32> x) { return pairwise<g>(old, x.a); }>((operation + ".bf16x2").c_str());
}

template <class U> static U exchange(U, Operands<U> x) { return x.a; }
template <class U> static U compare(U old, Operands<U> x) { return old == x.a ? x.b : old; }

static bool add_operations() {
    add_both<u32, [](u32 old, Operands<u32> x) { return old + x.a; }>("add.b32");
    add_both<u64, [](u64 old, Operands<u64> x) { return old + x.a; }>("add.b64");
    add_both<u32, [](u32 old, Operands<u32> x) { return std::min(old, x.a); }>("min.u32");
    add_both<u32, [](u32 old, Operands<u32> x) { return std::max(old, x.a); }>("max.u32");
    add_both<u32, [](u32 old, Operands<u32> x) { return (u32)std::min((i32)old, (i32)x.a); }>("min.s32");
    add_both<u32, [](u32 old, Operands<u32> x) { return (u32)std::max((i32)old, (i32)x.a); }>("max.s32");
    add<u64, [](u64 old, Operands<u64> x) { return std::min(old, x.a); }>("min.u64");
    add<u64, [](u64 old, Operands<u64> x) { return std::max(old, x.a); }>("max.u64");
    add<u64, [](u64 old, Operands<u64> x) { return (u64)std::min((i64)old, (i64)x.a); }>("min.s64");
    add<u64, [](u64 old, Operands<u64> x) { return (u64)std::max((i64)old, (i64)x.a); }>("max.s64");
    add_both<u32, [](u32 old, Operands<u32> x) { return old & x.a; }>("and.b32");
    add_both<u32, [](u32 old, Operands<u32> x) { return old | x.a; }>("or.b32");
    add_both<u32, [](u32 old, Operands<u32> x) { return old ^ x.a; }>("xor.b32");
    add<u64, [](u64 old, Operands<u64> x) { return old & x.a; }>("and.b64");
    add<u64, [](u64 old, Operands<u64> x) { return old | x.a; }>("or.b64");
    add<u64, [](u64 old, Operands<u64> x) { return old ^ x.a; }>("xor.b64");
    add_both<u32, [](u32 old, Operands<u32> x) { return old >= x.a ? 0 : old + 1; }>("inc.u32");
    add_both<u32, [](u32 old, Operands<u32> x) { return (old == 0 || old > x.a) ? x.a : old - 1; }>("dec.u32");
    add<u32, exchange<u32>>("exch.b32"), add<u64, exchange<u64>>("exch.b64");
    add<u16, compare<u16>>("cas.b16"), add<u32, compare<u32>>("cas.b32"), add<u64, compare<u64>>("cas.b64");
    add<u32, add_f32>("add.f32"), add<u64, add_f64>("add.f64");
    add_halves<add_f16, add_bf16>("add");
    add_halves<extreme<from_f16, false>, extreme<from_bf16, false>>("min");
    add_halves<extreme<from_f16, true>, extreme<from_bf16, true>>("max");
    return true;
}

[[maybe_unused]] static const bool operations = add_operations();

}  // namespace emu
