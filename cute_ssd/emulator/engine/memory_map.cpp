// Address spaces: shared (by rank), global (known ranges), local; mbarriers; the queues of the asynchronous engines.
#include <algorithm>
#include "addresses.h"

namespace emu {

Cta& Cluster::cta_of(u32 address, const Warp& w, int line) {
    const u32 rank = address >> RANK_SHIFT;
    if (rank >= ctas.size())
        fault("shared address", w, line, format("shared address 0x%x names CTA rank %u of a cluster of %zu", address, rank, ctas.size()));
    return *ctas[rank];
}

static std::string shared_place(u32 address) {
    return format("shared+%d of CTA rank %u", (int)(address & OFFSET_MASK) - (int)SHARED_BASE, address >> RANK_SHIFT);
}

u8* Cluster::shared_bytes(u32 address, u32 n, u32 align, const Warp& w, int line) {
    Cta& cta = cta_of(address, w, line);
    const u32 offset = address & OFFSET_MASK;
    if (offset < SHARED_BASE || offset + n > cta.shared.size())
        fault("out of bounds", w, line, format("%u bytes at %s lie outside the %d bytes of shared memory", n, shared_place(address).c_str(), launch.shared_bytes));
    if (offset & (align - 1))
        fault("misaligned", w, line, format("%s is not aligned to %u bytes", shared_place(address).c_str(), align));
    return cta.shared.data() + offset;
}

// The tensor of this launch whose number the address has, or null.
static const Range* tensor_of(const Launch& launch, u64 address) {
    const Range* last = launch.ranges + launch.nranges;
    const u64 number = address >> NUMBER_SHIFT;
    const Range* range = std::lower_bound(launch.ranges, last, number << NUMBER_SHIFT, [](const Range& r, u64 a) { return r.begin < a; });
    return number && range != last && range->begin >> NUMBER_SHIFT == number ? range : nullptr;
}

// Where an access lies that is out of bounds, as the end of a sentence.
static std::string misplaced(const Launch& launch, u64 address, u64 n) {
    using Bytes = unsigned long long;
    const u64 host = host_address(address);
    if (const Range* tensor = tensor_of(launch, address)) {
        const bool before = address < tensor->begin;
        const Bytes distance = before ? tensor->begin - address : address + n - tensor->end;
        const u64 outermost = before ? host : host + n - 1;
        return format("%s %llu bytes %s the tensor of %llu bytes that its pointer belongs to%s", before ? "begins" : "reaches", distance,
                      before ? "before" : "past the end of", (Bytes)(tensor->end - tensor->begin),
                      range_around(launch, outermost, outermost + 1) ? ", in other memory of the call" : "");
    }
    const Range* range = last_before(launch, host);
    const bool near = range && (range->begin ^ host) >> NUMBER_SHIFT == 0;
    return "lies outside every tensor of the call" + (near ? format(", %llu bytes past the end of a tensor of %llu", (Bytes)(host + n - range->end),
                                                                    (Bytes)(range->end - range->begin)) : "");
}

u8* Cluster::global_bytes(u64 address, u64 n, u32 align, const Warp& w, int line, const char* what) {
    const u64 host = host_address(address);
    if (address & (align - 1))
        fault("misaligned", w, line, format("%s at 0x%llx is not aligned to %u bytes", what, (unsigned long long)host, align));
    if (address >= known.begin && address < known.end && n <= known.end - address) return (u8*)host;
    const Range* range = range_around(launch, address, address + n);
    if (!range && !tensor_of(launch, address)) range = range_around(launch, host, host + n);         // its number is another launch's
    if (!range)
        fault("out of bounds", w, line, format("%s of %llu bytes at 0x%llx %s", what, (unsigned long long)n, (unsigned long long)host, misplaced(launch, address, n).c_str()));
    known = *range;
    return (u8*)host;
}

u8* Cluster::local_bytes(u64 offset, u32 n, const Warp& w, int lane, int line) {
    if (offset + n > (u64)program.local_bytes)
        fault("out of bounds", w, line, format("%u bytes at local+%llu lie outside the %d bytes of local memory", n, (unsigned long long)offset, program.local_bytes));
    return const_cast<u8*>(w.local.data()) + (size_t)lane * program.local_bytes + offset;
}

// ---- mbarriers -------------------------------------------------------------------------------------------------------

Mbarrier& Cluster::mbarrier(u32 address, const Warp& w, int line) {
    shared_bytes(address, 8, 8, w, line);
    Mbarrier& b = ctas[address >> RANK_SHIFT]->mbarriers[(address & OFFSET_MASK) / 8];
    if (!b.line) fault("mbarrier", w, line, format("the mbarrier at %s is not initialised", shared_place(address).c_str()));
    return b;
}

void Cluster::settle(Mbarrier& b, u32 address, const Warp& w, int line) {
    ++events;
    if (b.pending < 0)
        fault("over-arrival", w, line, format("more arrivals than the %d the mbarrier at %s expects in phase %u", b.count, shared_place(address).c_str(), b.phase));
    if (b.pending == 0 && b.tx < 0)
        fault("transaction count", w, line, format("the mbarrier at %s got %lld bytes more than it expected in phase %u", shared_place(address).c_str(), (long long)-b.tx, b.phase));
    if (b.pending == 0 && b.tx == 0) {
        ++b.phase;
        b.pending = b.count;
        if (sanitizer) sanitizer->mbarrier_phase(address);
    }
}

void Cluster::mbarrier_arrive(u32 address, i32 n, const Warp& w, int line) {
    Mbarrier& b = mbarrier(address, w, line);
    b.pending -= n;
    settle(b, address, w, line);
}

void Cluster::mbarrier_expect(u32 address, i64 bytes, const Warp& w, int line) {
    Mbarrier& b = mbarrier(address, w, line);
    b.tx += bytes;
    if (b.tx >= 1 << 20 || b.tx <= -(1 << 20))
        fault("transaction count", w, line, format("the mbarrier at %s expects %lld bytes: at most 2^20 - 1 can be counted", shared_place(address).c_str(), (long long)b.tx));
    settle(b, address, w, line);
}

void Cluster::mbarrier_complete(u32 address, i64 bytes, const Warp& w, int line) { mbarrier_expect(address, -bytes, w, line); }

// ---- asynchronous engines --------------------------------------------------------------------------------------------

static AsyncRef issue(Cluster& cluster, std::function<void()> work) {
    auto op = std::make_shared<AsyncOp>();
    op->work = std::move(work);
    if (!cluster.late) op->run();
    return op;
}

AsyncRef Cluster::issue_tma(Cta& cta, std::function<void()> work) {
    AsyncRef op = issue(*this, std::move(work));
    if (late) cta.tma_queue.push_back(op);
    return op;
}

AsyncRef Cluster::issue_tensor(Cta& cta, std::function<void()> work) {
    AsyncRef op = issue(*this, std::move(work));
    if (late) cta.tensor_queue.push_back(op);
    return op;
}

AsyncRef Cluster::issue_grouped(std::function<void()> work) { return issue(*this, std::move(work)); }

}  // namespace emu
