"""Short vectors of memory, at 64-bit offsets, and the tensors without data that kernels are compiled on."""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .arithmetic import numeric, widen
from .dims import Recurrence


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


def bound(offsets: Any, index: Any, seqlen: Any) -> Any:
    """offsets[index]; wrong offsets give wrong results, but never an access outside of the tensors."""
    loaded = Int64(vector(offsets, flat(offsets, index), 1)[0])
    return Int32(cutlass.max(cutlass.min(loaded, Int64(seqlen)), Int64(0)))


def load_wide(source: Any) -> Any:
    """A short vector from memory, as fp32."""
    found = cute.make_rmem_tensor(source.shape, source.element_type)
    cute.autovec_copy(source, found)
    return widen(found)


def store_sectors(source: Any, target: Any) -> None:
    """A short vector to memory at a multiple of 32 bytes, in 256-bit stores: each fills a sector of the L2 cache."""
    width = 256 // source.element_type.width
    copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), source.element_type, num_bits_per_copy=256)
    parts = cute.make_layout((width, cute.size(source) // width))
    registers, memory = (cute.make_tensor(t, parts) for t in (source.iterator, target.iterator.align(32)))
    for k in range(cute.size(parts, mode=[1])):
        cute.copy(copy, registers[None, k], memory[None, k])


def fake_rows(dtype: str, shape: tuple[Any, ...], align: int, multiple: int = 1) -> Any:
    """A tensor without data, for the compiler, whose last dimension is dense; all other strides are multiples of so
    many elements, and the first element lies at one of `align` bytes."""
    strides = (*(cute.sym_int64(divisibility=multiple) for _ in shape[1:]), 1)
    return cute.runtime.make_fake_tensor(numeric(dtype), shape, strides, assumed_align=align)


def fake_strided(dtype: str | None, *shape: Any) -> Any:
    if dtype is None:
        return None
    return cute.runtime.make_fake_tensor(numeric(dtype), shape, tuple(cute.sym_int64() for _ in shape))


def fake_operands(
    config: Any, rows: Callable[[str, str, tuple[Any, ...]], Any], more: tuple[str, ...]
) -> dict[str, Any]:
    """Of any kernel's configuration, in the order of `launch.Operands`, then states of names `more`: sizes and strides
    are known at the call only. `rows(name, dtype, shape)` makes the tensors that are read and written by rows."""
    batch, seqlen, nheads, ngroups, sequences, bounds = (cute.sym_int32() for _ in range(6))

    def states(name: str) -> Any:
        dtype = getattr(config, name)
        return dtype and rows(name, dtype, (cute.sym_int32(), nheads, config.headdim, config.dstate))

    x, B = (batch, seqlen, nheads, config.headdim), (batch, seqlen, ngroups, config.dstate)
    return {
        "x": rows("x", config.dtype, x),
        "dt": fake_strided(config.dt, batch, seqlen, nheads),
        "A": fake_strided(config.A, nheads),
        "B": rows("B", config.dtype, B),
        "C": rows("C", config.dtype, B),
        "D": fake_strided(config.D, nheads, config.headdim),
        "z": rows("z", config.dtype, x) if config.z else None,
        "dt_bias": fake_strided(config.dt_bias, nheads),
        "y": rows("y", config.dtype, x),
        "offsets": fake_strided(config.offsets, bounds),
        "initial": states("initial"),
        "final": states("final"),
        "slots": fake_strided(config.slots, sequences),
        "flags": fake_strided("bool" if config.flags else None, sequences),
        **{name: states(name) for name in more},
    }


def fake_arguments(config: Recurrence) -> list[Any]:
    """Of `RecurrenceKernel.__call__`."""

    def rows(name: str, dtype: str, shape: tuple[Any, ...]) -> Any:
        return fake_rows(dtype, shape, config.access_bytes(name))

    return [
        *fake_operands(config, rows, ("last", "chunk_states")).values(),
        fake_strided(config.chunk_offsets, cute.sym_int32()),
        Int32(0),
        Float32(0.0),
        Float32(0.0),
        Int64(0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    ]
