"""Training of indexers: their loss falls, and they find more of the tokens that attention needs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dsv3_jax
from dsv3_jax.config import ModelConfig
from dsv3_jax.initialization import abstract_model
from dsv3_jax.layers.rope import rotation_at
from dsv3_jax.layers.sparse_attention import SparseAttention
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.training import indexer
from dsv3_jax.training.indexer import divergence, recall
from dsv3_jax.training.trainer import Trainer
from sharding import make_layout
from tests.support.checkpoints import random_tensors, sparse_config, write_checkpoint
from tests.support.oracle import relative_error, softmax
from tests.support.sparse_oracle import SparseOracle
from tests.training.tiny import CONFIG as DENSE
from tests.training.tiny import RUN, arrays

CONFIG = sparse_config(
    **{name: value for name, value in DENSE.items() if name not in ("model_type", "architectures")},
    index_topk=4,
)
TOKENS = np.random.default_rng(1).integers(1, 32, (4, 20))
WARM_UP = dataclasses.replace(RUN, indexer_stage="dense", learning_rate=0.01)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> DeepSeekV3:
    directory = tmp_path_factory.mktemp("indexer")
    write_checkpoint(directory, CONFIG, random_tensors(CONFIG))
    return dsv3_jax.load(directory, dtype=jnp.float32)[0]


def of_first_layer(model: DeepSeekV3, function, **kwargs) -> float:
    """Returns ``function`` of the first layer's attention and its input."""
    layer, tokens = model.layers[0], jnp.asarray(TOKENS)
    rotation = rotation_at(model.config, jnp.broadcast_to(jnp.arange(20), tokens.shape))
    x = layer.input_layernorm(model.embed_tokens(tokens))
    return float(nnx.jit(functools.partial(function, **kwargs))(layer.self_attn, x, rotation))


def run(trainer: Trainer, steps: int):
    """Returns the initial and the last state, and the indexer's loss of each step."""
    state = first = trainer.init()
    losses = []
    for _ in range(steps):
        copy = jax.tree.map(jnp.copy, state)
        state, metrics = trainer.step(copy, jnp.asarray(TOKENS))
        losses.append(float(metrics.losses.indexer))
    return first, state, losses


@pytest.mark.slow
def test_dense_warm_up(model):
    """The loss falls and recall rises, and nothing but the indexers changes."""
    trainer = Trainer(model, WARM_UP)
    first, state, losses = run(trainer, 24)
    assert losses[-1] < 0.6 * losses[0]
    assert all("indexer" in name for name in arrays(first.params))
    trained = trainer.model(state)
    assert of_first_layer(trained, recall) > of_first_layer(model, recall) + 0.1
    before, after = (arrays(nnx.state(each)) for each in (model, trained))
    for name, value in before.items():
        assert np.array_equal(after[name], value) == ("indexer" not in name), name


@pytest.mark.slow
def test_sparse_stage(model):
    """Everything is trained. The loss of language reaches no indexer, and that of indexers nothing
    else."""
    trainer = Trainer(model, dataclasses.replace(WARM_UP, indexer_stage="sparse"))
    first, state, losses = run(trainer, 8)
    assert losses[-1] < losses[0]
    after = arrays(state.params)
    assert not any(np.array_equal(after[name], a) for name, a in arrays(first.params).items())
    objective, tokens = trainer._objective, jnp.asarray(TOKENS)

    def term(params, name):
        return getattr(objective.losses(params, None, first.biases, tokens)[0], name)

    @jax.jit
    def gradients(params):
        return [jax.grad(term)(params, name) for name in ("main", "indexer")]

    for gradient, is_of_indexer in zip(gradients(first.params), (False, True), strict=True):
        reached = {name for name, value in arrays(gradient).items() if np.any(value)}
        assert reached
        assert all(("indexer" in name) == is_of_indexer for name in reached)


@pytest.mark.slow
@pytest.mark.parametrize("selected", [False, True])
def test_divergence(model, selected):
    """Compares with float64, query by query."""
    got = of_first_layer(model, divergence, selected=selected)
    oracle = SparseOracle(CONFIG, random_tensors(CONFIG), latent_norm_eps=1e-6)
    prefix = "model.layers.0.self_attn"
    x = oracle.tensors["model.embed_tokens.weight"][TOKENS]
    x = oracle._norm("model.layers.0.input_layernorm", x)
    heads, scores = oracle.attention_scores(prefix, x)
    total = []
    for b, t in np.ndindex(TOKENS.shape):
        index = scores[b, t, : t + 1]
        tokens = np.argsort(-index, kind="stable")[:4] if selected else np.arange(t + 1)
        p = softmax(heads[b, t][:, tokens]).mean(axis=0)
        total.append(np.sum(p * np.log(p / softmax(index[tokens]))))
    assert abs(got - np.mean(total)) < 1e-5 * np.mean(total)


@pytest.mark.slow
def test_gradient_does_not_depend_on_the_block_size(monkeypatch):
    """In bfloat16 compute too, the gradient of a key is summed over the blocks in float32."""
    longer = CONFIG | {"max_position_embeddings": 1024, "rope_scaling": None}
    config = ModelConfig.from_hf(longer)
    made = SparseAttention(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, quantization=None)
    graph, weights, rest = nnx.split(made, nnx.Param, ...)
    weights = jax.tree.map(lambda w: 20 * w if w.ndim > 1 else w, weights)  # so that scores vary
    x = jax.random.normal(jax.random.key(0), (1, 1024, config.hidden_size), jnp.bfloat16)
    rotation = rotation_at(config, jnp.arange(1024)[None])

    def gradient(queries: int) -> dict[str, np.ndarray]:
        monkeypatch.setattr(indexer, "_QUERIES_PER_BLOCK", queries)

        def loss(weights):
            attention = nnx.merge(graph, weights, rest)
            return divergence(attention, x, rotation, selected=False)

        return arrays(jax.jit(jax.grad(loss))(weights))

    in_blocks, whole = gradient(2), gradient(1024)
    for name in whole:
        if "indexer" in name:
            assert relative_error(in_blocks[name], whole[name]) < 0.005, name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"indexer_stage": "none"}, "expected dense or sparse for deepseek_v32, got none"),
        ({"lora_rank": 2}, "indexer_stage dense: expected lora_rank 0, got 2"),
    ],
)
def test_refused_settings(model, settings, message):
    with pytest.raises(ValueError, match=message):
        Trainer(model, dataclasses.replace(WARM_UP, **settings))


def test_a_mesh_is_refused():
    laid_out = abstract_model(ModelConfig.from_hf(CONFIG), dtype=jnp.float32)
    laid_out.lay_out(make_layout("train", devices=jax.devices()[:2]))
    with pytest.raises(ValueError, match="expected a model on one device, got a layout"):
        Trainer(laid_out, WARM_UP)
