"""Counts the bytes that a float8 grouped matmul of many tokens moves, with a model of the L2 cache.

    python -m benchmarks.kernels.panel_traffic --sizes 32 256 7168 2048 --panels 64 16 2

``--sizes`` are groups, rows per group, N and K; ``--panels`` are numbers of M tiles. In the model
132 blocks compute their tiles in step with each other, and the cache replaces what was used least
recently. An H100 has 50 MB, in two halves. Each keeps a copy of what its multiprocessors read, so
that operands have between 25 and 50 MB.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

BLOCKS = 132
TILE_M, TILE_N, TILE_K = 128, 192, 128
OUT_BYTES = 2  # bfloat16


class Traffic(NamedTuple):
    """Bytes that are not found in the cache."""

    lhs: int
    rhs: int
    out: int


def tiles(m_tiles: int, n_tiles: int, panel: int) -> Iterator[tuple[int, int]]:
    """Yields the tiles of the result in the order of ``TileScheduler``."""
    for first in range(0, m_tiles, panel):
        for n in range(n_tiles):
            for m in range(first, min(first + panel, m_tiles)):
                yield m, n


def traffic(groups: int, rows: int, N: int, K: int, *, panel: int, cache: float) -> Traffic:
    """Returns the traffic of ``groups`` groups of equally many rows.

    Args:
      panel: M tiles that are computed for one N tile before the next N tile.
      cache: bytes.
    """
    tiles_per_group = -(-rows // TILE_M)
    order = list(tiles(groups * tiles_per_group, -(-N // TILE_N), panel))
    cached: OrderedDict[tuple[int, ...], int] = OrderedDict()
    missed, used = [0, 0, 0], 0

    def use(array: int, size: int, *place: int) -> None:
        nonlocal used
        if (array, *place) in cached:
            cached.move_to_end((array, *place))
            return
        cached[array, *place] = size
        missed[array] += size
        used += size
        while used > cache:
            used -= cached.popitem(last=False)[1]

    for start in range(0, len(order), BLOCKS):
        wave = order[start : start + BLOCKS]
        for k in range(K // TILE_K):
            for m, n in wave:
                use(0, TILE_M * TILE_K, m, k)
                use(1, TILE_N * TILE_K, m // tiles_per_group, n, k)
        for m, n in wave:
            use(2, TILE_M * TILE_N * OUT_BYTES, m, n)
    return Traffic(*missed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs=4, required=True, help="groups, rows, N, K")
    parser.add_argument("--panels", type=int, nargs="+", required=True)
    parser.add_argument("--cache", type=float, nargs="+", default=[50, 25], help="MB")
    arguments = parser.parse_args()
    for panel in arguments.panels:
        for cache in arguments.cache:
            moved = traffic(*arguments.sizes, panel=panel, cache=cache * 1e6)
            parts = ", ".join(f"{name} {n / 1e6:.0f}" for name, n in moved._asdict().items())
            print(f"panel {panel:3}, {cache:.0f} MB: {sum(moved) / 1e6:.0f} MB ({parts})")


if __name__ == "__main__":
    main()
