"""config.json as Hugging Face repositories carry it, read strictly and written as published.

Every key is one of five kinds: a field of :class:`~dsv3_jax.config.ModelConfig`; boilerplate that
never reaches the forward pass; fixed, because this code computes one value of it only; derived,
because it restates other keys; or a dictionary of its own (rope, quantization). Any other key is
refused: what it would change is unknown.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dsv3_jax.config import (
    MODEL_TYPES,
    BlockQuantization,
    ModelConfig,
    Quantization,
    YarnScaling,
    check_choice,
)

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

# Keys that must say what this code computes: (accepted values, what the key would change).
FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu",), "activation"),
    "attention_bias": ((False,), "attention projections with bias"),
    "mlp_bias": ((False,), "MLP projections with bias"),
    "attention_dropout": ((0.0, None), "dropout on attention weights"),
    "moe_layer_freq": ((1,), "MoE layers that are not contiguous"),
    "rope_interleave": ((True,), "rope pairs that are not interleaved"),
    "tie_word_embeddings": ((False,), "an LM head tied to the embedding"),
}

# Keys that only restate others: the values that agree. transformers calls the rope width alone
# "head_dim", and spells out what each layer of V3.2 holds.
DERIVED: dict[str, Callable[[ModelConfig], tuple[Any, ...]]] = {
    "num_key_value_heads": lambda c: (c.num_attention_heads,),
    "qk_head_dim": lambda c: (c.qk_head_dim,),
    "head_dim": lambda c: (c.qk_rope_head_dim, c.qk_head_dim, c.v_head_dim),
    "scoring_func": lambda c: (c.scoring_func,),
    "layer_types": lambda c: (
        ["indexed_attention" if c.has_indexer else "full_attention"] * c.num_hidden_layers,
    ),
    "mlp_layer_types": lambda c: (
        ["dense"] * c.first_k_dense_replace + ["sparse"] * c.num_moe_layers,
    ),
}

ARCHITECTURES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
}

# Keys whose absence or null means this value.
_ABSENT_MEANS = {
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 0,
    "num_nextn_predict_layers": 0,
}


def read(source: Mapping[str, Any] | str | os.PathLike[str]) -> ModelConfig:
    """The configuration that a parsed config.json, the file or its directory describes.

    Raises:
      ValueError: a needed key is missing, a key or value is unknown, or values contradict.
    """
    raw = dict(source) if isinstance(source, Mapping) else _read_json(Path(source))
    keys = {k: v for k, v in raw.items() if k not in BOILERPLATE}
    # Before anything else: of another architecture's file, no other complaint is worth reading.
    values: dict[str, Any] = {"model_type": _pop(keys, "model_type")}
    check_choice("model_type", values["model_type"], MODEL_TYPES)
    for name, (accepted, meaning) in FIXED.items():
        if (value := keys.pop(name, accepted[0])) not in accepted:
            raise ValueError(
                f"{name}: {meaning} is not implemented; "
                f"expected {_show(accepted[0])}, got {_show(value)}"
            )
    stated = {name: keys.pop(name, None) for name in DERIVED}
    values["rope_theta"], values["rope_scaling"] = _pop_rope(keys)
    values["topk_method"] = _pop_topk_method(keys, values["model_type"])
    values["quantization"] = _pop_quantization(keys)
    eos = _pop(keys, "eos_token_id")
    values["eos_token_id"] = tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
    dtype = _agree({name: keys.pop(name, None) for name in ("dtype", "torch_dtype")})
    values["dtype"] = "bfloat16" if dtype is None else dtype
    for name, default in _ABSENT_MEANS.items():
        value = keys.pop(name, None)
        values[name] = default if value is None else value
    for field in dataclasses.fields(ModelConfig):
        if field.name in keys:
            value = keys.pop(field.name)
            values[field.name] = _number(value) if field.type == "float" else value
        elif field.name not in values and field.default is dataclasses.MISSING:
            raise ValueError(f"config.json lacks the key {field.name!r}")
    if keys:
        listed = ", ".join(f"{k}={_show(v)}" for k, v in sorted(keys.items()))
        raise ValueError(f"config.json has keys this code does not know: {listed}")
    config = ModelConfig(**values)
    for name, value in stated.items():
        if value is not None and value not in (wanted := DERIVED[name](config)):
            raise ValueError(
                f"{name} contradicts the other keys: expected {wanted[0]}, got {value!r}"
            )
    return config


def with_end_tokens(config: ModelConfig, directory: Path) -> ModelConfig:
    """The config with the end tokens of a generation_config.json in the directory, if it names any.

    transformers stops at these and not at those of config.json: instruct models share the
    config.json of their base model and end their turns with another token. Nothing else is read:
    sampling settings are the caller's.

    Raises:
      ValueError: the file is no JSON object, or its eos_token_id are not ids of the vocabulary.
    """
    path = directory / "generation_config.json"
    if not path.is_file():
        return config
    eos = _read_json(path).get("eos_token_id")
    if eos is None:
        return config
    ids = tuple(eos) if isinstance(eos, list) else (eos,)
    known = range(config.vocab_size)
    if not ids or any(isinstance(i, bool) or not isinstance(i, int) or i not in known for i in ids):
        raise ValueError(
            f"{path}: eos_token_id: expected token ids from 0 to {config.vocab_size - 1},"
            f" got {_show(eos)}"
        )
    return dataclasses.replace(config, eos_token_id=tuple(dict.fromkeys(ids)))


def write(config: ModelConfig) -> dict[str, Any]:
    """The config.json of ``config`` in the published form: keys sorted, inverse of :func:`read`.

    Raises:
      ValueError: ``quantization.scale_suffix`` is not the published one, which no key states.
    """
    out = {
        f.name: getattr(config, f.name)
        for f in dataclasses.fields(config)
        if f.name not in ("dtype", "quantization", "rope_scaling", "eos_token_id")
        and not (f.name.startswith("index_") and getattr(config, f.name) is None)
    }
    eos = config.eos_token_id
    out["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos)
    out["scoring_func"] = config.scoring_func
    out["torch_dtype"] = config.dtype
    out["rope_scaling"] = config.rope_scaling and {
        "type": "yarn",
        **dataclasses.asdict(config.rope_scaling),
    }
    out["num_key_value_heads"] = config.num_attention_heads
    out["architectures"] = [ARCHITECTURES[config.model_type]]
    out |= {name: accepted[0] for name, (accepted, _) in FIXED.items() if name != "mlp_bias"}
    if config.quantization is not None:
        out["quantization_config"] = _write_quantization(config.quantization)
    return dict(sorted(out.items()))


def _read_json(path: Path) -> dict[str, Any]:
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
    raise ValueError(f"{name}: expected a JSON object, got {_show(value)}")


def _show(value: Any) -> str:
    return json.dumps(value, default=repr)


def _pop(keys: dict[str, Any], name: str) -> Any:
    if (value := keys.pop(name, None)) is None:
        raise ValueError(f"config.json lacks the key {name!r}")
    return value


def _number(value: Any) -> Any:
    """JSON writes 1e4 and 10000 alike; anything but a number is left for validation to refuse."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _agree(given: Mapping[str, Any]) -> Any:
    """The value of synonyms that may be given once or several times, but then equal."""
    said = {name: value for name, value in given.items() if value is not None}
    first, *others = said.values() or (None,)
    if any(other != first for other in others):
        raise ValueError(
            "contradictory values: "
            + ", ".join(f"{name}={value!r}" for name, value in said.items())
        )
    return first


def _pop_topk_method(keys: dict[str, Any], model_type: str) -> Any:
    """transformers omits the keys of V3's only method; its V2 files name the method alone."""
    if model_type == "deepseek_v2":
        return _pop(keys, "topk_method")
    stated = keys.pop("topk_method", None)
    return "noaux_tc" if stated is None else stated


def _pop_rope(keys: dict[str, Any]) -> tuple[Any, YarnScaling | None]:
    """(theta, scaling) of the published pair of keys, of transformers 5's one key, or of both."""
    thetas = {"rope_theta": keys.pop("rope_theta", None)}
    scalings: dict[str, YarnScaling | None] = {}
    for name in ("rope_parameters", "rope_scaling"):
        if (value := keys.pop(name, None)) is None:
            continue
        given = _object(name, value)
        thetas[f"{name}.rope_theta"] = given.pop("rope_theta", None)
        if given:
            scalings[name] = _yarn(name, given)
    if (theta := _agree(thetas)) is None:
        raise ValueError("config.json lacks the key 'rope_theta'")
    if len(scalings) == 2 and scalings["rope_scaling"] != scalings["rope_parameters"]:
        listed = ", ".join(f"{name}={scaling}" for name, scaling in scalings.items())
        raise ValueError(f"contradictory values: {listed}")
    return _number(theta), next(iter(scalings.values()), None)


def _yarn(name: str, given: dict[str, Any]) -> YarnScaling | None:
    kind = _agree({f"{name}.{key}": given.pop(key, None) for key in ("type", "rope_type")})
    if kind not in ("yarn", "default", None):
        raise ValueError(f"{name}.type: expected yarn or default, got {_show(kind)}")
    fields = dataclasses.fields(YarnScaling) if kind == "yarn" else ()
    if unknown := sorted(set(given) - {field.name for field in fields}):
        raise ValueError(f"{name} has keys this code does not know: {', '.join(unknown)}")
    if kind != "yarn":
        return None
    values = {}
    for field in fields:
        if field.name in given:
            value = given[field.name]
            values[field.name] = _number(value) if field.type == "float" else value
        elif field.default is dataclasses.MISSING:
            raise ValueError(f"{name} lacks the key {field.name!r}")
    return YarnScaling(**values)


# quantization_config: the accepted values of the keys that say no more than "block-scaled e4m3".
# Which modules stay in bfloat16 is visible from the tensors themselves.
_FP8_ONLY: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", None),
    "activation_scheme": ("dynamic", None),
    "expert_dtype": ("fp8", None),
    "modules_to_convert": (None, []),
}
_SCALE_FMT = {None: "float32", "float": "float32", "float32": "float32", "ue8m0": "ue8m0"}


def _pop_quantization(keys: dict[str, Any]) -> BlockQuantization | None:
    value = keys.pop("quantization_config", None)
    if value is None:
        return None
    given = _object("quantization_config", value)
    for name, accepted in _FP8_ONLY.items():
        if (value := given.pop(name, None)) not in accepted:
            raise ValueError(
                f"quantization_config.{name}: expected {_show(accepted[0])}, got {_show(value)}"
            )
    block = given.pop("weight_block_size", None)
    scale_fmt = given.pop("scale_fmt", None)
    if isinstance(scale_fmt, (list, dict)) or scale_fmt not in _SCALE_FMT:
        raise ValueError(
            f"quantization_config.scale_fmt: expected ue8m0, float or none, got {_show(scale_fmt)}"
        )
    for name in ("modules_to_not_convert", "dequantize"):
        given.pop(name, None)
    if given:
        raise ValueError(
            f"quantization_config has keys this code does not know: {', '.join(sorted(given))}"
        )
    block = tuple(block) if isinstance(block, (list, tuple)) else block
    return BlockQuantization(block, _SCALE_FMT[scale_fmt])  # which checks the block


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
