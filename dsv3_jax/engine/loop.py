"""The loop of an engine: its callers, its thread, and what it does when a step fails.

:class:`~dsv3_jax.engine.step_loop.StepLoop` has the turns: a step is planned and dispatched, and
the results of the one before are read. The public methods can be called from any thread.

=============  =================================================================================
thread         work
=============  =================================================================================
callers        submit and cancel, under the lock; read their request's handle, under its own lock
dsv3-engine    turns: plans and takes results under the lock, dispatches and waits without it
dsv3-launcher  launches programs in order, from the queue of ``Launcher``, which owns the state
dsv3-text      decodes text and fills the handles, from the queue of ``Delivery``
dsv3-masks     several: compute masks of grammars while dsv3-engine waits for them
=============  =================================================================================
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from dsv3_jax.engine.requests.delivery import Delivery
from dsv3_jax.engine.scheduling.scheduler import Scheduler
from dsv3_jax.engine.scheduling.step_plan import Phase, ScheduledRequest
from dsv3_jax.engine.scheduling.step_sizes import FixedLimits, Pace
from dsv3_jax.engine.stats import COMPILE_SECONDS, CompileTimes, EngineStats, HostTimes, ShardStats
from dsv3_jax.engine.step_loop import PlanExecutor, StepLoop
from dsv3_jax.generation.errors import EngineError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

SWITCH_SECONDS = 0.0005
"""Longest time for which a thread keeps Python's lock while another one waits for it. With the
default of 5 ms, a launch comes too late while text is decoded or calls are answered, and a first
token while the tokens of other streams are sent."""

_JOIN_SECONDS = 0.1
"""Time between two looks at what the engine's thread does when it is to end."""

_PAGES_SECONDS = 0.002
"""Time after which the engine looks for pages and deadlines, if nobody wakes it up before."""


class EngineLoop:
    """Moves requests from the waiting queue to their end. ``overlap``, ``controller`` and ``pace``
    are those of :class:`StepLoop`; steps wait for ``compilations``."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: PlanExecutor,
        *,
        overlap: bool,
        controller: FixedLimits | None = None,
        pace: Pace | None = None,
        compilations: CompileTimes | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._scheduler = scheduler
        self._executor = executor
        self._host_times = HostTimes()
        self._delivery = Delivery(self._host_times)
        self.failure: EngineError | None = None
        """The error after which no request can be served."""
        self._compilations = compilations or CompileTimes()
        # Time, and seconds of compilations, at which the step under way began. Written by the
        # thread that steps.
        self._step_began: tuple[float, float] | None = None
        self._is_closed = False
        # The lock. It guards the scheduler, its requests, `_error` and `_is_closed`. It is notified
        # when a request arrives or is cancelled, when pages have come, and at the end.
        self._changed = threading.Condition(threading.RLock())
        self._steps = StepLoop(
            scheduler,
            executor,
            self._delivery,
            overlap=overlap,
            controller=controller or FixedLimits(scheduler.config.limits),
            pace=pace,
            lock=self._unless_failed,
            times=self._host_times,
        )
        self.sleep = sleep
        # Held for a whole turn, and taken before the lock.
        self._stepping = FairLock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts a thread that runs the steps. From then on Python switches between threads at
        least every ``SWITCH_SECONDS``."""
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
        # A daemon thread that is still inside XLA when the interpreter ends can abort the process.
        atexit.register(self.shutdown, drain=False)
        self._delivery.start()
        self._thread = threading.Thread(target=self._run, name="dsv3-engine", daemon=True)
        self._thread.start()

    def add(self, *requests: ScheduledRequest) -> None:
        """Puts requests into the waiting queue: all of them, or none if it raises."""
        with self._changed:
            self._check_open()
            self._scheduler.add(*requests)
            for request in requests:
                self._delivery.add(request)
            self._changed.notify_all()

    def cancel(self, request: ScheduledRequest) -> None:
        """Ends a request within one step. Does nothing if it is at its end."""
        with self._changed:
            if request.phase is not Phase.ENDED:
                self._scheduler.cancel(request)
                self._changed.notify_all()

    def step(self) -> bool:
        """Runs one turn of the loop. Returns False if there was nothing to do."""
        if self._thread is not None and self._thread is not threading.current_thread():
            raise ValueError(
                "step: expected an engine with background=False, got one with a thread"
            )
        return self._guarded_step() or self._wait_for_pages()

    def stats(self) -> EngineStats:
        """Returns figures of the engine as it is now."""
        with self._changed:
            scheduler = self._scheduler
            shards = tuple(
                ShardStats(len(shard.running), shard.pages.used / shard.pages.num_pages)
                for shard in scheduler.shards
            )
            pages = scheduler.shards[0].pages
            compilation = self._compilations.current
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
                drafted_tokens=self._host_times.drafted_tokens,
                accepted_tokens=self._host_times.accepted_tokens,
                preemptions=scheduler.preemptions,
                compiled_after_warm_up=self._executor.compiled_after_warm_up,
                compile_seconds=self._compilations.seconds,
                compiling_seconds=0.0 if compilation is None else compilation.seconds,
                steps=self._host_times.steps,
                host_us_per_step=self._host_times.us_per_step,
                host_us=self._host_times.us,
                dispatches=self._executor.times.figures,
                loading=scheduler.loads.loading(time.monotonic()),
                loading_bytes=scheduler.loads.bytes_in_host,
                loaded_tokens=scheduler.loaded_tokens,
                reloaded_tokens=scheduler.reloaded_tokens,
            )

    @property
    def step_seconds(self) -> float:
        """Seconds since the step under way began, without compilations; 0 if there is none."""
        step = self._step_began
        if step is None:
            return 0.0
        began, compiled = step
        return max(time.monotonic() - began - (self._compilations.seconds - compiled), 0.0)

    def fail_if_stuck(self, seconds: float) -> None:
        """Ends all requests with an error if the step under way has lasted longer than this, or a
        compilation longer than this and ``COMPILE_SECONDS``."""
        if self.failure is not None:
            return
        # The executor stays open: closing it would wait for the step.
        if self.step_seconds > seconds:
            message = f"engine: a step has taken more than {seconds:g} s; its device is stuck"
            self._end_all(EngineError(message))
        compilation, most = self._compilations.current, max(seconds, COMPILE_SECONDS)
        if compilation is not None and compilation.seconds > most:
            self._end_all(
                EngineError(
                    f"engine: the compilation of a step ({compilation.program}) has taken more than"
                    f" {most:g} s; the compiler is stuck"
                )
            )

    def clear_prefix_cache(self, change: Callable[[], None] = lambda: None) -> None:
        """Makes later requests compute their whole prompts again, or load them, after ``change``
        was called."""
        with self._changed:
            change()
            self._scheduler.clear_prefix_cache()

    def notify(self) -> None:
        """Wakes the engine's thread up, because pages have come."""
        with self._changed:
            self._changed.notify_all()

    def between_steps(self, change: Callable[[], _T], *, clears_prefix_cache: bool = False) -> _T:
        """Returns what ``change`` returns, called between two turns. Steps may be in flight."""
        with self._stepping, self._changed:
            self._check_open()
            result = change()
            if clears_prefix_cache:
                self._scheduler.clear_prefix_cache()
        return result

    def save_pages(self) -> Future[None]:
        """Launches the copies of all pages that are to be stored, see :meth:`PlanExecutor.save`."""
        with self._stepping, self._changed:
            self._check_failed()
            return self._executor.save(self._scheduler.take_saves())

    def check_integrity(self) -> None:
        """Raises AssertionError if pages, slots, queues or handles contradict each other."""
        with self._changed:
            self._scheduler.check_integrity()
            self._delivery.check_integrity(self._scheduler.unfinished)

    def shutdown(
        self,
        *,
        drain: bool = True,
        timeout: float | None = None,
        abandons_compilations: bool = False,
    ) -> None:
        """Stops taking requests, and ends, see :meth:`Engine.shutdown`.

        Args:
          abandons_compilations: whether to return while a program is being compiled, after requests
            are cancelled. The thread ends after it.
        """
        self.close()
        if not drain:
            self._cancel_all()
        if self._thread is None:
            deadline = math.inf if timeout is None else time.monotonic() + timeout
            while self.failure is None and self.step():
                if time.monotonic() >= deadline:
                    self._cancel_all()
            with self._stepping:
                self._close_parts()
            return
        self._thread.join(timeout if drain else 0.0)
        if self._thread.is_alive():
            self._cancel_all()
        while self._thread.is_alive():
            compilation = self._compilations.current
            if abandons_compilations and compilation is not None:
                logger.warning("not waiting for the compilation of a step: %s", compilation.program)
                return
            self._thread.join(_JOIN_SECONDS)

    def close(self) -> None:
        """Stops taking requests. The thread ends after those that it has."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _check_open(self) -> None:
        self._check_failed()
        if self._is_closed:
            raise EngineError("engine: expected a running one, but it was shut down")

    def _cancel_all(self) -> None:
        with self._changed:
            for request in self._scheduler.unfinished:
                self._scheduler.cancel(request)

    def _run(self) -> None:
        """The body of the engine's thread."""
        try:
            while self._guarded_step() or self._wait_for_pages() or self._wait_for_requests():
                pass
        except Exception:
            logger.exception("the engine ends: a step failed")
        finally:
            with self._stepping:  # nobody else may be launching something
                self._close_parts()
            atexit.unregister(self.shutdown)

    def _close_parts(self) -> None:
        self._executor.close()
        self._delivery.close()

    def _wait_for_pages(self) -> bool:
        """Waits a moment if requests wait for pages. Returns False if none does."""
        with self._changed:
            if not self._scheduler.loads.count:
                return False
            if self._scheduler.loads.loading(time.monotonic()):
                self._changed.wait(_PAGES_SECONDS)
            return True

    def _wait_for_requests(self) -> bool:
        """Waits while there are none. Returns False if there will never be one."""
        with self._changed:
            self._changed.wait_for(lambda: self._scheduler.unfinished or self._is_closed)
            return bool(self._scheduler.unfinished)

    def _guarded_step(self) -> bool:
        """Runs a turn. An error of it ends all requests."""
        try:
            with self._stepping:
                self._step_began = time.monotonic(), self._compilations.seconds
                try:
                    return self._step()
                finally:
                    self._step_began = None
        except BaseException as error:
            # An interrupted step, too, leaves the device in an unknown state.
            failure = EngineError(f"engine: a step failed: {str(error) or type(error).__name__}")
            failure.__cause__ = error
            if self._end_all(failure):
                self._close_parts()
            raise

    def _end_all(self, failure: EngineError) -> bool:
        """Ends all requests with an error. Returns False if that has happened before."""
        with self._changed:
            if self.failure is not None:
                return False
            self.failure = failure
            for request in self._scheduler.unfinished:
                each = EngineError(str(failure))  # of its own, since raising an error changes it
                each.__cause__ = failure.__cause__
                self._delivery.end(request, each)
            self._scheduler.end_all()
        return True

    def _step(self) -> bool:
        """Waits until the step in flight is about to end, and runs a turn."""
        if self._thread is not None:
            with self._changed:
                seconds = self._steps.seconds_to_plan
            if seconds > 0:
                with self._host_times.measure("waiting"):
                    self.sleep(seconds)
        if self._steps.step():
            return True
        with self._changed:
            if not self._scheduler.unfinished:  # nothing may be left of requests that have ended
                self._scheduler.check_idle()
                assert not self._executor.dispatches_in_flight, "an idle engine has steps in flight"
        return False

    @contextlib.contextmanager
    def _unless_failed(self) -> Iterator[None]:
        """Holds the lock. Raises the error that another thread may have found during a step."""
        with self._changed:
            self._check_failed()
            yield

    def _check_failed(self) -> None:
        if self.failure is not None:
            raise EngineError(str(self.failure)) from self.failure


class FairLock:
    """A lock that goes to a waiting thread before the thread that released it gets it again.

    The loop takes it for every step and releases it only for a moment. An ordinary lock goes to the
    thread that asks first, so that another one could wait for many steps.
    """

    def __init__(self) -> None:
        self._next = threading.Lock()  # of the thread that has the lock next
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._next:
            self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
