"""What launches kernels in a test whose tensors stay on the CPU: the emulator, or a CUDA device.

Such a body has the marker `kernel`, launches inside of `on_gpu(arch)`, and looks at its tensors afterwards. With --gpu
it runs a second time, and what it launches works on copies of the tensors' whole memory on the device, at addresses
that are the same modulo 1024, which come back when the call has ended. So guard bands and the places between rows are
watched there as well.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import cute_ssd
from cute_ssd import api, asked, launch
from cute_ssd.device import KNOWN_ARCHS, Device
from cute_ssd.kernels.sm100.config import ARCHS, Chunked

from .kernels import chunk_scan, chunk_state

FUNCTIONS = ("mamba_chunk_scan_combined", "ssd_chunk_scan", "mamba_chunk_scan_varlen",
             "mamba_chunk_scan_varlen_inplace", "selective_state_update")  # fmt: skip

device: str | None = None
"""Where launches go; None is the emulator. The fixture `executor` sets it."""


class Launches:
    """Of a CUDA device, in place of the emulator's report."""

    def __init__(self) -> None:
        self.launches: list[Any] = []
        self.findings: tuple[()] = ()


@contextlib.contextmanager
def on_gpu(arch: str, exactly: bool = False, **options: Any) -> Iterator[Any]:
    """`emulate(arch, **options)`, or the CUDA device, whose architecture takes the place of `arch`; `exactly` skips
    the test on another one. Chunked kernels are skipped where the device has none."""
    if device is None:
        with cute_ssd.emulate(arch, **options) as report:
            yield report
        return
    own = Device.of(torch.device(device)).arch
    if own not in ((arch,) if exactly else KNOWN_ARCHS):
        pytest.skip(
            f"the device is {own or 'none'}, expected {arch if exactly else 'one of ' + ', '.join(KNOWN_ARCHS)}"
        )
    found = Launches()
    with pytest.MonkeyPatch.context() as patch:
        for module in (cute_ssd, api):
            for name in FUNCTIONS:
                patch.setattr(module, name, on_copies(getattr(module, name)))
        for name in ("recurrence", "chunked"):
            patch.setattr(launch, name, on_copies(_for_arch(own, getattr(launch, name))))
        patch.setattr(launch, "compiled", _counting(found, launch.compiled))
        patch.setattr(asked, "_ASKED", {})  # its calls remember functions that do not count
        for kernels in (chunk_scan, chunk_state):
            compiled = kernels.compiled
            patch.setattr(kernels, "compiled", lambda kernel, arch, of=compiled: on_copies(of(kernel, arch)))
        yield found


def _for_arch(own: str, run: Callable[..., None]) -> Callable[..., None]:
    def launched(operands: launch.Operands, arch: str, *args: Any, **kwargs: Any) -> None:
        if run.__name__ == "chunked" and own not in ARCHS:
            pytest.skip(f"{own} has no tensor-core kernels")
        run(operands, own, *args, **kwargs)

    return launched


def _counting(found: Launches, compiled: Callable[..., Any]) -> Callable[..., Any]:
    def counted(kernel: Any, arch: str) -> Callable[..., None]:
        function = compiled(kernel, arch)

        def launched(*arguments: Any) -> None:
            found.launches += [kernel] * (3 if isinstance(kernel, Chunked) else 1)
            function(*arguments)

        return launched

    return counted


def on_copies(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` on copies of its CPU tensors on the device. What it returns is on the CPU."""

    @functools.wraps(run)
    def ran(*args: Any, **kwargs: Any) -> Any:
        copies = Copies()
        args, kwargs = tree_map_only(Tensor, copies.there, (args, kwargs))
        result = run(*args, **kwargs)
        copies.fetch()
        return tree_map_only(Tensor, copies.back, result)

    return ran


class Copies:
    """Of the memory of CPU tensors, on the device."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[Tensor, Tensor, int]] = {}  # bytes here, bytes there and where they begin
        self.views: list[tuple[Tensor, Tensor]] = []

    def there(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            return tensor
        storage, item = tensor.untyped_storage(), tensor.dtype.itemsize
        place = storage.data_ptr()
        if place not in self.blocks:
            here = torch.empty(0, dtype=torch.uint8).set_(storage)
            block = torch.empty(len(here) + 1024, dtype=torch.uint8, device=device)
            begin = (place - block.data_ptr()) % 1024
            block[begin : begin + len(here)].copy_(here)
            self.blocks[place] = here, block, begin
        _, block, begin = self.blocks[place]
        copy = torch.empty(0, dtype=tensor.dtype, device=device)
        first = begin // item + tensor.storage_offset()
        copy.set_(block.untyped_storage(), first, tensor.shape, tensor.stride())
        self.views.append((tensor, copy))
        return copy

    def fetch(self) -> None:
        for here, block, begin in self.blocks.values():
            here.copy_(block[begin : begin + len(here)])

    def back(self, tensor: Tensor) -> Tensor:
        """An argument that is returned is the caller's own."""
        own = [argument for argument, copy in self.views if copy is tensor]
        return own[0] if own else tensor.cpu()
