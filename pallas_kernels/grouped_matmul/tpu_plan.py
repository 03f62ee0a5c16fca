"""How large the TPU kernel's blocks are: the chip's VMEM decides, and the rows of a group."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.block_quant.reference import FLOAT8
from pallas_kernels.tpu import LANES, Chip, require_vmem, tiled_bytes

EXPANDED_ROWS = 128
"""Of a quantized matrix, at a time: as many as registers have lanes, where their scales lie."""

_ROWS = 16, 512
"""Of a tile, at least and at most: what registers hold in bfloat16, and enough to multiply with."""

_ROWS_OF_FLOAT32 = 128
"""At most: a product is six of bfloat16 parts there, which registers do not hold."""

_COLUMNS = 2048
"""Of a block, at most: rows are read once for each."""

_FEW = 64  # rows of a tile: up to it, reading matrices is all the time there is
_BYTES_OF_FEW = 4 * 2**20  # of a block of a matrix then, for nothing hides the first one's copy
_PART = 4 * LANES  # of K that is converted at once, where no scale says how much
_STEP = 256  # columns of one product in the kernel, whose sums lie beside the blocks

Shaped = jax.Array | jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Plan:
    """Of a product's blocks."""

    rows: int
    """Of a tile of lhs and of the result."""
    columns: int
    """Of the result in a block; rows of a matrix."""
    expands: bool
    """Whether matrices go to a scratch in the rows' dtype, for they have another."""
    in_parts: bool
    """Whether they are converted where they are multiplied instead, a part of K at a time."""
    part: int
    """Of K, in numbers as they are stored (int4: bytes)."""
    unit: float
    """Times what registers make of a stored number: the number."""
    packed: bool
    """Whether they are int4, two in a byte."""
    scale_a_row: bool
    """Whether a row of a matrix has one scale alone."""
    block_shape: tuple[int, int]
    """Under one scale."""
    vmem: int
    """Bytes that the compiler may use."""

    @property
    def step(self) -> int:
        """Columns of one product in the kernel."""
        return _STEP if self.columns % _STEP == 0 and not self.in_parts else LANES

    def scale_block(self, scale: Shaped) -> tuple[int, int]:
        """What the kernel has of a group's scales at once: those of its columns, [Kb, columns]; all
        [Nb, Kb] where one stands for many rows of a matrix, for a block may be of fewer."""
        _, Nb, Kb = scale.shape
        return (Kb, self.columns) if self.block_shape[0] == 1 else (Nb, Kb)


def choose_plan(
    chip: Chip,
    lhs: Shaped,
    rhs: Shaped,
    scale: Shaped | None,
    block_shape: tuple[int, int],
) -> Plan:
    """Tiles of half a group's rows; blocks of columns as wide as each other and as fit, as many for
    each core, and of few rows no larger ones than keep copies under way.

    Raises:
      NotImplementedError: N or K fill no register, scales of blocks that are neither of one row nor
        of whole EXPANDED_ROWS, or blocks that do not fit into VMEM; says which sizes.
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
    least, most = _ROWS
    if lhs.dtype == jnp.float32:
        most = _ROWS_OF_FLOAT32
    # Then about one visit in three is a tile that another group's rows share.
    half = 1 << max(M // (2 * G), 1).bit_length() - 1
    rows = min(M, most, max(least, half))
    scale_a_row = scale is not None and block_shape[0] == 1 and scale.shape[2] == 1
    part = _PART if scale is None or scale_a_row else block_shape[1] // (2 if packed else 1)
    other = rhs.dtype != lhs.dtype
    # Parts are of whole registers, or registers of whole parts; and so are int4's halves.
    whole = (part % LANES == 0 or part in (32, 64)) and not (packed and K % (2 * LANES))
    in_parts = other and whole and rows <= _FEW
    plan = Plan(
        rows=rows,
        columns=LANES,
        expands=other and not in_parts,
        in_parts=in_parts,
        part=part,
        unit=16.0 if rhs.dtype == FLOAT8 and not chip.float8 else 1.0,
        packed=packed,
        scale_a_row=scale_a_row,
        block_shape=block_shape,
        vmem=0,
    )
    blocks = {}
    for count in range(chip.cores, -(-N // LANES) + chip.cores, chip.cores):
        # Equal but for the last, which may reach past N.
        columns = -(-N // (count * LANES)) * LANES
        plan = dataclasses.replace(plan, columns=columns)
        blocks = block_bytes(plan, lhs, rhs, scale)
        large = plan.rows <= _FEW and blocks["matrix"] > 2 * _BYTES_OF_FEW
        if columns <= _COLUMNS and not large and sum(blocks.values()) <= chip.budget:
            break
    require_vmem(chip, blocks)
    spare = chip.vmem - chip.budget
    return dataclasses.replace(plan, vmem=sum(blocks.values()) + spare)


def block_bytes(plan: Plan, lhs: Shaped, rhs: Shaped, scale: Shaped | None) -> dict[str, int]:
    """Of VMEM, by name; two of each block that is copied."""
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
