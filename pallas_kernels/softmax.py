"""Masked softmax with its log-sum-exp, shared by the attention references."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32


def masked_softmax(
    scores: Float32[Array, "*rows S"], mask: Bool[Array, "*#rows S"]
) -> tuple[Float32[Array, "*rows S"], Float32[Array, "*rows"]]:
    """Softmax over the kept entries and the log-sum-exp of their scores.

    A row that keeps nothing gives zeros and -inf, so that it weighs nothing in a later merge.
    """
    scores = jnp.where(mask, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    # exp(-inf - -inf) would be NaN where nothing is kept.
    weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0.0, top))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    safe = jnp.where(total == 0.0, 1.0, total)
    lse = jnp.where(total == 0.0, -jnp.inf, jnp.log(safe) + top)
    return weights / safe, lse[..., 0]
