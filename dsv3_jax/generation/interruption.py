"""Ctrl-C between dispatches instead of in the middle of one."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class InterruptsDeferred:
    """While entered, holds a first SIGINT back until :meth:`deliver` is called.

    A dispatch to the device cannot be interrupted; Python would raise KeyboardInterrupt behind it,
    perhaps between two halves of an update. A second SIGINT is delivered at once. Signals reach the
    main thread alone, and so do handlers: elsewhere this does nothing, as where SIGINT is ignored.
    """

    def __init__(self) -> None:
        self.pending = False
        self._before: Any = None

    def __enter__(self) -> InterruptsDeferred:
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if callable(before):
                self._before = before
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        if error is None:
            self.deliver()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.pending:
            self._before(number, frame)
        self.pending = True

    def deliver(self, *, elsewhere: bool = False) -> None:
        """Calls the handler that was in place before, if a SIGINT came here or ``elsewhere``: it
        raises KeyboardInterrupt, unless the program has set another."""
        if self.pending or elsewhere:
            self.pending = False
            (self._before or signal.default_int_handler)(signal.SIGINT, None)
