"""Five published ways to attend to cached tokens: what each caches, reads and computes.

The names are those of a study of DeepSeek-V2's attention (madsys-dev/deepseekv2-profile), each for
what it does to the way before it:

* ``CD``, cache decompressed: every head's key and value are cached.
* ``CC``, cache compressed: the latent and the rope key are cached; every step makes all keys and
  values of them again.
* ``A_CC``, absorbed: W_UK goes into the query and W_UV into the output, and ``[latent | rope key]``
  becomes the key of each head, a copy a head.
* ``A_CC_ME``, move elision: no copies. All heads read the cache itself, and scores are the sum of a
  latent and a rope part. It is what this package's "absorbed" is.
* ``AM_CC_ME``, absorbed and materialised: W_UQ times W_UK, and W_UV times W_O, are one matrix a
  head each.

How they attend stands in ``layers/attention_variants.py``. Letters as in ``accounting.py``, Q the
rank of queries, S cached tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from dsv3_jax.config import ModelConfig

AttnImpl = Literal["CD", "CC", "A_CC", "A_CC_ME", "AM_CC_ME"]

ATTN_IMPLS: tuple[AttnImpl, ...] = get_args(AttnImpl)


@dataclass(frozen=True)
class AttentionCost:
    """Of the attention of one decode step of one row, all decoder layers together. Bytes are of
    bfloat16."""

    flops: int
    """Projections, scores and sums, a multiply-add being two."""
    weight_bytes: int
    """Of the matrices: read once a step, however many rows it has."""
    cache_bytes: int
    """Of the cached tokens, read."""
    unpacked_bytes: int
    """Of keys and values that the step makes of the cached tokens: written and read back, but for
    what a compiler fuses."""


def check_attn_impl(name: object) -> None:
    """Raises ValueError where it is none of the five."""
    if name not in ATTN_IMPLS:
        raise ValueError(f"attn_impl: expected one of {', '.join(ATTN_IMPLS)}, got {name!r}")


def cached_numbers(config: ModelConfig, attn_impl: AttnImpl | None = None) -> int:
    """That one token leaves in one layer: ``H (N + R + V)`` for ``CD``, else ``C + R``."""
    if attn_impl == "CD":
        return config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)
    return config.latent_dim


def decode_attention(config: ModelConfig, context: int, attn_impl: AttnImpl) -> AttentionCost:
    """What a generated token costs at ``context`` cached tokens, itself among them.

    Multiply-adds of a layer are the elements of its matrices, once each, and those of each cached
    token:

    | | a cached token | matrices, beside q_a_proj and kv_a_proj |
    |---|---|---|
    | CD | H (N + R + V) | H (Q (N + R) + (N + V) C + V D) |
    | CC | H ((N + V) C + N + R + V) | H (Q (N + R) + V D) |
    | A_CC, A_CC_ME | H (2 C + R) | as of CD |
    | AM_CC_ME | H (2 C + R) | H (Q (C + R) + C D) |

    ``unpacked_bytes``: ``CC`` makes H (N + R + V) numbers of a cached token, ``A_CC`` H (C + R).
    Where ``q_lora_rank`` is null, Q is D, and there is no q_a_proj.

    Raises:
      ValueError: no such name, a context of less than one token, or a model with an indexer, which
        attends to some of its tokens.
    """
    check_attn_impl(attn_impl)
    if context < 1:
        raise ValueError(f"context: expected at least 1 token, got {context}")
    if config.has_indexer:
        raise ValueError(f"config: expected attention without an indexer, got {config.model_type}")
    D, H, L, S = (
        config.hidden_size,
        config.num_attention_heads,
        config.num_hidden_layers,
        context,
    )
    C, R, N, V = (
        config.kv_lora_rank,
        config.qk_rope_head_dim,
        config.qk_nope_head_dim,
        config.v_head_dim,
    )
    Q = D if config.q_lora_rank is None else config.q_lora_rank
    kv_b = H * (N + V) * C
    weights = (0 if config.q_lora_rank is None else D * Q) + D * (C + R)
    if attn_impl == "AM_CC_ME":
        weights += H * (Q * (C + R) + C * D)
    else:
        weights += H * (Q * (N + R) + V * D) + kv_b
    a_token = H * (N + R + V) if attn_impl in ("CD", "CC") else H * (2 * C + R)
    macs = weights + S * a_token
    if attn_impl == "CC":
        macs += (S - 1) * kv_b
    unpacked = {"CC": H * (N + R + V), "A_CC": H * (C + R)}.get(attn_impl, 0)
    return AttentionCost(
        flops=2 * L * macs,
        weight_bytes=2 * L * weights,
        cache_bytes=2 * L * S * cached_numbers(config, attn_impl),
        unpacked_bytes=2 * L * S * unpacked,
    )
