"""Checks of single arguments, each an error of one sentence: argument, value and expectation."""

from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .errors import DtypeError, ShapeError, UnsupportedError

_INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INDEX_DTYPES = (torch.int32, torch.int64, torch.uint32)
# python's own types first: numpy's take a look-up in a registry.
_INTEGERS: tuple[Any, ...] = (int, torch.SymInt, Integral)
_NUMBERS: tuple[Any, ...] = (int, float, Real)

NO_GRADIENT_ON_GPU = (
    "A chunk scan has no gradient on a GPU yet, but an input requires one; call it under torch.no_grad(), or on CPU "
    "tensors."
)

Names = tuple[str, ...]
Sizes = tuple[int | None, ...]


def require_types(
    tensors: dict[str, Any],
    optional: dict[str, Any],
    integers: dict[str, Any] | None = None,
    state_dtype: Any = None,
) -> None:
    """The types of arguments, which torch would otherwise refuse in words of its own."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise DtypeError(f"{name} is {_kind(value)}, expected a torch tensor; pass {name} as a tensor.")
    for name, value in optional.items():
        if value is not None and not isinstance(value, Tensor):
            raise DtypeError(f"{name} is {_kind(value)}, expected a torch tensor or None; pass {name} as a tensor.")
    for name, value in (integers or {}).items():
        if not isinstance(value, _INTEGERS) or isinstance(value, bool):
            raise DtypeError(f"{name} is {_kind(value)}, expected an integer; pass {name} as an int.")
        if not isinstance(value, torch.SymInt) and abs(value) >= 2**63:
            raise ShapeError(f"{name} is {value}, expected an integer of 64 bits; pass a smaller one.")
    if state_dtype is not None and not isinstance(state_dtype, torch.dtype):
        raise DtypeError(f"state_dtype is {_kind(state_dtype)}, expected a torch dtype; pass torch.float32 or None.")


def bounds(dt_limit: Any) -> tuple[float, float]:
    """(low, high) of dt_limit."""
    if not isinstance(dt_limit, (tuple, list)) or len(dt_limit) != 2:
        raise ShapeError(
            f"dt_limit is {dt_limit!r}, expected two numbers (low, high); pass (0.0, float('inf')) for none."
        )
    for bound in dt_limit:
        if not isinstance(bound, _NUMBERS):
            raise DtypeError(f"dt_limit has {_kind(bound)}, expected two numbers (low, high); pass floats.")
    if not dt_limit[0] <= dt_limit[1]:
        raise ShapeError(f"dt_limit is {dt_limit}, expected (low, high) with low <= high; swap or correct the bounds.")
    return float(dt_limit[0]), float(dt_limit[1])


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def refuse_forward_mode(*tensors: Tensor | None) -> None:
    """torch asks no custom operator about tangents of forward-mode differentiation: they would be zero in silence."""
    if forward_ad._current_level < 0 or torch.compiler.is_compiling():
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise UnsupportedError(
            "An input has a tangent, but there is no forward-mode differentiation here, expected plain tensors; use "
            "backward, which the chunk scans have."
        )


def refuse_gradient(function: str, *tensors: Tensor | None) -> None:
    """Inference functions raise when the call would have to record a gradient."""
    refuse_forward_mode(*tensors)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise UnsupportedError(
            f"{function} is for inference and has no gradient, but an input requires one; call it under "
            "torch.no_grad(), or use mamba_chunk_scan_combined, which is differentiable."
        )


def floating(name: str, tensor: Tensor, x: Tensor, axes: Names, sizes: Sizes) -> None:
    same_device(name, tensor, x)
    if tensor.dtype not in _INPUT_DTYPES:
        raise DtypeError(
            f"{name} is {short(tensor.dtype)}, expected float32, bfloat16, float16 or float64; "
            f"cast {name} to one of them."
        )
    shape(name, tensor, axes, sizes)


def one_of_ranks(name: str, tensor: Tensor, x: Tensor, axes: Names, sizes: Sizes, ranks: tuple[int, ...]) -> None:
    """`floating`, of the first of `axes`: as many as one of `ranks`."""
    rank = tensor.ndim
    if rank not in ranks:
        shapes = " or ".join(f"{rank} ({_expected(axes[:rank], sizes[:rank])})" for rank in ranks)
        raise ShapeError(f"{name} has {rank} dimensions {tuple(tensor.shape)}, expected {shapes}; reshape {name}.")
    floating(name, tensor, x, axes[:rank], sizes[:rank])


def index(name: str, tensor: Tensor, x: Tensor, axes: Names, sizes: Sizes) -> None:
    same_device(name, tensor, x)
    if tensor.dtype not in _INDEX_DTYPES:
        raise DtypeError(f"{name} is {short(tensor.dtype)}, expected int32 or int64; pass {name}.int().")
    shape(name, tensor, axes, sizes)


def offsets(name: str, tensor: Tensor, x: Tensor) -> int:
    """The number of sequences that (num_seqs + 1,) offsets bound."""
    index(name, tensor, x, ("num_seqs + 1",), (None,))
    if tensor.shape[0] < 1:
        raise ShapeError(f"{name} is empty, expected num_seqs + 1 offsets that start at 0; pass at least [0].")
    return tensor.shape[0] - 1


def shape(name: str, tensor: Tensor, axes: Names, sizes: Sizes) -> None:
    """Of axes of these names and sizes; a size of None may be any."""

    found = tensor.shape
    if found == sizes:
        return

    if len(found) != len(axes):
        raise ShapeError(
            f"{name} has {len(found)} dimensions {tuple(found)}, expected {len(axes)} ({_expected(axes, sizes)}); "
            f"reshape {name}."
        )
    for axis, (got, size) in enumerate(zip(found, sizes, strict=True)):
        if size is not None and got != size:
            raise ShapeError(
                f"{name} has {axes[axis]} (axis {axis}) {got}, expected {size}; "
                f"pass {name} of shape ({_expected(axes, sizes)})."
            )


def _expected(axes: Names, sizes: Sizes) -> str:
    return ", ".join(axis if size is None else f"{axis}={size}" for axis, size in zip(axes, sizes, strict=True))


def like_x(name: str, tensor: Tensor, x: Tensor) -> None:
    like_dtype(name, tensor, x)
    if tensor.shape != x.shape:
        raise ShapeError(
            f"{name} has shape {tuple(tensor.shape)}, expected that of x, {tuple(x.shape)}; reshape {name}."
        )


def like_dtype(name: str, tensor: Tensor, x: Tensor) -> None:
    same_device(name, tensor, x)
    if tensor.dtype != x.dtype:
        raise DtypeError(f"{name} is {short(tensor.dtype)}, expected {short(x.dtype)} as x is; cast {name} or x.")


def same_device(name: str, tensor: Tensor, x: Tensor) -> None:
    if tensor.device != x.device:
        raise ShapeError(f"{name} is on {tensor.device}, expected {x.device} where x is; move {name} there.")


def output(out: Tensor, x: Tensor) -> None:
    like_x("out", out, x)
    if not out.is_contiguous():
        raise ShapeError(
            f"out has strides {tuple(out.stride())}, expected a contiguous tensor; "
            "pass torch.empty(x.shape, dtype=x.dtype)."
        )


def writable(name: str, tensor: Tensor) -> None:
    reach = 0  # of the axes seen so far, from the densest outwards; the next must step over it
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            break
        reach += (size - 1) * stride
    else:
        return
    if tensor.numel():
        raise ShapeError(
            f"{name} has strides {tuple(tensor.stride())}, "
            "expected every element at its own address since it is written; "
            f"pass {name}.contiguous()."
        )


def returned_dtype(state_dtype: torch.dtype | None, x: Tensor) -> torch.dtype:
    if state_dtype is None:
        return torch.float64 if x.dtype == torch.float64 else torch.float32
    if state_dtype not in _INPUT_DTYPES:
        raise DtypeError(
            f"state_dtype is {short(state_dtype)}, expected float32, bfloat16, float16 or float64; pass one of them."
        )
    return state_dtype


def positive(name: str, value: int) -> int:
    if value < 1:
        raise ShapeError(f"{name} is {value}, expected at least 1; pass 128 or 256 (results do not depend on it).")
    return value


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
