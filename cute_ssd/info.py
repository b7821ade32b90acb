"""What is installed and what it can run, also where parts of it are broken: imports nothing at the top that can be."""

import importlib
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from . import __version__

# What launches a kernel.
LAUNCHING = (("cutlass", "nvidia-cutlass-dsl"), ("tvm_ffi", "apache-tvm-ffi"))
# Module, distribution, and whether it is a dependency or only something that `cute_ssd` works with.
PACKAGES = (
    ("torch", "torch", True),
    *((module, distribution, True) for module, distribution in LAUNCHING),
    ("numpy", "numpy", True),
    ("nvtx", "nvtx", True),
    ("tqdm", "tqdm", True),
    ("transformers", "transformers", False),
)
# The package reads the cache's place and a C compiler, torch the others: what it runs on and how its threads wait.
ENVIRONMENT = ("XDG_CACHE_HOME", "CC", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "CUDA_VISIBLE_DEVICES")


def describe() -> dict[str, Any]:
    """The installation as plain values. Never raises: a part that fails is described by its error."""
    packages = _packages()
    return {
        "cute_ssd": __version__,
        "python": platform.python_version(),
        "packages": packages,
        "backends": _backends({name: package["status"] for name, package in packages.items()}),
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
    }


def _packages() -> dict[str, dict[str, str | None]]:
    """Version and state of each package: "ok", "not installed" or "broken: <error>". They are imported in processes
    of their own, so that one that crashes takes nothing with it, and all at once, since each may take seconds."""
    tries = {
        distribution: subprocess.Popen(
            [sys.executable, "-c", f"import {module}"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for module, distribution, _ in PACKAGES
    }
    found: dict[str, dict[str, str | None]] = {}
    for module, distribution, needed in PACKAGES:
        _, stderr = tries[distribution].communicate()
        try:
            installed = version(distribution)
        except PackageNotFoundError:
            installed = None
        if tries[distribution].returncode == 0:
            status = "ok"
        elif installed is None and f"No module named '{module}'" in stderr:
            status = "not installed" + ("" if needed else " (optional)")
        else:
            lines = stderr.strip().splitlines() or [f"import ended with exit code {tries[distribution].returncode}"]
            status = f"broken: {lines[-1]}"
        found[distribution] = {"version": installed, "status": status}
    return found


def _backends(packages: dict[str, str | None]) -> list[dict[str, str]]:
    """The devices there are and whether a scan runs on them, with packages in these states."""
    if packages["torch"] != "ok":
        return [{"device": "cpu", "name": platform.machine(), "status": f"unavailable: torch is {packages['torch']}"}]
    try:
        import torch

        from . import api  # noqa: F401  (registers the operators, which a torch of another version may refuse)

        backends = [
            {"device": "cpu", "name": f"{platform.machine()}, {torch.get_num_threads()} threads", "status": "ok"}
        ]
        for index in range(torch.cuda.device_count()):
            reason = _refused(f"cuda:{index}")
            for _, package in LAUNCHING:
                if reason is None and packages[package] != "ok":
                    reason = f"unavailable: {package} is {packages[package]}"
            name = torch.cuda.get_device_name(index)
            backends.append({"device": f"cuda:{index}", "name": name, "status": reason or "ok"})
    except Exception as error:
        return [{"device": "cpu", "name": platform.machine(), "status": f"broken: {type(error).__name__}: {error}"}]
    return backends


def unsupported(device: str) -> str | None:
    """Why the scan of the public suite cannot run on this GPU, None where it can. Imports what launches kernels."""
    if (reason := _refused(device)) is not None:
        return reason
    for module, package in LAUNCHING:
        try:
            importlib.import_module(module)
        except Exception as error:
            return f"{package} is broken: {type(error).__name__}: {error}"
    return None


def _refused(device: str) -> str | None:
    """Why no plan runs the scan of the public suite on this device, None where one does."""
    import torch

    from .device import Device
    from .errors import UnsupportedError
    from .plan import require_support
    from .problem import Problem

    asked = Problem("ssd_chunk_scan", 1, 256, 16, 64, 1, 256, torch.bfloat16, torch.bfloat16, None, 256)
    try:
        require_support(asked, Device.of(torch.device(device)))
    except UnsupportedError as error:
        return str(error)
    return None


def text(described: dict[str, Any]) -> str:
    """`describe()` for people."""
    lines = [f"cute_ssd {described['cute_ssd']} on Python {described['python']}", "packages"]
    for name, package in described["packages"].items():
        lines.append(f"  {name:<20} {package['version'] or '-':<14} {package['status']}")
    lines.append("backends")
    lines += [f"  {b['device']:<8} {b['name']}: {b['status']}" for b in described["backends"]]
    lines.append("environment")
    lines += [f"  {name} = {'unset' if value is None else value}" for name, value in described["environment"].items()]
    return "\n".join(lines)
