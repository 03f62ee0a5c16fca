"""The running softmax of the Hopper mla_prefill kernel, over one block of scores in two halves."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.tiles import ROW, ROWS, spread_rows
from pallas_kernels.mla_prefill.mask import concatenate_columns, mask_columns
from pallas_kernels.mla_prefill.plan import PARTIAL_SUMS, Plan


def start_softmax(
    plan: Plan, s: jax.Array, maximum: jax.Array, total: jax.Array, bound: Any
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Masks scores and starts the softmax.

    Returns P of the block's first half, the scores of the second half, and per row the maximum, the
    partial sums and the factor that rescales earlier sums.

    Args:
      bound: position of the tile's first query, length of the sequence and first key of the block;
        None if every query sees all keys of the block.
    """
    if bound is not None:
        start, length, first = bound
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
        visible = jnp.minimum(row + (start + 1 - first), length - first)
        if plan.interpreted:
            column = lax.broadcasted_iota(jnp.int32, s.shape, 1)
            s = jnp.where(column < spread_rows(visible, s.shape[1]), s, -jnp.inf)
        else:
            s = mask_columns(s, visible)
    new_maximum = jnp.maximum(maximum, s.max(axis=1) * plan.to_log2)
    alpha = jnp.exp2(maximum - new_maximum)
    total = total * spread_rows(alpha, PARTIAL_SUMS)
    p, total = exponentials(plan, s[:, : plan.half], new_maximum, total)
    return p, s[:, plan.half :], new_maximum, total, alpha


def exponentials(
    plan: Plan, s: jax.Array, maximum: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns P of half a block, and the updated partial sums."""
    p = jnp.exp2(s * plan.to_log2 - spread_rows(maximum, plan.half))
    for c in range(0, plan.half, PARTIAL_SUMS):
        total = total + p[:, c : c + PARTIAL_SUMS]
    return p, total


def finish_softmax(
    plan: Plan, acc: jax.Array, alpha: jax.Array, maximum: jax.Array, total: jax.Array,
    first: jax.Array, s: jax.Array,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Computes the second half of P.

    Returns the carry for the next block: accumulator, factor, maximum, partial sums, and P.
    """
    second, total = exponentials(plan, s, maximum, total)
    return acc, alpha, maximum, total, _pack(plan, first, second)


def _pack(plan: Plan, first: jax.Array, second: jax.Array) -> jax.Array:
    """Returns P of a block in bfloat16, from its two halves."""
    first, second = first.astype(jnp.bfloat16), second.astype(jnp.bfloat16)
    if plan.interpreted:
        return jnp.concatenate([first, second], axis=1)
    return concatenate_columns(first, second)
