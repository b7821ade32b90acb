"""Whole kernels on the emulator: right under every schedule and without findings, and caught when they lack a barrier.

The mutants here are a choice; mutation_score.py tries all of them.
"""

import re
from functools import cache
from importlib import import_module
from itertools import chain

import pytest
import torch

import cute_ssd
from cute_ssd.emulator.launch import KernelLaunch
from cute_ssd.emulator.session import Session

from .kernels.redundant import REDUNDANT
from .mutation_score import ARCH, GRID_WAIT, KERNELS, Launch, Redundant, attempt, mutants

SEEDS = range(6)  # eager, late and priority schedules


@cache
def captured(name: str) -> tuple[Launch, dict[str, torch.Tensor]]:
    """The launch of a kernel, ready to be repeated, with the tensors that keep its memory alive."""
    launches = []

    def capture(launch: KernelLaunch) -> None:
        launches.append(Launch.of(launch, tensor_fences=KERNELS[name].tensor_fences))
        launches[0].poison(launches[0].program())

    with Session(ARCH, capture):
        tensors = import_module(f"tests.kernels.{KERNELS[name].module}").run(*KERNELS[name].arguments)
    return launches[0], tensors


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", KERNELS)
def test_right_under_every_schedule(name: str, seed: int) -> None:
    subject = KERNELS[name]
    kernel = import_module(f"tests.kernels.{subject.module}")
    with cute_ssd.emulate(ARCH, seed=seed, tensor_fences=subject.tensor_fences) as report:
        tensors = kernel.run(*subject.arguments)
    kernel.check(tensors)  # outputs were NaN
    assert report.launches and not report.findings


@pytest.mark.parametrize(
    ("name", "kind", "code", "finding"),
    [
        ("tma_pipeline", "mbarrier wait", "x_full", "uninitialised"),
        ("tma_pipeline", "mbarrier wait", "x_empty", "race"),
        ("tma_pipeline", "mbarrier.arrive", "x_empty", "deadlock"),
        ("tma_pipeline", "expect_tx bytes -16", "", "transaction count"),
        ("tma_pipeline", "bar.warp.sync", "", "race"),
        ("tma_pipeline", "bar.arrive", "FREE", "deadlock"),
        ("tma_pipeline", "bulk.wait_group +1", "y_stages", "race"),
        ("tma_pipeline", "fence.mbarrier_init", "", "missing proxy fence"),
        ("tcgen05_gemm", "fence.proxy.async", "", "missing proxy fence"),
        ("tcgen05_gemm", "mbarrier peek", "", "race"),
        ("tcgen05_gemm", "mbarrier wait", "acc_empty", "race"),
        ("tcgen05_gemm", "tcgen05.commit", "acc_full", "deadlock"),
        ("tcgen05_gemm", "tcgen05.wait::ld", "", "register in flight"),
        ("tcgen05_gemm_relu", "tcgen05.wait::st", "", "race"),
        ("tcgen05_gemm_relu", "bar.sync", "sync_threads", "race"),  # the last one: before tensor memory is freed
    ],
)
def test_missing_synchronisation_is_caught(name: str, kind: str, code: str, finding: str) -> None:
    launch, _ = captured(name)
    candidates = [m for m in mutants(launch.program().kernel) if m.kind == kind and code in m.code]
    by, _, message = attempt(launch, candidates[-1], SEEDS)
    assert by == finding, message


@pytest.mark.parametrize("name", ["chunk_state", "chunk_scan"])
def test_every_wait_for_the_launches_before_is_needed(name: str) -> None:
    found: list[set[str]] = []

    def run(captured: KernelLaunch) -> None:
        launch = Launch.of(captured, tensor_fences=True)
        kernel = launch.program().kernel
        versions = [launch.ptx, *(m.apply(launch.ptx) for m in mutants(kernel) if m.kind == GRID_WAIT)]
        found.extend({e.kind for e in launch.run(launch.program(ptx), 0, behind=True).events} for ptx in versions)

    with Session(ARCH, run):
        import_module(f"tests.kernels.{KERNELS[name].module}").run(*KERNELS[name].arguments)
    right, *wrong = found
    assert not right and wrong and all(kinds == {"missing grid wait"} for kinds in wrong)


def test_lists_of_redundant_instructions_are_well_formed() -> None:
    for entry in chain(*REDUNDANT.values()):
        kind, code, reason, nth = Redundant(*entry)
        assert kind and re.compile(code) and reason.endswith(".") and all(isinstance(n, int) for n in nth)
