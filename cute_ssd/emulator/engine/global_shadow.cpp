#include "global_shadow.h"
#include <algorithm>

namespace emu {

std::atomic<u64> GlobalShadow::created{0};

namespace {

// Who accessed a granule last: cluster + 1 (0: nobody), its time, whether it was an atomic or strong access, which of the two bytes.
struct Mark {
    static constexpr u32 TIME_BITS = 9, LAST_TIME = (1 << TIME_BITS) - 1, MANY = (1 << 20) - 1;
    u32 bits;
    static Mark of(u32 cluster, u32 time, bool atomic, u32 bytes) { return {(cluster + 1) << 12 | std::min(time, LAST_TIME) << 3 | (u32)atomic << 2 | bytes}; }
    u32 cluster() const { return bits >> 12; }
    u32 time() const { return bits >> 3 & LAST_TIME; }
    bool atomic() const { return bits >> 2 & 1; }
    u32 bytes() const { return bits & 3; }
};

}  // namespace

GlobalShadow::Page& GlobalShadow::page(u64 number) {
    static thread_local struct { u64 owner = 0, number = 0; Page* page = nullptr; } last;          // accesses are local
    if (last.owner == identity && last.number == number) return *last.page;
    std::lock_guard<std::mutex> hold(lock);
    auto& slot = pages[number];
    if (!slot) {
        slot.reset(new Page);
        for (auto& cell : slot->pieces) cell.store(0, std::memory_order_relaxed);
    }
    last = {identity, number, slot.get()};
    return *slot;
}

// One access of one cluster.
class GlobalShadow::Visitor {
  public:
    Visitor(const Who& w, Access a)
        : who(w), access(a), atomic(a != Access::read && a != Access::write), reads(a == Access::read || a == Access::strong_read) {}

    // A cell of which `bytes` are accessed (bit 0: the even ones). False: it is divided.
    bool visit(std::atomic<u64>& cell, u32 bytes) {
        u64 old = cell.load(std::memory_order_relaxed), next;
        do {
            if (old == DIVIDED) return false;
            if (old == last && bytes == 3) next = last_next;   // neighbours agree
            else next = after(old, bytes);
            if (bytes == 3) last = old, last_next = next;
        } while (next != old && !cell.compare_exchange_weak(old, next, std::memory_order_relaxed));
        return true;
    }

    Conflict conflict;

  private:
    bool unordered(Mark other, u32 bytes) const {
        if (!(other.bytes() & bytes) || other.cluster() == who.cluster + 1 || (atomic && other.atomic())) return false;
        if (other.cluster() == Mark::MANY) return !who.synchronises;
        if (other.time() == Mark::LAST_TIME) return false;     // no longer exact
        const auto it = who.known.find(other.cluster() - 1);
        return it == who.known.end() || it->second < other.time();
    }

    u64 after(u64 old, u32 bytes) {
        const Mark writer{(u32)(old >> 32)}, reader{(u32)old};
        if (unordered(writer, bytes)) conflict = {true, writer.cluster() - 1, true};
        if (!reads && unordered(reader, bytes)) conflict = {true, reader.cluster() - 1, false};
        Mark mine = Mark::of(who.cluster, who.time, atomic, bytes);
        if (!reads) {
            if (writer.cluster() == mine.cluster()) mine.bits |= writer.bytes();
            return (u64)mine.bits << 32 | (reader.bytes() & ~bytes ? reader.bits : 0);
        }
        if (access != Access::read) return old;                // polls of a flag are not kept
        if (reader.cluster() == mine.cluster()) mine.bits |= reader.bytes();
        else if (reader.bits) mine.bits = Mark::MANY << 12 | reader.bytes() | bytes;
        return (old & ~0xffffffffull) | mine.bits;
    }

    const Who& who;
    const Access access;
    const bool atomic, reads;
    u64 last = DIVIDED, last_next = 0;
};

GlobalShadow::Conflict GlobalShadow::access(Who& who, u64 address, u64 n, Access access) {
    if (who.cluster + 1 >= Mark::MANY) return {};
    if (access != Access::strong_read) who.dirty = true;       // polls with a fence in the loop must not use up the time
    Visitor visitor(who, access);
    const u64 end = address + n;
    for (u64 at = address; at < end;) {
        Page& p = page(at / PAGE);
        const u64 piece = at / PIECE, stop = std::min(end, (piece + 1) * PIECE);
        auto& whole = p.pieces[piece % (PAGE / PIECE)];
        if (stop - at != PIECE || !visitor.visit(whole, 3)) {
            auto* const granules = &p.granules[piece * PARTS % (PAGE / GRANULE)];
            divide(whole, granules);
            for (u64 g = at / GRANULE; g * GRANULE < stop; ++g)
                visitor.visit(granules[g % PARTS], 3 & (g * GRANULE < at ? 2 : 3) & (stop < (g + 1) * GRANULE ? 1 : 3));
        }
        at = stop;
    }
    return visitor.conflict;
}

void GlobalShadow::divide(std::atomic<u64>& piece, std::atomic<u64>* granules) {
    if (piece.load(std::memory_order_acquire) == DIVIDED) return;
    std::lock_guard<std::mutex> hold(lock);                    // against others who divide it
    u64 cell = piece.load(std::memory_order_relaxed);
    if (cell == DIVIDED) return;
    do for (u64 k = 0; k < PARTS; ++k) granules[k].store(cell, std::memory_order_relaxed);
    while (!piece.compare_exchange_weak(cell, DIVIDED, std::memory_order_release, std::memory_order_relaxed));
}

void GlobalShadow::written(u64 address, u64 n, u8* out) {
    std::lock_guard<std::mutex> hold(lock);
    const u64 first = address / GRANULE, end = (address + n + GRANULE - 1) / GRANULE;
    for (u64 at = first, stop; at < end; at = stop) {
        stop = std::min(end, (at * GRANULE / PAGE + 1) * (PAGE / GRANULE));
        const auto found = pages.find(at * GRANULE / PAGE);
        if (found == pages.end()) continue;
        const Page& p = *found->second;
        for (u64 g = at; g < stop; ++g) {
            const u64 whole = p.pieces[g / PARTS % (PAGE / PIECE)].load(std::memory_order_relaxed);
            const u64 cell = whole == DIVIDED ? p.granules[g % (PAGE / GRANULE)].load(std::memory_order_relaxed) : whole;
            out[g - first] |= cell >> 32 != 0;
        }
    }
}

void GlobalShadow::merge(Known& into, const Known& from) {
    for (auto& [cluster, time] : from) {
        u32& mine = into[cluster];
        mine = std::max(mine, time);
    }
}

// What was accessed so far lies before the present time from now on.
void GlobalShadow::advance(Who& who) {
    if (who.dirty && who.time < Mark::LAST_TIME) ++who.time;
    who.dirty = false;
}

void GlobalShadow::release(Who& who, u64 address) {
    std::lock_guard<std::mutex> hold(lock);
    Known& known = released[address];
    merge(known, who.known);
    u32& mine = known[who.cluster];
    mine = std::max(mine, std::min(who.time, Mark::LAST_TIME - 1));
    advance(who);
}

void GlobalShadow::acquire(Who& who, u64 address) {
    std::lock_guard<std::mutex> hold(lock);
    who.synchronises = true;
    auto it = released.find(address);
    if (it == released.end()) return;
    merge(who.known, it->second);
    who.learned = true;
}

void GlobalShadow::fence(Who& who) {
    if (who.learned || !who.pending.empty()) {
        merge(who.known, who.pending);
        who.pending.clear();
        who.fenced = who.known;
    }
    who.learned = false;
    who.fenced_time = std::min(who.time, Mark::LAST_TIME - 1);
    advance(who);
}

void GlobalShadow::strong(Who& who, u64 address, Access access) {
    std::lock_guard<std::mutex> hold(lock);
    if (access != Access::strong_write) {
        who.synchronises = true;
        auto it = released.find(address);
        if (it != released.end()) merge(who.pending, it->second);
    }
    if (access == Access::strong_read || !who.fenced_time) return;
    Known& known = released[address];
    merge(known, who.fenced);
    u32& mine = known[who.cluster];
    mine = std::max(mine, who.fenced_time);
}

}  // namespace emu
