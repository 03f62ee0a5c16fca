"""Scales of rows, from where they lie: one number for each of 64 rows, a row's K/128 apart.

TMA copies what is contiguous, so that it would have to be given the scales transposed, by one more
kernel before each product. Reading them here costs two loads a thread and step, under a product.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.mosaic_ir import REF, SCALAR, array, const, inline, wgmma_row, word

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

    @inline(
        REF, SCALAR, SCALAR, returns=plgpu.ShapeDtypeStruct((ROWS,), jnp.float32, layout=_LAYOUT)
    )
    def load(scales: Any, first: Any, column: Any) -> Any:
        f32 = ir.F32Type.get()
        columns = ir.MemRefType(scales.type).shape[1]
        row, start = wgmma_row(), mgpu.utils.memref_ptr(scales)
        found = []
        for half in range(2):
            r = arith.addi(arith.addi(word(first), row), const(8 * half))
            r = arith.minui(r, const(rows - 1))
            place = arith.addi(arith.muli(r, const(columns)), word(column))
            value = llvm.load(f32, mgpu.utils.getelementptr(start, [place], f32))
            found.append(vector.broadcast(ir.VectorType.get((1,), f32), value))
        return array(found, (ROWS,), _LAYOUT)

    return load(scales, first, column)
