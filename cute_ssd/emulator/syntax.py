"""What a PTX text says, as `ptx.py` reads it: kernels, instructions, operands, variables."""

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias


class PtxError(ValueError):
    """PTX that does not parse: one sentence with the line's number and text. `line` is 1-based."""

    def __init__(self, reason: str, line: int, text: str) -> None:
        super().__init__(f"PTX line {line}: {reason}: {text.strip()[:200]}")
        self.line = line


class Register(NamedTuple):
    """A declared register; a name declared in a block carries the block's number, so names are unique in the kernel."""

    name: str


class Predicate(NamedTuple):
    """A predicate operand with its sign, "!%p1"; without the "!" it is a plain Register."""

    name: str
    negated: bool


class Immediate(NamedTuple):
    """kind "int": bits is a Python integer of either sign; kind "f32" or "f64": bits is the pattern of the float."""

    bits: int
    kind: str


class Symbol(NamedTuple):
    """The name of a variable, a parameter, a function or a label."""

    name: str


class Special(NamedTuple):
    """A special register, such as %tid.x: any name with % that nobody declared."""

    name: str


class Sink(NamedTuple):
    """The "_" that throws a result away."""


class Vector(NamedTuple):
    """{%r1, %r2, _}, and the parenthesised lists of a call."""

    items: "tuple[Operand, ...]"


class Pair(NamedTuple):
    """Two results, "%r1|%p1" (setp, shfl, elect, match)."""

    first: "Operand"
    second: "Operand"


class Address(NamedTuple):
    """[base + offset], the offset in bytes."""

    base: Register | Symbol | Immediate | Special
    offset: int


class TensorAddress(NamedTuple):
    """[map, {coordinates}]: a tensor map and where in its tensor."""

    map: Address
    coordinates: "tuple[Operand, ...]"


Operand: TypeAlias = (
    Register | Predicate | Immediate | Symbol | Special | Sink | Vector | Pair | Address | TensorAddress
)


@dataclass(slots=True)
class Instruction:
    """One instruction. A call always has three operands: Vector(results), Symbol(function), Vector(arguments)."""

    name: str  # "fma.rn.f32"
    opcode: str  # "fma"
    modifiers: tuple[str, ...]  # ("rn", "f32")
    operands: tuple[Operand, ...]
    guard: str | None  # the register of @%p1
    guard_negated: bool
    line: int  # in the PTX text, 1-based
    source: tuple[str, int] | None  # Python file and line; None where the compiler names none
    text: str


class Parameter(NamedTuple):
    """A parameter of a kernel, of a function or of one call; `offset` is in the list, laid out with natural gaps."""

    name: str
    size: int
    align: int
    offset: int


@dataclass
class Variable:
    """A variable with an address. A dynamic one is the shared memory of the launch: its size is not in the PTX."""

    name: str
    size: int
    align: int
    space: str  # "shared" | "global" | "local" | "const"
    data: bytes | None = None  # the initialiser, as long as the variable
    dynamic: bool = False


@dataclass
class Function:
    """A `.func`: only declared (vprintf), or with a body as the f64 helpers of the CUDA math library have."""

    name: str
    returns: tuple[Parameter, ...]
    parameters: tuple[Parameter, ...]
    body: "Kernel | None" = None


@dataclass
class Kernel:
    """A body and what it sees: `variables` and `functions` include the module's."""

    name: str
    target: str
    ptx_version: str
    parameters: tuple[Parameter, ...]
    directives: dict[str, tuple[int, ...]]  # "reqntid": (512, 1, 1), "minnctapersm": (1,)
    variables: dict[str, Variable]
    functions: dict[str, Function]
    registers: dict[str, str] = field(default_factory=dict)  # name -> "pred", "b32", ...
    labels: dict[str, int] = field(default_factory=dict)  # -> instruction; may lie past the last one
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)  # the tables of brx.idx
    call_parameters: dict[str, Parameter] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)

    @property
    def reqntid(self) -> tuple[int, ...] | None:
        """(x, y, z), or None where the kernel does not say."""
        return self.directives.get("reqntid")

    @property
    def reqnctapercluster(self) -> tuple[int, ...] | None:
        return self.directives.get("reqnctapercluster")


@dataclass
class Module:
    version: str
    target: str
    address_size: int
    variables: dict[str, Variable]
    functions: dict[str, Function]
    kernels: dict[str, Kernel]
