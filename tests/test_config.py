"""Reading and writing of config.json, and refusals that name the key."""

import dataclasses
import json
import re

import pytest

from dsv3_jax import hf_config, presets
from dsv3_jax.config import ModelConfig
from dsv3_jax.quantization import BlockQuantization
from dsv3_jax.yarn import YarnScaling

V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def v3(**changes):
    """Returns the published config with changed keys; a key set to ... is left out."""
    return {k: v for k, v in (V3 | changes).items() if v is not ...}


def rope(**changes):
    return v3(
        rope_scaling={k: v for k, v in (V3["rope_scaling"] | changes).items() if v is not ...}
    )


def quantization(**changes):
    return v3(quantization_config=V3["quantization_config"] | changes)


V3_2 = v3(
    architectures=["DeepseekV32ForCausalLM"],
    auto_map=...,
    aux_loss_alpha=...,
    index_head_dim=128,
    index_n_heads=64,
    index_topk=2048,
    model_type="deepseek_v32",
    pretraining_tp=...,
    seq_aux=...,
    quantization_config=V3["quantization_config"] | {"scale_fmt": "ue8m0"},
)
KIMI_K2 = rope(beta_fast=1.0, beta_slow=1.0, factor=32.0) | {
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
V2 = v3(
    architectures=["DeepseekV2ForCausalLM"],
    bos_token_id=100000,
    eos_token_id=100001,
    first_k_dense_replace=1,
    hidden_size=5120,
    intermediate_size=12288,
    model_type="deepseek_v2",
    moe_intermediate_size=1536,
    n_routed_experts=160,
    n_shared_experts=2,
    norm_topk_prob=False,
    num_experts_per_tok=6,
    num_hidden_layers=60,
    num_nextn_predict_layers=...,
    quantization_config=...,
    routed_scaling_factor=16.0,
    scoring_func="softmax",
    topk_group=3,
    topk_method="group_limited_greedy",
    vocab_size=102400,
)
V2_LITE = V2 | {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": V2["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "topk_method": "greedy",
}
MOONLIGHT = V2_LITE | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "intermediate_size": 11264,
    "max_position_embeddings": 8192,
    "model_type": "deepseek_v3",
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-05,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "vocab_size": 163840,
}
del MOONLIGHT["rope_scaling"]

# transformers 5 writes this for the same model: rope in one dictionary that has its type twice, no
# routing keys of V3, because it implements one method only, and its own defaults.
TRANSFORMERS_5 = v3(
    auto_map=...,
    aux_loss_alpha=...,
    dtype="bfloat16",
    ep_size=...,
    head_dim=64,
    moe_layer_freq=...,
    output_router_logits=False,
    pad_token_id=None,
    qk_head_dim=192,
    quantization_config={
        "activation_scheme": "dynamic",
        "dequantize": False,
        "expert_dtype": "fp8",
        "modules_to_convert": None,
        "modules_to_not_convert": None,
        "quant_method": "fp8",
        "scale_fmt": "float",
        "weight_block_size": [128, 128],
    },
    rope_interleave=True,
    rope_parameters=V3["rope_scaling"] | {"rope_theta": 10000.0, "rope_type": "yarn"},
    rope_scaling=...,
    rope_theta=...,
    scoring_func=...,
    seq_aux=...,
    topk_method=...,
    torch_dtype=...,
    transformers_version="5.23.0",
)
TRANSFORMERS_5_V3_2 = TRANSFORMERS_5 | {
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "layer_types": ["indexed_attention"] * 61,
    "mlp_bias": False,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 58,
    "model_type": "deepseek_v32",
    "quantization_config": TRANSFORMERS_5["quantization_config"] | {"scale_fmt": "ue8m0"},
}
TRANSFORMERS_5_MOONLIGHT = {
    k: v
    for k, v in (TRANSFORMERS_5 | MOONLIGHT).items()
    if k not in ("rope_theta", "scoring_func", "topk_method", "quantization_config")
} | {"rope_parameters": {"rope_theta": 50000.0, "rope_type": "default"}}

# transformers 4.57 adds these keys to a published file that it reads and saves again.
TRANSFORMERS_4 = rope(rope_type="yarn", beta_fast=32.0, beta_slow=1.0, factor=40.0) | {
    "dtype": "bfloat16",
    "head_dim": 64,
    "qk_head_dim": 192,
    "rope_interleave": True,
}

# Keys that the base class of transformers 4 or 5 may add.
BASE_CLASS_KEYS = """
    _attn_implementation _commit_hash _experts_implementation _name_or_path add_cross_attention
    architectures bad_words_ids begin_suppress_tokens chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id id2label is_decoder is_encoder_decoder label2id
    length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix
    problem_type pruned_heads remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torchscript
    transformers_version typical_p use_bfloat16
"""


def refused(source) -> str:
    """Returns the error message of reading ``source``: always one line."""
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        ModelConfig.from_hf(source)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---- reading -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("published", "preset"),
    [
        (V3, "deepseek-v3"),
        (quantization(scale_fmt="ue8m0"), "deepseek-v3.1"),
        (V3_2, "deepseek-v3.2"),
        (KIMI_K2, "kimi-k2"),
        (V2, "deepseek-v2"),
        (V2_LITE, "deepseek-v2-lite"),
        (MOONLIGHT, "moonlight-16b"),
        (TRANSFORMERS_5, "deepseek-v3"),
        (TRANSFORMERS_5_V3_2, "deepseek-v3.2"),
        (TRANSFORMERS_5_MOONLIGHT, "moonlight-16b"),
        (TRANSFORMERS_4, "deepseek-v3"),
    ],
)
def test_a_file_is_its_preset(published, preset):
    assert ModelConfig.from_hf(published) == presets.get(preset)


def test_reading_leaves_the_dictionary_alone():
    before = json.dumps(V3)
    ModelConfig.from_hf(V3)
    assert json.dumps(V3) == before


@pytest.mark.parametrize("key", BASE_CLASS_KEYS.split())
def test_keys_of_the_base_class_change_nothing(key):
    assert ModelConfig.from_hf(v3(**{key: None})) == presets.DEEPSEEK_V3


def test_rope_may_be_stated_in_both_spellings():
    both = V3 | {"rope_parameters": TRANSFORMERS_5["rope_parameters"]}
    assert ModelConfig.from_hf(both) == presets.DEEPSEEK_V3


@pytest.mark.parametrize(
    ("key", "field", "value"),
    [
        ("n_group", "n_group", 8),
        ("topk_group", "topk_group", 4),
        ("n_shared_experts", "n_shared_experts", 1),
        ("num_experts_per_tok", "num_experts_per_tok", 8),
        ("num_nextn_predict_layers", "num_nextn_predict_layers", 0),
        ("norm_topk_prob", "norm_topk_prob", True),
        ("routed_scaling_factor", "routed_scaling_factor", 2.5),
        ("rms_norm_eps", "rms_norm_eps", 1e-6),
        ("rope_theta", "rope_theta", 10_000.0),
        ("max_position_embeddings", "max_position_embeddings", 4096),
        ("rope_scaling", "rope_scaling", None),
        ("quantization_config", "quantization", None),
        ("torch_dtype", "dtype", "bfloat16"),
        ("initializer_range", "initializer_range", 0.02),
        ("bos_token_id", "bos_token_id", None),
        ("eos_token_id", "eos_token_id", ()),
    ],
)
def test_absent_keys_have_a_meaning(key, field, value):
    config = ModelConfig.from_hf(v3(**{key: ...}))
    assert getattr(config, field) == value
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


@pytest.mark.parametrize("model_type", hf_config.DEFAULTS)
def test_absent_keys_have_the_meaning_of_the_family(model_type):
    published = {
        "deepseek_v2": V2_LITE,
        "deepseek_v32": V3_2,
        "glm_moe_dsa": V3_2 | {"model_type": "glm_moe_dsa", "n_group": 1, "topk_group": 1},
        "kimi_k2": V3 | {"model_type": "kimi_k2"},
    }.get(model_type, V3)
    for key, value in hf_config.DEFAULTS[model_type].items():
        without = {name: each for name, each in published.items() if name != key}
        assert getattr(ModelConfig.from_hf(without), key) == value


@pytest.mark.parametrize(
    ("changes", "groups"),
    [
        ({}, (8, 4)),
        ({"n_group": 1}, (1, 1)),
        ({"n_group": None}, (1, 1)),
        ({"n_group": None, "topk_group": None}, (1, 1)),
        ({"n_group": 4, "topk_group": 2}, (4, 2)),
    ],
)
def test_groups(changes, groups):
    """With one group, the number of selected groups is no choice."""
    config = ModelConfig.from_hf(v3(**({"n_group": ..., "topk_group": ...} | changes)))
    assert (config.n_group, config.topk_group) == groups


@pytest.mark.parametrize(
    ("key", "field", "value"),
    [
        ("n_shared_experts", "n_shared_experts", 0),
        ("num_nextn_predict_layers", "num_nextn_predict_layers", 0),
        ("rope_scaling", "rope_scaling", None),
        ("quantization_config", "quantization", None),
        ("bos_token_id", "bos_token_id", None),
        ("eos_token_id", "eos_token_id", ()),
    ],
)
def test_null_means_none(key, field, value):
    config = ModelConfig.from_hf(v3(**{key: None}))
    assert getattr(config, field) == value
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


def test_integers_in_the_file_become_floats():
    config = ModelConfig.from_hf(v3(routed_scaling_factor=2))
    assert config.rope_scaling is not None
    for value in (config.rope_theta, config.routed_scaling_factor, config.rope_scaling.factor):
        assert type(value) is float


@pytest.mark.parametrize(("eos", "ids"), [(7, (7,)), ([7], (7,)), ([7, 9], (7, 9))])
def test_eos_may_be_several(eos, ids):
    config = ModelConfig.from_hf(v3(eos_token_id=eos))
    assert config.eos_token_id == ids
    assert ModelConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize(
    "changes",
    [
        {"moe_layer_freq": [0] * 3 + [1] * 58},
        {"moe_layer_freq": [0] * 3 + [1] * 59},  # with the MTP layer
        {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 58, "first_k_dense_replace": ...},
        {"moe_layer_freq": [0] * 3 + [1] * 58, "first_k_dense_replace": ...},
        {"layer_types": ["full_attention"] * 61},
        {"layer_types": ["attention"] * 61, "mtp_layer_types": ["attention"]},
        {"mtp_layer_types": ["full_attention"], "mtp_mlp_layer_types": ["sparse"]},
        *({"head_dim": size} for size in (64, 192, 128, 7168 // 128, None)),
        {"num_local_experts": 256},
        {"num_local_experts": 256, "n_routed_experts": ...},
        {"num_mtp_layers": 1, "num_nextn_predict_layers": ...},
        {"partial_rotary_factor": 1.0, "per_layer_config": None},
        {"rope_scaling": V3["rope_scaling"] | {"truncate": True, "attention_factor": None}},
        {"rope_scaling": V3["rope_scaling"] | {"partial_rotary_factor": 1}},
    ],
)
def test_keys_that_restate_others(changes):
    assert ModelConfig.from_hf(v3(**changes)) == presets.DEEPSEEK_V3


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["deepseek_sparse_attention"] * 61},
        {"layer_types": ["indexed_attention"] * 61, "mtp_layer_types": ["indexed_attention"]},
        {"index_topk_freq": 1, "index_skip_topk_offset": 2, "index_topk_pattern": "F" * 61},
        {"num_experts": 256, "n_routed_experts": ...},
    ],
)
def test_keys_that_restate_others_of_sparse_models(changes):
    source = {k: v for k, v in (V3_2 | changes).items() if v is not ...}
    assert ModelConfig.from_hf(source) == presets.get("deepseek-v3.2")


@pytest.mark.parametrize("head_dim", [64, 192, 256, 320])
def test_head_dim_is_any_dimension_of_a_head(head_dim):
    """GLM-5's files have 192, the dimensions without rope; transformers has those with rope."""
    sizes = {"qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256}
    source = {**V3_2, **sizes, "head_dim": head_dim}
    if head_dim == 320:
        assert "head_dim contradicts the other keys" in refused(source)
    else:
        assert ModelConfig.from_hf(source).qk_head_dim == 256


@pytest.mark.parametrize("name", ["modules_to_not_convert", "ignored_layers"])
def test_modules_that_are_not_quantized(name):
    modules = ["lm_head", "model.layers.3.self_attn.o_proj", "lm_head"]
    config = ModelConfig.from_hf(quantization(**{name: modules}))
    assert config.quantization == BlockQuantization(modules_to_not_convert=tuple(modules[:2]))
    assert ModelConfig.from_hf(config.to_hf()) == config
    both = quantization(modules_to_not_convert=modules, ignored_layers=modules)
    assert ModelConfig.from_hf(both) == config
    assert ModelConfig.from_hf(quantization(**{name: []})) == presets.DEEPSEEK_V3


# ---- YaRN's factor, which not all readers compute alike ------------------------------------------


def yarn(**changes):
    plain = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
    return v3(rope_scaling=plain | changes)


@pytest.mark.parametrize(
    ("changes", "ours", "theirs"),
    [
        ({"mscale": 0.707}, 1.1470, 1.2079),
        ({"mscale": 0.707, "mscale_all_dim": 0}, 1.1470, 1.2079),
        ({"mscale_all_dim": 0.707}, 1.2079 / 1.1470, 1.2079),
        ({"mscale": 0, "mscale_all_dim": 1}, 1 / 1.2079, 1.2079),
    ],
)
def test_the_choice_between_readers_is_logged(caplog, changes, ours, theirs):
    config = ModelConfig.from_hf(yarn(**changes))
    assert config.rope_scaling is not None
    assert config.rope_scaling.rotary_magnitude == pytest.approx(ours, abs=1e-4)
    (message,) = caplog.messages
    assert message.startswith("rope_scaling: mscale=")
    numbers = [float(number) for number in re.findall(r"by ([\d.]+\d)", message)]
    assert numbers == [pytest.approx(ours, abs=1e-4), pytest.approx(theirs, abs=1e-4)]
    # The written file leaves no choice.
    caplog.clear()
    written = config.to_hf()
    if "mscale" in changes:
        assert written["rope_scaling"]["attention_factor"] == pytest.approx(ours, abs=1e-4)
    assert ModelConfig.from_hf(written) == config
    assert not caplog.messages
    for wrong in (1.3, "1.0", [1.0]):
        written["rope_scaling"]["attention_factor"] = wrong
        assert "attention_factor" in refused(written)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mscale": 1.0},
        {"mscale": 0.707, "mscale_all_dim": 0.707},
        {"mscale": 0.7, "factor": 1.0},
    ],
)
def test_nothing_is_logged_where_readers_agree(caplog, changes):
    config = ModelConfig.from_hf(yarn(**changes))
    assert "attention_factor" not in config.to_hf()["rope_scaling"]
    assert not caplog.messages


# ---- writing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", presets.PRESETS)
def test_round_trip(name):
    config = presets.get(name)
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float32", "quantization": None},
        {"q_lora_rank": None, "n_shared_experts": 0, "first_k_dense_replace": 0},
        {"num_nextn_predict_layers": 2, "initializer_range": 0.006},
        {"rope_scaling": YarnScaling(4.0, 512, mscale=0.5)},
        {"quantization": BlockQuantization((64, 32))},
    ],
)
def test_round_trip_of_unpublished_shapes(changes):
    config = dataclasses.replace(presets.DEEPSEEK_V3, **changes)
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_the_written_file_equals_the_published_one():
    boilerplate = (
        "auto_map",
        "aux_loss_alpha",
        "ep_size",
        "pretraining_tp",
        "seq_aux",
        "use_cache",
    )
    published = {k: v for k, v in V3.items() if k not in (*boilerplate, "transformers_version")}
    assert presets.DEEPSEEK_V3.to_hf() == published | {"rope_interleave": True}


def test_an_unpublished_scale_suffix_is_not_written():
    odd = dataclasses.replace(
        presets.DEEPSEEK_V3, quantization=BlockQuantization(scale_suffix=".s")
    )
    with pytest.raises(ValueError, match="scale_suffix"):
        odd.to_hf()


# ---- files ---------------------------------------------------------------------------------------


def test_reads_a_file_and_its_directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(V3), encoding="utf-8")
    assert ModelConfig.from_hf(tmp_path) == presets.DEEPSEEK_V3
    assert ModelConfig.from_hf(str(tmp_path / "config.json")) == presets.DEEPSEEK_V3


def test_a_missing_file_is_named(tmp_path):
    assert str(tmp_path / "config.json") in refused(tmp_path / "config.json")
    assert str(tmp_path) in refused(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[1, 2]", b"\xff\xfe", b""])
def test_a_broken_file_is_named(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    message = refused(tmp_path)
    assert "config.json" in message
    assert "JSON" in message


def test_not_a_number_in_a_file_is_refused(tmp_path):
    # json reads NaN and Infinity although JSON has neither.
    (tmp_path / "config.json").write_text(json.dumps(v3(rms_norm_eps=float("nan"))))
    assert "rms_norm_eps: expected a finite number, got nan" in refused(tmp_path)


# ---- refusals ------------------------------------------------------------------------------------

OPTIONAL = {*hf_config.DEFAULTS["deepseek_v3"], "bos_token_id", "eos_token_id"}
SHAPES = sorted(
    {f.name for f in dataclasses.fields(ModelConfig) if f.default is dataclasses.MISSING}
    - {*OPTIONAL, "model_type", "rope_scaling", "topk_method"}
)


@pytest.mark.parametrize("key", SHAPES)
def test_a_missing_shape_is_named(key):
    expected = f"config.json lacks the key {key!r}: the model's shape has no default"
    assert refused(v3(**{key: ...})) == expected


@pytest.mark.parametrize(
    ("published", "key", "reason"),
    [
        (V3, "model_type", "expected the family of the model"),
        (V2, "topk_method", "transformers and DeepSeek's code have different defaults"),
        (V2, "num_experts_per_tok", "transformers has no default"),
    ],
)
def test_other_missing_keys_are_named_with_the_reason(published, key, reason):
    without = {name: value for name, value in published.items() if name != key}
    assert refused(without) == f"config.json lacks the key {key!r}: {reason}"


NEEDED = {"num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor", "rms_norm_eps"}


@pytest.mark.parametrize(
    "key", sorted({*SHAPES, *NEEDED, "max_position_embeddings"} - {"q_lora_rank"})
)
def test_null_for_a_needed_value_is_named(key):
    message = refused(v3(**{key: None}))
    assert message.startswith(f"{key}: expected")
    assert message.endswith("got None")


@pytest.mark.parametrize(
    "change",
    [
        {"qk_norm": True},
        {"layers_block_type": ["mamba"]},
        {"num_experts": 4, "sliding_window": 128},
    ],
)
def test_unknown_keys_are_named_with_their_values(change):
    message = refused(v3(**change))
    for key, value in change.items():
        assert f"{key}={json.dumps(value)}" in message


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v4", "glm5_moe", "", 3, ["deepseek_v3"]])
def test_another_model_type_is_refused_first(model_type):
    # Other keys of the file are invalid too.
    message = refused({"model_type": model_type, "hidden_act": "gelu", "n_embd": 64})
    assert message.startswith("model_type: expected one of deepseek_v2, deepseek_v3")
    assert message.endswith(f"got {model_type!r}")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("attention_bias", None),
        ("mlp_bias", True),
        ("attention_dropout", 0.1),
        ("moe_layer_freq", 2),
        ("moe_layer_freq", None),
        ("partial_rotary_factor", 0.5),
        ("rope_interleave", False),
        ("tie_word_embeddings", True),
    ],
)
def test_values_that_are_not_implemented_are_named(key, value):
    message = refused(v3(**{key: value}))
    assert message.startswith(f"{key}: ")
    assert message.endswith(f"got {json.dumps(value)}")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("hidden_size", "64", "an integer"),
        ("hidden_size", 64.0, "an integer"),
        ("hidden_size", True, "an integer"),
        ("hidden_size", [64], "an integer"),
        ("q_lora_rank", "none", "an integer"),
        ("q_lora_rank", 0, "more than 0"),
        ("num_hidden_layers", 0, "more than 0"),
        ("num_attention_heads", -128, "more than 0"),
        ("n_group", 0, "more than 0"),
        ("n_shared_experts", False, "an integer"),
        ("num_nextn_predict_layers", -1, "at least 0"),
        ("bos_token_id", -1, "at least 0"),
        ("norm_topk_prob", "yes", "true or false"),
        ("norm_topk_prob", 1, "true or false"),
        ("rms_norm_eps", "1e-6", "a finite number"),
        ("rms_norm_eps", 0, "more than 0"),
        ("rms_norm_eps", float("inf"), "a finite number"),
        ("rope_theta", "10000", "a finite number"),
        ("rope_theta", float("nan"), "a finite number"),
        ("rope_theta", True, "a finite number"),
        ("rope_theta", -1.0, "more than 0"),
        ("routed_scaling_factor", {"value": 2.5}, "a finite number"),
        ("routed_scaling_factor", 0.0, "more than 0"),
        ("initializer_range", -0.1, "at least 0"),
        ("eos_token_id", "1", "token ids"),
        ("eos_token_id", [], "token ids"),
        ("eos_token_id", [1, -1], "token ids"),
        ("eos_token_id", [True], "token ids"),
        ("topk_method", ["noaux_tc"], "a string"),
        ("topk_method", "aux_tc", "one of noaux_tc, greedy, group_limited_greedy"),
        ("torch_dtype", "float8_e4m3fn", "one of bfloat16, float16, float32"),
        ("torch_dtype", "fp32", "one of bfloat16, float16, float32"),
        ("torch_dtype", ["bfloat16"], "a string"),
        ("torch_dtype", "", "one of bfloat16, float16, float32"),
    ],
)
def test_a_value_of_another_type_is_named(key, value, expected):
    message = refused(v3(**{key: value}))
    assert message.startswith(f"{'dtype' if key == 'torch_dtype' else key}: expected {expected}")
    assert "got " in message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"n_routed_experts": 100}, "n_routed_experts=100, n_group=8"),
        ({"topk_group": 9}, "topk_group=9, n_group=8"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok=129, topk_group=4, n_group=8"),
        ({"n_routed_experts": 8, "num_experts_per_tok": 1}, "n_routed_experts=8, n_group=8"),
        ({"topk_method": "greedy", "scoring_func": ...}, "topk_method='greedy', n_group=8"),
        (
            {"topk_method": "group_limited_greedy", "scoring_func": ...},
            "norm_topk_prob=True, routed_scaling_factor=2.5",
        ),
        ({"first_k_dense_replace": 62}, "first_k_dense_replace=62, num_hidden_layers=61"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim=63"),
        ({"index_topk": 2048}, "model_type='deepseek_v3', index_n_heads=None"),
        ({"model_type": "deepseek_v32"}, "model_type='deepseek_v32', index_n_heads=None"),
        (
            {"model_type": "deepseek_v32", "index_topk": 2048, "index_n_heads": 64},
            "index_n_heads=64, index_head_dim=None, index_topk=2048",
        ),
        (
            {
                "model_type": "deepseek_v32",
                "index_topk": 2048,
                "index_n_heads": 64,
                "index_head_dim": 128,
                "q_lora_rank": None,
            },
            "q_lora_rank=None, index_topk=2048",
        ),
        (
            {"num_key_value_heads": 8},
            "num_key_value_heads contradicts the other keys: expected 128",
        ),
        ({"qk_head_dim": 128}, "qk_head_dim contradicts the other keys: expected 192, got 128"),
        ({"head_dim": 96}, "head_dim contradicts the other keys: expected 64, got 96"),
        ({"scoring_func": "softmax"}, "scoring_func contradicts the other keys: expected sigmoid"),
        ({"mlp_layer_types": ["sparse"] * 61}, "mlp_layer_types contradicts the other keys"),
        ({"layer_types": ["sliding_attention"] * 61}, "layer_types contradicts the other keys"),
        ({"layer_types": ["indexed_attention"] * 61}, "layer_types contradicts the other keys"),
        ({"mtp_layer_types": ["full_attention"] * 2}, "mtp_layer_types contradicts the other keys"),
        ({"moe_layer_freq": [0, 1] * 30 + [1]}, "moe_layer_freq contradicts the other keys"),
        ({"moe_layer_freq": [0] * 4 + [1] * 57}, "moe_layer_freq contradicts the other keys"),
        (
            {"moe_layer_freq": [0, 1] * 30 + [1], "first_k_dense_replace": ...},
            "moe_layer_freq contradicts the other keys",
        ),
        ({"num_local_experts": 128}, "n_routed_experts=256, num_local_experts=128"),
        ({"index_topk_freq": 4}, "index_topk_freq contradicts the other keys"),
        ({"dtype": "float32"}, "dtype='float32', torch_dtype='bfloat16'"),
    ],
)
def test_contradictions_name_their_keys(changes, named):
    assert named in refused(v3(**changes))


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (rope(type="linear"), 'rope_scaling.type: expected yarn or default, got "linear"'),
        (rope(rope_type="llama3"), "rope_scaling.type='yarn', rope_scaling.rope_type='llama3'"),
        (rope(attention_factor=1.0), "rope_scaling has keys this code does not know: attention_fa"),
        (rope(type="default"), "rope_scaling has keys this code does not know: beta_fast"),
        (rope(type=...), "rope_scaling has keys this code does not know: beta_fast"),
        (rope(factor=...), "rope_scaling lacks the key 'factor'"),
        (
            rope(original_max_position_embeddings=...),
            "rope_scaling lacks the key 'original_max_position_embeddings'",
        ),
        (rope(truncate=False), "rope_scaling.truncate: expected true, got false"),
        (rope(factor=0), "rope_scaling.factor: expected more than 0, got 0.0"),
        (rope(factor=-40.0), "rope_scaling.factor: expected more than 0, got -40.0"),
        (rope(factor=None), "rope_scaling.factor: expected a finite number, got None"),
        (rope(beta_fast="32"), "rope_scaling.beta_fast: expected a finite number, got '32'"),
        (rope(mscale=float("nan")), "rope_scaling.mscale: expected a finite number, got nan"),
        (rope(mscale_all_dim=-1), "rope_scaling.mscale_all_dim: expected at least 0, got -1.0"),
        (
            rope(original_max_position_embeddings=4096.5),
            "rope_scaling.original_max_position_embeddings: expected an integer, got 4096.5",
        ),
        (v3(rope_scaling="yarn"), "rope_scaling: expected a JSON object"),
        (v3(rope_parameters=[1]), "rope_parameters: expected a JSON object"),
        (
            v3(rope_parameters={"rope_theta": 5e4}),
            "rope_theta=10000, rope_parameters.rope_theta=50000.0",
        ),
        (
            v3(rope_parameters={"rope_type": "default"}),
            "contradictory values: rope_parameters=None, rope_scaling=YarnScaling(",
        ),
    ],
)
def test_rope_is_read_as_strictly(source, named):
    assert named in refused(source)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (
            quantization(quant_method="compressed-tensors"),
            'quant_method: expected "fp8", got "comp',
        ),
        (quantization(fmt="e5m2"), 'fmt: expected "e4m3", got "e5m2"'),
        (quantization(activation_scheme="static"), 'activation_scheme: expected "dynamic"'),
        (quantization(expert_dtype="fp4"), 'expert_dtype: expected "fp8", got "fp4"'),
        (quantization(modules_to_convert=["lm_head"]), "modules_to_convert: expected null"),
        (quantization(scale_fmt="e8m0"), "scale_fmt: expected ue8m0, float or none"),
        (quantization(scale_fmt=["ue8m0"]), "scale_fmt: expected ue8m0, float or none"),
        (quantization(weight_block_size=None), "weight_block_size: expected two sizes, got None"),
        (quantization(weight_block_size=[128]), "weight_block_size: expected two sizes"),
        (quantization(weight_block_size=[128, 0]), "weight_block_size: expected two sizes"),
        (quantization(weight_block_size=[128, 1.5]), "weight_block_size: expected two sizes"),
        (quantization(weight_block_size=["128", "128"]), "weight_block_size: expected two sizes"),
        (
            quantization(modules_to_not_convert="lm_head"),
            "quantization_config.modules_to_not_convert: expected names of modules",
        ),
        (
            quantization(modules_to_not_convert=["lm_head"], ignored_layers=[]),
            "quantization_config.ignored_layers=[]",
        ),
        (quantization(ignored_layers=[3]), "expected names of modules, got [3]"),
        (quantization(bits=8), "quantization_config has keys this code does not know: bits"),
        (v3(quantization_config="fp8"), "quantization_config: expected a JSON object"),
    ],
)
def test_quantization_is_read_as_strictly(source, named):
    message = refused(source)
    assert named in message
    assert "quantization_config" in message


def test_dataclasses_check_their_fields():
    with pytest.raises(
        ValueError, match=r"rope_scaling: expected a YarnScaling, got \{'factor': 4\}"
    ):
        dataclasses.replace(presets.DEEPSEEK_V3, rope_scaling={"factor": 4})
    with pytest.raises(ValueError, match="eos_token_id: expected token ids, got 1"):
        dataclasses.replace(presets.DEEPSEEK_V3, eos_token_id=1)
    with pytest.raises(ValueError, match="scale_fmt: expected one of float32, ue8m0; got 'float'"):
        BlockQuantization(scale_fmt="float")
    with pytest.raises(ValueError, match="scale_suffix: expected a string, got None"):
        BlockQuantization(scale_suffix=None)  # pyright: ignore[reportArgumentType]


def test_configurations_are_static_arguments():
    same = ModelConfig.from_hf(V3)
    assert hash(same) == hash(presets.DEEPSEEK_V3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        same.hidden_size = 1  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    "key",
    [
        "num_hidden_layers",
        "num_nextn_predict_layers",
        "n_routed_experts",
        "max_position_embeddings",
    ],
)
@pytest.mark.parametrize("size", [10**9, 10**30])
def test_absurd_sizes(key, size):
    """Absurd sizes are refused before a table is made, which would take all memory."""
    published = presets.get("deepseek-v3").to_hf()
    with pytest.raises(ValueError, match=rf"must not .*{key}={size}"):
        ModelConfig.from_hf({**published, key: size, "layer_types": None})


def test_published_sizes_are_far_from_absurd():
    for config in map(presets.get, presets.PRESETS):
        larger = dataclasses.replace(config, num_hidden_layers=3 * config.num_hidden_layers)
        dataclasses.replace(larger, max_position_embeddings=2**24)
