"""Small PTX kernels like those behind the published measurements, executed on the emulator and modelled.

Only their timing matters: the operands are whatever lies in memory.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from .. import engine
from ..decode import decode
from ..program import Program
from ..ptx import parse_kernel
from .constants import MEASURED_GHZ, Model
from .sm import Region, SmTime, Trace, recorded, simulate

HEADER = ".version 8.8\n.target sm_100a\n.address_size 64\n"
MEASURED = Model(MEASURED_GHZ)
BF16 = 10  # element type of a tensor map


@dataclass(frozen=True)
class Run:
    """A kernel that has been executed, and the trace of its first cluster."""

    program: Program
    traces: list[Trace]

    def modelled(self, model: Model = MEASURED, **options: object) -> SmTime:
        """Alone on its SM, or as `options` of `simulate` say."""
        return simulate(self.program, self.traces, model, **options)  # type: ignore[arg-type]


def execute(
    text: str, params: bytes, memory: list[np.ndarray], threads: int, shared: int, cluster: int = 1, blocks: int = 1
) -> Run:
    """Runs `.entry k` of a PTX text and keeps the trace of the first cluster."""
    program = decode(parse_kernel(HEADER + text, "k"), engine.handlers())
    ranges = [(array.ctypes.data, array.ctypes.data + array.nbytes) for array in memory]
    options = engine.Options(sanitize=False, threads=1, traced=(0,))
    outcome = engine.run(
        program, (blocks * cluster, 1, 1), (threads, 1, 1), (cluster, 1, 1), shared, params, ranges, options
    )
    if outcome.events:
        raise RuntimeError(f"a microbenchmark failed: {outcome.events[0].message}")
    return Run(program, recorded())


def aligned(nbytes: int) -> np.ndarray:
    """Zeros where a device would have put them."""
    memory = np.zeros(nbytes + 256, np.uint8)
    return memory[-memory.ctypes.data % 256 :][:nbytes]


def _descriptor(major_bytes: int) -> int:
    """A K-major matrix without swizzle: 8 x 16 bytes at a time, atoms along K 128 bytes apart."""
    return (128 >> 4) << 16 | (major_bytes >> 4) << 32 | 1 << 46


FORMATS = {"BF16": ("f16", 1, 1), "E4M3": ("f8f6f4", 1, 0), "S8": ("i8", 2, 1)}
"""By element type: kind of tcgen05.mma; the codes of the accumulators' and the elements' types in its descriptor."""


def _instruction(m: int, n: int, dtype: str = "BF16") -> int:
    """The instruction descriptor of products with accumulators of 32 bits."""
    _, accumulator, element = FORMATS[dtype]
    return accumulator << 4 | element << 7 | element << 10 | (n >> 3) << 17 | (m >> 4) << 24


def products(m: int, n: int, in_tmem: bool, group: int, count: int, dtype: str = "BF16") -> Run:
    """`count` independent tcgen05.mma one after the other, a commit and the wait for it."""
    a = "[%ta]" if in_tmem else "%da"
    one = f"tcgen05.mma.cta_group::{group}.kind::{FORMATS[dtype][0]} [%tm], {a}, %db, %id, %yes;\n"
    sync = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" if group == 2 else "bar.sync 0;"
    rank = "mov.u32 %r, %cluster_ctarank; setp.ne.u32 %p, %r, 0; @%p bra DONE;" if group == 2 else ""
    text = f"""
.extern .shared .align 1024 .b8 smem[];
.shared .align 8 .b8 head[64];
.visible .entry k(.param .u64 unused) {{
  .reg .pred %p, %yes, %done; .reg .b32 %r, %w, %s, %tm, %ta, %mb, %id; .reg .b64 %da, %db, %sh;
  mov.u32 %w, %tid.x; shr.u32 %w, %w, 5; mov.u32 %s, smem; mov.u32 %mb, head; add.u32 %mb, %mb, 8;
  setp.ne.u32 %p, %w, 0; @%p bra READY;
  mov.u32 %r, 512; mov.u32 %tm, head; tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%tm], %r;
  mov.u32 %r, %tid.x; setp.ne.u32 %p, %r, 0; @%p bra READY;
  mbarrier.init.shared::cta.b64 [%mb], 1; fence.mbarrier_init.release.cluster;
  READY: {sync}
  ld.shared.b32 %tm, [head]; add.u32 %ta, %tm, 256; mov.u32 %id, {_instruction(m, n, dtype)}; setp.eq.u32 %yes, 0, 0;
  shr.u32 %s, %s, 4; cvt.u64.u32 %sh, %s; and.b64 %sh, %sh, 16383; or.b64 %da, %sh, {_descriptor(256)};
  add.u64 %db, %da, 512;
  mov.u32 %r, %tid.x; setp.ne.u32 %p, %r, 0; @%p bra DONE;
  {rank}
  {one * count}
  tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster.b64 [%mb];
  WAIT: mbarrier.try_wait.parity.shared::cta.b64 %done, [%mb], 0; @!%done bra WAIT;
  DONE: {sync}
  setp.ne.u32 %p, %w, 0; @%p bra EXIT;
  mov.u32 %r, 512; tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %tm, %r;
  EXIT: ret;
}}"""
    return execute(text, bytes(8), [], 128, 32768, group)


def product_rate(m: int, n: int, in_tmem: bool, group: int, dtype: str = "BF16") -> float:
    """Clocks per product of a long sequence."""
    times = [products(m, n, in_tmem, group, count, dtype).modelled().cycles for count in (8, 40)]
    return (times[1] - times[0]) / 32


def product_latency(m: int, n: int, in_tmem: bool, group: int, dtype: str = "BF16") -> float:
    """Clocks from the issue of one product until its commit has been seen."""
    run = products(m, n, in_tmem, group, 1, dtype)
    segments = run.modelled(detailed=True).segments
    warps = sum(map(len, [trace.warps for trace in run.traces]))
    begin = next(s.begin for s in segments if s.row == warps)
    end = next(s.end for s in segments if s.waits and s.releaser_row >= 0 and s.begin >= begin)
    return end - begin


def copies(nbytes: int, stages: int, count: int) -> Run:
    """`count` bulk copies of `nbytes` from global memory, `stages` of them in flight."""
    source = aligned(count * nbytes)
    text = f"""
.extern .shared .align 1024 .b8 smem[];
.shared .align 8 .b8 head[128];
.visible .entry k(.param .u64 src) {{
  .reg .pred %p, %done; .reg .b32 %r, %s, %mb, %i, %slot, %to, %bar, %parity; .reg .b64 %g;
  mov.u32 %r, %tid.x; setp.ne.u32 %p, %r, 0; @%p bra EXIT;
  mov.u32 %s, smem; mov.u32 %mb, head; ld.param.u64 %g, [src];
  {"".join(f"mbarrier.init.shared::cta.b64 [%mb+{8 * k}], 1; " for k in range(stages))}
  fence.mbarrier_init.release.cluster;
  mov.u32 %i, 0;
  FILL: mad.lo.u32 %bar, %i, 8, %mb; mad.lo.u32 %to, %i, {nbytes}, %s;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {nbytes};
  cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%to], [%g], {nbytes}, [%bar];
  add.u64 %g, %g, {nbytes}; add.u32 %i, %i, 1; setp.lt.u32 %p, %i, {stages}; @%p bra FILL;
  mov.u32 %slot, 0; mov.u32 %parity, 0;
  NEXT: mad.lo.u32 %bar, %slot, 8, %mb; mad.lo.u32 %to, %slot, {nbytes}, %s;
  WAIT: mbarrier.try_wait.parity.shared::cta.b64 %done, [%bar], %parity; @!%done bra WAIT;
  setp.ge.u32 %p, %i, {count}; @%p bra SKIP;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {nbytes};
  cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%to], [%g], {nbytes}, [%bar];
  SKIP: add.u64 %g, %g, {nbytes}; add.u32 %i, %i, 1; add.u32 %slot, %slot, 1;
  setp.lt.u32 %p, %slot, {stages}; @%p bra SAME; mov.u32 %slot, 0; xor.b32 %parity, %parity, 1;
  SAME: setp.lt.u32 %p, %i, {count + stages}; @%p bra NEXT;
  EXIT: ret;
}}"""
    return execute(text, struct.pack("<Q", source.ctypes.data), [source], 32, nbytes * stages)


def copy_clocks(nbytes: int, stages: int) -> float:
    """Clocks per copy in a steady state, all SMs at work, nothing in L2."""
    warm = stages * (2 - -int(MEASURED["hbm_cold_bytes"]) // (nbytes * stages))
    few, many = (copies(nbytes, stages, count).modelled(active_sms=148).cycles for count in (warm, warm + 32 * stages))
    return (many - few) / (32 * stages)


def first_copy(nbytes: int) -> float:
    """Clocks from the issue of the very first copy until its bytes are there, all SMs at work."""
    segments = copies(nbytes, 1, 1).modelled(active_sms=148, detailed=True).segments
    copy = next(s for s in segments if s.row == 2)
    return next(s.end for s in segments if s.waits and s.releaser_row >= 0) - copy.begin


def tensor_map(address: int, rows: int, row_bytes: int, box_rows: int, box_bytes: int) -> bytes:
    """A two-dimensional tensor map of bf16, as engine/tensor_map.h lays it out; the swizzle is as wide as the box."""
    swizzle = {16: 0, 32: 1, 64: 2, 128: 3}[box_bytes]
    words = [0] * 16
    words[0] = address
    words[1] = 0x40002 | 1 << 4 | BF16 << 7 | swizzle << 13 | (rows * row_bytes >= 1 << 17) << 21
    words[1] |= (row_bytes >> 4) << 32
    words[4] = (row_bytes // 2 - 1) | (rows - 1) << 32
    words[6] = (box_bytes // 2 - 1) << 56
    words[7] = box_rows - 1
    return struct.pack("<16Q", *words)


def main_loop(m: int, n: int, k: int, stages: int, tiles: int) -> Run:
    """One CTA's GEMM main loop over `tiles` of K: one warp copies A and B (K-major, bf16), one multiplies."""
    box = min(128, 2 * k)  # bytes of a row of a box: the widest swizzle
    parts, a_bytes, b_bytes = 2 * k // box, 2 * m * k, 2 * n * k
    stage = a_bytes + b_bytes
    pitch = 2 * k * tiles
    a, b = (aligned(rows * pitch) for rows in (m, n))
    maps = tensor_map(a.ctypes.data, m, pitch, m, box) + tensor_map(b.ctypes.data, n, pitch, n, box)
    loads = ""
    for part in range(parts):
        for name, offset, rows in (("ma", 0, m), ("mb", a_bytes, n)):
            loads += f"""  add.u32 %to, %at, {offset + part * rows * box}; add.u32 %x, %kk, {part * box // 2};
  cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%to], [%{name}, {{%x, %zero}}], [%full];
"""
    atom = {32: 6, 64: 4, 128: 2}[box]
    multiplies = ""
    for step in range(k // 16):
        part, inner = divmod(32 * step, box)
        moves = [(part * rows * box + inner) >> 4 for rows in (m, n)]
        multiplies += f"""  add.u64 %xa, %da, {moves[0]}; add.u64 %xb, %db, {moves[1]};
  tcgen05.mma.cta_group::1.kind::f16 [%tm], %xa, %xb, %id, %yes;
"""
    descriptor = 1 << 16 | (8 * box >> 4) << 32 | 1 << 46 | atom << 61
    inits = "".join(f"mbarrier.init.shared::cta.b64 [%bars+{8 * i}], 1; " for i in range(2 * stages + 1))
    text = f"""
.extern .shared .align 1024 .b8 smem[];
.shared .align 8 .b8 head[512];
.visible .entry k(.param .align 64 .b8 map_a[128], .param .align 64 .b8 map_b[128]) {{
  .reg .pred %p, %yes, %done; .reg .b32 %r, %w, %s, %tm, %bars, %full, %empty, %id, %i, %slot, %phase, %at, %to;
  .reg .b32 %zero, %other, %x, %kk; .reg .b64 %da, %db, %xa, %xb, %sh, %ma, %mb;
  mov.u32 %w, %tid.x; shr.u32 %w, %w, 5; mov.u32 %s, smem; mov.u32 %bars, head; add.u32 %bars, %bars, 16;
  mov.u32 %zero, 0; setp.ne.u32 %p, %w, 0; @%p bra READY;
  mov.u32 %r, 512; mov.u32 %tm, head; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%tm], %r;
  mov.u32 %r, %tid.x; setp.ne.u32 %p, %r, 0; @%p bra READY;
  {inits} fence.mbarrier_init.release.cluster;
  READY: bar.sync 0;
  ld.shared.b32 %tm, [head]; mov.u32 %id, {_instruction(m, n)}; setp.eq.u32 %yes, 0, 0;
  mov.b64 %ma, map_a; mov.b64 %mb, map_b; cvta.param.u64 %ma, %ma; cvta.param.u64 %mb, %mb;
  mov.u32 %i, 0; mov.u32 %slot, 0; mov.u32 %kk, 0;
  mov.u32 %r, %tid.x; and.b32 %r, %r, 31; setp.ne.u32 %p, %r, 0; @%p bra DONE;
  setp.eq.u32 %p, %w, 0; @%p bra COPY; setp.eq.u32 %p, %w, 1; @%p bra MULTIPLY; bra DONE;
  COPY: mov.u32 %phase, 1;
  C1: mad.lo.u32 %full, %slot, 8, %bars; add.u32 %empty, %full, {8 * stages}; mad.lo.u32 %at, %slot, {stage}, %s;
  C2: mbarrier.try_wait.parity.shared::cta.b64 %done, [%empty], %phase; @!%done bra C2;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%full], {stage};
{loads}
  add.u32 %kk, %kk, {k}; add.u32 %i, %i, 1; add.u32 %slot, %slot, 1; setp.ne.u32 %p, %slot, {stages};
  xor.b32 %other, %phase, 1; selp.b32 %phase, %phase, %other, %p; selp.b32 %slot, %slot, 0, %p;
  setp.lt.u32 %p, %i, {tiles}; @%p bra C1; bra DONE;
  MULTIPLY: mov.u32 %phase, 0;
  M1: mad.lo.u32 %full, %slot, 8, %bars; add.u32 %empty, %full, {8 * stages}; mad.lo.u32 %at, %slot, {stage}, %s;
  shr.u32 %to, %at, 4; cvt.u64.u32 %sh, %to; and.b64 %sh, %sh, 16383; or.b64 %da, %sh, {descriptor};
  add.u64 %db, %da, {a_bytes >> 4};
  M2: mbarrier.try_wait.parity.shared::cta.b64 %done, [%full], %phase; @!%done bra M2;
{multiplies}
  tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%empty];
  add.u32 %i, %i, 1; add.u32 %slot, %slot, 1; setp.ne.u32 %p, %slot, {stages};
  xor.b32 %other, %phase, 1; selp.b32 %phase, %phase, %other, %p; selp.b32 %slot, %slot, 0, %p;
  setp.lt.u32 %p, %i, {tiles}; @%p bra M1;
  add.u32 %to, %bars, {16 * stages}; tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%to];
  M3: mbarrier.try_wait.parity.shared::cta.b64 %done, [%to], 0; @!%done bra M3;
  DONE: bar.sync 0;
  setp.ne.u32 %p, %w, 0; @%p bra EXIT;
  mov.u32 %r, 512; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tm, %r;
  EXIT: ret;
}}"""
    return execute(text, maps, [a, b], 64, stage * stages)


def tile_clocks(m: int, n: int, k: int, stages: int, operand_bytes: int = 0) -> float:
    """Clocks per tile of K in a steady state; operands of that size stay in L2, or they do not."""
    missing = float(operand_bytes > MEASURED["l2_capacity"] * 2**20)
    times = []
    for tiles in (4 * stages, 4 * stages + 16):
        run = main_loop(m, n, k, stages, tiles)
        everything = [Region(0, (1 << 64) - 1, missing)]
        times.append(run.modelled(regions=everything).cycles)
    return (times[1] - times[0]) / 16
