// cp.async: copies of 4, 8 or 16 bytes per lane from global to shared memory, in groups or on an mbarrier.
#include <algorithm>
#include "addresses.h"

namespace emu {

namespace {

struct Copy { u8* to; const u8* from; u32 read; };             // the bytes behind `read` become zeros

template <u32 n> void perform_all(const Copy* copies, int count) {
    for (const Copy* copy = copies; copy < copies + count; ++copy) {
        u8 bytes[n] = {};
        if (copy->read == n) std::memcpy(bytes, copy->from, n);
        else std::memcpy(bytes, copy->from, copy->read);
        std::memcpy(copy->to, bytes, n);
    }
}

void perform(const Copy* copies, int count, u32 n) {
    if (n == 16) perform_all<16>(copies, count);
    else if (n == 8) perform_all<8>(copies, count);
    else perform_all<4>(copies, count);
}

// One lane's source: aligned to the whole copy, but only what is read must be there.
const u8* source(Warp& w, Place from, int lane, u32 n, u32 read, int line) {
    const u64 address = w.wide(from.slot, lane) + (u64)from.offset;
    if (address & (n - 1)) fault("misaligned", w, line, format("the source 0x%llx is not aligned to %u bytes", (unsigned long long)host_address(address), n));
    return w.cta->cluster->global_bytes(address, read, 1, w, line);
}

}  // namespace

// a, i0: shared address; b, i1: global address (two slots); e: bytes; c: slot of the source's size, or -1;
// d: predicate of lanes that ignore their source, or -1, negated with 64 in e.
HANDLER(cp_async, "cp.async") {
    Cluster& cluster = *w.cta->cluster;
    Sanitizer* const s = cluster.sanitizer;
    const u32 n = (u32)r.e & 63, ignored = r.d >= 0 ? w.preds[r.d] ^ (r.e & 64 ? ALL_LANES : 0) : 0;
    Copy copies[LANES];
    int count = 0;
    u32 reading = 0;
    for (u32 m = mask; m; m &= m - 1) {
        const int lane = first_lane(m);
        const u32 read = ignored >> lane & 1 ? 0 : r.c >= 0 ? w.reg(r.c, lane) : n;
        if (read > n) fault("copy", w, r.line, format("lane %d: the source of a copy of %u bytes has %u", lane, n, read));
        if (read) reading |= m & -m;
        copies[count++].read = read;
    }
    const Place to{r.a, r.i0}, from{r.b, r.i1};
    Pointers targets, sources;
    find_lanes<Space::shared>(w, to, mask, n, targets, r.line);
    const bool whole = all_lanes<Space::global>(w, from, reading, n, sources);
    count = 0;
    for (u32 m = mask; m; m &= m - 1) {
        const int lane = first_lane(m);
        Copy& copy = copies[count++];
        copy.to = targets.at[lane];
        copy.from = !copy.read ? copy.to : whole ? sources.at[lane] : source(w, from, lane, n, copy.read, r.line);
    }
    if (s) {
        count = 0;
        for (u32 m = mask; m; m &= m - 1) {
            const int lane = first_lane(m);
            const Copy& copy = copies[count++];
            s->begin_async(w, r, lane, Engine::copy);
            s->async_shared(w.reg(r.a, lane) + (u32)r.i0, n, Access::write);
            if (copy.read) s->async_global((u64)copy.from, copy.read, Access::read);
        }
    }
    ++cluster.events;
    if (!cluster.late && !s) {
        perform(copies, count, n);
        return Flow::next;
    }
    w.copies.open.push_back(cluster.issue_grouped([all = std::vector<Copy>(copies, copies + count), n] { perform(all.data(), (int)all.size(), n); }));
    return Flow::next;
}

// Groups are counted per warp. Lanes that diverge have a part of the warp's groups each; what they wait for is then more
// than they must, never less.
static void commit(Warp& w) {
    w.copies.committed.push_back(std::move(w.copies.open));
    w.copies.open.clear();
    ++w.copies.ncommitted;
    IF_CHECKED(w, commit_group(w, Engine::copy));
}

HANDLER(commit_group, "cp.async.commit_group") {
    commit(w);
    return Flow::next;
}

// i0: groups that may stay under way. wait_all is a commit and a wait for all.
HANDLER(wait_group, "cp.async.wait_group") {
    auto& groups = w.copies.committed;
    while ((i64)groups.size() > r.i0) {
        for (auto& copy : groups.front()) {
            copy->run();
            ++w.cta->cluster->events;
        }
        groups.pop_front();
    }
    IF_CHECKED(w, await(w, mask, Engine::copy, (u32)r.i0));
    return Flow::next;
}

// The copies so far need no other wait once the mbarrier has been told.
static void forget_finished(Warp& w) {
    const auto forget = [](std::vector<AsyncRef>& group) { std::erase_if(group, [](const AsyncRef& copy) { return copy->done; }); };
    forget(w.copies.open);
    for (auto& group : w.copies.committed) forget(group);
}

// a, i0: mbarrier; i1: 1: noinc: the arrivals are among those that the mbarrier was initialised with.
HANDLER(cp_async_arrive, "cp.async.mbarrier.arrive") {
    Cluster& cluster = *w.cta->cluster;
    std::vector<AsyncRef> copies = w.copies.open;
    for (auto& group : w.copies.committed) copies.insert(copies.end(), group.begin(), group.end());
    std::vector<u32> arrivals;
    for (u32 m = mask; m; m &= m - 1) {
        const int lane = first_lane(m);
        const u32 address = w.reg(r.a, lane) + (u32)r.i0;
        shared_at(w, address, 8, r.line);
        Mbarrier& barrier = cluster.mbarrier(address, w, r.line);
        if (!r.i1) ++barrier.pending;
        IF_CHECKED(w, mbarrier_use(w, r, lane, address));
        arrivals.push_back(address);
    }
    if (Sanitizer* s = cluster.sanitizer)
        for (u32 left = mask; left;) {                         // once for the lanes of each mbarrier
            const u32 address = w.reg(r.a, first_lane(left));
            u32 same = 0;
            for (u32 m = left; m; m &= m - 1) if (w.reg(r.a, first_lane(m)) == address) same |= m & -m;
            s->commit_copies(w, same, address + (u32)r.i0);
            left &= ~same;
        }
    cluster.issue_tma(*w.cta, [&cluster, &w, &r, copies = std::move(copies), arrivals = std::move(arrivals)] {
        for (auto& copy : copies) copy->run();
        forget_finished(w);
        for (const u32 address : arrivals) cluster.mbarrier_arrive(address, 1, w, r.line);
    });
    return Flow::next;
}

}  // namespace emu
