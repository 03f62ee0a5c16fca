"""Delivers results to requests: their grammars in the loop's thread, their text in its own."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence

from dsv3_jax.engine.requests.output import RequestOutput
from dsv3_jax.engine.scheduling.step_plan import (
    End,
    Phase,
    RequestResult,
    ScheduledRequest,
    StepGains,
    StepPlan,
)
from dsv3_jax.engine.stats import HostTimes
from dsv3_jax.generation.completion import NON_FINITE, RUNNING, STOPPED

logger = logging.getLogger(__name__)

_MASK_THREADS = min(8, os.cpu_count() or 1)

_MOST_BEHIND = 32
"""Most dispatches whose text is still to be decoded. The loop waits for the text of more."""


class Delivery:
    """Hands results to the outputs of their requests. The caller holds the loop's lock, except in
    :meth:`start`, :meth:`close` and :meth:`wait_for_room`.

    Decoding text takes time that a client can choose, by its stop strings for example. After
    :meth:`start` a thread does it, in the order of the results, so that no step waits for it. A
    stop string then ends its request's text at the same token as without the thread, but the
    scheduler learns of it a step or two later; the tokens in between are dropped.
    """

    def __init__(self, times: HostTimes):
        self._times = times
        self._without_mask: list[ScheduledRequest] = []  # new requests with grammars
        self._mask_threads: concurrent.futures.ThreadPoolExecutor | None = None
        self._ended: deque[tuple[ScheduledRequest, End]] = deque()  # by their text
        self._room = threading.Semaphore(_MOST_BEHIND)
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread that decodes text. Without it the caller's thread does."""
        self._thread = threading.Thread(target=self._work, name="dsv3-text", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the threads, after everything has been delivered."""
        if self._mask_threads is not None:
            self._mask_threads.shutdown(wait=False)
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def add(self, request: ScheduledRequest) -> None:
        """Adds a new request."""
        if output_of(request).grammar is not None:
            self._without_mask.append(request)

    def take_ended(self) -> dict[ScheduledRequest, End]:
        """Gets the first masks of new requests. Returns the requests that have ended since the last
        call: their text has a stop string, or their text or that mask failed."""
        ended: dict[ScheduledRequest, End] = {}
        while self._ended:
            ended.update([self._ended.popleft()])
        new, self._without_mask = self._without_mask, []
        ended |= self._update_masks(new)
        return {request: end for request, end in ended.items() if request.phase != Phase.ENDED}

    def wait_for_room(self) -> None:
        """Waits while the text of too many results is still to be decoded, without the lock."""
        if self._thread is not None:
            self._room.acquire()

    def take(self, plan: StepPlan, results: Sequence[RequestResult]) -> StepGains:
        """Delivers results to their requests, and gets the next masks."""
        gained: dict[ScheduledRequest, list[int]] = {}
        ends: dict[ScheduledRequest, End] = {}
        open_results: list[RequestResult] = []
        for result in results:
            request = result.request
            gained[request] = result.tokens
            if request.phase == Phase.ENDED:  # in the meantime
                continue
            try:
                result = _allowed_part(result)
            except Exception as error:  # the grammar's, which must not hurt others
                ends[request] = error
                continue
            gained[request] = result.tokens
            open_results.append(result)
            if result.finished != RUNNING:
                ends[request] = result.finished
            if result.is_decode:
                for step in result.steps:
                    accepted = len(step.tokens) - 1
                    self._times.drafted_tokens += step.drafted
                    self._times.accepted_tokens += accepted
                    if request.depth is not None:
                        request.depth.observe(step.drafted, accepted)
        self._hand_over(functools.partial(self._add, open_results))
        if self._thread is None:
            ends |= self._ended
            self._ended.clear()
        in_need = [
            r.request for r in open_results if output_of(r.request).grammar is not None and r.steps
        ]
        return StepGains(
            gained,
            ends | self._update_masks([r for r in in_need if r not in ends]),
            {r.request for r in results if r.finished == NON_FINITE or r.finite_tokens == 0},
            {r.request: r.finite_tokens for r in results if r.finite_tokens},
        )

    def end(self, request: ScheduledRequest, end: End) -> None:
        """Delivers the end of a request, unless its text has ended it before."""
        self._hand_over(functools.partial(self._end, request, end))

    def check_integrity(self, unfinished: Collection[ScheduledRequest]) -> None:
        """Raises AssertionError if one of these requests has ended otherwise than by its text."""
        done = {request for request in unfinished if output_of(request).handle.is_done}
        assert done <= {request for request, _ in self._ended}, "a request has ended"

    def _update_masks(self, requests: Sequence[ScheduledRequest]) -> dict[ScheduledRequest, End]:
        """Gets the next masks, in several threads if there are several. Returns the requests whose
        grammars failed."""
        failed: dict[ScheduledRequest, End] = {}

        def update(requests: Sequence[ScheduledRequest]) -> None:
            for request in requests:
                grammar = output_of(request).grammar
                assert grammar is not None
                try:
                    request.settings = grammar.constrained()
                except Exception as error:  # the grammar's, which must not hurt others
                    failed[request] = error

        parts = [part for i in range(_MASK_THREADS) if (part := requests[i::_MASK_THREADS])]
        if len(parts) < 2:
            update(requests)
            return failed
        if self._mask_threads is None:
            self._mask_threads = concurrent.futures.ThreadPoolExecutor(_MASK_THREADS, "dsv3-masks")
        for _ in self._mask_threads.map(update, parts):
            pass
        return failed

    def _hand_over(self, work: Callable[[], None]) -> None:
        """Gives work to the thread that decodes text, or does it if there is none."""
        if self._thread is None:
            work()
        else:
            self._queue.put(work)

    # In the thread that decodes text, if there is one.

    def _work(self) -> None:
        """The body of the thread."""
        while (work := self._queue.get()) is not None:
            try:
                work()
            except BaseException:  # a listener's; the thread has to go on
                logger.exception("a request's listener failed")
            del work  # or its request would live until there is more

    def _add(self, results: Sequence[RequestResult]) -> None:
        for result in results:
            end = self._add_one(result)
            if end is not None:
                self._ended.append((result.request, end))
                if self._thread is not None:
                    self._end(result.request, end)
        if self._thread is not None:
            self._room.release()

    def _add_one(self, result: RequestResult) -> End | None:
        """Adds a result to its output. Returns an end if its text has one."""
        output = output_of(result.request)
        if output.handle.is_done:
            return None
        try:
            output.add(result)
        except BaseException as error:  # a decoder's, or a listener's
            self._check_thread(error)
            return error
        return STOPPED if output.is_stopped else None

    def _end(self, request: ScheduledRequest, end: End) -> None:
        output = output_of(request)
        while not output.handle.is_done:  # an error ends it before its listeners are called
            try:
                output.end(end, request.cached_tokens)
            except BaseException as error:  # its own text's, or a listener's
                self._check_thread(error)
                end = error

    def _check_thread(self, error: BaseException) -> None:
        """Raises an error again that may be meant for the caller: an interrupt, if there is no
        thread. In the thread it is native code's, such as a Rust panic, and ends one request."""
        if self._thread is None and not isinstance(error, Exception):
            raise error


def output_of(request: ScheduledRequest) -> RequestOutput:
    """Returns the output of a request, which the scheduler does not know."""
    assert isinstance(request.output, RequestOutput)
    return request.output


def _allowed_part(result: RequestResult) -> RequestResult:
    """Returns a result without the tokens that the request's grammar refuses."""
    grammar = output_of(result.request).grammar
    if grammar is None or not result.steps:
        return result
    (step,) = result.steps
    count = grammar.accept(step.tokens, ends=result.finished != RUNNING)
    if refused := len(step.tokens) - count:
        result.request.rewind = refused
        result.request.rewinds += 1
        result = result._replace(steps=[step.first(count)], finished=RUNNING)
    return result
