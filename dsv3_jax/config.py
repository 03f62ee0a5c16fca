"""Configuration of a model: a frozen dataclass with derived numbers and validation.

Field names are the published keys of config.json, which :mod:`dsv3_jax.hf_config` parses. Values
that this code does not implement and values that contradict each other are refused by name, so that
a checkpoint that loads is computed as its authors intended.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Literal

from dsv3_jax import hf_config
from dsv3_jax.field_checks import check_choice, check_fields, is_int
from dsv3_jax.quantization import Quantization
from dsv3_jax.yarn import YarnScaling

SCORING = {"noaux_tc": "sigmoid", "greedy": "softmax", "group_limited_greedy": "softmax"}
"""Score function of each ``topk_method``."""

DTYPES = ("bfloat16", "float16", "float32")

SPARSE = ("deepseek_v32", "glm_moe_dsa")
"""Values of ``model_type`` whose attention is sparse."""

# Limits several times above any published model. Tables of names and of rotary angles have these
# sizes, so that a damaged config.json cannot ask for more memory than there is.
MAX_MATRICES = 500_000
MAX_POSITIONS = 2**27

MTPHidden = Literal["post_norm", "pre_norm"]
"""Hidden state that an MTP layer takes as input: after the norm before the LM head (as in serving
engines) or before that norm. The paper leaves it open; a model must be run as it was trained."""

_NESTED_KINDS = {
    "YarnScaling": (lambda value: isinstance(value, YarnScaling), "a YarnScaling"),
    "Quantization": (
        lambda value: isinstance(value, Quantization),
        "a BlockQuantization or an IntegerQuantization",
    ),
}
_MAY_BE_ZERO = (
    "first_k_dense_replace",
    "n_shared_experts",
    "num_nextn_predict_layers",
    "bos_token_id",
    "initializer_range",
)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of one model of the DeepSeek-V2/V3 family (keys of config.json).

    Raises:
      ValueError: a field has another type, is not finite, is out of range or contradicts another;
        the message names the fields.
    """

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
    bos_token_id: int | None
    """Begin-of-sequence token; None in models without one, such as GLM-5.1."""
    eos_token_id: tuple[int, ...]
    """End tokens. Empty if config.json has none; :func:`dsv3_jax.load` looks in other files too."""
    initializer_range: float = 0.02
    num_nextn_predict_layers: int = 0
    """Number of MTP layers."""
    index_n_heads: int | None = None
    """Number of heads of the sparse-attention indexer; None in models before V3.2."""
    index_head_dim: int | None = None
    """Head dimension of the indexer."""
    index_topk: int | None = None
    """Number of keys that the indexer selects per query."""
    indexer_rope_interleave: bool = False
    """Whether the indexer's rope pairs are interleaved, like those of attention."""
    dtype: str = "bfloat16"
    quantization: Quantization | None = None

    # ---- derived numbers -------------------------------------------------------------------------

    @property
    def scoring_func(self) -> str:
        """Score function of the router, ``sigmoid`` or ``softmax``. ``topk_method`` implies it."""
        return SCORING[self.topk_method]

    @property
    def qk_head_dim(self) -> int:
        """Head dimension of queries and keys, N + R."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Numbers cached per token and layer, C + R: the normed latent and the rotated rope key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def num_moe_layers(self) -> int:
        """Number of MoE layers, without MTP layers."""
        return self.num_hidden_layers - self.first_k_dense_replace

    @property
    def has_indexer(self) -> bool:
        """Whether the model has the sparse-attention indexer of V3.2."""
        return self.index_topk is not None

    @property
    def has_float32_norms(self) -> bool:
        """Whether the published norms are float32 whatever ``dtype`` is, as in V3.2."""
        return self.model_type == "deepseek_v32"

    @property
    def softmax_scale(self) -> float:
        """``(N + R)^-0.5``, times ``m(mscale_all_dim)^2`` under YaRN (model.py, class MLA)."""
        scale = self.qk_head_dim**-0.5
        if self.rope_scaling is not None:
            scale *= self.rope_scaling.magnitude(self.rope_scaling.mscale_all_dim) ** 2
        return scale

    # ---- validation ------------------------------------------------------------------------------

    def __post_init__(self) -> None:
        check_fields(self, kinds=_NESTED_KINDS, may_be_zero=_MAY_BE_ZERO)
        check_choice("model_type", self.model_type, hf_config.MODEL_TYPES)
        check_choice("topk_method", self.topk_method, SCORING)
        check_choice("dtype", self.dtype, DTYPES)
        eos = self.eos_token_id
        if not (isinstance(eos, tuple) and all(is_int(e) and e >= 0 for e in eos)):
            raise ValueError(f"eos_token_id: expected token ids, got {eos!r}")
        layers = self.num_hidden_layers + self.num_nextn_predict_layers
        self._check(
            layers * (8 + 3 * self.n_routed_experts) <= MAX_MATRICES,
            f"layers and experts must not name more than {MAX_MATRICES:,} matrices",
            "num_hidden_layers num_nextn_predict_layers n_routed_experts",
        )
        self._check(
            self.max_position_embeddings <= MAX_POSITIONS,
            f"max_position_embeddings must not exceed {MAX_POSITIONS:,}",
            "max_position_embeddings",
        )
        self._check(
            self.n_routed_experts % self.n_group == 0,
            "n_routed_experts must be a multiple of n_group",
            "n_routed_experts n_group",
        )
        self._check(
            self.topk_group <= self.n_group,
            "topk_group must not exceed n_group",
            "topk_group n_group",
        )
        self._check(
            self.num_experts_per_tok * self.n_group <= self.topk_group * self.n_routed_experts,
            "the selected groups have fewer experts than a token selects",
            "num_experts_per_tok topk_group n_group n_routed_experts",
        )
        self._check(
            self.topk_method != "noaux_tc"
            or self.n_group == 1
            or self.n_routed_experts // self.n_group >= 2,
            "noaux_tc scores a group by its two best experts and needs two in each",
            "n_routed_experts n_group",
        )
        self._check(
            self.topk_method != "greedy" or self.n_group == 1,
            "greedy routing has no groups",
            "topk_method n_group",
        )
        # The sources disagree here. The published V2 code scales only weights that it did not
        # normalise; DeepSeek's reference scales both. No published model has the combination.
        self._check(
            self.scoring_func == "sigmoid"
            or not self.norm_topk_prob
            or self.routed_scaling_factor == 1.0,
            "softmax routing either normalises the top-k weights or scales them",
            "norm_topk_prob routed_scaling_factor",
        )
        self._check(
            self.first_k_dense_replace <= self.num_hidden_layers,
            "more dense layers than layers",
            "first_k_dense_replace num_hidden_layers",
        )
        self._check(
            self.qk_rope_head_dim % 2 == 0,
            "rope rotates pairs and needs an even dimension",
            "qk_rope_head_dim",
        )
        indexer = (self.index_n_heads, self.index_head_dim, self.index_topk)
        self._check(
            all(i is None for i in indexer) == (self.model_type not in SPARSE)
            and (None not in indexer or not any(indexer)),
            f"the indexer's three sizes are required for model_type {' and '.join(SPARSE)} and"
            " refused for others",
            "model_type index_n_heads index_head_dim index_topk",
        )
        self._check(
            not self.has_indexer or self.q_lora_rank is not None,
            "the indexer reads the query latent, which needs a rank",
            "q_lora_rank index_topk",
        )
        self._check(
            self.index_head_dim is None or self.index_head_dim >= self.qk_rope_head_dim,
            "the indexer rotates qk_rope_head_dim dimensions of each head",
            "index_head_dim qk_rope_head_dim",
        )

    def _check(self, is_valid: bool, rule: str, names: str) -> None:
        """Raises ValueError with ``rule`` and the values of the fields ``names``."""
        if not is_valid:
            got = ", ".join(f"{name}={getattr(self, name)!r}" for name in names.split())
            raise ValueError(f"{rule}; got {got}")

    # ---- config.json -----------------------------------------------------------------------------

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | os.PathLike[str]) -> ModelConfig:
        """Reads a parsed config.json, the file, or the directory that contains it.

        Accepts rope both as published (``rope_theta`` with ``rope_scaling``) and as transformers 5
        writes it (``rope_parameters``).

        Raises:
          ValueError: a required key is missing, a key or value is unknown, or values contradict
            each other.
        """
        values, redundant = hf_config.parse(source, dataclasses.fields(cls))
        config = cls(**values)
        hf_config.check_redundant(redundant, config._redundant_keys())
        return config

    def to_hf(self) -> dict[str, Any]:
        """Returns the config.json of this model in the published form; inverse of :meth:`from_hf`.

        Raises:
          ValueError: no key can express the quantization: integer weights, or an unpublished
            ``scale_suffix``.
        """
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return hf_config.write(values, self.scoring_func)

    def _redundant_keys(self) -> dict[str, tuple[Any, ...]]:
        """Returns the accepted values of each key in :data:`dsv3_jax.hf_config.REDUNDANT`.

        transformers calls the rope dimension alone "head_dim", and lists the kind of every layer.
        Other files have another head dimension under that name. Later models of the GLM family
        share the selection of an indexer among layers, which is not implemented.
        """
        L, dense = self.num_hidden_layers, self.first_k_dense_replace
        sparse, mtp = self.num_moe_layers, self.num_nextn_predict_layers
        attentions = ("full_attention", "attention")
        if self.has_indexer:
            attentions = ("indexed_attention", "deepseek_sparse_attention")
        return {
            "num_key_value_heads": (self.num_attention_heads,),
            "qk_head_dim": (self.qk_head_dim,),
            "head_dim": (
                *(self.qk_rope_head_dim, self.qk_head_dim, self.v_head_dim, self.qk_nope_head_dim),
                self.hidden_size // self.num_attention_heads,
            ),
            "scoring_func": (self.scoring_func,),
            "moe_layer_freq": ([0] * dense + [1] * sparse, [0] * dense + [1] * (sparse + mtp)),
            "layer_types": tuple([kind] * L for kind in attentions),
            "mlp_layer_types": (["dense"] * dense + ["sparse"] * sparse,),
            "mtp_layer_types": tuple([kind] * mtp for kind in attentions),
            "mtp_mlp_layer_types": (["sparse"] * mtp,),
            "indexer_types": (["full"] * L,),
            "index_topk_freq": (1,),
            "index_topk_pattern": ("F" * L, ["full"] * L),
        }
