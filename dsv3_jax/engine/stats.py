"""Figures of a running engine."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from dsv3_jax.engine.dispatch_times import DispatchFigures
from dsv3_jax.engine.step_plan import StepPlan
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
    """Programs that were compiled while requests were waiting."""
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


class HostTimes:
    """Measures what the host's part of a step takes. Written by the engine's thread alone."""

    def __init__(self) -> None:
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

    def planning(self) -> contextlib.AbstractContextManager[None]:
        """Measures the scheduler."""
        return self._measure("planning")

    def dispatching(self) -> contextlib.AbstractContextManager[None]:
        """Measures the launch of a step."""
        return self._measure("dispatching")

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Measures how long the host waits for the device."""
        return self._measure("waiting")

    def processing(self) -> contextlib.AbstractContextManager[None]:
        """Measures what is done with results."""
        return self._measure("processing")

    def count(self, plan: StepPlan, output_tokens: int) -> None:
        """Counts a step whose results have been read."""
        self.steps += 1
        self.prompt_tokens += sum(chunk.count for chunk in plan.chunks)
        self.output_tokens += output_tokens

    @contextlib.contextmanager
    def _measure(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - began
