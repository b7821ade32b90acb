"""Gradient of the CPU backend's scan. Memory is linear in the sequence: the forward sweep keeps one state per step of
`Plan.tiles` tiles, everything else is computed again.

With g the gradient of y before skip and gate and S' the gradient of the state after a tile, for one head

    d(dt x) = (scores ∘ decay)ᵀ g + decay_to_last ∘ (B S'ᵀ)
    dC      = dscores B + (exp(dA_cumsum) ∘ g) S          dscores = Σ over the group's heads of decay ∘ (g (dt x)ᵀ)
    dB      = dscoresᵀ C + (decay_to_last ∘ dt x) S'
    S       = exp(dA_cumsum[last]) S' + (exp(dA_cumsum) ∘ g)ᵀ C

and every term of the output that holds exp(dA_cumsum[i] - dA_cumsum[j]) adds its value to d dA_cumsum[i] and takes it
from d dA_cumsum[j].
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .cpu import (
    Index,
    InitialStates,
    Inputs,
    Tiles,
    Window,
    Workspace,
    decay,
    fresh,
    load,
    output,
    pass_states,
    raw_dt,
    scaled_x,
    steps,
    two_tokens,
)
from .plan import Plan
from .sequences import Sequences


class Gradients(NamedTuple):
    """Of the inputs of the same names, in the accumulation dtype; `log_decay` is (batch, seqlen, nheads).

    Either log_decay or dt, dt_bias and A is filled; all start at zero and are added to or, per token, written once."""

    x: Tensor
    B: Tensor
    C: Tensor
    log_decay: Tensor
    dt: Tensor
    A: Tensor
    dt_bias: Tensor
    D: Tensor
    z: Tensor

    @classmethod
    def zeros(cls, inputs: Inputs) -> "Gradients":
        def like(t: Tensor | None) -> Tensor:
            return torch.zeros(0 if t is None else t.shape, dtype=inputs.dtype)

        i = inputs
        return cls(*(like(t) for t in (i.x, i.B, i.C, i.log_decay, i.dt, i.A, i.dt_bias, i.D, i.z)))


def scan_backward(
    inputs: Inputs,
    sequences: Sequences,
    plan: Plan,
    dy: Tensor,
    initial: InitialStates,
    final_gradient: InitialStates,
    grads: Gradients,
    dinitial: Tensor | None,
) -> None:
    """Adds to `grads`. dy like y; `final_gradient(ids)` gives the gradient (n, nheads, headdim, dstate) of the states
    that sequences `ids` end in, None for zeros; `dinitial` (num_seqs, ...) takes that of the states they start from."""
    for _, ids in sequences.by_length():
        for i in range(0, len(ids), plan.rows):
            some = ids[i : i + plan.rows]
            dstate = _backward_of(
                inputs, Window.over(sequences, some), some, sequences, plan, dy, initial, final_gradient, grads
            )
            if dinitial is not None and dstate is not None:
                dinitial[some] = dstate


def _backward_of(
    inputs: Inputs,
    window: Window,
    ids: list[int],
    sequences: Sequences,
    plan: Plan,
    dy: Tensor,
    initial: InitialStates,
    final_gradient: InitialStates,
    grads: Gradients,
) -> Tensor | None:
    length = sequences.stops[ids[0]] - sequences.starts[ids[0]]
    start, dstate = initial(ids), final_gradient(ids)
    state = None if start is None else fresh(start, inputs.dtype)
    workspace = Workspace(inputs.dtype)
    kept: list[tuple[tuple[int, int, int], Tensor | None]] = []
    for step in steps(length, plan.tiles):
        kept.append((step, None if state is None else state.clone()))
        _, state = pass_states(load(inputs, window, *step, workspace), state, workspace)
    if dstate is not None:
        dstate = fresh(dstate, inputs.dtype)
    for step, before in reversed(kept):
        t0, K, Q = step
        tiles = load(inputs, window, t0, K, Q, workspace)
        dstate = _backward_of_step(inputs, window.at(t0, t0 + K * Q), tiles, before, dy, dstate, grads, workspace)
    return dstate


def _backward_of_step(
    inputs: Inputs,
    where: Index,
    tiles: Tiles,
    state: Tensor | None,
    dy: Tensor,
    dstate: Tensor | None,
    grads: Gradients,
    workspace: Workspace,
) -> Tensor:
    """Gradients of one step's tokens; returns that of the state before it."""
    K, n, H, Q, P = tiles.x.shape
    g = _undo_finish(inputs, where, tiles, state, dy, grads, workspace)
    dx, decays = scaled_x(tiles, workspace), decay(tiles, workspace)
    dmixed = torch.bmm(g.view(-1, Q, P), dx.view(-1, Q, P).transpose(1, 2)).view(K, n, H, Q, Q).tril_()
    dmixed *= decays
    G = tiles.B.shape[2]
    grouped = (K, n, G, H // G, Q, Q)
    scores = tiles.scores[:, :, :, None]  # of all heads of a group
    dscores = dmixed.view(grouped).sum(3)
    # What token i has of token j went through the decays of tokens j + 1 to i: that of token t has the sum over
    # j < t <= i. Sums of rows and columns would do with less, but their differences keep no digit of the small
    # gradients beside a large step.
    decayed = (dmixed.view(grouped) * scores).view(-1, Q)
    earlier = torch.ones(Q, Q, dtype=g.dtype).triu_(1)
    dA = torch.mm(decayed, earlier).view(K, n, H, Q, Q).tril_().sum(-2)
    mixed = decays.view(grouped) * scores
    ddx = torch.bmm(mixed.view(-1, Q, Q).transpose(1, 2), g.view(-1, Q, P)).view(K, n, H, Q, P)
    dB, dC = dscores.transpose(3, 4) @ tiles.C, dscores @ tiles.B
    dstate = _state_backward(tiles, dx, state, g, dstate, dA, ddx, dB, dC, workspace)

    grads.B[where] = _tokens(dB, tiles)
    grads.C[where] = _tokens(dC, tiles)
    grads.x[where] += _tokens(ddx if tiles.dt is None else ddx * tiles.dt[..., None], tiles)
    _decay_backward(inputs, where, tiles, dA, (ddx * tiles.x).sum(-1), grads)
    return dstate


def _state_backward(
    tiles: Tiles,
    dx: Tensor,
    state: Tensor | None,
    g: Tensor,
    dstate: Tensor | None,
    dA: Tensor,
    ddx: Tensor,
    dB: Tensor,
    dC: Tensor,
    workspace: Workspace,
) -> Tensor:
    """What passes through the states: adds to dA, ddx (K, n, H, Q, ...), dB, dC (K, n, G, Q, N)."""
    K, n, H, Q, P = g.shape
    G, N = tiles.B.shape[2], tiles.B.shape[4]
    before: list[Tensor | None] = []
    pass_states(tiles, state, workspace, True, lambda _, state: before.append(None if state is None else state.clone()))
    if dstate is None:
        dstate = torch.zeros(n, H, P, N, dtype=g.dtype)
    for k in reversed(range(K)):
        B, C = (t[k].view(n * G, Q, N) for t in (tiles.B, tiles.C))
        # What the tile adds to the state after it.
        from_next = torch.bmm(B, dstate.view(n * G, -1, N).transpose(1, 2)).view(n, G, Q, H // G, P)
        from_next = from_next.transpose(2, 3).reshape(n, H, Q, P) * tiles.to_end[k, ..., None]
        share = (from_next * dx[k]).sum(-1)
        ddx[k] += from_next
        dA[k, ..., 1:] += share[..., :-1].cumsum(-1)  # through the decays of the tokens behind it
        weighted = _columns(dx[k] * tiles.to_end[k, ..., None], G)
        dB[k] += torch.bmm(weighted, dstate.view(n * G, -1, N)).view(n, G, Q, N)
        # What the state before the tile gives to its tokens and to the state after it.
        decayed = _columns(g[k] * tiles.from_start[k, ..., None], G)
        keep, old = tiles.from_start[k, ..., -1], before[k]
        if old is not None:
            flat = old.view(n * G, -1, N)
            y_off = torch.bmm(C, flat.transpose(1, 2))
            share = (decayed * y_off).view(n, G, Q, H // G, P).sum(-1).transpose(2, 3).reshape(n, H, Q)
            share[..., -1] += (dstate * old).sum((-1, -2)) * keep
            dA[k] += share.flip(-1).cumsum(-1).flip(-1)  # through the decays up to it
            dC[k] += torch.bmm(decayed, flat).view(n, G, Q, N)
        dstate = (
            (dstate * keep[..., None, None]).view(n * G, -1, N).baddbmm_(decayed.transpose(1, 2), C).view(n, H, P, N)
        )
    return dstate


def _undo_finish(
    inputs: Inputs,
    where: Index,
    tiles: Tiles,
    state: Tensor | None,
    dy: Tensor,
    grads: Gradients,
    workspace: Workspace,
) -> Tensor:
    """Through the gate and the skip: the gradient (K, n, H, Q, P) of y_diag + y_off, contiguous."""
    K, n, H, Q, P = tiles.x.shape
    g = dy[where].to(inputs.dtype)
    x = inputs.x[where].to(inputs.dtype)
    D = None if inputs.D is None else inputs.D.to(inputs.dtype)
    if D is not None and D.ndim == 1:
        D = D[:, None]
    if inputs.z is not None:
        z = inputs.z[where].to(inputs.dtype)
        gate = torch.sigmoid(z)
        products, _ = pass_states(tiles, None if state is None else state.clone(), workspace, True)
        y = torch.empty(n, K * Q, H, P, dtype=inputs.dtype)
        output(tiles, products, y, workspace)
        y = y[:, : tiles.tokens]
        if D is not None:
            y = y + x * D
        grads.z[where] = g * y * (gate + z * gate * (1 - gate))
        g = g * z * gate
    if D is not None:
        dD = (g * x).sum((0, 1))
        grads.D.add_(dD.sum(-1) if inputs.D.ndim == 1 else dD)  # type: ignore[union-attr]
        grads.x[where] = g * D
    return torch.empty(K, n, H, Q, P, dtype=inputs.dtype).copy_(
        two_tokens(g).unflatten(1, (K, Q)).permute(1, 0, 3, 2, 4)
    )


def _decay_backward(
    inputs: Inputs,
    where: Index,
    tiles: Tiles,
    dA: Tensor,
    ddt: Tensor,
    grads: Gradients,
) -> None:
    """Through dA = dt A and dt = limit(softplus(dt + dt_bias)). dA, ddt (K, n, H, Q)."""
    if tiles.dt is None or inputs.A is None:
        grads.log_decay[where] = _tokens(dA, tiles)
        return
    grads.A.add_((dA * tiles.dt).sum((0, 1, 3)))
    ddt = _tokens(ddt + dA * inputs.A.to(inputs.dtype)[:, None], tiles)
    raw = raw_dt(inputs, where)
    active = torch.nn.functional.softplus(raw) if inputs.dt_softplus else raw
    low, high = inputs.dt_limit
    ddt = ddt * ((active >= low) & (active <= high))
    if inputs.dt_softplus:
        ddt = ddt * torch.where(raw > 20, 1.0, torch.sigmoid(raw))
    grads.dt[where] = ddt
    if inputs.dt_bias is not None:
        grads.dt_bias.add_(ddt.sum((0, 1)))


def _tokens(t: Tensor, tiles: Tiles) -> Tensor:
    """(K, n, H, Q) or (K, n, H, Q, P) -> (n, tokens, H) or (n, tokens, H, P)."""
    return t.transpose(2, 3).transpose(0, 1).flatten(1, 2)[:, : tiles.tokens]


def _columns(t: Tensor, ngroups: int) -> Tensor:
    """(n, H, Q, P) -> (n G, Q, R P) contiguous."""
    n, H, Q, P = t.shape
    return t.view(n, ngroups, H // ngroups, Q, P).transpose(2, 3).reshape(n * ngroups, Q, -1)
