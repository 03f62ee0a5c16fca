"""Costs of five published variants of decode attention: operations, and bytes cached and read.

The names come from a study of DeepSeek-V2's attention (madsys-dev/deepseekv2-profile). Each names
the variant's changes:

* ``CD``, cache decompressed: every head's key and value are cached.
* ``CC``, cache compressed: the latent and the rope key are cached, and every step computes all keys
  and values from them again.
* ``A_CC``, absorbed: W_UK is folded into the query and W_UV into the output, and each head gets a
  copy of ``[latent | rope key]`` as its key.
* ``A_CC_ME``, move elision: no copies. All heads read the cache itself, and scores are the sum of a
  latent part and a rope part. It is the form "absorbed" of this package.
* ``AM_CC_ME``, absorbed and materialised: the products W_UQ W_UK and W_UV W_O are computed
  beforehand, as one matrix per head each.

``overrides/attention_variants.py`` implements them. The letters are those of ``accounting.py``; Q
is the rank of queries, S the number of cached tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from dsv3_jax.config import ModelConfig

AttnImpl = Literal["CD", "CC", "A_CC", "A_CC_ME", "AM_CC_ME"]

ATTN_IMPLS: tuple[AttnImpl, ...] = get_args(AttnImpl)


@dataclass(frozen=True)
class AttentionCost:
    """Cost of attention in one decode step of one sequence, summed over the decoder layers.

    Bytes are those of bfloat16.
    """

    flops: int
    """Floating-point operations of projections, scores and sums. A multiply-add counts as two."""
    weight_bytes: int
    """Bytes of the matrices. They are read once per step, whatever the batch size."""
    cache_bytes: int
    """Bytes of the cached tokens, which the step reads."""
    unpacked_bytes: int
    """Bytes of the keys and values that the step computes from the cached tokens. They are written
    and read back, except where the compiler fuses both."""


def check_attn_impl(name: object) -> None:
    """Raises ValueError unless ``name`` is one of the five variants."""
    if name not in ATTN_IMPLS:
        raise ValueError(f"attn_impl: expected one of {', '.join(ATTN_IMPLS)}, got {name!r}")


def cached_numbers(config: ModelConfig, attn_impl: AttnImpl | None = None) -> int:
    """Returns how many numbers a token caches per layer: C + R, or H (N + R + V) for ``CD``."""
    if attn_impl == "CD":
        return config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)
    return config.latent_dim


def decode_attention(config: ModelConfig, context: int, attn_impl: AttnImpl) -> AttentionCost:
    """Returns the cost of generating one token with ``context`` cached tokens, itself included.

    A layer has one multiply-add per element of its matrices, and those of each cached token:

    | | per cached token | matrices besides q_a_proj and kv_a_proj |
    |---|---|---|
    | CD | H (N + R + V) | H (Q (N + R) + (N + V) C + V D) |
    | CC | H ((N + V) C + N + R + V) | H (Q (N + R) + V D) |
    | A_CC, A_CC_ME | H (2 C + R) | same as CD |
    | AM_CC_ME | H (2 C + R) | H (Q (C + R) + C D) |

    ``unpacked_bytes`` are H (N + R + V) numbers per cached token for ``CC``, H (C + R) for
    ``A_CC``, and 0 for the others. If ``q_lora_rank`` is null, Q is D and there is no q_a_proj.

    Raises:
      ValueError: an unknown name, a context of less than one token, or a model with an indexer,
        which attends to a part of its tokens only.
    """
    check_attn_impl(attn_impl)
    if context < 1:
        raise ValueError(f"context: expected at least 1 token, got {context}")
    if config.has_indexer:
        raise ValueError(f"config: expected attention without an indexer, got {config.model_type}")
    D, H, L, S = (config.hidden_size, config.num_attention_heads, config.num_hidden_layers, context)
    C, R = config.kv_lora_rank, config.qk_rope_head_dim
    N, V = config.qk_nope_head_dim, config.v_head_dim
    Q = D if config.q_lora_rank is None else config.q_lora_rank
    kv_b = H * (N + V) * C
    weights = (0 if config.q_lora_rank is None else D * Q) + D * (C + R)
    if attn_impl == "AM_CC_ME":
        weights += H * (Q * (C + R) + C * D)
    else:
        weights += H * (Q * (N + R) + V * D) + kv_b
    per_token = H * (N + R + V) if attn_impl in ("CD", "CC") else H * (2 * C + R)
    macs = weights + S * per_token
    if attn_impl == "CC":
        macs += (S - 1) * kv_b
    unpacked = {"CC": H * (N + R + V), "A_CC": H * (C + R)}.get(attn_impl, 0)
    return AttentionCost(
        flops=2 * L * macs,
        weight_bytes=2 * L * weights,
        cache_bytes=2 * L * S * cached_numbers(config, attn_impl),
        unpacked_bytes=2 * L * S * unpacked,
    )
