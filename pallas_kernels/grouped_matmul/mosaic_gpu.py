"""grouped_matmul for Hopper GPUs: which kernel, how it is set, and its gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.block_quant.reference import FLOAT8
from pallas_kernels.grouped_matmul import blocked, few_rows, few_rows_plan, reference
from pallas_kernels.grouped_matmul.mosaic_gpu_kernel import grouped_product
from pallas_kernels.grouped_matmul.plan import SCALE_BLOCK, Config, check_shapes
from pallas_kernels.grouped_matmul.waves import best_width
from pallas_kernels.hopper import require_hopper

# Widest first: the widest that N and K take is chosen.
MANY_ROWS_FLOAT8 = (
    Config(128, 192, 4, "rows", slots=3, copied_scales=True),
    Config(128, 128, 5, "rows", slots=2, copied_scales=True),
    Config(128, 64, 6, "rows", copied_scales=True),
)
MANY_ROWS_BFLOAT16 = (
    Config(128, 256, 4, "rows"),
    Config(128, 128, 6, "rows"),
    Config(128, 64, 6, "rows"),
)
FEW_ROWS = (
    Config(64, 256, 4, "columns", slots=2, panel=1, classes=(16, 32), early=True),
    Config(64, 128, 8, "columns", panel=1, classes=(16, 32), early=True),
    Config(128, 64, 6, "rows", panel=1, classes=(16, 32), early=True),
)
_MANY = 128  # rows a group, on average
_QUANTIZED_ROWS = 64  # a group, on average: few_rows is for no more


def grouped_matmul(
    lhs: Float[Array, "M K"],
    rhs: reference.Matrices,
    group_sizes: Int[Array, " G"],
    lhs_scale: Float32[Array, "M Kb"] | None = None,
    rhs_scale: Float32[Array, "G Nb Kb"] | None = None,
    *,
    block_shape: tuple[int, int] = (128, 128),
    config: Config | few_rows_plan.Config | None = None,
    interpret: Any = None,
) -> Float[Array, "M N"]:
    """grouped_matmul on a Hopper GPU: bfloat16 by bfloat16, float8 by float8, and few rows of
    bfloat16 by int8, int4 or float8.

    Gradients are those of the other back-ends.

    Raises:
      NotImplementedError: no Hopper GPU, other dtypes, or N no multiple of 64. Without quantized
        matrices: K no multiple of 64 (bfloat16) or 128 (float8), other blocks of scales than
        128 x 128. With them: more than 64 rows a group on average, and what
        :func:`few_rows.grouped_matmul` refuses.
    """
    require_hopper(interpret)
    if 0 in (lhs.size, rhs.size):
        raise NotImplementedError(f"takes no empty arrays, got {lhs.shape} by {rhs.shape}")
    (M, K), (G, N, _) = lhs.shape, rhs.shape
    if lhs.dtype == jnp.bfloat16 and rhs_scale is not None:
        check_few(M, G, rhs.dtype)
    else:
        check_dtypes(lhs, rhs, block_shape)
        config = config or choose_config(M, G, N, K, lhs_scale is not None)
        assert isinstance(config, Config)
        check_shapes(config, N, K, lhs_scale is not None)
    settings = config, interpret, block_shape
    return _grouped_matmul(settings, lhs, rhs, group_sizes, lhs_scale, rhs_scale)


def check_few(M: int, G: int, dtype: Any) -> None:
    """Raises NotImplementedError for more bfloat16 rows than quantized matrices are read for."""
    if M > _QUANTIZED_ROWS * G:
        raise NotImplementedError(
            f"takes {_QUANTIZED_ROWS} rows a group at most, on average, by {dtype} matrices, got"
            f" {M} rows for {G} groups"
        )


def check_dtypes(lhs: jax.Array, matrix: jax.Array, block_shape: tuple[int, int]) -> None:
    """Raises NotImplementedError for all but bfloat16 by bfloat16 and float8 by float8."""
    if lhs.dtype not in (jnp.bfloat16, FLOAT8) or matrix.dtype != lhs.dtype:
        raise NotImplementedError(
            f"takes bfloat16 by bfloat16 and {FLOAT8} by {FLOAT8}, got {lhs.dtype} by"
            f" {matrix.dtype}"
        )
    if lhs.dtype == FLOAT8 and block_shape != (SCALE_BLOCK, SCALE_BLOCK):
        raise NotImplementedError(f"takes scales of blocks of 128 x 128, got {block_shape}")


def choose_config(M: int, G: int, N: int, K: int, float8: bool) -> Config:
    """What was measured best on an H200 for that many rows a group, of what takes N and K."""
    if M < _MANY * G:
        return choose_few(FEW_ROWS, M, G, N, K, float8)
    return fitting(MANY_ROWS_FLOAT8 if float8 else MANY_ROWS_BFLOAT16, N, K, float8)[0]


def choose_few(
    candidates: Sequence[Config], M: int, G: int, N: int, K: int, float8: bool, matrices: int = 1
) -> Config:
    """For few rows a group: the widest tiles, or narrower ones if multiprocessors idle."""
    by_width = {c.columns // matrices: c for c in fitting(candidates, N, K, float8, matrices)}
    return by_width[best_width(tuple(by_width), M, G, N)]


def fitting(
    candidates: Sequence[Config], N: int, K: int, float8: bool, matrices: int = 1
) -> list[Config]:
    """Raises NotImplementedError, the last one's, if none does."""
    found, refusals = [], []
    for config in candidates:
        try:
            check_shapes(config, N, K, float8, matrices)
            found.append(config)
        except NotImplementedError as refusal:
            refusals.append(str(refusal))
    if not found:
        raise NotImplementedError(refusals[-1])
    return found


# (the kernel's Config, how to interpret it, the blocks of scales)
_Settings = tuple[Any, Any, tuple[int, int]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_matmul(
    settings: _Settings,
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    lhs_scale: jax.Array | None,
    rhs_scale: jax.Array | None,
) -> jax.Array:
    config, interpret, block_shape = settings
    if lhs_scale is None and rhs_scale is not None:
        return few_rows.grouped_matmul(
            lhs,
            rhs,
            group_sizes,
            rhs_scale=rhs_scale,
            block_shape=block_shape,
            config=config,
            interpret=interpret,
        )
    scales = () if rhs_scale is None else (rhs_scale,)
    return grouped_product(
        lhs, (rhs,), group_sizes, lhs_scale, scales, config=config, interpret=interpret
    )


def _forward(settings: _Settings, *args: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    return _grouped_matmul(settings, *args), args


def _backward(settings: _Settings, args: tuple[Any, ...], cotangent: jax.Array) -> tuple[Any, ...]:
    lhs, rhs, group_sizes, *scales = args
    shape = {"block_shape": settings[2]}

    def product(lhs: Any, rhs: Any, *scales: Any) -> jax.Array:
        try:
            return blocked.grouped_matmul(lhs, rhs, group_sizes, *scales, **shape)
        except NotImplementedError:
            return reference.grouped_matmul(lhs, rhs, group_sizes, *scales, **shape)

    _, pull = jax.vjp(product, lhs, rhs, *scales)
    of_lhs, of_rhs, *of_scales = pull(cotangent)
    return of_lhs, of_rhs, None, *of_scales


_grouped_matmul.defvjp(_forward, _backward)
