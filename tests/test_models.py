"""Kernels of published models: those that `compile --model` compiles are those that the models' calls ask for."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_ssd
from cute_ssd import launch, models, ops
from cute_ssd.compat import vllm
from cute_ssd.compat.transformers import _chunk_scan, _state_update
from cute_ssd.compile import Configuration, compiled
from cute_ssd.kernels.sm100.config import Chunked, Q
from cute_ssd.machine_code import kernel_resources
from cute_ssd.models import MODELS, Model

from .test_chunked import compare, planned
from .test_kernel_recurrence import BF16, Case, build

pytest.importorskip("cutlass")

ARCH = "sm_100a"
# Of prefills: every number of heads to an item that a plan may choose, and sequences that are too short for tiles.
LENGTHS = (1, 20, *(Q * tiles for tiles in (1, 2, 3, 4, 5, 8, 13, 20, 28, 40)))


# Which kernels calls ask for


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Configuration]]:
    """What the calls of a test would launch. Nothing is compiled, no memory is filled."""
    found: set[Configuration] = set()

    def remember(kernel: Configuration, arch: str) -> Any:
        found.add(kernel)
        return lambda *arguments: None

    monkeypatch.setattr(launch, "compiled", remember)
    monkeypatch.setattr(ops, "_ASKED", {})  # a call like one before launches what that one found
    torch.utils.deterministic.fill_uninitialized_memory = False
    with cute_ssd.emulate(ARCH):
        yield found
    torch.utils.deterministic.fill_uninitialized_memory = True


def tokens(m: Model, *shape: int) -> dict[str, Tensor]:
    """x, B and C as a mixer's convolution leaves them, dt as a column of its projection; A, D and dt_bias in fp32."""
    inner, group = m.nheads * m.headdim, m.ngroups * m.dstate
    convolved = torch.empty(*shape, inner + 2 * group, dtype=BF16)
    x, B, C = convolved.split([inner, group, group], -1)
    projected = torch.empty(*shape, 2 * inner + 2 * group + m.nheads, dtype=BF16)
    return {
        "x": x.unflatten(-1, (m.nheads, m.headdim)),
        "dt": projected[..., -m.nheads :],
        "A": torch.empty(m.nheads),
        "B": B.unflatten(-1, (m.ngroups, m.dstate)),
        "C": C.unflatten(-1, (m.ngroups, m.dstate)),
        "D": torch.empty(m.nheads),
        "dt_bias": torch.empty(m.nheads),
    }


def prefill(m: Model, seqlen: int, pool: Tensor) -> None:
    made, start = tokens(m, 1, seqlen), torch.empty(1, *pool.shape[1:])
    x, dt, A, B, C, D, dt_bias = made.values()
    for initial in (None, start):  # as transformers do
        _chunk_scan(x, dt, A, B, C, 256, D, dt_bias, initial, True, return_final_states=True)
    for flags in (None, torch.ones(1, dtype=torch.bool)):
        cute_ssd.mamba_chunk_scan_varlen_inplace(
            x[0], dt[0], A, B[0], C[0], pool, torch.zeros(1, dtype=torch.int32),
            torch.tensor([0, seqlen], dtype=torch.int32), has_initial_state=flags, D=D, dt_bias=dt_bias,
        )  # fmt: skip


def decode(m: Model, pool: Tensor) -> None:
    """As transformers and vLLM call it: parameters expanded over a head."""
    made, head = tokens(m, 2), (m.nheads, m.headdim)
    x, dt, A, B, C, D, dt_bias = made.values()
    A = A[:, None, None].expand(*head, m.dstate)
    dt, D, dt_bias = dt[..., None].expand(2, *head), D[:, None].expand(head), dt_bias[:, None].expand(head)
    _state_update(pool, x, dt, A, B, C, D, dt_bias, True)
    slots, out = torch.tensor([1, 0], dtype=torch.int32), torch.empty(2, *head, dtype=BF16)
    vllm.selective_state_update(
        pool, x, dt, A, B, C, D, dt_bias, dt_softplus=True, state_batch_indices=slots, null_block_id=-1, out=out
    )


@pytest.mark.parametrize("name", MODELS)
def test_calls_of_a_model_ask_for_what_is_compiled(name: str, asked: set[Configuration]) -> None:
    """For no other kernel, and for all of them."""
    m = MODELS[name]
    pool = torch.empty(2, m.nheads, m.headdim, m.dstate)
    for seqlen in LENGTHS:
        prefill(m, seqlen, pool)
    decode(m, pool)
    assert asked == set(models.kernels(name, ARCH).values())


# Every kernel of every model


def every_kernel() -> dict[Configuration, str]:
    """With one of its purposes."""
    return {kernel: why for name in MODELS for why, kernel in models.kernels(name, ARCH).items()}


def tiled() -> list[tuple[int, int, int]]:
    """(headdim, dstate, heads of an item) of the chunked ones."""
    return sorted({(k.headdim, k.dstate, k.scan_heads) for k in every_kernel() if isinstance(k, Chunked)})


def without_spills(kernels: list[Configuration]) -> None:
    for kernel in kernels:
        with cute_ssd.emulate(ARCH):  # their place in the cache is that of the tests that run them
            found = kernel_resources(compiled(kernel, ARCH).machine_code)
        assert not any(resources.local_bytes for resources in found.values()), (kernel, found)


@pytest.mark.slow
@pytest.mark.parametrize(("headdim", "dstate", "heads"), tiled())
def test_chunked_kernels(headdim: int, dstate: int, heads: int) -> None:
    """Without spills, and right where a model continues sequences on its pool."""
    wanted = [
        k
        for k in every_kernel()
        if isinstance(k, Chunked) and (k.headdim, k.dstate, k.scan_heads) == (headdim, dstate, heads)
    ]
    assert len(wanted) == 4
    without_spills(wanted)
    case = Case(
        lengths=(5, 130), nheads=2 * heads, ngroups=2, headdim=headdim, dstate=dstate, pool=True, flags=True,
        softplus=True, bias=True, D="head",
    )  # fmt: skip
    call = build(case)
    call = call._replace(operands=call.operands._replace(dt=call.operands.dt.bfloat16()))
    chunks = planned(call, (heads, heads))
    assert launch.chunked_kernels(call.operands, chunks, softplus=True) in wanted
    compare(call, (heads, heads))


@pytest.mark.slow
@pytest.mark.parametrize(("headdim", "dstate"), sorted({(m.headdim, m.dstate) for m in MODELS.values()}))
def test_recurrence_kernels(headdim: int, dstate: int) -> None:
    kernels = [k for k in every_kernel() if not isinstance(k, Chunked) and (k.headdim, k.dstate) == (headdim, dstate)]
    assert len(kernels) == 6
    without_spills(kernels)
