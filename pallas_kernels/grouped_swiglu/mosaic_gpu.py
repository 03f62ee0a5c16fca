"""grouped_swiglu for Hopper GPUs: grouped_matmul's kernel with gate and up in one tile.

SwiGLU is computed in the epilogue, so neither matmul's result is written to memory and read again
(2 x M x F values), and the rows are read once for both. Under a gradient, the kernel stores them
too. With quantized matrices and bfloat16 rows, the few-token kernel computes both matmuls, and XLA
computes SwiGLU.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.block_quant.reference import after, block_dequant
from pallas_kernels.grouped_matmul import dense, few_tokens, gradients
from pallas_kernels.grouped_matmul.dense_plan import Config, check_shapes, choose_config
from pallas_kernels.grouped_matmul.mosaic_gpu import check_dtypes, has_many_rows
from pallas_kernels.grouped_matmul.reference import Matrices
from pallas_kernels.grouped_swiglu import reference
from pallas_kernels.hopper import require_hopper
from pallas_kernels.residuals import from_saved, named

STAGING_BUFFERS = 2  # where three results are stored; a ring of four stages leaves no more memory


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
    config: Config | None = None,
    interpret: Any = None,
) -> Float[Array, "M F"]:
    """grouped_swiglu on a Hopper GPU. bfloat16 by bfloat16 and float8 by float8 are rounded once,
    at the end. Few bfloat16 rows by quantized matrices are rounded before silu too; for many, the
    matrices are dequantized to bfloat16 first. For gradients of bfloat16 by bfloat16, and of these
    many rows, both sums are rounded before silu, and saved. Other gradients are the reference's.

    Raises NotImplementedError for no Hopper GPU and what grouped_matmul refuses."""
    require_hopper(interpret)
    if 0 in (lhs.size, gate.size):
        raise NotImplementedError(f"takes no empty arrays, got {lhs.shape} by {gate.shape}")
    (M, K), (G, F, _) = lhs.shape, gate.shape
    arrays = lhs, gate, up, group_sizes, lhs_scale, gate_scale, up_scale
    is_quantized = lhs.dtype == jnp.bfloat16 and gate_scale is not None
    if not is_quantized:
        check_dtypes(lhs, gate, block_shape)
    if not is_quantized or has_many_rows(M, G):  # few_tokens checks its arguments itself
        float8 = lhs_scale is not None
        config = config or choose_config(M, G, F, K, float8, matrices=2)
        check_shapes(config, F, K, float8, matrices=2)
    return _grouped_swiglu((config, interpret, block_shape), *arrays)


# (Config of dense, interpreter parameters, block_shape)
_Settings = tuple[Any, Any, tuple[int, int]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_swiglu(settings: _Settings, *args: Any) -> jax.Array:
    lhs, gate, up, group_sizes, lhs_scale, gate_scale, up_scale = args
    config, interpret, block_shape = settings
    if _has_dense(*args):
        gate, up = _dense(block_shape, (gate, up), (gate_scale, up_scale))
        gate_scale = up_scale = None
    scales = tuple(x for x in (gate_scale, up_scale) if x is not None)
    if lhs_scale is None and scales:
        options: Any = {"block_shape": block_shape, "interpret": interpret}
        both = few_tokens.grouped_matmuls(lhs, (gate, up), group_sizes, scales, **options)
        return reference.silu_multiply(*jnp.split(both, 2, axis=1)).astype(lhs.dtype)
    return dense.matmul(
        lhs, (gate, up), group_sizes, lhs_scale, scales, config=config, interpret=interpret
    )


def _has_dense(lhs: Any, gate: Any, up: Any, sizes: Any, lhs_scale: Any, *scales: Any) -> bool:
    """Returns whether the matmuls are bfloat16 by bfloat16."""
    del up, sizes
    return lhs_scale is None and (scales[0] is None or has_many_rows(len(lhs), len(gate)))


def _dense(
    block_shape: tuple[int, int], matrices: tuple[Any, Any], scales: Sequence[Any]
) -> tuple[jax.Array, ...]:
    """Returns gate and up in bfloat16."""
    if scales[0] is None:
        return matrices
    quantized = zip(matrices, scales, strict=True)
    return tuple(block_dequant(*each, block_shape, jnp.bfloat16) for each in quantized)


def _after(array: jax.Array, scales: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(None if scale is None else after(array, scale) for scale in scales)


def _forward(settings: _Settings, *args: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    if not _has_dense(*args):
        return _grouped_swiglu(settings, *args), (args, None)
    lhs, gate, up, group_sizes, _, *scales = args
    matrices = _dense(settings[2], (gate, up), _after(lhs, scales))
    config = dataclasses.replace(settings[0], staging_buffers=STAGING_BUFFERS)
    options: Any = {"config": config, "interpret": settings[1]}
    hidden, *sums = dense.swiglu_and_sums(lhs, matrices, group_sizes, **options)
    saved = named("matmul", tuple(sums))
    return from_saved(hidden, _swiglu_of_sums, *saved), (args, saved)


def _swiglu_of_sums(gate: jax.Array, up: jax.Array) -> jax.Array:
    return reference.silu_multiply(gate, up).astype(gate.dtype)


def _backward(settings: _Settings, residuals: Any, cotangent: jax.Array) -> tuple[Any, ...]:
    args, saved = residuals
    if saved is not None:
        lhs, gate, up, group_sizes, _, *scales = args
        _, vjp = jax.vjp(_swiglu_of_sums, *saved)
        d_outs = vjp(cotangent)
        interpret = settings[1]
        dense_matrices = functools.partial(_dense, settings[2])
        matrices, vjp = jax.vjp(dense_matrices, (gate, up), _after(cotangent, scales))
        d_lhs = gradients.rows_gradient(d_outs, matrices, group_sizes, interpret=interpret)
        d_matrices = tuple(
            gradients.matrices_gradient(x, lhs, group_sizes, interpret=interpret) for x in d_outs
        )
        d_quantized, d_scales = vjp(d_matrices)
        return d_lhs, *d_quantized, None, None, *d_scales

    specification = functools.partial(reference.grouped_swiglu, block_shape=settings[2])
    return jax.vjp(specification, *args)[1](cotangent)


_grouped_swiglu.defvjp(_forward, _backward)
