"""Short vectors of memory, at 64-bit offsets, and the tensors without data that kernels are compiled on."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int64

from .arithmetic import numeric, widen
from .dims import VECTOR_BYTES, Recurrence


def flat(tensor: Any, *coordinates: Any) -> Any:
    """The 64-bit offset of the element at the given leading coordinates; 0 in a tensor that is not there."""
    offset = Int64(0)
    if tensor is not None:
        for coordinate, stride in zip(coordinates, tensor.stride, strict=False):
            offset = offset + Int64(coordinate) * Int64(stride)
    return offset


def vector(tensor: Any, offset: Any, width: int) -> Any:
    """`width` elements at an offset which is a multiple of it."""
    return cute.make_tensor(tensor.iterator + cute.assume(offset, divby=width), cute.make_layout(width))


def vector_in(tensor: Any, width: int, *coordinates: Any) -> Any:
    """`width` elements of shared memory from the given coordinates on."""
    return vector(tensor, cute.crd2idx(coordinates, tensor.layout), width)


def load_wide(source: Any) -> Any:
    """A short vector from memory, as fp32."""
    found = cute.make_rmem_tensor(source.shape, source.element_type)
    cute.autovec_copy(source, found)
    return widen(found)


def fake_arguments(config: Recurrence) -> list[Any]:
    """Of `RecurrenceKernel.__call__`, for the compiler: sizes and strides are known at the call only."""
    batch, seqlen, nheads, ngroups, sequences, bounds = (cute.sym_int32() for _ in range(6))

    def strided(dtype: str | None, *shape: Any) -> Any:
        if dtype is None:
            return None
        return cute.runtime.make_fake_tensor(numeric(dtype), shape, tuple(cute.sym_int64() for _ in shape))

    def rows(dtype: str | None, *shape: Any) -> Any:
        if dtype is None:
            return None
        strides = (*(cute.sym_int64() for _ in shape[1:]), 1)
        align = VECTOR_BYTES if config.aligned else None
        return cute.runtime.make_fake_tensor(numeric(dtype), shape, strides, assumed_align=align)

    x, B = (batch, seqlen, nheads, config.headdim), (batch, seqlen, ngroups, config.dstate)
    state = (nheads, config.headdim, config.dstate)
    return [
        rows(config.dtype, *x),
        strided(config.dt, batch, seqlen, nheads),
        strided(config.A, nheads),
        rows(config.dtype, *B),
        rows(config.dtype, *B),
        strided(config.D, nheads, config.headdim),
        rows(config.dtype if config.z else None, *x),
        strided(config.dt_bias, nheads),
        rows(config.dtype, *x),
        strided(config.offsets, bounds),
        rows(config.initial, cute.sym_int32(), *state),
        rows(config.final, cute.sym_int32(), *state),
        strided(config.slots, sequences),
        strided("bool" if config.flags else None, sequences),
        Float32(0.0),
        Float32(0.0),
        Int64(0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    ]
