"""The Mamba-2 functions of vLLM under its signatures, and `enable()` for an installed vLLM.

The signatures are those of vLLM's main branch in mid 2026: `mamba_chunk_scan_combined_varlen` since chunks are
described by cu_chunk_seqlens (vllm#24683, late 2025), `selective_state_update` since it takes dt_bias before z and
null_block_id for pad_slot_id (2026). `enable()` also serves versions with another order of these parameters.
"""

from contextlib import suppress

import torch
from torch import Tensor

from .. import api
from ..checks import index, require_types
from ..errors import ShapeError, UnsupportedError
from ..sequences import live_slots
from ._patching import Handle, PackagePatch, Redirect, installed

_OPS = "vllm.model_executor.layers.mamba.ops"
NULL_BLOCK_ID = 0
_NO_OUT = "out is None, expected a contiguous tensor like x that y is written to; pass torch.empty_like(x)."


def mamba_chunk_scan_combined_varlen(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    cu_seqlens: Tensor | None = None,
    cu_chunk_seqlens: Tensor | None = None,
    last_chunk_indices: Tensor | None = None,
    seq_idx: Tensor | None = None,
    out: Tensor | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_intermediate_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> Tensor:
    """SSD scan of packed sequences; y goes into `out`, the states are returned. For inference.

    Args:
        x, z: (total_len, nheads, headdim).    dt: (total_len, nheads).    A, dt_bias: (nheads,).
        B, C: (total_len, ngroups, dstate).    D: (nheads,) or (nheads, headdim).
        chunk_size: spacing of the intermediate states where cu_chunk_seqlens is None; y does not depend on it.
        cu_seqlens: (num_seqs + 1,) int offsets; sequences may be empty. None derives the sequences from
            cu_chunk_seqlens and last_chunk_indices.
        cu_chunk_seqlens: (nchunks + 1,) int offsets of the chunks, of any length, none across a sequence.
        last_chunk_indices: (num_seqs,) int, the last chunk of each sequence, -1 for an empty one.
        seq_idx: (nchunks,) int, the sequence of each chunk.
        out: contiguous, like x; required, and written.
        initial_states: (num_seqs, nheads, headdim, dstate).
        state_dtype: of the returned states; None is float32 (float64 for float64 inputs), where vLLM takes C's dtype.

    The three tensors of chunk metadata are optional, each by itself; on the CPU those given are compared with one
    another and with cu_seqlens, and a contradiction is a `ShapeError`.

    Returns:
        The state after each sequence (num_seqs, nheads, headdim, dstate), or with return_intermediate_states the
        state after each chunk (nchunks, nheads, headdim, dstate).
    """
    if out is None:
        raise ShapeError(_NO_OUT)
    chunks = {
        "cu_seqlens": (cu_seqlens, "num_seqs + 1"),
        "cu_chunk_seqlens": (cu_chunk_seqlens, "nchunks + 1"),
        "last_chunk_indices": (last_chunk_indices, "num_seqs"),
        "seq_idx": (seq_idx, "nchunks"),
    }
    require_types({"x": x}, {name: given for name, (given, _) in chunks.items()})
    for name, (given, axis) in chunks.items():
        if given is not None:
            index(name, given, x, (axis,), (None,))
    if cu_seqlens is None:
        cu_seqlens = _sequences_of_chunks(cu_chunk_seqlens, last_chunk_indices)
    if cu_seqlens.device.type == "cpu":
        _check_chunks(cu_seqlens, cu_chunk_seqlens, last_chunk_indices, seq_idx, return_intermediate_states)
    _, states = api.mamba_chunk_scan_varlen(
        x,
        dt,
        A,
        B,
        C,
        cu_seqlens,
        chunk_size=chunk_size,
        D=D,
        z=z,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
        initial_states=initial_states,
        out=out,
        return_final_states=not return_intermediate_states,
        return_chunk_states=return_intermediate_states,
        state_dtype=state_dtype,
        cu_chunk_seqlens=cu_chunk_seqlens if return_intermediate_states else None,
    )
    if return_intermediate_states and cu_chunk_seqlens is None:
        lengths = cu_seqlens.diff()
        return states[: int(((lengths + chunk_size - 1) // chunk_size).sum())]
    return states


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    z: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    dst_state_batch_indices: Tensor | None = None,
    null_block_id: int = NULL_BLOCK_ID,
    out: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    is_blackwell: bool = False,
    enable_stochastic_rounding: bool = False,
    cache_philox_rounds: int = 0,
) -> None:
    """One token for each row: y goes into `out`, the states are updated in place. For inference.

    Args:
        state, x, dt, A, B, C, D, dt_bias, z: as in `cute_ssd.selective_state_update`, expanded or not.
        state_batch_indices: (batch,) or (batch, 1) int slots to read; more rows than batch are ignored. A row whose
            slot is null_block_id gives zeros in `out` and touches no state.
        dst_state_batch_indices: slots to write, of the same shape; None writes the slots that were read.
        out: contiguous, like x; required, and written.
        is_blackwell, cache_philox_rounds: accepted, without effect.

    Raises `UnsupportedError` for speculative decoding (num_accepted_tokens, cu_seqlens, several slots for a row) and
    for stochastic rounding.
    """
    slots_of_rows = {
        "state_batch_indices": state_batch_indices,
        "dst_state_batch_indices": dst_state_batch_indices,
    }
    require_types({"state": state, "x": x}, slots_of_rows)
    reasons = [
        reason
        for reason, asked in (
            ("num_accepted_tokens (speculative decoding)", num_accepted_tokens is not None),
            ("cu_seqlens (several tokens for a row)", cu_seqlens is not None),
            ("enable_stochastic_rounding", enable_stochastic_rounding),
            ("several slots for a row in state_batch_indices", _several(state_batch_indices)),
            ("several slots for a row in dst_state_batch_indices", _several(dst_state_batch_indices)),
        )
        if asked
    ]
    if reasons:
        raise UnsupportedError(
            f"selective_state_update cannot do {', '.join(reasons)}, expected one token and one slot for each row and "
            "rounding to nearest; leave these arguments out."
        )
    if out is None:
        raise ShapeError(_NO_OUT)
    read, write = (_rows(slots, x.shape[0]) for slots in slots_of_rows.values())
    if write is None or dst_state_batch_indices is state_batch_indices:
        api.selective_state_update(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, read, null_block_id, out)
        return
    if read is None:
        raise ShapeError(
            "dst_state_batch_indices is given but state_batch_indices is None, expected both; pass the slots to read."
        )
    for name, given in (("state_batch_indices", read), ("dst_state_batch_indices", write)):
        index(name, given, x, ("batch",), (x.shape[0],))
    slots = state.shape[0]
    # Two rows may read one slot, but not write one.
    live_slots("state_batch_indices", read, null_block_id, slots, [False] * len(read))
    live = read != null_block_id
    targets = torch.where(live, write, torch.full_like(write, null_block_id))
    live_slots("dst_state_batch_indices", targets, null_block_id, slots, [True] * len(targets))
    # The rows move to a copy, whose row numbers stand for the slots; -1 is padding there.
    rows = state[torch.where(live, read, torch.zeros_like(read))]
    own = torch.where(live, torch.arange(len(read), dtype=read.dtype, device=read.device), torch.full_like(read, -1))
    api.selective_state_update(rows, x, dt, A, B, C, D, z, dt_bias, dt_softplus, own, -1, out)
    written = targets != null_block_id
    state[targets[written]] = rows[written]


def enable() -> Handle:
    """Replaces both functions in an installed vLLM, in every loaded module that has imported them (the mixers of all
    Mamba-2 models), until the handle's `disable()`; see `Handle` for nesting. It acts on this process only: call it
    in the workers of an engine, before CUDA graphs are captured.

    Raises `UnsupportedError` when vLLM is not installed or its functions have parameters unknown here.
    """
    return _patch.enable()


def _redirects() -> list[Redirect]:
    scan = installed("vLLM", f"{_OPS}.ssd_combined")
    if not hasattr(scan, "mamba_chunk_scan_combined_varlen"):
        raise UnsupportedError(
            f"the installed vLLM has no {_OPS}.ssd_combined.mamba_chunk_scan_combined_varlen, expected a version with "
            "cu_chunk_seqlens (late 2025 and after); install a newer vLLM."
        )
    found = [Redirect(scan.mamba_chunk_scan_combined_varlen, mamba_chunk_scan_combined_varlen)]
    steps = [installed("vLLM", f"{_OPS}.mamba_ssm")]
    with suppress(UnsupportedError):
        # Newer versions choose a backend in a function of the same name, which the mixers import instead.
        steps.append(installed("vLLM", f"{_OPS}.ssu_dispatch"))
    for module in steps:
        found.append(Redirect(module.selective_state_update, selective_state_update, {"pad_slot_id": "null_block_id"}))
    return found


_patch = PackagePatch(_redirects)


def _several(slots: Tensor | None) -> bool:
    return slots is not None and slots.ndim > 1 and slots.shape[1] != 1


def _rows(slots: Tensor | None, batch: int) -> Tensor | None:
    """(batch,) slots of (batch or more,) or (batch or more, 1); others as they are, to be refused."""
    if slots is None or slots.ndim not in (1, 2):
        return slots
    return slots[:batch, 0] if slots.ndim == 2 else slots[:batch]


def _sequences_of_chunks(cu_chunk_seqlens: Tensor | None, last_chunk_indices: Tensor | None) -> Tensor:
    """The (num_seqs + 1,) offsets of the sequences that end with the given chunks."""
    if cu_chunk_seqlens is None or last_chunk_indices is None:
        missing = "cu_chunk_seqlens" if cu_chunk_seqlens is None else "last_chunk_indices"
        raise ShapeError(
            f"cu_seqlens and {missing} are None, expected cu_seqlens, or else cu_chunk_seqlens and "
            "last_chunk_indices; pass cu_seqlens."
        )
    _check_range("last_chunk_indices", last_chunk_indices, cu_chunk_seqlens.shape[0] - 1)
    ends = cu_chunk_seqlens[last_chunk_indices.long() + 1]
    if ends.numel():
        # An empty sequence (-1) ends where the one before it does.
        ends = torch.where(last_chunk_indices < 0, ends.cummax(0).values, ends)
    return torch.cat([cu_chunk_seqlens.new_zeros(1), ends])


def _check_range(name: str, indices: Tensor, size: int) -> None:
    if indices.device.type == "cpu" and indices.numel() and not -1 <= int(indices.min()) <= int(indices.max()) < size:
        raise ShapeError(
            f"{name} runs from {int(indices.min())} to {int(indices.max())}, expected chunks from 0 to "
            f"{size - 1}, or -1 for an empty sequence; correct it or cu_chunk_seqlens."
        )


def _check_chunks(
    cu_seqlens: Tensor,
    cu_chunk_seqlens: Tensor | None,
    last_chunk_indices: Tensor | None,
    seq_idx: Tensor | None,
    intermediate: bool,
) -> None:
    """Raises where chunks, their last ones and their sequences contradict the sequences."""
    num_seqs = cu_seqlens.shape[0] - 1
    if last_chunk_indices is not None and last_chunk_indices.shape != (num_seqs,):
        raise ShapeError(
            f"last_chunk_indices has shape {tuple(last_chunk_indices.shape)}, expected ({num_seqs},), one for each "
            "sequence of cu_seqlens; correct one of them."
        )
    if cu_chunk_seqlens is None:
        return
    bounds, chunk_bounds = cu_seqlens.tolist(), cu_chunk_seqlens.tolist()
    nchunks = len(chunk_bounds) - 1
    if seq_idx is not None and seq_idx.shape != (nchunks,):
        raise ShapeError(
            f"seq_idx has shape {tuple(seq_idx.shape)}, expected ({nchunks},), one for each chunk of cu_chunk_seqlens; "
            "correct one of them."
        )
    if not intermediate:
        missing = set(bounds) - set(chunk_bounds)
        if missing:
            raise ShapeError(
                f"cu_chunk_seqlens has no boundary at {min(missing)}, where cu_seqlens ends a sequence, expected "
                "chunks that hold tokens of one sequence each; correct one of them."
            )
    if last_chunk_indices is not None:
        _check_range("last_chunk_indices", last_chunk_indices, nchunks)
        for s, last in enumerate(last_chunk_indices.tolist()):
            end = chunk_bounds[last + 1]
            if end != bounds[s + 1] and (last >= 0 or bounds[s] != bounds[s + 1]):
                raise ShapeError(
                    f"last_chunk_indices[{s}] is {last}, a chunk that ends at {end}, expected one that ends at "
                    f"{bounds[s + 1]} where cu_seqlens ends sequence {s}; correct one of them."
                )
    if seq_idx is not None:
        for c, s in enumerate(seq_idx.tolist()):
            if not (0 <= s < num_seqs and bounds[s] <= chunk_bounds[c] and chunk_bounds[c + 1] <= bounds[s + 1]):
                raise ShapeError(
                    f"seq_idx[{c}] is {s}, but tokens {chunk_bounds[c]} to {chunk_bounds[c + 1]} of that chunk are not "
                    "of that sequence by cu_seqlens, expected the sequence of each chunk; correct one of them."
                )
