"""Attention of new tokens to the cached ones: in groups, by heads, and on several devices.

*Groups.* Absorbed attention of many new tokens per sequence, such as those of a prefill chunk,
treats groups of them like sequences of their own in a decode step: a group ends with its own last
token, so that it reads no more of the cache than it sees. Groups of all chunks and lengths are
spread evenly over the device.

*By heads.* Expanded attention computes a key and a value per head from the cached tokens, block by
block.

*Decode context parallelism.* Where devices share the cached tokens of a sequence, each attends to
its own, and the partial results are merged by their log-sum-exp. All devices run the same queries
and know the latents of all new tokens, whichever device caches them.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.nn import logsumexp
from jaxtyping import Array, Bool, Float, Float32, Int, Shaped, UInt8

from dsv3_jax.layers.paged_cache import LayerCache, PageShard
from pallas_kernels import merge_attention, mla_decode, mla_prefill
from sharding import Layout

# ---- groups --------------------------------------------------------------------------------------

GROUP_TOKENS = 8
"""Tokens of a group. With 16 heads they fill two tiles of the Hopper kernels. It is more than a
decode step has, drafts included."""


def num_groups(tokens: int) -> int:
    """Returns the number of groups of a sequence with ``tokens`` new tokens."""
    return -(-tokens // GROUP_TOKENS) if tokens > GROUP_TOKENS else 1


def split_groups(x: Shaped[Array, "B T *rest"]) -> Shaped[Array, "groups t *rest"]:
    """Returns the groups of all sequences, padded at the end of each sequence."""
    B, T = x.shape[:2]
    if (groups := num_groups(T)) == 1:
        return x
    padding = ((0, 0), (0, groups * GROUP_TOKENS - T), *((0, 0),) * (x.ndim - 2))
    return jnp.pad(x, padding).reshape(B * groups, GROUP_TOKENS, *x.shape[2:])


def join_groups(x: Shaped[Array, "groups t *rest"], tokens: int) -> Shaped[Array, "B T *rest"]:
    """Returns the sequences whose groups are ``x``."""
    if (groups := num_groups(tokens)) == 1:
        return x
    whole = x.reshape(-1, groups * x.shape[1], *x.shape[2:])
    return whole[:, :tokens]


def group_tables(
    block_tables: Int[Array, "B max_pages"], starts: Int[Array, " B"], valid: Bool[Array, "B T"]
) -> tuple[Int[Array, "groups max_pages"], Int[Array, " groups"]]:
    """Returns the pages of each group, and its length with its own tokens, padding included. A
    group of padding alone has length 0."""
    T = valid.shape[1]
    if (groups := num_groups(T)) == 1:
        # Padded queries count too, so that query t sees exactly the t tokens before it.
        return block_tables, starts + T
    first = GROUP_TOKENS * jnp.arange(groups)
    # The tokens of a sequence come before its padding.
    lengths = jnp.where(valid[:, ::GROUP_TOKENS], starts[:, None] + first + GROUP_TOKENS, 0)
    return jnp.repeat(block_tables, groups, axis=0), lengths.reshape(-1)


# ---- by heads ------------------------------------------------------------------------------------

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
        q, *keys_values(new), jnp.zeros((B,), jnp.int32), jnp.full((B,), T, jnp.int32), scale=scale
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


# ---- several devices -----------------------------------------------------------------------------

# Up to this many bytes, of all devices together, outputs and log-sum-exps travel in one all-gather.
# Larger outputs are summed in a second collective, with 2 / n of the bytes and no array of n parts.
_GATHERED_BYTES = 4 << 20


def attend_local(
    q_latent: Float[Array, "B T H C"],
    q_rope: Float[Array, "B T H R"],
    latent: Float[Array, "B T CR"] | UInt8[Array, "B T bytes"],
    pages: Float[Array, "P page width"] | UInt8[Array, "P page bytes"],
    block_tables: Int[Array, "B max_pages"],
    starts: Int[Array, " B"],
    shard: PageShard,
    *,
    scale: float,
) -> tuple[Float[Array, "B T H C"], Float32[Array, "B T H"]]:
    """Returns absorbed attention of T new tokens per sequence to the tokens on this device.

    The second result is its log-sum-exp. Without a token on this device, they are 0 and -inf.

    ``mla_decode`` shows each query one cached token more than the query before, but any of the T
    new tokens may be on this device. Therefore all queries see the old tokens and the first new
    one, as T * H heads of one query, which reads the cache once like T queries. The other new
    tokens are few and are not read from the cache.

    Args:
      latent: what the cache stores for the new tokens. They are cached already.
      pages: the page arrays on this device.
      block_tables: numbers of each sequence's pages on this device.
      starts: number of tokens per sequence that all devices together had cached before.
    """
    B, T, H, _ = q_latent.shape
    out, lse = mla_decode(
        q_latent.reshape(B, 1, T * H, -1),
        q_rope.reshape(B, 1, T * H, -1),
        pages,
        block_tables,
        shard.local_lengths(starts + 1),
        scale=scale,
    )
    out, lse = out.reshape(q_latent.shape), lse.reshape(B, T, H)
    if T == 1:
        return out, lse
    # One page of T - 1 tokens per sequence: query t sees t of them.
    later, later_lse = mla_decode(
        q_latent,
        q_rope,
        latent[:, 1:].astype(pages.dtype),
        jnp.arange(B, dtype=jnp.int32)[:, None],
        jnp.full((B,), T - 1, jnp.int32),
        scale=scale,
        implementation="reference",
    )
    return merge_attention(out, lse, later, weigh_once(later_lse, shard))


def weigh_once(lse: Float32[Array, "B T H"], shard: PageShard) -> Float32[Array, "B T H"]:
    """Returns the log-sum-exp of attention that every device computed, so that it counts once: on
    all devices but the first it is -inf."""
    return jnp.where(shard.shard == 0, lse, -jnp.inf)


def merge_devices(
    out: Float[Array, "B T H V"], lse: Float32[Array, "B T H"], layout: Layout | None
) -> Float[Array, "B T H V"]:
    """Returns attention to the tokens of all devices, from each device's attention to its own.

    It is ``sum_i exp(lse_i - logsumexp_j(lse_j)) out_i`` in float32, and the same on all devices.
    It takes one collective of (V + 1) H numbers per query, or two collectives for many queries.
    """
    axis = "cached_tokens"
    if layout is None or (parts := layout.num_shards(axis)) == 1:
        return out
    out = out.astype(jnp.float32)
    if parts * 4 * out.size > _GATHERED_BYTES:
        total = logsumexp(layout.all_gather(lse, axis), axis=0)
        return layout.psum(_weighted(out, lse, total), axis)
    gathered = layout.all_gather(jnp.concatenate([out, lse[..., None]], axis=-1), axis)
    outs, lses = gathered[..., :-1], gathered[..., -1]
    return jnp.sum(_weighted(outs, lses, logsumexp(lses, axis=0)), axis=0)


def _weighted(
    out: Float32[Array, "*parts B T H V"],
    lse: Float32[Array, "*parts B T H"],
    total: Float32[Array, "B T H"],
) -> Float32[Array, "*parts B T H V"]:
    # Padding may see no token at all: -inf less -inf is NaN.
    return out * jnp.exp(lse - jnp.where(total == -jnp.inf, 0.0, total))[..., None]
