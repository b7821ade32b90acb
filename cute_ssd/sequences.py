"""Where the sequences of a call lie, and the checks that need the data of offsets, ids and slots (CPU only)."""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import ShapeError


class Sequences(NamedTuple):
    """Sequence s is tokens [starts[s], stops[s]) of row rows[s]. Sequences of one row are in order and disjoint."""

    rows: list[int]
    starts: list[int]
    stops: list[int]

    def firsts(self, batch: int) -> list[int | None]:
        """The first sequence of each row: the one that initial_states feed."""
        found: list[int | None] = [None] * batch
        for s in range(len(self.rows) - 1, -1, -1):
            found[self.rows[s]] = s
        return found

    def lasts(self, batch: int) -> list[int | None]:
        """The sequence that holds the last token of each row; a row without tokens gives its first sequence."""
        found = self.firsts(batch)
        for s, row in enumerate(self.rows):
            if self.stops[s] > self.starts[s]:
                found[row] = s
        return found

    def by_length(self) -> Iterator[tuple[int, list[int]]]:
        """(length, sequences of that length), longest first: equal lengths are computed side by side."""
        groups: dict[int, list[int]] = {}
        for s, (start, stop) in enumerate(zip(self.starts, self.stops, strict=True)):
            groups.setdefault(stop - start, []).append(s)
        for length in sorted(groups, reverse=True):
            yield length, groups[length]

    @property
    def tokens(self) -> int:
        return sum(self.stops) - sum(self.starts)


def whole_rows(batch: int, seqlen: int) -> Sequences:
    return Sequences(list(range(batch)), [0] * batch, [seqlen] * batch)


def from_offsets(name: str, offsets: Tensor, total_len: int) -> Sequences:
    """Packed sequences of one row from (num_seqs + 1,) offsets that start at 0 and never fall."""
    bounds: list[int] = offsets.tolist()
    if bounds[0] != 0:
        raise ShapeError(f"{name} starts at {bounds[0]}, expected 0; pass offsets of the first token of each sequence.")
    for i, (low, high) in enumerate(pairwise(bounds)):
        if high < low:
            raise ShapeError(
                f"{name} falls from {low} to {high} at index {i + 1}, expected offsets that never fall; sort them."
            )
    if bounds[-1] > total_len:
        raise ShapeError(
            f"{name} ends at {bounds[-1]}, expected at most {total_len}, the tokens of x; correct the offsets."
        )
    return Sequences([0] * (len(bounds) - 1), bounds[:-1], bounds[1:])


def from_seq_idx(seq_idx: Tensor) -> Sequences:
    """Every change of id along a row starts a sequence, also back to an earlier id."""
    batch, seqlen = seq_idx.shape
    ids = seq_idx.to(torch.int64)
    found = Sequences([], [], [])
    for row in range(batch):
        changes: list[int] = (torch.nonzero(ids[row, 1:] != ids[row, :-1]).flatten() + 1).tolist() if seqlen else []
        bounds = [0, *changes, seqlen]
        found.rows.extend([row] * (len(bounds) - 1))
        found.starts.extend(bounds[:-1])
        found.stops.extend(bounds[1:])
    return found


def of_batch(batch: int, seqlen: int, seq_idx: Tensor | None, cu_seqlens: Tensor | None) -> Sequences:
    """The sequences of a batched call; seq_idx and cu_seqlens may both be given when they agree."""
    if cu_seqlens is None:
        return whole_rows(batch, seqlen) if seq_idx is None else from_seq_idx(seq_idx)
    packed = from_offsets("cu_seqlens", cu_seqlens, seqlen)
    if seq_idx is not None:
        used = packed.stops[-1] if packed.stops else 0
        want = [start for start, stop in zip(packed.starts, packed.stops, strict=True) if stop > start]
        got = from_seq_idx(seq_idx[:, :used]).starts if used else []
        if got != want:
            odd = min(set(got) ^ set(want))
            raise ShapeError(
                f"seq_idx and cu_seqlens disagree at token {odd}, where only one of them starts a sequence, "
                "expected the "
                "same sequences in both; pass one of them."
            )
    return packed


def chunk_ends(
    sequences: Sequences, chunk_size: int, cu_chunk_seqlens: Tensor | None, total_len: int
) -> list[list[int]]:
    """For each sequence the token counts after which a chunk ends, its last token included.

    Chunks are every `chunk_size` tokens from the sequence's start, or those of `cu_chunk_seqlens` (nchunks + 1,),
    offsets into the packed tokens none of which may cross a sequence.
    """
    if cu_chunk_seqlens is None:
        return [
            [*range(chunk_size, stop - start, chunk_size), *([stop - start] if stop > start else [])]
            for start, stop in zip(sequences.starts, sequences.stops, strict=True)
        ]
    bounds = from_offsets("cu_chunk_seqlens", cu_chunk_seqlens, total_len).stops
    if len(set(bounds) - {0}) != len(bounds):
        raise ShapeError("cu_chunk_seqlens has an empty chunk, expected offsets that rise; leave empty chunks out.")
    ends: list[list[int]] = []
    position = 0
    for start, stop in zip(sequences.starts, sequences.stops, strict=True):
        mine = []
        while position < len(bounds) and bounds[position] <= stop and stop > start:
            mine.append(bounds[position] - start)
            position += 1
        if stop > start and (not mine or mine[-1] != stop - start):
            raise ShapeError(
                f"cu_chunk_seqlens has no boundary at {stop}, the end of a sequence, "
                "expected chunks that hold tokens of "
                "one sequence each; end a chunk there."
            )
        ends.append(mine)
    if position != len(bounds):
        raise ShapeError(
            f"cu_chunk_seqlens goes on to {bounds[-1]} after the last sequence, expected its end; "
            "drop the chunks behind it."
        )
    return ends


def live_slots(name: str, slots: Tensor, pad_slot_id: int, num_slots: int, has_tokens: list[bool]) -> list[int | None]:
    """The slot of each sequence, None for padding and for sequences without tokens: those are never touched."""
    found: list[int | None] = []
    owners: dict[int, int] = {}
    for s, slot in enumerate(slots.to(torch.int64).tolist()):
        if slot == pad_slot_id:
            found.append(None)
            continue
        if not 0 <= slot < num_slots:
            raise ShapeError(
                f"{name}[{s}] is {slot}, expected a slot from 0 to {num_slots - 1} or pad_slot_id {pad_slot_id}; "
                "correct the slot."
            )
        if not has_tokens[s]:
            found.append(None)
            continue
        if slot in owners:
            raise ShapeError(
                f"{name}[{s}] is {slot}, already named at {owners[slot]}, expected one sequence for each slot; "
                f"give it a slot of its own or pad_slot_id {pad_slot_id}."
            )
        owners[slot] = s
        found.append(slot)
    return found
