"""Parameters, bytes and floating-point operations of a model, computed from its configuration.

The counts do not use the tensor table in ``checkpoint/tensor_table.py``; a test compares the two.
Letters: D hidden, H heads, C latent rank, R rope, N nope, V value, L layers, M MTP layers, E
experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from dsv3_jax.attn_impl import AttnImpl, cached_numbers, check_attn_impl
from dsv3_jax.config import ModelConfig


@dataclass(frozen=True)
class ParameterCount:
    """Number of parameters of each component. Scales of quantized weights are not parameters."""

    embed_tokens: int
    attention: int
    """Attention of the L layers, including the norms of the two latents."""
    layer_norms: int
    """Two norms of width D per layer."""
    dense_mlp: int
    router: int
    """Routers, including the selection bias if there is one."""
    shared_experts: int
    routed_experts: int
    final_norm_and_head: int
    indexer: int
    """Sparse-attention indexers of the L layers; 0 for models without them."""
    mtp: int
    """The M MTP layers, including their indexers, without the copies below."""
    mtp_copies: int
    """Copies of embedding and head that the published files repeat for every MTP layer."""

    @property
    def checkpoint(self) -> int:
        """Number of parameters in the published files, including copies."""
        return sum(vars(self).values())

    @property
    def main(self) -> int:
        """Number of parameters without MTP layers: the size in the model's name (671 B for V3)."""
        return self.checkpoint - self.mtp - self.mtp_copies


@dataclass(frozen=True)
class ActiveParameters:
    """Number of parameters that take part in one token's forward pass.

    These are all parameters except the routed experts that the token does not select.
    """

    total: int
    """Active parameters of the main model, including the whole embedding table (37 B for V3)."""
    matmul: int
    """Active parameters in matmuls: ``total`` without embedding table, norms and biases."""
    mtp: int
    """Active parameters that one MTP layer adds, without embedding and head; 0 without one."""


@dataclass(frozen=True)
class TokenFlops:
    """Floating-point operations of one token in the main model. A multiply-add counts as two."""

    linear: int
    """Matmuls with weights: twice the active parameters in matmuls."""
    attention: float
    """Attention scores and weighted sums of values."""
    indexer: float
    """Scores of the sparse-attention indexer; 0 without one."""

    @property
    def total(self) -> float:
        """Sum of all operations."""
        return self.linear + self.attention + self.indexer


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Counts the parameters of each component (arXiv 2412.19437 sections 2.1 and 2.2)."""
    components = _components(config).items()
    return ParameterCount(
        **{name: copies * tensors.elements for name, (copies, tensors) in components}
    )


def active_parameters(config: ModelConfig) -> ActiveParameters:
    """Counts the parameters that one token uses (37 B in arXiv 2412.19437)."""
    components, count = _components(config), count_parameters(config)
    inactive = config.n_routed_experts - config.num_experts_per_tok
    inactive *= _mlp(config.hidden_size, config.moe_intermediate_size).elements  # per MoE layer
    total = count.main - config.num_moe_layers * inactive
    main = [components[name] for name in components if not name.startswith("mtp")]
    vectors = sum(copies * (tensors.norms + tensors.float32) for copies, tensors in main)
    mtp = components["mtp"][1].elements - inactive if config.num_nextn_predict_layers else 0
    return ActiveParameters(total=total, matmul=total - count.embed_tokens - vectors, mtp=mtp)


def flops_per_token(
    config: ModelConfig, context: int, phase: Literal["prefill", "decode"]
) -> TokenFlops:
    """Counts the operations of one token (forms of attention: arXiv 2405.04434 section 2.1).

    ``prefill`` is the mean over a prompt of ``context`` tokens, in the expanded (multi-head) form:
    ``2 H (N + R + V)`` operations per key and layer, with context/2 keys on average.

    ``decode`` is one token after ``context`` cached tokens, in the absorbed form (one key head):
    ``2 H (C + R + C)`` per key and layer. Folding the up-projections into query and output costs
    the same as applying kv_b_proj to one token, so that the linear term is equal in both phases.

    With an indexer both phases use the absorbed form. Each query attends to at most ``index_topk``
    keys. The indexer selects them among all keys, at ``2 heads width`` per key (DeepSeek-V3.2-Exp
    report).

    Raises:
      ValueError: ``phase`` is unknown, or ``context`` is negative.
    """
    if phase not in ("prefill", "decode"):
        raise ValueError(f"phase: expected prefill or decode, got {phase!r}")
    if context < 0:
        raise ValueError(f"context: expected a number of tokens, got {context}")
    H, L = config.num_attention_heads, config.num_hidden_layers
    attended = keys = context / 2 if phase == "prefill" else float(context)
    if (k := config.index_topk) is not None and context > k:
        # In prefill, the mean of min(t, k) over t in (0, context].
        attended = k - k * k / (2 * context) if phase == "prefill" else float(k)
    width = config.latent_dim + config.kv_lora_rank
    if phase == "prefill" and not config.has_indexer:
        width = config.qk_head_dim + config.v_head_dim
    return TokenFlops(
        linear=2 * active_parameters(config).matmul,
        attention=2 * H * width * L * attended,
        indexer=2 * (config.index_n_heads or 0) * (config.index_head_dim or 0) * L * keys,
    )


def distinct_experts(experts: int, experts_per_token: int, tokens: int) -> float:
    """Returns the expected number of distinct experts that a batch of tokens uses.

    For equally likely experts it is ``E (1 - (1 - K / E)^tokens)``.
    """
    return experts * (1 - (1 - experts_per_token / experts) ** tokens)


def cache_bytes_per_token(
    config: ModelConfig,
    dtype: Literal["bfloat16", "fp8"] = "bfloat16",
    *,
    mtp: bool = False,
    attn_impl: AttnImpl | None = None,
) -> int:
    """Returns the bytes that one token takes in the cache of all layers.

    ``bfloat16`` takes ``2 (C + R)`` bytes per layer. ``fp8`` is the layout of DeepSeek's FlashMLA:
    C values of one byte, a float32 scale per 128 of them, and R rope values in bfloat16, which are
    656 bytes for V3. An indexer adds its key, in fp8 with one float32 scale.

    Args:
      mtp: whether to add the MTP layers.
      attn_impl: a variant from :mod:`dsv3_jax.attn_impl`. ``CD`` caches ``H (N + R + V)`` numbers
        per layer.

    Raises:
      ValueError: ``dtype`` or ``attn_impl`` is unknown, or ``CD`` is combined with fp8.
    """
    C, R = config.kv_lora_rank, config.qk_rope_head_dim
    if dtype not in ("bfloat16", "fp8"):
        raise ValueError(f"dtype: expected bfloat16 or fp8, got {dtype!r}")
    if attn_impl is not None:
        check_attn_impl(attn_impl)
    if attn_impl == "CD" and dtype == "fp8":
        raise ValueError("dtype: expected bfloat16 for attn_impl CD, got fp8, a format for latents")
    entry = 2 * cached_numbers(config, attn_impl)
    if dtype == "fp8":
        entry = C + 4 * math.ceil(C / 128) + 2 * R
    if config.index_head_dim is not None:
        entry += config.index_head_dim + 4 if dtype == "fp8" else 2 * config.index_head_dim
    return entry * (config.num_hidden_layers + mtp * config.num_nextn_predict_layers)


def checkpoint_bytes(config: ModelConfig, *, mtp_copies: bool = True) -> int:
    """Returns the bytes of the tensors in the published files.

    A quantized matrix takes one byte per element (int4: half a byte) and 4 bytes per block, with
    partial blocks at the edges. Other tensors are stored in ``config.dtype``, except that selection
    biases and all norms of V3.2 are float32.

    Args:
      mtp_copies: whether to include the copies of embedding and head in MTP layers.
    """
    components = _components(config)
    if not mtp_copies:
        del components["mtp_copies"]
    return sum(copies * tensors.nbytes(config) for copies, tensors in components.values())


@dataclass(frozen=True)
class _Tensors:
    """Sizes of the tensors of one component in one layer."""

    matrices: tuple[tuple[int, int], ...] = ()
    """Shapes [out, in] of matrices that quantization covers."""
    plain: int = 0
    """Elements of matrices and tables that are never quantized."""
    norms: int = 0
    """Elements of norm weights."""
    float32: int = 0
    """Elements that are float32 in every checkpoint."""

    def __add__(self, other: _Tensors) -> _Tensors:
        mine, theirs = vars(self), vars(other)
        return _Tensors(**{name: mine[name] + theirs[name] for name in mine})

    @property
    def elements(self) -> int:
        """Number of elements."""
        return sum(a * b for a, b in self.matrices) + self.plain + self.norms + self.float32

    def nbytes(self, config: ModelConfig) -> int:
        """Returns the bytes in a checkpoint of ``config``."""
        width = 4 if config.dtype == "float32" else 2
        norm = 4 if config.has_float32_norms else width
        total = width * self.plain + norm * self.norms + 4 * self.float32
        if config.quantization is None:
            return total + width * sum(a * b for a, b in self.matrices)
        bits = getattr(config.quantization, "bits", 8)
        for a, b in self.matrices:
            N, K = config.quantization.block_shape(b)
            total += a * b * bits // 8 + 4 * math.ceil(a / N) * math.ceil(b / K)
        return total


def _components(config: ModelConfig) -> dict[str, tuple[int, _Tensors]]:
    """Returns, for each field of :class:`ParameterCount`, a number of copies and the tensors of
    one."""
    D, E, L = config.hidden_size, config.n_routed_experts, config.num_hidden_layers
    L_moe, M = config.num_moe_layers, config.num_nextn_predict_layers
    table = _Tensors(plain=config.vocab_size * D)
    attention, indexer, layer_norms = _attention(config), _indexer(config), _Tensors(norms=2 * D)
    router = _Tensors(plain=E * D, float32=E if config.topk_method == "noaux_tc" else 0)
    experts = _Tensors(_mlp(D, config.moe_intermediate_size).matrices * E)
    shared = _mlp(D, config.moe_intermediate_size * config.n_shared_experts)
    # enorm, hnorm and shared_head.norm; eh_proj maps two hidden states to one.
    combine = _Tensors(plain=2 * D * D, norms=3 * D)
    return {
        "embed_tokens": (1, table),
        "attention": (L, attention),
        "layer_norms": (L, layer_norms),
        "dense_mlp": (config.first_k_dense_replace, _mlp(D, config.intermediate_size)),
        "router": (L_moe, router),
        "shared_experts": (L_moe, shared),
        "routed_experts": (L_moe, experts),
        "final_norm_and_head": (1, table + _Tensors(norms=D)),
        "indexer": (L, indexer),
        "mtp": (M, attention + indexer + layer_norms + router + shared + experts + combine),
        "mtp_copies": (M, table + table),
    }


def _mlp(D: int, width: int) -> _Tensors:
    return _Tensors(((width, D), (width, D), (D, width)))


def _attention(config: ModelConfig) -> _Tensors:
    D, H, C = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    Q, queries = config.q_lora_rank, H * config.qk_head_dim
    query = ((queries, D),) if Q is None else ((Q, D), (queries, Q))
    key_value = (config.latent_dim, D), (H * (config.qk_nope_head_dim + config.v_head_dim), C)
    return _Tensors((*query, *key_value, (D, H * config.v_head_dim)), norms=(Q or 0) + C)


def _indexer(config: ModelConfig) -> _Tensors:
    """Query and key projections, head weights, and the LayerNorm of the key (weight and bias)."""
    heads, width = config.index_n_heads or 0, config.index_head_dim or 0
    queries, D = (heads * width, config.q_lora_rank or 0), config.hidden_size
    return _Tensors((queries, (width, D)), plain=heads * D, float32=2 * width)
