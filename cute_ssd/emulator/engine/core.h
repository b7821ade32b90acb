// The machine that the handlers act on: records, warps, CTAs, clusters, and what a handler may call.
//
// One Record is one decoded instruction (decode.py writes them, see `Record` there: the two layouts must agree).
// A handler executes one record for the lanes in `mask` of one warp. Registers are 32 lanes of 32 bits called slots:
// a 64-bit PTX register takes two consecutive slots (low, high), a 16- or 8-bit one the low bits of one slot (the rest is zero),
// a predicate one bit per lane.
#pragma once
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

// A class that only the engine itself calls: directly, and inlined where that helps.
#define INTERNAL __attribute__((visibility("hidden")))

namespace emu {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i8 = int8_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;

constexpr int LANES = 32;
constexpr u32 ALL_LANES = 0xffffffffu;
constexpr u32 SHARED_BASE = 1024;          // the first KiB of a CTA's window belongs to the system, as on the device
constexpr u32 RANK_SHIFT = 24;             // a shared address is rank_in_cluster << 24 | offset, as on the device
constexpr u32 OFFSET_MASK = 0xffffffu;
constexpr u64 SHARED_WINDOW = 0x7f00ull << 48;        // generic addresses of shared memory: above every numbered pointer
constexpr u64 LOCAL_WINDOW = SHARED_WINDOW + (1ull << 40);
constexpr int NUMBER_SHIFT = 48;           // where the number of its tensor stands in a pointer: pointers.py, Note [Numbered pointers]
constexpr u64 UNNUMBERED = ((u64)1 << NUMBER_SHIFT) - 1;
constexpr int TMEM_LANES = 128, TMEM_COLUMNS = 512;

// An address of the kernel without the number of its tensor.
inline u64 host_address(u64 address) { return address < SHARED_WINDOW ? address & UNNUMBERED : address; }

struct Record {
    i32 handler;                // index of the handler table (api.cpp: emu_handler_name)
    i32 guard;                  // predicate register, -1: none
    i32 guard_negated;
    i32 line;                   // PTX line, for messages
    i32 d, a, b, c, e;          // slots (or predicate numbers); -1: absent
    i32 pool;                   // start of a list in Program::pool, its meaning is the handler's
    i64 i0, i1;                 // immediates: address offsets, modes
    i32 sources, nsources;      // pool: slots that are read, predicates as ~number (for the check of undefined registers)
    i32 targets, ntargets;      // pool: slots and predicates that are written
    i32 use;                    // of undefined operands: 0 computes with them (the result is undefined), 1 copies them, 2 acts on
                                // them, 3 stores them (only the address is acted on), 4 computes by halves (f32x2)
    i32 opcode_class;           // index of decode.py's class names; -1: further record of the same instruction
};

struct Program {
    const Record* records;
    i32 nrecords;
    const i32* pool;
    i32 nslots, npredicates;
    const u32* initial;         // value of every slot before the kernel starts (constants; others 0xffffffff)
    const u8* constant;         // 1: the slot holds a constant or special register (it is defined)
    const i32* specials;        // pairs (number of the special register, slot), see `special_value`
    i32 nspecials;
    const i32* shared_symbols;  // slots that hold a shared address: the rank bits are added
    i32 nshared_symbols;
    const i32* param_symbols;   // pairs (low slot, offset): address of a parameter, two slots
    i32 nparam_symbols;
    i32 local_bytes;            // per thread
};

struct Range { u64 begin, end; };          // known global memory; of a numbered tensor, its numbered addresses

enum Schedule : i32 { EAGER = 0, LATE = 1, PRIORITY = 2 };

struct Options {
    i32 schedule;
    i32 sanitize;
    u64 seed;
    i32 threads;
    i32 implicit_waits;         // 1: the use of a tcgen05.ld result waits for it, as ptxas makes it; 0: only tcgen05.wait::ld does
    i32 tensor_fences;          // 1: tcgen05 operations of two threads need tcgen05.fence around what synchronises them (clocks.h)
    double time_limit;          // seconds that the whole grid may be expected to take
    const i64* traced;          // numbers of clusters to record (trace.h)
    i32 ntraced;
    i32 only_traced;            // 1: the others are not executed
};

struct Launch {
    i32 grid[3], block[3], cluster[3];
    i32 shared_bytes;           // static + dynamic, from SHARED_BASE on
    i32 dynamic_bytes;
    const u8* params;
    const Range* ranges;        // sorted, without overlaps
    i32 nranges;
    i32 sm_version;             // 100 for sm_100a
    i32 programmatic;           // 1: it may start before the launch before it is over
    const char* name;
};

// A fault ends the launch; a finding (Cluster::find) is collected and the launch goes on.
struct Fault {
    std::string kind, message;
    int line = 0;
    std::string who;
};

enum class Flow { next, block };           // block: nothing was done, execute this record again later

struct Warp;
struct Cta;
struct Cluster;
struct Sanitizer;
class GlobalShadow;
class Recorder;
using Handler = Flow (*)(Warp&, const Record&, u32 mask);

// Registers a handler under the name that decode.py emits.
struct Registration { Registration(const char* name, Handler handler); };
#define HANDLER(id, name)                                                                     \
    static ::emu::Flow id(::emu::Warp& w, const ::emu::Record& r, ::emu::u32 mask);           \
    static const ::emu::Registration register_##id(name, id);                                \
    static ::emu::Flow id([[maybe_unused]] ::emu::Warp& w, [[maybe_unused]] const ::emu::Record& r, [[maybe_unused]] ::emu::u32 mask)

// A piece of work of an asynchronous engine (TMA, tensor core, cp.async, tcgen05.st). Eager schedules run it at issue.
struct AsyncOp {
    std::function<void()> work;
    bool done = false;
    void run() { if (!done) { done = true; work(); } }
};
using AsyncRef = std::shared_ptr<AsyncOp>;

struct Group { i32 pc; u32 mask; };        // lanes of a warp that are at the same instruction

struct AsyncGroups {                       // cp.async and cp.async.bulk: committed groups, oldest first, and the open one
    std::deque<std::vector<AsyncRef>> committed;
    std::vector<AsyncRef> open;
    u32 ncommitted = 0;                    // since the start
};

struct Suspicion {                         // lanes of a register
    u32 undefined;                         // whose value depends on what nothing wrote
    u32 in_flight;                         // whose value a tcgen05.ld will bring (before wait::ld)
};

struct Warp {
    Cta* cta;
    int id;                                // in the CTA
    u32* regs;                             // nslots x 32
    u32* preds;
    Suspicion* suspicions = nullptr;       // per slot; of predicate p at ~p (sanitize only)
    std::vector<Group> groups;             // never empty while live
    u32 live = 0;                          // lanes that have not exited
    bool yielded = false;                  // it polled in vain (or ran out of its budget): give the others a turn
    i32 polled = -1;                       // the record at which it yielded
    u64 idle = 0;                          // instructions since it changed anything
    u32 vain = 0;                          // turns in a row in which it polled or spun: another group of lanes goes first
    bool spinning = false;                 // idle for long
    std::vector<u64> states;               // hashes of its registers while it spins and nothing happens in the cluster
    u64 states_events = 0;                 // events at that time
    bool stuck = false;                    // a state came again: it will spin until memory changes
    bool polls = false;                    // while it spun it looked at memory by strong loads or atomics
    bool may_time_out = false;             // nothing else can run: a blocked try_wait returns false, as the device's does in time
    AsyncGroups bulk, copies;              // cp.async.bulk stores; cp.async
    std::vector<AsyncRef> tmem_stores;     // tcgen05.st until wait::st
    std::vector<i32> tmem_load_slots;      // destinations of tcgen05.ld until wait::ld
    std::vector<u8> local;                 // local_bytes x 32, thread after thread
    u64 ninstructions = 0;

    u32* reg(i32 slot) { return regs + (i64)slot * LANES; }
    u32& reg(i32 slot, int lane) { return regs[(i64)slot * LANES + lane]; }
    u64 wide(i32 slot, int lane) { return reg(slot, lane) | (u64)reg(slot + 1, lane) << 32; }
    void set_wide(i32 slot, int lane, u64 value) { reg(slot, lane) = (u32)value; reg(slot + 1, lane) = (u32)(value >> 32); }
    void set_pred(i32 p, u32 mask, u32 bits) { preds[p] = (preds[p] & ~mask) | (bits & mask); }
    // false: not all lanes that must execute this .sync instruction together are here: return Flow::block
    bool converged(u32 mask, u32 members = ALL_LANES) const { return (members & live & ~mask) == 0; }
    std::string name() const;
};

struct Mbarrier {
    i32 count = 0;                         // arrivals of a phase; 0: not initialised
    i32 pending = 0;
    i64 tx = 0;                            // bytes expected and not yet there
    u32 phase = 0;                         // completed phases
    u32 sync = 0;                          // the sanitizer's handle
    int line = 0;                          // of its init
};

struct Allocation {
    int column, columns;
    bool paired = false, reserved = false, half_freed = false;     // tensor.h, Note [Pairs]
};

struct Cta {
    Cluster* cluster;
    int rank;                              // in the cluster
    int index[3];                          // blockIdx
    std::vector<u8> shared;                // from offset 0; the first SHARED_BASE bytes are never valid
    std::vector<Mbarrier> mbarriers;       // one per 8 bytes of shared memory
    u32 (*tmem)[TMEM_COLUMNS];             // [lane][column]
    std::vector<Allocation> allocations;   // of tensor memory
    bool alloc_permit = true;
    std::vector<Warp> warps;
    struct NamedBarrier { int arrived = 0; u32 generation = 0; u32 sync = 0; int expected = 0; } named[16];
    std::deque<AsyncRef> tensor_queue;     // in order
    std::vector<AsyncRef> tma_queue;       // in any order
    int nthreads;

    u32 address(u32 offset) const { return (u32)rank << RANK_SHIFT | offset; }
};

// All CTAs of one cluster: the unit that one host thread executes.
struct INTERNAL Cluster {
    const Program& program;
    const Launch& launch;
    const Options& options;
    std::vector<Handler> handlers;         // per record
    std::vector<std::unique_ptr<Cta>> ctas;
    Sanitizer* sanitizer = nullptr;        // null unless options.sanitize
    std::mt19937_64 random;
    bool late;                             // asynchronous work is queued instead of run at issue
    u64 events = 0;                        // changes of state that another warp can see
    struct { u32 arrived = 0, generation = 0, sync = 0; } barrier;   // barrier.cluster
    std::vector<u64> counts;               // executions per record
    u64 clock = 0;                         // instructions executed since the start: %clock
    u64 executed = 0;                      // by the clusters before, in this object
    std::vector<Fault> findings;
    int ctaid0[3] = {0, 0, 0};             // of the cluster's first CTA
    std::vector<std::string>* printed = nullptr;   // by vprintf, of all clusters, under print_lock
    std::mutex* print_lock = nullptr;

    GlobalShadow* global_shadow = nullptr; // of the grid, with sanitize
    i64 number = 0;                        // in the grid
    std::chrono::steady_clock::time_point deadline = std::chrono::steady_clock::time_point::max();     // of the launch
    Recorder* recorder = nullptr;          // where its trace goes, if anywhere

    Cluster(const Program&, const Launch&, const Options&);
    ~Cluster();
    void start(i64 which);                // the number-th cluster of the grid, everything poisoned
    bool run();                            // false: its warps poll memory that another cluster must change; throws Fault
    bool hopeless() const;                 // after run() gave false: nothing in the cluster itself will ever change that
    std::string waiting() const;           // who waits for what
    void find(const std::string& kind, const Warp* w, int line, const std::string& message);

    // --- what handlers call -------------------------------------------------------------------------------------------
    Cta& cta_of(u32 shared_address, const Warp& w, int line);            // by its rank bits
    // Bounds and alignment checked; n bytes. Faults name the warp and the line. (No race check: see sanitizer.h.)
    u8* shared_bytes(u32 address, u32 n, u32 align, const Warp& w, int line);
    u8* global_bytes(u64 address, u64 n, u32 align, const Warp& w, int line, const char* what = "global access");
    u8* local_bytes(u64 offset, u32 n, const Warp& w, int lane, int line);
    Mbarrier& mbarrier(u32 address, const Warp& w, int line);            // must be initialised
    void mbarrier_arrive(u32 address, i32 n, const Warp& w, int line);   // may complete the phase
    void mbarrier_expect(u32 address, i64 bytes, const Warp& w, int line);
    void mbarrier_complete(u32 address, i64 bytes, const Warp& w, int line);
    AsyncRef issue_tma(Cta&, std::function<void()> work);                // eager: runs now
    AsyncRef issue_tensor(Cta&, std::function<void()> work);
    AsyncRef issue_grouped(std::function<void()> work);                  // eager: runs now; late: when its group is awaited
    u64 roll() { return random(); }

  private:
    struct Free { void operator()(void* memory) const { std::free(memory); } };
    std::vector<std::unique_ptr<void, Free>> memory;                     // behind the pointers of warps and CTAs
    std::vector<i32> polling;                                            // records that look at memory which others change
    template <class T> T* allocate(size_t n);                            // not initialised; std::bad_alloc
    void settle(Mbarrier&, u32 address, const Warp& w, int line);
    bool step(Warp&, u64 quantum);
    u64 run_group(Warp&, size_t group, u64 quantum);
    void check_registers(Warp&, const Record&, u32 mask);
    void check_suspicious(Warp&, const Record&, u32 mask);
    bool pump_tma(Cta&);
    bool pump_tensor(Cta&);
    bool pump_any();
    bool round_robin();
    bool by_priority();
    bool live() const;
    void finish();                                                       // drains the queues, checks what is left behind
    bool turn(Warp&, u64 quantum);                                       // a step that achieved something
    bool seen_before(Warp&);
    void find_polling();
    u64 polls() const;                                                   // how often those were executed
    void check_time() const;
    bool stall();                                                        // nothing moved: time out polls, or give up
    u64 stall_events = ~0ull;
    int stalls = 0;
    Range known{0, 0};                     // the range found last
};

[[noreturn]] void fault(const std::string& kind, const Warp& w, int line, const std::string& message);
std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));
Handler handler_at(int index);
const std::vector<std::string>& handler_names();

// Applies f(lane) to the lanes of a mask; the full mask becomes a loop the compiler vectorises.
template <class F> inline void each_lane(u32 mask, F f) {
    if (mask == ALL_LANES) {
#pragma GCC ivdep
        for (int lane = 0; lane < LANES; ++lane) f(lane);
    } else {
        for (u32 m = mask; m; m &= m - 1) f(__builtin_ctz(m));
    }
}
inline int first_lane(u32 mask) { return __builtin_ctz(mask); }
inline float as_float(u32 bits) { float f; std::memcpy(&f, &bits, 4); return f; }
inline u32 as_bits(float f) { u32 bits; std::memcpy(&bits, &f, 4); return bits; }
inline double as_double(u64 bits) { double f; std::memcpy(&f, &bits, 8); return f; }
inline u64 as_bits(double f) { u64 bits; std::memcpy(&bits, &f, 8); return bits; }

}  // namespace emu
