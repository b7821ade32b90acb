"""Calls that go past torch's dispatcher, and those that may not: modes, other tensors, gradients, profilers."""

import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

import cute_ssd
from cute_ssd import asked, dispatch, ops  # noqa: F401  (ops registers the operators)
from cute_ssd.errors import DtypeError, ShapeError, UnsupportedError

from .common import inputs, packed

OPERATOR = torch.ops.cute_ssd.chunk_scan.default


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Inputs of a call like which there has been one."""
    monkeypatch.setattr(asked, "_ASKED", {})
    found = inputs(2, 9, 2, 2, 1, 3)
    scan(found)
    return found


@pytest.fixture
def asks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The operators whose calls came through the dispatcher."""
    found: list[str] = []

    def ask(operator: str, *rest: Any) -> Any:
        found.append(operator)
        return asked.ask(operator, *rest)

    monkeypatch.setattr(dispatch, "ask", ask)
    yield found


def scan(made: dict[str, Any], **options: Any) -> Any:
    return cute_ssd.mamba_chunk_scan_combined(**made, **{"chunk_size": 64, **options})


def watching(mode: type, hook: str) -> tuple[Any, list[Any]]:
    """A mode of torch, and the operators and functions that its method `hook` sees."""
    seen: list[Any] = []

    def record(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(func)
        return func(*args, **(kwargs or {}))

    return type("Watching", (mode,), {hook: record})(), seen


MODES = {"dispatch": (TorchDispatchMode, "__torch_dispatch__"), "function": (TorchFunctionMode, "__torch_function__")}


class Tagged(Tensor):
    """A subclass that is told of all operators on it; their results are Tagged, too."""

    functions: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.functions.append(func)
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_the_second_call_of_a_kind_goes_past_the_dispatcher(
    made: dict[str, Tensor], asks: list[str], mode: Callable[[], Any]
) -> None:
    fresh = inputs(2, 9, 2, 2, 1, 3, seed=5)
    with mode():
        found = scan(fresh)
        scan(fresh, return_final_states=True)
        scan(fresh, return_final_states=True)
        scan(inputs(2, 10, 2, 2, 1, 3))
    assert asks == ["chunk_scan"] * 2
    with watching(*MODES["dispatch"])[0]:
        assert torch.equal(found, scan(fresh))
    assert asks == ["chunk_scan"] * 3


def test_all_functions_go_past_it(asks: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "_ASKED", {})
    made = packed(inputs(1, 9, 2, 2, 1, 3))
    state, offsets = torch.zeros(9, 2, 2, 3), torch.tensor([0, 4, 9])
    for _ in range(3):
        cute_ssd.mamba_chunk_scan_varlen(**made, query_start_loc=offsets)
        cute_ssd.mamba_chunk_scan_varlen_inplace(
            **made, ssm_pool=state, cache_indices=torch.tensor([1, 0]), query_start_loc=offsets
        )
        cute_ssd.selective_state_update(state, **made)
        whole = {name: t[None] for name, t in made.items() if name in ("x", "B", "C")}
        cute_ssd.ssd_chunk_scan(**whole, log_decay=-torch.rand(1, 2, 9))
    assert len(asks) == 4


def test_parameters_go_past_it_without_a_gradient_only(made: dict[str, Tensor], asks: list[str]) -> None:
    made["A"] = torch.nn.Parameter(made["A"])
    with torch.no_grad():
        scan(made)
        scan(made)
    assert len(asks) == 1
    scan(made).sum().backward()
    assert made["A"].grad is not None and (made["A"].grad != 0).all()


def test_a_gradient_is_recorded_after_calls_without(made: dict[str, Tensor]) -> None:
    with torch.no_grad():
        scan({**made, "x": made["x"].clone().requires_grad_()})
    x = made["x"].clone().requires_grad_()
    scan({**made, "x": x}).sum().backward()
    assert x.grad is not None and (x.grad != 0).any()
    with pytest.raises(UnsupportedError, match="has no gradient"):
        cute_ssd.selective_state_update(
            torch.zeros(2, 2, 2, 3), **{n: t if n == "A" else t[:, 0].requires_grad_() for n, t in made.items()}
        )


@pytest.mark.parametrize("kind", MODES)
def test_modes_see_the_operator(made: dict[str, Tensor], kind: str) -> None:
    mode, seen = watching(*MODES[kind])
    with mode:
        scan(made)
    assert OPERATOR in seen


def test_a_profiler_sees_the_operator(made: dict[str, Tensor]) -> None:
    with profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        scan(made)
    assert "cute_ssd::chunk_scan" in {event.key for event in seen.key_averages()}


def test_a_profiler_of_all_threads_sees_the_operator(made: dict[str, Tensor]) -> None:
    options = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=options) as seen:
        thread = threading.Thread(target=scan, args=(made,))
        thread.start()
        thread.join()
    assert "cute_ssd::chunk_scan" in {event.key for event in seen.key_averages()}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_tracing_keeps_the_operator(made: dict[str, Tensor]) -> None:
    def of_x(x: Tensor) -> Tensor:
        found: Tensor = scan({**made, "x": x})
        return found

    graph = make_fx(of_x)(made["x"])
    assert OPERATOR in {node.target for node in graph.graph.nodes}
    traced = torch.jit.trace(of_x, (made["x"],), check_trace=False)
    assert "cute_ssd::chunk_scan" in {node.kind() for node in traced.graph.nodes()}
    assert torch.equal(graph(made["x"]), of_x(made["x"])) and torch.equal(traced(made["x"]), of_x(made["x"]))


def test_subclasses_stay_subclasses(made: dict[str, Tensor]) -> None:
    for _ in range(3):
        Tagged.functions.clear()
        assert type(scan({**made, "x": made["x"].as_subclass(Tagged)})) is Tagged
        assert Tagged.functions.count(OPERATOR) == 1  # the others read attributes
    assert type(scan(made)) is Tensor


@pytest.mark.filterwarnings("ignore:.*(Sparse CSR|nested tensors):UserWarning")
def test_fake_and_sparse_tensors_are_not_taken_for_plain_ones(made: dict[str, Tensor]) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode() as fake:
        found = scan({name: fake.from_tensor(t) for name, t in made.items()})
    assert isinstance(found, FakeTensor)
    assert scan({name: t.to("meta") for name, t in made.items()}).is_meta
    scan({**made, "x": made["x"][:1, :1, :1, :1].expand(made["x"].shape)})  # strides of 0, as a sparse one has
    for sparse in (made["x"].to_sparse(), made["x"].to_mkldnn(), made["A"][None].to_sparse_csr()):
        with pytest.raises(ShapeError, match="x has layout"):
            scan({**made, "x": sparse})
    with pytest.raises(NotImplementedError, match="NestedTensorCPU"):
        scan({**made, "x": torch.nested.nested_tensor(list(made["x"]))})


@pytest.mark.emulated("sm_100a")
def test_negated_views_give_their_numbers(made: dict[str, Tensor], device: str) -> None:
    """Their memory holds the opposite of what they are."""
    rest = {name: t.to(device) for name, t in made.items()}
    x = rest.pop("x")
    negated = torch._neg_view(x)
    assert negated.is_neg()
    for _ in range(3):
        torch.testing.assert_close(scan({**rest, "x": negated}), -scan({**rest, "x": x}))


@pytest.mark.emulated("sm_100a")
def test_wrapped_tensors_are_never_taken_for_their_memory(made: dict[str, Tensor], device: str) -> None:
    """They have none."""
    rest = {name: t.to(device) for name, t in made.items()}
    x = rest.pop("x")
    wrapped = torch._to_functional_tensor(x)
    assert wrapped.data_ptr() == 0
    for _ in range(3):
        found = scan({**rest, "x": wrapped})
        torch._sync(found)
        assert torch.equal(torch._from_functional_tensor(found), scan({**rest, "x": x}))


def test_efficient_zeros_are_zeros(made: dict[str, Tensor]) -> None:
    zero = torch._efficientzerotensor(made["x"].shape)
    for _ in range(3):
        assert torch.equal(scan({**made, "x": zero}), torch.zeros_like(made["x"]))


def test_vmap_is_refused_as_for_any_operator_without_a_rule(made: dict[str, Tensor]) -> None:
    with pytest.raises(RuntimeError, match="Batching rule not implemented"):
        torch.vmap(lambda x: scan({**made, "x": x}))(torch.stack([made["x"], made["x"]]))


def test_tangents_are_refused_after_calls_without(made: dict[str, Tensor]) -> None:
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="tangent"):
        scan({**made, "x": forward_ad.make_dual(made["x"], torch.ones_like(made["x"]))})


@pytest.mark.parametrize("value", [True, 64.0, np.float64(64)])
def test_what_is_equal_to_a_known_integer_is_refused_as_before(made: dict[str, Tensor], value: Any) -> None:
    scan(made, chunk_size=1)
    with pytest.raises(DtypeError, match="chunk_size"):
        scan(made, chunk_size=value)


def test_integers_of_numpy_are_taken_as_before(made: dict[str, Tensor]) -> None:
    for _ in range(2):
        assert torch.equal(scan(made, chunk_size=np.int64(64)), scan(made))


@pytest.mark.parametrize("wrong", ["x", "dt", "D"])
def test_types_are_refused_after_calls_with_right_ones(made: dict[str, Tensor], wrong: str) -> None:
    with pytest.raises(DtypeError, match=f"{wrong} is a ndarray, expected a torch tensor"):
        scan({**made, wrong: np.zeros(2)})


def test_autocast_changes_nothing(made: dict[str, Tensor]) -> None:
    plain = scan(made)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(scan(made), plain)


def test_a_call_in_the_emulator_is_another_one(made: dict[str, Tensor]) -> None:
    pytest.importorskip("cutlass")
    for arch in ("sm_100a", "sm_90a"):
        with cute_ssd.emulate(arch) as report:
            scan(made)
        assert report.launches
        assert {arch} == {known.plan.device.arch for known in list(asked._ASKED.values())[-1:]}


@pytest.mark.emulated("sm_100a")
def test_autograd_learns_what_is_written(device: str) -> None:
    """A backward that saved a state must not go on with what a step has left there."""
    made = packed(inputs(1, 4, 2, 8, 1, 16, device=device))
    state = torch.zeros(4, 2, 8, 16, device=device)
    weight = torch.ones(16, device=device, requires_grad=True)
    steps: dict[str, Callable[[], Any]] = {
        "step": lambda: cute_ssd.selective_state_update(state, **made),
        "prefill": lambda: cute_ssd.mamba_chunk_scan_varlen_inplace(
            **made,
            ssm_pool=state,
            cache_indices=torch.tensor([2], device=device),
            query_start_loc=torch.tensor([0, 4], device=device),
        ),
    }
    for step in steps.values():
        loss = (state * weight).sum()
        step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
