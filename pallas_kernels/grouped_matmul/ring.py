"""Ring buffer between the TMA producer warpgroup and the consumer warpgroups.

The ring has a fixed number of stages in shared memory. Each stage has a full barrier, which the TMA
copies complete, and an empty barrier, on which the consumers arrive when they have read the stage.
A ``PipelineState`` is a stage and a phase bit that flips each time round. The consumers release
every stage once before they start, so the producer waits for a release before every fill. At its
end it waits for one more release per stage, so that no barrier is left with a pending phase.

``GpuRing`` makes its own mbarriers: one thread announces the bytes of all copies of a stage, and
one thread of each warp releases the stage. Pallas' barriers instead count the arrival of every
thread of a warpgroup, 128 for each copy and each release. The interpreter supports only those, so
``InterpreterRing`` uses them.
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
from jaxlib.mlir.dialects import nvvm

from pallas_kernels.grouped_matmul.plan import CONSUMERS
from pallas_kernels.mosaic_ir import (
    REF,
    SCALAR,
    arrive_per_warp,
    barrier_at,
    copy_window,
    i32,
    inline,
    instruction,
    starts_and_sizes,
    wait_parity,
    word,
)

_WARPS = 4  # per warpgroup


class PipelineState(NamedTuple):
    """A stage of the ring, and the phase of its barriers."""

    stage: jax.Array
    """int32, 0 to stages - 1."""

    phase: jax.Array
    """int32, 0 or 1."""


class TmaCopy(NamedTuple):
    """A copy from global to shared memory."""

    source: Any
    """Array in global memory."""

    window: tuple[Any, ...]
    """An index or a ``pl.ds`` for each dimension of the source."""

    target: Any
    """Reference to shared memory."""

    swizzle: int | None
    """Swizzle of the target in bytes, or None."""


@dataclasses.dataclass(frozen=True)
class Ring(abc.ABC):
    """The barriers of a ring buffer. The stages' memory belongs to the caller."""

    stages: int

    memory: Any
    """The references that :meth:`scratch` allocates."""

    @staticmethod
    @abc.abstractmethod
    def scratch(stages: int, copies: int) -> Any:
        """Returns the scratch types of a ring with ``copies`` TMA copies per stage."""

    @abc.abstractmethod
    def initialise(self) -> None:
        """Initialises the barriers. Every thread of the block calls it before any other use."""

    @abc.abstractmethod
    def fill(self, state: PipelineState, copies: Sequence[TmaCopy]) -> None:
        """Waits until the stage is empty, and starts its copies. One warp of the producer calls
        it."""

    @abc.abstractmethod
    def wait_empty(self, state: PipelineState) -> None:
        """Waits until all consumers have released the stage."""

    @abc.abstractmethod
    def wait_full(self, state: PipelineState) -> None:
        """Waits until all copies of the stage have arrived."""

    @abc.abstractmethod
    def release(self, state: PipelineState) -> None:
        """Releases a stage. Each consumer warpgroup calls it when it has read the stage."""

    def start(self) -> PipelineState:
        """Returns the first state."""
        return PipelineState(jnp.int32(0), jnp.int32(0))

    def next(self, state: PipelineState) -> PipelineState:
        last = state.stage == self.stages - 1
        return PipelineState(
            jnp.where(last, 0, state.stage + 1), jnp.where(last, 1 - state.phase, state.phase)
        )

    def loop(
        self, steps: int, body: Callable[..., Any], state: PipelineState, carry: Any
    ) -> tuple[PipelineState, Any]:
        """Runs ``carry = body(i, state, carry)`` for ``steps`` consecutive stages.

        Returns the state after them, and the last carry.
        """

        def step(i: jax.Array, carry: tuple[PipelineState, Any]) -> tuple[PipelineState, Any]:
            state, value = carry
            return self.next(state), body(i, state, value)

        return lax.fori_loop(0, steps, step, (state, carry))

    def release_all(self) -> None:
        """Releases every stage once, before a consumer's first wait."""
        for stage in range(self.stages):
            self.release(PipelineState(jnp.int32(stage), jnp.int32(0)))

    def drain(self, state: PipelineState) -> None:
        """Waits until every stage is empty. The producer calls it at its end."""

        def wait(_: Any, state: PipelineState) -> PipelineState:
            self.wait_empty(state)
            return self.next(state)

        lax.fori_loop(0, self.stages, wait, state)


@dataclasses.dataclass(frozen=True)
class InterpreterRing(Ring):
    """A ring of Pallas' barriers."""

    @staticmethod
    def scratch(stages: int, copies: int) -> Any:
        return [
            plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)
            for arrivals in (copies, CONSUMERS)
        ]

    @property
    def full(self) -> Any:
        return self.memory[0]

    @property
    def empty(self) -> Any:
        return self.memory[1]

    def initialise(self) -> None:
        pass

    def fill(self, state: PipelineState, copies: Sequence[TmaCopy]) -> None:
        self.wait_empty(state)
        for copy in copies:
            source = copy.source.at[copy.window]
            plgpu.copy_gmem_to_smem(source, copy.target, self.full.at[state.stage])

    def wait_empty(self, state: PipelineState) -> None:
        plgpu.barrier_wait(self.empty.at[state.stage])

    def wait_full(self, state: PipelineState) -> None:
        plgpu.barrier_wait(self.full.at[state.stage])

    def release(self, state: PipelineState) -> None:
        # The memory model requires a fence between reading a stage and the copy that overwrites it,
        # and the interpreter checks that. On a GPU the values are in registers before the arrival.
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.empty.at[state.stage])


@dataclasses.dataclass(frozen=True)
class GpuRing(Ring):
    """A ring of mbarriers, two words each in shared memory: the full barriers, then the empty."""

    @staticmethod
    def scratch(stages: int, copies: int) -> Any:
        del copies
        return plgpu.SMEM((4 * stages,), jnp.int32)

    def initialise(self) -> None:
        stages, releases = self.stages, CONSUMERS * _WARPS

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

    def fill(self, state: PipelineState, copies: Sequence[TmaCopy]) -> None:
        self.wait_empty(state)
        windows = [starts_and_sizes(copy.window) for copy in copies]
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

        def start(context: Any, words: Any, stage: Any, sources: Any, targets: Any, starts: Any):
            barrier, leader = barrier_at(words, word(stage)), _leader()
            barrier.arrive_expect_tx(bytes_, predicate=leader)
            for copy, source, target, first, shape in zip(
                copies, sources, targets, starts, sizes, strict=True
            ):
                copy_window(
                    context,
                    source,
                    first,
                    shape,
                    target,
                    barrier=barrier,
                    swizzle=copy.swizzle,
                    predicate=leader,
                )

        inlined: Any = plgpu.inline_mgpu(arg_types=(REF, SCALAR, *types))(start)
        inlined(
            self.memory, state.stage, [c.source for c in copies], [c.target for c in copies], starts
        )

    def wait_empty(self, state: PipelineState) -> None:
        wait_parity(self.memory, state.stage + self.stages, state.phase)

    def wait_full(self, state: PipelineState) -> None:
        wait_parity(self.memory, state.stage, state.phase)

    def release(self, state: PipelineState) -> None:
        arrive_per_warp(self.memory, state.stage + self.stages)


def _leader() -> Any:
    return mgpu.single_thread_predicate(mgpu.ThreadSubset.WARPGROUP)
