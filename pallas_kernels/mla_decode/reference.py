"""Reference implementation of mla_decode: gathers every page of the table, then masks."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, UInt8

from pallas_kernels.hopper.split_kv import Parts
from pallas_kernels.mla_decode.float8_cache import check_width, dequantize_latent
from pallas_kernels.softmax import masked_softmax


def mla_decode(
    q_latent: Float[Array, "B T H C"],
    q_rope: Float[Array, "B T H R"],
    pages: Float[Array, "P page width"] | UInt8[Array, "P page bytes"],
    block_tables: Int[Array, "B max_pages"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
) -> tuple[Float[Array, "B T H C"], Float32[Array, "B T H"]]:
    first, end = jnp.int32(0), block_tables.shape[1] * pages.shape[1]
    out, lse = attend(
        q_latent, q_rope, pages, block_tables, lengths, first=first, end=end, scale=scale
    )
    return out.astype(q_latent.dtype), lse


def mla_decode_parts(
    q_latent: Float[Array, "B T H C"],
    q_rope: Float[Array, "B T H R"],
    pages: Float[Array, "P page width"] | UInt8[Array, "P page bytes"],
    block_tables: Int[Array, "B max_pages"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
) -> tuple[Parts, Float32[Array, "B rows"]]:
    """Implements :func:`pallas_kernels.mla_decode_parts`. It splits no sequence."""
    out, lse = mla_decode(q_latent, q_rope, pages, block_tables, lengths, scale=scale)
    B, T, H, C = out.shape
    partials, partial_lse = jnp.zeros((1, T * H, C)), jnp.zeros((1, T * H))  # of no sequence
    parts = Parts(out.reshape(B, -1, C), partials, partial_lse, jnp.zeros((1, 4), jnp.int32))
    return parts, lse.reshape(B, -1)


def attend(
    q_latent: Float[Array, "B T H C"],
    q_rope: Float[Array, "B T H R"],
    pages: Float[Array, "P page width"] | UInt8[Array, "P page bytes"],
    block_tables: Int[Array, "B some_pages"],
    lengths: Int[Array, " B"],
    *,
    first: Int[Array, ""],
    end: int,
    scale: float,
) -> tuple[Float32[Array, "B T H C"], Float32[Array, "B T H"]]:
    """Attention to the tokens of a slice of the block table, from position ``first`` on, of a table
    that ends at ``end``. Returns ``out`` and the log-sum-exp, both float32."""
    B, T, _, C = q_latent.shape
    columns = C, q_rope.shape[-1]
    if pages.dtype == jnp.uint8:
        check_width(columns, pages.shape[-1])
    # mode="clip": entries past a sequence's length may be anything. They are masked below.
    cached = pages.at[block_tables].get(mode="clip").reshape(B, -1, pages.shape[-1])
    if pages.dtype == jnp.uint8:
        latent_and_rope = dequantize_latent(cached, q_latent.dtype, columns=columns)
        cached = jnp.concatenate(latent_and_rope, axis=-1)
    cached = cached[..., : C + q_rope.shape[-1]]
    s = first + jnp.arange(cached.shape[1])
    visible = jnp.minimum(lengths[:, None] - T + 1 + jnp.arange(T), end)
    # A masked slot may contain anything, even NaN: zero it, because 0 * NaN is NaN.
    cached = jnp.where((s < visible[:, -1:])[..., None], cached, 0)
    q = jnp.concatenate([q_latent, q_rope], axis=-1)
    # The cache is the first operand and is not sliced into latent and rope: faster on a CPU.
    scores = jnp.einsum("bsk,bthk->bths", cached, q, preferred_element_type=jnp.float32)
    probabilities, lse = masked_softmax(scores * scale, (s < visible[..., None])[:, :, None])
    probabilities = probabilities.astype(cached.dtype)
    out = jnp.einsum("bths,bsk->bthk", probabilities, cached, preferred_element_type=jnp.float32)
    return out[..., :C], lse
