"""The counters that are asked for, by architecture, and what they mean. `profiling.chip_metrics` checks the names."""

from . import ProfilingError

# Architecture -> the chip whose counters it has, as NVIDIA's tools name it.
CHIPS = {
    "sm_80": "GA100",
    "sm_86": "GA102",
    "sm_89": "AD102",
    "sm_90": "GH100",
    "sm_100": "GB100",
    "sm_103": "GB110",
    "sm_120": "GB202",
}
# No `--set`: the sets also collect what can hang kernels that wait on barriers for bulk copies.
SECTIONS = (
    "SpeedOfLight",
    "SpeedOfLight_RooflineChart",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "MemoryWorkloadAnalysis_Chart",
    "MemoryWorkloadAnalysis_Tables",
    "LaunchStats",
    "Occupancy",
    "WarpStateStats",
)
# Stalls by instruction, and so by role. Only for who asks for it, as it is the set that is reported to hang (`source`).
SOURCE_SECTION = "SourceCounters"
ELAPSED, ACTIVE = "avg.pct_of_peak_sustained_elapsed", "avg.pct_of_peak_sustained_active"

TIME = "gpu__time_duration.sum"
CYCLES, SM_CYCLES, CLOCK = "sm__cycles_elapsed.avg", "sm__cycles_elapsed.sum", "sm__cycles_elapsed.avg.per_second"
# Percent of peak, by resource. The first name is asked for; another may be in the sections, or in a report of other
# making, and the largest counts.
PERCENT = {
    "HBM": (f"dram__throughput.{ELAPSED}", f"gpu__dram_throughput.{ELAPSED}"),
    "L2": (f"lts__throughput.{ELAPSED}",),
    "tensor": (f"sm__pipe_tensor_cycles_active.{ELAPSED}", f"sm__pipe_tc_cycles_active.{ELAPSED}"),
    "MUFU": (f"sm__inst_executed_pipe_xu.{ELAPSED}",),
    "FMA": (f"sm__inst_executed_pipe_fma.{ELAPSED}", f"sm__pipe_fma_cycles_active.{ELAPSED}"),
    "ALU": (f"sm__inst_executed_pipe_alu.{ELAPSED}", f"sm__pipe_alu_cycles_active.{ELAPSED}"),
    "issue": (f"smsp__issue_active.{ELAPSED}", f"sm__issue_active.{ELAPSED}"),
}
# What goes through the 128 bytes a clock of an SM's shared memory: operands of tensor instructions, loads and stores,
# and bulk copies, which have no counter of their own there: their bytes, 128 to a wavefront.
TENSOR_WAVEFRONTS = "l1tex__data_pipe_tc_wavefronts_mem_shared.sum"
LSU_WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
TMA_BYTES = ("l1tex__m_xbar2l1tex_read_bytes_pipe_tma.sum", "l1tex__m_l1tex2xbar_write_bytes_pipe_tma.sum")
WAVEFRONT_BYTES = 128
# Bytes to and from device memory; sm_120 has only the sum.
DRAM_READ, DRAM_WRITE, DRAM = "dram__bytes_read.sum", "dram__bytes_write.sum", "dram__bytes.sum"
# tcgen05.mma of bf16, fp16, fp8 and tf32, by CTA group; mma and wgmma on older ones.
_UTCMMA = "sm__inst_executed_pipe_tensor_subpipe_hmma_op_utchmma_utcqmma_utcomma_scope"
TCGEN05 = (f"{_UTCMMA}_1cta.sum", f"{_UTCMMA}_2cta.sum")


def _pipes(*names: str) -> tuple[str, ...]:
    """Instructions of pipes: in percent of what they can execute while the SM is active, and their number."""
    return tuple(f"sm__inst_executed_pipe_{name}.{form}" for name in names for form in (ACTIVE, "sum"))


# Of a warp's latency between two issues: what it waits for. Percentages mislead where warps have roles.
STALLS = (
    *("barrier", "branch_resolving", "dispatch_stall", "drain", "lg_throttle", "long_scoreboard"),
    *("math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "not_selected", "selected"),
    *("short_scoreboard", "sleeping", "tex_throttle", "wait"),
)
_EVERYWHERE = (
    TIME,
    CYCLES,
    SM_CYCLES,
    CLOCK,
    *(names[0] for names in PERCENT.values()),
    f"sm__throughput.{ELAPSED}",
    f"gpu__compute_memory_throughput.{ELAPSED}",
    DRAM,
    "lts__t_bytes.sum",
    "lts__t_sector_hit_rate.pct",
    LSU_WAVEFRONTS,
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    *_pipes("xu", "alu", "fma", "lsu", "uniform"),
    "sm__inst_executed_pipe_tensor.sum",
    "sm__inst_executed.sum",
    f"sm__inst_issued.{ACTIVE}",
    f"smsp__issue_active.{ACTIVE}",
    f"sm__warps_active.{ACTIVE}",
    *(f"smsp__average_warp_latency_issue_stalled_{reason}.ratio" for reason in STALLS),
)
_SPLIT_DRAM = (DRAM_READ, DRAM_WRITE)
_FMA_HALVES = _pipes("fmaheavy", "fmalite")  # not on sm_80, whose FMA pipe is one
_TMA_SECTORS = "l1tex__m_xbar2l1tex_read_sectors_mem_global_op_tma_ld"
_TMA = (*TMA_BYTES, f"{_TMA_SECTORS}.sum", "sm__inst_executed_pipe_tma.sum")
_CLUSTERS = f"{_TMA_SECTORS}_dest_multicast.sum"  # not on sm_120
_BLACKWELL = (
    *_SPLIT_DRAM,
    *_FMA_HALVES,
    *_TMA,
    _CLUSTERS,
    PERCENT["tensor"][1],
    TENSOR_WAVEFRONTS,
    "l1tex__data_pipe_tc_wavefronts_mem_shared_op_utcmma_matrix_a.sum",
    "l1tex__data_pipe_tc_wavefronts_mem_shared_op_utcmma_matrix_b_scope_1cta.sum",
    "l1tex__data_pipe_tc_wavefronts_mem_shared_op_utcmma_matrix_b_scope_2cta.sum",
    f"sm__mem_tensor_cycles_active.{ELAPSED}",
    "sm__mem_tensor_reads_op_ldt.sum",
    "sm__mem_tensor_reads_op_utcmma_matrix_c.sum",
    "sm__inst_executed_pipe_tc.sum",
    "sm__inst_executed_pipe_tmem.sum",
    *TCGEN05,
)
_AMPERE = (*_SPLIT_DRAM, "sm__inst_executed_pipe_tensor_op_hmma.sum")
_HOPPER = (
    *_SPLIT_DRAM,
    *_FMA_HALVES,
    *_TMA,
    _CLUSTERS,
    "smsp__average_warp_latency_issue_stalled_gmma.ratio",
    "sm__inst_executed_pipe_tensor_op_hmma.sum",
    "sm__inst_executed_pipe_tensor_op_gmma.sum",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_gmma.sum",
)
_OWN = {
    "sm_80": _AMPERE,
    "sm_86": (*_AMPERE, *_FMA_HALVES),
    "sm_89": (*_AMPERE, *_FMA_HALVES),
    "sm_90": _HOPPER,
    "sm_100": _BLACKWELL,
    "sm_103": _BLACKWELL,
    "sm_120": (*_FMA_HALVES, *_TMA),
}


def family(arch: str) -> str:
    """The architecture without the suffix of its features: "sm_100" for "sm_100a"."""
    name = arch.rstrip("af")
    if name not in CHIPS:
        raise ProfilingError(f"arch is {arch!r}, expected one of {', '.join(CHIPS)}; pass --arch with one of them.")
    return name


def metrics(arch: str) -> tuple[str, ...]:
    """What Nsight Compute is asked for on this architecture."""
    return (*_EVERYWHERE, *_OWN[family(arch)])
