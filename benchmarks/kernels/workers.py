"""Child processes that serve requests one after another, as JSON lines through pipes.

A kernel that hangs or faults ends only its process, so that only the current row is lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

Reply = dict[str, Any]


class Worker:
    """A child process, started on the first request and restarted after it dies.

    Args:
      module: module to run with -m, which calls :func:`serve`.
      arguments: its command-line arguments.
      log: path of the file that receives the output of the process.
    """

    def __init__(self, module: str, arguments: list[str], log: str):
        self._command = [sys.executable, "-m", module, *arguments]
        self._log = log
        self._process: subprocess.Popen[str] | None = None
        self._replies: queue.Queue[str] = queue.Queue()
        self._reader: threading.Thread | None = None
        self._pending = 0

    def send(self, request: Mapping[str, Any]) -> None:
        """Sends a request without waiting for the reply."""
        if self._process is not None and self._process.poll() is not None:
            self.stop()
        if self._process is None:
            with open(self._log, "a") as log:
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                    text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"},
                )  # fmt: skip
            self._replies, self._pending = queue.Queue(), 0
            self._reader = threading.Thread(
                target=_read, args=(self._process, self._replies), daemon=True
            )
            self._reader.start()
        assert self._process.stdin is not None
        self._pending += 1
        # If the process has ended, receive reports how.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def receive(self, timeout: float) -> Reply:
        """Returns the reply, or {"error": reason} if the process died or timed out."""
        if self._process is None:
            return {"error": "the process has been stopped"}
        self._pending -= 1
        try:
            line = self._replies.get(timeout=max(timeout, 0.1))
        except queue.Empty:
            self.stop()
            return {"error": f"no reply within {timeout:.0f} s"}
        if line:
            return json.loads(line)
        status = self._process.wait()
        self.stop()
        return {"error": f"the process ended with status {status}: {_last_line(self._log)}"}

    def ask(self, request: Mapping[str, Any], timeout: float) -> Reply:
        """Sends a request and returns its reply. Discards replies to earlier requests."""
        while self._pending > 0 and self._process is not None:
            self.receive(max(timeout, 180))
        self.send(request)
        return self.receive(timeout)

    def stop(self) -> None:
        """Kills the process, if it runs."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            if self._reader is not None:
                self._reader.join(5)
            for stream in filter(None, (process.stdin, process.stdout)):
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def _read(process: subprocess.Popen[str], replies: queue.Queue[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        replies.put(line)
    replies.put("")


def _last_line(log: str) -> str:
    with open(log, errors="replace") as file:
        lines = [line.strip() for line in file if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"


def serve(handlers: Mapping[str, Callable[..., Reply]]) -> None:
    """Answers requests {"do": name, ...} with ``handlers[name](...)`` until the input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to the log
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = handlers[request.pop("do")](**request)
        except Exception as error:  # reported as the row's error; later rows may succeed
            traceback.print_exc()
            reply = {"error": reason(error)}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def reason(error: BaseException) -> str:
    """Formats an exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
