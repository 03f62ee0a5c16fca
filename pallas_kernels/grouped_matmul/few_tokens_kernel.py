"""The Hopper kernel for few tokens per group: its consumers, with scales.

One persistent thread block per multiprocessor takes tiles round-robin: 64 to 256 output features by
the tokens of one group. The producer warpgroup keeps a ring buffer filled with K steps of weights
and tokens, by TMA. Each consumer warpgroup unpacks 64 features of a step to bfloat16 in registers,
multiplies them with the tokens in shared memory, applies the scales and adds to float32 sums. With
``k_warpgroups`` > 1 a stage holds one K step for each warpgroup that shares a tile, and their sums
are reduced through shared memory. ``few_tokens_plan`` has the configuration, ``few_tokens_tiles``
the tiles, ``few_tokens_ring`` the producer, ``few_tokens_registers`` the code for single threads,
and ``few_tokens_epilogue`` the end of a tile.

Budget for 4.3 TB/s on 132 multiprocessors: 16.5 bytes of matrices per cycle at 1.98 GHz, so 64
bytes of 256 rows in 990 cycles. Of int4 these are 64 weights per thread: 24 shifts, 32 ands (both
at half rate), 32 additions, 8 matmul instructions, 6 reads, and 30 more for scales and the ring.
That is 130 issue slots for each of a scheduler's 4 warps, 520 in all, 450 of them in its integer
unit. Tokens whose columns are in their own order take a quarter more instructions, and no kernel of
XLA's before this one. Shared memory needs 128 cycles to be filled, 128 to be read, and 256 for each
8 tokens, which every warp reads. Wide tiles use wgmma, which reads the tokens once, but makes its
four warps wait for each other and for its completion. Registers: 32 per thread for unpacked
weights, 8 for packed ones, and twice tokens / 2 for sums. 128 KiB and more are in flight.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Float32, Int

from pallas_kernels.grouped_matmul import few_tokens_registers as registers
from pallas_kernels.grouped_matmul.few_tokens_epilogue import Reduction, store, unknown_zero
from pallas_kernels.grouped_matmul.few_tokens_mma import multiply
from pallas_kernels.grouped_matmul.few_tokens_plan import Config, Plan, Weights
from pallas_kernels.grouped_matmul.few_tokens_ring import Stages, produce
from pallas_kernels.grouped_matmul.few_tokens_tiles import Tile, Tiles, for_width
from pallas_kernels.grouped_matmul.reference import Matrices
from pallas_kernels.grouped_matmul.tile_scheduler import GroupTiles
from pallas_kernels.hopper.branch import cond, when
from pallas_kernels.hopper.keep import keep
from pallas_kernels.hopper.launch import overlap_preceding_kernel
from pallas_kernels.hopper.loads import when_computed
from pallas_kernels.hopper.lowered_once import lowered_once
from pallas_kernels.hopper.tiles import ACC

# Registers per thread of the (producer, consumers), by number of consumer warpgroups.
_REGISTERS = {1: (40, 216), 2: (40, 232), 3: (56, 152), 4: (32, 112)}


@lowered_once("M", "weights", "config", "thread_blocks", "interpret")
def matmul(
    x: BFloat16[Array, "blocks rows 64"] | BFloat16[Array, "rows K"],
    matrices: Sequence[Matrices],
    scales: Sequence[Float32[Array, "G Nb Kb"]],
    group_sizes: Int[Array, " G"],
    *,
    M: int,
    weights: Weights,
    config: Config,
    thread_blocks: int,
    interpret: Any,
) -> Float[Array, "split_k M N_of_all"]:
    """Multiplies each token with its group's matrices, all of one shape.

    The results of several matrices are concatenated along the last axis.

    Args:
      x: tokens, as :func:`few_tokens.permute_columns` returns them, or with ``tokens_in_order``
        as they are. Rows up to the width of a tile or, in the interpreter, up to M and that width.
      thread_blocks: number of thread blocks in the grid.

    Returns:
      bfloat16 [1, M, N_of_all], or with split-K float32 partial sums.
    """
    plan = Plan(
        weights, config, M, len(matrices), scales[0].shape[2], thread_blocks, interpret is None
    )
    gpu, consumers, matrix_count = plan.on_gpu, config.warpgroups, plan.matrices
    ring_scratch = Stages.scratch(plan, matrices[0].dtype)

    def few_tokens(x_g, *refs):
        w_g, scale_g, refs = (
            refs[:matrix_count],
            refs[matrix_count : 2 * matrix_count],
            refs[2 * matrix_count :],
        )
        sizes_g, out_g, *refs = refs
        ring = Stages(plan, *refs[: len(ring_scratch)])
        reduction = refs[len(ring_scratch) :]
        overlap_preceding_kernel(interpret=interpret)
        warpgroup, block = lax.axis_index("wg"), lax.axis_index("sm")
        tiles = Tiles(plan, GroupTiles(sizes_g, config.max_tokens, on_gpu=gpu), block)

        @when(warpgroup == consumers)
        def _produce():
            plgpu.set_max_registers(_REGISTERS[consumers][0], action="decrease")
            produce(plan, tiles, ring, x_g, w_g)

        @when(warpgroup < consumers)
        def _consume():
            plgpu.set_max_registers(_REGISTERS[consumers][1], action="increase")
            k_part = lax.rem(warpgroup, jnp.int32(config.k_warpgroups))
            first_row = lax.div(warpgroup, jnp.int32(config.k_warpgroups)) * 64
            first_row = pl.multiple_of(first_row, 64)
            split = Reduction(config.k_warpgroups, *reduction) if reduction else None
            Consumer(plan, tiles, ring, scale_g, out_g, split, warpgroup, k_part, first_row).run()

    dtype = jnp.bfloat16 if config.split_k == 1 else jnp.float32
    return plgpu.kernel(
        few_tokens,
        out_type=jax.ShapeDtypeStruct((config.split_k, M, matrix_count * weights.N), dtype),
        scratch_types=[*ring_scratch, *Reduction.scratch(plan)],
        grid=(thread_blocks,),
        grid_names=("sm",),
        num_threads=consumers + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(x, *matrices, *scales, group_sizes.astype(jnp.int32))


@dataclasses.dataclass(frozen=True, eq=False)
class Consumer:
    """A consumer warpgroup, which computes 64 features of every tile, or a part of their K."""

    plan: Plan
    tiles: Tiles
    ring: Stages
    scales: Sequence[Any]
    """float32 [G, Nb, Kb] in global memory, one per matrix."""
    out: Any
    reduction: Reduction | None
    warpgroup: Any
    k_part: Any
    """Index among the warpgroups that share a tile."""
    first_row: Any
    """First of its features in the tile."""

    def run(self) -> None:
        def consume_tile(i, carry):
            tile = self.tiles.locate(i)
            for_width(self.plan, tile.tokens, lambda n, width: self.compute_tile(i, tile, n, width))
            return carry

        lax.fori_loop(0, self.tiles.count(), consume_tile, 0)
        if self.reduction is not None:
            self.reduction.drain(self.k_part, self.tiles.count)

    def compute_tile(self, i: Any, tile: Tile, n: int, width: int) -> None:
        """Computes a tile of at most ``width`` tokens, the n-th of the token widths."""
        plan, weights, ring = self.plan, self.plan.weights, self.ring
        k_warpgroups, fills = plan.config.k_warpgroups, plan.fills
        feature, tokens = tile.feature + self.first_row, tile.tokens
        if weights.N % plan.config.features:
            tokens = jnp.where(feature < tile.own_feature, 0, tokens)
        first_fill = i * fills
        first_step = tile.k_slice * (fills * k_warpgroups) + self.k_part

        def k_step(k, carry):
            total, step_scales = carry
            stage = lax.rem(first_fill + k, jnp.int32(plan.stages))
            step = first_step + k * k_warpgroups
            next_scales = (
                step_scales
                if weights.is_scaled_last
                else self.load_scales(tile.group, tile.matrix, feature, step + k_warpgroups)
            )
            plgpu.barrier_wait(ring.full.at[stage])
            slot = stage * k_warpgroups + self.k_part
            firsts = range(0, weights.column_blocks, weights.blocks_per_scale)
            for j, first in enumerate(firsts):
                product = self.multiply(n, width, slot, first)
                if not plan.k_divides_evenly:
                    product = product * jnp.where(step < weights.k_steps, 1.0, 0.0)
                if not weights.is_scaled_last:
                    product = _scaled(product, step_scales[j])
                total = total + product
            if not plan.on_gpu:
                # The interpreter requires a fence between reading a stage and the copy that
                # overwrites it. A GPU requires that everything loaded from it has been used.
                plgpu.commit_smem()
            else:
                stage = when_computed(stage, unknown_zero(i), total)
            plgpu.barrier_arrive(ring.empty.at[stage])
            return total, next_scales

        total = jnp.zeros((64, width), jnp.float32)
        if plan.on_gpu:
            total = plgpu.layout_cast(total, plgpu.Layout.WGMMA)
        first_scales = self.load_scales(tile.group, tile.matrix, feature, first_step)
        total, last_scales = lax.fori_loop(0, fills, k_step, (total, first_scales))
        if weights.is_scaled_last:
            total = _scaled(total, last_scales[0])

        def finish(total):
            column = tile.matrix * weights.N + feature
            store(plan, self.out, total, tile.k_slice, tile.token, tokens, column)

        if self.reduction is None:
            finish(total)
        else:
            self.reduction.reduce(total, i, self.warpgroup, self.k_part, finish, on_gpu=plan.on_gpu)

    def load_scales(self, group: Any, matrix: Any, feature: Any, step: Any) -> tuple[Any, ...]:
        """Returns the scales of a K step, one per ``blocks_per_scale`` column blocks.

        Each is a vector over the 64 features, or a scalar.
        """
        plan, weights = self.plan, self.plan.weights

        def load(n):
            loaded, scales = [], self.scales[n]
            for first in range(0, weights.column_blocks, weights.blocks_per_scale):
                column = step * plan.step_columns + first * weights.block_columns
                kb = lax.div(column, jnp.int32(weights.scale_columns))
                kb = jnp.minimum(kb, plan.scales - 1)
                if weights.scale_rows > 1:
                    row = lax.div(feature, jnp.int32(weights.scale_rows))
                    loaded.append(scales[group, row, kb])
                elif not plan.on_gpu:
                    loaded.append(scales[group, pl.ds(feature, 64), kb])
                else:
                    rows = scales.at[group, pl.ds(feature, 64), kb]
                    loaded.append(registers.load_row_scales(rows, weights.column_blocks))
            return tuple(loaded)

        def choose(n):
            if n == plan.matrices - 1:
                return load(n)
            return cond(matrix == n, functools.partial(load, n), functools.partial(choose, n + 1))

        return choose(0)

    def multiply(self, n: int, width: int, slot: Any, first: int) -> jax.Array:
        """Returns the product of column blocks ``first`` to ``first + blocks_per_scale`` of 64
        features with the tokens: float32 [64, width], not scaled."""
        weights, ring, config = self.plan.weights, self.ring, self.plan.config
        rows = pl.ds(self.first_row, 64)
        blocks = range(first, first + weights.blocks_per_scale)
        x_first = weights.block_columns // 64 * first
        if not self.plan.on_gpu:
            values = ring.weights[slot, rows]
            unpacked = [
                registers.unpack_in_interpreter(
                    values[:, 64 * b : 64 * b + 64],
                    weights.format,
                    in_order=config.tokens_in_order,
                )
                for b in blocks
            ]
            x_end = weights.block_columns // 64 * (first + weights.blocks_per_scale)
            return jnp.einsum(
                "nbk,bmk->nm",
                jnp.concatenate(unpacked, axis=1),
                ring.x[slot][x_first:x_end, :width].astype(jnp.float32),
                precision="highest",
            )

        packed = ring.weights.at[slot, rows]
        if not config.uses_wgmma(width):
            tokens = ring.tokens(n, width, slot, tiled=False)
            return multiply(
                packed,
                tokens,
                weights.format,
                blocks,
                weights.column_blocks,
                width,
                in_order=config.tokens_in_order,
            )

        def multiply_with_wgmma(accumulator):
            unpacked = [
                registers.unpack(packed, weights.format, b, weights.column_blocks) for b in blocks
            ]
            operands = [a for block in unpacked for a in block]
            tokens = ring.tokens(n, width, slot, tiled=True)
            for b, a in enumerate(operands):
                plgpu.wgmma(accumulator, a, tokens.at[x_first + b].T)
            product = accumulator[...]
            if config.keep_operands:
                keep(*operands)
            return product

        return pl.run_scoped(multiply_with_wgmma, ACC((64, width), jnp.float32))


def _scaled(product: jax.Array, scale: jax.Array) -> jax.Array:
    if scale.ndim:
        scale = lax.broadcast_in_dim(scale, product.shape, (0,))
    return product * scale
