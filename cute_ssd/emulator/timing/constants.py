"""The numbers of the timing model, each with its unit and where it comes from. None is fitted to a kernel of ours.

Clocks are those of the SM unless the unit says otherwise. A source is a published measurement, a document of NVIDIA's,
or says that it is an estimate; `calibration.py` compares what follows from them with measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

MEASURED_GHZ = 1.965
"""The clock at which the tables in b200/ were measured."""

CLOCKS = {"locked": 1.5, "boost": 1.965}
"""GHz: the clock that SOL-ExecBench locks, and the highest of a B200."""

_UMMA = "SemiAnalysisAI/microbench-blackwell, umma_throughput and umma_latency (b200/)"
_TMA = "SemiAnalysisAI/microbench-blackwell, throughput_tma2d (b200/)"
_TMA_LATENCY = "SemiAnalysisAI/microbench-blackwell, latency_tma2d (b200/)"
_GEMM = "SemiAnalysisAI/microbench-blackwell, cutlass_gemm_mainloop (b200/): "
_AUDIT = "ademeure/QuickRunCUDA, audits of a B300, whose SM core is the same"
_GUIDE = "CUDA programming guide, arithmetic throughput of compute capability 10.0"
_FA4 = "FlashAttention-4 paper"


@dataclass(frozen=True)
class Constant:
    """One number of the model."""

    name: str
    value: float
    unit: str
    source: str


_TABLE = (
    # Issue and pipes of a sub-partition; the rates are per warp instruction.
    Constant("issue_interval", 1, "clocks", "one instruction per clock and sub-partition; " + _AUDIT),
    Constant("fma_interval", 1, "clocks", "128 lanes per clock and SM; " + _GUIDE),
    Constant("fma_x2_interval", 2, "clocks", "f32x2 does not raise the rate; " + _AUDIT),
    Constant("alu_interval", 2, "clocks", "64 lanes per clock and SM; " + _AUDIT),
    Constant("multiply_interval", 2, "clocks", "IMAD: 64 lanes per clock and SM; " + _GUIDE),
    Constant("xu_interval", 8, "clocks", "16 lanes per clock and SM; " + _FA4),
    Constant("convert_interval", 2, "clocks", "F2FP: 64 lanes per clock and SM; " + _AUDIT),
    Constant("shuffle_interval", 4, "clocks", "32 lanes per clock and SM; " + _GUIDE),
    Constant("lsu_interval", 2, "clocks", "estimate: the shared-memory port binds before"),
    Constant("warp_mma_interval", 8.5, "clocks", "m16n8k16 of 16-bit elements; one public kernel log"),
    Constant("warp_mma_latency", 23, "clocks", "dependent m16n8k16; one public kernel log"),
    Constant("alu_latency", 4, "clocks", "dependent ALU and FMA instructions; " + _AUDIT),
    Constant("xu_latency", 18, "clocks", "estimate from published microbenchmarks of Volta to Hopper"),
    Constant("shuffle_latency", 24, "clocks", "estimate from published microbenchmarks of Volta to Hopper"),
    Constant("branch_latency", 8, "clocks", "estimate: a taken branch refills the instruction buffer"),
    Constant("order_latency", 20, "clocks", "estimate: a fence of the CTA"),
    Constant("device_fence_latency", 500, "clocks", "estimate: a fence of the device goes to L2 and back"),
    Constant("scheduling_window", 48, "instructions", "estimate of how far ptxas moves independent instructions"),
    # Shared memory and L1.
    Constant("shared_port_bytes", 128, "bytes per clock and SM", _UMMA + ": SS with M = 128, N = 64 takes 48.5 clocks"),
    Constant("shared_latency", 29, "clocks", "estimate from published microbenchmarks of Volta to Hopper"),
    Constant("l1_latency", 39, "clocks", "estimate from published microbenchmarks of Hopper"),
    Constant("l1_bytes", 64, "bytes per clock and SM", "estimate: the width of the path from L2"),
    # L2 and HBM.
    Constant("l2_latency", 300, "clocks", "hit in the near partition, 300 to 310; " + _AUDIT),
    Constant("l2_bytes", 15.0, "TB/s", "13.3 to 17 measured on the wire; " + _AUDIT),
    Constant("l2_bytes_per_sm", 80.7, "bytes per clock and SM", _GEMM + "128 x 64 x 64 and 128 x 128 x 64 tiles"),
    Constant(
        "l2_capacity", 63, "MiB", _GEMM + "67 MB of operands run as from HBM, 50 MB do not; one of two partitions"
    ),
    Constant("hbm_bytes", 7.26, "TB/s", _TMA + ", 131072 bytes in flight per SM"),
    Constant("hbm_latency", 85, "ns", _TMA + ": 900 clocks for the smallest box, less tma_latency and hand-off"),
    Constant("hbm_latency_loaded", 230, "ns", _TMA + ": fit, times the square root of the load"),
    Constant(
        "hbm_cold_bytes", 131072, "bytes", _TMA_LATENCY + ": at first all SMs ask at once, and each gets its share"
    ),
    Constant("hbm_cold_rate", 5.0, "TB/s", _TMA_LATENCY + ": fit of the boxes of 64 and 128 KiB"),
    Constant("store_latency", 500, "clocks", "estimate: as a load that hits L2 far away"),
    Constant("atomic_latency", 600, "clocks", "estimate: L2, twice the near latency"),
    # TMA.
    Constant("tma_latency", 640, "clocks", _GEMM + "64 x 16 x 16 tiles with 2 stages"),
    Constant("tma_interval", 86, "clocks", _GEMM + "64 x 16 tiles, K = 128 and 256: 171 clocks for two copies"),
    Constant("tma_request", 1.56, "clocks", _GEMM + "1.52 to 1.59 clocks per row of 128 bytes or less"),
    Constant("tma_first", 410, "ns", _TMA_LATENCY + ", 4096 bytes: median, less the same in a steady state"),
    Constant("tma_store_latency", 500, "clocks", "estimate: as a load that hits L2 far away"),
    Constant("tma_write_bytes", 200, "bytes per clock", _GEMM + "what the tensor core loses to writes of operands"),
    # Tensor core and tensor memory.
    Constant("mma_overhead", 0.53, "clocks", _UMMA),
    Constant("mma_pair_overhead", 3, "clocks", _UMMA + ": M = 256, N = 64 to 96"),
    Constant("mma_smallest", 16, "clocks", "estimate: no shape below N = 64 was measured"),
    Constant("mma_latency_tmem", 84, "clocks", _UMMA + ": TS, issue to end of the wait, less rate and wake_latency"),
    Constant("mma_latency_shared", 100, "clocks", _UMMA + ": SS, likewise"),
    Constant("mma_latency_fetch", 16, "clocks", _UMMA + ": SS with M = 128, N = 64 to 128"),
    Constant("mma_latency_pair", 120, "clocks", _UMMA + ": two CTAs"),
    Constant("tmem_load", 2.25, "clocks per register", "57 bytes per clock and warp; " + _AUDIT),
    Constant("tmem_store", 1.2, "clocks per register", "97 to 131 TB/s on the chip; " + _AUDIT),
    Constant("tmem_latency", 25, "clocks", "estimate"),
    Constant("tmem_copy_bytes", 128, "bytes per clock", "estimate: the shared-memory port"),
    Constant("tmem_alloc_latency", 253, "clocks", "alone; " + _AUDIT),
    # Hand-off.
    Constant("arrive_latency", 20, "clocks", "estimate"),
    Constant("wake_latency", 20, "clocks", "estimate: from the end of a phase to the next instruction"),
    Constant("barrier_latency", 31, "clocks", "named barrier of 128 threads; " + _AUDIT),
    Constant("cluster_latency", 390, "clocks", "barrier.cluster; " + _AUDIT),
    Constant("remote_latency", 200, "clocks", "estimate: distributed shared memory"),
    # The grid.
    Constant("multiprocessors", 148, "SMs", "NVIDIA B200"),
    Constant("cta_launch", 300, "clocks", "estimate: from the work distributor to the first instruction"),
    Constant("exit_latency", 100, "clocks", "estimate: from the last warp's exit to the next CTA"),
    Constant("launch_first", 0.9, "us", "estimate: of 1.2 to 2 us that CUPTI shows for an empty kernel"),
    Constant("launch_last", 0.3, "us", "estimate: from the last write to the end that CUPTI shows"),
    Constant("launch_gap", 1.0, "us", "back-to-back kernels of a stream; mixed public reports"),
    Constant("launch_gap_dependent", 0.3, "us", "estimate: programmatic dependent launch, end to griddepcontrol.wait"),
)

CONSTANTS: dict[str, Constant] = {constant.name: constant for constant in _TABLE}
"""All constants by name."""


@dataclass(frozen=True)
class Model:
    """A set of values for the constants, at a clock of the SM."""

    clock_ghz: float = CLOCKS["boost"]
    changed: tuple[tuple[str, float], ...] = ()

    def __getitem__(self, name: str) -> float:
        return dict(self.changed).get(name, CONSTANTS[name].value)

    def with_values(self, **values: float) -> Model:
        """The model with other values for some constants."""
        unknown = next((name for name in values if name not in CONSTANTS), None)
        if unknown is not None:
            from ...errors import ShapeError

            raise ShapeError(f"the model has no constant {unknown!r}; `python -m cute_ssd model constants` lists them.")
        return Model(self.clock_ghz, tuple({**dict(self.changed), **values}.items()))

    def clocks(self, name: str) -> float:
        """A constant in clocks of the SM, or in bytes per clock of the SM where it is a bandwidth."""
        value, unit = self[name], CONSTANTS[name].unit
        if unit == "ns":
            return value * self.clock_ghz
        if unit == "us":
            return value * 1e3 * self.clock_ghz
        if unit == "TB/s":
            return value * 1e3 / self.clock_ghz
        return value
