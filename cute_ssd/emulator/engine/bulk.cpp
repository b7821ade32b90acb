// cp.async.bulk and cp.reduce.async.bulk of plain bytes; bulk groups.
#include "bulk.h"
#include "reduction.h"

namespace emu {

// The pool of a record: destination, source, size; then the mbarrier if there is one; then operation, element, its size if it reduces.
struct Bytes {
    const i32* pool;
    Warp& w;
    int lane;
    u32 shared(int k) const { return w.reg(pool[k], lane) + (u32)pool[k + 1]; }
    u64 global(int k) const { return w.wide(pool[k], lane) + (u64)(i64)pool[k + 1]; }
    u32 destination() const { return shared(0); }
    u32 source() const { return shared(2); }
    u32 barrier() const { return shared(5); }
    u32 size(const Record& r) const {
        const u32 n = w.reg(pool[4], lane);
        if (n % 16) fault("misaligned", w, r.line, format("a bulk copy of %u bytes: the number must be a multiple of 16", n));
        return n;
    }
};

static Bytes operands(Warp& w, const Record& r, int lane) { return {w.cta->cluster->program.pool + r.pool, w, lane}; }

HANDLER(bulk_load, "bulk.load") {
    Cluster& cluster = *w.cta->cluster;
    for (u32 lanes = mask; lanes; lanes &= lanes - 1) {
        const int lane = first_lane(lanes);
        const Bytes bytes = operands(w, r, lane);
        const u32 n = bytes.size(r);
        const u8* const from = cluster.global_bytes(bytes.global(2), n, 16, w, r.line, "the source of a bulk copy");
        each_destination(w, r, lane, (int)r.i1, bytes.destination(), bytes.barrier(), n, 16, [&](u32 to, u32 barrier) {
            if (cluster.sanitizer) cluster.sanitizer->async_global(bytes.global(2), n, Access::read);
            u8* const target = cluster.shared_bytes(to, n, 16, w, r.line);
            cluster.issue_tma(*w.cta, [&cluster, &w, line = r.line, target, from, n, barrier] {
                std::memcpy(target, from, n);
                cluster.mbarrier_complete(barrier, n, w, line);
            });
        });
    }
    return Flow::next;
}

static Flow to_cluster(Warp& w, const Record& r, u32 mask, bool reduces) {
    Cluster& cluster = *w.cta->cluster;
    for (u32 lanes = mask; lanes; lanes &= lanes - 1) {
        const int lane = first_lane(lanes);
        const Bytes bytes = operands(w, r, lane);
        const u32 n = bytes.size(r);
        check_own(w, r, bytes.source());
        const u8* const from = cluster.shared_bytes(bytes.source(), n, 16, w, r.line);
        each_destination(w, r, lane, (int)r.i1, bytes.destination(), bytes.barrier(), n, 16, [&](u32 to, u32 barrier) {
            if (cluster.sanitizer) cluster.sanitizer->async_shared(bytes.source(), n, Access::read);
            u8* const target = cluster.shared_bytes(to, n, 16, w, r.line);
            const i32* const kind = bytes.pool + 7;
            cluster.issue_tma(*w.cta, [&cluster, &w, line = r.line, target, from, n, barrier, kind, reduces] {
                if (reduces) reduce((Operation)kind[0], (Element)kind[1], target, from, n, true);
                else std::memcpy(target, from, n);
                cluster.mbarrier_complete(barrier, n, w, line);
            });
        }, reduces ? Access::atomic : Access::write);
    }
    return Flow::next;
}

HANDLER(bulk_copy, "bulk.copy") { return to_cluster(w, r, mask, false); }
HANDLER(bulk_reduce_copy, "bulk.reduce.copy") { return to_cluster(w, r, mask, true); }

static Flow to_global(Warp& w, const Record& r, u32 mask, bool reduces) {
    Cluster& cluster = *w.cta->cluster;
    for (u32 lanes = mask; lanes; lanes &= lanes - 1) {
        const int lane = first_lane(lanes);
        const Bytes bytes = operands(w, r, lane);
        const u32 n = bytes.size(r);
        const u64 to = w.wide(bytes.pool[0], lane) + (u64)(i64)bytes.pool[1];
        check_own(w, r, bytes.source());
        const u8* const from = cluster.shared_bytes(bytes.source(), n, 16, w, r.line);
        u8* const target = cluster.global_bytes(to, n, 16, w, r.line, "the destination of a bulk copy");
        if (Sanitizer* s = cluster.sanitizer) {
            s->begin_async(w, r, lane, Engine::bulk_read);
            s->async_shared(bytes.source(), n, Access::read);
            s->begin_async(w, r, lane, Engine::bulk_write);
            s->async_global(to, n, reduces ? Access::atomic : Access::write);
        }
        const i32* const kind = bytes.pool + 5;
        const bool alone = cluster.options.threads == 1;
        w.bulk.open.push_back(cluster.issue_grouped([target, from, n, kind, reduces, alone] {
            if (reduces) reduce((Operation)kind[0], (Element)kind[1], target, from, n, alone);
            else std::memcpy(target, from, n);
        }));
        ++cluster.events;
    }
    return Flow::next;
}

HANDLER(bulk_store, "bulk.store") { return to_global(w, r, mask, false); }
HANDLER(bulk_reduce_store, "bulk.reduce.store") { return to_global(w, r, mask, true); }

// ---- groups ----------------------------------------------------------------------------------------------------------

// Groups belong to the warp: in the device's code one uniform instruction stores, commits or waits for all lanes.
HANDLER(bulk_commit, "bulk.commit") {
    w.bulk.committed.push_back(std::move(w.bulk.open));
    w.bulk.open.clear();
    ++w.bulk.ncommitted;
    IF_CHECKED(w, commit_group(w, Engine::bulk_read));
    return Flow::next;
}

// i0: groups that may stay pending; i1: 1 waits for the reads only. A schedule that put the work off does it here at the latest.
HANDLER(bulk_wait, "bulk.wait") {
    while ((i64)w.bulk.committed.size() > r.i0) {
        for (AsyncRef& op : w.bulk.committed.front()) op->run();
        w.bulk.committed.pop_front();
        ++w.cta->cluster->events;
    }
    IF_CHECKED(w, await(w, mask, Engine::bulk_read, (u32)r.i0));
    if (!r.i1) IF_CHECKED(w, await(w, mask, Engine::bulk_write, (u32)r.i0));
    return Flow::next;
}

}  // namespace emu
