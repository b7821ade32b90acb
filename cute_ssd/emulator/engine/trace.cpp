// What the trace keeps of each kind of record.
#include <algorithm>
#include "addresses.h"
#include "bulk.h"
#include "tensor_map.h"
#include "trace.h"

namespace emu {

thread_local std::vector<ClusterTrace> last_traces;

static Traced kind_of(const std::string& name) {
    const auto starts = [&](const char* prefix) { return name.rfind(prefix, 0) == 0; };
    if (starts("ld.shared.") || starts("st.shared.") || starts("ld.cluster.") || starts("st.cluster.")) return Traced::shared;
    if (starts("ldmatrix") || starts("stmatrix")) return Traced::shared;
    if (starts("ld.global.") || starts("st.global.") || starts("ld.generic.") || starts("st.generic.")) return Traced::global;
    if (starts("atom.")) return Traced::global;
    if (starts("red.async.") || name == "st.async") return Traced::remote_store;
    if (name == "cp.async") return Traced::copy_async;
    if (name == "cp.async.mbarrier.arrive") return Traced::copy_async_arrive;
    if (name == "tensor.load") return Traced::tensor_load;
    if (name == "tensor.store" || name == "tensor.reduce") return Traced::tensor_store;
    if (name == "bulk.load") return Traced::bulk_load;
    if (name == "bulk.copy" || name == "bulk.reduce.copy") return Traced::bulk_copy;
    if (name == "bulk.store" || name == "bulk.reduce.store") return Traced::bulk_store;
    if (name == "tcgen05.mma") return Traced::mma;
    if (name == "tcgen05.commit") return Traced::commit;
    if (name == "mbarrier.init") return Traced::mbarrier_init;
    if (name == "mbarrier.arrive" || name == "mbarrier.tx") return Traced::arrive;
    if (name == "mbarrier.try_wait" || name == "mbarrier.test_wait") return Traced::mbarrier_wait;
    if (name == "bar.sync" || name == "bar.red") return Traced::named_wait;
    if (name == "bar.arrive") return Traced::named_arrive;
    if (name == "cluster.arrive") return Traced::cluster_arrive;
    if (name == "cluster.wait") return Traced::cluster_wait;
    if (name == "tcgen05.alloc") return Traced::alloc;
    return Traced::plain;
}

Recorder::Recorder(const Program& p, const Launch& l) : program(p) {
    for (int i = 0; i < p.nrecords; ++i) kinds.push_back(kind_of(handler_names()[p.records[i].handler]));
    warps_per_cta = (l.block[0] * l.block[1] * l.block[2] + LANES - 1) / LANES;
}

void Recorder::start(Cluster& cluster) {
    trace = ClusterTrace();
    trace.number = cluster.number;
    trace.nctas = (int)cluster.ctas.size();
    trace.warps.resize(cluster.ctas.size() * warps_per_cta);
    tokens.clear();
}

u32 Recorder::token(BarrierKind kind, u32 place, u32 phase) {
    const u32 barrier = kind << PLACE_BITS | place;
    const auto [at, fresh] = tokens.emplace((u64)barrier << 32 | phase, (u32)trace.contributions.size());
    if (fresh) trace.contributions.push_back(0), trace.barriers.push_back(barrier);
    return at->second;
}

u32 Recorder::phase_token(Cluster& cluster, u32 address, u32 phase) {
    (void)cluster;
    return token(MBARRIER, (address >> RANK_SHIFT) << 24 | (address & OFFSET_MASK) >> 3, phase);
}

// One contribution to the current phase of an mbarrier.
void Recorder::contribute(Cluster& cluster, u32 address) {
    const u32 rank = address >> RANK_SHIFT, index = (address & OFFSET_MASK) / 8;
    if (rank >= cluster.ctas.size() || index >= cluster.ctas[rank]->mbarriers.size()) return;      // the handler faults
    const u32 t = phase_token(cluster, address, cluster.ctas[rank]->mbarriers[index].phase);
    put(t);
}

// ---- memory ----------------------------------------------------------------------------------------------------------

// Wavefronts of shared memory: a bank gives one word of 4 bytes at a time, to whoever wants that word.
static u32 wavefronts(const u64* address, int n, u32 bytes) {
    u32 rows[32][4 * LANES], used[32] = {}, most = 1;
    const bool whole = [&] {
        for (int i = 1; i < n; ++i) if (address[i] != address[0] + (u64)bytes * i) return false;
        return true;
    }();
    if (whole) return std::max(1u, ((u32)(address[0] & 127) % 128 + n * bytes + 127) / 128);
    for (int i = 0; i < n; ++i)
        for (u32 at = 0; at < std::max(bytes, 4u); at += 4) {
            const u32 word = (u32)(address[i] + at) >> 2, bank = word & 31, row = word >> 5;
            u32 k = 0;
            while (k < used[bank] && rows[bank][k] != row) ++k;
            if (k < used[bank]) continue;
            rows[bank][used[bank]++] = row;
            most = std::max(most, used[bank]);
        }
    return most;
}

static u32 sectors(u64* address, int n, u32 bytes) {
    u64 list[2 * LANES];
    int m = 0;
    for (int i = 0; i < n; ++i) {
        const u64 first = address[i] >> 5, last = (address[i] + bytes - 1) >> 5;
        if (!m || list[m - 1] != first) list[m++] = first;
        if (last != first) list[m++] = last;
    }
    std::sort(list, list + m);
    return (u32)(std::unique(list, list + m) - list);
}

// Bytes of one lane's access: the handler's name ends in .<size>x<elements>.
static u32 access_bytes(const std::string& name) {
    const size_t dot = name.rfind('.'), x = name.rfind('x');
    return (u32)std::stoi(name.substr(dot + 1)) * (u32)std::stoi(name.substr(x + 1));
}

void Recorder::lanes_in_memory(Warp& w, const Record&, i32 slot, i64 offset, u32 bytes, u32 mask, int space) {
    u64 address[LANES], low = ~(u64)0;
    int n = 0;
    bool shared = false;
    for (u32 m = mask; m; m &= m - 1) {
        const int lane = first_lane(m);
        u64 at = space == (int)Space::shared || space == (int)Space::cluster ? w.reg(slot, lane) + (u32)offset : w.wide(slot, lane) + (u64)offset;
        if (space == (int)Space::generic && is_local(at)) continue;
        if (space == (int)Space::generic && is_shared(at)) at -= SHARED_WINDOW, shared = true;
        at = host_address(at);
        address[n++] = at;
        low = std::min(low, at);
    }
    if (space == (int)Space::shared || space == (int)Space::cluster) return put(n ? wavefronts(address, n, bytes) : 0);
    put(n && !shared ? sectors(address, n, bytes) : 0);
    put(n && shared ? wavefronts(address, n, bytes) : 0);
    put((u32)low), put((u32)(low >> 32));
}

// The copy's bytes reach these CTAs and their mbarriers; bulk.h says which.
void Recorder::destinations(Warp& w, const Record& r, int lane, int flags, u32 to, u32 barrier) {
    Cluster& cluster = *w.cta->cluster;
    const u32 barrier_rank = barrier >> RANK_SHIFT;
    u32 ranks = flags & MULTICAST ? w.reg(r.b, lane) & 0xffff : 1u << (to >> RANK_SHIFT);
    for (; ranks; ranks &= ranks - 1) {
        const u32 rank = (u32)__builtin_ctz(ranks);
        const u32 signalled = !(flags & MULTICAST) ? barrier_rank : flags & CTA_PAIR ? (rank & ~1u) | (barrier_rank & 1) : rank;
        put(rank);
        contribute(cluster, signalled << RANK_SHIFT | (barrier & OFFSET_MASK));
    }
}

void Recorder::tensor_tile(Warp& w, const Record& r, u32 mask, bool load) {
    const int lane = first_lane(mask), rank = (int)(r.i1 & 255);
    const i32* const pool = program.pool + r.pool;
    const i32* const coordinates = pool + (load ? 4 : 2);
    Tile tile{tensor_map(w.wide(r.a, lane) + (u64)r.i0, w, r.line), {}};
    if (tile.map.rank != rank) return;                                                             // the handler faults
    for (int k = 0; k < rank; ++k) tile.at[k] = (i32)w.reg(coordinates[k], lane);
    tile.at[0] = tile.at[0] * tile.map.element_bits / 8;
    u64 low = 0, high = 0, inside = 0;
    if (tile.span(low, high)) {
        inside = tile.last() - tile.first();
        for (int k = 1; k < 5; ++k)
            inside *= (u64)(std::min<i64>(tile.at[k] + tile.map.box[k], tile.map.size[k]) - std::max<i64>(tile.at[k], 0));
    }
    put(tile.map.bytes), put(tile.map.bytes / tile.map.box[0] * ((tile.map.box[0] + 127) / 128));
    put((u32)low), put((u32)(low >> 32)), put((u32)inside);
    if (load) destinations(w, r, lane, (int)(r.i1 >> 8), w.reg(pool[0], lane) + (u32)pool[1], w.reg(pool[2], lane) + (u32)pool[3]);
}

void Recorder::bulk(Warp& w, const Record& r, Traced kind, u32 mask) {
    const i32* const pool = program.pool + r.pool;
    const int lane = first_lane(mask);
    u32 bytes = 0, requests = 0;
    for (u32 m = mask; m; m &= m - 1) {
        const u32 n = w.reg(pool[4], first_lane(m));
        bytes += n, requests += (n + 127) / 128;
    }
    const int global = kind == Traced::bulk_load ? 2 : 0;
    const u64 low = kind == Traced::bulk_copy ? 0 : host_address(w.wide(pool[global], lane) + (u64)(i64)pool[global + 1]);
    put(bytes), put(requests), put((u32)low), put((u32)(low >> 32)), put(kind == Traced::bulk_copy ? 0 : bytes);
    if (kind == Traced::bulk_store) return;
    for (u32 m = mask; m; m &= m - 1) {
        const int l = first_lane(m);
        destinations(w, r, l, (int)r.i1, w.reg(pool[0], l) + (u32)pool[1], w.reg(pool[5], l) + (u32)pool[6]);
    }
}

// ---- barriers --------------------------------------------------------------------------------------------------------

void Recorder::named(Warp& w, const Record& r, Traced kind, u32 mask) {
    const int lane = first_lane(mask);
    constexpr u32 FREE = 0xffffffffu;                                                              // barriers.cpp
    const u32 key = kind == Traced::named_arrive ? FREE : w.reg(r.c, lane);
    const u32 id = key == FREE ? w.reg(r.a, lane) & 15 : key & 15;
    const u32 generation = key == FREE ? w.cta->named[id].generation : key >> 4;
    put(token(NAMED, (u32)w.cta->rank << 4 | id, generation));
}

void Recorder::operands(Warp& w, const Record& r, Traced kind, u32 mask) {
    Cluster& cluster = *w.cta->cluster;
    const std::string& name = handler_names()[r.handler];
    const int lane = first_lane(mask);
    const auto shared_place = [&] { return (u32)((r.b ? w.wide(r.a, lane) - SHARED_WINDOW : w.reg(r.a, lane)) + (u64)r.i0); };
    switch (kind) {
        case Traced::shared: {
            if (name[2] != '.') {                                                                  // ldmatrix, stmatrix: rows of 16 bytes
                const u32 rows = r.c >= 4 ? ALL_LANES : (1u << 8 * r.c) - 1;
                return lanes_in_memory(w, r, r.a, r.i0, 16, rows, (int)Space::shared);
            }
            return lanes_in_memory(w, r, r.a, r.i0, access_bytes(name), mask, (int)Space::shared);
        }
        case Traced::global: {
            if (name[0] == 'a') {
                const int space = (int)(r.i1 >> 4 & 7);                                            // atomics.cpp
                const u32 bytes = name.find("64") != std::string::npos ? 8 : 4;
                if (space == (int)Space::shared || space == (int)Space::cluster) {
                    put(0);
                    lanes_in_memory(w, r, r.a, r.i0, bytes, mask, space);
                    put(0), put(0);
                } else lanes_in_memory(w, r, r.a, r.i0, bytes, mask, space);
                return;
            }
            return lanes_in_memory(w, r, r.a, r.i0, access_bytes(name), mask, (int)(name[4] == 'e' ? Space::generic : Space::global));
        }
        case Traced::copy_async: return lanes_in_memory(w, r, r.b, r.i1, (u32)r.e & 63, mask, (int)Space::global);
        case Traced::tensor_load: return tensor_tile(w, r, mask, true);
        case Traced::tensor_store: return tensor_tile(w, r, mask, false);
        case Traced::bulk_load: case Traced::bulk_copy: case Traced::bulk_store: return bulk(w, r, kind, mask);
        case Traced::mma: {
            const i32* const list = program.pool + r.pool;
            const u32 descriptor = w.reg(r.d, lane);
            put((descriptor >> 24 & 31) * 16 | (descriptor >> 17 & 63) * 8 << 16);
            put((list[1] ? MMA_A_IN_TMEM : 0) | (list[0] == 2 ? MMA_PAIR : 0) | (r.e == 1 ? MMA_TF32 : 0));
            return;
        }
        case Traced::commit: {
            const u32 address = shared_place();
            const u32 targets = r.c < 0 ? 1u << (address >> RANK_SHIFT) : w.reg(r.c, lane) & 0xffff;
            for (u32 left = targets; left; left &= left - 1) contribute(cluster, (u32)first_lane(left) << RANK_SHIFT | (address & OFFSET_MASK));
            return;
        }
        case Traced::copy_async_arrive: case Traced::arrive: {
            u32 left = mask;
            while (left) {                                                                         // once for each mbarrier
                const u32 address = w.reg(r.a, first_lane(left));
                contribute(cluster, address + (u32)r.i0);
                for (u32 m = left; m; m &= m - 1) if (w.reg(r.a, first_lane(m)) == address) left &= ~(m & -m);
            }
            return;
        }
        case Traced::mbarrier_wait: {
            const u32 address = w.reg(r.a, lane) + (u32)r.i0, rank = address >> RANK_SHIFT, index = (address & OFFSET_MASK) / 8;
            if (rank >= cluster.ctas.size() || index >= cluster.ctas[rank]->mbarriers.size()) return;
            const u32 phase = cluster.ctas[rank]->mbarriers[index].phase;                          // the awaited one is the last that is over
            return put(phase ? phase_token(cluster, address, phase - 1) : NO_TOKEN);
        }
        case Traced::named_wait: case Traced::named_arrive: return named(w, r, kind, mask);
        case Traced::cluster_arrive: return put(token(CLUSTER, 0, cluster.barrier.generation));
        case Traced::cluster_wait: return put(token(CLUSTER, 0, w.reg(r.c + 2, lane)));
        case Traced::remote_store: {
            const u32 bytes = name[0] == 's' ? (u32)r.d * 4 : name.find("64") != std::string::npos ? 8 : 4;
            put(bytes * (u32)__builtin_popcount(mask));
            return contribute(cluster, w.reg(r.b, lane) + (u32)r.i1);
        }
        case Traced::alloc: return put(w.reg(r.c, lane));
        case Traced::mbarrier_init:
            for (u32 m = mask; m; m &= m - 1) phase_token(cluster, w.reg(r.a, first_lane(m)) + (u32)r.i0, 0);
            return;
        default: return;
    }
}

// The record has been executed: what it contributes counts, and a poll in vain waited for nothing.
void Recorder::finish(Warp& w, Traced kind) {
    const auto from = [&](int first, int step = 1) {
        for (int i = first; i < count; i += step) ++trace.contributions[payload[i]];
    };
    switch (kind) {
        case Traced::commit: case Traced::arrive: case Traced::copy_async_arrive: case Traced::named_wait: case Traced::named_arrive: case Traced::cluster_arrive:
            return from(0);
        case Traced::remote_store: return from(1);
        case Traced::tensor_load: case Traced::bulk_load: case Traced::bulk_copy: return from(TENSOR_WORDS + 1, 2);
        case Traced::mbarrier_wait:
            if (w.yielded) count = 0;
            return;
        case Traced::alloc:
            if (w.cta->rank == 0) trace.tmem_columns += (int)payload[0];
            return;
        default: return;
    }
}

}  // namespace emu

using namespace emu;

extern "C" {

// A recorded cluster; the memory lives until the next run on this thread.
struct TraceView {
    i64 number;
    i32 nctas, nwarps;
    const u32* contributions;
    u64 ncontributions;
    i32 tmem_columns;
    const u32* barriers;                   // as many as contributions
};

int emu_trace_count() { return (int)last_traces.size(); }

void emu_trace(int i, TraceView* view) {
    const ClusterTrace& trace = last_traces[i];
    *view = {trace.number, trace.nctas, (i32)trace.warps.size(), trace.contributions.data(), trace.contributions.size(), trace.tmem_columns, trace.barriers.data()};
}

const u32* emu_trace_warp(int i, int warp, u64* size) {
    *size = last_traces[i].warps[warp].size();
    return last_traces[i].warps[warp].data();
}

}  // extern "C"
