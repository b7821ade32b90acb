"""From dt (or log decays) to steps and decays of a tile's tokens: softplus, bias, limits, and everything in fp32."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from ..arithmetic import LOG2_E, choose, clamp
from ..views import flat, vector
from .config import Chunked

VANISHING = -160.0
VANISHED = 200.0  # of which fp32 has no exp(-x); infinities have no place in the sums
LOG_2 = 0.6931471805599453
LOG1P = (  # log(1 + e) / e on [0, 1], to 5e-9: interpolated in Chebyshev points
    1.0, -0.49999892711639404, 0.33329710364341736, -0.24951615929603577, 0.1966327428817749,
    -0.1526966691017151, 0.10543623566627502, -0.056373611092567444, 0.019542526453733444, -0.0031760570127516985,
)  # fmt: skip


class Steps(NamedTuple):
    """Where dt comes from: as in `ChunkedKernels.__call__`."""

    dt: Any  # (batch, seqlen, H)
    A: Any  # (H,)
    dt_bias: Any  # (H,)
    dt_min: Any
    dt_max: Any


def load_step(config: Chunked, steps: Steps, row: Any, first: Any, token: Any, valid: Any, head: Any) -> Any:
    """dt of token number `token` of the tile that starts at `first`. Behind its `valid` tokens (at least one) this is
    a value of the tile, to be dropped by `discretise`: loads without a branch run side by side."""
    there = first + cutlass.min(token, valid - 1)
    return vector(steps.dt, flat(steps.dt, row, there, head), 1)[0]


def discretise(config: Chunked, steps: Steps, raw: Any, inside: Any, head: Any) -> tuple[Any, Any]:
    """(step, log2 of the decay) of a token; (0, 0) where it is not `inside` the tile. Log decays have no step: 1.

    A decay below 2^-160 is 0 in fp32. It is not taken to be less, so that running sums stay small, and with them their
    rounding errors, which the decays between later tokens would suffer from.
    """
    return discretise_with(config, steps, raw, inside, load_parameters(config, steps, head))


def load_parameters(config: Chunked, steps: Steps, head: Any) -> tuple[Any, Any]:
    """(rate: A as a log2, bias) of a head; 0 where there are none."""
    rate, bias = Float32(0.0), Float32(0.0)
    if const_expr(config.A is not None):
        rate = steps.A[head].to(Float32) * LOG2_E
    if const_expr(config.dt_bias is not None):
        bias = steps.dt_bias[head].to(Float32)
    return rate, bias


def discretise_with(config: Chunked, steps: Steps, raw: Any, inside: Any, parameters: tuple[Any, Any]) -> Any:
    """`discretise` with what `load_parameters` has found."""
    rate, bias = parameters
    raw = raw.to(Float32)
    if const_expr(config.A is None):
        return choose(inside, 1.0, 0.0), choose(inside, at_least(raw * LOG2_E, VANISHING), 0.0)
    dt = raw
    if const_expr(config.dt_bias is not None):
        dt = dt + bias
    if const_expr(config.softplus):
        dt = softplus(dt)
    dt = clamp(dt, steps.dt_min, steps.dt_max)
    return choose(inside, dt, 0.0), choose(inside, at_least(dt * rate, VANISHING), 0.0)


def at_least(x: Any, low: float) -> Any:
    """A NaN stays one."""
    return choose(x < low, low, x)


def softplus(x: Any) -> Any:
    """log(1 + exp(x)) = max(x, 0) + log(1 + e) with e = exp(-|x|), accurate to fp32 in the small values as well. Unlike
    `arithmetic.softplus` without a branch, so that several run side by side, but with more registers."""
    falling = choose(x > 0, -x, x)
    falling = choose(falling < -VANISHED, -VANISHED, falling)
    scaled = falling * LOG2_E
    rest = cute.math.fma(falling, Float32(LOG2_E), -scaled)  # what rounding took away
    e = cute.math.exp2(scaled, fastmath=True)
    e = cute.math.fma(e, rest * LOG_2, e)
    ratio = Float32(LOG1P[-1])  # log(1 + e) / e
    for coefficient in LOG1P[-2::-1]:
        ratio = cute.math.fma(ratio, e, Float32(coefficient))
    return choose(x > 0, x, 0.0) + ratio * e
