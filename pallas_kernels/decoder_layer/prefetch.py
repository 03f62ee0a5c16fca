"""Brings weights into the L2 cache while attention, which leaves most of the bandwidth, runs."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.hopper.ir import REF, asm, const, i32, i64, inline

CHUNK = 16 * 1024
"""Bytes that an instruction brings."""
_LANES = 32


@functools.partial(jax.jit, static_argnames="programs")
def prefetch(
    arrays: Sequence[jax.Array], after: jax.Array, counter: Any, *, programs: int = 16
) -> None:
    """Starts to bring contiguous arrays into the L2 cache, as soon as ``after`` is computed.

    Args:
      arrays: their bytes are multiples of 16.
      counter: Ref of the counter that the kernel gets which reads the arrays. XLA orders both
        kernels by it. It does not change.
      programs: thread blocks. With few, the memory has time for other kernels' reads.
    """

    def prefetch(*refs: Any) -> None:
        for ref in refs[: len(arrays)]:
            _prefetch(ref, programs)
        inline(REF)(lambda counter: None)(refs[-1])  # as if it wrote: without, XLA would drop it

    plgpu.kernel(
        prefetch,
        out_type=(),
        grid=(programs,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*arrays, after, counter)


def _prefetch(ref: Any, programs: int) -> None:
    size = math.prod(ref.shape) * ref.dtype.itemsize
    chunks = -(-size // CHUNK)

    @inline(REF)
    def issue(ref: Any) -> None:
        from jaxlib.mlir.dialects import gpu

        thread = mgpu.utils.thread_idx()
        program = arith.index_cast(i32(), gpu.block_id(gpu.Dimension.x))
        first = arith.addi(arith.muli(program, const(_LANES)), thread)
        base = llvm.ptrtoint(i64(), mgpu.utils.memref_ptr(ref))
        chunk_bytes = arith.constant(i64(), ir.IntegerAttr.get(i64(), CHUNK))
        in_warp = arith.cmpi(arith.CmpIPredicate.ult, thread, const(_LANES))
        for start in range(0, chunks, programs * _LANES):
            chunk = arith.addi(first, const(start))
            exists = arith.cmpi(arith.CmpIPredicate.ult, chunk, const(chunks))
            is_last = arith.cmpi(arith.CmpIPredicate.eq, chunk, const(chunks - 1))
            count = arith.select(is_last, const(size - (chunks - 1) * CHUNK), const(CHUNK))
            address = arith.addi(base, arith.muli(arith.extui(i64(), chunk), chunk_bytes))
            text = "@$2 cp.async.bulk.prefetch.L2.global [$0], $1;"
            asm(text, "l,r,b", address, count, arith.andi(exists, in_warp), effects=True)

    issue(ref)
