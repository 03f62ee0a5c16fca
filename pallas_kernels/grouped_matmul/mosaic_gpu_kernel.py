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

1.  Groups start at any row, tiled TMA copies at multiples of eight: see ``buffers``.
2.  The rows of a tile past its group's end belong to the next group, or are zeros past the end of
    lhs. They are multiplied too but not stored, because the rows of a matmul do not mix.
3.  With two matrices, a stage has the rows of gate and up side by side for each warpgroup. One
    wgmma multiplies both, and a gate and its up end in the same thread's registers.
4.  An H200 has more tensor throughput than its power limit sustains. So apart from waiting, what
    counts is the number of other instructions: one warp issues all copies, and loads overlap with
    wgmma.

``plan`` derives sizes from shapes, ``tile_scheduler`` assigns tiles to blocks, ``buffers`` lists
the memory, ``ring`` synchronises producer and consumers, ``mainloop`` has the roles' loops, and
``epilogue`` stores results. benchmarks/NOTES.md records what was tried and measured.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Float32, Int

from pallas_kernels.grouped_matmul.buffers import Buffers, scratch
from pallas_kernels.grouped_matmul.mainloop import consume, produce
from pallas_kernels.grouped_matmul.plan import (
    CONSUMERS,
    SCALE_BLOCK,
    Config,
    Plan,
    check_shapes,
    quantizes,
)
from pallas_kernels.grouped_matmul.ring import GpuRing, InterpreterRing, Ring
from pallas_kernels.grouped_matmul.tile_scheduler import GroupTiles, TileScheduler
from pallas_kernels.hopper import multiprocessors
from pallas_kernels.mosaic_ir import first_warp

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
    early = config.early and on_gpu and hasattr(plgpu, "griddepcontrol_wait")  # not in jax 0.10
    ring_type = GpuRing if on_gpu else InterpreterRing

    def grouped_matmul(*refs: Any) -> None:
        *buffer_refs, ring_memory = refs
        buffers = Buffers.of(plan, buffer_refs)
        ring: Ring = ring_type(config.stages, ring_memory)
        ring.initialise()
        if early:
            plgpu.griddepcontrol_launch_dependents()
            plgpu.griddepcontrol_wait()  # nothing is read before
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
        scratch_types=[*scratch(plan), ring_type.scratch(config.stages, plan.copies_per_stage)],
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
