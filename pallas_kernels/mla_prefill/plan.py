"""Tuning parameters of the Hopper mla_prefill kernel, its tiles, and their order."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import multiprocessors
from pallas_kernels.hopper.math import LOG2E
from pallas_kernels.hopper.tiles import ROWS

WARPGROUPS = 2
"""Number of consumer warpgroups. One more is the producer."""
TILE = WARPGROUPS * ROWS
"""Queries per tile. A consumer warpgroup has ROWS of them."""
COLUMNS = 64
"""Number of bfloat16 in a 128-byte swizzled row."""
PARTIAL_SUMS = 8
"""Partial sums per row: two for each of the four threads that hold the row."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile sizes and scheduling.

    Attributes:
      block: keys per block, a multiple of 64.
      stages: pipeline stages of the key ring and of the value ring; at least 2.
      l2_bytes: share of the L2 cache for keys and values. As many heads as fit run concurrently.
      programs: number of persistent programs. None: one per multiprocessor.
    """

    block: int = 128
    stages: int = 2
    l2_bytes: int = 24 << 20
    programs: int | None = None

    def __post_init__(self):
        # The values of a block must arrive before those of the previous block are released.
        if self.block <= 0 or self.block % 64 or self.stages < 2:
            raise ValueError(f"expected a block of 64, 128, ... and 2 stages or more, got {self}")
        if self.programs is not None and self.programs <= 0:
            raise ValueError(f"programs: expected 1 or more, got {self.programs}")


def heads_together(heads: int, bytes_a_head: int, budget: int) -> int:
    """Returns how many heads run concurrently.

    This is the largest divisor of ``heads`` whose keys and values fit in ``budget`` bytes, or 1.
    """
    fit = max(1, budget // bytes_a_head)
    return max(n for n in range(1, heads + 1) if heads % n == 0 and n <= fit)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static parameters of one call. Letters are those of the arguments' shapes."""

    B: int
    T: int
    S: int
    H: int
    K: int
    V: int
    scale: float
    config: Config
    interpreted: bool

    @property
    def to_log2(self) -> float:
        """Factor from scores to exponents of 2."""
        return self.scale * LOG2E

    @property
    def half(self) -> int:
        """Keys in half a block."""
        return self.config.block // 2

    @property
    def q_tiles(self) -> int:
        """Tiles of a head of a sequence."""
        return pl.cdiv(self.T, TILE)

    @property
    def tiles(self) -> int:
        """Tiles of the call."""
        return self.B * self.H * self.q_tiles

    @property
    def programs(self) -> int:
        """Programs in the grid."""
        return min(self.config.programs or multiprocessors(), self.tiles)

    @property
    def tile_barriers(self) -> int:
        """Index of the barriers of the next tile, after those of keys and values."""
        return 2 * self.config.stages

    @property
    def concurrent_heads(self) -> int:
        """Heads whose tiles alternate."""
        bytes_a_head = self.S * (self.K + self.V) * 2
        return heads_together(self.B * self.H, bytes_a_head, self.config.l2_bytes)

    def position_of(self, index: Any) -> tuple[Any, Any, Any]:
        """Returns the sequence b, head h and first query t0 of a tile."""
        section, index = (
            lax.div(index, self.concurrent_heads * self.q_tiles),
            lax.rem(index, self.concurrent_heads * self.q_tiles),
        )
        sequence_head = section * self.concurrent_heads + lax.rem(index, self.concurrent_heads)
        b, h = lax.div(sequence_head, self.H), lax.rem(sequence_head, self.H)
        return b, h, (self.q_tiles - 1 - lax.div(index, self.concurrent_heads)) * TILE

    def in_ring(self, i: Any) -> Any:
        """Returns ``i % stages`` for i >= 0, without instructions for the sign."""
        stages = self.config.stages
        return i & (stages - 1) if stages & (stages - 1) == 0 else lax.rem(i, stages)

    def blocks_of(self, start: Any, length: Any) -> Any:
        """Returns how many key blocks the tile's last query sees, at least 1."""
        block = self.config.block
        visible = jnp.clip(jnp.minimum(length, start + TILE), 0, self.S)
        return jnp.maximum(lax.div(visible + block - 1, block), 1)
