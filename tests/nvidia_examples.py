"""Runs NVIDIA's CuTe DSL examples, which nobody here wrote, on the emulator: `python tests/nvidia_examples.py ROOT [--seeds 3] [WORD ...]`.

ROOT is `examples/python/CuTeDSL` of a checkout of NVIDIA's cutlass repository. Each example checks its own numbers; here it must also
run without a finding, under an eager, a late and a priority schedule. WORDs choose the examples whose name contains one of them.
"""

from __future__ import annotations

import argparse
import os
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
    expected: str = ""  # the kind of the finding that the example really has


GEMM = "cute/blackwell/kernel/dense_gemm/"
ATTENTION = "cute/blackwell/kernel/attention/"
IMPLICIT = "--implicit-waits"  # the example uses tcgen05.ld results without tcgen05.wait::ld
BF16 = "--ab_dtype BFloat16 --c_dtype BFloat16"
F16 = "--ab_dtype Float16 --c_dtype Float16"
PAIR = "--mma_tiler_mn 256,128 --cluster_shape_mn 2,1 --use_2cta_instrs"
FLASH = "--batch_size 1 --seqlen_q 128 --seqlen_k 128 --num_head 1 --warmup_iterations 0 --iterations 1"

EXAMPLES = [
    Example("mamba2_ssd", ATTENTION + "mamba2_ssd/mamba2_ssd.py", "--gbehcdln 1,1,2,1,4,64,128,128"),
    Example("dense_gemm tf32", GEMM + "dense_gemm.py", "--mnkl 256,256,96,1", options=IMPLICIT),
    Example("dense_gemm bf16 MN-major", GEMM + "dense_gemm.py",
            f"--mnkl 256,256,128,1 {BF16} --a_major m --b_major n --c_major m --use_tma_store", options=IMPLICIT),
    Example("dense_gemm f16 M=64 ragged", GEMM + "dense_gemm.py",
            f"--mnkl 192,200,136,2 {F16} --mma_tiler_mn 64,64 --use_tma_store", options=IMPLICIT),
    Example("dense_gemm fp8", GEMM + "dense_gemm.py", "--mnkl 128,128,256,1 --ab_dtype Float8E4M3FN --c_dtype Float32", options=IMPLICIT),
    Example("dense_gemm multicast 2x2", GEMM + "dense_gemm.py",
            f"--mnkl 512,512,128,1 {BF16} --cluster_shape_mn 2,2 --use_tma_store", options=IMPLICIT),
    Example("dense_gemm 2-CTA", GEMM + "dense_gemm.py", f"--mnkl 512,512,128,1 {BF16} {PAIR} --use_tma_store", options=IMPLICIT),
    Example("dense_gemm_persistent", GEMM + "dense_gemm_persistent.py", f"--mnkl 512,512,256,1 {BF16} --use_tma_store", options=IMPLICIT),
    Example("dense_gemm_persistent 2-CTA", GEMM + "dense_gemm_persistent.py",
            f"--mnkl 512,512,256,1 {BF16} {PAIR} --use_tma_store", options=IMPLICIT),
    Example("dense_gemm_persistent 2-CTA 4x2", GEMM + "dense_gemm_persistent.py",
            "--mnkl 1024,512,128,1 --ab_dtype BFloat16 --c_dtype Float32 --mma_tiler_mn 256,128 --cluster_shape_mn 4,2 "
            "--use_2cta_instrs --use_tma_store", options=IMPLICIT),
    Example("dense_gemm_software_pipeline", GEMM + "dense_gemm_software_pipeline.py", f"--mnkl 256,256,256,1 {F16}", options=IMPLICIT),
    Example("fmha", ATTENTION + "fmha/fmha.py", "--q_shape 1,256,1,128 --k_shape 1,256,1,128", options=IMPLICIT),
    Example("fmha causal d=64", ATTENTION + "fmha/fmha.py", "--q_shape 1,256,1,64 --k_shape 1,256,1,64 --is_causal", options=IMPLICIT),
    Example("fmha_bwd", ATTENTION + "fmha/fmha_bwd.py", "--s_q 128 --s_k 128 --d 128 --h_q 1 --h_k 1 --b 1", options=IMPLICIT),
    Example("rmsnorm", "cute/blackwell/kernel/rmsnorm/rmsnorm.py", "--M 16 --N 1024"),
    Example("rmsnorm cluster", "cute/blackwell/kernel/rmsnorm/rmsnorm.py", "--M 4 --N 65536"),
    Example("tma_v0", "cute/blackwell/tutorial/tutorial_tma/tma_v0.py", "--M 256 --N 256", expected="unfinished copy"),
    Example("tma_v1", "cute/blackwell/tutorial/tutorial_tma/tma_v1.py", "--M 256 --N 256", expected="unfinished copy"),
    Example("tma_v2", "cute/blackwell/tutorial/tutorial_tma/tma_v2.py", "--M 256 --N 256"),
    Example("ampere elementwise_add", "cute/ampere/kernel/elementwise/elementwise_add.py", "--M 130 --N 136", "sm_80"),
    Example("ampere sgemm", "cute/ampere/kernel/dense_gemm/sgemm.py", "--mnk 256,128,64", "sm_80"),
    Example("ampere tensorop_gemm", "cute/ampere/kernel/dense_gemm/tensorop_gemm.py",
            "--mnkl 256,256,64,1 --warmup_iterations 0 --iterations 1", "sm_80"),
    Example("ampere flash_attention_v2", "cute/ampere/kernel/attention/flash_attention_v2.py", FLASH, "sm_80"),
    Example("ampere flash_attention_v2 causal", "cute/ampere/kernel/attention/flash_attention_v2.py",
            f"{FLASH} --is_causal", "sm_80"),
]  # fmt: skip
PRIMITIVES = "experimental/primitives"
"""A folder of small scripts, each the test of one instruction; all of them are run."""


def examples(root: Path) -> list[Example]:
    scripts = sorted((root / PRIMITIVES).rglob("*.py"))
    return EXAMPLES + [
        Example(f"primitive {path.stem}", str(path.relative_to(root))) for path in scripts if path.stem != "__init__"
    ]


def run(example: Example, root: Path, seed: int, sanitize: bool = True) -> tuple[bool, float, str]:
    """(passed, seconds, last line of its output)."""
    command = [sys.executable, "-m", "cute_ssd", "emulate", "--arch", example.arch, "--seed", str(seed)]
    command += example.options.split() + ([] if sanitize else ["--no-sanitize"])
    script = root / example.script
    begin = time.perf_counter()
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (Path(__file__).parents[1], root, root / "cute")))
    }
    done = subprocess.run(
        [*command, str(script), *example.arguments.split()],
        capture_output=True,
        text=True,
        env=environment,
        timeout=900,
    )
    lines = (done.stdout + done.stderr).strip().splitlines()
    last = lines[-1] if lines else ""
    passed = last.startswith(example.expected) if example.expected and sanitize else done.returncode == 0
    return passed, time.perf_counter() - begin, last


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--no-sanitize", dest="sanitize", action="store_false")
    arguments = parser.parse_args()
    chosen = [
        e for e in examples(arguments.root) if not arguments.words or any(word in e.name for word in arguments.words)
    ]
    failed = 0
    for example in chosen:
        for seed in range(arguments.seeds):
            passed, seconds, last = run(example, arguments.root, seed, arguments.sanitize)
            failed += not passed
            print(
                f"{example.name:<36} seed {seed}  {'pass' if passed else 'FAIL'}  {seconds:6.1f} s  {'' if passed else last[:160]}",
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
