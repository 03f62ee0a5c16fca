"""Tile configuration of the kernel ``dense``: its parameters, the choice among them, and the sizes
that follow from a configuration and the shapes of a call.

All of it is known when the kernel is traced.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.block_quant.reference import FLOAT8
from pallas_kernels.grouped_matmul.schedule import (
    MULTIPROCESSORS,
    PEAK_SHARE,
    expected_groups,
    panel_height,
)

SCALE_BLOCK = 128
ATOM = 128  # bytes: a row of a swizzled tile
CONSUMERS = 2  # consumer warpgroups
CLUSTER_AXIS = "member"
_EXTRA_SCALES = 32
_COPY_HEIGHTS = (16, 32)
_MANY_TOKENS = 128  # rows per group, on average
_PAIRED_K, _PAIRED_ROWS = 4096, 2048
_CLEARLY = 0.92  # a narrower tile must take less than this part of a wider one's time


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning parameters of the kernel."""

    tile_m: int  # rows of lhs per tile
    tile_n: int
    """Rows of rhs per tile, over all matrices of a group. With two matrices, a tile has tile_n / 2
    rows of each and as many columns of the result."""
    stages: int  # Stages of the ring buffer. A stage holds the operands of one K step.
    consumer_split: Literal["m", "n"]
    """Dimension along which the two consumer warpgroups divide a tile."""
    staging_buffers: int = 1
    """Output buffers of 64 rows per consumer warpgroup. They are stored together."""
    few_rows: bool = False
    """Whether tiles are rarely full. Then all tiles along N of an M tile are neighbours, only as
    many rows are copied as a tile has, in a few steps, and the kernel launches before the preceding
    one has ended. Row scales are read from global memory. With many rows they would not stay in the
    L1 cache, so TMA copies them from a transposed array, which takes an extra kernel."""
    unrolled: bool = False
    """float8 with many rows only: whether the loop over K steps takes all stages of the ring in one
    iteration, and finds the scales of the matrices in shared memory, where the producer copies them
    once per tile. It takes fewer instructions, and 5 % less time. silu uses the GPU's approximate
    exponential and reciprocal, a tenth of the instructions."""
    paired: bool = False
    """``unrolled`` only: whether two CTAs form a cluster. They compute two M tiles of a group for
    the same columns, and each copies half of the matrices' rows for both (TMA multicast). Where a
    group has an odd number of M tiles, the last pair computes one of them twice."""


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
        if config.few_rows or steps % config.stages or steps % 4 or N <= SCALE_BLOCK:
            raise NotImplementedError(
                f"an unrolled loop takes many rows, multiples of {config.stages} and 4 K steps,"
                f" and more than {SCALE_BLOCK} columns, got {steps} steps, N {N} and {config}"
            )
    if config.paired and not (float8 and config.unrolled):
        raise NotImplementedError(f"pairs take an unrolled loop over float8, got {config}")
    if float8 and config.consumer_split == "m" and config.tile_m != 128:
        raise NotImplementedError(f"float8 takes 64 rows a warpgroup, got {config.tile_m // 2}")


# ---- the choice ----------------------------------------------------------------------------------

# Ordered by descending width: the first that N and K allow is chosen.
MANY_TOKENS_FLOAT8 = (
    Config(128, 192, 4, "m", staging_buffers=3),
    Config(128, 128, 5, "m", staging_buffers=2),
    Config(128, 64, 6, "m"),
)
UNROLLED_FLOAT8 = dataclasses.replace(MANY_TOKENS_FLOAT8[0], unrolled=True)
"""Preferred to them where N and K allow it, in pairs if :func:`pairs_pay`."""

MANY_TOKENS_BFLOAT16 = (Config(128, 256, 4, "m"), Config(128, 128, 6, "m"), Config(128, 64, 6, "m"))
FEW_TOKENS = {
    1: (
        Config(64, 256, 4, "n", staging_buffers=2, few_rows=True),
        Config(64, 128, 8, "n", few_rows=True),
        Config(128, 64, 6, "m", few_rows=True),
    ),
    2: (
        Config(64, 256, 4, "n", staging_buffers=2, few_rows=True),
        Config(128, 128, 6, "m", few_rows=True),
        Config(128, 64, 8, "m", few_rows=True),
    ),
}
"""By the number of matrices per group: two for SwiGLU."""


def choose_config(M: int, G: int, N: int, K: int, float8: bool, matrices: int = 1) -> Config:
    """Returns the configuration of ``dense`` that was the fastest on an H200 for the average number
    of rows per group, of those that N and K allow. SwiGLU has two matrices per group."""
    if M < _MANY_TOKENS * G:  # the widest tile, or a narrower one if multiprocessors would be idle
        supported = _supported(FEW_TOKENS[matrices], N, K, float8, matrices)
        by_width = {config.tile_n // matrices: config for config in supported}
        return by_width[choose_tile_width(tuple(by_width), M, G, N)]
    unrolled = dataclasses.replace(UNROLLED_FLOAT8, paired=pairs_pay(M, G, K))
    candidates = (unrolled, *MANY_TOKENS_FLOAT8) if float8 else MANY_TOKENS_BFLOAT16
    return _supported(candidates, N, K, float8, matrices)[0]


def choose_tile_width(widths: Sequence[int], M: int, G: int, N: int) -> int:
    """Chooses the width of a tile along N for :mod:`dense`, of ``widths`` in descending order: the
    widest, unless a narrower one balances the reads clearly better. The third is considered only if
    the second makes too few tiles to use all the bandwidth; otherwise it was never the best,
    because it reads the tokens more often."""
    groups = expected_groups(M, G)
    if len(widths) > 2 and groups * -(-N // widths[1]) * PEAK_SHARE >= MULTIPROCESSORS:
        widths = widths[:2]
    best, least = 0, math.inf
    for width in widths:
        tiles = groups * -(-N // width)
        read = math.ceil(tiles / MULTIPROCESSORS) * width
        if read < _CLEARLY * least:
            best, least = width, read
    return best


def pairs_pay(M: int, G: int, K: int) -> bool:
    """Returns whether ``Config.paired`` is faster for M rows in G groups. On an H100 pairs take 6 %
    less time with K 7168 and 4,096 rows per group, the same with 1,024 and 256 rows, and from 1 %
    less to 5 % more with K 2048. An odd number of M tiles costs a group half a tile on average, 64
    rows: 3 % of 2,048 rows."""
    return K >= _PAIRED_K and M >= _PAIRED_ROWS * G


def _supported(
    candidates: Sequence[Config], N: int, K: int, float8: bool, matrices: int
) -> list[Config]:
    """Returns the candidates that N and K allow, in their order, or raises the last one's
    refusal."""
    supported, refusals = [], []
    for config in candidates:
        try:
            check_shapes(config, N, K, float8, matrices)
            supported.append(config)
        except NotImplementedError as refusal:
            refusals.append(str(refusal))
    if not supported:
        raise NotImplementedError(refusals[-1])
    return supported


# ---- the sizes -----------------------------------------------------------------------------------


class RhsCopy(NamedTuple):
    """One copy of rows of a matrix to a stage."""

    matrix: int  # index of the matrix in its group
    column: int  # first row of the matrix, relative to the first column of the tile of the result
    width: int  # number of rows
    stage_row: int  # first row of the stage that it fills


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static sizes of one call."""

    config: Config
    M: int
    G: int
    N: int  # columns of the result, and rows of each matrix
    K: int
    float8: bool
    matrices: int  # per group: 1, or 2 for SwiGLU (gate and up)
    ctas: int
    on_gpu: bool  # False in the interpreter
    keeps_sums: bool = False  # bfloat16 SwiGLU only: whether the sums are results too

    @property
    def results(self) -> int:
        return 1 + self.matrices if self.keeps_sums else 1

    @property
    def dtype(self) -> Any:
        return FLOAT8 if self.float8 else jnp.bfloat16

    @property
    def tma_scales(self) -> bool:
        return self.float8 and not self.config.few_rows

    @property
    def unrolled(self) -> bool:
        return self.float8 and self.config.unrolled

    @property
    def cluster(self) -> int:
        """CTAs of a cluster. One tile of the schedule has an M tile for each of them."""
        return 2 if self.config.paired else 1

    @property
    def multicast_axis(self) -> str | None:
        """Cluster axis along which CTAs share the rows of the matrices."""
        return CLUSTER_AXIS if self.config.paired else None

    @property
    def panel(self) -> int:
        """M tiles that are computed for one N tile before the next N tile."""
        if self.config.few_rows:
            return 1
        row_bytes = self.k_steps * ATOM
        return panel_height(self.M, self.G, self.config.tile_m * self.cluster, row_bytes)

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
    def warpgroup_tile(self) -> tuple[int, int]:
        """Rows and columns of the accumulator of one consumer warpgroup."""
        rows, columns = self.config.tile_m, self.config.tile_n
        return (rows // 2, columns) if self.config.consumer_split == "m" else (rows, columns // 2)

    @property
    def warpgroup_out_columns(self) -> int:
        """Columns of the result that one consumer warpgroup computes."""
        return self.warpgroup_tile[1] // self.matrices

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
    def scale_copy_rows(self) -> int:
        """Row scales per TMA copy. A copy starts at a multiple of four rows, and its size must be
        a multiple of 128 bytes."""
        return self.config.tile_m + _EXTRA_SCALES

    @property
    def staging_width(self) -> int:
        """Columns of an output buffer. 64 bytes per row suffice: TMA reads shared memory from
        multiples of 128 bytes, and stores start at even rows or at row 0."""
        return 32 if self.out_columns % 64 else 64

    @property
    def lhs_heights(self) -> tuple[int, ...]:
        """Heights of the lhs copies, ascending. The smallest that covers a tile's rows is copied.
        The last covers any tile."""
        most = min(self.config.tile_m, self.M)
        heights = _COPY_HEIGHTS if self.config.few_rows else ()
        return *(rows for rows in heights if rows < most), most

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
