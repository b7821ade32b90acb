"""What a compiled kernel takes of a multiprocessor, read from its machine code (an ELF file) without NVIDIA's tools."""

import struct
from collections.abc import Iterator
from typing import NamedTuple

from .dims import WARP

# Of `.nv.info`: attributes with a payload, and those whose payload is (symbol, value).
_FORMAT_SIZED = 4
_REGISTERS, _FRAME = 0x2F, 0x11
_SYMBOL_BYTES = 24


class Resources(NamedTuple):
    registers: int  # of a thread
    local_bytes: int  # of a thread: its stack frame, where registers are spilled to; 0 is as it should be


class Multiprocessor(NamedTuple):
    """Limits of a multiprocessor that decide how many CTAs it holds."""

    shared_bytes: int
    threads: int
    ctas: int
    registers: int = 65536


MULTIPROCESSORS = {
    "sm_80": Multiprocessor(164 << 10, 2048, 32),
    "sm_90a": Multiprocessor(228 << 10, 2048, 32),
    "sm_100a": Multiprocessor(228 << 10, 2048, 32),
    "sm_103a": Multiprocessor(228 << 10, 2048, 32),
    "sm_120a": Multiprocessor(100 << 10, 1536, 24),
}


def resources(machine_code: bytes) -> Resources:
    """Of the only kernel in `machine_code`."""
    (found,) = kernel_resources(machine_code).values()
    return found


def kernel_resources(machine_code: bytes) -> dict[str, Resources]:
    """Of each kernel in `machine_code`, by its name."""
    values: dict[int, dict[int, int]] = {}  # by the number of the kernel's symbol
    for attribute, payload in _attributes(_section(machine_code, ".nv.info")):
        if attribute in (_REGISTERS, _FRAME):
            symbol, value = struct.unpack("<II", payload)
            values.setdefault(symbol, {})[attribute] = value
    symbols, names = _section(machine_code, ".symtab"), _section(machine_code, ".strtab")
    found = {}
    for symbol, value in values.items():
        if _REGISTERS not in value:  # a function that the compiler adds, not a kernel
            continue
        (name,) = struct.unpack_from("<I", symbols, symbol * _SYMBOL_BYTES)
        found[names[name : names.index(b"\0", name)].decode()] = Resources(value[_REGISTERS], value[_FRAME])
    return found


def resident_ctas(found: Resources, threads: int, shared_bytes: int, arch: str) -> int:
    """CTAs of this size that a multiprocessor holds at a time."""
    limits = MULTIPROCESSORS[arch]
    warp_registers = -(-found.registers * WARP // 256) * 256  # registers are handed out in units of 256 to a warp
    warps = limits.registers // warp_registers // 4 * 4  # evenly to its four parts
    return min(
        warps // (threads // WARP), limits.shared_bytes // (shared_bytes + 1024), limits.threads // threads, limits.ctas
    )


def _section(elf: bytes, wanted: str) -> bytes:
    offset, entry_bytes, count, names = struct.unpack_from("<Q10xHHH", elf, 40)
    headers = [struct.unpack_from("<IIQQQQ", elf, offset + k * entry_bytes) for k in range(count)]
    table = headers[names][4]
    for name, _, _, _, start, size in headers:
        begin = table + name
        if elf[begin : elf.index(b"\0", begin)].decode() == wanted:
            return elf[start : start + size]
    raise ValueError(f"the machine code has no section {wanted}")


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position < len(info):
        kind, attribute, size = struct.unpack_from("<BBH", info, position)
        position += 4
        payload = info[position : position + size] if kind == _FORMAT_SIZED else b""
        position += len(payload)
        if kind == _FORMAT_SIZED:
            yield attribute, payload
