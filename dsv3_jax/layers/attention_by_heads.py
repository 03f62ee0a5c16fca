"""Attention to cached tokens with a key and a value per head, block by block."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, UInt8

from dsv3_jax.layers.context_parallel import weigh_once
from dsv3_jax.layers.paged_cache import LayerCache, PageShard
from pallas_kernels import merge_attention, mla_prefill

# Cached tokens, of all sequences together, that a prefill chunk expands at a time: 335 MB of keys
# and values in DeepSeek-V3. With fewer blocks, a float32 result is read and written less often.
_CONTEXT_TOKENS = 4096


def attend_by_heads(
    q: Float[Array, "B T H K"],
    new: Float[Array, "B T columns"] | UInt8[Array, "B T bytes"],
    pages: Float[Array, "P page width"] | UInt8[Array, "P page width"],
    cache: LayerCache,
    shard: PageShard,
    keys_values: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    *,
    scale: float,
    block_tokens: int | None = None,
) -> tuple[Float[Array, "B T H V"], Float32[Array, "B T H"]]:
    """Returns attention with a key and a value per head, and its log-sum-exp.

    The new tokens attend to each other, then, block by block, to the tokens that were cached
    before on this device.

    Args:
      new: what ``pages`` store for the new tokens.
      keys_values: returns every head's keys [B, S, H, K] and values [B, S, H, V] from what the
        pages store for S tokens, [B, S, columns].
      scale: factor of the scores.
      block_tokens: cached tokens per block, of all sequences together. None: the number for a
        prefill chunk.
    """
    B, T, _, _ = q.shape
    page_size = cache.page_size
    out, lse = mla_prefill(
        q,
        *keys_values(new),
        jnp.zeros((B,), jnp.int32),
        jnp.full((B,), T, jnp.int32),
        scale=scale,
    )
    lse = weigh_once(lse, shard)
    max_pages = cache.block_tables.shape[1]
    most_pages = (block_tokens or _CONTEXT_TOKENS) // (B * page_size)
    block_pages = min(max(most_pages, 1), max_pages)
    block = block_pages * page_size
    tables = jnp.pad(cache.block_tables, ((0, 0), (0, -max_pages % block_pages)))
    # Tokens past the capacity are not cached; without a bound the last pages would count twice.
    lengths = jnp.minimum(shard.local_lengths(cache.starts), max_pages * page_size)
    after_block = jnp.full((B,), block, jnp.int32)  # all queries come after the whole block

    def add_block(i: Int[Array, ""], carry: tuple[jax.Array, jax.Array]):
        table = jax.lax.dynamic_slice_in_dim(tables, i * block_pages, block_pages, axis=1)
        cached = pages[table][..., : new.shape[-1]].reshape(B, block, -1)
        block_lengths = jnp.clip(lengths - i * block, 0, block)
        keys, values = keys_values(cached.astype(new.dtype))
        out, lse = mla_prefill(q, keys, values, after_block, block_lengths, scale=scale)
        return merge_attention(*carry, out.astype(jnp.float32), lse)

    blocks = -(-jnp.max(lengths) // block)

    def with_context(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
        total, lse = jax.lax.fori_loop(0, blocks, add_block, (out.astype(jnp.float32), lse))
        return total.astype(out.dtype), lse

    # The first chunk of a prompt has no context, and then needs no float32 copy.
    return jax.lax.cond(blocks > 0, with_context, lambda *none: none, out, lse)
