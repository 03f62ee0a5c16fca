"""Size of an engine's cache: what the caller asks for, or what fits on the device."""

from __future__ import annotations

import jax

from dsv3_jax.kv_cache import CacheSpec
from dsv3_jax.layers.paged_cache import PAGE_AXES
from dsv3_jax.model import DeepSeekV3
from pallas_kernels import target

_FREE_SHARE = 0.85
"""Share of the device's free memory that a cache of default size takes. The rest is for the
activations of the largest step and the arrays of the slots."""


def pages_per_device(
    model: DeepSeekV3,
    cache_tokens: int | None,
    most_tokens: int,
    *,
    page_size: int,
    mtp: bool,
) -> int:
    """Returns the number of cache pages on each device. Devices that run the same sequences hold
    the same pages, or, where they share the tokens of a sequence, different ones.

    Args:
      cache_tokens: size of the whole cache that the caller asks for, or None.
      most_tokens: tokens that all slots can hold together; a cache of default size is not larger
        than this on devices that do not report their memory.
      mtp: whether the MTP layer has a cache.

    Raises:
      ValueError: ``cache_tokens`` is below a page on each device, or a device has no memory left.
    """
    parts = 1 if model.layout is None else model.layout.num_shards(PAGE_AXES[0])
    round_tokens = parts * page_size  # in a page on each device
    if cache_tokens is not None:
        if cache_tokens < round_tokens:
            where = "" if parts == 1 else f" on each of {parts} devices"
            raise ValueError(
                f"cache_tokens: expected at least a page{where}, {round_tokens}, got {cache_tokens}"
            )
        return cache_tokens // round_tokens
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return -(-most_tokens // round_tokens)
    free = stats["bytes_limit"] - stats["bytes_in_use"]
    platform = (model.layout and model.layout.platform) or target.platform()
    pages = default_pages(free, page_bytes(model.cache_spec(mtp=mtp), page_size, platform))
    if pages < 1:
        raise ValueError(
            f"cache: expected memory for at least a page of {page_size} tokens, got {free} bytes"
        )
    return pages


def default_pages(free: int, page_bytes: int) -> int:
    """Returns the number of pages of a cache of default size.

    Args:
      free: bytes of a device that hold neither weights nor the up-projections of decode.
    """
    return int(_FREE_SHARE * free) // page_bytes


def page_bytes(spec: CacheSpec, page_size: int, platform: str) -> int:
    """Returns the bytes of a page in all layers, on ``cpu``, ``gpu`` or ``tpu``."""
    return sum(
        array.page_bytes(page_size, platform)
        for layer in (*spec.layers, *spec.mtp)
        for array in layer.values()
    )
