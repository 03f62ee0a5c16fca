"""In which order tiles of rows meet groups' matrices.

Rows lie in tiles of equal height, and a group's rows may begin or end inside a tile. A visit is a
tile and a group that share rows. Visits are ordered by group, and so by tile: a group's visits
follow each other, and so do a tile's. Empty groups have none.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, Int32


class Visits(NamedTuple):
    """Where ``V = ceil(M / height) + min(G, M)`` is as many as there can be."""

    groups: Int32[Array, " V"]
    """The group of each visit; the last one's, past them all."""
    tiles: Int32[Array, " V"]
    """The tile of each visit."""
    ends: Int32[Array, " G+1"]
    """Group g has the rows from ``ends[g]`` to ``ends[g + 1]``."""
    total: Int32[Array, ""]
    """How many there are: one at least, which has no rows if no group has any."""


def visits_of(group_sizes: Int[Array, " G"], M: int, height: int) -> Visits:
    """Of M rows in tiles of ``height``."""
    G = group_sizes.shape[0]
    most = -(-M // height) + min(G, M)
    ends = jnp.cumsum(group_sizes.astype(jnp.int32))
    starts = ends - group_sizes
    first, last = starts // height, (ends - 1) // height
    counts = jnp.where(group_sizes > 0, last - first + 1, 0)
    visit_ends = jnp.cumsum(counts)
    visit = jnp.arange(most, dtype=jnp.int32)
    # A sum of comparisons: as a binary search it would be a loop of gathers.
    groups = jnp.sum(visit_ends <= jnp.minimum(visit, visit_ends[-1] - 1)[:, None], axis=1)
    groups = jnp.minimum(groups, G - 1).astype(jnp.int32)
    within = visit - (visit_ends - counts)[groups]
    tiles = jnp.clip(first[groups] + within, 0, -(-M // height) - 1).astype(jnp.int32)
    return Visits(
        groups, tiles, jnp.concatenate([starts[:1], ends]), jnp.maximum(visit_ends[-1], 1)
    )
