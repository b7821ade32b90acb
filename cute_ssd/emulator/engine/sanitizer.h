// What silicon does not tell: happens-before, proxy fences, undefined reads. Handlers report what they do; a null sanitizer
// makes every call free. All checks are made when an operation is *issued*, in whatever order the schedule issues them:
// what they conclude does not depend on when the asynchronous work is done.
#pragma once
#include "core.h"

namespace emu {

// strong_*: volatile, relaxed or stronger: no race with another strong access or an atomic.
enum class Access : u8 { read, write, atomic, strong_read, strong_write };
constexpr bool only_reads(Access a) { return a == Access::read || a == Access::strong_read; }
constexpr bool is_strong(Access a) { return a != Access::read && a != Access::write; }

// An asynchronous operation's own time line: it is over when a later wait says so.
//   mbarrier   complete_tx on an mbarrier's current phase: known to whoever observes that phase
//   store      st.async, red.async: as mbarrier, but in the generic proxy
//   tensor     tcgen05.mma / cp / shift: known through tcgen05.commit
//   bulk_read  cp.async.bulk store, source side: known after wait_group.read;  bulk_write: its global side, after wait_group
//   copy       cp.async (not bulk): known after cp.async.wait_group;           tmem_load / tmem_store: after tcgen05.wait
enum class Engine : u8 { mbarrier, tensor, bulk_read, bulk_write, copy, tmem_load, tmem_store, initialisation, store };

// What is done in tensor memory; `access` is tcgen05.ld and st, the others are of the tensor core. PTX ISA, "tcgen05 Memory Consistency Model", names the pairs of operations that are done in the order in which
// one thread issues them. Between products and copies all are taken for such pairs, as NVIDIA's own kernels do.
enum class Tensor : u8 { none, access, mma, cp, cp_4x256b, shift };
constexpr bool pipelined(Tensor first, Tensor second) {
    if (first <= Tensor::access || second <= Tensor::access) return false;
    if (first == Tensor::shift) return second == Tensor::mma || second == Tensor::cp_4x256b;
    return second != Tensor::shift || first == Tensor::mma;
}

// Whose threads a synchronising access or fence orders: those of the CTA, of the cluster, or of the device (.gpu and .sys).
enum class Scope : u8 { cta, cluster, gpu };

#define IF_CHECKED(w, call) do { if (::emu::Sanitizer* s_ = (w).cta->cluster->sanitizer) s_->call; } while (0)

struct Sanitizer {
    virtual ~Sanitizer() = default;
    virtual void start() = 0;                                    // a new cluster

    // ---- generic proxy: n bytes, of shared memory at the address of each of the lanes -------------------------------
    virtual void shared(Warp&, const Record&, u32 lanes, const u32* addresses, u32 n, Access) = 0;
    void shared(Warp& w, const Record& r, int lane, u32 address, u32 n, Access access) {
        u32 addresses[LANES];
        addresses[lane] = address;
        shared(w, r, 1u << lane, addresses, n, access);
    }
    virtual void global(Warp&, const Record&, u64 address, u64 n, Access, Scope) = 0;     // the scope of strong accesses and atomics

    // ---- asynchronous operations, at issue: one `begin`, then what it touches ---------------------------------------
    // `issuer` is the lane that issues; `mbarrier` the address of the barrier that will be signalled (Engine::mbarrier only).
    virtual void begin_async(Warp&, const Record&, int issuer, Engine, u32 mbarrier = 0) = 0;
    virtual void begin_tensor(Warp&, const Record&, int issuer, Tensor) = 0;
    virtual void async_shared(u32 address, u32 n, Access) = 0;
    virtual void async_shared_pieces(const Cta&, const u64* pieces, u32 first, u32 last) = 0;     // reads: a bit per 16 bytes, from offset 0 on
    virtual void async_global(u64 address, u64 n, Access) = 0;
    // tensor memory of `cta`: columns [column, column + n) of the lanes [lane, lane + lanes)
    virtual void async_tmem(Cta&, int lane, int lanes, int column, int n, Access) = 0;
    virtual void allocate_tmem(Cta&, int column, int n) = 0;     // contents become undefined
    // All use of it must be ordered before. Contents become undefined, unless it belongs to the peer of the warp's CTA.
    virtual void free_tmem(Warp&, const Record&, Cta&, int column, int n) = 0;

    // ---- ordering ---------------------------------------------------------------------------------------------------
    virtual void release(Warp&, u32 lanes, u32& sync) = 0;       // into a barrier object; `sync` is a handle, 0: none yet
    virtual void acquire(Warp&, u32 lanes, u32 sync) = 0;        // from it (named and cluster barriers: what was released so far)
    virtual void mbarrier_init(Warp&, const Record&, int lane, u32 address) = 0;
    virtual void mbarrier_init_fence(Warp&, u32 lanes) = 0;      // fence.mbarrier_init: the asynchronous proxy may signal them
    virtual void release_initialisations(Warp&, u32& sync) = 0;  // what a relaxed arrive at the cluster's barrier hands on
    virtual void mbarrier_use(Warp&, const Record&, int lane, u32 address) = 0;       // its init must be ordered before
    virtual void mbarrier_release(Warp&, u32 lanes, u32 address) = 0;                 // arrive with .release semantics
    virtual void mbarrier_phase(u32 address) = 0;                                     // a phase is complete
    virtual void mbarrier_acquire(Warp&, u32 lanes, u32 address) = 0;                 // a wait that saw the phase
    virtual void commit_tensor(Warp&, const Record&, int lane, u32 mbarrier) = 0;     // tcgen05.commit: everything issued so far
    virtual void commit_copies(Warp&, u32 lanes, u32 mbarrier) = 0;                   // cp.async.mbarrier.arrive
    virtual void await(Warp&, u32 lanes, Engine, u32 pending) = 0;                    // all but the youngest `pending` groups are over
    virtual void commit_group(Warp&, Engine) = 0;                                     // cp.async[.bulk].commit_group
    virtual void warp_sync(Warp&, u32 lanes) = 0;                // bar.warp.sync: they know what all of them did
    virtual void proxy_fence(Warp&, u32 lanes, bool shared, bool global) = 0;     // fence.proxy.async, of these state spaces
    virtual void tensor_fence(Warp&, u32 lanes, bool before) = 0;    // tcgen05.fence::before_thread_sync, or after_thread_sync
    virtual void fence(Warp&, u32 lanes, Scope) = 0;             // fence.acq_rel / membar
    virtual void global_release(Warp&, int lane, u64 address, Scope) = 0;         // atomic or store with release semantics
    virtual void global_acquire(Warp&, int lane, u64 address, Scope) = 0;

    virtual void wait_for_launches(Warp&, u32 lanes) = 0;        // griddepcontrol.wait
    virtual void launch_dependents(Warp&) = 0;                   // griddepcontrol.launch_dependents

    virtual void exit_warp(Warp&) = 0;
    virtual void finish() = 0;                                   // every warp has exited, the queues are drained
};

Sanitizer* make_sanitizer(Cluster&);

}  // namespace emu
