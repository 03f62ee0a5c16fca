"""A score warpgroup of the kernel for a bfloat16 cache: copies key blocks, computes S and P."""

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
from pallas_kernels.hopper.tiles import ACC, ROW, WGMMA, row_vector
from pallas_kernels.hopper.warpgroup import first_warp, meet, publish
from pallas_kernels.mla_decode.float8_cache import LATENT, ROPE
from pallas_kernels.mla_decode.kernel_parts import SLACK, SLOTS, TILE, masked_scores
from pallas_kernels.mla_decode.plan import Plan
from pallas_kernels.mla_decode.schedule import BLOCK
from pallas_kernels.mla_decode.signals import (
    Q_FREE,
    SUM_FREE,
    SUM_READY,
    Signals,
    kv_full,
    max_ready,
    p_ready,
)
from pallas_kernels.mla_decode.tile_memory import HALF, TileMemory
from pallas_kernels.mla_decode.work import Work

_COLUMNS = 8  # of a WGMMA register tile: the narrowest slice


def score_blocks(
    plan: Plan,
    wg: Any,
    sources: tuple[Any, Any, Any],
    memory: TileMemory,
    signals: Signals,
    work: Work,
    first_query_row: Callable[[], Any],
) -> None:
    """Copies and scores every other key block of a partition, and the queries of its sequences.

    Args:
      wg: number of this warpgroup, 2 or 3.
      sources: queries' latent and rope parts and the cache in global memory.
      first_query_row: returns the tile's first query row.
    """
    (ql_g, qr_g, kv_g), interpret, to_log2 = sources, plan.interpret, plan.scale * LOG2E
    sequence_count = work.sequence_count()
    own = wg - 2  # parity of this warpgroup's key blocks, and their slot
    other = 1 - own
    mask = plan.mask(first_query_row)

    def fetch(page, *, wait):
        """Copies a page into this warpgroup's slot.

        With ``wait``, each half is copied when the slot's previous block releases it.
        """

        @when(first_warp(interpret is None))
        def _():
            for half in range(2):
                if wait:
                    plgpu.barrier_wait(signals.kv_free.at[own * 2 + half])
                window = page, pl.ds(0, BLOCK), pl.ds(HALF * half, HALF)
                signals.blocks.copy(
                    kv_full(own, half),
                    kv_g,
                    window,
                    memory.values.at[own, half],
                    plan.multicast_axis,
                )
            window = page, pl.ds(0, BLOCK), pl.ds(LATENT, ROPE)
            signals.blocks.copy(
                kv_full(own, 2), kv_g, window, memory.rope.at[own], plan.multicast_axis
            )

    def run_segment(i, done):
        """Processes one segment; ``done`` counts the partition's blocks before it."""
        first = (own + done) & 1
        first_sequence, _, first_block, _ = work_range = work.range()
        next_page = work.page(first_sequence + i, jnp.where(i == 0, first_block, 0) + first)
        b, begin, count, _ = work.segment_and_end(i, work_range)
        length = work.length(b)
        own_count = lax.shift_right_logical(jnp.maximum(count - first + 1, 0), jnp.int32(1))
        # Blocks that need no mask, and how many of them this warpgroup processes.
        unmasked = jnp.clip(lax.div(length - plan.queries + 1, BLOCK) - begin, 0, count)
        unmasked = lax.shift_right_logical(jnp.maximum(unmasked - first + 1, 0), jnp.int32(1))

        signals.sequences.arrive(Q_FREE)

        @when((own == 0) & first_warp(interpret is None))
        def _():
            signals.sequences.wait(Q_FREE, i)
            m = pl.ds(first_query_row(), plan.rows)
            for half in range(2):
                window = b, m, pl.ds(HALF * half, HALF)
                signals.q_full.copy(
                    0, ql_g, window, memory.q_latent.at[half, pl.ds(0, plan.rows)], None
                )
            window = b, m, pl.ds(0, ROPE)
            signals.q_full.copy(0, qr_g, window, memory.q_rope.at[0, pl.ds(0, plan.rows)], None)

        for fresh in (True, False):

            @when((first < count) & ((done + first < SLOTS) == fresh))
            def _(fresh=fresh):
                fetch(next_page, wait=not fresh)

        signals.q_full.wait(0, i)

        def scores(k, use):
            # Always zero, but the compiler cannot tell. Otherwise it would compute all 72
            # descriptors before the loop and keep them in registers, which are too few.
            zero = lax.shift_right_logical(k, jnp.int32(24))
            slot = own + zero

            def multiply(acc):
                for half in range(2):
                    signals.blocks.wait(kv_full(own, half), use)
                    keys = memory.values.at[slot, half]
                    plgpu.wgmma(acc, memory.q_latent.at[half + zero], keys.transpose((1, 0)))
                signals.blocks.wait(kv_full(own, 2), use)
                plgpu.wgmma(acc, memory.q_rope.at[zero], memory.rope.at[slot].transpose((1, 0)))
                return acc[...]

            return pl.run_scoped(multiply, ACC((TILE, BLOCK), jnp.float32))

        def process_block(k, carry, *, masked):
            own_max, total = carry
            j = first + 2 * k
            # Loaded early to hide the latency behind the matmul. Masked blocks come last:
            # they rarely have a successor, and have no register to spare.
            next_page = None if masked else work.page(b, begin + j + 2)
            use = lax.shift_right_logical(done + j, jnp.int32(1))
            s = scores(k, use)
            if masked:
                s = masked_scores(s, length, begin + j, **mask)
            block_max = s.max(axis=1) * to_log2

            @when(done + j >= 1)
            def _():
                # This waits for the maximum of the previous block. Its use is one less if the
                # block is in slot 1, and only the parity of a use counts.
                signals.blocks.wait(max_ready(other), use + own + 1)

            before = cond(
                j == 0,
                lambda: row_vector(NO_SCORE),
                lambda: plgpu.layout_cast(memory.maxima[other], ROW),
            )
            running = jnp.where(block_max > before + SLACK, block_max, before)
            memory.maxima[own] = running
            memory.factors[own] = jnp.exp2(before - running)
            signals.blocks.arrive(max_ready(own))
            p = jnp.exp2(s * to_log2 - lax.broadcast_in_dim(running, (TILE, BLOCK), [0]))
            meet(interpret)  # the matmuls of all four warps have read the rope keys
            memory.rope[own] = p.astype(jnp.bfloat16)
            publish(interpret)  # every warp arrives below, so no barrier is needed here
            signals.blocks.arrive(p_ready(own))
            # Row sums of eight columns each. A thread's own are reduced at the end.
            block_sums = functools.reduce(
                jnp.add, (p[:, c : c + _COLUMNS] for c in range(0, BLOCK, _COLUMNS))
            )
            rescale = jnp.exp2(own_max - running)
            total = total * lax.broadcast_in_dim(rescale, total.shape, [0]) + block_sums

            @when(j + 2 < count)
            def _():
                fetch(work.page(b, begin + j + 2) if masked else next_page, wait=True)

            return running, total

        zeros = jnp.full((TILE, _COLUMNS), 0.0, jnp.float32)
        carry = row_vector(NO_SCORE), plgpu.layout_cast(zeros, WGMMA)
        carry = lax.fori_loop(0, unmasked, functools.partial(process_block, masked=False), carry)
        carry = lax.fori_loop(
            unmasked, own_count, functools.partial(process_block, masked=True), carry
        )

        @when(i > 0)
        def _():
            signals.sequences.wait(SUM_FREE, i - 1)

        memory.sum_maxima[own], memory.sums[own] = carry[0], carry[1].sum(axis=1)
        signals.sequences.arrive(SUM_READY)
        return done + count

    done = lax.fori_loop(0, sequence_count, run_segment, jnp.int32(0))

    # A program may exit only after every arrival at its barriers has happened.
    @when((done >= 1) & ((done & 1) == own))
    def _():
        signals.blocks.wait(max_ready(other), lax.shift_right_logical(done - 1, jnp.int32(1)))

    @when((done > own) & first_warp(interpret is None))
    def _():
        for half in range(2):
            plgpu.barrier_wait(signals.kv_free.at[own * 2 + half])

    @when(sequence_count > 0)
    def _():
        signals.sequences.wait(SUM_FREE, sequence_count - 1)
