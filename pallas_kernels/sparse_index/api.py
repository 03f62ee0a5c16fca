"""Scores of the lightning indexer over a paged cache of its keys."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, UInt8

from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.sparse_index import mosaic_gpu, reference

BACKENDS = {
    "mosaic_gpu": mosaic_gpu.sparse_index,
    "blocked": reference.blocked,
    "reference": reference.sparse_index,
}


def sparse_index(
    q: Float[Array, "B T J D"],
    weights: Float32[Array, "B T J"],
    pages: Float[Array, "P page width"] | UInt8[Array, "P rows width"],
    block_tables: Int[Array, "B max_pages"],
    lengths: Int[Array, " B"],
    *,
    page_size: int | None = None,
    implementation: Implementation = None,
) -> Float32[Array, "B T S"]:
    """Scores every cached token for each query (DeepSeek-V3.2 report, equation 1).

    All J heads of a query share one key per token. Query t sees ``p = lengths - T + 1 + t``
    tokens::

        score[t, s] = sum_j weights[t, j] * relu(q[t, j] . k[s])      s < p
        score[t, s] = -inf                                            otherwise

    Args:
      q: queries of the indexer, rotated. If they are float8, the caller multiplies their scales
        into ``weights``.
      weights: weight of each head. They may be negative.
      pages: the layer's indexer keys. Token s of sequence b is in page ``block_tables[b, s //
        page]`` at slot ``s % page``. Columns past D are ignored. If uint8, the keys are float8 and
        each page has their scales too, see :mod:`~pallas_kernels.sparse_index.scaled_pages`.
      block_tables: page numbers. Entries past a sequence's length may be anything.
      lengths: cached tokens per sequence, *including* its T queries, as for ``mla_decode``.
      page_size: tokens per page of uint8. Other pages have one row per token.
      implementation: back-end name, or names in order of preference; see ``dispatch``.

    Returns:
      Scores of the ``S = max_pages * page`` tokens of each table. Products of float32 or bfloat16
      are summed in float32.

    Raises:
      ValueError: pages of uint8 have no ``page_size``, or ``implementation`` names no back-end.
      NotImplementedError: no selected back-end takes these arguments.
    """
    if (page_size is None) != (pages.dtype != jnp.uint8):
        raise ValueError(
            f"page_size: expected it with pages of uint8 only, got {page_size} with {pages.dtype}"
        )
    arrays = q, weights, pages, block_tables, lengths
    return dispatch("sparse_index", BACKENDS, implementation, *arrays, page_size=page_size)
