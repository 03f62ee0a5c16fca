"""Epilogue of the Hopper grouped matmul: SwiGLU, quantization to float8, and the store.

A consumer warpgroup has 64 rows of float32 sums in its registers, four threads per row. The result
goes to staging buffers in shared memory and from there to global memory by TMA. Only the rows and
columns that belong to the tile are stored: past its group's end, a tile has computed rows of the
next group with the wrong matrix.

Quantization needs the largest value of each row and 128 columns. It takes two exchanges among the
four threads of a row. If the other half of the 128 columns is in the other warpgroup's registers,
the two exchange their maxima through shared memory (:class:`buffers.RowMaxExchange`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.block_quant.reference import FLOAT8, FLOAT8_MAX, SMALLEST_AMAX
from pallas_kernels.grouped_matmul.buffers import Buffers
from pallas_kernels.grouped_matmul.plan import SCALE_BLOCK, Plan
from pallas_kernels.grouped_matmul.tile_scheduler import Tile
from pallas_kernels.hopper.branch import when
from pallas_kernels.hopper.ir import (
    REF,
    SCALAR,
    asm,
    const,
    i64,
    inline,
    item,
    warp_and_lane,
    wgmma_row,
    word,
)
from pallas_kernels.hopper.math import approximate_sigmoid
from pallas_kernels.hopper.tiles import ROW, ROWS

_STORE_HEIGHTS = (32, 16, 8, 4, 2, 1)  # rows per TMA store of a buffer that is not full


def store_tile(
    plan: Plan,
    buffers: Buffers,
    warpgroup: jax.Array,
    tile: Tile,
    sums: tuple[jax.Array, ...],
    i: jax.Array,
) -> None:
    """Applies SwiGLU and quantization if the plan has them, and stores a warpgroup's share.

    Args:
      sums: float32 accumulators, side by side.
      i: index of the tile in the block's order.
    """
    staging_buffers = plan.config.staging_buffers
    (row, _), column = plan.stage_offset(warpgroup), plan.out_column(warpgroup)
    rows, columns = plan.warpgroup_tile[0], plan.warpgroup_out_columns
    if plan.matrices == 2:
        sums = swiglu(plan, sums, columns)
    if plan.quantize:
        values = [
            _quantize(plan, buffers, warpgroup, tile, sums[0], i)
        ]  # one array has all columns
    else:
        values = [x.astype(jnp.bfloat16) for x in sums]
    width = values[0].shape[1]
    corners = [(r, c) for r in range(0, rows, ROWS) for c in range(0, columns, plan.staging_width)]
    for n in range(0, len(corners), staging_buffers):
        batch = corners[n : n + staging_buffers]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        indices = [warpgroup * jnp.int32(staging_buffers) + jnp.int32(j) for j in range(len(batch))]
        for index, (r, c) in zip(indices, batch, strict=True):
            start = c % width
            part = values[c // width][r : r + ROWS, start : start + plan.staging_width]
            buffers.staging[index] = part
        plgpu.commit_smem()
        for index, (r, c) in zip(indices, batch, strict=True):
            count = jnp.clip(tile.rows - row - r, 0, ROWS)
            first_column = tile.column + column + c
            if plan.N % plan.out_columns:
                count = jnp.where(first_column >= tile.first_own_column, count, 0)
            window = pl.ds(first_column, plan.staging_width)
            staged = buffers.staging_untiled.at[index]
            store_rows(staged, buffers.out, count, tile.row + row + r, window)


def swiglu(plan: Plan, sums: tuple[jax.Array, ...], columns: int) -> tuple[jax.Array, ...]:
    """Returns silu(gate) * up, where the first half of all columns is gate and the second is up.

    Args:
      sums: one array of 2 * ``columns``, or an even number of narrower ones.
    """
    if len(sums) == 1:
        gates, ups = [sums[0][:, :columns]], [sums[0][:, columns:]]
    else:
        gates, ups = sums[: len(sums) // 2], sums[len(sums) // 2 :]
    if plan.config.approximate_silu:
        sigmoids = [approximate_sigmoid(gate, on_gpu=plan.on_gpu) for gate in gates]
        return tuple(g * up * s for g, up, s in zip(gates, ups, sigmoids, strict=True))
    return tuple(gate * up / (1 + jnp.exp(-gate)) for gate, up in zip(gates, ups, strict=True))


def _quantize(
    plan: Plan, buffers: Buffers, warpgroup: jax.Array, tile: Tile, values: jax.Array, i: jax.Array
) -> jax.Array:
    """Returns a warpgroup's share in float8, and stores its row scales."""
    (row, _), amax = plan.stage_offset(warpgroup), jnp.max(jnp.abs(values), axis=1)
    count = jnp.clip(tile.rows - row, 0, ROWS)
    if buffers.row_max_exchange is not None:
        amax = buffers.row_max_exchange.maximum(amax, warpgroup, i)
        count = jnp.where(warpgroup == 0, count, 0)  # both have the same scales
    values, scales = quantize_rows(values, amax)
    column = lax.div(tile.column, SCALE_BLOCK)
    store_scales(buffers.out_scale, scales, count, tile.row + row, column, on_gpu=plan.on_gpu)
    return values


def quantize_rows(values: jax.Array, amax: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantizes ``values`` [64, columns] to float8 with one scale per row, [64].

    The result is block_quant's, except that values are multiplied by the inverse scale, where
    block_quant divides. The two differ in the last bit of float32, which changes a float8 value
    only if it is near the middle between two. No value exceeds 448, so none has to be clipped.

    Args:
      amax: largest absolute value of each row.
    """
    amax = jnp.maximum(amax, SMALLEST_AMAX)
    factors = lax.broadcast_in_dim(FLOAT8_MAX / amax, values.shape, (0,))
    return (values * factors).astype(FLOAT8), amax / FLOAT8_MAX


def store_rows(staged: Any, out: Any, count: jax.Array, row: jax.Array, columns: Any) -> None:
    """Stores the first ``count`` rows of a staging buffer to ``out``, from ``row`` on.

    A full buffer is one TMA store. Otherwise there is one store per bit of ``count``, all in one
    group.
    """

    @when(count == ROWS)
    def _() -> None:
        plgpu.copy_smem_to_gmem(staged, out.at[pl.ds(row, ROWS), columns])

    @when((count > 0) & (count < ROWS))
    def _() -> None:
        def store(first: Any, rows: int) -> None:
            plgpu.copy_smem_to_gmem(
                staged.at[pl.ds(first, rows)],
                out.at[pl.ds(row + first, rows), columns],
                commit_group=False,
            )

        _for_powers_of_two(count, _STORE_HEIGHTS, store)
        plgpu.commit_smem_to_gmem_group()


def _for_powers_of_two(
    count: jax.Array, heights: tuple[int, ...], store: Callable[[Any, int], None]
) -> None:
    """Calls ``store(first, rows)`` for each bit of ``count``, so that together they cover it."""
    first: Any = 0
    for rows in heights:

        @when((count & rows) != 0)
        def _(first: Any = first, rows: int = rows) -> None:
            store(first, rows)

        first = first + (count & rows)


def store_scales(
    out: Any,
    scales: jax.Array,
    count: jax.Array,
    row: jax.Array,
    column: jax.Array,
    *,
    on_gpu: bool,
) -> None:
    """Stores the first ``count`` of 64 row scales to one column of ``out``, from ``row`` on.

    Args:
      out: float32 [rows, columns] in global memory.
    """
    if not on_gpu:

        def store(first: Any, rows: int) -> None:
            first = jnp.asarray(first, jnp.int32)
            out[pl.ds(row + first, rows), column] = lax.dynamic_slice(scales, (first,), (rows,))

        _for_powers_of_two(count, (ROWS, *_STORE_HEIGHTS), store)
        return

    @inline(REF, ROW, SCALAR, SCALAR, SCALAR)
    def write(out: Any, scales: Any, count: Any, row: Any, column: Any) -> None:
        columns = ir.MemRefType(out.type).shape[1]
        _, lane = warp_and_lane()
        quarter = arith.andi(lane, const(3))  # of the four threads that have a row, 0 stores
        first, start = wgmma_row(), mgpu.utils.memref_ptr(out)
        for half, register in enumerate(scales.registers.flat):
            r = arith.addi(first, const(8 * half))
            index = arith.muli(arith.addi(word(row), r), const(columns))
            index = arith.addi(index, word(column))
            address = mgpu.utils.getelementptr(start, [index], ir.F32Type.get())
            value = item(register, 0)
            text = """{
                .reg .pred p;
                setp.lt.s32 p, $2, $3;
                setp.eq.and.s32 p, $4, 0, p;
                @p st.global.f32 [$0], $1;
            }"""
            operands = llvm.ptrtoint(i64(), address), value, r, word(count), quarter
            asm(text, "l,f,r,r,r,~{memory}", *operands, effects=True)

    write(out, scales, count, row, column)
