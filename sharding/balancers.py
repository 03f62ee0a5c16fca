"""Assignment of requests to data-parallel shards, balanced by the cost of the work.

DeepSeek's inference system balances prefill by tokens, and decode by use of the KV cache and by the
number of requests (DeepSeek-V3/R1 Inference System Overview, 2025). One function here does each.

All functions follow the same rules:

- Requests are assigned in order of size, the largest first; equal sizes in the order given.
- A request goes to the shard with the least load among the shards that have room for it. Ties are
  broken by the number of requests, then by the lower shard number.
- A shard never exceeds its capacity. A request that no shard has room for now is returned as
  :data:`UNASSIGNED`. The caller keeps it in its queue and offers it again later.
- A smaller request may be assigned although a larger one is not. A caller that always offers new
  small requests must hold some back, or the large one starves.
- A request that exceeds the capacity of every empty shard raises ValueError, because it would wait
  forever.

The functions are pure: they read the loads and return an assignment. The caller adds the assigned
requests to the loads before the next call, and subtracts them when they end.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from jaxtyping import Int32, Int64

UNASSIGNED = -1
"""Shard number of a request that no shard has room for now."""


def assign_prefill(
    tokens: npt.ArrayLike, shard_tokens: npt.ArrayLike, max_tokens: npt.ArrayLike
) -> Int32[np.ndarray, " R"]:
    """Assigns R requests to S shards for prefill, so that shards have equal numbers of tokens.

    Args:
      tokens: [R], number of tokens to compute for each request, without those that the prefix cache
        supplies.
      shard_tokens: [S], number of tokens that each shard has yet to prefill. Shards with equal
        numbers are compared by the number of requests assigned in this call.
      max_tokens: [S], largest allowed ``shard_tokens``.

    Returns:
      The shard of each request, or ``UNASSIGNED``.

    Raises:
      ValueError: an array has another shape or values other than integers of 0 or more, a shard
        exceeds its capacity, or a request is larger than every capacity.
    """
    sizes = _checked_counts("tokens", tokens)
    load = _load_and_limit("shard_tokens", shard_tokens, "max_tokens", max_tokens)
    S = load.shape[1]
    # The limit on the number of requests is never reached.
    requests = np.stack([np.zeros(S, np.int64), np.full(S, max(sizes.size, 1))])
    return _assign("tokens", sizes, load, requests)


def assign_decode(
    cache: npt.ArrayLike,
    shard_cache: npt.ArrayLike,
    max_cache: npt.ArrayLike,
    shard_requests: npt.ArrayLike,
    max_requests: npt.ArrayLike,
) -> Int32[np.ndarray, " R"]:
    """Assigns R requests to S shards for decode, so that shards use equal parts of the KV cache.

    All sizes of the cache are in pages, or all in tokens.

    Args:
      cache: [R], cache to reserve for each request.
      shard_cache: [S], cache reserved on each shard.
      max_cache: [S], size of each shard's cache.
      shard_requests: [S], number of requests that each shard decodes. It decides between shards
        with equal ``shard_cache``.
      max_requests: [S], largest batch size of each shard.

    Returns:
      The shard of each request, or ``UNASSIGNED``.

    Raises:
      ValueError: an array has another shape or values other than integers of 0 or more, a shard
        exceeds a capacity, or a request is larger than every capacity.
    """
    sizes = _checked_counts("cache", cache)
    load = _load_and_limit("shard_cache", shard_cache, "max_cache", max_cache)
    requests = _load_and_limit("shard_requests", shard_requests, "max_requests", max_requests)
    if load.shape != requests.shape:
        raise ValueError(
            f"shard_requests: expected {load.shape[1]} shards as shard_cache, got"
            f" {requests.shape[1]}"
        )
    return _assign("cache", sizes, load, requests)


def assign_by_count(
    num_requests: int, shard_requests: npt.ArrayLike, max_requests: npt.ArrayLike
) -> Int32[np.ndarray, " {num_requests}"]:
    """Assigns requests to S shards so that shards have equal numbers of requests.

    Args:
      shard_requests: [S], number of requests that each shard has.
      max_requests: [S], largest allowed number of requests of each shard.

    Returns:
      The shard of each request, or ``UNASSIGNED``.

    Raises:
      ValueError: ``num_requests`` is negative, an array has another shape or values other than
        integers of 0 or more, a shard exceeds its capacity, or no shard accepts requests.
    """
    if num_requests < 0:
        raise ValueError(f"num_requests: expected 0 or more, got {num_requests}")
    requests = _load_and_limit("shard_requests", shard_requests, "max_requests", max_requests)
    return _assign("num_requests", np.ones(num_requests, np.int64), requests, requests)


def _checked_counts(name: str, values: npt.ArrayLike) -> Int64[np.ndarray, " n"]:
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name}: expected one dimension, got shape {array.shape}")
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name}: expected integers, got {array.dtype}")
    if array.size and array.min() < 0:
        raise ValueError(f"{name}: expected 0 or more, got {array.min()}")
    return array.astype(np.int64)


def _load_and_limit(
    load_name: str, load: npt.ArrayLike, limit_name: str, limit: npt.ArrayLike
) -> Int64[np.ndarray, "2 S"]:
    """Stacks the checked load and limit of each shard."""
    load, limit = _checked_counts(load_name, load), _checked_counts(limit_name, limit)
    if load.shape != limit.shape:
        raise ValueError(
            f"{limit_name}: expected {load.size} shards as {load_name}, got {limit.size}"
        )
    if (load > limit).any():
        shard = np.argmax(load > limit)
        raise ValueError(
            f"{load_name}: expected at most {limit[shard]} on shard {shard}, got {load[shard]}"
        )
    return np.stack([load, limit])


def _assign(
    name: str,
    sizes: Int64[np.ndarray, " R"],
    load_and_limit: Int64[np.ndarray, "2 S"],
    requests_and_limit: Int64[np.ndarray, "2 S"],
) -> Int32[np.ndarray, " R"]:
    """Assigns the largest request first, each to the least loaded shard with room for it.

    Args:
      name: name of ``sizes`` in error messages.
      sizes: load that each request adds.
      load_and_limit: see :func:`_load_and_limit`.
      requests_and_limit: see :func:`_load_and_limit`.
    """
    (load, max_load), (requests, max_requests) = load_and_limit.copy(), requests_and_limit.copy()
    largest = max_load[max_requests > 0].max(initial=0)
    if (sizes > largest).any():
        request = np.argmax(sizes > largest)
        raise ValueError(
            f"{name}: expected at most {largest}, the capacity of an empty shard, got"
            f" {sizes[request]} for request {request}"
        )
    shards = np.full(sizes.size, UNASSIGNED, np.int32)
    for request in np.argsort(-sizes, kind="stable"):
        has_room = (load + sizes[request] <= max_load) & (requests < max_requests)
        if has_room.any():
            # lexsort compares the last key first. It is stable: the lower of equal shards wins.
            shard = np.lexsort((requests, load, ~has_room))[0]
            shards[request] = shard
            load[shard] += sizes[request]
            requests[shard] += 1
    return shards
