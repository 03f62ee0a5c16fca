"""Fills the page arrays of a cache with what attention stores for random tokens."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from dsv3_jax.config import ModelConfig
from dsv3_jax.kv_cache import PagePool
from dsv3_jax.layers import paged_cache
from pallas_kernels.sparse_index import scaled_pages

PAGES = 1024  # filled at a time, because random bits take more memory than the values


def fill(pool: PagePool, config: ModelConfig) -> PagePool:
    """Returns the pool with random entries in every page. Its arrays are donated."""
    layers = [{**layer} for layer in (*pool.layers, *pool.mtp)]
    for i, layer in enumerate(layers):
        for name, pages in layer.items():
            filling = _filling(name, config, pool.page_size, pages.sharding)
            layer[name] = filling(pages, jnp.int32(i))
    count = len(pool.layers)
    return dataclasses.replace(pool, layers=tuple(layers[:count]), mtp=tuple(layers[count:]))


@functools.lru_cache
def _filling(name: str, config: ModelConfig, page_size: int, sharding: Any) -> Any:
    """Returns a jitted function that fills pages in place."""

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=sharding)
    def fill(pages: Shaped[Array, "P rows width"], seed: jax.Array) -> jax.Array:
        count = min(PAGES, len(pages))
        shape = (count, *pages.shape[1:])

        def fill_some(i: jax.Array, pages: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.key(seed, impl="rbg"), i)
            entries = _entries(key, name, shape, pages.dtype, config, page_size)
            # The last pages may overlap the previous ones.
            return jax.lax.dynamic_update_slice_in_dim(pages, entries, i * count, axis=0)

        return jax.lax.fori_loop(0, -(-len(pages) // count), fill_some, pages)

    return fill


def _entries(
    key: jax.Array,
    name: str,
    shape: tuple[int, ...],
    dtype: Any,
    config: ModelConfig,
    page_size: int,
) -> Shaped[Array, "P rows width"]:
    """Returns the entries of that array for random tokens: normal numbers, in the cache's format.

    The scales of float8 index keys are 1.
    """
    if dtype != jnp.uint8:
        return jax.random.normal(key, shape, dtype)
    if name == "index_key":
        P, rows, width = shape
        D = config.index_head_dim
        assert D is not None
        tokens = P, page_size
        keys = jax.random.normal(key, (*tokens, D), jnp.bfloat16).astype(scaled_pages.KEY_DTYPE)
        entries = scaled_pages.token_bytes(keys, jnp.ones((*tokens, 1), jnp.float32))
        pages = scaled_pages.pages_of(entries)
        return jnp.pad(pages, ((0, 0), (0, rows - pages.shape[1]), (0, width - D)))
    latents = jax.random.normal(key, (*shape[:-1], config.latent_dim), jnp.bfloat16)
    stored = paged_cache.float8_latents(config, latents)
    return jnp.pad(stored, ((0, 0), (0, 0), (0, shape[-1] - stored.shape[-1])))
