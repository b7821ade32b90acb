"""mbarriers of a kernel: a table of pipes, each a ring of stages with a full and an empty barrier.

A stage is named by a running count: the n-th use of a pipe is stage n % stages, and its phase follows from n. So there
are no states to carry, and a waiter that sees every use of the stages it waits for cannot mistake one phase for
another. Methods emit instructions; `bars` is the address of the first barrier in shared memory.
"""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Uint32
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import tcgen05


class Pipe(NamedTuple):
    stages: int
    producers: int  # arrivals that fill a stage
    consumers: int = 0  # arrivals that empty it; 0: nobody waits for that, and there are no such barriers


class Pipes:
    def __init__(self, **pipes: Pipe) -> None:
        self.pipes = pipes
        self.first, self.count = {}, 0
        for name, pipe in pipes.items():
            self.first[name] = self.count
            self.count += pipe.stages * (2 if pipe.consumers else 1)

    def initialise(self, bars: Any) -> None:
        """By one warp; whoever uses the barriers synchronises with it afterwards."""
        with cute.arch.elect_one():
            for name, pipe in self.pipes.items():
                for stage in range(pipe.stages):
                    cute.arch.mbarrier_init(bars + self.first[name] + stage, pipe.producers)
                    if pipe.consumers:
                        cute.arch.mbarrier_init(bars + self.first[name] + pipe.stages + stage, pipe.consumers)
        cute.arch.mbarrier_init_fence()

    def stage(self, name: str, n: Any) -> Any:
        return Int32(Uint32(n) % self.pipes[name].stages)

    def parity(self, name: str, n: Any) -> Any:
        """Of the phase that the n-th use fills. Counts are never negative: the division of unsigned ones is shorter."""
        return Int32(Uint32(n) // self.pipes[name].stages & 1)

    def full(self, bars: Any, name: str, n: Any) -> Any:
        return bars + (self.first[name] + self.stage(name, n))

    def empty(self, bars: Any, name: str, n: Any) -> Any:
        return bars + (self.first[name] + self.pipes[name].stages + self.stage(name, n))

    def wait_full(self, bars: Any, name: str, n: Any) -> None:
        cute.arch.mbarrier_wait(self.full(bars, name, n), self.parity(name, n))

    def wait_empty(self, bars: Any, name: str, n: Any) -> None:
        cute.arch.mbarrier_wait(self.empty(bars, name, n), (self.parity(name, n)) ^ 1)

    def expect(self, bars: Any, name: str, n: Any, size: int) -> Any:
        """Arms the barrier of a stage for `size` bytes of copies; returns it for them."""
        full = self.full(bars, name, n)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, size)
        return full

    def arrive_full(self, bars: Any, name: str, n: Any) -> None:
        arrive(self.full(bars, name, n))

    def arrive_empty(self, bars: Any, name: str, n: Any) -> None:
        arrive(self.empty(bars, name, n))

    def commit_full(self, bars: Any, name: str, n: Any) -> None:
        commit(self.full(bars, name, n))

    def commit_empty(self, bars: Any, name: str, n: Any) -> None:
        commit(self.empty(bars, name, n))


class Copies(NamedTuple):
    """A TMA atom with the tensor it copies."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


def copy_stage(pipes: Pipes, bars: Any, pipe: str, n: Any, size: int, atom: Any, source: Any, target: Any) -> None:
    """Starts a TMA copy to stage n of a pipe when it is free."""
    pipes.wait_empty(bars, pipe, n)
    full = pipes.expect(bars, pipe, n, size)
    cute.copy(atom, source, target[None, pipes.stage(pipe, n)], tma_bar_ptr=full)


def arrive(*barriers: Any) -> None:
    """One arrival for the warp at each barrier, when all its lanes have come here."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        for barrier in barriers:
            cute.arch.mbarrier_arrive(barrier)


def arrive_after_tensor(*barriers: Any) -> None:
    """The same behind tcgen05.wait, for what the warp did in tensor memory: its lanes do that as one."""
    before_sync()
    arrive_as_one(*barriers)


def arrive_as_one(*barriers: Any) -> None:
    """The same where the lanes have come together already and what they read is in their registers."""
    with cute.arch.elect_one():
        for barrier in barriers:
            cute.arch.mbarrier_arrive(barrier)


def commit(barrier: Any) -> None:
    """An arrival when all MMAs that this thread has issued are complete."""
    with cute.arch.elect_one():
        tcgen05.commit(barrier)


def before_sync() -> None:
    """tcgen05.fence::before_thread_sync: what this thread did in tensor memory, before it arrives somewhere."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC)


def after_sync() -> None:
    """tcgen05.fence::after_thread_sync: what others did in tensor memory, after a wait."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC)
