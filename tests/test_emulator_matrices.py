"""ldmatrix, stmatrix, movmatrix and mma.sync against the fragment layouts of the PTX ISA."""

import numpy as np
import pytest

from cute_ssd.emulator.decode import UnsupportedInstruction
from tests import ptx_runner

pytestmark = pytest.mark.silicon

LANE = np.arange(32)


def warp_kernel(body: str, n_in: int, n_out: int, threads: int = 32) -> str:
    """Registers %a0.. of a warp come from in[k][lane], %d0.. go to out[k][lane]; %s is the shared base, %t the lane."""
    load = "".join(f"ld.global.b32 %a{k}, [%in + {128 * k}];\n" for k in range(n_in))
    store = "".join(f"st.global.b32 [%out + {128 * k}], %d{k};\n" for k in range(n_out))
    return f"""
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(.param .u64 pin, .param .u64 pout) {{
  .reg .b32 %t, %s, %x<8>, %a<{n_in + 1}>, %d<{n_out + 1}>; .reg .b64 %in, %out, %w;
  mov.u32 %t, %tid.x; mov.u32 %s, smem;
  ld.param.u64 %in, [pin]; mad.wide.u32 %in, %t, 4, %in;
  ld.param.u64 %out, [pout]; mad.wide.u32 %out, %t, 4, %out;
  {load} {body} {store} ret;
}}"""


def run_warp(body: str, inputs: np.ndarray, n_out: int, **options) -> np.ndarray:
    out = np.zeros((n_out, 32), np.uint32)
    inputs = np.ascontiguousarray(inputs, np.uint32).reshape(-1, 32)
    ptx_runner.run(warp_kernel(body, len(inputs), n_out), inputs, out, shared=4096, **options)
    return out


def words(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, (count, 32), dtype=np.uint32)


def fragments(rows: np.ndarray, transposed: bool) -> np.ndarray:
    """The register that a lane gets of an 8 x 8 matrix of u16."""
    m = rows.T if transposed else rows
    return m[LANE // 4, 2 * (LANE % 4)] | m[LANE // 4, 2 * (LANE % 4) + 1].astype(np.uint32) << 16


def vector(name: str, n: int) -> str:
    return "{" + ", ".join(f"%{name}{k}" for k in range(n)) + "}"


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count: int, transposed: bool) -> None:
    """Rows of 16 bytes 48 bytes apart, in an order that the addresses scramble."""
    data = words(4)
    trans = ".trans" if transposed else ""
    out = run_warp(
        f"""mad.lo.u32 %x0, %t, 48, %s;
        st.shared.v4.b32 [%x0], {{%a0, %a1, %a2, %a3}}; bar.warp.sync -1;
        mul.lo.u32 %x1, %t, 5; add.u32 %x1, %x1, 3; and.b32 %x1, %x1, 31; mad.lo.u32 %x1, %x1, 48, %s;
        ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {vector("d", count)}, [%x1];""",
        data,
        count,
        sanitize=True,
    )
    rows = np.ascontiguousarray(data.T).view(np.uint16)[(5 * LANE + 3) % 32]  # row of lane i
    for k in range(count):
        np.testing.assert_array_equal(out[k], fragments(rows[8 * k : 8 * k + 8], transposed))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix(count: int, transposed: bool) -> None:
    data = words(count)
    trans = ".trans" if transposed else ""
    out = run_warp(
        f"""mad.lo.u32 %x0, %t, 32, %s;
        stmatrix.sync.aligned.m8n8.x{count}{trans}.shared::cta.b16 [%x0], {vector("a", count)}; bar.warp.sync -1;
        setp.ge.u32 %p, %t, {8 * count}; @%p bra DONE;
        ld.shared.v4.b32 {vector("d", 4)}, [%x0]; bra END;
        DONE: mov.b32 %d0, 0; mov.b32 %d1, 0; mov.b32 %d2, 0; mov.b32 %d3, 0; END:""".replace(
            "mad", ".reg .pred %p; mad", 1
        ),
        data,
        4,
        sanitize=True,
    )
    rows = np.ascontiguousarray(out.T).view(np.uint16)
    for k in range(count):
        np.testing.assert_array_equal(data[k], fragments(rows[8 * k : 8 * k + 8], transposed))


def test_generic_address_and_offset() -> None:
    data = words(4)
    out = run_warp(
        """mad.lo.u32 %x0, %t, 16, %s; st.shared.v4.b32 [%x0+64], {%a0, %a1, %a2, %a3}; bar.warp.sync -1;
        cvt.u64.u32 %w, %x0; cvta.shared.u64 %w, %w;
        ldmatrix.sync.aligned.m8n8.x1.b16 {%d0}, [%w+64];""",
        data,
        1,
    )
    np.testing.assert_array_equal(out[0], fragments(np.ascontiguousarray(data.T).view(np.uint16)[:8], False))


def test_movmatrix() -> None:
    data = words(1)
    out = run_warp("movmatrix.sync.aligned.m8n8.trans.b16 %d0, %a0;", data, 1)
    rows = np.zeros((8, 8), np.uint16)
    rows[LANE // 4, 2 * (LANE % 4)] = data[0]
    rows[LANE // 4, 2 * (LANE % 4) + 1] = data[0] >> 16
    np.testing.assert_array_equal(out[0], fragments(rows, True))


@pytest.mark.parametrize(("step", "offset", "kind"), [(16, 8, "misaligned"), (16, 4096, "out of bounds")])
def test_bad_addresses(step: int, offset: int, kind: str) -> None:
    body = f"mad.lo.u32 %x0, %t, {step}, %s; ldmatrix.sync.aligned.m8n8.x4.shared.b16 {vector('d', 4)}, [%x0+{offset}];"
    outcome = ptx_runner.run(
        warp_kernel(body, 0, 4), np.zeros(32, np.uint32), np.zeros((4, 32), np.uint32), shared=4096, check=False
    )
    assert [e.kind for e in outcome.events] == [kind]


# ---- mma.sync --------------------------------------------------------------------------------------------------------

G, T = LANE // 4, LANE % 4


def elements(matrix: np.ndarray, kind: str) -> np.ndarray:
    """The bit patterns of float32 numbers that `kind` holds exactly."""
    if kind == "f16":
        return matrix.astype(np.float16).view(np.uint16).astype(np.uint32)
    bits = matrix.astype(np.float32).view(np.uint32)
    return bits >> 16 if kind == "bf16" else bits


def fragments_of_a(bits: np.ndarray, kind: str) -> list[np.ndarray]:
    k = bits.shape[1]
    if kind == "tf32":
        return [bits[G + 8 * (i % 2), T + 4 * (i // 2)] for i in range(k // 2)]
    return [
        bits[G + 8 * (i % 2), 2 * T + 8 * (i // 2)] | bits[G + 8 * (i % 2), 2 * T + 1 + 8 * (i // 2)] << 16
        for i in range(k // 4)
    ]


def fragments_of_b(bits: np.ndarray, kind: str) -> list[np.ndarray]:
    k = len(bits)
    if kind == "tf32":
        return [bits[T + 4 * i, G] for i in range(k // 4)]
    return [bits[2 * T + 8 * i, G] | bits[2 * T + 1 + 8 * i, G] << 16 for i in range(k // 8)]


def matrix_d(registers: np.ndarray, half: bool) -> np.ndarray:
    d = np.zeros((16, 8), np.float32)
    if half:
        pairs = np.ascontiguousarray(registers).view(np.float16).reshape(2, 32, 2)
        for i in range(2):
            for p in range(2):
                d[G + 8 * i, 2 * T + p] = pairs[i, :, p]
    else:
        values = registers.view(np.float32)
        for i in range(4):
            d[G + 8 * (i // 2), 2 * T + i % 2] = values[i]
    return d


SHAPES = [("m16n8k8", "f16"), ("m16n8k16", "f16"), ("m16n8k8", "bf16"), ("m16n8k16", "bf16"), ("m16n8k4", "tf32")]
SHAPES.append(("m16n8k8", "tf32"))


@pytest.mark.parametrize(("shape", "kind", "half"), [(*s, False) for s in SHAPES] + [(*s, True) for s in SHAPES[:2]])
def test_mma(shape: str, kind: str, half: bool) -> None:
    """Small integers: every sum is exact, so a wrong place of an element cannot hide in a tolerance."""
    k = int(shape[6:])
    rng = np.random.default_rng(1)
    a, b = rng.integers(-8, 9, (16, k)).astype(np.float32), rng.integers(-8, 9, (k, 8)).astype(np.float32)
    c = rng.integers(-8, 9, (16, 8)).astype(np.float32)
    registers_a = fragments_of_a(elements(a, kind), kind)
    registers_b = fragments_of_b(elements(b, kind), kind)
    nd = 2 if half else 4
    if half:
        bits = elements(c, "f16")
        registers_c = [bits[G + 8 * i, 2 * T] | bits[G + 8 * i, 2 * T + 1] << 16 for i in range(2)]
    else:
        registers_c = [c.view(np.uint32)[G + 8 * (i // 2), 2 * T + i % 2] for i in range(4)]
    na, nb = len(registers_a), len(registers_b)
    names = [f"%a{i}" for i in range(na + nb + nd)]
    groups = [names[:na], names[na : na + nb], names[na + nb :]]
    lists = ", ".join("{" + ", ".join(group) + "}" for group in groups)
    accumulator = "f16" if half else "f32"
    body = f"mma.sync.aligned.{shape}.row.col.{accumulator}.{kind}.{kind}.{accumulator} {vector('d', nd)}, {lists};"
    out = run_warp(body, np.array(registers_a + registers_b + registers_c), nd)
    np.testing.assert_array_equal(matrix_d(out, half), a @ b + c)


def test_mma_rounds_like_float32_and_drops_tf32_bits() -> None:
    a = np.full((16, 8), np.float32(1) + np.float32(2) ** -11)  # the low 13 bits of a tf32 operand do not count
    b = np.ones((8, 8), np.float32)
    c = np.full((16, 8), 2.0**24, np.float32)
    registers = fragments_of_a(elements(a, "tf32"), "tf32") + fragments_of_b(elements(b, "tf32"), "tf32")
    registers += [c.view(np.uint32)[G + 8 * (i // 2), 2 * T + i % 2] for i in range(4)]
    body = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%d0, %d1, %d2, %d3}, {%a0, %a1, %a2, %a3}, {%a4, %a5}, "
    out = run_warp(body + "{%a6, %a7, %a8, %a9};", np.array(registers), 4)
    # PTX ISA: single precision, in any order and rounding.
    rtol = ptx_runner.bound(ours=0, documented=9 * 2.0**-23)
    np.testing.assert_allclose(matrix_d(out, False), 2.0**24 + 8, rtol=rtol)


@pytest.mark.parametrize(
    "text",
    [
        "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%d0, %d1}, [%s];",
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%d0}, [%s];",
        "stmatrix.sync.aligned.m8n8.x1.shared.b16.bogus [%s], {%d0};",
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%d0,%d1,%d2,%d3}, {%d0,%d1,%d2,%d3}, {%d0,%d1}, "
        "{%d0,%d1,%d2,%d3};",
        "mma.sync.aligned.m16n8k16.row.col.f16.bf16.bf16.f16 {%d0,%d1}, {%d0,%d1,%d2,%d3}, {%d0,%d1}, {%d0,%d1};",
        "mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%d0,%d1,%d2,%d3}, {%d0,%d1}, {%d0,%d1}, "
        "{%d0,%d1,%d2,%d3}, %d0, 0;",
    ],
)
def test_refused(text: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        run_warp(text, words(1), 4)
