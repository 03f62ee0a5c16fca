"""Derived numbers of the published models, compared with values computed by hand from the
papers."""

import pytest

from dsv3_jax import presets


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("deepseek-v3", 0.1352338),
        ("deepseek-r1", 0.1352338),
        ("deepseek-v3.1", 0.1352338),
        ("deepseek-v3.2", 0.1352338),
        ("kimi-k2", 0.1308608),
        ("deepseek-v2", 0.1352338),
        ("deepseek-v2-lite", 0.1147214),
        ("moonlight-16b", 0.0721688),
    ],
)
def test_softmax_scale(name, scale):
    assert presets.get(name).softmax_scale == pytest.approx(scale, abs=5e-8)


@pytest.mark.parametrize(
    ("name", "magnitude"),
    [("deepseek-v3", 1.36889), ("deepseek-v2-lite", 1.26080), ("kimi-k2", 1.34657)],
)
def test_yarn_magnitude(name, magnitude):
    yarn = presets.get(name).rope_scaling
    assert yarn is not None
    assert yarn.magnitude(yarn.mscale_all_dim) == pytest.approx(magnitude, abs=5e-6)
    # cos and sin are multiplied by the quotient of the two magnitudes: 1 in every published model.
    assert yarn.magnitude(yarn.mscale) == yarn.magnitude(yarn.mscale_all_dim)


def test_magnitude_without_extension_is_one():
    yarn = presets.DEEPSEEK_V3.rope_scaling
    assert yarn is not None
    for factor in (0.5, 1.0):
        assert type(yarn)(factor, 4096).magnitude(1.0) == 1.0
    assert yarn.magnitude(0.0) == 1.0


@pytest.mark.parametrize(
    ("name", "moe_layers", "scoring", "experts_per_group", "mtp_layers"),
    [
        ("deepseek-v3", 58, "sigmoid", 32, 1),
        ("deepseek-v3.1", 58, "sigmoid", 32, 1),
        ("deepseek-v3.2", 58, "sigmoid", 32, 1),
        ("kimi-k2", 60, "sigmoid", 384, 0),
        ("deepseek-v2", 59, "softmax", 20, 0),
        ("deepseek-v2-lite", 26, "softmax", 64, 0),
        ("moonlight-16b", 26, "sigmoid", 64, 0),
    ],
)
def test_layers_and_routing(name, moe_layers, scoring, experts_per_group, mtp_layers):
    config = presets.get(name)
    assert config.num_moe_layers == moe_layers
    assert config.scoring_func == scoring
    assert config.n_routed_experts // config.n_group == experts_per_group
    assert config.num_nextn_predict_layers == mtp_layers


@pytest.mark.parametrize("name", presets.PRESETS)
def test_all_models_have_the_same_head_dimensions(name):
    config = presets.get(name)
    assert (config.qk_head_dim, config.latent_dim, config.v_head_dim) == (192, 576, 128)


@pytest.mark.parametrize("name", presets.PRESETS)
def test_only_v3_2_has_an_indexer(name):
    assert presets.get(name).has_indexer == (name == "deepseek-v3.2")


@pytest.mark.parametrize(
    ("name", "scale_fmt"),
    [
        ("deepseek-v3", "float32"),
        ("kimi-k2", "float32"),
        ("deepseek-v3.1", "ue8m0"),
        ("deepseek-v3.2", "ue8m0"),
        ("deepseek-v2", None),
        ("deepseek-v2-lite", None),
        ("moonlight-16b", None),
    ],
)
def test_published_quantization(name, scale_fmt):
    quantization = presets.get(name).quantization
    assert (quantization and quantization.scale_fmt) == scale_fmt
    assert quantization is None or quantization.weight_block_size == (128, 128)


def test_get_ignores_case():
    assert presets.get("DeepSeek-V3") is presets.DEEPSEEK_V3


def test_get_lists_the_presets():
    with pytest.raises(ValueError, match=r"deepseek-v3.*moonlight-16b; got 'deepseek-v9'"):
        presets.get("deepseek-v9")
