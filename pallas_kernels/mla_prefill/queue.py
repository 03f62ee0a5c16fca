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


def draw(counter: Any, drawn: Any, slot: jax.Array, first: int) -> None:
    """``drawn[slot] = first + counter`` and ``counter += 1``, by one thread of a warpgroup.

    Args:
      counter: a semaphore, 0 when the kernel begins.
      drawn: int32s in SMEM; what is stored there needs a barrier before others read it.
      first: the first tile that belongs to no program.
    """
    scalar = plgpu.Layout.WG_SPLAT(())

    def by_one_thread(_, counter, drawn, slot):
        i32 = ir.IntegerType.get_signless(32)
        with utils.single_thread(scope=utils.ThreadSubset.WARPGROUP):
            before = llvm.atomicrmw(
                llvm.AtomicBinOp.add,
                utils.memref_ptr(counter),
                utils.c(1, i32),
                llvm.AtomicOrdering.monotonic,
            )
            index = arith.index_cast(ir.IndexType.get(), slot.registers.item())
            memref.store(arith.addi(before, utils.c(first, i32)), drawn, [index])

    types = (plgpu.RefType(), plgpu.RefType(), scalar)
    inline: Any = plgpu.inline_mgpu(arg_types=types)(by_one_thread)
    inline(counter, drawn, jnp.asarray(slot, jnp.int32))


def same(x: jax.Array) -> jax.Array:
    """``x``, an int32 that all threads hold, in such a way that the compiler knows of it.

    What came from SMEM may differ from thread to thread, as far as it can see, and addresses made
    of it would be kept in each thread's registers.
    """
    scalar = plgpu.Layout.WG_SPLAT(())
    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=scalar)

    def first_lane(_, x):
        i32 = ir.IntegerType.get_signless(32)
        asm = "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;"
        value: Any = llvm.inline_asm(i32, [x.registers.item()], asm, "=r,r", has_side_effects=True)
        return mgpu.FragmentedArray.splat(value, (), scalar.to_mgpu(), is_signed=True)

    inline: Any = plgpu.inline_mgpu(arg_types=(scalar,), return_type=result)(first_lane)
    return inline(x)
