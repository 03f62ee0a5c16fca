"""Arrays that are read on demand: what a checkpoint hands out, whatever it is stored in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import xxhash

PIECE_ELEMENTS = 2**24
"""Elements of the largest piece of an array that is ever held: a routed expert of DeepSeek-V3 has
14,680,064 and goes in one piece, its embedding of 926,679,040 in 56."""


@runtime_checkable
class LazyArray(Protocol):
    """An array in a file. Indexing with slices of step 1, fewer than dimensions or an ellipsis
    reads that part and no more; an ``np.ndarray``, mapped or not, is one."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...
    def __getitem__(self, index: Any, /) -> np.ndarray: ...


Arrays = Mapping[str, LazyArray]


def pieces(shape: tuple[int, ...], multiple: int = 128) -> Iterator[slice]:
    """Ranges of the first axis, each of ``PIECE_ELEMENTS`` at most and a multiple of rows.

    An array without axes is one piece, ``slice(None)``.
    """
    if not shape:
        yield slice(None)
        return
    rows = rows_of_a_piece(shape, multiple)
    for first in range(0, shape[0], rows):
        yield slice(first, min(first + rows, shape[0]))


def rows_of_a_piece(shape: tuple[int, ...], multiple: int = 128) -> int:
    """Rows of the first axis in each piece but the last."""
    width = max(1, int(np.prod(shape[1:])))
    fitting = PIECE_ELEMENTS // width
    return max(fitting // multiple * multiple, multiple if width > 1 else fitting)


def digest(array: LazyArray) -> str:
    """XXH3 (128 bits) of the array's bytes in C order: it finds damage, not malice."""
    hasher = xxhash.xxh3_128()
    for rows in pieces(array.shape):
        hasher.update(as_bytes(array[rows] if array.shape else array[...]))
    return hasher.hexdigest()


def as_bytes(array: np.ndarray) -> memoryview:
    """The array's bytes in C order, without a copy where it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
