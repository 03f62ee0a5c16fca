"""The model in float32 against the float64 oracle, on checkpoints in the published form.

Every model comes through `dsv3_jax.load` from a directory on disk, so names, shapes, dtypes and
block scales are compared too. Bound: 1e-5 in relative norm. float32 arithmetic gives about 5e-7,
and any of the mistakes that these tests guard against more than 1e-3.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dsv3_jax
from dsv3_jax import ModelConfig, presets
from dsv3_jax.checkpoint.reader import CheckpointReader
from dsv3_jax.kv_cache import LatentKVCache
from dsv3_jax.layers.rope import inverse_frequencies, rotate, rotation_at
from dsv3_jax.layers.router import Router
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.model_io import Aux
from dsv3_jax.yarn import YarnScaling
from tests.support.checkpoints import BIAS, random_tensors, tiny_config, write_checkpoint
from tests.support.oracle import (
    Oracle,
    OracleOutput,
    relative_error,
    rope_frequencies,
    route,
    softmax_scale,
)
from tests.support.running import cached_latents, extend, forward

BOUND = 1e-5
LATENT_NORM_EPS = 1e-6  # DeepSeek's code, whatever the config's rms_norm_eps

# Longer than the 32 positions of the tiny config's original context.
TOKENS = np.random.default_rng(11).integers(0, 160, (2, 44))

V2: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "scoring_func": "softmax",
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 0,
    "norm_topk_prob": False,
}
UNGROUPED = {"n_group": 1, "topk_group": 1}

CASES: dict[str, dict[str, Any]] = {
    "v3": {"num_hidden_layers": 2},
    "v3, one group": UNGROUPED
    | {"num_hidden_layers": 2, "num_nextn_predict_layers": 0, "routed_scaling_factor": 2.827},
    "v2, greedy, full-rank queries": V2
    | UNGROUPED
    | {"topk_method": "greedy", "q_lora_rank": None, "routed_scaling_factor": 1.0},
    "v2, groups, two shared experts": V2
    | {"topk_method": "group_limited_greedy", "n_shared_experts": 2, "routed_scaling_factor": 16.0},
    "v2, greedy, normalised": V2
    | UNGROUPED
    | {"topk_method": "greedy", "norm_topk_prob": True, "routed_scaling_factor": 1.0}
    | {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    "moonlight: no YaRN, epsilon 1e-5": UNGROUPED
    | {
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 50000.0,
    },
    "two mtp layers, no dense layer": {
        "num_hidden_layers": 1,
        "first_k_dense_replace": 0,
        "num_nextn_predict_layers": 2,
    },
    "dense layers alone": {"first_k_dense_replace": 2, "num_hidden_layers": 2, **UNGROUPED}
    | {"num_nextn_predict_layers": 0},
    "no shared expert, weights not normalised, cos and sin scaled, large epsilon": {
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 0,
        "rms_norm_eps": 1e-3,  # the latents keep 1e-6, which 1e-5 would not show
        "n_shared_experts": 0,
        "norm_topk_prob": False,
        "rope_scaling": {**tiny_config()["rope_scaling"], "mscale": 0.707, "mscale_all_dim": 0.4},
    },
}

# Two to three blocks of 128 per side, the last one partial. kv_a's 320 rows correspond to 256
# latents as DeepSeek-V3's 576 to 512, and kv_b's heads of 88 rows straddle block borders.
WIDE: dict[str, Any] = {
    "hidden_size": 200,
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 136,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 64,
    "v_head_dim": 40,
    "intermediate_size": 272,
    "moe_intermediate_size": 130,
}


class Loaded(NamedTuple):
    model: DeepSeekV3
    oracle: Oracle


def checkpoint(directory: Path, overrides: dict[str, Any], **kwargs: Any) -> Loaded:
    """Returns a model loaded from a directory written there, and the oracle of the same weights."""
    config = tiny_config(**overrides)
    tensors = write_checkpoint(directory, config, random_tensors(config), **kwargs)
    model, _ = dsv3_jax.load(directory, dtype=jnp.float32)
    return Loaded(model, Oracle(config, tensors, latent_norm_eps=LATENT_NORM_EPS))


def check(logits: Any, aux: Aux, want: OracleOutput, experts: int) -> None:
    assert relative_error(logits, want.logits) < BOUND
    assert len(aux.mtp_logits) == len(want.mtp_logits)
    for got, mtp_logits in zip(aux.mtp_logits, want.mtp_logits, strict=True):
        assert relative_error(got, mtp_logits) < BOUND
    assert aux.routing_counts.shape == (len(want.routing), experts)
    for counts, chosen in zip(aux.routing_counts, want.routing, strict=True):
        assert counts.tolist() == np.bincount(chosen.ravel(), minlength=experts).tolist()


@pytest.fixture(scope="module")
def v3(tmp_path_factory) -> Loaded:
    return checkpoint(tmp_path_factory.mktemp("v3"), CASES["v3"])


# ---- the whole model -----------------------------------------------------------------------------


QUICK = "v3", "v2, groups, two shared experts"


@pytest.mark.parametrize(
    "case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)
def test_forward(case, tmp_path):
    model, oracle = checkpoint(tmp_path, CASES[case])
    check(*forward(model, TOKENS), oracle.forward(TOKENS), experts=8)


def test_every_expert_and_group_is_chosen_by_some_token_and_not_by_all(v3):
    """Otherwise the comparison of routing would prove little."""
    _, aux = forward(v3.model, TOKENS)
    assert aux.routing_counts.min() > 0
    assert aux.routing_counts.max() < TOKENS.size


@pytest.mark.slow
def test_mtp_layers_may_take_the_state_before_the_norm(tmp_path):
    model, oracle = checkpoint(tmp_path, CASES["two mtp layers, no dense layer"])
    want = oracle.forward(TOKENS, mtp_hidden="pre_norm")
    check(*forward(model, TOKENS, "pre_norm"), want, experts=8)
    for before, after in zip(want.mtp_logits, oracle.forward(TOKENS).mtp_logits, strict=True):
        assert relative_error(before, after) > 100 * BOUND


def test_bfloat16_checkpoint(tmp_path):
    model, oracle = checkpoint(tmp_path, CASES["v3"], dtype="bfloat16", shards=3)
    check(*forward(model, TOKENS), oracle.forward(TOKENS), experts=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "options"),
    [
        pytest.param(
            (128, 128), {"shards": 2, "scales_in_other_shard": True}, id="published block"
        ),
        pytest.param(
            (128, 128), {"scale_fmt": "ue8m0", "shards": 2}, id="ue8m0", marks=pytest.mark.slow
        ),
        pytest.param(
            (24, 48),
            {"shards": 5, "scales_in_other_shard": True},
            id="small block",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_float8_checkpoint(block, options, tmp_path):
    """Dequantized on load it equals the oracle; kept in float8 the numbers are the same bit for
    bit."""
    cast, oracle = checkpoint(tmp_path, WIDE, dtype="fp8", block=block, **options)

    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    scale = CheckpointReader(tmp_path)[f"{name}_scale_inv"][...]
    assert scale.shape == (-(-320 // block[0]), -(-200 // block[1]))
    if options.get("scale_fmt") == "ue8m0":
        assert set(np.frexp(scale)[0].ravel()) == {0.5}, "expected powers of two"
    if options.get("scales_in_other_shard"):
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
        assert index[name] != index[f"{name}_scale_inv"]

    logits, aux = forward(cast, TOKENS)
    check(logits, aux, oracle.forward(TOKENS), experts=8)

    quantized, _ = dsv3_jax.load(tmp_path, dtype=jnp.float32, quantization="fp8")
    assert quantized.layers[0].mlp.experts.up_proj.weight.dtype == jnp.float8_e4m3fn
    assert quantized.layers[0].self_attn.kv_a_proj_with_mqa.weight.dtype == jnp.float8_e4m3fn
    assert quantized.mtp[0].eh_proj.weight.dtype == jnp.float32
    kept_logits, kept_aux = forward(quantized, TOKENS)
    np.testing.assert_array_equal(kept_logits, logits)
    np.testing.assert_array_equal(kept_aux.mtp_logits[0], aux.mtp_logits[0])
    np.testing.assert_array_equal(kept_aux.routing_counts, aux.routing_counts)


# ---- the cached forms ----------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_extend_and_its_cache(form, v3):
    batch, length = TOKENS.shape
    cache = LatentKVCache.init(v3.model.cache_spec(), batch, 64, page_size=16)
    logits, cache = extend(v3.model, TOKENS, [length] * batch, cache, form)
    want = v3.oracle.forward(TOKENS, absorbed=form == "absorbed")
    assert relative_error(logits, want.logits) < BOUND
    assert cache.lengths.tolist() == [length] * batch
    for layer, latents in enumerate(want.latents):
        got = np.stack([cached_latents(cache, layer, b) for b in range(batch)])
        assert relative_error(got, latents) < BOUND


# ---- routing -------------------------------------------------------------------------------------


def router(config: ModelConfig, bias: np.ndarray | None) -> Router:
    """A router whose logits are its inputs."""
    built = Router(config, rngs=nnx.Rngs(0), dtype=jnp.float32)
    built.weight.set_value(jnp.eye(config.n_routed_experts, config.hidden_size))
    if bias is not None:
        built.e_score_correction_bias.set_value(jnp.asarray(bias, jnp.float32))
    return built


def test_masked_groups_lose_to_negative_biased_scores():
    """With every bias at -2, masking with 0 instead of -inf would choose only masked experts."""
    raw = tiny_config(hidden_size=8)
    logits = np.random.default_rng(2).normal(size=(64, 8)).astype(np.float32)
    bias = np.linspace(-2.2, -1.8, 8).astype(np.float32)
    routing = jax.jit(router(ModelConfig.from_hf(raw), bias))(logits)
    chosen, weights = route(raw, logits.astype(np.float64), bias.astype(np.float64))
    order = np.argsort(routing.experts, axis=-1)
    arrays = routing.experts, routing.weights
    got = [np.take_along_axis(np.asarray(array), order, -1) for array in arrays]
    np.testing.assert_array_equal(got[0], chosen)
    assert relative_error(got[1], weights) < 1e-6


def test_routing_by_hand():
    """Four groups of two, two kept, three chosen; sigmoid(0) = 1/2 everywhere but in expert 7.

    Biased scores: .5 .5 | .9 -.5 | .6 .55 | .3 s+.1. Groups sum to 1, .4, 1.15 and .4 + s, so the
    last wins over the first when s = sigmoid(3) = .953. Kept: 4 5 6 7; chosen by bias 7, 4, 5.
    """
    config = ModelConfig.from_hf(tiny_config(hidden_size=8))
    bias = np.array([0, 0, 0.4, -1.0, 0.1, 0.05, -0.2, 0.1])
    logits = np.array([[0, 0, 0, 0, 0, 0, 0, 3]], np.float32)
    routing = jax.jit(router(config, bias))(logits)
    assert routing.experts.tolist() == [[7, 4, 5]]
    score = 1 / (1 + np.exp(-3))
    want = 2.5 * np.array([score, 0.5, 0.5]) / (score + 1)  # of unbiased scores
    np.testing.assert_allclose(routing.weights[0], want, rtol=1e-6)


def test_weights_of_scores_that_all_underflow_are_zero_and_not_nan():
    config = ModelConfig.from_hf(tiny_config(hidden_size=8))
    routing = jax.jit(router(config, np.full(8, 12.0)))(np.full((1, 8), -200.0, np.float32))
    assert routing.weights.tolist() == [[0.0, 0.0, 0.0]]


# ---- rope ----------------------------------------------------------------------------------------


def test_rotation_is_exact_at_every_position_of_v3():
    """A float32 product of position and frequency would be off by 1e-2 at the end."""
    config = presets.DEEPSEEK_V3
    positions = np.arange(config.max_position_embeddings)
    angles = positions[:, None] * inverse_frequencies(config)
    cos, sin, _ = rotation_at(config, jnp.asarray(positions)[None])
    assert np.abs(cos[0] - np.cos(angles)).max() < 3e-7
    assert np.abs(sin[0] - np.sin(angles)).max() < 3e-7


@pytest.mark.parametrize(
    ("config", "low", "high"), [(presets.DEEPSEEK_V3, 10, 23), (presets.KIMI_K2, 19, 20)]
)
def test_yarn_stretches_the_slow_pairs(config, low, high):
    plain = inverse_frequencies(dataclasses.replace(config, rope_scaling=None))
    np.testing.assert_allclose(plain, config.rope_theta ** (-np.arange(32) / 32), rtol=1e-14)
    stretched = plain / inverse_frequencies(config)
    factor = config.rope_scaling.factor
    np.testing.assert_allclose(stretched[: low + 1], 1, rtol=1e-14)
    np.testing.assert_allclose(stretched[high:], factor, rtol=1e-14)
    between = stretched[low + 1 : high]
    assert ((between > 1) & (between < factor)).all()
    # Linear in frequency: the blend's weight rises by 1 / (high - low) per pair.
    weight = (1 / between - 1) / (1 / factor - 1)
    np.testing.assert_allclose(weight, np.arange(1, high - low) / (high - low), rtol=1e-9)


def test_yarn_ramp_of_no_width_is_a_step():
    """original 4, beta 1 and 1/2: both bounds are 0, which must not divide by zero."""
    yarn = YarnScaling(factor=4.0, original_max_position_embeddings=4, beta_fast=1.0, beta_slow=1.0)
    config = dataclasses.replace(presets.DEEPSEEK_V3, rope_scaling=yarn, qk_rope_head_dim=8)
    plain = inverse_frequencies(dataclasses.replace(config, rope_scaling=None))
    np.testing.assert_allclose(plain / inverse_frequencies(config), [1, 4, 4, 4], rtol=1e-14)


@pytest.mark.parametrize(
    "name", ["deepseek-v3", "kimi-k2", "deepseek-v2", "deepseek-v2-lite", "moonlight-16b"]
)
def test_rope_and_softmax_scale_of_published_configs(name):
    config = presets.get(name)
    published = config.to_hf()
    frequencies, gain = rope_frequencies(published)
    np.testing.assert_allclose(inverse_frequencies(config), frequencies, rtol=1e-14)
    np.testing.assert_allclose(rotation_at(config, jnp.zeros((1, 1), int)).cos, gain, rtol=1e-7)
    assert config.softmax_scale == pytest.approx(softmax_scale(published), rel=1e-14)


def test_interleaved_pairs_are_rotated():
    """A quarter turn takes (1, 0) to (0, 1); the result holds first halves, then second halves."""
    config = dataclasses.replace(presets.MOONLIGHT_16B, qk_rope_head_dim=4)
    rotation = rotation_at(config, jnp.zeros((1, 1), int))
    quarter = rotation._replace(cos=jnp.array([[[0.0, 1.0]]]), sin=jnp.array([[[1.0, 0.0]]]))
    rotated = rotate(jnp.array([[[1.0, 0.0, 5.0, 7.0]]]), quarter)
    np.testing.assert_array_equal(rotated[0, 0], [0.0, 5.0, 1.0, 7.0])


def test_biases_of_the_fixtures_are_mostly_negative():
    """Positive ones would hide a wrong mask and a bias that leaks into the weights."""
    tensors = random_tensors(tiny_config())
    biases = np.stack([value for name, value in tensors.items() if name.endswith(BIAS)])
    assert (biases < 0).mean() > 0.8
