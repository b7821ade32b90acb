"""What ptxas chose for compiled kernels, read from their machine code (an ELF file) without NVIDIA's tools."""

import struct
from collections.abc import Iterator
from typing import NamedTuple

_SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr
_SYMBOL_BYTES, _SYMBOL_TABLE = 24, 2
# Of `.nv.info`: attributes with a payload, and those whose payload is (symbol, value).
_FORMAT_SIZED = 4
_REGISTERS, _FRAME = 0x2F, 0x11


class Resources(NamedTuple):
    registers: int  # of a thread
    local_bytes: int  # of a thread: its stack frame, where registers are spilled to; 0 is as it should be


def resources(machine_code: bytes) -> Resources:
    """Of the only kernel in `machine_code`."""
    (found,) = kernel_resources(machine_code).values()
    return found


def kernel_resources(machine_code: bytes) -> dict[str, Resources]:
    """Of each kernel in `machine_code`, by its name. ValueError where it is damaged or something else."""
    try:
        functions = _functions(machine_code)
        # One without registers is a function that the compiler adds, not a kernel.
        kernels = {name: values for name, values in functions.items() if _REGISTERS in values}
        return {name: Resources(values[_REGISTERS], values[_FRAME]) for name, values in kernels.items()}
    except (struct.error, IndexError, KeyError) as error:
        raise ValueError(f"the machine code is damaged ({type(error).__name__}: {error})") from None


def stack_frames(machine_code: bytes) -> dict[str, int]:
    """Bytes of the stack frame of every function, those that the compiler adds too."""
    return {name: values[_FRAME] for name, values in _functions(machine_code).items() if _FRAME in values}


def _functions(elf: bytes) -> dict[str, dict[int, int]]:
    """What `.nv.info` says of each function: attribute -> value."""
    if elf[:4] != b"\x7fELF":
        raise ValueError("the machine code is not an ELF file")
    offset, entry_bytes, count, names = struct.unpack_from("<Q10xHHH", elf, 40)
    headers = [_SECTION.unpack_from(elf, offset + k * entry_bytes) for k in range(count)]
    contents = [elf[start : start + size] for _, _, _, _, start, size, *_ in headers]
    by_name = {_string(contents[names], header[0]): content for header, content in zip(headers, contents, strict=True)}
    (table,) = (number for number, header in enumerate(headers) if header[1] == _SYMBOL_TABLE)
    symbols, strings = contents[table], contents[headers[table][6]]
    found: dict[str, dict[int, int]] = {}
    for attribute, payload in _attributes(by_name[".nv.info"]):
        if attribute in (_REGISTERS, _FRAME):
            symbol, value = struct.unpack("<II", payload)
            (name,) = struct.unpack_from("<I", symbols, symbol * _SYMBOL_BYTES)
            found.setdefault(_string(strings, name), {})[attribute] = value
    return found


def _string(table: bytes, at: int) -> str:
    return table[at : table.index(b"\0", at)].decode()


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position < len(info):
        kind, attribute, size = struct.unpack_from("<BBH", info, position)
        position += 4
        payload = info[position : position + size] if kind == _FORMAT_SIZED else b""
        position += len(payload)
        if kind == _FORMAT_SIZED:
            yield attribute, payload
