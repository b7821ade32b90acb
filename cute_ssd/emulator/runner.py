"""From a captured launch to a report: parse, decode (both cached), execute, translate what the engine noticed."""

from __future__ import annotations

import hashlib
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from . import engine
from .decode import CLASSES, UnsupportedInstruction, decode
from .launch import KernelLaunch
from .pointers import Pointers
from .program import Program
from .ptx import parse_kernel
from .report import Finding, KernelError, LaunchReport, Report
from .syntax import Kernel
from .timing import Model, Recording, launch_time, representatives
from .timing.registers import registers
from .timing.sm import recorded

_PROGRAMS: OrderedDict[tuple[bytes, str], Program] = OrderedDict()
_KEPT_PROGRAMS = 64


def program_of(ptx: str, name: str) -> Program:
    """The decoded kernel `name` of a PTX text; UnsupportedInstruction says what cannot be executed."""
    key = (hashlib.sha256(ptx.encode()).digest(), name)
    if key not in _PROGRAMS:
        _PROGRAMS[key] = decode(parse_kernel(ptx, name), engine.handlers())
        if len(_PROGRAMS) > _KEPT_PROGRAMS:
            _PROGRAMS.popitem(last=False)
    _PROGRAMS.move_to_end(key)
    return _PROGRAMS[key]


def instruction_counts(program: Program, counts: np.ndarray) -> dict[str, int]:
    """Executions by instruction class, the most frequent first."""
    mine = program.classes >= 0
    totals = np.bincount(program.classes[mine], weights=counts[mine].astype(float), minlength=len(CLASSES))
    return {CLASSES[k]: int(totals[k]) for k in np.argsort(-totals, kind="stable") if totals[k]}


def arguments_of(launch: KernelLaunch, kernel: Kernel) -> tuple[bytes, list[tuple[int, int]]]:
    """The kernel's parameters, laid out as its PTX declares them and their pointers numbered, and the memory
    [begin, end) that these may reach."""
    pointers = Pointers(launch.tensors, launch.views)
    block = bytearray(max((p.offset + p.size for p in kernel.parameters), default=0))
    for index, p in enumerate(kernel.parameters):
        block[p.offset : p.offset + p.size] = pointers.numbered(launch.parameter(index, p.size))
    tensors = [(address, address + nbytes) for address, nbytes in launch.tensors if nbytes]
    return bytes(block), [*tensors, *sorted(pointers.ranges)]


def mapped_memory() -> list[tuple[int, int]]:
    """[begin, end) of the writable memory of this process (Linux)."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions = line.split(maxsplit=2)[:2]
        if permissions.startswith("rw"):
            begin, end = (int(part, 16) for part in addresses.split("-"))
            ranges.append((begin, end))
    return ranges


@dataclass
class Runner:
    """Executes launches for one report; a finding is an error unless `keep_going`. With a `model` the report gets
    modelled times as well; `sampled` executes only the clusters that those need."""

    report: Report
    options: engine.Options
    keep_going: bool = False
    model: Model | None = None
    sampled: bool = False

    def __call__(self, launch: KernelLaunch) -> None:
        program = program_of(launch.ptx, launch.kernel_name)
        block, ranges = arguments_of(launch, program.kernel)
        digits = "".join(filter(str.isdigit, self.report.arch))
        begin = time.perf_counter()
        # With addresses of unknown extent among the arguments only unmapped memory can be told to be out of bounds.
        ranges += mapped_memory() if launch.unknown_extents else []
        outcome = engine.run(
            program,
            launch.grid,
            launch.block,
            launch.cluster,
            launch.shared_bytes,
            block,
            ranges,
            self._options(launch),
            int(digits),
            launch.programmatic and launch.follows,
        )
        self._check_supported(program, outcome.events)
        entry = LaunchReport(
            launch.kernel_name,
            launch.grid,
            launch.block,
            launch.cluster,
            program.shared_bytes(launch.shared_bytes),
            instructions=instruction_counts(program, outcome.counts),
            findings=[self._finding(program, launch.kernel_name, event) for event in outcome.events],
            printed=outcome.printed,
            seconds=time.perf_counter() - begin,
        )
        self.report.launches.append(entry)
        fatal = any(event.fatal for event in outcome.events)
        if self.model is not None and not fatal:
            self._model(self.model, program, launch, entry)
        for text in outcome.printed:
            sys.stdout.write(text)
        if self.options.sanitize and not fatal and not self.sampled:
            for address, nbytes in launch.tensors:
                flags = engine.written(address, nbytes)
                if flags.any():
                    known = self.report._written.setdefault((address, nbytes), flags)
                    known |= flags
        if entry.findings and (fatal or not self.keep_going):
            raise KernelError(entry.findings)

    def _check_supported(self, program: Program, events: list[engine.Event]) -> None:
        """Some of what is refused, fields of tensor maps above all, only shows when the instruction is executed."""
        for event in events:
            if event.kind == "unsupported" and (instruction := program.instruction_at(event.line)):
                raise UnsupportedInstruction(instruction, event.message)

    def _options(self, launch: KernelLaunch) -> engine.Options:
        if self.model is None:
            return self.options
        traced = representatives(launch.grid, launch.cluster)
        return replace(self.options, traced=traced, only_traced=self.sampled)

    def _model(self, model: Model, program: Program, launch: KernelLaunch, entry: LaunchReport) -> None:
        recording = Recording(
            program,
            launch.kernel_name,
            launch.grid,
            launch.block,
            launch.cluster,
            entry.shared_bytes,
            launch.programmatic,
            tuple(launch.tensors),
            tuple(recorded()),
            registers(launch.machine_code).get(launch.kernel_name, 0),
            launch.ptx,
        )
        self.report.recordings.append(recording)
        entry.modelled = launch_time(recording, model)
        entry.cycles = entry.modelled.cycles

    def _finding(self, program: Program, kernel: str, event: engine.Event) -> Finding:
        instruction = program.instruction_at(event.line)
        source = f"{instruction.source[0]}:{instruction.source[1]}" if instruction and instruction.source else ""
        return Finding(
            event.kind, event.message, kernel, event.who, event.line, instruction.text if instruction else "", source
        )
