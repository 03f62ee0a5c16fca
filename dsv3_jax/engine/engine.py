"""The serving engine: requests join and leave a running batch.

A turn of the engine's loop plans a step, dispatches it, and then reads the results of the step
before it, while the device computes. Plans are made by :mod:`dsv3_jax.engine.scheduler`, and the
program is :mod:`dsv3_jax.engine.step`.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections import deque
from types import TracebackType
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from dsv3_jax.engine.cache_size import cache_pages
from dsv3_jax.engine.errors import EngineError
from dsv3_jax.engine.output import RequestOutput
from dsv3_jax.engine.page_allocator import PageAllocator
from dsv3_jax.engine.programs import Buckets, Programs, empty_pool
from dsv3_jax.engine.request import EngineRequest
from dsv3_jax.engine.scheduler import (
    Chunk,
    EndReason,
    ScheduledRequest,
    Scheduler,
    SchedulerConfig,
    StepPlan,
)
from dsv3_jax.engine.state import SlotState
from dsv3_jax.engine.stats import EngineStats, HostTimes
from dsv3_jax.engine.step import StepOutput
from dsv3_jax.engine.step_input import StepInput, StepShape, empty_input
from dsv3_jax.generation.drafters import Drafter
from dsv3_jax.generation.plan import DraftPlan
from dsv3_jax.generation.request import Prompt, Request, RequestReader
from dsv3_jax.generation.settings import MAX_TOP_LOGPROBS
from dsv3_jax.generation.state import NON_FINITE, RUNNING
from dsv3_jax.kv_cache import DEFAULT_PAGE_SIZE
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.tokenizer import Tokenizer
from pallas_kernels import target

DISPATCH_SECONDS = 0.02
"""Aim for the length of a dispatch that decodes several times. A new request waits for two."""


class _Dispatched(NamedTuple):
    """A step whose results have not been read."""

    plan: StepPlan
    shape: StepShape
    output: StepOutput


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
        config = model.config
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
        self._programs = Programs(
            model,
            buckets,
            num_slots=max_running,
            max_len=max_len,
            page_size=page_size,
            drafter=self._drafter,
            depth=self._depth,
            vocab_size=vocab_size,
        )
        self._state = SlotState.empty(
            empty_pool(model, num_pages, page_size, mtp=mtp),
            max_running,
            max_len,
            mtp_inputs=(self._depth + 1 if mtp else 0, config.hidden_size),
            dtype=model.dtype,
        )
        self._outputs: dict[ScheduledRequest, RequestOutput] = {}
        self._requests: dict[ScheduledRequest, Request] = {}
        self._by_handle: dict[EngineRequest, ScheduledRequest] = {}
        self._in_flight: deque[_Dispatched] = deque()
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
            self._programs.warm_up(self._state)
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
                compiled_after_warm_up=self._programs.compiled_after_warm_up,
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
                self._dispatch(plan)
        kept = 1 if self._overlap and plan is not None else 0
        has_read = len(self._in_flight) > kept
        while len(self._in_flight) > kept:
            self._read(self._in_flight.popleft())
        return plan is not None or has_read or bool(ended)

    def _check_failed(self) -> None:
        if self._error is not None:
            raise EngineError(str(self._error)) from self._error

    def _max_decode_steps(self) -> int:
        seconds = self._host_times.seconds_per_decode_step
        if seconds is None:
            return 1
        return max(1, min(int(DISPATCH_SECONDS / seconds), self._programs.buckets.max_steps))

    def _dispatch(self, plan: StepPlan) -> None:
        top = any(self._requests[r].logprobs for r in plan.requests if r in self._requests)
        shape = self._programs.shape(
            len(plan.decodes), len(plan.chunks), MAX_TOP_LOGPROBS if top else 0
        )
        buffer, inputs = empty_input(shape, self._programs.num_slots)
        self._fill(inputs, plan)
        self._state, output = self._programs(self._state, buffer, shape)
        for array in jax.tree.leaves(output):
            array.copy_to_host_async()
        self._in_flight.append(_Dispatched(plan, shape, output))

    def _fill(self, inputs: StepInput, plan: StepPlan) -> None:
        """Writes a plan into the arguments of a step."""
        arrays: Any = inputs  # NumPy's, on the host
        arrays.steps[0] = plan.decode_steps
        for i, (request, slot) in enumerate(zip(plan.decodes, plan.slots, strict=True)):
            arrays.decode_slots[i] = slot
            arrays.max_drafts[i] = request.drafts
            arrays.decode_tables[i, : len(request.pages)] = request.pages
        for i, chunk in enumerate(plan.chunks):
            arrays.chunk_slots[i] = chunk.slot
            arrays.chunk_tables[i, : len(chunk.request.pages)] = chunk.request.pages
            arrays.starts[i] = chunk.start
            arrays.counts[i] = chunk.count
            arrays.is_last[i] = chunk.is_last
            if chunk.is_first:
                self._fill_admission(arrays, i, chunk)

    def _fill_admission(self, arrays: Any, i: int, chunk: Chunk) -> None:
        scheduled, request = chunk.request, self._requests[chunk.request]
        arrays.admitted_slots[i] = chunk.slot
        arrays.prompts[i, : len(scheduled.tokens)] = scheduled.tokens
        arrays.lengths[i] = len(scheduled.tokens)
        arrays.limits[i] = scheduled.max_length
        for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
            getattr(arrays, name)[i] = getattr(request, name)
        arrays.stop_tokens[i, : len(request.stop_tokens)] = request.stop_tokens

    def _read(self, dispatched: _Dispatched) -> None:
        """Waits for the results of a step, and hands them to its requests."""
        with self._host_times.waiting():
            output: StepOutput = jax.device_get(dispatched.output)
        plan, shape = dispatched.plan, dispatched.shape
        rows = [(request, i, True) for i, request in enumerate(plan.decodes)]
        rows += [
            (chunk.request, shape.decodes + i, False)
            for i, chunk in enumerate(plan.chunks)
            if chunk.is_last
        ]
        with self._changed, self._host_times.processing():
            self._host_times.count(plan, int(output.counts.sum()))
            gained: dict[ScheduledRequest, list[int]] = {}
            finished: dict[ScheduledRequest, int] = {}
            for request, row, is_decode in rows:
                gained[request] = self._take(request, output, row, is_decode=is_decode)
                if request in self._outputs and self._has_ended(request, output, row):
                    finished[request] = int(output.finished[row])
            self._scheduler.report(plan, gained, finished.keys())
            for request, reason in finished.items():
                self._finish(request, reason)
            for request in gained:
                if request in self._outputs:
                    self._outputs[request].stream()

    def _take(
        self, request: ScheduledRequest, output: StepOutput, row: int, *, is_decode: bool
    ) -> list[int]:
        """Adds a row's tokens to its request, and returns them."""
        tokens: list[int] = []
        for step, count in enumerate(output.counts[:, row].tolist()):
            if not count:
                continue
            tokens += output.tokens[step, row, :count].tolist()
            if request in self._outputs:
                self._outputs[request].add(
                    np.asarray(output.tokens[step, row, :count]),
                    np.asarray(output.logprobs[step, row, :count]),
                    np.asarray(output.top_tokens[step, row, :count]),
                    np.asarray(output.top_logprobs[step, row, :count]),
                    int(output.drafted[step, row]),
                    is_decode=is_decode,
                )
        return tokens

    def _has_ended(self, request: ScheduledRequest, output: StepOutput, row: int) -> bool:
        return int(output.finished[row]) != RUNNING or self._outputs[request].is_stopped

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
