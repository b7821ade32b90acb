"""Registers per thread, as ptxas chose them: they stand in the machine code beside the PTX."""

from __future__ import annotations

import struct

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")  # Elf64_Ehdr
_SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr
_SYMBOL_BYTES, _SYMBOL_TABLE = 24, 2
_REGISTER_COUNT = b"\x04\x2f\x08\x00"  # EIATTR_REGCOUNT in .nv.info: symbol, registers


def registers(machine_code: bytes) -> dict[str, int]:
    """Registers per thread of each kernel in a cubin; {} for anything else."""
    if machine_code[:4] != b"\x7fELF" or len(machine_code) < _HEADER.size:
        return {}
    header = _HEADER.unpack_from(machine_code)
    start, count, names_at = header[6], header[12], header[13]
    try:
        sections = [_SECTION.unpack_from(machine_code, start + i * _SECTION.size) for i in range(count)]
        contents = [machine_code[s[4] : s[4] + s[5]] for s in sections]
        names = [_string(contents[names_at], s[0]) for s in sections]
        symbols: list[str] = []
        for section, content in zip(sections, contents, strict=True):
            if section[1] == _SYMBOL_TABLE:
                strings = contents[section[6]]
                offsets = range(0, len(content), _SYMBOL_BYTES)
                symbols = [_string(strings, int.from_bytes(content[at : at + 4], "little")) for at in offsets]
        found = {}
        info = contents[names.index(".nv.info")]
        for at in range(0, len(info) - 11, 4):
            if info[at : at + 4] == _REGISTER_COUNT:
                symbol, number = struct.unpack_from("<II", info, at + 4)
                found[symbols[symbol]] = number
        return found
    except (struct.error, IndexError, ValueError):
        return {}


def _string(table: bytes, at: int) -> str:
    return table[at : table.index(b"\0", at)].decode()
