"""The Hopper kernel of grouped_matmul and grouped_swiglu: persistent and warp-specialised.

    out[m] = rhs[g(m)] @ lhs[m]                                   grouped_matmul
    out[m] = silu(gate[g(m)] @ lhs[m]) * (up[g(m)] @ lhs[m])      grouped_swiglu

The operands are bfloat16, or float8 with a scale per row and 128 columns of lhs and per 128 x 128
block of the matrices. It is used for these dtypes with any number of rows; bfloat16 rows with
quantized matrices go to ``few_tokens``.

One thread block runs on each multiprocessor and has three warpgroups. In the producer, one warp
keeps a ring of stages filled by TMA. A stage has 128 bytes of K of the tile's rows of lhs and rhs.
Two consumers each compute a half of the tile with wgmma and store it.

Four things are not obvious.

1.  Groups start at any row, tiled TMA copies at multiples of eight: see ``plan.scratch``.
2.  The rows of a tile past its group's end belong to the next group, or are zeros past the end of
    lhs. They are multiplied too but not stored, because the rows of a matmul do not mix.
3.  With two matrices, a stage has the rows of gate and up side by side for each warpgroup. One
    wgmma multiplies both, and a gate and its up end in the same thread's registers.
4.  An H200 has more tensor throughput than its power limit sustains. So apart from waiting, what
    counts is the number of other instructions: one warp issues all copies, and loads overlap with
    wgmma.

bfloat16 is accumulated over all of K by the tensor cores. float8 is accumulated by the tensor cores
over one K step (128 columns), then multiplied by its scales and added to float32 sums in registers.
While one wgmma runs, the consumers load what they need next: the scales of the next K step, and
once per tile the coordinates of the next tile.

``plan`` derives sizes from shapes and names the memory, ``tile_scheduler`` assigns tiles to blocks,
``epilogue`` stores results. benchmarks/NOTES.md records what was tried and measured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Float32, Int

from pallas_kernels.grouped_matmul.epilogue import store_tile
from pallas_kernels.grouped_matmul.plan import (
    ATOM,
    CONSUMERS,
    SCALE_BLOCK,
    Buffers,
    Config,
    Plan,
    check_shapes,
    quantizes,
    scratch,
)
from pallas_kernels.grouped_matmul.tile_scheduler import GroupTiles, Tile, TileScheduler
from pallas_kernels.hopper import multiprocessors, wgmma
from pallas_kernels.hopper.copies import TmaCopy
from pallas_kernels.hopper.launch import overlap_preceding_kernel
from pallas_kernels.hopper.loads import load_column
from pallas_kernels.hopper.ring import PipelineState, Ring
from pallas_kernels.hopper.tiles import ACC, ROW, ROWS, WGMMA, spread_rows
from pallas_kernels.hopper.warpgroup import first_warp

_INTERPRETED_BLOCKS = 2
_PRODUCER = CONSUMERS  # index of the producer warpgroup, the last


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
    """Multiplies each row with its group's matrix, or computes SwiGLU of two matrices.

    Rows that belong to no group are undefined.

    Args:
      lhs, matrices: all bfloat16, or all float8_e4m3fn. One matrix, or gate and up.
      lhs_scale, matrix_scales: scales of float8 operands, one array per matrix.
    """
    arrays = lhs, matrices, group_sizes, lhs_scale, matrix_scales
    return _launch(*arrays, config=config, quantize=False, interpret=interpret)


def matmul_to_float8(
    lhs: Float[Array, "M K"],
    matrices: Sequence[Float[Array, "G N K"]],
    group_sizes: Int[Array, " G"],
    lhs_scale: Float32[Array, "M Kb"] | None,
    matrix_scales: Sequence[Float32[Array, "G Nb Kb"]],
    *,
    config: Config,
    interpret: Any = None,
) -> tuple[Float[Array, "M N"], Float32[Array, "M Nb"]]:
    """Computes :func:`matmul` in float8_e4m3fn, with one scale per row and 128 columns.

    Raises:
      NotImplementedError: :func:`plan.quantizes` returns False.
    """
    N, count = matrices[0].shape[1], len(matrices)
    if not quantizes(config, N, count):
        raise NotImplementedError(
            f"quantizes tiles of 64 x {SCALE_BLOCK}, or 128 x {SCALE_BLOCK} split along M, with N a"
            f" multiple of {SCALE_BLOCK}, got {config} and N {N}"
        )
    arrays = lhs, matrices, group_sizes, lhs_scale, matrix_scales
    return _launch(*arrays, config=config, quantize=True, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("config", "quantize", "interpret"))
def _launch(
    lhs: jax.Array,
    matrices: Sequence[jax.Array],
    group_sizes: jax.Array,
    lhs_scale: jax.Array | None,
    matrix_scales: Sequence[jax.Array],
    *,
    config: Config,
    quantize: bool,
    interpret: Any,
) -> Any:
    (M, K), (_, N, _) = lhs.shape, matrices[0].shape
    float8, count = lhs_scale is not None, len(matrices)
    check_shapes(config, N, K, float8, count)
    on_gpu = interpret is None
    # The interpreter starts a thread of the host for each warpgroup of each block.
    blocks = config.blocks or (multiprocessors() if on_gpu else _INTERPRETED_BLOCKS)
    plan = Plan(config, M, N, K, float8, count, quantize, blocks, on_gpu)
    if lhs_scale is not None and plan.tma_scales:
        padding = max(-M % 4, plan.scale_copy_rows - M)
        lhs_scale = jnp.pad(lhs_scale, ((0, padding), (0, 0))).T
    ring_scratch = Ring.scratch(config.stages, plan.copies_per_stage, CONSUMERS, interpret)

    scale_ring_scratch = Ring.scratch(2, count, CONSUMERS, interpret) if plan.unrolled else []

    def grouped_matmul(*refs: Any) -> None:
        end = len(refs) - len(scale_ring_scratch)
        first = end - len(ring_scratch)
        buffers = Buffers.of(plan, refs[:first])
        ring, scale_ring = Ring.of(config.stages, CONSUMERS, refs[first:end], interpret), None
        if plan.unrolled:
            scale_ring = Ring.of(2, CONSUMERS, refs[end:], interpret)
            scale_ring.initialise()
        ring.initialise()
        overlap_preceding_kernel(config.early, interpret=interpret)
        group_tiles = GroupTiles(buffers.group_sizes, config.tile_m, on_gpu=on_gpu)
        tiles = TileScheduler(plan, group_tiles, group_tiles.count(), lax.axis_index("block"))
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == _PRODUCER)
        def _() -> None:
            plgpu.set_max_registers(config.registers[1], action="decrease")
            pl.when(first_warp(on_gpu))(lambda: produce(plan, buffers, tiles, ring, scale_ring))

        @pl.when(warpgroup != _PRODUCER)
        def _() -> None:
            plgpu.set_max_registers(config.registers[0], action="increase")
            consume(plan, buffers, tiles, ring, scale_ring, warpgroup)

    if count == 2:
        grouped_matmul.__name__ = "grouped_swiglu"  # profiles show it
    out_type = jax.ShapeDtypeStruct((M, N), plan.out_dtype)
    scale_type = jax.ShapeDtypeStruct((M, N // SCALE_BLOCK), jnp.float32)
    kernel = plgpu.kernel(
        grouped_matmul,
        out_type=(out_type, scale_type) if quantize else out_type,
        scratch_types=[*scratch(plan), *ring_scratch, *scale_ring_scratch],
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(lhs, *matrices, group_sizes, *((lhs_scale, *matrix_scales) if float8 else ()))


# ---- the producer --------------------------------------------------------------------------------


def produce(
    plan: Plan, buffers: Buffers, tiles: TileScheduler, ring: Ring, scale_ring: Ring | None
) -> None:
    """Copies the operands of every K step of this block's tiles to the ring. One warp calls it."""
    config, tile_k = plan.config, plan.tile_k

    def copy_stage(tile: Tile, step: Any, state: PipelineState, rows: int) -> None:
        k = pl.ds(step * jnp.int32(tile_k), tile_k)
        copies = []
        for matrix, column, width, stage_row in plan.rhs_copies:
            b = buffers.rhs_stages_untiled.at[state.stage]
            if width < config.tile_n:
                b = buffers.rhs_stages_untiled.at[state.stage, pl.ds(stage_row, width)]
            window = (tile.group, pl.ds(tile.column + column, width), k)
            copies.append(TmaCopy(buffers.matrices[matrix], window, b, tiled=False, swizzle=ATOM))
        a = buffers.lhs_stages_untiled.at[state.stage]
        if rows < config.tile_m:
            a = buffers.lhs_stages_untiled.at[state.stage, pl.ds(0, rows)]
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
            window = tile.group, pl.ds(_first_scale_block(plan, tile), 2), pl.ds(0, plan.k_steps)
            targets = [buffers.matrix_scale_tiles.at[i & 1, n] for n in range(plan.matrices)]
            copies = [
                TmaCopy(scales, window, target, tiled=False, swizzle=None, contiguous=True)
                for scales, target in zip(buffers.matrix_scales, targets, strict=True)
            ]
            scale_ring.fill(_tile_state(i), copies)

        def fill(step: jax.Array, state: PipelineState, carry: tuple[()]) -> tuple[()]:
            fewer = 0
            for rows in plan.copy_heights:
                last = rows == plan.copy_heights[-1]
                if last and not fewer:
                    copy_stage(tile, step, state, rows)
                else:
                    fits = (tile.rows > fewer) & ((tile.rows <= rows) | last)
                    pl.when(fits)(functools.partial(copy_stage, tile, step, state, rows))
                fewer = rows
            return carry

        return ring.loop(plan.k_steps, fill, state, ())[0]

    ring.drain(lax.fori_loop(0, tiles.count(), copy_tile, ring.start()))
    if scale_ring is not None:
        scale_ring.drain(_tile_state(tiles.count()))


def _tile_state(i: jax.Array) -> PipelineState:
    """Returns the state of the ring of matrix scales for a block's i-th tile."""
    return PipelineState(i & 1, lax.shift_right_logical(i, jnp.int32(1)) & 1)


def _first_scale_block(plan: Plan, tile: Tile) -> jax.Array:
    """Returns the first of two blocks of columns that contain the tile's."""
    last = pl.cdiv(plan.N, SCALE_BLOCK) - 2
    return jnp.minimum(lax.div(tile.column, SCALE_BLOCK), last)


# ---- the consumers -------------------------------------------------------------------------------


def consume(
    plan: Plan,
    buffers: Buffers,
    tiles: TileScheduler,
    ring: Ring,
    scale_ring: Ring | None,
    warpgroup: jax.Array,
) -> None:
    """Computes and stores this consumer warpgroup's share of every tile of its block."""
    ring.release_all()
    if scale_ring is not None:
        scale_ring.release_all()
    k_loop = _float8_k_loop if plan.float8 else _bfloat16_k_loop

    def compute_tile(i: jax.Array, carry: Any) -> Any:
        tile, scales, state = carry

        def prefetch_tile(step: jax.Array, next_tile: Tile) -> Tile:
            """Locates the next tile in the first K step: it takes half a microsecond."""
            return lax.cond(step == 0, lambda: tiles.locate(i + 1), lambda: next_tile)

        if scale_ring is not None:
            scale_ring.wait_full(_tile_state(i))
            sums, next_tile, state = _unrolled_k_loop(
                plan, buffers, ring, warpgroup, tile, lambda: tiles.locate(i + 1), i & 1, state
            )
            scale_ring.release(_tile_state(i))
        else:
            sums, next_tile, state = k_loop(
                plan, buffers, ring, warpgroup, tile, prefetch_tile, scales, state
            )
        scales = first_scales(next_tile)  # before the epilogue, which hides the latency
        store_tile(plan, buffers, warpgroup, tile, sums, i)
        return next_tile, scales, state

    def first_scales(tile: Tile) -> Scales | None:
        if not plan.float8 or plan.unrolled:
            return None
        return load_scales(plan, buffers, warpgroup, tile, 0)

    first = tiles.locate(0)
    carry = first, first_scales(first), ring.start()
    lax.fori_loop(0, tiles.count(), compute_tile, carry)
    plgpu.wait_smem_to_gmem(0)


def _bfloat16_k_loop(
    plan: Plan,
    buffers: Buffers,
    ring: Ring,
    warpgroup: jax.Array,
    tile: Tile,
    prefetch_tile: Callable[[jax.Array, Tile], Tile],
    scales: None,
    state: PipelineState,
) -> tuple[tuple[jax.Array], Tile, PipelineState]:
    """Returns the sums of the warpgroup's share as one array, the next tile and the next state."""
    del scales
    row, column = plan.stage_offset(warpgroup)
    rows, columns = plan.warpgroup_tile

    def accumulate(accumulator: Any) -> tuple[jax.Array, Tile, PipelineState]:
        def step(i: jax.Array, state: PipelineState, carry: tuple[PipelineState, Tile]) -> Any:
            previous, next_tile = carry
            ring.wait_full(state)
            a = buffers.lhs_stages.at[state.stage, pl.ds(row, rows)]
            b = buffers.rhs_stages.at[state.stage, pl.ds(column, columns)]
            plgpu.wgmma(accumulator, a, b.T)
            next_tile = prefetch_tile(i, next_tile)
            plgpu.wgmma_wait(1)
            pl.when(i > 0)(lambda: ring.release(previous))
            return state, next_tile

        end, (last, next_tile) = ring.loop(plan.k_steps, step, state, (state, tile))
        sums = accumulator[...]
        ring.release(last)
        return sums, next_tile, end

    accumulator = ACC((rows, columns), jnp.float32)
    sums, next_tile, state = pl.run_scoped(accumulate, accumulator)
    return (sums,), next_tile, state


def _float8_k_loop(
    plan: Plan,
    buffers: Buffers,
    ring: Ring,
    warpgroup: jax.Array,
    tile: Tile,
    prefetch_tile: Callable[[jax.Array, Tile], Tile],
    scales: Scales,
    state: PipelineState,
) -> tuple[tuple[jax.Array, ...], Tile, PipelineState]:
    """Returns the sums of the warpgroup's share, the next tile and the next state.

    The sums are one array per ``plan.scale_width`` columns.

    Args:
      scales: those of the first K step.
    """
    width = plan.scale_width
    row, column = plan.stage_offset(warpgroup)
    _, columns = plan.warpgroup_tile

    def step(i: jax.Array, state: PipelineState, carry: Any) -> Any:
        sums, scales, next_tile = carry
        ring.wait_full(state)

        def multiply_and_scale(accumulator: Any) -> Any:
            a = buffers.lhs_stages.at[state.stage, pl.ds(row, ROWS)]
            b = buffers.rhs_stages.at[state.stage, pl.ds(column, columns)]
            plgpu.wgmma(accumulator, a, b.T)
            # All of this overlaps with wgmma, so that only the additions are left after it.
            rows = _lhs_scales(plan, buffers, warpgroup, tile, scales, state)
            factors = [rows * s for s in scales.rhs]
            next_step = jnp.minimum(i + 1, plan.k_steps - 1)
            next_scales = load_scales(plan, buffers, warpgroup, tile, next_step)
            prefetched = prefetch_tile(i, next_tile)
            product = accumulator[...]
            ring.release(state)
            return add_scaled(sums, product, factors), next_scales, prefetched

        accumulator = ACC((ROWS, columns), jnp.float32)
        return pl.run_scoped(multiply_and_scale, accumulator)

    zero = plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), plgpu.Layout.WGMMA)
    carry = (zero,) * (columns // width), scales, tile
    state, (sums, _, next_tile) = ring.loop(plan.k_steps, step, state, carry)
    return sums, next_tile, state


def _unrolled_k_loop(
    plan: Plan,
    buffers: Buffers,
    ring: Ring,
    warpgroup: jax.Array,
    tile: Tile,
    locate_next: Callable[[], Tile],
    slot: jax.Array,
    state: PipelineState,
) -> tuple[tuple[jax.Array, ...], Tile, PipelineState]:
    """Computes :func:`_float8_k_loop` with all stages of the ring in one iteration.

    So stages, and addresses of what they contain, are constants. The last iteration is separate: it
    locates the next tile.

    Args:
      slot: of the tile in ``buffers.matrix_scale_tiles``.
      state: the next one, at stage 0.
    """
    config, width, columns = plan.config, plan.scale_width, plan.warpgroup_tile[1]
    row, _ = plan.stage_offset(warpgroup)
    first_block = _first_scale_block(plan, tile)
    if plan.on_gpu:
        a = wgmma.operand_base(buffers.lhs_stages_untiled, row * ATOM)
        b = wgmma.operand_base(buffers.rhs_stages_untiled, 0)

    def matrix_scales(k: jax.Array) -> list[jax.Array]:
        scales = []
        for matrix in range(plan.matrices):
            first, second = (buffers.matrix_scale_tiles[slot, matrix, n, k] for n in range(2))
            for c in range(0, plan.out_columns, width):
                is_second = lax.div(tile.column + c, SCALE_BLOCK) > first_block
                if plan.out_columns > SCALE_BLOCK and c in (0, SCALE_BLOCK):
                    scales.append(second if c else first)  # a tile has columns of both blocks
                else:
                    scales.append(jnp.where(is_second, second, first))
        return scales

    def step(stage: int, k: Any, phase: Any, carry: Any, is_last: bool) -> Any:
        sums, product = carry
        here = PipelineState(jnp.int32(stage), phase)
        ring.wait_full(here)

        def meanwhile() -> tuple[list[jax.Array], Tile]:
            rows = _lhs_scales(plan, buffers, warpgroup, tile, Scales(None, ()), here)
            return [rows * s for s in matrix_scales(k)], locate_next() if is_last else tile

        if plan.on_gpu:
            offsets = stage * config.tile_m * ATOM, stage * config.tile_n * ATOM
            started = wgmma.start_product(a, b, *offsets, product)
            factors, next_tile = meanwhile()
            product = wgmma.wait_for_product(started)
        else:

            def multiply(accumulator: Any) -> Any:
                rows = buffers.lhs_stages.at[stage, pl.ds(row, ROWS)]
                plgpu.wgmma(accumulator, rows, buffers.rhs_stages.at[stage].T)
                return *meanwhile(), accumulator[...]

            accumulator = ACC((ROWS, columns), jnp.float32)
            factors, next_tile, product = pl.run_scoped(multiply, accumulator)
        ring.release(here)
        return (add_scaled(sums, product, factors), product), next_tile

    def turn(n: Any, carry: Any, is_last: bool) -> tuple[Any, Tile]:
        """Takes K steps, one per stage."""
        phase, next_tile = state.phase ^ (n & 1), tile
        for stage in range(config.stages):
            last = is_last and stage == config.stages - 1
            k = n * config.stages + stage
            carry, next_tile = step(stage, k, phase, carry, last)
        return carry, next_tile

    def zeros(columns: int) -> jax.Array:
        return plgpu.layout_cast(jnp.zeros((ROWS, columns), jnp.float32), WGMMA)

    turns = plan.k_steps // config.stages
    carry = (zeros(width),) * (columns // width), zeros(columns)
    carry = lax.fori_loop(0, turns - 1, lambda n, carry: turn(n, carry, False)[0], carry)
    (sums, _), next_tile = turn(jnp.int32(turns - 1), carry, True)
    return sums, next_tile, PipelineState(state.stage, state.phase ^ (turns & 1))


def add_scaled(
    sums: tuple[jax.Array, ...], product: jax.Array, factors: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """Adds a product to sums of as many columns each, times a factor per sum and row."""
    width = product.shape[1] // len(sums)
    return tuple(
        s + product[:, j * width : (j + 1) * width] * spread_rows(f, width)
        for j, (s, f) in enumerate(zip(sums, factors, strict=True))
    )


# ---- float8 scales -------------------------------------------------------------------------------


class Scales(NamedTuple):
    """Scales of one K step, for the share of one consumer warpgroup."""

    lhs: jax.Array | None
    """float32 [64], one per row. None if TMA copies them to the stage."""

    rhs: tuple[jax.Array, ...]
    """One scalar per ``plan.scale_width`` columns of the accumulator."""


def load_scales(
    plan: Plan, buffers: Buffers, warpgroup: jax.Array, tile: Tile, step: jax.Array | int
) -> Scales:
    """Loads the scales of a K step from global memory."""
    row, _ = plan.stage_offset(warpgroup)
    first = tile.column + plan.out_column(warpgroup)
    rhs = tuple(
        scales[tile.group, lax.div(first + c, SCALE_BLOCK), step]
        for scales in buffers.matrix_scales
        for c in range(0, plan.warpgroup_out_columns, plan.scale_width)
    )
    if plan.tma_scales:
        return Scales(None, rhs)
    lhs = load_column(buffers.lhs_scale, tile.row + row, step, rows=plan.M, on_gpu=plan.on_gpu)
    return Scales(lhs, rhs)


def _lhs_scales(
    plan: Plan,
    buffers: Buffers,
    warpgroup: jax.Array,
    tile: Tile,
    scales: Scales,
    state: PipelineState,
) -> jax.Array:
    """Returns the lhs scales, from registers or from the stage, in the layout of rows."""
    if scales.lhs is not None:
        return scales.lhs
    row, _ = plan.stage_offset(warpgroup)
    rows = buffers.scale_stages[state.stage, pl.ds(row + (tile.row & 3), ROWS)]
    return plgpu.layout_cast(rows, ROW)
