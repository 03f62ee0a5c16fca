"""Parameters, bytes and floating-point operations of a model, from its configuration alone.

Written apart from the tensor table in ``checkpoint/names.py``; a test holds the two against each
other. D hidden, H heads, C latent rank, R rope, N nope, V value, L layers, M MTP layers, E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from dsv3_jax.attn_impl import AttnImpl, cached_numbers, check_attn_impl
from dsv3_jax.config import ModelConfig


@dataclass(frozen=True)
class ParameterCount:
    """Elements by component. Scales of quantized weights are storage, not parameters."""

    embed_tokens: int
    attention: int  # of the L layers, with the norms of the two latents
    layer_norms: int  # two of width D a layer
    dense_mlp: int
    router: int  # with the selection bias, where there is one
    shared_experts: int
    routed_experts: int
    final_norm_and_head: int
    indexer: int  # of the L layers; 0 without one
    mtp: int  # of the M extra layers, their indexer too; not the copies
    mtp_copies: int  # embedding and head, repeated by every MTP layer

    @property
    def checkpoint(self) -> int:
        """Everything that the published files hold, copies included."""
        return sum(vars(self).values())

    @property
    def main(self) -> int:
        """The model without its MTP layers: the size in its name (671 B for V3)."""
        return self.checkpoint - self.mtp - self.mtp_copies


@dataclass(frozen=True)
class ActiveParameters:
    """Elements that one token meets: all but the routed experts that it did not choose."""

    total: int  # of the main model, the whole embedding table included (37 B for V3)
    matmul: int  # of those, what is multiplied: without embedding table, norms and biases
    mtp: int  # what one MTP layer adds, embedding and head not counted again; 0 without one


@dataclass(frozen=True)
class TokenFlops:
    """Floating-point operations of one token through the main model, a multiply-add being two."""

    linear: int  # 2 x the matmul-active parameters
    attention: float  # scores and weighted values
    indexer: float  # scores of the indexer; 0 without one

    @property
    def total(self) -> float:
        return self.linear + self.attention + self.indexer


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Elements of each part times the layers that have it (arXiv 2412.19437 sections 2.1, 2.2)."""
    components = _components(config).items()
    return ParameterCount(**{name: times * part.elements for name, (times, part) in components})


def active_parameters(config: ModelConfig) -> ActiveParameters:
    """``main`` less the experts not chosen, of every MoE layer (37 B in arXiv 2412.19437)."""
    components, count = _components(config), count_parameters(config)
    idle = config.n_routed_experts - config.num_experts_per_tok
    idle *= _mlp(config.hidden_size, config.moe_intermediate_size).elements
    total = count.main - config.num_moe_layers * idle
    main = [components[name] for name in components if not name.startswith("mtp")]
    added = sum(times * (part.norms + part.float32) for times, part in main)
    mtp = components["mtp"][1].elements - idle if config.num_nextn_predict_layers else 0
    return ActiveParameters(total=total, matmul=total - count.embed_tokens - added, mtp=mtp)


def flops_per_token(
    config: ModelConfig, context: int, phase: Literal["prefill", "decode"]
) -> TokenFlops:
    """Operations of one token (both forms of the attention: arXiv 2405.04434 section 2.1).

    ``prefill`` of ``context`` tokens: the expanded (multi-head) form, ``2 H (N + R + V)`` a key and
    layer; the causal triangle averages context/2 keys. ``decode`` at ``context`` cached tokens: the
    absorbed (one key head) form, ``2 H (C + R + C)``. Folding the up-projections into query and
    output costs what applying kv_b to one token does: the linear term is the same in both.
    With an indexer both phases are absorbed and a query meets at most ``index_topk`` keys, which
    the indexer picks out of all of them for ``2 heads width`` a key (DeepSeek-V3.2-Exp report).

    Raises:
      ValueError: ``phase`` is neither, or ``context`` is negative.
    """
    if phase not in ("prefill", "decode"):
        raise ValueError(f"phase: expected prefill or decode, got {phase!r}")
    if context < 0:
        raise ValueError(f"context: expected a number of tokens, got {context}")
    H, L = config.num_attention_heads, config.num_hidden_layers
    seen = keys = context / 2 if phase == "prefill" else float(context)
    if (k := config.index_topk) is not None and context > k:
        # The triangle's mean of min(t, k) over t in (0, context].
        seen = k - k * k / (2 * context) if phase == "prefill" else float(k)
    width = config.latent_dim + config.kv_lora_rank
    if phase == "prefill" and not config.has_indexer:
        width = config.qk_head_dim + config.v_head_dim
    return TokenFlops(
        linear=2 * active_parameters(config).matmul,
        attention=2 * H * width * L * seen,
        indexer=2 * (config.index_n_heads or 0) * (config.index_head_dim or 0) * L * keys,
    )


def distinct_experts(experts: int, chosen: int, rows: int) -> float:
    """How many a batch visits on average, if every row chooses alike: E (1 - (1 - k / E)^B)."""
    return experts * (1 - (1 - chosen / experts) ** rows)


def cache_bytes_per_token(
    config: ModelConfig,
    dtype: Literal["bfloat16", "fp8"] = "bfloat16",
    *,
    mtp: bool = False,
    attn_impl: AttnImpl | None = None,
) -> int:
    """Bytes that one token leaves in the cache, all layers together (``mtp``: the MTP layers too).

    ``bfloat16``: ``2 (C + R)`` a layer. ``fp8``: the layout of DeepSeek's FlashMLA, C values of one
    byte, a float32 scale for each 128 of them, R rope values in bfloat16: 656 for V3. An indexer
    adds its key in fp8 with one float32 scale in either case.

    Args:
      attn_impl: of :mod:`dsv3_jax.attn_impl`; ``CD`` caches ``H (N + R + V)`` numbers a layer.

    Raises:
      ValueError: ``dtype`` is neither, ``attn_impl`` is none of them, or ``CD`` in fp8.
    """
    C, R = config.kv_lora_rank, config.qk_rope_head_dim
    if dtype not in ("bfloat16", "fp8"):
        raise ValueError(f"dtype: expected bfloat16 or fp8, got {dtype!r}")
    if attn_impl is not None:
        check_attn_impl(attn_impl)
    if attn_impl == "CD" and dtype == "fp8":
        raise ValueError("dtype: expected bfloat16 for attn_impl CD, got fp8: a layout of latents")
    entry = 2 * cached_numbers(config, attn_impl)
    if dtype == "fp8":
        entry = C + 4 * math.ceil(C / 128) + 2 * R
    if config.index_head_dim is not None:
        entry += config.index_head_dim + 4
    return entry * (config.num_hidden_layers + mtp * config.num_nextn_predict_layers)


def checkpoint_bytes(config: ModelConfig, *, mtp_copies: bool = True) -> int:
    """Bytes of the tensors in the published files; ``mtp_copies=False`` leaves the repeats out.

    Quantized matrices take a byte an element (int4: half) and 4 a block, ceil at the edges; the
    rest is stored in ``config.dtype``, but selection biases and all of V3.2's norms in float32.
    """
    components = _components(config)
    if not mtp_copies:
        del components["mtp_copies"]
    return sum(times * part.nbytes(config) for times, part in components.values())


@dataclass(frozen=True)
class _Part:
    """A piece of one layer: its matrices (out, in) that quantization covers, and elements apart."""

    matrices: tuple[tuple[int, int], ...] = ()
    plain: int = 0  # multiplied or looked up, never quantized
    norms: int = 0
    float32: int = 0  # float32 in every checkpoint

    def __add__(self, other: _Part) -> _Part:
        mine, theirs = vars(self), vars(other)
        return _Part(**{name: mine[name] + theirs[name] for name in mine})

    @property
    def elements(self) -> int:
        return sum(a * b for a, b in self.matrices) + self.plain + self.norms + self.float32

    def nbytes(self, config: ModelConfig) -> int:
        wide = 4 if config.dtype == "float32" else 2
        norm = 4 if config.has_indexer else wide
        total = wide * self.plain + norm * self.norms + 4 * self.float32
        if config.quantization is None:
            return total + wide * sum(a * b for a, b in self.matrices)
        bits = getattr(config.quantization, "bits", 8)
        for a, b in self.matrices:
            N, K = config.quantization.block_shape(b)
            total += a * b * bits // 8 + 4 * math.ceil(a / N) * math.ceil(b / K)
        return total


def _components(config: ModelConfig) -> dict[str, tuple[int, _Part]]:
    """By field of :class:`ParameterCount`: how many times the model has which part."""
    D, E, L = config.hidden_size, config.n_routed_experts, config.num_hidden_layers
    L_moe, M = config.num_moe_layers, config.num_nextn_predict_layers
    table = _Part(plain=config.vocab_size * D)
    attention, indexer, layer_norms = _attention(config), _indexer(config), _Part(norms=2 * D)
    router = _Part(plain=E * D, float32=E if config.topk_method == "noaux_tc" else 0)
    experts = _Part(_mlp(D, config.moe_intermediate_size).matrices * E)
    shared = _mlp(D, config.moe_intermediate_size * config.n_shared_experts)
    # enorm, hnorm and shared_head.norm; eh_proj reads two hidden states and gives one.
    combine = _Part(plain=2 * D * D, norms=3 * D)
    return {
        "embed_tokens": (1, table),
        "attention": (L, attention),
        "layer_norms": (L, layer_norms),
        "dense_mlp": (config.first_k_dense_replace, _mlp(D, config.intermediate_size)),
        "router": (L_moe, router),
        "shared_experts": (L_moe, shared),
        "routed_experts": (L_moe, experts),
        "final_norm_and_head": (1, table + _Part(norms=D)),
        "indexer": (L, indexer),
        "mtp": (M, attention + indexer + layer_norms + router + shared + experts + combine),
        "mtp_copies": (M, table + table),
    }


def _mlp(D: int, width: int) -> _Part:
    return _Part(((width, D), (width, D), (D, width)))


def _attention(config: ModelConfig) -> _Part:
    D, H, C = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    Q, queries = config.q_lora_rank, H * config.qk_head_dim
    query = ((queries, D),) if Q is None else ((Q, D), (queries, Q))
    key_value = (config.latent_dim, D), (H * (config.qk_nope_head_dim + config.v_head_dim), C)
    return _Part((*query, *key_value, (D, H * config.v_head_dim)), norms=(Q or 0) + C)


def _indexer(config: ModelConfig) -> _Part:
    """Query and key projections, head weights, and the LayerNorm (weight, bias) of the key."""
    heads, width = config.index_n_heads or 0, config.index_head_dim or 0
    queries, D = (heads * width, config.q_lora_rank or 0), config.hidden_size
    return _Part((queries, (width, D)), plain=heads * D, float32=2 * width)
