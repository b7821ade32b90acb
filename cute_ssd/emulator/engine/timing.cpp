#include "timing.h"
#include <queue>

namespace emu {

namespace {

struct Sm {
    std::vector<Bucket> issue, pipes[PIPES];                                   // per sub-partition
    Bucket lsu, shared, tensor, l1;
    double tensor_free = 0, tensor_done = 0, mma = 0, tma_front = 0, tma_rows = 0, tma_busy = 0;
    bool cold = true;                                                          // no tensor map has been fetched yet
    std::vector<u64> lines = std::vector<u64>(1024, ~0ull);                    // of L1, by address

    explicit Sm(const Constants& c) : issue(4), lsu(1), shared(c.shared_port_bytes), l1(c.l1_bytes) {
        for (auto& pipe : pipes) pipe.resize(4);
    }
};

// An SM's share of HBM. Other SMs use what it leaves, but for a while it may still have it: then it is served faster than its share, and
// still never gets more in all.
class Share {
  public:
    Share(double per_clock, double burst) : rate(per_clock), capacity(per_clock * WIDTH), burst(std::max(burst, per_clock)) {}
    // When `amount` that is asked for at `time` has been served. `steady`: all SMs ask at once, nobody leaves anything.
    double reserve(double time, double amount, bool steady = false) {
        if (amount <= 0) return time;
        busy += amount / rate;
        const size_t now = (size_t)(std::max(time, 0.0) / WIDTH), oldest = std::max(full, now - std::min(now, steady ? 0 : CREDIT));
        const double speed = steady ? rate : burst;
        double end = time + amount / speed;
        if (used.size() <= now) used.resize(now + 1 + now / 2, 0.0f);
        for (size_t b = now + 1; b-- > oldest && amount > 0;) {
            const double most = b == now ? std::min(capacity, ((b + 1) * WIDTH - time) * speed) : capacity;
            amount -= take(b, std::min(amount, most));
        }
        for (size_t b = std::max(now + 1, full); amount > 1e-9; ++b) {
            if (b >= used.size()) used.resize(b + 1 + b / 2, 0.0f);
            amount -= take(b, amount);
            end = std::max(end, b * WIDTH + used[b] / rate);
        }
        while (full < used.size() && capacity - used[full] <= 1e-6) ++full;
        return end;
    }
    // How much it has taken of what it might have had in the while before `time`, 0 to 1.
    double load(double time) const {
        const size_t end = std::min(used.size(), (size_t)(std::max(time, 0.0) / WIDTH) + 1), begin = end - std::min(end, CREDIT);
        double sum = 0;
        for (size_t b = begin; b < end; ++b) sum += used[b];
        return std::min(1.0, sum / (capacity * CREDIT));
    }
    double busy = 0;                       // clocks

  private:
    static constexpr double WIDTH = 32;
    static constexpr size_t CREDIT = 64;   // windows
    double rate, capacity, burst;
    std::vector<float> used;               // per window
    size_t full = 0;                       // all windows before this one are

    double take(size_t b, double most) {
        const double taken = std::clamp(capacity - used[b], 0.0, most);
        used[b] += (float)taken;
        return taken;
    }
};

struct Token { u32 left = 0; double time = 0; i32 row = -1, pc = -1; std::vector<i32> waiting; };

struct WarpState {
    const u32* at;
    const u32* end;
    i32 instance, cta, row, partition;                                         // row: in the cluster
    double base = 0, last = 0;                                                 // nothing issues before `base`; the latest issue
    double order = 0, touched = 0;                                             // of volatile instructions; the latest access to memory
    double stores = 0, tmem_reads = 0, tmem_writes = 0;                        // when they are done
    double copies = 0, bulk_read = 0, bulk_write = 0;                          // of the open groups
    std::vector<double> copy_groups;
    std::vector<std::pair<double, double>> bulk_groups;                        // read, written
    size_t copies_gone = 0, bulk_gone = 0;
    std::vector<double> ready, window;                                         // per slot and predicate; issue times, a ring
    size_t issued = 0;
    u32 awaited = NO_TOKEN;
    double since = 0, mark = 0;                                                // parked; the end of its last wait
    i32 mark_pc = 0;
    i32 wait_pc = -1;
};

struct Instance { const ClusterTrace* trace; std::vector<Token> tokens; int running = 0; int first_sm = 0; };

class Simulation {
  public:
    Simulation(const Program& p, const Cost* costs, const Constants& constants, const Work& work)
        : program(p), costs(costs), k(constants), work(work), l2(constants.l2_bytes * work.ctas, constants.l2_bytes_per_sm * work.ctas),
          hbm(constants.hbm_bytes * work.ctas, constants.l2_bytes_per_sm * work.ctas) {
        for (int i = 0; i < work.ctas; ++i) sms.emplace_back(constants);
    }

    void run() {
        for (next = 0; next < std::min(work.norder, work.resident);) launch(0);
        while (!queue.empty()) {
            const auto [time, index] = queue.top();
            queue.pop();
            advance(index);
        }
        for (const WarpState& w : warps)
            if (w.awaited != NO_TOKEN) throw Fault{"timing", format("warp %d waits at record %d for a phase that the trace never completes", w.row, w.wait_pc), 0, ""};
    }

    Modelled outcome() const;
    std::vector<Segment> segments;

  private:
    const Program& program;
    const Cost* costs;
    const Constants& k;
    const Work& work;
    std::vector<Sm> sms;
    Bucket l2;
    Share hbm;
    std::vector<Instance> instances;
    std::vector<WarpState> warps;
    using Entry = std::pair<double, i32>;
    std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> queue;
    i32 next = 0;
    double finish = 0, dependents = 0, stalls = 0, bytes_l2 = 0, bytes_hbm = 0;
    size_t launchers = 0;

    Sm& sm(const WarpState& w) { return sms[w.cta]; }
    bool detailed(const WarpState& w) const { return work.detailed && w.instance == 0; }
    void segment(const WarpState& w, double begin, double end, i32 row, i32 pc, i32 waits = 0, i32 token = -1, i32 by = -1, i32 by_pc = -1) {
        if (detailed(w) && end > begin) segments.push_back({begin, end, row, pc, waits, token, by, by_pc});
    }
    // A warp waits from `begin` to `end`, and has been at work since its last wait.
    void waited(WarpState& w, double begin, double end, i32 pc, i32 token = -1, i32 by = -1, i32 by_pc = -1) {
        if (!detailed(w) || end <= begin) return;
        segment(w, w.mark, begin, w.row, w.mark_pc);
        segment(w, begin, end, w.row, pc, 1, token, by, by_pc);
        w.mark = end, w.mark_pc = pc;
    }
    i32 engine_row(const WarpState& w, int engine) const { return (i32)instances[w.instance].trace->warps.size() + 4 * w.cta + engine; }

    void launch(double time) {
        const i32 number = (i32)instances.size();
        instances.push_back({&work.traces[work.order[next++]], {}, 0});
        Instance& instance = instances.back();
        instance.tokens.resize(instance.trace->contributions.size());
        for (size_t t = 0; t < instance.tokens.size(); ++t) instance.tokens[t].left = instance.trace->contributions[t];
        const int per_cta = (int)instance.trace->warps.size() / work.ctas;
        for (size_t i = 0; i < instance.trace->warps.size(); ++i) {
            const auto& words = instance.trace->warps[i];
            if (words.empty()) continue;
            WarpState w;
            w.at = words.data(), w.end = words.data() + words.size();
            w.instance = number, w.cta = (i32)i / per_cta, w.row = (i32)i;
            w.partition = (number * per_cta + (i32)i % per_cta) % 4;           // small CTAs spread over all of them
            w.base = w.last = w.mark = time + k.cta_launch;
            w.mark_pc = (i32)(words[0] & ((1u << PC_BITS) - 1));
            w.ready.assign(program.nslots + program.npredicates + 1, 0.0);
            w.window.assign((size_t)k.scheduling_window, 0.0);
            ++instance.running;
            warps.push_back(std::move(w));
            queue.push({warps.back().base, (i32)warps.size() - 1});
        }
    }

    double& ready(WarpState& w, i32 operand) { return operand >= 0 ? w.ready[operand] : w.ready[program.nslots + ~operand]; }

    void contribute(WarpState& w, u32 t, double time, i32 pc) {
        Token& token = instances[w.instance].tokens[t];
        if (time >= token.time) token.time = time, token.row = w.row, token.pc = pc;
        if (--token.left) return;
        for (const i32 index : token.waiting) {
            WarpState& other = warps[index];
            wake(other, token);
            queue.push({other.base, index});
        }
        token.waiting.clear();
    }

    void wake(WarpState& w, const Token& token) {
        const double at = std::max(w.since, token.time + k.wake_latency);
        waited(w, w.since, at, w.wait_pc, (i32)w.awaited, token.row, token.pc);
        stalls += at - w.since;
        w.base = w.last = w.order = at;
        w.awaited = NO_TOKEN;
    }

    // False: parked.
    bool wait(WarpState& w, i32 index, u32 t, double time, i32 pc) {
        w.since = w.base = w.last = time;
        w.wait_pc = pc;
        if (t == NO_TOKEN) return true;
        Token& token = instances[w.instance].tokens[t];
        w.awaited = t;
        if (!token.left) {
            wake(w, token);
            return true;
        }
        token.waiting.push_back(index);
        return false;
    }

    double missing(u64 address) const {
        const Region* const end = work.regions + work.nregions;
        const Region* r = std::upper_bound(work.regions, end, address, [](u64 a, const Region& x) { return a < x.begin; });
        return r != work.regions && address < (r - 1)->end ? (r - 1)->missing : 1.0;
    }

    // When `bytes` that are asked for at `time` have come from L2 or HBM, beside the latency of the unit that asks.
    double fetch(double time, double bytes, u64 address) {
        const double far = missing(address);
        bytes_l2 += bytes;
        bytes_hbm += bytes * far;
        double end = l2.reserve(time, bytes);
        if (far > 0) {
            const bool cold = bytes_hbm <= k.hbm_cold_bytes * work.ctas;
            const double served = hbm.reserve(time, bytes * far * (cold ? k.hbm_bytes / k.hbm_cold_rate : 1.0), cold);
            const double slower = far * (k.hbm_latency + k.hbm_latency_loaded * std::sqrt(std::max(hbm.load(time), hbm.load(served))));
            end = std::max(end, served) + slower;
        }
        return end;
    }

    void drain(double time, double bytes, u64 address) {                       // writes: nobody waits for HBM
        const double far = missing(address);
        bytes_l2 += bytes;
        bytes_hbm += bytes * far;
        finish = std::max({finish, l2.reserve(time, bytes), hbm.reserve(time, bytes * far)});
    }

    // The TMA unit takes requests of at most 128 bytes in order. Returns when the first and the last one leave it.
    std::pair<double, double> through_tma(Sm& s, double time, double requests) {
        const double begin = std::max(time, s.tma_front);
        s.tma_front = begin + k.tma_interval;
        const double first = std::max(begin, s.tma_rows);
        s.tma_rows = first + requests * k.tma_request;
        s.tma_busy += std::max(requests * k.tma_request, k.tma_interval);
        return {first, s.tma_rows};
    }

    void advance(i32 index);
    void memory(WarpState& w, const Cost& c, const u32* payload, double start, double& result);
    void tensor_load(WarpState& w, const Cost& c, i32 pc, const u32* payload, u32 n, double start);
    void tensor_store(WarpState& w, i32 pc, const u32* payload, double start);
    void mma(WarpState& w, i32 pc, const u32* payload, double start);
    void end_warp(WarpState& w, double time);
};

void Simulation::memory(WarpState& w, const Cost& c, const u32* payload, double start, double& result) {
    Sm& s = sm(w);
    const bool shared_only = c.action == SHARED_LOAD || c.action == SHARED_STORE;
    const double wavefronts = shared_only ? payload[0] : payload[1];
    if (wavefronts > 0) {
        const double end = s.shared.reserve(start, wavefronts * k.shared_port_bytes);
        result = end + k.shared_latency;
        w.stores = std::max(w.stores, end + k.shared_latency / 2);
        if (shared_only || !payload[0]) return;
    }
    const double bytes = 32.0 * payload[0];
    const u64 address = payload[2] | (u64)payload[3] << 32;
    if (bytes == 0) { result = start + c.latency; return; }
    const double out = s.l1.reserve(start, bytes);
    if (c.action == GLOBAL_STORE) {
        drain(out, bytes, address);
        finish = std::max(finish, out + k.store_latency);
        w.stores = std::max(w.stores, out + k.order_latency);
    } else if (c.action == ATOMIC) {
        drain(out, bytes, address);
        result = out + k.atomic_latency;
        finish = std::max(finish, result);
    } else {
        u64& line = s.lines[(address >> 7) % s.lines.size()];
        const bool near = c.action == GLOBAL_LOAD && bytes <= 128 && line == address >> 7;
        if (c.action == GLOBAL_LOAD && bytes <= 128) line = address >> 7;
        result = near ? out + k.l1_latency : fetch(out, bytes, address) + k.l2_latency;
        if (c.action == COPY_ASYNC) {
            result = s.shared.reserve(result, bytes);
            w.copies = std::max(w.copies, result);
        }
    }
}

void Simulation::tensor_load(WarpState& w, const Cost& c, i32 pc, const u32* payload, u32 n, double start) {
    Sm& s = sm(w);
    const double bytes = payload[0], inside = payload[4];
    const u64 address = payload[2] | (u64)payload[3] << 32;
    auto [first, end] = through_tma(s, start, payload[1]);
    const bool local = c.action == BULK_COPY;
    if (s.cold && !local) first += k.tma_first, end += k.tma_first, s.cold = false;
    // The bytes of a copy stream: they are written while others are still to come.
    const double latency = local ? k.remote_latency : k.tma_latency;
    const double arrived = (local ? s.shared.reserve(first, bytes) : std::max(end, fetch(first, inside, address))) + latency;
    double last = arrived;
    for (u32 i = TENSOR_WORDS; i + 1 < n; i += 2) {
        Sm& to = sms[payload[i] % sms.size()];
        const double from = std::max(first + latency, arrived - bytes / k.tma_write_bytes);
        const double written = std::max({arrived, to.shared.reserve(from, bytes * k.shared_port_bytes / k.tma_write_bytes), to.tensor.reserve(from, bytes / k.tma_write_bytes)});
        contribute(w, payload[i + 1], written, pc);
        last = std::max(last, written);
    }
    finish = std::max(finish, last);
    segment(w, start, last, engine_row(w, 1), pc);
}

void Simulation::tensor_store(WarpState& w, i32 pc, const u32* payload, double start) {
    Sm& s = sm(w);
    const double bytes = payload[0];
    const u64 address = payload[2] | (u64)payload[3] << 32;
    const auto [first, end] = through_tma(s, start, payload[1]);
    const double read = std::max(end, s.shared.reserve(first, bytes));
    drain(read, payload[4], address);
    const double written = read + k.tma_store_latency;
    w.bulk_read = std::max(w.bulk_read, read);
    w.bulk_write = std::max(w.bulk_write, written);
    finish = std::max(finish, written);
    segment(w, start, written, engine_row(w, 2), pc);
}

// The rate is that of the tensor core or of the fetch of its operands, 128 bytes per clock, whichever is slower; both CTAs of a pair
// hold half of B each.
void Simulation::mma(WarpState& w, i32 pc, const u32* payload, double start) {
    const double m = payload[0] & 0xffff, n = payload[0] >> 16;
    const bool in_tmem = payload[1] & MMA_A_IN_TMEM, pair = payload[1] & MMA_PAIR;
    const double a = in_tmem ? 0 : 32 * (pair ? m / 2 : m), b = 32 * (pair ? n / 2 : n);
    const double rows = pair ? m / 2 : m, core = pair && m == 128 ? n / 4 : n / 2;
    double clocks = std::max(core, (a + b) / k.shared_port_bytes);
    if (in_tmem && pair) clocks = std::max(clocks, 18.0);
    if (payload[1] & MMA_TF32) clocks = std::max(2 * core, clocks);
    if (pair && !in_tmem && clocks > core) clocks += rows == 128 ? k.mma_pair_overhead : 1;
    clocks = std::max(clocks + k.mma_overhead, k.mma_smallest);
    double latency = pair ? k.mma_latency_pair : in_tmem ? k.mma_latency_tmem : k.mma_latency_shared;
    if (!in_tmem && rows == 128) latency += std::clamp((n - 64) / 4, 0.0, k.mma_latency_fetch);
    if (pair && !in_tmem) latency += k.mma_latency_fetch;
    const int first = pair ? w.cta & ~1 : w.cta, last = pair ? std::min<int>(first + 1, (int)sms.size() - 1) : first;
    double begin = start;
    for (int i = first; i <= last; ++i) begin = std::max(begin, sms[i].tensor_free);
    double end = begin;
    for (int i = first; i <= last; ++i) {
        end = std::max({end, sms[i].tensor.reserve(begin, clocks), sms[i].shared.reserve(begin, a + b)});
        sms[i].mma += clocks;
    }
    for (int i = first; i <= last; ++i) sms[i].tensor_free = end, sms[i].tensor_done = std::max(sms[i].tensor_done, end + latency);
    segment(w, begin, end, engine_row(w, 0), pc);
}

void Simulation::end_warp(WarpState& w, double time) {
    finish = std::max({finish, time, w.stores, w.bulk_write});
    segment(w, w.mark, time, w.row, w.mark_pc);
    Instance& instance = instances[w.instance];
    std::vector<double>().swap(w.ready);
    if (--instance.running) return;
    std::vector<Token>().swap(instance.tokens);
    if (next < work.norder) launch(time + k.exit_latency);
}

// Replays a warp until its time is behind another's.
void Simulation::advance(i32 index) {
    for (;;) {
        WarpState& w = warps[index];
        if (w.at == w.end) return end_warp(w, w.last);
        const i32 pc = (i32)(*w.at & ((1u << PC_BITS) - 1));
        const u32 n = *w.at >> PC_BITS;
        const u32* const payload = w.at + 1;
        const Record& r = program.records[pc];
        const Cost& c = costs[pc];
        const i32 *sources = program.pool + r.sources, *targets = program.pool + r.targets;
        double start = std::max(w.base, w.window[w.issued % w.window.size()]);
        if (c.action == FREE) {                                                // ptxas renames registers
            double when = 0;
            for (i32 i = 0; i < r.nsources; ++i) when = std::max(when, ready(w, sources[i]));
            const bool each = r.nsources == r.ntargets;
            if (each && r.ntargets == 2) {
                const double second = ready(w, sources[1]);
                ready(w, targets[0]) = ready(w, sources[0]), ready(w, targets[1]) = second;
            } else
                for (i32 i = 0; i < r.ntargets; ++i) ready(w, targets[i]) = when;
            w.at += 1 + n;
            continue;
        }
        if (!queue.empty() && queue.top().first < start) return queue.push({start, index});
        w.at += 1 + n;
        for (i32 i = 0; i < r.nsources; ++i) start = std::max(start, ready(w, sources[i]));
        if (r.guard >= 0) start = std::max(start, ready(w, ~r.guard));
        // ptxas keeps accesses and volatile instructions in their order, moves arithmetic past them, and nothing past a wait.
        const bool access = touches_memory(c.action), ordered = c.action >= COPY_COMMIT;
        if (access) start = std::max(start, w.order);
        if (ordered) start = std::max({start, w.order, w.touched});
        if (stops(c.action)) start = std::max(start, w.last);
        Sm& s = sm(w);
        if (c.issue > 0) start = std::max(start, s.issue[w.partition].reserve(start, c.issue) - c.issue);
        if (c.pipe != NO_PIPE) start = std::max(start, s.pipes[c.pipe][w.partition].reserve(start, c.cycles) - c.cycles);
        w.window[w.issued++ % w.window.size()] = start;
        w.last = std::max(w.last, start);
        if (access) w.touched = std::max(w.touched, start);
        if (ordered) w.order = start;
        if (stops(c.action)) w.base = start;
        double result = start + c.latency;
        switch (c.action) {
            case SHARED_LOAD: case SHARED_STORE: case GLOBAL_LOAD: case GLOBAL_STORE: case ATOMIC: case COPY_ASYNC:
                if (n) memory(w, c, payload, start, result);
                break;
            case COPY_COMMIT: w.copy_groups.push_back(w.copies); break;
            case COPY_WAIT:
                for (; w.copy_groups.size() - w.copies_gone > c.n; ++w.copies_gone) w.base = std::max(w.base, w.copy_groups[w.copies_gone]);
                waited(w, start, w.base, pc);
                break;
            case TENSOR_LOAD: case BULK_LOAD: case BULK_COPY:
                if (n) tensor_load(w, c, pc, payload, n, start);
                break;
            case TENSOR_STORE: case BULK_STORE:
                if (n) tensor_store(w, pc, payload, start);
                break;
            case BULK_COMMIT:
                w.bulk_groups.push_back({w.bulk_read, w.bulk_write});
                break;
            case BULK_WAIT:                                                    // latency < 0: only until the shared memory has been read
                for (; w.bulk_groups.size() - w.bulk_gone > c.n; ++w.bulk_gone) {
                    const auto& group = w.bulk_groups[w.bulk_gone];
                    w.base = std::max(w.base, c.latency < 0 ? group.first : group.second);
                }
                waited(w, start, w.base, pc);
                break;
            case MMA: if (n) mma(w, pc, payload, start); break;
            case TMEM_COPY: {
                const double bytes = 1024.0 * c.n, begin = std::max(start, s.tensor_free);
                s.shared.reserve(begin, bytes);
                s.tensor_free = s.tensor.reserve(begin, bytes / k.tmem_copy_bytes);
                s.tensor_done = std::max(s.tensor_done, s.tensor_free + k.mma_latency_shared);
                break;
            }
            case COMMIT: case ARRIVE: case NAMED_ARRIVE: case CLUSTER_ARRIVE: case COPY_ARRIVE: {
                double time = std::max({start, w.tmem_reads, w.stores}) + (c.action == ARRIVE ? k.arrive_latency : 0);
                if (c.action == COMMIT) time = std::max(start, s.tensor_done);
                if (c.action == COPY_ARRIVE) time = std::max(time, w.copies);
                for (u32 i = 0; i < n; ++i) contribute(w, payload[i], time, pc);
                break;
            }
            case REMOTE_STORE:
                if (n > 1) {
                    const double time = s.shared.reserve(start, payload[0]) + k.remote_latency;
                    for (u32 i = 1; i < n; ++i) contribute(w, payload[i], time, pc);
                }
                break;
            case TMEM_LOAD: w.tmem_reads = std::max(w.tmem_reads, result = start + c.cycles + k.tmem_latency); break;
            case TMEM_STORE: w.tmem_writes = std::max(w.tmem_writes, start + c.cycles + k.tmem_latency); break;
            case TMEM_WAIT_LOAD: break;                                        // SASS has none: registers wait where they are used
            case TMEM_WAIT_STORE: w.base = std::max(w.base, w.tmem_writes); break;
            case MBARRIER_WAIT:
                if (n && !wait(w, index, payload[0], start, pc)) return;
                result = w.base;
                break;
            case NAMED_WAIT: case CLUSTER_WAIT: {
                if (!n) break;
                const double arrives = std::max({start, w.tmem_reads, w.stores}) + (c.action == NAMED_WAIT ? k.barrier_latency : k.cluster_latency) - k.wake_latency;
                if (c.action == NAMED_WAIT) contribute(w, payload[0], arrives, pc);
                if (!wait(w, index, payload[0], start, pc)) return;
                break;
            }
            case ORDER: w.base = std::max(start + c.latency, w.stores); break;
            case BRANCH: w.base = start + c.latency; break;
            case EXIT: w.last = std::max(w.last, start); break;
            case DEPENDENCY_WAIT: w.base = std::max(start, work.dependency); waited(w, start, w.base, pc); break;
            case DEPENDENCY_LAUNCH: dependents = std::max(dependents, start), ++launchers; break;
            default: break;
        }
        for (i32 i = 0; i < r.ntargets; ++i) ready(w, targets[i]) = result;
    }
}

Modelled Simulation::outcome() const {
    Modelled o{};
    o.cycles = finish;
    o.dependents = launchers ? dependents : finish;
    o.stalls = stalls, o.bytes_l2 = bytes_l2, o.bytes_hbm = bytes_hbm;
    const double n = (double)sms.size();
    const int of_pipe[PIPES] = {-1, R_FMA, R_ALU, R_XU, R_LSU, R_TMEM, R_MMA};
    for (const Sm& s : sms) {
        for (int i = 0; i < 4; ++i) {
            o.busy[R_ISSUE] += s.issue[i].busy / 4 / n;
            for (int p = 1; p < PIPES; ++p) o.busy[of_pipe[p]] += s.pipes[p][i].busy / 4 / n;
        }
        o.busy[R_SHARED] += s.shared.busy / n;
        o.busy[R_TENSOR] += (s.tensor.busy - s.mma) / n;
        o.busy[R_MMA] += s.mma / n;
        o.busy[R_TMA] += s.tma_busy / n;
    }
    o.busy[R_TENSOR] += o.busy[R_MMA];
    o.busy[R_L2] = l2.busy, o.busy[R_HBM] = hbm.busy;
    return o;
}

}  // namespace

}  // namespace emu

using namespace emu;

extern "C" {

// Traces as engine.py holds them: per warp a pointer and a length, cluster after cluster.
struct TraceData { i64 number; i32 nctas, nwarps; const u32* const* words; const u64* sizes; const u32* contributions; u64 ncontributions; };

int emu_cost_size() { return (int)sizeof(Cost); }
int emu_timing_actions() { return ACTIONS; }

const char* emu_timing_constant(int i) {
#define NAME(name) #name,
    static const char* const names[] = {TIMING_CONSTANTS(NAME) nullptr};
#undef NAME
    return i < (int)(sizeof names / sizeof *names) ? names[i] : nullptr;
}

// Returns the number of segments, or -1 with a sentence in `error`.
i64 emu_timing(const Program* program, const Cost* costs, const double* constants, const TraceData* data, i32 ndata, Work* work, Modelled* outcome,
               Segment* segments, i64 room, char* error, i32 error_size) {
    Constants k;
    std::memcpy(&k, constants, sizeof k);
    std::vector<ClusterTrace> traces(ndata);
    for (i32 i = 0; i < ndata; ++i) {
        traces[i].number = data[i].number, traces[i].nctas = data[i].nctas;
        for (i32 j = 0; j < data[i].nwarps; ++j) traces[i].warps.emplace_back(data[i].words[j], data[i].words[j] + data[i].sizes[j]);
        traces[i].contributions.assign(data[i].contributions, data[i].contributions + data[i].ncontributions);
    }
    work->traces = traces.data(), work->ntraces = ndata;
    try {
        Simulation simulation(*program, costs, k, *work);
        simulation.run();
        *outcome = simulation.outcome();
        std::copy_n(simulation.segments.data(), std::min<i64>(room, (i64)simulation.segments.size()), segments);
        return (i64)simulation.segments.size();
    } catch (const Fault& f) {
        std::snprintf(error, error_size, "%s", f.message.c_str());
        return -1;
    }
}

// Bytes that a trace reads from and writes to each region of global memory; what lies in none of them goes to the last element.
void emu_traffic(const Cost* costs, const TraceData* data, const Region* regions, i32 nregions, double* reads, double* writes) {
    for (i32 j = 0; j < data->nwarps; ++j)
        for (u64 at = 0; at < data->sizes[j];) {
            const u32 *word = data->words[j] + at, n = *word >> PC_BITS, *payload = word + 1;
            const u8 action = costs[*word & ((1u << PC_BITS) - 1)].action;
            at += 1 + n;
            if (n < GLOBAL_WORDS || action == SHARED_LOAD || action == SHARED_STORE) continue;
            const bool lanes = action == GLOBAL_LOAD || action == GLOBAL_STORE || action == ATOMIC || action == COPY_ASYNC;
            const bool tile = action == TENSOR_LOAD || action == TENSOR_STORE || action == BULK_LOAD || action == BULK_STORE;
            if (!lanes && !tile) continue;
            const u64 address = payload[2] | (u64)payload[3] << 32;
            const double bytes = lanes ? 32.0 * payload[0] : payload[4];
            const Region* const end = regions + nregions;
            const Region* r = std::upper_bound(regions, end, address, [](u64 a, const Region& x) { return a < x.begin; });
            const i64 index = r != regions && address < (r - 1)->end ? r - 1 - regions : nregions;
            const bool writes_it = action == GLOBAL_STORE || action == TENSOR_STORE || action == BULK_STORE || action == ATOMIC;
            (writes_it ? writes : reads)[index] += bytes;
        }
}

}  // extern "C"
