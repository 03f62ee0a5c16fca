"""Root-mean-square normalisation of hidden states, and layer normalisation of indexer keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from dsv3_jax.config import ModelConfig
from pallas_kernels import add_rms_norm, rms_norm


class RMSNorm(nnx.Module):
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last axis, in float32, then cast back."""

    def __init__(self, width: int, *, eps: float, dtype: DTypeLike):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((width,), dtype))

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        return rms_norm(x, self.weight[...], eps=self.eps)

    def add_and_norm(
        self, x: Float[Array, "*batch D"], y: Float[Array, "*batch D"]
    ) -> tuple[Float[Array, "*batch D"], Float[Array, "*batch D"]]:
        """Returns ``x + y``, summed in float32 and rounded to x's dtype, and the norm of it."""
        return add_rms_norm(x, y, self.weight[...], eps=self.eps)


class LayerNorm(nnx.Module):
    """``weight * (x - mean) / sqrt(variance + eps) + bias`` over the last axis, in float32; the
    result has x's dtype."""

    def __init__(self, width: int, *, eps: float):
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((width,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((width,), jnp.float32))

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        y = x.astype(jnp.float32)
        y -= jnp.mean(y, axis=-1, keepdims=True)
        y *= jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return (y * self.weight[...] + self.bias[...]).astype(x.dtype)


def norm_dtype(config: ModelConfig, dtype: DTypeLike) -> DTypeLike:
    """Returns the dtype of the norms' weights. V3.2 publishes them in float32, and rounding them to
    bfloat16 would change the model; earlier models have that of the other weights."""
    return jnp.float32 if config.has_float32_norms else dtype
