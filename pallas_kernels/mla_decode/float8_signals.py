"""The barriers of the kernel for a float8 cache. Slot s of shared memory has halves 0 and 1."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.warpgroup import meet
from pallas_kernels.mla_decode.kernel_parts import SLOTS


@dataclasses.dataclass(frozen=True, eq=False)
class Signals:
    """Pallas' barriers of a program, in the order of :meth:`scratch`.

    They are few arrays, because each keeps its phases in one register per thread.
    """

    q_full: Any
    """The queries of a sequence are filled, by three copies."""

    max_ready: Any
    """The maximum of the block in each slot is in shared memory."""

    sequences: Any
    """Both consumers have read the queries, written their sums, or read them."""

    blocks: Any
    """Halves that are filled, halves that are free, and P that is ready."""

    interpret: Any

    @staticmethod
    def scratch() -> list[Any]:
        """Returns the scratch types of the four arrays of barriers."""
        return [
            plgpu.Barrier(num_arrivals=3),
            plgpu.Barrier(num_barriers=SLOTS),
            plgpu.Barrier(num_arrivals=2, num_barriers=3),
            plgpu.ClusterBarrier(collective_axes=("one",), num_barriers=5 * SLOTS),
        ]

    def kv_full(self, slot: Any, half: int) -> Any:
        return self.blocks.at[slot * 2 + half]

    def kv_free(self, slot: Any, half: int) -> Any:
        return self.blocks.at[4 + slot * 2 + half]

    def p_ready(self, slot: Any) -> Any:
        return self.blocks.at[8 + slot]

    @property
    def q_free(self) -> Any:
        return self.sequences.at[0]

    @property
    def sum_ready(self) -> Any:
        return self.sequences.at[1]

    @property
    def sum_free(self) -> Any:
        return self.sequences.at[2]

    def arrive_once(self, barrier: Any) -> None:
        """Arrives once for the warpgroup, after all its threads have come here."""
        meet(self.interpret)
        plgpu.barrier_arrive(barrier)
