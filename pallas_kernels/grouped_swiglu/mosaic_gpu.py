"""grouped_swiglu for Hopper GPUs: grouped_matmul's kernel, with both matrices in a tile.

Neither product is written to memory: 2 x M x F values are neither stored nor read again, and the
rows are read once for both.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.block_quant.reference import block_quant
from pallas_kernels.grouped_matmul import few_rows, few_rows_plan
from pallas_kernels.grouped_matmul.mosaic_gpu import (
    check_dtypes,
    check_few,
    choose_few,
    fitting,
)
from pallas_kernels.grouped_matmul.mosaic_gpu_kernel import grouped_product, quantized_product
from pallas_kernels.grouped_matmul.plan import SCALE_BLOCK, Config, check_shapes, quantizes
from pallas_kernels.grouped_matmul.reference import Matrices
from pallas_kernels.grouped_swiglu import reference
from pallas_kernels.hopper import require_hopper

# Columns are those of both matrices: half as many of the result.
MANY_ROWS_FLOAT8 = (
    Config(128, 192, 4, "rows", slots=3, copied_scales=True),
    Config(128, 128, 5, "rows", slots=2, copied_scales=True),
)
MANY_ROWS_BFLOAT16 = (Config(128, 256, 4, "rows"), Config(128, 128, 6, "rows"))
FEW_ROWS = (
    Config(64, 256, 4, "columns", slots=2, panel=1, classes=(16, 32), early=True),
    Config(128, 128, 6, "rows", panel=1, classes=(16, 32), early=True),
    Config(128, 64, 8, "rows", panel=1, classes=(16, 32), early=True),
)
_MANY = 128  # rows a group, on average


def grouped_swiglu(
    lhs: Float[Array, "M K"],
    gate: Matrices,
    up: Matrices,
    group_sizes: Int[Array, " G"],
    lhs_scale: Float32[Array, "M Kb"] | None = None,
    gate_scale: Float32[Array, "G Fb Kb"] | None = None,
    up_scale: Float32[Array, "G Fb Kb"] | None = None,
    *,
    block_shape: tuple[int, int] = (128, 128),
    quantize: bool = False,
    config: Config | few_rows_plan.Config | None = None,
    interpret: Any = None,
) -> reference.Result:
    """grouped_swiglu of bfloat16 by bfloat16 or float8 by float8 on a Hopper GPU, rounded once; of
    few rows of bfloat16 by int8, int4 or float8, both products in one kernel, rounded before silu.

    Gradients are those of the other back-ends.

    ``quantize`` is part of the kernel where a tile holds 128 columns of the result: for few rows,
    and for many in bfloat16. Tiles for many rows of float8 hold 96: there the result is written in
    bfloat16, and XLA quantizes it.

    Raises:
      NotImplementedError: no Hopper GPU, other dtypes, other blocks of scales than 128 x 128, F no
        multiple of 64, or of 128 under ``quantize``, or K no multiple of 64 (bfloat16) or 128
        (float8). For quantized matrices as grouped_matmul does, and under ``quantize``.
      TypeError: a gradient through a quantized result.
    """
    require_hopper(interpret)
    if 0 in (lhs.size, gate.size):
        raise NotImplementedError(f"takes no empty arrays, got {lhs.shape} by {gate.shape}")
    (M, K), (G, F, _) = lhs.shape, gate.shape
    float8 = lhs_scale is not None
    if lhs.dtype == jnp.bfloat16 and gate_scale is not None:
        check_few(M, G, gate.dtype)
        if quantize:
            raise NotImplementedError(f"quantizes nothing of rows by {gate.dtype} matrices")
        settings = config, interpret, block_shape
        return _grouped_swiglu(settings, lhs, gate, up, group_sizes, None, gate_scale, up_scale)
    check_dtypes(lhs, gate, block_shape)
    if config is None:
        config = choose_config(M, G, F, K, float8, quantize)
    assert isinstance(config, Config)
    check_shapes(config, F, K, float8, matrices=2)
    if quantize:
        if F % SCALE_BLOCK:
            raise NotImplementedError(f"quantizes multiples of {SCALE_BLOCK} columns, got F {F}")
        arrays = lhs, gate, up, lhs_scale, gate_scale, up_scale
        return _quantized(config, interpret, group_sizes, *reference.without_gradient(arrays))
    settings = config, interpret, block_shape
    return _grouped_swiglu(settings, lhs, gate, up, group_sizes, lhs_scale, gate_scale, up_scale)


def choose_config(M: int, G: int, F: int, K: int, float8: bool, quantize: bool) -> Config:
    """What was measured best on an H200 for that many rows a group, of what takes F and K."""
    if M >= _MANY * G:
        many = MANY_ROWS_FLOAT8 if float8 else MANY_ROWS_BFLOAT16
        return fitting(many, F, K, float8, matrices=2)[0]
    if quantize:  # the widest, which quantize; behind the others XLA would
        return fitting(FEW_ROWS, F, K, float8, matrices=2)[0]
    return choose_few(FEW_ROWS, M, G, F, K, float8, matrices=2)


def _quantized(
    config: Config,
    interpret: Any,
    group_sizes: jax.Array,
    lhs: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    lhs_scale: jax.Array | None,
    *matrix_scales: jax.Array | None,
) -> reference.Result:
    scales = tuple(x for x in matrix_scales if x is not None)
    arrays = lhs, (gate, up), group_sizes, lhs_scale, scales
    if quantizes(config, gate.shape[1], matrices=2):
        return quantized_product(*arrays, config=config, interpret=interpret)
    return block_quant(grouped_product(*arrays, config=config, interpret=interpret))


# (the kernel's Config, how to interpret it, the blocks of scales)
_Settings = tuple[Any, Any, tuple[int, int]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_swiglu(
    settings: _Settings,
    lhs: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    group_sizes: jax.Array,
    lhs_scale: jax.Array | None,
    gate_scale: jax.Array | None,
    up_scale: jax.Array | None,
) -> jax.Array:
    scales = tuple(x for x in (gate_scale, up_scale) if x is not None)
    config, interpret, block_shape = settings
    if lhs_scale is None and scales:
        options: Any = {"block_shape": block_shape, "config": config, "interpret": interpret}
        both = few_rows.grouped_products(lhs, (gate, up), group_sizes, scales, **options)
        return reference.join(*jnp.split(both, 2, axis=1)).astype(lhs.dtype)
    return grouped_product(
        lhs, (gate, up), group_sizes, lhs_scale, scales, config=config, interpret=interpret
    )


def _forward(settings: _Settings, *args: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    return _grouped_swiglu(settings, *args), args


def _backward(settings: _Settings, args: tuple[Any, ...], cotangent: jax.Array) -> tuple[Any, ...]:
    lhs, gate, up, group_sizes, *scales = args

    def both(lhs: Any, gate: Any, up: Any, *scales: Any) -> Any:
        return reference.grouped_swiglu(
            lhs, gate, up, group_sizes, *scales, block_shape=settings[2]
        )

    _, pull = jax.vjp(both, lhs, gate, up, *scales)
    of_lhs, of_gate, of_up, *of_scales = pull(cotangent)
    return of_lhs, of_gate, of_up, None, *of_scales


_grouped_swiglu.defvjp(_forward, _backward)
