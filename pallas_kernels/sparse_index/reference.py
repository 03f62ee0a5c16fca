"""Reference implementation of sparse_index: gathers every key of the table, then masks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int


def sparse_index(
    q: Float[Array, "B T J D"],
    weights: Float32[Array, "B T J"],
    pages: Float[Array, "P page width"],
    block_tables: Int[Array, "B max_pages"],
    lengths: Int[Array, " B"],
    *,
    scales: Float32[Array, "P page scale_width"] | None = None,
) -> Float32[Array, "B T S"]:
    return score(q, weights, pages, block_tables, lengths, scales=scales, first=jnp.int32(0))


def score(
    q: Float[Array, "B T J D"],
    weights: Float32[Array, "B T J"],
    pages: Float[Array, "P page width"],
    block_tables: Int[Array, "B some_pages"],
    lengths: Int[Array, " B"],
    *,
    scales: Float32[Array, "P page scale_width"] | None,
    first: Int[Array, ""],
) -> Float32[Array, "B T S"]:
    """Scores the tokens of a slice of the block table.

    Args:
      block_tables: the slice.
      first: position of the slice's first token.
      q, weights, pages, lengths, scales: as :func:`sparse_index` takes them.
    """
    B, T, _, D = q.shape
    # mode="clip": entries past a sequence's length may be anything. They are masked below.
    keys = pages.at[block_tables].get(mode="clip").reshape(B, -1, pages.shape[-1])[..., :D]
    if scales is not None:  # XLA multiplies no float8 arrays on every platform
        q, keys = q.astype(jnp.float32), keys.astype(jnp.float32)
    products = jnp.einsum("btjd,bsd->btjs", q, keys, preferred_element_type=jnp.float32)
    scores = jnp.einsum("btj,btjs->bts", weights, jax.nn.relu(products))
    if scales is not None:
        of_keys = scales.at[block_tables].get(mode="clip").reshape(B, -1, scales.shape[-1])
        scores *= of_keys[:, None, :, 0]
    s = first + jnp.arange(keys.shape[1])
    visible = lengths[:, None] - T + 1 + jnp.arange(T)
    return jnp.where(s < visible[..., None], scores, -jnp.inf)
