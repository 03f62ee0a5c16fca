"""The specification of grouped_matmul in plain jax.numpy: dequantise, then multiply."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int8, UInt8

from pallas_kernels.block_quant.reference import (
    FLOAT8,
    block_dequant,
    multiply_dequantized,
    scale_shape,
)

# One matrix per group. Integers are stored as block_quant.reference.Values.
Matrices = Float[Array, "G N K"] | Int8[Array, "G N K"] | UInt8[Array, "G N K2"]


def check_scales(
    lhs: Float[Array, "M K"],
    rhs: Matrices,
    lhs_scale: Float32[Array, "M Kb"] | None,
    rhs_scale: Float32[Array, "G Nb Kb"] | None,
    block_shape: tuple[int, int],
) -> None:
    """Raises ValueError unless K agrees, and each operand has a scale exactly if it needs one."""
    K = rhs.shape[-1] * (2 if rhs.dtype == jnp.uint8 else 1)
    if lhs.shape[-1] != K:
        raise ValueError(f"rhs: expected {lhs.shape[-1]} columns as lhs has, got {K}")
    integers = jnp.dtype(jnp.int8), jnp.dtype(jnp.uint8)
    for name, x, scale, block, described, dtypes in (
        ("lhs", lhs, lhs_scale, (1, block_shape[1]), "float8", (FLOAT8,)),
        ("rhs", rhs, rhs_scale, block_shape, "float8 or integer", (FLOAT8, *integers)),
    ):
        if (x.dtype in dtypes) != (scale is not None):
            given = "no scale" if scale is None else f"a scale {scale.shape}"
            raise ValueError(
                f"{name}: {described} needs a scale and other dtypes take none, got {x.dtype} with"
                f" {given}"
            )
        if scale is not None:
            expected = scale_shape((*x.shape[:-1], K), block)
            if scale.shape != expected:
                raise ValueError(f"{name}_scale: expected shape {expected}, got {scale.shape}")


def dense_rows(
    lhs: Float[Array, "M K"], lhs_scale: Float32[Array, "M Kb"] | None, block_shape: tuple[int, int]
) -> Float[Array, "M K"]:
    """Applies the scales of float8 rows. Returns float32: a scaled value has more bits than
    bfloat16."""
    if lhs_scale is None:
        return lhs
    return block_dequant(lhs, lhs_scale, (1, block_shape[1]))


def grouped_matmul(
    lhs: Float[Array, "M K"],
    rhs: Matrices,
    group_sizes: Int[Array, " G"],
    lhs_scale: Float32[Array, "M Kb"] | None = None,
    rhs_scale: Float32[Array, "G Nb Kb"] | None = None,
    *,
    block_shape: tuple[int, int] = (128, 128),
) -> Float[Array, "M N"]:
    """As :func:`pallas_kernels.grouped_matmul`."""
    dtype = jnp.bfloat16 if lhs.dtype == FLOAT8 else lhs.dtype
    lhs = dense_rows(lhs, lhs_scale, block_shape)
    M, G = lhs.shape[0], rhs.shape[0]
    if M <= G:
        # Read only the matrices that are needed, at most one per row. A decode step with one
        # sequence reads 8 of DeepSeek-V3's 256 experts this way.
        group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(M), side="right")
        group = jnp.minimum(group, G - 1)
        weights = rhs[group]
        if rhs_scale is not None:
            weights = block_dequant(weights, rhs_scale[group], block_shape)
        out = jnp.einsum(
            "mk,mnk->mn", lhs, weights.astype(lhs.dtype), preferred_element_type=jnp.float32
        )
        return out.astype(dtype)

    def multiply(rhs: jax.Array, lhs: jax.Array, sizes: jax.Array) -> jax.Array:
        return _ragged_dot(jnp.dtype(dtype), lhs, rhs.astype(lhs.dtype), sizes)

    sizes = group_sizes.astype(jnp.int32)
    if rhs_scale is None:
        return multiply(rhs, lhs, sizes)
    return multiply_dequantized(multiply, rhs, rhs_scale, block_shape, lhs.dtype, lhs, sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ragged_dot(
    dtype: jnp.dtype, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array
) -> jax.Array:
    """Returns the matmul, rounded to ``dtype``. Its gradients multiply a cotangent that is rounded
    to the dtype of ``lhs``, as those of :func:`pallas_kernels.matmul.matmul`."""
    return _ragged(lhs, rhs, group_sizes, ((1,), (2,)), [0]).astype(dtype)


def _ragged(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    contracted: tuple[tuple[int, ...], tuple[int, ...]],
    group_dimensions: list[int],
) -> jax.Array:
    """Returns a ragged dot whose first dimension of ``lhs`` has the groups, in float32."""
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(contracted, ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=group_dimensions,
    )
    f32 = jnp.float32
    return jax.lax.ragged_dot_general(lhs, rhs, group_sizes, numbers, preferred_element_type=f32)


def _forward(
    dtype: jnp.dtype, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array
) -> tuple[jax.Array, Any]:
    return _ragged_dot(dtype, lhs, rhs, group_sizes), (lhs, rhs, group_sizes)


def _backward(dtype: jnp.dtype, saved: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    lhs, rhs, group_sizes = saved
    cotangent = cotangent.astype(lhs.dtype)
    d_lhs = _ragged(cotangent, rhs, group_sizes, ((1,), (1,)), [0])
    d_rhs = _ragged(cotangent, lhs, group_sizes, ((0,), (0,)), [])
    return d_lhs.astype(lhs.dtype), d_rhs.astype(rhs.dtype), None


_ragged_dot.defvjp(_forward, _backward)
