"""What chunk_scan takes of a multiprocessor: shared and tensor memory, barriers, and what it executes; no cutlass.

Shared memory, in this order: slots of C, slots of B and of states (one ring), tiles of x, vectors, mbarriers. A slot
has Q rows of 64 elements. Tensor memory: scores, two M, slabs of y. A slab holds the y of as many heads as one MMA
computes.
"""

from dataclasses import dataclass
from functools import lru_cache

from .config import MMA_K, SHARED_BYTES, TENSOR_COLUMNS, Chunked, Q, block_features, slab_heads

BLOCK = 64  # elements of dstate in a slot: 128 bytes, the width of the widest swizzle
SLOT_BYTES = Q * BLOCK * 2
SUB = 32  # tokens whose decays share a reference: the rows of one warp
VECTORS = 3 * Q  # fp32 of a head: see CUMSUM, FACTOR, SHIFTED
CUMSUM = 0  # running sums of the log2 decays
FACTOR = Q  # step·2^(cumsum at the end of its sub-tile - cumsum), of the first three sub-tiles
SHIFTED = 2 * Q  # cumsum - log2(step), or the step where it may be negative
STATIC_BYTES = 16  # address of the tensor memory
MAX_SLABS = 4
X_STAGES, VECTOR_STAGES = (2, 4), 4  # even: two warps take turns, and a stage belongs to one of them

# Warps; each row of four is a warpgroup, with as many registers for a thread.
MMA_WARP, VECTOR_WARP, PRODUCT_WARP, LOAD_WARP = range(4)
SEGSUM_WARPS, SEGSUM_DIAGONAL_WARPS, EPILOGUE_WARPS = range(4, 8), range(8, 12), range(12, 16)
THREADS = 512
THIN_REGISTERS, SEGSUM_REGISTERS, EPILOGUE_REGISTERS = 56, 152, 152
SECOND_VECTOR_WARP = 4  # of a segsum warpgroup
SEGSUM_USERS = 7  # warps that compute decays: the first rows have nothing left of the diagonal


@dataclass(frozen=True)
class ScanLayout:
    headdim: int
    dstate: int
    heads: int  # of a work item

    @property
    def slab_heads(self) -> int:
        """Heads that one MMA multiplies C by the states of."""
        return slab_heads(self.headdim, self.heads)

    @property
    def slab_columns(self) -> int:
        return self.slab_heads * self.headdim

    @property
    def item_slabs(self) -> int:
        return self.heads // self.slab_heads

    @property
    def blocks(self) -> int:
        """Slots of a row of dstate."""
        return self.dstate // BLOCK

    # ---- tensor memory: columns ----

    scores_column, m_column, slab_column = 0, Q, 2 * Q

    @property
    def slabs(self) -> int:
        return min(MAX_SLABS, (TENSOR_COLUMNS - self.slab_column) // self.slab_columns)

    @property
    def tensor_columns(self) -> int:
        """Allocated ones."""
        return TENSOR_COLUMNS

    # ---- shared memory ----

    @property
    def x_bytes(self) -> int:
        return Q * self.headdim * 2

    @property
    def c_stages(self) -> int:
        """All of this tile and, if there is room, of the next one; else its first slot."""
        if self.dstate <= 128:
            return 2 * self.blocks
        return self.blocks + (self.headdim < 128)

    @property
    def _x_and_ring_stages(self) -> tuple[int, int]:
        """So many that both hold about as many heads ahead: the best of the lesser of the two."""
        per_head = (self.blocks + self.item_slabs * self.blocks) / self.heads
        best, chosen = -1.0, (0, 0)
        for x in X_STAGES:
            left = SHARED_BYTES - self._bytes(x, 0)
            ring = left // (SLOT_BYTES + 16)
            score = min(x, ring / per_head)
            if x >= self.slab_heads and ring >= 2 and score > best:
                best, chosen = score, (x, min(ring, 8))
        return chosen

    @property
    def x_stages(self) -> int:
        return self._x_and_ring_stages[0]

    @property
    def ring_stages(self) -> int:
        return self._x_and_ring_stages[1]

    @property
    def stages(self) -> dict[str, int]:
        return {"C": self.c_stages, "B, states": self.ring_stages, "x": self.x_stages, "decays": VECTOR_STAGES}

    def _bytes(self, x_stages: int, ring_stages: int) -> int:
        barriers = (
            2 * (self.c_stages + ring_stages + x_stages + VECTOR_STAGES) + 6 + 2 * self.slabs * (1 + self.slab_heads)
        )
        tiles = (self.c_stages + ring_stages) * SLOT_BYTES + x_stages * self.x_bytes
        return tiles + VECTOR_STAGES * VECTORS * 4 + barriers * 8 + STATIC_BYTES

    @property
    def shared_bytes(self) -> int:
        return self._bytes(self.x_stages, self.ring_stages)

    # ---- counts of a work item whose tile has `valid` tokens ----

    def mma_instructions(self, valid: int = Q) -> int:
        along_n, along_tokens = self.dstate // MMA_K, -(-valid // MMA_K)
        return along_n * (1 + self.item_slabs) + self.heads * along_tokens

    @property
    def tma_instructions(self) -> int:
        """Boxes of up to 64 elements by Q rows: slots, and blocks of features of x."""
        return self.blocks * (2 + self.item_slabs) + self.heads * (self.headdim // block_features(self.headdim))

    @property
    def tma_bytes(self) -> int:
        """That the copies write to shared memory."""
        states = self.heads * self.headdim * self.dstate * 2
        return 2 * self.blocks * SLOT_BYTES + states + self.heads * self.x_bytes

    def mma_bytes(self, valid: int = Q) -> int:
        """Of operands that tensor cores read from shared memory."""
        row = self.dstate * 2
        tokens = -(-valid // MMA_K) * MMA_K
        return 2 * Q * row + self.item_slabs * (Q + self.slab_columns) * row + self.heads * tokens * self.headdim * 2


def special_functions(config: Chunked) -> int:
    """Warp instructions of the MUFU for a head of a tile: decays on the diagonal, of rows left of it, of columns, of
    the state; logarithms of steps, softplus, silu."""
    decays = 4 * SUB + 6 + 3 + 4
    steps = 4 * (config.A is not None) * (config.positive_steps + config.softplus)
    return decays + steps + 4 * 2 * config.headdim * config.z


@lru_cache(maxsize=256)
def _scan_layout(headdim: int, dstate: int, heads: int) -> ScanLayout:
    return ScanLayout(headdim, dstate, heads)


def scan_layout(config: Chunked) -> ScanLayout:
    return _scan_layout(config.headdim, config.dstate, config.scan_heads)
