"""Reference implementation of cross_entropy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int


def cross_entropy(
    logits: Float[Array, "M W"], targets: Int[Array, " M"], weights: Float32[Array, " M"]
) -> tuple[Float32[Array, " M"], Float[Array, "M W"]]:
    exact = logits.astype(jnp.float32)
    total = jax.nn.logsumexp(exact, axis=-1)
    nats = total - jnp.take_along_axis(exact, targets[:, None], axis=-1)[:, 0]
    is_target = targets[:, None] == jnp.arange(logits.shape[1])
    gradient = (jnp.exp(exact - total[:, None]) - is_target) * weights[:, None]
    return nats, gradient.astype(logits.dtype)
