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
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
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
from pallas_kernels.hopper import multiprocessors
from pallas_kernels.hopper.copies import TmaCopy
from pallas_kernels.hopper.ir import REF, SCALAR, array, const, inline, wgmma_row, word
from pallas_kernels.hopper.launch import overlap_preceding_kernel
from pallas_kernels.hopper.ring import PipelineState, Ring
from pallas_kernels.hopper.tiles import ACC, ROW, ROWS
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

    def grouped_matmul(*refs: Any) -> None:
        buffers = Buffers.of(plan, refs[: -len(ring_scratch)])
        ring = Ring.of(config.stages, CONSUMERS, refs[-len(ring_scratch) :], interpret)
        ring.initialise()
        overlap_preceding_kernel(config.early, interpret=interpret)
        group_tiles = GroupTiles(buffers.group_sizes, config.tile_m, on_gpu=on_gpu)
        tiles = TileScheduler(plan, group_tiles, group_tiles.count(), lax.axis_index("block"))
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == _PRODUCER)
        def _() -> None:
            plgpu.set_max_registers(config.registers[1], action="decrease")
            pl.when(first_warp(on_gpu))(lambda: produce(plan, buffers, tiles, ring))

        @pl.when(warpgroup != _PRODUCER)
        def _() -> None:
            plgpu.set_max_registers(config.registers[0], action="increase")
            consume(plan, buffers, tiles, ring, warpgroup)

    if count == 2:
        grouped_matmul.__name__ = "grouped_swiglu"  # profiles show it
    out_type = jax.ShapeDtypeStruct((M, N), plan.out_dtype)
    scale_type = jax.ShapeDtypeStruct((M, N // SCALE_BLOCK), jnp.float32)
    kernel = plgpu.kernel(
        grouped_matmul,
        out_type=(out_type, scale_type) if quantize else out_type,
        scratch_types=[*scratch(plan), *ring_scratch],
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


def produce(plan: Plan, buffers: Buffers, tiles: TileScheduler, ring: Ring) -> None:
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


# ---- the consumers -------------------------------------------------------------------------------


def consume(
    plan: Plan, buffers: Buffers, tiles: TileScheduler, ring: Ring, warpgroup: jax.Array
) -> None:
    """Computes and stores this consumer warpgroup's share of every tile of its block."""
    ring.release_all()
    k_loop = _float8_k_loop if plan.float8 else _bfloat16_k_loop

    def compute_tile(i: jax.Array, carry: Any) -> Any:
        tile, scales, state = carry

        def prefetch_tile(step: jax.Array, next_tile: Tile) -> Tile:
            """Locates the next tile in the first K step: it takes half a microsecond."""
            return lax.cond(step == 0, lambda: tiles.locate(i + 1), lambda: next_tile)

        sums, next_tile, state = k_loop(
            plan, buffers, ring, warpgroup, tile, prefetch_tile, scales, state
        )
        scales = first_scales(next_tile)  # before the epilogue, which hides the latency
        store_tile(plan, buffers, warpgroup, tile, sums, i)
        return next_tile, scales, state

    def first_scales(tile: Tile) -> Scales | None:
        return load_scales(plan, buffers, warpgroup, tile, 0) if plan.float8 else None

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
            new_sums = tuple(
                s
                + product[:, j * width : (j + 1) * width]
                * lax.broadcast_in_dim(f, (ROWS, width), (0,))
                for j, (s, f) in enumerate(zip(sums, factors, strict=True))
            )
            return new_sums, next_scales, prefetched

        accumulator = ACC((ROWS, columns), jnp.float32)
        return pl.run_scoped(multiply_and_scale, accumulator)

    zero = plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), plgpu.Layout.WGMMA)
    carry = (zero,) * (columns // width), scales, tile
    state, (sums, _, next_tile) = ring.loop(plan.k_steps, step, state, carry)
    return sums, next_tile, state


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
    lhs = load_lhs_scales(buffers.lhs_scale, tile.row + row, step, rows=plan.M, on_gpu=plan.on_gpu)
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


def load_lhs_scales(
    scales: Any, first: jax.Array, column: jax.Array | int, *, rows: int, on_gpu: bool
) -> jax.Array:
    """Loads 64 numbers of one column of ``scales``, from row ``first`` on.

    The numbers are not contiguous, so TMA could copy them only from a transposed array, which takes
    another kernel before each matmul. Loading them directly takes two loads per thread and K step,
    which overlap with wgmma. A whole warpgroup calls this.

    Args:
      scales: float32 [rows, columns] in global memory.
      rows: number of rows. Past the end, the last row's scale is returned.
    """
    column = jnp.asarray(column, jnp.int32)
    if not on_gpu:
        available = min(rows, ROWS)
        start = jnp.minimum(first, rows - available)
        return scales[pl.ds(start, available), column][
            jnp.minimum(first - start + jnp.arange(ROWS), available - 1)
        ]

    result = plgpu.ShapeDtypeStruct((ROWS,), jnp.float32, layout=ROW)

    @inline(REF, SCALAR, SCALAR, returns=result)
    def load(scales: Any, first: Any, column: Any) -> Any:
        f32 = ir.F32Type.get()
        columns = ir.MemRefType(scales.type).shape[1]
        row, start = wgmma_row(), mgpu.utils.memref_ptr(scales)
        registers = []
        for half in range(2):
            r = arith.addi(arith.addi(word(first), row), const(8 * half))
            r = arith.minui(r, const(rows - 1))
            index = arith.addi(arith.muli(r, const(columns)), word(column))
            value = llvm.load(f32, mgpu.utils.getelementptr(start, [index], f32))
            registers.append(vector.broadcast(ir.VectorType.get((1,), f32), value))
        return array(registers, (ROWS,), ROW)

    return load(scales, first, column)
