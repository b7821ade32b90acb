"""Compiling a shared library on first use, once per user.

The package is pure python on an index, so what the emulator needs of C and C++ is compiled on the machine that runs it.
A library is cached under a name that holds the hash of everything that went into it: nothing is ever out of date, and
two versions of the package share a cache directory.
"""

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HEADER_SUFFIXES = (".h", ".hpp", ".inc")


class EmulatorError(RuntimeError):
    """The emulator cannot do what was asked, or a kernel did what a GPU would not survive."""


def shared_library(name: str, sources: Sequence[Path], flags: Sequence[str], compilers: Sequence[str]) -> Path:
    """The path of `sources` compiled and linked with the first of `compilers` that is installed.

    A compiler is a command line, as $CC holds one ("ccache gcc"); empty ones are skipped. `flags` go to the compiler
    and to the linker. Headers beside the sources count as sources of the key. Processes that want the same library at
    the same time wait for the first one.
    """
    compiler = _find_compiler(compilers)
    key = _key(name, sources, flags, compiler)
    directory = cache_directory()
    library = directory / f"{name}-{key}.so"
    if library.exists():
        return library
    with open(directory / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            # A directory inside the cache, because a rename is atomic only within one file system.
            with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=directory) as scratch:
                os.replace(_build(sources, flags, compiler, Path(scratch)), library)
    return library


def cache_directory() -> Path:
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cute_ssd"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EmulatorError(
            f"The cache directory cannot be made ({error}); set XDG_CACHE_HOME to a directory that can be written."
        ) from None
    return directory


def _find_compiler(candidates: Sequence[str]) -> list[str]:
    commands = [shlex.split(candidate) for candidate in candidates if candidate.strip()]
    for command in commands:
        if (program := shutil.which(command[0])) is not None:
            return [program, *command[1:]]
    tried = ", ".join(command[0] for command in commands)
    raise EmulatorError(f"The emulator compiles a library on first use and found no compiler: tried {tried}.")


def _key(name: str, sources: Sequence[Path], flags: Sequence[str], compiler: Sequence[str]) -> str:
    digest = hashlib.sha256()

    def add(*parts: str | bytes) -> None:
        for part in parts:
            data = part.encode() if isinstance(part, str) else part
            digest.update(len(data).to_bytes(8, "little") + data)

    add(name, *compiler, *flags, subprocess.run([*compiler, "--version"], capture_output=True).stdout)
    if any("native" in flag for flag in flags):  # a home directory may be mounted on machines with other processors
        add(_processor())
    folders = {source.parent for source in sources}
    headers = [file for folder in folders for file in folder.iterdir() if file.suffix in HEADER_SUFFIXES]
    for file in sorted([*sources, *headers]):
        add(file.name, file.read_bytes())
    return digest.hexdigest()[:20]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _build(sources: Sequence[Path], flags: Sequence[str], compiler: Sequence[str], scratch: Path) -> Path:
    objects = [scratch / f"{number}-{source.stem}.o" for number, source in enumerate(sources)]

    def compile_one(source: Path, target: Path) -> None:
        # Objects are cached as well: after a change to one file the others are not compiled again.
        kept = cache_directory() / f"{source.stem}-{_key('object', [source], flags, compiler)}.o"
        if not kept.exists():
            _run([*compiler, *flags, "-fPIC", "-c", str(source), "-o", str(target)], f"compile {source.name}")
            os.replace(target, kept)
        shutil.copyfile(kept, target)

    with ThreadPoolExecutor(max_workers=max(1, min(len(sources), os.cpu_count() or 1))) as pool:
        list(pool.map(compile_one, sources, objects))
    library = scratch / "library.so"
    _run([*compiler, *flags, "-shared", *map(str, objects), "-o", str(library)], "link the emulator's library")
    return library


def _run(command: Sequence[str], purpose: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise EmulatorError(f"{command[0]} could not {purpose}:\n{result.stderr.strip()}")
