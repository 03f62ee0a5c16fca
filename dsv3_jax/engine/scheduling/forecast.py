"""Predicts how long a dispatch takes, from recent dispatches of the same work.

The loop plans a step just before the step in flight ends: a request that has arrived by then is in
it, instead of in the one after.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable

_RECENT = 8


class Forecast:
    """Recent times of dispatches, by their work: the program and its number of decode steps.

    A forecast is the shortest of the last eight times. It is too early rather than too late, since
    a device that waits for the host costs more than a request that misses a step.
    """

    def __init__(self) -> None:
        self._recent: defaultdict[Hashable, deque[float]] = defaultdict(
            lambda: deque(maxlen=_RECENT)
        )

    def record(self, work: Hashable, seconds: float) -> None:
        """Adds the time of a dispatch."""
        self._recent[work].append(seconds)

    def seconds(self, work: Hashable) -> float:
        """Returns the time that such a dispatch takes at least; 0 if none has been recorded."""
        recent = self._recent.get(work)
        return min(recent) if recent else 0.0
