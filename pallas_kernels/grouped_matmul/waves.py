"""How long tiles of few rows take to read, for the choice of their width.

Few rows are multiplied as fast as their groups' matrices are read: at the bandwidth of HBM, unless
tiles fall so unevenly on the multiprocessors, or are so many and small, that the busiest one takes
longer. "Tiles of few rows" in benchmarks/NOTES.md has the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

_MULTIPROCESSORS = 132  # of an H100 SXM and an H200: a choice that suits them suits others
_ALONE = 2.5  # times its share of the bandwidth is what a multiprocessor reads while others rest
_CLEARLY = 0.92  # of the wider tiles' time

# Of few_rows. In bytes that a multiprocessor reads in its share meanwhile, 32 KB a microsecond on
# an H200.
_TILE = 96 * 1024  # to begin and end a tile
_SUM = 16 * 1024  # to launch what adds up pieces
_ROW = 0.3  # of a byte of the rows, which every tile reads from the L2 cache
_STRAGGLING = 0.15  # of a tile: the last ones end apart
_MOST_PIECES = 8  # of K
_BETTER = 0.97  # of the time of a wider tile, or of fewer pieces


def visited(M: int, G: int) -> float:
    """Groups with a row, on average, if each of M rows chose its group alike."""
    return G * (1 - (1 - 1 / G) ** M)


def best_width(widths: Sequence[int], M: int, G: int, N: int) -> int:
    """Of grouped_matmul: the widest of ``widths``, which descend, unless a narrower spreads reading
    clearly better.

    The third is for matrices of which the second makes too few tiles to draw all the bandwidth.
    Elsewhere it was never the best: it reads the rows more often, and begins and ends more tiles.
    """
    groups = visited(M, G)
    if len(widths) > 2 and groups * -(-N // widths[1]) * _ALONE >= _MULTIPROCESSORS:
        widths = widths[:2]
    best, least = 0, math.inf
    for width in widths:
        tiles = groups * -(-N // width)
        read = math.ceil(tiles / _MULTIPROCESSORS) * width
        if read < _CLEARLY * least:
            best, least = width, read
    return best


def best_cut(
    steps: Mapping[int, int], M: int, G: int, N: int, *, matrix_row: int, row: int
) -> tuple[int, int]:
    """Of few_rows: the width of its tiles, and the pieces of K, which are tiles of their own whose
    float32 sums XLA adds up.

    Args:
      steps: by each width that may be, those in which a tile reads K. A piece has two at least.
      matrix_row: bytes of one of the N rows of a matrix.
      row: bytes of one of the M rows that are multiplied.
    """
    groups = visited(M, G)

    def took(choice: tuple[int, int]) -> float:
        width, pieces = choice
        part = math.ceil(steps[width] / pieces) / steps[width]
        tiles, tile = groups * -(-N // width) * pieces, width * matrix_row * part
        total = _time(tiles, tile, M / groups * row * part) + _STRAGGLING * tile
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
        if took(choice) < _BETTER * took(best):
            best = choice
    return best


def _time(tiles: float, tile: float, rows: float) -> float:
    """Of tiles that read so many bytes of a matrix, and of the rows, each."""
    rounds, last = divmod(tiles, _MULTIPROCESSORS)
    reading = rounds * tile + (max(last / _MULTIPROCESSORS, 1 / _ALONE) * tile if last else 0)
    busiest = (rounds + (last > 0)) * (tile / _ALONE + _TILE + _ROW * rows)
    return max(reading, busiest)


def _cuts(steps: int, most: int) -> set[int]:
    """Numbers of pieces, all alike but the last, of which none is empty."""
    return {math.ceil(steps / math.ceil(steps / pieces)) for pieces in range(1, most + 1)}
