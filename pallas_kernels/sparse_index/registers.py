"""Per-thread code of sparse_index on Hopper GPUs: lanes, the weighted sum over heads, its store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.hopper.branch import when
from pallas_kernels.hopper.ir import (
    REF,
    SCALAR,
    array,
    asm,
    const,
    i32,
    i64,
    inline,
    item,
    scalar,
    shared_address,
    warp_and_lane,
    warp_prefix_sum,
    wgmma_row,
    word,
)
from pallas_kernels.hopper.loads import load_with_layout
from pallas_kernels.hopper.tiles import ROW, ROWS, WGMMA, spread_columns
from pallas_kernels.sparse_index.scaled_pages import SCALE_BYTES, scale_rows
from pallas_kernels.sparse_index.units import Lanes, one_lane

_COLUMN = WGMMA.reduce(0)
_UNTILED = plgpu.RefType((plgpu.SwizzleTransform(128),))


def warp_lanes(interpret: Any) -> Lanes:
    """Returns the lanes of this thread's warp. All its threads must call their functions."""
    if interpret is not None:
        return one_lane()
    number = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)

    def over_warp(text: str) -> Any:
        @inline(SCALAR, returns=number)
        def reduce(x: Any) -> Any:
            return scalar(asm(text, "=r,r", word(x), result=i32(), effects=True))

        return reduce

    @inline(returns=number)
    def index() -> Any:
        return scalar(warp_and_lane()[1])

    @inline(SCALAR, returns=number)
    def prefix_sum(x: Any) -> Any:
        return scalar(warp_prefix_sum(word(x)))

    sum_, max_ = (over_warp(f"redux.sync.{op}.s32 $0, $1, 0xffffffff;") for op in ("add", "max"))
    return Lanes(32, index(), sum_, max_, prefix_sum)


def head_weights(weights: Any, queries: int) -> list[jax.Array]:
    """Returns the heads' weights of each query of a group, in registers."""
    return [load_with_layout(weights.at[t], _COLUMN) for t in range(queries)]


def sum_heads(
    products: jax.Array, weights: Any, first: int, heads: int, *, interpret: Any
) -> Sequence[jax.Array]:
    """Returns the weighted sum of the ReLU of each query's products, float32 [64] per query.

    Args:
      products: float32 [64, queries * heads] in the WGMMA layout.
      weights: float32 [queries, heads] in shared memory, of the whole group, or
        :func:`head_weights` of it.
      first: the first of these queries in the group.
    """
    count = products.shape[1] // heads
    if interpret is not None:
        sums = []
        for t in range(count):
            of_query = jnp.maximum(products[:, t * heads : (t + 1) * heads], 0.0)
            head_weights = plgpu.layout_cast(weights[first + t], _COLUMN)
            sums.append((of_query * spread_columns(head_weights, ROWS)).sum(axis=1))
        return sums
    row = plgpu.ShapeDtypeStruct((ROWS,), jnp.float32, layout=ROW)
    in_registers = isinstance(weights, list)
    types = [_COLUMN] * count if in_registers else [REF]

    @inline(WGMMA, types, returns=(row,) * count)
    def add(products: Any, weights: Any) -> Any:
        f32 = ir.F32Type.get()
        zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
        numbers = [item(pair, i) for pair in products.registers.flat for i in range(2)]
        _, lane = warp_and_lane()
        of_thread = arith.shli(arith.andi(lane, const(3)), const(3))
        base = None if in_registers else arith.addi(shared_address(weights[0]), of_thread)
        two = llvm.StructType.get_literal([f32] * 2)
        results = []
        for t in range(count):
            sums = [zero, zero]  # of the thread's two rows
            for eight in range(heads // 8):
                if in_registers:
                    pair = [item(weights[t].registers.flat[eight], i) for i in range(2)]
                else:
                    offset = 4 * ((first + t) * heads + 8 * eight)
                    text = f"ld.shared.v2.f32 {{$0, $1}}, [$2 + {offset}];"
                    loaded = asm(text, "=f,=f,r,~{memory}", base, result=two, effects=True)
                    pair = [llvm.extractvalue(f32, loaded, [i]) for i in range(2)]
                at = 4 * (t * heads // 8 + eight)
                for half in range(2):
                    for i in range(2):
                        x = arith.maximumf(numbers[at + 2 * half + i], zero)
                        sums[half] = llvm.intr_fma(x, pair[i], sums[half])
            for step in (1, 2):  # over the four threads of a row
                text = f"shfl.sync.bfly.b32 $0, $1, {step}, 0x1f, 0xffffffff;"
                others = [asm(text, "=f,f", x, result=f32, effects=True) for x in sums]
                sums = [arith.addf(x, other) for x, other in zip(sums, others, strict=True)]
            one = ir.VectorType.get((1,), f32)
            results.append(array([vector.broadcast(one, x) for x in sums], (ROWS,), ROW))
        return tuple(results)

    return add(products, weights[first : first + count] if in_registers else [weights])


def key_scales(stages: Any, stage: Any, *, interpret: Any) -> jax.Array:
    """Returns the scales of a page's keys, float32 [64] with one per token.

    Args:
      stages: uint8 [stages, rows, 128] in shared memory. After 64 keys the rows have the scales.
    """
    if interpret is not None:
        scales = stages[stage, ROWS : ROWS + scale_rows(ROWS, stages.shape[2])]
        scales = jax.lax.bitcast_convert_type(scales.reshape(ROWS, SCALE_BYTES), jnp.float32)
        return plgpu.layout_cast(scales, ROW)

    @inline(_UNTILED, SCALAR, returns=plgpu.ShapeDtypeStruct((ROWS,), jnp.float32, layout=ROW))
    def load(stages: Any, stage: Any) -> Any:
        _, rows, columns = ir.MemRefType(stages.type).shape
        begin = arith.addi(arith.muli(word(stage), const(rows)), const(ROWS))
        begin = arith.addi(shared_address(stages), arith.muli(begin, const(columns)))
        # Row i of the page is swizzled: its 16 bytes number j are at number j ^ (i % 8). The scales
        # of 32 tokens are in row 64, those of the others in row 65.
        row = wgmma_row()
        second = arith.shrui(row, const(5))
        at = arith.xori(arith.shli(row, const(2)), arith.shli(second, const(4)))
        address = arith.addi(begin, at)
        registers = []
        for half in range(2):  # eight tokens later, in the same row
            text = f"ld.shared.f32 $0, [$1 + {32 * half}];"
            f32 = ir.F32Type.get()
            x = asm(text, "=f,r,~{memory}", address, result=f32, effects=True)
            registers.append(vector.broadcast(ir.VectorType.get((1,), f32), x))
        return array(registers, (ROWS,), ROW)

    return load(stages, jnp.asarray(stage, jnp.int32))


def store_scores(
    out: Any, where: tuple[Any, Any, Any], scores: jax.Array, exists: jax.Array, *, interpret: Any
) -> None:
    """Sets ``out[b, t, s : s + 64] = scores`` in global memory, if ``exists``.

    Args:
      where: b, t and s.
    """
    if interpret is not None:

        @when(exists)
        def _() -> None:
            b, t, s = where
            out[b, t, pl.ds(s, ROWS)] = scores

        return

    @inline(REF, SCALAR, SCALAR, SCALAR, SCALAR, ROW)
    def store(out: Any, b: Any, t: Any, s: Any, exists: Any, scores: Any) -> None:
        _, queries, columns = ir.MemRefType(out.type).shape
        _, lane = warp_and_lane()
        query = arith.addi(arith.muli(word(b), const(queries)), word(t))
        column = arith.addi(word(s), wgmma_row())
        wide = arith.muli(arith.extui(i64(), query), _long(columns))
        at = arith.shli(arith.addi(wide, arith.extui(i64(), column)), _long(2))
        address = arith.addi(llvm.ptrtoint(i64(), mgpu.utils.memref_ptr(out)), at)
        is_first = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(lane, const(3)), const(0))
        stores = arith.andi(is_first, arith.cmpi(arith.CmpIPredicate.ne, word(exists), const(0)))
        for half, register in enumerate(scores.registers.flat):
            text = f"@$2 st.global.f32 [$0 + {32 * half}], $1;"
            asm(text, "l,f,b,~{memory}", address, item(register, 0), stores, effects=True)

    b, t, s = (jnp.asarray(x, jnp.int32) for x in where)
    store(out, b, t, s, jnp.where(exists, 1, 0), scores)


def _long(number: int) -> Any:
    return arith.constant(i64(), ir.IntegerAttr.get(i64(), number))
