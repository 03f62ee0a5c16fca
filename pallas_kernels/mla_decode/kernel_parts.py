"""Constants and helpers that mla_decode's Hopper kernels share: tile shape, mask, results."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.tiles import WGMMA
from pallas_kernels.mla_decode.float8_cache import LATENT
from pallas_kernels.mla_decode.schedule import BLOCK

TILE = 64  # query rows of a program: the M of one wgmma instruction
SLOTS = 2  # key blocks in shared memory
# The running maximum is raised only when a score exceeds it by more than SLACK. Until then P may
# reach 2^8, and the sums need no rescaling.
SLACK = 8.0


def masked_scores(
    s: jax.Array,
    length: jax.Array,
    block: jax.Array,
    *,
    queries: int,
    heads: int,
    max_pages: int,
    first_query_row: Callable[[], jax.Array],
) -> jax.Array:
    """Returns ``s`` with -inf where a query row may not attend to a token.

    Args:
      s: scores of a tile against one key block, [TILE, BLOCK].
      length: cached tokens of the sequence.
      block: index of the key block in the sequence.
      first_query_row: returns the tile's first query row; row m is query m // heads.
    """
    column = plgpu.broadcasted_iota(jnp.int32, (TILE, BLOCK), 1, layout=WGMMA)
    visible = length - (queries - 1) - block * BLOCK
    end = max_pages * BLOCK - block * BLOCK
    if queries > 1:
        m = plgpu.broadcasted_iota(jnp.int32, (TILE, BLOCK), 0, layout=WGMMA)
        visible = visible + lax.div(m + first_query_row(), jnp.int32(heads))
    return jnp.where(column < jnp.minimum(visible, end), s, -jnp.inf)


def results(
    B: int, M: int, partitions: int, *, padded: int | None = None
) -> list[jax.ShapeDtypeStruct]:
    """Returns the kernels' output types: ``out``, ``lse``, partial ``out`` and partial ``lse``.

    The first two are written for sequences that are not split, the others for those that are.

    Args:
      padded: query rows of a partial result, by default M rounded up to whole tiles.
    """
    f32, padded = jnp.float32, padded or -(-M // TILE) * TILE
    return [
        jax.ShapeDtypeStruct((B, M, LATENT), jnp.bfloat16),
        jax.ShapeDtypeStruct((B, M), f32),
        jax.ShapeDtypeStruct((2 * partitions, padded, LATENT), f32),
        jax.ShapeDtypeStruct((2 * partitions, padded), f32),
    ]
