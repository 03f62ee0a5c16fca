"""Tuning parameters of mla_decode's kernel of two programs that unpack a float8 cache together."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Float8Pairs:
    """Tuning parameters that do not change any result.

    The kernel takes any number of query rows and pads them to whole pairs of tiles, so that it
    gains nothing unless they are more than one tile.
    """

    unpack_early: int = 4
    """Loads of eight per half of a key block that are unpacked before the slot is free. The more,
    the sooner a free slot is full again, and the more registers it takes."""

    scores_first: bool = True
    """Whether a consumer starts all scores of its block before P V of the block before, which then
    overlaps with the softmax. Otherwise P V comes between the halves of the scores."""

    prefetch: bool = True
    """Whether pages are prefetched into the L2 cache, one block before they are loaded."""

    early: bool = True
    """Whether to launch before the preceding kernel has ended (programmatic dependent launch)."""

    def __post_init__(self) -> None:
        if not 0 <= self.unpack_early <= 8:
            raise ValueError(f"unpack_early: expected 0 to 8, got {self.unpack_early}")
