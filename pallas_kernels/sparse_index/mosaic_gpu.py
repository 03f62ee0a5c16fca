"""sparse_index on Hopper GPUs: keys of 128 columns in pages of 64 tokens, bfloat16 or float8."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, UInt8

from pallas_kernels.hopper import require_hopper
from pallas_kernels.sparse_index.mosaic_gpu_kernel import (
    COLUMNS,
    PAGE,
    SCALED_ROWS,
    Config,
    plan,
    score,
)
from pallas_kernels.sparse_index.scaled_pages import KEY_DTYPE


def sparse_index(
    q: Float[Array, "B T J D"],
    weights: Float32[Array, "B T J"],
    pages: Float[Array, "P page width"] | UInt8[Array, "P rows width"],
    block_tables: Int[Array, "B max_pages"],
    lengths: Int[Array, " B"],
    *,
    page_size: int | None = None,
    config: Config | None = None,
    interpret: Any = None,
) -> Float32[Array, "B T S"]:
    """Implements :func:`pallas_kernels.sparse_index`. It has no gradient.

    The tensor cores sum products of float8 with fewer bits than float32 has, about 13.

    Args:
      page_size: see there.
      config: tuning parameters, by default :func:`plan`'s.
      interpret: parameters of Mosaic GPU's interpreter, to run without a GPU.
    """
    require_hopper(interpret)
    B, T, J, D = q.shape
    of_pages = {jnp.dtype(jnp.bfloat16): jnp.bfloat16, jnp.dtype(KEY_DTYPE): jnp.uint8}
    if pages.dtype != of_pages.get(q.dtype):
        raise NotImplementedError(
            "takes queries and pages of bfloat16, or queries of float8_e4m3fn and pages of uint8,"
            f" got {q.dtype} and {pages.dtype}"
        )
    if (shape := (page_size or pages.shape[1], D)) != (PAGE, COLUMNS):
        raise NotImplementedError(
            f"takes pages of {PAGE} tokens and keys of {COLUMNS} columns, got {shape}"
        )
    if page_size is not None and pages.shape[1] < SCALED_ROWS:
        raise NotImplementedError(
            f"takes {SCALED_ROWS} rows of keys and scales, got {pages.shape[1]}"
        )
    if J % 8 or not 0 < J <= 256:
        raise NotImplementedError(f"takes 8 to 256 heads in multiples of 8, got {J}")
    if 0 in (B, T, *pages.shape, *block_tables.shape):
        raise NotImplementedError(f"takes no empty arrays, got pages {pages.shape}")
    if (row := pages.shape[2] * pages.dtype.itemsize) % 128:
        raise NotImplementedError(f"takes tokens of a multiple of 128 bytes, got {row}")
    config = config or plan(B, T, J, block_tables.shape[1], q.dtype.itemsize)
    tokens = B * -(-T // config.queries) * (block_tables.shape[1] + 1) * PAGE
    if config.pages is None and tokens >= 2**30:
        raise NotImplementedError(
            f"equal shares: takes fewer than 2^30 tokens in all, got {tokens}"
        )
    # Groups of queries are scored together. Pad to whole groups.
    padded = -T % (config.queries * config.groups)
    q = jnp.pad(q, ((0, 0), (0, padded), (0, 0), (0, 0)))
    weights = jnp.pad(weights, ((0, 0), (0, padded), (0, 0)))
    return score(
        q.reshape(B, -1, config.queries * J, D),
        weights.reshape(B, -1, config.queries, J),
        pages,
        block_tables.astype(jnp.int32),
        lengths.astype(jnp.int32),
        queries=T,
        config=config,
        interpret=interpret,
    )
