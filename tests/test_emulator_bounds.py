"""Bounds of global memory: a pointer reaches the tensor that it was made from, and none beside it."""

import re
import struct
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import cute_ssd
from cute_ssd.emulator import engine, pointers
from cute_ssd.emulator.engine import Outcome
from cute_ssd.emulator.pointers import NUMBER_SHIFT, Pointers, host_addresses
from cute_ssd.emulator.report import KernelError
from tests.bulk_copies import aligned, encode
from tests.ptx_runner import run

# ---- kernels in PTX --------------------------------------------------------------------------------------------------

SIZE = 504  # bytes of each tensor: 16 may lie half in the next one

# Three tensors, one right behind the other: %before, %x and %after; %each is the lane's word of %x.
PROLOGUE = """
.visible .entry k(.param .align 64 .b8 map[128], .param .u64 before, .param .u64 x, .param .u64 after) {
    .reg .pred %p<4>; .reg .b32 %t, %r<8>; .reg .b64 %before, %x, %after, %each, %map, %d<8>;
    .shared .align 1024 .b8 data[1024]; .shared .align 8 .b64 bar;
    ld.param.u64 %before, [before]; ld.param.u64 %x, [x]; ld.param.u64 %after, [after]; mov.u64 %d0, map;
    cvta.param.u64 %map, %d0; mov.u32 %t, %laneid; mad.wide.u32 %each, %t, 4, %x; setp.eq.u32 %p1, %t, 0;
    @%p1 mbarrier.init.shared.b64 [bar], 1; mov.u32 %r0, 0; mov.u64 %d1, 7; bar.warp.sync 0xffffffff;
"""


def neighbours() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Zeros; %x is aligned to 128 bytes, the others to 8."""
    memory = aligned(np.zeros(1024 + SIZE, np.uint8))
    return memory[512 - SIZE : 512], memory[512 : 512 + SIZE], memory[512 + SIZE : 512 + 2 * SIZE]


def launch(body: str, *, rows: int = 1, tensors: tuple[np.ndarray, ...] | None = None, **options: object) -> Outcome:
    """`map` is that of `rows` rows of 16 bytes at %x, in boxes of 32."""
    before, x, after = tensors or neighbours()
    tile = encode(x.ctypes.data, 0, (16, rows), (16,), (16, 32))
    return run(f"{PROLOGUE}{body} ret; }}", tile, before, x, after, **options)


def message(outcome: Outcome) -> str:
    """Of the only event, which ended the launch."""
    (event,) = outcome.events
    assert event.kind == "out of bounds" and event.fatal
    return re.sub(r"0x[0-9a-f]+\b", "ADDRESS", event.message)


def past(distance: int) -> str:
    end = "past the end of the tensor of 504 bytes that its pointer belongs to, in other memory of the call"
    return f" at ADDRESS reaches {distance} bytes {end}"


def before(distance: int) -> str:
    return past(distance).replace("reaches", "begins").replace("past the end of", "before")


FOUR = "{{%r1, %r2, %r3, %r4}}"
COMPLETE = "mbarrier::complete_tx::bytes"
STORED = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"

ACCESSES = [  # an instruction, an offset that is right, one that is wrong, and what is said
    ("ld.global.b64 %d1, [%x+{}];", 496, 504, "global access of 8 bytes" + past(8)),
    ("ld.global.b64 %d1, [%x+{}];", 0, -8, "global access of 8 bytes" + before(8)),
    ("ld.global.b64 %d1, [%before+{}];", 496, 600, "global access of 8 bytes" + past(104)),
    ("ld.b64 %d1, [%x+{}];", 496, 504, "global access of 8 bytes" + past(8)),
    ("ld.volatile.global.b64 %d1, [%x+{}];", 496, 504, "global access of 8 bytes" + past(8)),
    ("st.global.b64 [%x+{}], %d1;", 496, 504, "global access of 8 bytes" + past(8)),
    ("@%p1 st.b8 [%x+{}], %t;", 503, 504, "global access of 1 bytes" + past(1)),
    ("ld.global.b32 %r1, [%each+{}];", 376, 380, "global access of 4 bytes" + past(4)),
    ("ld.global.b32 %r1, [%each+{}];", 0, -4, "global access of 4 bytes" + before(4)),
    (f"ld.global.v4.b32 {FOUR}, [%x+{{}}];", 480, 496, "global access of 16 bytes" + past(8)),
    (f"st.global.v4.b32 [%x+{{}}], {FOUR};", 480, 496, "global access of 16 bytes" + past(8)),
    ("atom.global.add.u64 %d1, [%x+{}], 1;", 496, 504, "global access of 8 bytes" + past(8)),
    ("red.global.add.u32 [%x+{}], 1;", 500, 504, "global access of 4 bytes" + past(4)),
    ("cp.async.cg.shared.global [data], [%x+{}], 16;", 480, 496, "global access of 16 bytes" + past(8)),
    ("cp.async.ca.shared.global [data], [%x+496], 16, {};", 8, 12, "global access of 12 bytes" + past(4)),
    (
        f"@%p1 cp.async.bulk.shared::cta.global.{COMPLETE} [data], [%x+{{}}], 16, [bar];",
        *(480, 496, "the source of a bulk copy of 16 bytes" + past(8)),
    ),
    (
        f"@%p1 cp.async.bulk.global.shared::cta.bulk_group [%x+{{}}], [data], 16; {STORED}",
        *(480, 496, "the destination of a bulk copy of 16 bytes" + past(8)),
    ),
]


def runs_past(instruction: str, offset: int) -> Outcome:
    arrival = "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 16;" if COMPLETE in instruction else ""
    return launch(arrival + instruction.format(offset), check=False)


@pytest.mark.parametrize(("instruction", "right", "wrong", "text"), ACCESSES)
def test_an_access_that_lands_in_a_neighbour(instruction, right, wrong, text):
    assert not runs_past(instruction, right).events
    assert message(runs_past(instruction, wrong)) == text


LOAD = f"""@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [bar], 512;
@%p1 cp.async.bulk.tensor.2d.shared::cta.global.{COMPLETE} [data], [%map, {{%r0, %r0}}], [bar];"""
STORE = f"@%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%map, {{%r0, %r0}}], [data]; {STORED}"


@pytest.mark.parametrize("address", ["-8", "-16", "0", "8"])
@pytest.mark.parametrize(
    "instruction", ["ld.global.b64 %d1, [%d2];", "st.global.b64 [%d2], %d1;", "red.global.add.u64 [%d2], 1;"]
)
def test_wild_addresses(instruction, address):
    """The last ones are those where an end wraps to zero."""
    outcome = launch(f"mov.b64 %d2, {address}; @%p1 {instruction}", check=False)
    assert message(outcome).startswith("global access of 8 bytes at ADDRESS lies outside every tensor of the call")


@pytest.mark.parametrize("copy", [LOAD, STORE])
def test_a_tensor_map_larger_than_its_tensor(copy):
    assert not launch(copy, rows=31, check=False).events
    assert message(launch(copy, rows=32, check=False)) == "a row of a tensor copy of 512 bytes" + past(8)


def test_a_far_neighbour_is_one_too():
    """Guard bands of any width would end somewhere."""
    there = "add.s64 %d2, %x, 1000000000000;"
    end = "reaches 999999999500 bytes past the end of the tensor of 504 bytes that its pointer belongs to"
    assert message(launch(there + "ld.b32 %r1, [%d2];", check=False)) == f"global access of 4 bytes at ADDRESS {end}"
    assert not launch(there + "add.s64 %d2, %d2, -1000000000000; ld.b32 %r1, [%d2];", check=False).events


def test_what_a_kernel_may_do_with_pointers():
    """Differences, also of pointers to different tensors, comparisons, alignment, conversions, printing."""
    before, x, after = tensors = neighbours()
    body = """
    sub.s64 %d2, %before, %x; add.s64 %d2, %x, %d2; st.global.b64 [%d2], 1;
    sub.s64 %d2, %after, %x; shr.s64 %d2, %d2, 3; shl.b64 %d2, %d2, 3; add.s64 %d2, %x, %d2; st.global.b64 [%d2], 2;
    add.s64 %d2, %x, 8; sub.s64 %d3, %d2, %x; st.global.b64 [%x], %d3;
    setp.lt.u64 %p2, %x, %d2; @%p2 st.global.b64 [%x+8], 3;
    isspacep.global %p2, %x; @%p2 st.global.b64 [%x+16], 4;
    cvta.to.global.u64 %d2, %x; cvta.global.u64 %d2, %d2; st.b64 [%d2+24], 5;
    and.b64 %d2, %x, 0xffffffffffff; st.b64 [%d2+32], 6;
    add.s64 %d2, %x, 127; and.b64 %d2, %d2, -128; st.global.b64 [%d2+40], 7;
    """
    launch(body, tensors=tensors, sanitize=True)
    assert before.view(np.uint64)[0] == 1 and after.view(np.uint64)[0] == 2
    assert x.view(np.uint64)[:6].tolist() == [8, 3, 4, 5, 6, 7]


def test_a_pointer_is_printed_as_the_host_knows_it():
    text = np.frombuffer(b"%p of %s\n\0", np.uint8).copy()
    name = np.frombuffer(b"x\0", np.uint8).copy()
    kernel = """.extern .func (.param .b32 result) vprintf(.param .b64 pattern, .param .b64 arguments);
    .visible .entry k(.param .u64 text, .param .u64 name) {
    .reg .b64 %text, %name, %depot; .local .align 16 .b8 depot[16];
    ld.param.u64 %text, [text]; ld.param.u64 %name, [name]; mov.u64 %depot, depot;
    st.local.v2.b64 [%depot], {%name, %name}; cvta.local.u64 %depot, %depot;
    { .param .b64 pattern; .param .b64 arguments; .param .b32 result; st.param.b64 [pattern], %text;
      st.param.b64 [arguments], %depot; call.uni (result), vprintf, (pattern, arguments); } ret; }"""
    outcome = run(kernel, text, name, block=(1, 1, 1))
    assert outcome.printed == [f"{name.ctypes.data:#x} of x\n"]


def test_pointers_in_memory():
    """Those of an array may point to any tensor of the call; those that a kernel puts there belong where they did."""
    tensors = neighbours()
    before, x, after = tensors
    before.view(np.uint64)[0] = after.ctypes.data
    body = """
    ld.global.b64 %d1, [%before]; st.global.b32 [%d1], 1; st.global.b32 [%d1+-4], 2; st.global.b64 [%before+16], %x;
    bar.warp.sync 0xffffffff; ld.global.b64 %d3, [%before+16]; st.global.b32 [%d3], 3;"""
    launch(body, tensors=tensors, sanitize=True)
    assert after.view(np.uint32)[0] == 1 and x.view(np.uint32)[[0, -1]].tolist() == [3, 2]
    outcome = launch(body + "ld.b32 %r1, [%d3+504];", tensors=tensors, check=False)
    assert message(outcome) == "global access of 4 bytes" + past(4)


def test_pointers_that_an_earlier_launch_left_in_memory():
    """A tensor map is a pointer as well."""
    tensors = neighbours()
    before, x, after = tensors
    workspace = aligned(np.zeros(256, np.uint8))
    keep = "".join(f"ld.param.b64 %d1, [map+{8 * k}]; st.global.b64 [%before+{8 * k}], %d1;" for k in range(16))
    launch(keep + "st.global.b64 [%before+128], %x;", rows=32, tensors=(workspace, x, after))
    use = "ld.global.b64 %d3, [%x+128]; ld.global.b32 %r1, [%d3+500];"
    load = LOAD.replace("%map", "%x").replace("%r0, %r0", "%r0, %r1")

    def later(code: str, *others: np.ndarray) -> Outcome:
        return launch("mov.u32 %r1, 1;" + code, tensors=(others[0], workspace, others[1]), check=False)

    # The same tensor is there: its bounds hold. Where it is part of another one, those of that do.
    assert not later(use, x, after).events
    assert message(later(use.replace("500", "504"), x, after)) == "global access of 4 bytes" + past(4)
    assert message(later(load, x, after)) == "a row of a tensor copy of 496 bytes" + past(8)
    whole = np.lib.stride_tricks.as_strided(x, (2 * SIZE,))
    assert not later(use.replace("500", "504"), whole, before).events and not later(load, whole, before).events
    text = "global access of 4 bytes at ADDRESS lies outside every tensor of the call"
    assert message(later(use, before, before)).startswith(text)


# ---- the numbers -----------------------------------------------------------------------------------------------------

STORAGES = [(1 << 40, 4096), (1 << 41, 64), (1 << 25, 4096)]
VIEWS = [(1 << 40, 16), (1 << 40, 64), *(((1 << 40) + at, nbytes) for at, nbytes in ((1024, 1024), (1536, 16)))]


@pytest.mark.parametrize(
    ("address", "begin", "nbytes"),
    [
        (1 << 40, 1 << 40, 64),  # the longest view
        ((1 << 40) + 1024, (1 << 40) + 1024, 1024),
        ((1 << 40) + 1028, 1 << 40, 4096),  # in the middle of a view: who knows
        ((1 << 40) + 1536, 1 << 40, 4096),  # one view begins here, but inside of another one
        ((1 << 41) + 63, 1 << 41, 64),
        (1 << 25, 1 << 25, 4096),
    ],
)
def test_which_tensor_a_pointer_belongs_to(address, begin, nbytes):
    found = Pointers(STORAGES, VIEWS)
    parameter = found.numbered(struct.pack("<QQI", 40, address, 7))
    first, pointer, last = struct.unpack("<QQI", parameter)
    number = pointer >> NUMBER_SHIFT
    assert (first, last, pointer - (number << NUMBER_SHIFT)) == (40, 7, address) and number
    assert found.ranges == {(begin + (number << NUMBER_SHIFT), begin + nbytes + (number << NUMBER_SHIFT))}


@pytest.mark.parametrize(
    "word", [0, (1 << 25) + 8, (1 << 40) - 1, (1 << 40) + 4096, 1 << 41 << 8, (1 << 40) + (1 << 48)]
)
def test_other_words_stay(word):
    found = Pointers(STORAGES, VIEWS)
    for parameter in (struct.pack("<Q", word), struct.pack("<IQ", 1, 1 << 40), struct.pack("<I", 1)):
        assert found.numbered(parameter) == parameter
    assert not found.ranges


def test_numbers_run_out(monkeypatch):
    monkeypatch.setattr(pointers, "_numbers", {})
    monkeypatch.setattr(pointers, "LAST_NUMBER", 3)
    page = 1 << 30

    def numbers(*places: int) -> list[int]:
        found = Pointers([(place * page, 64) for place in places])
        words = [struct.unpack("<Q", found.numbered(struct.pack("<Q", place * page)))[0] for place in places]
        return [word >> NUMBER_SHIFT for word in words]

    assert numbers(1, 2) == [1, 2] and numbers(2, 3) == [2, 3]
    words = np.array([-1, 5, 3 * page, 2 * page | 2 << NUMBER_SHIFT, 4 * page | 4 << NUMBER_SHIFT])
    assert host_addresses(words).tolist() == [3 * page, 2 * page]
    assert numbers(4, 2) == [1, 2]  # anew


# ---- kernels in CuTe DSL ---------------------------------------------------------------------------------------------

cutlass = pytest.importorskip("cutlass")
cute = pytest.importorskip("cutlass.cute")
from_dlpack = pytest.importorskip("cutlass.cute.runtime").from_dlpack


@cute.kernel
def add_rows_kernel(x: cute.Tensor, y: cute.Tensor, rows: cutlass.Int32):
    thread, _, _ = cute.arch.thread_idx()
    for row in range(rows):
        y[row, thread] = y[row, thread] + x[row, thread]


@cute.jit
def add_rows(x: cute.Tensor, y: cute.Tensor, rows: cutlass.Int32):
    add_rows_kernel(x, y, rows).launch(grid=[1, 1, 1], block=[32, 1, 1])


@cute.jit
def add_rows_of_pointers(x: cute.Pointer, y: cute.Tensor, rows: cutlass.Int32):
    whole = cute.make_tensor(x, cute.make_layout((6, 32), stride=(32, 1)))
    add_rows_kernel(whole, y, rows).launch(grid=[1, 1, 1], block=[32, 1, 1])


@cute.jit
def add_rows_of_integers(x: cutlass.Int64, y: cute.Tensor, rows: cutlass.Int32):
    add_rows_of_pointers(cute.make_ptr(cutlass.Float32, x, cute.AddressSpace.gmem), y, rows)


@cute.kernel
def copy_rows_kernel(x: cute.Tensor, v: cute.Tensor, y: cute.Tensor, rows: cutlass.Int32):
    thread, _, _ = cute.arch.thread_idx()
    for row in range(rows):
        y[row, thread] = x[row, thread] + v[0, thread]


@cute.jit
def copy_later_rows(x: cute.Tensor, v: cute.Tensor, y: cute.Tensor, rows: cutlass.Int32):
    copy_rows_kernel(cute.domain_offset((2, 0), x), v, y, rows).launch(grid=[1, 1, 1], block=[32, 1, 1])


@cute.jit
def add_later_rows(x: cute.Tensor, y: cute.Tensor, rows: cutlass.Int32):
    add_rows_kernel(cute.domain_offset((1, 0), x), y, rows).launch(grid=[1, 1, 1], block=[32, 1, 1])


def pointer(tensor: torch.Tensor):
    return cute.runtime.make_ptr(cutlass.Float32, tensor.data_ptr(), cute.AddressSpace.gmem)


def call(function, x, y: torch.Tensor, rows: int) -> None:
    with cute_ssd.emulate("sm_100a"):
        arguments = (from_dlpack(x) if isinstance(x, torch.Tensor | np.ndarray) else x, from_dlpack(y), rows)
        cute.compile(function, *arguments)(*arguments)


def finding(function, x, y: torch.Tensor, rows: int) -> str:
    with pytest.raises(KernelError) as caught:
        call(function, x, y, rows)
    assert caught.value.findings[0].kind == "out of bounds"
    return caught.value.findings[0].message


PAST_STORAGE = re.compile("past the end of (the|a) tensor of 768")  # in a low heap no pointer into it has a number


def test_a_slice_of_a_pool():
    pool, x = torch.zeros(8, 32), torch.ones(6, 32)
    call(add_rows, x, pool[2:5], 3)
    assert pool.sum(1).tolist() == [0, 0, 32, 32, 32, 0, 0, 0]
    text = finding(add_rows, x, pool[2:5], 4)
    assert re.match(
        "global access of 4 bytes at 0x[0-9a-f]+ reaches 4 bytes past the end of the tensor of 384 bytes", text
    )
    assert text.endswith(" that its pointer belongs to, in other memory of the call")


def test_two_tensors_in_one_storage():
    memory = torch.ones(12, 32)
    call(add_rows, memory[:6], memory[6:], 6)
    assert memory.sum(1).tolist() == [32] * 6 + [64] * 6
    assert "past the end of the tensor of 768 bytes" in finding(add_rows, memory[:6], memory[6:], 7)


def test_interleaved_views_of_one_storage():
    """Slices of the columns of one projection: each spans nearly all of it."""
    projection = torch.ones(6, 96)
    call(add_rows, projection[:, 32:64], projection[:, :32], 6)
    assert projection.sum(1).tolist() == [128] * 6
    assert "past the end of the tensor of 2048 bytes" in finding(add_rows, projection[:, 64:], projection[:, :32], 7)


def test_bare_pointers_reach_the_whole_storage():
    """Nothing says how much of it is meant, also where a tensor begins at the same address."""
    memory, y = torch.ones(6, 32), torch.zeros(6, 32)
    call(add_rows_of_pointers, pointer(memory[2:]), y, 4)
    assert y.sum(1).tolist() == [32] * 4 + [0] * 2
    assert PAST_STORAGE.search(finding(add_rows_of_pointers, pointer(memory[2:]), y, 5))
    call(add_rows_of_pointers, pointer(memory), memory[:2], 2)
    call(add_rows_of_pointers, pointer(memory), y, 6)


def test_the_host_moves_a_pointer():
    """Then it belongs to the storage."""
    memory, y = torch.ones(6, 32), torch.zeros(6, 32)
    call(add_later_rows, memory[:5], y, 5)
    assert PAST_STORAGE.search(finding(add_later_rows, memory[:5], y, 6))


def test_the_host_moves_a_pointer_onto_another_view():
    memory, y = torch.ones(6, 32), torch.zeros(6, 32)
    with cute_ssd.emulate("sm_100a"):
        arguments = [from_dlpack(tensor) for tensor in (memory, memory[2:3], y)]
        cute.compile(copy_later_rows, *arguments, 4)(*arguments, 4)
    assert y.sum(1).tolist() == [64] * 4 + [0] * 2


def test_addresses_in_integers_reach_the_whole_storage():
    """Also where a tensor of the call begins there."""
    memory, y = torch.ones(6, 32), torch.zeros(6, 32)
    with cute_ssd.emulate("sm_100a"):
        arguments = (cutlass.Int64(memory.data_ptr()), from_dlpack(y), 6)
        compiled = cute.compile(add_rows_of_integers, *arguments)
        compiled(*arguments)
        assert y.sum(1).tolist() == [32] * 6
        compiled(memory.data_ptr(), from_dlpack(memory[:2]), 6)
        with pytest.raises(KernelError, match="past the end of the tensor of 768 bytes"):
            compiled(memory.data_ptr(), from_dlpack(y), 7)


def test_a_storage_inside_of_another_one():
    memory, y = np.ones((6, 32), np.float32), torch.zeros(6, 32)
    whole, part = torch.from_numpy(memory), torch.from_numpy(memory[2:4])
    call(add_rows_of_pointers, pointer(whole[2:]), y, 4)
    assert y.sum(1).tolist() == [32] * 4 + [0] * 2 and part.sum() == 64
    assert PAST_STORAGE.search(finding(add_rows_of_pointers, pointer(whole[4:]), y, 3))  # behind the inner one


def test_an_array_that_runs_backwards():
    memory, y = np.arange(6, dtype=np.float32).repeat(32).reshape(6, 32), torch.zeros(6, 32)
    call(add_rows, memory[::-1], y, 6)
    assert y[:, 0].tolist() == [5, 4, 3, 2, 1, 0]


def test_calls_from_several_threads(monkeypatch):
    """Each has the tensors of its own call, and its kernel runs when no other one does."""
    running, at_once, engine_run = [], [], engine.run

    def watched(*arguments):
        running.append(None)
        at_once.append(len(running))
        time.sleep(0.002)
        outcome = engine_run(*arguments)
        running.pop()
        return outcome

    monkeypatch.setattr(engine, "run", watched)
    tensors = [(torch.ones(6, 32), torch.zeros(6, 32)) for _ in range(3)]
    with cute_ssd.emulate("sm_100a"):
        arguments = [(from_dlpack(x), from_dlpack(y), 6) for x, y in tensors]
        compiled = cute.compile(add_rows, *arguments[0])
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda k: compiled(*arguments[k % 3]), range(30)))
    assert all(y.sum() == 1920 for _, y in tensors) and max(at_once) == 1


def test_an_address_that_nobody_knows_leaves_the_others_their_bounds():
    memory, y = np.ones((7, 32), np.float32), torch.zeros(6, 32)
    unknown = cute.runtime.make_ptr(cutlass.Float32, memory.ctypes.data, cute.AddressSpace.gmem)
    call(add_rows_of_pointers, unknown, y, 6)
    assert "past the end of the tensor of 768 bytes" in finding(add_rows_of_pointers, unknown, y, 7)
