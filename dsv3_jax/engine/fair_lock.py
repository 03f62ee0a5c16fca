"""A lock that no thread can take twice while another one waits for it.

The engine's loop takes its lock for every step and releases it only for a moment. With an ordinary
lock, which goes to whoever asks first, another thread could wait for many steps.
"""

from __future__ import annotations

import threading


class FairLock:
    """A lock that goes to a waiting thread before the thread that released it gets it again."""

    def __init__(self) -> None:
        self._turn = threading.Lock()  # of the thread that has the lock next
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._turn:
            self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
