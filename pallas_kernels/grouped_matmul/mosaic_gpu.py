"""grouped_matmul for Hopper GPUs: chooses a kernel and its configuration, and defines gradients.

There are three kernels. ``dense`` multiplies bfloat16 by bfloat16 and float8 by float8.
``few_tokens`` multiplies bfloat16 rows by int8, int4 or float8 matrices, with at most 64 rows per
group on average; for more rows, XLA dequantizes the matrices to bfloat16 and ``dense`` multiplies
by them. ``w4a8`` multiplies float8 rows by int4 matrices. ``gradients`` has the backward pass of
bfloat16 by bfloat16.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.block_quant.reference import FLOAT8, multiply_dequantized
from pallas_kernels.grouped_matmul import dense, few_tokens, gradients, reference, w4a8
from pallas_kernels.grouped_matmul.dense_plan import (
    SCALE_BLOCK,
    Config,
    check_shapes,
    choose_config,
)
from pallas_kernels.hopper import require_hopper

_MAX_FEW_TOKENS = 64  # rows per group, on average, that the few-token kernel accepts


def grouped_matmul(
    lhs: Float[Array, "M K"],
    rhs: reference.Matrices,
    group_sizes: Int[Array, " G"],
    lhs_scale: Float32[Array, "M Kb"] | None = None,
    rhs_scale: Float32[Array, "G Nb Kb"] | None = None,
    *,
    block_shape: tuple[int, int] = (128, 128),
    config: Config | few_tokens.Config | None = None,
    interpret: Any = None,
) -> Float[Array, "M N"]:
    """grouped_matmul on a Hopper GPU: bfloat16 by bfloat16, float8 by float8, float8 rows by int4
    matrices, and bfloat16 rows by int8, int4 or float8 matrices, which are dequantized first if
    there are more than 64 rows per group on average. Gradients of bfloat16 by bfloat16 are kernels
    too, also after dequantizing; others are the reference's. ``config`` is of ``dense`` or
    ``few_tokens``.

    Raises NotImplementedError for no Hopper GPU, other dtypes, and N, K and scale blocks that
    :func:`dense_plan.check_shapes`, :meth:`few_tokens_plan.Weights.of` or :func:`w4a8.check_shapes`
    refuses."""
    require_hopper(interpret)
    if 0 in (lhs.size, rhs.size):
        raise NotImplementedError(f"takes no empty arrays, got {lhs.shape} by {rhs.shape}")
    (M, K), (G, N, _) = lhs.shape, rhs.shape
    if lhs.dtype == jnp.bfloat16 and rhs_scale is not None and has_many_rows(M, G):
        config = config or choose_config(M, G, N, K, False)
        assert isinstance(config, Config)
        check_shapes(config, N, K, False)
        settings = config, interpret, block_shape

        def multiply(rhs: jax.Array, lhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
            return _grouped_matmul(settings, lhs, rhs, group_sizes, None, None)

        quantized = rhs, rhs_scale, block_shape
        return multiply_dequantized(multiply, *quantized, jnp.bfloat16, lhs, group_sizes)
    is_quantized = lhs.dtype == jnp.bfloat16 and rhs_scale is not None
    if rhs.dtype == jnp.uint8 and not is_quantized:
        w4a8.check_shapes(lhs, rhs, block_shape)
    elif not is_quantized:  # few_tokens checks its arguments itself
        check_dtypes(lhs, rhs, block_shape)
        config = config or choose_config(M, G, N, K, lhs_scale is not None)
        assert isinstance(config, Config)
        check_shapes(config, N, K, lhs_scale is not None)
    settings = config, interpret, block_shape
    return _grouped_matmul(settings, lhs, rhs, group_sizes, lhs_scale, rhs_scale)


def has_many_rows(M: int, G: int) -> bool:
    """Returns whether M bfloat16 rows are too many for the kernel that reads quantized matrices as
    stored."""
    return M > _MAX_FEW_TOKENS * G


def check_few_tokens(M: int, G: int, dtype: Any) -> None:
    """Raises NotImplementedError if M rows are too many for the few-token kernel."""
    if has_many_rows(M, G):
        raise NotImplementedError(
            f"takes {_MAX_FEW_TOKENS} rows a group at most, on average, by {dtype} matrices, got"
            f" {M} rows for {G} groups"
        )


def check_dtypes(lhs: jax.Array, matrix: jax.Array, block_shape: tuple[int, int]) -> None:
    """Raises NotImplementedError unless the dtypes are bfloat16 by bfloat16 or float8 by float8."""
    if lhs.dtype not in (jnp.bfloat16, FLOAT8) or matrix.dtype != lhs.dtype:
        raise NotImplementedError(
            f"takes bfloat16 by bfloat16 and {FLOAT8} by {FLOAT8}, got {lhs.dtype} by"
            f" {matrix.dtype}"
        )
    if lhs.dtype == FLOAT8 and block_shape != (SCALE_BLOCK, SCALE_BLOCK):
        raise NotImplementedError(f"takes scales of blocks of 128 x 128, got {block_shape}")


# (Config of a kernel, interpreter parameters, block_shape)
_Settings = tuple[Any, Any, tuple[int, int]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_matmul(settings: _Settings, *args: Any) -> jax.Array:
    lhs, rhs, group_sizes, lhs_scale, rhs_scale = args
    config, interpret, block_shape = settings
    scales = () if rhs_scale is None else (rhs_scale,)
    options: Any = {"config": config, "interpret": interpret}
    if lhs_scale is None and scales:
        return few_tokens.grouped_matmuls(
            lhs, (rhs,), group_sizes, scales, block_shape=block_shape, **options
        )
    if rhs.dtype == jnp.uint8:
        return w4a8.matmul(*args, interpret=interpret)
    return dense.matmul(lhs, (rhs,), group_sizes, lhs_scale, scales, **options)


def _forward(settings: _Settings, *args: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    return _grouped_matmul(settings, *args), args


def _backward(settings: _Settings, args: tuple[Any, ...], cotangent: jax.Array) -> tuple[Any, ...]:
    lhs, rhs, group_sizes, *_ = args
    _, interpret, block_shape = settings
    if rhs.dtype != jnp.bfloat16:
        specification = functools.partial(reference.grouped_matmul, block_shape=block_shape)
        return jax.vjp(specification, *args)[1](cotangent)
    # any shape that the forward kernel takes
    d_lhs = gradients.rows_gradient((cotangent,), (rhs,), group_sizes, interpret=interpret)
    d_rhs = gradients.matrices_gradient(cotangent, lhs, group_sizes, interpret=interpret)
    return d_lhs, d_rhs, None, None, None


_grouped_matmul.defvjp(_forward, _backward)
