"""One layer's part of the paged KV cache: its page arrays, and the writing of new tokens to them.

Token s of a sequence is cached in page ``block_table[s // page_size]`` at slot ``s % page_size``.
All arrays of a layer, and all layers, use the same page numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Int, Shaped

from sharding import Layout

PAGE_AXES = (("batch", "cached_tokens"),)
"""Logical axes of a page array. Its first dimension, the pages, is sharded like the sequences, and
within them like their tokens."""


class CachedArray(NamedTuple):
    """Description of one page array: what it stores for each token."""

    width: int
    """Numbers per token."""
    dtype: DTypeLike


LayerCacheSpec = dict[str, CachedArray]
"""The page arrays of one layer, by name. An attention's ``cache_spec`` returns it."""

LayerPages = dict[str, Shaped[Array, "P page _"]]
"""One layer's page arrays, by the names of its :data:`LayerCacheSpec`. Arrays may be wider than
their spec, see :func:`pallas_kernels.page_width`. Unwritten slots are zero."""


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
        return next(iter(self.pages.values())).shape[1]


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
    """The part of a sequence's pages on one device, where ``num_shards`` devices share them.

    Page p is on the device whose ``shard`` is ``p % num_shards``, so that whatever the length, the
    numbers of pages on two devices differ by one at most.
    """

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
        """Returns how many of the first ``lengths`` tokens are on this device.

        They are the first tokens of its own pages, without gaps.
        """
        rounds, rest = jnp.divmod(lengths, self.num_shards * self.page_size)
        partial = jnp.clip(rest - self.shard * self.page_size, 0, self.page_size)
        return rounds * self.page_size + partial

    def local_positions(
        self, positions: Int[Array, "*batch"]
    ) -> tuple[Bool[Array, "*batch"], Int[Array, "*batch"]]:
        """Returns which tokens are on this device, and their positions among its own tokens.

        The positions of tokens on other devices are undefined.
        """
        page, slot = jnp.divmod(positions, self.page_size)
        is_local = page % self.num_shards == self.shard
        return is_local, page // self.num_shards * self.page_size + slot


def append(
    new: Mapping[str, Shaped[Array, "B T _"]], cache: LayerCache, layout: Layout | None
) -> tuple[LayerCache, PageShard]:
    """Writes T new tokens per sequence after the cached ones, if they belong to this device.

    Args:
      new: what each page array stores for the new tokens.
      layout: the layout of the device, or None.

    Returns:
      The cache with the new tokens, and this device's part of each sequence.
    """
    shard = PageShard.of_device(layout, cache.page_size)
    T = cache.valid.shape[1]
    is_local, positions = shard.local_positions(cache.starts[:, None] + jnp.arange(T))
    written = cache.valid & is_local
    pages = {
        name: write(cache.pages[name], cache.block_tables, positions, written, values)
        for name, values in new.items()
    }
    return cache._replace(pages=pages), shard


class AppendedTokens(NamedTuple):
    """New tokens of one batch, after those of all batches were written to the cache."""

    entries: Mapping[str, Shaped[Array, "B T _"]]
    """The values that each page array stores for them."""
    cache: LayerCache
    """With the page arrays of this device."""
    shard: PageShard
    """This device's part of each sequence."""
    index_queries: Any = None
    """Queries of the attention's indexer, if it has one."""


def append_batches(
    entries: Mapping[str, Shaped[Array, "_ _ _"]],
    caches: Sequence[LayerCache],
    layout: Layout | None,
) -> list[AppendedTokens]:
    """Writes the new tokens of several batches, see :func:`append`.

    A sequence may have tokens in several batches or entries of one: all of them are written before
    any is read.

    Args:
      entries: what each page array stores for the tokens of all batches, joined.
      caches: one for each batch, with the same page arrays.
    """
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
    """Stores the values of ``valid`` tokens at their positions.

    Other tokens are dropped. So are positions past the end of the block table, and pages whose
    number is not from 0 to P - 1: only the sequence's own slots change.
    """
    P, page_size, width = pages.shape
    values = jnp.pad(values, ((0, 0), (0, 0), (0, width - values.shape[-1])))
    page = _page_of(block_tables, positions, valid, page_size)
    # P is out of bounds and therefore dropped; a negative number would count from the end.
    page = jnp.where(page < 0, P, page)
    return pages.at[page, positions % page_size].set(values.astype(pages.dtype), mode="drop")


def new_slots(cache: LayerCache) -> Int[Array, "B T"]:
    """Returns where :func:`append` stores the new tokens of a cache that is not sharded.

    They are numbers of slots, page by page. The slot of a token that is dropped is -1.
    """
    P, page_size = next(iter(cache.pages.values())).shape[:2]
    positions = cache.starts[:, None] + jnp.arange(cache.valid.shape[1])
    page = _page_of(cache.block_tables, positions, cache.valid, page_size)
    slots = page * page_size + positions % page_size
    return jnp.where((page < 0) | (page >= P), -1, slots)


def _page_of(
    block_tables: Int[Array, "B max_pages"],
    positions: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    page_size: int,
) -> Int[Array, "B T"]:
    """Returns the page of each position, -1 for tokens to drop and past the block table."""
    number, max_pages = positions // page_size, block_tables.shape[1]
    page = jnp.take_along_axis(block_tables, number, axis=1, mode="clip")
    return jnp.where(valid & (number < max_pages), page, -1)
