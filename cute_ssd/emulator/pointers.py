"""Which tensor of a call a pointer was made from: the pointer says it.

Note [Numbered pointers]: host addresses have 47 bits. In bits 48 to 62 of a pointer that a kernel is given stands the
number of a tensor, and address arithmetic keeps it. The engine knows each numbered tensor as a range of its own, which
begins at the numbered address: an access through such a pointer lies in that tensor or nowhere, as if there were guard
bands without end. Other addresses (read from memory, of variables and parameters) may lie in any tensor of the call.

The number belongs to the memory, not to the launch: a kernel may leave pointers in memory, tensor maps above all, and
those that a later launch reads mean the same there. Without such a tensor in that launch, they count as not numbered.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Range = tuple[int, int]  # begin, end

NUMBER_SHIFT = 48  # engine/core.h
LAST_NUMBER = 0x7EFF  # above lie the windows of shared and local memory
LOWEST_ADDRESS = 1 << 22  # where programs begin that are not position-independent; their heap follows
LARGEST_INDEX = 1 << 32  # sizes and indices are smaller; only in that heap they may look like addresses

_numbers: dict[Range, int] = {}
_giving = threading.Lock()


def _number_of(span: Range) -> int:
    """When all numbers are given away they are given anew."""
    with _giving:
        if span not in _numbers and len(_numbers) == LAST_NUMBER:
            _numbers.clear()
        return _numbers.setdefault(span, len(_numbers) + 1)


class Pointers:
    """Numbers the pointers of one launch.

    `storages` and `views` are (address, bytes). A pointer to the first byte of a view belongs to the view, to the
    longest if there are several; any other belongs to the storage that it points into, and so does one that the host
    may have moved there from the first byte of another view.
    """

    def __init__(self, storages: Iterable[Range], views: Iterable[Range] = ()) -> None:
        self._storages = [(address, address + nbytes) for address, nbytes in storages if nbytes]
        self._views = {address: (address, address + nbytes) for address, nbytes in sorted(views) if nbytes}
        self.ranges: set[Range] = set()
        """[begin, end) of the tensors that pointers were numbered for, numbered as those."""

    def numbered(self, parameter: bytes) -> bytes:
        """A parameter of a kernel, each of whose words may be a pointer: a tensor and a tensor map begin with one."""
        block = bytearray(parameter)
        for at in range(0, len(block) - 7, 8):
            (word,) = struct.unpack_from("<Q", block, at)
            if (span := self._tensor(word)) is not None:
                above = _number_of(span) << NUMBER_SHIFT
                self.ranges.add((span[0] | above, span[1] | above))
                struct.pack_into("<Q", block, at, word | above)
        return bytes(block)

    def _tensor(self, address: int) -> Range | None:
        if not LOWEST_ADDRESS <= address < 1 << NUMBER_SHIFT:
            return None
        view = self._views.get(address)
        if view and not any(begin < address < end for begin, end in self._views.values()):
            return view
        around = [span for span in self._storages if span[0] <= address < span[1]]
        if address < LARGEST_INDEX and not view and all(begin != address for begin, _ in around):
            return None
        return max(around, key=lambda span: span[1] - span[0], default=view)


def host_addresses(words: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Those of `words` that may be addresses, without their numbers: kernels may have written them."""
    possible = (words >= LOWEST_ADDRESS) & (words >> NUMBER_SHIFT <= len(_numbers))
    addresses: npt.NDArray[np.int64] = words[possible] & ((1 << NUMBER_SHIFT) - 1)
    return addresses
