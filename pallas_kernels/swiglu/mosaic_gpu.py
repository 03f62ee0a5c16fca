"""swiglu on Hopper GPUs: grouped_swiglu of one group, for the few tokens of decoding."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.grouped_matmul.mosaic_gpu import check_few_tokens
from pallas_kernels.grouped_swiglu import mosaic_gpu
from pallas_kernels.hopper import require_hopper
from pallas_kernels.quantized_matmul.reference import Matrix

# Rows for which the kernel is faster than XLA's matmuls if the matrices are not quantized
# (64 rows: 14 us instead of 17.5 on an H200; 256 rows: 28.7 instead of 25). Large matrices have no
# lower limit: for one row by two of them, XLA took more than twice as long as reading them takes.
_MIN_ROWS, _MAX_ROWS = 32, 128
_LARGE = 2**24  # elements of a matrix


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
    """As :func:`pallas_kernels.swiglu`. With quantized matrices, the results of both matmuls are
    rounded to bfloat16.

    Raises:
      NotImplementedError: no Hopper GPU, x not bfloat16, or what grouped_swiglu refuses for one
        group. XLA's matmuls are as fast for more than 64 rows by quantized matrices or 128 by
        others, and for fewer than 32 unless the matrices are large: these are refused too.
    """
    require_hopper(interpret)
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16 rows, got {x.dtype}")
    M = math.prod(x.shape[:-1])
    least = 1 if gate.size >= _LARGE else _MIN_ROWS
    if gate_scale is not None:
        check_few_tokens(M, 1, gate.dtype)
    elif not least <= M <= _MAX_ROWS:
        raise NotImplementedError(
            f"takes {least} to {_MAX_ROWS} rows by such bfloat16 matrices, got {M}: XLA's matmuls"
            " are as fast"
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
