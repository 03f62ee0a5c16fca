"""quantized_matmul on TPUs: a grouped matmul of one group.

The matrix is read once, in its stored format. If a row has several scales, XLA instead writes the
matrix to memory as floats first: nine times the traffic of float8, and eighteen times that of int4
or more. With one scale per row, XLA converts int8 as it reads it, as the kernel would, so that case
is left to XLA.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from pallas_kernels.grouped_matmul import mosaic_tpu
from pallas_kernels.quantized_matmul.one_group import multiply_as_one_group
from pallas_kernels.quantized_matmul.reference import Matrix
from pallas_kernels.tpu import require_tpu


def quantized_matmul(
    x: Float[Array, "*batch K"],
    weight: Matrix,
    scale: Float32[Array, "Nb Kb"],
    *,
    block_shape: tuple[int, int],
    out_dtype: DTypeLike,
    interpret: Any = None,
) -> Float[Array, "*batch N"]:
    """As :func:`pallas_kernels.quantized_matmul`, with the result rounded to x's dtype first.

    Raises:
      NotImplementedError: no TPU, int8 with one scale per row, or what grouped_matmul refuses.
    """
    require_tpu(interpret)
    if weight.dtype == jnp.int8 and block_shape[0] == scale.shape[1] == 1:
        raise NotImplementedError("XLA reads int8 with one scale a row as it is stored")
    return multiply_as_one_group(
        mosaic_tpu.grouped_matmul,
        x,
        weight,
        scale,
        block_shape=block_shape,
        out_dtype=out_dtype,
        interpret=interpret,
    )
