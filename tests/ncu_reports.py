"""Reports in Nsight Compute's two forms, of invented kernels: `python -m tests.ncu_reports` writes tests/fixtures/ncu.

The forms are real: the CSV is laid out as `ncu --page raw --csv` prints it, and NVIDIA's reader takes the .ncu-rep.
"""

import csv
import io
import json
import struct
from pathlib import Path
from typing import NamedTuple

from profiling import metrics

FIXTURES = Path(__file__).parent / "fixtures" / "ncu"
PROGRAM = ("4242", "python", "127.0.0.1")
STATE = "kernel_cutlass_kernel_chunk_state_tensorptrbf16gmem_Float32_0"
SCAN = "kernel_cutlass_kernel_chunk_scan_tensorptrbf16gmem_Float32_0"
UTCMMA_1, UTCMMA_2 = metrics.TCGEN05
MATRIX = "l1tex__data_pipe_tc_wavefronts_mem_shared_op_utcmma_matrix"


class Invented(NamedTuple):
    """A kernel: `counts` are by metric and in base units, but nanoseconds for time, as NVIDIA's reader gives them."""

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    counts: dict[str, float]


def kernel(
    name: str, grid: int, us: float, mhz: float, sms: int, percent: dict[str, float], **counts: float
) -> Invented:
    """With what hangs together: cycles from time and clock, launch sizes. `counts` are further metrics."""
    cycles = us * mhz
    made = {
        metrics.TIME: us * 1e3,
        metrics.CYCLES: cycles,
        metrics.SM_CYCLES: cycles * sms,
        metrics.CLOCK: mhz * 1e6,
        "launch__grid_size": grid,
        "launch__grid_dim_x": grid,
        "launch__grid_dim_y": 1,
        "launch__grid_dim_z": 1,
        "launch__block_dim_x": 512,
        "launch__block_dim_y": 1,
        "launch__block_dim_z": 1,
        "launch__registers_per_thread": 128,
        "device__attribute_multiprocessor_count": sms,
    }
    made |= {metrics.PERCENT[resource][0]: value for resource, value in percent.items()}
    return Invented(name, (grid, 1, 1), (512, 1, 1), made | counts)


B200 = [
    kernel(
        STATE,
        64,
        5.12,
        1500,
        148,
        {"HBM": 45.25, "L2": 33.125, "tensor": 38.5, "MUFU": 3.25, "FMA": 9.5, "ALU": 7.75, "issue": 21.0},
        **{
            metrics.PERCENT["tensor"][1]: 41.0,
            metrics.TENSOR_WAVEFRONTS: 350_000,
            f"{MATRIX}_a.sum": 150_000,
            f"{MATRIX}_b_scope_1cta.sum": 200_000,
            metrics.LSU_WAVEFRONTS: 98_304,
            metrics.TMA_BYTES[0]: 10_500_096,
            metrics.TMA_BYTES[1]: 4_194_304,
            metrics.DRAM_READ: 12_400_000,
            metrics.DRAM_WRITE: 2_100_000,
            metrics.DRAM: 14_500_000,
            "lts__t_bytes.sum": 21_000_000,
            "lts__t_sector_hit_rate.pct": 48.5,
            "sm__inst_executed_pipe_xu.sum": 12_288,
            UTCMMA_1: 8_192,
            UTCMMA_2: 0,
        },
    ),
    kernel(
        SCAN,
        148,
        9.6,
        1500,
        148,
        {"HBM": 31.5, "L2": 29.75, "tensor": 52.5, "MUFU": 11.0, "FMA": 24.5, "ALU": 18.0, "issue": 37.25},
        **{
            metrics.PERCENT["tensor"][1]: 51.0,
            metrics.TENSOR_WAVEFRONTS: 1_100_000,
            f"{MATRIX}_a.sum": 500_000,
            f"{MATRIX}_b_scope_1cta.sum": 600_000,
            metrics.LSU_WAVEFRONTS: 300_000,
            metrics.TMA_BYTES[0]: 16_800_000,
            metrics.TMA_BYTES[1]: 8_400_000,
            metrics.DRAM_READ: 13_100_000,
            metrics.DRAM_WRITE: 9_900_000,
            metrics.DRAM: 23_000_000,
            "lts__t_bytes.sum": 41_000_000,
            "lts__t_sector_hit_rate.pct": 61.25,
            "sm__inst_executed_pipe_xu.sum": 1_179_648,
            UTCMMA_1: 16_384,
            UTCMMA_2: 4_096,
        },
    ),
]
H100 = [
    kernel(
        "kernel_cutlass_kernel_recurrence_0(tensor, tensor)",
        2048,
        1234.5,
        1755,
        132,
        {"HBM": 12.5, "L2": 18.75, "tensor": 0.0, "MUFU": 2.5, "FMA": 81.5, "ALU": 30.25, "issue": 77.5},
        **{
            metrics.LSU_WAVEFRONTS: 31_000_000,
            metrics.TMA_BYTES[0]: 0,
            metrics.DRAM_READ: 402_000_000,
            metrics.DRAM_WRITE: 198_000_000,
            metrics.DRAM: 600_000_000,
        },
    )
]
CASE = {
    "name": "suite/9",
    "case": 9,
    "backend": "chunked",
    "implementation": "cute_ssd",
    "repeat": 1,
    "compulsory_bytes": 22_151_200,
    "tcgen05": 28_672,
}


def _unit(name: str, first: float, base: bool) -> tuple[str, float]:
    """(unit of a column, factor to its base unit): scaled by the first kernel, unless ncu has --print-units base."""
    if ".pct" in name:
        return "%", 1.0
    if name == metrics.CLOCK:
        return ("hz", 1.0) if base else ("Ghz", 1e9)
    if name == metrics.TIME:
        return ("ns", 1.0) if base else ("us", 1e3)
    if "bytes" in name:
        return ("byte", 1.0) if base or first < 1e6 else ("Mbyte", 1e6)
    return "", 1.0


def raw_csv(kernels: list[Invented], cc: str, base: bool = False, missing: tuple[str, ...] = ()) -> str:
    """`ncu --import X --page raw --csv`; what is in `missing` is "n/a"."""
    head = ["ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream"]
    head += ["Block Size", "Grid Size", "Device", "CC"]
    names = sorted({name for k in kernels for name in k.counts} | set(missing))
    columns = {name: _unit(name, kernels[0].counts.get(name, 0), base) for name in names}
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow([*head, *names])
    writer.writerow([*[""] * len(head), *(unit for unit, _ in columns.values())])
    for number, k in enumerate(kernels):
        cells = [str(number), *PROGRAM, k.name, "1", "7", str(k.block), str(k.grid), "0", cc]
        for name, (unit, factor) in columns.items():
            value = k.counts.get(name)
            whole = factor == 1 and unit != "%"
            cells.append("n/a" if value is None else f"{value / factor:,.{0 if whole else 6}f}")
        writer.writerow(cells)
    return out.getvalue()


def ncu_rep(kernels: list[Invented], chip: int = 0x1A0) -> bytes:
    """A .ncu-rep: after its magic number blocks of a header and entries, each a length and a message in protobuf's wire
    format. NVIDIA's reader knows the units of a metric by the chip (0x1A0 is the GB100)."""
    identity = {f"device__attribute_{n}": chip for n in ("architecture", "chip", "implementation")}
    identity["device__attribute_sass_level"] = 8
    names = sorted({name for k in kernels for name in k.counts} | set(identity))
    process = _bytes(6, _int(1, 4242) + _bytes(2, b"127.0.0.1") + _bytes(3, b"python"))
    entries = b""
    for k in kernels:
        entry = b"".join(_int(field, 1) for field in (1, 2, 3, 4))
        entry += _bytes(5, k.name.encode()) + _bytes(6, k.name.encode()) + _bytes(7, b"") + _int(8, 3)
        for field, sizes in ((9, (0, 0, 0)), (10, k.grid), (11, k.block)):
            entry += _bytes(field, b"".join(_int(axis + 1, size) for axis, size in enumerate(sizes)))
        for name, count in k.counts.items():
            value = _varint(3 << 3 | 1) + struct.pack("<d", count)
            entry += _bytes(13, _int(1, names.index(name)) + _bytes(2, value))
        for name, number in identity.items():
            entry += _bytes(13, _int(1, names.index(name)) + _bytes(2, _int(5, number)))
        entries += _block(entry + _bytes(15, _int(1, 1)) + _int(16, 0))
    strings = _bytes(4, b"".join(_bytes(1, name.encode()) for name in names))
    header = _int(1, 0) + _int(2, len(kernels)) + strings + _int(5, len(entries)) + process
    return b"NVR\0" + _block(_int(1, 7)) + _block(header) + entries


def _varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + _varint(rest) if rest else bytes([low])


def _int(field: int, number: int) -> bytes:
    return _varint(field << 3) + _varint(number)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _block(message: bytes) -> bytes:
    return struct.pack("<I", len(message)) + message


def files() -> dict[str, bytes]:
    """Every fixture by its name."""
    whole, report = raw_csv(B200, "10.0"), ncu_rep(B200)
    noise = "suite/9: 1 x cute_ssd on cuda, recurrence\n==PROF== Disconnected from process 4242\n"
    details = '"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"\n'
    return {
        "b200.csv": whole.encode(),
        "b200.case.json": (json.dumps(CASE, indent=1) + "\n").encode(),
        "b200.ncu-rep": report,
        "h100.csv": (noise + raw_csv(H100, "9.0", base=True, missing=(metrics.TMA_BYTES[1],))).encode(),
        "damaged.csv": whole[: len(whole) - 300].encode(),
        "no_units.csv": "".join(whole.splitlines(True)[::2]).encode(),
        "no_kernel.csv": "".join(whole.splitlines(True)[:2]).encode(),
        "details.csv": details.encode(),
        "empty.csv": b"",
        "damaged.ncu-rep": report[: len(report) // 2],
        "empty.ncu-rep": b"",
    }


def main() -> None:
    FIXTURES.mkdir(parents=True, exist_ok=True)
    for name, content in files().items():
        (FIXTURES / name).write_bytes(content)


if __name__ == "__main__":
    main()
