"""Figures of a running engine, and samples of them over time."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

from dsv3_jax.engine.device.dispatch_times import DispatchFigures
from dsv3_jax.engine.scheduling.step_plan import StepPlan
from dsv3_jax.pages import TierStats


@dataclasses.dataclass(frozen=True)
class ShardStats:
    """Figures of one data-parallel shard."""

    running: int
    """Requests that have a slot on it."""
    cache_usage: float
    """Share of its pages that requests refer to, from 0 to 1."""


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
