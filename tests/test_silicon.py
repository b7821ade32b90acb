"""How tests of instructions get to a CUDA device: arguments and back, targets, what is skipped and what fails.

The driver is stand_in_driver.py's, which executes by the emulator; nothing here needs a device.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from cuda.bindings import driver

from . import conftest, ptx_runner, silicon
from .bulk_copies import ATOMS_OF_32, ELEMENTS, Tensor, aligned
from .ptx_runner import Pointer, elementwise, run
from .stand_in_driver import StandIn, install
from .test_emulator_tensor_copies import load_boxes, store_boxes

COPY = """.visible .entry k(.param .u64 from, .param .u64 to) { .reg .b32 %t, %c, %r; .reg .b64 %a, %b;
    mov.u32 %t, %tid.x; mov.u32 %c, %ctaid.x; mad.lo.u32 %t, %c, 32, %t;
    ld.param.u64 %a, [from]; ld.param.u64 %b, [to]; mad.wide.u32 %a, %t, 4, %a; mad.wide.u32 %b, %t, 4, %b;
    ld.global.b32 %r, [%a]; st.global.b32 [%b], %r; ret; }"""


@pytest.fixture
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Launches go to a stand-in of the driver; a parameter is its device's compute capability."""
    made, device = StandIn(getattr(request, "param", (10, 0))), silicon.Device()
    install(monkeypatch, made)
    monkeypatch.setattr(ptx_runner, "device_launch", device.launch)
    yield made
    device.end()
    assert not made.memory  # all of it was freed


def loaded(stand_in: StandIn) -> list[str]:
    return [image.removesuffix(b"\0").decode() for image, *_ in stand_in.named("cuModuleLoadDataEx")]


# ---- arguments and results -------------------------------------------------------------------------------------------


def test_arrays_go_to_the_device_and_come_back(stand_in: StandIn) -> None:
    source, out = aligned(np.arange(64, dtype=np.uint32)), np.zeros(64, np.uint32)
    run(COPY, source, out, grid=(2, 1, 1))
    np.testing.assert_array_equal(out, source)
    for begin, data, size in stand_in.named("cuMemcpyHtoD"):
        begins = [silicon.whole(array)[0] for array in (source, out)]
        assert begin not in begins and begin % 1024 in [b % 1024 for b in begins] and size == len(data)
    assert len(stand_in.named("cuMemAlloc")) == len(stand_in.named("cuMemFree")) == 2


def test_pointers_with_offsets_and_arrays_that_alias(stand_in: StandIn) -> None:
    """Two halves of one buffer, the second by a pointer into the whole, are one piece of device memory."""
    buffer = np.concatenate([np.arange(32), np.zeros(32)]).astype(np.uint32)
    run(COPY, buffer[:32], Pointer(buffer, 128))
    np.testing.assert_array_equal(buffer, np.tile(np.arange(32), 2))
    strided = np.lib.stride_tricks.as_strided(buffer[32:], (2, 8), (64, 4))  # its owner is no array
    run(COPY, strided, buffer[:32])
    assert len(stand_in.named("cuMemAlloc")) == 2


def test_values_and_blobs_lie_where_the_kernel_declares_them(stand_in: StandIn) -> None:
    out, constant = aligned(np.zeros(6, np.uint32)), np.frombuffer(b"1234", np.uint8)
    text = """.visible .entry k(.param .b32 a, .param .align 64 .b8 blob[64], .param .f32 f, .param .u64 out,
        .param .u64 wide, .param .u64 constant) {
        .reg .b32 %r<4>; .reg .b64 %d<4>; ld.param.u64 %d0, [out];
        ld.param.b32 %r0, [a]; st.global.b32 [%d0], %r0; ld.param.b32 %r0, [blob+60]; st.global.b32 [%d0+4], %r0;
        ld.param.b32 %r0, [f]; st.global.b32 [%d0+8], %r0; ld.param.u64 %d1, [wide]; st.global.b64 [%d0+16], %d1;
        ld.param.u64 %d1, [constant]; ld.global.b32 %r0, [%d1]; st.global.b32 [%d0+12], %r0; ret; }"""
    run(text, -1, bytes(60) + b"\7\0\0\0", 1.5, out, np.uint64(5 << 32), constant)
    assert out.tolist() == [0xFFFFFFFF, 7, 0x3FC00000, 0x34333231, 0, 5] and constant.tobytes() == b"1234"


def test_grid_cluster_and_shared_memory(stand_in: StandIn) -> None:
    out = np.zeros(8, np.uint32)
    text = """.extern .shared .align 16 .b8 smem[];
        .visible .entry k(.param .u64 out) { .reg .b32 %r<6>; .reg .b64 %d; ld.param.u64 %d, [out];
        mov.u32 %r0, %ctaid.x; mov.u32 %r1, %cluster_nctarank; mov.u32 %r3, %ntid.y;
        mul.lo.u32 %r1, %r1, %r3; mad.wide.u32 %d, %r0, 4, %d; st.global.b32 [%d], %r1; ret; }"""
    run(text, out, grid=(8, 1, 1), cluster=(4, 1, 1), block=(1, 2, 1), shared=100_000)
    assert (out == 8).all()
    ((config, *_),) = stand_in.named("cuLaunchKernelEx")
    assert config.sharedMemBytes == 100_000 and config.numAttrs == 1
    run(text, out, grid=(8, 1, 1), block=(1, 2, 1))
    assert (out == 2).all() and stand_in.named("cuLaunchKernelEx")[1][0].numAttrs == 0


def test_elementwise(stand_in: StandIn) -> None:
    x = np.arange(300, dtype=np.uint32)
    np.testing.assert_array_equal(elementwise("add.u32 %out, %in0, %in0;", [x], x.dtype), 2 * x)
    assert stand_in.named("cuLaunchKernelEx")


def test_an_address_in_no_array_is_refused(stand_in: StandIn) -> None:
    tensor, other = Tensor("u32", (9, 8), (4, 8)), np.zeros(8, np.uint32)
    with pytest.raises(ValueError, match="is in no array of the call: pass the array it belongs to"):
        run(COPY, tensor.map, other)


# ---- tensor maps -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("element", ELEMENTS)
def test_the_driver_makes_tensor_maps(stand_in: StandIn, element: str) -> None:
    """Of the same description, at the device's address."""
    row = 64 // np.dtype(ELEMENTS[element][0]).itemsize
    tensor = Tensor(element, (3, 19, row + row // 2), (2, 4, row))
    at = [(0, 0, 0), (-row // 2 * (1 + (element == "b4x16")), 17, 2)]
    got = load_boxes(tensor, at)
    pack = 2 if element == "b4x16" else 1
    np.testing.assert_array_equal(got, [tensor.expected((x // pack, *rest)) for x, *rest in at])
    ((_, rank, address, *_),) = stand_in.named("cuTensorMapEncodeTiled")
    assert rank == 3 and address != tensor.array.ctypes.data and address % 16 == 0


def test_stores_through_a_tensor_map_come_back(stand_in: StandIn) -> None:
    tensor = Tensor("f32", (9, 24), (4, 8), ATOMS_OF_32)
    boxes = np.random.default_rng(0).standard_normal((1, 4, 8)).astype(np.float32)
    store_boxes(tensor, boxes, [(8, 2)])
    np.testing.assert_array_equal(tensor.array[2:6, 8:16], boxes[0])


@pytest.mark.parametrize("stand_in", [(9, 0)], indirect=True)
def test_tensor_maps_that_a_device_lacks_are_skipped(stand_in: StandIn) -> None:
    tensor = Tensor("f32", (9, 24), (4, 8), ATOMS_OF_32)
    with pytest.raises(pytest.skip.Exception, match="sm_90a: tensor maps of elements 7 and swizzle 4"):
        load_boxes(tensor, [(0, 0)])


# ---- targets and refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stand_in", "target"),
    [((8, 6), "sm_86"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((10, 3), "sm_103a"), ((12, 0), "sm_120a")],
    indirect=["stand_in"],
)
def test_the_target_is_the_devices(stand_in: StandIn, target: str) -> None:
    out = np.zeros(32, np.uint32)
    run(COPY, out + 1, out)
    run(".version 8.8\n  .target sm_80\n.address_size 64\n" + COPY, out + 1, out)
    assert (out == 2).all()
    first, second = loaded(stand_in)
    assert first.startswith(f".version 8.8\n.target {target}\n") and f".version 8.8\n  .target {target}\n" in second


@pytest.mark.parametrize(
    "said",
    [
        "ptxas application ptx input, line 9; error   : Instruction 'redux.f32' not supported on .target 'sm_90a'",
        "ptxas application ptx input, line 9; error   : Feature 'wide' requires .target sm_100 or higher",
        "ptxas application ptx input, line 9; error   : Illegal modifier '.f32' for instruction 'x', for arch 'sm_90a'",
    ],
)
@pytest.mark.parametrize("stand_in", [(9, 0)], indirect=True)
def test_what_the_architecture_lacks_is_skipped(stand_in: StandIn, said: str) -> None:
    stand_in.log = f"{said}\nptxas fatal   : Ptx assembly aborted due to errors"
    with pytest.raises(pytest.skip.Exception) as skipped:
        run(COPY, np.zeros(32, np.uint32), np.zeros(32, np.uint32))
    assert skipped.value.msg == "sm_90a: " + said.split("; ")[1]


def test_other_refusals_are_failures(stand_in: StandIn) -> None:
    stand_in.log = "ptxas application ptx input, line 9; error   : Unknown symbol 'x'"
    with pytest.raises(silicon.DeviceError) as refused:
        run(COPY, np.zeros(32, np.uint32), np.zeros(32, np.uint32))
    assert str(refused.value) == f"cuModuleLoadDataEx for sm_100a: CUDA_ERROR_INVALID_PTX\n{stand_in.log}"


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="there is no ptxas")
@pytest.mark.parametrize("stand_in", [(9, 0)], indirect=True)
def test_the_words_of_ptxas(stand_in: StandIn) -> None:
    x = np.zeros(4, np.float32)
    with pytest.raises(pytest.skip.Exception, match=r"sm_90a: error +: .*max.* requires .target sm_100 or higher"):
        elementwise("max.f32 %out, %in0, %in0, %in0;", [x], x.dtype)


def test_a_device_reports_no_findings(stand_in: StandIn) -> None:
    with pytest.raises(pytest.skip.Exception, match="about findings: a device reports none"):
        run(COPY, np.zeros(32, np.uint32), np.zeros(32, np.uint32), check=False)
    assert not stand_in.calls


# ---- faults ----------------------------------------------------------------------------------------------------------


def test_a_fault_ends_the_process_and_the_next_launch_has_another(stand_in: StandIn) -> None:
    device = ptx_runner.device_launch.__self__  # type: ignore[union-attr]
    out = np.zeros(32, np.uint32)
    fault = COPY.replace("ld.global.b32 %r, [%a]", "mov.u64 %a, 0; ld.global.b32 %r, [%a]")
    with pytest.raises(silicon.DeviceError, match="cuCtxSynchronize: CUDA_ERROR_LAUNCH_FAILED"):
        run(fault, out, out)
    assert device.process is None and device.launches == 0
    run(COPY, out + 3, out)
    assert (out == 3).all() and device.launches == 1


def sleep(job: silicon.Job) -> None:
    time.sleep(600)


def test_a_kernel_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silicon, "SECONDS", 0.5)
    monkeypatch.setattr(silicon, "execute", sleep)
    device, out = silicon.Device(), np.zeros(32, np.uint32)
    with pytest.raises(silicon.DeviceError, match="has not ended after 0 s, or its process died"):
        device.launch(ptx_runner.HEADER + COPY, "k", (out, out), (1, 1, 1), (32, 1, 1), (1, 1, 1), shared=0)
    assert device.process is None


def test_the_process_is_a_process_of_its_own() -> None:
    """Its errors come back, here that of a driver that is not there."""
    if silicon.problem() is None:
        pytest.skip("there is a CUDA device")
    device, out = silicon.Device(), np.zeros(32, np.uint32)
    with pytest.raises(Exception, match="driver"):
        device.launch(ptx_runner.HEADER + COPY, "k", (out, out), (1, 1, 1), (32, 1, 1), (1, 1, 1), shared=0)
    assert device.process is not None
    device.end()


# ---- the option ------------------------------------------------------------------------------------------------------


def missing(*_: object) -> None:
    raise RuntimeError("no library")


@pytest.mark.parametrize(
    ("answers", "got"),
    [
        (SimpleNamespace(cuInit=missing), "libcuda.so.1 cannot be loaded, expected the driver of a CUDA device"),
        (StandIn(devices=0), "there are 0 CUDA devices, expected one"),
        (
            SimpleNamespace(cuInit=lambda _: (driver.CUresult.CUDA_ERROR_NO_DEVICE,)),
            "cuInit: CUDA_ERROR_NO_DEVICE, expected a CUDA device",
        ),
    ],
)
def test_without_a_device_the_option_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, answers: object, got: str
) -> None:
    monkeypatch.setattr(silicon, "driver", answers)
    config = SimpleNamespace(getoption=lambda name: name == "--gpu")
    with pytest.raises(pytest.UsageError) as refused:
        conftest.pytest_configure(config)  # type: ignore[arg-type]
    remedy = "install NVIDIA's driver and let the process see a device, or leave --gpu or -m gpu away"
    assert str(refused.value) == f"--gpu: {got}: {remedy}"


def pytest_on_stand_in(which: str, *files: str) -> str:
    """The last line of `pytest --gpu` on a stand-in."""
    command = [sys.executable, "-m", "pytest", "--gpu", "-q", "-p", "tests.stand_in_driver", "-k", which, *files]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


def test_known_answers_run_there_and_findings_do_not() -> None:
    which = "cuda and (prefetches or misuse or refused)"
    assert pytest_on_stand_in(which, "tests/test_emulator_bulk.py").startswith("1 passed, 23 skipped")


@pytest.mark.long
def test_every_known_answer_holds_there() -> None:
    files = sorted(str(path) for path in Path(__file__).parent.glob("test_emulator_*.py"))
    passed = int(pytest_on_stand_in("cuda", *files).split()[0])
    assert passed > 1600
