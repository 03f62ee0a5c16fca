"""Ring buffer between a TMA producer and consumer warpgroups.

The ring has a fixed number of stages in shared memory. Each stage has a full barrier, which the TMA
copies complete, and an empty barrier, on which the consumers arrive when they have read the stage.
A ``PipelineState`` is a stage and a phase bit that flips each time round. The consumers release
every stage once before they start, so the producer waits for a release before every fill. At its
end it waits for one more release per stage, so that no barrier is left with a pending phase.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.barriers import Barriers, TmaCopy
from pallas_kernels.hopper.launch import Index
from pallas_kernels.hopper.warpgroup import WARPS, when


class PipelineState(NamedTuple):
    """A stage of the ring, and the phase of its barriers."""

    stage: jax.Array  # int32, 0 to stages - 1
    phase: jax.Array  # int32, 0 or 1


@dataclasses.dataclass(frozen=True)
class Ring:
    """The barriers of a ring buffer. The stages' memory belongs to the caller."""

    stages: int
    consumers: int  # consumer warpgroups
    full: Barriers  # one barrier per stage
    empty: Barriers  # one barrier per stage
    ctas: int = 1
    """Programs of a cluster whose consumers release each stage, because each copies to all."""

    @staticmethod
    def scratch(
        stages: int, copies: int, consumers: int, interpret: Any, axis: str | None = None
    ) -> list[Any]:
        """Returns the scratch types of a ring with ``copies`` TMA copies per stage, multicast along
        a cluster ``axis`` if any. On a GPU all barriers are in one array, because each takes 1
        KiB."""
        if interpret is None:
            return [Barriers.scratch(2 * stages, 0, None)]
        full = Barriers.scratch(stages, copies, interpret)
        return [full, Barriers.scratch(stages, consumers, interpret, axis)]

    @classmethod
    def of(
        cls, stages: int, consumers: int, memory: Sequence[Any], interpret: Any, ctas: int = 1
    ) -> Ring:
        """Returns the ring whose barriers are the references that :meth:`scratch` allocated."""
        full = Barriers(memory[0], interpret)
        empty = Barriers(memory[-1], interpret, first=stages if interpret is None else 0)
        return cls(stages, consumers, full, empty, ctas)

    def initialise(self, *, warps: int = 1) -> None:
        """Initialises the barriers, see :meth:`Barriers.initialise`. Every thread of the cluster
        calls it before any other use."""
        releases = self.ctas * self.consumers * WARPS
        arrivals = [1] * self.stages + [releases] * self.stages
        self.full.initialise(arrivals, cluster=self.ctas > 1, warps=warps)

    def fill(self, state: PipelineState, copies: Sequence[TmaCopy]) -> None:
        """Waits until the stage is empty, and starts its copies. One warp of the producer calls
        it."""
        self.wait_empty(state)
        self.full.fill(state.stage, copies, scope=mgpu.ThreadSubset.WARPGROUP)

    def wait_empty(self, state: PipelineState) -> None:
        """Waits until all consumers have released the stage."""
        self.empty.wait(state.stage, state.phase)

    def wait_full(self, state: PipelineState) -> None:
        """Waits until all copies of the stage have arrived."""
        self.full.wait(state.stage, state.phase)

    def release(self, state: PipelineState) -> None:
        """Releases a stage. Each consumer warpgroup calls it when it has read the stage."""
        if self.empty.interpret is not None:
            # The memory model requires a fence between reading a stage and the copy that overwrites
            # it, and the interpreter checks that. On a GPU the values are in registers by now.
            plgpu.commit_smem()
        self.empty.arrive(state.stage, self.ctas)

    def start(self) -> PipelineState:
        return PipelineState(jnp.int32(0), jnp.int32(0))

    def next(self, state: PipelineState) -> PipelineState:
        last = state.stage == self.stages - 1
        return PipelineState(
            jnp.where(last, 0, state.stage + 1), jnp.where(last, 1 - state.phase, state.phase)
        )

    def loop(
        self, steps: int | jax.Array, body: Callable[..., Any], state: PipelineState, carry: Any
    ) -> tuple[PipelineState, Any]:
        """Runs ``carry = body(i, state, carry)`` for ``steps`` consecutive stages. Returns the
        state after them, and the last carry."""

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


@dataclasses.dataclass(frozen=True, eq=False)
class CountedRing:
    """A ring whose producer and consumers find a stage by counting: fill f is use ``f // stages``
    of stage ``f % stages``. So warps may fill or read different stages at the same time."""

    stages: int
    barriers: Barriers
    """The full barriers of every stage of all rings, then the free ones. Others may follow."""
    number: Index = 0  # number of this ring
    rings: int = 1  # number of rings

    def position(self, fill: Index) -> tuple[jax.Array, jax.Array]:
        """Returns the stage of a fill, and which use of the stage it is."""
        use = lax.div(fill, jnp.int32(self.stages))
        return fill - use * self.stages, use

    def full(self, stage: Index) -> Index:
        return self.number * self.stages + stage

    def free(self, stage: Index) -> Index:
        return (self.rings + self.number) * self.stages + stage

    def wait_until_free(self, stage: Index, use: Index) -> None:
        """Waits until a stage's use before ``use`` has been released."""
        when(use > 0)(lambda: self.barriers.wait(self.free(stage), use - 1))

    def wait_for_arrivals(self, fills: Index) -> None:
        """Waits for all releases after ``fills`` fills. The CTA may exit only then."""
        self.barriers.wait_for_arrivals(self.free(0), self.stages, fills)
