"""The CPU backend: the chunked SSD algorithm as matrix products on torch tensors, memory linear in the sequence.

A sequence is cut into tiles of `plan.TILE` tokens, whatever the caller's chunk_size. Within a tile

    y_diag = (scores ∘ decay) · (dt x)      scores = C Bᵀ, once per group
    y_off  = exp(dA_cumsum) ∘ (C · stateᵀ)
    state  = exp(dA_cumsum[last]) state + (decay_to_last ∘ dt x)ᵀ · B

Several tiles, rows and heads are worked on at once (`Plan.tiles`, `.rows`, `.heads`), their large arrays in parts that
stay in the caches (`Tiles.parts`); only the state passes from tile to tile. A sequence is always cut from its own start
and what the products of a tile read lies as in fresh contiguous buffers, so its bits do not depend on what else is in
the call.

Note [Decays]: dA_cumsum is summed and subtracted in fp64, since after one huge step fp32 has no digits left for the
small ones; the differences are rounded to the compute dtype before exp. A decay below tiny/eps of that dtype
becomes 0, so that no product is denormal (those cost a hundred times a normal one), and steps below DECAY_FLOOR are
raised to it (their exp is 0 either way), so that -inf cannot make inf - inf. Above the diagonal a difference may be
large and positive: its exp is kept finite, and the scores there are 0.

Note [Two tokens]: a tile of one token would make its products matrix-vector ones, whose bits depend in BLAS on how many
there are in the call. `load` adds a token of zeros, which changes neither state nor output.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from .plan import CACHED_HEAD_TILES, STATE_BLOCK_BYTES, TILE, Plan, useful_flops
from .sequences import Sequences

__all__ = ["TILE", "Inputs", "scan", "useful_flops"]

DECAY_FLOOR = -1000.0
SINGLES = 64  # sequences of one token side by side: what they need besides their states is small


# Rows and tokens of a (batch, seqlen, ...) tensor.
Index = tuple[slice | Tensor, slice | Tensor]


class Inputs(NamedTuple):
    """What a scan reads. x, z (batch, seqlen, nheads, headdim); dt, log_decay (batch, seqlen, nheads);
    B, C (batch, seqlen, ngroups, dstate); A, dt_bias (nheads,); D (nheads,) or (nheads, headdim)."""

    x: Tensor
    B: Tensor
    C: Tensor
    dtype: torch.dtype  # of the accumulation
    log_decay: Tensor | None = None  # else dt and A
    dt: Tensor | None = None
    A: Tensor | None = None
    dt_bias: Tensor | None = None
    dt_softplus: bool = False
    dt_limit: tuple[float, float] = (0.0, math.inf)
    D: Tensor | None = None
    z: Tensor | None = None

    def heads(self, h0: int, h1: int) -> "Inputs":
        """The part that concerns heads [h0, h1), which are whole groups or lie in one group."""
        per_group = self.x.shape[2] // self.B.shape[2]
        groups = slice(h0 // per_group, (h1 - 1) // per_group + 1)
        last = slice(h0, h1)

        def cut(t: Tensor | None) -> Tensor | None:
            return None if t is None else t[..., last]

        return self._replace(
            x=self.x[:, :, last],
            B=self.B[:, :, groups],
            C=self.C[:, :, groups],
            log_decay=cut(self.log_decay),
            dt=cut(self.dt),
            A=cut(self.A),
            dt_bias=cut(self.dt_bias),
            D=None if self.D is None else self.D[last],
            z=None if self.z is None else self.z[:, :, last],
        )


class Window(NamedTuple):
    """Sequences of equal length side by side: reads and writes tokens [t0, t1) of each."""

    rows: slice | Tensor
    starts: int | Tensor

    @classmethod
    def over(cls, sequences: Sequences, ids: list[int]) -> "Window":
        rows, starts = [sequences.rows[s] for s in ids], [sequences.starts[s] for s in ids]
        if len(ids) == 1 or (rows == list(range(rows[0], rows[0] + len(ids))) and len(set(starts)) == 1):
            return cls(slice(rows[0], rows[0] + len(ids)), starts[0])
        return cls(torch.tensor(rows)[:, None], torch.tensor(starts)[:, None])

    def at(self, t0: int, t1: int) -> Index:
        if isinstance(self.starts, int):
            return self.rows, slice(self.starts + t0, self.starts + t1)
        return self.rows, self.starts + torch.arange(t0, t1)


class Workspace:
    """Scratch tensors of one call, by name, used again from step to step: fresh memory costs more than the arithmetic
    done in it. A name's next `empty` ends the life of its last one."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._named: dict[str, Tensor] = {}

    def empty(self, name: str, *shape: int) -> Tensor:
        found = self._named.get(name)
        if found is None or found.numel() < math.prod(shape):
            self._named[name] = found = torch.empty(shape, dtype=self.dtype)
        return found if found.shape == shape else found.view(-1)[: math.prod(shape)].view(shape)


class Tiles(NamedTuple):
    """K tiles of Q tokens for n sequences, H heads in G groups of R: operands, and decays in the compute dtype."""

    x: Tensor  # (K, n, H, Q, P), a view of any strides
    B: Tensor  # (K, n, G, Q, N) contiguous
    C: Tensor  # (K, n, G, Q, N) contiguous
    scores: Tensor  # (K, n, G, Q, Q) = C Bᵀ, zero above the diagonal
    dt: Tensor | None  # (K, n, H, Q) after bias, softplus and limit; None with log_decay
    dA_cumsum: Tensor  # (K, n, H, Q) fp64
    reach: float  # bounds the exponents of the decays
    from_start: Tensor  # (K, n, H, Q) = exp(dA_cumsum)
    to_end: Tensor  # (K, n, H, Q) = exp(dA_cumsum[last] - dA_cumsum)
    state_factor: Tensor  # (K, n, G, Q, R, 1) = dt to_end: of x on its way into the state
    output_factor: Tensor  # (K, n, G, Q, R, 1) = from_start: of the state on its way into y
    tokens: int  # K Q, or 1 where a second token of zeros was added

    def parts(self) -> Iterator[tuple[int, "Tiles"]]:
        """(first token, tiles) of as many tiles as the caches hold."""
        K, n, H, Q, _ = self.x.shape
        size = max(1, CACHED_HEAD_TILES // (n * H))
        if size >= K:
            yield 0, self
            return
        for k in range(0, K, size):
            part = Tiles(*(t[k : k + size] if isinstance(t, Tensor) else t for t in self))  # type: ignore[arg-type]
            yield k * Q, part._replace(tokens=part.x.shape[0] * Q)


InitialStates = Callable[[list[int]], Tensor | None]
FinalStates = Callable[[int], list[Tensor]]
ChunkStates = Callable[[int, int], Tensor]


def scan(
    inputs: Inputs,
    sequences: Sequences,
    plan: Plan,
    y: Tensor,
    initial: InitialStates | None,
    final: FinalStates | None,
    chunk_ends: list[list[int]] | None = None,
    chunk_state: ChunkStates | None = None,
) -> None:
    """Writes the rows of `y` (batch, seqlen, nheads, headdim) that belong to a sequence.

    `initial(ids)` gives the states (n, nheads, headdim, dstate) that sequences `ids` start from, None for zeros, from
    which all start without `initial`. `final(s)` gives the tensors (nheads, headdim, dstate) that take the last state
    of sequence s, which may be where its initial one is read. With `chunk_ends` (token counts per sequence)
    `chunk_state(s, end)` is that for the one after each.
    """
    workspace = Workspace(inputs.dtype)
    for ids, ends in _side_by_side(sequences, plan, chunk_ends):
        window = Window.over(sequences, ids)
        homes = [[] if final is None else final(s) for s in ids]
        length = sequences.stops[ids[0]] - sequences.starts[ids[0]]
        inside: dict[int, list[Tensor]] = {end: [] for end in ends if end != length}
        if chunk_state is not None and length in ends:
            homes[0].append(chunk_state(ids[0], length))
        if length == 1:
            _one_token(inputs, window, ids, initial, homes, plan, y, workspace)
        else:
            start = None if initial is None else initial(ids)
            last = _tokens(inputs, window, start, plan, any(homes), y, length, inside, workspace)
            if last is not None:
                _bring_home(homes, last)
        if chunk_state is not None:
            for end, parts in inside.items():
                chunk_state(ids[0], end).copy_(torch.cat(parts, 1)[0])


def _bring_home(homes: list[list[Tensor]], states: Tensor) -> None:
    """Row by row: faster than indexing for rows as large as states."""
    if not any(homes):
        return
    for tensors, state in zip(homes, states, strict=True):
        for tensor in tensors:
            tensor.copy_(state)


def _tokens(
    inputs: Inputs,
    window: Window,
    start: Tensor | None,
    plan: Plan,
    keep: bool,
    y: Tensor,
    length: int,
    inside: dict[int, list[Tensor]],
    workspace: Workspace,
) -> Tensor | None:
    """Sequences of `length` tokens side by side; the states after them if `keep`, and those `inside` them."""
    ends, stops = list(inside), []
    for h0, h1 in head_blocks(plan):
        part = inputs.heads(h0, h1)
        state = None if start is None else fresh(start[:, h0:h1], inputs.dtype)
        for t0, K, Q in steps(length, plan.tiles):
            for offset, tiles in load(part, window, t0, K, Q, workspace).parts():
                first, stop = t0 + offset, t0 + offset + tiles.tokens
                visit = partial(_collect, tiles, first, ends, inside) if ends else None
                products, state = pass_states(tiles, state, workspace, not keep and stop == length, visit)
                _write(part, window.at(first, stop), tiles, products, y[:, :, h0:h1], workspace)
        stops.append(state)
    if not keep:
        return None
    if not length:
        n = inputs.x[window.at(0, 0)].shape[0]
        return torch.zeros(n, *plan.problem.state_shape, dtype=inputs.dtype) if start is None else start
    return stops[0] if len(stops) == 1 else torch.cat([state for state in stops if state is not None], 1)


def _one_token(
    inputs: Inputs,
    window: Window,
    ids: list[int],
    initial: InitialStates | None,
    homes: list[list[Tensor]],
    plan: Plan,
    y: Tensor,
    workspace: Workspace,
) -> None:
    """Sequences of one token: the recurrence itself, which reads a state once and writes it where it belongs."""
    where, f = window.at(0, 1), inputs.dtype
    x = inputs.x[where][:, 0].to(f)
    dt, dA = discretise(inputs, where)
    decay = exp_(dA[:, 0].clamp(min=DECAY_FLOOR).to(f))[..., None, None]
    dx = x if dt is None else x * dt[:, 0, :, None]
    B, C = (t[where][:, 0].to(f) for t in (inputs.B, inputs.C))
    result = dx * of_heads((B * C).sum(-1, keepdim=True), x.shape[1])
    B, C = of_heads(B, x.shape[1]), of_heads(C, x.shape[1])
    operands = decay, dx[..., None], B[:, :, None], C, result
    if initial is None and (block := _as_one(homes)) is not None and block.dtype == f:
        torch.mul(*operands[1:3], out=block)
        homes = []
    rows = single_rows(plan)
    touched = initial is not None or any(homes)
    parts = zip(*(t.split(rows) for t in operands), strict=True) if touched else ()
    for i, (keep, column, row, vector, found) in enumerate(parts):
        some = slice(i * rows, i * rows + len(keep))
        start, takers = None if initial is None else initial(ids[some]), homes[some]
        if start is not None:
            start = start.to(f)
            found.addcmul_(keep[..., 0], times_vector(start, vector, rows == 1))
        if not any(takers):
            continue
        home = len(takers) == 1 and takers[0][0].dtype == f
        state = takers[0].pop()[None] if home else workspace.empty("state", len(takers), *plan.problem.state_shape)
        if start is None:
            torch.mul(column, row, out=state)
        elif start.data_ptr() == state.data_ptr():  # where its strides differ for one row only, torch sees an overlap
            state.mul_(keep).addcmul_(column, row)
        else:
            torch.mul(start, keep, out=state).addcmul_(column, row)
        _bring_home(takers, state)
    y[where] = _skip_and_gate(inputs, where, result[:, None]).to(y.dtype)


def of_heads(t: Tensor, nheads: int) -> Tensor:
    """(n, G, ...) -> (n, nheads, ...); a view where there is one group."""
    n, G, *rest = t.shape
    return t.expand(n, nheads, *rest) if G == 1 else t.repeat_interleave(nheads // G, dim=1)


def _as_one(homes: list[list[Tensor]]) -> Tensor | None:
    """All states where there is one for each sequence and they lie one behind the other. Two threads that write fresh
    memory should not meet at one page at a time, as they do state by state."""
    if any(len(tensors) != 1 for tensors in homes):
        return None
    first = homes[0][0]
    memory, place = first.untyped_storage()._cdata, first.data_ptr()
    for i, (tensor,) in enumerate(homes):
        if tensor.untyped_storage()._cdata != memory or tensor.data_ptr() != place + i * first.nbytes:
            return None
    return first.as_strided((len(homes), *first.shape), (first.numel(), *first.stride()))


def single_rows(plan: Plan) -> int:
    """How many states are worked on at once where each is touched once."""
    return max(1, STATE_BLOCK_BYTES // plan.problem.state_bytes)


def times_vector(state: Tensor, vector: Tensor, one_row: bool) -> Tensor:
    """state (n, H, P, N) times vector (n, H, N), (n, H, P). The bits of a BLAS product of vectors depend on how many
    there are, so that it serves only where rows always come one by one."""
    if not one_row:
        return (state * vector[:, :, None]).sum(-1)
    n, H, P, N = state.shape
    return torch.bmm(vector.reshape(-1, 1, N), state.reshape(-1, P, N).transpose(1, 2)).view(n, H, P)


def _collect(
    tiles: Tiles, t0: int, ends: list[int], inside: dict[int, list[Tensor]], k: int, state: Tensor | None
) -> None:
    """Appends the states after the chunk ends from the start of tile k to before its end; `state` is that before it."""
    first = t0 + k * tiles.B.shape[3]
    for end in ends[bisect_left(ends, first) : bisect_left(ends, first + tiles.B.shape[3])]:
        if end > first:
            inside[end].append(_state_inside(tiles, k, state, end - first))
        elif state is not None:
            inside[end].append(state.clone())


def _side_by_side(
    sequences: Sequences, plan: Plan, chunk_ends: list[list[int]] | None
) -> Iterator[tuple[list[int], list[int]]]:
    """(sequences of one length, their chunk ends); with chunk ends one sequence at a time."""
    for length, ids in sequences.by_length():
        rows = max(single_rows(plan), SINGLES) if length == 1 else plan.rows
        if chunk_ends is not None:
            yield from (([s], chunk_ends[s]) for s in ids)
        else:
            yield from ((ids[i : i + rows], []) for i in range(0, len(ids), rows))


def head_blocks(plan: Plan) -> Iterator[tuple[int, int]]:
    """Ranges of `plan.heads` heads that are whole groups or stay within one."""
    per_group = plan.problem.nheads // plan.problem.ngroups
    span = per_group if plan.heads < per_group else plan.problem.nheads
    for s in range(0, plan.problem.nheads, span):
        for h0 in range(s, s + span, plan.heads):
            yield h0, min(h0 + plan.heads, s + span)


def steps(length: int, tiles: int) -> Iterator[tuple[int, int, int]]:
    """(first token, number of tiles, tokens per tile): full tiles up to `tiles` at once, then the rest as one tile."""
    full = length // TILE
    for k in range(0, full, tiles):
        yield k * TILE, min(tiles, full - k), TILE
    if length % TILE:
        yield full * TILE, 1, length % TILE


def load(inputs: Inputs, window: Window, t0: int, K: int, Q: int, workspace: Workspace) -> Tiles:
    """Reads K tiles of Q tokens from token t0 of each sequence and computes what is small beside x."""
    where, f = window.at(t0, t0 + K * Q), inputs.dtype
    x = two_tokens(inputs.x[where])
    dt, dA = (None if t is None else two_tokens(t) for t in discretise(inputs, where))
    tokens, Q = K * Q, max(Q, 2)
    n, _, H, P = x.shape
    if x.dtype != f:
        x = workspace.empty("x", n, K * Q, H, P).copy_(x)
    x = x.view(n, K, Q, H, P).permute(1, 0, 3, 2, 4)
    dt, dA = (None if t is None else t.view(n, K, Q, H).permute(1, 0, 3, 2).contiguous() for t in (dt, dA))
    dA_cumsum = dA.clamp(min=DECAY_FLOOR).cumsum(3)  # type: ignore[union-attr]
    G, N = inputs.B.shape[2:]
    B, C = (
        _aligned(name, two_tokens(t[where]).unflatten(1, (K, Q)).permute(1, 0, 3, 2, 4), workspace)
        for name, t in (("B", inputs.B), ("C", inputs.C))
    )
    scores = torch.bmm(C.view(-1, Q, N), B.view(-1, Q, N).mT).tril_().view(K, n, G, Q, Q)
    lowest, highest = (bound.item() for bound in dA_cumsum.aminmax())
    reach = max(highest, 0.0) - min(lowest, 0.0)
    from_start = exp_(dA_cumsum.to(f, copy=True), reach)
    to_end = exp_((dA_cumsum[..., -1:] - dA_cumsum).to(f), reach)
    weight = to_end if dt is None else to_end * dt
    state_factor, output_factor = (by_group(t[..., None], G).contiguous() for t in (weight, from_start))
    return Tiles(x, B, C, scores, dt, dA_cumsum, reach, from_start, to_end, state_factor, output_factor, tokens)


def by_group(t: Tensor, ngroups: int) -> Tensor:
    """(K, n, H, Q, P) -> (K, n, G, Q, R, P), a view."""
    return t.unflatten(2, (ngroups, -1)).transpose(3, 4)


def scaled_x(tiles: Tiles, workspace: Workspace) -> Tensor:
    """dt x, (K, n, H, Q, P) contiguous."""
    dx = workspace.empty("dx", *tiles.x.shape)
    return dx.copy_(tiles.x) if tiles.dt is None else torch.mul(tiles.x, tiles.dt[..., None], out=dx)


def decay(tiles: Tiles, workspace: Workspace) -> Tensor:
    """exp(dA_cumsum[i] - dA_cumsum[j]), (K, n, H, Q, Q); above the diagonal any finite number."""
    return exp_(_differences(tiles.dA_cumsum, workspace), tiles.reach)


def _aligned(name: str, t: Tensor, workspace: Workspace) -> Tensor:
    """t as fresh memory would hold it, whose place decides on the bits of a BLAS product: itself or a copy."""
    if t.dtype == workspace.dtype and t.is_contiguous() and t.data_ptr() % 64 == 0:
        return t.view(-1).view(t.shape)  # axes of size 1 with the strides of fresh memory, too
    return workspace.empty(name, *t.shape).copy_(t)


def two_tokens(t: Tensor) -> Tensor:
    """(n, tokens, ...) with a token of zeros behind a single one; see Note [Two tokens]."""
    return t if t.shape[1] > 1 else torch.cat((t, torch.zeros_like(t)), 1)


def discretise(inputs: Inputs, where: Index) -> tuple[Tensor | None, Tensor]:
    """(dt after bias, softplus and limit in the compute dtype, dA = dt A in fp64), both (n, tokens, H)."""
    if inputs.log_decay is not None:
        return None, inputs.log_decay[where].double().contiguous()
    dt = raw_dt(inputs, where)
    dt = (row_by_row(softplus, dt) if inputs.dt_softplus else dt).clamp(*inputs.dt_limit)
    return dt, dt.double() * inputs.A.double()  # type: ignore[union-attr]


def row_by_row(function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """function(t) for an elementwise function whose bits depend on the place of an element: torch computes the last
    few of a call, and strided ones, with another routine."""
    t = t.contiguous()
    return function(t) if len(t) == 1 else torch.stack([function(row) for row in t]) if len(t) else t


def fresh(t: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous copy in `dtype`."""
    return t.to(dtype, copy=True, memory_format=torch.contiguous_format)


def raw_dt(inputs: Inputs, where: Index) -> Tensor:
    """dt + dt_bias in the compute dtype, (n, tokens, H) contiguous."""
    dt = inputs.dt[where].to(inputs.dtype).contiguous()  # type: ignore[index]
    return dt if inputs.dt_bias is None else dt + inputs.dt_bias.to(inputs.dtype)


def _differences(cumsum: Tensor, workspace: Workspace) -> Tensor:
    """cumsum[..., i] - cumsum[..., j] of fp64 sums in the compute dtype, as precise as if subtracted in fp64."""
    high = cumsum.to(workspace.dtype)
    difference = workspace.empty("decay", *cumsum.shape, cumsum.shape[-1])
    torch.sub(high[..., :, None], high[..., None, :], out=difference)
    if high.dtype != cumsum.dtype:
        low = (cumsum - high).to(high.dtype)
        difference.add_(low[..., :, None]).sub_(low[..., None, :])
    return difference


def exp_(difference: Tensor, reach: float = math.inf) -> Tensor:
    """exp in place, 0 where it would be below tiny/eps and never inf; see Note [Decays]. `reach` bounds |difference|:
    where it is small, two of the three passes would change nothing."""
    info = torch.finfo(difference.dtype)
    smallest = info.tiny / info.eps
    if reach < -math.log(smallest) - 1:
        return difference.exp_()
    return torch.threshold_(difference.clamp_(math.log(smallest) - 1, math.log(info.max) - 1).exp_(), smallest, 0.0)


def pass_states(
    tiles: Tiles,
    state: Tensor | None,
    workspace: Workspace,
    last: bool = False,
    visit: Callable[[int, Tensor | None], None] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """C · stateᵀ of each tile, (K, n, G, Q, R, P), and the state after the last tile.

    `state` (n, H, P, N), None for zeros, is updated in place; with `last` nobody wants the state after the last tile.
    `visit(k, state)` sees the state before tile k.
    """
    K, n, G, Q, N = tiles.B.shape
    H, P = tiles.x.shape[2], tiles.x.shape[4]
    # What each token adds to the state, decayed to the end of its tile.
    weighted = workspace.empty("weighted", K, n, G, Q, H // G, P)
    torch.mul(by_group(tiles.x, G), tiles.state_factor, out=weighted)
    products = workspace.empty("products", K, n, G, Q, H // G, P)
    columns = weighted.view(K, n * G, Q, -1).transpose(2, 3).unbind()
    B, C = tiles.B.view(K, n * G, Q, N).unbind(), tiles.C.view(K, n * G, Q, N).unbind()
    keep = tiles.from_start[..., -1, None, None].unbind()
    flat = None if state is None else state.view(n * G, -1, N)
    for k, product in enumerate(products.view(K, n * G, Q, -1).unbind()):
        if flat is None:
            product.zero_()
        else:
            torch.bmm(C[k], flat.mT, out=product)
        if visit is not None:
            visit(k, state)
        if last and k == K - 1:
            break
        if state is None or flat is None:
            flat = torch.bmm(columns[k], B[k])
            state = flat.view(n, H, P, N)
        else:
            state.mul_(keep[k])
            flat.baddbmm_(columns[k], B[k])
    return products, state


def _state_inside(tiles: Tiles, k: int, state: Tensor | None, tokens: int) -> Tensor:
    """The state (n, H, P, N) after the first `tokens` tokens of tile k, from the `state` before it."""
    cumsum = tiles.dA_cumsum[k, :, :, :tokens]
    weight = exp_((cumsum[..., -1:] - cumsum).to(tiles.B.dtype))
    if tiles.dt is not None:
        weight *= tiles.dt[k, :, :, :tokens]
    weighted = tiles.x[k, :, :, :tokens] * weight[..., None]  # (n, H, tokens, P)
    added = weighted.transpose(2, 3) @ of_heads(tiles.B[k, :, :, :tokens], weighted.shape[1])
    return added if state is None else added + state * tiles.from_start[k, :, :, tokens - 1, None, None]


def output(tiles: Tiles, products: Tensor, out: Tensor, workspace: Workspace) -> None:
    """y_diag + y_off into `out` (n, K Q, H, P)."""
    K, n, G, Q, _ = tiles.B.shape
    H, P = tiles.x.shape[2], tiles.x.shape[4]
    mixed = decay(tiles, workspace).view(K, n, G, H // G, Q, Q).mul_(tiles.scores[:, :, :, None]).view(-1, Q, Q)
    y_diag = workspace.empty("weighted", K, n, H, Q, P)  # what was there is in the states by now
    torch.bmm(mixed, scaled_x(tiles, workspace).view(-1, Q, P), out=y_diag.view(-1, Q, P))
    y = by_group(out.unflatten(1, (K, Q)).permute(1, 0, 3, 2, 4), G)
    torch.addcmul(by_group(y_diag, G), products, tiles.output_factor, out=y)


def _write(
    inputs: Inputs,
    where: Index,
    tiles: Tiles,
    products: Tensor,
    y: Tensor,
    workspace: Workspace,
) -> None:
    """y[where] = the output of the tiles with the skip D x and the gate z applied."""
    K, n, H, Q, P = tiles.x.shape
    direct = y.dtype == inputs.dtype and isinstance(where[0], slice) and tiles.tokens == K * Q
    result = y[where] if direct else workspace.empty("y", n, K * Q, H, P)
    output(tiles, products, result, workspace)
    result = result[:, : tiles.tokens]
    result = _skip_and_gate(inputs, where, result)
    if not direct:
        y[where] = result.to(y.dtype) if isinstance(where[0], Tensor) else result


def _skip_and_gate(inputs: Inputs, where: Index, y: Tensor) -> Tensor:
    """y + D x, times silu(z), in place; y (n, tokens, H, P)."""
    if inputs.D is not None:
        D = inputs.D.to(inputs.dtype)
        y.add_(inputs.x[where].to(inputs.dtype) * (D[:, None] if D.ndim == 1 else D))
    if inputs.z is not None:
        z = inputs.z[where].to(inputs.dtype)
        y.mul_(row_by_row(torch.sigmoid, z)).mul_(z)
    return y
