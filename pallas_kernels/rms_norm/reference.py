"""Reference implementation of rms_norm and add_rms_norm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(
    x: Float[Array, "*batch D"], weight: Float[Array, " D"], *, eps: float
) -> Float[Array, "*batch D"]:
    y = x.astype(jnp.float32)
    y *= jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * weight.astype(jnp.float32)).astype(x.dtype)


def add_rms_norm(
    x: Float[Array, "*batch D"],
    y: Float[Array, "*batch D"],
    weight: Float[Array, " D"],
    *,
    eps: float,
) -> tuple[Float[Array, "*batch D"], Float[Array, "*batch D"]]:
    total = (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)
    return total, rms_norm(total, weight, eps=eps)
