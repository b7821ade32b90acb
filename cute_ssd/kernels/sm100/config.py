"""Configuration of the chunked tensor-core kernels: shared by plan, launch and kernels; imports no cutlass."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from ..dims import ITEMSIZE, WARP

Q = 128  # tokens of a tile: the rows of a full-rate MMA, whatever chunk_size says
HEADDIMS = (32, 64, 80, 96, 128)
DSTATES = (64, 128, 256)
ARCHS = ("sm_100a", "sm_103a")
SHARED_BYTES = 227 << 10  # of a CTA
MMA_K = 16  # tokens or elements of dstate that an MMA multiplies along
TENSOR_LANES = 128  # of tensor memory
TENSOR_COLUMNS = 512  # of each lane, 4 bytes each


@dataclass(frozen=True)
class Chunked:
    """Configuration of chunk_state, state_passing and chunk_scan, and so the key of their compiled form.

    dtypes are torch's names. dt holds log decays where `A` is None. `offsets`, `slots` are the dtypes of
    query_start_loc and of the slot indices; without offsets every row of the batch is a sequence, without slots
    sequence s has state s. `channel_D`: D varies inside a head. `local` is the dtype of the tiles' own states, and of
    what passes between tiles. `state_heads`, `scan_heads` are the heads of one group that a work item of chunk_state
    and of chunk_scan has. `chunk_states`: the dtype of states that are returned after every `chunk_tiles` tiles of a
    sequence and after its last one.
    `positive_steps` promises that dt is 0 or more when it has been through softplus and limits.
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
    chunk_states: str | None = None
    chunk_tiles: int = 0
    positive_steps: bool = False

    def build(self) -> tuple[Any, list[Any]]:
        """The kernels and tensors without data to compile them on. Imports the compiler."""
        from .chunked import ChunkedKernels, fake_arguments

        return ChunkedKernels(self), fake_arguments(self)

    @property
    def in_place(self) -> bool:
        """Whether the states that enter the tiles may overwrite the tiles' own states: both are 16 bits wide."""
        return self.local == self.dtype

    @property
    def state_sizes(self) -> "StateSizes":
        return state_sizes(self)

    @property
    def state_bytes(self) -> int:
        """Of one head's state in `local`."""
        return self.headdim * self.dstate * ITEMSIZE[self.local]


def batched_tiles(batch: int, seqlen: int) -> int:
    """Slots of tiles (tiles.py) of a batch whose rows are sequences."""
    return batch * -(-seqlen // Q)


def packed_tiles(total_len: int, num_seqs: int) -> int:
    """Slots that are enough for any `num_seqs` sequences packed in `total_len` tokens."""
    return total_len // Q + num_seqs


class StateSizes(NamedTuple):
    """Of chunk_state: what its rings hold and how many stages they have. A slab is the heads of one MMA: their rows of
    headdim are the lanes of the accumulator."""

    slab: int  # heads
    lanes: int  # of tensor memory that a slab has
    slabs: int  # of a work item
    block: int  # features that lie side by side in shared memory
    x_stages: int  # of STATE_TOKENS tokens of a slab
    b_stages: int  # of STATE_TOKENS tokens of a group: two tiles
    weight_stages: int  # of a slab's fp32 weights; even, as two warps take turns
    a_stages: int  # of scaled x, in tensor memory; even, as two warpgroups take turns
    columns: int  # of an accumulator
    halves: int  # accumulators that dstate takes
    accumulators: int

    @property
    def accumulator_columns(self) -> int:
        """Tensor memory: accumulators, then scaled x, two tokens to a column."""
        return self.accumulators * self.columns

    @property
    def tensor_columns(self) -> int:
        return self.accumulator_columns + self.a_stages * STATE_TOKENS // 2

    @property
    def x_bytes(self) -> int:
        """Of a stage."""
        return self.lanes * STATE_TOKENS * 2

    @property
    def b_bytes(self) -> int:
        return self.columns * self.halves * STATE_TOKENS * 2

    @property
    def barriers(self) -> int:
        return 2 * (self.x_stages + self.b_stages + self.weight_stages + self.a_stages + self.accumulators)

    @property
    def shared_bytes(self) -> int:
        weights = self.weight_stages * self.slab * Q * 4
        return self.x_stages * self.x_bytes + self.b_stages * self.b_bytes + weights + self.barriers * 8 + 8

    def mma_instructions(self, valid: int = Q) -> int:
        """Of a work item, a tile of `valid` tokens."""
        return self.slabs * self.halves * -(-valid // MMA_K)

    def tma_instructions(self, valid: int = Q) -> int:
        return -(-valid // STATE_TOKENS) * (self.slabs + 1)

    def tma_bytes(self, valid: int = Q) -> int:
        """That the copies write to shared memory."""
        return -(-valid // STATE_TOKENS) * (self.slabs * self.x_bytes + self.b_bytes)


STATE_TOKENS = 64  # of a stage of chunk_state: two for a tile


def slab_heads(headdim: int, heads: int) -> int:
    """Of `heads` heads those that share the 128 lanes or columns of an MMA: as many as fit and divide them."""
    return max(n for n in range(1, TENSOR_LANES // headdim + 1) if heads % n == 0)


def block_features(size: int) -> int:
    """Features of a row that TMA and tensor core keep side by side: what divides it of 128, 64 and 32 bytes."""
    return next(features for features in (64, 32, 16) if size % features == 0)


@lru_cache(maxsize=256)
def state_sizes(config: Chunked) -> StateSizes:
    slab = slab_heads(config.headdim, config.state_heads)
    columns = min(config.dstate, 128)
    a_stages = 8
    return StateSizes(
        slab=slab,
        lanes=slab * config.headdim,
        slabs=config.state_heads // slab,
        block=block_features(config.headdim),
        x_stages=8 if config.dstate <= 128 else 4,
        b_stages=4,
        weight_stages=4,
        a_stages=a_stages,
        columns=columns,
        halves=config.dstate // columns,
        accumulators=min(4, (TENSOR_COLUMNS - a_stages * STATE_TOKENS // 2) // columns),
    )


def state_special_functions(config: Chunked) -> int:
    """Warp instructions of the MUFU for a head of a tile: decays, and the exponentials of softplus."""
    return Q // WARP * (1 + config.softplus)
