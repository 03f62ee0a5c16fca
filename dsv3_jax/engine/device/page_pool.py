"""The engine's page pool: how many pages fit on a device, and which device has which."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Int32

from dsv3_jax.engine.device.processes import spans_processes
from dsv3_jax.engine.scheduling.page_allocator import PageAllocator
from dsv3_jax.layers.paged_cache import PAGE_AXES
from dsv3_jax.model import DeepSeekV3
from pallas_kernels import target
from sharding import Layout
from sharding.distributed import max_over_processes

_FREE_SHARE = 0.85
"""Share of the device's free memory that a cache of default size takes. The rest is for the
activations of the largest step and the arrays of the slots."""


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

    @classmethod
    def fitting(
        cls,
        model: DeepSeekV3,
        cache_tokens: int | None,
        most_tokens: int,
        page_size: int,
        *,
        mtp: bool,
    ) -> PoolLayout:
        """Returns the division of a pool. Devices that run the same sequences hold the same pages,
        or, where they share the tokens of a sequence, different ones.

        Args:
          cache_tokens: size of the whole cache that the caller asks for, or None.
          most_tokens: tokens that all slots can hold together; a cache of default size is not
            larger than this on devices that do not report their memory.

        Raises:
          ValueError: ``cache_tokens`` is below a page on each device, or a device has no memory
            left.
        """
        layout = model.layout
        parts = 1 if layout is None else layout.num_shards(PAGE_AXES[0])
        round_tokens = parts * page_size  # in a page on each device
        stats = jax.local_devices()[0].memory_stats() or {}
        if cache_tokens is not None:
            if cache_tokens < round_tokens:
                where = "" if parts == 1 else f" on each of {parts} devices"
                raise ValueError(
                    f"cache_tokens: expected at least a page{where}, {round_tokens}, got"
                    f" {cache_tokens}"
                )
            pages = cache_tokens // round_tokens
        elif "bytes_limit" not in stats:
            pages = -(-most_tokens // round_tokens)
        else:
            free = stats["bytes_limit"] - stats["bytes_in_use"]
            platform = (layout and layout.platform) or target.platform()
            pages = default_pages(free, model.cache_spec(mtp=mtp).page_bytes(page_size, platform))
            if pages < 1:
                raise ValueError(
                    f"cache: expected memory for at least a page of {page_size} tokens, got {free}"
                    " bytes"
                )
        if spans_processes(layout):
            pages = -int(max_over_processes(-pages))  # the fewest of all processes
        return cls.of(layout, pages, page_size)

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


def default_pages(free: int, page_bytes: int) -> int:
    """Returns the pages of a cache of default size, from the free bytes of a device."""
    return int(_FREE_SHARE * free) // page_bytes
