"""One engine under simulated time: the engine's own loop and scheduler, and a device that only
takes time.

The host's own work takes time too, which the device's work hides if it is longer. While a client in
the same process submits requests, the loop stands still: Python's threads share one interpreter,
and the loop would need it many times for each step.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from dsv3_jax.engine.scheduling.page_allocator import PageAllocator
from dsv3_jax.engine.scheduling.scheduler import Scheduler
from dsv3_jax.engine.scheduling.scheduler_shard import shard_load
from dsv3_jax.engine.scheduling.step_plan import (
    End,
    PageSave,
    Phase,
    RequestResult,
    ScheduledRequest,
    SchedulerConfig,
    StepGains,
    StepPlan,
)
from dsv3_jax.engine.scheduling.step_sizes import (
    DecodePace,
    FixedLimits,
    LatencyTargets,
    SlaController,
)
from dsv3_jax.engine.scheduling.step_sizes import StepTimes as RecentTimes
from dsv3_jax.engine.scheduling.stored_pages import SwapSpace
from dsv3_jax.engine.stats import DispatchTimes, HostTimes
from dsv3_jax.engine.step_loop import StepLoop
from dsv3_jax.generation.completion import FULL
from dsv3_jax.simulator.step_times import StepTimes, StepWork
from dsv3_jax.simulator.workload import SimulatedRequest


@dataclasses.dataclass(frozen=True)
class HostCosts:
    """Time of the host in an iteration of the loop, in seconds."""

    plan: float = 0.0  # planning and dispatch, per step
    plan_request: float = 0.0  # the same, per request of the step
    read: float = 0.0  # processing of results, per step
    read_request: float = 0.0  # the same, per request of the step


@dataclasses.dataclass(frozen=True)
class ReplicaSettings:
    """Settings of one engine."""

    scheduler: SchedulerConfig
    shards: int  # data-parallel shards
    pages: int  # cache pages of each shard
    page_size: int = 64
    prefix_cache: bool = True
    max_steps: int = 1  # most decode steps in a dispatch
    adaptive_steps: bool = True
    """Whether the number of decode steps in a dispatch follows their time, as in the engine.
    Otherwise every dispatch that can has ``max_steps``, which makes long simulations faster: a new
    request then waits longer."""
    drafts: int = 0
    acceptance: float = 0.0  # probability that a draft is accepted if those before it were
    resumes: bool = False  # whether requests arrive with their prompts cached, as in a decode pool
    stored_prompts: bool = False  # whether beginnings of prompts are on disk (``stored_tokens``)
    plans_late: bool = True
    """Whether a step is planned just before the one in flight ends, as the engine does while it has
    free slots. Otherwise it is planned at once, and a new request waits for one more step."""
    host: HostCosts = HostCosts()
    targets: LatencyTargets | None = None  # latencies that a controller keeps, as in an engine


class _InFlight(NamedTuple):
    plan: StepPlan
    program: Hashable  # by which its time is forecast
    begin: float  # time at which the device begins
    end: float


@dataclasses.dataclass
class ReplicaFigures:
    """Totals of a replica."""

    steps: int = 0
    dispatches: int = 0
    prompt_tokens: int = 0  # prompt tokens that were computed
    hit_tokens: int = 0  # prompt tokens that were in the cache, those from disk included
    output_tokens: int = 0
    device_seconds: float = 0.0  # time in which the device ran steps
    bound_by: dict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    """Device time by the resource that took longest."""
    waits_for: dict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    """Device time of steps that left requests waiting, by what these lacked: ``slots``, ``pages``
    or ``budget`` of prompt tokens."""
    running_seconds: float = 0.0  # integral over time of the number of requests in the steps


class Replica:
    """One engine. ``finished`` is called for each request at its end, after its times are written.
    ``seed`` is that of the accepted drafts."""

    def __init__(
        self,
        settings: ReplicaSettings,
        times: StepTimes,
        finished: Callable[[SimulatedRequest], None],
        *,
        seed: int = 0,
    ):
        self.settings = settings
        allocators = [
            PageAllocator(settings.pages, settings.page_size, prefix_cache=settings.prefix_cache)
            for _ in range(settings.shards)
        ]
        # Host memory that never runs full: requests of a decode pool come from there.
        swaps = [SwapSpace(1000 * settings.pages) for _ in allocators] if settings.resumes else None
        config = settings.scheduler
        self.scheduler = Scheduler(config, allocators, swaps)
        self._device = _Device(settings, times, self.scheduler, finished, seed)
        controller = FixedLimits(config.limits)
        if settings.targets is not None:
            controller = SlaController(settings.targets, config.limits)
        self._loop = StepLoop(
            self.scheduler,
            self._device,
            self._device,
            overlap=True,
            controller=controller,
            pace=DecodePace() if settings.adaptive_steps else _MostSteps(),
            times=_HostTimes(self._device),
            clock=self._device.clock,
        )
        self._client_busy = 0.0

    @property
    def figures(self) -> ReplicaFigures:
        """Totals so far."""
        return self._device.figures

    def reset(self) -> None:
        """Begins new totals."""
        self._device.figures = ReplicaFigures()

    def add(self, request: SimulatedRequest) -> None:
        """Puts a request into the waiting queue."""
        self._client_busy = max(self._client_busy, request.client_busy)
        self.scheduler.add(request)

    def advance(self, now: float) -> float | None:
        """Runs one turn of the loop, which begins at ``now``. Returns when the next one begins, or
        None if there is nothing to do before another request arrives."""
        if self._client_busy > now:
            return self._client_busy  # the client has the interpreter
        self._device.now = now
        if self.settings.plans_late and (late := now + self._loop.seconds_to_plan) > now:
            return late
        if self.settings.stored_prompts:
            self._promote()
        return self._device.now if self._loop.step() else None

    def _promote(self) -> None:
        """Reads the stored beginnings of the prompts that the next plan admits from disk, into the
        pages of the shards that they will run on. The scheduler finds them like any prefix."""
        shards, config = self.scheduler.shards, self.settings.scheduler
        loads = [shard_load(s.pages.used * s.pages.page_size, len(s.running)) for s in shards]
        rooms = [
            config.max_chunks - sum(self._chunks_left(r, r.computed) for r in shard.running)
            if shard.has_free_slot
            else 0
            for shard in shards
        ]
        for request in self.scheduler.waiting:
            open_shards = [number for number, room in enumerate(rooms) if room > 0]
            if not open_shards:
                return
            assert isinstance(request, SimulatedRequest)
            number = min(open_shards, key=loads.__getitem__)
            stored = 0 if request.preemptions else request.stored_tokens
            pages = shards[number].pages
            if stored and not pages.cached_prefix(request.tokens):
                granted = pages.allocate(stored // pages.page_size)
                if granted is None:
                    return
                pages.publish(request.tokens[:stored], granted)
                pages.release(granted)
            rooms[number] -= self._chunks_left(request, stored)
            loads[number] += shard_load(len(request.tokens), 1)

    def _chunks_left(self, request: ScheduledRequest, computed: int) -> int:
        """Returns the chunks of a prompt after its first ``computed`` tokens."""
        if request.phase is Phase.DECODE:
            return 0
        return -(-(len(request.tokens) - computed) // self.settings.scheduler.chunk_tokens)


class _MostSteps:
    """Gives every dispatch as many steps as it can have."""

    def choose(self, most: int) -> tuple[int, None]:
        return most, None

    def read(self, plan: StepPlan, results: Sequence[RequestResult], now: float) -> None:
        pass


class _Device:
    """Runs plans by letting time pass, and counts what requests gain: executor and requests of a
    :class:`StepLoop`."""

    def __init__(
        self,
        settings: ReplicaSettings,
        step_times: StepTimes,
        scheduler: Scheduler,
        finished: Callable[[SimulatedRequest], None],
        seed: int,
    ):
        self.now = 0.0
        self.figures = ReplicaFigures()
        self.times = DispatchTimes()
        self.max_decode_steps = settings.max_steps
        self.compiled_after_warm_up = 0
        self._settings = settings
        self._step_times = step_times
        self._scheduler = scheduler
        self._finished = finished
        self._recent = RecentTimes()
        self._in_flight: deque[_InFlight] = deque()
        self._free_at = 0.0
        self._random = np.random.default_rng(seed)

    def clock(self) -> float:
        """Returns the simulated time."""
        return self.now

    @property
    def dispatches_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def seconds_left(self) -> float:
        if not self._in_flight:
            return 0.0
        newest = self._in_flight[-1]
        least = self._recent.least(newest.program, newest.plan.decode_steps)
        return max(0.0, newest.begin + least - self.now)

    @property
    def launch_seconds(self) -> float:
        """Time of planning and dispatching the step in flight."""
        return self._host_seconds(self._in_flight[-1].plan) if self._in_flight else 0.0

    def _host_seconds(self, plan: StepPlan) -> float:
        host = self._settings.host
        return host.plan + host.plan_request * len(plan.requests)

    def dispatch(self, plan: StepPlan) -> None:
        self.now += self._host_seconds(plan)
        step = self._step_times.of(StepWork.of(plan), plan.decode_steps)
        begin = max(self.now, self._free_at)
        self._free_at = begin + step.seconds
        program = step.program, bool(plan.chunks)
        self._in_flight.append(_InFlight(plan, program, begin, self._free_at))
        figures = self.figures
        figures.dispatches += 1
        figures.steps += plan.decode_steps
        figures.device_seconds += step.seconds
        figures.bound_by[step.binding] += step.seconds
        figures.running_seconds += step.seconds * len(plan.requests)
        for chunk in plan.chunks:
            figures.prompt_tokens += chunk.count
            if chunk.is_first:
                figures.hit_tokens += chunk.start
        if self._scheduler.waiting:
            figures.waits_for[self._lack(plan)] += step.seconds

    def _lack(self, plan: StepPlan) -> str:
        """Returns what keeps the first waiting request from being admitted."""
        if not any(shard.has_free_slot for shard in self._scheduler.shards):
            return "slots"
        if all(len(each.chunks) >= self._scheduler.config.max_chunks for each in plan.shards):
            return "budget"
        return "pages"

    def save(self, saves: Sequence[PageSave]) -> Future[None]:
        raise NotImplementedError("there is no store of pages")

    def wait(self) -> tuple[StepPlan, list[RequestResult]]:
        plan, program, begin, end = self._in_flight.popleft()
        self._recent.record(program, plan.decode_steps, end - begin)
        self.now = max(self.now, end)
        return plan, []  # :meth:`take` draws the tokens

    def close(self) -> None:
        pass

    def wait_for_room(self) -> None:
        pass

    def take_ended(self) -> Mapping[ScheduledRequest, End]:
        return {}

    def take(self, plan: StepPlan, results: Sequence[RequestResult]) -> StepGains:
        host = self._settings.host
        self.now += host.read + host.read_request * len(plan.requests)
        gained, ends = self._gains(plan), {}
        for request, tokens in gained.items():
            assert isinstance(request, SimulatedRequest)
            if request.phase is Phase.ENDED:
                continue
            if request.first_token != request.first_token:  # NaN
                request.first_token = self.now
            self.figures.output_tokens += len(tokens)
            if len(request.tokens) + len(tokens) >= request.max_length:
                request.end = self.now
                ends[request] = FULL
        return StepGains(gained, ends)

    def end(self, request: ScheduledRequest, end: End) -> None:
        assert isinstance(request, SimulatedRequest)
        self._finished(request)

    def _gains(self, plan: StepPlan) -> dict[ScheduledRequest, list[int]]:
        """Returns the tokens that each request of a plan has gained."""
        gained: dict[ScheduledRequest, list[int]] = {
            chunk.request: _ONE for chunk in plan.chunks if chunk.is_last
        }
        if not self._settings.drafts:
            steps = plan.decode_steps
            for request in plan.decodes:
                left = request.max_length - len(request.tokens)
                gained[request] = _ONE if steps == 1 and left else [0] * min(steps, left)
            return gained
        chances = self._random.random((len(plan.decodes), plan.decode_steps, self._settings.drafts))
        accepted = np.cumprod(chances < self._settings.acceptance, axis=2).sum(axis=(1, 2))
        for request, more in zip(plan.decodes, accepted.tolist(), strict=True):
            left = request.max_length - len(request.tokens)
            gained[request] = [0] * min(plan.decode_steps + more, left)
        return gained


_ONE = [0]


class _HostTimes(HostTimes):
    """The engine's mean time from a plan to its launch is here that of the last plan."""

    def __init__(self, device: _Device):
        super().__init__(device.clock)
        self._device = device

    @property
    def seconds_to_launch(self) -> float:
        return self._device.launch_seconds
