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
    array,
    asm,
    const,
    float_const,
    float_pair,
    i32,
    inline,
    item,
    scalar,
    single,
    value_of,
)
from pallas_kernels.hopper.tiles import ROW, ROWS, WGMMA, spread_rows


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


@dataclasses.dataclass(frozen=True)
class Cells:
    """Order of the cells of one head in memory, 64 keys by 64 queries each. Those of a block of
    keys are neighbours."""

    queries: int  # blocks
    keys: int  # blocks
    causal: bool
    """Whether query t sees the keys up to t. Then only cells on or past the diagonal have room."""

    @property
    def count(self) -> int:
        if not self.causal:
            return self.queries * self.keys
        keys = min(self.queries, self.keys)
        return keys * self.queries - keys * (keys - 1) // 2

    def first(self, keys: Any) -> Any:
        """Returns the index that the cell of the first queries has for a block of keys, or would
        have. Others follow."""
        hidden = lax.div(keys * (keys + 1), jnp.int32(2)) if self.causal else 0
        return keys * self.queries - hidden

    def keys_in(self, cells: int, multiple: int) -> int:
        """Returns how many blocks of keys have no more than so many cells: all, or a multiple, at
        least one, of those that are not causal."""
        if self.count <= cells:
            return self.keys
        return max(1, cells // (self.queries * multiple)) * multiple

    def heads_in(self, cells: int, B: int, H: int) -> tuple[int, int]:
        """Returns the largest numbers of sequences and heads that have no more than so many cells,
        divisors of B and H: some sequences with all heads, or at least one head of one."""
        fit = max(1, cells // self.count)
        if fit < H:
            return 1, _largest_divisor(H, fit)
        return _largest_divisor(B, fit // H), H


def _largest_divisor(n: int, limit: int) -> int:
    return max(i for i in range(1, min(n, limit) + 1) if n % i == 0)


def heads_together(heads: int, bytes_per_head: int, budget: int) -> int:
    """Returns how many heads run concurrently: the largest divisor of ``heads`` whose keys and
    values fit in ``budget`` bytes, or 1."""
    fit = max(1, budget // bytes_per_head)
    return _largest_divisor(heads, fit)


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


def mask_columns(s: jax.Array, bounds: jax.Array, *, interpreted: bool) -> jax.Array:
    """Returns ``s[i, j]`` where ``j < bounds[i]``, and minus infinity elsewhere.

    Args:
      s: float32 [64, n] in registers, n a multiple of 8.
      bounds: int32 [64].
    """
    bounds = thread_bounds(bounds, interpreted=interpreted)
    return mask_thread_columns(s, bounds, interpreted=interpreted)


def thread_bounds(bounds: jax.Array, *, interpreted: bool) -> jax.Array:
    """Returns for each thread ``bounds``, int32 [64], relative to the thread's first column.

    Comparing scores' columns with a bound would take an addition and a register per column.
    Relative bounds are compared with constants. They may be shifted, but not moved between
    threads."""
    if interpreted:
        return bounds

    @inline(ROW, returns=plgpu.ShapeDtypeStruct(bounds.shape, jnp.int32, layout=ROW))
    def subtract(bounds: Registers) -> Registers:
        column = arith.shli(arith.andi(mgpu.utils.thread_idx(), const(3)), const(1))
        numbers = [arith.subi(item(x, 0), column) for x in bounds.registers.flat]
        return array([single(x) for x in numbers], (ROWS,), ROW, is_signed=True)

    return subtract(bounds)


def mask_thread_columns(
    s: jax.Array, bounds: jax.Array, *, from_bound: bool = False, interpreted: bool
) -> jax.Array:
    """Returns ``s[i, j]`` where j is below row i's bound, or with ``from_bound`` where it is not,
    and minus infinity elsewhere. ``bounds`` is of :func:`thread_bounds`."""
    if interpreted:
        below = lax.broadcasted_iota(jnp.int32, s.shape, 1) < spread_rows(bounds, s.shape[1])
        return jnp.where(below != from_bound, s, -jnp.inf)

    @inline(WGMMA, ROW, returns=plgpu.ShapeDtypeStruct(s.shape, jnp.float32, layout=WGMMA))
    def masked(s: Registers, bounds: Registers) -> Registers:
        # A thread has two neighbouring columns of every eight, of one row and then of another.
        limits, hidden = [item(x, 0) for x in bounds.registers.flat], float_const(float("-inf"))
        compare = arith.CmpIPredicate.sle if from_bound else arith.CmpIPredicate.sgt
        pairs = []
        for i, pair in enumerate(s.registers.flat):
            group, half = divmod(i, 2)
            visible = [arith.cmpi(compare, limits[half], const(8 * group + j)) for j in range(2)]
            numbers = [arith.select(x, item(pair, j), hidden) for j, x in enumerate(visible)]
            pairs.append(float_pair(*numbers))
        return array(pairs, s.shape, WGMMA)

    return masked(s, bounds)
