"""From the configuration of a kernel to a function that launches it: in memory, on disk, or compiled now.

Note [Cache]: an entry is a directory, `<cache>/kernels/<key>/`, which holds the host function as an object file, the
PTX and the machine code of its kernels, and their hashes. The key is the hash of everything that went into it: the
configuration, the architecture, the sources of this package's kernels and of this file, the compiler and its settings
in the environment, its runtime, and Python, which traces the kernels. So nothing is ever out of date. An entry appears
by one rename of a finished directory; one whose hashes do not match is thrown away. Processes that want the same kernel
at the same time wait for the first one.
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from .emulator.build import cache_directory
from .kernels.dims import Recurrence
from .kernels.sm100.config import Chunked

OBJECT, PTX, MACHINE_CODE, HASHES = "host.o", "kernel.ptx", "kernel.cubin", "hashes"
SYMBOL = "cute_ssd_kernel"
Configuration = Recurrence | Chunked
# The compiler, its libraries, of which one flavour of CUDA is installed, and what calls its results.
PACKAGES = (
    *("nvidia-cutlass-dsl", *(f"nvidia-cutlass-dsl-libs-{part}" for part in ("base", "core", "cu12", "cu13"))),
    "apache-tvm-ffi",
)
SETTINGS = "CUTE_DSL_"  # how the compiler's variables of the environment begin

_compiled: dict[tuple[Configuration, str, bool], "Compiled"] = {}
_compiling = threading.Lock()  # the DSL's compiler aborts the process when two threads enter it


@dataclass
class Compiled:
    """A kernel, or several behind one host function, that can be called, with what it was made of."""

    directory: Path
    arch: str

    def __call__(self, *arguments: Any) -> None:
        self.function(*arguments)

    @cached_property
    def function(self) -> Callable[..., None]:
        """Loaded when it is first called: who asks for the machine code only needs no driver."""
        return _load(self.directory, self.arch)

    @cached_property
    def ptx(self) -> str:
        return (self.directory / PTX).read_text()

    @cached_property
    def machine_code(self) -> bytes:
        return (self.directory / MACHINE_CODE).read_bytes()


def compiled(kernel: Configuration, arch: str) -> Compiled:
    """`kernel` for `arch` ("sm_100a"). Inside `cute_ssd.emulate(arch)` it runs there, on CPU tensors."""
    key = (kernel, arch, _session() is not None)
    found = _compiled.get(key)
    if found is None:
        with _compiling:
            found = _compiled.get(key)
            if found is None:
                found = _compiled[key] = _from_disk_or_compiler(kernel, arch)
    return found


def configuration_of(ptx: str) -> Configuration | None:
    """What the kernels with this PTX were compiled for; None where `compiled` has not returned them here."""
    return next((kernel for (kernel, _, _), found in _compiled.items() if found.ptx == ptx), None)


def is_cached(kernel: Configuration, arch: str) -> bool:
    """Whether `compiled` would find this kernel on the disk, undamaged."""
    return _intact(cache_directory() / "kernels" / _key(kernel, arch))


def _from_disk_or_compiler(kernel: Configuration, arch: str) -> Compiled:
    root = cache_directory() / "kernels"
    root.mkdir(exist_ok=True)
    directory = root / _key(kernel, arch)
    found = Compiled(directory, arch)
    with _locked(root / f"{directory.name}.lock"):
        if directory.exists():
            if _intact(directory):
                return found
            shutil.rmtree(directory)
        # Beside its place, because a rename is atomic only within one file system.
        scratch = Path(tempfile.mkdtemp(prefix="new-", dir=root))
        try:
            _compile(kernel, arch, scratch)
            hashes = "".join(f"{_hash(scratch / name)} {name}\n" for name in (OBJECT, PTX, MACHINE_CODE))
            (scratch / HASHES).write_text(hashes)
            scratch.chmod(0o755)
            scratch.rename(directory)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return found


def _compile(kernel: Configuration, arch: str, directory: Path) -> None:
    """Compiles on tensors without data and leaves the entry's files in `directory`."""
    import cutlass.cute as cute
    from cutlass.base_dsl.compiler import DumpDir

    built, arguments = kernel.build()
    options = (
        cute.GPUArch(arch),
        cute.KeepPTX(True),
        cute.KeepCUBIN(True),
        DumpDir(str(directory)),
        cute.EnableTVMFFI(True),
    )
    # Without an engine nothing is loaded here: every process calls what it has read from the disk.
    function = cute.compile[options](built, *arguments, no_jit_engine=True)
    function.export_to_c(str(directory / OBJECT), function_name=SYMBOL)
    for kept in directory.iterdir():
        if kept.name != OBJECT:
            kept.unlink()
    (directory / PTX).write_text(function.__ptx__)
    (directory / MACHINE_CODE).write_bytes(function.__cubin__)


def _load(directory: Path, arch: str) -> Callable[..., None]:
    import cutlass.cute as cute

    function = cute.runtime.load_module(str(directory / OBJECT), enable_tvm_ffi=True)[SYMBOL]
    session = _session()
    if session is None:
        return function
    from .emulator.launch import Image, runtime

    image = Image((directory / PTX).read_text(), arch)
    runtime().add_image((directory / MACHINE_CODE).read_bytes(), image)
    return _Emulated(function, arch)


class _Emulated:
    """A function loaded from disk, called through whatever session is active."""

    function_name = SYMBOL

    def __init__(self, function: Callable[..., None], arch: str) -> None:
        self._function = function
        self._emulated_arch = arch

    def __call__(self, *arguments: Any) -> None:
        session = _session()

        def call(holder: "_Emulated", *arguments: Any) -> None:
            holder._function(*arguments)

        session._surfacing(session._calling_ffi(call))(self, *arguments)


def _session() -> Any:
    """The emulator's session that is active, or None."""
    module = sys.modules.get("cute_ssd.emulator.session")
    return module.Session._active if module is not None else None


def _key(kernel: Configuration, arch: str) -> str:
    settings = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)]
    machine = (platform.machine(), platform.python_version())
    digest = hashlib.sha256()
    for part in (repr(kernel), arch, str(_session() is not None), *machine, *_packages(), *settings):
        digest.update(part.encode() + b"\0")
    digest.update(Path(__file__).read_bytes())  # the options
    # Now and not at import: the compiler reads the source files again when it compiles.
    kernels = Path(__file__).parent / "kernels"
    own = kernels.rglob if isinstance(kernel, Chunked) else kernels.glob  # the recurrence needs nothing of sm100
    for source in sorted(own("*.py")):
        digest.update(source.relative_to(kernels).as_posix().encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:32]


@cache  # a model has many kernels, and each look for a version reads files
def _packages() -> list[str]:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} none")
    return found


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _intact(directory: Path) -> bool:
    try:
        entries = [line.split() for line in (directory / HASHES).read_text().splitlines()]
        return len(entries) == 3 and all(_hash(directory / name) == expected for expected, name in entries)
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    with open(file, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
