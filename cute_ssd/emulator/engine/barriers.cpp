// bar, barrier.cluster, mbarrier, fences.
#include "addresses.h"

namespace emu {

static u32 lanes_with(const u32* values, u32 value, u32 mask) {
    if (mask == ALL_LANES) {
        u32 different = 0;
        for (int lane = 0; lane < LANES; ++lane) different |= values[lane] ^ value;
        if (!different) return mask;
    }
    u32 same = 0;
    for (u32 m = mask; m; m &= m - 1) if (values[first_lane(m)] == value) same |= m & -m;
    return same;
}

static void fill(u32* values, u32 mask, u32 value) {
    each_lane(mask, [=](int lane) { values[lane] = value; });
}

// Generic address to shared address (isa/barriers.py: shared_place).
HANDLER(shared_address, "shared address") {
    each_lane(mask, [&](int lane) {
        const u64 address = w.wide(r.a, lane) + (u64)r.i0;
        if (address - SHARED_WINDOW >= (u64)1 << 32)
            fault("shared address", w, r.line, format("generic address 0x%llx does not point to shared memory", (unsigned long long)host_address(address)));
        w.reg(r.d, lane) = (u32)(address - SHARED_WINDOW);
    });
    return Flow::next;
}

// ---- named barriers --------------------------------------------------------------------------------------------------

// Slots of the kernel hold what each lane waits for: r.c the barrier (generation << 4 | number) or FREE, r.c + 1 its vote and then
// the result of the vote, r.c + 2 the generation of the cluster's barrier at which it arrived or FREE. r.c + 3 is one word per warp:
// the count of events when it last decided whether a poll times out.
constexpr u32 FREE = 0xffffffffu;
constexpr u32 NO_VOTE = 2;

enum class Barrier { sync, arrive, red };

static u32 key_of(const Cta::NamedBarrier& barrier, u32 id) { return barrier.generation << 4 | id; }

// `go` leave the group at this instruction; with them the lanes whose guard is false.
static void let_go(Warp& w, const Record& r, u32 mask, u32 go) {
    const i32 pc = (i32)(&r - w.cta->cluster->program.records);
    for (Group& group : w.groups)
        if (group.mask & mask) {
            const u32 stay = mask & ~go, leave = group.mask & ~stay;
            if (!leave) return;
            group.mask = stay;
            w.groups.push_back({pc + 1, leave});
            return;
        }
}

static Flow wait_for_warp(Warp& w, const Record& r) {
    if (w.groups.size() == 1)
        fault("divergent barrier", w, r.line, "only some lanes of the warp execute an aligned barrier: the guard of the others is false");
    return Flow::block;
}

// The barrier's phase is over: its waiting lanes go on when their warps run again.
static void complete(Warp& w, const Record& r, u32 id) {
    Cta& cta = *w.cta;
    auto& barrier = cta.named[id];
    const u32 key = key_of(barrier, id);
    u32 votes = 0, voters = 0, others = 0;
    for (Warp& v : cta.warps)
        for (u32 m = lanes_with(v.reg(r.c), key, v.live); m; m &= m - 1) {
            const u32 vote = v.reg(r.c + 1, first_lane(m));
            if (vote == NO_VOTE) ++others;
            else ++voters, votes += vote;
        }
    if (voters && others)
        cta.cluster->find("barrier", &w, r.line, format("barrier.red and barrier.sync meet at barrier %u", id));
    for (Warp& v : cta.warps) {
        const u32 lanes = lanes_with(v.reg(r.c), key, v.live);
        if (!lanes) continue;
        IF_CHECKED(w, acquire(v, lanes, barrier.sync));
        fill(v.reg(r.c + 1), lanes, votes | voters << 16);
    }
    ++barrier.generation;
    barrier.arrived = barrier.expected = 0;
    ++cta.cluster->events;
}

static void arrive_at(Warp& w, const Record& r, u32 lanes, u32 id, Barrier kind) {
    Cta& cta = *w.cta;
    Cluster& cluster = *cta.cluster;
    if (id >= 16) fault("barrier", w, r.line, format("barrier %u: a CTA has the barriers 0 to 15", id));
    auto& barrier = cta.named[id];
    const int all = (int)cta.warps.size() * LANES;
    const int expected = r.b < 0 ? all : (int)w.reg(r.b, first_lane(lanes));
    if (expected <= 0 || expected % LANES)
        fault("barrier", w, r.line, format("barrier %u for %d threads: the number must be a positive multiple of %d", id, expected, LANES));
    if (expected > all) fault("barrier", w, r.line, format("barrier %u for %d threads in a CTA of %d", id, expected, cta.nthreads));
    if (barrier.arrived && barrier.expected != expected)
        cluster.find("barrier", &w, r.line, format("barrier %u for %d threads, but who came first expects %d", id, expected, barrier.expected));
    else
        barrier.expected = expected;
    if (kind != Barrier::arrive) {
        fill(w.reg(r.c), lanes, key_of(barrier, id));
        u32* const vote = w.reg(r.c + 1);
        if (kind == Barrier::sync) fill(vote, lanes, NO_VOTE);
        else each_lane(lanes, [=, yes = w.preds[r.e], negated = (u32)(r.i0 >> 2 & 1)](int lane) { vote[lane] = (yes >> lane & 1) ^ negated; });
    }
    // Lanes that do not exist or have exited come with the first lane that lives: a warp counts as 32 threads.
    barrier.arrived += __builtin_popcount(lanes & (1u << first_lane(w.live)) ? lanes | ~w.live : lanes);
    ++cluster.events;
    IF_CHECKED(w, release(w, lanes, barrier.sync));
    if (barrier.arrived > barrier.expected)
        fault("barrier", w, r.line, format("%d threads arrive at barrier %u, which expects %d", barrier.arrived, id, barrier.expected));
    if (barrier.arrived == barrier.expected) complete(w, r, id);
}

// A barrier of the whole CTA does not wait for threads that have exited: then it is over when all that live wait.
static bool all_wait(Warp& w, const Record& r, u32 key) {
    u32 live = ALL_LANES;
    for (const Warp& v : w.cta->warps) live &= v.live;
    if (live == ALL_LANES) return false;
    for (Warp& v : w.cta->warps)
        if (v.live && lanes_with(v.reg(r.c), key, v.live) != v.live) return false;
    return true;
}

static Flow meet(Warp& w, const Record& r, u32 mask, Barrier kind) {
    if (r.i1 && !w.converged(mask)) return wait_for_warp(w, r);
    u32* const key = w.reg(r.c);
    for (u32 fresh = kind == Barrier::arrive ? mask : lanes_with(key, FREE, mask); fresh;) {
        const u32 id = w.reg(r.a, first_lane(fresh));
        u32 same = lanes_with(w.reg(r.a), id, fresh);
        if (r.b >= 0) same = lanes_with(w.reg(r.b), w.reg(r.b, first_lane(fresh)), same);
        arrive_at(w, r, same, id, kind);
        fresh &= ~same;
    }
    if (kind == Barrier::arrive) return Flow::next;
    u32 go = 0;
    for (u32 left = mask; left;) {
        const u32 awaited = key[first_lane(left)], id = awaited & 15;
        const u32 same = lanes_with(key, awaited, left);
        if (r.b < 0 && awaited == key_of(w.cta->named[id], id) && all_wait(w, r, awaited)) complete(w, r, id);
        if (awaited != key_of(w.cta->named[id], id)) go |= same;
        left &= ~same;
    }
    fill(key, go, FREE);
    if (kind == Barrier::red)
        each_lane(go, [&](int lane) {
            const u32 votes = w.reg(r.c + 1, lane) & 0xffff, voters = w.reg(r.c + 1, lane) >> 16;
            const int operation = (int)(r.i0 & 3);
            if (operation == 0) w.reg(r.d, lane) = votes;
            else w.set_pred(r.d, 1u << lane, (operation == 1 ? votes == voters : votes > 0) ? ALL_LANES : 0);
        });
    if (go == mask) return Flow::next;
    if (!r.i1) let_go(w, r, mask, go);
    return Flow::block;
}

HANDLER(bar_sync, "bar.sync") { return meet(w, r, mask, Barrier::sync); }
HANDLER(bar_arrive, "bar.arrive") { return meet(w, r, mask, Barrier::arrive); }
HANDLER(bar_red, "bar.red") { return meet(w, r, mask, Barrier::red); }

// ---- the barrier of the cluster --------------------------------------------------------------------------------------

HANDLER(cluster_arrive, "cluster.arrive") {
    if (r.i1 && !w.converged(mask)) return wait_for_warp(w, r);
    Cluster& cluster = *w.cta->cluster;
    u32* const arrived = w.reg(r.c + 2);
    if (lanes_with(arrived, FREE, mask) != mask)
        fault("barrier", w, r.line, "arrives twice at the barrier of the cluster without a wait between");
    if (r.i0) IF_CHECKED(w, release(w, mask, cluster.barrier.sync));
    else IF_CHECKED(w, release_initialisations(w, cluster.barrier.sync));
    fill(arrived, mask, cluster.barrier.generation);
    cluster.barrier.arrived += __builtin_popcount(mask);
    ++cluster.events;
    return Flow::next;
}

static bool all_arrived(Cluster& cluster, const Record& r) {
    for (auto& cta : cluster.ctas)
        for (Warp& v : cta->warps)
            if (v.live && lanes_with(v.reg(r.c + 2), cluster.barrier.generation, v.live) != v.live) return false;
    return true;
}

HANDLER(cluster_wait, "cluster.wait") {
    if (r.i1 && !w.converged(mask)) return wait_for_warp(w, r);
    Cluster& cluster = *w.cta->cluster;
    u32* const arrived = w.reg(r.c + 2);
    if (lanes_with(arrived, FREE, mask)) fault("barrier", w, r.line, "waits at the barrier of the cluster without having arrived");
    if (lanes_with(arrived, cluster.barrier.generation, mask)) {          // lanes of one warp are never a phase apart
        if (!all_arrived(cluster, r)) {
            if (!r.i1) let_go(w, r, mask, 0);
            return Flow::block;
        }
        ++cluster.barrier.generation;
        cluster.barrier.arrived = 0;
        ++cluster.events;
    }
    if (r.i0) IF_CHECKED(w, acquire(w, mask, cluster.barrier.sync));
    fill(arrived, mask, FREE);
    return Flow::next;
}

// ---- mbarriers -------------------------------------------------------------------------------------------------------

constexpr i64 EXPECT = 1, DROP = 2, NO_COMPLETE = 4, RELEASE = 8, REMOTE = 16, CTA_SCOPE = 32;     // isa/barriers.py has the same flags
constexpr i64 PARITY = 1, ACQUIRE = 2;
constexpr u32 LARGEST_COUNT = (1u << 20) - 1;

static void own(const Warp& w, const Record& r, u32 address, bool remote) {
    if (!remote && address >> RANK_SHIFT != (u32)w.cta->rank)
        fault("shared address", w, r.line, format("0x%x is not in the shared memory of this CTA (rank %d): it belongs to rank %u", address,
                                                  w.cta->rank, address >> RANK_SHIFT));
}

// f(address, lanes that use it), for every mbarrier that lanes name.
template <class F> static void each_mbarrier(Warp& w, const Record& r, u32 mask, bool remote, F f) {
    const u32* const base = w.reg(r.a);
    while (mask) {
        const u32 address = base[first_lane(mask)];
        const u32 same = lanes_with(base, address, mask);
        own(w, r, address + (u32)r.i0, remote);
        f(address + (u32)r.i0, same);
        mask &= ~same;
    }
}

static std::string place(u32 address) {
    return format("the mbarrier at shared+%d of CTA rank %u", (int)(address & OFFSET_MASK) - (int)SHARED_BASE, address >> RANK_SHIFT);
}

static bool in_use(const Mbarrier& b) { return b.line && (b.pending != b.count || b.tx != 0); }

HANDLER(mbarrier_init, "mbarrier.init") {
    Cluster& cluster = *w.cta->cluster;
    each_mbarrier(w, r, mask, false, [&](u32 address, u32 lanes) {
        cluster.shared_bytes(address, 8, 8, w, r.line);
        Mbarrier& b = w.cta->mbarriers[(address & OFFSET_MASK) / 8];
        const u32 count = w.reg(r.b, first_lane(lanes));
        if (count - 1 >= LARGEST_COUNT) fault("mbarrier", w, r.line, format("%s gets the count %u: 1 to %u are possible", place(address).c_str(), count, LARGEST_COUNT));
        if (in_use(b)) fault("mbarrier", w, r.line, format("%s, initialised at line %d, is in use (%d of %d arrivals pending, %lld bytes expected)",
                                                            place(address).c_str(), b.line, b.pending, b.count, (long long)b.tx));
        const u32 sync = b.sync;
        b = {(i32)count, (i32)count, 0, 0, sync, r.line};
        ++cluster.events;
        IF_CHECKED(w, mbarrier_init(w, r, first_lane(lanes), address));
    });
    return Flow::next;
}

HANDLER(mbarrier_inval, "mbarrier.inval") {
    Cluster& cluster = *w.cta->cluster;
    each_mbarrier(w, r, mask, false, [&](u32 address, u32 lanes) {
        Mbarrier& b = cluster.mbarrier(address, w, r.line);
        IF_CHECKED(w, mbarrier_use(w, r, first_lane(lanes), address));
        if (in_use(b)) cluster.find("mbarrier", &w, r.line, format("%s is invalidated in use (%d of %d arrivals pending, %lld bytes expected)",
                                                                   place(address).c_str(), b.pending, b.count, (long long)b.tx));
        const u32 sync = b.sync;
        b = Mbarrier();
        b.sync = sync;
        ++cluster.events;
    });
    return Flow::next;
}

// The state that an arrival gives: the phase it belongs to, and in the upper half the arrivals that were pending before.
static u64 state_of(const Mbarrier& b) { return b.phase | (u64)(u32)b.pending << 32; }

static void arrive_lane(Warp& w, const Record& r, u32 address, int lane) {
    Cluster& cluster = *w.cta->cluster;
    Mbarrier& b = cluster.mbarrier(address, w, r.line);
    const u32 count = r.b < 0 || r.i1 & EXPECT ? 1 : w.reg(r.b, lane);
    if (count - 1 >= LARGEST_COUNT) fault("mbarrier", w, r.line, format("%u arrivals at %s: 1 to %u are possible", count, place(address).c_str(), LARGEST_COUNT));
    if (r.d >= 0) w.set_wide(r.d, lane, state_of(b));
    if (r.i1 & EXPECT) cluster.mbarrier_expect(address, w.reg(r.b, lane), w, r.line);
    if (r.i1 & NO_COMPLETE && b.pending == (i32)count && b.tx == 0)
        fault("mbarrier", w, r.line, format("arrive.noComplete completes phase %u of %s", b.phase, place(address).c_str()));
    if (r.i1 & DROP) b.count -= (i32)count;
    cluster.mbarrier_arrive(address, (i32)count, w, r.line);
}

HANDLER(mbarrier_arrive, "mbarrier.arrive") {
    Cluster& cluster = *w.cta->cluster;
    each_mbarrier(w, r, mask, r.i1 & REMOTE, [&](u32 address, u32 lanes) {
        const Mbarrier& b = cluster.mbarrier(address, w, r.line);
        if (cluster.sanitizer) {
            cluster.sanitizer->mbarrier_use(w, r, first_lane(lanes), address);
            const bool in_scope = !(r.i1 & CTA_SCOPE) || address >> RANK_SHIFT == (u32)w.cta->rank;
            if (r.i1 & RELEASE && in_scope) cluster.sanitizer->mbarrier_release(w, lanes, address);
        }
        const i32 n = __builtin_popcount(lanes);
        if (cluster.sanitizer && n > b.pending)                // lanes have no order: which of them count for which phase is open
            cluster.find("over-arrival", &w, r.line, format("%d lanes arrive at %s, whose phase %u waits for %d of %d arrivals: the others count for the next phase",
                                                            n, place(address).c_str(), b.phase, b.pending, b.count));
        if (n > 1 && r.b < 0 && n < b.pending && !(r.i1 & (DROP | NO_COMPLETE))) {        // one step when nothing can happen between
            u64 state = state_of(b);
            if (r.d >= 0)
                for (u32 m = lanes; m; m &= m - 1, state -= (u64)1 << 32) w.set_wide(r.d, first_lane(m), state);
            cluster.mbarrier_arrive(address, n, w, r.line);
        } else {
            for (u32 m = lanes; m; m &= m - 1) arrive_lane(w, r, address, first_lane(m));
        }
    });
    return Flow::next;
}

// i1: 1 expects bytes, otherwise completes them.
HANDLER(mbarrier_tx, "mbarrier.tx") {
    Cluster& cluster = *w.cta->cluster;
    each_mbarrier(w, r, mask, r.i1 & REMOTE, [&](u32 address, u32 lanes) {
        IF_CHECKED(w, mbarrier_use(w, r, first_lane(lanes), address));
        for (u32 m = lanes; m; m &= m - 1) {
            const u32 bytes = w.reg(r.b, first_lane(m));
            if (r.i1 & EXPECT) cluster.mbarrier_expect(address, bytes, w, r.line);
            else cluster.mbarrier_complete(address, bytes, w, r.line);
        }
    });
    return Flow::next;
}

HANDLER(mbarrier_pending_count, "mbarrier.pending_count") {
    each_lane(mask, [&](int lane) { w.reg(r.d, lane) = w.reg(r.a + 1, lane); });
    return Flow::next;
}

// The lanes whose phase of this mbarrier is complete.
static u32 complete_lanes(Warp& w, const Record& r, const Mbarrier& b, u32 address, u32 lanes) {
    Cluster& cluster = *w.cta->cluster;
    const u32* const phase = w.reg(r.b);
    u32 done = 0;
    while (lanes) {
        const u32 awaited = phase[first_lane(lanes)];
        const u32 same = lanes_with(phase, awaited, lanes);
        lanes &= ~same;
        if (r.i1 & PARITY) {
            if (awaited > 1) cluster.find("mbarrier", &w, r.line, format("the phase parity is %u, not 0 or 1", awaited));
            if ((b.phase ^ awaited) & 1) done |= same;
        } else {
            if (b.phase - awaited > 1)
                cluster.find("mbarrier", &w, r.line, format("waits for phase %u of %s, which is in phase %u: only the current and the previous one can be asked for",
                                                             awaited, place(address).c_str(), b.phase));
            if (b.phase != awaited) done |= same;
        }
    }
    return done;
}

static Flow wait(Warp& w, const Record& r, u32 mask, bool may_block) {
    Cluster& cluster = *w.cta->cluster;
    u32 done = 0;
    each_mbarrier(w, r, mask, false, [&](u32 address, u32 lanes) {
        done |= complete_lanes(w, r, cluster.mbarrier(address, w, r.line), address, lanes);
    });
    if (done != mask) {
        // The device gives up after some time. A schedule that looks for races lets some polls do so at once, but a warp no more than
        // once until something has happened: its loop around the poll would pass for progress.
        const bool patient = may_block && !done && !w.may_time_out;
        if (patient) {
            u32& decided = w.reg(r.c + 3, 0);
            if (!cluster.late || decided == (u32)cluster.events) return Flow::block;
            decided = (u32)cluster.events;
            if (cluster.roll() % 4) return Flow::block;
        }
        w.may_time_out = false;
        w.yielded = true;
    }
    w.set_pred(r.d, mask, done);
    if (cluster.sanitizer)
        each_mbarrier(w, r, mask, false, [&](u32 address, u32 lanes) {
            cluster.sanitizer->mbarrier_use(w, r, first_lane(lanes), address);
            if (r.i1 & ACQUIRE && lanes & done) cluster.sanitizer->mbarrier_acquire(w, lanes & done, address);
        });
    return Flow::next;
}

HANDLER(mbarrier_try_wait, "mbarrier.try_wait") { return wait(w, r, mask, true); }
HANDLER(mbarrier_test_wait, "mbarrier.test_wait") { return wait(w, r, mask, false); }

// ---- fences ----------------------------------------------------------------------------------------------------------

// Memory is always in order here; fences matter to the sanitizer only.
HANDLER(fence, "fence") {
    IF_CHECKED(w, fence(w, mask, scope_of(r)));
    return Flow::next;
}

HANDLER(fence_mbarrier_init, "fence.mbarrier_init") {
    IF_CHECKED(w, mbarrier_init_fence(w, mask));
    return Flow::next;
}

// i0: the state spaces: 1 shared, 2 global, 3 both.
HANDLER(fence_proxy, "fence.proxy") {
    IF_CHECKED(w, proxy_fence(w, mask, r.i0 & 1, r.i0 & 2));
    return Flow::next;
}

HANDLER(fence_tensormap, "fence.tensormap") {
    Sanitizer* const sanitizer = w.cta->cluster->sanitizer;
    if (sanitizer) each_lane(mask, [&](int lane) { sanitizer->global_acquire(w, lane, w.wide(r.a, lane) + (u64)r.i0, scope_of(r)); });
    return Flow::next;
}

}  // namespace emu
