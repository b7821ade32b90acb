"""Tensor copies of the emulator: hand-written PTX and hand-made tensor maps against numpy slices."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from .bulk_copies import (
    ATOMS_OF_32,
    DRAIN,
    ELEMENTS,
    SCHEDULES,
    SHARED_TO_GLOBAL,
    WAIT,
    Tensor,
    aligned,
    encode,
    numbers,
    reference,
    run_bulk,
    swizzled,
)
from .ptx_runner import run

pytestmark = pytest.mark.silicon

PROLOGUE = """
.visible .entry k(.param .align 64 .b8 map[128], .param .u64 data, .param .u64 coordinates, .param .u32 n,
    .param .u64 known) {{
    .reg .pred %p, %q, %first; .reg .b16 %mask; .reg .b32 %t, %n, %r<12>, %c<5>;
    .reg .b64 %data, %coordinates, %map, %policy, %d<6>;
    .shared .align 1024 .b8 box[{bytes}]; .shared .align 8 .b64 bar;
    mov.u32 %t, %tid.x; setp.eq.u32 %first, %t, 0; mov.u32 %r8, bar; mov.u32 %r7, box;
    createpolicy.fractional.L2::evict_first.b64 %policy;
    @%first mbarrier.init.shared.b64 [%r8], 1; @%first fence.mbarrier_init.release.cluster; bar.sync 0;
    ld.param.u64 %data, [data]; ld.param.u64 %coordinates, [coordinates]; ld.param.u32 %n, [n]; mov.u64 %d0, map;
    cvta.param.u64 %map, %d0;
"""

LOAD_COORDINATES = "".join(f" ld.global.u32 %c{k}, [%coordinates+{4 * k}];" for k in range(5))


def copy_words(n: int, instructions: str) -> str:
    """`instructions` for each of n words: %r6 its shared, %d1 its global address."""
    return f"""
    mov.u32 %r5, %t;
    COPY: setp.ge.u32 %p, %r5, {n}; @%p bra COPIED; shl.b32 %r6, %r5, 2; mul.wide.u32 %d1, %r5, 4;
    add.s64 %d1, %d1, %data; add.u32 %r6, %r6, %r7;
    {instructions} add.u32 %r5, %r5, 32; bra COPY;
    COPIED:
    """


def coordinate_list(rank: int) -> str:
    return "{" + ", ".join(f"%c{k}" for k in range(rank)) + "}"


LOAD = "cp.async.bulk.tensor.{rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes"


def load_boxes(tensor: Tensor, coordinates: list[tuple[int, ...]], **options: object) -> np.ndarray:
    """What shared memory holds after loading the box at each of `coordinates`."""
    rank, n = len(tensor.shape), len(coordinates)
    body = f"""
    mov.u32 %r0, 0;
    NEXT: {LOAD_COORDINATES} @!%first bra LOADED;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r8], {tensor.bytes};
    {LOAD.format(rank=rank)}.L2::cache_hint [%r7], [%map, {coordinate_list(rank)}], [%r8], %policy;
    LOADED: and.b32 %r1, %r0, 1;
    WAIT: mbarrier.try_wait.parity.shared.b64 %q, [%r8], %r1; @!%q bra WAIT;
    {copy_words(tensor.bytes // 4, "ld.shared.u32 %r4, [%r6]; st.global.u32 [%d1], %r4;")} fence.proxy.async;
    bar.sync 0;
    add.s64 %data, %data, {tensor.bytes}; add.s64 %coordinates, %coordinates, 20; add.u32 %r0, %r0, 1;
    setp.lt.u32 %p, %r0, %n; @%p bra NEXT; ret; }}
    """
    out = np.zeros((n, tensor.bytes), np.uint8)
    padded = np.array([(*c, *[0] * (5 - rank)) for c in coordinates], np.int32)
    options = {"sanitize": True, **options}
    run(PROLOGUE.format(bytes=tensor.bytes) + body, tensor.map, out, padded, n, tensor.raw, **options)
    return out


BOXES = [
    ((37,), (16,)), ((300,), (256,)), ((19, 40), (5, 16)), ((6, 19, 40), (2, 5, 16)), ((3, 6, 9, 40), (2, 3, 4, 16)),
    ((3, 4, 5, 6, 40), (2, 3, 2, 3, 16)),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "box"), BOXES)
@pytest.mark.parametrize("element", [element for element in ELEMENTS if element != "b4x16"])
def test_loads(element: str, shape: tuple[int, ...], box: tuple[int, ...]) -> None:
    tensor = Tensor(element, shape, box)
    at = tensor.coordinates(24)
    np.testing.assert_array_equal(load_boxes(tensor, at), [tensor.expected(c) for c in at])


@pytest.mark.parametrize("swizzle", [1, 2, 3, ATOMS_OF_32])
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_swizzles(rank: int, swizzle: int) -> None:
    """Rows as long as the swizzle's span, and shorter ones."""
    for element, part in itertools.product(["u8", "f32"], [1, 2]):
        row = min(16 << swizzle, 128) // np.dtype(ELEMENTS[element][0]).itemsize // part
        tensor = Tensor(element, (3, 4, 5, 19, row + 9)[-rank:], (2, 2, 3, 8, row)[-rank:], swizzle, seed=rank)
        at = tensor.coordinates(16)
        np.testing.assert_array_equal(load_boxes(tensor, at), [tensor.expected(c) for c in at])


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_loads_under_schedules(schedule: str, seed: int) -> None:
    tensor = Tensor("f16", (40, 70), (16, 64), 3)
    at = tensor.coordinates(20)
    np.testing.assert_array_equal(
        load_boxes(tensor, at, schedule=schedule, seed=seed), [tensor.expected(c) for c in at]
    )


def test_four_bit_elements() -> None:
    """b4x16: as dense as in global memory."""
    tensor = Tensor("b4x16", (9, 64), (4, 32))
    at = [(-2, -1), (4, 7), (64, 2)]
    expected = [tensor.expected((x // 2, y)) for x, y in at]
    np.testing.assert_array_equal(load_boxes(tensor, at), expected)


# ---- stores and reductions -------------------------------------------------------------------------------------------


def store_boxes(
    tensor: Tensor,
    boxes: np.ndarray,
    coordinates: list[tuple[int, ...]],
    reduce: str = "",
    wait: str = "",
    **options: object,
) -> None:
    """Stores boxes (given as tensors) one after the other; all lanes issue the store."""
    rank, n = len(tensor.shape), len(coordinates)
    opcode, operation = ("cp.reduce.async", f".{reduce}") if reduce else ("cp.async", "")
    name = f"{opcode}.bulk.tensor.{rank}d.global.shared::cta{operation}.tile.bulk_group"
    body = f"""
    mov.u32 %r0, 0;
    NEXT: {LOAD_COORDINATES} {copy_words(tensor.bytes // 4, "ld.global.u32 %r4, [%d1]; st.shared.u32 [%r6], %r4;")}
    fence.proxy.async.shared::cta; bar.sync 0;
    {name} [%map, {coordinate_list(rank)}], [%r7]; cp.async.bulk.commit_group; cp.async.bulk.wait_group{wait} 0;
    bar.sync 0;
    add.s64 %data, %data, {tensor.bytes}; add.s64 %coordinates, %coordinates, 20; add.u32 %r0, %r0, 1;
    setp.lt.u32 %p, %r0, %n; @%p bra NEXT; ret; }}
    """
    images = np.stack([swizzled(box.reshape(-1).view(np.uint8), tensor.swizzle) for box in boxes])
    padded = np.array([(*c, *[0] * (5 - rank)) for c in coordinates], np.int32)
    options = {"sanitize": True, **options}
    run(PROLOGUE.format(bytes=tensor.bytes) + body, tensor.map, images, padded, n, tensor.raw, **options)


@pytest.mark.parametrize(("shape", "box"), BOXES)
@pytest.mark.parametrize(
    ("element", "swizzle"), [("u8", 0), ("f32", 0), ("u8", 1), ("bf16", 2), ("u64", 3), ("f32", ATOMS_OF_32)]
)
def test_stores(element: str, swizzle: int, shape: tuple[int, ...], box: tuple[int, ...]) -> None:
    row = min(16 << swizzle, 128) // np.dtype(ELEMENTS[element][0]).itemsize if swizzle else box[-1]
    tensor = Tensor(element, shape, (*box[:-1], row), swizzle)
    at = tensor.coordinates(12)
    boxes = (
        np.random.default_rng(9)
        .integers(0, 256, (len(at), tensor.bytes), np.uint8)
        .view(tensor.dtype)
        .reshape(len(at), *tensor.box)
    )
    expected = Tensor(element, tensor.shape, tensor.box, swizzle)
    for c, values in zip(at, boxes, strict=True):
        inside, part = expected.slices(c)
        expected.array[inside] = values[part]
    store_boxes(tensor, boxes, at)
    np.testing.assert_array_equal(tensor.raw[-200:], expected.raw[-200:])
    np.testing.assert_array_equal(tensor.array.view(np.uint8), expected.array.view(np.uint8))


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("wait", ["", ".read"])
def test_stores_under_schedules(wait: str, schedule: str, seed: int) -> None:
    tensor = Tensor("s32", (40, 64), (8, 32), 3)
    boxes = np.arange(10 * 256, dtype=np.int32).reshape(10, 8, 32)
    at = [(32 * (k % 2), 8 * (k // 2)) for k in range(10)]
    store_boxes(tensor, boxes, at, wait=wait, schedule=schedule, seed=seed)
    for (x, y), values in zip(at, boxes, strict=True):
        np.testing.assert_array_equal(tensor.array[y : y + 8, x : x + 32], values)


INTEGER = ("add", "min", "max", "and", "or", "xor")
TENSOR_REDUCTIONS = [
    *[("u32", op) for op in (*INTEGER, "inc", "dec")], *[(t, op) for t in ("s32", "u64", "s64") for op in INTEGER],
    *[(t, op) for t in ("f16", "bf16") for op in ("add", "min", "max")], ("f32", "add"), ("f64", "add"),
]  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("element", "op"), TENSOR_REDUCTIONS)
def test_tensor_reductions(element: str, op: str, threads: int) -> None:
    row = 64 // np.dtype(ELEMENTS[element][0]).itemsize
    tensor = Tensor(element, (24, row + 3), (16, row), 2)
    tensor.array[:] = numbers(element, tensor.shape, 1)
    expected = tensor.array.copy()
    at = [(0, 0), (-3, 9), (5, -2)]
    boxes = numbers(element, (len(at), *tensor.box), 2)
    for c, values in zip(at, boxes, strict=True):
        inside, part = tensor.slices(c)
        expected[inside] = reference(op, element, expected[inside], values[part])
    store_boxes(tensor, boxes, at, reduce=op, threads=threads)
    np.testing.assert_array_equal(tensor.array, expected)


def test_float_additions_flush_denormals() -> None:
    """f32 in global memory flushes them, keeping signs; f16 keeps them; NaNs are canonical."""
    tiny = np.float32(1e-40)
    old = np.array([tiny, -tiny, 1, np.nan, 2**-126, np.inf, -0.0, 3], np.float32)
    new = np.array([tiny, -tiny, tiny, 1, -(2.0**-126) * 0.75, -np.inf, -0.0, 4], np.float32)
    tensor = Tensor("f32", (8,), (8,))
    tensor.array[:] = old
    store_boxes(tensor, new[None], [(0,)], reduce="add")
    assert tensor.array.view(np.uint32).tolist() == [
        0,
        0x80000000,
        0x3F800000,
        0x7FFFFFFF,
        0x00800000,
        0x7FFFFFFF,
        0x80000000,
        0x40E00000,
    ]
    half = Tensor("f16", (8,), (8,))
    half.array[:] = np.float16(6e-8)
    store_boxes(half, half.array[None].copy(), [(0,)], reduce="add")
    assert half.array.view(np.uint16).tolist() == [2] * 8


# ---- tensors in clusters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize(
    ("suffix", "mask", "signalled"),
    [
        (".multicast::cluster", 0b1011, [1, 1, 0, 1]),
        (".multicast::cluster.cta_group::1", 0b0110, [0, 1, 1, 0]),
        (".multicast::cluster.cta_group::2", 0b1111, [0, 2, 0, 2]),
        (".multicast::cluster.cta_group::2", 0b0110, [0, 1, 0, 1]),
    ],
)
def test_multicast_of_tiles(suffix: str, mask: int, signalled: list[int], schedule: str, seed: int) -> None:
    """Rank 1 loads for others. With cta_group::2 the mbarrier of the odd CTA of each pair is signalled, "
    "as rank 1 is odd."""
    data, out = aligned(np.arange(16 * 64).astype(np.uint8).reshape(16, 64)), np.zeros((4, 256), np.uint32)
    tile = encode(data.ctypes.data, 0, (64, 16), (64,), (32, 8), 1)
    kernel = f""".visible .entry k(.param .align 64 .b8 map[128], .param .u64 out, .param .u64 known) {{
    .reg .pred %p, %q, %first; .reg .b16 %mask; .reg .b32 %t, %rank, %r<10>; .reg .b64 %d<5>;
    .shared .align 1024 .b8 box[512]; .shared .align 8 .b64 bar;
    mov.u32 %t, %tid.x; mov.u32 %rank, %cluster_ctarank; setp.eq.u32 %first, %t, 0; mov.u32 %r8, bar; mov.u32 %r7, box;
    ld.param.u64 %d0, [out]; mul.wide.u32 %d1, %rank, 1024; add.s64 %d0, %d0, %d1; mov.u64 %d2, map;
    cvta.param.u64 %d2, %d2;
    shl.b32 %r0, %rank, 3; mov.u32 %r1, {sum(n << 8 * k for k, n in enumerate(signalled))}; shr.u32 %r0, %r1, %r0;
    and.b32 %r0, %r0, 15; mul.lo.u32 %r0, %r0, 256;
    @%first mbarrier.init.shared.b64 [%r8], 1; @%first fence.mbarrier_init.release.cluster;
    @%first mbarrier.arrive.expect_tx.shared.b64 _, [%r8], %r0;
    mad.lo.u32 %r2, %t, 8, %r7; mov.u32 %r3, 0; st.shared.v2.u32 [%r2], {{%r3, %r3}};
    st.shared.v2.u32 [%r2+256], {{%r3, %r3}}; fence.proxy.async;
    barrier.cluster.arrive; barrier.cluster.wait; setp.eq.u32 %p, %rank, 1; mov.u16 %mask, {mask}; mov.u32 %r4, 16;
    mov.u32 %r5, 4;
    @!%p bra LOADED; @!%first bra LOADED;
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{suffix}
        [%r7+256], [%d2, {{%r4, %r5}}], [%r8], %mask;
    LOADED: setp.eq.u32 %p, %r0, 0; @%p bra DONE;
    W: mbarrier.try_wait.parity.shared.b64 %q, [%r8], 0; @!%q bra W;
    DONE: barrier.cluster.arrive; barrier.cluster.wait; mul.wide.u32 %d3, %t, 8; add.s64 %d3, %d3, %d0;
    ld.shared.v2.u32 {{%r3, %r4}}, [%r2+256]; st.global.v2.u32 [%d3], {{%r3, %r4}}; ret; }}"""
    run(kernel, tile, out, data, grid=(4, 1, 1), cluster=(4, 1, 1), schedule=schedule, seed=seed)
    expected = swizzled(np.ascontiguousarray(data[4:12, 16:48]).reshape(-1), 1)
    for rank in range(4):
        np.testing.assert_array_equal(out[rank].view(np.uint8)[:256], expected * (mask >> rank & 1))


def test_a_pair_shares_a_barrier() -> None:
    """cta_group::2 without multicast: both CTAs load their own data and signal the mbarrier of the even one."""
    data, out = aligned(np.arange(128, dtype=np.uint32)), aligned(np.zeros((2, 64), np.uint32))
    tile = encode(data.ctypes.data, 2, (128,), (), (64,))
    kernel = f""".visible .entry k(.param .align 64 .b8 map[128], .param .u64 out, .param .u64 known) {{
    .reg .pred %p, %q, %first; .reg .b32 %t, %rank, %r<10>; .reg .b64 %d<5>; .shared .align 128 .b8 box[256];
    .shared .align 8 .b64 bar;
    mov.u32 %t, %tid.x; mov.u32 %rank, %cluster_ctarank; setp.eq.u32 %first, %t, 0; mov.u32 %r8, bar;
    mov.u32 %r7, box; mov.u64 %d2, map; cvta.param.u64 %d2, %d2;
    ld.param.u64 %d0, [out]; mul.wide.u32 %d1, %rank, 256; add.s64 %d0, %d0, %d1; shl.b32 %r1, %rank, 6;
    and.b32 %r2, %r8, 0xFEFFFFFF;
    @%first mbarrier.init.shared.b64 [%r8], 1; @%first fence.mbarrier_init.release.cluster;
    @%first mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 512; barrier.cluster.arrive; barrier.cluster.wait;
    @%first cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes.cta_group::2
        [%r7], [%d2, {{%r1}}], [%r2];
    setp.ne.u32 %p, %rank, 0; @%p bra DONE; {WAIT}
    DONE: barrier.cluster.arrive; barrier.cluster.wait; @%first {SHARED_TO_GLOBAL} [%d0], [%r7], 256; {DRAIN} ret; }}"""
    run(kernel, tile, out, data, grid=(2, 1, 1), cluster=(2, 1, 1), schedule="late", seed=1, sanitize=True)
    np.testing.assert_array_equal(out.reshape(-1), data)


# ---- edited tensor maps ----------------------------------------------------------------------------------------------


@pytest.mark.emulator_only("the map that it edits is not the driver's")
@pytest.mark.parametrize("space", ["shared::cta", "global"])
def test_edited_tensor_map(space: str) -> None:
    """Every field is replaced; the map goes from shared to global memory, where the copy uses it."""
    tensor = Tensor("u16", (2, 3, 4, 9, 40), (2, 2, 1, 4, 16), 1)
    wrong = encode(4096, 7, (1, 1), (16,), (4, 4))
    image, out = aligned(np.frombuffer(wrong, np.uint8)), aligned(np.zeros(tensor.bytes, np.uint8))
    name, at = f"tensormap.replace.tile.{{}}.{space}.b1024.b{{}}", "[%r7]" if space != "global" else "[%d2]"
    fields = [
        ("global_address", 64, "", "%d1"),
        ("rank", 32, "", 4),
        ("elemtype", 32, "", 1),
        ("swizzle_mode", 32, "", 1),
        ("fill_mode", 32, "", 0),
    ]
    fields += [("interleave_layout", 32, "", 0), ("swizzle_atomicity", 32, "", 0)]
    for k in range(5):
        fields += [
            ("global_dim", 32, f"{k}, ", tensor.shape[4 - k]),
            ("box_dim", 32, f"{k}, ", tensor.box[4 - k]),
            ("element_stride", 32, f"{k}, ", 1),
        ]
    fields += [("global_stride", 64, f"{k}, ", tensor.strides[3 - k]) for k in range(4)]
    edits = "".join(f"{name.format(field, bits)} {at}, {order}{value};" for field, bits, order, value in fields)
    to_shared = (
        "mad.lo.u32 %r0, %t, 4, %r7; mul.wide.u32 %d4, %t, 4; add.s64 %d4, %d4, %d2; "
        "ld.global.u32 %r1, [%d4]; st.shared.u32 [%r0], %r1; bar.warp.sync -1;"
    )
    back = (
        "bar.warp.sync -1; "
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%d2], [%r7], 128;"
    )
    if space == "global":
        to_shared, back = "", "fence.proxy.tensormap::generic.release.gpu;"
    body = f"""
    {to_shared} @!%first bra EDITED; {edits} EDITED: {back} bar.sync 0;
    fence.proxy.tensormap::generic.acquire.gpu [%d2], 128;
    @!%first bra LOADED; mbarrier.arrive.expect_tx.shared.b64 _, [%r8], {tensor.bytes};
    cp.async.bulk.tensor.5d.shared::cta.global.mbarrier::complete_tx::bytes
        [%r7+1024], [%d2, {{30, 7, 1, -1, 0}}], [%r8];
    LOADED: {WAIT} add.u32 %r5, %r7, 1024; @%first {SHARED_TO_GLOBAL} [%d3], [%r5], {tensor.bytes}; {DRAIN}
    """
    run_bulk(body, tensor.raw, tensor.array, image, out, shared=1024 + tensor.bytes)
    np.testing.assert_array_equal(out, tensor.expected((30, 7, 1, -1, 0)))


# ---- mistakes --------------------------------------------------------------------------------------------------------


def problem(
    tile: bytes, instruction: str, *arrays: np.ndarray, wait: bool = True, ctas: int = 1, **options: object
) -> str:
    """The first event that a kernel of one tensor instruction causes; "
    "%r7 is the box, %r8 the mbarrier, %c0 to %c4 are zero."""
    parameters = [*arrays, *[np.zeros(1, np.uint8)] * (3 - len(arrays))]
    body = (
        "mov.u32 %c0, 0; mov.u32 %c1, 0; mov.u32 %c2, 0; mov.u32 %c3, 0; mov.u32 %c4, 0; mov.u16 %mask, 6;"
        + instruction
        + " ret; }"
    )
    text = PROLOGUE.format(bytes=8192).replace(" .param .u32 n,", "").replace("ld.param.u32 %n, [n];", "")
    outcome = run(text + body, tile, *parameters, check=False, grid=(ctas, 1, 1), cluster=(ctas, 1, 1), **options)
    assert outcome.events
    return f"{outcome.events[0].kind}: {outcome.events[0].message}"


LOAD_2D = "@%first cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
STORE_2D = "@%first cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%map, {%c0, %c1}], [%r7];"


def good_map(array: np.ndarray, **changes: object) -> bytes:
    arguments: dict[str, object] = {
        "element": 0,
        "sizes": (64, 16),
        "strides": (64,),
        "box": (32, 8),
        "swizzle": 0,
        **changes,
    }
    return encode(array.ctypes.data, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "instruction", "message"),
    [
        ({}, LOAD_2D + " [%r7+64], [%map, {%c0, %c1}], [%r8];", "misaligned: shared+64"),
        ({}, LOAD_2D + " [%r7+9088], [%map, {%c0, %c1}], [%r8];", "out of bounds: 256 bytes at shared+"),
        ({}, LOAD_2D + " [%r7], [%map, {%c0, %c1}], [%r8+4096];", "out of bounds: "),
        (
            {},
            LOAD_2D + " [%r7], [%map, {%c0, %c1}], [%r7];",
            "mbarrier: the mbarrier at shared+0 of CTA rank 0 is not initialised",
        ),
        (
            {},
            LOAD_2D.removeprefix("@%first ") + " [%r7], [%map, {%c0, %c1}], [%r8];",
            "several lanes: several lanes issue",
        ),
        (
            {},
            LOAD_2D + " [%r7], [%map, {%c0, %c1}], [%r8]; @%first mbarrier.arrive.shared.b64 _, [%r8];",
            "transaction count: ",
        ),
        (
            {},
            LOAD_2D + ".multicast::cluster [%r7], [%map, {%c0, %c1}], [%r8], %mask;",
            "shared address: the copy goes to CTA ranks 0x6",
        ),
        (
            {},
            "@%first cp.async.bulk.tensor.1d.shared::cta.global.mbarrier::complete_tx::bytes [%r7], [%map, "
            "{%c0}], [%r8];",
            "tensor map: an instruction for 1",
        ),
        ({"box": (24, 8)}, STORE_2D, "tensor map: the box's rows have 24 bytes"),
        ({"swizzle": 1, "box": (64, 8)}, STORE_2D, "tensor map: the box's rows have 64 bytes, more than the 32"),
        ({"element": 11}, STORE_2D, "unsupported: tensor maps of tf32 elements"),
        ({"flags": 0x40000}, STORE_2D, "tensor map: the tensor map is not initialised"),
        ({"flags": 0xC0002}, STORE_2D, "unsupported: swizzle 0 with atoms 1 of a tensor map is not supported"),
        ({"flags": 0x40802}, STORE_2D, "unsupported: the tensor map has fields the emulator does not know (0x800)"),
        ({"sizes": (64, 17)}, "mov.u32 %c1, 10;" + STORE_2D, "out of bounds: a row of a tensor copy of 32 bytes"),
        ({"sizes": (80, 16)}, "mov.u32 %c0, 48; mov.u32 %c1, 8;" + STORE_2D, "out of bounds: a row of a tensor copy"),
        (
            {},
            STORE_2D.replace("cp.async", "cp.reduce.async").replace("shared::cta.", "shared::cta.add."),
            "tensor map: this reduction does not exist for u8",
        ),
        (
            {},
            "mov.u32 %c1, %t;" + STORE_2D.removeprefix("@%first "),
            "several lanes: lanes of one warp store different tiles",
        ),
    ],
)
def test_misuse_of_tensor_copies(changes: dict[str, object], instruction: str, message: str) -> None:
    data = aligned(np.zeros((16, 64), np.uint8))
    assert problem(good_map(data, **changes), instruction, data).startswith(message)


def test_elements_apart_are_refused() -> None:
    data = aligned(np.zeros((16, 64), np.uint8))
    words = np.frombuffer(good_map(data), np.uint64).copy()
    words[6] |= np.uint64(1 << 35)
    assert problem(words.tobytes(), STORE_2D, data).startswith("unsupported: element stride 2 in dimension 1")


def test_the_gap_between_rows_need_not_be_known() -> None:
    """Two tensors far apart as one map with a stride between them. The kernel finds it in memory, so that its address
    belongs to neither."""
    data = aligned(np.arange(4096).astype(np.uint8))
    out = aligned(np.zeros(64, np.uint8))
    tile = encode(data.ctypes.data, 0, (32, 2), (2048,), (32, 2))
    stored = aligned(np.frombuffer(tile, np.uint64))
    text = PROLOGUE.format(bytes=64).replace(".param .u32 n,", ".param .u64 part, .param .u64 stored,")
    text = text.replace("ld.param.u32 %n, [n];", "").replace("cvta.param.u64 %map, %d0", "ld.param.u64 %map, [stored]")
    body = f"""
    @%first mbarrier.arrive.expect_tx.shared.b64 _, [%r8], 64;
    @%first cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r7], [%map, {{0, 0}}], [%r8];
    {WAIT}
    @%first {SHARED_TO_GLOBAL} [%data], [%r7], 64; {DRAIN} ret; }}"""
    run(text + body, tile, out, data[:32], data[2048:2080], stored, out)
    np.testing.assert_array_equal(out, np.concatenate([data[:32], data[2048:2080]]))
