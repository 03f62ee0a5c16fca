"""The TPU kernel of grouped_matmul: tiles of rows, multiplied with the matrices of their groups.

The grid is (blocks of the result's columns, visits of tiles by groups); see ``tpu_visits``. Pallas
copies a block to VMEM only if its index differs from the previous step's, and the copy overlaps
with the previous step's computation. So:

- Visits are the inner loop and those of a group are consecutive, so a block of its matrix is read
  once, for any number of tiles. Matrices of groups without rows are not read.
- A block of a matrix spans all of K. So there are no partial sums to keep, and a tile of rows is
  read once per block of columns.
- Quantized matrices are copied in their stored format. With few rows, values are converted to the
  dtype of the rows inside the matmul, and scales multiply the sums over the slice of K that they
  belong to; then the registers keep up with memory. With many rows, a block is multiplied by its
  scales and written to scratch when it arrives, and all visits of the group use that. A scale that
  belongs to a whole row of the matrix multiplies the result.
- A tile of the result stays in VMEM during its visits. Each visit writes its group's rows.

int4 matrices are stored as bytes of two neighbouring columns. Interleaving the halves again would
move every number to another lane. Instead the low halves become the first half of K and the high
halves the second, and the columns of the rows are sorted beforehand, even ones first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels.grouped_matmul.reference import Matrices
from pallas_kernels.grouped_matmul.tpu_plan import EXPANDED_ROWS, Plan
from pallas_kernels.grouped_matmul.tpu_visits import visits_of
from pallas_kernels.tpu import LANES, dot


@functools.partial(jax.jit, static_argnames=("plan", "interpret"))
def matmul(
    lhs: Float[Array, "M K"],
    rhs: Matrices,
    group_sizes: Int[Array, " G"],
    scale: Float32[Array, "G Nb Kb"] | None = None,
    *,
    plan: Plan,
    interpret: Any = None,
) -> Float[Array, "M N"]:
    """Computes ``out[m] = rhs[g(m)] @ lhs[m]`` in lhs's dtype, in blocks of ``plan``'s sizes."""
    (M, K), (G, N, width) = lhs.shape, rhs.shape
    visits, blocks = visits_of(group_sizes, M, plan.rows), -(-N // plan.columns)
    if plan.packed:
        lhs = even_columns_first(lhs)
    operands = [lhs, rhs]
    in_specs = [
        pl.BlockSpec((plan.rows, K), lambda n, v, groups, tiles, ends: (tiles[v], 0)),
        pl.BlockSpec(
            (None, plan.columns, width), lambda n, v, groups, tiles, ends: (groups[v], n, 0)
        ),
    ]
    if scale is not None:
        by_columns = plan.block_shape[0] == 1
        # XLA stores such arrays with the longer dimension last, so this moves nothing.
        operands.append(scale.swapaxes(1, 2) if by_columns else scale)
        in_specs.append(
            pl.BlockSpec(
                (None, *plan.scale_block(scale)),
                lambda n, v, groups, tiles, ends: (groups[v], 0, n if by_columns else 0),
            )
        )
    return pl.pallas_call(
        functools.partial(_kernel, plan),
        out_shape=jax.ShapeDtypeStruct((M, N), lhs.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(blocks, visits.total),
            in_specs=in_specs,
            out_specs=pl.BlockSpec(
                (plan.rows, plan.columns), lambda n, v, groups, tiles, ends: (tiles[v], n)
            ),
            scratch_shapes=[pltpu.VMEM((plan.columns, K), lhs.dtype)] if plan.expands else [],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=plan.vmem
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * M * N * K,
            bytes_accessed=blocks * lhs.nbytes
            + M * N * lhs.dtype.itemsize
            + min(G, M) * sum(x.nbytes for x in operands[1:]) // G,
            transcendentals=0,
        ),
        name="grouped_matmul",
        interpret=interpret or False,
    )(visits.groups, visits.tiles, visits.ends, *operands)


def _kernel(plan: Plan, groups: Any, tiles: Any, ends: Any, lhs: Any, rhs: Any, *rest: Any) -> None:
    """Computes one visit of one block of columns.

    The references are ``lhs`` [rows, K], ``rhs`` [columns, K] (int4: K / 2), the scales if any,
    ``out`` [rows, columns], and scratch ``dense`` [columns, K] if matrices are expanded.
    """
    *others, dense = rest if plan.expands else (*rest, rhs)
    *scales, out = others
    block, visit = pl.program_id(0), pl.program_id(1)
    group = groups[visit]

    if plan.expands:

        @pl.when((visit == 0) | (group != groups[jnp.maximum(visit - 1, 0)]))
        def _() -> None:
            expand(plan, block, rhs, () if plan.one_scale_per_row else scales, dense)

    row = tiles[visit] * plan.rows + lax.broadcasted_iota(jnp.int32, (plan.rows, 1), 0)
    in_group = (row >= ends[group]) & (row < ends[group + 1])

    def compute_columns(i: Any, _: None) -> None:
        columns = pl.ds(pl.multiple_of(i * plan.step, plan.step), plan.step)
        if plan.converts_slices:
            first = block * plan.columns + i * plan.step
            sums = multiply_slices(plan, first, lhs, rhs, scales, columns)
        else:
            sums = dot(lhs[...], dense[columns], transposed=True)
        if plan.one_scale_per_row:
            sums *= scales[0][:, columns] * plan.unit
        previous = out[:, columns].astype(jnp.float32)
        out[:, columns] = jnp.where(in_group, sums, previous).astype(out.dtype)

    lax.fori_loop(0, plan.columns // plan.step, compute_columns, None)


def multiply_slices(
    plan: Plan, first_row: Any, lhs: Any, rhs: Any, scales: Sequence[Any], columns: Any
) -> Float32[Array, "rows step"]:
    """Multiplies ``lhs`` with some rows of the block, converting one slice of K at a time.

    Each slice of K that has its own scale is summed on its own. If two slices share registers, lhs
    is multiplied twice, each time with zeros in the other slice's columns.

    Args:
      first_row: index in the matrix of the first of these rows.
      columns: window of the rows in the block, which are columns of the result.
    """
    width, rows = rhs.shape[1], plan.rows
    factors = None  # [Kb, step], or [1, Kb] for all columns
    if scales and not plan.one_scale_per_row:
        (scale,) = scales
        scale_rows = plan.block_shape[0]
        factors = scale[:, columns] if scale_rows == 1 else scale[pl.ds(first_row // scale_rows, 1)]
        factors *= plan.unit
    sums = jnp.zeros((rows, plan.step), jnp.float32)
    for first in range(0, width, max(plan.slice_width, LANES)):
        lanes = slice(first, min(first + max(plan.slice_width, LANES), width))
        slices = range(lanes.start // plan.slice_width, -(-lanes.stop // plan.slice_width))
        slice_sums = jnp.zeros((len(slices) * rows, plan.step), jnp.float32)
        for half, values in enumerate(convert(plan, rhs[columns, lanes])):
            tile = lhs[:, half * width + lanes.start : half * width + lanes.stop]
            if len(slices) > 1:
                column = first + lax.broadcasted_iota(jnp.int32, tile.shape, 1)
                k_slice = column // plan.slice_width
                tile = jnp.concatenate([jnp.where(k_slice == s, tile, 0) for s in slices])
            slice_sums += dot(tile.astype(lhs.dtype), values.astype(lhs.dtype), transposed=True)
        for i, s in enumerate(slices):
            slice_sum = slice_sums[i * rows : (i + 1) * rows]
            if factors is not None and plan.block_shape[0] == 1:
                slice_sum *= factors[s : s + 1]
            elif factors is not None:
                slice_sum *= factors[:, s : s + 1]
            sums += slice_sum
    return sums


def expand(plan: Plan, block: Any, rhs: Any, scales: Sequence[Any], dense: Any) -> None:
    """Writes the block's values, times their scales if there are any, to ``dense`` [columns, K]."""
    width = rhs.shape[1]
    whole = width // LANES * LANES
    scale_rows, scale_lanes = plan.block_shape[0], plan.block_shape[1] // (2 if plan.packed else 1)

    def expand_rows(i: Any, _: None) -> None:
        rows = pl.ds(pl.multiple_of(i * EXPANDED_ROWS, EXPANDED_ROWS), EXPANDED_ROWS)
        first_row = block * plan.columns + i * EXPANDED_ROWS
        factors = [
            (scale[:, rows].T if scale_rows == 1 else scale[pl.ds(first_row // scale_rows, 1)])
            * plan.unit
            for scale in scales
        ]
        for lane in range(0, width, LANES):
            columns = slice(lane, min(lane + LANES, width))
            values = [half.astype(jnp.float32) for half in convert(plan, rhs[rows, columns])]
            for each in factors:
                factor = spread(each, columns, scale_lanes)
                values = [half * factor for half in values]
            values = [half.astype(dense.dtype) for half in values]
            if not plan.packed:
                (dense[rows, columns],) = values
            elif lane < whole:
                dense[rows, columns], dense[rows, whole + lane : whole + lane + LANES] = values
            else:
                dense[rows, 2 * whole :] = jnp.concatenate(values, axis=1)

    lax.fori_loop(0, plan.columns // EXPANDED_ROWS, expand_rows, None)


def convert(plan: Plan, values: jax.Array) -> list[jax.Array]:
    """Converts stored values to a dtype that registers convert further in one step.

    The result is in units of ``plan.unit``. Of int4's bytes it is the low halves, then the high
    ones. Four bytes are converted at once.
    """
    if plan.packed:
        words = pltpu.bitcast(values, jnp.int32)
        return [sign_extend(half & 0x0F0F0F0F) for half in (words, words >> 4)]
    return [rebias(values) if plan.unit != 1 else values]


def sign_extend(halves: jax.Array) -> jax.Array:
    """Converts words of bytes 0 to 15 to int8 of -8 to 7.

    The top bits are set during the subtraction so that no byte borrows from the next.
    """
    top = jnp.int32(-0x7F7F7F80)
    return pltpu.bitcast(((halves ^ 0x08080808 ^ top) - 0x08080808) ^ top, jnp.int8)


def rebias(values: jax.Array) -> jax.Array:
    """Converts float8_e4m3fn to a sixteenth of it in float8_e4m3b11fnuz, which older chips have.

    That dtype has no -0, so -0 becomes 0. NaN, which no weight is, becomes 480 / 16.
    """
    words, low = pltpu.bitcast(values, jnp.int32), jnp.int32(0x7F7F7F7F)
    nonzero = (words & low) + low  # in the top bit of each byte
    return pltpu.bitcast(words & (nonzero | low), jnp.float8_e4m3b11fnuz)


def even_columns_first(lhs: Float[Array, "M K"]) -> Float[Array, "M K"]:
    """Sorts the columns as the halves of int4 bytes are unpacked: even ones, then odd ones.

    Columns of bytes that do not fill a register come last, sorted in the same way.
    """
    halves = lhs[:, ::2], lhs[:, 1::2]
    whole = halves[0].shape[1] // LANES * LANES
    ranges = slice(whole), slice(whole, None)
    return jnp.concatenate([half[:, columns] for columns in ranges for half in halves], axis=1)


def spread(factors: jax.Array, columns: slice, lanes: int) -> Float32[Array, "rows lanes"]:
    """Returns the scale of each of ``columns``.

    Args:
      factors: [rows, Kb], each for ``lanes`` columns.
    """
    shape = factors.shape[0], columns.stop - columns.start
    first, last = columns.start // lanes, (columns.stop - 1) // lanes
    result = jnp.broadcast_to(factors[:, first : first + 1], shape)
    for i in range(first + 1, last + 1):
        is_later = lax.broadcasted_iota(jnp.int32, shape, 1) >= i * lanes - columns.start
        result = jnp.where(is_later, jnp.broadcast_to(factors[:, i : i + 1], shape), result)
    return result
