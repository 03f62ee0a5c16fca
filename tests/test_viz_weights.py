"""Tests of the plots of checkpoint differences and of expert load by layer."""

import numpy as np
import pytest

from dsv3_jax.checkpoint.compare import Difference
from dsv3_jax.checkpoint.find import find_config_directory
from dsv3_jax.checkpoint.open_checkpoint import open_checkpoint
from dsv3_jax.config import ModelConfig
from dsv3_jax.viz.routing import draw_load, load_maps, moe_layer_names
from dsv3_jax.viz.training import expert_load
from dsv3_jax.viz.weights import weight_differences

DEMO = ModelConfig.from_hf(find_config_directory("demo"))


def differences(different: str) -> dict[str, Difference]:
    """Compares the demo with a copy in which tensors with ``different`` in their names differ."""
    names = open_checkpoint("demo").readable_weights()
    assert not different or any(different in name for name in names)
    return {
        name: Difference(1, 0, 0.1, 1.0 if different and different in name else 0.0, 100.0)
        for name in names
    }


def panels(figure):
    """Returns the three axes with plots; the other axes have legends."""
    return [axes for axes in figure.axes if axes.axison]


def legends(figure):
    return [axes.get_legend() for axes in figure.axes if axes.get_legend()]


def test_equal_checkpoints_have_no_lines_and_no_legends():
    figure = weight_differences(DEMO, differences(""))
    for axes in panels(figure):
        assert not [line for line in axes.lines if line.get_label()[0] != "_"]
        assert axes.get_title().endswith(" (all values equal)")
    assert not legends(figure)


def test_legends_have_only_kinds_that_differ():
    figure = weight_differences(DEMO, differences("self_attn.o_proj"))
    attention, *others = panels(figure)
    (legend,) = legends(figure)
    assert [text.get_text() for text in legend.get_texts()] == ["o_proj"]
    assert attention.get_title() == "attention (4 of 5 kinds equal)"
    for axes in others:
        assert axes.get_title().endswith(" (all values equal)")


def test_layers_are_numbered_as_in_the_model():
    assert moe_layer_names(3, 5, 3) == ["layer 3", "layer 4", "MTP layer"]
    assert moe_layer_names(1, 3, 2) == ["layer 1", "layer 2"]
    assert moe_layer_names(0, 1, 3) == ["layer 0", "MTP layer 0", "MTP layer 1"]


def test_every_line_of_expert_load_has_a_label():
    entries = [{"step": i, "expert_load": [2.0, 3.0, 4.0]} for i in range(3)]
    load = np.arange(12).reshape(3, 4)
    over_steps, by_expert, _ = expert_load(entries, load, moe_layer_names(3, 5, 3)).axes
    labels = [text.get_text() for text in over_steps.get_legend().get_texts()]
    assert labels == ["layer 3", "layer 4", "MTP layer", "mean over layers"]
    assert len(over_steps.lines) == len(labels)
    assert [text.get_text() for text in by_expert.get_yticklabels()] == labels[:3]


def test_only_some_of_many_layers_have_a_label():
    entries = [{"step": i, "expert_load": [2.0] * 59} for i in range(3)]
    names = moe_layer_names(3, 61, 59)
    over_steps, by_expert, _ = expert_load(entries, np.ones((59, 8), int), names).axes
    labels = [text.get_text() for text in over_steps.get_legend().get_texts()]
    assert labels == ["layer 3", "MTP layer", "mean over layers"]
    ticks = [text.get_text() for text in by_expert.get_yticklabels()]
    assert len(ticks) <= 13
    assert (ticks[0], ticks[-1]) == ("layer 3", "MTP layer")


@pytest.mark.parametrize(("names", "label"), [(None, "MoE layer (from 0)"), (["layer 3"], "")])
def test_maps_without_names_have_an_axis_label(names, label):
    axes = load_maps({"text": np.ones((1, 4), int)}, names).axes[0]
    assert axes.get_ylabel() == label
    assert draw_load(axes, np.ones((1, 4), int), "", layers=names).norm.vmax == 2
