"""Pictures of layouts, of bounds, and of expert load over steps."""

import numpy as np
import pytest

from dsv3_jax.plan.roofline import Roofline
from dsv3_jax.plan.sweep import Point
from dsv3_jax.viz import save
from dsv3_jax.viz.balance import balance
from dsv3_jax.viz.bounds import bounds
from dsv3_jax.viz.frontier import frontier
from dsv3_jax.viz.mesh import mesh
from sharding import abstract_layout


def said(figure):
    (axes,) = figure.axes
    return [text.get_text() for text in axes.texts]


def filled(axes, row, color):
    """Left edges and widths of the bars of a color, within their device's box."""
    from matplotlib.colors import to_rgba

    bars = [bar for bar in axes.patches if bar.get_facecolor() == to_rgba(color)]
    bars = [bar for bar in bars if -1.6 * row <= bar.get_y() < -1.6 * row + 1]
    return [(bar.get_x() % 1.1, bar.get_width()) for bar in sorted(bars, key=lambda b: b.get_x())]


def test_who_holds_what():
    layouts = {
        "dp": abstract_layout("dp_attention_ep", 4),
        "tp": abstract_layout("tensor_parallel", 2),
    }
    travels = {"dp": ({}, {"all-gather": 1, "reduce-scatter": 1}), "tp": ({"all-reduce": 2},) * 2}
    figure = mesh(layouts, travels)
    (axes,) = figure.axes
    quarter = 0.84 / 4
    expected = [(0.08 + quarter * i, quarter) for i in range(4)]
    np.testing.assert_allclose(filled(axes, 0, "tab:blue"), expected, atol=1e-9)
    np.testing.assert_allclose(filled(axes, 0, "tab:orange"), [(0.08, 0.84)] * 4, atol=1e-9)
    np.testing.assert_allclose(
        filled(axes, 1, "tab:orange"), [(0.08, 0.42), (0.5, 0.42)], atol=1e-9
    )
    assert "dense layer: none;  MoE layer: 1 all-gather, 1 reduce-scatter" in said(figure)
    assert "dense layer: 2 all-reduce;  MoE layer: 2 all-reduce" in said(figure)


def test_the_longest_bound_is_named():
    figure = bounds({"a step": Roofline(0.002, 0.001, 0.0005, 0.0025, 8, 1)})
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a step\nweights, 3.0 ms"]
    widths = sorted(bar.get_width() for bar in axes.patches)
    np.testing.assert_allclose(widths, [0.5, 1.0, 2.0, 2.5])


def test_points_say_their_rows():
    points = [Point(8, False, 90.0, 700.0, "weights"), Point(1024, True, 50.0, 9000.0, "cache")]
    assert said(frontier(points, "V3")) == ["8", "1,024"]


def test_balance(tmp_path):
    runs = {"with": (np.arange(2.0), np.ones((2, 3))), "without": (np.arange(2.0), np.ones((2, 3)))}
    figure = balance(runs)
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["with", "without"]
    save(figure, tmp_path / "load.png")
    assert (tmp_path / "load.png").stat().st_size > 1000


def test_collectives_want_a_mesh():
    import dsv3_jax
    from dsv3_jax.layer_collectives import layer_collectives

    model, _ = dsv3_jax.load("demo")
    with pytest.raises(ValueError, match="loaded with a layout, got one without"):
        layer_collectives(model, 0)
