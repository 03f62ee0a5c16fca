"""Barriers (mbarrier) in shared memory, and the TMA copies that arrive at them.

Pallas' barriers count the arrival of every thread of a warpgroup, 128 even for a TMA copy. Here one
thread announces the bytes of all copies of a stage, and one lane arrives for its warp. A waiter
passes the index of the barrier's use that it waits for; the first use is 0. The interpreter
supports only Pallas' barriers, so ``Barriers`` wraps those there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, nvvm

from pallas_kernels.hopper.ir import (
    REF,
    SCALAR,
    Registers,
    asm,
    const,
    global_address,
    i32,
    i64,
    inline,
    instruction,
    shared_address,
    value_of,
    warp_and_lane,
)
from pallas_kernels.hopper.launch import Index, Ref
from pallas_kernels.hopper.tiles import TILED, TILES, TILING
from pallas_kernels.hopper.warpgroup import WARPS, when

BULK_COPY = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
"""The instruction that copies contiguous bytes."""


@dataclasses.dataclass(frozen=True)
class TmaCopy:
    """A copy of a window of an array in global memory to shared memory."""

    source: Ref
    """Array in global memory. One of uint8 has the bytes of the target's numbers, 128 per row, if
    the target is tiled."""
    window: tuple[Any, ...]  # an index or a ``pl.ds`` for each dimension of the source
    target: Ref  # reference to shared memory
    tiled: bool = True  # whether the target is in tiles, as tiles.tiles_of makes them
    swizzle: int | None = 128  # Swizzle of the target in bytes, or None. Of tiles it is 128.
    contiguous: bool = False
    """Whether the window is contiguous, starts at a multiple of 16 bytes and has a multiple of 16
    bytes. It needs no tensor map, and no window of 128 bytes. The target is not tiled."""
    multicast: str | None = None
    """Cluster axis to multicast over. Every CTA along it copies a share for all of them."""

    @property
    def starts(self) -> list[jax.Array]:
        """The window's first index in each dimension."""
        starts = [each.start if isinstance(each, pl.Slice) else each for each in self.window]
        return [jnp.asarray(start, jnp.int32) for start in starts]

    @property
    def sizes(self) -> list[Any]:
        """The window's size in each dimension. That of an index is None."""
        return [each.size if isinstance(each, pl.Slice) else None for each in self.window]

    @property
    def bytes(self) -> int:
        return math.prod(n or 1 for n in self.sizes) * jnp.dtype(self.source.dtype).itemsize

    @property
    def target_type(self) -> Any:
        if self.contiguous:
            return REF
        if self.tiled:
            return plgpu.RefType(transforms=TILED)
        swizzle = (plgpu.SwizzleTransform(self.swizzle),) if self.swizzle else ()
        return plgpu.RefType(transforms=swizzle)

    def interpret(self, barrier: Any) -> None:
        """Runs the copy in the interpreter, signalled on one of Pallas' barriers."""
        source = self.source.at[self.window]
        plgpu.copy_gmem_to_smem(source, self.target, barrier, collective_axes=self.multicast)

    def issue(
        self, context: Any, source: ir.Value, starts: Sequence[Registers], target: ir.Value,
        barrier: Any, leader: Any,
    ) -> None:  # fmt: skip
        """Starts the copy in inlined code, from the thread whose predicate is ``leader``. Its bytes
        have been announced to the barrier."""
        if self.contiguous:
            self._issue_contiguous(source, starts, target, barrier, leader)
            return
        indices = [arith.index_cast(ir.IndexType.get(), value_of(start)) for start in starts]
        window = [
            index if size is None else mgpu.ds(index, size)
            for index, size in zip(indices, self.sizes, strict=True)
        ]
        of_bytes = self.tiled and self.source.dtype == jnp.uint8
        context.async_copy(
            src_ref=source,
            dst_ref=_bytes_of(target, [n for n in self.sizes if n]) if of_bytes else target,
            gmem_slice=tuple(window),
            gmem_transform=(mgpu.TileTransform(TILING),) if self.tiled and not of_bytes else (),
            barrier=barrier,
            swizzle=self.swizzle,
            arrive=False,
            collective=None if self.multicast is None else (gpu.Dimension.x,),
            predicate=leader,
        )

    def _issue_contiguous(
        self,
        source: ir.Value,
        starts: Sequence[Registers],
        target: ir.Value,
        barrier: Any,
        leader: Any,
    ) -> None:
        address, _ = self.address_and_strides(source, starts)
        text = f"@$3 {BULK_COPY} [$0], [$1], {self.bytes}, [$2];"
        mbarrier = llvm.ptrtoint(i32(), barrier.get_ptr())
        operands = shared_address(target), address, mbarrier, leader
        asm(text, "r,l,r,b,~{memory}", *operands, effects=True)

    def address_and_strides(
        self, source: ir.Value, starts: Sequence[Registers]
    ) -> tuple[ir.Value, list[int]]:
        """Returns the window's address, and the strides of the source in bytes."""
        strides, _ = ir.MemRefType(source.type).get_strides_and_offset()
        strides = [stride * jnp.dtype(self.source.dtype).itemsize for stride in strides]
        address = global_address(source)
        for start, stride in zip(starts, strides, strict=True):
            step = const(stride, 64)
            address = arith.addi(address, arith.muli(arith.extui(i64(), value_of(start)), step))
        return address, strides


def _bytes_of(tiles: ir.Value, shape: Sequence[int]) -> ir.Value:
    """Returns tiles in shared memory, 64 bfloat16 wide, as bytes of shape [rows, 128]."""
    memory_space = ir.MemRefType(tiles.type).memory_space
    kind = ir.MemRefType.get(shape, ir.IntegerType.get_signless(8), memory_space=memory_space)
    return mgpu.utils.ptr_as_memref(mgpu.utils.memref_ptr(tiles), kind)


# Lane $1 arrives at barrier $3 of CTA $1, if there are more than that. $0 is the address of all
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

    memory: Ref  # the reference that scratch allocates
    interpret: Any  # interpreter parameters, or None on a GPU
    first: int = 0  # index in ``memory`` of barrier 0, on a GPU

    @staticmethod
    def scratch(count: int, arrivals: int, interpret: Any, axis: str | None = None) -> Any:
        """Returns the scratch type of ``count`` barriers. In the interpreter they have ``arrivals``
        per use, where a warpgroup or a copy arrives once, or those of all CTAs along a cluster
        ``axis``. On a GPU, :meth:`initialise` sets them."""
        if interpret is not None and axis is not None:
            return plgpu.ClusterBarrier(
                collective_axes=(axis,), num_arrivals=arrivals, num_barriers=count
            )
        if interpret is not None:
            return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)
        return plgpu.SMEM((2 * count,), jnp.int32)

    def initialise(self, arrivals: Sequence[int], *, cluster: bool = True, warps: int = 1) -> None:
        """Initialises every barrier in ``memory`` with its entry of ``arrivals``, the number of
        arrivals per use: WARPS for a warpgroup, 1 for the copies of one :meth:`fill`.

        Every thread calls it before any other use, and waits for those of the ``cluster``, or only
        of the CTA. The first ``warps`` share the work."""
        if self.interpret is not None:
            return

        @inline(REF).on(self.memory)
        def _(words: ir.Value) -> None:
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

    def wait(self, i: Index, use: Any) -> None:
        """Waits until use ``use`` of barrier i is complete. The hardware compares only the parity,
        so use + 1 must not complete before this returns."""
        if self.interpret is not None:
            plgpu.barrier_wait(self.memory.at[i])
            return

        @inline(REF, SCALAR, SCALAR).on(self.memory, self._index(i), jnp.asarray(use, jnp.int32))
        def _(words: ir.Value, barrier: Registers, use: Registers) -> None:
            odd = arith.trunci(ir.IntegerType.get_signless(1), value_of(use))
            _barrier(words, value_of(barrier)).wait_parity(odd)

    def arrive(self, i: Index, ctas: int = 1) -> None:
        """Arrives at barrier i once per warp, when all lanes of the warp have come here. In a
        cluster of ``ctas`` CTAs it arrives at the barriers of all."""
        if self.interpret is not None:
            plgpu.barrier_arrive(self.memory.at[i])
            return

        @inline(REF, SCALAR).on(self.memory, self._index(i))
        def _(words: ir.Value, barrier: Registers) -> None:
            instruction("bar.warp.sync 0xffffffff;")
            if ctas > 1:
                lane = warp_and_lane()[1]
                operands = shared_address(words), lane, const(ctas), value_of(barrier)
                instruction(_ARRIVE_AT_ALL, *operands)
                return
            lane = mgpu.single_thread_predicate(mgpu.ThreadSubset.WARP)
            _barrier(words, value_of(barrier)).arrive(predicate=lane)

    def wait_for_arrivals(self, first: Index, stages: int, fills: Index) -> None:
        """Waits for all releases of a ring's stages after ``fills`` fills; a CTA may exit only
        then. ``first`` is the barrier at which stage 0 is released."""
        for stage in range(stages):
            uses = lax.div(fills + (stages - 1 - stage), jnp.int32(stages))
            when(uses > 0)(lambda stage=stage, uses=uses: self.wait(first + stage, uses - 1))

    def fill(
        self,
        i: Index,
        copies: Sequence[TmaCopy],
        *,
        scope: mgpu.ThreadSubset = mgpu.ThreadSubset.WARP,
    ) -> None:
        """Starts TMA copies that together complete one arrival at barrier i, by one thread of the
        calling warp. With ``scope`` WARPGROUP it is the first warp of its warpgroup."""
        if self.interpret is not None:
            for copy in copies:
                copy.interpret(self.memory.at[i])
            return
        bytes_, starts = sum(copy.bytes for copy in copies), [copy.starts for copy in copies]
        targets = [copy.target_type for copy in copies]
        types = REF, SCALAR, [REF] * len(copies), targets, [[SCALAR] * len(each) for each in starts]

        def start(context: Any, words: Any, i: Any, sources: Any, targets: Any, starts: Any):
            barrier, leader = _barrier(words, value_of(i)), mgpu.single_thread_predicate(scope)
            barrier.arrive_expect_tx(bytes_, predicate=leader)
            for copy, source, target, first in zip(copies, sources, targets, starts, strict=True):
                copy.issue(context, source, first, target, barrier, leader)

        inlined: Any = plgpu.inline_mgpu(arg_types=types)(start)
        sources, targets = [copy.source for copy in copies], [copy.target for copy in copies]
        inlined(self.memory, self._index(i), sources, targets, starts)

    def copy(
        self, i: Index, source: Ref, window: tuple[Any, ...], target: Ref, axis: Any = None
    ) -> None:
        """Starts one TMA copy to tiles, see :class:`TmaCopy`. One warp calls it."""
        self.fill(i, [TmaCopy(source, window, target, multicast=axis)])

    def _index(self, i: Index) -> jax.Array:
        return jnp.asarray(i + self.first if self.first else i, jnp.int32)


def _barrier(words: ir.Value, i: ir.Value) -> mgpu.BarrierRef:
    """Returns the i-th mbarrier of an array in shared memory, of two words each. It does not track
    phases: the caller passes the parity to each wait."""
    phases: Any = None
    return mgpu.BarrierRef(mgpu.utils.memref_ptr(words), i, phases, 1)


# Bytes at $0 go to the same address of the other CTA. Its barrier at the address $1 gets an
# arrival that announces them, so the other CTA need not know of the copy beforehand. One
# lane ($2) issues both.
_SEND = """{
    .reg .b32 program, target, barrier;
    mov.u32 program, %cluster_ctarank;
    xor.b32 program, program, 1;
    mapa.shared::cluster.u32 target, $0, program;
    mapa.shared::cluster.u32 barrier, $1, program;
    @$2 mbarrier.arrive.expect_tx.shared::cluster.b64 _, [barrier], BYTES;
    @$2 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes
        [target], [$0], BYTES, [barrier];
}"""


def send_quarter(tiles: Any, quarter_bytes: int, barriers: Barriers, i: Index) -> None:
    """Sends a warp's quarter of a buffer of bfloat16 tiles, contiguous and at the same address in
    both CTAs, signalled on barrier ``i`` of the other CTA. Not for the interpreter, in which a CTA
    has no access to another's memory.

    All lanes must have fenced their writes (:func:`fence_async_proxy`) and met since. The copies of
    four warps are ``WARPS`` arrivals. The buffer may be written again when the other CTA has waited
    for the barrier. ``quarter_bytes`` is a multiple of 16."""

    @inline(TILES, REF, SCALAR).on(tiles, barriers.memory, jnp.asarray(i, jnp.int32))
    def _(tiles: ir.Value, words: ir.Value, i: Registers) -> None:
        warp = arith.remui(mgpu.utils.warp_idx(), const(WARPS))
        source = arith.addi(shared_address(tiles), arith.muli(warp, const(quarter_bytes)))
        barrier = arith.addi(shared_address(words), arith.shli(value_of(i), const(3)))
        leader = mgpu.single_thread_predicate(mgpu.ThreadSubset.WARP)
        text = _SEND.replace("BYTES", str(quarter_bytes))
        asm(text, "r,r,b,~{memory}", source, barrier, leader, effects=True)
