"""A warpgroup's part of a tile, summed over K from the ring's stages as they fill.

What comes next is got under these products: the block's next tile, and float8's next scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.block_tiles import Tile
from pallas_kernels.grouped_matmul.plan import SCALE_BLOCK, Plan
from pallas_kernels.grouped_matmul.refs import Refs
from pallas_kernels.grouped_matmul.ring import Position, Ring
from pallas_kernels.grouped_matmul.row_scales import row_scales


def bfloat16_sums(
    plan: Plan,
    refs: Refs,
    ring: Ring,
    warpgroup: jax.Array,
    tile: Tile,
    find_after: Callable[[jax.Array, Tile], Tile],
    scales: None,
    at: Position,
) -> tuple[tuple[jax.Array], Tile, Position]:
    """The part's sums, in one array, and the tile after this one."""
    del scales
    row, column = plan.offsets(warpgroup)
    rows, columns = plan.part

    def sum_up(accumulator: Any) -> tuple[jax.Array, Tile, Position]:
        def step(i: jax.Array, at: Position, carry: tuple[Position, Tile]) -> Any:
            before, after = carry
            ring.wait_full(at)
            a = refs.a.at[at.slot, pl.ds(row, rows)]
            b = refs.b.at[at.slot, pl.ds(column, columns)]
            plgpu.wgmma(accumulator, a, b.T)
            after = find_after(i, after)
            plgpu.wgmma_wait(1)
            pl.when(i > 0)(lambda: ring.release(before))
            return at, after

        at_end, (last, after) = ring.walk(plan.steps, step, at, (at, tile))
        sums = accumulator[...]
        ring.release(last)
        return sums, after, at_end

    sums, after, at = pl.run_scoped(sum_up, plgpu.ACC((rows, columns), jnp.float32))  # pyright: ignore[reportPrivateImportUsage]
    return (sums,), after, at


class Scales(NamedTuple):
    """Of 128 of K."""

    rows: jax.Array | None
    """One for each of a warpgroup's 64 rows, if they are not copied."""
    columns: tuple[jax.Array, ...]
    """One for each ``plan.scaled`` columns of its part."""


def load_scales(
    plan: Plan, refs: Refs, warpgroup: jax.Array, tile: Tile, step: jax.Array | int
) -> Scales:
    """From global memory."""
    row, _ = plan.offsets(warpgroup)
    first = tile.column + plan.out_column(warpgroup)
    columns = tuple(
        scales[tile.group, lax.div(first + c, SCALE_BLOCK), step]
        for scales in refs.matrix_scales
        for c in range(0, plan.part[1] // plan.matrices, plan.scaled)
    )
    if plan.copied_scales:
        return Scales(None, columns)
    rows = row_scales(refs.lhs_scale, tile.row + row, step, rows=plan.M, on_gpu=plan.on_gpu)
    return Scales(rows, columns)


def _scales_of_rows(
    plan: Plan, refs: Refs, warpgroup: jax.Array, tile: Tile, scales: Scales, at: Position
) -> jax.Array:
    """As they were loaded, or copied to the stage."""
    if scales.rows is not None:
        return scales.rows
    row, _ = plan.offsets(warpgroup)
    rows = refs.scales[at.slot, pl.ds(row + (tile.row & 3), 64)]
    return plgpu.layout_cast(rows, plgpu.Layout.WGMMA.reduce(1))


def float8_sums(
    plan: Plan,
    refs: Refs,
    ring: Ring,
    warpgroup: jax.Array,
    tile: Tile,
    find_after: Callable[[jax.Array, Tile], Tile],
    scales: Scales,
    at: Position,
) -> tuple[tuple[jax.Array, ...], Tile, Position]:
    """The part's sums, ``plan.scaled`` columns each, and the tile after this one; ``scales`` are
    the first step's."""
    scaled = plan.scaled
    row, column = plan.offsets(warpgroup)
    _, columns = plan.part

    def step(i: jax.Array, at: Position, carry: Any) -> Any:
        sums, scales, after = carry
        ring.wait_full(at)

        def scaled_product(accumulator: Any) -> Any:
            a = refs.a.at[at.slot, pl.ds(row, 64)]
            b = refs.b.at[at.slot, pl.ds(column, columns)]
            plgpu.wgmma(accumulator, a, b.T)
            # Under the product: nothing but sums is left to do between two products.
            rows = _scales_of_rows(plan, refs, warpgroup, tile, scales, at)
            factors = [rows * s for s in scales.columns]
            ahead = jnp.minimum(i + 1, plan.steps - 1)
            ahead = load_scales(plan, refs, warpgroup, tile, ahead)
            found = find_after(i, after)
            product = accumulator[...]
            ring.release(at)
            sums_now = tuple(
                s
                + product[:, j * scaled : (j + 1) * scaled]
                * lax.broadcast_in_dim(f, (64, scaled), (0,))
                for j, (s, f) in enumerate(zip(sums, factors, strict=True))
            )
            return sums_now, ahead, found

        accumulator = plgpu.ACC((64, columns), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
        return pl.run_scoped(scaled_product, accumulator)

    zero = plgpu.layout_cast(jnp.zeros((64, scaled), jnp.float32), plgpu.Layout.WGMMA)
    carry = (zero,) * (columns // scaled), scales, tile
    at, (sums, _, after) = ring.walk(plan.steps, step, at, carry)
    return sums, after, at
