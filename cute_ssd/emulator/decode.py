"""Instruction by instruction, a parsed kernel becomes the flat records that the engine executes.

The families in `isa/` know PTX: they read modifiers and operands and emit one or more records, each naming a handler of
the engine (`engine/*.cpp`, one file per family). This module owns what they share: registers to slots, constants,
addresses, labels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

import numpy as np

from .program import RECORD, SHARED_BASE, Program
from .syntax import (
    Address,
    Immediate,
    Instruction,
    Kernel,
    Operand,
    Pair,
    Predicate,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)

SIZES = {
    **dict.fromkeys(("b8", "u8", "s8"), 1),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16", "e4m3x2", "e5m2x2"), 2),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "tf32"), 4),
    **dict.fromkeys(("f16x2", "bf16x2", "u16x2", "s16x2", "e4m3x4", "e5m2x4"), 4),
    **dict.fromkeys(("b64", "u64", "s64", "f64", "f32x2"), 8),
    "b128": 16,
}
"""Bytes of a PTX type."""

WORDS = {kind: max(1, size // 4) for kind, size in SIZES.items()}
"""Slots that a value of a PTX type takes."""

SPECIALS = (
    *("tid.x", "tid.y", "tid.z", "ctaid.x", "ctaid.y", "ctaid.z", "nctaid.x", "nctaid.y", "nctaid.z"),
    *("ntid.x", "ntid.y", "ntid.z", "laneid", "warpid", "nwarpid", "cluster_ctarank", "cluster_nctarank"),
    *("cluster_ctaid.x", "cluster_ctaid.y", "cluster_ctaid.z"),
    *("cluster_nctaid.x", "cluster_nctaid.y", "cluster_nctaid.z"),
    *("clusterid.x", "clusterid.y", "clusterid.z", "nclusterid.x", "nclusterid.y", "nclusterid.z"),
    *("is_explicit_cluster", "total_smem_size", "lanemask_lt", "lanemask_le", "lanemask_eq", "lanemask_ge"),
    *("lanemask_gt", "smid", "nsmid", "gridid", "dynamic_smem_size"),
)
"""Special registers that never change; the order is that of the engine's `special_value`."""


class UnsupportedInstruction(NotImplementedError):
    """A PTX instruction, modifier or operand that the emulator does not execute; it says where it stands."""

    def __init__(self, instruction: Instruction, reason: str) -> None:
        where = f", from {instruction.source[0]}:{instruction.source[1]}" if instruction.source else ""
        super().__init__(f"PTX line {instruction.line}: `{instruction.text}` ({reason}){where}")
        self.instruction = instruction
        self.reason = reason


class Modifiers:
    """The modifiers of one instruction, taken one by one; what nobody takes is unsupported."""

    def __init__(self, instruction: Instruction) -> None:
        self.instruction = instruction
        self.left = list(instruction.modifiers)

    def flag(self, name: str) -> bool:
        """Whether `name` is there; takes it."""
        if name in self.left:
            self.left.remove(name)
            return True
        return False

    def require(self, *names: str) -> None:
        """Each of `names` must be there."""
        for name in names:
            if not self.flag(name):
                raise UnsupportedInstruction(self.instruction, f"only with .{name}")

    def one_of(self, *names: str, default: str | None = None) -> str:
        """The first modifier that is one of `names`, else `default`; without a default it must be there."""
        for name in self.left:
            if name in names:
                self.left.remove(name)
                return name
        if default is None:
            raise UnsupportedInstruction(self.instruction, f"needs one of .{', .'.join(names)}")
        return default

    def drop(self, *names: str) -> None:
        """Takes modifiers that change nothing here (cache hints, scopes): say why where it is called."""
        self.left = [name for name in self.left if name not in names]

    def type(self) -> str:
        """The last modifier, which must be a type."""
        if not self.left or (self.left[-1] not in SIZES and self.left[-1] != "pred"):
            raise UnsupportedInstruction(self.instruction, "its last modifier is not a known type")
        return self.left.pop()

    def finish(self) -> None:
        """Every modifier must have been taken."""
        if self.left:
            raise UnsupportedInstruction(self.instruction, f"unknown modifier .{self.left[0]}")


COPIES, COMPUTES, DECIDES, STORES, PAIRS = 1, 0, 2, 3, 4
"""What a record does with undefined operands (core.h, Record::use). Kernels compute with garbage in lanes that never
store it."""

_ACTING = {
    *("ld", "st", "atom", "red", "cp", "multimem", "ldmatrix", "mbarrier", "bar", "barrier", "tcgen05"),
    *("bra", "brx", "call", "trap", "prefetch", "tensormap"),
}
_WORD_MOVES = ("mov.b32", "mov.two")

Decode = Callable[["Decoder", Instruction, Modifiers], None]
FAMILIES: dict[str, tuple[Decode, str]] = {}
CLASSES: list[str] = []
"""Names of the instruction classes that launches are counted by."""


def instruction(*opcodes: str, count_as: str) -> Callable[[Decode], Decode]:
    """Registers the decoder of `opcodes`; executions count under the class `count_as` unless `emit` says otherwise."""

    def register(decode: Decode) -> Decode:
        for opcode in opcodes:
            assert opcode not in FAMILIES, opcode
            FAMILIES[opcode] = (decode, count_as)
        return decode

    return register


_CLASS_NUMBERS: dict[str, int] = {}


def class_number(name: str) -> int:
    """The number of an instruction class, new names included."""
    number = _CLASS_NUMBERS.get(name)
    if number is None:
        number = _CLASS_NUMBERS[name] = len(CLASSES)
        CLASSES.append(name)
    return number


@dataclass(slots=True)
class Place:
    """An address operand: a slot (two when `wide`) plus a constant offset."""

    slot: int
    offset: int
    wide: bool


class Decoder:
    """Turns one kernel into records; the instruction families call its methods while it walks the instructions."""

    def __init__(self, kernel: Kernel, handlers: dict[str, int]) -> None:
        self.kernel = kernel
        self.handlers = handlers
        self.instruction: Instruction = kernel.instructions[0]
        self.pool: list[int] = [0]
        self.records: list[tuple[int, ...]] = []
        self.initial: list[int] = []
        self.constant: list[int] = []
        self.specials: list[int] = []
        self.shared_symbols: list[int] = []
        self.param_symbols: list[int] = []
        self.keep_alive: list[object] = []
        self.ctas_meet = False
        self._constants: dict[tuple[object, int], int] = {}
        self._branches: list[tuple[int, str]] = []
        self._tables: list[tuple[int, str]] = []
        self._sources: list[int] = []
        self._targets: list[int] = []
        self._class = 0
        self._first = True
        self.slots: dict[str, int] = {}
        self.predicates: dict[str, int] = {}
        for name, kind in kernel.registers.items():
            if kind == "pred":
                self.predicates[name] = len(self.predicates)
            else:
                self.slots[name] = self.new_slots(WORDS[kind])
        self.parameter_offsets = {p.name: p.offset for p in kernel.parameters}
        self._place_variables()

    def _place_variables(self) -> None:
        """Static shared variables, then the dynamic array; the local depot; module constants in host memory."""
        self.shared_offsets: dict[str, int] = {}
        self.dynamic_start: int | None = None
        self.local_offsets: dict[str, int] = {}
        self.global_addresses: dict[str, int] = {}
        end, local = SHARED_BASE, 0
        for variable in sorted(self.kernel.variables.values(), key=lambda v: v.dynamic):
            align = max(1, variable.align)
            if variable.space == "shared":
                if variable.dynamic:
                    align = max(align, 1024)  # as ptxas places it: TMA swizzles count from 1 KiB
                self.shared_offsets[variable.name] = start = -(-end // align) * align
                if not variable.dynamic:
                    end = start + variable.size
                else:
                    self.dynamic_start = start
            elif variable.space == "local":
                self.local_offsets[variable.name] = start = -(-local // align) * align
                local = start + variable.size
            else:
                data = (variable.data or b"").ljust(variable.size, b"\0")
                buffer = ctypes.create_string_buffer(data + bytes(align), len(data) + align)
                self.keep_alive.append(buffer)
                address = -(-ctypes.addressof(buffer) // align) * align
                ctypes.memmove(address, data, len(data))
                self.global_addresses[variable.name] = address
        self.static_shared_end = end
        self.local_bytes = local

    # ---- slots -------------------------------------------------------------------------------------------------------

    def new_slots(self, n: int, value: int | None = None) -> int:
        """The first of `n` fresh slots; with a `value` they are constants."""
        first = len(self.initial)
        for k in range(n):
            self.initial.append(0xFFFFFFFF if value is None else value >> 32 * k & 0xFFFFFFFF)
            self.constant.append(0 if value is None else 1)
        return first

    def constant_slot(self, value: int, words: int = 1) -> int:
        """A slot (or `words` of them) that holds `value` in every lane."""
        key = (value & (1 << 32 * words) - 1, words)
        if key not in self._constants:
            self._constants[key] = self.new_slots(words, key[0])
        return self._constants[key]

    def unsupported(self, reason: str) -> UnsupportedInstruction:
        """The error to raise for the instruction at hand."""
        return UnsupportedInstruction(self.instruction, reason)

    def slot(self, operand: Operand, kind: str) -> int:
        """The slot of a source operand of type `kind`: register, immediate, special register or symbol address."""
        words = WORDS[kind]
        if isinstance(operand, Register):
            slot = self._register(operand.name)
            self._sources.append(slot)
            if words > 1 and (own := self._words(operand.name)) > 1:
                self._sources.extend(range(slot + 1, slot + min(words, own)))
            return slot
        if isinstance(operand, Immediate):
            return self.constant_slot(operand.bits & (1 << 8 * SIZES[kind]) - 1, words)
        if isinstance(operand, Special):
            return self._special(operand.name.lstrip("%"), words)
        if isinstance(operand, Symbol):
            return self._symbol(operand.name, words)
        if isinstance(operand, Predicate):
            raise self.unsupported("a predicate where a value is expected")
        raise self.unsupported(f"operand {operand}")

    def _register(self, name: str) -> int:
        slot = self.slots.get(name)
        if slot is None:
            raise self.unsupported(f"{name} is not a declared value register")
        return slot

    def _words(self, name: str) -> int:
        return WORDS[self.kernel.registers[name]]

    def target(self, operand: Operand, kind: str) -> int:
        """The slot of a destination register; a sink `_` gets a slot of its own that nobody reads."""
        if isinstance(operand, Sink):
            return self.new_slots(WORDS[kind])
        if not isinstance(operand, Register):
            raise self.unsupported(f"destination {operand}")
        slot = self._register(operand.name)
        self._targets.append(slot)
        if (words := self._words(operand.name)) > 1:
            self._targets.extend(range(slot + 1, slot + words))
        return slot

    def width(self, operand: Operand) -> int | None:
        """Bytes of a register operand as declared; None for other operands."""
        return SIZES[self.kernel.registers[operand.name]] if isinstance(operand, Register) else None

    def predicate(self, operand: Operand) -> int:
        """The number of a predicate register that is written; a sink gets the spare one."""
        if isinstance(operand, Sink):
            return len(self.predicates)
        number = self._predicate_number(operand)
        self._targets.append(~number)
        return number

    def _predicate_number(self, operand: Operand) -> int:
        if isinstance(operand, Register | Predicate) and operand.name in self.predicates:
            return self.predicates[operand.name]
        raise self.unsupported(f"{operand} is not a predicate")

    def predicate_source(self, operand: Operand) -> tuple[int, bool]:
        """(number, negated) of a predicate that is read: `%p1` or `!%p1`."""
        number = self._predicate_number(operand)
        self._sources.append(~number)
        return number, isinstance(operand, Predicate) and operand.negated

    def items(self, operand: Operand) -> tuple[Operand, ...]:
        """The elements of a vector operand; a scalar is a vector of one."""
        return operand.items if isinstance(operand, Vector) else (operand,)

    def pair(self, operand: Operand) -> tuple[Operand, Operand]:
        """The two destinations `d|p`; the second is a sink when there is none."""
        return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, Sink())

    def _special(self, name: str, words: int) -> int:
        if name not in SPECIALS:
            raise self.unsupported(f"special register %{name} where it cannot be read; only mov reads clocks")
        key = ("%" + name, words)
        if key not in self._constants:
            slot = self._constants[key] = self.new_slots(words, 0)
            self.specials += [SPECIALS.index(name), slot]
        return self._constants[key]

    def _symbol(self, name: str, words: int) -> int:
        key = (name, words)
        if key in self._constants:
            return self._constants[key]
        if name in self.shared_offsets:
            slot = self.new_slots(words, self.shared_offsets[name])
            self.shared_symbols.append(slot)
        elif name in self.local_offsets:
            slot = self.new_slots(words, self.local_offsets[name])
        elif name in self.global_addresses:
            slot = self.new_slots(words, self.global_addresses[name])
        elif name in self.parameter_offsets:
            slot = self.new_slots(2, 0)
            self.param_symbols += [slot, self.parameter_offsets[name]]
        else:
            raise self.unsupported(f"unknown symbol {name}")
        self._constants[key] = slot
        return slot

    def address(self, operand: Operand) -> Place:
        """Slot and offset of `[base + offset]`; `wide` when the base is 64 bits."""
        if not isinstance(operand, Address):
            raise self.unsupported("an address is expected")
        base = operand.base
        if isinstance(base, Register):
            wide = self._words(base.name) == 2
            return Place(self.slot(base, "b64" if wide else "b32"), operand.offset, wide)
        if isinstance(base, Symbol):
            return Place(self._symbol(base.name, 2), operand.offset, base.name not in self.shared_offsets)
        return Place(self.slot(base, "b64"), operand.offset, True)

    def call_parameter(self, operand: Operand, size: int) -> int:
        """The slots behind a `.param` variable of a call: st.param and ld.param of it are moves."""
        if not isinstance(operand, Symbol) or operand.name not in self.kernel.call_parameters:
            raise self.unsupported(f"{operand} is not a call parameter")
        key = ("call " + operand.name, 0)
        if key not in self._constants:
            self._constants[key] = self.new_slots(-(-max(size, self.kernel.call_parameters[operand.name].size) // 4))
        return self._constants[key]

    # ---- records -----------------------------------------------------------------------------------------------------

    def list(self, values: Sequence[int]) -> int:
        """Puts a list into the pool; the offset goes into the record's `pool` field."""
        start = len(self.pool)
        self.pool.extend(values)
        return start

    def emit(
        self,
        handler: str,
        d: int = -1,
        a: int = -1,
        b: int = -1,
        c: int = -1,
        e: int = -1,
        *,
        i0: int = 0,
        i1: int = 0,
        pool: int = 0,
        copies: bool = False,
        count_as: str | None = None,
    ) -> None:
        """Appends one record. Slots that `slot` and `target` gave since the last record are its sources and targets.

        `copies` marks a move: the result of a tcgen05.ld may pass through it before wait::ld (register packing is
        free). Several records of one instruction count as one execution.
        """
        guard = self.instruction.guard
        sources, targets = self._sources, self._targets
        if handler in _WORD_MOVES:  # word for word, also where an operand is half of a 64-bit register
            sources, targets = ([a], [d]) if handler == "mov.b32" else ([a, b], [d, e])
        at = len(self.pool)
        self.pool.extend(sources)
        self.pool.extend(targets)
        number = -1
        if self._first:
            number = self._class if count_as is None else class_number(count_as)
            self._first = False
        use = COPIES if copies else self._use()
        try:
            index = self.handlers[handler]
        except KeyError:
            raise self.unsupported(f"the engine has no handler {handler}") from None
        guarded = (-1 if guard is None else self.predicates[guard], int(self.instruction.guard_negated))
        lists = (at, len(sources), at + len(sources), len(targets))
        self.records.append((index, *guarded, self.instruction.line, d, a, b, c, e, pool, i0, i1, *lists, use, number))
        self._sources = []
        self._targets = []

    def _use(self) -> int:
        """Whether undefined operands only make the result undefined (what is stored, but not where), or are acted on
        (an address, a value stored to global memory)."""
        i = self.instruction
        if i.opcode == "st" and any(name.startswith(("shared", "local", "param")) for name in i.modifiers):
            return COMPUTES if "param" in i.modifiers else STORES
        if i.opcode == "tcgen05" and i.modifiers[0] == "st":
            return STORES
        if i.modifiers and i.modifiers[-1] == "f32x2":
            return PAIRS
        return DECIDES if i.opcode in _ACTING else COMPUTES

    def emit_branch(self, label: str) -> None:
        """A jump to a label (resolved when all records are there)."""
        self._branches.append((len(self.records), label))
        self.emit("bra")

    def emit_table(self, index: int, labels: Sequence[str]) -> None:
        """brx.idx: a jump to labels[index]."""
        start = self.list([0] * len(labels))
        self._tables += [(start + k, label) for k, label in enumerate(labels)]
        self.emit("brx.idx", a=index, i0=len(labels), pool=start)

    def decode(self) -> Program:
        """Walks the instructions once."""
        import_module(".isa", __package__)  # registers the families; they import this module

        starts = []
        for ins in self.kernel.instructions:
            starts.append(len(self.records))
            self.instruction = ins
            family = FAMILIES.get(ins.opcode)
            if family is None:
                raise UnsupportedInstruction(ins, "unknown instruction")
            function, count_as = family
            self._class = class_number(count_as)
            self._first = True
            modifiers = Modifiers(ins)
            function(self, ins, modifiers)
            modifiers.finish()
        starts.append(len(self.records))
        self.instruction = ins
        self._sources, self._targets = [], []
        self.records.append(
            (self.handlers["exit"], -1, 0, ins.line, *(-1,) * 5, 0, 0, 0, 0, 0, 0, 0, 0, -1)
        )  # a body may end without ret
        records = np.array(self.records, RECORD)
        for at, label in self._branches:
            records["i0"][at] = starts[self.kernel.labels[label]]
        for at, label in self._tables:
            self.pool[at] = starts[self.kernel.labels[label]]
        return Program(
            kernel=self.kernel,
            records=records,
            pool=np.array(self.pool, np.int32),
            initial=np.array(self.initial, np.uint32),
            constant=np.array(self.constant, np.uint8),
            specials=np.array(self.specials, np.int32),
            shared_symbols=np.array(self.shared_symbols, np.int32),
            param_symbols=np.array(self.param_symbols, np.int32),
            npredicates=len(self.predicates),
            local_bytes=self.local_bytes,
            static_shared_end=self.static_shared_end,
            dynamic_start=self.dynamic_start,
            global_addresses=self.global_addresses,
            keep_alive=self.keep_alive,
            ctas_meet=self.ctas_meet,
        )


def decode(kernel: Kernel, handlers: dict[str, int]) -> Program:
    """The program of `kernel`; `handlers` are the engine's (name to index). UnsupportedInstruction: what is missing."""
    return Decoder(kernel, handlers).decode()
