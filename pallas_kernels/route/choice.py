"""The choice of a token's experts by one warp, with the experts distributed over its lanes.

A choice is a maximum over a warp. That is one instruction for integers, so scores are converted to
integers in the same order. Each choice takes two maxima, one for the score and one for the lowest
expert that has it, and a sum that fetches the expert's score.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.route.lanes import (
    LANES,
    add_if,
    bits_of,
    filled,
    load_padded,
    maximum,
    over_warp,
    select,
    store_rows,
    thread_index,
)
from pallas_kernels.route.reference import Rule

_LOWEST = -(2**31)  # of no expert, or of one that is already chosen: below every score's integer
_MINUS_INFINITY = -(2**31) + 2**23 - 1  # the integer of -inf
_FLIP = 2**31 - 1


def choose(
    logits_g: Any, bias: list[jax.Array] | None, scores_g: Any, experts_g: Any, weights_g: Any, *,
    token: jax.Array, first: jax.Array | int, is_reporter: jax.Array | None, tokens: int,
    experts: int, rule: Rule, interpret: Any,
) -> jax.Array:  # fmt: skip
    """Chooses the experts of each warp's token, and returns them in the first lanes.

    Args:
      logits_g, scores_g: flat float32 arrays of all tokens' logits, and of their scores.
      bias: what is added to the scores for the choice, from :func:`load_bias`, or None.
      experts_g, weights_g: flat arrays of the chosen experts and their weights.
      token: the warp's token, in all its lanes. A warp without a token stores nothing.
      first: where in ``experts_g`` and ``weights_g`` the pairs of the first token begin.
      is_reporter: whether the warp stores its token's scores. None means that all do.
    """
    K, lane = rule.num_experts_per_tok, thread_index(1)
    chunks = _chunks(experts)
    exists, own = token < tokens, jnp.minimum(token, tokens - 1)
    logits = [load_padded(logits_g, own * experts + c, n, -jnp.inf, interpret) for c, n in chunks]
    scores = scores_of(logits, rule)
    stores = exists if is_reporter is None else exists & is_reporter
    for (c, n), of_chunk in zip(chunks, scores, strict=True):
        store_rows(scores_g, own * experts + c, of_chunk, n, stores, interpret)
    choice = scores
    if bias is not None:
        choice = [s + b for s, b in zip(scores, bias, strict=True)]
    columns = [lane + c for c, _ in chunks]
    ranked = [as_integer(x) for x in choice]
    if experts % LANES:  # the last lanes have no expert
        ranked[-1] = select(ranked[-1], columns[-1] < experts, _LOWEST)
    ranked = mask_groups(ranked, columns, experts, rule)
    chosen, bits = top_k(ranked, [bits_of(s) for s in scores], columns, K)
    weights = lax.bitcast_convert_type(to_lanes(bits, lane), jnp.float32)
    if rule.normalize:
        weights = weights / (over_warp(jnp.sum, weights) + 1e-20)
    weights = weights * rule.scaling_factor
    at, own_experts = first + own * K, to_lanes(chosen, lane)
    store_rows(experts_g, at, own_experts, K, exists, interpret)
    store_rows(weights_g, at, weights, K, exists, interpret)
    return own_experts


def load_bias(bias_g: Any, zero: jax.Array, experts: int, interpret: Any) -> list[jax.Array]:
    """Loads what is added to the scores, for each chunk of experts one number per lane.

    Args:
      zero: 0 in all lanes.
    """
    return [load_padded(bias_g, zero + c, n, 0.0, interpret) for c, n in _chunks(experts)]


def _chunks(experts: int) -> list[tuple[int, int]]:
    """Returns the first expert and the number of experts of each chunk of up to LANES experts."""
    return [(c, min(experts - c, LANES)) for c in range(0, experts, LANES)]


def scores_of(logits: list[jax.Array], rule: Rule) -> list[jax.Array]:
    """Returns the scores of a warp's token, from its logits."""
    if rule.scoring == "sigmoid":
        return [1.0 / (1.0 + jnp.exp(-x)) for x in logits]
    maximum_logit = over_warp(jnp.max, maximum(logits))
    exps = [jnp.exp(x - maximum_logit) for x in logits]
    total = over_warp(jnp.sum, functools.reduce(jnp.add, exps))
    return [x / total for x in exps]


def as_integer(x: jax.Array) -> jax.Array:
    """Maps floats to integers in the same order. NaN comes after infinity."""
    bits = bits_of(x)
    return jnp.where(bits < 0, bits ^ _FLIP, bits)


def as_float(x: jax.Array) -> jax.Array:
    """Inverts :func:`as_integer`."""
    return lax.bitcast_convert_type(jnp.where(x < 0, x ^ _FLIP, x), jnp.float32)


def mask_groups(
    ranked: list[jax.Array], columns: list[jax.Array], E: int, rule: Rule
) -> list[jax.Array]:
    """Sets the integers of experts outside the best groups to that of minus infinity."""
    if rule.topk_group == rule.n_group:
        return ranked
    size = E // rule.n_group
    # For each group: the chunks that contain it, with a mask of its columns, or None for all.
    members = []
    for low in range(0, E, size):
        high = low + size
        chunks_of_group = range(low // LANES, -(-high // LANES))
        members.append(
            {
                c: None
                if low <= c * LANES and (c + 1) * LANES <= high
                else (columns[c] >= low) & (columns[c] < high)
                for c in chunks_of_group
            }
        )
    values = []
    for masks in members:
        values_of_group = [
            ranked[c] if inside is None else select(ranked[c], inside, _LOWEST)
            for c, inside in masks.items()
        ]
        best = over_warp(jnp.max, maximum(values_of_group))
        if rule.method == "noaux_tc":
            own = [columns[c] for c in masks]
            first = first_of(values_of_group, best, own)
            others = [
                select(x, o != first, _LOWEST) for o, x in zip(own, values_of_group, strict=True)
            ]
            second = over_warp(jnp.max, maximum(others))
            best = as_integer(as_float(best) + as_float(second))
        values.append(best)
    masked = list(ranked)
    for g, (value, masks) in enumerate(zip(values, members, strict=True)):
        better = filled(0)
        for h, other in enumerate(values):
            if h != g:
                better = add_if(other >= value if h < g else other > value, better)
        best = better < rule.topk_group
        for c, inside in masks.items():
            is_open = best if inside is None else best | ~inside
            masked[c] = select(masked[c], is_open, _MINUS_INFINITY)
    return masked


def top_k(
    ranked: list[jax.Array], bits: list[jax.Array], columns: list[jax.Array], K: int
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the columns of the K largest integers, and ``bits`` of these columns."""
    chosen, found_bits = [], []
    for _ in range(K):
        first = first_of(ranked, over_warp(jnp.max, maximum(ranked)), columns)
        bits_of_first = [
            select(b, column == first, 0) for column, b in zip(columns, bits, strict=True)
        ]
        chosen.append(first)
        found_bits.append(over_warp(jnp.sum, functools.reduce(jnp.bitwise_or, bits_of_first)))
        ranked = [select(x, o != first, _LOWEST) for o, x in zip(columns, ranked, strict=True)]
    return chosen, found_bits


def first_of(values: list[jax.Array], value: jax.Array, columns: list[jax.Array]) -> jax.Array:
    """Returns the lowest column with ``value``: a maximum of negated columns, one instruction."""
    negated = [
        select(-column, x == value, _LOWEST) for x, column in zip(values, columns, strict=True)
    ]
    return -over_warp(jnp.max, maximum(negated))


def to_lanes(numbers: list[jax.Array], lane: jax.Array) -> jax.Array:
    """Returns ``numbers[i]`` in lane i, and zero in the remaining lanes."""
    lanes = filled(0)
    for i, n in enumerate(numbers):
        lanes = jnp.where(lane == i, n, lanes)
    return lanes
