"""What is measured: a case of the public suite, a model's shape, or sizes; its inputs, its call, what it must move."""

import argparse
from typing import Any, NamedTuple

import torch
from torch import Tensor

import cute_ssd
from cute_ssd import suite
from cute_ssd.models import MODELS
from cute_ssd.plan import useful_flops

from . import ProfilingError

SIZES = ("batch", "seqlen", "nheads", "headdim", "ngroups", "dstate")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Tokens of a model's prefill and rows of its decode step where no size is given.
PREFILL, DECODE = {"batch": 1, "seqlen": 4096}, {"batch": 64, "seqlen": 1}
CUSTOM = {"batch": 1, "seqlen": 2048, "nheads": 16, "headdim": 64, "ngroups": 1, "dstate": 256}


class Work(NamedTuple):
    """One call that is measured. `case` is the suite's number, None for another shape."""

    name: str
    function: str
    batch: int
    seqlen: int
    nheads: int
    headdim: int
    ngroups: int
    dstate: int
    dtype: str = "bf16"
    case: int | None = None

    @property
    def key(self) -> int | str:
        """What results are matched by: the suite's number or the name."""
        return self.name if self.case is None else self.case

    @property
    def flops(self) -> int:
        """Useful operations: of the chunked algorithm, or of the recurrence where there is one token."""
        if self.function == "selective_state_update":
            return self.batch * self.nheads * self.headdim * self.dstate * 5
        return useful_flops(self.batch, self.seqlen, self.nheads, self.headdim, self.ngroups, self.dstate)

    @property
    def compulsory_bytes(self) -> int:
        """Bytes of every input read once and of every output written once."""
        b, length, h, p, g, n = (getattr(self, size) for size in SIZES)
        width = DTYPES[self.dtype].itemsize
        tokens, state, model = b * length, b * h * p * n, 3 * h * 4  # A, D and dt_bias in fp32
        streams = tokens * (2 * h * p + h + 2 * g * n) * width  # x, y, dt or decay, B, C
        if self.function == "ssd_chunk_scan":
            return streams + (h + 2 * state) * width
        return streams + model + state * 4 * (2 if self.function == "selective_state_update" else 1)


def suite_work(number: int) -> Work:
    case = suite.cases([number])[0]
    sizes = (case.batch, case.seqlen, case.nheads, case.headdim, case.ngroups, case.dstate)
    return Work(f"suite/{number}", "ssd_chunk_scan", *sizes, case=number)


def model_work(model: str, decode: bool = False, dtype: str = "bf16", **sizes: int) -> Work:
    """The prefill of a model's mixer, or its decode step; `sizes` are batch and seqlen."""
    if model not in MODELS:
        raise ProfilingError(f"model is {model!r}, expected one of {', '.join(MODELS)}; pass --model with one of them.")
    given = {**(DECODE if decode else PREFILL), **sizes}
    if decode and given["seqlen"] != 1:
        raise ProfilingError(f"seqlen is {given['seqlen']}, expected 1 for a decode step; leave --seqlen out.")
    function = "selective_state_update" if decode else "mamba_chunk_scan_combined"
    what = f"decode/b{given['batch']}" if decode else f"prefill/b{given['batch']}/l{given['seqlen']}"
    return Work(f"{model}/{what}/{dtype}", function, given["batch"], given["seqlen"], *MODELS[model], dtype)


def sized_work(**sizes: int) -> Work:
    """A call of `ssd_chunk_scan` like the suite's, of other sizes."""
    given: dict[str, Any] = {**CUSTOM, **sizes}
    return Work("sizes/" + "x".join(str(given[name]) for name in SIZES), "ssd_chunk_scan", **given)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to run: --case, --model or sizes."""
    parser.add_argument("--case", type=int, action="append", metavar="N", help="of the public suite; may be repeated")
    parser.add_argument("--model", action="append", metavar="NAME", help="a model's shape; may be repeated")
    parser.add_argument("--decode", action="store_true", help="the decode step of --model instead of its prefill")
    for name in SIZES:
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"without --model {CUSTOM[name]}")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of a model's x, B and C (default bf16)")


def selected(arguments: argparse.Namespace) -> list[Work]:
    """The work that the command line names, in its order; the whole suite where it names none."""
    sizes = {name: getattr(arguments, name) for name in SIZES if getattr(arguments, name) is not None}
    for name, size in sizes.items():
        if size < 1:
            raise ProfilingError(f"{name} is {size}, expected a positive number; pass --{name} with one.")
    if arguments.model:
        for name in sizes.keys() - {"batch", "seqlen"}:
            raise ProfilingError(f"{name} is {sizes[name]}, expected that of the model; leave --{name} or --model out.")
        models = [model_work(m, arguments.decode, arguments.dtype, **sizes) for m in arguments.model]
        return [*map(suite_work, arguments.case or ()), *models]
    if arguments.decode or arguments.dtype != "bf16":
        raise ProfilingError("--decode and --dtype are given without --model, expected a model; pass --model NAME.")
    if sizes:
        if arguments.case:
            raise ProfilingError("--case and sizes are both given, expected one of them; leave the sizes out.")
        if sizes.get("nheads", 16) % sizes.get("ngroups", 1):
            got = (sizes.get("nheads", 16), sizes["ngroups"])
            raise ProfilingError(f"nheads is {got[0]}, expected a multiple of ngroups {got[1]}; pass other sizes.")
        return [sized_work(**sizes)]
    return [suite_work(c.case) for c in suite.cases(arguments.case)]


def inputs(work: Work, seed: int = 0, device: str = "cpu") -> dict[str, Any]:
    """Arguments of the call. The suite's own distributions; for a model's shape steps and decays as Mamba-2 initialises
    them: softplus(dt_bias) log-uniform in [0.001, 0.1], A in [-16, -1]."""
    if work.function == "ssd_chunk_scan":
        sizes = (work.batch, work.seqlen, work.nheads, work.headdim, work.ngroups, work.dstate)
        return suite.inputs(suite.Case(-1, *sizes, atol=0.0, rtol=0.0), seed, device)
    made, dtype = torch.Generator().manual_seed(seed), DTYPES[work.dtype]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made).to(device, dtype)

    decode = work.function == "selective_state_update"
    tokens = (work.batch,) if decode else (work.batch, work.seqlen)
    steps = torch.exp(torch.rand(work.nheads, generator=made) * 4.605 - 6.908)
    given: dict[str, Any] = {
        "x": normal(*tokens, work.nheads, work.headdim),
        "dt": normal(*tokens, work.nheads),
        "A": (-1 - 15 * torch.rand(work.nheads, generator=made)).to(device),
        "B": normal(*tokens, work.ngroups, work.dstate),
        "C": normal(*tokens, work.ngroups, work.dstate),
        "D": torch.ones(work.nheads, device=device),
        "dt_bias": (steps + torch.log(-torch.expm1(-steps))).to(device),
    }
    if decode:
        shape = (work.batch, work.nheads, work.headdim, work.dstate)
        given["state"] = torch.randn(shape, generator=made).to(device)
    return given


def call(work: Work, arguments: dict[str, Any]) -> Any:
    """The call that is measured, on arguments of `inputs`."""
    if work.function == "ssd_chunk_scan":
        return suite.call(arguments)
    if work.function == "selective_state_update":
        return cute_ssd.selective_state_update(**arguments, dt_softplus=True)
    return cute_ssd.mamba_chunk_scan_combined(**arguments, chunk_size=256, dt_softplus=True, return_final_states=True)


def require_device(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise ProfilingError(
            "device is cuda, but torch finds no CUDA device, expected an NVIDIA GPU and a CUDA build of torch; run "
            "this on such a machine, or pass --device cpu to try the path itself."
        )
