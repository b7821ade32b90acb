"""Which of the counters that profiling.metrics asks for each chip has, by NVIDIA's own library; needs no GPU.

    python -m profiling.chip_metrics            exit code 1 where one is unknown
    python -m profiling.chip_metrics GB100      every base name that this chip has

The library comes with the optional package ncu-report, or with nvidia-cuda-cupti.
"""

import ctypes
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from . import ProfilingError
from .metrics import CHIPS, metrics

LIBRARY = "libnvperf_host.so"


# The parameters of every function of nvperf_host.h begin with their size and a private pointer.
HEAD: tuple[tuple[str, Any], ...] = (("structSize", ctypes.c_size_t), ("pPriv", ctypes.c_void_p))


def _structure(*fields: tuple[str, Any]) -> Any:
    every = [*HEAD, *fields]
    made: Any = type("Params", (ctypes.Structure,), {"_fields_": every})
    last = getattr(made, every[-1][0])
    return made(structSize=last.offset + last.size)  # without padding at the end


def library() -> Path | None:
    """Where an installed package has the library."""
    for module, folder in (("ncu_report", "."), ("nvidia", "cu13/lib"), ("nvidia", "cuda_cupti/lib")):
        spec = find_spec(module)
        for location in (spec.submodule_search_locations or ()) if spec else ():
            if (path := Path(location) / folder / LIBRARY).is_file():
                return path
    return None


class Chips:
    """The counters of NVIDIA's chips."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._call("NVPW_InitializeHost", _structure())

    def _call(self, function: str, params: Any) -> Any:
        status = getattr(self._library, function)(ctypes.byref(params))
        if status:
            raise ProfilingError(f"{function} gave status {status}, expected 0; install the newest ncu-report.")
        return params

    def names(self, chip: str) -> set[str]:
        """The base names of every counter, ratio and throughput of a chip, without roll-up and unit."""
        text, size, pointer = ctypes.c_char_p(chip.encode()), ctypes.c_size_t, ctypes.c_void_p
        needed = _structure(("pChipName", ctypes.c_char_p), ("image", pointer), ("scratchBufferSize", size))
        needed.pChipName = text
        room = self._call("NVPW_CUDA_MetricsEvaluator_CalculateScratchBufferSize", needed).scratchBufferSize
        scratch = ctypes.create_string_buffer(room)
        made = _structure(
            ("pScratchBuffer", pointer),
            ("scratchBufferSize", size),
            ("pChipName", ctypes.c_char_p),
            ("pCounterAvailabilityImage", pointer),
            ("pCounterDataImage", pointer),
            ("counterDataImageSize", size),
            ("pMetricsEvaluator", pointer),
        )
        made.pScratchBuffer, made.scratchBufferSize, made.pChipName = ctypes.addressof(scratch), room, text
        evaluator = self._call("NVPW_CUDA_MetricsEvaluator_Initialize", made).pMetricsEvaluator
        found = set()
        for kind in range(3):  # counters, ratios, throughputs
            asked = _structure(
                ("pMetricsEvaluator", pointer),
                ("metricType", ctypes.c_uint8),
                ("pMetricNames", pointer),
                ("pMetricNameBeginIndices", ctypes.POINTER(size)),
                ("numMetrics", size),
            )
            asked.pMetricsEvaluator, asked.metricType = evaluator, kind
            self._call("NVPW_MetricsEvaluator_GetMetricNames", asked)
            for index in range(asked.numMetrics):
                found.add(ctypes.string_at(asked.pMetricNames + asked.pMetricNameBeginIndices[index]).decode())
        return found


def unknown(arch: str, names: set[str]) -> list[str]:
    """The metrics of an architecture whose base name its chip does not have."""
    return [metric for metric in metrics(arch) if metric.split(".")[0] not in names]


def main(argv: list[str] | None = None) -> int:
    chips = sys.argv[1:] if argv is None else argv
    try:
        path = library()
        if path is None:
            raise ProfilingError(f"No installed package has {LIBRARY}, expected ncu-report; pip install ncu-report.")
        read = Chips(path)
        for chip in chips:
            print("\n".join(sorted(read.names(chip))))
        missing = {} if chips else {arch: unknown(arch, read.names(chip)) for arch, chip in CHIPS.items()}
    except ProfilingError as error:
        print(error, file=sys.stderr)
        return 2
    for arch, names in missing.items():
        asked = len(metrics(arch))
        print(f"{arch:<7} {CHIPS[arch]:<6} {asked - len(names)} of {asked} metrics", *names)
    return 1 if any(missing.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
