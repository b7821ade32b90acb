"""Which tokens a tile has. Tiles are numbered by slots: those of sequence s are neighbours, in order.

Batched: the tiles of row b begin at slot b * tiles_per_row(seqlen). Packed: those of sequence s begin at slot
offsets[s] // Q + s, so that nothing but the sequence's own start decides, and total_len // Q + num_seqs slots are
enough; slots between sequences may be unused. chunk_state finds the sequence of each slot and writes it to a table
for chunk_scan.
"""

from typing import Any, NamedTuple

from .config import Q


class Tile(NamedTuple):
    row: Any  # of the batch
    first: Any  # its first token, in the row
    valid: Any  # its tokens, 1 to Q; 0 in a slot that is not used
    slot: Any


def tiles_per_row(seqlen: Any) -> Any:
    return (seqlen + Q - 1) // Q
