// The timing model: replays the traces of some clusters on the modelled resources of the SMs that they occupy (timing/ has the
// constants with their sources, and what lies between this and a whole grid).
//
// Everything is in clocks of the SM. Warps are taken in the order of their time. A request reserves a resource and learns when it is
// served; a token (trace.h) knows when its last contribution happens, and wakes who waits for it.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>
#include "trace.h"

namespace emu {

// What the model needs of each record; timing/costs.py writes it.
enum Action : u8 {
    PLAIN, FREE, SHARED_LOAD, SHARED_STORE, GLOBAL_LOAD, GLOBAL_STORE, ATOMIC, COPY_ASYNC, COPY_COMMIT, COPY_WAIT, COPY_ARRIVE, TENSOR_LOAD,
    TENSOR_STORE, BULK_LOAD, BULK_COPY, BULK_STORE, BULK_COMMIT, BULK_WAIT, MMA, COMMIT, TMEM_LOAD, TMEM_STORE, TMEM_WAIT_LOAD,
    TMEM_WAIT_STORE, TMEM_COPY, ARRIVE, MBARRIER_WAIT, NAMED_WAIT, NAMED_ARRIVE, CLUSTER_ARRIVE, CLUSTER_WAIT, REMOTE_STORE, ORDER, BRANCH,
    EXIT, DEPENDENCY_WAIT, DEPENDENCY_LAUNCH, ACTIONS,
};
inline bool touches_memory(u8 action) { return action >= SHARED_LOAD && action <= COPY_ASYNC; }
// What nothing moves across: warps wait there, or go another way.
inline bool stops(u8 action) {
    return action == MBARRIER_WAIT || action == NAMED_WAIT || action == CLUSTER_WAIT || action == TMEM_WAIT_STORE || action == COPY_WAIT ||
           action == BULK_WAIT || (action >= ORDER && action <= DEPENDENCY_WAIT);
}
enum Pipe : u8 { NO_PIPE, FMA, ALU, XU, LSU, TMEM, WARP_MMA, PIPES };

struct Cost {
    u8 action, pipe;
    u16 n;                                 // registers of tcgen05.ld and st; groups that may stay pending; KiB of tcgen05.cp
    float issue;                           // slots
    float cycles;                          // of the pipe
    float latency;                         // until the result may be used
};

#define TIMING_CONSTANTS(X)                                                                                                              \
    X(scheduling_window) X(branch_latency) X(order_latency) X(shared_latency) X(shared_port_bytes) X(l1_latency) X(l1_bytes) X(l2_latency) \
    X(l2_bytes_per_sm) X(l2_bytes) X(hbm_latency) X(hbm_latency_loaded) X(hbm_bytes) X(hbm_cold_bytes) X(hbm_cold_rate) X(store_latency) X(atomic_latency)                   \
    X(tma_latency) X(tma_interval) X(tma_request) X(tma_first) X(tma_store_latency) X(tma_write_bytes) X(mma_overhead)                    \
    X(mma_pair_overhead) X(mma_latency_tmem) X(mma_latency_shared) X(mma_latency_fetch) X(mma_latency_pair) X(mma_smallest)               \
    X(tmem_load) X(tmem_store) X(tmem_latency) X(tmem_copy_bytes) X(arrive_latency) X(wake_latency) X(barrier_latency) X(cluster_latency) \
    X(remote_latency) X(cta_launch) X(exit_latency)

struct Constants {
#define FIELD(name) double name;
    TIMING_CONSTANTS(FIELD)
#undef FIELD
};

// What is served in total per window; a request is served in the first windows with room, so that one that comes early with a late
// time does not block others before it.
class Bucket {
  public:
    // `burst`: how fast one request is served where the window has room; by default no faster than the mean.
    explicit Bucket(double per_clock = 1, double burst = 0)
        : rate(per_clock), capacity(per_clock * WIDTH), burst(std::max(burst, per_clock)) {}
    // When `amount` that is asked for at `time` has been served.
    double reserve(double time, double amount) {
        if (amount <= 0) return time;
        busy += amount / rate;
        const size_t first = (size_t)(std::max(time, 0.0) / WIDTH);
        double end = time + amount / burst;
        for (size_t b = std::max(first, full);; ++b) {
            if (b >= used.size()) used.resize(b + 1 + b / 2, 0.0f);
            double room = capacity - used[b];
            if (b == first) room = std::min(room, ((b + 1) * WIDTH - time) * burst);
            if (room <= 0) continue;
            const double before = used[b], take = std::min(room, amount);
            used[b] += (float)take;
            amount -= take;
            if (amount > 1e-9) continue;
            if (b > first) end = std::max(end, b * WIDTH + (before + take) / burst);
            while (full < used.size() && capacity - used[full] <= 1e-6) ++full;
            return end;
        }
    }
    double busy = 0;                       // clocks

  private:
    static constexpr double WIDTH = 32;
    double rate, capacity, burst;
    std::vector<float> used;
    size_t full = 0;                       // all windows before this one are
};

// Global memory that a launch uses: which part of its reads and writes goes to HBM, the rest hits L2.
struct Region { u64 begin, end; double missing; };

struct Work {                              // one simulation
    const ClusterTrace* traces;
    i32 ntraces;
    const i32* order;                      // the clusters that these SMs run one after the other: indices of traces
    i32 norder;
    i32 resident;                          // of them at a time
    i32 ctas;                              // of a cluster, each on an SM of its own
    const Region* regions;
    i32 nregions;
    double dependency;                     // when the launch before is complete
    i32 detailed;                          // 1: segments for a timeline, of the first cluster
};

enum Resource : i32 { R_ISSUE, R_FMA, R_ALU, R_XU, R_LSU, R_TMEM, R_SHARED, R_TENSOR, R_MMA, R_TMA, R_L2, R_HBM, RESOURCES };

// For the timeline. row: warp of the cluster, or NWARPS + 4 * CTA + engine (0 tensor, 1 TMA load, 2 TMA store). `token`: what a
// wait was for, `releaser`: row and record of the last contribution to it; -1: none.
struct Segment { double begin, end; i32 row, pc, waits, token, releaser_row, releaser_pc; };

struct Modelled {
    double cycles;
    double dependents;                     // when every CTA has allowed the next launch to start; the end if one never did
    double busy[RESOURCES];                // clocks, mean of the SMs and of the four sub-partitions
    double bytes_l2, bytes_hbm;
    double stalls;                         // of all warps, at barriers
};

}  // namespace emu
