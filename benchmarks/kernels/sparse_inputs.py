"""Random inputs of the cases of sparse attention as JAX arrays, generated on the device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.sparse_shapes import (
    INDEX_COLUMNS,
    INDEX_HEADS,
    LATENT,
    PAGE,
    ROPE,
    Index,
    SparseAttention,
    SparseCase,
    TopK,
)
from pallas_kernels import quantize_latent
from pallas_kernels.sparse_index.scaled_pages import pages_of, token_bytes

Arrays = dict[str, jax.Array]
Host = dict[str, np.ndarray]


def host(case: SparseCase, seed: int) -> Host:
    """Returns the arrays made by NumPy: block tables with pages in random order, and lengths."""
    if isinstance(case, TopK) or case.op == "sparse_mla_prefill":
        return {}
    per_row = -(-case.cached // PAGE)
    order = np.random.default_rng(seed).permutation(case.rows * per_row)
    arrays: Host = {"block_tables": order.reshape(case.rows, per_row).astype(np.int32)}
    if isinstance(case, Index):
        arrays["lengths"] = np.full(case.rows, case.cached, np.int32)
    return arrays


def build(case: SparseCase, key: jax.Array, host_arrays: Arrays) -> Arrays:
    """Returns the op's arguments. To be traced."""
    keys = jax.random.split(key, 4)

    def normal(i: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jax.random.normal(keys[i], shape, jnp.bfloat16).astype(dtype)

    B = case.rows
    if isinstance(case, TopK):
        return {"scores": jax.random.normal(keys[0], (B, case.columns), jnp.float32)}
    pages, T = B * -(-case.cached // PAGE), case.queries
    if isinstance(case, Index):
        scales = jax.random.uniform(keys[3], (pages, PAGE, 1), jnp.float32, 0.5, 2.0)
        index_keys = normal(2, pages, PAGE, INDEX_COLUMNS, dtype=jnp.float8_e4m3fn)
        return host_arrays | {
            "q": normal(0, B, T, INDEX_HEADS, INDEX_COLUMNS, dtype=jnp.float8_e4m3fn),
            "weights": normal(1, B, T, INDEX_HEADS, dtype=jnp.float32),
            "pages": pages_of(token_bytes(index_keys, scales)),
        }
    arrays = {
        "q_latent": normal(0, B, T, case.heads, LATENT),
        "q_rope": normal(1, B, T, case.heads, ROPE),
        "indices": spread_indices(case, keys[3]),
    }
    if case.op == "sparse_mla_prefill":
        return arrays | {"latents": normal(2, B, case.cached, LATENT + ROPE)}
    cached = normal(2, pages, PAGE, LATENT + ROPE)
    if case.dtype == "fp8":
        cached = quantize_latent(cached[..., :LATENT], cached[..., LATENT:])
    return arrays | host_arrays | {"pages": cached}


def spread_indices(case: SparseAttention, key: jax.Array) -> jax.Array:
    """Returns one random token of each of ``topk`` equal parts of what a query sees, [B, T, K].

    A query that sees fewer tokens has all of them, and -1.
    """
    B, T, K = case.rows, case.queries, case.topk
    visible = (case.cached - T + 1 + jnp.arange(T))[:, None]
    width = jnp.maximum(visible // K, 1)
    within = jnp.floor(jax.random.uniform(key, (B, T, K)) * width).astype(jnp.int32)
    index = jnp.arange(K) * width + jnp.minimum(within, width - 1)
    return jnp.where(index < visible, index, -1).astype(jnp.int32)


def options(case: SparseCase) -> dict[str, Any]:
    """Returns the op's keyword arguments that are not arrays."""
    if isinstance(case, TopK):
        return {"k": case.k}
    if isinstance(case, Index):
        return {"page_size": PAGE}
    return {"scale": 192**-0.5} if isinstance(case, SparseAttention) else {}
