// Which cluster wrote and read each piece of global memory during a launch: races between CTAs of different clusters.
//
// Clusters run on several host threads, so the table is shared and its cells are relaxed atomics. A cluster's time advances with each
// of its releases and fences at gpu scope; an acquire learns the times that were released to the same address. A strong access that
// is not ordered itself does the same together with a fence: it hands on what was before the last fence, and what it reads counts
// after the next one.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>
#include "sanitizer.h"

namespace emu {

class INTERNAL GlobalShadow {
  public:
    using Known = std::unordered_map<u32, u32>;                // cluster -> time
    struct Who {
        u32 cluster = 0, time = 1, fenced_time = 0;            // fenced_time: at the last fence, 0: there was none
        Known known, fenced, pending;                          // pending: known after the next fence
        bool synchronises = false;
        bool dirty = false, learned = false;                   // since the last change of time; since the last fence
    };
    struct Conflict { bool found = false; u32 cluster = 0; bool was_write = false; };

    // Marks [address, address + n) as accessed; returns the first unordered access of another cluster.
    Conflict access(Who& who, u64 address, u64 n, Access access);
    void written(u64 address, u64 n, u8* out);                 // out[i] |= 1 where bytes 2i, 2i + 1 were written
    void release(Who& who, u64 address);
    void acquire(Who& who, u64 address);
    void fence(Who& who);
    void strong(Who& who, u64 address, Access access);         // relaxed or volatile

  private:
    // A cell (writer, reader: see Mark) of a piece of 16 bytes, unless parts of it are accessed: then of its granules of 2 bytes, so that
    // two bf16 of neighbours do not collide. It stays divided.
    static constexpr u64 GRANULE = 2, PIECE = 16, PAGE = 1 << 14, PARTS = PIECE / GRANULE;
    static constexpr u64 DIVIDED = ~0ull;                      // a piece whose granules tell
    struct Page {
        std::atomic<u64> pieces[PAGE / PIECE];
        std::atomic<u64> granules[PAGE / GRANULE];             // of a piece: written when it is divided
    };
    class Visitor;
    static void merge(Known& into, const Known& from);
    void advance(Who& who);
    Page& page(u64 number);
    void divide(std::atomic<u64>& piece, std::atomic<u64>* granules);
    static std::atomic<u64> created;
    const u64 identity = ++created;                            // an address may be used again, a number is not
    std::mutex lock;
    std::unordered_map<u64, std::unique_ptr<Page>> pages;
    std::unordered_map<u64, Known> released;
};

}  // namespace emu
