"""Executors and poisoned memory for every test."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

# Under CI the same examples every time: a gate must give the same answer twice. Elsewhere they vary.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run the same test bodies on a CUDA device")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `device` runs once for each executor there is: the CPU, with --gpu a CUDA device, and the
    emulated GPUs that its marker `emulated` names; those of `emulated_slowly` in slow runs."""
    if "device" in metafunc.fixturenames:
        executors: list[Any] = ["cpu"] + (["cuda"] if metafunc.config.getoption("--gpu") else [])
        for marker in metafunc.definition.iter_markers("emulated"):
            executors += marker.args
        for marker in metafunc.definition.iter_markers("emulated_slowly"):
            executors += [pytest.param(name, marks=pytest.mark.slow) for name in marker.args]
        metafunc.parametrize("device", executors, indirect=True)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where tensors are made; on an emulated GPU ("sm_100a") on the CPU, inside `emulate()`. On "sm_100a:tiles" the
    body's own sizes are such that the chunked kernels take them, and calls go there however short they are."""
    if not request.param.startswith("sm_"):
        yield request.param
        return
    import cute_ssd

    arch, _, tiles = request.param.partition(":")
    if tiles and request.node.callspec.params.get("dtype", torch.bfloat16).itemsize > 2:
        pytest.skip("tiles have inputs of 16 bits")
    with cute_ssd.emulate(arch) as report, on_tiles() if tiles else contextlib.nullcontext():
        yield "cpu"
    names = [launch.kernel for launch in report.launches]
    if tiles and names and request.node.callspec.params.get("seqlen") != 0:  # no tokens, no tiles
        assert any("chunk_scan" in name for name in names)


@contextlib.contextmanager
def on_tiles() -> Iterator[None]:
    """Sizes that the chunked kernels have, no call too short for them, and their measure of error: what eager torch
    computes in 16 bits takes the place of what it computes in fp32."""
    from cute_ssd import ops, plan, reference

    from . import common

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "SIZES", common.TILES)
        patch.setattr(reference, "recurrence", common.eager_tiles(common.TILES.dtype))
        patch.setattr(plan, "recurrence_clocks", lambda problem, device: 1 << 62)
        patch.setattr(ops, "_ASKED", {})
        yield


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """What a GPU kernel refuses openly is skipped there, with its reason."""
    import cute_ssd

    try:
        return (yield)
    except cute_ssd.UnsupportedError as error:
        executor = pyfuncitem.callspec.params.get("device", "") if hasattr(pyfuncitem, "callspec") else ""
        if str(executor).startswith(("sm_", "cuda")):
            pytest.skip(str(error))
        raise


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fresh allocations hold NaN, so that whatever is left unwritten or read too early shows."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
