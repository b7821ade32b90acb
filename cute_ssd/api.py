"""The public functions: signatures, defaults and contracts. Checks are in `problem.py`, the work behind `ops.py`.

Common to all. nheads is a multiple of ngroups and head h reads group h // (nheads // ngroups) of B and C. x, B, C and z
have one dtype (float32, bfloat16, float16, float64); dt, A, D, dt_bias, log_decay and states may have any of these.
Sums are fp32 (fp64 for fp64 inputs). Any strides on the CPU. y is fresh, contiguous and of x's dtype; no result shares
memory with an argument other than the ones documented as written. Errors: `ShapeError`, `DtypeError` for wrong
arguments, `UnsupportedError` for what no backend can run, all before anything is written.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import ops as _ops
from . import pages
from . import problem as _problem
from .checks import NO_GRADIENT_ON_GPU, bounds, refuse_forward_mode, refuse_gradient, require_types
from .device import Device
from .errors import UnsupportedError
from .plan import Plan, plan
from .problem import INF, with_heads


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

    def check() -> None:
        optional = {"D": D, "z": z, "dt_bias": dt_bias, "initial_states": initial_states}
        optional |= {"seq_idx": seq_idx, "cu_seqlens": cu_seqlens}
        require_types({"x": x, "dt": dt, "A": A, "B": B, "C": C}, optional, {"chunk_size": chunk_size}, state_dtype)
        _refuse_gradients_there_are_not(x, dt, A, B, C, D, z, dt_bias, initial_states)

    outputs = _ops.chunk_scan(
        check,
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
        bool(dt_softplus),
        *bounds(dt_limit),
        return_final_states,
        return_varlen_states,
        state_dtype,
    )
    return _returned(*outputs)


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

    def check() -> None:
        tensors, optional = {"x": x, "log_decay": log_decay, "B": B, "C": C}, {"D": D, "z": z}
        optional |= {"initial_states": initial_states}
        require_types(tensors, optional, {"chunk_size": chunk_size}, state_dtype)
        _refuse_gradients_there_are_not(x, log_decay, B, C, D, z, initial_states)

    outputs = _ops.chunk_scan(
        check,
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
    return _returned(*outputs)


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

    def check() -> None:
        tensors = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "query_start_loc": query_start_loc}
        optional = {"D": D, "z": z, "dt_bias": dt_bias, "initial_states": initial_states, "out": out}
        optional |= {"cu_chunk_seqlens": cu_chunk_seqlens}
        require_types(tensors, optional, {"chunk_size": chunk_size}, state_dtype)
        refuse_gradient("mamba_chunk_scan_varlen", x, dt, A, B, C, D, z, dt_bias, initial_states, out)

    y = _fresh_like_x(pages.zeros_like, x) if out is None else out
    final_states, chunk_states = _ops.chunk_scan_varlen(
        check,
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
        bool(dt_softplus),
        *bounds(dt_limit),
        initial_states,
        cu_chunk_seqlens,
        return_final_states,
        return_chunk_states,
        state_dtype,
        y,
    )
    wanted = ((final_states, return_final_states), (chunk_states, return_chunk_states))
    return _returned(y, *[states for states, asked in wanted if asked])


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
            empty sequence. Another one outside the pool, or one for two sequences with tokens, is a `ShapeError` on the
            CPU; a GPU, where the slots are not read before the launch, takes one outside the pool for padding.
        has_initial_state: (num_seqs,) bool; None is all False.
        The others: as in `mamba_chunk_scan_varlen`.

    Returns:
        y (total_len, nheads, headdim), which is `out` where given.
    """

    def check() -> None:
        tensors = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "ssm_pool": ssm_pool}
        tensors |= {"cache_indices": cache_indices, "query_start_loc": query_start_loc}
        optional = {"has_initial_state": has_initial_state, "D": D, "z": z, "dt_bias": dt_bias, "out": out}
        require_types(tensors, optional, {"chunk_size": chunk_size, "pad_slot_id": pad_slot_id})
        refuse_gradient("mamba_chunk_scan_varlen_inplace", x, dt, A, B, C, ssm_pool, D, z, dt_bias, out)

    y = _fresh_like_x(pages.zeros_like, x) if out is None else out
    _ops.chunk_scan_varlen_inplace(
        check,
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
        bool(dt_softplus),
        *bounds(dt_limit),
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

    def check() -> None:
        tensors = {"state": state, "x": x, "dt": dt, "A": A, "B": B, "C": C}
        optional = {"D": D, "z": z, "dt_bias": dt_bias, "state_batch_indices": state_batch_indices, "out": out}
        require_types(tensors, optional, {"pad_slot_id": pad_slot_id})
        refuse_gradient("selective_state_update", state, x, dt, A, B, C, D, z, dt_bias, out)

    y = _fresh_like_x(_empty_like, x) if out is None else out
    tensors: tuple[Any, ...] = (state, x, dt, A, B, C, D, z, dt_bias, y)
    if isinstance(state, Tensor) and state.ndim == 3:
        check()
        tensors = with_heads(*tensors)
    _ops.selective_state_update(check, *tensors[:9], bool(dt_softplus), state_batch_indices, pad_slot_id, tensors[9])
    return y


def explain(function: Callable[..., Any], *args: Any, arch: str | None = None, **kwargs: Any) -> Plan:
    """The plan of `function(*args, **kwargs)`, one of the public functions: what would run and why, printable.

    arch: "cpu" or a GPU architecture such as "sm_100a"; None plans for the device that x is on. Raises what the call
    would raise; nothing is computed and no data is read.
    """
    describe = next((builder for known, builder in _PROBLEMS if known is function), None)
    if describe is None:
        names = ", ".join(known.__name__ for known, _ in _PROBLEMS)
        raise UnsupportedError(f"explain knows no function {function!r}, expected one of {names}; pass one of them.")
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    options = {"chunk_size", "pad_slot_id"} & given.keys()
    no_tensors = options | {"state_dtype", "dt_limit", "dt_softplus"} | {n for n in given if n.startswith("return_")}
    tensors = {name: value for name, value in given.items() if name not in no_tensors}
    required = {n for n, p in bound.signature.parameters.items() if p.default is p.empty}
    require_types(
        {name: value for name, value in tensors.items() if name in required},
        {name: value for name, value in tensors.items() if name not in required},
        {name: given[name] for name in options},
        given.get("state_dtype"),
    )
    device = Device.of(given["x"].device) if arch is None else Device.from_arch(arch)
    if function not in (mamba_chunk_scan_combined, ssd_chunk_scan):
        refuse_gradient(function.__name__, *tensors.values())
    elif device.kind == "cuda":
        _refuse_gradient(*tensors.values())
    problem = describe(**given)
    headed = tensors
    if function is selective_state_update:
        headed = dict(zip(_HEADED, with_heads(*(tensors[name] for name in _HEADED)), strict=True))
    return plan(_problem.with_layout(problem, headed), device)


def _refuse_gradients_there_are_not(*tensors: Tensor | None) -> None:
    """Before anything runs. What torch.compile traces is refused by the operator."""
    refuse_forward_mode(*tensors)
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    x = tensors[0]
    assert x is not None
    if any(t is not None and t.requires_grad for t in tensors) and Device.of(x.device).kind == "cuda":
        _refuse_gradient(*tensors)


def _refuse_gradient(*tensors: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise UnsupportedError(NO_GRADIENT_ON_GPU)


def _ssd_problem(x: Tensor, log_decay: Tensor, B: Tensor, C: Tensor, *, chunk_size: int, **rest: Any) -> Any:
    return _problem.chunk_scan(x, None, None, B, C, chunk_size, log_decay=log_decay, **rest)


_HEADED = ("state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias", "out")


def _update_problem(dt_softplus: bool, state_batch_indices: Tensor | None, pad_slot_id: int, **tensors: Any) -> Any:
    headed = dict(zip(_HEADED, with_heads(*(tensors[name] for name in _HEADED)), strict=True))
    return _problem.state_update(
        **headed, dt_softplus=dt_softplus, state_batch_indices=state_batch_indices, pad_slot_id=pad_slot_id
    )


_PROBLEMS: tuple[tuple[Callable[..., Any], Callable[..., Any]], ...] = (
    (mamba_chunk_scan_combined, _problem.chunk_scan),
    (ssd_chunk_scan, _ssd_problem),
    (mamba_chunk_scan_varlen, _problem.varlen),
    (mamba_chunk_scan_varlen_inplace, _problem.varlen_inplace),
    (selective_state_update, _update_problem),
)


def _fresh_like_x(make: Callable[[Tensor], Tensor], x: Any) -> Tensor:
    require_types({"x": x}, {})
    return make(x)


def _empty_like(x: Tensor) -> Tensor:
    """Contiguous, whatever x is."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _returned(y: Tensor, *states: Tensor) -> Any:
    return (y, *states) if states else y
