"""The loop of an engine: plan a step, dispatch it, read the results of the step before it.

The loop knows requests, plans and results, and no arrays: an executor runs the plans. Its public
methods can be called from any thread.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Protocol

from dsv3_jax.engine.dispatch_times import DispatchTimes
from dsv3_jax.engine.errors import EngineError
from dsv3_jax.engine.executor import RequestResult
from dsv3_jax.engine.output import RequestOutput
from dsv3_jax.engine.request import EngineRequest
from dsv3_jax.engine.scheduler import EndReason, Scheduler
from dsv3_jax.engine.stats import EngineStats, HostTimes, ShardStats
from dsv3_jax.engine.step_plan import ScheduledRequest, StepPlan
from dsv3_jax.generation.request import Request
from dsv3_jax.generation.state import NON_FINITE, RUNNING

DISPATCH_SECONDS = 0.02
"""Aim for the length of a dispatch that decodes several times. A new request waits for two."""


class PlanExecutor(Protocol):
    """Runs plans in order, as :class:`dsv3_jax.engine.executor.Executor` does on a device."""

    @property
    def steps_in_flight(self) -> int: ...

    @property
    def max_decode_steps(self) -> int: ...

    @property
    def compiled_after_warm_up(self) -> int: ...

    @property
    def times(self) -> DispatchTimes: ...

    def dispatch(self, plan: StepPlan) -> None: ...

    def wait(self) -> tuple[StepPlan, list[RequestResult]]: ...

    def forget(self, request: ScheduledRequest) -> None: ...

    def close(self) -> None: ...


class EngineLoop:
    """Moves requests from the waiting queue to their end.

    Args:
      scheduler: plans the steps.
      executor: runs them.
      settings: settings of the requests that are not at their end. The loop keeps it up to date,
        and the executor reads it.
      overlap: whether a step is dispatched before the results of the step before it are read.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: PlanExecutor,
        settings: dict[ScheduledRequest, Request],
        *,
        overlap: bool,
    ):
        self._scheduler = scheduler
        self._executor = executor
        self._settings = settings
        self._overlap = overlap
        self._outputs: dict[ScheduledRequest, RequestOutput] = {}
        self._new_grammars: list[RequestOutput] = []  # whose grammars have given no mask yet
        self._by_handle: dict[EngineRequest, ScheduledRequest] = {}
        self._host_times = HostTimes()
        self._error: EngineError | None = None
        self._is_closed = False
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts a thread that runs the steps."""
        self._thread = threading.Thread(target=self._run, name="dsv3-engine", daemon=True)
        self._thread.start()

    def add(self, *outputs: RequestOutput) -> None:
        """Puts requests into the waiting queue: all of them, or none if it raises.

        Raises:
          ValueError: a request needs more pages than there are.
          QueueFullError: too many requests are waiting.
          EngineError: the engine failed or was shut down.
        """
        with self._changed:
            self._check_open()
            self._scheduler.add(*(output.scheduled for output in outputs))
            for output in outputs:
                self._outputs[output.scheduled] = output
                self._settings[output.scheduled] = output.request
                self._by_handle[output.handle] = output.scheduled
                if output.grammar is not None:
                    self._new_grammars.append(output)
            self._changed.notify_all()

    def cancel(self, handle: EngineRequest) -> None:
        """Ends a request within one step. Does nothing if it is at its end."""
        with self._changed:
            scheduled = self._by_handle.get(handle)
            if scheduled is not None:
                self._scheduler.cancel(scheduled)
                self._changed.notify_all()

    def step(self) -> bool:
        """Runs one turn of the loop: plans and dispatches a step, and reads earlier results.

        Returns False if there was nothing to do. Call it only if the engine has no thread.
        """
        if self._thread is not None and self._thread is not threading.current_thread():
            raise ValueError(
                "step: expected an engine with background=False, got one with a thread"
            )
        try:
            return self._step()
        except BaseException as error:  # an interrupt may lose a plan or its results
            self._fail(error)
            raise

    def stats(self) -> EngineStats:
        """Returns figures of the engine as it is now."""
        with self._changed:
            scheduler = self._scheduler
            shards = tuple(
                ShardStats(len(shard.running), shard.pages.used / shard.pages.num_pages)
                for shard in scheduler.shards
            )
            pages = scheduler.shards[0].pages
            return EngineStats(
                running=len(scheduler.running),
                waiting=len(scheduler.waiting),
                cache_usage=sum(shard.cache_usage for shard in shards) / len(shards),
                cache_tokens=len(shards) * pages.num_pages * pages.page_size,
                shards=shards,
                prefix_hit_tokens=scheduler.prefix_hit_tokens,
                prefix_queried_tokens=scheduler.prefix_queried_tokens,
                prompt_tokens=self._host_times.prompt_tokens,
                output_tokens=self._host_times.output_tokens,
                preemptions=scheduler.preemptions,
                compiled_after_warm_up=self._executor.compiled_after_warm_up,
                steps=self._host_times.steps,
                host_us_per_step=self._host_times.us_per_step,
                host_us=self._host_times.us,
                dispatches=self._executor.times.figures,
            )

    def clear_prefix_cache(self) -> None:
        """Makes later requests compute their whole prompts again."""
        with self._changed:
            self._scheduler.clear_prefix_cache()

    def check_integrity(self) -> None:
        """Raises AssertionError if pages, slots or queues contradict each other."""
        with self._changed:
            self._scheduler.check_integrity()
            known = {*self._scheduler.waiting, *self._scheduler.running}
            assert known <= set(self._outputs), "a scheduled request has no output"

    def shutdown(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Stops taking requests, and ends.

        Args:
          drain: whether running and waiting requests are finished first; otherwise they are
            cancelled.
          timeout: seconds to wait for them. Those that are left are cancelled.
        """
        with self._changed:
            self._is_closed = True
            if not drain:
                self._cancel_all()
            self._changed.notify_all()
        if self._thread is None:
            deadline = math.inf if timeout is None else time.monotonic() + timeout
            while self._error is None and self.step():
                if time.monotonic() >= deadline:
                    self._cancel_all()
            self._executor.close()
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            with self._changed:
                self._cancel_all()
            self._thread.join()

    def _check_open(self) -> None:
        if self._error is not None:
            raise EngineError(str(self._error)) from self._error
        if self._is_closed:
            raise EngineError("engine: expected a running one, but it was shut down")

    def _cancel_all(self) -> None:
        for scheduled in self._outputs:
            self._scheduler.cancel(scheduled)

    def _run(self) -> None:
        """The body of the engine's thread."""
        while True:
            try:
                has_worked = self._step()
            except Exception as error:
                self._fail(error)
                return
            with self._changed:
                if has_worked or self._outputs:
                    continue
                if self._is_closed:
                    break
                self._changed.wait_for(lambda: self._outputs or self._is_closed)
        self._executor.close()

    def _fail(self, error: BaseException) -> None:
        """Ends all requests after an error of the device or of the engine itself."""
        self._executor.close()
        with self._changed:
            if self._error is not None:
                return
            self._error = EngineError(
                f"engine: a step failed: {str(error) or type(error).__name__}"
            )
            self._error.__cause__ = error
            for output in self._outputs.values():
                output.handle.fail(self._error)
            self._outputs.clear()
            self._settings.clear()
            self._by_handle.clear()

    def _step(self) -> bool:
        with self._changed:
            self._check_failed()
            self._start_grammars()
            with self._host_times.planning():
                plan, ended = self._scheduler.schedule(
                    time.monotonic(), max_decode_steps=self._max_decode_steps()
                )
                for scheduled, reason in ended:
                    self._end(scheduled, reason)
        if plan is not None:
            with self._host_times.dispatching():
                self._executor.dispatch(plan)
        elif not self._executor.steps_in_flight:
            self._executor.times.rest()
        in_flight = 1 if self._overlap and plan is not None else 0
        has_read = self._executor.steps_in_flight > in_flight
        while self._executor.steps_in_flight > in_flight:
            self._read()
        return plan is not None or has_read or bool(ended)

    def _start_grammars(self) -> None:
        """Gets the first masks of new requests with grammars."""
        outputs, self._new_grammars = self._new_grammars, []
        for output in outputs:
            if output.scheduled in self._outputs:
                assert output.grammar is not None
                try:
                    self._settings[output.scheduled] = output.grammar.constrained()
                except Exception as error:  # the grammar's, which must not hurt others
                    self._scheduler.end(output.scheduled)
                    self._finish(output.scheduled, error)

    def _check_failed(self) -> None:
        if self._error is not None:
            raise EngineError(str(self._error)) from self._error

    def _max_decode_steps(self) -> int:
        seconds = self._host_times.seconds_per_decode_step
        if seconds is None:
            return 1
        return max(1, min(int(DISPATCH_SECONDS / seconds), self._executor.max_decode_steps))

    def _read(self) -> None:
        """Waits for the results of the oldest step, and hands them to its requests."""
        with self._host_times.waiting():
            plan, results = self._executor.wait()
        with self._changed, self._host_times.processing():
            self._host_times.count(plan, sum(len(result.tokens) for result in results))
            ends: dict[ScheduledRequest, int | Exception] = {}
            for result in results:
                if (end := self._take(result)) is not None:
                    ends[result.request] = end
            gained = {result.request: result.tokens for result in results}
            self._scheduler.report(plan, gained, ends.keys())
            for request, end in ends.items():
                self._finish(request, end)
            for request in gained:
                if request in self._outputs:
                    self._outputs[request].stream()

    def _take(self, result: RequestResult) -> int | Exception | None:
        """Adds a result to its request's output. Returns why the request is at its end: a value of
        ``finished`` or an error of its own; None if it is not."""
        output = self._outputs.get(result.request)
        if output is None:
            return None  # it has ended in the meantime
        try:
            if result.prompt is not None:
                output.add_prompt(*result.prompt)
            for step in result.steps:
                output.add(step, is_decode=result.is_decode)
                if result.is_decode and (depth := result.request.depth) is not None:
                    depth.observe(step.drafted, len(step.tokens) - 1)
            if result.finished != RUNNING or output.is_stopped:
                return result.finished
            if output.grammar is not None and result.steps:
                output.grammar.accept(result.tokens)
                self._settings[result.request] = output.grammar.constrained()
        except Exception as error:  # a tokenizer's or a grammar's, which must not hurt others
            return error
        return None

    def _finish(self, request: ScheduledRequest, end: int | Exception) -> None:
        output = self._forget(request)
        if isinstance(end, Exception):
            output.fail(end)
        elif end == NON_FINITE and not output.is_stopped:
            output.fail_non_finite()
        else:
            output.finish(end)

    def _end(self, request: ScheduledRequest, reason: EndReason) -> None:
        self._forget(request).end(reason)

    def _forget(self, request: ScheduledRequest) -> RequestOutput:
        output = self._outputs.pop(request)
        del self._settings[request]
        self._executor.forget(request)
        del self._by_handle[output.handle]
        return output
