// Execution of one warp: divergence, branches, registers that nothing has written.
#include <algorithm>
#include "core.h"
#include "sanitizer.h"
#include "trace.h"

namespace emu {

// Values that depend on registers nothing wrote, or on a tcgen05.ld still in flight. The first travel through arithmetic and are
// reported where an instruction acts on them; the second may only be moved.
inline void Cluster::check_registers(Warp& w, const Record& r, u32 mask) {
    const i32* const registers = program.pool + r.sources;     // its targets follow
    u32 any = 0;
    for (i32 i = 0; i < r.nsources + r.ntargets; ++i) any |= w.suspicions[registers[i]].undefined | w.suspicions[registers[i]].in_flight;
    if (any & mask) check_suspicious(w, r, mask);              // mostly everything is defined
}

void Cluster::check_suspicious(Warp& w, const Record& r, u32 mask) {
    enum { COMPUTES, COPIES, DECIDES, STORES, PAIRS };
    const i32 *sources = program.pool + r.sources, *targets = program.pool + r.targets;
    u32 undefined = 0, in_flight = 0;
    for (i32 i = 0; i < r.nsources; ++i) {
        undefined |= w.suspicions[sources[i]].undefined;
        in_flight |= w.suspicions[sources[i]].in_flight;
    }
    if (r.use == COPIES && r.nsources > r.ntargets) {          // a pack is used by halves: it is defined if one of them is
        undefined = ALL_LANES;
        for (i32 i = 0; i < r.nsources; ++i) undefined &= w.suspicions[sources[i]].undefined;
    }
    undefined &= mask;
    in_flight &= mask;
    auto mark = [&](i32 t, Suspicion s) {
        Suspicion& known = w.suspicions[t];
        known.undefined = (known.undefined & ~mask) | (s.undefined & mask);
        if (t < 0) return;
        known.in_flight = (known.in_flight & ~mask) | (s.in_flight & mask);
        if (s.in_flight & mask) w.tmem_load_slots.push_back(t);
    };
    if (r.use == COPIES && r.nsources == r.ntargets && r.ntargets <= 2 && (undefined | in_flight)) {       // word for word
        Suspicion before[2];
        for (i32 i = 0; i < r.nsources; ++i) before[i] = w.suspicions[sources[i]];
        for (i32 i = 0; i < r.ntargets; ++i) mark(targets[i], before[i]);
        return;
    }
    if (r.use == STORES) undefined = r.a < 0 ? 0 : w.suspicions[r.a].undefined & mask;
    if ((r.use == DECIDES || r.use == STORES) && undefined) {
        find("undefined value", &w, r.line, format("lane %d uses a value that depends on a register nothing has written", first_lane(undefined)));
        undefined = 0;
    }
    if (r.use != COPIES && in_flight && options.implicit_waits) {        // ptxas waits for the load where its result is used
        sanitizer->await(w, w.live, Engine::tmem_load, 0);
        for (i32 s = 0; s < program.nslots; ++s) w.suspicions[s].in_flight = 0;
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
        for (i32 i = 0; i < r.nsources; ++i) halves[i % 2] |= w.suspicions[sources[i]].undefined & mask;
    }
    for (i32 i = 0; i < r.ntargets; ++i) mark(targets[i], {halves[i % 2], in_flight});
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
            if (w.suspicions && w.suspicions[~r.guard].undefined & active)
                find("undefined value", &w, r.line, "the predicate of the instruction depends on a register nothing has written");
            mask &= r.guard_negated ? ~w.preds[r.guard] : w.preds[r.guard];
            if (!mask) {
                if (recorder) recorder->passed(w, pc);
                ++pc; ++ran;
                continue;
            }
        }
        if (r.handler == 0) {                                           // bra
            ++counts[pc]; ++ran;
            if (recorder) recorder->passed(w, pc);
            if (mask == active) { pc = (i32)r.i0; continue; }
            w.groups[index] = {pc + 1, active & ~mask};
            w.groups.push_back({(i32)r.i0, mask});
            return ran;
        }
        if (r.handler == 1) {                                           // exit, ret of the kernel
            ++counts[pc]; ++ran; ++events;
            if (recorder) recorder->passed(w, pc);
            w.live &= ~mask;
            if (mask == active) w.groups.erase(w.groups.begin() + index);
            else w.groups[index] = {pc + 1, active & ~mask};
            if (!w.live && sanitizer) sanitizer->exit_warp(w);
            return ran;
        }
        if (r.handler == 2) {                                           // brx.idx: one group per target
            if (w.suspicions) check_registers(w, r, mask);
            ++counts[pc]; ++ran;
            if (recorder) recorder->passed(w, pc);
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
        if (w.suspicions) check_registers(w, r, mask);
        if (recorder) recorder->before(w, r, pc, mask);
        if (handlers[pc](w, r, mask) == Flow::block) break;
        if (recorder) recorder->after(w, pc);
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

}  // namespace emu
