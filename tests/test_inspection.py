"""capture returns what the layers computed, and leaves no trace in a model that is not
inspected."""

import ast
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dsv3_jax
from dsv3_jax.config import ModelConfig
from dsv3_jax.initialization import random_model
from dsv3_jax.inspection import (
    Captured,
    What,
    attention_entropy,
    attention_weights,
    capture,
)
from dsv3_jax.kv_cache import LatentKVCache
from dsv3_jax.layers.rope import rotation_at
from dsv3_jax.model import DeepSeekV3
from sharding import Layout, make_layout, make_mesh
from tests.support.checkpoints import random_tensors, sparse_config, tiny_config, write_checkpoint
from tests.support.oracle import relative_error, softmax
from tests.support.running import cached_latents, extend, forward

ROOT = Path(__file__).parents[1]
BOUND = 1e-5  # float32, sums in another order
PREFIX = 7  # common prefix of both sequences
TOKENS = np.random.default_rng(0).integers(0, 160, (2, 13))
TOKENS[1, :PREFIX] = TOKENS[0, :PREFIX]
EVERYTHING: tuple[What, ...] = (
    "routing",
    "latents",
    "hidden",
    "attention_entropy",
    "attention_weights",
    "logits",
)
jitted = nnx.jit(capture, static_argnames="what")


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("tiny")
    # As many heads and experts as devices, so that layouts divide them.
    config = tiny_config(num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8)
    write_checkpoint(home, config, random_tensors(config))
    return home


@pytest.fixture(scope="module")
def model(directory) -> DeepSeekV3:
    return dsv3_jax.load(directory, dtype=jnp.float32)[0]


@pytest.fixture(scope="module")
def captured(model) -> Captured:
    return jitted(model, jnp.asarray(TOKENS), what=EVERYTHING)


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_routing_is_what_the_layers_chose(model, captured):
    _, aux = forward(model, TOKENS)
    routing, c = captured.routing, model.config
    L, E, K = c.num_moe_layers, c.n_routed_experts, c.num_experts_per_tok
    assert routing.experts.shape == (L, *TOKENS.shape, K)
    np.testing.assert_array_equal(routing.counts, aux.routing_counts)
    chosen = np.asarray(routing.experts)[..., None] == np.arange(E)
    np.testing.assert_array_equal(chosen.sum((1, 2, 3)), aux.routing_counts)
    for i in range(L):
        stats = aux.routing[i]
        np.testing.assert_array_equal(routing.experts[i].reshape(-1, K), stats.experts)
        assert relative_error(routing.scores[i].reshape(-1, E), stats.scores) < BOUND


def test_weights_are_unbiased_scores_over_their_sum(model, captured):
    """V3 report, equations 12 and 13, times routed_scaling_factor."""
    routing, c = captured.routing, model.config
    scores = np.take_along_axis(np.asarray(routing.scores), np.asarray(routing.experts), -1)
    want = scores / scores.sum(-1, keepdims=True) * c.routed_scaling_factor
    assert relative_error(routing.weights, want) < BOUND


def test_hidden_goes_from_the_embedding_to_the_logits(model, captured):
    assert captured.hidden.shape == (3, *TOKENS.shape, model.config.hidden_size)
    np.testing.assert_array_equal(captured.hidden[0], model.embed_tokens(jnp.asarray(TOKENS)))
    last = model.logits(model.norm(captured.hidden[-1]))
    assert relative_error(last, captured.logits) < BOUND
    assert relative_error(captured.logits, forward(model, TOKENS)[0]) < BOUND


def test_latents_equal_those_in_the_cache(model, captured):
    B, T = TOKENS.shape
    cache = LatentKVCache.init(model.cache_spec(), B, 16, page_size=8)
    _, cache = extend(model, TOKENS, np.full(B, T), cache, "expanded")
    assert captured.latents.shape == (2, B, T, model.config.latent_dim)
    for layer in range(2):
        for b in range(B):
            cached = cached_latents(cache, layer, b)
            assert relative_error(captured.latents[layer, b], cached) < BOUND


@pytest.mark.slow
def test_entropy_by_its_definition(model, captured):
    """All scores of a layer at once, in float64."""
    T = TOKENS.shape[1]
    rotation = rotation_at(model.config, jnp.broadcast_to(jnp.arange(T), TOKENS.shape))
    for i, layer in enumerate(model.layers):
        attention, x = layer.self_attn, layer.input_layernorm(captured.hidden[i])
        queries = attention.queries(attention.query_latent(x), rotation)
        q = np.concatenate(queries, axis=-1).astype(np.float64)
        k = np.asarray(attention.expand(attention.latents(x, rotation))[0], np.float64)
        scores = np.einsum("bthk,bshk->bhts", q, k) * model.config.softmax_scale
        p = np.where(np.tri(T, dtype=bool), np.exp(scores), 0.0)
        p /= p.sum(-1, keepdims=True)
        want = -(p * np.log(np.where(p > 0, p, 1.0))).sum(-1)
        np.testing.assert_allclose(captured.attention_entropy[i], want, atol=1e-5)


@pytest.mark.slow
def test_weights_by_their_definition(model, captured: Any):
    """They are the softmax of scores in float64, the values that they mix are attention's output,
    and their entropy is the captured one."""
    T = TOKENS.shape[1]
    rotation = rotation_at(model.config, jnp.broadcast_to(jnp.arange(T), TOKENS.shape))
    for i, layer in enumerate(model.layers):
        attention, x = layer.self_attn, layer.input_layernorm(captured.hidden[i])
        q = np.concatenate(attention.queries(attention.query_latent(x), rotation), axis=-1)
        keys, values = attention.expand(attention.latents(x, rotation))
        scores = np.einsum("bthk,bshk->bhts", *(np.asarray(a, np.float64) for a in (q, keys)))
        want = softmax(
            np.where(np.tri(T, dtype=bool), scores * model.config.softmax_scale, -np.inf)
        )
        weights = captured.attention_weights[i]
        assert weights.shape == (len(TOKENS), model.config.num_attention_heads, T, T)
        np.testing.assert_allclose(weights, want, atol=1e-5)
        mixed = jnp.einsum("bhts,bshv->bthv", weights, values)
        assert relative_error(attention.output(mixed), attention(x, rotation)[0]) < 10 * BOUND
        entropy = -np.sum(want * np.log(np.where(want > 0, want, 1.0)), axis=-1)
        np.testing.assert_allclose(captured.attention_entropy[i], entropy, atol=1e-5)


def test_weights_of_hand_made_attention():
    """Keys after the query have none, and the others have those of the softmax."""
    T, rng = 5, np.random.default_rng(1)
    q, k = (jnp.asarray(rng.normal(size=(1, T, 2, 4)), jnp.float32) for _ in range(2))
    weights = np.asarray(attention_weights(q, k, scale=0.5))
    assert weights.shape == (1, 2, T, T)
    for h, t in np.ndindex(2, T):
        scores = np.asarray(k[0, : t + 1, h], np.float64) @ np.asarray(q[0, t, h], np.float64) / 2
        np.testing.assert_allclose(weights[0, h, t, : t + 1], softmax(scores), atol=1e-6)
        np.testing.assert_array_equal(weights[0, h, t, t + 1 :], 0)


def test_entropy_of_hand_made_attention():
    """At 300 positions, not a multiple of the block of queries."""
    T, rng = 300, np.random.default_rng(1)
    k = jnp.asarray(rng.normal(size=(1, T, 2, 4)), jnp.float32)
    uniform = attention_entropy(jnp.zeros_like(k), k, scale=0.5)
    assert uniform.shape == (1, 2, T)
    np.testing.assert_allclose(uniform[0, 1], np.log(np.arange(T) + 1), atol=1e-5)
    # Key s is s: the newest key gets all weight, and full certainty has entropy 0, not NaN.
    k = jnp.broadcast_to(jnp.arange(T, dtype=jnp.float32)[:, None, None], (1, T, 2, 1))
    np.testing.assert_array_equal(attention_entropy(jnp.full_like(k, 1e6), k, scale=1.0), 0.0)


def test_a_position_does_not_depend_on_later_ones(captured):
    for values in (captured.hidden, captured.latents, captured.routing.scores):
        assert relative_error(values[:, 1, :PREFIX], values[:, 0, :PREFIX]) < BOUND
    entropy = captured.attention_entropy[..., :PREFIX]
    np.testing.assert_allclose(entropy[:, 1], entropy[:, 0], atol=1e-5)


# ---- only what is asked for ----------------------------------------------------------------------


def test_only_what_is_asked_for(model):
    one = jax.eval_shape(lambda: capture(model, jnp.asarray(TOKENS), "latents"))
    assert [name for name, value in one._asdict().items() if value is not None] == ["latents"]


@pytest.mark.slow
def test_costs(model):
    """By XLA's count of FLOPs only the entropy computes anything twice, and without logits the LM
    head is not computed."""
    tokens = jnp.asarray(np.tile(TOKENS, (1, 8)))  # one block of queries: XLA counts a loop once
    (B, T), c = tokens.shape, model.config

    def flops(*what: str) -> float:
        return jitted.lower(model, tokens, what=what).compile().cost_analysis()["flops"]

    graph, state = nnx.split(model)
    plain = jax.jit(lambda s: nnx.merge(graph, s)(tokens)).lower(state).compile()
    forward_flops = plain.cost_analysis()["flops"]
    shared = flops("hidden", "latents", "routing", "logits")
    assert forward_flops <= shared < 1.01 * forward_flops
    head = 2 * B * T * c.hidden_size * c.vocab_size
    assert flops("hidden") == pytest.approx(forward_flops - head, rel=0.01)
    L, H = c.num_hidden_layers, c.num_attention_heads
    scores = 2 * L * B * H * T**2 * c.qk_head_dim
    softmax = 12 * L * B * H * T**2  # elementwise, which the table leaves out
    extra = flops("hidden", "attention_entropy") - flops("hidden")
    assert scores <= extra < scores + softmax


def test_nothing_is_left_behind(model):
    """The model lowers to the same text, and no computing module imports dsv3_jax.inspection."""
    graph, state = nnx.split(model)
    tokens = jnp.asarray(TOKENS)

    def text() -> str:
        return jax.jit(lambda s, t: nnx.merge(graph, s)(t)).lower(state, tokens).as_text()

    before = text()
    jitted(model, tokens, what=EVERYTHING)
    assert text() == before
    assert nnx.split(model)[0] == graph
    for path in (ROOT / "dsv3_jax").rglob("*.py"):
        if "inspection" in path.stem or path.parent.name == "viz":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [getattr(node, "module", None)]
            names += [a.name for a in getattr(node, "names", []) if isinstance(a, ast.alias)]
            assert not any("inspection" in (name or "") for name in names), path


# ---- meshes --------------------------------------------------------------------------------------

LAYOUTS = {
    "tensor_parallel": lambda: make_layout("tensor_parallel"),
    "dp_attention_ep": lambda: make_layout("dp_attention_ep", devices=jax.devices()[:2]),
    "data 2, expert 2, tensor 2": lambda: Layout(make_mesh(data=2, expert=2, tensor=2)),
    "train": lambda: make_layout("train", devices=jax.devices()[:2], expert_devices=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_mesh_captures_the_same(name, directory, captured):
    model = dsv3_jax.load(directory, dtype=jnp.float32, layout=LAYOUTS[name]())[0]
    results = jitted(model, jnp.asarray(TOKENS), what=EVERYTHING)
    for ours, want in zip(jax.tree.leaves(results), jax.tree.leaves(captured), strict=True):
        assert ours.shape == want.shape
        np.testing.assert_allclose(ours, want, rtol=1e-4, atol=1e-5)


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "tokens", "message"),
    [
        (("routing", "weights"), TOKENS, "what: expected some of routing, latents, .* 'weights'"),
        ("entropy", TOKENS, "what: expected some of .*; got 'entropy'"),
        ((), TOKENS, "what: expected some of .*; got none"),
        ("hidden", TOKENS[0], r"tokens: expected shape \[B, T\], got \(13,\)"),
    ],
)
def test_refusals(model, what, tokens, message):
    with pytest.raises(ValueError, match=message):
        capture(model, tokens, what)


def test_weights_of_sparse_attention_are_refused():
    model = random_model(ModelConfig.from_hf(sparse_config(index_topk=8)), 0)
    for what in ("attention_weights", "attention_entropy"):
        with pytest.raises(ValueError, match=f"^{what}: expected at most index_topk=8 tokens"):
            capture(model, jnp.asarray(TOKENS), what)


def test_a_dense_model_has_no_routing(tmp_path):
    config = tiny_config(first_k_dense_replace=2, num_hidden_layers=2, num_nextn_predict_layers=0)
    write_checkpoint(tmp_path, config, random_tensors(config))
    model, _ = dsv3_jax.load(tmp_path)
    with pytest.raises(ValueError, match="routing: expected a model with MoE layers"):
        capture(model, jnp.asarray(TOKENS), "routing")
