"""The producer warp of the many-token grouped_matmul kernel: TMA copies to the ring."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.grouped_matmul.buffers import Buffers
from pallas_kernels.grouped_matmul.plan import ATOM, Plan
from pallas_kernels.grouped_matmul.tile_scheduler import Tile, TileScheduler
from pallas_kernels.hopper.branch import when
from pallas_kernels.hopper.copies import TmaCopy
from pallas_kernels.hopper.ring import PipelineState, Ring


def produce(
    plan: Plan, buffers: Buffers, tiles: TileScheduler, ring: Ring, scale_ring: Ring | None
) -> None:
    """Copies the operands of every K step of this block's tiles to the ring. One warp calls it."""
    config, tile_k = plan.config, plan.tile_k

    def copy_stage(tile: Tile, step: Any, state: PipelineState, rows: int) -> None:
        k = pl.ds(step * jnp.int32(tile_k), tile_k)
        copies = []
        for matrix, column, width, stage_row in plan.rhs_copies:
            b = buffers.rhs_stages_untiled.at[state.stage]
            if width < config.tile_n:
                b = buffers.rhs_stages_untiled.at[state.stage, pl.ds(stage_row, width)]
            window = (tile.group, pl.ds(tile.column + column, width), k)
            options: Any = {"tiled": False, "swizzle": ATOM, "multicast": plan.multicast_axis}
            copies.append(TmaCopy(buffers.matrices[matrix], window, b, **options))
        a = buffers.lhs_stages_untiled.at[state.stage]
        if rows < config.tile_m:
            a = buffers.lhs_stages_untiled.at[state.stage, pl.ds(0, rows)]
        window = (pl.ds(tile.row, rows), k)
        copies.append(TmaCopy(buffers.lhs, window, a, tiled=False, swizzle=ATOM))
        if plan.tma_scales:
            window = (step, pl.ds(tile.row - (tile.row & 3), plan.scale_copy_rows))
            target = buffers.scale_stages.at[state.stage]
            copies.append(TmaCopy(buffers.lhs_scale, window, target, tiled=False, swizzle=None))
        ring.fill(state, copies)

    def copy_tile(i: jax.Array, state: PipelineState) -> PipelineState:
        tile = tiles.locate(i)
        if scale_ring is not None:
            blocks = pl.ds(plan.first_scale_block(tile.column), 2)
            window = tile.group, blocks, pl.ds(0, plan.k_steps)
            targets = [buffers.matrix_scale_tiles.at[i & 1, n] for n in range(plan.matrices)]
            options: Any = {"tiled": False, "swizzle": None, "contiguous": True}
            arrays = zip(buffers.matrix_scales, targets, strict=True)
            copies = [TmaCopy(scales, window, target, **options) for scales, target in arrays]
            scale_ring.fill(tile_state(i), copies)

        def fill(step: jax.Array, state: PipelineState, carry: tuple[()]) -> tuple[()]:
            fewer = 0
            for rows in plan.copy_heights:
                last = rows == plan.copy_heights[-1]
                if last and not fewer:
                    copy_stage(tile, step, state, rows)
                else:
                    fits = (tile.rows > fewer) & ((tile.rows <= rows) | last)
                    when(fits)(functools.partial(copy_stage, tile, step, state, rows))
                fewer = rows
            return carry

        return ring.loop(plan.k_steps, fill, state, ())[0]

    state = lax.fori_loop(0, tiles.count(), copy_tile, ring.start())
    ring.drain(state)
    if scale_ring is not None:
        scale_ring.drain(tile_state(tiles.count()))


def tile_state(i: jax.Array) -> PipelineState:
    """Returns the state of the ring of matrix scales for a block's i-th tile."""
    return PipelineState(i & 1, lax.shift_right_logical(i, jnp.int32(1)) & 1)
