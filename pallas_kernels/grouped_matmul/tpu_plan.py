"""Block sizes of the TPU kernel, chosen from the chip's VMEM and the average rows per group."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.block_quant.reference import FLOAT8
from pallas_kernels.tpu import LANES, Chip, require_vmem, tiled_bytes

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


@dataclasses.dataclass(frozen=True)
class Plan:
    """Block sizes of one call, and how it converts quantized matrices."""

    rows: int
    """Rows per tile of lhs and of the result."""

    columns: int
    """Columns per block of the result: rows of a matrix."""

    expands: bool
    """Whether a block of a matrix of another dtype than lhs is converted to scratch, once per
    group."""

    converts_slices: bool
    """Whether it is instead converted inside the matmul, one slice of K at a time."""

    slice_width: int
    """Columns of such a slice, in stored numbers (bytes for int4)."""

    unit: float
    """Value of 1 in the dtype to which registers convert stored numbers: 16 for float8 on chips
    that do not have float8_e4m3fn, otherwise 1."""

    packed: bool
    """Whether the matrices are int4, two columns per byte."""

    one_scale_per_row: bool
    """Whether each row of a matrix has a single scale, which multiplies the result."""

    block_shape: tuple[int, int]
    """(rows, columns) of a matrix that share a scale."""

    vmem: int
    """Bytes of VMEM that the compiler may use."""

    @property
    def step(self) -> int:
        """Columns of the result per matmul in the kernel."""
        return _STEP if self.columns % _STEP == 0 and not self.converts_slices else LANES

    def scale_block(self, scale: Shaped) -> tuple[int, int]:
        """Returns the shape of the scales of one group that a block reads.

        It is [Kb, columns], the scales of the block's columns, if each row of a matrix has its own.
        Otherwise it is all [Nb, Kb], because a block may be smaller than a block of scales.
        """
        _, Nb, Kb = scale.shape
        return (Kb, self.columns) if self.block_shape[0] == 1 else (Nb, Kb)


def choose_plan(
    chip: Chip,
    lhs: Shaped,
    rhs: Shaped,
    scale: Shaped | None,
    block_shape: tuple[int, int],
) -> Plan:
    """Chooses block sizes.

    A tile has about half as many rows as a group. The columns are divided into equal blocks, as
    wide as fit in VMEM, and the same number for each core. For small tiles the blocks are smaller,
    so that several copies are in flight.

    Raises:
      NotImplementedError: N or K is smaller than a register, scale blocks are neither one row nor a
        multiple of EXPANDED_ROWS rows, or the blocks do not fit in VMEM. The message has the sizes.
    """
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
    slice_width = (
        _UNSCALED_SLICE
        if scale is None or one_scale_per_row
        else block_shape[1] // (2 if packed else 1)
    )
    converts = rhs.dtype != lhs.dtype
    # Slices must be whole registers, or registers whole slices. So must the halves of int4.
    aligned = slice_width % LANES == 0 or slice_width in (32, 64)
    aligned = aligned and not (packed and K % (2 * LANES))
    converts_slices = converts and aligned and rows <= _SMALL_TILE_ROWS
    plan = Plan(
        rows=rows,
        columns=LANES,
        expands=converts and not converts_slices,
        converts_slices=converts_slices,
        slice_width=slice_width,
        unit=16.0 if rhs.dtype == FLOAT8 and not chip.float8 else 1.0,
        packed=packed,
        one_scale_per_row=one_scale_per_row,
        block_shape=block_shape,
        vmem=0,
    )
    blocks = {}
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
    if plan.expands:
        sizes["expanded matrix"] = tiled_bytes((plan.columns, K), lhs.dtype)
    if scale is not None:
        sizes["scales"] = 2 * tiled_bytes(plan.scale_block(scale), jnp.float32)
    return sizes
