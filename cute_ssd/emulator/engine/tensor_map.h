// CUtensorMap, the 128-byte descriptor of the TMA unit, as the host code of CuTe DSL encodes it (NVIDIA does not document it).
//
// word 0        global address
// word 1 low    bits 4-6 rank - 1; 7-10 element type; 13-14 swizzle; 17-18 L2 promotion; 19-20 atom of the swizzle (0: 16 bytes, 1: 32);
//               21 set if the tensor spans 128 KiB or more
// word 1 high, word 2, word 3 low   strides of dimensions 1 to 4 / 16 (low 32 bits); word 3 high: 4 more bits of each
// word 4 to 6 low   sizes - 1 of dimensions 0 to 4
// word 6 high   element strides - 1, 3 bits each; bits 56-63 and word 7 bytes 0-3: the box's sizes - 1
#pragma once
#include <algorithm>
#include "core.h"

namespace emu {

// Element types, as PTX's tensormap.replace.elemtype numbers them.
enum class Element : u8 { u8_, u16_, u32_, s32, u64_, s64, f16, f32, f32_ftz, f64, bf16, tf32, tf32_ftz, b4x16, b4x16_p64, b6x16_p32 };

// The fields of tensormap.replace (isa/bulk.py: FIELDS).
enum class MapField : u8 { global_address, rank, box_dim, global_dim, global_stride, element_stride, elemtype, swizzle_mode, swizzle_atomicity };

constexpr int MAP_BYTES = 128, MAP_WORDS = 8;

struct TensorMap {
    u64 base;                              // a host address
    u64 number;                            // of its tensor, where a pointer has it
    int rank;
    Element element;
    u32 element_bits;
    u32 swizzle;                           // bits of a shared address that are flipped by those `swizzle_shift` above
    u32 swizzle_shift;
    u64 stride[5];                         // bytes; [0] is not used: dimension 0 is dense
    i64 size[5];                           // dimension 0 in bytes, the others in elements; 1 beyond the rank
    u32 box[5];                            // likewise
    u32 bytes;                             // of a box
};

inline u32 element_bits(Element element) {
    switch (element) {
        case Element::u8_: return 8;
        case Element::u16_: case Element::f16: case Element::bf16: return 16;
        case Element::u32_: case Element::s32: case Element::f32: return 32;
        case Element::u64_: case Element::s64: case Element::f64: return 64;
        case Element::b4x16: return 4;     // 16 elements in 8 bytes, as dense in shared memory as in global memory
        default: return 0;
    }
}

inline const char* element_name(Element element) {
    static const char* const names[] = {"u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32.ftz", "f64", "bf16", "tf32", "tf32.ftz",
                                        "b4x16", "b4x16_p64", "b6x16_p32"};
    return names[(int)element];
}

// Decodes the first 64 bytes (the rest is unused). Returns what is wrong, or an empty sentence; `known`: whether it is wrong on a device too.
inline std::string decode_tensor_map(const u64* words, TensorMap& map, bool& known) {
    known = true;
    const u32 flags = (u32)words[1];
    // TF32 comes with f32 elements; the tensor core ignores the low bits itself, so elements are copied as they are.
    constexpr u32 TF32 = 1 << 16;
    constexpr u32 KNOWN = 0x2 | 7 << 4 | 15 << 7 | 3 << 13 | TF32 | 3 << 17 | 3 << 19 | 1 << 21;
    if (!(flags & 2)) return "the tensor map is not initialised, or these 128 bytes are none";
    known = false;
    if (flags & ~KNOWN) return format("the tensor map has fields the emulator does not know (0x%x)", flags & ~KNOWN);
    known = true;
    map.base = host_address(words[0]);
    map.number = words[0] - map.base;
    map.rank = (int)(flags >> 4 & 7) + 1;
    map.element = (Element)(flags >> 7 & 15);
    map.element_bits = element_bits(map.element);
    const u32 swizzle = flags >> 13 & 3, atom = flags >> 19 & 3;
    map.swizzle = atom ? 0x60 : ((1u << swizzle) - 1) << 4;
    map.swizzle_shift = atom ? 2 : 3;
    if (map.rank > 5) return format("the tensor map has %d dimensions", map.rank);
    known = false;
    if (atom && (atom != 1 || swizzle != 3)) return format("swizzle %u with atoms %u of a tensor map is not supported", swizzle, atom);
    if (!map.element_bits) return format("tensor maps of %s elements are not supported", element_name(map.element));
    known = true;
    if (map.base & 15) return format("the tensor map's global address 0x%llx is not aligned to 16 bytes", (unsigned long long)map.base);
    const u32 strides[5] = {0, (u32)(words[1] >> 32), (u32)words[2], (u32)(words[2] >> 32), (u32)words[3]};
    map.bytes = 1;
    for (int k = 0; k < 5; ++k) {
        const bool real = k < map.rank;
        map.size[k] = real ? (i64)(u32)(words[4 + k / 2] >> 32 * (k % 2)) + 1 : 1;
        map.box[k] = real ? (u32)(k ? words[7] >> 8 * (k - 1) & 255 : words[6] >> 56) + 1 : 1;
        const u64 high = k ? words[3] >> (32 + 4 * (k - 1)) & 15 : 0;
        map.stride[k] = real && k ? (strides[k] | high << 32) * 16 : 0;
        known = !(real && words[6] >> (32 + 3 * k) & 7);
        if (!known) return format("element stride %d in dimension %d is not supported: only 1", (int)(words[6] >> (32 + 3 * k) & 7) + 1, k);
    }
    map.size[0] = map.size[0] * map.element_bits / 8;
    map.box[0] = map.box[0] * map.element_bits / 8;
    if (map.box[0] % 16) return format("the box's rows have %u bytes, not a multiple of 16", map.box[0]);
    if (swizzle && map.box[0] > 16u << swizzle) return format("the box's rows have %u bytes, more than the %u of the swizzle", map.box[0], 16u << swizzle);
    for (u32 n : map.box) map.bytes *= n;
    return "";
}

// The decoded map at an address, kept as long as its bytes stay the same.
inline const TensorMap& tensor_map(u64 address, const Warp& w, int line) {
    struct Kept { u64 words[MAP_WORDS] = {}; TensorMap map; };
    static thread_local Kept kept[16];
    const u64* words = (const u64*)w.cta->cluster->global_bytes(address, MAP_BYTES, 64, w, line, "a tensor map");
    Kept& k = kept[(address >> 6 ^ address >> 10) % 16];
    if (std::memcmp(k.words, words, sizeof k.words)) {
        u64 copy[MAP_WORDS];
        std::memcpy(copy, words, sizeof copy);
        k.words[1] = 0;                                            // not valid, should this fault
        bool known;
        const std::string problem = decode_tensor_map(copy, k.map, known);
        if (!problem.empty()) fault(known ? "tensor map" : "unsupported", w, line, problem);
        std::memcpy(k.words, copy, sizeof copy);
    }
    return k.map;
}

// A box of a tensor at some coordinates.
struct Tile {
    TensorMap map;
    i64 at[5];                             // dimension 0 in bytes

    // The bytes of each row that lie in the tensor, the same in all rows.
    u32 first() const { return (u32)std::clamp<i64>(-at[0], 0, map.box[0]); }
    u32 last() const { return (u32)std::clamp<i64>(map.size[0] - at[0], 0, map.box[0]); }

    // f(row's number, global address of its first byte, whether the row lies in the tensor), in the order of shared memory.
    // The numbers are copied first: a store of bytes could change anything, as far as the compiler knows.
    template <class F> void each_row(F f) const {
        const TensorMap m = map;
        const i64 x1 = at[1], x2 = at[2], x3 = at[3], x4 = at[4];
        const u64 start = m.base + (u64)at[0];
        u32 row = 0;
        for (u32 i4 = 0; i4 < m.box[4]; ++i4)
            for (u32 i3 = 0; i3 < m.box[3]; ++i3)
                for (u32 i2 = 0; i2 < m.box[2]; ++i2) {
                    const bool in = inside(x4 + i4, m.size[4]) && inside(x3 + i3, m.size[3]) && inside(x2 + i2, m.size[2]);
                    const u64 plane = start + (u64)(x4 + i4) * m.stride[4] + (u64)(x3 + i3) * m.stride[3] + (u64)(x2 + i2) * m.stride[2];
                    const u32 rows = m.box[1];
                    for (u32 i1 = 0; i1 < rows; ++i1, ++row) f(row, plane + (u64)(x1 + i1) * m.stride[1], in && inside(x1 + i1, m.size[1]));
                }
    }

    static bool inside(i64 x, i64 size) { return (u64)x < (u64)size; }

    // f(first byte, number of bytes) of the parts in the tensor; neighbouring rows that touch are one part.
    template <class F> void each_part(F f) const {
        const u32 begin = first(), end = last();
        u64 part = 0, bytes = 0;
        if (begin >= end) return;
        each_row([&](u32, u64 address, bool in) {
            if (!in) return;
            if (bytes && part + bytes == address + begin) { bytes += end - begin; return; }
            if (bytes) f(part, bytes);
            part = address + begin;
            bytes = end - begin;
        });
        if (bytes) f(part, bytes);
    }

    // [first, last] byte of all parts; false if nothing lies in the tensor.
    bool span(u64& low, u64& high) const {
        low = map.base + (u64)at[0] + first();
        high = map.base + (u64)at[0] + last();
        if (first() >= last()) return false;
        for (int k = 1; k < 5; ++k) {
            const i64 from = std::max<i64>(at[k], 0), to = std::min<i64>(at[k] + map.box[k], map.size[k]);
            if (from >= to) return false;
            low += (u64)from * map.stride[k];
            high += (u64)(to - 1) * map.stride[k];
        }
        return true;
    }

    // shared: offset 0 of a CTA's shared memory; at `offset` the box begins.
    void load(u8* shared, u32 offset) const {
        const u32 bytes = map.box[0], begin = first(), end = std::max(last(), begin), swizzle = map.swizzle, shift = map.swizzle_shift;
        const bool whole = end - begin == bytes;
        if (!swizzle)
            each_row([=](u32 row, u64 address, bool in) {
                u8* const to = shared + offset + row * bytes;
                if (!in || !whole) std::memset(to, 0, bytes);
                if (in) std::memcpy(to + begin, (const u8*)address + begin, end - begin);
            });
        else
            each_row([=](u32 row, u64 address, bool in) {
                alignas(16) u8 buffer[128];
                const u8* from = (const u8*)address;
                if (!in || !whole) {
                    std::memset(buffer, 0, sizeof buffer);
                    if (in) std::memcpy(buffer + begin, from + begin, end - begin);
                    from = buffer;
                }
                copy_row(bytes, [=](u32 i) { std::memcpy(shared + swizzled(offset + row * bytes + i, swizzle, shift), from + i, 16); });
            });
    }

    // f(where the row's part in the tensor goes, where it is, bytes).
    template <class F> void each_stored(const u8* shared, u32 offset, F f) const {
        const u32 bytes = map.box[0], begin = first(), end = last(), swizzle = map.swizzle, shift = map.swizzle_shift;
        if (begin >= end) return;
        each_row([=](u32 row, u64 address, bool in) {
            if (!in) return;
            if (!swizzle) return f((u8*)address + begin, shared + offset + row * bytes + begin, end - begin);
            alignas(16) u8 buffer[128];
            copy_row(bytes, [=, to = buffer](u32 i) { std::memcpy(to + i, shared + swizzled(offset + row * bytes + i, swizzle, shift), 16); });
            f((u8*)address + begin, buffer + begin, end - begin);
        });
    }

    static u32 swizzled(u32 address, u32 swizzle, u32 shift) { return address ^ (address >> shift & swizzle); }

    // f(first byte) for every 16 bytes of a row; the usual length is unrolled.
    template <class F> static void copy_row(u32 bytes, F f) {
        if (bytes == 128) {
#pragma GCC unroll 8
            for (u32 i = 0; i < 128; i += 16) f(i);
        } else {
            for (u32 i = 0; i < bytes; i += 16) f(i);
        }
    }
};

}  // namespace emu
