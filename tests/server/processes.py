"""Servers in processes of their own, which can be told to end, or killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.server.conftest import MAX_LEN, MAX_REQUESTS, RunningServer

ROOT = Path(__file__).parents[2]

CODE = """
import time
from pathlib import Path
from dsv3_jax.engine.device.executor import Executor
from dsv3_jax.server.frontend.process import run_with_http_process
from dsv3_jax.server.run import bind, run
from dsv3_jax.server.service import ServerSettings
from tests.server.conftest import demo_engine

bound = bind("127.0.0.1", {port})
engine, tokenizer = demo_engine()
{change}
settings = ServerSettings("demo", {max_len}, {max_requests}, **{settings})
with engine:
    {runner}(engine, tokenizer, settings, bound)
"""


class ServerProcess:
    """The demo's server, with the programs of the tests. A context manager, which kills it.

    Args:
      port: 0 takes a free one.
      change: a line of code between the engine's start and the server's.
      runner: ``run``, or ``run_with_http_process``.
      settings: of :class:`ServerSettings`.
    """

    def __init__(self, port: int = 0, *, change: str = "", runner: str = "run", **settings: Any):
        code = CODE.format(
            port=port,
            change=change,
            runner=runner,
            max_len=MAX_LEN,
            max_requests=MAX_REQUESTS,
            settings=settings,
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        """The log so far."""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(iter(self.process.stderr.readline, ""))

    def wait_for(self, pattern: str, seconds: float = 120) -> re.Match[str]:
        """Waits for a line of the log, and returns its first match."""
        end = time.monotonic() + seconds
        while (match := re.search(pattern, "".join(self.lines))) is None:
            assert time.monotonic() < end, self.lines
            assert self.process.poll() is None, self.lines
            time.sleep(0.02)
        return match

    def ready(self) -> RunningServer:
        """Waits until the server is ready. Only requests can be sent to what it returns."""
        port = int(self.wait_for(r"http://127.0.0.1:(\d+)")[1])
        self.wait_for("ready: compiled")
        return RunningServer(port, None, None)  # pyright: ignore[reportArgumentType]

    def wait(self, seconds: float = 60) -> int:
        """Waits for the end, and returns the exit status."""
        status = self.process.wait(seconds)
        self._reader.join()
        return status

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
