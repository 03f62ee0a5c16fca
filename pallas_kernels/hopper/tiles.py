"""Layouts in registers, and buffers in shared memory, of the operands of tensor core instructions.

wgmma reads tiles of eight rows by 128 bytes, swizzled. TMA copies tiles too, but only at multiples
of eight rows. A tile that is one swizzle atom wide has the same bytes as an untiled array of such
rows, so :func:`two_views` gives a buffer both views.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64
"""The M of a wgmma instruction."""

ACC: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
WGMMA = plgpu.Layout.WGMMA
ROW = WGMMA.reduce(1)
"""Layout of a vector with one number per row of an accumulator."""
COLUMN = WGMMA.reduce(0)
"""Layout of a vector with one number per column of an accumulator."""

TILING = (8, 64)
TILED = (plgpu.TilingTransform(TILING), plgpu.SwizzleTransform(128))
"""Transforms of a buffer of bfloat16 tiles."""
TILES = plgpu.RefType(TILED)
"""Type of such a buffer in inlined code."""


def tiles_of(*shape: int) -> Any:
    """Returns a bfloat16 buffer in shared memory, tiled and swizzled as wgmma requires."""
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=TILED)


def two_views(shape: tuple[int, ...], dtype: Any, *, on_gpu: bool) -> Any:
    """Returns a buffer whose last axis is one swizzle atom wide, in a tiled and an untiled view.

    The interpreter would give each view its own memory, so there the buffer has only one.
    """
    width = shape[-1] * jnp.dtype(dtype).itemsize
    swizzle = plgpu.SwizzleTransform(width)
    tiling = plgpu.TilingTransform((8, shape[-1]))
    tiled = plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))
    if not on_gpu:
        return tiled
    return plgpu.RefUnion(tiled, plgpu.SMEM(shape, dtype, transforms=(swizzle,)))


def row_vector(value: float) -> jax.Array:
    """Returns a vector [ROWS] of ``value`` in the ROW layout."""
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), ROW)


def spread_rows(vector: jax.Array, columns: int) -> jax.Array:
    """Broadcasts a vector [rows] to [rows, columns]."""
    return lax.broadcast_in_dim(vector, (*vector.shape, columns), [0])


def spread_columns(vector: jax.Array, rows: int) -> jax.Array:
    """Broadcasts a vector [columns] to [rows, columns]."""
    return lax.broadcast_in_dim(vector, (rows, *vector.shape), [1])
