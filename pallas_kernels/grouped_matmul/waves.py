"""How evenly tiles fall on multiprocessors, for the choice of their width.

Few rows are multiplied as fast as their groups' matrices are read, and that is as fast as the
multiprocessor with the most to read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

_MULTIPROCESSORS = 132  # of an H100 SXM and an H200: a choice that suits them suits others
_MOST_PIECES = 8  # of K: their sums are written and read again
_WORTH = 0.92  # of the wider tile's reading: narrow tiles read the rows more often


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


def pieces_of(steps: int, tiles: float, sums: float = 0.0) -> int:
    """Of K, where they spread reading clearly better: tiles too few for all multiprocessors, or for
    the last of several rounds. None is of less than two of the ``steps`` in which a tile is read.

    Args:
      sums: what writing a piece's sums and reading them again takes, in readings of a tile.
    """

    def cut(pieces: int) -> tuple[int, int]:
        """Steps of each but the last, and how many have any."""
        turns = math.ceil(steps / pieces)
        return turns, math.ceil(steps / turns)

    def time(pieces: int) -> float:
        """In readings of a tile."""
        turns, pieces = cut(pieces)
        read = math.ceil(tiles * pieces / _MULTIPROCESSORS) * turns / steps
        return read + pieces * sums * tiles / _MULTIPROCESSORS

    best = min(range(2, min(_MOST_PIECES, steps // 2) + 1), key=time, default=1)
    whole = math.ceil(tiles / _MULTIPROCESSORS)
    return cut(best)[1] if best > 1 and time(best) < _WORTH * whole else 1
