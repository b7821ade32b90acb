"""Measurement and presentation: timings, Nsight Compute, speed of light, comparisons, roofline. See README.md."""


class ProfilingError(Exception):
    """A request that cannot be met, in one sentence: what it is, what was expected, what to do."""
