"""state_passing: from tile to tile of each sequence, elementwise and in fp32. README.md has the algorithm.

    incoming[tile] = carry,    carry = 2^decay[tile] carry + local[tile]

A thread has VECTOR neighbouring elements of one head's state and goes through the tiles of a sequence, AHEAD of which
are on their way from memory.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr, range_constexpr

from ..arithmetic import fma2, numeric, widen
from ..dims import VECTOR_BYTES, WARP
from ..views import flat, load_wide, vector
from .config import Chunked, Q
from .tiles import bound, first_slot, tiles_per_row

MaybeTensor = Any  # a cute.Tensor, or None where the configuration has none

VECTOR = 8  # elements of a thread: 16 bytes where they are narrow
THREADS = 128
AHEAD = 8  # tiles


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


class StatePassingKernel:
    def __init__(self, config: Chunked) -> None:
        self.config = config
        self.local, self.dtype = numeric(config.local), numeric(config.dtype)
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
        stream: Any,
    ) -> None:
        sequences = batch
        if const_expr(offsets is not None):
            sequences = offsets.shape[0] - 1
        self.kernel(
            local, decay, seqlen, offsets, initial, slots, flags, pad_slot, incoming, final, chunk_states
        ).launch(
            grid=[sequences * self.blocks, decay.shape[1], 1],
            block=[THREADS, 1, 1],
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        local: cute.Tensor,
        decay: cute.Tensor,
        seqlen: Int32,
        offsets: MaybeTensor,
        initial: MaybeTensor,
        slots: MaybeTensor,
        flags: MaybeTensor,
        pad_slot: Int64,
        incoming: cute.Tensor,
        final: MaybeTensor,
        chunk_states: MaybeTensor,
    ) -> None:
        block, head, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        index = block // self.blocks
        element = self.element(head, block % self.blocks * THREADS + thread)
        states = initial if const_expr(initial is not None) else final
        sequence = self.locate(index, seqlen, offsets, slots, flags, pad_slot, states)
        carry = cute.make_rmem_tensor(VECTOR, Float32)
        carry.fill(0.0)
        # What comes from the caller is complete: chunk_state, which has let this kernel start, has waited for it.
        if const_expr(initial is not None):  # noqa: SIM102  (the compiler decides the one, the GPU the other)
            if sequence.read:
                self.load_state(carry, initial, sequence, element)
        row = Int32(0)
        if const_expr(chunk_states is not None):
            row = self.first_chunk(offsets, index, seqlen)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        self.carry_on(carry, local, decay, incoming, chunk_states, sequence, element, row)
        if const_expr(final is not None):  # noqa: SIM102
            if sequence.live:
                self.store_state(carry, final, sequence.state, element)

    def element(self, head: Int32, number: Int32) -> Element:
        size, N = self.config.headdim * self.config.dstate, self.config.dstate
        first = number * VECTOR
        return Element(head, first // N, first % N, Int64(head) * size + first)

    @cute.jit
    def locate(
        self,
        index: Int32,
        seqlen: Int32,
        offsets: MaybeTensor,
        slots: MaybeTensor,
        flags: MaybeTensor,
        pad_slot: Int64,
        states: MaybeTensor,
    ) -> Sequence:
        tiles = tiles_per_row(seqlen)
        slot = index * tiles
        if const_expr(offsets is not None):
            start = bound(offsets, index, seqlen)
            tiles = tiles_per_row(cutlass.max(bound(offsets, index + 1, seqlen) - start, 0))
            slot = first_slot(start, index)
        state, live = Int64(index), Boolean(True)
        if const_expr(slots is not None):
            state = Int64(slots[index])
            live = (state != pad_slot) & (state >= 0) & (state < Int64(states.shape[0])) & (tiles > 0)
        read = live
        if const_expr(flags is not None):
            read = live & flags[index]
        return Sequence(slot, tiles, state, read, live)

    @cute.jit
    def first_chunk(self, offsets: MaybeTensor, index: Int32, seqlen: Int32) -> Any:
        """Rows of `chunk_states` that the sequences before this one have; every warp counts for itself."""
        size = self.config.chunk_tiles * Q
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
        local: cute.Tensor,
        decay: cute.Tensor,
        incoming: cute.Tensor,
        chunk_states: MaybeTensor,
        sequence: Sequence,
        element: Element,
        row: Int32,
    ) -> None:
        ring = [cute.make_rmem_tensor(VECTOR, self.local) for _ in range(AHEAD)]
        decays = cute.make_rmem_tensor(AHEAD, Float32)
        local = cute.make_tensor(local.iterator.align(32), local.layout)  # for loads of 256 bits
        # Offsets that move on from tile to tile, of what is stored and of what is loaded.
        here = flat(incoming, sequence.slot) + element.offset
        ahead, ahead_decay = here, flat(decay, sequence.slot, element.head)
        pitch, decay_pitch = Int64(incoming.stride[0]), Int64(decay.stride[0])
        for k in range_constexpr(AHEAD):
            if k < sequence.tiles:
                decays[k] = self.load_tile(ring[k], local, decay, ahead, ahead_decay)
            ahead, ahead_decay = ahead + pitch, ahead_decay + decay_pitch
        for base in cutlass.range(0, sequence.tiles, AHEAD, unroll=1):
            for k in range_constexpr(AHEAD):
                tile = base + k
                if tile < sequence.tiles:
                    self.store(carry, incoming, here)
                    self.step(carry, ring[k], cute.math.exp2(decays[k], fastmath=True))
                    if tile < sequence.tiles - AHEAD:
                        decays[k] = self.load_tile(ring[k], local, decay, ahead, ahead_decay)
                    if const_expr(chunk_states is not None):
                        chunk = row + tile // self.config.chunk_tiles
                        ends = ((tile + 1) % self.config.chunk_tiles == 0) | (tile + 1 == sequence.tiles)
                        if ends & (chunk < chunk_states.shape[0]):
                            self.store_state(carry, chunk_states, chunk, element)
                here, ahead, ahead_decay = here + pitch, ahead + pitch, ahead_decay + decay_pitch

    def load_tile(self, target: Any, local: Any, decay: Any, offset: Any, decay_offset: Any) -> Any:
        """The tile's decay; its own state goes to `target`."""
        atom = cute.nvgpu.CopyUniversalOp()
        copy = cute.make_copy_atom(atom, self.local, num_bits_per_copy=VECTOR * self.local.width)
        cute.copy(copy, vector(local, offset, VECTOR), target)
        return vector(decay, decay_offset, 1)[0]

    def step(self, carry: Any, own: Any, factor: Any) -> None:
        own = widen(own)
        for k in range(0, VECTOR, 2):
            pair = (carry[k], carry[k + 1])
            carry[k], carry[k + 1] = fma2(True, pair, (factor, factor), (own[k], own[k + 1]))

    def store(self, carry: Any, target: Any, offset: Any) -> None:
        """Rounded, in pieces of 16 bytes."""
        rounded = cute.make_rmem_tensor(VECTOR, target.element_type)
        rounded.store(carry.load().to(target.element_type))
        width = VECTOR_BYTES * 8 // target.element_type.width
        for k in range(0, VECTOR, width):
            part = cute.make_tensor(rounded.iterator + k, cute.make_layout(width))
            cute.autovec_copy(part, vector(target, offset + k, width))

    def store_state(self, carry: Any, states: Any, state: Any, element: Element) -> None:
        self.store(carry, states, flat(states, state, element.head, element.row) + element.column)

    def load_state(self, carry: Any, states: Any, sequence: Sequence, element: Element) -> None:
        width = VECTOR_BYTES * 8 // states.element_type.width
        offset = flat(states, sequence.state, element.head, element.row) + element.column
        for k in range(0, VECTOR, width):
            part = load_wide(vector(states, offset + k, width))
            for j in range(width):
                carry[k + j] = part[j]


StatePassingKernel.kernel.set_name_prefix("state_passing", remove_cutlass_symbol=True, keep_mangled_name=False)
