"""A dense matmul with gradients in the dtype of its operands.

JAX's own gradient of a matmul with float32 sums multiplies a float32 cotangent, which takes a GPU
twice as long as bfloat16 or more. Here the cotangent is rounded to the operands' dtype first, which
changes nothing where the result was rounded to it too, and both gradients are rounded once.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

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


@jax.custom_vjp
def matmuls(
    x: Float[Array, "*batch K"], weights: tuple[Float[Array, "_ K"], ...]
) -> tuple[Float[Array, "*batch _"], ...]:
    """Returns :func:`matmul` of ``x`` and each matrix, in the dtype of ``x``. The gradients are
    those of one matmul by the matrices joined: XLA joins the matmuls of the forward pass and of the
    matrices' gradients anyway, but that of ``x`` it would compute in as many parts, and write each.
    """
    return tuple(matmul(x, weight, x.dtype) for weight in weights)


def _forward_of_several(
    x: jax.Array, weights: tuple[jax.Array, ...]
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, tuple[jax.Array, ...]]]:
    return tuple(_forward(x, weight, x.dtype)[0] for weight in weights), (x, weights)


def _backward_of_several(
    operands: tuple[jax.Array, tuple[jax.Array, ...]], cotangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    x, weights = operands
    cotangent, joined = jnp.concatenate(cotangents, axis=-1), jnp.concatenate(weights)
    d_x, d_joined = _backward(x.dtype, (x, joined), cotangent)
    ends = itertools.accumulate(len(weight) for weight in weights[:-1])
    return d_x, tuple(jnp.split(d_joined, list(ends)))


matmuls.defvjp(_forward_of_several, _backward_of_several)


def float32_matmul(
    a: Float[Array, "_ _"], b: Float[Array, "_ _"], *, contracted: tuple[int, int] = (1, 1)
) -> Float32[Array, "_ _"]:
    """Returns a product of two matrices as precise as in float32, by bfloat16 matmuls.

    A float32 is the sum of three bfloat16, and products of two bfloat16 are exact in float32, in
    which they are summed. Products below 2^-24 of the largest are left out. A GPU has no tensor
    cores for float32, so that this is faster there.

    Args:
      a: bfloat16 or float32.
      b: bfloat16 or float32.
      contracted: axis of each that is summed over.
    """
    pairs = [
        (x, y)
        for i, x in enumerate(_bfloat16_parts(a))
        for j, y in enumerate(_bfloat16_parts(b))
        if i + j < _PARTS
    ]
    # The small products first.
    lefts, rights = (list(each) for each in zip(*reversed(pairs), strict=True))
    (m, n), f32 = contracted, jnp.float32

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, y, (((m,), (n,)), ((), ())), preferred_element_type=f32)

    if all(x is lefts[0] for x in lefts):  # side by side, so that it is read once
        products = product(lefts[0], jnp.concatenate(rights, axis=1 - n))
        return functools.reduce(jnp.add, jnp.split(products, len(rights), axis=1))
    return product(jnp.concatenate(lefts, axis=m), jnp.concatenate(rights, axis=n))


_PARTS = 3  # bfloat16 numbers of 8 bits, whose sum has the 24 bits of a float32


def _bfloat16_parts(x: jax.Array) -> list[jax.Array]:
    """Returns arrays whose sum is x, in descending order of magnitude."""
    if x.dtype == jnp.bfloat16:
        return [x]
    parts = []
    for _ in range(_PARTS):
        # XLA may leave out a conversion to bfloat16 and back.
        part = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return parts


def sum_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Returns the dtype that a matmul must ask for so that its sums are float32 and its result can
    be rounded to ``dtype``. On CPUs, sums of bfloat16 are in float32 only if the result is."""
    return jnp.dtype(jnp.float32 if platform() == "cpu" else dtype)
