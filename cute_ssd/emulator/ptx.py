"""PTX text to kernels: the registers, variables, labels and instructions that the emulator executes.

The parser knows the grammar of PTX and no instruction: an operation and its modifiers stay text, an operand becomes
one of a few shapes. What does not parse raises PtxError, and so does an unknown directive: nothing is skipped silently.

Two passes. The outline reads the module level and only finds where each body ends, because `.file` comes after the
bodies that refer to it, and because one kernel of a module shall cost one kernel. Then a body is read statement by
statement: a regular expression finds the statement, a dictionary that fills itself turns operand text into operands.
"""

import re
from math import prod
from os.path import normpath
from typing import NoReturn

from .syntax import (
    Address,
    Function,
    Immediate,
    Instruction,
    Kernel,
    Module,
    Operand,
    Pair,
    Parameter,
    Predicate,
    PtxError,
    Register,
    Sink,
    Special,
    Symbol,
    TensorAddress,
    Variable,
    Vector,
)

_SIZES = {
    **dict.fromkeys(("b8", "u8", "s8"), 1),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16"), 2),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2"), 4),
    **dict.fromkeys(("b64", "u64", "s64", "f64", "f32x2"), 8),
    "b128": 16,
}


def parse(text: str) -> Module:
    """The module with all its kernels."""
    module = _Outline(text)
    kernels = {name: module.body(header) for name, header in module.entries.items()}
    return Module(module.version, module.target, module.address_size, module.variables, module.functions, kernels)


def parse_kernel(text: str, name: str) -> Kernel:
    """One kernel of the module; the bodies of the other kernels are not read."""
    module = _Outline(text)
    if name not in module.entries:
        raise PtxError(f"no kernel {name}, only {', '.join(module.entries) or 'none'}", 1, text.partition("\n")[0])
    return module.body(module.entries[name])


# --- the outline: the module level ---

_COMMENT = re.compile(r'("(?:[^"\\\n]|\\.)*+")|//[^\n]*+|/\*.*?\*/', re.S)
_BRACE = re.compile(r'"(?:[^"\\\n]|\\.)*+"|[{}]')
_TOP = re.compile(
    r"""\s*+(?:
      \.version\s+(?P<version>[\d.]+)
    | \.target\s+(?P<target>\w+)(?:\s*,\s*\w+)*
    | \.address_size\s+(?P<address_size>\d+)
    | \.file\s+(?P<file>\d+)\s+"(?P<path>(?:[^"\\]|\\.)*)"(?:\s*,\s*\d+\s*,\s*\d+)?
    | \.pragma\s*"[^"]*"\s*(?P<pragma>;)
    | \.section\s+[\w.$]+\s*(?P<section>\{)
    | (?:\.visible\s+|\.weak\s+|(?P<extern>\.extern)\s+)?(?:
        \.(?P<function>entry|func)\b\s*(?:\((?P<returns>[^)]*)\)\s*)?(?P<name>[\w$]+)\s*
        (?:\((?P<parameters>[^)]*)\)\s*)?(?P<directives>(?:\.\w++\s*+(?:\d[\d\s,]*+|"[^"]*+"\s*+;)?\s*+)*+)(?P<end>[;{])
      | (?P<variable>\.(?:shared|global|const)\b[^;]*);)
    | (?P<junk>\S)
    )""",
    re.X,
)
_DIRECTIVE = re.compile(r'\.(\w+)\s*(\d[\d\s,]*|"[^"]*"\s*;)?')
_DIMENSIONS = {"maxntid", "reqntid", "reqnctapercluster"}
_DIRECTIVES = {"minnctapersm", "maxnctapersm", "maxnreg", "maxclusterrank", "explicitcluster", "blocksareclusters"}
_DIRECTIVES |= {"noreturn", "pragma", *_DIMENSIONS}
_PARAMETER = re.compile(
    r"\s*\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s*(?:\.\w+\s*)?(?:\.align\s+\d+\s*)?)?"
    r"([\w$%]+)\s*(?:\[\s*(\d+)\s*\])?\s*"
)
_VARIABLE = re.compile(
    r"\.(shared|global|const|local)\s+(?:\.align\s+(\d+)\s+)?(?:\.v([248])\s+)?\.(\w+)\s+([\w$%]+)\s*"
    r"((?:\[\s*\d*\s*\]\s*)*)(?:=\s*\{?([^{}]*)\}?\s*)?"
)
_NUMBER = re.compile(
    r"(-?)(?:0[xX]([\da-fA-F]+)|0[bB]([01]+)|0([0-7]+)|(0|[1-9]\d*))U?|0[fF]([\da-fA-F]{8})|0[dD]([\da-fA-F]{16})"
)


def _number(text: str) -> Immediate | None:
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    sign, *digits, single, double = match.groups()
    if single or double:
        return Immediate(int(single or double, 16), "f32" if single else "f64")
    bits = next(int(found, base) for found, base in zip(digits, (16, 2, 8, 10), strict=True) if found)
    return Immediate(-bits if sign else bits, "int")


class _Outline:
    """The module level, with the text of the bodies still to read."""

    def __init__(self, text: str) -> None:
        self.original = text
        # Without comments, but with their line ends: positions change and line numbers do not.
        self.text = _COMMENT.sub(lambda found: found[1] or "\n" * found[0].count("\n") or " ", text)
        self.version = self.target = ""
        self.address_size = 32  # what PTX means when it does not say
        self.files: dict[int, str] = {}
        self.variables: dict[str, Variable] = {}
        self.functions: dict[str, Function] = {}
        self.entries: dict[str, re.Match[str]] = {}
        self._read()

    def fail(self, reason: str, line: int) -> NoReturn:
        raise PtxError(reason, line, self.original.split("\n")[line - 1])

    def line_of(self, position: int) -> int:
        return self.text.count("\n", 0, position) + 1

    def _read(self) -> None:
        defined: list[re.Match[str]] = []
        position = 0
        while (match := _TOP.match(self.text, position)) is not None:
            kind, position = match.lastgroup, match.end()
            if kind == "version":
                self.version = match["version"]
            elif kind == "target":
                self.target = match["target"]
            elif kind == "address_size":
                self.address_size = int(match["address_size"])
            elif kind == "path":
                self.files[int(match["file"])] = normpath(match["path"])
            elif kind == "section":  # debug information
                position = self._closing(position - 1)
            elif kind == "variable":
                line = self.line_of(match.start("variable"))
                variable = self.variable(match["variable"], line, extern=match["extern"] is not None)
                self.variables[variable.name] = variable
            elif kind == "end":
                if match["function"] == "func":
                    line, name = self.line_of(match.start("function")), match["name"]
                    lists = self.parameters(match["returns"], line), self.parameters(match["parameters"], line)
                    self.functions.setdefault(name, Function(name, *lists))  # it may be declared before it is defined
                if match["end"] == "{":
                    position = self._closing(position - 1)
                    if match["function"] == "func":
                        defined.append(match)
                    else:
                        self.entries[match["name"]] = match
            elif kind == "junk":
                self.fail("this is unknown at the module level", self.line_of(position))
        for match in defined:
            self.functions[match["name"]].body = self.body(match)

    def _closing(self, start: int) -> int:
        """The position behind the brace that closes the one at `start`."""
        depth = 0
        for brace in _BRACE.finditer(self.text, start):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0:
                return brace.end()
        self.fail("this block is never closed", self.line_of(start))

    def body(self, header: re.Match[str]) -> Kernel:
        line = self.line_of(header.start("name"))
        directives: dict[str, tuple[int, ...]] = {}
        for name, value in _DIRECTIVE.findall(header["directives"]):
            if name not in _DIRECTIVES:
                self.fail(f"the directive .{name} of this kernel is unknown", line)
            if name != "pragma":
                numbers = tuple(map(int, value.replace(",", " ").split()))
                directives[name] = (*numbers, 1, 1)[:3] if name in _DIMENSIONS else numbers
        parameters, returns = self.parameters(header["parameters"], line), self.parameters(header["returns"], line)
        kernel = Kernel(
            header["name"], self.target, self.version, parameters, directives, dict(self.variables), self.functions
        )
        _Body(self, kernel, {parameter.name for parameter in (*parameters, *returns)}).read(header.end())
        return kernel

    def parameters(self, text: str | None, line: int) -> tuple[Parameter, ...]:
        found: list[Parameter] = []
        offset = 0
        for item in text.split(",") if text and text.strip() else ():
            match = _PARAMETER.fullmatch(item)
            if match is None or match[2] not in _SIZES:
                self.fail(f"cannot read the parameter {item.strip()!r}", line)
            size = _SIZES[match[2]]
            align = int(match[1] or size)
            found.append(Parameter(match[3], size * int(match[4] or 1), align, -(-offset // align) * align))
            offset = found[-1].offset + found[-1].size
        return tuple(found)

    def variable(self, text: str, line: int, *, extern: bool = False) -> Variable:
        match = _VARIABLE.fullmatch(text)
        if match is None or match[4] not in _SIZES:
            self.fail("cannot read this variable", line)
        space, align, lanes, element, name, shape, values = match.groups()
        size = _SIZES[element] * int(lanes or 1)
        align = int(align or size)
        dimensions = re.findall(r"\[\s*(\d*)", shape)
        if extern or "" in dimensions:
            if not extern or space != "shared" or dimensions != [""] or values:
                self.fail("only the shared memory of the launch is external and has no size", line)
            return Variable(name, 0, align, space, dynamic=True)
        size *= prod(map(int, dimensions))
        if not values:
            return Variable(name, size, align, space)
        data = bytearray()
        for item in values.split(","):
            number = _number(item.strip())
            if number is None:
                self.fail(f"cannot read the initial value {item.strip()!r}", line)
            data += (number.bits % (1 << 8 * _SIZES[element])).to_bytes(_SIZES[element], "little")
        if len(data) > size:
            self.fail("more initial values than elements", line)
        return Variable(name, size, align, space, bytes(data).ljust(size, b"\0"))


# --- a body ---

_STATEMENT = re.compile(
    r"""\s*+(?:
      (?P<statement>(?:@(!?)\s*+([\w$%]++)\s++)?([a-z]\w*+(?:(?:\.|::)\w++)*+)(?!\s*+:)\s*+([^;]*+));
    | \.loc\s++(?P<loc>(\d++)\s++(\d++)\s++\d++)
        (?:\s*+,\s*+function_name\s++[^\s,]++\s*+,\s*+inlined_at\s++(?P<inlined>(\d++)\s++(\d++)\s++\d++))?+
    | (?P<label>[\w$%]++)\s*+:(?!:)
    | (?P<open>\{)
    | (?P<close>\})
    | \.(?P<directive>\w++)\s*+(?P<rest>(?:"[^"]*+"|[^;"])*+);
    | (?P<junk>\S)
    )""",
    re.X,
)
# One operand of a list: no comma except inside brackets. Nothing in PTX nests deeper than [map, {coordinates}].
_ITEM = re.compile(r"(?:[^,{}\[\]()]++|\{[^{}]*+\}|\([^()]*+\)|\[(?:[^\[\]{}]++|\{[^{}]*+\})*+\])++")
_ADDRESS = re.compile(r"([\w$%.]+)\s*(?:(?:\+|(?=-))\s*(-?\w+))?")
_NAME = re.compile(r"[A-Za-z_$][\w$]*")
_SPECIAL = re.compile(r"%[A-Za-z]\w*(?:\.\w+)?")
_REGISTERS = re.compile(r"\s*([\w$%]+?)(?:<\s*(\d+)\s*>)?\s*")


class _Scope(dict[str, Operand]):
    """The operands seen in one block, by their text; a miss reads the text. Blocks nest, and so do their names."""

    def __init__(self, body: "_Body", outer: "_Scope | None") -> None:
        self.body = body
        self.outer = outer
        self.suffix = "" if outer is None else f".{body.scopes}"  # a dot: no name in PTX has one
        self.labels: dict[str, str] = {}
        self.tables: list[str] = []
        self.first = len(body.kernel.instructions)
        body.scopes += 1

    def declare(self, name: str, kind: type[Register] | type[Symbol]) -> str:
        """The unique name of a register or variable of this block."""
        if name in self:
            self.body.fail(f"{name} is declared twice, or after its use, in one block")
        self[name] = kind(name + self.suffix)
        return name + self.suffix

    def register(self, text: str) -> str:
        register = self[text]
        if not isinstance(register, Register):
            self.body.fail(f"{text} is not a register")
        return register.name

    def split(self, text: str) -> tuple[Operand, ...]:
        if "{" in text or "[" in text or "(" in text:
            items = _ITEM.findall(text)
            if ",".join(items) != text:
                self.body.fail("cannot read these operands")
            return tuple(map(self.__getitem__, items))
        return tuple(map(self.__getitem__, text.split(","))) if text else ()

    def __missing__(self, written: str) -> Operand:
        text = written.strip()
        operand = self[written] = self._read(text) if text == written else self[text]
        return operand

    def _read(self, text: str) -> Operand:
        ends = text[:1] + text[-1:]
        if ends in ("{}", "()"):
            return Vector(self.split(text[1:-1].strip()))
        if ends == "[]":
            base, comma, rest = text[1:-1].partition(",")
            address = self._address(base.strip())
            if not comma:
                return address
            coordinates = self[rest]
            if isinstance(coordinates, Vector):
                return TensorAddress(address, coordinates.items)
        elif "|" in text:
            first, _, second = text.partition("|")
            return Pair(self[first], self[second])
        elif text.startswith("!"):
            return Predicate(self.register(text[1:]), True)
        else:
            return self._atom(text)
        self.body.fail(f"cannot read the operand {text!r}")

    def _address(self, text: str) -> Address:
        match = _ADDRESS.fullmatch(text)
        offset = _number(match[2] or "0") if match else None
        base = self[match[1]] if match else None
        if offset is None or not isinstance(base, Register | Symbol | Immediate | Special):
            self.body.fail(f"cannot read the address [{text}]")
        return Address(base, offset.bits)

    def _atom(self, text: str) -> Operand:
        if self.outer is not None:
            return self.outer[text]
        if text == "_":
            return Sink()
        if text == "WARP_SZ":
            return Immediate(32, "int")
        if _NAME.fullmatch(text):
            self.body.symbols[text] = self.body.line
            return Symbol(text)
        if _SPECIAL.fullmatch(text):
            return Special(text)
        number = _number(text)
        if number is None:
            self.body.fail(f"cannot read the operand {text!r}")
        return number


class _Body:
    """Reads the statements of one body into a kernel."""

    def __init__(self, outline: _Outline, kernel: Kernel, parameters: set[str]) -> None:
        self.outline = outline
        self.kernel = kernel
        self.line = 0
        self.scopes = 0
        self.symbols: dict[str, int] = {}  # names no block declares, such as labels, with the line of the first use
        self.known = {*parameters, *kernel.variables, *kernel.functions}
        self.scope = _Scope(self, None)

    def fail(self, reason: str) -> NoReturn:
        self.outline.fail(reason, self.line)

    def read(self, start: int) -> None:
        """Read from behind the opening brace to the closing one."""
        text, line = self.outline.text, self.outline.line_of(start)
        instructions, names = self.kernel.instructions, dict[str, tuple[str, tuple[str, ...]]]()
        source: tuple[str, int] | None = None
        label, position = "", start
        for match in _STATEMENT.finditer(text, start):
            kind = match.lastgroup
            begin = match.start("statement") if kind == "statement" else match.end()
            line += text.count("\n", position, begin)
            self.line, position = line, begin
            if kind == "statement":
                statement, sign, guard, name, operands = match.group(1, 2, 3, 4, 5)
                if name not in names:
                    opcode, *modifiers = name.split(".")
                    names[name] = opcode, tuple(modifiers)
                opcode, found = names[name]
                items = self.scope.split(operands)
                if guard:
                    guard = self.scope.register(guard)
                if opcode == "call":
                    items = self._call(items)
                instructions.append(
                    Instruction(name, opcode, found, items, guard, sign == "!", line, source, statement)
                )
            elif kind in ("loc", "inlined"):
                # In the braces of inline assembly the compiler counts lines on, beyond the Python line it came from.
                source = source if self.scope.outer else self._source(match)
            elif kind == "label":
                label = match["label"]
                self._label(label)
            elif kind == "open":
                self.scope = _Scope(self, self.scope)
            elif kind == "close":
                self._close()
                if self.scope.outer is None:
                    return self._check()
                self.scope = self.scope.outer
            elif kind == "rest":
                self._directive(match["directive"], match["rest"], label)
            else:
                self.fail("cannot read this statement")
        self.fail("the body is never closed")

    def _call(self, operands: tuple[Operand, ...]) -> tuple[Operand, ...]:
        if operands and not isinstance(operands[0], Vector):
            operands = (Vector(()), *operands)
        if len(operands) == 2:
            operands = (*operands, Vector(()))
        if len(operands) != 3 or not isinstance(operands[1], Symbol) or not isinstance(operands[2], Vector):
            self.fail("only a direct call is known")
        if operands[1].name not in self.kernel.functions:
            self.fail(f"the function {operands[1].name} is not declared")
        return operands

    def _source(self, match: re.Match[str]) -> tuple[str, int] | None:
        file, row, outer_file, outer_row = match.group(7, 8, 10, 11)
        path = self.outline.files.get(int(file))
        if outer_file and path and "nvidia_cutlass_dsl" in path:  # not the DSL's own file: the line that calls into it
            path, row = self.outline.files.get(int(outer_file)), outer_row
        if path is None:
            self.fail("this .loc names a file that no .file declares")
        return (path, int(row)) if row != "0" else None

    def _label(self, name: str) -> None:
        unique = name + self.scope.suffix
        self.known.add(name)
        if unique in self.kernel.labels:
            self.fail(f"the label {name} is defined twice")
        self.scope.labels[name] = unique
        self.kernel.labels[unique] = len(self.kernel.instructions)

    def _close(self) -> None:
        """Give the branches of a block the unique names of its labels: a branch may come before its label."""
        scope, tables = self.scope, self.kernel.branch_targets
        if scope.outer is None:
            return
        for table in scope.tables:
            tables[table] = tuple(scope.labels.get(name, name) for name in tables[table])
        scope.outer.tables += scope.tables
        if scope.labels:
            for instruction in self.kernel.instructions[scope.first :]:
                if instruction.opcode in ("bra", "brx"):
                    instruction.operands = tuple(
                        Symbol(scope.labels.get(item.name, item.name)) if isinstance(item, Symbol) else item
                        for item in instruction.operands
                    )

    def _directive(self, name: str, rest: str, label: str) -> None:
        kernel, scope = self.kernel, self.scope
        if name == "reg":
            self._registers(rest)
        elif name == "param":
            (parameter,) = self.outline.parameters(".param " + rest, self.line)
            unique = scope.declare(parameter.name, Symbol)
            kernel.call_parameters[unique] = parameter._replace(name=unique)
        elif name in ("shared", "local", "global", "const"):
            variable = self.outline.variable(f".{name} {rest}", self.line)
            variable.name = scope.declare(variable.name, Symbol)
            kernel.variables[variable.name] = variable
        elif name == "branchtargets":
            unique = scope.labels.get(label, "")
            if kernel.labels.pop(unique, None) != len(kernel.instructions):
                self.fail("a table of branch targets needs a label")
            scope.tables.append(unique)
            kernel.branch_targets[unique] = tuple(item.strip() for item in rest.split(","))
        elif name != "pragma":
            self.fail(f"the directive .{name} is unknown here")

    def _registers(self, rest: str) -> None:
        kind, _, names = " ".join(rest.split()).partition(" ")
        kind = kind.removeprefix(".")
        if kind != "pred" and kind not in _SIZES:
            self.fail(f"the register type {kind!r} is unknown")
        for item in names.split(","):
            match = _REGISTERS.fullmatch(item)
            if match is None:
                self.fail(f"cannot read the register {item.strip()!r}")
            name, count = match.groups()
            for each in [f"{name}{number}" for number in range(int(count))] if count else [name]:
                self.kernel.registers[self.scope.declare(each, Register)] = kind

    def _check(self) -> None:
        """Every name means something, and every branch has its target."""
        for name, line in self.symbols.items():
            if name not in self.known:
                self.outline.fail(f"nobody declares {name}", line)
        labels, tables = self.kernel.labels, self.kernel.branch_targets
        for instruction in self.kernel.instructions:
            if instruction.opcode in ("bra", "brx"):
                target = instruction.operands[-1] if instruction.operands else None
                name = target.name if isinstance(target, Symbol) else ""
                targets = tables.get(name, ("",)) if instruction.opcode == "brx" else (name,)
                if not labels.keys() >= set(targets):
                    self.outline.fail("this branch has no target", instruction.line)
