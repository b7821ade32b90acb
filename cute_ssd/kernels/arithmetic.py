"""fp32 arithmetic of the kernels: pairs of numbers in one instruction where the architecture has them, and functions.

What is called here while a kernel is traced emits instructions; a pair is a tuple of two `Float32`.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cutlass_dsl import select_

LOG2_E = 1.4426950408889634
SOFTPLUS_LINEAR = 20.0

Pair = tuple[Any, Any]


def mul2(packed: bool, a: Pair, b: Pair) -> Pair:
    if packed:
        return cute.arch.mul_packed_f32x2(a, b)
    return a[0] * b[0], a[1] * b[1]


def add2(packed: bool, a: Pair, b: Pair) -> Pair:
    if packed:
        return cute.arch.add_packed_f32x2(a, b)
    return a[0] + b[0], a[1] + b[1]


def fma2(packed: bool, a: Pair, b: Pair, c: Pair) -> Pair:
    """a·b + c, rounded once."""
    if packed:
        return cute.arch.fma_packed_f32x2(a, b, c)
    return cute.math.fma(a[0], b[0], c[0]), cute.math.fma(a[1], b[1], c[1])


def choose(condition: Any, yes: Any, no: Any) -> Any:
    """yes where the condition holds, else no, without a branch; both are of type Float32."""
    return Float32(select_(condition, Float32(yes), Float32(no)))


def widen(values: Any) -> Any:
    """A short vector in registers as fp32. Two bfloat16 in a register take two instructions; a conversion of each
    would take three, as the upper one has to be moved first."""
    if values.element_type is not cutlass.BFloat16 or cute.size(values) % 2:
        return values.load().to(Float32)
    words = cute.recast_tensor(values, cutlass.Uint32)
    bits = cute.make_rmem_tensor(cute.size(values), cutlass.Uint32)
    for k in range(cute.size(words)):
        bits[2 * k], bits[2 * k + 1] = words[k] << 16, words[k] & cutlass.Uint32(0xFFFF0000)
    return cute.recast_tensor(bits, Float32).load()


def kept(value: Any) -> Any:
    """An integer that the compiler must keep in a register: it would rather compute it again in each turn of a loop."""
    kind = type(value)
    return cute.arch.inline_ptx(f"mov.b{kind.width} {{$w0}}, {{$r0}};", write_only_types=[kind], read_only_args=[value])


def softplus(x: Any) -> Any:
    """log(1 + exp(x)), linear above 20 as torch has it. Accurate also where exp(x) is lost beside 1."""
    return choose(x > SOFTPLUS_LINEAR, x, cute.math.log1p(cute.math.exp(x)))


def clamp(x: Any, low: Any, high: Any) -> Any:
    """A NaN stays one, as in torch; `min` and `max` of the hardware drop it."""
    x = choose(x < low, low, x)
    return choose(x > high, high, x)


def silu(x: Any) -> Any:
    """x / (1 + exp(-x))."""
    return x * cute.arch.rcp_approx(1.0 + cute.math.exp2(x * -LOG2_E, fastmath=True))


def numeric(dtype: str) -> Any:
    """The DSL's type of a torch dtype's name."""
    return {
        "float32": cutlass.Float32,
        "bfloat16": cutlass.BFloat16,
        "float16": cutlass.Float16,
        "int32": cutlass.Int32,
        "int64": cutlass.Int64,
        "uint32": cutlass.Uint32,
        "bool": cutlass.Boolean,
    }[dtype]
