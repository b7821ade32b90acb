"""state_passing: from tile to tile of each sequence, elementwise and in fp32. README.md has the algorithm.

    incoming[tile] = carry,    carry = 2^decay[tile] carry + local[tile]

A thread has VECTOR neighbouring elements of one head's state, in every `step`-th sequence, and goes through the tiles
of one sequence after the other. `ahead` tiles are on their way from memory, and the state that the next sequence
starts with. All CTAs are resident at a time where heads allow that: chunk_scan may begin to set itself up.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr, range_constexpr

from ..arithmetic import fma2, numeric, widen
from ..dims import ITEMSIZE, VECTOR_BYTES, WARP
from ..views import flat, vector
from .config import Chunked, Q
from .tiles import bound, first_slot, tiles_per_row

MaybeTensor = Any  # a cute.Tensor, or None where the configuration has none

VECTOR = 8  # elements of a thread: 16 bytes where they are narrow
THREADS = 128
RESIDENT = 8  # CTAs of a multiprocessor: 64 registers for each thread
AHEAD_BYTES = 128  # of a thread


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
    local: Any
    decay: Any
    incoming: Any


class StatePassingKernel:
    def __init__(self, config: Chunked) -> None:
        self.config = config
        self.local, self.dtype = numeric(config.local), numeric(config.dtype)
        self.initial = numeric(config.initial or "float32")
        self.ahead = AHEAD_BYTES // (VECTOR * ITEMSIZE[config.local])
        self.blocks = config.headdim * config.dstate // (VECTOR * THREADS)  # of a head; there is no rest

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
        element = self.element(head, block * THREADS + thread)
        # What comes from the caller is complete: chunk_state, which has let this kernel start, has waited for it.
        start = cute.make_rmem_tensor(VECTOR, self.initial)
        following = self.locate(sequences, group)
        self.load_start(start, initial, following, element)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        carry = cute.make_rmem_tensor(VECTOR, Float32)
        for index in cutlass.range(group, sequences.count, step, unroll=1):
            sequence = following
            carry.store(widen(start))
            following = self.locate(sequences, index + step)
            self.carry_on(carry, start, tiles, sequences, initial, chunk_states, index, sequence, following, element)
            if const_expr(final is not None):  # noqa: SIM102  (the compiler decides the one, the GPU the other)
                if sequence.live:
                    self.store_state(carry, final, sequence.state, element)

    def element(self, head: Int32, number: Int32) -> Element:
        size, N = self.config.headdim * self.config.dstate, self.config.dstate
        first = number * VECTOR
        return Element(head, first // N, first % N, Int64(head) * size + first)

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
        state, live = Int64(index), there
        if const_expr(sequences.slots is not None):
            state = Int64(sequences.slots[index])
            inside = (state >= 0) & (state < Int64(sequences.states))
            live = there & (state != sequences.pad_slot) & inside & (tiles > 0)
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
        ring = [cute.make_rmem_tensor(VECTOR, self.local) for _ in range(self.ahead)]
        row = Int32(0)
        if const_expr(chunk_states is not None):
            row = self.first_chunk(sequences, index)
        # Addresses that move on from tile to tile, of what is stored and of what is loaded.
        pitch = Int64(tiles.local.stride[0])
        read_pitch, write_pitch = pitch * (self.local.width // 8), pitch * (self.dtype.width // 8)
        offset = pitch * sequence.slot + element.offset
        here = tiles.incoming.iterator.toint() + offset * (self.dtype.width // 8)
        ahead = tiles.local.iterator.toint() + offset * (self.local.width // 8)
        decays = self.load_decays(tiles.decay, sequence, element.head, 0)
        for k in range_constexpr(self.ahead):
            if k < sequence.tiles:
                self.load(ring[k], ahead)
            ahead += read_pitch
        self.load_start(start, initial, following, element)
        for base in cutlass.range(0, sequence.tiles, self.ahead, unroll=1):
            factors = cute.math.exp2(decays, fastmath=True)
            decays = self.load_decays(tiles.decay, sequence, element.head, base + self.ahead)
            for k in range_constexpr(self.ahead):
                tile = base + k
                if tile < sequence.tiles:
                    self.store(carry, self.dtype, here)
                    self.step(carry, ring[k], cute.arch.shuffle_sync(factors, k))
                    if tile + self.ahead < sequence.tiles:
                        self.load(ring[k], ahead)
                    if const_expr(chunk_states is not None):
                        chunk = row + tile // self.config.chunk_tiles
                        ends = ((tile + 1) % self.config.chunk_tiles == 0) | (tile + 1 == sequence.tiles)
                        if ends & (chunk < chunk_states.shape[0]):
                            self.store_state(carry, chunk_states, chunk, element)
                here, ahead = here + write_pitch, ahead + read_pitch

    @cute.jit
    def load_decays(self, decay: cute.Tensor, sequence: Sequence, head: Int32, first: Int32) -> Float32:
        """A lane has that of one of the next tiles."""
        tile = cutlass.min(first + cute.arch.lane_idx() % self.ahead, sequence.tiles - 1)
        found = Float32(0.0)
        if sequence.tiles > first:
            found = vector(decay, flat(decay, sequence.slot + tile, head), 1)[0]
        return found

    def load(self, target: Any, address: Any) -> None:
        """VECTOR elements, in pieces of at most 32 bytes."""
        width = min(VECTOR, 256 // target.element_type.width)
        copy = cute.make_copy_atom(
            cute.nvgpu.CopyUniversalOp(), target.element_type, num_bits_per_copy=width * target.element_type.width
        )
        layout = cute.make_layout(width)
        for k in range(0, VECTOR, width):
            source = self.pointer(target.element_type, address + k * (target.element_type.width // 8), 32)
            cute.copy(copy, cute.make_tensor(source, layout), cute.make_tensor(target.iterator + k, layout))

    def pointer(self, dtype: Any, address: Any, align: int) -> Any:
        return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)

    def step(self, carry: Any, own: Any, factor: Any) -> None:
        own = widen(own)
        for k in range(0, VECTOR, 2):
            pair = (carry[k], carry[k + 1])
            carry[k], carry[k + 1] = fma2(True, pair, (factor, factor), (own[k], own[k + 1]))

    def store(self, carry: Any, dtype: Any, address: Any) -> None:
        """Rounded, in pieces of 16 bytes."""
        rounded = cute.make_rmem_tensor(VECTOR, dtype)
        rounded.store(carry.load().to(dtype))
        width = VECTOR_BYTES * 8 // dtype.width
        layout = cute.make_layout(width)
        for k in range(0, VECTOR, width):
            target = self.pointer(dtype, address + k * (dtype.width // 8), VECTOR_BYTES)
            cute.autovec_copy(cute.make_tensor(rounded.iterator + k, layout), cute.make_tensor(target, layout))

    def state_address(self, states: Any, state: Any, element: Element) -> Any:
        offset = flat(states, state, element.head, element.row) + element.column
        return states.iterator.toint() + offset * (states.element_type.width // 8)

    def store_state(self, carry: Any, states: Any, state: Any, element: Element) -> None:
        self.store(carry, states.element_type, self.state_address(states, state, element))

    @cute.jit
    def load_start(self, start: cute.Tensor, states: MaybeTensor, sequence: Sequence, element: Element) -> None:
        start.fill(0.0)
        if const_expr(states is not None):  # noqa: SIM102
            if sequence.read:
                width = VECTOR_BYTES * 8 // states.element_type.width
                layout = cute.make_layout(width)
                address = self.state_address(states, sequence.state, element)
                for k in range_constexpr(0, VECTOR, width):
                    source = self.pointer(states.element_type, address + k * (states.element_type.width // 8), VECTOR_BYTES)
                    cute.autovec_copy(cute.make_tensor(source, layout), cute.make_tensor(start.iterator + k, layout))


StatePassingKernel.kernel.set_name_prefix("state_passing", remove_cutlass_symbol=True, keep_mangled_name=False)
