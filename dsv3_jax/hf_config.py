"""Reader and writer of config.json for the DeepSeek-V2/V3 family.

The module translates between a Hugging Face config.json and the field values of
:class:`~dsv3_jax.config.ModelConfig`. It knows no configuration class, so that only ``config``
imports this module and not the reverse. Another family of models gets a reader of its own.

Every key belongs to one of five kinds:

- a field of the configuration, under the same name;
- boilerplate, which never influences the forward pass and is ignored;
- fixed: the code implements only one value, and others are refused;
- redundant: the key restates other keys and must agree with them;
- a nested object: rope and quantization.

Any other key is refused, because its effect is unknown.

A key may be absent if no shape depends on it and transformers has a default; the value is then that
of transformers for the ``model_type``. An absent shape is refused: transformers would take that of
one published model. No token is assumed to be BOS or EOS, because the default ids of transformers
are ordinary tokens in some vocabularies; :mod:`dsv3_jax.generation_config` looks in other files.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dsv3_jax.field_checks import (
    agreed,
    as_float,
    as_json,
    check_accepted,
    check_choice,
    refuse_unknown,
)
from dsv3_jax.quantization import BlockQuantization, Quantization
from dsv3_jax.yarn import YarnScaling, read_yarn, write_yarn

# Keys that describe the file, its training run or transformers itself, and never the forward pass.
# index_skip_topk_offset has an effect only together with an index_topk_freq that is refused.
_BOILERPLATE = """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash
    _experts_implementation _experts_implementation_internal _name_or_path add_cross_attention
    architectures auto_map aux_loss_alpha bad_words_ids begin_suppress_tokens
    chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty
    do_sample early_stopping encoder_no_repeat_ngram_size ep_size
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    gradient_checkpointing id2label index_skip_topk_offset is_decoder is_encoder_decoder label2id
    length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams num_labels
    num_return_sequences output_attentions output_hidden_states output_router_logits
    output_scores pad_token_id prefix pretraining_tp problem_type pruned_heads
    remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    router_aux_loss_coef sep_token_id seq_aux suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torchscript
    transformers_version typical_p use_bfloat16 use_cache
    """
BOILERPLATE = frozenset(_BOILERPLATE.split())

FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu",), "activation"),
    "attention_bias": ((False,), "attention projections with bias"),
    "mlp_bias": ((False,), "MLP projections with bias"),
    "attention_dropout": ((0.0, None), "dropout on attention weights"),
    "moe_layer_freq": ((1,), "MoE layers that are not contiguous"),
    "partial_rotary_factor": ((1.0, None), "rope of a part of the rope dimensions"),
    "per_layer_config": ((None, {}), "layers with settings of their own"),
    "rope_interleave": ((True,), "rope pairs that are not interleaved"),
    "tie_word_embeddings": ((False,), "an LM head tied to the embedding"),
}
"""Accepted values of each fixed key, and the feature that other values would ask for."""

_UNWRITTEN = ("mlp_bias", "partial_rotary_factor", "per_layer_config")

_REDUNDANT = """
    num_key_value_heads qk_head_dim head_dim scoring_func layer_types mlp_layer_types
    mtp_layer_types mtp_mlp_layer_types indexer_types index_topk_freq index_topk_pattern
    """
REDUNDANT = tuple(_REDUNDANT.split())  # keys that restate others

ARCHITECTURES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
}
"""Class name in transformers of each ``model_type``."""

MODEL_TYPES = tuple(ARCHITECTURES)

_V3_DEFAULTS: dict[str, Any] = {
    "n_group": 8,
    "topk_group": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
}

DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 2_048,
    },
    "deepseek_v3": _V3_DEFAULTS | {"max_position_embeddings": 4_096},
    "deepseek_v32": _V3_DEFAULTS | {"max_position_embeddings": 163_840},
    "glm_moe_dsa": _V3_DEFAULTS
    | {"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5, "max_position_embeddings": 202_752},
}
DEFAULTS["kimi_k2"] = DEFAULTS["deepseek_v3"]  # its code is DeepSeek-V3's
"""Values of absent keys, by ``model_type``. MTP layers are not assumed: transformers counts one in
DeepSeek-V3, and appends it only on request."""

# Values of keys that are null.
_NULLS = {"n_group": 1, "topk_group": 1, "n_shared_experts": 0, "num_nextn_predict_layers": 0}

# Other names of a key in transformers, and the values of model_type that have them.
_SYNONYMS = {
    "num_experts": ("n_routed_experts", ("deepseek_v2", "deepseek_v32", "glm_moe_dsa")),
    "num_local_experts": (
        "n_routed_experts",
        ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_k2"),
    ),
    "num_mtp_layers": ("num_nextn_predict_layers", ("deepseek_v3", "kimi_k2")),
}

# Reasons why other keys than shapes have no default.
_NO_DEFAULT = {
    "model_type": "expected the family of the model",
    "topk_method": "transformers and DeepSeek's code have different defaults",
    "num_experts_per_tok": "transformers has no default",
    "index_topk": "it must match the indexer's training",
}


class ParsedConfig(NamedTuple):
    """Content of a config.json."""

    values: dict[str, Any]  # fields of the configuration, with types and ranges not checked yet
    redundant: dict[str, Any]  # values of the redundant keys; None for absent ones


def parse(
    source: Mapping[str, Any] | str | os.PathLike[str], fields: Iterable[dataclasses.Field[Any]]
) -> ParsedConfig:
    """Parses a config.json, given as JSON object, file, or directory that contains it, for a
    configuration class with these ``fields``.

    Raises:
      ValueError: a required key is missing, a key is unknown, a key has a value that is not
        implemented, or synonyms contradict each other.
    """
    raw = dict(source) if isinstance(source, Mapping) else read_json(Path(source))
    keys = {k: v for k, v in raw.items() if k not in BOILERPLATE}
    # model_type is checked first: for another architecture no other error would be helpful.
    values: dict[str, Any] = {"model_type": _pop(keys, "model_type")}
    check_choice("model_type", values["model_type"], MODEL_TYPES)
    _rename_synonyms(keys, values["model_type"])
    redundant = {name: keys.pop(name, None) for name in REDUNDANT}
    if isinstance(keys.get("moe_layer_freq"), list):
        redundant["moe_layer_freq"] = keys.pop("moe_layer_freq")
    for name, (accepted, feature) in FIXED.items():
        value = keys.pop(name, accepted[0])
        check_accepted(name, value, accepted, f"{feature} is not implemented; ")
    theta, values["rope_scaling"] = _pop_rope(keys)
    if theta is not None:
        keys["rope_theta"] = theta
    values["topk_method"] = _pop_topk_method(keys, values["model_type"])
    values["quantization"] = _pop_quantization(keys)
    values["bos_token_id"] = keys.pop("bos_token_id", None)
    values["eos_token_id"] = _token_ids(keys.pop("eos_token_id", None))
    dtype = agreed({name: keys.pop(name, None) for name in ("dtype", "torch_dtype")})
    values["dtype"] = "bfloat16" if dtype is None else dtype
    if values["model_type"] == "glm_moe_dsa":  # transformers writes no key for it
        keys.setdefault("indexer_rope_interleave", True)
    _add_absent(keys, redundant, values["model_type"])
    for field in fields:
        if field.name in keys:
            value = keys.pop(field.name)
            values[field.name] = as_float(value) if field.type == "float" else value
        elif field.name not in values and field.default is dataclasses.MISSING:
            raise _lacks(field.name)
    refuse_unknown("config.json", [f"{k}={as_json(v)}" for k, v in sorted(keys.items())])
    return ParsedConfig(values, redundant)


def check_redundant(redundant: Mapping[str, Any], accepted: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises ValueError if a redundant key, as in :class:`ParsedConfig`, has none of the
    ``accepted`` values, which agree with the keys that it restates."""
    for name, value in redundant.items():
        if value is not None and value not in accepted[name]:
            raise ValueError(
                f"{name} contradicts the other keys: expected {accepted[name][0]}, got {value!r}"
            )


def write(values: Mapping[str, Any], scoring_func: str) -> dict[str, Any]:
    """Returns the config.json with these field values in the published form, with sorted keys.
    Raises ValueError for a quantization that no key expresses: integers, an unpublished
    ``scale_suffix``."""
    nested = ("dtype", "quantization", "rope_scaling", "eos_token_id")
    out = {
        name: value
        for name, value in values.items()
        if name not in nested and not (name.startswith("index") and value in (None, False))
    }
    eos, scaling = values["eos_token_id"], values["rope_scaling"]
    out["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos) or None
    out["scoring_func"] = scoring_func
    out["torch_dtype"] = values["dtype"]
    out["rope_scaling"] = scaling and write_yarn(scaling)
    out["num_key_value_heads"] = values["num_attention_heads"]
    out["architectures"] = [ARCHITECTURES[values["model_type"]]]
    out |= {name: accepted[0] for name, (accepted, _) in FIXED.items() if name not in _UNWRITTEN}
    if values["quantization"] is not None:
        out["quantization_config"] = _write_quantization(values["quantization"])
    return dict(sorted(out.items()))


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file, or from the config.json in a directory. Raises ValueError if
    there is no such file, or it contains anything else."""
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"expected a config.json, found none at {path}")
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    return _object(str(path), parsed)


def _object(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise ValueError(f"{name}: expected a JSON object, got {as_json(value)}")


def _pop(keys: dict[str, Any], name: str) -> Any:
    """Removes and returns a required key."""
    if (value := keys.pop(name, None)) is None:
        raise _lacks(name)
    return value


def _lacks(name: str) -> ValueError:
    reason = _NO_DEFAULT.get(name, "the model's shape has no default")
    return ValueError(f"config.json lacks the key {name!r}: {reason}")


def _rename_synonyms(keys: dict[str, Any], model_type: str) -> None:
    """Replaces the names that only transformers uses."""
    for synonym, (name, model_types) in _SYNONYMS.items():
        if synonym in keys and model_type in model_types:
            both = {each: keys.pop(each, None) for each in (name, synonym)}
            keys[name] = agreed(both)


def _add_absent(keys: dict[str, Any], redundant: Mapping[str, Any], model_type: str) -> None:
    """Adds the keys that other keys or the family imply, and replaces null by its meaning."""
    if "first_k_dense_replace" not in keys:
        kinds = redundant["mlp_layer_types"] or redundant.get("moe_layer_freq")
        if isinstance(kinds, list):
            is_dense = [kind in ("dense", 0) for kind in kinds]
            keys["first_k_dense_replace"] = [*is_dense, False].index(False)
    for name, value in _NULLS.items():
        if name in keys and keys[name] is None:
            keys[name] = value
    defaults = DEFAULTS[model_type]
    if keys.get("n_group") == 1:  # the number of selected groups is then no choice
        defaults = {**defaults, "topk_group": 1}
    for name, value in defaults.items():
        keys.setdefault(name, value)


def _token_ids(value: Any) -> tuple[Any, ...]:
    """Returns EOS ids as a tuple, which is empty if config.json has none."""
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if not ids:
        raise ValueError(f"eos_token_id: expected token ids, got {as_json(value)}")
    return ids


def _pop_topk_method(keys: dict[str, Any], model_type: str) -> Any:
    """Removes and returns the routing method. transformers omits it for V3, which has only one."""
    if model_type == "deepseek_v2":
        return _pop(keys, "topk_method")
    value = keys.pop("topk_method", None)
    return "noaux_tc" if value is None else value


def _pop_rope(keys: dict[str, Any]) -> tuple[Any, YarnScaling | None]:
    """Removes the rope keys and returns theta, None if it is absent, and scaling. Published files
    have ``rope_theta`` and ``rope_scaling``; transformers 5 writes ``rope_parameters``. Both may be
    present if they agree."""
    thetas = {"rope_theta": keys.pop("rope_theta", None)}
    scalings: dict[str, YarnScaling | None] = {}
    for name in ("rope_parameters", "rope_scaling"):
        if (value := keys.pop(name, None)) is None:
            continue
        nested = _object(name, value)
        thetas[f"{name}.rope_theta"] = nested.pop("rope_theta", None)
        if nested:
            scalings[name] = read_yarn(name, nested)
    if len(scalings) == 2 and scalings["rope_scaling"] != scalings["rope_parameters"]:
        listed = ", ".join(f"{name}={scaling}" for name, scaling in scalings.items())
        raise ValueError(f"contradictory values: {listed}")
    return as_float(agreed(thetas)), next(iter(scalings.values()), None)


# Accepted values of those keys of quantization_config that only restate "block-scaled e4m3".
_FP8_ONLY: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", None),
    "activation_scheme": ("dynamic", None),
    "expert_dtype": ("fp8", None),
    "modules_to_convert": (None, []),
}
_SCALE_FMT = {None: "float32", "float": "float32", "float32": "float32", "ue8m0": "ue8m0"}


def _pop_quantization(keys: dict[str, Any]) -> BlockQuantization | None:
    """Removes quantization_config and returns the weight format that it describes."""
    value = keys.pop("quantization_config", None)
    if value is None:
        return None
    nested = _object("quantization_config", value)
    for name, accepted in _FP8_ONLY.items():
        check_accepted(f"quantization_config.{name}", nested.pop(name, None), accepted)
    block = nested.pop("weight_block_size", None)
    scale_fmt = nested.pop("scale_fmt", None)
    if isinstance(scale_fmt, (list, dict)) or scale_fmt not in _SCALE_FMT:
        got = as_json(scale_fmt)
        raise ValueError(f"quantization_config.scale_fmt: expected ue8m0, float or none, got {got}")
    nested.pop("dequantize", None)
    names = ("modules_to_not_convert", "ignored_layers")
    plain = agreed({f"quantization_config.{name}": nested.pop(name, None) for name in names})
    is_list = isinstance(plain, list) and all(isinstance(name, str) and name for name in plain)
    if plain is not None and not is_list:
        raise ValueError(
            f"quantization_config.{names[0]}: expected names of modules, got {as_json(plain):.200}"
        )
    refuse_unknown("quantization_config", sorted(nested))
    block = tuple(block) if isinstance(block, (list, tuple)) else block
    return BlockQuantization(  # the class checks the block
        block, _SCALE_FMT[scale_fmt], modules_to_not_convert=tuple(dict.fromkeys(plain or ()))
    )


def _write_quantization(quantization: Quantization) -> dict[str, Any]:
    if not isinstance(quantization, BlockQuantization):
        expected = "expected float8 or none"
        raise ValueError(
            f"config.json has no key for integer weights; {expected}, got {quantization}"
        )
    published, suffix = BlockQuantization().scale_suffix, quantization.scale_suffix
    if suffix != published:
        expected = f"expected {published!r}, got {suffix!r}"
        raise ValueError(f"scale_suffix: config.json has no key for it; {expected}")
    out = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(quantization.weight_block_size),
    }
    if quantization.modules_to_not_convert:
        out["modules_to_not_convert"] = list(quantization.modules_to_not_convert)
    return out | ({"scale_fmt": "ue8m0"} if quantization.scale_fmt == "ue8m0" else {})
