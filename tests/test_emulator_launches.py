"""Programmatic dependent launch: what a launch may touch while those before it are unfinished.

Chains of small kernels, each launched with the attribute, marked as in test_emulator_sanitizer.py; and the three real
kernels of a chunked call, without their griddepcontrol.wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cute_ssd
from cute_ssd import launch
from cute_ssd.emulator import engine, runner
from cute_ssd.emulator.engine import Event, Options
from cute_ssd.emulator.report import Report
from cute_ssd.emulator.runner import Runner
from cute_ssd.emulator.script import run_script
from cute_ssd.emulator.session import Session

from .ptx_runner import pack
from .test_chunked import ARCH, HEADS, POOL, planned
from .test_emulator_sanitizer import (
    CLUSTER_SYNC,
    DRAIN,
    FRAME,
    SCHEDULES,
    compiled,
    expect,
    init,
    load,
    marked,
    store,
    wait,
)
from .test_kernel_recurrence import build

cute = pytest.importorskip("cutlass.cute")
from_dlpack = pytest.importorskip("cutlass.cute.runtime").from_dlpack

WAIT, DEPENDENTS = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"
READ, WRITE = "ld.global.u32 %r9, [%out];", "st.global.u32 [%out], %t;"
FINDING = "missing grid wait"


@dataclass(frozen=True)
class Chain:
    """Bodies of kernels that are launched one behind the other; each mark that is gone gives a finding in the last."""

    name: str
    bodies: tuple[str, ...]
    ctas: int = 1
    grid: int = 1

    @property
    def marks(self) -> int:
        return "".join(self.bodies).count("<<")

    def run(
        self,
        wrong: int | None,
        schedule: str = "eager",
        seed: int = 0,
        programmatic: bool = True,
        **options: Any,
    ) -> list[list[Event]]:
        """What each launch finds; the first ones with `options`."""
        source, out = np.zeros(4096, np.uint32), np.zeros(4096, np.uint32)
        params, ranges = pack((source, out))
        found = []
        for number, body in enumerate(marked("\n----\n".join(self.bodies), wrong).split("\n----\n")):
            last = number == len(self.bodies) - 1
            chosen = Options(schedule, seed, threads=1, **({} if last else options))
            program, grid = compiled(f"{FRAME}{body} ret; }}"), (self.grid * self.ctas, 1, 1)
            launched = (program, grid, (64, 1, 1), (self.ctas, 1, 1), 0, params, ranges, chosen)
            found.append(engine.run(*launched, programmatic=programmatic and number > 0).events)
        return found


CHAINS = [
    Chain("a read of what was written", (WRITE, f"<<{WAIT}>> {READ}")),
    Chain("a write of what was written", (WRITE, f"<<{WAIT}>> {WRITE}")),
    Chain("a write of what was read", (READ, f"<<{WAIT}>> {WRITE}")),
    Chain("a read of what was read", (READ, READ)),
    Chain("a wait that comes too late", (WRITE, f"<<{WAIT} {READ}||{READ} {WAIT}>>")),
    Chain("other bytes", ("st.global.u8 [%out0+1], 1;", "st.global.u8 [%out0+<<2||1>>], 1;")),
    Chain("atomics of both", ("red.global.add.u32 [%out0], 1;", "<<red.global.add.u32||st.global.u32>> [%out0], 1;")),
    Chain("a polled flag", ("st.global.u32 [%out0], 1;", f"<<{WAIT}>> ld.acquire.gpu.global.u32 %r9, [%out0];")),
    Chain("the wait of another warp", (WRITE, f"setp.eq.u32 %p, %w, 0; @%p {WAIT} <<bar.sync 0;>> {READ}")),
    Chain(
        "the wait of an elected thread",
        (WRITE, f"{init(1)} @%first {WAIT} @%first mbarrier.arrive.<<release||relaxed>>.cluster.shared::cta.b64 _, "
         f"[bar]; setp.eq.u32 %p, %w, 0; @%p bra D; {wait()} {READ} D:"),
    ),
    Chain(
        "the wait of another CTA",
        (WRITE, f"setp.eq.u32 %p, %rank, 0; @%p {WAIT} <<{CLUSTER_SYNC}||bar.sync 0;>> {READ}"),
        ctas=2,
    ),
    Chain("a cp.async", (WRITE, f"<<{WAIT}>> cp.async.ca.shared.global [%mine], [%out], 4; cp.async.wait_all;")),
    Chain(
        "a bulk load",
        (WRITE, f"{init(1)} @!%first bra S; <<{WAIT}>> {expect(256)} {load(256, source='%out0')} S: {wait()}"),
    ),
    Chain(
        "a bulk store",
        ("ld.global.u32 %r9, [%out0+4096];", "st.shared.u32 [%mine], %t; fence.proxy.async; bar.sync 0; "
         f"@!%first bra S; <<{WAIT}>> {store(256)} {DRAIN} S:"),
    ),
    Chain("a wait two launches behind", (WRITE, "", f"<<{WAIT}>> {READ}")),
    Chain("behind one that waits", (WRITE, f"<<{WAIT}>> {DEPENDENTS}", READ)),
    Chain("behind one that waits to its end", (WRITE, f"<<{WAIT}>>", READ)),
    Chain("behind one that hurries", (WRITE, f"<<{WAIT} {DEPENDENTS}||{DEPENDENTS} {WAIT}>>", READ)),
    Chain("behind one of which a thread hurries", (WRITE, f"<<||@%first {DEPENDENTS}>> {WAIT} {DEPENDENTS}", READ)),
    Chain(
        "behind one of which a CTA waits",
        (WRITE, f"setp.eq.u32 %p, %cta, 1; <<@%p {WAIT}>> {DEPENDENTS}", READ),
        grid=2,
    ),
    Chain(
        "behind one of which a CTA of a cluster waits",
        (WRITE, f"setp.eq.u32 %p, %rank, 1; <<@%p {WAIT}>> {DEPENDENTS}", READ),
        ctas=2,
    ),
]  # fmt: skip

WRONG = [pytest.param(c, k, id=f"{c.name} {k}") for c in CHAINS for k in range(c.marks)]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain.name)
def test_right(chain: Chain) -> None:
    for schedule, seed in SCHEDULES:
        assert not any(chain.run(None, schedule, seed)), schedule


@pytest.mark.parametrize(("chain", "wrong"), WRONG)
def test_wrong(chain: Chain, wrong: int) -> None:
    for schedule, seed in SCHEDULES:
        *before, last = chain.run(wrong, schedule, seed)
        assert not any(before) and {event.kind for event in last} == {FINDING}, schedule


@pytest.mark.parametrize(("chain", "wrong"), WRONG)
def test_without_the_attribute_every_launch_is_over(chain: Chain, wrong: int) -> None:
    assert not any(chain.run(wrong, programmatic=False))


def test_the_finding_names_the_launch_and_what_it_did() -> None:
    _, (event,) = CHAINS[0].run(0)
    assert event.message.startswith("reads global memory at 0x")
    assert event.message.endswith(" that an earlier launch, of k, writes: no griddepcontrol.wait lies between")
    *_, (event,) = CHAINS[2].run(0)
    assert event.message.startswith("writes global memory at 0x") and "of k, reads:" in event.message


@pytest.mark.parametrize("options", [{"sanitize": False}, {"traced": (0,), "only_traced": True}])
def test_only_whole_sanitized_launches_are_remembered(options: dict[str, Any]) -> None:
    assert not any(CHAINS[0].run(0, **options))
    assert not CHAINS[14].run(0, **options)[-1] and CHAINS[14].run(0)[-1]


@cute.kernel
def copy_kernel(x: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    y[thread] = x[thread]


@cute.jit
def copy(x: cute.Tensor, y: cute.Tensor):
    copy_kernel(x, y).launch(grid=[1, 1, 1], block=[32, 1, 1], use_pdl=True)


@cute.jit
def copy_twice(x: cute.Tensor, y: cute.Tensor, z: cute.Tensor):
    copy_kernel(x, y).launch(grid=[1, 1, 1], block=[32, 1, 1], use_pdl=True)
    copy_kernel(y, z).launch(grid=[1, 1, 1], block=[32, 1, 1], use_pdl=True)


SCRIPT = """
import sys
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import from_dlpack
from tests.test_emulator_launches import copy, copy_twice

tensors = [torch.zeros(32, device="cuda") for _ in range(3)]
x, y, z = map(from_dlpack, tensors)
if len(sys.argv) == 1:
    cute.compile(copy_twice, x, y, z)(x, y, z)
else:
    compiled = cute.compile(copy, x, y)
    compiled(x, y)
    eval(sys.argv[1])
    compiled(from_dlpack(tensors[1]), z)
"""

HOST_WORK = [
    "torch.cuda.synchronize()",
    "torch.cuda.Event().record()",
    "tensors[1].cpu()",
    "tensors[1].sum().item()",
    "torch.randn(32, device='cuda')",
    "__import__('cuda.bindings.runtime').bindings.runtime.cudaMemset(tensors[1].data_ptr(), 0, 128)",
]


@pytest.mark.parametrize("between", [*HOST_WORK, "tensors[1].shape"])
def test_calls_of_a_script(between: str, tmp_path: Path) -> None:
    """The second one reads what the first one wrote. Nothing is left for the session after it."""
    for _ in range(2):
        assert kinds_of(tmp_path, between) == [[], [] if between in HOST_WORK else [FINDING]]


def test_launches_of_one_call(tmp_path: Path) -> None:
    assert kinds_of(tmp_path) == [[], [FINDING]]


def kinds_of(directory: Path, *arguments: str) -> list[list[str]]:
    (directory / "script.py").write_text(SCRIPT)
    report = Report(ARCH)
    run_script(directory / "script.py", arguments, Session(ARCH, Runner(report, Options(), keep_going=True)))
    return [[finding.kind for finding in launched.findings] for launched in report.launches]


def test_between_calls_the_host_may_have_worked() -> None:
    """It is not seen in a session, unlike in a script: new memory at an old address would be a finding."""
    x, y, z = torch.ones(32), torch.zeros(32), torch.zeros(32)
    with cute_ssd.emulate(ARCH, keep_going=True) as report:
        arguments = [from_dlpack(tensor) for tensor in (x, y, z)]
        compiled = cute.compile(copy, *arguments[:2])
        compiled(*arguments[:2])
        compiled(*arguments[1:])
        cute.compile(copy_twice, *arguments)(*arguments)
    assert [len(launched.findings) for launched in report] == [0, 0, 0, 1] and z.sum() == 32


# ---- a chunked call --------------------------------------------------------------------------------------------------


def test_the_waits_of_a_chunked_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """state_passing and chunk_scan read what the kernels before them write, so they are found without their wait."""

    def findings(without: str) -> list[set[str]]:
        def program_of(ptx: str, name: str) -> Any:
            return original(ptx.replace(WAIT, "") if without and without in name else ptx, name)

        monkeypatch.setattr(runner, "program_of", program_of)
        call = build(POOL)
        options = {name: value for name, value in call.options.items() if name != "single"}
        with cute_ssd.emulate(ARCH, keep_going=True, tensor_fences=True) as report:
            launch.chunked(call.operands, ARCH, planned(call, HEADS), **options)
        return [{finding.kind for finding in launched.findings} for launched in report.launches]

    original = runner.program_of
    assert findings("") == [set(), set(), set()]
    assert findings("state_passing") == [set(), {FINDING}, set()]
    assert findings("chunk_scan") == [set(), set(), {FINDING}]
