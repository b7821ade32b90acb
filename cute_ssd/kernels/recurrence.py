"""The recurrence kernel: one token after the other, the state in registers. README.md has the algorithm and the layout.

    state = exp(A dt) state + dt x Bᵀ,    y = C state + D x,    y *= silu(z)

Names: P headdim, N dstate, H nheads, T tokens of a tile; "row" is a row of headdim, "column" one of dstate.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from .arithmetic import add2, choose, clamp, fma2, kept, mul2, numeric, silu, softplus
from .dims import WARP, Recurrence
from .views import bound, flat, load_wide, vector, vector_in

MaybeTensor = Any  # a cute.Tensor, or None where the configuration has none


class Tensors(NamedTuple):
    """As in `RecurrenceKernel.__call__`; the first four are staged, in this order."""

    x: Any
    z: Any
    B: Any
    C: Any
    dt: Any
    y: Any
    offsets: Any
    initial: Any
    final: Any
    slots: Any
    flags: Any
    last: Any
    chunk_states: Any
    chunk_offsets: Any


class Place(NamedTuple):
    """What a CTA works on. Offsets are in elements, of the first token and the CTA's first row."""

    sequence: Any
    start: Any  # its first token, in the row
    length: Any  # tokens
    head: Any
    row: Any  # first row of headdim
    x: Any
    z: Any
    y: Any
    dt: Any
    B: Any
    C: Any
    read: Any  # whether there is a state to start from
    live: Any  # whether there is a state to leave; if not, a decode step gives zeros
    last: Any  # whether this state is the one behind the last token of all
    slot: Any


class Thread(NamedTuple):
    index: Any  # in the CTA
    lane: Any  # in the warp
    part: Any  # which of the lanes that share rows
    column: Any  # first column of its first chunk
    warp_row: Any  # first row of the warp, in the CTA
    row: Any  # first row of the thread's group of lanes, in the CTA
    quads: Any  # first row of each four rows, in the order of the registers, in the CTA
    own: Any  # where the sums go that this lane ends up with: first of its rows, plus block_rows for each copy
    turn: Any  # Note [Turned rows]


class Smem(NamedTuple):
    x: Any  # (block_rows, T, stage)
    z: Any  # (block_rows, T, stage)
    B: Any  # (columns, T, stage)
    C: Any  # (columns, T, stage)
    scale: Any  # fp32 (decay | dt, T, stage)
    step: Any  # fp32 (block_rows, T): dt x
    y: Any  # fp32 (block_rows copies, T): C state
    D: Any  # fp32 (block_rows,)


class RecurrenceKernel:
    """Compiled for one `Recurrence`. Tensors (batch, seqlen, ...); sequences packed by offsets lie in batch row 0."""

    def __init__(self, config: Recurrence) -> None:
        self.config = config
        self.layout = config.layout
        self.threads = self.layout.warps * WARP
        self.tile = config.tile

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,  # (batch, seqlen, H, P)
        dt: cute.Tensor,  # (batch, seqlen, H)
        A: MaybeTensor,  # (H,)
        B: cute.Tensor,  # (batch, seqlen, G, N)
        C: cute.Tensor,
        D: MaybeTensor,  # (H, P)
        z: MaybeTensor,
        dt_bias: MaybeTensor,  # (H,)
        y: cute.Tensor,
        offsets: MaybeTensor,  # (num_seqs + 1,)
        initial: MaybeTensor,  # (states, H, P, N)
        final: MaybeTensor,
        slots: MaybeTensor,  # (num_seqs,)
        flags: MaybeTensor,  # (num_seqs,)
        last: MaybeTensor,  # (1, H, P, N)
        chunk_states: MaybeTensor,  # (chunks, H, P, N)
        chunk_offsets: MaybeTensor,  # (chunks + 1,)
        chunk_size: Int32,
        dt_min: Float32,
        dt_max: Float32,
        pad_slot: Int64,
        stream: Any,
    ) -> None:
        sequences = x.shape[0]
        if const_expr(offsets is not None):
            sequences = offsets.shape[0] - 1
        self.kernel(
            x, dt, A, B, C, D, z, dt_bias, y, offsets, initial, final, slots, flags, last, chunk_states, chunk_offsets,
            chunk_size, dt_min, dt_max, pad_slot,
        ).launch(
            grid=[sequences * x.shape[2] * self.config.blocks, 1, 1],
            block=[self.threads, 1, 1],
            smem=self.config.shared_bytes,
            stream=stream,
            # Where addresses of single elements take the registers, ptxas would rather spill some than have fewer CTAs.
            min_blocks_per_mp=0 if self.config.has_vectors else 1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        dt: cute.Tensor,
        A: MaybeTensor,
        B: cute.Tensor,
        C: cute.Tensor,
        D: MaybeTensor,
        z: MaybeTensor,
        dt_bias: MaybeTensor,
        y: cute.Tensor,
        offsets: MaybeTensor,
        initial: MaybeTensor,
        final: MaybeTensor,
        slots: MaybeTensor,
        flags: MaybeTensor,
        last: MaybeTensor,
        chunk_states: MaybeTensor,
        chunk_offsets: MaybeTensor,
        chunk_size: Int32,
        dt_min: Float32,
        dt_max: Float32,
        pad_slot: Int64,
    ) -> None:
        thread, smem = self.thread(), self.allocate()
        tensors = Tensors(
            x, z, B, C, dt, y, offsets, initial, final, slots, flags, last, chunk_states, chunk_offsets
        )  # fmt: skip
        place = self.locate(tensors, pad_slot)
        # The copies first: they need no slot, and a narrow state is waited for when it is widened.
        cursor = self.cursor((place.x, place.z, place.B, place.C))
        self.stage(smem, tensors, cursor, place, thread, Int32(0))
        raw = self.load_dt(dt, place, thread, 0)
        rate, bias = Float32(0.0), Float32(0.0)
        if const_expr(A is not None):
            rate = A[place.head].to(Float32)
        if const_expr(dt_bias is not None):
            bias = dt_bias[place.head].to(Float32)
        state = cute.make_rmem_tensor((self.layout.rows, self.layout.chunks * self.layout.vector), Float32)
        state.fill(0.0)
        if const_expr(initial is not None):  # noqa: SIM102  (the compiler decides the one, the GPU the other)
            if place.read:
                self.load_state(state, initial, place, thread)
        self.fill_constants(smem, D, place, thread)
        self.discretise(smem, raw, rate, bias, dt_min, dt_max, thread, 0)
        chunk = cute.make_rmem_tensor(2, Int32)  # the row of its state, the token behind it
        if const_expr(chunk_states is not None):
            self.first_chunk(chunk, tensors, place, thread, chunk_size)

        tiles = cute.ceil_div(place.length, self.tile)
        for tile in cutlass.range(tiles, unroll=1):
            count = cutlass.min(place.length - tile * self.tile, self.tile)
            current = 0 if const_expr(self.config.single) else tile % 2
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            if const_expr(not self.config.single):
                self.stage(smem, tensors, cursor, place, thread, tile + 1)
                raw = self.load_dt(dt, place, thread, tile + 1)
            self.prepare(smem, place, thread, count, current)
            cute.arch.sync_warp()
            for token in cutlass.range(count, unroll=1):
                self.token(state, smem, thread, token, current)
                if const_expr(chunk_states is not None):
                    self.leave_chunk(state, chunk, tensors, place, thread, tile * self.tile + token + 1, chunk_size)
            if const_expr(not self.config.single):
                self.discretise(smem, raw, rate, bias, dt_min, dt_max, thread, 1 - current)
            cute.arch.sync_warp()
            self.finish(y, smem, place, thread, tile, count, current)
        if const_expr(final is not None):  # noqa: SIM102
            if place.live:
                self.store_state(state, final, place.slot, place, thread)
        if const_expr(last is not None):  # noqa: SIM102
            if place.last:
                self.store_state(state, last, 0, place, thread)

    def thread(self) -> Thread:
        layout = self.layout
        index, _, _ = cute.arch.thread_idx()
        lane = index % WARP
        part, group = lane % layout.lanes, lane // layout.lanes
        warp_row = index // WARP * layout.warp_rows
        row = warp_row + group * layout.rows
        own = part * layout.rows // layout.lanes
        copy = part % layout.copies * layout.block_rows
        part, own_place, turn = kept(part), kept(row + own + copy), kept(own // 4 * 4)
        quads = tuple(kept(row + (quad ^ turn)) for quad in range(0, layout.rows, 4))
        return Thread(index, lane, part, kept(part * layout.vector), warp_row, row, quads, own_place, turn)

    def allocate(self) -> Smem:
        layout, stages, tile = self.layout, self.config.stages, self.tile
        dtype, rows = numeric(self.config.dtype), layout.block_rows
        smem = SmemAllocator()

        def tensor(element: Any, *shape: int) -> Any:
            return smem.allocate_tensor(element, cute.make_layout(shape), 16)

        staged_x = tensor(dtype, rows, tile, stages)
        staged_z = tensor(dtype, rows, tile, stages) if self.config.z else None
        staged_B = tensor(dtype, layout.columns, tile, stages)
        staged_C = tensor(dtype, layout.columns, tile, stages)
        step, y = tensor(Float32, rows, tile), tensor(Float32, rows * layout.copies, tile)
        D = tensor(Float32, rows) if self.config.D is not None else None
        return Smem(staged_x, staged_z, staged_B, staged_C, tensor(Float32, 2, tile, stages), step, y, D)

    @cute.jit
    def locate(self, t: Tensors, pad_slot: Int64) -> Place:
        """The sequence, head and rows of this CTA."""
        block, _, _ = cute.arch.block_idx()
        nheads = t.x.shape[2]
        row = block % self.config.blocks * self.layout.block_rows
        head = block // self.config.blocks % nheads
        sequence = block // (self.config.blocks * nheads)
        batch, start, length = sequence, Int32(0), t.x.shape[1]
        last = cutlass.Boolean(False)
        if const_expr(t.offsets is not None):
            start = bound(t.offsets, sequence, t.x.shape[1])
            stop = bound(t.offsets, sequence + 1, t.x.shape[1])
            batch, length = Int32(0), cutlass.max(stop - start, 0)
            if const_expr(t.last is not None):
                # Offsets never fall: behind the last sequence with tokens are only such as end where it does. Where
                # none has any, the row leaves what it started with.
                end = bound(t.offsets, t.offsets.shape[0] - 1, t.x.shape[1])
                last = ((length > 0) & (stop == end)) | ((sequence == 0) & (end == 0))
        slot = Int64(sequence)
        live = cutlass.Boolean(True)
        if const_expr(t.slots is not None):
            slot = Int64(t.slots[sequence])
            states = Int64((t.initial if const_expr(t.initial is not None) else t.final).shape[0])
            live = (slot != pad_slot) & (slot >= 0) & (slot < states) & (length > 0)
        read = live
        if const_expr(t.initial is not None and t.offsets is not None and t.slots is None):
            read = slot < Int64(t.initial.shape[0])  # the state of a whole row is that of its first sequence
        if const_expr(t.flags is not None):
            read = live & t.flags[sequence]
        group = head // (nheads // t.B.shape[2])
        return Place(
            sequence,
            start,
            length,
            head,
            row,
            flat(t.x, batch, start, head, row),
            flat(t.z, batch, start, head, row),
            flat(t.y, batch, start, head, row),
            flat(t.dt, batch, start, head),
            flat(t.B, batch, start, group),
            flat(t.C, batch, start, group),
            read,
            live,
            last,
            slot,
        )

    @cute.jit
    def first_chunk(self, chunk: cute.Tensor, t: Tensors, place: Place, thread: Thread, chunk_size: Int32) -> None:
        """Where the sequence's first chunk ends, and how many chunks the sequences before it have."""
        row = Int32(0)
        if const_expr(t.chunk_offsets is None):
            for other in cutlass.range(thread.lane, place.sequence, WARP, unroll=1):
                length = bound(t.offsets, other + 1, t.x.shape[1]) - bound(t.offsets, other, t.x.shape[1])
                row += (cutlass.max(length, 0) + chunk_size - 1) // chunk_size
            row = cute.arch.warp_reduction_sum(row)
        else:
            beyond = Int32(t.chunk_offsets.shape[0] - 1)  # the chunk is at `row` or behind it, but before this one
            while row < beyond:
                middle = (row + beyond) // 2
                if bound(t.chunk_offsets, middle + 1, t.x.shape[1]) <= place.start:
                    row = middle + 1
                else:
                    beyond = middle
        chunk[0] = row
        chunk[1] = self.chunk_end(t, place, row, Int32(0), chunk_size)

    @cute.jit
    def chunk_end(self, t: Tensors, place: Place, row: Int32, begin: Int32, chunk_size: Int32) -> Int32:
        """Tokens of the sequence before the end of the chunk that begins behind `begin` of them."""
        end = begin + chunk_size
        if const_expr(t.chunk_offsets is not None):
            there = cutlass.min(row + 1, t.chunk_offsets.shape[0] - 1)
            end = bound(t.chunk_offsets, there, t.x.shape[1]) - place.start
        return end

    @cute.jit
    def leave_chunk(self, state: cute.Tensor, chunk: cute.Tensor, t: Tensors, place: Place, thread: Thread,
                    tokens: Int32, chunk_size: Int32) -> None:  # fmt: skip
        """Where a chunk ends behind this many tokens: its state, and where the next one ends."""
        ends = tokens == chunk[1]
        if const_expr(t.chunk_offsets is None):
            ends = ends | (tokens == place.length)
        if ends:
            row = chunk[0]
            if row < t.chunk_states.shape[0]:
                self.store_state(state, t.chunk_states, row, place, thread)
            chunk[0] = row + 1
            chunk[1] = self.chunk_end(t, place, row + 1, tokens, chunk_size)

    @cute.jit
    def fill_constants(self, smem: Smem, D: MaybeTensor, place: Place, thread: Thread) -> None:
        """D of the CTA's rows, and zeros where B and C have no columns."""
        layout, N = self.layout, self.config.dstate
        if const_expr(D is not None):
            for row in cutlass.range(thread.index, layout.block_rows, self.threads, unroll=1):
                channel = cutlass.min(place.row + row, self.config.headdim - 1)
                smem.D[row] = D[place.head, channel].to(Float32)
        padding = layout.columns - N
        if const_expr(padding > 0):
            for index in cutlass.range(thread.index, padding * self.tile * self.config.stages, self.threads, unroll=1):
                column, token = N + index % padding, index // padding
                for staged in (smem.B, smem.C):
                    zero = staged.element_type(0.0)
                    staged[column, token % self.tile, token // self.tile] = zero

    def pieces(self, index: Any, workers: int, columns: int, width: int) -> list[tuple[Any, int, Any]]:
        """(token, later, column) of the pieces of `width` of `columns` elements of a tile's tokens that worker number
        `index` does: those of token + later. `later` is known at compile time, so that it costs nothing at run time,
        where the workers take whole tokens in each step."""
        each = -(-columns // width)
        found = []
        for step in range(-(-each * self.tile // workers)):
            if workers % each == 0:
                found.append((index // each, step * (workers // each), index % each * width))
            else:
                later = index + step * workers
                found.append((later // each, 0, later % each * width))
        return found

    def cursor(self, offsets: tuple[Any, ...]) -> Any:
        """Where the next tile of each tensor starts: 64-bit offsets in registers, which `stage` moves on."""
        where = cute.make_rmem_tensor(len(offsets), Int64)
        for k, offset in enumerate(offsets):
            where[k] = offset
        return where

    @cute.jit
    def stage(self, smem: Smem, tensors: Tensors, cursor: cute.Tensor, place: Place, thread: Thread,
              tile: Int32) -> None:  # fmt: skip
        """Starts to copy a tile of x, z, B and C, which may lie behind the end, to shared memory."""
        count = cutlass.min(place.length - tile * self.tile, self.tile)
        stage = tile % self.config.stages
        rows, columns = min(self.config.headdim, self.layout.block_rows), self.config.dstate
        sizes = (rows, rows, columns, columns)
        for k, target in enumerate((smem.x, smem.z, smem.B, smem.C)):
            if const_expr(target is not None):
                self.copy_tile(tensors[k], target, cursor[k], sizes[k], k < 2, place, count, stage, thread)
                cursor[k] = cursor[k] + Int64(tensors[k].stride[1]) * self.tile
        cute.arch.cp_async_commit_group()

    @cute.jit
    def copy_tile(self, source: cute.Tensor, target: cute.Tensor, offset: Int64, size: Constexpr, rows: Constexpr,
                  place: Place, count: Int32, stage: Int32, thread: Thread) -> None:  # fmt: skip
        """The first `size` elements of `count` tokens; of them, where they are `rows` of headdim, those there are."""
        width = self.config.row_vector if const_expr(rows) else self.config.column_vector
        pitch = Int64(source.stride[1])
        whole = self.config.whole_blocks or not rows
        each = size // width
        bits = width * source.element_type.width
        copy = cute.make_copy_atom(cpasync.CopyG2SOp(), source.element_type, num_bits_per_copy=max(bits, 32))
        if const_expr(width > 1 and self.threads % each == 0):
            for token, later, column in self.pieces(thread.index, self.threads, size, width):
                present = token < count - later
                if const_expr(not whole):
                    present = present & (place.row + column < self.config.headdim)
                if present:
                    where = offset + Int64(token) * pitch + column + later * pitch
                    cute.copy(
                        copy, vector(source, where, width), vector_in(target, width, column, token + later, stage)
                    )
        else:
            # Where threads take no whole tokens, unrolled copies would each keep an address of their own in registers.
            for index in cutlass.range(thread.index, count * each, self.threads, unroll=1 if width > 1 else 2):
                token, column = index // each, index % each * width
                present = cutlass.Boolean(True)
                if const_expr(not whole):
                    present = place.row + column < self.config.headdim
                if present:
                    found = vector(source, offset + Int64(token) * pitch + column, width)
                    if const_expr(width > 1):
                        cute.copy(copy, found, vector_in(target, width, column, token, stage))
                    else:
                        target[column, token, stage] = found[0]

    @cute.jit
    def load_dt(self, dt: cute.Tensor, place: Place, thread: Thread, tile: Int32) -> Any:
        """dt or log_decay of token number thread.index of the tile."""
        token = tile * self.tile + thread.index
        raw = Float32(0.0)
        if (thread.index < self.tile) & (token < place.length):
            raw = vector(dt, place.dt + Int64(token) * Int64(dt.stride[1]), 1)[0].to(Float32)
        return raw

    @cute.jit
    def discretise(self, smem: Smem, raw: Float32, rate: Float32, bias: Float32, dt_min: Float32, dt_max: Float32,
                   thread: Thread, stage: Int32) -> None:  # fmt: skip
        """Decay and step of the tile's tokens, one thread for each, into shared memory."""
        if thread.index < self.tile:
            if const_expr(self.config.A is None):
                smem.scale[0, thread.index, stage] = cute.math.exp(raw)
            else:
                dt = raw + bias
                if const_expr(self.config.softplus):
                    dt = softplus(dt)
                dt = clamp(dt, dt_min, dt_max)
                smem.scale[0, thread.index, stage] = cute.math.exp(rate * dt)
                smem.scale[1, thread.index, stage] = dt

    @cute.jit
    def prepare(self, smem: Smem, place: Place, thread: Thread, count: Int32, stage: Int32) -> None:
        """dt x of the warp's rows in fp32; zero where there are no rows, so that their states stay zero."""
        width = self.config.row_vector
        for token, later, column in self.pieces(thread.lane, WARP, self.layout.warp_rows, width):
            row = thread.warp_row + column
            if token < count - later:
                values = cute.make_rmem_tensor(width, Float32)
                there = row
                if const_expr(not self.config.whole_blocks):
                    there = cutlass.min(row, self.config.headdim - width - place.row)
                values.store(load_wide(vector_in(smem.x, width, there, token + later, stage)))
                if const_expr(self.config.A is not None):
                    values.store(values.load() * smem.scale[1, token + later, stage])
                if const_expr(not self.config.whole_blocks):
                    for k in range_constexpr(width):
                        values[k] = choose(place.row + row < self.config.headdim, values[k], 0.0)
                cute.autovec_copy(values, vector_in(smem.step, width, row, token + later))

    @cute.jit
    def token(self, state: cute.Tensor, smem: Smem, thread: Thread, token: Int32, stage: Int32) -> None:
        """One step of the recurrence; leaves C state of the lane's own rows in shared memory."""
        layout, packed = self.layout, self.config.f32x2
        rows, width = layout.rows, layout.vector
        decay = smem.scale[0, token, stage]
        steps, sums = [], []
        for quad in range_constexpr(rows // 4):
            four = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(vector_in(smem.step, 4, thread.quads[quad], token), four)
            steps += [(four[0], four[1]), (four[2], four[3])]
        for chunk in range_constexpr(layout.chunks):
            column = thread.column + chunk * layout.lanes * width
            b = load_wide(vector_in(smem.B, width, column, token, stage))
            c = load_wide(vector_in(smem.C, width, column, token, stage))
            for pair in range_constexpr(rows // 2):
                for n in range_constexpr(width):
                    i, k = 2 * pair, chunk * width + n
                    held = mul2(packed, (state[i, k], state[i + 1, k]), (decay, decay))
                    held = fma2(packed, steps[pair], (b[n], b[n]), held)
                    state[i, k], state[i + 1, k] = held
                    if const_expr(k == 0):
                        sums.append(mul2(packed, held, (c[n], c[n])))
                    else:
                        sums[pair] = fma2(packed, held, (c[n], c[n]), sums[pair])
        own = self.reduce([value for pair in sums for value in pair], thread)
        values = cute.make_rmem_tensor(layout.owned, Float32)
        for k in range_constexpr(layout.owned):
            values[k] = own[k]
        cute.autovec_copy(values, vector_in(smem.y, layout.owned, thread.own, token))

    def reduce(self, sums: list[Any], thread: Thread) -> list[Any]:
        """Sums over the lanes that share rows: the more lanes a sum has passed, the fewer rows a lane still has to do
        with. Returns the sums of the `owned` rows. Note [Turned rows] says why no lane has to choose at first."""
        lanes, packed = self.layout.lanes // 2, self.config.f32x2
        while lanes:
            half = len(sums) // 2
            keep, send = sums[:half], sums[half:]
            if half == 0:
                keep, send = sums, sums
            elif half < 4:
                upper = (thread.part & lanes) != 0
                keep, send = ([choose(upper, b, a) for a, b in zip(sums[:half], sums[half:], strict=True)],
                              [choose(upper, a, b) for a, b in zip(sums[:half], sums[half:], strict=True)])  # fmt: skip
            received = [cute.arch.shuffle_sync_bfly(value, offset=lanes) for value in send]
            if len(keep) == 1:
                sums = [keep[0] + received[0]]
            else:
                pairs = [
                    add2(packed, (keep[i], keep[i + 1]), (received[i], received[i + 1])) for i in range(0, half, 2)
                ]
                sums = [value for pair in pairs for value in pair]
            lanes //= 2
        return sums

    @cute.jit
    def finish(self, y: cute.Tensor, smem: Smem, place: Place, thread: Thread, tile: Int32, count: Int32,
               stage: Int32) -> None:  # fmt: skip
        """y of the warp's rows: skip, gate, rounding, and whole vectors to global memory."""
        width, pitch = self.config.row_vector, Int64(y.stride[1])
        base = place.y + Int64(tile) * (pitch * self.tile)
        for token, later, column in self.pieces(thread.lane, WARP, self.layout.warp_rows, width):
            row = thread.warp_row + column
            present = token < count - later
            if const_expr(not self.config.whole_blocks):
                present = present & (place.row + row < self.config.headdim)
            if present:
                value = load_wide(vector_in(smem.y, width, row, token + later))
                if const_expr(self.config.D is not None):
                    x = load_wide(vector_in(smem.x, width, row, token + later, stage))
                    value = value + x * load_wide(vector_in(smem.D, width, row))
                out = cute.make_rmem_tensor(width, Float32)
                out.store(value)
                if const_expr(self.config.z):
                    z = load_wide(vector_in(smem.z, width, row, token + later, stage))
                    for k in range_constexpr(width):
                        out[k] = out[k] * silu(z[k])
                if const_expr(self.config.single and self.config.slots is not None):
                    for k in range_constexpr(width):
                        out[k] = choose(place.live, out[k], 0.0)
                rounded = cute.make_rmem_tensor(width, y.element_type)
                rounded.store(out.load().to(y.element_type))
                where = base + Int64(token) * pitch + row + later * pitch
                cute.autovec_copy(rounded, vector(y, where, width))

    @cute.jit
    def load_state(self, state: cute.Tensor, states: cute.Tensor, place: Place, thread: Thread) -> None:
        layout, N = self.layout, self.config.dstate
        for i in range_constexpr(layout.rows):
            row = cutlass.min(place.row + thread.row + (i ^ thread.turn), self.config.headdim - 1)
            base = flat(states, place.slot, place.head, row)
            for chunk in range_constexpr(layout.chunks):
                column = thread.column + chunk * layout.lanes * layout.vector
                partial = (chunk + 1) * layout.lanes * layout.vector > N
                if const_expr(partial):
                    found = load_wide(vector(states, base + cutlass.min(column, N - layout.vector), layout.vector))
                    for n in range_constexpr(layout.vector):
                        state[i, chunk * layout.vector + n] = choose(column < N, found[n], 0.0)
                else:
                    found = load_wide(vector(states, base + column, layout.vector))
                    for n in range_constexpr(layout.vector):
                        state[i, chunk * layout.vector + n] = found[n]

    @cute.jit
    def store_state(self, state: cute.Tensor, states: cute.Tensor, slot: Any, place: Place, thread: Thread) -> None:
        layout, P, N = self.layout, self.config.headdim, self.config.dstate
        for i in range_constexpr(layout.rows):
            row = place.row + thread.row + (i ^ thread.turn)
            base = flat(states, slot, place.head, row)
            for chunk in range_constexpr(layout.chunks):
                column = thread.column + chunk * layout.lanes * layout.vector
                values = cute.make_rmem_tensor(layout.vector, Float32)
                for n in range_constexpr(layout.vector):
                    values[n] = state[i, chunk * layout.vector + n]
                rounded = cute.make_rmem_tensor(layout.vector, states.element_type)
                rounded.store(values.load().to(states.element_type))
                target = vector(states, base + column, layout.vector)
                if const_expr(self.config.whole_blocks and (chunk + 1) * layout.lanes * layout.vector <= N):
                    cute.autovec_copy(rounded, target)
                else:
                    if (row < P) & (column < N):
                        cute.autovec_copy(rounded, target)


RecurrenceKernel.kernel.set_name_prefix("recurrence", remove_cutlass_symbol=True, keep_mangled_name=False)
