// Reductions of bulk copies: memory op= data, element by element, atomically when other host threads may do the same.
#pragma once
#include "numbers.h"
#include "tensor_map.h"

namespace emu {

enum class Operation : u8 { add, min, max, inc, dec, and_, or_, xor_ };       // isa/bulk.py: OPERATIONS

template <class T, class F> void reduce_elements(u8* to, const u8* from, u64 bytes, bool alone, F f) {
    T* const target = (T*)to;
    for (u64 i = 0; i < bytes / sizeof(T); ++i) {
        T value;
        std::memcpy(&value, from + i * sizeof(T), sizeof(T));
        if (alone) {
            target[i] = f(target[i], value);
        } else {
            T old = __atomic_load_n(target + i, __ATOMIC_RELAXED);
            while (!__atomic_compare_exchange_n(target + i, &old, f(old, value), true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
        }
    }
}

template <class T> bool reduce_integers(Operation operation, u8* to, const u8* from, u64 bytes, bool alone) {
    using U = std::make_unsigned_t<T>;
    auto apply = [&](auto f) { reduce_elements<T>(to, from, bytes, alone, f); return true; };
    switch (operation) {
        case Operation::add: return apply([](T a, T b) { return (T)((U)a + (U)b); });
        case Operation::min: return apply([](T a, T b) { return std::min(a, b); });
        case Operation::max: return apply([](T a, T b) { return std::max(a, b); });
        case Operation::and_: return apply([](T a, T b) { return (T)(a & b); });
        case Operation::or_: return apply([](T a, T b) { return (T)(a | b); });
        case Operation::xor_: return apply([](T a, T b) { return (T)(a ^ b); });
        default: break;
    }
    if constexpr (std::is_same_v<T, u32>) {
        if (operation == Operation::inc) return apply([](u32 a, u32 b) { return a >= b ? 0 : a + 1; });
        if (operation == Operation::dec) return apply([](u32 a, u32 b) { return a == 0 || a > b ? b : a - 1; });
    }
    return false;
}

// 16-bit floats: the sum of two is exact or rounds once, float being more than twice as precise.
template <float (*decode)(u16), u16 (*encode)(float)>
bool reduce_halves(Operation operation, u8* to, const u8* from, u64 bytes, bool alone) {
    auto apply = [&](auto f) {
        reduce_elements<u16>(to, from, bytes, alone, [&](u16 a, u16 b) { return encode(f(decode(a), decode(b))); });
        return true;
    };
    switch (operation) {
        case Operation::add: return apply([](float a, float b) { return a + b; });
        case Operation::min: return apply([](float a, float b) { return a != a || b < a || (a == b && std::signbit(b)) ? b : a; });
        case Operation::max: return apply([](float a, float b) { return a != a || b > a || (a == b && std::signbit(a)) ? b : a; });
        default: return false;
    }
}

inline u16 f16_of(float x) { return to_f16(x); }
inline u16 bf16_of(float x) { return to_bf16(x); }

// Adds and the like of `bytes` bytes. False: the operation does not exist for the type.
inline bool reduce(Operation operation, Element element, u8* to, const u8* from, u64 bytes, bool alone) {
    switch (element) {
        case Element::u32_: return reduce_integers<u32>(operation, to, from, bytes, alone);
        case Element::s32: return reduce_integers<i32>(operation, to, from, bytes, alone);
        case Element::u64_: return reduce_integers<u64>(operation, to, from, bytes, alone);
        case Element::s64: return reduce_integers<i64>(operation, to, from, bytes, alone);
        case Element::f16: return reduce_halves<from_f16, f16_of>(operation, to, from, bytes, alone);
        case Element::bf16: return reduce_halves<from_bf16, bf16_of>(operation, to, from, bytes, alone);
        case Element::f32:                                 // as red.global.add.f32, denormals are zeros
            if (operation != Operation::add) return false;
            reduce_elements<u32>(to, from, bytes, alone, [](u32 a, u32 b) {
                return flush(canonical(flush(as_float(a)) + flush(as_float(b))));
            });
            return true;
        case Element::f64:
            if (operation != Operation::add) return false;
            reduce_elements<u64>(to, from, bytes, alone, [](u64 a, u64 b) {
                const double sum = as_double(a) + as_double(b);
                return sum != sum ? 0x7fffffffffffffffull : as_bits(sum);       // the device's NaN
            });
            return true;
        default: return false;
    }
}

}  // namespace emu
