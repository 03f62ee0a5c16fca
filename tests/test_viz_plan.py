"""Tests of the plots of layouts, of bounds, and of expert load over steps."""

import numpy as np
import pytest

import dsv3_jax
from dsv3_jax.layer_collectives import Collective, layer_collectives
from dsv3_jax.plan.roofline import Roofline
from dsv3_jax.plan.sweep import Point
from dsv3_jax.viz import save
from dsv3_jax.viz.bounds import bounds
from dsv3_jax.viz.frontier import frontier
from dsv3_jax.viz.mesh import mesh
from dsv3_jax.viz.training import balance
from sharding import DEFAULT_RULES, Layout, Rules, abstract_layout, abstract_mesh


def texts(figure) -> list[str]:
    """Returns the texts in the axes of a figure."""
    (axes,) = figure.axes
    return [text.get_text() for text in axes.texts]


def test_a_mesh_shows_shards_and_the_groups_of_collectives():
    all_reduce = Collective("all-reduce", ((0, 1), (2, 3)))
    layouts = {
        "both": Layout(abstract_mesh(data=2, tensor=2)),
        "experts": abstract_layout("dp_attention_ep", 4),
    }
    axes = mesh(layouts, {"both": ([all_reduce], [all_reduce] * 2), "experts": ([], [])}).axes[0]
    assert len(axes.patches) == 8 * (1 + 2 * 4)  # a frame, and four bars with backgrounds
    filled = [bar.get_width() for bar in axes.patches if bar.get_height() < 1][1::2]
    whole, half, quarter = (pytest.approx(0.84 / shards) for shards in (1, 2, 4))
    assert filled[:4] == [half, half, whole, half]  # batch, heads, experts, hidden units
    assert filled[16:20] == [quarter, whole, quarter, whole]
    centers = [0.5, 1.6], [2.7, 3.8]
    lines = [list(line.get_xdata()) for line in axes.lines]
    assert lines == [pytest.approx(each) for each in centers * 3]
    labels = [text.get_text() for text in axes.texts]
    assert labels.count("all-reduce") == 3
    assert "MoE layer: no collective" in labels


def test_a_batch_over_two_axes_has_shards_side_by_side():
    rules = Rules({**DEFAULT_RULES.table, "batch": ("data", "expert")})
    layout = Layout(abstract_mesh(data=2, expert=2), rules)
    axes = mesh({"one": layout}, {"one": ([], [])}).axes[0]
    filled = [bar.get_x() for bar in axes.patches if bar.get_height() < 1][1::2]
    assert filled[::4] == pytest.approx([1.1 * i + 0.08 + 0.84 * i / 4 for i in range(4)])


def test_bounds_name_the_bottleneck():
    decode = Roofline(0.002, 0.001, 0.0005, 0.0001, tokens=8, devices=4)
    prefill = Roofline(0.002, 0.001, 1.5, 0.0001, tokens=8, devices=4)
    above, below = bounds({"a step": decode, "prompts": prefill}).axes
    assert above.get_title() == "a step: 3.0 ms, limited by weights"
    assert below.get_title() == "prompts: 1,500.0 ms, limited by arithmetic"
    assert [bar.get_width() for bar in above.patches] == pytest.approx([2, 1, 0.5, 0.1])
    assert [bar.get_x() for bar in above.patches] == pytest.approx([0, 2, 0, 0])


def test_points_show_their_batch_sizes():
    points = [Point(8, False, 90.0, 700.0, "weights"), Point(1024, True, 50.0, 9000.0, "cache")]
    assert texts(frontier(points, "V3")) == ["8", "1,024"]


def test_balance(tmp_path):
    runs = {"with": (np.arange(2.0), np.ones((2, 3))), "without": (np.arange(2.0), np.ones((2, 3)))}
    figure = balance(runs)
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["with", "without"]
    save(figure, tmp_path / "load.png")
    assert (tmp_path / "load.png").stat().st_size > 1000


def test_collectives_need_a_layout():
    model, _ = dsv3_jax.load("demo")
    with pytest.raises(ValueError, match="loaded with a layout, got one without"):
        layer_collectives(model, 0)
