"""chunk_scan alone, on given states: inputs, a host function, and the definition. Also a subject of mutation_score."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_ssd.compile import compiled
from cute_ssd.kernels.sm100.config import Chunked, Q

INF = float("inf")
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NAMES = {BF16: "bfloat16", F16: "float16", F32: "float32"}


@dataclass(frozen=True)
class ScanOnly(Chunked):
    """chunk_scan as a kernel of its own."""

    def build(self) -> tuple[Any, list[Any]]:
        return host(self), fake_arguments(self)


def host(config: ScanOnly) -> Any:
    import cutlass.cute as cute
    from cutlass import Float32, Int32

    from cute_ssd.kernels.sm100.chunk_scan import ChunkScanKernel
    from cute_ssd.kernels.sm100.steps import Steps

    class Host:
        def __init__(self) -> None:
            self.scan = ChunkScanKernel(config)

        @cute.jit
        def __call__(
            self,
            x: cute.Tensor,
            dt: cute.Tensor,
            A: Any,
            B: cute.Tensor,
            C: cute.Tensor,
            D: Any,
            z: Any,
            dt_bias: Any,
            y: cute.Tensor,
            incoming: cute.Tensor,
            table: Any,
            dt_min: Float32,
            dt_max: Float32,
            ctas: Int32,
            stream: Any,
        ) -> None:
            steps = Steps(dt, A, dt_bias, dt_min, dt_max)
            self.scan(x, B, C, D, z, steps, incoming, table, y, ctas, stream)

    return Host()


def fake_arguments(config: ScanOnly) -> list[Any]:
    import cutlass.cute as cute
    from cutlass import Float32, Int32

    from cute_ssd.kernels.arithmetic import numeric
    from cute_ssd.kernels.sm100.chunked import fake_operands

    operands, tiles = fake_operands(config), cute.sym_int32()
    state = (tiles, operands["x"].shape[2], config.headdim, config.dstate)
    dense = cute.runtime.make_fake_compact_tensor
    return [
        *(operands[name] for name in ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "y")),
        dense(numeric(config.dtype), state, stride_order=(3, 2, 1, 0), assumed_align=16),
        dense(Int32, (tiles, 4), stride_order=(1, 0), assumed_align=16) if config.offsets else None,
        Float32(0.0),
        Float32(0.0),
        Int32(0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    ]


class Case(NamedTuple):
    """One call. `lengths` of packed sequences, or None: `batch` rows of `seqlen` tokens."""

    headdim: int = 64
    dstate: int = 128
    heads: int = 2  # of a work item
    items: int = 1  # of a tile and group
    ngroups: int = 1
    dtype: torch.dtype = BF16
    batch: int = 1
    seqlen: int = 128
    lengths: tuple[int, ...] | None = None
    unused: int = 0  # slots before each sequence that no tile has
    parameters: torch.dtype = F32
    D: str = "none"
    z: bool = False
    bias: bool = False
    softplus: bool = False
    limit: tuple[float, float] = (0.0, INF)
    log_decay: bool = False
    positive: bool = True
    pad: int = 0  # elements more in every row of x, B, C, z, y
    ctas: int = 148
    scale: float = 1.0  # of dt
    seed: int = 0

    @property
    def nheads(self) -> int:
        return self.heads * self.items * self.ngroups

    @property
    def config(self) -> ScanOnly:
        dtype, parameters = NAMES[self.dtype], NAMES[self.parameters]
        return ScanOnly(
            headdim=self.headdim,
            dstate=self.dstate,
            dtype=dtype,
            dt=parameters,
            A=None if self.log_decay else parameters,
            dt_bias=parameters if self.bias else None,
            softplus=self.softplus,
            D=None if self.D == "none" else parameters,
            channel_D=self.D == "channel",
            z=self.z,
            initial=None,
            final=None,
            offsets=None if self.lengths is None else "int32",
            slots=None,
            flags=False,
            local="float32",
            state_heads=1,
            scan_heads=self.heads,
            positive_steps=self.positive and not self.log_decay,
        )


class Call(NamedTuple):
    case: Case
    x: Tensor
    dt: Tensor
    A: Tensor | None
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    dt_bias: Tensor | None
    y: Tensor
    incoming: Tensor
    table: Tensor | None

    def __call__(self) -> None:
        """Inside of a session of the emulator."""
        case = self.case
        compiled(case.config, "sm_100a")(*self[1:], *case.limit, case.ctas)

    def tiles(self) -> list[tuple[int, int, int, int]]:
        """(row, first token, tokens, slot)."""
        if self.table is not None:
            return [(r, f, v, slot) for slot, (r, f, v, _) in enumerate(self.table.tolist()) if v]
        per_row = -(-self.case.seqlen // Q)
        return [
            (row, t * Q, min(Q, self.case.seqlen - t * Q), row * per_row + t)
            for row in range(self.case.batch)
            for t in range(per_row)
        ]


def rows(g: torch.Generator, case: Case, *shape: int) -> Tensor:
    """Normal numbers as a view of wider rows whose other elements are NaN."""
    width = shape[-1] * shape[-2]
    wide = torch.full((*shape[:-2], width + case.pad), float("nan"), dtype=case.dtype)
    view = wide[..., :width].unflatten(-1, shape[-2:])
    return view.copy_(torch.randn(shape, generator=g).to(case.dtype))


def build(case: Case) -> Call:
    g = torch.Generator().manual_seed(case.seed)
    H, P, N, G = case.nheads, case.headdim, case.dstate, case.ngroups
    table = None
    batch, seqlen = case.batch, case.seqlen
    if case.lengths is not None:
        entries, at = [], 0
        for length in case.lengths:
            entries += [[0, 0, 0, 0]] * case.unused
            entries += [[0, at + first, min(Q, length - first), 0] for first in range(0, length, Q)]
            at += length
        batch, seqlen, tiles = 1, at + 3, len(entries)
        table = torch.tensor(entries, dtype=torch.int32)
    else:
        tiles = batch * -(-seqlen // Q)
    A = (-1 - 15 * torch.rand(H, generator=g)).to(case.parameters)
    if case.log_decay:
        dt = -torch.rand(batch, seqlen, H, generator=g) * case.scale
    else:
        dt = torch.exp(torch.rand(batch, seqlen, H, generator=g) * 4.6 - 6.9) * case.scale
        if case.softplus:
            dt = dt + torch.log(-torch.expm1(-dt))
    x = rows(g, case, batch, seqlen, H, P)
    D = None
    if case.D != "none":
        D = torch.randn(H, P if case.D == "channel" else 1, generator=g).to(case.parameters).expand(H, P)
    return Call(
        case,
        x=x,
        dt=dt.to(case.parameters),
        A=None if case.log_decay else A,
        B=rows(g, case, batch, seqlen, G, N),
        C=rows(g, case, batch, seqlen, G, N),
        D=D,
        z=rows(g, case, batch, seqlen, H, P) if case.z else None,
        dt_bias=(torch.randn(H, generator=g) * 0.1).to(case.parameters) if case.bias else None,
        y=torch.full_like(rows(g, case, batch, seqlen, H, P), float("nan")) if not case.pad else
        rows(g, case, batch, seqlen, H, P).fill_(float("nan")),
        incoming=torch.randn(tiles, H, P, N, generator=g).to(case.dtype),
        table=table,
    )  # fmt: skip


def expected(call: Call, eager: bool = False) -> Tensor:
    """y in float64, NaN where nothing is to be written; or rounded as operations of torch on x's dtype round."""
    case = call.case
    y = torch.full(call.x.shape, float("nan"), dtype=F64)
    group = torch.arange(case.nheads) // (case.heads * case.items)

    def rounded(t: Tensor) -> Tensor:
        return t.to(case.dtype).double() if eager else t

    for row, first, valid, slot in call.tiles():
        where = (row, slice(first, first + valid))
        x, dt, B, C = (t[where].double() for t in (call.x, call.dt, call.B, call.C))
        step = torch.ones_like(dt)
        a = dt
        if call.A is not None:
            if call.dt_bias is not None:
                dt = dt + call.dt_bias.double()
            if case.softplus:
                dt = torch.nn.functional.softplus(dt)
            step = dt.clamp(*case.limit)
            a = step * call.A.double()
        sums = a.cumsum(0)  # (tokens, H)
        decay = (sums[:, None] - sums[None]).masked_fill(~torch.ones(valid, valid).tril().bool()[..., None], -INF).exp()
        scores = rounded(torch.einsum("ign,jgn->ijg", C, B))[..., group]
        m = rounded(scores * rounded(decay * step[None]))
        y_diag = rounded(torch.einsum("ijh,jhp->ihp", m, x))
        state = torch.einsum("ihn,hpn->ihp", C[:, group], call.incoming[slot].double())
        out = rounded(y_diag + rounded(rounded(state) * sums.exp()[..., None]))
        if call.D is not None:
            out = rounded(out + rounded(call.D.double() * x))
        if call.z is not None:
            out = rounded(out * rounded(torch.nn.functional.silu(call.z[where].double())))
        y[where] = out
    return y


# Two CTAs with several items, so that every ring goes round, and a tail; a third one with nothing to do.
SUBJECT = Case(
    dstate=64, heads=4, lengths=(256, 256, 256, 256, 256, 130), unused=1, softplus=True, bias=True, D="head", ctas=3
)


def run(case: Case = SUBJECT) -> dict[str, Tensor]:
    call = build(case)
    call()
    return {"output": call.y, "truth": expected(call)}


def check(tensors: dict[str, Tensor]) -> None:
    y, truth = tensors["output"].double(), tensors["truth"]
    written = ~truth.isnan()
    assert torch.equal(~y.isnan(), written)
    assert (y - truth)[written].norm() <= 4e-3 * truth[written].norm()
