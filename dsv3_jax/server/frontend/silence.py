"""Measures how long the engine's process has given no sign of life."""

from __future__ import annotations

import threading

LOOK_SECONDS = 0.5
"""Time between two looks for a message."""

_LEAST_SECONDS = 10.0
"""A shorter silence is no sign of anything: both processes may wait for a processor."""


class Silence:
    """Measures how long a process has sent nothing.

    A thread counts how often it looked in vain, instead of reading a clock: if this process was
    paused too, as with its container or its machine, that time does not count.
    """

    def __init__(self) -> None:
        self._messages = 0  # written by the thread that receives
        self._seen = 0  # written by the thread that looks, like the next one
        self._silent_looks = 0
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dsv3-silence", daemon=True)
        self._thread.start()

    def interrupt(self) -> None:
        """Notes that a message came."""
        self._messages += 1

    @property
    def seconds(self) -> float:
        """Length of the silence; 0 if it is shorter than ten seconds."""
        seconds = self._silent_looks * LOOK_SECONDS
        is_long = seconds >= _LEAST_SECONDS and self._messages == self._seen
        return seconds if is_long else 0.0

    def end(self) -> None:
        """Ends the thread."""
        self._has_ended.set()

    def look(self) -> None:
        """Counts the look if no message came since the one before. The thread calls it."""
        messages = self._messages
        self._silent_looks = self._silent_looks + 1 if messages == self._seen else 0
        self._seen = messages

    def _run(self) -> None:
        """The body of the thread."""
        while not self._has_ended.wait(LOOK_SECONDS):
            self.look()
