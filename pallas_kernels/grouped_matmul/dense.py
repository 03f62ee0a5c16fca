"""The Hopper kernel of grouped_matmul and grouped_swiglu: persistent and warp-specialised.

    out[m] = rhs[g(m)] @ lhs[m]                                   grouped_matmul
    out[m] = silu(gate[g(m)] @ lhs[m]) * (up[g(m)] @ lhs[m])      grouped_swiglu

Under a gradient, grouped_swiglu's kernel also stores both sums (:func:`swiglu_and_sums`).

The operands are bfloat16, or float8 with a scale per row and 128 columns of lhs and per 128 x 128
block of the matrices. It is used for these dtypes with any number of rows; bfloat16 rows with
quantized matrices go to ``few_tokens``.

One CTA runs on each multiprocessor and has three warpgroups. In the producer, one warp keeps a ring
of stages filled by TMA. A stage has 128 bytes of K of the tile's rows of lhs and rhs. Two consumers
each compute a half of the tile with wgmma and store it. With many float8 rows and long K, two CTAs
form a pair that shares the matrices' rows (``Config.paired``). ``dense_plan`` has the sizes, and
``schedule`` assigns tiles to CTAs.

Four things are not obvious.

1.  Groups start at any row, tiled TMA copies at multiples of eight. So copies use the untiled view
    of a buffer, and wgmma and register stores the tiled one.
2.  The rows of a tile past its group's end belong to the next group, or are zeros past the end of
    lhs. They are multiplied too but not stored, because the rows of a matmul do not mix.
3.  With two matrices, a stage has the rows of gate and up side by side for each warpgroup. One
    wgmma multiplies both, and a gate and its up end in the same thread's registers.
4.  An H200 has more tensor throughput than its power limit sustains. So apart from waiting, what
    counts is the number of other instructions: one warp issues all copies. While one wgmma runs,
    the consumers load what they need next: scales, and once per tile the next tile's coordinates.

The tensor cores accumulate bfloat16 over all of K, but float8 over one K step of 128 columns. Its
product is then multiplied by its scales and added to float32 sums in registers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Float32, Int

from pallas_kernels.grouped_matmul.dense_plan import (
    ATOM,
    CLUSTER_AXIS,
    CONSUMERS,
    SCALE_BLOCK,
    Config,
    Plan,
    check_shapes,
)
from pallas_kernels.grouped_matmul.schedule import GroupTiles, Tile, TileScheduler
from pallas_kernels.hopper import Index, Ref, multiprocessors, wgmma
from pallas_kernels.hopper.barriers import TmaCopy
from pallas_kernels.hopper.launch import LANE, grid_kernel, overlap_preceding_kernel
from pallas_kernels.hopper.lowered_once import lowered_once
from pallas_kernels.hopper.registers import approximate_sigmoid
from pallas_kernels.hopper.ring import PipelineState, Ring
from pallas_kernels.hopper.tiles import ACC, ROW, ROWS, WGMMA, load_column, spread_rows, two_views
from pallas_kernels.hopper.warpgroup import cond, first_warp, when

REGISTERS = (232, 40)  # per thread of a consumer and of the producer warpgroup
_STORE_HEIGHTS = (32, 16, 8, 4, 2, 1)  # rows per TMA store of a buffer that is not full
_INTERPRETED_CTAS = 2  # the interpreter starts a thread of the host for each of their warpgroups


# ---- launch --------------------------------------------------------------------------------------


class Views(NamedTuple):
    """Both views of a buffer in shared memory. In the interpreter they are the same."""

    tiled: Ref
    untiled: Ref


class Buffers(NamedTuple):
    """References to everything that the kernel reads and writes, except the rings' barriers."""

    # in global memory
    lhs: Ref  # [M, K]
    matrices: tuple[Any, ...]  # [G, N, K], one or two
    group_sizes: Ref  # int32 [G]
    lhs_scale: Ref  # float32 [M, K / 128], or its padded transpose for TMA. None for bfloat16.
    matrix_scales: tuple[Any, ...]  # float32 [G, N / 128, K / 128], or empty for bfloat16
    outs: tuple[Any, ...]  # [M, N]: the result, then both sums if ``plan.keeps_sums``
    lhs_stages: Views  # [stages, tile_m, tile_k]
    rhs_stages: Views  # [stages, tile_n, tile_k]
    scale_stages: Ref  # float32 [stages, scale_copy_rows] for row scales that TMA copies, or None
    # float32 [2, matrices, 2, K / 128]: for this tile and the next one, the scales of the two
    # blocks of columns that a tile may touch. None unless the loop is unrolled.
    matrix_scale_tiles: Ref
    staging: Views  # [CONSUMERS * staging_buffers, 64, staging_width]: results on their way out

    @classmethod
    def of(cls, plan: Plan, refs: Sequence[Any]) -> Buffers:
        """Names the kernel's references: operands, result, then those of :func:`_scratch`."""
        remaining = iter(refs)
        take = functools.partial(next, remaining)

        def views() -> Views:
            ref = take()
            return Views(*ref) if plan.on_gpu else Views(ref, ref)

        buffers = cls(
            lhs=take(),
            matrices=tuple(take() for _ in range(plan.matrices)),
            group_sizes=take(),
            lhs_scale=take() if plan.float8 else None,
            matrix_scales=tuple(take() for _ in range(plan.matrices if plan.float8 else 0)),
            outs=tuple(take() for _ in range(plan.results)),
            lhs_stages=views(),
            rhs_stages=views(),
            scale_stages=take() if plan.tma_scales else None,
            matrix_scale_tiles=take() if plan.unrolled else None,
            staging=views(),
        )
        assert not list(remaining)
        return buffers


def _scratch(plan: Plan) -> list[Any]:
    config = plan.config

    def views(*shape: int, dtype: Any = plan.dtype) -> Any:
        return two_views(shape, dtype, on_gpu=plan.on_gpu)

    scale_stages = plgpu.SMEM((config.stages, plan.scale_copy_rows), jnp.float32)
    matrix_scales = plgpu.SMEM((2, plan.matrices, 2, plan.k_steps), jnp.float32)
    staging = (CONSUMERS * config.staging_buffers, ROWS, plan.staging_width)
    return [
        views(config.stages, config.tile_m, plan.tile_k),
        views(config.stages, config.tile_n, plan.tile_k),
        *([scale_stages] if plan.tma_scales else []),
        *([matrix_scales] if plan.unrolled else []),
        views(*staging, dtype=jnp.bfloat16),
    ]


@lowered_once("config", "interpret")
def matmul(
    lhs: Float[Array, "M K"],
    matrices: Sequence[Float[Array, "G N K"]],
    group_sizes: Int[Array, " G"],
    lhs_scale: Float32[Array, "M Kb"] | None,
    matrix_scales: Sequence[Float32[Array, "G Nb Kb"]],
    *,
    config: Config,
    interpret: Any = None,
) -> BFloat16[Array, "M N"]:
    """Multiplies each row with its group's matrix, or computes SwiGLU of two matrices. Operands are
    all bfloat16, or all float8 with scales. Rows that belong to no group are undefined."""
    scales = lhs_scale, matrix_scales
    return _launch(lhs, matrices, group_sizes, *scales, config, interpret, keeps_sums=False)[0]


@lowered_once("config", "interpret")
def swiglu_and_sums(
    lhs: BFloat16[Array, "M K"],
    matrices: Sequence[BFloat16[Array, "G N K"]],
    group_sizes: Int[Array, " G"],
    *,
    config: Config,
    interpret: Any = None,
) -> tuple[BFloat16[Array, "M N"], BFloat16[Array, "M N"], BFloat16[Array, "M N"]]:
    """Returns SwiGLU of gate and up, and their sums ``gate[g(m)] @ lhs[m]`` and ``up[g(m)] @
    lhs[m]``, from which the gradient is computed. So SwiGLU is that of the rounded sums. Rows that
    belong to no group are undefined."""
    options: Any = {"config": config, "interpret": interpret, "keeps_sums": True}
    hidden, gate, up = _launch(lhs, matrices, group_sizes, None, (), **options)
    return hidden, gate, up


def _launch(
    lhs: jax.Array, matrices: Sequence[jax.Array], group_sizes: jax.Array, lhs_scale: Any,
    matrix_scales: Sequence[jax.Array], config: Config, interpret: Any, keeps_sums: bool,
) -> Sequence[jax.Array]:  # fmt: skip
    (M, K), (G, N, _) = lhs.shape, matrices[0].shape
    float8, count = lhs_scale is not None, len(matrices)
    check_shapes(config, N, K, float8, count)
    on_gpu = interpret is None
    ctas = multiprocessors() if on_gpu else _INTERPRETED_CTAS
    ctas -= ctas % 2 if config.paired else 0
    plan = Plan(config, M, G, N, K, float8, count, ctas, on_gpu, keeps_sums)
    if lhs_scale is not None and plan.tma_scales:
        padding = max(-M % 4, plan.scale_copy_rows - M)
        lhs_scale = jnp.pad(lhs_scale, ((0, padding), (0, 0))).T
    copies = 1 + len(plan.rhs_copies) + plan.tma_scales
    ring_scratch = Ring.scratch(config.stages, copies, CONSUMERS, interpret, plan.multicast_axis)
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
        overlap_preceding_kernel(config.few_rows, interpret=interpret)
        group_tiles = GroupTiles(buffers.group_sizes, config.tile_m * plan.cluster, on_gpu=on_gpu)
        member = lax.axis_index(CLUSTER_AXIS) if config.paired else None
        tiles = TileScheduler(
            group_tiles, group_tiles.count(), N, plan.out_columns, plan.panel,
            ctas // plan.cluster, lax.axis_index("cta"), member,
        )  # fmt: skip
        warpgroup = lax.axis_index("wg")

        @when(warpgroup == CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
            when(first_warp(on_gpu))(lambda: _produce(plan, buffers, tiles, ring, scale_ring))

        @when(warpgroup != CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            _Consumer(plan, buffers, tiles, ring, scale_ring, warpgroup).run()

    if count == 2:
        grouped_matmul.__name__ = "grouped_swiglu"  # profiles show it
    kernel = grid_kernel(
        grouped_matmul,
        [jax.ShapeDtypeStruct((M, N), jnp.bfloat16)] * plan.results,
        [*_scratch(plan), *ring_scratch, *scale_ring_scratch],
        warpgroups=CONSUMERS + 1,
        grid={"cta": ctas // plan.cluster},
        cluster={CLUSTER_AXIS: plan.cluster} if config.paired else {},
        interpret=interpret,
        lowering_semantics=LANE,
    )
    return kernel(lhs, *matrices, group_sizes, *((lhs_scale, *matrix_scales) if float8 else ()))


# ---- the producer --------------------------------------------------------------------------------


def _produce(
    plan: Plan, buffers: Buffers, tiles: TileScheduler, ring: Ring, scale_ring: Ring | None
) -> None:
    """Copies the operands of every K step of this CTA's tiles to the ring. One warp calls it."""
    config, tile_k = plan.config, plan.tile_k

    def copy_stage(tile: Tile, step: Index, state: PipelineState, rows: int) -> None:
        k = pl.ds(step * jnp.int32(tile_k), tile_k)
        copies = []
        for matrix, column, width, stage_row in plan.rhs_copies:
            b = buffers.rhs_stages.untiled.at[state.stage]
            if width < config.tile_n:
                b = buffers.rhs_stages.untiled.at[state.stage, pl.ds(stage_row, width)]
            window = (tile.group, pl.ds(tile.column + column, width), k)
            options: Any = {"tiled": False, "swizzle": ATOM, "multicast": plan.multicast_axis}
            copies.append(TmaCopy(buffers.matrices[matrix], window, b, **options))
        a = buffers.lhs_stages.untiled.at[state.stage]
        if rows < config.tile_m:
            a = buffers.lhs_stages.untiled.at[state.stage, pl.ds(0, rows)]
        window = (pl.ds(tile.row, rows), k)
        copies.append(TmaCopy(buffers.lhs, window, a, tiled=False, swizzle=ATOM))
        if plan.tma_scales:
            window = (step, pl.ds(tile.row - (tile.row & 3), plan.scale_copy_rows))
            target = buffers.scale_stages.at[state.stage]
            copies.append(TmaCopy(buffers.lhs_scale, window, target, tiled=False, swizzle=None))
        ring.fill(state, copies)

    def copy_tile(i: jax.Array, state: PipelineState) -> PipelineState:
        tile = tiles.locate(i)
        if scale_ring is not None:
            blocks = pl.ds(plan.first_scale_block(tile.column), 2)
            window = tile.group, blocks, pl.ds(0, plan.k_steps)
            targets = [buffers.matrix_scale_tiles.at[i & 1, n] for n in range(plan.matrices)]
            options: Any = {"tiled": False, "swizzle": None, "contiguous": True}
            arrays = zip(buffers.matrix_scales, targets, strict=True)
            copies = [TmaCopy(scales, window, target, **options) for scales, target in arrays]
            scale_ring.fill(_scale_state(i), copies)

        def fill(step: jax.Array, state: PipelineState, carry: tuple[()]) -> tuple[()]:
            fewer = 0
            for rows in plan.lhs_heights:
                last = rows == plan.lhs_heights[-1]
                if last and not fewer:
                    copy_stage(tile, step, state, rows)
                else:
                    fits = (tile.rows > fewer) & ((tile.rows <= rows) | last)
                    when(fits)(functools.partial(copy_stage, tile, step, state, rows))
                fewer = rows
            return carry

        return ring.loop(plan.k_steps, fill, state, ())[0]

    state = lax.fori_loop(0, tiles.count(), copy_tile, ring.start())
    ring.drain(state)
    if scale_ring is not None:
        scale_ring.drain(_scale_state(tiles.count()))


def _scale_state(i: jax.Array) -> PipelineState:
    """Returns the state of the ring of matrix scales for a CTA's i-th tile."""
    return PipelineState(i & 1, lax.shift_right_logical(i, jnp.int32(1)) & 1)


# ---- the consumers -------------------------------------------------------------------------------

_Sums = tuple[jax.Array, ...]
"""Float32 sums of the warpgroup's share of a tile, side by side."""


class _Scales(NamedTuple):
    """Scales of one K step, for the share of one consumer warpgroup."""

    lhs: jax.Array | None  # float32 [64], one per row. None if TMA copies them to the stage.
    rhs: tuple[jax.Array, ...]  # one scalar per ``plan.scale_width`` columns of the accumulator


@dataclasses.dataclass(frozen=True)
class _Consumer:
    """A consumer warpgroup, which computes and stores its share of every tile of its CTA."""

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
            if self.plan.unrolled:
                sums, next_tile, state = self.unrolled_loop(i, tile, state)
            elif self.plan.float8:
                sums, next_tile, state = self.float8_loop(i, tile, scales, state)
            else:
                sums, next_tile, state = self.bfloat16_loop(i, tile, state)
            scales = first_scales(next_tile)  # before the epilogue, which hides the latency
            self.store_tile(tile, sums)
            return next_tile, scales, state

        def first_scales(tile: Tile) -> _Scales | None:
            if not self.plan.float8 or self.plan.unrolled:
                return None
            return self.load_scales(tile, 0)

        first = self.tiles.locate(0)
        carry = first, first_scales(first), self.ring.start()
        lax.fori_loop(0, self.tiles.count(), compute_tile, carry)
        plgpu.wait_smem_to_gmem(0)

    # Each main loop returns the sums of a tile, the next tile and the ring's next state.

    def bfloat16_loop(self, i: jax.Array, tile: Tile, state: PipelineState) -> Any:
        """Sums the products of all K steps in the tensor cores, in one array."""
        row, column = self.plan.stage_offset(self.warpgroup)
        rows, columns = self.plan.warpgroup_tile

        def accumulate(accumulator: Ref) -> tuple[jax.Array, Tile, PipelineState]:
            def step(k: jax.Array, state: PipelineState, carry: tuple[PipelineState, Tile]) -> Any:
                previous, next_tile = carry
                self.ring.wait_full(state)
                a = self.buffers.lhs_stages.tiled.at[state.stage, pl.ds(row, rows)]
                b = self.buffers.rhs_stages.tiled.at[state.stage, pl.ds(column, columns)]
                plgpu.wgmma(accumulator, a, b.T)
                next_tile = self.locate_next(i, k, next_tile)
                plgpu.wgmma_wait(1)
                when(k > 0)(lambda: self.ring.release(previous))
                return state, next_tile

            end, (last, next_tile) = self.ring.loop(self.plan.k_steps, step, state, (state, tile))
            sums = accumulator[...]
            self.ring.release(last)
            return sums, next_tile, end

        sums, next_tile, end = pl.run_scoped(accumulate, ACC((rows, columns), jnp.float32))
        return (sums,), next_tile, end

    def float8_loop(self, i: jax.Array, tile: Tile, scales: _Scales, state: PipelineState) -> Any:
        """Scales the product of each K step, in one array per ``plan.scale_width`` columns.
        ``scales`` are those of the first K step."""
        plan, (_, columns) = self.plan, self.plan.warpgroup_tile
        row, column = plan.stage_offset(self.warpgroup)

        def step(k: jax.Array, state: PipelineState, carry: Any) -> Any:
            sums, scales, next_tile = carry
            self.ring.wait_full(state)

            def multiply_and_scale(accumulator: Ref) -> Any:
                a = self.buffers.lhs_stages.tiled.at[state.stage, pl.ds(row, ROWS)]
                b = self.buffers.rhs_stages.tiled.at[state.stage, pl.ds(column, columns)]
                plgpu.wgmma(accumulator, a, b.T)
                # All of this overlaps with wgmma, so that only the additions are left after it.
                rows = scales.lhs
                if rows is None:
                    rows = self.staged_row_scales(state.stage, tile)
                factors = [rows * s for s in scales.rhs]
                next_scales = self.load_scales(tile, jnp.minimum(k + 1, plan.k_steps - 1))
                located = self.locate_next(i, k, next_tile)
                product = accumulator[...]
                self.ring.release(state)
                return _add_scaled(sums, product, factors), next_scales, located

            return pl.run_scoped(multiply_and_scale, ACC((ROWS, columns), jnp.float32))

        carry = self.zero_sums(), scales, tile
        state, (sums, _, next_tile) = self.ring.loop(plan.k_steps, step, state, carry)
        return sums, next_tile, state

    def unrolled_loop(self, i: jax.Array, tile: Tile, state: PipelineState) -> Any:
        """Does :meth:`float8_loop` with all stages of the ring in one iteration (a lap), so that
        stages and their addresses are constants. The last lap, which locates the next tile, is
        separate."""
        assert self.scale_ring is not None
        plan, stages, first_phase = self.plan, self.plan.config.stages, state.phase
        columns, laps = plan.warpgroup_tile[1], plan.k_steps // stages
        self.scale_ring.wait_full(_scale_state(i))
        row, _ = plan.stage_offset(self.warpgroup)
        first_block = plan.first_scale_block(tile.column)
        a: Any = self.buffers.lhs_stages.untiled
        b: Any = self.buffers.rhs_stages.untiled
        if plan.on_gpu:
            a, b = wgmma.operand_base(a, row * ATOM), wgmma.operand_base(b, 0)

        def start_product(stage: int, previous: jax.Array) -> jax.Array:
            if plan.on_gpu:
                offsets = stage * plan.config.tile_m * ATOM, stage * plan.config.tile_n * ATOM
                return wgmma.start_product(a, b, *offsets, previous)

            def multiply(accumulator: Ref) -> jax.Array:  # in the interpreter it is complete
                row, _ = plan.stage_offset(self.warpgroup)
                rows = self.buffers.lhs_stages.tiled.at[stage, pl.ds(row, ROWS)]
                plgpu.wgmma(accumulator, rows, self.buffers.rhs_stages.tiled.at[stage].T)
                return accumulator[...]

            return pl.run_scoped(multiply, ACC((ROWS, columns), jnp.float32))

        def matrix_scales(k: Index) -> list[jax.Array]:
            scales = []
            for matrix in range(plan.matrices):
                in_smem = self.buffers.matrix_scale_tiles
                first, second = (in_smem[i & 1, matrix, n, k] for n in range(2))
                for c in range(0, plan.out_columns, plan.scale_width):
                    is_second = lax.div(tile.column + c, SCALE_BLOCK) > first_block
                    if plan.out_columns > SCALE_BLOCK and c in (0, SCALE_BLOCK):
                        scales.append(second if c else first)  # a tile has columns of both blocks
                    else:
                        scales.append(jnp.where(is_second, second, first))
            return scales

        def lap(n: Index, carry: Any, is_last: bool) -> tuple[Any, Tile]:
            (sums, product), phase, next_tile = carry, first_phase ^ (n & 1), tile
            for stage in range(stages):
                k, state = n * stages + stage, PipelineState(jnp.int32(stage), phase)
                self.ring.wait_full(state)
                started = start_product(stage, product)
                # while the tensor cores work
                rows = self.staged_row_scales(state.stage, tile)
                factors = [rows * s for s in matrix_scales(k)]
                if is_last and stage == stages - 1:
                    next_tile = self.tiles.locate(i + 1)
                product = wgmma.wait_for_product(started) if plan.on_gpu else started
                self.ring.release(state)
                sums = _add_scaled(sums, product, factors)
            return (sums, product), next_tile

        carry = self.zero_sums(), zeros(columns)
        carry = lax.fori_loop(0, laps - 1, lambda n, carry: lap(n, carry, False)[0], carry)
        (sums, _), next_tile = lap(jnp.int32(laps - 1), carry, True)
        next_state = PipelineState(state.stage, first_phase ^ (laps & 1))
        self.scale_ring.release(_scale_state(i))
        return sums, next_tile, next_state

    def locate_next(self, i: jax.Array, k: jax.Array, next_tile: Tile) -> Tile:
        """Locates the next tile in the first K step: it takes half a microsecond."""
        return cond(k == 0, lambda: self.tiles.locate(i + 1), lambda: next_tile)

    def zero_sums(self) -> _Sums:
        width = self.plan.scale_width
        return (zeros(width),) * (self.plan.warpgroup_tile[1] // width)

    def load_scales(self, tile: Tile, k: jax.Array | int) -> _Scales:
        """Loads the scales of a K step from global memory."""
        plan, buffers = self.plan, self.buffers
        row, _ = plan.stage_offset(self.warpgroup)
        first = tile.column + plan.out_column(self.warpgroup)
        rhs = tuple(
            scales[tile.group, lax.div(first + c, SCALE_BLOCK), k]
            for scales in buffers.matrix_scales
            for c in range(0, plan.warpgroup_out_columns, plan.scale_width)
        )
        if plan.tma_scales:
            return _Scales(None, rhs)
        rows: Any = {"rows": plan.M, "on_gpu": plan.on_gpu}
        return _Scales(load_column(buffers.lhs_scale, tile.row + row, k, **rows), rhs)

    def staged_row_scales(self, stage: Index, tile: Tile) -> jax.Array:
        """Returns the scales that TMA copied for the warpgroup's 64 rows, in the layout of rows."""
        row, _ = self.plan.stage_offset(self.warpgroup)
        rows = self.buffers.scale_stages[stage, pl.ds(row + (tile.row & 3), ROWS)]
        return plgpu.layout_cast(rows, ROW)

    # ---- epilogue ----

    def store_tile(self, tile: Tile, sums: _Sums) -> None:
        """Applies SwiGLU if there are two matrices, and stores the warpgroup's share of a tile. If
        the sums are results too, SwiGLU is computed while they are stored."""
        plan, (out, *outs_of_sums) = self.plan, self.buffers.outs
        corner = plan.stage_offset(self.warpgroup)[0], plan.out_column(self.warpgroup)
        columns = plan.warpgroup_out_columns
        if plan.keeps_sums:
            rounded = sums[0].astype(jnp.bfloat16)
            gate, up = rounded[:, :columns], rounded[:, columns:]
            for each, values in zip(outs_of_sums, (gate, up), strict=True):
                self.store(tile, corner, each, (values,))
            sums = (_swiglu_of_rounded(plan, gate, up),)
        elif plan.matrices == 2:
            sums = _swiglu(plan, sums, columns)
        self.store(tile, corner, out, [x.astype(jnp.bfloat16) for x in sums])

    def store(
        self, tile: Tile, corner: tuple[Any, Any], out: Ref, values: Sequence[jax.Array]
    ) -> None:
        """Stores the rows and columns of the warpgroup's share that belong to the tile, by TMA from
        staging buffers in shared memory. ``corner`` is the share's first row and column in the
        tile, and ``values`` are side by side."""
        plan, buffers, warpgroup = self.plan, self.buffers, self.warpgroup
        staging_buffers, (row, column) = plan.config.staging_buffers, corner
        rows, columns = plan.warpgroup_tile[0], plan.warpgroup_out_columns
        width, step = values[0].shape[1], plan.staging_width
        corners = [(r, c) for r in range(0, rows, ROWS) for c in range(0, columns, step)]
        for n in range(0, len(corners), staging_buffers):
            batch = corners[n : n + staging_buffers]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            each = jnp.int32(staging_buffers)
            indices = [warpgroup * each + jnp.int32(j) for j in range(len(batch))]
            for index, (r, c) in zip(indices, batch, strict=True):
                value, start = values[c // width], c % width
                buffers.staging.tiled[index] = value[r : r + ROWS, start : start + step]
            plgpu.commit_smem()
            for index, (r, c) in zip(indices, batch, strict=True):
                count = jnp.clip(tile.rows - row - r, 0, ROWS)
                first_column = tile.column + column + c
                if plan.N % plan.out_columns:
                    count = jnp.where(first_column >= tile.first_new_column, count, 0)
                window = pl.ds(first_column, step)
                staged = buffers.staging.untiled.at[index]
                store_rows(staged, out, count, tile.row + row + r, window)


def zeros(columns: int) -> jax.Array:
    """Returns zeros in the layout of an accumulator."""
    return plgpu.layout_cast(jnp.zeros((ROWS, columns), jnp.float32), WGMMA)


def _add_scaled(sums: _Sums, product: jax.Array, factors: Sequence[jax.Array]) -> _Sums:
    """Adds a product to sums of as many columns each, times a factor per sum and row."""
    width = product.shape[1] // len(factors)
    return tuple(
        s + product[:, j * width : (j + 1) * width] * spread_rows(f, width)
        for j, (s, f) in enumerate(zip(sums, factors, strict=True))
    )


def _swiglu(plan: Plan, sums: _Sums, columns: int) -> _Sums:
    """Returns silu(gate) * up. The first half of all columns, ``columns`` of them, is gate."""
    if len(sums) == 1:
        gates, ups = [sums[0][:, :columns]], [sums[0][:, columns:]]
    else:
        gates, ups = sums[: len(sums) // 2], sums[len(sums) // 2 :]
    if plan.unrolled:
        sigmoids = [approximate_sigmoid(gate, on_gpu=plan.on_gpu) for gate in gates]
        return tuple(g * up * s for g, up, s in zip(gates, ups, sigmoids, strict=True))
    return tuple(gate * up / (1 + jnp.exp(-gate)) for gate, up in zip(gates, ups, strict=True))


def _swiglu_of_rounded(plan: Plan, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns silu(gate) * up in float32, in the order of the reference."""
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    return gate * approximate_sigmoid(gate, on_gpu=plan.on_gpu) * up


def store_rows(staged: Ref, out: Ref, count: jax.Array, row: jax.Array, columns: Any) -> None:
    """Stores the first ``count`` rows of a staging buffer to ``out``, from ``row`` on: a full one
    by one TMA store, otherwise by one per bit of ``count``, all in one group."""
    when(count == ROWS)(lambda: plgpu.copy_smem_to_gmem(staged, out.at[pl.ds(row, ROWS), columns]))

    @when((count > 0) & (count < ROWS))
    def _() -> None:
        first: Any = 0
        for rows in _STORE_HEIGHTS:

            @when((count & rows) != 0)
            def _(first: Index = first, rows: int = rows) -> None:
                plgpu.copy_smem_to_gmem(
                    staged.at[pl.ds(first, rows)],
                    out.at[pl.ds(row + first, rows), columns],
                    commit_group=False,
                )

            first = first + (count & rows)
        plgpu.commit_smem_to_gmem_group()
