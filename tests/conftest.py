"""Executors and poisoned memory for every test.

A body that asks for `device` runs on the CPU backend, and on what its markers name:

    "sm_100a"          the emulated GPU, with the body's small sizes: the recurrence kernel; a body that has one
                       architecture has all ARCHS, those that it does not name in long runs
    "sm_100a:tiles"    the chunked kernels there: sizes that they have, however short a call is
    "sm_100a:tiles:1"  the same under another schedule of the emulator: 1 is a late one, 2 a priority one
    "cuda"             with --gpu: a CUDA device
    "cuda:tiles"       with --gpu, of bodies that have tiles: the chunked kernels of a device that has them

One that launches kernels inside of `on_gpu` (executors.py, marker `kernel`) or PTX (ptx_runner.py, marker `silicon`)
does so on the emulator, and with --gpu on a CUDA device. Every case on a CUDA device has the marker `gpu`: --gpu adds
them to the others, `-m gpu` runs them alone.

These bodies have no tiles:

    gradients (test_gradients.py, autocast_changes_nothing, strided_states): no GPU kernel has one
    seq_idx: refused on a GPU; cu_seqlens has tiles instead
    chunk_states_at_own_boundaries: refused on a GPU, tiles end at multiples of 128 tokens
    any_strides, views_of_one_projection: odd rows go to the recurrence; test_chunked.py has views for TMA
    slow_decay_over_a_long_sequence: test_chunked.py has it, with bounds for 16 bits
    offsets, elements and slots beyond 2^31: test_chunked.py and test_kernel_chunk_scan.py have distant rows and slots
    decode steps: they have one kernel, the recurrence
    torch.compile, errors: what they are about happens before a kernel is chosen
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import settings
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from .silicon import Device

# Under CI the same examples every time: a gate must give the same answer twice. Elsewhere they vary.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run the same test bodies on a CUDA device")


def pytest_configure(config: pytest.Config) -> None:
    if wants_cuda(config) and not config.getoption("collectonly"):
        from . import silicon

        if problem := silicon.problem():
            raise pytest.UsageError(problem)


ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_103a", "sm_120a")


def wants_cuda(config: pytest.Config) -> bool:
    """Whether cases on a CUDA device are asked for: by --gpu, or by -m gpu, alone or with more behind it."""
    return bool(config.getoption("--gpu") or config.getoption("markexpr").startswith("gpu"))


def on_cuda(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.gpu)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `device` runs once for each executor there is: the CPU, with --gpu a CUDA device, and the
    emulated GPUs that its marker `emulated` names; those of `emulated_slowly` in slow runs, their other schedules and
    the other architectures in long ones. One with the marker
    `silicon` or `kernel` runs on the emulator, and with --gpu also on a CUDA device."""
    cuda, definition = wants_cuda(metafunc.config), metafunc.definition
    if cuda and (definition.get_closest_marker("silicon") or definition.get_closest_marker("kernel")):
        metafunc.parametrize("executor", ["emulator", on_cuda("cuda")], indirect=True)
    if "device" in metafunc.fixturenames:
        fast = [name for marker in metafunc.definition.iter_markers("emulated") for name in marker.args]
        slow = [name for marker in metafunc.definition.iter_markers("emulated_slowly") for name in marker.args]
        long = [name for name in slow if name.endswith((":1", ":2"))]
        if any(name in ARCHS for name in fast + slow):
            long += [arch for arch in ARCHS if arch not in fast + slow]
        executors: list[Any] = ["cpu", *fast]
        executors += [pytest.param(name, marks=pytest.mark.slow) for name in slow if name not in long]
        executors += [pytest.param(name, marks=pytest.mark.long) for name in long]
        if cuda:
            executors += [on_cuda("cuda")] + [on_cuda("cuda:tiles")] * any(":tiles" in name for name in fast + slow)
        metafunc.parametrize("device", executors, indirect=True)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where tensors are made: on an emulated GPU on the CPU, inside `emulate()`."""
    where, *rest = request.param.split(":")
    with contextlib.ExitStack() as stack:
        calls = None
        if rest:
            dtype = request.node.callspec.params.get("dtype", torch.bfloat16)
            if dtype.itemsize > 2:
                pytest.skip("tiles have inputs of 16 bits")
            if where == "cuda":
                refuse_other_devices()
            calls = stack.enter_context(on_tiles(dtype))
        if where == "cuda":
            stack.enter_context(truths_on_the_cpu())
        if where.startswith("sm_"):
            import cute_ssd

            stack.enter_context(cute_ssd.emulate(where, seed=int("".join(rest[1:]) or 0)))
            where = "cpu"
        yield where
    if calls and request.node.callspec.params.get("seqlen") != 0:  # no tokens, no tiles
        assert "chunked" in calls


def refuse_other_devices() -> None:
    """Skips where the CUDA device has no tensor-core kernels."""
    from cute_ssd.device import Device
    from cute_ssd.kernels.sm100.config import ARCHS

    arch = Device.of(torch.device("cuda")).arch
    if arch not in ARCHS:
        pytest.skip(f"{arch or 'no device'} has no tensor-core kernels")


@pytest.fixture(scope="session")
def cuda_device() -> Iterator[Device]:
    from .silicon import Device

    device = Device()
    yield device
    device.end()


@pytest.fixture(autouse=True)
def executor(request: pytest.FixtureRequest) -> Iterator[Device | None]:
    """Where ptx_runner.py launches: the CUDA device, or None, which is the emulator; and where `on_gpu` does."""
    if getattr(request, "param", "emulator") == "emulator":
        yield None
        return
    if request.node.get_closest_marker("kernel"):
        from . import executors

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(executors, "device", "cuda")
            yield None
        return
    from . import ptx_runner

    if marker := request.node.get_closest_marker("emulator_only"):
        pytest.skip(marker.args[0])
    device = request.getfixturevalue("cuda_device")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ptx_runner, "device_launch", device.launch)
        yield device


@contextlib.contextmanager
def truths_on_the_cpu() -> Iterator[None]:
    """The definition is a loop of small operations, and eager tiles have sums without a deterministic form on CUDA."""
    from cute_ssd import reference

    def moving(run: Callable[..., Any]) -> Callable[..., Any]:
        def moved(*args: Any, **kwargs: Any) -> Any:
            return run(*tree_map_only(torch.Tensor, torch.Tensor.cpu, args),
                       **tree_map_only(torch.Tensor, torch.Tensor.cpu, kwargs))  # fmt: skip

        return moved

    with pytest.MonkeyPatch.context() as patch:
        for name in ("mamba_chunk_scan_combined", "ssd_chunk_scan", "mamba_chunk_scan_varlen",
                     "selective_state_update"):  # fmt: skip
            patch.setattr(reference, name, moving(getattr(reference, name)))
        yield


@contextlib.contextmanager
def on_tiles(dtype: torch.dtype = torch.bfloat16) -> Iterator[list[str]]:
    """Sizes that the chunked kernels have, no call too short for them, and their measure of error: what eager torch
    computes in `dtype` takes the place of what it computes in fp32. Collects which kernels calls go to."""
    from cute_ssd import asked, launch, plan, reference

    from . import common

    calls: list[str] = []

    def collecting(name: str) -> Callable[..., None]:
        run = getattr(launch, name)

        def collect(operands: launch.Operands, *args: Any, **kwargs: Any) -> None:
            if operands.num_seqs:
                calls.append(name)
            run(operands, *args, **kwargs)

        return collect

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "SIZES", common.TILES)
        patch.setattr(reference, "recurrence", common.eager_tiles(dtype))
        patch.setattr(plan, "recurrence_clocks", lambda problem, device: 1 << 62)
        patch.setattr(asked, "_ASKED", {})
        for name in ("chunked", "recurrence"):
            patch.setattr(launch, name, collecting(name))
        yield calls


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """What a GPU kernel refuses openly is skipped there, with its reason; and what launches nothing on silicon."""
    import cute_ssd

    silicon: Device | None = pyfuncitem.funcargs.get("executor")
    launches = silicon.launches if silicon else 0
    try:
        result = yield
    except cute_ssd.UnsupportedError as error:
        params = pyfuncitem.callspec.params if hasattr(pyfuncitem, "callspec") else {}
        if str(params.get("device", params.get("executor", ""))).startswith(("sm_", "cuda")):
            pytest.skip(str(error))
        raise
    if silicon and silicon.launches == launches:
        pytest.skip("about what the emulator refuses: nothing was launched on the device")
    return result


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fresh allocations hold NaN, so that whatever is left unwritten or read too early shows."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
