"""The barriers of the kernel for a bfloat16 cache. Slot s of shared memory has halves 0 and 1."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.barriers import Barriers
from pallas_kernels.hopper.warpgroup import WARPS
from pallas_kernels.mla_decode.kernel_parts import SLOTS

Q_FREE, SUM_READY, SUM_FREE = range(3)
"""Indices in :attr:`Signals.sequences`."""


@dataclasses.dataclass(frozen=True, eq=False)
class Signals:
    """Barriers of a program, in the order of :meth:`scratch`."""

    q_full: Barriers
    """The queries of a sequence are filled, by three copies. Use i is the partition's i-th
    sequence."""

    blocks: Barriers
    """Barriers at :func:`kv_full`, :func:`max_ready` and :func:`p_ready`. Key block n of a
    partition is use n // 2 of its slot and of the slot's barriers."""

    sequences: Barriers
    """Both score warpgroups have read the queries (Q_FREE) or written their sums (SUM_READY), and
    both value warpgroups have read the sums (SUM_FREE). Use i is the partition's i-th sequence."""

    kv_free: Any
    """Half h of slot s, at index 2 s + h, has been read by the programs of the cluster."""

    @staticmethod
    def scratch(interpret: Any) -> list[Any]:
        """Returns the scratch types of the four arrays of barriers."""
        free = plgpu.ClusterBarrier(
            collective_axes=("pair",), num_arrivals=2, num_barriers=2 * SLOTS
        )
        counts = (1, 3), (5 * SLOTS, 1), (3, 2)
        return [*(Barriers.scratch(*count, interpret) for count in counts), free]

    @classmethod
    def of(cls, scratch: Sequence[Any], interpret: Any) -> Signals:
        *barriers, kv_free = scratch
        return cls(*(Barriers(each, interpret) for each in barriers), kv_free=kv_free)

    def initialise(self) -> None:
        """Initialises all barriers. Every thread calls it."""
        self.q_full.initialise([3])
        self.blocks.initialise([1] * (3 * SLOTS) + [WARPS] * (2 * SLOTS))
        self.sequences.initialise([2 * WARPS] * 3)


def kv_full(slot: Any, half: int) -> Any:
    """Index in :attr:`Signals.blocks` of a filled half; half 2 is the rope keys."""
    return slot * 3 + half


def max_ready(slot: Any) -> Any:
    return 3 * SLOTS + slot


def p_ready(slot: Any) -> Any:
    return 4 * SLOTS + slot
