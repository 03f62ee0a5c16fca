"""Scales of matrices in the lanes' registers.

A float8 matrix has a float32 for each 128x128 block, which all rows of a unit share. An int4 matrix
has one for 128 columns of each row, an int8 matrix one for each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.decoder_layer.formats import SCALE_BLOCK
from pallas_kernels.decoder_layer.registers import BLOCK_BYTES, WARPS
from pallas_kernels.hopper.ir import REF, SCALAR, array, asm, const, i64, inline
from pallas_kernels.hopper.ir import word as register
from pallas_kernels.route.lanes import LANES, LAYOUT, SHAPE, thread_index


def load_scales(
    scales: Any, start: jax.Array, first: int, columns: int, interpret: Any
) -> list[jax.Array]:
    """Loads the scales of a row of blocks, one per lane and for as many arrays as they need.

    Args:
      scales: flat float32 array in global memory.
      start: index of the scales of the row's first column.
      first, columns: first column and number of columns that are needed.
    """
    low, high = first // SCALE_BLOCK, (first + columns - 1) // SCALE_BLOCK
    count = high - low + 1
    chunks = []
    for chunk in range(0, count, LANES):
        n = min(LANES, count - chunk)
        if interpret is not None:
            values = scales[pl.ds(start + low + chunk, n)]
            chunks.append(jnp.broadcast_to(jnp.pad(values, (0, LANES - n)), SHAPE))
            continue
        index = jnp.minimum(thread_index(1), n - 1) + (start + (low + chunk))
        chunks.append(_load(scales, index))
    return chunks


def load_row_scales(operand: Any, halves: Sequence[Any], interpret: Any) -> list[jax.Array]:
    """Loads the scales of both halves' rows of integers, whose first scale is ``scales_start``.

    Of the four lanes with a row, see :mod:`registers`, the first two have those of the left half's
    first and second block that the warp multiplies in a stage, the others those of the right half.

    Args:
      operand: a :class:`stream.Operand`.

    Returns:
      Numbers in the lanes' registers for each stage, or for all of them if there is one per row. In
      the interpreter [8, groups] for each half.
    """
    groups = operand.groups
    starts = [jnp.asarray(half.scales_start, jnp.int32) for half in halves]
    if interpret is not None:
        rows = [half.scales[pl.ds(n, 8 * groups)] for half, n in zip(halves, starts, strict=True)]
        return [row.reshape(8, groups) for row in rows]
    blocks = operand.step_bytes // BLOCK_BYTES
    assert blocks <= 2 * WARPS
    stages = operand.steps if operand.group else 1

    @inline(REF, REF, SCALAR, SCALAR, returns=(_OF_LANES,) * stages)
    def load(left: Any, right: Any, left_start: Any, right_start: Any) -> Any:
        f32 = ir.F32Type.get()
        thread = mgpu.utils.thread_idx()
        row, quarter = (
            arith.andi(arith.shrui(thread, const(2)), const(7)),
            arith.andi(thread, const(3)),
        )
        is_right = arith.cmpi(arith.CmpIPredicate.uge, quarter, const(2))
        memory = [mgpu.utils.memref_ptr(ref) for ref in (left, right)]
        start = arith.select(is_right, register(right_start), register(left_start))
        start = arith.addi(start, arith.muli(row, const(groups)))
        first = arith.divui(arith.muli(mgpu.utils.warp_idx(), const(blocks)), const(WARPS))
        first = arith.addi(first, arith.andi(quarter, const(1)))
        numbers = []
        for stage in range(stages):
            # A warp may have no second block.
            group = arith.minui(arith.addi(first, const(stage * blocks)), const(groups - 1))
            index = arith.addi(start, group)
            of_halves = [mgpu.utils.getelementptr(each, [index], f32) for each in memory]
            pointer = arith.select(is_right, of_halves[1], of_halves[0])
            value = vector.broadcast(ir.VectorType.get((1,), f32), llvm.load(f32, pointer))
            numbers.append(array([value], SHAPE, LAYOUT))
        return tuple(numbers)

    return list(load(*(half.scales for half in halves), *starts))


def prefetch_scales(scales: Any, start: jax.Array | int, count: int, interpret: Any) -> None:
    """Brings ``count`` scales into the L2 cache. A whole warp calls it."""
    if interpret is not None:
        return
    sector = 8  # float32 in the 32 bytes that a prefetch brings

    @inline(REF, SCALAR)
    def prefetch(scales: Any, start: Any) -> None:
        lane = arith.andi(mgpu.utils.thread_idx(), const(LANES - 1))
        for first in range(0, count, LANES * sector):
            index = arith.addi(arith.muli(lane, const(sector)), const(first))
            index = arith.addi(arith.minui(index, const(count - 1)), register(start))
            pointer = mgpu.utils.memref_ptr(scales)
            pointer = mgpu.utils.getelementptr(pointer, [index], ir.F32Type.get())
            address = llvm.ptrtoint(i64(), pointer)
            asm("prefetch.global.L2 [$0];", "l", address, effects=True)

    prefetch(scales, jnp.asarray(start, jnp.int32))


_OF_LANES = plgpu.ShapeDtypeStruct(SHAPE, jnp.float32, layout=LAYOUT)


def _load(ref: Any, index: jax.Array) -> jax.Array:
    """Returns ``ref[index]`` of float32 weights in global memory, which the kernel never writes."""

    @inline(REF, LAYOUT, returns=_OF_LANES)
    def load(ref: Any, index: Any) -> Any:
        f32 = ir.F32Type.get()
        position = llvm.extractelement(index.registers.item(), const(0))
        pointer = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [position], f32)
        value = vector.broadcast(ir.VectorType.get((1,), f32), llvm.load(f32, pointer))
        return array([value], SHAPE, LAYOUT)

    return load(ref, index)
