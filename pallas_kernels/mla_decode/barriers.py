"""Barriers (mbarrier) in shared memory on which one thread arrives for a warp or for a copy.

Pallas' barriers count the arrival of every thread of a warpgroup, 128 even for a TMA copy. Here one
thread announces the bytes of a copy, and one lane arrives for its warp. A waiter passes the index
of the barrier's use that it waits for; the first use is 0. The interpreter supports only Pallas'
barriers, so ``Barriers`` wraps those there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import gpu, nvvm

from pallas_kernels.mosaic_ir import (
    REF,
    SCALAR,
    arrive_per_warp,
    barrier_at,
    copy_window,
    i32,
    inline,
    instruction,
    starts_and_sizes,
    wait_parity,
    word,
)

WARPS = 4  # per warpgroup
_TILING = (8, 64)


@dataclasses.dataclass(frozen=True)
class Barriers:
    """An array of barriers."""

    memory: Any
    """The reference that :meth:`scratch` allocates."""

    interpret: Any
    """Interpreter parameters, or None on a GPU."""

    @staticmethod
    def scratch(count: int, arrivals: int, interpret: Any) -> Any:
        """Scratch type of ``count`` barriers, each for ``arrivals`` warpgroups or copies."""
        if interpret is not None:
            return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)
        return plgpu.SMEM((2 * count,), jnp.int32)

    def initialise(self, arrivals: Sequence[int]) -> None:
        """Initialises the barriers. Every thread of the cluster calls it before any other use.

        Args:
          arrivals: arrivals per phase of each barrier. A warpgroup's count as WARPS, a copy's as 1.
        """
        if self.interpret is not None:
            return

        @inline(REF)
        def make(words: Any) -> None:
            leader = mgpu.single_thread_predicate(mgpu.ThreadSubset.BLOCK)
            for i, count in enumerate(arrivals):
                pointer = barrier_at(words, mgpu.c(i, i32())).get_ptr()
                nvvm.mbarrier_init(pointer, mgpu.c(count, i32()), predicate=leader)
            instruction("fence.mbarrier_init.release.cluster;")
            instruction("barrier.cluster.arrive.relaxed.aligned;")
            instruction("barrier.cluster.wait.aligned;")

        make(self.memory)

    def wait(self, i: Any, use: Any) -> None:
        """Waits until use ``use`` of barrier i is complete. Only its parity counts."""
        if self.interpret is not None:
            plgpu.barrier_wait(self.memory.at[i])
            return
        wait_parity(self.memory, jnp.asarray(i, jnp.int32), jnp.asarray(use, jnp.int32))

    def arrive(self, i: Any) -> None:
        """Arrives at barrier i once per warp, when all lanes of the warp have come here."""
        if self.interpret is not None:
            plgpu.barrier_arrive(self.memory.at[i])
            return
        arrive_per_warp(self.memory, jnp.asarray(i, jnp.int32))

    def copy(self, i: Any, source: Any, window: tuple[Any, ...], target: Any, axis: Any) -> None:
        """Starts a TMA copy of a window of ``source`` to swizzled tiles, signalled on barrier i.

        One warp calls it. A uint8 source has the bytes of the target's numbers, 128 per row.

        Args:
          window: an index or a ``pl.ds`` for each dimension of ``source``.
          axis: cluster axis to multicast over, or None. Every program along it copies a share for
            all of them.
        """
        if self.interpret is not None:
            source = source.at[window]
            plgpu.copy_gmem_to_smem(source, target, self.memory.at[i], collective_axes=axis)
            return
        starts, sizes = starts_and_sizes(window)
        size = math.prod(n or 1 for n in sizes) * jnp.dtype(source.dtype).itemsize
        shape, of_bytes = [n for n in sizes if n], source.dtype == jnp.uint8
        tiles = (plgpu.TilingTransform(_TILING), plgpu.SwizzleTransform(128))
        types = REF, SCALAR, REF, [SCALAR] * len(starts), plgpu.RefType(transforms=tiles)

        def start(context: Any, words: Any, i: Any, source: Any, starts: Any, target: Any) -> None:
            barrier = barrier_at(words, word(i))
            leader = mgpu.single_thread_predicate(mgpu.ThreadSubset.WARP)
            barrier.arrive_expect_tx(size, predicate=leader)
            copy_window(
                context,
                source,
                starts,
                sizes,
                _bytes_of(target, shape) if of_bytes else target,
                gmem_transform=() if of_bytes else (mgpu.TileTransform(_TILING),),
                barrier=barrier,
                swizzle=128,
                collective=None if axis is None else (gpu.Dimension.x,),
                predicate=leader,
            )

        inlined: Any = plgpu.inline_mgpu(arg_types=types)(start)
        inlined(self.memory, jnp.asarray(i, jnp.int32), source, starts, target)


def _bytes_of(tiles: Any, shape: Sequence[int]) -> Any:
    """Returns tiles in shared memory, 64 bfloat16 wide, as bytes of shape [rows, 128]."""
    memory_space = ir.MemRefType(tiles.type).memory_space
    kind = ir.MemRefType.get(shape, ir.IntegerType.get_signless(8), memory_space=memory_space)
    return mgpu.utils.ptr_as_memref(mgpu.utils.memref_ptr(tiles), kind)
