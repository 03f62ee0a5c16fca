"""Threads that stop at the first failure, and reports of their progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

Progress = Callable[[int], None]
"""Receives a number of bytes that have been processed. Called from several threads."""


def ignore_progress(count: int) -> None:
    """Does nothing: the :data:`Progress` of callers that show none."""


def run_in_threads(workers: int, work: Callable[[T], None], items: Sequence[T]) -> None:
    """Calls ``work`` with every item, in up to ``workers`` threads at once.

    If a call raises an exception, no further items are started, and the exception is raised here
    after the running calls end.
    """
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
