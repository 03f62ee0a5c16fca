"""How long tiles of few rows take to read, for the choice of their width.

Few rows are multiplied as fast as their groups' matrices are read: at the bandwidth of HBM, unless
tiles fall so unevenly on the multiprocessors, or are so many and small, that the busiest one takes
longer. Times are in bytes that a multiprocessor reads in its share of the bandwidth, 32 KB a
microsecond on an H200; the constants are from the table "Tiles of few rows" in benchmarks/NOTES.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

_MULTIPROCESSORS = 132  # of an H100 SXM and an H200: a choice that suits them suits others
_ALONE = 2.5  # times its share is what a multiprocessor reads while others rest
_TILE = 96 * 1024  # to begin and end a tile
_ROW = 0.3  # of a byte of the rows, which every tile reads from the L2 cache
_MOST_PIECES = 8  # of K
_SUM = 16 * 1024  # to launch what adds up pieces
_WORTH = 0.97  # of the time of a wider tile, or of fewer pieces


def visited(M: int, G: int) -> float:
    """Groups with a row, on average, if each of M rows chose its group alike."""
    return G * (1 - (1 - 1 / G) ** M)


def time(tiles: float | int, tile: float | int, rows: float | int) -> float | int:
    """Of a kernel.

    Args:
      tile: bytes of a matrix that a tile reads.
      rows: bytes of the rows that it reads besides.
    """
    rounds, last = divmod(tiles, _MULTIPROCESSORS)
    reading = rounds * tile + (max(last / _MULTIPROCESSORS, 1 / _ALONE) * tile if last else 0)
    busiest = (rounds + (last > 0)) * (tile / _ALONE + _TILE + _ROW * rows)
    return max(reading, busiest)


def draw_all(tiles: float | int) -> bool:
    """Whether so many tiles at a time read at HBM's bandwidth."""
    return tiles * _ALONE >= _MULTIPROCESSORS


def best_width(widths: Iterable[int], M: int, G: int, N: int, *, matrix_row: int, row: int) -> int:
    """The widest of ``widths``, which descend, unless a narrower is clearly faster.

    Args:
      matrix_row: bytes of one of the N rows of a matrix.
      row: bytes of one of the M rows that are multiplied.
    """
    best, least = 0, math.inf
    groups = visited(M, G)
    for width in widths:
        took = time(groups * -(-N // width), width * matrix_row, M / groups * row)
        if took < _WORTH * least:
            best, least = width, took
    return best


def best_cut(
    steps: Mapping[int, int], M: int, G: int, N: int, *, matrix_row: int, row: int
) -> tuple[int, int]:
    """Width of the tiles, and pieces of K, which are tiles of their own whose float32 sums XLA adds
    up.

    Args:
      steps: by each width that may be, those in which a tile reads K. A piece has two at least.
      matrix_row, row: as of :func:`best_width`.
    """
    groups = visited(M, G)

    def took(choice: tuple[int, int]) -> float:
        width, pieces = choice
        part = math.ceil(steps[width] / pieces) / steps[width]
        tiles, tile = groups * -(-N // width) * pieces, width * matrix_row * part
        # The last tiles end apart, the more so the larger they are.
        total = time(tiles, tile, M / groups * row * part) + 0.15 * tile
        if pieces > 1:  # written and read, at twice HBM's speed
            total += _SUM + pieces * 4 * M * N / _MULTIPROCESSORS
        return total

    choices = (
        (width, pieces)
        for pieces in range(1, _MOST_PIECES + 1)
        for width, of_width in steps.items()
        if pieces in _cuts(of_width, max(1, min(_MOST_PIECES, of_width // 2)))
    )
    best = next(choices)
    for choice in choices:
        if took(choice) < _WORTH * took(best):
            best = choice
    return best


def _cuts(steps: int, most: int) -> set[int]:
    """Numbers of pieces, all alike but the last, of which none is empty."""
    return {math.ceil(steps / math.ceil(steps / pieces)) for pieces in range(1, most + 1)}
