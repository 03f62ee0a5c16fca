"""One engine under simulated time: the engine's own scheduler, and a device that only takes time.

It follows :class:`dsv3_jax.engine.loop.EngineLoop`: the scheduler plans a step, shortly before the
one in flight ends; the step is dispatched while that one still runs; then the results of that one
are read. The host's own work takes time too, which the device's work hides if it is longer. While a
client in the same process submits requests, the loop stands still: Python's threads share one
interpreter, and the loop would need it many times for each step.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from typing import NamedTuple

import numpy as np

from dsv3_jax.engine.loop import LEAD_SECONDS
from dsv3_jax.engine.scheduling.decode_pace import DecodePace
from dsv3_jax.engine.scheduling.forecast import Forecast
from dsv3_jax.engine.scheduling.page_allocator import PageAllocator
from dsv3_jax.engine.scheduling.scheduler import Scheduler
from dsv3_jax.engine.scheduling.scheduler_shard import shard_load
from dsv3_jax.engine.scheduling.sla_controller import LatencyTargets, SlaController
from dsv3_jax.engine.scheduling.step_plan import (
    Phase,
    ScheduledRequest,
    SchedulerConfig,
    StepLimits,
    StepPlan,
)
from dsv3_jax.engine.scheduling.swap_space import SwapSpace
from dsv3_jax.simulator.step_times import StepTimes
from dsv3_jax.simulator.step_work import StepWork
from dsv3_jax.simulator.workload import SimulatedRequest


@dataclasses.dataclass(frozen=True)
class HostCosts:
    """Time of the host in an iteration of the loop, in seconds."""

    plan: float = 0.0
    """Planning and dispatch, per step."""
    plan_request: float = 0.0
    """The same, per request of the step."""
    read: float = 0.0
    """Processing of results, per step."""
    read_request: float = 0.0
    """The same, per request of the step."""


@dataclasses.dataclass(frozen=True)
class ReplicaSettings:
    """Settings of one engine."""

    scheduler: SchedulerConfig
    shards: int
    """Data-parallel shards."""
    pages: int
    """Cache pages of each shard."""
    page_size: int = 64
    prefix_cache: bool = True
    max_steps: int = 1
    """Most decode steps in a dispatch."""
    adaptive_steps: bool = True
    """Whether the number of decode steps in a dispatch follows their time, as in the engine.
    Otherwise every dispatch that can has ``max_steps``, which makes long simulations faster: a new
    request then waits longer."""
    drafts: int = 0
    acceptance: float = 0.0
    """Probability that a draft is accepted if those before it were."""
    resumes: bool = False
    """Whether requests arrive with their prompts cached elsewhere, as in a decode pool."""
    stored_prompts: bool = False
    """Whether beginnings of prompts are on disk, see ``Arrival.stored_tokens``."""
    plans_late: bool = True
    """Whether a step is planned just before the one in flight ends, as the engine does while it has
    free slots. Otherwise it is planned at once, and a new request waits for one more step."""
    host: HostCosts = HostCosts()
    targets: LatencyTargets | None = None
    """Latencies that a controller keeps, as in an engine with ``targets``."""


class _InFlight(NamedTuple):
    plan: StepPlan
    work: Hashable
    """Program and number of decode steps, by which its time is forecast."""
    begin: float
    """Time at which the device begins."""
    end: float


@dataclasses.dataclass
class ReplicaFigures:
    """Totals of a replica."""

    steps: int = 0
    dispatches: int = 0
    prompt_tokens: int = 0
    """Prompt tokens that were computed."""
    hit_tokens: int = 0
    """Prompt tokens that were in the cache, those from disk included."""
    output_tokens: int = 0
    device_seconds: float = 0.0
    """Time in which the device ran steps."""
    bound_by: dict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    """Device time by the resource that took longest."""
    waits_for: dict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    """Device time of steps that left requests waiting, by what these lacked: ``slots``, ``pages``
    or ``budget`` of prompt tokens."""
    running_seconds: float = 0.0
    """Integral over time of the number of requests in the steps."""


class Replica:
    """One engine.

    Args:
      finished: called for each request at its end, after its times are written.
      seed: of the accepted drafts.
    """

    def __init__(
        self,
        settings: ReplicaSettings,
        times: StepTimes,
        finished: Callable[[SimulatedRequest], None],
        *,
        seed: int = 0,
    ):
        self.settings = settings
        self.times = times
        self.figures = ReplicaFigures()
        allocators = [
            PageAllocator(settings.pages, settings.page_size, prefix_cache=settings.prefix_cache)
            for _ in range(settings.shards)
        ]
        # Host memory that never runs full: requests of a decode pool come from there.
        swaps = [SwapSpace(1000 * settings.pages) for _ in allocators] if settings.resumes else None
        self.scheduler = Scheduler(settings.scheduler, allocators, swaps)
        config = settings.scheduler
        self.controller: SlaController | None = None
        if settings.targets is not None:
            most = StepLimits(config.max_running, config.max_chunks)
            self.controller = SlaController(settings.targets, most)
        self._finished = finished
        self._pace = DecodePace()
        self._forecast = Forecast()
        self._in_flight: deque[_InFlight] = deque()
        self._device_free = 0.0
        self._client_busy = 0.0
        self._random = np.random.default_rng(seed)

    def add(self, request: SimulatedRequest) -> None:
        """Puts a request into the waiting queue."""
        self._client_busy = max(self._client_busy, request.client_busy)
        self.scheduler.add(request)

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

    def advance(self, now: float) -> float | None:
        """Runs one iteration of the loop, which begins at ``now``.

        Returns when the next one begins, or None if there is nothing to do before another request
        arrives.
        """
        if self._client_busy > now:
            return self._client_busy  # the client has the interpreter
        if self._in_flight and self.settings.plans_late and self.scheduler.has_room:
            newest = self._in_flight[-1]
            lead = LEAD_SECONDS + self._host_seconds(newest.plan)
            late = newest.begin + self._forecast.seconds(newest.work) - lead
            if late > now:
                return late
        most = self.settings.max_steps
        if self.settings.stored_prompts:
            self._promote()
        steps = self._pace.choose(most)[0] if self.settings.adaptive_steps else most
        if self.controller is not None:
            waiting = self.scheduler.waiting
            since = waiting[0].arrival if waiting else None
            self.scheduler.limit(self.controller.update(now, since))
        plan, _ = self.scheduler.schedule(now, max_decode_steps=steps)
        if plan is not None:
            now = self._dispatch(plan, now)
        in_flight = 0 if plan is None else 1
        has_read = len(self._in_flight) > in_flight
        while len(self._in_flight) > in_flight:
            now = self._read(now)
        if plan is None and not has_read:
            if self.controller is not None:
                self.controller.rest()
            return None
        return now

    def _dispatch(self, plan: StepPlan, now: float) -> float:
        now += self._host_seconds(plan)
        step = self.times.of(StepWork.of(plan), plan.decode_steps)
        begin = max(now, self._device_free)
        self._device_free = begin + step.seconds
        work = step.program, bool(plan.chunks), plan.decode_steps
        self._in_flight.append(_InFlight(plan, work, begin, self._device_free))
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
        if self.scheduler.waiting:
            figures.waits_for[self._lack(plan)] += step.seconds
        return now

    def _host_seconds(self, plan: StepPlan) -> float:
        """Returns the time of planning and dispatching a step."""
        return self.settings.host.plan + self.settings.host.plan_request * len(plan.requests)

    def _lack(self, plan: StepPlan) -> str:
        """Returns what keeps the first waiting request from being admitted."""
        shards = self.scheduler.shards
        if not any(shard.has_free_slot for shard in shards):
            return "slots"
        if all(len(each.chunks) >= self.scheduler.config.max_chunks for each in plan.shards):
            return "budget"
        return "pages"

    def _read(self, now: float) -> float:
        plan, work, begin, end = self._in_flight.popleft()
        self._forecast.record(work, end - begin)
        now = max(now, end)
        gained = self._gains(plan)
        host = self.settings.host
        now += host.read + host.read_request * len(plan.requests)
        self._pace.read(plan, (), now)
        if self.controller is not None:
            self.controller.read(plan, sum(map(len, gained.values())), now)
        finished: set[SimulatedRequest] = set()
        for request, tokens in gained.items():
            assert isinstance(request, SimulatedRequest)
            if request.phase is Phase.ENDED:
                continue
            if request.first_token != request.first_token:  # NaN
                request.first_token = now
            self.figures.output_tokens += len(tokens)
            if len(request.tokens) + len(tokens) >= request.max_length:
                request.end = now
                finished.add(request)
        self.scheduler.report(plan, gained, finished)
        for request in finished:
            self._finished(request)
        return now

    def _gains(self, plan: StepPlan) -> dict[ScheduledRequest, list[int]]:
        """Returns the tokens that each request of a plan has gained."""
        gained: dict[ScheduledRequest, list[int]] = {
            chunk.request: _ONE for chunk in plan.chunks if chunk.is_last
        }
        if not self.settings.drafts:
            steps = plan.decode_steps
            for request in plan.decodes:
                left = request.max_length - len(request.tokens)
                gained[request] = _ONE if steps == 1 and left else [0] * min(steps, left)
            return gained
        chances = self._random.random((len(plan.decodes), plan.decode_steps, self.settings.drafts))
        accepted = np.cumprod(chances < self.settings.acceptance, axis=2).sum(axis=(1, 2))
        for request, more in zip(plan.decodes, accepted.tolist(), strict=True):
            left = request.max_length - len(request.tokens)
            gained[request] = [0] * min(plan.decode_steps + more, left)
        return gained


_ONE = [0]
