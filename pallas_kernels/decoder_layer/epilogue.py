"""The ends of units in the feed-forward kernel: what becomes of their totals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.decoder_layer.plan import Phase, Plan
from pallas_kernels.decoder_layer.stream import ROWS, Operand
from pallas_kernels.decoder_layer.units import Refs
from pallas_kernels.decoder_layer.vectors import load_block, store_block


def output_blocks(operand: Operand, left: jax.Array, right: jax.Array) -> list[jax.Array]:
    """Returns the blocks of output features of a matrix, from the totals of a unit's halves."""
    return [left + right] if operand.is_split else [left, right]


def epilogue(
    phase: Phase, plan: Plan, refs: Refs, sums: Any, interpret: Any
) -> Callable[..., None]:
    """Returns what becomes of a unit's totals.

    It is a function of the unit's index, its matrix, its first output feature, and the totals of
    its halves, which one warpgroup calls.

    Args:
      sums: reference to the sums of D-wide outputs in shared memory.
    """

    def store_values(i: Any, head: Any, row: Any, first: Any, second: Any) -> None:
        start = head * (plan.attention // plan.heads) + row
        for n, block in enumerate((first, second)):
            store_block(
                refs.values, start + n * ROWS, plan.attention, block, plan.tokens, interpret
            )

    def store_logits(i: Any, pair: Any, row: Any, left: Any, right: Any) -> None:
        store_block(refs.logits, row, plan.experts, left + right, plan.tokens, interpret)

    def store_hidden(i: Any, pair: Any, row: Any, gate: Any, up: Any) -> None:
        hidden = gate / (1 + jnp.exp(-gate)) * up
        store_block(refs.hidden, row, plan.ffn, hidden, plan.tokens, interpret)

    def store_routed_hidden(i: Any, pair: Any, row: Any, gate: Any, up: Any) -> None:
        hidden = gate / (1 + jnp.exp(-gate)) * up
        start = pair * plan.expert_ffn + row
        store_block(refs.routed_hidden, start, 0, hidden, 1, interpret)

    def keep(i: Any, pair: Any, row: Any, left: Any, right: Any) -> None:
        blocks = output_blocks(phase.operand, left, right)
        for n, block in enumerate(blocks):
            sums.at[i * len(blocks) + n][...] = block

    def store_residual(i: Any, pair: Any, row: Any, left: Any, right: Any) -> None:
        for n, block in enumerate(output_blocks(phase.operand, left, right)):
            attended, start = block.astype(plan.dtype).astype(jnp.float32), row + n * ROWS
            h = load_block(refs.flat_h, start, plan.width, plan.tokens, interpret)
            store_block(refs.residual, start, plan.width, h + attended, plan.tokens, interpret)

    by_name = {
        "w_uv": store_values,
        "o_proj": store_residual,
        "router": store_logits,
        "gate_up": store_hidden,
        "down": keep,
        "routed_gate_up": store_routed_hidden,
    }
    return by_name[phase.name]
