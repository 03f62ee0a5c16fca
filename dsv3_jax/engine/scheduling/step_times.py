"""Times of recent dispatches, and what follows from them: when one ends, how long one should be."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from typing import Protocol

from dsv3_jax.engine.scheduling.step_plan import RequestResult, StepPlan

DISPATCH_SECONDS = 0.02
"""Aim for the length of a dispatch that decodes several times. A new request waits for one."""

_RECENT = 8
_SMOOTHING = 0.9  # weight of earlier measurements


class StepTimes:
    """Times of the last dispatches of each kind of work, such as a compiled program. With
    ``skips_first``, a first dispatch, which also compiles or loads its program, does not count."""

    def __init__(self, *, skips_first: bool = False):
        self._skips_first = skips_first
        self._known: set[Hashable] = set()
        self._recent: defaultdict[tuple[Hashable, int], deque[float]] = defaultdict(
            lambda: deque(maxlen=_RECENT)
        )
        self._per_step: dict[Hashable, float] = {}

    def has_run(self, work: Hashable) -> bool:
        """Returns whether such a dispatch has been recorded."""
        return work in self._known

    def record(self, work: Hashable, steps: int, seconds: float) -> None:
        """Adds the time of a dispatch with this number of decode steps."""
        is_measured = not self._skips_first or work in self._known
        self._known.add(work)
        if is_measured:
            self._recent[work, steps].append(seconds)
            if steps:
                self._per_step[work] = seconds / steps

    def least(self, work: Hashable, steps: int) -> float:
        """Returns the shortest time of the last eight such dispatches, 0 without any. It is early:
        a device that waits for the host costs more than a request that misses a step."""
        return min(self._recent.get((work, steps), ()), default=0.0)

    def per_step(self, work: Hashable) -> float | None:
        """Returns the seconds per step of the last dispatch, or None if none was measured."""
        return self._per_step.get(work)


class Pace(Protocol):
    """Chooses the size of dispatches that only decode."""

    def choose(self, most: int) -> tuple[int, int | None]:
        """Returns the number of decode steps, from 1 to ``most``, and the drafts in each, or None
        for the most. It is called before every plan."""
        ...

    def read(self, plan: StepPlan, results: Sequence[RequestResult], now: float) -> None:
        """Takes the results of a dispatch, and the time at which they were read."""
        ...


class DecodePace:
    """Lets a dispatch take about DISPATCH_SECONDS, by the recent mean time of a decode step."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        """Recent mean between two results of dispatches that only decode, per step."""
        self._last_read: float | None = None

    def read(self, plan: StepPlan, results: Sequence[RequestResult], now: float) -> None:
        """Takes the time at which the results of a plan were read."""
        if plan.chunks:
            self._last_read = None
            return
        if self._last_read is not None:
            seconds = (now - self._last_read) / plan.decode_steps
            if self.seconds is None:
                self.seconds = seconds
            else:
                self.seconds = _SMOOTHING * self.seconds + (1 - _SMOOTHING) * seconds
        self._last_read = now

    def choose(self, most: int) -> tuple[int, None]:
        """Returns the number of decode steps for a dispatch, from 1 to ``most``."""
        if self.seconds is None:
            return 1, None
        return max(1, min(int(DISPATCH_SECONDS / self.seconds), most)), None
