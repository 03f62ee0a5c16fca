"""A consumer warpgroup of the kernels for a float8 cache and tiles of 64 query rows.

It computes the scores of every other key block of a partition, and P V of all of them for half of
the output columns (:mod:`consumer`). At a sequence's end the two consumers merge their sums, and
each stores its half of the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.branch import cond, when
from pallas_kernels.hopper.math import LOG2E, NO_SCORE
from pallas_kernels.hopper.tiles import ROW, WGMMA, row_vector
from pallas_kernels.mla_decode.consumer import Consumer
from pallas_kernels.mla_decode.epilogue import Part, TileResults, load_sums, merge_sums
from pallas_kernels.mla_decode.kernel_parts import TILE, masked_scores
from pallas_kernels.mla_decode.rescale import scale_rows
from pallas_kernels.mla_decode.schedule import BLOCK
from pallas_kernels.mla_decode.tile_memory import HALF, TileMemory
from pallas_kernels.mla_decode.work import Work


def attend_to_blocks(
    own: int,
    memory: TileMemory,
    signals: Any,
    work: Work,
    bounds: Callable[[], tuple[Any, Any, Any]],
    outputs: TileResults,
    *,
    queries: int,
    heads: int,
    scale: float,
    staged: bool = True,
    few_registers: bool = False,
    first_half: Any = 0,
) -> None:
    """Runs a consumer over all key blocks of a partition.

    Args:
      own: parity of the blocks that it scores, and their slot.
      signals: the kernel's barriers, :class:`float8_signals.Signals` or
        :class:`float8_pairs_signals.PairSignals`.
      bounds: returns the partition's first and last sequence, and their number.
      staged: whether results are copied from shared memory. Otherwise each thread stores its own.
      few_registers: whether row sums follow the running maximum as the accumulator does, where
        otherwise their own maximum is kept, and the partition is read again for each sequence.
      first_half: the half of the latents that is filled first, and scored first.
    """
    interpret, other = signals.interpret, 1 - own
    max_pages = work.tables.shape[1]
    mask: Any = {
        "queries": queries, "heads": heads, "max_pages": max_pages,
        "first_query_row": outputs.first_row,
    }  # fmt: skip

    consumer = Consumer(
        own,
        memory,
        signals.of_consumer(own),
        lambda n: lax.shift_right_logical(n, jnp.int32(24)),
        interpret,
        hides_rope=False,
        first_half=first_half,
    )

    def softmax(s, before, length, block, sums):
        """Publishes P, the maximum and its factor; returns (factor, row sums' state)."""
        fully_visible = length - (queries - 1)  # tokens that every query sees
        fully_visible = jnp.minimum(fully_visible, max_pages * BLOCK)
        s = cond(
            (block + 1) * BLOCK <= fully_visible,
            lambda: s,
            lambda: masked_scores(s, length, block, **mask),
        )
        maximum = s.max(axis=1) * (scale * LOG2E)
        p, running, alpha = consumer.publish_p(
            maximum,
            before,
            lambda running: s * (scale * LOG2E) - lax.broadcast_in_dim(running, (TILE, BLOCK), [0]),
        )
        if few_registers:
            return alpha, sums[0] * alpha + p.sum(axis=1)
        own_max, total = sums
        total = total * jnp.exp2(own_max - running) + p.sum(axis=1)
        return alpha, running, total

    def run_segment(i, done):
        _, length, begin, count = work.segment_and_length(i, *bounds()[:2])
        first = (own + done) & 1
        own_count = lax.shift_right_logical(jnp.maximum(count - first + 1, 0), jnp.int32(1))
        zeros: Any = plgpu.layout_cast(jnp.full((TILE, HALF), 0.0, jnp.float32), WGMMA)
        initial = zeros, row_vector(NO_SCORE), row_vector(0.0)
        if few_registers:
            initial = zeros, row_vector(0.0)
        signals.wait_queries(i)

        def first_block():
            """Processes the segment's first block, if this warpgroup scores it."""
            s = consumer.scores(signals.use_of(done, done))

            @when(done >= 1)
            def _():
                signals.wait_max(other, done - 1)

            acc, *sums = initial
            sums = softmax(s, row_vector(NO_SCORE), length, begin, sums)[1:]
            return finish_last(consumer.add_values(acc, own), count > 1), *sums

        def finish_last(acc, more):
            @when(more)
            def _():
                signals.release(own, own)

            return acc

        def add_block(k, carry):
            """Computes the scores of block j, P V of j - 1 meanwhile, then P V of j."""
            acc, *sums = carry
            j = first + 2 * k

            def softmax_of(s):
                before, state = plgpu.layout_cast(memory.maxima[other], ROW), sums
                if few_registers:
                    state = [sums[0] * plgpu.layout_cast(memory.factors[other], ROW)]
                return softmax(s, before, length, begin + j, state)

            n = signals.use_of(done + j, k)
            acc, *sums = consumer.add_block(n, n, acc, softmax_of)
            return finish_last(acc, j + 1 < count), *sums

        carry = cond(first == 0, first_block, lambda: initial)
        carry = lax.fori_loop(1 - first, own_count, add_block, carry)
        acc, *sums = carry
        signals.queries_read()

        def add_last():
            """Adds P V of the segment's last block, if the other warpgroup scored it."""
            signals.wait_p(other, done + count - 1)
            alpha = plgpu.layout_cast(memory.factors[other], ROW)
            added = consumer.add_values(scale_rows(acc, alpha, interpret=interpret), other)
            return (added, sums[0] * alpha) if few_registers else added

        slot = (done + count - 1) & 1
        if few_registers:
            acc, total = cond(slot == own, lambda: (acc, sums[0]), add_last)
            sums = plgpu.layout_cast(memory.maxima[slot], ROW), total
        else:
            acc = cond(slot == own, lambda: acc, add_last)
        finish_segment(i, bounds()[0] + i, slot, acc, *sums)
        return done + count

    def finish_segment(i, b, slot, acc, own_max, own_sum):
        @when(i > 0)
        def _():
            signals.wait_sums_read(i - 1)

        memory.sum_maxima[own], memory.sums[own] = own_max, own_sum
        signals.sums_written()
        signals.wait_sums(i)
        maxima, sums = load_sums(memory.sum_maxima, memory.sums)
        signals.sums_read()
        maximum, total = merge_sums(maxima, sums)
        inverse = jnp.where(total > 0.0, 1.0 / total, 0.0)
        acc = acc * lax.broadcast_in_dim(inverse, (TILE, HALF), [0])
        segments = work.segments(b)

        @when(own == 0)
        def _():
            outputs.stage_lse(maximum, total)

        # Staged in the half of the last block that only this warpgroup reads.
        staging = functools.partial(lambda slot, m: memory.values.at[slot, own, m], slot)
        staging = staging if staged else None
        parts = [Part(slice(None), pl.ds(own * HALF, HALF), staging)]

        @when(segments == 1)
        def _():
            outputs.store(b, acc, parts, own == 0)

        @when(segments > 1)
        def _():
            partial = work.partial(b)
            outputs.store_partial(partial, acc, parts, own == 0)

        plgpu.wait_smem_to_gmem(0)
        signals.release(slot, own)

    if few_registers:  # the number of sequences is read again, too
        done = lax.while_loop(
            lambda carry: carry[0] < bounds()[2],
            lambda carry: (carry[0] + 1, run_segment(*carry)),
            (jnp.int32(0), jnp.int32(0)),
        )[1]
    else:
        done = lax.fori_loop(0, bounds()[2], run_segment, jnp.int32(0))

    # A program may exit only after every arrival at its barriers has happened.
    @when((done >= 1) & ((done & 1) == own))
    def _():
        signals.wait_max(other, done - 1)

    sequence_count = bounds()[2]

    @when(sequence_count > 0)
    def _():
        signals.wait_sums_read(sequence_count - 1)
