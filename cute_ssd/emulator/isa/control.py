"""Branches, exit, calls (vprintf), traps, and what changes nothing in a functional emulation."""

from __future__ import annotations

from ..decode import Decoder, Modifiers, instruction
from ..syntax import Address, Instruction, Symbol


@instruction("bra", count_as="branch")
def bra(d: Decoder, i: Instruction, m: Modifiers) -> None:
    m.drop("uni")  # a promise about the lanes; the machine looks at them anyway
    (label,) = i.operands
    if not isinstance(label, Symbol):
        raise d.unsupported("its target is not a label")
    d.emit_branch(label.name)


@instruction("brx", count_as="branch")
def brx(d: Decoder, i: Instruction, m: Modifiers) -> None:
    m.require("idx")
    m.drop("uni")
    index, table = i.operands
    if not isinstance(table, Symbol) or table.name not in d.kernel.branch_targets:
        raise d.unsupported("its table is not a .branchtargets list")
    d.emit_table(d.slot(index, "u32"), d.kernel.branch_targets[table.name])


@instruction("ret", "exit", count_as="branch")
def leave(d: Decoder, i: Instruction, m: Modifiers) -> None:
    m.drop("uni")
    d.emit("exit")


@instruction("trap", count_as="branch")
def trap(d: Decoder, i: Instruction, m: Modifiers) -> None:
    d.emit("trap")


@instruction("nanosleep", "setmaxnreg", "pmevent", count_as="no effect")
def nothing(d: Decoder, i: Instruction, m: Modifiers) -> None:
    m.drop("u32", "sync", "aligned", "inc", "dec")  # register budgets and sleeping are about time
    d.emit("nothing")


@instruction("griddepcontrol", count_as="no effect")
def griddepcontrol(d: Decoder, i: Instruction, m: Modifiers) -> None:
    d.emit(f"griddepcontrol.{m.one_of('wait', 'launch_dependents')}")


@instruction("call", count_as="call")
def call(d: Decoder, i: Instruction, m: Modifiers) -> None:
    """vprintf(format, arguments), the only function that CuTe DSL calls; st.param put both pointers into parameters."""
    m.drop("uni")
    function = i.operands[1]
    if not isinstance(function, Symbol) or function.name != "vprintf":
        raise d.unsupported("only vprintf can be called")
    returns, arguments = (d.items(i.operands[k]) for k in (0, 2))
    slots = [d.call_parameter(argument, 8) for argument in arguments]
    d.ctas_meet = True  # in the text that is printed
    d.emit("vprintf", d=d.call_parameter(returns[0], 4) if returns else -1, a=slots[0], b=slots[1])


def is_call_parameter(d: Decoder, operand: object) -> bool:
    """Whether an address names a `.param` variable of a call in the kernel's body."""
    return (
        isinstance(operand, Address)
        and isinstance(operand.base, Symbol)
        and operand.base.name in d.kernel.call_parameters
    )
