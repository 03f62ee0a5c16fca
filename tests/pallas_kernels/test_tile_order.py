"""Tests of the order in which CTAs compute tiles."""

import jax.numpy as jnp
import pytest

from pallas_kernels.grouped_matmul.schedule import GroupTiles, TileScheduler, panel_height
from tests.pallas_kernels.numerics import device


def tiles(m_tiles, n_tiles, panel):
    """Returns the tiles of the result in the order in which CTAs compute them."""
    return [
        (m, n)
        for first in range(0, m_tiles, panel)
        for n in range(n_tiles)
        for m in range(first, min(first + panel, m_tiles))
    ]


@pytest.mark.parametrize("panel", [1, 2, 4])
def test_the_kernel_s_order(panel):
    groups = GroupTiles(device((256, 384), "int32"), 128, on_gpu=False)
    scheduler = TileScheduler(groups, groups.count(), 576, 192, panel, 1, jnp.int32(0))
    located = [scheduler.locate(jnp.int32(i)) for i in range(15)]
    assert scheduler.count() == 15
    order = [(int(tile.row) // 128, int(tile.column) // 192) for tile in located]
    assert order == tiles(5, 3, panel)


@pytest.mark.parametrize("sizes", [(129, 0, 3), (256, 385)])
def test_ctas_of_a_pair_share_the_rows_of_a_group(sizes):
    """A CTA without rows computes the first one's, and stores none."""
    groups = GroupTiles(device(sizes, "int32"), 256, on_gpu=False)
    arguments = groups, groups.count(), 192, 192, 1, 1, jnp.int32(0)
    ctas = [TileScheduler(*arguments, jnp.int32(member)) for member in range(2)]
    stored = []
    for i in range(int(ctas[0].count())):
        first, second = (cta.locate(jnp.int32(i)) for cta in ctas)
        assert first.group == second.group
        assert second.rows or second.row == first.row
        stored += [t.row + r for t in (first, second) for r in range(int(t.rows))]
    assert [int(row) for row in stored] == list(range(sum(sizes)))


@pytest.mark.parametrize(
    ("groups", "rows", "row_bytes", "tile_m", "expected"),
    [
        (8, 4096, 7168, 128, 16),  # of 32 M tiles, 18 take 16 MiB
        (8, 4096, 7168, 256, 8),
        (8, 4096, 2048, 128, 32),
        (32, 256, 2048, 128, 2),
        (32, 129, 2048, 256, 1),
        (32, 256, 2 * 2048, 128, 2),
        (8, 4096, 2 * 7168, 128, 8),  # 9 take 16 MiB
    ],
)
def test_panels_of_equal_parts_of_a_group(groups, rows, row_bytes, tile_m, expected):
    assert panel_height(groups * rows, groups, tile_m, row_bytes) == expected
