"""grouped_matmul for Hopper GPUs: which kernel, how it is set, and its gradients."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.block_quant.reference import FLOAT8
from pallas_kernels.grouped_matmul import blocked, reference
from pallas_kernels.grouped_matmul.mosaic_gpu_kernel import (
    EXTRA_SCALES,
    SCALE_BLOCK,
    Config,
    check_shapes,
    grouped_product,
)
from pallas_kernels.grouped_matmul.tile_schedule import tile_schedule
from pallas_kernels.hopper import require_hopper

# Widest first: the widest that N and K take is chosen.
MANY_ROWS_FLOAT8 = (
    Config(128, 192, 5, "rows", turns=True),
    Config(128, 128, 6, "rows", turns=True),
    Config(128, 64, 6, "rows", turns=True),
)
MANY_ROWS_BFLOAT16 = (
    Config(128, 256, 4, "rows"),
    Config(128, 128, 6, "rows"),
    Config(128, 64, 6, "rows"),
)
FEW_ROWS = (
    Config(64, 256, 5, "columns"),
    Config(64, 128, 8, "columns"),
    Config(128, 64, 6, "rows"),
)
_MANY = 128  # rows a group, on average


def grouped_matmul(
    lhs: Float[Array, "M K"],
    rhs: reference.Matrices,
    group_sizes: Int[Array, " G"],
    lhs_scale: Float32[Array, "M Kb"] | None = None,
    rhs_scale: Float32[Array, "G Nb Kb"] | None = None,
    *,
    block_shape: tuple[int, int] = (128, 128),
    config: Config | None = None,
    interpret: Any = None,
) -> Float[Array, "M N"]:
    """grouped_matmul of bfloat16 by bfloat16 or float8 by float8 on a Hopper GPU.

    Gradients are those of the other back-ends.

    Raises:
      NotImplementedError: no Hopper GPU, other dtypes, other blocks of scales than 128 x 128, N no
        multiple of 64, or K no multiple of 64 (bfloat16) or 128 (float8).
    """
    require_hopper(interpret)
    _check(lhs, rhs, rhs_scale, block_shape)
    (M, K), (G, N, _) = lhs.shape, rhs.shape
    config = config or choose_config(M, G, N, K, lhs_scale is not None)
    check_shapes(config, N, K, lhs_scale is not None)
    return _grouped_matmul(config, interpret, lhs, rhs, group_sizes, lhs_scale, rhs_scale)


def _check(
    lhs: jax.Array, rhs: jax.Array, rhs_scale: jax.Array | None, block_shape: tuple[int, int]
) -> None:
    if lhs.dtype == jnp.bfloat16 and rhs_scale is not None:
        raise NotImplementedError(
            f"takes bfloat16 rows by bfloat16 matrices, got {rhs.dtype} matrices with scales"
        )
    if lhs.dtype not in (jnp.bfloat16, FLOAT8) or rhs.dtype != lhs.dtype:
        raise NotImplementedError(
            f"takes bfloat16 by bfloat16 and {FLOAT8} by {FLOAT8}, got {lhs.dtype} by {rhs.dtype}"
        )
    if lhs.dtype == FLOAT8 and block_shape != (SCALE_BLOCK, SCALE_BLOCK):
        raise NotImplementedError(f"takes scales of blocks of 128 x 128, got {block_shape}")
    if 0 in (lhs.size, rhs.size):
        raise NotImplementedError(f"takes no empty arrays, got {lhs.shape} by {rhs.shape}")


def choose_config(M: int, G: int, N: int, K: int, float8: bool) -> Config:
    """What was measured best on an H200 for that many rows a group, of what takes N and K."""
    many = MANY_ROWS_FLOAT8 if float8 else MANY_ROWS_BFLOAT16
    candidates = FEW_ROWS if M < _MANY * G else many
    refusals = []
    for config in candidates:
        try:
            check_shapes(config, N, K, float8)
        except NotImplementedError as refusal:
            refusals.append(str(refusal))
        else:
            return config
    raise NotImplementedError(refusals[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _grouped_matmul(
    config: Config,
    interpret: Any,
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    lhs_scale: jax.Array | None,
    rhs_scale: jax.Array | None,
) -> jax.Array:
    M = lhs.shape[0]
    if lhs_scale is not None:
        padded = max(M + -M % 4, config.rows + EXTRA_SCALES)
        lhs_scale = jnp.pad(lhs_scale, ((0, padded - M), (0, 0))).T
    tiles = tile_schedule(group_sizes, M, config.rows)
    return grouped_product(
        lhs, rhs, tiles, lhs_scale, rhs_scale, config=config, interpret=interpret
    )


def _forward(config: Config, interpret: Any, *args: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    return _grouped_matmul(config, interpret, *args), args


def _backward(
    config: Config, interpret: Any, args: tuple[Any, ...], cotangent: jax.Array
) -> tuple[Any, ...]:
    del config, interpret
    lhs, rhs, group_sizes, *scales = args

    def product(lhs: Any, rhs: Any, *scales: Any) -> jax.Array:
        try:
            return blocked.grouped_matmul(lhs, rhs, group_sizes, *scales)
        except NotImplementedError:
            return reference.grouped_matmul(lhs, rhs, group_sizes, *scales)

    _, pull = jax.vjp(product, lhs, rhs, *scales)
    of_lhs, of_rhs, *of_scales = pull(cotangent)
    return of_lhs, of_rhs, None, *of_scales


_grouped_matmul.defvjp(_forward, _backward)
