"""Arrays of stores of the published models at their true sizes, which TensorStore accepts."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from dsv3_jax import presets
from dsv3_jax.checkpoint import array_tree
from dsv3_jax.checkpoint.arrays import PIECE_ELEMENTS
from dsv3_jax.checkpoint.store import ArrayFiles
from dsv3_jax.checkpoint.stored_arrays import stored_arrays
from dsv3_jax.checkpoint.tensor_table import copies, published_name, stored_location, tensor_table
from dsv3_jax.quantization import INT4, INT8, BlockQuantization

FORMS = {"fp8": BlockQuantization(), "bf16": None, "int8": INT8, "int4": INT4}
LAYERS = 12  # includes layer numbers of two digits


def of_form(model, form, layers=None):
    """Returns a published model in one form, with the given number of layers."""
    config = presets.get(model)
    layers = layers or config.num_hidden_layers
    return dataclasses.replace(config, quantization=FORMS[form], num_hidden_layers=layers)


def short_of_each():
    """Returns every form of every model. Models that differ from V3 only by their form are V3."""
    configs = {}
    for model, form in itertools.product(presets.PRESETS, FORMS):
        config = of_form(model, form, LAYERS)
        if config not in configs.values():
            configs[f"{model}-{form}"] = config
    return configs


SHORT = short_of_each()


def test_the_models_above_are_those_that_differ():
    assert len(SHORT) == 6 * len(FORMS)


@pytest.mark.parametrize("name", SHORT)
def test_every_tensor_has_a_location(name):
    assert_locations(SHORT[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "form"),
    [
        ("deepseek-v3", "int4"),
        *(
            pytest.param(model, form, marks=pytest.mark.slow)
            for model, form in [
                ("deepseek-v3", "fp8"),
                ("deepseek-v3.2", "bf16"),
                ("kimi-k2", "int8"),
                ("deepseek-v2", "fp8"),
                ("deepseek-v2-lite", "int4"),
                ("moonlight-16b", "bf16"),
            ]
        ),
    ],
)
def test_every_tensor_of_a_whole_model_has_a_location(model, form):
    assert_locations(of_form(model, form))


def assert_locations(config):
    table, arrays = tensor_table(config), stored_arrays(config, multiple=128)
    names = [name for array in arrays.values() for name in array.tensors]
    assert sorted(names) == sorted(set(table) - set(copies(config)))
    assert len(set(names)) == len(names)
    for name, array in arrays.items():
        for expert, tensor in enumerate(array.tensors):
            location = stored_location(config, tensor)
            assert location == (name, expert if array.stacked else None)
            assert published_name(config, location) == tensor
            assert table[tensor].shape == array.tensor_shape
        # Every file has whole inner chunks and is at most as large as a piece.
        assert all(c % i == 0 for c, i in zip(array.chunk, array.inner, strict=True))
        packed = 2 if array.dtype == np.uint8 else 1
        assert math.prod(array.chunk) * packed <= PIECE_ELEMENTS
    size = sum(table[name].nbytes for name in names)
    assert size <= sum(array.nbytes for array in arrays.values()) < 1.01 * size


@pytest.mark.parametrize("form", ["fp8", "int4"])
@pytest.mark.parametrize("model", ["deepseek-v2-lite", "moonlight-16b", "kimi-k2", "deepseek-v3.2"])
def test_the_tree_opens(model, form, tmp_path):
    assert_opens(of_form(model, form, layers=4), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "form"), [("kimi-k2", "fp8"), ("deepseek-v3.2", "int4")])
def test_the_tree_of_a_whole_model_opens(model, form, tmp_path):
    assert_opens(of_form(model, form), tmp_path)


def assert_opens(config, tmp_path):
    """Creates only headers: a few megabytes for hundreds of gigabytes."""
    arrays = stored_arrays(config, multiple=128)
    array_tree.create(tmp_path / "weights", arrays.values())
    files = ArrayFiles(tmp_path / "weights")
    for name, array in arrays.items():
        opened = files[name]
        assert (opened.shape, opened.dtype.numpy_dtype) == (array.shape, array.dtype)
        assert opened.chunk_layout.write_chunk.shape == array.chunk
        assert opened.chunk_layout.read_chunk.shape == array.inner
