"""Sizes, layouts and the configuration of the kernels: shared by plan, launch and kernels; imports no cutlass."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import gcd
from typing import Any, NamedTuple

WARP = 32
MAX_SIZE = 256  # of headdim and dstate
VECTOR_BYTES = 16
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
# Operands of `Recurrence`: states, and all whose rows are read and written in vectors.
STATES = ("initial", "final", "last", "chunk_states")
ROWS = ("x", "B", "C", "z", "y", *STATES)
STATE_REGISTERS = 128  # fp32 state elements that one thread may hold and still leave room for two warps a scheduler
FEW_REGISTERS = 64  # one token: as many bytes in flight, in smaller pieces; single elements: addresses take the rest
MAX_WARPS = 5  # a headdim of 80 is five warps of 16 rows
TILE_TOKENS = 16
TILE_BYTES = 40 << 10  # of shared memory for each CTA: five CTAs on a multiprocessor of 228 KB, two on one of 100 KB


def has_f32x2(arch: str) -> bool:
    """Whether fp32 arithmetic on pairs is one instruction. sm_120 has it in PTX, but executes two and moves besides."""
    return 100 <= int(arch.removeprefix("sm_").rstrip("af")) < 120


def rows_are_aligned(
    itemsize: int, shape: Sequence[int], strides: Sequence[int], start: int, nbytes: int = VECTOR_BYTES
) -> bool:
    """Whether every row of a tensor at address `start` begins at a multiple of `nbytes`."""
    pitches = (stride * itemsize for size, stride in zip(shape[:-1], strides, strict=False) if size > 1)
    return start % nbytes == 0 and not any(pitch % nbytes for pitch in pitches)


class Layout(NamedTuple):
    """Who holds what. See README.md, "Threads".

    `lanes` lanes of a warp share `rows` rows of headdim: each holds `chunks` chunks of `vector` neighbouring elements
    of dstate in each of the rows. A warp has 32 / lanes such groups, a CTA `warps` warps, all of one head.
    """

    lanes: int
    rows: int
    vector: int
    chunks: int
    warps: int

    @property
    def warp_rows(self) -> int:
        return WARP // self.lanes * self.rows

    @property
    def block_rows(self) -> int:
        return self.warps * self.warp_rows

    @property
    def columns(self) -> int:
        """dstate, padded to what the lanes hold."""
        return self.lanes * self.chunks * self.vector

    @property
    def thread_elements(self) -> int:
        return self.rows * self.chunks * self.vector

    @property
    def owned(self) -> int:
        """Rows whose sums a lane ends up with."""
        return max(self.rows // self.lanes, 1)

    @property
    def copies(self) -> int:
        """Lanes that end up with the sums of the same row. Each writes them to a place of its own: no branch."""
        return max(self.lanes // self.rows, 1)


@dataclass(frozen=True)
class Recurrence:
    """Configuration of the recurrence kernel, and so the key of its compiled form. dtypes are torch's names.

    dt holds log decays where `A` is None. `offsets`, `slots` are the dtypes of query_start_loc and of the slot
    indices; without offsets every row of the batch is a sequence, without slots sequence s has state s. `single`
    is the decode step: one token per sequence, and zeros for a sequence whose slot is padding. `aligned` promises
    that all rows of x, B, C, z, y and states start at multiples of `access_bytes`; without it every access has one
    element. Packed sequences may leave more: `last` is the dtype of the state behind the last token of all, and
    `chunk_states` that of states after every chunk, whose ends have dtype `chunk_offsets`, or are spaced evenly.
    """

    headdim: int
    dstate: int
    dtype: str
    dt: str
    A: str | None
    dt_bias: str | None
    softplus: bool
    D: str | None
    z: bool
    initial: str | None
    final: str | None
    offsets: str | None
    slots: str | None
    flags: bool
    single: bool
    aligned: bool
    f32x2: bool
    last: str | None = None
    chunk_states: str | None = None
    chunk_offsets: str | None = None

    def build(self) -> tuple[Any, list[Any]]:
        """The kernel and tensors without data to compile it on. Imports the compiler."""
        from .recurrence import RecurrenceKernel
        from .views import fake_arguments

        return RecurrenceKernel(self), fake_arguments(self)

    @property
    def row_vector(self) -> int:
        """Elements of one access to x, z and y."""
        return self._vector(self.headdim, self.dtype)

    @property
    def column_vector(self) -> int:
        """Elements of one access to B and C."""
        return self._vector(self.dstate, self.dtype)

    @property
    def state_vector(self) -> int:
        """Elements of one access to a state, the same for all that are read and written."""
        states = (getattr(self, name) for name in STATES)
        return self._vector(self.dstate, *([dtype for dtype in states if dtype] or [self.dtype]))

    def _vector(self, size: int, *dtypes: str) -> int:
        """Of rows of `size` elements: 128 bits of the widest dtype, or as many less as make a row of whole accesses."""
        return gcd(size, VECTOR_BYTES // max(ITEMSIZE[dtype] for dtype in dtypes)) if self.aligned else 1

    def access_bytes(self, operand: str) -> int:
        """Of one access to an operand that has rows, of ROWS."""
        if operand in STATES:
            return self.state_vector * ITEMSIZE[getattr(self, operand)]
        return (self.column_vector if operand in ("B", "C") else self.row_vector) * ITEMSIZE[self.dtype]

    @property
    def has_vectors(self) -> bool:
        """Whether states move in vectors. Where they cannot, x does not either: there are no registers for both the
        addresses of single elements and those of vectors."""
        return self.state_vector > 1

    @property
    def layout(self) -> Layout:
        return layout(self.headdim, self.dstate, self.state_vector, self.single)

    @property
    def blocks(self) -> int:
        """CTAs for each head of a sequence."""
        return -(-self.headdim // self.layout.block_rows)

    @property
    def whole_blocks(self) -> bool:
        """Whether every row of every CTA is a row of headdim."""
        return self.headdim % self.layout.block_rows == 0

    @property
    def stages(self) -> int:
        return 1 if self.single else 2

    @property
    def tile(self) -> int:
        """Tokens of a tile."""
        if self.single:
            return 1
        tokens = TILE_TOKENS
        while tokens > 4 and self._bytes(tokens) > TILE_BYTES:
            tokens //= 2
        return tokens

    @property
    def shared_bytes(self) -> int:
        return self._bytes(self.tile)

    def _bytes(self, tokens: int) -> int:
        rows, item = self.layout.block_rows, ITEMSIZE[self.dtype]
        staged = tokens * (2 * self.layout.columns + (1 + self.z) * rows) * item
        alignment = 8 * VECTOR_BYTES  # of as many tensors
        return self.stages * (staged + tokens * 8) + tokens * rows * 4 * (1 + self.layout.copies) + rows * 4 + alignment


@lru_cache(maxsize=1024)
def layout(headdim: int, dstate: int, vector: int, single: bool) -> Layout:
    """The layout with the fewest modelled instructions for a head, among equals the one with the fewest registers."""

    def cost(found: Layout) -> tuple[float, int]:
        warps = -(-headdim // found.warp_rows)
        return warps * token_instructions(found), found.thread_elements

    limit = FEW_REGISTERS if single or vector == 1 else STATE_REGISTERS
    candidates = []
    for lanes, rows in product((1, 2, 4, 8, 16, 32), (4, 8, 16, 32)):
        chunks = -(-dstate // (lanes * vector))
        found = Layout(lanes, rows, vector, chunks, 1)
        if found.thread_elements <= limit and found.warp_rows % 8 == 0:  # whole vectors of x for each warp
            candidates.append(found)
    best = min(candidates, key=cost)
    warps = -(-headdim // best.warp_rows)
    return best._replace(warps=-(-warps // -(-warps // MAX_WARPS)))


def token_instructions(found: Layout) -> float:
    """Modelled instructions of a warp for one token, with packed arithmetic and 16-bit inputs."""
    arithmetic = 1.5 * found.thread_elements
    inputs = 2 * found.chunks * (1 + found.vector) + found.rows / 4 * 2
    sums, rows, lanes = 0.0, found.rows, found.lanes
    while lanes > 1:
        half = rows // 2
        if rows > 1:
            sums += half + max(half / 2, 1) + (0 if half >= 4 else 2 * half)
        else:
            sums += 2
        rows, lanes = max(half, 1), lanes // 2
    return arithmetic + inputs + sums + 6 * found.owned + 6
