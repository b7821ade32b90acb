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
    static thread_local u64 owner = 0;                         // the page found last: accesses are local
    static thread_local u64 last = ~0ull;
    static thread_local Page* found = nullptr;
    if (owner == identity && last == number) return *found;
    std::lock_guard<std::mutex> hold(lock);
    auto& slot = pages[number];
    if (!slot) {
        slot = std::make_unique<Page>();
        for (auto& cell : slot->cells) cell.store(0, std::memory_order_relaxed);
    }
    owner = identity;
    last = number;
    return *(found = slot.get());
}

GlobalShadow::Conflict GlobalShadow::access(Who& who, u64 address, u64 n, Access access) {
    Conflict conflict;
    if (who.cluster + 1 >= Mark::MANY) return conflict;
    const bool atomic = access != Access::read && access != Access::write, reads = access == Access::read || access == Access::strong_read;
    if (access != Access::strong_read) who.dirty = true;       // polls with a fence in the loop must not use up the time
    auto unordered = [&](Mark other, u32 bytes) {
        if (!(other.bytes() & bytes) || other.cluster() == who.cluster + 1 || (atomic && other.atomic())) return false;
        if (other.cluster() == Mark::MANY) return !who.synchronises;
        if (other.time() == Mark::LAST_TIME) return false;     // no longer exact
        const auto it = who.known.find(other.cluster() - 1);
        return it == who.known.end() || it->second < other.time();
    };
    u64 last = ~0ull, last_next = 0;                           // neighbours agree
    const u64 begin = address / GRANULE, end = (address + n + GRANULE - 1) / GRANULE;
    for (u64 at = begin; at < end;) {
        const u64 number = at * GRANULE / PAGE;
        Page& p = page(number);
        const u64 stop = std::min(end, (number + 1) * (PAGE / GRANULE));
        for (; at < stop; ++at) {
            const u32 bytes = 3 & (at == begin ? 3 << (address & 1) : 3) & (at + 1 == end ? 3 >> ((address + n) & 1) : 3);
            auto& cell = p.cells[at % (PAGE / GRANULE)];
            const u64 old = cell.load(std::memory_order_relaxed);
            if (old == last && bytes == 3) {
                if (last_next != old) cell.store(last_next, std::memory_order_relaxed);
                continue;
            }
            const Mark writer{(u32)(old >> 32)}, reader{(u32)old};
            if (unordered(writer, bytes)) conflict = {true, writer.cluster() - 1, true};
            if (!reads && unordered(reader, bytes)) conflict = {true, reader.cluster() - 1, false};
            Mark mine = Mark::of(who.cluster, who.time, atomic, bytes);
            u64 next = old;
            if (!reads) {
                if (writer.cluster() == mine.cluster()) mine.bits |= writer.bytes();
                next = (u64)mine.bits << 32 | (reader.bytes() & ~bytes ? reader.bits : 0);
            } else if (access == Access::read) {               // polls of a flag are not kept
                if (reader.cluster() == mine.cluster()) mine.bits |= reader.bytes();
                else if (reader.bits) mine.bits = Mark::MANY << 12 | reader.bytes() | bytes;
                next = (old & ~0xffffffffull) | mine.bits;
            }
            if (next != old) cell.store(next, std::memory_order_relaxed);
            if (bytes == 3) last = old, last_next = next;
        }
    }
    return conflict;
}

void GlobalShadow::written(u64 address, u64 n, u8* out) {
    std::lock_guard<std::mutex> hold(lock);
    for (u64 at = address / GRANULE, end = (address + n + GRANULE - 1) / GRANULE, i = 0; at < end; ++at, ++i) {
        auto it = pages.find(at * GRANULE / PAGE);
        if (it == pages.end()) {                               // nothing in this page
            const u64 next = (at * GRANULE / PAGE + 1) * (PAGE / GRANULE);
            i += next - at - 1;
            at = next - 1;
            continue;
        }
        out[i] |= it->second->cells[at % (PAGE / GRANULE)].load(std::memory_order_relaxed) >> 32 != 0;
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
