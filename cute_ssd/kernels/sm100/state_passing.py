"""state_passing: from tile to tile of each sequence, elementwise and in fp32. README.md has the algorithm.

    incoming[tile] = carry,    carry = 2^decay[tile] carry + local[tile]

A thread has PIECES vectors of one head's state, in every `step`-th sequence, and goes through the tiles of one sequence
after the other. `ahead` tiles are on their way from memory, and the state that the next sequence starts with. All CTAs
are resident at a time where the number of heads allows that: then chunk_scan can be set up beside them.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from ..arithmetic import fma2, kept, numeric, widen
from ..dims import ITEMSIZE, VECTOR_BYTES, WARP
from ..views import bound, flat, vector
from .config import Chunked, Q
from .tiles import first_slot, tiles_per_row

MaybeTensor = Any  # a cute.Tensor, or None where the configuration has none

VECTOR = 8  # neighbouring elements: 16 bytes where they are narrow
PIECES = 2  # vectors of a thread, THREADS vectors apart
THREADS = 64
RESIDENT = 8  # CTAs of a multiprocessor: 128 registers for each thread
AHEAD_BYTES = 288  # of a thread: of tiles, and of the state that the next sequence starts with


class Sequences(NamedTuple):
    """Which sequences there are, as the caller describes them."""

    count: Any
    seqlen: Any
    offsets: MaybeTensor
    slots: MaybeTensor
    flags: MaybeTensor
    pad_slot: Any
    states: Any  # how many the caller has


class Sequence(NamedTuple):
    slot: Any  # of its first tile
    tiles: Any
    state: Any  # which state is its own
    read: Any  # whether there is a state to start from
    live: Any  # whether there is a state to leave


class Element(NamedTuple):
    """The first element of a thread."""

    head: Any
    row: Any
    column: Any
    offset: Any  # in a dense (H, P, N)


class Tiles(NamedTuple):
    """(tiles, H, P, N); (tiles, H); (tiles, H, P, N)"""

    local: Any
    decay: Any
    incoming: Any


class StatePassingKernel:
    def __init__(self, config: Chunked) -> None:
        self.config = config
        self.local, self.dtype = numeric(config.local), numeric(config.dtype)
        self.initial = numeric(config.initial or "float32")
        self.ahead = self.tiles_ahead()
        self.blocks = config.headdim * config.dstate // (PIECES * VECTOR * THREADS)  # of a head; there is no rest
        self.rows = VECTOR * THREADS // config.dstate  # from a piece to the next one

    @cute.jit
    def __call__(
        self,
        local: cute.Tensor,
        decay: cute.Tensor,
        batch: Int32,
        seqlen: Int32,
        offsets: MaybeTensor,
        initial: MaybeTensor,
        slots: MaybeTensor,
        flags: MaybeTensor,
        pad_slot: Int64,
        incoming: cute.Tensor,
        final: MaybeTensor,
        chunk_states: MaybeTensor,
        ctas: Int32,
        stream: Any,
    ) -> None:
        count = batch
        if const_expr(offsets is not None):
            count = offsets.shape[0] - 1
        states = Int32(0)
        if const_expr(initial is not None or final is not None):
            states = (initial if const_expr(initial is not None) else final).shape[0]
        sequences = Sequences(count, seqlen, offsets, slots, flags, pad_slot, states)
        heads = decay.shape[1]
        groups = cutlass.max(cutlass.min(count, RESIDENT * ctas // (self.blocks * heads)), 1)
        self.kernel(Tiles(local, decay, incoming), sequences, initial, final, chunk_states).launch(
            grid=[self.blocks, heads, groups],
            block=[THREADS, 1, 1],
            min_blocks_per_mp=RESIDENT,
            preferred_smem_carveout=100,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, tiles: Tiles, sequences: Sequences, initial: MaybeTensor, final: MaybeTensor, chunk_states: MaybeTensor
    ) -> None:
        block, head, group = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        _, _, step = cute.arch.grid_dim()
        element = self.element(head, block * (PIECES * THREADS) + thread)
        # What comes from the caller is complete: chunk_state, which has let this kernel start, has waited for it.
        start = cute.make_rmem_tensor((VECTOR, PIECES), self.initial)
        following = self.locate(sequences, group)
        self.load_start(start, initial, following, element)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        carry = cute.make_rmem_tensor((VECTOR, PIECES), Float32)
        for index in cutlass.range(group, sequences.count, step, unroll=1):
            sequence = following
            carry.store(widen(start))
            following = self.locate(sequences, index + step)
            self.carry_on(carry, start, tiles, sequences, initial, chunk_states, index, sequence, following, element)
            if const_expr(final is not None):  # noqa: SIM102  (the compiler decides the one, the GPU the other)
                if sequence.live:
                    self.store_state(carry, final, sequence.state, element)

    def tiles_ahead(self) -> int:
        elements, start = PIECES * VECTOR, self.config.initial
        left = AHEAD_BYTES - (0 if start is None else elements * ITEMSIZE[start])
        return min(left // (elements * ITEMSIZE[self.config.local]), 8)

    def element(self, head: Int32, number: Int32) -> Element:
        size, N = self.config.headdim * self.config.dstate, self.config.dstate
        first = number * VECTOR
        return Element(head, first // N, first % N, kept(Int64(head) * size + first))

    @cute.jit
    def locate(self, sequences: Sequences, index: Int32) -> Sequence:
        """Without tiles and states behind the last sequence."""
        there = index < sequences.count
        index = cutlass.min(index, sequences.count - 1)
        tiles = tiles_per_row(sequences.seqlen)
        slot = index * tiles
        if const_expr(sequences.offsets is not None):
            start = bound(sequences.offsets, index, sequences.seqlen)
            stop = bound(sequences.offsets, index + 1, sequences.seqlen)
            tiles = tiles_per_row(cutlass.max(stop - start, 0))
            slot = first_slot(start, index)
        state, live = index, there
        if const_expr(sequences.slots is not None):
            given = Int64(sequences.slots[index])
            inside = (given >= 0) & (given < Int64(sequences.states))
            live = there & (given != sequences.pad_slot) & inside & (tiles > 0)
            state = Int32(given)
        read = live
        if const_expr(sequences.flags is not None):
            read = live & sequences.flags[index]
        return Sequence(slot, tiles, state, read, live)

    @cute.jit
    def first_chunk(self, sequences: Sequences, index: Int32) -> Any:
        """Rows of `chunk_states` that the sequences before this one have; every warp counts for itself."""
        size = self.config.chunk_tiles * Q
        offsets, seqlen = sequences.offsets, sequences.seqlen
        if const_expr(offsets is None):
            row = index * ((seqlen + size - 1) // size)
        else:
            row = Int32(0)
            for other in cutlass.range(cute.arch.lane_idx(), index, WARP, unroll=1):
                length = bound(offsets, other + 1, seqlen) - bound(offsets, other, seqlen)
                row += (cutlass.max(length, 0) + size - 1) // size
            row = cute.arch.warp_reduction_sum(row)
        return row

    @cute.jit
    def carry_on(
        self,
        carry: cute.Tensor,
        start: cute.Tensor,
        tiles: Tiles,
        sequences: Sequences,
        initial: MaybeTensor,
        chunk_states: MaybeTensor,
        index: Int32,
        sequence: Sequence,
        following: Sequence,
        element: Element,
    ) -> None:
        """Through the tiles of a sequence. Loads the start of the following one, behind the first tiles."""
        ring = [cute.make_rmem_tensor((VECTOR, PIECES), self.local) for _ in range(self.ahead)]
        row = Int32(0)
        if const_expr(chunk_states is not None):
            row = self.first_chunk(sequences, index)
        # Addresses that move on from tile to tile, of what is stored and of what is loaded.
        pitch = Int64(tiles.local.stride[0])
        offset = kept(pitch * sequence.slot + element.offset)
        here = tiles.incoming.iterator.toint() + offset * (self.dtype.width // 8)
        ahead = tiles.local.iterator.toint() + offset * (self.local.width // 8)
        read_pitch, write_pitch = kept(pitch * (self.local.width // 8)), kept(pitch * (self.dtype.width // 8))
        decays = self.load_decays(tiles.decay, sequence, element.head, 0)
        ahead = self.fetch(ring, ahead, read_pitch, sequence.tiles, 0)
        self.load_start(start, initial, following, element)
        for base in cutlass.range(0, sequence.tiles, self.ahead, unroll=1):
            factors = cute.math.exp2(decays, fastmath=True)
            decays = self.load_decays(tiles.decay, sequence, element.head, base + self.ahead)
            for k in range_constexpr(self.ahead):
                tile = base + k
                if tile < sequence.tiles:
                    self.store(carry, self.dtype, here, THREADS * VECTOR)
                    here += write_pitch
                    self.step(carry, ring[k], cute.arch.shuffle_sync(factors, k))
                    if tile + self.ahead < sequence.tiles:
                        self.load(ring[k], ahead, THREADS * VECTOR, 32)
                        ahead += read_pitch
                    if const_expr(chunk_states is not None):
                        chunk = row + tile // self.config.chunk_tiles
                        ends = ((tile + 1) % self.config.chunk_tiles == 0) | (tile + 1 == sequence.tiles)
                        if ends & (chunk < chunk_states.shape[0]):
                            self.store_state(carry, chunk_states, chunk, element)

    @cute.jit
    def fetch(self, ring: list[Any], address: Int64, pitch: Int64, tiles: Int32, k: int) -> Int64:
        """The first tiles. Returns the address behind them."""
        if const_expr(k < self.ahead):  # noqa: SIM102
            if k < tiles:
                self.load(ring[k], address, THREADS * VECTOR, 32)
                address = self.fetch(ring, address + pitch, pitch, tiles, k + 1)
        return address

    @cute.jit
    def load_decays(self, decay: cute.Tensor, sequence: Sequence, head: Int32, first: Int32) -> Float32:
        """A lane has that of one of the next tiles."""
        tile = cutlass.min(first + cute.arch.lane_idx() % self.ahead, sequence.tiles - 1)
        found = Float32(0.0)
        if sequence.tiles > first:
            found = vector(decay, flat(decay, sequence.slot + tile, head), 1)[0]
        return found

    def step(self, carry: Any, own: Any, factor: Any) -> None:
        own = widen(own)
        for k in range(0, PIECES * VECTOR, 2):
            pair = (carry[k], carry[k + 1])
            carry[k], carry[k + 1] = fma2(True, pair, (factor, factor), (own[k], own[k + 1]))

    def parts(self, dtype: Any, address: Any, distance: Any, nbytes: int) -> Any:
        """The elements of a thread in memory, its pieces `distance` elements apart, in accesses of at most `nbytes`."""
        item = dtype.width // 8
        width = min(VECTOR, nbytes // item)
        for piece in range(PIECES):
            for k in range(0, VECTOR, width):
                at = address + (distance * piece + k) * item
                pointer = cute.make_ptr(dtype, at, cute.AddressSpace.gmem, assumed_align=width * item)
                yield piece * VECTOR + k, cute.make_tensor(pointer, cute.make_layout(width))

    def load(self, target: Any, address: Any, distance: Any, nbytes: int) -> None:
        for k, source in self.parts(target.element_type, address, distance, nbytes):
            copy = cute.make_copy_atom(
                cute.nvgpu.CopyUniversalOp(),
                target.element_type,
                num_bits_per_copy=cute.size(source) * target.element_type.width,
            )
            cute.copy(copy, source, cute.make_tensor(target.iterator + k, source.layout))

    def store(self, carry: Any, dtype: Any, address: Any, distance: Any) -> None:
        """Rounded."""
        rounded = cute.make_rmem_tensor((VECTOR, PIECES), dtype)
        rounded.store(carry.load().to(dtype))
        for k, target in self.parts(dtype, address, distance, VECTOR_BYTES):
            cute.autovec_copy(cute.make_tensor(rounded.iterator + k, target.layout), target)

    def state_address(self, states: Any, state: Any, element: Element) -> tuple[Any, Any]:
        """(address, elements from a piece to the next one)"""
        offset = flat(states, state, element.head, element.row) + element.column
        return states.iterator.toint() + offset * (states.element_type.width // 8), Int64(states.stride[2]) * self.rows

    def store_state(self, carry: Any, states: Any, state: Any, element: Element) -> None:
        self.store(carry, states.element_type, *self.state_address(states, state, element))

    @cute.jit
    def load_start(self, start: cute.Tensor, states: MaybeTensor, sequence: Sequence, element: Element) -> None:
        start.fill(0.0)
        if const_expr(states is not None):  # noqa: SIM102
            if sequence.read:
                address, distance = self.state_address(states, sequence.state, element)
                self.load(start, address, distance, VECTOR_BYTES)


StatePassingKernel.kernel.set_name_prefix("state_passing", remove_cutlass_symbol=True, keep_mangled_name=False)
