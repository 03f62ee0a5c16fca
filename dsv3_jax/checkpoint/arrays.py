"""Arrays that are read on demand, whatever file format they are stored in, and threads for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import xxhash

PIECE_ELEMENTS = 2**24
"""Maximum number of elements of an array that are in memory at once.

A routed expert of DeepSeek-V3 has 14,680,064 elements and is read in one piece. The embedding has
926,679,040 elements and is read in 56 pieces."""


@runtime_checkable
class LazyArray(Protocol):
    """An array in a file. Only the indexed part is read. An index consists of slices of step 1, at
    most one per dimension, or an ellipsis. Any ``np.ndarray`` is a LazyArray too."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...
    def __getitem__(self, index: Any, /) -> np.ndarray: ...


Arrays = Mapping[str, LazyArray]


def nbytes(array: LazyArray) -> int:
    """Returns the size of an array in bytes."""
    return math.prod(array.shape) * array.dtype.itemsize


def columns_per_element(dtype: np.dtype) -> int:
    """Returns the number of matrix columns in one stored element: 2 for packed int4, else 1."""
    return 2 if dtype == np.uint8 else 1


def pieces(shape: tuple[int, ...], multiple: int = 128) -> Iterator[slice]:
    """Yields consecutive ranges of the first axis, each of at most ``PIECE_ELEMENTS`` elements or
    of ``multiple`` rows, if these are more. Only the last may have another number of rows than a
    multiple of it. An array without axes is one piece, ``slice(None)``."""
    if not shape:
        yield slice(None)
        return
    rows = rows_per_piece(shape, multiple)
    for first in range(0, shape[0], rows):
        yield slice(first, min(first + rows, shape[0]))


def rows_per_piece(shape: tuple[int, ...], multiple: int = 128) -> int:
    """Returns the length of each range that :func:`pieces` yields, except the last."""
    width = max(1, int(np.prod(shape[1:])))
    limit = PIECE_ELEMENTS // width
    return max(limit // multiple * multiple, multiple if width > 1 else limit)


def digest(array: LazyArray) -> str:
    """Returns the XXH3 hash (128 bits) of the array's bytes in C order. It detects damage, and does
    not protect against deliberate changes."""
    hasher = xxhash.xxh3_128()
    for rows in pieces(array.shape):
        hasher.update(as_bytes(array[rows] if array.shape else array[...]))
    return hasher.hexdigest()


def as_bytes(array: np.ndarray) -> memoryview:
    """Returns the array's bytes in C order, without a copy if the array is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


T = TypeVar("T")

Progress = Callable[[int], None]
"""Receives a number of bytes that have been processed. Called from several threads."""


def ignore_progress(count: int) -> None:
    """Does nothing: the :data:`Progress` of callers that show none."""


def run_in_threads(workers: int, work: Callable[[T], None], items: Sequence[T]) -> None:
    """Calls ``work`` with every item, in up to ``workers`` threads at once. After an exception no
    further items are started, and it is raised here once the running calls have ended."""
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
