"""Tiles of the Hopper grouped matmuls: which tile each CTA computes, in which order.

A group of n rows has ``ceil(n / tile_m)`` tiles along M, so no tile contains rows of two groups.
``GroupTiles`` finds a tile's group from the group sizes inside the kernel, with warp-wide scans. A
table of tiles, computed beforehand, would take three XLA kernels of two microseconds each. That is
a tenth of a matmul with few tokens.

``TileScheduler`` deals the tiles of the result to the CTAs of a persistent grid round-robin. The
tiles are ordered by panels: a panel is a number of consecutive M tiles, which are all computed for
one N tile before the next N tile. So the rows of lhs stay in the L2 cache while the matrices stream
through it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.hopper import Ref
from pallas_kernels.hopper.ir import (
    INT32,
    REF,
    SCALAR,
    Registers,
    const,
    i32,
    inline,
    scalar,
    value_of,
)
from pallas_kernels.hopper.launch import Index
from pallas_kernels.hopper.registers import last_lane, prefix_sums, warp_sum

MULTIPROCESSORS = 132  # of an H100 SXM and an H200; a choice that suits them suits others
PEAK_SHARE = 2.5
"""Bandwidth of one multiprocessor while others are idle, in units of its share of HBM bandwidth."""

_LANES = 32
_PANEL_BYTES = 16 * 2**20  # of 50 MB of L2 cache


def expected_groups(M: int, G: int) -> float:
    """Returns the expected number of groups with tokens, if M tokens choose among G uniformly."""
    return G * (1 - (1 - 1 / G) ** M)


def panel_height(M: int, G: int, tile_m: int, row_bytes: int) -> int:
    """Returns the M tiles of a panel: a group's on average, in equal parts that stay in the L2
    cache. Tiles of other groups share no matrix with them."""
    most = max(1, _PANEL_BYTES // (tile_m * row_bytes))
    tiles = pl.cdiv(M, G * tile_m)
    return pl.cdiv(tiles, pl.cdiv(tiles, most))


@dataclasses.dataclass(frozen=True)
class GroupTiles:
    """The tiles along M of all groups. All lanes of a warp call its methods together."""

    sizes: Ref  # int32 [G] in global memory: rows of each group
    tile_m: int  # rows per tile
    on_gpu: bool  # False in the interpreter

    def count(self) -> jax.Array:
        if not self.on_gpu:
            return jnp.sum(self._tiles(self.sizes[:]))

        @inline(REF, returns=INT32)
        def add(sizes: ir.Value) -> Registers:
            tiles = [self._tiles_of(size) for _, size in self._groups_of_lane(sizes)]
            return scalar(warp_sum(functools.reduce(arith.addi, tiles)))

        return add(self.sizes)

    def locate(self, tile: Index) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns a tile's group, first row and number of rows. All are 0 past the last tile."""
        if not self.on_gpu:
            return self._locate(self.sizes[:], tile)

        @inline(REF, SCALAR, returns=(INT32,) * 3)
        def search(sizes: ir.Value, number: Registers) -> tuple[Registers, ...]:
            tile, before = value_of(number), const(0)
            groups = self._groups_of_lane(sizes)
            tiles = [self._tiles_of(size) for _, size in groups]
            # The tile's group is the number of groups that end at or before it.
            ended = const(0)
            for end in prefix_sums(tiles):
                end, last = arith.addi(before, end), last_lane(end)
                over = arith.cmpi(arith.CmpIPredicate.sle, end, tile)
                ended = arith.addi(ended, arith.extui(i32(), over))
                before = arith.addi(before, last)
            group = warp_sum(ended)

            def sum_where(predicate: Any, values: Iterable[Any]) -> Any:
                total = const(0)
                for (number, _), value in zip(groups, values, strict=True):
                    chosen = arith.cmpi(predicate, number, group)
                    total = arith.addi(total, arith.select(chosen, value, const(0)))
                return warp_sum(total)

            less, equal = arith.CmpIPredicate.slt, arith.CmpIPredicate.eq
            tiles_before = sum_where(less, tiles)
            rows_before = sum_where(less, (size for _, size in groups))
            size = sum_where(equal, (size for _, size in groups))
            offset = arith.muli(arith.subi(tile, tiles_before), const(self.tile_m))
            rows = arith.minsi(arith.subi(size, offset), const(self.tile_m))
            result = group, arith.addi(rows_before, offset), rows
            exists = arith.cmpi(arith.CmpIPredicate.ult, group, const(self.sizes.shape[0]))
            return tuple(scalar(arith.select(exists, x, const(0))) for x in result)

        return search(self.sizes, tile)

    def _tiles(self, sizes: jax.Array) -> jax.Array:
        return -(-sizes // self.tile_m)

    def _locate(self, sizes: jax.Array, tile: Index) -> tuple[jax.Array, jax.Array, jax.Array]:
        tiles = self._tiles(sizes)
        tile_ends, row_ends = jnp.cumsum(tiles), jnp.cumsum(sizes)
        group = jnp.sum((tile_ends <= tile).astype(jnp.int32))
        exists = group < len(sizes)
        index = jnp.minimum(group, len(sizes) - 1)
        offset = (tile - (tile_ends - tiles)[index]) * self.tile_m
        row = (row_ends - sizes)[index] + offset
        rows = jnp.minimum(sizes[index] - offset, self.tile_m)
        return jnp.where(exists, group, 0), jnp.where(exists, row, 0), jnp.where(exists, rows, 0)

    def _groups_of_lane(self, sizes: ir.Value) -> list[tuple[ir.Value, ir.Value]]:
        """Returns number and size of every 32nd group from this lane's on; 0 past the last
        group."""
        groups = self.sizes.shape[0]
        lane = arith.remui(mgpu.utils.thread_idx(), const(_LANES))
        start = mgpu.utils.memref_ptr(sizes)
        result = []
        for first in range(0, groups, _LANES):
            group = arith.addi(lane, const(first))
            index = arith.minui(group, const(groups - 1))
            size = llvm.load(i32(), mgpu.utils.getelementptr(start, [index], i32()))
            exists = arith.cmpi(arith.CmpIPredicate.ult, group, const(groups))
            result.append((group, arith.select(exists, size, const(0))))
        return result

    def _tiles_of(self, size: ir.Value) -> ir.Value:
        return arith.divui(arith.addi(size, const(self.tile_m - 1)), const(self.tile_m))


class Tile(NamedTuple):
    """A tile of the result."""

    group: jax.Array
    row: jax.Array  # first row of lhs
    rows: jax.Array  # number of rows that belong to the group, at most tile_m
    # First column. The last tile along N is moved back to end at N, so it may overlap the tile
    # before it.
    column: jax.Array
    first_new_column: jax.Array  # first column that the tile before it along N does not have


@dataclasses.dataclass(frozen=True)
class TileScheduler:
    """The tiles of one CTA, or of the two CTAs of a cluster, which share the columns of a tile."""

    group_tiles: GroupTiles  # whose tiles have the rows of both CTAs of a cluster
    m_tiles: jax.Array  # number of tiles along M, over all groups
    N: int
    columns: int  # per tile
    panel: int  # M tiles of a panel, see :func:`panel_height`
    clusters: int  # clusters in the grid, or CTAs
    cluster: jax.Array  # index of this CTA's cluster, or of the CTA
    member: jax.Array | None = None  # index of this CTA in its cluster of two

    def count(self) -> jax.Array:
        clusters = jnp.int32(self.clusters)
        total = self.m_tiles * pl.cdiv(self.N, self.columns)
        return lax.div(total - self.cluster + (clusters - 1), clusters)

    def locate(self, i: jax.Array | int) -> Tile:
        """Returns this CTA's i-th tile. Past the last, it has no rows."""
        n_tiles = jnp.int32(pl.cdiv(self.N, self.columns))
        tile = self.cluster + i * jnp.int32(self.clusters)
        if self.panel == 1:
            m_tile = lax.div(tile, n_tiles)
            n_tile = tile - m_tile * n_tiles
        else:
            panel = jnp.int32(self.panel)
            tiles_per_panel = panel * n_tiles
            first = lax.div(tile, tiles_per_panel) * panel
            tile = lax.rem(tile, tiles_per_panel)
            height = jnp.maximum(jnp.minimum(panel, self.m_tiles - first), 1)
            n_tile = lax.div(tile, height)
            m_tile = first + tile - n_tile * height
        column = n_tile * jnp.int32(self.columns)
        group, row, rows = self.group_tiles.locate(m_tile)
        if self.member is not None:
            height = self.group_tiles.tile_m // 2
            before = self.member * jnp.int32(height)
            rows = jnp.clip(rows - before, 0, height)
            # A CTA without rows computes the first CTA's, and stores none.
            row = row + jnp.where(rows > 0, before, 0)
        return Tile(group, row, rows, jnp.minimum(column, self.N - self.columns), column)
