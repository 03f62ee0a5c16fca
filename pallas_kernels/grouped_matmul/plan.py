"""How grouped_matmul's kernel is set, and what follows from that for a product of given shapes."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.block_quant.reference import FLOAT8

SCALE_BLOCK = 128
ATOM = 128  # bytes: a row of a swizzled tile
MULTIPLIERS = 2  # warpgroups that multiply
_PANEL_BYTES = 16 * 2**20  # of 50 MB of L2 cache
_EXTRA_SCALES = 32


@dataclasses.dataclass(frozen=True)
class Config:
    """How a block computes a tile of the result."""

    rows: int
    columns: int
    stages: int
    split: Literal["rows", "columns"]
    """What the two multiplying warpgroups share out."""
    slots: int = 1
    """Staging buffers of 64 rows a warpgroup: what is written at once."""
    panel: int | None = None
    """Row tiles that are visited for a column tile before the next column tile; None for as many
    as the L2 cache holds well beside the matrices that pass."""
    classes: tuple[int, ...] = ()
    """Rows that are copied of a tile: the least of these that holds its group's, else all."""
    copied_scales: bool = False
    """float8: the rows' scales come by TMA, for which they are transposed beforehand. Worth that
    kernel where there are many rows: read from where they are, they do not stay in the L1 cache."""
    early: bool = False
    """The block starts, and gets its barriers ready, while the kernel before it ends."""
    registers: tuple[int, int] = (232, 40)
    """Of a thread that multiplies, of one that copies."""
    blocks: int | None = None
    """Of the grid; None for one a multiprocessor."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is known when the kernel is traced."""

    config: Config
    M: int
    N: int
    K: int
    float8: bool
    matrices: int
    quantize: bool
    blocks: int
    on_gpu: bool
    """Not interpreted."""

    @property
    def dtype(self) -> Any:
        """Of what is multiplied."""
        return FLOAT8 if self.float8 else jnp.bfloat16

    @property
    def out_dtype(self) -> Any:
        return FLOAT8 if self.quantize else jnp.bfloat16

    @property
    def copied_scales(self) -> bool:
        return self.float8 and self.config.copied_scales

    @property
    def scale_rows(self) -> int:
        """That are copied: from a multiple of four on, and so many that 128 divides their bytes."""
        return self.config.rows + _EXTRA_SCALES

    @property
    def atom(self) -> int:
        """Elements of K that a swizzle atom holds."""
        return ATOM if self.float8 else ATOM // 2

    @property
    def steps(self) -> int:
        return self.K // self.atom

    @property
    def columns(self) -> int:
        """Of the result, in a tile."""
        return self.config.columns // self.matrices

    @property
    def column_tiles(self) -> int:
        return pl.cdiv(self.N, self.columns)

    @property
    def part(self) -> tuple[int, int]:
        """(rows, columns) of a tile that one warpgroup multiplies."""
        rows, columns = self.config.rows, self.config.columns
        return (rows // 2, columns) if self.config.split == "rows" else (rows, columns // 2)

    @property
    def scaled(self) -> int:
        """Columns of a warpgroup's part that always lie under one scale."""
        width = self.part[1] // self.matrices
        aligned = self.columns % SCALE_BLOCK == 0 and self.N % SCALE_BLOCK == 0
        whole = width == SCALE_BLOCK and aligned
        return width if whole else self.staged

    @property
    def staged(self) -> int:
        """Columns of a staging buffer. Stores start at even rows, or take them from the first on,
        so that 64 bytes a row suffice: TMA reads shared memory from multiples of 128."""
        if self.quantize:
            return self.part[1] // self.matrices
        return 32 if self.columns % 64 else 64

    @property
    def halves(self) -> bool:
        """Whether a block of a quantized result lies in both warpgroups' parts."""
        return self.quantize and self.config.split == "columns"

    @property
    def panel(self) -> int:
        tile_bytes = self.config.rows * self.steps * ATOM
        return self.config.panel or max(1, _PANEL_BYTES // tile_bytes)

    @property
    def copied_rows(self) -> tuple[int, ...]:
        """The classes, ascending; the last holds every tile's rows."""
        most = min(self.config.rows, self.M)
        return *(rows for rows in self.config.classes if rows < most), most

    @property
    def pieces(self) -> list[tuple[int, int, int, int]]:
        """Of a stage's columns: which matrix, from which column of the tile of the result, how
        many, to which row of the stage."""
        parts = 1 if self.config.split == "rows" else MULTIPLIERS
        width = self.part[1] // self.matrices
        if self.matrices == 1:
            parts, width = 1, self.columns
        return [
            (matrix, part * width, width, (part * self.matrices + matrix) * width)
            for part in range(parts)
            for matrix in range(self.matrices)
        ]

    @property
    def copies(self) -> int:
        """That fill a stage."""
        return 1 + len(self.pieces) + self.copied_scales

    def offsets(self, warpgroup: jax.Array) -> tuple[Any, Any]:
        """First row and column of a warpgroup's part of the tile."""
        rows, columns = self.part
        if self.config.split == "rows":
            return pl.multiple_of(warpgroup * jnp.int32(rows), 64), 0
        return 0, pl.multiple_of(warpgroup * jnp.int32(columns), 64)

    def out_column(self, warpgroup: jax.Array) -> Any:
        """First column of the result that a warpgroup's part gives, in the tile."""
        if self.config.split == "rows":
            return 0
        return pl.multiple_of(warpgroup * jnp.int32(self.part[1] // self.matrices), 64)


def check_shapes(config: Config, N: int, K: int, float8: bool, matrices: int = 1) -> None:
    """Raises NotImplementedError where ``config`` does not fit."""
    atom = ATOM if float8 else ATOM // 2
    columns = config.columns // matrices
    if K % atom or N % 64 or columns > N:
        raise NotImplementedError(
            f"a tile of {columns} columns takes at least as many, in multiples of 64, and"
            f" multiples of {atom} of K, got N {N} and K {K}"
        )
    if matrices > 1 and columns % (32 if config.split == "rows" else 128):
        raise NotImplementedError(
            f"two matrices take multiples of 32 or, split, of 128 columns, got {columns}"
        )
    if float8 and config.split == "rows" and config.rows != 128:
        raise NotImplementedError(f"float8 takes 64 rows a warpgroup, got {config.rows // 2}")


def quantizes(config: Config, N: int, matrices: int = 1) -> bool:
    """Whether each tile holds one block of 128 columns of the result, 64 rows a warpgroup."""
    rows = config.rows // 2 if config.split == "rows" else config.rows
    return rows == 64 and config.columns // matrices == SCALE_BLOCK and N % SCALE_BLOCK == 0
