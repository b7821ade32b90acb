"""The operators on GPU tensors, and on CPU tensors inside `cute_ssd.emulate()`: which operands a launch gets.

Nothing here reads data on the host: offsets, slots and flags stay on the device. Every function takes the arguments
of its operator in `ops.py`.
"""

from typing import Any

import torch
from torch import Tensor

from . import launch
from .errors import UnsupportedError
from .launch import Operands
from .ops import refuse_overlap
from .plan import Plan
from .problem import Problem


def chunk_scan(how: Plan, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Batched rows, or sequences packed into one by cu_seqlens. Returns y, final states, states of the sequences."""
    *inputs, return_final_states, return_varlen_states, _ = args
    x, dt, A, log_decay, B, C, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, _, softplus, low, high = inputs
    p = how.problem
    if seq_idx is not None:
        raise UnsupportedError(
            f"{p.function} takes no seq_idx on a GPU, because its sequences are known to the data only; pass "
            "cu_seqlens, or one row of the batch for each sequence."
        )
    packed = cu_seqlens is not None
    y = x.new_zeros(x.shape) if packed else x.new_empty(x.shape)  # rows behind the last sequence are zero
    count = p.batch if p.num_seqs is None else p.num_seqs
    wanted = return_final_states or return_varlen_states
    states = x.new_empty((count, *p.state_shape), dtype=p.state_dtype) if wanted else None
    first = None
    if packed and initial_states is not None:  # the row's initial state feeds its first sequence
        first = torch.arange(count, device=x.device) == 0
    _run(
        how,
        Operands(
            x=x,
            dt=dt if log_decay is None else log_decay.transpose(1, 2),
            A=A,
            B=B,
            C=C,
            D=_per_channel(D, p),
            z=z,
            dt_bias=dt_bias,
            y=y,
            offsets=cu_seqlens,
            initial=initial_states,
            final=states,
            flags=first,
        ),
        softplus=softplus,
        dt_limit=(low, high),
    )
    none = x.new_empty(0, dtype=p.state_dtype)
    if states is None:
        return y, none, none
    if not packed:
        return y, states, none
    final = _last(states, cu_seqlens, initial_states) if return_final_states else none
    return y, final, states if return_varlen_states else none


def _last(states: Tensor, offsets: Tensor, initial_states: Tensor | None) -> Tensor:
    """The state behind a row's last token: of the last sequence with tokens, without any of the first sequence."""
    if states.shape[0] == 0:
        if initial_states is None:
            return states.new_zeros((1, *states.shape[1:]))
        return initial_states.to(states.dtype, copy=True)
    numbers = torch.arange(states.shape[0], device=states.device)
    last = torch.where(offsets.diff() > 0, numbers, 0).argmax(0, keepdim=True)
    return states.index_select(0, last)


def chunk_scan_backward(how: Plan, *args: Any) -> tuple[Tensor, ...]:
    raise UnsupportedError(f"{how.problem.function} has no gradient on a GPU yet; call backward with CPU tensors.")


def chunk_scan_varlen(how: Plan, *args: Any) -> tuple[Tensor, Tensor]:
    x, dt, A, B, C, query_start_loc, _, D, z, dt_bias, softplus, low, high = args[:13]
    initial_states, cu_chunk_seqlens, return_final_states, return_chunk_states, _, out = args[13:]
    p = how.problem
    if return_chunk_states or cu_chunk_seqlens is not None:
        raise UnsupportedError(
            f"{p.function} returns no chunk states on a GPU yet; ask for the final states only, or pass CPU tensors."
        )
    refuse_overlap("out", out, args[:-1])
    shape = (p.num_seqs, *p.state_shape) if return_final_states else (0,)
    final = x.new_empty(shape, dtype=p.state_dtype)
    operands = _packed_row(p, x, dt, A, B, C, D, z, dt_bias, out)._replace(
        offsets=query_start_loc,
        initial=initial_states,
        final=final if return_final_states else None,
    )
    _run(how, operands, softplus=softplus, dt_limit=(low, high))
    return final, x.new_empty(0, dtype=p.state_dtype)


def chunk_scan_varlen_inplace(how: Plan, *args: Any) -> None:
    x, dt, A, B, C, ssm_pool, cache_indices, query_start_loc, has_initial_state, pad_slot_id = args[:10]
    _, D, z, dt_bias, softplus, low, high, out = args[10:]
    refuse_overlap("out", out, args[:-1])
    refuse_overlap("ssm_pool", ssm_pool, (*args[:5], *args[6:-1]))
    operands = _packed_row(how.problem, x, dt, A, B, C, D, z, dt_bias, out)._replace(
        offsets=query_start_loc,
        initial=None if has_initial_state is None else ssm_pool,
        final=ssm_pool,
        slots=cache_indices,
        flags=has_initial_state,
    )
    _run(how, operands, softplus=softplus, dt_limit=(low, high), pad_slot_id=pad_slot_id)


def selective_state_update(how: Plan, *args: Any) -> None:
    state, x, dt, A, B, C, D, z, dt_bias, softplus, state_batch_indices, pad_slot_id, out = args
    refuse_overlap("out", out, args[:-1])
    refuse_overlap("state", state, args[1:-1])
    operands = launch.step_operands(state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices, out)
    # A decode step has no limit: dt may be negative where there is no softplus.
    unlimited = (float("-inf"), float("inf"))
    _run(how, operands, softplus=softplus, dt_limit=unlimited, pad_slot_id=pad_slot_id, single=True)


def _run(how: Plan, operands: Operands, **options: Any) -> None:
    launch.recurrence(operands, how.device.arch, **options)


def _packed_row(
    p: Problem,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    out: Tensor,
) -> Operands:
    """Packed tokens as one row of a batch."""
    gate = None if z is None else z[None]
    return Operands(x[None], dt[None], A, B[None], C[None], _per_channel(D, p), gate, dt_bias, out[None])


def _per_channel(D: Tensor | None, p: Problem) -> Tensor | None:
    return D[:, None].expand(-1, p.headdim) if D is not None and D.ndim == 1 else D
