"""The engine's side of the connection."""

from __future__ import annotations

import concurrent.futures
import functools
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from dsv3_jax.engine import Engine, EngineRequest, EngineStats
from dsv3_jax.engine.stats import Compilation
from dsv3_jax.generation.request import Prompt
from dsv3_jax.server.frontend import messages
from dsv3_jax.server.grammar import Grammars, GrammarSource
from dsv3_jax.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_THREADS = 4  # for each kind of calls
_SHORT_CALLS = ("cancel", "stats", "fail_if_stuck", "shutdown")
"""Calls that do not wait for others, which may encode long prompts or compile grammars."""
_LOOK_SECONDS = 0.2  # between two looks at the engine


class EngineHost:
    """Answers calls of the process that serves HTTP, and sends it what requests gain."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, connection: Connection):
        self._engine = engine
        self._connection = connection
        self._sending = threading.Lock()
        self._grammars = Grammars(tokenizer, engine.vocab_size, engine.end_tokens)
        self._outbox = _Outbox(self._send)
        self._calls = concurrent.futures.ThreadPoolExecutor(_THREADS, "dsv3-calls")
        self._short_calls = concurrent.futures.ThreadPoolExecutor(_THREADS, "dsv3-short-calls")
        self.is_warming_up = False
        """Whether programs are being compiled. A compilation cannot be interrupted."""
        self._is_closed = threading.Event()

    def serve(self) -> None:
        """Answers calls until the other process ends. Open requests are cancelled then."""
        self._send(messages.Hello(self._engine.vocab_size, self._engine.end_tokens))
        threads = [
            threading.Thread(target=work, name=f"dsv3-{name}", daemon=True)
            for name, work in (("outbox", self._outbox.run), ("alive", self._watch))
        ]
        for thread in threads:
            thread.start()
        try:
            while True:
                call: messages.Call = self._connection.recv()
                threads = self._short_calls if call.method in _SHORT_CALLS else self._calls
                threads.submit(self._answer, call)
        except (EOFError, OSError):
            pass  # the other process has ended
        finally:
            self._is_closed.set()
            self._outbox.close()
            self._grammars.close()
            for threads in (self._calls, self._short_calls):
                threads.shutdown(wait=False, cancel_futures=True)

    def _answer(self, call: messages.Call) -> None:
        result, error = None, None
        try:
            result = getattr(self, "call_" + call.method)(*call.arguments)
        except Exception as raised:
            error = messages.PortableError.of(raised)
        try:
            self._send(messages.Reply(call.number, result, error))
        except Exception as raised:  # of the pickle; the caller would wait for ever
            self._send(messages.Reply(call.number, None, messages.PortableError.of(raised)))

    def _send(self, message: Any) -> None:
        try:
            with self._sending:
                self._connection.send(message)
        except OSError:
            self._is_closed.set()  # the other process has ended; `serve` notices it too

    def _watch(self) -> None:
        """Gives signs of life, and reports an error after which the engine serves no more requests.
        It needs Python's lock, so that a process whose lock is never released gives none."""
        while not self._is_closed.wait(_LOOK_SECONDS):
            if self._engine.failure is not None:
                self._send(messages.Failed(str(self._engine.failure)))
                return
            self._send(messages.Alive(self._engine.step_seconds))

    def report(self, compilation: Compilation | None) -> None:
        """Reports that a step waits for a compilation, or no longer does."""
        self._send(messages.Compiling(None if compilation is None else compilation.program))

    # The methods that can be called. They run in several threads.

    def call_submit(
        self,
        ids: Sequence[int],
        prompts: Sequence[Prompt],
        grammars: Sequence[messages.GrammarStart],
        settings: Mapping[str, Any],
    ) -> None:
        started = [self._grammars.start(*grammar) for grammar in grammars]
        self._outbox.add(ids, self._engine.submit_all(prompts, grammars=started, **settings))

    def call_cancel(self, number: int) -> None:
        self._outbox.cancel(number)

    def call_compile(self, source: GrammarSource) -> None:
        self._grammars.start(source)

    def call_warm_up(self, store: str | os.PathLike[str] | None) -> float:
        self.is_warming_up = True
        try:
            self._grammars.load()
            return self._engine.warm_up(store)
        finally:
            self.is_warming_up = False

    def call_stats(self) -> EngineStats:
        return self._engine.stats()

    def call_fail_if_stuck(self, seconds: float) -> None:
        self._engine.fail_if_stuck(seconds)

    def call_shutdown(self) -> None:
        self._engine.shutdown(drain=False)


class _Outbox:
    """Sends what requests gain, from a thread of its own. The thread that
    decodes their text only marks them."""

    def __init__(self, send: Any):
        self._send = send
        self._changed = threading.Condition()
        self._open: dict[int, _OpenRequest] = {}
        self._marked: dict[int, None] = {}  # in the order of their first gain
        self._is_closed = False

    def add(self, ids: Sequence[int], handles: Sequence[EngineRequest]) -> None:
        with self._changed:
            self._open |= {i: _OpenRequest(i, h) for i, h in zip(ids, handles, strict=True)}
        for i, handle in zip(ids, handles, strict=True):
            handle.add_listener(functools.partial(self._mark, i))
            self._mark(i)  # it may have gained something before

    def cancel(self, number: int) -> None:
        """Ends a request within one step, unless it is at its end."""
        with self._changed:
            request = self._open.get(number)
        if request is not None:
            request.handle.cancel()

    def close(self) -> None:
        """Ends the thread, and cancels the requests that are not at their end."""
        with self._changed:
            self._is_closed = True
            left = list(self._open.values())
            self._changed.notify_all()
        for request in left:
            request.handle.cancel()

    def _mark(self, number: int) -> None:
        with self._changed:
            if not self._marked:
                self._changed.notify_all()
            self._marked[number] = None

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._marked or self._is_closed)
                if self._is_closed:
                    return
                marked, self._marked = self._marked, {}
                requests = [self._open[i] for i in marked if i in self._open]
            # First tokens have a message of their own: they do not wait for the others.
            for group in (
                [request for request in requests if request.is_new],
                [request for request in requests if not request.is_new],
            ):
                self._send_gains(group)

    def _send_gains(self, requests: Sequence[_OpenRequest]) -> None:
        try:
            gains = [gain for request in requests if (gain := request.gain()) is not None]
            if gains:
                self._send(messages.Gains(gains))
        except Exception as error:  # these requests end; all would wait for this thread for ever
            logger.exception("what requests gained was not sent")
            gains = [request.failed(error) for request in requests]
            self._send(messages.Gains(gains))
        ended = [g.id for g in gains if g.completion is not None or g.error is not None]
        with self._changed:
            for number in ended:
                del self._open[number]


class _OpenRequest:
    """A request and how much of it has been sent."""

    def __init__(self, number: int, handle: EngineRequest):
        self.handle = handle
        self._number = number
        self._pieces = 0
        self._drafts = 0

    @property
    def is_new(self) -> bool:
        return not self._pieces

    def failed(self, error: Exception) -> messages.Gain:
        """Ends the request, and returns its error."""
        self.handle.cancel()
        return messages.Gain(
            self._number, "", [], [], None, [], None, None, messages.PortableError.of(error)
        )

    def gain(self) -> messages.Gain | None:
        error = self.handle.error  # first: what came before the error is sent with it
        pieces = self.handle.pieces_from(self._pieces)
        if not pieces and error is None:
            return None
        is_first = self.is_new
        self._pieces += len(pieces)
        is_done = bool(pieces) and pieces[-1].finish_reason is not None
        drafts = self.handle.accepted_drafts[self._drafts :]
        self._drafts += len(drafts)
        tops = [piece.top_logprobs for piece in pieces]
        return messages.Gain(
            self._number,
            "".join(piece.text for piece in pieces),
            [token for piece in pieces for token in piece.tokens],
            [value for piece in pieces for value in piece.logprobs],
            None if not tops or tops[0] is None else [top for each in tops for top in each or ()],
            drafts,
            self.handle.prompt_record if is_first else None,
            self.handle.result(0) if is_done else None,
            None if error is None else messages.PortableError.of(error),
        )
