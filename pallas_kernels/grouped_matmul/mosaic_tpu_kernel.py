"""The TPU's grouped product: rows in tiles, each multiplied with the matrices of the groups in it.

The grid is (columns of the result in blocks, visits): see :mod:`visits`. Pallas copies a block to
VMEM only when another than the last one's is asked for, while the last one is computed with:

- Visits are the inner loop and a group's follow each other, so a block of its matrix is read once
  however many tiles the group has. Of a group without rows none is read.
- A block of a matrix is of whole rows, all of K. So there are no partial sums to keep, and a tile
  of rows too is read once for a block of columns.
- Quantized matrices travel as they are stored. Of few rows, their values become the rows' dtype on
  the way to the matrix unit, and scales multiply sums of the part of K that they stand for: then
  registers keep up with memory. Of many rows, values times scales go to a scratch when a block
  arrives, and all the group's visits multiply with that. A scale that stands for a whole row of the
  matrix multiplies the result.
- A tile of the result stays in VMEM while its visits last; each of them writes its group's rows.

int4 comes as bytes of two neighbouring columns. They are not put beside each other again, which
would move every number to another lane: the low halves make the first half of K and the high halves
the second. The rows' columns are sorted before, even ones first.
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
from pallas_kernels.grouped_matmul.visits import visits_of
from pallas_kernels.tpu import LANES, dot


@functools.partial(jax.jit, static_argnames=("plan", "interpret"))
def grouped_product(
    lhs: Float[Array, "M K"],
    rhs: Matrices,
    group_sizes: Int[Array, " G"],
    scale: Float32[Array, "G Nb Kb"] | None = None,
    *,
    plan: Plan,
    interpret: Any = None,
) -> Float[Array, "M N"]:
    """``out[m] = rhs[g(m)] @ lhs[m]`` in lhs's dtype, of blocks that ``plan`` describes."""
    (M, K), (G, N, width) = lhs.shape, rhs.shape
    visits, blocks = visits_of(group_sizes, M, plan.rows), -(-N // plan.columns)
    if plan.packed:
        lhs = even_first(lhs)
    operands = [lhs, rhs]
    in_specs = [
        pl.BlockSpec((plan.rows, K), lambda n, v, groups, tiles, ends: (tiles[v], 0)),
        pl.BlockSpec(
            (None, plan.columns, width), lambda n, v, groups, tiles, ends: (groups[v], n, 0)
        ),
    ]
    if scale is not None:
        by_columns = plan.block_shape[0] == 1
        # XLA lays such arrays out with the longer dimension last: this moves nothing.
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
    """One visit, of one block of columns.

    ``lhs`` [rows, K], ``rhs`` [columns, K] (int4: K / 2), scale if any, ``out`` [rows, columns],
    and where matrices are expanded scratch ``dense`` [columns, K].
    """
    *others, dense = rest if plan.expands else (*rest, rhs)
    *scales, out = others
    block, visit = pl.program_id(0), pl.program_id(1)
    group = groups[visit]

    if plan.expands:

        @pl.when((visit == 0) | (group != groups[jnp.maximum(visit - 1, 0)]))
        def _() -> None:
            expand(plan, block, rhs, () if plan.scale_a_row else scales, dense)

    row = tiles[visit] * plan.rows + lax.broadcasted_iota(jnp.int32, (plan.rows, 1), 0)
    own = (row >= ends[group]) & (row < ends[group + 1])

    def some_columns(i: Any, _: None) -> None:
        at = pl.ds(pl.multiple_of(i * plan.step, plan.step), plan.step)
        if plan.in_parts:
            sums = product_in_parts(
                plan, block * plan.columns + i * plan.step, lhs, rhs, scales, at
            )
        else:
            sums = dot(lhs[...], dense[at], transposed=True)
        if plan.scale_a_row:
            sums *= scales[0][:, at] * plan.unit
        out[:, at] = jnp.where(own, sums, out[:, at].astype(jnp.float32)).astype(out.dtype)

    lax.fori_loop(0, plan.columns // plan.step, some_columns, None)


def product_in_parts(
    plan: Plan, row: Any, lhs: Any, rhs: Any, scales: Sequence[Any], at: Any
) -> Float32[Array, "rows step"]:
    """``lhs`` by rows ``at`` of the block, the first of which is row ``row`` of the matrix.

    Each part of K that has a scale of its own is summed apart. Where two parts share registers, the
    rows go in twice, each time with zeros in the other's place.
    """
    width, rows = rhs.shape[1], plan.rows
    factors = None  # [Kb, step], or [1, Kb] for all columns
    if scales and not plan.scale_a_row:
        (scale,) = scales
        rows_of_scale = plan.block_shape[0]
        factors = scale[:, at] if rows_of_scale == 1 else scale[pl.ds(row // rows_of_scale, 1)]
        factors *= plan.unit
    sums = jnp.zeros((rows, plan.step), jnp.float32)
    for first in range(0, width, max(plan.part, LANES)):
        lanes = slice(first, min(first + max(plan.part, LANES), width))
        parts = range(lanes.start // plan.part, -(-lanes.stop // plan.part))
        of_parts = jnp.zeros((len(parts) * rows, plan.step), jnp.float32)
        for half, values in enumerate(numbers(plan, rhs[at, lanes])):
            tile = lhs[:, half * width + lanes.start : half * width + lanes.stop]
            if len(parts) > 1:
                part = (first + lax.broadcasted_iota(jnp.int32, tile.shape, 1)) // plan.part
                tile = jnp.concatenate([jnp.where(part == p, tile, 0) for p in parts])
            of_parts += dot(tile.astype(lhs.dtype), values.astype(lhs.dtype), transposed=True)
        for i, part in enumerate(parts):
            of_part = of_parts[i * rows : (i + 1) * rows]
            if factors is not None and plan.block_shape[0] == 1:
                of_part *= factors[part : part + 1]
            elif factors is not None:
                of_part *= factors[:, part : part + 1]
            sums += of_part
    return sums


def expand(plan: Plan, block: Any, rhs: Any, scales: Sequence[Any], dense: Any) -> None:
    """``dense`` [columns, K] becomes the block's values, times their scales if there are any."""
    width = rhs.shape[1]
    whole = width // LANES * LANES
    scale_rows, scale_lanes = plan.block_shape[0], plan.block_shape[1] // (2 if plan.packed else 1)

    def some_rows(i: Any, _: None) -> None:
        at = pl.ds(pl.multiple_of(i * EXPANDED_ROWS, EXPANDED_ROWS), EXPANDED_ROWS)
        row = block * plan.columns + i * EXPANDED_ROWS
        factors = [
            (scale[:, at].T if scale_rows == 1 else scale[pl.ds(row // scale_rows, 1)]) * plan.unit
            for scale in scales
        ]
        for lane in range(0, width, LANES):
            columns = slice(lane, min(lane + LANES, width))
            values = [half.astype(jnp.float32) for half in numbers(plan, rhs[at, columns])]
            for each in factors:
                factor = spread(each, columns, scale_lanes)
                values = [half * factor for half in values]
            values = [half.astype(dense.dtype) for half in values]
            if not plan.packed:
                (dense[at, columns],) = values
            elif lane < whole:
                dense[at, columns], dense[at, whole + lane : whole + lane + LANES] = values
            else:
                dense[at, 2 * whole :] = jnp.concatenate(values, axis=1)

    lax.fori_loop(0, plan.columns // EXPANDED_ROWS, some_rows, None)


def numbers(plan: Plan, values: jax.Array) -> list[jax.Array]:
    """What is stored as what registers convert in one step, four bytes at once, in units of
    ``plan.unit``; of int4's bytes the low halves, then the high ones."""
    if plan.packed:
        words = pltpu.bitcast(values, jnp.int32)
        return [signed(half & 0x0F0F0F0F) for half in (words, words >> 4)]
    return [rebiased(values) if plan.unit != 1 else values]


def signed(halves: jax.Array) -> jax.Array:
    """Bytes of 0 to 15 as int8 of -8 to 7; the top bits are set so that no byte borrows."""
    top = jnp.int32(-0x7F7F7F80)
    return pltpu.bitcast(((halves ^ 0x08080808 ^ top) - 0x08080808) ^ top, jnp.int8)


def rebiased(values: jax.Array) -> jax.Array:
    """float8_e4m3fn as the float8 of older chips, a sixteenth as large, which has no -0.

    NaN, which no weight is, becomes 480 sixteenths.
    """
    words, low = pltpu.bitcast(values, jnp.int32), jnp.int32(0x7F7F7F7F)
    nonzero = (words & low) + low  # in a byte's top bit
    return pltpu.bitcast(words & (nonzero | low), jnp.float8_e4m3b11fnuz)


def even_first(lhs: Float[Array, "M K"]) -> Float[Array, "M K"]:
    """Columns in the order of unpacked halves: all even ones, then all odd ones, but those of bytes
    that fill no register come last."""
    halves = lhs[:, ::2], lhs[:, 1::2]
    whole = halves[0].shape[1] // LANES * LANES
    parts = [half[:, part] for part in (slice(whole), slice(whole, None)) for half in halves]
    return jnp.concatenate(parts, axis=1)


def spread(factors: jax.Array, columns: slice, lanes: int) -> Float32[Array, "rows lanes"]:
    """The scales of ``columns``, where each of ``factors`` [rows, Kb] is for ``lanes`` of them."""
    shape = factors.shape[0], columns.stop - columns.start
    first, last = columns.start // lanes, (columns.stop - 1) // lanes
    found = jnp.broadcast_to(factors[:, first : first + 1], shape)
    for i in range(first + 1, last + 1):
        here = lax.broadcasted_iota(jnp.int32, shape, 1) >= i * lanes - columns.start
        found = jnp.where(here, jnp.broadcast_to(factors[:, i : i + 1], shape), found)
    return found
