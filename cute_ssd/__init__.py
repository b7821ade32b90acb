"""Mamba-2 SSD scan: torch tensors in, torch tensors out.

Names resolve on first use (PEP 562): `import cute_ssd` loads neither torch, cutlass nor CUDA, so that
`python -m cute_ssd info` can describe an installation in which one of them is broken.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "mamba_chunk_scan_combined": "api",
    "ssd_chunk_scan": "api",
    "mamba_chunk_scan_varlen": "api",
    "mamba_chunk_scan_varlen_inplace": "api",
    "selective_state_update": "api",
    "explain": "api",
    "emulate": "emulator",
    "EmulatorError": "emulator",
    "KernelError": "emulator",
    "Plan": "plan",
    "ShapeError": "errors",
    "DtypeError": "errors",
    "UnsupportedError": "errors",
}

if TYPE_CHECKING:
    from .api import (
        explain,
        mamba_chunk_scan_combined,
        mamba_chunk_scan_varlen,
        mamba_chunk_scan_varlen_inplace,
        selective_state_update,
        ssd_chunk_scan,
    )
    from .emulator import EmulatorError, KernelError, emulate
    from .errors import DtypeError, ShapeError, UnsupportedError
    from .plan import Plan

__all__ = [
    "DtypeError",
    "EmulatorError",
    "KernelError",
    "Plan",
    "ShapeError",
    "UnsupportedError",
    "__version__",
    "emulate",
    "explain",
    "mamba_chunk_scan_combined",
    "mamba_chunk_scan_varlen",
    "mamba_chunk_scan_varlen_inplace",
    "selective_state_update",
    "ssd_chunk_scan",
]


def __getattr__(name: str) -> Any:
    if name == "compat":
        return import_module(".compat", __name__)
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'cute_ssd' has no attribute {name!r}; public names are {', '.join(__all__)}")
    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
