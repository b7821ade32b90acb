"""What the tests of bulk and of tensor copies share: tensor maps made by hand, numpy's answers, small kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cute_ssd.emulator.engine import Outcome

from .ptx_runner import TensorMap, run

SCHEDULES = [("eager", 0), ("late", 1), ("priority", 2), ("priority", 3)]
ELEMENTS = {
    "u8": (np.uint8, 0), "u16": (np.uint16, 1), "u32": (np.uint32, 2), "s32": (np.int32, 3), "u64": (np.uint64, 4),
    "s64": (np.int64, 5), "f16": (np.float16, 6), "f32": (np.float32, 7), "f64": (np.float64, 9),
    "bf16": (np.uint16, 10), "b4x16": (np.uint8, 13),
}  # fmt: skip
"""Element types of tensor maps: how numpy holds them, and their numbers."""

ATOMS_OF_32 = 4
"""Swizzles are 0 none, 1 32 bytes, 2 64, 3 128, and this: 128 bytes with 32-byte atoms."""


def aligned(array: np.ndarray, align: int = 128) -> np.ndarray:
    """A copy at an address that is a multiple of `align`."""
    buffer = np.zeros(array.nbytes + align, np.uint8)
    start = -buffer.ctypes.data % align
    copy = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def encode(
    address: int,
    element: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int = 0,
    flags: int = 0x40002,
) -> TensorMap:
    """Dimension 0 first; `strides` in bytes, from dimension 1 on."""
    rank = len(sizes)
    words = [0] * 16
    words[0] = address
    words[1] = flags | (rank - 1) << 4 | element << 7 | (0x86000 if swizzle == ATOMS_OF_32 else swizzle << 13)
    for k, stride in enumerate(strides):
        half = 3 + k  # in units of 32 bits
        words[half // 2] |= (stride // 16 & 0xFFFFFFFF) << 32 * (half % 2)
        words[3] |= (stride // 16 >> 32) << (32 + 4 * k)
    for k, size in enumerate(sizes):
        words[4 + k // 2] |= (size - 1) << 32 * (k % 2)
    words[6] |= (box[0] - 1) << 56
    for k, size in enumerate(box[1:]):
        words[7] |= (size - 1) << 8 * k
    tile = TensorMap(np.array(words, np.uint64).tobytes())
    tile.address, tile.element, tile.sizes, tile.strides, tile.box = address, element, sizes, strides, box
    tile.swizzle = swizzle
    return tile


@dataclass
class Tensor:
    """A tensor in the middle of a larger buffer (numpy order: dimension 0 of the map is the last axis), and a box."""

    element: str
    shape: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.dtype = np.dtype(ELEMENTS[self.element][0])
        pitch = -(-self.shape[-1] * self.dtype.itemsize // 16) * 16 + 16 * (len(self.shape) > 1)
        rows = int(np.prod(self.shape[:-1]))
        raw = rng.integers(0, 256, rows * pitch + 256, np.uint8)
        start = -raw.ctypes.data % 16 + 64
        self.raw = raw
        outer = [pitch * int(np.prod(self.shape[k + 1 : -1])) for k in range(len(self.shape) - 1)]
        self.strides = (*outer, self.dtype.itemsize)
        self.array = np.lib.stride_tricks.as_strided(
            raw[start:].view(np.uint8)[: rows * pitch].view(self.dtype), self.shape, self.strides
        )
        self.bytes = int(np.prod(self.box)) * self.dtype.itemsize

    @property
    def map(self) -> TensorMap:
        pack = 2 if self.element == "b4x16" else 1  # numpy holds two elements in a byte
        sizes, box = ((n[-1] * pack, *n[-2::-1]) for n in (self.shape, self.box))
        return encode(self.array.ctypes.data, ELEMENTS[self.element][1], sizes, self.strides[-2::-1], box, self.swizzle)

    def slices(self, at: tuple[int, ...]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """(in the tensor, in the box) of the part that lies in the tensor; `at` in the order of the map."""
        pairs = [
            (max(c, 0), max(min(c + b, n), max(c, 0))) for c, b, n in zip(at[::-1], self.box, self.shape, strict=True)
        ]
        inside = tuple(slice(min(low, n), min(high, n)) for (low, high), n in zip(pairs, self.shape, strict=True))
        return inside, tuple(slice(s.start - c, s.stop - c) for s, c in zip(inside, at[::-1], strict=True))

    def expected(self, at: tuple[int, ...]) -> np.ndarray:
        """The bytes of the box in shared memory."""
        box = np.zeros(self.box, self.dtype)
        inside, part = self.slices(at)
        box[part] = self.array[inside]
        return swizzled(box.reshape(-1).view(np.uint8), self.swizzle)

    def coordinates(self, n: int) -> list[tuple[int, ...]]:
        """Boxes inside, across every border, and outside."""
        rng = np.random.default_rng(self.seed + 1)
        per_dimension = [
            (-b, 1 - b, -1, 0, 1, size - b, size - 1, size)
            for b, size in zip(self.box[::-1], self.shape[::-1], strict=True)
        ]
        return [tuple(int(rng.choice(values)) for values in per_dimension) for _ in range(n)]


def swizzled(data: np.ndarray, mode: int) -> np.ndarray:
    """16-byte pieces where the swizzle puts them, for a box that begins at a multiple of 1024 (its own inverse)."""
    piece = np.arange(data.size // 16)
    flip = (piece >> 3 & 3) << 1 if mode == ATOMS_OF_32 else piece >> 3 & ((1 << mode) - 1)
    out = np.empty((-(-data.size // 16), 16), np.uint8)
    out[piece ^ flip] = data.reshape(-1, 16)
    return out.reshape(-1)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def reference(op: str, element: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """PTX ISA, red: the operations."""
    if element == "bf16":
        return to_bf16(reference(op, "f32", from_bf16(old), from_bf16(new)))
    if element == "f16":
        return reference(op, "f32", old.astype(np.float32), new.astype(np.float32)).astype(np.float16)
    functions = {
        "add": lambda a, b: a + b, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
        "xor": np.bitwise_xor, "inc": lambda a, b: np.where(a >= b, 0, a + 1).astype(a.dtype),
        "dec": lambda a, b: np.where((a == 0) | (a > b), b, a - 1).astype(a.dtype),
    }  # fmt: skip
    with np.errstate(all="ignore"):
        return functions[op](old, new)


def numbers(element: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Numbers of all magnitudes, small ones often."""
    rng, dtype = np.random.default_rng(seed), np.dtype(ELEMENTS[element][0])
    if element[0] in "us":
        wide = rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype, endpoint=True)
        return np.where(rng.random(shape) < 0.5, wide, rng.integers(0, 4, shape).astype(dtype))
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 12, shape)
    return to_bf16(values.astype(np.float32)) if element == "bf16" else values.astype(dtype)


def run_bulk(
    body: str,
    *arrays: np.ndarray,
    shared: int = 2048,
    block: int = 32,
    ctas: int = 1,
    check: bool = True,
    **options: object,
) -> Outcome:
    """A kernel with the pointers %d0, %d1, .., an mbarrier of one arrival at %r8 and `shared` bytes at %r7."""
    params = ", ".join(f".param .u64 p{k}" for k in range(len(arrays)))
    loads = "".join(f" ld.param.u64 %d{k}, [p{k}];" for k in range(len(arrays)))
    text = f""".visible .entry k({params}) {{ .reg .pred %p, %q, %first; .reg .b16 %mask; .reg .b32 %t, %rank, %r<10>;
    .reg .b64 %d<8>, %policy;
    .shared .align 128 .b8 buffer[{shared}]; .shared .align 8 .b64 bar;
    mov.u32 %t, %tid.x; mov.u32 %rank, %cluster_ctarank; setp.eq.u32 %first, %t, 0; mov.u32 %r8, bar;
    mov.u32 %r7, buffer; createpolicy.fractional.L2::evict_first.b64 %policy; {loads}
    @%first mbarrier.init.shared.b64 [%r8], 1; @%first fence.mbarrier_init.release.cluster; barrier.cluster.arrive;
    barrier.cluster.wait; {body} ret; }}"""
    options = {"sanitize": True, **options}
    return run(text, *arrays, block=(block, 1, 1), grid=(ctas, 1, 1), cluster=(ctas, 1, 1), check=check, **options)


WAIT = "W: mbarrier.try_wait.parity.shared.b64 %q, [%r8], 0; @!%q bra W;"
SHARED_TO_GLOBAL = "cp.async.bulk.global.shared::cta.bulk_group"
DRAIN = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
