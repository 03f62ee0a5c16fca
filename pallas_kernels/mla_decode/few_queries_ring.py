"""The ring buffers of the kernel for few query rows, and the barriers of their stages."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.barriers import Barriers
from pallas_kernels.hopper.branch import when
from pallas_kernels.hopper.warpgroup import WARPS
from pallas_kernels.mla_decode.few_queries_plan import Plan

Stages = list[tuple[jax.Array, jax.Array]]
"""(stage, use of the stage) of each slice of a key block."""


@dataclasses.dataclass(frozen=True, eq=False)
class Rings:
    """One ring buffer of stages per consumer warpgroup, and the barriers of every stage.

    Block n of a partition goes to consumer ``n % warpgroups``, as block ``n // warpgroups`` of its
    ring.
    """

    plan: Plan
    """Number of rings, their stages, and the slices of a key block."""

    memory: Any
    """Stages of all rings, [warpgroups * ring, 64, width], in shared memory."""

    barriers: Barriers
    """For each stage "full" and "free", then one "handover" per consumer."""

    @staticmethod
    def barrier_count(plan: Plan) -> int:
        """Returns the length of ``barriers``."""
        return 2 * plan.warpgroups * plan.ring + plan.warpgroups

    def initialise(self, full_arrivals: int) -> None:
        """Initialises the barriers; a stage is full after ``full_arrivals`` arrivals."""
        stages = self.plan.warpgroups * self.plan.ring
        self.barriers.initialise(
            [full_arrivals] * stages + [WARPS] * (stages + self.plan.warpgroups)
        )

    def owner(self, n: Any) -> Any:
        """Returns the consumer of block n."""
        return n & (self.plan.warpgroups - 1)

    def index(self, n: Any) -> Any:
        """Returns the index of block n in its ring."""
        return lax.shift_right_logical(n, jnp.int32(self.plan.warpgroups - 1))

    def full(self, w: Any, stage: Any) -> Any:
        """Returns the index of the barrier at which ring w's stage is filled."""
        return w * self.plan.ring + stage

    def free(self, w: Any, stage: Any) -> Any:
        """Returns the index of the barrier at which ring w's stage is released."""
        return (self.plan.warpgroups + w) * self.plan.ring + stage

    def handover(self, w: Any) -> Any:
        """Returns the index of the barrier at which consumer w hands over its results."""
        return 2 * self.plan.warpgroups * self.plan.ring + w

    def stage_ref(self, w: Any, stage: Any) -> Any:
        """Returns ring w's stage, [64, width]."""
        return self.memory.at[w * self.plan.ring + stage]

    def refs_by_column(self, w: Any, stages: Stages) -> list[Any]:
        """Returns the stages of a block of ring w, in the order of their columns."""
        slices = self.plan.slices
        order = sorted(range(len(slices)), key=lambda k: slices[k].first)
        return [self.stage_ref(w, stages[k][0]) for k in order]

    def stages_of(self, r: Any) -> Stages:
        """Returns the stages of a ring's r-th block.

        They wrap around at most once, because a ring has room for a block or more.
        """
        ring = self.plan.ring
        first = r * len(self.plan.slices)
        use = lax.div(first, jnp.int32(ring))
        stage = first - use * ring
        stages = []
        for k in range(len(self.plan.slices)):
            wraps = stage + k >= ring
            stages.append((jnp.where(wraps, stage + (k - ring), stage + k),
                          jnp.where(wraps, use + 1, use)))  # fmt: skip
        return stages

    def wait_until_free(self, w: Any, stage: Any, use: Any) -> None:
        """Waits until the consumer has released a stage's use before ``use``."""

        @when(use > 0)
        def _():
            self.barriers.wait(self.free(w, stage), use - 1)

    def wait_for_arrivals(self, w: Any, blocks: Any) -> None:
        """Waits for every outstanding arrival at a ring's "free" barriers.

        Args:
          blocks: number of blocks that were filled in the ring.
        """
        fills = blocks * len(self.plan.slices)
        self.barriers.wait_for_arrivals(self.free(w, 0), self.plan.ring, fills)
