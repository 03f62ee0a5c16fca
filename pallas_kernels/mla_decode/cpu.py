"""mla_decode for CPUs: reads pages only as far as the longest sequence reaches.

The reference reads the whole block table, which a generation loop sizes for the longest sequence
that it allows. This back-end loops over blocks of pages with a dynamic trip count and merges the
results by their log-sum-exp. It has no gradient, which decoding does not need.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, UInt8

from pallas_kernels.mla_decode import reference
from pallas_kernels.softmax import merge_attention
from pallas_kernels.target import platform

_BLOCK_TOKENS = 256


def mla_decode(
    q_latent: Float[Array, "B T H C"],
    q_rope: Float[Array, "B T H R"],
    pages: Float[Array, "P page width"] | UInt8[Array, "P page bytes"],
    block_tables: Int[Array, "B max_pages"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
) -> tuple[Float[Array, "B T H C"], Float32[Array, "B T H"]]:
    if platform() != "cpu":
        raise NotImplementedError(f"runs on CPUs, this is {platform()}")
    page_size, width = pages.shape[1], block_tables.shape[1]
    block_pages = min(width, max(1, _BLOCK_TOKENS // page_size))
    block, end = block_pages * page_size, width * page_size
    tables = jnp.pad(block_tables, ((0, 0), (0, -width % block_pages)))

    def add_block(
        i: Int[Array, ""], carry: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        table = jax.lax.dynamic_slice_in_dim(tables, i * block_pages, block_pages, axis=1)
        out, lse = reference.attend(
            q_latent, q_rope, pages, table, lengths, first=i * block, end=end, scale=scale
        )
        return merge_attention(*carry, out, lse)

    initial = (
        jnp.zeros(q_latent.shape, jnp.float32),
        jnp.full(q_latent.shape[:-1], -jnp.inf, jnp.float32),
    )
    # A length may count padding past the table's end.
    blocks = jnp.minimum(-(-jnp.max(lengths) // block), tables.shape[1] // block_pages)
    out, lse = jax.lax.fori_loop(0, blocks, add_block, initial)
    return out.astype(q_latent.dtype), lse
