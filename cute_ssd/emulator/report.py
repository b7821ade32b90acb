"""What an emulation has to say: launches, their instruction counts, and findings."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ShapeError
from .build import EmulatorError

if TYPE_CHECKING:
    import torch

    from .timing import LaunchTime, Recording

Dim3 = tuple[int, int, int]

SHOWN_FINDINGS = 20
LONGEST_NAME = 64
_MANGLED = re.compile(
    r"(?:.*?kernel_cutlass_)?(?P<name>.+?)_+(?:tensorptr|Array|TensorMap|TiledMMA|CopyAtom|object_at)"
)


def short_name(kernel: str) -> str:
    """For messages: CuTe DSL appends the types of all arguments to a kernel's name, up to two hundred characters of
    them. In their place stand four digits of a hash, so that two kernels of one function remain two."""
    if len(kernel) <= LONGEST_NAME and "kernel_cutlass_" not in kernel:
        return kernel
    match = _MANGLED.match(kernel)
    name, separator, owner = (match["name"] if match else kernel).partition("___main__")
    readable = f"{owner}.{name}" if separator else name
    return f"{readable[:LONGEST_NAME]}#{hashlib.sha256(kernel.encode()).hexdigest()[:4]}"


@dataclass(frozen=True)
class Finding:
    """Something a kernel did that is wrong, although it may have gone well this time.

    `kind` is a short name (race, missing proxy fence, uninitialised, out of bounds, deadlock, over-arrival, ...); `who`
    the warp, `ptx_line` and `ptx` the instruction, `source` the Python line it came from ("" where the compiler names
    none).
    """

    kind: str
    message: str
    kernel: str
    who: str
    ptx_line: int
    ptx: str
    source: str

    def __str__(self) -> str:
        place = f" at {self.source}" if self.source else ""
        line = f" (PTX line {self.ptx_line}: {self.ptx})" if self.ptx_line else ""
        who = f"{self.who} of " if self.who else ""  # empty where the launch as a whole is meant
        return f"{self.kind}: {who}{short_name(self.kernel)}{place}: {self.message}{line}"


def _first(findings: Sequence[Finding]) -> list[str]:
    """Their sentences; of many findings the first, and how many more there are."""
    shown = [str(finding) for finding in findings[:SHOWN_FINDINGS]]
    return shown if len(findings) <= SHOWN_FINDINGS else [*shown, f"and {len(findings) - SHOWN_FINDINGS} more findings"]


class KernelError(EmulatorError):
    """A launch did something wrong; `findings` say what, the first is the one that ended it if one did."""

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__("\n".join(_first(findings)))
        self.findings = findings


@dataclass
class LaunchReport:
    """One launch. `instructions` counts executed warp instructions by class; `shared_bytes` is static plus dynamic
    memory. `cycles` are modelled clocks of the SM, `modelled` has more about them; both None without `timing`."""

    kernel: str
    grid: Dim3
    block: Dim3
    cluster: Dim3
    shared_bytes: int
    instructions: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)
    seconds: float = 0.0
    cycles: float | None = None
    modelled: LaunchTime | None = None

    @property
    def warp_instructions(self) -> int:
        """All executed warp instructions."""
        return sum(self.instructions.values())

    def __str__(self) -> str:
        size = " x ".join(map(str, self.grid))
        return (
            f"{short_name(self.kernel)}: grid {size}, block {self.block}, cluster {self.cluster}, {self.shared_bytes} "
            f"bytes shared, {self.warp_instructions} warp instructions, {self.seconds * 1e3:.1f} ms, "
            f"{len(self.findings)} findings" + (f"; {self.modelled}" if self.modelled else "")
        )


@dataclass
class Report:
    """Everything an `emulate()` block ran, in order; with `timing` what `timing.chain_time` models it from.

    `records_writes`: it knows what was written, as it does with `sanitize` and without `sampled`.
    """

    arch: str
    launches: list[LaunchReport] = field(default_factory=list)
    recordings: list[Recording] = field(default_factory=list, repr=False)
    keep_going: bool = False
    records_writes: bool = True
    _written: dict[tuple[int, int], np.ndarray] = field(default_factory=dict, repr=False)
    _unwritten: list[Finding] = field(default_factory=list, repr=False)

    @property
    def findings(self) -> list[Finding]:
        """The findings of all launches, then those of `expect_written`."""
        return [*(finding for launch in self.launches for finding in launch.findings), *self._unwritten]

    def unwritten(self, tensor: torch.Tensor) -> int:
        """How many elements of `tensor` no launch has written (needs `sanitize=True`; bytes count in pairs)."""
        return int(self._gaps(tensor).sum())

    def expect_written(self, *outputs: torch.Tensor) -> None:
        """Finds elements of `outputs` that no launch so far has written (`unwritten`); an error unless `keep_going`."""
        found = []
        for tensor in outputs:
            gaps = self._gaps(tensor)
            if not gaps.any():
                continue
            first = tuple(int(i) for i in np.unravel_index(int(gaps.argmax()), tuple(tensor.shape)))
            message = (
                f"{gaps.sum()} of the {gaps.size} elements of an output {tuple(tensor.shape)} of {tensor.dtype} were "
                f"never written, the first at {first}"
            )
            last = self.launches[-1].kernel if self.launches else "no launch"
            found.append(Finding("unwritten", message, last, "", 0, "", ""))
        self._unwritten += found
        if found and not self.keep_going:
            raise KernelError(found)

    def _gaps(self, tensor: torch.Tensor) -> np.ndarray:
        """For each element of `tensor` whether no launch has written it."""
        if not self.records_writes:
            raise ShapeError("sanitize is False or sampled True, expected neither: only then writes are recorded.")
        storage = tensor.untyped_storage()
        begin = storage.data_ptr()
        flags = np.zeros(storage.nbytes() // 2 + 1, np.uint8)
        for (address, nbytes), written in self._written.items():
            if address == begin and nbytes == storage.nbytes():
                flags |= written
        size = tensor.element_size()
        offsets = np.zeros((), np.int64)
        for extent, stride in zip(tensor.shape, tensor.stride(), strict=True):
            offsets = offsets[..., None] + np.arange(extent, dtype=np.int64) * (stride * size)
        first = (offsets.ravel() + tensor.data_ptr() - begin) // 2
        done = np.ones(first.shape, bool)
        for word in range(max(1, size // 2)):
            done &= flags[first + word] != 0
        return ~done

    def __iter__(self) -> Iterator[LaunchReport]:
        return iter(self.launches)

    def __str__(self) -> str:
        return "\n".join(
            [
                f"emulated {self.arch}: {len(self.launches)} launches, {len(self.findings)} findings",
                *map(str, self.launches),
                *_first(self.findings),
            ]
        )
