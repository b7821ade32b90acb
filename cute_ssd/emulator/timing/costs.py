"""What each record of a decoded kernel costs on an SM: its pipe, clocks, latency, and what it does to time.

PTX is not what the SM executes. Where ptxas is known to remove something (moves, packing of registers, parameters in
the constant bank), it is free here.
"""

from __future__ import annotations

import numpy as np

from .. import engine
from ..decode import CLASSES
from ..program import Program
from .constants import Model

COST = np.dtype(
    [("action", np.uint8), ("pipe", np.uint8), ("n", np.uint16)]
    + [(name, np.float32) for name in ("issue", "cycles", "latency")]
)
"""timing.h's Cost."""

ACTIONS = (
    *("plain", "free", "shared_load", "shared_store", "global_load", "global_store", "atomic", "copy_async"),
    *("copy_commit", "copy_wait", "copy_arrive", "tensor_load", "tensor_store", "bulk_load", "bulk_copy", "bulk_store"),
    *("bulk_commit", "bulk_wait", "mma", "commit", "tmem_load", "tmem_store", "tmem_wait_load", "tmem_wait_store"),
    *("tmem_copy", "arrive", "mbarrier_wait", "named_wait", "named_arrive", "cluster_arrive", "cluster_wait"),
    *("remote_store", "order", "branch", "exit", "dependency_wait", "dependency_launch"),
)
"""timing.h's Action."""

PIPES = ("", "fma", "alu", "xu", "lsu", "tmem", "warp_mma")
"""timing.h's Pipe."""

_DIRECT = {
    "cp.async": "copy_async",
    "cp.async.commit_group": "copy_commit",
    "cp.async.mbarrier.arrive": "copy_arrive",
    "tensor.load": "tensor_load",
    "tensor.store": "tensor_store",
    "tensor.reduce": "tensor_store",
    "bulk.load": "bulk_load",
    "bulk.copy": "bulk_copy",
    "bulk.reduce.copy": "bulk_copy",
    "bulk.store": "bulk_store",
    "bulk.reduce.store": "bulk_store",
    "bulk.commit": "bulk_commit",
    "tcgen05.mma": "mma",
    "tcgen05.commit": "commit",
    "tcgen05.wait::ld": "tmem_wait_load",
    "tcgen05.wait::st": "tmem_wait_store",
    "mbarrier.arrive": "arrive",
    "mbarrier.tx": "arrive",
    "mbarrier.try_wait": "mbarrier_wait",
    "mbarrier.test_wait": "mbarrier_wait",
    "bar.sync": "named_wait",
    "bar.red": "named_wait",
    "bar.arrive": "named_arrive",
    "cluster.arrive": "cluster_arrive",
    "cluster.wait": "cluster_wait",
    "st.async": "remote_store",
    "exit": "exit",
}
_LONG = ("div", "rem", "sad")
_XU = ("popc", "clz", "bfind", "fns", "brev")
_CONVERTS_FAST = ("bf16x2", "f16x2")


class _Costs:
    def __init__(self, program: Program, model: Model) -> None:
        self.program, self.model = program, model
        self.names = {index: name for name, index in engine.handlers().items()}

    def table(self) -> np.ndarray:
        costs = np.zeros(len(self.program.records), COST)
        known: dict[tuple[object, ...], tuple[object, ...]] = {}
        for at, record in enumerate(self.program.records):
            key = tuple(int(record[name]) for name in ("handler", "line", "opcode_class", "a", "c", "d", "i0", "i1"))
            if key not in known:
                known[key] = self.cost(record)
            costs[at] = known[key]
        return costs

    def cost(self, record: np.void) -> tuple[object, ...]:
        handler = self.names[int(record["handler"])]
        special = self.special(handler, record)
        if special is not None:
            return special
        number = int(record["opcode_class"])
        if number < 0:  # a further record of an instruction that has been charged
            return self.make("free")
        return self.by_class(CLASSES[number], handler, record)

    def make(
        self, action: str, pipe: str = "", cycles: float = 0.0, latency: float = 0.0, n: int = 0, issue: float = 1.0
    ) -> tuple[object, ...]:
        if action == "free":
            issue = 0.0
        return ACTIONS.index(action), PIPES.index(pipe), n, issue, cycles, latency

    def special(self, handler: str, record: np.void) -> tuple[object, ...] | None:
        """Of what moves data, waits or lets others go on; None for what computes."""
        m = self.model
        if handler in _DIRECT:
            action = _DIRECT[handler]
            pipe = "lsu" if action in ("copy_async", "arrive", "remote_store") else ""
            return self.make(action, pipe, m["lsu_interval"] if pipe else 0.0, m["alu_latency"])
        if handler in ("cp.async.wait_group", "bulk.wait"):
            reads_only = handler == "bulk.wait" and int(record["i1"]) == 1
            action = "bulk_wait" if handler == "bulk.wait" else "copy_wait"
            return self.make(action, n=min(int(record["i0"]), 0xFFFF), latency=-1.0 if reads_only else 0.0)
        if handler.startswith(("tcgen05.ld.", "tcgen05.st.")):
            load, registers = handler.startswith("tcgen05.ld."), int(record["c"])
            clocks = registers * m["tmem_load" if load else "tmem_store"]
            return self.make("tmem_load" if load else "tmem_store", "tmem", clocks, n=registers)
        if handler == "tcgen05.cp":
            return self.make("tmem_copy", n=max(1, int(record["c"]) * int(record["d"]) * 4 // 1024))
        if handler == "tcgen05.alloc":
            return self.make("order", latency=m["tmem_alloc_latency"])
        if handler in ("tcgen05.dealloc", "tcgen05.relinquish_alloc_permit"):
            return self.make("order", latency=m["order_latency"])
        if handler in ("bra", "brx.idx"):
            return self.make("branch", latency=m["branch_latency"])
        if handler.startswith("red.async."):
            return self.make("remote_store", "lsu", m["lsu_interval"], m["alu_latency"])
        if handler == "tcgen05.fence":
            return self.make("free")
        if handler.startswith("griddepcontrol."):
            return self.make("dependency_wait" if handler.endswith("wait") else "dependency_launch")
        if handler == "nothing":
            return self.nothing(int(record["line"]))
        return self.memory(handler)

    def nothing(self, line: int) -> tuple[object, ...]:
        instruction = self.program.instruction_at(line)
        text = instruction.text if instruction else ""
        if "setmaxnreg" in text:
            return self.make("order", latency=self.model["order_latency"])
        return self.make("plain")

    def memory(self, handler: str) -> tuple[object, ...] | None:
        m = self.model
        kind, _, rest = handler.partition(".")
        lsu, wide = ("lsu", m["lsu_interval"]), ("lsu", 2 * m["lsu_interval"])
        if kind in ("ld", "st") and rest.startswith(("shared.", "cluster.")):
            return self.make("shared_load" if kind == "ld" else "shared_store", *lsu)
        if kind in ("ldmatrix", "stmatrix"):
            return self.make("shared_load" if kind == "ldmatrix" else "shared_store", *lsu)
        if kind in ("ld", "st") and rest.startswith(("global.", "generic.")):
            return self.make("global_load" if kind == "ld" else "global_store", *wide, latency=m["l1_latency"])
        if kind in ("ld", "st") and rest.startswith("local."):
            return self.make("plain", *wide, latency=m["l1_latency"] if kind == "ld" else 0.0)
        if kind == "atom":
            return self.make("atomic", *wide, latency=m["l1_latency"])
        return None

    def by_class(self, name: str, handler: str, record: np.void) -> tuple[object, ...]:
        m = self.model
        short = m["alu_latency"]
        alu = ("plain", "alu", m["alu_interval"], short)
        if name in ("move", "pack", "load parameter"):
            return self.make("free")
        if name == "integer":
            return self.integer(handler)
        if name in ("float", "float x2", "half", "double"):
            return self.floating(name, handler)
        if name == "special function":
            return self.make("plain", "xu", m["xu_interval"], m["xu_latency"])
        if name == "convert":
            return self.convert(handler, int(record["line"]))
        if name == "shuffle":
            return self.make("plain", "lsu", m["shuffle_interval"], m["shuffle_latency"])
        if name == "reduce warp":
            return self.make("plain", "xu", m["xu_interval"], m["shuffle_latency"])
        if name == "mma":
            return self.make("plain", "warp_mma", m["warp_mma_interval"], m["warp_mma_latency"])
        if name == "fence":
            instruction = self.program.instruction_at(int(record["line"]))
            device = instruction is not None and instruction.text.split(".")[-1].rstrip(";") in ("gpu", "gl", "sys")
            return self.make("order", latency=m["device_fence_latency" if device else "order_latency"])
        if name in ("compare", "select", "predicate", "vote"):
            return self.make(*alu)
        return self.make("plain", latency=short)

    def integer(self, handler: str) -> tuple[object, ...]:
        m = self.model
        kind = handler.split(".")[0]
        if kind in ("cvta", "mapa", "getctarank", "shared address"):
            return self.make("free")
        if kind in _LONG and kind != "sad":
            return self.make("plain", "alu", 20 * m["alu_interval"], 10 * m["alu_latency"], issue=20.0)
        if kind in _XU:
            return self.make("plain", "xu", m["xu_interval"], m["xu_latency"])
        words = 2 if handler.endswith("64") else 1
        if kind in ("mul", "mad", "dp4a", "dp2a") or ".wide" in handler:
            return self.make("plain", "fma", words * m["multiply_interval"], m["alu_latency"], issue=float(words))
        return self.make("plain", "alu", words * m["alu_interval"], m["alu_latency"] * words, issue=float(words))

    def floating(self, name: str, handler: str) -> tuple[object, ...]:
        m = self.model
        kind = handler.split(".")[0]
        if kind in ("xor", "and", "flush", "lop3", "mov"):  # signs are modifiers of the operands
            return self.make("free")
        if kind in ("min", "max"):
            return self.make("plain", "alu", m["alu_interval"], m["alu_latency"])
        if name == "double":
            return self.make("plain", "fma", 32 * m["fma_interval"], 4 * m["alu_latency"])
        return self.make(
            "plain", "fma", m["fma_x2_interval" if name == "float x2" else "fma_interval"], m["alu_latency"]
        )

    def convert(self, handler: str, line: int) -> tuple[object, ...]:
        m = self.model
        alu = ("plain", "alu", m["alu_interval"], m["alu_latency"])
        if handler in ("mov.b32", "mov.b64", "cvt.u64.u32"):
            return self.make("free")
        if handler in ("cvt.s64.s32", "cvt.integer", "cvt.pack", "cvt.f32.bf16"):
            return self.make(*alu)
        if handler.startswith(("cvt.bf16x2", "cvt.f16x2", "cvt.f32.f16", "cvt.tf32")):
            return self.make("plain", "alu", m["convert_interval"], m["alu_latency"])
        instruction = self.program.instruction_at(line)
        modifiers = instruction.modifiers if instruction else ()
        if handler == "cvt.float" and any(kind in modifiers for kind in ("bf16", "f16", *_CONVERTS_FAST)):
            return self.make("plain", "alu", m["convert_interval"], m["alu_latency"])
        return self.make("plain", "xu", m["xu_interval"], m["xu_latency"])


def costs(program: Program, model: Model) -> np.ndarray:
    """One cost for each record of `program`."""
    return _Costs(program, model).table()
