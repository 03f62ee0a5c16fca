"""Sparse latent attention in plain JAX: gathers the tokens of some queries at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int, UInt8

from pallas_kernels.mla_decode.float8_cache import check_width, dequantize_latent
from pallas_kernels.softmax import masked_softmax

_QUERIES = 16
"""Queries whose tokens are gathered at a time: 75 MB in bfloat16 for K = 2,048 tokens of 576
numbers, converted to float32."""


def sparse_mla_decode(
    q_latent: Float[Array, "B T H C"],
    q_rope: Float[Array, "B T H R"],
    pages: Float[Array, "P page width"] | UInt8[Array, "P page bytes"],
    block_tables: Int[Array, "B max_pages"],
    indices: Int[Array, "B T K"],
    *,
    scale: float,
) -> tuple[Float[Array, "B T H C"], Float32[Array, "B T H"]]:
    page_size, width = pages.shape[1:]
    if pages.dtype == jnp.uint8:
        check_width((q_latent.shape[-1], q_rope.shape[-1]), width)
    slots = token_slots(block_tables, indices, page_size)
    return attend(q_latent, q_rope, pages.reshape(-1, width), slots, scale=scale)


def sparse_mla_prefill(
    q_latent: Float[Array, "B T H C"],
    q_rope: Float[Array, "B T H R"],
    latents: Float[Array, "B S CR"],
    indices: Int[Array, "B T K"],
    *,
    scale: float,
) -> tuple[Float[Array, "B T H C"], Float32[Array, "B T H"]]:
    """Each sequence is one page."""
    B, S, width = latents.shape
    one_page_each = jnp.arange(B, dtype=jnp.int32)[:, None]
    slots = token_slots(one_page_each, indices, S)
    # The gradient of a token is the sum over all queries that attend to it: in float32, because a
    # bfloat16 sum stops growing after a few hundred of them.
    tokens = latents.reshape(-1, width).astype(jnp.float32)
    return attend(q_latent, q_rope, tokens, slots, scale=scale, dtype=latents.dtype)


def token_slots(
    block_tables: Int[Array, "B max_pages"], indices: Int[Array, "B T K"], page_size: int
) -> Int[Array, "B T K"]:
    """Returns ``page number * page_size + slot`` of the tokens at these positions; -1 stays -1."""
    (B, T, K), number = indices.shape, indices // page_size
    pages = jnp.take_along_axis(block_tables, number.reshape(B, T * K), axis=1, mode="clip")
    slots = pages.reshape(B, T, K) * page_size + indices % page_size
    return jnp.where(indices < 0, -1, slots)


def attend(
    q_latent: Float[Array, "B T H C"],
    q_rope: Float[Array, "B T H R"],
    tokens: Float[Array, "N width"] | UInt8[Array, "N bytes"],
    slots: Int[Array, "B T K"],
    *,
    scale: float,
    dtype: DTypeLike | None = None,
) -> tuple[Float[Array, "B T H C"], Float32[Array, "B T H"]]:
    """Attention of each query to the tokens in its slots. A slot of -1 stands for no token.

    Args:
      dtype: dtype to which gathered tokens are rounded, by default their own. The gradient of
        ``tokens`` is summed over all queries in the dtype of ``tokens``.
    """
    B, T, H, C = q_latent.shape
    q = jnp.concatenate([q_latent, q_rope], axis=-1).reshape(B * T, H, -1)

    # Without the checkpoint, the gradient would store the gathered tokens of every query.
    @jax.checkpoint
    def one_query(
        query: tuple[Float[Array, "H CR"], Int[Array, " K"]],
    ) -> tuple[Float[Array, "H C"], Float32[Array, " H"]]:
        q, slots = query
        gathered = tokens.at[slots].get(mode="clip")
        if tokens.dtype == jnp.uint8:
            columns = C, q.shape[-1] - C
            latent_and_rope = dequantize_latent(gathered, q.dtype, columns=columns)
            gathered = jnp.concatenate(latent_and_rope, axis=-1)
        gathered = gathered.astype(dtype or gathered.dtype)
        is_token = slots >= 0
        # The slot that -1 leads to may contain anything, even NaN: zero it, because 0 * NaN is NaN.
        gathered = jnp.where(is_token[:, None], gathered[:, : q.shape[-1]], 0)
        scores = jnp.einsum("hc,kc->hk", q, gathered, preferred_element_type=jnp.float32)
        probabilities, lse = masked_softmax(scores * scale, is_token[None])
        values = gathered[:, :C]
        out = jnp.einsum(
            "hk,kc->hc",
            probabilities.astype(gathered.dtype),
            values,
            preferred_element_type=jnp.float32,
        )
        return out.astype(q.dtype), lse

    queries = q, slots.reshape(B * T, -1)
    if B * T <= _QUERIES:
        out, lse = jax.vmap(one_query)(queries)
    else:
        out, lse = jax.lax.map(one_query, queries, batch_size=_QUERIES)
    return out.reshape(B, T, H, C), lse.reshape(B, T, H)
