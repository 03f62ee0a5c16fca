"""The Hopper kernel of float8 rows by int4 matrices: persistent and warp-specialised.

The matmul is transposed, ``out^T = W x^T``: only the first operand of wgmma can be in registers.
A tile is 128 output features by 128 tokens of a group. The producer's first warp keeps a ring of
stages filled by TMA. A stage has 128 columns of K, one block of scales: the tokens in float8 (16
KB), the weights in 4 bits (8 KB), and the scales of both. Each of two consumer warpgroups converts
64 features to float8 in registers, multiplies, and adds the product times its scales to float32
sums.

A step takes 512 tensor core cycles. Each warp needs 304 instructions for it: 88 convert 64 weights,
128 scale the product and add it, 34 load scales. Two warps share a scheduler, so that instructions
are the limit, not the tensor cores. Shared memory moves 25 KB in and 40 KB out in a step.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Float32, Int, UInt8

from pallas_kernels.block_quant.reference import FLOAT8
from pallas_kernels.grouped_matmul import w4a8_registers as registers
from pallas_kernels.grouped_matmul.few_tokens_registers import store_transposed
from pallas_kernels.grouped_matmul.tile_scheduler import GroupTiles
from pallas_kernels.hopper import wgmma
from pallas_kernels.hopper.branch import when
from pallas_kernels.hopper.copies import TmaCopy
from pallas_kernels.hopper.keep import keep
from pallas_kernels.hopper.launch import overlap_preceding_kernel
from pallas_kernels.hopper.lowered_once import lowered_once
from pallas_kernels.hopper.ring import PipelineState, Ring
from pallas_kernels.hopper.tiles import ROW, ROWS, WGMMA, spread_columns, spread_rows
from pallas_kernels.hopper.warpgroup import first_warp

BLOCK = 128
"""Columns of K per step, and per scale."""
CONSUMERS = 2  # consumer warpgroups
FEATURES = CONSUMERS * ROWS
"""Output features per tile."""
_SHARED_BYTES = 232448 - 4096  # of a thread block, less barriers and alignment
_REGISTERS = (232, 40)  # per thread of a consumer and of the producer warpgroup


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile configuration."""

    tokens: int = 128
    """Tokens per tile, a multiple of 32 up to 128."""

    stages: int | None = None
    """Stages of the ring buffer. The default is the largest number that fits in shared memory."""

    early: bool = True
    """Whether to launch before the preceding kernel has ended (programmatic dependent launch)."""

    @property
    def scale_copy(self) -> int:
        """Token scales per copy, which starts at a multiple of four: a multiple of 32."""
        return self.tokens + 32

    @property
    def ring_stages(self) -> int:
        stage = self.tokens * BLOCK + FEATURES * BLOCK // 2 + 4 * (self.scale_copy + FEATURES)
        return self.stages or _SHARED_BYTES // stage


@lowered_once("M", "config", "thread_blocks", "interpret")
def matmul(
    x: Float[Array, "rows K"],
    values: UInt8[Array, "G N K2"],
    group_sizes: Int[Array, " G"],
    x_scales: Float32[Array, "Kb rows_of_scales"],
    scales: Float32[Array, "G Kb N"],
    *,
    M: int,
    config: Config,
    thread_blocks: int,
    interpret: Any,
) -> BFloat16[Array, "M N"]:
    """Multiplies each token with its group's matrix.

    Args:
      x: float8_e4m3fn tokens, whose columns :func:`w4a8.permute_columns` has permuted, padded to
        ``config.tokens``; in the interpreter to M and as many.
      values: int4 matrices, packed as by :func:`pallas_kernels.integer_quant`.
      scales: of the matrices, transposed.
      x_scales: scales of the tokens, transposed and padded to ``config.scale_copy``.
    """
    N, on_gpu, stages = values.shape[1], interpret is None, config.ring_stages
    copies = 4
    ring_scratch = Ring.scratch(stages, copies, CONSUMERS, interpret)
    swizzle = (plgpu.SwizzleTransform(128),) if on_gpu else ()

    def w4a8(*refs: Any) -> None:
        arrays, (x_s, w_s, x_scale_s, scale_s), ring_refs = refs[:6], refs[6:10], refs[10:]
        x_g, w_g, sizes_g, x_scale_g, scale_g, out_g = arrays
        ring = Ring.of(stages, CONSUMERS, ring_refs, interpret)
        ring.initialise()
        overlap_preceding_kernel(config.early, interpret=interpret)
        warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        groups = GroupTiles(sizes_g, config.tokens, on_gpu=on_gpu)
        tiles = Tiles(groups, N // FEATURES, block, thread_blocks)
        memory = Stages(ring, config, K=x.shape[1], x=x_s, weights=w_s, x_scales=x_scale_s,
                        scales=scale_s)  # fmt: skip

        @when(warpgroup == CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(_REGISTERS[1], action="decrease")
            sources = x_g, w_g, x_scale_g, scale_g
            when(first_warp(on_gpu))(lambda: produce(memory, tiles, *sources))

        @when(warpgroup != CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(_REGISTERS[0], action="increase")
            consume(memory, tiles, out_g, warpgroup, on_gpu=on_gpu)

    return plgpu.kernel(
        w4a8,
        out_type=jax.ShapeDtypeStruct((M, N), jnp.bfloat16),
        scratch_types=[
            plgpu.SMEM((stages, config.tokens, BLOCK), FLOAT8, transforms=swizzle),
            plgpu.SMEM((stages, FEATURES, BLOCK // 2), jnp.uint8),
            plgpu.SMEM((stages, config.scale_copy), jnp.float32),
            plgpu.SMEM((stages, FEATURES), jnp.float32),
            *ring_scratch,
        ],
        grid=(thread_blocks,),
        grid_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(x, values, group_sizes.astype(jnp.int32), x_scales, scales)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tiles of one thread block. Those of the same tokens are next to each other."""

    groups: GroupTiles
    feature_tiles: int
    """Tiles along N."""
    block: Any
    thread_blocks: int

    def count(self) -> Any:
        total = self.groups.count() * self.feature_tiles
        return lax.div(total - self.block + (self.thread_blocks - 1), jnp.int32(self.thread_blocks))

    def locate(self, i: Any) -> tuple[Any, Any, Any, Any]:
        """Returns the group, first token, number of tokens and first feature of the i-th tile."""
        t = self.block + i * self.thread_blocks
        feature_tile = lax.rem(t, jnp.int32(self.feature_tiles))
        tile = self.groups.locate(lax.div(t, jnp.int32(self.feature_tiles)))
        return *tile, feature_tile * FEATURES


@dataclasses.dataclass(frozen=True, eq=False)
class Stages:
    """The ring buffer in shared memory. The first axis of each array is the stage."""

    ring: Ring
    config: Config
    K: int
    x: Any
    """float8 [stages, tokens, 128]."""
    weights: Any
    """uint8 [stages, features, 64]."""
    x_scales: Any
    """float32 [stages, scale_copy]."""
    scales: Any
    """float32 [stages, features]."""

    @property
    def steps(self) -> int:
        return self.K // BLOCK


def produce(memory: Stages, tiles: Tiles, x_g: Any, w_g: Any, x_scale_g: Any, scale_g: Any) -> None:
    """Copies the operands of every K step of this block's tiles to the ring. One warp calls it."""
    ring, config = memory.ring, memory.config

    def copy_tile(i: Any, state: PipelineState) -> PipelineState:
        group, token, _, feature = tiles.locate(i)
        features, tokens = pl.ds(feature, FEATURES), pl.ds(token, config.tokens)

        def fill(step: Any, state: PipelineState, carry: tuple[()]) -> tuple[()]:
            stage, columns = state.stage, pl.ds(step * jnp.int32(BLOCK), BLOCK)
            half = pl.ds(step * jnp.int32(BLOCK // 2), BLOCK // 2)
            of_tokens = step, pl.ds(token - (token & 3), config.scale_copy)
            plain: Any = {"tiled": False, "swizzle": None}
            ring.fill(state, [
                TmaCopy(x_g, (tokens, columns), memory.x.at[stage], tiled=False),
                TmaCopy(w_g, (group, features, half), memory.weights.at[stage], **plain),
                TmaCopy(x_scale_g, of_tokens, memory.x_scales.at[stage], **plain),
                TmaCopy(scale_g, (group, step, features), memory.scales.at[stage], **plain),
            ])  # fmt: skip
            return carry

        return ring.loop(memory.steps, fill, state, ())[0]

    ring.drain(lax.fori_loop(0, tiles.count(), copy_tile, ring.start()))


def consume(memory: Stages, tiles: Tiles, out: Any, warpgroup: Any, *, on_gpu: bool) -> None:
    """Computes and stores 64 features of every tile of the block."""
    ring, width = memory.ring, memory.config.tokens
    ring.release_all()
    first_row = pl.multiple_of(warpgroup * jnp.int32(ROWS), ROWS)
    zeros = jnp.zeros((ROWS, width), jnp.float32)
    if on_gpu:
        zeros = plgpu.layout_cast(zeros, WGMMA)

    def compute_tile(i: Any, state: PipelineState) -> PipelineState:
        _, token, tokens, feature = tiles.locate(i)

        def step(i: Any, state: PipelineState, carry: Any) -> Any:
            ring.wait_full(state)
            stage = state.stage
            packed = memory.weights.at[stage, pl.ds(first_row, ROWS)]
            x_scales = memory.x_scales.at[stage]
            if not on_gpu:
                weights = registers.unpack_in_interpreter(packed[...])
                product = jnp.dot(
                    weights, memory.x[stage].astype(jnp.float32).T, precision="highest"
                )
                columns = x_scales[pl.ds(token & 3, width)]
                factors = memory.scales[stage, pl.ds(first_row, ROWS)][:, None] * columns[None]
                sums, previous = carry
                when(i > 0)(lambda: ring.release(previous))
                return sums + product * factors, state
            sums, product, previous = carry
            weights = registers.unpack(packed)
            base = wgmma.operand_base(memory.x, stage * (width * BLOCK))
            started = wgmma.start_product_of_registers(weights, base, product)
            # An arrival does not wait for loads of scales that have not been used yet. Those of the
            # previous step have been: this product takes the registers of the one they scaled.
            when(i > 0)(lambda: ring.release(previous))
            rows = plgpu.layout_cast(memory.scales[stage, pl.ds(first_row, ROWS)], ROW)
            columns = registers.load_columns(x_scales, token & 3, width)
            rows = rows * registers.UNPACKED_SCALE
            factors = spread_rows(rows, width) * spread_columns(columns, ROWS)
            product = wgmma.wait_for_product(started)
            keep(weights)
            return sums + product * factors, product, state

        carry = (zeros, zeros, state) if on_gpu else (zeros, state)
        state, carry = ring.loop(memory.steps, step, state, carry)
        store_tile(carry[0].astype(jnp.bfloat16), token, tokens, feature + first_row)
        ring.release(carry[-1])
        return state

    def store_tile(sums: jax.Array, token: Any, tokens: Any, column: Any) -> None:
        if on_gpu:
            target = out.at[pl.ds(token, width), pl.ds(column, ROWS)]
            store_transposed(target, sums, tokens, column_blocks=1)
            return
        for n in range(width):

            @when(n < tokens)
            def _(n=n):
                out[token + n, pl.ds(column, ROWS)] = sums[:, n]

    lax.fori_loop(0, tiles.count(), compute_tile, ring.start())
