"""What eager calls ask for and how they run, remembered for the next one like them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from . import problem
from .device import Device, emulated_arch
from .errors import ShapeError
from .kernels.dims import VECTOR_BYTES
from .plan import Plan, plan
from .problem import Problem


class Asked(NamedTuple):
    """What an eager call asks for, how it runs, and what its launches remember for the next one like it."""

    problem: Problem
    plan: Plan
    spans: dict[int, int]  # bytes from the first to the last element of arguments with memory, by their numbers
    kernels: dict[Any, Any]

    def refuse_overlap(self, args: tuple[Any, ...], *written: tuple[str, int]) -> None:
        """What is written, arguments `written` (names and numbers), must not be read as something else."""
        places = [(args[number].data_ptr(), span) for number, span in self.spans.items()]
        for name, number in written:
            low = args[number].data_ptr()
            high = low + self.spans.get(number, 0)
            if len([low for start, span in places if start < high and low < start + span]) > 1:  # with itself
                raise ShapeError(
                    f"{name} shares memory with an input, expected memory of its own; pass a fresh tensor."
                )


_ASKED: dict[Any, Asked] = {}


def remembered(operator: str, args: tuple[Any, ...]) -> Asked | None:
    """What a call like this one asked for that came to an implementation with the very tensors it was given."""
    key = _key(operator, args)
    return None if key is None else _ASKED.get(key)


def ask(operator: str, describe: Callable[..., Problem], names: tuple[str, ...], args: tuple[Any, ...]) -> Asked:
    """The problem and plan of an eager call, remembered by all that the checks see of its arguments: they would be a
    quarter of what a small call costs beside its arithmetic. `names` are those of the arguments."""
    key = _key(operator, args)
    found = None if key is None else _ASKED.get(key)
    if found is None:
        wanted, device = describe(*args), Device.of(args[0].device)
        if device.kind == "cuda":
            wanted = problem.with_layout(wanted, dict(zip(names, args, strict=True)))
        spans = {n: _span(t) for n, t in enumerate(args) if isinstance(t, Tensor) and t.numel()}
        found = Asked(wanted, plan(wanted, device), spans, {})
        if len(_ASKED) >= 1024:  # lengths that never come again
            _ASKED.clear()
        if key is not None:
            _ASKED[key] = found
    return found


_NO_TENSORS = {type(None), bool, int, float, torch.dtype}
_KNOWN = {Tensor, Parameter, *_NO_TENSORS}


def _key(operator: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """All that matters of the arguments, with their types, since True and 1.0 are equal to 1; None with others than
    tensors that have strides and python's own numbers."""
    arch, types = emulated_arch(), tuple(map(type, args))
    if not _KNOWN.issuperset(types):
        return None
    try:
        if arch or (isinstance(args[0], Tensor) and args[0].is_cuda):
            values = [t if type(t) in _NO_TENSORS else _on_device(t) for t in args]
            return (operator, arch, types, *values)
        # Without memory are those that wrap others, and torch's known zeros.
        values = [
            t if type(t) in _NO_TENSORS else (t.shape, t.stride(), t.dtype, t.is_cpu, t.data_ptr() == 0) for t in args
        ]
        return (operator, types, *values)
    except RuntimeError:  # no strides: sparse and nested ones
        return None


def _on_device(t: Tensor) -> tuple[Any, ...]:
    """What GPU kernels need to know: where a tensor lies, and whether its memory is what it says (the CPU backend
    leaves negated views to the operators of torch)."""
    address = t.data_ptr()
    return t.shape, t.stride(), t.dtype, t.get_device(), address % VECTOR_BYTES, address == 0, t.is_neg()


def _span(tensor: Tensor) -> int:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()
