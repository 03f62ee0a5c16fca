"""The barriers of the sparse attention kernel. Slot s of shared memory has halves 0 and 1."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pallas_kernels.hopper.barriers import Barriers
from pallas_kernels.hopper.warpgroup import WARPS
from pallas_kernels.mla_decode.row_tiles import SLOTS

Q_FREE, SUMS_READY = 0, 1
"""Indices in :attr:`Signals.by_both`."""


@dataclasses.dataclass(frozen=True, eq=False)
class Signals:
    """Barriers of a program, in the order of :meth:`scratch`.

    Use n of the first three is that of the program's n-th pair, of the others that of its n-th
    piece.
    """

    full: Barriers
    """Half h of slot s, at index 2 s + h, is filled."""

    free: Barriers
    """The consumer of half h has read it in slot s, at index 2 s + h."""

    ready: Barriers
    """Penalties, maximum and P of the block in slot s, at indices 3 s, 3 s + 1 and 3 s + 2."""

    q_full: Barriers
    """The queries of a piece are filled, by three copies."""

    by_both: Barriers
    """Both consumers have read the queries (Q_FREE), or have written their sums (SUMS_READY)."""

    @staticmethod
    def scratch(interpret: Any) -> list[Any]:
        """Returns the scratch types of the five arrays of barriers."""
        counts = (2 * SLOTS, 1), (2 * SLOTS, 1), (3 * SLOTS, 1), (1, 3), (2, 2)
        return [Barriers.scratch(count, arrivals, interpret) for count, arrivals in counts]

    @classmethod
    def of(cls, scratch: Sequence[Any], interpret: Any) -> Signals:
        return cls(*(Barriers(each, interpret) for each in scratch))

    def initialise(self, arrivals_when_full: int) -> None:
        """Initialises all barriers.

        Args:
          arrivals_when_full: arrivals per phase of ``full``.
        """
        self.full.initialise([arrivals_when_full] * (2 * SLOTS))
        self.free.initialise([WARPS] * (2 * SLOTS))
        self.ready.initialise([WARPS] * (3 * SLOTS))
        self.q_full.initialise([3])
        self.by_both.initialise([2 * WARPS] * 2)


def penalties_ready(slot: Any) -> Any:
    return 3 * slot


def max_ready(slot: Any) -> Any:
    return 3 * slot + 1


def p_ready(slot: Any) -> Any:
    return 3 * slot + 2
