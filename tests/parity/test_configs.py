"""Compares what absent keys of config.json mean with transformers' classes."""

import json
from typing import Any

import pytest

from dsv3_jax import hf_config, presets
from dsv3_jax.config import ModelConfig

pytestmark = [pytest.mark.parity, pytest.mark.slow]

CLASSES = {
    "deepseek_v2": "DeepseekV2Config",
    "deepseek_v3": "DeepseekV3Config",
    "deepseek_v32": "DeepseekV32Config",
    "glm_moe_dsa": "GlmMoeDsaConfig",
}
# Tokens that transformers assumes, which are ordinary ones in some vocabularies.
TOKENS = ("bos_token_id", "eos_token_id")


def saved(model_type: str) -> dict[str, Any]:
    """Returns the config.json that transformers writes for its default model."""
    import transformers

    theirs = getattr(transformers, CLASSES[model_type])(num_experts_per_tok=6)
    return json.loads(theirs.to_json_string(use_diff=False))


def read_or_refuse(source: dict[str, Any]) -> tuple[ModelConfig | None, str]:
    try:
        return ModelConfig.from_hf(source), ""
    except ValueError as error:
        return None, str(error)


@pytest.mark.parametrize("model_type", CLASSES)
def test_absent_keys(model_type):
    """Each key is either read as transformers reads its absence, or refused by name."""
    import transformers

    complete = saved(model_type)
    ours = ModelConfig.from_hf(complete)
    optional = set()
    for key in complete:
        without = {name: value for name, value in complete.items() if name != key}
        read, refusal = read_or_refuse(without)
        if read is None:
            by_name = f"config.json lacks the key '{key}': "
            assert refusal.startswith((by_name, "the indexer's three sizes are required"))
            assert key in refusal
            continue
        theirs = getattr(transformers, CLASSES[model_type])(**without)
        if key in TOKENS:
            assert getattr(read, key) in (None, ())
        elif key == "num_nextn_predict_layers":
            assert read.num_nextn_predict_layers == 0  # transformers appends them on request
        elif key in ModelConfig.__annotations__:
            optional.add(key)
            nulls = {"n_group": 1, "topk_group": 1, "dtype": "bfloat16"}
            value = getattr(theirs, key, None)
            assert getattr(read, key) == (nulls[key] if value is None else value), key
        else:
            assert read == ours, key
    expected = hf_config.DEFAULTS[model_type].keys() & complete.keys()
    assert expected <= optional


@pytest.mark.parametrize("model_type", CLASSES)
def test_absent_rope(model_type):
    import transformers

    without = {
        name: value for name, value in saved(model_type).items() if name != "rope_parameters"
    }
    theirs = getattr(transformers, CLASSES[model_type])(**without)
    assert ModelConfig.from_hf(without).rope_theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize("name", presets.PRESETS)
def test_written_files(name, tmp_path):
    """transformers reads the config of every family but Kimi-K2, whose type it does not have."""
    from transformers import AutoConfig

    content = presets.get(name).to_hf()
    (tmp_path / "config.json").write_text(json.dumps(content))
    if content["model_type"] == "kimi_k2":
        with pytest.raises(ValueError, match="kimi_k2"):
            AutoConfig.from_pretrained(tmp_path)
        content["model_type"] = "deepseek_v3"  # the computation is the same
        (tmp_path / "config.json").write_text(json.dumps(content))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert theirs.architectures == content["architectures"]
    for key in ("rms_norm_eps", "routed_scaling_factor", "n_group", "bos_token_id", "v_head_dim"):
        assert getattr(theirs, key) == content[key]


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"mscale": 0.707},
        {"mscale_all_dim": 0.707},
        {"mscale": 0.707, "mscale_all_dim": 1.0},
        {"mscale": 0.707, "mscale_all_dim": 0.0},
        {"mscale": 1.0},
    ],
)
def test_the_factor_of_cos_and_sin(keys, caplog):
    """We follow DeepSeek's code. Where transformers computes another number, the log has both, and
    the file that we write makes transformers compute ours."""
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    def theirs(content: dict[str, Any]) -> float:
        made = transformers.DeepseekV3Config(**content)
        return ROPE_INIT_FUNCTIONS["yarn"](made, "cpu")[1]

    def deepseek() -> float:
        mscale, all_dim = keys.get("mscale", 1.0), keys.get("mscale_all_dim", 0.0)
        ln = 2.0794415416798357  # of the factor 8
        return (0.1 * mscale * ln + 1) / (0.1 * all_dim * ln + 1)

    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
    content = saved("deepseek_v3") | {
        "rope_parameters": {"rope_theta": 1e4, **scaling, **keys},
        "max_position_embeddings": 32768,
    }
    config = ModelConfig.from_hf(content)
    assert config.rope_scaling is not None
    assert config.rope_scaling.rotary_magnitude == pytest.approx(deepseek())
    logged = [f"{theirs(content):.4f} in transformers" in each for each in caplog.messages]
    assert logged == ([] if theirs(content) == pytest.approx(deepseek()) else [True])
    assert theirs(config.to_hf()) == pytest.approx(deepseek())
