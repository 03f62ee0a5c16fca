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
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dsv3_jax.field_checks import check_choice, is_int
from dsv3_jax.quantization import BlockQuantization, Quantization
from dsv3_jax.yarn import YarnScaling

# Keys that describe the file, its training run or transformers itself, and never the forward pass.
_BOILERPLATE = """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash
    _experts_implementation _experts_implementation_internal _name_or_path add_cross_attention
    architectures auto_map aux_loss_alpha bad_words_ids begin_suppress_tokens
    chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty
    do_sample early_stopping encoder_no_repeat_ngram_size ep_size
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    gradient_checkpointing id2label is_decoder is_encoder_decoder label2id length_penalty
    max_length min_length no_repeat_ngram_size num_beam_groups num_beams num_labels
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
    "rope_interleave": ((True,), "rope pairs that are not interleaved"),
    "tie_word_embeddings": ((False,), "an LM head tied to the embedding"),
}
"""Accepted values of each fixed key, and the feature that other values would ask for."""

REDUNDANT = (
    "num_key_value_heads",
    "qk_head_dim",
    "head_dim",
    "scoring_func",
    "layer_types",
    "mlp_layer_types",
    "indexer_types",
    "index_topk_freq",
)
"""Keys that restate others."""

ARCHITECTURES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
}
"""Class name in transformers of each ``model_type``."""

MODEL_TYPES = tuple(ARCHITECTURES)

# Values that the absence or null of a key stands for.
_DEFAULTS = {
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 0,
    "num_nextn_predict_layers": 0,
}


class ParsedConfig(NamedTuple):
    """Content of a config.json."""

    values: dict[str, Any]
    """Field values of the configuration. Their types and ranges are not checked yet."""
    redundant: dict[str, Any]
    """Values of the redundant keys; None for absent ones."""


def parse(
    source: Mapping[str, Any] | str | os.PathLike[str], fields: Iterable[dataclasses.Field[Any]]
) -> ParsedConfig:
    """Parses a config.json.

    Args:
      source: the parsed JSON object, the file, or the directory that contains it.
      fields: fields of the configuration class.

    Raises:
      ValueError: a required key is missing, a key is unknown, a key has a value that is not
        implemented, or synonyms contradict each other.
    """
    raw = dict(source) if isinstance(source, Mapping) else read_json(Path(source))
    keys = {k: v for k, v in raw.items() if k not in BOILERPLATE}
    # model_type is checked first: for another architecture no other error would be helpful.
    values: dict[str, Any] = {"model_type": _pop(keys, "model_type")}
    check_choice("model_type", values["model_type"], MODEL_TYPES)
    for name, (accepted, feature) in FIXED.items():
        if (value := keys.pop(name, accepted[0])) not in accepted:
            raise ValueError(
                f"{name}: {feature} is not implemented; "
                f"expected {as_json(accepted[0])}, got {as_json(value)}"
            )
    redundant = {name: keys.pop(name, None) for name in REDUNDANT}
    values["rope_theta"], values["rope_scaling"] = _pop_rope(keys)
    values["topk_method"] = _pop_topk_method(keys, values["model_type"])
    values["quantization"] = _pop_quantization(keys)
    eos = _pop(keys, "eos_token_id")
    values["eos_token_id"] = tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
    dtype = _agreed({name: keys.pop(name, None) for name in ("dtype", "torch_dtype")})
    values["dtype"] = "bfloat16" if dtype is None else dtype
    if values["model_type"] == "glm_moe_dsa":  # transformers writes no key for it
        keys.setdefault("indexer_rope_interleave", True)
    for name, default in _DEFAULTS.items():
        value = keys.pop(name, None)
        values[name] = default if value is None else value
    for field in fields:
        if field.name in keys:
            value = keys.pop(field.name)
            values[field.name] = _number(value) if field.type == "float" else value
        elif field.name not in values and field.default is dataclasses.MISSING:
            raise ValueError(f"config.json lacks the key {field.name!r}")
    if keys:
        listed = ", ".join(f"{k}={as_json(v)}" for k, v in sorted(keys.items()))
        raise ValueError(f"config.json has keys this code does not know: {listed}")
    return ParsedConfig(values, redundant)


def check_redundant(redundant: Mapping[str, Any], accepted: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises ValueError if a redundant key contradicts the keys that it restates.

    Args:
      redundant: as in :class:`ParsedConfig`.
      accepted: values of each redundant key that agree with the other keys.
    """
    for name, value in redundant.items():
        if value is not None and value not in accepted[name]:
            raise ValueError(
                f"{name} contradicts the other keys: expected {accepted[name][0]}, got {value!r}"
            )


def write(values: Mapping[str, Any], scoring_func: str) -> dict[str, Any]:
    """Returns the config.json with these field values in the published form, with sorted keys.

    Raises:
      ValueError: no key can express the quantization: integer weights, or an unpublished
        ``scale_suffix``.
    """
    nested = ("dtype", "quantization", "rope_scaling", "eos_token_id")
    out = {
        name: value
        for name, value in values.items()
        if name not in nested and not (name.startswith("index") and value in (None, False))
    }
    eos, rope_scaling = values["eos_token_id"], values["rope_scaling"]
    out["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos)
    out["scoring_func"] = scoring_func
    out["torch_dtype"] = values["dtype"]
    out["rope_scaling"] = rope_scaling and {"type": "yarn", **dataclasses.asdict(rope_scaling)}
    out["num_key_value_heads"] = values["num_attention_heads"]
    out["architectures"] = [ARCHITECTURES[values["model_type"]]]
    out |= {name: accepted[0] for name, (accepted, _) in FIXED.items() if name != "mlp_bias"}
    if values["quantization"] is not None:
        out["quantization_config"] = _write_quantization(values["quantization"])
    return dict(sorted(out.items()))


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file, or from the config.json in a directory.

    Raises:
      ValueError: there is no such file, or it does not contain a JSON object.
    """
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"expected a config.json, found none at {path}")
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    return _object(str(path), parsed)


def as_json(value: Any) -> str:
    """Returns ``value`` as JSON text, for error messages."""
    return json.dumps(value, default=repr)


def _object(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise ValueError(f"{name}: expected a JSON object, got {as_json(value)}")


def _pop(keys: dict[str, Any], name: str) -> Any:
    """Removes and returns a required key."""
    if (value := keys.pop(name, None)) is None:
        raise ValueError(f"config.json lacks the key {name!r}")
    return value


def _number(value: Any) -> Any:
    """Converts integers to float, because JSON writes 1e4 and 10000 alike.

    Values that are not numbers are returned unchanged; the configuration refuses them.
    """
    return float(value) if is_int(value) else value


def _agreed(synonyms: Mapping[str, Any]) -> Any:
    """Returns the common value of synonymous keys, None if all are None.

    Raises:
      ValueError: two keys have different values.
    """
    given = {name: value for name, value in synonyms.items() if value is not None}
    first, *others = given.values() or (None,)
    if any(other != first for other in others):
        raise ValueError(
            "contradictory values: "
            + ", ".join(f"{name}={value!r}" for name, value in given.items())
        )
    return first


def _pop_topk_method(keys: dict[str, Any], model_type: str) -> Any:
    """Removes and returns the routing method.

    transformers omits the key for V3, which has only one method. V2 has two and needs the key.
    """
    if model_type == "deepseek_v2":
        return _pop(keys, "topk_method")
    value = keys.pop("topk_method", None)
    return "noaux_tc" if value is None else value


def _pop_rope(keys: dict[str, Any]) -> tuple[Any, YarnScaling | None]:
    """Removes the rope keys and returns theta and scaling.

    Published files have ``rope_theta`` and ``rope_scaling``; transformers 5 writes one key,
    ``rope_parameters``. Both forms may be present if they agree.
    """
    thetas = {"rope_theta": keys.pop("rope_theta", None)}
    scalings: dict[str, YarnScaling | None] = {}
    for name in ("rope_parameters", "rope_scaling"):
        if (value := keys.pop(name, None)) is None:
            continue
        nested = _object(name, value)
        thetas[f"{name}.rope_theta"] = nested.pop("rope_theta", None)
        if nested:
            scalings[name] = _yarn(name, nested)
    if (theta := _agreed(thetas)) is None:
        raise ValueError("config.json lacks the key 'rope_theta'")
    if len(scalings) == 2 and scalings["rope_scaling"] != scalings["rope_parameters"]:
        listed = ", ".join(f"{name}={scaling}" for name, scaling in scalings.items())
        raise ValueError(f"contradictory values: {listed}")
    return _number(theta), next(iter(scalings.values()), None)


def _yarn(name: str, nested: dict[str, Any]) -> YarnScaling | None:
    """Returns the scaling that a nested object under key ``name`` describes."""
    kind = _agreed({f"{name}.{key}": nested.pop(key, None) for key in ("type", "rope_type")})
    if kind not in ("yarn", "default", None):
        raise ValueError(f"{name}.type: expected yarn or default, got {as_json(kind)}")
    fields = dataclasses.fields(YarnScaling) if kind == "yarn" else ()
    if unknown := sorted(set(nested) - {field.name for field in fields}):
        raise ValueError(f"{name} has keys this code does not know: {', '.join(unknown)}")
    if kind != "yarn":
        return None
    values = {}
    for field in fields:
        if field.name in nested:
            value = nested[field.name]
            values[field.name] = _number(value) if field.type == "float" else value
        elif field.default is dataclasses.MISSING:
            raise ValueError(f"{name} lacks the key {field.name!r}")
    return YarnScaling(**values)


# Accepted values of those keys of quantization_config that only restate "block-scaled e4m3". Which
# modules stay in bfloat16 follows from the tensors themselves.
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
        if (value := nested.pop(name, None)) not in accepted:
            raise ValueError(
                f"quantization_config.{name}: expected {as_json(accepted[0])}, got {as_json(value)}"
            )
    block = nested.pop("weight_block_size", None)
    scale_fmt = nested.pop("scale_fmt", None)
    if isinstance(scale_fmt, (list, dict)) or scale_fmt not in _SCALE_FMT:
        raise ValueError(
            "quantization_config.scale_fmt: expected ue8m0, float or none, got"
            f" {as_json(scale_fmt)}"
        )
    for name in ("modules_to_not_convert", "dequantize"):
        nested.pop(name, None)
    if nested:
        raise ValueError(
            f"quantization_config has keys this code does not know: {', '.join(sorted(nested))}"
        )
    block = tuple(block) if isinstance(block, (list, tuple)) else block
    return BlockQuantization(block, _SCALE_FMT[scale_fmt])  # the class checks the block


def _write_quantization(quantization: Quantization) -> dict[str, Any]:
    if not isinstance(quantization, BlockQuantization):
        raise ValueError(
            f"config.json has no key for integer weights; expected float8 or none, "
            f"got {quantization}"
        )
    published = BlockQuantization().scale_suffix
    if quantization.scale_suffix != published:
        raise ValueError(
            f"scale_suffix: config.json has no key for it; expected {published!r}, "
            f"got {quantization.scale_suffix!r}"
        )
    out = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(quantization.weight_block_size),
    }
    return out | ({"scale_fmt": "ue8m0"} if quantization.scale_fmt == "ue8m0" else {})
