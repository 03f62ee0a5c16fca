"""Tuning parameters of mla_decode's kernel of two programs that unpack a float8 cache together."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Float8Pairs:
    """Tuning parameters that do not change any result.

    The kernel takes any number of query rows and pads them to whole pairs of tiles. It is the
    default where the number of tiles is even.
    """

    early: bool = True
    """Whether to launch before the preceding kernel has ended (programmatic dependent launch)."""
