"""The two warpgroups that multiply: each sums its part of a block's tiles, and stores it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.block_tiles import BlockTiles, Tile
from pallas_kernels.grouped_matmul.epilogue import gated, quantized, store_rows, store_scales
from pallas_kernels.grouped_matmul.plan import SCALE_BLOCK, Plan
from pallas_kernels.grouped_matmul.refs import Refs
from pallas_kernels.grouped_matmul.ring import Ring
from pallas_kernels.grouped_matmul.tile_sums import (
    Scales,
    bfloat16_sums,
    float8_sums,
    load_scales,
)


def multiply_tiles(
    plan: Plan, refs: Refs, tiles: BlockTiles, ring: Ring, warpgroup: jax.Array
) -> None:
    """Multiplies this warpgroup's part of each of the block's tiles, and stores it."""
    ring.release_all()
    sum_up = float8_sums if plan.float8 else bfloat16_sums

    def multiply_tile(i: jax.Array, carry: Any) -> Any:
        tile, scales, at = carry

        def find_after(step: jax.Array, after: Tile) -> Tile:
            """Once a tile, under the first of its products: half a microsecond."""
            return lax.cond(step == 0, lambda: tiles.locate(i + 1), lambda: after)

        sums, after, at = sum_up(plan, refs, ring, warpgroup, tile, find_after, scales, at)
        scales = first_scales(after)  # while this tile is stored
        _store(plan, refs, warpgroup, tile, sums, i)
        return after, scales, at

    def first_scales(tile: Tile) -> Scales | None:
        return load_scales(plan, refs, warpgroup, tile, 0) if plan.float8 else None

    first = tiles.locate(0)
    carry = first, first_scales(first), ring.begin()
    lax.fori_loop(0, tiles.count(), multiply_tile, carry)
    plgpu.wait_smem_to_gmem(0)


def _store(
    plan: Plan,
    refs: Refs,
    warpgroup: jax.Array,
    tile: Tile,
    sums: tuple[jax.Array, ...],
    i: jax.Array,
) -> None:
    """Writes the rows and columns of this warpgroup's part that no other tile writes."""
    slots = plan.config.slots
    (row, _), column = plan.offsets(warpgroup), plan.out_column(warpgroup)
    rows, columns = plan.part[0], plan.part[1] // plan.matrices
    if plan.matrices == 2:
        sums = gated(sums, columns)
    if plan.quantize:
        parts = [_quantize(plan, refs, warpgroup, tile, sums[0], i)]  # all of the part
    else:
        parts = [x.astype(jnp.bfloat16) for x in sums]
    width = parts[0].shape[1]
    pieces = [(r, c) for r in range(0, rows, 64) for c in range(0, columns, plan.staged)]
    for batch in (pieces[i : i + slots] for i in range(0, len(pieces), slots)):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        buffers = [warpgroup * jnp.int32(slots) + jnp.int32(i) for i in range(len(batch))]
        for buffer, (r, c) in zip(buffers, batch, strict=True):
            start = c % width
            refs.staging[buffer] = parts[c // width][r : r + 64, start : start + plan.staged]
        plgpu.commit_smem()
        for buffer, (r, c) in zip(buffers, batch, strict=True):
            keep = jnp.clip(tile.rows - row - r, 0, 64)
            first_column = tile.column + column + c
            if plan.N % plan.columns:
                keep = jnp.where(first_column >= tile.new, keep, 0)
            window = pl.ds(first_column, plan.staged)
            store_rows(refs.staging_plain.at[buffer], refs.out, keep, tile.row + row + r, window)


def _quantize(
    plan: Plan, refs: Refs, warpgroup: jax.Array, tile: Tile, values: jax.Array, i: jax.Array
) -> jax.Array:
    """The part in float8; writes the scales of its rows' one block."""
    (row, _), amax = plan.offsets(warpgroup), jnp.max(jnp.abs(values), axis=1)
    keep = jnp.clip(tile.rows - row, 0, 64)
    if refs.halves is not None:
        amax = refs.halves.maximum(amax, warpgroup, i)
        keep = jnp.where(warpgroup == 0, keep, 0)
    values, scales = quantized(values, amax)
    column = lax.div(tile.column, SCALE_BLOCK)
    store_scales(refs.scale_out, scales, keep, tile.row + row, column, on_gpu=plan.on_gpu)
    return values
