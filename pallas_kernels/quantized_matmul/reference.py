"""The specification of quantized_matmul: dequantise to x's dtype, then multiply."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int8, UInt8

from pallas_kernels.block_quant.reference import multiply_dequantized, scale_shape
from pallas_kernels.matmul import matmul

# Integers are stored as block_quant.reference.Values.
Matrix = Float[Array, "N K"] | Int8[Array, "N K"] | UInt8[Array, "N K2"]


def check_shapes(
    x: Float[Array, "*batch K"],
    weight: Matrix,
    scale: Float32[Array, "Nb Kb"],
    block_shape: tuple[int, int],
) -> None:
    """Raises ValueError unless K and the scale's shape agree."""
    N, K = weight.shape[0], weight.shape[1] * (2 if weight.dtype == jnp.uint8 else 1)
    if x.shape[-1] != K:
        raise ValueError(f"weight: expected {x.shape[-1]} columns as x has, got {K}")
    if scale.shape != (expected := scale_shape((N, K), block_shape)):
        raise ValueError(f"scale: expected shape {expected}, got {scale.shape}")


def quantized_matmul(
    x: Float[Array, "*batch K"],
    weight: Matrix,
    scale: Float32[Array, "Nb Kb"],
    *,
    block_shape: tuple[int, int],
    out_dtype: DTypeLike,
) -> Float[Array, "*batch N"]:
    """As :func:`pallas_kernels.quantized_matmul`."""

    def multiply(dense: Array, x: Array) -> Float[Array, "*batch N"]:
        return matmul(x, dense, jnp.dtype(out_dtype))

    return multiply_dequantized(multiply, weight, scale, block_shape, x.dtype, x)
