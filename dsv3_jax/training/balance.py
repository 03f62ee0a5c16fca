"""Auxiliary-loss-free load balancing (V3 report, section 2.1.2)."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int


def update_bias(
    bias: Float32[Array, " E"], counts: Int[Array, " E"], speed: float
) -> Float32[Array, " E"]:
    """``bias_e += speed * sign(mean load - load_e)``, once a step, from the whole batch's loads.

    The bias steers the choice of experts alone and receives no gradient.
    """
    load = counts.astype(jnp.float32)
    return bias + speed * jnp.sign(jnp.mean(load) - load)


def imbalance(counts: Int[Array, "L E"]) -> Float32[Array, ""]:
    """Largest load over the mean load, averaged over layers; 1 is perfect balance."""
    load = counts.astype(jnp.float32)
    return jnp.mean(jnp.max(load, axis=-1) / jnp.maximum(jnp.mean(load, axis=-1), 1e-9))
