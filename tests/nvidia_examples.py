"""Runs NVIDIA's CuTe DSL examples, which nobody here wrote, on the emulator.

    python tests/nvidia_examples.py ROOT [--seeds 3] [WORD ...]

ROOT is `examples/python/CuTeDSL` of a checkout of NVIDIA's cutlass repository. Each example checks its own numbers;
here it must also run without a finding, under an eager, a late and a priority schedule. WORDs choose the examples whose
name contains one of them.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple


class Example(NamedTuple):
    name: str
    script: str  # below ROOT
    arguments: str = ""
    arch: str = "sm_100a"
    options: str = ""  # of `python -m cute_ssd emulate`
    expected: tuple[str, ...] = ()  # the kinds of the findings that the example really has, if not in every schedule


GEMM = "cute/blackwell/kernel/dense_gemm/dense_gemm.py"
PERSISTENT = "cute/blackwell/kernel/dense_gemm/dense_gemm_persistent.py"
PIPELINED = "cute/blackwell/kernel/dense_gemm/dense_gemm_software_pipeline.py"
PREFETCHED = "cute/blackwell/kernel/dense_gemm/dense_gemm_persistent_prefetch.py"
GROUPED = "cute/blackwell/kernel/grouped_gemm/grouped_gemm.py"
MAMBA2 = "cute/blackwell/kernel/attention/mamba2_ssd/mamba2_ssd.py"
FMHA = "cute/blackwell/kernel/attention/fmha/fmha.py"
FMHA_BWD = "cute/blackwell/kernel/attention/fmha/fmha_bwd.py"
RMSNORM = "cute/blackwell/kernel/rmsnorm/rmsnorm.py"
TMA = "cute/blackwell/tutorial/tutorial_tma/"
TUTORIAL = "cute/blackwell/tutorial/tutorial_gemm/fp16_gemm"
HOPPER_NORM = "cute/hopper/kernel/cta_norm/cta_norm.py"
AMPERE = "cute/ampere/kernel/"
FLASH = AMPERE + "attention/flash_attention_v2.py"
HSTU = AMPERE + "attention/hstu_attention.py"

IMPLICIT = "--implicit-waits"
"""For examples that use results of tcgen05.ld without tcgen05.wait::ld, relying on ptxas to wait."""

BF16 = "--ab_dtype BFloat16 --c_dtype BFloat16"
F16 = "--ab_dtype Float16 --c_dtype Float16"
FP8 = "--ab_dtype Float8E4M3FN --c_dtype Float32"
PAIR = "--mma_tiler_mn 256,128 --use_2cta_instrs --use_tma_store"
SMALL_FLASH = "--batch_size 1 --seqlen_q 128 --seqlen_k 128 --num_head 1"
ONCE = "--warmup_iterations 0 --iterations 1"


def blackwell(name: str, script: str, arguments: str, expected: tuple[str, ...] = ()) -> Example:
    return Example(name, script, arguments, options=IMPLICIT, expected=expected)


def ampere(name: str, script: str, arguments: str) -> Example:
    return Example(f"ampere {name}", script, arguments, "sm_80")


EXAMPLES = [
    Example("mamba2_ssd", MAMBA2, "--gbehcdln 1,1,2,1,4,64,128,128"),
    blackwell("dense_gemm tf32", GEMM, "--mnkl 256,256,96,1"),
    blackwell(
        "dense_gemm bf16 MN-major",
        GEMM,
        f"--mnkl 256,256,128,1 {BF16} --a_major m --b_major n --c_major m --use_tma_store",
    ),
    blackwell("dense_gemm f16 M=64 ragged", GEMM, f"--mnkl 192,200,136,2 {F16} --mma_tiler_mn 64,64 --use_tma_store"),
    blackwell("dense_gemm fp8", GEMM, f"--mnkl 128,128,256,1 {FP8}"),
    blackwell("dense_gemm multicast 2x2", GEMM, f"--mnkl 512,512,128,1 {BF16} --cluster_shape_mn 2,2 --use_tma_store"),
    blackwell("dense_gemm 2-CTA", GEMM, f"--mnkl 512,512,128,1 {BF16} --cluster_shape_mn 2,1 {PAIR}"),
    blackwell("dense_gemm_persistent", PERSISTENT, f"--mnkl 512,512,256,1 {BF16} --use_tma_store"),
    blackwell("dense_gemm_persistent 2-CTA", PERSISTENT, f"--mnkl 512,512,256,1 {BF16} --cluster_shape_mn 2,1 {PAIR}"),
    blackwell(
        "dense_gemm_persistent 2-CTA 4x2",
        PERSISTENT,
        f"--mnkl 1024,512,128,1 --ab_dtype BFloat16 --c_dtype Float32 --cluster_shape_mn 4,2 {PAIR}",
    ),
    blackwell("dense_gemm_persistent_prefetch", PREFETCHED, "--mnkl 256,256,128,1"),
    blackwell("grouped_gemm", GROUPED, ""),
    blackwell("dense_gemm_software_pipeline", PIPELINED, f"--mnkl 256,256,256,1 {F16}"),
    blackwell("fmha", FMHA, "--q_shape 1,256,1,128 --k_shape 1,256,1,128"),
    blackwell("fmha causal d=64", FMHA, "--q_shape 1,256,1,64 --k_shape 1,256,1,64 --is_causal"),
    # The compute warps free the tensor memory as soon as dK is done, while the last dQ is still multiplied and read.
    blackwell(
        "fmha_bwd",
        FMHA_BWD,
        "--s_q 128 --s_k 128 --d 128 --h_q 1 --h_k 1 --b 1",
        expected=("tensor memory", "race", "tensor memory leak"),
    ),
    *(blackwell(f"fp16_gemm_{number}", f"{TUTORIAL}_{number}.py", "--mnk 512,512,128") for number in range(4)),
    Example("rmsnorm", RMSNORM, "--M 16 --N 1024"),
    Example("rmsnorm cluster", RMSNORM, "--M 4 --N 65536"),
    # They end without waiting for the store to have read shared memory, which the exit of the CTA takes away.
    Example("tma_v0", TMA + "tma_v0.py", "--M 256 --N 256", expected=("unfinished copy",)),
    Example("tma_v1", TMA + "tma_v1.py", "--M 256 --N 256", expected=("unfinished copy",)),
    Example("tma_v2", TMA + "tma_v2.py", "--M 256 --N 256"),
    Example("programmatic_dependent_launch", "dsl_tutorials/programmatic_dependent_launch.py", "--use_pdl"),
    Example("hopper cta_norm", HOPPER_NORM, f"--M 16 --N 1024 {ONCE}", "sm_90a"),
    ampere("memcpy_simt_universal_copy", "cute_ext/ampere/memcpy_simt_universal_copy.py", ""),
    ampere("elementwise_apply", AMPERE + "elementwise/elementwise_apply.py", "--M 64 --N 256"),
    ampere("elementwise_add", AMPERE + "elementwise/elementwise_add.py", "--M 130 --N 136"),
    ampere("sgemm", AMPERE + "dense_gemm/sgemm.py", "--mnk 256,128,64"),
    ampere("tensorop_gemm", AMPERE + "dense_gemm/tensorop_gemm.py", f"--mnkl 256,256,64,1 {ONCE}"),
    ampere("flash_attention_v2", FLASH, f"{SMALL_FLASH} {ONCE}"),
    ampere("flash_attention_v2 causal", FLASH, f"{SMALL_FLASH} {ONCE} --is_causal"),
    ampere("hstu_attention", HSTU, "--batch_size 1 --seqlen_q 128 --seqlen_kv 128 --num_head 1"),
]

# Out of scope in the folder `cute`:
#   block-scaled formats: blackwell/kernel/*blockscaled*, blackwell_geforce/kernel/blockscaled_gemm, nvfp4_gemm_*,
#     torch_scaled_grouped_mm, tvm_ffi/fp4_x2_tensor
#   cluster launch control: fp16_gemm_3_1, fp16_gemm_4, fp16_gemm_5, fp16_gemm_6, dense_gemm_persistent_dynamic
#   several devices: blackwell/kernel/distributed
#   wgmma: hopper/kernel but for cta_norm

PRIMITIVES = "experimental/primitives"
"""A folder of small scripts, each about one instruction; all are run but those of LEFT_OUT."""

LEFT_OUT = {
    "2cta_mma_blockscale_m128": "block-scaled fp4 products",
    "cp_narrow_a_to_tmem_mma": "tcgen05.cp that unpacks fp4 or fp6",
    "tmem_ld_to_stmatrix_transpose": "stmatrix of 8-bit elements (.m16n8)",
}
"""Scripts of that folder, and what they need that the emulator does not have."""

FINDINGS = {
    # By PTX each of the four warps may name its own 32 lanes only; they all name lane 0.
    "1cta_mma_a_from_tmem": ("tensor memory",),
    # All four warps write the same seed values; wait::st, which does not cover tcgen05.cp, is all that waits for it;
    # the cluster's barrier is arrived at relaxed, which publishes nothing to the CTA that adds up.
    "cluster_tmem_reduce": ("race", "in flight at exit"),
    # Only one lane issues and releases. The others, which nothing holds to its pace, may wait for a phase long over.
    "cp_async_bulk": ("deadlock",),
    # An elected lane gives the stage back without a warp-level barrier behind the other lanes' reads, and without a
    # fence behind its own, which the next copy overwrites.
    "pipeline_software_fill": ("race",),
    "tma_pipeline_count2": ("race", "missing proxy fence"),
    "tma_pipeline_warpspec": ("race", "missing proxy fence"),
    "warp_named_barrier": ("race",),
    # The next load is issued without a barrier behind the reads of the other warps.
    "tma_pipeline_single_warp": ("race", "missing proxy fence"),
    # cp.async writes through the generic proxy, and the product reads through the async one.
    "slicek_m32n8k128": ("missing proxy fence",),
    # A pair's tensor memory is freed behind the reads of one CTA, without waiting for those of its peer, as
    # dense_gemm_persistent does.
    "2cta_mma_basic": ("race",),
    "2cta_mma_tma_store": ("race",),
    "clusterMxN_2cta_mma": ("race",),
    "mcast_clusterMxN_2cta_mma": ("race",),
    # A CTA reads its neighbour's memory last of all, and nothing keeps the neighbour from exiting before.
    "mapa": ("exited CTA",),
    # Only the leader waits for the loads; the others learn of them by a relaxed arrival.
    "tma_multicast": ("race",),
    # Kernel 4 overwrites the row's maximum with sums while other lanes may still read it.
    "06_softmax": ("race",),
    # The address of tensor memory is read without a barrier behind tcgen05.alloc, and phases while a lane writes them.
    "gemm_M128_N128_Kany_TN_warpspec_multistage": ("race", "uninitialised", "tensor memory"),
}
"""What the other scripts really do wrong."""


def examples(root: Path) -> list[Example]:
    scripts = sorted((root / PRIMITIVES).rglob("*.py"))
    return EXAMPLES + [
        Example(
            f"primitive {path.stem}",
            str(path.relative_to(root)),
            options=IMPLICIT,
            expected=FINDINGS.get(path.stem, ()),
        )
        for path in scripts
        if path.stem != "__init__" and path.stem not in LEFT_OUT
    ]


def run(example: Example, root: Path, seed: int, sanitize: bool = True) -> tuple[bool, float, str]:
    """(passed, seconds, last line of its output)."""
    command = [sys.executable, "-m", "cute_ssd", "emulate", "--arch", example.arch, "--seed", str(seed)]
    command += example.options.split() + ([] if sanitize else ["--no-sanitize"])
    begin = time.perf_counter()
    done = subprocess.run(
        [*command, str(root / example.script), *example.arguments.split()],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (Path(__file__).parents[1], root, root / "cute")))},
        timeout=900,
    )
    lines = (done.stdout + done.stderr).strip().splitlines()
    report = f"\n{done.stderr}".partition("\nemulated ")[2]
    found = set(re.findall(r"^([a-z_]+(?: [a-zA-Z]+)*): (?!grid \d)", report, re.M))
    passed = done.returncode == (1 if found else 0) and found <= set(example.expected)
    return passed, time.perf_counter() - begin, lines[-1] if lines else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--no-sanitize", dest="sanitize", action="store_false")
    arguments = parser.parse_intermixed_args()
    words = arguments.words or [""]
    failed = 0
    for example in examples(arguments.root):
        if not any(word in example.name for word in words):
            continue
        for seed in range(arguments.seeds):
            passed, seconds, last = run(example, arguments.root, seed, arguments.sanitize)
            failed += not passed
            note = f"as expected: {', '.join(example.expected)}" if example.expected else ""
            outcome = "pass" if passed else "FAIL"
            print(
                f"{example.name:<36} seed {seed}  {outcome}  {seconds:6.1f} s  {note if passed else last}", flush=True
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
