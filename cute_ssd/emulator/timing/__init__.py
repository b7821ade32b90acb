"""Modelled time: what an executed kernel would take on a B200, from its trace.

`emulate(..., timing=True)` fills `LaunchReport.cycles` and `.modelled`; `chain_time(report.recordings, model)` puts
launches together. Everything here is modelled; README.md says how far to trust it.
"""

from .constants import CLOCKS, CONSTANTS, Constant, Model
from .grid import ChainTime, LaunchTime, Recording, chain_time, launch_time, representatives
from .sm import Barrier, Segment, SmTime, Trace, simulate

__all__ = [
    "CLOCKS",
    "CONSTANTS",
    "Barrier",
    "ChainTime",
    "Constant",
    "LaunchTime",
    "Model",
    "Recording",
    "Segment",
    "SmTime",
    "Trace",
    "chain_time",
    "launch_time",
    "representatives",
    "simulate",
]
