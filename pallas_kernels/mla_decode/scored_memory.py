"""Shared memory and barriers of mla_decode's scored kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.barriers import Barriers
from pallas_kernels.hopper.tiles import tiles_of
from pallas_kernels.hopper.warpgroup import WARPS
from pallas_kernels.mla_decode.float8_cache import LATENT, TOKEN_BYTES
from pallas_kernels.mla_decode.schedule import BLOCK
from pallas_kernels.mla_decode.scored_plan import Plan
from pallas_kernels.mla_decode.scorer_registers import WARP_TOKENS

SCORERS = 2
WARP_PIECES = WARPS
"""Pieces of a page, one per warp of a scorer."""


@dataclasses.dataclass(frozen=True, eq=False)
class Memory:
    """A program's buffers, in the order of :meth:`scratch`. Slot s is that of scorer s."""

    ring: Any
    """Pieces of pages as they are cached, uint8 [stages, 16, 656]."""

    values: Any
    """Unpacked latents, bfloat16 [2, 8, 64, 64]: slot, 64 columns, tokens."""

    p: Any
    """P, bfloat16 [2, N, 64]."""

    vectors: Any
    """Numbers per query row, float32 [6, N]."""

    scratch: Any
    """Each scorer's scratch for reductions over its threads, float32 [2, 4 N]."""

    raised: Any
    """Whether the maximum was raised at the block in each slot, int32 [2]."""

    @staticmethod
    def types(plan: Plan) -> list[Any]:
        """Returns the scratch types of the buffers."""
        return [
            plgpu.SMEM((plan.stages, WARP_TOKENS, TOKEN_BYTES), jnp.uint8),
            tiles_of(SCORERS, LATENT // BLOCK, BLOCK, BLOCK),
            tiles_of(SCORERS, plan.rows, BLOCK),
            plgpu.SMEM((3 * SCORERS, plan.rows), jnp.float32),
            plgpu.SMEM((SCORERS, WARPS * plan.rows), jnp.float32),
            plgpu.SMEM((SCORERS,), jnp.int32),
        ]

    @property
    def maxima(self) -> Any:
        """Running maximum when the block in each slot was scored."""
        return self.vectors.at[0:2]

    @property
    def sums(self) -> Any:
        """Sums of exponentials of each scorer."""
        return self.vectors.at[2:4]

    @property
    def sum_maxima(self) -> Any:
        """Maxima to which :attr:`sums` are relative."""
        return self.vectors.at[4:6]


@dataclasses.dataclass(frozen=True, eq=False)
class Signals:
    """The barriers of the ring, of the slots and of the sums.

    Block n of a partition is use n // 2 of its slot and of the slot's barriers.
    """

    stages: int

    blocks: Barriers
    """Barriers at the indices below."""

    sums_ready: Barriers
    """One barrier. Both scorers have written the sums of the partition's i-th sequence."""

    @staticmethod
    def types(plan: Plan) -> list[Any]:
        """Returns the scratch types of the two arrays of barriers."""
        count = 2 * plan.stages + 3 * SCORERS + 1
        return [
            Barriers.scratch(count, 1, plan.interpret),
            Barriers.scratch(1, SCORERS, plan.interpret),
        ]

    @classmethod
    def of(cls, plan: Plan, scratch: Sequence[Any]) -> Signals:
        return cls(plan.stages, *(Barriers(each, plan.interpret) for each in scratch))

    def initialise(self) -> None:
        """Initialises all barriers. Every thread calls it."""
        # A piece is copied and released by one warp each.
        self.blocks.initialise([1] * (2 * self.stages) + [WARPS] * (3 * SCORERS + 1))
        self.sums_ready.initialise([SCORERS * WARPS])

    def piece_full(self, stage: Any) -> Any:
        return stage

    def piece_free(self, stage: Any) -> Any:
        return self.stages + stage

    def max_ready(self, slot: Any) -> Any:
        return 2 * self.stages + slot

    def p_ready(self, slot: Any) -> Any:
        """Index of the barrier at which P and the values of a slot are complete."""
        return 2 * self.stages + SCORERS + slot

    def free(self, slot: Any) -> Any:
        """Index of the barrier at which P and the values of a slot have been read."""
        return 2 * self.stages + 2 * SCORERS + slot

    @property
    def sums_free(self) -> Any:
        """Index of the barrier at which a sequence's sums have been read."""
        return 2 * self.stages + 3 * SCORERS
