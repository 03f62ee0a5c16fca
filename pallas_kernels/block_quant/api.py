"""Quantisation to float8_e4m3fn with one scale a block."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from pallas_kernels.block_quant import reference
from pallas_kernels.dispatch import Implementation, dispatch

BACKENDS = {"reference": reference.block_quant}
DEQUANT_BACKENDS = {"reference": reference.block_dequant}


def block_quant(
    x: Float[Array, "*batch N K"],
    block_shape: tuple[int, int] = (1, 128),
    *,
    scale_fmt: Literal["float32", "ue8m0"] = "float32",
    implementation: Implementation = None,
) -> tuple[Float[Array, "*batch N K"], Float32[Array, "*batch Nb Kb"]]:
    """``x = values * scale``, block by block, the last block of an edge may be partial.

    ``scale = max(amax, 1e-4) / 448`` over a block, rounded up to a power of two under ``ue8m0``;
    values are ``x / scale`` rounded to float8_e4m3fn (kernel.py, act_quant). Activations use blocks
    of (1, 128), weights (128, 128).

    Returns:
      values float8_e4m3fn, shaped as x; scale float32 [..., ceil(N / block), ceil(K / block)].
    """
    return dispatch("block_quant", BACKENDS, implementation, x, block_shape, scale_fmt=scale_fmt)


def block_dequant(
    values: Float[Array, "*batch N K"],
    scale: Float32[Array, "*batch Nb Kb"],
    block_shape: tuple[int, int],
    dtype: DTypeLike = jnp.float32,
    *,
    implementation: Implementation = None,
) -> Float[Array, "*batch N K"]:
    """``values * scale``, each scale over its block; exact in float32, then cast to ``dtype``.

    Raises:
      ValueError: the scale's shape is not ceil(shape / block).
    """
    return dispatch(
        "block_dequant", DEQUANT_BACKENDS, implementation, values, scale, block_shape, dtype
    )
