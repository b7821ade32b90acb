"""plan(problem, device) -> Plan: what will run and why. Pure python, the same answer on every machine."""

from typing import NamedTuple

from . import __version__
from .device import KNOWN_ARCHS, Device
from .errors import UnsupportedError
from .kernels.dims import MAX_SIZE
from .problem import Problem

# Tokens per tile of the CPU backend. A tile costs Q*Q exponentials per head and one pass over the state: 64 balances
# the two and keeps the matrix products at the machine's full rate.
TILE = 64
# Head-tiles worked on at once: enough to hide the cost of a call behind the arithmetic, few enough for the caches
# (their Q*Q decay matrices take 4 MiB in fp32).
HEAD_TILES = 256
# Bytes of state a decode step works on at once: read from memory, used three times from the cache, written back.
STATE_BLOCK_BYTES = 1 << 20


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

    def __str__(self) -> str:
        p = self.problem
        work = f"{self.rows} sequence(s) x {self.heads} head(s)"
        if not p.decode:
            work += f" x {self.tiles} tile(s) of {self.tile} tokens"
        return "\n".join(
            (
                f"{p.function} on {self.device.arch or self.device.kind}",
                f"  problem   {p}",
                f"  backend   {self.backend}: {self.reason}",
                f"  at once   {work}",
                f"  work      {self.flops / 1e9:.3g} GFLOP useful, state {p.state_bytes / 2**20:.3g} MiB a sequence",
            )
        )


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
    """Everything runs on the recurrence kernel: nothing else exists yet."""
    reason = "a decode step reads and writes each state once"
    if not p.decode:
        reason = f"token by token, the state in registers; {device.arch} has no tensor-core kernel here yet"
    flops = p.batch * p.seqlen * p.nheads * p.headdim * p.dstate * 5
    return Plan(p, device, "recurrence", reason, 1, 1, p.num_seqs or p.batch, p.nheads, flops)


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
    return per_group * max(g for g in range(1, ngroups + 1) if ngroups % g == 0 and g * per_group <= HEAD_TILES)
