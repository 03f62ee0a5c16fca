"""The requests that are not at their end: what they gain, their grammars, and how they end."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence

from dsv3_jax.engine.device.step_results import RequestResult
from dsv3_jax.engine.errors import EngineError
from dsv3_jax.engine.requests.output import RequestOutput
from dsv3_jax.engine.requests.request import EngineRequest
from dsv3_jax.engine.scheduling.step_plan import End, ScheduledRequest, StepGains, StepPlan
from dsv3_jax.engine.stats import HostTimes
from dsv3_jax.generation.finished import NON_FINITE, RUNNING
from dsv3_jax.generation.request import Request

_MASK_THREADS = min(8, os.cpu_count() or 1)


class OpenRequests:
    """Outputs, settings and handles by request. The caller holds a lock.

    Args:
      settings: settings of the requests. It is kept up to date here, and the executor reads it.
      times: counts drafts.
    """

    def __init__(self, settings: dict[ScheduledRequest, Request], times: HostTimes):
        self._settings = settings
        self._times = times
        self._outputs: dict[ScheduledRequest, RequestOutput] = {}
        self._by_handle: dict[EngineRequest, ScheduledRequest] = {}
        self._without_mask: list[RequestOutput] = []  # new requests with grammars
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None

    def __bool__(self) -> bool:
        return bool(self._outputs)

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return iter(self._outputs)

    def add(self, output: RequestOutput) -> None:
        """Adds a new request."""
        self._outputs[output.scheduled] = output
        self._settings[output.scheduled] = output.request
        self._by_handle[output.handle] = output.scheduled
        if output.grammar is not None:
            self._without_mask.append(output)

    def of_handle(self, handle: EngineRequest) -> ScheduledRequest | None:
        """Returns the request of a handle, or None if it is at its end."""
        return self._by_handle.get(handle)

    def start(self) -> dict[ScheduledRequest, End]:
        """Gets the first masks of new requests. Returns those whose grammars failed."""
        outputs, self._without_mask = self._without_mask, []
        return self._update_masks([o for o in outputs if o.scheduled in self._outputs])

    def take(self, plan: StepPlan, results: Sequence[RequestResult]) -> StepGains:
        """Adds results to their requests' outputs, streams them, and gets the next masks."""
        gained: dict[ScheduledRequest, list[int]] = {}
        ends: dict[ScheduledRequest, End] = {}
        in_need: list[RequestOutput] = []
        for result in results:
            request = result.request
            output = self._outputs.get(request)
            if output is None:  # it has ended in the meantime
                gained[request] = result.tokens
                continue
            try:
                result = _allowed_part(result, output)
                end = self._add(result, output)
                if end is None:
                    output.stream()
            except Exception as error:  # a tokenizer's or a grammar's, which must not hurt others
                end = error
            gained[request] = result.tokens
            if end is not None:
                ends[request] = end
            elif output.grammar is not None and result.steps:
                in_need.append(output)
        return StepGains(
            gained,
            ends | self._update_masks(in_need),
            {r.request for r in results if r.finished == NON_FINITE or r.finite_tokens == 0},
            {r.request: r.finite_tokens for r in results if r.finite_tokens},
        )

    def end(self, request: ScheduledRequest, reason: End) -> None:
        """Ends a request, and tells its holder."""
        output = self._pop(request)
        if isinstance(reason, Exception):
            output.fail(reason)
            return
        with _own_errors(output):
            if reason == NON_FINITE and not output.is_stopped:
                output.fail_non_finite()
            elif isinstance(reason, int):
                output.finish(reason)
            else:
                output.end(reason)

    def end_all(self, make_error: Callable[[], EngineError]) -> None:
        """Ends all requests with errors. Each gets its own, since raising changes an error."""
        for output in self._outputs.values():
            output.handle.fail(make_error())
        self._outputs.clear()
        self._settings.clear()
        self._by_handle.clear()
        self._without_mask.clear()

    def close(self) -> None:
        """Ends the threads that compute masks."""
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    def check_integrity(self, known: Collection[ScheduledRequest]) -> None:
        """Raises AssertionError unless these are the ``known`` requests, and none has ended."""
        known = set(known)
        assert set(self._outputs) == known, "outputs are not those of scheduled requests"
        assert set(self._settings) == known, "settings are not those of scheduled requests"
        assert set(self._by_handle.values()) == known, "a handle has no request"
        assert not any(handle.is_done for handle in self._by_handle), "a request has ended"

    def check_idle(self) -> None:
        """Raises AssertionError if anything is left of requests that have ended."""
        assert not self._settings, "settings of an ended request are left"
        assert not self._by_handle, "the handle of an ended request is left"

    def _add(self, result: RequestResult, output: RequestOutput) -> int | None:
        """Adds a result to an output. Returns ``finished`` if the request is at its end."""
        if result.prompt is not None:
            output.add_prompt(*result.prompt)
        for step in result.steps:
            output.add(step, is_decode=result.is_decode)
            if result.is_decode:
                accepted = len(step.tokens) - 1
                self._times.drafted_tokens += step.drafted
                self._times.accepted_tokens += accepted
                if (depth := result.request.depth) is not None:
                    depth.observe(step.drafted, accepted)
        is_at_end = result.finished != RUNNING or output.is_stopped
        return result.finished if is_at_end else None

    def _update_masks(self, outputs: Sequence[RequestOutput]) -> dict[ScheduledRequest, End]:
        """Gets the next masks, in several threads if there are several. Returns the requests whose
        grammars failed."""
        failed: dict[ScheduledRequest, End] = {}

        def update(outputs: Sequence[RequestOutput]) -> None:
            for output in outputs:
                assert output.grammar is not None
                try:
                    self._settings[output.scheduled] = output.grammar.constrained()
                except Exception as error:  # the grammar's, which must not hurt others
                    failed[output.scheduled] = error

        parts = [part for i in range(_MASK_THREADS) if (part := outputs[i::_MASK_THREADS])]
        if len(parts) < 2:
            update(outputs)
            return failed
        if self._threads is None:
            self._threads = concurrent.futures.ThreadPoolExecutor(_MASK_THREADS, "dsv3-masks")
        for _ in self._threads.map(update, parts):
            pass
        return failed

    def _pop(self, request: ScheduledRequest) -> RequestOutput:
        output = self._outputs.pop(request)
        del self._settings[request]
        del self._by_handle[output.handle]
        return output


def _allowed_part(result: RequestResult, output: RequestOutput) -> RequestResult:
    """Returns a result without the tokens that the request's grammar refuses."""
    if output.grammar is None or not result.steps:
        return result
    (step,) = result.steps
    count = output.grammar.accept(step.tokens, ends=result.finished != RUNNING)
    if refused := len(step.tokens) - count:
        result.request.rewind = refused
        result.request.rewinds += 1
        result = result._replace(steps=[step.first(count)], finished=RUNNING)
    return result


@contextlib.contextmanager
def _own_errors(output: RequestOutput) -> Iterator[None]:
    """Ends a request with the error that its own text or settings raise, and hurts no other."""
    try:
        yield
    except Exception as error:
        output.fail(error)
