"""Memory instructions of the emulator: state spaces, types and vectors, addresses, what is refused."""

import re

import numpy as np
import pytest

from cute_ssd.emulator.decode import UnsupportedInstruction
from cute_ssd.emulator.engine import Outcome
from tests.ptx_runner import on_silicon, run

pytestmark = pytest.mark.silicon

SIZES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
VECTORS = [("b8", 1), ("b8", 2), ("b8", 4), ("b16", 1), ("b16", 2), ("b16", 4), ("b32", 1), ("b32", 2), ("b32", 4),
           ("b32", 8), ("b64", 1), ("b64", 2), ("b64", 4), ("b128", 1)]  # fmt: skip
VARIABLES = ".shared .align 32 .b8 buf[1024]; .local .align 32 .b8 depot[64];"
REGISTERS = """.reg .pred %p<8>; .reg .b16 %h<32>; .reg .b32 %r<32>; .reg .b64 %d<32>; .reg .b128 %q<4>;
.reg .b32 %t, %s; .reg .b64 %g<8>, %l;"""


def launch(body: str, *arrays: np.ndarray, grid: int = 1, variables: str = VARIABLES, **options: object) -> Outcome:
    """Runs `body` in every thread %t: %g<k> points to its row of array k, %s to its 32 bytes of `buf`."""
    params = ", ".join(f".param .u64 p{k}" for k in range(len(arrays)))
    text = f".visible .entry k({params}) {{ {REGISTERS} {variables}\n"
    text += "mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mad.lo.s32 %t, %r1, %r2, %r0;\n"
    for k, a in enumerate(arrays):
        text += f"ld.param.u64 %g{k}, [p{k}]; mad.wide.u32 %g{k}, %t, {a.nbytes // len(a)}, %g{k};\n"
    if " buf[" in variables:
        text += "mov.u32 %s, buf; mov.u32 %r1, %laneid; mad.lo.s32 %s, %r1, 32, %s;\n"
    placed = list(map(aligned, arrays))
    outcome = run(f"{text}{body}\nret; }}", *placed, grid=(grid, 1, 1), **options)
    for array, copy in zip(arrays, placed, strict=True):
        array[...] = copy
    return outcome


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy at an address that suits every vector."""
    memory = np.empty(array.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 128
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def registers(kind: str, n: int) -> str:
    """Names of n registers of a type, as an operand."""
    letter = {1: "h", 2: "h", 4: "r", 8: "d", 16: "q"}[SIZES[kind[1:]]]
    names = [f"%{letter}{k + (3 if letter == 'r' else 0)}" for k in range(n)]
    return names[0] if n == 1 else "{" + ", ".join(names) + "}"


def events(outcome: Outcome) -> list[str]:
    return [event.kind for event in outcome.events]


# ---- ld and st ------------------------------------------------------------------------------------------------------

PATHS = {  # PTX that sets %d9, the address; the state space that st and ld name
    "shared": ("cvt.u64.u32 %d9, %s;", ".shared"),
    "shared::cta": ("cvt.u64.u32 %d9, %s;", ".shared::cta"),
    "shared::cluster": ("cvt.u64.u32 %d9, %s;", ".shared::cluster"),
    "local": ("mov.u64 %d9, depot; add.s64 %d9, %d9, 32;", ".local"),
    "global": ("mov.u64 %d9, %g1;", ".global"),
    "generic shared": ("cvt.u64.u32 %d9, %s; cvta.shared.u64 %d9, %d9;", ""),
    "generic local": ("mov.u64 %d9, depot; cvta.local.u64 %d9, %d9;", ""),
    "generic global": ("cvta.global.u64 %d9, %g1;", ""),
}


@pytest.mark.parametrize("active", [32, 7])
@pytest.mark.parametrize("path", PATHS)
def test_every_type_and_vector_travels_through_every_space(path, active):
    address, space = PATHS[path]
    source, through = noise(32, len(VECTORS), 32), noise(32, 32, seed=1)
    result = np.zeros_like(source)
    # PTX has vectors of 32 bytes in global memory only.
    vectors = [v for v in VECTORS if not on_silicon() or "global" in path or v[1] * SIZES[v[0][1:]] < 32]
    body = [f"mov.u32 %r1, {active}; setp.ge.u32 %p1, %t, %r1; @%p1 ret;", address]
    for k, (kind, n) in enumerate(vectors):
        v = f".v{n}" if n > 1 else ""
        names = registers(kind, n)
        body += [
            f"ld.global{v}.{kind} {names}, [%g0+{32 * k}]; st{space}{v}.{kind} [%d9], {names};",
            "mov.u32 %r3, 0; mov.b64 %d0, 0; mov.b16 %h0, 0;",
            f"ld{space}{v}.{kind} {names}, [%d9]; st.global{v}.{kind} [%g2+{32 * k}], {names};",
        ]
    launch("\n".join(body), source, through, result, sanitize=True)
    for k, (kind, n) in enumerate(vectors):
        size = n * SIZES[kind[1:]]
        assert (result[:active, k, :size] == source[:active, k, :size]).all(), (kind, n)
        assert not result[:, k, size:].any() and not result[active:].any(), (kind, n)


@pytest.mark.parametrize("kind, register", [
    (kind, register)
    for kind in ("b8", "u8", "s8", "b16", "u16", "s16", "b32", "u32", "s32", "f32")
    for register in ("b16", "b32", "b64")
    if SIZES[kind[1:]] <= SIZES[register[1:]]
])  # fmt: skip
def test_loads_extend_to_the_register(kind, register):
    size, width = SIZES[kind[1:]], SIZES[register[1:]]
    source = noise(32, size)
    result = np.zeros((32, 8), np.uint8)
    name = registers(register, 1)
    launch(f"ld.global.{kind} {name}, [%g0]; st.global.{register} [%g1], {name};", source, result)
    values = [int.from_bytes(row.tobytes(), "little", signed=kind[0] == "s") % (1 << 8 * width) for row in source]
    assert result[:, :width].copy().view(f"u{width}")[:, 0].tolist() == values


def test_the_upper_half_of_a_slot_stays_zero():
    """A 16-bit register that was loaded signed is 16 bits also for instructions that read 32."""
    source, result = np.full((32, 1), 0x80, np.uint8), np.zeros((32, 1), np.uint32)
    launch("ld.global.s8 %h1, [%g0]; mov.b32 %r3, {%h1, %h1}; st.global.b32 [%g1], %r3;", source, result)
    assert (result == 0xFF80FF80).all()


def test_stores_take_constants_and_wider_registers():
    source, result = np.full((32, 1), 0x0123456789ABCDEF, np.uint64), np.zeros((32, 8), np.uint32)
    body = """ld.global.b64 %d1, [%g0]; mov.u32 %r3, 0x11223344;
    st.global.b8 [%g1], %r3; st.global.b16 [%g1+2], %d1; st.global.b32 [%g1+4], %d1; st.global.f32 [%g1+8], 0f3F800000;
    st.global.v2.b32 [%g1+16], {-1, %r3}; st.global.v2.u16 [%g1+24], {0x12345, 7}; mov.u32 %r4, %laneid;
    st.global.u32 [%g1+28], %r4;"""
    launch(body, source, result)
    assert (result[:, :7] == [0xCDEF0044, 0x89ABCDEF, 0x3F800000, 0, 0xFFFFFFFF, 0x11223344, 0x72345]).all()
    assert (result[:, 7] == np.arange(32)).all()


def test_sinks_and_hints():
    source, result = noise(32, 16).view(np.uint32), np.zeros((32, 4), np.uint32)
    hints = ["ca", "nc", "L1::evict_last", "L2::128B", "nc.L1::no_allocate.L2::256B", "volatile", "relaxed.sys"]
    hints += ["acquire.gpu", "weak"]
    body = ["createpolicy.fractional.L2::evict_last.b64 %d9, 0f3F000000;"]
    for hint in hints:
        body.append(f"ld.{hint}.global.v4.b32 {{%r3, _, %r4, _}}, [%g0];".replace(".nc.global", ".global.nc"))
        body.append("st.global.cs.v2.b32 [%g1], {%r3, %r4};")
    body.append("ld.mmio.relaxed.sys.global.b32 %r3, [%g0]; ld.mmio.relaxed.sys.global.b32 %r4, [%g0+8];")
    body.append("st.global.cs.v2.b32 [%g1], {%r3, %r4};")
    body.append("ld.global.L2::cache_hint.b32 %r5, [%g0+4], %d9;")
    body.append("st.global.L1::no_allocate.L2::cache_hint.b32 [%g1+8], %r5, %d9;")
    body.append("ldu.global.b32 %r5, [%g0+12]; st.release.gpu.global.b32 [%g1+12], %r5;")
    launch("\n".join(body), source, result, sanitize=True)
    assert (result == source[:, [0, 2, 1, 3]]).all()


def test_prefetches_change_nothing():
    source, discarded = noise(32, 128), noise(32, 128)  # the second may hold anything afterwards
    before = source.copy()
    body = """prefetch.global.L2 [%g0]; prefetch.global.L1 [%g0+64]; prefetchu.L1 [%g0];
    prefetch.global.L2::evict_last [%g0]; prefetch.tensormap [%g0]; discard.global.L2 [%g1], 128;
    applypriority.global.L2::evict_normal [%g0], 128;
    mov.u32 %r1, 128; createpolicy.range.global.L2::evict_last.L2::evict_unchanged.b64 %d1, [%g0], 128, %r1;
    createpolicy.cvt.L2.b64 %d2, 7;"""
    launch(body, source, discarded)
    assert (source == before).all()


@pytest.mark.emulator_only("which lane wins is not specified")
def test_the_highest_lane_wins_a_location():
    result = np.zeros((1, 4), np.uint32)
    launch(
        "ld.param.u64 %d1, [p0]; st.global.u32 [%d1], %t; st.shared.u32 [buf], %t; ld.shared.u32 %r3, [buf];"
        "st.global.u32 [%d1+4], %r3;",
        result,
    )
    assert result[0].tolist() == [31, 31, 0, 0]


@pytest.mark.emulator_only("a device does not mark what nothing wrote")
def test_poison():
    """What nothing wrote is ones: NaN in every floating-point format."""
    result = np.zeros((32, 2), np.uint64)
    launch(
        "mov.u64 %d3, depot; ld.local.b64 %d1, [%d3+56]; ld.shared.b64 %d2, [%s];st.global.v2.b64 [%g0], {%d1, %d2};",
        result,
    )
    assert (result == 2**64 - 1).all()


def test_parameters():
    """Of the kernel by name and by address, of a call."""
    block = np.arange(64, dtype=np.uint8)
    result = np.zeros((32, 16), np.uint32)
    of_a_call = """{ .param .b64 wide; .param .b32 narrow; .param .align 8 .b8 both[8];
      st.param.b64 [wide], %d4; st.param.b32 [narrow], 77; st.param.b32 [both+4], %r1; st.param.b8 [both], 0x1ff;
      ld.param.b64 %d6, [wide]; ld.param.b32 %r8, [narrow]; ld.param.v2.b32 {%r9, %r10}, [both]; }"""
    if on_silicon():  # ptxas crashes where there is no call
        of_a_call = "mov.b64 %d6, %d4; mov.b32 %r8, 77; mov.b32 %r9, 255; mov.b32 %r10, %r1;"
    text = f""".visible .entry k(.param .u64 out, .param .align 64 .b8 block[64], .param .b32 last) {{
    .reg .b16 %h<4>; .reg .b32 %r<16>; .reg .b64 %d<8>;
    ld.param.u64 %d1, [out]; mov.u32 %r1, %tid.x; mad.wide.u32 %d1, %r1, 64, %d1;
    ld.param.v2.b8 {{%h1, %h2}}, [block+6]; st.global.v2.b8 [%d1], {{%h1, %h2}};
    ld.param.s8 %r2, [last+3]; st.global.b32 [%d1+4], %r2;
    ld.param.v4.b32 {{%r3, %r4, %r5, %r6}}, [block+16]; st.global.v4.b32 [%d1+16], {{%r3, %r4, %r5, %r6}};
    mov.b64 %d2, block; cvta.param.u64 %d3, %d2; ld.b32 %r7, [%d3+60]; st.global.b32 [%d1+8], %r7;
    ld.param.v2.b64 {{%d4, %d5}}, [%d2+32]; st.global.v2.b64 [%d1+32], {{%d4, %d5}};
    {of_a_call}
    st.global.b64 [%d1+48], %d6; st.global.v2.b32 [%d1+56], {{%r8, %r10}}; st.global.b32 [%d1+12], %r9; ret; }}"""
    run(text, result, block.tobytes().ljust(64, b"\0"), 0x80FFFFFF, sanitize=True)
    words = block.view(np.uint32)
    row = [0x0706, 0xFFFFFF80, words[15], 255, *words[4:8], *words[8:12], *words[8:10], 77]
    assert (result[:, :15] == row).all() and (result[:, 15] == np.arange(32)).all()


def test_constants_of_the_module():
    result = np.zeros((32, 4), np.uint32)
    text = """.version 8.8\n.target sm_100a\n.address_size 64
    .const .align 4 .b32 table[2] = {5, 6}; .global .align 8 .b64 value = 7;
    .visible .entry k(.param .u64 out) { .reg .b32 %r<4>; .reg .b64 %d<4>;
    ld.param.u64 %d1, [out]; mov.u32 %r1, %tid.x; mad.wide.u32 %d1, %r1, 16, %d1;
    ld.const.b32 %r2, [table+4]; ld.global.b64 %d2, [value]; mov.u64 %d3, table; ld.const.b32 %r3, [%d3];
    st.global.v2.b32 [%d1], {%r2, %r3}; st.global.b64 [%d1+8], %d2; ret; }"""
    run(text, result)
    assert (result == [6, 5, 7, 0]).all()


@pytest.mark.parametrize("body, kind", [
    ("ld.global.b32 %r3, [%g0+2];", "misaligned"),
    ("ld.global.v4.b32 {%r3, %r4, %r5, %r6}, [%g0+8];", "misaligned"),
    ("ld.global.v2.b16 {%h1, %h2}, [%g0+2];", "misaligned"),
    ("st.shared.v2.b64 [buf+8], {%d1, %d2};", "misaligned"),
    ("mov.u64 %d1, depot; ld.local.b32 %r3, [%d1+2];", "misaligned"),
    ("ld.b32 %r3, [%g0+1];", "misaligned"),
    ("ld.global.b32 %r3, [%g0+64];", "out of bounds"),
    ("ld.global.b64 %d1, [%g0-4096];", "out of bounds"),
    ("mov.u64 %d1, 0; ld.b32 %r3, [%d1];", "out of bounds"),
    ("st.shared.b32 [buf+1024], 0;", "out of bounds"),
    ("ld.shared.b32 %r3, [buf-4];", "out of bounds"),
    ("mov.u32 %r4, 0; ld.shared.b32 %r3, [%r4];", "out of bounds"),
    ("mov.u64 %d1, depot; st.local.b64 [%d1+64], %d1;", "out of bounds"),
    ("mov.u64 %d1, depot; cvta.local.u64 %d1, %d1; ld.b64 %d2, [%d1+60];", "out of bounds"),
    ("mov.u32 %r4, 0x3000400; ld.shared::cluster.b32 %r3, [%r4];", "shared address"),
    ("mov.u32 %r4, 0x1000400; ld.shared.b32 %r3, [%r4];", "shared address"),
    ("mov.u64 %d1, depot; cvta.local.u64 %d1, %d1; atom.add.u32 %r3, [%d1], 1;", "local atomic"),
    ("atom.global.add.u64 %d1, [%g0+4], 1;", "misaligned"),
    ("cp.async.cg.shared.global [buf+8], [%g0], 16;", "misaligned"),
    ("cp.async.ca.shared.global [buf], [%g0+4], 8;", "misaligned"),
    ("mov.u32 %r3, 5; cp.async.ca.shared.global [buf], [%g0], 4, %r3;", "copy"),
    ("mapa.shared::cluster.u32 %r3, %s, 1;", "shared address"),
])  # fmt: skip
@pytest.mark.parametrize("guard", ["", "@%p1 "])
def test_faults(body, kind, guard):
    """By the whole warp and by one lane."""
    *first, last = re.findall(r"[^;]+;", body)
    body = f"setp.eq.u32 %p1, %t, 31; mov.u64 %d1, 0; mov.u64 %d2, 0; {''.join(first)} {guard}{last.strip()}"
    outcome = launch(body, noise(32, 64), check=False)
    assert events(outcome) == [kind] and outcome.events[0].fatal


# ---- addresses ------------------------------------------------------------------------------------------------------


def test_generic_addresses_know_their_space():
    result = np.zeros((32, 8), np.uint32)
    checks = [(a, s) for a in ("%d1", "%d2", "%g0") for s in ("shared", "shared::cluster", "local", "global")]
    body = "cvt.u64.u32 %d1, %s; cvta.shared.u64 %d1, %d1; mov.u64 %d2, depot; cvta.local.u64 %d2, %d2; mov.u32 %r3, 0;"
    for k, (address, space) in enumerate(checks):
        body += f"isspacep.{space} %p1, {address}; @%p1 or.b32 %r3, %r3, {1 << k};"
    body += """st.global.b32 [%g0], %r3; cvta.to.shared.u64 %d3, %d1; cvt.u32.u64 %r4, %d3; sub.s32 %r4, %r4, %s;
    st.global.b32 [%g0+4], %r4; cvta.to.local.u64 %d3, %d2; mov.u64 %d4, depot; sub.s64 %d3, %d3, %d4;
    st.global.b64 [%g0+8], %d3; cvta.to.global.u64 %d3, %g0; sub.s64 %d3, %d3, %g0; st.global.b64 [%g0+16], %d3;"""
    launch(body, result)
    assert (result[:, 0] == sum(1 << k for k in (0, 1, 6, 11))).all() and not result[:, 1:].any()


@pytest.mark.parametrize("generic", [False, True])
def test_cluster_addresses(generic):
    """Each CTA writes into its neighbour; shared::cta does not hold what belongs to the neighbour."""
    result = np.zeros((64, 4), np.uint32)
    if generic:
        body = """cvt.u64.u32 %d1, %s; cvta.shared.u64 %d1, %d1; mapa.u64 %d2, %d1, %r4; getctarank.u64 %r5, %d2;
        isspacep.shared::cta %p1, %d2; isspacep.shared::cluster %p2, %d2; st.u32 [%d2], %t;"""
    else:
        body = """mapa.shared::cluster.u32 %r6, %s, %r4; getctarank.shared::cluster.u32 %r5, %r6; cvt.u64.u32 %d2, %r6;
        cvta.shared.u64 %d2, %d2; isspacep.shared::cta %p1, %d2; isspacep.shared::cluster %p2, %d2;
        st.shared::cluster.u32 [%r6], %t;"""
    body = f"""mov.u32 %r3, %cluster_ctarank; xor.b32 %r4, %r3, 1; {body} barrier.cluster.arrive; barrier.cluster.wait;
    ld.shared.u32 %r7, [%s]; selp.u32 %r8, 1, 0, %p1; selp.u32 %r9, 1, 0, %p2;
    st.global.v4.b32 [%g0], {{%r7, %r5, %r8, %r9}};"""
    launch(body, result, grid=2, cluster=(2, 1, 1), sanitize=True)
    threads = np.arange(64)
    assert (result[:, 0] == threads ^ 32).all()
    assert (result[:, 1] == 1 - threads // 32).all() and (result[:, 2:] == [0, 1]).all()


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("instruction", [
    "ld.global.unknown.b32 %r3, [%g0];", "ld.global.v8.b64 {%d1,%d2,%d3,%d4,%d5,%d6,%d7,%d8}, [%g0];",
    "ld.global.b64 %r3, [%g0];", "ld.global.v2.b32 {%r3, %r4, %r5}, [%g0];", "ld.acquire.global.b32 %r3, [%g0];",
    "ld.global.b32 %r3, [%r4];", "ld.global.b32 %r3, [%g0], %d1;",
    "ld.param.b64 %d1, [p0+4];", "st.param.b64 [p0], %d1;", "st.param.b64 [%g0], %d1;",
    "st.global.b32 [%g0], %h1;", "st.global.acquire.gpu.b32 [%g0], %r3;", "st.global.f64 [%g0], 0f3F800000;",
    "multimem.ld_reduce.global.add.u32 %r3, [%g0];", "cvta.shared.u32 %r3, %r4;",
    "atom.global.add.f16 %h1, [%g0], %h2;",
    "atom.global.add.noftz.f32 %r3, [%g0], %r4;", "atom.global.min.f32 %r3, [%g0], %r4;",
    "atom.global.exch.b128 %q1, [%g0], %q2;",
    "atom.shared.add.v2.f32 {%r3, %r4}, [%s], {%r5, %r6};", "atom.global.cas.b32 %r3, [%g0], %r4;",
    "red.global.cas.b32 [%g0], %r3, %r4;", "red.async.relaxed.cluster.shared::cluster.add.u32 [%s], %r3, [%s];",
    "st.async.mmio.release.sys.global.b32 [%g0], %r3;", "cp.async.cg.shared.global [%s], [%g0], 8;",
    "cp.async.ca.shared.global [%s], [%g0], %r3;", "cp.async.bulk.unknown [%s], [%g0], 16;",
])  # fmt: skip
def test_what_is_not_emulated_is_refused(instruction):
    with pytest.raises(UnsupportedInstruction, match=r"PTX line \d+"):
        launch(instruction, noise(32, 32))
