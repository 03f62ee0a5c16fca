"""Ends the server when its engine failed or its device is stuck."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType

from dsv3_jax.server.service import Service

logger = logging.getLogger(__name__)


class Watchdog:
    """A thread that looks at the engine at least once a second. A context manager.

    It needs neither the event loop nor the engine's thread, which may both be blocked.

    Args:
      end: asks the server to end.
      exit_now: ends the process.
      seconds: time between the two.
    """

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
