// tcgen05.mma: descriptors, operands, and the product D = A * B (+ D).
// PTX ISA, "TensorCore 5th Generation Family Instructions"; CUTLASS, mma_sm100_desc.hpp and mma_traits_sm100.hpp.
#include <algorithm>
#include "numbers.h"
#include "tensor.h"

namespace emu {

// ---- matrices in shared memory ---------------------------------------------------------------------------------------

SharedMatrix::SharedMatrix(u64 d, bool mn_major, Warp& w, const Record& r) {
    start = (u32)(d & 0x3fff) << 4;
    const u32 leading = (u32)(d >> 16 & 0x3fff) << 4, stride = (u32)(d >> 32 & 0x3fff) << 4;
    const u32 version = d >> 46 & 3, layout = d >> 61;
    if (version != 1) fault("matrix descriptor", w, r.line, format("0x%016llx has version %u in bits 46..47, it must be 1", (unsigned long long)d, version));
    if (d >> 52 & 1) fault("matrix descriptor", w, r.line, format("0x%016llx has an absolute leading dimension, which sm_100a does not know", (unsigned long long)d));
    phase = d >> 49 & 7;
    u32 width;                                                          // of a swizzle atom's rows, in bytes
    switch (layout) {
        case 0: width = 16; pattern = 0; break;
        case 1: case 2: width = 128; pattern = 7; break;
        case 4: width = 64; pattern = 3; break;
        case 6: width = 32; pattern = 1; break;
        default: fault("matrix descriptor", w, r.line, format("0x%016llx has the unknown swizzle mode %u", (unsigned long long)d, layout));
    }
    wide_atoms = layout == 1;
    if (wide_atoms) pattern = 3;
    if (!mn_major) {
        if (wide_atoms) fault("matrix descriptor", w, r.line, "the 128B swizzle with 32B atoms is for MN-major operands only");
        i_bits = 3, i_inner = width, i_outer = stride;
        j_bits = 1, j_inner = pattern ? 16 : leading, j_outer = 0;
    } else {
        i_bits = (u32)__builtin_ctz(width / 16), i_inner = 16, i_outer = pattern ? leading : stride;
        j_bits = wide_atoms ? 2 : 3, j_inner = width, j_outer = pattern ? stride : leading;
    }
}

void SharedMatrix::check(Warp& w, const Record& r, const Cta& cta, u32 ni, u32 nj, const char* what) const {
    // The swizzle moves chunks within lines of 128 bytes.
    const auto highest = [](u32 n, u32 bits, u32 inner, u32 outer) {
        const u32 size = 1u << bits;
        return n <= size ? (n - 1) * inner : (size - 1) * inner + ((n - 1) >> bits) * outer;
    };
    u32 low = start, high = start + highest(ni, i_bits, i_inner, i_outer) + highest(nj, j_bits, j_inner, j_outer) + 16;
    if (pattern) low &= ~127u, high = (high + 127) & ~127u;
    if (low < SHARED_BASE || high > cta.shared.size())
        fault("out of bounds", w, r.line, format("%s reads shared+%d..%d of CTA rank %d, outside the %d bytes of shared memory", what, (int)low - (int)SHARED_BASE,
                                                  (int)high - (int)SHARED_BASE - 1, cta.rank, cta.cluster->launch.shared_bytes));
}

void SharedMatrix::report(Sanitizer& sanitizer, const Cta& cta, u32 ni, u32 nj) const {
    u64 used[(1 << 18) / 16 / 64] = {};                                 // a bit per 16 bytes; descriptors reach 256 KiB
    u32 low = ~0u, high = 0;
    for (u32 i = 0; i < ni; ++i)
        for (u32 j = 0; j < nj; ++j) {
            const u32 chunk = address(i, j) >> 4;
            used[chunk >> 6] |= 1ull << (chunk & 63);
            low = std::min(low, chunk);
            high = std::max(high, chunk);
        }
    sanitizer.async_shared_pieces(cta, used, low, high);
}

// ---- element formats -------------------------------------------------------------------------------------------------

enum Format : int { F16, BF16, TF32, E4M3, E5M2, E2M3, E3M2, E2M1, U8, S8 };

constexpr u32 bits_of(Format f) { return f == TF32 ? 32 : f == F16 || f == BF16 ? 16 : f == E2M1 ? 4 : f == E2M3 || f == E3M2 ? 6 : 8; }
constexpr u32 bytes_of(Format f) { return f == TF32 ? 4 : f == F16 || f == BF16 ? 2 : 1; }         // of the container

struct ByteTables {
    float value[5][256];
    ByteTables() {
        for (int i = 0; i < 256; ++i) {
            value[0][i] = from_e4m3((u8)i);
            value[1][i] = from_e5m2((u8)i);
            value[2][i] = from_e2m3((u8)(i & 63));
            value[3][i] = from_e3m2((u8)(i & 63));
            value[4][i] = from_e2m1((u8)(i & 15));
        }
    }
};
static const ByteTables byte_tables;

// `n` elements (a multiple of 16), negated if asked.
static void convert(Format f, bool negate, const u8* raw, float* out, int n) {
    const u32 sign = negate ? 0x80000000u : 0;
    if (f == BF16) {
        const u16* in = (const u16*)raw;
        for (int i = 0; i < n; ++i) out[i] = as_float(((u32)in[i] << 16) ^ sign);
    } else if (f == F16) {
        const u16* in = (const u16*)raw;
        for (int i = 0; i < n; ++i) out[i] = as_float(as_bits(from_f16(in[i])) ^ sign);
    } else if (f == TF32) {
        const u32* in = (const u32*)raw;
        for (int i = 0; i < n; ++i) out[i] = as_float((in[i] & 0xffffe000u) ^ sign);
    } else if (f == U8) {
        for (int i = 0; i < n; ++i) out[i] = (float)raw[i];
    } else if (f == S8) {
        for (int i = 0; i < n; ++i) out[i] = (float)(i8)raw[i];
    } else {
        const float* table = byte_tables.value[f - E4M3];
        for (int i = 0; i < n; ++i) out[i] = as_float(as_bits(table[raw[i]]) ^ sign);
    }
}

// In shared memory 16 elements of 6 or 4 bits take 12 or 8 bytes and padding up to 16 (TMA writes them so: 16U4_ALIGN16B).
static void spread(Format f, u8* chunk) {
    u64 words[2];
    std::memcpy(words, chunk, 16);
    const u32 bits = bits_of(f);
    for (u32 i = 0; i < 16; ++i) {
        const u32 at = i * bits, shift = at % 64;
        u64 code = words[at / 64] >> shift;
        if (shift + bits > 64) code |= words[1] << (64 - shift);
        chunk[i] = (u8)(code & ((1u << bits) - 1));
    }
}

// ---- operands --------------------------------------------------------------------------------------------------------

constexpr int MAX_ROWS = 256, MAX_K = 32;

struct alignas(64) Panel {                 // an operand as floats: element (row, k) at [row * row_stride + k * k_stride]
    float data[MAX_ROWS * MAX_K];
    int row_stride, k_stride;
};

struct alignas(64) Raw { u8 bytes[MAX_ROWS * 32]; };

// Rows as they come from shared memory: `rows` of 32 bytes when K-major, else for each k `rows` elements.
// The matrix is a copy so that the compiler knows that writing bytes does not change it.
static void gather(const SharedMatrix matrix, const u8* shared, Format f, bool mn_major, int rows, int k, Raw& raw) {
    if (!mn_major) {
        for (int i = 0; i < rows; ++i)
            for (int j = 0; j < 2; ++j) std::memcpy(raw.bytes + 32 * i + 16 * j, shared + matrix.address(i, j), 16);
        if (bits_of(f) < 8) for (int i = 0; i < 2 * rows; ++i) spread(f, raw.bytes + 16 * i);
        return;
    }
    const int pitch = rows * (int)bytes_of(f), chunks = (pitch + 15) / 16;
    for (int j = 0; j < k; ++j)
        for (int i = 0; i < chunks; ++i) std::memcpy(raw.bytes + j * pitch + 16 * i, shared + matrix.address(i, j), std::min(16, pitch - 16 * i));
}

// The first `rows` x 32 bytes (or k x rows elements) of `raw` as floats.
static void convert(const Raw& raw, Format f, bool negate, bool mn_major, int rows, int k, Panel& panel) {
    convert(f, negate, raw.bytes, panel.data, rows * k);
    panel.row_stride = mn_major ? 1 : k;
    panel.k_stride = mn_major ? rows : 1;
}

// A panel with row_stride 1 and k_stride `pitch` (a multiple of 16), rows from `first` on.
static void transpose_into(const Panel& from, int rows, int k, int pitch, int first, Panel& to) {
    for (int i = 0; i < rows; i += 16)
        for (int j = 0; j < k; j += 16) {
            if (first + i + 16 > pitch) {                               // the tail of the second CTA's half
                for (int x = i; x < rows; ++x) for (int y = j; y < std::min(k, j + 16); ++y) to.data[y * pitch + first + x] = from.data[x * k + y];
                continue;
            }
            u32 spare[16];
            const u32* in[16];
            u32* out[16];
            alignas(64) static const u32 zeros[MAX_K] = {};
            for (int x = 0; x < 16; ++x) {
                in[x] = i + x < rows ? (const u32*)&from.data[(i + x) * k + j] : zeros;
                out[x] = j + x < k ? (u32*)&to.data[(j + x) * pitch + first + i] : spare;
            }
            transpose16(in, out);
        }
}

// ---- the product -----------------------------------------------------------------------------------------------------

// The sum of one instruction's K products is added to D in the end. Products of two narrow numbers are exact in fp32, so that a
// contraction to fma does not change a result; sums of 32 products of 8-bit integers are exact as well.
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")

typedef float Floats __attribute__((vector_size(64)));
typedef i32 Bits __attribute__((vector_size(64)));

// NaNs become the device's. (By reference: passing vectors by value depends on the processor.)
static inline void canonicalise(Floats& x) { x = (Floats)((x == x) ? (Bits)x : (Bits{} + (i32)NAN_F32)); }

// Cells of D: f32; f16 in the low half of a cell; s32, wrapping or saturating.
enum Accumulator : int { D_F32, D_F16, D_S32, D_S32_SATURATED };

struct Product {
    const float *a, *b;                    // a: [row * a_row + k * a_k], b: [k * b_pitch + column], columns padded to 16
    int a_row, a_k, b_pitch, k, columns;
    bool accumulate;
    Accumulator d;
    float scale;                           // of the old D
};

// One row of a tile into D where it is not f32, or where D has fewer columns than the tile.
static void finish_row(const Product& p, float* sum, u32* d, int n) {
    if (p.d == D_S32 || p.d == D_S32_SATURATED) {
        for (int i = 0; i < n; ++i) {
            const i64 exact = (i64)sum[i] + (p.accumulate ? (i32)d[i] : 0);
            d[i] = p.d == D_S32 ? (u32)exact : (u32)std::clamp<i64>(exact, INT32_MIN, INT32_MAX);
        }
    } else if (p.d == D_F16) {
        if (p.accumulate) for (int i = 0; i < n; ++i) sum[i] += from_f16((u16)d[i]) * p.scale;
        for (int i = 0; i < n; ++i) d[i] = to_f16(sum[i]);
    } else {
        if (p.accumulate) for (int i = 0; i < n; ++i) sum[i] += as_float(d[i]) * p.scale;
        for (int i = 0; i < n; ++i) d[i] = canonical(sum[i]);
    }
}

// 4 rows times 16 * nv columns from `column` on, into d[row][column..].
template <int nv> static void tile(const Product& p, int row, int column, u32* const d[4]) {
    Floats sum[4][nv];
    for (int i = 0; i < 4; ++i) for (int v = 0; v < nv; ++v) sum[i][v] = Floats{};
    const float *a = p.a + (i64)row * p.a_row, *b = p.b + column;
    for (int k = 0; k < p.k; ++k) {
        Floats line[nv];
        for (int v = 0; v < nv; ++v) std::memcpy(&line[v], b + (i64)k * p.b_pitch + 16 * v, 64);
        for (int i = 0; i < 4; ++i) {
            const float x = a[(i64)i * p.a_row + (i64)k * p.a_k];
            for (int v = 0; v < nv; ++v) sum[i][v] = line[v] * x + sum[i][v];
        }
    }
    const int n = std::min(16 * nv, p.columns - column);
    if (p.d != D_F32 || n < 16 * nv) {
        alignas(64) float lines[4][16 * nv];
        for (int i = 0; i < 4; ++i) for (int v = 0; v < nv; ++v) std::memcpy(&lines[i][16 * v], &sum[i][v], 64);
        for (int i = 0; i < 4; ++i) finish_row(p, lines[i], d[i] + column, n);
        return;
    }
    for (int i = 0; i < 4; ++i)
        for (int v = 0; v < nv; ++v) {
            u32* out = d[i] + column + 16 * v;
            Floats result = sum[i][v];
            if (p.accumulate) {
                Floats old;
                std::memcpy(&old, out, 64);
                result += old * p.scale;
            }
            canonicalise(result);
            std::memcpy(out, &result, 64);
        }
}

#pragma GCC pop_options

// `rows` of the product, row r into d[r].
static void multiply(const Product& p, int rows, u32* const* d) {
    for (int row = 0; row < rows; row += 4)
        for (int column = 0; column < p.columns;) {
            const int left = p.columns - column;
            if (left >= 64) tile<4>(p, row, column, d + row), column += 64;
            else if (left >= 32) tile<2>(p, row, column, d + row), column += 32;
            else tile<1>(p, row, column, d + row), column += 16;
        }
}

// ---- the instruction -------------------------------------------------------------------------------------------------

enum Kind : int { KIND_F16, KIND_TF32, KIND_F8F6F4, KIND_I8 };

struct Buffers {
    Panel a, b, rows;
    Raw raw;
    u32 nowhere[TMEM_COLUMNS];             // for lanes of D that are disabled
};

// A tcgen05.mma with everything that is known at issue.
struct Mma {
    Warp* warp;
    CtaGroup group;
    Format a_format, b_format;
    int m, n, k;                           // m: rows per CTA
    bool a_mn, b_mn, negate, accumulate, a_in_tmem;
    Accumulator d;
    float scale;
    int lane, column;                      // of D
    int a_lane, a_column;
    SharedMatrix a, b;
    u32 disabled[2][4];                    // lanes of D that keep their values, per CTA

    bool folded() const { return group.paired() && m == 64; }           // Layout B: the halves of N lie in lanes 0..63 and 64..127
    bool scattered() const { return !group.paired() && m == 64; }       // Layout F: 16 rows in each quadrant of the lanes
    int lane_of(int row) const { return scattered() ? row / 16 * 32 + row % 16 : row; }
    void run() const;
    void run(int i, Buffers&, int b_pitch) const;
};

void Mma::run() const {
    static thread_local Buffers buffers;
    Buffers& at = buffers;
    const int each = n / group.size, pitch = (n + 15) / 16 * 16;        // rows of B that a CTA holds
    for (int i = 0; i < group.size; ++i) {
        gather(b, group.cta[i]->shared.data(), b_format, b_mn, each, k, at.raw);
        convert(at.raw, b_format, false, b_mn, each, k, at.rows);
        if (!b_mn) transpose_into(at.rows, each, k, pitch, i * each, at.b);
        else for (int j = 0; j < k; ++j) std::memcpy(at.b.data + j * pitch + i * each, at.rows.data + j * each, 4 * (size_t)each);
    }
    if (pitch != n) for (int j = 0; j < k; ++j) std::fill_n(at.b.data + j * pitch + n, pitch - n, 0.0f);
    for (int i = 0; i < group.size; ++i) run(i, at, pitch);
    ++warp->cta->cluster->events;
}

void Mma::run(int i, Buffers& at, int b_pitch) const {
    Cta& cta = *group.cta[i];
    for (int half_of_n = 0; half_of_n < (folded() ? 2 : 1); ++half_of_n) {
        const int shift = 64 * half_of_n;
        if (a_in_tmem) {
            for (int row = 0; row < m; ++row) std::memcpy(at.raw.bytes + 32 * row, &cta.tmem[a_lane + shift + lane_of(row)][a_column], 32);
            if (a_format == E2M1) for (int x = 0; x < 32 * m; ++x) at.raw.bytes[x] >>= 2;   // the code sits in bits 2..5 of its byte
        } else if (!half_of_n) gather(a, cta.shared.data(), a_format, a_mn, m, k, at.raw);
        if (a_in_tmem || !half_of_n) convert(at.raw, a_format, negate, a_mn, m, k, at.a);
        u32* rows[128];
        for (int row = 0; row < m; ++row) {
            const int to = lane + shift + lane_of(row);
            rows[row] = disabled[i][to / 32] >> to % 32 & 1 ? at.nowhere : &cta.tmem[to][column];
        }
        const int columns = folded() ? n / 2 : n;
        multiply({at.a.data, at.b.data + half_of_n * columns, at.a.row_stride, at.a.k_stride, b_pitch, k, columns, accumulate, d, scale}, m, rows);
    }
}

static Format format_of(Kind kind, u32 code, Warp& w, const Record& r) {
    if (kind == KIND_F16 && code < 2) return code ? BF16 : F16;
    if (kind == KIND_TF32 && code == 2) return TF32;
    if (kind == KIND_I8 && code < 2) return code ? S8 : U8;
    static const int narrow[] = {E4M3, E5M2, -1, E2M3, E3M2, E2M1, -1, -1};
    if (kind == KIND_F8F6F4 && narrow[code] >= 0) return (Format)narrow[code];
    fault("instruction descriptor", w, r.line, format("element type %u does not exist for this kind of tcgen05.mma", code));
}

// a: D, b: A (a slot of a descriptor, or of an address in tensor memory), c: descriptor of B, d: instruction descriptor, e: kind,
// i0: log2 of the divisor of D. pool: cta_group, A is in tensor memory, offset of D, offset of A, predicate, its negation, number of
// disabled-lane words, their slots.
HANDLER(mma, "tcgen05.mma") {
    Cluster& cluster = *w.cta->cluster;
    const int lane = issuing_lane(w, r, mask, "tcgen05.mma");
    const i32* list = cluster.program.pool + r.pool;
    const CtaGroup group = cta_group(w, r, list[0]);
    const Kind kind = (Kind)r.e;
    const u32 descriptor = w.reg(r.d, lane), d_type = descriptor >> 4 & 3, address = w.reg(r.a, lane) + (u32)list[2];
    const auto refuse = [&](const std::string& why) { fault("instruction descriptor", w, r.line, format("0x%08x: ", descriptor) + why); };
    const u32 m = (descriptor >> 24 & 31) * 16, n = (descriptor >> 17 & 63) * 8;
    const Format a_format = format_of(kind, descriptor >> 7 & 7, w, r), b_format = format_of(kind, descriptor >> 10 & 7, w, r);
    const bool a_mn = descriptor >> 15 & 1, b_mn = descriptor >> 16 & 1, a_in_tmem = list[1];
    if (descriptor & 4) refuse("sparse products are not emulated");
    if (descriptor & 8 && kind != KIND_I8) refuse("saturation is for integers");
    if (descriptor >> 13 & 3 && kind == KIND_I8) refuse("integers are not negated");
    if (descriptor >> 30) refuse("a maximum shift is for .ws");
    if (kind == KIND_I8 ? d_type != 2 : d_type > 1 || (d_type == 0 && kind == KIND_TF32)) refuse(format("D of type %u does not exist for this kind", d_type));
    if (d_type == 0 && (a_format == BF16 || b_format == BF16)) refuse("bf16 products have f32 accumulators");
    const bool good_m = group.paired() ? m == 128 || m == 256 : m == 64 || m == 128;
    const u32 step = group.paired() || m == 128 ? 16 : 8;
    if (!good_m || n < step || n > 256 || n % step) refuse(format("M = %u, N = %u does not exist for cta_group::%d", m, n, group.size));
    if ((a_mn && bits_of(a_format) < 8) || (b_mn && bits_of(b_format) < 8)) refuse("operands of 6 and 4 bits are K-major");
    if (a_mn && a_in_tmem) refuse("A in tensor memory is K-major");
    const u64 a_value = a_in_tmem ? 0 : w.wide(r.b, lane);
    const SharedMatrix b(w.wide(r.c, lane), b_mn, w, r), a = a_in_tmem ? b : SharedMatrix(a_value, a_mn, w, r);
    const u32 a_address = a_in_tmem ? w.reg(r.b, lane) + (u32)list[3] : 0;
    const bool enabled = w.preds[list[4]] >> lane & 1;
    Mma mma{&w, group, a_format, b_format, (int)m / group.size, (int)n, 32 / (int)bytes_of(a_format), a_mn, b_mn, ((descriptor >> 13) ^ (descriptor >> 14)) % 2 != 0,
            enabled != (bool)list[5], a_in_tmem, d_type == 0 ? D_F16 : d_type == 1 ? D_F32 : descriptor & 8 ? D_S32_SATURATED : D_S32, as_float((u32)(127 - r.i0) << 23), (int)(address >> 16), (int)(address & 0xffff),
            (int)(a_address >> 16), (int)(a_address & 0xffff), a, b, {}};
    for (int i = 0; i < list[6]; ++i) mma.disabled[i / 4][i % 4] = w.reg(list[7 + i], lane);

    // Where everything lies, for the checks.
    const int columns = mma.folded() ? (int)n / 2 : (int)n, rows_of_b = (int)n / group.size;
    const u32 last_lane = mma.scattered() ? 16 : 0;
    for (u32 l : {address >> 16, a_address >> 16})
        if (l > last_lane || l % 16) fault("tensor memory", w, r.line, format("an operand of tcgen05.mma with M = %u begins at lane %u", m, l));
    const auto extent = [](bool mn, int rows, Format f, int k, u32& ni, u32& nj) {
        ni = mn ? (u32)(rows * (int)bytes_of(f) + 15) / 16 : (u32)rows, nj = mn ? (u32)k : 2;
    };
    Sanitizer* sanitizer = cluster.sanitizer;
    if (sanitizer) sanitizer->begin_tensor(w, r, lane, Tensor::mma);
    const auto touch = [&](Cta& cta, int first, int column, int count, Access access) {
        if (!mma.scattered()) sanitizer->async_tmem(cta, 0, TMEM_LANES, column, count, access);
        else for (int quadrant = 0; quadrant < 4; ++quadrant) sanitizer->async_tmem(cta, 32 * quadrant + first, 16, column, count, access);
    };
    u32 ni, nj;
    for (int i = 0; i < group.size; ++i) {
        Cta& cta = *group.cta[i];
        extent(b_mn, rows_of_b, b_format, mma.k, ni, nj);
        b.check(w, r, cta, ni, nj, "operand B of tcgen05.mma");
        if (sanitizer) b.report(*sanitizer, cta, ni, nj);
        if (a_in_tmem) {
            check_tmem(w, r, cta, mma.a_column, 8, group.size, "operand A of tcgen05.mma");
            if (sanitizer) touch(cta, mma.a_lane, mma.a_column, 8, Access::read);
        } else {
            extent(a_mn, mma.m, a_format, mma.k, ni, nj);
            a.check(w, r, cta, ni, nj, "operand A of tcgen05.mma");
            if (sanitizer) a.report(*sanitizer, cta, ni, nj);
        }
        check_tmem(w, r, cta, mma.column, columns, group.size, "D of tcgen05.mma");
        if (sanitizer && mma.accumulate) touch(cta, mma.lane, mma.column, columns, Access::read);
        if (sanitizer) touch(cta, mma.lane, mma.column, columns, Access::write);
    }
    if (cluster.late) cluster.issue_tensor(*w.cta, [mma] { mma.run(); });
    else mma.run();
    return Flow::next;
}

}  // namespace emu
