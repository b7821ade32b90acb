// ld and st of every state space, moves between spaces (cvta, mapa), parameters.
#include "addresses.h"

namespace emu {

// ---- 32 lanes between memory and registers ----------------------------------------------------------------------------

// Lane by lane the elements of one lane lie side by side in memory, and the lanes of one register side by side here.
using Four = u32 __attribute__((vector_size(16)));

static inline Four four(const void* at) {
    Four v;
    std::memcpy(&v, at, sizeof v);
    return v;
}

// The 4 x 4 words behind `from` (one pointer per row), transposed, go to the pointers `to`.
template <class From, class To> static inline void transpose(const From* const* from, To* const* to) {
    const Four a = four(from[0]), b = four(from[1]), c = four(from[2]), d = four(from[3]);
    const Four ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), AB = __builtin_shufflevector(a, b, 2, 6, 3, 7);
    const Four cd = __builtin_shufflevector(c, d, 0, 4, 1, 5), CD = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    const Four rows[4] = {__builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
                          __builtin_shufflevector(AB, CD, 0, 1, 4, 5), __builtin_shufflevector(AB, CD, 2, 3, 6, 7)};
    for (int k = 0; k < 4; ++k) std::memcpy(to[k], &rows[k], 16);
}

template <int SIZE> using Item = std::conditional_t<SIZE == 1, u8, std::conditional_t<SIZE == 2, u16, u32>>;

template <int SIZE, int N> static void read_lanes(const Pointers& from, u32 mask, u32* const (&to)[N]) {
    if (N == 1 && from.dense) {
        const u8* base = from.at[0];
        for (int lane = 0; lane < LANES; ++lane) {
            Item<SIZE> item;
            std::memcpy(&item, base + SIZE * lane, SIZE);
            to[0][lane] = item;
        }
    } else if (SIZE * N == 8 && mask == ALL_LANES) {
        u64 rows[LANES];
        for (int lane = 0; lane < LANES; ++lane) std::memcpy(rows + lane, from.at[lane], 8);
        for (int k = 0; k < N; ++k)
            for (int lane = 0; lane < LANES; ++lane) to[k][lane] = (Item<SIZE>)(rows[lane] >> 8 * SIZE * k);
    } else if (SIZE == 4 && N % 4 == 0 && mask == ALL_LANES) {
        for (int k = 0; k < N; k += 4)
            for (int lane = 0; lane < LANES; lane += 4) {
                const u8* rows[4];
                u32* columns[4];
                for (int j = 0; j < 4; ++j) rows[j] = from.at[lane + j] + 4 * k, columns[j] = to[k + j] + lane;
                transpose(rows, columns);
            }
    } else
        each_lane(mask, [&](int lane) {
            Item<SIZE> items[N];
            std::memcpy(items, from.at[lane], sizeof items);
            for (int k = 0; k < N; ++k) to[k][lane] = items[k];
        });
}

// In ascending order: where lanes overlap the highest one wins.
template <int SIZE, int N> static void write_lanes(const Pointers& to, u32 mask, const u32* const (&from)[N]) {
    if (N == 1 && to.dense) {
        u8* base = to.at[0];
        for (int lane = 0; lane < LANES; ++lane) {
            const Item<SIZE> item = (Item<SIZE>)from[0][lane];
            std::memcpy(base + SIZE * lane, &item, SIZE);
        }
    } else if (SIZE == 4 && N % 4 == 0 && mask == ALL_LANES) {
        for (int lane = 0; lane < LANES; lane += 4)
            for (int k = 0; k < N; k += 4) {
                const u32* columns[4];
                u8* rows[4];
                for (int j = 0; j < 4; ++j) rows[j] = to.at[lane + j] + 4 * k, columns[j] = from[k + j] + lane;
                transpose(columns, rows);
            }
    } else
        for (u32 m = mask; m; m &= m - 1) {
            const int lane = first_lane(m);
            Item<SIZE> items[N];
            for (int k = 0; k < N; ++k) items[k] = (Item<SIZE>)from[k][lane];
            std::memcpy(to.at[lane], items, sizeof items);
        }
}

// ---- ld and st --------------------------------------------------------------------------------------------------------

// a: address (two slots unless the space is shared or local), i0: offset, i1: flags; pool: the slot of each element.
// SIZE is 1, 2 or 4: a 64-bit element is two elements of 4 bytes, in two slots.
template <Space S, int SIZE, int N> static Flow load(Warp& w, const Record& r, u32 mask) {
    Cluster& cluster = *w.cta->cluster;
    Pointers from;
    find_lanes<S>(w, {r.a, r.i0}, mask, SIZE * N, from, r.line);
    if (Sanitizer* s = cluster.sanitizer; s && S != Space::local) {
        report<S>(*s, w, r, mask, from.dense, SIZE * N, r.i1 & STRONG ? Access::strong_read : Access::read);
        if (r.i1 & ORDERED) order<S>(*s, w, r, mask, true);
    }
    u32* to[N];
    for (int k = 0; k < N; ++k) to[k] = w.reg(cluster.program.pool[r.pool + k]);
    read_lanes<SIZE, N>(from, mask, to);
    if (r.i1 & ORDERED) __atomic_thread_fence(__ATOMIC_ACQUIRE);        // another cluster may run on another host thread
    return Flow::next;
}

template <Space S, int SIZE, int N> static Flow store(Warp& w, const Record& r, u32 mask) {
    Cluster& cluster = *w.cta->cluster;
    Pointers to;
    find_lanes<S>(w, {r.a, r.i0}, mask, SIZE * N, to, r.line);
    if (Sanitizer* s = cluster.sanitizer; s && S != Space::local) {
        if (r.i1 & ORDERED) order<S>(*s, w, r, mask, false);
        report<S>(*s, w, r, mask, to.dense, SIZE * N, r.i1 & STRONG ? Access::strong_write : Access::write);
    }
    if (r.i1 & ORDERED) __atomic_thread_fence(__ATOMIC_RELEASE);
    const u32* from[N];
    for (int k = 0; k < N; ++k) from[k] = w.reg(cluster.program.pool[r.pool + k]);
    write_lanes<SIZE, N>(to, mask, from);
    if (S != Space::local) ++cluster.events;
    return Flow::next;
}

template <Space S, int SIZE, int N> static void add(const std::string& space) {
    const std::string shape = "." + space + "." + std::to_string(SIZE) + "x" + std::to_string(N);
    Registration(("ld" + shape).c_str(), load<S, SIZE, N>);
    Registration(("st" + shape).c_str(), store<S, SIZE, N>);
}

template <Space S> static bool add_space(const std::string& space) {
    add<S, 1, 1>(space), add<S, 1, 2>(space), add<S, 1, 4>(space);
    add<S, 2, 1>(space), add<S, 2, 2>(space), add<S, 2, 4>(space);
    add<S, 4, 1>(space), add<S, 4, 2>(space), add<S, 4, 4>(space), add<S, 4, 8>(space);
    return true;
}

[[maybe_unused]] static const bool spaces[] = {add_space<Space::generic>("generic"), add_space<Space::shared>("shared"),
                                               add_space<Space::cluster>("cluster"), add_space<Space::global>("global"),
                                               add_space<Space::local>("local")};

// The kernel's own parameters: i0: offset in the block (the decoder checked it), i1: bytes per element, e: elements; pool: their slots.
HANDLER(ld_param, "ld.param") {
    const Cluster& cluster = *w.cta->cluster;
    for (i32 k = 0; k < r.e; ++k) {
        u32 value = 0;
        std::memcpy(&value, cluster.launch.params + r.i0 + k * r.i1, r.i1);
        u32* to = w.reg(cluster.program.pool[r.pool + k]);
        each_lane(mask, [&](int lane) { to[lane] = value; });
    }
    return Flow::next;
}

// Parameters of a call are slots: e pairs (to, from) in the pool.
HANDLER(param_move, "param.move") {
    const i32* pairs = w.cta->cluster->program.pool + r.pool;
    for (i32 k = 0; k < r.e; ++k) {
        u32* to = w.reg(pairs[2 * k]);
        const u32* from = w.reg(pairs[2 * k + 1]);
        each_lane(mask, [&](int lane) { to[lane] = from[lane]; });
    }
    return Flow::next;
}

// After a load into a register wider than its type: d: register, i0: bits that were loaded, i1: bytes of the register, a: 1: signed.
HANDLER(extend, "ld.extend") {
    const int shift = 32 - (int)r.i0;
    u32 *low = w.reg(r.d), *high = r.i1 == 8 ? low + LANES : nullptr;
    const u32 kept = r.i1 < 4 ? (1u << 8 * r.i1) - 1 : ALL_LANES;
    if (r.a)
        each_lane(mask, [&](int lane) {
            const i32 value = (i32)(low[lane] << shift) >> shift;
            low[lane] = (u32)value & kept;
            if (high) high[lane] = (u32)(value >> 31);
        });
    else
        each_lane(mask, [&](int lane) {
            low[lane] = low[lane] << shift >> shift;
            if (high) high[lane] = 0;
        });
    return Flow::next;
}

// ---- addresses of one space as addresses of another -------------------------------------------------------------------

// d, a: 64 bits; i0: the window's start, added (cvta) or subtracted (cvta.to: as a negative number).
HANDLER(cvta, "cvta") {
    const u32 *low = w.reg(r.a), *high = low + LANES;
    u32 *to_low = w.reg(r.d), *to_high = to_low + LANES;
    each_lane(mask, [&](int lane) {
        const u64 address = (low[lane] | (u64)high[lane] << 32) + (u64)r.i0;
        to_low[lane] = (u32)address;
        to_high[lane] = (u32)(address >> 32);
    });
    return Flow::next;
}

// d: predicate, a: generic address, i0: Space.
HANDLER(isspacep, "isspacep") {
    u32 bits = 0;
    for (u32 m = mask; m; m &= m - 1) {
        const u64 address = w.wide(r.a, first_lane(m));
        const bool shared = is_shared(address);
        bool inside = false;
        switch ((Space)r.i0) {
            case Space::shared: inside = shared && (u32)(address - SHARED_WINDOW) >> RANK_SHIFT == (u32)w.cta->rank; break;
            case Space::cluster: inside = shared; break;
            case Space::local: inside = is_local(address); break;
            default: inside = !shared && !is_local(address);
        }
        if (inside) bits |= m & -m;
    }
    w.set_pred(r.d, mask, bits);
    return Flow::next;
}

static u32 rank_operand(Warp& w, const Record& r, int lane) {
    const u32 rank = w.reg(r.b, lane), size = (u32)w.cta->cluster->ctas.size();
    if (rank >= size) fault("shared address", w, r.line, format("lane %d maps an address to CTA rank %u of a cluster of %u", lane, rank, size));
    return rank;
}

// d: the address that a has in the CTA of rank b. i0: 1: generic, i1: bytes of address and result.
HANDLER(mapa, "mapa") {
    for (u32 m = mask; m; m &= m - 1) {
        const int lane = first_lane(m);
        u64 address = r.i1 == 8 ? w.wide(r.a, lane) : w.reg(r.a, lane);
        if (r.i0 && !is_shared(address))
            fault("shared address", w, r.line, format("0x%llx is not a generic address of shared memory", (unsigned long long)host_address(address)));
        address = (address & ~(u64)(ALL_LANES & ~OFFSET_MASK)) | (u64)rank_operand(w, r, lane) << RANK_SHIFT;
        if (r.i1 == 8) w.set_wide(r.d, lane, address);
        else w.reg(r.d, lane) = (u32)address;
    }
    return Flow::next;
}

// d: rank of the CTA that address a belongs to; the lower 32 bits of a generic address hold it as well.
HANDLER(getctarank, "getctarank") {
    const u32* address = w.reg(r.a);
    u32* to = w.reg(r.d);
    each_lane(mask, [&](int lane) { to[lane] = address[lane] >> RANK_SHIFT; });
    return Flow::next;
}

// d: a cache policy: i0, a value that only cache hints read.
HANDLER(createpolicy, "createpolicy") {
    for (u32 m = mask; m; m &= m - 1) w.set_wide(r.d, first_lane(m), (u64)r.i0);
    return Flow::next;
}

}  // namespace emu
