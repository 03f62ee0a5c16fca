"""Barriers in shared memory on which one thread speaks for many.

Pallas' own count the arrival of every thread of a warpgroup, 128 for each copy too. Here one thread
announces a copy's bytes, and one of each warp that its warp has come this far. Who waits says for
which use of the barrier: the first is number 0. The interpreter knows Pallas' barriers alone, of
which ``Barriers`` are then made.
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
from jaxlib.mlir.dialects import arith, gpu, nvvm

from pallas_kernels.mosaic_ir import (
    REF,
    SCALAR,
    barrier_at,
    copy_window,
    i32,
    inline,
    instruction,
    parts_of,
    word,
)

WARPS = 4  # of a warpgroup
_TILING = (8, 64)


@dataclasses.dataclass(frozen=True)
class Barriers:
    memory: Any
    """What ``scratch`` asked for."""

    interpret: Any

    @staticmethod
    def scratch(count: int, arrivals: int, interpret: Any) -> Any:
        """So many barriers, each of so many warpgroups' arrivals, or copies'."""
        if interpret is not None:
            return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)
        return plgpu.SMEM((2 * count,), jnp.int32)

    def initialise(self, arrivals: Sequence[int]) -> None:
        """By every thread of the cluster, before any other use. A warpgroup's arrival counts as
        WARPS, a copy's as 1."""
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
        if self.interpret is not None:
            plgpu.barrier_wait(self.memory.at[i])
            return

        @inline(REF, SCALAR, SCALAR)
        def wait(words: Any, i: Any, use: Any) -> None:
            odd = arith.trunci(ir.IntegerType.get_signless(1), word(use))
            barrier_at(words, word(i)).wait_parity(odd)

        wait(self.memory, jnp.asarray(i, jnp.int32), jnp.asarray(use, jnp.int32))

    def arrive(self, i: Any) -> None:
        if self.interpret is not None:
            plgpu.barrier_arrive(self.memory.at[i])
            return

        @inline(REF, SCALAR)
        def arrive(words: Any, i: Any) -> None:
            instruction("bar.warp.sync 0xffffffff;")
            lane = mgpu.single_thread_predicate(mgpu.ThreadSubset.WARP)
            barrier_at(words, word(i)).arrive(predicate=lane)

        arrive(self.memory, jnp.asarray(i, jnp.int32))

    def copy(self, i: Any, source: Any, window: tuple[Any, ...], target: Any, axis: Any) -> None:
        """By one warp: a window to swizzled tiles. If an axis of the cluster is named, every
        program along it fetches a part for all. ``window``: an index or a ``pl.ds`` an axis."""
        if self.interpret is not None:
            source = source.at[window]
            plgpu.copy_gmem_to_smem(source, target, self.memory.at[i], collective_axes=axis)
            return
        starts, sizes = parts_of(window)
        size = math.prod(n or 1 for n in sizes) * jnp.dtype(source.dtype).itemsize
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
                target,
                gmem_transform=(mgpu.TileTransform(_TILING),),
                barrier=barrier,
                swizzle=128,
                collective=None if axis is None else (gpu.Dimension.x,),
                predicate=leader,
            )

        inlined: Any = plgpu.inline_mgpu(arg_types=types)(start)
        inlined(self.memory, jnp.asarray(i, jnp.int32), source, starts, target)
