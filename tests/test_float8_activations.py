"""Activations are rounded to float8 if there are many tokens, and only then."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.tree_util import Partial

import dsv3_jax
from dsv3_jax.checkpoint.convert import convert
from dsv3_jax.checkpoint.find import find
from dsv3_jax.config import ModelConfig
from dsv3_jax.initialization import abstract_model
from dsv3_jax.layers.linear import FEW_TOKENS, Linear
from dsv3_jax.layers.moe import Experts
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.quantization import INT4, INT8, BlockQuantization
from pallas_kernels import block_dequant, block_quant, grouped_matmul
from tests.pallas_kernels.numerics import check, tolerance
from tests.support.checkpoints import tiny_config

BFLOAT16 = tolerance("bfloat16")


def rounded(x, scale_fmt="float32"):
    """Rounds ``x`` to float8 and returns it in float64."""
    values, scale = block_quant(jnp.asarray(x, jnp.float32), (1, 128), scale_fmt=scale_fmt)
    return np.asarray(block_dequant(values, scale, (1, 128)), np.float64)


@pytest.mark.parametrize("scale_fmt", ["float32", "ue8m0"])
def test_linear(scale_fmt):
    linear = Linear(
        200, 96, std=0.1, rngs=nnx.Rngs(0), dtype="float32",
        quantization=BlockQuantization(scale_fmt=scale_fmt),
    )  # fmt: skip
    x = np.random.default_rng(0).standard_normal((5, 14, 200)).astype(np.float32)
    weight = np.asarray(linear.dense("float32"), np.float64)
    exact = linear(jnp.asarray(x))
    check(exact, x.astype(np.float64) @ weight.T, tolerance("float32"))
    linear.float8_activations = True
    y = linear(jnp.asarray(x))
    assert y.dtype == jnp.float32
    check(y, rounded(x, scale_fmt) @ weight.T, BFLOAT16)
    assert np.linalg.norm(y - exact) > 0.01 * np.linalg.norm(exact)
    few = jnp.asarray(x.reshape(70, 200)[:FEW_TOKENS])
    np.testing.assert_array_equal(linear(few), exact.reshape(70, 96)[:FEW_TOKENS])


@pytest.fixture(scope="module")
def config():
    return ModelConfig.from_hf(
        tiny_config(num_hidden_layers=2, num_nextn_predict_layers=0, hidden_size=160)
    )


@pytest.mark.parametrize("quantization", [BlockQuantization(), INT4], ids=["fp8", "int4"])
def test_experts(config, quantization):
    experts = Experts(config, rngs=nnx.Rngs(0), dtype="float32", quantization=quantization)
    for weight in (experts.gate_proj, experts.up_proj, experts.down_proj):
        weight.float8_activations = True
    gate, up, down = (
        np.asarray(w.dense("float32"), np.float64)
        for w in (experts.gate_proj, experts.up_proj, experts.down_proj)
    )
    rng = np.random.default_rng(1)
    tokens = rng.standard_normal((90, 160)).astype(np.float32)
    sizes = np.array([100, 0, 7, 150, 300, 3, 20, 10], np.int32)  # the last ten rows have no expert
    rows = rng.integers(0, 90, 600)
    assert len(rows) > FEW_TOKENS * len(sizes)
    hidden, last = jax.jit(experts)(tokens, rows, sizes)
    got = last(hidden)
    assert got.dtype == jnp.float32
    got, x = np.asarray(got), rounded(tokens)[rows]
    hidden = np.zeros((len(rows), gate.shape[1]), jnp.bfloat16)
    ends = np.cumsum(sizes)
    groups = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    for e, group in enumerate(groups):
        g, u = x[group] @ gate[e].T, x[group] @ up[e].T
        hidden[group] = g / (1 + np.exp(-g)) * u
    hidden = rounded(hidden)
    for e, group in enumerate(groups):
        check(got[group], hidden[group] @ down[e].T, 16 * BFLOAT16)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [BlockQuantization(), INT4], ids=["fp8", "int4"])
def test_model(config, quantization):
    """The model is close to the exact one for many tokens, and equal to it for few."""
    model = DeepSeekV3(config, rngs=nnx.Rngs(0), quantization=quantization)
    many = jnp.asarray(np.random.default_rng(2).integers(0, 160, (6, 40)))
    few = many[:1]
    run = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))
    graph, state = nnx.split(model)
    exact = [np.asarray(run(state, tokens), np.float64) for tokens in (many, few)]
    model.use_float8_activations()
    assert not model.lm_head.float8_activations
    run = jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))
    graph, state = nnx.split(model)
    error = np.linalg.norm(run(state, many) - exact[0]) / np.linalg.norm(exact[0])
    assert 1e-3 < error < 0.1
    np.testing.assert_array_equal(run(state, few), exact[1])


def test_other_weights_keep_exact_activations(config):
    for quantization in (None, INT8, INT4):
        model = abstract_model(config, quantization=quantization)
        model.use_float8_activations()
        of_experts = quantization == INT4
        assert model.layers[1].mlp.experts.gate_proj.float8_activations == of_experts
        assert not model.layers[0].self_attn.o_proj.uses_float8_activations(10**6)


def test_load():
    model, _ = dsv3_jax.load("demo", quantization="fp8", activations="float8", mtp=False)
    assert model.layers[1].mlp.experts.gate_proj.float8_activations
    assert model.layers[0].self_attn.o_proj.float8_activations
    model, _ = dsv3_jax.load("demo", quantization="fp8", mtp=False)
    assert not model.layers[1].mlp.experts.gate_proj.float8_activations


@pytest.mark.slow
def test_logits_of_an_int4_store(tmp_path):
    """They are those of dequantized weights, with the experts' activations rounded to float8."""
    convert(find("demo"), tmp_path / "int4", to="int4")
    load = functools.partial(dsv3_jax.load, tmp_path / "int4", dtype="float32", mtp=False)
    model, tokenizer = load(quantization="int4", activations="float8")
    dense, _ = load()
    text = "def first(items):\n    return items[0]\n" * 60
    tokens = jnp.asarray(tokenizer.encode(text))[None, :320]
    assert tokens.size * 4 > FEW_TOKENS * 16
    exact = np.asarray(dense(tokens), np.float64)
    for layer in dense.layers[1:]:
        layer.mlp.experts = nnx.data(RoundedExperts(layer.mlp.experts))
    want = np.asarray(dense(tokens), np.float64)
    rounding = np.linalg.norm(want - exact)
    assert rounding > 0.01 * np.linalg.norm(exact)
    assert np.linalg.norm(model(tokens) - want) < 0.2 * rounding


class RoundedExperts(nnx.Module):
    """Float32 experts that round their inputs to float8, in blocks of 128 columns."""

    def __init__(self, experts):
        self.experts = experts
        self.gate_proj = experts.gate_proj

    def __call__(self, tokens, rows, group_sizes, copies):
        experts = self.experts
        x = rounded(tokens)[rows]
        gate, up = (multiply(w, group_sizes, x) for w in (experts.gate_proj, experts.up_proj))
        hidden = rounded((jax.nn.silu(gate) * up).astype(jnp.bfloat16))
        return jnp.asarray(hidden, jnp.float32), Partial(multiply, experts.down_proj, group_sizes)


def multiply(weight, group_sizes, rows):
    """Rounds the result to bfloat16, as float8 matmuls do."""
    rows = jnp.asarray(rows, jnp.float32)
    out = grouped_matmul(rows, weight.dense("float32"), group_sizes)
    return out.astype(jnp.bfloat16).astype(jnp.float32)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"activations": "fp8"}, "activations: expected one of float8; got 'fp8'"),
        ({"activations": "float8"}, "expected quantization='fp8' or 'int4', got quantization=No"),
        (
            {"activations": "float8", "quantization": "int8"},
            "expected quantization='fp8' or 'int4', got quantization='int8'",
        ),
    ],
)
def test_load_refuses(settings, message):
    with pytest.raises(ValueError, match=message):
        dsv3_jax.load("demo", **settings)
