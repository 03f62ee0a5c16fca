"""The scales of a float8 matrix: one float32 per 128x128 block, in the lanes' registers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.decoder_layer.registers import SCALE_BLOCK
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


def prefetch_scales(scales: Any, start: jax.Array | int, columns: int, interpret: Any) -> None:
    """Brings the scales of a row of blocks into the L2 cache. A whole warp calls it.

    Args: see :func:`load_scales`.
    """
    if interpret is not None:
        return
    count = -(-columns // SCALE_BLOCK)
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


def _load(ref: Any, index: jax.Array) -> jax.Array:
    """Returns ``ref[index]`` of float32 weights in global memory, which the kernel never writes."""

    @inline(REF, LAYOUT, returns=plgpu.ShapeDtypeStruct(SHAPE, jnp.float32, layout=LAYOUT))
    def load(ref: Any, index: Any) -> Any:
        f32 = ir.F32Type.get()
        position = llvm.extractelement(index.registers.item(), const(0))
        pointer = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [position], f32)
        value = vector.broadcast(ir.VectorType.get((1,), f32), llvm.load(f32, pointer))
        return array([value], SHAPE, LAYOUT)

    return load(ref, index)
