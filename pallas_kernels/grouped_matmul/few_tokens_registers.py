"""Per-thread code of the few-token kernel: unpack weights, multiply, load scales, store results.

Packed weights are loaded from shared memory and unpacked in registers, where they form an operand
of a tensor core instruction. In an operand of 64 weight rows, thread ``lane`` of a warp has two
rows, ``lane // 4`` and ``lane // 4 + 8``, and 4 of each 16 columns. Which weight rows and columns
these stand for is free, as long as the tokens and the result agree. The kernel uses an order in
which no value has to move between threads: ``few_tokens.permute_columns`` defines the columns, and
``row_of_thread`` the rows. Tokens whose columns are not permuted take a few instructions more.
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

from pallas_kernels.hopper.ir import REF, SCALAR, array, asm, const, i32, i64, inline, warp_and_lane


def row_of_thread(column_blocks: int) -> tuple[Any, Any]:
    """Returns the first of a thread's two rows, of 64, and ``lane % 4``.

    Rows of 128 bytes are swizzled by the low three bits of their index. A quarter of a warp reads
    64 bytes of two rows at once. For these to be in different banks they must be rows r and r + 4,
    so bits 0 and 2 are swapped. Rows of 64 bytes are contiguous and need no swap.
    """
    warp, lane = warp_and_lane()
    row = arith.shrui(lane, const(2))
    if column_blocks == 2:
        low, high = arith.andi(row, const(1)), arith.shrui(row, const(2))
        row = arith.ori(arith.andi(row, const(2)), arith.ori(arith.shli(low, const(2)), high))
    return arith.addi(arith.muli(warp, const(16)), row), arith.andi(lane, const(3))


def _offset(pointer: Any, count: Any, itemsize: int) -> Any:
    """Returns ``pointer`` advanced by ``count`` items."""
    i8 = ir.IntegerType.get_signless(8)
    offset = arith.muli(count, const(itemsize)) if itemsize != 1 else count
    return mgpu.utils.getelementptr(pointer, [offset], i8)


# Each unpacks a 32-bit word to bfloat16 pairs. The constants are pairs of bfloat16: 0x4300 is 128,
# whose last mantissa bit is worth 1, so that OR with an integer below 128 adds it.


def _unpack_int8(word: Any) -> list:
    """Returns the 4 integers as the pairs of bytes (0, 2) and (1, 3).

    The low 7 bits are added to 128. Then 128 is subtracted, or 256 if the integer is negative.
    """
    pairs = []
    for shift in (0, 8):
        text = """{
            .reg .b32 w, a, b;
            shr.u32 w, $1, SHIFT;
            lop3.b32 a, w, 0x007F007F, 0x43004300, 0xEA;
            lop3.b32 b, w, 0x00800080, 0x43004300, 0xEA;
            sub.rn.bf16x2 $0, a, b;
        }""".replace("SHIFT", str(shift))
        pairs.append(asm(text, "=r,r", word, result=i32()))
    return pairs


def _unpack_int4(word: Any) -> list:
    """Returns the 8 integers as the pairs of half bytes (0, 4), (1, 5), (2, 6) and (3, 7).

    Flipping the top bit of a two's complement half byte adds 8. The result is added to 128, and 136
    is subtracted.
    """
    pairs = []
    for shift in (0, 4, 8, 12):
        text = """{
            .reg .b32 w, a, b;
            shr.u32 w, $1, SHIFT;
            lop3.b32 a, w, 0x000F000F, 0x43084308, 0x6A;
            mov.b32 b, 0x43084308;
            sub.rn.bf16x2 $0, a, b;
        }""".replace("SHIFT", str(shift))
        pairs.append(asm(text, "=r,r", word, result=i32()))
    return pairs


def _unpack_float8(word: Any) -> list:
    """Returns the 4 float8_e4m3fn as the pairs of bytes (0, 2) and (1, 3).

    Exponent and mantissa, shifted to their positions in a bfloat16, are 2^-120 times the number.
    """
    pairs = []
    for shift in (8, 0):
        text = """{
            .reg .b32 w, a, b, s;
            shl.b32 w, $1, SHIFT;
            shr.u32 a, w, 4;
            and.b32 a, a, 0x07F007F0;
            lop3.b32 b, w, 0x80008000, a, 0xEA;
            mov.b32 s, 0x7B807B80;
            mul.rn.bf16x2 $0, b, s;
        }""".replace("SHIFT", str(shift))
        pairs.append(asm(text, "=r,r", word, result=i32()))
    return pairs


_UNPACK = {"int8": _unpack_int8, "int4": _unpack_int4, "float8": _unpack_float8}


# Words with neighbouring bytes in two halves, for the first pair of _UNPACK: bytes 0 and 1, then 2
# and 3.
_IN_ORDER = ("prmt.b32 $0, $1, 0, 0x4140;", "prmt.b32 $0, $1, 0, 0x4342;")


def _unpack_in_order(word: Any, format: str) -> list:
    """Returns a word's bytes as the pairs (0, 1) and (2, 3)."""
    return [_UNPACK[format](asm(text, "=r,r", word, result=i32()))[0] for text in _IN_ORDER]


def load_operands(
    packed: Any, format: str, block: int, column_blocks: int, *, in_order: bool = False
) -> list[list]:
    """Loads and unpacks a thread's weights of one column block of its two rows.

    Args:
      in_order: whether pairs are of neighbouring columns, for tokens that are not permuted. Int4
        has no such form, see :class:`few_tokens_plan.Config`.

    Returns:
      For each 16 columns, the four registers of the operand: upper row, lower row, and both again 8
      columns further on.
    """
    base = mgpu.utils.memref_ptr(packed)
    row, quarter = row_of_thread(column_blocks)
    chunk = quarter
    if column_blocks == 2:
        chunk = arith.xori(arith.xori(quarter, arith.andi(row, const(7))), const(4 * block))
    offset = arith.addi(arith.muli(row, const(64 * column_blocks)), arith.muli(chunk, const(16)))
    four = ir.VectorType.get((4,), i32())
    rows = []
    for half in range(2):
        pointer = _offset(base, arith.addi(offset, const(half * 8 * 64 * column_blocks)), 1)
        loaded = llvm.load(four, pointer, alignment=16)
        words = [llvm.extractelement(loaded, const(i)) for i in range(4)]
        pairs = [_unpack_in_order(w, format) if in_order else _UNPACK[format](w) for w in words]
        rows.append([pair for word in pairs for pair in word])
    upper, lower = rows
    return [[upper[i], lower[i], upper[i + 1], lower[i + 1]] for i in range(0, len(upper), 2)]


def unpack(packed: Any, format: str, block: int, column_blocks: int) -> tuple[jax.Array, ...]:
    """Unpacks column block ``block`` of 64 weight rows in shared memory to operands of wgmma.

    Returns:
      bfloat16 [64, 64]: one array of int8 and float8, two of int4.
    """
    layout = plgpu.Layout.WGMMA
    count = 2 if format == "int4" else 1
    result = plgpu.ShapeDtypeStruct((64, 64), jnp.bfloat16, layout=layout)

    @inline(plgpu.RefType(swizzle(column_blocks)), returns=(result,) * count)
    def load(packed):
        bf16x2 = ir.VectorType.get((2,), ir.BF16Type.get())
        operands = load_operands(packed, format, block, column_blocks)
        flat = [llvm.bitcast(bf16x2, pair) for operand in operands for pair in operand]
        return tuple(array(flat[b * 16 : (b + 1) * 16], (64, 64), layout) for b in range(count))

    return load(packed)


def swizzle(column_blocks: int) -> tuple:
    return (plgpu.SwizzleTransform(128),) if column_blocks == 2 else ()


def load_row_scales(scales: Any, column_blocks: int) -> jax.Array:
    """Loads the scales of 64 weight rows, float32 [64], from a strided array in global memory."""
    layout = plgpu.Layout.WGMMA.reduce(1)

    @inline(REF, returns=plgpu.ShapeDtypeStruct((64,), jnp.float32, layout=layout))
    def load(ref):
        (stride,), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        base = mgpu.utils.memref_ptr(ref)
        row, _ = row_of_thread(column_blocks)
        f32 = ir.F32Type.get()
        registers = []
        for half in range(2):
            pointer = _offset(base, arith.addi(row, const(8 * half)), 4 * stride)
            loaded = asm(
                "ld.global.nc.f32 $0, [$1];",
                "=f,l",
                llvm.ptrtoint(i64(), pointer),
                result=f32,
                effects=True,
            )
            registers.append(vector.broadcast(ir.VectorType.get((1,), f32), loaded))
        return array(registers, (64,), layout)

    return load(scales)


def store_transposed(out: Any, values: jax.Array, tokens: jax.Array, column_blocks: int) -> None:
    """Stores the first ``tokens`` columns of [64, width] to rows of [width, 64] in global memory.

    Args:
      values: bfloat16 or float32, of ``out``'s dtype.
    """
    size = values.dtype.itemsize

    @inline(REF, plgpu.Layout.WGMMA, SCALAR)
    def write(ref, values, tokens):
        (stride, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        base = mgpu.utils.memref_ptr(ref)
        tokens = tokens.registers.item()
        row, quarter = row_of_thread(column_blocks)
        first = arith.muli(quarter, const(2))
        column = _offset(base, row, size)
        registers = values.registers.flat
        for n in range(values.shape[1] // 8):
            for e in range(2):
                token = arith.addi(first, const(8 * n + e))
                address = llvm.ptrtoint(i64(), _offset(column, token, size * stride))
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
                    asm(text, f"l,{kind},r,r", address, value, token, tokens, effects=True)

    write(out, values, tokens)


def store_partial_sum(target: Any, values: jax.Array, *, on_gpu: bool) -> None:
    """Stores float32 [64, width] to shared memory, for :func:`load_partial_sum`.

    The order is that of the registers, so that no bank conflicts arise.
    """
    if not on_gpu:
        target[pl.ds(0, values.size)] = values.reshape(-1)
        return

    @inline(REF, plgpu.Layout.WGMMA)
    def write(ref, values):
        pointers = _pair_pointers(ref, values.registers.size)
        for pointer, pair in zip(pointers, values.registers.flat, strict=True):
            llvm.store(pair, pointer)

    write(target, values)


def load_partial_sum(source: Any, width: int, *, on_gpu: bool) -> jax.Array:
    """Loads float32 [64, width] that another warpgroup's :func:`store_partial_sum` has stored."""
    if not on_gpu:
        return source[pl.ds(0, 64 * width)].reshape(64, width)
    layout = plgpu.Layout.WGMMA

    @inline(REF, returns=plgpu.ShapeDtypeStruct((64, width), jnp.float32, layout=layout))
    def read(ref):
        pair = ir.VectorType.get((2,), ir.F32Type.get())
        pairs = [llvm.load(pair, pointer) for pointer in _pair_pointers(ref, width // 4)]
        return array(pairs, (64, width), layout)

    return read(source)


def _pair_pointers(ref: Any, pairs: int) -> list[Any]:
    """Returns the addresses of a thread's float32 pairs. Those of a warp are adjacent."""
    warp, lane = warp_and_lane()
    thread = arith.addi(arith.muli(warp, const(32)), lane)
    base = _offset(mgpu.utils.memref_ptr(ref), thread, 8)
    return [_offset(base, const(1024 * j), 1) for j in range(pairs)]


def unpack_in_interpreter(packed: jax.Array, format: str, *, in_order: bool) -> jax.Array:
    """Unpacks a column block of 64 weight rows in jax.numpy.

    The columns have the order of :func:`unpack`, or their own if ``in_order``.

    Returns:
      float32 [64, 1, 64], or [64, 2, 64] of int4.
    """
    if format != "int4":
        # (thread, word, pair, half)
        values = packed.astype(jnp.float32).reshape(64, 4, 4, 2, 2)
        axes = (0, 1, 2, 3, 4) if in_order else (0, 2, 4, 1, 3)
        return values.transpose(axes).reshape(64, 1, 64)
    integers = packed.astype(jnp.int32)
    nibbles = jnp.stack([integers & 15, integers >> 4], axis=-1)
    values = ((nibbles ^ 8) - 8).astype(jnp.float32).reshape(64, 4, 2, 2, 2, 2, 2)
    return values.transpose(0, 2, 3, 5, 6, 1, 4).reshape(64, 2, 64)
