// What must be ordered: accesses, the marks they leave in the shadow of memory, and conflicts between them.
#include "happens_before.h"
#include <algorithm>

namespace emu {

// ---- marks -----------------------------------------------------------------------------------------------------------

HappensBefore::Run HappensBefore::run(Access access, u32 mark, Shadow* shadow) {
    if (access == Access::atomic) events[mark >> 6].atomic = true;
    // What was found in order lately, by this instruction: neighbouring pieces and lanes agree.
    if (good_event != mark >> 6 || warps[actor.number].some_lanes) good_event = mark >> 6, good_write = good_read = 0;
    return {access, mark, shadow};
}

// What became of a cell in one lane becomes of the next lane's, unless it depends on the lane: on accesses of the warp itself, or on what
// only some of its lanes know.
void HappensBefore::next_lane(Run& now, int lane) {
    const u32 mark = (now.mark & ~63u) | (u32)lane;
    const int me = actor.number;
    const auto own = [&](u32 m) { return m && events[m >> 6].warp == me; };
    if (now.fresh) {
        const u32 read = now.before.read;
        const bool by_lane = read & SET ? now.access != Access::read || now.before.updated : own(read);
        if (by_lane || own(now.before.write) || warps[me].some_lanes) now.before = Run::LIKE_NONE;
        now.fresh = false;
    }
    if (now.after.write == now.mark) now.after.write = mark;
    if (now.after.read == now.mark) now.after.read = mark;
    if (warps[me].some_lanes) good_write = good_read = 0;
    now.mark = mark;
    actor.lane = lane;
}

inline void HappensBefore::touch(Run& now, Cell& cell, u32 at) {
    if (cell == now.before) {
        cell = now.after;
        return;
    }
    now.before = cell;
    visit(cell, now, at);
    now.after = cell;
    now.fresh = true;
}

inline void HappensBefore::touch_piece(Run& now, u32 piece) {
    Cell& cell = (*now.shadow)[piece];
    if (!cell.quartered) touch(now, cell, piece * Shadow::PIECE);
    else now.shadow->each_part(piece, piece * Shadow::PIECE, (piece + 1) * Shadow::PIECE, [&](Cell& part, u32 at) { touch(now, part, at); });
}

// Most of them are like the one before: several are compared at once.
void HappensBefore::touch_pieces(Run& now, u32 first, u32 n) {
    constexpr u32 STEP = 8;
    Cell* const cells = &(*now.shadow)[first];
    const auto like_before = [&](const Cell* c) {
        u64 different = 0;
        for (u32 k = 0; k < STEP; ++k) different |= std::bit_cast<u64>(c[k]) ^ std::bit_cast<u64>(now.before);
        return !different;
    };
    for (u32 i = 0; i < n;)
        if (i + STEP <= n && like_before(cells + i)) std::fill_n(cells + i, STEP, now.after), i += STEP;
        else touch_piece(now, first + i++);
}

void HappensBefore::touch_shared(Run& now, u32 address, u32 n) {
    const u32 rank = address >> RANK_SHIFT, begin = address & OFFSET_MASK, end = begin + n;
    if (rank >= shared_shadow.size() || end > shared_shadow[rank].size() * Shadow::PIECE) return;        // faulted or will
    if (rank != (u32)actor.warp->cta->rank) {
        if (events[now.mark >> 6].engine) check_alive(*actor.warp, *actor.record, address);
        else remote[nwarps * rank + actor.number] = {warps[actor.number].clock, actor.record->line};
    }
    now.shadow = &shared_shadow[rank];
    const auto part_of = [&](u32 piece) { now.shadow->each_part(piece, begin, end, [&](Cell& part, u32 at) { touch(now, part, at); }); };
    const u32 first = (begin + Shadow::PIECE - 1) / Shadow::PIECE, last = end / Shadow::PIECE;           // the whole ones
    if (begin % Shadow::PIECE) part_of(begin / Shadow::PIECE);
    if (first < last) touch_pieces(now, first, last - first);
    if (end % Shadow::PIECE && last >= first) part_of(last);
}

// One cell, at this byte of its memory.
void HappensBefore::visit(Cell& cell, const Run& now, u32 at) {
    const u32 mark = now.mark, event = mark >> 6, write = cell.write, read = cell.read;
    const Access access = now.access;
    const bool writes = access == Access::write, strong = access != Access::read && !writes;
    if (!writes && access != Access::strong_write && !cell.defined)
        cluster.find("uninitialised", actor.warp, events[event].line, format("%s reads %s that nothing has written", events[event].what, place(*now.shadow, at).c_str()));
    cell.defined = 1;
    if (write && write >> 6 != event && write >> 6 != good_write && !ordered(write, good_write)) conflict(write, now, at);
    if (read && (writes || strong || cell.updated) && read >> 6 != good_read)
        if (const u32 bad = unordered_reader(read, mark, access)) conflict(bad, now, at);
    if (writes) {
        cell.write = write >> 6 == event && write != mark ? several(mark) : mark;
        cell.read = 0;
        cell.updated = 0;
    } else {
        cell.read = add_reader(read, mark);
        cell.updated |= access == Access::atomic || access == Access::strong_write;
    }
}

// `good` becomes the event if the access was ordered whichever lane made it, and whichever asks: not for the warp's own accesses.
bool HappensBefore::ordered(u32 mark, u32& good) {
    if (events[mark >> 6].warp == actor.number || !ordered(several(mark))) return ordered(mark);
    good = mark >> 6;
    return true;
}

// The first of the readers that an access conflicts with: a write with all, a read with updates, an update with plain reads.
u32 HappensBefore::unordered_reader(u32 read, u32 mark, Access access) {
    const auto conflicts = [&](u32 r) {
        const Event& e = events[r >> 6];
        if (access == Access::strong_read || (access == Access::read && (!e.atomic || e.reads_only))) return false;
        if (access != Access::read && access != Access::write && e.atomic) return false;
        return r != mark && r >> 6 != good_read && !ordered(r, good_read);
    };
    if (!(read & SET)) return conflicts(read) ? read : 0;
    for (u32 r : sets[read & ~SET]) if (conflicts(r)) return r;
    return 0;
}

// The read mark after one more reader: readers that are ordered before it are forgotten, one of the same warp is replaced.
u32 HappensBefore::add_reader(u32 read, u32 mark) {
    if (!read || read == mark) return mark;
    // The lane does not matter in sets, and mostly not between warps: neighbours then share the answer.
    const bool by_lane = !(read & SET) && (events[read >> 6].warp == actor.number || warps[actor.number].some_lanes);
    const u32 reader = by_lane ? mark : several(mark);
    if (by_lane && read >> 6 == mark >> 6) return several(mark);
    if (!by_lane && !(read & SET)) read = several(read);
    if (read != old_read || reader != old_reader) {
        old_read = read;
        old_reader = reader;
        new_read = added_reader(read, reader);
    }
    return new_read ? new_read : mark;
}

// 0: only the new reader is left.
u32 HappensBefore::added_reader(u32 read, u32 mark) {
    if (!(read & SET) && events[read >> 6].atomic == events[mark >> 6].atomic) {       // else both are kept: they conflict with others
        if (ordered(read)) return 0;
        if (same_owner(read, mark)) return several(mark);
    }
    // Sets name readers without the lane: neighbouring pieces, read by other lanes, then share them.
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

bool HappensBefore::same_owner(u32 x, u32 y) const {
    const Event &a = events[x >> 6], &b = events[y >> 6];
    return a.engine == b.engine && a.atomic == b.atomic && (a.engine || a.warp == b.warp);
}

// ---- generic proxy ---------------------------------------------------------------------------------------------------

void HappensBefore::shared(Warp& w, const Record& r, u32 lanes, const u32* addresses, u32 n, Access access) {
    const u32 event = warp_event(w, r, access);
    events[event].lanes |= lanes;
    act(w, r, 0, false);
    Run now = run(access, event << 6);
    for (u32 m = lanes; m; m &= m - 1) {
        next_lane(now, first_lane(m));
        touch_shared(now, addresses[actor.lane], n);
    }
}

void HappensBefore::global(Warp& w, const Record& r, u64 address, u64 n, Access access, Scope scope) {
    act(w, r, 0, false);
    if (is_strong(access)) {
        cluster.global_shadow->strong(who, host_address(address), access, scope);
        if (scope == Scope::cta) access = access == Access::strong_read ? Access::read : Access::write;   // to other CTAs it is a plain one
    }
    check_global(address, n, access);
}

// The memory of a CTA that has exited is another CTA's. `remote` tells it of loads and stores, whatever the schedule.
void HappensBefore::check_alive(const Warp& w, const Record& r, u32 address) {
    const u32 rank = address >> RANK_SHIFT;
    if (rank == (u32)w.cta->rank) return;
    for (const Warp& other : cluster.ctas[rank]->warps) if (other.live) return;
    cluster.find("exited CTA", &w, r.line, format("accesses the shared memory of CTA rank %u of its cluster, which has exited", rank));
}

// ---- asynchronous operations -----------------------------------------------------------------------------------------

void HappensBefore::begin_async(Warp& w, const Record& r, int issuer, Engine engine, u32 mbarrier) {
    static const char* const WHAT[] = {"a TMA load", "", "a bulk copy", "a bulk copy", "cp.async", "tcgen05.ld", "tcgen05.st", "", "st.async"};
    const bool generic = engine == Engine::copy || engine == Engine::store;
    const bool signals = engine == Engine::mbarrier || engine == Engine::store;
    const u32 number = signals ? sync_of(mbarrier).engine : engine_number(w, engine);
    if (engine == Engine::mbarrier) check_signal(w, r, issuer, mbarrier);
    const Clock when = signals ? sync_of(mbarrier).phases + 1 : engine_clock[number] + 1;
    const bool of_tmem = engine == Engine::tmem_load || engine == Engine::tmem_store;
    if (of_tmem) engine_clock[number] = when;
    act(w, r, issuer, !generic);
    actor.whole_warp = of_tmem;
    actor.copies = engine == Engine::copy;
    if (of_tmem) actor.tensor = Tensor::access;
    begin(number, when, WHAT[(int)engine]);
}

void HappensBefore::begin_tensor(Warp& w, const Record& r, int issuer, Tensor operation) {
    static const char* const WHAT[] = {"", "", "tcgen05.mma", "tcgen05.cp", "tcgen05.cp", "tcgen05.shift"};
    const u32 number = engine_number(w, Engine::tensor);
    act(w, r, issuer, true);
    actor.tensor = operation;
    begin(number, ++engine_clock[number], WHAT[(int)operation]);
}

void HappensBefore::begin(u32 engine, Clock when, const char* what) {
    Clock& latest = issued[engine];
    latest = std::max(latest, when);
    async_event = new_event({actor.number, actor.record->line, engine + 1, when, actor.async_proxy, false, what});
    Event& e = events[async_event];
    e.lanes = actor.tensor == Tensor::access ? actor.warp->live : 1u << actor.lane;
    e.copies = actor.copies;
    e.tensor = actor.tensor;
    e.issued = warps[actor.number].clock;
}

void HappensBefore::async_shared(u32 address, u32 n, Access access) {
    Run now = run(access, async_event << 6 | (actor.copies ? (u32)actor.lane : SEVERAL));
    touch_shared(now, address, n);
}

void HappensBefore::async_shared_pieces(const Cta& cta, const u64* pieces, u32 first, u32 last) {
    Run now = run(Access::read, async_event << 6 | SEVERAL, &shared_shadow[cta.rank]);
    for (u32 word = first / 64; word <= last / 64; ++word)
        for (u64 bits = pieces[word]; bits; bits &= bits - 1) touch_piece(now, 64 * word + (u32)__builtin_ctzll(bits));
}

void HappensBefore::async_global(u64 address, u64 n, Access access) { check_global(address, n, access); }

void HappensBefore::async_tmem(Cta& cta, int lane, int lanes, int column, int n, Access access) {
    Run now = run(access, async_event << 6 | SEVERAL, &tmem_shadow[cta.rank]);
    for (int g = lane / 16; g < (lane + lanes + 15) / 16; ++g)
        touch_pieces(now, (u32)(g * TMEM_COLUMNS + column), (u32)n);
}

void HappensBefore::allocate_tmem(Cta& cta, int column, int n) {
    for (int g = 0; g < TMEM_LANES / 16; ++g)
        for (int c = column; c < column + n; ++c) tmem_shadow[cta.rank][g * TMEM_COLUMNS + c].defined = 0;
}

void HappensBefore::free_tmem(Warp& w, const Record& r, Cta& cta, int column, int n) {
    act(w, r, 0, true);
    actor.whole_warp = actor.frees = true;
    const u32 mark = new_event({gid(w), r.line, 0, state(w).clock, true, false, "tcgen05.dealloc"}) << 6 | SEVERAL;
    Run now = run(Access::write, mark, &tmem_shadow[cta.rank]);
    for (int g = 0; g < TMEM_LANES / 16; ++g)
        for (int c = column; c < column + n; ++c) {
            Cell& cell = (*now.shadow)[g * TMEM_COLUMNS + c];
            const Cell before = cell;
            touch_piece(now, g * TMEM_COLUMNS + c);
            cell = &cta == w.cta ? Cell{} : before;
        }
}

void HappensBefore::check_global(u64 address, u64 n, Access access) {
    address = host_address(address);
    const WarpState& s = warps[actor.number];
    GlobalShadow::Actor by{(u16)actor.warp->cta->rank, 0, 0, nullptr, actor.async_proxy};
    if (cluster.ctas.size() > 1) by.warp = (u16)actor.number, by.clock = s.clock, by.view = &latest(s).plain;
    using Kind = GlobalShadow::Kind;
    const auto c = cluster.global_shadow->access(who, by, address, n, access);
    if (!cluster.global_shadow->unfinished.empty() && !launches_over(s)) check_launches(address, n, access);
    if (c.kind == Kind::none) return;
    const std::string what = format("%s global memory at 0x%llx", only_reads(access) ? "reads" : "writes", (unsigned long long)address);
    const char* const before = c.was_write ? "writes" : "reads";
    const auto find = [&](const char* kind, const std::string& why) { cluster.find(kind, actor.warp, actor.record->line, what + why); };
    switch (c.kind) {
        case Kind::cluster: return find("global race", format(" that another CTA (cluster %u of the grid) %s without an order between them", c.who, before));
        case Kind::several: return find("global race", " that several other CTAs read without an order between them");
        case Kind::cta: return find("global race", format(" that another CTA (rank %u of its cluster) %s without an order between them", c.who, before));
        case Kind::in_flight: return find("global race", " while a bulk store may still write it: no cp.async.bulk.wait_group lies between");
        default:
            return find("missing proxy fence", format(" in the asynchronous proxy without a fence.proxy.async after a generic %s%s", c.was_write ? "write" : "read",
                                                      c.who == who.cluster ? "" : " of another CTA"));
    }
}

void HappensBefore::check_launches(u64 address, u64 n, Access access) {
    for (const auto& launch : cluster.global_shadow->unfinished)
        if (const char* did = launch->conflict(address, n, access))
            cluster.find("missing grid wait", actor.warp, actor.record->line,
                         format("%s global memory at 0x%llx that an earlier launch, of %s, %s: no griddepcontrol.wait lies between",
                                only_reads(access) ? "reads" : "writes", (unsigned long long)address, launch->kernel.c_str(), did));
}

// ---- events ----------------------------------------------------------------------------------------------------------

// A very long kernel forgets its past rather than running out of marks: a race across that moment is not seen.
u32 HappensBefore::new_event(const Event& event) {
    if (events.size() >= 1u << 24 || sets.size() >= 1u << 22) {
        for (auto* spaces : {&shared_shadow, &tmem_shadow})
            for (Shadow& shadow : *spaces) shadow.forget();
        old_read = old_reader = good_event = 0;
        for (WarpState& s : warps) s.last_record = -1;
        for (Sync& s : syncs) s.init_mark = 0;
        events.erase(events.begin() + 1, events.end());
        sets.erase(sets.begin() + 1, sets.end());
        transitions.assign(TRANSITIONS, {});
    }
    events.push_back(event);
    return (u32)events.size() - 1;
}

u32 HappensBefore::warp_event(Warp& w, const Record& r, Access access) {
    WarpState& s = state(w);
    const i32 record = (i32)(&r - cluster.program.records);
    // Lanes may write to the same place in one instruction (a uniform value), not in two: each store is an event of its own.
    const u64 execution = access == Access::write ? cluster.counts[record] : 0;
    if (s.last_record == record && s.last_clock == s.clock && s.last_access == access && s.last_execution == execution) return s.last_event;
    static const char* const WHAT[] = {"a read", "a write", "an atomic", "a read", "a write"};
    const u32 event = new_event({gid(w), r.line, 0, s.clock, false, is_strong(access), WHAT[(int)access], only_reads(access)});
    s.last_record = record;
    s.last_clock = s.clock;
    s.last_access = access;
    s.last_execution = execution;
    return s.last_event = event;
}

const Warp& HappensBefore::warp(int number) const {
    int rank = 0;
    while (rank + 1 < (int)first_warp.size() && first_warp[rank + 1] <= number) ++rank;
    return cluster.ctas[rank]->warps[number - first_warp[rank]];
}

std::string HappensBefore::describe(u32 mark) {
    const Event& e = events[mark >> 6];
    return format("%s at PTX line %d by %s", e.what, e.line, warp(e.warp).name().c_str());
}

// ---- order between an earlier access and the present one --------------------------------------------------------------

// Whether the access behind a mark happened before what the actor does now; tcgen05.fence aside.
bool HappensBefore::synchronised(u32 mark) {
    const Event& e = events[mark >> 6];
    const int me = actor.number;
    const u32 lanes = (mark & 63) == SEVERAL ? e.lanes : 1u << (mark & 63);
    const WarpState& s = warps[actor.number];
    const Knowledge& known = view_of(s, actor.lane);
    const bool must_be_fenced = actor.async_proxy && !e.async_proxy;
    const View& view = must_be_fenced ? known.fenced : known.plain;
    Clock clock = e.clock;
    if (e.engine) {
        // The tensor core works in order on what one thread issues, and on what others issue if that is ordered.
        if (pipelined(e.tensor, actor.tensor) && same_cta(e.warp, me) && (e.warp == me || known.plain.warps[e.warp].knows(e.issued, e.lanes))) return true;
        if (view.engine(e.engine - 1) >= e.clock) return true;
        clock = e.copies ? awaited(e) : 0;
        if (!clock) return false;
    }
    if (e.warp == me) {
        const bool program_order = lanes == 1u << actor.lane || clock <= s.synced || actor.whole_warp || known.plain.warps[e.warp].knows(clock, lanes) ||
                                   have_met(s, actor.lane, clock, lanes);
        return program_order && (!must_be_fenced || known.fenced.warps[e.warp].knows(clock, lanes));
    }
    return view.warps[e.warp].knows(clock, lanes);
}

// See Note [Tensor fences]. A thread's own accesses need none once it has waited for them, nor does what one pipeline does in order.
bool HappensBefore::tensor_fenced(const Event& e, View Knowledge::*view) {
    if (!cluster.options.tensor_fences || e.tensor == Tensor::none || actor.tensor == Tensor::none) return true;
    if (e.warp == actor.number && (e.tensor == Tensor::access || pipelined(e.tensor, actor.tensor))) return true;
    return (view_of(warps[actor.number], actor.lane).*view).warps[e.warp].knows(e.issued, e.lanes);
}

// A cp.async that its thread has waited for is a write that the thread made then: the warp's clock at that time, 0: no wait yet.
Clock HappensBefore::awaited(const Event& e) {
    const auto& list = waits[e.engine - 1];
    const auto it = std::lower_bound(list.begin(), list.end(), e.clock, [](auto& wait, Clock group) { return wait.first < group; });
    return it == list.end() ? 0 : it->second;
}

bool HappensBefore::same_cta(int x, int y) const {
    const auto after = std::upper_bound(first_warp.begin(), first_warp.end(), x);
    return y >= *(after - 1) && (after == first_warp.end() || y < *after);
}

void HappensBefore::conflict(u32 prior, const Run& now, u32 at) {
    const Event &earlier = events[prior >> 6], &e = events[now.mark >> 6];
    // Without the proxy rule it would be ordered: the fence is what is missing.
    bool only_fence = false;
    if (actor.async_proxy && !earlier.async_proxy) {
        actor.async_proxy = false;
        only_fence = ordered(prior);
        actor.async_proxy = true;
    }
    const char* verb = actor.frees ? "frees" : only_reads(now.access) ? "reads" : now.access == Access::atomic ? "updates" : "writes";
    const std::string what = format("%s %s %s", e.what, verb, place(*now.shadow, at).c_str()), before = describe(prior);
    if (only_fence) cluster.find("missing proxy fence", actor.warp, e.line, format("%s without a fence.proxy.async after %s", what.c_str(), before.c_str()));
    else if (synchronised(prior)) {
        const bool published = tensor_fenced(earlier, &Knowledge::published);
        const char* missing = published ? "tcgen05.fence::after_thread_sync behind the wait for" : "tcgen05.fence::before_thread_sync behind";
        cluster.find("missing tensor fence", actor.warp, e.line, format("%s without a %s %s", what.c_str(), missing, before.c_str()));
    } else cluster.find("race", actor.warp, e.line, format("%s, which is not ordered after %s", what.c_str(), before.c_str()));
}

std::string HappensBefore::place(const Shadow& shadow, u32 at) const {
    if (!shadow.tensor_memory) return format("shared memory (shared+%d)", (int)(at - SHARED_BASE));
    const int piece = (int)(at / Shadow::PIECE), lane = piece / TMEM_COLUMNS * 16;
    return format("tensor memory (column %d, lanes %d..%d)", piece % TMEM_COLUMNS, lane, lane + 15);
}

}  // namespace emu
