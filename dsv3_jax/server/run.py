"""The process of a server: uvicorn, signals, draining, and its watchdog."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import uvicorn

from dsv3_jax.disaggregation.protocol import Sender
from dsv3_jax.disaggregation.remote_prefill import RemotePrefill
from dsv3_jax.engine import Engine
from dsv3_jax.server.access_log import log_to_stderr
from dsv3_jax.server.app import create_app
from dsv3_jax.server.connection_limits import HeaderLimit, UnreadAnswers
from dsv3_jax.server.frontend.remote_engine import RemoteEngine
from dsv3_jax.server.service import ServerSettings, Service
from dsv3_jax.tokenizer import Tokenizer

_ENDING_SECONDS = 5
"""Time in which clients receive the errors of requests that the server ended."""

logger = logging.getLogger(__name__)


class Watchdog:
    """A thread that looks at the engine at least once a second, and needs neither the event loop
    nor the engine's thread, which may both be blocked. A context manager. ``end`` asks the server
    to end, and so many seconds later ``exit_now`` ends the process."""

    def __init__(
        self,
        service: Service,
        end: Callable[[], None],
        exit_now: Callable[[], None],
        seconds: float,
    ):
        self._service = service
        self._end = end
        self._exit_now = exit_now
        self._seconds = seconds
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dsv3-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._has_ended.set()
        self._thread.join()

    def _run(self) -> None:
        limit = self._service.settings.stuck_seconds
        while not self._has_ended.wait(min(1.0, limit / 10)):
            try:
                self._service.engine.fail_if_stuck(limit)
            except Exception:  # a server without its watchdog would hang for ever
                logger.exception("the watchdog cannot tell whether the engine is stuck")
            failure = self._service.failure
            if failure is not None:
                logger.error("the server ends: %s", failure)
                self._end()
                if not self._has_ended.wait(self._seconds):
                    self._exit_now()
                return


def bind(host: str, port: int) -> socket.socket:
    """Returns a TCP socket with an address. The port 0 takes a free one. Raises ValueError if the
    address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it. Otherwise the body of an answer waits up to 40 ms for the client's
    # acknowledgement of the headers; asyncio sets it only where it knows that the protocol is TCP.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ValueError(
            f"--host, --port: expected an address that is free, got {host}:{port}"
            f" ({error.strerror or error})"
        ) from None
    return bound


def run(
    engine: Engine | RemoteEngine,
    tokenizer: Tokenizer,
    settings: ServerSettings,
    bound: socket.socket,
    *,
    sender: Sender | None = None,
    remote: RemotePrefill | None = None,
    exit_process: Callable[[], None] | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT. Then it takes no new connections, finishes open requests for
    at most ``settings.drain_seconds``, and returns. If the engine fails or is stuck, it ends the
    process with exit status 1, by ``exit_process`` if given; if a program is being compiled, which
    cannot be interrupted, with 0. ``sender`` and ``remote`` are those of :func:`create_app`."""
    exit_process = exit_process or exit_now
    with log_to_stderr(settings.log_level):
        # uvicorn sends the signal again when it has finished, which would end the process at once.
        signal.signal(signal.SIGTERM, lambda *_: None)
        app = create_app(engine, tokenizer, settings, sender=sender, remote=remote)
        service: Service = app.state.service
        config = uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=int(settings.drain_seconds) + _ENDING_SECONDS,
            server_header=False,
        )
        host, port = bound.getsockname()[:2]
        logger.info("serving %s at http://%s:%d", settings.model_name, host, port)
        server = Server(config, service)

        def end_server() -> None:
            server.should_exit = True

        # The objects that exist by now stay for the life of the server, so the garbage collector
        # need not visit them. Otherwise each large body would make it do so, for a tenth of a
        # second.
        gc.collect()
        gc.freeze()
        with bound, Watchdog(service, end_server, exit_process, _ENDING_SECONDS):
            server.run(sockets=[bound])
        if service.failure is not None:
            exit_process()
        is_compiling = isinstance(engine, Engine) and engine.compilations.current is not None
        if is_compiling or service.is_warming_up:
            exit_now(0)


class Server(uvicorn.Server):
    """A server that closes connections whose clients do not read, or do not send a request. At its
    end it ends open requests itself, in OpenAI's shape, before uvicorn would."""

    def __init__(self, config: uvicorn.Config, service: Service):
        seconds = service.settings.header_seconds
        config.ws = "none"
        config.http = functools.partial(HeaderLimit, seconds=seconds)  # pyright: ignore[reportAttributeAccessIssue]
        super().__init__(config)
        self._service = service

    async def main_loop(self) -> None:
        async with _meanwhile(self._unread_answers.run()):
            await super().main_loop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        async with _meanwhile(self._unread_answers.run()), _meanwhile(self._service.drain()):
            await super().shutdown(sockets)

    @functools.cached_property
    def _unread_answers(self) -> UnreadAnswers:
        return UnreadAnswers(
            lambda: [each.transport for each in list(self.server_state.connections)],
            self._service.settings.unread_seconds,
        )


@contextlib.asynccontextmanager
async def _meanwhile(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs a coroutine during the body, at whose end it is cancelled."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def exit_now(status: int = 1) -> None:
    """Ends the process, although a thread of it may never end."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
