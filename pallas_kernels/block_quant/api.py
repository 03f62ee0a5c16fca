"""Public functions that quantize to float8_e4m3fn, int8 and int4 with block scales, and back."""

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
    """Quantizes to float8_e4m3fn so that ``x`` is about ``values * scale``, block by block.

    ``scale = max(amax, 1e-4) / 448``, where amax is the largest absolute value of a block. With
    ``ue8m0`` it is rounded up to a power of two. The values are ``x / scale`` rounded to
    float8_e4m3fn. This is act_quant in DeepSeek-V3's kernel.py. Activations have blocks of
    (1, 128), weights of (128, 128). The last blocks along N and K may be partial.

    Returns:
      values float8_e4m3fn of x's shape, and scale float32 [..., ceil(N / block), ceil(K / block)].
    """
    return dispatch("block_quant", BACKENDS, implementation, x, block_shape, scale_fmt=scale_fmt)


def integer_quant(
    x: Float[Array, "*batch N K"],
    bits: int,
    group_size: int | None = None,
    *,
    implementation: Implementation = None,
) -> tuple[Int8[Array, "*batch N K"] | UInt8[Array, "*batch N K2"], Float32[Array, "*batch N Kb"]]:
    """Quantizes to int8 or int4 so that ``x`` is about ``values * scale``.

    ``group_size`` columns of a row share a scale, or the whole row if it is None. For 8 bits
    ``scale = amax / 127`` over a group. For 4 bits it is ``max(max / 7, -min / 8)``, so that a
    group reaches one end of -8 .. 7 and exceeds neither. A group of zeros has scale 1. The values
    are ``x / scale`` rounded to the nearest integer, ties to even.

    Returns:
      values int8 of x's shape, or uint8 [..., N, K / 2] with two int4 columns per byte in two's
      complement, the even one in the low half; and scale float32 [..., N, ceil(K / group_size)].

    Raises:
      ValueError: ``bits`` is neither 8 nor 4, or K is odd for int4.
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
    """Returns ``values * scale``, where each scale multiplies its block.

    The product is exact in float32, and then cast to ``dtype``.

    Args:
      values: float8 or int8 [..., N, K], or int4 as uint8 [..., N, K / 2], packed as by
        :func:`integer_quant`.

    Raises:
      ValueError: the scale's shape is not ceil(shape / block).
    """
    return dispatch(
        "block_dequant", DEQUANT_BACKENDS, implementation, values, scale, block_shape, dtype
    )
