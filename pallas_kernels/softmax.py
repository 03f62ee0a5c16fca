"""Softmax attention over parts of the keys: its log-sum-exp, and the merge of two parts."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32


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


def merge_attention(
    out_a: Float[Array, "B T H V"],
    lse_a: Float32[Array, "B T H"],
    out_b: Float[Array, "B T H V"],
    lse_b: Float32[Array, "B T H"],
) -> tuple[Float[Array, "B T H V"], Float32[Array, "B T H"]]:
    """Attention over the union of two disjoint sets of keys, from the attention over each.

    ``lse = log(exp(lse_a) + exp(lse_b))``, ``out = sum_i exp(lse_i - lse) out_i``; a part that saw
    no key (-inf) counts for nothing, and two such parts give zeros and -inf.
    """
    lse = jnp.logaddexp(lse_a, lse_b)
    finite = jnp.where(lse == -jnp.inf, 0.0, lse)
    out = out_a * jnp.exp(lse_a - finite)[..., None] + out_b * jnp.exp(lse_b - finite)[..., None]
    return out.astype(out_a.dtype), lse
