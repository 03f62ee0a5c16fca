"""Masking and concatenation of columns of a register tile."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from pallas_kernels.hopper.ir import const, inline
from pallas_kernels.hopper.tiles import WGMMA

_COLUMNS = 8
"""Consecutive columns of a row that four threads hold, two each, before the pattern repeats."""


def mask_columns(s: jax.Array, visible: jax.Array) -> jax.Array:
    """Returns ``s[i, j]`` where ``j < visible[i]``, and minus infinity elsewhere.

    Comparing with a column index would cost an addition and a register per column. Instead each
    thread subtracts its own first column from ``visible`` and compares the result with constants.

    Args:
      s: float32 [64, n] in registers, n a multiple of 8.
      visible: int32 [64].
    """
    shape = (s.shape[0], _COLUMNS)
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA)
    remaining = jax.lax.broadcast_in_dim(visible, shape, [0]) - column

    @inline(WGMMA, WGMMA, returns=plgpu.ShapeDtypeStruct(s.shape, jnp.float32, layout=WGMMA))
    def masked(s: Any, remaining: Any) -> Any:
        infinity = mgpu.utils.c(float("-inf"), ir.F32Type.get())
        minus_infinity = mgpu.FragmentedArray.splat(
            infinity, shape, remaining.layout, is_signed=None
        )
        new = s.copy()
        for c in range(0, s.shape[1], _COLUMNS):
            window = slice(None), slice(c, c + _COLUMNS)
            bound = mgpu.FragmentedArray.splat(const(c), shape, remaining.layout, is_signed=True)
            new[window] = (remaining > bound).select(s[window], minus_infinity)
        return new

    return masked(s, remaining)


def concatenate_columns(*tiles: jax.Array) -> jax.Array:
    """Concatenates register tiles along their columns."""
    shape = tiles[0].shape[0], sum(tile.shape[1] for tile in tiles)
    result = plgpu.ShapeDtypeStruct(shape, tiles[0].dtype, layout=WGMMA)

    @inline(*(WGMMA for _ in tiles), returns=result)
    def concatenate(*tiles: Any) -> Any:
        return mgpu.FragmentedArray(
            _registers=np.concatenate([tile.registers for tile in tiles], axis=1),
            _layout=tiles[0].layout,
            _is_signed=tiles[0].is_signed,
        )

    return concatenate(*tiles)
