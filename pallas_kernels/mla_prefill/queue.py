"""Dynamic tile scheduler of a persistent kernel: a counter in device memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref

from pallas_kernels.hopper.ir import REF, SCALAR, asm, const, i32, inline, word


def claim_tile(counter: Any, tiles: Any, slot: jax.Array, first: int) -> None:
    """Sets ``tiles[slot] = first + counter`` and increments ``counter`` atomically.

    One thread of the calling warpgroup does it.

    Args:
      counter: a semaphore, 0 when the kernel begins.
      tiles: int32s in shared memory. A barrier must follow before other warpgroups read them.
      slot: index into ``tiles``.
      first: the first tile that is not assigned statically.
    """

    @inline(REF, REF, SCALAR)
    def by_one_thread(counter: Any, tiles: Any, slot: Any) -> None:
        with utils.single_thread(scope=utils.ThreadSubset.WARPGROUP):
            before = llvm.atomicrmw(
                llvm.AtomicBinOp.add,
                utils.memref_ptr(counter),
                const(1),
                llvm.AtomicOrdering.monotonic,
            )
            index = arith.index_cast(ir.IndexType.get(), word(slot))
            memref.store(arith.addi(before, const(first)), tiles, [index])

    by_one_thread(counter, tiles, jnp.asarray(slot, jnp.int32))


def uniform(x: jax.Array) -> jax.Array:
    """Returns ``x``, an int32 that is equal in all threads, so that the compiler knows it is.

    For all that the compiler knows, a value loaded from shared memory differs between threads, and
    addresses computed from it would occupy registers of every thread.
    """

    @inline(SCALAR, returns=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR))
    def first_lane(x: Any) -> Any:
        text = "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;"
        value = asm(text, "=r,r", word(x), result=i32(), effects=True)
        return mgpu.FragmentedArray.splat(value, (), SCALAR.to_mgpu(), is_signed=True)

    return first_lane(x)
