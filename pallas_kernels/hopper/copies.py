"""TMA copies from global to shared memory, signalled on barriers of :mod:`barriers`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm

from pallas_kernels.hopper.ir import REF, asm, i32, i64, shared_address, word
from pallas_kernels.hopper.tiles import TILED, TILING


@dataclasses.dataclass(frozen=True)
class TmaCopy:
    """A copy of a window of an array in global memory to shared memory."""

    source: Any
    """Array in global memory. One of uint8 has the bytes of the target's numbers, 128 per row, if
    the target is tiled."""

    window: tuple[Any, ...]
    """An index or a ``pl.ds`` for each dimension of the source."""

    target: Any
    """Reference to shared memory."""

    tiled: bool = True
    """Whether the target is in tiles, as :func:`tiles.tiles_of` makes them."""

    swizzle: int | None = 128
    """Swizzle of the target in bytes, or None. Of tiles it is 128."""

    contiguous: bool = False
    """Whether the window is contiguous, starts at a multiple of 16 bytes and has a multiple of 16
    bytes. It needs no tensor map, and no window of 128 bytes. The target is not tiled."""

    multicast: str | None = None
    """Cluster axis to multicast over. Every program along it copies a share for all of them."""

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
        """Type of the target in inlined code."""
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
        self, context: Any, source: Any, starts: Sequence[Any], target: Any, barrier: Any,
        leader: Any,
    ) -> None:  # fmt: skip
        """Starts the copy in inlined code. Its bytes have been announced to the barrier.

        Args:
          leader: predicate of the thread that issues it.
        """
        if self.contiguous:
            self._issue_contiguous(source, starts, target, barrier, leader)
            return
        indices = [arith.index_cast(ir.IndexType.get(), word(start)) for start in starts]
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
        self, source: Any, starts: Sequence[Any], target: Any, barrier: Any, leader: Any
    ) -> None:
        strides, _ = ir.MemRefType(source.type).get_strides_and_offset()
        itemsize = jnp.dtype(self.source.dtype).itemsize
        address = llvm.ptrtoint(i64(), mgpu.utils.memref_ptr(source))
        for start, stride in zip(starts, strides, strict=True):
            step = arith.constant(i64(), ir.IntegerAttr.get(i64(), stride * itemsize))
            offset = arith.muli(arith.extui(i64(), word(start)), step)
            address = arith.addi(address, offset)
        text = (
            "@$3 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
            f" [$0], [$1], {self.bytes}, [$2];"
        )
        mbarrier = llvm.ptrtoint(i32(), barrier.get_ptr())
        operands = shared_address(target), address, mbarrier, leader
        asm(text, "r,l,r,b,~{memory}", *operands, effects=True)


def _bytes_of(tiles: Any, shape: Sequence[int]) -> Any:
    """Returns tiles in shared memory, 64 bfloat16 wide, as bytes of shape [rows, 128]."""
    memory_space = ir.MemRefType(tiles.type).memory_space
    kind = ir.MemRefType.get(shape, ir.IntegerType.get_signless(8), memory_space=memory_space)
    return mgpu.utils.ptr_as_memref(mgpu.utils.memref_ptr(tiles), kind)
