"""How many synchronisation mistakes the emulator finds in a kernel.

    python tests/mutation_score.py tma_pipeline tcgen05_gemm tcgen05_gemm_relu
    python tests/mutation_score.py path/to/mamba2_ssd.py -- --gbehcdln 1,1,2,1,5,64,128,128

Every synchronising instruction of a kernel's PTX is deleted or weakened, one at a time, and each such mutant runs on
the captured launch under several schedules with the sanitizer on. It is caught by a finding, by an output that differs
from the unmutated kernel's in any bit, or by a deadlock. A mutant that survives is either redundant (the kernel would
be right without the instruction; kernels/redundant.py says why) or something that the emulator cannot see. A kernel
that lacks a griddepcontrol.wait is launched behind one that writes all its memory, and need not wait for its end.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import linecache
import os
import re
import select
import signal
import sys
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a script it must find both packages

from cute_ssd.emulator import SCHEDULES, engine
from cute_ssd.emulator.decode import Program, decode
from cute_ssd.emulator.launch import KernelLaunch
from cute_ssd.emulator.ptx import Instruction, Kernel, parse_kernel
from cute_ssd.emulator.runner import arguments_of
from cute_ssd.emulator.script import run_script
from cute_ssd.emulator.session import Session
from tests.kernels.redundant import REDUNDANT

ARCH = "sm_100a"


class Subject(NamedTuple):
    module: str  # of tests.kernels
    arguments: tuple[object, ...] = ()  # of its `run`
    tensor_fences: bool = False  # whether it is to have them: see cute_ssd.emulate


KERNELS = {
    "tma_pipeline": Subject("tma_pipeline"),
    "tcgen05_gemm": Subject("tcgen05_gemm", (False,)),
    "tcgen05_gemm_relu": Subject("tcgen05_gemm", (True,)),
    "chunk_state": Subject("chunk_state", ("packed",), tensor_fences=True),
    "chunk_state_wide": Subject("chunk_state", ("wide",), tensor_fences=True),
    "chunk_scan": Subject("chunk_scan", tensor_fences=True),
}


class Redundant(NamedTuple):
    """Mutants that nothing can catch as the kernel stays right: of this kind, from Python lines that `code` describes.

    `nth` tells several of a line apart, in the order of the PTX; without it all of them are meant."""

    kind: str
    code: str  # a regular expression for "function: line", as Mutant.code is
    reason: str
    nth: tuple[int, ...] = ()


# ---- mutants ---------------------------------------------------------------------------------------------------------

_STATEMENT = re.compile(r"(@!?[\w$%]+\s+)?([\w.:]+)\s*(.*)", re.S)


class Statement(NamedTuple):
    guard: str  # "@%p1 " or ""
    name: str
    operands: str

    @classmethod
    def of(cls, instruction: Instruction) -> Statement:
        match = _STATEMENT.fullmatch(instruction.text)
        assert match is not None, instruction.text
        return cls(match[1] or "", match[2], match[3].strip())

    def satisfied(self) -> str:
        """A wait that does not wait: its predicate is true."""
        return f"{self.guard}setp.eq.u32 {self.operands.partition(',')[0]}, 0, 0;"

    def with_last(self, difference: int) -> str:
        """The same with its last operand, a number, changed."""
        rest, comma, last = self.operands.rpartition(",")
        changed = f"{self.guard}{self.name} {rest}{comma} %mutated;"
        return f"{{ .reg .b32 %mutated; add.s32 %mutated, {last}, {difference}; {changed} }}"


@dataclass(frozen=True)
class Mutant:
    """One change: `text` stands where the instruction was. `nth` counts mutants of the same kind and Python line."""

    kind: str
    line: int  # of the PTX
    instruction: str
    text: str
    source: str  # "file.py:12"
    code: str  # that Python line, "function: line"
    nth: int = 0

    def apply(self, ptx: str) -> str:
        lines = ptx.split("\n")
        before = lines[self.line - 1]
        lines[self.line - 1] = re.sub(re.escape(self.instruction) + r"\s*;", lambda _: self.text, before, count=1)
        assert lines[self.line - 1] != before, f"line {self.line} does not hold {self.instruction}"
        return "\n".join(lines)


GRID_WAIT = "griddepcontrol.wait"
DROPPED = (  # patterns of the names of instructions that are deleted, with the kind's name
    (r"tcgen05\.commit\..*", "tcgen05.commit"),
    (r"tcgen05\.wait::(ld|st)\..*", r"tcgen05.wait::\1"),
    (r"tcgen05\.fence::(\w+)", r"tcgen05.fence::\1"),
    (r"(?:fence|membar)\.proxy\.(async|tensormap).*", r"fence.proxy.\1"),
    (r"fence\.mbarrier_init\..*", "fence.mbarrier_init"),
    (r"griddepcontrol\.wait", GRID_WAIT),
    (r"fence\.(?:sc|acq_rel|acquire|release)\..*|membar\.(?:cta|gl|sys)", "fence"),
    (r"(?:bar|barrier)(?:\.cta)?\.(sync|arrive)(?:\.aligned)?", r"bar.\1"),
    (r"bar\.warp\.sync", "bar.warp.sync"),
    (r"barrier\.cluster\.(arrive|wait).*", r"barrier.cluster.\1"),
    (r"cp\.async\.bulk\.commit_group", "bulk.commit_group"),
    (r"cp\.async\.bulk\.wait_group.*", "bulk.wait_group"),
    (r"cp\.async\.commit_group", "cp.async.commit_group"),
    (r"cp\.async\.wait_(?:group|all)", "cp.async.wait_group"),
    (r"cp\.async\.mbarrier\.arrive.*", "cp.async.mbarrier.arrive"),
    (r"mbarrier\.arrive\.expect_tx\..*", "arrive.expect_tx"),
    (r"mbarrier\.expect_tx\..*", "expect_tx"),
    (r"mbarrier\.arrive(?:_drop)?\..*", "mbarrier.arrive"),
)
CHANGED = (  # likewise, whose last operand is changed
    (r"mbarrier\.(?:arrive\.)?expect_tx\..*", (-16, 16), "expect_tx bytes"),
    (r"mbarrier\.init\..*", (-1, 1), "mbarrier.init count"),
    (r"cp\.async\.bulk\.wait_group.*", (1,), "bulk.wait_group"),
    (r"cp\.async\.wait_group", (1,), "cp.async.wait_group"),
)


def changes(kernel: Kernel, index: int) -> Iterator[tuple[str, str]]:
    """(kind, text instead of it) of every mutation of an instruction."""
    instruction = kernel.instructions[index]
    statement = Statement.of(instruction)
    if re.match(r"mbarrier\.(try|test)_wait", instruction.name):
        yield f"mbarrier {'wait' if _loops(kernel, index) else 'peek'}", statement.satisfied()
    for pattern, kind in DROPPED:
        match = re.fullmatch(pattern, instruction.name)
        if match:
            yield match.expand(kind), ""
            break
    for pattern, differences, kind in CHANGED:
        if re.fullmatch(pattern, instruction.name):
            for difference in differences:
                # The number of groups that may be left is an immediate.
                text = re.sub(r"\d+$", lambda n: str(int(n[0]) + 1), instruction.text) + ";"
                if "wait_group" not in kind:
                    text = statement.with_last(difference)
                yield f"{kind} {difference:+d}", text


def _loops(kernel: Kernel, index: int) -> bool:
    """Whether a wait is tried again until it succeeds; else it is a peek, whose result the kernel uses as it likes."""
    for following in kernel.instructions[index + 1 : index + 4]:
        if following.opcode == "bra" and kernel.labels[following.operands[-1].name] <= index:
            return True
    return False


def _code(path: str, row: int) -> str:
    """A line of a Python file with the function that it stands in."""
    above = (re.match(r"\s*def (\w+)", linecache.getline(path, r)) for r in range(row, 0, -1))
    function = next(filter(None, above), None)
    return f"{function[1] if function else ''}: {linecache.getline(path, row).strip()}"


def mutants(kernel: Kernel) -> list[Mutant]:
    counts: Counter[tuple[str, str]] = Counter()
    found = []
    for index, instruction in enumerate(kernel.instructions):
        path, row = instruction.source or ("", 0)
        code = _code(path, row)
        for kind, text in changes(kernel, index):
            source = f"{Path(path).name}:{row}"
            found.append(Mutant(kind, instruction.line, instruction.text, text, source, code, counts[kind, code]))
            counts[kind, code] += 1
    return found


# ---- a launch that can be repeated -----------------------------------------------------------------------------------

OVERWRITE = """
.version 8.8 .target sm_100a .address_size 64
.visible .entry overwrite(.param .u64 spans) {
    .reg .pred %p; .reg .b16 %h; .reg .b32 %r; .reg .b64 %at, %n, %end, %thread;
    mov.u32 %r, %tid.x; cvt.u64.u32 %thread, %r; mov.u16 %h, 0;
    ld.param.u64 %at, [spans]; mov.u32 %r, %ctaid.x; mad.wide.u32 %at, %r, 16, %at;
    ld.global.v2.u64 {%at, %n}, [%at]; add.u64 %end, %at, %n; add.u64 %at, %at, %thread;
    L: setp.ge.u64 %p, %at, %end; @%p ret; st.global.u8 [%at], %h; add.u64 %at, %at, 1024; bra L;
}
"""
"""Each CTA writes one span (address, bytes)."""


@dataclass
class Launch:
    """A captured launch with the contents of its memory before it; alive as long as the call that launched it."""

    kernel_name: str
    ptx: str
    geometry: tuple[object, ...]  # grid, block, cluster, dynamic shared memory
    parameters: bytes
    ranges: list[tuple[int, int]]  # [begin, end) of what they may reach
    spans: list[tuple[int, int]]  # address, bytes
    options: dict[str, bool]  # of the engine
    before: list[np.ndarray] = field(default_factory=list)
    expected: list[np.ndarray] = field(default_factory=list)

    @classmethod
    def of(cls, launch: KernelLaunch, **options: bool) -> Launch:
        parameters, ranges = arguments_of(launch, parse_kernel(launch.ptx, launch.kernel_name))
        geometry = (launch.grid, launch.block, launch.cluster, launch.shared_bytes)
        spans = [span for span in launch.tensors if span[1]]
        found = cls(launch.kernel_name, launch.ptx, geometry, parameters, ranges, spans, options)
        found.before = [m.copy() for m in found.memory()]
        return found

    def memory(self) -> list[np.ndarray]:
        return [np.frombuffer((ctypes.c_char * n).from_address(at), np.uint8) for at, n in self.spans]

    def write(self, contents: Sequence[np.ndarray]) -> None:
        for (address, nbytes), content in zip(self.spans, contents, strict=True):
            ctypes.memmove(address, content.ctypes.data, nbytes)

    def right(self) -> bool:
        return all(np.array_equal(m, e) for m, e in zip(self.memory(), self.expected, strict=True))

    def program(self, ptx: str | None = None) -> Program:
        return decode(parse_kernel(ptx or self.ptx, self.kernel_name), engine.handlers())

    def run(self, program: Program, seed: int, behind: bool = False) -> engine.Outcome:
        """With the memory as it was before; `behind` a launch that writes all of it, and may not be over."""
        if behind:
            table = np.array(self.spans, np.uint64)
            at = table.ctypes.data
            known = [*self.ranges, (at, at + table.nbytes)]
            overwrite = decode(parse_kernel(OVERWRITE, "overwrite"), engine.handlers())
            launched = (overwrite, (len(table), 1, 1), (1024, 1, 1), (1, 1, 1), 0, at.to_bytes(8, "little"), known)
            assert not engine.run(*launched, engine.Options(threads=1)).events
        self.write(self.before)
        schedule = SCHEDULES[2 - seed % 2] if seed else "eager"  # as emulate() chooses
        options = engine.Options(schedule, seed, threads=1, **self.options)
        return engine.run(program, *self.geometry, self.parameters, self.ranges, options, programmatic=behind)

    def poison(self, program: Program) -> None:
        """Runs it, and fills what it writes with NaN for later runs, unless that changes the result: it may read it."""
        self.run(program, 0)
        self.expected = [m.copy() for m in self.memory()]
        for index, (address, nbytes) in enumerate(self.spans):
            written = np.repeat(engine.written(address, nbytes) != 0, 2)[:nbytes]
            original = self.before[index]
            self.before[index] = np.where(written, np.uint8(0xFF), original)
            if self.run(program, 0).events or not self.right():
                self.before[index] = original
            self.run(program, 0)  # engine.written speaks of the last run


@dataclass(frozen=True)
class Result:
    """What became of a mutant: `by` is what caught it ("" if nothing did) under `seed`, and how it says so."""

    mutant: Mutant
    by: str = ""
    seed: int = -1
    message: str = ""
    executed: bool = True
    redundant: str = ""


def attempt(
    launch: Launch, mutant: Mutant, seeds: Iterable[int], known: Collection[tuple[str, int]] = ()
) -> tuple[str, int, str]:
    """(what caught it, seed, message) of the first seed that does; `known` are findings of the unmutated kernel."""
    program = launch.program(mutant.apply(launch.ptx))
    for seed in seeds:
        outcome = launch.run(program, seed, behind=mutant.kind == GRID_WAIT)
        for event in outcome.events:
            if (event.kind, event.line) not in known:
                return event.kind, seed, f"{event.who} at PTX line {event.line}: {event.message}"
        if not launch.right():
            return "wrong result", seed, ""
    return "", -1, ""


def in_processes(
    work: Callable[[Mutant], tuple[str, int, str]], items: Sequence[Mutant], jobs: int, limit: float
) -> Iterator[tuple[Mutant, tuple[str, int, str]]]:
    """(item, result) as they are done, each from a process of its own: a mutant may crash or never end."""
    waiting, children = list(reversed(items)), dict[int, tuple[Mutant, int, float]]()
    while waiting or children:
        while waiting and len(children) < jobs:
            item = waiting.pop()
            receive, send = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    by, seed, message = work(item)
                    os.write(send, json.dumps((by, seed, message[:2000])).encode())
                except BaseException:
                    os.write(send, json.dumps(traceback.format_exc()[-2000:]).encode())
                os._exit(0)
            os.close(send)
            children[receive] = item, child, time.monotonic() + limit
        ready, _, _ = select.select(list(children), [], [], 0.2)
        for receive, (item, child, deadline) in list(children.items()):
            result: tuple[str, int, str] = ("timeout", -1, f"not done after {limit:.0f} s")
            if receive in ready:
                answer = os.read(receive, 1 << 16)
                result = json.loads(answer) if answer else ("crash", -1, "the process died: an error of the emulator")
            elif time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            else:
                continue
            os.waitpid(child, 0)
            os.close(receive)
            del children[receive]
            if isinstance(result, str):  # nothing that the emulator found, but an error here
                raise RuntimeError(f"{item.kind} at PTX line {item.line}: {result}")
            yield item, result


# ---- the score of one kernel -----------------------------------------------------------------------------------------


@dataclass
class Score:
    name: str
    kernel: str
    findings: list[str]  # of the unmutated kernel: false ones, or errors of the kernel
    results: list[Result]
    seconds: float = 0.0

    def where(self, condition: Callable[[Result], object]) -> list[Result]:
        return [r for r in self.results if condition(r)]

    @property
    def survivors(self) -> list[Result]:
        return self.where(lambda r: r.executed and not r.by and not r.redundant)

    @property
    def share(self) -> float:
        """Caught ones of those that run and are not redundant."""
        caught = len(self.where(lambda r: r.executed and r.by))
        return caught / max(1, caught + len(self.survivors))

    def __str__(self) -> str:
        groups: dict[str, list[Result]] = defaultdict(list)
        for result in self.results:
            groups[result.mutant.kind].append(result)
        rows = [("kind", "mutants", "not run", "caught", "redundant", "survive", "caught by")]
        for kind, group in sorted(groups.items()):
            by = Counter(r.by for r in group if r.by)
            ran = [r for r in group if r.executed]
            caught, excused = sum(by.values()), sum(bool(r.redundant and not r.by) for r in ran)
            numbers = (len(group), len(group) - len(ran), caught, excused, len(ran) - caught - excused)
            rows.append((kind, *map(str, numbers), ", ".join(f"{name} {n}" for name, n in by.most_common())))
        widths = [max(len(row[k]) for row in rows) for k in range(6)]
        table = ["  ".join(cell.ljust(w) for cell, w in zip(row, [*widths, 0], strict=True)).rstrip() for row in rows]
        lines = [f"{self.name}: {self.kernel[:80]}", *(f"  UNMUTATED: {text}" for text in self.findings), *table]
        lines += _listed("survives", self.survivors)
        redundant = self.where(lambda r: r.executed and r.redundant and not r.by)
        for reason in dict.fromkeys(r.redundant for r in redundant):
            lines += [f"  {reason}", *_listed("  redundant", [r for r in redundant if r.redundant == reason])]
        lines += _listed("in the list of redundant ones, but caught", self.where(lambda r: r.redundant and r.by))
        lines += _listed("not run at this shape", self.where(lambda r: not r.executed))
        caught = len(self.where(lambda r: r.executed and r.by))
        totals = f"{caught} caught, {len(self.survivors)} survive: {self.share:.1%} in {self.seconds:.0f} s"
        return "\n".join([*lines, f"{self.name}: {totals}"])


def _listed(title: str, results: Iterable[Result]) -> Iterator[str]:
    for m in (result.mutant for result in results):
        yield f"  {title}: {m.kind} at PTX line {m.line}, {m.source} `{m.code}`: {' '.join(m.instruction.split())}"


@dataclass
class Scorer:
    """Runs launches; the first whose kernel's name contains `kernel` is studied. Serves as a session's `run`."""

    name: str
    seeds: int = 12
    jobs: int = 2
    kernel: str = ""
    line: int | None = None  # only the mutants of this PTX line
    implicit_waits: bool = False  # see cute_ssd.emulate
    tensor_fences: bool = False
    redundant: Sequence[Redundant] = ()
    score: Score | None = None

    def __call__(self, launch: KernelLaunch) -> None:
        captured = Launch.of(launch, implicit_waits=self.implicit_waits, tensor_fences=self.tensor_fences)
        if self.score is None and self.kernel in launch.kernel_name:
            self.score = self.study(captured)
            captured.write(captured.expected)
        else:
            captured.run(captured.program(), 0)

    def study(self, launch: Launch) -> Score:
        begin = time.monotonic()
        program = launch.program()
        launch.poison(program)
        findings: dict[str, None] = {}  # an ordered set
        known: set[tuple[str, int]] = set()
        executed: set[int] = set()
        for seed in range(self.seeds):
            outcome = launch.run(program, seed)
            findings |= {f"{e.kind}: {e.who} at PTX line {e.line}: {e.message}": None for e in outcome.events}
            known |= {(event.kind, event.line) for event in outcome.events}
            if not launch.right():
                findings[f"wrong result with seed {seed}"] = None
            executed |= set(program.records["line"][outcome.counts > 0].tolist())
        limit = 20 + 10 * (time.monotonic() - begin)
        chosen = [m for m in mutants(program.kernel) if self.line in (None, m.line)]
        results = [Result(m, executed=False) for m in chosen if m.line not in executed]
        running = [m for m in chosen if m.line in executed]

        def work(mutant: Mutant) -> tuple[str, int, str]:
            return attempt(launch, mutant, range(self.seeds), known)

        for mutant, (by, seed, message) in in_processes(work, running, self.jobs, limit):
            results.append(Result(mutant, by, seed, message, redundant=self.reason(mutant)))
        results.sort(key=lambda r: (r.mutant.line, r.mutant.kind))
        return Score(self.name, launch.kernel_name, list(findings), results, time.monotonic() - begin)

    def reason(self, mutant: Mutant) -> str:
        for kind, code, reason, nth in self.redundant:
            if kind == mutant.kind and re.search(code, mutant.code) and (not nth or mutant.nth in nth):
                return reason
        return ""


def score_of(target: str, arguments: Sequence[str] = (), multiprocessors: int = 1, **options: object) -> Score:
    """The score of a kernel of tests.kernels, or of a script's launch.

    On few `multiprocessors` a CTA of a persistent kernel takes several tiles; else most barriers are not needed."""
    scorer = Scorer(target, **options)  # type: ignore[arg-type]
    scorer.redundant = [Redundant(*entry) for entry in REDUNDANT.get(Path(target).name, [])]
    if target in KERNELS:
        subject = KERNELS[target]
        scorer.tensor_fences = subject.tensor_fences
        module = import_module(f"tests.kernels.{subject.module}")
        with Session(ARCH, scorer):
            module.check(module.run(*subject.arguments))
    else:
        session = Session(ARCH, scorer)
        session.device = session.device._replace(multiprocessors=multiprocessors)
        with redirect_stdout(StringIO()), warnings.catch_warnings(action="ignore"):
            run_script(target, arguments, session)
    if scorer.score is None:
        raise SystemExit(f"{target} launched no kernel whose name contains {scorer.kernel!r}.")
    return scorer.score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=list(KERNELS), help="names of kernels, or paths of scripts")
    parser.add_argument("--seeds", type=int, default=12, help="schedules per mutant")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--kernel", default="", help="part of the kernel's name; by default the first launch")
    parser.add_argument("--line", type=int, help="only the mutants of this line of the PTX")
    parser.add_argument("--implicit-waits", action="store_true", help="uses of tcgen05.ld results wait for them")
    parser.add_argument("--multiprocessors", type=int, default=1, help="of the device that a script sees")
    parser.add_argument("--json", type=Path, help="file for all results")
    own, arguments = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, arguments = own[:at], own[at + 1 :]
    options = parser.parse_args(own)
    scores = []
    for target in options.targets:
        chosen = {name: getattr(options, name) for name in ("seeds", "jobs", "kernel", "line", "implicit_waits")}
        scores.append(score_of(target, arguments, options.multiprocessors, **chosen))
        print(scores[-1], flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(score) for score in scores], indent=1))


if __name__ == "__main__":
    main()
