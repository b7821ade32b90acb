"""plan(problem, device) -> Plan: what will run and why. Pure python, the same answer on every machine."""

from typing import NamedTuple

import torch

from . import __version__
from .device import KNOWN_ARCHS, Device
from .errors import UnsupportedError
from .kernels.dims import ITEMSIZE, MAX_SIZE
from .kernels.sm100 import config as sm100
from .kernels.sm100.config import Chunked, Q
from .kernels.sm100.scan_layout import scan_layout
from .problem import Problem

# Tokens per tile of the CPU backend. A tile costs Q*Q exponentials per head and one pass over the state: 64 balances
# the two and keeps the matrix products at the machine's full rate.
TILE = 64
# Head-tiles of a step: enough to hide the cost of a call behind the little that is computed for each token.
HEAD_TILES = 256
# Head-tiles whose products are computed at once, few enough for the caches (an array of theirs takes 2 MiB in fp32).
CACHED_HEAD_TILES = 128
# Bytes of state a decode step works on at once: read from memory, used three times from the cache, written back.
STATE_BLOCK_BYTES = 1 << 20

# Modelled clocks of a multiprocessor of sm_100a, to within 30 %; kernels/README.md, "Which kernel", has their sources.
# What three dependent kernels cost more than one before and behind their work: two gaps, two cold pipelines.
LAUNCH_CLOCKS = 10_000
MOST_HEADS = 8  # of a work item: more have less to gain from a shared load than they lose in whole rounds


def recurrence_clocks(p: Problem, device: Device) -> int:
    """Token by token, one head of a sequence on a multiprocessor: three fp32 operations on 128 lanes for each element
    of the state (384 clocks a token for headdim 64 and dstate 256, 192 for dstate 128)."""
    rounds = -(-_sequences(p) * p.nheads // device.multiprocessors)
    return rounds * _tokens(p) * 3 * p.headdim * p.dstate // 128


def state_clocks(p: Problem, heads: int) -> int:
    """Of a work item of chunk_state: B of a tile, then a tile of x for each head."""
    return int(2.5 * p.dstate + heads * (160 + (96 + (1.4 + 2 * _idle(p, heads)) * p.dstate) * p.headdim / 64))


def scan_clocks(p: Problem, heads: int) -> int:
    """Of a work item of chunk_scan: C and B of a tile and their product, then what each head has of its own."""
    return int(8 * p.dstate + heads * (192 + (192 + (2.5 + _idle(p, heads)) * p.dstate) * p.headdim / 64))


def _idle(p: Problem, heads: int) -> float:
    """Rows or columns of a full MMA that stay empty, for each that is used: heads fill it together if they can."""
    return 128 / (sm100.slab_heads(p.headdim, heads) * p.headdim) - 1


class KernelPlan(NamedTuple):
    """A persistent kernel: `items` of `heads` heads of a tile, spread over `ctas` that run at a time."""

    name: str
    heads: int
    items: int
    ctas: int
    stages: str  # of its rings
    shared_bytes: int
    tensor_columns: int

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.items} item(s) of {self.heads} head(s) on {self.ctas} CTA(s); stages: {self.stages}; "
            f"{self.shared_bytes} bytes shared, {self.tensor_columns} tensor columns"
        )


class Chunks(NamedTuple):
    """How the chunked kernels run a call; the fields of `kernels.sm100.config.Chunked` that are a choice, and sizes."""

    state_heads: int
    scan_heads: int
    local: str
    chunk_tiles: int
    tiles: int  # slots of tiles: their number, for packed sequences an upper bound
    workspace_bytes: int
    kernels: tuple[KernelPlan, ...]  # chunk_state and chunk_scan


class Plan(NamedTuple):
    """How one call runs. Sizes are upper bounds where the sequences are known only to the data."""

    problem: Problem
    device: Device
    backend: str
    reason: str
    tile: int  # tokens per tile
    tiles: int  # tiles per step
    rows: int  # sequences (decode: batch rows) worked on side by side
    heads: int  # heads worked on side by side
    flops: int  # useful operations of the whole call
    chunks: Chunks | None = None

    @property
    def tcgen05(self) -> int | None:
        """How many tcgen05.mma the call issues; None where only the data know (the tails of packed sequences), and on
        the CPU."""
        if self.backend == "recurrence":
            return 0
        p = self.problem
        if self.chunks is None or p.num_seqs is not None:
            return None
        config = configuration(p, self.chunks)
        tiles = [(p.seqlen // Q, Q), (1, p.seqlen % Q)]  # of a sequence: how many, of so many tokens
        kernels = ((config.state_heads, config.state_sizes), (config.scan_heads, scan_layout(config)))
        return p.batch * sum(
            count * (p.nheads // heads) * sizes.mma_instructions(valid)
            for heads, sizes in kernels
            for count, valid in tiles
            if valid
        )

    def __str__(self) -> str:
        p = self.problem
        work = f"{self.rows} sequence(s) x {self.heads} head(s)"
        if not p.decode:
            work += f" x {self.tiles} tile(s) of {self.tile} tokens"
        lines = [
            f"{p.function} on {self.device.arch or self.device.kind}",
            f"  problem   {p}",
            f"  backend   {self.backend}: {self.reason}",
            f"  at once   {work}",
        ]
        if self.chunks is not None:
            state, scan = self.chunks.kernels
            passing = f"state_passing: {work.split(' x ')[0]}, tile by tile, {self.chunks.local} between tiles"
            lines += [f"  kernel    {kernel}" for kernel in (state, passing, scan)]
            lines.append(f"  workspace {self.chunks.workspace_bytes} bytes")
        lines.append(
            f"  work      {self.flops / 1e9:.3g} GFLOP useful, state {p.state_bytes / 2**20:.3g} MiB a sequence"
        )
        return "\n".join(lines)


def useful_flops(batch: int, seqlen: int, nheads: int, headdim: int, ngroups: int, dstate: int) -> int:
    """Operations of the chunked algorithm, causal products counted once: state in, state out, scores, scores x."""
    causal = TILE + 1  # a multiply and an add for half of the tile's columns and the diagonal
    return batch * seqlen * (nheads * (4 * dstate * headdim + causal * headdim) + ngroups * causal * dstate)


def require_support(problem: Problem, device: Device) -> None:
    """Raises `UnsupportedError` with every reason why nothing runs `problem` on `device`."""
    if device.kind in ("cpu", "meta"):
        return
    if device.kind != "cuda" or device.arch not in KNOWN_ARCHS:
        where = f"{device.kind} tensors" + (f" ({device.arch})" if device.arch else "")
        known = ", ".join(KNOWN_ARCHS)
        raise UnsupportedError(
            f"{problem.function} has no kernel for {where}: cute_ssd {__version__} runs on the CPU and on {known}; "
            "pass CPU tensors (x.cpu(), ...)."
        )
    reasons = []
    for name, dtype in (("x", problem.dtype), ("the state", problem.state_dtype)):
        if dtype.itemsize > 4:
            reasons.append(f"{name} is float64, expected float32, bfloat16 or float16")
    for name, size in (("headdim", problem.headdim), ("dstate", problem.dstate)):
        if size > MAX_SIZE:
            reasons.append(f"{name} is {size}, expected at most {MAX_SIZE}")
    reasons += problem.refused
    if problem.seq_idx:
        reasons.append(
            "seq_idx makes sequences that only the data know (pass cu_seqlens, or a row of the batch for each sequence)"
        )
    if reasons:
        raise UnsupportedError(
            f"{problem.function} has no kernel on {device.arch} for this call: {'; '.join(reasons)}; pass CPU tensors "
            "(x.cpu(), ...)."
        )


def plan(problem: Problem, device: Device) -> Plan:
    """The plan for `problem` on `device`; raises what `require_support` raises."""
    require_support(problem, device)
    p = problem
    if device.kind == "cuda":
        return _on_gpu(p, device)
    if p.decode:
        heads = max(1, min(p.nheads, STATE_BLOCK_BYTES // max(1, p.state_bytes // p.nheads)))
        rows = max(1, min(p.batch, STATE_BLOCK_BYTES // p.state_bytes)) if heads == p.nheads else 1
        flops = p.batch * p.nheads * p.headdim * p.dstate * 5
        return Plan(p, device, "cpu", "one token per row, state updated in place", 1, 1, rows, heads, flops)
    heads = _heads_at_once(p.nheads, p.ngroups)
    tiles = max(1, HEAD_TILES // heads)  # not fewer for a short sequence: its bits must not depend on the others
    rows = 1 if _bits_depend_on_count(p) else max(1, min(HEAD_TILES // heads, p.num_seqs or p.batch))
    flops = useful_flops(p.batch, p.seqlen, p.nheads, p.headdim, p.ngroups, p.dstate)
    return Plan(p, device, "cpu", "CPU tensors, chunked matrix products", TILE, tiles, rows, heads, flops)


def _on_gpu(p: Problem, device: Device) -> Plan:
    if p.decode:
        return _recurrence(p, device, "a decode step reads and writes each state once")
    if obstacles := _untiled(p, device):
        return _recurrence(p, device, f"token by token, the state in registers; {'; '.join(obstacles)}")
    if not p.seqlen or not _sequences(p):
        return _recurrence(p, device, "there are no tokens")
    chunks = _chunks(p, device)
    alone = recurrence_clocks(p, device)
    tiled = tiled_clocks(p, device, chunks.scan_heads)
    reason = (
        f"{_tokens(p)} token(s) a sequence are modelled at {tiled} clocks in tiles on the tensor cores, at {alone} "
        "clocks token by token"
    )
    if tiled >= alone:
        return _recurrence(p, device, reason)
    tiles = chunks.tiles if p.num_seqs is not None else chunks.tiles // p.batch
    flops = useful_flops(p.batch, p.seqlen, p.nheads, p.headdim, p.ngroups, p.dstate)
    return Plan(p, device, "chunked", reason, Q, tiles, _sequences(p), p.nheads, flops, chunks)


def _recurrence(p: Problem, device: Device, reason: str) -> Plan:
    flops = p.batch * p.seqlen * p.nheads * p.headdim * p.dstate * 5
    return Plan(p, device, "recurrence", reason, 1, 1, _sequences(p), p.nheads, flops)


def _sequences(p: Problem) -> int:
    return p.batch if p.num_seqs is None else p.num_seqs


def _tokens(p: Problem) -> int:
    """Of a sequence; the mean of packed ones, which is all that is known of them."""
    return p.seqlen if p.num_seqs is None else -(-p.seqlen // max(1, p.num_seqs))


def _untiled(p: Problem, device: Device) -> list[str]:
    """Why the tensor-core kernels cannot run `p`, however long its sequences are."""
    if device.arch not in sm100.ARCHS:
        return [f"{device.arch} has no tensor-core kernel here yet"]
    found = []
    if p.dtype == torch.float32:
        found.append("float32 inputs are never rounded to bfloat16")
    for name, size, known in (("headdim", p.headdim, sm100.HEADDIMS), ("dstate", p.dstate, sm100.DSTATES)):
        if size not in known:
            found.append(f"{name} is {size}, tiles have {', '.join(map(str, known))}")
    if max(p.seqlen, _sequences(p) * p.headdim * p.dstate // 1024) >= 2**31:  # a grid of state_passing
        found.append(f"{_sequences(p)} sequences of up to {p.seqlen} tokens are more than a grid can have")
    if p.misaligned:
        found.append(f"rows of {', '.join(p.misaligned)} do not all start at multiples of 16 bytes")
    if p.chunk_states == "own":
        found.append("chunk states are wanted at cu_chunk_seqlens, tiles leave them every chunk_size tokens")
    elif p.chunk_states == "spaced" and p.chunk_size % Q:
        nearest = max(Q, (p.chunk_size + Q // 2) // Q * Q)
        found.append(
            f"chunk states are wanted every {p.chunk_size} tokens, tiles have {Q}: the nearest multiple is {nearest}"
        )
    return found


def _chunks(p: Problem, device: Device) -> Chunks:
    packed = p.num_seqs is not None
    tiles = sm100.packed_tiles(p.seqlen, p.num_seqs or 0) if packed else sm100.batched_tiles(p.batch, p.seqlen)
    dtype = str(p.dtype).removeprefix("torch.")
    local = dtype if p.state_dtype == p.dtype else "float32"
    state = p.nheads * p.headdim * p.dstate
    # Where both are as wide, the states that enter the tiles overwrite those that the tiles leave.
    widths = ITEMSIZE[dtype] + (ITEMSIZE[local] if local != dtype else 0)
    workspace = tiles * (state * widths + p.nheads * 4 + (16 if packed else 0))
    heads = _heads_of_an_item(p, device)
    chunk_tiles = p.chunk_size // Q if p.chunk_states != "none" else 0
    chunks = Chunks(heads, heads, local, chunk_tiles, tiles, workspace, ())
    return chunks._replace(kernels=_kernels(p, device, chunks))


def _kernels(p: Problem, device: Device, chunks: Chunks) -> tuple[KernelPlan, KernelPlan]:
    def on_ctas(name: str, heads: int, stages: dict[str, int], *sizes: int) -> KernelPlan:
        items = chunks.tiles * p.nheads // heads
        rings = ", ".join(f"{stages[ring]} of {ring}" for ring in stages)
        return KernelPlan(name, heads, items, min(items, device.multiprocessors), rings, *sizes)

    config = configuration(p, chunks)
    state, scan = config.state_sizes, scan_layout(config)
    stages = {"x": state.x_stages, "B": state.b_stages, "scaled x": state.a_stages, "sums": state.accumulators}
    return (
        on_ctas("chunk_state", config.state_heads, stages, state.shared_bytes, state.tensor_columns),
        on_ctas("chunk_scan", config.scan_heads, scan.stages, scan.shared_bytes, scan.tensor_columns),
    )


def configuration(p: Problem, chunks: Chunks) -> Chunked:
    """Of the kernels, with fp32 parameters and int32 offsets and slots: a problem does not know of others."""
    f32, packed = "float32", p.num_seqs is not None
    state = str(p.state_dtype).removeprefix("torch.")
    return Chunked(
        headdim=p.headdim,
        dstate=p.dstate,
        dtype=str(p.dtype).removeprefix("torch."),
        dt=f32,
        A=None if p.dt == "none" else f32,
        dt_bias=None,
        softplus=p.dt == "softplus",
        D=None if p.D == "none" else f32,
        channel_D=p.D == "channel",
        z=p.z,
        initial=(state if p.pool else f32) if p.initial_states else None,
        final=state,
        offsets="int32" if packed else None,
        slots="int32" if p.pool else None,
        flags=p.pool and p.initial_states,
        local=chunks.local,
        state_heads=chunks.state_heads,
        scan_heads=chunks.scan_heads,
        chunk_tiles=chunks.chunk_tiles,
        chunk_states=state if chunks.chunk_tiles else None,
    )


def head_choices(nheads: int, ngroups: int) -> list[int]:
    """Of a work item, ascending. Few, because each is a kernel to compile: 1, 2, 4, and as many as the limit allows."""
    divisors = [heads for heads in range(1, MOST_HEADS + 1) if nheads // ngroups % heads == 0]
    return [heads for heads in divisors if heads in (1, 2, 4) or heads == divisors[-1]]


def _heads_of_an_item(p: Problem, device: Device) -> int:
    """As many heads as make the fewest clocks: few for few tiles, so that every multiprocessor has an item (1 below
    about 150 tiles of a head, 2 below 300); more share the loads of their group. Rounds of items are whole, so that
    the last one is not nearly empty. Odd numbers lose, because two heads of 64 rows fill an MMA."""
    return min(reversed(head_choices(p.nheads, p.ngroups)), key=lambda heads: tiled_clocks(p, device, heads))


def tiled_clocks(p: Problem, device: Device, heads: int) -> int:
    """Of the chunked kernels with so many heads to a work item."""
    return LAUNCH_CLOCKS + _rounds(p, device, heads) * (state_clocks(p, heads) + scan_clocks(p, heads))


def _rounds(p: Problem, device: Device, heads: int) -> int:
    """Items that the busiest multiprocessor works on, one after the other."""
    items = _sequences(p) * -(-_tokens(p) // Q) * p.nheads // heads
    return -(-items // device.multiprocessors)


def _bits_depend_on_count(p: Problem) -> bool:
    """Whether BLAS computes a matrix differently alone than among others, so that sequences must go one by one.

    Seen with MKL where a product is a matrix times a vector, and in fp64 where it splits a long inner dimension.
    """
    return p.compute_dtype.itemsize > 4 or p.headdim == 1 or p.dstate == 1


def _heads_at_once(nheads: int, ngroups: int) -> int:
    """Heads of one step, at most HEAD_TILES: some whole groups, or an even share of one group."""
    per_group = nheads // ngroups
    if per_group > HEAD_TILES:
        return -(-per_group // -(-per_group // HEAD_TILES))
    most = min(ngroups, HEAD_TILES // per_group)
    return per_group * max(groups for groups in range(1, most + 1) if ngroups % groups == 0)
