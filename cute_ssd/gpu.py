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
from .ops import Asked, present
from .problem import Problem


def chunk_scan(asked: Asked, *args: Any) -> list[Tensor]:
    """Batched rows, or sequences packed into one by cu_seqlens. Returns y, final states, states of the sequences, as
    asked for."""
    *inputs, return_final_states, return_varlen_states, _ = args
    x, dt, A, log_decay, B, C, D, z, dt_bias, initial_states, _, cu_seqlens, _, softplus, low, high = inputs
    p = asked.problem
    packed = cu_seqlens is not None
    y = x.new_zeros(x.shape) if packed else x.new_empty(x.shape)  # rows behind the last sequence are zero
    count = p.batch if p.num_seqs is None else p.num_seqs
    wanted = return_final_states or return_varlen_states
    states = x.new_empty((count, *p.state_shape), dtype=p.state_dtype) if wanted else None
    first = None
    if packed and initial_states is not None:  # the row's initial state feeds its first sequence
        first = torch.arange(count, device=x.device) == 0
    _run(
        asked,
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
        softplus,
        (low, high),
    )
    final = states
    if states is not None and packed and return_final_states:
        final = _last(states, cu_seqlens, initial_states)
    return present(y, final if return_final_states else None, states if return_varlen_states else None)


def _last(states: Tensor, offsets: Tensor, initial_states: Tensor | None) -> Tensor:
    """The state behind a row's last token: of the last sequence with tokens, without any of the first sequence."""
    if states.shape[0] == 0:
        if initial_states is None:
            return states.new_zeros((1, *states.shape[1:]))
        return initial_states.to(states.dtype, copy=True)
    numbers = torch.arange(states.shape[0], device=states.device)
    last = torch.where(offsets.diff() > 0, numbers, 0).argmax(0, keepdim=True)
    return states.index_select(0, last)


def chunk_scan_backward(asked: Asked, *args: Any) -> tuple[Tensor, ...]:
    raise UnsupportedError(f"{asked.problem.function} has no gradient on a GPU yet; call backward with CPU tensors.")


def chunk_scan_varlen(asked: Asked, *args: Any) -> tuple[Tensor, Tensor]:
    x, dt, A, B, C, query_start_loc, _, D, z, dt_bias, softplus, low, high = args[:13]
    initial_states, _, return_final_states, return_chunk_states, _, out = args[13:]
    p = asked.problem
    asked.refuse_overlap(args, ("out", len(args) - 1))
    shape = (p.num_seqs, *p.state_shape) if return_final_states else (0,)
    final = x.new_empty(shape, dtype=p.state_dtype)
    states = (query_start_loc, initial_states, final if return_final_states else None)
    operands = _packed_row(p, x, dt, A, B, C, D, z, dt_bias, out, *states)
    if not return_chunk_states:
        _run(asked, operands, softplus, (low, high))
        return final, x.new_empty(0, dtype=p.state_dtype)
    rows = p.seqlen // p.chunk_size + operands.num_seqs  # those that no sequence needs stay zero
    chunk_states = x.new_zeros((rows, *p.state_shape), dtype=p.state_dtype)
    _run(asked, operands, softplus, (low, high), chunk_states=chunk_states)
    return final, chunk_states


def chunk_scan_varlen_inplace(asked: Asked, *args: Any) -> None:
    x, dt, A, B, C, ssm_pool, cache_indices, query_start_loc, has_initial_state, pad_slot_id = args[:10]
    _, D, z, dt_bias, softplus, low, high, out = args[10:]
    asked.refuse_overlap(args, ("out", len(args) - 1), ("ssm_pool", 5))
    start = None if has_initial_state is None else ssm_pool
    states = (query_start_loc, start, ssm_pool, cache_indices, has_initial_state)
    operands = _packed_row(asked.problem, x, dt, A, B, C, D, z, dt_bias, out, *states)
    _run(asked, operands, softplus, (low, high), pad_slot_id)


def selective_state_update(asked: Asked, *args: Any) -> None:
    state, x, dt, A, B, C, D, z, dt_bias, softplus, state_batch_indices, pad_slot_id, out = args
    asked.refuse_overlap(args, ("out", len(args) - 1), ("state", 0))
    operands = launch.step_operands(state, x, dt, A, B, C, D, z, dt_bias, state_batch_indices, out)
    # A decode step has no limit: dt may be negative where there is no softplus.
    unlimited = (float("-inf"), float("inf"))
    _run(asked, operands, softplus, unlimited, pad_slot_id, single=True)


def _run(
    asked: Asked,
    operands: Operands,
    softplus: bool,
    dt_limit: tuple[float, float],
    pad_slot_id: int = -1,
    chunk_states: Tensor | None = None,
    single: bool = False,
) -> None:
    """`chunk_states` needs tiles, which a plan has wherever there are tokens."""
    arch, chunks = asked.plan.device.arch, asked.plan.chunks
    if chunks is None:
        launch.recurrence(operands, arch, softplus=softplus, dt_limit=dt_limit, pad_slot_id=pad_slot_id, single=single)
    else:
        launch.chunked(operands, arch, chunks, chunk_states, softplus, dt_limit, pad_slot_id, asked.kernels)


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
    *states: Tensor | None,
) -> Operands:
    """Packed tokens as one row of a batch; `states` are the other operands."""
    gate = None if z is None else z[None]
    return Operands(x[None], dt[None], A, B[None], C[None], _per_channel(D, p), gate, dt_bias, out[None], *states)


def _per_channel(D: Tensor | None, p: Problem) -> Tensor | None:
    return D[:, None].expand(-1, p.headdim) if D is not None and D.ndim == 1 else D
