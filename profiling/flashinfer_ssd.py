"""FlashInfer's SSD kernel on its own, at the only sizes it compiles for: headdim 64, dstate 128, chunks of 128 tokens.

    python profiling/flashinfer_ssd.py flashinfer/flashinfer/mamba --chunks 3 --heads 2                         on a GPU
    python -m cute_ssd emulate profiling/flashinfer_ssd.py flashinfer/flashinfer/mamba --chunks 3 --heads 2     without

The argument is the directory of `ssd_kernel.py` in a checkout of FlashInfer, whose package this does not import: that
needs CUDA. The running sums of dt A, a kernel of their own there, come from torch here.
"""

import argparse
import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from torch import Tensor

from cute_ssd import reference

CHUNK, HEADDIM, DSTATE = 128, 64, 128
PACKAGE = "flashinfer_mamba"  # a name for the directory, so that its modules find each other


def compile_kernel(source: Path) -> Callable[..., None]:
    """With D for each head, without z, initial states and packed sequences."""
    package = types.ModuleType(PACKAGE)
    package.__path__ = [str(source)]
    sys.modules[PACKAGE] = package
    bf16, fp32, i32 = cutlass.BFloat16, cutlass.Float32, cutlass.Int32
    kernel = importlib.import_module(f"{PACKAGE}.ssd_kernel").SSDKernel(
        CHUNK, HEADDIM, DSTATE, True, False, False, io_dtype=bf16, state_dtype=bf16,
        seq_idx_dtype=i32, cumsum_delta_dtype=fp32, acc_dtype=fp32,
    )  # fmt: skip
    chunks, heads, batch, groups = (cute.sym_int() for _ in range(4))

    def fake(dtype: Any, shape: tuple[Any, ...], order: tuple[int, ...]) -> Any:
        return cute.runtime.make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    x = fake(bf16, (HEADDIM, CHUNK, chunks, heads, batch), (0, 2, 3, 1, 4))
    B, C = (fake(bf16, (CHUNK, DSTATE, chunks, groups, batch), (2, 0, 3, 1, 4)) for _ in range(2))
    y = fake(bf16, (CHUNK, HEADDIM, chunks, heads, batch), (0, 2, 1, 3, 4))
    dA_cumsum, dt = (fake(dtype, (CHUNK, chunks, heads, batch), (0, 1, 2, 3)) for dtype in (fp32, bf16))
    final = fake(bf16, (DSTATE, HEADDIM, heads, batch), (0, 1, 2, 3))
    D = fake(bf16, (1, heads), (0, 1))
    sms = cutlass.utils.HardwareInfo().get_max_active_clusters(1)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    compiled: Callable[..., None] = cute.compile(
        kernel, x, dA_cumsum, dt, B, C, y, None, final, D, None, None, None, None, None, i32(0), i32(0), sms, stream,
        options="--enable-tvm-ffi",
    )  # fmt: skip
    return compiled


def inputs(chunks: int, heads: int, device: str) -> dict[str, Tensor]:
    """One row of a batch, one group; names and order as in `cute_ssd.mamba_chunk_scan_combined`."""
    g = torch.Generator().manual_seed(0)
    tokens = chunks * CHUNK

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).bfloat16().to(device)

    return {
        "x": normal(1, tokens, heads, HEADDIM),
        "dt": (0.1 * torch.rand(1, tokens, heads, generator=g)).bfloat16().to(device),
        "A": -torch.rand(heads, generator=g).to(device),
        "B": normal(1, tokens, 1, DSTATE),
        "C": normal(1, tokens, 1, DSTATE),
        "D": normal(heads),
    }


def run(kernel: Callable[..., None], made: dict[str, Tensor]) -> Tensor:
    """y (1, tokens, heads, HEADDIM)."""
    _, tokens, heads, _ = made["x"].shape
    chunks = tokens // CHUNK
    dt = made["dt"].reshape(1, chunks, CHUNK, heads).permute(0, 3, 1, 2).contiguous()
    dA_cumsum = (dt.float() * made["A"][:, None, None]).cumsum(-1)
    y = torch.empty(1, heads, HEADDIM, chunks, CHUNK, dtype=torch.bfloat16, device=dt.device)
    final = torch.empty(1, heads, HEADDIM, DSTATE, dtype=torch.bfloat16, device=dt.device)

    def rows(tensor: Tensor) -> Tensor:
        return tensor.reshape(1, chunks, CHUNK, *tensor.shape[2:])

    B, C = (rows(made[name]).permute(2, 4, 1, 3, 0) for name in "BC")
    kernel(
        rows(made["x"]).permute(4, 2, 1, 3, 0), dA_cumsum.permute(3, 2, 1, 0), dt.permute(3, 2, 1, 0), B, C,
        y.permute(4, 2, 3, 1, 0), None, final.permute(3, 2, 1, 0), made["D"][None], None, None, None, None, None,
        cutlass.Int32(chunks), cutlass.Int32(0),
    )  # fmt: skip
    return y.permute(0, 3, 4, 1, 2).reshape(1, tokens, heads, HEADDIM)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="directory of ssd_kernel.py")
    parser.add_argument("--chunks", type=int, default=3)
    parser.add_argument("--heads", type=int, default=2)
    options = parser.parse_args()
    made = inputs(options.chunks, options.heads, "cuda")
    found = run(compile_kernel(options.source), made).cpu().double()
    x, dt, A, B, C, D = (tensor.cpu().double() for tensor in made.values())
    true, _, _ = reference.mamba_chunk_scan_combined(x, dt, A, B, C, D=D)
    error, size = (found - true).abs().max().item(), true.abs().max().item()
    print(f"largest error {error:.2e} of values up to {size:.2e}")
    if not error < 0.02 * size:
        raise SystemExit("FlashInfer's kernel gave wrong numbers here.")


if __name__ == "__main__":
    main()
