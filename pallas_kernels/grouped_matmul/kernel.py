"""The Hopper kernel of grouped_matmul and grouped_swiglu: persistent and warp-specialised.

    out[m] = rhs[g(m)] @ lhs[m]                                   grouped_matmul
    out[m] = silu(gate[g(m)] @ lhs[m]) * (up[g(m)] @ lhs[m])      grouped_swiglu

The operands are bfloat16, or float8 with a scale per row and 128 columns of lhs and per 128 x 128
block of the matrices. It is used for these dtypes with any number of rows; bfloat16 rows with
quantized matrices go to ``few_tokens``.

One thread block runs on each multiprocessor and has three warpgroups. In the producer, one warp
keeps a ring of stages filled by TMA. A stage has 128 bytes of K of the tile's rows of lhs and rhs.
Two consumers each compute a half of the tile with wgmma and store it. With many float8 rows and
long K, two blocks form a pair that shares the matrices' rows (``Config.paired``).

Four things are not obvious.

1.  Groups start at any row, tiled TMA copies at multiples of eight: see ``buffers.scratch``.
2.  The rows of a tile past its group's end belong to the next group, or are zeros past the end of
    lhs. They are multiplied too but not stored, because the rows of a matmul do not mix.
3.  With two matrices, a stage has the rows of gate and up side by side for each warpgroup. One
    wgmma multiplies both, and a gate and its up end in the same thread's registers.
4.  An H200 has more tensor throughput than its power limit sustains. So apart from waiting, what
    counts is the number of other instructions: one warp issues all copies. While one wgmma runs,
    the consumers load what they need next: scales, and once per tile the next tile's coordinates.

The tensor cores accumulate bfloat16 over all of K, but float8 over one K step of 128 columns. Its
product is then multiplied by its scales and added to float32 sums in registers.

``plan`` derives sizes from shapes, ``buffers`` names the memory, ``tile_scheduler`` assigns tiles
to blocks, ``producer`` copies operands, and ``epilogue`` stores results. benchmarks/NOTES.md
records what was tried and measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.grouped_matmul.buffers import Buffers, scratch
from pallas_kernels.grouped_matmul.epilogue import store_tile
from pallas_kernels.grouped_matmul.plan import (
    CLUSTER_AXIS,
    CONSUMERS,
    SCALE_BLOCK,
    Config,
    Plan,
    check_shapes,
    quantizes,
)
from pallas_kernels.grouped_matmul.producer import produce, tile_state
from pallas_kernels.grouped_matmul.tile_scheduler import GroupTiles, Tile, TileScheduler
from pallas_kernels.grouped_matmul.unrolled import (
    UnrolledTile,
    add_scaled,
    staged_row_scales,
    zero_sums,
)
from pallas_kernels.hopper import multiprocessors
from pallas_kernels.hopper.branch import cond, when
from pallas_kernels.hopper.launch import overlap_preceding_kernel
from pallas_kernels.hopper.loads import load_column
from pallas_kernels.hopper.lowered_once import lowered_once
from pallas_kernels.hopper.ring import PipelineState, Ring
from pallas_kernels.hopper.tiles import ACC, ROWS
from pallas_kernels.hopper.warpgroup import first_warp

_INTERPRETED_BLOCKS = 2


@lowered_once("config", "quantize", "interpret")
def matmul(
    lhs: Float[Array, "M K"],
    matrices: Sequence[Float[Array, "G N K"]],
    group_sizes: Int[Array, " G"],
    lhs_scale: Float32[Array, "M Kb"] | None,
    matrix_scales: Sequence[Float32[Array, "G Nb Kb"]],
    *,
    config: Config,
    quantize: bool = False,
    interpret: Any = None,
) -> Any:
    """Multiplies each row with its group's matrix, or computes SwiGLU of two matrices.

    Returns:
      bfloat16 [M, N]; with ``quantize`` float8_e4m3fn, and one scale per row and 128 columns. Rows
      that belong to no group are undefined.

    Args:
      lhs, matrices: all bfloat16, or all float8_e4m3fn. One matrix, or gate and up.
      lhs_scale, matrix_scales: scales of float8 operands, one array per matrix.

    Raises:
      NotImplementedError: ``quantize``, and :func:`plan.quantizes` returns False.
    """
    (M, K), (G, N, _) = lhs.shape, matrices[0].shape
    float8, count = lhs_scale is not None, len(matrices)
    check_shapes(config, N, K, float8, count)
    if quantize and not quantizes(config, N, count):
        raise NotImplementedError(
            f"quantizes tiles of 64 x {SCALE_BLOCK}, or 128 x {SCALE_BLOCK} split along M, with N a"
            f" multiple of {SCALE_BLOCK}, got {config} and N {N}"
        )
    on_gpu = interpret is None
    # The interpreter starts a thread of the host for each warpgroup of each block.
    blocks = config.blocks or (multiprocessors() if on_gpu else _INTERPRETED_BLOCKS)
    blocks -= blocks % 2 if config.paired else 0
    plan = Plan(config, M, G, N, K, float8, count, quantize, blocks, on_gpu)
    if lhs_scale is not None and plan.tma_scales:
        padding = max(-M % 4, plan.scale_copy_rows - M)
        lhs_scale = jnp.pad(lhs_scale, ((0, padding), (0, 0))).T
    ring_scratch = Ring.scratch(
        config.stages, plan.copies_per_stage, CONSUMERS, interpret, plan.multicast_axis
    )
    scale_ring_scratch = Ring.scratch(2, count, CONSUMERS, interpret) if plan.unrolled else []

    def grouped_matmul(*refs: Any) -> None:
        end = len(refs) - len(scale_ring_scratch)
        first = end - len(ring_scratch)
        buffers = Buffers.of(plan, refs[:first])
        ring = Ring.of(config.stages, CONSUMERS, refs[first:end], interpret, plan.cluster)
        scale_ring = None
        if plan.unrolled:
            scale_ring = Ring.of(2, CONSUMERS, refs[end:], interpret)
            scale_ring.initialise()
        ring.initialise()
        overlap_preceding_kernel(config.early, interpret=interpret)
        rows = config.tile_m * plan.cluster
        group_tiles = GroupTiles(buffers.group_sizes, rows, on_gpu=on_gpu)
        member = lax.axis_index(CLUSTER_AXIS) if config.paired else None
        tiles = TileScheduler(
            plan, group_tiles, group_tiles.count(), lax.axis_index("block"), member
        )
        warpgroup = lax.axis_index("warpgroup")

        @when(warpgroup == CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(config.registers[1], action="decrease")
            when(first_warp(on_gpu))(lambda: produce(plan, buffers, tiles, ring, scale_ring))

        @when(warpgroup != CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(config.registers[0], action="increase")
            Consumer(plan, buffers, tiles, ring, scale_ring, warpgroup).run()

    if count == 2:
        grouped_matmul.__name__ = "grouped_swiglu"  # profiles show it
    out_type = jax.ShapeDtypeStruct((M, N), plan.out_dtype)
    scale_type = jax.ShapeDtypeStruct((M, N // SCALE_BLOCK), jnp.float32)
    cluster: Any = {}
    if config.paired:
        cluster = {"cluster": (plan.cluster,), "cluster_names": (CLUSTER_AXIS,)}
    kernel = plgpu.kernel(
        grouped_matmul,
        out_type=(out_type, scale_type) if quantize else out_type,
        scratch_types=[*scratch(plan), *ring_scratch, *scale_ring_scratch],
        grid=(plan.clusters,),
        grid_names=("block",),
        **cluster,
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(lhs, *matrices, group_sizes, *((lhs_scale, *matrix_scales) if float8 else ()))


# ---- the consumers -------------------------------------------------------------------------------


class Scales(NamedTuple):
    """Scales of one K step, for the share of one consumer warpgroup."""

    lhs: jax.Array | None  # float32 [64], one per row. None if TMA copies them to the stage.
    rhs: tuple[jax.Array, ...]  # one scalar per ``plan.scale_width`` columns of the accumulator


_Result = tuple[tuple[jax.Array, ...], Tile, PipelineState]
"""Sums of the warpgroup's share of a tile side by side, the next tile and the ring's next state."""


@dataclasses.dataclass(frozen=True)
class Consumer:
    """A consumer warpgroup, which computes and stores its share of every tile of its block."""

    plan: Plan
    buffers: Buffers
    tiles: TileScheduler
    ring: Ring
    scale_ring: Ring | None
    warpgroup: jax.Array

    def run(self) -> None:
        self.ring.release_all()
        if self.scale_ring is not None:
            self.scale_ring.release_all()

        def compute_tile(i: jax.Array, carry: Any) -> Any:
            tile, scales, state = carry
            if self.scale_ring is not None:
                self.scale_ring.wait_full(tile_state(i))
                unrolled = self.unrolled_tile(i, tile, state.phase)
                sums, next_tile = unrolled.sum_products()
                state = PipelineState(state.stage, unrolled.next_phase)
                self.scale_ring.release(tile_state(i))
            elif self.plan.float8:
                sums, next_tile, state = self.float8_loop(i, tile, scales, state)
            else:
                sums, next_tile, state = self.bfloat16_loop(i, tile, state)
            scales = first_scales(next_tile)  # before the epilogue, which hides the latency
            store_tile(self.plan, self.buffers, self.warpgroup, tile, sums, i)
            return next_tile, scales, state

        def first_scales(tile: Tile) -> Scales | None:
            if not self.plan.float8 or self.plan.unrolled:
                return None
            return self.load_scales(tile, 0)

        first = self.tiles.locate(0)
        carry = first, first_scales(first), self.ring.start()
        lax.fori_loop(0, self.tiles.count(), compute_tile, carry)
        plgpu.wait_smem_to_gmem(0)

    def unrolled_tile(self, i: jax.Array, tile: Tile, phase: jax.Array) -> UnrolledTile:
        return UnrolledTile.of(
            self.plan, self.buffers, self.tiles, self.ring, self.warpgroup, i, tile, phase
        )

    def prefetch_tile(self, i: jax.Array, step: jax.Array, next_tile: Tile) -> Tile:
        """Locates the next tile in the first K step: it takes half a microsecond."""
        return cond(step == 0, lambda: self.tiles.locate(i + 1), lambda: next_tile)

    def bfloat16_loop(self, tile_index: jax.Array, tile: Tile, state: PipelineState) -> _Result:
        """Sums the products of all K steps in the tensor cores, in one array."""
        row, column = self.plan.stage_offset(self.warpgroup)
        rows, columns = self.plan.warpgroup_tile

        def accumulate(accumulator: Any) -> tuple[jax.Array, Tile, PipelineState]:
            def step(i: jax.Array, state: PipelineState, carry: tuple[PipelineState, Tile]) -> Any:
                previous, next_tile = carry
                self.ring.wait_full(state)
                a = self.buffers.lhs_stages.at[state.stage, pl.ds(row, rows)]
                b = self.buffers.rhs_stages.at[state.stage, pl.ds(column, columns)]
                plgpu.wgmma(accumulator, a, b.T)
                next_tile = self.prefetch_tile(tile_index, i, next_tile)
                plgpu.wgmma_wait(1)
                when(i > 0)(lambda: self.ring.release(previous))
                return state, next_tile

            end, (last, next_tile) = self.ring.loop(self.plan.k_steps, step, state, (state, tile))
            sums = accumulator[...]
            self.ring.release(last)
            return sums, next_tile, end

        sums, next_tile, end = pl.run_scoped(accumulate, ACC((rows, columns), jnp.float32))
        return (sums,), next_tile, end

    def float8_loop(
        self, tile_index: jax.Array, tile: Tile, scales: Scales, state: PipelineState
    ) -> _Result:
        """Scales the product of each K step, in one array per ``plan.scale_width`` columns.

        Args:
          scales: those of the first K step.
        """
        plan, (_, columns) = self.plan, self.plan.warpgroup_tile
        row, column = plan.stage_offset(self.warpgroup)

        def step(i: jax.Array, state: PipelineState, carry: Any) -> Any:
            sums, scales, next_tile = carry
            self.ring.wait_full(state)

            def multiply_and_scale(accumulator: Any) -> Any:
                a = self.buffers.lhs_stages.at[state.stage, pl.ds(row, ROWS)]
                b = self.buffers.rhs_stages.at[state.stage, pl.ds(column, columns)]
                plgpu.wgmma(accumulator, a, b.T)
                # All of this overlaps with wgmma, so that only the additions are left after it.
                rows = self.lhs_scales(tile, scales, state)
                factors = [rows * s for s in scales.rhs]
                next_scales = self.load_scales(tile, jnp.minimum(i + 1, plan.k_steps - 1))
                prefetched = self.prefetch_tile(tile_index, i, next_tile)
                product = accumulator[...]
                self.ring.release(state)
                return add_scaled(sums, product, factors), next_scales, prefetched

            return pl.run_scoped(multiply_and_scale, ACC((ROWS, columns), jnp.float32))

        carry = zero_sums(plan), scales, tile
        state, (sums, _, next_tile) = self.ring.loop(plan.k_steps, step, state, carry)
        return sums, next_tile, state

    def load_scales(self, tile: Tile, step: jax.Array | int) -> Scales:
        """Loads the scales of a K step from global memory."""
        plan, buffers = self.plan, self.buffers
        row, _ = plan.stage_offset(self.warpgroup)
        first = tile.column + plan.out_column(self.warpgroup)
        rhs = tuple(
            scales[tile.group, lax.div(first + c, SCALE_BLOCK), step]
            for scales in buffers.matrix_scales
            for c in range(0, plan.warpgroup_out_columns, plan.scale_width)
        )
        if plan.tma_scales:
            return Scales(None, rhs)
        rows: Any = {"rows": plan.M, "on_gpu": plan.on_gpu}
        return Scales(load_column(buffers.lhs_scale, tile.row + row, step, **rows), rhs)

    def lhs_scales(self, tile: Tile, scales: Scales, state: PipelineState) -> jax.Array:
        """Returns the lhs scales, from registers or from the stage, in the layout of rows."""
        if scales.lhs is not None:
            return scales.lhs
        row, _ = self.plan.stage_offset(self.warpgroup)
        return staged_row_scales(self.buffers.scale_stages, state.stage, row, tile)
