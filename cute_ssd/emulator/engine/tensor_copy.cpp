// cp.async.bulk.tensor, cp.reduce.async.bulk.tensor, tensormap.
#include "bulk.h"
#include "reduction.h"

namespace emu {

// The tile at the coordinates in the slots coordinates[0..rank) of a lane.
static Tile tile_of(Warp& w, const Record& r, int lane, const i32* coordinates) {
    Tile tile{tensor_map(w.wide(r.a, lane) + (u64)r.i0, w, r.line), {}};
    const int rank = (int)(r.i1 & 255);
    if (tile.map.rank != rank)
        fault("tensor map", w, r.line, format("an instruction for %d dimensions uses a tensor map of %d", rank, tile.map.rank));
    for (int k = 0; k < rank; ++k) tile.at[k] = (i32)w.reg(coordinates[k], lane);
    const i64 first = tile.at[0] * tile.map.element_bits;
    if (first % 8) fault("tensor map", w, r.line, format("coordinate 0 is %lld: 4-bit elements are copied in pairs", (long long)tile.at[0]));
    tile.at[0] = first / 8;
    return tile;
}

// Only the part of the box that lies in the tensor is accessed, and it must be memory of the call.
static void check_global(const Tile& tile, const Warp& w, const Record& r) {
    Cluster& cluster = *w.cta->cluster;
    const u64 number = tile.map.number;
    u64 low, high;
    if (!tile.span(low, high)) return;
    try {
        cluster.global_bytes(number + low, high - low, 1, w, r.line, "a tensor copy");
    } catch (const Fault&) {                                       // the gaps between rows need not be known memory
        tile.each_part([&](u64 address, u64 n) { cluster.global_bytes(number + address, n, 1, w, r.line, "a row of a tensor copy"); });
    }
}

static u32 shared_operand(Warp& w, const i32* pool, int lane) { return w.reg(pool[0], lane) + (u32)pool[1]; }

// The pool: shared address, mbarrier, coordinates.
HANDLER(tensor_load, "tensor.load") {
    Cluster& cluster = *w.cta->cluster;
    const int lane = first_lane(mask);
    if (mask & (mask - 1))
        cluster.find("several lanes", &w, r.line, format("several lanes issue a single-thread instruction: %d lanes load one tile", __builtin_popcount(mask)));
    const i32* const pool = cluster.program.pool + r.pool;
    const Tile tile = tile_of(w, r, lane, pool + 4);
    const u32 bytes = tile.map.bytes;
    check_global(tile, w, r);
    each_destination(w, r, lane, (int)(r.i1 >> 8), shared_operand(w, pool, lane), shared_operand(w, pool + 2, lane), bytes, 128, [&](u32 to, u32 barrier) {
        if (Sanitizer* s = cluster.sanitizer) tile.each_part([&](u64 address, u64 n) { s->async_global(address, n, Access::read); });
        u8* const shared = cluster.ctas[to >> RANK_SHIFT]->shared.data();
        cluster.issue_tma(*w.cta, [&cluster, &w, line = r.line, tile, shared, offset = to & OFFSET_MASK, barrier] {
            tile.load(shared, offset);
            cluster.mbarrier_complete(barrier, tile.map.bytes, w, line);
        });
    });
    return Flow::next;
}

// All lanes issue a store and the device executes it once: they must mean the same.
static void check_uniform(Warp& w, const Record& r, u32 mask, const i32* pool) {
    const int rank = (int)(r.i1 & 255), first = first_lane(mask);
    bool same = true;
    auto compare = [&](i32 slot) { for (u32 m = mask; m; m &= m - 1) same &= w.reg(slot, first_lane(m)) == w.reg(slot, first); };
    compare(r.a);
    compare(r.a + 1);
    compare(pool[0]);
    for (int k = 0; k < rank; ++k) compare(pool[2 + k]);
    if (!same) w.cta->cluster->find("several lanes", &w, r.line, "lanes of one warp store different tiles in one instruction, which the device executes once");
}

// The pool: shared address, coordinates. A store belongs to the warp's open bulk group.
static Flow store(Warp& w, const Record& r, u32 mask, bool reduces) {
    Cluster& cluster = *w.cta->cluster;
    const int lane = first_lane(mask);
    const i32* const pool = cluster.program.pool + r.pool;
    if (mask & (mask - 1)) check_uniform(w, r, mask, pool);
    const Tile tile = tile_of(w, r, lane, pool + 2);
    const u32 address = shared_operand(w, pool, lane);
    const Operation operation = (Operation)(r.i1 >> 8);
    check_own(w, r, address);
    cluster.shared_bytes(address, tile.map.bytes, 128, w, r.line);
    check_global(tile, w, r);
    if (reduces && !reduce(operation, tile.map.element, nullptr, nullptr, 0, true))
        fault("tensor map", w, r.line, format("this reduction does not exist for %s elements", element_name(tile.map.element)));
    if (Sanitizer* s = cluster.sanitizer) {
        s->begin_async(w, r, lane, Engine::bulk_read);
        s->async_shared(address, tile.map.bytes, Access::read);
        s->begin_async(w, r, lane, Engine::bulk_write);
        tile.each_part([&](u64 at, u64 n) { s->async_global(at, n, reduces ? Access::atomic : Access::write); });
    }
    const bool alone = cluster.options.threads == 1;
    w.bulk.open.push_back(cluster.issue_grouped([tile, shared = w.cta->shared.data(), offset = address & OFFSET_MASK, operation, reduces, alone] {
        tile.each_stored(shared, offset, [&](u8* to, const u8* from, u32 n) {
            if (reduces) reduce(operation, tile.map.element, to, from, n, alone);
            else std::memcpy(to, from, n);
        });
    }));
    ++cluster.events;
    return Flow::next;
}

HANDLER(tensor_store, "tensor.store") { return store(w, r, mask, false); }
HANDLER(tensor_reduce, "tensor.reduce") { return store(w, r, mask, true); }

// ---- tensor maps that a kernel edits ---------------------------------------------------------------------------------

static void put(u64& word, int at, int bits, u64 value) {
    const u64 field = (((u64)1 << bits) - 1) << at;
    word = (word & ~field) | (value << at & field);
}

static void replace(u64* words, MapField field, int k, u64 value, const Warp& w, int line) {
    auto limit = [&](const char* name, u64 low, u64 high) {
        if (value < low || value > high) fault("tensor map", w, line, format("%s %llu of a tensor map", name, (unsigned long long)value));
    };
    switch (field) {
        case MapField::global_address: words[0] = value; break;
        case MapField::rank: limit("rank - 1", 0, 4); put(words[1], 4, 3, value); break;
        case MapField::box_dim:
            limit("box dimension", 1, 256);
            if (k == 0) put(words[6], 56, 8, value - 1);
            else put(words[7], 8 * (k - 1), 8, value - 1);
            break;
        case MapField::global_dim: put(words[4 + k / 2], 32 * (k % 2), 32, value - 1); break;
        case MapField::global_stride: {                            // `k` counts from dimension 1; the value is in bytes
            if (value % 16 || value >> 40) fault("tensor map", w, line, format("stride %llu of a tensor map: a multiple of 16 below 2^40 is needed", (unsigned long long)value));
            const int at = k + 3;                                  // in half words, from the upper half of word 1
            put(words[at / 2], 32 * (at % 2), 32, value >> 4 & 0xffffffff);
            put(words[3], 32 + 4 * k, 4, value >> 36);
            break;
        }
        case MapField::element_stride: limit("element stride", 1, 8); put(words[6], 32 + 3 * k, 3, value - 1); break;
        case MapField::elemtype: limit("element type", 0, 15); put(words[1], 7, 4, value); break;
        case MapField::swizzle_mode: limit("swizzle mode", 0, 3); put(words[1], 13, 2, value); break;
        case MapField::swizzle_atomicity: limit("swizzle atomicity", 0, 3); put(words[1], 19, 2, value); break;
    }
}

// i1: field, dimension << 8, 1 << 16 in shared memory. b: the value, two slots for 64-bit fields.
HANDLER(tensormap_replace, "tensormap.replace") {
    Cluster& cluster = *w.cta->cluster;
    const MapField field = (MapField)(r.i1 & 255);
    const bool wide = field == MapField::global_address || field == MapField::global_stride;
    for (u32 lanes = mask; lanes; lanes &= lanes - 1) {
        const int lane = first_lane(lanes);
        u64* words;
        if (r.i1 >> 16) {
            const u32 address = w.reg(r.a, lane) + (u32)r.i0;
            check_own(w, r, address);
            words = (u64*)cluster.shared_bytes(address, MAP_BYTES, 64, w, r.line);
            IF_CHECKED(w, shared(w, r, lane, address, MAP_BYTES, Access::write));
        } else {
            const u64 address = w.wide(r.a, lane) + (u64)r.i0;
            words = (u64*)cluster.global_bytes(address, MAP_BYTES, 64, w, r.line, "a tensor map");
            IF_CHECKED(w, global(w, r, address, MAP_BYTES, Access::write, Scope::gpu));
        }
        replace(words, field, (int)(r.i1 >> 8 & 255), wide ? w.wide(r.b, lane) : w.reg(r.b, lane), w, r.line);
        ++cluster.events;
    }
    return Flow::next;
}

// tensormap.cp_fenceproxy: the warp copies a map from shared to global memory and releases it.
HANDLER(tensormap_copy, "tensormap.copy") {
    if (!w.converged(mask)) return Flow::block;
    Cluster& cluster = *w.cta->cluster;
    const int lane = first_lane(mask);
    const u64 to = w.wide(r.a, lane) + (u64)r.i0;
    const u32 from = w.reg(r.b, lane) + (u32)r.i1;
    check_own(w, r, from);
    const u8* const source = cluster.shared_bytes(from, MAP_BYTES, 128, w, r.line);
    u8* const target = cluster.global_bytes(to, MAP_BYTES, 128, w, r.line, "a tensor map");
    if (Sanitizer* s = cluster.sanitizer) {
        s->shared(w, r, lane, from, MAP_BYTES, Access::read);
        s->global(w, r, to, MAP_BYTES, Access::write, Scope::gpu);
        s->global_release(w, lane, to, Scope::gpu);
    }
    std::memcpy(target, source, MAP_BYTES);
    ++cluster.events;
    return Flow::next;
}

}  // namespace emu
