"""The few-token kernel's matmul with mma.sync: each warp multiplies its own 16 weight rows.

The tokens' columns are either permuted as ``few_tokens.permute_columns`` does, so that ldmatrix
loads them, or in their own order. Then a thread loads 16 bytes of a token, eight columns. They are
what its own eight int4 weights, or twice four others, are multiplied with.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.grouped_matmul.few_tokens_registers import load_operands, swizzle
from pallas_kernels.hopper.ir import array, asm, const, i32, inline

_MMA = """mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
    {$0, $1, $2, $3}, {$8, $9, $10, $11}, {$12, $13}, {$4, $5, $6, $7};"""
_LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
_LOAD = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"


def multiply(
    packed: Any,
    x: Any,
    format: str,
    blocks: range,
    column_blocks: int,
    tokens: int,
    *,
    in_order: bool = False,
) -> jax.Array:
    """Multiplies column blocks of 64 packed weight rows with the tokens.

    Args:
      packed: the weights of a K step in shared memory.
      x: [blocks, tokens, 64] in shared memory: the columns of the whole step.
      blocks: consecutive column blocks, which are summed.
      in_order: whether the columns of the tokens are in their own order.

    Returns:
      float32 [64, tokens].
    """
    layout = plgpu.Layout.WGMMA

    @inline(
        plgpu.RefType(swizzle(column_blocks)),
        plgpu.RefType(swizzle(2)),
        returns=plgpu.ShapeDtypeStruct((64, tokens), jnp.float32, layout=layout),
    )
    def product(packed, x):
        f32 = ir.F32Type.get()
        address = llvm.ptrtoint(i32(), mgpu.utils.memref_ptr(x))
        addresses = _addresses_in_order(address) if in_order else _matrix_addresses(address)
        zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
        sums: list[list[Any]] = [[zero] * 4 for _ in range(tokens // 8)]
        operands = [
            a
            for b in blocks
            for a in load_operands(packed, format, b, column_blocks, in_order=in_order)
        ]
        first = blocks.start * (8 if format == "int4" else 4)
        four_words = llvm.StructType.get_literal([i32()] * 4)
        four_sums = llvm.StructType.get_literal([f32] * 4)
        for s in range(0, len(operands), 2):  # 32 columns
            x_block, which = divmod((first + s) // 2, 2)
            for n in range(tokens // 8):
                source = arith.addi(addresses[which], const((x_block * tokens + 8 * n) * 128))
                text = _LOAD if in_order else _LDMATRIX
                loaded = asm(text, "=r,=r,=r,=r,r", source, result=four_words, effects=True)
                b = [llvm.extractvalue(i32(), loaded, [i]) for i in range(4)]
                for d in range(2):
                    result = asm(
                        _MMA,
                        "=f,=f,=f,=f,0,1,2,3,r,r,r,r,r,r",
                        *sums[n],
                        *operands[s + d],
                        *b[2 * d : 2 * d + 2],
                        result=four_sums,
                    )
                    sums[n] = [llvm.extractvalue(f32, result, [i]) for i in range(4)]
        pair = ir.VectorType.get((2,), f32)
        flat = [vector.from_elements(pair, r[i : i + 2]) for r in sums for i in (0, 2)]
        return array(flat, (64, tokens), layout)

    return product(packed, x)


def _matrix_addresses(x: Any) -> list[Any]:
    """Returns a lane's addresses for ldmatrix, for each half of a block of 64 columns from x on.

    ldmatrix loads four 8 x 8 matrices: 32 columns of 8 tokens. Lane l provides the address of 16
    bytes of token l % 8: columns 8 (l // 8) to 8 (l // 8) + 8 of the 32.
    """
    lane = arith.andi(mgpu.utils.thread_idx(), const(31))
    row, eight = arith.andi(lane, const(7)), arith.shrui(lane, const(3))
    x = arith.addi(x, arith.muli(row, const(128)))
    chunk = arith.muli(arith.xori(row, eight), const(16))
    return [arith.addi(x, chunk), arith.addi(x, arith.xori(chunk, const(64)))]


def _addresses_in_order(x: Any) -> list[Any]:
    """Returns a lane's addresses of 16 bytes of token l // 4, in the order of its operands.

    Lane l has the weights of a quarter l % 4 of a column block: 16 columns. Rows of 128 bytes are
    swizzled by the low three bits of their index.
    """
    lane = arith.andi(mgpu.utils.thread_idx(), const(31))
    token, quarter = arith.shrui(lane, const(2)), arith.andi(lane, const(3))
    first = arith.muli(quarter, const(2))
    chunks = [arith.addi(first, const(half)) for half in range(2)]
    x = arith.addi(x, arith.muli(token, const(128)))
    return [arith.addi(x, arith.muli(arith.xori(chunk, token), const(16))) for chunk in chunks]
