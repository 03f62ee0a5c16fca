"""The ring buffers of the kernel for few query rows, and the work of one program."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mla_decode.barriers import WARPS, Barriers
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
    memory: Any
    """Stages of all rings, [warpgroups * ring, 64, width], in shared memory."""

    barriers: Barriers
    """For each stage "full" and "free", then one "handover" per consumer."""

    @staticmethod
    def barrier_count(plan: Plan) -> int:
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
        return w * self.plan.ring + stage

    def free(self, w: Any, stage: Any) -> Any:
        return (self.plan.warpgroups + w) * self.plan.ring + stage

    def handover(self, w: Any) -> Any:
        return 2 * self.plan.warpgroups * self.plan.ring + w

    def stage_ref(self, w: Any, stage: Any) -> Any:
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

        @pl.when(use > 0)
        def _():
            self.barriers.wait(self.free(w, stage), use - 1)

    def wait_for_arrivals(self, w: Any, blocks: Any) -> None:
        """Waits for every outstanding arrival at a ring's "free" barriers.

        A program may exit only then.

        Args:
          blocks: number of blocks that were filled in the ring.
        """
        ring = self.plan.ring
        used = blocks * len(self.plan.slices)
        for stage in range(ring):
            uses = lax.div(used + (ring - 1 - stage), jnp.int32(ring))

            @pl.when(uses > 0)
            def _(stage=stage, uses=uses):
                self.barriers.wait(self.free(w, stage), uses - 1)


@dataclasses.dataclass(frozen=True, eq=False)
class Work:
    """One program's partition of the schedule, read from global memory."""

    schedule: Any
    """:attr:`Schedule.table`, [partitions + B, 4]."""

    tables: Any
    """Block tables, [B, max_pages]."""

    partitions: int
    """Number of partitions."""

    partition: Any
    """This program's partition."""

    pages: int
    """Number of pages in the pool. Table entries past a sequence's length may be anything, and are
    clipped to the pool."""

    def range(self) -> tuple[Any, ...]:
        """Returns the partition's entry of the schedule, read in one memory latency."""
        return tuple(self.schedule[self.partition, k] for k in range(4))

    def sequence_count(self) -> Any:
        """Returns the number of the partition's sequences."""
        return self.schedule[self.partition, 1] - self.schedule[self.partition, 0] + 1

    def segment(self, i: Any, work_range: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        """Returns the partition's i-th sequence, its first block here, and its blocks here."""
        first_sequence, last_sequence, first_block, end_block = work_range
        b = first_sequence + i
        begin = jnp.where(i == 0, first_block, 0)
        return (
            b,
            begin,
            jnp.where(b == last_sequence, end_block, self.blocks(b)) - begin,
        )

    def blocks(self, b: Any) -> Any:
        """Returns the key blocks of a sequence in all partitions."""
        return self.schedule[self.partitions + b, 0]

    def length(self, b: Any) -> Any:
        """Returns the cached tokens of a sequence."""
        return self.schedule[self.partitions + b, 3]

    def is_split(self, b: Any) -> Any:
        """Returns whether a sequence falls into several partitions."""
        return self.schedule[self.partitions + b, 1] > 1

    def partial(self, b: Any) -> Any:
        """Returns the index of this partition's partial result of a sequence."""
        return self.schedule[self.partitions + b, 2] + self.partition

    def page(self, b: Any, block: Any) -> Any:
        """Returns the page of a key block; of the table's last entry if the block is past it."""
        page = self.tables[b, jnp.minimum(block, self.tables.shape[1] - 1)]
        return jnp.clip(page, 0, self.pages - 1)
