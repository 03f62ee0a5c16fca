"""The model's shape: frozen dataclasses, the numbers derived from them, and what must agree.

Field names are the published keys of config.json (:mod:`dsv3_jax.hf_config` reads and writes it).
A value that this code does not implement and two values that contradict each other are refused by
name: a checkpoint that loads is a checkpoint that is computed as its authors meant.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

SCORING = {"noaux_tc": "sigmoid", "greedy": "softmax", "group_limited_greedy": "softmax"}
MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2")
DTYPES = ("bfloat16", "float16", "float32")

# Several times those of any published model. Tables of names and of rotary angles are made from
# them, so that a damaged config.json must not ask for more memory than there is.
MAX_MATRICES = 500_000
MAX_POSITIONS = 2**27

MTPHidden = Literal["post_norm", "pre_norm"]
"""Which hidden state feeds an MTP layer: after the norm before the LM head (as serving engines do)
or before it. The paper leaves it open; a model must be run as it was trained."""


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN context extension (arXiv 2309.00071) as DeepSeek parametrises it.

    ``mscale`` and ``mscale_all_dim`` follow DeepSeek's code: cos and sin are multiplied by
    ``m(mscale) / m(mscale_all_dim)`` and the softmax scale by ``m(mscale_all_dim)**2``, where
    ``m(a) = 0.1 a ln(factor) + 1``.

    Raises:
      ValueError: a field has another type, is not finite, or is out of range.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        _check_fields(self, "rope_scaling.")

    def magnitude(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


@dataclasses.dataclass(frozen=True)
class BlockQuantization:
    """Block-scaled fp8 weights: ``weight = fp8 * scale``, one scale a block, ceil at the edges.

    Raises:
      ValueError: ``weight_block_size`` is not two sizes, or ``scale_fmt`` is unknown.
    """

    weight_block_size: tuple[int, int] = (128, 128)
    scale_fmt: str = "float32"  # or "ue8m0": scales are powers of two, still stored as float32
    scale_suffix: str = "_scale_inv"  # appended to the weight's name; multiplied despite its name

    def __post_init__(self) -> None:
        block = self.weight_block_size
        if not (isinstance(block, tuple) and len(block) == 2 and all(map(_is_size, block))):
            raise ValueError(
                f"quantization_config.weight_block_size: expected two sizes, got {block!r}"
            )
        _check_fields(self, "quantization_config.")
        check_choice("quantization_config.scale_fmt", self.scale_fmt, ("float32", "ue8m0"))

    def block_shape(self, columns: int) -> tuple[int, int]:
        """Rows and columns under one scale, in a matrix of that many columns."""
        del columns
        return self.weight_block_size

    def stored(self, rows: int, columns: int) -> tuple[tuple[int, int], str]:
        """Shape and dtype, as safetensors spells it, of a matrix's weights."""
        return (rows, columns), "F8_E4M3"


@dataclasses.dataclass(frozen=True)
class IntegerQuantization:
    """Integer weights: ``weight = integer * scale`` with float32 scales, symmetric around 0.

    No published checkpoint has them: ``dsv3 convert`` makes them. int8 is one byte a weight. int4
    packs two neighbours of a row into a byte, the even column in the low half: uint8 [N, K/2].

    Raises:
      ValueError: ``bits`` is neither 8 nor 4, or ``group_size`` is not a size.
    """

    bits: int
    group_size: int | None  # columns of a row under one scale; None: the whole row
    scale_suffix: str = "_scale"  # appended to the weight's name

    def __post_init__(self) -> None:
        _check_fields(self, "quantization.")
        if self.bits not in (8, 4):
            raise ValueError(f"quantization.bits: expected 8 or 4, got {self.bits}")

    def block_shape(self, columns: int) -> tuple[int, int]:
        """Rows and columns under one scale, in a matrix of that many columns."""
        return (1, columns if self.group_size is None else self.group_size)

    def stored(self, rows: int, columns: int) -> tuple[tuple[int, int], str]:
        """Shape and dtype, as safetensors spells it, of a matrix's weights.

        Raises:
          ValueError: an odd number of columns cannot be packed in pairs.
        """
        if self.bits == 8:
            return (rows, columns), "I8"
        if columns % 2:
            raise ValueError(f"int4 packs columns in pairs: expected an even number, got {columns}")
        return (rows, columns // 2), "U8"


Quantization = BlockQuantization | IntegerQuantization


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
    bos_token_id: int
    eos_token_id: tuple[int, ...]
    initializer_range: float = 0.02
    num_nextn_predict_layers: int = 0
    index_n_heads: int | None = None  # index_*: the sparse-attention indexer of V3.2
    index_head_dim: int | None = None
    index_topk: int | None = None
    dtype: str = "bfloat16"
    quantization: Quantization | None = None

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
        _check_fields(self)
        check_choice("model_type", self.model_type, MODEL_TYPES)
        check_choice("topk_method", self.topk_method, SCORING)
        check_choice("dtype", self.dtype, DTYPES)
        eos = self.eos_token_id
        if not (isinstance(eos, tuple) and eos and all(_is_int(e) and e >= 0 for e in eos)):
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
            "the kept groups hold fewer experts than a token chooses",
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
        # Sources disagree on this one: the published V2 code scales only weights that it did not
        # normalise, DeepSeek's reference scales both. No published model has the combination.
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
        self._check(self.qk_rope_head_dim % 2 == 0, "rope turns pairs", "qk_rope_head_dim")
        indexer = (self.index_n_heads, self.index_head_dim, self.index_topk)
        self._check(
            all(i is None for i in indexer) == (self.model_type != "deepseek_v32")
            and (None not in indexer or not any(indexer)),
            "the indexer's three sizes come with model_type deepseek_v32 and only with it",
            "model_type index_n_heads index_head_dim index_topk",
        )
        self._check(
            not self.has_indexer or self.q_lora_rank is not None,
            "the indexer reads the query latent, which needs a rank",
            "q_lora_rank index_topk",
        )

    def _check(self, holds: bool, rule: str, names: str) -> None:
        if not holds:
            got = ", ".join(f"{name}={getattr(self, name)!r}" for name in names.split())
            raise ValueError(f"{rule}; got {got}")

    # ---- config.json -----------------------------------------------------------------------------

    # hf_config builds these dataclasses, so it is imported when called and not at the top.

    @staticmethod
    def from_hf(source: Mapping[str, Any] | str | os.PathLike[str]) -> ModelConfig:
        """Reads a parsed config.json, the file, or the directory that holds it.

        Accepts rope both as published (``rope_theta`` with ``rope_scaling``) and as transformers 5
        writes it (``rope_parameters``).

        Raises:
          ValueError: a needed key is missing, a key or value is unknown, or values contradict.
        """
        from dsv3_jax import hf_config

        return hf_config.read(source)

    def to_hf(self) -> dict[str, Any]:
        """The config.json of this model in the published form (inverse of :meth:`from_hf`).

        Raises:
          ValueError: ``quantization.scale_suffix`` is not the published one, which no key states.
        """
        from dsv3_jax import hf_config

        return hf_config.write(self)


def check_choice(name: str, value: Any, known: Iterable[str]) -> None:
    """Raises ValueError, naming ``name`` and the choices, if ``value`` is not one of ``known``."""
    if value not in tuple(known):
        raise ValueError(f"{name}: expected one of {', '.join(known)}; got {value!r}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_size(value: Any) -> bool:
    return _is_int(value) and value >= 1


def _is_finite(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (_is_int, "an integer"),
    "float": (_is_finite, "a finite number"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "str": (lambda value: isinstance(value, str), "a string"),
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
    "mscale",
    "mscale_all_dim",
)


def _check_fields(config: Any, where: str = "") -> None:
    """Refuses a field whose value is not of its annotated kind, and numbers below their range."""
    for field in dataclasses.fields(config):
        annotation = str(field.type)
        kind = annotation.removesuffix(" | None")
        left_out = kind != annotation and getattr(config, field.name) is None
        if left_out or kind not in _KINDS:
            continue
        value = getattr(config, field.name)
        accepts, words = _KINDS[kind]
        if not accepts(value):
            raise ValueError(f"{where}{field.name}: expected {words}, got {value!r}")
        may_be_zero = field.name in _MAY_BE_ZERO
        if kind in ("int", "float") and not (value > 0 or (value == 0 and may_be_zero)):
            least = "at least 0" if may_be_zero else "more than 0"
            raise ValueError(f"{where}{field.name}: expected {least}, got {value}")


# What dsv3 convert makes.
INT8 = IntegerQuantization(bits=8, group_size=None)
INT4 = IntegerQuantization(bits=4, group_size=128)

QUANTIZATIONS: dict[str, Quantization | None] = {
    "bf16": None,
    "fp8": BlockQuantization(),
    "int8": INT8,
    "int4": INT4,
}
"""How weights lie in memory, by the names of commands."""
