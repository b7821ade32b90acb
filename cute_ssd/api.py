"""The public functions: signatures, defaults and contracts. Checks are in `problem.py`, the work behind `ops.py`.

Common to all. nheads is a multiple of ngroups and head h reads group h // (nheads // ngroups) of B and C. x, B, C and z
have one dtype (float32, bfloat16, float16, float64); dt, A, D, dt_bias, log_decay and states may have any of these.
Sums are fp32 (fp64 for fp64 inputs). Any strides on the CPU. y is fresh, contiguous and of x's dtype; no result shares
memory with an argument other than the ones documented as written. Errors: `ShapeError`, `DtypeError` for wrong
arguments, `UnsupportedError` for what no backend can run, all before anything is written.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import ops as _ops  # noqa: F401  (registers the operators)
from . import problem as _problem
from .device import Device
from .errors import UnsupportedError
from .plan import Plan, plan
from .problem import INF, refuse_gradient

_chunk_scan = torch.ops.cute_ssd.chunk_scan.default
_chunk_scan_varlen = torch.ops.cute_ssd.chunk_scan_varlen.default
_chunk_scan_varlen_inplace = torch.ops.cute_ssd.chunk_scan_varlen_inplace.default
_selective_state_update = torch.ops.cute_ssd.selective_state_update.default


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
    dt_limit: tuple[float, float] = (0.0, INF),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> Any:
    """Mamba-2 SSD scan of whole rows (arXiv 2405.21060); arguments and returns of mamba_ssm's function. Differentiable
    in every float argument, also through the returned states.

    With dt after dt_bias, softplus (linear above 20) and dt_limit, for each head
        state_t = exp(A dt_t) state_{t-1} + dt_t x_t B_tᵀ,   y_t = C_t state_t + D x_t,   y_t *= silu(z_t)

    Args:
        x, z: (batch, seqlen, nheads, headdim).
        dt: (batch, seqlen, nheads).    A, dt_bias: (nheads,).
        B, C: (batch, seqlen, ngroups, dstate).
        chunk_size: accepted for compatibility; results do not depend on it.
        D: (nheads,) or (nheads, headdim).
        initial_states: (batch, nheads, headdim, dstate), for the first sequence of each row.
        seq_idx: (batch, seqlen) int: a change of id, also back to an earlier one, starts a sequence.
        cu_seqlens: (num_seqs + 1,) int offsets of sequences packed into one row (batch 1), from 0 and never falling.
            Rows of y after the last offset are zero. May be given with a seq_idx that agrees.
        state_dtype: of the returned states; None is float32 (float64 for float64 inputs).

    Returns:
        y, or (y, final_states), (y, varlen_states), (y, final_states, varlen_states). final_states (batch, nheads,
        headdim, dstate) after the last token of each row; varlen_states (num_seqs, ...) after each sequence.
    """
    y, final_states, varlen_states = _chunk_scan(
        x,
        dt,
        A,
        None,
        B,
        C,
        D,
        z,
        dt_bias,
        initial_states,
        seq_idx,
        cu_seqlens,
        chunk_size,
        dt_softplus,
        dt_limit[0],
        dt_limit[1],
        return_final_states,
        return_varlen_states,
        state_dtype,
    )
    return _returned(y, (return_final_states, final_states), (return_varlen_states, varlen_states))


def ssd_chunk_scan(
    x: Tensor,
    log_decay: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    initial_states: Tensor | None = None,
    *,
    chunk_size: int = 256,
    return_final_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> Any:
    """The pre-discretised core: state_t = exp(log_decay_t) state_{t-1} + x_t B_tᵀ, y_t = C_t state_t + D x_t, gated
    by silu(z_t). Differentiable in every float argument, also through final_states.

    Args:
        x, z: (batch, seqlen, nheads, headdim), x used as it is.
        log_decay: (batch, nheads, seqlen).
        B, C: (batch, seqlen, ngroups, dstate).    D: (nheads,) or (nheads, headdim).
        initial_states: (batch, nheads, headdim, dstate).
        chunk_size, state_dtype: as in `mamba_chunk_scan_combined`.

    Returns:
        y, or (y, final_states) with final_states (batch, nheads, headdim, dstate).
    """
    y, final_states, _ = _chunk_scan(
        x,
        None,
        None,
        log_decay,
        B,
        C,
        D,
        z,
        None,
        initial_states,
        None,
        None,
        chunk_size,
        False,
        0.0,
        INF,
        return_final_states,
        False,
        state_dtype,
    )
    return _returned(y, (return_final_states, final_states))


def mamba_chunk_scan_varlen(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    query_start_loc: Tensor,
    *,
    chunk_size: int = 256,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, INF),
    initial_states: Tensor | None = None,
    out: Tensor | None = None,
    return_final_states: bool = False,
    return_chunk_states: bool = False,
    state_dtype: torch.dtype | None = None,
    cu_chunk_seqlens: Tensor | None = None,
) -> Any:
    """SSD scan of packed sequences (prefill), for inference.

    Args:
        x, z: (total_len, nheads, headdim).    dt: (total_len, nheads).    A, dt_bias: (nheads,).
        B, C: (total_len, ngroups, dstate).    D: (nheads,) or (nheads, headdim).
        query_start_loc: (num_seqs + 1,) int offsets, from 0 and never falling; sequences may be empty.
        chunk_size: spacing of the chunk states; y does not depend on it.
        initial_states: (num_seqs, nheads, headdim, dstate).
        out: contiguous, like x: written and returned as y; rows after query_start_loc[-1] stay as they are (they are
            zero in a fresh y).
        return_chunk_states: also return the states after every chunk_size tokens of each sequence and after its last
            token, in order: (total_len // chunk_size + num_seqs, nheads, headdim, dstate), unused rows zero.
        cu_chunk_seqlens: (nchunks + 1,) int offsets of chunks of one's own, none across a sequence; the chunk states
            are then (nchunks, ...).

    Returns:
        y, followed by final_states (num_seqs, nheads, headdim, dstate; that of an empty sequence is its initial state
        or zero) and the chunk states where asked for.
    """
    refuse_gradient("mamba_chunk_scan_varlen", x, dt, A, B, C, D, z, dt_bias, initial_states, out)
    y = x.new_zeros(x.shape) if out is None else out
    final_states, chunk_states = _chunk_scan_varlen(
        x,
        dt,
        A,
        B,
        C,
        query_start_loc,
        chunk_size,
        D,
        z,
        dt_bias,
        dt_softplus,
        dt_limit[0],
        dt_limit[1],
        initial_states,
        cu_chunk_seqlens,
        return_final_states,
        return_chunk_states,
        state_dtype,
        y,
    )
    return _returned(y, (return_final_states, final_states), (return_chunk_states, chunk_states))


def mamba_chunk_scan_varlen_inplace(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    ssm_pool: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    *,
    has_initial_state: Tensor | None = None,
    pad_slot_id: int = -1,
    chunk_size: int = 256,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, INF),
    out: Tensor | None = None,
) -> Tensor:
    """SSD scan of packed sequences on a pool of states, for inference: sequence b starts from
    ssm_pool[cache_indices[b]] where has_initial_state[b] (else from zero) and leaves its last state there.

    Args:
        ssm_pool: (num_slots, nheads, headdim, dstate), written in the named slots only.
        cache_indices: (num_seqs,) int slots. One equal to pad_slot_id is neither read nor written; nor is that of an
            empty sequence. Another one outside the pool, or one for two sequences with tokens, is a `ShapeError`.
        has_initial_state: (num_seqs,) bool; None is all False.
        The others: as in `mamba_chunk_scan_varlen`.

    Returns:
        y (total_len, nheads, headdim), which is `out` where given.
    """
    refuse_gradient("mamba_chunk_scan_varlen_inplace", x, dt, A, B, C, ssm_pool, D, z, dt_bias, out)
    y = x.new_zeros(x.shape) if out is None else out
    _chunk_scan_varlen_inplace(
        x,
        dt,
        A,
        B,
        C,
        ssm_pool,
        cache_indices,
        query_start_loc,
        has_initial_state,
        pad_slot_id,
        chunk_size,
        D,
        z,
        dt_bias,
        dt_softplus,
        dt_limit[0],
        dt_limit[1],
        y,
    )
    return y


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
    pad_slot_id: int = -1,
    out: Tensor | None = None,
) -> Tensor:
    """One token for each row (decode), state updated in place, for inference.

    Args:
        state: (batch, nheads, headdim, dstate), or the slots (num_slots, ...) that state_batch_indices choose from.
        x, z: (batch, nheads, headdim).    B, C: (batch, ngroups, dstate).
        dt: (batch, nheads) or (batch, nheads, headdim).    A: (nheads,) or (nheads, headdim, dstate).
        D, dt_bias: (nheads,) or (nheads, headdim). Expanded (stride 0) tensors cost what the plain ones cost.
        state_batch_indices: (batch,) int slots; a row whose slot is pad_slot_id gives zeros and touches no state.
        out: contiguous, like x: written and returned.
        Without a head dimension, as mamba_ssm allows: state (batch, dim, dstate), x, z, dt (batch, dim), A (dim,
        dstate), B, C (batch, dstate) or (batch, ngroups, dstate), D, dt_bias (dim,).

    Returns:
        y like x.
    """
    refuse_gradient("selective_state_update", state, x, dt, A, B, C, D, z, dt_bias, out)
    if state.ndim == 3:
        y = x.new_empty(x.shape) if out is None else out
        selective_state_update(
            state.unsqueeze(1),
            x.unsqueeze(1),
            dt.unsqueeze(1),
            A.unsqueeze(0),
            B.unsqueeze(1) if B.ndim == 2 else B,
            C.unsqueeze(1) if C.ndim == 2 else C,
            None if D is None else D.unsqueeze(0),
            None if z is None else z.unsqueeze(1),
            None if dt_bias is None else dt_bias.unsqueeze(0),
            dt_softplus,
            state_batch_indices,
            pad_slot_id,
            y.unsqueeze(1),
        )
        return y
    y = x.new_empty(x.shape) if out is None else out
    _selective_state_update(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices, pad_slot_id, y)
    return y


def explain(function: Callable[..., Any], *args: Any, arch: str | None = None, **kwargs: Any) -> Plan:
    """The plan of `function(*args, **kwargs)`, one of the public functions: what would run and why, printable.

    arch: "cpu" or a GPU architecture such as "sm_100a"; None plans for the device that x is on. Raises what the call
    would raise; nothing is computed and no data is read.
    """
    builder = _PROBLEMS.get(function)
    if builder is None:
        names = ", ".join(f.__name__ for f in _PROBLEMS)
        raise UnsupportedError(f"explain knows no function {function!r}, expected one of {names}; pass one of them.")
    x = kwargs.get("x", args[1] if function is selective_state_update and len(args) > 1 else args[0] if args else None)
    problem = builder(*args, **kwargs)
    return plan(problem, Device.of(x.device) if arch is None else Device.from_arch(arch))  # type: ignore[union-attr]


def _ssd_problem(
    x: Tensor, log_decay: Tensor, B: Tensor, C: Tensor, *args: Any, chunk_size: int = 256, **kwargs: Any
) -> Any:
    names = ("D", "z", "initial_states")
    kwargs.update(zip(names, args, strict=False))
    return _problem.chunk_scan(x, None, None, B, C, chunk_size, log_decay=log_decay, **kwargs)


_PROBLEMS: dict[Callable[..., Any], Callable[..., Any]] = {
    mamba_chunk_scan_combined: _problem.chunk_scan,
    ssd_chunk_scan: _ssd_problem,
    mamba_chunk_scan_varlen: _problem.varlen,
    mamba_chunk_scan_varlen_inplace: _problem.varlen_inplace,
    selective_state_update: _problem.state_update,
}


def _returned(y: Tensor, *optional: tuple[bool, Tensor]) -> Any:
    wanted = [tensor for asked, tensor in optional if asked]
    return (y, *wanted) if wanted else y
