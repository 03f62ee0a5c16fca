"""Measures, by the host's clock, how long dispatches take and how long none is in flight."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from dsv3_jax.engine.scheduling.step_times import StepTimes


@dataclasses.dataclass(frozen=True)
class ShapeTimes:
    """Dispatches of one shape of a step."""

    count: int = 0
    seconds: float = 0.0
    """Time from the launch, or from the end of the dispatch before if that is later, to the
    results. Device time, if the host reads results without delay."""

    def plus(self, count: int, seconds: float) -> ShapeTimes:
        """Returns the sums."""
        return ShapeTimes(self.count + count, self.seconds + seconds)


@dataclasses.dataclass(frozen=True)
class DispatchFigures:
    """Totals of all dispatches."""

    launch_seconds: float = 0.0
    """Time that launches blocked their thread."""
    seconds_in_flight: float = 0.0
    """Time with a dispatch in flight."""
    seconds_between: float = 0.0
    """Time without one although requests were running or waiting."""
    shapes: Mapping[str, ShapeTimes] = dataclasses.field(default_factory=dict)
    """By the name of the shape."""

    @property
    def idle_share(self) -> float:
        """Share of the time under load in which no dispatch was in flight, from 0 to 1."""
        total = self.seconds_in_flight + self.seconds_between
        return self.seconds_between / total if total else 0.0

    def since(self, before: DispatchFigures) -> DispatchFigures:
        """Returns the totals counted from an earlier moment."""
        shapes = {}
        for name, times in self.shapes.items():
            earlier = before.shapes.get(name, ShapeTimes())
            if times.count > earlier.count:
                shapes[name] = times.plus(-earlier.count, -earlier.seconds)
        return DispatchFigures(
            self.launch_seconds - before.launch_seconds,
            self.seconds_in_flight - before.seconds_in_flight,
            self.seconds_between - before.seconds_between,
            shapes,
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the figures by name. The shape that took longest comes first."""
        shapes = sorted(self.shapes.items(), key=lambda item: -item[1].seconds)
        return {
            "launch_seconds": self.launch_seconds,
            "seconds_in_flight": self.seconds_in_flight,
            "seconds_between": self.seconds_between,
            "idle_share": self.idle_share,
            "shapes": {name: dataclasses.asdict(times) for name, times in shapes},
        }


class DispatchTimes:
    """Keeps the times of dispatches, which end in the order of their launches.

    Two threads write: the one that launches, and the one that reads results.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._figures = DispatchFigures()
        self._times = StepTimes()
        self._launches: deque[float] = deque()
        """Beginning of the launch of each dispatch in flight."""
        self._last_end: float | None = None
        """End of the last dispatch, unless there was nothing to do after it."""

    @property
    def figures(self) -> DispatchFigures:
        """The totals."""
        return self._figures

    def launches(self) -> float:
        """Marks the beginning of a launch, and returns its time."""
        now = time.perf_counter()
        with self._lock:
            if not self._launches and self._last_end is not None:
                self._add(seconds_between=now - self._last_end)
            self._launches.append(now)
        return now

    def launched(self, began: float) -> None:
        """Marks the end of the launch that began then."""
        with self._lock:
            self._add(launch_seconds=time.perf_counter() - began)

    def finished(self, shape: str, decode_steps: int = 1) -> None:
        """Marks that the results of the oldest dispatch in flight have been read.

        Args:
          shape: the name of its shape.
          decode_steps: the number of its decode steps.
        """
        now = time.perf_counter()
        with self._lock:
            began = self._launches.popleft()
            if self._last_end is not None:
                began = max(began, self._last_end)
            self._last_end = now
            times = self._figures.shapes.get(shape, ShapeTimes()).plus(1, now - began)
            self._figures = dataclasses.replace(
                self._figures, shapes={**self._figures.shapes, shape: times}
            )
            self._add(seconds_in_flight=now - began)
            self._times.record(shape, decode_steps, now - began)

    def seconds_left(self, shape: str, decode_steps: int = 1) -> float:
        """Returns the predicted time until the only dispatch in flight ends. It is 0 if there is
        no such dispatch, or no forecast for it.

        Args:
          shape: the name of its shape.
          decode_steps: the number of its decode steps.
        """
        with self._lock:
            if len(self._launches) != 1:
                return 0.0
            began = max(self._launches[0], self._last_end or 0.0)
            ends = began + self._times.least(shape, decode_steps)
            return max(0.0, ends - time.perf_counter())

    def rest(self) -> None:
        """Marks that there is nothing to do until the next launch."""
        with self._lock:
            self._last_end = None

    def _add(self, **seconds: float) -> None:
        totals = {name: getattr(self._figures, name) + value for name, value in seconds.items()}
        self._figures = dataclasses.replace(self._figures, **totals)
