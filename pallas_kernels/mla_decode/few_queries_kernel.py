"""The Hopper split-KV kernel of mla_decode for at most 32 query rows, such as 16 heads x 2 tokens.

The matmuls are transposed. In S^T = K Q^T and O^T += V^T P^T, the M dimension of wgmma (64) is
tokens or latent columns and its N dimension is query rows, so no query rows are padded. Both
matmuls read a key block of 64 cached tokens from shared memory: as K row by row, as V^T column by
column. O^T takes 4 N registers per thread, so one warpgroup holds all of it.

* One or two consumer warpgroups process the partition's key blocks in turn. Each has its own ring
  buffer, running maximum, sums and O^T. At the end of a sequence, the warpgroup that processed its
  last block merges the other's results into its own.
* Producer warpgroups keep the ring buffers filled and run ahead into the following sequences. A
  bfloat16 cache is copied by TMA (:mod:`few_queries_copy`), a float8 cache is unpacked
  (:mod:`few_queries_unpack`). A key block is stored in column slices. Each occupies one pipeline
  stage and is released on its own.

With a bfloat16 cache a multiprocessor has at least 150 KB in flight or in use, and no key block
waits for its predecessor. HBM delivers a block to each multiprocessor every 3,900 cycles. Shared
memory needs about 2,000 cycles per block: 576 for the copy and 1,360 for 68 wgmma operands of
2.5 KB (N = 16). The dependent chain of one block is about 2,000 cycles too, and overlaps with the
other warpgroup's.

The running maximum is raised only when a score exceeds it by SLACK, see kernel_parts. The threads
vote on this after writing P, at the barrier that P needs anyway. If it is raised, P is rewritten.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int, UInt8

from pallas_kernels.hopper.barriers import Barriers
from pallas_kernels.hopper.branch import cond, when
from pallas_kernels.hopper.launch import overlap_preceding_kernel
from pallas_kernels.hopper.lowered_once import lowered_once
from pallas_kernels.hopper.math import NO_SCORE
from pallas_kernels.hopper.tiles import ACC, WGMMA, spread_columns, tiles_of
from pallas_kernels.hopper.warpgroup import WARPS, meet, publish
from pallas_kernels.mla_decode import few_queries_registers as registers
from pallas_kernels.mla_decode.clear import clear_tokens
from pallas_kernels.mla_decode.few_queries_block import Softmax, Values, add_values
from pallas_kernels.mla_decode.few_queries_copy import copy_blocks
from pallas_kernels.mla_decode.few_queries_epilogue import Handover, Results
from pallas_kernels.mla_decode.few_queries_plan import FewQueries, plan
from pallas_kernels.mla_decode.few_queries_registers import column_vector
from pallas_kernels.mla_decode.few_queries_ring import Rings
from pallas_kernels.mla_decode.few_queries_unpack import unpack_blocks
from pallas_kernels.mla_decode.float8_cache import LATENT, ROPE
from pallas_kernels.mla_decode.kernel_parts import results
from pallas_kernels.mla_decode.query_buffer import QueryBuffer
from pallas_kernels.mla_decode.schedule import BLOCK, Schedule
from pallas_kernels.mla_decode.work import Work

_Partials = tuple[Float32[Array, "partials M C"], Float32[Array, "partials M"]]


@lowered_once("queries", "heads", "scale", "config", "interpret")
def attend(
    q_latent: BFloat16[Array, "B M C"],
    q_rope: BFloat16[Array, "B M R"],
    pages: BFloat16[Array, "P page C+R"] | UInt8[Array, "P page 656"],
    block_tables: Int[Array, "B max_pages"],
    schedule: Schedule,
    *,
    queries: int,
    heads: int,
    scale: float,
    config: FewQueries,
    interpret: Any = None,
) -> tuple[BFloat16[Array, "B M C"], Float32[Array, "B M"], _Partials]:
    """As :func:`kernel.attend`, with M = T * H a multiple of 8 and at most 32.

    Pages of uint8 are in the format of :mod:`float8_cache`.
    """
    B, N, _ = q_latent.shape
    gpu, float8 = interpret is None, pages.dtype == jnp.uint8
    layout = plan(N, config, float8=float8)
    W, slices = layout.warpgroups, layout.slices
    partitions, max_pages = schedule.partitions, block_tables.shape[1]
    i32 = jnp.int32

    def mla_decode(ql_g, qr_g, kv_g, tables_g, schedule_g, out_g, lse_g, partial_g, partial_lse_g,
                   ql_s, qr_s, kv_s, p_s, scratch_s, stage_barriers, q_full, q_free,
                   *handover_s):  # fmt: skip
        stage_barriers, q_full, q_free = (
            Barriers(each, interpret) for each in (stage_barriers, q_full, q_free)
        )
        rings = Rings(layout, kv_s, stage_barriers)
        rings.initialise(full_arrivals=WARPS if float8 else 1)
        query_buffer = QueryBuffer((ql_g, qr_g), (ql_s, qr_s), q_full, q_free)
        query_buffer.initialise(consumers=W)
        overlap_preceding_kernel(config.early, interpret=interpret)
        partition, wg = lax.axis_index("partition"), lax.axis_index("wg")
        work = Work(schedule_g, tables_g, partitions, partition, kv_g.shape[0])
        handover = Handover(rings, None if gpu else handover_s[0], interpret)
        outputs = Results(out_g, lse_g, partial_g, partial_lse_g)

        def producer_warpgroup(producer):
            if layout.registers:
                plgpu.set_max_registers(layout.registers[1], action="decrease")
            if float8:
                unpack_blocks(producer, kv_g, rings, query_buffer, work, interpret=interpret)
            else:
                copy_blocks(kv_g, rings, query_buffer, work, gpu=gpu)

        def consumer_warpgroup():
            if layout.registers:
                plgpu.set_max_registers(layout.registers[0], action="increase")
            sequence_count = work.sequence_count()
            scratch = scratch_s.at[wg]
            softmax = Softmax(N, queries, heads, scale, max_pages, interpret)

            def scores(r, block_stages):
                """Returns S^T of the ring's r-th block."""
                # Always zero, but the compiler cannot tell. Otherwise it would keep all descriptors
                # in registers.
                zero = lax.shift_right_logical(r, i32(24))

                def multiply(acc):
                    for columns, (stage, use) in zip(slices, block_stages, strict=True):
                        stage_barriers.wait(rings.full(wg, stage), use)
                        keys, latents = rings.stage_ref(wg, stage), columns.latents
                        if latents:
                            q = ql_s.at[zero, :, pl.ds(columns.first, latents)]
                            plgpu.wgmma(acc, keys.at[:, pl.ds(0, latents)], q.T)
                        if latents < columns.width:
                            plgpu.wgmma(acc, keys.at[:, pl.ds(latents, ROPE)], qr_s.at[zero].T)
                    return acc[...]

                return pl.run_scoped(multiply, ACC((BLOCK, N), jnp.float32))

            def clear_values(tokens, block_stages):
                """Zeroes values past the end. P is 0 there, and 0 * NaN would be NaN."""

                @when(tokens < BLOCK)
                def _():
                    for columns, (stage, _) in zip(slices, block_stages, strict=True):
                        if columns.latents:
                            stage_columns = pl.ds(0, columns.latents)
                            clear_tokens(
                                rings.stage_ref(wg, stage), stage_columns, tokens,
                                interpret=interpret,
                            )  # fmt: skip
                    publish(interpret)
                    meet(interpret)

            def values_of(block_stages, release):
                """Returns the values of a block. ``release``: whether to release its stages."""

                def release_stage(stage):
                    @when(release)
                    def _():
                        stage_barriers.arrive(rings.free(wg, stage))

                return [
                    Values(
                        columns.first,
                        rings.stage_ref(wg, stage).at[:, pl.ds(0, columns.latents)]
                        if columns.latents
                        else None,
                        functools.partial(release_stage, stage),
                    )
                    for columns, (stage, _) in zip(slices, block_stages, strict=True)
                ]

            def run_segment(i, carry):
                done, handovers = carry
                b, begin, count = work.segment(i, work.range())
                length = work.length(b)
                first = rings.owner(wg - done)
                own_count = rings.index(count - first + (W - 1))
                has_last_block = rings.owner(done + count - 1) == wg
                q_full.wait(0, i)

                @when(own_count == 0)
                def _():
                    q_free.arrive(0)

                def process_block(k, carry):
                    acc, total, maximum = carry
                    j = first + k * W
                    last = k == own_count - 1
                    r = rings.index(done + j)
                    block_stages = rings.stages_of(r)
                    # Double buffered: other warps' matmuls may still read the previous P.
                    p_own = p_s.at[wg, r & 1]
                    s = scores(r, block_stages)

                    @when(last)
                    def _():
                        q_free.arrive(0)

                    s = softmax.masked(s, length, begin + j)
                    p = softmax.put(p_own, s, maximum)

                    def keep_maximum(acc, total, new_total, maximum):
                        del total
                        return acc, new_total, maximum

                    def raise_maximum(acc, total, new_total, maximum):
                        del new_total
                        raised, sums = softmax.raised(p_own, s, maximum, scratch)
                        alpha = jnp.exp2(maximum - raised)
                        total = total * alpha + sums
                        return acc * spread_columns(alpha, LATENT), total, raised

                    above = softmax.above(p)
                    new_total = total + softmax.sums(p)
                    acc, total, maximum = cond(
                        above, raise_maximum, keep_maximum, acc, total, new_total, maximum
                    )
                    tokens = length - (begin + j) * BLOCK
                    # The same stages, recomputed so that they need no registers until here.
                    block_stages = rings.stages_of(r + lax.shift_right_logical(length, i32(31)))

                    if not float8:  # unpackers have zeroed the values past the end
                        clear_values(tokens, block_stages)
                    values = values_of(block_stages, ~last | has_last_block)
                    return add_values(acc, p_own, values, gpu=gpu), total, maximum

                acc = plgpu.layout_cast(jnp.full((LATENT, N), 0.0, jnp.float32), WGMMA)
                initial = column_vector(N, 0.0), column_vector(N, NO_SCORE)
                acc, total, maximum = lax.fori_loop(0, own_count, process_block, (acc, *initial))
                # A warpgroup without a block has had no barrier since it last read the scratch.
                reduce_total = functools.partial(
                    registers.reduce_threads, kind="add", scratch=scratch, gpu=gpu
                )
                total = cond(own_count > 0, reduce_total, lambda total: total, total)

                if W == 2:

                    def last_block_of(w):
                        return rings.stages_of(rings.index(done + count - 1 - w))

                    @when(~has_last_block & (own_count > 0))
                    def _hand():
                        handover.give(wg, last_block_of(wg), (acc, maximum, total))

                    def merge_other(*state):
                        return handover.merge(1 - wg, last_block_of(1 - wg), handovers, state)

                    must_merge = has_last_block & (count > 1)
                    acc, maximum, total = cond(
                        must_merge, merge_other, lambda *own: own, acc, maximum, total
                    )
                    handovers = handovers + must_merge.astype(i32)

                @when(has_last_block)
                def _finish():
                    outputs.store(work, b, (acc, maximum, total), gpu=gpu)

                return done + count, handovers

            lax.fori_loop(0, sequence_count, run_segment, (i32(0), i32(0)))

        for producer in range(layout.producers):
            when(wg == W + producer)(functools.partial(producer_warpgroup, producer))
        when(wg < W)(consumer_warpgroup)

    # The interpreter cannot reinterpret bfloat16 memory as float32.
    handover_s = () if gpu else (plgpu.SMEM((LATENT + 2, N), jnp.float32),)
    out, lse, *partials = plgpu.kernel(
        mla_decode,
        out_type=results(B, N, partitions, padded=N),
        scratch_types=[
            tiles_of(1, N, LATENT),
            tiles_of(1, N, ROPE),
            tiles_of(W * layout.ring, BLOCK, layout.width),
            tiles_of(W, 2, N, BLOCK),
            plgpu.SMEM((W, 4 * N), jnp.float32),
            Barriers.scratch(Rings.barrier_count(layout), 1, interpret),
            Barriers.scratch(1, 2, interpret),
            Barriers.scratch(1, W, interpret),
            *handover_s,
        ],
        grid=(partitions,),
        grid_names=("partition",),
        num_threads=W + layout.producers,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        **({} if gpu else {"interpret": interpret}),
    )(q_latent, q_rope, pages, block_tables, schedule.table)
    return out, lse, tuple(partials)
