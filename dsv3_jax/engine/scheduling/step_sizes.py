"""Chooses the sizes of the next steps from the times of earlier ones.

A pace chooses how many decode steps a dispatch has, so that a new request does not wait long for
its end. With latency targets, a controller chooses how many requests run and how many chunks a step
prefills.

Two limits of the scheduler decide over latency. More running requests make every step longer, and
so do prefill chunks in the same step; fewer of either make new requests wait. The controller
changes both by additive increase and multiplicative decrease (AIMD), as TCP does with its window:

- If tokens come too slowly in steps that only decode, or with a single chunk, there are too many
  running requests.
- If they do in steps with more chunks, there are too many chunks.
- If they come in time with a margin, the limits grow by a constant: that of running requests while
  requests wait, that of chunks while first tokens come late.

Tokens of running requests come before first tokens of new ones: where both targets cannot be met,
new requests wait. Pure Python; times are on the caller's clock.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from typing import Protocol

from dsv3_jax.engine.scheduling.step_plan import RequestResult, StepLimits, StepPlan

DISPATCH_SECONDS = 0.02
"""Aim for the length of a dispatch that decodes several times. A new request waits for one."""

_RECENT = 8
_SMOOTHING = 0.9  # weight of earlier measurements

INTERVAL = 0.5
"""Seconds between two changes."""

DECREASE = 0.75
"""Factor of a limit after an interval that missed the target."""

MARGIN = 0.85
"""A limit grows only while latencies are below this share of the target. The gap to 1 is wider than
what one increase changes, so that it does not miss the target at once."""

_STEPS = 32  # increases from nothing to the largest limit
_PERCENTILE = 0.9
_LEAST_SAMPLES = 4


class StepTimes:
    """Times of the last dispatches of each kind of work, such as a compiled program. A first
    dispatch does not count: it compiles or loads its program."""

    def __init__(self) -> None:
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
        is_measured = work in self._known
        self._known.add(work)
        if is_measured:
            self._recent[work, steps].append(seconds)
            if steps:
                self._per_step[work] = seconds / steps

    def forget(self, work: Hashable, steps: int) -> None:
        """Drops the times of such dispatches, because they take less by now."""
        self._recent.pop((work, steps), None)

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


@dataclasses.dataclass(frozen=True)
class LatencyTargets:
    """Largest latencies, in seconds; None for no target.

    Raises:
      ValueError: a target is not above 0, or there is none.
    """

    ttft: float | None = None
    """From the submission to the first token, of nine requests in ten."""
    tpot: float | None = None
    """Between two tokens of a request, in nine steps of ten."""

    def __post_init__(self) -> None:
        if self.ttft is None and self.tpot is None:
            raise ValueError("targets: expected a TTFT, a TPOT or both, got none")
        for name, value in (("ttft", self.ttft), ("tpot", self.tpot)):
            if value is not None and not value > 0:
                raise ValueError(f"{name}: expected seconds above 0, got {value}")


class FixedLimits:
    """Limits of every step that never change."""

    def __init__(self, limits: StepLimits):
        self._most = limits

    def read(self, plan: StepPlan, new_tokens: int, now: float) -> None:
        """Takes the time at which the results of a plan, ``new_tokens`` in all, were read."""

    def rest(self) -> None:
        """Marks that there is nothing to do until the next request arrives."""

    def update(self, now: float, waiting_since: float | None) -> StepLimits:
        """Returns the next step's limits. A request has waited since ``waiting_since``, or none."""
        return self._most


class SlaController(FixedLimits):
    """Chooses the limits of every step, which change once in an interval. It begins with the
    largest ones, ``most``, which programs are compiled for."""

    def __init__(self, targets: LatencyTargets, most: StepLimits):
        super().__init__(most)
        self.targets = targets
        self._running, self._chunks = float(most.running), float(most.chunks)
        self._next_change: float | None = None
        self._last_read: float | None = None
        self._ttfts: list[float] = []
        self._tpots: dict[bool, list[float]] = {False: [], True: []}  # by whether the step prefills

    @property
    def limits(self) -> StepLimits:
        """The limits of the next step."""
        return StepLimits(int(self._running), int(self._chunks))

    def read(self, plan: StepPlan, new_tokens: int, now: float) -> None:
        first = [c.request for c in plan.chunks if c.is_last]
        self._ttfts += [now - r.arrival for r in first if not r.preemptions]
        decoded = new_tokens - len(first)
        if plan.decodes and self._last_read is not None and decoded > 0:
            per_token = (now - self._last_read) * len(plan.decodes) / decoded
            self._tpots[bool(plan.chunks)].append(per_token)
        self._last_read = now

    def rest(self) -> None:
        self._last_read = None

    def update(self, now: float, waiting_since: float | None) -> StepLimits:
        if self._next_change is None:
            self._next_change = now + INTERVAL
        elif now >= self._next_change:
            self._change(now, waiting_since)
            self._next_change = now + INTERVAL
        return self.limits

    def _change(self, now: float, waiting_since: float | None) -> None:
        alone, beside_chunks = self._tpot_share(False), self._tpot_share(True)
        slow = max(alone, beside_chunks)
        ttft = self._ttft_share(now, waiting_since)
        if alone > 1 or (beside_chunks > 1 and self._chunks < 2):
            self._running *= DECREASE
        elif beside_chunks > 1:
            self._chunks *= DECREASE
        elif slow < MARGIN:
            if waiting_since is not None:
                self._running += self._most.running / _STEPS
            if ttft > MARGIN or self.targets.ttft is None:
                self._chunks += self._most.chunks / _STEPS
        self._running = min(max(self._running, 1.0), float(self._most.running))
        self._chunks = min(max(self._chunks, 1.0), float(self._most.chunks))
        self._ttfts.clear()
        for samples in self._tpots.values():
            samples.clear()

    def _tpot_share(self, prefills: bool) -> float:
        """Returns the latency of steps over its target; 0 without one or with too few steps."""
        samples = self._tpots[prefills]
        if self.targets.tpot is None or len(samples) < _LEAST_SAMPLES:
            return 0.0
        return _percentile(samples) / self.targets.tpot

    def _ttft_share(self, now: float, waiting_since: float | None) -> float:
        """Returns the time to the first token, so far for a waiting request, over its target."""
        samples = self._ttfts[:]
        if waiting_since is not None:
            samples.append(now - waiting_since)
        if self.targets.ttft is None or not samples:
            return 0.0
        return _percentile(samples) / self.targets.ttft


def _percentile(samples: list[float]) -> float:
    return sorted(samples)[int(_PERCENTILE * (len(samples) - 1))]
