// What orders: barriers, mbarriers, commits, waits, fences.
#include "happens_before.h"
#include <algorithm>

namespace emu {

HappensBefore::HappensBefore(Cluster& c) : cluster(c) {
    for (auto& cta : c.ctas) {
        first_warp.push_back(nwarps);
        nwarps += (int)cta->warps.size();
        shared_shadow.emplace_back((u32)cta->shared.size() / Shadow::PIECE + 1, false);
        tmem_shadow.emplace_back(TMEM_COLUMNS * (TMEM_LANES / 16), true);
    }
}

void HappensBefore::start() {
    warps.assign(nwarps, {});
    for (auto& w : warps) {
        w.known.plain.warps.resize(nwarps), w.known.fenced.warps.resize(nwarps);
        if (cluster.options.tensor_fences) w.known.published.warps.resize(nwarps), w.known.seen.warps.resize(nwarps);
    }
    events.assign(1, {});
    syncs.assign(1, {});
    sets.assign(1, {});
    transitions.assign(TRANSITIONS, {});
    engine_clock.clear();
    engine_names.clear();
    engine_of.clear();
    new_engine("");                                            // LAUNCHES
    waits.clear();
    old_read = old_reader = good_event = 0;
    for (auto* spaces : {&shared_shadow, &tmem_shadow})
        for (Shadow& shadow : *spaces) shadow.clear();
    who = {};
    who.cluster = (u32)cluster.number;
    who.present.resize(cluster.ctas.size() > 1 ? nwarps : 1);
    waited = hurried = 0;
    exits.assign(cluster.ctas.size(), {});
    remote.assign(cluster.ctas.size() > 1 ? cluster.ctas.size() * nwarps : 0, {});
}

// ---- barriers and waits ---------------------------------------------------------------------------------------------

void HappensBefore::release(Warp& w, u32 lanes, u32& handle) {
    if (!handle) handle = new_sync();
    release_into(w, lanes, syncs[handle].arrived);
}

void HappensBefore::acquire(Warp& w, u32 lanes, u32 handle) {
    if (handle) learn(w, lanes, syncs[handle].arrived);
    // A CTA barrier orders the lanes of a warp as well.
    if ((lanes & w.live) == w.live) order_lanes(w);
}

void HappensBefore::mbarrier_init(Warp& w, const Record& r, int lane, u32 address) {
    Mbarrier& b = object(address);
    b.sync = new_sync();
    Sync& s = syncs[b.sync];
    s.engine = new_engine(format("the mbarrier at shared+%d", (int)(address & OFFSET_MASK) - (int)SHARED_BASE));
    s.init_mark = warp_event(w, r, Access::write) << 6 | lane;
}

// Note [Initialisation]: fence.mbarrier_init makes the initialisations before it, and nothing else, part of a later relaxed
// arrive at the cluster's barrier. So a warp's fences have a time line of their own, which such an arrive hands on.
void HappensBefore::mbarrier_init_fence(Warp& w, u32 lanes) {
    const u32 engine = engine_number(w, Engine::initialisation);
    const Clock now = ++engine_clock[engine];
    for (Sync& s : syncs)
        if (s.init_mark && events[s.init_mark >> 6].warp == gid(w) && lanes >> (s.init_mark & 63) & 1 && !s.init_fenced) {
            s.init_fenced = true;
            s.init_engine = engine + 1;
            s.init_clock = now;
        }
    Knowledge news;
    news.plain.advance(engine, now);
    learn(w, lanes, news);
}

void HappensBefore::release_initialisations(Warp& w, u32& handle) {
    if (!handle) handle = new_sync();
    const u32 engine = engine_number(w, Engine::initialisation);
    syncs[handle].arrived.plain.advance(engine, engine_clock[engine]);
    for (size_t i = gid(w); i < remote.size(); i += nwarps) remote[i] = {};       // an exit, too, waits for a relaxed arrive
}

void HappensBefore::mbarrier_use(Warp& w, const Record& r, int lane, u32 address) {
    check_alive(w, r, address);
    const Sync& s = sync_of(address);
    act(w, r, lane, false);
    const bool fenced = s.init_engine && view_of(w, lane).plain.engine(s.init_engine - 1) >= s.init_clock;
    if (s.init_mark && !fenced && !ordered(s.init_mark))
        cluster.find("race", &w, r.line, format("uses the mbarrier at shared+%d whose initialisation by %s is not ordered before",
                                                (int)(address & OFFSET_MASK) - (int)SHARED_BASE, describe(s.init_mark).c_str()));
}

void HappensBefore::mbarrier_phase(u32 address) {
    Sync& s = sync_of(address);
    ++s.phases;
    engine_clock[s.engine] = s.phases;
    s.arrived.plain.advance(s.engine, s.phases);
    s.complete = s.arrived;
}

void HappensBefore::commit_tensor(Warp& w, const Record& r, int lane, u32 mbarrier) {
    check_signal(w, r, lane, mbarrier);
    const u32 engine = engine_number(w, Engine::tensor);
    Sync& s = sync_of(mbarrier);
    // The operations came after what their issuer knew; its own accesses are not released by a commit.
    s.arrived.merge(view_of(w, lane));
    s.arrived.plain.advance(engine, engine_clock[engine]);
    if (cluster.options.tensor_fences) s.arrived.published.warps[gid(w)].merge({0, state(w).clock++, 1u << lane});
}

void HappensBefore::commit_copies(Warp& w, u32, u32 mbarrier) {
    const u32 engine = engine_number(w, Engine::copy);
    sync_of(mbarrier).arrived.plain.advance(engine, engine_clock[engine] + 1);
    ++engine_clock[engine];                                // later copies of the open group must not pass for these
}

void HappensBefore::await(Warp& w, u32 lanes, Engine engine, u32 pending) {
    const u32 number = engine_number(w, engine);
    const Clock clock = engine_clock[number];
    if (clock <= pending) return;
    if (engine == Engine::copy) {  // see `awaited`
        auto& list = waits[number];
        if (list.empty() || list.back().first < clock - pending) list.push_back({clock - pending, state(w).clock});
        return;
    }
    Knowledge news;
    news.plain.advance(number, clock - pending);
    learn(w, lanes, news);
    if (engine == Engine::bulk_write) cluster.global_shadow->drain(who);
}

void HappensBefore::commit_group(Warp& w, Engine engine) {
    ++engine_clock[engine_number(w, engine)];
    if (engine == Engine::bulk_read) ++engine_clock[engine_number(w, Engine::bulk_write)];
}

void HappensBefore::proxy_fence(Warp& w, u32 lanes, bool shared, bool global) {
    if (global) cluster.global_shadow->proxy_fence(who);
    if (!shared) return;
    WarpState& s = state(w);
    const bool whole = (lanes & w.live) == w.live;
    const u32 known_lanes = with_met(s, lanes);
    each_view(w, lanes, [&](Knowledge& k) {
        k.fenced.merge(k.plain);
        k.fenced.warps[gid(w)].merge(whole ? WarpClock{s.clock, 0, 0} : WarpClock{s.synced, s.clock, known_lanes});
    });
    ++s.clock;                                             // what follows is not fenced
}

void HappensBefore::tensor_fence(Warp& w, u32 lanes, bool before) {
    if (!cluster.options.tensor_fences) return;
    WarpState& s = state(w);
    const bool whole = (lanes & w.live) == w.live;
    each_view(w, lanes, [&](Knowledge& k) {
        if (before) k.published.warps[gid(w)].merge(whole ? WarpClock{s.clock, 0, 0} : WarpClock{0, s.clock, lanes});
        else k.seen.merge(k.published);
    });
    s.clock += before;                                     // what follows is not published
}

void HappensBefore::fence(Warp&, u32, Scope scope) {
    if (scope == Scope::gpu) cluster.global_shadow->fence(who);
}

void HappensBefore::global_release(Warp&, int, u64 address, Scope scope) {
    if (scope == Scope::gpu) cluster.global_shadow->release(who, host_address(address));
}

void HappensBefore::global_acquire(Warp&, int, u64 address, Scope scope) {
    if (scope == Scope::gpu) cluster.global_shadow->acquire(who, host_address(address));
}

void HappensBefore::wait_for_launches(Warp& w, u32 lanes) {
    Knowledge news;
    news.plain.advance(LAUNCHES, 1);
    learn(w, lanes, news);
    waited |= 1u << w.cta->rank;
}

// The first one of a CTA counts, and that may be any.
void HappensBefore::launch_dependents(Warp& w) {
    if (!launches_over(state(w))) hurried |= 1u << w.cta->rank;
}

void HappensBefore::finish() {
    if (waited & ~hurried) cluster.global_shadow->waited = true;
    for (auto& [engine, clock] : issued) {
        const bool over = std::any_of(exits.begin(), exits.end(), [&](const View& v) { return v.engine(engine) >= clock; });
        if (over || engine_names[engine].empty()) continue;
        cluster.find("in flight at exit", &cluster.ctas[0]->warps[0], 0, "the CTA exits while " + engine_names[engine] + " may still be at work: nothing waited for it");
    }
    issued.clear();
    for (size_t i = 0; i < remote.size(); ++i)
        if (const u32 rank = (u32)i / nwarps, number = (u32)i % nwarps; remote[i].clock > exits[rank].latest(number))
            cluster.find("exited CTA", &warp((int)number), remote[i].line, format("accesses the shared memory of CTA rank %u of its cluster, which may have exited: its exit is not ordered after this", rank));
}

void HappensBefore::exit_warp(Warp& w) {
    exits[w.cta->rank].merge(state(w).known.plain);
    exits[w.cta->rank].merge(state(w).known_some.plain);
}

// ---- barriers and engines -------------------------------------------------------------------------------------------

// The asynchronous proxy signals an mbarrier: it must see the initialisation, which the generic proxy wrote.
void HappensBefore::check_signal(Warp& w, const Record& r, int lane, u32 address) {
    const Sync& s = sync_of(address);
    act(w, r, lane, true);
    if (s.init_mark && !s.init_fenced && !ordered(s.init_mark))
        cluster.find("missing proxy fence", &w, r.line, format("signals the mbarrier at shared+%d, but no fence.mbarrier_init follows its initialisation by %s",
                                                               (int)(address & OFFSET_MASK) - (int)SHARED_BASE, describe(s.init_mark).c_str()));
}

u32 HappensBefore::new_sync() {
    syncs.emplace_back();
    return (u32)syncs.size() - 1;
}

u32 HappensBefore::new_engine(std::string name) {
    engine_clock.push_back(0);
    engine_names.push_back(std::move(name));
    return (u32)engine_clock.size() - 1;
}

u32 HappensBefore::engine_number(const Warp& w, Engine engine) {
    const u64 key = (u64)engine << 32 | (u32)gid(w);
    auto [it, fresh] = engine_of.emplace(key, 0);
    if (fresh) {
        // Reads of registers end with the thread; copies and stores are reported by Cluster::finish. Only these may outlive a CTA:
        it->second = new_engine(engine == Engine::tensor ? format("the tensor core of CTA rank %d", w.cta->rank) : "");
    }
    return it->second;
}

// ---- what a warp and its lanes know ---------------------------------------------------------------------------------

// What `lanes` know; if they are not all, they may know more than the others from now on.
template <class F> void HappensBefore::each_view(Warp& w, u32 lanes, const F& f) {
    WarpState& s = state(w);
    const bool whole = (lanes & w.live) == w.live;
    if (!whole) {
        if (!s.some_lanes) s.known_some = s.known;
        s.some_lanes |= lanes;
    }
    if (whole) f(s.known);
    if (s.some_lanes) f(s.known_some);
}

void HappensBefore::learn(Warp& w, u32 lanes, const Knowledge& news) {
    each_view(w, lanes, [&](Knowledge& k) { k.merge(news); });
}

void HappensBefore::order_lanes(Warp& w) {
    WarpState& s = state(w);
    if (s.some_lanes) s.known.merge(s.known_some), s.known.seen.merge(s.known_some.seen);
    s.some_lanes = 0;
    s.met.clear();
    s.synced = s.clock++;
}

void HappensBefore::warp_sync(Warp& w, u32 lanes) {
    if ((lanes & w.live) == w.live) return order_lanes(w);
    WarpState& s = state(w);
    if (s.some_lanes & lanes) s.some_lanes |= lanes;
    if (s.met.empty()) s.met.resize(LANES * LANES);
    Clock together[LANES] = {};
    for (u32 m = lanes; m; m &= m - 1)
        for (int k = 0; k < LANES; ++k) together[k] = std::max(together[k], lanes >> k & 1 ? s.clock : s.met[LANES * first_lane(m) + k]);
    for (u32 m = lanes; m; m &= m - 1) std::copy_n(together, LANES, &s.met[LANES * first_lane(m)]);
    ++s.clock;                                             // what follows they do not know
}

// Whether this lane knows what `lanes` of its warp did then, by bar.warp.sync of some lanes.
bool HappensBefore::have_met(const WarpState& s, int lane, Clock when, u32 lanes) {
    if (s.met.empty()) return false;
    for (u32 m = lanes & ~(1u << lane); m; m &= m - 1)
        if (s.met[LANES * lane + first_lane(m)] < when) return false;
    return true;
}

// These lanes and those of which they know something by bar.warp.sync of some lanes.
u32 HappensBefore::with_met(const WarpState& s, u32 lanes) {
    u32 all = lanes;
    if (!s.met.empty())
        for (u32 m = lanes; m; m &= m - 1)
            for (int k = 0; k < LANES; ++k) all |= s.met[LANES * first_lane(m) + k] > s.synced ? 1u << k : 0;
    return all;
}

void HappensBefore::release_into(Warp& w, u32 lanes, Knowledge& object) {
    WarpState& s = state(w);
    const bool whole = (lanes & w.live) == w.live;
    const u32 known_lanes = with_met(s, lanes);
    const bool some = (s.some_lanes & lanes) != 0;         // each of the lanes passes on what it knows
    const Knowledge& mine = some ? s.known_some : s.known;
    object.plain.merge(mine.plain);
    if ((int)object.plain.warps.size() < nwarps) object.plain.warps.resize(nwarps);
    object.plain.warps[gid(w)].merge(whole ? WarpClock{s.clock, 0, 0} : WarpClock{s.synced, s.clock, known_lanes});
    object.published.merge(mine.published);
    // Other lanes' fenced writes travel only as far as these lanes know of them.
    WarpClock own = mine.fenced.warps[gid(w)];
    WarpClock previous = (int)object.fenced.warps.size() > gid(w) ? object.fenced.warps[gid(w)] : WarpClock{};
    object.fenced.merge(mine.fenced);
    if (!whole) {
        WarpClock visible{std::min(own.all, s.synced), 0, 0};
        if (own.all > s.synced) visible.some = own.all, visible.lanes = known_lanes;
        if (own.some > visible.all && own.lanes & known_lanes) visible.some = std::max(visible.some, own.some), visible.lanes |= own.lanes & known_lanes;
        previous.merge(visible);
        object.fenced.warps[gid(w)] = previous;
    }
    ++s.clock;
}

Sanitizer* make_sanitizer(Cluster& cluster) { return new HappensBefore(cluster); }

}  // namespace emu
