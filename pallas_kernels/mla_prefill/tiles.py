"""Tiles of attention: the order in which persistent CTAs take them, their queue, and masks."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref

from pallas_kernels.hopper.ir import (
    REF,
    SCALAR,
    Registers,
    asm,
    const,
    float_const,
    i32,
    inline,
    scalar,
    value_of,
)
from pallas_kernels.hopper.tiles import WGMMA, spread_rows


@dataclasses.dataclass(frozen=True)
class HeadTiles:
    """Order of the tiles of all heads: the longest of each head come first, and few heads at a time
    alternate, so that what their tiles share stays in the L2 cache."""

    heads: int  # heads of a sequence
    per_head: int  # tiles of a head of a sequence
    together: int  # heads whose tiles alternate, so that they run concurrently

    @classmethod
    def of(cls, B: int, H: int, per_head: int, head_bytes: int, budget: int) -> HeadTiles:
        """Chooses as many concurrent heads as share ``budget`` bytes of the L2 cache, where each
        needs ``head_bytes``."""
        return cls(H, per_head, heads_together(B * H, head_bytes, budget))

    def locate(self, index: Any) -> tuple[Any, Any, Any]:
        """Returns the sequence and the head of a tile, and its rank: 0 is the head's longest."""
        section, index = (
            lax.div(index, self.together * self.per_head),
            lax.rem(index, self.together * self.per_head),
        )
        sequence_head = section * self.together + lax.rem(index, self.together)
        b, h = lax.div(sequence_head, self.heads), lax.rem(sequence_head, self.heads)
        return b, h, lax.div(index, self.together)


def heads_together(heads: int, bytes_per_head: int, budget: int) -> int:
    """Returns how many heads run concurrently: the largest divisor of ``heads`` whose keys and
    values fit in ``budget`` bytes, or 1."""
    fit = max(1, budget // bytes_per_head)
    return max(n for n in range(1, heads + 1) if heads % n == 0 and n <= fit)


def claim_tile(counter: Any, tiles: Any, slot: jax.Array, first: int) -> None:
    """Sets ``tiles[slot] = first + counter`` in shared memory and increments the semaphore
    ``counter``, atomically in one thread. A barrier must follow before others read it."""

    @inline(REF, REF, SCALAR)
    def by_one_thread(counter: Any, tiles: Any, slot: Any) -> None:
        with mgpu.utils.single_thread(scope=mgpu.utils.ThreadSubset.WARPGROUP):
            before = llvm.atomicrmw(
                llvm.AtomicBinOp.add,
                mgpu.utils.memref_ptr(counter),
                const(1),
                llvm.AtomicOrdering.monotonic,
            )
            index = arith.index_cast(ir.IndexType.get(), value_of(slot))
            memref.store(arith.addi(before, const(first)), tiles, [index])

    by_one_thread(counter, tiles, jnp.asarray(slot, jnp.int32))


def uniform(x: jax.Array) -> jax.Array:
    """Returns ``x``, an int32 that is equal in all threads, so that the compiler knows it is.
    Otherwise addresses computed from it would occupy registers of every thread."""

    @inline(SCALAR, returns=plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR))
    def first_lane(x: Any) -> Any:
        text = "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;"
        return scalar(asm(text, "=r,r", value_of(x), result=i32(), effects=True))

    return first_lane(x)


def mask_columns(
    s: jax.Array, bounds: jax.Array, hidden: float, *, from_bound: bool = False, interpreted: bool
) -> jax.Array:
    """Returns ``s[i, j]`` where ``j < bounds[i]``, or with ``from_bound`` where ``j >= bounds[i]``,
    and ``hidden`` elsewhere.

    Comparing with a column index would cost an addition and a register per column. Instead each
    thread subtracts its own first column from the bound and compares the result with constants.

    Args:
      s: float32 [64, n] in registers, n a multiple of 8.
      bounds: int32 [64].
    """
    if interpreted:
        below = lax.broadcasted_iota(jnp.int32, s.shape, 1) < spread_rows(bounds, s.shape[1])
        return jnp.where(below != from_bound, s, hidden)
    pattern = 8  # consecutive columns of a row that four threads hold before it repeats
    shape = (s.shape[0], pattern)
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA)
    remaining = spread_rows(bounds, pattern) - column

    @inline(WGMMA, WGMMA, returns=plgpu.ShapeDtypeStruct(s.shape, jnp.float32, layout=WGMMA))
    def masked(s: Registers, remaining: Registers) -> Registers:
        def splat(x: Any, is_signed: bool | None) -> Registers:
            return mgpu.FragmentedArray.splat(x, shape, remaining.layout, is_signed=is_signed)

        other, new = splat(float_const(hidden), None), s.copy()
        for c in range(0, s.shape[1], pattern):
            window = slice(None), slice(c, c + pattern)
            pair = (other, s[window]) if from_bound else (s[window], other)
            new[window] = (remaining > splat(const(c), True)).select(*pair)
        return new

    return masked(s, remaining)
