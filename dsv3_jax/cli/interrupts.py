"""Ctrl-C (SIGINT) in the process of the command."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any

STATUS = 130  # what a shell reports for a command that Ctrl-C ended

_AGAIN = 0.01  # seconds until an interrupt that was lost comes again


class Interrupts:
    """Ends the process at once while modules are imported, and raises KeyboardInterrupt afterwards.

    An exception is no way out of an import: C extensions turn KeyboardInterrupt into ImportError,
    or crash. Nor does it get out of a destructor or a callback of the garbage collector, of which
    JAX has one: Python drops it there, so the signal is sent again.

    A process that ignores SIGINT, such as a background job of a script, goes on ignoring it.
    """

    def __init__(self) -> None:
        self.seen = False
        """Whether there was an interrupt. What fails after one fails because of it."""
        self._ignored = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        if not self._ignored:
            signal.signal(signal.SIGINT, lambda *_: os._exit(STATUS))

    def raise_from_now_on(self) -> None:
        """Modules are there; what runs now may have things to tidy up."""
        if not self._ignored:
            sys.unraisablehook = self._unraisable
            signal.signal(signal.SIGINT, self._raise)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        signal.default_int_handler(number, frame)

    def _unraisable(self, unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(unraisable)
            return
        import threading

        again = threading.Timer(_AGAIN, os.kill, (os.getpid(), signal.SIGINT))
        again.daemon = True
        again.start()
