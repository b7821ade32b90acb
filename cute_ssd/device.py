"""What a call runs on, described without touching it."""

import sys
from typing import NamedTuple

import torch

from .errors import ShapeError

KNOWN_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")
# Multiprocessors that are enabled, where a plan depends on them.
MULTIPROCESSORS = {"sm_100a": 148, "sm_103a": 148}


class Device(NamedTuple):
    """`kind` is a torch device type; `arch` the GPU architecture as the compiler names it, "" for none."""

    kind: str
    arch: str = ""

    @property
    def multiprocessors(self) -> int:
        """Of a device of this architecture: a plan is the same on every machine."""
        return MULTIPROCESSORS[self.arch]

    @classmethod
    def of(cls, device: torch.device) -> "Device":
        """Where tensors on `device` are computed; inside `emulate()` CPU tensors belong to the emulated GPU."""
        if device.type == "cpu" and (arch := emulated_arch()):
            return cls("cuda", arch)
        if device.type != "cuda":
            return cls(device.type)
        major, minor = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0)
        name = f"sm_{major}{minor}" if major else ""
        return cls("cuda", f"{name}a" if major >= 9 else name)

    @classmethod
    def from_arch(cls, arch: str) -> "Device":
        """A device to plan for: "cpu" or one of `KNOWN_ARCHS`."""
        if arch == "cpu":
            return cls("cpu")
        if arch not in KNOWN_ARCHS:
            raise ShapeError(f"arch is {arch!r}, expected 'cpu' or one of {', '.join(KNOWN_ARCHS)}.")
        return cls("cuda", arch)


def emulated_arch() -> str:
    """The architecture of the emulator's session that is active, "" without one."""
    module = sys.modules.get("cute_ssd.emulator.session")
    session = module.Session._active if module is not None else None
    return session.device.arch if session is not None else ""
