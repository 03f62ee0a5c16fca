"""Which rows of which group each row tile of a grouped matmul takes.

A group of n rows has ``ceil(n / rows)`` row tiles, and no tile holds rows of two groups. A kernel
finds a tile's group in the groups' sizes, all lanes of a warp at once. Tables of tiles, made
beforehand, would be kernels of XLA's of two microseconds each: three of them are a tenth of a
product of few rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.mosaic_ir import REF, SCALAR, asm, const, i32, inline

_LANES = 32
_ALL = "0xffffffff"
# Adds the number of the lane so many before this one, if there is one.
_STEP = f"""{{
    .reg .pred p;
    .reg .b32 x, other;
    mov.b32 x, $1;
    shfl.sync.up.b32 other|p, x, STEP, 0, {_ALL};
    @p add.s32 x, x, other;
    mov.b32 $0, x;
}}"""
_LAST_LANE = f"shfl.sync.idx.b32 $0, $1, 31, 31, {_ALL};"
_SUM = f"redux.sync.add.s32 $0, $1, {_ALL};"


@dataclasses.dataclass(frozen=True)
class RowTiles:
    """Of groups of these sizes; all threads of a warp ask together."""

    sizes: Any
    """int32 [G] in global memory."""
    rows: int
    on_gpu: bool
    """Not interpreted."""

    def total(self) -> jax.Array:
        """Tiles of all groups."""
        if not self.on_gpu:
            return jnp.sum(self._tiles(self.sizes[:]))

        @_inline(REF)
        def add(sizes: Any) -> tuple[Any, ...]:
            tiles = [self._tiles_of(size) for _, size in self._lanes_groups(sizes)]
            total = tiles[0]
            for more in tiles[1:]:
                total = arith.addi(total, more)
            return (_lanes(_SUM, total),)

        return add(self.sizes)[0]

    def locate(self, tile: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Its group, its first row and its number of rows; 0, 0 and 0 past the last tile."""
        if not self.on_gpu:
            return self._locate(self.sizes[:], tile)

        @_inline(REF, SCALAR, results=3)
        def find(sizes: Any, tile: Any) -> tuple[Any, ...]:
            tile, before = tile.registers.item(), const(0)
            groups = self._lanes_groups(sizes)
            tiles = [self._tiles_of(size) for _, size in groups]
            ended = const(0)
            for end in _prefix_sums(tiles):
                end, last = arith.addi(before, end), _lanes(_LAST_LANE, end)
                over = arith.cmpi(arith.CmpIPredicate.sle, end, tile)
                ended = arith.addi(ended, arith.extui(i32(), over))
                before = arith.addi(before, last)
            group = _lanes(_SUM, ended)

            def sum_where(which: Any, values: Iterable[Any]) -> Any:
                total = const(0)
                for (number, _), value in zip(groups, values, strict=True):
                    chosen = arith.cmpi(which, number, group)
                    total = arith.addi(total, arith.select(chosen, value, const(0)))
                return _lanes(_SUM, total)

            less, equal = arith.CmpIPredicate.slt, arith.CmpIPredicate.eq
            tiles_before = sum_where(less, tiles)
            rows_before = sum_where(less, (size for _, size in groups))
            size = sum_where(equal, (size for _, size in groups))
            inside = arith.muli(arith.subi(tile, tiles_before), const(self.rows))
            rows = arith.minsi(arith.subi(size, inside), const(self.rows))
            found = group, arith.addi(rows_before, inside), rows
            there = arith.cmpi(arith.CmpIPredicate.ult, group, const(self.sizes.shape[0]))
            return tuple(arith.select(there, x, const(0)) for x in found)

        return find(self.sizes, tile)

    def _tiles(self, sizes: jax.Array) -> jax.Array:
        return -(-sizes // self.rows)

    def _locate(self, sizes: jax.Array, tile: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        tiles = self._tiles(sizes)
        tile_ends, row_ends = jnp.cumsum(tiles), jnp.cumsum(sizes)
        group = jnp.sum((tile_ends <= tile).astype(jnp.int32))
        there = group < len(sizes)
        held = jnp.minimum(group, len(sizes) - 1)
        inside = (tile - (tile_ends - tiles)[held]) * self.rows
        row, rows = (row_ends - sizes)[held] + inside, jnp.minimum(sizes[held] - inside, self.rows)
        return jnp.where(there, group, 0), jnp.where(there, row, 0), jnp.where(there, rows, 0)

    def _lanes_groups(self, sizes: Any) -> list[tuple[Any, Any]]:
        """This lane's groups and their sizes, every 32nd; beyond the last, groups of no rows."""
        groups = self.sizes.shape[0]
        lane = arith.remui(mgpu.utils.thread_idx(), const(_LANES))
        start = mgpu.utils.memref_ptr(sizes)
        found = []
        for first in range(0, groups, _LANES):
            group = arith.addi(lane, const(first))
            held = arith.minui(group, const(groups - 1))
            size = llvm.load(i32(), mgpu.utils.getelementptr(start, [held], i32()))
            inside = arith.cmpi(arith.CmpIPredicate.ult, group, const(groups))
            found.append((group, arith.select(inside, size, const(0))))
        return found

    def _tiles_of(self, size: Any) -> Any:
        return arith.divui(arith.addi(size, const(self.rows - 1)), const(self.rows))


def _prefix_sums(values: list[Any]) -> list[Any]:
    """Each, added up over the lanes up to this one; side by side, for a step takes long to come."""
    for step in (1, 2, 4, 8, 16):
        values = [_lanes(_STEP.replace("STEP", str(step)), x) for x in values]
    return values


def _inline(*arguments: Any, results: int = 1) -> Callable[[Callable[..., tuple[Any, ...]]], Any]:
    """For functions that return int32 scalars."""
    scalar = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)

    def decorate(function: Callable[..., tuple[Any, ...]]) -> Any:
        @inline(*arguments, returns=(scalar,) * results)
        def inlined(*args: Any) -> Any:
            layout = SCALAR.to_mgpu()
            return tuple(
                mgpu.FragmentedArray.splat(x, (), layout, is_signed=True) for x in function(*args)
            )

        return inlined

    return decorate


def _lanes(text: str, number: Any) -> Any:
    """One instruction of all lanes, each with its number."""
    return asm(text, "=r,r", number, result=i32(), effects=True)
