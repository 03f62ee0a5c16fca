"""Shared memory of the kernels for tiles of 64 query rows: queries, two key blocks, row vectors."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.tiles import tiles_of
from pallas_kernels.mla_decode.float8_cache import LATENT, ROPE
from pallas_kernels.mla_decode.kernel_parts import SLOTS, TILE
from pallas_kernels.mla_decode.schedule import BLOCK

HALF = LATENT // 2
"""Latent columns per copy and barrier: a slot is released half by half."""


@dataclasses.dataclass(frozen=True, eq=False)
class TileMemory:
    """A program's buffers in shared memory, in the order of :meth:`scratch`."""

    q_latent: Any
    """[2, TILE, HALF]."""

    q_rope: Any
    """[1, TILE, ROPE]."""

    values: Any
    """Latents of the key blocks, [SLOTS, 2, BLOCK, HALF]."""

    rope: Any
    """Rope keys of the key blocks, later P: [SLOTS, BLOCK, ROPE]."""

    vectors: Any
    """Numbers per query row, float32 [9, TILE]. One array, because each is padded to 1 KiB."""

    @staticmethod
    def scratch() -> list[Any]:
        """Returns the scratch types of the buffers."""
        return [
            tiles_of(2, TILE, HALF),
            tiles_of(1, TILE, ROPE),
            tiles_of(SLOTS, 2, BLOCK, HALF),
            tiles_of(SLOTS, BLOCK, ROPE),
            plgpu.SMEM((9, TILE), jnp.float32),
        ]

    @property
    def maxima(self) -> Any:
        """Running maximum when the block in each slot was scored."""
        return self.vectors.at[0:2]

    @property
    def factors(self) -> Any:
        """Factors that rescale earlier results to these maxima."""
        return self.vectors.at[2:4]

    @property
    def sums(self) -> Any:
        """Sums of exponentials of the two warpgroups that compute scores."""
        return self.vectors.at[4:6]

    @property
    def sum_maxima(self) -> Any:
        """Maxima to which :attr:`sums` are relative."""
        return self.vectors.at[6:8]

    @property
    def lse(self) -> Any:
        """Log-sum-exps on their way to global memory."""
        return self.vectors.at[8]
