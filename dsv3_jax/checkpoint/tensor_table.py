"""The tensors of a published checkpoint: their names, shapes and storage types.

A matrix is stored as [out, in]. With block quantization it is F8_E4M3, and a second tensor, named
with ``quantization.scale_suffix``, has one F32 scale per block: [ceil(out / N), ceil(in / K)]. Then
``weight = fp8 * scale`` in every block. Embedding, head, router, norms, the MTP projection and the
indexer's head weights are never quantized, and neither are the ``modules_to_not_convert``.

MTP layers continue the numbering of the layers, and contain copies of embedding and head. The table
of DeepSeek-V3 and R1 has 91,991 tensors and 688,574,839,360 bytes, and that of V3.2 has 92,425
tensors. The headers of the published files have the same totals.

A weight has three names. For the routed experts of layer 3, and for the MTP layer
of a model with 61 layers, they are:

* parameter path: ``("layers", 3, "mlp", "experts", "up_proj", "weight")`` and
  ``("mtp", 0, "eh_proj", "weight")``;
* array of a store: ``layers.3.mlp.experts.up_proj.weight``, with all experts stacked, and
  ``mtp.0.eh_proj.weight``;
* published tensors: ``model.layers.3.mlp.experts.{0..255}.up_proj.weight``, one per expert, and
  ``model.layers.61.eh_proj.weight``.

An array is named by its path joined by dots, except that the scale of a weight has the suffix of
the checkpoint. Published names differ in three ways: the prefix ``model.``, which only ``lm_head``
lacks; MTP layers, which continue the numbering of the layers; and the number of the expert.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from dsv3_jax.config import ModelConfig
from dsv3_jax.parameter_path import ParameterPath, dotted
from dsv3_jax.quantization import BlockQuantization, IntegerQuantization

_PREFIX = "model"
_WITHOUT_PREFIX = "lm_head"
_EXPERTS = "experts"
# Name of a weight's scale in the model. Checkpoints may use another suffix.
_MODEL_SCALES = {BlockQuantization: "weight_scale_inv", IntegerQuantization: "weight_scale"}

Table = dict[str, "TensorSpec"]  # tensors by name, in the order data flows

_ITEMSIZE = {"F8_E4M3": 1, "I8": 1, "U8": 1, "BF16": 2, "F16": 2, "F32": 4}
STORED_AS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # by dtype in a config

UNUSED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Name endings of tensors that no forward pass reads. They are not in the table.

Every layer of Kimi-K2-Instruct has a rope buffer, whose length is not even the rope width."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and storage type of one tensor."""

    shape: tuple[int, ...]  # stored shape, in which packed int4 has half the columns
    dtype: str  # storage type in the spelling of safetensors

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size * _ITEMSIZE[self.dtype]


def tensor_table(config: ModelConfig) -> Table:
    """Returns all tensors of the checkpoint that ``config`` describes, in the order data flows."""
    table = _plain(config, "model.embed_tokens", config.vocab_size, config.hidden_size)
    dense = decoder_layer(config, moe_layer=False)
    sparse = decoder_layer(config, moe_layer=True)
    for index in range(config.num_hidden_layers):
        layer = dense if index < config.first_k_dense_replace else sparse
        table |= _under(f"model.layers.{index}.", layer)
    table |= _norm(config, "model.norm", config.hidden_size)
    table |= _plain(config, "lm_head", config.vocab_size, config.hidden_size)
    layer = mtp_layer(config)
    for index in _mtp_indices(config):
        table |= _under(f"model.layers.{index}.", layer)
    if isinstance(quantization := config.quantization, BlockQuantization):
        for module in quantization.modules_to_not_convert:
            weight = f"{module}.weight"
            if table.pop(weight + quantization.scale_suffix, None) is not None:
                table[weight] = TensorSpec(table[weight].shape, STORED_AS[config.dtype])
    return table


def quantizable_modules(config: ModelConfig) -> list[str]:
    """Returns the published names of the modules whose weights have scales, in the order data
    flows."""
    if config.quantization is None:
        return []
    suffix = ".weight" + config.quantization.scale_suffix
    table = tensor_table(config)
    return [name.removesuffix(suffix) for name in table if name.endswith(suffix)]


def is_selecting(name: str) -> bool:
    """Returns whether a tensor selects experts or keys: a router's, or an indexer's. NaN or
    infinity in one may select wrong ones and leave the logits finite."""
    return ".mlp.gate." in name or ".self_attn.indexer." in name


def copies(config: ModelConfig) -> dict[str, str]:
    """Returns the name of each copy in the MTP layers -> the name of its original."""
    return {
        f"model.layers.{index}.{copy}.weight": f"{original}.weight"
        for index in _mtp_indices(config)
        for copy, original in (
            ("embed_tokens", "model.embed_tokens"),
            ("shared_head.head", "lm_head"),
        )
    }


def mtp_layer(config: ModelConfig) -> Table:
    """Returns the tensors of an MTP layer, with names relative to ``model.layers.{index}.``.

    The layer computes ``eh_proj [norm(embedding) ; norm(hidden)]``, a MoE layer, a norm and the
    head. ``eh_proj`` [D, 2 D] multiplies the concatenation of two hidden states.
    """
    D = config.hidden_size
    return (
        _plain(config, "embed_tokens", config.vocab_size, D)
        | _norm(config, "enorm", D)
        | _norm(config, "hnorm", D)
        | _plain(config, "eh_proj", D, 2 * D)
        | decoder_layer(config, moe_layer=True)
        | _norm(config, "shared_head.norm", D)
        | _plain(config, "shared_head.head", config.vocab_size, D)
    )


def decoder_layer(config: ModelConfig, moe_layer: bool) -> Table:
    """Returns the tensors of a decoder layer, with names relative to ``model.layers.{index}.``."""
    feed_forward = moe(config) if moe_layer else mlp(config, config.intermediate_size)
    return (
        _norm(config, "input_layernorm", config.hidden_size)
        | _under("self_attn.", attention(config))
        | _norm(config, "post_attention_layernorm", config.hidden_size)
        | _under("mlp.", feed_forward)
    )


def attention(config: ModelConfig) -> Table:
    """Returns the tensors of multi-head latent attention, with names relative to ``self_attn.``.

    The query projection has N + R rows per head. The rows of ``kv_a_proj_with_mqa`` are the latent
    and the rope key that all heads share. ``kv_b_proj`` has N + V rows per head. Models without a
    query rank (V2-Lite, Moonlight) have a single query projection.
    """
    D, H, C = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    N, V = config.qk_nope_head_dim, config.v_head_dim
    if config.q_lora_rank is None:
        query = _linear(config, "q_proj", H * config.qk_head_dim, D)
    else:
        query = (
            _linear(config, "q_a_proj", config.q_lora_rank, D)
            | _norm(config, "q_a_layernorm", config.q_lora_rank)
            | _linear(config, "q_b_proj", H * config.qk_head_dim, config.q_lora_rank)
        )
    return (
        query
        | _linear(config, "kv_a_proj_with_mqa", config.latent_dim, D)
        | _norm(config, "kv_a_layernorm", C)
        | _linear(config, "kv_b_proj", H * (N + V), C)
        | _linear(config, "o_proj", D, H * V)
        | _under("indexer.", indexer(config))
    )


def indexer(config: ModelConfig) -> Table:
    """Returns the tensors of V3.2's sparse-attention indexer, with names relative to ``indexer.``.

    The table is empty for models without indexer. The indexer computes its queries from the query
    latent, and normalises its key by a LayerNorm, which has a bias.
    """
    heads, width, rank = config.index_n_heads, config.index_head_dim, config.q_lora_rank
    if heads is None or width is None or rank is None:
        return {}
    return (
        _linear(config, "wq_b", heads * width, rank)
        | _linear(config, "wk", width, config.hidden_size)
        | _norm(config, "k_norm", width)
        | {"k_norm.bias": TensorSpec((width,), "F32")}
        | _plain(config, "weights_proj", heads, config.hidden_size)
    )


def moe(config: ModelConfig) -> Table:
    """Returns the tensors of a MoE layer, with names relative to ``mlp.``.

    Several shared experts are one MLP of their total width. Only ``noaux_tc`` routing has the
    router's bias, which affects the selection of experts.
    """
    E, width = config.n_routed_experts, config.moe_intermediate_size
    table = _plain(config, "gate", E, config.hidden_size)
    if config.topk_method == "noaux_tc":
        table["gate.e_score_correction_bias"] = TensorSpec((E,), "F32")
    expert = mlp(config, width)
    for index in range(E):
        table |= _under(f"experts.{index}.", expert)
    if config.n_shared_experts:
        table |= _under("shared_experts.", mlp(config, config.n_shared_experts * width))
    return table


def mlp(config: ModelConfig, width: int) -> Table:
    """Returns the tensors of ``down(silu(gate x) * up x)`` with hidden width ``width``."""
    return (
        _linear(config, "gate_proj", width, config.hidden_size)
        | _linear(config, "up_proj", width, config.hidden_size)
        | _linear(config, "down_proj", config.hidden_size, width)
    )


def _linear(config: ModelConfig, name: str, rows: int, columns: int) -> Table:
    """Returns a matrix that may be quantized, and its scales."""
    if (quantization := config.quantization) is None:
        return _plain(config, name, rows, columns)
    N, K = quantization.block_shape(columns)
    weight = f"{name}.weight"
    scales = (-(-rows // N), -(-columns // K))
    try:
        stored = TensorSpec(*quantization.stored(rows, columns))
    except ValueError as error:
        raise ValueError(f"{weight}: {error}") from None
    return {weight: stored, weight + quantization.scale_suffix: TensorSpec(scales, "F32")}


def _plain(config: ModelConfig, name: str, *shape: int) -> Table:
    return {f"{name}.weight": TensorSpec(shape, STORED_AS[config.dtype])}


def _norm(config: ModelConfig, name: str, width: int) -> Table:
    """Returns a norm. V3.2 stores norms in float32, earlier models in the dtype of the config."""
    dtype = "F32" if config.has_float32_norms else STORED_AS[config.dtype]
    return {f"{name}.weight": TensorSpec((width,), dtype)}


def _under(prefix: str, table: Table) -> Table:
    return {prefix + name: spec for name, spec in table.items()}


def _mtp_indices(config: ModelConfig) -> range:
    first = config.num_hidden_layers
    return range(first, first + config.num_nextn_predict_layers)


class TensorNames(NamedTuple):
    """Published tensors that one parameter consists of."""

    names: tuple[str, ...]  # a single name, or one name per expert in order
    stacked: bool  # whether the parameter stacks experts along its first axis


class StoredLocation(NamedTuple):
    """Location of a published tensor in a store."""

    array: str
    expert: int | None  # index along the first axis if the array stacks experts, else None


def published_tensor_names(config: ModelConfig, path: ParameterPath) -> TensorNames:
    """Returns the published names of the parameter at ``path`` in the tree of the model."""
    quantization = config.quantization
    if quantization is not None and path[-1] == _MODEL_SCALES[type(quantization)]:
        path = (*path[:-1], "weight" + quantization.scale_suffix)
    array = dotted(path)
    if _EXPERTS not in array.split("."):
        return TensorNames((published_name(config, StoredLocation(array, None)),), stacked=False)
    locations = (StoredLocation(array, expert) for expert in range(config.n_routed_experts))
    return TensorNames(tuple(published_name(config, each) for each in locations), stacked=True)


def published_name(config: ModelConfig, location: StoredLocation) -> str:
    """Returns the published name of a tensor. Inverse of :func:`stored_location`."""
    keys = location.array.split(".")
    if keys[0] == "mtp":
        keys[:2] = ["layers", str(config.num_hidden_layers + int(keys[1]))]
    if location.expert is not None:
        keys.insert(keys.index(_EXPERTS) + 1, str(location.expert))
    if keys[0] != _WITHOUT_PREFIX:
        keys.insert(0, _PREFIX)
    return ".".join(keys)


def stored_location(config: ModelConfig, name: str) -> StoredLocation:
    """Returns the location of a published tensor. Inverse of :func:`published_name`. Raises
    ValueError or IndexError for other names."""
    keys = name.removeprefix(f"{_PREFIX}.").split(".")
    if keys[0] == "layers" and (layer := int(keys[1])) >= config.num_hidden_layers:
        keys[:2] = ["mtp", str(layer - config.num_hidden_layers)]
    if _EXPERTS not in keys:
        return StoredLocation(".".join(keys), None)
    expert = int(keys.pop(keys.index(_EXPERTS) + 1))
    return StoredLocation(".".join(keys), expert)
