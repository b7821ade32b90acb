"""The functions of mamba_ssm (state-spaces/mamba, 2.2 to 2.3) under its signatures, and `enable()` for its modules."""

from typing import Any

import torch
from torch import Tensor

from .. import api
from ..errors import UnsupportedError
from ._patching import Handle, PackagePatch, Redirect, installed


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> Any:
    """`cute_ssd.mamba_chunk_scan_combined`: shapes, dtypes and errors as there, differentiable.

    Beyond mamba_ssm: chunk_size is any positive number, cu_seqlens alone separates the sequences of y too, and
    state_dtype is the dtype of every returned state.
    """
    return api.mamba_chunk_scan_combined(
        x,
        dt,
        A,
        B,
        C,
        chunk_size,
        D,
        z,
        dt_bias,
        initial_states,
        seq_idx,
        cu_seqlens,
        dt_softplus,
        dt_limit,
        return_final_states,
        return_varlen_states,
        state_dtype,
    )


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """`cute_ssd.selective_state_update`: `state` is updated in place, y (like x) is returned. A negative slot in
    state_batch_indices is padding only where it is -1; others are a `ShapeError`. For inference."""
    return api.selective_state_update(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices)


def enable() -> Handle:
    """Replaces the two functions in an installed mamba_ssm, in every loaded module that has imported them (Mamba2,
    Mamba2Simple and code outside mamba_ssm alike), until the handle's `disable()`; see `Handle` for nesting.

    Mamba2 and Mamba2Simple call neither on their default path for training and prefill, but a third one that fuses
    the convolution, the scan and the projection. It is made to raise `UnsupportedError` meanwhile, so that no scan
    goes past cute_ssd unnoticed: build the modules with use_mem_eff_path=False.

    Raises `UnsupportedError` when mamba_ssm is not installed or its functions have unknown parameters.
    """
    return _patch.enable()


def _redirects() -> list[Redirect]:
    scan = installed("mamba_ssm", "mamba_ssm.ops.triton.ssd_combined")
    step = installed("mamba_ssm", "mamba_ssm.ops.triton.selective_state_update")
    found = [
        Redirect(scan.mamba_chunk_scan_combined, mamba_chunk_scan_combined),
        Redirect(step.selective_state_update, selective_state_update),
    ]
    fused = getattr(scan, "mamba_split_conv1d_scan_combined", None)
    if fused is not None:
        found.append(Redirect(fused, _refuse_fused))
    return found


def _refuse_fused(*args: Any, **kwargs: Any) -> Any:
    raise UnsupportedError(
        "mamba_split_conv1d_scan_combined was called while cute_ssd is enabled for mamba_ssm, expected "
        "mamba_chunk_scan_combined since cute_ssd has no fused convolution; set use_mem_eff_path=False on the module."
    )


_patch = PackagePatch(_redirects)
