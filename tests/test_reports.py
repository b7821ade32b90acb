"""Public bug reports against other implementations, each with the right value here. The repository and number of a
report stand in the docstring. Three are about time rather than values: a first call that compiles (vllm#39822) is what
`python -m cute_ssd compile` takes away, with tests in test_compile.py and test_models.py; slow defaults (sglang#39130)
and host overhead at small sizes (mamba#355) are figures of `python -m cute_ssd bench`, beside their goals."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_ssd
from cute_ssd import reference
from cute_ssd.device import Device
from cute_ssd.plan import plan

from .common import check, close, extras, inputs, packed, states

REPOSITORY = Path(__file__).parents[1]
NAMES = ("x", "dt", "A", "B", "C")


def against_recurrence(made: dict[str, Any], **kwargs: Any) -> tuple[Tensor, Tensor]:
    args = [made[n] for n in NAMES]
    y, final = cute_ssd.mamba_chunk_scan_combined(*args, 256, return_final_states=True, **kwargs)
    wide = torch.float64 if made["x"].dtype == torch.float64 else torch.float32
    true = reference.mamba_chunk_scan_combined(*args, **kwargs)
    eager = reference.mamba_chunk_scan_combined(*args, **kwargs, dtype=wide)
    check(y, true[0], eager[0])
    check(final, true[1], eager[1])
    return y, final


@pytest.mark.emulated("sm_100a", "sm_100a:tiles")
@pytest.mark.parametrize("A", [-1e6, -3e4])
def test_huge_decay_is_finite(device: str, A: float) -> None:
    """vllm#37501: rounding made cs_last - cs_k positive, Inf in the state, NaN at decode."""
    made = inputs(1, 256, device=device)
    made["A"], made["dt"] = torch.full_like(made["A"], A), torch.full_like(made["dt"], 20.0)
    against_recurrence(made)


@pytest.mark.emulated("sm_100a", "sm_100a:tiles")
def test_a_huge_step_keeps_the_digits_of_small_ones(device: str) -> None:
    """The fault behind vllm#37501: after one huge step, sums in fp32 have no digits left for the next decays."""
    made = inputs(1, 64, device=device)
    made["dt"][:, 5] = 1e5
    against_recurrence(made)


@pytest.mark.emulated("sm_100a", "sm_100a:tiles")
def test_infinite_decay(device: str) -> None:
    """log_decay -inf forgets everything before; it must not become inf - inf."""
    made = inputs(1, 100, device=device)
    log_decay = -torch.rand(1, 4, 100, device=device)
    log_decay[..., [0, 7, 70]] = -float("inf")
    args = (made["x"], log_decay, made["B"], made["C"])
    y, final = cute_ssd.ssd_chunk_scan(*args, return_final_states=True)
    true, eager = reference.ssd_chunk_scan(*args), reference.ssd_chunk_scan(*args, dtype=torch.float32)
    check(y, true[0], eager[0])
    check(final, true[1], eager[1])


@pytest.mark.emulated("sm_100a", "sm_100a:tiles")
def test_growth(device: str) -> None:
    """A above zero lets the state grow; the masked half of the tile then holds the small exponentials."""
    made = inputs(1, 150, device=device)
    made["A"] = torch.tensor([0.1, 0.5, -1.0, 0.0], device=device)
    against_recurrence(made)


@pytest.mark.emulated("sm_100a")
@pytest.mark.emulated_slowly("sm_100a:tiles")
@pytest.mark.parametrize("dt", [21.0, 90.0, 200.0, 1e4])
def test_softplus_is_linear_above_twenty(device: str, dt: float) -> None:
    """TRT-LLM#14652: log(exp(dt) + 1) overflows."""
    made = inputs(1, 5, device=device)
    made["dt"], made["A"] = torch.full_like(made["dt"], dt), torch.full_like(made["A"], -1e-5)
    plain = cute_ssd.mamba_chunk_scan_combined(**made, chunk_size=64)
    assert torch.equal(plain, cute_ssd.mamba_chunk_scan_combined(**made, chunk_size=64, dt_softplus=True))


@pytest.mark.emulated("sm_100a")
@pytest.mark.emulated_slowly("sm_100a:tiles")
@pytest.mark.parametrize("dt", [-10.0, -17.0, -30.0, -80.0])
def test_softplus_far_below_zero(device: str, dt: float) -> None:
    """log(exp(dt) + 1) is exactly 0 below -17; log1p keeps the relative precision."""
    made = inputs(1, 3, device=device)
    made["dt"] = torch.full_like(made["dt"], dt)
    against_recurrence(made, dt_softplus=True)


@pytest.mark.emulated_slowly("sm_100a:tiles")
@pytest.mark.parametrize("chunk_size", [40, 50, 256])
def test_any_chunk_size(device: str, chunk_size: int) -> None:
    """mamba#449: NaN for chunks that are no power of two; a sequence shorter than the chunk."""
    made = inputs(1, 200, device=device)
    y = cute_ssd.mamba_chunk_scan_combined(**made, chunk_size=chunk_size)
    assert torch.equal(y, cute_ssd.mamba_chunk_scan_combined(**made, chunk_size=64))
    against_recurrence(made)


def test_slow_decay_over_a_long_sequence(device: str) -> None:
    """TRT-LLM#14600: a 16-bit state between chunks drifts; with A dt about -1e-4 the error must stay flat."""
    made = inputs(1, 8192, 1, 2, 1, 4, device=device)
    made["A"], made["dt"] = torch.tensor([-1e-2], device=device), torch.full_like(made["dt"], 1e-2)
    y, _ = against_recurrence(made)
    true, _, _ = reference.mamba_chunk_scan_combined(*(made[n] for n in NAMES))
    error = (y.cpu().double() - true).abs()[0, :, 0, 0].view(8, -1).norm(dim=1) / true.abs().max()
    assert error.max() < 1e-4


@pytest.mark.emulated_slowly("sm_100a:tiles")
def test_deep_decay_inside_a_chunk(device: str) -> None:
    """TileOPs#1465: exp(a_l) exp(-a_s) instead of exp(a_l - a_s) overflows on the public suite's inputs."""
    made = inputs(1, 300, 2, ngroups=1, dtype=torch.bfloat16, device=device)
    log_decay = (-0.001 - 0.999 * torch.rand(1, 2, 300, device=device)).bfloat16()
    args = (made["x"], log_decay, made["B"], made["C"])
    y, final = cute_ssd.ssd_chunk_scan(*args, return_final_states=True)
    true, eager = reference.ssd_chunk_scan(*args), reference.ssd_chunk_scan(*args, dtype=torch.float32)
    check(y, true[0], eager[0])
    check(final, true[1], eager[1])


PRINT_BITS = """
import hashlib, torch, cute_ssd
from tests.common import inputs
y, s = cute_ssd.mamba_chunk_scan_combined(**inputs(2, 300, 8, 64, 2, 64), chunk_size=64, return_final_states=True)
print(hashlib.sha256(y.numpy().tobytes() + s.numpy().tobytes()).hexdigest())
"""


def test_two_processes_give_the_same_bits() -> None:
    """mamba#827, triton#10590: results differ from run to run."""
    runs = [
        subprocess.run([sys.executable, "-c", PRINT_BITS], capture_output=True, text=True, check=True, cwd=REPOSITORY)
        for _ in range(2)
    ]
    assert runs[0].stdout == runs[1].stdout != ""


@pytest.mark.emulated_slowly("sm_100a:tiles")
@pytest.mark.parametrize("dstate", [64, 128, 256])
@pytest.mark.parametrize("chunk_size", [64, 128, 256])
def test_every_dstate_with_every_chunk(device: str, dstate: int, chunk_size: int) -> None:
    """flashinfer#3397: compiles only when dstate equals chunk_size."""
    made = inputs(1, 130, 2, 64, 1, dstate, device=device)
    y = cute_ssd.mamba_chunk_scan_combined(**made, chunk_size=chunk_size)
    against_recurrence(made)
    assert torch.isfinite(y).all()


@pytest.mark.emulated_slowly("sm_100a:tiles")
def test_headdim_80(device: str) -> None:
    """TRT-Edge-LLM#174: Nemotron Nano 9B v2 shape."""
    against_recurrence(inputs(1, 70, 16, 80, 8, 128, device=device))


@pytest.mark.emulated("sm_100a", "sm_100a:tiles")
@pytest.mark.parametrize("seqlen", range(1, 9))
def test_tiny_sequences(device: str, seqlen: int) -> None:
    """fla#88: compile error for L <= 8."""
    against_recurrence(inputs(1, seqlen, device=device), **{})


@pytest.mark.emulated_slowly("sm_100a:tiles")
@pytest.mark.parametrize("ngroups", [2, 4, 8])
def test_groups_are_interleaved(device: str, ngroups: int) -> None:
    """HF#37533: groups tiled instead of repeated; compared head by head."""
    made = inputs(1, 70, 16, ngroups=ngroups, device=device)
    y = cute_ssd.mamba_chunk_scan_combined(**made, chunk_size=64)
    for head in range(16):
        group = head // (16 // ngroups)
        one = {
            "x": made["x"][:, :, head : head + 1],
            "dt": made["dt"][:, :, head : head + 1],
            "A": made["A"][head : head + 1],
            "B": made["B"][:, :, group : group + 1],
            "C": made["C"][:, :, group : group + 1],
        }
        close(cute_ssd.mamba_chunk_scan_combined(**one, chunk_size=64)[:, :, 0], y[:, :, head])


@pytest.mark.emulated_slowly("sm_100a:tiles")
@pytest.mark.parametrize("nheads", [8, 3])
def test_heads_of_one_rank(device: str, nheads: int) -> None:
    """vllm#55091: nheads below the model's group count, one replicated group."""
    against_recurrence(inputs(1, 70, nheads, ngroups=1, device=device))


@pytest.fixture
def untouched_memory() -> Any:
    """Buffers of gigabytes of which little is used must not be filled."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.utils.deterministic.fill_uninitialized_memory = True


def test_offsets_beyond_two_to_the_31(device: str, untouched_memory: None) -> None:
    """mamba#1015, #987: dt is the last columns of a wide projection, seqlen * row pitch > 2^31."""
    seqlen, pitch, nheads = 115_800, 18_560, 4
    assert seqlen * pitch > 2**31
    projection = torch.empty(1, seqlen, pitch, dtype=torch.float16, device=device)
    dt = projection[:, :, -nheads:]
    dt.copy_(torch.rand(1, seqlen, nheads))
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, seqlen, nheads, 1, generator=g).to(device)
    B, C = torch.randn(2, 1, seqlen, 1, 2, generator=g).to(device)
    A = -torch.rand(nheads, generator=g).to(device)
    got = cute_ssd.mamba_chunk_scan_combined(x, dt, A, B, C, 256, return_final_states=True)
    want = cute_ssd.mamba_chunk_scan_combined(x, dt.clone(), A, B, C, 256, return_final_states=True)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.slow
def test_elements_beyond_two_to_the_31(device: str, untouched_memory: None) -> None:
    """mamba#1015: seqlen * nheads * headdim > 2^31. The last tokens, a sequence of their own, have the bits that they
    have in a call without the others."""
    nheads, headdim, last = 128, 64, 100
    seqlen = 2**31 // (nheads * headdim) + 1000
    if device == "cpu" and _available_memory() < 8 << 30:
        pytest.skip("x is 4 GiB to be read and y 4 GiB to be written")
    x = torch.empty(seqlen, nheads, headdim, dtype=torch.bfloat16, device=device)
    x[-last:] = torch.randn(last, nheads, headdim)
    assert x.numel() - last * nheads * headdim > 2**31
    B, C = torch.randn(2, seqlen, 1, 2, device=device).bfloat16()
    made = {"x": x, "dt": torch.rand(seqlen, 1, device=device).expand(-1, nheads), "B": B, "C": C}
    A = -torch.rand(nheads, device=device)
    got, want = (
        cute_ssd.mamba_chunk_scan_varlen(
            **{n: t[-tokens:] for n, t in made.items()},
            A=A,
            query_start_loc=torch.tensor([0, tokens - last, tokens], device=device),
            return_final_states=True,
        )
        for tokens in (seqlen, last)
    )
    assert torch.equal(got[0][-last:], want[0]) and torch.equal(got[1][1], want[1][1])
    assert (want[0] != 0).any()


def _available_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def test_slot_offsets_beyond_two_to_the_31(device: str, untouched_memory: None) -> None:
    """vllm#48109: slot * nheads * headdim * dstate > 2^31."""
    pool = torch.empty(2050, 128, 64, 128, dtype=torch.float16, device=device)
    assert 2049 * pool[0].numel() > 2**31
    pool[2049] = 0.5
    made = packed(inputs(1, 3, 128, 64, 8, 128, device=device))
    start = pool[2049:].clone()
    slots = torch.tensor([2049], dtype=torch.int32, device=device)
    offsets = torch.tensor([0, 3], dtype=torch.int32, device=device)
    y = cute_ssd.mamba_chunk_scan_varlen_inplace(
        **made,
        ssm_pool=pool,
        cache_indices=slots,
        query_start_loc=offsets,
        has_initial_state=torch.tensor([True], device=device),
        dt_softplus=False,
    )
    want, final = cute_ssd.mamba_chunk_scan_varlen(
        **made, query_start_loc=offsets, initial_states=start, return_final_states=True, state_dtype=torch.float16
    )
    assert torch.equal(y, want) and torch.equal(pool[2049:], final)
    step = {n: t[0:1] if n != "A" else t for n, t in made.items()}
    before = pool[2049:].clone()
    y = cute_ssd.selective_state_update(pool, **step, state_batch_indices=slots)
    assert torch.equal(y, cute_ssd.selective_state_update(before, **step)) and torch.equal(pool[2049:], before)


@pytest.mark.emulated("sm_100a", "sm_100a:tiles")
def test_initial_states_of_a_single_sequence(device: str) -> None:
    """vllm#22034: ignored when there is one sequence."""
    made = inputs(1, 20, device=device)
    start = states(1, device)
    against_recurrence(made, initial_states=start)
    without = cute_ssd.mamba_chunk_scan_combined(**made, chunk_size=64)
    assert not torch.equal(cute_ssd.mamba_chunk_scan_combined(**made, chunk_size=64, initial_states=start), without)


@pytest.mark.emulated_slowly("sm_100a:tiles")
@pytest.mark.parametrize("lengths", [[500, 700, 900], [256, 300, 400]])
def test_chunk_states_of_every_request(device: str, lengths: list[int]) -> None:
    """sglang#31833, #33450, #37836: wrong intermediate state for all but the first request."""
    made = packed(inputs(1, sum(lengths), 2, ngroups=1, device=device))
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
    _, chunks = cute_ssd.mamba_chunk_scan_varlen(
        **made, query_start_loc=offsets, chunk_size=128, return_chunk_states=True
    )
    row = 0
    for s, length in enumerate(lengths):
        for end in [*range(128, length, 128), length]:
            part = slice(int(offsets[s]), int(offsets[s]) + end)
            cut = {n: t[part] if n != "A" else t for n, t in made.items()}
            _, want = cute_ssd.mamba_chunk_scan_varlen(
                **cut, query_start_loc=torch.tensor([0, end], device=device), return_final_states=True
            )
            close(chunks[row], want[0])
            row += 1


@pytest.mark.emulated_slowly("sm_100a:tiles")
def test_prefill_in_two_uneven_parts(device: str) -> None:
    """vllm#34587: 3026 tokens as 1866 + 1160."""
    made = packed(inputs(1, 3026, 2, ngroups=1, device=device))
    whole, state = cute_ssd.mamba_chunk_scan_varlen(
        **made, query_start_loc=torch.tensor([0, 3026], device=device), return_final_states=True
    )
    pool = torch.zeros_like(state)
    parts = []
    for low, high in ((0, 1866), (1866, 3026)):
        cut = {n: t[low:high] if n != "A" else t for n, t in made.items()}
        parts.append(
            cute_ssd.mamba_chunk_scan_varlen_inplace(
                **cut,
                ssm_pool=pool,
                cache_indices=torch.tensor([0], device=device),
                query_start_loc=torch.tensor([0, high - low], device=device),
                has_initial_state=torch.tensor([low > 0], device=device),
                dt_softplus=False,
            )
        )
    close(torch.cat(parts), whole)
    close(pool, state)


@pytest.mark.emulated_slowly("sm_100a:tiles")
def test_segments_of_64(device: str) -> None:
    """mamba#641: chunk-wise inference differs from the full pass (error 158)."""
    made = inputs(1, 256, 4, ngroups=1, device=device)
    whole = cute_ssd.mamba_chunk_scan_combined(**made, chunk_size=64)
    parts, state = [], None
    for low in range(0, 256, 64):
        cut = {n: t[:, low : low + 64] if n != "A" else t for n, t in made.items()}
        y, state = cute_ssd.mamba_chunk_scan_combined(
            **cut, chunk_size=64, initial_states=state, return_final_states=True
        )
        parts.append(y)
    close(torch.cat(parts, 1), whole)


@pytest.mark.emulated("sm_100a:tiles")
def test_more_than_one_chunk(device: str) -> None:
    """HF#35154, #34817: the cross-chunk state was lost."""
    against_recurrence(inputs(1, 3 * 64 + 5, device=device))


@pytest.mark.emulated("sm_100a", "sm_100a:tiles")
def test_repeated_offsets(device: str) -> None:
    """Megatron#3282: repeated trailing offsets; the slot of an empty sequence is untouched (also vllm#37728)."""
    made = packed(inputs(1, 40, device=device))
    pool = states(5, device)
    before = pool.clone()
    y = cute_ssd.mamba_chunk_scan_varlen_inplace(
        **made,
        ssm_pool=pool,
        cache_indices=torch.tensor([0, 1, 2, 3], device=device),
        query_start_loc=torch.tensor([0, 16, 40, 40, 40], device=device),
        has_initial_state=torch.tensor([True, True, True, True], device=device),
    )
    assert torch.equal(pool[2:], before[2:]) and not torch.equal(pool[:2], before[:2]) and torch.isfinite(y).all()


@pytest.mark.emulated("sm_100a", "sm_100a:tiles")
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("started", [None, False, True])
def test_sequences_without_tokens_touch_no_slot(device: str, started: bool | None, pool_dtype: torch.dtype) -> None:
    """vllm#37728: a finished request stays in the block table, without tokens, and its slot may be another's by now;
    nothing is read or written for it, whatever its flag says."""
    made = packed(inputs(1, 40, device=device))
    pool = states(5, device).to(pool_dtype)
    before, alone = pool.clone(), pool.clone()

    def scan(pool: Tensor, slots: list[int], offsets: list[int]) -> Tensor:
        flags = None if started is None else torch.full((len(slots),), started, device=device)
        return cute_ssd.mamba_chunk_scan_varlen_inplace(
            **made,
            ssm_pool=pool,
            cache_indices=torch.tensor(slots, device=device),
            query_start_loc=torch.tensor(offsets, device=device),
            has_initial_state=flags,
        )

    y = scan(pool, [4, 0, 1, 1, 0, 2], [0, 0, 16, 16, 40, 40, 40])
    assert torch.equal(pool[2:], before[2:]) and not torch.equal(pool[:2], before[:2])
    assert torch.equal(y, scan(alone, [0, 1], [0, 16, 40])) and torch.equal(pool, alone)


@pytest.mark.emulated_slowly("sm_100a:tiles")
@pytest.mark.parametrize("how", ["seq_idx", "cu_seqlens"])
def test_packed_documents_do_not_leak(device: str, how: str) -> None:
    """SkyRL#2056: bit-equal packed and alone."""
    made = inputs(1, 90, device=device)
    ids = (torch.arange(90, device=device)[None] >= 37).int()
    given = {"seq_idx": ids} if how == "seq_idx" else {"cu_seqlens": torch.tensor([0, 37, 90], device=device)}
    together = cute_ssd.mamba_chunk_scan_combined(**made, chunk_size=64, **given)
    alone = [
        cute_ssd.mamba_chunk_scan_combined(**{n: t[:, part] if n != "A" else t for n, t in made.items()}, chunk_size=64)
        for part in (slice(0, 37), slice(37, 90))
    ]
    assert torch.equal(together, torch.cat(alone, 1))


@pytest.mark.emulated("sm_100a")
@pytest.mark.emulated_slowly("sm_100a:tiles")
@pytest.mark.parametrize("pad", [-1, 0, 7])
def test_padding_writes_no_slot(device: str, pad: int) -> None:
    """sglang#36880, #36885, TRT-LLM#13151: padded rows alias a live slot; repeated padding is harmless."""
    pool = states(8, device)
    before = pool.clone()
    step = {n: t[:, 0] if n != "A" else t for n, t in inputs(4, 1, device=device).items()}
    slots = torch.tensor([3, pad, 5, pad], device=device)
    y = cute_ssd.selective_state_update(pool, **step, state_batch_indices=slots, pad_slot_id=pad)
    others = [s for s in range(8) if s not in (3, 5)]
    assert torch.equal(pool[others], before[others]) and (y[[1, 3]] == 0).all() and (y[[0, 2]] != 0).any()
    made = packed(inputs(1, 8, device=device))
    cute_ssd.mamba_chunk_scan_varlen_inplace(
        **made,
        ssm_pool=pool,
        cache_indices=slots,
        query_start_loc=torch.tensor([0, 2, 4, 6, 8], device=device),
        pad_slot_id=pad,
    )
    assert torch.equal(pool[others], before[others])


@pytest.mark.emulated("sm_100a")
@pytest.mark.emulated_slowly("sm_100a:tiles")
def test_state_after_the_last_real_token(device: str) -> None:
    """vllm#55178: the state was saved after the padding positions."""
    made = packed(inputs(1, 12, device=device))
    _, want = cute_ssd.mamba_chunk_scan_varlen(
        **{n: t[:1] if n != "A" else t for n, t in made.items()},
        query_start_loc=torch.tensor([0, 1], device=device),
        return_final_states=True,
    )
    _, got = cute_ssd.mamba_chunk_scan_varlen(
        **made, query_start_loc=torch.tensor([0, 1], device=device), return_final_states=True
    )
    assert torch.equal(got, want)


@pytest.mark.emulated("sm_100a")
@pytest.mark.parametrize("pad", [1, 8, 32])
def test_views_of_one_projection(device: str, pad: int) -> None:
    """vllm#32710, TRT-LLM#14439, vllm#48363: column slices with odd row pitch and 2-byte alignment."""
    made = packed(inputs(1, 40, dtype=torch.bfloat16, device=device))
    made["dt"] = made["dt"].bfloat16()
    want = cute_ssd.mamba_chunk_scan_varlen(**made, query_start_loc=torch.tensor([0, 13, 40], device=device))
    sizes = {"x": 32, "B": 32, "C": 32, "dt": 4}
    fused = torch.full((40, sum(sizes.values()) + pad + 1), float("nan"), dtype=torch.bfloat16, device=device)
    column = 1
    for name, width in sizes.items():
        view = fused[:, column : column + width].unflatten(1, made[name].shape[1:])
        view.copy_(made[name])
        made[name] = view
        column += width
    got = cute_ssd.mamba_chunk_scan_varlen(**made, query_start_loc=torch.tensor([0, 13, 40], device=device))
    assert torch.equal(got, want)


def test_mutated_arguments_are_declared() -> None:
    """TRT-LLM#18888: the in-place operators must say what they write."""
    ops = torch.ops.cute_ssd
    written = {
        name: [a.name for a in getattr(ops, name).default._schema.arguments if a.alias_info and a.alias_info.is_write]
        for name in ("chunk_scan", "chunk_scan_varlen", "chunk_scan_varlen_inplace", "selective_state_update")
    }
    assert written == {
        "chunk_scan": [],
        "chunk_scan_varlen": ["out"],
        "chunk_scan_varlen_inplace": ["ssm_pool", "out"],
        "selective_state_update": ["state", "out"],
    }


def test_unsupported_architecture_names_what_is_supported() -> None:
    """flashinfer#3668: a cryptic error "sm_120a"."""
    how = cute_ssd.explain(cute_ssd.mamba_chunk_scan_combined, **inputs(), chunk_size=64, arch="sm_120a")
    assert how.backend == "recurrence"
    with pytest.raises(cute_ssd.UnsupportedError, match=r"\(sm_101a\).*runs on the CPU and on .*sm_120a.*x\.cpu\(\)"):
        plan(how.problem, Device("cuda", "sm_101a"))


@pytest.mark.emulated("sm_100a")
@pytest.mark.emulated_slowly("sm_100a:tiles")
def test_results_are_not_reused_buffers(device: str) -> None:
    """FlashInfer's final states are a cached buffer that the next call overwrites."""
    made = inputs(device=device)
    more = extras(made)
    first = cute_ssd.mamba_chunk_scan_combined(**made, chunk_size=64, return_final_states=True, **more)
    kept = [t.clone() for t in first]
    made["x"] = made["x"] * 2
    cute_ssd.mamba_chunk_scan_combined(**made, chunk_size=64, return_final_states=True, **more)
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))
