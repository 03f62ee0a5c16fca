"""The number of replicas that open requests and caches need. Ray Serve adds bounds and delays."""

from __future__ import annotations

from typing import Any

CACHE_USAGE = "cache_usage"
"""Name of the figure that every replica reports: share of its cache in use, from 0 to 1."""
OPEN_REQUESTS = "open_requests"
"""Name of a figure of prefill replicas: prompts that run and wait, which come past Ray Serve."""


class QueueAndCachePolicy:
    """Autoscaling policy of Ray Serve. The number of replicas stays while ``target_cache_usage`` of
    a replica's cache is in use."""

    def __init__(self, target_cache_usage: float):
        self._target_cache_usage = target_cache_usage

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Returns the wanted number of replicas."""
        running = set(context.running_replicas)
        # Figures of replicas that have ended are kept for a while.
        usages, prompts = (
            [number for replica, number in figures.items() if replica in running]
            for name in (CACHE_USAGE, OPEN_REQUESTS)
            for figures in [(context.aggregated_metrics or {}).get(name, {})]
        )
        # Neither requests nor caches exceed their targets.
        open_requests = context.total_num_requests + sum(prompts)
        wanted = max(
            open_requests / context.config.target_ongoing_requests,
            sum(usages) / self._target_cache_usage,
        )
        return wanted, {}
