"""scripts/train_sparse_demo.py on a tiny model."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv3_jax import DeepSeekV3, ModelConfig
from dsv3_jax.layers.rope import rotation_at
from dsv3_jax.layers.sparse_attention import SparseAttention
from dsv3_jax.training.corpus import Corpus
from scripts import train_sparse_demo as script
from tests.support.checkpoints import tiny_config

LENGTH = 24


@pytest.mark.slow
def test_indexers_are_trained_and_measured(monkeypatch):
    """Nothing but the indexers changes, and dense attention ignores them."""
    monkeypatch.setattr(script, "TOPK", 8)
    config = tiny_config(num_hidden_layers=1, first_k_dense_replace=0, num_nextn_predict_layers=1)
    dense = DeepSeekV3(ModelConfig.from_hf(config), rngs=nnx.Rngs(3))
    model = script.with_indexers(dense, seed=0)
    tokens = np.random.default_rng(0).integers(2, 160, (2, LENGTH))
    before = script.measure(model, Corpus(tokens[0], tokens.reshape(-1)), LENGTH, 2)
    inputs = script.inputs_of_layers(model, [tokens])
    assert len(inputs) == 2, "expected those of the layer and of the MTP layer"
    rotation = rotation_at(model.config, jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape))
    attention = model.layers[0].self_attn
    assert isinstance(attention, SparseAttention)
    losses = script.train_indexer(attention, inputs[0], rotation, 12, 1e-2)
    assert losses[-1] < 0.9 * losses[0]
    after = script.measure(model, Corpus(tokens[0], tokens.reshape(-1)), LENGTH, 2)
    assert after["dense"] == before["dense"]
    assert after["sparse"] != before["sparse"]
    assert after["sparse"] != after["dense"]
    original = dict(nnx.to_flat_state(nnx.state(dense, nnx.Param)))
    for path, weight in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if "indexer" not in path:
            np.testing.assert_array_equal(weight[...], original[path][...])
