"""The Hopper split-KV kernel of mla_decode for a float8 cache.

A program processes one tile of 64 query rows (of a sequence's T * H) over one partition of the
schedule, one key block of 64 cached tokens after the other. Its three warpgroups are specialised
and synchronise only through barriers:

* The producer fills the two slots of shared memory. It loads a block's float8 latents into
  registers while the previous block is in use. When a slot is released it multiplies them by their
  scales and stores them as bfloat16. Rope keys are copied unchanged.
* Two consumer warpgroups compute. Each computes the scores S = Q K^T of every other key block, and
  overwrites the block's rope keys, which are no longer needed, with P = exp(S - maximum). Both
  accumulate P V, each for 256 of the 512 output columns, in registers. The running maximum is
  passed from one to the other. The tensor cores compute half of a block's scores, then this
  warpgroup's share of P V of the previous block, which releases its slot, then the other half.

The producer fills half a block at a time, the columns of one consumer's output. Scores are scaled
to base 2. The schedule, the results and the merge are the same as in :mod:`kernel`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int, UInt8

from pallas_kernels.hopper.branch import cond, when
from pallas_kernels.hopper.lowered_once import lowered_once
from pallas_kernels.hopper.math import LOG2E, NO_SCORE
from pallas_kernels.hopper.tiles import ROW, WGMMA, row_vector
from pallas_kernels.mla_decode.consumer import Consumer, ConsumerSignals
from pallas_kernels.mla_decode.epilogue import Part, TileResults, load_sums, merge_sums
from pallas_kernels.mla_decode.float8_producer import fill_slots
from pallas_kernels.mla_decode.float8_signals import Signals
from pallas_kernels.mla_decode.kernel_parts import TILE, masked_scores, results
from pallas_kernels.mla_decode.rescale import scale_rows
from pallas_kernels.mla_decode.schedule import BLOCK, Schedule
from pallas_kernels.mla_decode.tile_memory import HALF, TileMemory
from pallas_kernels.mla_decode.work import Work

_COMPUTE_REGISTERS, _FILL_REGISTERS = 192, 120  # per thread: 2 * compute + fill <= 504
_Partials = tuple[Float32[Array, "partials Mp C"], Float32[Array, "partials Mp"]]


@lowered_once("queries", "heads", "scale", "interpret")
def attend(
    q_latent: BFloat16[Array, "B M C"],
    q_rope: BFloat16[Array, "B M R"],
    pages: UInt8[Array, "P page 656"],
    block_tables: Int[Array, "B max_pages"],
    schedule: Schedule,
    *,
    queries: int,
    heads: int,
    scale: float,
    interpret: Any = None,
) -> tuple[BFloat16[Array, "B M C"], Float32[Array, "B M"], _Partials]:
    """Attention of M = T * H query rows, padded to whole tiles if M > 64. Row m is query m // H.

    Returns:
      ``out`` and ``lse``, written for sequences that are not split, and the partial results and
      their log-sum-exps of the sequences that are.
    """
    B, M, _ = q_latent.shape
    rows = min(TILE, M)
    tiles = -(-M // TILE)
    partitions = schedule.partitions
    max_pages, buffers = block_tables.shape[1], TileMemory.scratch()
    mask: Any = {"queries": queries, "heads": heads, "max_pages": max_pages}

    def mla_decode_float8(ql_g, qr_g, kv_g, tables_g, schedule_g, *refs):
        results_g, scratch = refs[:4], refs[4:]
        memory = TileMemory(*scratch[: len(buffers)])
        signals = Signals(*scratch[len(buffers) :], interpret=interpret)
        partition, wg = lax.axis_index("partition"), lax.axis_index("wg")
        m0 = lax.axis_index("tile") * TILE
        work = Work(schedule_g, tables_g, partitions, partition, pages.shape[0])
        first_sequence, last_sequence = schedule_g[partition, 0], schedule_g[partition, 1]
        sequence_count = last_sequence - first_sequence + 1
        outputs = TileResults(
            *results_g,
            lse_staging=memory.lse,
            first_row=lambda: m0,
            rows=rows,
            rows_per_copy=rows,
            interpret=interpret,
        )

        def consumer_warpgroup(own):
            """Runs a consumer. ``own``: parity of the blocks that it scores, and their slot."""
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            other = 1 - own
            consumer = Consumer(
                own,
                memory,
                ConsumerSignals(
                    wait_full=lambda half, n: plgpu.barrier_wait(signals.kv_full(own, half)),
                    max_ready=lambda: plgpu.barrier_arrive(signals.max_ready.at[own]),
                    p_ready=lambda: signals.arrive_once(signals.p_ready(own)),
                    wait_other_max=lambda n: plgpu.barrier_wait(signals.max_ready.at[other]),
                    wait_other_p=lambda n: plgpu.barrier_wait(signals.p_ready(other)),
                    release=lambda slot: signals.arrive_once(signals.kv_free(slot, own)),
                ),
                lambda k: lax.shift_right_logical(k, jnp.int32(24)),
                interpret,
                hides_rope=False,
            )

            def softmax(s, before, length, block, own_max, total):
                """Publishes P, the maximum and its factor; returns (factor, maximum, row sums)."""
                fully_visible = length - (queries - 1)  # tokens that every query sees
                fully_visible = jnp.minimum(fully_visible, max_pages * BLOCK)
                s = cond(
                    (block + 1) * BLOCK <= fully_visible,
                    lambda: s,
                    lambda: masked_scores(s, length, block, first_query_row=lambda: m0, **mask),
                )
                maximum = s.max(axis=1) * (scale * LOG2E)
                p, running, alpha = consumer.publish_p(
                    maximum,
                    before,
                    lambda running: (
                        s * (scale * LOG2E) - lax.broadcast_in_dim(running, (TILE, BLOCK), [0])
                    ),
                )
                total = total * jnp.exp2(own_max - running) + p.sum(axis=1)
                return alpha, running, total

            def run_segment(i, done):
                b, length, begin, count = work.segment_and_length(i, first_sequence, last_sequence)
                first = (own + done) & 1
                own_count = lax.shift_right_logical(jnp.maximum(count - first + 1, 0), jnp.int32(1))
                zeros: Any = plgpu.layout_cast(jnp.full((TILE, HALF), 0.0, jnp.float32), WGMMA)
                initial = zeros, row_vector(NO_SCORE), row_vector(0.0)
                plgpu.barrier_wait(signals.q_full)

                def first_block():
                    """Processes the segment's first block, if this warpgroup scores it."""
                    s = consumer.scores(done)

                    @when(done >= 1)
                    def _():
                        plgpu.barrier_wait(signals.max_ready.at[other])

                    acc, *sums = initial
                    sums = softmax(s, row_vector(NO_SCORE), length, begin, *sums)[1:]
                    return finish_last(consumer.add_values(acc, own), count > 1), *sums

                def finish_last(acc, more):
                    @when(more)
                    def _():
                        signals.arrive_once(signals.kv_free(own, own))

                    return acc

                def add_block(k, carry):
                    """Computes the scores of block j, P V of j - 1 meanwhile, then P V of j."""
                    acc, *sums = carry
                    j = first + 2 * k

                    def softmax_of(s):
                        before = plgpu.layout_cast(memory.maxima[other], ROW)
                        return softmax(s, before, length, begin + j, *sums)

                    acc, *sums = consumer.add_block(k, None, acc, softmax_of)
                    return finish_last(acc, j + 1 < count), *sums

                carry = cond(first == 0, first_block, lambda: initial)
                carry = lax.fori_loop(1 - first, own_count, add_block, carry)
                acc, *sums = carry
                plgpu.barrier_arrive(signals.q_free)

                def add_last():
                    """Adds P V of the segment's last block, if the other warpgroup scored it."""
                    plgpu.barrier_wait(signals.p_ready(other))
                    alpha = plgpu.layout_cast(memory.factors[other], ROW)
                    return consumer.add_values(scale_rows(acc, alpha, interpret=interpret), other)

                slot = (done + count - 1) & 1
                acc = cond(slot == own, lambda: acc, add_last)
                finish_segment(i, b, slot, acc, *sums)
                return done + count

            def finish_segment(i, b, slot, acc, own_max, own_sum):
                @when(i > 0)
                def _():
                    plgpu.barrier_wait(signals.sum_free)

                memory.sum_maxima[own], memory.sums[own] = own_max, own_sum
                plgpu.barrier_arrive(signals.sum_ready)
                plgpu.barrier_wait(signals.sum_ready)
                maxima, sums = load_sums(memory.sum_maxima, memory.sums)
                plgpu.barrier_arrive(signals.sum_free)
                maximum, total = merge_sums(maxima, sums)
                inverse = jnp.where(total > 0.0, 1.0 / total, 0.0)
                acc = acc * lax.broadcast_in_dim(inverse, (TILE, HALF), [0])
                segments = work.segments(b)

                @when(own == 0)
                def _():
                    outputs.stage_lse(maximum, total)

                # Staged in the half of the last block that only this warpgroup reads.
                staging = functools.partial(lambda slot, m: memory.values.at[slot, own, m], slot)
                parts = [Part(slice(None), pl.ds(own * HALF, HALF), staging)]

                @when(segments == 1)
                def _():
                    outputs.store(b, acc, parts, own == 0)

                @when(segments > 1)
                def _():
                    partial = work.partial(b)
                    outputs.store_partial(partial, acc, parts, own == 0)

                plgpu.wait_smem_to_gmem(0)
                signals.arrive_once(signals.kv_free(slot, own))

            done = lax.fori_loop(0, sequence_count, run_segment, jnp.int32(0))

            # A program may exit only after every arrival at its barriers has happened.
            @when((done >= 1) & ((done & 1) == own))
            def _():
                plgpu.barrier_wait(signals.max_ready.at[other])

            @when(sequence_count > 0)
            def _():
                plgpu.barrier_wait(signals.sum_free)

        @when(wg == 2)
        def _produce():
            plgpu.set_max_registers(_FILL_REGISTERS, action="decrease")
            bounds = first_sequence, last_sequence, sequence_count
            fill_slots((ql_g, qr_g, kv_g), memory, signals, work, m0, rows, bounds)

        for own in range(2):  # separate code for each, so that addresses are constants
            when(wg == own)(functools.partial(consumer_warpgroup, own))

    out, lse, *partials = plgpu.kernel(
        mla_decode_float8,
        out_type=results(B, M, partitions),
        scratch_types=[
            *buffers,
            *Signals.scratch(),
        ],
        # The last axis varies fastest, so tiles that read the same pages run concurrently.
        grid=(partitions, tiles),
        grid_names=("partition", "tile"),
        cluster=(1,),  # of one program: cluster barriers let one thread arrive for a warpgroup
        cluster_names=("one",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(q_latent, q_rope, pages, block_tables, schedule.table)
    return out, lse, tuple(partials)
