"""The tensors of a published checkpoint: name, shape and storage type of each.

A matrix is stored [out, in]. Under block quantization it is F8_E4M3 and has a companion, named
with ``quantization.scale_suffix``, of one F32 scale a block: [ceil(out / N), ceil(in / K)], so
that ``weight = fp8 * scale`` block by block. Embedding, head, router, norms, the MTP projection
and the indexer's head weights are never quantized.

An MTP layer continues the numbering of the layers, and carries copies of embedding and head.
For DeepSeek-V3 and R1 the table has 91,991 tensors and 688,574,839,360 bytes, for V3.2 92,425
tensors: what the headers of the published files add up to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dsv3_jax.config import ModelConfig

Table = dict[str, "TensorSpec"]

_ITEMSIZE = {"F8_E4M3": 1, "I8": 1, "U8": 1, "BF16": 2, "F16": 2, "F32": 4}
STORED_AS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

UNUSED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Endings of tensors that some files carry and no forward pass reads: Kimi-K2-Instruct has a
rope buffer in every layer, of a length that is not even the rope width. Not in the table."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and storage type of one tensor; ``dtype`` is spelled as safetensors does."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * _ITEMSIZE[self.dtype]


def tensor_table(config: ModelConfig) -> Table:
    """Every tensor of the checkpoint that ``config`` describes, in the order data flows."""
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
    return table


def copies(config: ModelConfig) -> dict[str, str]:
    """Name of each copy that the MTP layers carry -> the name of the tensor that it repeats."""
    return {
        f"model.layers.{index}.{copy}.weight": f"{original}.weight"
        for index in _mtp_indices(config)
        for copy, original in (
            ("embed_tokens", "model.embed_tokens"),
            ("shared_head.head", "lm_head"),
        )
    }


def mtp_layer(config: ModelConfig) -> Table:
    """One MTP layer: ``eh_proj [norm(embedding) ; norm(hidden)]``, a MoE layer, a norm, the head.

    The projection reads two hidden states side by side: [D, 2 D].
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
    """One transformer layer, names relative to ``model.layers.{index}.``."""
    feed_forward = moe(config) if moe_layer else mlp(config, config.intermediate_size)
    return (
        _norm(config, "input_layernorm", config.hidden_size)
        | _under("self_attn.", attention(config))
        | _norm(config, "post_attention_layernorm", config.hidden_size)
        | _under("mlp.", feed_forward)
    )


def attention(config: ModelConfig) -> Table:
    """Multi-head latent attention, names relative to ``self_attn.``.

    Rows of q are N + R a head; rows of kv_a are the latent, then the rope key that all heads share;
    rows of kv_b are N + V a head. Without a query rank (V2-Lite, Moonlight) q is one matrix.
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
    """The sparse-attention indexer of V3.2, names relative to ``indexer.``; empty without one.

    Its queries come from the query latent; its one key is normed by a LayerNorm, hence the bias.
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
    """Router, routed experts and the shared expert, names relative to ``mlp.``.

    Several shared experts are one MLP of their joint width. The bias of the router steers the
    selection and exists in ``noaux_tc`` routing alone.
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
    """``down(silu(gate x) * up x)`` of inner width ``width``."""
    return (
        _linear(config, "gate_proj", width, config.hidden_size)
        | _linear(config, "up_proj", width, config.hidden_size)
        | _linear(config, "down_proj", config.hidden_size, width)
    )


def _linear(config: ModelConfig, name: str, rows: int, columns: int) -> Table:
    """A matrix that block quantization applies to, with its scales."""
    if (quantization := config.quantization) is None:
        return _plain(config, name, rows, columns)
    N, K = quantization.block_shape(columns)
    weight = f"{name}.weight"
    scales = (-(-rows // N), -(-columns // K))
    try:
        stored = TensorSpec(*quantization.stored(rows, columns))
    except ValueError as error:
        raise ValueError(f"{weight}: {error}") from None
    return {
        weight: stored,
        weight + quantization.scale_suffix: TensorSpec(scales, "F32"),
    }


def _plain(config: ModelConfig, name: str, *shape: int) -> Table:
    return {f"{name}.weight": TensorSpec(shape, STORED_AS[config.dtype])}


def _norm(config: ModelConfig, name: str, width: int) -> Table:
    """V3.2 stores every norm in float32, its predecessors in the model's own type."""
    dtype = "F32" if config.has_indexer else STORED_AS[config.dtype]
    return {f"{name}.weight": TensorSpec((width,), dtype)}


def _under(prefix: str, table: Table) -> Table:
    return {prefix + name: spec for name, spec in table.items()}


def _mtp_indices(config: ModelConfig) -> range:
    first = config.num_hidden_layers
    return range(first, first + config.num_nextn_predict_layers)
