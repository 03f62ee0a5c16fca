"""The serving engine: requests join and leave a running batch.

A turn of the engine's loop plans a step, dispatches it, and then reads the results of the step
before it, while the device computes. Plans are made by :mod:`dsv3_jax.engine.scheduler`, and the
program is :mod:`dsv3_jax.engine.step`.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import threading
import time
from types import TracebackType
from typing import Any, Literal

from dsv3_jax.engine.cache_size import cache_pages
from dsv3_jax.engine.errors import EngineError
from dsv3_jax.engine.executor import Executor, RequestResult
from dsv3_jax.engine.output import RequestOutput
from dsv3_jax.engine.page_allocator import PageAllocator
from dsv3_jax.engine.programs import Buckets, Programs, empty_pool
from dsv3_jax.engine.request import EngineRequest
from dsv3_jax.engine.scheduler import EndReason, ScheduledRequest, Scheduler, SchedulerConfig
from dsv3_jax.engine.state import SlotState
from dsv3_jax.engine.stats import EngineStats, HostTimes
from dsv3_jax.generation.drafters import Drafter
from dsv3_jax.generation.plan import DraftPlan
from dsv3_jax.generation.request import Prompt, Request, RequestReader
from dsv3_jax.generation.settings import check
from dsv3_jax.generation.state import NON_FINITE, RUNNING
from dsv3_jax.kv_cache import DEFAULT_PAGE_SIZE
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.tokenizer import Tokenizer
from pallas_kernels import target

DISPATCH_SECONDS = 0.02
"""Aim for the length of a dispatch that decodes several times. A new request waits for two."""


class Engine:
    """Serves requests with continuous batching, chunked prefill and a prefix cache.

    Args:
      model: the model. Its arrays stay with the caller.
      tokenizer: its tokenizer, or None for requests of token ids.
      max_len: most tokens of a request, prompt and completion together.
      max_running: number of slots: most requests that run at a time.
      cache_tokens: size of the cache in tokens. None takes what fits on the device.
      page_size: tokens of a cache page. Prefixes are shared by whole pages. The Hopper kernels take
        64 alone.
      prefix_cache: whether prompts reuse cache pages of earlier requests.
      draft: who drafts tokens for the model to verify, as in :meth:`Generator.generate`. A request
        can do without.
      draft_depth: drafts per step.
      background: whether a thread of the engine's own runs the steps. Otherwise call :meth:`step`.
      overlap: whether a step is dispatched before the results of the step before it are read.
      buckets: sizes that programs are compiled for.
      max_waiting: most requests in the waiting queue.

    Raises:
      ValueError: a setting is out of range, or the model does not fit.
    """

    def __init__(
        self,
        model: DeepSeekV3,
        tokenizer: Tokenizer | None,
        max_len: int = 4096,
        *,
        max_running: int = 64,
        cache_tokens: int | None = None,
        page_size: int = DEFAULT_PAGE_SIZE,
        prefix_cache: bool = True,
        draft: str | Drafter | None = None,
        draft_depth: int = 1,
        background: bool = True,
        overlap: bool = True,
        buckets: Buckets | None = None,
        max_waiting: int = 4096,
    ):
        _check_model(model)
        config = model.config
        longest = config.max_position_embeddings
        expected = f"2 to {longest} (max_position_embeddings)"
        check("max_len", max_len, expected, numbers.Integral, 2, longest)
        check("max_running", max_running, "an integer of at least 1", numbers.Integral, 1)
        plan = DraftPlan.read(draft, draft_depth, config)
        self._drafter, self._depth = plan.drafter, plan.max_depth
        mtp = self._drafter is not None and self._drafter.mtp_hidden is not None
        platform = (model.layout and model.layout.platform) or target.platform()
        buckets = buckets or Buckets.default(max_running, platform=platform)
        self._tokenizer = tokenizer
        self._max_len = max_len
        self._reader = RequestReader(config, tokenizer, max_len)
        self._overlap = overlap
        num_pages = cache_pages(
            model, cache_tokens, max_running * max_len, page_size=page_size, mtp=mtp
        )
        pages = PageAllocator(num_pages, page_size, lookahead=int(mtp), prefix_cache=prefix_cache)
        self._scheduler = Scheduler(
            SchedulerConfig(
                max_running=max_running,
                chunk_tokens=buckets.chunk_tokens,
                max_chunks=buckets.chunks[-1],
                max_waiting=max_waiting,
            ),
            pages,
        )
        vocab_size = config.vocab_size
        if tokenizer is not None:
            vocab_size = min(vocab_size, tokenizer.vocab_size)
        programs = Programs(
            model,
            buckets,
            num_slots=max_running,
            max_len=max_len,
            page_size=page_size,
            drafter=self._drafter,
            depth=self._depth,
            vocab_size=vocab_size,
        )
        state = SlotState.empty(
            empty_pool(model, num_pages, page_size, mtp=mtp),
            max_running,
            max_len,
            mtp_inputs=(self._depth + 1 if mtp else 0, config.hidden_size),
            dtype=model.dtype,
        )
        self._outputs: dict[ScheduledRequest, RequestOutput] = {}
        self._requests: dict[ScheduledRequest, Request] = {}
        self._by_handle: dict[EngineRequest, ScheduledRequest] = {}
        self._executor = Executor(programs, state, self._requests.get)
        self._host_times = HostTimes()
        self._next_seed = 0
        self._error: EngineError | None = None
        self._is_closed = False
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None
        if background:
            self._thread = threading.Thread(target=self._run, name="dsv3-engine", daemon=True)
            self._thread.start()

    def submit(
        self,
        prompt: Prompt,
        *,
        priority: int = 0,
        timeout: float | None = None,
        draft: bool = True,
        **settings: Any,
    ) -> EngineRequest:
        """Puts a request into the waiting queue and returns at once. Can be called from any thread.

        Args:
          prompt: text, or token ids.
          priority: less is more urgent. Each step of it delays the request as if it had arrived
            ten seconds later.
          timeout: seconds after which the request ends with the finish reason ``timeout``.
          draft: whether the engine's drafter drafts for this request.
          settings: settings of :meth:`Generator.generate` for one prompt. Without a ``seed``, every
            request of the engine gets another one.

        Raises:
          ValueError: the prompt is empty or too long, or a setting is out of range.
          QueueFullError: too many requests are waiting.
          EngineError: the engine failed or was shut down.
        """
        handle = EngineRequest(self.cancel)
        requests = self._reader.read(prompt, **settings)
        if len(requests) != 1:
            raise ValueError(f"prompt: expected one completion of one prompt, got {len(requests)}")
        request = requests[0]
        now = time.monotonic()
        with self._changed:
            self._check_open()
            if settings.get("seed") is None:
                request = dataclasses.replace(request, seed=self._next_seed % 2**32)
                self._next_seed += 1
            scheduled = ScheduledRequest(
                tokens=list(request.prompt),
                max_length=len(request.prompt) + request.max_new_tokens,
                drafts=self._depth if draft else 0,
                priority=priority,
                arrival=now,
                deadline=math.inf if timeout is None else now + timeout,
            )
            self._scheduler.add(scheduled)
            drafter = self._drafter if draft else None
            self._outputs[scheduled] = RequestOutput(
                handle,
                request,
                scheduled,
                self._tokenizer,
                draft=None if drafter is None else drafter.name,
                depth=self._depth,
            )
            self._requests[scheduled] = request
            self._by_handle[handle] = scheduled
            self._changed.notify_all()
        return handle

    def cancel(self, handle: EngineRequest) -> None:
        """Ends a request within one step. Does nothing if it is at its end."""
        with self._changed:
            scheduled = self._by_handle.get(handle)
            if scheduled is not None:
                self._scheduler.cancel(scheduled)
                self._changed.notify_all()

    def warm_up(self) -> float:
        """Compiles all programs. Returns the seconds it took."""
        began = time.perf_counter()
        with self._changed:
            self._executor.warm_up()
        return time.perf_counter() - began

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
        except Exception as error:
            self._fail(error)
            raise

    def stats(self) -> EngineStats:
        """Returns figures of the engine as it is now."""
        with self._changed:
            scheduler, pages = self._scheduler, self._scheduler.pages
            return EngineStats(
                running=len(scheduler.running),
                waiting=len(scheduler.waiting),
                cache_usage=pages.used / pages.num_pages,
                cache_tokens=pages.num_pages * pages.page_size,
                prefix_hit_tokens=scheduler.prefix_hit_tokens,
                prefix_queried_tokens=scheduler.prefix_queried_tokens,
                prompt_tokens=self._host_times.prompt_tokens,
                output_tokens=self._host_times.output_tokens,
                preemptions=scheduler.preemptions,
                compiled_after_warm_up=self._executor.programs.compiled_after_warm_up,
                steps=self._host_times.steps,
                host_us_per_step=self._host_times.us_per_step,
                host_us=self._host_times.us,
            )

    def clear_prefix_cache(self) -> None:
        """Makes later requests compute their whole prompts again."""
        with self._changed:
            self._scheduler.pages.clear()

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
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            with self._changed:
                self._cancel_all()
            self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Literal[False]:
        self.shutdown(drain=kind is None)
        return False

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
                    return
                self._changed.wait_for(lambda: self._outputs or self._is_closed)

    def _fail(self, error: Exception) -> None:
        """Ends all requests after an error of the device or of the engine itself."""
        with self._changed:
            self._error = EngineError(f"engine: a step failed: {error}")
            self._error.__cause__ = error
            for output in self._outputs.values():
                output.handle.fail(self._error)
            self._outputs.clear()
            self._requests.clear()
            self._by_handle.clear()

    def _step(self) -> bool:
        with self._changed:
            self._check_failed()
            with self._host_times.planning():
                plan, ended = self._scheduler.schedule(
                    time.monotonic(), max_decode_steps=self._max_decode_steps()
                )
                for scheduled, reason in ended:
                    self._end(scheduled, reason)
        if plan is not None:
            with self._host_times.dispatching():
                self._executor.dispatch(plan)
        in_flight = 1 if self._overlap and plan is not None else 0
        has_read = self._executor.steps_in_flight > in_flight
        while self._executor.steps_in_flight > in_flight:
            self._read()
        return plan is not None or has_read or bool(ended)

    def _check_failed(self) -> None:
        if self._error is not None:
            raise EngineError(str(self._error)) from self._error

    def _max_decode_steps(self) -> int:
        seconds = self._host_times.seconds_per_decode_step
        if seconds is None:
            return 1
        return max(
            1, min(int(DISPATCH_SECONDS / seconds), self._executor.programs.buckets.max_steps)
        )

    def _read(self) -> None:
        """Waits for the results of the oldest step, and hands them to its requests."""
        with self._host_times.waiting():
            plan, results = self._executor.wait()
        with self._changed, self._host_times.processing():
            self._host_times.count(plan, sum(len(result.tokens) for result in results))
            finished = {r.request: r.finished for r in results if self._take(r)}
            gained = {result.request: result.tokens for result in results}
            self._scheduler.report(plan, gained, finished.keys())
            for request, reason in finished.items():
                self._finish(request, reason)
            for request in gained:
                if request in self._outputs:
                    self._outputs[request].stream()

    def _take(self, result: RequestResult) -> bool:
        """Adds a result to its request's output. Returns whether the request is at its end."""
        output = self._outputs.get(result.request)
        if output is None:
            return False  # it has ended in the meantime
        for step in result.steps:
            output.add(step, is_decode=result.is_decode)
        return result.finished != RUNNING or output.is_stopped

    def _finish(self, request: ScheduledRequest, finished: int) -> None:
        output = self._forget(request)
        if finished == NON_FINITE and not output.is_stopped:
            output.fail_non_finite()
        else:
            output.finish(finished)

    def _end(self, request: ScheduledRequest, reason: EndReason) -> None:
        self._forget(request).end(reason)

    def _forget(self, request: ScheduledRequest) -> RequestOutput:
        output = self._outputs.pop(request)
        del self._requests[request]
        del self._by_handle[output.handle]
        return output


def _check_model(model: DeepSeekV3) -> None:
    """Raises ValueError for a model that the engine cannot run."""
    if not isinstance(model, DeepSeekV3):
        raise ValueError(f"model: expected a DeepSeekV3, got {type(model).__name__}")
    if model.attn_impl is not None:
        raise ValueError(
            f"model: expected attn_impl None, got {model.attn_impl!r}; the variants are for"
            " comparison in a Generator"
        )
    if model.layout is None:
        return
    for axis in ("batch", "cached_tokens"):
        if (shards := model.layout.num_shards(axis)) > 1:
            raise ValueError(
                f"model: expected a layout that does not shard {axis!r}, got {shards} shards;"
                " the engine does not assign requests to data-parallel shards yet"
            )
