// Who wrote and read each piece of global memory during a launch: races between CTAs, and between the two proxies of one cluster.
//
// Clusters run on several host threads, so the table is shared and its cells are atomics. A cluster's time advances with each of its
// releases and fences at gpu scope; an acquire learns the times that were released to the same address. A strong access that is not
// ordered itself does the same together with a fence: it hands on what was before the last fence, and what it reads counts after
// the next one. CTAs of one cluster are ordered by what their warps know of each other (View), or by any strong access to one word
// whose scope is wide enough.
//
// Note [Proxies in global memory]: between a generic access and a bulk or tensor copy that conflicts with it there must be a
// fence.proxy.async: of the cluster that made the first one, before it releases that, or of the cluster that copies, after it has acquired
// it. What bulk stores wrote may be read after the next cp.async.bulk.wait_group of their cluster. Either may be executed by whichever
// thread of the cluster. That asks too little, never too much.
//
// Note [Launches before]: a launch with the attribute for programmatic dependent launch starts as soon as each CTA of the one before has
// executed griddepcontrol.launch_dependents or has exited. That one is unfinished then, and so is what was unfinished for it, unless one
// of its CTAs had executed griddepcontrol.wait before. Behind its own wait a thread finds all of them over; until then what it does must
// not conflict with what they did, at any time. A launch without the attribute finds everything over.
#pragma once
#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>
#include "clocks.h"
#include "sanitizer.h"

namespace emu {

class INTERNAL GlobalShadow {
  public:
    struct Times {                                             // up to which it is known; of that, behind a fence.proxy.async
        u32 plain = 0, async = 0;
        bool merge(Times o) {
            const Times before = *this;
            plain = std::max(plain, o.plain), async = std::max(async, o.async);
            return plain != before.plain || async != before.async;
        }
    };
    using Known = std::unordered_map<u32, Times>;              // by cluster; the own one: the other CTAs, by way of memory
    struct Who {                                               // a cluster
        u32 cluster = 0, time = 1, fenced_time = 0;            // fenced_time: at the last fence, 0: there was none
        u32 proxy_fenced = 0, drained = 0;                     // Note [Proxies in global memory]: times up to which it is so
        Known known, fenced, pending;                          // pending: known after the next fence
        bool synchronises = false;
        bool dirty = false, learned = false;                   // since the last change of time; since the last fence
        bool unfenced = false, undrained = false;              // it accessed or learned something; it wrote by bulk stores
        struct Present { u32 epoch = 0, time = 0; Clock clock = 0; };
        std::vector<Present> present;                          // of each warp; of all, where the cluster is one CTA
        std::unordered_map<u64, u32> within;                   // address -> time of strong writes, where the cluster is several CTAs
    };
    struct Actor {                                             // who of the cluster; the first three matter if it is several CTAs
        u16 rank, warp;                                        // of the CTA; of the warp, in the cluster
        Clock clock;
        const View* view;                                      // null: the cluster is one CTA
        bool async_proxy;
    };
    enum class Kind { none, cluster, several, cta, in_flight, proxy };
    struct Conflict { Kind kind = Kind::none; u32 who = 0; bool was_write = false; };     // who: the cluster, or the rank of the CTA

    // Marks [address, address + n) as accessed; returns the last unordered access of somebody else.
    Conflict access(Who& who, const Actor& by, u64 address, u64 n, Access access);
    void written(u64 address, u64 n, u8* out) const;           // out[i] |= 1 where bytes 2i, 2i + 1 were written
    void release(Who& who, u64 address);                       // these three at gpu scope
    void acquire(Who& who, u64 address);
    void fence(Who& who);
    void strong(Who& who, u64 address, Access access, Scope);  // relaxed or volatile
    void proxy_fence(Who& who);
    void drain(Who& who);                                      // the bulk stores are over

    // Note [Launches before]
    std::string kernel;
    std::vector<std::shared_ptr<GlobalShadow>> unfinished;     // when this launch started
    std::atomic<bool> waited{false};                           // one of its CTAs waited for them before it let others start
    void start_behind(std::shared_ptr<GlobalShadow> last);
    const char* conflict(u64 address, u64 n, Access access) const;     // what this launch did there: "writes", "reads", null

  private:
    // A cell (writer, reader: see Mark) of a piece of 16 bytes, unless parts of it are accessed: then of its granules of 2 bytes, so that
    // two bf16 of neighbours do not collide. It stays divided.
    static constexpr u64 GRANULE = 2, PIECE = 16, PAGE = 1 << 14, PARTS = PIECE / GRANULE;
    static constexpr u64 DIVIDED = ~0ull;                      // a piece whose granules tell
    struct Page {
        std::atomic<u64> pieces[PAGE / PIECE];
        std::atomic<u64> granules[PAGE / GRANULE];             // of a piece: written when it is divided
    };
    // What marks name: one warp (cluster, where it is one CTA) between two changes of its time.
    struct Epoch { u32 cluster, time; Clock clock; u16 rank, warp; };
    static constexpr u32 EPOCH_BITS = 27, CHUNK = 1 << 14;
    class Visitor;
    static bool merge(Known& into, const Known& from);
    void advance(Who& who);
    u32 present_epoch(Who& who, const Actor& by);
    const Epoch& epoch(u32 number) const { return chunks[number / CHUNK].load(std::memory_order_acquire)[number % CHUNK]; }
    Page& page(u64 number);
    template <class F> void each_granule(u64 address, u64 n, const F&) const;
    void divide(std::atomic<u64>& piece, std::atomic<u64>* granules);
    static std::atomic<u64> created;
    const u64 identity = ++created;                            // an address may be used again, a number is not
    std::mutex lock;
    std::unordered_map<u64, std::unique_ptr<Page>> pages;
    std::unordered_map<u64, Known> released;
    std::atomic<u32> epochs{1};                                // 0 is nobody
    std::vector<std::unique_ptr<Epoch[]>> owned;               // what `chunks` point to
    std::vector<std::atomic<Epoch*>> chunks{(1u << EPOCH_BITS) / CHUNK};
};

}  // namespace emu
