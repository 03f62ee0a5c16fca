"""Programs of few tokens use the kernels of ``few_tokens`` if the caller names nothing."""

from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx

from benchmarks.decode import models
from dsv3_jax.checkpoint.find import find_config_directory
from dsv3_jax.config import ModelConfig
from dsv3_jax.engine.device.model_arrays import ModelArrays
from dsv3_jax.layers.block import DecoderLayer
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.overrides import few_tokens
from tests.support.checkpoints import tiny_config


def layer_of(name, weights, *, dense):
    kwargs = {"dtype": jnp.bfloat16, "quantization": models.WEIGHTS[weights]}
    config = models.config(str(_PATHS.get(name, name)))
    return nnx.eval_shape(lambda: DecoderLayer(config, dense=dense, rngs=nnx.Rngs(0), **kwargs))


def on_hopper(monkeypatch):
    monkeypatch.setattr(few_tokens, "require_hopper", lambda: None)


_PATHS = {
    "346 M": Path(__file__).parents[1] / "benchmarks" / "models" / "speculation.json",
    "demo": find_config_directory("demo") / "config.json",
}

# Megabytes that one token reads in the second half of a layer, and the most tokens that prefer the
# kernels.
READ = [
    ("moonlight-16b", "bf16", False, 147.1, 2),
    ("moonlight-16b", "bf16", True, 146.8, 2),
    ("moonlight-16b", "fp8", False, 73.7, 4),
    ("moonlight-16b", "int4", False, 36.96, 4),
    ("v3-slice", "fp8", False, 517.5, 2),
    ("v3-slice", "bf16", False, 1031.3, 0),
    ("deepseek-v2", "int4", False, 138.0, 2),
    ("346 M", "bf16", False, 12.88, 5),
    ("346 M", "bf16", True, 18.35, 5),
    ("346 M", "int8", False, 6.455, 4),
    ("demo", "bf16", False, 1.122, 2),
]


@pytest.mark.parametrize(("name", "weights", "dense", "megabytes", "most"), READ)
def test_layers_that_prefer_the_kernels(name, weights, dense, megabytes, most, monkeypatch):
    layer = layer_of(name, weights, dense=dense)
    assert few_tokens.read_bytes(layer) / 1e6 == pytest.approx(megabytes, rel=1e-3)
    assert few_tokens.choose(layer, None, 1) is None  # not on this machine
    on_hopper(monkeypatch)
    chosen = [few_tokens.choose(layer, None, tokens) is not None for tokens in range(1, 9)]
    assert chosen == [tokens <= most for tokens in range(1, 9)]
    assert few_tokens.choose(layer, "separate", 1) is None


def test_a_counter_only_where_the_kernels_run(monkeypatch):
    assert few_tokens.shared_counter(None, 1) is None
    on_hopper(monkeypatch)
    assert few_tokens.shared_counter(None, 8) is not None
    assert few_tokens.shared_counter(None, 9) is None


@pytest.mark.slow
def test_a_deterministic_engine_keeps_separate_operations():
    model = DeepSeekV3(ModelConfig.from_hf(tiny_config(num_hidden_layers=1)), rngs=nnx.Rngs(0))
    for whole_sequences, expected in ((False, None), (True, "separate")):
        arrays = ModelArrays.of(model, whole_sequences=whole_sequences)
        assert arrays.model(arrays.leaves).feed_forward == expected
    model.use_feed_forward("mosaic_gpu")
    arrays = ModelArrays.of(model, whole_sequences=True)
    assert arrays.model(arrays.leaves).feed_forward == "mosaic_gpu"
    assert model.feed_forward == "mosaic_gpu"
