"""The CPU backend's decode step: the recurrence for one token, block by block, so that a state is read from memory
once, used from the cache and written once."""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from .cpu import of_heads, single_rows, times_vector
from .plan import Plan


def state_update(
    plan: Plan,
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    slots: list[int | None] | None,
    out: Tensor,
) -> None:
    """One token per row. Shapes as in `problem.state_update`; `slots` names the state of each row, None its padding."""
    f, (batch, H, P) = plan.problem.compute_dtype, x.shape
    xf = x.to(f)
    decay, step = _step(x, dt, A, dt_bias, dt_softplus, f)
    dx = (xf * step)[..., None]  # (batch, H, P, 1)
    B_heads, C_heads = (of_heads(t.to(f), H) for t in (B, C))
    y = torch.empty(batch, H, P, dtype=f)
    live = list(range(batch)) if slots is None else [b for b, slot in enumerate(slots) if slot is not None]
    for b0 in range(0, len(live), plan.rows):
        rows: slice | Tensor = slice(b0, min(b0 + plan.rows, batch))
        where: slice | Tensor = rows
        if slots is not None:
            chosen = live[b0 : b0 + plan.rows]
            rows, where = torch.tensor(chosen), torch.tensor([slots[b] for b in chosen])
        for h0 in range(0, H, plan.heads):
            heads = slice(h0, h0 + plan.heads)
            block = state[where, heads].to(f)
            block *= decay[rows, heads]
            block.addcmul_(dx[rows, heads], B_heads[rows, heads, None])
            y[rows, heads] = times_vector(block, C_heads[rows, heads], single_rows(plan) == 1)
            if slots is not None or block.dtype != state.dtype:
                state[where, heads] = block.to(state.dtype)
    if D is not None:
        y += xf * (D[:, None] if D.ndim == 1 else D).to(f)
    if z is not None:
        y *= z.to(f) * torch.sigmoid(z.to(f))
    if slots is not None and len(live) < batch:
        y[[b for b, slot in enumerate(slots) if slot is None]] = 0
    out.copy_(y)


def _step(
    x: Tensor, dt: Tensor, A: Tensor, dt_bias: Tensor | None, dt_softplus: bool, f: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(exp(dt A) (batch, H, P or 1, N or 1), dt (batch, H, P or 1)): expanded axes are computed once."""
    dt = _once(dt if dt.ndim == 3 else dt[..., None], -1).to(f)
    if dt_bias is not None:
        dt = dt + _once(dt_bias if dt_bias.ndim == 2 else dt_bias[:, None], -1).to(f)
    if dt_softplus:
        dt = softplus(dt)
    A = A[:, None, None] if A.ndim == 1 else A
    return (dt[..., None] * _once(_once(A, -1), -2).to(f)).exp_(), dt


def _once(t: Tensor, axis: int) -> Tensor:
    """An expanded axis as its one value."""
    return t.narrow(axis, 0, 1) if t.stride(axis) == 0 else t
