"""Barriers (mbarrier) in shared memory on which one thread arrives for a warp or for a copy.

Pallas' barriers count the arrival of every thread of a warpgroup, 128 even for a TMA copy. Here one
thread announces the bytes of all copies of a stage, and one lane arrives for its warp. A waiter
passes the index of the barrier's use that it waits for; the first use is 0. The interpreter
supports only Pallas' barriers, so ``Barriers`` wraps those there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm

from pallas_kernels.hopper.branch import when
from pallas_kernels.hopper.copies import TmaCopy
from pallas_kernels.hopper.ir import (
    REF,
    SCALAR,
    const,
    i32,
    inline,
    instruction,
    shared_address,
    warp_and_lane,
    word,
)

# Lane $1 arrives at barrier $3 of program $1, if there are more than that. $0 is the address of all
# barriers. The index is added last, so that all arrivals share one mapped address. There is no
# ``.release.cluster``, for which ptxas adds a fence of global memory: only reads precede the
# arrival, and their results have been used.
_ARRIVE_AT_ALL = """{
    .reg .pred p;
    .reg .b32 program, remote, offset;
    setp.lt.u32 p, $1, $2;
    selp.b32 program, $1, 0, p;
    mapa.shared::cluster.u32 remote, $0, program;
    shl.b32 offset, $3, 3;
    add.u32 remote, remote, offset;
    @p mbarrier.arrive.shared::cluster.b64 _, [remote];
}"""


@dataclasses.dataclass(frozen=True)
class Barriers:
    """An array of barriers."""

    memory: Any
    """The reference that :meth:`scratch` allocates."""

    interpret: Any
    """Interpreter parameters, or None on a GPU."""

    first: int = 0
    """Index in ``memory`` of barrier 0, on a GPU."""

    @staticmethod
    def scratch(count: int, arrivals: int, interpret: Any, axis: str | None = None) -> Any:
        """Scratch type of ``count`` barriers, each for ``arrivals`` warpgroups or copies.

        Args:
          axis: cluster axis whose programs all arrive at each other's barriers, if any.
        """
        if interpret is not None and axis is not None:
            return plgpu.ClusterBarrier(
                collective_axes=(axis,), num_arrivals=arrivals, num_barriers=count
            )
        if interpret is not None:
            return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)
        return plgpu.SMEM((2 * count,), jnp.int32)

    def initialise(self, arrivals: Sequence[int], *, cluster: bool = True, warps: int = 1) -> None:
        """Initialises the barriers. Every thread calls it before any other use.

        Args:
          arrivals: arrivals per phase of each barrier in ``memory``. A warpgroup's count as
            ``warpgroup.WARPS``, the copies of one :meth:`fill` as 1.
          cluster: whether to wait for the threads of the whole cluster, or only of the block.
          warps: the warps that share the work, from the first one of the block.
        """
        if self.interpret is not None:
            return

        @inline(REF)
        def make(words: Any) -> None:
            if warps == 1:
                leader = mgpu.single_thread_predicate(mgpu.ThreadSubset.BLOCK)
                for i, count in enumerate(arrivals):
                    pointer = _barrier(words, mgpu.c(i, i32())).get_ptr()
                    nvvm.mbarrier_init(pointer, mgpu.c(count, i32()), predicate=leader)
            else:
                first = mgpu.utils.warp_idx()
                leader = mgpu.single_thread_predicate(mgpu.ThreadSubset.WARP)
                for i in range(0, len(arrivals), warps):
                    number, count = arith.addi(first, const(i)), const(arrivals[-1])
                    for k in reversed(range(len(arrivals) - 1)):
                        if arrivals[k] != arrivals[k + 1]:
                            is_before = arith.cmpi(arith.CmpIPredicate.ule, number, const(k))
                            count = arith.select(is_before, const(arrivals[k]), count)
                    is_one = arith.cmpi(
                        arith.CmpIPredicate.ult, number, const(min(i + warps, len(arrivals)))
                    )
                    pointer = _barrier(words, number).get_ptr()
                    nvvm.mbarrier_init(pointer, count, predicate=arith.andi(leader, is_one))
            instruction("fence.mbarrier_init.release.cluster;")
            if cluster:
                instruction("barrier.cluster.arrive.relaxed.aligned;")
                instruction("barrier.cluster.wait.aligned;")
            else:
                instruction("bar.sync 0;")

        make(self.memory)

    def wait(self, i: Any, use: Any) -> None:
        """Waits until use ``use`` of barrier i is complete. Only its parity counts."""
        if self.interpret is not None:
            plgpu.barrier_wait(self.memory.at[i])
            return

        @inline(REF, SCALAR, SCALAR)
        def wait(words: Any, barrier: Any, use: Any) -> None:
            odd = arith.trunci(ir.IntegerType.get_signless(1), word(use))
            _barrier(words, word(barrier)).wait_parity(odd)

        wait(self.memory, self._index(i), jnp.asarray(use, jnp.int32))

    def arrive(self, i: Any, programs: int = 1) -> None:
        """Arrives at barrier i once per warp, when all lanes of the warp have come here.

        Args:
          programs: number of programs in the cluster if it arrives at the barriers of all, or 1.
        """
        if self.interpret is not None:
            plgpu.barrier_arrive(self.memory.at[i])
            return

        @inline(REF, SCALAR)
        def arrive(words: Any, barrier: Any) -> None:
            instruction("bar.warp.sync 0xffffffff;")
            if programs > 1:
                lane = warp_and_lane()[1]
                operands = shared_address(words), lane, const(programs), word(barrier)
                instruction(_ARRIVE_AT_ALL, *operands)
                return
            lane = mgpu.single_thread_predicate(mgpu.ThreadSubset.WARP)
            _barrier(words, word(barrier)).arrive(predicate=lane)

        arrive(self.memory, self._index(i))

    def wait_for_arrivals(self, first: Any, stages: int, fills: Any) -> None:
        """Waits for all releases of a ring's stages. A program may exit only then.

        Args:
          first: index of the barrier at which stage 0 is released, before those of other stages.
          fills: number of stages that were filled, one after the other.
        """
        for stage in range(stages):
            uses = lax.div(fills + (stages - 1 - stage), jnp.int32(stages))

            @when(uses > 0)
            def _(stage=stage, uses=uses):
                self.wait(first + stage, uses - 1)

    def fill(
        self,
        i: Any,
        copies: Sequence[TmaCopy],
        *,
        scope: mgpu.ThreadSubset = mgpu.ThreadSubset.WARP,
    ) -> None:
        """Starts TMA copies that together complete one arrival at barrier i.

        Args:
          scope: WARP, or WARPGROUP where the calling warp is the first one of its warpgroup. One
            thread of it issues the copies.
        """
        if self.interpret is not None:
            for copy in copies:
                copy.interpret(self.memory.at[i])
            return
        bytes_, starts = sum(copy.bytes for copy in copies), [copy.starts for copy in copies]
        types = (
            REF,
            SCALAR,
            [REF for _ in copies],
            [copy.target_type for copy in copies],
            [[SCALAR] * len(each) for each in starts],
        )

        def start(context: Any, words: Any, i: Any, sources: Any, targets: Any, starts: Any):
            barrier, leader = _barrier(words, word(i)), mgpu.single_thread_predicate(scope)
            barrier.arrive_expect_tx(bytes_, predicate=leader)
            for copy, source, target, first in zip(copies, sources, targets, starts, strict=True):
                copy.issue(context, source, first, target, barrier, leader)

        inlined: Any = plgpu.inline_mgpu(arg_types=types)(start)
        sources, targets = [copy.source for copy in copies], [copy.target for copy in copies]
        inlined(self.memory, self._index(i), sources, targets, starts)

    def copy(
        self, i: Any, source: Any, window: tuple[Any, ...], target: Any, axis: Any = None
    ) -> None:
        """Starts one TMA copy to tiles, see :class:`TmaCopy`. One warp calls it."""
        self.fill(i, [TmaCopy(source, window, target, multicast=axis)])

    def _index(self, i: Any) -> Any:
        return jnp.asarray(i + self.first if self.first else i, jnp.int32)


def _barrier(words: Any, i: Any) -> mgpu.BarrierRef:
    """Returns the i-th mbarrier of an array in shared memory, of two words each.

    It does not track phases: the caller passes the parity to each wait.
    """
    phases: Any = None
    return mgpu.BarrierRef(mgpu.utils.memref_ptr(words), i, phases, 1)
