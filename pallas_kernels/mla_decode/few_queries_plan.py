"""Tuning parameters and shared memory layout of mla_decode's kernel for few query rows.

A key block of 64 cached tokens occupies consecutive stages of a ring buffer, one per column slice.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.mla_decode.float8_cache import LATENT, ROPE
from pallas_kernels.mla_decode.schedule import BLOCK

MAX_QUERY_ROWS = 32
_MOST_QUERIES_OF_TWO = 16  # query rows for which four warpgroups have enough registers
_WIDTH = LATENT + ROPE
_SHARED_BYTES = 232448 - 6 * 1024  # of a program, less barriers and vectors
_FLOAT8_WIDTH = 64  # columns per slice: the unpackers store single swizzled tiles


@dataclasses.dataclass(frozen=True)
class FewQueries:
    """Tuning parameters. ``warpgroups`` affects the order of summation, hence the rounding."""

    warpgroups: int | None = None
    """Number of consumer warpgroups: 1 or 2. By default 2, but 1 over a float8 cache with more than
    16 query rows, for which four warpgroups have too few registers."""

    width: int | None = None
    """Columns per slice of a key block: 64 or 192. By default whichever leaves less shared memory
    unused. A float8 cache takes 64."""

    stages: int | None = None
    """Number of stages of all ring buffers together. The default is the largest number that fits in
    shared memory."""

    early: bool = True
    """Whether to launch before the preceding kernel has ended (programmatic dependent launch)."""

    unpackers: int | None = None
    """Number of warpgroups that unpack a float8 cache: 1 or 2. By default 2."""


@dataclasses.dataclass(frozen=True)
class Slice:
    """Consecutive columns of a key block, which occupy one stage."""

    first: int
    """First column among the 512 latent and 64 rope columns of a token."""

    width: int
    """Number of columns."""

    @property
    def latents(self) -> int:
        """Number of latent columns, which come before the rope columns."""
        return max(0, min(self.width, LATENT - self.first))


@dataclasses.dataclass(frozen=True)
class Plan:
    """The values of :class:`FewQueries` and the layout for N query rows and a cache format."""

    warpgroups: int
    """Number of consumer warpgroups, each with a ring buffer of its own."""

    producers: int
    """Number of producer warpgroups: one that copies a bfloat16 cache, or the unpackers of a float8
    cache."""

    width: int
    """Columns per slice."""

    ring: int
    """Stages of each ring buffer."""

    slices: tuple[Slice, ...]
    """Slices of a key block, in the order of its stages. The rope keys of a float8 cache come
    first, because they are copied without registers: their stage is the first to be free."""

    registers: tuple[int, int] | None
    """Registers per thread of consumers and producers, or None to leave them as launched."""


def plan(N: int, config: FewQueries, *, float8: bool) -> Plan:
    """Plans shared memory and registers for N query rows.

    Raises:
      ValueError: a parameter is out of range, or a ring buffer has no room for a block.
      NotImplementedError: a width that float8 caches do not take.
    """
    W = config.warpgroups or (1 if float8 and N > _MOST_QUERIES_OF_TWO else 2)
    config = dataclasses.replace(config, warpgroups=W)
    if float8:
        if config.width not in (None, _FLOAT8_WIDTH):
            raise NotImplementedError(
                f"takes slices of {_FLOAT8_WIDTH} columns over a float8 cache, got {config}"
            )
        config = dataclasses.replace(config, width=_FLOAT8_WIDTH)
    width, ring = rings(N, config)
    slices = tuple(Slice(first, width) for first in range(0, _WIDTH, width))
    if not float8:
        return Plan(W, 1, width, ring, slices, (240, 24) if W == 2 else None)
    unpackers = config.unpackers or 2
    if unpackers not in (1, 2):
        raise ValueError(f"expected 1 or 2 unpackers, got {config}")
    # Three warpgroups have 504 registers together, per thread of each; four have 512.
    registers = {(1, 1): None, (1, 2): (232, 136), (2, 1): (192, 120), (2, 2): None}[W, unpackers]
    return Plan(W, unpackers, width, ring, (slices[-1], *slices[:-1]), registers)


def rings(N: int, config: FewQueries) -> tuple[int, int]:
    """Returns the columns per slice and the stages of each warpgroup's ring buffer."""
    W = config.warpgroups or 2
    if W not in (1, 2):
        raise ValueError(f"expected 1 or 2 warpgroups, got {config}")
    room = _SHARED_BYTES - N * 2 * (_WIDTH + W * 2 * BLOCK)
    candidates = []
    for width in (config.width,) if config.width else (64, 192):
        bytes_ = BLOCK * width * 2
        stages = room // bytes_ if config.stages is None else config.stages
        candidates.append((stages // W * bytes_, width, stages // W))
    _, width, stages = max(candidates)
    if stages * width < _WIDTH or room < W * stages * BLOCK * width * 2:
        raise ValueError(f"expected rings that fit and have room for a block each, got {config}")
    return width, stages
