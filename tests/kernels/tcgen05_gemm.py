"""A persistent tcgen05 GEMM: d = a bᵀ, or relu(a) bᵀ with a going through tensor memory. sm_100a, bf16, fp32 inside.

It exists to be mutated (mutation_score.py), so every hand-over of a usual Blackwell GEMM stands here once. Warps 0-3
epilogue, 4 MMA, 5 TMA loads, 6-9 (with relu) a from shared to tensor memory. Sizes need not be multiples of anything:
the TMA unit fills with zeros and cuts off.

Who waits for what (slots of a ring are counted on, so a parity is that of the lap):
  ab_full[s]    TMA unit -> MMA warp, with relu the relu warps: tiles of a and b are there (transaction bytes)
  ab_empty[s]   tensor core -> TMA warp: it has read them (commit); with relu also one arrival per relu warp
  a_ready[s]    relu warps -> MMA warp: a is in tensor memory;   a_free[s]: tensor core -> relu warps: it has read it
  acc_full[s]   tensor core -> epilogue warps: an accumulator is complete;   acc_empty[s]: all four have loaded it
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
import torch
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.cute.runtime import from_dlpack
from cutlass.tensor_utils import LayoutEnum

EPILOGUE_WARPS, MMA_WARP, TMA_WARP, RELU_WARPS = 4, 4, 5, 4
EPILOGUE_THREADS = 32 * EPILOGUE_WARPS
EPILOGUE_BARRIER = 1  # 0 is that of sync_threads
LANE = 1 << 16  # stride of the lanes of tensor memory


class Smem(NamedTuple):
    a: cute.Tensor
    b: cute.Tensor
    d: cute.Tensor  # (row, column, stage)
    tmem_base: cute.Pointer
    ab_full: cute.Pointer
    ab_empty: cute.Pointer
    a_ready: cute.Pointer
    a_free: cute.Pointer
    acc_full: cute.Pointer
    acc_empty: cute.Pointer


class Work(NamedTuple):
    """This CTA's output tiles; tile i is (i // columns, i % columns)."""

    first: Int32
    end: Int32
    step: Int32
    columns: Int32
    k_tiles: Int32


class Copies(NamedTuple):
    """A TMA atom with the tensor it copies."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


def slot(count: Int32, stages: int) -> tuple[Int32, Int32]:
    """Slot of a ring and parity of its lap; who waits until a slot is empty inverts the parity."""
    return count % stages, count // stages & 1


@dataclass(frozen=True)
class Gemm:
    """a: (M, K), b: (N, K), d: (M, N), row-major bf16, rows a multiple of 16 bytes apart."""

    relu: bool = False
    m: int = 128
    n: int = 64
    k: int = 64
    ab_stages: int = 3
    a_stages: int = 2  # in tensor memory, with relu
    acc_stages: int = 2
    d_stages: int = 2

    def tiled_mma(self, a_source: tcgen05.OperandSource = tcgen05.OperandSource.SMEM) -> cute.TiledMma:
        major, cta = OperandMajorMode.K, tcgen05.CtaGroup.ONE
        return sm100.make_trivial_tiled_mma(BFloat16, BFloat16, major, major, Float32, cta, (self.m, self.n), a_source)

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, ctas: Int32):
        mma, tile = self.tiled_mma(), (self.m, self.n, self.k)
        a_layout = sm100.make_smem_layout_a(mma, tile, BFloat16, self.ab_stages)
        b_layout = sm100.make_smem_layout_b(mma, tile, BFloat16, self.ab_stages)
        d_layout = sm100.make_smem_layout_epi(BFloat16, LayoutEnum.ROW_MAJOR, tile[:2], self.d_stages)
        load, store = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE), cpasync.CopyBulkTensorTileS2GOp()
        a_stage, b_stage = (cute.select(layout, mode=[0, 1, 2]) for layout in (a_layout, b_layout))
        load_a = Copies(*cute.nvgpu.make_tiled_tma_atom_A(load, a, a_stage, tile, mma))
        load_b = Copies(*cute.nvgpu.make_tiled_tma_atom_B(load, b, b_stage, tile, mma))
        store_d = Copies(*cpasync.make_tiled_tma_atom(store, d, cute.select(d_layout, mode=[0, 1]), tile[:2]))
        k_tiles = cute.ceil_div(a.shape[1], self.k)
        warps = TMA_WARP + 1 + (RELU_WARPS if self.relu else 0)
        kernel = self.kernel(load_a, load_b, store_d, a_layout, b_layout, d_layout, k_tiles)
        kernel.launch(grid=[ctas, 1, 1], block=[32 * warps, 1, 1])

    @cute.kernel
    def kernel(self, load_a: Copies, load_b: Copies, store_d: Copies, a_layout: cute.ComposedLayout,
               b_layout: cute.ComposedLayout, d_layout: cute.ComposedLayout, k_tiles: Int32):  # fmt: skip
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        smem = self.allocate((a_layout, b_layout, d_layout))
        tmem_columns = 256 if self.relu else 128
        if warp == MMA_WARP:
            self.initialise(smem)
            cute.arch.alloc_tmem(tmem_columns, smem.tmem_base)
            cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.sync_threads()
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, smem.tmem_base)  # accumulators, then a
        rows, columns = (cute.ceil_div(store_d.tensor.shape[mode], (self.m, self.n)[mode]) for mode in range(2))
        work = Work(cta, rows * columns, ctas, columns, k_tiles)
        if warp == TMA_WARP:
            self.load(load_a, load_b, smem, work)
        if warp == MMA_WARP:
            self.multiply(smem, tmem, work)
        if warp < EPILOGUE_WARPS:
            self.store(store_d, smem, tmem, work)
        if const_expr(self.relu):  # noqa: SIM102 (decided when it is compiled)
            if warp > TMA_WARP:
                self.rectify(smem, tmem, work, warp)
        cute.arch.sync_threads()  # nobody uses tensor memory any more
        if warp == MMA_WARP:
            cute.arch.dealloc_tmem(tmem, tmem_columns)

    @cute.jit
    def allocate(self, layouts: tuple[cute.ComposedLayout, ...]) -> Smem:
        smem = cutlass.memory.SmemAllocator()
        rings = (self.ab_stages, self.ab_stages, self.a_stages, self.a_stages, self.acc_stages, self.acc_stages)
        barriers = [smem.allocate_array(Int64, stages) for stages in rings]
        base = smem.allocate_array(Int32, 1)
        return Smem(*[smem.allocate_tensor(BFloat16, x.outer, 1024, swizzle=x.inner) for x in layouts], base, *barriers)

    @cute.jit
    def initialise(self, smem: Smem):
        relu_warps = RELU_WARPS if self.relu else 0
        with cute.arch.elect_one():
            for stage in cutlass.range_constexpr(self.ab_stages):
                cute.arch.mbarrier_init(smem.ab_full + stage, 1)
                cute.arch.mbarrier_init(smem.ab_empty + stage, 1 + relu_warps)
            for stage in cutlass.range_constexpr(self.a_stages if relu_warps else 0):
                cute.arch.mbarrier_init(smem.a_ready + stage, relu_warps)
                cute.arch.mbarrier_init(smem.a_free + stage, 1)
            for stage in cutlass.range_constexpr(self.acc_stages):
                cute.arch.mbarrier_init(smem.acc_full + stage, 1)
                cute.arch.mbarrier_init(smem.acc_empty + stage, EPILOGUE_WARPS)
        cute.arch.mbarrier_init_fence()

    @cute.jit
    def load(self, load_a: Copies, load_b: Copies, smem: Smem, work: Work):
        mma = self.tiled_mma().get_slice(0)
        gA = mma.partition_A(cute.local_tile(load_a.tensor, (self.m, self.k), (None, None)))
        gB = mma.partition_B(cute.local_tile(load_b.tensor, (self.n, self.k), (None, None)))
        tAsA, tAgA = self.partition(load_a.atom, smem.a, gA, 3)  # (copy, stage), (copy, m tile, k tile)
        tBsB, tBgB = self.partition(load_b.atom, smem.b, gB, 3)
        count = Int32(0)
        for tile in cutlass.range(work.first, work.end, work.step, unroll=1):
            for k_tile in cutlass.range(work.k_tiles, unroll=1):
                stage, parity = slot(count, self.ab_stages)
                full = smem.ab_full + stage
                cute.arch.mbarrier_wait(smem.ab_empty + stage, parity ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, 2 * self.k * (self.m + self.n))
                cute.copy(load_a.atom, tAgA[None, tile // work.columns, k_tile], tAsA[None, stage], tma_bar_ptr=full)
                cute.copy(load_b.atom, tBgB[None, tile % work.columns, k_tile], tBsB[None, stage], tma_bar_ptr=full)
                count += 1

    @cute.jit
    def multiply(self, smem: Smem, tmem: cute.Pointer, work: Work):
        mma = self.tiled_mma(tcgen05.OperandSource.TMEM if self.relu else tcgen05.OperandSource.SMEM)
        rA = mma.make_fragment_A(smem.a)  # (mma, 1, k step, stage)
        if const_expr(self.relu):
            layout = sm100.make_smem_layout_a(mma, (self.m, self.n, self.k), BFloat16, self.a_stages)
            tA = cute.recast_ptr(tmem + self.acc_stages * self.n, dtype=BFloat16)
            rA = cute.make_tensor(tA, mma.make_fragment_A(layout.outer.shape).layout)
        rB = mma.make_fragment_B(smem.b)
        shape = cute.append(mma.partition_shape_C((self.m, self.n)), self.acc_stages)
        tAcc = cute.make_tensor(tmem, mma.make_fragment_C(shape).layout)  # (mma, 1, 1, stage)
        count = Int32(0)
        tile_count = Int32(0)
        ready = Boolean(False)  # a peek at the next ab_full
        for _ in cutlass.range(work.first, work.end, work.step, unroll=1):
            acc_stage, acc_parity = slot(tile_count, self.acc_stages)
            acc = tAcc[None, 0, 0, acc_stage]
            cute.arch.mbarrier_wait(smem.acc_empty + acc_stage, acc_parity ^ 1)
            for k_tile in cutlass.range(work.k_tiles, unroll=1):
                stage, parity = slot(count, self.ab_stages)
                a_stage, a_parity = slot(count, self.a_stages if self.relu else self.ab_stages)
                if const_expr(self.relu):  # b came with the a that the relu warps have waited for
                    cute.arch.mbarrier_wait(smem.a_ready + a_stage, a_parity)
                else:
                    if not ready:
                        cute.arch.mbarrier_wait(smem.ab_full + stage, parity)
                    next_stage, next_parity = slot(count + 1, self.ab_stages)
                    ready = cute.arch.mbarrier_try_wait(smem.ab_full + next_stage, next_parity)
                for step in cutlass.range_constexpr(self.k // 16):
                    mma.set(tcgen05.Field.ACCUMULATE, True if const_expr(step) else k_tile != 0)
                    cute.gemm(mma, acc, rA[None, 0, step, a_stage], rB[None, 0, step, stage], acc)
                with cute.arch.elect_one():
                    tcgen05.commit(smem.ab_empty + stage)
                    if const_expr(self.relu):
                        tcgen05.commit(smem.a_free + a_stage)
                count += 1
            with cute.arch.elect_one():
                tcgen05.commit(smem.acc_full + acc_stage)
            tile_count += 1

    @cute.jit
    def rectify(self, smem: Smem, tmem: cute.Pointer, work: Work, warp: Int32):
        """relu(a) from shared to tensor memory: a thread has a row, which becomes a lane of pairs of elements."""
        row, pairs = warp % 4 * 32 + cute.arch.lane_idx(), self.k // 2
        # The swizzle is the pointer's, so a plain layout addresses rows and columns.
        layout = cute.make_ordered_layout((self.m, self.k, self.ab_stages), order=(1, 0, 2))
        sA = cute.make_tensor(smem.a.iterator, layout)
        atom = cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(pairs)), Float32)
        count = Int32(0)
        for _ in cutlass.range(work.first, work.end, work.step, unroll=1):
            for _ in cutlass.range(work.k_tiles, unroll=1):
                stage, parity = slot(count, self.ab_stages)
                a_stage, a_parity = slot(count, self.a_stages)
                cute.arch.mbarrier_wait(smem.ab_full + stage, parity)
                rA = cute.make_rmem_tensor(self.k, BFloat16)
                cute.autovec_copy(sA[row, None, stage], rA)
                values = rA.load().to(Float32)
                rA.store(cute.where(values > 0, values, cute.full_like(values, 0)).to(BFloat16))
                cute.arch.mbarrier_wait(smem.a_free + a_stage, a_parity ^ 1)
                column = self.acc_stages * self.n + a_stage * pairs
                tA = cute.make_tensor(tmem + column, cute.make_layout((self.m, pairs), stride=(LANE, 1)))
                copy = tcgen05.make_tmem_copy(atom, tA)
                rPairs = cute.make_tensor(cute.recast_ptr(rA.iterator, dtype=Float32), ((pairs, 1), 1, 1))
                cute.copy(copy, rPairs, copy.get_slice(row).partition_D(tA))
                cute.arch.fence_view_async_tmem_store()
                cute.arch.fence_view_async_shared()  # the next TMA load must not overtake these reads
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(smem.ab_empty + stage)
                    cute.arch.mbarrier_arrive(smem.a_ready + a_stage)
                count += 1

    @cute.jit
    def store(self, store_d: Copies, smem: Smem, tmem: cute.Pointer, work: Work):
        thread, _, _ = cute.arch.thread_idx()
        gD = cute.local_tile(store_d.tensor, (self.m, self.n), (None, None))
        tDsD, tDgD = self.partition(store_d.atom, smem.d, gD, 2)  # (copy, stage), (copy, m tile, n tile)
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(self.n)), Float32)
        count = Int32(0)
        for tile in cutlass.range(work.first, work.end, work.step, unroll=1):
            acc_stage, parity = slot(count, self.acc_stages)
            d_stage, _ = slot(count, self.d_stages)
            cute.arch.mbarrier_wait(smem.acc_full + acc_stage, parity)
            tAcc = cute.make_tensor(tmem + acc_stage * self.n, cute.make_layout((self.m, self.n), stride=(LANE, 1)))
            copy = tcgen05.make_tmem_copy(atom, tAcc)
            rAcc = cute.make_rmem_tensor(((self.n, 1), 1, 1), Float32)
            cute.copy(copy, copy.get_slice(thread).partition_S(tAcc), rAcc)
            cute.arch.fence_view_async_tmem_load()  # of the whole warp, which loads as one
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(smem.acc_empty + acc_stage)

            if thread == 0:  # bulk groups belong to the thread that stores
                cute.arch.cp_async_bulk_wait_group(self.d_stages - 1, read=True)
            cute.arch.barrier(barrier_id=EPILOGUE_BARRIER, number_of_threads=EPILOGUE_THREADS)
            rD = cute.make_rmem_tensor(self.n, BFloat16)
            rD.store(rAcc.load().reshape(self.n).to(BFloat16))
            cute.autovec_copy(rD, smem.d[thread, None, d_stage])
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=EPILOGUE_BARRIER, number_of_threads=EPILOGUE_THREADS)
            if thread == 0:
                cute.copy(store_d.atom, tDsD[None, d_stage], tDgD[None, tile // work.columns, tile % work.columns])
                cute.arch.cp_async_bulk_commit_group()
            count += 1
        if thread == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory must outlive the reads of the last stores

    @cute.jit
    def partition(self, atom: cute.CopyAtom, shared: cute.Tensor, tiles: cute.Tensor, modes: cutlass.Constexpr):
        """(copy, stage) and (copy, tile...): what a copy of the TMA unit takes."""
        tensors = [cute.group_modes(tensor, 0, modes) for tensor in (shared, tiles)]
        return cpasync.tma_partition(atom, 0, cute.make_layout(1), *tensors)


def view(tensor: torch.Tensor) -> cute.Tensor:
    return from_dlpack(tensor, assumed_align=16).mark_layout_dynamic(leading_dim=1)


@cache
def compiled(relu: bool) -> Callable[..., None]:
    """For any sizes. Inside an emulator's session; a function of one session works in the next."""
    example = view(torch.zeros(8, 8, dtype=torch.bfloat16))
    return cute.compile(Gemm(relu), example, example, example, Int32(1))


def run(relu: bool = False, shape: tuple[int, int, int] = (300, 136, 200), ctas: int = 2) -> dict[str, torch.Tensor]:
    """Launches it inside an emulator's session for (M, N, K); returns the tensors."""
    generator = torch.Generator().manual_seed(0)
    m, n, k = shape
    a, b = (torch.randn(rows, k, generator=generator).to(torch.bfloat16) for rows in (m, n))
    d = torch.full((m, n), torch.nan, dtype=torch.bfloat16)
    compiled(relu)(view(a), view(b), view(d), Int32(ctas))
    return {"a": a, "b": b, "output": d, "expected": (a.relu() if relu else a).float() @ b.float().T}


def check(tensors: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(tensors["output"].float(), tensors["expected"], rtol=2**-7, atol=2**-7)
