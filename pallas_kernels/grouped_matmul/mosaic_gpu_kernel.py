"""The Hopper kernel of grouped_matmul: one persistent block a multiprocessor.

    out[r] = rhs[g(r)] @ lhs[r]      bfloat16, or float8 with a scale a row and 128 columns of lhs
                                     and a scale a 128 x 128 block of rhs
    out[r] = silu(gate[g(r)] @ lhs[r]) * (up[g(r)] @ lhs[r])     of two such matrices a group,
                                     bfloat16, or float8 with a scale a row and 128 columns

Three warpgroups share a block. One copies: it walks the block's tiles and keeps a ring of stages
filled, each with 128 bytes of K of the tile's rows and of its columns. Two multiply, each its half
of the tile, and write the result out through a staging buffer by TMA.

Five things are not obvious.

1.  A tiled TMA copy starts at multiples of eight rows only, and groups start anywhere. A tile one
    swizzle atom wide, 128 bytes, has the same bytes as a plain array [rows, 128 bytes] under that
    swizzle; a ``RefUnion`` names both: copies use the plain name, products the tiled one.
2.  A tile's rows past its group's end are the next group's, or zeros past the array's. They are
    multiplied like the others and not stored: rows of a product do not mix.
3.  float8 products are summed over 128 of K by the tensor cores, then scaled and added to float32
    sums in registers.
4.  Of two matrices a tile holds as many columns of each, side by side within a warpgroup's part:
    one product serves both, and what belongs together ends in the same registers.
5.  An H200 multiplies faster than its power allows for long, so that what counts beside waiting is
    what is done besides: one warp copies; between two float8 products nothing is left to do but
    to add them up; what a step reads beyond its tiles is loaded under its product.

Here it is put together. plan says what follows from the shapes, block_tiles which tiles a block
takes, refs what lies in memory, copier and multipliers what the warpgroups do.

What was tried, and how fast it was, stands in benchmarks/NOTES.md.
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

from pallas_kernels.grouped_matmul.block_tiles import BlockTiles
from pallas_kernels.grouped_matmul.copier import copy_tiles
from pallas_kernels.grouped_matmul.multipliers import multiply_tiles
from pallas_kernels.grouped_matmul.plan import (
    MULTIPLIERS,
    SCALE_BLOCK,
    Config,
    Plan,
    check_shapes,
    quantizes,
)
from pallas_kernels.grouped_matmul.refs import Refs, scratch
from pallas_kernels.grouped_matmul.ring import LeaderBarriers, PallasBarriers, Ring
from pallas_kernels.grouped_matmul.row_tiles import RowTiles
from pallas_kernels.hopper import multiprocessors
from pallas_kernels.mosaic_ir import first_warp

_INTERPRETED_BLOCKS = 2
_COPIER = MULTIPLIERS  # the warpgroup that copies, the last


def grouped_product(
    lhs: Float[Array, "M K"],
    matrices: Sequence[Float[Array, "G N K"]],
    group_sizes: Int[Array, " G"],
    lhs_scale: Float32[Array, "M Kb"] | None,
    matrix_scales: Sequence[Float32[Array, "G Nb Kb"]],
    *,
    config: Config,
    interpret: Any = None,
) -> BFloat16[Array, "M N"]:
    """The product of every row with its group's matrix, or of two silu of the first times the
    second; rows of no group are undefined.

    Args:
      lhs, matrices: all bfloat16, or all float8_e4m3fn; one matrix or two.
      lhs_scale, matrix_scales: of float8; one array a matrix.
    """
    arrays = lhs, matrices, group_sizes, lhs_scale, matrix_scales
    return _product(*arrays, config=config, quantize=False, interpret=interpret)


def quantized_product(
    lhs: Float[Array, "M K"],
    matrices: Sequence[Float[Array, "G N K"]],
    group_sizes: Int[Array, " G"],
    lhs_scale: Float32[Array, "M Kb"] | None,
    matrix_scales: Sequence[Float32[Array, "G Nb Kb"]],
    *,
    config: Config,
    interpret: Any = None,
) -> tuple[Float[Array, "M N"], Float32[Array, "M Nb"]]:
    """:func:`grouped_product` in float8_e4m3fn, and the scales of its rows by 128 columns.

    Raises:
      NotImplementedError: :func:`quantizes` says no.
    """
    N, count = matrices[0].shape[1], len(matrices)
    if not quantizes(config, N, count):
        raise NotImplementedError(
            f"quantizes tiles of 64 x {SCALE_BLOCK}, or 128 x {SCALE_BLOCK} split by rows, of"
            f" multiples of {SCALE_BLOCK} columns, got {config} and N {N}"
        )
    arrays = lhs, matrices, group_sizes, lhs_scale, matrix_scales
    return _product(*arrays, config=config, quantize=True, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("config", "quantize", "interpret"))
def _product(
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
    # The interpreter makes a thread of this machine of each of a block's warpgroups.
    blocks = config.blocks or (multiprocessors() if on_gpu else _INTERPRETED_BLOCKS)
    plan = Plan(config, M, N, K, float8, count, quantize, blocks, on_gpu)
    if lhs_scale is not None and plan.copied_scales:
        spare = max(-M % 4, plan.scale_rows - M)
        lhs_scale = jnp.pad(lhs_scale, ((0, spare), (0, 0))).T
    early = config.early and on_gpu and hasattr(plgpu, "griddepcontrol_wait")  # not in jax 0.10
    barriers = LeaderBarriers if on_gpu else PallasBarriers

    def grouped_matmul(*given: Any) -> None:
        *named, of_ring = given
        refs = Refs.of(plan, named)
        ring: Ring = barriers(config.stages, of_ring)
        ring.initialise()
        if early:
            plgpu.griddepcontrol_launch_dependents()
            plgpu.griddepcontrol_wait()  # nothing is read before
        row_tiles = RowTiles(refs.group_sizes, config.rows, on_gpu=on_gpu)
        tiles = BlockTiles(plan, row_tiles, row_tiles.total(), lax.axis_index("block"))
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == _COPIER)
        def _() -> None:
            plgpu.set_max_registers(config.registers[1], action="decrease")
            pl.when(first_warp(on_gpu))(lambda: copy_tiles(plan, refs, tiles, ring))

        @pl.when(warpgroup != _COPIER)
        def _() -> None:
            plgpu.set_max_registers(config.registers[0], action="increase")
            multiply_tiles(plan, refs, tiles, ring, warpgroup)

    if count == 2:  # profiles show the name
        grouped_matmul.__name__ = "grouped_swiglu"
    out_type = jax.ShapeDtypeStruct((M, N), plan.out_dtype)
    scale_type = jax.ShapeDtypeStruct((M, N // SCALE_BLOCK), jnp.float32)
    kernel = plgpu.kernel(
        grouped_matmul,
        out_type=(out_type, scale_type) if quantize else out_type,
        scratch_types=[*scratch(plan), barriers.scratch(config.stages, plan.copies)],
        grid=(plan.blocks,),
        grid_names=("block",),
        num_threads=MULTIPLIERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(lhs, *matrices, group_sizes, *((lhs_scale, *matrix_scales) if float8 else ()))
