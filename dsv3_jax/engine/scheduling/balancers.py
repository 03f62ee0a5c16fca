"""Assignment of a request to a data-parallel shard at its admission.

A step takes as long as on its most loaded shard, so that shards should have equal loads. A request
stays on its shard until it ends or is preempted, because its pages are there. Two figures make a
shard slow: decoding reads its used pages, and every running request costs something by itself. Both
are counted in tokens of the cache, see :func:`shard_load`.

A shard whose prefix cache has the beginning of the prompt saves the prefill of these tokens, once.
That is worth ``HIT_WORTH`` times as many tokens of load: :func:`choose_shard` takes the shard with
the smallest ``load - HIT_WORTH * hit``. A popular prefix therefore attracts requests to its shard
until others are that much less loaded. Then one of them computes the prefix as well, and from then
on they share the requests.

Prefill needs no figure of its own. A step prefills a bounded number of chunks on each shard, and
the scheduler admits a request only to a shard that has chunks left in this step. Prompts thus wait
in one queue before all shards, and not on a shard whose earlier prompts are long: tokens balance
themselves, as by :func:`sharding.balancers.assign_prefill`.

:mod:`sharding.balancers` assigns whole batches of requests at once, and knows no prefixes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REQUEST_TOKENS = 256
"""Tokens of the cache that cost a decode step as much as one more request."""

HIT_WORTH = 2
"""Tokens of load that one token found in the prefix cache outweighs. A token takes longer to
prefill than to read once, but it is read again in every later step."""


def shard_load(used_tokens: int, running: int) -> int:
    """Returns the load of a shard, in tokens of the cache.

    Args:
      used_tokens: size of the pages that requests refer to.
      running: number of running requests.
    """
    return used_tokens + REQUEST_TOKENS * running


def choose_shard(
    loads: Sequence[int], hit_with_room: Callable[[int], int | None], most_hit: int
) -> int | None:
    """Returns the shard for one request, or None if no shard has room for it now.

    Equal costs go to the smaller load, then to the lower shard number: the same arguments always
    give the same shard.

    Args:
      loads: load of each shard.
      hit_with_room: returns the prompt tokens in the prefix cache of a shard, or None if the shard
        has no room. It is called for no shard that cannot be chosen any more.
      most_hit: upper bound on these tokens.
    """
    best: int | None = None
    best_cost = 0
    for shard in sorted(range(len(loads)), key=lambda shard: (loads[shard], shard)):
        if best is not None and loads[shard] - HIT_WORTH * most_hit >= best_cost:
            break  # the shards that follow have higher loads still
        hit = hit_with_room(shard)
        if hit is None:
            continue
        cost = loads[shard] - HIT_WORTH * hit
        if best is None or cost < best_cost:
            best, best_cost = shard, cost
    return best
