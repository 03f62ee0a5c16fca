"""Reference implementation of top_k: XLA's, sorted by index."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int, Int32


def top_k(
    scores: Float32[Array, "*batch S"], k: int, *, lengths: Int[Array, "*batch"] | None = None
) -> Int32[Array, "*batch k"]:
    del lengths  # the scores after them are -inf
    S = scores.shape[-1]
    # XLA orders -0 before 0.
    scores = jax.lax.stop_gradient(jnp.where(scores == 0.0, 0.0, scores))
    values, indices = jax.lax.top_k(scores, min(k, S))  # ties go to the lower index
    indices = jnp.sort(jnp.where(values == -jnp.inf, S, indices), axis=-1)
    chosen = jnp.where(indices == S, -1, indices)
    padding = [(0, 0)] * (scores.ndim - 1) + [(0, max(0, k - S))]
    return jnp.pad(chosen, padding, constant_values=-1)
