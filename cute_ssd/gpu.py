"""The operators on GPU tensors, and on CPU tensors inside `cute_ssd.emulate()`: which operands a launch gets.

Nothing here reads data on the host: offsets, slots and flags stay on the device. Every function takes the arguments
of its operator in `ops.py`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from . import launch
from .asked import Asked
from .errors import UnsupportedError
from .launch import NOTHING, Operands, Packed
from .ops import chunk_scan_outputs, keep_states, present, varlen_outputs
from .problem import Problem


def chunk_scan(asked: Asked, *args: Any) -> list[Tensor]:
    """Batched rows, or sequences packed into one by cu_seqlens. Returns y, final states, states of the sequences, as
    asked for."""
    *inputs, return_final_states, return_varlen_states, _ = args
    x, dt, A, log_decay, B, C, D, z, dt_bias, initial_states, _, cu_seqlens, _, softplus, low, high = inputs
    p = asked.problem
    packed = cu_seqlens is not None
    # Rows behind the last sequence are zero.
    y, final, varlen = chunk_scan_outputs(p, x, return_final_states, return_varlen_states, zeros=packed)
    operands = Operands(
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
        final=varlen if packed else final,
    )
    if final is not None and p.num_seqs == 0:  # nothing runs
        keep_states(final, initial_states)
    if packed and asked.plan.chunks is not None:
        _tiles_of_a_row(asked, operands, softplus, (low, high), final)
    else:
        _run(asked, operands, softplus, (low, high), packed=Packed(final) if packed else NOTHING)
    return present(y, final, varlen)


def _tiles_of_a_row(
    asked: Asked, operands: Operands, softplus: bool, dt_limit: tuple[float, float], last: Tensor | None
) -> None:
    """The chunked kernels give every sequence the state of its number: flags keep all but the first from reading the
    row's, and the row's last state is copied from those of all sequences."""
    p, x, offsets = asked.problem, operands.x, operands.offsets
    assert offsets is not None and p.num_seqs is not None
    numbers = torch.arange(p.num_seqs, device=x.device)
    flags = None if operands.initial is None else numbers == 0
    states = operands.final
    if last is not None and states is None:
        states = x.new_empty((p.num_seqs, *p.state_shape), dtype=p.state_dtype)
    _run(asked, operands._replace(flags=flags, final=states), softplus, dt_limit)
    if last is not None and states is not None:
        # Of the last sequence with tokens, without any of the first sequence.
        index = torch.where(offsets.diff() > 0, numbers, 0).argmax(0, keepdim=True)
        torch.index_select(states, 0, index, out=last)


def chunk_scan_backward(asked: Asked, *args: Any) -> tuple[Tensor, ...]:
    raise UnsupportedError(f"{asked.problem.function} has no gradient on a GPU yet; call backward with CPU tensors.")


def chunk_scan_varlen(asked: Asked, *args: Any) -> tuple[Tensor, Tensor]:
    x, dt, A, B, C, query_start_loc, _, D, z, dt_bias, softplus, low, high = args[:13]
    initial_states, cu_chunk_seqlens, return_final_states, return_chunk_states, _, out = args[13:]
    p = asked.problem
    asked.refuse_overlap(args, ("out", len(args) - 1))
    final, chunk_states = varlen_outputs(p, args)
    states = (query_start_loc, initial_states, final if return_final_states else None)
    operands = _packed_row(p, x, dt, A, B, C, D, z, dt_bias, out, *states)
    left = Packed(None, chunk_states, cu_chunk_seqlens, p.chunk_size) if return_chunk_states else NOTHING
    _run(asked, operands, softplus, (low, high), packed=left)
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
    packed: Packed = NOTHING,
    single: bool = False,
) -> None:
    """Of what `packed` may have tiles leave `chunk_states` only, every so many tiles as the plan says."""
    arch, chunks = asked.plan.device.arch, asked.plan.chunks
    if chunks is None:
        launch.recurrence(
            operands,
            arch,
            packed=packed,
            softplus=softplus,
            dt_limit=dt_limit,
            pad_slot_id=pad_slot_id,
            single=single,
        )
    else:
        launch.chunked(operands, arch, chunks, packed.chunk_states, softplus, dt_limit, pad_slot_id, asked.kernels)
    # Autograd may have saved them for a backward of something else, which has to refuse.
    increment_version([written for written in (operands.y, operands.final) if written is not None])


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
