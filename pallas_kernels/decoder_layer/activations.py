"""Activation rows of a few tokens: norms, merges, and copies to shared memory; blocks of results.

Rows for bfloat16 weights are bfloat16 in shared memory. Rows for float8, int8 or int4 weights are
float16 (:func:`pack`): an instruction converts two float8 to float16, where two
bfloat16 take five, and float16 represents every float8, int8 and int4 exactly. float16 has more
bits of significand than bfloat16, but fewer of exponent. So a row is multiplied by the power of two
that brings its largest number between 2^14 and 2^15, and results by the inverse, the row's factor.
Numbers down to 2^-28 of the largest remain exact, smaller ones have an error of at most 2^-40 of
it. The bits are stored in memory of type bfloat16; rows for integers in the order of
:func:`permute`.

A block is the result of a unit of work: eight numbers for each token, one per thread of half a
warpgroup. Thread i has number ``i % 8`` of token ``i // 8``; the other half repeats the first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.decoder_layer.reference import columns_per_element, is_integer
from pallas_kernels.hopper import Index, Ref
from pallas_kernels.hopper.ir import (
    REF,
    SCALAR,
    Registers,
    asm,
    const,
    element,
    f32,
    global_address,
    i32,
    i64,
    inline,
    item,
    numbers_of,
)
from pallas_kernels.hopper.ir import value_of as register
from pallas_kernels.hopper.lanes import (
    LANES,
    LAYOUT,
    SHAPE,
    WARPS,
    filled,
    only,
    per_thread,
    thread_index,
)
from pallas_kernels.hopper.online_softmax import NO_SCORE
from pallas_kernels.hopper.registers import exchanged
from pallas_kernels.hopper.split_kv import Parts, add_parts
from pallas_kernels.hopper.tiles import load_with_layout
from pallas_kernels.hopper.warpgroup import sync_warpgroup, when

PIECE = 8  # activations that a thread loads at a time for integer weights

THREADS_PER_ROW = 4
"""Threads that share the 64 bytes of a weight row that a warp multiplies at a time."""

THREAD_BYTES = 16  # bytes of these that each thread has

_THREADS = 128
_LONGEST = 8192  # numbers of rows that a warpgroup has in registers at the same time
_PARALLEL_LOADS = 8  # parts of attention's output that a warpgroup loads concurrently
_LARGEST = 14  # exponent of the largest number of a float16 row
_BIAS, _SIGNIFICAND = 127, 23  # of float32

PER_THREAD = plgpu.ShapeDtypeStruct(SHAPE, jnp.float32, layout=LAYOUT)
"""A float32 for each thread of a warpgroup."""


def strided(length: int) -> Any:
    """Returns the layout of a row of ``length`` numbers, in vectors of up to eight."""
    return plgpu.Layout.WG_STRIDED((length,), vec_size=math.gcd(length // _THREADS, 8))


# ---- rows to shared memory. A whole warpgroup calls each of these. ----


def load_weight(weight_g: Ref) -> jax.Array:
    """Loads a norm's weights, in the layout of :func:`norm_row`."""
    return load_with_layout(weight_g, strided(weight_g.shape[0]))


def norm_row(
    row_g: Ref, weight: jax.Array, target: Ref, sums_s: Ref, eps: float, dtype: Any, interpret: Any
) -> jax.Array:
    """Returns the RMS norm of a row in global memory, rounded to ``dtype``, and stores it to
    ``target`` if there is one. ``sums_s`` are float32 [4, 32] in shared memory, of this
    warpgroup."""
    D = row_g.shape[0]
    layout = strided(D)
    row = load_with_layout(row_g, layout).astype(jnp.float32)
    sums_s[...] = _warp_sums(row * row, layout, interpret)
    sync_warpgroup(interpret)
    mean = sum(sums_s[warp, 0] for warp in range(WARPS)) * (1 / D)
    weight = weight.astype(jnp.float32)
    normed = (row * lax.rsqrt(mean + eps) * weight).astype(dtype)
    if target is not None:
        target[...] = normed.astype(target.dtype)
    sync_warpgroup(interpret)  # before the sums are overwritten
    return normed


def _warp_sums(row: jax.Array, layout: Any, interpret: Any) -> jax.Array:
    """Returns the sum of each warp's numbers of a row, [4, 32], in all its lanes."""
    if interpret is not None:
        return jnp.full(SHAPE, jnp.sum(row) / WARPS)

    @inline(layout, returns=PER_THREAD)
    def add(row: Registers) -> Registers:
        total = functools.reduce(arith.addf, numbers_of(row))
        for distance in (16, 8, 4, 2, 1):
            total = arith.addf(total, exchanged(total, distance))
        return per_thread(total)

    return add(row)


def copy_row(source: Ref, target: Ref) -> None:
    """Copies a row from global memory, where other CTAs may have written it, to shared memory, in
    equal pieces that fit the registers."""
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


def merge_row(parts: Parts, sequence: int, row: Index, columns: Any, target: Ref) -> None:
    """Stores columns of a row of attention's output, merged from its parts, in shared memory. Every
    CTA merges the rows of the heads that it needs, which saves the kernel :mod:`mla_decode.merge`.
    The parts are in the L2 cache. ``columns`` is a ``pl.ds`` of a multiple of 128."""
    (length,) = target.shape
    layout = strided(length)
    first, count = parts.of_sequence(sequence)

    def store(values: jax.Array) -> None:
        target[...] = values.astype(parts.out.dtype).astype(target.dtype)

    @when(count == 0)
    def _() -> None:
        store(load_with_layout(parts.out.at[sequence, row, columns], layout).astype(jnp.float32))

    @when(count > 0)
    def _() -> None:
        def add(i: Index, carry: Any) -> Any:
            """Issues all loads before the first use. Past the last part it loads that one again,
            with weight 0."""
            numbers = [i * _PARALLEL_LOADS + j for j in range(_PARALLEL_LOADS)]
            indices = [first + jnp.minimum(n, count - 1) for n in numbers]
            lses = [parts.lse[index, row] for index in indices]
            values = [
                load_with_layout(parts.partials.at[index, row, columns], layout)
                for index in indices
            ]
            return add_parts(carry, numbers, count, lses, values)

        zeros = plgpu.layout_cast(jnp.zeros((length,), jnp.float32), layout)
        carry = zeros, jnp.float32(0.0), jnp.float32(NO_SCORE)
        rounds = lax.div(count + (_PARALLEL_LOADS - 1), jnp.int32(_PARALLEL_LOADS))
        total, weight, _ = lax.fori_loop(0, rounds, add, carry)
        store(total / jnp.where(weight == 0.0, 1.0, weight))


# ---- float16 rows ----


def pack_rows(
    rows: Sequence[tuple[Any, Any, Any]], weights: Any, maxima_s: Ref, interpret: Any
) -> None:
    """Copies rows of the same length from global memory to shared memory, in float16: each is its
    source, target, and the reference to its factor. ``maxima_s`` are float32 [4, 32] in shared
    memory, of this warpgroup, and ``weights`` their dtype."""
    length = rows[0][1].shape[0]
    together = min(LANES, max(1, _LONGEST // length))
    for first in range(0, len(rows), together):
        group = rows[first : first + together]
        values = [load_with_layout(source, strided(length)) for source, _, _ in group]
        pack(values, [each[1:] for each in group], weights, maxima_s, interpret)


def pack(
    rows: Sequence[jax.Array], targets: Sequence[tuple[Any, Any]], weights: Any, maxima_s: Ref,
    interpret: Any,
) -> None:  # fmt: skip
    """Stores rows, which a warpgroup has in registers, in float16 as :func:`pack_rows`. ``targets``
    are the target of each row, and the reference to its factor."""
    maxima, lane = None, thread_index(1)
    for n, row in enumerate(rows):
        maximum = _warp_maximum(row, interpret)
        maxima = maximum if maxima is None else jnp.where(lane == n, maximum, maxima)
    maxima_s[...] = maxima
    sync_warpgroup(interpret)
    for n, (row, (target, factor_s)) in enumerate(zip(rows, targets, strict=True)):
        largest = functools.reduce(jnp.maximum, [maxima_s[warp, n] for warp in range(WARPS)])
        power, inverse = _powers(largest, interpret)
        packed = (row.astype(jnp.float32) * power).astype(jnp.float16)
        if is_integer(weights):
            _store_permuted(target, packed, weights, interpret)
        else:
            target[...] = lax.bitcast_convert_type(packed, target.dtype)
        factor_s[...] = inverse
    sync_warpgroup(interpret)  # before the maxima are overwritten


def _warp_maximum(row: jax.Array, interpret: Any) -> jax.Array:
    """Returns the largest magnitude of each warp's numbers of a row, [4, 32], in all its lanes."""
    row = jnp.abs(row.astype(jnp.float32))
    if interpret is not None:
        return jnp.full(SHAPE, jnp.max(row))

    @inline(strided(row.shape[0]), returns=PER_THREAD)
    def find(row: Registers) -> Registers:
        largest = functools.reduce(arith.maximumf, numbers_of(row))
        # Magnitudes are ordered as their bits, whose sign is 0. This is one instruction.
        text = "redux.sync.max.s32 $0, $1, 0xffffffff;"
        bits = llvm.bitcast(i32(), largest)
        largest = asm(text, "=r,r", bits, result=i32(), effects=True)
        return per_thread(llvm.bitcast(f32(), largest))

    return find(row)


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
    def powers(largest: Registers) -> tuple[Registers, ...]:
        smallest = llvm.bitcast(f32(), const(least << _SIGNIFICAND))
        bits = llvm.bitcast(i32(), arith.maximumf(register(largest), smallest))
        exponent = arith.shrui(bits, const(_SIGNIFICAND))
        inverse = arith.subi(exponent, const(_LARGEST))
        both = [arith.subi(const(sum_of_both), inverse), inverse]
        shifted = [arith.shli(n, const(_SIGNIFICAND)) for n in both]
        floats = [llvm.bitcast(f32(), n) for n in shifted]
        return tuple(mgpu.FragmentedArray.splat(x, (), SCALAR.to_mgpu()) for x in floats)

    return powers(largest)


# ---- the order of float16 rows for integer weights ----


def _pieces(dtype: Any) -> int:
    """Returns the number of pieces of activations for the weights that a thread has."""
    return THREAD_BYTES * columns_per_element(dtype) // PIECE


def permute(values: jax.Array, dtype: Any) -> jax.Array:
    """Returns activations [..., columns] in the order in which integer weights need them. The four
    threads of a weight row read pieces of eight activations at the same time. These are adjacent in
    memory, and so in different banks. For int4, each of a piece's first four columns is followed by
    the one four columns further on: both weights' bits are extracted together."""
    pieces = _pieces(dtype)
    blocks = values.reshape(*values.shape[:-1], -1, THREADS_PER_ROW, pieces, PIECE)
    blocks = jnp.swapaxes(blocks, -3, -2)
    if columns_per_element(dtype) == 2:
        blocks = jnp.swapaxes(blocks.reshape(*blocks.shape[:-1], 2, PIECE // 2), -2, -1)
    return blocks.reshape(values.shape)


def order_of_piece(dtype: Any) -> list[int]:
    """Returns the columns of a piece in the order of :func:`permute`."""
    if columns_per_element(dtype) == 1:
        return list(range(PIECE))
    half = PIECE // 2
    return [n // 2 + half * (n % 2) for n in range(PIECE)]


def position(column: ir.Value, dtype: Any) -> ir.Value:
    """Returns the position of a column in the order of :func:`permute`, both in registers."""
    pieces = _pieces(dtype)
    bits = pieces.bit_length() - 1
    width = THREADS_PER_ROW * pieces * PIECE
    piece, within = arith.shrui(column, const(3)), arith.andi(column, const(PIECE - 1))
    thread = arith.andi(arith.shrui(piece, const(bits)), const(THREADS_PER_ROW - 1))
    first = arith.subi(column, arith.andi(column, const(width - 1)))
    piece = arith.andi(piece, const(pieces - 1))
    piece = arith.addi(arith.muli(piece, const(THREADS_PER_ROW)), thread)
    if columns_per_element(dtype) == 2:
        low, high = arith.andi(within, const(3)), arith.shrui(within, const(2))
        within = arith.addi(arith.muli(low, const(2)), high)
    return arith.addi(arith.addi(first, arith.muli(piece, const(PIECE))), within)


def _store_permuted(target: Ref, row: jax.Array, weights: Any, interpret: Any) -> None:
    """Stores a row in the order of :func:`permute`."""
    (length,) = row.shape
    if interpret is not None:
        target[...] = lax.bitcast_convert_type(permute(row, weights), target.dtype)
        return

    @inline(REF, strided(length)).on(target, row)
    def _(target: ir.Value, row: Registers) -> None:
        f16 = ir.F16Type.get()
        thread = arith.andi(mgpu.utils.thread_idx(), const(_THREADS - 1))
        registers = list(row.registers.flat)
        count = length // (_THREADS * len(registers))  # numbers of a register
        memory, size = mgpu.utils.memref_ptr(target), _THREADS * count
        first = arith.muli(thread, const(count))
        if count == PIECE:  # a register's numbers stay together
            at, order = position(first, weights), order_of_piece(weights)
            mask = ir.DenseI64ArrayAttr.get(order)
            for n, numbers in enumerate(registers):
                shuffled = vector.shuffle(numbers, numbers, mask)
                pointer = element(element(memory, at, f16), const(n * size), f16)
                llvm.store(shuffled, pointer, alignment=16)
            return
        for i in range(count):
            at = position(arith.addi(first, const(i)), weights)
            pointer = element(memory, at, f16)
            for n, numbers in enumerate(registers):
                target_of_n = element(pointer, const(n * size), f16)
                llvm.store(item(numbers, i), target_of_n)


# ---- blocks of results in global memory ----


def token_and_number() -> tuple[jax.Array, jax.Array]:
    """Returns the token of each thread of a block, and the number, of eight."""
    warp, lane = thread_index(0), thread_index(1)
    token = jnp.bitwise_and(warp, 1) * 4 + lax.shift_right_logical(lane, filled(3))
    return token, jnp.bitwise_and(lane, 7)


def load_block(ref: Ref, start: Index, stride: int, tokens: int, interpret: Any) -> jax.Array:
    """Loads a block of a flat bfloat16 array in global memory as float32. Token t's numbers begin
    at ``start + t * stride``. Threads of absent tokens read the last one's."""
    if interpret is not None:
        rows = [ref[pl.ds(start + min(t, tokens - 1) * stride, 8)] for t in range(8)]
        block = jnp.stack(rows).astype(jnp.float32).reshape(2, LANES)
        return jnp.concatenate([block, block])
    token, number = token_and_number()
    index = start + jnp.minimum(token, tokens - 1) * stride + number

    @inline(REF, LAYOUT, returns=PER_THREAD)
    def load(ref: ir.Value, index: Registers) -> Registers:
        text = """{
                .reg .b16 low, zero;
                mov.b16 zero, 0;
                ld.global.b16 low, [$1];
                mov.b32 $0, {zero, low};
            }"""
        address = _address(ref, index, 2)
        return per_thread(asm(text, "=f,l", address, result=f32(), effects=True))

    return load(ref, index)


def store_block(
    ref: Ref, start: Index, stride: int, block: jax.Array, tokens: int, interpret: Any
) -> None:
    """Stores the first ``tokens`` tokens of a block, rounded, where :func:`load_block` loads it."""
    if interpret is not None:
        rows = block.reshape(-1)[:64].reshape(8, 8).astype(ref.dtype)
        for t in range(tokens):
            ref[pl.ds(start + t * stride, 8)] = rows[t]
        return
    token, number = token_and_number()
    exists = (token < tokens) & (thread_index(0) < 2)
    index = jnp.where(exists, start + token * stride + number, -1)
    itemsize = jnp.dtype(ref.dtype).itemsize

    @inline(REF, LAYOUT, LAYOUT).on(ref, index, block)
    def _(ref: ir.Value, index: Registers, block: Registers) -> None:
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
        asm(text, "l,r,f,~{memory}", address, only(index), only(block), effects=True)


def _address(ref: ir.Value, index: Registers, itemsize: int) -> ir.Value:
    base, size = global_address(ref), const(itemsize, 64)
    return arith.addi(base, arith.muli(arith.extsi(i64(), only(index)), size))
