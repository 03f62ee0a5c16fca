"""A ring of stages in shared memory that one warpgroup fills by TMA and others empty.

A position in the ring is a slot and a phase, which flips each time round. Those who empty the ring
release every stage once before they begin, so the filling warpgroup waits for a release before
every fill, and for as many more at its end as there are stages: no barrier is left behind.

Two kinds of barrier serve it. Pallas' own count the arrival of every thread of a warpgroup, 128
for each copy and each release; they are all that the interpreter knows. ``LeaderBarriers`` are made
by hand: one thread announces the bytes of all of a stage's copies, one thread of each warp releases
the stage.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm

from pallas_kernels.mosaic_ir import (
    REF,
    SCALAR,
    barrier_at,
    copy_window,
    i32,
    inline,
    instruction,
    parts_of,
    word,
)

_WARPS = 4  # of a warpgroup
_EMPTIERS = 2  # warpgroups that release


class Position(NamedTuple):
    slot: jax.Array
    phase: jax.Array


class Copy(NamedTuple):
    """A window of an array in global memory, and the shared memory it goes to."""

    source: Any
    window: tuple[Any, ...]
    """An index or a ``pl.ds`` of each axis."""
    target: Any
    swizzle: int | None


@dataclasses.dataclass(frozen=True)
class Ring(abc.ABC):
    stages: int
    memory: Any
    """What ``scratch`` asked for."""

    @staticmethod
    @abc.abstractmethod
    def scratch(stages: int, copies: int) -> Any:
        """Of a ring of so many copies a stage."""

    @abc.abstractmethod
    def initialise(self) -> None:
        """By every thread of the block, before any other use."""

    @abc.abstractmethod
    def fill(self, at: Position, copies: Sequence[Copy]) -> None:
        """Waits until the stage is released, and starts its copies."""

    @abc.abstractmethod
    def wait_empty(self, at: Position) -> None: ...

    @abc.abstractmethod
    def wait_full(self, at: Position) -> None: ...

    @abc.abstractmethod
    def release(self, at: Position) -> None:
        """By each warpgroup that empties the ring, when it has read the stage."""

    def begin(self) -> Position:
        return Position(jnp.int32(0), jnp.int32(0))

    def next(self, at: Position) -> Position:
        last = at.slot == self.stages - 1
        return Position(jnp.where(last, 0, at.slot + 1), jnp.where(last, 1 - at.phase, at.phase))

    def walk(
        self, steps: int, step: Callable[..., Any], at: Position, carry: Any
    ) -> tuple[Position, Any]:
        """``carry = step(i, position, carry)`` at ``steps`` stages from ``at`` on; also the
        position after them."""

        def one(i: jax.Array, carry: tuple[Position, Any]) -> tuple[Position, Any]:
            at, value = carry
            return self.next(at), step(i, at, value)

        return lax.fori_loop(0, steps, one, (at, carry))

    def release_all(self) -> None:
        for slot in range(self.stages):
            self.release(Position(jnp.int32(slot), jnp.int32(0)))

    def drain(self, at: Position) -> None:
        def wait(_: Any, at: Position) -> Position:
            self.wait_empty(at)
            return self.next(at)

        lax.fori_loop(0, self.stages, wait, at)


@dataclasses.dataclass(frozen=True)
class PallasBarriers(Ring):
    @staticmethod
    def scratch(stages: int, copies: int) -> Any:
        return [
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)
            for arrivals in (copies, _EMPTIERS)
        ]

    @property
    def full(self) -> Any:
        return self.memory[0]

    @property
    def empty(self) -> Any:
        return self.memory[1]

    def initialise(self) -> None:
        pass

    def fill(self, at: Position, copies: Sequence[Copy]) -> None:
        self.wait_empty(at)
        for copy in copies:
            source = copy.source.at[copy.window]
            plgpu.copy_gmem_to_smem(source, copy.target, self.full.at[at.slot])

    def wait_empty(self, at: Position) -> None:
        plgpu.barrier_wait(self.empty.at[at.slot])

    def wait_full(self, at: Position) -> None:
        plgpu.barrier_wait(self.full.at[at.slot])

    def release(self, at: Position) -> None:
        # The memory model asks for a fence between reads and the copy that overwrites what they
        # read, and the interpreter checks it. The machine reads before it arrives.
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.empty.at[at.slot])


@dataclasses.dataclass(frozen=True)
class LeaderBarriers(Ring):
    """Two words a barrier in shared memory, those of the full stages first."""

    @staticmethod
    def scratch(stages: int, copies: int) -> Any:
        del copies
        return plgpu.SMEM((4 * stages,), jnp.int32)

    def initialise(self) -> None:
        stages, releases = self.stages, _EMPTIERS * _WARPS

        @inline(REF)
        def make(words: Any) -> None:
            leader = mgpu.single_thread_predicate(mgpu.ThreadSubset.BLOCK)
            for i in range(2 * stages):
                arrivals = mgpu.c(1 if i < stages else releases, i32())
                pointer = barrier_at(words, mgpu.c(i, i32())).get_ptr()
                nvvm.mbarrier_init(pointer, arrivals, predicate=leader)
            instruction("fence.mbarrier_init.release.cluster;")
            instruction("bar.sync 0;")

        make(self.memory)

    def fill(self, at: Position, copies: Sequence[Copy]) -> None:
        self.wait_empty(at)
        windows = [parts_of(copy.window) for copy in copies]
        starts, sizes = [starts for starts, _ in windows], [sizes for _, sizes in windows]
        bytes_ = sum(
            math.prod(n or 1 for n in each) * jnp.dtype(copy.source.dtype).itemsize
            for copy, each in zip(copies, sizes, strict=True)
        )
        targets = [
            plgpu.RefType(transforms=(plgpu.SwizzleTransform(c.swizzle),) if c.swizzle else ())
            for c in copies
        ]
        types = [REF for _ in copies], targets, [[SCALAR] * len(each) for each in starts]

        def start(context: Any, words: Any, slot: Any, sources: Any, targets: Any, starts: Any):
            barrier, leader = barrier_at(words, word(slot)), _leader()
            barrier.arrive_expect_tx(bytes_, predicate=leader)
            for copy, source, target, begin, shape in zip(
                copies, sources, targets, starts, sizes, strict=True
            ):
                copy_window(
                    context,
                    source,
                    begin,
                    shape,
                    target,
                    barrier=barrier,
                    swizzle=copy.swizzle,
                    predicate=leader,
                )

        inlined: Any = plgpu.inline_mgpu(arg_types=(REF, SCALAR, *types))(start)
        inlined(
            self.memory, at.slot, [c.source for c in copies], [c.target for c in copies], starts
        )

    def wait_empty(self, at: Position) -> None:
        self._wait(at.slot + self.stages, at.phase)

    def wait_full(self, at: Position) -> None:
        self._wait(at.slot, at.phase)

    def _wait(self, barrier: jax.Array, phase: jax.Array) -> None:
        @inline(REF, SCALAR, SCALAR)
        def wait(words: Any, barrier: Any, phase: Any) -> None:
            odd = arith.trunci(ir.IntegerType.get_signless(1), word(phase))
            barrier_at(words, word(barrier)).wait_parity(odd)

        wait(self.memory, barrier, phase)

    def release(self, at: Position) -> None:
        @inline(REF, SCALAR)
        def arrive(words: Any, barrier: Any) -> None:
            instruction("bar.warp.sync 0xffffffff;")  # who arrives speaks for its warp's reads
            lane = mgpu.single_thread_predicate(mgpu.ThreadSubset.WARP)
            barrier_at(words, word(barrier)).arrive(predicate=lane)

        arrive(self.memory, at.slot + self.stages)


def _leader() -> Any:
    return mgpu.single_thread_predicate(mgpu.ThreadSubset.WARPGROUP)
