"""The model's shape, read strictly from a Hugging Face config.json.

Field names are the published keys. A key that this code does not know, a value that it does not
implement, and two values that contradict each other are refused by name: a checkpoint that loads
is a checkpoint that is computed as its authors meant.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

SCORING = {"noaux_tc": "sigmoid", "greedy": "softmax", "group_limited_greedy": "softmax"}

# Keys that describe the file, its training run or transformers itself, and never the forward pass.
_BOILERPLATE = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path add_cross_attention
    architectures auto_map aux_loss_alpha bad_words_ids begin_suppress_tokens chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size ep_size exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id id2label is_decoder is_encoder_decoder label2id
    length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_router_logits output_scores
    pad_token_id prefix pretraining_tp problem_type pruned_heads remove_invalid_values
    repetition_penalty return_dict return_dict_in_generate router_aux_loss_coef sep_token_id seq_aux
    suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder
    tokenizer_class top_k top_p torchscript transformers_version typical_p use_bfloat16 use_cache
    num_labels
    """.split()
)

# Keys that must say what this code computes: (accepted values, what the key would change).
_FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "hidden_act": (("silu",), "activation"),
    "attention_bias": ((False,), "attention projections with bias"),
    "mlp_bias": ((False,), "MLP projections with bias"),
    "attention_dropout": ((0.0, None), "dropout on attention weights"),
    "moe_layer_freq": ((1,), "MoE layers that are not contiguous"),
    "rope_interleave": ((True,), "rope pairs that are not interleaved"),
    "tie_word_embeddings": ((False,), "an LM head tied to the embedding"),
}

_MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2")


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN context extension (arXiv 2309.00071) as DeepSeek parametrises it.

    ``mscale`` and ``mscale_all_dim`` follow DeepSeek's code: cos and sin are multiplied by
    ``m(mscale) / m(mscale_all_dim)`` and the softmax scale by ``m(mscale_all_dim)**2``, where
    ``m(a) = 0.1 a ln(factor) + 1``.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def magnitude(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


@dataclasses.dataclass(frozen=True)
class BlockQuantization:
    """Block-scaled fp8 weights: ``weight = fp8 * scale``, one scale a block, ceil at the edges."""

    weight_block_size: tuple[int, int] = (128, 128)
    scale_fmt: str = "float32"  # or "ue8m0": scales are powers of two
    scale_suffix: str = "_scale_inv"  # appended to the weight's name; multiplied despite its name


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of one model of the DeepSeek-V2/V3 family (keys of config.json)."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    first_k_dense_replace: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    topk_method: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_theta: float
    rope_scaling: YarnScaling | None
    max_position_embeddings: int
    rms_norm_eps: float
    bos_token_id: int
    eos_token_id: tuple[int, ...]
    initializer_range: float = 0.02
    num_nextn_predict_layers: int = 0
    index_n_heads: int | None = None  # index_*: the sparse-attention indexer of V3.2
    index_head_dim: int | None = None
    index_topk: int | None = None
    dtype: str = "bfloat16"
    quantization: BlockQuantization | None = None

    # ---- derived numbers -------------------------------------------------------------------------

    @property
    def scoring_func(self) -> str:
        """``sigmoid`` or ``softmax``; every published ``topk_method`` implies one of them."""
        return SCORING[self.topk_method]

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Width of a cached token: the normed latent, then the rotated rope key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def num_moe_layers(self) -> int:
        return self.num_hidden_layers - self.first_k_dense_replace

    @property
    def has_indexer(self) -> bool:
        return self.index_topk is not None

    @property
    def softmax_scale(self) -> float:
        """``(N + R)^-0.5``, times ``m(mscale_all_dim)^2`` under YaRN (model.py, class MLA)."""
        scale = self.qk_head_dim**-0.5
        if self.rope_scaling is not None:
            scale *= self.rope_scaling.magnitude(self.rope_scaling.mscale_all_dim) ** 2
        return scale

    # ---- validation ------------------------------------------------------------------------------

    def __post_init__(self) -> None:
        if self.model_type not in _MODEL_TYPES:
            raise ValueError(
                f"model_type: expected one of {', '.join(_MODEL_TYPES)}; got {self.model_type!r}"
            )
        if self.topk_method not in SCORING:
            raise ValueError(
                f"topk_method: expected one of {', '.join(SCORING)}; got {self.topk_method!r}"
            )
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in ("int", "int | None") and value is not None:
                if isinstance(value, bool) or not isinstance(value, int):
                    raise ValueError(f"{field.name}: expected an integer, got {value!r}")
                zero_is_fine = field.name in _MAY_BE_ZERO
                if value < 0 or (value == 0 and not zero_is_fine):
                    least = "at least 0" if zero_is_fine else "at least 1"
                    raise ValueError(f"{field.name}: expected {least}, got {value}")
        self._check(
            self.n_routed_experts % self.n_group == 0,
            "n_routed_experts must be a multiple of n_group",
            "n_routed_experts",
            "n_group",
        )
        self._check(
            self.topk_group <= self.n_group,
            "topk_group must not exceed n_group",
            "topk_group",
            "n_group",
        )
        self._check(
            self.num_experts_per_tok * self.n_group <= self.topk_group * self.n_routed_experts,
            "the kept groups hold fewer experts than a token chooses",
            "num_experts_per_tok",
            "topk_group",
            "n_group",
            "n_routed_experts",
        )
        self._check(
            self.topk_method != "noaux_tc"
            or self.n_group == 1
            or self.n_routed_experts // self.n_group >= 2,
            "noaux_tc scores a group by its two best experts and needs two in each",
            "n_routed_experts",
            "n_group",
        )
        self._check(
            self.topk_method != "greedy" or self.n_group == 1,
            "greedy routing has no groups",
            "topk_method",
            "n_group",
        )
        # Sources disagree on this one: the published V2 code scales only weights that it did not
        # normalise, DeepSeek's reference scales both. No published model has the combination.
        self._check(
            self.scoring_func == "sigmoid"
            or not self.norm_topk_prob
            or self.routed_scaling_factor == 1.0,
            "softmax routing either normalises the top-k weights or scales them",
            "norm_topk_prob",
            "routed_scaling_factor",
        )
        self._check(
            self.first_k_dense_replace <= self.num_hidden_layers,
            "more dense layers than layers",
            "first_k_dense_replace",
            "num_hidden_layers",
        )
        self._check(self.qk_rope_head_dim % 2 == 0, "rope turns pairs", "qk_rope_head_dim")
        indexer = (self.index_n_heads, self.index_head_dim, self.index_topk)
        self._check(
            all(i is None for i in indexer) == (self.model_type != "deepseek_v32")
            and (None not in indexer or not any(indexer)),
            "the indexer's three sizes come with model_type deepseek_v32 and only with it",
            "model_type",
            "index_n_heads",
            "index_head_dim",
            "index_topk",
        )

    def _check(self, holds: bool, rule: str, *names: str) -> None:
        if not holds:
            got = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
            raise ValueError(f"{rule}; got {got}")

    # ---- config.json -----------------------------------------------------------------------------

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | os.PathLike[str]) -> Self:
        """Reads a parsed config.json, the file, or the directory that holds it.

        Accepts rope both as published (``rope_theta`` with ``rope_scaling``) and as transformers 5
        writes it (``rope_parameters``).

        Raises:
          ValueError: a needed key is missing, a key or value is unknown, or values contradict.
        """
        raw = dict(source) if isinstance(source, Mapping) else _read_json(Path(source))
        keys = {k: v for k, v in raw.items() if k not in _BOILERPLATE}
        for name, (accepted, meaning) in _FIXED.items():
            if (value := keys.pop(name, accepted[0])) not in accepted:
                raise ValueError(
                    f"{name}: {meaning} is not implemented; "
                    f"expected {json.dumps(accepted[0])}, got {json.dumps(value)}"
                )
        model_type = keys.pop("model_type", None)
        if model_type is None:
            raise ValueError("config.json lacks the key 'model_type'")
        values: dict[str, Any] = {"model_type": model_type}
        values["rope_theta"], values["rope_scaling"] = _pop_rope(keys)
        values["topk_method"] = _pop_topk_method(keys, model_type)
        values["n_group"] = _pop(keys, "n_group", None) or 1
        values["topk_group"] = _pop(keys, "topk_group", None) or 1
        values["n_shared_experts"] = _pop(keys, "n_shared_experts", None) or 0
        values["num_nextn_predict_layers"] = _pop(keys, "num_nextn_predict_layers", None) or 0
        values["quantization"] = _pop_quantization(keys)
        eos = _pop(keys, "eos_token_id")
        values["eos_token_id"] = tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
        values["dtype"] = _agree(keys, "dtype", "torch_dtype") or "bfloat16"
        stated = {name: keys.pop(name, None) for name in _DERIVED}
        for field in dataclasses.fields(cls):
            if field.name in values:
                continue
            if field.name in keys:
                values[field.name] = keys.pop(field.name)
            elif field.default is dataclasses.MISSING:
                raise ValueError(f"config.json lacks the key {field.name!r}")
        if keys:
            listed = ", ".join(f"{k}={json.dumps(v)}" for k, v in sorted(keys.items()))
            raise ValueError(f"config.json has keys this code does not know: {listed}")
        config = cls(**values)
        for name, value in stated.items():
            if value is not None and value not in (wanted := _DERIVED[name](config)):
                raise ValueError(
                    f"{name} contradicts the other keys: expected {wanted[0]}, got {value!r}"
                )
        return config

    def to_hf(self) -> dict[str, Any]:
        """The config.json of this model in the published form (inverse of :meth:`from_hf`)."""
        out = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("dtype", "quantization", "rope_scaling", "eos_token_id")
            and not (f.name.startswith("index_") and getattr(self, f.name) is None)
        }
        out["scoring_func"] = self.scoring_func
        out["torch_dtype"] = self.dtype
        out["eos_token_id"] = (
            self.eos_token_id[0] if len(self.eos_token_id) == 1 else list(self.eos_token_id)
        )
        out["rope_scaling"] = self.rope_scaling and {
            "type": "yarn",
            **dataclasses.asdict(self.rope_scaling),
        }
        out["num_key_value_heads"] = self.num_attention_heads
        out["architectures"] = [_ARCHITECTURES[self.model_type]]
        out |= {name: accepted[0] for name, (accepted, _) in _FIXED.items() if name != "mlp_bias"}
        if self.quantization is not None:
            out["quantization_config"] = {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "quant_method": "fp8",
                "weight_block_size": list(self.quantization.weight_block_size),
            }
            if self.quantization.scale_fmt == "ue8m0":
                out["quantization_config"]["scale_fmt"] = "ue8m0"
        return dict(sorted(out.items()))


_ARCHITECTURES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
}

_MAY_BE_ZERO = (
    "first_k_dense_replace",
    "n_shared_experts",
    "num_nextn_predict_layers",
    "bos_token_id",
)

# Keys that only restate others. transformers calls the rope width alone "head_dim".
_DERIVED = {
    "num_key_value_heads": lambda c: (c.num_attention_heads,),
    "qk_head_dim": lambda c: (c.qk_head_dim,),
    "head_dim": lambda c: (c.qk_rope_head_dim, c.qk_head_dim, c.v_head_dim),
    "scoring_func": lambda c: (c.scoring_func,),
}

_REQUIRED = object()


def _read_json(path: Path) -> dict[str, Any]:
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"expected a config.json, found none at {path}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None


def _pop(keys: dict[str, Any], name: str, default: Any = _REQUIRED) -> Any:
    if default is _REQUIRED and keys.get(name) is None:
        raise ValueError(f"config.json lacks the key {name!r}")
    return keys.pop(name, default)


def _agree(keys: dict[str, Any], *names: str) -> Any:
    """Pops synonyms that may be given once or several times, but then equal."""
    given = {name: value for name in names if (value := keys.pop(name, None)) is not None}
    if len(set(given.values())) > 1:
        raise ValueError(
            "contradictory values: " + ", ".join(f"{name}={value!r}" for name, value in given.items())
        )
    return next(iter(given.values()), None)


def _pop_topk_method(keys: dict[str, Any], model_type: str) -> str:
    """transformers omits the keys of V3's only method; its V2 files name the method alone."""
    stated = keys.pop("topk_method", None)
    if stated is not None:
        return stated
    if model_type == "deepseek_v2":
        raise ValueError("config.json lacks the key 'topk_method'")
    return "noaux_tc"


def _pop_rope(keys: dict[str, Any]) -> tuple[float, YarnScaling | None]:
    parameters = dict(keys.pop("rope_parameters", None) or {})
    legacy = keys.pop("rope_scaling", None)
    theta = _agree(
        {"rope_theta": keys.pop("rope_theta", None), "rope_parameters": parameters.pop("rope_theta", None)},
        "rope_theta",
        "rope_parameters",
    )
    if theta is None:
        raise ValueError("config.json lacks the key 'rope_theta'")
    scalings = [_yarn(dict(s)) for s in (parameters, legacy) if s]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise ValueError(f"rope_scaling={legacy} contradicts rope_parameters={parameters}")
    return float(theta), scalings[0] if scalings else None


def _yarn(scaling: dict[str, Any]) -> YarnScaling | None:
    kind = _agree(scaling, "type", "rope_type") or "default"
    if kind == "default":
        known: set[str] = set()
    elif kind == "yarn":
        known = {f.name for f in dataclasses.fields(YarnScaling)}
    else:
        raise ValueError(f"rope_scaling type: expected yarn or none, got {kind!r}")
    if unknown := sorted(set(scaling) - known):
        raise ValueError(f"rope_scaling has keys this code does not know: {', '.join(unknown)}")
    if kind == "default":
        return None
    for name in ("factor", "original_max_position_embeddings"):
        if name not in scaling:
            raise ValueError(f"rope_scaling lacks the key {name!r}")
    return YarnScaling(**scaling)


def _pop_quantization(keys: dict[str, Any]) -> BlockQuantization | None:
    quantization = keys.pop("quantization_config", None)
    if quantization is None:
        return None
    given = dict(quantization)
    expected = {"quant_method": ("fp8",), "fmt": ("e4m3", None), "activation_scheme": ("dynamic", None)}
    for name, accepted in expected.items():
        if (value := given.pop(name, None)) not in accepted:
            raise ValueError(f"quantization_config {name}: expected {accepted[0]}, got {value!r}")
    block = given.pop("weight_block_size", None)
    if not (isinstance(block, (list, tuple)) and len(block) == 2 and all(b > 0 for b in block)):
        raise ValueError(f"quantization_config weight_block_size: expected two sizes, got {block!r}")
    scale_fmt = given.pop("scale_fmt", None) or "float32"
    if scale_fmt not in ("float32", "ue8m0"):
        raise ValueError(f"quantization_config scale_fmt: expected ue8m0 or none, got {scale_fmt!r}")
    # Which modules stay in bf16 is visible from the tensors themselves.
    for name in ("modules_to_not_convert", "dequantize"):
        given.pop(name, None)
    if given:
        raise ValueError(
            f"quantization_config has keys this code does not know: {', '.join(sorted(given))}"
        )
    return BlockQuantization((int(block[0]), int(block[1])), scale_fmt)
