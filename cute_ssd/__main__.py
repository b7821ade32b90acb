"""The command line: `python -m cute_ssd info | check | explain | compile | emulate | model | bench`. Heavy imports wait
for the command that needs them, so that `info` runs where torch or cutlass is broken."""

import argparse
import csv
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from . import __version__

if TYPE_CHECKING:
    from .suite import Outcome

FUNCTIONS = (
    "mamba_chunk_scan_combined",
    "ssd_chunk_scan",
    "mamba_chunk_scan_varlen",
    "mamba_chunk_scan_varlen_inplace",
    "selective_state_update",
)
SIZES = {"batch": 1, "seqlen": 2048, "nheads": 16, "headdim": 64, "ngroups": 1, "dstate": 256}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the exit code is 0, 1 after a failed check, 2 after a request that cannot be met."""
    arguments = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    return command(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cute_ssd", description="The Mamba-2 SSD scan.")
    parser.add_argument("--version", action="version", version=f"cute_ssd {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(command=run)
        return command

    info = add("info", _info, "What is installed and what it can run.")
    info.add_argument("--json", action="store_true", help="print JSON")

    check = add("check", _check, "Run the public suite and verify each result against the recurrence.")
    check.add_argument("--case", type=int, action="append", metavar="N", help="only this case; may be repeated")
    where = check.add_mutually_exclusive_group()
    where.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where a kernel exists for it, else cpu")
    where.add_argument("--emulate", action="store_true", help="run the GPU kernels on the emulator: minutes, no times")
    check.add_argument("--arch", help="of the emulated GPU (default sm_100a)")
    check.add_argument("--sanitize", action="store_true", help="look for races on it too: three times slower")
    check.add_argument("--seed", type=int, default=0, help="of the inputs and of the emulated schedule (default 0)")
    form = check.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--csv", action="store_true", help="print CSV")

    explain = add("explain", _explain, "What a call would run and why; nothing is computed.")
    explain.add_argument("--function", choices=FUNCTIONS, default=FUNCTIONS[0])
    for name, size in SIZES.items():
        note = "; packed sequences for the varlen functions" if name == "batch" else ""
        explain.add_argument(f"--{name}", type=int, default=size, help=f"default {size}{note}")
    explain.add_argument("--dtype", choices=DTYPES, default="bf16", help="of x, B and C (default bf16)")
    explain.add_argument("--arch", default="cpu", help="cpu (default) or a GPU architecture such as sm_100a")

    compile_ = add("compile", _compile, "Compile the kernels of a model into the cache, without a GPU.")
    compile_.add_argument("--model", required=True, help="a name such as nemotron-nano-9b-v2; a wrong one lists them")
    compile_.add_argument("--arch", default="sm_100a", help="default sm_100a")
    compile_.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="of the inputs (default bf16)"
    )
    compile_.add_argument(
        "--for", dest="engines", action="append", choices=("transformers", "vllm", "pool"),
        help="who calls: an adapter in compat, or an engine on a pool of its own; may be repeated (default all)",
    )  # fmt: skip
    compile_.add_argument(
        "--state-dtype", dest="states", action="append", choices=("bf16", "fp16", "fp32"),
        help="of vLLM's states and a pool's; may be repeated (default fp32 and that of the inputs)",
    )  # fmt: skip
    compile_.add_argument("--jobs", type=int, default=2, help="processes (default 2, about 0.6 GB each)")

    emulate = add("emulate", _emulate, "Run a CuTe DSL script, unmodified, on the emulated GPU.")
    emulate.add_argument("--arch", default="sm_100a", help="default sm_100a")
    emulate.add_argument(
        "--seed", type=int, default=0, help="of the schedule; 0 is eager, odd late, even by random priorities"
    )
    emulate.add_argument(
        "--no-sanitize", dest="sanitize", action="store_false", help="only execute, without race checks"
    )
    emulate.add_argument(
        "--keep-going", action="store_true", help="report findings instead of stopping at the first launch"
    )
    emulate.add_argument(
        "--implicit-waits", action="store_true", help="the use of a tcgen05.ld result waits for it, as ptxas makes it"
    )
    emulate.add_argument(
        "--tensor-fences", action="store_true", help="ask for tcgen05.fence between threads, as the PTX ISA does"
    )
    emulate.add_argument(
        "--time-limit", type=float, default=3600.0, metavar="SECONDS", help="of one launch (default 3600)"
    )
    emulate.add_argument("script", help="path of the script")
    emulate.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")

    model = add("model", _model, "Modelled times on a B200: the numbers of the model, how good they are, a script.")
    model.add_argument("--clock", choices=("locked", "boost"), default="boost", help="1.5 GHz or 1.965 (default boost)")
    about = model.add_subparsers(dest="about", required=True, metavar="constants | calibration | call | run")
    about.add_parser("constants", help="every constant with its source").set_defaults(examples=None)
    calibration = about.add_parser("calibration", help="the model beside published measurements")
    calibration.add_argument("--examples", metavar="ROOT", help="NVIDIA's examples/python/CuTeDSL: attention too")
    called = about.add_parser("call", help="ssd_chunk_scan on bf16 tensors of some sizes")
    for name, size in SIZES.items():
        called.add_argument(f"--{name}", type=int, default=size, help=f"default {size}")
    run = about.add_parser("run", help="modelled cycles of the launches of a CuTe DSL script")
    run.add_argument(
        "--sampled", action="store_true", help="only CTAs that stand for all: faster, and the results are incomplete"
    )
    run.add_argument("script", help="path of the script")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")

    bench = add("bench", _bench, "Measure speed as ratios, both sides in one run, beside the goals.")
    what = bench.add_mutually_exclusive_group(required=True)
    what.add_argument("--cpu", action="store_true", help="the CPU backend")
    what.add_argument("--emulator", metavar="SCRIPT", help="the emulator, on NVIDIA's example mamba2_ssd.py")
    what.add_argument("--modelled", action="store_true", help="modelled times of the suite on a B200, in minutes")
    bench.add_argument("--case", type=int, action="append", metavar="N", help="with --modelled, only this case")
    bench.add_argument(
        "--peer", action="append", default=[], metavar="COMMAND",
        help="with --modelled, another SSD kernel beside this one's counts: a script and its arguments, with {chunks}",
    )  # fmt: skip
    bench.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _info(arguments: argparse.Namespace) -> int:
    from . import info

    described = info.describe()
    print(json.dumps(described, indent=2) if arguments.json else info.text(described))
    return 0


def _check(arguments: argparse.Namespace) -> int:
    # torch's threads sleep at a barrier rather than spin: a fifth slower on an idle machine, but not thirty times
    # slower beside another busy process. OpenMP reads it when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch
    from tqdm import tqdm

    from . import suite
    from .device import Device

    device, note = arguments.device, ""
    try:
        chosen = suite.cases(arguments.case)
        if arguments.emulate:
            device = Device.from_arch(arguments.arch or "sm_100a").arch
            if not device:
                raise ValueError("arch is 'cpu', expected a GPU architecture; leave out --emulate for the CPU.")
        elif arguments.arch or arguments.sanitize:
            name = "--arch" if arguments.arch else "--sanitize"
            raise ValueError(f"{name} is of the emulated GPU, but --emulate is not given; add --emulate.")
    except ValueError as error:
        return _refuse(error)
    if device is None:
        device, note = suite.best_device()
    if device == "cuda" and not torch.cuda.is_available():
        return _refuse("device is cuda, but torch finds no CUDA device; pass --device cpu.")
    if note:
        print(note, file=sys.stderr)
    table = not (arguments.json or arguments.csv)
    if table:
        print(_row("case", "batch", "seqlen", "device", "time", "max error", "matched", "result"))
    outcomes = []
    # disable=None: only where stderr is a terminal.
    with tqdm(total=len(chosen), unit="case", disable=None, leave=False, file=sys.stderr) as bar:
        for outcome in suite.check(chosen, device, arguments.seed, arguments.sanitize):
            outcomes.append(outcome)
            bar.update()
            if table:
                with bar.external_write_mode(file=sys.stdout):
                    print(_outcome_row(outcome))
    passed = sum(outcome.passed for outcome in outcomes)
    if arguments.json:
        report = {"device": device, "note": note, "passed": passed, "cases": [_as_dict(o) for o in outcomes]}
        print(json.dumps(report, indent=2))
    elif arguments.csv:
        writer = csv.DictWriter(sys.stdout, list(_as_dict(outcomes[0])), lineterminator="\n")
        writer.writeheader()
        writer.writerows(_as_dict(outcome) for outcome in outcomes)
    else:
        print(f"{passed} of {len(outcomes)} cases passed on {device}")
    return 0 if passed == len(outcomes) else 1


def _row(*cells: str) -> str:
    widths = (4, 5, 6, 6, 11, 10, 8, 6)
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _outcome_row(o: "Outcome") -> str:
    measured = (
        "-" if o.us is None else f"{o.us:.0f} us",
        "-" if o.max_error is None else f"{o.max_error:.4g}",
        "-" if o.matched is None else f"{o.matched:.4%}",
    )
    row = _row(str(o.case), str(o.batch), str(o.seqlen), o.device, *measured, "pass" if o.passed else "FAIL")
    return f"{row}  {o.message}" if o.message else row


def _as_dict(o: "Outcome") -> dict[str, Any]:
    """With the keys of the published form; JSON has no NaN."""
    values = {"pass" if name == "passed" else name: value for name, value in o._asdict().items()}
    return {n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in values.items()}


def _explain(arguments: argparse.Namespace) -> int:
    import cute_ssd

    try:
        args, kwargs = _meta_call(arguments)
        plan = cute_ssd.explain(getattr(cute_ssd, arguments.function), *args, arch=arguments.arch, **kwargs)
    except (ValueError, TypeError, NotImplementedError) as error:
        return _refuse(error)
    print(plan)
    return 0


def _sizes(a: argparse.Namespace) -> dict[str, int]:
    """The sizes of a call, checked."""
    sizes = {name: getattr(a, name) for name in SIZES}
    for name, size in sizes.items():
        if size < (0 if name in ("batch", "seqlen") else 1):
            raise ValueError(f"{name} is {size}, expected a positive number; pass --{name} with one.")
    return sizes


def _meta_call(a: argparse.Namespace) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of the function without data: sizes and dtypes are all that a plan reads."""
    import torch

    _sizes(a)
    dtype = getattr(torch, DTYPES[a.dtype])

    def empty(*shape: int, of: torch.dtype = torch.float32) -> torch.Tensor:
        if math.prod(max(1, size) for size in shape) * of.itemsize >= 2**63:
            raise ValueError(f"sizes make a tensor of shape {shape}, expected less than 2^63 bytes; pass smaller ones.")
        return torch.empty(shape, dtype=of, device="meta")

    packed, decode = "varlen" in a.function, a.function == "selective_state_update"
    tokens = (a.batch * a.seqlen,) if packed else (a.batch,) if decode else (a.batch, a.seqlen)
    x = empty(*tokens, a.nheads, a.headdim, of=dtype)
    B = empty(*tokens, a.ngroups, a.dstate, of=dtype)
    state = empty(a.batch, a.nheads, a.headdim, a.dstate)
    if a.function == "ssd_chunk_scan":
        return [x, empty(a.batch, a.nheads, a.seqlen), B, B], {}
    call = [x, empty(*tokens, a.nheads), empty(a.nheads), B, B]
    if decode:
        return [state, *call], {}
    offsets, slots = empty(a.batch + 1, of=torch.int32), empty(a.batch, of=torch.int32)
    if a.function == "mamba_chunk_scan_varlen":
        return [*call, offsets], {}
    if packed:
        return [*call, state, slots, offsets], {}
    return call, {"chunk_size": 256}


def _bench(arguments: argparse.Namespace) -> int:
    from . import bench

    if arguments.modelled:
        return _bench_modelled(arguments)
    if arguments.case or arguments.peer:
        name = "--case" if arguments.case else "--peer"
        return _refuse(f"{name} is of the modelled suite, but --modelled is not given; add --modelled.")
    if arguments.emulator:
        from pathlib import Path

        from .emulator import bench as emulator_bench

        try:
            measures = emulator_bench.figures(Path(arguments.emulator))
        except FileNotFoundError as error:
            return _refuse(error)
        figures = bench.show(measures, not arguments.json)
    else:
        figures = bench.run(table=not arguments.json)
    if arguments.json:
        print(json.dumps({"figures": [figure._asdict() | {"met": figure.met} for figure in figures]}, indent=2))
    return 0


def _bench_modelled(arguments: argparse.Namespace) -> int:
    from . import counts, modelled
    from .emulator import EmulatorError
    from .emulator.timing import CLOCKS, Model

    model, found = Model(CLOCKS[modelled.CLOCK]), []
    try:
        peers = list(map(counts.script, arguments.peer))
        if not arguments.json:
            print(modelled.header())
        for row in modelled.rows(arguments.case, model):
            found.append(row)
            if not arguments.json:
                print(modelled.line(row), flush=True)
        if arguments.json:
            result = modelled.totals(found)
            if peers:
                compared = [counts.mine(model), *(counts.other(peer, model) for peer in peers)]
                result["peers"] = [kernels.as_json() for kernels in compared]
            print(json.dumps(result, indent=2))
            return 0
        print(modelled.summary(found, model))
        print()
        for line in counts.lines(model, peers):
            print(line, flush=True)
    except (ValueError, NotImplementedError, EmulatorError) as error:
        return _refuse(error)
    return 0


def _model(arguments: argparse.Namespace) -> int:
    from .emulator.timing import CLOCKS, CONSTANTS, Model, chain_time

    if arguments.about == "constants":
        for c in CONSTANTS.values():
            print(f"{c.name:<22} {c.value:>9g} {c.unit:<26} {c.source}")
        return 0
    if arguments.about == "calibration":
        from pathlib import Path

        from .emulator.timing import calibration

        found = [comparison for group in calibration.GROUPS.values() for comparison in group()]
        if arguments.examples:
            examples = Path(arguments.examples)
            if not (examples / calibration.FMHA).is_file():
                return _refuse(
                    f"examples is {str(examples)!r}, which has no {calibration.FMHA}; give examples/python/CuTeDSL of "
                    "NVIDIA's cutlass."
                )
            found.append(calibration.attention(examples))
        print(calibration.text(found))
        return 0
    from .emulator import EmulatorError, UnsupportedInstruction

    model = Model(CLOCKS[arguments.clock])
    if arguments.about == "call":
        from . import modelled

        try:
            print(modelled.call(**_sizes(arguments), model=model))
        except (ValueError, NotImplementedError, EmulatorError) as error:
            return _refuse(error)
        return 0
    from .emulator.timing.scripts import replay

    if not os.path.isfile(arguments.script):
        return _refuse(f"script is {arguments.script!r}, which is not a file; give the path of a Python script.")
    try:
        print(chain_time(replay(arguments.script, arguments.arguments, model, sampled=arguments.sampled), model))
    except (EmulatorError, UnsupportedInstruction) as error:
        return _refuse(error)
    return 0


def _compile(arguments: argparse.Namespace) -> int:
    import torch

    from .device import Device
    from .models import ENGINES, warm_up

    dtype, *states = (getattr(torch, DTYPES[name]) for name in (arguments.dtype, *(arguments.states or ())))
    engines, jobs = tuple(arguments.engines or ENGINES), max(1, arguments.jobs)
    try:
        arch = Device.from_arch(arguments.arch).arch
        outcome = warm_up(arguments.model, arch, dtype, jobs, engines, tuple(states))
    except (ValueError, NotImplementedError) as error:
        return _refuse(error)
    for purpose, result in outcome.items():
        print(f"{purpose:<72} {result}")
    compiled, found = (sum(result == kind for result in outcome.values()) for kind in ("compiled", "was there"))
    failed = len(outcome) - compiled - found
    print(f"{len(outcome)} kernels: {compiled} compiled, {found} were there" + f", {failed} failed" * bool(failed))
    return 1 if failed else 0


def _emulate(arguments: argparse.Namespace) -> int:
    from .emulator import EmulatorError, KernelError, UnsupportedInstruction, prepare
    from .emulator.script import run_script
    from .errors import ShapeError

    a = arguments
    if not os.path.isfile(a.script):
        return _refuse(f"script is {a.script!r}, which is not a file; give the path of a Python script.")
    try:
        report, session = prepare(
            a.arch,
            seed=a.seed,
            sanitize=a.sanitize,
            keep_going=a.keep_going,
            implicit_waits=a.implicit_waits,
            tensor_fences=a.tensor_fences,
            time_limit=a.time_limit,
        )
        try:
            run_script(a.script, a.arguments, session)
        finally:
            print(report, file=sys.stderr)
    except KernelError:
        return 1  # the report has said it
    except (EmulatorError, UnsupportedInstruction, ShapeError) as error:
        return _refuse(error)
    except SystemExit:
        if not report.findings:
            raise
    return 1 if report.findings else 0


def _refuse(reason: object) -> int:
    print(reason, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
