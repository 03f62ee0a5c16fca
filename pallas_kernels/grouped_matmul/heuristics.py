"""Cost model that chooses tile widths and split-K for matmuls with few tokens per group.

Such a matmul takes as long as reading the matrices of the groups that have tokens. It reads at the
bandwidth of HBM, unless the tiles are spread so unevenly over the multiprocessors, or are so many
and small, that the busiest multiprocessor takes longer. The measurements behind the constants are
summarised in docs/kernels/grouped_matmul.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

_MULTIPROCESSORS = 132  # of an H100 SXM and an H200; a choice that suits them suits others
# Bandwidth of one multiprocessor while others are idle, in units of its share of HBM bandwidth.
_PEAK_SHARE = 2.5
_CLEARLY = 0.92  # a narrower tile must take less than this part of a wider one's time

# Costs of the few-token kernel, in bytes that a multiprocessor's share of HBM bandwidth delivers in
# the same time: 32 KB per microsecond on an H200.
_TILE_COST = 96 * 1024  # prologue and epilogue of a tile
_SUM_COST = 16 * 1024  # launch of the kernel that sums the split-K results
_TOKEN_BYTE_COST = 0.3  # a byte of the tokens, which every tile reads from the L2 cache
_IMBALANCE = 0.15  # of a tile: the last tiles do not end together
_MAX_SPLIT_K = 8
_BETTER = 0.97  # a narrower tile or another slice of K must take less than this part of the time


def expected_groups(M: int, G: int) -> float:
    """Returns the expected number of groups with tokens, if M tokens choose among G uniformly."""
    return G * (1 - (1 - 1 / G) ** M)


def choose_tile_width(widths: Sequence[int], M: int, G: int, N: int) -> int:
    """Chooses the width of a tile along N for :mod:`dense`, of ``widths`` in descending order: the
    widest, unless a narrower one balances the reads clearly better. The third is considered only if
    the second makes too few tiles to use all the bandwidth; otherwise it was never the best,
    because it reads the tokens more often."""
    groups = expected_groups(M, G)
    if len(widths) > 2 and groups * -(-N // widths[1]) * _PEAK_SHARE >= _MULTIPROCESSORS:
        widths = widths[:2]
    best, least = 0, math.inf
    for width in widths:
        tiles = groups * -(-N // width)
        read = math.ceil(tiles / _MULTIPROCESSORS) * width
        if read < _CLEARLY * least:
            best, least = width, read
    return best


def choose_tile_and_split_k(
    k_steps: Mapping[int, int], M: int, G: int, N: int, *, weight_row_bytes: int, token_bytes: int
) -> tuple[int, int]:
    """Chooses the output features per tile and the number of K slices of the few-token kernel, of
    tile widths with ``k_steps`` K steps each. A slice has at least two of them."""
    groups = expected_groups(M, G)

    def cost(choice: tuple[int, int]) -> float:
        width, slices = choice
        fraction = math.ceil(k_steps[width] / slices) / k_steps[width]
        tiles, tile_bytes = groups * -(-N // width) * slices, width * weight_row_bytes * fraction
        total = _read_time(tiles, tile_bytes, M / groups * token_bytes * fraction)
        total += _IMBALANCE * tile_bytes
        if slices > 1:  # float32 results are written and read, at twice HBM's bandwidth
            total += _SUM_COST + slices * 4 * M * N / _MULTIPROCESSORS
        return total

    choices = (
        (width, slices)
        for slices in range(1, _MAX_SPLIT_K + 1)
        for width, steps in k_steps.items()
        if slices in _even_slices(steps, max(1, min(_MAX_SPLIT_K, steps // 2)))
    )
    best = next(choices)
    for choice in choices:
        if cost(choice) < _BETTER * cost(best):
            best = choice
    return best


def _read_time(tiles: float, tile_bytes: float, token_bytes: float) -> float:
    """Returns the time of tiles that each read so many bytes of a matrix and of the tokens."""
    waves, last = divmod(tiles, _MULTIPROCESSORS)
    last_wave = max(last / _MULTIPROCESSORS, 1 / _PEAK_SHARE) * tile_bytes if last else 0
    reading = waves * tile_bytes + last_wave
    per_tile = tile_bytes / _PEAK_SHARE + _TILE_COST + _TOKEN_BYTE_COST * token_bytes
    busiest = (waves + (last > 0)) * per_tile
    return max(reading, busiest)


def _even_slices(steps: int, most: int) -> set[int]:
    """Returns the numbers of slices, up to ``most``, that are equal except for a shorter last
    one."""
    return {math.ceil(steps / math.ceil(steps / slices)) for slices in range(1, most + 1)}
