"""Columns of scores that lie in registers: the first ones, and parts side by side."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from pallas_kernels.mosaic_ir import const, inline

_WGMMA = plgpu.Layout.WGMMA
_COLUMNS = 8
"""That four threads hold of a row before the first of them holds the next one."""


def first_columns(s: jax.Array, visible: jax.Array) -> jax.Array:
    """``s[i, j]`` where ``j < visible[i]``, elsewhere minus infinity.

    A comparison with columns costs an addition and a register each, so that threads compare what is
    left of ``visible`` after their own first column with constants instead.

    Args:
      s: float32 [64, n] in registers, n a multiple of 8.
      visible: int32 [64].
    """
    shape = (s.shape[0], _COLUMNS)
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_WGMMA)
    left = jax.lax.broadcast_in_dim(visible, shape, [0]) - column

    @inline(_WGMMA, _WGMMA, returns=plgpu.ShapeDtypeStruct(s.shape, jnp.float32, layout=_WGMMA))
    def masked(s: Any, left: Any) -> Any:
        infinity = mgpu.utils.c(float("-inf"), ir.F32Type.get())
        nothing = mgpu.FragmentedArray.splat(infinity, shape, left.layout, is_signed=None)
        new = s.copy()
        for c in range(0, s.shape[1], _COLUMNS):
            here = slice(None), slice(c, c + _COLUMNS)
            bound = mgpu.FragmentedArray.splat(const(c), shape, left.layout, is_signed=True)
            new[here] = (left > bound).select(s[here], nothing)
        return new

    return masked(s, left)


def beside(*parts: jax.Array) -> jax.Array:
    """Columns of parts in registers, one part after the other."""
    shape = parts[0].shape[0], sum(part.shape[1] for part in parts)
    result = plgpu.ShapeDtypeStruct(shape, parts[0].dtype, layout=_WGMMA)

    @inline(*(_WGMMA for _ in parts), returns=result)
    def joined(*parts: Any) -> Any:
        return mgpu.FragmentedArray(
            _registers=np.concatenate([part.registers for part in parts], axis=1),
            _layout=parts[0].layout,
            _is_signed=parts[0].is_signed,
        )

    return joined(*parts)
