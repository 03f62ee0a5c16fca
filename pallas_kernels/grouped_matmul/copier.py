"""The warpgroup that copies: rows, columns and scales of a block's tiles, into the ring."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.grouped_matmul.block_tiles import BlockTiles, Tile
from pallas_kernels.grouped_matmul.plan import ATOM, Plan
from pallas_kernels.grouped_matmul.refs import Refs
from pallas_kernels.grouped_matmul.ring import Copy, Position, Ring


def copy_tiles(plan: Plan, refs: Refs, tiles: BlockTiles, ring: Ring) -> None:
    """Fills the ring with the stages of all of this block's tiles."""
    config, atom = plan.config, plan.atom

    def copy_stage(tile: Tile, step: Any, at: Position, rows: int) -> None:
        k = pl.ds(step * jnp.int32(atom), atom)
        copies = []
        for matrix, column, width, to in plan.pieces:
            b = refs.b_plain.at[at.slot]
            if width < config.columns:
                b = refs.b_plain.at[at.slot, pl.ds(to, width)]
            window = (tile.group, pl.ds(tile.column + column, width), k)
            copies.append(Copy(refs.matrices[matrix], window, b, ATOM))
        a = refs.a_plain.at[at.slot]
        if rows < config.rows:
            a = refs.a_plain.at[at.slot, pl.ds(0, rows)]
        copies.append(Copy(refs.lhs, (pl.ds(tile.row, rows), k), a, ATOM))
        if plan.copied_scales:
            window = (step, pl.ds(tile.row - (tile.row & 3), plan.scale_rows))
            copies.append(Copy(refs.lhs_scale, window, refs.scales.at[at.slot], None))
        ring.fill(at, copies)

    def copy_tile(i: jax.Array, at: Position) -> Position:
        tile = tiles.locate(i)

        def fill(step: jax.Array, at: Position, carry: tuple[()]) -> tuple[()]:
            fewer = 0
            for rows in plan.copied_rows:
                last = rows == plan.copied_rows[-1]
                if last and not fewer:
                    copy_stage(tile, step, at, rows)
                else:
                    mine = (tile.rows > fewer) & ((tile.rows <= rows) | last)
                    pl.when(mine)(functools.partial(copy_stage, tile, step, at, rows))
                fewer = rows
            return carry

        return ring.walk(plan.steps, fill, at, ())[0]

    ring.drain(lax.fori_loop(0, tiles.count(), copy_tile, ring.begin()))
