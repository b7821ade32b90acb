// mov in all its forms.
#include <chrono>
#include "lanes.h"

namespace emu {

// ---- moves, packs, unpacks -------------------------------------------------------------------------------------------

static void copy_slot(Warp& w, i32 to, i32 from, u32 mask) {
    const u32* source = w.reg(from);
    u32* target = w.reg(to);
    if (mask == ALL_LANES) std::memmove(target, source, 4 * LANES);
    else each_lane(mask, [=](int lane) { target[lane] = source[lane]; });
}

HANDLER(mov_b32, "mov.b32") {
    copy_slot(w, r.d, r.a, mask);
    return Flow::next;
}
HANDLER(mov_b64, "mov.b64") {
    copy_slot(w, r.d, r.a, mask);
    copy_slot(w, r.d + 1, r.a + 1, mask);
    return Flow::next;
}
// A pack or unpack of two whole words: d, e = a, b. The four may overlap: {%r1, %r0} = %rd of a swap never does, its registers differ.
HANDLER(mov_two, "mov.two") {
    copy_slot(w, r.d, r.a, mask);
    copy_slot(w, r.e, r.b, mask);
    return Flow::next;
}
// The slots pool[0..i0) get those of pool[i0..2 i0).
HANDLER(mov_list, "mov.list") {
    const i32* list = w.cta->cluster->program.pool + r.pool;
    for (i64 i = 0; i < r.i0; ++i) copy_slot(w, list[i], list[r.i0 + i], mask);
    return Flow::next;
}
HANDLER(pack_halves, "mov.pack.b16x2") {
    const u32 *a = w.reg(r.a), *b = w.reg(r.b);
    u32* d = w.reg(r.d);
    each_lane(mask, [=](int lane) { d[lane] = (a[lane] & 0xffff) | b[lane] << 16; });
    return Flow::next;
}
HANDLER(unpack_halves, "mov.unpack.b16x2") {
    const u32* a = w.reg(r.a);
    u32 *d = w.reg(r.d), *e = w.reg(r.e);
    each_lane(mask, [=](int lane) {
        const u32 both = a[lane];
        d[lane] = both & 0xffff;
        e[lane] = both >> 16;
    });
    return Flow::next;
}
// Four bytes, slots pool[0..4): into d, or out of a.
HANDLER(pack_bytes, "mov.pack.b8x4") {
    const i32* list = w.cta->cluster->program.pool + r.pool;
    each_lane(mask, [&](int lane) {
        u32 word = 0;
        for (int i = 0; i < 4; ++i) word |= (w.reg(list[i], lane) & 0xff) << 8 * i;
        w.reg(r.d, lane) = word;
    });
    return Flow::next;
}
HANDLER(unpack_bytes, "mov.unpack.b8x4") {
    const i32* list = w.cta->cluster->program.pool + r.pool;
    each_lane(mask, [&](int lane) {
        const u32 word = w.reg(r.a, lane);
        for (int i = 0; i < 4; ++i) w.reg(list[i], lane) = word >> 8 * i & 0xff;
    });
    return Flow::next;
}

// i0: 0 %clock (instructions of the cluster so far), 1 its upper half, 2 %clock64, 3 %globaltimer (ns), 4 and 5 its lower and upper half.
HANDLER(mov_clock, "mov.clock") {
    u64 value = w.cta->cluster->clock;
    if (r.i0 >= 3) value = (u64)std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
    if (r.i0 == 1 || r.i0 == 5) value >>= 32;
    for (u32 m = mask; m; m &= m - 1) {
        const int lane = first_lane(m);
        if (r.i0 == 2 || r.i0 == 3) w.set_wide(r.d, lane, value);
        else w.reg(r.d, lane) = (u32)value;
    }
    return Flow::next;
}

}  // namespace emu
