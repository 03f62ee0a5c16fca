"""Handling of Ctrl-C (SIGINT) in the command's own process."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import CodeType, FrameType
from typing import Any

STATUS = 130  # the exit status that a shell reports after Ctrl-C

_RESEND_SECONDS = 0.01  # delay until a lost interrupt is sent again


class Interrupts:
    """Ends the process at once while modules are imported, and raises KeyboardInterrupt afterwards.

    An exception is no safe way out of an import: C extensions turn KeyboardInterrupt into
    ImportError, or crash. It does not leave a destructor or a callback of the garbage collector
    either, and JAX has such a callback. Python drops the exception there, so the signal is sent
    again until it raises elsewhere.

    A process that ignores SIGINT, such as a background job of a script, continues to ignore it.
    """

    def __init__(self) -> None:
        self.seen = False
        """Whether there was an interrupt. An exception after it is attributed to it."""
        self._has_raised = False
        self._is_ignored = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        if not self._is_ignored:
            signal.signal(signal.SIGINT, lambda *_: os._exit(STATUS))

    def raise_from_now_on(self) -> None:
        """Makes later interrupts raise KeyboardInterrupt. Called when the modules are imported."""
        if not self._is_ignored:
            sys.unraisablehook = self._handle_unraisable
            signal.signal(signal.SIGINT, self._raise)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        if _is_called_from(frame, Interrupts._handle_unraisable.__code__):
            return  # Python would drop the exception here, too
        self._has_raised = True
        signal.default_int_handler(number, frame)

    def _handle_unraisable(self, unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(unraisable)
            return
        import threading

        self._has_raised = False
        threading.Thread(target=self._resend, daemon=True).start()

    def _resend(self) -> None:
        while True:
            time.sleep(_RESEND_SECONDS)
            if self._has_raised:
                return
            os.kill(os.getpid(), signal.SIGINT)


def _is_called_from(frame: FrameType | None, function: CodeType) -> bool:
    """Returns whether a function is on the stack that ends with ``frame``."""
    while frame is not None and frame.f_code is not function:
        frame = frame.f_back
    return frame is not None
