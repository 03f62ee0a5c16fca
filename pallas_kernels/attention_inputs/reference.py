"""Reference implementation of attention_inputs: the model's own operations, one after the other."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.decoder_layer.reference import Projection, multiply
from pallas_kernels.rms_norm import reference as rms_norm


class AttentionWeights(NamedTuple):
    """The weights that are used before attention itself."""

    norm: Float[Array, " D"]
    """The weights of the norm of the layer's input."""
    q_proj: Projection
    """[H (N + R), D], or q_b_proj [H (N + R), Q] if there is a q_a_proj. A head's last R rows are
    rotated."""
    kv_a_proj: Projection
    """kv_a_proj_with_mqa [C + R, D]: the latent, then the rope key."""
    kv_a_norm: Float[Array, " C"]
    w_uk: Float[Array, "H N C"]
    q_a_proj: Projection | None = None
    """[Q, D]"""
    q_a_norm: Float[Array, " Q"] | None = None


class AttentionInputs(NamedTuple):
    """The queries and the cache that attention itself reads."""

    q_latent: Float[Array, "M H C"]
    q_rope: Float[Array, "M H R"]
    pages: Float[Array, "P page width"]


def attention_inputs(
    x: Float[Array, "M D"],
    weights: AttentionWeights,
    cos: Float32[Array, "M half"],
    sin: Float32[Array, "M half"],
    pages: Float[Array, "P page width"],
    slots: Int[Array, " M"],
    *,
    eps: float,
    latent_eps: float,
    counter: Any = None,
) -> AttentionInputs:
    """Implements :func:`pallas_kernels.attention_inputs`."""
    del counter
    (M, _), dtype, (H, N, C) = x.shape, x.dtype, weights.w_uk.shape
    normed = rms_norm.rms_norm(x, weights.norm, eps=eps)
    compressed = normed
    if weights.q_a_proj is not None and weights.q_a_norm is not None:
        compressed = multiply(normed, *weights.q_a_proj).astype(dtype)
        compressed = rms_norm.rms_norm(compressed, weights.q_a_norm, eps=latent_eps)
    q = multiply(compressed, *weights.q_proj).astype(dtype).reshape(M, H, -1)
    # XLA's CPU compiler refuses this matmul in bfloat16 unless the matrix comes first.
    q_latent = jnp.einsum(
        "hnc,mhn->mhc", weights.w_uk, q[..., :N], preferred_element_type=jnp.float32
    ).astype(dtype)
    latent = multiply(normed, *weights.kv_a_proj).astype(dtype)
    normed_latent = rms_norm.rms_norm(latent[:, :C], weights.kv_a_norm, eps=latent_eps)
    stored = jnp.concatenate([normed_latent, _rotate(latent[:, C:], cos, sin)], axis=-1)
    flat = pages.reshape(-1, pages.shape[-1])
    rows = jnp.where(slots < 0, len(flat), slots)  # out of bounds and therefore dropped
    flat = flat.at[rows, : stored.shape[1]].set(stored.astype(pages.dtype), mode="drop")
    q_rope = _rotate(q[..., N:], cos[:, None], sin[:, None])
    return AttentionInputs(q_latent, q_rope, flat.reshape(pages.shape))


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates pairs of neighbours. The first numbers of all pairs come first in the result."""
    first, second = (x[..., n::2].astype(jnp.float32) for n in (0, 1))
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
