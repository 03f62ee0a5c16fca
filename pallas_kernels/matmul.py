"""A dense matmul with gradients in the dtype of its operands.

JAX's own gradient of a matmul with float32 sums multiplies a float32 cotangent, which takes a GPU
twice as long as bfloat16 or more. Here the cotangent is rounded to the operands' dtype first, which
changes nothing where the result was rounded to it too, and both gradients are rounded once.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.residuals import named
from pallas_kernels.target import platform


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(
    x: Float[Array, "*batch K"], weight: Float[Array, "N K"], out_dtype: DTypeLike
) -> Float[Array, "*batch N"]:
    """Returns ``weight @ x`` for every row x, summed in float32 and rounded to ``out_dtype``.

    Args:
      x: rows, in the dtype of ``weight``.
    """
    return _product(x, weight, out_dtype, jnp.dtype(jnp.float32))


def _product(x: jax.Array, weight: jax.Array, out_dtype: DTypeLike, sums: jnp.dtype) -> jax.Array:
    y = jnp.einsum("...k,nk->...n", x, weight, preferred_element_type=sums)
    return y.astype(out_dtype)


def _forward(x: jax.Array, weight: jax.Array, out_dtype: DTypeLike) -> tuple[jax.Array, tuple]:
    # XLA may merge matmuls of the same rows, and would then write float32 sums.
    return named("matmul", _product(x, weight, out_dtype, sum_dtype(out_dtype))), (x, weight)


def _backward(
    out_dtype: DTypeLike, operands: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weight = operands
    cotangent, sums = cotangent.astype(x.dtype), sum_dtype(x.dtype)
    d_x = jnp.einsum("...n,nk->...k", cotangent, weight, preferred_element_type=sums)
    d_weight = jnp.einsum("...n,...k->nk", cotangent, x, preferred_element_type=sums)
    return d_x.astype(x.dtype), d_weight.astype(weight.dtype)


matmul.defvjp(_forward, _backward)


def sum_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Returns the dtype that a matmul must ask for so that its sums are float32 and its result can
    be rounded to ``dtype``. On CPUs, sums of bfloat16 are in float32 only if the result is."""
    return jnp.dtype(jnp.float32 if platform() == "cpu" else dtype)
