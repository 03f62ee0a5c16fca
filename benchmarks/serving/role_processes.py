"""Processes of ``dsv3 serve`` that can be killed, restarted at the same address and inspected."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

_CHILD = """
import gc, signal, sys
from dsv3_jax.cli.main import main
from dsv3_jax.engine import Engine

def check(*_):
    for engine in [each for each in gc.get_objects() if isinstance(each, Engine)]:
        engine.check_integrity()
    print("integrity: right", file=sys.stderr, flush=True)

signal.signal(signal.SIGUSR1, check)
sys.exit(main(sys.argv[1:]))
"""

_SMALL_CHILD = """
from benchmarks.serving.small_replica import make_small_engine
from dsv3_jax.cli import run_server

def make(arguments, draft, depth):
    return make_small_engine(arguments, max_len=arguments.max_len)

run_server.make_engine = make
"""
"""The engine has one program, which several processes on few cores compile or load soon."""


def free_ports(count: int) -> list[int]:
    """Returns ports of the loopback address that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [each.getsockname()[1] for each in sockets]


class RoleProcess:
    """A server process.

    Args:
      name: for messages.
      flags: of ``dsv3 serve``, without its address.
      log: file that its messages are appended to.
      is_small: whether its engine has one program, see :mod:`benchmarks.serving.small_replica`.
    """

    def __init__(
        self, name: str, port: int, flags: Sequence[str], log: Path, *, is_small: bool = False
    ):
        self._code = (_SMALL_CHILD if is_small else "") + _CHILD
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.kills = 0
        self._words = ["serve", "--port", str(port), *flags]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._counts: collections.Counter[str] = collections.Counter()

    def start(self) -> None:
        """Starts the process."""
        with self._log.open("ab") as log:
            command = [sys.executable, "-c", self._code, *self._words]
            environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
            self._process = subprocess.Popen(command, stderr=log, env=environment)
        self._counts.clear()

    def kill(self) -> None:
        """Ends the process at once (SIGKILL)."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self.kills += 1

    def stop(self) -> int:
        """Ends the process in order (SIGTERM). Returns its exit status."""
        assert self._process is not None
        self._process.terminate()
        try:
            return self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def wait_until_ready(self, seconds: float = 1200) -> None:
        """Waits until it serves. On a busy machine its programs compile for minutes."""
        self._wait_for("/ready", lambda text: True, seconds)

    def wait_until_idle(self, seconds: float = 60) -> dict[str, float]:
        """Waits until no request is open and no page is in use. Returns its figures.

        Raises:
          TimeoutError: something is left.
        """
        names = (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
            "dsv3:prefill_answers_open",
            "dsv3:remote_prefills_open",
        )
        text = self._wait_for(
            "/metrics", lambda text: not any(map(_figures(text).get, names)), seconds
        )
        return _figures(text)

    def new_counts(self, figures: dict[str, float]) -> collections.Counter[str]:
        """Returns what its own counters have gained since the last call, or its start."""
        counts = collections.Counter(
            {
                name.removeprefix("dsv3:").replace("_total", ""): value
                for name, value in figures.items()
                if name.startswith("dsv3:") and "_total" in name
            }
        )
        new = counts - self._counts
        self._counts = counts
        return new

    def check_integrity(self, seconds: float = 30) -> None:
        """Raises RuntimeError unless its pages, slots and queues agree."""
        assert self._process is not None
        before = self._log.read_bytes().count(b"integrity: right")
        self._process.send_signal(signal.SIGUSR1)
        end = time.monotonic() + seconds
        while self._log.read_bytes().count(b"integrity: right") == before:
            if time.monotonic() > end or self._process.poll() is not None:
                raise RuntimeError(f"{self.name}: its pages or queues contradict each other")
            time.sleep(0.05)

    def _wait_for(self, path: str, is_right: object, seconds: float) -> str:
        assert self._process is not None
        assert callable(is_right)
        end = time.monotonic() + seconds
        text = ""
        while time.monotonic() < end:
            if (status := self._process.poll()) is not None:
                raise RuntimeError(f"{self.name}: ended with status {status}, see {self._log}")
            with contextlib.suppress(urllib.error.URLError, OSError):
                with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                    text = answer.read().decode()
                if is_right(text):
                    return text
            time.sleep(0.05)
        raise TimeoutError(
            f"{self.name}: {path} is not as expected after {seconds} s: {text:.3000}"
        )


@contextlib.contextmanager
def running(processes: Sequence[RoleProcess]) -> Iterator[None]:
    """Starts processes, waits until they are ready, and ends them."""
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.wait_until_ready()
        yield
    finally:
        for process in processes:
            process.stop()


def _figures(text: str) -> dict[str, float]:
    """Returns the figures of Prometheus' text format. Those with a reason have it in their name."""
    figures: dict[str, float] = {}
    for line in text.splitlines():
        match = re.match(r"([\w:]+)\{(.*)\} (\S+)$", line)
        if match is None or "_bucket" in match[1]:
            continue
        reason = re.search(r'reason="(\w+)"', match[2])
        name = f"{match[1]}.{reason[1]}" if reason else match[1]
        figures[name] = figures.get(name, 0.0) + float(match[3])
    return figures
