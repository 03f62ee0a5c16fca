"""Ctrl-C as a request to stop, which long work grants where it loses nothing."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any


class StopRequest:
    """Inside this context the first SIGINT is only noted; a second one does what it did before.

    Nothing changes in other threads than the main one, which cannot do this, and in a process that
    ignores SIGINT.

    Args:
      active: False changes nothing.
    """

    def __init__(self, active: bool = True) -> None:
        self._made, self._active = False, active

    def made(self) -> bool:
        return self._made

    def __enter__(self) -> StopRequest:
        self._before: Any = signal.getsignal(signal.SIGINT)
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._in_charge = self._active and in_main_thread and callable(self._before)
        if self._in_charge:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self._in_charge:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._made:
            self._before(number, frame)
            return
        self._made = True
        # Not through print, which the signal may have interrupted.
        line = "dsv3: stopping after this step; interrupt again to stop at once\n"
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line.encode())
