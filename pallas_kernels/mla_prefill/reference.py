"""Reference implementation of mla_prefill: computes all scores at once, then masks them.

Autodiff keeps the probabilities for the gradient. :mod:`blocked` has one for long sequences.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.softmax import masked_softmax


def mla_prefill(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H V"],
    starts: Int[Array, " B"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    first_keys: Int[Array, "B T"] | None = None,
    *,
    scale: float,
) -> tuple[Float[Array, "B T H V"], Float32[Array, "B T H"]]:
    starts, lengths = bounds(k, starts, lengths)
    s = jnp.arange(k.shape[1])
    # Keys and values past a sequence's length may be NaN, and 0 * NaN is NaN: zeros replace them.
    # Scores are masked anyway, but the gradient of q multiplies the keys.
    valid = (s < lengths[:, None])[..., None, None]
    k, v = jnp.where(valid, k, 0), jnp.where(valid, v, 0)
    scores = jnp.einsum("bthk,bshk->bths", q, k, preferred_element_type=jnp.float32)
    last = starts[:, None] + jnp.arange(q.shape[1])
    mask = (s <= last[..., None]) & (s < lengths[:, None, None])
    if first_keys is not None:
        mask &= s >= first_keys[..., None]
    probabilities, lse = masked_softmax(scores * scale, mask[:, :, None])
    out = jnp.einsum(
        "bths,bshv->bthv", probabilities.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    return out.astype(q.dtype), lse


def bounds(
    k: Float[Array, "B S H K"], starts: Int[Array, " B"] | None, lengths: Int[Array, " B"] | None
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Returns ``starts`` and ``lengths``, and in place of None what it stands for."""
    B, S = k.shape[:2]
    starts = jnp.zeros((B,), jnp.int32) if starts is None else starts
    return starts, jnp.full((B,), S, jnp.int32) if lengths is None else lengths
