"""Nsight Compute on one case: counters of every kernel of the call, ready for profiling.report.

    python -m profiling.ncu_profile --case 9 --out out/case9
    python -m profiling.ncu_profile --case 9 --out out/case9 --arch sm_100a --dry-run      prints the commands

It writes out/case9.ncu-rep, out/case9.csv (the raw page) and out/case9.case.json (what the case must move).
"""

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from cute_ssd.errors import ShapeError

from . import ProfilingError, cases, metrics, report, run_case

ROOT = Path(__file__).parent.parent
MISSING = (
    "ncu is {ncu!r}, which is not on PATH, expected Nsight Compute's command line; install it (it comes with the CUDA "
    "toolkit), or pass --ncu with its path."
)
DENIED = (
    "ncu may not read the GPU's performance counters (ERR_NVGPUCTRPERM), expected permission; run it as root or with "
    "CAP_SYS_ADMIN (in a container also --cap-add=SYS_ADMIN), or load the driver with "
    "NVreg_RestrictProfilingToAdminUsers=0."
)
NOTHING = (
    "ncu profiled no kernel, expected those in the NVTX range {range!r}; see whether the call ran on the GPU: "
    "python -m profiling.run_case with the same arguments."
)
BUSY = "Another profiler holds the GPU's counters, expected them free; end it (DCGM: dcgmi profiling --pause)."


def profile_command(options: argparse.Namespace, arguments: list[str], arch: str) -> list[str]:
    """The command that profiles: explicit sections and metrics, kernels inside the range only."""
    names = (*metrics.SECTIONS, *([metrics.SOURCE_SECTION] if options.source else []))
    sections = [part for name in names for part in ("--section", name)]
    return [
        options.ncu,
        *("--target-processes", "all"),
        *("--nvtx", "--nvtx-include", f"{run_case.RANGE}/"),
        *("--clock-control", options.clock_control),
        *("--cache-control", options.cache_control),
        *("--replay-mode", options.replay_mode),
        *sections,
        *("--metrics", ",".join(metrics.metrics(arch))),
        *("--force-overwrite", "--export", str(options.out)),
        *(sys.executable, "-m", "profiling.run_case", *arguments),
        *("--describe", str(_beside(options.out, report.CASE_SUFFIX))),
    ]


def export_command(options: argparse.Namespace) -> list[str]:
    """The command that prints the raw page of what was profiled."""
    return [options.ncu, "--import", str(_beside(options.out, ".ncu-rep")), "--page", "raw", "--csv"]


def _beside(out: Path, suffix: str) -> Path:
    return out.with_name(out.name + suffix)


def explain_failure(text: str, code: int) -> str | None:
    """A sentence on what went wrong, None where nothing did."""
    if "ERR_NVGPUCTRPERM" in text:
        return DENIED
    if "driver resource was unavailable" in text:
        return BUSY
    if "No kernels were profiled" in text:
        return NOTHING.format(range=f"{run_case.RANGE}/")
    if "Failed to find metric" in text:
        names = re.findall(r"Failed to find metric:?\s*(\S+)", text)
        return f"ncu does not know the metric {', '.join(names)}, expected those of this GPU; pass --arch as it is."
    if code:
        lines = [line for line in text.strip().splitlines() if line.strip()] or ["no output"]
        return f"ncu ended with exit code {code}, expected 0: {lines[-1].strip()}"
    return None


def run(options: argparse.Namespace, arguments: list[str], arch: str) -> None:
    """Profiles and exports; what ncu says goes to stderr as it comes."""
    if shutil.which(options.ncu) is None:
        raise ProfilingError(MISSING.format(ncu=options.ncu))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        profile_command(options, arguments, arch), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        print(line, end="", file=sys.stderr)
    if (reason := explain_failure("".join(said), process.wait())) is not None:
        raise ProfilingError(reason)
    done = subprocess.run(export_command(options), cwd=ROOT, capture_output=True, text=True)
    if (reason := explain_failure(done.stdout + done.stderr, done.returncode)) is not None:
        raise ProfilingError(reason)
    _beside(options.out, ".csv").write_text(done.stdout)


def main(argv: list[str] | None = None) -> int:
    options, arguments = _parser().parse_known_args(argv)
    try:
        (work,) = run_case.one(cases.selected(run_case.parser().parse_args(arguments)))
        arch = metrics.family(options.arch or _arch())
        options.out = options.out.absolute()
        if options.dry_run:
            print(shlex.join(profile_command(options, arguments, arch)))
            print(f"{shlex.join(export_command(options))} > {shlex.quote(str(_beside(options.out, '.csv')))}")
            return 0
        run(options, arguments, arch)
    except (ProfilingError, ShapeError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{work.name}, clock control {options.clock_control}: {options.out}.ncu-rep and .csv", file=sys.stderr)
    return report.main([str(_beside(options.out, ".csv"))])


def _arch() -> str:
    if not torch.cuda.is_available():
        raise ProfilingError(
            "arch is not given and torch finds no CUDA device, expected a GPU to profile on; pass --arch (with "
            "--dry-run, to see the command)."
        )
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.ncu_profile",
        description=__doc__,
        epilog="Every other option is one of profiling.run_case: --case, --model, --seqlen, --implementation, ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, default=Path("ssd"), metavar="PREFIX", help="of the files (default ssd)")
    parser.add_argument("--arch", help="whose counters are asked for (default: the GPU's)")
    parser.add_argument("--ncu", default="ncu", metavar="PROGRAM", help="default ncu, from PATH")
    parser.add_argument(
        "--clock-control",
        choices=("none", "base"),
        default="none",
        help="none (default): clocks stay as they are, locked by you (nvidia-smi -lgc 1500) or boosting; base: ncu "
        "locks the base clock",
    )
    parser.add_argument("--cache-control", choices=("all", "none"), default="all", help="all (default): cold caches")
    parser.add_argument(
        "--replay-mode",
        choices=("kernel", "application", "range", "app-range"),
        default="kernel",
        help="default kernel",
    )
    parser.add_argument(
        "--source",
        action="store_true",
        help="stalls by instruction as well (SourceCounters), which is reported to hang on kernels with bulk copies",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands and run nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
