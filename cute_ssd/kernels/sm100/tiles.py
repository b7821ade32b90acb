"""Which tokens a tile has. Tiles are numbered by slots: those of sequence s are neighbours, in order.

Batched: the tiles of row b begin at slot b * tiles_per_row(seqlen). Packed: those of sequence s begin at slot
offsets[s] // Q + s, so that nothing but the sequence's own start decides, and total_len // Q + num_seqs slots are
enough; slots between sequences may be unused. chunk_state finds the sequence of each slot and writes it to a table
for chunk_scan.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Int32, range_constexpr
from cutlass.cutlass_dsl import select_

from ..dims import WARP
from ..views import bound, flat, vector
from .config import MMA_K, Q


class Tile(NamedTuple):
    row: Any  # of the batch
    first: Any  # its first token, in the row
    valid: Any  # its tokens, 1 to Q; 0 in a slot that is not used
    slot: Any


def tiles_per_row(seqlen: Any) -> Any:
    return (seqlen + Q - 1) // Q


def batched_tile(slot: Any, seqlen: Any, per_row: Any) -> Tile:
    """`per_row`: tiles_per_row(seqlen), as a divisor."""
    row, index = divmod(slot, per_row)
    first = index * Q
    return Tile(row, first, cutlass.min(seqlen - first, Q), slot)


def table_tile(table: Any, slot: Any) -> Tile:
    """A row of the table that chunk_state leaves, in one load."""
    row = cute.make_rmem_tensor(4, Int32)
    cute.autovec_copy(vector(table, flat(table, slot), 4), row)
    return Tile(row[0], row[1], row[2], slot)


def store_tile(table: Any, tile: Tile) -> None:
    """By one thread."""
    row = cute.make_rmem_tensor(4, Int32)
    row[0], row[1], row[2], row[3] = Int32(tile.row), Int32(tile.first), Int32(tile.valid), Int32(0)
    cute.autovec_copy(row, vector(table, flat(table, tile.slot), 4))


def first_slot(start: Any, sequence: Any) -> Any:
    """Of a sequence that starts at token `start`."""
    return start // Q + sequence


@cute.jit
def find_tile(offsets: cute.Tensor, slot: Int32, seqlen: Int32) -> tuple[Any, Any]:
    """(sequence, tile) of a slot of packed sequences; by all lanes of a warp, which probe one sequence each in every
    round of the search. The sequence is the last one whose slots do not begin behind this one."""
    lane = cute.arch.lane_idx()
    low, high = Int32(0), Int32(offsets.shape[0] - 1)
    while high - low > 1:
        step = (high - low + (WARP - 1)) // WARP
        probe = low + lane * step
        # Lanes that have nothing to probe repeat the last one: loads without a branch.
        start = bound(offsets, cutlass.min(probe, high - 1), seqlen)
        before = (probe < high) & (first_slot(start, probe) <= slot)
        count = cute.arch.popc(cute.arch.vote_ballot_sync(before))
        low = low + (cutlass.max(count, 1) - 1) * step
        high = cutlass.min(high, low + step)
    start, stop = bound(offsets, low, seqlen), bound(offsets, low + 1, seqlen)
    index = slot - first_slot(start, low)
    left = stop - start - index * Q
    used = (index >= 0) & (left > 0)
    first = Int32(select_(used, start + index * Q, Int32(0)))
    valid = Int32(select_(used, cutlass.min(left, Q), Int32(0)))
    return low, Tile(Int32(0), first, valid, slot)


@cute.jit
def clear_tail(at: Int32, dtype: Constexpr, block: Constexpr, features: Constexpr, tokens: Constexpr, valid: Int32,
               lane: Int32) -> None:  # fmt: skip
    """By a warp: zeros behind the first `valid` tokens of a stage in shared memory, as far as the last K step of an MMA
    reads. The stage has blocks of `block` features, each with `tokens` tokens.

    Swizzles permute the 16-byte pieces of a token within a block of features, so the rows of a block to be cleared are
    a range of bytes.
    """
    pieces = block // 8
    pointer = cute.make_ptr(dtype, at, cute.AddressSpace.smem, assumed_align=16)
    shape, stride = (8, tokens * pieces, features // block), (1, 8, tokens * block)
    raw = cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))
    zero = cute.make_rmem_tensor(8, dtype)
    zero.fill(0.0)
    stop = (valid + MMA_K - 1) // MMA_K * MMA_K
    for number in range_constexpr(features // block):
        for piece in cutlass.range(valid * pieces + lane, stop * pieces, WARP, unroll=1):
            cute.autovec_copy(zero, raw[None, piece, number])
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()
