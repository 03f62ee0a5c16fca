"""The process that serves HTTP, and how both processes end.

The process of HTTP ends the server, since it receives the requests: on SIGTERM it finishes them,
asks for the end of the engine, and exits. If either process dies, the other one exits at once. If
the engine's process is frozen, that of HTTP answers the requests with an error, and kills it.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

import jax

from dsv3_jax.engine import Engine
from dsv3_jax.engine.loop import SWITCH_SECONDS
from dsv3_jax.server.access_log import log_to_stderr
from dsv3_jax.server.frontend.host import EngineHost
from dsv3_jax.server.frontend.remote_engine import RemoteEngine
from dsv3_jax.server.run import exit_now, run
from dsv3_jax.server.service import ServerSettings
from dsv3_jax.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class HttpProcess:
    """A process that serves an engine of this process over HTTP. A context manager. The process has
    a copy of the socket ``bound``, on which it listens."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        settings: ServerSettings,
        bound: socket.socket,
    ):
        self._connection, other = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")  # a fork would copy locks that threads hold
        self._process = spawn.Process(
            target=_serve_http, args=(other, tokenizer, settings, bound), name="dsv3-http"
        )
        self._other = other
        self._host = EngineHost(engine, tokenizer, self._connection)
        engine.compilations.on_change = self._host.report
        self._thread = threading.Thread(target=self._host.serve, name="dsv3-host", daemon=True)

    def __enter__(self) -> HttpProcess:
        self._process.start()
        self._other.close()  # so that its end is noticed when the process ends
        self._thread.start()
        return self

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    @property
    def is_warming_up(self) -> bool:
        return self._host.is_warming_up

    def wait(self) -> int:
        """Waits for the end of the process. Returns its exit status; one that was killed has 1."""
        self._process.join()
        status = self._process.exitcode
        return status if status in (0, 1) else 1

    def end(self, *_: Any) -> None:
        if self._process.is_alive() and self._process.pid is not None:
            self._process.terminate()

    def __exit__(self, *error: object) -> None:
        self.end()
        self._process.join()
        self._connection.close()
        self._thread.join()


def run_with_http_process(
    engine: Engine, tokenizer: Tokenizer, settings: ServerSettings, bound: socket.socket
) -> None:
    """Serves like :func:`dsv3_jax.server.run.run`, with HTTP in a process of its own."""
    with (
        log_to_stderr(settings.log_level),
        bound,
        HttpProcess(engine, tokenizer, settings, bound) as http,
    ):
        bound.close()  # the other process has a copy
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, http.end)
        status = http.wait()
        if status or http.is_warming_up or engine.compilations.current is not None:
            exit_now(status)  # a step may never end, and a compilation not soon


def _serve_http(
    connection: Connection, tokenizer: Tokenizer, settings: ServerSettings, bound: socket.socket
) -> None:
    # The engine's process owns the devices. This one computes nothing.
    jax.config.update("jax_platforms", "cpu")
    sys.setswitchinterval(SWITCH_SECONDS)  # as the engine does
    engine = RemoteEngine(connection, on_loss=exit_now)

    def exit_process() -> None:
        parent = multiprocessing.parent_process() if engine.is_given_up else None
        if parent is not None and parent.is_alive() and parent.pid is not None:
            # It cannot end itself. A supervisor that waits for it starts the server again then.
            logger.error("killing the engine's process %d, which is frozen", parent.pid)
            os.kill(parent.pid, signal.SIGKILL)
        exit_now()

    run(engine, tokenizer, settings, bound, exit_process=exit_process)
