"""Root-mean-square normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last axis, in float32, then cast back."""

    def __init__(self, width: int, *, eps: float, dtype: DTypeLike):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((width,), dtype))

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        y = x.astype(jnp.float32)
        y *= jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * self.weight[...].astype(jnp.float32)).astype(x.dtype)
