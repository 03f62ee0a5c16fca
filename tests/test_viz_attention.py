"""Tests that plots of attention show the given numbers with their names."""

import numpy as np
import pytest

from dsv3_jax.viz import attention


def texts(figure) -> set[str]:
    figure.draw_without_rendering()
    artists = figure.findobj(lambda artist: hasattr(artist, "get_text"))
    return {artist.get_text() for artist in artists}


def test_attention_forms():
    probabilities = np.random.default_rng(0).dirichlet(np.ones(3), 2)
    figure = attention.attention_forms(
        {"expanded": probabilities, "absorbed": probabilities}, ["a", " b", "\n"], "where"
    )
    assert {"expanded", "absorbed", "head 1", "a", "␣b", "\\n", "where"} <= texts(figure)
    for axes in figure.axes[:2]:
        np.testing.assert_array_equal(axes.images[0].get_array(), probabilities)


def test_attention_of_other_words_is_refused():
    with pytest.raises(ValueError, match=r"absorbed: expected \[heads, 2\], got \[2, 3\]"):
        attention.attention_forms({"absorbed": np.ones((2, 3))}, ["a", "b"])


def test_selection():
    p, selected = np.array([0.5, 0.25, 0.125, 0.125]), np.array([True, False, False, True])
    figure = attention.selection(p, selected, "where")
    assert {"not selected: 38% of the attention", "selected: 62%", "where"} <= texts(figure)
    rest, chosen = figure.axes[0].lines
    np.testing.assert_array_equal(chosen.get_xydata(), [[0, 0.5], [3, 0.125]])
    np.testing.assert_array_equal(rest.get_xdata(), [1, 2])
    with pytest.raises(ValueError, match=r"selected: expected \[4\], got \[3\]"):
        attention.selection(p, selected[:3])


def test_cache_bytes():
    figure = attention.cache_bytes(
        {"one": {"keys": 1_234_000, "latents": 7_890}, "other": {"keys": 1e3}}
    )
    assert {"one", "other", "keys", "latents", "1,234", "7.89", "1"} <= texts(figure)


def test_decode_costs():
    figure = attention.decode_costs({"CD": {"GB": 3.25, "GFLOP": 0}, "CC": {"GB": 1, "GFLOP": 4}})
    assert {"CD", "CC", "GB", "GFLOP", "3.25", "0", "4"} <= texts(figure)
    assert all(axes.yaxis_inverted() for axes in figure.axes)  # the first bar is on top


def test_step_times():
    figure = attention.step_times([128, 512], {"CD": [1.0, 2.0], "CC": [2.0, 8.0]}, "a layer")
    assert {"128", "512", "CD", "CC", "a layer"} <= texts(figure)
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == ["CC", "CD"]
    np.testing.assert_array_equal(figure.axes[0].lines[1].get_ydata(), [1.0, 2.0])
