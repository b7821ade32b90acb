// Which warp or queue goes next; deadlock, and what is left behind at exit.
#include <algorithm>
#include "addresses.h"

namespace emu {

constexpr u64 LONG_QUANTUM = 50000;        // a warp that runs so long without any effect may be polling global memory
constexpr u64 HOPELESS = 200'000'000;      // one that polls for so long does so in vain, although its registers change
constexpr u64 DIVERGED_QUANTUM = 5000;     // the same for lanes whose warp has others that may go on
constexpr int PATIENCE = 64;               // rounds in which polls time out and nothing changes: deadlock

// A step achieved something unless the warp only polled.
bool Cluster::turn(Warp& w, u64 quantum) {
    if (!w.live) return false;
    const u64 before = events, start = w.ninstructions;
    const bool watched = w.idle >= LONG_QUANTUM;
    const u64 polled = watched ? polls() : 0;
    w.yielded = false;
    w.polled = -1;
    const bool diverged = w.groups.size() > 1;
    if (!step(w, diverged ? std::min(quantum, DIVERGED_QUANTUM) : quantum)) return false;
    if (events != before) {
        w.idle = w.vain = 0;
        w.spinning = w.stuck = w.polls = false;
        return true;
    }
    if (watched && polls() != polled) w.polls = true;
    const u64 quanta = w.idle / LONG_QUANTUM;
    if (!w.yielded) w.idle += w.ninstructions - start;
    w.spinning = w.idle >= LONG_QUANTUM;
    if (w.idle / LONG_QUANTUM != quanta) w.stuck = seen_before(w);
    if (w.yielded || w.spinning || (diverged && w.idle >= DIVERGED_QUANTUM)) ++w.vain;
    return !w.yielded && !w.spinning;
}

// A strong load or an atomic may be there to wait for others; plain ones are a computation, however long it takes.
void Cluster::find_polling() {
    for (i32 i = 0; i < program.nrecords; ++i) {
        const Record& r = program.records[i];
        const std::string& name = handler_names()[r.handler];
        const bool loads = name.rfind("ld.", 0) == 0 && name != "ld.param" && name != "ld.extend";
        if (name.rfind("atom.", 0) == 0 || (loads && r.i1 & STRONG)) polling.push_back(i);
    }
}

u64 Cluster::polls() const {
    u64 sum = 0;
    for (const i32 i : polling) sum += counts[i];
    return sum;
}

void Cluster::check_time() const {
    if (std::chrono::steady_clock::now() < deadline) return;
    throw Fault{"too large", format("the launch takes longer than the limit of %g s: ", options.time_limit) + waiting(), 0, ""};
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
            if (w.live && w.spinning && !w.stuck && !(w.polls && w.idle >= HOPELESS)) return false;
    return true;
}

bool Cluster::round_robin() {
    for (;;) {
        bool progress = false;
        check_time();
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
            check_time();
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
                } else if (w.spinning && w.polls) {
                    text += " polls memory";
                } else if (w.stuck) {
                    text += " repeats a loop that changes nothing";
                } else if (w.live & ~g.mask) {
                    text += format(" waits for the lanes 0x%08x of its warp", w.live & ~g.mask);
                }
            }
        }
    return text;
}

}  // namespace emu
