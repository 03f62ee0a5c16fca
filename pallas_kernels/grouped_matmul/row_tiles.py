"""Which rows of which group each row tile of a grouped matmul takes.

A group of n rows has ``ceil(n / rows)`` row tiles, and no tile holds rows of two groups. Where each
group's rows and tiles end is summed up outside the kernel, in one kernel of XLA's; a tile's group
is found in the kernel, by a whole warp at once. Tables of all tiles would take XLA three kernels of
two microseconds each, as much as a tenth of a product of few rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxtyping import Array, Int, Int32

_LANES = 32
_BALLOT = """{
    .reg .pred p;
    .reg .b32 votes;
    setp.ne.b32 p, $1, 0;
    vote.sync.ballot.b32 votes, p, 0xffffffff;
    popc.b32 $0, votes;
}"""


def group_ends(group_sizes: Int[Array, " G"], rows: int) -> Int32[Array, "2 G"]:
    """Where each group's rows end, and where its tiles of at most ``rows`` rows do."""
    (G,) = group_sizes.shape
    sizes = group_sizes.astype(jnp.int32)
    both = jnp.stack([sizes, -(-sizes // rows)])
    # A sum under a mask: XLA makes a kernel of it, and of a scan several.
    not_after = jnp.arange(G)[None, :] <= jnp.arange(G)[:, None]
    return jnp.sum(jnp.where(not_after, both[:, None], 0), 2)


@dataclasses.dataclass(frozen=True)
class RowTiles:
    """What :func:`group_ends` gave, in the kernel: all threads of a warp ask together."""

    ends: Any
    """Of global memory."""
    rows: int
    by_warp: bool
    """A warp's vote finds the group; the interpreter has none."""

    @property
    def groups(self) -> int:
        return self.ends.shape[1]

    def total(self) -> jax.Array:
        """Tiles of all groups."""
        return self.ends[1, self.groups - 1]

    def locate(self, tile: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Its group, its first row and its number of rows; past the last tile, some group and row,
        and no rows."""
        group = jnp.minimum(self._ended_before(tile), self.groups - 1)
        before = jnp.maximum(group - 1, 0)
        row_end = self.ends[0, group]
        row, tiles = (jnp.where(group > 0, self.ends[i, before], 0) for i in range(2))
        row = row + (tile - tiles) * self.rows
        inside = row < row_end
        rows = jnp.where(inside, jnp.minimum(row_end - row, self.rows), 0)
        return group, jnp.where(inside, row, 0), rows

    def _ended_before(self, tile: jax.Array) -> jax.Array:
        """How many groups' tiles end at ``tile`` or before."""
        if not self.by_warp:
            ends = self.ends[1, :]
            return jnp.sum((ends <= tile).astype(jnp.int32))
        scalar = plgpu.Layout.WG_SPLAT(())
        result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=scalar)

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar), return_type=result)
        def count(_: Any, ends: Any, tile: Any) -> Any:
            i32 = ir.IntegerType.get_signless(32)

            def constant(value: int) -> Any:
                return arith.constant(i32, ir.IntegerAttr.get(i32, value))

            lane = arith.remui(mgpu.utils.thread_idx(), constant(_LANES))
            start = mgpu.utils.memref_ptr(ends)
            total = constant(0)
            for first in range(0, self.groups, _LANES):
                group = arith.addi(lane, constant(first))
                held = arith.minui(group, constant(self.groups - 1))
                place = arith.addi(held, constant(self.groups))  # the second row
                end = llvm.load(i32, mgpu.utils.getelementptr(start, [place], i32))
                ended = arith.cmpi(arith.CmpIPredicate.sle, end, tile.registers.item())
                inside = arith.cmpi(arith.CmpIPredicate.ult, group, constant(self.groups))
                vote = arith.extui(i32, arith.andi(ended, inside))
                votes: Any = llvm.inline_asm(i32, [vote], _BALLOT, "=r,r", has_side_effects=True)
                total = arith.addi(total, votes)
            return mgpu.FragmentedArray.splat(total, (), scalar.to_mgpu(), is_signed=True)

        return count(self.ends, tile)  # pyright: ignore[reportCallIssue]: the context is Mosaic's
