"""Which tiles of the result a block computes, one after another.

Blocks take tiles in turn. Row tiles are visited by panels: all of a panel's for a column tile, then
for the next, so that the rows stay in the L2 cache while the matrices pass.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul.plan import Plan
from pallas_kernels.grouped_matmul.row_tiles import RowTiles


class Tile(NamedTuple):
    group: jax.Array
    row: jax.Array
    rows: jax.Array
    column: jax.Array
    """Where the tile starts; it may reach back over columns of the tile before it."""
    new: jax.Array
    """The first column that no other tile writes."""


@dataclasses.dataclass(frozen=True)
class BlockTiles:
    plan: Plan
    row_tiles: RowTiles
    total: jax.Array
    """Row tiles of all groups."""
    block: jax.Array
    """This block's number."""

    def count(self) -> jax.Array:
        """Of this block's tiles."""
        blocks, total = jnp.int32(self.plan.blocks), self.total * self.plan.column_tiles
        return lax.div(total - self.block + (blocks - 1), blocks)

    def locate(self, i: jax.Array | int) -> Tile:
        """This block's i-th tile; past the last, one without rows."""
        plan = self.plan
        column_tiles = jnp.int32(plan.column_tiles)
        tile = self.block + i * jnp.int32(plan.blocks)
        if plan.panel == 1:
            row_tile = lax.div(tile, column_tiles)
            column_tile = tile - row_tile * column_tiles
        else:
            panel = jnp.int32(plan.panel)
            in_panel = panel * column_tiles
            first = lax.div(tile, in_panel) * panel
            tile = lax.rem(tile, in_panel)
            width = jnp.maximum(jnp.minimum(panel, self.total - first), 1)
            column_tile = lax.div(tile, width)
            row_tile = first + tile - column_tile * width
        new = column_tile * jnp.int32(plan.columns)
        return Tile(*self.row_tiles.locate(row_tile), jnp.minimum(new, plan.N - plan.columns), new)
