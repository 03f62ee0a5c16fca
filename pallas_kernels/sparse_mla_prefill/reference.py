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
    B, S, width = latents.shape
    one_page_each = jnp.arange(B, dtype=jnp.int32)[:, None]
    slots = decode.token_slots(one_page_each, indices, S)
    # The gradient of a token is the sum over all queries that attend to it: in float32, because a
    # bfloat16 sum stops growing after a few hundred of them.
    tokens = latents.reshape(-1, width).astype(jnp.float32)
    return decode.attend(q_latent, q_rope, tokens, slots, scale=scale, dtype=latents.dtype)
