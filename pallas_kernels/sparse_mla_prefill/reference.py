"""Reference implementation of sparse_mla_prefill: each sequence is one page."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.sparse_mla_decode import reference as decode


def sparse_mla_prefill(
    q_latent: Float[Array, "B T H C"],
    q_rope: Float[Array, "B T H R"],
    latents: Float[Array, "B S CR"],
    indices: Int[Array, "B T K"],
    *,
    scale: float,
) -> tuple[Float[Array, "B T H C"], Float32[Array, "B T H"]]:
    one_page_each = jnp.arange(len(latents), dtype=jnp.int32)[:, None]
    return decode.sparse_mla_decode(q_latent, q_rope, latents, one_page_each, indices, scale=scale)
