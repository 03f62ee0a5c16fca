"""Tests of the order in which blocks compute tiles."""

import jax.numpy as jnp
import pytest

from pallas_kernels.grouped_matmul.plan import Config, Plan
from pallas_kernels.grouped_matmul.tile_scheduler import GroupTiles, TileScheduler
from tests.pallas_kernels.numerics import device


def tiles(m_tiles, n_tiles, panel):
    """Returns the tiles of the result in the order in which blocks compute them."""
    return [
        (m, n)
        for first in range(0, m_tiles, panel)
        for n in range(n_tiles)
        for m in range(first, min(first + panel, m_tiles))
    ]


@pytest.mark.parametrize("panel", [1, 2, 4])
def test_the_kernel_s_order(panel):
    config = Config(128, 192, 4, "m", panel=panel, blocks=1)
    plan = Plan(config, 640, 2, 576, 512, True, 1, False, 1, on_gpu=False)
    groups = GroupTiles(device((256, 384), "int32"), 128, on_gpu=False)
    scheduler = TileScheduler(plan, groups, groups.count(), jnp.int32(0))
    located = [scheduler.locate(jnp.int32(i)) for i in range(15)]
    assert scheduler.count() == 15
    order = [(int(tile.row) // 128, int(tile.column) // 192) for tile in located]
    assert order == tiles(5, 3, panel)


@pytest.mark.parametrize("sizes", [(129, 0, 3), (256, 385)])
def test_blocks_of_a_pair_share_the_rows_of_a_group(sizes):
    """A block without rows of its own computes the first one's, and stores none."""
    config = Config(128, 192, 4, "m", unrolled=True, paired=True)
    plan = Plan(config, sum(sizes), len(sizes), 192, 512, True, 1, False, 2, on_gpu=False)
    groups = GroupTiles(device(sizes, "int32"), 256, on_gpu=False)
    blocks = [
        TileScheduler(plan, groups, groups.count(), jnp.int32(0), jnp.int32(member))
        for member in range(2)
    ]
    stored = []
    for i in range(int(blocks[0].count())):
        first, second = (block.locate(jnp.int32(i)) for block in blocks)
        assert first.group == second.group
        assert second.rows or second.row == first.row
        stored += [t.row + r for t in (first, second) for r in range(int(t.rows))]
    assert [int(row) for row in stored] == list(range(sum(sizes)))


@pytest.mark.parametrize(
    ("groups", "rows", "K", "float8", "paired", "expected"),
    [
        (8, 4096, 7168, True, False, 16),  # of 32 M tiles, 18 take 16 MiB
        (8, 4096, 7168, True, True, 8),
        (8, 4096, 2048, True, False, 32),
        (32, 256, 2048, True, False, 2),
        (32, 129, 2048, True, True, 1),
        (32, 256, 2048, False, False, 2),
        (8, 4096, 7168, False, False, 8),  # 9 take 16 MiB
    ],
)
def test_panels_of_equal_parts_of_a_group(groups, rows, K, float8, paired, expected):
    config = Config(128, 192, 4, "m", unrolled=True, paired=paired)
    plan = Plan(config, groups * rows, groups, 4096, K, float8, 1, False, 132, on_gpu=True)
    assert plan.panel == expected
