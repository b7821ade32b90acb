"""compat.transformers: six model families before and after `enable`, and transformers' functions as oracles."""

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cute_ssd
from cute_ssd import api
from cute_ssd.compat.transformers import enable

transformers = pytest.importorskip("transformers", minversion="5.24")

COMMON = {"vocab_size": 64, "hidden_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ATTENTION = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mamba2": {
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 16,
        "n_groups": 2,
        "chunk_size": 8,
        "time_step_limit": (0.0, 0.5),
    },
    "Bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1], **ATTENTION, **MAMBA},
    "FalconH1": {"num_hidden_layers": 1, "mamba_d_ssm": 64, **ATTENTION, **MAMBA},
    "GraniteMoeHybrid": {
        "num_hidden_layers": 2,
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
        **ATTENTION,
        **MAMBA,
    },
    "Zamba2": {
        "num_hidden_layers": 2,
        "layers_block_type": ["mamba", "hybrid"],
        "n_mamba_heads": 8,
        "mamba_d_state": 16,
        "mamba_ngroups": 2,
        "chunk_size": 8,
        **ATTENTION,
        "num_key_value_heads": 4,
    },
    "NemotronH": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp"],
        "head_dim": 8,
        "ssm_state_size": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "chunk_size": 8,
        **ATTENTION,
    },
}
MIXERS = {"Mamba2": 2, "Bamba": 1, "FalconH1": 1, "GraniteMoeHybrid": 1, "Zamba2": 2, "NemotronH": 1}
TOKENS = torch.randint(3, 64, (2, 21), generator=torch.Generator().manual_seed(7))
TOLERANCE = 5e-6  # relative to the largest logit; the scans themselves differ by a few fp32 roundings


def build(family: str, seed: int = 0, **changes: Any) -> nn.Module:
    """A model whose logits depend on its scans: freshly initialised projections are too small for that."""
    config = getattr(transformers, f"{family}Config")(**(COMMON | FAMILIES[family] | changes))
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return model.eval()


def mixer_module(model: nn.Module) -> ModuleType:
    return sys.modules[type(mixers(model)[0]).__module__]


def mixers(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if "mamba2_chunk_scan" in inspect.unwrap(type(m).forward).__code__.co_names]


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def stages(model: nn.Module, tokens: Tensor = TOKENS) -> list[Tensor]:
    """Logits of a prefill, a second prefill on the filled cache, and three decode steps."""
    found, cache = [], None
    with torch.no_grad():
        for part in (tokens[:, :13], tokens[:, 13:18], tokens[:, 18:19], tokens[:, 19:20], tokens[:, 20:21]):
            output = model(part, cache=cache, use_cache=True)
            cache = output.cache
            found.append(output.logits)
    return found


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family: str) -> nn.Module:
    return build(family)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the cute_ssd functions that run, in order."""
    found: list[str] = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            found.append(function.__name__)
            return function(*args, **kwargs)

        return call

    for function in (api.mamba_chunk_scan_combined, api.selective_state_update):
        monkeypatch.setattr(api, function.__name__, counted(function))
    yield found


def test_prefill_second_prefill_and_decode(family: str, model: nn.Module, calls: list[str]) -> None:
    before = stages(model)
    assert calls == []
    with enable(model):
        during = stages(model)
    scans = ["mamba_chunk_scan_combined"] * MIXERS[family] * 2
    assert calls == scans + ["selective_state_update"] * MIXERS[family] * 3
    for actual, expected in zip(during, before, strict=True):
        assert actual.dtype == expected.dtype
        assert error(actual, expected) < TOLERANCE
    after = stages(model)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert len(calls) == MIXERS[family] * 5


def test_the_comparison_would_notice_a_wrong_scan(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else agreement before and after says nothing."""
    before = stages(model)
    right = api.mamba_chunk_scan_combined

    def leaky(*args: Any, **kwargs: Any) -> Any:
        y, states = right(*args, **kwargs)
        return y, states * 1.5

    with enable(model), monkeypatch.context() as patch:
        patch.setattr(api, "mamba_chunk_scan_combined", leaky)
        during = stages(model)
    assert error(during[0], before[0]) < TOLERANCE
    assert all(error(a, b) > 10 * TOLERANCE for a, b in zip(during[1:], before[1:], strict=True))


def test_cache_moves_between_the_two(model: nn.Module) -> None:
    expected = stages(model)
    with torch.no_grad():
        with enable(model):
            first = model(TOKENS[:, :13], use_cache=True)
        second = model(TOKENS[:, 13:18], cache=first.cache, use_cache=True)
        with enable(model):
            third = model(TOKENS[:, 18:19], cache=second.cache, use_cache=True)
    for actual, truth in zip((first, second, third), expected, strict=False):
        assert error(actual.logits, truth) < TOLERANCE


def test_padding(model: nn.Module) -> None:
    mask = torch.ones_like(TOKENS)
    mask[0, :6] = 0
    with torch.no_grad():
        before = model(TOKENS, attention_mask=mask).logits
        with enable(model):
            after = model(TOKENS, attention_mask=mask).logits
    assert error(after[mask.bool()], before[mask.bool()]) < TOLERANCE


def test_generate(model: nn.Module) -> None:
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    before = model.generate(TOKENS, **settings)  # type: ignore[operator]
    with enable(model):
        during = model.generate(TOKENS, **settings)  # type: ignore[operator]
    assert torch.equal(during, before)


def test_bfloat16(family: str, model: nn.Module) -> None:
    """As close to the float32 model as transformers' own bfloat16 is, within a factor of two."""
    low = copy.deepcopy(model).bfloat16()
    truth = stages(copy.deepcopy(low).float())
    before = stages(low)
    with enable(low):
        during = stages(low)
    for actual, own, exact in zip(during, before, truth, strict=True):
        assert actual.dtype == own.dtype
        assert error(actual.float(), exact) < 2 * error(own.float(), exact) + 4e-3


def gradients(model: nn.Module, tokens: Tensor = TOKENS, **kwargs: Any) -> dict[str, Tensor]:
    model.zero_grad()
    model(tokens, labels=tokens, **kwargs).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-4) -> None:
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.isfinite(actual[name]).all()
        assert (actual[name] - grad).abs().max() <= tolerance * grad.abs().max() + 1e-9, name


def test_training(family: str, model: nn.Module, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients match, and the fused path that goes past the scan is not taken."""
    model.train()
    try:
        before = gradients(model, use_cache=False)

        def past_us(*args: Any, **kwargs: Any) -> None:
            raise AssertionError("the fused path was taken")

        monkeypatch.setattr(mixer_module(model), "mamba2_split_conv1d_scan_combined", past_us)
        with enable(model):
            during = gradients(model, use_cache=False)
    finally:
        model.eval()
    assert calls == ["mamba_chunk_scan_combined"] * MIXERS[family]
    assert any("A_log" in name for name in before) and any("dt_bias" in name for name in before)
    assert_same_gradients(during, before)


def test_gradient_checkpointing(calls: list[str]) -> None:
    model = build("Mamba2").train()
    before = gradients(model, use_cache=False)
    model.activation_checkpointing_enable()  # type: ignore[operator]
    with enable(model):
        during = gradients(model, use_cache=False)
    assert len(calls) == 2 * MIXERS["Mamba2"]
    assert_same_gradients(during, before)


@pytest.mark.parametrize("family", ["Mamba2", "FalconH1"])
@pytest.mark.parametrize("split", [20, 13])
def test_gradient_through_the_cache(family: str, split: int) -> None:
    """A decode step and a second prefill outside no_grad: the gradient is that of the sequence in one piece."""
    model = build(family)

    def last(logits: Tensor) -> dict[str, Tensor]:
        model.zero_grad()
        logits[:, -1].square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    expected = last(model(TOKENS, use_cache=False).logits)
    with enable(model):
        first = model(TOKENS[:, :split], use_cache=True)
        actual = last(model(TOKENS[:, split:], cache=first.cache, use_cache=True).logits)
    assert_same_gradients(actual, expected)


def test_packed_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """seq_idx reaches the scan, also in training. The convolution of transformers refuses it without causal_conv1d: the
    test brings one."""
    model = build("GraniteMoeHybrid", layer_types=["mamba", "mamba"])
    lengths = [9, 5, 7]
    seq_idx = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), torch.tensor(lengths))[None]
    with torch.no_grad():
        alone = torch.cat([model(piece, use_cache=False).logits for piece in TOKENS[:1].split(lengths, dim=1)], dim=1)
    module = mixer_module(model)
    plain = module.causal_conv1d_fn

    def by_sequence(x: Tensor, *args: Any, seq_idx: Tensor | None = None, **kwargs: Any) -> Tensor:
        assert seq_idx is not None
        return torch.cat([plain(part, *args, **kwargs) for part in x.split(lengths, dim=2)], dim=2)

    with pytest.raises(ValueError, match="packed sequences"), torch.no_grad(), enable(model):
        model(TOKENS[:1], seq_idx=seq_idx, use_cache=False)
    monkeypatch.setattr(module, "causal_conv1d_fn", by_sequence)
    with pytest.raises(ValueError, match="packed sequences"), torch.no_grad():
        model(TOKENS[:1], seq_idx=seq_idx, use_cache=False)
    with enable(model):
        with torch.no_grad():
            together = model(TOKENS[:1], seq_idx=seq_idx, use_cache=False).logits
        assert error(together, alone) < TOLERANCE
        model.train()
        assert "model.layers.0.mamba.A_log" in gradients(model, TOKENS[:1], seq_idx=seq_idx, use_cache=False)


def test_other_models_of_the_class_are_untouched(calls: list[str]) -> None:
    ours, theirs = build("Bamba"), build("Bamba", seed=1)
    before = stages(theirs)
    source = {name: getattr(mixer_module(ours), name) for name in vars(mixer_module(ours))}
    with enable(ours):
        assert all(torch.equal(a, b) for a, b in zip(stages(theirs), before, strict=True))
        assert calls == []
        assert isinstance(mixers(ours)[0], type(mixers(theirs)[0]))
        assert all(getattr(mixer_module(ours), name) is value for name, value in source.items())
        stages(ours)
        assert calls != []
    assert type(mixers(ours)[0]) is type(mixers(theirs)[0])


def runs_on_cute_ssd(model: nn.Module, calls: list[str]) -> bool:
    calls.clear()
    with torch.no_grad():
        model(TOKENS, use_cache=False)
    assert len(calls) in (0, len(mixers(model)))
    return bool(calls)


def test_enabling_twice_and_nesting(calls: list[str]) -> None:
    model = build("Mamba2")
    classes = [type(m) for m in mixers(model)]
    first, second = enable(model), enable(model)
    assert runs_on_cute_ssd(model, calls)
    second.disable()
    assert not runs_on_cute_ssd(model, calls)
    assert [type(m) for m in mixers(model)] == classes
    first.disable()
    first.disable()
    assert [type(m) for m in mixers(model)] == classes

    with enable(model) as outer:
        with enable(model):
            assert runs_on_cute_ssd(model, calls)
        assert runs_on_cute_ssd(model, calls)
        outer.disable()
        assert not runs_on_cute_ssd(model, calls)
    handle = enable(model)
    with pytest.raises(KeyError), enable(model):
        raise KeyError
    assert runs_on_cute_ssd(model, calls)
    handle.disable()

    part = enable(mixers(model)[0])
    with enable(model):
        assert runs_on_cute_ssd(model, calls)
    with torch.no_grad():
        calls.clear()
        model(TOKENS, use_cache=False)
    assert len(calls) == 1
    part.disable()
    assert not runs_on_cute_ssd(model, calls)


def test_copies_keep_their_own_state(calls: list[str]) -> None:
    model = build("Bamba")
    with enable(model):
        twin = copy.deepcopy(model)
    assert runs_on_cute_ssd(twin, calls) and not runs_on_cute_ssd(model, calls)
    enable(twin).disable()
    assert not runs_on_cute_ssd(twin, calls)


def test_hooks_of_accelerate(calls: list[str]) -> None:
    """They keep a bound forward, which the class of the mixer no longer decides."""
    model = build("Bamba")
    (mixer,) = mixers(model)
    mixer._old_forward = mixer.forward  # type: ignore[assignment]
    mixer.forward = functools.partial(lambda module, *a, **k: module._old_forward(*a, **k), mixer)
    handle = enable(model)
    assert runs_on_cute_ssd(model, calls)
    handle.disable()
    assert not runs_on_cute_ssd(model, calls)
    del mixer._old_forward
    with pytest.raises(cute_ssd.UnsupportedError, match="forward of its own"):
        enable(model)


def test_nothing_to_patch() -> None:
    small = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    first_generation = transformers.MambaForCausalLM(transformers.MambaConfig(**small))
    for model in (nn.Linear(2, 2), first_generation):
        with pytest.raises(cute_ssd.UnsupportedError, match="nothing was patched"):
            enable(model)
    with pytest.raises(cute_ssd.DtypeError, match=r"expected a torch\.nn\.Module"):
        enable("mamba2")  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [1, 7])
def test_compiled_mixer(calls: list[str], scale: int) -> None:
    model = build("Bamba")
    (mixer,) = mixers(model)
    x = torch.randn(2, scale, 32)
    with torch.no_grad(), enable(model):
        expected = mixer(x)
        compiled = torch.compile(mixer, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), expected)


# transformers' functions as oracles of ours.


def random_inputs(batch: int, seqlen: int, ngroups: int, nheads: int = 8, headdim: int = 16, dstate: int = 32) -> Any:
    g = torch.Generator().manual_seed(seqlen + ngroups)
    x = torch.randn(batch, seqlen, nheads, headdim, generator=g)
    dt = torch.randn(batch, seqlen, nheads, generator=g)
    A = -torch.rand(nheads, generator=g) * 15 - 1
    B, C = (torch.randn(batch, seqlen, ngroups, dstate, generator=g) for _ in range(2))
    D, dt_bias = torch.randn(nheads, generator=g), torch.rand(nheads, generator=g) * 4.6 - 6.9
    state = torch.randn(batch, nheads, headdim, dstate, generator=g)
    return x, dt, A, B, C, D, dt_bias, state


ORACLES = [f"transformers.models.{name}.modeling_{name}" for name in ("mamba2", "bamba", "falcon_h1", "nemotron_h")]


@pytest.mark.parametrize("ngroups", [1, 2, 8])
@pytest.mark.parametrize("seqlen", [1, 7, 64, 131])
def test_chunk_scan_against_transformers(seqlen: int, ngroups: int) -> None:
    from transformers.models.mamba2 import modeling_mamba2 as theirs

    x, dt, A, B, C, D, dt_bias, state = random_inputs(2, seqlen, ngroups)
    variants: list[dict[str, Any]] = [
        {"dt_softplus": True, "D": D, "dt_bias": dt_bias, "initial_states": state},
        {"dt_softplus": True, "D": D, "dt_bias": dt_bias, "dt_limit": (0.002, 0.3)},
        {"dt_limit": (0.0, 1.0)},
    ]
    for kwargs in variants:
        want = theirs.mamba2_chunk_scan(x, dt, A, B, C, 32, return_final_states=True, **kwargs)
        got = cute_ssd.mamba_chunk_scan_combined(x, dt, A, B, C, 32, return_final_states=True, **kwargs)
        for actual, expected in zip(got, want, strict=True):
            assert actual.shape == expected.shape and actual.dtype == expected.dtype
            assert error(actual, expected) < 1e-5


@pytest.mark.parametrize("ngroups", [1, 2, 8])
@pytest.mark.parametrize("gated", [False, True])
def test_state_update_against_transformers(ngroups: int, gated: bool) -> None:
    from transformers.models.mamba2 import modeling_mamba2 as theirs

    x, dt, A, B, C, D, dt_bias, state = random_inputs(3, 5, ngroups)
    headdim, dstate = state.shape[-2:]
    expanded = {
        "A": A[:, None, None].expand(-1, headdim, dstate),
        "D": D[:, None].expand(-1, headdim),
        "dt_bias": dt_bias[:, None].expand(-1, headdim),
        "dt_softplus": True,
        "z": x[:, 0].flip(0) if gated else None,
    }
    want_state, got_state = state.clone(), state.clone()
    for t in range(5):
        step = {"dt": dt[:, t, :, None].expand(-1, -1, headdim), "B": B[:, t], "C": C[:, t]}
        want = theirs.mamba2_selective_state_update(want_state, x[:, t], **step, **expanded)
        got = cute_ssd.selective_state_update(got_state, x[:, t], **step, **expanded)
        assert error(got, want) < 2e-6
        assert error(got_state, want_state) < 2e-6


@pytest.mark.parametrize("path", ORACLES)
def test_the_adapters_take_what_the_families_pass(path: str) -> None:
    """Every parameter of transformers' functions is one of ours, in its order."""
    from importlib import import_module

    from cute_ssd.compat import transformers as compat

    module = import_module(path)
    for theirs, ours in (
        (module.mamba2_chunk_scan, compat._chunk_scan),
        (module.mamba2_selective_state_update, compat._state_update),
    ):
        names = [p for p in inspect.signature(theirs).parameters if p != "kwargs"]
        assert list(inspect.signature(ours).parameters)[: len(names)] == names
