"""The choice of experts inside the feed-forward kernel: one warp per token."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.route.choice import as_integer, mask_groups, scores_of, to_lanes, top_k
from pallas_kernels.route.lanes import (
    LANES,
    load_rows,
    over_warp,
    store_rows,
    thread_index,
)
from pallas_kernels.route.reference import Rule


def choose(
    logits_g: Any, bias: list[jax.Array] | None, scores_g: Any, experts_g: Any, weights_g: Any, *,
    token: jax.Array, first: jax.Array, is_reporter: jax.Array, tokens: int, experts: int,
    rule: Rule, interpret: Any,
) -> None:  # fmt: skip
    """Chooses the experts of each warp's token, as :func:`pallas_kernels.route` does.

    Args:
      logits_g, scores_g: flat float32 arrays of all tokens' logits, and of their scores, which only
        the reporting program stores.
      bias: what is added to the scores for the choice, from :func:`load_bias`, or None.
      experts_g, weights_g: flat arrays of the chosen experts and their weights.
      token: the warp's token, in all its lanes. A warp without a token stores nothing.
      first: where in ``experts_g`` and ``weights_g`` the program's pairs begin.
      is_reporter: whether this program stores the scores.
    """
    K, lane = rule.num_experts_per_tok, thread_index(1)
    chunks = range(0, experts, LANES)
    exists, own = token < tokens, jnp.minimum(token, tokens - 1)
    logits = [load_rows(logits_g, own * experts + c, LANES, interpret) for c in chunks]
    scores = scores_of(logits, rule)
    for c, of_chunk in zip(chunks, scores, strict=True):
        store_rows(scores_g, own * experts + c, of_chunk, LANES, exists & is_reporter, interpret)
    choice = scores
    if bias is not None:
        choice = [s + b for s, b in zip(scores, bias, strict=True)]
    columns = [lane + c for c in chunks]
    ranked = mask_groups([as_integer(x) for x in choice], columns, experts, rule)
    bits = [lax.bitcast_convert_type(s, jnp.int32) for s in scores]
    chosen, bits_of_chosen = top_k(ranked, bits, columns, K)
    weights = lax.bitcast_convert_type(to_lanes(bits_of_chosen, lane), jnp.float32)
    if rule.normalize:
        weights = weights / (over_warp(jnp.sum, weights) + 1e-20)
    weights = weights * rule.scaling_factor
    at = first + own * K
    store_rows(experts_g, at, to_lanes(chosen, lane), K, exists, interpret)
    store_rows(weights_g, at, weights, K, exists, interpret)


def load_bias(bias_g: Any, zero: jax.Array, experts: int, interpret: Any) -> list[jax.Array]:
    """Loads what is added to the scores, for each chunk of experts one number per lane.

    Args:
      zero: 0 in all lanes.
    """
    return [load_rows(bias_g, zero + c, LANES, interpret) for c in range(0, experts, LANES)]
