"""The number of replicas that open requests and caches need. Ray Serve adds bounds and delays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CACHE_USAGE = "cache_usage"
"""Name of the figure that every replica reports: share of its cache in use, from 0 to 1."""
OPEN_REQUESTS = "open_requests"
"""Name of a figure of prefill replicas: prompts that run and wait, which come past Ray Serve."""


def wanted_replicas(
    open_requests: float,
    cache_usages: Sequence[float],
    *,
    target_requests: float,
    target_cache_usage: float,
) -> float:
    """Returns the number of replicas with which neither requests nor caches exceed their targets.

    Args:
      open_requests: requests that run and wait, everywhere.
      cache_usages: share of each replica's cache in use.
      target_requests: open requests of a replica.
      target_cache_usage: share of a replica's cache in use.
    """
    return max(open_requests / target_requests, sum(cache_usages) / target_cache_usage)


class QueueAndCachePolicy:
    """Autoscaling policy of Ray Serve.

    Args:
      target_cache_usage: share of a replica's cache in use at which the number of replicas stays.
    """

    def __init__(self, target_cache_usage: float):
        self._target_cache_usage = target_cache_usage

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Returns the wanted number of replicas.

        Args:
          context: Ray Serve's AutoscalingContext.
        """
        running = set(context.running_replicas)
        # Figures of replicas that have ended are kept for a while.
        usages, prompts = (
            [number for replica, number in figures.items() if replica in running]
            for name in (CACHE_USAGE, OPEN_REQUESTS)
            for figures in [(context.aggregated_metrics or {}).get(name, {})]
        )
        wanted = wanted_replicas(
            context.total_num_requests + sum(prompts),
            usages,
            target_requests=context.config.target_ongoing_requests,
            target_cache_usage=self._target_cache_usage,
        )
        return wanted, {}
