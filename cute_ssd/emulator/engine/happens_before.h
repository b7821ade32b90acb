// The sanitizer: happens-before over warps, lanes and asynchronous engines (clocks.h). happens_before.cpp is what orders, accesses.cpp
// what must be ordered. What an access conflicts with is decided when it is issued.
#pragma once
#include <string>
#include <unordered_map>
#include <vector>
#include "clocks.h"
#include "global_shadow.h"
#include "sanitizer.h"
#include "shadow.h"

namespace emu {

// A mark names an event and a lane: event << 6 | lane; 0 is nobody.
constexpr u32 SEVERAL = LANES;                                 // "lane" of an access that several lanes made: those of the event
constexpr u32 SET = 1u << 30;                                  // in Cell::read: the number of a set of marks

// One (warp, record) at one time of its clock: all its executions until the warp's next synchronisation look the same.
struct Event {
    i32 warp;                                                  // global warp number
    i32 line;
    u32 engine;                                                // 0: the warp itself; else engine number + 1
    Clock clock;                                               // of the warp or of the engine
    bool async_proxy, atomic;
    const char* what;
    bool reads_only = false;
    bool copies = false;                                       // cp.async
    Tensor tensor = Tensor::none;
    u32 lanes = 0;                                             // that took part so far
    Clock issued = 0;                                          // the warp's clock then
};

struct WarpState {
    Clock clock = 1, synced = 0;                               // synced: own time up to which the lanes know each other's accesses
    Knowledge known;                                           // by all lanes
    Knowledge known_some;                                      // by the lanes in some_lanes (a superset of `known`)
    u32 some_lanes = 0;
    std::vector<Clock> met;                                    // [LANES * i + k]: lane i knows what k did up to then; empty: see synced
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

class INTERNAL HappensBefore final : public Sanitizer {
  public:
    explicit HappensBefore(Cluster&);
    void start() override;

    using Sanitizer::shared;
    void shared(Warp&, const Record&, u32 lanes, const u32* addresses, u32 n, Access) override;
    void global(Warp&, const Record&, u64 address, u64 n, Access, Scope) override;
    void begin_async(Warp&, const Record&, int issuer, Engine, u32 mbarrier) override;
    void begin_tensor(Warp&, const Record&, int issuer, Tensor) override;
    void async_shared(u32 address, u32 n, Access) override;
    void async_shared_pieces(const Cta&, const u64* pieces, u32 first, u32 last) override;
    void async_global(u64 address, u64 n, Access) override;
    void async_tmem(Cta&, int lane, int lanes, int column, int n, Access) override;
    void allocate_tmem(Cta&, int column, int n) override;
    void free_tmem(Warp&, const Record&, Cta&, int column, int n) override;

    void release(Warp&, u32 lanes, u32& handle) override;
    void acquire(Warp&, u32 lanes, u32 handle) override;
    void mbarrier_init(Warp&, const Record&, int lane, u32 address) override;
    void mbarrier_init_fence(Warp&, u32 lanes) override;
    void release_initialisations(Warp&, u32& handle) override;
    void mbarrier_use(Warp&, const Record&, int lane, u32 address) override;
    void mbarrier_release(Warp& w, u32 lanes, u32 address) override { release_into(w, lanes, sync_of(address).arrived); }
    void mbarrier_phase(u32 address) override;
    void mbarrier_acquire(Warp& w, u32 lanes, u32 address) override { learn(w, lanes, sync_of(address).complete); }
    void commit_tensor(Warp&, const Record&, int lane, u32 mbarrier) override;
    void commit_copies(Warp&, u32 lanes, u32 mbarrier) override;
    void await(Warp&, u32 lanes, Engine, u32 pending) override;
    void commit_group(Warp&, Engine) override;
    void warp_sync(Warp& w, u32 lanes) override;
    void proxy_fence(Warp&, u32 lanes, bool shared, bool global) override;
    void tensor_fence(Warp&, u32 lanes, bool before) override;
    void fence(Warp&, u32 lanes, Scope) override;
    void global_release(Warp&, int, u64 address, Scope) override;
    void global_acquire(Warp&, int, u64 address, Scope) override;
    void wait_for_launches(Warp&, u32 lanes) override;
    void launch_dependents(Warp&) override;
    void exit_warp(Warp&) override;
    void finish() override;

  private:
    struct Actor {                                             // who makes the present access
        Warp* warp;
        const Record* record;
        int lane;
        bool async_proxy;
        int number = 0;                                        // of the warp
        bool whole_warp = false, frees = false, copies = false;
        Tensor tensor = Tensor::none;
    };
    // An access to a run of cells. Neighbours mostly look alike: what became of one becomes of the next.
    struct Run {
        Access access;
        u32 mark;
        Shadow* shadow;
        Cell before = LIKE_NONE, after{};
        bool fresh = false;                                    // see next_lane
        static constexpr Cell LIKE_NONE{0, 0, 1, 0, 1};
    };

    static u32 several(u32 mark) { return (mark & ~63u) | SEVERAL; }
    int gid(const Warp& w) const { return first_warp[w.cta->rank] + w.id; }
    WarpState& state(const Warp& w) { return warps[gid(w)]; }
    Mbarrier& object(u32 address) { return cluster.ctas[address >> RANK_SHIFT]->mbarriers[(address & OFFSET_MASK) / 8]; }
    Sync& sync_of(u32 address) { return syncs[object(address).sync]; }
    void act(Warp& w, const Record& r, int lane, bool async_proxy) { actor = {&w, &r, lane, async_proxy, gid(w)}; }
    u32 new_sync();
    u32 new_engine(std::string name);
    u32 engine_number(const Warp&, Engine);
    void check_signal(Warp&, const Record&, int lane, u32 address);

    const Knowledge& view_of(const Warp& w, int lane) const { return view_of(warps[gid(w)], lane); }
    static const Knowledge& view_of(const WarpState& s, int lane) { return s.some_lanes >> lane & 1 ? s.known_some : s.known; }
    static const Knowledge& latest(const WarpState& s) { return s.some_lanes ? s.known_some : s.known; }       // of any lane
    template <class F> void each_view(Warp&, u32 lanes, const F&);
    void learn(Warp&, u32 lanes, const Knowledge& news);
    void order_lanes(Warp&);
    static bool have_met(const WarpState&, int lane, Clock when, u32 lanes);
    static u32 with_met(const WarpState&, u32 lanes);
    void release_into(Warp&, u32 lanes, Knowledge& object);

    u32 new_event(const Event&);
    u32 warp_event(Warp&, const Record&, Access);
    void begin(u32 engine, Clock, const char* what);
    Run run(Access, u32 mark, Shadow* = nullptr);
    void next_lane(Run&, int lane);
    void touch(Run&, Cell&, u32 at);
    void touch_piece(Run&, u32 piece);
    void touch_pieces(Run&, u32 first, u32 n);
    void touch_shared(Run&, u32 address, u32 n);
    void visit(Cell&, const Run&, u32 at);
    std::string place(const Shadow&, u32 at) const;
    void conflict(u32 prior, const Run&, u32 at);
    bool ordered(u32 mark) { return synchronised(mark) && tensor_fenced(events[mark >> 6], &Knowledge::seen); }
    bool synchronised(u32 mark);
    bool tensor_fenced(const Event&, View Knowledge::*);
    bool ordered(u32 mark, u32& good);
    Clock awaited(const Event&);
    bool same_cta(int x, int y) const;
    const Warp& warp(int number) const;
    std::string describe(u32 mark);
    u32 unordered_reader(u32 read, u32 mark, Access);
    u32 add_reader(u32 read, u32 mark);
    u32 added_reader(u32 read, u32 mark);
    bool same_owner(u32 x, u32 y) const;
    void check_global(u64 address, u64 n, Access);
    void check_launches(u64 address, u64 n, Access);
    static bool launches_over(const WarpState& s) { return latest(s).plain.engine(LAUNCHES); }
    void check_alive(const Warp&, const Record&, u32 address);

    Cluster& cluster;
    std::vector<int> first_warp;                               // of each CTA
    int nwarps = 0;
    std::vector<WarpState> warps;
    std::vector<Event> events;
    std::vector<Sync> syncs;
    std::vector<std::vector<u32>> sets;                        // of readers
    static constexpr size_t TRANSITIONS = 1024;
    std::vector<std::pair<u64, u32>> transitions;              // direct mapped: (set, reader) -> set
    static constexpr u32 LAUNCHES = 0;                         // an engine: 1 behind griddepcontrol.wait, see Note [Launches before]
    std::vector<Clock> engine_clock;
    std::vector<std::string> engine_names;
    std::unordered_map<u64, u32> engine_of;
    std::unordered_map<u32, Clock> issued;
    std::unordered_map<u32, std::vector<std::pair<Clock, Clock>>> waits;       // of a warp's cp.async: groups up to, the warp's clock
    std::vector<View> exits;                                   // of each CTA: what its warps knew at their exit
    struct Remote { Clock clock = 0; i32 line = 0; };
    std::vector<Remote> remote;                                // [nwarps * rank + warp]: its last access to that other CTA's shared memory
    std::vector<Shadow> shared_shadow, tmem_shadow;            // of each CTA
    GlobalShadow::Who who;
    u32 waited = 0, hurried = 0;                               // CTAs: waited for the launches before; let others start before that
    Actor actor{};
    u32 async_event = 0;
    u32 good_event = 0, good_write = 0, good_read = 0;         // events: see run
    u32 old_read = 0, old_reader = 0, new_read = 0;            // see add_reader
};

}  // namespace emu
