"""The PTX parser: every construct by a few lines of PTX, every refusal with its line, and one real kernel."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cute_ssd.emulator.ptx import (
    Address,
    Immediate,
    Instruction,
    Kernel,
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
    parse,
    parse_kernel,
)

HEAD = ".version 8.8\n.target sm_100a\n.address_size 64\n"
REGISTERS = ".reg .pred %p<4>; .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .b16 %rs<4>;"


def module(body: str, *, before: str = "", parameters: str = "", directives: str = "", after: str = "") -> str:
    return f"{HEAD}{before}\n.visible .entry k({parameters})\n{directives}\n{{\n{REGISTERS}\n{body}\n}}\n{after}"


def kernel(body: str, **parts: str) -> Kernel:
    return parse_kernel(module(body, **parts), "k")


def one(statement: str, **parts: str) -> Instruction:
    (instruction,) = kernel(statement, **parts).instructions
    return instruction


def operand(text: str) -> Operand:
    before = ".shared .align 4 .b8 table[64];"
    return one(f"op {text};", before=before).operands[0]


def test_an_instruction_keeps_its_words() -> None:
    name = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    text = f"@!%p1 {name} [%r1], [%rd1, {{%r2, 0}}], [%r3+8];"
    found = one(text)
    assert (found.opcode, found.name) == ("cp", name)
    assert found.modifiers[-4:] == ("shared::cluster", "global", "tile", "mbarrier::complete_tx::bytes")
    assert (found.guard, found.guard_negated, found.text) == ("%p1", True, text[:-1])
    assert found.operands == (
        Address(Register("%r1"), 0),
        TensorAddress(Address(Register("%rd1"), 0), (Register("%r2"), Immediate(0, "int"))),
        Address(Register("%r3"), 8),
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("%r1", Register("%r1")),
        ("%tid.x", Special("%tid.x")),
        ("%clock64", Special("%clock64")),
        ("WARP_SZ", Immediate(32, "int")),
        ("_", Sink()),
        ("!%p1", Predicate("%p1", True)),
        ("table", Symbol("table")),
        ("%r1|%p1", Pair(Register("%r1"), Register("%p1"))),
        ("_|%p1", Pair(Sink(), Register("%p1"))),
        ("{%r1, _,\n 7}", Vector((Register("%r1"), Sink(), Immediate(7, "int")))),
        ("{%r1}", Vector((Register("%r1"),))),
        ("0", Immediate(0, "int")),
        ("-8", Immediate(-8, "int")),
        ("4294967295U", Immediate(4294967295, "int")),
        ("0x1fU", Immediate(31, "int")),
        ("-0x10", Immediate(-16, "int")),
        ("0777", Immediate(511, "int")),
        ("0b101", Immediate(5, "int")),
        ("0f3F800000", Immediate(0x3F800000, "f32")),
        ("0d7FF0000000000000", Immediate(0x7FF0000000000000, "f64")),
        ("[%rd1]", Address(Register("%rd1"), 0)),
        ("[%rd1+16]", Address(Register("%rd1"), 16)),
        ("[%rd1+-8]", Address(Register("%rd1"), -8)),
        ("[%rd1-8]", Address(Register("%rd1"), -8)),
        ("[ %rd1 + 0x10 ]", Address(Register("%rd1"), 16)),
        ("[table+4]", Address(Symbol("table"), 4)),
        ("[64]", Address(Immediate(64, "int"), 0)),
        ("[%rd1, {%r1}]", TensorAddress(Address(Register("%rd1"), 0), (Register("%r1"),))),
    ],
)
def test_operands(text: str, expected: Operand) -> None:
    assert operand(text) == expected


ATOMS = {
    Register("%r1"): "%r1",
    Register("%rs3"): "%rs3",
    Special("%ctaid.y"): "%ctaid.y",
    Symbol("table"): "table",
    Sink(): "_",
    Immediate(-3, "int"): "-3",
    Immediate(0x40490FDB, "f32"): "0f40490FDB",
}
atoms = st.sampled_from(list(ATOMS.items()))
vectors = st.lists(atoms, min_size=1, max_size=9).map(
    lambda items: (Vector(tuple(item for item, _ in items)), f"{{{', '.join(text for _, text in items)}}}")
)
addresses = st.tuples(st.sampled_from(["%r1", "table"]), st.integers(-99, 99)).map(
    lambda pair: (Address((Register if pair[0] == "%r1" else Symbol)(pair[0]), pair[1]), f"[{pair[0]}+{pair[1]}]")
)
tensors = st.tuples(addresses, vectors).map(
    lambda pair: (TensorAddress(pair[0][0], pair[1][0].items), f"[{pair[0][1][1:-1]}, {pair[1][1]}]")
)
operands = st.lists(st.one_of(atoms, vectors, addresses, tensors), max_size=6)


@given(operands, st.sampled_from([", ", ",", " ,\n\t"]))
def test_any_list_of_operands_comes_back(items: list[tuple[Operand, str]], comma: str) -> None:
    statement = f"op.b32 {comma.join(text for _, text in items)};"
    assert one(statement, before=".shared .b8 table[64];").operands == tuple(item for item, _ in items)


def test_statements_and_comments_lie_anywhere() -> None:
    found = kernel("""mov.b32 %r1, 1; mov.b32 // ; }
        %r2, /* a
        comment { */ 2;
    ret;""")
    assert [(i.name, i.line - found.instructions[0].line) for i in found.instructions] == [
        ("mov.b32", 0),
        ("mov.b32", 0),
        ("ret", 3),
    ]
    assert module("x").split("\n")[found.instructions[0].line - 1] == "x"


def test_blocks_have_their_own_registers_and_labels() -> None:
    wait = "{ .reg .pred P1; AGAIN: wait P1, %r1; @P1 bra.uni DONE; bra.uni AGAIN; DONE: }\n"
    found = kernel(f"AGAIN: {wait}{wait} bra AGAIN;")
    first, second = found.instructions[:3], found.instructions[3:6]
    assert first[0].operands[0] != second[0].operands[0]
    for wait_block in (first, second):
        assert wait_block[0].operands == (Register(str(wait_block[1].guard)), Register("%r1"))
        assert found.registers[str(wait_block[1].guard)] == "pred"
    targets = [found.labels[i.operands[0].name] for i in found.instructions if isinstance(i.operands[0], Symbol)]
    assert targets == [3, 0, 6, 3, 0]


def test_blocks_of_a_body_that_declares_nothing() -> None:
    block = "{ .reg .b32 a; mov.b32 a, 1; }"
    found = parse_kernel(f"{HEAD}.entry k() {{ {block} {block} }}", "k")
    assert len(found.registers) == 2
    assert found.instructions[0].operands[0] != found.instructions[1].operands[0]


def test_blocks_nest() -> None:
    found = kernel("""{ .reg .b32 a, b<2>; mov a, b1;
        { .reg .b64 a; mov a, b0; bra OUT; IN: bra IN; }
        mov a, 0; OUT: }""")
    outer, inner, out, loop, again = found.instructions
    assert outer.operands[0] == again.operands[0] != inner.operands[0]
    names = [item.name for item in (*outer.operands, *inner.operands) if isinstance(item, Register)]
    assert [found.registers[name] for name in names] == ["b32", "b32", "b64", "b32"]
    assert [found.labels[item.name] for item in out.operands + loop.operands if isinstance(item, Symbol)] == [5, 3]


def test_a_call() -> None:
    declared = ".extern .func (.param .b32 result) vprintf (.param .b64 a, .param .b64 b);"
    sequence = """{ .param .b64 param0; .param .align 16 .b8 retval0[16];
        st.param.b64 [param0], %rd1; call.uni (retval0), vprintf, (param0, param0); ld.param.b32 %r1, [retval0+8]; }"""
    found = kernel(sequence * 2, before=declared)
    store, call, load, *again = found.instructions
    (results, function, arguments) = call.operands
    assert function == Symbol("vprintf")
    assert (
        isinstance(store.operands[0], Address) and isinstance(results, Vector) and isinstance(load.operands[1], Address)
    )
    assert arguments == Vector((store.operands[0].base,) * 2)
    assert load.operands[1] == Address(*results.items, 8)  # type: ignore[arg-type]
    assert [(p.size, p.align) for p in found.call_parameters.values()] == [(8, 8), (16, 16)] * 2
    assert again[1].operands != call.operands
    assert found.functions["vprintf"].parameters == (Parameter("a", 8, 8, 0), Parameter("b", 8, 8, 8))
    assert one("call nothing;", before=".extern .func nothing;").operands == (Vector(()), Symbol("nothing"), Vector(()))


def test_a_defined_function_has_a_body() -> None:
    text = ".func (.param .b32 out) twice(.param .b32 in) { .reg .b32 %r<2>; st.param.b32 [out], %r1; END: }"
    forward = ".func (.param .b32 out) twice(.param .b32 in);"
    function = kernel("ret;", before=forward, after=text).functions["twice"]
    assert function.body is not None
    assert [i.name for i in function.body.instructions] == ["st.param.b32"]
    assert function.body.labels == {"END": 1}


def test_parameters_lie_as_their_alignment_asks() -> None:
    found = kernel(
        "ret;", parameters=".param .u32 n, .param .align 64 .b8 map[128], .param .u64 .ptr .global .align 16 x"
    )
    assert found.parameters == (Parameter("n", 4, 4, 0), Parameter("map", 128, 64, 64), Parameter("x", 8, 8, 192))


def test_variables_of_the_module_and_of_the_body() -> None:
    before = """.extern .shared .align 1024 .b8 smem[];
    .global .align 1 .b8 text[5] = {72, 105, 0x21};
    .const .align 8 .u16 table[2][2] = {1, 2, -1, 65535};
    .global .f32 one = 0f3F800000;"""
    found = kernel(
        ".local .align 8 .b8 depot[40]; .shared .v4 .f32 box; { .shared .b32 text; ld %r1, [text]; }", before=before
    )
    inner = next(name for name in found.variables if name.startswith("text."))
    assert list(found.variables.values()) == [
        Variable("smem", 0, 1024, "shared", dynamic=True),
        Variable("text", 5, 1, "global", b"Hi!\0\0"),
        Variable("table", 8, 8, "const", b"\1\0\2\0\xff\xff\xff\xff"),
        Variable("one", 4, 4, "global", b"\0\0\x80\x3f"),
        Variable("depot", 40, 8, "local"),
        Variable("box", 16, 16, "shared"),
        Variable(inner, 4, 4, "shared"),
    ]
    assert found.instructions[0].operands[1] == Address(Symbol(inner), 0)


def test_a_table_of_branch_targets() -> None:
    found = kernel("table: .branchtargets A, B; brx.idx %r1, table; A: ret; B: ret;")
    assert found.branch_targets == {"table": ("A", "B")}
    assert found.labels == {"A": 1, "B": 2}
    scoped = kernel("A: { table: .branchtargets A, B; brx.idx %r1, table; B: ret; }")
    (table,) = scoped.branch_targets.values()
    assert [scoped.labels[name] for name in table] == [0, 1]
    assert scoped.instructions[0].operands[1] == Symbol(*scoped.branch_targets)


def test_directives_of_a_kernel() -> None:
    directives = '.reqntid 512\n.minnctapersm 1\n.explicitcluster .reqnctapercluster 2, 1, 1 .maxnreg 128 .pragma "x";'
    found = kernel('.pragma "nounroll";', directives=directives)
    assert (found.reqntid, found.reqnctapercluster) == ((512, 1, 1), (2, 1, 1))
    assert found.directives["maxnreg"] == (128,) and found.directives["explicitcluster"] == ()
    assert (found.target, found.ptx_version) == ("sm_100a", "8.8")
    assert kernel("ret;").reqntid is None


def test_python_lines() -> None:
    body = """mov.b32 %r1, 0;
    .loc 1 20 5
    mov.b32 %r1, 1; mov.b32 %r1, 2;
    .loc 1 0 0
    mov.b32 %r1, 3;
    .loc 2 7 1, function_name $L__info_string0, inlined_at 1 30 2
    mov.b32 %r1, 4;
    .loc 1 8 1, function_name $L__info_string0+4, inlined_at 1 30 2
    mov.b32 %r1, 5;"""
    files = (
        '.file 1 "/a/b/../user.py"\n.file 2 "/lib/nvidia_cutlass_dsl/arch.py", 1, 2\n.section .debug_str { .b8 1 }\n'
    )
    found = [instruction.source for instruction in kernel(body, after=files).instructions]
    user = [("/a/user.py", 20), ("/a/user.py", 20), None, ("/a/user.py", 30), ("/a/user.py", 8)]
    assert found == [None, *user]


def test_a_module_holds_several_kernels_and_one_costs_one() -> None:
    text = module("ret;") + ".visible .entry other() { .reg .b32 %r<2>; mov.b32 %r1, 5; ret; }"
    assert {name: len(k.instructions) for name, k in parse(text).kernels.items()} == {"k": 1, "other": 2}
    assert (parse(text).version, parse(text).target, parse(text).address_size) == ("8.8", "sm_100a", 64)
    broken = text.replace("mov.b32 %r1, 5", "mov.b32 %r1 5")
    assert parse_kernel(broken, "k").instructions
    with pytest.raises(PtxError, match=r"PTX line 11: cannot read the operand '%r1 5': .*mov"):
        parse(broken)
    with pytest.raises(PtxError, match="no kernel x, only k, other"):
        parse_kernel(text, "x")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("mov.b32 %r1, ;", "cannot read the operand ''"),
        ("mov.b32 %r1, 08;", "cannot read the operand '08'"),
        ("mov.b32 %r1, 1.5;", "cannot read the operand"),
        ("mov.b32 {%r1, [%r2};", "cannot read (these operands|the operand)"),
        ("mov.b32 %r1, %r2", "cannot read"),
        ("mov.b32 %r1, %r2 mov.b32 %r1, %r2;", "cannot read the operand"),
        ("ld.b32 %r1, [%r2*4];", r"cannot read the address \[%r2\*4\]"),
        ("ld.b32 %r1, [%r2+%r3];", "cannot read the address"),
        ("ld.b32 %r1, [%r2, %r3];", "cannot read the operand"),
        ("mov.b32 %r1, nowhere;", "nobody declares nowhere"),
        ("{ .reg .b32 a; } mov.b32 %r1, a;", "nobody declares a"),
        ("bra nowhere;", "nobody declares nowhere"),
        ("{ IN: } bra IN;", "this branch has no target"),
        ("bra %r1;", "this branch has no target"),
        ("brx.idx %r1, A; A: ret;", "this branch has no target"),
        ("A: A: ret;", "the label A is defined twice"),
        (".reg .b32 %r1;", "%r1 is declared twice"),
        (".reg .b33 x;", "the register type 'b33' is unknown"),
        (".reg .b32 x y;", "cannot read the register 'x y'"),
        (".reg;", "the register type '' is unknown"),
        (".shared .b8 a[];", "only the shared memory of the launch"),
        (".local .b8 a[2] = {1, 2, 3};", "more initial values than elements"),
        (".local .b8 a[2] = {x};", "cannot read the initial value 'x'"),
        (".local .b8 a[2][1] = {{1}, {2}};", "cannot read this variable"),
        (".texref t;", "the directive .texref is unknown here"),
        (".branchtargets A;", "a table of branch targets needs a label"),
        (".loc 9 1 1", "this .loc names a file that no .file declares"),
        ("call.uni (x), vprintf, (y);", "the function vprintf is not declared"),
        ("call %r1, (%r2), proto;", "only a direct call is known"),
        ("@5 ret;", "5 is not a register"),
        ("@nobody ret;", "nobody is not a register"),
        ("mov.b32 %r1, %r2; ?", "cannot read this statement"),
        ("{ ret;", "this block is never closed"),
    ],
)
def test_what_does_not_parse_names_its_line(body: str, reason: str) -> None:
    with pytest.raises(PtxError, match=reason) as caught:
        kernel(body)
    assert f"PTX line {caught.value.line}: " in str(caught.value)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"before": ".texref t;"}, "this is unknown at the module level: .texref t;"),
        ({"before": ".extern .global .b8 x[4];"}, "only the shared memory of the launch"),
        ({"directives": ".fast"}, "the directive .fast of this kernel is unknown"),
        ({"parameters": ".param .b7 x"}, "cannot read the parameter '.param .b7 x'"),
        ({"before": ".func f() { ret; "}, "this block is never closed"),
    ],
)
def test_what_does_not_parse_outside_a_body(parts: dict[str, str], reason: str) -> None:
    with pytest.raises(PtxError, match=reason):
        kernel("ret;", **parts)


def test_a_kernel_of_the_dsl(tmp_path: Path) -> None:
    """Compiled here without a GPU: inline assembly, printf, local memory and the lines of this file."""
    cutlass = pytest.importorskip("cutlass")
    import cutlass.cute as cute
    from cutlass.base_dsl.compiler import DumpDir

    @cute.kernel
    def copy(x: cute.Tensor, y: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        smem = cutlass.memory.SmemAllocator()
        barrier = smem.allocate_array(cutlass.Int64, 1)
        cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_wait(barrier, 0)
        if x[thread] > 3.0:
            cute.printf("large %f", x[thread])
        y[thread] = x[thread]

    @cute.jit
    def launch(x: cute.Tensor, y: cute.Tensor) -> None:
        copy(x, y).launch(grid=[1, 1, 1], block=[64, 1, 1])

    x = cute.runtime.make_fake_compact_tensor(cutlass.Float32, (64,), assumed_align=16)
    options = cute.GPUArch("sm_100a"), cute.KeepPTX(True), cute.GenerateLineInfo(True), DumpDir(str(tmp_path))
    compiled = cute.compile[options](launch, x, x)
    found = next(iter(parse(compiled.__ptx__).kernels.values()))

    assert (found.target, found.reqntid) == ("sm_100a", (64, 1, 1))
    assert [parameter.size for parameter in found.parameters] == [8, 8]
    assert {"vprintf"} == set(found.functions)
    assert any(variable.data and variable.data.startswith(b"large %f") for variable in found.variables.values())
    wait = next(i for i in found.instructions if i.name.startswith("mbarrier.try_wait"))
    assert isinstance(wait.operands[0], Register) and found.registers[wait.operands[0].name] == "pred"
    stores = [i for i in found.instructions if i.name == "st.global.b32"]
    here = Path(__file__).read_text().split("\n")
    assert stores and all(i.source and here[i.source[1] - 1].strip() == "y[thread] = x[thread]" for i in stores)
    assert all(i.source is None or Path(i.source[0]) == Path(__file__) for i in found.instructions)
