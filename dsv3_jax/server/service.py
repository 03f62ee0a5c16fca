"""The engine as endpoints see it: settings, admission, encoding, submission, readiness."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from fastapi import Request

from dsv3_jax.disaggregation.peers import Peer
from dsv3_jax.disaggregation.remote_prefill import RemotePrefill
from dsv3_jax.engine import Engine, EngineError, EngineRequest, QueueFullError
from dsv3_jax.generation.request import Prompt
from dsv3_jax.kv_cache import DEFAULT_PAGE_SIZE
from dsv3_jax.server.errors import ApiError, engine_failed, overloaded
from dsv3_jax.server.frontend.remote_engine import RemoteEngine, RemoteGrammars
from dsv3_jax.server.grammar import Grammars, GrammarSource
from dsv3_jax.server.job import Job
from dsv3_jax.server.metrics import Metrics
from dsv3_jax.server.middleware import ApiKeys
from dsv3_jax.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")
Pool = Literal["bodies", "prompts", "answers", "calls"]
"""Work of a thread: reading large bodies, encoding and submitting prompts, writing answers, or
short calls of the engine, such as cancelling. None of them waits for another kind."""
_THREADS: dict[Pool, int] = {"bodies": 2, "prompts": 4, "answers": 4, "calls": 4}
_WARM_UP_SECONDS = 5  # after which a client should try again


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """Limits and names of a server."""

    model_name: str
    """The id of the model in the API."""
    max_len: int
    """Most tokens of a prompt and its completion together; the engine's."""
    max_requests: int
    """Most completions that run or wait at a time. More are refused with status 503."""
    page_size: int = DEFAULT_PAGE_SIZE
    """Tokens of a cache page; the engine's."""
    max_body_bytes: int = 4 * 2**20
    """Largest body of an HTTP request."""
    header_seconds: float = 30.0
    """Longest time of a connection without a complete header of a request."""
    body_seconds: float = 30.0
    """Longest time in which a body must have arrived."""
    request_seconds: float | None = None
    """Longest time of a completion, from its arrival to its end. None for no limit."""
    unread_seconds: float = 600.0
    """Longest time in which a client takes nothing of what is sent to it. After it the connection
    is closed, and its requests are cancelled."""
    drain_seconds: float = 30.0
    """Longest time that open requests get to finish when the server ends."""
    stuck_seconds: float = 300.0
    """Longest time of an engine's step, without compilations, and of the silence of an engine in
    another process. After it the device counts as stuck, or the process as frozen, and the server
    ends. From half of it on, /health returns status 503."""
    api_keys: ApiKeys | None = None
    """Keys that clients must have; None for no keys."""
    program_store: Path | None = None
    """Directory of :meth:`Engine.warm_up`; None compiles programs at every start."""
    log_level: str = "info"
    """Least level of lines on stderr. Requests are logged as information, and those of probes for
    debugging."""


class Admission:
    """Counts open completions. Only the event loop's thread uses it."""

    def __init__(self, limit: int):
        self._limit = limit
        self.open = 0
        """Completions that run or wait."""

    def enter(self, count: int) -> None:
        """Opens completions: all, or none if it raises."""
        if count > self._limit:
            raise ApiError(
                400, f"request: expected at most {self._limit} completions, got {count}", param="n"
            )
        if self.open + count > self._limit:
            raise overloaded(
                f"queue: expected at most {self._limit} completions running and waiting, got"
                f" {self.open} and {count} more; try again later"
            )
        self.open += count

    def leave(self, count: int) -> None:
        self.open -= count
        assert self.open >= 0, "more completions were closed than opened"


class Service:
    """An engine with its tokenizer and limits."""

    def __init__(
        self,
        engine: Engine | RemoteEngine,
        tokenizer: Tokenizer,
        settings: ServerSettings,
        *,
        remote: RemotePrefill | None = None,
        is_prefill_server: bool = False,
    ):
        self.engine = engine
        self.tokenizer = tokenizer
        self.settings = settings
        self.remote = remote
        self.is_prefill_server = is_prefill_server
        self.admission = Admission(settings.max_requests)
        self.grammars = (
            RemoteGrammars(engine)
            if isinstance(engine, RemoteEngine)
            else Grammars(tokenizer, engine.vocab_size, engine.end_tokens)
        )
        self.metrics = Metrics(engine, settings.model_name, settings.page_size)
        self.created = int(time.time())
        self.is_ready = False
        """Whether the programs of the default options are compiled, and the server is not at its
        end."""
        self.warm_up_failure: EngineError | None = None
        self._jobs: set[Job] = set()  # open ones
        self.is_warming_up = False
        """Whether programs are being compiled. A compilation cannot be interrupted."""
        self._threads = {
            pool: concurrent.futures.ThreadPoolExecutor(count, f"dsv3-{pool}")
            for pool, count in _THREADS.items()
        }

    @property
    def failure(self) -> EngineError | None:
        """Error after which the engine cannot serve any more."""
        return self.warm_up_failure or self.engine.failure

    async def warm_up(self) -> None:
        """Compiles or loads the programs of the default options. The server is ready afterwards, or
        has failed."""
        store = self.settings.program_store
        try:
            await self.in_thread(self.grammars.load, "calls")
            seconds = await self._compiled(lambda: self.engine.warm_up(store))
        except Exception as error:
            out_of_memory = "RESOURCE_EXHAUSTED" in str(error)
            logger.error(
                "the server cannot serve: its programs do not compile", exc_info=not out_of_memory
            )
            self.warm_up_failure = EngineError(f"warm-up: {' '.join(str(error).split())}")
            return
        logger.info(
            "ready: compiled or loaded the programs of the default options in %.1f s", seconds
        )
        self.is_ready = True

    async def _compiled(self, compile_all: Callable[[], float]) -> float:
        """Returns the result of a function that compiles. Its thread ends with the process: a
        server that is told to end does not wait for it."""
        done: concurrent.futures.Future[float] = concurrent.futures.Future()

        def work() -> None:
            try:
                result = compile_all()
            except BaseException as error:
                ended = functools.partial(done.set_exception, error)
            else:
                ended = functools.partial(done.set_result, result)
            self.is_warming_up = False
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # it was cancelled
                ended()

        self.is_warming_up = True
        threading.Thread(target=work, name="dsv3-warm-up", daemon=True).start()
        return await asyncio.wrap_future(done)

    async def close(self) -> None:
        """Ends the engine. Requests that are still open are cancelled."""
        self.is_ready = False
        if self.failure is None:  # the thread of an engine that failed may be stuck
            await self.in_thread(lambda: self.engine.shutdown(drain=False), "calls")
        for threads in self._threads.values():
            threads.shutdown(wait=False)
        self.grammars.close()

    async def drain(self) -> None:
        """Takes no new requests, and cancels open ones after ``settings.drain_seconds``. Their
        clients get status 503, or an error as the last event of a stream."""
        self.is_ready = False
        await asyncio.sleep(self.settings.drain_seconds)
        if self._jobs:
            logger.warning("ending %d open requests after the time to drain", len(self._jobs))
        handles = [handle for job in self._jobs for handle in job.handles]
        await self.in_thread(lambda: [handle.cancel() for handle in handles], "calls")

    def check_model(self, name: str | None) -> None:
        """Raises ApiError unless ``name``, if given, is the id of the served model."""
        if name not in (None, self.settings.model_name):
            raise ApiError(
                404,
                f"The model `{name:.200}` does not exist; expected `{self.settings.model_name}`",
                param="model",
                code="model_not_found",
            )

    async def in_thread(self, function: Callable[[], T], pool: Pool) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads[pool], function)

    async def submit(
        self,
        read_prompts: Callable[[], Sequence[Prompt]],
        num_prompts: int,
        *,
        n: int,
        prompt_field: str,
        grammar: GrammarSource | Callable[[], GrammarSource] | None = None,
        peer: Peer | None = None,
        settings_of: Callable[[], dict[str, Any]] = dict,
        **settings: Any,
    ) -> Job:
        """Puts requests into the engine's queue: ``n`` for each of the prompts, which are named
        ``prompt_field`` in the body. ``read_prompts`` runs in a thread, and then ``settings_of``,
        which returns further settings of :meth:`dsv3_jax.Engine.submit_all`.

        The text of each completion has to match ``grammar``, after its reasoning if the prompts are
        conversations. A function that returns it runs in a thread, once the request is admitted.
        ``peer`` is the prefill server that has the prompts' pages, if a proxy names one.

        It raises ApiError if a prompt, a setting or the grammar is refused, the queue is full, or
        the engine is not ready.
        """
        if self.failure is not None:
            raise engine_failed(self.failure)
        if not self.is_ready:
            raise overloaded("server: not ready yet; try again later", _WARM_UP_SECONDS)

        def submit() -> list[EngineRequest]:
            prompts = read_prompts()
            if peer is not None:
                self._prefer(peer, prompts)
            timeout = self.settings.request_seconds
            grammars: list[Any] = []
            if source is not None:
                first = prompts[0]
                ids = None if prompt_field == "prompt" or isinstance(first, str) else first
                grammars = [self.grammars.start(source, ids) for _ in range(count)]
            return self.engine.submit_all(
                prompts, n=n, timeout=timeout, grammars=grammars, **settings, **settings_of()
            )

        count = num_prompts * n
        self.admission.enter(count)
        with contextlib.ExitStack() as unless_submitted:
            unless_submitted.callback(self.admission.leave, count)
            try:
                source = await self.in_thread(grammar, "prompts") if callable(grammar) else grammar
                if source is not None:
                    await self.grammars.compile(source)
                handles = await self._submitted(submit)
            except ValueError as error:
                raise ApiError.of_engine(error, prompt_field) from None
            except QueueFullError as error:
                raise overloaded(str(error)) from None
            except EngineError as error:
                raise engine_failed(error) from None
            unless_submitted.pop_all()
        job = Job(handles, self._close)
        self._jobs.add(job)
        return job

    async def _submitted(self, submit: Callable[[], list[EngineRequest]]) -> list[EngineRequest]:
        """Returns the handles of ``submit``, which runs in a thread. If this is cancelled
        meanwhile, because the client went away, so are the requests."""
        submitting = self._threads["prompts"].submit(submit)
        try:
            return await asyncio.wrap_future(submitting)
        except asyncio.CancelledError:
            submitting.add_done_callback(self._cancel_requests)
            raise

    def _prefer(self, peer: Peer, prompts: Sequence[Prompt]) -> None:
        """Lets a prefill server be the first that is asked for the pages of prompts."""
        assert self.remote is not None
        assert isinstance(self.engine, Engine), "decode servers have their engine in this process"
        for prompt in prompts:
            tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            self.remote.prefer(peer, self.engine.page_transfer.addresses(tokens))

    def _cancel_requests(self, submitting: concurrent.futures.Future[list[EngineRequest]]) -> None:
        """Counts requests that were submitted for nobody, and cancels them."""
        if not submitting.cancelled() and submitting.exception() is None:
            for handle in submitting.result():
                self.metrics.count("abort")
                handle.cancel()

    def _close(self, job: Job) -> None:
        """Counts a job's completions, and cancels those that are not at their end."""
        self._jobs.discard(job)
        self.admission.leave(len(job.handles))
        loop = asyncio.get_running_loop()
        for handle in job.handles:
            if handle.error is not None:
                self.metrics.count("error")
            elif handle.is_done:
                self.metrics.observe(handle, handle.result(0))
            else:
                self.metrics.count("abort")
            if not handle.is_done:
                # In a thread, because the engine's lock may be taken for some milliseconds.
                loop.run_in_executor(self._threads["calls"], handle.cancel)


def service_of(request: Request) -> Service:
    """Returns the service of the application that received ``request``."""
    return request.app.state.service
