"""Ctrl-C as a request to stop at the next point where no work is lost."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any


class StopRequest:
    """Context manager in which the first SIGINT only sets a flag. A second one acts as before.

    It changes nothing outside of the main thread, which alone can handle signals, or in a process
    that ignores SIGINT.

    Args:
      is_active: False changes nothing.
    """

    def __init__(self, is_active: bool = True) -> None:
        self._is_made, self._is_active = False, is_active

    def is_made(self) -> bool:
        """Returns whether there was a SIGINT."""
        return self._is_made

    def __enter__(self) -> StopRequest:
        self._before: Any = signal.getsignal(signal.SIGINT)
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._is_installed = self._is_active and in_main_thread and callable(self._before)
        if self._is_installed:
            signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_made:
            self._before(number, frame)
            return
        self._is_made = True
        # Not with print, which the signal may have interrupted.
        line = "dsv3: stopping after this step; interrupt again to stop at once\n"
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line.encode())
