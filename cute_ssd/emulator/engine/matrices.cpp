// ldmatrix, stmatrix, movmatrix, mma.sync. PTX ISA, "Warp Level Matrix Instructions": the lane holds element pair (row lane / 4,
// columns 2 * (lane % 4) and the next) of every 8 x 8 matrix of 16-bit elements.
#include "core.h"
#include "numbers.h"
#include "sanitizer.h"

namespace emu {

// ---- ldmatrix, stmatrix, movmatrix -----------------------------------------------------------------------------------

// Lane 8 * i + j holds the address of row j of matrix i. a: address, b: it is generic, c: number of matrices, i0: offset.
static void find_rows(Warp& w, const Record& r, Access access, u8* rows[LANES]) {
    u32 addresses[LANES];
    for (int lane = 0; lane < 8 * r.c; ++lane) {
        addresses[lane] = (u32)((r.b ? w.wide(r.a, lane) - SHARED_WINDOW : w.reg(r.a, lane)) + r.i0);
        rows[lane] = w.cta->cluster->shared_bytes(addresses[lane], 16, 16, w, r.line);
    }
    IF_CHECKED(w, shared(w, r, ALL_LANES >> (LANES - 8 * r.c), addresses, 16, access));
}

template <bool transposed> static Flow load_matrix(Warp& w, const Record& r, u32 mask) {
    if (!w.converged(mask)) return Flow::block;
    const i32* targets = w.cta->cluster->program.pool + r.pool;
    u8* rows[LANES];
    find_rows(w, r, Access::read, rows);
    alignas(64) u16 matrices[4][8][8];
    for (int lane = 0; lane < 8 * r.c; ++lane) std::memcpy(matrices[lane / 8][lane % 8], rows[lane], 16);
    for (int i = 0; i < r.c; ++i) {
        u32* out = w.reg(targets[i]);
        const u16(*matrix)[8] = matrices[i];
        if (transposed) {
            for (int lane = 0; lane < LANES; ++lane)
                out[lane] = matrix[2 * (lane % 4)][lane / 4] | (u32)matrix[2 * (lane % 4) + 1][lane / 4] << 16;
        } else std::memcpy(out, matrix, 128);
    }
    return Flow::next;
}

template <bool transposed> static Flow store_matrix(Warp& w, const Record& r, u32 mask) {
    if (!w.converged(mask)) return Flow::block;
    const i32* sources = w.cta->cluster->program.pool + r.pool;
    ++w.cta->cluster->events;
    u8* rows[LANES];
    find_rows(w, r, Access::write, rows);
    for (int i = 0; i < r.c; ++i) {
        const u32* in = w.reg(sources[i]);
        alignas(64) u16 matrix[8][8];
        if (transposed) {
            for (int lane = 0; lane < LANES; ++lane) {
                matrix[2 * (lane % 4)][lane / 4] = (u16)in[lane];
                matrix[2 * (lane % 4) + 1][lane / 4] = (u16)(in[lane] >> 16);
            }
        } else std::memcpy(matrix, in, 128);
        for (int row = 0; row < 8; ++row) std::memcpy(rows[8 * i + row], matrix[row], 16);
    }
    return Flow::next;
}

HANDLER(ldmatrix, "ldmatrix") { return load_matrix<false>(w, r, mask); }
HANDLER(ldmatrix_trans, "ldmatrix.trans") { return load_matrix<true>(w, r, mask); }
HANDLER(stmatrix, "stmatrix") { return store_matrix<false>(w, r, mask); }
HANDLER(stmatrix_trans, "stmatrix.trans") { return store_matrix<true>(w, r, mask); }

HANDLER(movmatrix, "movmatrix") {
    if (!w.converged(mask)) return Flow::block;
    u16 matrix[8][8];
    std::memcpy(matrix, w.reg(r.a), 128);
    u32* out = w.reg(r.d);
    for (int lane = 0; lane < LANES; ++lane) out[lane] = matrix[2 * (lane % 4)][lane / 4] | (u32)matrix[2 * (lane % 4) + 1][lane / 4] << 16;
    return Flow::next;
}

// ---- mma.sync --------------------------------------------------------------------------------------------------------

// The elements that one register of a lane holds, as floats.
struct Half { static constexpr int per_register = 2; static float at(u32 bits, int i) { return from_f16((u16)(bits >> 16 * i)); } };
struct Brain { static constexpr int per_register = 2; static float at(u32 bits, int i) { return from_bf16((u16)(bits >> 16 * i)); } };
struct Tf32 { static constexpr int per_register = 1; static float at(u32 bits, int) { return truncate_tf32(bits); } };

// D (16 x 8) = A (16 x K) * B (K x 8) + C. Registers of A: rows g and g + 8 of the first half of K, then of the second half; of B: the
// halves of K. pool: A, B, C, D. c: 1 when C and D are f16.
template <class T, int K> static Flow multiply(Warp& w, const Record& r, u32 mask) {
    if (!w.converged(mask)) return Flow::block;
    constexpr int P = T::per_register, HALVES = K / (4 * P), NA = 2 * HALVES;
    const i32* slots = w.cta->cluster->program.pool + r.pool;
    alignas(64) float a[K][16], b[K][8], sum[16][8];
    for (int i = 0; i < NA; ++i) {
        const u32* in = w.reg(slots[i]);
        for (int p = 0; p < P; ++p)
            for (int lane = 0; lane < LANES; ++lane) a[4 * P * (i / 2) + lane % 4 * P + p][lane / 4 + 8 * (i % 2)] = T::at(in[lane], p);
    }
    for (int i = 0; i < HALVES; ++i) {
        const u32* in = w.reg(slots[NA + i]);
        for (int p = 0; p < P; ++p)
            for (int lane = 0; lane < LANES; ++lane) b[4 * P * i + lane % 4 * P + p][lane / 4] = T::at(in[lane], p);
    }
    for (int row = 0; row < 16; ++row) {
        float line[8] = {};
        for (int k = 0; k < K; ++k)
            for (int n = 0; n < 8; ++n) line[n] = __builtin_fmaf(a[k][row], b[k][n], line[n]);
        std::memcpy(sum[row], line, sizeof line);
    }
    const i32 *c = slots + NA + HALVES, *d = c + (r.c ? 2 : 4);
    for (int i = 0; i < 2; ++i) {                                       // rows g, then rows g + 8
        if (r.c) {
            const u32* in = w.reg(c[i]);
            u32* out = w.reg(d[i]);
            for (int lane = 0; lane < LANES; ++lane) {
                const float* s = &sum[lane / 4 + 8 * i][2 * (lane % 4)];
                out[lane] = to_f16(from_f16((u16)in[lane]) + s[0]) | (u32)to_f16(from_f16((u16)(in[lane] >> 16)) + s[1]) << 16;
            }
        } else {
            for (int p = 0; p < 2; ++p) {
                const u32* in = w.reg(c[2 * i + p]);
                u32* out = w.reg(d[2 * i + p]);
                for (int lane = 0; lane < LANES; ++lane) out[lane] = canonical(as_float(in[lane]) + sum[lane / 4 + 8 * i][2 * (lane % 4) + p]);
            }
        }
    }
    return Flow::next;
}

HANDLER(mma_m16n8k8_f16, "mma.m16n8k8.f16") { return multiply<Half, 8>(w, r, mask); }
HANDLER(mma_m16n8k16_f16, "mma.m16n8k16.f16") { return multiply<Half, 16>(w, r, mask); }
HANDLER(mma_m16n8k8_bf16, "mma.m16n8k8.bf16") { return multiply<Brain, 8>(w, r, mask); }
HANDLER(mma_m16n8k16_bf16, "mma.m16n8k16.bf16") { return multiply<Brain, 16>(w, r, mask); }
HANDLER(mma_m16n8k4_tf32, "mma.m16n8k4.tf32") { return multiply<Tf32, 4>(w, r, mask); }
HANDLER(mma_m16n8k8_tf32, "mma.m16n8k8.tf32") { return multiply<Tf32, 8>(w, r, mask); }

}  // namespace emu
