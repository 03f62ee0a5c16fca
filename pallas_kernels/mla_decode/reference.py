"""The specification of mla_decode: gathers every page of the table, then masks."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.softmax import masked_softmax


def mla_decode(
    q_latent: Float[Array, "B T H C"],
    q_rope: Float[Array, "B T H R"],
    pages: Float[Array, "P page C+R"],
    block_tables: Int[Array, "B max_pages"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
) -> tuple[Float[Array, "B T H C"], Float[Array, "B T H"]]:
    B, T, _, C = q_latent.shape
    # mode="clip": entries past a row's length may be anything, and are masked below.
    cached = pages.at[block_tables].get(mode="clip").reshape(B, -1, pages.shape[-1])
    latent, k_rope = cached[..., :C], cached[..., C:]
    f32 = jnp.float32
    scores = jnp.einsum("bthc,bsc->bths", q_latent, latent, preferred_element_type=f32)
    scores += jnp.einsum("bthr,bsr->bths", q_rope, k_rope, preferred_element_type=f32)
    visible = lengths[:, None] - T + 1 + jnp.arange(T)
    mask = jnp.arange(cached.shape[1]) < visible[..., None]
    probabilities, lse = masked_softmax(scores * scale, mask[:, :, None])
    # A masked slot may hold anything, NaN included: zero it, for 0 * NaN is NaN.
    latent = jnp.where((jnp.arange(cached.shape[1]) < lengths[:, None])[..., None], latent, 0)
    out = jnp.einsum(
        "bths,bsc->bthc", probabilities.astype(latent.dtype), latent, preferred_element_type=f32
    )
    return out.astype(q_latent.dtype), lse
