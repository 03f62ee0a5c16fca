"""A consumer warpgroup of the kernels with two consumers, over a float8 cache or selected tokens.

Each consumer computes the scores of every other key block and overwrites the block's rope keys with
P. Both accumulate P V, each for 256 of the 512 output columns. The running maximum is passed from
one to the other. The tensor cores compute half of a block's scores, then P V of the other
consumer's last block, then the other half.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.tiles import ACC, ROW
from pallas_kernels.hopper.warpgroup import meet, publish
from pallas_kernels.mla_decode.kernel_parts import SLACK, TILE
from pallas_kernels.mla_decode.rescale import scale_rows
from pallas_kernels.mla_decode.schedule import BLOCK
from pallas_kernels.mla_decode.tile_memory import HALF, TileMemory


@dataclasses.dataclass(frozen=True, eq=False)
class ConsumerSignals:
    """Waits and signals of a consumer. ``n`` is the use of the barrier."""

    wait_full: Callable[[int, Any], None]
    """Waits until the half of the own slot that is scored first (0) or second (1) is filled."""

    max_ready: Callable[[], None]
    """Signals the maximum of the own block."""

    p_ready: Callable[[], None]
    """Signals P of the own block."""

    wait_other_max: Callable[[Any], None]
    """Waits for the maximum of the other consumer's block: (n)."""

    wait_other_p: Callable[[Any], None]
    """Waits for P of the other consumer's block: (n)."""

    release: Callable[[int], None]
    """Releases this consumer's half of a slot: (slot)."""


@dataclasses.dataclass(frozen=True, eq=False)
class Consumer:
    """The computation of one consumer."""

    own: int
    """Parity of the blocks that it scores, their slot, and its half of the output."""

    memory: TileMemory
    signals: ConsumerSignals

    zero: Callable[[Any], Any]
    """Returns 0 for a block, such that the compiler cannot tell. Otherwise it would compute the
    matmuls' descriptors before the loop and keep them in registers."""

    interpret: Any

    hides_rope: bool = True
    """Whether ``zero`` also applies to the rope queries."""

    first_half: Any = 0
    """The half of the latents that is scored first: 0, or a scalar."""

    def add_scores(self, acc: Any, n: Any, halves: tuple[int, ...] = (0, 1)) -> None:
        """Starts adding the scores of its block n to ``acc``, over the latents' ``halves`` that are
        scored first (0) and second (1)."""
        memory, zero = self.memory, self.zero(n)
        slot = self.own + zero
        for step in halves:
            half = step
            if not isinstance(self.first_half, int):
                half = (step ^ self.first_half) + zero
            self.signals.wait_full(step, n)
            keys = memory.values.at[slot, half].transpose((1, 0))
            plgpu.wgmma(acc, memory.q_latent.at[half + zero], keys)
        if 1 in halves:
            q_rope = memory.q_rope.at[zero if self.hides_rope else 0]
            plgpu.wgmma(acc, q_rope, memory.rope.at[slot].transpose((1, 0)))

    def scores(self, n: Any, halves: tuple[int, ...] = (0, 1)) -> jax.Array:
        """Returns the scores of its block n."""

        def multiply(acc):
            self.add_scores(acc, n, halves)
            return acc[...]

        return pl.run_scoped(multiply, ACC((TILE, BLOCK), jnp.float32))

    def add_values(self, acc: jax.Array, slot: int) -> jax.Array:
        """Returns ``acc + P V`` of the block in a slot."""

        def multiply(acc_ref):
            if self.interpret is None:
                acc_ref[...] = acc
            plgpu.wgmma(acc_ref, self.memory.rope.at[slot], self.memory.values.at[slot, self.own])
            return acc_ref[...]

        added = pl.run_scoped(multiply, ACC((TILE, HALF), jnp.float32))
        return added if self.interpret is None else acc + added

    def rescaled(self, acc: jax.Array, n: Any) -> jax.Array:
        """Returns ``acc`` relative to the maximum of the other's block n, when its P is ready."""
        self.signals.wait_other_max(n)
        alpha = plgpu.layout_cast(self.memory.factors[1 - self.own], ROW)
        acc = scale_rows(acc, alpha, interpret=self.interpret)
        self.signals.wait_other_p(n)
        return acc

    def publish_p(
        self, maximum: jax.Array, before: jax.Array, exponents: Callable[[jax.Array], jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Publishes a block's maximum, factor and P.

        Args:
          maximum: of the block's scores, per row.
          before: running maximum before the block.
          exponents: returns the exponents of P relative to a maximum.

        Returns:
          P, the running maximum, and the factor that rescales earlier results to it.
        """
        running = jnp.where(maximum > before + SLACK, maximum, before)
        alpha = jnp.exp2(before - running)
        self.memory.maxima[self.own] = running
        self.memory.factors[self.own] = alpha
        self.signals.max_ready()
        p = jnp.exp2(exponents(running))
        meet(self.interpret)  # the matmuls of all four warps have read the rope keys
        self.memory.rope[self.own] = p.astype(jnp.bfloat16)
        publish(self.interpret)
        self.signals.p_ready()
        return p, running, alpha

    def add_block(
        self, n: Any, n_other: Any, acc: jax.Array, softmax: Callable[[jax.Array], tuple[Any, ...]]
    ) -> tuple[Any, ...]:
        """Computes the scores of its block n, meanwhile P V of the other's block, then P V of n.

        Args:
          softmax: publishes P of the scores, and returns the factor that rescales ``acc`` and the
            row sums' state.

        Returns:
          ``acc`` and the state.
        """
        own, other, memory = self.own, 1 - self.own, self.memory

        def overlapped(s_ref, acc_ref):
            self.add_scores(s_ref, n, halves=(0,))
            acc_ref[...] = self.rescaled(acc, n_other)
            plgpu.wgmma(acc_ref, memory.rope.at[other], memory.values.at[other, own])
            self.add_scores(s_ref, n, halves=(1,))
            # P V is complete: only the second half's latent and rope scores remain.
            plgpu.wgmma_wait(2)
            self.signals.release(other)
            softmax_results = softmax(plgpu.wgmma_accumulator_load(s_ref, wait_n=0))
            return acc_ref[...], *softmax_results

        if self.interpret is None:
            accumulators = ACC((TILE, BLOCK), jnp.float32), ACC((TILE, HALF), jnp.float32)
            acc, alpha, *state = pl.run_scoped(overlapped, *accumulators)
        else:  # the interpreter has no two accumulators at once
            s = self.scores(n, (0,))
            acc = self.add_values(self.rescaled(acc, n_other), other)
            s = s + self.scores(n, (1,))
            self.signals.release(other)
            alpha, *state = softmax(s)
        acc = self.add_values(scale_rows(acc, alpha, interpret=self.interpret), own)
        return acc, *state
