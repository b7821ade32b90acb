"""Large fresh CPU tensors on huge pages.

The first write to a page of fresh memory is a fault into the kernel, which maps and clears it: with pages of 4 KiB that
takes longer than a scan takes to write its outputs. Where the system allows huge pages on request ("madvise" in
/sys/kernel/mm/transparent_hugepage/enabled, the default of many), one fault brings 2 MiB. It is advice: where it is not
taken, or there is no madvise (outside Linux), nothing changes but the time.
"""

import ctypes
import functools
import mmap
from collections.abc import Callable

import torch
from torch import Tensor

PAGE = 2 << 20
# Smaller blocks come from memory that malloc keeps, which has been touched before (its DEFAULT_MMAP_THRESHOLD_MAX).
LARGE = 16 * PAGE


def advise(tensor: Tensor) -> Tensor:
    """`tensor`, memory on the CPU that nothing has touched yet, with huge pages asked for where it is large."""
    if tensor.nbytes < LARGE or type(tensor) is not Tensor:  # a fake tensor has no memory
        return tensor
    if (madvise := _madvise()) is not None:
        begin = -(-tensor.data_ptr() // PAGE) * PAGE
        end = (tensor.data_ptr() + tensor.nbytes) // PAGE * PAGE
        madvise(begin, end - begin, mmap.MADV_HUGEPAGE)
    return tensor


def zeros_like(tensor: Tensor) -> Tensor:
    """Contiguous zeros of the shape, dtype and device of `tensor`."""
    here = tensor.is_cpu and tensor.layout == torch.strided  # the operators refuse sparse ones
    if torch.compiler.is_compiling() or not here or tensor.nbytes < LARGE:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return advise(torch.empty(tensor.shape, dtype=tensor.dtype)).zero_()


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    found = ctypes.CDLL(None).madvise
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    found.restype = ctypes.c_int
    return found
