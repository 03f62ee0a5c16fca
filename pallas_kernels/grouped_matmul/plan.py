"""Configuration of the Hopper grouped matmul, and the sizes that follow from it.

``Config`` holds the tuning parameters. ``Plan`` combines one with the shapes of a call and derives
tile sizes, K steps and copies. Both are static: they are known when the kernel is traced.
:mod:`buffers` has the memory that follows from a plan.

A group has one matrix, or two for SwiGLU (gate and up). With two, the tile holds tile_n / 2 rows of
each, so it computes tile_n / 2 columns of the result.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.block_quant.reference import FLOAT8

SCALE_BLOCK = 128
ATOM = 128  # bytes: a row of a swizzled tile
CONSUMERS = 2  # consumer warpgroups
CLUSTER_AXIS = "member"
_PANEL_BYTES = 16 * 2**20  # of 50 MB of L2 cache
_EXTRA_SCALES = 32
_PAIRED_K, _PAIRED_ROWS = 4096, 2048


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning parameters of the kernel."""

    tile_m: int
    """Rows of lhs per tile."""

    tile_n: int
    """Rows of rhs per tile, over all matrices of a group."""

    stages: int
    """Stages of the ring buffer. A stage holds the operands of one K step."""

    consumer_split: Literal["m", "n"]
    """Dimension along which the two consumer warpgroups divide a tile."""

    staging_buffers: int = 1
    """Output buffers of 64 rows per consumer warpgroup. They are stored together."""

    panel: int | None = None
    """Number of M tiles that are computed for one N tile before the next N tile. None takes a
    group's M tiles on average, in equal parts that stay in the L2 cache while the matrices stream
    through it. Tiles of other groups share no matrix with them."""

    copy_heights: tuple[int, ...] = ()
    """Heights of the lhs copies for tiles that are not full. The smallest that covers a tile's rows
    is copied, and all of tile_m if none does."""

    tma_scales: bool = False
    """float8 only: whether TMA copies the lhs scales, from a transposed copy made beforehand. That
    extra kernel pays off with many rows, for which scales that are read in place do not stay in the
    L1 cache."""

    unrolled: bool = False
    """float8 with ``tma_scales`` only: whether the loop over K steps takes all stages of the ring
    in one iteration, and finds the scales of the matrices in shared memory, where the producer
    copies them once per tile. It takes fewer instructions, and 5 % less time."""

    paired: bool = False
    """``unrolled`` only: whether two thread blocks form a cluster. They compute two M tiles of a
    group for the same columns, and each copies half of the matrices' rows for both (TMA multicast).
    Where a group has an odd number of M tiles, the last pair computes one of them twice."""

    approximate_silu: bool = False
    """grouped_swiglu only: whether silu uses the GPU's approximate exponential and reciprocal. It
    takes a tenth of the instructions."""

    early: bool = False
    """Whether to launch before the preceding kernel has ended (programmatic dependent launch). The
    block initialises its barriers meanwhile."""

    registers: tuple[int, int] = (232, 40)
    """Registers per thread of a consumer and of the producer warpgroup."""

    blocks: int | None = None
    """Thread blocks in the grid. None for one per multiprocessor."""


class RhsCopy(NamedTuple):
    """One copy of rows of a matrix to a stage."""

    matrix: int
    """Index of the matrix in its group."""

    column: int
    """First row of the matrix, relative to the first column of the tile of the result."""

    width: int
    """Number of rows."""

    stage_row: int
    """First row of the stage that it fills."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static parameters of one call."""

    config: Config
    M: int
    groups: int
    N: int
    """Columns of the result, and rows of each matrix."""
    K: int
    float8: bool
    matrices: int
    """Matrices per group: 1 or 2."""
    quantize: bool
    """Whether the result is float8 with one scale per 128 columns."""
    blocks: int
    """Thread blocks in the grid."""
    on_gpu: bool
    """False in the interpreter."""

    @property
    def dtype(self) -> Any:
        """Dtype of the operands."""
        return FLOAT8 if self.float8 else jnp.bfloat16

    @property
    def out_dtype(self) -> Any:
        return FLOAT8 if self.quantize else jnp.bfloat16

    @property
    def tma_scales(self) -> bool:
        return self.float8 and self.config.tma_scales

    @property
    def unrolled(self) -> bool:
        return self.float8 and self.config.unrolled

    @property
    def cluster(self) -> int:
        """Thread blocks of a cluster. One tile of the schedule has an M tile for each of them."""
        return 2 if self.config.paired else 1

    @property
    def multicast_axis(self) -> str | None:
        """Cluster axis along which blocks share the rows of the matrices."""
        return CLUSTER_AXIS if self.config.paired else None

    @property
    def clusters(self) -> int:
        return self.blocks // self.cluster

    @property
    def scale_copy_rows(self) -> int:
        """Row scales per TMA copy. A copy starts at a multiple of four rows, and its size must be
        a multiple of 128 bytes."""
        return self.config.tile_m + _EXTRA_SCALES

    @property
    def tile_k(self) -> int:
        """Columns of K per step: one swizzle atom."""
        return ATOM if self.float8 else ATOM // 2

    @property
    def k_steps(self) -> int:
        return self.K // self.tile_k

    @property
    def out_columns(self) -> int:
        """Columns of the result per tile."""
        return self.config.tile_n // self.matrices

    @property
    def n_tiles(self) -> int:
        """Tiles along N."""
        return pl.cdiv(self.N, self.out_columns)

    @property
    def warpgroup_tile(self) -> tuple[int, int]:
        """Rows and columns of the accumulator of one consumer warpgroup."""
        rows, columns = self.config.tile_m, self.config.tile_n
        return (rows // 2, columns) if self.config.consumer_split == "m" else (rows, columns // 2)

    @property
    def warpgroup_out_columns(self) -> int:
        """Columns of the result that one consumer warpgroup computes."""
        return self.warpgroup_tile[1] // self.matrices

    @property
    def scale_width(self) -> int:
        """Columns of an accumulator that always share one rhs scale."""
        width = self.warpgroup_out_columns
        aligned = self.out_columns % SCALE_BLOCK == 0 and self.N % SCALE_BLOCK == 0
        whole = width == SCALE_BLOCK and aligned
        return width if whole else self.staging_width

    def first_scale_block(self, column: jax.Array) -> jax.Array:
        """Returns the first of two blocks of 128 columns that contain those of a tile."""
        last = pl.cdiv(self.N, SCALE_BLOCK) - 2
        return jnp.minimum(lax.div(column, SCALE_BLOCK), last)

    @property
    def staging_width(self) -> int:
        """Columns of an output buffer. 64 bytes per row suffice: TMA reads shared memory from
        multiples of 128 bytes, and stores start at even rows or at row 0."""
        if self.quantize:
            return self.warpgroup_out_columns
        return 32 if self.out_columns % 64 else 64

    @property
    def splits_scale_block(self) -> bool:
        """Whether the two warpgroups share the scale blocks of a quantized result."""
        return self.quantize and self.config.consumer_split == "n"

    @property
    def panel(self) -> int:
        """M tiles of the schedule that are computed for one N tile before the next N tile."""
        rows = self.config.tile_m * self.cluster
        if self.config.panel:
            return max(1, self.config.panel // self.cluster)
        most = max(1, _PANEL_BYTES // (rows * self.k_steps * ATOM))
        tiles = pl.cdiv(self.M, self.groups * rows)
        return pl.cdiv(tiles, pl.cdiv(tiles, most))

    @property
    def copy_heights(self) -> tuple[int, ...]:
        """Heights of the lhs copies, ascending. The last covers any tile."""
        most = min(self.config.tile_m, self.M)
        return *(rows for rows in self.config.copy_heights if rows < most), most

    @property
    def rhs_copies(self) -> list[RhsCopy]:
        """Copies of rhs per stage. The rows that one warpgroup multiplies are adjacent."""
        shares = 1 if self.config.consumer_split == "m" else CONSUMERS
        width = self.warpgroup_out_columns
        if self.matrices == 1:
            shares, width = 1, self.out_columns
        return [
            RhsCopy(matrix, share * width, width, (share * self.matrices + matrix) * width)
            for share in range(shares)
            for matrix in range(self.matrices)
        ]

    @property
    def copies_per_stage(self) -> int:
        return 1 + len(self.rhs_copies) + self.tma_scales

    def stage_offset(self, warpgroup: jax.Array) -> tuple[Any, Any]:
        """Returns the first row of the lhs tile and of the rhs tile that a warpgroup multiplies."""
        rows, columns = self.warpgroup_tile
        if self.config.consumer_split == "m":
            return pl.multiple_of(warpgroup * jnp.int32(rows), 64), 0
        return 0, pl.multiple_of(warpgroup * jnp.int32(columns), 64)

    def out_column(self, warpgroup: jax.Array) -> Any:
        """Returns the first column, relative to the tile's, that a warpgroup computes."""
        if self.config.consumer_split == "m":
            return 0
        return pl.multiple_of(warpgroup * jnp.int32(self.warpgroup_out_columns), 64)


def check_shapes(config: Config, N: int, K: int, float8: bool, matrices: int = 1) -> None:
    """Raises NotImplementedError if the kernel does not support ``config`` for these shapes."""
    tile_k = ATOM if float8 else ATOM // 2
    columns = config.tile_n // matrices
    if K % tile_k or N % 64 or columns > N:
        raise NotImplementedError(
            f"a tile of {columns} columns takes at least as many, in multiples of 64, and"
            f" multiples of {tile_k} of K, got N {N} and K {K}"
        )
    if matrices > 1 and columns % (32 if config.consumer_split == "m" else 128):
        raise NotImplementedError(
            f"two matrices take multiples of 32 columns, or of 128 if split along N, got {columns}"
        )
    if float8 and config.unrolled:
        steps = K // tile_k
        if not config.tma_scales or steps % config.stages or steps % 4 or N <= SCALE_BLOCK:
            raise NotImplementedError(
                f"an unrolled loop takes tma_scales, multiples of {config.stages} and 4 K steps,"
                f" and more than {SCALE_BLOCK} columns, got {steps} steps, N {N} and {config}"
            )
    if config.paired and (not (float8 and config.unrolled) or config.copy_heights):
        raise NotImplementedError(
            f"pairs take an unrolled loop over float8 without copy_heights, got {config}"
        )
    if float8 and config.consumer_split == "m" and config.tile_m != 128:
        raise NotImplementedError(f"float8 takes 64 rows a warpgroup, got {config.tile_m // 2}")


def pairs_pay(M: int, G: int, K: int) -> bool:
    """Returns whether ``Config.paired`` is faster for M rows in G groups.

    On an H100 pairs take 6 % less time with K 7168 and 4,096 rows per group, the same with 1,024
    and 256 rows, and from 1 % less to 5 % more with K 2048. An odd number of M tiles costs a group
    half a tile on average, 64 rows: 3 % of 2,048 rows.
    """
    return K >= _PAIRED_K and M >= _PAIRED_ROWS * G


def quantizes(config: Config, N: int, matrices: int = 1) -> bool:
    """Returns whether the kernel can quantize its result.

    Each tile must hold exactly one block of 128 columns of the result, and 64 rows per warpgroup.
    """
    rows = config.tile_m // 2 if config.consumer_split == "m" else config.tile_m
    return rows == 64 and config.tile_n // matrices == SCALE_BLOCK and N % SCALE_BLOCK == 0
