// Happens-before over warps, lanes and asynchronous engines (clocks.h), with one shadow cell per word of shared memory and per
// column and 16 lanes of tensor memory. What an access conflicts with is decided when it is issued.
#include <algorithm>
#include <array>
#include <unordered_map>
#include "clocks.h"
#include "global_shadow.h"
#include "sanitizer.h"

namespace emu {

namespace {

constexpr u32 SEVERAL = LANES;                                 // "lane" of an access that several lanes made: those of the event
constexpr u32 SET = 0x80000000u;                               // a read mark that names several readers
constexpr u32 MIXED = 0x40000000u;                             // in Cell::write: its bytes have cells of their own

// One (warp, record) at one time of its clock: all its executions until the warp's next synchronisation look the same.
struct Event {
    i32 warp;                                                  // global warp number
    i32 line;
    u32 engine;                                                // 0: the warp itself; else engine number + 1
    Clock clock;                                               // of the warp or of the engine
    bool async_proxy, atomic;
    const char* what;
    bool reads_only = false;
    u32 lanes = 0;                                             // that took part so far
    enum : u8 { other, tensor, copy } kind = other;
    Clock issued = 0;                                          // the warp's clock then
};

// Marks are event << 6 | lane; 0 is nobody. `write` is the last plain write, `read` who has read or atomically updated since.
// A word that is accessed in parts has one cell per byte, mixed[write & ~MIXED]; in these only bit 0 of `defined` counts.
struct Cell {
    u32 write = 0, read = 0;
    u8 defined = 0;                                            // one bit per byte
    bool updated = false;                                      // `read` names atomics or strong accesses
    u16 unused = 0;

    bool operator==(const Cell& o) const { return !std::memcmp(this, &o, sizeof o); }
};
using Bytes = std::array<Cell, 4>;

struct WarpState {
    Clock clock = 1, synced = 0;                               // synced: own time up to which the lanes know each other's accesses
    Knowledge known;                                           // by all lanes
    Knowledge known_some;                                      // by the lanes in some_lanes (a superset of `known`)
    u32 some_lanes = 0;
    i32 last_record = -1;                                      // cache of its last event
    Clock last_clock = 0;
    u32 last_event = 0;
    Access last_access = Access::read;
    u64 last_execution = 0;
};

struct Sync {                                                  // an mbarrier, a named barrier, the cluster barrier
    Knowledge arrived, complete;
    u32 engine = 0;                                            // of the mbarrier's asynchronous completions
    u32 init_mark = 0;
    bool init_fenced = false;                                  // by fence.mbarrier_init
    u32 init_engine = 0;                                       // Note [Initialisation]: the time line of these fences, + 1
    Clock init_clock = 0;
    u32 phases = 0;
};

}  // namespace

class HappensBefore final : public Sanitizer {
  public:
    explicit HappensBefore(Cluster& c) : cluster(c) {
        for (auto& cta : c.ctas) {
            first_warp.push_back(nwarps);
            nwarps += (int)cta->warps.size();
        }
    }

    void start() override {
        warps.assign(nwarps, {});
        for (auto& w : warps) w.known.plain.warps.resize(nwarps), w.known.fenced.warps.resize(nwarps);
        events.assign(1, {});
        syncs.assign(1, {});
        sets.assign(1, {});
        transitions.assign(TRANSITIONS, {});
        engine_clock.clear();
        engine_names.clear();
        engine_of.clear();
        waits.clear();
        mixed.clear();
        unused_mixed.clear();
        old_read = old_mark = good_event = 0;
        shared_cells.resize(cluster.ctas.size());
        tmem_cells.resize(cluster.ctas.size());
        for (size_t i = 0; i < cluster.ctas.size(); ++i) {
            shared_cells[i].assign(cluster.ctas[i]->shared.size() / 4 + 4, {});
            tmem_cells[i].assign(TMEM_COLUMNS * (TMEM_LANES / 16), {});
        }
        who = {};
        who.cluster = (u32)cluster.number;
    }

    // ---- accesses ----------------------------------------------------------------------------------------------------

    void shared(Warp& w, const Record& r, int lane, u32 address, u32 n, Access access) override {
        const u32 event = warp_event(w, r, access), mark = event << 6 | lane;
        events[event].lanes |= 1u << lane;
        actor = {&w, &r, lane, false, 0};
        touch_shared(address, n, access, mark);
    }

    void global(Warp& w, const Record& r, int, u64 address, u64 n, Access access) override {
        if (access != Access::read && access != Access::write) cluster.global_shadow->strong(who, address, access);
        check_global(w, r, address, n, access);
    }

    void begin_async(Warp& w, const Record& r, int issuer, Engine engine, u32 mbarrier) override {
        const bool generic = engine == Engine::copy || engine == Engine::store;
        const bool signals = engine == Engine::mbarrier || engine == Engine::store;
        u32 number = signals ? sync_of(mbarrier).engine : engine_number(w, engine);
        if (engine == Engine::mbarrier) check_signal(w, r, issuer, mbarrier);
        Clock& clock = engine_clock[number];
        Clock when = clock + 1;
        if (signals) when = sync_of(mbarrier).phases + 1;
        else if (engine == Engine::tensor || engine == Engine::tmem_load || engine == Engine::tmem_store) clock = when;
        issued[number] = std::max(issued[number], when);
        static const char* const WHAT[] = {"a TMA load", "a tensor core operation", "a bulk copy", "a bulk copy", "cp.async", "tcgen05.ld", "tcgen05.st", "", "st.async"};
        actor = {&w, &r, issuer, !generic, number + 1};
        actor.whole_warp = engine == Engine::tmem_load || engine == Engine::tmem_store;
        async_event = new_event({gid(w), r.line, number + 1, when, !generic, false, WHAT[(int)engine]});
        Event& e = events[async_event];
        e.lanes = 1u << issuer;
        e.kind = engine == Engine::tensor ? Event::tensor : engine == Engine::copy ? Event::copy : Event::other;
        e.issued = state(w).clock;
        actor.kind = e.kind;
    }

    void async_shared(u32 address, u32 n, Access access) override {
        touch_shared(address, n, access, async_event << 6 | (actor.kind == Event::copy ? (u32)actor.lane : SEVERAL));
    }

    void async_global(u64 address, u64 n, Access access) override {
        check_global(*actor.warp, *actor.record, address, n, access);
    }

    void async_tmem(Cta& cta, int lane, int lanes, int column, int n, Access access) override {
        const u32 mark = async_event << 6 | SEVERAL;
        for (int g = lane / 16; g < (lane + lanes + 15) / 16; ++g) {
            Cell* cells = &tmem_cells[cta.rank][g * TMEM_COLUMNS + column];
            touch(cells, n, 15, 15, access, mark, "tensor memory", [&](int i) { return format("column %d, lanes %d..%d", column + i, g * 16, g * 16 + 15); });
        }
    }

    void allocate_tmem(Cta& cta, int column, int n) override {
        for (int g = 0; g < TMEM_LANES / 16; ++g)
            for (int c = column; c < column + n; ++c) tmem_cells[cta.rank][g * TMEM_COLUMNS + c].defined = 0;
    }

    void free_tmem(Warp& w, const Record& r, Cta& cta, int column, int n) override {
        actor = {&w, &r, 0, true, 0, true, true};
        const u32 mark = new_event({gid(w), r.line, 0, state(w).clock, true, false, "tcgen05.dealloc"}) << 6 | SEVERAL;
        for (int g = 0; g < TMEM_LANES / 16; ++g) {
            Cell* cells = &tmem_cells[cta.rank][g * TMEM_COLUMNS + column];
            touch(cells, n, 15, 15, Access::write, mark, "tensor memory", [&](int i) { return format("column %d, lanes %d..%d", column + i, g * 16, g * 16 + 15); });
            std::fill_n(cells, n, Cell());
        }
    }

    // ---- ordering ----------------------------------------------------------------------------------------------------

    void release(Warp& w, u32 lanes, u32& handle) override {
        if (!handle) handle = new_sync();
        release_into(w, lanes, syncs[handle].arrived);
    }

    void acquire(Warp& w, u32 lanes, u32 handle) override {
        if (handle) learn(w, lanes, syncs[handle].arrived);
        // A CTA barrier orders the lanes of a warp as well.
        if ((lanes & w.live) == w.live) order_lanes(w);
    }

    void mbarrier_init(Warp& w, const Record& r, int lane, u32 address) override {
        Mbarrier& b = object(address);
        b.sync = new_sync();
        Sync& s = syncs[b.sync];
        s.engine = new_engine(format("the mbarrier at shared+%d", (int)(address & OFFSET_MASK) - (int)SHARED_BASE));
        s.init_mark = warp_event(w, r, Access::write) << 6 | lane;
    }

    // Note [Initialisation]: fence.mbarrier_init makes the initialisations before it, and nothing else, part of a later relaxed
    // arrive at the cluster's barrier. So a warp's fences have a time line of their own, which such an arrive hands on.
    void mbarrier_init_fence(Warp& w, u32 lanes) override {
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

    void release_initialisations(Warp& w, u32& handle) override {
        if (!handle) handle = new_sync();
        const u32 engine = engine_number(w, Engine::initialisation);
        syncs[handle].arrived.plain.advance(engine, engine_clock[engine]);
    }

    void mbarrier_use(Warp& w, const Record& r, int lane, u32 address) override {
        const Sync& s = sync_of(address);
        actor = {&w, &r, lane, false, 0};
        const bool fenced = s.init_engine && view_of(w, lane).plain.engine(s.init_engine - 1) >= s.init_clock;
        if (s.init_mark && !fenced && !ordered(s.init_mark))
            cluster.find("race", &w, r.line, format("uses the mbarrier at shared+%d whose initialisation by %s is not ordered before",
                                                    (int)(address & OFFSET_MASK) - (int)SHARED_BASE, describe(s.init_mark).c_str()));
    }

    void mbarrier_release(Warp& w, u32 lanes, u32 address) override { release_into(w, lanes, sync_of(address).arrived); }

    void mbarrier_phase(u32 address) override {
        Sync& s = sync_of(address);
        ++s.phases;
        engine_clock[s.engine] = s.phases;
        s.arrived.plain.advance(s.engine, s.phases);
        s.complete = s.arrived;
    }

    void mbarrier_acquire(Warp& w, u32 lanes, u32 address) override { learn(w, lanes, sync_of(address).complete); }

    void commit_tensor(Warp& w, const Record& r, int lane, u32 mbarrier) override {
        check_signal(w, r, lane, mbarrier);
        const u32 engine = engine_number(w, Engine::tensor);
        Sync& s = sync_of(mbarrier);
        // The operations came after what their issuer knew; its own accesses are not released by a commit.
        s.arrived.merge(view_of(w, lane));
        s.arrived.plain.advance(engine, engine_clock[engine]);
    }

    void commit_copies(Warp& w, u32, u32 mbarrier) override {
        const u32 engine = engine_number(w, Engine::copy);
        sync_of(mbarrier).arrived.plain.advance(engine, engine_clock[engine] + 1);
        ++engine_clock[engine];                                // later copies of the open group must not pass for these
    }

    void await(Warp& w, u32 lanes, Engine engine, u32 pending) override {
        const u32 number = engine_number(w, engine);
        const Clock clock = engine_clock[number];
        if (clock <= pending) return;
        if (engine == Engine::copy) {                          // see `awaited`
            auto& list = waits[number];
            if (list.empty() || list.back().first < clock - pending) list.push_back({clock - pending, state(w).clock});
            return;
        }
        Knowledge news;
        news.plain.advance(number, clock - pending);
        learn(w, lanes, news);
    }

    void commit_group(Warp& w, Engine engine) override {
        ++engine_clock[engine_number(w, engine)];
        if (engine == Engine::bulk_read) ++engine_clock[engine_number(w, Engine::bulk_write)];
    }

    void warp_sync(Warp& w, u32) override { order_lanes(w); }

    void proxy_fence(Warp& w, u32 lanes) override {
        WarpState& s = state(w);
        const bool whole = (lanes & w.live) == w.live;
        if (!whole) split(w, lanes);
        auto fence = [&](Knowledge& k) {
            k.fenced.merge(k.plain);
            k.fenced.warps[gid(w)].merge(whole ? WarpClock{s.clock, 0, 0} : WarpClock{s.synced, s.clock, lanes});
        };
        if (whole) fence(s.known);
        if (s.some_lanes) fence(s.known_some);
        ++s.clock;                                             // what follows is not fenced
    }

    void fence(Warp&, u32, bool gpu_scope) override {
        if (gpu_scope) cluster.global_shadow->fence(who);
    }

    void global_release(Warp&, int, u64 address) override { cluster.global_shadow->release(who, address); }
    void global_acquire(Warp&, int, u64 address) override { cluster.global_shadow->acquire(who, address); }

    void exit_warp(Warp& w) override { final_view.merge(state(w).known.plain), final_view.merge(state(w).known_some.plain); }

    void finish() override {
        for (auto& [engine, clock] : issued) {
            if (final_view.engine(engine) >= clock || engine_names[engine].empty()) continue;
            cluster.find("in flight at exit", &cluster.ctas[0]->warps[0], 0, "the CTA exits while " + engine_names[engine] + " may still be at work: nothing waited for it");
        }
        issued.clear();
        final_view = {};
    }

  private:
    struct Actor { Warp* warp; const Record* record; int lane; bool async_proxy; u32 engine; bool whole_warp = false, frees = false; u8 kind = Event::other; };

    int gid(const Warp& w) const { return first_warp[w.cta->rank] + w.id; }
    WarpState& state(const Warp& w) { return warps[gid(w)]; }
    Mbarrier& object(u32 address) { return cluster.ctas[address >> RANK_SHIFT]->mbarriers[(address & OFFSET_MASK) / 8]; }
    Sync& sync_of(u32 address) { return syncs[object(address).sync]; }

    // The asynchronous proxy signals an mbarrier: it must see the initialisation, which the generic proxy wrote.
    void check_signal(Warp& w, const Record& r, int lane, u32 address) {
        const Sync& s = sync_of(address);
        actor = {&w, &r, lane, true, 0};
        if (s.init_mark && !s.init_fenced && !ordered(s.init_mark))
            cluster.find("missing proxy fence", &w, r.line, format("signals the mbarrier at shared+%d, but no fence.mbarrier_init follows its initialisation by %s",
                                                                   (int)(address & OFFSET_MASK) - (int)SHARED_BASE, describe(s.init_mark).c_str()));
    }

    u32 new_sync() {
        syncs.emplace_back();
        return (u32)syncs.size() - 1;
    }

    u32 new_engine(std::string name) {
        engine_clock.push_back(0);
        engine_names.push_back(std::move(name));
        return (u32)engine_clock.size() - 1;
    }

    u32 engine_number(const Warp& w, Engine engine) {
        const u64 key = (u64)engine << 32 | (u32)gid(w);
        auto [it, fresh] = engine_of.emplace(key, 0);
        if (fresh) {
            // Reads of registers end with the thread; copies and stores are reported by Cluster::finish. Only these may outlive a CTA:
            it->second = new_engine(engine == Engine::tensor ? format("the tensor core of CTA rank %d", w.cta->rank) : "");
        }
        return it->second;
    }

    // A very long kernel forgets its past rather than running out of marks: a race across that moment is not seen.
    u32 new_event(const Event& event) {
        if (events.size() >= 1u << 24 || sets.size() >= 1u << 22) {
            for (auto* spaces : {&shared_cells, &tmem_cells})
                for (auto& cells : *spaces) for (Cell& c : cells) c.write &= c.write & MIXED ? ~0u : 0, c.read = 0;
            for (Bytes& bytes : mixed) for (Cell& c : bytes) c.write = c.read = 0;
            old_read = old_mark = good_event = 0;
            for (WarpState& s : warps) s.last_record = -1;
            for (Sync& s : syncs) s.init_mark = 0;
            events.erase(events.begin() + 1, events.end());
            sets.erase(sets.begin() + 1, sets.end());
            transitions.assign(TRANSITIONS, {});
        }
        events.push_back(event);
        return (u32)events.size() - 1;
    }

    u32 warp_event(Warp& w, const Record& r, Access access) {
        WarpState& s = state(w);
        const i32 record = (i32)(&r - cluster.program.records);
        // Lanes may write to the same place in one instruction (a uniform value), not in two: each store is an event of its own.
        const u64 execution = access == Access::write ? cluster.counts[record] : 0;
        if (s.last_record == record && s.last_clock == s.clock && s.last_access == access && s.last_execution == execution) return s.last_event;
        static const char* const WHAT[] = {"a read", "a write", "an atomic", "a read", "a write"};
        const bool strong = access != Access::read && access != Access::write;
        const u32 event = new_event({gid(w), r.line, 0, s.clock, false, strong, WHAT[(int)access], access == Access::read || access == Access::strong_read});
        s.last_record = record;
        s.last_clock = s.clock;
        s.last_access = access;
        s.last_execution = execution;
        return s.last_event = event;
    }

    const Knowledge& view_of(const Warp& w, int lane) {
        WarpState& s = state(w);
        return s.some_lanes >> lane & 1 ? s.known_some : s.known;
    }

    void split(Warp& w, u32 lanes) {                           // from now on `lanes` may know more than the others
        WarpState& s = state(w);
        if (!s.some_lanes) s.known_some = s.known;
        s.some_lanes |= lanes;
    }

    void learn(Warp& w, u32 lanes, const Knowledge& news) {
        WarpState& s = state(w);
        if ((lanes & w.live) == w.live) s.known.merge(news);
        else split(w, lanes);
        if (s.some_lanes) s.known_some.merge(news);
    }

    void order_lanes(Warp& w) {
        WarpState& s = state(w);
        if (s.some_lanes) s.known.merge(s.known_some);
        s.some_lanes = 0;
        s.synced = s.clock++;
    }

    void release_into(Warp& w, u32 lanes, Knowledge& object) {
        WarpState& s = state(w);
        const bool whole = (lanes & w.live) == w.live;
        const bool some = (s.some_lanes & lanes) != 0;         // each of the lanes passes on what it knows
        const Knowledge& mine = some ? s.known_some : s.known;
        object.plain.merge(mine.plain);
        if ((int)object.plain.warps.size() < nwarps) object.plain.warps.resize(nwarps);
        object.plain.warps[gid(w)].merge(whole ? WarpClock{s.clock, 0, 0} : WarpClock{s.synced, s.clock, lanes});
        // Other lanes' fenced writes travel only as far as these lanes know of them.
        WarpClock own = mine.fenced.warps[gid(w)];
        WarpClock previous = (int)object.fenced.warps.size() > gid(w) ? object.fenced.warps[gid(w)] : WarpClock{};
        object.fenced.merge(mine.fenced);
        if (!whole) {
            WarpClock visible{std::min(own.all, s.synced), 0, 0};
            if (own.all > s.synced) visible.some = own.all, visible.lanes = lanes;
            if (own.some > visible.all && own.lanes & lanes) visible.some = std::max(visible.some, own.some), visible.lanes |= own.lanes & lanes;
            previous.merge(visible);
            object.fenced.warps[gid(w)] = previous;
        }
        ++s.clock;
    }

    // ---- conflicts ---------------------------------------------------------------------------------------------------

    // Whether the access behind a mark happened before what the actor does now.
    bool ordered(u32 mark) {
        const Event& e = events[mark >> 6];
        const u32 lanes = (mark & 63) == SEVERAL ? e.lanes : 1u << (mark & 63);
        const WarpState& s = state(*actor.warp);
        const Knowledge& known = view_of(*actor.warp, actor.lane);
        const bool must_be_fenced = actor.async_proxy && !e.async_proxy;
        const View& view = must_be_fenced ? known.fenced : known.plain;
        Clock clock = e.clock;
        if (e.engine) {
            // The tensor core works in order on what one thread issues, and on what others issue if that is ordered.
            if (e.kind == Event::tensor && actor.kind == Event::tensor && same_cta(e.warp, gid(*actor.warp)) &&
                (e.warp == gid(*actor.warp) || known.plain.warps[e.warp].knows(e.issued, e.lanes))) return true;
            if (view.engine(e.engine - 1) >= e.clock) return true;
            clock = e.kind == Event::copy ? awaited(e) : 0;
            if (!clock) return false;
        }
        if (e.warp == gid(*actor.warp)) {
            const bool program_order = lanes == 1u << actor.lane || clock <= s.synced || actor.whole_warp || known.plain.warps[e.warp].knows(clock, lanes);
            return program_order && (!must_be_fenced || known.fenced.warps[e.warp].knows(clock, lanes));
        }
        return view.warps[e.warp].knows(clock, lanes);
    }

    // A cp.async that its thread has waited for is a write that the thread made then: the warp's clock at that time, 0: no wait yet.
    Clock awaited(const Event& e) {
        const auto& list = waits[e.engine - 1];
        const auto it = std::lower_bound(list.begin(), list.end(), e.clock, [](auto& wait, Clock group) { return wait.first < group; });
        return it == list.end() ? 0 : it->second;
    }

    bool same_cta(int x, int y) const {
        const auto after = std::upper_bound(first_warp.begin(), first_warp.end(), x);
        return y >= *(after - 1) && (after == first_warp.end() || y < *after);
    }

    std::string describe(u32 mark) {
        const Event& e = events[mark >> 6];
        int rank = 0;
        while (rank + 1 < (int)first_warp.size() && first_warp[rank + 1] <= e.warp) ++rank;
        return format("%s at PTX line %d by %s", e.what, e.line, cluster.ctas[rank]->warps[e.warp - first_warp[rank]].name().c_str());
    }

    template <class Place> void conflict(u32 prior, Access access, const char* space, Place place, int at) {
        const Event& e = events[prior >> 6];
        const Event& now = events[current_mark >> 6];
        // Without the proxy rule it would be ordered: the fence is what is missing.
        const bool proxy = actor.async_proxy && !e.async_proxy;
        bool only_fence = false;
        if (proxy) {
            actor.async_proxy = false;
            only_fence = ordered(prior);
            actor.async_proxy = true;
        }
        const std::string where = format("%s (%s)", space, place(at).c_str());
        const char* verb = actor.frees ? "frees" : access == Access::read || access == Access::strong_read ? "reads" : access == Access::atomic ? "updates" : "writes";
        if (only_fence)
            cluster.find("missing proxy fence", actor.warp, now.line,
                         format("%s %s %s without a fence.proxy.async after %s", now.what, verb, where.c_str(), describe(prior).c_str()));
        else
            cluster.find("race", actor.warp, now.line,
                         format("%s %s %s, which is not ordered after %s", now.what, verb, where.c_str(), describe(prior).c_str()));
    }

    void touch_shared(u32 address, u32 n, Access access, u32 mark) {
        const u32 rank = address >> RANK_SHIFT, offset = address & OFFSET_MASK;
        if (rank >= shared_cells.size() || offset + n > shared_cells[rank].size() * 4) return;      // faulted or will
        const u32 first = offset / 4, last = (offset + n - 1) / 4;
        const u8 head = (u8)(15 << (offset & 3)), tail = (u8)(15 >> (3 - ((offset + n - 1) & 3)));
        touch(&shared_cells[rank][first], (int)(last - first + 1), head, tail, access, mark, "shared memory",
              [&](int i) { return format("shared+%d", (int)((first + i) * 4 - SHARED_BASE)); });
    }

    template <class Place>
    void touch(Cell* cells, int n, u8 head, u8 tail, Access access, u32 mark, const char* space, Place place) {
        current_mark = mark;
        if (access == Access::atomic) events[mark >> 6].atomic = true;
        // What was found in order lately, by this instruction: neighbouring words and lanes agree.
        if (good_event != mark >> 6 || state(*actor.warp).some_lanes) good_event = mark >> 6, good_write = good_read = 0;
        Cell before{}, after{};
        bool repeats = false;                                  // before and after are set
        for (int i = 0; i < n; ++i) {
            Cell& c = cells[i];
            const u8 bytes = (i == 0 ? head : 15) & (i == n - 1 ? tail : 15);
            if (bytes != 15 || c.write & MIXED) {
                touch_bytes(c, bytes, access, mark, space, place, i);
                continue;
            }
            if (repeats && c == before) {
                c = after;
                continue;
            }
            before = c;
            visit(c, 15, access, mark, space, place, i);
            after = c;
            repeats = true;
        }
    }

    template <class Place> void touch_bytes(Cell& c, u8 bytes, Access access, u32 mark, const char* space, Place place, int at) {
        if (!(c.write & MIXED)) {
            const Cell whole = c;
            if (unused_mixed.empty()) unused_mixed.push_back((u32)mixed.size()), mixed.emplace_back();
            c.write = MIXED | unused_mixed.back();
            c.read = 0;
            unused_mixed.pop_back();
            for (int k = 0; k < 4; ++k) mixed[c.write & ~MIXED][k] = {whole.write, whole.read, (u8)(whole.defined >> k & 1), whole.updated};
        }
        const u32 index = c.write & ~MIXED;
        for (int k = 0; k < 4; ++k)
            if (bytes >> k & 1) visit(mixed[index][k], 1, access, mark, space, place, at);
        if (bytes == 15 && access == Access::write) {          // one writer again
            c = mixed[index][0];
            c.defined = 15;
            unused_mixed.push_back(index);
        }
    }

    // One word or byte; `defined` are the bits of Cell::defined that must be there.
    template <class Place> void visit(Cell& c, u8 defined, Access access, u32 mark, const char* space, Place place, int at) {
        const bool writes = access == Access::write, strong = access != Access::read && !writes;
        if (!writes && access != Access::strong_write && (c.defined & defined) != defined)
            cluster.find("uninitialised", actor.warp, events[mark >> 6].line,
                         format("%s reads %s (%s) that nothing has written", events[mark >> 6].what, space, place(at).c_str()));
        c.defined |= defined;
        if (c.write && c.write >> 6 != mark >> 6 && c.write != good_write) {
            if (ordered(c.write)) good_write = for_all_lanes(c.write);
            else conflict(c.write, access, space, place, at);
        }
        if (c.read && (writes || strong || c.updated) && c.read != good_read) {
            const u32 bad = unordered_reader(c.read, mark, access);
            if (bad) conflict(bad, access, space, place, at);
            else if (writes) good_read = c.read & SET ? 0 : for_all_lanes(c.read);
        }
        if (writes) {
            c.write = c.write >> 6 == mark >> 6 && c.write != mark ? several(mark) : mark;
            c.read = 0;
            c.updated = false;
        } else {
            c.read = add_reader(c.read, mark);
            c.updated |= access == Access::atomic || access == Access::strong_write;
        }
    }

    // A mark whose order does not depend on the lane that asks: not one of the warp's own.
    u32 for_all_lanes(u32 mark) { return events[mark >> 6].warp == gid(*actor.warp) ? 0 : mark; }

    // The first of the readers that an access conflicts with: a write with all, a read with updates, an update with plain reads.
    u32 unordered_reader(u32 read, u32 mark, Access access) {
        const auto conflicts = [&](u32 r) {
            const Event& e = events[r >> 6];
            if (access == Access::strong_read || (access == Access::read && (!e.atomic || e.reads_only))) return false;
            if (access != Access::read && access != Access::write && e.atomic) return false;
            return r != mark && !ordered(r);
        };
        if (!(read & SET)) return conflicts(read) ? read : 0;
        for (u32 r : sets[read & ~SET]) if (conflicts(r)) return r;
        return 0;
    }

    // The read mark after one more reader: readers that are ordered before it are forgotten, one of the same warp is replaced.
    u32 add_reader(u32 read, u32 mark) {
        if (!read || read == mark) return mark;
        if (read == old_read && mark == old_mark) return new_read;
        old_read = read;
        old_mark = mark;
        return new_read = added_reader(read, mark);
    }

    u32 added_reader(u32 read, u32 mark) {
        if (!(read & SET)) {
            if (read >> 6 == mark >> 6) return several(mark);
            if (events[read >> 6].atomic == events[mark >> 6].atomic) {        // else both are kept: they conflict with others
                if (ordered(read)) return mark;
                if (same_owner(read, mark)) return several(mark);
            }
        }
        // Sets name readers without the lane: neighbouring words, read by other lanes, then share them.
        const u32 reader = several(mark), before = read & SET ? read : several(read);
        const u64 key = (u64)before << 32 | reader;
        auto& [known_key, set] = transitions[(before * 0x9e3779b1u ^ reader * 0x85ebca6bu) >> 7 & (TRANSITIONS - 1)];
        if (known_key == key) return set;
        std::vector<u32> members;
        if (read & SET) {
            for (u32 r : sets[read & ~SET]) if (!same_owner(r, mark)) members.push_back(r);
        } else members = {before};
        members.push_back(reader);
        sets.push_back(std::move(members));
        known_key = key;
        return set = SET | (u32)(sets.size() - 1);
    }

    static u32 several(u32 mark) { return (mark & ~63u) | SEVERAL; }

    bool same_owner(u32 x, u32 y) const {
        const Event &a = events[x >> 6], &b = events[y >> 6];
        return a.engine == b.engine && a.atomic == b.atomic && (a.engine || a.warp == b.warp);
    }

    void check_global(Warp& w, const Record& r, u64 address, u64 n, Access access) {
        const auto c = cluster.global_shadow->access(who, address, n, access);
        if (c.found)
            cluster.find("global race", &w, r.line, format("%s global memory at 0x%llx that another CTA (cluster %u of the grid) %s without an order between them",
                                                            access == Access::read || access == Access::strong_read ? "reads" : "writes", (unsigned long long)address,
                                                            c.cluster, c.was_write ? "writes" : "reads"));
    }

    Cluster& cluster;
    std::vector<int> first_warp;
    int nwarps = 0;
    std::vector<WarpState> warps;
    std::vector<Event> events;
    std::vector<Sync> syncs;
    std::vector<std::vector<u32>> sets;
    static constexpr size_t TRANSITIONS = 1024;
    std::vector<std::pair<u64, u32>> transitions;              // direct mapped: (set, reader) -> set
    std::vector<Clock> engine_clock;
    std::vector<std::string> engine_names;
    std::unordered_map<u64, u32> engine_of;
    std::unordered_map<u32, Clock> issued;
    std::unordered_map<u32, std::vector<std::pair<Clock, Clock>>> waits;       // of a warp's cp.async: groups up to, the warp's clock
    std::vector<Bytes> mixed;
    std::vector<u32> unused_mixed;
    u32 old_read = 0, old_mark = 0, new_read = 0;              // see add_reader
    View final_view;
    std::vector<std::vector<Cell>> shared_cells, tmem_cells;
    GlobalShadow::Who who;
    Actor actor{};
    u32 async_event = 0, current_mark = 0;
    u32 good_event = 0, good_write = 0, good_read = 0;         // see touch
};

Sanitizer* make_sanitizer(Cluster& cluster) { return new HappensBefore(cluster); }

}  // namespace emu
