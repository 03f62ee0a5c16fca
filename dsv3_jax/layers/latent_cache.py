"""Formats of a latent cache: latents and rope keys as numbers, or in float8."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from dsv3_jax.config import ModelConfig
from dsv3_jax.layers.paged_cache import CachedArray, LayerCacheSpec
from pallas_kernels import dequantize_latent, float8_token_bytes, quantize_latent


def latent_cache_spec(
    config: ModelConfig, dtype: DTypeLike, *, float8: bool = False
) -> LayerCacheSpec:
    """Returns what Multi-head Latent Attention caches: the normed latent, then the rope key.

    In float8 these are the bytes that :func:`pallas_kernels.quantize_latent` returns.

    Raises:
      ValueError: float8 needs latents of another width.
    """
    if not float8:
        return {"latent": CachedArray(config.latent_dim, dtype)}
    width = float8_token_bytes(config.kv_lora_rank, config.qk_rope_head_dim)
    return {"latent": CachedArray(width, jnp.uint8)}


def to_float8(config: ModelConfig, latents: Float[Array, "B T CR"]) -> UInt8[Array, "B T bytes"]:
    """Returns latents and rope keys as a float8 cache stores them."""
    C = config.kv_lora_rank
    return quantize_latent(latents[..., :C], latents[..., C:])


def read(
    config: ModelConfig,
    stored: Float[Array, "B S columns"] | UInt8[Array, "B S bytes"],
    dtype: DTypeLike,
) -> Float[Array, "B S CR"]:
    """Returns the latents and rope keys that either kind of cache stores."""
    if stored.dtype != jnp.uint8:
        return stored[..., : config.latent_dim].astype(dtype)
    columns = config.kv_lora_rank, config.qk_rope_head_dim
    return jnp.concatenate(dequantize_latent(stored, dtype, columns=columns), axis=-1)
