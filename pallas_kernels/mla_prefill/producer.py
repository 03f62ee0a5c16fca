"""The producer warpgroup of the Hopper mla_prefill kernel: claims tiles and copies operands."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.tiles import ROWS
from pallas_kernels.mla_prefill.plan import WARPGROUPS, Plan
from pallas_kernels.mla_prefill.queue import claim_tile


def produce(
    plan: Plan,
    sources: tuple[Any, Any, Any],
    targets: tuple[Any, Any, Any],
    bounds: tuple[Any, Any],
    next_s: Any,
    q_barriers: tuple[Any, Any],
    barriers: tuple[Any, Any],
) -> None:
    """Claims this program's tiles one after another, and copies their queries, keys and values.

    Args:
      sources, targets: queries, keys and values in global and in shared memory.
      bounds: starts and lengths of all sequences.
      next_s: int32 [2] in shared memory, through which consumers receive the next tile.
      q_barriers, barriers: "full" and "free".
    """
    (q_g, k_g, v_g), (q_s, k_s, v_s), (starts_g, lengths_g) = sources, targets, bounds
    (q_full, q_free), (full, free) = q_barriers, barriers
    block, stages, tile_barriers = plan.config.block, plan.config.stages, plan.tile_barriers
    first_tile = lax.axis_index("program")
    tile_counter = None if plan.interpreted else pl.get_global(plgpu.SemaphoreType.REGULAR)

    def fetch(source, ring, first, b, h, blocks, i):
        slot = plan.in_ring(i)
        plgpu.barrier_wait(free.at[first + slot])
        keys = pl.ds((blocks - 1 - i) * block, block)
        plgpu.copy_gmem_to_smem(source.at[b, keys, h], ring.at[slot], full.at[first + slot])

    def process_tile(carry):
        n, tile = carry
        b, h, t0 = plan.position_of(tile)
        blocks = plan.blocks_of(starts_g[b] + t0, lengths_g[b])
        keys = functools.partial(fetch, k_g, k_s, 0, b, h, blocks)
        values = functools.partial(fetch, v_g, v_s, stages, b, h, blocks)
        keys(jnp.int32(0))
        for w in range(WARPGROUPS):
            plgpu.barrier_wait(q_free.at[w])
            rows = pl.ds(t0 + w * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(q_g.at[b, rows, h], q_s.at[w], q_full.at[w])
        values(jnp.int32(0))
        next_tile = claim_and_publish(lax.rem(n, 2), tile)

        def step(i, carry):
            keys(i)
            values(i)
            return carry

        lax.fori_loop(1, blocks, step, None)
        return n + 1, next_tile

    def claim_and_publish(slot, tile):
        """Claims the next tile, and passes it to the consumers."""
        # The interpreter has no atomic addition. There each program takes every ``programs``-th
        # tile, so that only a GPU runs ``claim_tile``.
        plgpu.barrier_wait(free.at[tile_barriers + slot])
        if plan.interpreted:
            next_s[slot] = tile + plan.programs
        else:
            claim_tile(tile_counter, next_s, slot, plan.programs)
        plgpu.commit_smem()
        plgpu.barrier_arrive(full.at[tile_barriers + slot])
        return next_s[slot]

    lax.while_loop(lambda c: c[1] < plan.tiles, process_tile, (jnp.int32(0), first_tile))
    # Every completed phase of a barrier must be waited for before the program exits.
    for w in range(WARPGROUPS):
        plgpu.barrier_wait(q_free.at[w])
    for i in range(2 * stages + 2):
        plgpu.barrier_wait(free.at[i])
