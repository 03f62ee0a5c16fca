"""A child process that does one request after another: JSON lines through pipes.

A kernel that hangs or faults takes its process with it, and no more than the row at hand.
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
    """Started on the first request, and anew after it died.

    Args:
      module: run with -m; calls :func:`serve`.
      log: path that takes what the process prints.
    """

    def __init__(self, module: str, arguments: list[str], log: str):
        self._command = [sys.executable, "-m", module, *arguments]
        self._log = log
        self._process: subprocess.Popen[str] | None = None
        self._replies: queue.Queue[str] = queue.Queue()
        self._reader: threading.Thread | None = None
        self._pending = 0

    def send(self, request: Mapping[str, Any]) -> None:
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
        # receive says how a process ended that reads no more.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def receive(self, timeout: float) -> Reply:
        """The reply, or {"error": reason} where the process died or took ``timeout`` seconds."""
        if self._process is None:
            return {"error": "the process was ended before"}
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
        """Leaves out the replies to what was sent before."""
        while self._pending > 0 and self._process is not None:
            self.receive(max(timeout, 180))
        self.send(request)
        return self.receive(timeout)

    def stop(self) -> None:
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
    os.dup2(2, 1)  # what others print goes to the log
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = handlers[request.pop("do")](**request)
        except Exception as error:  # the row's reason; the next may well run
            traceback.print_exc()
            reply = {"error": reason(error)}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
