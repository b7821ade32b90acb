"""What lanes tell each other: shuffles, votes, matches, reductions, and who takes part."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_ssd.emulator.decode import UnsupportedInstruction
from tests.ptx_runner import on_silicon, run

pytestmark = pytest.mark.silicon

LANES = np.arange(32)
ALL = 0xFFFFFFFF


def launch(body: str, *inputs: np.ndarray, results: int = 1, block: int = 32, **options: object):
    """Every thread has its element of input k in %in<k> and leaves %out<k>; returns the results and the outcome."""
    n = len(inputs) + results
    arrays = [*map(np.ascontiguousarray, inputs), *(np.zeros(block, np.uint32) for _ in range(results))]
    text = f".visible .entry k({', '.join(f'.param .u64 p{k}' for k in range(n))}) {{\n"
    text += ".reg .pred %p<8>; .reg .b32 %t, %r<8>; .reg .b64 %a, %d<8>;"
    text += "".join(f".reg .b{8 * a.itemsize} %in{k};" for k, a in enumerate(inputs))
    text += "".join(f".reg .b32 %out{k};" for k in range(results)) + "mov.u32 %t, %tid.x;\n"
    for k, a in enumerate(inputs):
        text += f"ld.param.u64 %a, [p{k}]; mad.wide.u32 %a, %t, {a.itemsize}, %a;"
        text += f"ld.global.b{8 * a.itemsize} %in{k}, [%a];\n"
    text += "".join(f"mov.u32 %out{k}, 0xdead;" for k in range(results)) + f"\n{body}\n"
    for k in range(results):
        text += f"ld.param.u64 %a, [p{len(inputs) + k}]; mad.wide.u32 %a, %t, 4, %a; st.global.b32 [%a], %out{k};\n"
    outcome = run(text + "ret; }", *arrays, block=(block, 1, 1), sanitize=True, **options)
    return arrays[len(inputs) :], outcome


def words(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


# ---- shfl -----------------------------------------------------------------------------------------------------------


def shuffled(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """Source lane and predicate as the PTX ISA's pseudocode of shfl has them."""
    b, clamp, segment = b & 31, c & 31, c >> 8 & 31
    last = (lane & segment) | (clamp & ~segment)
    source = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": (lane & segment) | (b & ~segment)}[mode]
    inside = source >= last if mode == "up" else source <= last
    return (source if inside else lane), inside


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@settings(deadline=None, max_examples=30)
@given(
    b=st.lists(st.integers(0, 2**32 - 1), min_size=32, max_size=32),
    c=st.sampled_from([0, 31, 0x1F, 0x181F, 0x1C1F, 0x1800, 0x1C00, 0x1003, 0x1F1F]) | st.integers(0, 2**32 - 1),
)
def test_shuffles_follow_the_pseudocode(b, c, mode):
    body = f"shfl.sync.{mode}.b32 %out0|%p1, %in0, %in1, %in2, -1; selp.b32 %out1, 1, 0, %p1;"
    (values, inside), _ = launch(body, words(*LANES + 100), words(*b), words(*[c] * 32), results=2)
    expected = [shuffled(mode, lane, b[lane], c) for lane in range(32)]
    assert list(zip((values - 100).tolist(), (inside == 1).tolist(), strict=True)) == expected


def test_a_shuffle_into_its_own_register():
    (out,), _ = launch("mov.b32 %out0, %in0; shfl.sync.bfly.b32 %out0, %out0, 1, 31, -1;", words(*LANES))
    assert (out == LANES ^ 1).all()


@pytest.mark.parametrize("block", [16, 20])
def test_lanes_that_are_not_there(block):
    body = "shfl.sync.down.b32 %out0, %in0, 8, 31, -1;"
    (out,), outcome = launch(body, words(*range(block)), block=block, check=False)
    assert outcome.events[0].kind == "undefined shuffle" and not outcome.events[0].fatal
    assert (out == [lane + 8 if lane + 8 < block else ALL for lane in range(block)]).all()


def test_sets_of_lanes_shuffle_at_the_same_time():
    body = "shfl.sync.idx.b32 %out0, %in0, 1, 0x181f, %in1;"  # segments of 8
    (out,), _ = launch(body, words(*LANES), words(*0xFF << LANES // 8 * 8))
    assert (out == LANES // 8 * 8 + 1).all()


def test_a_shuffle_across_sets_is_found():
    body = "shfl.sync.bfly.b32 %out0, %in0, 16, 31, %in1;"
    _, outcome = launch(body, words(*LANES), words(*np.where(LANES < 16, 0xFFFF, 0xFFFF0000)), check=False)
    assert "undefined shuffle" in [event.kind for event in outcome.events]


# ---- votes, matches, elections --------------------------------------------------------------------------------------

SUBSETS = [(ALL, ALL), (0x0000FF0F, 0x0000FF0F), (ALL, 0x00FFFFFF)]  # members, lanes that have not exited
VOTES = {"none": 0, "all": ALL, "some": 0x00F0F00F, "one": 0x100}


@pytest.mark.parametrize("members, live", SUBSETS)
@pytest.mark.parametrize("negated", [False, True])
@pytest.mark.parametrize("votes", VOTES.values(), ids=VOTES)
def test_votes(votes, negated, members, live):
    source = "!%p1" if negated else "%p1"
    modes = ("all", "any", "uni")
    body = f"setp.ne.u32 %p1, %in0, 0; mov.u32 %r1, {live}; mov.u32 %r3, {members}; shr.u32 %r2, %r1, %t;"
    body += f"and.b32 %r2, %r2, 1; setp.eq.u32 %p2, %r2, 0; @%p2 exit; vote.sync.ballot.b32 %out3, {source}, %r3;"
    for k, mode in enumerate(modes):
        body += f"vote.sync.{mode}.pred %p3, {source}, {members}; selp.b32 %out{k}, 1, 0, %p3;"
    (every, some, uniform, ballot), _ = launch(body, words(*votes >> LANES & 1), results=4)
    here = members & live
    yes = (~votes if negated else votes) & here
    active = live >> LANES & 1 == 1
    assert (ballot[active] == yes).all()
    assert (every[active] == (yes == here)).all() and (some[active] == (yes != 0)).all()
    assert (uniform[active] == (yes in (0, here))).all()


@pytest.mark.parametrize("bits", [32, 64])
def test_match_any(bits):
    values = np.random.default_rng(1).integers(0, 5, 32).astype(f"u{bits // 8}") << (bits - 4)
    (out,), _ = launch(f"match.any.sync.b{bits} %out0, %in0, -1;", values)
    assert out.tolist() == [sum(1 << j for j in range(32) if values[j] == value) for value in values]


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("different", [None, 0, 31])
def test_match_all(different, bits):
    values = np.full(32, 3, f"u{bits // 8}") << (bits - 4)
    if different is not None:
        values[different] += 1
    body = f"match.all.sync.b{bits} %out0|%p1, %in0, -1; selp.b32 %out1, 1, 0, %p1;"
    body += f"match.all.sync.b{bits} %out2, %in0, -1;"
    (lanes, same, again), _ = launch(body, values, results=3)
    assert (lanes == (ALL if different is None else 0)).all() and (again == lanes).all()
    assert (same == (different is None)).all()


@pytest.mark.parametrize("block", [5, 32])
def test_election(block):
    body = "elect.sync %out0|%p1, -1; selp.b32 %out1, 1, 0, %p1; elect.sync _|%p2, %in0; selp.b32 %out2, 1, 0, %p2;"
    members = np.where(np.arange(block) < 3, 0x7, 0xFFFFFFF8)
    (leader, leads, leads_set), _ = launch(body, words(*members), results=3, block=block)
    chosen, chosen_of_sets = np.flatnonzero(leads), np.flatnonzero(leads_set)
    assert len(chosen) == 1 and (leader == chosen).all() and (chosen_of_sets >= 3).tolist() == [False, True]
    if not on_silicon():  # PTX does not say who is elected
        assert chosen == [0] and chosen_of_sets.tolist() == [0, 3]


def test_activemask_in_a_branch():
    body = "setp.lt.u32 %p1, %t, 10; @%p1 bra LOW; activemask.b32 %out0; bra DONE; LOW: activemask.b32 %out0; DONE:"
    (out,), _ = launch(body)
    branch = np.where(LANES < 10, 0x3FF, 0xFFFFFC00)
    if on_silicon():  # lanes of a branch need not go together
        assert (out & ~branch == 0).all() and (out >> LANES & 1).all()
    else:
        assert (out == branch).all()


# ---- redux ----------------------------------------------------------------------------------------------------------

INTEGERS = {
    "add.u32": sum, "add.s32": sum, "min.u32": min, "max.u32": max, "min.s32": min, "max.s32": max,
    "and.b32": np.bitwise_and.reduce, "or.b32": np.bitwise_or.reduce, "xor.b32": np.bitwise_xor.reduce,
}  # fmt: skip


@pytest.mark.parametrize("members", [ALL, 0xF0F0FF00])
@pytest.mark.parametrize("operation", INTEGERS)
def test_integer_reductions(operation, members):
    values = np.random.default_rng(2).integers(0, 2**32, 32, np.uint32)
    body = f"mov.u32 %r1, {members}; shr.u32 %r2, %r1, %t; and.b32 %r2, %r2, 1; setp.eq.u32 %p1, %r2, 0; @%p1 bra DONE;"
    (out,), _ = launch(f"{body} redux.sync.{operation} %out0, %in0, %r1; DONE:", values)
    inside = members >> LANES & 1 == 1
    taken = values[inside].view(np.int32 if "s32" in operation else np.uint32).tolist()
    assert (out[inside] == int(INTEGERS[operation](taken)) % 2**32).all() and (out[~inside] == 0xDEAD).all()


def float_reduction(bits: list[int], *, largest: bool, absolute: bool, nan: bool) -> int:
    """PTX ISA, redux.sync: numbers win over NaNs unless .NaN, -0 is less than +0."""
    if absolute:
        bits = [x & 0x7FFFFFFF for x in bits]
    numbers = [x for x in bits if x & 0x7FFFFFFF <= 0x7F800000]
    if not numbers or (nan and len(numbers) < len(bits)):
        return 0x7FFFFFFF
    value = [(struct.unpack("<f", struct.pack("<I", x))[0], not x >> 31, x) for x in numbers]
    return (max if largest else min)(value)[2]


SPECIAL = st.sampled_from([0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 1, 0x80000001, 0x3F800000])


@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("operation", ["min", "max"])
@settings(deadline=None, max_examples=20)
@given(bits=st.lists(st.integers(0, ALL), min_size=32, max_size=32) | st.lists(SPECIAL, min_size=1, max_size=3))
def test_float_reductions(bits, operation, absolute, nan):
    bits = [bits[k % len(bits)] for k in range(32)]
    name = f"redux.sync.{operation}{'.abs' * absolute}{'.NaN' * nan}.f32"
    (out,), _ = launch(f"{name} %out0, %in0, -1;", words(*bits))
    assert (out == float_reduction(bits, largest=operation == "max", absolute=absolute, nan=nan)).all()


# ---- convergence ----------------------------------------------------------------------------------------------------


def test_members_wait_for_those_that_diverged():
    """Half of the warp takes a detour; the vote sees all of it."""
    body = """setp.lt.u32 %p1, %t, 16; mov.u32 %r1, 0; @%p1 bra MEET;
    DETOUR: add.u32 %r1, %r1, 1; setp.lt.u32 %p2, %r1, 9; @%p2 bra DETOUR;
    MEET: vote.sync.ballot.b32 %out0, %p1, -1; bar.warp.sync -1; bar.warp.sync %in0;"""
    (out,), _ = launch(body, words(*[ALL] * 32))
    assert (out == 0xFFFF).all()


def test_bar_warp_sync_orders_shared_memory():
    store = ".shared .align 4 .b8 buf[128]; mov.u32 %r1, buf; mad.lo.u32 %r1, %t, 4, %r1; st.shared.b32 [%r1], %t;"
    load = "xor.b32 %r1, %r1, 124; ld.shared.b32 %out0, [%r1];"
    (out,), _ = launch(store + "bar.warp.sync -1;" + load)
    assert (out == 31 - LANES).all()
    _, outcome = launch(store + load, check=False)
    assert [event.kind for event in outcome.events] == ["race"]


@pytest.mark.parametrize("body, kind", [
    ("setp.lt.u32 %p1, %t, 16; @%p1 vote.sync.any.pred %p2, %p1, -1;", "deadlock"),
    ("mov.u32 %r1, 0xff; shfl.sync.idx.b32 %out0, %t, 0, 31, %r1;", "member mask"),
    ("setp.lt.u32 %p1, %t, 16; selp.b32 %r1, 0xffff, -1, %p1; redux.sync.add.u32 %out0, %t, %r1;", "member mask"),
])  # fmt: skip
def test_wrong_member_masks(body, kind):
    _, outcome = launch(body, check=False)
    assert [event.kind for event in outcome.events] == [kind] and outcome.events[0].fatal


@pytest.mark.parametrize("instruction", [
    "shfl.bfly.b32 %out0, %t, 1, 31;", "shfl.sync.bfly.b64 %d1, %d2, 1, 31, -1;", "vote.all.pred %p1, %p2;",
    "vote.sync.all.b32 %out0, %p1, -1;", "match.any.sync.b32 %out0|%p1, %t, -1;", "match.any.sync.b16 %out0, %t, -1;",
    "redux.sync.add.f32 %out0, %t, -1;", "redux.sync.min.abs.s32 %out0, %t, -1;", "redux.sync.and.u32 %out0, %t, -1;",
    "activemask.b64 %d1;", "elect.sync.extra %out0|%p1, -1;",
])  # fmt: skip
def test_what_is_not_emulated_is_refused(instruction):
    with pytest.raises(UnsupportedInstruction, match=r"PTX line \d+"):
        launch(instruction)
