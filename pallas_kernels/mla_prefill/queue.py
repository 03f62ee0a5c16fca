"""A queue of tiles for all programs of a kernel: a counter in device memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref

from pallas_kernels.mosaic_ir import REF, SCALAR, asm, const, i32, inline, word


def draw(counter: Any, drawn: Any, slot: jax.Array, first: int) -> None:
    """``drawn[slot] = first + counter`` and ``counter += 1``, by one thread of a warpgroup.

    Args:
      counter: a semaphore, 0 when the kernel begins.
      drawn: int32s in SMEM; what is stored there needs a barrier before others read it.
      first: the first tile that belongs to no program.
    """

    @inline(REF, REF, SCALAR)
    def by_one_thread(counter: Any, drawn: Any, slot: Any) -> None:
        with utils.single_thread(scope=utils.ThreadSubset.WARPGROUP):
            before = llvm.atomicrmw(
                llvm.AtomicBinOp.add,
                utils.memref_ptr(counter),
                const(1),
                llvm.AtomicOrdering.monotonic,
            )
            index = arith.index_cast(ir.IndexType.get(), word(slot))
            memref.store(arith.addi(before, const(first)), drawn, [index])

    by_one_thread(counter, drawn, jnp.asarray(slot, jnp.int32))


def same(x: jax.Array) -> jax.Array:
    """``x``, an int32 that all threads hold, in such a way that the compiler knows of it.

    What came from SMEM may differ from thread to thread, as far as it can see, and addresses made
    of it would be kept in each thread's registers.
    """

    @inline(SCALAR, returns=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR))
    def first_lane(x: Any) -> Any:
        text = "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;"
        value = asm(text, "=r,r", word(x), result=i32(), effects=True)
        return mgpu.FragmentedArray.splat(value, (), SCALAR.to_mgpu(), is_signed=True)

    return first_lane(x)
