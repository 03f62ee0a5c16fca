"""The totals of a unit: the sums of all warps, in shared memory, added by one number per thread."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.decoder_layer.registers import SUMS_SHAPE, TOKENS, WARPS
from pallas_kernels.hopper.ir import REF, SCALAR, array, const, inline
from pallas_kernels.hopper.ir import word as register
from pallas_kernels.route.lanes import LANES, LAYOUT, SHAPE


@dataclasses.dataclass(frozen=True)
class Float16Sums:
    """Sums over float16 rows are transposed, and have to be multiplied by each row's factor."""

    is_split: bool
    """Whether the halves are of one matrix: the right one's tokens then come after four others."""

    factors: Any = None
    """Reference to the rows' factors in shared memory, or None if the sums have been multiplied."""

    first: Any = 0
    """Index of the first token's factor."""


def load_totals(
    sums: Any, tokens: int, interpret: Any, float16: Float16Sums | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns a unit's totals of both halves, one number per thread of a warpgroup.

    Thread i, of 128, has the total of token ``i // 8 % 8`` and row ``i % 8``. Of one token, all
    tokens' threads have its totals.

    Args:
      sums: reference to the sums in shared memory, [warpgroups, halves, warps and tokens, rows].
      float16: if the rows are in float16. The last dimensions are then rows and tokens.
    """
    factors = None if float16 is None else float16.factors
    first = jnp.asarray(0 if float16 is None else float16.first, jnp.int32)
    if interpret is not None:
        totals = jnp.sum(sums[...].reshape(-1, 2, 4, TOKENS, 8), axis=(0, 2))
        if factors is not None:
            of_token = [factors[first + min(t, tokens - 1)] for t in range(TOKENS)]
            totals = totals * jnp.stack(of_token)[:, None]
        if tokens == 1:
            totals = jnp.broadcast_to(totals[:, :1], totals.shape)
        left, right = (jnp.concatenate([t.reshape(2, LANES)] * 2) for t in totals)
        return left, right

    result = plgpu.ShapeDtypeStruct(SHAPE, jnp.float32, layout=LAYOUT)

    @inline(REF, [REF] * (factors is not None), SCALAR, returns=(result, result))
    def load(sums: Any, factors: Any, first: Any) -> Any:
        f32 = ir.F32Type.get()
        thread = arith.andi(mgpu.utils.thread_idx(), const(7 if tokens == 1 else 63))
        token = arith.shrui(thread, const(3))
        right = TOKENS // 2 if float16 is not None and float16.is_split else 0
        if float16 is not None:
            token = arith.minui(token, const(tokens - 1))
            thread = arith.addi(arith.muli(arith.andi(thread, const(7)), const(8)), token)
        start = mgpu.utils.memref_ptr(sums)
        start = mgpu.utils.getelementptr(start, [thread], f32)
        factor = None
        for memory in factors:
            index = arith.addi(token, register(first))
            pointer = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(memory), [index], f32)
            factor = llvm.load(f32, pointer)
        totals = []
        for half in range(2):
            numbers = []
            for warpgroup in range(WARPS // 4):
                for warp in range(4):
                    index = (2 * warpgroup + half) * SUMS_SHAPE[0] * 8 + warp * TOKENS * 8
                    index += half * right
                    pointer = mgpu.utils.getelementptr(start, [const(index)], f32)
                    numbers.append(llvm.load(f32, pointer))
            total = numbers[0]
            for number in numbers[1:]:
                total = arith.addf(total, number)
            if factor is not None:
                total = arith.mulf(total, factor)
            totals.append(
                array([vector.broadcast(ir.VectorType.get((1,), f32), total)], SHAPE, LAYOUT)
            )
        return tuple(totals)

    return load(sums, [] if factors is None else [factors], first)
