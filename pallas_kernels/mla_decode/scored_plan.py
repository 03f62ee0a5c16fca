"""Tuning parameters of mla_decode's scored kernel, and the static values of a call."""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_kernels.mla_decode.float8_cache import LATENT, ROPE
from pallas_kernels.mla_decode.schedule import BLOCK
from pallas_kernels.mla_decode.scorer_registers import PIECE_BYTES

MAX_ROWS = 32
"""Query rows of a program."""

_SHARED_BYTES = 232448 - 10 * 1024  # of a program, less barriers and vectors
_MOST_STAGES = 12
# In the interpreter, who waits for a barrier must wait for all its phases. With eight stages each
# belongs to one warp of one scorer. On a GPU the scorers take turns.
_INTERPRETED_STAGES = 8


@dataclasses.dataclass(frozen=True)
class ScoredQueries:
    """Tuning parameters of the kernel for a float8 cache whose unpackers compute the scores.

    It takes any number of query rows, at most MAX_ROWS per program. It is the default for no more
    than that.
    """

    stages: int | None = None
    """Stages of the ring buffer of the cache's bytes, each a quarter of a page. At least 4, because
    the four warps of a scorer wait for each other. By default as many as fit, at most 12."""

    prefetch: int = 1
    """Key blocks between a page's prefetch into the L2 cache and its copy. 0 for no prefetch."""

    ahead: int | None = None
    """Operands of eight per block that a scorer loads before it unpacks the first one. The more,
    the sooner the ring's stage is free, and the more registers it takes. By default as many as
    spill none."""

    early: bool = True
    """Whether to launch before the preceding kernel has ended (programmatic dependent launch)."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static parameters of one call."""

    config: ScoredQueries

    M: int
    """Query rows per sequence, a multiple of 8."""

    queries: int
    heads: int
    scale: float

    max_pages: int
    """Width of the block table."""

    interpret: Any

    @property
    def gpu(self) -> bool:
        return self.interpret is None

    @property
    def tiles(self) -> int:
        """Programs that share the query rows of a sequence."""
        return -(-self.M // MAX_ROWS)

    @property
    def rows(self) -> int:
        """Query rows of a program: 8, 16 or 32. With 24, ptxas spills a register."""
        return next(n for n in (8, 16, 32) if n * self.tiles >= self.M)

    @property
    def stages(self) -> int:
        """Stages of the ring buffer.

        Raises:
          ValueError: it is too small for a block, or does not fit.
        """
        if not self.gpu:
            return _INTERPRETED_STAGES
        queries_and_p = 2 * self.rows * (LATENT + ROPE + 2 * BLOCK)
        room = (_SHARED_BYTES - queries_and_p - 2 * 2 * BLOCK * LATENT) // PIECE_BYTES
        stages = self.config.stages or min(room, _MOST_STAGES)
        if not 4 <= stages <= room:
            raise ValueError(f"stages: expected 4 to {room}, got {self.config}")
        return stages

    @property
    def ahead(self) -> int:
        """Operands that are loaded before the first one is unpacked."""
        return self.config.ahead or (4 if self.rows <= 16 else 3)

    @property
    def registers(self) -> tuple[int, int, int]:
        """Registers per thread of scorers, values and producer.

        Four warpgroups have 512 together.
        """
        return 152, 176, 24
