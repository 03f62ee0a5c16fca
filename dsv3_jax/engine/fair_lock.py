"""A lock that no thread can take twice while another one waits for it.

The engine's loop takes its lock for every step and releases it only for a moment. An ordinary
lock goes to the thread that asks first, so that another one could wait for many steps.
"""

from __future__ import annotations

import threading


class FairLock:
    """A lock that goes to a waiting thread before the thread that released it gets it again."""

    def __init__(self) -> None:
        self._next = threading.Lock()  # of the thread that has the lock next
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._next:
            self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
