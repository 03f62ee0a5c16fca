"""Scales of rows, from where they lie: one number for each of 64 rows, a row's K/128 apart.

TMA copies what is contiguous, so that it would have to be given the scales transposed, by one more
kernel before each product. Reading them here costs two loads a thread and step, under a product.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

ROWS = 64
_LAYOUT = plgpu.Layout.WGMMA.reduce(1)


def row_scales(
    scales: Any, first: jax.Array, column: jax.Array | int, *, rows: int, on_gpu: bool
) -> jax.Array:
    """float32 [64] of ``scales`` [rows, columns] in global memory, by a whole warpgroup.

    Past the last row stands the last row's.
    """
    column = jnp.asarray(column, jnp.int32)
    if not on_gpu:
        held = min(rows, ROWS)
        start = jnp.minimum(first, rows - held)
        return scales[pl.ds(start, held), column][
            jnp.minimum(first - start + jnp.arange(ROWS), held - 1)
        ]
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), scalar, scalar),
        return_type=plgpu.ShapeDtypeStruct((ROWS,), jnp.float32, layout=_LAYOUT),
    )
    def load(_: Any, scales: Any, first: Any, column: Any) -> Any:
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        columns = ir.MemRefType(scales.type).shape[1]

        def constant(value: int) -> Any:
            return arith.constant(i32, ir.IntegerAttr.get(i32, value))

        thread = arith.andi(mgpu.utils.thread_idx(), constant(127))
        warp, lane = arith.shrui(thread, constant(5)), arith.andi(thread, constant(31))
        # A thread holds two rows of its warp's sixteen.
        row = arith.addi(arith.muli(warp, constant(16)), arith.shrui(lane, constant(2)))
        start, found = mgpu.utils.memref_ptr(scales), []
        for half in range(2):
            r = arith.addi(arith.addi(first.registers.item(), row), constant(8 * half))
            r = arith.minui(r, constant(rows - 1))
            place = arith.addi(arith.muli(r, constant(columns)), column.registers.item())
            value = llvm.load(f32, mgpu.utils.getelementptr(start, [place], f32))
            found.append(vector.broadcast(ir.VectorType.get((1,), f32), value))
        layout = _LAYOUT.to_mgpu()
        registers = np.array(found, dtype=object).reshape(layout.registers_shape((ROWS,)))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(scales, first, column)  # pyright: ignore[reportCallIssue]: the context is Mosaic's
