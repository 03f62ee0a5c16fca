"""Which rows of which group each row tile of a grouped matmul takes."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int, Int32


def tile_schedule(group_sizes: Int[Array, " G"], M: int, rows: int) -> Int32[Array, "4 row_tiles"]:
    """Cuts every group into tiles of at most ``rows`` rows; no tile holds rows of two groups.

    Written as sums under masks over [G, G] and [row_tiles, G], which XLA fuses into a few small
    kernels, where scans and searches would be a dozen.

    Returns:
      For each row tile its group, its first row and its number of rows; past the last tile, some
      of the last group's. The fourth row repeats the number of tiles, which depends on the sizes:
      ``row_tiles`` is the most there can be.
    """
    (G,) = group_sizes.shape
    sizes = group_sizes.astype(jnp.int32)
    tiles = -(-sizes // rows)
    not_after = jnp.arange(G)[None, :] <= jnp.arange(G)[:, None]
    ends = jnp.sum(jnp.where(not_after, sizes, 0), 1)
    tile_ends = jnp.sum(jnp.where(not_after, tiles, 0), 1)
    tile = jnp.arange(M // rows + min(G, M), dtype=jnp.int32)
    group = jnp.sum((tile_ends <= tile[:, None]).astype(jnp.int32), 1)
    group = jnp.minimum(group, G - 1)
    end = ends[group]
    first = end - sizes[group] + (tile - tile_ends[group] + tiles[group]) * rows
    count = jnp.full_like(tile, tile_ends[-1])
    return jnp.stack([group, first, jnp.minimum(rows, end - first), count])
