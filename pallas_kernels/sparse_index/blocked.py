"""sparse_index in blocks of keys: it reads pages only as far as the longest sequence reaches.

The reference stores a product for every head, query and key: 64 times the result. This back-end
stores those of one block. It has no gradient; training scores keys that are not paged.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, UInt8

from pallas_kernels.sparse_index import reference

_BLOCK_TOKENS = 512


def sparse_index(
    q: Float[Array, "B T J D"],
    weights: Float32[Array, "B T J"],
    pages: Float[Array, "P page width"] | UInt8[Array, "P rows width"],
    block_tables: Int[Array, "B max_pages"],
    lengths: Int[Array, " B"],
    *,
    page_size: int | None = None,
) -> Float32[Array, "B T S"]:
    B, T, _, _ = q.shape
    width, page = block_tables.shape[1], page_size or pages.shape[1]
    block_pages = min(width, max(1, _BLOCK_TOKENS // page))
    block = block_pages * page
    tables = jnp.pad(block_tables, ((0, 0), (0, -width % block_pages)))

    def add_block(i: Int[Array, ""], scores: Float32[Array, "B T S"]) -> Float32[Array, "B T S"]:
        table = jax.lax.dynamic_slice_in_dim(tables, i * block_pages, block_pages, axis=1)
        of_block = reference.score(
            q, weights, pages, table, lengths, page_size=page_size, first=i * block
        )
        return jax.lax.dynamic_update_slice_in_dim(scores, of_block, i * block, axis=2)

    initial = jnp.full((B, T, tables.shape[1] * page), -jnp.inf, jnp.float32)
    # A length may count padding past the table's end.
    blocks = jnp.minimum(-(-jnp.max(lengths) // block), tables.shape[1] // block_pages)
    scores = jax.lax.fori_loop(0, blocks, add_block, initial)
    return scores[..., : width * page]
