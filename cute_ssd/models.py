"""Sizes of published Mamba-2 models, and the kernels that serving or training one of them will ask for."""

from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache
from multiprocessing import get_context
from typing import NamedTuple

import torch
from torch import Tensor

from . import launch
from .checks import short
from .compile import Configuration
from .device import KNOWN_ARCHS, Device
from .errors import ShapeError
from .launch import NOTHING, Operands, Packed
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


# Who calls: the adapters in `compat`, and engines with a pool of states of their own.
ENGINES = ("transformers", "vllm", "pool")
# Tokens of a prefill whose plans are asked for their kernels.
LENGTHS = tuple(2**n for n in range(18))


class _Call(NamedTuple):
    operands: Operands
    single: bool = False
    packed: Packed = NOTHING


def kernels(
    model: str,
    arch: str,
    dtype: torch.dtype = torch.bfloat16,
    engines: tuple[str, ...] = ENGINES,
    states: tuple[torch.dtype, ...] = (),
) -> dict[str, Configuration]:
    """What the mixers of `model` ask for on `arch`, by what it is for, in inference without tensor parallelism.

    Inputs are in `dtype`, dt_bias and D have a value for each head, A is fp32, softplus. By `engines`:

    * transformers: what `compat.transformers` asks for where a model's weights are in `dtype`, D and dt_bias too.
      Prefill without a cache, on an empty one and on a filled one, and decode; states are fp32. Falcon-H1's decode has
      a gate where its configuration has no mamba_rms_norm: both.
    * vllm: what `compat.vllm` asks for in vLLM, D and dt_bias in `dtype`. Packed prefill with and without initial
      states, which returns the states of its sequences or, where prefixes are cached, of all chunks, and decode on the
      slots of a pool. PLaMo-2's mixer has its gate in all of them.
    * pool: `mamba_chunk_scan_varlen_inplace` with and without has_initial_state, `selective_state_update` on slots; no
      gate, D and dt_bias in fp32.

    vLLM's states and a pool's have one of the dtypes `states`: by default fp32 and `dtype`, between which vLLM's
    mamba_ssm_cache_dtype chooses. Where prefill runs on the chunked kernels, those for each number of heads to a work
    item that some length asks for are there too. A kernel for several purposes has the name of the first. Other calls
    have kernels of their own, compiled when they first come.
    """
    if model not in MODELS:
        raise ShapeError(f"model is {model!r}, expected one of {', '.join(MODELS)}.")
    if arch not in KNOWN_ARCHS:
        raise ShapeError(f"arch is {arch or 'cpu'!r}, expected a GPU architecture: {', '.join(KNOWN_ARCHS)}.")
    found: dict[Configuration, str] = {}
    for engine in engines:
        if engine not in ENGINES:
            raise ShapeError(f"engine is {engine!r}, expected one of {', '.join(ENGINES)}.")
        for purpose, (operands, single, packed) in _CALLS[engine](model, dtype, states).items():
            name = f"{engine}: {purpose}"
            kernel = launch.recurrence_kernel(operands, arch, packed=packed, softplus=True, single=single)
            found.setdefault(kernel, name)
            if single or packed.chunk_states is not None:  # vLLM's chunks end where tiles do not
                continue
            state = torch.float32 if operands.final is None else operands.final.dtype
            for chunks in _chunks(MODELS[model], arch, dtype, state):
                tiled = launch.chunked_kernels(operands, chunks, softplus=True)
                found.setdefault(tiled, f"{name}, tiles of {chunks.scan_heads} head(s)")
    return {name: kernel for kernel, name in found.items()}


def _transformers(model: str, dtype: torch.dtype, _: tuple[torch.dtype, ...]) -> dict[str, _Call]:
    tokens, states = _tokens(model, dtype, dtype), _states(model, torch.float32)
    decode = tokens._replace(initial=states, final=states)
    calls = {
        "prefill without a cache": _Call(tokens),
        "prefill": _Call(tokens._replace(final=states)),
        "prefill on a filled cache": _Call(decode),
        "decode": _Call(decode, single=True),
    }
    if model.startswith("falcon-h1"):
        calls["decode with a gate"] = _Call(decode._replace(z=decode.x), single=True)
    return calls


def _vllm(model: str, dtype: torch.dtype, states: tuple[torch.dtype, ...]) -> dict[str, _Call]:
    tokens = _tokens(model, dtype, dtype)
    tokens = tokens._replace(offsets=_index(2), z=tokens.x if model.startswith("plamo2") else None)
    calls: dict[str, _Call] = {}
    for of, name in _named(dtype, states):
        state = _states(model, of)
        caching = Packed(chunk_states=state, chunk_offsets=_index(2), chunk_size=256)
        started = tokens._replace(initial=state)
        pool = tokens._replace(offsets=None, initial=state, final=state, slots=_index(1))
        calls |= {
            f"prefill, {name} states": _Call(tokens._replace(final=state)),
            f"prefill with initial states, {name}": _Call(started._replace(final=state)),
            f"prefill for cached prefixes, {name} states": _Call(tokens, False, caching),
            f"prefill for cached prefixes with initial states, {name}": _Call(started, False, caching),
            f"decode, {name} states": _Call(pool, single=True),
        }
    return calls


def _pool(model: str, dtype: torch.dtype, states: tuple[torch.dtype, ...]) -> dict[str, _Call]:
    tokens = _tokens(model, dtype, torch.float32)
    calls: dict[str, _Call] = {}
    for of, name in _named(dtype, states):
        pool = _states(model, of)
        decode = tokens._replace(initial=pool, final=pool, slots=_index(1))
        fresh = decode._replace(initial=None, offsets=_index(2))
        calls |= {
            f"prefill, {name} states": _Call(fresh),
            f"prefill with initial states, {name}": _Call(fresh._replace(initial=pool, flags=_empty(1, of=torch.bool))),
            f"decode, {name} states": _Call(decode, single=True),
        }
    return calls


_CALLS = {"transformers": _transformers, "vllm": _vllm, "pool": _pool}


def _named(dtype: torch.dtype, states: tuple[torch.dtype, ...]) -> list[tuple[torch.dtype, str]]:
    """Dtypes of states with their names."""
    return [(of, short(of)) for of in dict.fromkeys(states or (torch.float32, dtype))]


def _empty(*shape: int, of: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=of, device="meta")


def _index(size: int) -> Tensor:
    return _empty(size, of=torch.int32)


def _states(model: str, of: torch.dtype) -> Tensor:
    m = MODELS[model]
    return _empty(1, m.nheads, m.headdim, m.dstate, of=of)


def _tokens(model: str, dtype: torch.dtype, parameters: torch.dtype) -> Operands:
    """One token, with D and dt_bias in the dtype of `parameters`."""
    m = MODELS[model]
    x, B = _empty(1, 1, m.nheads, m.headdim, of=dtype), _empty(1, 1, m.ngroups, m.dstate, of=dtype)
    dt, A = _empty(1, 1, m.nheads, of=dtype), _empty(m.nheads, of=torch.float32)
    D, dt_bias = _empty(m.nheads, 1, of=parameters).expand(m.nheads, m.headdim), _empty(m.nheads, of=parameters)
    return Operands(x, dt, A, B, B, D, None, dt_bias, x)


@lru_cache
def _chunks(m: Model, arch: str, dtype: torch.dtype, state: torch.dtype) -> tuple[Chunks, ...]:
    """How the chunked kernels run a prefill of LENGTHS tokens, once for each number of heads to an item."""
    found: dict[int, Chunks] = {}
    for seqlen in LENGTHS:
        problem = Problem("mamba_chunk_scan_combined", 1, seqlen, *m, dtype, state)
        chunks = plan(problem, Device.from_arch(arch)).chunks
        if chunks is not None:
            found.setdefault(chunks.scan_heads, chunks)
    return tuple(found[heads] for heads in sorted(found))


def warm_up(
    model: str,
    arch: str,
    dtype: torch.dtype = torch.bfloat16,
    jobs: int = 2,
    engines: tuple[str, ...] = ENGINES,
    states: tuple[torch.dtype, ...] = (),
) -> dict[str, str]:
    """Compiles every kernel of `kernels(model, arch, dtype, engines, states)` into the cache; what is there already
    costs nothing.

    Each of `jobs` processes needs about 0.6 GB. Returns purpose -> "compiled", "was there", or the reason why it
    failed.
    """
    from .compile import is_cached

    wanted = kernels(model, arch, dtype, engines, states)
    missing = {purpose: kernel for purpose, kernel in wanted.items() if not is_cached(kernel, arch)}
    outcome = {purpose: "compiled" if purpose in missing else "was there" for purpose in wanted}
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
