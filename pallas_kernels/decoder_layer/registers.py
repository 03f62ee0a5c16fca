"""Code for single threads: weights in shared memory times activation rows, and a unit's sums.

The tensor cores compute ``x w^T`` with mma.sync: 8 of an instruction's 16 rows are tokens, and its
8 columns are matrix rows. Which column of K an operand's register has does not matter, as long as
both operands agree. So a thread reads 16 contiguous bytes of a matrix row, and the same columns of
a token's row: nothing has to be permuted.

Rows in float16 (:mod:`packed`) meet float8 weights the other way round, ``w x^T``: 16 matrix rows,
eight of either half, are an instruction's rows, and tokens its columns. If the halves are the
left and the right columns of one matrix, the tokens are twice in its eight columns: first their
left, then their right columns. A product of one half's weights and the other's columns is not read.
Int8 and int4 weights meet float16 in the same way, in other columns (:mod:`integers`).
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
from jaxlib.mlir.dialects import arith, llvm, scf

from pallas_kernels.decoder_layer import integers
from pallas_kernels.decoder_layer.formats import SCALE_BLOCK
from pallas_kernels.hopper.ir import (
    REF,
    SCALAR,
    array,
    asm,
    const,
    float_pair,
    i32,
    inline,
    item,
    scalar,
)
from pallas_kernels.hopper.ir import word as register
from pallas_kernels.route.lanes import LANES, LAYOUT

BLOCK_BYTES = 64
"""Bytes of a matrix row that a warp multiplies at a time, 16 per thread."""

WARPS = 8  # of both consumer warpgroups
TOKENS = 8  # rows of the sums
SUMS_SHAPE = 4 * TOKENS, 8
# The sums of a warpgroup's four warps, [warp and token, matrix row]: two numbers per thread.
SUMS: Any = plgpu.Layout.TILED(
    plgpu.Tiling((SUMS_SHAPE, (8, 8), (2,))),  # pyright: ignore[reportArgumentType]
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)

_MMA = """mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
    {$0, $1, $2, $3}, {$8, $9, $10, $11}, {$12, $13}, {$4, $5, $6, $7};"""
# Two of a word's four float8_e4m3fn to bfloat16. Each goes to the upper byte of a half; then its
# exponent and mantissa, shifted to their positions, are 2^-120 times the number.
_UNPACK = """{
    .reg .b32 w, a, s;
    prmt.b32 w, $1, 0, SELECTOR;
    shr.u32 a, w, 4;
    and.b32 a, a, 0x07F007F0;
    lop3.b32 a, w, 0x80008000, a, 0xEA;
    mov.b32 s, 0x7B807B80;
    mul.rn.bf16x2 $0, a, s;
}"""
_SELECTORS = "0x1404", "0x3424"  # bytes 0 and 1, 2 and 3
_MMA_FLOAT16 = _MMA.replace("bf16.bf16", "f16.f16")
# Four float8_e4m3fn to two pairs of float16, exactly: one machine instruction for each pair.
_UNPACK_FLOAT16 = """{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}"""
MOST_SPLIT_TOKENS = TOKENS // 2
"""Tokens in float16 that fit an instruction if the halves are of one matrix."""


def no_sums() -> jax.Array:
    """Returns float32 zeros for a warpgroup's sums of half a unit."""
    return plgpu.layout_cast(jnp.zeros(SUMS_SHAPE, jnp.float32), SUMS)


def multiply(
    operand: Any, halves: Sequence[Any], rows: Any, step: jax.Array, scales: Sequence[Any],
    sums: tuple[jax.Array, jax.Array], interpret: Any,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Adds the products of a stage's columns to the warpgroup's sums.

    Args:
      operand: what is static, a :class:`stream.Operand`.
      halves: references to both halves of the stage.
      rows: the activation rows, a :class:`stream.Rows`.
      step: index of the stage in its unit.
      scales: of each half, from :func:`scales.load_scales`, or of each stage, from
        :func:`scales.load_row_scales`; empty if the matrices have none.
    """
    if interpret is not None:
        return _multiply_in_interpreter(operand, halves, rows, step, scales, sums)
    half_scales, is_packed = scales, rows.factors is not None
    blocks = operand.step_bytes // BLOCK_BYTES
    columns = operand.block_columns
    second = operand.columns if operand.is_split else 0  # first column of the second half
    is_integer = operand.is_integer
    is_float8 = bool(scales) and not is_integer
    row_bytes, x_bytes = halves_row_bytes(halves), 2 * rows.stride
    flat_scales = list(scales) if is_integer else [chunk for half in scales for chunk in half]
    types = REF, REF, REF, SCALAR, SCALAR, [LAYOUT] * len(flat_scales), SUMS, SUMS

    @inline(*types, returns=(plgpu.ShapeDtypeStruct(SUMS_SHAPE, jnp.float32, layout=SUMS),) * 2)
    def add(first_w: Any, second_w: Any, x: Any, x_start: Any, step: Any, scales: Any, *sums: Any):
        f32 = ir.F32Type.get()
        thread = mgpu.utils.thread_idx()
        row, quarter = (
            arith.andi(arith.shrui(thread, const(2)), const(7)),
            arith.andi(thread, const(3)),
        )
        warp = mgpu.utils.warp_idx()
        first_block = arith.divui(arith.muli(warp, const(blocks)), const(WARPS))
        offset = arith.addi(arith.muli(row, const(row_bytes)), arith.muli(quarter, const(16)))
        offset = arith.addi(offset, arith.muli(first_block, const(BLOCK_BYTES)))
        weights = [_advance(mgpu.utils.memref_ptr(w), offset) for w in (first_w, second_w)]
        # Rows past the last token repeat it.
        is_twice = bool(is_packed and second)
        token = arith.andi(row, const(MOST_SPLIT_TOKENS - 1)) if is_twice else row
        token = arith.minui(token, const(rows.count - 1))
        column = arith.addi(
            arith.muli(register(step), const(operand.step)),
            arith.muli(first_block, const(columns)),
        )
        own_columns = integers.PIECE if is_integer else columns // 4
        x_column = arith.addi(column, arith.muli(quarter, const(own_columns)))
        if is_twice:
            x_half = arith.shrui(row, const(MOST_SPLIT_TOKENS.bit_length() - 1))
            x_column = arith.addi(x_column, arith.muli(x_half, const(second)))
        x_offset = arith.addi(arith.muli(token, const(x_bytes)), arith.muli(x_column, const(2)))
        x_offset = arith.addi(x_offset, arith.muli(register(x_start), const(2)))
        x_pointer = _advance(mgpu.utils.memref_ptr(x), x_offset)

        def of_integers(block: int, before: list[Any]) -> list[Any]:
            """Does :meth:`of_block` for int8 and int4."""
            pieces = range(0, columns, 4 * integers.PIECE)
            x_words = [_load_words(x_pointer, 2 * (block * columns + n)) for n in pieces]
            first, other = (_load_words(weight, BLOCK_BYTES * block) for weight in weights)
            both = integers.products(x_words, first, other, operand.dtype)
            scale = [_of_quarter(row_scales, 2 * half + block) for half in range(2)]
            return [
                llvm.intr_fma(p, scale[n // 2], s)
                for n, (p, s) in enumerate(zip(both, before, strict=True))
            ]

        def of_block(block: int, before: list[Any]) -> list[Any]:
            """Returns the four sums after a block: two of each half."""
            if is_integer:
                return of_integers(block, before)
            after, x_words, both = [], [], []
            if is_packed:
                both = _products_float16(
                    _load_words(x_pointer, 2 * block * columns)
                    + _load_words(x_pointer, 2 * block * columns + 16),
                    *(_load_words(weight, BLOCK_BYTES * block) for weight in weights),
                )
            for half in range(2):
                if not is_packed and (half == 0 or second):
                    start = block * columns + half * second
                    words = [
                        _load_words(x_pointer, 2 * start + 16 * i) for i in range(columns // 32)
                    ]
                    x_words = [x for four in words for x in four]
                two = before[2 * half : 2 * half + 2]
                if is_packed:
                    products = both[2 * half : 2 * half + 2]
                else:
                    packed = _load_words(weights[half], BLOCK_BYTES * block)
                    pairs = [pair for w in packed for pair in _unpacked(w)] if is_float8 else packed
                    if not is_float8:
                        after += _products(x_words, pairs, two)
                        continue
                    products = _products(x_words, pairs, [_zero(), _zero()])
                first = operand.columns if operand.is_split and half else 0
                k_block = arith.addi(column, const(first + block * columns))
                k_block = arith.shrui(k_block, const(SCALE_BLOCK.bit_length() - 1))
                k_block = arith.subi(k_block, const(first // SCALE_BLOCK))
                middle = len(half_scales[0])
                scale = _of_lane(scales[middle:] if half else scales[:middle], k_block)
                after += [llvm.intr_fma(p, scale, s) for p, s in zip(products, two, strict=True)]
            return after

        row_scales = _of_stage(scales, register(step)) if is_integer else None
        numbers = [item(s.registers.flat[0], i) for s in sums for i in range(2)]
        end = arith.divui(arith.muli(arith.addi(warp, const(1)), const(blocks)), const(WARPS))
        for block in range(-(-blocks // WARPS)):
            if blocks % WARPS == 0 or block < blocks // WARPS:
                numbers = of_block(block, numbers)
                continue
            index = arith.addi(first_block, const(block))
            exists = arith.cmpi(arith.CmpIPredicate.ult, index, end)
            branch: Any = scf.IfOp(exists, [f32] * 4, has_else=True)
            with ir.InsertionPoint(branch.then_block):
                scf.yield_(of_block(block, numbers))
            with ir.InsertionPoint(branch.else_block):
                scf.yield_(numbers)
            numbers = list(branch.results)
        return tuple(
            array([float_pair(*numbers[2 * half : 2 * half + 2])], SUMS_SHAPE, SUMS)
            for half in range(2)
        )

    start = jnp.asarray(rows.start, jnp.int32)
    return add(*halves, rows.memory, start, jnp.asarray(step, jnp.int32), flat_scales, *sums)


def zero_after(sums: Sequence[jax.Array], layout: Any, interpret: Any) -> Any:
    """Returns 0 when the weights in ``sums`` are in registers.

    An arrival at a barrier does not wait for loads, unless its index depends on them: on each
    thread's first number of each array, if it depends on all weights that the thread has loaded.
    """
    if interpret is not None:
        return 0

    @inline([layout] * len(sums), returns=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR))
    def compare(sums: Any) -> Any:
        numbers = [llvm.bitcast(i32(), item(each.registers.flat[0], 0)) for each in sums]
        # No arithmetic gives this signalling NaN.
        tests = [f"setp.eq.and.b32 p, ${n}, 0x7F812345, p;" for n in range(1, len(sums) + 1)]
        tests[0] = "setp.eq.b32 p, $1, 0x7F812345;"
        text = "{ .reg .pred p; " + " ".join(tests) + " selp.b32 $0, 1, 0, p; }"
        kinds = ",".join(["=r"] + ["r"] * len(sums))
        return scalar(asm(text, kinds, *numbers, result=i32(), effects=True))

    return compare(list(sums))


def halves_row_bytes(halves: Sequence[Any]) -> int:
    """Returns the bytes between a stage's rows, from the reference to its bytes."""
    return halves[0].shape[-1]


def _multiply_in_interpreter(
    operand: Any, halves: Sequence[Any], rows: Any, step: Any, scales: Sequence[Any], sums: Any
) -> Any:
    """Does :func:`multiply` for the warpgroup's columns. The first warp's sums are all of them."""
    wg = jax.lax.axis_index("wg")
    blocks = operand.step_bytes // BLOCK_BYTES
    middle = 4 * blocks // WARPS * operand.block_columns
    column = jnp.arange(operand.step)
    is_own = jnp.where(wg == 0, column < middle, column >= middle)
    results = []
    for half, (ref, before) in enumerate(zip(halves, sums, strict=True)):
        first = operand.columns if operand.is_split and half else 0
        at = first + step * operand.step
        x = jnp.stack(
            [
                rows.memory[pl.ds(rows.start + t * rows.stride + at, operand.step)]
                for t in range(rows.count)
            ]
        )
        if rows.factors is not None:
            x = jax.lax.bitcast_convert_type(x, jnp.float16)
        x = x.astype(jnp.float32)
        x = jnp.concatenate([x, jnp.broadcast_to(x[-1], (TOKENS - rows.count, operand.step))])
        if operand.is_integer:
            scale = scales[half]
            if operand.group:
                groups = operand.step // operand.group
                scale = jax.lax.dynamic_slice_in_dim(scale, step * groups, groups, 1)
            w = integers.unpack(ref[...]).reshape(*scale.shape, -1) * scale[:, :, None]
            w = integers.permute(w.reshape(-1, operand.step), operand.dtype)
        else:
            w = ref[...].astype(jnp.float32)
        if scales and not operand.is_integer:
            k_block = (at + column) // SCALE_BLOCK - first // SCALE_BLOCK
            w = w * jnp.concatenate([chunk[0] for chunk in scales[half]])[k_block]
        # Permuted columns remain in their block, and therefore in their warpgroup.
        product = jnp.einsum("tk,nk->tn", x, jnp.where(is_own, w, 0.0))
        results.append(before.at[:TOKENS].add(product))
    return tuple(results)


def _advance(pointer: Any, count: Any) -> Any:
    """Returns ``pointer`` advanced by ``count`` bytes."""
    return mgpu.utils.getelementptr(pointer, [count], ir.IntegerType.get_signless(8))


def _load_words(pointer: Any, offset: int) -> list[Any]:
    """Returns the four words at a number of bytes from ``pointer``, a multiple of 16."""
    four = ir.VectorType.get((4,), i32())
    loaded = llvm.load(four, _advance(pointer, const(offset)), alignment=16)
    return [llvm.extractelement(loaded, const(i)) for i in range(4)]


def _unpacked(word: Any) -> list[Any]:
    """Returns the four float8 of a word as two words of two bfloat16, in their order."""
    return [
        asm(_UNPACK.replace("SELECTOR", selector), "=r,r", word, result=i32())
        for selector in _SELECTORS
    ]


def _products(x: Sequence[Any], weights: Sequence[Any], sums: list[Any]) -> list[Any]:
    """Adds the products of pairs of bfloat16. An instruction takes two pairs of each operand."""
    f32 = ir.F32Type.get()
    four = llvm.StructType.get_literal([f32] * 4)
    for i in range(0, len(weights), 2):
        numbers = *sums, _zero(), _zero()
        operands = x[i], const(0), x[i + 1], const(0), *weights[i : i + 2]
        result = asm(_MMA, "=f,=f,=f,=f,0,1,2,3,r,r,r,r,r,r", *numbers, *operands, result=four)
        sums = [llvm.extractvalue(f32, result, [j]) for j in range(2)]
    return sums


def _products_float16(x: Sequence[Any], *weights: Sequence[Any]) -> list[Any]:
    """Returns the products of both halves' float8 with float16, as ``_products`` does."""
    f32 = ir.F32Type.get()
    four, two = (llvm.StructType.get_literal([kind] * n) for kind, n in ((f32, 4), (i32(), 2)))
    sums = [_zero()] * 4
    for i, words in enumerate(zip(*weights, strict=True)):
        pairs = [
            llvm.extractvalue(i32(), asm(_UNPACK_FLOAT16, "=r,=r,r", word, result=two), [j])
            for j in range(2)
            for word in words
        ]
        kinds = "=f,=f,=f,=f,0,1,2,3,r,r,r,r,r,r"
        result = asm(_MMA_FLOAT16, kinds, *sums, *pairs, *x[2 * i : 2 * i + 2], result=four)
        sums = [llvm.extractvalue(f32, result, [j]) for j in range(4)]
    return sums


def _zero() -> Any:
    f32 = ir.F32Type.get()
    return arith.constant(f32, ir.FloatAttr.get(f32, 0.0))


def _of_stage(chunks: Sequence[Any], step: Any) -> Any:
    """Returns a stage's register, of registers for each stage of a unit or for all of them."""
    own = [llvm.extractelement(chunk.registers.item(), const(0)) for chunk in chunks]
    result = own[0]
    for n, value in enumerate(own[1:], 1):
        is_later = arith.cmpi(arith.CmpIPredicate.uge, step, const(n))
        result = arith.select(is_later, value, result)
    return result


def _of_quarter(value: Any, quarter: int) -> Any:
    """Returns the register that one of the four threads with the same matrix row has."""
    text = f"shfl.sync.idx.b32 $0, $1, {quarter}, 0x1C1F, 0xffffffff;"
    return asm(text, "=f,f", value, result=ir.F32Type.get(), effects=True)


def _of_lane(chunks: Sequence[Any], index: Any) -> Any:
    """Returns number ``index`` of arrays with one number per lane."""
    f32 = ir.F32Type.get()
    lane = arith.andi(index, const(LANES - 1))
    result = None
    for n, chunk in enumerate(chunks):
        own = llvm.extractelement(chunk.registers.item(), const(0))
        text = "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;"
        value = asm(text, "=f,f,r", own, lane, result=f32, effects=True)
        if result is None:
            result = value
        else:
            is_later = arith.cmpi(arith.CmpIPredicate.uge, index, const(n * LANES))
            result = arith.select(is_later, value, result)
    return result
