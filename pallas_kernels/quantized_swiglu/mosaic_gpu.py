"""quantized_swiglu on Hopper GPUs: a grouped one of one group, for the few rows of decoding."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.grouped_swiglu import mosaic_gpu
from pallas_kernels.hopper import require_hopper
from pallas_kernels.quantized_matmul.reference import Matrix


def quantized_swiglu(
    x: Float[Array, "*batch K"],
    gate: Matrix,
    up: Matrix,
    gate_scale: Float32[Array, "Fb Kb"],
    up_scale: Float32[Array, "Fb Kb"],
    *,
    block_shape: tuple[int, int],
    interpret: Any = None,
) -> Float[Array, "*batch F"]:
    """As :func:`pallas_kernels.quantized_swiglu`, both products rounded to bfloat16.

    Raises:
      NotImplementedError: no Hopper GPU, x not bfloat16, or more rows or other widths than
        grouped_swiglu takes of one group.
    """
    require_hopper(interpret)
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16 rows, got {x.dtype}")
    M = math.prod(x.shape[:-1])
    out: Any = mosaic_gpu.grouped_swiglu(
        x.reshape(M, x.shape[-1]),
        gate[None],
        up[None],
        jnp.full((1,), M, jnp.int32),
        None,
        gate_scale[None],
        up_scale[None],
        block_shape=block_shape,
        interpret=interpret,
    )
    return out.reshape(*x.shape[:-1], gate.shape[0])
