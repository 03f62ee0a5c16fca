"""The published models at full size, without weights: names and shapes of all parameters."""

import functools
import time

import jax.numpy as jnp
import pytest
from flax import nnx

from dsv3_jax import presets
from dsv3_jax.accounting import checkpoint_bytes
from dsv3_jax.checkpoint.tensor_table import (
    TensorSpec,
    copies,
    published_tensor_names,
    tensor_table,
)
from dsv3_jax.config import ModelConfig
from dsv3_jax.initialization import abstract_model, parameter_count
from dsv3_jax.model import DeepSeekV3

# deepseek-r1 is the same network as deepseek-v3. The tensors of deepseek-v3.1 are among those of
# deepseek-v3.2, which has a test of its own.
MODELS = (
    "deepseek-v3",
    "kimi-k2",
    "deepseek-v2",
    "deepseek-v2-lite",
    "moonlight-16b",
)
SAFETENSORS_DTYPES = {"bfloat16": "BF16", "float32": "F32", "float8_e4m3fn": "F8_E4M3"}


@functools.cache
def as_published(config: ModelConfig) -> DeepSeekV3:
    """Builds a model once; no test may change it."""
    return abstract_model(config, dtype=jnp.bfloat16, quantization=config.quantization)


def represented_tensors(model: DeepSeekV3) -> dict[str, TensorSpec]:
    """Returns the shape and dtype of every published tensor that the model's tree represents."""
    tensors: dict[str, TensorSpec] = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        leaf = variable.get_value()
        names, stacked = published_tensor_names(model.config, path)
        if stacked:
            assert leaf.shape[0] == len(names)
        spec = TensorSpec(leaf.shape[stacked:], SAFETENSORS_DTYPES[leaf.dtype.name])
        assert not tensors.keys() & set(names)
        tensors |= dict.fromkeys(names, spec)
    return tensors


@pytest.fixture(scope="module")
def v3() -> DeepSeekV3:
    return as_published(presets.DEEPSEEK_V3)


def test_parameters_of_deepseek_v3(v3):
    assert parameter_count(v3) == 671_026_419_200
    assert parameter_count(v3, mtp=True) == 11_610_068_224


@pytest.mark.slow
def test_building_it_abstractly_takes_seconds():
    """Random initialisation once made it take a minute of CPU time."""
    began = time.process_time()
    as_published.__wrapped__(presets.DEEPSEEK_V3)
    assert time.process_time() - began < 15


def test_tensors_of_deepseek_v3(v3):
    tensors = represented_tensors(v3)
    duplicates = copies(presets.DEEPSEEK_V3)
    assert len(tensors) + len(duplicates) == 91_991
    copy_bytes = 2 * 129280 * 7168 * 2
    assert sum(spec.nbytes for spec in tensors.values()) + copy_bytes == 688_574_839_360


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "deepseek-v3")) for name in MODELS],
)
def test_tree_is_the_table_of_published_tensors(name):
    config = presets.get(name)
    table = tensor_table(config)
    for copy in copies(config):
        del table[copy]
    assert represented_tensors(as_published(config)) == table


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, presets.DEEPSEEK_V3.quantization])
def test_count_does_not_depend_on_storage(quantization):
    """Scales are not parameters."""
    model = abstract_model(presets.DEEPSEEK_V2_LITE, dtype=jnp.float32, quantization=quantization)
    assert parameter_count(model) == 15_706_484_224
    assert parameter_count(model, mtp=True) == 0


@pytest.mark.slow
def test_tensors_of_deepseek_v3_2():
    """The count of published tensors, and of parameters: V3 and 62 indexers of 13,959,424."""
    model = as_published(presets.DEEPSEEK_V3_2)
    tensors, duplicates = represented_tensors(model), copies(presets.DEEPSEEK_V3_2)
    table = tensor_table(presets.DEEPSEEK_V3_2)
    assert tensors == {name: spec for name, spec in table.items() if name not in duplicates}
    assert len(tensors) + len(duplicates) == 92_425
    size = sum(spec.nbytes for spec in tensors.values()) + 2 * 129280 * 7168 * 2
    assert size == checkpoint_bytes(presets.DEEPSEEK_V3_2) == 689_471_107_200
    assert parameter_count(model) == 671_026_419_200 + 61 * 13_959_424 == 671_877_944_064
    assert parameter_count(model, mtp=True) == 11_610_068_224 + 13_959_424
