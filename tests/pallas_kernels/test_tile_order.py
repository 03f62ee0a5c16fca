"""Tests of the order in which CTAs compute tiles, and of the model of the L2 cache for it."""

import jax.numpy as jnp
import pytest

from benchmarks.kernels.panel_traffic import Traffic, tiles, traffic
from pallas_kernels.grouped_matmul.schedule import GroupTiles, TileScheduler, panel_height
from tests.pallas_kernels.numerics import device


def test_a_large_cache_misses_each_byte_once():
    moved = traffic(2, 256, 384, 256, panel=2, cache=1e9)
    assert moved == Traffic(lhs=512 * 256, rhs=2 * 384 * 256, out=512 * 384 * 2)


def test_rows_of_other_groups_displace_each_other():
    """34 tiles along N are not computed at once, so each panel needs its rows several times."""
    sizes = (32, 256, 6528, 256)
    one, all_groups = (traffic(*sizes, panel=panel, cache=1e6) for panel in (2, 64))
    assert one.lhs < 2 * 32 * 256 * 256 < 8 * one.lhs < all_groups.lhs
    assert one.out == all_groups.out


@pytest.mark.parametrize("panel", [1, 2, 4])
def test_the_kernel_s_order(panel):
    groups = GroupTiles(device((256, 384), "int32"), 128, on_gpu=False)
    scheduler = TileScheduler(groups, groups.count(), 576, 192, panel, 1, jnp.int32(0))
    located = [scheduler.locate(jnp.int32(i)) for i in range(15)]
    assert scheduler.count() == 15
    order = [(int(tile.row) // 128, int(tile.column) // 192) for tile in located]
    assert order == list(tiles(5, 3, panel))


@pytest.mark.parametrize("sizes", [(129, 0, 3), (256, 385)])
def test_ctas_of_a_pair_share_the_rows_of_a_group(sizes):
    """A CTA without rows computes the first one's, and stores none."""
    groups = GroupTiles(device(sizes, "int32"), 256, on_gpu=False)
    tiles = groups, groups.count(), 192, 192, 1, 1, jnp.int32(0)
    ctas = [TileScheduler(*tiles, jnp.int32(member)) for member in range(2)]
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
