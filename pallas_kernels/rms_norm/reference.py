"""Reference implementation of rms_norm and add_rms_norm."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.residuals import rounded


def rms_norm(
    x: Float[Array, "*batch D"], weight: Float[Array, " D"], *, eps: float
) -> Float[Array, "*batch D"]:
    results: Any = _with_norm(eps, x, weight)
    return results[1]


def add_rms_norm(
    x: Float[Array, "*batch D"],
    y: Float[Array, "*batch D"],
    weight: Float[Array, " D"],
    *,
    eps: float,
) -> tuple[Float[Array, "*batch D"], Float[Array, "*batch D"]]:
    total = (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)
    return _with_norm(eps, total, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_norm(eps: float, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns x and its norm. The gradients of both by x are summed in float32. They keep x; JAX's
    would keep float32 intermediates."""
    y = x.astype(jnp.float32)
    return x, (y * _factor(y, eps) * weight.astype(jnp.float32)).astype(x.dtype)


def _factor(x: jax.Array, eps: float) -> jax.Array:
    return jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def _forward(eps: float, x: jax.Array, weight: jax.Array) -> tuple[Any, Any]:
    factor = _factor(x.astype(jnp.float32), eps)
    x = rounded(x)
    normed = x.astype(jnp.float32) * factor * weight.astype(jnp.float32)
    return (x, normed.astype(x.dtype)), (x, weight)


def _backward(
    eps: float, saved: tuple[jax.Array, jax.Array], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    x, weight, d_x, d_y = (each.astype(jnp.float32) for each in (*saved, *cotangents))
    factor = _factor(x, eps)
    normed, d_normed = x * factor, d_y * weight
    d_x += factor * (d_normed - normed * jnp.mean(d_normed * normed, axis=-1, keepdims=True))
    d_weight = jnp.sum(d_y * normed, axis=tuple(range(x.ndim - 1)))
    return d_x.astype(saved[0].dtype), d_weight.astype(saved[1].dtype)


_with_norm.defvjp(_forward, _backward)
