"""Where a measurement was made: GPU, driver, clocks, versions, commit. `python -m profiling.environment` prints it."""

import argparse
import csv
import datetime
import io
import json
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import cute_ssd

from . import ProfilingError
from .cases import require_device

ROOT = Path(__file__).parent.parent
PACKAGES = ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "triton", "mamba-ssm", "flashinfer-python")
AT_WORK_SECONDS = 0.2  # that the GPU has been busy when its clock is read, so that it has left the idle one
# Of `nvidia-smi --query-gpu`, and under what name each is kept.
SMI_FIELDS = {
    "name": "gpu",
    "driver_version": "driver",
    "clocks.current.sm": "sm_mhz",
    "clocks.max.sm": "sm_max_mhz",
    "clocks.current.memory": "memory_mhz",
    "temperature.gpu": "celsius",
    "power.draw": "watts",
    "clocks_event_reasons.active": "throttle_reasons",
}


def describe(device: str) -> dict[str, Any]:
    """Plain values; None where something cannot be found out."""
    found: dict[str, Any] = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "cute_ssd": cute_ssd.__version__,
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": commit(),
        "cuda": torch.version.cuda,
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found |= {
            "gpu": properties.name,
            "arch": f"sm_{properties.major}{properties.minor}",
            "sms": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "memory_bytes": properties.total_memory,
        }
        found |= {name: value for name, value in smi().items() if name != "gpu"}
    return found


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit of this checkout, "+changes" after it where the sources differ from it; None outside a checkout."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    if head.returncode:
        return None
    return head.stdout.strip() + ("+changes" if changed.stdout.strip() else "")


def smi() -> dict[str, Any]:
    """What nvidia-smi says of the current device; empty where it cannot be run."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    # By its UUID, because CUDA_VISIBLE_DEVICES renumbers devices and nvidia-smi does not know it.
    identity = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    command = [program, f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits", f"--id={identity}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return parse_smi(done.stdout) if done.returncode == 0 else {}


def parse_smi(text: str) -> dict[str, Any]:
    """The first line of the query's CSV; numbers as numbers, "[N/A]" and the like as None."""
    rows = list(csv.reader(io.StringIO(text), skipinitialspace=True))
    if not rows or len(rows[0]) != len(SMI_FIELDS):
        return {}
    found: dict[str, Any] = {}
    for name, cell in zip(SMI_FIELDS.values(), rows[0], strict=True):
        value: Any = None if cell.startswith("[") else cell.strip()
        if value is not None and name.endswith(("_mhz", "celsius", "watts")):
            try:
                value = float(value)
            except ValueError:
                value = None
        found[name] = value
    return found


class Clocks:
    """Samples of the SM clock in MHz, through NVML where nvidia-ml-py is installed and else nvidia-smi."""

    def __init__(self, device: str) -> None:
        self.samples: list[float] = []
        self._device = device
        self._nvml: Any = None
        if device == "cuda":
            try:
                import pynvml

                pynvml.nvmlInit()
                uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
                self._nvml = (pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid.encode()))
            except Exception:  # not installed, or a driver that it does not know
                self._nvml = None

    def sample(self, work: Callable[[], Any]) -> None:
        """Reads the clock once, with `work` queued for a while before and then until the reading is in: an idle GPU
        lowers its clock, and nvidia-smi takes longer than many calls."""
        if self._device != "cuda":
            return
        with ThreadPoolExecutor(1) as reader:
            begin = time.perf_counter()
            while time.perf_counter() < begin + AT_WORK_SECONDS:
                work()
            reading = reader.submit(self._read)
            while not reading.done():
                work()
        torch.cuda.synchronize()
        if (clock := reading.result()) is not None:
            self.samples.append(clock)

    def _read(self) -> float | None:
        if self._nvml is None:
            return smi().get("sm_mhz")
        nvml, handle = self._nvml
        return float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))

    def range(self) -> dict[str, float] | None:
        return {"min_mhz": min(self.samples), "max_mhz": max(self.samples)} if self.samples else None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m profiling.environment", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one")
    parser.add_argument("--require-gpu", action="store_true", help="exit code 2 without a CUDA device")
    arguments = parser.parse_args(argv)
    device = arguments.device or ("cuda" if torch.cuda.is_available() or arguments.require_gpu else "cpu")
    try:
        require_device(device)
    except ProfilingError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(describe(device), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
