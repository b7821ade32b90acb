// Vector clocks for warps whose lanes are threads of their own, and for asynchronous engines.
//
// Note [Lanes]: an elected lane's arrive releases what *it* did, and what the other lanes did up to the last bar.warp.sync. So what is
// known of a warp is a pair: all lanes up to time `all`, the lanes in `lanes` up to the later time `some`. Merging two different
// `some` parts keeps the union of the lanes at the later time: it may know too much (a race can be missed), never too little.
// A bar.warp.sync of some lanes makes these know each other's accesses and nobody else's (WarpState::met).
#pragma once
#include <algorithm>
#include <vector>
#include "core.h"

namespace emu {

using Clock = u32;

struct WarpClock {
    Clock all = 0, some = 0;
    u32 lanes = 0;

    bool knows(Clock when, u32 of_lanes) const { return when <= all || (when <= some && (of_lanes & ~lanes) == 0); }
    void merge(const WarpClock& o) {
        all = std::max(all, o.all);
        const u32 theirs = o.some > all ? o.lanes : 0, ours = some > all ? lanes : 0;
        lanes = theirs | ours;
        some = std::max(theirs ? o.some : 0, ours ? some : 0);
    }
};

// What somebody knows: of every warp, and of every engine's time line (how far it is over).
struct View {
    std::vector<WarpClock> warps;
    std::vector<Clock> engines;

    void merge(const View& o) {
        if (warps.size() < o.warps.size()) warps.resize(o.warps.size());
        for (size_t i = 0; i < o.warps.size(); ++i) warps[i].merge(o.warps[i]);
        if (engines.size() < o.engines.size()) engines.resize(o.engines.size());
        for (size_t i = 0; i < o.engines.size(); ++i) engines[i] = std::max(engines[i], o.engines[i]);
    }
    void advance(u32 engine, Clock to) {
        if (engines.size() <= engine) engines.resize(engine + 1);
        engines[engine] = std::max(engines[engine], to);
    }
    Clock engine(u32 e) const { return e < engines.size() ? engines[e] : 0; }
    Clock latest(u32 warp) const { return warp < warps.size() ? std::max(warps[warp].all, warps[warp].some) : 0; }    // of any lane
};

// Note [Proxies]: `plain` is happens-before; `fenced` the part of it that a fence.proxy.async on the way has made visible to the
// asynchronous proxy (TMA, tensor core). An asynchronous access must find earlier generic accesses in `fenced`.
//
// Note [Tensor fences]: with Options::tensor_fences a tcgen05 operation must find those of other threads in `seen`, and the warps' times
// there mean these operations only. A thread's own ones become `published` by its tcgen05.fence::before_thread_sync, or by the
// tcgen05.commit that tracks them, and what synchronises hands that on. Its tcgen05.fence::after_thread_sync makes `seen` of what was
// `published` up to then; no other thread gets it.
struct Knowledge {
    View plain, fenced, published, seen;
    void merge(const Knowledge& o) {
        plain.merge(o.plain);
        fenced.merge(o.fenced);
        published.merge(o.published);
    }
};

}  // namespace emu
