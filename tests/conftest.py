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
    """A test that asks for `device` runs once for each executor there is."""
    if "device" in metafunc.fixturenames:
        executors = ["cpu"] + (["cuda"] if metafunc.config.getoption("--gpu") else [])
        metafunc.parametrize("device", executors)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fresh allocations hold NaN, so that whatever is left unwritten or read too early shows."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
