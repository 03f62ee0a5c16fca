"""scripts/train_sparse_demo.py on a tiny model."""

import argparse

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv3_jax import DeepSeekV3, ModelConfig
from dsv3_jax.layers.rope import rotation_at
from dsv3_jax.layers.sparse_attention import SparseAttention
from dsv3_jax.training.corpus import Corpus
from dsv3_jax.training.indexer import recall
from scripts import train_sparse_demo as script
from tests.support.checkpoints import tiny_config

LENGTH = 24


@pytest.fixture
def dense(monkeypatch) -> DeepSeekV3:
    monkeypatch.setattr(script, "TOPK", 8)
    config = tiny_config(num_hidden_layers=1, first_k_dense_replace=0, num_nextn_predict_layers=1)
    return DeepSeekV3(ModelConfig.from_hf(config), rngs=nnx.Rngs(3))


def weights(model: DeepSeekV3) -> dict:
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {path: np.asarray(weight[...]) for path, weight in flat}


@pytest.mark.slow
def test_indexers_are_trained(dense):
    """They select more of the probable tokens, and nothing else changes."""
    model = script.with_indexers(dense, seed=0)
    tokens = np.random.default_rng(0).integers(2, 160, (2, LENGTH))
    inputs = script.inputs_of_layers(model, [tokens])
    assert len(inputs) == 2, "expected those of the layer and of the MTP layer"
    rotation = rotation_at(model.config, jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape))
    attention = model.layers[0].self_attn
    assert isinstance(attention, SparseAttention)
    before = recall(attention, inputs[0][0], rotation)
    losses = script.train_indexer(attention, inputs[0], rotation, 12, 1e-2)
    assert losses[-1] < 0.9 * losses[0]
    assert recall(attention, inputs[0][0], rotation) > before
    original = weights(dense)
    for path, weight in weights(model).items():
        if "indexer" not in path:
            np.testing.assert_array_equal(weight, original[path])


@pytest.mark.slow
def test_both_stages(dense, tmp_path):
    """The warm-up trains indexers of all layers, and the sparse stage everything."""
    model = script.with_indexers(dense, seed=0)
    train = np.random.default_rng(0).integers(2, 160, 40 * LENGTH)
    corpus = Corpus(train, train[: 4 * LENGTH])
    options = argparse.Namespace(
        batch=2, length=LENGTH, seed=0, batches=2, steps=6, learning_rate=1e-2, sparse_steps=6,
        sparse_learning_rate=1e-3,
    )  # fmt: skip
    losses = script.warm_up(model, corpus, options)
    assert len(losses) == 2, "expected those of the layer and of the MTP layer"
    assert all(each[-1] < each[0] for each in losses)
    before = weights(model)
    trained = script.sparse_stage(model, corpus, tmp_path / "run", options)
    assert [entry["step"] for entry in trained.metrics] == [0, 1, 6]
    after = weights(trained.model)
    assert not [path for path in after if np.array_equal(after[path], before[path])]
