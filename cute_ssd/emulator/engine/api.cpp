// The boundary to Python: the table of handlers, and running a grid. engine.py mirrors the structures.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include "core.h"
#include "global_shadow.h"
#include "trace.h"

namespace emu {

struct Table { std::vector<std::string> names; std::vector<Handler> handlers; std::map<std::string, int> index; };

static Table& table() {
    static Table t{{"bra", "exit", "brx.idx"}, {nullptr, nullptr, nullptr}, {{"bra", 0}, {"exit", 1}, {"brx.idx", 2}}};
    return t;
}

Registration::Registration(const char* name, Handler handler) {
    Table& t = table();
    if (!t.index.emplace(name, (int)t.names.size()).second) std::terminate();       // a name must have one implementation
    t.names.push_back(name);
    t.handlers.push_back(handler);
}

Handler handler_at(int index) { return table().handlers.at(index); }
const std::vector<std::string>& handler_names() { return table().names; }

// Executes the clusters of a grid on several host threads. A cluster that polls global memory is set aside until others have run.
struct INTERNAL Grid {
    Grid(const Program& p, const Launch& l, const Options& o) : program(p), launch(l), options(o) {}

    const Program& program;
    const Launch& launch;
    const Options& options;
    std::atomic<i64> next{0};
    std::atomic<u64> finished{0};
    std::atomic<u64> progress{0};                              // clusters that started, did something, or finished
    std::atomic<int> hopeful{0};                               // threads whose clusters may still go on by themselves
    std::atomic<bool> stop{false}, out_of_memory{false};
    std::mutex lock;
    struct Found { i64 cluster; Fault fault; };
    static constexpr i64 OF_THE_GRID = INT64_MAX;              // no cluster's own: anything that a cluster did comes first
    std::vector<Found> findings;
    std::optional<Found> fatal;
    std::vector<u64> counts;
    std::vector<std::string> printed;
    u64 instructions = 0;
    std::shared_ptr<GlobalShadow> shadow = std::make_shared<GlobalShadow>();
    std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();

    std::vector<std::unique_ptr<Recorder>> recorders;
    std::vector<ClusterTrace> traces;

    i64 size() const {
        if (options.only_traced) return options.ntraced;
        return (i64)launch.grid[0] * launch.grid[1] * launch.grid[2] / (launch.cluster[0] * launch.cluster[1] * launch.cluster[2]);
    }

    // Which threads ran which clusters must not show: of clusters that found the same the first in the grid is named.
    void collect(Cluster& c) {
        std::lock_guard<std::mutex> hold(lock);
        for (auto& f : c.findings) {
            const auto known = std::find_if(findings.begin(), findings.end(), [&](auto& old) { return old.fault.kind == f.kind && old.fault.line == f.line; });
            if (known != findings.end() && known->cluster <= c.number) continue;
            if (known != findings.end()) findings.erase(known);
            findings.push_back({c.number, f});
        }
        c.findings.clear();
    }

    // What ended the launch, and what was found until then: clusters that only ran because other threads were ahead do not count.
    std::vector<Fault> result(bool several_threads) {
        std::stable_sort(findings.begin(), findings.end(), [](auto& a, auto& b) { return a.cluster < b.cluster; });
        std::vector<Fault> all;
        if (fatal) all.push_back(fatal->fault);
        for (auto& f : findings)
            if (!fatal || !several_threads || f.cluster <= fatal->cluster) all.push_back(f.fault);
        return all;
    }

    void start(Cluster& c, i64 number) {
        if (options.only_traced) number = options.traced[number];
        if (std::find(options.traced, options.traced + options.ntraced, number) != options.traced + options.ntraced) {
            std::lock_guard<std::mutex> hold(lock);
            c.recorder = recorders.emplace_back(std::make_unique<Recorder>(program, launch)).get();
        }
        c.start(number);
    }

    void keep_trace(Cluster& c) {
        if (!c.recorder) return;
        std::lock_guard<std::mutex> hold(lock);
        traces.push_back(c.recorder->take());
        c.recorder = nullptr;
    }

    void retire(Cluster& c) {
        std::lock_guard<std::mutex> hold(lock);
        for (size_t i = 0; i < counts.size(); ++i) counts[i] += c.counts[i];
        instructions += c.executed + c.clock;
    }

    // The clusters before it have all been started, and go on to their ends; if another one fails, the first in the grid is named.
    void fail(i64 cluster, const Fault& f) {
        stop = true;
        std::lock_guard<std::mutex> hold(lock);
        if (!fatal || cluster < fatal->cluster) fatal = {cluster, f};
    }

    std::chrono::steady_clock::time_point deadline() const {
        constexpr double NEVER = 1e9;                          // seconds; more would overflow the clock
        return begin + std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(std::min(options.time_limit, NEVER)));
    }

    // A grid that would take longer than the limit is given up as soon as that can be told.
    void check_time() {
        const double elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        const double expected = elapsed / finished * size();
        if (elapsed > 2 && expected > options.time_limit)
            fail(OF_THE_GRID, {"too large", format("the grid of %lld clusters would take about %.0f s (%llu of them took %.0f s), more than the limit of %.0f s",
                                             (long long)size(), expected, (unsigned long long)finished.load(), elapsed, options.time_limit), 0, ""});
    }

    void execute() {
        constexpr size_t RESIDENT = 64;
        std::deque<std::unique_ptr<Cluster>> waiting;
        std::unique_ptr<Cluster> c, spare;
        size_t vain = 0;
        u64 seen = 0;
        bool hoping = true;
        const auto hope = [&](bool yes) {
            if (yes != hoping) hopeful += yes ? 1 : -1;
            hoping = yes;
        };
        try {
            while (!stop) {
                i64 number = -1;
                if (waiting.size() < RESIDENT && (number = next++) < size()) {
                    c = spare ? std::move(spare) : std::make_unique<Cluster>(program, launch, options);
                    c->global_shadow = shadow.get();
                    c->printed = &printed;
                    c->print_lock = &lock;
                    c->deadline = deadline();
                    start(*c, number);
                    ++progress;
                } else if (!waiting.empty()) {
                    number = -1;
                    c = std::move(waiting.front());
                    waiting.pop_front();
                } else break;
                const u64 before = c->events;
                const bool done = c->run();
                collect(*c);
                if (done) {
                    ++progress;
                    ++finished;
                    check_time();
                    keep_trace(*c);
                    if (spare) retire(*spare);
                    spare = std::move(c);
                } else {
                    if (c->events != before) ++progress;
                    const u64 now = progress;
                    vain = now == seen && c->hopeless() ? vain + 1 : 0;
                    seen = now;
                    hope(vain <= waiting.size());              // each of them has been tried since anything happened
                    if (!hoping && !hopeful && progress == now) fail(OF_THE_GRID, {"deadlock", "no CTA can go on: " + c->waiting(), 0, ""});
                    waiting.push_back(std::move(c));
                }
            }
        } catch (const Fault& f) {
            fail(c->number, f);
            collect(*c);                                       // what it found before the fault
        }
        hope(false);
        if (c) retire(*c);
        if (spare) retire(*spare);
        for (auto& other : waiting) retire(*other);
    }

    void work() {
        try {
            execute();
        } catch (const std::bad_alloc&) {
            out_of_memory = stop = true;
        }
    }
};

}  // namespace emu

using namespace emu;

extern "C" {

int emu_handler_count() { return (int)handler_names().size(); }
const char* emu_handler_name(int i) { return handler_names()[i].c_str(); }
int emu_record_size() { return (int)sizeof(Record); }

// A finding in the C layout; the strings live until the next call on this thread.
struct Finding { const char* kind; const char* message; const char* who; int line; int fatal; };
struct Result { const Finding* findings; int nfindings; const char* const* printed; int nprinted; u64 instructions; };

static thread_local std::shared_ptr<GlobalShadow> last_shadow;             // of the last run on this thread, if that was a whole one with sanitize

// As many threads as the host gives; at least this one. What is a thread's own, here and in the C++ runtime, is allocated when it is
// first used, and the process ends where that fails: so before any CTA takes memory.
static void run_on_threads(Grid& grid, i64 n) {
    static thread_local volatile int own;
    std::atomic<size_t> ready{0};
    std::atomic<bool> go{false};
    const auto help = [&] {
        own = std::uncaught_exceptions();
        ++ready;
        ready.notify_one();
        go.wait(false);
        grid.work();
    };
    std::vector<std::thread> threads;
    threads.reserve(n);
    for (i64 i = 1; i < n; ++i) {
        try {
            threads.emplace_back(help);
        } catch (const std::exception&) {                      // no thread, or no memory for one
            break;
        }
    }
    for (size_t seen; (seen = ready) < threads.size();) ready.wait(seen);
    grid.hopeful = 1 + (int)threads.size();
    go = true;
    go.notify_all();
    grid.work();
    for (auto& t : threads) t.join();
}

// counts: one u64 per record. Returns the number of findings (the first is fatal when result->findings[0].fatal).
int emu_run(const Program* program, const Launch* launch, const Options* options, u64* counts, Result* result) {
    static thread_local std::vector<Fault> kept;
    static thread_local std::vector<Finding> view;
    static thread_local std::vector<std::string> printed;
    static thread_local std::vector<const char*> printed_view;
    static const Finding too_little = {"memory", "the host has not enough memory for this kernel's CTAs", "", 0, 1};
    std::shared_ptr<GlobalShadow> before = std::move(last_shadow);
    last_traces.clear();
    try {
        Grid grid(*program, *launch, *options);
        grid.shadow->kernel = launch->name;
        if (before && launch->programmatic) grid.shadow->start_behind(std::move(before));
        before.reset();
        grid.counts.assign(program->nrecords, 0);
        const i64 n = std::max<i64>(1, std::min<i64>(options->threads, grid.size()));
        run_on_threads(grid, n);
        if (grid.out_of_memory) throw std::bad_alloc();
        if (grid.shadow->waited) grid.shadow->unfinished.clear();
        if (options->sanitize && !options->only_traced) last_shadow = std::move(grid.shadow);
        last_traces = std::move(grid.traces);
        kept = grid.result(n > 1);
        printed = std::move(grid.printed);
        view.clear();
        printed_view.clear();
        for (size_t i = 0; i < kept.size(); ++i)
            view.push_back({kept[i].kind.c_str(), kept[i].message.c_str(), kept[i].who.c_str(), kept[i].line, i == 0 && grid.fatal});
        for (auto& line : printed) printed_view.push_back(line.c_str());
        std::copy(grid.counts.begin(), grid.counts.end(), counts);
        *result = {view.data(), (int)view.size(), printed_view.data(), (int)printed_view.size(), grid.instructions};
        return (int)view.size();
    } catch (const std::bad_alloc&) {
        *result = {&too_little, 1, nullptr, 0, 0};
        return 1;
    }
}

// Which bytes of [address, address + n) the last run wrote (with sanitize): out[i] |= 1 for bytes 2i, 2i + 1.
void emu_written(u64 address, u64 n, u8* out) {
    if (last_shadow) last_shadow->written(address, n, out);
}

// Frees what is kept of the last run on this thread.
void emu_forget() { last_shadow.reset(); }

}  // extern "C"
