"""The Hopper split-KV kernel of mla_decode for a bfloat16 cache and tiles of 64 query rows.

A program processes one tile of 64 query rows (of a sequence's T * H) over one partition of the
schedule, one key block of 64 cached tokens after the other. Its four warpgroups are specialised and
synchronise only through barriers:

* Two score warpgroups process the even and the odd key blocks. Each copies its blocks by TMA into
  its own slot of shared memory, computes S = Q K^T, and overwrites the block's rope keys, which are
  no longer needed, with P = exp(S - maximum). The running maximum is passed from one to the other.
* Two value warpgroups each accumulate P V for 256 of the 512 output columns, in registers.

So the softmax of one key block overlaps with the matmuls of its neighbours, and one block is copied
while the other is in use. Two programs whose query tiles belong to the same sequence form a
cluster: each copies half of a key block for both (TMA multicast), which halves the traffic from the
L2 cache. Scores are scaled to base 2.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int

from pallas_kernels.hopper.barriers import Barriers
from pallas_kernels.hopper.launch import overlap_preceding_kernel
from pallas_kernels.hopper.math import LOG2E, NO_SCORE
from pallas_kernels.hopper.tiles import ACC, ROW, WGMMA, row_vector, tiles_of
from pallas_kernels.hopper.warpgroup import WARPS, first_warp, meet, publish
from pallas_kernels.mla_decode.clear import clear_tokens
from pallas_kernels.mla_decode.epilogue import Part, TileResults, load_sums, merge_sums
from pallas_kernels.mla_decode.float8_cache import LATENT, ROPE
from pallas_kernels.mla_decode.kernel_parts import SLACK, SLOTS, TILE, masked_scores, results
from pallas_kernels.mla_decode.rescale import scale_rows
from pallas_kernels.mla_decode.schedule import BLOCK, Schedule

_HALF = LATENT // 2  # latent columns per TMA copy and barrier: a slot is released half by half
_VALUE_COLUMNS = _HALF // 2  # output columns of a value warpgroup in each half
_COLUMNS = 8  # of a WGMMA register tile: the narrowest slice

# Registers per thread. Four warpgroups have 128 each on average: the score warpgroups release what
# the value warpgroups acquire.
_VALUE_REGISTERS, _SCORE_REGISTERS = 160, 96


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning parameters that do not change any result."""

    multicast: bool = True
    """Whether two programs of a sequence share its key blocks by TMA multicast."""

    early: bool = True
    """Whether to launch before the preceding kernel has ended (programmatic dependent launch)."""


_Partials = tuple[Float32[Array, "partials Mp C"], Float32[Array, "partials Mp"]]


@functools.partial(jax.jit, static_argnames=("queries", "heads", "scale", "config", "interpret"))
def attend(
    q_latent: BFloat16[Array, "B M C"],
    q_rope: BFloat16[Array, "B M R"],
    pages: BFloat16[Array, "P page C+R"],
    block_tables: Int[Array, "B max_pages"],
    schedule: Schedule,
    *,
    queries: int,
    heads: int,
    scale: float,
    config: Config,
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
    staged = rows < TILE  # a copy can write part of a tile, a store of registers cannot
    pair = 2 if tiles % 2 == 0 and config.multicast else 1
    partitions = schedule.partitions
    multicast_axis = "pair" if pair == 2 else None  # cluster axis of the TMA multicast
    # Table entries past a sequence's length may be anything; clip them to the page pool.
    last_page, max_pages = pages.shape[0] - 1, block_tables.shape[1]

    def mla_decode(ql_g, qr_g, kv_g, tables_g, schedule_g, out_g, lse_g, partial_g, partial_lse_g,
             ql_s, qr_s, v_s, rope_s, vectors_s,
             *barriers_and_kv_free):  # fmt: skip
        *barriers, kv_free = barriers_and_kv_free
        q_full, block_barriers, sequence_barriers = (Barriers(each, interpret) for each in barriers)
        q_full.initialise([3])
        block_barriers.initialise([1] * (3 * SLOTS) + [WARPS] * (2 * SLOTS))
        sequence_barriers.initialise([2 * WARPS] * 3)
        overlap_preceding_kernel(config.early, interpret=interpret)
        max_s, alpha_s = vectors_s.at[0:2], vectors_s.at[2:4]
        sum_s, sum_max_s, lse_s = vectors_s.at[4:6], vectors_s.at[6:8], vectors_s.at[8]
        partition, wg = lax.axis_index("partition"), lax.axis_index("wg")

        def m0():
            """Returns the tile's first query row, recomputed at each use to save a register."""
            return (lax.axis_index("tile") * pair + lax.axis_index("pair")) * TILE

        globals_ = out_g, lse_g, partial_g, partial_lse_g
        outputs = TileResults(*globals_, lse_s, m0, rows, rows_per_copy=8, interpret=interpret)

        # Key block n of a partition is use n // 2 of its slot and of the slot's barriers.
        def kv_full(slot, half):  # half 2: the rope keys
            return slot * 3 + half

        def max_ready(slot):
            return 3 * SLOTS + slot

        def p_ready(slot):
            return 4 * SLOTS + slot

        q_free, sum_ready, sum_free = range(3)  # use i: the partition's i-th sequence

        def partition_range():
            """Returns the partition's entry of the schedule, read in one memory latency."""
            return tuple(schedule_g[partition, k] for k in range(4))

        def segment_at(i, work_range):
            """Returns the partition's i-th segment.

            It consists of the sequence, its first block here, the number of its blocks here, and
            whether they include its last block.
            """
            first_sequence, last_sequence, first_block, end_block = work_range
            b = first_sequence + i
            blocks = schedule_g[partitions + b, 0]
            begin = jnp.where(i == 0, first_block, 0)
            end = jnp.where(b == last_sequence, end_block, blocks)
            return b, begin, end - begin, end == blocks

        mask: Any = {
            "queries": queries, "heads": heads, "max_pages": max_pages, "first_query_row": m0
        }  # fmt: skip

        def score_warpgroup():
            plgpu.set_max_registers(_SCORE_REGISTERS, action="decrease")
            sequence_count = schedule_g[partition, 1] - schedule_g[partition, 0] + 1
            own = wg - 2  # parity of this warpgroup's key blocks, and their slot
            other = 1 - own

            def page_of(b, block):
                page = tables_g[b, jnp.minimum(block, max_pages - 1)]
                return jnp.clip(page, 0, last_page)

            def fetch(page, *, wait):
                """Copies a page into this warpgroup's slot.

                With ``wait``, each half is copied when the slot's previous block releases it.
                """

                @pl.when(first_warp(interpret is None))
                def _():
                    for half in range(2):
                        if wait:
                            plgpu.barrier_wait(kv_free.at[own * 2 + half])
                        window = page, pl.ds(0, BLOCK), pl.ds(_HALF * half, _HALF)
                        block_barriers.copy(
                            kv_full(own, half), kv_g, window, v_s.at[own, half], multicast_axis
                        )
                    window = page, pl.ds(0, BLOCK), pl.ds(LATENT, ROPE)
                    block_barriers.copy(
                        kv_full(own, 2), kv_g, window, rope_s.at[own], multicast_axis
                    )

            def run_segment(i, done):
                """Processes one segment; ``done`` counts the partition's blocks before it."""
                first = (own + done) & 1
                first_sequence, _, first_block, _ = work_range = partition_range()
                next_page = page_of(first_sequence + i, jnp.where(i == 0, first_block, 0) + first)
                b, begin, count, _ = segment_at(i, work_range)
                length = schedule_g[partitions + b, 3]
                own_count = lax.shift_right_logical(jnp.maximum(count - first + 1, 0), jnp.int32(1))
                # Blocks that need no mask, and how many of them this warpgroup processes.
                unmasked = jnp.clip(lax.div(length - queries + 1, BLOCK) - begin, 0, count)
                unmasked = lax.shift_right_logical(
                    jnp.maximum(unmasked - first + 1, 0), jnp.int32(1)
                )

                sequence_barriers.arrive(q_free)

                @pl.when((own == 0) & first_warp(interpret is None))
                def _():
                    sequence_barriers.wait(q_free, i)
                    m = pl.ds(m0(), rows)
                    for half in range(2):
                        window = b, m, pl.ds(_HALF * half, _HALF)
                        q_full.copy(0, ql_g, window, ql_s.at[half, pl.ds(0, rows)], None)
                    window = b, m, pl.ds(0, ROPE)
                    q_full.copy(0, qr_g, window, qr_s.at[0, pl.ds(0, rows)], None)

                for fresh in (True, False):

                    @pl.when((first < count) & ((done + first < SLOTS) == fresh))
                    def _(fresh=fresh):
                        fetch(next_page, wait=not fresh)

                q_full.wait(0, i)

                def scores(k, use):
                    # Always zero, but the compiler cannot tell. Otherwise it would compute all 72
                    # descriptors before the loop and keep them in registers, which are too few.
                    zero = lax.shift_right_logical(k, jnp.int32(24))
                    slot = own + zero

                    def multiply(acc):
                        for half in range(2):
                            block_barriers.wait(kv_full(own, half), use)
                            keys = v_s.at[slot, half]
                            plgpu.wgmma(acc, ql_s.at[half + zero], keys.transpose((1, 0)))
                        block_barriers.wait(kv_full(own, 2), use)
                        plgpu.wgmma(acc, qr_s.at[zero], rope_s.at[slot].transpose((1, 0)))
                        return acc[...]

                    return pl.run_scoped(multiply, ACC((TILE, BLOCK), jnp.float32))

                def process_block(k, carry, *, masked):
                    own_max, total = carry
                    j = first + 2 * k
                    # Loaded early to hide the latency behind the matmul. Masked blocks come last:
                    # they rarely have a successor, and have no register to spare.
                    next_page = None if masked else page_of(b, begin + j + 2)
                    use = lax.shift_right_logical(done + j, jnp.int32(1))
                    s = scores(k, use)
                    if masked:
                        s = masked_scores(s, length, begin + j, **mask)
                    block_max = s.max(axis=1) * (scale * LOG2E)

                    @pl.when(done + j >= 1)
                    def _():
                        # Of the previous block, whose use is one less if it is in slot 1. Only the
                        # parity of a use counts.
                        block_barriers.wait(max_ready(other), use + own + 1)

                    before = lax.cond(
                        j == 0,
                        lambda: row_vector(NO_SCORE),
                        lambda: plgpu.layout_cast(max_s[other], ROW),
                    )
                    running = jnp.where(block_max > before + SLACK, block_max, before)
                    max_s[own] = running
                    alpha_s[own] = jnp.exp2(before - running)
                    block_barriers.arrive(max_ready(own))
                    p = jnp.exp2(
                        s * (scale * LOG2E) - lax.broadcast_in_dim(running, (TILE, BLOCK), [0])
                    )
                    meet(interpret)  # the matmuls of all four warps have read the rope keys
                    rope_s[own] = p.astype(jnp.bfloat16)
                    publish(interpret)  # every warp arrives below, so no barrier is needed here
                    block_barriers.arrive(p_ready(own))
                    # Row sums of eight columns each. A thread's own are reduced at the end.
                    block_sums = functools.reduce(
                        jnp.add, (p[:, c : c + _COLUMNS] for c in range(0, BLOCK, _COLUMNS))
                    )
                    rescale = jnp.exp2(own_max - running)
                    total = total * lax.broadcast_in_dim(rescale, total.shape, [0]) + block_sums

                    @pl.when(j + 2 < count)
                    def _():
                        fetch(page_of(b, begin + j + 2) if masked else next_page, wait=True)

                    return running, total

                zeros = jnp.full((TILE, _COLUMNS), 0.0, jnp.float32)
                carry = row_vector(NO_SCORE), plgpu.layout_cast(zeros, WGMMA)
                carry = lax.fori_loop(
                    0, unmasked, functools.partial(process_block, masked=False), carry
                )
                carry = lax.fori_loop(
                    unmasked, own_count, functools.partial(process_block, masked=True), carry
                )

                @pl.when(i > 0)
                def _():
                    sequence_barriers.wait(sum_free, i - 1)

                sum_max_s[own], sum_s[own] = carry[0], carry[1].sum(axis=1)
                sequence_barriers.arrive(sum_ready)
                return done + count

            done = lax.fori_loop(0, sequence_count, run_segment, jnp.int32(0))

            # A program may exit only after every arrival at its barriers has happened.
            @pl.when((done >= 1) & ((done & 1) == own))
            def _():
                block_barriers.wait(
                    max_ready(other), lax.shift_right_logical(done - 1, jnp.int32(1))
                )

            @pl.when((done > own) & first_warp(interpret is None))
            def _():
                for half in range(2):
                    plgpu.barrier_wait(kv_free.at[own * 2 + half])

            @pl.when(sequence_count > 0)
            def _():
                sequence_barriers.wait(sum_free, sequence_count - 1)

        def value_warpgroup():
            plgpu.set_max_registers(_VALUE_REGISTERS, action="increase")

            columns = pl.ds(wg * _VALUE_COLUMNS, _VALUE_COLUMNS)
            sequence_count = schedule_g[partition, 1] - schedule_g[partition, 0] + 1

            def release(slot, half):
                # One thread arrives for the warpgroup, after all its warps have finished.
                meet(interpret)
                plgpu.barrier_arrive(kv_free.at[slot * 2 + half])

            def add_block(block, acc, *, valid_tokens=None, keep_slot=False):
                """Adds P V of one block.

                Args:
                  valid_tokens: number of valid tokens in the block; the values of the others are
                    zeroed. Passed only for the last block of a segment.
                  keep_slot: whether to leave the slot unreleased.
                """
                slot = block & 1
                use = lax.shift_right_logical(block, jnp.int32(1))
                block_barriers.wait(max_ready(slot), use)
                alpha = plgpu.layout_cast(alpha_s[slot], ROW)
                acc = scale_rows(acc, alpha, interpret=interpret)
                block_barriers.wait(p_ready(slot), use)
                if valid_tokens is not None:

                    @pl.when(valid_tokens < BLOCK)
                    def _():
                        for half in range(2):
                            clear_tokens(
                                v_s.at[slot, half], columns, valid_tokens, interpret=interpret
                            )
                        plgpu.commit_smem()

                def multiply(acc_ref):
                    for half in range(2):
                        acc_half = acc_ref.at[
                            :, half * _VALUE_COLUMNS : (half + 1) * _VALUE_COLUMNS
                        ]
                        plgpu.wgmma(acc_half, rope_s.at[slot], v_s.at[slot, half, :, columns])
                    if not keep_slot:
                        plgpu.wgmma_wait(1)
                        release(slot, 0)
                    return acc_ref[...] if interpret is not None else None

                if interpret is not None:  # the interpreter cannot carry it through run_state
                    acc = acc + pl.run_scoped(multiply, ACC((TILE, _HALF), jnp.float32))
                else:
                    acc = pl.run_state(multiply)(ACC.init(acc))
                if not keep_slot:
                    release(slot, 1)
                return acc

            def run_segment(i, done):
                b, begin, count, has_last_block = segment_at(i, partition_range())

                def step(j, acc):
                    return add_block(done + j, acc)

                acc: Any = plgpu.layout_cast(jnp.full((TILE, _HALF), 0.0, jnp.float32), WGMMA)
                acc = lax.fori_loop(0, count - 1, step, acc)
                last = done + count - 1
                slot = last & 1
                valid_tokens = jnp.where(
                    has_last_block,
                    schedule_g[partitions + b, 3] - (begin + count - 1) * BLOCK,
                    BLOCK,
                )
                acc = add_block(last, acc, valid_tokens=valid_tokens, keep_slot=staged)

                sequence_barriers.wait(sum_ready, i)
                maximum, total = merge_sums(*load_sums(sum_max_s, sum_s))
                sequence_barriers.arrive(sum_free)
                inverse = jnp.where(total > 0.0, 1.0 / total, 0.0)
                acc = acc * lax.broadcast_in_dim(inverse, (TILE, _HALF), [0])
                segments = schedule_g[partitions + b, 1]

                @pl.when(wg == 0)
                def _():
                    outputs.stage_lse(maximum, total)

                # Staged in the columns of the last block that only this warpgroup reads.
                parts = [
                    Part(
                        slice(half * _VALUE_COLUMNS, (half + 1) * _VALUE_COLUMNS),
                        pl.ds(half * _HALF + wg * _VALUE_COLUMNS, _VALUE_COLUMNS),
                        (lambda m, half=half: v_s.at[slot, half, m, columns]) if staged else None,
                    )
                    for half in range(2)
                ]

                @pl.when(segments == 1)
                def _():
                    outputs.store(b, acc, parts, wg == 0)

                @pl.when(segments > 1)
                def _():
                    partial = schedule_g[partitions + b, 2] + lax.axis_index("partition")
                    outputs.store_partial(partial, acc, parts, wg == 0)

                plgpu.wait_smem_to_gmem(0)
                if staged:
                    for half in range(2):
                        release(slot, half)
                return done + count

            lax.fori_loop(0, sequence_count, run_segment, jnp.int32(0))

        pl.when(wg >= 2)(score_warpgroup)
        pl.when(wg < 2)(value_warpgroup)

    out, lse, *partials = plgpu.kernel(
        mla_decode,
        out_type=results(B, M, partitions),
        scratch_types=[
            tiles_of(2, TILE, _HALF),
            tiles_of(1, TILE, ROPE),
            tiles_of(SLOTS, 2, BLOCK, _HALF),
            tiles_of(SLOTS, BLOCK, ROPE),
            plgpu.SMEM((9, TILE), jnp.float32),  # one array, because each is padded to 1 KiB
            Barriers.scratch(1, 3, interpret),
            Barriers.scratch(5 * SLOTS, 1, interpret),
            Barriers.scratch(3, 2, interpret),
            plgpu.ClusterBarrier(collective_axes=("pair",), num_arrivals=2, num_barriers=2 * SLOTS),
        ],
        # The last axis varies fastest, so tiles that read the same pages run concurrently.
        grid=(partitions, tiles // pair),
        grid_names=("partition", "tile"),
        cluster=(pair,),
        cluster_names=("pair",),
        num_threads=4,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(q_latent, q_rope, pages, block_tables, schedule.table)
    return out, lse, tuple(partials)
