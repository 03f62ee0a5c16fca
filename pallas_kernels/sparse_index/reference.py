"""Reference implementation of sparse_index: gathers every key of the table, then masks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, UInt8

from pallas_kernels.sparse_index import scaled_pages


def sparse_index(
    q: Float[Array, "B T J D"],
    weights: Float32[Array, "B T J"],
    pages: Float[Array, "P page width"] | UInt8[Array, "P rows width"],
    block_tables: Int[Array, "B max_pages"],
    lengths: Int[Array, " B"],
    *,
    page_size: int | None = None,
) -> Float32[Array, "B T S"]:
    first = jnp.int32(0)
    return score(q, weights, pages, block_tables, lengths, page_size=page_size, first=first)


def score(
    q: Float[Array, "B T J D"],
    weights: Float32[Array, "B T J"],
    pages: Float[Array, "P page width"] | UInt8[Array, "P rows width"],
    block_tables: Int[Array, "B some_pages"],
    lengths: Int[Array, " B"],
    *,
    page_size: int | None,
    first: Int[Array, ""],
) -> Float32[Array, "B T S"]:
    """Scores the tokens of a slice of the block table.

    Args:
      block_tables: the slice.
      first: position of the slice's first token.
      q, weights, pages, lengths, page_size: as :func:`sparse_index` takes them.
    """
    B, T, _, D = q.shape
    # mode="clip": entries past a sequence's length may be anything. They are masked below.
    keys, scales = pages.at[block_tables].get(mode="clip"), None
    if page_size is not None:
        keys, scales = scaled_pages.split(keys, D, page_size)
        # XLA multiplies no float8 arrays on every platform.
        q, keys = q.astype(jnp.float32), keys.astype(jnp.float32)
    keys = keys.reshape(B, -1, keys.shape[-1])[..., :D]
    products = jnp.einsum("btjd,bsd->btjs", q, keys, preferred_element_type=jnp.float32)
    scores = jnp.einsum("btj,btjs->bts", weights, jax.nn.relu(products))
    if scales is not None:
        scores *= scales.reshape(B, 1, -1)
    s = first + jnp.arange(keys.shape[1])
    visible = lengths[:, None] - T + 1 + jnp.arange(T)
    return jnp.where(s < visible[..., None], scores, -jnp.inf)
