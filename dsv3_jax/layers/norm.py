"""Root-mean-square normalisation."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels import add_rms_norm, rms_norm


class RMSNorm(nnx.Module):
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last axis, in float32, then cast back."""

    def __init__(self, width: int, *, eps: float, dtype: DTypeLike):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((width,), dtype))

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """Returns the norm of ``x``."""
        return rms_norm(x, self.weight[...], eps=self.eps)

    def add_and_norm(
        self, x: Float[Array, "*batch D"], y: Float[Array, "*batch D"]
    ) -> tuple[Float[Array, "*batch D"], Float[Array, "*batch D"]]:
        """Returns ``x + y``, summed in float32 and rounded to x's dtype, and the norm of it."""
        return add_rms_norm(x, y, self.weight[...], eps=self.eps)
