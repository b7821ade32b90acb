"""chunk_scan: y of every tile, from its own tokens and the state that enters it. README.md has the algorithm.

    y[i] = sum over j <= i of (C_i·B_j) 2^(cs_i - cs_j) step_j x_j + 2^cs_i C_i·S + D x_i,    y *= silu(z)

cs is the running sum of the log2 decays of a tile. A CTA takes work items, each a tile of Q tokens and `scan_heads`
heads of a group, one after the other; its warps are specialists:

    load      TMA: C, B, states                      product   MMA: y += M·x, M from tensor memory
    MMA       MMA: scores = C·Bᵀ, slab = C·Sᵀ        segsum    M = scores ∘ decays (two warpgroups)
    vectors   running sums, factors; TMA: x          epilogue  slab *= 2^cs; y out of the slab
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Float32, Int32, Int64, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator

from ..arithmetic import numeric
from . import scan_layout as sl
from .config import MMA_K, TENSOR_COLUMNS, Chunked, Q, block_features
from .pipes import Copies, Pipe, Pipes, after_sync, copy_stage
from .scan_roles import Cta, Epilogue, Operands, Segsum, Sizes, Vectors, item_of, partition
from .steps import Steps
from .tiles import clear_tail, tiles_per_row

MaybeTensor = Any  # a cute.Tensor, or None where the configuration has none


class Layouts(NamedTuple):
    """Of the operands in shared memory, each with all stages."""

    C: Any
    B: Any
    state: Any
    x: Any


class ChunkScanKernel:
    """Compiled for one `Chunked`; tensors as in `ChunkedKernels`."""

    def __init__(self, config: Chunked) -> None:
        self.config = config
        self.layout = layout = sl.scan_layout(config)
        self.dtype = numeric(config.dtype)
        users = sl.SEGSUM_USERS
        self.pipes = Pipes(
            c=Pipe(layout.c_stages, 1, 1),
            ring=Pipe(layout.ring_stages, 1, 1),
            x=Pipe(layout.x_stages, 1, 1),
            vectors=Pipe(sl.VECTOR_STAGES, 1, users + 4),
            scores=Pipe(1, 1, users),
            m=Pipe(2, users, 1),
            slab=Pipe(layout.slabs, 1, 4),  # full: C·state is there; empty: y has been loaded
            scaled=Pipe(layout.slabs * layout.slab_heads, 4),
            y=Pipe(layout.slabs * layout.slab_heads, 1),
        )
        self.vectors = Vectors(config, layout, self.pipes)
        self.segsum = Segsum(config, layout, self.pipes)
        self.epilogue = Epilogue(config, layout, self.pipes)

    # ---- matrix products ----

    def tiled_mma(self, n: int, b_major: Any = OperandMajorMode.K, source: Any = tcgen05.OperandSource.SMEM) -> Any:
        return sm100.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, b_major, Float32, tcgen05.CtaGroup.ONE, (Q, n), source
        )

    def scores_mma(self) -> Any:
        """(Q, Q) = C (Q, N) Bᵀ (N, Q)."""
        return self.tiled_mma(Q)

    def state_mma(self) -> Any:
        """(Q, heads P) = C (Q, N) Sᵀ (N, heads P)."""
        return self.tiled_mma(self.layout.slab_columns)

    def product_mma(self) -> Any:
        """(Q, P) = M (Q, Q) x (Q, P)."""
        return self.tiled_mma(self.config.headdim, OperandMajorMode.MN, tcgen05.OperandSource.TMEM)

    def layouts(self) -> Layouts:
        layout, dtype = self.layout, self.dtype
        rows, columns, P = (Q, Q, sl.BLOCK), layout.slab_columns, self.config.headdim
        state = sm100.make_smem_layout_b(self.state_mma(), (Q, columns, sl.BLOCK), dtype, 1)
        outer = cute.select(state.outer, mode=[0, 1, 2])
        # A state takes the first rows of a slot of the ring.
        slots = cute.make_layout(layout.ring_stages, stride=sl.SLOT_BYTES // 2)
        return Layouts(
            sm100.make_smem_layout_a(self.scores_mma(), rows, dtype, layout.c_stages),
            sm100.make_smem_layout_b(self.scores_mma(), rows, dtype, layout.ring_stages),
            cute.make_composed_layout(state.inner, 0, cute.append(outer, slots)),
            sm100.make_smem_layout_b(self.product_mma(), (Q, P, Q), dtype, layout.x_stages),
        )

    # ---- host ----

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        B: cute.Tensor,
        C: cute.Tensor,
        D: MaybeTensor,
        z: MaybeTensor,
        steps: Steps,
        incoming: cute.Tensor,
        table: MaybeTensor,
        y: cute.Tensor,
        ctas: Int32,
        stream: Any,
    ) -> None:
        layout, P, N = self.layout, self.config.headdim, self.config.dstate
        shapes = self.layouts()
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
        states = cute.make_layout((x.shape[2] * P, N, incoming.shape[0]), stride=(N, 1, incoming.stride[0]))

        def copies(make: Any, tensor: Any, smem_layout: Any, tile: Any, mma: Any) -> Copies:
            stage = cute.select(smem_layout, mode=[0, 1, 2])
            return Copies(*make(load, tensor, stage, tile, mma, (1, 1, 1, 1)))

        def rows(tensor: Any, mode: list[int]) -> Any:
            return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=mode))

        a, b = cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B
        block = (Q, Q, sl.BLOCK)
        load_C = copies(a, rows(C, [1, 3, 2, 0]), shapes.C, block, self.scores_mma())  # (seqlen, N, G, batch)
        load_B = copies(b, rows(B, [1, 3, 2, 0]), shapes.B, block, self.scores_mma())
        load_state = copies(
            b, cute.make_tensor(incoming.iterator, states), shapes.state, (Q, layout.slab_columns, sl.BLOCK),
            self.state_mma(),
        )  # fmt: skip
        load_x = copies(b, rows(x, [3, 1, 2, 0]), shapes.x, (Q, P, Q), self.product_mma())  # (P, seqlen, H, batch)
        groups = x.shape[2] // layout.heads
        items = incoming.shape[0] * groups
        grid = cutlass.min(items, ctas)
        sizes = Sizes(
            cute.FastDivmodDivisorV2(groups),
            cute.FastDivmodDivisorV2(x.shape[2] // B.shape[2]),
            cute.FastDivmodDivisorV2(tiles_per_row(x.shape[1])),
            items // grid,
            items % grid,
        )
        self.kernel(load_C, load_B, load_state, load_x, x, D, z, steps, table, y, sizes, shapes).launch(
            grid=[grid, 1, 1],
            block=[sl.THREADS, 1, 1],
            smem=layout.shared_bytes,
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    # ---- device ----

    @cute.kernel
    def kernel(
        self,
        load_C: Copies,
        load_B: Copies,
        load_state: Copies,
        load_x: Copies,
        x: cute.Tensor,
        D: MaybeTensor,
        z: MaybeTensor,
        steps: Steps,
        table: MaybeTensor,
        y: cute.Tensor,
        sizes: Sizes,
        shapes: Layouts,
    ) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        sC = smem.allocate_tensor(self.dtype, shapes.C.outer, 1024, swizzle=shapes.C.inner)
        sB = smem.allocate_tensor(self.dtype, shapes.B.outer, 1024, swizzle=shapes.B.inner)
        sState = cute.make_tensor(sB.iterator, shapes.state.outer)
        sX = smem.allocate_tensor(self.dtype, shapes.x.outer, 1024, swizzle=shapes.x.inner)
        vectors = smem.allocate_tensor(Float32, cute.make_layout((sl.VECTORS, sl.VECTOR_STAGES)), 16)
        bars = smem.allocate_array(Int64, self.pipes.count)
        tmem_base = smem.allocate_array(Int32, 1)
        if warp == sl.LOAD_WARP:
            self.pipes.initialise(bars)
            for copies in (load_C, load_B, load_state, load_x):
                cpasync.prefetch_descriptor(copies.atom)
        if warp == sl.MMA_WARP:
            cute.arch.alloc_tmem(TENSOR_COLUMNS, tmem_base)
            cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.sync_threads()
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, tmem_base)
        cute.arch.griddepcontrol_wait()  # the tiles' states and their table come from the kernels before
        cute.arch.griddepcontrol_launch_dependents()
        cta = self.cta(bars, tmem, vectors, x, table, sizes)

        if warp < sl.SEGSUM_WARPS[0]:
            cute.arch.setmaxregister_decrease(sl.THIN_REGISTERS)
            if warp == sl.LOAD_WARP:
                self.load(cta, load_C, load_B, load_state, sC, sB, sState)
            if warp == sl.MMA_WARP:
                self.multiply(cta, sC, sB, sState)
            if warp == sl.VECTOR_WARP:
                self.vectors.run(cta, steps, load_x.atom, load_x.tensor, sX, self.product_mma(), 0)
            if warp == sl.PRODUCT_WARP:
                self.product(cta, sX)
        elif warp < sl.EPILOGUE_WARPS[0]:
            cute.arch.setmaxregister_increase(sl.SEGSUM_REGISTERS)
            if warp == sl.SECOND_VECTOR_WARP:
                self.vectors.run(cta, steps, load_x.atom, load_x.tensor, sX, self.product_mma(), 1)
            else:
                self.segsum.run(cta, warp)
        else:
            cute.arch.setmaxregister_increase(sl.EPILOGUE_REGISTERS)
            self.epilogue.run(cta, Operands(x, D, z, y))
        cute.arch.sync_threads()  # nobody uses tensor memory any more
        if warp == sl.MMA_WARP:
            cute.arch.dealloc_tmem(tmem, TENSOR_COLUMNS)

    def cta(self, bars: Any, tmem: Any, vectors: Any, x: Any, table: Any, sizes: Sizes) -> Cta:
        index, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        thread, _, _ = cute.arch.thread_idx()
        count = sizes.rounds + Int32(index < sizes.extra)
        return Cta(bars, tmem, vectors, thread, cute.arch.lane_idx(), index, ctas, count, sizes, x.shape[1], table)

    @cute.jit
    def load(self, cta: Cta, load_C: Copies, load_B: Copies, load_state: Copies, sC: cute.Tensor, sB: cute.Tensor,
             sState: cute.Tensor) -> None:  # fmt: skip
        """C and B of every item, then its states, in the order in which `multiply` wants them."""
        layout = self.layout
        scores, states = self.scores_mma().get_slice(0), self.state_mma().get_slice(0)
        tile = (layout.slab_columns, sl.BLOCK)
        gS = states.partition_B(cute.local_tile(load_state.tensor, tile, (None, None, None)))
        tSs, tSg = partition(load_state.atom, sState, gS)  # (copy, stage), (copy, slab of heads, block, slot)
        state_bytes = layout.slab_columns * sl.BLOCK * 2
        c, ring = Int32(0), Int32(0)
        for n in cutlass.range(cta.count, unroll=1):
            item = item_of(cta, layout, n)
            if item.tile.valid > 0:
                group = item.head // cta.sizes.group_heads
                gC = self.rows(load_C.tensor, item.tile.first)
                gB = self.rows(load_B.tensor, item.tile.first)
                tCs, tCg = partition(load_C.atom, sC, scores.partition_A(gC))  # (copy, stage), (copy, block, G, batch)
                tBs, tBg = partition(load_B.atom, sB, scores.partition_B(gB))
                for block in range_constexpr(layout.blocks):
                    where = (None, block, group, item.tile.row)
                    copy_stage(self.pipes, cta.bars, "ring", ring, sl.SLOT_BYTES, load_B.atom, tBg[where], tBs)
                    copy_stage(self.pipes, cta.bars, "c", c, sl.SLOT_BYTES, load_C.atom, tCg[where], tCs)
                    c, ring = c + 1, ring + 1
                first_slab = item.head // layout.slab_heads
                for slab in cutlass.range(layout.item_slabs, unroll=1):
                    for block in range_constexpr(layout.blocks):
                        source = tSg[None, first_slab + slab, block, item.tile.slot]
                        copy_stage(self.pipes, cta.bars, "ring", ring, state_bytes, load_state.atom, source, tSs)
                        ring += 1

    def rows(self, tensor: Any, first: Any) -> Any:
        """(Q rows from `first` on, elements, block, G, batch) of (seqlen, N, G, batch)."""
        return cute.local_tile(cute.domain_offset((first, 0, 0, 0), tensor), (Q, sl.BLOCK), (0, None, None, None))

    @cute.jit
    def multiply(self, cta: Cta, sC: cute.Tensor, sB: cute.Tensor, sState: cute.Tensor) -> None:
        """scores = C·Bᵀ of every item, then C·Sᵀ of its slabs of heads."""
        layout, bars = self.layout, cta.bars
        scores, states = self.scores_mma(), self.state_mma()
        rC, rB = scores.make_fragment_A(sC), scores.make_fragment_B(sB)  # (mma, 1, k step, stage)
        rCs, rS = states.make_fragment_A(sC), states.make_fragment_B(sState)
        tScores = accumulator(scores, cta.tmem + layout.scores_column, Q)
        item, c, ring, slab = Int32(0), Int32(0), Int32(0), Int32(0)
        for n in cutlass.range(cta.count, unroll=1):
            if item_of(cta, layout, n).tile.valid > 0:
                self.pipes.wait_empty(bars, "scores", item)
                for block in range_constexpr(layout.blocks):
                    self.pipes.wait_full(bars, "c", c + block)
                    self.pipes.wait_full(bars, "ring", ring + block)
                    after_sync()
                    c_stage, ring_stage = self.pipes.stage("c", c + block), self.pipes.stage("ring", ring + block)
                    gemm(scores, tScores, rC[None, None, None, c_stage], rB[None, None, None, ring_stage], block > 0)
                    self.pipes.commit_empty(bars, "ring", ring + block)
                self.pipes.commit_full(bars, "scores", item)
                item, ring = item + 1, ring + layout.blocks
                for k in cutlass.range(layout.item_slabs, unroll=1):
                    self.pipes.wait_empty(bars, "slab", slab)
                    column = layout.slab_column + layout.slab_columns * self.pipes.stage("slab", slab)
                    tSlab = accumulator(states, cta.tmem + column, layout.slab_columns)
                    for block in range_constexpr(layout.blocks):
                        self.pipes.wait_full(bars, "ring", ring + block)
                        after_sync()
                        c_stage, ring_stage = self.pipes.stage("c", c + block), self.pipes.stage("ring", ring + block)
                        gemm(states, tSlab, rCs[None, None, None, c_stage], rS[None, None, None, ring_stage], block > 0)
                        self.pipes.commit_empty(bars, "ring", ring + block)
                        if k == layout.item_slabs - 1:
                            self.pipes.commit_empty(bars, "c", c + block)
                    self.pipes.commit_full(bars, "slab", slab)
                    slab, ring = slab + 1, ring + layout.blocks
                c += layout.blocks

    @cute.jit
    def product(self, cta: Cta, sX: cute.Tensor) -> None:
        """y += M·x of every head, in its part of a slab."""
        layout, bars, P = self.layout, cta.bars, self.config.headdim
        mma = self.product_mma()
        rX = mma.make_fragment_B(sX)
        shape = sm100.make_smem_layout_a(mma, (Q, P, Q), self.dtype, 1).outer.shape
        m_layout = mma.make_fragment_A(shape).layout
        head = Int32(0)
        for n in cutlass.range(cta.count, unroll=1):
            valid = item_of(cta, layout, n).tile.valid
            if valid > 0:
                for _ in cutlass.range(self.config.scan_heads, unroll=1):
                    slab, stage = head // layout.slab_heads, self.pipes.stage("x", head)
                    column = layout.slab_column + layout.slab_columns * self.pipes.stage("slab", slab)
                    tY = accumulator(mma, cta.tmem + (column + P * (head % layout.slab_heads)), P)
                    m_column = layout.m_column + Q // 2 * self.pipes.stage("m", head)
                    tM = cute.make_tensor(cute.recast_ptr(cta.tmem + m_column, dtype=self.dtype), m_layout)
                    self.pipes.wait_full(bars, "x", head)
                    if valid % 16 != 0:
                        # M is 0 in the columns behind the tile's tokens, but 0·NaN is not.
                        at = sX.iterator.toint() + stage * layout.x_bytes
                        clear_tail(at, self.dtype, block_features(P), P, Q, valid, cta.lane)
                    self.pipes.wait_full(bars, "scaled", head)
                    self.pipes.wait_full(bars, "m", head)
                    after_sync()
                    mma.set(tcgen05.Field.ACCUMULATE, True)
                    if valid == Q:
                        for step in range_constexpr(Q // MMA_K):
                            cute.gemm(mma, tY, tM[None, None, step, 0], rX[None, None, step, stage], tY)
                    else:
                        for step in cutlass.range((valid + MMA_K - 1) // MMA_K, unroll=1):
                            cute.gemm(mma, tY, tM[None, None, step, 0], rX[None, None, step, stage], tY)
                    self.pipes.commit_empty(bars, "x", head)
                    self.pipes.commit_empty(bars, "m", head)
                    self.pipes.commit_full(bars, "y", head)
                    head += 1


def accumulator(mma: Any, pointer: Any, n: int) -> Any:
    return cute.make_tensor(pointer, mma.make_fragment_C(mma.partition_shape_C((Q, n))).layout)


def gemm(mma: Any, d: Any, a: Any, b: Any, accumulate: bool) -> None:
    """d (+)= a·b of one slot."""
    for step in range(cute.size(b, mode=[2])):
        mma.set(tcgen05.Field.ACCUMULATE, cutlass.Boolean(accumulate or step > 0))
        cute.gemm(mma, d, a[None, None, step], b[None, None, step], d)


ChunkScanKernel.kernel.set_name_prefix("chunk_scan", remove_cutlass_symbol=True, keep_mangled_name=False)
