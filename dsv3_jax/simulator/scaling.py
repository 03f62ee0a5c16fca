"""Scaling a cluster over a day: how many units each hour's load needs.

Units are whole: a unit of prefill or decode is a group of nodes that share one set of experts.
Requests that need more than the units of their hour would wait, so that the number is rounded up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

HOURS = 24


@dataclasses.dataclass(frozen=True)
class Unit:
    """A group of nodes that is started and stopped as a whole."""

    nodes: int
    requests_per_second: float
    """Load at which it keeps its latencies."""

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise ValueError(f"nodes: expected 1 or more, got {self.nodes}")
        if not self.requests_per_second > 0:
            raise ValueError(
                f"requests_per_second: expected more than 0, got {self.requests_per_second}"
            )


@dataclasses.dataclass(frozen=True)
class Hour:
    """One hour of a scaled cluster."""

    requests_per_second: float
    units: tuple[int, ...]
    """Number of units of each kind."""
    nodes: int


def day_curve(depth: float, *, peak_hour: float = 15.5) -> list[float]:
    """Returns the load of each hour, relative to the peak: ``1 - depth`` at night.

    It is a raised cosine, flattened by day, as in a service whose users sleep at the same time.
    """
    if not 0 <= depth < 1:
        raise ValueError(f"depth: expected 0 or more and below 1, got {depth}")
    phases = [2 * math.pi * (hour + 0.5 - peak_hour) / HOURS for hour in range(HOURS)]
    # The square root widens the day and narrows the night.
    return [1 - depth + depth * math.sqrt((1 + math.cos(phase)) / 2) for phase in phases]


def depth_of(mean_share: float) -> float:
    """Returns the depth of the day curve whose mean is this share of its peak."""
    flat = sum(day_curve(0.5)) / HOURS  # linear in the depth
    depth = (1 - mean_share) / (2 * (1 - flat))
    if not 0 <= depth < 1:
        raise ValueError(
            f"mean_share: expected a share that a day curve can have, got {mean_share}"
        )
    return depth


def scale(load: Sequence[float], units: Sequence[Unit], *, headroom: float = 0.0) -> list[Hour]:
    """Returns the fewest whole units for each hour.

    Args:
      load: requests per second in each hour.
      headroom: share of each unit that is kept free for fluctuations.
    """
    if not 0 <= headroom < 1:
        raise ValueError(f"headroom: expected 0 or more and below 1, got {headroom}")
    hours = []
    for rate in load:
        counts = tuple(
            max(1, math.ceil(rate / (unit.requests_per_second * (1 - headroom)) - 1e-9))
            for unit in units
        )
        nodes = sum(n * unit.nodes for n, unit in zip(counts, units, strict=True))
        hours.append(Hour(rate, counts, nodes))
    return hours
