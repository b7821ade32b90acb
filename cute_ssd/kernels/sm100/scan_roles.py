"""Warp roles of chunk_scan that work with registers: running sums and factors, decays of the scores, y."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32, Int32, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync

from ..arithmetic import choose, fma2, mul2, numeric, silu
from ..dims import VECTOR_BYTES
from ..views import flat, load_wide
from . import scan_layout as sl
from . import tensor_memory as tm
from .config import Chunked, Q
from .pipes import Pipes, after_sync, arrive, before_sync
from .steps import Steps, discretise, load_step
from .tiles import Tile, table_tile

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
    if cta.table is None:
        row, tile = divmod(slot, cta.sizes.row_tiles)
        found = Tile(row, tile * Q, cutlass.min(cta.seqlen - tile * Q, Q), slot)
    else:
        found = table_tile(cta.table, slot)
    return Item(found, group * layout.heads)


def partition(atom: Any, shared: Any, tiles: Any) -> Any:
    """(copy, stage) and (copy, ...): what a copy of the TMA unit takes."""
    one_cta = cute.make_layout(1)
    return cpasync.tma_partition(atom, 0, one_cta, cute.group_modes(shared, 0, 3), cute.group_modes(tiles, 0, 3))


def copy_stage(pipes: Pipes, cta: Cta, pipe: str, n: Any, size: int, atom: Any, source: Any, target: Any) -> None:
    """Starts a TMA copy to stage n of a pipe when it is free."""
    pipes.wait_empty(cta.bars, pipe, n)
    full = pipes.expect(cta.bars, pipe, n, size)
    cute.copy(atom, source, target[None, pipes.stage(pipe, n)], tma_bar_ptr=full)


class Vectors:
    """One warp: steps, decays, their running sums, and the factors of the segsum warps; and copies of x."""

    def __init__(self, config: Chunked, layout: sl.ScanLayout, pipes: Pipes) -> None:
        self.config, self.layout, self.pipes = config, layout, pipes

    @cute.jit
    def run(self, cta: Cta, steps: Steps, D: Any, atom: cute.CopyAtom, mX: cute.Tensor, sX: cute.Tensor,
            mma: cute.TiledMma) -> None:  # fmt: skip
        head_count = Int32(0)
        row, first, valid, head, a, b, c, d = self.fetch(cta, steps, Int32(0))
        for index in cutlass.range(cta.count * self.layout.heads, unroll=1):
            # The next head's dt is on its way while this one is worked on.
            following = self.fetch(cta, steps, index + 1)
            if valid > 0:
                self.head(cta, steps, D, (a, b, c, d), valid, head, head_count)
                gX = cute.local_tile(
                    cute.domain_offset((0, first, 0, 0), mX), (self.config.headdim, Q), (0, 0, None, None)
                )
                tXs, tXg = partition(atom, sX, mma.get_slice(0).partition_B(gX))  # (copy, stage), (copy, H, batch)
                copy_stage(
                    self.pipes, cta, "x", head_count, self.layout.x_bytes, atom, tXg[None, head, row], tXs
                )
                head_count += 1
            row, first, valid, head, a, b, c, d = following

    @cute.jit
    def fetch(self, cta: Cta, steps: Steps, index: Int32) -> Any:
        """(row, first, valid, head, raw dt of four tokens) of the CTA's head number `index`; the last one's behind."""
        index = cutlass.min(index, cta.count * self.layout.heads - 1)
        n = index // self.layout.heads
        tile, head = item_of(cta, self.layout, n)
        head = head + (index - n * self.layout.heads)
        raw = [
            load_step(
                self.config, steps, tile.row, tile.first, sl.SUB * i + cta.lane, cutlass.max(tile.valid, 1), head
            ).to(Float32)
            for i in range(4)
        ]
        return tile.row, tile.first, tile.valid, head, raw[0], raw[1], raw[2], raw[3]

    @cute.jit
    def head(self, cta: Cta, steps: Steps, D: Any, raw: Any, valid: Int32, head: Int32, count: Int32) -> None:
        """Token 32 i + lane of a tile is number i of a lane."""
        config, lane = self.config, cta.lane
        given = [discretise(config, steps, raw[i], sl.SUB * i + lane < valid, head) for i in range(4)]
        sums = [decay for _, decay in given]
        for distance in (1, 2, 4, 8, 16):
            for i in range_constexpr(4):
                below = cute.arch.shuffle_sync_up(sums[i], distance, mask_and_clamp=0)
                sums[i] = sums[i] + choose(lane >= distance, below, 0.0)
        ends = []
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
        if const_expr(folds_D(config)):
            sV[sl.D + lane] = D[head, 0].to(Float32)
        self.pipes.arrive_full(cta.bars, "vectors", count)


def folds_D(config: Chunked) -> bool:
    """Whether D x is part of the product with M: one D for a head, on the diagonal."""
    return config.D is not None and not config.channel_D


class Segsum:
    """Two warpgroups: M = scores ∘ decays, in 16 bits, of every head. Warp w of each has rows 32 w and up, a thread a row.

    Left of the diagonal sub-tile the decays are products of a row's and a column's factor, both with the end of the
    column's sub-tile as reference; the first warpgroup does the first two sub-tiles of columns, the second the third
    and the diagonal. To the right M stays zero. So a thread keeps at most 64 scores in registers for all its heads.
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
            elif rows > 1:
                self.columns(cta, rows, (0, 1), False)
        else:
            self.clear(cta, rows)
            if rows == 3:
                self.columns(cta, rows, (2,), True)
            else:
                self.columns(cta, rows, (), True)

    @cute.jit
    def clear(self, cta: Cta, rows: Int32) -> None:
        """Sub-tiles right of the diagonal, once and for all; the first arrivals at "m" tell."""
        zero = cute.make_rmem_tensor(sl.SUB // 2, Float32)
        zero.fill(0.0)
        for sub in cutlass.range(rows + 1, 4, unroll=1):
            for buffer in range_constexpr(2):
                column = self.layout.m_column + buffer * (Q // 2) + sub * (sl.SUB // 2)
                tm.store(cta.tmem, column, zero, cta.thread % Q)

    @cute.jit
    def columns(self, cta: Cta, rows: Int32, left: Constexpr, diagonal: Constexpr) -> None:
        """M of sub-tiles `left` of columns, and of the diagonal one. The scores of all are neighbours."""
        layout, bars = self.layout, cta.bars
        row, lane = cta.thread % Q, cta.lane
        width = sl.SUB * (len(left) + diagonal)
        scores = cute.make_rmem_tensor(width, Float32)
        first = rows * sl.SUB
        if const_expr(len(left) > 0):
            first = Int32(left[0] * sl.SUB)
        unit = cute.make_rmem_tensor(sl.SUB, Float32)  # of the diagonal
        for j in range_constexpr(sl.SUB):
            unit[j] = choose(lane == j, 1.0, 0.0)
        item, count = Int32(0), Int32(0)
        for n in cutlass.range(cta.count, unroll=1):
            if item_of(cta, layout, n).tile.valid > 0:
                self.pipes.wait_full(bars, "scores", item)
                after_sync()
                tm.load(cta.tmem, layout.scores_column + first, scores, row)
                cute.arch.fence_view_async_tmem_load()
                before_sync()
                self.pipes.arrive_empty(bars, "scores", item)
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
                    self.pipes.wait_empty(bars, "m", count)
                    after_sync()
                    for k in range_constexpr(len(left)):
                        self.left_of_diagonal(cta, sV, scores, k * sl.SUB, factors[k], left[k], m_column, row)
                    if const_expr(diagonal):
                        self.on_diagonal(cta, sV, scores, width - sl.SUB, unit, own, rows, m_column, row)
                    cute.arch.fence_view_async_tmem_store()
                    before_sync()
                    arrive(self.pipes.full(bars, "m", count), self.pipes.empty(bars, "vectors", count))
                    count += 1

    @cute.jit
    def left_of_diagonal(self, cta: Cta, sV: cute.Tensor, scores: cute.Tensor, at: Constexpr, factor: Float32,
                         sub: Constexpr, m_column: Int32, row: Int32) -> None:  # fmt: skip
        """scores · (own factor · factors of the columns)."""
        for start in range_constexpr(0, sl.SUB, CHUNK):
            factors = load_vector(sV, sl.FACTOR + sub * sl.SUB + start)
            m = cute.make_rmem_tensor(CHUNK, Float32)
            for j in range_constexpr(0, CHUNK, 2):
                decay = mul2(True, (factors[j], factors[j + 1]), (factor, factor))
                k = at + start + j
                m[j], m[j + 1] = mul2(True, (scores[k], scores[k + 1]), decay)
            self.store(cta, m, m_column + (sub * sl.SUB + start) // 2, row)

    @cute.jit
    def on_diagonal(self, cta: Cta, sV: cute.Tensor, scores: cute.Tensor, at: Constexpr, unit: cute.Tensor,
                    own: Float32, rows: Int32, m_column: Int32, row: Int32) -> None:  # fmt: skip
        """scores · 2^(own cs - cs of the column) · step, plus D on the diagonal. Masked scores are 0, so their decays,
        which may grow without limit, must be numbers; a NaN has to stay one."""
        config = self.config
        shifted = config.A is not None and config.positive_steps
        D = Float32(0.0)
        if const_expr(folds_D(config)):
            D = sV[sl.D]
        for start in range_constexpr(0, sl.SUB, CHUNK):
            at_column = rows * sl.SUB + start
            sums = load_vector(sV, (sl.SHIFTED if shifted else sl.CUMSUM) + at_column)
            m = cute.make_rmem_tensor(CHUNK, Float32)
            for j in range_constexpr(0, CHUNK, 2):
                e = fma2(True, (sums[j], sums[j + 1]), (Float32(-1.0), Float32(-1.0)), (own, own))
                e = tuple(cute.math.exp2(cute.arch.fmin(v, Float32(LARGEST), nan=True), fastmath=True) for v in e)
                k = at + start + j
                m[j], m[j + 1] = mul2(True, (scores[k], scores[k + 1]), e)
            if const_expr(config.A is not None and not shifted):
                steps = load_vector(sV, sl.SHIFTED + at_column)
                for j in range_constexpr(0, CHUNK, 2):
                    m[j], m[j + 1] = mul2(True, (m[j], m[j + 1]), (steps[j], steps[j + 1]))
            if const_expr(folds_D(config)):
                for j in range_constexpr(0, CHUNK, 2):
                    ones = (unit[start + j], unit[start + j + 1])
                    m[j], m[j + 1] = fma2(True, ones, (D, D), (m[j], m[j + 1]))
            self.store(cta, m, m_column + at_column // 2, row)

    def store(self, cta: Cta, m: Any, column: Any, row: Any) -> None:
        rounded = cute.make_rmem_tensor(CHUNK, self.dtype)
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
        layout = self.layout
        total = cta.count * layout.item_slabs
        scaled, stored = Int32(0), Int32(0)
        row, first, valid, head = Int32(0), Int32(0), Int32(0), Int32(0)
        # The next slab is scaled before y of this one: the product waits for the one, nobody for the other.
        for index in cutlass.range(total + 1, unroll=1):
            clamped = cutlass.min(index, total - 1)
            n = clamped // layout.item_slabs
            item = item_of(cta, layout, n)
            following = Int32(0)
            if index < total:
                following = item.tile.valid
            if following > 0:
                self.scale(cta, scaled)
                scaled += 1
            if valid > 0:
                self.finish(cta, operands, stored, row, first, valid, head)
                stored += 1
            row, first, valid = item.tile.row, item.tile.first, following
            head = item.head + (clamped - n * layout.item_slabs) * layout.slab_heads

    def pieces(self) -> list[tuple[int, int]]:
        """(first column, width) of the loads of a head's columns."""
        found, at = [], 0
        for width in (64, 32, 16):
            while self.config.headdim - at >= width:
                found.append((at, width))
                at += width
        return found

    def column(self, slab: Any, k: int) -> Any:
        layout = self.layout
        return layout.slab_column + layout.slab_columns * self.pipes.stage("slab", slab) + k * self.config.headdim

    @cute.jit
    def scale(self, cta: Cta, slab: Int32) -> None:
        layout, bars, row = self.layout, cta.bars, cta.thread % Q
        self.pipes.wait_full(bars, "slab", slab)
        after_sync()
        for k in range_constexpr(layout.slab_heads):
            head = slab * layout.slab_heads + k
            self.pipes.wait_full(bars, "vectors", head)
            sums = cta.vectors[None, self.pipes.stage("vectors", head)]
            factor = cute.math.exp2(sums[sl.CUMSUM + row], fastmath=True)
            self.pipes.arrive_empty(bars, "vectors", head)
            for at, width in self.pieces():
                column = self.column(slab, k) + at
                values = cute.make_rmem_tensor(width, Float32)
                tm.load(cta.tmem, column, values, row)
                cute.arch.fence_view_async_tmem_load()
                for j in range_constexpr(0, width, 2):
                    values[j], values[j + 1] = mul2(True, (values[j], values[j + 1]), (factor, factor))
                tm.store(cta.tmem, column, values, row)
        cute.arch.fence_view_async_tmem_store()
        before_sync()
        self.pipes.arrive_full(bars, "scaled", slab)

    @cute.jit
    def finish(self, cta: Cta, operands: Operands, slab: Int32, batch_row: Int32, first: Int32, valid: Int32,
               first_head: Int32) -> None:  # fmt: skip
        layout, bars, row = self.layout, cta.bars, cta.thread % Q
        token = first + cutlass.min(row, valid - 1)
        last = (layout.slab_heads - 1, self.pieces()[-1][0])
        for k in range_constexpr(layout.slab_heads):
            head = first_head + k
            self.pipes.wait_full(bars, "y", slab * layout.slab_heads + k)
            after_sync()
            for at, width in self.pieces():
                values = cute.make_rmem_tensor(width, Float32)
                tm.load(cta.tmem, self.column(slab, k) + at, values, row)
                cute.arch.fence_view_async_tmem_load()
                if const_expr((k, at) == last):
                    before_sync()
                    self.pipes.arrive_empty(bars, "slab", slab)
                self.gate(operands, values, batch_row, token, head, at)
                rounded = cute.make_rmem_tensor(width, self.dtype)
                rounded.store(values.load().to(self.dtype))
                if row < valid:
                    cute.autovec_copy(rounded, row_part(operands.y, batch_row, token, head, at, width))

    @cute.jit
    def gate(self, operands: Operands, values: cute.Tensor, batch_row: Int32, token: Int32, head: Int32,
             at: Constexpr) -> None:  # fmt: skip
        """D x, where D varies inside a head, and silu(z)."""
        config, width = self.config, cute.size(values)
        if const_expr(config.D is not None and config.channel_D):
            x = load_wide(row_part(operands.x, batch_row, token, head, at, width))
            for j in range_constexpr(width):
                values[j] = values[j] + operands.D[head, at + j].to(Float32) * x[j]
        if const_expr(config.z):
            z = load_wide(row_part(operands.z, batch_row, token, head, at, width))
            for j in range_constexpr(width):
                values[j] = values[j] * silu(z[j])


def row_part(tensor: Any, batch_row: Any, token: Any, head: Any, at: int, width: int) -> Any:
    offset = flat(tensor, batch_row, token, head) + at
    return cute.make_tensor(tensor.iterator + cute.assume(offset, divby=VECTOR), cute.make_layout(width))
