"""Samples of an engine's figures over time."""

from __future__ import annotations

import time

from dsv3_jax.engine.stats import EngineStats

_TOTALS = ("steps", "prompt_tokens", "output_tokens", "prefix_hit_tokens", "preemptions")


class Timeline:
    """Samples of an engine's figures, for :func:`dsv3_jax.viz.serving.timeline`.

    Attributes:
      columns: the samples by name: ``seconds`` since the first sample, ``running`` and ``waiting``
        requests, ``cache_usage`` from 0 to 1, and the totals ``steps``, ``prompt_tokens``,
        ``output_tokens``, ``prefix_hit_tokens`` and ``preemptions`` since the first sample.
    """

    def __init__(self) -> None:
        self.columns: dict[str, list[float]] = {}
        self._began: float | None = None
        self._before: EngineStats | None = None

    def sample(self, stats: EngineStats) -> None:
        """Adds a sample."""
        now = time.monotonic()
        if self._began is None or self._before is None:
            self._began, self._before = now, stats
        entry = {
            "seconds": round(now - self._began, 4),
            "running": stats.running,
            "waiting": stats.waiting,
            "cache_usage": round(stats.cache_usage, 4),
        }
        entry |= {name: getattr(stats, name) - getattr(self._before, name) for name in _TOTALS}
        for name, value in entry.items():
            self.columns.setdefault(name, []).append(value)
