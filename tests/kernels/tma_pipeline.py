"""A pipeline of TMA copies with little arithmetic: y = scale * x + the sum of x's row. sm_100a, fp32.

It exists to be mutated (mutation_score.py): every kind of synchronisation between warps and the TMA unit stands here
once. One warp loads tiles of rows into a ring of shared memory; four warps read them there, write results to a second
ring and let one thread store them. A CTA takes more tiles than the rings have slots. The last tile is cut off.

Who waits for what (slots of a ring are counted on, so a parity is that of the lap):
  x_full[s]    TMA unit -> consumers: the tile is there (transaction bytes)
  x_empty[s]   consumers -> producer warp: one arrival per warp after all its lanes have read
  FREE         warp 0 -> the other consumers: an earlier store has read this slot of the output ring
  WRITTEN      the other consumers -> warp 0: the output tile is complete and visible to the TMA unit
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack

FREE, WRITTEN = 1, 2  # named barriers; 0 is that of sync_threads


class Smem(NamedTuple):
    x: cute.Tensor  # (row, column, stage)
    y: cute.Tensor  # (row, column, stage)
    x_full: cute.Pointer
    x_empty: cute.Pointer


class Tiles(NamedTuple):
    """This CTA's tiles of rows."""

    first: Int32
    end: Int32
    step: Int32


@dataclass(frozen=True)
class TmaPipeline:
    """x, y: (any, up to `columns`) fp32, row-major, rows a multiple of 16 bytes apart."""

    rows: int = 16
    columns: int = 64
    x_stages: int = 3
    y_stages: int = 2
    consumers: int = 4  # warps

    @property
    def tile_bytes(self) -> int:
        return self.rows * self.columns * 4

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, scale: Float32, ctas: Int32):
        tile = (self.rows, self.columns)
        layout = cute.make_ordered_layout(tile, order=(1, 0))
        load, x_tiles = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, layout, tile)
        store, y_tiles = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), y, layout, tile)
        block = [32 * (self.consumers + 1), 1, 1]
        self.kernel(load, x_tiles, store, y_tiles, scale).launch(grid=[ctas, 1, 1], block=block)

    @cute.kernel
    def kernel(self, load: cute.CopyAtom, mX: cute.Tensor, store: cute.CopyAtom, mY: cute.Tensor, scale: Float32):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        smem = self.allocate()
        if warp == self.consumers:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(self.x_stages):
                    cute.arch.mbarrier_init(smem.x_full + stage, 1)
                    cute.arch.mbarrier_init(smem.x_empty + stage, self.consumers)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        tiles = Tiles(cta, cute.ceil_div(mX.shape[0], self.rows), ctas)
        if warp == self.consumers:
            self.produce(load, mX, smem, tiles)
        else:
            self.consume(store, mY, smem, tiles, scale, warp)

    @cute.jit
    def allocate(self) -> Smem:
        smem = cutlass.memory.SmemAllocator()
        barriers = smem.allocate_array(Int64, 2 * self.x_stages)
        tile = (self.rows, self.columns)
        x = smem.allocate_tensor(Float32, cute.make_ordered_layout((*tile, self.x_stages), order=(1, 0, 2)), 128)
        y = smem.allocate_tensor(Float32, cute.make_ordered_layout((*tile, self.y_stages), order=(1, 0, 2)), 128)
        return Smem(x, y, barriers, barriers + self.x_stages)

    @cute.jit
    def produce(self, load: cute.CopyAtom, mX: cute.Tensor, smem: Smem, tiles: Tiles):
        gX = cute.local_tile(mX, (self.rows, self.columns), (None, 0))  # (row, column, tile)
        tXsX, tXgX = self.partition(load, smem.x, gX)
        count = Int32(0)
        for tile in cutlass.range(tiles.first, tiles.end, tiles.step, unroll=1):
            stage, lap = count % self.x_stages, count // self.x_stages
            cute.arch.mbarrier_wait(smem.x_empty + stage, (lap & 1) ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(smem.x_full + stage, self.tile_bytes)
            cute.copy(load, tXgX[None, tile], tXsX[None, stage], tma_bar_ptr=smem.x_full + stage)
            count += 1

    @cute.jit
    def consume(self, store: cute.CopyAtom, mY: cute.Tensor, smem: Smem, tiles: Tiles, scale: Float32, warp: Int32):
        gY = cute.local_tile(mY, (self.rows, self.columns), (None, 0))
        tYsY, tYgY = self.partition(store, smem.y, gY)
        thread, _, _ = cute.arch.thread_idx()
        threads = 32 * self.consumers
        count = Int32(0)
        for tile in cutlass.range(tiles.first, tiles.end, tiles.step, unroll=1):
            stage, lap = count % self.x_stages, count // self.x_stages
            y_stage = count % self.y_stages
            cute.arch.mbarrier_wait(smem.x_full + stage, lap & 1)
            rY = self.scale_rows(smem.x[None, None, stage], scale, warp)
            cute.arch.fence_view_async_shared()  # the next TMA load must not overtake these reads
            cute.arch.sync_warp()  # all lanes have read before one says so
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(smem.x_empty + stage)

            if warp == 0:
                if thread == 0:  # bulk groups belong to the thread that stores
                    cute.arch.cp_async_bulk_wait_group(self.y_stages - 1, read=True)
                cute.arch.sync_warp()
                cute.arch.barrier_arrive(barrier_id=FREE, number_of_threads=threads)
            else:
                cute.arch.barrier(barrier_id=FREE, number_of_threads=threads)
            self.write_rows(rY, smem.y[None, None, y_stage], warp)
            cute.arch.fence_view_async_shared()
            if warp == 0:
                cute.arch.barrier(barrier_id=WRITTEN, number_of_threads=threads)
                if thread == 0:
                    cute.copy(store, tYsY[None, y_stage], tYgY[None, tile])
                    cute.arch.cp_async_bulk_commit_group()
            else:
                cute.arch.barrier_arrive(barrier_id=WRITTEN, number_of_threads=threads)
            count += 1
        if thread == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory must outlive the reads of the last stores

    @cute.jit
    def scale_rows(self, sX: cute.Tensor, scale: Float32, warp: Int32) -> cute.Tensor:
        """This warp's rows; a lane has every 32nd column of each."""
        lane = cute.arch.lane_idx()
        rows, pieces = self.rows // self.consumers, self.columns // 32
        rY = cute.make_rmem_tensor((rows, pieces), Float32)
        for row in cutlass.range_constexpr(rows):
            total = Float32(0.0)
            for piece in cutlass.range_constexpr(pieces):
                rY[row, piece] = sX[warp * rows + row, piece * 32 + lane]
                total += rY[row, piece]
            total = cute.arch.warp_reduction_sum(total)
            for piece in cutlass.range_constexpr(pieces):
                rY[row, piece] = rY[row, piece] * scale + total
        return rY

    @cute.jit
    def write_rows(self, rY: cute.Tensor, sY: cute.Tensor, warp: Int32):
        lane = cute.arch.lane_idx()
        rows, pieces = rY.shape
        for row in cutlass.range_constexpr(rows):
            for piece in cutlass.range_constexpr(pieces):
                sY[warp * rows + row, piece * 32 + lane] = rY[row, piece]

    @cute.jit
    def partition(self, atom: cute.CopyAtom, shared: cute.Tensor, tiles: cute.Tensor):
        """(copy, stage) and (copy, tile): what a copy of the TMA unit takes."""
        one_cta = cute.make_layout(1)
        return cpasync.tma_partition(atom, 0, one_cta, cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2))


def view(tensor: torch.Tensor) -> cute.Tensor:
    return from_dlpack(tensor, assumed_align=16).mark_layout_dynamic(leading_dim=1)


@cache
def compiled() -> Callable[..., None]:
    """For any sizes. Inside an emulator's session; a function of one session works in the next."""
    example = view(torch.zeros(8, 8))
    return cute.compile(TmaPipeline(), example, example, Float32(1.0), Int32(1))


def run(rows: int = 16 * 13 + 5, columns: int = 60, ctas: int = 2) -> dict[str, torch.Tensor]:
    """Launches it inside an emulator's session; returns the tensors."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    y = torch.full_like(x, torch.nan)
    compiled()(view(x), view(y), Float32(1.5), Int32(ctas))
    return {"x": x, "output": y}


def check(tensors: dict[str, torch.Tensor]) -> None:
    x = tensors["x"].double()
    torch.testing.assert_close(tensors["output"].double(), 1.5 * x + x.sum(1, keepdim=True), rtol=1e-5, atol=1e-5)
