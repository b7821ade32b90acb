"""ldmatrix, stmatrix, movmatrix and mma.sync: 8 x 8 matrices of 16-bit elements spread over the lanes of a warp.

PTX ISA, "Warp Level Matrix Instructions". Sparse, integer, 8-bit and 4-bit operands are not here: no kernel of CuTe DSL
for sm_100a uses them, tcgen05 has taken their place.
"""

from __future__ import annotations

from ..decode import Decoder, Modifiers, instruction
from ..syntax import Instruction, Operand

COUNTS = {"x1": 1, "x2": 2, "x4": 4}


def _matrix_access(d: Decoder, m: Modifiers) -> tuple[int, bool]:
    """(number of matrices, transposed) of an ldmatrix or stmatrix; the other modifiers are checked."""
    m.require("sync", "aligned")
    if m.flag("m16n16") or m.flag("m8n16") or m.flag("m16n8"):
        raise d.unsupported("only .m8n8 matrices of .b16")
    m.require("m8n8", "b16")
    count = COUNTS[m.one_of(*COUNTS)]
    transposed = m.flag("trans")
    if not m.flag("shared"):
        m.drop("shared::cta")  # a generic address is told from a shared one by its width
    return count, transposed


def _move_matrices(d: Decoder, i: Instruction, m: Modifiers, address: Operand, registers: Operand) -> None:
    """Either way between shared memory and registers; the handlers have the opcodes' names."""
    count, transposed = _matrix_access(d, m)
    items = d.items(registers)
    if len(items) != count:
        raise d.unsupported(f"{count} matrices need {count} registers")
    place = d.address(address)
    slots = [d.target(item, "b32") if i.opcode == "ldmatrix" else d.slot(item, "b32") for item in items]
    handler = f"{i.opcode}.trans" if transposed else i.opcode
    d.emit(handler, a=place.slot, b=place.wide, c=count, i0=place.offset, pool=d.list(slots))


@instruction("ldmatrix", count_as="load matrix")
def ldmatrix(d: Decoder, i: Instruction, m: Modifiers) -> None:
    results, source = i.operands
    _move_matrices(d, i, m, source, results)


@instruction("stmatrix", count_as="store matrix")
def stmatrix(d: Decoder, i: Instruction, m: Modifiers) -> None:
    destination, values = i.operands
    _move_matrices(d, i, m, destination, values)


@instruction("movmatrix", count_as="shuffle")
def movmatrix(d: Decoder, i: Instruction, m: Modifiers) -> None:
    m.require("sync", "aligned", "m8n8", "trans", "b16")
    result, source = i.operands
    d.emit("movmatrix", a=d.slot(source, "b32"), d=d.target(result, "b32"))


# (shape, type of A and B) -> number of registers of A and of B
FRAGMENTS = {
    ("m16n8k8", "f16"): (2, 1), ("m16n8k8", "bf16"): (2, 1), ("m16n8k16", "f16"): (4, 2), ("m16n8k16", "bf16"): (4, 2),
    ("m16n8k4", "tf32"): (2, 1), ("m16n8k8", "tf32"): (4, 2),
}  # fmt: skip
TYPES = ("f16", "bf16", "tf32")


@instruction("mma", count_as="mma")
def mma(d: Decoder, i: Instruction, m: Modifiers) -> None:
    m.require("sync", "aligned", "row", "col")
    shape = m.one_of("m16n8k4", "m16n8k8", "m16n8k16")
    accumulator, a_type, b_type, c_type = (m.left.pop(0) for _ in range(4)) if len(m.left) == 4 else ("",) * 4
    if a_type != b_type or accumulator != c_type or (shape, a_type) not in FRAGMENTS:
        raise d.unsupported("only f16, bf16 and tf32 products of one type, D and C of one type")
    half = accumulator == "f16"
    if accumulator not in (("f32", "f16") if a_type == "f16" else ("f32",)):
        raise d.unsupported(f".{accumulator} accumulators of .{a_type} products")
    na, nb = FRAGMENTS[shape, a_type]
    nd = 2 if half else 4
    results, a, b, c = (d.items(operand) for operand in i.operands)
    if [len(results), len(a), len(b), len(c)] != [nd, na, nb, nd]:
        raise d.unsupported(f"needs {nd}, {na}, {nb} and {nd} registers")
    slots = [d.slot(item, "b32") for item in (*a, *b, *c)]
    slots += [d.target(item, "b32") for item in results]
    d.emit(f"mma.{shape}.{a_type}", c=half, pool=d.list(slots))
