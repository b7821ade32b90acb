"""Warp roles of chunk_scan that work with registers: running sums and factors, decays of the scores, y."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync

from ..arithmetic import choose, fma2, mul2, numeric, silu, widen
from ..dims import VECTOR_BYTES
from ..views import flat, store_sectors
from . import scan_layout as sl
from . import tensor_memory as tm
from .config import Chunked, Q
from .pipes import Pipes, after_sync, arrive, arrive_after_tensor, before_sync, copy_stage
from .steps import Steps, discretise_with, load_parameters, load_step
from .tiles import Tile, batched_tile, table_tile

LARGEST = 126.0  # exponent that 2^x has a number for
CHUNK = 16  # columns of M that are computed at a time
VECTOR = VECTOR_BYTES // 2  # elements of x, z and y in one access


class Cta(NamedTuple):
    """What every role gets. Work item n of this CTA is number index + n·ctas of all."""

    bars: Any
    tmem: Any
    vectors: Any  # (VECTORS, stage)
    thread: Any
    lane: Any
    index: Any
    ctas: Any
    count: Any  # work items of this CTA
    sizes: "Sizes"
    seqlen: Any
    table: Any


class Sizes(NamedTuple):
    """Divisors, made by the host."""

    groups: Any  # work items of a tile
    group_heads: Any  # heads that share B and C
    row_tiles: Any
    rounds: Any  # work items of every CTA
    extra: Any  # CTAs that have one more


class Item(NamedTuple):
    tile: Tile
    head: Any  # its first one


class Operands(NamedTuple):
    """Of the epilogue, as in `ChunkedKernels`."""

    x: Any
    D: Any
    z: Any
    y: Any


def item_of(cta: Cta, layout: sl.ScanLayout, n: Any) -> Item:
    """Items of a tile follow one another, so that its B and C come from L2."""
    slot, group = divmod(cta.index + n * cta.ctas, cta.sizes.groups)
    batched = cta.table is None
    found = batched_tile(slot, cta.seqlen, cta.sizes.row_tiles) if batched else table_tile(cta.table, slot)
    return Item(found, group * layout.heads)


def partition(atom: Any, shared: Any, tiles: Any) -> Any:
    """(copy, stage) and (copy, ...): what a copy of the TMA unit takes."""
    one_cta = cute.make_layout(1)
    return cpasync.tma_partition(atom, 0, one_cta, cute.group_modes(shared, 0, 3), cute.group_modes(tiles, 0, 3))


class Vectors:
    """Two warps: steps, decays, their running sums, and the factors of the segsum warps; and copies of x. They take
    turns at heads, so that each has stages of its own: both rings are even."""

    def __init__(self, config: Chunked, layout: sl.ScanLayout, pipes: Pipes) -> None:
        self.config, self.layout, self.pipes = config, layout, pipes

    @cute.jit
    def run(self, cta: Cta, steps: Steps, atom: cute.CopyAtom, mX: cute.Tensor, sX: cute.Tensor,
            mma: cute.TiledMma, turn: Constexpr) -> None:  # fmt: skip
        heads = self.layout.heads
        # Item, heads before it, and this warp's head in it: one behind the last if it has none there.
        n, before, own = Int32(0), Int32(0), Int32(turn)
        row, first, valid, rate, bias, a, b, c, d = self.fetch(cta, steps, n, own)
        while n < cta.count:
            next_n, next_before, next_own = n, before, own + 2
            if (next_own >= heads) | (valid == 0):
                next_n = n + 1
                if valid > 0:
                    next_before = before + heads
                next_own = (next_before + turn) & 1
            # The next head's numbers are on their way while this one is worked on.
            following = self.fetch(cta, steps, next_n, next_own)
            if (valid > 0) & (own < heads):
                count = before + own
                self.head(cta, steps, (rate, bias), (a, b, c, d), valid, count)
                gX = cute.local_tile(
                    cute.domain_offset((0, first, 0, 0), mX), (self.config.headdim, Q), (0, 0, None, None)
                )
                tXs, tXg = partition(atom, sX, mma.get_slice(0).partition_B(gX))  # (copy, stage), (copy, H, batch)
                head = item_of(cta, self.layout, n).head + own
                copy_stage(self.pipes, cta.bars, "x", count, self.layout.x_bytes, atom, tXg[None, head, row], tXs)
            n, before, own = next_n, next_before, next_own
            row, first, valid, rate, bias, a, b, c, d = following

    @cute.jit
    def fetch(self, cta: Cta, steps: Steps, n: Int32, own: Int32) -> Any:
        """(row, first, valid, rate, bias, raw dt of four tokens) of a head, or of any where there is none."""
        tile, head = item_of(cta, self.layout, cutlass.min(n, cta.count - 1))
        head = head + cutlass.min(own, self.layout.heads - 1)
        rate, bias = load_parameters(self.config, steps, head)
        raw = [
            load_step(
                self.config, steps, tile.row, tile.first, sl.SUB * i + cta.lane, cutlass.max(tile.valid, 1), head
            ).to(Float32)
            for i in range(4)
        ]
        return tile.row, tile.first, tile.valid, rate, bias, raw[0], raw[1], raw[2], raw[3]

    @cute.jit
    def head(self, cta: Cta, steps: Steps, parameters: Any, raw: Any, valid: Int32, count: Int32) -> None:
        """Token 32 i + lane of a tile is number i of a lane."""
        config, lane = self.config, cta.lane
        given = [discretise_with(config, steps, raw[i], sl.SUB * i + lane < valid, parameters) for i in range(4)]
        sums = [decay for _, decay in given]
        for distance in (1, 2, 4, 8, 16):
            for i in range_constexpr(4):
                below = cute.arch.shuffle_sync_up(sums[i], distance, mask_and_clamp=0)
                sums[i] = sums[i] + choose(lane >= distance, below, 0.0)
        ends: list[Any] = []
        for i in range_constexpr(4):
            if const_expr(i > 0):
                sums[i] = sums[i] + ends[i - 1]
            ends.append(cute.arch.shuffle_sync(sums[i], 31))
        factors = [cute.math.exp2(ends[i] - sums[i], fastmath=True) for i in range(3)]
        if const_expr(config.A is not None):
            factors = [factors[i] * given[i][0] for i in range(3)]
        self.pipes.wait_empty(cta.bars, "vectors", count)
        sV = cta.vectors[None, self.pipes.stage("vectors", count)]
        for i in range_constexpr(4):
            token = sl.SUB * i + lane
            sV[sl.CUMSUM + token] = sums[i]
            if const_expr(i < 3):
                sV[sl.FACTOR + token] = factors[i]
            if const_expr(config.A is not None and config.positive_steps):
                sV[sl.SHIFTED + token] = sums[i] - cute.math.log2(given[i][0], fastmath=True)
            elif const_expr(config.A is not None):
                sV[sl.SHIFTED + token] = given[i][0]
        self.pipes.arrive_full(cta.bars, "vectors", count)


class Segsum:
    """Two warpgroups: M = scores ∘ decays, in 16 bits, of every head. Warp w has rows 32 w and up, a thread one row.

    Left of the diagonal sub-tile the decays are products of a row's and a column's factor, both with the end of the
    column's sub-tile as reference; the first warpgroup does that, the second the diagonal. To the right M stays zero.
    So a thread keeps at most 96 scores in registers for all its heads.
    """

    def __init__(self, config: Chunked, layout: sl.ScanLayout, pipes: Pipes) -> None:
        self.config, self.layout, self.pipes = config, layout, pipes
        self.dtype = numeric(config.dtype)

    @cute.jit
    def run(self, cta: Cta, warp: Int32) -> None:
        rows = warp % 4
        if warp < sl.SEGSUM_DIAGONAL_WARPS[0]:
            if rows == 1:
                self.columns(cta, rows, (0,), False)
            elif rows == 2:
                self.columns(cta, rows, (0, 1), False)
            elif rows == 3:
                self.columns(cta, rows, (0, 1, 2), False)
        else:
            self.clear(cta, rows)
            self.columns(cta, rows, (), True)

    @cute.jit
    def clear(self, cta: Cta, rows: Int32) -> None:
        """Sub-tiles right of the diagonal, once and for all; the first arrivals at "m" tell, if there are any."""
        zero = cute.make_rmem_tensor(sl.SUB // 2, Float32)
        zero.fill(0.0)
        for sub in cutlass.range(rows + 1, 4, unroll=1):
            for buffer in range_constexpr(2):
                column = self.layout.m_column + buffer * (Q // 2) + sub * (sl.SUB // 2)
                tm.store(cta.tmem, column, zero, cta.thread % Q)
        cute.arch.fence_view_async_tmem_store()

    @cute.jit
    def columns(self, cta: Cta, rows: Int32, left: Constexpr, diagonal: Constexpr) -> None:
        """M of sub-tiles `left` of columns, and of the diagonal one. The scores of all are neighbours."""
        layout, bars = self.layout, cta.bars
        row, lane = cta.thread % Q, cta.lane
        shifted = self.config.A is not None and self.config.positive_steps
        width = sl.SUB * (len(left) + diagonal)
        scores = cute.make_rmem_tensor(width, Float32)
        first = rows * sl.SUB
        if const_expr(len(left) > 0):
            first = Int32(left[0] * sl.SUB)
        # Where the chunks' columns have their factors or sums.
        vectors = [sl.FACTOR + sl.SUB * sub + start for sub in left for start in range(0, sl.SUB, CHUNK)]
        if const_expr(diagonal):
            sums = (sl.SHIFTED if shifted else sl.CUMSUM) + rows * sl.SUB
            vectors = vectors + [sums + start for start in range(0, sl.SUB, CHUNK)]
        item, count = Int32(0), Int32(0)
        for n in cutlass.range(cta.count, unroll=1):
            if item_of(cta, layout, n).tile.valid > 0:
                self.pipes.wait_full(bars, "scores", item)
                after_sync()
                for at in range_constexpr(0, width, sl.SUB):
                    tm.load(cta.tmem, layout.scores_column + first + at, tm.part(scores, at, sl.SUB), row)
                cute.arch.fence_view_async_tmem_load()
                arrive_after_tensor(self.pipes.empty(bars, "scores", item))
                item += 1
                if const_expr(diagonal):
                    for j in range_constexpr(sl.SUB):  # once for all heads; B behind the tile's tokens may be NaN
                        at = width - sl.SUB + j
                        scores[at] = choose(lane >= j, scores[at], 0.0)
                for _ in cutlass.range(layout.heads, unroll=1):
                    self.pipes.wait_full(bars, "vectors", count)
                    sV = cta.vectors[None, self.pipes.stage("vectors", count)]
                    own = sV[sl.CUMSUM + row]
                    m_column = layout.m_column + (Q // 2) * self.pipes.stage("m", count)
                    factors = [cute.math.exp2(own - sV[sl.SUB * sub + sl.SUB - 1], fastmath=True) for sub in left]
                    ahead = load_vector(sV, vectors[0])
                    self.pipes.wait_empty(bars, "m", count)
                    after_sync()
                    for k in range_constexpr(len(vectors)):
                        loaded = ahead  # the next chunk's numbers are on their way while one is worked on
                        if const_expr(k + 1 < len(vectors)):
                            ahead = load_vector(sV, vectors[k + 1])
                        sub, start = k * CHUNK // sl.SUB, k * CHUNK % sl.SUB
                        if const_expr(sub < len(left)):
                            m = self.left_of_diagonal(loaded, scores, k * CHUNK, factors[sub])
                        else:
                            m = self.on_diagonal(sV, loaded, scores, k * CHUNK, start, own, rows)
                        self.store(cta, m, m_column + (first + k * CHUNK) // 2, row)
                    cute.arch.fence_view_async_tmem_store()
                    before_sync()
                    arrive(self.pipes.full(bars, "m", count), self.pipes.empty(bars, "vectors", count))
                    count += 1

    def left_of_diagonal(self, factors: Any, scores: Any, at: int, factor: Any) -> Any:
        """scores · (own factor · factors of the columns), from score number `at` on."""
        m = cute.make_rmem_tensor(CHUNK, Float32)
        for j in range(0, CHUNK, 2):
            m[j], m[j + 1] = mul2(True, (factors[j], factors[j + 1]), (factor, factor))
        for j in range(0, CHUNK, 2):
            m[j], m[j + 1] = mul2(True, (scores[at + j], scores[at + j + 1]), (m[j], m[j + 1]))
        return m

    def on_diagonal(self, sV: Any, sums: Any, scores: Any, at: int, start: int, own: Any, rows: Any) -> Any:
        """scores · 2^(own cs - cs of the column) · step. Masked scores are 0, so their decays, which may grow without
        limit, must be numbers; a NaN has to stay one."""
        m = cute.make_rmem_tensor(CHUNK, Float32)
        # In three passes: many independent exponentials before the first use of one.
        for j in range(0, CHUNK, 2):
            m[j], m[j + 1] = fma2(True, (sums[j], sums[j + 1]), (Float32(-1.0), Float32(-1.0)), (own, own))
        for j in range(CHUNK):
            m[j] = cute.math.exp2(cute.arch.fmin(m[j], Float32(LARGEST), nan=True), fastmath=True)
        for j in range(0, CHUNK, 2):
            m[j], m[j + 1] = mul2(True, (scores[at + j], scores[at + j + 1]), (m[j], m[j + 1]))
        if self.config.A is not None and not self.config.positive_steps:
            steps = load_vector(sV, sl.SHIFTED + rows * sl.SUB + start)
            for j in range(0, CHUNK, 2):
                m[j], m[j + 1] = mul2(True, (m[j], m[j + 1]), (steps[j], steps[j + 1]))
        return m

    def store(self, cta: Cta, m: Any, column: Any, row: Any) -> None:
        rounded = cute.make_rmem_tensor(cute.size(m), self.dtype)
        rounded.store(m.load().to(self.dtype))
        tm.store(cta.tmem, column, rounded, row)


def load_vector(sV: Any, first: Any) -> Any:
    """CHUNK numbers of shared memory, the same for all lanes."""
    found = cute.make_rmem_tensor(CHUNK, Float32)
    source = cute.make_tensor(sV.iterator + cute.assume(first, divby=CHUNK), cute.make_layout(CHUNK))
    cute.autovec_copy(source, found)
    return found


class Epilogue:
    """One warpgroup, a thread for each token: slabs *= 2^cs, which M·x is then added to, and y out of them."""

    def __init__(self, config: Chunked, layout: sl.ScanLayout, pipes: Pipes) -> None:
        self.config, self.layout, self.pipes = config, layout, pipes
        self.dtype = numeric(config.dtype)

    @cute.jit
    def run(self, cta: Cta, operands: Operands) -> None:
        """The next slab is scaled between two heads of this one, so that its product runs beside the last one's y."""
        layout = self.layout
        # With two slabs of one head C·state could only follow the y before it: no use in waiting for it.
        early = layout.slab_heads - 1 if layout.slab_heads > 1 or layout.slabs > 2 else 1
        total = cta.count * layout.item_slabs
        scaled, stored = Int32(0), Int32(0)
        row, first, valid, head = Int32(0), Int32(0), Int32(0), Int32(0)
        for index in cutlass.range(total + 1, unroll=1):
            clamped = cutlass.min(index, total - 1)
            n = clamped // layout.item_slabs
            item = item_of(cta, layout, n)
            following = Int32(0)
            if index < total:
                following = item.tile.valid
            tile = Tile(row, first, valid, stored)
            for part in cutlass.range(cutlass.min(valid, 1) * early, unroll=1):
                self.finish(cta, operands, tile, part, head + part)
            if following > 0:
                self.scale(cta, scaled)
                scaled += 1
            for part in cutlass.range(early, cutlass.min(valid, 1) * layout.slab_heads, unroll=1):
                self.finish(cta, operands, tile, part, head + part)
            stored += cutlass.min(valid, 1)
            row, first, valid = item.tile.row, item.tile.first, following
            head = item.head + (clamped - n * layout.item_slabs) * layout.slab_heads

    def pieces(self, widest: int) -> list[tuple[int, int]]:
        """(first column, width) of the loads of a head's columns; the next one is on its way while one is worked on."""
        found, at = [], 0
        for width in (64, 32, 16):
            while width <= widest and self.config.headdim - at >= width:
                found.append((at, width))
                at += width
        return found

    def load(self, cta: Cta, column: Any, width: int) -> Any:
        values = cute.make_rmem_tensor(width, Float32)
        tm.load(cta.tmem, column, values, cta.thread % Q)
        return values

    def column(self, slab: Any, k: Any) -> Any:
        layout = self.layout
        return layout.slab_column + layout.slab_columns * self.pipes.stage("slab", slab) + k * self.config.headdim

    @cute.jit
    def scale(self, cta: Cta, slab: Int32) -> None:
        layout, bars, row = self.layout, cta.bars, cta.thread % Q
        factors, heads = [], [slab * layout.slab_heads + k for k in range(layout.slab_heads)]
        for k in range_constexpr(layout.slab_heads):
            self.pipes.wait_full(bars, "vectors", heads[k])
            sums = cta.vectors[None, self.pipes.stage("vectors", heads[k])]
            factors.append(cute.math.exp2(sums[sl.CUMSUM + row], fastmath=True))
        arrive(*[self.pipes.empty(bars, "vectors", head) for head in heads])
        self.pipes.wait_full(bars, "slab", slab)
        after_sync()
        pieces = [
            (self.column(slab, k) + at, width, k) for k in range(layout.slab_heads) for at, width in self.pieces(32)
        ]
        ahead = self.load(cta, pieces[0][0], pieces[0][1])
        for n in range_constexpr(len(pieces)):
            column, width, k = pieces[n]
            values = ahead
            cute.arch.fence_view_async_tmem_load()
            if const_expr(n + 1 < len(pieces)):
                ahead = self.load(cta, pieces[n + 1][0], pieces[n + 1][1])
            for j in range_constexpr(0, width, 2):
                values[j], values[j + 1] = mul2(True, (values[j], values[j + 1]), (factors[k], factors[k]))
            tm.store(cta.tmem, column, values, row)
            if const_expr(n + 1 == len(pieces) or pieces[n + 1][2] != k):
                cute.arch.fence_view_async_tmem_store()
                arrive_after_tensor(self.pipes.full(bars, "scaled", heads[k]))

    @cute.jit
    def finish(self, cta: Cta, operands: Operands, tile: Tile, part: Int32, head: Int32) -> None:
        """y of one head of a slab, the one that the tile's `slot` counts."""
        layout, bars, row, slab = self.layout, cta.bars, cta.thread % Q, tile.slot
        token = tile.first + cutlass.min(row, tile.valid - 1)
        wide = whole_sectors(operands.y)
        # A slab is free again when the last piece is in registers: large ones, as far as they go.
        config = self.config
        inputs = config.z + (config.D is not None)
        pieces = self.pieces(16 if config.channel_D or inputs == 2 else 32 if inputs or config.headdim > 96 else 64)
        D = None
        if const_expr(config.D is not None and not config.channel_D):
            D = operands.D[head, 0].to(Float32)
        ahead = self.inputs(operands, tile.row, token, head, pieces[0])
        self.pipes.wait_full(bars, "y", slab * layout.slab_heads + part)
        after_sync()
        column = self.column(slab, part)
        values_ahead = self.load(cta, column, pieces[0][1])
        for n in range_constexpr(len(pieces)):
            at, width = pieces[n]
            values, inputs = values_ahead, ahead
            cute.arch.fence_view_async_tmem_load()
            if const_expr(n + 1 < len(pieces)):
                values_ahead = self.load(cta, column + pieces[n + 1][0], pieces[n + 1][1])
                ahead = self.inputs(operands, tile.row, token, head, pieces[n + 1])
            else:
                if part == layout.slab_heads - 1:
                    arrive_after_tensor(self.pipes.empty(bars, "slab", slab))
            self.gate(operands, D, inputs, values, head, at)
            rounded = cute.make_rmem_tensor(width, self.dtype)
            rounded.store(values.load().to(self.dtype))
            if row < tile.valid:
                target = row_part(operands.y, tile.row, token, head, at, width)
                if wide:
                    store_sectors(rounded, target)
                else:
                    cute.autovec_copy(rounded, target)

    def inputs(self, operands: Operands, batch_row: Any, token: Any, head: Any, piece: tuple[int, int]) -> Any:
        """x and z that a piece of y needs, on their way to registers."""
        at, width = piece
        config, found = self.config, []
        for tensor, needed in ((operands.x, config.D is not None), (operands.z, config.z)):
            loaded = None
            if needed:
                loaded = cute.make_rmem_tensor(width, self.dtype)
                cute.autovec_copy(row_part(tensor, batch_row, token, head, at, width), loaded)
            found.append(loaded)
        return found

    def gate(self, operands: Operands, D: Any, inputs: Any, values: Any, head: Any, at: int) -> None:
        """D x, in fp32: on the diagonal of M it would lose the digits of D. And silu(z). D is that of the head, or None
        where it varies inside."""
        x, z = (None if loaded is None else widen(loaded) for loaded in inputs)
        for j in range(0, cute.size(values), 2):
            pair = values[j], values[j + 1]
            if x is not None:
                skip = (D, D) if D is not None else [operands.D[head, at + j + k].to(Float32) for k in range(2)]
                pair = fma2(True, tuple(skip), (x[j], x[j + 1]), pair)
            if z is not None:
                pair = mul2(True, pair, (silu(z[j]), silu(z[j + 1])))
            values[j], values[j + 1] = pair


def row_part(tensor: Any, batch_row: Any, token: Any, head: Any, at: int, width: int) -> Any:
    offset = flat(tensor, batch_row, token, head) + at
    return cute.make_tensor(tensor.iterator + cute.assume(offset, divby=VECTOR), cute.make_layout(width))


def whole_sectors(tensor: Any) -> Any:
    """Whether all rows start at multiples of 32 bytes: then one store of a thread fills a sector of the L2 cache."""
    pitches = tensor.stride[0] | tensor.stride[1] | tensor.stride[2]
    return ((tensor.iterator.toint() | Int64(pitches) * 2) & 31) == 0
