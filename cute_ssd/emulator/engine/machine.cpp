// Clusters, CTAs and warps: set-up, findings and faults.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include "core.h"
#include "sanitizer.h"
#include "trace.h"

namespace emu {

std::string format(const char* pattern, ...) {
    char buffer[1024];
    va_list args;
    va_start(args, pattern);
    vsnprintf(buffer, sizeof buffer, pattern, args);
    va_end(args);
    return buffer;
}

void fault(const std::string& kind, const Warp& w, int line, const std::string& message) {
    throw Fault{kind, message, line, w.name()};
}

std::string Warp::name() const {
    const int* at = cta->index;
    return format("warp %d of CTA (%d, %d, %d)", id, at[0], at[1], at[2]);
}

void Cluster::find(const std::string& kind, const Warp* w, int line, const std::string& message) {
    for (const Fault& old : findings)
        if (old.kind == kind && old.line == line) return;      // one sentence per place and kind
    findings.push_back({kind, message, line, w ? w->name() : ""});
}

// ---- set-up ----------------------------------------------------------------------------------------------------------

template <class T> T* Cluster::allocate(size_t n) {
    constexpr size_t ALIGNMENT = 64;
    memory.emplace_back(std::aligned_alloc(ALIGNMENT, (n * sizeof(T) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT));
    if (!memory.back()) throw std::bad_alloc();
    return (T*)memory.back().get();
}

Cluster::Cluster(const Program& p, const Launch& l, const Options& o) : program(p), launch(l), options(o) {
    for (int i = 0; i < p.nrecords; ++i) handlers.push_back(handler_at(p.records[i].handler));
    counts.assign(p.nrecords, 0);
    const int size = l.cluster[0] * l.cluster[1] * l.cluster[2];
    for (int rank = 0; rank < size; ++rank) {
        auto cta = std::make_unique<Cta>();
        cta->cluster = this;
        cta->rank = rank;
        cta->nthreads = l.block[0] * l.block[1] * l.block[2];
        cta->shared.resize(SHARED_BASE + l.shared_bytes);
        cta->mbarriers.resize(cta->shared.size() / 8);
        cta->tmem = allocate<u32[TMEM_COLUMNS]>(TMEM_LANES);
        cta->warps.resize((cta->nthreads + LANES - 1) / LANES);
        for (size_t i = 0; i < cta->warps.size(); ++i) {
            Warp& w = cta->warps[i];
            w.cta = cta.get();
            w.id = (int)i;
            w.regs = allocate<u32>((size_t)p.nslots * LANES + 1);
            w.preds = allocate<u32>(p.npredicates + 1);
            if (o.sanitize) w.suspicions = allocate<Suspicion>(p.npredicates + 1 + p.nslots + 1) + p.npredicates + 1;
        }
        ctas.push_back(std::move(cta));
    }
    find_polling();
    if (o.sanitize) sanitizer = make_sanitizer(*this);
}

Cluster::~Cluster() { delete sanitizer; }

// Numbers of the special registers: decode.py's SPECIALS has the same order.
static u32 special_value(int number, const Warp& w, int lane) {
    const Cta& cta = *w.cta;
    const Launch& l = cta.cluster->launch;
    const u32 thread = w.id * LANES + lane;
    const u32 bx = l.block[0], by = l.block[1];
    const int rank = cta.rank, *cluster = l.cluster;
    const u32 in_cluster[3] = {(u32)rank % cluster[0], (u32)rank / cluster[0] % cluster[1], (u32)rank / (cluster[0] * cluster[1])};
    switch (number) {
        case 0: return thread % bx;
        case 1: return thread / bx % by;
        case 2: return thread / (bx * by);
        case 3: case 4: case 5: return cta.index[number - 3];                       // ctaid
        case 6: case 7: case 8: return l.grid[number - 6];                          // nctaid
        case 9: case 10: case 11: return l.block[number - 9];                       // ntid
        case 12: return lane;
        case 13: return w.id;                                                       // warpid
        case 14: return (u32)cta.warps.size();                                      // nwarpid
        case 15: return rank;                                                       // cluster_ctarank
        case 16: return cluster[0] * cluster[1] * cluster[2];                       // cluster_nctarank
        case 17: case 18: case 19: return in_cluster[number - 17];                  // cluster_ctaid
        case 20: case 21: case 22: return cluster[number - 20];                     // cluster_nctaid
        case 23: case 24: case 25: return cta.index[number - 23] / cluster[number - 23];   // clusterid
        case 26: case 27: case 28: return l.grid[number - 26] / cluster[number - 26];      // nclusterid
        case 29: return cluster[0] * cluster[1] * cluster[2] > 1;                   // is_explicit_cluster
        case 30: return (u32)l.shared_bytes;                                        // total_smem_size
        case 31: return ALL_LANES >> (LANES - 1 - lane) >> 1;                       // lanemask_lt
        case 32: return ALL_LANES >> (LANES - 1 - lane);                            // lanemask_le
        case 33: return 1u << lane;                                                 // lanemask_eq
        case 34: return ALL_LANES << lane;                                          // lanemask_ge
        case 35: return ALL_LANES << lane << 1;                                     // lanemask_gt
        case 36: return (u32)(cta.index[0] % 148);                                  // smid
        case 37: return 148;                                                        // nsmid
        case 38: return 0;                                                          // gridid
        case 39: return (u32)l.dynamic_bytes;                                       // dynamic_smem_size
        default: return 0;
    }
}

static void start_warp(Warp& w) {
    const Cta& cta = *w.cta;
    const Program& p = cta.cluster->program;
    const Launch& l = cta.cluster->launch;
    for (i32 s = 0; s < p.nslots; ++s) std::fill_n(w.reg(s), LANES, p.initial[s]);
    std::fill_n(w.preds, p.npredicates + 1, 0u);
    for (i32 i = 0; i < p.nspecials; ++i)
        for (int lane = 0; lane < LANES; ++lane) w.reg(p.specials[2 * i + 1], lane) = special_value(p.specials[2 * i], w, lane);
    for (i32 i = 0; i < p.nshared_symbols; ++i)
        for (int lane = 0; lane < LANES; ++lane) w.reg(p.shared_symbols[i], lane) |= (u32)cta.rank << RANK_SHIFT;
    for (i32 i = 0; i < p.nparam_symbols; ++i)
        for (int lane = 0; lane < LANES; ++lane)
            w.set_wide(p.param_symbols[2 * i], lane, (u64)l.params + p.param_symbols[2 * i + 1]);
    if (w.suspicions) {
        std::fill_n(w.suspicions - p.npredicates - 1, p.npredicates + 1, Suspicion{ALL_LANES, 0});
        for (i32 s = 0; s < p.nslots; ++s) w.suspicions[s] = {p.constant[s] ? 0 : ALL_LANES, 0};
    }
    const int first = w.id * LANES, nlanes = std::min(LANES, cta.nthreads - first);
    w.live = nlanes == LANES ? ALL_LANES : (1u << nlanes) - 1;
    w.groups.assign(1, {0, w.live});
    w.yielded = w.may_time_out = w.spinning = w.stuck = w.polls = false;
    w.idle = 0;
    w.vain = 0;
    w.polled = -1;
    w.states.clear();
    w.bulk = w.copies = AsyncGroups();
    w.tmem_stores.clear();
    w.tmem_load_slots.clear();
    w.local.assign((size_t)p.local_bytes * LANES, 0xff);
}

void Cluster::start(i64 which) {
    number = which;
    const i64 nx = launch.grid[0] / launch.cluster[0], ny = launch.grid[1] / launch.cluster[1];
    const i64 at[3] = {number % nx, number / nx % ny, number / (nx * ny)};
    for (int k = 0; k < 3; ++k) ctaid0[k] = (int)at[k] * launch.cluster[k];
    random.seed(options.seed * 1000003 + number);
    late = options.schedule != EAGER;
    barrier = {};
    executed += clock;
    clock = 0;
    stalls = 0;
    stall_events = ~0ull;
    if (sanitizer) sanitizer->start();
    if (recorder) recorder->start(*this);
    for (auto& cta : ctas) {
        const int r = cta->rank, cx = launch.cluster[0], cy = launch.cluster[1];
        const int in_cluster[3] = {r % cx, r / cx % cy, r / (cx * cy)};
        for (int k = 0; k < 3; ++k) cta->index[k] = ctaid0[k] + in_cluster[k];
        std::fill(cta->shared.begin(), cta->shared.end(), 0xff);      // NaN in every float format
        std::memset(cta->tmem, 0xff, TMEM_LANES * TMEM_COLUMNS * 4);
        std::fill(cta->mbarriers.begin(), cta->mbarriers.end(), Mbarrier());
        for (auto& named : cta->named) named = {};
        cta->allocations.clear();
        cta->alloc_permit = true;
        cta->tensor_queue.clear();
        cta->tma_queue.clear();
        for (Warp& w : cta->warps) start_warp(w);
    }
}

}  // namespace emu
