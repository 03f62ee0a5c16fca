"""Decode context parallelism: attention to cached tokens that several devices share.

Each device attends to its own tokens, and the partial results are merged by their log-sum-exp. All
devices run the same queries and know the latents of all new tokens, whichever device caches them.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.nn import logsumexp
from jaxtyping import Array, Float, Float32, Int, UInt8

from dsv3_jax.layers.paged_cache import PageShard
from pallas_kernels import merge_attention, mla_decode
from sharding import Layout

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
      pages, block_tables: the pages on this device.
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
    """Returns the log-sum-exp of attention that every device computed, so that it counts once.

    On all devices but the first it becomes -inf.
    """
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
