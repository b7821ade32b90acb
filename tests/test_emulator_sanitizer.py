"""What the sanitizer finds, and what it must not find: hand-written kernels in pairs.

A kernel marks what its order depends on: `<<bar.sync 0;>>` is there in the right version and missing in the wrong one;
`<<a||b>>` is `a` in the right version and `b` in the wrong one. The right version must be silent under every schedule.
The wrong one must be found under every schedule too, above all under the eager one, which computes the right result.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from cute_ssd.emulator import engine
from cute_ssd.emulator.decode import decode
from cute_ssd.emulator.engine import Event, Options
from cute_ssd.emulator.program import Program
from cute_ssd.emulator.ptx import parse_kernel

from .ptx_runner import HEADER, pack

SCHEDULES = [("eager", 0), ("late", 1), *(("priority", seed) for seed in range(4))]

FRAME = """
.visible .entry k(.param .u64 in, .param .u64 out) {
    .reg .pred %p, %q, %lane0, %first; .reg .b16 %h<4>; .reg .b32 %t, %w, %l, %rank, %cta, %mine, %next, %peer, %r<10>;
    .reg .b32 %tm, %tmw, %mb, %idesc, %x<16>, %y<8>; .reg .b64 %da, %db; .reg .pred %no, %yes;
    .reg .b64 %in, %out, %in0, %out0, %a, %b, %d<4>;
    .shared .align 1024 .b8 data[8192]; .shared .align 8 .b64 bar[4]; .shared .align 4 .b32 head;
    mov.u32 %t, %tid.x; shr.u32 %w, %t, 5; and.b32 %l, %t, 31; mov.u32 %rank, %cluster_ctarank; mov.u32 %cta, %ctaid.x;
    setp.eq.u32 %lane0, %l, 0; setp.eq.u32 %first, %t, 0;
    ld.param.u64 %in0, [in]; ld.param.u64 %out0, [out]; mov.u32 %r0, %ntid.x; mad.lo.u32 %r0, %cta, %r0, %t;
    mad.wide.u32 %in, %r0, 4, %in0; mad.wide.u32 %out, %r0, 4, %out0;
    mov.u32 %r1, data; mad.lo.u32 %mine, %t, 4, %r1;
    mov.u32 %r0, %ntid.x; add.u32 %next, %t, 32; rem.u32 %next, %next, %r0; mad.lo.u32 %next, %next, 4, %r1;
    mov.u32 %r0, %cluster_nctarank; add.u32 %r2, %rank, 1; rem.u32 %r2, %r2, %r0;
    mapa.shared::cluster.u32 %peer, %mine, %r2; mov.u32 %r9, 0;
"""
"""Of every thread: %in and %out, its words of global memory (%in0, %out0: where they begin); %mine, its word of `data`;
%next, that of the same lane in the next warp; %peer, its word in the next CTA of the cluster."""


def init(*counts: int) -> str:
    """mbarriers bar[0], bar[1] .. with these counts, which everybody in the CTA may use."""
    inits = "".join(f"@%first mbarrier.init.shared.b64 [bar+{8 * k}], {n};" for k, n in enumerate(counts))
    return inits + "@%first fence.mbarrier_init.release.cluster; barrier.cluster.arrive; barrier.cluster.wait;"


def wait(k: int = 0, parity: int | str = 0) -> str:
    """A loop until a phase of bar[k] is complete."""
    return f"{{ W: mbarrier.try_wait.parity.shared.b64 %q, [bar+{8 * k}], {parity}; @!%q bra W; }}"


def arrive(k: int = 0) -> str:
    return f"mbarrier.arrive.shared.b64 _, [bar+{8 * k}];"


def expect(n: int, k: int = 0) -> str:
    return f"mbarrier.arrive.expect_tx.shared.b64 _, [bar+{8 * k}], {n};"


def load(n: int, to: str = "data", k: int = 0, source: str = "%in0") -> str:
    """A bulk copy of n bytes into shared memory."""
    return f"""
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{to}], [{source}], {n}, [bar+{8 * k}];
    """


def store(n: int, source: str = "data") -> str:
    """A bulk copy of n bytes to global memory that no thread uses at its end, in a group of its own."""
    return f"cp.async.bulk.global.shared::cta.bulk_group [%out0+4096], [{source}], {n}; cp.async.bulk.commit_group;"


DRAIN = "cp.async.bulk.wait_group 0;"
CLUSTER_SYNC = "barrier.cluster.arrive; barrier.cluster.wait;"
END = "st.global.u32 [%out], %r9; ret; }"


def marked(body: str, wrong: int | None) -> str:
    """A body without its mark number `wrong`; None: the right version."""
    marks = iter(range(100))
    choose = lambda mark: (*mark[1].split("||"), "")[next(marks) == wrong]  # noqa: E731
    return re.sub(r"<<(.*?)>>", choose, body, flags=re.DOTALL)


@dataclass(frozen=True)
class Case:
    """
    A kernel body with its marks, the kind of finding that each removal must give, and how it is launched.
    """

    name: str
    body: str
    kind: str | tuple[str, ...]
    warps: int = 2
    ctas: int = 1
    grid: int = 1
    tensor_fences: bool = False

    def version(self, wrong: int | None) -> str:
        return FRAME + marked(self.body, wrong) + END

    def run(self, wrong: int | None, schedule: str, seed: int, **options: bool) -> list[Event]:
        source, out = np.arange(4096, dtype=np.uint32), np.zeros(4096, np.uint32)
        params, ranges = pack((source, out))
        grid, block, cluster = (self.grid * self.ctas, 1, 1), (32 * self.warps, 1, 1), (self.ctas, 1, 1)
        chosen = Options(schedule, seed, threads=1, **{"tensor_fences": self.tensor_fences, **options})
        return engine.run(compiled(self.version(wrong)), grid, block, cluster, 0, params, ranges, chosen).events


@cache
def compiled(text: str) -> Program:
    return decode(parse_kernel(HEADER + text, "k"), engine.handlers())


CASES: list[Case] = []


def case(name: str, body: str, kind: str | tuple[str, ...] = "race", **launch: int) -> None:
    """Adds a case; a kind of () is for a kernel that is only right."""
    CASES.append(Case(name, body, kind, **launch))


# ---- warps and shared memory -----------------------------------------------------------------------------------------

PUT, GET = "st.shared.u32 [%mine], %t;", "ld.shared.u32 %r9, [%next];"
ONLY = "setp.ne.u32 %p, %w, {0}; @%p bra $E{1};"

case("read after write", f"{PUT} bar.sync 0; {PUT} <<bar.sync 0;>> {GET}")
case("write after read", f"{PUT} bar.sync 0; {GET} <<bar.sync 0;>> {PUT}")
case("write after write", f"{PUT} <<bar.sync 0;>> st.shared.u32 [%next], %t;")
# Of different size, where the words of two warps alternate.
WORD, VECTOR = "[%r3]", "{%r5, %r6, %r7, %r8}, [%r4]"
ALTERNATE = """
    mad.lo.u32 %r3, %l, 8, %r1; mad.lo.u32 %r3, %w, 4, %r3; and.b32 %r4, %l, 15; mad.lo.u32 %r4, %r4, 16, %r1;
    st.shared.u32 [%r3], %t;
    """
case("words that alternate", f"{ALTERNATE} ld.shared.u32 %r9, {WORD}; st.shared.u32 {WORD}, 1;", ())
case(
    "bytes that alternate",
    "mad.lo.u32 %r3, %l, <<2||1>>, %r1; add.u32 %r3, %r3, %w; st.shared.u8 [%r3], %t; ld.shared.u8 %r9, [%r3];",
)
case("vectors after words", f"{ALTERNATE} <<bar.sync 0;>> ld.shared.v4.u32 {VECTOR};", ("race", "uninitialised"))
case(
    "words after vectors",
    f"{ALTERNATE} bar.sync 0; ld.shared.v4.u32 {VECTOR}; <<bar.sync 0;>> st.shared.u32 {WORD}, 1;",
)
case(
    "words after a bulk copy",
    f"""
    {init(1)} {ALTERNATE} <<bar.sync 0;>> fence.proxy.async; bar.warp.sync -1; @%first {expect(256)} @%first {load(256)}
    {wait()} ld.shared.u32 %r9, {WORD};
    """,
)
case("two barriers", f"{PUT} <<bar.sync 1, 64;>> {GET} <<bar.sync 2, 64;>> {PUT}")
case(
    "arrive and sync",
    f"""
    {PUT} bar.sync 0; setp.eq.u32 %p, %w, 1; @%p bra CONSUMER; st.shared.u32 [%mine], 5; <<bar.arrive 1,
    64;||bar.arrive 2, 64;>> bra DONE; CONSUMER: <<bar.sync 1, 64;||bar.arrive 2, 64;>> {GET} DONE:
    """,
    ("race", "deadlock"),
)
case("mbarrier", f"{init(64)} {PUT} {arrive()} <<{wait()}>> {GET} {wait()}")
case(
    "relaxed arrival",
    f"""
    {init(64)} {PUT} mbarrier.arrive<<.release||.relaxed>>.cta.shared.b64 _, [bar]; {wait()} {GET}
    """,
)
case(
    "relaxed wait",
    f"""
    {init(64)} {PUT} {arrive()}
    {{ W: mbarrier.try_wait.parity<<.acquire||.relaxed>>.cta.shared.b64 %q, [bar], 0; @!%q bra W; }} {GET}
    """,
)
case("the wrong phase", f"{init(64)} {PUT} {arrive()} {wait(0, '<<0||1>>')} {GET} {wait()}")
case("mbarrier of elected lanes", f"{init(2)} {PUT} <<bar.warp.sync -1;>> @%lane0 {arrive()} {wait()} {GET}")
case(
    "a lane that waits for its warp",
    f"""
    {init(64)} {PUT} {arrive()} @!%lane0 bra SKIP; {wait()} SKIP: <<bar.warp.sync -1;>> {GET} {wait()}
    """,
)
case(
    "lanes of a warp",
    """
    st.shared.u32 [%mine], %t; <<bar.warp.sync -1;>> xor.b32 %r2, %mine, 4; ld.shared.u32 %r9, [%r2];
    """,
)
HALVES = "setp.lt.u32 %p, %l, 16; mov.u32 %r3, 0xffff0000; @%p mov.u32 %r3, 0xffff;"
SYNC_HALF = "bar.warp.sync %r3;"
HEADS = "and.b32 %r4, %l, 15; setp.eq.u32 %p, %r4, 0;"
case(
    "lanes of half a warp",
    f"""
    {HALVES} {PUT} {SYNC_HALF} xor.b32 %r2, %mine, <<4||64>>; ld.shared.u32 %r9, [%r2];
    """,
)
case(
    "what half a warp did before it met",
    f"""
    {HALVES} {PUT} bar.warp.sync -1; <<{PUT} {SYNC_HALF}||{SYNC_HALF} {PUT}>> xor.b32 %r2, %mine, 4; ld.shared.u32
    %r9, [%r2];
    """,
)
case(
    "from half a warp to the other by two lanes",
    f"""
    {HALVES} {PUT} {SYNC_HALF} sub.u32 %r4, %l, 15; setp.lt.u32 %p, %r4, 2; <<@%p bar.warp.sync 0x18000;>>
    setp.eq.u32 %p, %l, 16; @%p ld.shared.u32 %r9, [%mine+-64];
    """,
)
case(
    "mbarrier of the elected lanes of half warps",
    f"""
    {init(4)} {HALVES} {PUT} {SYNC_HALF} {HEADS} <<@%p {arrive()}||@%lane0 mbarrier.arrive.shared.b64 _, [bar], 2;>>
    {wait()} {GET}
    """,
)
case(
    "a ring of many phases",
    f"""
    {init(1, 1)} {PUT} bar.sync 0; mov.u32 %r3, 0; setp.eq.u32 %p, %w, 1; @%p bra CONSUMER; P: and.b32 %r4,
    %r3, 1; xor.b32 %r4, %r4, 1; <<{wait(1, "%r4")}>> {PUT} <<bar.warp.sync -1;>> @%lane0 {arrive(0)} add.u32
    %r3, %r3, 1; setp.lt.u32 %p, %r3, 20; @%p bra P; bra DONE; CONSUMER: and.b32 %r4, %r3, 1; {wait(0, "%r4")}
    {GET} <<bar.warp.sync -1;>> @%lane0 {arrive(1)} add.u32 %r3, %r3, 1; setp.lt.u32 %p, %r3, 20; @%p bra
    CONSUMER; DONE:
    """,
    ("race", "deadlock"),
)
case(
    "readers of a broadcast",
    """
    @%first st.shared.u32 [data], 7; bar.sync 0; ld.shared.u32 %r9, [data]; <<bar.sync 0;>> setp.eq.u32 %p,
    %t, 70; @%p st.shared.u32 [data], 8; bar.sync 0; ld.shared.u32 %r8, [data]; add.u32 %r9, %r9, %r8;
    """,
    warps=4,
)
case(
    "atomics",
    """
    @%first st.shared.u32 [data], 0; <<bar.sync 0;>> atom.shared.add.u32 %r8, [data], 1; <<bar.sync 0;>>
    ld.shared.u32 %r9, [data];
    """,
)
case(
    "halves of a word",
    """
    mad.lo.u32 %r3, %t, 2, %r1; cvt.u16.u32 %h0, %t; {0} st.shared.u16 [%r3], %h0; <<bar.sync 0;>>
    ld.shared.u16 %h1, [%r3+2];
    """
    "cvt.u32.u16 %r9, %h1;".replace("{0}", "@%first st.shared.u16 [data+128], %h0; bar.sync 0;"),
)

# ---- clusters --------------------------------------------------------------------------------------------------------

case(
    "barrier of the cluster",
    f"""
    st.shared.u32 [%mine], 1; <<{CLUSTER_SYNC}>> ld.shared::cluster.u32 %r9, [%peer]; <<{CLUSTER_SYNC}>> {PUT}
    """,
    ctas=2,
)
case(
    "relaxed arrival at the cluster",
    f"""
    {PUT} barrier.cluster.arrive<<||.relaxed>>; barrier.cluster.wait; ld.shared::cluster.u32 %r9, [%peer];
    {CLUSTER_SYNC}
    """,
    ctas=2,
)
case(
    "barrier of the CTA only",
    f"""
    {PUT} <<{CLUSTER_SYNC}||bar.sync 0;>> ld.shared::cluster.u32 %r9, [%peer]; {CLUSTER_SYNC}
    """,
    ("race", "uninitialised"),
    ctas=2,
)
case(
    "remote arrival",
    f"""
    {init(65)} {PUT} bar.sync 0; st.shared::cluster.u32 [%peer], %t; mov.u32 %r3, bar;
    mapa.shared::cluster.u32 %r3, %r3, %r2; <<mbarrier.arrive.release.cluster.shared::cluster.b64 _,
    [%r3];||mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%r3];>> @%first {arrive()}
    {{ W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %q, [bar], 0; @!%q bra W; }} ld.shared.u32
    %r9, [%mine];
    """.replace(f"{PUT} bar.sync 0;", f"{PUT} {CLUSTER_SYNC}"),
    ctas=2,
)
case(
    "the scope of a remote arrival",
    f"""
    {init(65)} {PUT} {CLUSTER_SYNC} st.shared::cluster.u32 [%peer], %t; mov.u32 %r3, bar; mapa.shared::cluster.u32
    %r3, %r3, %r2; mbarrier.arrive.release.<<cluster||cta>>.shared::cluster.b64 _, [%r3]; @%first {arrive()} {wait()}
    ld.shared.u32 %r9, [%mine]; {CLUSTER_SYNC}
    """,
    ctas=2,
)
case(
    "the memory of a CTA that has exited",
    f"""
    {PUT} {CLUSTER_SYNC} setp.eq.u32 %p, %rank, 1; @!%p st.shared::cluster.u32 [%peer], 1; <<{CLUSTER_SYNC}>>
    """,
    "exited CTA",
    ctas=2,
)
case(
    "the exit of a CTA after a relaxed arrival",
    f"""
    {PUT} {CLUSTER_SYNC} ld.shared::cluster.u32 %r9, [%peer]; barrier.cluster.arrive.relaxed; barrier.cluster.wait;
    """,
    (),
    ctas=2,
)
case(
    "an mbarrier of a CTA that has exited",
    f"""
    {init(64)} mov.u32 %r3, bar; mapa.shared::cluster.u32 %r3, %r3, %r2; setp.eq.u32 %p, %rank, 1; <<||@%p bra D;>>
    {CLUSTER_SYNC} mbarrier.arrive.shared::cluster.b64 _, [%r3]; {CLUSTER_SYNC} D:
    """,
    "exited CTA",
    ctas=2,
)
case(
    "st.async",
    f"""
    {init(1)} mov.u32 %r3, bar; mapa.shared::cluster.u32 %r3, %r3, %r2; @%first {expect(256)} {CLUSTER_SYNC}
    st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%peer], %t, [%r3]; <<{wait()}>> ld.shared.u32
    %r9, [%mine]; {wait()} {CLUSTER_SYNC}
    """,
    ("race", "uninitialised"),
    ctas=2,
)

# ---- mbarriers -------------------------------------------------------------------------------------------------------

FIRST_INIT = "@%first mbarrier.init.shared.b64 [bar], 1;"
case(
    "initialisation",
    f"""
    {FIRST_INIT} <<bar.sync 0;>> setp.eq.u32 %p, %t, 40; @%p {arrive()} {wait()}
    """,
    ("race", "mbarrier"),
)
case(
    "initialisation for another CTA",
    f"""
    {FIRST_INIT} <<fence.mbarrier_init.release.cluster;>> barrier.cluster.arrive.relaxed;
    barrier.cluster.wait; mov.u32 %r3, bar; mapa.shared::cluster.u32 %r3, %r3, %r2; @%first
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r3]; {wait()} {CLUSTER_SYNC}
    """,
    ctas=2,
)
case(
    "initialisation for the TMA unit",
    f"""
    {FIRST_INIT} <<fence.mbarrier_init.release.cluster;>> bar.sync 0; @%first {expect(128)} @%first
    {load(128)} {wait()} ld.shared.u32 %r9, [data];
    """,
    "missing proxy fence",
)
case("too many arrivals", f"{init(2)} @%first mbarrier.arrive.shared.b64 _, [bar], <<2||3>>; {wait()}", "over-arrival")
case(
    "too many bytes",
    f"""
    {init(1)} @%first {expect("<<128||112>>")} @%first {load(128)} {wait()} ld.shared.u32 %r9, [data];
    """,
    "transaction count",
)
case(
    "too few bytes",
    f"""
    {init(1)} @%first {expect("<<128||144>>")} @%first {load(128)} {wait()} ld.shared.u32 %r9, [data];
    """,
    "deadlock",
)

# ---- asynchronous copies ---------------------------------------------------------------------------------------------

TWO_LOADS = f"""
    {init(1, 64)} @!%first bra R0; {expect(256)} {load(256)} R0: <<{wait(0, 0)}>> ld.shared.u32 %r8, [%mine];
    <<fence.proxy.async;>> {arrive(1)} @!%first bra R1; <<{wait(1, 0)}>> {expect(256)}
    {load(256, source="%in0+256")} R1:
    {wait(0, 1)} ld.shared.u32 %r9, [%mine]; add.u32 %r9, %r9, %r8;
    """
case("a TMA load, its readers, the next load", TWO_LOADS, ("race", "uninitialised", "missing proxy fence"))
case(
    "a fence of the writers",
    f"{PUT} <<fence.proxy.async;>> bar.sync 0; @!%first bra S; {store(256)} {DRAIN} S:",
    "missing proxy fence",
)
case(
    "a fence of the issuer",
    f"""
    {PUT} bar.sync 0; @!%first bra S; <<fence.proxy.async;>> {store(256)} {DRAIN} S:
    """,
    "missing proxy fence",
)
case(
    "a fence in the wrong order",
    f"""
    {PUT} bar.sync 0; <<{PUT} fence.proxy.async;||fence.proxy.async; {PUT}>> bar.sync 0;
    """
    f"setp.eq.u32 %p, %t, 40; @!%p bra S; {store(256)} {DRAIN} S:",
    "missing proxy fence",
)
case(
    "a barrier before the store",
    f"""
    {PUT} bar.sync 0; {PUT} fence.proxy.async; <<bar.sync 0;>> @!%first bra S; {store(256)} {DRAIN} S:
    """,
)
case(
    "the fence of an elected lane",
    f"""
    {init(2)} {PUT} <<bar.warp.sync -1;>> @%lane0 fence.proxy.async; @%lane0 {arrive()} {wait()} @!%first bra
    S; {store(256)} {DRAIN} S:
    """,
    ("race", "missing proxy fence"),
)
case(
    "the fences of the elected lanes of half warps",
    f"""
    {init(4)} {HALVES} {PUT} {SYNC_HALF} {HEADS} <<@%p||@%lane0>> fence.proxy.async; @%p {arrive()} {wait()} @!%first
    bra S; {store(256)} {DRAIN} S:
    """,
    "missing proxy fence",
)
case(
    "the state space of a fence",
    f"{PUT} fence.proxy.async<<.shared::cta||.global>>; bar.sync 0; @!%first bra S; {store(256)} {DRAIN} S:",
    "missing proxy fence",
)
case(
    "the fences of the other lanes",
    f"""
    {init(2)} {PUT} fence.proxy.async; <<bar.warp.sync -1;>> @%lane0 {arrive()} {wait()} @!%first bra S;
    {store(256)} {DRAIN} S:
    """,
    ("race", "missing proxy fence"),
)
case(
    "a store that is being read",
    f"""
    {PUT} fence.proxy.async; bar.sync 0; @%first {store(256)} <<@%first cp.async.bulk.wait_group.read 0;>>
    bar.sync 0; {PUT} @%first {DRAIN}
    """,
)
case(
    "two stores in flight",
    f"""
    {PUT} st.shared.u32 [%mine+256], %t; fence.proxy.async; bar.sync 0; @%first {store(256)} @%first
    {store(256, "data+256")} @%first cp.async.bulk.wait_group.read <<1||2>>; bar.sync 0; {PUT} @%first {DRAIN}
    """,
)
case(
    "a store at exit",
    f"""
    {PUT} fence.proxy.async; bar.sync 0; @%first {store(256)} <<@%first {DRAIN}>>
    """,
    "unfinished copy",
)
case("a load at exit", f"{init(1)} @%first {expect(256)} @%first {load(256)} <<{wait()}>>", "in flight at exit")
case(
    "a fence before an overwriting load",
    f"""
    {init(1)} {PUT} <<fence.proxy.async;>> bar.sync 0; @!%first bra S; {expect(256)} {load(256)} S: {wait()}
    ld.shared.u32 %r9, [%mine];
    """,
    "missing proxy fence",
)
case(
    "multicast",
    f"""
    {init(1)} mov.b16 %h0, 3; @%first {expect(256)} {CLUSTER_SYNC} setp.eq.u32 %p, %rank, 0; @!%p bra S;
    @!%first bra S; mov.u32 %r3, bar;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [data], [%in0], 256,
    [%r3], %h0; S: <<{wait()}>> ld.shared.u32 %r9, [%mine]; {wait()} {CLUSTER_SYNC}
    """,
    ("race", "uninitialised"),
    ctas=2,
)

COPY = "cp.async.ca.shared.global [%mine], [%in], 4;"
case(
    "cp.async",
    f"""
    {COPY} cp.async.commit_group; <<cp.async.wait_group 0;>> bar.sync 0; {GET} cp.async.wait_group 0;
    """,
    ("race", "uninitialised"),
)
case("cp.async and the other warps", f"{PUT} bar.sync 0; {COPY} cp.async.wait_all; <<bar.sync 0;>> {GET}")
case(
    "cp.async and the other lanes",
    f"""
    {PUT} bar.sync 0; {COPY} cp.async.wait_all; <<bar.warp.sync -1;>> xor.b32 %r2, %mine, 4; ld.shared.u32
    %r9, [%r2];
    """,
)
case(
    "groups of cp.async",
    f"""
    {COPY} cp.async.commit_group; cp.async.ca.shared.global [%mine+256], [%in], 4; cp.async.commit_group;
    cp.async.wait_group <<1||2>>; ld.shared.u32 %r8, [%mine]; cp.async.wait_group <<0||1>>; ld.shared.u32 %r9,
    [%mine+256]; add.u32 %r9, %r9, %r8; cp.async.wait_group 0;
    """,
    ("race", "uninitialised"),
)
case(
    "cp.async and an mbarrier",
    f"""
    {init(64)} {COPY} cp.async.mbarrier.arrive.noinc.shared.b64 [bar]; <<{wait()}>> {GET} {wait()}
    """,
    ("race", "uninitialised"),
)
case("cp.async over what was read", f"{PUT} bar.sync 0; {GET} <<bar.sync 0;>> {COPY} cp.async.wait_all;")

# ---- tensor memory ---------------------------------------------------------------------------------------------------

TENSOR = f"""
    setp.ne.u32 %p, %w, 0; @%p bra ALLOCATED; mov.u32 %x0, head; mov.u32 %x1, 32;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%x0], %x1;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned; ALLOCATED: {init(1, 4, 1)} ld.shared.u32 %tm,
    [head]; shl.b32 %tmw, %w, 21; add.u32 %tmw, %tmw, %tm; mov.u32 %mb, bar; mad.lo.u32 %x2, %t, 16, %r1;
    mov.u32 %x3, %r1; shr.u32 %x3, %x3, 4; or.b32 %x3, %x3, 0x80000; mov.u32 %x4, 0x4010; mov.b64 %da,
    {{%x3, %x4}}; add.u32 %x3, %x3, 256; mov.b64 %db, {{%x3, %x4}}; mov.u32 %idesc, 0x8040010; setp.ne.u32
    %no, 0, 0; setp.eq.u32 %yes, 0, 0;
    """
"""32 columns of tensor memory (%tm; %tmw: this warp's lanes), and descriptors of a product of M = 128, N = 16 whose
operands lie in `data`."""

FILL = """
    st.shared.v4.u32 [%x2], {%t, %t, %t, %t}; st.shared.v4.u32 [%x2+2048], {%t, %t, %t, %t}; st.shared.u32
    [%mine+4096], %t;
    """
READY = FILL + "fence.proxy.async; bar.sync 0;"
MMA = "tcgen05.mma.cta_group::1.kind::f16 [%tm], %da, %db, %idesc, %no;"
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%mb{}];"
LOAD_T = "tcgen05.ld.sync.aligned.32x32b.x8.b32 {%y0, %y1, %y2, %y3, %y4, %y5, %y6, %y7}, [%tmw];"
STORE_T = "tcgen05.st.sync.aligned.32x32b.x8.b32 [%tmw], {%t, %t, %t, %t, %t, %t, %t, %t};"
WAIT_LD, WAIT_ST = "tcgen05.wait::ld.sync.aligned;", "tcgen05.wait::st.sync.aligned;"
FREE = """
    bar.sync 0; setp.ne.u32 %p, %w, 0; @%p bra FREED; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tm, %x1;
    FREED:
    """


def one(instructions: str) -> str:
    """Thread 0 does it."""
    return f"{{ @!%first bra NOT; {instructions} NOT: }}"


def tensor(name: str, body: str, kind: str | tuple[str, ...] = "race", free: str = FREE, **launch: int) -> None:
    case(name, f"{TENSOR} {body} {free}", kind, warps=4, **launch)


PRODUCT = READY + one(MMA + COMMIT.format("")) + wait()
tensor(
    "operands of the tensor core",
    f"""
    {FILL} <<fence.proxy.async;>> bar.sync 0; {one(MMA + COMMIT.format(""))} {wait()}
    """,
    "missing proxy fence",
)
tensor(
    "operands by TMA",
    READY
    + one(expect(512, 2) + load(512, "data+4096", 2))
    + "<<"
    + wait(2)
    + ">>"
    + one(MMA + COMMIT.format(""))
    + wait()
    + wait(2),
)
tensor(
    "waiting for the tensor core",
    f"""
    {READY} {one(MMA + COMMIT.format(""))} <<{wait()}>> {LOAD_T} {WAIT_LD} mov.b32 %r9, %y0; {wait()}
    """,
    ("race", "uninitialised"),
)
tensor(
    "a commit",
    f"""
    {READY} {one(MMA + "<<" + COMMIT.format("") + "||" + arrive() + ">>")} {wait()} {LOAD_T} {WAIT_LD} mov.b32
    %r9, %y0;
    """,
    ("race", "uninitialised"),
)
tensor(
    "reads before the next product",
    f"""
    {PRODUCT} {LOAD_T} <<{WAIT_LD}>> @%lane0 {arrive(1)} {one(wait(1) + MMA + COMMIT.format(""))} {wait(0, 1)}
    {WAIT_LD}
    """,
    ("race", "tensor memory race"),
)
tensor(
    "a release before the next product",
    f"""
    {PRODUCT} {LOAD_T} {WAIT_LD} @%lane0 {arrive(1)} {one("<<" + wait(1) + ">>" + MMA + COMMIT.format(""))}
    {wait(0, 1)} {wait(1)}
    """,
    ("race", "tensor memory race", "deadlock"),
)
tensor("operands while they are read", f"{READY} {one(MMA + COMMIT.format(''))} <<{wait()}>> {FILL} {wait()}")
tensor("the end of a store", f"{STORE_T} <<{WAIT_ST}>> {LOAD_T} {WAIT_LD} mov.b32 %r9, %y0; {WAIT_ST}")
tensor(
    "a store and another warp",
    f"""
    {PRODUCT} {STORE_T} <<{WAIT_ST}>> bar.sync 0; {one(MMA.replace("%no", "%yes") + COMMIT.format(""))}
    {wait(0, 1)} {WAIT_ST}
    """,
)
tensor(
    "a barrier after a store",
    f"""
    {PRODUCT} {STORE_T} {WAIT_ST} <<bar.sync 0;>> {one(MMA.replace("%no", "%yes") + COMMIT.format(""))}
    {wait(0, 1)}
    """,
    ("race", "deadlock"),
)
tensor("what nothing stored", f"<<{STORE_T} {WAIT_ST}>> {LOAD_T} {WAIT_LD} mov.b32 %r9, %y0;", "uninitialised")
tensor("products at exit", f"{READY} {one(MMA + COMMIT.format(''))} <<{wait()}>>", "in flight at exit")
tensor(
    "deallocation",
    "",
    "tensor memory leak",
    free="""
    bar.sync 0; setp.ne.u32 %p, %w, 0; @%p bra F; <<tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tm, %x1;>>
    F:
    """,
)
tensor(
    "deallocation after the last use",
    f"{PRODUCT} {LOAD_T} {WAIT_LD}",
    ("race", "tensor memory"),
    free=FREE.replace("bar.sync 0;", "<<bar.sync 0;>>"),
)
SHIFT = "tcgen05.shift.cta_group::1.down [%tm];"
NEXT = COMMIT.format("") + wait(0, 1)
tensor(
    "tcgen05.shift before a load",
    f"{PRODUCT} {one(SHIFT + COMMIT.format('+16'))} <<{wait(2)}>> {LOAD_T} {WAIT_LD} {wait(2)}",
)
tensor("tcgen05.shift among products", f"{READY} {one(MMA + SHIFT + MMA + COMMIT.format(''))} {wait()}", ())
tensor(
    "two of tcgen05.shift",
    f"{PRODUCT} bar.sync 0; {one(f'{SHIFT} <<{NEXT}>> {SHIFT}' + COMMIT.format('+16'))} {wait(2)} {LOAD_T} {WAIT_LD}",
)
tensor(
    "a copy before tcgen05.shift",
    f"""
    {PRODUCT} bar.sync 0;
    {one(f"tcgen05.cp.cta_group::1.128x256b [%tm], %da; <<{NEXT}>> {SHIFT}" + COMMIT.format("+16"))} {wait(2)}
    """,
)
PAIRED_TENSOR = TENSOR.replace("cta_group::1", "cta_group::2")
PAIRED_FREE = FREE.replace("cta_group::1", "cta_group::2").replace("bar.sync 0;", "")
case(
    "deallocation of a pair's memory",
    f"{PAIRED_TENSOR} {STORE_T} {WAIT_ST} {LOAD_T} {WAIT_LD} <<{CLUSTER_SYNC}||bar.sync 0;>> {PAIRED_FREE}",
    warps=4,
    ctas=2,
)
tensor("the use of a result", f"{PRODUCT} {LOAD_T} <<{WAIT_LD}>> add.u32 %r9, %y0, 1; {WAIT_LD}", "register in flight")
tensor("the partition of a warp", f"{PRODUCT} <<||add.u32 %tmw, %tmw, 0x200000;>> {LOAD_T} {WAIT_LD}", "tensor memory")
tensor("columns that were allocated", f"{PRODUCT} <<||add.u32 %tmw, %tmw, 28;>> {LOAD_T} {WAIT_LD}", "tensor memory")
tensor(
    "one lane of a warp",
    f"""
    {READY} setp.ne.u32 %p, %w, 0; @%p bra NOT; @<<%first||!%p>> {MMA} @%first {COMMIT.format("")} NOT:
    {wait()}
    """,
    "single thread",
)
for name, instruction, commit in (
    ("commit", COMMIT.format("+16"), ""),
    ("cp", "tcgen05.cp.cta_group::1.128x256b [%tm], %da;", COMMIT.format("+16")),
    ("shift", SHIFT, COMMIT.format("+16")),
):
    tensor(
        f"one lane of a warp: {name}",
        f"""
        {PRODUCT} bar.sync 0; setp.ne.u32 %p, %w, 0; @%p bra NOT; @<<%first||!%p>> {instruction}
        {commit and "@%first " + commit} NOT: bar.sync 0; {wait(2)}
        """,
        "single thread",
    )
tensor(
    "the issuer of a commit",
    f"""
    {READY} {one(MMA)} bar.sync 0; setp.eq.u32 %p, %t, <<0||32>>; @%p {COMMIT.format("")} {wait()} {LOAD_T}
    {WAIT_LD}
    """,
)
tensor(
    "two issuers",
    f"""
    {READY} {one(MMA)} <<bar.sync 0;>> setp.eq.u32 %p, %t, 32; @%p {MMA} @%p {COMMIT.format("")}
    {one(COMMIT.format("+16"))} {wait()} {wait(2)}
    """,
)

# ---- fences of tensor memory, an option ------------------------------------------------------------------------------

BEFORE, AFTER = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"
ADD = MMA.replace("%no", "%yes") + COMMIT.format("")


def fenced(name: str, body: str) -> None:
    tensor(name, body, "missing tensor fence" if "<<" in body else (), tensor_fences=True)


fenced("a fence of the readers of a product", f"{PRODUCT} <<{AFTER}>> {LOAD_T} {WAIT_LD}")
fenced(
    "a fence that follows its wait",
    f"{READY} {one(MMA + COMMIT.format(''))} <<{wait()} {AFTER}||{AFTER} {wait()}>> {LOAD_T} {WAIT_LD}",
)
fenced(
    "fences between reads and the next product",
    f"{PRODUCT} {AFTER} {LOAD_T} {WAIT_LD} <<{BEFORE}>> bar.sync 0; {one(f'<<{AFTER}>> {MMA}' + COMMIT.format(''))} "
    f"{wait(0, 1)}",
)
fenced(
    "fences between a store and a product",
    f"""
    {PRODUCT} {AFTER} {STORE_T} {WAIT_ST} <<{BEFORE}>> bar.warp.sync -1; @%lane0 {arrive(1)}
    {one(f"{wait(1)} <<{AFTER}>> {ADD}")} {wait(0, 1)} <<{AFTER}>> {LOAD_T} {WAIT_LD}
    """,
)
fenced(
    "a fence behind what it is for",
    f"{PRODUCT} {AFTER} <<{LOAD_T} {WAIT_LD} {BEFORE}||{BEFORE} {LOAD_T} {WAIT_LD}>> bar.sync 0; "
    f"{one(AFTER + ADD)} {wait(0, 1)}",
)
fenced(
    "a fence before the arrival",
    f"{PRODUCT} {AFTER} {LOAD_T} {WAIT_LD} <<{BEFORE} bar.sync 0;||bar.sync 0; {BEFORE}>> {one(AFTER + ADD)} "
    f"{wait(0, 1)}",
)
fenced(
    "a pipeline of two issuers",
    f"""
    {READY} {one(f"{MMA} <<{BEFORE}>>")} bar.sync 0; setp.eq.u32 %p, %t, 32; <<@%p {AFTER}>> @%p
    {MMA} @%p {COMMIT.format("")} {one(COMMIT.format("+16"))} {wait()} {wait(2)}
    """,
)
fenced(
    "the fences of others",
    f"""
    {PRODUCT} setp.ne.u32 %p, %w, 0; <<||@%p bra S;>> {AFTER} S: bar.sync 0; {LOAD_T} {WAIT_LD}
    setp.eq.u32 %p, %w, 2; <<||@%p bra R;>> {BEFORE} R: bar.sync 0; {one(AFTER + ADD)} {wait(0, 1)}
    """,
)
fenced(
    "a barrier on the way",
    f"""
    {READY} {one(MMA + COMMIT.format(""))} setp.ne.u32 %p, %w, 3; @%p bra W3; {wait()} W3: bar.sync 0; {AFTER}
    {LOAD_T} {WAIT_LD} {BEFORE} bar.sync 1; bar.sync 2; {one(AFTER + ADD)} {wait(0, 1)}
    """,
)
fenced("stores and loads of a thread", f"{STORE_T} {WAIT_ST} {LOAD_T} {WAIT_LD} {STORE_T} {WAIT_ST}")
fenced("products of a thread", f"{READY} {one(MMA + SHIFT + MMA + COMMIT.format(''))} {wait()}")

# ---- registers -------------------------------------------------------------------------------------------------------

UNDEFINED = "undefined value"
case("a stored value", "<<mov.u32 %r3, 1;>> add.u32 %r9, %r3, 1;", UNDEFINED)
case(
    "an address",
    """
    <<mov.u64 %a, 0;>> add.u64 %a, %a, %in0; and.b64 %a, %a, 0; add.u64 %a, %a, %in0; ld.global.u32 %r9, [%a];
    """,
    UNDEFINED,
)
case(
    "an address in shared memory",
    f"""
    {PUT} bar.sync 0; <<mov.u32 %r3, 0;>> and.b32 %r3, %r3, 0; add.u32 %r3, %r3, %mine; ld.shared.u32 %r9,
    [%r3];
    """,
    UNDEFINED,
)
case(
    "an address to store to",
    """
    <<mov.u32 %r3, 0;>> and.b32 %r3, %r3, 0; add.u32 %r3, %r3, %mine; st.shared.u32 [%r3], 1;
    """,
    UNDEFINED,
)
case("a branch", "<<setp.eq.u32 %p, %t, 0;>> @%p bra T; mov.u32 %r9, 1; T:", UNDEFINED)
case("a compared value", "<<mov.u32 %r3, 0;>> setp.eq.u32 %p, %r3, 0; @%p bra T; mov.u32 %r9, 1; T:", UNDEFINED)
case(
    "an indexed branch",
    """
    <<mov.u32 %r3, 0;>> and.b32 %r3, %r3, 1; TS: .branchtargets T0, T1; brx.idx %r3, TS; T0: mov.u32 %r9, 1;
    T1:
    """,
    UNDEFINED,
)
case(
    "one branch only",
    """
    setp.eq.u32 %p, %t, 40; <<@%p||@!%p>> bra T; mov.u32 %r3, 1; T: @!%p add.u32 %r9, %r3, 1;
    """,
    UNDEFINED,
)
case(
    "a number of arrivals",
    f"""
    {init(64)} <<mov.u32 %r3, 1;>> mul.lo.u32 %r4, %r3, 0; add.u32 %r4, %r4, 1; mbarrier.arrive.shared.b64 _,
    [bar], %r4; {wait()}
    """,
    UNDEFINED,
)
case(
    "both halves",
    """
    mov.u32 %r3, 1; <<mov.u32 %r4, 2;>> mov.b64 %a, {%r3, %r4}; mov.b64 {%r5, %r6}, %a; add.u32 %r9, %r6, 1;
    """,
    UNDEFINED,
)
case("shared memory", f"<<{PUT}>> bar.sync 0; {GET}", "uninitialised")
case(
    "half of a word",
    """
    mad.lo.u32 %r3, %t, 2, %r1; cvt.u16.u32 %h0, %t; <<st.shared.u16 [%r3], %h0;||@%lane0 st.shared.u16 [%r3],
    %h0;>> bar.sync 0; ld.shared.u32 %r9, [data+4];
    """,
    "uninitialised",
)
case(
    "dynamic shared memory of copies",
    f"""
    {PUT} fence.proxy.async; bar.sync 0; @!%first bra S; {store("<<256||320>>")} {DRAIN} S:
    """,
    "uninitialised",
)

# ---- accesses --------------------------------------------------------------------------------------------------------

case("global bounds", "ld.global.u32 %r9, [%in0+<<16380||16384>>];", "out of bounds")
case("bounds below", "ld.global.u32 %r9, [%in0<<||+-4>>];", "out of bounds")
case("global alignment", "ld.global.v2.u32 {%r9, %r8}, [%in0+<<8||4>>];", "misaligned")
case("shared bounds", "st.shared.u32 [data+<<8188||8232>>], 1;", "out of bounds", warps=1)
case("shared alignment", "st.shared.v2.u32 [data+<<8||4>>], {%t, %t};", "misaligned", warps=1)
case(
    "bounds of a copy",
    f"""
    {init(1)} @%first {expect(256)} @!%first bra S; {load(256, source="%in0+<<16128||16144>>")} S: {wait()}
    """,
    "out of bounds",
)
case(
    "alignment of a copy",
    f"""
    {init(1)} @%first {expect(256)} @!%first bra S; {load(256, to="data+<<16||8>>")} S: {wait()}
    """,
    "misaligned",
)
case(
    "rank of a CTA",
    f"""
    mov.u32 %r3, <<1||2>>; {CLUSTER_SYNC} mapa.shared::cluster.u32 %r3, %mine, %r3; setp.eq.u32 %p, %rank, 0;
    @%p st.shared::cluster.u32 [%r3], 1; {CLUSTER_SYNC}
    """,
    "shared address",
    ctas=2,
)

# ---- deadlocks -------------------------------------------------------------------------------------------------------

STUCK = "deadlock"
case("arrivals", f"{init(64)} <<{arrive()}||@%lane0 {arrive()}>> {wait()}", STUCK)
case(
    "a spin on test_wait",
    f"""
    {init(2)} <<@%lane0||@%first>> {arrive()}
    {{ W: mbarrier.test_wait.parity.shared.b64 %q, [bar], 0; @!%q bra W; }}
    """,
    STUCK,
)
case(
    "a barrier of all",
    """
    <<||setp.eq.u32 %p, %w, 1; @%p bra HANG;>> bar.sync 1, 64; HANG: bar.sync 2, 64;
    """,
    STUCK,
)
case(
    "barriers in turn",
    """
    setp.eq.u32 %p, %w, 1; @%p bra B; bar.sync 1, 64; bar.sync 2, 64; bra D; B: bar.sync <<1||2>>, 64;
    bar.sync <<2||1>>, 64; D:
    """,
    STUCK,
)
case(
    "mbarriers in turn",
    f"""
    {init(1, 1)} setp.eq.u32 %p, %w, 1; @%p bra B; <<@%first {arrive(0)} {wait(1)}||{wait(1)} @%first
    {arrive(0)}>> bra D; B: {wait(0)} @%lane0 {arrive(1)} D:
    """,
    STUCK,
)
case(
    "a cluster",
    """
    setp.eq.u32 %p, %rank, 1; <<||@%p bar.sync 1, 64; @%p bar.sync 2, 96;>> barrier.cluster.arrive;
    barrier.cluster.wait;
    """,
    (STUCK, "barrier"),
    ctas=2,
)
case(
    "a whole warp",
    f"""
    {init(1)} <<||@%lane0 bra SKIP;>> shfl.sync.idx.b32 %r9, %t, 0, 31, -1; bra D; SKIP: {wait()} D:
    """,
    STUCK,
)
case(
    "a flag",
    """
    @%first st.global.u32 [%out0+8000], <<1||2>>; setp.ne.u32 %p, %w, 1; @%p bra D; W: ld.volatile.global.u32
    %r3, [%out0+8000]; setp.ne.u32 %p, %r3, 1; @%p bra W; D:
    """,
    STUCK,
)

# ---- global memory ---------------------------------------------------------------------------------------------------

SHARED_WORD = """
    @!%first bra D; setp.ne.u32 %p, %cta, 0; @%p bra READ; st.global.u32 [%out0+8000], 7; {release} bra D;
    READ: {acquire} ld.global.u32 %r9, [%out0+8000]; D:
    """
SPIN = "W: ld{how}.global.u32 %r3, [%out0+8192]; setp.ne.u32 %p, %r3, 1; @%p bra W;"


def published(
    name: str, *, release: str, acquire: str, kind: str | tuple[str, ...] = "global race", **launch: int
) -> None:
    """A case of a word that the first CTA writes and releases, and the other one acquires and reads."""
    case(name, SHARED_WORD.format(release=release, acquire=acquire), kind, **launch)


published(
    "a flag between CTAs",
    release="<<st.release.gpu.global.u32||st.global.u32>> [%out0+8192], 1;",
    acquire=SPIN.format(how="<<.acquire.gpu||>>"),
    grid=2,
)
published(
    "a flag by an atomic",
    release="<<fence.acq_rel.gpu;>> red.relaxed.gpu.global.add.u32 [%out0+8192], 1;",
    acquire=SPIN.format(how=".relaxed.gpu") + "<<fence.acq_rel.gpu;>>",
    grid=2,
)
published(
    "a flag by volatile accesses",
    release="<<membar.gl;>> st.volatile.global.u32 [%out0+8192], 1;",
    acquire=SPIN.format(how=".volatile") + "<<membar.gl;>>",
    grid=2,
)
case(
    "words of its own",
    """
    mov.u32 %r3, <<%cta||0>>; mad.wide.u32 %a, %r3, 256, %out0; mad.wide.u32 %a, %t, 4, %a; st.global.u32
    [%a], 1; mov.u32 %r9, 1;
    """,
    "global race",
    grid=3,
)
case(
    "atomics of all",
    """
    @%first <<red.global.add.u32 [%out0+8000], 1;||st.global.u32 [%out0+8000], 1;>>
    """,
    "global race",
    grid=3,
)
case(
    "atomics and a read",
    """
    @!%first bra D; red.global.add.u32 [%out0+8000], 1; setp.eq.u32 %p, %cta, 1; @%p
    ld.<<relaxed.gpu.||>>global.u32 %r9, [%out0+8000]; D:
    """,
    "global race",
    grid=3,
)
case(
    "a write that another CTA read",
    """
    @!%first bra D; setp.eq.u32 %p, %cta, 0; @%p ld.global.u32 %r9, [%out0+8000]; @!%p st.global.u32
    [%out0+<<8004||8000>>], 1; D:
    """,
    "global race",
    grid=2,
)
case(
    "bytes of neighbours",
    """
    cvt.u64.u32 %a, %cta; add.u64 %a, %a, %out0; @%first st.global.u8 [<<%a||%out0>>+8001], %t;
    """,
    "global race",
    grid=4,
)

published(
    "a flag whose scope is too small",
    release="st.release.<<gpu||cta>>.global.u32 [%out0+8192], 1;",
    acquire=SPIN.format(how=".acquire.<<gpu||cta>>"),
    grid=2,
)
published(
    "a flag by atomics of the cluster",
    release="red.release.<<gpu||cluster>>.global.add.u32 [%out0+8192], 1;",
    acquire=SPIN.replace("ld{how}.global.u32 %r3,", "atom.acquire.<<gpu||cluster>>.global.or.b32 %r3,").replace(
        "8192];", "8192], 0;"
    ),
    grid=2,
)
case(
    "atomics of the CTA",
    """
    @%first red.relaxed.<<gpu||cta>>.global.add.u32 [%out0+8000], 1;
    """,
    "global race",
    grid=3,
)
case(
    "a write after many releases",
    """
    @!%first bra D; setp.ne.u32 %p, %cta, 0; @%p bra R; mov.u32 %r3, 0; L: add.u32 %r3, %r3, 1; st.global.u32
    [%out0+8000], %r3; st.release.gpu.global.u32 [%out0+8192], %r3; setp.lt.u32 %q, %r3, 600; @%q bra L;
    <<||st.global.u32 [%out0+8000], 7;>> bra D; R: ld.acquire.gpu.global.u32 %r3, [%out0+8192]; setp.ne.u32 %p, %r3,
    600; @%p bra R; ld.global.u32 %r9, [%out0+8000]; D:
    """,
    "global race",
    grid=2,
)
case(
    "several readers before a write",
    f"""
    @!%first bra D; setp.eq.u32 %p, %cta, 2; @%p bra W; ld.global.u32 %r9, [%out0+8000]; red.release.gpu.global.add.u32
    [%out0+8192], 1; bra D; <<{SPIN.format(how=".acquire.gpu").replace("%r3, 1;", "%r3, 2;")}||W:
    atom.acq_rel.gpu.global.add.u32 %r3, [%out0+12000], 1;>> st.global.u32 [%out0+8000], 1; D:
    """,
    "global race",
    grid=3,
)
case(
    "a write that another CTA read after its own reads",
    """
    @!%first bra D; ld.global.u32 %r9, [%out0+8000]; setp.ne.u32 %p, %cta, 0; @%p bra D; mov.u32 %r3, 0; L: add.u32 %r3,
    %r3, 1; setp.lt.u32 %q, %r3, 4000000; @%q bra L; st.global.u32 [%out0+<<8004||8000>>], 1; D:
    """,
    "global race",
    grid=2,
)
case(
    "CTAs of a cluster",
    f"""
    setp.eq.u32 %p, %rank, 0; @%p st.global.u32 [%out0+8000], 7; <<{CLUSTER_SYNC}||bar.sync 0;>> @!%p ld.global.u32 %r9,
    [%out0+8000];
    """,
    "global race",
    ctas=2,
)
case(
    "an mbarrier between CTAs of a cluster",
    f"""
    {init(1)} setp.eq.u32 %p, %rank, 0; @!%p bra R; @!%first bra D; st.global.u32 [%out0+8000], 7; mov.u32 %r3, bar;
    mapa.shared::cluster.u32 %r3, %r3, %r2; mbarrier.arrive.<<release||relaxed>>.cluster.shared::cluster.b64 _, [%r3];
    bra D; R: {wait()} ld.global.u32 %r9, [%out0+8000]; D: {CLUSTER_SYNC}
    """,
    "global race",
    ctas=2,
)
published(
    "a flag in a cluster",
    release="st.release.<<cluster||cta>>.global.u32 [%out0+8192], 1;",
    acquire=SPIN.format(how=".acquire.cluster"),
    ctas=2,
)
published(
    "a flag of the device in a cluster",
    release="fence.acq_rel.gpu; st.relaxed.gpu.global.u32 [%out0+8192], 1;",
    acquire=SPIN.format(how=".relaxed.gpu") + "fence.acq_rel.gpu;",
    kind=(),
    ctas=2,
)
case(
    "a generic write before a bulk load",
    f"""
    {init(1)} setp.eq.u32 %p, %t, 40; @%p st.global.u32 [%out0+8192], 5;
    <<fence.proxy.async;||fence.proxy.async.shared::cta;>> bar.sync 0; @!%first bra S; {expect(16)}
    {load(16, source="%out0+8192")} S: {wait()} ld.shared.u32 %r9, [data];
    """,
    "missing proxy fence",
)
case(
    "a bulk load before a generic write",
    f"""
    {init(1)} @%first {expect(16)} @%first {load(16, source="%out0+8192")} {wait()} @%first
    st.global.u32 [%out0+8192], 5;
    """,
    (),
)
for earlier, instruction in (("write", "st.global.u32 [%a], 5;"), ("read", "ld.global.u32 %r9, [%a];")):
    case(
        f"a generic {earlier} before a bulk store",
        f"""
        {PUT} setp.eq.u32 %p, %t, 40; add.u64 %a, %out0, 4100; @%p {instruction} fence.proxy.async.shared::cta;
        <<fence.proxy.async.global;>> bar.sync 0; @!%first bra S; {store(256)} {DRAIN} S:
        """,
        "missing proxy fence",
    )
case(
    "a generic write before the bulk store of another CTA",
    f"""
    setp.eq.u32 %p, %rank, 0; @%p st.shared.u32 [%mine], %t; @!%p st.global.u32 [%out0+4100], 5;
    <<fence.proxy.async;||fence.proxy.async.shared::cta;>> {CLUSTER_SYNC} @!%p bra S; @!%first bra S; {store(256)}
    {DRAIN} S:
    """,
    "missing proxy fence",
    ctas=2,
)
case(
    "a bulk store before a generic write",
    f"""
    {PUT} fence.proxy.async; bar.sync 0; @!%first bra S; {store(256)} {DRAIN} st.global.u32 [%out0+4100], 5; S:
    """,
    (),
)


def loaded(name: str, *, write: str = "st.global.u32 [%out0+8000], 7;", acquire: str = "", **launch: int) -> None:
    """A case of a word that the first CTA writes, and the other one copies after it has seen a flag: all that its only
    thread does in global memory."""
    body = f"""
        {init(1)} @!%first ret; setp.ne.u32 %p, %cta, 0; @%p bra READ; {write} st.release.gpu.global.u32
        [%out0+8192], 1; bra D; READ: {SPIN.format(how=".acquire.gpu")} {acquire} {expect(16)}
        {load(16, source="%out0+8000")} {wait()} D:
    """
    case(name, body, "missing proxy fence" if "<<" in body else (), **{"grid": 2, **launch})


loaded("a fence before a flag", write="st.global.u32 [%out0+8000], 7; <<fence.proxy.async;>>")
loaded(
    "a fence behind the write",
    write="<<st.global.u32 [%out0+8000], 7; fence.proxy.async;||fence.proxy.async; st.global.u32 [%out0+8000], 7;>>",
)
loaded("a fence behind a flag", acquire="<<fence.proxy.async.global;||fence.proxy.async.shared::cta;>>")
case(
    "a fence before a flag that is passed on",
    f"""
    {init(1)} @!%first bra D; setp.ne.u32 %p, %cta, 0; @%p bra NEXT; st.global.u32 [%out0+8000], 7;
    <<fence.proxy.async;>> fence.acq_rel.gpu; red.relaxed.gpu.global.add.u32 [%out0+8192], 1; bra D;
    NEXT: {SPIN.format(how=".relaxed.gpu")} fence.acq_rel.gpu; setp.ne.u32 %p, %cta, 1; @%p bra READ;
    red.relaxed.gpu.global.add.u32 [%out0+8200], 1; bra D;
    READ: {SPIN.format(how=".acquire.gpu").replace("8192", "8200").replace("W", "V")} {expect(16)}
    {load(16, source="%out0+8000")} {wait()} D:
    """,
    "missing proxy fence",
    grid=3,
)
case(
    "the end of a bulk store",
    f"""
    {PUT} fence.proxy.async; bar.sync 0; @!%first bra S; {store(256)} cp.async.bulk.wait_group<<||.read>> 0;
    ld.global.u32 %r9, [%out0+4224]; {DRAIN} S:
    """,
    "global race",
)
# ---- what correct kernels do ----------------------------------------------------------------------------------------

case(
    "a value that all lanes store",
    """
    setp.eq.u32 %p, %w, 0; @%p st.shared.u32 [data], 3; bar.sync 0; ld.shared.u32 %r9, [data];
    """,
    (),
)
case(
    "volatile and plain reads",
    """
    @%first st.shared.u32 [data], 3; bar.sync 0; setp.eq.u32 %p, %w, 0; @%p ld.volatile.shared.u32 %r9,
    [data]; @!%p ld.shared.u32 %r9, [data];
    """,
    (),
)
case(
    "a volatile write to fresh memory",
    """
    st.volatile.shared.u32 [%mine], %t; bar.sync 0; ld.volatile.shared.u32 %r9, [%next];
    """,
    (),
)
case(
    "an update in place of halves",
    """
    mad.lo.u32 %r3, %t, 2, %r1; cvt.u16.u32 %h0, %t; st.shared.u16 [%r3], %h0; ld.shared.u16 %h1, [%r3];
    add.u16 %h1, %h1, 1; st.shared.u16 [%r3], %h1; ld.shared.u16 %h1, [%r3]; cvt.u32.u16 %r9, %h1;
    """,
    (),
)
case(
    "bytes of two warps in one word",
    """
    setp.eq.u32 %p, %l, 0; @!%p bra D; add.u32 %r3, %r1, %w; cvt.u16.u32 %h0, %w; mov.u32 %r4, 0; L:
    st.shared.u8 [%r3], %h0; ld.shared.u8 %h1, [%r3]; add.u32 %r4, %r4, 1; setp.lt.u32 %q, %r4, 9; @%q bra L;
    D: bar.sync 0; ld.shared.u32 %r9, [data];
    """,
    (),
    warps=4,
)
case(
    "barriers in quick succession",
    f"""
    mov.u32 %r4, 0; L: {PUT} bar.sync 1; {GET} bar.sync 2; add.u32 %r4, %r4, 1; setp.lt.u32 %p, %r4, 9; @%p
    bra L;
    """,
    (),
    warps=3,
)
case(
    "several elected readers",
    f"""
    {init(4, 1)} mov.u32 %r4, 0; @%first st.shared.u32 [data], 0; bar.sync 0; L: and.b32 %r5, %r4, 1; @!%lane0
    bra S; ld.shared.u32 %r9, [data]; {arrive(0)} S: @!%first bra R; {wait(0, "%r5")} st.shared.u32 [data],
    %r4; {arrive(1)} R: {wait(1, "%r5")} add.u32 %r4, %r4, 1; setp.lt.u32 %p, %r4, 9; @%p bra L;
    """,
    (),
    warps=4,
)
case(
    "a TMA ring",
    f"""
    {init(1, 2)} mov.u32 %r3, 0; mov.u32 %r6, bar; setp.eq.u32 %p, %w, 2; @%p bra PRODUCER; C: and.b32 %r4,
    %r3, 1; {wait(0, "%r4")} ld.shared.u32 %r9, [%mine]; <<fence.proxy.async;>> bar.warp.sync -1; @%lane0
    {arrive(1)} add.u32 %r3, %r3, 1; setp.lt.u32 %p, %r3, 12; @%p bra C; bra DONE; PRODUCER: @!%lane0 bra DONE;
    P: and.b32 %r4, %r3, 1;
    xor.b32 %r4, %r4, 1; {wait(1, "%r4")} {expect(256)} {load(256)} add.u32 %r3, %r3, 1; setp.lt.u32 %p, %r3,
    12; @%p bra P; {wait(0, "1")} DONE:
    """,
    "missing proxy fence",
    warps=3,
)
case(
    "two stages of stores",
    f"""
    mov.u32 %r4, 0; L: and.b32 %r5, %r4, 1; mad.lo.u32 %r5, %r5, 256, %mine; sub.u32 %r6, %r5, %mine; add.u32
    %r6, %r6, %r1; @%first cp.async.bulk.wait_group.read 1; bar.sync 0; st.shared.u32 [%r5], %r4;
    fence.proxy.async; bar.sync 0; @%first {store(256, "%r6")} add.u32 %r4, %r4, 1; setp.lt.u32 %p, %r4, 7;
    @%p bra L; @%first {DRAIN} bar.sync 0;
    """,
    (),
)
case(
    "values that are not used",
    """
    and.b32 %r3, %r4, %r5; setp.lt.u32 %p, %t, 1000; @%p mov.u32 %r3, 1; mov.b64 %d0, {%r3, %r6}; mov.b64
    {%r9, %r7}, %d0;
    """,
    (),
)
case(
    "a garbage value in shared memory",
    """
    @%first mov.u32 %r3, 4; st.shared.u32 [%mine], %r3; bar.sync 0; ld.shared.u32 %r9, [data];
    """,
    (),
)
case(
    "a lock of CTAs",
    """
    @!%first bra D; L: atom.global.acquire.gpu.cas.b32 %r3, [%out0+8000], 0, 1; setp.ne.u32 %p, %r3, 0; @%p
    bra L; ld.global.u32 %r4, [%out0+8004]; add.u32 %r4, %r4, 1; st.global.u32 [%out0+8004], %r4;
    atom.global.release.gpu.exch.b32 %r3, [%out0+8000], 0; D:
    """,
    (),
    grid=5,
)
case(
    "vectors and words in global memory",
    """
    mad.wide.u32 %a, %t, 32, %out0; setp.eq.u32 %p, %cta, 0; @%p st.global.v4.u32 [%a+8192], {%t, %t, %t, %t};
    @!%p st.global.u32 [%a+<<8208||8204>>], %t;
    """,
    "global race",
    grid=2,
)
case(
    "words and vectors in global memory",
    """
    mad.wide.u32 %a, %t, 32, %out0; setp.eq.u32 %p, %cta, 0; @%p st.global.u32 [%a+<<8208||8204>>], %t;
    @!%p ld.global.v4.u32 {%r5, %r6, %r7, %r8}, [%a+8192];
    """,
    "global race",
    grid=2,
)
case(
    "the last CTA sums up",
    """
    @%first st.global.u32 [%out+8000], 3; bar.sync 0; @!%first bra D; fence.acq_rel.gpu; atom.global.add.u32
    %r3, [%out0+12000], 1; fence.acq_rel.gpu; setp.ne.u32 %p, %r3, 3; @%p bra D; ld.global.u32 %r4,
    [%out0+8000]; ld.global.u32 %r5, [%out0+8768]; add.u32 %r9, %r4, %r5; D:
    """,
    (),
    grid=4,
)


def kinds(c: Case, wrong: int | None, schedule: str, seed: int) -> list[str]:
    return [event.kind for event in c.run(wrong, schedule, seed)]


@pytest.mark.parametrize("c", CASES, ids=lambda c: c.name)
def test_right(c: Case) -> None:
    for schedule, seed in SCHEDULES:
        assert not c.run(None, schedule, seed), schedule


WRONG = [(c, k) for c in CASES for k in range(c.body.count("<<"))]


@pytest.mark.parametrize(("c", "wrong"), WRONG, ids=[f"{c.name} {k}" for c, k in WRONG])
def test_wrong(c: Case, wrong: int) -> None:
    expected = {c.kind} if isinstance(c.kind, str) else set(c.kind)
    for schedule, seed in SCHEDULES:
        assert expected & set(found := kinds(c, wrong, schedule, seed)), (schedule, seed, found)


def test_marks_lie_where_they_should() -> None:
    """Every case has a mark, or no kind: then it must only be silent."""
    assert [c.name for c in CASES if bool(c.kind) != ("<<" in c.body)] == []


def test_implicit_waits() -> None:
    """Results of tcgen05.ld that are used without a wait: fine if ptxas inserts it, and it then counts as a wait."""
    (c,) = (c for c in CASES if c.name == "the use of a result")
    assert kinds(c, 0, "eager", 0) == ["register in flight"]
    assert not c.run(0, "eager", 0, implicit_waits=True)


FENCED = [(c, k) for c, k in WRONG if c.tensor_fences]


@pytest.mark.parametrize(("c", "wrong"), FENCED, ids=[f"{c.name} {k}" for c, k in FENCED])
def test_tensor_fences_are_an_option(c: Case, wrong: int) -> None:
    """Without it nothing but a fence is missing."""
    for schedule, seed in SCHEDULES:
        assert not c.run(wrong, schedule, seed, tensor_fences=False), schedule


def test_a_missing_tensor_fence_names_both_instructions() -> None:
    (c,) = (c for c in CASES if c.name == "fences between a store and a product")
    lines = (HEADER + c.version(None)).split("\n")
    st, mma = (next(n for n, line in enumerate(lines, 1) if text in line) for text in (STORE_T, ADD))
    for wrong, what in enumerate(("before_thread_sync behind", "after_thread_sync behind the wait for")):
        (event, *_) = c.run(wrong, "eager", 0)
        assert (event.kind, event.line) == ("missing tensor fence", mma)
        assert f" without a tcgen05.fence::{what} tcgen05.st at PTX line {st} by " in event.message
