// What plain and tensor copies into shared memory have in common: destinations and the mbarriers they signal.
#pragma once
#include "core.h"
#include "sanitizer.h"

namespace emu {

constexpr int CTA_PAIR = 1, OWN_CTA = 2, MULTICAST = 4;        // isa/bulk.py has the same flags

inline void check_own(const Warp& w, const Record& r, u32 address) {
    if (address >> RANK_SHIFT != (u32)w.cta->rank)
        fault("shared address", w, r.line, format("0x%x is not in the shared memory of this CTA (rank %d): it belongs to rank %u", address,
                                                  w.cta->rank, address >> RANK_SHIFT));
}

// f(destination, mbarrier) for every CTA that gets the n bytes, after the checks and the start of the sanitizer's record.
// With .multicast the mask in slot r.b names the CTAs, and data and mbarrier lie at the same offset in each of them; a copy of a
// CTA pair (.cta_group::2) signals the mbarrier of that CTA of each pair whose rank is as even or odd as the given mbarrier's.
template <class F>
void each_destination(Warp& w, const Record& r, int lane, int flags, u32 address, u32 barrier, u32 n, u32 align, F f, Access access = Access::write) {
    Cluster& cluster = *w.cta->cluster;
    const u32 rank = address >> RANK_SHIFT, barrier_rank = barrier >> RANK_SHIFT;
    if (flags & OWN_CTA) check_own(w, r, address);
    if (!(flags & MULTICAST) && (flags & CTA_PAIR ? rank >> 1 != barrier_rank >> 1 : rank != barrier_rank))
        fault("mbarrier", w, r.line, format("the copy goes to CTA rank %u, its mbarrier is in rank %u: they must be in the same %s", rank,
                                            barrier_rank, flags & CTA_PAIR ? "pair of CTAs" : "CTA"));
    u32 ranks = flags & MULTICAST ? w.reg(r.b, lane) & 0xffff : 1u << rank;
    if (ranks >> cluster.ctas.size())
        fault("shared address", w, r.line, format("the copy goes to CTA ranks 0x%x of a cluster of %zu", ranks, cluster.ctas.size()));
    for (; ranks; ranks &= ranks - 1) {
        const u32 to_rank = (u32)__builtin_ctz(ranks);
        const u32 signalled = !(flags & MULTICAST) ? barrier_rank : flags & CTA_PAIR ? (to_rank & ~1u) | (barrier_rank & 1) : to_rank;
        const u32 to = to_rank << RANK_SHIFT | (address & OFFSET_MASK), bar = signalled << RANK_SHIFT | (barrier & OFFSET_MASK);
        cluster.shared_bytes(to, n, align, w, r.line);
        cluster.mbarrier(bar, w, r.line);
        if (Sanitizer* s = cluster.sanitizer) {
            s->mbarrier_use(w, r, lane, bar);
            s->begin_async(w, r, lane, Engine::mbarrier, bar);
            s->async_shared(to, n, access);
        }
        f(to, bar);
    }
}

}  // namespace emu
