// Lanes of one warp talk to each other: shfl, vote, match, redux, elect, activemask, bar.warp.sync.
//
// e: slot of the member mask, -1: all lanes.
#include <algorithm>
#include "core.h"
#include "numbers.h"
#include "sanitizer.h"

namespace emu {

// False: a member that lives is not here yet. Lanes may name different sets if those do not overlap.
static bool members_are_here(Warp& w, const Record& r, i32 slot, u32 mask) {
    if (slot < 0) return w.converged(mask);
    const u32* members = w.reg(slot);
    for (u32 m = mask; m; m &= m - 1) {
        const int lane = first_lane(m);
        if (!(members[lane] >> lane & 1))
            fault("member mask", w, r.line, format("lane %d is not in its own member mask 0x%x", lane, members[lane]));
        if (!w.converged(mask, members[lane])) return false;
    }
    return true;
}

// Calls f(lanes) for each set of lanes that names the same members; the exited ones are left out. What is not here blocks.
template <class F> static Flow each_set(Warp& w, const Record& r, i32 slot, u32 mask, F f) {
    u32 all = ALL_LANES;
    if (const u32* members = slot < 0 ? nullptr : w.reg(slot))
        for (int lane = 0; lane < LANES; ++lane) all &= members[lane];
    if (mask != ALL_LANES || all != ALL_LANES) {
        if (!members_are_here(w, r, slot, mask)) return Flow::block;
    }
    if (all == ALL_LANES) {
        f(mask);
        return Flow::next;
    }
    const u32* members = w.reg(slot);
    for (u32 left = mask; left;) {
        const int first = first_lane(left);
        const u32 lanes = members[first] & mask;
        for (u32 m = lanes; m; m &= m - 1)
            if (members[first_lane(m)] != members[first])
                fault("member mask", w, r.line, format("lanes %d and %d wait for each other with the member masks 0x%x and 0x%x", first, first_lane(m),
                                                       members[first], members[first_lane(m)]));
        left &= ~lanes;
        f(lanes);
    }
    return Flow::next;
}

// ---- shfl ------------------------------------------------------------------------------------------------------------

enum class Shuffle { up, down, bfly, idx };

// d: result, i0: predicate; a: value, b: lane operand, c: segment mask << 8 | clamp. PTX ISA, shfl.sync, pseudocode.
template <Shuffle mode> static Flow shfl(Warp& w, const Record& r, u32 mask) {
    const u32 *from = w.reg(r.a), *b = w.reg(r.b), *c = w.reg(r.c);
    u32 values[LANES], sources[LANES], inside[LANES];
    for (u32 lane = 0; lane < LANES; ++lane) {
        const u32 by = b[lane] & 31, clamp = c[lane] & 31, segment = c[lane] >> 8 & 31;
        const u32 last = (lane & segment) | (clamp & ~segment), first = lane & segment;
        u32 source;
        if (mode == Shuffle::up) source = lane - by;
        if (mode == Shuffle::down) source = lane + by;
        if (mode == Shuffle::bfly) source = lane ^ by;
        if (mode == Shuffle::idx) source = first | (by & ~segment);
        inside[lane] = mode == Shuffle::up ? (i32)source >= (i32)last : (i32)source <= (i32)last;
        sources[lane] = (inside[lane] ? source : lane) & 31;
        values[lane] = from[lane];
    }
    u32 undefined = 0;
    const Flow flow = each_set(w, r, r.e, mask, [&](u32 lanes) {
        u32* to = w.reg(r.d);
        if (lanes == ALL_LANES) {
            for (int lane = 0; lane < LANES; ++lane) to[lane] = values[sources[lane]];
            return;
        }
        for (u32 m = lanes; m; m &= m - 1) {
            const int lane = first_lane(m);
            if (!(lanes >> sources[lane] & 1)) undefined |= m & -m;
            to[lane] = lanes >> sources[lane] & 1 ? values[sources[lane]] : ALL_LANES;
        }
    });
    if (flow == Flow::block) return flow;
    if (undefined) {
        const int lane = first_lane(undefined);
        w.cta->cluster->find("undefined shuffle", &w, r.line, format("lane %d reads the register of lane %u, which does not take part", lane, sources[lane]));
    }
    if (r.i0 >= 0) {
        u32 bits = 0;
        for (int lane = 0; lane < LANES; ++lane) bits |= inside[lane] << lane;
        w.set_pred((i32)r.i0, mask, bits);
    }
    return flow;
}

HANDLER(shfl_up, "shfl.up") { return shfl<Shuffle::up>(w, r, mask); }
HANDLER(shfl_down, "shfl.down") { return shfl<Shuffle::down>(w, r, mask); }
HANDLER(shfl_bfly, "shfl.bfly") { return shfl<Shuffle::bfly>(w, r, mask); }
HANDLER(shfl_idx, "shfl.idx") { return shfl<Shuffle::idx>(w, r, mask); }

// ---- votes -----------------------------------------------------------------------------------------------------------

// d: predicate; a: predicate, i0: 1: negated; i1: 0 all, 1 any, 2 uni.
HANDLER(vote, "vote") {
    const u32 bits = w.preds[r.a] ^ (r.i0 ? ALL_LANES : 0);
    return each_set(w, r, r.e, mask, [&](u32 lanes) {
        const bool all = (bits & lanes) == lanes, any = bits & lanes;
        const bool result = r.i1 == 0 ? all : r.i1 == 1 ? any : all || !any;
        w.set_pred(r.d, lanes, result ? ALL_LANES : 0);
    });
}

static void broadcast(Warp& w, i32 slot, u32 lanes, u32 value) {
    u32* to = w.reg(slot);
    each_lane(lanes, [&](int lane) { to[lane] = value; });
}

// d: register; a: predicate, i0: 1: negated.
HANDLER(ballot, "vote.ballot") {
    const u32 bits = w.preds[r.a] ^ (r.i0 ? ALL_LANES : 0);
    return each_set(w, r, r.e, mask, [&](u32 lanes) { broadcast(w, r.d, lanes, bits & lanes); });
}

// d: lanes with the same value; a: value, i1: its words.
HANDLER(match_any, "match.any") {
    u64 values[LANES];
    for (int lane = 0; lane < LANES; ++lane) values[lane] = r.i1 == 2 ? w.wide(r.a, lane) : w.reg(r.a, lane);
    return each_set(w, r, r.e, mask, [&](u32 lanes) {
        for (u32 left = lanes; left;) {
            u32 same = 0;
            for (u32 m = left; m; m &= m - 1) same |= values[first_lane(m)] == values[first_lane(left)] ? m & -m : 0;
            broadcast(w, r.d, same, same);
            left &= ~same;
        }
    });
}

// d: all lanes, or 0 when their values differ; i0: predicate; a: value, i1: its words.
HANDLER(match_all, "match.all") {
    u64 values[LANES];
    for (int lane = 0; lane < LANES; ++lane) values[lane] = r.i1 == 2 ? w.wide(r.a, lane) : w.reg(r.a, lane);
    return each_set(w, r, r.e, mask, [&](u32 lanes) {
        bool same = true;
        for (u32 m = lanes; m; m &= m - 1) same &= values[first_lane(m)] == values[first_lane(lanes)];
        broadcast(w, r.d, lanes, same ? lanes : 0);
        w.set_pred((i32)r.i0, lanes, same ? ALL_LANES : 0);
    });
}

// d: register, i0: predicate. The lowest lane leads; which one does is the device's choice.
HANDLER(elect, "elect") {
    return each_set(w, r, r.e, mask, [&](u32 lanes) {
        broadcast(w, r.d, lanes, (u32)first_lane(lanes));
        w.set_pred((i32)r.i0, lanes, lanes & -lanes);
    });
}

HANDLER(activemask, "activemask") {
    broadcast(w, r.d, mask, mask);
    return Flow::next;
}

// bar.warp.sync; a: slot of the member mask.
HANDLER(warp_sync, "warp.sync") {
    return each_set(w, r, r.a, mask, [&](u32 lanes) { IF_CHECKED(w, warp_sync(w, lanes)); });
}

// ---- redux -----------------------------------------------------------------------------------------------------------

// d: result in every lane; a: value.
template <class F> static Flow reduce(Warp& w, const Record& r, u32 mask, F f) {
    return each_set(w, r, r.e, mask, [&](u32 lanes) {
        const u32* from = w.reg(r.a);
        u32 result = from[first_lane(lanes)];
        for (u32 m = lanes & (lanes - 1); m; m &= m - 1) result = f(result, from[first_lane(m)]);
        broadcast(w, r.d, lanes, result);
    });
}

HANDLER(redux_add, "redux.add") { return reduce(w, r, mask, [](u32 x, u32 y) { return x + y; }); }
HANDLER(redux_and, "redux.and") { return reduce(w, r, mask, [](u32 x, u32 y) { return x & y; }); }
HANDLER(redux_or, "redux.or") { return reduce(w, r, mask, [](u32 x, u32 y) { return x | y; }); }
HANDLER(redux_xor, "redux.xor") { return reduce(w, r, mask, [](u32 x, u32 y) { return x ^ y; }); }
HANDLER(redux_min_u, "redux.min.u32") { return reduce(w, r, mask, [](u32 x, u32 y) { return std::min(x, y); }); }
HANDLER(redux_max_u, "redux.max.u32") { return reduce(w, r, mask, [](u32 x, u32 y) { return std::max(x, y); }); }
HANDLER(redux_min_s, "redux.min.s32") { return reduce(w, r, mask, [](u32 x, u32 y) { return (u32)std::min((i32)x, (i32)y); }); }
HANDLER(redux_max_s, "redux.max.s32") { return reduce(w, r, mask, [](u32 x, u32 y) { return (u32)std::max((i32)x, (i32)y); }); }

// i0: 1: of absolute values, i1: 1: a NaN wins, else numbers win. -0 is less than +0.
template <bool max> static Flow reduce_float(Warp& w, const Record& r, u32 mask) {
    return each_set(w, r, r.e, mask, [&](u32 lanes) {
        const u32* from = w.reg(r.a);
        bool found = false, poisoned = false;
        i32 best = 0;
        for (u32 m = lanes; m; m &= m - 1) {
            u32 bits = from[first_lane(m)];
            if (r.i0) bits &= 0x7fffffffu;
            if ((bits & 0x7fffffffu) > 0x7f800000u) {
                poisoned |= r.i1;
                continue;
            }
            const i32 key = (i32)(bits ^ ((u32)((i32)bits >> 31) >> 1));        // orders like the floats, -0 before +0
            best = !found ? key : max ? std::max(best, key) : std::min(best, key);
            found = true;
        }
        const u32 bits = (u32)best ^ ((u32)(best >> 31) >> 1);
        broadcast(w, r.d, lanes, found && !poisoned ? bits : NAN_F32);
    });
}

HANDLER(redux_min_f, "redux.min.f32") { return reduce_float<false>(w, r, mask); }
HANDLER(redux_max_f, "redux.max.f32") { return reduce_float<true>(w, r, mask); }

}  // namespace emu
