"""The barriers of the kernel of two programs that unpack a float8 cache together.

Key block n of a partition is use n // 2 of its slot and of the slot's barriers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.barriers import Barriers
from pallas_kernels.hopper.warpgroup import WARPS
from pallas_kernels.mla_decode.consumer import ConsumerSignals
from pallas_kernels.mla_decode.kernel_parts import SLOTS

Q_FREE, SUM_READY, SUM_FREE = range(3)
"""Indices in :attr:`PairSignals.sequences`."""


@dataclasses.dataclass(frozen=True, eq=False)
class PairSignals:
    """Barriers of a program, in the order of :meth:`scratch`. Slot s has halves 0 and 1."""

    q_full: Barriers
    """The queries of a sequence are filled, by three copies. Use i is the partition's i-th
    sequence."""

    blocks: Barriers
    """Barriers at :func:`kv_full`, :func:`max_ready` and :func:`p_ready`."""

    sequences: Barriers
    """Both consumers have read the queries (Q_FREE), or have written (SUM_READY) or read (SUM_FREE)
    their sums. Use i is the partition's i-th sequence."""

    free: Barriers
    """Half h of slot s has been read by that consumer of both programs, see :func:`kv_free`."""

    program: Any
    """The program's number in its pair: the half of each block that it unpacks."""

    @staticmethod
    def scratch(interpret: Any) -> list[Any]:
        """Returns the scratch types of the four arrays of barriers."""
        counts = (1, 3), (5 * SLOTS, 1), (3, 2)
        own = [Barriers.scratch(*count, interpret) for count in counts]
        return [*own, Barriers.scratch(2 * SLOTS, 1, interpret, "pair")]

    @classmethod
    def of(cls, scratch: Sequence[Any], program: Any, interpret: Any) -> PairSignals:
        q_full, blocks, sequences, free = (Barriers(each, interpret) for each in scratch)
        return cls(q_full, blocks, sequences, free, program)

    @property
    def interpret(self) -> Any:
        return self.q_full.interpret

    def initialise(self) -> None:
        """Initialises all barriers. Every thread calls it."""
        self.q_full.initialise([3], cluster=False)
        halves_and_rope = [WARPS, WARPS, 1]
        self.blocks.initialise(halves_and_rope * SLOTS + [WARPS] * (2 * SLOTS), cluster=False)
        self.sequences.initialise([2 * WARPS] * 3, cluster=False)
        self.free.initialise([2 * WARPS] * (2 * SLOTS))

    def of_consumer(self, own: int) -> ConsumerSignals:
        """Returns the barriers of the consumer that scores the blocks in slot ``own``."""
        other = 1 - own

        def wait_full(step: int, use: Any) -> None:
            zero = lax.shift_right_logical(use, jnp.int32(24))  # so that no address is kept
            half = (self.program ^ step) + zero  # the other program's half comes second
            self.blocks.wait(kv_full(own, half), use)
            if step:
                self.blocks.wait(kv_full(own, 2), use)

        return ConsumerSignals(
            wait_full=wait_full,
            max_ready=lambda: self.blocks.arrive(max_ready(own)),
            p_ready=lambda: self.blocks.arrive(p_ready(own)),
            # Blocks before the own one: if they are in slot 1, of the use before.
            wait_other_max=lambda use: self.blocks.wait(max_ready(other), use - other),
            wait_other_p=lambda use: self.blocks.wait(p_ready(other), use - other),
            release=lambda slot: self.release(slot, own),
        )

    def use_of(self, block: Any, k: Any) -> Any:
        """Returns the use of a block's slot."""
        del k
        return lax.shift_right_logical(block, jnp.int32(1))

    def wait_max(self, slot: Any, block: Any) -> None:
        self.blocks.wait(max_ready(slot), self.use_of(block, None))

    def wait_p(self, slot: Any, block: Any) -> None:
        self.blocks.wait(p_ready(slot), self.use_of(block, None))

    def release(self, slot: Any, half: int) -> None:
        self.free.arrive(kv_free(slot, half), programs=2)

    def wait_queries(self, i: Any) -> None:
        self.q_full.wait(0, i)

    def queries_read(self) -> None:
        self.sequences.arrive(Q_FREE)

    def sums_written(self) -> None:
        self.sequences.arrive(SUM_READY)

    def wait_sums(self, i: Any) -> None:
        self.sequences.wait(SUM_READY, i)

    def sums_read(self) -> None:
        self.sequences.arrive(SUM_FREE)

    def wait_sums_read(self, i: Any) -> None:
        self.sequences.wait(SUM_FREE, i)


def kv_full(slot: Any, half: Any) -> Any:
    """Index in :attr:`PairSignals.blocks` of a filled half; half 2 is the rope keys."""
    return slot * 3 + half


def max_ready(slot: Any) -> Any:
    return 3 * SLOTS + slot


def p_ready(slot: Any) -> Any:
    return 4 * SLOTS + slot


def kv_free(slot: Any, half: Any) -> Any:
    """Index in :attr:`PairSignals.free`. The slots of a half are consecutive."""
    return half * SLOTS + slot
