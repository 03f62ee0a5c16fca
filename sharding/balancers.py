"""Which data-parallel shard serves which request, evenly by what the work costs.

DeepSeek's inference system balances prefill by tokens, and decode by use of the KV cache and by
number of requests (DeepSeek-V3/R1 Inference System Overview, 2025). So do these: the largest
request first, each to the shard with the least load among those with room for it; of equal loads,
to the one with fewer requests, then to the lower one. Equal requests go in the order given.

No shard is ever given more than its capacity. A request for which no shard has room now gets
``WAITS`` and is to be offered again; smaller ones behind it may have found room, so a caller that
offers small ones without end should hold them back for it. A request that no shard could take even
when empty is an error: it would wait for ever. Nothing is changed: the caller books what it sends.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from jaxtyping import Int32, Int64

WAITS = -1
"""In place of a shard: no shard has room for this request now."""


def assign_prefill(
    tokens: npt.ArrayLike, shard_tokens: npt.ArrayLike, max_tokens: npt.ArrayLike
) -> Int32[np.ndarray, " R"]:
    """The shard that prefills each request, or ``WAITS``: shards get equal numbers of tokens.

    Args:
      tokens: [R], tokens to compute of each request; those found in a prefix cache cost nothing.
      shard_tokens: [S], tokens that each shard has still to prefill. Between equal ones it counts
        which shard was given fewer of these requests.
      max_tokens: [S], tokens that each shard takes in all.

    Raises:
      ValueError: arrays that are not of these shapes or not of integers of 0 or more, a shard
        above its capacity, or a request that is larger than every capacity.
    """
    sizes = _counts("tokens", tokens)
    load = _use("shard_tokens", shard_tokens, "max_tokens", max_tokens)
    S = load.shape[1]
    count = np.stack([np.zeros(S, np.int64), np.full(S, max(sizes.size, 1))])  # never in the way
    return _assign("tokens", sizes, load, count)


def assign_decode(
    cache: npt.ArrayLike,
    shard_cache: npt.ArrayLike,
    max_cache: npt.ArrayLike,
    shard_requests: npt.ArrayLike,
    max_requests: npt.ArrayLike,
) -> Int32[np.ndarray, " R"]:
    """The shard that decodes each request, or ``WAITS``: shards get equal use of their caches.

    Args:
      cache: [R], pages (or tokens) of KV cache to be reserved for each request.
      shard_cache: [S], pages reserved on each shard.
      max_cache: [S], pages of each shard.
      shard_requests: [S], requests that each shard decodes: they decide between equal caches.
      max_requests: [S], rows of each shard's batch.

    Raises:
      ValueError: arrays that are not of these shapes or not of integers of 0 or more, a shard
        above a capacity, or a request that is larger than every capacity.
    """
    sizes = _counts("cache", cache)
    load = _use("shard_cache", shard_cache, "max_cache", max_cache)
    count = _use("shard_requests", shard_requests, "max_requests", max_requests)
    if load.shape != count.shape:
        raise ValueError(
            f"shard_requests: expected {load.shape[1]} shards as shard_cache, got {count.shape[1]}"
        )
    return _assign("cache", sizes, load, count)


def assign_by_count(
    num_requests: int, shard_requests: npt.ArrayLike, max_requests: npt.ArrayLike
) -> Int32[np.ndarray, " {num_requests}"]:
    """The shard of each request, or ``WAITS``: shards get equal numbers of requests.

    Args:
      shard_requests: [S], requests that each shard has.
      max_requests: [S], requests that each shard takes in all.

    Raises:
      ValueError: a negative number, arrays that are not of these shapes or not of integers of 0 or
        more, a shard above its capacity, or no shard that takes requests.
    """
    if num_requests < 0:
        raise ValueError(f"num_requests: expected 0 or more, got {num_requests}")
    count = _use("shard_requests", shard_requests, "max_requests", max_requests)
    return _assign("num_requests", np.ones(num_requests, np.int64), count, count)


def _counts(name: str, values: npt.ArrayLike) -> Int64[np.ndarray, " n"]:
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name}: expected one dimension, got shape {array.shape}")
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name}: expected integers, got {array.dtype}")
    if array.size and array.min() < 0:
        raise ValueError(f"{name}: expected 0 or more, got {array.min()}")
    return array.astype(np.int64)


def _use(
    name: str, used: npt.ArrayLike, limit_name: str, limit: npt.ArrayLike
) -> Int64[np.ndarray, "2 S"]:
    """What each shard has in use, and its limit."""
    used, limit = _counts(name, used), _counts(limit_name, limit)
    if used.shape != limit.shape:
        raise ValueError(f"{limit_name}: expected {used.size} shards as {name}, got {limit.size}")
    if (used > limit).any():
        shard = np.argmax(used > limit)
        raise ValueError(
            f"{name}: expected at most {limit[shard]} on shard {shard}, got {used[shard]}"
        )
    return np.stack([used, limit])


def _assign(
    name: str,
    sizes: Int64[np.ndarray, " R"],
    load: Int64[np.ndarray, "2 S"],
    count: Int64[np.ndarray, "2 S"],
) -> Int32[np.ndarray, " R"]:
    """Largest first, each to the least loaded shard with room for its size and for one more."""
    (load, capacity), (count, most) = load.copy(), count.copy()
    largest = capacity[most > 0].max(initial=0)
    if (sizes > largest).any():
        request = np.argmax(sizes > largest)
        raise ValueError(
            f"{name}: expected at most {largest}, all that a shard can hold, got {sizes[request]} "
            f"for request {request}"
        )
    shards = np.full(sizes.size, WAITS, np.int32)
    for request in np.argsort(-sizes, kind="stable"):
        room = (load + sizes[request] <= capacity) & (count < most)
        if room.any():
            # The last key counts first; of equal shards a stable sort leaves the lower in front.
            shard = np.lexsort((count, load, ~room))[0]
            shards[request] = shard
            load[shard] += sizes[request]
            count[shard] += 1
    return shards
