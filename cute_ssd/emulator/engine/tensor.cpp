// tcgen05: allocation, tcgen05.ld and st, waits, commit, cp, shift. The product is in tensor_mma.cpp.
// PTX ISA, "TensorCore 5th Generation Family Instructions". A tensor memory address is lane << 16 | column.
#include <algorithm>
#include "tensor.h"

namespace emu {

// ---- checks ----------------------------------------------------------------------------------------------------------

CtaGroup cta_group(Warp& w, const Record& r, int size) {
    Cta& cta = *w.cta;
    if (size == 1) return {{&cta, nullptr}, 1};
    const auto& ctas = cta.cluster->ctas;
    if ((cta.rank | 1) >= (int)ctas.size())
        fault("cta_group", w, r.line, format("cta_group::2 needs a pair of CTAs; CTA rank %d of a cluster of %zu has no peer", cta.rank, ctas.size()));
    return {{ctas[cta.rank & ~1].get(), ctas[cta.rank | 1].get()}, 2};
}

static void check_group(Warp& w, const Record& r, const Allocation& a, int group_size) {
    const int allocated = a.paired ? 2 : 1;
    if (allocated != group_size)
        w.cta->cluster->find("cta_group", &w, r.line, format("cta_group::%d on tensor memory that an alloc of cta_group::%d gave; a kernel must not mix them", group_size, allocated));
}

void check_tmem(Warp& w, const Record& r, const Cta& cta, u32 column, u32 n, int group_size, const char* what) {
    if (column + n > (u32)TMEM_COLUMNS)
        fault("tensor memory", w, r.line, format("%s reaches columns %u..%u of tensor memory; it has %d", what, column, column + n - 1, TMEM_COLUMNS));
    for (u32 at = column; at < column + n;) {
        const Allocation* found = nullptr;
        for (const Allocation& a : cta.allocations)
            if ((int)at >= a.column && (int)at < a.column + a.columns) found = &a;
        if (!found)
            fault("tensor memory", w, r.line, format("%s uses columns %u..%u of CTA rank %d; column %u is not allocated", what, column, column + n - 1, cta.rank, at));
        if (group_size) check_group(w, r, *found, group_size);
        if (found->half_freed && cta.cluster->sanitizer)
            cta.cluster->find("race", &w, r.line, format("%s uses columns of CTA rank %d that the tcgen05.dealloc of its peer has freed: the peer must wait before", what, cta.rank));
        at = found->column + found->columns;
    }
}

int issuing_lane(Warp& w, const Record& r, u32 mask, const char* what) {
    if (mask & (mask - 1))
        w.cta->cluster->find("single thread", &w, r.line, format("several lanes (mask 0x%08x) issue %s, an instruction of a single thread", mask, what));
    return first_lane(mask);
}

static u32 shared_address(Warp& w, const Record& r, int lane) {           // a: slot, b: 1 for a generic address, i0: offset
    return (u32)((r.b ? w.wide(r.a, lane) - SHARED_WINDOW : w.reg(r.a, lane)) + r.i0);
}

// ---- alloc, dealloc --------------------------------------------------------------------------------------------------

// First fit, in units of 32 columns; -1: nothing is free.
static int free_column(const CtaGroup& group, int n) {
    for (int column = 0; column + n <= TMEM_COLUMNS; column += 32) {
        bool taken = false;
        for (int i = 0; i < group.size; ++i)
            for (const Allocation& a : group.cta[i]->allocations)
                taken |= column < a.column + a.columns && a.column < column + n;
        if (!taken) return column;
    }
    return -1;
}

// a, b, i0: where the address goes; c: columns; e: cta_group.
HANDLER(alloc, "tcgen05.alloc") {
    if (!w.converged(mask)) return Flow::block;
    Cta& cta = *w.cta;
    Cluster& cluster = *cta.cluster;
    const int lane = first_lane(mask), n = (int)w.reg(r.c, lane);
    if (n < 32 || n > TMEM_COLUMNS || (n & (n - 1)))
        fault("tensor memory", w, r.line, format("tcgen05.alloc of %d columns; it must be a power of two from 32 to 512", n));
    const u32 address = shared_address(w, r, lane);
    u8* result = cluster.shared_bytes(address, 4, 4, w, r.line);
    const CtaGroup group = cta_group(w, r, r.e);
    if (!cta.alloc_permit) cluster.find("tensor memory", &w, r.line, "tcgen05.alloc after tcgen05.relinquish_alloc_permit");
    const auto reserved = std::find_if(cta.allocations.begin(), cta.allocations.end(), [](const Allocation& a) { return a.reserved; });
    int column;
    if (group.paired() && reserved != cta.allocations.end()) {            // see Note [Pairs]
        if (reserved->columns != n)
            fault("tensor memory", w, r.line, format("tcgen05.alloc of %d columns; the other CTA of the pair allocates %d", n, reserved->columns));
        reserved->reserved = false;
        column = reserved->column;
    } else {
        column = free_column(group, n);
        if (column < 0) return Flow::block;
        for (int i = 0; i < group.size; ++i) {
            group.cta[i]->allocations.push_back({column, n, group.paired(), group.cta[i] != &cta});
            IF_CHECKED(w, allocate_tmem(*group.cta[i], column, n));
        }
    }
    IF_CHECKED(w, shared(w, r, lane, address, 4, Access::write));
    std::memcpy(result, &column, 4);
    ++cluster.events;
    return Flow::next;
}

HANDLER(dealloc, "tcgen05.dealloc") {                                    // a: address, c: columns, e: cta_group
    if (!w.converged(mask)) return Flow::block;
    auto& allocations = w.cta->allocations;
    const u32 address = w.reg(r.a, first_lane(mask)), n = w.reg(r.c, first_lane(mask));
    const auto found = std::find_if(allocations.begin(), allocations.end(), [&](const Allocation& a) {
        return a.column == (int)address && a.columns == (int)n && !a.reserved;
    });
    if (found == allocations.end())
        fault("tensor memory", w, r.line, format("tcgen05.dealloc of %u columns at 0x%x matches no allocation", n, address));
    check_group(w, r, *found, r.e);
    IF_CHECKED(w, free_tmem(w, r, *w.cta, (int)address, (int)n));
    if (found->paired) {                                                 // see Note [Pairs]
        Cta& peer = *cta_group(w, r, 2).cta[~w.cta->rank & 1];
        for (Allocation& a : peer.allocations)
            if (a.column == found->column) {
                a.half_freed = true;
                IF_CHECKED(w, free_tmem(w, r, peer, (int)address, (int)n));
            }
    }
    allocations.erase(found);
    ++w.cta->cluster->events;
    return Flow::next;
}

HANDLER(relinquish, "tcgen05.relinquish_alloc_permit") {
    if (!w.converged(mask)) return Flow::block;
    w.cta->alloc_permit = false;
    return Flow::next;
}

// ---- ld, st ----------------------------------------------------------------------------------------------------------

void transpose16(const u32* const in[16], u32* const out[16]) {
    using V = u32 __attribute__((vector_size(64)));
    V v[16];
    for (int i = 0; i < 16; ++i) std::memcpy(&v[i], in[i], 64);
#define EXCHANGE(s, ...)                                                                                  \
    for (int i = 0; i < 16; ++i)                                                                          \
        if (!(i & s)) {                                                                                   \
            const V x = v[i], y = v[i + s];                                                               \
            v[i] = __builtin_shufflevector(x, y, __VA_ARGS__);                                            \
            v[i + s] = __builtin_shufflevector(x, y, SECOND##s);                                          \
        }
#define SECOND8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define SECOND4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define SECOND2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define SECOND1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
    EXCHANGE(8, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
    EXCHANGE(4, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
    EXCHANGE(2, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
    EXCHANGE(1, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
    for (int i = 0; i < 16; ++i) std::memcpy(out[i], &v[i], 64);
}

enum Shape : int { S32x32b, S16x64b, S16x128b, S16x256b, S16x32bx2 };

constexpr int lanes_of(Shape s) { return s == S32x32b ? 32 : 16; }
constexpr int registers_of(Shape s) { return s == S16x128b ? 2 : s == S16x256b ? 4 : 1; }           // per repetition
constexpr int columns_of(Shape s) { return s == S16x64b ? 2 : s == S16x128b ? 4 : s == S16x256b ? 8 : 1; }

using Words8 = u32 __attribute__((vector_size(32)));

// One tcgen05.ld or st: the window of tensor memory, and registers in `base`, 32 words per slot.
struct Window {
    u32 (*tmem)[TMEM_COLUMNS];             // its first lane
    int column, half;                      // half: where the second half of 16x32bx2 begins
    const i32* slots;
    int n;                                 // registers
};

// Lane and column of register i of thread t.
template <Shape s> static inline void place(int i, int t, int half, int& lane, int& column) {
    if (s == S32x32b) lane = t, column = i;
    if (s == S16x64b) lane = (t >> 2) + 8 * (t & 1), column = (t >> 1 & 1) + 2 * i;
    if (s == S16x128b) lane = (t >> 2) + 8 * (i & 1), column = (t & 3) + 4 * (i >> 1);
    if (s == S16x256b) lane = (t >> 2) + 8 * (i >> 1 & 1), column = 2 * (t & 3) + (i & 1) + 8 * (i >> 2);
    if (s == S16x32bx2) lane = t & 15, column = (t >> 4) * half + i;
}

// packed: a register holds the low halves of two adjacent columns.
template <Shape s, bool packed> static void load(const Window& from, u32* base) {
    u32(*tmem)[TMEM_COLUMNS] = from.tmem;
    int i = 0;
    if (!packed && s == S32x32b) {
        for (; i + 16 <= from.n; i += 16)
            for (int t = 0; t < LANES; t += 16) {
                const u32* rows[16];
                u32* columns[16];
                for (int k = 0; k < 16; ++k) rows[k] = &tmem[t + k][from.column + i], columns[k] = base + (i64)from.slots[i + k] * LANES + t;
                transpose16(rows, columns);
            }
    }
    if (!packed && s == S16x128b) {
        for (; i < from.n; ++i) {
            u32* out = base + (i64)from.slots[i] * LANES;
            for (int k = 0; k < 8; ++k) std::memcpy(out + 4 * k, &tmem[k + 8 * (i & 1)][from.column + 4 * (i >> 1)], 16);
        }
    }
    if (!packed && s == S16x256b) {
        for (; i < from.n; i += 2) {
            u32 *even = base + (i64)from.slots[i] * LANES, *odd = base + (i64)from.slots[i + 1] * LANES;
            for (int k = 0; k < 8; k += 2) {
                const u32* row = &tmem[k + 8 * (i >> 1 & 1)][from.column + 8 * (i >> 2)];
                Words8 x, y;
                std::memcpy(&x, row, 32);
                std::memcpy(&y, row + TMEM_COLUMNS, 32);
                const Words8 evens = __builtin_shufflevector(x, y, 0, 2, 4, 6, 8, 10, 12, 14), odds = __builtin_shufflevector(x, y, 1, 3, 5, 7, 9, 11, 13, 15);
                std::memcpy(even + 4 * k, &evens, 32);
                std::memcpy(odd + 4 * k, &odds, 32);
            }
        }
    }
    // Lanes are 2 KiB apart, few of them fit into the cache at a time: as much as possible is done per lane.
    for (; i < from.n; i += 8)
        for (int t = 0; t < LANES; ++t)
            for (int k = i; k < std::min(i + 8, from.n); ++k) {
                int lane = 0, column = 0;
                place<s>(k, t, packed ? from.half / 2 : from.half, lane, column);
                const u32* cell = &tmem[lane][from.column + (packed ? 2 * column : column)];
                base[(i64)from.slots[k] * LANES + t] = packed ? (cell[0] & 0xffff) | cell[1] << 16 : cell[0];
            }
}

template <Shape s, bool packed> static void store(const Window& to, const u32* base) {
    u32(*tmem)[TMEM_COLUMNS] = to.tmem;
    int i = 0;
    if (!packed && s == S32x32b) {
        for (; i + 16 <= to.n; i += 16)
            for (int t = 0; t < LANES; t += 16) {
                const u32* columns[16];
                u32* rows[16];
                for (int k = 0; k < 16; ++k) rows[k] = &tmem[t + k][to.column + i], columns[k] = base + (i64)to.slots[i + k] * LANES + t;
                transpose16(columns, rows);
            }
    }
    if (!packed && s == S16x128b) {
        for (; i < to.n; ++i) {
            const u32* in = base + (i64)to.slots[i] * LANES;
            for (int k = 0; k < 8; ++k) std::memcpy(&tmem[k + 8 * (i & 1)][to.column + 4 * (i >> 1)], in + 4 * k, 16);
        }
    }
    if (!packed && s == S16x256b) {
        for (; i < to.n; i += 2) {
            const u32 *even = base + (i64)to.slots[i] * LANES, *odd = base + (i64)to.slots[i + 1] * LANES;
            for (int k = 0; k < 8; k += 2) {
                u32* row = &tmem[k + 8 * (i >> 1 & 1)][to.column + 8 * (i >> 2)];
                Words8 x, y;
                std::memcpy(&x, even + 4 * k, 32);
                std::memcpy(&y, odd + 4 * k, 32);
                const Words8 first = __builtin_shufflevector(x, y, 0, 8, 1, 9, 2, 10, 3, 11), second = __builtin_shufflevector(x, y, 4, 12, 5, 13, 6, 14, 7, 15);
                std::memcpy(row, &first, 32);
                std::memcpy(row + TMEM_COLUMNS, &second, 32);
            }
        }
    }
    for (; i < to.n; i += 8)
        for (int t = 0; t < LANES; ++t)
            for (int k = i; k < std::min(i + 8, to.n); ++k) {
                int lane = 0, column = 0;
                place<s>(k, t, packed ? to.half / 2 : to.half, lane, column);
                u32* cell = &tmem[lane][to.column + (packed ? 2 * column : column)];
                const u32 word = base[(i64)to.slots[k] * LANES + t];
                if (packed) cell[0] = word & 0xffff, cell[1] = word >> 16;
                else cell[0] = word;
            }
}

// The window of a record. a: address, i0: its offset, c: number of registers, e: second half of 16x32bx2, pool: slots.
template <Shape s, bool packed> static Window window(Warp& w, const Record& r, Engine engine) {
    const char* what = engine == Engine::tmem_load ? "tcgen05.ld" : "tcgen05.st";
    const u32* given = w.reg(r.a);
    u32 differs = 0;
    for (int lane = 0; lane < LANES; ++lane) differs |= given[lane] ^ given[0];
    if (differs) fault("tensor memory", w, r.line, format("the lanes of a warp give %s different addresses", what));
    Cta& cta = *w.cta;
    const u32 address = given[0] + (u32)r.i0;
    const int lane = (int)(address >> 16), column = (int)(address & 0xffff), quadrant = w.id % 4;
    const int columns = r.c / registers_of(s) * columns_of(s) * (packed ? 2 : 1);
    if (lane != 32 * quadrant && !(lanes_of(s) == 16 && lane == 32 * quadrant + 16))
        fault("tensor memory", w, r.line, format("%s of %d lanes from lane %d on; warp %d may access lanes %d..%d only", what, lanes_of(s), lane, w.id, 32 * quadrant, 32 * quadrant + 31));
    check_tmem(w, r, cta, column, columns, 0, what);
    if (s == S16x32bx2) check_tmem(w, r, cta, column + r.e, columns, 0, what);
    if (Sanitizer* sanitizer = cta.cluster->sanitizer) {
        const Access access = engine == Engine::tmem_load ? Access::read : Access::write;
        sanitizer->begin_async(w, r, 0, engine);
        sanitizer->async_tmem(cta, lane, lanes_of(s), column, columns, access);
        if (s == S16x32bx2) sanitizer->async_tmem(cta, lane, lanes_of(s), column + r.e, columns, access);
    }
    return {cta.tmem + lane, column, r.e, cta.cluster->program.pool + r.pool, r.c};
}

// Note [Loads in flight]: until wait::ld the hardware may read tensor memory at any time. A late schedule reads at once, and again at
// wait::ld: what changed in between was not protected. For that w.tmem_load_slots holds, beside the destination slots,
// LOADED followed by the record's index, the address and a hash of what was read.
constexpr i32 LOADED = -1;

static u64 hash(const u32* base, const i32* slots, int n) {
    u32 sums[LANES] = {};
    for (int i = 0; i < n; ++i) {
        const u32* words = base + (i64)slots[i] * LANES;
        for (int t = 0; t < LANES; ++t) sums[t] = (sums[t] ^ words[t]) * 0x9e3779b1u;
    }
    u64 sum = 0;
    for (int t = 0; t < LANES; ++t) sum = (sum ^ sums[t]) * 0x9e3779b97f4a7c15ull;
    return sum;
}

// A kernel that never waits for its loads would make the list grow for ever: it forgets the oldest ones.
static void forget(Warp& w) {
    if (w.tmem_load_slots.size() < (1 << 16)) return;
    w.tmem_load_slots.clear();
    const i32 nslots = w.cta->cluster->program.nslots;
    for (i32 slot = 0; w.suspicions && slot < nslots; ++slot)
        if (w.suspicions[slot].in_flight) w.tmem_load_slots.push_back(slot);
}

template <Shape s, bool packed> static Flow load_tmem(Warp& w, const Record& r, u32 mask) {
    if (!w.converged(mask)) return Flow::block;
    const Window from = window<s, packed>(w, r, Engine::tmem_load);
    load<s, packed>(from, w.regs);
    forget(w);
    const Cluster& cluster = *w.cta->cluster;
    if (w.suspicions)
        for (int i = 0; i < from.n; ++i) {
            w.suspicions[from.slots[i]].in_flight = ALL_LANES;
            w.tmem_load_slots.push_back(from.slots[i]);
        }
    if (cluster.late) {
        const u64 sum = hash(w.regs, from.slots, from.n);
        const i32 entry[] = {LOADED, (i32)(&r - cluster.program.records), (i32)(from.tmem - w.cta->tmem) << 16 | from.column, (i32)sum, (i32)(sum >> 32)};
        w.tmem_load_slots.insert(w.tmem_load_slots.end(), entry, entry + 5);
    }
    return Flow::next;
}

template <Shape s, bool packed> static u64 read_again(Warp& w, const Record& r, u32 address) {
    static thread_local u32 words[128 * LANES];
    i32 slots[128];
    for (int i = 0; i < r.c; ++i) slots[i] = i;
    load<s, packed>({w.cta->tmem + (address >> 16), (int)(address & 0xffff), r.e, slots, r.c}, words);
    return hash(words, slots, r.c);
}

template <Shape s, bool packed> static Flow store_tmem(Warp& w, const Record& r, u32 mask) {
    if (!w.converged(mask)) return Flow::block;
    const Window to = window<s, packed>(w, r, Engine::tmem_store);
    Cluster& cluster = *w.cta->cluster;
    ++cluster.events;
    if (!cluster.late) {
        store<s, packed>(to, w.regs);
        return Flow::next;
    }
    std::vector<u32> words((size_t)to.n * LANES);
    for (int i = 0; i < to.n; ++i) std::memcpy(&words[(size_t)i * LANES], w.reg(to.slots[i]), 4 * LANES);
    w.tmem_stores.push_back(cluster.issue_grouped([to, words = std::move(words)] {
        i32 slots[128];
        for (int i = 0; i < to.n; ++i) slots[i] = i;
        Window window = to;
        window.slots = slots;
        store<s, packed>(window, words.data());
    }));
    return Flow::next;
}

using ReadAgain = u64 (*)(Warp&, const Record&, u32 address);
static std::vector<std::pair<Handler, ReadAgain>>& loads() {
    static std::vector<std::pair<Handler, ReadAgain>> list;
    return list;
}

template <Shape s, bool packed> struct Registered {
    Registered(const char* load_name, const char* store_name) {
        Registration(load_name, load_tmem<s, packed>);
        Registration(store_name, store_tmem<s, packed>);
        loads().push_back({load_tmem<s, packed>, read_again<s, packed>});
    }
};
static const Registered<S32x32b, false> r_32x32b("tcgen05.ld.32x32b", "tcgen05.st.32x32b");
static const Registered<S16x64b, false> r_16x64b("tcgen05.ld.16x64b", "tcgen05.st.16x64b");
static const Registered<S16x128b, false> r_16x128b("tcgen05.ld.16x128b", "tcgen05.st.16x128b");
static const Registered<S16x256b, false> r_16x256b("tcgen05.ld.16x256b", "tcgen05.st.16x256b");
static const Registered<S16x32bx2, false> r_16x32bx2("tcgen05.ld.16x32bx2", "tcgen05.st.16x32bx2");
static const Registered<S32x32b, true> p_32x32b("tcgen05.ld.32x32b.pack", "tcgen05.st.32x32b.unpack");
static const Registered<S16x64b, true> p_16x64b("tcgen05.ld.16x64b.pack", "tcgen05.st.16x64b.unpack");
static const Registered<S16x128b, true> p_16x128b("tcgen05.ld.16x128b.pack", "tcgen05.st.16x128b.unpack");
static const Registered<S16x256b, true> p_16x256b("tcgen05.ld.16x256b.pack", "tcgen05.st.16x256b.unpack");
static const Registered<S16x32bx2, true> p_16x32bx2("tcgen05.ld.16x32bx2.pack", "tcgen05.st.16x32bx2.unpack");

HANDLER(wait_ld, "tcgen05.wait::ld") {
    if (!w.converged(mask)) return Flow::block;
    Cluster& cluster = *w.cta->cluster;
    IF_CHECKED(w, await(w, mask, Engine::tmem_load, 0));
    const auto& list = w.tmem_load_slots;
    for (size_t i = 0; i < list.size(); ++i) {
        if (list[i] != LOADED) {
            w.suspicions[list[i]].in_flight = 0;
            continue;
        }
        const i32 index = list[i + 1];
        const u64 before = (u32)list[i + 3] | (u64)(u32)list[i + 4] << 32;
        for (auto& [handler, read] : loads())
            if (handler == cluster.handlers[index] && read(w, cluster.program.records[index], (u32)list[i + 2]) != before)
                cluster.find("tensor memory race", &w, cluster.program.records[index].line, "tensor memory changed between tcgen05.ld and tcgen05.wait::ld");
        i += 4;
    }
    w.tmem_load_slots.clear();
    return Flow::next;
}

HANDLER(wait_st, "tcgen05.wait::st") {
    if (!w.converged(mask)) return Flow::block;
    IF_CHECKED(w, await(w, mask, Engine::tmem_store, 0));
    for (const AsyncRef& op : w.tmem_stores) op->run();
    if (!w.tmem_stores.empty()) ++w.cta->cluster->events;
    w.tmem_stores.clear();
    return Flow::next;
}

// ---- fences, commit --------------------------------------------------------------------------------------------------

HANDLER(tensor_fence, "tcgen05.fence") {                                  // i0: 1 for before_thread_sync
    IF_CHECKED(w, tensor_fence(w, mask, r.i0 != 0));
    return Flow::next;
}

// a, b, i0: mbarrier; c: slot of the mask of CTAs, or -1; e: cta_group.
HANDLER(commit, "tcgen05.commit") {
    Cluster& cluster = *w.cta->cluster;
    const int lane = issuing_lane(w, r, mask, "tcgen05.commit");
    cta_group(w, r, r.e);
    const u32 address = shared_address(w, r, lane);
    const u32 targets = r.c < 0 ? 1u << (address >> RANK_SHIFT) : w.reg(r.c, lane) & 0xffff;
    for (u32 left = targets; left; left &= left - 1) {
        const u32 target = (u32)first_lane(left) << RANK_SHIFT | (address & OFFSET_MASK);
        cluster.mbarrier(target, w, r.line);
        IF_CHECKED(w, commit_tensor(w, r, lane, target));
        cluster.issue_tensor(*w.cta, [&cluster, &w, target, line = r.line] { cluster.mbarrier_arrive(target, 1, w, line); });
    }
    return Flow::next;
}

// ---- cp --------------------------------------------------------------------------------------------------------------

// a: address in tensor memory, i0: its offset, b: descriptor, c: rows, d: columns, e: cta_group, i1: how often rows are multiplied:
// 0: lane = row; 1: warpx4; 2: warpx2::02_13; 3: warpx2::01_23; 4: one row per warp (4x256b)
HANDLER(cp, "tcgen05.cp") {
    const int lane = issuing_lane(w, r, mask, "tcgen05.cp"), rows = r.c, columns = r.d, chunks = columns / 4, mode = (int)r.i1;
    const u32 address = w.reg(r.a, lane) + (u32)r.i0, column = address & 0xffff;
    if (address >> 16) fault("tensor memory", w, r.line, format("tcgen05.cp to lane %u; its lane must be 0", address >> 16));
    const CtaGroup group = cta_group(w, r, r.e);
    const SharedMatrix matrix(w.wide(r.b, lane), false, w, r);
    Sanitizer* sanitizer = w.cta->cluster->sanitizer;
    if (sanitizer) sanitizer->begin_tensor(w, r, lane, mode == 4 ? Tensor::cp_4x256b : Tensor::cp);
    for (int i = 0; i < group.size; ++i) {
        Cta& cta = *group.cta[i];
        check_tmem(w, r, cta, column, columns, group.size, "tcgen05.cp");
        matrix.check(w, r, cta, rows, chunks, "tcgen05.cp");
        if (sanitizer) {
            matrix.report(*sanitizer, cta, rows, chunks);
            for (int to = 0; to < TMEM_LANES; to += 32) sanitizer->async_tmem(cta, to, mode == 4 ? 1 : 32, (int)column, columns, Access::write);
        }
    }
    w.cta->cluster->issue_tensor(*w.cta, [=] {
        for (int i = 0; i < group.size; ++i)
            for (int row = 0; row < rows; ++row)
                for (int copy = 0; copy < (mode == 1 ? 4 : mode == 2 || mode == 3 ? 2 : 1); ++copy) {
                    const int to = mode == 1 ? row + 32 * copy : mode == 2 ? row + 64 * copy : mode == 3 ? row % 32 + row / 32 * 64 + 32 * copy : mode == 4 ? 32 * row : row;
                    for (int chunk = 0; chunk < chunks; ++chunk)
                        std::memcpy(&group.cta[i]->tmem[to][column + 4 * chunk], group.cta[i]->shared.data() + matrix.address(row, chunk), 16);
                }
    });
    ++w.cta->cluster->events;
    return Flow::next;
}

// ---- shift -----------------------------------------------------------------------------------------------------------

// Every row of 32 bytes takes the place of the one above, among the 32 lanes of each of the four warps: data movement shape 31x256b; the
// last row of the 32 stays. (CUTLASS, experimental/primitives/nvvm_wrapper.py, tcgen05_mma: a_shift.) a, i0: address, e: cta_group.
HANDLER(shift, "tcgen05.shift") {
    constexpr int COLUMNS = 8;
    const int lane = issuing_lane(w, r, mask, "tcgen05.shift");
    const u32 address = w.reg(r.a, lane) + (u32)r.i0, column = address & 0xffff;
    if (address >> 16)
        fault("tensor memory", w, r.line, format("tcgen05.shift from lane %u on; which rows it moves is known of lane 0 only", address >> 16));
    const CtaGroup group = cta_group(w, r, r.e);
    Sanitizer* sanitizer = w.cta->cluster->sanitizer;
    if (sanitizer) sanitizer->begin_tensor(w, r, lane, Tensor::shift);
    for (int i = 0; i < group.size; ++i) {
        check_tmem(w, r, *group.cta[i], column, COLUMNS, group.size, "tcgen05.shift");
        for (Access access : {Access::read, Access::write})
            if (sanitizer) sanitizer->async_tmem(*group.cta[i], 0, TMEM_LANES, (int)column, COLUMNS, access);
    }
    w.cta->cluster->issue_tensor(*w.cta, [=] {
        for (int i = 0; i < group.size; ++i)
            for (int to = 0; to < TMEM_LANES; ++to)
                if (to % LANES != LANES - 1) std::memcpy(&group.cta[i]->tmem[to][column], &group.cta[i]->tmem[to + 1][column], 4 * COLUMNS);
    });
    ++w.cta->cluster->events;
    return Flow::next;
}

}  // namespace emu
