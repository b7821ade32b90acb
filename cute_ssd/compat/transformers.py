"""`enable(model)`: the Mamba-2 mixers of a transformers model (5.24) run their scan and decode step on cute_ssd.

Covers Mamba2, Bamba, Falcon-H1, GraniteMoeHybrid, Zamba2 and Nemotron-H, and any mixer whose forward calls
`mamba2_chunk_scan` and `mamba2_selective_state_update` as theirs do.

Note [Mixers]: a mixer's forward finds those functions among the globals of its module, which all models of the family
share, and calls a third one, `mamba2_split_conv1d_scan_combined`, that goes past both in training where mamba_ssm is
installed. So neither the module nor the class is changed. Each mixer of the one model becomes an instance of a
subclass of its class, whose forward is the same code with the three names bound to functions of this module.
"""

import inspect
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from .. import api
from ..device import Device
from ..errors import DtypeError, UnsupportedError
from ._patching import Handle

_ORIGINAL = "_cute_ssd_original"  # attribute of the subclass: the class it stands in for


def enable(model: nn.Module) -> Handle:
    """Runs the SSD of every Mamba-2 mixer in `model` (prefill, prefill on a filled cache, decode, training) on
    cute_ssd, until the handle's `disable()`. Enabling twice is enabling once; see `Handle` for nesting.

    Only the mixers inside `model` change, in place; other models of the class do not. Weights, hooks and caches are
    untouched, so a cache filled before can be used after and the other way round. Enable before torch.compile.

    Against the torch code of transformers: the scan's output has the model's dtype (not float32), as with mamba_ssm;
    dt_bias and softplus are applied in float32 whatever the dtype of dt; seq_idx separates sequences in the scan (the
    convolution still needs causal_conv1d for that, and says so). A decode step that needs a gradient goes through the
    differentiable scan.

    Raises `UnsupportedError` when nothing in `model` can be patched.
    """
    if not isinstance(model, nn.Module):
        raise DtypeError(f"model is a {type(model).__name__}, expected a torch.nn.Module; pass the loaded model.")
    changed: list[nn.Module] = []
    enabled = [mixer for mixer in model.modules() if _original(mixer) is not None]
    for mixer in model.modules():
        if _original(mixer) is None and _is_mixer(mixer):
            _refuse_own_forward(mixer)
            changed.append(mixer)
    if not enabled and not changed:
        raise UnsupportedError(
            f"nothing was patched because no module of this {type(model).__name__} calls mamba2_chunk_scan and "
            "mamba2_selective_state_update, expected a Mamba-2 model of transformers 5.24 (Mamba2, Bamba, FalconH1, "
            "GraniteMoeHybrid, Zamba2, NemotronH); pass such a model, or install transformers 5.24."
        )
    subclasses = {cls: _subclass(cls) for cls in {type(mixer) for mixer in changed}}
    for mixer in changed:
        _become(mixer, subclasses[type(mixer)])
    return Handle(lambda: _restore(list(model.modules())), lambda: _restore(changed))


def _original(module: nn.Module) -> type[nn.Module] | None:
    return vars(type(module)).get(_ORIGINAL)


def _is_mixer(module: nn.Module) -> bool:
    forward: Any = getattr(type(module), "forward", None)
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code is not None and {"mamba2_chunk_scan", "mamba2_selective_state_update"} <= set(code.co_names)


def _refuse_own_forward(mixer: nn.Module) -> None:
    if "forward" in vars(mixer) and "_old_forward" not in vars(mixer):
        raise UnsupportedError(
            f"a {type(mixer).__name__} has a forward of its own that replaces its class's, expected the class's "
            "(hooks of accelerate are fine); enable cute_ssd before whatever replaced it."
        )


def _become(mixer: nn.Module, cls: type[nn.Module]) -> None:
    mixer.__class__ = cls
    if "_old_forward" in vars(mixer):
        # accelerate's hooks call the bound forward that they found when they were installed.
        mixer._old_forward = MethodType(cls.forward, mixer)  # type: ignore[assignment]


def _restore(modules: list[nn.Module]) -> None:
    for module in modules:
        original = _original(module)
        if original is not None:
            _become(module, original)


def _subclass(cls: type[nn.Module]) -> type[nn.Module]:
    forward: Any = cls.forward
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {**names, "forward": _rebind(forward, _REPLACEMENTS), _ORIGINAL: cls})


def _rebind(function: FunctionType, names: dict[str, Any]) -> FunctionType:
    """A copy of `function`, decorators included, in which the global `names` have the given values."""
    inner = getattr(function, "__wrapped__", None)
    scope, closure = function.__globals__, function.__closure__
    if inner is None:
        scope = {**scope, **names}
        # torch.compile looks up globals in the module of this name, where they have their old values.
        scope.pop("__name__", None)
    else:
        copy = _rebind(inner, names)
        cells = closure or ()
        closure = tuple(CellType(copy) if cell.cell_contents is inner else cell for cell in cells)
        if all(new is old for new, old in zip(closure, cells, strict=True)):
            raise UnsupportedError(
                f"{function.__qualname__} is decorated in an unknown way, expected a decorator that closes over the "
                "function it wraps, as those of transformers 5.24 do; install that version."
            )
    copied = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__ = function.__kwdefaults__
    for attribute in ("__module__", "__qualname__", "__doc__", "__annotations__"):
        setattr(copied, attribute, getattr(function, attribute))
    copied.__dict__.update(function.__dict__)
    if inner is not None:
        copied.__wrapped__ = copy  # type: ignore[attr-defined]
    return copied


def _chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    z: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    **others: Any,
) -> Any:
    """mamba2_chunk_scan: shapes as in `mamba_chunk_scan_combined`; `others` are the mixer's keywords for other
    functions. Returns y in the dtype of hidden_states, and with return_final_states the float32 final states."""
    if initial_states is not None and torch.is_grad_enabled():
        # The mixer writes the new state into this tensor, which autograd keeps for the backward pass.
        initial_states = initial_states.clone()
    hidden_states, B, C = _channels_last(hidden_states), _channels_last(B), _channels_last(C)
    return api.mamba_chunk_scan_combined(
        hidden_states,
        dt,
        A,
        B,
        C,
        chunk_size,
        D,
        z,
        dt_bias,
        initial_states,
        seq_idx,
        cu_seqlens,
        dt_softplus,
        (float(dt_limit[0]), float(dt_limit[1])),
        return_final_states,
    )


def _channels_last(tensor: Tensor) -> Tensor:
    """On a GPU a copy where the tokens lie next to each other, as torch's convolution leaves them (causal_conv1d's does
    not): kernels there read whole rows of channels."""
    return tensor if tensor.stride(-1) == 1 or Device.of(tensor.device).kind != "cuda" else tensor.contiguous()


def _state_update(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """mamba2_selective_state_update: `state` (batch, nheads, headdim, dstate) is updated in place; A, dt, D and dt_bias
    are expanded from one value per head. Returns y (batch, nheads, headdim) in the dtype of hidden_states."""
    tensors = (state, hidden_states, dt, A, B, C, D, dt_bias, z)
    if not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)):
        return api.selective_state_update(state, hidden_states, dt, A, B, C, D, z, dt_bias, dt_softplus)
    y, final_states = api.mamba_chunk_scan_combined(
        hidden_states[:, None],
        dt[:, None, :, 0],
        A[:, 0, 0],
        B[:, None],
        C[:, None],
        1,
        D,
        None if z is None else z[:, None],
        None if dt_bias is None else dt_bias[:, 0],
        state.clone(),
        dt_softplus=dt_softplus,
        dt_limit=(-float("inf"), float("inf")),
        return_final_states=True,
    )
    state.copy_(final_states)
    return y[:, 0]


def _no_fused_path(*args: Any, **kwargs: Any) -> None:
    """mamba2_split_conv1d_scan_combined: None sends the mixer down its path of separate convolution and scan."""


_REPLACEMENTS = {
    "mamba2_chunk_scan": _chunk_scan,
    "mamba2_selective_state_update": _state_update,
    "mamba2_split_conv1d_scan_combined": _no_fused_path,
}
