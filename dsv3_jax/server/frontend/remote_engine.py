"""HTTP's side of the connection: an object with the methods of an engine."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from dsv3_jax.connections import hang_up
from dsv3_jax.engine import EngineError, EngineRequest, EngineStats
from dsv3_jax.engine.stats import COMPILE_SECONDS
from dsv3_jax.generation.request import Prompt
from dsv3_jax.server.frontend import messages
from dsv3_jax.server.grammar import GrammarSource

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""Time between two looks for a message."""

_LEAST_SECONDS = 10.0
"""A shorter silence is no sign of anything: both processes may wait for a processor."""


class Silence:
    """Measures how long a process has sent nothing. A thread counts how often it looked in vain,
    instead of reading a clock: time in which this process was paused too does not count."""

    def __init__(self) -> None:
        self._messages = 0  # written by the thread that receives
        self._seen = 0  # written by the thread that looks, like the next one
        self._silent_looks = 0
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dsv3-silence", daemon=True)
        self._thread.start()

    def interrupt(self) -> None:
        self._messages += 1

    @property
    def seconds(self) -> float:
        """Length of the silence; 0 if it is shorter than ten seconds."""
        seconds = self._silent_looks * LOOK_SECONDS
        is_long = seconds >= _LEAST_SECONDS and self._messages == self._seen
        return seconds if is_long else 0.0

    def end(self) -> None:
        self._has_ended.set()

    def look(self) -> None:
        """Counts the look if no message came since the one before. The thread calls it."""
        messages = self._messages
        self._silent_looks = self._silent_looks + 1 if messages == self._seen else 0
        self._seen = messages

    def _run(self) -> None:
        while not self._has_ended.wait(LOOK_SECONDS):
            self.look()


class RemoteEngine:
    """The part of :class:`dsv3_jax.Engine` that a server needs, for an engine in another process.

    All methods can be called from any thread. None waits longer for a process that is frozen than
    until :meth:`fail_if_stuck` gives it up.

    Args:
      connection: to an :class:`~dsv3_jax.server.frontend.host.EngineHost`.
      on_loss: called when the engine's process has ended without having been asked to.
    """

    def __init__(self, connection: Connection, on_loss: Callable[[], None]):
        self._connection = connection
        self._on_loss = on_loss
        # A thread sends, because a frozen process takes only what the connection's buffer has room
        # for. A caller would wait for it otherwise, even the one that gives it up.
        self._outgoing: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._replies: dict[int, concurrent.futures.Future[Any]] = {}
        self._open: dict[int, EngineRequest] = {}
        self._failure: EngineError | None = None
        self._step_seconds = 0.0
        self._is_warming_up = False
        self._compiling: str | None = None  # program that a step waits for
        self._is_closed = False
        self.is_given_up = False
        """Whether the engine's process gave no sign of life for too long."""
        self._loop: asyncio.AbstractEventLoop | None = None
        hello: messages.Hello = connection.recv()
        self.vocab_size, self.end_tokens = hello
        self._silence = Silence()
        for work, name in ((self._read, "dsv3-remote-engine"), (self._send, "dsv3-remote-calls")):
            threading.Thread(target=work, name=name, daemon=True).start()

    def deliver_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """Makes requests gain their tokens in the thread of ``loop``, one call for each message.
        Otherwise every token of every request would write to the loop's socket to wake up its
        reader, and both threads would compete for Python's lock meanwhile."""
        self._loop = loop

    def submit_all(
        self,
        prompts: Sequence[Prompt],
        *,
        n: int = 1,
        grammars: Sequence[messages.GrammarStart] = (),
        **settings: Any,
    ) -> list[EngineRequest]:
        """Does the same as :meth:`dsv3_jax.Engine.submit_all`."""
        handles = {}
        for _ in range(len(prompts) * n):
            number = next(self._numbers)
            handles[number] = EngineRequest(lambda _, number=number: self._cancel(number))
        self._open |= handles  # before the first of them can gain anything
        try:
            self._call("submit", list(handles), list(prompts), grammars, {"n": n, **settings})
        except BaseException:
            for number in handles:
                self._open.pop(number, None)
            raise
        return list(handles.values())

    def warm_up(self, directory: str | os.PathLike[str] | None = None) -> float:
        """Does the same as :meth:`dsv3_jax.Engine.warm_up`."""
        self._is_warming_up = True
        try:
            return self._call("warm_up", directory)
        finally:
            self._is_warming_up = False

    def stats(self) -> EngineStats:
        return self._call("stats")

    @property
    def failure(self) -> EngineError | None:
        """The error after which the engine serves no more requests, or None."""
        return self._failure

    @property
    def step_seconds(self) -> float:
        """Seconds since the step under way began, without those of compilations, at the last sign
        of life; 0 if there was none."""
        return self._step_seconds if self._failure is None else 0.0

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last sign of life of the engine's process; 0 if they are few, and while
        programs are compiled or loaded, which may keep Python's lock for a while."""
        if self._failure is not None or self._is_warming_up or self._compiling is not None:
            return 0.0
        return self._silence.seconds

    def fail_if_stuck(self, seconds: float) -> None:
        """Gives up a step that has lasted longer than ``seconds``, and a process that has been
        silent for longer; one that compiles while a step waits, for longer than
        ``COMPILE_SECONDS`` too."""
        if self._failure is not None:
            return
        silent_seconds = self.silent_seconds
        if self._compiling is not None and self._silence.seconds > COMPILE_SECONDS:
            silent_seconds = self._silence.seconds
        if silent_seconds <= seconds:
            self._start_call("fail_if_stuck", seconds)
            return
        self.is_given_up = True
        self._fail_all(silent(silent_seconds))
        # If the process is ever resumed it notices the end, and ends as well.
        hang_up(self._connection)

    def shutdown(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Ends the engine, and cancels its requests: the server drains by itself."""
        del drain, timeout
        if self._failure is None:
            self._call("shutdown")
        self._is_closed = True

    def compile(self, source: GrammarSource) -> None:
        """Compiles a grammar in the engine's process, which may refuse it with a GrammarError."""
        self._call("compile", source)

    def _cancel(self, number: int) -> None:
        if number in self._open:
            self._start_call("cancel", number)

    def _call(self, method: str, *arguments: Any) -> Any:
        number, reply = self._start_call(method, *arguments)
        try:
            return reply.result()
        finally:
            self._replies.pop(number, None)

    def _start_call(
        self, method: str, *arguments: Any
    ) -> tuple[int, concurrent.futures.Future[Any]]:
        number, reply = next(self._numbers), concurrent.futures.Future[Any]()
        call = messages.Call(number, method, arguments)
        content = ForkingPickler.dumps(call)  # as Connection.send does
        self._replies[number] = reply
        self._outgoing.put(content)
        if self._failure is not None:  # the reader may have ended before
            self._replies.pop(number, None)
            _fail(reply, EngineError(str(self._failure)))
        return number, reply

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # the process has ended; the reader notices it too
            while (content := self._outgoing.get()) is not None:
                self._connection.send_bytes(content)

    def _read(self) -> None:
        """The body of the thread that receives messages."""
        try:
            while True:
                message = self._connection.recv()
                self._silence.interrupt()
                if isinstance(message, messages.Gains):
                    self._in_loop(self._deliver, message)
                elif isinstance(message, messages.Reply):
                    self._take(message)
                elif isinstance(message, messages.Alive):
                    self._step_seconds = message.step_seconds
                elif isinstance(message, messages.Compiling):
                    self._compiling = message.program
                elif isinstance(message, messages.Failed):
                    self._failure = EngineError(message.message)
        except (EOFError, OSError):
            pass
        except Exception:  # who waits for an answer must not wait for ever
            logger.exception("the connection to the engine's process ends")
        self._silence.end()
        self._outgoing.put(None)
        self._fail_all(EngineError("engine: its process has ended"))
        if not self._is_closed and not self.is_given_up:
            self._on_loss()

    def _take(self, reply: messages.Reply) -> None:
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

    def _deliver(self, gains: messages.Gains) -> None:
        for gain in gains.gains:
            if (handle := self._open.get(gain.id)) is not None:
                self._add(gain, handle)

    def _add(self, gain: messages.Gain, handle: EngineRequest) -> None:
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
        failure = self._failure = self._failure or failure
        for reply in list(self._replies.values()):
            _fail(reply, EngineError(str(failure)))
        self._in_loop(self._fail_open, failure)  # after what they have gained before

    def _fail_open(self, failure: EngineError) -> None:
        for handle in list(self._open.values()):
            handle.fail(EngineError(str(failure)))
        self._open.clear()


def silent(seconds: float) -> EngineError:
    """Returns the error of an engine whose process has been silent for some seconds."""
    return EngineError(f"engine: its process has given no sign of life for {seconds:.0f} s")


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
        """Compiles a grammar, unless it is cached. A GrammarError refuses it."""
        await asyncio.get_running_loop().run_in_executor(None, self._engine.compile, source)

    def start(
        self, source: GrammarSource, prompt: Sequence[int] | None = None
    ) -> messages.GrammarStart:
        """Returns a description of one answer's grammar, which the engine's process starts."""
        return messages.GrammarStart(source, prompt)

    def close(self) -> None:
        """Does nothing."""
