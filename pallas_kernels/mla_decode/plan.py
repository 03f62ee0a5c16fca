"""Tuning parameters of mla_decode's kernel for a bfloat16 cache, and static values of a call."""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_kernels.mla_decode.kernel_parts import TILE


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning parameters that do not change any result."""

    multicast: bool = True
    """Whether two programs of a sequence share its key blocks by TMA multicast."""

    early: bool = True
    """Whether to launch before the preceding kernel has ended (programmatic dependent launch)."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static parameters of one call."""

    config: Config

    M: int
    """Query rows per sequence."""

    queries: int
    heads: int
    scale: float

    max_pages: int
    """Width of the block table."""

    interpret: Any

    @property
    def rows(self) -> int:
        """Query rows of a tile, fewer than TILE if a sequence has fewer."""
        return min(TILE, self.M)

    @property
    def tiles(self) -> int:
        """Tiles per sequence."""
        return -(-self.M // TILE)

    @property
    def is_staged(self) -> bool:
        """Whether results go through shared memory: a copy can write part of a tile, a store of
        registers cannot."""
        return self.rows < TILE

    @property
    def pair(self) -> int:
        """Programs of a cluster: 2 if they share key blocks, or 1."""
        return 2 if self.tiles % 2 == 0 and self.config.multicast else 1

    @property
    def multicast_axis(self) -> str | None:
        """Cluster axis of the TMA multicast."""
        return "pair" if self.pair == 2 else None

    def mask(self, first_query_row: Any) -> dict[str, Any]:
        """Returns arguments of :func:`kernel_parts.masked_scores` that all blocks share."""
        return {
            "queries": self.queries, "heads": self.heads, "max_pages": self.max_pages,
            "first_query_row": first_query_row,
        }  # fmt: skip
