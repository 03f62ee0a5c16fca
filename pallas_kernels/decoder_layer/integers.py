"""Code for single threads: int8 and int4 weights times activations in float16 (:mod:`packed`).

An integer becomes float16 by its bits: in a float16 from 1024 to 2047, the last bit of the
significand is worth 1. OR with 1024 thus adds an unsigned integer to it, and a subtraction leaves
the signed one, exactly.

A thread has 16 bytes of a matrix row, of 64 that its warp multiplies at a time, and needs the same
columns of the activations. These are stored in another order (:func:`permute`), for two reasons.
The four threads of a row read 16 bytes at a time, eight activations each, which are together then
in shared memory, and therefore in different banks. And the bits of an int4 and of the one four
columns further on can be extracted at the same time, so the activations of both must be neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.decoder_layer.formats import columns_per_element
from pallas_kernels.hopper.ir import asm, const, i32

PIECE = 8
"""Activations that a thread loads at a time."""
_THREADS = 4  # that share a row's columns
_THREAD_BYTES = 16  # of weights

_MMA = """mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
    {$0, $1, $2, $3}, {$8, $9, $10, $11}, {$12, $13}, {$4, $5, $6, $7};"""
# Eight int4 to the pairs of columns 0 and 4, 1 and 5, 2 and 6, 3 and 7. Flipping the upper bit of
# an int4 adds 8 to it. The odd columns are worth 16 times as much where they are.
UNPACK_INT4 = """{
    .reg .b32 w, a, b, c, d, bias, part, offset;
    shr.u32 w, $4, 8;
    lop3.b32 a, $4, 0x000F000F, 0x64086408, 0x6A;
    lop3.b32 b, $4, 0x00F000F0, 0x64806480, 0x6A;
    lop3.b32 c, w, 0x000F000F, 0x64086408, 0x6A;
    lop3.b32 d, w, 0x00F000F0, 0x64806480, 0x6A;
    mov.b32 bias, 0x64086408;
    mov.b32 part, 0x2C002C00;
    mov.b32 offset, 0xD480D480;
    sub.rn.f16x2 $0, a, bias;
    fma.rn.f16x2 $1, b, part, offset;
    sub.rn.f16x2 $2, c, bias;
    fma.rn.f16x2 $3, d, part, offset;
}"""
# Four int8 to the pairs of columns 0 and 1, 2 and 3. Flipping the upper bit of an int8 adds 128.
UNPACK_INT8 = """{
    .reg .b32 w, a, b, bias;
    xor.b32 w, $2, 0x80808080;
    prmt.b32 a, w, 0x64646464, 0x4140;
    prmt.b32 b, w, 0x64646464, 0x4342;
    mov.b32 bias, 0x64806480;
    sub.rn.f16x2 $0, a, bias;
    sub.rn.f16x2 $1, b, bias;
}"""


def _pieces(dtype: Any) -> int:
    """Returns the pieces of activations that a thread's 16 bytes of weights meet."""
    return _THREAD_BYTES * columns_per_element(dtype) // PIECE


def unpack(stored: jax.Array) -> jax.Array:
    """Returns the integers of stored weights as float32, without constants that are arrays."""
    if columns_per_element(stored.dtype) == 1:
        return stored.astype(jnp.float32)
    signed = lax.bitcast_convert_type(stored, jnp.int8)
    pairs = jnp.stack([(signed << 4) >> 4, signed >> 4], axis=-1)
    return pairs.reshape(*stored.shape[:-1], -1).astype(jnp.float32)


def permute(values: jax.Array, dtype: Any) -> jax.Array:
    """Returns activations [..., columns] in the order in which they meet weights of ``dtype``.

    The pieces of eight that four threads read at the same time come one after the other. For int4,
    each of a piece's first four columns is followed by the one four columns further on.
    """
    pieces = _pieces(dtype)
    blocks = values.reshape(*values.shape[:-1], -1, _THREADS, pieces, PIECE)
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


def position(column: Any, dtype: Any) -> Any:
    """Returns the position of a column in the order of :func:`permute`, both in registers."""
    pieces = _pieces(dtype)
    bits = pieces.bit_length() - 1
    width = _THREADS * pieces * PIECE
    piece, within = arith.shrui(column, const(3)), arith.andi(column, const(PIECE - 1))
    thread = arith.andi(arith.shrui(piece, const(bits)), const(_THREADS - 1))
    first = arith.subi(column, arith.andi(column, const(width - 1)))
    piece = arith.addi(arith.muli(arith.andi(piece, const(pieces - 1)), const(_THREADS)), thread)
    if columns_per_element(dtype) == 2:
        low, high = arith.andi(within, const(3)), arith.shrui(within, const(2))
        within = arith.addi(arith.muli(low, const(2)), high)
    return arith.addi(arith.addi(first, arith.muli(piece, const(PIECE))), within)


def products(
    x: Sequence[Sequence[Any]], first: Sequence[Any], second: Sequence[Any], dtype: Any
) -> list[Any]:
    """Returns a block's products of both halves' weights, as ``registers`` has sums.

    Args:
      x: the words of each piece of the activations.
      first, second: the words of each half's weights.
    """
    f32 = ir.F32Type.get()
    four = llvm.StructType.get_literal([f32] * 4)
    zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
    text, count = (UNPACK_INT4, 4) if columns_per_element(dtype) == 2 else (UNPACK_INT8, 2)
    result = llvm.StructType.get_literal([i32()] * count)
    kinds = ",".join(["=r"] * count + ["r"])

    def pairs(words: Sequence[Any]) -> list[Any]:
        unpacked = [asm(text, kinds, word, result=result) for word in words]
        return [llvm.extractvalue(i32(), each, [n]) for each in unpacked for n in range(count)]

    flat = [word for piece in x for word in piece]
    operands = list(zip(pairs(first), pairs(second), flat, strict=True))
    # Two sums each: half as many instructions wait for each other.
    sums = [[zero] * 4, [zero] * 4]
    for i in range(0, len(operands), 2):
        (a0, a1, b0), (a2, a3, b1) = operands[i : i + 2]
        before = sums[i // 2 % 2]
        kinds = "=f,=f,=f,=f,0,1,2,3,r,r,r,r,r,r"
        after = asm(_MMA, kinds, *before, a0, a1, a2, a3, b0, b1, result=four)
        sums[i // 2 % 2] = [llvm.extractvalue(f32, after, [j]) for j in range(4)]
    return [arith.addf(a, b) for a, b in zip(*sums, strict=True)]
