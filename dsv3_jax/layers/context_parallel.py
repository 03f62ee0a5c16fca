"""Attention to cached tokens that several devices share: each attends to its own, and the parts are
merged by their log-sum-exp (decode context parallelism).

All of them run the same queries, and have the latents of the new tokens, whoever caches them.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.nn import logsumexp
from jaxtyping import Array, Float, Float32, Int

from dsv3_jax.kv_cache import TokenShare
from pallas_kernels import merge_attention, mla_decode
from sharding import Layout

# Of everyone's outputs together, up to which they travel with their log-sum-exps in one collective.
# More are summed, in a second one: 2 / n of the bytes, no array of n parts.
_GATHERED_BYTES = 4 << 20


def attend_share(
    q_latent: Float[Array, "B T H C"],
    q_rope: Float[Array, "B T H R"],
    latent: Float[Array, "B T CR"],
    pages: Float[Array, "P page width"],
    block_tables: Int[Array, "B max_pages"],
    starts: Int[Array, " B"],
    share: TokenShare,
    *,
    scale: float,
) -> tuple[Float[Array, "B T H C"], Float32[Array, "B T H"]]:
    """Absorbed attention of T new tokens a row to those tokens that this device holds, and its
    log-sum-exp: zeros and -inf where it holds none.

    ``mla_decode`` shows each query one cached token more than the query before, but of T new tokens
    a device may hold any. So all queries see the old tokens and the first new one: as heads of one
    query, which the kernels take as they take T queries, reading the cache once. The later ones are
    few, and not read from the cache.

    Args:
      latent: of the new tokens, which are cached already.
      pages, block_tables: this device's.
      starts: tokens a row that all devices together held before.
    """
    B, T, H, _ = q_latent.shape
    out, lse = mla_decode(
        q_latent.reshape(B, 1, T * H, -1),
        q_rope.reshape(B, 1, T * H, -1),
        pages,
        block_tables,
        share.lengths(starts + 1),
        scale=scale,
    )
    out, lse = out.reshape(q_latent.shape), lse.reshape(B, T, H)
    if T == 1:
        return out, lse
    # A page a row, of T - 1 tokens: query t sees t of them.
    later, later_lse = mla_decode(
        q_latent,
        q_rope,
        latent[:, 1:].astype(pages.dtype),
        jnp.arange(B, dtype=jnp.int32)[:, None],
        jnp.full((B,), T - 1, jnp.int32),
        scale=scale,
        implementation="reference",
    )
    return merge_attention(out, lse, later, counted_once(later_lse, share))


def counted_once(lse: Float32[Array, "B T H"], share: TokenShare) -> Float32[Array, "B T H"]:
    """Of attention that all devices have computed: on the others than the first it is to weigh
    nothing."""
    return jnp.where(share.part == 0, lse, -jnp.inf)


def merged(
    out: Float[Array, "B T H V"], lse: Float32[Array, "B T H"], layout: Layout | None
) -> Float[Array, "B T H V"]:
    """Attention to the tokens of all devices, from that of each to its own; the same on all, in
    float32: ``sum_i exp(lse_i - logsumexp_j(lse_j)) out_i``.

    In one collective of (V + 1) H numbers a query, or for many queries two.
    """
    axis = "cached_tokens"
    if layout is None or (parts := layout.num_shards(axis)) == 1:
        return out
    out = out.astype(jnp.float32)
    if parts * 4 * out.size > _GATHERED_BYTES:
        total = logsumexp(layout.all_gather(lse, axis), axis=0)
        return layout.psum(_weighted(out, lse, total), axis)
    everyones = layout.all_gather(jnp.concatenate([out, lse[..., None]], axis=-1), axis)
    outs, lses = everyones[..., :-1], everyones[..., -1]
    return jnp.sum(_weighted(outs, lses, logsumexp(lses, axis=0)), axis=0)


def _weighted(
    out: Float32[Array, "*parts B T H V"],
    lse: Float32[Array, "*parts B T H"],
    total: Float32[Array, "B T H"],
) -> Float32[Array, "*parts B T H V"]:
    # Padding may see no token at all: -inf less -inf is no number.
    return out * jnp.exp(lse - jnp.where(total == -jnp.inf, 0.0, total))[..., None]
