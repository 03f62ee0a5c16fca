"""swiglu of many rows on GPUs: two matmuls that XLA does not merge.

XLA merges matmuls that share an operand. For that it joins ``gate`` and ``up`` into one matrix,
each time anew, unless it compiles the matmul itself: with 512 rows it calls cuBLAS, and copies the
23 MB of a layer's shared experts first.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.grouped_swiglu.reference import silu_multiply
from pallas_kernels.quantized_matmul.reference import Matrix
from pallas_kernels.target import platform

_MIN_ROWS = 129


def swiglu(
    x: Float[Array, "*batch K"],
    gate: Matrix,
    up: Matrix,
    gate_scale: Float32[Array, "Fb Kb"] | None = None,
    up_scale: Float32[Array, "Fb Kb"] | None = None,
    *,
    block_shape: tuple[int, int] = (128, 128),
) -> Float[Array, "*batch F"]:
    """Implements :func:`pallas_kernels.swiglu`.

    Raises:
      NotImplementedError: the program is not for a GPU, the matrices are quantized, or there are
        fewer than 129 rows, for which XLA compiles one merged matmul without a copy.
    """
    del block_shape
    if platform() != "gpu":
        raise NotImplementedError(f"is for GPUs, this is {platform()}")
    if gate_scale is not None or up_scale is not None:
        raise NotImplementedError("takes matrices without scales")
    if (rows := math.prod(x.shape[:-1])) < _MIN_ROWS:
        raise NotImplementedError(f"takes {_MIN_ROWS} rows or more, got {rows}")
    return multiply_apart(x, gate, up)


def multiply_apart(
    x: Float[Array, "*batch K"], gate: Float[Array, "F K"], up: Float[Array, "F K"]
) -> Float[Array, "*batch F"]:
    """Does :func:`swiglu` on any platform."""

    def matmul(x: jax.Array, matrix: jax.Array) -> jax.Array:
        product = jnp.einsum("...k,fk->...f", x, matrix, preferred_element_type=jnp.float32)
        return product.astype(x.dtype)

    # For XLA, a value behind a barrier is another value.
    gated, product = matmul(x, gate), matmul(jax.lax.optimization_barrier(x), up)
    return silu_multiply(gated, product).astype(x.dtype)
