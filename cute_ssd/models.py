"""Sizes of published Mamba-2 models, and the kernels that serving or training one of them will ask for."""

from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import NamedTuple

import torch
from torch import Tensor

from . import launch
from .compile import Configuration
from .device import KNOWN_ARCHS, Device
from .errors import ShapeError
from .launch import Operands
from .plan import Chunks, plan
from .problem import Problem


class Model(NamedTuple):
    """One mixer's sizes, from the model's published configuration; without tensor parallelism."""

    nheads: int
    headdim: int
    ngroups: int
    dstate: int


# Not here, because no source has all of their sizes: Nemotron-H 47B, Falcon-H1 1.5B-Deep.
MODELS = {
    "mamba2-130m": Model(24, 64, 1, 128),
    "mamba2-370m": Model(32, 64, 1, 128),
    "mamba2-780m": Model(48, 64, 1, 128),
    "mamba2-1.3b": Model(64, 64, 1, 128),
    "mamba2-2.7b": Model(80, 64, 1, 128),
    "codestral-mamba-7b": Model(128, 64, 8, 128),
    "nemotron-h-4b": Model(112, 64, 8, 128),
    "nemotron-h-8b": Model(128, 64, 8, 128),
    "nemotron-h-56b": Model(256, 64, 8, 256),
    "nemotron-nano-9b-v2": Model(128, 80, 8, 128),
    "nemotron-nano-12b-v2": Model(128, 80, 8, 128),
    "nemotron-3-nano-4b": Model(96, 80, 8, 128),
    "nemotron-3-nano-30b-a3b": Model(64, 64, 8, 128),
    "nemotron-3-super-120b-a12b": Model(128, 64, 8, 128),
    "nemotron-3-ultra-550b-a55b": Model(256, 64, 8, 128),
    "bamba-9b": Model(128, 64, 1, 128),
    "falcon-h1-90m": Model(24, 32, 1, 64),
    "falcon-h1-0.5b": Model(24, 64, 1, 128),
    "falcon-h1-1.5b": Model(48, 64, 1, 256),
    "falcon-h1-3b": Model(32, 128, 1, 256),
    "falcon-h1-7b": Model(24, 128, 1, 256),
    "falcon-h1r-7b": Model(24, 128, 1, 256),
    "falcon-h1-34b": Model(32, 128, 2, 256),
    "granite-4.0-h-350m": Model(48, 32, 1, 128),
    "granite-4.0-h-1b": Model(48, 64, 1, 128),
    "granite-4.0-h-tiny": Model(48, 64, 1, 128),
    "granite-4.0-h-micro": Model(64, 64, 1, 128),
    "granite-4.0-h-small": Model(128, 64, 1, 128),
    "zamba2-1.2b": Model(64, 64, 1, 128),
    "zamba2-2.7b": Model(80, 64, 1, 64),
    "zamba2-7b": Model(112, 64, 2, 64),
    "plamo2-8b": Model(64, 128, 1, 64),
}


# Tokens of a prefill whose plans are asked for their kernels.
LENGTHS = tuple(2**n for n in range(18))


def kernels(model: str, arch: str, dtype: torch.dtype = torch.bfloat16) -> dict[str, Configuration]:
    """What the mixers of `model` ask for on `arch`, by what it is for.

    Inputs in `dtype`, A, D and dt_bias in fp32 with a value for each head, the state in fp32, softplus, no z (the gate
    of these models comes after their norm): prefill of a batch with and without an initial state, packed prefill on a
    pool, and the decode step on a batch's states and on a pool's slots. Where prefill runs on the chunked kernels, also
    those for each number of heads to a work item that some length asks for. Other calls (parameters or a state in 16
    bits, a prefill whose final states nobody wants) have kernels of their own, compiled when they are first called.
    """
    if model not in MODELS:
        raise ShapeError(f"model is {model!r}, expected one of {', '.join(MODELS)}.")
    if arch not in KNOWN_ARCHS:
        raise ShapeError(f"arch is {arch or 'cpu'!r}, expected a GPU architecture: {', '.join(KNOWN_ARCHS)}.")
    m = MODELS[model]

    def empty(*shape: int, of: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    def heads(*tokens: int) -> Operands:
        x = empty(*tokens, m.nheads, m.headdim, of=dtype)
        B = empty(*tokens, m.ngroups, m.dstate, of=dtype)
        D, steps = empty(m.nheads, 1).expand(m.nheads, m.headdim), empty(*tokens, m.nheads, of=dtype)
        return Operands(x, steps, empty(m.nheads), B, B, D, None, empty(m.nheads), x)

    states = empty(1, m.nheads, m.headdim, m.dstate)
    index = empty(1, of=torch.int32)
    packed = heads(1, 1)._replace(offsets=empty(2, of=torch.int32), slots=index, final=states)
    decode = heads(1, 1)._replace(initial=states, final=states)
    operands = {
        "prefill": (heads(1, 1)._replace(final=states), False),
        "prefill with initial states": (heads(1, 1)._replace(initial=states, final=states), False),
        "packed prefill into a pool": (packed, False),
        "packed prefill from a pool": (packed._replace(initial=states, flags=empty(1, of=torch.bool)), False),
        "decode": (decode, True),
        "decode on a pool": (decode._replace(slots=index), True),
    }
    found: dict[str, Configuration] = {
        purpose: launch.recurrence_kernel(given, arch, softplus=True, single=single)
        for purpose, (given, single) in operands.items()
    }
    for chunks in _chunks(m, arch, dtype):
        for purpose, (given, single) in operands.items():
            if not single:
                name = f"{purpose}, tiles of {chunks.scan_heads} head(s)"
                found[name] = launch.chunked_kernels(given, chunks, softplus=True)
    return found


def _chunks(m: Model, arch: str, dtype: torch.dtype) -> list[Chunks]:
    """How the chunked kernels run a prefill of LENGTHS tokens, once for each number of heads to an item."""
    found: dict[int, Chunks] = {}
    for seqlen in LENGTHS:
        problem = Problem("mamba_chunk_scan_combined", 1, seqlen, *m, dtype, torch.float32)
        chunks = plan(problem, Device.from_arch(arch)).chunks
        if chunks is not None:
            found.setdefault(chunks.scan_heads, chunks)
    return [found[heads] for heads in sorted(found)]


def warm_up(model: str, arch: str, dtype: torch.dtype = torch.bfloat16, jobs: int = 2) -> dict[str, str]:
    """Compiles every kernel of `kernels(model, arch, dtype)` into the cache; what is there already costs nothing.

    Each of `jobs` processes needs about 0.6 GB. Returns purpose -> "compiled", or the reason why it failed.
    """
    from .compile import is_cached

    wanted = kernels(model, arch, dtype)
    outcome = dict.fromkeys(wanted, "compiled")
    missing = {purpose: kernel for purpose, kernel in wanted.items() if not is_cached(kernel, arch)}
    if not missing:
        return outcome
    # Spawned, because the DSL's compiler does not survive a fork; several threads would abort the process.
    with ProcessPoolExecutor(min(jobs, len(missing)), mp_context=get_context("spawn")) as pool:
        running = {pool.submit(_compile, kernel, arch): purpose for purpose, kernel in missing.items()}
        for done in as_completed(running):
            if error := done.exception():
                outcome[running[done]] = f"failed: {error}"
    return outcome


def _compile(kernel: Configuration, arch: str) -> None:
    from .compile import compiled

    compiled(kernel, arch)
