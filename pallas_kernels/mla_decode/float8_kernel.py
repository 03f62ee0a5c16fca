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

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int, UInt8

from pallas_kernels.hopper.math import LOG2E, NO_SCORE
from pallas_kernels.hopper.tiles import ACC, ROW, WGMMA, row_vector, tiles_of
from pallas_kernels.hopper.warpgroup import meet, publish
from pallas_kernels.mla_decode.epilogue import Part, TileResults, load_sums, merge_sums
from pallas_kernels.mla_decode.float8_cache import ROPE, dequantize_latent
from pallas_kernels.mla_decode.float8_registers import (
    HALF,
    copy_rope,
    fetch_half,
    prefetch_rope,
    store_half,
    wait_rope_copies,
    with_rounded_scales,
)
from pallas_kernels.mla_decode.kernel_parts import SLACK, SLOTS, TILE, masked_scores, results
from pallas_kernels.mla_decode.rescale import scale_rows
from pallas_kernels.mla_decode.schedule import BLOCK, Schedule

_COMPUTE_REGISTERS, _FILL_REGISTERS = 192, 120  # per thread: 2 * compute + fill <= 504
_Partials = tuple[Float32[Array, "partials Mp C"], Float32[Array, "partials Mp"]]


@functools.partial(jax.jit, static_argnames=("queries", "heads", "scale", "interpret"))
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
    # Table entries past a sequence's length may be anything; clip them to the page pool.
    last_page, max_pages = pages.shape[0] - 1, block_tables.shape[1]

    def mla_decode_float8(ql_g, qr_g, kv_g, tables_g, schedule_g,
             out_g, lse_g, partial_g, partial_lse_g,
             ql_s, qr_s, v_s, rope_s, vectors_s,
             q_full, max_ready, sequence_barriers, block_barriers):  # fmt: skip
        max_s, alpha_s = vectors_s.at[0:2], vectors_s.at[2:4]
        sum_s, sum_max_s, lse_s = vectors_s.at[4:6], vectors_s.at[6:8], vectors_s.at[8]
        partition, wg = lax.axis_index("partition"), lax.axis_index("wg")
        m0 = lax.axis_index("tile") * TILE
        first_sequence, last_sequence = schedule_g[partition, 0], schedule_g[partition, 1]
        sequence_count = last_sequence - first_sequence + 1

        globals_ = out_g, lse_g, partial_g, partial_lse_g
        outputs = TileResults(
            *globals_, lse_s, lambda: m0, rows, rows_per_copy=rows, interpret=interpret
        )

        # Few barrier arrays, because each keeps its phases in one register per thread.
        def kv_full(slot, half):
            return block_barriers.at[slot * 2 + half]

        def kv_free(slot, half):
            return block_barriers.at[4 + slot * 2 + half]

        def p_ready(slot):
            return block_barriers.at[8 + slot]

        q_free, sum_ready, sum_free = (sequence_barriers.at[i] for i in range(3))

        def arrive_once(barrier):
            """Arrives once for the warpgroup, after all its threads have come here."""
            meet(interpret)
            plgpu.barrier_arrive(barrier)

        def segment(i):
            """Returns the partition's i-th sequence, its length, first block and blocks here."""
            b = first_sequence + i
            begin = jnp.where(i == 0, schedule_g[partition, 2], 0)
            end = jnp.where(
                b == last_sequence, schedule_g[partition, 3], schedule_g[partitions + b, 0]
            )
            return b, schedule_g[partitions + b, 3], begin, end - begin

        mask: Any = {
            "queries": queries, "heads": heads, "max_pages": max_pages,
            "first_query_row": lambda: m0,
        }  # fmt: skip

        def producer_warpgroup():
            plgpu.set_max_registers(_FILL_REGISTERS, action="decrease")

            def page_and_tokens(b, block):
                """Returns a key block's page and how many valid tokens follow its first slot."""
                page = tables_g[b, jnp.minimum(block, max_pages - 1)]
                return jnp.clip(page, 0, last_page), schedule_g[partitions + b, 3] - block * BLOCK

            def fetch(page):
                if interpret is not None:
                    return ()
                page = kv_g.at[page]
                prefetch_rope(page)
                return *fetch_half(page, 0), *fetch_half(page, 1)

            def fetch_queries(b):
                m = pl.ds(m0, rows)
                for half in range(2):
                    plgpu.copy_gmem_to_smem(
                        ql_g.at[b, m, pl.ds(HALF * half, HALF)],
                        ql_s.at[half, pl.ds(0, rows)],
                        q_full,
                    )
                plgpu.copy_gmem_to_smem(qr_g.at[b, m, :], qr_s.at[pl.ds(0, rows)], q_full)

            def interpreted_fill(slot, half, page, tokens):
                latent, rope = dequantize_latent(with_rounded_scales(kv_g[page]), jnp.bfloat16)
                valid = jnp.arange(BLOCK)[:, None] < tokens
                columns = latent[:, half * HALF : (half + 1) * HALF]
                v_s[slot, half] = jnp.where(valid, columns, jnp.zeros_like(columns))
                if half:
                    rope_s[slot] = rope

            def fill(n, registers, page, tokens, next_page):
                """Stores block n of the partition from registers, and loads the next block."""
                slot = n & 1

                @pl.when(n >= SLOTS)
                def _():
                    for half in range(2):
                        plgpu.barrier_wait(kv_free(slot, half))

                if interpret is not None:
                    for half in range(2):
                        interpreted_fill(slot, half, page, tokens)
                        arrive_once(kv_full(slot, half))
                    return registers
                registers = list(registers)
                copy_rope(rope_s.at[slot], kv_g.at[page])
                for half in range(2):
                    of_half = slice(2 * half, 2 * half + 2)
                    words, scales = registers[of_half]
                    store_half(v_s.at[slot, half], words, scales, tokens)
                    if half:
                        wait_rope_copies()
                    publish()
                    arrive_once(kv_full(slot, half))
                    registers[of_half] = fetch_half(kv_g.at[next_page], half)
                prefetch_rope(kv_g.at[next_page])
                return tuple(registers)

            def run_segment(i, carry):
                done, *carry = carry
                b, _, begin, count = segment(i)

                def step(j, carry):
                    registers, page, tokens = carry
                    more = j + 1 < count
                    next_page, next_tokens = page_and_tokens(
                        jnp.where(more, b, jnp.minimum(b + 1, last_sequence)),
                        jnp.where(more, begin + j + 1, 0),
                    )
                    registers = fill(done + j, registers, page, tokens, next_page)

                    @pl.when((j == 0) & (i > 0))
                    def _():
                        plgpu.barrier_wait(q_free)
                        fetch_queries(b)

                    return registers, next_page, next_tokens

                return done + count, *lax.fori_loop(0, count, step, tuple(carry))

            @pl.when(sequence_count > 0)
            def _():
                fetch_queries(first_sequence)
                page, tokens = page_and_tokens(first_sequence, schedule_g[partition, 2])
                carry = jnp.int32(0), fetch(page), page, tokens
                done = lax.fori_loop(0, sequence_count, run_segment, carry)[0]
                # A program may exit only after every arrival at its barriers has happened.
                plgpu.barrier_wait(q_free)
                for slot in range(SLOTS):

                    @pl.when(done > slot)
                    def _(slot=slot):
                        for half in range(2):
                            plgpu.barrier_wait(kv_free(slot, half))

        def consumer_warpgroup(own):
            """Runs a consumer. ``own``: parity of the blocks that it scores, and their slot."""
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            other = 1 - own

            def add_scores(acc, k, halves=(0, 1)):
                # Always zero, but the compiler cannot tell. Otherwise it would compute the
                # descriptors before the loop and keep them in registers.
                zero = lax.shift_right_logical(k, jnp.int32(24))
                slot = own + zero
                for half in halves:
                    plgpu.barrier_wait(kv_full(own, half))
                    keys = v_s.at[slot, half].transpose((1, 0))
                    plgpu.wgmma(acc, ql_s.at[half + zero], keys)
                if 1 in halves:
                    plgpu.wgmma(acc, qr_s, rope_s.at[slot].transpose((1, 0)))

            def scores(k, halves=(0, 1)):
                def multiply(acc):
                    add_scores(acc, k, halves)
                    return acc[...]

                return pl.run_scoped(multiply, ACC((TILE, BLOCK), jnp.float32))

            def add_values(acc, slot):
                """Returns ``acc + P V``."""

                def multiply(acc_ref):
                    if interpret is None:
                        acc_ref[...] = acc
                    plgpu.wgmma(acc_ref, rope_s.at[slot], v_s.at[slot, own])
                    return acc_ref[...]

                added = pl.run_scoped(multiply, ACC((TILE, HALF), jnp.float32))
                return added if interpret is None else acc + added

            def softmax(s, before, length, block, own_max, total):
                """Publishes P, the maximum and its factor; returns (factor, maximum, row sums)."""
                fully_visible = length - (queries - 1)  # tokens that every query sees
                fully_visible = jnp.minimum(fully_visible, max_pages * BLOCK)
                s = lax.cond(
                    (block + 1) * BLOCK <= fully_visible,
                    lambda: s,
                    lambda: masked_scores(s, length, block, **mask),
                )
                maximum = s.max(axis=1) * (scale * LOG2E)
                running = jnp.where(maximum > before + SLACK, maximum, before)
                alpha = jnp.exp2(before - running)
                max_s[own] = running
                alpha_s[own] = alpha
                plgpu.barrier_arrive(max_ready.at[own])
                p = jnp.exp2(
                    s * (scale * LOG2E) - lax.broadcast_in_dim(running, (TILE, BLOCK), [0])
                )
                meet(interpret)  # the matmuls of all four warps have read the rope keys
                rope_s[own] = p.astype(jnp.bfloat16)
                publish(interpret)
                arrive_once(p_ready(own))
                total = total * jnp.exp2(own_max - running) + p.sum(axis=1)
                return alpha, running, total

            def run_segment(i, done):
                b, length, begin, count = segment(i)
                first = (own + done) & 1
                own_count = lax.shift_right_logical(jnp.maximum(count - first + 1, 0), jnp.int32(1))
                zeros: Any = plgpu.layout_cast(jnp.full((TILE, HALF), 0.0, jnp.float32), WGMMA)
                initial = zeros, row_vector(NO_SCORE), row_vector(0.0)
                plgpu.barrier_wait(q_full)

                def first_block():
                    """Processes the segment's first block, if this warpgroup scores it."""
                    s = scores(done)

                    @pl.when(done >= 1)
                    def _():
                        plgpu.barrier_wait(max_ready.at[other])

                    acc, *sums = initial
                    sums = softmax(s, row_vector(NO_SCORE), length, begin, *sums)[1:]
                    return finish_last(add_values(acc, own), count > 1), *sums

                def finish_last(acc, more):
                    @pl.when(more)
                    def _():
                        arrive_once(kv_free(own, own))

                    return acc

                def add_block(k, carry):
                    """Computes the scores of block j, P V of j - 1 meanwhile, then P V of j."""
                    acc, *sums = carry
                    j = first + 2 * k

                    def rescaled():
                        plgpu.barrier_wait(max_ready.at[other])
                        alpha = plgpu.layout_cast(alpha_s[other], ROW)
                        scaled = scale_rows(acc, alpha, interpret=interpret)
                        plgpu.barrier_wait(p_ready(other))
                        return scaled

                    def softmax_of(s):
                        before = plgpu.layout_cast(max_s[other], ROW)
                        return softmax(s, before, length, begin + j, *sums)

                    def overlapped(s_ref, acc_ref):
                        add_scores(s_ref, k, halves=(0,))
                        acc_ref[...] = rescaled()
                        plgpu.wgmma(acc_ref, rope_s.at[other], v_s.at[other, own])
                        add_scores(s_ref, k, halves=(1,))
                        # P V is complete: only the second half's latent and rope scores remain.
                        plgpu.wgmma_wait(2)
                        arrive_once(kv_free(other, own))
                        softmax_results = softmax_of(plgpu.wgmma_accumulator_load(s_ref, wait_n=0))
                        return acc_ref[...], *softmax_results

                    if interpret is None:
                        acc, alpha, *sums = pl.run_scoped(
                            overlapped,
                            ACC((TILE, BLOCK), jnp.float32),
                            ACC((TILE, HALF), jnp.float32),
                        )
                    else:  # the interpreter has no two accumulators at once
                        s = scores(k, (0,))
                        acc = add_values(rescaled(), other)
                        s = s + scores(k, (1,))
                        arrive_once(kv_free(other, own))
                        alpha, *sums = softmax_of(s)
                    acc = add_values(scale_rows(acc, alpha, interpret=interpret), own)
                    return finish_last(acc, j + 1 < count), *sums

                carry = lax.cond(first == 0, first_block, lambda: initial)
                carry = lax.fori_loop(1 - first, own_count, add_block, carry)
                acc, *sums = carry
                plgpu.barrier_arrive(q_free)

                def add_last():
                    """Adds P V of the segment's last block, if the other warpgroup scored it."""
                    plgpu.barrier_wait(p_ready(other))
                    alpha = plgpu.layout_cast(alpha_s[other], ROW)
                    return add_values(scale_rows(acc, alpha, interpret=interpret), other)

                slot = (done + count - 1) & 1
                acc = lax.cond(slot == own, lambda: acc, add_last)
                finish_segment(i, b, slot, acc, *sums)
                return done + count

            def finish_segment(i, b, slot, acc, own_max, own_sum):
                @pl.when(i > 0)
                def _():
                    plgpu.barrier_wait(sum_free)

                sum_max_s[own], sum_s[own] = own_max, own_sum
                plgpu.barrier_arrive(sum_ready)
                plgpu.barrier_wait(sum_ready)
                maxima, sums = load_sums(sum_max_s, sum_s)
                plgpu.barrier_arrive(sum_free)
                maximum, total = merge_sums(maxima, sums)
                inverse = jnp.where(total > 0.0, 1.0 / total, 0.0)
                acc = acc * lax.broadcast_in_dim(inverse, (TILE, HALF), [0])
                segments = schedule_g[partitions + b, 1]

                @pl.when(own == 0)
                def _():
                    outputs.stage_lse(maximum, total)

                # Staged in the half of the last block that only this warpgroup reads.
                staging = functools.partial(lambda slot, m: v_s.at[slot, own, m], slot)
                parts = [Part(slice(None), pl.ds(own * HALF, HALF), staging)]

                @pl.when(segments == 1)
                def _():
                    outputs.store(b, acc, parts, own == 0)

                @pl.when(segments > 1)
                def _():
                    partial = schedule_g[partitions + b, 2] + partition
                    outputs.store_partial(partial, acc, parts, own == 0)

                plgpu.wait_smem_to_gmem(0)
                arrive_once(kv_free(slot, own))

            done = lax.fori_loop(0, sequence_count, run_segment, jnp.int32(0))

            # A program may exit only after every arrival at its barriers has happened.
            @pl.when((done >= 1) & ((done & 1) == own))
            def _():
                plgpu.barrier_wait(max_ready.at[other])

            @pl.when(sequence_count > 0)
            def _():
                plgpu.barrier_wait(sum_free)

        pl.when(wg == 2)(producer_warpgroup)
        for own in range(2):  # separate code for each, so that addresses are constants
            pl.when(wg == own)(functools.partial(consumer_warpgroup, own))

    out, lse, *partials = plgpu.kernel(
        mla_decode_float8,
        out_type=results(B, M, partitions),
        scratch_types=[
            tiles_of(2, TILE, HALF),
            tiles_of(TILE, ROPE),
            tiles_of(SLOTS, 2, BLOCK, HALF),
            tiles_of(SLOTS, BLOCK, ROPE),
            plgpu.SMEM((9, TILE), jnp.float32),  # one array, because each is padded to 1 KiB
            plgpu.Barrier(num_arrivals=3),
            plgpu.Barrier(num_barriers=SLOTS),
            plgpu.Barrier(num_arrivals=2, num_barriers=3),
            plgpu.ClusterBarrier(collective_axes=("one",), num_barriers=5 * SLOTS),
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
