"""Activation vectors of a few tokens: norms, copies to shared memory, and blocks of eight numbers.

A block is what a unit of work yields: eight numbers for each token, one in each thread of half a
warpgroup. Thread i has number ``i % 8`` of token ``i // 8``; the other half repeats the first.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.hopper.ir import REF, array, asm, const, i64, inline, item
from pallas_kernels.hopper.loads import load_with_layout
from pallas_kernels.hopper.warpgroup import meet
from pallas_kernels.route.lanes import LANES, LAYOUT, SHAPE, WARPS, thread_index

_THREADS = 128
_LONGEST = 8192  # numbers of a row that a warpgroup holds at the same time


def norm_row(
    row_g: Any, added_g: Any, weight: jax.Array, target: Any, sums_s: Any, *, eps: float,
    dtype: Any, interpret: Any,
) -> jax.Array:  # fmt: skip
    """Stores the RMS norm of a row in global memory, rounded to ``dtype``, in shared memory.

    Args:
      weight: from :func:`load_weight`.
      target: where, or None. The numbers are returned too.
      added_g: a row that is added first, or None. The sum is rounded to ``dtype``.
      sums_s: float32 [4, 32] in shared memory, of this warpgroup.
    """
    D = row_g.shape[0]
    layout = strided(D)
    row = load_with_layout(row_g, layout).astype(jnp.float32)
    if added_g is not None:
        row += load_with_layout(added_g, layout).astype(jnp.float32)
        row = row.astype(dtype).astype(jnp.float32)
    sums_s[...] = _warp_sums(row * row, layout, interpret)
    meet(interpret)
    mean = sum(sums_s[warp, 0] for warp in range(WARPS)) * (1 / D)
    weight = weight.astype(jnp.float32)
    normed = (row * lax.rsqrt(mean + eps) * weight).astype(dtype)
    if target is not None:
        target[...] = normed.astype(target.dtype)
    meet(interpret)  # before the sums are overwritten
    return normed


def load_weight(weight_g: Any) -> jax.Array:
    """Loads a norm's weights as :func:`norm_row` needs them. A whole warpgroup calls it."""
    return load_with_layout(weight_g, strided(weight_g.shape[0]))


def copy_row(source: Any, target: Any) -> None:
    """Copies a row from global memory, where other programs may have written it, to shared memory.

    A whole warpgroup calls it. A row that is too long to hold is copied in equal pieces.
    """
    (length,) = target.shape
    fewest = -(-length // _LONGEST)
    pieces = next(n for n in range(fewest, length) if length % (n * _THREADS) == 0)
    size = length // pieces
    together = _LONGEST // size
    for first in range(0, pieces, together):
        windows = [pl.ds(n * size, size) for n in range(first, min(first + together, pieces))]
        values = [load_with_layout(source.at[window], strided(size)) for window in windows]
        for window, loaded in zip(windows, values, strict=True):
            target[window] = loaded.astype(target.dtype)


def strided(length: int) -> Any:
    """Returns the layout of a row of ``length`` numbers, in vectors of up to eight."""
    return plgpu.Layout.WG_STRIDED((length,), vec_size=math.gcd(length // _THREADS, 8))


LANE_NUMBERS = plgpu.ShapeDtypeStruct(SHAPE, jnp.float32, layout=LAYOUT)
"""A float32 of each lane."""


def lane_numbers(number: Any) -> mgpu.FragmentedArray:
    """Returns an array of :data:`LANE_NUMBERS` from each thread's register."""
    return array(
        [vector.broadcast(ir.VectorType.get((1,), ir.F32Type.get()), number)], SHAPE, LAYOUT
    )


def own_numbers(row: mgpu.FragmentedArray) -> list[Any]:
    """Returns the registers of the numbers that a thread has of a row."""
    return [
        item(register, i)
        for register in row.registers.flat
        for i in range(ir.VectorType(register.type).shape[0])
    ]


def _warp_sums(row: jax.Array, layout: Any, interpret: Any) -> jax.Array:
    """Returns the sum of each warp's numbers of a row, [4, 32], in all its lanes."""
    if interpret is not None:
        return jnp.full(SHAPE, jnp.sum(row) / WARPS)

    @inline(layout, returns=LANE_NUMBERS)
    def add(row: Any) -> Any:
        f32 = ir.F32Type.get()
        total = functools.reduce(arith.addf, own_numbers(row))
        for distance in (16, 8, 4, 2, 1):
            text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, 0xffffffff;"
            other = asm(text, "=f,f", total, result=f32, effects=True)
            total = arith.addf(total, other)
        return lane_numbers(total)

    return add(row)


def token_and_number() -> tuple[jax.Array, jax.Array]:
    """Returns the token and the number, of eight, of each thread of a block."""
    warp, lane = thread_index(0), thread_index(1)
    token = jnp.bitwise_and(warp, 1) * 4 + lax.shift_right_logical(lane, _all(3))
    return token, jnp.bitwise_and(lane, 7)


def load_block(ref: Any, start: jax.Array, stride: int, tokens: int, interpret: Any) -> jax.Array:
    """Loads a block as float32. Token t's numbers begin at ``start + t * stride``.

    Args:
      ref: flat array in global memory. Threads of absent tokens read the last token's.
    """
    if interpret is not None:
        rows = [ref[pl.ds(start + min(t, tokens - 1) * stride, 8)] for t in range(8)]
        block = jnp.stack(rows).astype(jnp.float32).reshape(2, LANES)
        return jnp.concatenate([block, block])
    token, number = token_and_number()
    index = start + jnp.minimum(token, tokens - 1) * stride + number
    itemsize = jnp.dtype(ref.dtype).itemsize

    @inline(REF, LAYOUT, returns=plgpu.ShapeDtypeStruct(SHAPE, jnp.float32, layout=LAYOUT))
    def load(ref: Any, index: Any) -> Any:
        f32 = ir.F32Type.get()
        if itemsize == 2:
            text = """{
                .reg .b16 low, zero;
                mov.b16 zero, 0;
                ld.global.b16 low, [$1];
                mov.b32 $0, {zero, low};
            }"""
        else:
            text = "ld.global.b32 $0, [$1];"
        number = asm(text, "=f,l", _address(ref, index, itemsize), result=f32, effects=True)
        return array([vector.broadcast(ir.VectorType.get((1,), f32), number)], SHAPE, LAYOUT)

    return load(ref, index)


def store_block(
    ref: Any, start: jax.Array, stride: int, block: jax.Array, tokens: int, interpret: Any
) -> None:
    """Stores the numbers of the first ``tokens`` tokens of a block, see :func:`load_block`.

    They are rounded to the array's dtype.
    """
    if interpret is not None:
        rows = block.reshape(-1)[:64].reshape(8, 8).astype(ref.dtype)
        for t in range(tokens):
            ref[pl.ds(start + t * stride, 8)] = rows[t]
        return
    token, number = token_and_number()
    exists = (token < tokens) & (thread_index(0) < 2)
    index = jnp.where(exists, start + token * stride + number, -1)
    itemsize = jnp.dtype(ref.dtype).itemsize

    @inline(REF, LAYOUT, LAYOUT)
    def write(ref: Any, index: Any, block: Any) -> None:
        if itemsize == 2:
            text = """{
                .reg .pred there; .reg .b16 low;
                setp.ge.s32 there, $1, 0;
                cvt.rn.bf16.f32 low, $2;
                @there st.global.b16 [$0], low;
            }"""
        else:
            text = """{
                .reg .pred there;
                setp.ge.s32 there, $1, 0;
                @there st.global.b32 [$0], $2;
            }"""
        address = _address(ref, index, itemsize)
        operands = address, _only(index), _only(block)
        asm(text, "l,r,f,~{memory}", *operands, effects=True)

    write(ref, index, block)


def _address(ref: Any, index: Any, itemsize: int) -> Any:
    base = llvm.ptrtoint(i64(), mgpu.utils.memref_ptr(ref))
    size = arith.constant(i64(), ir.IntegerAttr.get(i64(), itemsize))
    return arith.addi(base, arith.muli(arith.extsi(i64(), _only(index)), size))


def _only(values: Any) -> Any:
    """Returns the register of a thread's only number."""
    return llvm.extractelement(values.registers.item(), const(0))


def _all(n: int) -> jax.Array:
    return plgpu.layout_cast(jnp.full(SHAPE, n, jnp.int32), LAYOUT)
