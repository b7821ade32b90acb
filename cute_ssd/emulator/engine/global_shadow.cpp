#include "global_shadow.h"
#include <algorithm>

namespace emu {

std::atomic<u64> GlobalShadow::created{0};

namespace {

// Who accessed a granule last: its epoch (0: nobody), whether readers of other clusters came after it, whether it was in the
// asynchronous proxy, whether it was an atomic or strong access, which of the two bytes.
struct Mark {
    static constexpr u32 SEVERAL = 16, ASYNC = 8, ATOMIC = 4, EPOCH_SHIFT = 5;
    u32 bits;
    static Mark of(u32 epoch, bool async, bool atomic, u32 bytes) { return {epoch << EPOCH_SHIFT | (async ? ASYNC : 0) | (atomic ? ATOMIC : 0) | bytes}; }
    u32 epoch() const { return bits >> EPOCH_SHIFT; }
    bool several() const { return bits & SEVERAL; }
    bool async() const { return bits & ASYNC; }
    bool atomic() const { return bits & ATOMIC; }
    u32 bytes() const { return bits & 3; }
};

// Which bytes of the granule at `at` lie in [begin, end): bit 0, the even one.
u32 bytes_of(u64 at, u64 begin, u64 end) { return 3 & (at < begin ? 2 : 3) & (end < at + 2 ? 1 : 3); }

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

u32 GlobalShadow::present_epoch(Who& who, const Actor& by) {
    Who::Present& now = who.present[by.warp];
    if (now.time == who.time && now.clock == by.clock) return now.epoch;
    const u32 number = epochs++;
    if (number >= 1u << EPOCH_BITS) {
        --epochs;
        throw Fault{"too large", format("the sanitizer tells at most %u intervals between synchronisations apart, over all CTAs: run it with sanitize=False", 1u << EPOCH_BITS), 0, ""};
    }
    auto& chunk = chunks[number / CHUNK];
    if (!chunk.load(std::memory_order_acquire)) {
        std::lock_guard<std::mutex> hold(lock);
        if (!chunk.load(std::memory_order_relaxed)) {
            owned.emplace_back(new Epoch[CHUNK]);
            chunk.store(owned.back().get(), std::memory_order_release);
        }
    }
    chunk.load(std::memory_order_relaxed)[number % CHUNK] = {who.cluster, who.time, by.clock, by.rank, by.warp};
    now = {number, who.time, by.clock};
    return number;
}

// One access of one warp.
class GlobalShadow::Visitor {
  public:
    Visitor(const GlobalShadow& s, const Who& w, const Actor& b, u32 e, Access a)
        : shadow(s), who(w), by(b), present(e), access(a), atomic(is_strong(a)), reads(only_reads(a)), own(by.view ? times_of(who.cluster).plain : 0) {}

    // A cell of which `bytes` are accessed (bit 0: the even ones). False: it is divided.
    bool visit(std::atomic<u64>& cell, u32 bytes) {
        u64 old = cell.load(std::memory_order_acquire), next;
        do {
            if (old == DIVIDED) return false;
            if (old == last && bytes == 3) next = last_next;   // neighbours agree
            else next = after(old, bytes);
            if (bytes == 3) last = old, last_next = next;
        } while (next != old && !cell.compare_exchange_weak(old, next, std::memory_order_acq_rel, std::memory_order_acquire));
        return true;
    }

    Conflict conflict;

  private:
    bool ordered(const Epoch& e) const {
        if (e.cluster == who.cluster) return e.rank == by.rank || e.time <= own || e.clock <= by.view->latest(e.warp);
        return e.time <= times_of(e.cluster).plain;
    }

    // To the asynchronous proxy, as to a generic access: Note [Proxies in global memory].
    bool visible(const Epoch& e) const { return e.time <= (e.cluster == who.cluster ? who.proxy_fenced : times_of(e.cluster).async); }

    Times times_of(u32 cluster) const {
        const auto it = who.known.find(cluster);
        return it == who.known.end() ? Times{} : it->second;
    }

    void check(Mark other, u32 bytes, bool was_write) {
        if (!(other.bytes() & bytes) || (atomic && other.atomic())) return;
        if (other.epoch() == present && !(other.bits & (Mark::SEVERAL | Mark::ASYNC)) && !by.async_proxy) return;
        const Epoch& e = shadow.epoch(other.epoch());
        if (reads && other.async() && e.cluster == who.cluster && e.time > who.drained) conflict = {Kind::in_flight};
        if (by.async_proxy && !other.async() && !visible(e)) conflict = {Kind::proxy, e.cluster, was_write};
        if (!ordered(e)) conflict = e.cluster == who.cluster ? Conflict{Kind::cta, e.rank, was_write} : Conflict{Kind::cluster, e.cluster, was_write};
        else if (other.several() && !who.synchronises) conflict = {Kind::several, 0, false};
    }

    u64 after(u64 old, u32 bytes) {
        const Mark writer{(u32)(old >> 32)}, reader{(u32)old};
        check(writer, bytes, true);
        if (!reads) check(reader, bytes, false);
        Mark mine = Mark::of(present, by.async_proxy, atomic, bytes);
        if (!reads) {
            if (writer.epoch() == present && writer.async() == by.async_proxy) mine.bits |= writer.bytes();
            return (u64)mine.bits << 32 | (reader.bytes() & ~bytes ? reader.bits : 0);
        }
        if (access != Access::read) return old;                // polls of a flag are not kept
        return (old & ~0xffffffffull) | after_reader(reader, mine).bits;
    }

    // One reader is kept. It gives way to a reader that is ordered after it, and to a later one of its CTA.
    Mark after_reader(Mark old, Mark mine) const {
        if (!old.bits) return mine;
        if (old.epoch() == present) return {old.bits | mine.bits};
        const Epoch& e = shadow.epoch(old.epoch());
        const bool same_cta = e.cluster == who.cluster && e.rank == by.rank;
        const bool same_bytes = old.bytes() == mine.bytes();
        if (same_cta ? e.time != who.time || e.warp == by.warp || e.clock <= by.view->latest(e.warp) : ordered(e))
            return {mine.bits | (same_bytes ? old.bits & Mark::SEVERAL : 0)};
        return {old.bits | (same_bytes && e.cluster != who.cluster ? Mark::SEVERAL : 0)};
    }

    const GlobalShadow& shadow;
    const Who& who;
    const Actor& by;
    const u32 present;
    const Access access;
    const bool atomic, reads;
    const u32 own;                                             // time up to which the cluster's CTAs are ordered by way of memory
    u64 last = DIVIDED, last_next = 0;
};

GlobalShadow::Conflict GlobalShadow::access(Who& who, const Actor& by, u64 address, u64 n, Access access) {
    if (access != Access::strong_read) who.dirty = true;       // polls with a fence in the loop must not use up the time
    if (by.async_proxy) who.undrained |= !only_reads(access);
    else who.unfenced |= access != Access::strong_read;
    Visitor visitor(*this, who, by, present_epoch(who, by), access);
    const u64 end = address + n;
    for (u64 at = address; at < end;) {
        Page& p = page(at / PAGE);
        const u64 piece = at / PIECE, stop = std::min(end, (piece + 1) * PIECE);
        auto& whole = p.pieces[piece % (PAGE / PIECE)];
        if (stop - at != PIECE || !visitor.visit(whole, 3)) {
            auto* const granules = &p.granules[piece * PARTS % (PAGE / GRANULE)];
            divide(whole, granules);
            for (u64 g = at / GRANULE; g * GRANULE < stop; ++g)
                visitor.visit(granules[g % PARTS], bytes_of(g * GRANULE, at, stop));
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

// ---- of a launch that has ended --------------------------------------------------------------------------------------

// f(number, cell) of the granules whose pages were accessed.
template <class F> void GlobalShadow::each_granule(u64 address, u64 n, const F& f) const {
    const u64 end = (address + n + GRANULE - 1) / GRANULE;
    for (u64 at = address / GRANULE, stop; at < end; at = stop) {
        stop = std::min(end, (at * GRANULE / PAGE + 1) * (PAGE / GRANULE));
        const auto found = pages.find(at * GRANULE / PAGE);
        if (found == pages.end()) continue;
        const Page& p = *found->second;
        for (u64 g = at; g < stop; ++g) {
            const u64 whole = p.pieces[g / PARTS % (PAGE / PIECE)].load(std::memory_order_relaxed);
            f(g, whole == DIVIDED ? p.granules[g % (PAGE / GRANULE)].load(std::memory_order_relaxed) : whole);
        }
    }
}

void GlobalShadow::written(u64 address, u64 n, u8* out) const {
    each_granule(address, n, [&](u64 g, u64 cell) { out[g - address / GRANULE] |= cell >> 32 != 0; });
}

const char* GlobalShadow::conflict(u64 address, u64 n, Access access) const {
    const bool atomic = is_strong(access), reads = only_reads(access);
    const char* found = nullptr;
    each_granule(address, n, [&](u64 g, u64 cell) {
        const u32 bytes = bytes_of(g * GRANULE, address, address + n);
        const auto conflicts = [&](Mark m) { return (m.bytes() & bytes) && !(atomic && m.atomic()); };
        if (conflicts(Mark{(u32)(cell >> 32)})) found = "writes";
        else if (!reads && !found && conflicts(Mark{(u32)cell})) found = "reads";
    });
    return found;
}

void GlobalShadow::start_behind(std::shared_ptr<GlobalShadow> last) {
    constexpr size_t KEPT = 8;                                 // kernels that never wait would have it grow for ever
    unfinished = std::move(last->unfinished);
    unfinished.push_back(std::move(last));
    if (unfinished.size() > KEPT) unfinished.erase(unfinished.begin());
}

// ---- order -----------------------------------------------------------------------------------------------------------

// True if that was news.
bool GlobalShadow::merge(Known& into, const Known& from) {
    bool news = false;
    for (auto& [cluster, times] : from) news |= into[cluster].merge(times);
    return news;
}

// What was accessed so far lies before the present time from now on.
void GlobalShadow::advance(Who& who) {
    who.time += who.dirty;
    who.dirty = false;
}

void GlobalShadow::release(Who& who, u64 address) {
    std::lock_guard<std::mutex> hold(lock);
    Known& known = released[address];
    merge(known, who.known);
    known[who.cluster].merge({who.time, who.proxy_fenced});
    advance(who);
}

void GlobalShadow::acquire(Who& who, u64 address) {
    std::lock_guard<std::mutex> hold(lock);
    who.synchronises = true;
    auto it = released.find(address);
    if (it == released.end()) return;
    who.unfenced |= merge(who.known, it->second);
    who.learned = true;
}

void GlobalShadow::fence(Who& who) {
    if (who.learned || !who.pending.empty()) {
        who.unfenced |= merge(who.known, who.pending);
        who.pending.clear();
        who.fenced = who.known;
    }
    who.learned = false;
    who.fenced_time = who.time;
    advance(who);
}

void GlobalShadow::strong(Who& who, u64 address, Access access, Scope scope) {
    const bool waits = access != Access::strong_write, tells = access != Access::strong_read;
    if (who.present.size() > 1 && scope != Scope::cta) {
        if (const auto it = who.within.find(address); waits && it != who.within.end()) who.known[who.cluster].merge({it->second, 0});
        if (tells) {
            who.within[address] = who.time;
            advance(who);
        }
    }
    if (scope != Scope::gpu) return;
    std::lock_guard<std::mutex> hold(lock);
    if (waits) {
        who.synchronises = true;
        auto it = released.find(address);
        if (it != released.end()) merge(who.pending, it->second);
    }
    if (!tells || !who.fenced_time) return;
    Known& known = released[address];
    merge(known, who.fenced);
    known[who.cluster].merge({who.fenced_time, who.proxy_fenced});
}

void GlobalShadow::proxy_fence(Who& who) {
    if (!who.unfenced) return;
    who.proxy_fenced = who.time++;
    who.unfenced = false;
    for (Known* known : {&who.known, &who.fenced})
        for (auto& [cluster, times] : *known) times.async = times.plain;
}

void GlobalShadow::drain(Who& who) {
    if (!who.undrained) return;
    who.drained = who.time++;
    who.undrained = false;
}

}  // namespace emu
