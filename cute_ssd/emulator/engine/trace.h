// The executed trace of a cluster: what the timing model (timing.cpp) replays. Optional; it is recorded in the eager schedule, where
// every warp runs until it must wait, so that each wait can be told which phase it waited for and who completed it.
//
// A warp's trace is a list of words: for each executed record its index, with the number of payload words in the upper byte, and the
// payload. Waits and completions name tokens: a token stands for one phase of one mbarrier or named barrier, and it is complete when
// `contributions` of them have happened.
#pragma once
#include <unordered_map>
#include "core.h"

namespace emu {

enum class Traced : u8 {
    plain,                                 // nothing
    shared,                                // wavefronts of 128 bytes
    global,                                // GLOBAL_WORDS
    copy_async,                            // GLOBAL_WORDS
    copy_async_arrive,                     // tokens
    tensor_load, tensor_store,             // TENSOR_WORDS; tokens that the bytes contribute to
    bulk_load, bulk_copy, bulk_store,      // as a tensor copy
    mma,                                   // M | N << 16; flags
    commit, arrive,                        // tokens
    mbarrier_wait,                         // token, or NO_TOKEN; no payload where it polled in vain
    named_wait, named_arrive,              // token
    cluster_arrive, cluster_wait,          // token
    remote_store,                          // bytes, token
    alloc,                                 // columns of tensor memory
    mbarrier_init,                         // nothing; its first phase gets a token, so that a trace names every mbarrier
};
constexpr u32 NO_TOKEN = ~0u;
constexpr int PC_BITS = 24;
constexpr int GLOBAL_WORDS = 4;            // sectors of 32 bytes, wavefronts if it is shared memory, the lowest address (2)
constexpr int TENSOR_WORDS = 5;            // bytes in shared memory, requests of at most 128 bytes, the lowest address (2), bytes in global memory
constexpr u32 MMA_A_IN_TMEM = 1, MMA_PAIR = 2, MMA_TF32 = 4;

struct ClusterTrace {
    i64 number = 0;                        // of the cluster in the grid
    int nctas = 0;
    int tmem_columns = 0;                  // allocated by a CTA in all
    std::vector<std::vector<u32>> warps;   // CTA after CTA
    std::vector<u32> contributions;        // per token
    std::vector<u32> barriers;             // per token: BarrierKind << PLACE_BITS | place
};

enum BarrierKind : u32 { MBARRIER, NAMED, CLUSTER };
// Where a barrier is: of an mbarrier the CTA's rank << 24 | offset in shared memory / 8, of a named one the rank << 4 | its number.
constexpr int PLACE_BITS = 30;

// Records one cluster at a time. `before` looks at the operands while they are still there, `after` files the record when it has been
// executed (a record that blocks is looked at again).
class Recorder {
  public:
    Recorder(const Program&, const Launch&);
    void start(Cluster&);
    void before(Warp& w, const Record& r, i32 pc, u32 mask) {
        count = 0;
        if (kinds[pc] != Traced::plain) operands(w, r, kinds[pc], mask);
    }
    void after(Warp& w, i32 pc) {
        if (count) finish(w, kinds[pc]);
        auto& words = trace.warps[w.cta->rank * warps_per_cta + w.id];
        words.push_back((u32)pc | (u32)count << PC_BITS);
        if (count) words.insert(words.end(), payload, payload + count);
    }
    void passed(Warp& w, i32 pc) { trace.warps[w.cta->rank * warps_per_cta + w.id].push_back((u32)pc); }
    ClusterTrace take() { return std::move(trace); }

  private:
    static constexpr int MOST = 64;
    const Program& program;
    std::vector<Traced> kinds;
    int warps_per_cta;
    ClusterTrace trace;
    std::unordered_map<u64, u32> tokens;
    u32 payload[MOST];
    int count = 0;

    void operands(Warp&, const Record&, Traced, u32 mask);
    void finish(Warp&, Traced);
    void put(u32 word) { if (count < MOST) payload[count++] = word; }
    u32 token(BarrierKind kind, u32 place, u32 phase);
    u32 phase_token(Cluster&, u32 address, u32 phase);
    void contribute(Cluster&, u32 address);
    void lanes_in_memory(Warp&, const Record&, i32 slot, i64 offset, u32 bytes, u32 mask, int space);
    void tensor_tile(Warp&, const Record&, u32 mask, bool load);
    void bulk(Warp&, const Record&, Traced, u32 mask);
    void destinations(Warp&, const Record&, int lane, int flags, u32 to, u32 barrier);
    void named(Warp&, const Record&, Traced, u32 mask);
};

extern thread_local std::vector<ClusterTrace> last_traces;      // of the last run on this thread

}  // namespace emu
