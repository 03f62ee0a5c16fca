"""Order in which the TPU kernel multiplies tiles of rows with the groups' matrices.

The rows are divided into tiles of equal height, so a group's rows may begin or end inside a tile. A
*visit* is a pair of a tile and a group that have rows in common. Visits are ordered by group, and
so also by tile: the visits of a group are consecutive, and so are those of a tile. Empty groups
have none.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, Int32


class Visits(NamedTuple):
    """All visits of a call. ``V = ceil(M / height) + min(G, M)`` is their largest number."""

    groups: Int32[Array, " V"]
    """Group of each visit. Entries past the last visit repeat the last one's group."""
    tiles: Int32[Array, " V"]
    """Tile of each visit."""
    ends: Int32[Array, " G+1"]
    """Group g has the rows from ``ends[g]`` to ``ends[g + 1]``."""
    total: Int32[Array, ""]
    """Number of visits, at least one. If no group has rows, the only visit has none."""


def visits_of(group_sizes: Int[Array, " G"], M: int, height: int) -> Visits:
    """Returns the visits of M rows in tiles of ``height``."""
    G = group_sizes.shape[0]
    most = -(-M // height) + min(G, M)
    ends = jnp.cumsum(group_sizes.astype(jnp.int32))
    starts = ends - group_sizes
    first, last = starts // height, (ends - 1) // height
    counts = jnp.where(group_sizes > 0, last - first + 1, 0)
    visit_ends = jnp.cumsum(counts)
    visit = jnp.arange(most, dtype=jnp.int32)
    # A sum of comparisons, because a binary search would be a loop of gathers.
    groups = jnp.sum(visit_ends <= jnp.minimum(visit, visit_ends[-1] - 1)[:, None], axis=1)
    groups = jnp.minimum(groups, G - 1).astype(jnp.int32)
    index_in_group = visit - (visit_ends - counts)[groups]
    tiles = jnp.clip(first[groups] + index_in_group, 0, -(-M // height) - 1).astype(jnp.int32)
    return Visits(
        groups, tiles, jnp.concatenate([starts[:1], ends]), jnp.maximum(visit_ends[-1], 1)
    )
