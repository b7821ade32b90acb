"""Configuration of the chunked tensor-core kernels: shared by plan, launch and kernels; imports no cutlass."""

from dataclasses import dataclass
from typing import Any

from ..dims import ITEMSIZE

Q = 128  # tokens of a tile: the rows of a full-rate MMA, whatever chunk_size says
HEADDIMS = (32, 64, 80, 96, 128)
DSTATES = (64, 128, 256)
ARCHS = ("sm_100a", "sm_103a")
SHARED_BYTES = 227 << 10  # of a CTA
TENSOR_COLUMNS = 512  # of 128 lanes, 4 bytes each


@dataclass(frozen=True)
class Chunked:
    """Configuration of chunk_state, state_passing and chunk_scan, and so the key of their compiled form.

    dtypes are torch's names. dt holds log decays where `A` is None. `offsets`, `slots` are the dtypes of
    query_start_loc and of the slot indices; without offsets every row of the batch is a sequence, without slots
    sequence s has state s. `channel_D`: D varies inside a head. `local` is the dtype of the tiles' own states, and of
    what passes between tiles. `state_heads`, `scan_heads` are the heads of one group that a work item of chunk_state
    and of chunk_scan has. `chunk_tiles`: states are returned after every so many tiles, 0 for never.
    """

    headdim: int
    dstate: int
    dtype: str
    dt: str
    A: str | None
    dt_bias: str | None
    softplus: bool
    D: str | None
    channel_D: bool
    z: bool
    initial: str | None
    final: str | None
    offsets: str | None
    slots: str | None
    flags: bool
    local: str
    state_heads: int
    scan_heads: int
    chunk_tiles: int = 0

    def build(self) -> tuple[Any, list[Any]]:
        """The kernels and tensors without data to compile them on. Imports the compiler."""
        from .chunked import ChunkedKernels, fake_arguments

        return ChunkedKernels(self), fake_arguments(self)

    @property
    def in_place(self) -> bool:
        """Whether the states that enter the tiles may overwrite the tiles' own states: both are 16 bits wide."""
        return self.local == self.dtype

    @property
    def state_bytes(self) -> int:
        """Of one head's state in `local`."""
        return self.headdim * self.dstate * ITEMSIZE[self.local]
