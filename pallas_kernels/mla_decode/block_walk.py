"""The key blocks of a partition one after the other, for producers that look ahead."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels.hopper.branch import cond
from pallas_kernels.mla_decode.schedule import BLOCK
from pallas_kernels.mla_decode.work import Work

NONE = -1
"""Sequence of a block that the partition does not have."""

Position = tuple[Any, Any, Any]
"""(sequence, block of the sequence, end of the sequence's blocks in the partition)."""

Block = tuple[Any, Any, Any]
"""(sequence or NONE, page, number of valid tokens from the page's first slot on)."""


@dataclasses.dataclass(frozen=True, eq=False)
class BlockWalk:
    """Positions in a partition."""

    work: Work
    first_sequence: Any
    last_sequence: Any
    first_block: Any
    end_block: Any

    @classmethod
    def of(cls, work: Work) -> BlockWalk:
        return cls(work, *work.range())

    @property
    def sequence_count(self) -> Any:
        return self.last_sequence - self.first_sequence + 1

    def start(self) -> Position:
        """Returns the first position."""
        return self.first_sequence, self.first_block, self._end_of(self.first_sequence)

    def after(self, position: Position) -> Position:
        """Returns the next position in the partition."""
        b, index, end = position
        return cond(
            (index + 1 >= end) & (b < self.last_sequence),
            lambda: (b + 1, jnp.int32(0), self._end_of(b + 1)),
            lambda: (b, index + 1, end),
        )

    def block_at(self, position: Position, other_page: Any) -> Block:
        """Returns the block there. If there is none, its page is ``other_page``."""
        b, index, end = position
        exists = index < end
        page = jnp.where(exists, self.work.page(b, index), other_page)
        return jnp.where(exists, b, NONE), page, self.work.length(b) - index * BLOCK

    def first_blocks(self, count: int) -> tuple[Position, list[Block]]:
        """Returns the first ``count`` blocks, and the position of the last of them."""
        position = self.start()
        blocks = [self.block_at(position, 0)]
        while len(blocks) < count:
            position = self.after(position)
            blocks.append(self.block_at(position, blocks[-1][1]))
        return position, blocks

    def _end_of(self, b: Any) -> Any:
        return jnp.where(b == self.last_sequence, self.end_block, self.work.blocks(b))
