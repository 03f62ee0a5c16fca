"""Pictures of layouts and plans: who holds what, what bounds a pass."""

import pytest

from dsv3_jax.layer_collectives import Collective
from dsv3_jax.plan.roofline import Roofline
from dsv3_jax.plan.sweep import Point
from dsv3_jax.viz.bounds import bounds
from dsv3_jax.viz.frontier import frontier
from dsv3_jax.viz.mesh import mesh
from sharding import Layout, abstract_layout, abstract_mesh


def test_a_mesh_shows_parts_and_the_groups_of_collectives():
    summed = Collective("all-reduce", ((0, 1), (2, 3)))
    layouts = {
        "both": Layout(abstract_mesh(data=2, tensor=2)),
        "experts": abstract_layout("dp_attention_ep", 4),
    }
    axes = mesh(layouts, {"both": ([summed], [summed] * 2), "experts": ([], [])}).axes[0]
    assert len(axes.patches) == 8 * (1 + 2 * 4)  # a frame, and four bars on their grounds
    filled = [bar.get_width() for bar in axes.patches if bar.get_height() < 1][1::2]
    whole, half, quarter = (pytest.approx(0.84 / parts) for parts in (1, 2, 4))
    assert filled[:4] == [half, half, whole, half]  # rows, heads, experts, columns
    assert filled[16:20] == [quarter, whole, quarter, whole]
    centers = [0.5, 1.6], [2.7, 3.8]
    drawn = [list(line.get_xdata()) for line in axes.lines]
    assert drawn == [pytest.approx(each) for each in centers * 3]
    words = [text.get_text() for text in axes.texts]
    assert words.count("all-reduce") == 3
    assert "MoE layer: no collective" in words


def test_bounds_name_what_binds():
    decode = Roofline(0.002, 0.001, 0.0005, 0.0001, tokens=8, devices=4)
    prefill = Roofline(0.002, 0.001, 1.5, 0.0001, tokens=8, devices=4)
    above, below = bounds({"a step": decode, "prompts": prefill}).axes
    assert above.get_title() == "a step: weights, 3.0 ms"
    assert below.get_title() == "prompts: arithmetic, 1,500.0 ms"
    assert [bar.get_width() for bar in above.patches] == pytest.approx([2, 1, 0.5, 0.1])
    assert [bar.get_x() for bar in above.patches] == pytest.approx([0, 2, 0, 0])


def test_a_frontier_has_every_point():
    points = [
        Point(8 << i, mtp, 90.0 - i, 50.0 * i + 9, "weights") for mtp in (0, 1) for i in (0, 1)
    ]
    axes = frontier(points, "of four").axes[0]
    assert [list(line.get_xdata()) for line in axes.lines] == [[90, 89], [90, 89]]
    assert [text.get_text() for text in axes.texts] == ["8", "16", "8", "16"]
