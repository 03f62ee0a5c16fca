"""Code for single threads: weights in shared memory times activation rows, and a unit's totals.

Tensor cores compute with ``mma.sync``, of 16x16 by 16x8 numbers. An operand's register may have any
column of K, as long as both operands agree. So a thread reads 16 contiguous bytes of a matrix row,
and the same columns of a token's row: nothing has to be permuted.

*bfloat16* weights: ``x w^T``. 8 of an instruction's 16 rows are tokens, its 8 columns matrix rows.

*float8, int8 and int4* weights are unpacked to float16, and activations are float16 too
(:mod:`activations`): ``w x^T``. 16 matrix rows, eight of either half, are an instruction's rows,
and tokens its columns. If the halves are the left and the right columns of one matrix, the tokens
are twice in its eight columns: first their left, then their right columns, and results of one
half's weights times the other's columns are not read. Integers become float16 by their bits: in a
float16 from 1024 to 2047, the last bit of the significand is worth 1. OR with 1024 adds an unsigned
integer to it, and a subtraction leaves the signed one, exactly.

Scales are float32: for blocks of 128x128 of float8, which all rows of a unit share; for 128 columns
of each row of int4; for each row of int8.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from pallas_kernels.decoder_layer.activations import PER_THREAD, PIECE, THREADS_PER_ROW, permute
from pallas_kernels.decoder_layer.reference import SCALE_BLOCK, columns_per_element, is_integer
from pallas_kernels.hopper import Index, Ref
from pallas_kernels.hopper.ir import (
    INT32,
    REF,
    SCALAR,
    Registers,
    array,
    asm,
    asm_numbers,
    const,
    element,
    f32,
    float_const,
    float_pair,
    i32,
    i64,
    inline,
    item,
    numbers_of,
    scalar,
)
from pallas_kernels.hopper.ir import value_of as register
from pallas_kernels.hopper.lanes import LANES, LAYOUT, SHAPE, only, per_thread, thread_index
from pallas_kernels.hopper.registers import MMA, advance, load_words

ROWS = 8  # matrix rows of a half
MOST_TOKENS = 8
MOST_SPLIT_TOKENS = 4  # tokens in float16 that fit an instruction if the halves are of one matrix
BLOCK_BYTES = 64  # bytes of a matrix row that a warp multiplies at a time, 16 per thread

WARPS = 8  # of both consumer warpgroups
SUMS_SHAPE = 4 * MOST_TOKENS, ROWS
# The sums of a warpgroup's four warps, [warp and token, matrix row]: two numbers per thread.
SUMS: Any = plgpu.Layout.TILED(
    plgpu.Tiling((SUMS_SHAPE, (8, 8), (2,))),  # pyright: ignore[reportArgumentType]
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)

_MMA_FLOAT16 = MMA.replace("bf16.bf16", "f16.f16")
# Four float8_e4m3fn to two pairs of float16, exactly: one machine instruction for each pair.
_UNPACK_FLOAT8 = """{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}"""
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


@dataclasses.dataclass(frozen=True)
class Operand:
    """Static description of the matrices of a phase."""

    dtype: Any  # bfloat16, float8_e4m3fn, int8, uint8 for int4, or in the interpreter float32
    columns: int  # columns of a half
    step: int
    """Columns of a half per ring stage, a divisor of ``columns`` and a multiple of a block's."""
    is_split: bool
    """Whether the halves are the left and the right columns of one matrix. Otherwise they are equal
    columns of two matrices, or of different rows. Halves of integers are never split."""

    @staticmethod
    def of(dtype: Any, columns: int, is_split: bool, most_bytes: int) -> Operand:
        """Returns the operand for rows of ``columns`` columns, in steps of ``most_bytes`` or fewer.
        A half must have a multiple of 64 bytes."""
        itemsize, per_element = jnp.dtype(dtype).itemsize, columns_per_element(dtype)
        assert not (is_split and is_integer(dtype))
        row = columns * itemsize // per_element // (2 if is_split else 1)
        if row % BLOCK_BYTES:
            raise NotImplementedError(
                f"takes rows of a multiple of {BLOCK_BYTES * (2 if is_split else 1)} bytes, got"
                f" {columns} columns of {jnp.dtype(dtype)}"
            )
        blocks = row // BLOCK_BYTES
        fitting = range(most_bytes // BLOCK_BYTES, 0, -1)
        step = next(n for n in fitting if blocks % n == 0) * BLOCK_BYTES
        row, step = (size // itemsize * per_element for size in (row, step))
        return Operand(jnp.dtype(dtype), row, step, is_split)

    @property
    def steps(self) -> int:
        return self.columns // self.step

    @property
    def elements(self) -> int:
        """Stored elements of a row per ring stage."""
        return self.step // columns_per_element(self.dtype)

    @property
    def step_bytes(self) -> int:
        return self.elements * self.dtype.itemsize

    @property
    def block_columns(self) -> int:
        """Columns that a warp multiplies at a time."""
        return BLOCK_BYTES // self.dtype.itemsize * columns_per_element(self.dtype)

    @property
    def is_scaled(self) -> bool:
        """Whether the matrices have scales, and activation rows are in float16."""
        return self.dtype.itemsize == 1

    @property
    def is_integer(self) -> bool:
        return is_integer(self.dtype)

    @property
    def groups(self) -> int:
        """Scales of a row of an integer matrix: one for 128 columns of int4, one of int8."""
        return self.columns // SCALE_BLOCK if columns_per_element(self.dtype) == 2 else 1


@dataclasses.dataclass(frozen=True)
class Rows:
    """Activation rows in shared memory, one per token."""

    memory: Ref
    """Reference to a flat array: bfloat16, the bits of float16, or in the interpreter float32."""
    start: jax.Array | int  # index of the first row's first number
    stride: int  # distance of the rows
    count: int  # 1 to MOST_TOKENS
    factors: Any = None
    """Reference to the factors of rows in float16, by which results are multiplied, or None."""
    first_factor: Index = 0  # index of the first row's factor


@dataclasses.dataclass(frozen=True)
class Half:
    """Half a unit: eight rows of a matrix in global memory."""

    matrix: Any  # reference to a matrix, or to a stack of them
    row: Index  # the first row
    column: int = 0  # the first column
    index: tuple[jax.Array, ...] = ()  # index of the matrix in a stack
    scales: Ref = None
    """Reference to all float32 scales of a matrix or stack, flat; None if it has none."""
    scales_start: jax.Array | int = 0  # index of the scale of the first row's first column


def no_sums() -> jax.Array:
    """Returns float32 zeros for a warpgroup's sums of half a unit."""
    return plgpu.layout_cast(jnp.zeros(SUMS_SHAPE, jnp.float32), SUMS)


def multiply(
    operand: Operand, halves: Sequence[Any], rows: Rows, step: jax.Array, scales: Sequence[Any],
    sums: tuple[jax.Array, jax.Array], interpret: Any,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Adds the products of a stage's columns, the ``step``-th of its unit, to the warpgroup's sums.
    The eight warps share the columns, in blocks of 64 bytes. ``scales`` are from
    :func:`load_scales`."""
    if interpret is not None:
        return _multiply_in_interpreter(operand, halves, rows, step, scales, sums)
    blocks, columns = operand.step_bytes // BLOCK_BYTES, operand.block_columns
    second = operand.columns if operand.is_split else 0  # first column of the second half
    row_bytes, x_bytes = halves[0].shape[-1], 2 * rows.stride
    flat_scales, middle = list(scales), 0
    if scales and not operand.is_integer:
        flat_scales, middle = [*scales[0], *scales[1]], len(scales[0])
    types = REF, REF, REF, SCALAR, SCALAR, [LAYOUT] * len(flat_scales), SUMS, SUMS

    @inline(*types, returns=(plgpu.ShapeDtypeStruct(SUMS_SHAPE, jnp.float32, layout=SUMS),) * 2)
    def add(first_w: Any, second_w: Any, x: Any, x_start: Any, step: Any, scales: Any, *sums: Any):
        row, quarter = _row_and_quarter()
        warp = mgpu.utils.warp_idx()
        first_block = arith.divui(arith.muli(warp, const(blocks)), const(WARPS))
        offset = arith.addi(arith.muli(row, const(row_bytes)), arith.muli(quarter, const(16)))
        offset = arith.addi(offset, arith.muli(first_block, const(BLOCK_BYTES)))
        weights = [advance(mgpu.utils.memref_ptr(w), offset) for w in (first_w, second_w)]
        # Rows past the last token repeat it.
        is_twice = bool(operand.is_scaled and second)
        token = arith.andi(row, const(MOST_SPLIT_TOKENS - 1)) if is_twice else row
        token = arith.minui(token, const(rows.count - 1))
        column = arith.addi(
            arith.muli(register(step), const(operand.step)), arith.muli(first_block, const(columns))
        )
        columns_at_once = PIECE if operand.is_integer else columns // THREADS_PER_ROW
        x_column = arith.addi(column, arith.muli(quarter, const(columns_at_once)))
        if is_twice:
            x_half = arith.shrui(row, const(MOST_SPLIT_TOKENS.bit_length() - 1))
            x_column = arith.addi(x_column, arith.muli(x_half, const(second)))
        x_offset = arith.addi(arith.muli(token, const(x_bytes)), arith.muli(x_column, const(2)))
        x_offset = arith.addi(x_offset, arith.muli(register(x_start), const(2)))
        x_pointer = advance(mgpu.utils.memref_ptr(x), x_offset)

        def load_block(weight: ir.Value, block: int) -> list[ir.Value]:
            return load_words(advance(weight, const(BLOCK_BYTES * block)))

        # Each of these returns the four sums after a block: two of each half.

        def of_integers(block: int, before: list[ir.Value]) -> list[ir.Value]:
            pieces = range(0, columns, THREADS_PER_ROW * PIECE)
            x_words = [
                load_words(advance(x_pointer, const(2 * (block * columns + n)))) for n in pieces
            ]
            first, other = (load_block(weight, block) for weight in weights)
            products = _integer_products(x_words, first, other, operand.dtype)
            scale = [_of_quarter(row_scales, 2 * half + block) for half in range(2)]
            return [
                llvm.intr_fma(p, scale[n // 2], s)
                for n, (p, s) in enumerate(zip(products, before, strict=True))
            ]

        def of_float8(block: int, before: list[ir.Value]) -> list[ir.Value]:
            products = _float8_products(
                load_words(advance(x_pointer, const(2 * block * columns)))
                + load_words(advance(x_pointer, const(2 * block * columns + 16))),
                *(load_block(weight, block) for weight in weights),
            )
            after: list[Any] = []
            for half in range(2):
                first = operand.columns if operand.is_split and half else 0
                k_block = arith.addi(column, const(first + block * columns))
                k_block = arith.shrui(k_block, const(SCALE_BLOCK.bit_length() - 1))
                k_block = arith.subi(k_block, const(first // SCALE_BLOCK))
                scale = _of_lane(scales[middle:] if half else scales[:middle], k_block)
                pairs = zip(products[2 * half :][:2], before[2 * half :][:2], strict=True)
                after += [llvm.intr_fma(p, scale, s) for p, s in pairs]
            return after

        def of_bfloat16(block: int, before: list[ir.Value]) -> list[ir.Value]:
            after: list[Any] = []
            x_words: list[Any] = []
            for half in range(2):
                if half == 0 or second:
                    start = 2 * (block * columns + half * second)
                    x_words = load_words(advance(x_pointer, const(start)))
                words = load_block(weights[half], block)
                after += _bfloat16_products(x_words, words, before[2 * half :][:2])
            return after

        row_scales = _of_stage(scales, register(step)) if operand.is_integer else None
        of_block = of_float8 if operand.is_scaled else of_bfloat16
        of_block = of_integers if operand.is_integer else of_block
        numbers = [number for each in sums for number in numbers_of(each)]
        end = arith.divui(arith.muli(arith.addi(warp, const(1)), const(blocks)), const(WARPS))
        for block in range(-(-blocks // WARPS)):
            if blocks % WARPS == 0 or block < blocks // WARPS:
                numbers = of_block(block, numbers)
                continue
            index = arith.addi(first_block, const(block))
            exists = arith.cmpi(arith.CmpIPredicate.ult, index, end)
            branch: Any = scf.IfOp(exists, [f32()] * 4, has_else=True)
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


def _multiply_in_interpreter(
    operand: Operand,
    halves: Sequence[Any],
    rows: Rows,
    step: Index,
    scales: Sequence[Any],
    sums: Any,
) -> Any:
    """Does :func:`multiply` for the warpgroup's columns. The first warp's sums are all of them."""
    wg = lax.axis_index("wg")
    blocks = operand.step_bytes // BLOCK_BYTES
    middle = 4 * blocks // WARPS * operand.block_columns
    column = jnp.arange(operand.step)
    is_of_warpgroup = jnp.where(wg == 0, column < middle, column >= middle)
    results = []
    for half, (ref, before) in enumerate(zip(halves, sums, strict=True)):
        first = operand.columns if operand.is_split and half else 0
        at = first + step * operand.step
        starts = [rows.start + t * rows.stride + at for t in range(rows.count)]
        x = jnp.stack([rows.memory[pl.ds(start, operand.step)] for start in starts])
        if operand.is_scaled:
            x = lax.bitcast_convert_type(x, jnp.float16)
        x = x.astype(jnp.float32)
        x = jnp.concatenate([x, jnp.broadcast_to(x[-1], (MOST_TOKENS - rows.count, operand.step))])
        if operand.is_integer:
            scale = scales[half]
            if operand.groups > 1:
                groups = operand.step // SCALE_BLOCK
                scale = lax.dynamic_slice_in_dim(scale, step * groups, groups, 1)
            w = _unpacked_integers(ref[...]).reshape(*scale.shape, -1) * scale[:, :, None]
            w = permute(w.reshape(-1, operand.step), operand.dtype)
        else:
            w = ref[...].astype(jnp.float32)
            if operand.is_scaled:
                k_block = (at + column) // SCALE_BLOCK - first // SCALE_BLOCK
                w = w * jnp.concatenate([chunk[0] for chunk in scales[half]])[k_block]
        # Permuted columns remain in their block, and therefore in their warpgroup.
        product = jnp.einsum("tk,nk->tn", x, jnp.where(is_of_warpgroup, w, 0.0))
        results.append(before.at[:MOST_TOKENS].add(product))
    return tuple(results)


def _unpacked_integers(stored: jax.Array) -> jax.Array:
    """Returns the integers of stored weights as float32, without constants that are arrays."""
    if columns_per_element(stored.dtype) == 1:
        return stored.astype(jnp.float32)
    signed = lax.bitcast_convert_type(stored, jnp.int8)
    pairs = jnp.stack([(signed << 4) >> 4, signed >> 4], axis=-1)
    return pairs.reshape(*stored.shape[:-1], -1).astype(jnp.float32)


def zero_after(sums: Sequence[jax.Array], layout: Any, interpret: Any) -> Any:
    """Returns 0 when the weights in ``sums`` are in registers. An arrival at a barrier does not
    wait for loads, unless its index depends on them: on each thread's first number of each array,
    if that depends on all weights that the thread has loaded."""
    if interpret is not None:
        return 0

    @inline([layout] * len(sums), returns=INT32)
    def compare(sums: Any) -> Registers:
        numbers = [llvm.bitcast(i32(), item(each.registers.flat[0], 0)) for each in sums]
        # No arithmetic gives this signalling NaN.
        tests = [f"setp.eq.and.b32 p, ${n}, 0x7F812345, p;" for n in range(1, len(sums) + 1)]
        tests[0] = "setp.eq.b32 p, $1, 0x7F812345;"
        text = "{ .reg .pred p; " + " ".join(tests) + " selp.b32 $0, 1, 0, p; }"
        kinds = ",".join(["=r"] + ["r"] * len(sums))
        return scalar(asm(text, kinds, *numbers, result=i32(), effects=True))

    return compare(list(sums))


def _row_and_quarter() -> tuple[ir.Value, ir.Value]:
    """Returns a thread's matrix row, and which quarter it has of the row's bytes in a block."""
    thread = mgpu.utils.thread_idx()
    return arith.andi(arith.shrui(thread, const(2)), const(7)), arith.andi(thread, const(3))


def _mma(
    text: str, sums: Sequence[ir.Value], a: Sequence[ir.Value], b: Sequence[ir.Value], count: int
) -> list[ir.Value]:
    """Returns the first ``count`` of a thread's four sums after an mma instruction."""
    four = llvm.StructType.get_literal([f32()] * 4)
    result = asm(text, "=f,=f,=f,=f,0,1,2,3,r,r,r,r,r,r", *sums, *a, *b, result=four)
    return [llvm.extractvalue(f32(), result, [j]) for j in range(count)]


def _unpack(text: str, count: int, word: ir.Value) -> list[ir.Value]:
    """Returns the ``count`` registers of float16 pairs that instructions make of a word."""
    kinds = ",".join(["=r"] * count + ["r"])
    return asm_numbers(text, kinds, word, kind=i32(), count=count, effects=False)


def _bfloat16_products(
    x: Sequence[ir.Value], weights: Sequence[ir.Value], sums: list[ir.Value]
) -> list[ir.Value]:
    """Adds the products of pairs of bfloat16. An instruction takes two pairs of each operand."""
    for i in range(0, len(weights), 2):
        sums = [*sums, float_const(0.0), float_const(0.0)]
        a = x[i], const(0), x[i + 1], const(0)
        sums = _mma(MMA, sums, a, weights[i : i + 2], 2)
    return sums


def _float8_products(x: Sequence[ir.Value], *weights: Sequence[ir.Value]) -> list[ir.Value]:
    """Returns the products of a block's float8 weights, two sums of each half."""
    sums = [float_const(0.0)] * 4
    for i, words in enumerate(zip(*weights, strict=True)):
        of_halves = [_unpack(_UNPACK_FLOAT8, 2, word) for word in words]
        a = [half[j] for j in range(2) for half in of_halves]
        sums = _mma(_MMA_FLOAT16, sums, a, x[2 * i : 2 * i + 2], 4)
    return sums


def _integer_products(
    x: Sequence[Sequence[ir.Value]],
    first: Sequence[ir.Value],
    second: Sequence[ir.Value],
    dtype: Any,
) -> list[ir.Value]:
    """Does :func:`_float8_products` for integers; ``x`` has the words of each piece of
    activations."""
    zero = float_const(0.0)
    text, count = (UNPACK_INT4, 4) if columns_per_element(dtype) == 2 else (UNPACK_INT8, 2)
    of_halves = [
        [pair for word in words for pair in _unpack(text, count, word)] for words in (first, second)
    ]
    operands = list(zip(*of_halves, [word for piece in x for word in piece], strict=True))
    # Two sums each: half as many instructions wait for each other.
    sums = [[zero] * 4, [zero] * 4]
    for i in range(0, len(operands), 2):
        (a0, a1, b0), (a2, a3, b1) = operands[i : i + 2]
        n = i // 2 % 2
        sums[n] = _mma(_MMA_FLOAT16, sums[n], (a0, a1, a2, a3), (b0, b1), 4)
    return [arith.addf(a, b) for a, b in zip(*sums, strict=True)]


# ---- scales, in the lanes' registers ----


def load_scales(operand: Operand, halves: tuple[Half, Half], interpret: Any) -> list[Any]:
    """Loads the scales of a unit, for :func:`multiply`, from the L2 cache: load them early. Of
    float8 it returns, for each half, arrays with the scale of a block of columns in each lane. Of
    integers, an array for each stage, or one if a row has one scale; in the interpreter [8, groups]
    by half."""
    if operand.is_integer:
        return _load_row_scales(operand, halves, interpret)
    return [_load_block_scales(operand, half, interpret) for half in halves if operand.is_scaled]


def _load_block_scales(operand: Operand, half: Half, interpret: Any) -> list[jax.Array]:
    """Loads the scales of half a unit of float8, one per lane and as many arrays as they need."""
    start = jnp.asarray(half.scales_start, jnp.int32)
    low, high = half.column // SCALE_BLOCK, (half.column + operand.columns - 1) // SCALE_BLOCK
    count = high - low + 1
    chunks = []
    for chunk in range(0, count, LANES):
        n = min(LANES, count - chunk)
        if interpret is not None:
            values = half.scales[pl.ds(start + low + chunk, n)]
            chunks.append(jnp.broadcast_to(jnp.pad(values, (0, LANES - n)), SHAPE))
            continue
        index = jnp.minimum(thread_index(1), n - 1) + (start + (low + chunk))
        chunks.append(_load(half.scales, index))
    return chunks


def _load_row_scales(
    operand: Operand, halves: tuple[Half, Half], interpret: Any
) -> list[jax.Array]:
    """Loads the scales of both halves' rows of integers. Of the four threads of a row, the first
    two have those of the left half's first and second block that the warp multiplies in a stage,
    the others those of the right half."""
    groups = operand.groups
    starts = [jnp.asarray(half.scales_start, jnp.int32) for half in halves]
    if interpret is not None:
        rows = [half.scales[pl.ds(n, 8 * groups)] for half, n in zip(halves, starts, strict=True)]
        return [row.reshape(8, groups) for row in rows]
    blocks = operand.step_bytes // BLOCK_BYTES
    assert blocks <= 2 * WARPS
    stages = operand.steps if columns_per_element(operand.dtype) == 2 else 1

    @inline(REF, REF, SCALAR, SCALAR, returns=(PER_THREAD,) * stages)
    def load(
        left: ir.Value, right: ir.Value, left_start: Registers, right_start: Registers
    ) -> tuple[Registers, ...]:
        row, quarter = _row_and_quarter()
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
            of_halves = [element(each, index, f32()) for each in memory]
            pointer = arith.select(is_right, of_halves[1], of_halves[0])
            numbers.append(per_thread(llvm.load(f32(), pointer)))
        return tuple(numbers)

    return list(load(*(half.scales for half in halves), *starts))


def _load(ref: Ref, index: jax.Array) -> jax.Array:
    """Returns ``ref[index]`` of float32 weights in global memory, which the kernel never writes."""

    @inline(REF, LAYOUT, returns=PER_THREAD)
    def load(ref: ir.Value, index: Registers) -> Registers:
        pointer = element(mgpu.utils.memref_ptr(ref), only(index), f32())
        return per_thread(llvm.load(f32(), pointer))

    return load(ref, index)


def prefetch_scales(operand: Operand, half: Half, interpret: Any) -> None:
    """Brings the scales of half a unit into the L2 cache. A whole warp calls it."""
    if interpret is not None or not operand.is_scaled:
        return
    start, count = half.scales_start, ROWS * operand.groups
    if not operand.is_integer:
        start += half.column // SCALE_BLOCK
        count = -(-operand.columns // SCALE_BLOCK)
    sector = 8  # float32 in the 32 bytes that a prefetch brings

    @inline(REF, SCALAR).on(half.scales, jnp.asarray(start, jnp.int32))
    def _(scales: ir.Value, start: Registers) -> None:
        lane = arith.andi(mgpu.utils.thread_idx(), const(LANES - 1))
        for first in range(0, count, LANES * sector):
            index = arith.addi(arith.muli(lane, const(sector)), const(first))
            index = arith.addi(arith.minui(index, const(count - 1)), register(start))
            pointer = element(mgpu.utils.memref_ptr(scales), index, f32())
            address = llvm.ptrtoint(i64(), pointer)
            asm("prefetch.global.L2 [$0];", "l", address, effects=True)


def _of_stage(chunks: Sequence[Registers], step: ir.Value) -> ir.Value:
    """Returns a stage's register, of registers for each stage of a unit or for all of them."""
    result, *later = [only(chunk) for chunk in chunks]
    for n, value in enumerate(later, 1):
        is_later = arith.cmpi(arith.CmpIPredicate.uge, step, const(n))
        result = arith.select(is_later, value, result)
    return result


def _of_quarter(value: Any, quarter: int) -> ir.Value:
    """Returns the register that one of the four threads with the same matrix row has."""
    text = f"shfl.sync.idx.b32 $0, $1, {quarter}, 0x1C1F, 0xffffffff;"
    return asm(text, "=f,f", value, result=f32(), effects=True)


def _of_lane(chunks: Sequence[Registers], index: ir.Value) -> Any:
    """Returns number ``index`` of arrays with one number per lane."""
    lane = arith.andi(index, const(LANES - 1))
    result = None
    for n, chunk in enumerate(chunks):
        text = "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;"
        value = asm(text, "=f,f,r", only(chunk), lane, result=f32(), effects=True)
        if result is None:
            result = value
        else:
            is_later = arith.cmpi(arith.CmpIPredicate.uge, index, const(n * LANES))
            result = arith.select(is_later, value, result)
    return result


# ---- the totals of a unit: the sums of all warps, in shared memory, added by a thread each ----


def load_totals(
    operand: Operand, sums: Ref, tokens: int, interpret: Any, factors: Any = None, first: Index = 0
) -> tuple[jax.Array, jax.Array]:
    """Returns a unit's totals of both halves, one number per thread of a warpgroup: thread i has
    the total of token ``i // 8 % 8`` and row ``i % 8``, or of the only token. ``sums`` are
    [warpgroups, halves, warps and tokens, rows], or with rows in float16 end in rows and tokens;
    ``factors`` from ``first`` on multiply them."""
    first = jnp.asarray(first, jnp.int32)
    if interpret is not None:
        totals = jnp.sum(sums[...].reshape(-1, 2, 4, MOST_TOKENS, 8), axis=(0, 2))
        if factors is not None:
            of_token = [factors[first + min(t, tokens - 1)] for t in range(MOST_TOKENS)]
            totals = totals * jnp.stack(of_token)[:, None]
        if tokens == 1:
            totals = jnp.broadcast_to(totals[:, :1], totals.shape)
        left, right = (jnp.concatenate([t.reshape(2, LANES)] * 2) for t in totals)
        return left, right

    @inline(REF, [REF] * (factors is not None), SCALAR, returns=(PER_THREAD, PER_THREAD))
    def load(sums: ir.Value, factors: Any, first: Registers) -> tuple[Registers, ...]:
        thread = arith.andi(mgpu.utils.thread_idx(), const(7 if tokens == 1 else 63))
        token = arith.shrui(thread, const(3))
        # The right columns' tokens come after four others.
        right = MOST_SPLIT_TOKENS if operand.is_scaled and operand.is_split else 0
        if operand.is_scaled:
            token = arith.minui(token, const(tokens - 1))
            thread = arith.addi(arith.muli(arith.andi(thread, const(7)), const(8)), token)
        start = element(mgpu.utils.memref_ptr(sums), thread, f32())
        factor = None
        for memory in factors:
            index = arith.addi(token, register(first))
            factor = llvm.load(f32(), element(mgpu.utils.memref_ptr(memory), index, f32()))
        totals = []
        for half in range(2):
            numbers = []
            for warpgroup in range(WARPS // 4):
                for warp in range(4):
                    index = (2 * warpgroup + half) * SUMS_SHAPE[0] * 8 + warp * MOST_TOKENS * 8
                    index += half * right
                    numbers.append(llvm.load(f32(), element(start, const(index), f32())))
            total = functools.reduce(arith.addf, numbers)
            if factor is not None:
                total = arith.mulf(total, factor)
            totals.append(per_thread(total))
        return tuple(totals)

    return load(sums, [] if factors is None else [factors], first)
