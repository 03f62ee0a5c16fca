"""One layer's part of the paged KV cache: its page arrays, and the writing of new tokens to them.

Token s of a sequence is cached in page ``block_table[s // page_size]`` at slot ``s % page_size``.
All arrays of a layer, and all layers, use the same page numbers.

A scaled array has a float8 value per number and a float32 scale per token. Its pages are uint8: the
values of all tokens of a page, then their scales, see
:mod:`pallas_kernels.sparse_index.scaled_pages`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt8

from dsv3_jax.config import ModelConfig
from pallas_kernels import dequantize_latent, float8_token_bytes, page_width, quantize_latent
from pallas_kernels.sparse_index.scaled_pages import SCALE_BYTES, padded_rows, scale_rows
from sharding import Layout

Form = Literal["expanded", "absorbed"]
"""Order of the sums of latent attention, see :mod:`dsv3_jax.layers.attention`."""

PAGE_AXES = (("batch", "cached_tokens"),)
"""Logical axes of a page array. Its first dimension, the pages, is sharded like the sequences, and
within them like their tokens."""


class CachedArray(NamedTuple):
    """Description of one page array: what it stores for each token."""

    width: int
    """Numbers per token, without a scale."""
    dtype: DTypeLike
    """That of the array. A scaled one is uint8."""
    is_scaled: bool = False
    """Whether each token has a float32 scale, after the values of all tokens of its page."""

    def rows(self, page_size: int) -> int:
        """Returns the number of rows of a page: one per token, and those of the scales."""
        return page_size + (scale_rows(page_size, self.width) if self.is_scaled else 0)

    def page_shape(self, page_size: int, platform: str) -> tuple[int, int]:
        """Returns rows and columns of a page on ``cpu``, ``gpu`` or ``tpu``, where it may be larger
        than what is cached."""
        rows = self.rows(page_size)
        if self.is_scaled:
            rows = padded_rows(rows, platform)
        return rows, page_width(self.width, platform)

    def page_bytes(self, page_size: int, platform: str = "cpu") -> int:
        """Returns the bytes of a page on ``cpu``, ``gpu`` or ``tpu``."""
        rows, width = self.page_shape(page_size, platform)
        return rows * width * np.dtype(self.dtype).itemsize


LayerCacheSpec = dict[str, CachedArray]
"""The page arrays of one layer, by name. An attention's ``cache_spec`` returns it."""

LayerPages = dict[str, Shaped[Array, "P _ _"]]
"""One layer's page arrays, by the names of its :data:`LayerCacheSpec`. Pages have a row per token;
those of a scaled array have more. Arrays may be larger than their spec, see
:meth:`CachedArray.page_shape`. Unwritten slots are zero."""


def tokens_per_page(pages: LayerPages) -> int:
    """Returns the page size. No layer has scaled arrays only."""
    return min(array.shape[1] for array in pages.values())


class LayerCache(NamedTuple):
    """One layer's view of the cache during a step that adds T tokens to each sequence."""

    pages: LayerPages
    block_tables: Int[Array, "B max_pages"]
    """Page numbers of each sequence, in order."""
    starts: Int[Array, " B"]
    """Number of tokens cached before this step, on all devices that share a sequence."""
    valid: Bool[Array, "B T"]
    """True for tokens, False for the padding to their right."""

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return tokens_per_page(self.pages)


def join_tokens(batches: Sequence[Shaped[Array, "_ _ *rest"]]) -> Shaped[Array, "_ _ *rest"]:
    """Returns the tokens of several batches as one sequence: [1, N, ...]. One batch stays as it
    is."""
    if len(batches) == 1:
        return batches[0]
    return jnp.concatenate([x.reshape(1, -1, *x.shape[2:]) for x in batches], axis=1)


def split_tokens(
    x: Shaped[Array, "_ _ *rest"], caches: Sequence[LayerCache]
) -> list[Shaped[Array, "_ _ *rest"]]:
    """Returns the batches that :func:`join_tokens` joined, with the shapes of their caches."""
    if len(caches) == 1:
        return [x]
    batches, begin = [], 0
    for B, T in (cache.valid.shape for cache in caches):
        batches.append(x[0, begin : begin + B * T].reshape(B, T, *x.shape[2:]))
        begin += B * T
    return batches


class PageShard(NamedTuple):
    """The part of a sequence's pages on one device, where ``num_shards`` devices share them. Page p
    is on the device whose ``shard`` is ``p % num_shards``."""

    page_size: int
    num_shards: int = 1
    shard: int | Int[Array, ""] = 0

    @classmethod
    def of_device(cls, layout: Layout | None, page_size: int) -> PageShard:
        """Returns this device's part. Call it inside :meth:`sharding.Layout.shard_map`."""
        if layout is None:
            return cls(page_size)
        return cls(
            page_size, layout.num_shards("cached_tokens"), layout.shard_index("cached_tokens")
        )

    def local_lengths(self, lengths: Int[Array, "*batch"]) -> Int[Array, "*batch"]:
        """Returns how many of the first ``lengths`` tokens are on this device. They are the first
        tokens of its own pages, without gaps."""
        rounds, rest = jnp.divmod(lengths, self.num_shards * self.page_size)
        partial = jnp.clip(rest - self.shard * self.page_size, 0, self.page_size)
        return rounds * self.page_size + partial

    def local_positions(
        self, positions: Int[Array, "*batch"]
    ) -> tuple[Bool[Array, "*batch"], Int[Array, "*batch"]]:
        """Returns which tokens are on this device, and their positions among its own tokens, which
        are undefined for others."""
        page, slot = jnp.divmod(positions, self.page_size)
        is_local = page % self.num_shards == self.shard
        return is_local, page // self.num_shards * self.page_size + slot


def append(
    new: Mapping[str, Shaped[Array, "B T _"]], cache: LayerCache, layout: Layout | None
) -> tuple[LayerCache, PageShard]:
    """Writes T new tokens per sequence, by the names of their page arrays, after the cached ones if
    they belong to this device. Those of a scaled array are bytes of
    :func:`~pallas_kernels.sparse_index.scaled_pages.token_bytes`. Returns the cache, and this
    device's part of each sequence."""
    shard = PageShard.of_device(layout, cache.page_size)
    T = cache.valid.shape[1]
    is_local, positions = shard.local_positions(cache.starts[:, None] + jnp.arange(T))
    written = cache.valid & is_local
    where = cache.block_tables, positions, written
    pages = {}
    for name, values in new.items():
        if cache.pages[name].shape[1] == cache.page_size:
            pages[name] = write(cache.pages[name], *where, values)
        else:
            pages[name] = write_scaled(cache.pages[name], *where, values, cache.page_size)
    return cache._replace(pages=pages), shard


class AppendedTokens(NamedTuple):
    """New tokens of one batch, after those of all batches were written to the cache."""

    entries: Mapping[str, Shaped[Array, "B T _"]]  # the values that each page array stores for them
    cache: LayerCache  # with the page arrays of this device
    shard: PageShard  # this device's part of each sequence
    index_queries: Any = None  # queries of the attention's indexer, if it has one


def append_batches(
    entries: Mapping[str, Shaped[Array, "_ _ _"]],
    caches: Sequence[LayerCache],
    layout: Layout | None,
) -> list[AppendedTokens]:
    """Writes the new tokens of all batches, joined in ``entries``, see :func:`append`. A sequence
    may have tokens in several batches: all of them are written before any is read."""
    by_batch = [
        dict(zip(entries, values, strict=True))
        for values in zip(*(split_tokens(each, caches) for each in entries.values()), strict=True)
    ]
    pages, shards = caches[0].pages, []
    for new, cache in zip(by_batch, caches, strict=True):
        cache, shard = append(new, cache._replace(pages=pages), layout)
        pages = cache.pages
        shards.append(shard)
    return [
        AppendedTokens(new, cache._replace(pages=pages), shard)
        for new, cache, shard in zip(by_batch, caches, shards, strict=True)
    ]


def write(
    pages: Shaped[Array, "P page width"],
    block_tables: Int[Array, "B max_pages"],
    positions: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    values: Shaped[Array, "B T columns"],
) -> Shaped[Array, "P page width"]:
    """Stores the values of ``valid`` tokens at their positions. Others are dropped, as are
    positions past the end of the block table, and pages whose number is not from 0 to P - 1."""
    P, page_size, width = pages.shape
    values = jnp.pad(values, ((0, 0), (0, 0), (0, width - values.shape[-1])))
    page = _page_numbers(P, page_size, block_tables, positions, valid)
    return pages.at[page, positions % page_size].set(values.astype(pages.dtype), mode="drop")


def write_scaled(
    pages: UInt8[Array, "P rows width"],
    block_tables: Int[Array, "B max_pages"],
    positions: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    values: UInt8[Array, "B T bytes"],
    page_size: int,
) -> UInt8[Array, "P rows width"]:
    """Stores the values and scales of ``valid`` tokens in a scaled array, as :func:`write` does: D
    bytes of each token, then four of its scale."""
    P, _, width = pages.shape
    D = values.shape[-1] - SCALE_BYTES
    page = _page_numbers(P, page_size, block_tables, positions, valid)
    slot = positions % page_size
    keys = jnp.pad(values[..., :D], ((0, 0), (0, 0), (0, width - D)))
    pages = pages.at[page, slot].set(keys, mode="drop")
    # A scale is not cut between rows unless D is no multiple of its bytes.
    byte = slot[..., None] * SCALE_BYTES + jnp.arange(SCALE_BYTES)
    row, column = page_size + byte // D, byte % D
    return pages.at[page[..., None], row, column].set(values[..., D:], mode="drop")


def _page_numbers(
    P: int,
    page_size: int,
    block_tables: Int[Array, "B max_pages"],
    positions: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
) -> Int[Array, "B T"]:
    """Returns the pages of tokens, or P, which is out of bounds, for those to be dropped."""
    number, max_pages = positions // page_size, block_tables.shape[1]
    page = jnp.take_along_axis(block_tables, number, axis=1, mode="clip")
    # A negative number would count from the end.
    return jnp.where(valid & (number < max_pages) & (page >= 0), page, P)


def new_slots(cache: LayerCache) -> Int[Array, "B T"]:
    """Returns the slots, numbered page by page, in which :func:`append` stores the new tokens of a
    cache that is not sharded. The slot of a token that is dropped is -1."""
    P, page_size = len(next(iter(cache.pages.values()))), cache.page_size
    positions = cache.starts[:, None] + jnp.arange(cache.valid.shape[1])
    page = _page_numbers(P, page_size, cache.block_tables, positions, cache.valid)
    return jnp.where(page >= P, -1, page * page_size + positions % page_size)


# ---- latents -------------------------------------------------------------------------------------


def latent_cache_spec(
    config: ModelConfig, dtype: DTypeLike, *, float8: bool = False
) -> LayerCacheSpec:
    """Returns what Multi-head Latent Attention caches: the normed latent, then the rope key. In
    float8 these are the bytes that :func:`pallas_kernels.quantize_latent` returns, which refuses
    other widths."""
    if not float8:
        return {"latent": CachedArray(config.latent_dim, dtype)}
    width = float8_token_bytes(config.kv_lora_rank, config.qk_rope_head_dim)
    return {"latent": CachedArray(width, jnp.uint8)}


def float8_latents(
    config: ModelConfig, latents: Float[Array, "B T CR"]
) -> UInt8[Array, "B T bytes"]:
    """Returns latents and rope keys as a float8 cache stores them."""
    C = config.kv_lora_rank
    return quantize_latent(latents[..., :C], latents[..., C:])


def read_latents(
    config: ModelConfig,
    stored: Float[Array, "B S columns"] | UInt8[Array, "B S bytes"],
    dtype: DTypeLike,
) -> Float[Array, "B S CR"]:
    """Returns the latents and rope keys that either kind of cache stores."""
    if stored.dtype != jnp.uint8:
        return stored[..., : config.latent_dim].astype(dtype)
    columns = config.kv_lora_rank, config.qk_rope_head_dim
    return jnp.concatenate(dequantize_latent(stored, dtype, columns=columns), axis=-1)
