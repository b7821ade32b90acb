"""chunk_state: the state that a tile's own tokens leave, and the tile's decay. README.md has the algorithm.

    local[p, n] = sum_j exp(a_last - a_j) dt_j x_j[p] B_j[n]

One tensor-core product per slab, the heads whose rows fill the 128 lanes: x, scaled, is its left operand and lies in
tensor memory, B is its right one, as it is in shared memory. Work items are a tile and `state_heads` heads of a group,
which share B; CTAs take them in turn.

    TMA            x, B -> shared memory                       x, b
    decays         dt -> weights of a slab's tokens            weights
    scalers        x -> registers, times weights -> a          x, weights -> a
    MMA            a, B -> accumulator                         a, b -> acc
    epilogue       accumulator -> local                        acc
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator

from ..arithmetic import choose, kept, numeric
from ..dims import WARP
from ..views import flat, store_sectors, vector
from . import tensor_memory
from .config import MMA_K, STATE_TOKENS, Chunked, Q
from .pipes import (
    Copies,
    Pipe,
    Pipes,
    after_sync,
    arrive,
    arrive_after_tensor,
    arrive_as_one,
    before_sync,
    copy_stage,
)
from .scaled_rows import rows_of_lane, scale_rows, store_rows
from .steps import Steps, discretise, load_step
from .tensor_memory import LANE
from .tiles import Tile, batched_tile, clear_tail, find_tile, store_tile, tiles_per_row

MaybeTensor = Any  # a cute.Tensor, or None where the configuration has none

SCALERS, EPILOGUE, MMA, TMA, DECAYS, WARPS = 0, 8, 12, 13, 14, 16  # first warp of each role
GROUP = 4  # warps of a warpgroup: each reaches 32 lanes of tensor memory
T = STATE_TOKENS
EACH = Q // WARP  # tokens of a lane
READY, CLEARED = 1, 2  # named barriers; not 0, where the TMA warp may be before the others have seen READY
COLUMNS = 64  # of an accumulator that a thread of the epilogue holds


class Smem(NamedTuple):
    x: Any  # (block, T, blocks of a head, slab, stage)
    B: Any  # (block, T, blocks, stage)
    B_operand: Any  # the same bytes, as the MMA reads them
    weights: Any  # fp32 (Q, slab, stage)
    bars: Any
    tmem: Any  # where tensor memory was allocated


class Work(NamedTuple):
    """The work items of this CTA: groups of heads innermost, so that B stays in the L2 cache."""

    first: Any
    end: Any
    step: Any
    groups: Any  # of heads; a divisor
    row_tiles: Any  # of the batch; a divisor
    seqlen: Any
    offsets: Any


def load_heads(values: MaybeTensor, first: Any, heads: range) -> Any:
    return None if values is None else [values[first + j] for j in heads]


class ChunkStateKernel:
    def __init__(self, config: Chunked) -> None:
        self.config = config
        self.sizes = config.state_sizes
        self.dtype, self.local = numeric(config.dtype), numeric(config.local)
        self.active = -(-self.sizes.lanes // WARP)  # warps of a warpgroup that have lanes
        s = self.sizes
        self.pipes = Pipes(
            x=Pipe(s.x_stages, 1, self.active),
            b=Pipe(s.b_stages, 1, 1),
            weights=Pipe(s.weight_stages, 1, 2 * self.active),
            a=Pipe(s.a_stages, self.active, 1),
            acc=Pipe(s.accumulators, 1, self.active),
        )

    # ---- layouts

    def mma(self) -> cute.TiledMma:
        op = tcgen05.MmaF16BF16Op(
            self.dtype, Float32, (128, self.sizes.columns, MMA_K), tcgen05.CtaGroup.ONE,
            tcgen05.OperandSource.TMEM, OperandMajorMode.K, OperandMajorMode.MN,
        )  # fmt: skip
        return cute.make_tiled_mma(op)

    def x_layout(self, stages: int) -> Any:
        """(block, T, blocks of a head, slab, stage): nobody reads it but ldmatrix, for which rows are swizzled."""
        block, P = self.sizes.block, self.config.headdim
        shape = (block, T, P // block, self.sizes.slab, stages)
        stride = (1, block, block * T, P * T, self.sizes.slab * P * T)
        return cute.make_composed_layout(self.swizzle(block), 0, cute.make_layout(shape, stride=stride))

    def b_layout(self, stages: int) -> Any:
        """(64, T, blocks, stage): what `b_operand_layout` has in the order of TMA."""
        blocks = self.config.dstate // 64
        layout = cute.make_layout((64, T, blocks, stages), stride=(1, 64, 64 * T, 64 * T * blocks))
        return cute.make_composed_layout(self.swizzle(64), 0, layout)

    def b_operand_layout(self) -> Any:
        return sm100.make_smem_layout_b(self.mma(), (128, self.config.dstate, T), self.dtype, self.sizes.b_stages)

    def swizzle(self, block: int) -> Any:
        """Of 16-byte pieces: eight rows of `block` features have pieces of the same column in different banks."""
        return cute.make_swizzle({64: 3, 32: 2, 16: 1}[block], 4, 3)

    # ---- host

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        B: cute.Tensor,
        steps: Steps,
        offsets: MaybeTensor,
        local: cute.Tensor,
        decay: cute.Tensor,
        table: MaybeTensor,
        ctas: Int32,
        stream: Any,
    ) -> None:
        block, P, N = self.sizes.block, self.config.headdim, self.config.dstate
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
        batch, seqlen, nheads, _ = x.shape
        shape = (block, seqlen, P // block, nheads, batch)
        stride = (1, x.stride[1], block, x.stride[2], x.stride[0])
        view = cute.make_tensor(x.iterator, cute.make_layout(shape, stride=stride))
        tile = (block, T, P // block, self.sizes.slab)
        load_x = Copies(*self.atom(load, view, self.x_layout(1), tile))
        ngroups = B.shape[2]
        shape = (64, seqlen, N // 64, ngroups, batch)
        stride = (1, B.stride[1], 64, B.stride[2], B.stride[0])
        view = cute.make_tensor(B.iterator, cute.make_layout(shape, stride=stride))
        load_B = Copies(*self.atom(load, view, self.b_layout(1), (64, T, N // 64)))
        groups = nheads // self.config.state_heads
        items = local.shape[0] * groups
        row_tiles = cutlass.max(tiles_per_row(seqlen), 1)
        divisors = [cute.FastDivmodDivisorV2(n) for n in (groups, nheads // ngroups, row_tiles)]
        self.kernel(load_x, load_B, steps, offsets, local, decay, table, seqlen, items, *divisors).launch(
            grid=[cutlass.min(items, ctas), 1, 1],
            block=[WARPS * WARP, 1, 1],
            smem=self.sizes.shared_bytes,
            min_blocks_per_mp=1,
            use_pdl=True,
            stream=stream,
        )

    def atom(self, load: Any, view: Any, layout: Any, tile: tuple[int, ...]) -> Any:
        return cpasync.make_tiled_tma_atom(load, view, cute.select(layout, mode=list(range(len(tile)))), tile)

    # ---- device

    @cute.kernel
    def kernel(
        self,
        load_x: Copies,
        load_B: Copies,
        steps: Steps,
        offsets: MaybeTensor,
        local: cute.Tensor,
        decay: cute.Tensor,
        table: MaybeTensor,
        seqlen: Int32,
        items: Int32,
        groups: cute.FastDivmodDivisorV2,  # of heads
        heads_per_group: cute.FastDivmodDivisorV2,
        row_tiles: cute.FastDivmodDivisorV2,
    ) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        smem = self.allocate()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        work = Work(cta, items, ctas, groups, row_tiles, seqlen, offsets)
        if warp == TMA:  # before the others, whose mbarriers it initialises, and tensor memory are ready
            cpasync.prefetch_descriptor(load_x.atom)
            cpasync.prefetch_descriptor(load_B.atom)
            self.pipes.initialise(smem.bars)
            cute.arch.sync_warp()
            cute.arch.barrier_arrive(barrier_id=READY, number_of_threads=WARPS * WARP)
            self.depend()
            self.load(load_x, load_B, smem, work, heads_per_group)
        else:
            if warp == MMA:
                cute.arch.alloc_tmem(self.sizes.tensor_columns, smem.tmem)
                cute.arch.relinquish_tmem_alloc_permit()
            cute.arch.barrier(barrier_id=READY, number_of_threads=WARPS * WARP)
            tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, smem.tmem)
            if const_expr(self.sizes.lanes < 128):
                self.clear_lanes(tmem, warp)
            self.depend()
            if warp == MMA:
                self.multiply(smem, tmem, work, lane)
            if warp >= DECAYS:
                self.decays(steps, decay, table, smem, work, warp - DECAYS, lane)
            if warp < EPILOGUE:  # noqa: SIM102
                if warp % GROUP < self.active:
                    self.scale(smem, tmem, work, warp // GROUP, warp % GROUP, lane)
            if (warp >= EPILOGUE) & (warp < EPILOGUE + self.active):
                self.store(local, smem, tmem, work, warp - EPILOGUE, lane)
        cute.arch.sync_threads()  # nobody uses tensor memory any more
        if warp == MMA:
            tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, smem.tmem)
            cute.arch.dealloc_tmem(tmem, self.sizes.tensor_columns)

    def depend(self) -> None:
        """On the launch before, as the next one on this."""
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

    def allocate(self) -> Smem:
        smem, sizes = SmemAllocator(), self.sizes

        def tensor(layout: Any) -> Any:
            return smem.allocate_tensor(self.dtype, layout.outer, 1024, swizzle=layout.inner)

        x, B = tensor(self.x_layout(sizes.x_stages)), tensor(self.b_layout(sizes.b_stages))
        operand = cute.make_tensor(B.iterator, self.b_operand_layout().outer)
        weights = smem.allocate_tensor(Float32, cute.make_layout((Q, sizes.slab, sizes.weight_stages)), 16)
        bars = smem.allocate_array(Int64, self.pipes.count)
        return Smem(x, B, operand, weights, bars, smem.allocate_array(Int32, 1))

    @cute.jit
    def clear_lanes(self, tmem: Any, warp: Int32) -> None:
        """Scaled x has no rows in these lanes, but the tensor core reads them: its warp waits until they are 0."""
        columns = self.sizes.a_stages * T // 2
        first = self.sizes.lanes // WARP  # warp that has such lanes
        threads = (GROUP - first + 1) * WARP
        zero = kept(Int32(0))
        if (warp >= first) & (warp < GROUP):
            for half in range_constexpr(2):
                row = warp * WARP + half * 16
                if row >= self.sizes.lanes:
                    for column in range_constexpr(0, columns, 32):
                        where = tmem.toint() + (self.sizes.accumulator_columns + column) + row * LANE
                        store_rows(where, [zero] * (T // 4))
            cute.arch.fence_view_async_tmem_store()
            before_sync()
            cute.arch.barrier_arrive(barrier_id=CLEARED, number_of_threads=threads)
        if warp == MMA:
            cute.arch.barrier(barrier_id=CLEARED, number_of_threads=threads)
            after_sync()

    @cute.jit
    def locate(self, work: Work, item: Int32) -> tuple[Any, Any]:
        """(tile, first head) of a work item; by a whole warp."""
        slot, group = divmod(item, work.groups)
        if const_expr(work.offsets is not None):
            _, tile = find_tile(work.offsets, slot, work.seqlen)
        else:
            tile = batched_tile(slot, work.seqlen, work.row_tiles)
        return tile, group * self.config.state_heads

    @cute.jit
    def load(self, load_x: Copies, load_B: Copies, smem: Smem, work: Work, heads_per_group: Any) -> None:
        sizes, bars = self.sizes, smem.bars
        block, blocks, N = sizes.block, self.config.headdim // sizes.block, self.config.dstate
        n_x, n_b = Int32(0), Int32(0)
        for item in cutlass.range(work.first, work.end, work.step, unroll=1):
            tile, head = self.locate(work, item)
            parts = (tile.valid + T - 1) // T
            where = (0, tile.first, 0, head, tile.row)
            gx = cute.local_tile(
                cute.domain_offset(where, load_x.tensor), (block, T, blocks, sizes.slab, 1), (0, None, 0, None, 0)
            )
            where = (0, tile.first, 0, head // heads_per_group, tile.row)
            gB = cute.local_tile(cute.domain_offset(where, load_B.tensor), (64, T, N // 64, 1, 1), (0, None, 0, 0, 0))
            one = cute.make_layout(1)
            to_x, from_x = cpasync.tma_partition(
                load_x.atom, 0, one, cute.group_modes(smem.x, 0, 4), cute.group_modes(gx, 0, 5)
            )
            to_B, from_B = cpasync.tma_partition(
                load_B.atom, 0, one, cute.group_modes(smem.B, 0, 3), cute.group_modes(gB, 0, 5)
            )
            for slab in cutlass.range(sizes.slabs, unroll=1):
                for part in cutlass.range(parts, unroll=1):
                    if slab == 0:
                        copy_stage(self.pipes, bars, "b", n_b, sizes.b_bytes, load_B.atom, from_B[None, part], to_B)
                        n_b += 1
                    source = from_x[None, part, slab]
                    copy_stage(self.pipes, bars, "x", n_x, sizes.x_bytes, load_x.atom, source, to_x)
                    n_x += 1

    @cute.jit
    def decays(self, steps: Steps, decay: cute.Tensor, table: MaybeTensor, smem: Smem, work: Work, turn: Int32,
               lane: Int32) -> None:  # fmt: skip
        """What x_j is scaled by, exp(a_last - a_j) dt_j; slabs in turn with the other warp."""
        sizes, bars = self.sizes, smem.bars
        n = Int32(0)
        for item in cutlass.range(work.first, work.end, work.step, unroll=1):
            tile, head = self.locate(work, item)
            if const_expr(table is not None):  # noqa: SIM102
                if (head == 0) & (turn == 0) & (lane == 0):
                    store_tile(table, tile)
            if tile.valid > 0:
                for slab in cutlass.range(sizes.slabs, unroll=1):
                    if (n & 1) == turn:
                        weights = cute.make_rmem_tensor((EACH, sizes.slab), Float32)
                        self.weigh(weights, steps, decay, tile, head + slab * sizes.slab, lane)
                        self.pipes.wait_empty(bars, "weights", n)
                        for j in range_constexpr(sizes.slab):
                            target = cute.local_tile(
                                smem.weights[None, j, self.pipes.stage("weights", n)], (EACH,), (lane,)
                            )
                            cute.autovec_copy(weights[None, j], target)
                        self.pipes.arrive_full(bars, "weights", n)
                    n += 1

    @cute.jit
    def weigh(self, weights: cute.Tensor, steps: Steps, decay: cute.Tensor, tile: Tile, head: Int32,
              lane: Int32) -> None:  # fmt: skip
        """Of each token the decay of those behind it: a sum from the end, where a difference would cancel."""
        config, heads = self.config, range(self.sizes.slab)
        # All loads first, so that they are under way together.
        tokens = [lane * EACH + e for e in range(EACH)]
        raw = [[load_step(config, steps, tile.row, tile.first, t, tile.valid, head + j) for t in tokens] for j in heads]
        loaded = steps._replace(A=load_heads(steps.A, head, heads), dt_bias=load_heads(steps.dt_bias, head, heads))
        for j in range_constexpr(self.sizes.slab):
            behind = Float32(0.0)
            step, after = [None] * EACH, [None] * EACH
            for e in range_constexpr(EACH - 1, -1, -1):
                after[e] = behind
                step[e], own = discretise(config, loaded, raw[j][e], tokens[e] < tile.valid, j)
                behind = behind + own
            for distance in (1, 2, 4, 8, 16):
                other = cute.arch.shuffle_sync_down(behind, distance)
                behind = choose(lane + distance < WARP, behind + other, behind)
            lanes_behind = choose(lane < WARP - 1, cute.arch.shuffle_sync_down(behind, 1), 0.0)
            for e in range_constexpr(EACH):
                weights[e, j] = cute.math.exp2(after[e] + lanes_behind, fastmath=True) * step[e]
            if lane == 0:
                decay[tile.slot, head + j] = behind

    @cute.jit
    def scale(self, smem: Smem, tmem: Any, work: Work, turn: Int32, warp: Int32, lane: Int32) -> None:
        """Stages of x in turn with the other warpgroup."""
        bars = smem.bars
        n, slabs = Int32(0), Int32(0)
        sources = rows_of_lane(self.config, smem.x.iterator.toint(), warp, lane)
        a = tmem.toint() + self.sizes.accumulator_columns + warp * WARP * LANE
        head = warp * WARP // self.config.headdim
        for item in cutlass.range(work.first, work.end, work.step, unroll=1):
            tile, _ = self.locate(work, item)
            parts = (tile.valid + T - 1) // T
            rounds = cutlass.min(parts, 1) * self.sizes.slabs  # none in a slot that is not used
            for _ in cutlass.range(rounds, unroll=1):
                self.pipes.wait_full(bars, "weights", slabs)
                part = (turn - n) & 1
                if part < parts:
                    stage = n + part
                    weights = cute.make_rmem_tensor((2, T // 8), Float32)
                    mine = smem.weights[None, head, self.pipes.stage("weights", slabs)]
                    for j in range_constexpr(T // 8):
                        token_pair = part * (T // 2) + j * 4 + (lane & 3)
                        cute.autovec_copy(cute.local_tile(mine, (2,), (token_pair,)), weights[None, j])
                    self.pipes.wait_full(bars, "x", stage)
                    self.pipes.wait_empty(bars, "a", stage)
                    after_sync()
                    x_at = self.pipes.stage("x", stage) * self.sizes.x_bytes
                    a_at = a + self.pipes.stage("a", stage) * (T // 2)
                    for half in range_constexpr(2):
                        if const_expr(self.sizes.lanes % WARP == 0) or warp * WARP + 16 * half < self.sizes.lanes:
                            source, target = sources[half] + x_at, a_at + half * 16 * LANE
                            scale_rows(self.config, source, target, weights, tile.valid - part * T, lane)
                    cute.arch.fence_view_async_shared()  # x has been read before TMA writes its stage
                    cute.arch.fence_view_async_tmem_store()
                    before_sync()
                    arrive(self.pipes.empty(bars, "x", stage), self.pipes.full(bars, "a", stage))
                arrive_as_one(self.pipes.empty(bars, "weights", slabs))
                n += parts
                slabs += 1

    @cute.jit
    def multiply(self, smem: Smem, tmem: Any, work: Work, lane: Int32) -> None:
        sizes, bars = self.sizes, smem.bars
        mma = self.mma()
        a_layout = sm100.make_smem_layout_a(mma, (128, sizes.columns, T), self.dtype, sizes.a_stages)
        a_at = cute.recast_ptr(tmem + sizes.accumulator_columns, dtype=self.dtype)
        A = cute.make_tensor(a_at, mma.make_fragment_A(a_layout.outer.shape).layout)
        B = mma.make_fragment_B(smem.B_operand)
        acc = self.accumulators(mma, tmem)
        n_a, n_b, n_acc = Int32(0), Int32(0), Int32(0)
        for item in cutlass.range(work.first, work.end, work.step, unroll=1):
            tile, _ = self.locate(work, item)
            parts = (tile.valid + T - 1) // T
            rounds = cutlass.min(parts, 1) * sizes.slabs
            for slab in cutlass.range(rounds, unroll=1):
                for half in range_constexpr(sizes.halves):
                    self.pipes.wait_empty(bars, "acc", n_acc)
                    after_sync()
                    target = acc[None, 0, 0, self.pipes.stage("acc", n_acc)]
                    for part in cutlass.range(parts, unroll=1):
                        left = tile.valid - part * T
                        if const_expr(half == 0):
                            if slab == 0:
                                self.pipes.wait_full(bars, "b", n_b + part)
                                if (left < T) & (left % MMA_K != 0):
                                    # Scaled x is 0 behind the sequence's end, but 0 times another's NaN is NaN.
                                    at = smem.B.iterator.toint() + self.pipes.stage("b", n_b + part) * sizes.b_bytes
                                    clear_tail(at, self.dtype, 64, self.config.dstate, T, left, lane)
                            self.pipes.wait_full(bars, "a", n_a + part)
                            after_sync()
                        a_stage, b_stage = self.pipes.stage("a", n_a + part), self.pipes.stage("b", n_b + part)
                        left_operand, right_operand = A[None, 0, None, a_stage], B[None, half, None, b_stage]
                        self.multiply_part(mma, target, left_operand, right_operand, left, part)
                        if const_expr(half == sizes.halves - 1):
                            self.pipes.commit_empty(bars, "a", n_a + part)
                            if slab == sizes.slabs - 1:
                                self.pipes.commit_empty(bars, "b", n_b + part)
                    self.pipes.commit_full(bars, "acc", n_acc)
                    n_acc += 1
                n_a += parts
            n_b += parts

    def accumulators(self, mma: cute.TiledMma, tmem: Any) -> Any:
        """((128, columns), 1, 1, stage)"""
        shape = cute.append(mma.partition_shape_C((128, self.sizes.columns)), self.sizes.accumulators)
        return cute.make_tensor(tmem, mma.make_fragment_C(shape).layout)

    @cute.jit
    def multiply_part(self, mma: cute.TiledMma, acc: Any, a: Any, b: Any, left: Int32, part: Int32) -> None:
        """A stage's tokens, 16 at a time, as far as there are valid ones."""
        if left >= T:
            for k in range_constexpr(T // MMA_K):
                mma.set(tcgen05.Field.ACCUMULATE, (part != 0) if const_expr(k == 0) else True)
                cute.gemm(mma, acc, a[None, k], b[None, k], acc)
        else:
            for k in cutlass.range((left + MMA_K - 1) // MMA_K, unroll=1):
                mma.set(tcgen05.Field.ACCUMULATE, (part != 0) | (k != 0))
                cute.gemm(mma, acc, a[None, k], b[None, k], acc)

    @cute.jit
    def store(self, local: cute.Tensor, smem: Smem, tmem: Any, work: Work, warp: Int32, lane: Int32) -> None:
        """A lane has a row of headdim and its columns are neighbours in memory: 256-bit stores."""
        sizes, bars = self.sizes, smem.bars
        N = self.config.dstate
        row = warp * WARP + lane
        n = Int32(0)
        for item in cutlass.range(work.first, work.end, work.step, unroll=1):
            tile, head = self.locate(work, item)
            rounds = cutlass.min(tile.valid, 1) * sizes.slabs
            where = flat(local, tile.slot, head) + Int64(row * N)
            for _ in cutlass.range(rounds, unroll=1):
                for half in range_constexpr(sizes.halves):
                    self.pipes.wait_full(bars, "acc", n)
                    after_sync()
                    column = self.pipes.stage("acc", n) * sizes.columns
                    # A loop: unrolled, all loads would come first and take all registers.
                    for first in cutlass.range(0, sizes.columns, COLUMNS, unroll=1):
                        values = cute.make_rmem_tensor(COLUMNS, Float32)
                        tensor_memory.load(tmem, column + first, values, row)
                        cute.arch.fence_view_async_tmem_load()
                        if first + COLUMNS == sizes.columns:
                            arrive_after_tensor(self.pipes.empty(bars, "acc", n))
                        if const_expr(sizes.lanes % WARP == 0) or row < sizes.lanes:
                            self.store_columns(local, where + (half * sizes.columns + first), values)
                    n += 1
                where += Int64(sizes.lanes * N)

    def store_columns(self, local: cute.Tensor, offset: Int64, values: cute.Tensor) -> None:
        rounded = cute.make_rmem_tensor(COLUMNS, self.local)
        rounded.store(values.load().to(self.local))
        store_sectors(rounded, vector(local, offset, COLUMNS))


ChunkStateKernel.kernel.set_name_prefix("chunk_state", remove_cutlass_symbol=True, keep_mangled_name=False)
