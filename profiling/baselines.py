"""What cute_ssd is measured against, each prepared outside the timed region; results are not compared here."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import ProfilingError
from .cases import Work, call

Prepared = Callable[[], Any]


class Implementation(NamedTuple):
    """`module` is what must be installed; `prepare` makes the call, or raises ProfilingError saying why it cannot."""

    module: str
    prepare: Callable[[Work, dict[str, Any]], Prepared]


def installed(name: str, device: str) -> str | None:
    """None where the implementation can be asked, else why it cannot."""
    module = IMPLEMENTATIONS[name].module
    if find_spec(module) is None:
        return f"{module} is not installed."
    if device != "cuda" and name in ("mamba_ssm", "flashinfer"):
        return f"{module} needs a CUDA device."
    return None


def _ours(work: Work, given: dict[str, Any]) -> Prepared:
    return lambda: call(work, given)


def chunked(
    x: Tensor,
    log_decay: Tensor,
    B: Tensor,
    C: Tensor,
    initial_states: Tensor | None = None,
    chunk_size: int = 256,
) -> tuple[Tensor, Tensor]:
    """y and final states in fp32, in plain torch: the chunked algorithm of the Mamba-2 paper, section 6.

    x (batch, seqlen, nheads, headdim), log_decay (batch, nheads, seqlen), B and C (batch, seqlen, ngroups, dstate).
    """
    batch, seqlen, nheads, headdim = x.shape
    padding = -seqlen % chunk_size
    chunks = (seqlen + padding) // chunk_size

    def tiles(t: Tensor, heads: int) -> Tensor:
        padded = F.pad(t.float(), (0, 0, 0, 0, 0, padding)).unflatten(1, (chunks, chunk_size))
        return padded.repeat_interleave(nheads // heads, 3)

    xs, Bs, Cs = tiles(x, nheads), tiles(B, B.shape[2]), tiles(C, C.shape[2])
    dA_cumsum = F.pad(log_decay.float(), (0, padding)).unflatten(2, (chunks, chunk_size)).cumsum(-1)
    difference = dA_cumsum[..., :, None] - dA_cumsum[..., None, :]
    causal = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=x.device).tril()
    decay = difference.masked_fill(~causal, float("-inf")).exp()
    scores = torch.einsum("bclhn,bcshn->bhcls", Cs, Bs)
    y = torch.einsum("bhcls,bcshp->bclhp", scores * decay, xs)
    weights = (dA_cumsum[..., -1:] - dA_cumsum).exp()
    added = torch.einsum("bcshn,bhcs,bcshp->bchpn", Bs, weights, xs)
    state = torch.zeros(batch, nheads, headdim, B.shape[3], device=x.device)
    if initial_states is not None:
        state = initial_states.float()
    before = []
    for chunk in range(chunks):
        before.append(state)
        state = dA_cumsum[:, :, chunk, -1, None, None].exp() * state + added[:, chunk]
    y = y + torch.einsum("bclhn,bchpn,bhcl->bclhp", Cs, torch.stack(before, 1), dA_cumsum.exp())
    return y.flatten(1, 2)[:, :seqlen], state


def _torch(work: Work, given: dict[str, Any]) -> Prepared:
    g = given
    if work.function == "ssd_chunk_scan":

        def scan() -> Any:
            y, state = chunked(g["x"], g["log_decay"], g["B"], g["C"], g["initial_states"])
            return (y + g["D"].float()[:, None] * g["x"]).to(g["x"].dtype), state.to(g["x"].dtype)

        return scan
    if work.function == "selective_state_update":

        def step() -> Any:
            dt = F.softplus(g["dt"].float() + g["dt_bias"])
            B, C = (g[name].float().repeat_interleave(work.nheads // work.ngroups, 1) for name in "BC")
            added = (dt[..., None] * g["x"])[..., None] * B[:, :, None]
            g["state"].mul_((dt * g["A"]).exp()[..., None, None]).add_(added)
            return (torch.einsum("bhpn,bhn->bhp", g["state"], C) + g["D"][:, None] * g["x"]).to(g["x"].dtype)

        return step

    def combined() -> Any:
        dt = F.softplus(g["dt"].float() + g["dt_bias"])
        y, state = chunked(g["x"] * dt[..., None], (dt * g["A"]).transpose(1, 2), g["B"], g["C"])
        return (y + g["D"][:, None] * g["x"]).to(g["x"].dtype), state

    return combined


def _expanded(work: Work, given: dict[str, Any]) -> dict[str, Any]:
    """The decode step's operands with the stride-0 expansions that mamba_ssm and FlashInfer want."""
    h, p, n = work.nheads, work.headdim, work.dstate
    return {
        **given,
        "dt": given["dt"][..., None].expand(-1, -1, p),
        "A": given["A"][:, None, None].expand(h, p, n),
        "D": given["D"][:, None].expand(h, p),
        "dt_bias": given["dt_bias"][:, None].expand(h, p),
    }


def _mamba_ssm(work: Work, given: dict[str, Any]) -> Prepared:
    if work.function == "selective_state_update":
        from mamba_ssm.ops.triton.selective_state_update import selective_state_update

        step = _expanded(work, given)
        return lambda: selective_state_update(**step, dt_softplus=True)
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    rest: dict[str, Any] = {"chunk_size": 256, "return_final_states": True}
    if work.function == "mamba_chunk_scan_combined":
        return lambda: mamba_chunk_scan_combined(**given, **rest, dt_softplus=True)
    # It knows no decay of its own for each token: A = -1 and dt = -log_decay give that, on x / dt.
    dt = -given["log_decay"].transpose(1, 2).contiguous()
    scan = {name: given[name] for name in ("B", "C", "D", "initial_states")}
    scan |= {"x": given["x"] / dt[..., None], "dt": dt, "A": -torch.ones(work.nheads, device=dt.device)}
    return lambda: mamba_chunk_scan_combined(**scan, **rest)


def _flashinfer(work: Work, given: dict[str, Any]) -> Prepared:
    if work.function == "selective_state_update":
        from flashinfer.mamba import selective_state_update

        step = _expanded(work, given)
        return lambda: selective_state_update(**step, dt_softplus=True)
    chunk, sizes = 128, (work.headdim, work.dstate, work.dtype)
    if sizes != (64, 128, "bf16") or work.seqlen % chunk:
        raise ProfilingError(
            f"FlashInfer's SSDCombined is asked for headdim {work.headdim}, dstate {work.dstate}, {work.dtype} and "
            f"seqlen {work.seqlen}, expected 64, 128, bf16 and a multiple of {chunk}; measure another shape against it."
        )
    if work.function == "ssd_chunk_scan":
        raise ProfilingError(
            "FlashInfer's SSDCombined takes no decay for each token; measure a model's shape against it."
        )
    from flashinfer.mamba import SSDCombined

    names = ("nheads", "headdim", "dstate", "ngroups")
    runner = SSDCombined(chunk_size=chunk, **{name: getattr(work, name) for name in names}, has_d=True)
    scan = {**given, "D": given["D"].to(given["x"].dtype)}
    return lambda: runner.run(**scan, dt_softplus=True, return_final_states=True)


IMPLEMENTATIONS = {
    "cute_ssd": Implementation("cute_ssd", _ours),
    "mamba_ssm": Implementation("mamba_ssm", _mamba_ssm),
    "flashinfer": Implementation("flashinfer", _flashinfer),
    "torch": Implementation("torch", _torch),
}
