"""How few_rows is set, how its matrices are stored, and what of both fits a block."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

_SHARED_BYTES = 232448 - 1024  # what a block may have, less barriers and alignment
_MOST_STAGES = 32  # Mosaic makes no more barriers of one kind


@dataclasses.dataclass(frozen=True)
class Config:
    """``warpgroups``, 1 to 4, of 64 matrix rows a tile; ``classes``, widths of x that a tile may
    take, of which it takes the narrowest that holds its rows; ``split`` warpgroups share 64 matrix
    rows, each by its part of K, so that matrices too few for all multiprocessors make more tiles;
    ``pieces`` of K, each a tile of its own whose float32 sums XLA adds up, where they still are too
    few; ``stages`` of copies under way, by default as many as fit."""

    warpgroups: int = 4
    classes: tuple[int, ...] = (8, 16)
    split: int = 1
    pieces: int = 1
    stages: int | None = None
    alone: int = 16
    """Widest x that each warp multiplies its 16 rows with on its own; wider ones take the product
    of a warpgroup, which reads x once for 64 rows."""
    hold: bool = True
    """Keeps unpacked weights in their registers until the product is done: ptxas before 13.3 may
    give them away earlier."""

    @property
    def most_rows(self) -> int:
        return self.classes[-1]

    @property
    def tile(self) -> int:
        """Matrix rows."""
        return 64 * (self.warpgroups // self.split)

    @property
    def helpers(self) -> int:
        """Warpgroups that hand their sums to another."""
        return self.warpgroups - self.warpgroups // self.split


@dataclasses.dataclass(frozen=True)
class Weights:
    """How matrices are stored, and what of K a product can take at a time."""

    format: Literal["int8", "int4", "float8"]
    N: int
    K: int
    group: int
    """Columns under one scale; K itself if a row has but one."""
    scale_rows: int
    parts: int
    """Of 64 bytes, in a step: one copy of a step is 64 or 128 bytes wide."""

    @classmethod
    def of(cls, format: Any, N: int, K: int, block_shape: tuple[int, int]) -> Weights:
        bits = 4 if format == "int4" else 8
        part = 512 // bits
        rows, group = block_shape[0], min(block_shape[1], K)
        whole = group == K or group % part == 0
        row_block = 64 if format == "float8" else 1
        blocked = rows % 64 == 0 if format == "float8" else rows == 1
        if K % part or N % 64 or not (whole and blocked):
            raise NotImplementedError(
                f"takes K in {part}, N in 64, a scale for {row_block} rows and columns in {part} or"
                f" all, got {K=} {N=} {block_shape=}"
            )
        return cls(format, N, K, group, rows, 2 if K % (2 * part) == 0 else 1)

    @property
    def bits(self) -> int:
        return 4 if self.format == "int4" else 8

    @property
    def part(self) -> int:
        """Columns in 64 bytes."""
        return 512 // self.bits

    @property
    def unit(self) -> int:
        """Parts that are summed before their scale is applied."""
        return (
            2
            if self.parts == 2 and (self.group == self.K or self.group % (2 * self.part) == 0)
            else 1
        )

    @property
    def scale_last(self) -> bool:
        return self.group == self.K and self.scale_rows == 1

    @property
    def steps(self) -> int:
        """Copies that bring all of K."""
        return self.K // (self.parts * self.part)


def stages_that_fit(weights: Weights, config: Config) -> int:
    columns = weights.parts * weights.part
    stage = config.split * (config.tile * 64 * weights.parts + config.most_rows * columns * 2)
    sums = config.helpers * 64 * config.most_rows * 4
    return min((_SHARED_BYTES - sums) // stage, _MOST_STAGES)
