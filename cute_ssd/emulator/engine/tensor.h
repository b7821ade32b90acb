// What the tcgen05 handlers share: checks of tensor memory, pairs of CTAs, descriptors of matrices in shared memory.
#pragma once
#include <vector>
#include "core.h"
#include "sanitizer.h"

namespace emu {

// Note [Pairs]: with cta_group::2 one warp of each CTA of a pair executes tcgen05.alloc, and both get the same columns. The first of
// the two allocates for both and leaves a reserved entry in its peer's list, which the peer's alloc takes. Both also execute dealloc, and
// the first one ends the use of the columns in both CTAs: it must wait for the peer, whose entry is half freed from then on.

// The CTAs that an instruction of cta_group::1 or ::2 works on; of a pair the even rank comes first.
struct CtaGroup {
    Cta* cta[2];
    int size;
    bool paired() const { return size == 2; }
};
CtaGroup cta_group(Warp&, const Record&, int size);

// Faults unless `n` columns from `column` on are allocated in `cta`, by an alloc of the same cta_group.
void check_tmem(Warp&, const Record&, const Cta&, u32 column, u32 n, int group_size, const char* what);

// The lane that issues an instruction of a single thread. Several lanes are a finding: the hardware would do it once per lane.
int issuing_lane(Warp&, const Record&, u32 mask, const char* what);

// A matrix in shared memory as its 64-bit descriptor says, in chunks of 16 bytes. PTX ISA, "Shared memory descriptor" and "Canonical
// layouts"; CUTLASS, mma_sm100_desc.hpp. K-major: i is the row (of M or N), j the chunk along K. MN-major: i is the chunk along M or N,
// j is k. Both indices are split into a part inside a swizzle atom and a count of atoms.
struct SharedMatrix {
    u32 start;
    u32 i_bits, i_inner, i_outer, j_bits, j_inner, j_outer;
    u32 pattern, phase;                    // swizzle: address bits 4.. ^= (address >> 7) - phase, in the bits of `pattern`
    bool wide_atoms;                       // 128B swizzle with atoms of 32 bytes: bits 5.. ^= address >> 7

    SharedMatrix(u64 descriptor, bool mn_major, Warp&, const Record&);
    u32 linear(u32 i, u32 j) const {
        return start + (i & ((1u << i_bits) - 1)) * i_inner + (i >> i_bits) * i_outer + (j & ((1u << j_bits) - 1)) * j_inner + (j >> j_bits) * j_outer;
    }
    u32 address(u32 i, u32 j) const {
        const u32 a = linear(i, j);
        return a ^ (((a >> 7) - phase) & pattern) << (wide_atoms ? 5 : 4);
    }
    // Faults unless all of its ni x nj chunks lie in the shared memory of `cta`.
    void check(Warp&, const Record&, const Cta& cta, u32 ni, u32 nj, const char* what) const;
    // Tells the sanitizer that they are read.
    void report(Sanitizer&, const Cta& cta, u32 ni, u32 nj) const;
};

// 16 x 16 words: rows become columns. `in` and `out` may be the same memory.
void transpose16(const u32* const in[16], u32* const out[16]);

}  // namespace emu
