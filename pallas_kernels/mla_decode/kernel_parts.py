"""What mla_decode's two kernels have in common: a tile's shape, its mask, its results."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla_decode.float8_cache import LATENT
from pallas_kernels.mla_decode.schedule import BLOCK

TILE = 64  # query rows of a program: the M of one wgmma
SLOTS = 2  # blocks in shared memory
LOG2E = math.log2(math.e)
SLACK = 8.0  # a maximum stays until it is exceeded by more: P then reaches 2^8, and sums stand
NO_SCORE = -1e30  # a maximum of nothing: finite, for -inf - -inf would be NaN

ACC: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
WGMMA = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)  # one number for each row of a WGMMA tile


def row_vector(value: float) -> jax.Array:
    return plgpu.layout_cast(jnp.full((TILE,), value, jnp.float32), ROW)


def masked_scores(
    s: jax.Array,
    length: jax.Array,
    block: jax.Array,
    *,
    queries: int,
    heads: int,
    max_pages: int,
    first_row: Callable[[], jax.Array],
) -> jax.Array:
    """``s`` of a tile by the tokens of a row's ``block``, -inf where a query does not see a token.

    Args:
      length: cached tokens of the row.
      first_row: the tile's first query row; row m is query m // heads.
    """
    column = plgpu.broadcasted_iota(jnp.int32, (TILE, BLOCK), 1, layout=WGMMA)
    seen = length - (queries - 1) - block * BLOCK
    end = max_pages * BLOCK - block * BLOCK
    if queries > 1:
        m = plgpu.broadcasted_iota(jnp.int32, (TILE, BLOCK), 0, layout=WGMMA)
        seen = seen + lax.div(m + first_row(), jnp.int32(heads))
    return jnp.where(column < jnp.minimum(seen, end), s, -jnp.inf)


def tiles_of(*shape: int) -> Any:
    """bfloat16 in shared memory as wgmma takes it."""
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


def results(B: int, M: int, parts: int, *, padded: int | None = None) -> list[jax.ShapeDtypeStruct]:
    """``out`` and ``lse`` of rows that one part takes whole; both of the pieces of all others,
    which have so many query rows: if not said, whole tiles."""
    f32, padded = jnp.float32, padded or -(-M // TILE) * TILE
    return [
        jax.ShapeDtypeStruct((B, M, LATENT), jnp.bfloat16),
        jax.ShapeDtypeStruct((B, M), f32),
        jax.ShapeDtypeStruct((2 * parts, padded, LATENT), f32),
        jax.ShapeDtypeStruct((2 * parts, padded), f32),
    ]
