"""The operators' way through torch's dispatcher, and past it.

Note [Past the dispatcher]: its way into an implementation in Python and back takes as long as all checks of a call.
It has something to do for tensors of other kinds (subclasses, fake, sparse, functorch's), under modes and tracing,
for gradients and for profilers. Where there is nothing of that, it would end in the implementation for plain tensors,
and a public function calls that itself, for tensors like those that have once come through it. What torch tells nobody
of, an observer of execution traces without a profiler, sees the operations inside only.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

from .asked import Asked, ask, remembered
from .errors import ShapeError
from .problem import Problem

LIBRARY = torch.library.Library("cute_ssd", "DEF")

Implementation = Callable[..., Any]


def register(
    name: str, describe: Callable[..., Problem], cpu_impl: Implementation, fake_impl: Implementation
) -> Implementation:
    """Registers the implementations of operator `name` and returns the function that calls it. `describe` and
    `fake_impl` take the operator's arguments, `cpu_impl` what they ask for before them. The implementation for the
    GPU is the function of that name in `gpu.py`."""
    names = argument_names(name)

    def run(asked: Asked, args: tuple[Any, ...]) -> Any:
        if asked.plan.device.kind == "cuda":
            return _gpu_implementation(name)(asked, *args)
        if not torch.is_autocast_enabled("cpu"):
            return cpu_impl(asked, *args)
        with torch.autocast("cpu", enabled=False):  # products of fp32 scratch stay fp32
            return cpu_impl(asked, *args)

    def implementation(*args: Any) -> Any:
        return run(ask(name, describe, names, args), args)

    LIBRARY.impl(name, implementation, "CPU")
    LIBRARY.impl(name, implementation, "CUDA")
    for key in ("SparseCPU", "SparseCsrCPU", "MkldnnCPU", "SparseCUDA", "SparseCsrCUDA"):
        LIBRARY.impl(name, functools.partial(_refuse_layout, names), key)
    torch.library.register_fake(f"cute_ssd::{name}", fake_impl, lib=LIBRARY)
    operator = getattr(torch.ops.cute_ssd, name).default

    def call(check: Callable[[], None], *args: Any) -> Any:
        """The operator after `check`, which looks at nothing that a remembered call could have wrong."""
        if not torch.compiler.is_compiling() and _is_idle() and not _records(args):
            asked = remembered(name, args)
            if asked is not None:
                return run(asked, args)
        check()
        return operator(*args)

    return call


@functools.cache
def _gpu_implementation(operator: str) -> Implementation:
    from . import gpu

    found: Implementation = getattr(gpu, operator)
    return found


def argument_names(operator: str) -> tuple[str, ...]:
    return tuple(argument.name for argument in getattr(torch.ops.cute_ssd, operator).default._schema.arguments)


def _refuse_layout(names: tuple[str, ...], *args: Any) -> Any:
    for name, value in zip(names, args, strict=True):
        if isinstance(value, Tensor) and value.layout != torch.strided:
            raise ShapeError(f"{name} has layout {value.layout}, expected torch.strided; pass {name}.to_dense().")


def _is_idle() -> bool:
    """Whether the dispatcher has nothing to do for plain tensors: no mode, no tracing, no functorch, no tangents, no
    profiler."""
    return (
        forward_ad._current_level < 0
        and torch._C._dispatch_tls_local_include_set().raw_repr() in _IDLE
        and not torch._C._is_torch_function_mode_enabled()
        and not (profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled())  # of any thread, of this one
    )


def _records(args: tuple[Any, ...]) -> bool:
    """Whether autograd has to record the call."""
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in args)


# The dispatcher's keys inside inference mode, and outside of it.
_INFERENCE = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
_IDLE = {_INFERENCE.raw_repr(), _INFERENCE.add(torch._C.DispatchKey.ADInplaceOrView).raw_repr()}
