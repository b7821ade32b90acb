// Where the lanes of a warp point: addresses of every state space become host memory, bounds and alignment checked.
#pragma once
#include <algorithm>
#include "core.h"
#include "sanitizer.h"

namespace emu {

enum class Space : u8 { generic, shared, cluster, global, local };      // shared: this CTA's only; memory.py has the same order

// Flags of memory instructions (memory.py: FLAGS).
constexpr i64 STRONG = 1;          // volatile, relaxed or stronger: no data race with another strong access
constexpr i64 ORDERED = 2;         // a load that acquires, a store that releases; atomics: see atomics.cpp
constexpr i64 GPU_SCOPE = 4;       // scope .gpu or .sys
constexpr i64 CLUSTER_SCOPE = 128; // scope .cluster; neither: .cta

inline Scope scope_of(const Record& r) { return r.i1 & GPU_SCOPE ? Scope::gpu : r.i1 & CLUSTER_SCOPE ? Scope::cluster : Scope::cta; }

// `at` holds the lanes of the mask; `dense`: all 32 lanes, one right behind the other.
struct Pointers { u8* at[LANES]; bool dense; };

// An address operand: slot + offset.
struct Place { i32 slot; i64 offset; };

inline bool is_local(u64 generic) { return generic >= LOCAL_WINDOW; }
inline bool is_shared(u64 generic) { return generic - SHARED_WINDOW < (u64)1 << 32; }

inline u8* shared_at(Warp& w, u32 address, u32 n, int line) {
    if (address >> RANK_SHIFT != (u32)w.cta->rank)
        fault("shared address", w, line, format("0x%x is not in the shared memory of this CTA (rank %d); only .shared::cluster reaches rank %u",
                                                address, w.cta->rank, address >> RANK_SHIFT));
    return w.cta->cluster->shared_bytes(address, n, n, w, line);
}

inline u8* local_at(Warp& w, u64 offset, u32 n, int lane, int line) {
    u8* at = w.cta->cluster->local_bytes(offset, n, w, lane, line);
    if (offset & (n - 1)) fault("misaligned", w, line, format("local+%llu is not aligned to %u bytes", (unsigned long long)offset, n));
    return at;
}

// The last known range of global memory that begins at the address or before, or null.
inline const Range* last_before(const Launch& launch, u64 address) {
    const Range* end = launch.ranges + launch.nranges;
    const Range* after = std::upper_bound(launch.ranges, end, address, [](u64 a, const Range& r) { return a < r.begin; });
    return after == launch.ranges ? nullptr : after - 1;
}

// The one that holds [begin, end), or null. Numbered addresses lie in the range of their tensor only.
inline const Range* range_around(const Launch& launch, u64 begin, u64 end) {
    const Range* range = last_before(launch, begin);
    return range && begin <= end && end <= range->end ? range : nullptr;
}

// The host address of one lane; n bytes, a power of two, naturally aligned. Faults name the lane's address.
template <Space S> inline u8* lane_address(Warp& w, Place p, int lane, u32 n, int line) {
    Cluster& cluster = *w.cta->cluster;
    const u32 low = w.reg(p.slot, lane) + (u32)p.offset;
    if constexpr (S == Space::shared) return shared_at(w, low, n, line);
    if constexpr (S == Space::cluster) return cluster.shared_bytes(low, n, n, w, line);
    if constexpr (S == Space::local) return local_at(w, low, n, lane, line);
    const u64 address = w.wide(p.slot, lane) + (u64)p.offset;
    if constexpr (S == Space::generic) {
        if (is_local(address)) return local_at(w, address - LOCAL_WINDOW, n, lane, line);
        if (is_shared(address)) return cluster.shared_bytes((u32)(address - SHARED_WINDOW), n, n, w, line);
    }
    return cluster.global_bytes(address, n, n, w, line);
}

// All lanes at once, which is enough when every address is good and they all lie in this CTA's shared memory or in one range of
// global memory. False: look at every lane.
template <Space S> inline bool all_lanes(Warp& w, Place p, u32 mask, u32 n, Pointers& lanes) {
    u32 bad = 0, gaps = ~mask;
    if constexpr (S == Space::shared) {
        Cta& cta = *w.cta;
        const u32* address = w.reg(p.slot);
        const u32 offset = (u32)p.offset - cta.address(SHARED_BASE), size = (u32)cta.shared.size() - SHARED_BASE;
        const u32 end = size < n ? 0 : size - n + 1, first = address[0] + offset;
        u8* const base = cta.shared.data() + SHARED_BASE;
        for (int lane = 0; lane < LANES; ++lane) {
            const u32 at = address[lane] + offset, active = -(mask >> lane & 1);
            bad |= ((at >= end ? 1 : 0) | (at & (n - 1))) & active;
            gaps |= at ^ (first + n * lane);
            lanes.at[lane] = base + at;
        }
        lanes.dense = !gaps;
        return !bad;
    } else if constexpr (S == Space::global || S == Space::generic) {
        const u32 *low = w.reg(p.slot), *high = low + LANES;
        const u64 start = (low[0] | (u64)high[0] << 32) + (u64)p.offset;
        u64 first = ~(u64)0, last = 0, distance = 0;
        for (int lane = 0; lane < LANES; ++lane) {
            const u64 at = (low[lane] | (u64)high[lane] << 32) + (u64)p.offset, idle = (u64)(mask >> lane & 1) - 1;
            bad |= (u32)(at & ~idle) & (n - 1);
            first = std::min(first, at | idle);
            last = std::max(last, at & ~idle);
            distance |= at ^ (start + n * lane);
            lanes.at[lane] = (u8*)(at & UNNUMBERED);
        }
        lanes.dense = !gaps && !distance;
        return !bad && range_around(w.cta->cluster->launch, first, last + n);
    }
    return false;
}

template <Space S> inline void find_lanes(Warp& w, Place p, u32 mask, u32 n, Pointers& lanes, int line) {
    if (all_lanes<S>(w, p, mask, n, lanes)) return;
    lanes.dense = false;
    for (u32 m = mask; m; m &= m - 1) lanes.at[first_lane(m)] = lane_address<S>(w, p, first_lane(m), n, line);
}

// Tells the sanitizer what the lanes touch (not local memory: nobody else sees it). `dense`: as in Pointers.
template <Space S> inline void report(Sanitizer& s, Warp& w, const Record& r, u32 mask, bool dense, u32 n, Access access) {
    u32 shared = 0, addresses[LANES];
    if constexpr (S == Space::shared || S == Space::cluster) {
        const u32* address = w.reg(r.a);
        for (int lane = 0; lane < LANES; ++lane) addresses[lane] = address[lane] + (u32)r.i0;
        shared = mask;
    }
    if constexpr (S == Space::global || S == Space::generic) {
        const bool plain = access == Access::read || access == Access::write;
        if (dense && plain) return s.global(w, r, w.wide(r.a, 0) + (u64)r.i0, LANES * n, access, scope_of(r));
        for (u32 m = mask; m; m &= m - 1) {
            const int lane = first_lane(m);
            const u64 address = w.wide(r.a, lane) + (u64)r.i0;
            if (S == Space::generic && is_local(address)) continue;
            if (S == Space::generic && is_shared(address)) shared |= m & -m, addresses[lane] = (u32)(address - SHARED_WINDOW);
            else s.global(w, r, address, n, access, scope_of(r));
        }
    }
    if (shared) s.shared(w, r, shared, addresses, n, access);
}

// Acquire (after a load) and release (before a store). Shared memory has no synchronising locations: there they act as a fence.
template <Space S> inline void order(Sanitizer& s, Warp& w, const Record& r, u32 mask, bool acquire) {
    u32 fenced = S == Space::shared || S == Space::cluster ? mask : 0;
    if constexpr (S == Space::global || S == Space::generic)
        for (u32 m = mask; m; m &= m - 1) {
            const int lane = first_lane(m);
            const u64 address = w.wide(r.a, lane) + (u64)r.i0;
            if (S == Space::generic && (is_shared(address) || is_local(address))) fenced |= m & -m;
            else if (acquire) s.global_acquire(w, lane, address, scope_of(r));
            else s.global_release(w, lane, address, scope_of(r));
        }
    if (fenced) s.fence(w, fenced, scope_of(r));
}

}  // namespace emu
