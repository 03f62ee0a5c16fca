"""The Hopper split-KV kernel of mla_decode for at most 32 query rows, such as 16 heads x 2 tokens.

The matmuls are transposed. In S^T = K Q^T and O^T += V^T P^T, the M dimension of wgmma (64) is
tokens or latent columns and its N dimension is query rows, so no query rows are padded. Both
matmuls read a key block of 64 cached tokens from shared memory where TMA put it: as K row by row,
as V^T column by column. O^T takes 4 N registers per thread, so one warpgroup holds all of it.

* One or two consumer warpgroups process the partition's key blocks in turn. Each has its own ring
  buffer, running maximum, sums and O^T. At the end of a sequence, the warpgroup that processed its
  last block merges the other's results into its own.
* In the producer warpgroup, one warp keeps the ring buffers filled by TMA and runs ahead into the
  following sequences. A key block is copied in column slices. Each slice occupies one pipeline
  stage and is released on its own. Another warp copies the queries.

So a multiprocessor has at least 150 KB in flight or in use, and no key block waits for its
predecessor. HBM delivers a block to each multiprocessor every 3,900 cycles. Shared memory needs
about 2,000 cycles per block: 576 for the copy and 1,360 for 68 wgmma operands of 2.5 KB (N = 16).
The dependent chain of one block is about 2,000 cycles too, and overlaps with the other warpgroup's.

The running maximum is raised only when a score exceeds it by SLACK, see kernel_parts. The threads
vote on this after writing P, at the barrier that P needs anyway. If it is raised, P is rewritten.
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

from pallas_kernels.mla_decode import few_queries_registers as registers
from pallas_kernels.mla_decode.barriers import WARPS, Barriers
from pallas_kernels.mla_decode.clear import clear_tokens
from pallas_kernels.mla_decode.few_queries_registers import column_vector
from pallas_kernels.mla_decode.float8_cache import LATENT, ROPE
from pallas_kernels.mla_decode.kernel_parts import (
    ACC,
    LOG2E,
    NO_SCORE,
    SLACK,
    WGMMA,
    results,
    tiles_of,
)
from pallas_kernels.mla_decode.rescale import publish
from pallas_kernels.mla_decode.schedule import BLOCK, Schedule
from pallas_kernels.mosaic_ir import meet, warp_is

MAX_QUERY_ROWS = 32
_WIDTH = LATENT + ROPE
_SHARED_BYTES = 232448 - 6 * 1024  # of a program, less barriers and vectors
_COPY_REGISTERS, _REGISTERS = 24, 240  # per thread; three warpgroups have 168 each


@dataclasses.dataclass(frozen=True)
class FewQueries:
    """Tuning parameters. ``warpgroups`` affects the order of summation, hence the rounding."""

    warpgroups: int = 2
    """Number of consumer warpgroups: 1 or 2."""

    width: int | None = None
    """Columns per slice of a key block: 64 or 192. By default whichever leaves less shared memory
    unused."""

    stages: int | None = None
    """Stages of all ring buffers together. By default as many as fit in shared memory."""

    early: bool = True
    """Whether to launch before the preceding kernel has ended (programmatic dependent launch)."""


def rings(N: int, config: FewQueries) -> tuple[int, int]:
    """Returns the columns per slice and the stages of each warpgroup's ring buffer."""
    if config.warpgroups not in (1, 2):
        raise ValueError(f"expected 1 or 2 warpgroups, got {config}")
    room = _SHARED_BYTES - N * 2 * (_WIDTH + config.warpgroups * 2 * BLOCK)
    candidates = []
    for width in (config.width,) if config.width else (64, 192):
        bytes_ = BLOCK * width * 2
        stages = room // bytes_ if config.stages is None else config.stages
        candidates.append(
            (stages // config.warpgroups * bytes_, width, stages // config.warpgroups)
        )
    _, width, stages = max(candidates)
    if stages * width < _WIDTH or room < config.warpgroups * stages * BLOCK * width * 2:
        raise ValueError(f"expected rings that fit and have room for a block each, got {config}")
    return width, stages


_Partials = tuple[Float32[Array, "partials M C"], Float32[Array, "partials M"]]


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
    config: FewQueries,
    interpret: Any = None,
) -> tuple[BFloat16[Array, "B M C"], Float32[Array, "B M"], _Partials]:
    """As :func:`mosaic_gpu_kernel.attend`, with M = T * H a multiple of 8 and at most 32."""
    B, N, _ = q_latent.shape
    W = config.warpgroups
    width, ring = rings(N, config)
    slices = _WIDTH // width  # per key block
    partitions = schedule.partitions
    gpu = interpret is None
    early = config.early and gpu and hasattr(plgpu, "griddepcontrol_wait")
    # Table entries past a sequence's length may be anything; clip them to the page pool.
    last_page, max_pages = pages.shape[0] - 1, block_tables.shape[1]
    i32 = jnp.int32

    def mla_decode(ql_g, qr_g, kv_g, tables_g, schedule_g, out_g, lse_g, partial_g, partial_lse_g,
                   ql_s, qr_s, kv_s, p_s, scratch_s, stage_barriers, q_full, q_free,
                   *handover_s):  # fmt: skip
        stage_barriers, q_full, q_free = (
            Barriers(each, interpret) for each in (stage_barriers, q_full, q_free)
        )
        stage_barriers.initialise([1] * (W * ring) + [WARPS] * (W * ring + W))
        q_full.initialise([2])
        q_free.initialise([W * WARPS])
        if early:
            plgpu.griddepcontrol_launch_dependents()
            plgpu.griddepcontrol_wait()
        partition, wg = lax.axis_index("partition"), lax.axis_index("wg")

        # Block n of a partition goes to warpgroup n % W, as block n // W of its ring.
        def owner(n):
            return n & (W - 1)

        def ring_index(n):
            return lax.shift_right_logical(n, i32(W - 1))

        def full(w, stage):
            return w * ring + stage

        def free(w, stage):
            return (W + w) * ring + stage

        def handover(w):
            return 2 * W * ring + w

        def stages_of(r):
            """Returns (stage, use of the stage) of each slice of a ring's r-th block.

            The slices wrap around at most once, because a ring has room for a block or more.
            """
            first = r * slices
            use = lax.div(first, i32(ring))
            stage = first - use * ring
            stages = []
            for k in range(slices):
                wraps = stage + k >= ring
                stages.append((jnp.where(wraps, stage + (k - ring), stage + k),
                              jnp.where(wraps, use + 1, use)))  # fmt: skip
            return stages

        def stage_ref(w, stage):
            return kv_s.at[w * ring + stage]

        def partition_range():
            """Returns the partition's entry of the schedule, read in one memory latency."""
            return tuple(schedule_g[partition, k] for k in range(4))

        def segment(i, work_range):
            """Returns the partition's i-th sequence, its first block here, and its blocks here."""
            first_sequence, last_sequence, first_block, end_block = work_range
            b = first_sequence + i
            begin = jnp.where(i == 0, first_block, 0)
            return (
                b,
                begin,
                jnp.where(b == last_sequence, end_block, schedule_g[partitions + b, 0]) - begin,
            )

        def page_of(b, block):
            page = tables_g[b, jnp.minimum(block, max_pages - 1)]
            return jnp.clip(page, 0, last_page)

        def producer_warpgroup():
            if W == 2:
                plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")
            sequence_count = schedule_g[partition, 1] - schedule_g[partition, 0] + 1

            def fetch_queries(i):
                @pl.when(i > 0)
                def _():
                    q_free.wait(0, i - 1)

                b = schedule_g[partition, 0] + i
                for source, target, columns in ((ql_g, ql_s, LATENT), (qr_g, qr_s, ROPE)):
                    window = b, pl.ds(0, N), pl.ds(0, columns)
                    q_full.copy(0, source, window, target.at[0], None)

            def fetch_blocks(i, done):
                work_range = partition_range()
                page = page_of(work_range[0] + i, jnp.where(i == 0, work_range[2], 0))
                b, begin, count = segment(i, work_range)

                def fetch(j, page):
                    ahead = page_of(b, begin + j + 1)
                    w = owner(done + j)
                    for k, (stage, use) in enumerate(stages_of(ring_index(done + j))):

                        @pl.when(use > 0)
                        def _(stage=stage, use=use):
                            stage_barriers.wait(free(w, stage), use - 1)

                        window = page, pl.ds(0, BLOCK), pl.ds(k * width, width)
                        stage_barriers.copy(full(w, stage), kv_g, window, stage_ref(w, stage), None)
                    return ahead

                lax.fori_loop(0, count, fetch, page)
                return done + count

            def fetch_sequence(i, done):
                fetch_queries(i)
                return fetch_blocks(i, done)

            def wait_for_arrivals(done):
                """Waits for every outstanding arrival, after which the program may exit."""
                for w in range(W):
                    used = ring_index(done + (W - 1 - w)) * slices
                    for stage in range(ring):
                        uses = lax.div(used + (ring - 1 - stage), i32(ring))

                        @pl.when(uses > 0)
                        def _(w=w, stage=stage, uses=uses):
                            stage_barriers.wait(free(w, stage), uses - 1)

            def await_queries():
                @pl.when(sequence_count > 0)
                def _():
                    q_free.wait(0, sequence_count - 1)

            if not gpu:  # in the interpreter a warpgroup is one thread
                wait_for_arrivals(lax.fori_loop(0, sequence_count, fetch_sequence, i32(0)))
                await_queries()
                return

            @pl.when(warp_is(0))
            def _():
                wait_for_arrivals(lax.fori_loop(0, sequence_count, fetch_blocks, i32(0)))

            @pl.when(warp_is(1))
            def _():
                lax.fori_loop(0, sequence_count, lambda i, _: fetch_queries(i), None)
                await_queries()

        def consumer_warpgroup():
            if W == 2:
                plgpu.set_max_registers(_REGISTERS, action="increase")
            sequence_count = schedule_g[partition, 1] - schedule_g[partition, 0] + 1
            scratch = scratch_s.at[wg]

            def spread(vector, rows):
                return lax.broadcast_in_dim(vector, (rows, N), [1])

            def scores(r, block_stages):
                """Returns S^T of the ring's r-th block."""
                # Always zero, but the compiler cannot tell. Otherwise it would keep all descriptors
                # in registers.
                zero = lax.shift_right_logical(r, i32(24))

                def multiply(acc):
                    for k, (stage, use) in enumerate(block_stages):
                        stage_barriers.wait(full(wg, stage), use)
                        keys, first = stage_ref(wg, stage), k * width
                        latents = max(0, min(width, LATENT - first))
                        if latents:
                            q = ql_s.at[zero, :, pl.ds(first, latents)]
                            plgpu.wgmma(acc, keys.at[:, pl.ds(0, latents)], q.T)
                        if latents < width:
                            plgpu.wgmma(acc, keys.at[:, pl.ds(latents, ROPE)], qr_s.at[zero].T)
                    return acc[...]

                return pl.run_scoped(multiply, ACC((BLOCK, N), jnp.float32))

            def masked(s, length, block):
                """Returns ``s`` with -inf where a query row may not attend to a token."""
                token = plgpu.broadcasted_iota(i32, (BLOCK, N), 0, layout=WGMMA)
                visible = length - (queries - 1) - block * BLOCK
                if queries > 1:
                    row = plgpu.broadcasted_iota(i32, (BLOCK, N), 1, layout=WGMMA)
                    visible = visible + lax.div(row, i32(heads))
                return jnp.where(
                    token < jnp.minimum(visible, max_pages * BLOCK - block * BLOCK), s, -jnp.inf
                )

            def put(p_own, s, maximum):
                """Returns P and writes it to ``p_own``; wgmma may read it after a barrier."""
                p = jnp.exp2(s - spread(maximum, BLOCK))
                registers.put_transposed(p_own, p.astype(jnp.bfloat16), gpu=gpu)
                publish(interpret)
                return p

            def add_values(acc, p_own, block_stages, release):
                """Returns O^T + V^T P^T. ``release``: whether to release the block's stages."""

                def release_stage(stage):
                    @pl.when(release)
                    def _():
                        stage_barriers.arrive(free(wg, stage))

                def multiply(acc_ref):
                    for k, (stage, _) in enumerate(block_stages):
                        first, columns = k * width, min(width, LATENT - k * width)
                        if columns > 0:
                            values = stage_ref(wg, stage).at[:, pl.ds(0, columns)]
                            plgpu.wgmma(acc_ref.at[pl.ds(first, columns)], values.T, p_own.T)
                    if not gpu:
                        return acc_ref[...]
                    value_slices = -(-LATENT // width)
                    for k, (stage, _) in enumerate(block_stages):
                        if k < value_slices:
                            plgpu.wgmma_wait(value_slices - 1 - k)
                        release_stage(stage)
                    return None

                if gpu:
                    return pl.run_state(multiply)(ACC.init(acc))
                # The interpreter cannot carry an accumulator through run_state.
                acc = acc + pl.run_scoped(multiply, ACC((LATENT, N), jnp.float32))
                plgpu.commit_smem()
                for stage, _ in block_stages:
                    release_stage(stage)
                return acc

            def run_segment(i, carry):
                done, handovers = carry
                b, begin, count = segment(i, partition_range())
                length = schedule_g[partitions + b, 3]
                first = owner(wg - done)
                own_count = ring_index(count - first + (W - 1))
                has_last_block = owner(done + count - 1) == wg
                q_full.wait(0, i)

                @pl.when(own_count == 0)
                def _():
                    q_free.arrive(0)

                def process_block(k, carry):
                    acc, total, maximum = carry
                    j = first + k * W
                    last = k == own_count - 1
                    r = ring_index(done + j)
                    block_stages = stages_of(r)
                    # Double buffered: other warps' matmuls may still read the previous P.
                    p_own = p_s.at[wg, r & 1]
                    s = scores(r, block_stages)

                    @pl.when(last)
                    def _():
                        q_free.arrive(0)

                    s = masked(s * (scale * LOG2E), length, begin + j)
                    p = put(p_own, s, maximum)

                    def keep_maximum(acc, total, new_total, maximum):
                        del total
                        return acc, new_total, maximum

                    def raise_maximum(acc, total, new_total, maximum):
                        del new_total
                        new_maximum = registers.reduce_rows(s, "max", gpu=gpu)
                        new_maximum = registers.reduce_threads(new_maximum, "max", scratch, gpu=gpu)
                        raised = jnp.where(new_maximum > maximum + SLACK, new_maximum, maximum)
                        alpha = jnp.exp2(maximum - raised)
                        p = put(p_own, s, raised)
                        meet(interpret)
                        total = total * alpha + registers.reduce_rows(p, "add", gpu=gpu)
                        return acc * spread(alpha, LATENT), total, raised

                    above = registers.any_above(p, 2.0**SLACK, gpu=gpu)
                    new_total = total + registers.reduce_rows(p, "add", gpu=gpu)
                    acc, total, maximum = lax.cond(
                        above, raise_maximum, keep_maximum, acc, total, new_total, maximum
                    )
                    tokens = length - (begin + j) * BLOCK
                    # The same stages, recomputed so that they need no registers until here.
                    block_stages = stages_of(r + lax.shift_right_logical(length, i32(31)))

                    @pl.when(tokens < BLOCK)
                    def _():
                        # Values past the end must not be NaN: P is 0 there, and 0 * NaN is NaN.
                        for k, (stage, _) in enumerate(block_stages):
                            latents, slice_ref = (
                                min(width, LATENT - k * width),
                                stage_ref(wg, stage),
                            )
                            if latents > 0:
                                slice_columns = pl.ds(0, latents)
                                clear_tokens(slice_ref, slice_columns, tokens, interpret=interpret)
                        publish(interpret)
                        meet(interpret)

                    acc = add_values(acc, p_own, block_stages, ~last | has_last_block)
                    return acc, total, maximum

                acc = plgpu.layout_cast(jnp.full((LATENT, N), 0.0, jnp.float32), WGMMA)
                initial = column_vector(N, 0.0), column_vector(N, NO_SCORE)
                acc, total, maximum = lax.fori_loop(0, own_count, process_block, (acc, *initial))
                # A warpgroup without a block has had no barrier since it last read the scratch.
                reduce_total = functools.partial(
                    registers.reduce_threads, kind="add", scratch=scratch, gpu=gpu
                )
                total = lax.cond(own_count > 0, reduce_total, lambda total: total, total)

                if W == 2:
                    # The warpgroup that did not process the sequence's last block hands over its
                    # results in the stages of its own last block, and the other one releases them.
                    # Until then its ring has no room for another block, so it cannot hand over
                    # twice before the first results are read.
                    def block_of(w):
                        return stages_of(ring_index(done + count - 1 - w))

                    @pl.when(~has_last_block & (own_count > 0))
                    def _hand():
                        meet(interpret)  # the matmuls of all four warps have read the block
                        if gpu:
                            block = [stage_ref(wg, stage) for stage, _ in block_of(wg)]
                            registers.write_handover(block, acc, maximum, total)
                        else:
                            handover_s[0][pl.ds(0, LATENT)] = acc
                            handover_s[0][LATENT], handover_s[0][LATENT + 1] = maximum, total
                        stage_barriers.arrive(handover(wg))

                    def merge_other(acc, maximum, total):
                        other = 1 - wg
                        stage_barriers.wait(handover(other), handovers)
                        block_stages = block_of(other)
                        block = [stage_ref(other, stage) for stage, _ in block_stages]
                        if gpu:
                            other_maximum, other_total = registers.read_handover_vectors(
                                block, N, 2
                            )
                        else:
                            other_maximum, other_total = (
                                handover_s[0][LATENT],
                                handover_s[0][LATENT + 1],
                            )
                        new_maximum = jnp.maximum(maximum, other_maximum)
                        own_factor, other_factor = (
                            jnp.exp2(maximum - new_maximum),
                            jnp.exp2(other_maximum - new_maximum),
                        )
                        if gpu:
                            acc = registers.add_handover(block, acc, own_factor, other_factor)
                        else:
                            other_acc = handover_s[0][pl.ds(0, LATENT)]
                            acc = acc * spread(own_factor, LATENT) + other_acc * spread(
                                other_factor, LATENT
                            )
                        publish(interpret)
                        for stage, _ in block_stages:
                            stage_barriers.arrive(free(other, stage))
                        return acc, new_maximum, total * own_factor + other_total * other_factor

                    must_merge = has_last_block & (count > 1)
                    acc, maximum, total = lax.cond(
                        must_merge, merge_other, lambda *own: own, acc, maximum, total
                    )
                    handovers = handovers + must_merge.astype(i32)

                @pl.when(has_last_block)
                def _finish():
                    inverse = jnp.where(total > 0.0, 1.0 / total, 0.0)
                    out = acc * spread(inverse, LATENT)
                    lse = (maximum + jnp.log(total) * LOG2E) * (1.0 / LOG2E)
                    lse = jnp.where(total > 0.0, lse, jnp.full_like(lse, -jnp.inf))
                    is_split = schedule_g[partitions + b, 1] > 1

                    @pl.when(jnp.logical_not(is_split))
                    def _():
                        rounded = out.astype(jnp.bfloat16)
                        registers.store(out_g.at[b], lse_g.at[b], rounded, lse, gpu=gpu)

                    @pl.when(is_split)
                    def _():
                        partial = schedule_g[partitions + b, 2] + partition
                        target = partial_g.at[partial], partial_lse_g.at[partial]
                        registers.store(*target, out, lse, gpu=gpu)

                return done + count, handovers

            lax.fori_loop(0, sequence_count, run_segment, (i32(0), i32(0)))

        pl.when(wg == W)(producer_warpgroup)
        pl.when(wg < W)(consumer_warpgroup)

    # The interpreter cannot reinterpret bfloat16 memory as float32.
    handover_s = () if gpu else (plgpu.SMEM((LATENT + 2, N), jnp.float32),)
    out, lse, *partials = plgpu.kernel(
        mla_decode,
        out_type=results(B, N, partitions, padded=N),
        scratch_types=[
            tiles_of(1, N, LATENT),
            tiles_of(1, N, ROPE),
            tiles_of(W * ring, BLOCK, width),
            tiles_of(W, 2, N, BLOCK),
            plgpu.SMEM((W, 4 * N), jnp.float32),
            Barriers.scratch(2 * W * ring + W, 1, interpret),
            Barriers.scratch(1, 2, interpret),
            Barriers.scratch(1, W, interpret),
            *handover_s,
        ],
        grid=(partitions,),
        grid_names=("partition",),
        num_threads=W + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        **({} if gpu else {"interpret": interpret}),
    )(q_latent, q_rope, pages, block_tables, schedule.table)
    return out, lse, tuple(partials)
