"""The Hopper split-KV kernel of mla_decode for a float8 cache, with scores from registers.

A program processes at most 32 query rows of a sequence over one partition of the schedule, one key
block of 64 cached tokens after the other. As in :mod:`few_queries_kernel` the matmuls are
transposed, so that N of wgmma is query rows. The warpgroups are specialised and synchronise only
through barriers:

* The producer copies pages as they are cached, by TMA, a quarter per stage of a ring buffer.
* Two scorers (:mod:`scorer`) process the even and the odd key blocks. Each unpacks its block in
  registers, which are the operand of S^T = K Q^T, and stores it as bfloat16 in a slot of its own.
  It writes P = exp(S - maximum) next to it. The running maximum passes from one to the other.
* One warpgroup accumulates O^T += V^T P^T of all blocks in registers.

On an H200 it takes up to 15 % less time than the kernel for few query rows with many long
sequences, and 2 % more with short ones. With more rows than one program takes, it is slower.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int, UInt8

from pallas_kernels.hopper.barriers import Barriers
from pallas_kernels.hopper.branch import cond, when
from pallas_kernels.hopper.copies import TmaCopy
from pallas_kernels.hopper.launch import overlap_preceding_kernel
from pallas_kernels.hopper.lowered_once import lowered_once
from pallas_kernels.hopper.math import NO_SCORE
from pallas_kernels.hopper.tiles import WGMMA, spread_columns, tiles_of
from pallas_kernels.hopper.warpgroup import warp_is
from pallas_kernels.mla_decode.few_queries_block import Values, add_values
from pallas_kernels.mla_decode.few_queries_epilogue import Results
from pallas_kernels.mla_decode.few_queries_registers import COLUMN, column_vector
from pallas_kernels.mla_decode.float8_cache import LATENT, ROPE, TOKEN_BYTES
from pallas_kernels.mla_decode.float8_registers import prefetch_page
from pallas_kernels.mla_decode.kernel_parts import results
from pallas_kernels.mla_decode.query_buffer import QueryBuffer
from pallas_kernels.mla_decode.schedule import BLOCK, Schedule
from pallas_kernels.mla_decode.scored_memory import SCORERS, WARP_PIECES, Memory, Signals
from pallas_kernels.mla_decode.scored_plan import Plan, ScoredQueries
from pallas_kernels.mla_decode.scorer import score_blocks
from pallas_kernels.mla_decode.scorer_registers import WARP_TOKENS, permute_queries
from pallas_kernels.mla_decode.work import Work

_Partials = tuple[Float32[Array, "partials Mp C"], Float32[Array, "partials Mp"]]


@lowered_once("queries", "heads", "scale", "config", "interpret")
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
    config: ScoredQueries,
    interpret: Any = None,
) -> tuple[BFloat16[Array, "B Mp C"], Float32[Array, "B Mp"], _Partials]:
    """As :func:`float8_kernel.attend`, with M = T * H a multiple of 8. Results are padded to Mp."""
    B, M, _ = q_latent.shape
    plan = Plan(config, M, queries, heads, scale, block_tables.shape[1], interpret)
    N, partitions, padded = plan.rows, schedule.partitions, plan.rows * plan.tiles
    q_latent, q_rope = (jnp.pad(x, ((0, 0), (0, padded - M), (0, 0))) for x in (q_latent, q_rope))
    if plan.gpu:
        q_latent, q_rope = permute_queries(q_latent, q_rope)
    buffers = Memory.types(plan)

    def mla_decode_scored(ql_g, qr_g, kv_g, tables_g, schedule_g, *refs):
        results_g, (ql_s, qr_s), scratch = refs[:4], refs[4:6], refs[6:]
        memory, (*barriers, q_full, q_free) = (
            Memory(*scratch[: len(buffers)]),
            scratch[len(buffers) :],
        )
        signals = Signals.of(plan, barriers)
        signals.initialise()

        def first_query_row():
            """Returns the program's first query row, recomputed to save a register."""
            return lax.axis_index("tile") * N

        q_barriers = (Barriers(each, interpret) for each in (q_full, q_free))
        query_buffer = QueryBuffer(
            (ql_g, qr_g), (ql_s, qr_s), *q_barriers, first_row=first_query_row
        )
        query_buffer.initialise(consumers=SCORERS)
        overlap_preceding_kernel(config.early, interpret=interpret)
        partition, wg = lax.axis_index("partition"), lax.axis_index("wg")
        work = Work(schedule_g, tables_g, partitions, partition, kv_g.shape[0])
        outputs = Results(*results_g, rows=lambda: pl.ds(first_query_row(), N), swapped=plan.gpu)

        @when(wg < SCORERS)
        def _score():
            plgpu.set_max_registers(plan.registers[0], action="increase")
            score_blocks(plan, wg, memory, signals, query_buffer, work, first_query_row)

        @when(wg == SCORERS)
        def _add():
            plgpu.set_max_registers(plan.registers[1], action="increase")
            accumulate(plan, memory, signals, work, outputs)

        @when(wg == SCORERS + 1)
        def _produce():
            plgpu.set_max_registers(plan.registers[2], action="decrease")
            copy_pages(plan, kv_g, memory, signals, query_buffer, work)

    out, lse, *partials = plgpu.kernel(
        mla_decode_scored,
        out_type=results(B, padded, partitions, padded=padded),
        scratch_types=[
            tiles_of(1, N, LATENT),
            tiles_of(1, N, ROPE),
            *buffers,
            *Signals.types(plan),
            Barriers.scratch(1, 2, interpret),
            Barriers.scratch(1, SCORERS, interpret),
        ],
        # The last axis varies fastest, so tiles that read the same pages run concurrently.
        grid=(partitions, plan.tiles),
        grid_names=("partition", "tile"),
        num_threads=SCORERS + 2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        **({} if plan.gpu else {"interpret": interpret}),
    )(q_latent, q_rope, pages, block_tables, schedule.table)
    return out, lse, tuple(partials)


def copy_pages(
    plan: Plan, pages: Any, memory: Memory, signals: Signals, queries: QueryBuffer, work: Work
) -> None:
    """Fills the ring with all pages of a partition, and the query buffer for its sequences.

    One warp copies pages, another one queries.

    Args:
      pages: the cache [P, 64, 656] in global memory.
    """
    i32, stages, sequence_count = jnp.int32, plan.stages, work.sequence_count()

    def fetch_queries(i):
        queries.fetch(i, work.schedule[work.partition, 0] + i)

    def fetch_pages(i, done):
        work_range = work.range()
        page = work.page(work_range[0] + i, jnp.where(i == 0, work_range[2], 0))
        b, begin, count = work.segment(i, work_range)

        def fetch(j, page):
            ahead = work.page(b, begin + j + 1)
            if plan.gpu and plan.config.prefetch:
                later = work.page(b, begin + j + plan.config.prefetch)

                @when(j + plan.config.prefetch < count)
                def _():
                    prefetch_page(pages.at[later])

            for warp in range(WARP_PIECES):
                piece = WARP_PIECES * (done + j) + warp
                use = lax.div(piece, i32(stages))
                stage = piece - use * stages

                @when(use > 0)
                def _(stage=stage, use=use):
                    signals.blocks.wait(signals.piece_free(stage), use - 1)

                tokens = pl.ds(WARP_TOKENS * warp, WARP_TOKENS)
                window = page, tokens, pl.ds(0, TOKEN_BYTES)
                copy = TmaCopy(
                    pages, window, memory.ring.at[stage], tiled=False, swizzle=None, contiguous=True
                )
                signals.blocks.fill(signals.piece_full(stage), [copy])
            return ahead

        lax.fori_loop(0, count, fetch, page)
        return done + count

    def wait_for_arrivals(done):
        signals.blocks.wait_for_arrivals(signals.piece_free(0), stages, WARP_PIECES * done)

    if not plan.gpu:  # in the interpreter a warpgroup is one thread

        def fetch_sequence(i, done):
            fetch_queries(i)
            return fetch_pages(i, done)

        wait_for_arrivals(lax.fori_loop(0, sequence_count, fetch_sequence, i32(0)))
        queries.wait_for_arrivals(sequence_count)
        return

    @when(warp_is(0))
    def _():
        wait_for_arrivals(lax.fori_loop(0, sequence_count, fetch_pages, i32(0)))

    @when(warp_is(1))
    def _():
        lax.fori_loop(0, sequence_count, lambda i, _: fetch_queries(i), None)
        queries.wait_for_arrivals(sequence_count)


def accumulate(plan: Plan, memory: Memory, signals: Signals, work: Work, outputs: Results) -> None:
    """Accumulates O^T of all key blocks of a partition, and stores its sequences' results."""
    gpu, N, i32 = plan.gpu, plan.rows, jnp.int32
    tiles = LATENT // BLOCK

    def values_of(slot):
        def release():
            signals.blocks.arrive(signals.free(slot))

        return [
            Values(
                BLOCK * tile, memory.values.at[slot, tile], release if tile == tiles - 1 else None
            )
            for tile in range(tiles)
        ]

    def run_segment(i, done):
        b, _, count = work.segment(i, work.range())

        def step(j, carry):
            acc, maximum = carry
            n = done + j
            slot, use = n & 1, lax.shift_right_logical(n, i32(1))
            signals.blocks.wait(signals.p_ready(slot), use)

            def rescale(acc, maximum):
                raised = plgpu.layout_cast(memory.maxima[slot], COLUMN)
                return acc * spread_columns(jnp.exp2(maximum - raised), LATENT), raised

            acc, maximum = cond(memory.raised[slot] != 0, rescale, lambda *same: same, acc, maximum)
            return add_values(acc, memory.p.at[slot], values_of(slot), gpu=gpu), maximum

        acc = plgpu.layout_cast(jnp.full((LATENT, N), 0.0, jnp.float32), WGMMA)
        acc, maximum = lax.fori_loop(0, count, step, (acc, column_vector(N, NO_SCORE)))
        signals.sums_ready.wait(0, i)
        total = column_vector(N, 0.0)
        for scorer in range(SCORERS):
            own = plgpu.layout_cast(memory.sum_maxima[scorer], COLUMN)
            sums = plgpu.layout_cast(memory.sums[scorer], COLUMN)
            total = total + sums * jnp.exp2(own - maximum)
        signals.blocks.arrive(signals.sums_free)
        outputs.store(work, b, (acc, maximum, total), gpu=gpu)
        return done + count

    lax.fori_loop(0, work.sequence_count(), run_segment, i32(0))
