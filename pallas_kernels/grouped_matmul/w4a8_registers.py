"""Per-thread code of the w4a8 kernel: int4 weights to float8, and scales of tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.hopper.ir import (
    REF,
    SCALAR,
    array,
    asm,
    const,
    float_pair,
    i32,
    inline,
    shared_address,
    warp_and_lane,
    wgmma_row,
    word,
)
from pallas_kernels.hopper.tiles import ROWS, WGMMA

UNPACKED_SCALE = 512.0
"""Factor between an integer and what :func:`unpack` makes of it: 2^9. In float8_e4m3fn the bytes 0
to 8 are the multiples of 2^-9 up to 2^-6: seven of them are subnormal, so all are equidistant."""

COLUMN = WGMMA.reduce(0)
_BYTES_OF_A_ROW = 64
# The two's complement half bytes in the low halves of a word's bytes, as sign and magnitude: a
# negative one is 7 - low bits + 1, and its sign is bit 7. Bytes do not carry into each other.
_UNPACK = """{
    .reg .b32 t, m, d;
    shr.u32 t, $1, SHIFT;
    shr.u32 m, $1, SIGN;
    and.b32 m, m, 0x01010101;
    mul.lo.u32 d, m, 7;
    lop3.b32 t, t, 0x07070707, d, 0x6A;
    mad.lo.u32 $0, m, 0x81, t;
}"""


def unpack(packed: Any) -> jax.Array:
    """Unpacks 64 weight rows of 128 columns, as they are stored, to float8_e4m3fn.

    The columns have the order of :func:`w4a8.permute_columns`.

    Returns:
      The operand of :func:`wgmma.start_product_of_registers`: 16 words per thread.
    """

    @inline(REF, returns=plgpu.ShapeDtypeStruct((ROWS, ROWS), jnp.bfloat16, layout=WGMMA))
    def load(packed: Any) -> Any:
        _, lane = warp_and_lane()
        quarter = arith.andi(lane, const(3))
        offset = arith.addi(
            arith.muli(wgmma_row(), const(_BYTES_OF_A_ROW)), arith.muli(quarter, const(16))
        )
        i8, four = ir.IntegerType.get_signless(8), ir.VectorType.get((4,), i32())
        rows = []
        for half in range(2):
            at = arith.addi(offset, const(8 * _BYTES_OF_A_ROW * half))
            pointer = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(packed), [at], i8)
            loaded = llvm.load(four, pointer, alignment=16)
            rows.append([llvm.extractelement(loaded, const(i)) for i in range(4)])
        words = [
            asm(_text(high), "=r,r", row[i], result=i32())
            for i in range(4)
            for high in (False, True)
            for row in rows
        ]
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        return array([llvm.bitcast(pair, each) for each in words], (ROWS, ROWS), WGMMA)

    return load(packed)


def _text(high: bool) -> str:
    shift = 4 if high else 0
    return _UNPACK.replace("SHIFT", str(shift)).replace("SIGN", str(shift + 3))


def load_columns(numbers: Any, first: jax.Array, count: int) -> jax.Array:
    """Loads ``count`` float32 numbers from ``first`` on, in the layout of a product's columns."""

    @inline(REF, SCALAR, returns=plgpu.ShapeDtypeStruct((count,), jnp.float32, layout=COLUMN))
    def load(ref: Any, first: Any) -> Any:
        f32 = ir.F32Type.get()
        _, lane = warp_and_lane()
        column = arith.addi(word(first), arith.muli(arith.andi(lane, const(3)), const(2)))
        address = arith.addi(shared_address(ref), arith.muli(column, const(4)))
        numbers = [
            asm(f"ld.shared.f32 $0, [$1 + {4 * i}];", "=f,r", address, result=f32, effects=True)
            for block in range(0, count, 8)
            for i in (block, block + 1)
        ]
        pairs = [float_pair(*numbers[i : i + 2]) for i in range(0, len(numbers), 2)]
        return array(pairs, (count,), COLUMN)

    return load(numbers, jnp.asarray(first, jnp.int32))


def unpack_in_interpreter(packed: jax.Array) -> jax.Array:
    """Unpacks 64 rows to their integers in the order of :func:`unpack`, float32 [64, 128]."""
    halves = jnp.stack([packed & 15, packed >> 4], axis=-1).astype(jnp.int32)
    # (quarter, instruction, column, half) to (instruction, half, quarter, column)
    columns = halves.reshape(ROWS, 4, 4, 4, 2).transpose(0, 2, 4, 1, 3)
    return ((columns ^ 8) - 8).astype(jnp.float32).reshape(ROWS, 2 * _BYTES_OF_A_ROW)
