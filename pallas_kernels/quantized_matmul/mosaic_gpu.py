"""quantized_matmul on Hopper GPUs: a grouped matmul of one group, for the few tokens of decoding.

The weights are read once, in their stored format. XLA instead writes them to memory in x's dtype
first, which is five times the traffic of float8.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from pallas_kernels.grouped_matmul import mosaic_gpu
from pallas_kernels.hopper import require_hopper
from pallas_kernels.quantized_matmul.one_group import multiply_as_one_group
from pallas_kernels.quantized_matmul.reference import Matrix


def quantized_matmul(
    x: Float[Array, "*batch K"],
    weight: Matrix,
    scale: Float32[Array, "Nb Kb"],
    *,
    block_shape: tuple[int, int],
    out_dtype: DTypeLike,
    interpret: Any = None,
) -> Float[Array, "*batch N"]:
    """As :func:`pallas_kernels.quantized_matmul`, with the result rounded to bfloat16 first.

    Raises:
      NotImplementedError: no Hopper GPU, x not bfloat16, more than 64 rows, for which XLA's own
        matmul is as fast, or what grouped_matmul refuses for one group.
    """
    require_hopper(interpret)
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16 rows, got {x.dtype}")
    mosaic_gpu.check_few_tokens(math.prod(x.shape[:-1]), 1, weight.dtype)
    return multiply_as_one_group(
        mosaic_gpu.grouped_matmul,
        x,
        weight,
        scale,
        block_shape=block_shape,
        out_dtype=out_dtype,
        interpret=interpret,
    )
