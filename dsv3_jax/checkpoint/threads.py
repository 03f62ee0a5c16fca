"""Work in threads that stops at the first failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

Progress = Callable[[int], None]
"""Is told of bytes that are done, from several threads."""


def in_threads(workers: int, work: Callable[[T], None], items: Sequence[T]) -> None:
    """All of the items; or, when one fails, no more than are at work, and its exception."""
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
