// trap, no-ops, griddepcontrol, vprintf.
#include <mutex>
#include "sanitizer.h"

namespace emu {

HANDLER(nothing, "nothing") { return Flow::next; }

// The launches before are over whenever this one runs; who relies on that is the sanitizer's.
HANDLER(wait_for_launches, "griddepcontrol.wait") {
    IF_CHECKED(w, wait_for_launches(w, mask));
    return Flow::next;
}

HANDLER(launch_dependents, "griddepcontrol.launch_dependents") {
    IF_CHECKED(w, launch_dependents(w));
    return Flow::next;
}

HANDLER(trap, "trap") { fault("trap", w, r.line, format("lane %d executes trap", first_lane(mask))); }

// One conversion of a format string: the argument sits in the buffer with C's default promotions, naturally aligned.
static std::string convert(const std::string& spec, const u8* buffer, size_t& at) {
    const char kind = spec.back();
    if (kind == '%') return "%";
    const bool wide = spec.find("ll") != std::string::npos || spec.find('l') != std::string::npos || std::strchr("fFeEgGaAsp", kind);
    const size_t size = wide ? 8 : 4;
    at = (at + size - 1) / size * size;
    u64 bits = 0;
    std::memcpy(&bits, buffer + at, size);
    at += size;
    if (std::strchr("fFeEgGaA", kind)) return format(spec.c_str(), as_double(bits));
    if (kind == 's') return format(spec.c_str(), (const char*)host_address(bits));
    if (kind == 'p') return format("0x%llx", (unsigned long long)host_address(bits));
    std::string plain;
    for (char ch : spec) if (ch != 'l' && ch != 'h') plain += ch;
    if (kind == 'c') return format(plain.c_str(), (int)bits);
    plain.insert(plain.size() - 1, "ll");
    return format(plain.c_str(), std::strchr("di", kind) ? (long long)(wide ? (i64)bits : (i64)(i32)bits) : (long long)bits);
}

// a: address of the format, b: address of the arguments (both generic, 64 bits), d: result or -1.
HANDLER(vprintf_, "vprintf") {
    Cluster& cluster = *w.cta->cluster;
    for (u32 lanes = mask; lanes; lanes &= lanes - 1) {
        const int lane = first_lane(lanes);
        const char* pattern = (const char*)host_address(w.wide(r.a, lane));
        const u64 arguments = w.wide(r.b, lane);
        const u8* buffer = arguments >= LOCAL_WINDOW ? cluster.local_bytes(arguments - LOCAL_WINDOW, 0, w, lane, r.line) : (const u8*)host_address(arguments);
        std::string text;
        size_t at = 0;
        int fields = 0;
        for (const char* p = pattern; *p;) {
            if (*p != '%') { text += *p++; continue; }
            const char* end = p + 1;
            while (*end && !std::strchr("diouxXcsfFeEgGaAp%", *end)) ++end;
            text += convert(std::string(p, end + (*end != 0)), buffer, at);
            p = end + (*end != 0);
            ++fields;
        }
        if (r.d >= 0) w.reg(r.d, lane) = fields;
        std::lock_guard<std::mutex> hold(*cluster.print_lock);
        cluster.printed->push_back(text);
    }
    return Flow::next;
}

}  // namespace emu
