"""Redundant instructions of NVIDIA's CuTe DSL examples (CUTLASS 4.8), for mutation_score.py.

A kernel would be right without each of them, one at a time. "Implied" means that the same order already follows from
other barriers. An entry is a kind of mutant, a regular expression for "function: line" of the Python code, the reason,
and, where a line makes several instructions, which of them, in the order of the PTX.
"""

TAIL = (
    "At a role's end it waits until its last slots are free again, and nothing is written to them any more. It keeps "
    "a CTA alive for arrivals from others of its cluster, and there is one. Tensor memory is freed behind a barrier."
)

# ---- mamba2_ssd.py: names are the example's, (k) is a chunk; a sequence has at least two ----

# The compiler gives every peek the line of the helper that makes it, so they are told apart by their order in the PTX.
CONSUMER_PEEK, PRODUCER_PEEK = "conditional_consumer_try_wait: ", "conditional_producer_try_acquire: "

DELTAS_EMPTY = (
    "Implied: the warp has just waited for x_empty of the same slot and lap. The epilogue releases x after it has read "
    "delta; the MMA warps do when they have used q and the scaled b, which were made from the delta."
)
D_EMPTY = (
    "Implied: before D of tile t + 2 the warp has loaded all x of tile t + 1, so it has seen x_empty of the last chunk "
    "of tile t, which the epilogue releases after its last read of D."
)
INTRA1_ACC_EMPTY = (
    "Implied: before INTRA_MMA1 (k + 2) its warp has waited for q (k), which the pre-intra warps wrote after they had "
    "loaded accumulator (k), the one that had the slot before."
)
INTER1_ACC_EMPTY = (
    "Implied: the MMA warp has waited for p (k + 1), which the pre-inter warps write after they have loaded "
    "accumulator (k); the first p of a tile likewise follows the last accumulator of the tile before."
)
INTER1_B_EMPTY = (
    "Implied: the pre-inter warps have waited for the accumulator of INTER_MMA1 (k), and then b (k) has been read."
)
INTER2_P_EMPTY = (
    "Implied: INTER_MMA2 (k), which reads p, is issued before INTER_MMA1 (k), whose accumulator has been waited for."
)
C_FULL = (
    "Implied for all but the first chunk: INTER_MMA2 (k + 1) waits for inter2_acc empty, that is for the epilogue of "
    "(k), which waited for INTRA_MMA2 (k), issued after INTRA_MMA1 (k + 1), whose warp had waited for c (k + 1)."
)
EPILOGUE_DELTAS = "Implied: the epilogue waits for INTRA_MMA2 (k), whose q was made from the same delta."
EPILOGUE_X = "Implied: the epilogue waits for INTRA_MMA2 (k), whose warp had waited for the same x."
FIRST_BARRIER = "Nobody uses an mbarrier before tmem.wait_for_alloc(), a barrier of all threads as well."
STORED = "The warp that stores has just waited for the same group."

MAMBA2_SSD = [
    ("mbarrier wait", "producer_tail", TAIL),
    ("mbarrier wait", "deltas_pipeline.producer_acquire", DELTAS_EMPTY),
    ("mbarrier peek", PRODUCER_PEEK, DELTAS_EMPTY, (1, 3)),
    ("mbarrier.init count -1", "make_and_init_deltas_pipeline", DELTAS_EMPTY, (2, 3)),
    ("mbarrier wait", "d_pipeline.producer_acquire", D_EMPTY),
    ("mbarrier.init count -1", "make_and_init_d_pipeline", D_EMPTY, (2, 3)),
    ("mbarrier wait", "intra1_acc_pipeline.producer_acquire", INTRA1_ACC_EMPTY),
    ("mbarrier peek", PRODUCER_PEEK, INTRA1_ACC_EMPTY, (8, 9, 10)),
    ("mbarrier wait", "inter1_acc_pipeline.producer_acquire", INTER1_ACC_EMPTY),
    ("mbarrier wait", "inter1_b_pipeline.producer_acquire", INTER1_B_EMPTY),
    ("mbarrier peek", PRODUCER_PEEK, INTER1_B_EMPTY, (12, 13)),
    ("mbarrier wait", "inter2_p_pipeline.producer_acquire", INTER2_P_EMPTY),
    ("mbarrier peek", CONSUMER_PEEK, C_FULL, (10,)),
    ("mbarrier wait", "kernel: deltas_pipeline.consumer_wait", EPILOGUE_DELTAS, (2,)),
    ("mbarrier peek", CONSUMER_PEEK, EPILOGUE_DELTAS, (20, 24)),
    ("mbarrier wait", r"x_pipeline\.consumer_wait\($", EPILOGUE_X),
    ("mbarrier peek", CONSUMER_PEEK, EPILOGUE_X, (23, 27)),
    ("bar.sync", "pipeline_init_wait", FIRST_BARRIER),
    ("fence.proxy.async", "cute.arch.fence_proxy", "Follows reads only, and another precedes the release.", (1,)),
    ("fence.proxy.async", "cute.arch.fence_proxy", "Nothing was written since the last one of the loop.", (4,)),
    ("bulk.wait_group", "tma_p_pipeline.producer_tail", STORED),
    ("bulk.wait_group +1", "tma_p_pipeline.producer_tail", STORED),
]

# ---- dense_gemm_persistent.py ----

DENSE_GEMM_PERSISTENT = [
    ("mbarrier wait", r"ab_producer\.tail|producer_tail", TAIL),
    ("bar.sync", r"epilogue_tma_store", "Directly behind the same barrier, that of the last subtile.", (2,)),
]

# ---- fmha.py with --is_persistent and --implicit-waits; (i) is a tile of k and v ----

FMHA = [
    ("mbarrier.init count +1", "_inplace_consumer", "Nobody uses this mbarrier: slots are never released.", (1,)),
    ("mbarrier.init count -1", "_inplace_consumer", "Nobody uses this mbarrier: slots are never released.", (1,)),
    ("mbarrier wait", "k_handle = load_kv_producer", "Implied by q0's, released after the slot's last use.", (0,)),
    ("mbarrier wait", "q1_handle = load_q_producer", "Implied by q0's: one commit directly follows the other."),
    ("mbarrier wait", "mma_qk: si_handle", "Implied by vec's: softmax writes vec when it has loaded s."),
    ("mbarrier wait", "vec[01]_handle = s[01]_corr_producer", "Implied by p (i), which softmax stores after vec (i)."),
    ("mbarrier peek", "si_corr_producer.try_acquire", "Implied by s (i): the MMA warp has acquired vec before."),
    ("mbarrier wait", "pi_handle = pi_mma_producer", "Implied for p0 by s1 (i), complete after PV0 (i - 1).", (0,)),
    ("tcgen05.wait::st", "softmax_step", "No tcgen05.st is pending: a wait for loads was meant.", (0, 4)),
    ("tcgen05.wait::st", "softmax_step", "There are two with no tcgen05.st between them.", (2, 3, 6, 7)),
]

# ---- kernels of this package ----

RING_EMPTY = (
    "Implied at this size, where the ring holds more than two items: C·states of the item whose slot is loaded was "
    "waited for with c's empty barrier, of this item or the one before."
)
CHUNK_SCAN = [("mbarrier wait", "wait_empty: ", RING_EMPTY, (0, 2))]

OTHER_FENCE = "Implied: before the first product comes another one, behind the wait for scaled x."
ALL_ARRIVE = (
    "bar.warp.sync",
    "kernel: cute.arch.sync_warp",
    "Each lane arrives at the barrier behind, also the elected one.",
)
CHUNK_STATE = [ALL_ARRIVE, ("tcgen05.fence::after_thread_sync", "__init__: @cute.jit", OTHER_FENCE, (0,))]
CHUNK_STATE_WIDE = [ALL_ARRIVE, ("tcgen05.fence::after_thread_sync", "__init__: @cute.jit", OTHER_FENCE, (0, 1))]

REDUNDANT = {
    "mamba2_ssd.py": MAMBA2_SSD,
    "dense_gemm_persistent.py": DENSE_GEMM_PERSISTENT,
    "fmha.py": FMHA,
    "chunk_scan": CHUNK_SCAN,
    "chunk_state": CHUNK_STATE,
    "chunk_state_wide": CHUNK_STATE_WIDE,
}
