"""Float8 sums of the Hopper grouped matmul: scaled products, and the unrolled loop over K.

The unrolled loop takes all stages of the ring in one iteration (a lap), so stages and the addresses
of what they contain are constants. Its last lap is separate: it locates the next tile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped_matmul.buffers import Buffers
from pallas_kernels.grouped_matmul.plan import ATOM, SCALE_BLOCK, Plan
from pallas_kernels.grouped_matmul.tile_scheduler import Tile, TileScheduler
from pallas_kernels.hopper import wgmma
from pallas_kernels.hopper.ring import PipelineState, Ring
from pallas_kernels.hopper.tiles import ACC, ROW, ROWS, WGMMA, spread_rows

Sums = tuple[jax.Array, ...]
"""Float32 sums of the warpgroup's share of a tile, side by side."""


class Step(NamedTuple):
    """A K step of a tile."""

    k: Any
    """Its index."""

    stage: int
    phase: Any
    """Phase of the stage's barriers."""

    @property
    def state(self) -> PipelineState:
        return PipelineState(jnp.int32(self.stage), self.phase)


@dataclasses.dataclass(frozen=True)
class UnrolledTile:
    """The K steps of one tile, for one consumer warpgroup."""

    plan: Plan
    buffers: Buffers
    tiles: TileScheduler
    ring: Ring
    index: jax.Array
    """Index of the tile in the block's order."""

    tile: Tile
    warpgroup: jax.Array
    first_block: jax.Array
    """First of the two blocks of columns whose scales are in shared memory."""

    a: Any
    b: Any
    """The operands' rows in stage 0: descriptor bases, or the references in the interpreter."""

    phase: jax.Array
    """Phase of the stages in the tile's first lap."""

    @classmethod
    def of(
        cls,
        plan: Plan,
        buffers: Buffers,
        tiles: TileScheduler,
        ring: Ring,
        warpgroup: jax.Array,
        index: jax.Array,
        tile: Tile,
        phase: jax.Array,
    ) -> UnrolledTile:
        row, _ = plan.stage_offset(warpgroup)
        first_block = plan.first_scale_block(tile.column)
        a: Any = buffers.lhs_stages_untiled
        b: Any = buffers.rhs_stages_untiled
        if plan.on_gpu:
            a, b = wgmma.operand_base(a, row * ATOM), wgmma.operand_base(b, 0)
        return cls(plan, buffers, tiles, ring, index, tile, warpgroup, first_block, a, b, phase)

    @property
    def laps(self) -> int:
        return self.plan.k_steps // self.plan.config.stages

    @property
    def next_phase(self) -> jax.Array:
        """Phase of the stages in the next tile's first lap."""
        return self.phase ^ (self.laps & 1)

    def sum_products(self) -> tuple[Sums, Tile]:
        """Returns the sums of all K steps, and the next tile."""

        def lap(n: Any, carry: Any, is_last: bool) -> tuple[Any, Tile]:
            phase, next_tile = self.phase ^ (n & 1), self.tile
            for stage in range(self.plan.config.stages):
                step = Step(n * self.plan.config.stages + stage, stage, phase)
                last = is_last and stage == self.plan.config.stages - 1
                carry, next_tile = self._add_step(step, carry, last)
            return carry, next_tile

        columns = self.plan.warpgroup_tile[1]
        carry = zero_sums(self.plan), zeros(columns)
        carry = lax.fori_loop(0, self.laps - 1, lambda n, carry: lap(n, carry, False)[0], carry)
        (sums, _), next_tile = lap(jnp.int32(self.laps - 1), carry, True)
        return sums, next_tile

    def _add_step(self, step: Step, carry: Any, is_last: bool) -> tuple[Any, Tile]:
        sums, product = carry
        self.ring.wait_full(step.state)
        started = self._start(step.stage, product)
        factors = self._factors(step)  # while the tensor cores work
        next_tile = self.tiles.locate(self.index + 1) if is_last else self.tile
        product = wgmma.wait_for_product(started) if self.plan.on_gpu else started
        self.ring.release(step.state)
        return (add_scaled(sums, product, factors), product), next_tile

    def _start(self, stage: int, previous: jax.Array) -> jax.Array:
        """Starts the product of a stage. In the interpreter it is complete."""
        config, columns = self.plan.config, self.plan.warpgroup_tile[1]
        if self.plan.on_gpu:
            offsets = stage * config.tile_m * ATOM, stage * config.tile_n * ATOM
            return wgmma.start_product(self.a, self.b, *offsets, previous)

        def multiply(accumulator: Any) -> jax.Array:
            row, _ = self.plan.stage_offset(self.warpgroup)
            rows = self.buffers.lhs_stages.at[stage, pl.ds(row, ROWS)]
            plgpu.wgmma(accumulator, rows, self.buffers.rhs_stages.at[stage].T)
            return accumulator[...]

        return pl.run_scoped(multiply, ACC((ROWS, columns), jnp.float32))

    def _factors(self, step: Step) -> list[jax.Array]:
        """Returns the scales of a product, one vector of rows for each of the sums."""
        row, _ = self.plan.stage_offset(self.warpgroup)
        stages = self.buffers.scale_stages
        rows = staged_row_scales(stages, step.state.stage, row, self.tile)
        return [rows * s for s in self._matrix_scales(step.k)]

    def _matrix_scales(self, k: Any) -> list[jax.Array]:
        plan, scales = self.plan, []
        tiles = self.buffers.matrix_scale_tiles
        for matrix in range(plan.matrices):
            first, second = (tiles[self.index & 1, matrix, n, k] for n in range(2))
            for c in range(0, plan.out_columns, plan.scale_width):
                is_second = lax.div(self.tile.column + c, SCALE_BLOCK) > self.first_block
                if plan.out_columns > SCALE_BLOCK and c in (0, SCALE_BLOCK):
                    scales.append(second if c else first)  # a tile has columns of both blocks
                else:
                    scales.append(jnp.where(is_second, second, first))
        return scales


def staged_row_scales(scale_stages: Any, stage: Any, row: Any, tile: Tile) -> jax.Array:
    """Returns the scales that TMA copied for a warpgroup's 64 rows, in the layout of rows."""
    rows = scale_stages[stage, pl.ds(row + (tile.row & 3), ROWS)]
    return plgpu.layout_cast(rows, ROW)


def zero_sums(plan: Plan) -> Sums:
    return (zeros(plan.scale_width),) * (plan.warpgroup_tile[1] // plan.scale_width)


def zeros(columns: int) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((ROWS, columns), jnp.float32), WGMMA)


def add_scaled(sums: Sums, product: jax.Array, factors: Sequence[jax.Array]) -> Sums:
    """Adds a product to sums of as many columns each, times a factor per sum and row."""
    return tuple(s + part for s, part in zip(sums, scaled(product, factors), strict=True))


def scaled(product: jax.Array, factors: Sequence[jax.Array]) -> Iterator[jax.Array]:
    """Yields the parts of a product, each times a factor per row."""
    width = product.shape[1] // len(factors)
    for j, f in enumerate(factors):
        yield product[:, j * width : (j + 1) * width] * spread_rows(f, width)
