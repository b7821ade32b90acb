"""Executors and poisoned memory for every test."""

import os
from collections.abc import Iterator

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
    emulated GPUs that its marker `emulated` names."""
    if "device" in metafunc.fixturenames:
        executors = ["cpu"] + (["cuda"] if metafunc.config.getoption("--gpu") else [])
        for marker in metafunc.definition.iter_markers("emulated"):
            executors += marker.args
        metafunc.parametrize("device", executors, indirect=True)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where tensors are made; on an emulated GPU ("sm_100a") on the CPU, inside `emulate()`."""
    if not request.param.startswith("sm_"):
        yield request.param
        return
    import cute_ssd

    with cute_ssd.emulate(request.param):
        yield "cpu"


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """What a GPU kernel refuses openly is skipped there, with its reason."""
    import cute_ssd

    try:
        return (yield)
    except cute_ssd.UnsupportedError as error:
        if str(pyfuncitem.callspec.params.get("device", "") if hasattr(pyfuncitem, "callspec") else "").startswith(
            "sm_"
        ):
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
