// Clusters, CTAs and warps: set-up, divergence, schedules, deadlock.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include "core.h"
#include "sanitizer.h"

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

Cluster::Cluster(const Program& p, const Launch& l, const Options& o) : program(p), launch(l), options(o) {
    for (int i = 0; i < p.nrecords; ++i) handlers.push_back(handler_at(p.records[i].handler));
    counts.assign(p.nrecords, 0);
    const int size = l.cluster[0] * l.cluster[1] * l.cluster[2];
    const size_t slot_bytes = (size_t)p.nslots * LANES * 4;
    for (int rank = 0; rank < size; ++rank) {
        auto cta = std::make_unique<Cta>();
        cta->cluster = this;
        cta->rank = rank;
        cta->nthreads = l.block[0] * l.block[1] * l.block[2];
        cta->shared.resize(SHARED_BASE + l.shared_bytes);
        cta->mbarriers.resize(cta->shared.size() / 8);
        cta->tmem = (u32(*)[TMEM_COLUMNS])std::aligned_alloc(64, TMEM_LANES * TMEM_COLUMNS * 4);
        cta->warps.resize((cta->nthreads + LANES - 1) / LANES);
        for (size_t i = 0; i < cta->warps.size(); ++i) {
            Warp& w = cta->warps[i];
            w.cta = cta.get();
            w.id = (int)i;
            w.regs = (u32*)std::aligned_alloc(64, slot_bytes + 64);
            w.preds = (u32*)std::calloc(p.npredicates + 1, 4);
            w.undefined = o.sanitize ? (u32*)std::calloc(p.nslots + 1, 4) : nullptr;
            w.undefined_preds = o.sanitize ? (u32*)std::calloc(p.npredicates + 1, 4) : nullptr;
            w.in_flight = o.sanitize ? (u32*)std::calloc(p.nslots + 1, 4) : nullptr;
        }
        ctas.push_back(std::move(cta));
    }
    if (o.sanitize) sanitizer = make_sanitizer(*this);
}

Cluster::~Cluster() {
    for (auto& cta : ctas) {
        for (Warp& w : cta->warps) {
            std::free(w.regs);
            std::free(w.preds);
            std::free(w.undefined);
            std::free(w.undefined_preds);
            std::free(w.in_flight);
        }
        std::free(cta->tmem);
    }
    delete sanitizer;
}

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
    if (w.undefined) {
        for (i32 s = 0; s < p.nslots; ++s) w.undefined[s] = p.constant[s] ? 0 : ALL_LANES, w.in_flight[s] = 0;
        std::fill_n(w.undefined_preds, p.npredicates + 1, ALL_LANES);
    }
    const int first = w.id * LANES, nlanes = std::min(LANES, cta.nthreads - first);
    w.live = nlanes == LANES ? ALL_LANES : (1u << nlanes) - 1;
    w.groups.assign(1, {0, w.live});
    w.yielded = w.may_time_out = w.spinning = w.stuck = false;
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
    stalls = 0;
    stall_events = ~0ull;
    if (sanitizer) sanitizer->start();
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

// ---- execution of one warp -------------------------------------------------------------------------------------------

// Values that depend on registers nothing wrote, or on a tcgen05.ld still in flight. The first travel through arithmetic and are
// reported where an instruction acts on them; the second may only be moved.
void Cluster::check_registers(Warp& w, const Record& r, u32 mask) {
    enum { COMPUTES, COPIES, DECIDES, STORES, PAIRS };
    const i32 *sources = program.pool + r.sources, *targets = program.pool + r.targets;
    u32 undefined = 0, in_flight = 0;
    // Mostly everything is defined.
    const auto marks = [&](i32 s) { return s < 0 ? w.undefined_preds[~s] : w.undefined[s] | w.in_flight[s]; };
    u32 any = 0;
    for (i32 i = 0; i < r.nsources; ++i) any |= marks(sources[i]);
    for (i32 i = 0; i < r.ntargets; ++i) any |= marks(targets[i]);
    if (!(any & mask)) return;
    for (i32 i = 0; i < r.nsources; ++i) {
        const i32 s = sources[i];
        undefined |= s < 0 ? w.undefined_preds[~s] : w.undefined[s];
        in_flight |= s < 0 ? 0 : w.in_flight[s];
    }
    if (r.use == COPIES && r.nsources > r.ntargets) {          // a pack is used by halves: it is defined if one of them is
        undefined = ALL_LANES;
        for (i32 i = 0; i < r.nsources; ++i) undefined &= w.undefined[sources[i]];
    }
    undefined &= mask;
    in_flight &= mask;
    auto mark = [&](i32 t, u32 u, u32 f) {
        u32& known = t < 0 ? w.undefined_preds[~t] : w.undefined[t];
        known = (known & ~mask) | (u & mask);
        if (t < 0) return;
        w.in_flight[t] = (w.in_flight[t] & ~mask) | (f & mask);
        if (f & mask) w.tmem_load_slots.push_back(t);
    };
    if (r.use == COPIES && r.nsources == r.ntargets && r.ntargets <= 2 && (undefined | in_flight)) {       // word for word
        u32 marks[2][2];
        for (i32 i = 0; i < r.nsources; ++i)
            marks[i][0] = w.undefined[sources[i]], marks[i][1] = w.in_flight[sources[i]];
        for (i32 i = 0; i < r.ntargets; ++i) mark(targets[i], marks[i][0], marks[i][1]);
        return;
    }
    if (r.use == STORES) undefined = r.a < 0 ? 0 : w.undefined[r.a] & mask;
    if ((r.use == DECIDES || r.use == STORES) && undefined) {
        find("undefined value", &w, r.line, format("lane %d uses a value that depends on a register nothing has written", first_lane(undefined)));
        undefined = 0;
    }
    if (r.use != COPIES && in_flight && options.implicit_waits) {        // ptxas waits for the load where its result is used
        sanitizer->await(w, w.live, Engine::tmem_load, 0);
        std::fill_n(w.in_flight, program.nslots, 0u);
        w.tmem_load_slots.clear();
        in_flight = 0;
    }
    if (r.use != COPIES && in_flight) {
        find("register in flight", &w, r.line,
             format("lane %d uses the result of a tcgen05.ld before tcgen05.wait::ld", first_lane(in_flight)));
        in_flight = 0;
    }
    u32 halves[2] = {undefined, undefined};
    if (r.use == PAIRS && r.ntargets == 2 && undefined) {       // each half of a packed result comes from its own halves
        halves[0] = halves[1] = 0;
        for (i32 i = 0; i < r.nsources; ++i) halves[i % 2] |= w.undefined[sources[i]] & mask;
    }
    for (i32 i = 0; i < r.ntargets; ++i) mark(targets[i], halves[i % 2], in_flight);
}

// Runs one group of lanes until it blocks, diverges, meets another group or has used its quantum; returns the instructions.
u64 Cluster::run_group(Warp& w, size_t index, u64 quantum) {
    const Record* const records = program.records;
    i32 pc = w.groups[index].pc, meeting = INT32_MAX;
    const u32 active = w.groups[index].mask;
    for (size_t i = 0; i < w.groups.size(); ++i)
        if (i != index && w.groups[i].pc > pc) meeting = std::min(meeting, w.groups[i].pc);
    const bool first = index == 0;
    u64 ran = 0;
    for (;;) {
        if (ran >= quantum || (first && pc >= meeting) || (!first && pc == meeting)) break;
        const Record& r = records[pc];
        u32 mask = active;
        if (r.guard >= 0) {
            if (w.undefined_preds && w.undefined_preds[r.guard] & active)
                find("undefined value", &w, r.line, "the predicate of the instruction depends on a register nothing has written");
            mask &= r.guard_negated ? ~w.preds[r.guard] : w.preds[r.guard];
            if (!mask) { ++pc; ++ran; continue; }
        }
        if (r.handler == 0) {                                           // bra
            ++counts[pc]; ++ran;
            if (mask == active) { pc = (i32)r.i0; continue; }
            w.groups[index] = {pc + 1, active & ~mask};
            w.groups.push_back({(i32)r.i0, mask});
            return ran;
        }
        if (r.handler == 1) {                                           // exit, ret of the kernel
            ++counts[pc]; ++ran; ++events;
            w.live &= ~mask;
            if (mask == active) w.groups.erase(w.groups.begin() + index);
            else w.groups[index] = {pc + 1, active & ~mask};
            if (!w.live && sanitizer) sanitizer->exit_warp(w);
            return ran;
        }
        if (r.handler == 2) {                                           // brx.idx: one group per target
            if (w.undefined) check_registers(w, r, mask);
            ++counts[pc]; ++ran;
            w.groups.erase(w.groups.begin() + index);
            if (mask != active) w.groups.push_back({pc + 1, active & ~mask});
            for (u32 left = mask; left; ) {
                const u32 choice = w.reg(r.a, first_lane(left));
                if (choice >= (u32)r.i0) fault("branch", w, r.line, format("brx.idx index %u of a table of %d", choice, (int)r.i0));
                u32 same = 0;
                for (u32 m = left; m; m &= m - 1) if (w.reg(r.a, first_lane(m)) == choice) same |= m & -m;
                w.groups.push_back({program.pool[r.pool + choice], same});
                left &= ~same;
            }
            return ran;
        }
        if (w.undefined) check_registers(w, r, mask);
        if (handlers[pc](w, r, mask) == Flow::block) break;
        ++counts[pc]; ++ran;
        if (w.yielded) {
            w.polled = pc++;
            break;
        }
        ++pc;
    }
    w.groups[index].pc = pc;
    return ran;
}

// Lanes at the same instruction run together; the lowest instruction goes first, so that branches reconverge. When that group
// blocks or polls the others may go on (independent thread scheduling) as far as instructions allow that need the whole warp.
bool Cluster::step(Warp& w, u64 quantum) {
    auto& groups = w.groups;
    if (groups.size() > 1) {
        std::sort(groups.begin(), groups.end(), [](const Group& x, const Group& y) { return x.pc < y.pc; });
        size_t last = 0;
        for (size_t i = 1; i < groups.size(); ++i)
            if (groups[i].pc == groups[last].pc) groups[last].mask |= groups[i].mask;
            else groups[++last] = groups[i];
        groups.resize(last + 1);
    }
    const size_t n = groups.size(), start = w.vain % n;
    for (size_t i = 0; i < n; ++i) {
        const u64 ran = run_group(w, (start + i) % n, quantum);
        clock += ran;
        w.ninstructions += ran;
        if (ran) return true;
    }
    return false;
}

// ---- schedules -------------------------------------------------------------------------------------------------------

constexpr u64 LONG_QUANTUM = 50000;        // a warp that runs so long without any effect may be polling global memory
constexpr u64 HOPELESS = 200'000'000;      // one that runs so long without any effect is, although its registers change
constexpr u64 DIVERGED_QUANTUM = 5000;     // the same for lanes whose warp has others that may go on
constexpr int PATIENCE = 64;               // rounds in which polls time out and nothing changes: deadlock

// A step achieved something unless the warp only polled.
bool Cluster::turn(Warp& w, u64 quantum) {
    if (!w.live) return false;
    const u64 before = events, start = w.ninstructions;
    w.yielded = false;
    w.polled = -1;
    const bool diverged = w.groups.size() > 1;
    if (!step(w, diverged ? std::min(quantum, DIVERGED_QUANTUM) : quantum)) return false;
    if (events != before) {
        w.idle = w.vain = 0;
        w.spinning = w.stuck = false;
        return true;
    }
    const u64 quanta = w.idle / LONG_QUANTUM;
    if (!w.yielded) w.idle += w.ninstructions - start;
    w.spinning = w.idle >= LONG_QUANTUM;
    if (w.idle / LONG_QUANTUM != quanta) w.stuck = seen_before(w);
    if (w.yielded || w.spinning || (diverged && w.idle >= DIVERGED_QUANTUM)) ++w.vain;
    return !w.yielded && !w.spinning;
}

// Whether the warp's registers were the same before, with nothing happening in between: a loop that only memory can end.
bool Cluster::seen_before(Warp& w) {
    if (w.states_events != events) w.states.clear();
    w.states_events = events;
    u64 hash = w.live;
    auto add = [&](u64 x) { hash = (hash ^ x) * 0x9e3779b97f4a7c15ull, hash ^= hash >> 29; };
    for (const Group& g : w.groups) add((u64)g.pc << 32 | g.mask);
    for (i32 p = 0; p < program.npredicates; ++p) add(w.preds[p]);
    for (i64 i = 0; i < (i64)program.nslots * LANES; ++i) add(w.regs[i]);
    for (u8 byte : w.local) add(byte);
    if (std::find(w.states.begin(), w.states.end(), hash) != w.states.end()) return true;
    if (w.states.size() < 1000) w.states.push_back(hash);
    return false;
}

bool Cluster::pump_tma(Cta& cta) {
    auto& queue = cta.tma_queue;
    if (queue.empty()) return false;
    const size_t i = roll() % queue.size();
    AsyncRef op = std::move(queue[i]);
    queue.erase(queue.begin() + i);
    op->run();
    ++events;
    return true;
}

bool Cluster::pump_tensor(Cta& cta) {
    if (cta.tensor_queue.empty()) return false;
    AsyncRef op = std::move(cta.tensor_queue.front());
    cta.tensor_queue.pop_front();
    op->run();
    ++events;
    return true;
}

bool Cluster::pump_any() {
    const size_t n = ctas.size(), first = roll() % n;
    const bool tensor_first = roll() & 1;
    for (size_t i = 0; i < n; ++i) {
        Cta& cta = *ctas[(first + i) % n];
        if (tensor_first ? pump_tensor(cta) || pump_tma(cta) : pump_tma(cta) || pump_tensor(cta)) return true;
    }
    return false;
}

bool Cluster::live() const {
    for (auto& cta : ctas)
        for (auto& w : cta->warps)
            if (w.live) return true;
    return false;
}

// Nothing moved. Blocked polls time out, as on the device. True: go on; false: only another cluster can help.
bool Cluster::stall() {
    if (events != stall_events) stalls = 0;
    stall_events = events;
    bool spinning = false;
    for (auto& cta : ctas)
        for (Warp& w : cta->warps) {
            w.may_time_out = true;
            spinning |= w.live && w.spinning;
        }
    if (++stalls < (spinning && hopeless() ? PATIENCE / 16 : PATIENCE)) return true;
    stalls = 0;
    if (spinning) return false;
    throw Fault{"deadlock", "no warp can go on: " + waiting(), 0, ""};
}

bool Cluster::hopeless() const {
    for (auto& cta : ctas)
        for (const Warp& w : cta->warps)
            if (w.live && w.spinning && !w.stuck && w.idle < HOPELESS) return false;
    return true;
}

bool Cluster::round_robin() {
    for (;;) {
        bool progress = false;
        for (auto& cta : ctas)
            for (Warp& w : cta->warps) progress |= turn(w, LONG_QUANTUM);
        if (!live()) return true;
        if (!progress && !pump_any() && !stall()) return false;
    }
}

// Probabilistic concurrency testing: always the entity of highest priority that can move; priorities are reshuffled at random
// moments. Entities are warps, some of them bound together as warpgroups, and the TMA and tensor engines.
bool Cluster::by_priority() {
    struct Entity { std::vector<Warp*> warps; Cta* cta; int engine; };
    std::vector<Entity> entities;
    for (auto& cta : ctas) {
        auto& warps = cta->warps;
        for (size_t g = 0; g < warps.size(); g += 4) {
            const size_t end = std::min(g + 4, warps.size());
            const bool apart = roll() % 10 < 6;
            for (size_t i = g; i < end; ++i)
                if (apart || i == g) entities.push_back({{&warps[i]}, nullptr, 0});
                else entities.back().warps.push_back(&warps[i]);
        }
        entities.push_back({{}, cta.get(), 1});
        entities.push_back({{}, cta.get(), 2});
    }
    u64 change = 0, quantum = 1;
    for (u64 round = 0;; ++round) {
        if (round == change) {
            std::shuffle(entities.begin(), entities.end(), random);
            change = round + 1 + roll() % 400;
            quantum = 1 + roll() % 200;
        }
        bool progress = false;
        for (Entity& e : entities) {
            if (e.engine == 1) progress = pump_tma(*e.cta);
            else if (e.engine == 2) progress = pump_tensor(*e.cta);
            else for (Warp* w : e.warps) progress |= turn(*w, quantum);
            if (progress) break;
        }
        if (!live()) return true;
        if (!progress && !stall()) return false;
    }
}

bool Cluster::run() {
    if (!(options.schedule == PRIORITY ? by_priority() : round_robin())) return false;
    finish();
    return true;
}

void Cluster::finish() {
    while (pump_any()) {}
    if (sanitizer) sanitizer->finish();
    for (auto& cta : ctas) {
        for (Warp& w : cta->warps) {
            for (AsyncGroups* groups : {&w.bulk, &w.copies}) {
                const char* what = groups == &w.bulk ? "cp.async.bulk" : "cp.async";
                size_t unfinished = groups->open.size();
                for (auto& group : groups->committed) unfinished += group.size();
                if (unfinished && sanitizer)
                    find("unfinished copy", &w, 0, format("exits with %zu %s operations that nothing waited for", unfinished, what));
                for (auto& group : groups->committed) for (auto& op : group) op->run();
                for (auto& op : groups->open) op->run();
            }
            for (auto& op : w.tmem_stores) op->run();
        }
        for (auto& a : cta->allocations)
            find("tensor memory leak", &cta->warps[0], 0, format("%d columns of tensor memory from column %d are not deallocated at exit", a.columns, a.column));
    }
}

// ---- deadlock report -------------------------------------------------------------------------------------------------

std::string Cluster::waiting() const {
    std::string text;
    int listed = 0;
    for (auto& cta : ctas)
        for (const Warp& w : cta->warps) {
            if (!w.live || ++listed > 24) continue;
            for (const Group& g : w.groups) {
                const bool polls = w.polled >= 0 && g.pc == w.polled + 1;
                const Record& r = program.records[polls ? w.polled : g.pc];
                const std::string& name = handler_names()[r.handler];
                text += format("%s%s at PTX line %d", text.empty() ? "" : "; ", w.name().c_str(), r.line);
                if (name == "bar.sync" || name == "bar.red") {
                    const u32 id = const_cast<Warp&>(w).reg(r.a, first_lane(g.mask)) & 15;
                    const auto& named = cta->named[id];
                    text += format(" waits at barrier %u (%d of %d threads arrived)", id, named.arrived, named.expected);
                } else if (name == "cluster.wait") {
                    text += format(" waits at the barrier of the cluster (%u threads arrived)", barrier.arrived);
                } else if (name.rfind("mbarrier.", 0) == 0) {
                    const u32 address = const_cast<Warp&>(w).reg(r.a, first_lane(g.mask)) + (u32)r.i0;
                    const u32 rank = address >> RANK_SHIFT, offset = address & OFFSET_MASK;
                    if (rank < ctas.size() && offset / 8 < ctas[rank]->mbarriers.size()) {
                        const Mbarrier& b = ctas[rank]->mbarriers[offset / 8];
                        text += format(" waits for the mbarrier at shared+%d (initialised at line %d; phase %u, %d of %d arrivals pending, %lld bytes expected)",
                                       (int)offset - (int)SHARED_BASE, b.line, b.phase, b.pending, b.count, (long long)b.tx);
                    }
                } else if (name == "tcgen05.alloc") {
                    text += " waits for columns of tensor memory";
                } else if (w.spinning) {
                    text += " polls memory";
                } else if (w.live & ~g.mask) {
                    text += format(" waits for the lanes 0x%08x of its warp", w.live & ~g.mask);
                }
            }
        }
    return text;
}

}  // namespace emu
