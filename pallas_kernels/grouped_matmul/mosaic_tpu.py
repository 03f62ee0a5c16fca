"""grouped_matmul for TPUs: a Pallas kernel that reads each matrix once, in its stored format.

XLA's own ``ragged_dot`` is a kernel on TPUs too, and JAX has another, megablox's ``gmm``. Neither
supports scales, and for ``ragged_dot`` XLA copies all of DeepSeek's K-major matrices: for 32 of
V3's experts in int8 on a v5p it allocates 3.1 GiB of temporaries, and this kernel 1 MiB (libtpu
0.0.42). Matrices narrower than a register are still left to ``ragged_dot``.

The rows are divided into tiles of equal height, so a group's rows may begin or end inside a tile. A
*visit* is a pair of a tile and a group that have rows in common. Visits are ordered by group, and
so also by tile: the visits of a group are consecutive, and so are those of a tile. Empty groups
have none. The grid is (blocks of the result's columns, visits). Pallas copies a block to VMEM only
if its index differs from the previous step's, and the copy overlaps with the previous step's
computation. So:

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

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int, Int32

from pallas_kernels.block_quant.reference import FLOAT8
from pallas_kernels.dispatch import with_gradients_of
from pallas_kernels.grouped_matmul import reference
from pallas_kernels.tpu import LANES, Chip, dot, require_tpu, require_vmem, tiled_bytes

_LHS_DTYPES = "bfloat16", "float32", "float8_e4m3fn"
_RHS_DTYPES = (*_LHS_DTYPES, "int8", "uint8")

EXPANDED_ROWS = 128
"""Number of rows of a quantized matrix that are expanded at a time. It is the number of lanes of a
register, because the scales of the rows are stored along the lanes."""

_MIN_ROWS, _MAX_ROWS = 16, 512
"""Rows of a tile: a bfloat16 register has 16, and 512 keep the matrix unit busy."""

_MAX_FLOAT32_ROWS = 128
"""Largest number of rows of a float32 tile. A float32 matmul is six of bfloat16 parts, for which
there are not enough registers with more rows."""

_MAX_COLUMNS = 2048
"""Largest number of columns of a block of the result. The rows are read once per block."""

_SMALL_TILE_ROWS = 64  # up to these, the time is that of reading the matrices
# Largest block of a matrix with small tiles, because nothing overlaps with the first block's copy.
_MAX_SMALL_TILE_BYTES = 4 * 2**20
_UNSCALED_SLICE = 4 * LANES  # columns of K converted at a time where no scale determines it
_STEP = 256  # columns of the result per matmul in the kernel, whose sums need VMEM too

Shaped = jax.Array | jax.ShapeDtypeStruct


# ---- block sizes ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plan:
    """Block sizes of one call, and how it converts quantized matrices."""

    rows: int  # per tile of lhs and of the result
    columns: int  # per block of the result: rows of a matrix
    conversion: Literal["none", "slices", "expand"]
    """Conversion of quantized matrices to the rows' dtype: slices of K in the matmul, or a whole
    block in advance."""
    slice_width: int  # columns of such a slice, in stored numbers (bytes for int4)
    # Value of 1 in the dtype to which registers convert stored numbers: 16 for float8 on chips that
    # do not have float8_e4m3fn, otherwise 1.
    unit: float
    packed: bool  # whether the matrices are int4, two columns per byte
    one_scale_per_row: bool
    block_shape: tuple[int, int]  # (rows, columns) of a matrix that share a scale
    vmem: int  # bytes of VMEM that the compiler may use

    @property
    def step(self) -> int:
        """Columns of the result per matmul in the kernel."""
        return _STEP if self.columns % _STEP == 0 and self.conversion != "slices" else LANES

    def scale_block(self, scale: Shaped) -> tuple[int, int]:
        """Returns the shape of one group's scales that a block reads: [Kb, columns] if each row of
        a matrix has its own, otherwise all [Nb, Kb], because a block may be smaller than theirs."""
        _, Nb, Kb = scale.shape
        return (Kb, self.columns) if self.block_shape[0] == 1 else (Nb, Kb)


def choose_plan(
    chip: Chip, lhs: Shaped, rhs: Shaped, scale: Shaped | None, block_shape: tuple[int, int]
) -> Plan:
    """Chooses block sizes: tiles of about half a group's rows, and equal blocks of columns, as wide
    as fit in VMEM and the same number for each core. Small tiles have smaller blocks, so that
    several copies are in flight. It raises NotImplementedError with the sizes."""
    (M, K), (G, N, _) = lhs.shape, rhs.shape
    packed = rhs.dtype == jnp.uint8
    if N < LANES or K % LANES:
        raise NotImplementedError(f"takes N >= {LANES} and K % {LANES} == 0, got {N} and {K}")
    if scale is not None and block_shape[0] > 1 and block_shape[0] % EXPANDED_ROWS:
        raise NotImplementedError(
            f"takes scales of one row or whole {EXPANDED_ROWS} rows, got blocks of {block_shape}"
        )
    if scale is not None and packed and block_shape[1] % 2:
        raise NotImplementedError(f"takes int4 scales of even columns, got {block_shape[1]}")
    most = _MAX_FLOAT32_ROWS if lhs.dtype == jnp.float32 else _MAX_ROWS
    # With half of a group's rows, about one visit in three is a tile that two groups share.
    half = 1 << max(M // (2 * G), 1).bit_length() - 1
    rows = min(M, most, max(_MIN_ROWS, half))
    one_scale_per_row = scale is not None and block_shape[0] == 1 and scale.shape[2] == 1
    slice_width = block_shape[1] // (2 if packed else 1)
    if scale is None or one_scale_per_row:
        slice_width = _UNSCALED_SLICE
    # Slices must be whole registers, or registers whole slices. So must the halves of int4.
    aligned = slice_width % LANES == 0 or slice_width in (32, 64)
    aligned = aligned and not (packed and K % (2 * LANES))
    conversion = "slices" if aligned and rows <= _SMALL_TILE_ROWS else "expand"
    conversion = "none" if rhs.dtype == lhs.dtype else conversion
    unit = 16.0 if rhs.dtype == FLOAT8 and not chip.float8 else 1.0
    stored = slice_width, unit, packed, one_scale_per_row, block_shape
    plan, blocks = Plan(rows, LANES, conversion, *stored, vmem=0), {}
    for count in range(chip.cores, -(-N // LANES) + chip.cores, chip.cores):
        # All blocks are equal; the last may extend past N.
        columns = -(-N // (count * LANES)) * LANES
        plan = dataclasses.replace(plan, columns=columns)
        blocks = block_bytes(plan, lhs, rhs, scale)
        large = plan.rows <= _SMALL_TILE_ROWS and blocks["matrix"] > 2 * _MAX_SMALL_TILE_BYTES
        if columns <= _MAX_COLUMNS and not large and sum(blocks.values()) <= chip.budget:
            break
    require_vmem(chip, blocks)
    reserved = chip.vmem - chip.budget
    return dataclasses.replace(plan, vmem=sum(blocks.values()) + reserved)


def block_bytes(plan: Plan, lhs: Shaped, rhs: Shaped, scale: Shaped | None) -> dict[str, int]:
    """Returns bytes of VMEM by name. A block that Pallas copies is double-buffered."""
    K = lhs.shape[1]
    sizes = {
        "rows": 2 * tiled_bytes((plan.rows, K), lhs.dtype),
        "matrix": 2 * tiled_bytes((plan.columns, rhs.shape[2]), rhs.dtype),
        "result": 2 * tiled_bytes((plan.rows, plan.columns), lhs.dtype),
        "sums": 2 * tiled_bytes((plan.rows, plan.step), jnp.float32),
    }
    if lhs.dtype == jnp.float32:
        sizes["parts of float32"] = 3 * tiled_bytes((plan.rows + plan.step, K), lhs.dtype)
    if plan.conversion == "expand":
        sizes["expanded matrix"] = tiled_bytes((plan.columns, K), lhs.dtype)
    if scale is not None:
        sizes["scales"] = 2 * tiled_bytes(plan.scale_block(scale), jnp.float32)
    return sizes


# ---- the back-end --------------------------------------------------------------------------------


def grouped_matmul(
    lhs: Float[Array, "M K"],
    rhs: reference.Matrices,
    group_sizes: Int[Array, " G"],
    lhs_scale: Float32[Array, "M Kb"] | None = None,
    rhs_scale: Float32[Array, "G Nb Kb"] | None = None,
    *,
    block_shape: tuple[int, int] = (128, 128),
    plan: Plan | None = None,
    interpret: Any = None,
) -> Float[Array, "M N"]:
    """grouped_matmul on a TPU, with rows in bfloat16 or float32. float32 has full precision. float8
    rows are first multiplied by their scales and rounded to bfloat16. With many rows per group, so
    are quantized matrices. Gradients are the reference's. Raises NotImplementedError for no TPU,
    other dtypes, or what :func:`choose_plan` refuses."""
    chip = require_tpu(interpret)
    if 0 in (lhs.size, rhs.size):
        raise NotImplementedError(f"takes no empty arrays, got {lhs.shape} by {rhs.shape}")
    if lhs.dtype not in _LHS_DTYPES or rhs.dtype not in _RHS_DTYPES:
        raise NotImplementedError(
            f"takes rows in {', '.join(_LHS_DTYPES)} and matrices in {', '.join(_RHS_DTYPES)}, got"
            f" {lhs.dtype} and {rhs.dtype}"
        )
    if lhs_scale is not None:
        lhs = reference.dense_rows(lhs, lhs_scale, block_shape).astype(jnp.bfloat16)
    plan = plan or choose_plan(chip, lhs, rhs, rhs_scale, block_shape)
    specification = functools.partial(reference.grouped_matmul, block_shape=block_shape)
    run = functools.partial(matmul, plan=plan, interpret=interpret)
    multiply = with_gradients_of(
        lambda lhs, rhs, sizes, scale: specification(lhs, rhs, sizes, None, scale), run
    )
    return multiply(lhs, rhs, group_sizes, rhs_scale)


# ---- visits --------------------------------------------------------------------------------------


class Visits(NamedTuple):
    """All visits of a call. ``V = ceil(M / height) + min(G, M)`` is their largest number."""

    groups: Int32[Array, " V"]
    """Group of each visit. Entries past the last visit repeat the last one's group."""
    tiles: Int32[Array, " V"]  # tile of each visit
    ends: Int32[Array, " G+1"]  # group g has the rows from ``ends[g]`` to ``ends[g + 1]``
    total: Int32[Array, ""]
    """Number of visits, at least one. If no group has rows, the only visit has none."""


def visits_of(group_sizes: Int[Array, " G"], M: int, height: int) -> Visits:
    """Returns the visits of M rows in tiles of ``height``."""
    G = group_sizes.shape[0]
    most = -(-M // height) + min(G, M)
    ends = jnp.cumsum(group_sizes.astype(jnp.int32))
    starts = ends - group_sizes
    first, last = starts // height, (ends - 1) // height
    counts = jnp.where(group_sizes > 0, last - first + 1, 0)
    visit_ends = jnp.cumsum(counts)
    visit = jnp.arange(most, dtype=jnp.int32)
    # A sum of comparisons, because a binary search would be a loop of gathers.
    groups = jnp.sum(visit_ends <= jnp.minimum(visit, visit_ends[-1] - 1)[:, None], axis=1)
    groups = jnp.minimum(groups, G - 1).astype(jnp.int32)
    index_in_group = visit - (visit_ends - counts)[groups]
    tiles = jnp.clip(first[groups] + index_in_group, 0, -(-M // height) - 1).astype(jnp.int32)
    return Visits(
        groups, tiles, jnp.concatenate([starts[:1], ends]), jnp.maximum(visit_ends[-1], 1)
    )


# ---- the kernel ----------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("plan", "interpret"))
def matmul(
    lhs: Float[Array, "M K"],
    rhs: reference.Matrices,
    group_sizes: Int[Array, " G"],
    scale: Float32[Array, "G Nb Kb"] | None = None,
    *,
    plan: Plan,
    interpret: Any = None,
) -> Float[Array, "M N"]:
    """Computes ``out[m] = rhs[g(m)] @ lhs[m]`` in lhs's dtype, in blocks of ``plan``'s sizes."""
    (M, K), (G, N, width) = lhs.shape, rhs.shape
    visits, blocks = visits_of(group_sizes, M, plan.rows), -(-N // plan.columns)
    expands = plan.conversion == "expand"
    if plan.packed:
        lhs = even_columns_first(lhs)
    operands = [lhs, rhs]
    in_specs = [
        pl.BlockSpec((plan.rows, K), lambda n, v, groups, tiles, _: (tiles[v], 0)),
        pl.BlockSpec((None, plan.columns, width), lambda n, v, groups, *_: (groups[v], n, 0)),
    ]
    if scale is not None:
        by_columns = plan.block_shape[0] == 1
        # XLA stores such arrays with the longer dimension last, so this moves nothing.
        operands.append(scale.swapaxes(1, 2) if by_columns else scale)
        block = None, *plan.scale_block(scale)
        in_specs.append(
            pl.BlockSpec(block, lambda n, v, groups, *_: (groups[v], 0, n if by_columns else 0))
        )
    return pl.pallas_call(
        functools.partial(_kernel, plan),
        out_shape=jax.ShapeDtypeStruct((M, N), lhs.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(blocks, visits.total),
            in_specs=in_specs,
            out_specs=pl.BlockSpec(
                (plan.rows, plan.columns), lambda n, v, _, tiles, *__: (tiles[v], n)
            ),
            scratch_shapes=[pltpu.VMEM((plan.columns, K), lhs.dtype)] * expands,
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
    """Computes one visit of one block of columns. ``rest`` has the scales if any, ``out`` [rows,
    columns], and scratch [columns, K] if matrices are expanded."""
    *others, dense = rest if plan.conversion == "expand" else (*rest, rhs)
    *scales, out = others
    block, visit = pl.program_id(0), pl.program_id(1)
    group = groups[visit]

    if plan.conversion == "expand":

        @pl.when((visit == 0) | (group != groups[jnp.maximum(visit - 1, 0)]))
        def _() -> None:
            expand(plan, block, rhs, () if plan.one_scale_per_row else scales, dense)

    row = tiles[visit] * plan.rows + lax.broadcasted_iota(jnp.int32, (plan.rows, 1), 0)
    in_group = (row >= ends[group]) & (row < ends[group + 1])

    def compute_columns(i: Any, _: None) -> None:
        columns = pl.ds(pl.multiple_of(i * plan.step, plan.step), plan.step)
        if plan.conversion == "slices":
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
    """Multiplies ``lhs`` with the block's rows ``columns``, the first of them the matrix' row
    ``first_row``. It converts and sums one slice of K at a time. If two slices share registers, lhs
    is multiplied twice, each time with zeros in the other slice's columns."""
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
    """Converts stored values, four bytes at once, to a dtype that registers convert further in one
    step, in units of ``plan.unit``: of int4's bytes the low halves, then the high ones."""
    if plan.packed:
        words = pltpu.bitcast(values, jnp.int32)
        return [sign_extend(half & 0x0F0F0F0F) for half in (words, words >> 4)]
    return [rebias(values) if plan.unit != 1 else values]


def sign_extend(halves: jax.Array) -> jax.Array:
    """Converts words of bytes 0 to 15 to int8 of -8 to 7. The top bits are set during the
    subtraction so that no byte borrows from the next."""
    top = jnp.int32(-0x7F7F7F80)
    return pltpu.bitcast(((halves ^ 0x08080808 ^ top) - 0x08080808) ^ top, jnp.int8)


def rebias(values: jax.Array) -> jax.Array:
    """Converts float8_e4m3fn to a sixteenth of it in float8_e4m3b11fnuz, which older chips have. It
    has no -0, so -0 becomes 0. NaN, which no weight is, becomes 480 / 16."""
    words, low = pltpu.bitcast(values, jnp.int32), jnp.int32(0x7F7F7F7F)
    nonzero = (words & low) + low  # in the top bit of each byte
    return pltpu.bitcast(words & (nonzero | low), jnp.float8_e4m3b11fnuz)


def even_columns_first(lhs: Float[Array, "M K"]) -> Float[Array, "M K"]:
    """Sorts the columns as the halves of int4 bytes are unpacked: even ones, then odd ones. Those
    of bytes that do not fill a register come last, sorted in the same way."""
    halves = lhs[:, ::2], lhs[:, 1::2]
    whole = halves[0].shape[1] // LANES * LANES
    ranges = slice(whole), slice(whole, None)
    return jnp.concatenate([half[:, columns] for columns in ranges for half in halves], axis=1)


def spread(factors: jax.Array, columns: slice, lanes: int) -> Float32[Array, "rows lanes"]:
    """Returns the scale of each of ``columns``, from scales [rows, Kb] for ``lanes`` columns
    each."""
    shape = factors.shape[0], columns.stop - columns.start
    first, last = columns.start // lanes, (columns.stop - 1) // lanes
    result = jnp.broadcast_to(factors[:, first : first + 1], shape)
    for i in range(first + 1, last + 1):
        is_later = lax.broadcasted_iota(jnp.int32, shape, 1) >= i * lanes - columns.start
        result = jnp.where(is_later, jnp.broadcast_to(factors[:, i : i + 1], shape), result)
    return result
