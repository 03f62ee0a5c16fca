"""The barriers of the kernel for a float8 cache. Slot s of shared memory has halves 0 and 1."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.warpgroup import meet
from pallas_kernels.mla_decode.consumer import ConsumerSignals
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

    # A consumer calls the following methods. The barriers count their uses themselves, so that
    # waits need not know the block or the sequence.

    def of_consumer(self, own: int) -> ConsumerSignals:
        """Returns the barriers of the consumer that scores the blocks in slot ``own``."""
        other = 1 - own
        return ConsumerSignals(
            wait_full=lambda half, n: plgpu.barrier_wait(self.kv_full(own, half)),
            max_ready=lambda: plgpu.barrier_arrive(self.max_ready.at[own]),
            p_ready=lambda: self.arrive_once(self.p_ready(own)),
            wait_other_max=lambda n: self.wait_max(other, n),
            wait_other_p=lambda n: self.wait_p(other, n),
            release=lambda slot: self.release(slot, own),
        )

    def use_of(self, block: Any, k: Any) -> Any:
        """Returns a number for the waits for a block. It is the ``k``-th of the consumer."""
        del block
        return k

    def wait_max(self, slot: Any, block: Any) -> None:
        del block
        plgpu.barrier_wait(self.max_ready.at[slot])

    def wait_p(self, slot: Any, block: Any) -> None:
        del block
        plgpu.barrier_wait(self.p_ready(slot))

    def release(self, slot: Any, half: int) -> None:
        self.arrive_once(self.kv_free(slot, half))

    def wait_queries(self, i: Any) -> None:
        del i
        plgpu.barrier_wait(self.q_full)

    def queries_read(self) -> None:
        plgpu.barrier_arrive(self.q_free)

    def sums_written(self) -> None:
        plgpu.barrier_arrive(self.sum_ready)

    def wait_sums(self, i: Any) -> None:
        del i
        plgpu.barrier_wait(self.sum_ready)

    def sums_read(self) -> None:
        plgpu.barrier_arrive(self.sum_free)

    def wait_sums_read(self, i: Any) -> None:
        del i
        plgpu.barrier_wait(self.sum_free)

    def arrive_once(self, barrier: Any) -> None:
        """Arrives once for the warpgroup, after all its threads have come here."""
        meet(self.interpret)
        plgpu.barrier_arrive(barrier)
