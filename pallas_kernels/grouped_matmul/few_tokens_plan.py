"""Tile configuration and weight layout of the few-token matmul kernel, and its shared memory.

The kernel computes ``out^T = W x^T``. A tile is a number of output features, which are rows of a
weight matrix, by all tokens of a group, at most 64. One K step is one TMA copy of a tile's weights:
64 or 128 bytes of each weight row. A *column block* is 64 bytes of a weight row: 64 columns of int8
and float8, 128 of int4.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

_SHARED_BYTES = 232448 - 1024  # of a thread block, less barriers and alignment
_MAX_STAGES = 32  # Mosaic supports no more barriers in an array
_BARRIER_ARRAY_BYTES = 1024  # of barriers that a leader arrives at
SCALES_PER_COPY = 8
"""Scales of each row in one copy: 32 bytes, the least that the L2 cache reads from memory."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile configuration of the few-token kernel.

    No GPU has run ``early``, ``leader_barriers``, ``tma_scales``, ``finish_loads`` and
    ``tokens_in_order`` yet. They have been interpreted and compiled.
    """

    warpgroups: int = 4
    """Number of consumer warpgroups (1-4). Each computes 64 output features."""

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
    """Number of stages of the ring buffer. The default is the largest number that fits in shared
    memory."""

    max_mma_tokens: int = 16
    """Widest tile for which each warp multiplies its own 16 features with mma.sync. Wider tiles use
    wgmma, which reads the tokens once for 64 features."""

    early: bool = False
    """Whether to launch before the preceding kernel has ended (programmatic dependent launch)."""

    leader_barriers: bool = False
    """Whether one lane arrives at a barrier for its warp, and one thread for a copy. Otherwise all
    128 threads of a warpgroup arrive."""

    tma_scales: bool = False
    """Whether TMA copies the scales of several K steps to shared memory. Otherwise every thread
    loads its rows' scales from global memory, 4 bytes of each row and block of columns."""

    finish_loads: bool = False
    """Whether a stage is released only when everything that was loaded from it has been used. An
    arrival at a barrier does not wait for a load, so without it only the time that a copy takes
    keeps the copy from overwriting what has not been loaded yet. ``tma_scales`` implies it."""

    tokens_in_order: bool = False
    """Whether the kernel reads the tokens as they are. Otherwise XLA first permutes their columns,
    in a kernel of its own unless it is part of what computes the tokens. Takes no tiles wider than
    ``max_mma_tokens``."""

    keep_operands: bool = True
    """Whether to keep the unpacked weights in their registers until wgmma is complete. ptxas before
    13.3 may reuse the registers earlier."""

    @property
    def max_tokens(self) -> int:
        """Tokens per tile."""
        return self.token_widths[-1]

    def __post_init__(self) -> None:
        if self.tokens_in_order and self.max_tokens > self.max_mma_tokens:
            raise ValueError(
                f"tokens_in_order: expected tiles of at most {self.max_mma_tokens} tokens"
                f" (max_mma_tokens), got {self.max_tokens}"
            )

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

    format: Literal["int8", "int4", "float8"]

    N: int
    """Output features."""

    K: int

    scale_columns: int
    """Columns of K that share a scale. K itself if each row has a single scale."""

    scale_rows: int
    """Rows that share a scale: 1 for integers, a multiple of 64 for float8."""

    column_blocks: int
    """Number of column blocks in one K step (1 or 2): a copy is 64 or 128 bytes wide."""

    @classmethod
    def of(cls, format: Any, N: int, K: int, block_shape: tuple[int, int]) -> Weights:
        """Returns the layout of matrices [N, K] with one scale per ``block_shape``.

        Raises:
          NotImplementedError: the kernel does not support the widths or the scale blocks.
        """
        bits = 4 if format == "int4" else 8
        block = 512 // bits
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
    def k_steps(self) -> int:
        """K steps of a tile that covers all of K."""
        return self.K // self.step_columns

    @property
    def scales_per_step(self) -> int:
        """Scales of a row per K step (1 or 2)."""
        return self.column_blocks // self.blocks_per_scale

    def check_tma_scales(self) -> None:
        """Raises NotImplementedError if TMA cannot copy the scales, or if there are few of them."""
        blocks = -(-self.K // self.scale_columns)
        is_per_step = self.scale_rows == 1 and self.scale_columns <= self.step_columns
        if not is_per_step or blocks % 4 or blocks < SCALES_PER_COPY:
            raise NotImplementedError(
                f"copies scales of single rows and at most {self.step_columns} columns,"
                f" {SCALES_PER_COPY} of a row or more in multiples of 4, got {blocks} of"
                f" {self.scale_rows} x {self.scale_columns}"
            )


def stages_that_fit(weights: Weights, config: Config) -> int:
    """Returns the number of ring stages that fit in shared memory."""
    columns = weights.step_columns
    weight_bytes = config.features * 64 * weights.column_blocks
    stage = config.k_warpgroups * (weight_bytes + config.max_tokens * columns * 2)
    partial_sums = config.partial_warpgroups * 64 * config.max_tokens * 4
    available = _SHARED_BYTES - partial_sums - _BARRIER_ARRAY_BYTES * config.leader_barriers
    stages = min(available // stage, _MAX_STAGES)
    if config.tma_scales:
        copy = config.features * SCALES_PER_COPY * 4
        while stages * stage + scale_stages(weights, config, stages) * copy > available:
            stages -= 1
    return stages


def fills_per_tile(weights: Weights, config: Config) -> int:
    """Returns how often a stage is filled for one tile."""
    return -(-weights.k_steps // (config.k_warpgroups * config.split_k))


def fills_per_scale_copy(weights: Weights, config: Config) -> int:
    """Returns how many consecutive fills take their scales from one copy."""
    return SCALES_PER_COPY // (config.k_warpgroups * weights.scales_per_step)


def scale_stages(weights: Weights, config: Config, stages: int) -> int:
    """Returns the number of buffers for copies of scales that need no barrier to be released.

    The copy for some fills begins when the first one's stage is empty, so that the fills up to
    ``stages`` before it have been read. The copy that it overwrites must belong to these.
    """
    fills, per_copy = fills_per_tile(weights, config), fills_per_scale_copy(weights, config)
    of_tile = [min(per_copy, fills - first) for first in range(0, fills, per_copy)]
    count = 1
    while True:
        # Fills of the copies between one and the copy that overwrites it; the least of all copies.
        between = [
            sum(of_tile[(first + i) % len(of_tile)] for i in range(1, count))
            for first in range(len(of_tile))
        ]
        if min(between) >= stages - 1:
            return count
        count += 1


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static parameters of one call."""

    weights: Weights
    config: Config
    M: int
    """Tokens of all groups."""

    matrices: int
    """Matrices per group, all of one shape."""

    scales: int
    """Scales per row of a matrix."""

    thread_blocks: int
    """Thread blocks in the grid."""

    on_gpu: bool
    """False in the interpreter."""

    def __post_init__(self) -> None:
        if self.config.features > self.weights.N:
            raise NotImplementedError(
                f"takes N of at least {self.config.features}, got {self.weights.N}"
            )
        if self.config.tma_scales:
            self.weights.check_tma_scales()

    @property
    def consumers(self) -> int:
        """Consumer warpgroups."""
        return self.config.warpgroups

    @property
    def leads(self) -> bool:
        """Whether leaders arrive at barriers. The interpreter has only Pallas' own barriers."""
        return self.config.leader_barriers and self.on_gpu

    @property
    def finishes_loads(self) -> bool:
        """Whether stages are released when what was loaded from them has been used."""
        return self.config.finish_loads or self.config.tma_scales

    @property
    def stages(self) -> int:
        """Stages of the ring buffer."""
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
        return fills_per_tile(self.weights, self.config)

    @property
    def fills_per_scale_copy(self) -> int:
        """Consecutive fills whose scales are copied together."""
        return fills_per_scale_copy(self.weights, self.config)

    @property
    def scale_copies(self) -> int:
        """Copies of scales for one tile."""
        return -(-self.fills // self.fills_per_scale_copy)

    @property
    def scale_stages(self) -> int:
        """Buffers for copies of scales."""
        return scale_stages(self.weights, self.config, self.stages)

    def first_scale(self, k_slice: Any, copy: Any) -> Any:
        """Returns the index of the first scale of each row in a tile's ``copy``-th copy."""
        fill = k_slice * self.fills + copy * self.fills_per_scale_copy
        first = fill * (self.config.k_warpgroups * self.weights.scales_per_step)
        return jnp.minimum(first, self.scales - SCALES_PER_COPY)

    @property
    def k_divides_evenly(self) -> bool:
        """Whether no warpgroup takes a K step past the end."""
        steps = self.fills * self.config.k_warpgroups * self.config.split_k
        return steps == self.weights.k_steps

    @property
    def step_columns(self) -> int:
        """Columns of K per K step."""
        return self.weights.step_columns

    @property
    def step_bytes(self) -> int:
        """Bytes of a weight row per K step."""
        return 64 * self.weights.column_blocks

    @property
    def copies_per_step(self) -> int:
        """TMA copies of weights and tokens per K step."""
        return 1 + (self.x_blocks if self.config.tokens_in_order else 1)

    @property
    def x_blocks(self) -> int:
        """Blocks of 64 columns of the tokens per K step."""
        return self.step_columns // 64
