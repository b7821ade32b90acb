"""Kernels that load images of tensor memory and shared memory, do something, and write the image of tensor memory back.

And models in numpy of what lies where in shared memory.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from tests import ptx_runner

LANE = np.arange(32)
PARAMETERS = ("shared_in", "tmem_in", "tmem_out", "extra")
WORDS = 8  # 32-bit parameters of a kernel: %v0..%v7
SHARED = 64 * 1024


def kernel(body: str, group: int = 1, registers: int = 0) -> str:
    """`body` is run by all 4 warps of every CTA between loading and storing the images.

    %s: base of the shared image, %mb: an mbarrier with one arrival, %tm: tensor memory (all of it), %wt: its address
    with the warp's lane, %t, %warp, %lane, %rank; %v0..: parameters, %desc0..: pairs of them; %one: thread 0 of the
    first CTA.
    """
    params = ", ".join([f".param .u64 {name}" for name in PARAMETERS] + [f".param .u32 v{k}" for k in range(WORDS)])
    four = "{%r0, %r1, %r2, %r3}"
    block = "{" + ", ".join(f"%r{k}" for k in range(32)) + "}"
    quads = ["{" + ", ".join(f"%r{k + j}" for j in range(4)) + "}" for k in range(0, 32, 4)]
    copy_in = "".join(f"ld.global.v4.b32 {quad}, [%g+{16 * k}];\n" for k, quad in enumerate(quads))
    copy_out = "".join(f"st.global.v4.b32 [%g+{16 * k}], {quad};\n" for k, quad in enumerate(quads))
    values = "".join(f"ld.param.u32 %v{k}, [v{k}];" for k in range(WORDS))
    descriptors = "".join(f"mov.b64 %desc{k}, {{%v{2 * k}, %v{2 * k + 1}}};" for k in range(WORDS // 2))
    cluster_sync = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" if group == 2 else "bar.sync 0;"
    return f"""
.extern .shared .align 1024 .b8 smem[];
.shared .align 8 .b8 head[64];
.visible .entry k({params}) {{
  .reg .b32 %r<{max(40, registers)}>, %x<16>, %v<{WORDS}>; .reg .b32 %s, %mb, %tm, %wt, %t, %warp, %lane, %rank, %i;
  .reg .b64 %g, %w<8>, %desc<{WORDS // 2}>, %out; .reg .pred %p, %q, %one, %yes, %no; .reg .b16 %h<4>;
  mov.u32 %t, %tid.x; shr.u32 %warp, %t, 5; and.b32 %lane, %t, 31; mov.u32 %rank, %cluster_ctarank;
  mov.u32 %s, smem; mov.u32 %mb, head; add.u32 %mb, %mb, 8; or.b32 %x0, %t, %rank; setp.eq.u32 %one, %x0, 0;
  setp.eq.u32 %yes, 0, 0; not.pred %no, %yes;
  {values} {descriptors}
  setp.ne.u32 %p, %warp, 0; @%p bra ALLOCATED;
  mov.u32 %x1, 512; mov.u32 %x2, head; tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%x2], %x1;
  tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;
  ALLOCATED:
  setp.ne.u32 %p, %t, 0; @%p bra COUNTED;
  mbarrier.init.shared::cta.b64 [%mb], 1; fence.mbarrier_init.release.cluster; COUNTED:
  ld.param.u64 %g, [shared_in]; mad.wide.u32 %g, %rank, {SHARED}, %g; mad.wide.u32 %g, %t, 16, %g;
  mad.lo.u32 %x3, %t, 16, %s; mov.u32 %i, 0;
  SHARED: ld.global.v4.b32 {four}, [%g]; st.shared.v4.b32 [%x3], {four};
  add.u64 %g, %g, 2048; add.u32 %x3, %x3, 2048; add.u32 %i, %i, 2048; setp.lt.u32 %p, %i, {SHARED}; @%p bra SHARED;
  fence.proxy.async; bar.sync 0;
  mov.u32 %x2, head; ld.shared.b32 %tm, [%x2]; shl.b32 %x4, %warp, 21; add.u32 %wt, %tm, %x4;
  ld.param.u64 %g, [tmem_in]; mad.wide.u32 %g, %rank, 262144, %g; mad.wide.u32 %g, %t, 2048, %g; mov.u32 %i, 0;
  FILL: {copy_in} add.u32 %x4, %wt, %i; tcgen05.st.sync.aligned.32x32b.x32.b32 [%x4], {block};
  add.u64 %g, %g, 128; add.u32 %i, %i, 32; setp.lt.u32 %p, %i, 512; @%p bra FILL;
  tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync; {cluster_sync} tcgen05.fence::after_thread_sync;
  {body}
  tcgen05.fence::before_thread_sync; {cluster_sync} tcgen05.fence::after_thread_sync;
  ld.param.u64 %g, [tmem_out]; mad.wide.u32 %g, %rank, 262144, %g; mad.wide.u32 %g, %t, 2048, %g; mov.u32 %i, 0;
  DRAIN: add.u32 %x4, %wt, %i; tcgen05.ld.sync.aligned.32x32b.x32.b32 {block}, [%x4]; tcgen05.wait::ld.sync.aligned;
  {copy_out}
  add.u64 %g, %g, 128; add.u32 %i, %i, 32; setp.lt.u32 %p, %i, 512; @%p bra DRAIN;
  {cluster_sync}
  setp.ne.u32 %p, %warp, 0; @%p bra FREED; mov.u32 %x1, 512;
  tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %tm, %x1; FREED:
  ret;
}}"""


WAIT = "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %q, [%mb], 0; @!%q bra WAIT;"


def single(instructions: str, group: int = 1) -> str:
    """One thread issues `instructions` and a commit; everybody waits for it."""
    if group == 1:
        commit = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%mb];"
    else:
        commit = "mov.b16 %h0, 3; tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster"
        commit += ".multicast::cluster.b64 [%mb], %h0;"
    return f"@!%one bra ISSUED; {instructions} {commit} ISSUED: {WAIT}"


@dataclass
class Images:
    """Per CTA: 64 KiB of shared memory, and tensor memory as words [lane, column]."""

    ctas: int = 1
    seed: int = 0
    shared: np.ndarray = field(init=False)
    tmem: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.shared = rng.integers(0, 256, (self.ctas, SHARED), dtype=np.uint8)
        self.tmem = rng.integers(0, 2**32, (self.ctas, 128, 512), dtype=np.uint32)

    def run(self, body: str, *values: int, extra: np.ndarray | None = None, registers: int = 0, check: bool = True,
            **options: object):  # fmt: skip
        """The image of tensor memory afterwards (and the outcome when `check` is off)."""
        out = np.zeros_like(self.tmem)
        values += (0,) * (WORDS - len(values))
        extra = np.zeros(1, np.uint32) if extra is None else extra
        size = (self.ctas, 1, 1)
        outcome = ptx_runner.run(
            kernel(body, self.ctas, registers), self.shared, self.tmem, out, extra, *values,
            grid=size, block=(128, 1, 1), cluster=size, shared=SHARED, check=check, **options,
        )  # fmt: skip
        return out if check else (out, outcome)


# ---- matrices in shared memory ---------------------------------------------------------------------------------------

WIDTH = {"none": 16, "32B": 32, "64B": 64, "128B": 128, "128B32": 128}
CODE = {"none": 0, "128B32": 1, "128B": 2, "64B": 4, "32B": 6}


@dataclass(frozen=True)
class Layout:
    """A matrix (rows of M or N) x K in shared memory: its descriptor and the byte where an element lies."""

    swizzle: str
    mn_major: bool
    leading: int
    stride: int
    start: int = 1024  # offset in the shared image, which is 1024-aligned
    base_offset: int = 0

    def descriptor(self) -> tuple[int, int]:
        start = 2048 + self.start  # the image begins at the first KiB after the static 64 bytes, which are at 1024
        value = start >> 4 | self.leading >> 4 << 16 | self.stride >> 4 << 32 | 1 << 46 | self.base_offset << 49
        value |= CODE[self.swizzle] << 61
        return value & 0xFFFFFFFF, value >> 32

    def bytes_at(self, r: np.ndarray, k: np.ndarray, size: int) -> np.ndarray:
        """Offsets in the shared image of element (r, k) of `size` bytes: the canonical layouts of the PTX ISA."""
        width = WIDTH[self.swizzle]
        if not self.mn_major:
            kb = k * size
            if self.swizzle == "none":
                at = r % 8 * 16 + r // 8 * self.stride + kb // 16 * self.leading + kb % 16
            else:
                at = r % 8 * width + r // 8 * self.stride + kb
        else:
            rb = r * size
            chunk, deep = rb // 16, 4 if self.swizzle == "128B32" else 8
            if self.swizzle == "none":
                at = chunk * self.stride + k % 8 * 16 + k // 8 * self.leading + rb % 16
            else:
                atom = width // 16
                at = chunk % atom * 16 + chunk // atom * self.leading + rb % 16
                at = at + k % deep * width + k // deep * self.stride
        at = at + self.start
        phase = (at >> 7) - self.base_offset
        if self.swizzle == "128B32":
            return at ^ (phase & 3) << 5
        return at ^ (phase & width // 16 - 1) << 4


FORMATS = {  # kind, code in the instruction descriptor, bytes
    "f16": ("f16", 0, 2), "bf16": ("f16", 1, 2), "tf32": ("tf32", 2, 4),
    "e4m3": ("f8f6f4", 0, 1), "e5m2": ("f8f6f4", 1, 1), "e2m3": ("f8f6f4", 3, 1), "e3m2": ("f8f6f4", 4, 1),
    "e2m1": ("f8f6f4", 5, 1), "u8": ("i8", 0, 1), "s8": ("i8", 1, 1),
}  # fmt: skip


def decode_small(code: np.ndarray, exponent: int, mantissa: int) -> np.ndarray:
    bias = 2 ** (exponent - 1) - 1
    e, m = code >> mantissa & 2**exponent - 1, code & 2**mantissa - 1
    value = np.where(e == 0, m * 2.0 ** (1 - bias - mantissa), (1 + m * 2.0**-mantissa) * 2.0 ** (e - float(bias)))
    return np.where(code >> exponent + mantissa & 1, -value, value).astype(np.float32)


SMALL = {"e4m3": (4, 3), "e5m2": (5, 2), "e2m3": (2, 3), "e3m2": (3, 2), "e2m1": (2, 1)}


def draw(rng: np.random.Generator, shape: tuple[int, int], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Finite random numbers that the format holds: (bit patterns, float32 values)."""
    if name in SMALL:
        bits = sum(SMALL[name]) + 1
        code = rng.integers(0, 2**bits, shape)
        if bits == 8:
            code &= 0xBF  # no infinity, no NaN
        return code, decode_small(code, *SMALL[name])
    if name in ("u8", "s8"):
        code = rng.integers(0, 256, shape).astype(np.uint8)
        return code, code.view(np.int8 if name == "s8" else np.uint8).astype(np.float32)
    values = rng.normal(size=shape).astype(np.float32)
    if name == "f16":
        half = values.astype(np.float16)
        return half.view(np.uint16), half.astype(np.float32)
    keep = 0xFFFF0000 if name == "bf16" else 0xFFFFE000
    bits = values.view(np.uint32)
    exact = (bits & np.uint32(keep)).view(np.float32)
    return (bits >> 16 if name == "bf16" else bits), exact


def put(image: np.ndarray, layout: Layout, bits: np.ndarray, name: str) -> None:
    """Writes bit patterns into a shared image; formats below 8 bits are packed 16 to a chunk of 16 bytes."""
    rows, depth = bits.shape
    r, k = np.meshgrid(np.arange(rows), np.arange(depth), indexing="ij")
    size = FORMATS[name][2]
    if name in SMALL and sum(SMALL[name]) + 1 < 8:
        width = sum(SMALL[name]) + 1
        for row in range(rows):
            for chunk in range(2):
                word = sum(int(code) << width * j for j, code in enumerate(bits[row, 16 * chunk : 16 * chunk + 16]))
                at = layout.bytes_at(np.array(row), np.array(16 * chunk), 1)
                image[at : at + 16] = np.frombuffer(word.to_bytes(16, "little"), np.uint8)
        return
    at = layout.bytes_at(r, k, size)
    for byte in range(size):
        image[at + byte] = bits >> 8 * byte & 0xFF


def instruction_descriptor(
    m: int, n: int, a: str, b: str, d: str = "f32", major: tuple[bool, bool] = (False, False), negate=(False, False)
) -> int:
    value = ("f16", "f32", "s32").index(d) << 4 | FORMATS[a][1] << 7 | FORMATS[b][1] << 10
    value |= negate[0] << 13 | negate[1] << 14
    return value | major[0] << 15 | major[1] << 16 | n >> 3 << 17 | m >> 4 << 24


def mma(kind: str, a: str = "%desc0", predicate: str = "%no", lanes: str = "", group: int = 1, scale: str = "") -> str:
    """Operands: D at %x6 (see SETUP), descriptors of A and B in %desc0 and %desc1, instruction descriptor in %v4."""
    operands = f"[%x6], {a}, %desc1, %v4,{lanes} {predicate}{scale}"
    return f"tcgen05.mma.cta_group::{group}.kind::{kind}.collector::a::discard {operands};"


SETUP = "add.u32 %x6, %tm, %v5; add.u32 %x7, %tm, %v6;"


def as_float(words: np.ndarray) -> np.ndarray:
    return words.view(np.float32)


K_LAYOUTS = [Layout("none", False, 128, 256), Layout("none", False, 2048, 128)]
K_LAYOUTS += [Layout("32B", False, 16, 256), Layout("64B", False, 16, 512), Layout("128B", False, 16, 1024)]
K_LAYOUTS += [Layout("128B", False, 16, 1024, start=1024 + 64), Layout("64B", False, 16, 512, start=1024 + 32)]
K_LAYOUTS += [Layout("128B", False, 16, 1024, start=1024 + 256, base_offset=2)]


def mn_layouts(size: int) -> list[Layout]:
    deep = 32 // size  # K of one instruction
    layouts = [Layout("none", True, 128, 128 * max(1, deep // 8)), Layout("none", True, 4096, 128)]
    for swizzle in ("32B", "64B", "128B"):
        atom = 8 * WIDTH[swizzle]
        layouts.append(Layout(swizzle, True, atom * max(1, deep // 8), atom))
    if size == 4:
        layouts.append(Layout("128B32", True, 1024, 512))
    return layouts


B_START = 24 * 1024


def shifted(layout: Layout, by: int) -> Layout:
    return replace(layout, start=layout.start + by)
