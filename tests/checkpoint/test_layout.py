"""The arrays of stores of the published models, at their true sizes; and TensorStore takes them."""

import dataclasses
import math

import numpy as np
import pytest

from dsv3_jax import presets
from dsv3_jax.checkpoint import array_tree
from dsv3_jax.checkpoint.array_files import ArrayFiles
from dsv3_jax.checkpoint.arrays import PIECE_ELEMENTS
from dsv3_jax.checkpoint.layout import place, stored_arrays
from dsv3_jax.checkpoint.names import copies, tensor_table
from dsv3_jax.config import INT4, INT8, BlockQuantization

FORMS = {"fp8": BlockQuantization(), "bf16": None, "int8": INT8, "int4": INT4}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", presets.PRESETS)
def test_every_tensor_has_its_place(model, form):
    config = dataclasses.replace(presets.get(model), quantization=FORMS[form])
    table, arrays = tensor_table(config), stored_arrays(config, multiple=128)
    held = [name for array in arrays.values() for name in array.tensors]
    assert sorted(held) == sorted(set(table) - set(copies(config)))
    assert len(set(held)) == len(held)
    for name, array in arrays.items():
        for expert, tensor in enumerate(array.tensors):
            assert place(config, tensor) == (name, expert if array.stacked else None)
            assert table[tensor].shape == array.tensor_shape
        # Whole inner chunks in every file, and none larger than a piece may be.
        assert all(c % i == 0 for c, i in zip(array.chunk, array.inner, strict=True))
        packed = 2 if array.dtype == np.uint8 else 1
        assert math.prod(array.chunk) * packed <= PIECE_ELEMENTS
    size = sum(table[name].nbytes for name in held)
    assert size <= sum(array.nbytes for array in arrays.values()) < 1.01 * size


@pytest.mark.parametrize("form", ["fp8", "int4"])
@pytest.mark.parametrize("model", ["deepseek-v2-lite", "moonlight-16b", "kimi-k2", "deepseek-v3.2"])
def test_the_tree_opens(model, form, tmp_path):
    """Headers alone: hundreds of gigabytes that are a few megabytes."""
    config = dataclasses.replace(presets.get(model), quantization=FORMS[form])
    arrays = stored_arrays(config, multiple=128)
    array_tree.create(tmp_path / "weights", arrays.values())
    files = ArrayFiles(tmp_path / "weights")
    for name, array in arrays.items():
        opened = files[name]
        assert (opened.shape, opened.dtype.numpy_dtype) == (array.shape, array.dtype)
        assert opened.chunk_layout.write_chunk.shape == array.chunk
        assert opened.chunk_layout.read_chunk.shape == array.inner
