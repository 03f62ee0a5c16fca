"""How evenly tiles fall on multiprocessors, for the choice of their width.

Few rows are multiplied as fast as their groups' matrices are read, and that is as fast as the
multiprocessor with the most to read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

_MULTIPROCESSORS = 132  # of an H100 SXM and an H200: a choice that suits them suits others
_MOST_PIECES = 8  # of K: their sums are written and read again
_WORTH = 0.9  # of the wider tile's reading: narrow tiles read the rows more often


def visited(M: int, G: int) -> float:
    """Groups with a row, on average, if each of M rows chose its group alike."""
    return G * (1 - (1 - 1 / G) ** M)


def best_width(widths: Iterable[int], M: int, G: int, N: int) -> int:
    """The widest of ``widths``, which descend, unless a narrower spreads reading clearly better."""
    best, least = 0, math.inf
    for width in widths:
        tiles = visited(M, G) * -(-N // width)
        read = math.ceil(tiles / _MULTIPROCESSORS) * width
        if read < _WORTH * least:
            best, least = width, read
    return best


def pieces_of(steps: int, tiles: float) -> int:
    """Of K, that so few tiles take to give every multiprocessor something to read; none of less
    than two of the ``steps`` in which a tile is read."""
    pieces = max(1, min(_MOST_PIECES, int(_MULTIPROCESSORS / max(tiles, 1)), steps // 2))
    return math.ceil(steps / math.ceil(steps / pieces)) if steps else 1
