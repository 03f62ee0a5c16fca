"""The turns of an engine's loop: plan a step, dispatch it, read the results of the step before it.

A turn knows plans and numbers, and neither arrays nor threads: a :class:`PlanExecutor` runs the
plans, and :class:`Requests` take their results, which is ``requests/delivery.py`` in an engine.
:class:`dsv3_jax.engine.loop.EngineLoop` adds the callers, the thread and the locks; the simulator
runs the same turns in simulated time.

With ``overlap``, the device runs one step ahead of what the host knows:

    turn n    plan n, dispatch n, wait for n - 1, take its results
    device         | ... step n - 1 ... | ... step n ... |

The plan of step n knows the tokens up to step n - 2. A step reads the newest tokens from the state
on the device, and computes nothing for requests that have ended there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from dsv3_jax.engine.scheduling.scheduler import Scheduler
from dsv3_jax.engine.scheduling.step_plan import (
    End,
    PageSave,
    RequestResult,
    ScheduledRequest,
    StepGains,
    StepPlan,
)
from dsv3_jax.engine.scheduling.step_sizes import DecodePace, FixedLimits, Pace
from dsv3_jax.engine.stats import DispatchTimes, HostTimes

LEAD_SECONDS = 0.004
"""Time from planning a step to its first kernel on the device, with a margin."""


class PlanExecutor(Protocol):
    """Runs plans in order, as ``Executor`` does on a device."""

    @property
    def dispatches_in_flight(self) -> int:
        """Plans whose results have not been read."""
        ...

    @property
    def seconds_left(self) -> float:
        """Predicted time until the step in flight ends; 0 if there is none, or no forecast."""
        ...

    @property
    def max_decode_steps(self) -> int:
        """Most decode steps in a plan."""
        ...

    @property
    def compiled_after_warm_up(self) -> int:
        """Number of programs that were compiled while requests were waiting for them."""
        ...

    @property
    def times(self) -> DispatchTimes:
        """Times of the dispatches, by shape."""
        ...

    def dispatch(self, plan: StepPlan) -> None:
        """Launches a plan. An error of the launch may be raised by :meth:`wait`."""
        ...

    def save(self, saves: Sequence[PageSave]) -> Future[None]:
        """Launches copies of pages without a plan. When done, all earlier ones are launched too."""
        ...

    def wait(self) -> tuple[StepPlan, list[RequestResult]]:
        """Waits for the oldest plan, and returns it with its results."""
        ...

    def close(self) -> None:
        """Frees the memory. Nothing can be dispatched after it."""
        ...


class Requests(Protocol):
    """The requests that have not ended, as their turns see them."""

    def take_ended(self) -> Mapping[ScheduledRequest, End]:
        """Returns the requests that have ended since the last call otherwise than by a result: by
        a stop string in their text, or by an error of it or of the first mask of their grammar."""
        ...

    def wait_for_room(self) -> None:
        """Waits until :meth:`take` can be called. It is called without the lock."""
        ...

    def take(self, plan: StepPlan, results: Sequence[RequestResult]) -> StepGains:
        """Takes the results of a plan."""
        ...

    def end(self, request: ScheduledRequest, end: End) -> None:
        """Ends a request, and tells its holder. The scheduler has ended it already."""
        ...


class StepLoop:
    """Moves requests from the waiting queue to their end, turn by turn.

    Args:
      overlap: whether a step is dispatched before the results of the step before it are read.
      controller: changes the scheduler's limits.
      pace: chooses the steps of dispatches that only decode.
      lock: is held while a step is planned, and while its results are taken.
      clock: the one of the requests' arrivals and deadlines.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: PlanExecutor,
        requests: Requests,
        *,
        overlap: bool,
        controller: FixedLimits,
        pace: Pace | None = None,
        lock: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        times: HostTimes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._scheduler = scheduler
        self._executor = executor
        self._requests = requests
        self._overlap = overlap
        self._controller = controller
        self._pace: Pace = pace or DecodePace()
        self._lock = lock
        self.times = times or HostTimes(clock)
        self._clock = clock

    @property
    def seconds_to_plan(self) -> float:
        """Time until the step in flight is about to end, if the next one can admit requests that
        arrive meanwhile; 0 or less if it is to be planned now."""
        if not self._overlap or not self._scheduler.has_room:
            return 0.0
        return self._executor.seconds_left - LEAD_SECONDS - self.times.seconds_to_launch

    def step(self) -> bool:
        """Plans and dispatches a step, and reads earlier results. Returns False if there was
        nothing to do."""
        executor = self._executor
        with self._lock():
            for request, end in self._requests.take_ended().items():
                self._scheduler.end(request)
                self._requests.end(request, end)
            with self.times.measure("planning"):
                now, waiting = self._clock(), self._scheduler.waiting
                since = waiting[0].arrival if waiting else None
                self._scheduler.limit(self._controller.update(now, since))
                steps, depth = self._pace.choose(executor.max_decode_steps)
                plan, ended = self._scheduler.schedule(now, max_decode_steps=steps, depth=depth)
                for request, reason in ended:
                    self._requests.end(request, reason)
            saves = self._scheduler.take_saves() if plan is None else ()
        if plan is not None:
            with self.times.measure("dispatching"):
                executor.dispatch(plan)
        elif saves:
            executor.save(saves)
        if plan is None and not executor.dispatches_in_flight:
            executor.times.rest()
            self._controller.rest()
        in_flight = 1 if self._overlap and plan is not None else 0
        has_read = executor.dispatches_in_flight > in_flight
        while executor.dispatches_in_flight > in_flight:
            self._read()
        return plan is not None or has_read or bool(ended)

    def _read(self) -> None:
        """Waits for the results of the oldest step, and hands them to its requests."""
        with self.times.measure("waiting"):
            plan, results = self._executor.wait()
            self._requests.wait_for_room()
        with self._lock(), self.times.measure("processing"):
            gains = self._requests.take(plan, results)
            new_tokens, now = sum(map(len, gains.tokens.values())), self._clock()
            self.times.count(plan, new_tokens)
            self._pace.read(plan, results, now)
            self._controller.read(plan, new_tokens, now)
            self._scheduler.report(plan, *gains)
            for request, end in gains.ends.items():
                self._requests.end(request, end)
