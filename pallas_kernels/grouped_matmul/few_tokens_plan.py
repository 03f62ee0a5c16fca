"""Tile configuration of the few-token kernel, the layout of its matrices, and their sizes.

The kernel computes ``out^T = W x^T``. A tile is a number of output features, which are rows of a
weight matrix, by all tokens of a group, at most 64. One K step is one TMA copy of a tile's weights:
64 or 128 bytes of each weight row. A *column block* is 64 bytes of a weight row: 64 columns of int8
and float8, 128 of int4.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from pallas_kernels.grouped_matmul.schedule import MULTIPROCESSORS, PEAK_SHARE, expected_groups

Format = Literal["int8", "int4", "float8"]

_TOKEN_WIDTHS = (8, 16, 32, 64)
_MAX_TOKENS_IN_ORDER = 32  # per tile; wider ones use wgmma
_MMA_TOKENS = 16
_SHARED_BYTES = 232448 - 1024  # of a CTA, less barriers and alignment
_MAX_STAGES = 32  # Mosaic supports no more barriers in an array


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile configuration."""

    warpgroups: int = 4
    """Number of consumer warpgroups (1, 2 or 4). Each computes 64 output features."""
    token_widths: tuple[int, ...] = (8, 16)
    """Widths of a tile in tokens that are compiled, ascending. A tile uses the narrowest one that
    holds its tokens."""
    k_warpgroups: int = 1
    """Number of warpgroups that share 64 output features, each with its own part of K (sliced-K).
    Used if there would be fewer tiles than multiprocessors."""
    split_k: int = 1
    """Number of K slices that are computed as separate tiles and summed by XLA in float32. Used if
    ``k_warpgroups`` still leaves too few tiles."""
    stages: int | None = None
    """Stages of the ring buffer. The default is the largest number that fits in shared memory."""
    tokens_in_order: bool = False
    """int8 only: whether the kernel reads the tokens as they are. Otherwise XLA first permutes
    their columns, in an extra kernel unless it is part of what computes the tokens. Pairs of
    neighbouring int4 would take a quarter more instructions, and float8 has not been timed."""

    @property
    def max_tokens(self) -> int:
        """Tokens per tile."""
        return self.token_widths[-1]

    def uses_wgmma(self, width: int) -> bool:
        """Returns whether tiles of ``width`` tokens use wgmma, which reads the tokens once for 64
        features. In other tiles each warp multiplies its own 16 features with mma.sync."""
        return width > _MMA_TOKENS and not self.tokens_in_order

    @property
    def features(self) -> int:
        """Output features per tile."""
        return 64 * (self.warpgroups // self.k_warpgroups)

    @property
    def partial_warpgroups(self) -> int:
        """Number of warpgroups whose partial sums another warpgroup reduces."""
        return self.warpgroups - self.warpgroups // self.k_warpgroups


@dataclasses.dataclass(frozen=True)
class Weights:
    """Layout of the matrices in memory, and their division into K steps."""

    format: Format
    N: int  # output features
    K: int
    scale_columns: int  # Columns of K that share a scale. K itself if each row has a single scale.
    scale_rows: int  # rows that share a scale: 1 for integers, a multiple of 64 for float8
    column_blocks: int
    """Number of column blocks in one K step (1 or 2): a copy is 64 or 128 bytes wide."""

    @classmethod
    def of(cls, format: Format, N: int, K: int, block_shape: tuple[int, int]) -> Weights:
        """Returns the layout of matrices [N, K] with one scale per ``block_shape``, or raises
        NotImplementedError."""
        block = 512 // (4 if format == "int4" else 8)
        rows, scale_columns = block_shape[0], min(block_shape[1], K)
        columns_fit = scale_columns == K or scale_columns % block == 0
        row_multiple = 64 if format == "float8" else 1
        rows_fit = rows % 64 == 0 if format == "float8" else rows == 1
        if K % block or N % 64 or not (columns_fit and rows_fit):
            raise NotImplementedError(
                f"takes K in {block}, N in 64, a scale for {row_multiple} rows and columns in"
                f" {block} or all, got {K=} {N=} {block_shape=}"
            )
        return cls(format, N, K, scale_columns, rows, 2 if K % (2 * block) == 0 else 1)

    @property
    def bits(self) -> int:
        return 4 if self.format == "int4" else 8

    @property
    def block_columns(self) -> int:
        """Columns of a column block."""
        return 512 // self.bits

    @property
    def blocks_per_scale(self) -> int:
        """Column blocks of a step that are summed before their scale is applied (1 or 2)."""
        two = 2 * self.block_columns
        share = self.scale_columns == self.K or self.scale_columns % two == 0
        return 2 if self.column_blocks == 2 and share else 1

    @property
    def is_scaled_last(self) -> bool:
        """Whether each row has a single scale, which multiplies the finished sum."""
        return self.scale_columns == self.K and self.scale_rows == 1

    @property
    def step_columns(self) -> int:
        """Columns of K per K step."""
        return self.column_blocks * self.block_columns

    @property
    def step_bytes(self) -> int:
        """Bytes of a weight row per K step."""
        return 64 * self.column_blocks

    @property
    def k_steps(self) -> int:
        """K steps of a tile that covers all of K."""
        return self.K // self.step_columns


def stages_that_fit(weights: Weights, config: Config) -> int:
    """Returns the number of ring stages that fit in shared memory."""
    weight_bytes = config.features * weights.step_bytes
    stage = config.k_warpgroups * (weight_bytes + config.max_tokens * weights.step_columns * 2)
    partial_sums = config.partial_warpgroups * 64 * config.max_tokens * 4
    return min((_SHARED_BYTES - partial_sums) // stage, _MAX_STAGES)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static sizes of one call."""

    weights: Weights
    config: Config
    M: int  # tokens of all groups
    matrices: int  # per group, all of one shape
    scales: int  # per row of a matrix
    ctas: int
    on_gpu: bool  # False in the interpreter

    def __post_init__(self) -> None:
        if self.config.features > self.weights.N:
            raise NotImplementedError(
                f"takes N of at least {self.config.features}, got {self.weights.N}"
            )
        if self.config.tokens_in_order and self.weights.format != "int8":
            raise NotImplementedError(f"takes tokens in order for int8, got {self.weights.format}")

    @property
    def stages(self) -> int:
        return self.config.stages or stages_that_fit(self.weights, self.config)

    @property
    def slots(self) -> int:
        """K steps in the ring buffer: one per stage and warpgroup that shares a tile."""
        return self.stages * self.config.k_warpgroups

    @property
    def feature_tiles(self) -> int:
        """Tiles along the features of a matrix."""
        return -(-self.weights.N // self.config.features)

    @property
    def fills(self) -> int:
        """Times that a stage is filled for one tile."""
        return -(-self.weights.k_steps // (self.config.k_warpgroups * self.config.split_k))

    @property
    def x_blocks(self) -> int:
        """Blocks of 64 columns of the tokens per K step."""
        return self.weights.step_columns // 64


def default_config(M: int, G: int, weights: Weights, matrices: int = 1) -> Config:
    """Chooses a configuration from the shapes, since the group sizes are unknown when compiling."""
    mean = -(-M // G)
    # Group sizes vary, relatively more if groups are small.
    largest = min(M, 4 * mean if mean <= 4 else 2 * mean)
    last = next((i for i, w in enumerate(_TOKEN_WIDTHS) if w >= largest), len(_TOKEN_WIDTHS) - 1)
    token_widths = _TOKEN_WIDTHS[max(last - 2, 0) : last + 1]
    # With four warpgroups there are too few registers for sums of 64 tokens and unpacked
    # weights, and tiles of three warpgroups rarely fill the last wave.
    wide = token_widths[-1] == 64
    max_features = 128 if wide and weights.format != "int8" else 256
    warpgroups = {features: 2 if wide and features < 256 else 4 for features in (256, 128, 64)}
    k_warpgroups = {
        features: 64 * warpgroups[features] // features
        for features in warpgroups
        if features <= min(max_features, weights.N)
    }
    k_steps = {width: max(1, weights.k_steps // shares) for width, shares in k_warpgroups.items()}
    row_bytes = {"weight_row_bytes": weights.K * weights.bits // 8, "token_bytes": 2 * weights.K}
    features, split_k = choose_tile_and_split_k(k_steps, M, G, matrices * weights.N, **row_bytes)
    in_order = weights.format == "int8" and token_widths[-1] <= _MAX_TOKENS_IN_ORDER
    tile = warpgroups[features], token_widths, k_warpgroups[features]
    return Config(*tile, split_k, tokens_in_order=in_order)


# ---- cost model: output features per tile, and K slices ------------------------------------------

# A matmul with few tokens takes as long as reading the matrices of the groups that have tokens, at
# the bandwidth of HBM, unless the tiles are spread so unevenly over the multiprocessors, or are so
# many and small, that the busiest multiprocessor takes longer. docs/kernels/grouped_matmul.md
# summarises the measurements behind the constants. Costs are in bytes that a multiprocessor's share
# of HBM bandwidth delivers in the same time: 32 KB per microsecond on an H200.
_TILE_COST = 96 * 1024  # prologue and epilogue of a tile
_SUM_COST = 16 * 1024  # launch of the kernel that sums the split-K results
_TOKEN_BYTE_COST = 0.3  # a byte of the tokens, which every tile reads from the L2 cache
_IMBALANCE = 0.15  # of a tile: the last tiles do not end together
_MAX_SPLIT_K = 8
_BETTER = 0.97  # a narrower tile or another slice of K must take less than this part of the time


def choose_tile_and_split_k(
    k_steps: Mapping[int, int], M: int, G: int, N: int, *, weight_row_bytes: int, token_bytes: int
) -> tuple[int, int]:
    """Chooses the output features per tile and the number of K slices of the few-token kernel, of
    tile widths with ``k_steps`` K steps each. A slice has at least two of them."""
    groups = expected_groups(M, G)

    def cost(choice: tuple[int, int]) -> float:
        width, slices = choice
        fraction = math.ceil(k_steps[width] / slices) / k_steps[width]
        tiles, tile_bytes = groups * -(-N // width) * slices, width * weight_row_bytes * fraction
        total = _read_time(tiles, tile_bytes, M / groups * token_bytes * fraction)
        total += _IMBALANCE * tile_bytes
        if slices > 1:  # float32 results are written and read, at twice HBM's bandwidth
            total += _SUM_COST + slices * 4 * M * N / MULTIPROCESSORS
        return total

    choices = (
        (width, slices)
        for slices in range(1, _MAX_SPLIT_K + 1)
        for width, steps in k_steps.items()
        if slices in _even_slices(steps, max(1, min(_MAX_SPLIT_K, steps // 2)))
    )
    best = next(choices)
    for choice in choices:
        if cost(choice) < _BETTER * cost(best):
            best = choice
    return best


def _read_time(tiles: float, tile_bytes: float, token_bytes: float) -> float:
    """Returns the time of tiles that each read so many bytes of a matrix and of the tokens."""
    waves, last = divmod(tiles, MULTIPROCESSORS)
    last_wave = max(last / MULTIPROCESSORS, 1 / PEAK_SHARE) * tile_bytes if last else 0
    reading = waves * tile_bytes + last_wave
    per_tile = tile_bytes / PEAK_SHARE + _TILE_COST + _TOKEN_BYTE_COST * token_bytes
    busiest = (waves + (last > 0)) * per_tile
    return max(reading, busiest)


def _even_slices(steps: int, most: int) -> set[int]:
    """Returns the numbers of slices, up to ``most``, that are equal except for a shorter last
    one."""
    return {math.ceil(steps / math.ceil(steps / slices)) for slices in range(1, most + 1)}
