"""The digest of a model: the same in every layout, and another one for other weights."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from dsv3_jax.config import ModelConfig
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.pages.weights import model_digest
from tests.support.checkpoints import tiny_config


@pytest.fixture(scope="module")
def model() -> DeepSeekV3:
    config = ModelConfig.from_hf(tiny_config(num_hidden_layers=2))
    return DeepSeekV3(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)


def test_one_bit_of_one_weight_changes_it(model):
    before = model_digest(model)
    other = nnx.clone(model)
    assert model_digest(other) == before
    weight = other.layers[1].self_attn.o_proj.weight
    bits = jax.lax.bitcast_convert_type(weight[...], jnp.uint16).at[3, 2].add(1)
    weight[...] = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    assert model_digest(other) != before


def test_the_order_of_weights_counts(model):
    other = nnx.clone(model)
    weight = other.embed_tokens.weight
    weight[...] = weight[...][::-1]
    assert model_digest(other) != model_digest(model)


def test_options_count(model):
    other = nnx.clone(model)
    other.lm_head.float8_activations = True
    assert model_digest(other) != model_digest(model)
