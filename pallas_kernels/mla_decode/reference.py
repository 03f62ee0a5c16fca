"""The specification of mla_decode: gathers every page of the table, then masks."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.softmax import masked_softmax


def mla_decode(
    q_latent: Float[Array, "B T H C"],
    q_rope: Float[Array, "B T H R"],
    pages: Float[Array, "P page C+R"],
    block_tables: Int[Array, "B max_pages"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
) -> tuple[Float[Array, "B T H C"], Float32[Array, "B T H"]]:
    out, lse = attend(
        q_latent, q_rope, pages, block_tables, lengths, first=jnp.int32(0), scale=scale
    )
    return out.astype(q_latent.dtype), lse


def attend(
    q_latent: Float[Array, "B T H C"],
    q_rope: Float[Array, "B T H R"],
    pages: Float[Array, "P page C+R"],
    block_tables: Int[Array, "B some_pages"],
    lengths: Int[Array, " B"],
    *,
    first: Int[Array, ""],
    scale: float,
) -> tuple[Float32[Array, "B T H C"], Float32[Array, "B T H"]]:
    """Attention to the tokens of some of the pages, the earliest of which is token ``first``."""
    B, T, _, C = q_latent.shape
    # mode="clip": entries past a row's length may be anything, and are masked below.
    cached = pages.at[block_tables].get(mode="clip").reshape(B, -1, pages.shape[-1])
    latent, k_rope = cached[..., :C], cached[..., C:]
    f32 = jnp.float32
    scores = jnp.einsum("bthc,bsc->bths", q_latent, latent, preferred_element_type=f32)
    scores += jnp.einsum("bthr,bsr->bths", q_rope, k_rope, preferred_element_type=f32)
    s = first + jnp.arange(cached.shape[1])
    visible = lengths[:, None] - T + 1 + jnp.arange(T)
    probabilities, lse = masked_softmax(scores * scale, (s < visible[..., None])[:, :, None])
    # A masked slot may hold anything, NaN included: zero it, for 0 * NaN is NaN.
    latent = jnp.where((s < lengths[:, None])[..., None], latent, 0)
    out = jnp.einsum(
        "bths,bsc->bthc", probabilities.astype(latent.dtype), latent, preferred_element_type=f32
    )
    return out, lse
