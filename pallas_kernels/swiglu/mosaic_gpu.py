"""swiglu on Hopper GPUs: a grouped one of one group, for the few rows of decoding."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.grouped_swiglu import mosaic_gpu
from pallas_kernels.hopper import require_hopper
from pallas_kernels.quantized_matmul.reference import Matrix

# Of unquantized matrices, where XLA's products are not as good (timed: benchmarks/NOTES.md, "Whole
# models"). XLA took more than twice as long as reading for one row by two large matrices.
_LEAST_ROWS, _MOST_ROWS = 32, 128
_LARGE = 2**24  # numbers of a matrix, which fewer rows take too


def swiglu(
    x: Float[Array, "*batch K"],
    gate: Matrix,
    up: Matrix,
    gate_scale: Float32[Array, "Fb Kb"] | None = None,
    up_scale: Float32[Array, "Fb Kb"] | None = None,
    *,
    block_shape: tuple[int, int] = (128, 128),
    interpret: Any = None,
) -> Float[Array, "*batch F"]:
    """As :func:`pallas_kernels.swiglu`, both products of quantized matrices rounded to bfloat16.

    Raises:
      NotImplementedError: no Hopper GPU, x not bfloat16, or more rows or other widths than
        grouped_swiglu takes of one group. Of unquantized matrices more than 128 rows, and of small
        ones fewer than 32.
    """
    require_hopper(interpret)
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16 rows, got {x.dtype}")
    M = math.prod(x.shape[:-1])
    least = 1 if gate.size >= _LARGE else _LEAST_ROWS
    if gate_scale is None and not least <= M <= _MOST_ROWS:
        raise NotImplementedError(
            f"takes {least} to {_MOST_ROWS} rows by such bfloat16 matrices, got {M}: XLA's products"
            " are as good"
        )
    out: Any = mosaic_gpu.grouped_swiglu(
        x.reshape(M, x.shape[-1]),
        gate[None],
        up[None],
        jnp.full((1,), M, jnp.int32),
        None,
        None if gate_scale is None else gate_scale[None],
        None if up_scale is None else up_scale[None],
        block_shape=block_shape,
        interpret=interpret,
    )
    return out.reshape(*x.shape[:-1], gate.shape[0])
