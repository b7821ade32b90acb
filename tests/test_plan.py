"""Plans: which kernel, how it is spread over the device, and why; without a GPU and without the compiler."""

import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_ssd
from cute_ssd import UnsupportedError, models, plan, suite
from cute_ssd.device import Device
from cute_ssd.kernels.sm100 import config
from cute_ssd.plan import Plan
from cute_ssd.problem import Problem

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SM100 = Device.from_arch("sm_100a")


def problem(**changes: Any) -> Problem:
    """2048 tokens of 16 heads of 64 x 256."""
    made = Problem("mamba_chunk_scan_combined", 1, 2048, 16, 64, 1, 256, BF16, F32, chunk_size=256, dt="softplus")
    return made._replace(**changes)


def planned(**changes: Any) -> Plan:
    return plan.plan(problem(**changes), SM100)


def arguments(
    seqlen: int = 2048, headdim: int = 64, dstate: int = 256, dtype: torch.dtype = BF16, **more: Any
) -> dict[str, Any]:
    """Of `mamba_chunk_scan_combined`, without data."""

    def empty(*shape: int, of: torch.dtype = F32) -> Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    B = empty(1, seqlen, 1, dstate, of=dtype)
    made = {"x": empty(1, seqlen, 16, headdim, of=dtype), "dt": empty(1, seqlen, 16), "A": empty(16), "B": B, "C": B}
    return {**made, "chunk_size": 256, **more}


def explained(arch: str = "sm_100a", **changes: Any) -> Plan:
    return cute_ssd.explain(cute_ssd.mamba_chunk_scan_combined, **arguments(**changes), arch=arch)


def packed(**more: Any) -> dict[str, Any]:
    made = {name: t if name == "A" or not isinstance(t, Tensor) else t[0] for name, t in arguments().items()}
    return {**made, "query_start_loc": torch.empty(3, dtype=torch.int32, device="meta"), **more}


# What a plan says


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_long_sequences_go_to_the_tensor_cores(arch: str) -> None:
    found = explained(arch, seqlen=4096)
    assert found.backend == "chunked" and found.chunks is not None
    text = str(found)
    assert "chunked: 4096 token(s) a sequence are modelled at" in text
    state, scan = found.chunks.kernels
    for kernel in (state, scan):
        assert f"{kernel.name}: {kernel.items} item(s) of {kernel.heads} head(s) on {kernel.ctas} CTA(s)" in text
        assert f"{kernel.shared_bytes} bytes shared, {kernel.tensor_columns} tensor columns" in text
        assert kernel.shared_bytes <= config.SHARED_BYTES and kernel.tensor_columns <= config.TENSOR_COLUMNS
        assert kernel.items == 32 * 16 // kernel.heads and kernel.ctas == min(148, kernel.items)
    assert "state_passing: 1 sequence(s)" in text and f"workspace {found.chunks.workspace_bytes} bytes" in text
    assert "32 tile(s) of 128 tokens" in text


def test_tensor_instructions() -> None:
    """Of one head a full tile of 64 x 256 takes 8 K steps for each half of dstate, 16 for C Bᵀ, 16 for C S and 8 for
    M x; K steps behind the last token are left out. What the emulator counts: test_profiling_ncu.py."""
    full, tail = 16 * (2 * 8 + 16 + 16 + 8), 16 * (2 * 2 + 16 + 16 + 2)
    found = planned(seqlen=256 + 17)
    assert found.chunks is not None and found.chunks.scan_heads == 1
    assert found.tcgen05 == 2 * full + tail
    assert planned(seqlen=256 + 17, batch=3).tcgen05 == 3 * found.tcgen05
    assert planned(num_seqs=2).backend == "chunked" and planned(num_seqs=2).tcgen05 is None
    assert planned(seqlen=8).tcgen05 == 0 and planned(decode=True, seqlen=1).tcgen05 == 0
    assert plan.plan(problem(), Device("cpu")).tcgen05 is None


def test_plans_need_no_compiler() -> None:
    program = (
        "import sys, torch, cute_ssd\n"
        "from tests.test_plan import explained\n"
        "assert explained().backend == 'chunked'\n"
        "assert 'cutlass' not in sys.modules and not torch.cuda.is_initialized()\n"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": F32}, "float32 inputs are never rounded to bfloat16"),
        ({"headdim": 48}, "headdim is 48, tiles have 32, 64, 80, 96, 128"),
        ({"dstate": 16}, "dstate is 16, tiles have 64, 128, 256"),
        ({"misaligned": ("x", "B")}, "rows of x, B do not all start at multiples of 16 bytes"),
        ({"seqlen": 2**31}, "1 sequences of up to 2147483648 tokens are more than a grid can have"),
        ({"num_seqs": 2**28}, "268435456 sequences of up to 2048 tokens are more than"),
        ({"seqlen": 8}, r"8 token\(s\) a sequence are modelled at \d+ clocks in tiles .* at \d+ clocks token by token"),
        ({"seqlen": 0}, "there are no tokens"),
        ({"num_seqs": 0, "seqlen": 5}, "there are no tokens"),
        ({"decode": True, "seqlen": 1}, "a decode step reads and writes each state once"),
    ],
)
def test_the_reason_for_the_recurrence(changes: dict[str, Any], reason: str) -> None:
    found = planned(**changes)
    assert found.backend == "recurrence" and found.chunks is None
    assert re.search(reason, str(found))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_other_architectures_have_no_tiles(arch: str) -> None:
    assert f"{arch} has no tensor-core kernel" in str(explained(arch))


def test_the_length_that_pays() -> None:
    """About forty tokens of one sequence of the suite's heads; a dozen of many. Tiles win from there on."""
    for changes, low, high in (({}, 30, 60), ({"batch": 64}, 4, 20), ({"dstate": 128}, 40, 110)):
        backends = [planned(seqlen=seqlen, **changes).backend for seqlen in range(1, 300)]
        first = backends.index("chunked") + 1
        assert low <= first <= high
        assert all(backend == "chunked" for backend in backends[first:])


def test_packed_sequences_are_judged_by_their_mean() -> None:
    short = {"num_seqs": 2000, "seqlen": 4000}
    assert planned(**short).backend == "recurrence" and "2 token(s) a sequence" in str(planned(**short))
    assert planned(num_seqs=4, seqlen=4000).backend == "chunked"


# Heads of a work item


def test_few_tiles_have_few_heads_to_an_item() -> None:
    """One head below about 150 tiles of a head, two below 300; then as many as fill the device."""
    heads = {seqlen: planned(seqlen=seqlen).chunks.scan_heads for seqlen in (128, 1024, 2048, 4096, 8192)}  # type: ignore[union-attr]
    assert heads == {128: 1, 1024: 1, 2048: 2, 4096: 4, 8192: 8}


@pytest.mark.parametrize("case", suite.cases(), ids=lambda case: str(case.case))
def test_suite(case: suite.Case) -> None:
    """Every case in tiles, states in 16 bits, and where there are tiles enough, an item for most multiprocessors."""
    p = Problem("ssd_chunk_scan", *case[1:7], BF16, BF16, chunk_size=256)
    found = plan.plan(p, SM100)
    assert found.backend == "chunked" and found.chunks is not None and found.chunks.local == "bfloat16"
    tiles = case.batch * -(-case.seqlen // 128) * case.nheads
    for kernel in found.chunks.kernels:
        assert kernel.items * kernel.heads == tiles
        assert kernel.items >= min(tiles, 74)
        assert kernel.items % 148 == 0 or kernel.items < 148 or kernel.items % 148 > 37


@pytest.mark.parametrize("name", models.MODELS)
def test_models(name: str) -> None:
    """A prefill of any length has a plan that fits; few numbers of heads to an item are asked for."""
    m = models.MODELS[name]
    choices = plan.head_choices(m.nheads, m.ngroups)
    assert len(choices) <= 4
    for seqlen in (1024, 4096, 131072):
        for num_seqs in (None, 7):
            found = planned(seqlen=seqlen, num_seqs=num_seqs, **m._asdict())
            assert found.chunks is not None, str(found)
            assert found.chunks.scan_heads in choices and m.nheads // m.ngroups % found.chunks.scan_heads == 0
            for kernel in found.chunks.kernels:
                assert kernel.shared_bytes <= config.SHARED_BYTES and kernel.tensor_columns <= config.TENSOR_COLUMNS
    kernels = models.kernels(name, "sm_100a")
    assert {k.scan_heads for k in kernels.values() if isinstance(k, config.Chunked)} <= set(choices)
    assert len(kernels) >= 6 + 4


# What passes between tiles


@pytest.mark.parametrize(
    ("dtype", "state_dtype", "local", "width"),
    [(BF16, F32, "float32", 6), (BF16, BF16, "bfloat16", 2), (F16, F16, "float16", 2), (BF16, F16, "float32", 6)],
)
def test_states_between_tiles(dtype: torch.dtype, state_dtype: torch.dtype, local: str, width: int) -> None:
    """In fp32, unless the caller's own states have no more than 16 bits: then both workspaces are one."""
    chunks = planned(dtype=dtype, state_dtype=state_dtype).chunks
    assert chunks is not None and chunks.local == local
    assert chunks.workspace_bytes == 16 * 16 * (64 * 256 * width + 4)


def test_packed_tiles_are_an_upper_bound() -> None:
    chunks = planned(num_seqs=3, seqlen=1000).chunks
    assert chunks is not None and chunks.tiles == 1000 // 128 + 3


# What is refused


def test_misaligned_views_are_seen() -> None:
    """By explain as by the call: an odd row pitch, an odd start, an odd pool."""
    wide = torch.empty(1, 2048, 16 * 64 + 1, dtype=BF16, device="meta")
    for view in (wide[..., :-1], wide[..., 1:]):
        assert "rows of x do not" in str(explained(x=view.unflatten(-1, (16, 64))))
    wide = torch.empty(1, 2048, 16 * 64 + 8, dtype=BF16, device="meta")
    assert explained(x=wide[..., 8:].unflatten(-1, (16, 64))).backend == "chunked"
    assert "rows of x do not" in str(explained(x=wide[..., 4:-4].unflatten(-1, (16, 64))))
    one = torch.empty(1, 2048, 16, 64, dtype=BF16, device="meta").as_strided((1, 2048, 16, 64), (1, 1024, 64, 1))
    assert explained(x=one).backend == "chunked"  # the stride of one row counts for nothing
    pool = torch.empty(3, 16 * 64 * 256 + 1, device="meta")[:, :-1].unflatten(1, (16, 64, 256))
    inplace = packed(ssm_pool=pool, cache_indices=torch.empty(2, dtype=torch.int32, device="meta"))
    assert "rows of ssm_pool do not" in str(
        cute_ssd.explain(cute_ssd.mamba_chunk_scan_varlen_inplace, **inplace, arch="sm_100a")
    )


def test_a_strided_last_dimension_has_no_kernel() -> None:
    strided = torch.empty(1, 2048, 16, 128, dtype=BF16, device="meta")[..., ::2]
    with pytest.raises(UnsupportedError, match="the last dimension of x has stride 2, expected 1"):
        explained(x=strided)


def test_other_refusals_are_known_to_explain() -> None:
    with pytest.raises(UnsupportedError, match="dt is float64, expected float32"):
        explained(dt=torch.empty(1, 2048, 16, dtype=torch.float64, device="meta"))
    with pytest.raises(UnsupportedError, match=r"seq_idx makes sequences that only the data know.*pass cu_seqlens"):
        explained(seq_idx=torch.empty(1, 2048, dtype=torch.int32, device="meta"))
    with pytest.raises(UnsupportedError, match="no gradient on a GPU yet"):
        explained(x=arguments()["x"].requires_grad_())
    with torch.no_grad():
        assert explained(x=arguments()["x"].requires_grad_()).backend == "chunked"
    step = {
        "state": torch.empty(2, 4, 8, 16, device="meta"),
        "x": torch.empty(2, 4, 8, device="meta"),
        "dt": torch.empty(2, 4, 8, device="meta"),
        "A": torch.empty(4, device="meta"),
        "B": torch.empty(2, 1, 16, device="meta"),
        "C": torch.empty(2, 1, 16, device="meta"),
    }
    with pytest.raises(UnsupportedError, match=r"dt must have one value for each head.*stride 0"):
        cute_ssd.explain(cute_ssd.selective_state_update, **step, arch="sm_100a")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"chunk_size": 64}, "chunk states are wanted every 64 tokens, tiles have 128: the nearest multiple is 128"),
        ({"chunk_size": 200}, "chunk states are wanted every 200 tokens, tiles have 128: the nearest multiple is 256"),
        ({"dtype": F32}, "float32 inputs are never rounded"),
        ({"chunk_states": "own"}, "are wanted at cu_chunk_seqlens, tiles leave them every chunk_size tokens"),
        ({"misaligned": ("z",)}, "rows of z do not all start"),
    ],
)
def test_chunk_states_that_tiles_do_not_leave(changes: dict[str, Any], reason: str) -> None:
    found = planned(**{"chunk_states": "spaced", "num_seqs": 4, **changes})
    assert found.backend == "recurrence" and reason in found.reason


def test_chunk_states_of_tiles() -> None:
    """As without them: token by token where that is sooner done."""
    found = planned(chunk_states="spaced", num_seqs=4)
    assert found.backend == "chunked" and found.chunks is not None and found.chunks.chunk_tiles == 2
    assert planned(chunk_states="spaced", num_seqs=4, seqlen=8).backend == "recurrence"
    made, own = packed(return_chunk_states=True), torch.empty(4, dtype=torch.int32, device="meta")
    for more, backend in (({}, "chunked"), ({"cu_chunk_seqlens": own}, "recurrence")):
        found = cute_ssd.explain(cute_ssd.mamba_chunk_scan_varlen, **made, **more, arch="sm_100a")
        assert found.backend == backend
    only_checked = packed(cu_chunk_seqlens=own)  # without return_chunk_states there are none
    assert cute_ssd.explain(cute_ssd.mamba_chunk_scan_varlen, **only_checked, arch="sm_100a").backend == "chunked"
