"""The end of a sequence in the kernel for few query rows: merges two consumers, stores results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.hopper.branch import when
from pallas_kernels.hopper.math import LOG2E
from pallas_kernels.hopper.tiles import spread_columns
from pallas_kernels.hopper.warpgroup import meet, publish
from pallas_kernels.mla_decode import few_queries_registers as registers
from pallas_kernels.mla_decode.few_queries_ring import Rings, Stages
from pallas_kernels.mla_decode.float8_cache import LATENT
from pallas_kernels.mla_decode.work import Work

State = tuple[jax.Array, jax.Array, jax.Array]
"""O^T [512, N], running maximum [N] in base 2, and sums of exponentials [N], of one consumer."""


@dataclasses.dataclass(frozen=True, eq=False)
class Handover:
    """The exchange of results between two consumers.

    The one that did not process the sequence's last block hands over its results in the stages of
    its own last block, and the other one releases them. Until then its ring has no room for another
    block, so it cannot hand over twice before the first results are read.
    """

    rings: Rings
    memory: Any
    """Float32 [514, N] in shared memory for the interpreter, which cannot reinterpret bfloat16
    memory as float32. None on a GPU."""

    interpret: Any

    def give(self, wg: Any, block: Stages, state: State) -> None:
        """Stores a consumer's results in the stages of its last block."""
        acc, maximum, total = state
        meet(self.interpret)  # the matmuls of all four warps have read the block
        if self.memory is None:
            registers.write_handover(self.rings.refs_by_column(wg, block), acc, maximum, total)
        else:
            self.memory[pl.ds(0, LATENT)] = acc
            self.memory[LATENT], self.memory[LATENT + 1] = maximum, total
        self.rings.barriers.arrive(self.rings.handover(wg))

    def merge(self, other: Any, block: Stages, use: Any, state: State) -> State:
        """Returns results merged with those of the consumer ``other``, and releases its stages.

        Args:
          block: the stages of the other consumer's last block.
          use: number of mergers before this one.
        """
        acc, maximum, total = state
        self.rings.barriers.wait(self.rings.handover(other), use)
        stages = self.rings.refs_by_column(other, block)
        if self.memory is None:
            other_maximum, other_total = registers.read_handover_vectors(stages, acc.shape[1], 2)
        else:
            other_maximum, other_total = self.memory[LATENT], self.memory[LATENT + 1]
        new_maximum = jnp.maximum(maximum, other_maximum)
        own_factor, other_factor = (
            jnp.exp2(maximum - new_maximum),
            jnp.exp2(other_maximum - new_maximum),
        )
        if self.memory is None:
            acc = registers.add_handover(stages, acc, own_factor, other_factor)
        else:
            other_acc = self.memory[pl.ds(0, LATENT)]
            acc = acc * spread_columns(own_factor, LATENT) + other_acc * spread_columns(
                other_factor, LATENT
            )
        publish(self.interpret)
        for stage, _ in block:
            self.rings.barriers.arrive(self.rings.free(other, stage))
        return acc, new_maximum, total * own_factor + other_total * other_factor


@dataclasses.dataclass(frozen=True, eq=False)
class Results:
    """The kernel's outputs in global memory, see :func:`kernel_parts.results`."""

    out: Any
    lse: Any
    partial_out: Any
    partial_lse: Any

    rows: Callable[[], Any] | None = None
    """Returns the program's query rows, a ``pl.ds``. None if it has all."""

    swapped: bool = False
    """Whether O^T is in the order of :func:`registers.store` with ``swapped``."""

    def store(self, work: Work, b: Any, state: State, *, gpu: bool) -> None:
        """Stores a sequence's normalised output, or its partial output if it is split."""
        acc, maximum, total = state
        inverse = jnp.where(total > 0.0, 1.0 / total, 0.0)
        out = acc * spread_columns(inverse, LATENT)
        lse = (maximum + jnp.log(total) * LOG2E) * (1.0 / LOG2E)
        lse = jnp.where(total > 0.0, lse, jnp.full_like(lse, -jnp.inf))
        is_split = work.is_split(b)

        @when(jnp.logical_not(is_split))
        def _():
            rounded = out.astype(jnp.bfloat16)
            target = self._rows_of(self.out.at[b]), self._rows_of(self.lse.at[b])
            registers.store(*target, rounded, lse, gpu=gpu, swapped=self.swapped)

        @when(is_split)
        def _():
            partial = work.partial(b)
            target = (
                self._rows_of(self.partial_out.at[partial]),
                self._rows_of(self.partial_lse.at[partial]),
            )
            registers.store(*target, out, lse, gpu=gpu, swapped=self.swapped)

    def _rows_of(self, result: Any) -> Any:
        return result if self.rows is None else result.at[self.rows()]
