"""The warpgroups of the scored kernel that unpack a float8 cache and compute the scores.

A scorer loads a block's float8 latents from shared memory into registers and multiplies them by
their scales. There they are the operand of S^T = K Q^T, and from there they are stored as the
bfloat16 values of the other matmul. So keys pass through shared memory only once after they are
unpacked, and no tensor core instruction of the scores reads them there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.branch import cond, when
from pallas_kernels.hopper.keep import keep
from pallas_kernels.hopper.math import NO_SCORE
from pallas_kernels.hopper.tiles import ACC
from pallas_kernels.mla_decode import few_queries_registers as registers
from pallas_kernels.mla_decode import scorer_registers
from pallas_kernels.mla_decode.few_queries_block import Softmax
from pallas_kernels.mla_decode.few_queries_registers import column_vector
from pallas_kernels.mla_decode.float8_cache import LATENT, dequantize_latent
from pallas_kernels.mla_decode.float8_registers import with_rounded_scales
from pallas_kernels.mla_decode.query_buffer import QueryBuffer
from pallas_kernels.mla_decode.schedule import BLOCK
from pallas_kernels.mla_decode.scored_memory import WARP_PIECES, Memory, Signals
from pallas_kernels.mla_decode.scored_plan import Plan
from pallas_kernels.mla_decode.work import Work


def score_blocks(
    plan: Plan,
    own: Any,
    memory: Memory,
    signals: Signals,
    queries: QueryBuffer,
    work: Work,
    first_query_row: Callable[[], Any],
) -> None:
    """Scores every other key block of a partition.

    Args:
      own: parity of this warpgroup's key blocks, and their slot.
      first_query_row: returns the program's first query row.
    """
    gpu, N, other, i32 = plan.gpu, plan.rows, 1 - own, jnp.int32
    q_latent, q_rope = queries.targets
    mask = plan.queries, plan.heads, plan.scale, plan.max_pages
    softmax = Softmax(N, *mask, plan.interpret, first_query_row, padded=True)

    def half_of(n):
        """Returns ``n // 2``, the use of a slot by block n."""
        return lax.shift_right_logical(n, i32(1))

    def run_segment(i, done):
        b, begin, count = work.segment(i, work.range())
        length = work.length(b)
        first = (own + done) & 1
        own_count = half_of(jnp.maximum(count - first + 1, 0))
        queries.full.wait(0, i)

        @when(own_count == 0)
        def _():
            queries.free.arrive(0)

        def process_block(k, carry):
            total, own_maximum = carry
            j = first + 2 * k
            n = done + j
            tokens = length - (begin + j) * BLOCK

            @when(n >= 2)
            def _():
                signals.blocks.wait(signals.free(own), half_of(n) - 1)

            s = scores(n, k, tokens)

            @when(k == own_count - 1)
            def _():
                queries.free.arrive(0)

            s = softmax.masked(s, length, begin + j)

            @when(n >= 1)
            def _():
                signals.blocks.wait(signals.max_ready(other), half_of(n - 1))

            def load_maximum():
                return plgpu.layout_cast(memory.maxima[other], registers.COLUMN)

            before = cond(j == 0, lambda: column_vector(N, NO_SCORE), load_maximum)
            p_own = memory.p.at[own]
            p = softmax.put(p_own, s, before)

            def keep_maximum(sums, before):
                return sums, before

            def raise_maximum(sums, before):
                del sums
                return softmax.raised(p_own, s, before, memory.scratch.at[own])[::-1]

            above, sums = softmax.above(p), softmax.sums(p)
            sums, maximum = cond(above, raise_maximum, keep_maximum, sums, before)
            memory.maxima[own] = maximum
            memory.raised[own] = above.astype(i32)
            signals.blocks.arrive(signals.max_ready(own))
            signals.blocks.arrive(signals.p_ready(own))
            return total * jnp.exp2(own_maximum - maximum) + sums, maximum

        carry = column_vector(N, 0.0), column_vector(N, NO_SCORE)
        total, maximum = lax.fori_loop(0, own_count, process_block, carry)

        # A warpgroup without a block has had no barrier since it last read the scratch.
        def reduce_total(total):
            return registers.reduce_threads(total, "add", memory.scratch.at[own], gpu=gpu)

        total = cond(own_count > 0, reduce_total, lambda total: total, total)

        @when(i > 0)
        def _():
            signals.blocks.wait(signals.sums_free, i - 1)

        memory.sums[own], memory.sum_maxima[own] = total, maximum
        signals.sums_ready.arrive(0)
        return done + count

    def scores(n, k, tokens):
        """Returns S^T of block n, and stores its values in the own slot."""
        # Always zero, but the compiler cannot tell. Otherwise it would keep all descriptors in
        # registers.
        zero = lax.shift_right_logical(k, i32(24))
        if not gpu:
            return interpreted_scores(n, tokens)
        piece = WARP_PIECES * n + scorer_registers.warp_index()
        use = lax.div(piece, i32(plan.stages))
        stage = piece - use * plan.stages

        # The stage's previous use may be another warp's, which this one has not waited for. A
        # barrier tells only the parity of its use: it must not be behind the use before this one.
        @when(use > 0)
        def _():
            signals.blocks.wait(signals.piece_free(stage), use - 1)

        signals.blocks.wait(signals.piece_full(stage), use)

        def multiply(acc):
            ring, slot, units = memory.ring, memory.values.at[own], LATENT // BLOCK
            factors = scorer_registers.load_factors(ring, stage, tokens)
            rope = scorer_registers.load_rope(ring, stage)
            ahead = min(plan.ahead, units)
            words = [scorer_registers.load_words(ring, stage, unit) for unit in range(ahead)]

            def release_piece():
                loaded = scorer_registers.when_loaded(words[-1], zero, stage)
                signals.blocks.arrive(signals.piece_free(loaded))

            if ahead == units:
                release_piece()
            plgpu.wgmma(acc, rope, q_rope.at[zero].T)
            # The matmul of an operand runs while the next one is unpacked. Its registers are stored
            # afterwards, so that they are not used for anything else meanwhile.
            previous: Any = None
            for unit in range(units):
                operand = scorer_registers.unpack(words[unit], factors, unit)
                if unit + ahead < units:
                    words.append(scorer_registers.load_words(ring, stage, unit + ahead))
                    if unit + ahead == units - 1:
                        release_piece()
                q = q_latent.at[zero, :, pl.ds(scorer_registers.COLUMNS * unit, BLOCK)]
                plgpu.wgmma(acc, operand, q.T)
                plgpu.wgmma_wait(1)
                if previous is None:
                    keep(rope)
                else:
                    scorer_registers.store_values(slot, previous, unit - 1)
                previous = operand
            s = acc[...]
            scorer_registers.store_values(slot, previous, units - 1)
            return s

        return pl.run_scoped(multiply, ACC((BLOCK, N), jnp.float32))

    def interpreted_scores(n, tokens):
        pieces = []
        for warp in range(WARP_PIECES):
            piece = WARP_PIECES * n + warp
            stage, use = lax.rem(piece, i32(plan.stages)), lax.div(piece, i32(plan.stages))
            signals.blocks.wait(signals.piece_full(stage), use)
            pieces.append(memory.ring[stage])
            plgpu.commit_smem()
            signals.blocks.arrive(signals.piece_free(stage))
        page = with_rounded_scales(jnp.concatenate(pieces))
        latent, rope = dequantize_latent(page, jnp.bfloat16)
        valid = jnp.arange(BLOCK)[:, None] < tokens
        latent = jnp.where(valid, latent, jnp.zeros_like(latent))
        for unit in range(LATENT // BLOCK):
            memory.values[own, unit] = latent[:, BLOCK * unit : BLOCK * (unit + 1)]
        operands = (latent, q_latent[0]), (rope, q_rope[0])
        # A fence between reading the queries and the copy that overwrites them. On a GPU only
        # wgmma reads them.
        plgpu.commit_smem()
        products = [
            jnp.dot(keys.astype(jnp.float32), q.astype(jnp.float32).T, precision="highest")
            for keys, q in operands
        ]
        return products[0] + products[1]

    sequence_count = work.sequence_count()
    done = lax.fori_loop(0, sequence_count, run_segment, i32(0))

    # A program may exit only after every arrival at its barriers has happened.
    @when((done >= 1) & ((done & 1) == own))
    def _():
        signals.blocks.wait(signals.max_ready(other), half_of(done - 1))

    @when(done > own)
    def _():
        signals.blocks.wait(signals.free(own), half_of(done - own - 1))

    @when(sequence_count > 0)
    def _():
        signals.blocks.wait(signals.sums_free, sequence_count - 1)
