"""The instruction families: PTX on this side, handlers in `engine/*.cpp` on the other.

control   branches, exit, calls, traps, no-ops           arithmetic  integers and bits (integer.cpp)
compare   setp, set, selp, slct, testp                   floating    float types and functions (floating.cpp, half.cpp)
convert   mov, pack (move.cpp), cvt (convert.cpp)        memory      ld, st, atom, red, cp.async, prefetch, cvta, mapa
warps     shfl, vote, match, redux, elect, activemask    barriers    bar, barrier.cluster, mbarrier, fences
bulk      cp.async.bulk, tensor maps                     matrices    ldmatrix, stmatrix, mma.sync
tensor    tcgen05
"""

from . import arithmetic, barriers, bulk, compare, control, convert, floating, matrices, memory, tensor, warps

__all__ = [
    "arithmetic", "barriers", "bulk", "compare", "control", "convert",
    "floating", "matrices", "memory", "tensor", "warps",
]  # fmt: skip
