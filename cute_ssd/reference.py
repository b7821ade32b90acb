"""The definition: the sequential SSM recurrence, one token after the other, in any float dtype.

For head h of group g = h // (nheads // ngroups), with dt after bias, softplus and limit:

    state_t = exp(A_h dt_t) state_{t-1} + dt_t x_t B_t^T        (headdim, dstate)
    y_t     = state_t C_t + D x_t,   then  y_t *= silu(z_t)

(Mamba-2, arXiv 2405.21060, eq. 1 with scalar A). This is the truth of every test: it shares no code with a backend.
Functions take the arguments of their namesakes in `cute_ssd` and compute in `dtype`; y and states come back in it.
"""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

INF = float("inf")


def _activate(
    dt: Tensor, dt_bias: Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float], dtype: torch.dtype
) -> Tensor:
    dt = dt.to(dtype)
    if dt_bias is not None:
        dt = dt + dt_bias.to(dtype)
    if dt_softplus:
        dt = softplus(dt)
    return dt.clamp(*dt_limit)


def recurrence(
    x: Tensor,
    scale: Tensor,
    log_decay: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One sequence per row. x, z (batch, seqlen, nheads, headdim); scale, log_decay (batch, seqlen, nheads);
    B, C (batch, seqlen, ngroups, dstate); state (batch, nheads, headdim, dstate); all of one dtype.
    Returns y like x and the state after the last token."""
    heads_per_group = x.shape[2] // B.shape[2]
    y = torch.zeros_like(x)
    for t in range(x.shape[1]):
        B_t = B[:, t].repeat_interleave(heads_per_group, dim=1)
        C_t = C[:, t].repeat_interleave(heads_per_group, dim=1)
        step = scale[:, t, :, None] * x[:, t]
        state = state * log_decay[:, t].exp()[..., None, None] + step[..., None] * B_t[:, :, None, :]
        y[:, t] = (state @ C_t[..., None]).squeeze(-1)
    if D is not None:
        y = y + x * (D[:, None] if D.ndim == 1 else D)
    if z is not None:
        y = y * silu(z)
    return y, state


def ssd_chunk_scan(
    x: Tensor,
    log_decay: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    initial_states: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """y and final states of `cute_ssd.ssd_chunk_scan`."""
    batch, _, nheads, headdim = x.shape
    state = _start(initial_states, (batch, nheads, headdim, B.shape[-1]), dtype)
    decay = log_decay.to(dtype).transpose(1, 2)
    return recurrence(
        x.to(dtype), torch.ones_like(decay), decay, B.to(dtype), C.to(dtype), state, _opt(D, dtype), _opt(z, dtype)
    )


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, INF),
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """y, final states and, with cu_seqlens, varlen states of `cute_ssd.mamba_chunk_scan_combined`."""
    batch, seqlen, nheads, headdim = x.shape
    dt = _activate(dt, dt_bias, dt_softplus, dt_limit, dtype)
    log_decay = dt * A.to(dtype)
    x, B, C, D, z = x.to(dtype), B.to(dtype), C.to(dtype), _opt(D, dtype), _opt(z, dtype)
    start = _start(initial_states, (batch, nheads, headdim, B.shape[-1]), dtype)
    y, finals, varlen = torch.zeros_like(x), start.clone(), None
    for row in range(batch):
        if cu_seqlens is not None:
            bounds = cu_seqlens.tolist()
            varlen = x.new_zeros(len(bounds) - 1, *start.shape[1:])
        elif seq_idx is not None:
            ids = seq_idx[row].tolist()
            bounds = [0, *(t for t in range(1, seqlen) if ids[t] != ids[t - 1]), seqlen]
        else:
            bounds = [0, seqlen]
        for s, (low, high) in enumerate(pairwise(bounds)):
            part = (slice(row, row + 1), slice(low, high))
            state = start[row : row + 1] if s == 0 else torch.zeros_like(start[row : row + 1])
            y[part], state = recurrence(
                x[part], dt[part], log_decay[part], B[part], C[part], state, D, None if z is None else z[part]
            )
            if high > low:
                finals[row] = state[0]
            if varlen is not None:
                varlen[s] = state[0]
    return y, finals, varlen


def mamba_chunk_scan_varlen(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    query_start_loc: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, INF),
    initial_states: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """y and the final state of each packed sequence of `cute_ssd.mamba_chunk_scan_varlen`."""
    bounds = query_start_loc.tolist()
    start = _start(initial_states, (len(bounds) - 1, x.shape[1], x.shape[2], B.shape[-1]), dtype)
    y, finals = torch.zeros_like(x, dtype=dtype), start.clone()
    for s, (low, high) in enumerate(pairwise(bounds)):
        part = slice(low, high)
        y_s, state, _ = mamba_chunk_scan_combined(
            x[None, part],
            dt[None, part],
            A,
            B[None, part],
            C[None, part],
            D,
            None if z is None else z[None, part],
            dt_bias,
            start[s : s + 1],
            dt_softplus=dt_softplus,
            dt_limit=dt_limit,
            dtype=dtype,
        )
        y[part], finals[s] = y_s[0], state[0]
    return y, finals


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
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """y and the new state of one step; state (batch, nheads, headdim, dstate) is not written. A, dt, D and dt_bias per
    head or in full, as in `cute_ssd.selective_state_update`."""
    _, nheads, headdim, _ = state.shape
    if dt_bias is not None and dt_bias.ndim == 1 and dt.ndim == 3:
        dt_bias = dt_bias[:, None]
    if dt_bias is not None and dt_bias.ndim == 2 and dt.ndim == 2:
        dt = dt[..., None].expand(-1, -1, headdim)
    step = _activate(dt, dt_bias, dt_softplus, (-INF, INF), dtype)
    step = (step[..., None] if step.ndim == 2 else step)[..., None]  # (batch, nheads, headdim | 1, 1)
    decay = (step * (A.to(dtype)[:, None, None] if A.ndim == 1 else A.to(dtype))).exp()
    x, C = x.to(dtype), C.to(dtype)
    B_heads = B.to(dtype).repeat_interleave(nheads // B.shape[1], dim=1)[:, :, None, :]
    C_heads = C.repeat_interleave(nheads // C.shape[1], dim=1)[:, :, None, :]
    state = state.to(dtype) * decay + step * x[..., None] * B_heads
    y = (state * C_heads).sum(-1)
    if D is not None:
        y = y + x * (D[:, None] if D.ndim == 1 else D).to(dtype)
    if z is not None:
        y = y * silu(z.to(dtype))
    return y, state


def _opt(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _start(states: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype) if states is None else states.to(dtype).clone()
