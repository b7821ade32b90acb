"""The three kernels of the chunked algorithm, launched by one host function. README.md has the algorithm."""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8

from .. import views
from ..arithmetic import numeric
from ..dims import ITEMSIZE, VECTOR_BYTES
from .chunk_scan import ChunkScanKernel
from .chunk_state import ChunkStateKernel
from .config import Chunked
from .state_passing import StatePassingKernel
from .steps import Steps

MaybeTensor = Any  # a cute.Tensor, or None where the configuration has none


class Workspace(NamedTuple):
    """In this order in memory, but for the decays, which are the last."""

    local: Any  # (tiles, H, P, N): the states that the tiles' own tokens leave
    incoming: Any  # (tiles, H, P, N): the states that enter the tiles; may be `local`
    decay: Any  # (tiles, H): log2 of the tiles' decays
    table: Any  # (tiles, 4): row, first token and number of tokens of packed tiles


class ChunkedKernels:
    """Compiled for one `Chunked`. Tensors (batch, seqlen, ...); sequences packed by offsets lie in batch row 0."""

    def __init__(self, config: Chunked) -> None:
        self.config = config
        self.state = ChunkStateKernel(config)
        self.passing = StatePassingKernel(config)
        self.scan = ChunkScanKernel(config)

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
        chunk_states: MaybeTensor,  # (chunks, H, P, N), zeros: the states after every `chunk_tiles` tiles
        workspace: cute.Tensor,  # bytes: see `Workspace`
        tiles: Int32,
        dt_min: Float32,
        dt_max: Float32,
        pad_slot: Int64,
        ctas: Int32,  # that run at a time
        stream: Any,
    ) -> None:
        steps = Steps(dt, A, dt_bias, dt_min, dt_max)
        local, incoming, decay, table = self.split(workspace, tiles, x.shape[2])
        self.state(x, B, steps, offsets, local, decay, table, ctas, stream)
        self.passing(
            local, decay, x.shape[0], x.shape[1], offsets, initial, slots, flags, pad_slot, incoming, final,
            chunk_states, ctas, stream,
        )  # fmt: skip
        self.scan(x, B, C, D, z, steps, incoming, table, y, ctas, stream)

    def split(self, workspace: cute.Tensor, tiles: Int32, H: Int32) -> Workspace:
        config, start = self.config, Int64(0)
        P, N = config.headdim, config.dstate
        states = cute.make_layout((tiles, H, P, N), stride=(Int64(H) * (P * N), P * N, N, 1))

        def part(dtype: Any, layout: Any, size: Any) -> cute.Tensor:
            nonlocal start
            bits = cute.recast_ptr((workspace.iterator + start).align(VECTOR_BYTES), dtype=dtype)
            start = start + size
            return cute.make_tensor(bits, layout)

        all_states = Int64(tiles) * Int64(H) * (P * N)
        incoming = local = part(numeric(config.local), states, all_states * ITEMSIZE[config.local])
        if not config.in_place:
            incoming = part(numeric(config.dtype), states, all_states * ITEMSIZE[config.dtype])
        table = None
        if config.offsets is not None:
            table = part(Int32, cute.make_layout((tiles, 4), stride=(4, 1)), Int64(tiles) * 16)
        decay = part(Float32, cute.make_layout((tiles, H), stride=(H, 1)), Int64(tiles) * Int64(H) * 4)
        return Workspace(local, incoming, decay, table)


def fake_operands(config: Chunked) -> dict[str, Any]:
    """With rows at multiples of 16 bytes."""

    def rows(_: str, dtype: str, shape: tuple[Any, ...]) -> Any:
        return views.fake_rows(dtype, shape, VECTOR_BYTES, VECTOR_BYTES // ITEMSIZE[dtype])

    return views.fake_operands(config, rows, ("chunk_states",))


def fake_arguments(config: Chunked) -> list[Any]:
    """Of `ChunkedKernels.__call__`."""
    return [
        *fake_operands(config).values(),
        cute.runtime.make_fake_compact_tensor(Uint8, (cute.sym_int64(),), assumed_align=64),
        Int32(0),
        Float32(0.0),
        Float32(0.0),
        Int64(0),
        Int32(0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    ]
