"""HTTP's side of the connection: an object with the methods of an engine."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from dsv3_jax.engine import EngineError, EngineRequest, EngineStats
from dsv3_jax.generation.request import Prompt
from dsv3_jax.server.frontend.messages import (
    Call,
    Failed,
    Gain,
    Gains,
    GrammarStart,
    Hello,
    Reply,
    Submission,
)
from dsv3_jax.server.grammar import GrammarSource

_ANSWER_SECONDS = 2.0
"""Time in which the engine's process answers a question about itself, however busy it is."""


class RemoteEngine:
    """The part of :class:`dsv3_jax.Engine` that a server needs, for an engine in another process.

    All methods can be called from any thread.

    Args:
      connection: to an :class:`~dsv3_jax.server.frontend.host.EngineHost`.
      on_loss: called when the engine's process has ended without having been asked to.
    """

    def __init__(self, connection: Connection, on_loss: Callable[[], None]):
        self._connection = connection
        self._on_loss = on_loss
        self._sending = threading.Lock()
        self._numbers = itertools.count()
        self._replies: dict[int, concurrent.futures.Future[Any]] = {}
        self._open: dict[int, EngineRequest] = {}
        self._failure: EngineError | None = None
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        hello: Hello = connection.recv()
        self.vocab_size, self.end_tokens = hello
        self._reader = threading.Thread(target=self._read, name="dsv3-remote-engine", daemon=True)
        self._reader.start()

    def deliver_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """Makes requests gain their tokens in the thread of ``loop``, one call for each message.

        Readers in this loop are then woken up directly. Otherwise every token of every request
        writes to the loop's socket, and both threads compete for Python's lock meanwhile.
        """
        self._loop = loop

    def submit_all(
        self,
        prompts: Sequence[Prompt],
        *,
        n: int = 1,
        grammars: Sequence[GrammarStart] = (),
        **settings: Any,
    ) -> list[EngineRequest]:
        """Does the same as :meth:`dsv3_jax.Engine.submit_all`."""
        handles = {}
        for _ in range(len(prompts) * n):
            number = next(self._numbers)
            handles[number] = EngineRequest(lambda _, number=number: self._cancel(number))
        self._open |= handles  # before the first of them can gain anything
        submission = Submission(list(handles), list(prompts), grammars, {"n": n, **settings})
        try:
            self._call("submit", submission)
        except BaseException:
            for number in handles:
                self._open.pop(number, None)
            raise
        return list(handles.values())

    def warm_up(self, directory: str | os.PathLike[str] | None = None) -> float:
        """Compiles or loads all programs. Returns the seconds that it took."""
        return self._call("warm_up", directory)

    def stats(self) -> EngineStats:
        """Returns the engine's figures."""
        return self._call("stats")

    @property
    def failure(self) -> EngineError | None:
        """The error after which the engine serves no more requests, or None."""
        return self._failure

    @property
    def step_seconds(self) -> float:
        """Seconds since the step under way began; 0 if there is none."""
        if self._failure is not None:
            return 0.0
        began = time.monotonic()
        try:
            return self._call("step_seconds", timeout=_ANSWER_SECONDS)
        except concurrent.futures.TimeoutError:
            return time.monotonic() - began
        except EngineError:  # it has ended meanwhile
            return 0.0

    def fail_if_stuck(self, seconds: float) -> None:
        """Gives up a step that has lasted longer than ``seconds``."""
        if self._failure is None:
            self._start_call("fail_if_stuck", seconds)

    def shutdown(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Ends the engine, and cancels its requests: the server drains by itself."""
        del drain, timeout
        if self._failure is None:
            self._call("shutdown")
        self._is_closed = True

    def compile(self, source: GrammarSource) -> None:
        """Compiles a grammar in the engine's process.

        Raises:
          GrammarError: it is refused.
        """
        self._call("compile", source)

    def _cancel(self, number: int) -> None:
        if number in self._open:
            self._start_call("cancel", number)

    def _call(self, method: str, *arguments: Any, timeout: float | None = None) -> Any:
        number, reply = self._start_call(method, *arguments)
        try:
            return reply.result(timeout)
        finally:
            self._replies.pop(number, None)

    def _start_call(
        self, method: str, *arguments: Any
    ) -> tuple[int, concurrent.futures.Future[Any]]:
        number, reply = next(self._numbers), concurrent.futures.Future[Any]()
        self._replies[number] = reply
        try:
            with self._sending:
                self._connection.send(Call(number, method, arguments))
        except OSError:
            self._replies.pop(number, None)
            raise EngineError("engine: its process has ended") from None
        if self._failure is not None:  # the reader may have ended before
            _fail(reply, EngineError(str(self._failure)))
        return number, reply

    def _read(self) -> None:
        """The body of the thread that receives messages."""
        try:
            while True:
                message = self._connection.recv()
                if isinstance(message, Gains):
                    self._in_loop(self._deliver, message)
                elif isinstance(message, Reply):
                    self._take(message)
                elif isinstance(message, Failed):
                    self._failure = EngineError(message.message)
        except (EOFError, OSError):
            pass
        self._fail_all(EngineError("engine: its process has ended"))
        if not self._is_closed:
            self._on_loss()

    def _take(self, reply: Reply) -> None:
        future = self._replies.pop(reply.number, None)
        if future is None:
            return
        if reply.error is not None:
            _fail(future, reply.error.exception())
        else:
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                future.set_result(reply.result)

    def _in_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a function in the loop's thread, in order, or here if no loop runs."""
        if self._loop is not None:
            # A loop that is closed refuses. Nobody reads in it any more.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(function, *arguments)
                return
        function(*arguments)

    def _deliver(self, gains: Gains) -> None:
        for gain in gains.gains:
            self._deliver_one(gain)

    def _deliver_one(self, gain: Gain) -> None:
        handle = self._open.get(gain.id)
        if handle is None:
            return
        handle.accepted_drafts += gain.accepted_drafts
        if gain.prompt_record is not None:
            handle.prompt_record = gain.prompt_record
        if gain.completion is not None or gain.error is not None:
            del self._open[gain.id]
        if gain.text or gain.tokens or gain.completion is not None:
            handle.deliver(
                gain.text, gain.tokens, gain.logprobs, gain.top_logprobs, gain.completion
            )
        if gain.error is not None:
            handle.fail(gain.error.exception())

    def _fail_all(self, failure: EngineError) -> None:
        self._failure = self._failure or failure
        for reply in list(self._replies.values()):
            _fail(reply, EngineError(str(failure)))
        self._in_loop(self._fail_open, failure)  # after what they have gained before

    def _fail_open(self, failure: EngineError) -> None:
        for handle in list(self._open.values()):
            handle.fail(EngineError(str(failure)))
        self._open.clear()


def _fail(reply: concurrent.futures.Future[Any], error: Exception) -> None:
    """Ends a reply with an error, unless it has ended, perhaps just now in another thread."""
    with contextlib.suppress(concurrent.futures.InvalidStateError):
        reply.set_exception(error)


class RemoteGrammars:
    """Does the same as :class:`dsv3_jax.server.grammar.Grammars`, in the engine's process."""

    def __init__(self, engine: RemoteEngine):
        self._engine = engine

    def load(self) -> None:
        """Does nothing: the engine's process reads the vocabulary before it compiles programs."""

    async def compile(self, source: GrammarSource) -> None:
        """Compiles a grammar, unless it is cached.

        Raises:
          GrammarError: it is refused.
        """
        await asyncio.get_running_loop().run_in_executor(None, self._engine.compile, source)

    def start(self, source: GrammarSource, prompt: Sequence[int] | None = None) -> GrammarStart:
        """Returns a description of one answer's grammar, which the engine's process starts."""
        return GrammarStart(source, prompt)

    def close(self) -> None:
        """Does nothing."""
