"""Division of the cache's pages over shards and devices."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from dsv3_jax.engine.scheduling.page_allocator import PageAllocator
from sharding import Layout


@dataclasses.dataclass(frozen=True)
class PoolLayout:
    """Division of the page pool: equal parts for the data-parallel shards, and within a shard for
    the devices that share the tokens of a sequence (context parallelism), in that order.

    Where n devices share a sequence's tokens, page p of the sequence is on device ``p % n`` of
    them. An allocator then hands out groups of n pages, one on each of these devices, and knows
    such a group by the number of its first page.
    """

    pages_per_device: int
    page_size: int
    """Tokens of a page."""
    shards: int = 1
    token_parts: int = 1
    """n: devices that share the tokens of a sequence."""

    @classmethod
    def of(cls, layout: Layout | None, pages_per_device: int, page_size: int) -> PoolLayout:
        """Returns the division on a mesh."""
        if layout is None:
            return cls(pages_per_device, page_size)
        shards, parts = (layout.num_shards(axis) for axis in ("batch", "cached_tokens"))
        return cls(pages_per_device, page_size, shards, parts)

    @property
    def num_pages(self) -> int:
        """Number of pages on all devices."""
        return self.pages_per_device * self.shards * self.token_parts

    def allocators(self, *, lookahead: int, prefix_cache: bool) -> list[PageAllocator]:
        """Returns an allocator for each shard, see :class:`PageAllocator`."""
        return [
            PageAllocator(
                self.pages_per_device,
                self.page_size * self.token_parts,
                first_page=shard * self.token_parts * self.pages_per_device,
                lookahead=lookahead,
                prefix_cache=prefix_cache,
            )
            for shard in range(self.shards)
        ]

    def table(self, pages: list[int]) -> Int32[np.ndarray, " P"]:
        """Returns the block table for pages of an allocator."""
        groups = np.asarray(pages, np.int32)
        if self.token_parts == 1:
            return groups
        others = np.arange(self.token_parts, dtype=np.int32) * self.pages_per_device
        return (groups[:, None] + others).reshape(-1)

    def fill_tables(
        self, tables: Int32[np.ndarray, "B P"], shard: int, requests: Sequence[Sequence[int]]
    ) -> None:
        """Writes block tables for the pages of some requests into the first rows of ``tables``.

        Unused entries refer to a page of the shard, because a kernel may read it, and would read
        beyond the device's array elsewhere.
        """
        max_pages = tables.shape[1]
        first = shard * self.token_parts * self.pages_per_device
        tables[...] = self.table([first] * (max_pages // self.token_parts))
        # One conversion for all requests: each takes longer than that of the numbers in it.
        lengths = np.array([len(pages) * self.token_parts for pages in requests], np.int32)
        is_used = np.arange(max_pages) < lengths[:, None]
        tables[: len(requests)][is_used] = self.table([*itertools.chain.from_iterable(requests)])
