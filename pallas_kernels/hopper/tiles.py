"""Layouts in registers, and buffers in shared memory, of the operands of tensor core instructions.

wgmma reads tiles of eight rows by 128 bytes, swizzled. TMA copies tiles too, but only at multiples
of eight rows. A tile that is one swizzle atom wide has the same bytes as an untiled array of such
rows, so :func:`two_views` gives a buffer both views. Numbers that are not contiguous in global
memory are loaded to registers in the layout of a tile's rows.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.hopper.ir import (
    INT32,
    REF,
    SCALAR,
    Registers,
    array,
    const,
    element,
    f32,
    i32,
    inline,
    item,
    scalar,
    single,
    value_of,
    wgmma_row,
)
from pallas_kernels.hopper.launch import Ref

ROWS = 64  # the M of a wgmma instruction

ACC: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
WGMMA = plgpu.Layout.WGMMA
ROW = WGMMA.reduce(1)  # layout of a vector with one number per row of an accumulator
COLUMN = WGMMA.reduce(0)  # layout of a vector with one number per column of an accumulator

TILING = (8, 64)
TILED = (plgpu.TilingTransform(TILING), plgpu.SwizzleTransform(128))
"""Transforms of a buffer of bfloat16 tiles."""
TILES = plgpu.RefType(TILED)  # type of such a buffer in inlined code


def tiles_of(*shape: int) -> Any:
    """Returns a bfloat16 buffer in shared memory, tiled and swizzled as wgmma requires."""
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=TILED)


def two_views(shape: tuple[int, ...], dtype: Any, *, on_gpu: bool) -> Any:
    """Returns a buffer whose last axis is one swizzle atom wide, in a tiled and an untiled view. In
    the interpreter it has only the tiled one, because each view would have its own memory."""
    width = shape[-1] * jnp.dtype(dtype).itemsize
    swizzle = plgpu.SwizzleTransform(width)
    tiling = plgpu.TilingTransform((8, shape[-1]))
    tiled = plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))
    if not on_gpu:
        return tiled
    return plgpu.RefUnion(tiled, plgpu.SMEM(shape, dtype, transforms=(swizzle,)))


def row_vector(value: float) -> jax.Array:
    """Returns a vector [ROWS] of ``value`` in the ROW layout."""
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), ROW)


def spread_rows(vector: jax.Array, columns: int) -> jax.Array:
    """Broadcasts a vector [rows] to [rows, columns]."""
    return lax.broadcast_in_dim(vector, (*vector.shape, columns), [0])


def spread_columns(vector: jax.Array, rows: int) -> jax.Array:
    """Broadcasts a vector [columns] to [rows, columns]."""
    return lax.broadcast_in_dim(vector, (rows, *vector.shape), [1])


# jax 0.10 requires an index here, jax 0.11 warns of one, and jax 0.12 does not accept one.
_INDEX = inspect.signature(plgpu.load).parameters.get("idx")
_ALL_OF_IT: dict[str, Any] = (
    {"idx": ()} if _INDEX is not None and _INDEX.default is inspect.Parameter.empty else {}
)


def load_column(
    numbers: Ref, first: jax.Array, column: jax.Array | int, *, rows: int, on_gpu: bool
) -> jax.Array:
    """Loads 64 numbers of one column of float32 [rows, columns] in global memory, from row
    ``first`` on, in the ROW layout; past the end, the last row's number. A whole warpgroup calls
    it.

    The numbers are not contiguous, so TMA could copy them only from a transposed array, which takes
    another kernel before each matmul. Loading them directly takes two loads per thread and K step,
    which overlap with wgmma."""
    column = jnp.asarray(column, jnp.int32)
    if not on_gpu:
        available = min(rows, ROWS)
        start = jnp.minimum(first, rows - available)
        return numbers[pl.ds(start, available), column][
            jnp.minimum(first - start + jnp.arange(ROWS), available - 1)
        ]

    @inline(REF, SCALAR, SCALAR, returns=plgpu.ShapeDtypeStruct((ROWS,), jnp.float32, layout=ROW))
    def load(numbers: ir.Value, first: Registers, column: Registers) -> Registers:
        columns = ir.MemRefType(numbers.type).shape[1]
        row, start = wgmma_row(), mgpu.utils.memref_ptr(numbers)
        registers = []
        for half in range(2):
            r = arith.addi(arith.addi(value_of(first), row), const(8 * half))
            r = arith.minui(r, const(rows - 1))
            index = arith.addi(arith.muli(r, const(columns)), value_of(column))
            registers.append(single(llvm.load(f32(), element(start, index, f32()))))
        return array(registers, (ROWS,), ROW)

    return load(numbers, first, column)


def when_computed(number: jax.Array, zero: jax.Array, sums: jax.Array) -> jax.Array:
    """Returns ``number`` when ``sums`` have been computed, float32 in the layout of an accumulator.
    ``zero`` is 0, which the compiler does not know.

    An arrival at a barrier does not wait for loads whose results have not been used yet. If its
    index depends on sums of what was loaded, a copy that waits for the barrier cannot overwrite it
    first. One of two neighbouring sums is waited for, which depends on the same loads as the
    other."""

    @inline(SCALAR, SCALAR, WGMMA, returns=INT32)
    def add_nothing(number: Registers, zero: Registers, sums: Registers) -> Registers:
        words = [arith.bitcast(i32(), item(each, 0)) for each in sums.registers.flat]
        nothing = arith.andi(functools.reduce(arith.ori, words), value_of(zero))
        return scalar(arith.addi(value_of(number), nothing))

    return add_nothing(number, zero, sums)


def load_with_layout(ref: Ref, layout: Any) -> jax.Array:
    """Loads all of a reference to memory in a layout, in any version of JAX."""
    return plgpu.load(ref, layout=layout, **_ALL_OF_IT)
