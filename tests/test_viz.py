"""Tests that plots show the values of their arrays, and of the refusal without matplotlib."""

import numpy as np
import pytest

from dsv3_jax.viz import save
from dsv3_jax.viz.acceptance import (
    acceptance_by_class,
    acceptance_by_position,
    drafted_text,
    frequencies,
    gain_by_depth,
)
from dsv3_jax.viz.attention_entropy import attention_entropy
from dsv3_jax.viz.canvas import check_matplotlib, new_figure, visible
from dsv3_jax.viz.routing import bias_updates, gpu_loads, load_maps, token_routes

RNG = np.random.default_rng(0)


def heights(axes) -> list[float]:
    return [bar.get_height() for bar in axes.patches]


def test_load_maps_share_a_scale_that_ends_at_the_largest_load():
    one, other = np.ones((2, 4), int), np.array([[0, 0, 0, 12], [1, 1, 1, 1]])
    left, right, _ = load_maps({"even": one, "uneven": other}).axes
    np.testing.assert_allclose(right.images[0].get_array(), [[0, 0, 0, 4], [1, 1, 1, 1]])
    np.testing.assert_allclose(left.images[0].get_array(), 1)
    assert [axes.images[0].norm.vmax for axes in (left, right)] == [4, 4]
    assert [axes.get_title() for axes in (left, right)] == ["even", "uneven"]


def test_a_load_map_of_zeros():
    assert load_maps({"no token": np.zeros((2, 4), int)}).axes[0].images[0].norm.vmax == 2


def test_each_tokens_bars_sum_to_one():
    experts = np.argsort(RNG.random((2, 5, 8)), axis=-1)[..., :3]
    figure = token_routes(["a", "\n    ", "$", "d", "e"], experts, RNG.random((2, 5, 3)), 8)
    first, last = figure.axes
    bars = np.reshape(heights(first), (3, 5))
    np.testing.assert_allclose(bars.sum(0), 1)
    assert (np.diff(bars, axis=0) <= 0).all()  # the largest weight at the bottom
    assert [label.get_text() for label in last.get_xticklabels()] == ["a", "\\n␣", "$", "d", "e"]


def test_gpu_loads_follow_the_placement():
    load = np.array([6.0, 2.0, 2.0, 2.0])
    placements = {"in order": np.arange(4), "twice": np.array([0, 1, 2, 0, 3, 1])}
    first, second = gpu_loads(load, placements, 2).axes
    assert first.get_title() == "in order\nmaximum 1.33x the mean"
    np.testing.assert_allclose(np.reshape(heights(first), (2, 2)).sum(0), [8 / 6, 4 / 6])
    np.testing.assert_allclose(np.reshape(heights(second), (3, 2)).sum(0), [1, 1])


def test_bias_updates_have_a_line_per_layer_and_per_expert():
    biases = RNG.random((9, 3, 8))
    loads, one_layer = bias_updates(RNG.random((9, 3)) + 1, biases, layer=2).axes
    np.testing.assert_array_equal(one_layer.lines[5].get_ydata(), biases[:, 2, 5])
    assert len(one_layer.lines) == 8 + 1
    assert len(loads.lines) == 3 + 1


def test_uniform_attention_has_the_maximum_entropy():
    uniform = np.broadcast_to(np.log(np.arange(6) + 1), (2, 3, 4, 6))
    heads, positions, _ = attention_entropy(uniform).axes
    np.testing.assert_allclose(heads.images[0].get_array(), np.ones((2, 4)))
    np.testing.assert_allclose(positions.lines[1].get_ydata(), positions.lines[0].get_ydata())


def test_classes_are_sorted_and_have_wilson_intervals():
    axes = acceptance_by_class(["a", "b"], np.array([81, 5]), np.array([100, 10])).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "b\n10 drafts",
        "a\n100 drafts",
    ]
    below, above = np.array(axes.collections[0].get_segments())[:, :, 0]
    np.testing.assert_allclose(below, [0.2366, 0.7634], atol=1e-4)
    np.testing.assert_allclose(above, [0.7222, 0.8749], atol=1e-4)


def test_accepted_and_rejected_differ_without_colour():
    """They differ by lightness, and rejected drafts by hatching."""
    from matplotlib.colors import to_rgb

    axes = acceptance_by_class(["a", "b"], np.array([81, 5]), np.array([100, 10])).axes[0]
    accepted, rejected = axes.patches[0], axes.patches[2]
    colors = np.array([to_rgb(bar.get_facecolor()) for bar in (accepted, rejected)])
    dark, light = colors @ (0.299, 0.587, 0.114)
    assert light - dark > 0.2
    assert not accepted.get_hatch()
    assert rejected.get_hatch()
    red, green, blue = to_rgb(accepted.get_facecolor())
    assert blue > green > red
    (legend,) = axes.figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert sorted(names) == ["95% interval", "accepted", "rejected"]


@pytest.mark.parametrize("name", ["missing/x.png", "x.txt", "x"])
def test_a_picture_that_cannot_be_saved(name, tmp_path):
    with pytest.raises(ValueError, match=r"^picture: expected a file"):
        save(new_figure(2, 1), tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["x.svg", "x.PDF"])
def test_other_formats(name, tmp_path):
    save(new_figure(2, 1), tmp_path / name)
    assert (tmp_path / name).stat().st_size > 100
    assert len(list(tmp_path.iterdir())) == 1


def test_drafted_text_shades_only_accepted_drafts():
    figure = drafted_text([["(x", "):"], ["\n    ", "return", " $x"], ["\n"]], "def f")
    boxes = [(p.get_x(), p.get_y(), p.get_width()) for p in figure.axes[0].patches]
    np.testing.assert_allclose(boxes, [(5.06, 0.06, 1.88), (0.06, 1.06, 3.88), (4.06, 1.06, 5.88)])


PICTURES = {
    "by position": lambda: acceptance_by_position({"greedy": (0.9, 0.5), "sampled": (0.7,)}),
    "by depth": lambda: gain_by_depth((0, 1, 3), (1.0, 1.8, 2.5), (10.0, 15.0, 12.0)),
    "text": lambda: drafted_text([["a"], ["\n", "$b$"]], "def $f$"),
    "frequencies": lambda: frequencies(["$x_$", " a"], [0.5, 0.2], {"one": [0.4, 0.3]}),
    "routes": lambda: token_routes(["$\\frac$"], np.zeros((1, 1, 1), int), np.ones((1, 1, 1)), 1),
}


@pytest.mark.parametrize("name", PICTURES)
def test_plots_can_be_saved(name, tmp_path):
    """matplotlib warns about neither glyphs nor layout: the suite turns warnings into errors."""
    save(PICTURES[name](), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_notebooks_display_figures():
    assert new_figure(2, 1)._repr_png_().startswith(b"\x89PNG")


def test_labels():
    assert visible("\n        x  y") == "\\n␣x␣y"


def test_without_matplotlib(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--plot: expected matplotlib to be installed; pip inst"):
        check_matplotlib("--plot")
    with pytest.raises(ValueError, match="pictures: expected matplotlib to be installed"):
        new_figure(1, 1)
