"""The timing model beside published measurements: no figure may get worse than it was."""

import statistics

import pytest

from cute_ssd.__main__ import main
from cute_ssd.emulator.timing import CONSTANTS, calibration, microbenchmarks

# Group: (mean of |error|, largest |error|, share within 10 %) that the table had, rounded up.
RECORDED = {
    "tcgen05.mma rate": (0.005, 0.035, 1.0),
    "tcgen05.mma rate, fp8": (0.01, 0.045, 1.0),
    "tcgen05.mma rate, int8": (0.01, 0.045, 1.0),
    "tcgen05.mma latency": (0.015, 0.055, 1.0),
    "tcgen05.mma latency, fp8": (0.015, 0.055, 1.0),
    "tcgen05.mma latency, int8": (0.02, 0.07, 1.0),
    "TMA in a steady state": (0.04, 0.125, 0.95),
    "TMA cold": (0.14, 0.26, 0.33),
    "CUTLASS GEMM main loop": (0.06, 0.25, 0.85),
    "CUTLASS GEMM main loop, fp8": (0.04, 0.14, 0.97),
}
STAGES = (2, 5)  # of the main loops that are repeated here


@pytest.mark.parametrize("group", RECORDED)
def test_errors_stay_within_what_is_recorded(group):
    dtype = next((dtype for dtype, name in calibration.LOOPS.items() if name == group), None)
    found = list(calibration.main_loops(dtype, STAGES) if dtype else calibration.GROUPS[group]())
    errors = [abs(comparison.error) for comparison in found]
    mean, largest, close = RECORDED[group]
    assert len(errors) >= 9
    assert statistics.mean(errors) <= mean
    assert max(errors) <= largest
    assert sum(error <= 0.1 for error in errors) >= close * len(errors)


def test_formats_are_executed_as_their_own_kind():
    for dtype, kind in (("BF16", "kind::f16"), ("E4M3", "kind::f8f6f4"), ("S8", "kind::i8")):
        program = microbenchmarks.products(128, 64, False, 1, 1, dtype).program
        texts = [program.instruction_at(int(record["line"])).text for record in program.records if record["line"] > 0]
        assert [kind in text for text in texts if "tcgen05.mma" in text] == [True]


def test_the_table_names_what_misses():
    found = list(calibration.copy_latencies())
    text = calibration.text(found)
    assert "first 4096 bytes" in text and "What misses:" in text
    assert len(text.splitlines()) > len(found)


def test_the_command_lists_every_constant(capsys):
    assert main(["model", "constants"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in CONSTANTS) and len(printed.splitlines()) == len(CONSTANTS)


def test_a_script_that_does_not_exist_is_refused(capsys):
    assert main(["model", "run", "no_such_script.py"]) == 2
    assert "is not a file" in capsys.readouterr().err
