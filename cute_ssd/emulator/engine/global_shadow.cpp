#include "global_shadow.h"
#include <algorithm>

namespace emu {

std::atomic<u64> GlobalShadow::created{0};

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

GlobalShadow::Conflict GlobalShadow::access(Who& who, u64 address, u64 n, bool write) {
    const u32 mine = (who.cluster + 1) << 8 | std::min(who.time, 255u);
    Conflict conflict;
    auto unordered = [&](u32 other) {                          // 0: nobody
        const u32 cluster = other >> 8;
        if (!other || cluster == who.cluster + 1) return false;
        if (cluster == MANY) return !who.synchronises;
        if ((other & 255) == 255) return false;                // its time is no longer exact
        const auto it = who.known.find(cluster - 1);
        return it == who.known.end() || it->second < (other & 255);
    };
    u64 last = ~0ull, last_next = 0;                           // neighbours agree
    for (u64 at = address / GRANULE, end = (address + n + GRANULE - 1) / GRANULE; at < end;) {
        const u64 number = at * GRANULE / PAGE;
        Page& p = page(number);
        const u64 stop = std::min(end, (number + 1) * (PAGE / GRANULE));
        for (; at < stop; ++at) {
            auto& cell = p.cells[at % (PAGE / GRANULE)];
            const u64 old = cell.load(std::memory_order_relaxed);
            if (old == last) {
                if (last_next != old) cell.store(last_next, std::memory_order_relaxed);
                continue;
            }
            const u32 writer = (u32)(old >> 32), reader = (u32)old;
            if (writer != mine && unordered(writer)) conflict = {true, (writer >> 8) - 1, true};
            if (write && reader != mine && unordered(reader)) conflict = {true, (reader >> 8) - 1, false};
            u64 next;
            if (write) next = (u64)mine << 32;
            else if (!reader || reader == mine || reader >> 8 == who.cluster + 1) next = (old & ~0xffffffffull) | mine;
            else next = (old & ~0xffffffffull) | MANY << 8;
            if (next != old) cell.store(next, std::memory_order_relaxed);
            last = old;
            last_next = next;
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

void GlobalShadow::release(Who& who, u64 address) {
    std::lock_guard<std::mutex> hold(lock);
    Known& known = released[address];
    for (auto& [cluster, time] : who.known) known[cluster] = std::max(known[cluster], time);
    known[who.cluster] = std::max(known[who.cluster], std::min(who.time, 254u));
    if (who.time < 255) ++who.time;
}

void GlobalShadow::acquire(Who& who, u64 address) {
    std::lock_guard<std::mutex> hold(lock);
    who.synchronises = true;
    auto it = released.find(address);
    if (it == released.end()) return;
    for (auto& [cluster, time] : it->second) {
        auto [mine, fresh] = who.known.emplace(cluster, time);
        if (!fresh) mine->second = std::max(mine->second, time);
    }
}

}  // namespace emu
