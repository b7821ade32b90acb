"""The operators as torch.library knows them: schema, CPU, CUDA, fake and autograd.

Every implementation starts from the `Problem`, so that eager calls and torch.compile check the same (torch.compile
wraps what is raised in an error of its own). Those for GPUs, which CPU tensors have inside `cute_ssd.emulate()`, too,
are in `gpu.py`. The functions `chunk_scan` and so on are what the API calls, see `dispatch.py`. chunk_scan returns a
list of the outputs that were asked for; chunk_scan_varlen, which writes an argument, may not (torch.compile refuses
such lists): what was not asked for is an empty tensor there.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from . import cpu, cpu_decode, pages, problem
from .asked import Asked
from .checks import NO_GRADIENT_ON_GPU
from .device import Device
from .dispatch import LIBRARY, register
from .errors import UnsupportedError
from .plan import require_support
from .problem import Problem
from .sequences import Sequences, chunk_ends, from_offsets, live_slots, of_batch, whole_rows

_SCAN_INPUTS = (
    "Tensor x, Tensor? dt, Tensor? A, Tensor? log_decay, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, "
    "Tensor? initial_states, Tensor? seq_idx, Tensor? cu_seqlens, SymInt chunk_size, bool dt_softplus, float dt_min, "
    "float dt_max"
)
_PACKED_INPUTS = (
    "SymInt chunk_size, Tensor? D, Tensor? z, Tensor? dt_bias, bool dt_softplus, float dt_min, float dt_max"
)
LIBRARY.define(
    f"chunk_scan({_SCAN_INPUTS}, bool return_final_states, bool return_varlen_states, ScalarType? state_dtype)"
    " -> Tensor[]"
)
LIBRARY.define(
    f"chunk_scan_backward(Tensor dy, Tensor? dfinal_states, Tensor? dvarlen_states, {_SCAN_INPUTS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    f"chunk_scan_varlen(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor query_start_loc, {_PACKED_INPUTS}, "
    "Tensor? initial_states, Tensor? cu_chunk_seqlens, bool return_final_states, bool return_chunk_states, "
    "ScalarType? state_dtype, Tensor(a!) out) -> (Tensor, Tensor)"
)
LIBRARY.define(
    "chunk_scan_varlen_inplace(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor(a!) ssm_pool, "
    "Tensor cache_indices, Tensor query_start_loc, Tensor? has_initial_state, int pad_slot_id, "
    f"{_PACKED_INPUTS}, Tensor(b!) out) -> ()"
)
LIBRARY.define(
    "selective_state_update(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, "
    "Tensor? dt_bias, bool dt_softplus, Tensor? state_batch_indices, int pad_slot_id, Tensor(b!) out) -> ()"
)


def _require_support(problem: Problem, x: Tensor) -> None:
    """Without the arithmetic of a plan, which would fix the symbolic sizes that torch.compile passes."""
    require_support(problem, Device.of(x.device))


def _scan_problem(
    x: Tensor,
    dt: Tensor | None,
    A: Tensor | None,
    log_decay: Tensor | None,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> Problem:
    return problem.chunk_scan(
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
        (dt_min, dt_max),
        return_final_states,
        return_varlen_states,
        state_dtype,
        log_decay=log_decay,
    )


def _scan_inputs(
    p: Problem,
    x: Tensor,
    dt: Tensor | None,
    A: Tensor | None,
    log_decay: Tensor | None,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    *rest: Any,
) -> cpu.Inputs:
    dt_softplus, dt_min, dt_max = rest[-3:]
    tokens_first = None if log_decay is None else log_decay.transpose(1, 2)
    return cpu.Inputs(x, B, C, p.compute_dtype, tokens_first, dt, A, dt_bias, dt_softplus, (dt_min, dt_max), D, z)


class _RowStates:
    """Which states the sequences of a batched call start from and end in: the first of a row starts from
    initial_states[row], the last ends in final_states[row]."""

    def __init__(self, sequences: Sequences, batch: int) -> None:
        self.sequences = sequences
        self.firsts, self.lasts = sequences.firsts(batch), sequences.lasts(batch)

    def gather(
        self, states: Tensor | None, owners: list[int | None], ids: list[int], dtype: torch.dtype
    ) -> Tensor | None:
        """states[row] for the sequences that own their row, zeros for the others."""
        rows = [self.sequences.rows[s] for s in ids]
        owned = [i for i, s in enumerate(ids) if owners[rows[i]] == s]
        if states is None or not owned:
            return None
        if len(owned) == len(ids) and rows == list(range(rows[0], rows[0] + len(rows))):
            return states[rows[0] : rows[0] + len(rows)]
        found = torch.zeros(len(ids), *states.shape[1:], dtype=dtype)
        for i in owned:
            found[i] = states[rows[i]]
        return found


def _row_states(p: Problem, seq_idx: Tensor | None, cu_seqlens: Tensor | None) -> _RowStates:
    if seq_idx is None and cu_seqlens is None:
        return _whole_rows(p.batch, p.seqlen)
    return _RowStates(of_batch(p.batch, p.seqlen, seq_idx, cu_seqlens), p.batch)


@functools.lru_cache(maxsize=256)  # most calls: the next one will ask for the same
def _whole_rows(batch: int, seqlen: int) -> _RowStates:
    return _RowStates(whole_rows(batch, seqlen), batch)


def _chunk_scan_cpu(asked: Asked, *args: Any) -> list[Tensor]:
    *inputs, return_final_states, return_varlen_states, _ = args
    p, how = asked.problem, asked.plan
    x, initial_states, seq_idx, cu_seqlens = inputs[0], *inputs[9:12]
    rows = _row_states(p, seq_idx, cu_seqlens)
    sequences = rows.sequences
    y, final_states, varlen_states = chunk_scan_outputs(p, x, return_final_states, return_varlen_states)
    outputs = [pages.advise(output) for output in present(y, final_states, varlen_states)]
    if cu_seqlens is not None and sequences.tokens < p.seqlen:
        y.zero_()
    if final_states is not None and not sequences.rows:
        keep_states(final_states, initial_states)

    def initial(ids: list[int]) -> Tensor | None:
        return rows.gather(initial_states, rows.firsts, ids, p.compute_dtype)

    def final(s: int) -> list[Tensor]:
        row = sequences.rows[s]
        of_row = [final_states[row]] if final_states is not None and rows.lasts[row] == s else []
        return of_row if varlen_states is None else [*of_row, varlen_states[s]]

    cpu.scan(
        _scan_inputs(p, *inputs),
        sequences,
        how,
        y,
        None if initial_states is None else initial,
        final if return_final_states or return_varlen_states else None,
    )
    return outputs


def present(*outputs: Tensor | None) -> list[Tensor]:
    return [output for output in outputs if output is not None]


def keep_states(final_states: Tensor, initial_states: Tensor | None) -> None:
    """Of rows without any sequence."""
    final_states.zero_() if initial_states is None else final_states.copy_(initial_states)


def chunk_scan_outputs(
    p: Problem, x: Tensor, finals: bool, varlen: bool, zeros: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Fresh y, with `zeros` cleared, final states and states of the sequences, or None for what is not wanted."""

    def states(count: int | None) -> Tensor:
        return x.new_empty((count or 0, *p.state_shape), dtype=p.state_dtype)

    y = x.new_zeros(x.shape) if zeros else torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, states(p.batch) if finals else None, states(p.num_seqs) if varlen else None


def _chunk_scan_fake(*args: Any) -> list[Tensor]:
    *inputs, return_final_states, return_varlen_states, _ = args
    p = _scan_problem(*args)
    _require_support(p, inputs[0])
    return present(*chunk_scan_outputs(p, inputs[0], return_final_states, return_varlen_states))


def _backward_outputs(
    x: Tensor,
    dt: Tensor | None,
    A: Tensor | None,
    log_decay: Tensor | None,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    """Empty gradients of x, dt, A, log_decay, B, C, D, z, dt_bias and initial_states."""
    wanted = (x, dt, A, log_decay, B, C, D, z, dt_bias, initial_states)
    return tuple(x.new_empty(0) if t is None else t.new_empty(t.shape) for t in wanted)


def _chunk_scan_backward_cpu(
    asked: Asked, dy: Tensor, dfinal_states: Tensor | None, dvarlen_states: Tensor | None, *inputs: Any
) -> tuple[Tensor, ...]:
    from .cpu_backward import Gradients, scan_backward

    p, how = asked.problem, asked.plan
    x, initial_states, seq_idx, cu_seqlens = inputs[0], *inputs[9:12]
    scan_inputs = _scan_inputs(p, *inputs)
    rows = _row_states(p, seq_idx, cu_seqlens)
    sequences = rows.sequences
    f = p.compute_dtype

    def final_gradient(ids: list[int]) -> Tensor | None:
        found = rows.gather(dfinal_states, rows.lasts, ids, f)
        if dvarlen_states is None:
            return found
        return dvarlen_states[ids].to(f) if found is None else found.to(f) + dvarlen_states[ids].to(f)

    grads = Gradients.zeros(scan_inputs)
    starts = torch.zeros(len(sequences.rows), *p.state_shape, dtype=f) if initial_states is not None else None
    scan_backward(
        scan_inputs,
        sequences,
        how,
        dy,
        lambda ids: rows.gather(initial_states, rows.firsts, ids, f),
        final_gradient,
        grads,
        starts,
    )
    dinitial = x.new_zeros(0)
    if initial_states is not None and starts is not None:
        dinitial = torch.zeros(initial_states.shape, dtype=f)
        for row, first in enumerate(rows.firsts):
            if first is not None:
                dinitial[row] = starts[first]
            elif dfinal_states is not None:
                dinitial[row] = dfinal_states[row]
    g = grads
    log_decay = g.log_decay.transpose(1, 2) if g.log_decay.numel() else g.log_decay
    found = (g.x, g.dt, g.A, log_decay, g.B, g.C, g.D, g.z, g.dt_bias, dinitial)
    outputs = _backward_outputs(*inputs)
    return tuple(out.copy_(value) if out.numel() else out for out, value in zip(outputs, found, strict=True))


def _chunk_scan_backward_fake(
    dy: Tensor, dfinal_states: Tensor | None, dvarlen_states: Tensor | None, *inputs: Any
) -> tuple[Tensor, ...]:
    _require_support(_scan_problem(*inputs), inputs[0])
    return _backward_outputs(*inputs)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *scan_inputs, return_final_states, return_varlen_states, _ = inputs
    if Device.of(inputs[0].device).kind == "cuda":
        raise UnsupportedError(NO_GRADIENT_ON_GPU)
    ctx.save_for_backward(*scan_inputs[:12])
    ctx.settings = scan_inputs[12:]
    ctx.returned = return_final_states, return_varlen_states


def _backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    """`gradients` are those of the outputs that were asked for."""
    finals, varlens = ctx.returned
    dy, dfinal, dvarlen = gradients[0], gradients[1] if finals else None, gradients[-1] if varlens else None
    saved = ctx.saved_tensors  # once: activation checkpointing unpacks them at each access
    grads = torch.ops.cute_ssd.chunk_scan_backward(dy, dfinal, dvarlen, *saved, *ctx.settings)
    wanted = zip(grads, saved[:10], strict=True)
    return (*(None if t is None else grad for grad, t in wanted), *(None,) * 9)


def _backward_problem(dy: Tensor, dfinal_states: Tensor | None, dvarlen_states: Tensor | None, *inputs: Any) -> Problem:
    return _scan_problem(*inputs)


chunk_scan = register("chunk_scan", _scan_problem, _chunk_scan_cpu, _chunk_scan_fake)
register("chunk_scan_backward", _backward_problem, _chunk_scan_backward_cpu, _chunk_scan_backward_fake)
torch.library.register_autograd("cute_ssd::chunk_scan", _backward, setup_context=_setup_context, lib=LIBRARY)


def _no_second_order(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    raise UnsupportedError(
        "The gradient of a chunk scan has no gradient of its own, but one was asked for; call backward without "
        "create_graph."
    )


torch.library.register_autograd("cute_ssd::chunk_scan_backward", _no_second_order, lib=LIBRARY)


def _packed_inputs(
    p: Problem, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, settings: tuple[Any, ...]
) -> cpu.Inputs:
    """Packed tokens as one row of a batch."""
    _, D, z, dt_bias, dt_softplus, dt_min, dt_max = settings
    gate = None if z is None else z[None]
    limit = (dt_min, dt_max)
    return cpu.Inputs(
        x[None], B[None], C[None], p.compute_dtype, None, dt[None], A, dt_bias, dt_softplus, limit, D, gate
    )


def _gather(states: Tensor, rows: list[int]) -> Tensor:
    """states[rows]; a view where it is one row."""
    return states[rows[0] : rows[0] + 1] if len(rows) == 1 else states[rows]


def _keywords(settings: tuple[Any, ...]) -> dict[str, Any]:
    names = ("chunk_size", "D", "z", "dt_bias", "dt_softplus")
    return {**dict(zip(names, settings, strict=False)), "dt_limit": tuple(settings[5:7])}


def _varlen_problem(*args: Any) -> Problem:
    *tensors, initial_states, cu_chunk_seqlens, _, return_chunk_states, state_dtype, out = args
    return problem.varlen(
        *tensors[:6],
        **_keywords(tuple(tensors[6:])),
        initial_states=initial_states,
        out=out,
        return_chunk_states=return_chunk_states,
        state_dtype=state_dtype,
        cu_chunk_seqlens=cu_chunk_seqlens,
    )


def varlen_outputs(p: Problem, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Fresh final states, and chunk states: those that no sequence needs stay zero. Empty where not wanted."""
    x, cu_chunk_seqlens, return_final_states, return_chunk_states = args[0], *args[-5:-2]
    num_seqs = p.num_seqs or 0
    nchunks = p.seqlen // p.chunk_size + num_seqs if cu_chunk_seqlens is None else cu_chunk_seqlens.shape[0] - 1
    return (
        x.new_empty((num_seqs, *p.state_shape) if return_final_states else (0,), dtype=p.state_dtype),
        x.new_zeros((nchunks, *p.state_shape) if return_chunk_states else (0,), dtype=p.state_dtype),
    )


def _chunk_scan_varlen_cpu(asked: Asked, *args: Any) -> tuple[Tensor, Tensor]:
    p = asked.problem
    query_start_loc, out = args[5], args[-1]
    initial_states, cu_chunk_seqlens, return_final_states, return_chunk_states = args[-6:-2]
    sequences = from_offsets("query_start_loc", query_start_loc, p.seqlen)
    wanted = return_chunk_states or cu_chunk_seqlens is not None  # contradicting chunks are refused in any case
    checked = chunk_ends(sequences, p.chunk_size, cu_chunk_seqlens, p.seqlen) if wanted else None
    ends = checked if return_chunk_states else None
    asked.refuse_overlap(args, ("out", len(args) - 1))
    final_states, chunk_states = map(pages.advise, varlen_outputs(p, args))
    first_row = [0]
    for mine in ends or ():
        first_row.append(first_row[-1] + len(mine))

    def chunk_state(s: int, end: int) -> Tensor:
        return chunk_states[first_row[s] + ends[s].index(end)]  # type: ignore[index]

    cpu.scan(
        _packed_inputs(p, *args[:5], settings=args[6:13]),
        sequences,
        asked.plan,
        out[None],
        None if initial_states is None else functools.partial(_gather, initial_states),
        (lambda s: [final_states[s]]) if return_final_states else None,
        ends,
        chunk_state,
    )
    return final_states, chunk_states


def _chunk_scan_varlen_fake(*args: Any) -> tuple[Tensor, Tensor]:
    p = _varlen_problem(*args)
    _require_support(p, args[0])
    return varlen_outputs(p, args)


def _inplace_problem(*args: Any) -> Problem:
    *tensors, out = args
    return problem.varlen_inplace(
        *tensors[:8],
        has_initial_state=tensors[8],
        pad_slot_id=tensors[9],
        **_keywords(tuple(tensors[10:])),
        out=out,
    )


def _chunk_scan_varlen_inplace_cpu(asked: Asked, *args: Any) -> None:
    p = asked.problem
    x, dt, A, B, C, ssm_pool, cache_indices, query_start_loc, has_initial_state, pad_slot_id = args[:10]
    out = args[-1]
    sequences = from_offsets("query_start_loc", query_start_loc, p.seqlen)
    has_tokens = [stop > start for start, stop in zip(sequences.starts, sequences.stops, strict=True)]
    slots = live_slots("cache_indices", cache_indices, pad_slot_id, ssm_pool.shape[0], has_tokens)
    asked.refuse_overlap(args, ("out", len(args) - 1), ("ssm_pool", 5))
    started = [] if has_initial_state is None else has_initial_state.tolist()

    def initial(ids: list[int]) -> Tensor | None:
        reading = [(i, slot) for i, s in enumerate(ids) if started[s] and (slot := slots[s]) is not None]
        if not reading:
            return None
        if len(reading) == len(ids):
            return _gather(ssm_pool, [slot for _, slot in reading])
        found = torch.zeros(len(ids), *p.state_shape, dtype=p.compute_dtype)
        for i, slot in reading:
            found[i] = ssm_pool[slot]
        return found

    def final(s: int) -> list[Tensor]:
        slot = slots[s]
        return [] if slot is None else [ssm_pool[slot]]

    inputs = _packed_inputs(p, x, dt, A, B, C, settings=args[10:17])
    cpu.scan(inputs, sequences, asked.plan, out[None], initial if any(started) else None, final)


def _chunk_scan_varlen_inplace_fake(*args: Any) -> None:
    _require_support(_inplace_problem(*args), args[0])


def _selective_state_update_cpu(asked: Asked, *args: Any) -> None:
    state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices, pad_slot_id, out = args
    slots = None
    if state_batch_indices is not None:
        slots = live_slots("state_batch_indices", state_batch_indices, pad_slot_id, state.shape[0], [True] * x.shape[0])
    asked.refuse_overlap(args, ("out", len(args) - 1), ("state", 0))
    cpu_decode.state_update(asked.plan, state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, slots, out)


def _selective_state_update_fake(*args: Any) -> None:
    _require_support(problem.state_update(*args), args[1])


chunk_scan_varlen = register("chunk_scan_varlen", _varlen_problem, _chunk_scan_varlen_cpu, _chunk_scan_varlen_fake)
chunk_scan_varlen_inplace = register(
    "chunk_scan_varlen_inplace", _inplace_problem, _chunk_scan_varlen_inplace_cpu, _chunk_scan_varlen_inplace_fake
)
selective_state_update = register(
    "selective_state_update", problem.state_update, _selective_state_update_cpu, _selective_state_update_fake
)
