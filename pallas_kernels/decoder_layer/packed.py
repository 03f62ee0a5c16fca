"""Activation rows in float16, which meet float8 weights without a detour through bfloat16.

A machine instruction converts two float8 to float16, where two bfloat16 take five; and float16
holds every float8, int8 and int4. A bfloat16 has fewer bits of significand than float16, but more
exponents. So a row is multiplied by a power of two that brings its largest number between 2^14 and
2^15, and results are multiplied by the inverse, the row's factor. Numbers down to 2^-28 of the
largest remain exact, smaller ones have an error of 2^-40 of the largest at most.

The bits are kept in the activations' memory, whose type is bfloat16. Rows for integers are stored
in the order of :func:`integers.permute`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.decoder_layer import integers
from pallas_kernels.decoder_layer.formats import is_integer
from pallas_kernels.decoder_layer.vectors import (
    LANE_NUMBERS,
    lane_numbers,
    own_numbers,
    strided,
)
from pallas_kernels.hopper.ir import REF, SCALAR, asm, const, i32, inline, item
from pallas_kernels.hopper.ir import word as register
from pallas_kernels.hopper.loads import load_with_layout
from pallas_kernels.hopper.warpgroup import meet
from pallas_kernels.route.lanes import LANES, SHAPE, WARPS, thread_index

_LARGEST = 14  # exponent of a row's largest number
_THREADS = 128
_BIAS, _SIGNIFICAND = 127, 23  # of float32
# Numbers that a warpgroup holds at the same time, if there are several rows.
_LONGEST = 8192


def pack_rows(
    rows: Sequence[tuple[Any, Any, Any]], weights: Any, maxima_s: Any, interpret: Any
) -> None:
    """Stores rows of the same length in float16 in shared memory. A whole warpgroup calls it.

    Args:
      rows: of each its source in global memory, its target, and its factor's reference.
      weights: dtype of the weights that they meet.
      maxima_s: float32 [4, 32] in shared memory, of this warpgroup.
    """
    length = rows[0][1].shape[0]
    together = min(LANES, max(1, _LONGEST // length))
    for first in range(0, len(rows), together):
        group = rows[first : first + together]
        values = [load_with_layout(source, strided(length)) for source, _, _ in group]
        pack(values, [each[1:] for each in group], weights, maxima_s, interpret)


def pack(
    rows: Sequence[jax.Array], targets: Sequence[tuple[Any, Any]], weights: Any, maxima_s: Any,
    interpret: Any,
) -> None:  # fmt: skip
    """Stores rows, which a warpgroup has in registers, in float16.

    Args:
      targets: of each row where it goes, and its factor's reference.
      weights, maxima_s: see :func:`pack_rows`.
    """
    maxima, lane = None, thread_index(1)
    for n, row in enumerate(rows):
        own = _warp_maximum(row, interpret)
        maxima = own if maxima is None else jnp.where(lane == n, own, maxima)
    maxima_s[...] = maxima
    meet(interpret)
    for n, (row, (target, factor_s)) in enumerate(zip(rows, targets, strict=True)):
        largest = functools.reduce(jnp.maximum, [maxima_s[warp, n] for warp in range(WARPS)])
        power, inverse = _powers(largest, interpret)
        packed = (row.astype(jnp.float32) * power).astype(jnp.float16)
        if is_integer(weights):
            _store_permuted(target, packed, weights, interpret)
        else:
            target[...] = lax.bitcast_convert_type(packed, target.dtype)
        factor_s[...] = inverse
    meet(interpret)  # before the maxima are overwritten


def _store_permuted(target: Any, row: jax.Array, weights: Any, interpret: Any) -> None:
    """Stores a row in the order of :func:`integers.permute`."""
    (length,) = row.shape
    if interpret is not None:
        row = integers.permute(row, weights)
        target[...] = lax.bitcast_convert_type(row, target.dtype)
        return

    layout = strided(length)

    @inline(REF, layout)
    def store(target: Any, row: Any) -> None:
        f16 = ir.F16Type.get()
        thread = arith.andi(mgpu.utils.thread_idx(), const(_THREADS - 1))
        registers = list(row.registers.flat)
        count = length // (_THREADS * len(registers))  # numbers of a register
        memory, size = mgpu.utils.memref_ptr(target), _THREADS * count
        first = arith.muli(thread, const(count))
        # A register's numbers that stay together: a piece, whose own order is known, or one.
        if count == integers.PIECE:
            at, order = integers.position(first, weights), integers.order_of_piece(weights)
            mask = ir.DenseI64ArrayAttr.get(order)
            for n, register_ in enumerate(registers):
                shuffled = vector.shuffle(register_, register_, mask)
                pointer = mgpu.utils.getelementptr(memory, [at], f16)
                pointer = mgpu.utils.getelementptr(pointer, [const(n * size)], f16)
                llvm.store(shuffled, pointer, alignment=16)
            return
        for i in range(count):
            at = integers.position(arith.addi(first, const(i)), weights)
            pointer = mgpu.utils.getelementptr(memory, [at], f16)
            for n, register_ in enumerate(registers):
                own = mgpu.utils.getelementptr(pointer, [const(n * size)], f16)
                llvm.store(item(register_, i), own)

    store(target, row)


def _powers(largest: jax.Array, interpret: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the power of two for a row's largest number, and its inverse."""
    # Less than 2^-112 counts as that much, so that both powers are normal numbers.
    least, sum_of_both = _LARGEST + 1, 2 * _BIAS
    if interpret is not None:
        exponent = lax.shift_right_logical(lax.bitcast_convert_type(largest, jnp.int32), 23)
        inverse = jnp.maximum(exponent, least) - _LARGEST
        both = [sum_of_both - inverse, inverse]
        power, inverse = (lax.bitcast_convert_type(n << _SIGNIFICAND, jnp.float32) for n in both)
        return power, inverse

    number = plgpu.ShapeDtypeStruct((), jnp.float32, layout=SCALAR)

    @inline(SCALAR, returns=(number, number))
    def powers(largest: Any) -> Any:
        smallest = llvm.bitcast(ir.F32Type.get(), const(least << _SIGNIFICAND))
        bits = llvm.bitcast(i32(), arith.maximumf(register(largest), smallest))
        exponent = arith.shrui(bits, const(_SIGNIFICAND))
        inverse = arith.subi(exponent, const(_LARGEST))
        both = [arith.subi(const(sum_of_both), inverse), inverse]
        shifted = [arith.shli(n, const(_SIGNIFICAND)) for n in both]
        floats = [llvm.bitcast(ir.F32Type.get(), n) for n in shifted]
        return tuple(mgpu.FragmentedArray.splat(x, (), SCALAR.to_mgpu()) for x in floats)

    return powers(largest)


def _warp_maximum(row: jax.Array, interpret: Any) -> jax.Array:
    """Returns the largest magnitude of each warp's numbers of a row, [4, 32], in all its lanes."""
    row = jnp.abs(row.astype(jnp.float32))
    if interpret is not None:
        return jnp.full(SHAPE, jnp.max(row))

    @inline(strided(row.shape[0]), returns=LANE_NUMBERS)
    def find(row: Any) -> Any:
        largest = functools.reduce(arith.maximumf, own_numbers(row))
        # Magnitudes are ordered as their bits, whose sign is 0. This is one instruction.
        text = "redux.sync.max.s32 $0, $1, 0xffffffff;"
        bits = llvm.bitcast(i32(), largest)
        largest = asm(text, "=r,r", bits, result=i32(), effects=True)
        return lane_numbers(llvm.bitcast(ir.F32Type.get(), largest))

    return find(row)
