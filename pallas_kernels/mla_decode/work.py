"""The work of one program of the Hopper kernels: its partition of the schedule."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp


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

    def segment_and_end(self, i: Any, work_range: tuple[Any, ...]) -> tuple[Any, Any, Any, Any]:
        """Returns :meth:`segment`, and whether it includes the sequence's last block."""
        first_sequence, last_sequence, first_block, end_block = work_range
        b = first_sequence + i
        blocks = self.blocks(b)
        begin = jnp.where(i == 0, first_block, 0)
        end = jnp.where(b == last_sequence, end_block, blocks)
        return b, begin, end - begin, end == blocks

    def segment_and_length(self, i: Any, first: Any, last: Any) -> tuple[Any, Any, Any, Any]:
        """Returns the partition's i-th sequence, its length, first block and blocks here.

        It reads the other entries of the schedule again each time, which takes fewer registers.

        Args:
          first, last: the partition's first and last sequence.
        """
        b = first + i
        begin = jnp.where(i == 0, self.schedule[self.partition, 2], 0)
        end = jnp.where(b == last, self.schedule[self.partition, 3], self.blocks(b))
        return b, self.length(b), begin, end - begin

    def blocks(self, b: Any) -> Any:
        """Returns the key blocks of a sequence in all partitions."""
        return self.schedule[self.partitions + b, 0]

    def length(self, b: Any) -> Any:
        """Returns the cached tokens of a sequence."""
        return self.schedule[self.partitions + b, 3]

    def segments(self, b: Any) -> Any:
        """Returns the number of partitions into which a sequence falls."""
        return self.schedule[self.partitions + b, 1]

    def is_split(self, b: Any) -> Any:
        """Returns whether a sequence falls into several partitions."""
        return self.segments(b) > 1

    def partial(self, b: Any) -> Any:
        """Returns the index of this partition's partial result of a sequence."""
        return self.schedule[self.partitions + b, 2] + self.partition

    def page(self, b: Any, block: Any) -> Any:
        """Returns the page of a key block; of the table's last entry if the block is past it."""
        page = self.tables[b, jnp.minimum(block, self.tables.shape[1] - 1)]
        return jnp.clip(page, 0, self.pages - 1)
