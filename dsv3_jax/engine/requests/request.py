"""The handle of a submitted request: its text as it arrives, and its completion."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator

import numpy as np

from dsv3_jax.engine.device.step import PromptLogprobs
from dsv3_jax.generation.completion import Completion, FinishReason, Piece, TopLogprobs


@dataclasses.dataclass
class RequestTimes:
    """Times of a request's events, in seconds of ``time.monotonic()``; NaN before an event."""

    submitted: float
    first_token: float = math.nan
    end: float = math.nan


class PromptRecord:
    """Log-probabilities of one prompt on the host.

    Args:
      prompt_tokens: length of the prompt.
      count: number of most probable tokens to report.
    """

    def __init__(self, prompt_tokens: int, count: int):
        self._count = count
        # Nothing precedes the first token.
        self.logprobs: list[float | None] = [None] * prompt_tokens
        self.top_logprobs: list[list[tuple[int, float]] | None] = [None] * prompt_tokens

    def add(self, position: int, chunk: PromptLogprobs) -> None:
        """Adds the values of tokens from ``position`` on. Those past the prompt are dropped."""
        logprobs = np.maximum(np.asarray(chunk.logprobs), np.finfo(np.float32).min).tolist()
        tokens = np.asarray(chunk.top_tokens)[:, : self._count].tolist()
        top = np.asarray(chunk.top_logprobs)[:, : self._count].tolist()
        for i in range(min(len(logprobs), len(self.logprobs) - position)):
            self.logprobs[position + i] = logprobs[i]
            pairs = zip(tokens[i], top[i], strict=True)
            self.top_logprobs[position + i] = [(t, p) for t, p in pairs if np.isfinite(p)]


class EngineRequest:
    """A request on its way through an engine. All methods can be called from any thread.

    Iterating over it yields the text piece by piece, ``for piece in request`` or ``async for piece
    in request``. Every iteration starts with the first piece.

    Args:
      cancel: asks the engine to end the request.
    """

    def __init__(self, cancel: Callable[[EngineRequest], None]):
        self.times = RequestTimes(time.monotonic())
        self._cancel = cancel
        self._changed = threading.Condition()
        self.prompt_record: PromptRecord | None = None
        """The prompt's log-probabilities, complete with the first piece; None if not asked for."""
        self.accepted_drafts: list[int] = []
        """Positions in the completion of the tokens so far that were drafted, in order."""
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._top_logprobs: list[TopLogprobs] | None = None
        # Text, number of tokens up to its end, finish reason. Tuples of such values are of no
        # interest to the garbage collector, while a Piece for every token would keep it busy.
        self._pieces: list[tuple[str, int, FinishReason | None]] = []
        self._completion: Completion | None = None
        self.error: BaseException | None = None
        """The error that the request has ended with, or None."""
        self._listeners: list[Callable[[], None]] = []
        self._end_listeners: list[Callable[[], None]] = []  # called at the end alone

    def result(self, timeout: float | None = None) -> Completion:
        """Waits for the end of the request and returns its completion. That of a cancelled request
        has the finish reason ``cancelled``, and the tokens so far.

        Args:
          timeout: seconds to wait. The request goes on after them; its own time limit is the
            setting ``timeout`` of :meth:`dsv3_jax.Engine.submit`.

        Raises:
          TimeoutError: the request is not at its end after ``timeout`` seconds.
          NonFiniteLogitsError: the model computed NaN or an infinity for this request.
          RequestError: this request failed in another way, such as in its grammar.
          EngineError: the engine failed.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.is_done, timeout):
                raise TimeoutError(f"request: expected its end within {timeout} s")
        if self.error is not None:
            raise self.error.with_traceback(None)  # otherwise it grows with every call
        assert self._completion is not None
        return self._completion

    @property
    def is_done(self) -> bool:
        """Whether the request has a completion or an error."""
        return self._completion is not None or self.error is not None

    def cancel(self) -> None:
        """Ends the request within one step. Does nothing if it is at its end."""
        self._cancel(self)

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Has a function called whenever a piece, or the end, has arrived. It is called in the
        thread that brings it, usually the one that decodes text, which waits for it."""
        with self._changed:
            self._listeners.append(listener)

    def pieces_from(self, position: int) -> list[Piece]:
        """Returns the pieces so far, without the first ``position`` of them."""
        with self._changed:
            begin = self._pieces[position - 1][1] if position else 0
            pieces = []
            for text, end, finish_reason in self._pieces[position:]:
                tokens, logprobs = self._tokens[begin:end], self._logprobs[begin:end]
                top = None if self._top_logprobs is None else self._top_logprobs[begin:end]
                pieces.append(Piece(text, tokens, finish_reason, logprobs, top))
                begin = end
            return pieces

    def _next_pieces(self, position: int) -> list[Piece]:
        """Returns :meth:`pieces_from`. Raises the request's error after the last of them."""
        with self._changed:
            pieces = self.pieces_from(position)
            if not pieces and self.error is not None:
                raise self.error.with_traceback(None)
            return pieces

    def __iter__(self) -> Iterator[Piece]:
        """Yields pieces as they arrive. The last one has a finish reason. Joined, they are the
        completion's text. Raises like :meth:`result`."""
        position = 0
        while True:
            with self._changed:
                while not (fresh := self._next_pieces(position)):
                    self._changed.wait()
            yield from fresh
            if fresh[-1].finish_reason is not None:
                return
            position += len(fresh)

    async def __aiter__(self) -> AsyncGenerator[Piece, None]:
        """Like :meth:`__iter__`, without blocking the event loop."""
        position = 0
        with self._event(self._listeners) as arrived:
            while True:
                while not (fresh := self._next_pieces(position)):
                    await arrived.wait()
                    arrived.clear()
                for piece in fresh:
                    yield piece
                if fresh[-1].finish_reason is not None:
                    return
                position += len(fresh)

    async def async_result(self) -> Completion:
        """Like :meth:`result`, without blocking the event loop, which wakes up at the end alone."""
        with self._event(self._end_listeners) as ended:
            if not self.is_done:
                await ended.wait()
        return self.result(0)

    @contextlib.contextmanager
    def _event(self, listeners: list[Callable[[], None]]) -> Iterator[asyncio.Event]:
        """Returns an event of the running event loop that is set when listeners are called."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        thread = threading.get_ident()

        def listener() -> None:
            # An event loop that was closed in the meantime refuses: then nobody waits any more.
            with contextlib.suppress(RuntimeError):
                if threading.get_ident() == thread:
                    event.set()
                else:
                    loop.call_soon_threadsafe(event.set)

        with self._changed:
            listeners.append(listener)
        try:
            yield event
        finally:
            with self._changed:
                listeners.remove(listener)

    # Called by one thread at a time: the one that decodes text, the engine's if there is none, or
    # one that receives from another process.

    def deliver(
        self,
        text: str,
        tokens: list[int],
        logprobs: list[float],
        top_logprobs: list[TopLogprobs] | None,
        completion: Completion | None = None,
    ) -> None:
        """Adds a piece; the last one comes with the completion."""
        with self._changed:
            if tokens and not self._tokens:
                self.times.first_token = time.monotonic()
            self._tokens += tokens
            self._logprobs += logprobs
            if top_logprobs is not None:
                self._top_logprobs = self._top_logprobs or []
                self._top_logprobs += top_logprobs
            reason = None if completion is None else completion.finish_reason
            self._pieces.append((text, len(self._tokens), reason))
            if completion is not None:
                self.times.end = time.monotonic()
                self._completion = completion
                self._cancel = _nothing_to_cancel
            self._notify()

    def fail(self, error: BaseException) -> None:
        """Ends the request with an error."""
        with self._changed:
            if not self.is_done:
                self.error = error
                self._cancel = _nothing_to_cancel
                self._notify()

    def _notify(self) -> None:
        self._changed.notify_all()
        for listener in self._listeners:
            listener()
        if self.is_done:
            for listener in self._end_listeners:
                listener()


def _nothing_to_cancel(request: EngineRequest) -> None:
    """Cancels a request that is at its end, whose handle must not keep the engine alive."""
