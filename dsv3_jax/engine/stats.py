"""Figures of a running engine, samples of them over time, and the clocks that measure them."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

from dsv3_jax.engine.scheduling.step_plan import StepPlan
from dsv3_jax.engine.scheduling.step_sizes import StepTimes
from dsv3_jax.pages import TierStats


@dataclasses.dataclass(frozen=True)
class ShardStats:
    """Figures of one data-parallel shard."""

    running: int
    """Requests that have a slot on it."""
    cache_usage: float
    """Share of its pages that requests refer to, from 0 to 1."""


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


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """Figures of an engine at one moment. Counts are totals since it was made."""

    running: int
    """Requests that have a slot."""
    waiting: int
    """Requests in the waiting queue."""
    cache_usage: float
    """Share of the cache's pages that requests refer to, from 0 to 1."""
    cache_tokens: int
    """Size of the cache, of all shards together."""
    shards: tuple[ShardStats, ...]
    """Figures of each data-parallel shard."""
    prefix_hit_tokens: int
    """Prompt tokens that the prefix cache saved."""
    prefix_queried_tokens: int
    """Prompt tokens of all admitted requests."""
    prompt_tokens: int
    """Prompt tokens that were prefilled."""
    output_tokens: int
    """Tokens that were generated."""
    drafted_tokens: int
    """Drafts that the model verified."""
    accepted_tokens: int
    """Drafts that became tokens."""
    preemptions: int
    """Requests that lost their pages to others. They were prefilled again, or in deterministic mode
    moved to host memory."""
    compiled_after_warm_up: int
    """Programs that were compiled while requests were waiting: those of options that
    :meth:`Engine.warm_up` leaves out, see :class:`CompileTimes`."""
    steps: int
    """Dispatched steps."""
    host_us_per_step: float
    """Microseconds of the engine's thread per dispatch: planning, dispatching and processing of
    results. They overlap with the device's work. Launches in a thread of their own do not count."""
    host_us: dict[str, float]
    """Its parts, and ``waiting`` for results."""
    dispatches: DispatchFigures
    """Times of the dispatches, by shape."""
    loading: int = 0
    """Waiting requests whose pages are being loaded from the tiers, or that wait for the memory."""
    loading_bytes: int | None = None
    """Host memory of the pages that are loaded for waiting requests, until they are on the device.
    Never more than ``CacheTiers.load_bytes``. None without tiers."""
    loaded_tokens: int = 0
    """Prompt tokens that were loaded from the tiers, among ``prefix_hit_tokens``."""
    reloaded_tokens: int = 0
    """Tokens of preempted requests that were loaded from the tiers when they came back."""
    unsaved_pages: int = 0
    """Pages that were not copied to the tiers, because too many waited for the host."""
    compile_seconds: float = 0.0
    """Seconds that steps waited for programs to be compiled."""
    compiling_seconds: float = 0.0
    """Seconds since the compilation that a step waits for now began; 0 if none does."""
    tiers: tuple[TierStats, ...] = ()
    """Figures of host memory and of the disk, as far as the engine has them."""

    def since(self, before: EngineStats) -> EngineStats:
        """Returns the figures with totals counted from an earlier moment."""
        names = (
            "prefix_hit_tokens",
            "prefix_queried_tokens",
            "prompt_tokens",
            "output_tokens",
            "drafted_tokens",
            "accepted_tokens",
            "preemptions",
            "compiled_after_warm_up",
            "steps",
            "loaded_tokens",
            "reloaded_tokens",
            "unsaved_pages",
            "compile_seconds",
        )
        totals = {name: getattr(self, name) - getattr(before, name) for name in names}
        host = self.host_us_per_step * self.steps - before.host_us_per_step * before.steps
        host_us = host / totals["steps"] if totals["steps"] else 0.0
        parts = {
            name: (us * self.steps - before.host_us[name] * before.steps) / max(totals["steps"], 1)
            for name, us in self.host_us.items()
        }
        return dataclasses.replace(
            self,
            **totals,
            host_us_per_step=host_us,
            host_us=parts,
            dispatches=self.dispatches.since(before.dispatches),
            tiers=tuple(map(TierStats.since, self.tiers, before.tiers)),
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the figures by name."""
        return {**dataclasses.asdict(self), "dispatches": self.dispatches.as_json()}


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


class HostTimes:
    """Measures what the host's part of a step takes. Written by the engine's thread alone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.steps = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        names = ("planning", "dispatching", "waiting", "processing")
        self.seconds: dict[str, float] = dict.fromkeys(names, 0.0)

    @property
    def us_per_step(self) -> float:
        """Microseconds per step, without those of waiting for the device."""
        busy = sum(self.seconds.values()) - self.seconds["waiting"]
        return 1e6 * busy / self.steps if self.steps else 0.0

    @property
    def us(self) -> dict[str, float]:
        """Microseconds per step of each part."""
        return {name: 1e6 * s / max(self.steps, 1) for name, s in self.seconds.items()}

    @property
    def seconds_to_launch(self) -> float:
        """Mean time from the beginning of a plan to its launch."""
        if not self.steps:
            return 0.0
        return (self.seconds["planning"] + self.seconds["dispatching"]) / self.steps

    def count(self, plan: StepPlan, output_tokens: int) -> None:
        """Counts a step whose results have been read."""
        self.steps += 1
        self.prompt_tokens += sum(chunk.count for chunk in plan.chunks)
        self.output_tokens += output_tokens

    @contextlib.contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Measures ``planning``, ``dispatching``, ``waiting`` or ``processing``."""
        began = self._clock()
        try:
            yield
        finally:
            self.seconds[part] += self._clock() - began


class DispatchTimes:
    """Measures dispatches by the host's clock. They end in the order of their launches.

    Two threads write: the one that launches, and the one that reads results.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.figures = DispatchFigures()
        """The totals."""
        self._times = StepTimes()
        self._launches: deque[float] = deque()
        """Beginning of the launch of each dispatch in flight."""
        self._last_end: float | None = None
        """End of the last dispatch, unless there was nothing to do after it."""

    def begin_launch(self) -> float:
        """Marks the beginning of a launch, and returns its time."""
        now = time.perf_counter()
        with self._lock:
            if not self._launches and self._last_end is not None:
                self._add(seconds_between=now - self._last_end)
            self._launches.append(now)
        return now

    def end_launch(self, began: float) -> None:
        """Marks the end of the launch that began then."""
        with self._lock:
            self._add(launch_seconds=time.perf_counter() - began)

    def finished(self, shape: str, decode_steps: int = 1, *, is_late: bool = False) -> None:
        """Marks that the results of the oldest dispatch in flight have been read. If they had been
        there before somebody waited for them, ``is_late``, the forecast of such dispatches was too
        long: a loop that sleeps by it would measure its own sleep, and go on sleeping."""
        now = time.perf_counter()
        with self._lock:
            began = self._launches.popleft()
            if self._last_end is not None:
                began = max(began, self._last_end)
            self._last_end = now
            shapes = self.figures.shapes
            times = shapes.get(shape, ShapeTimes()).plus(1, now - began)
            self.figures = dataclasses.replace(self.figures, shapes={**shapes, shape: times})
            self._add(seconds_in_flight=now - began)
            if is_late:
                self._times.forget(shape, decode_steps)
            else:
                self._times.record(shape, decode_steps, now - began)

    def seconds_left(self, shape: str, decode_steps: int = 1) -> float:
        """Returns the predicted time until the only dispatch in flight ends. It is 0 if there is
        no such dispatch, or no forecast for it."""
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
        totals = {name: getattr(self.figures, name) + value for name, value in seconds.items()}
        self.figures = dataclasses.replace(self.figures, **totals)


COMPILE_SECONDS = 1800.0
"""Longest time of a compilation that steps wait for. After it the compiler counts as stuck."""


class Compilation(NamedTuple):
    """A compilation that steps wait for."""

    program: str
    seconds: float
    """Time since it began."""


class CompileTimes:
    """Measures the compilations that steps wait for, in this process and in others of its mesh.

    Warm-up compiles the programs of the default options. A program of other options is compiled
    when a step first needs it, and that step, all later ones and their requests wait. Meanwhile the
    device is not stuck, so that this time does not count as the step's. All threads may use this.
    """

    def __init__(self) -> None:
        self.on_change: Callable[[Compilation | None], object] = lambda compilation: None
        """Is called before a compilation, and with None when no further one is under way."""
        self._lock = threading.Lock()
        self._under_way: dict[Hashable, tuple[str, float]] = {}  # oldest first
        self._began = 0.0  # time since which some were under way
        self._ended_seconds = 0.0

    @property
    def seconds(self) -> float:
        """Seconds in which something was compiled, until now."""
        with self._lock:
            now = time.monotonic() - self._began if self._under_way else 0.0
            return self._ended_seconds + now

    @property
    def current(self) -> Compilation | None:
        """The oldest compilation that is under way, or None."""
        with self._lock:
            for program, began in self._under_way.values():
                return Compilation(program, time.monotonic() - began)
        return None

    def begin(self, who: Hashable, program: str) -> None:
        """Notes that ``who`` begins to compile a program."""
        with self._lock:
            now = time.monotonic()
            if not self._under_way:
                self._began = now
            self._under_way[who] = program, now
        self.on_change(Compilation(program, 0.0))

    def end(self, who: Hashable) -> None:
        """Notes that a compilation has ended, if one is under way."""
        with self._lock:
            if self._under_way.pop(who, None) is None or self._under_way:
                return
            self._ended_seconds += time.monotonic() - self._began
        self.on_change(None)

    @contextlib.contextmanager
    def measure(self, program: str) -> Iterator[None]:
        """Measures a compilation."""
        who = object()
        self.begin(who, program)
        try:
            yield
        finally:
            self.end(who)
