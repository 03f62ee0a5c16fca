"""Load balancing of experts: by biases, without a loss, and a small loss a sequence beside it."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float32, Int

from dsv3_jax.layers.moe import RoutingStats


def update_bias(
    bias: Float32[Array, " E"], counts: Int[Array, " E"], speed: ArrayLike
) -> Float32[Array, " E"]:
    """``bias_e += speed * sign(mean load - load_e)``, once a step, from the whole batch's loads.

    The bias steers the choice of experts alone and receives no gradient (V3 report, section 2.1.2).
    """
    load = counts.astype(jnp.float32)
    return bias + speed * jnp.sign(jnp.mean(load) - load)


def imbalance(counts: Int[Array, "L E"]) -> Float32[Array, ""]:
    """Largest load over the mean load, averaged over layers; 1 is perfect balance, or no layers."""
    if counts.shape[0] == 0:
        return jnp.float32(1)
    load = counts.astype(jnp.float32)
    return jnp.mean(jnp.max(load, axis=-1) / jnp.maximum(jnp.mean(load, axis=-1), 1e-9))


def sequence_balance(stats: RoutingStats, sequences: int) -> Float32[Array, ""]:
    """Mean over sequences of ``sum_i f_i P_i``, one MoE layer's (V3 report, equations 17 to 20).

    In a sequence of T tokens, ``f_i = E / (K T) * (tokens that chose expert i)`` and ``P_i`` is the
    mean over its tokens of ``s_i / sum_j s_j``. It is 1 when either is even. The gradient flows
    through P alone; a choice has none.

    Choices are those that were made, by biased scores within the kept groups. The report's equation
    18 writes the K best unbiased scores, which is the same only without biases and groups.

    Args:
      stats: tokens in order, those of a sequence together; all sequences equally long.
    """
    E, K = stats.scores.shape[-1], stats.experts.shape[-1]
    scores = stats.scores.reshape(sequences, -1, E)
    experts = stats.experts.reshape(sequences, -1)
    # Compared and not scattered: on a mesh, a scatter of every sequence goes to every device.
    counts = jnp.sum(experts[..., None] == jnp.arange(E), axis=1, dtype=jnp.float32)
    fractions = counts * (E / (K * scores.shape[1]))
    # All of a token's sigmoids may underflow, but the square of this bound, in the gradient, not.
    shares = scores / jnp.maximum(jnp.sum(scores, axis=-1, keepdims=True), 1e-12)
    return jnp.mean(jnp.sum(fractions * jnp.mean(shares, axis=1), axis=-1))
