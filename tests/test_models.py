"""Kernels of published models: those that `compile --model` compiles are those that the models' calls ask for."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_ssd
from cute_ssd import launch, models
from cute_ssd.compat import vllm
from cute_ssd.compat.transformers import _chunk_scan, _state_update, enable
from cute_ssd.compile import Configuration, compiled
from cute_ssd.kernels.sm100.config import Chunked, Q
from cute_ssd.machine_code import kernel_resources
from cute_ssd.models import MODELS, Model

from .test_chunked import compare, planned
from .test_kernel_recurrence import BF16, F32, Case, build

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
    monkeypatch.setattr("cute_ssd.asked._ASKED", {})  # a call like one before launches what that one found
    torch.utils.deterministic.fill_uninitialized_memory = False
    with cute_ssd.emulate(ARCH):
        yield found
    torch.utils.deterministic.fill_uninitialized_memory = True


def tokens(m: Model, *shape: int, parameters: torch.dtype = BF16) -> dict[str, Tensor]:
    """x, B and C as a mixer's convolution leaves them, dt as a column of its projection; A in fp32."""
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
        "D": torch.empty(m.nheads, dtype=parameters),
        "dt_bias": torch.empty(m.nheads, dtype=parameters),
        "z": projected[..., :inner].unflatten(-1, (m.nheads, m.headdim)),
    }


def expanded(made: dict[str, Tensor], m: Model) -> tuple[Tensor, ...]:
    """x, dt, A, B, C, D and dt_bias as both adapters get them in a decode step."""
    x, dt, A, B, C, D, dt_bias, _ = made.values()
    head = (m.nheads, m.headdim)
    A = A[:, None, None].expand(*head, m.dstate)
    return x, dt[..., None].expand(len(x), *head), A, B, C, D[:, None].expand(head), dt_bias[:, None].expand(head)


def transformers_calls(name: str, m: Model) -> None:
    state = torch.empty(2, m.nheads, m.headdim, m.dstate)
    for seqlen in LENGTHS:
        x, dt, A, B, C, D, dt_bias, _ = tokens(m, 1, seqlen).values()
        for initial, finals in ((None, False), (None, True), (state[:1], True)):
            _chunk_scan(x, dt, A, B, C, 256, D, dt_bias, initial, True, return_final_states=finals)
    made = tokens(m, 2)
    for gate in (None, made["z"])[: 2 if name.startswith("falcon-h1") else 1]:
        _state_update(state, *expanded(made, m), True, z=gate)


def vllm_calls(name: str, m: Model, pool: Tensor) -> None:
    for seqlen in LENGTHS:
        x, dt, A, B, C, D, dt_bias, z = tokens(m, seqlen).values()
        ends = [0, *range(256, seqlen, 256), seqlen]
        for initial in (None, pool[:1]):
            for chunks in (False, True):
                vllm.mamba_chunk_scan_combined_varlen(
                    x, dt, A, B, C, 256, ints(0, seqlen), ints(*ends), ints(len(ends) - 2), ints(*[0] * len(ends[1:])),
                    torch.empty(x.shape, dtype=BF16), D, z if name.startswith("plamo2") else None, dt_bias, initial,
                    True, return_intermediate_states=chunks, state_dtype=pool.dtype,
                )  # fmt: skip
    made = tokens(m, 2)
    vllm.selective_state_update(
        pool, *expanded(made, m), made["z"] if name.startswith("plamo2") else None, True, ints(1, 0), null_block_id=-1,
        out=torch.empty(2, m.nheads, m.headdim, dtype=BF16),
    )  # fmt: skip


def pool_calls(name: str, m: Model, pool: Tensor) -> None:
    for seqlen in LENGTHS:
        x, dt, A, B, C, D, dt_bias, _ = tokens(m, seqlen, parameters=F32).values()
        for flags in (None, torch.ones(1, dtype=torch.bool)):
            cute_ssd.mamba_chunk_scan_varlen_inplace(
                x, dt, A, B, C, pool, ints(0), ints(0, seqlen), has_initial_state=flags, D=D, dt_bias=dt_bias
            )
    x, dt, A, B, C, D, dt_bias, _ = tokens(m, 2, parameters=F32).values()
    cute_ssd.selective_state_update(
        pool, x, dt, A, B, C, D, dt_bias=dt_bias, dt_softplus=True, state_batch_indices=ints(1, 0)
    )


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("name", MODELS)
def test_calls_of_a_model_ask_for_what_is_compiled(name: str, asked: set[Configuration]) -> None:
    """For no other kernel, and for all of them, engine by engine."""
    m = MODELS[name]
    calls: dict[str, Any] = {"vllm": vllm_calls, "pool": pool_calls}
    transformers_calls(name, m)
    assert asked == set(models.kernels(name, ARCH, engines=("transformers",)).values())
    every = set(asked)
    for engine, call in calls.items():
        for of in (F32, BF16):
            asked.clear()
            call(name, m, torch.empty(2, m.nheads, m.headdim, m.dstate, dtype=of))
            assert asked == set(models.kernels(name, ARCH, engines=(engine,), states=(of,)).values())
            every |= asked
    assert every == set(models.kernels(name, ARCH).values())


# What transformers' own models ask for, in sizes that tiles have.
LARGER: dict[str, dict[str, Any]] = {
    "Mamba2": {"expand": 16, "head_dim": 64, "state_size": 64},
    "Bamba": {"mamba_expand": 16, "mamba_d_head": 64, "mamba_d_state": 64},
    "FalconH1": {"mamba_d_ssm": 512, "mamba_d_head": 64, "mamba_d_state": 64},
    "GraniteMoeHybrid": {"mamba_expand": 16, "mamba_d_head": 64, "mamba_d_state": 64},
    "Zamba2": {"mamba_expand": 16, "mamba_d_state": 64},
    "NemotronH": {"mamba_head_dim": 64, "ssm_state_size": 64},
}


@pytest.mark.parametrize("family", LARGER)
def test_models_of_transformers_ask_for_what_is_compiled(
    family: str, asked: set[Configuration], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16: without a cache, on an empty and a filled one, and decode; a few tokens, and some tiles."""
    pytest.importorskip("transformers")
    from .test_compat_transformers import build as model_of

    name = "falcon-h1-test" if family == "FalconH1" else "test"
    monkeypatch.setitem(MODELS, name, Model(8, 64, 2, 64))
    gates = [{"mamba_rms_norm": True}, {"mamba_rms_norm": False}] if family == "FalconH1" else [{}]
    for gate in gates:
        model = model_of(family, **LARGER[family], **gate).bfloat16()
        with enable(model), torch.no_grad():
            for seqlen in (5, 600):
                text = torch.zeros(1, seqlen, dtype=torch.long)
                model(text, use_cache=False)
                cache = model(text, use_cache=True).cache
                for more in (text, text[:, :1]):
                    model(more, cache=cache, use_cache=True)
    heads = {kernel.scan_heads for kernel in asked if isinstance(kernel, Chunked)}
    wanted = models.kernels(name, ARCH, engines=("transformers",)).values()
    assert heads and asked == {k for k in wanted if not isinstance(k, Chunked) or k.scan_heads in heads}


# Every kernel of every model


def every_kernel() -> dict[Configuration, str]:
    """With one of its purposes; of vLLM those with states in bf16, of a pool those with states in fp32."""
    choices: list[dict[str, Any]] = [
        {"engines": ("transformers",)},
        {"engines": ("vllm",), "states": (BF16,)},
        {"engines": ("pool",), "states": (F32,)},
    ]
    kernels = (models.kernels(name, ARCH, **choice) for name in MODELS for choice in choices)
    return {kernel: why for found in kernels for why, kernel in found.items()}


def tiled() -> list[tuple[int, int, int]]:
    """(headdim, dstate, heads of an item) of the chunked ones."""
    return sorted({(k.headdim, k.dstate, k.scan_heads) for k in every_kernel() if isinstance(k, Chunked)})


def without_spills(kernels: list[Configuration]) -> None:
    for kernel in kernels:
        with cute_ssd.emulate(ARCH):  # their place in the cache is that of the tests that run them
            found = kernel_resources(compiled(kernel, ARCH).machine_code)
        assert not any(resources.local_bytes for resources in found.values()), (kernel, found)


@pytest.mark.long
@pytest.mark.parametrize(("headdim", "dstate", "heads"), tiled())
def test_chunked_kernels(headdim: int, dstate: int, heads: int) -> None:
    """Without spills, and right where a model continues sequences on its pool."""
    wanted = [
        k
        for k in every_kernel()
        if isinstance(k, Chunked) and (k.headdim, k.dstate, k.scan_heads) == (headdim, dstate, heads)
    ]
    assert len(wanted) == 3 + 2 + 2
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


@pytest.mark.long
@pytest.mark.parametrize(("headdim", "dstate"), sorted({(m.headdim, m.dstate) for m in MODELS.values()}))
def test_recurrence_kernels(headdim: int, dstate: int) -> None:
    kernels = [k for k in every_kernel() if not isinstance(k, Chunked) and (k.headdim, k.dstate) == (headdim, dstate)]
    gated = any(
        name.startswith("falcon-h1") and (m.headdim, m.dstate) == (headdim, dstate) for name, m in MODELS.items()
    )
    assert len(kernels) == 4 + gated + 5 + 3
    without_spills(kernels)
