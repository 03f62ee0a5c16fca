"""quantized_matmul as a grouped matmul of one group, on Hopper GPUs and on TPUs.

The matrix is read once, in its stored format. XLA instead writes it to memory in x's dtype first.
On a GPU that is five times the traffic of float8. On a TPU, if a row has several scales, it is nine
times the traffic of float8, and eighteen times that of int4 or more. With one scale per row, XLA
converts int8 on TPUs as it reads it, as the kernel would, so that case is left to XLA.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from pallas_kernels.grouped_matmul import mosaic_gpu, mosaic_tpu
from pallas_kernels.hopper import require_hopper
from pallas_kernels.quantized_matmul.reference import Matrix
from pallas_kernels.tpu import require_tpu


def on_hopper(
    x: Float[Array, "*batch K"],
    weight: Matrix,
    scale: Float32[Array, "Nb Kb"],
    *,
    block_shape: tuple[int, int],
    out_dtype: DTypeLike,
    interpret: Any = None,
) -> Float[Array, "*batch N"]:
    """As :func:`pallas_kernels.quantized_matmul`, with the result rounded to bfloat16 first. Raises
    NotImplementedError for no Hopper GPU, x not bfloat16, more than 64 rows, for which XLA's own
    matmul is as fast, or what grouped_matmul refuses for one group."""
    require_hopper(interpret)
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16 rows, got {x.dtype}")
    mosaic_gpu.check_few_tokens(math.prod(x.shape[:-1]), 1, weight.dtype)
    options: Any = {"block_shape": block_shape, "interpret": interpret}
    return _multiply(mosaic_gpu.grouped_matmul, x, weight, scale, out_dtype, options)


def on_tpu(
    x: Float[Array, "*batch K"],
    weight: Matrix,
    scale: Float32[Array, "Nb Kb"],
    *,
    block_shape: tuple[int, int],
    out_dtype: DTypeLike,
    interpret: Any = None,
) -> Float[Array, "*batch N"]:
    """As :func:`pallas_kernels.quantized_matmul`, with the result rounded to x's dtype first.
    Raises NotImplementedError for no TPU, int8 with one scale per row, or what grouped_matmul
    refuses."""
    require_tpu(interpret)
    if weight.dtype == jnp.int8 and block_shape[0] == scale.shape[1] == 1:
        raise NotImplementedError("XLA reads int8 with one scale a row as it is stored")
    options: Any = {"block_shape": block_shape, "interpret": interpret}
    return _multiply(mosaic_tpu.grouped_matmul, x, weight, scale, out_dtype, options)


def _multiply(
    grouped_matmul: Callable[..., Float[Array, "M N"]],
    x: Float[Array, "*batch K"],
    weight: Matrix,
    scale: Float32[Array, "Nb Kb"],
    out_dtype: DTypeLike,
    options: dict[str, Any],
) -> Float[Array, "*batch N"]:
    """Flattens the batch to rows of one group, and calls a back-end of grouped_matmul."""
    M = math.prod(x.shape[:-1])
    rows, sizes = x.reshape(M, x.shape[-1]), jnp.full((1,), M, jnp.int32)
    out = grouped_matmul(rows, weight[None], sizes, rhs_scale=scale[None], **options)
    return out.reshape(*x.shape[:-1], weight.shape[0]).astype(out_dtype)
