"""Delays Ctrl-C until the end of a dispatch."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class InterruptsDeferred:
    """Context manager that delays the first SIGINT until :meth:`deliver` is called.

    A dispatch to the device cannot be interrupted. Python would raise KeyboardInterrupt after it,
    perhaps in the middle of an update. A second SIGINT is delivered at once. Python runs signal
    handlers in the main thread only, so this does nothing in other threads, nor if SIGINT is
    ignored.
    """

    def __init__(self) -> None:
        self.is_pending = False
        """Whether a SIGINT is being delayed."""
        self._previous_handler: Any = None

    def __enter__(self) -> InterruptsDeferred:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._previous_handler = handler
                signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._previous_handler is not None:
            signal.signal(signal.SIGINT, self._previous_handler)
        if error is None:
            self.deliver()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_pending:
            self._previous_handler(number, frame)
        self.is_pending = True

    def deliver(self, *, in_other_process: bool = False) -> None:
        """Calls the previous handler if a SIGINT is pending, or arrived in another process. The
        default handler raises KeyboardInterrupt."""
        if self.is_pending or in_other_process:
            self.is_pending = False
            (self._previous_handler or signal.default_int_handler)(signal.SIGINT, None)
