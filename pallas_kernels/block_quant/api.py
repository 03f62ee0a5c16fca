"""Quantisation to float8_e4m3fn, int8 and int4 with one scale a block."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int8, UInt8

from pallas_kernels.block_quant import reference
from pallas_kernels.dispatch import Implementation, dispatch

BACKENDS = {"reference": reference.block_quant}
INTEGER_BACKENDS = {"reference": reference.integer_quant}
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


def integer_quant(
    x: Float[Array, "*batch N K"],
    bits: int,
    group_size: int | None = None,
    *,
    implementation: Implementation = None,
) -> tuple[Int8[Array, "*batch N K"] | UInt8[Array, "*batch N K2"], Float32[Array, "*batch N Kb"]]:
    """``x = values * scale``, ``group_size`` columns of a row under one scale; None: the whole row.

    ``scale = amax / 127`` over a group for 8 bits and ``max(max / 7, -min / 8)`` for 4, so that a
    group reaches one end of -8 .. 7 and passes neither; 1 for a group of zeros. Values are
    ``x / scale`` rounded to the nearest integer, to even between two.

    Returns:
      values int8, shaped as x, or uint8 [..., N, K / 2]: int4 columns in pairs, two's complement,
      the even one in the low half; scale float32 [..., N, ceil(K / group_size)].

    Raises:
      ValueError: ``bits`` is neither 8 nor 4, or K is odd under int4.
    """
    return dispatch("integer_quant", INTEGER_BACKENDS, implementation, x, bits, group_size)


def block_dequant(
    values: reference.Values,
    scale: Float32[Array, "*batch Nb Kb"],
    block_shape: tuple[int, int],
    dtype: DTypeLike = jnp.float32,
    *,
    implementation: Implementation = None,
) -> Float[Array, "*batch N K"]:
    """``values * scale``, each scale over its block; exact in float32, then cast to ``dtype``.

    Args:
      values: float8 or int8 [..., N, K]; or uint8 [..., N, K / 2], which is int4 in pairs as
        :func:`integer_quant` packs them.

    Raises:
      ValueError: the scale's shape is not ceil(shape / block).
    """
    return dispatch(
        "block_dequant", DEQUANT_BACKENDS, implementation, values, scale, block_shape, dtype
    )
