"""Tuning parameters and shared memory layout of mla_decode's kernel for few query rows.

A key block of 64 cached tokens occupies consecutive stages of a ring buffer, one per column slice.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.mla_decode.float8_cache import LATENT, ROPE
from pallas_kernels.mla_decode.schedule import BLOCK

MAX_QUERY_ROWS = 32
_MOST_UNPACKED_TWICE = 16  # query rows up to which registers suffice for two unpackers
_WIDTH = LATENT + ROPE
_SHARED_BYTES = 232448 - 6 * 1024  # of a program, less barriers and vectors
_FLOAT8_WIDTH = 64  # columns per slice: the unpackers store single swizzled tiles


@dataclasses.dataclass(frozen=True)
class FewQueries:
    """Tuning parameters. ``warpgroups`` affects the order of summation, hence the rounding."""

    warpgroups: int = 2
    """Number of consumer warpgroups: 1 or 2."""

    width: int | None = None
    """Columns per slice of a key block: 64 or 192. By default whichever leaves less shared memory
    unused. A float8 cache takes 64."""

    stages: int | None = None
    """Stages of all ring buffers together. By default as many as fit in shared memory."""

    early: bool = True
    """Whether to launch before the preceding kernel has ended (programmatic dependent launch)."""

    unpackers: int | None = None
    """Number of warpgroups that unpack a float8 cache: 1, or one per consumer. By default one per
    consumer for up to 16 query rows."""


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
    """What a :class:`FewQueries` means for N query rows and one cache format."""

    warpgroups: int
    """Number of consumer warpgroups, each with a ring buffer of its own."""

    producers: int
    """Number of producer warpgroups. Producer p fills blocks p, p + producers, ... of a partition.
    They copy a bfloat16 cache, and unpack a float8 cache."""

    width: int
    """Columns per slice."""

    ring: int
    """Stages of each ring buffer."""

    slices: tuple[Slice, ...]
    """Slices of a key block, in the order of its stages. The rope keys of a float8 cache come
    first: their stage is the first to be free, and copying them takes longest."""

    registers: tuple[int, int] | None
    """Registers per thread of consumers and producers, or None to leave them as launched."""


def plan(N: int, config: FewQueries, *, float8: bool) -> Plan:
    """Plans shared memory and registers for N query rows.

    Raises:
      ValueError: a parameter is out of range, or a ring buffer has no room for a block.
    """
    W = config.warpgroups
    if float8:
        if config.width not in (None, _FLOAT8_WIDTH):
            raise ValueError(f"expected slices of {_FLOAT8_WIDTH} float8 columns, got {config}")
        config = dataclasses.replace(config, width=_FLOAT8_WIDTH)
    width, ring = rings(N, config)
    slices = tuple(Slice(first, width) for first in range(0, _WIDTH, width))
    if not float8:
        return Plan(W, 1, width, ring, slices, (240, 24) if W == 2 else None)
    unpackers = config.unpackers or (W if N <= _MOST_UNPACKED_TWICE else 1)
    if unpackers not in (1, W):
        raise ValueError(f"expected one unpacker, or one per consumer, got {config}")
    # The registers of all threads together are at most 65,536: 504 for a thread of each of three
    # warpgroups, 512 for four.
    registers = {(1, 1): None, (2, 1): (192, 120), (2, 2): None}[W, unpackers]
    return Plan(W, unpackers, width, ring, (slices[-1], *slices[:-1]), registers)


def rings(N: int, config: FewQueries) -> tuple[int, int]:
    """Returns the columns per slice and the stages of each warpgroup's ring buffer."""
    if config.warpgroups not in (1, 2):
        raise ValueError(f"expected 1 or 2 warpgroups, got {config}")
    room = _SHARED_BYTES - N * 2 * (_WIDTH + config.warpgroups * 2 * BLOCK)
    candidates = []
    for width in (config.width,) if config.width else (64, 192):
        bytes_ = BLOCK * width * 2
        stages = room // bytes_ if config.stages is None else config.stages
        candidates.append(
            (stages // config.warpgroups * bytes_, width, stages // config.warpgroups)
        )
    _, width, stages = max(candidates)
    if stages * width < _WIDTH or room < config.warpgroups * stages * BLOCK * width * 2:
        raise ValueError(f"expected rings that fit and have room for a block each, got {config}")
    return width, stages
