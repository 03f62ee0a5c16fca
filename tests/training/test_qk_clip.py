"""Tests of QK-clip: the largest scores against all scores in float64, and the scaled weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv3_jax.initialization import random_model
from dsv3_jax.layers.block import run_in_order
from dsv3_jax.layers.rope import rotation_at
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.training import qk_clip
from dsv3_jax.training.trainer import Trainer
from sharding import make_layout
from tests.training.tiny import RUN, TOKENS, arrays, step

THRESHOLD = 0.5


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 5 queries, so that the last one is padded."""
    monkeypatch.setattr(qk_clip, "_QUERIES_PER_BLOCK", 5)


def all_scores(queries: np.ndarray, keys: np.ndarray, scale: float) -> np.ndarray:
    """Returns causal scores [B, H, T, T] in float64, with -inf for keys that a query does not
    see."""
    scores = scale * np.einsum("bthk,bshk->bhts", *(x.astype(np.float64) for x in (queries, keys)))
    return np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("tokens", [3, 17])
def test_max_scores(tokens):
    """They are exact above the threshold, also where all scores are negative, and at most the
    threshold elsewhere."""
    rng = np.random.default_rng(0)
    queries, keys = (rng.normal(size=(3, tokens, 4, 8)).astype(np.float32) for _ in range(2))
    keys[0, :, 1] = np.abs(keys[0, :, 1])
    queries[0, :, 1] = -np.abs(queries[0, :, 1])
    want = all_scores(queries, keys, 0.3).max(axis=(-2, -1))
    assert want[0, 1] < 0
    for threshold in (-100.0, float(np.median(want)), 100.0):
        function = jax.jit(qk_clip.max_scores, static_argnums=(2, 3))
        got = np.asarray(function(queries, keys, 0.3, threshold))
        above = want > threshold
        np.testing.assert_allclose(got[above], want[above], rtol=1e-5)
        assert (got[~above] <= threshold).all()
    assert np.isinf(got).all()  # nothing was computed


@pytest.mark.usefixtures("small_blocks")
def test_max_scores_inside_documents():
    rng = np.random.default_rng(0)
    queries, keys = (rng.normal(size=(2, 17, 4, 8)).astype(np.float32) for _ in range(2))
    first_keys = np.array([[0] * 6 + [6] * 10 + [16], [0] * 17], np.int32)
    scores = all_scores(queries, keys, 0.3)
    seen = np.arange(17) >= first_keys[:, None, :, None]
    want = np.where(seen, scores, -np.inf).max(axis=(-2, -1))
    assert (want < scores.max(axis=(-2, -1))).any()
    function = jax.jit(qk_clip.max_scores, static_argnums=(2, 3))
    np.testing.assert_allclose(function(queries, keys, 0.3, -100.0, first_keys), want, rtol=1e-5)


@pytest.mark.usefixtures("small_blocks")
def test_a_key_of_an_earlier_block_is_large():
    """All blocks of queries that see it compute their scores."""
    queries, keys = np.ones((1, 17, 1, 4), np.float32), np.full((1, 17, 1, 4), 0.01, np.float32)
    keys[:, 0], queries[:, :12] = 3.0, 0.0
    got = np.asarray(qk_clip.max_scores(jnp.asarray(queries), jnp.asarray(keys), 1.0, 10.0))
    np.testing.assert_allclose(got, 12.0)


def test_small_scores_are_not_computed():
    """The scores of blocks run under a condition, so that they cost nothing while norms show that
    no head exceeds the threshold."""
    x = jnp.ones((1, 8, 2, 4))
    lowered = jax.jit(lambda x: qk_clip.max_scores(x, x, 1.0, 10.0)).lower(x).as_text()
    assert lowered.count("stablehlo.dot_general") == 1
    assert lowered.index("stablehlo.case") < lowered.index("stablehlo.dot_general")


def scores_of(model: DeepSeekV3) -> list[np.ndarray]:
    """Returns the largest score of each head, by layer, from the queries and keys of a forward
    pass."""
    largest = []

    def run(layers, x, rotation):
        all_stats = []
        for layer in layers:
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            keys, _ = attention.expand(attention.latents(normed, rotation))
            queries = attention.queries(attention.query_latent(normed), rotation)
            queries = np.concatenate([np.asarray(q) for q in queries], axis=-1)
            scale = attention.config.softmax_scale
            largest.append(all_scores(queries, np.asarray(keys), scale).max(axis=(0, 2, 3)))
            x, stats = run_in_order([layer], x, rotation)
            all_stats += stats
        return x, all_stats

    model(jnp.asarray(TOKENS), return_aux=True, run_layers=run)
    return largest


def large_scores(model: DeepSeekV3) -> DeepSeekV3:
    """Returns the model with larger queries in its MTP layer."""
    graph, state = nnx.split(model)
    flat = []
    for path, leaf in nnx.to_flat_state(state):
        if path[0] == "mtp" and "q_b_proj" in path:
            leaf = leaf.replace(20 * leaf.get_value())
        flat.append((path, leaf))
    return nnx.merge(graph, nnx.from_flat_state(flat))


def test_clipped_weights_have_scores_of_the_threshold(model):
    """Only heads above it change: rows of q_b_proj and kv_b_proj, but not of values or of the
    shared rope key."""
    model = large_scores(model)
    before = scores_of(model)
    threshold = float(np.mean(before[1]))  # between the two heads of the MTP layer
    assert before[0].max() < threshold
    weights = nnx.state(model, nnx.Param)
    clipped = qk_clip.clip(
        weights, jnp.asarray(np.stack(before), jnp.float32), threshold, model.config
    )
    graph, _, rest = nnx.split(model, nnx.Param, ...)
    after = scores_of(nnx.merge(graph, clipped, rest))
    np.testing.assert_array_equal(after[0], before[0])
    np.testing.assert_allclose(after[1], np.minimum(before[1], threshold), rtol=1e-5)
    head, (c, H) = int(before[1].argmax()), (model.config, 2)
    for name, weight in arrays(clipped).items():
        changed = (weight != arrays(weights)[name]).any(axis=-1)
        want = np.zeros_like(changed)
        if "'mtp'" in name and ("q_b_proj" in name or "kv_b_proj" in name):
            rows = c.qk_head_dim if "q_b_proj" in name else c.qk_nope_head_dim
            want.reshape(H, -1)[head, :rows] = True
        np.testing.assert_array_equal(changed, want, err_msg=name)


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_step_clips(model, trainer, accumulate):
    """The step without QK-clip, and then the clip by the scores before the step."""
    model = large_scores(model)
    want = scores_of(model)
    threshold = float(np.mean(want[1]))
    start = Trainer(model, RUN).init()
    plain, _ = step(trainer, start)
    run = dataclasses.replace(RUN, qk_clip=threshold, accumulate=accumulate)
    clipped, metrics = step(Trainer(model, run), start)
    assert int(metrics.clipped_heads) == 1
    expected = qk_clip.clip(
        plain.params, jnp.asarray(np.stack(want), jnp.float32), threshold, model.config
    )
    for name, leaf in arrays(expected).items():
        np.testing.assert_allclose(arrays(clipped.params)[name], leaf, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "layout", ["tensor_parallel", pytest.param("train", marks=pytest.mark.slow)]
)
def test_max_scores_on_eight_devices(model, layout):
    """Devices with other sequences, and devices with other heads."""
    config = dataclasses.replace(model.config, num_attention_heads=8, moe_intermediate_size=24)
    by_layout = []
    for each in (None, make_layout(layout)):
        spread = random_model(config, 0, each)
        run, maxima = qk_clip.run_with_max_scores(lambda layers, x, r: (x, []), -100.0)
        tokens = jnp.asarray(np.concatenate([TOKENS, TOKENS[:2]]))
        x = jax.random.normal(jax.random.key(0), (*tokens.shape, config.hidden_size))
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        run(list(spread.layers), x, rotation_at(config, positions))
        by_layout.append(np.asarray(maxima[0]))
    np.testing.assert_allclose(by_layout[1], by_layout[0], rtol=1e-5)
