"""Per-thread code of the few-token kernel: unpack weights, multiply, load scales, store results.

Packed weights are loaded from shared memory and unpacked in registers, where they form an operand
of a tensor core instruction. In an operand of 64 weight rows, thread ``lane`` of a warp has two
rows, ``lane // 4`` and ``lane // 4 + 8``, and 4 of each 16 columns. Which weight rows and columns
these stand for is free, as long as the tokens and the result agree. The kernel uses an order in
which no value has to move between threads: ``few_tokens.permute_columns`` defines the columns, and
``row_of_thread`` the rows. Tokens whose columns are not permuted take a few instructions more: a
thread loads 16 bytes of a token, eight columns, which are those of twice four of its weights.
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
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.grouped_matmul.few_tokens_plan import Format
from pallas_kernels.hopper import Index, Ref
from pallas_kernels.hopper.ir import (
    REF,
    SCALAR,
    Registers,
    array,
    asm,
    asm_numbers,
    const,
    f32,
    float_const,
    float_pair,
    i32,
    i64,
    inline,
    shared_address,
    single,
    value_of,
    warp_and_lane,
)
from pallas_kernels.hopper.registers import MMA, advance, load_words
from pallas_kernels.hopper.tiles import ROW, WGMMA
from pallas_kernels.hopper.warpgroup import when

_LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
_LOAD = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
# Spread bytes 0 and 1, or 2 and 3, over both halves of a word.
_NEIGHBOURS = ("prmt.b32 $0, $1, 0, 0x4140;", "prmt.b32 $0, $1, 0, 0x4342;")


def row_of_thread(column_blocks: int) -> tuple[ir.Value, ir.Value]:
    """Returns the first of a thread's two rows, of 64, and ``lane % 4``. Rows of 128 bytes are
    swizzled by the low three bits of their index. A quarter of a warp reads 64 bytes of two rows at
    once, in different banks if they are rows r and r + 4: bits 0 and 2 are swapped."""
    warp, lane = warp_and_lane()
    row = arith.shrui(lane, const(2))
    if column_blocks == 2:
        low, high = arith.andi(row, const(1)), arith.shrui(row, const(2))
        row = arith.ori(arith.andi(row, const(2)), arith.ori(arith.shli(low, const(2)), high))
    return arith.addi(arith.muli(warp, const(16)), row), arith.andi(lane, const(3))


# ---- weights -------------------------------------------------------------------------------------


def to_bfloat16(word: ir.Value, form: Format) -> list[ir.Value]:
    """Converts all values of a 32-bit word to pairs of bfloat16. int8 and float8_e4m3fn give the
    pairs of bytes (0, 2) and (1, 3); int4 the pairs of half bytes (0, 4), (1, 5), (2, 6) and (3,
    7)."""
    # The constants are pairs of bfloat16. 0x4300 is 128, whose last mantissa bit is worth 1, so
    # that OR with an integer below 128 adds it.
    if form == "int8":
        # The low 7 bits are added to 128. Then 128 is subtracted, or 256 of a negative integer.
        shifts = 0, 8
        text = """{
            .reg .b32 w, a, b;
            shr.u32 w, $1, SHIFT;
            lop3.b32 a, w, 0x007F007F, 0x43004300, 0xEA;
            lop3.b32 b, w, 0x00800080, 0x43004300, 0xEA;
            sub.rn.bf16x2 $0, a, b;
        }"""
    elif form == "int4":
        # Flipping the top bit adds 8. The result is added to 128, and 136 is subtracted.
        shifts = 0, 4, 8, 12
        text = """{
            .reg .b32 w, a, b;
            shr.u32 w, $1, SHIFT;
            lop3.b32 a, w, 0x000F000F, 0x43084308, 0x6A;
            mov.b32 b, 0x43084308;
            sub.rn.bf16x2 $0, a, b;
        }"""
    else:
        # Exponent and mantissa, shifted to their positions in a bfloat16, are 2^-120 times the
        # number.
        shifts = 8, 0
        text = """{
            .reg .b32 w, a, b, s;
            shl.b32 w, $1, SHIFT;
            shr.u32 a, w, 4;
            and.b32 a, a, 0x07F007F0;
            lop3.b32 b, w, 0x80008000, a, 0xEA;
            mov.b32 s, 0x7B807B80;
            mul.rn.bf16x2 $0, b, s;
        }"""
    return [asm(text.replace("SHIFT", str(n)), "=r,r", word, result=i32()) for n in shifts]


def neighbours_to_bfloat16(word: ir.Value, form: Format) -> list[ir.Value]:
    """Converts the bytes of a word, int8 or float8_e4m3fn, to the pairs (0, 1) and (2, 3)."""
    return [to_bfloat16(asm(text, "=r,r", word, result=i32()), form)[0] for text in _NEIGHBOURS]


def load_operands(
    packed: ir.Value, form: Format, block: int, column_blocks: int, *, in_order: bool = False
) -> list[list[ir.Value]]:
    """Loads and unpacks a thread's weights of one column block of its two rows. For each 16 columns
    it returns the operand's registers: upper row, lower row, and both again 8 columns further on.
    ``in_order`` makes pairs of neighbouring columns, for tokens that are not permuted."""
    base = mgpu.utils.memref_ptr(packed)
    row, quarter = row_of_thread(column_blocks)
    chunk = quarter
    if column_blocks == 2:
        chunk = arith.xori(arith.xori(quarter, arith.andi(row, const(7))), const(4 * block))
    offset = arith.addi(arith.muli(row, const(64 * column_blocks)), arith.muli(chunk, const(16)))
    unpack_word = neighbours_to_bfloat16 if in_order else to_bfloat16
    rows = []
    for half in range(2):
        words = load_words(advance(base, arith.addi(offset, const(half * 8 * 64 * column_blocks))))
        rows.append([pair for word in words for pair in unpack_word(word, form)])
    upper, lower = rows
    return [[upper[i], lower[i], upper[i + 1], lower[i + 1]] for i in range(0, len(upper), 2)]


def unpack(packed: Ref, form: Format, block: int, column_blocks: int) -> tuple[jax.Array, ...]:
    """Unpacks a column block of 64 weight rows in shared memory to operands of wgmma: bfloat16 [64,
    64], one array of int8 and float8, two of int4."""
    count = 2 if form == "int4" else 1
    result = plgpu.ShapeDtypeStruct((64, 64), jnp.bfloat16, layout=WGMMA)

    @inline(plgpu.RefType(_swizzle(column_blocks)), returns=(result,) * count)
    def load(packed: ir.Value) -> tuple[Registers, ...]:
        bf16x2 = ir.VectorType.get((2,), ir.BF16Type.get())
        operands = load_operands(packed, form, block, column_blocks)
        flat = [llvm.bitcast(bf16x2, pair) for operand in operands for pair in operand]
        return tuple(array(flat[b * 16 : (b + 1) * 16], (64, 64), WGMMA) for b in range(count))

    return load(packed)


def _swizzle(column_blocks: int) -> tuple[Any, ...]:
    return (plgpu.SwizzleTransform(128),) if column_blocks == 2 else ()


def unpack_in_interpreter(packed: jax.Array, form: Format, *, in_order: bool) -> jax.Array:
    """Does :func:`unpack` in jax.numpy. The columns have its order, or their own if
    ``in_order``."""
    if form != "int4":
        # (thread, word, pair, half)
        values = packed.astype(jnp.float32).reshape(64, 4, 4, 2, 2)
        axes = (0, 1, 2, 3, 4) if in_order else (0, 2, 4, 1, 3)
        return values.transpose(axes).reshape(64, 1, 64)
    integers = packed.astype(jnp.int32)
    nibbles = jnp.stack([integers & 15, integers >> 4], axis=-1)
    values = ((nibbles ^ 8) - 8).astype(jnp.float32).reshape(64, 4, 2, 2, 2, 2, 2)
    return values.transpose(0, 2, 3, 5, 6, 1, 4).reshape(64, 2, 64)


def load_row_scales(scales: Ref, column_blocks: int) -> jax.Array:
    """Loads the scales of 64 weight rows, float32 [64], from a strided array in global memory."""

    @inline(REF, returns=plgpu.ShapeDtypeStruct((64,), jnp.float32, layout=ROW))
    def load(ref: ir.Value) -> Registers:
        (stride,), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        base = mgpu.utils.memref_ptr(ref)
        row, _ = row_of_thread(column_blocks)
        registers = []
        for half in range(2):
            at = arith.muli(arith.addi(row, const(8 * half)), const(4 * stride))
            address = llvm.ptrtoint(i64(), advance(base, at))
            text = "ld.global.nc.f32 $0, [$1];"
            registers.append(single(asm(text, "=f,l", address, result=f32(), effects=True)))
        return array(registers, (64,), ROW)

    return load(scales)


# ---- products with mma.sync ----------------------------------------------------------------------


def multiply(
    packed: Ref, x: Ref, form: Format, blocks: range, column_blocks: int, tokens: int, *,
    in_order: bool,
) -> jax.Array:  # fmt: skip
    """Multiplies consecutive column ``blocks`` of 64 packed weight rows in shared memory with the
    tokens ``x`` of the whole K step, [blocks, tokens, 64] in shared memory, and returns the sum,
    float32 [64, tokens]. Each warp has 16 rows. ``in_order``: the tokens' columns are in their own
    order."""

    @inline(
        plgpu.RefType(_swizzle(column_blocks)),
        plgpu.RefType(_swizzle(2)),
        returns=plgpu.ShapeDtypeStruct((64, tokens), jnp.float32, layout=WGMMA),
    )
    def product(packed: ir.Value, x: ir.Value) -> Registers:
        address = shared_address(x)
        addresses = _addresses_in_order(address) if in_order else _matrix_addresses(address)
        zero = float_const(0.0)
        sums: list[list[Any]] = [[zero] * 4 for _ in range(tokens // 8)]
        operands = [
            a
            for b in blocks
            for a in load_operands(packed, form, b, column_blocks, in_order=in_order)
        ]
        first = blocks.start * (8 if form == "int4" else 4)
        for s in range(0, len(operands), 2):  # 32 columns
            x_block, which = divmod((first + s) // 2, 2)
            for n in range(tokens // 8):
                source = arith.addi(addresses[which], const((x_block * tokens + 8 * n) * 128))
                text = _LOAD if in_order else _LDMATRIX
                b = asm_numbers(text, "=r,=r,=r,=r,r", source, kind=i32(), count=4)
                for d in range(2):
                    numbers = *sums[n], *operands[s + d], *b[2 * d : 2 * d + 2]
                    kinds = "=f,=f,=f,=f,0,1,2,3,r,r,r,r,r,r"
                    sums[n] = asm_numbers(MMA, kinds, *numbers, kind=f32(), count=4, effects=False)
        flat = [float_pair(*r[i : i + 2]) for r in sums for i in (0, 2)]
        return array(flat, (64, tokens), WGMMA)

    return product(packed, x)


def _matrix_addresses(x: ir.Value) -> list[ir.Value]:
    """Returns a lane's addresses for ldmatrix, for each half of a block of 64 columns from x on.
    Lane l provides 16 bytes of token l % 8: columns 8 (l // 8) to 8 (l // 8) + 8 of 32."""
    lane = arith.andi(mgpu.utils.thread_idx(), const(31))
    row, eight = arith.andi(lane, const(7)), arith.shrui(lane, const(3))
    x = arith.addi(x, arith.muli(row, const(128)))
    chunk = arith.muli(arith.xori(row, eight), const(16))
    return [arith.addi(x, chunk), arith.addi(x, arith.xori(chunk, const(64)))]


def _addresses_in_order(x: ir.Value) -> list[ir.Value]:
    """Returns a lane's addresses of 16 bytes of token l // 4, in the order of its operands: it has
    the weights of a quarter l % 4 of a column block. Rows of 128 bytes are swizzled."""
    lane = arith.andi(mgpu.utils.thread_idx(), const(31))
    token, quarter = arith.shrui(lane, const(2)), arith.andi(lane, const(3))
    first = arith.muli(quarter, const(2))
    chunks = [arith.addi(first, const(half)) for half in range(2)]
    x = arith.addi(x, arith.muli(token, const(128)))
    return [arith.addi(x, arith.muli(arith.xori(chunk, token), const(16))) for chunk in chunks]


# ---- partial sums and results --------------------------------------------------------------------


def store_partial_sum(target: Ref, values: jax.Array, *, on_gpu: bool) -> None:
    """Stores float32 [64, width] to shared memory, for :func:`load_partial_sum`, in the order of
    the registers, so that no bank conflicts arise."""
    if not on_gpu:
        target[pl.ds(0, values.size)] = values.reshape(-1)
        return

    @inline(REF, WGMMA).on(target, values)
    def _(ref: ir.Value, values: Registers) -> None:
        pointers = _pair_pointers(ref, values.registers.size)
        for pointer, pair in zip(pointers, values.registers.flat, strict=True):
            llvm.store(pair, pointer)


def load_partial_sum(source: Ref, width: int, *, on_gpu: bool) -> jax.Array:
    """Loads float32 [64, width] that another warpgroup's :func:`store_partial_sum` has stored."""
    if not on_gpu:
        return source[pl.ds(0, 64 * width)].reshape(64, width)

    @inline(REF, returns=plgpu.ShapeDtypeStruct((64, width), jnp.float32, layout=WGMMA))
    def read(ref: ir.Value) -> Registers:
        pair = ir.VectorType.get((2,), f32())
        pairs = [llvm.load(pair, pointer) for pointer in _pair_pointers(ref, width // 4)]
        return array(pairs, (64, width), WGMMA)

    return read(source)


def _pair_pointers(ref: ir.Value, pairs: int) -> list[ir.Value]:
    """Returns the addresses of a thread's float32 pairs. Those of a warp are adjacent."""
    warp, lane = warp_and_lane()
    thread = arith.addi(arith.muli(warp, const(32)), lane)
    base = advance(mgpu.utils.memref_ptr(ref), arith.muli(thread, const(8)))
    return [advance(base, const(1024 * j)) for j in range(pairs)]


def store_transposed(
    out: Ref, at: Sequence[Any], values: jax.Array, tokens: Index, column_blocks: int, *,
    on_gpu: bool,
) -> None:  # fmt: skip
    """Stores the first ``tokens`` columns of [64, width] to rows of ``out`` in global memory, from
    row and column ``at`` on. Both are bfloat16 or float32."""
    size, width, (*slices, first_row, first_column) = values.dtype.itemsize, values.shape[1], at
    columns = pl.ds(first_column, 64)
    if not on_gpu:
        for n in range(width):

            @when(n < tokens)
            def _(n: int = n) -> None:
                out[*slices, first_row + n, columns] = values[:, n]

        return
    target = out.at[*slices, pl.ds(first_row, width), columns]

    @inline(REF, WGMMA, SCALAR).on(target, values, tokens)
    def _(ref: ir.Value, values: Registers, tokens: Registers) -> None:
        (stride, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        base = mgpu.utils.memref_ptr(ref)
        end = value_of(tokens)
        row, quarter = row_of_thread(column_blocks)
        first = arith.muli(quarter, const(2))
        column = advance(base, arith.muli(row, const(size)))
        registers = values.registers.flat
        for n in range(values.shape[1] // 8):
            for e in range(2):
                token = arith.addi(first, const(8 * n + e))
                at = arith.muli(token, const(size * stride))
                address = llvm.ptrtoint(i64(), advance(column, at))
                for half in range(2):
                    pair = registers[2 * n + half]
                    if size == 2:
                        value, kind = llvm.bitcast(i32(), pair), "r"
                        split = "mov.b32 {low, high}, $1;"
                        text = f"st.global.b16 [$0 + {16 * half}], {'high' if e else 'low'};"
                    else:
                        value, kind = llvm.extractelement(pair, const(e)), "f"
                        split, text = "", f"st.global.f32 [$0 + {32 * half}], $1;"
                    text = f"""{{
                        .reg .pred p; .reg .b16 low, high;
                        setp.lt.s32 p, $2, $3;
                        {split}
                        @p {text}
                    }}"""
                    asm(text, f"l,{kind},r,r", address, value, token, end, effects=True)
