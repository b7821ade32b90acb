// Who accessed each piece of shared and tensor memory last. A piece is 16 bytes of shared memory, of which boxes of TMA, matrix
// descriptors, rows of ldmatrix and vectors consist, or a column of 16 lanes of tensor memory. A piece of shared memory that is
// accessed in parts is quartered into words, and such a word into bytes; when its quarters agree it is whole again.
#pragma once
#include <algorithm>
#include <bit>
#include <memory>
#include "core.h"

namespace emu {

struct Cell {                              // of a piece, a word or a byte
    u32 write : 30;                        // mark of the last plain write (happens_before.h); 0: nobody
    u32 defined : 1;
    u32 quartered : 1;                     // its quarters tell, nothing else does
    u32 read : 31;                         // who has read or atomically updated it since: a mark or a set of readers; 0: nobody
    u32 updated : 1;                       // atomics or strong accesses are among them

    bool operator==(const Cell& o) const { return std::bit_cast<u64>(*this) == std::bit_cast<u64>(o); }
};
static_assert(sizeof(Cell) == 8);

class Shadow {
  public:
    static constexpr u32 PIECE = 16;
    const bool tensor_memory;

    Shadow(u32 n, bool tensor) : tensor_memory(tensor), pieces(n) {
        for (u32 level = 0; level < 3; ++level) levels[level].reset(new Cell[(size_t)n << 2 * level]);
    }
    void clear() { std::fill_n(levels[0].get(), pieces, Cell{}); }         // quarters are written before they are read
    u32 size() const { return pieces; }
    Cell& operator[](u32 piece) { return levels[0][piece]; }

    // f(cell, where it begins) for the cells of a piece that make up the bytes [begin, end) of the memory, as far as they lie in it.
    template <class F> void each_part(u32 piece, u32 begin, u32 end, const F& f) { each_part<0>(piece, begin, end, f); }

    // All of it is as if nobody had accessed it, but defined.
    void forget() {
        for (u32 piece = 0; piece < pieces; ++piece) forget(0, piece);
    }

  private:
    template <int level, class F> void each_part(u32 index, u32 begin, u32 end, const F& f) {
        constexpr u32 n = PIECE >> 2 * level;
        const u32 at = n * index;
        Cell& cell = levels[level][index];
        if (level == 2 || (begin <= at && at + n <= end && !cell.quartered)) return f(cell, at);
        if constexpr (level < 2) {
            Cell* const quarters = &levels[level + 1][4 * index];
            if (!cell.quartered) std::fill_n(quarters, 4, cell), cell.quartered = 1;
            const u32 first = std::max(begin, at) / (n / 4), last = (std::min(end, at + n) - 1) / (n / 4);
            for (u32 quarter = first; quarter <= last; ++quarter) each_part<level + 1>(quarter, begin, end, f);
            if (quarters[0] == quarters[1] && quarters[0] == quarters[2] && quarters[0] == quarters[3] && !quarters[0].quartered) cell = quarters[0];
        }
    }

    void forget(int level, u32 index) {
        Cell& cell = levels[level][index];
        cell.read = 0;
        if (!cell.quartered) cell.write = 0;
        else for (u32 k = 0; k < 4; ++k) forget(level + 1, 4 * index + k);
    }

    u32 pieces;
    std::unique_ptr<Cell[]> levels[3];     // pieces, words, bytes
};

}  // namespace emu
