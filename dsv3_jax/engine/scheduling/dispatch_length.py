"""Chooses how many decode steps a dispatch takes that prefills nothing. Pure Python."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from dsv3_jax.engine.scheduling.scheduler_config import SchedulerConfig
from dsv3_jax.engine.scheduling.scheduler_shard import SchedulerShard
from dsv3_jax.engine.scheduling.step_plan import ScheduledRequest


def decode_steps(
    shards: Sequence[SchedulerShard],
    decodes: Sequence[Sequence[ScheduledRequest]],
    most: int,
    config: SchedulerConfig,
    *,
    has_waiting: bool,
) -> int:
    """Returns how many decode steps a dispatch takes, and gives each request its pages.

    While requests wait, for a slot or for pages, no dispatch goes past the step in which one of its
    requests may reach its limit, unless ``refill_steps`` allows it or it is the only one: a
    dispatch ends with its last request.

    Args:
      decodes: the requests that decode on each shard.
      most: most steps that the caller allows.
      has_waiting: whether requests wait.
    """
    requests = list(itertools.chain.from_iterable(decodes))
    if any(request.is_serial for request in requests) or not _is_multi_step(decodes, config):
        return 1
    remaining = [request.max_length - request.least_length for request in requests]
    if has_waiting:
        running = sum(len(shard.running) for shard in shards)
        if any(shard.retiring for shard in shards) or len(requests) < running:
            return 1  # results in flight will free a slot
        if len(requests) > 1:
            # A step adds up to 1 + drafts tokens.
            least = [-(-n // (1 + r.drafts)) for n, r in zip(remaining, requests, strict=True)]
            most = min(most, max(min(least), config.refill_steps))
    steps = max(1, min(most, max(remaining)))
    while steps > 1 and not _add_pages(shards, decodes, steps):
        steps //= 2
    return steps


def _is_multi_step(decodes: Sequence[Sequence[ScheduledRequest]], config: SchedulerConfig) -> bool:
    """Returns whether programs for that number of requests take several steps."""
    most = config.multi_step_decodes
    return most is None or max(map(len, decodes)) <= most


def _add_pages(
    shards: Sequence[SchedulerShard], decodes: Sequence[Sequence[ScheduledRequest]], steps: int
) -> bool:
    """Gives each request its pages for ``steps`` steps, and returns whether there are enough."""
    needs = [
        shard.missing_pages(requests, steps)
        for shard, requests in zip(shards, decodes, strict=True)
    ]
    if any(
        sum(counts) > shard.pages.available for shard, counts in zip(shards, needs, strict=True)
    ):
        return False
    for shard, requests, counts in zip(shards, decodes, needs, strict=True):
        shard.add_pages(requests, counts)
    return True
