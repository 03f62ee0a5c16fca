"""The Hopper kernel of mla_decode over a float8 cache: attention by parts of a schedule.

One program takes 64 query rows (of a row's T * H) through one part of the schedule, block after
block of 64 cached tokens, with three warpgroups that wait for each other at barriers alone:

* one fills the two slots of shared memory: it reads a block's latents into registers while the
  block before is in use, and writes them as bfloat16, times their scales, when a slot is given
  back; rope keys are copied as they are;
* two compute. Each takes the scores of every other block, S = Q K^T, and leaves
  P = exp(S - maximum) in place of the block's rope keys, which nobody needs any more; both add P V,
  each to its 256 of the 512 output columns, in registers. The running maximum passes from one to
  the other. The tensor cores get half of a block's scores, then this warpgroup's share of the block
  before, which gives its slot back, then the other half.

Half a block, the columns of one warpgroup's output, is filled at a time. Scores are kept in base 2.
Rows, parts, pieces and what follows the kernel are as in mosaic_gpu_kernel.
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

from pallas_kernels.mla_decode.float8_cache import ROPE, dequantize_latent
from pallas_kernels.mla_decode.float8_registers import (
    HALF,
    announce_rope,
    copy_rope,
    fetch_half,
    rope_copied,
    show,
    store_half,
    with_rounded_scales,
)
from pallas_kernels.mla_decode.kernel_parts import (
    ACC,
    LOG2E,
    NO_SCORE,
    ROW,
    SLACK,
    SLOTS,
    TILE,
    WGMMA,
    masked_scores,
    results,
    row_vector,
    tiles_of,
)
from pallas_kernels.mla_decode.rescale import scale_rows
from pallas_kernels.mla_decode.schedule import BLOCK, Schedule
from pallas_kernels.mosaic_ir import meet

_COMPUTE_REGISTERS, _FILL_REGISTERS = 192, 120  # a thread's: 2 a + b <= 504
_Pieces = tuple[Float32[Array, "pieces Mp C"], Float32[Array, "pieces Mp"]]


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
) -> tuple[BFloat16[Array, "B M C"], Float32[Array, "B M"], _Pieces]:
    """M = T * H rounded up to whole tiles, or less than one; query row m is query m // H.

    Returns:
      ``out`` and ``lse`` of the rows that one part took whole, and the pieces of all others.
    """
    B, M, _ = q_latent.shape
    rows = min(TILE, M)
    tiles = -(-M // TILE)
    parts = schedule.parts
    # Table entries past a row's length may be anything; they must not lead out of the pool.
    last_page, max_pages = pages.shape[0] - 1, block_tables.shape[1]

    def mla_decode_float8(ql_g, qr_g, kv_g, pages_g, plan_g, out_g, lse_g, piece_g, piece_lse_g,
             ql_s, qr_s, v_s, rope_s, vectors_s,
             q_full, max_ready, shared_ready, lone_ready):  # fmt: skip
        max_s, alpha_s = vectors_s.at[0:2], vectors_s.at[2:4]
        sum_s, sum_max_s, lse_s = vectors_s.at[4:6], vectors_s.at[6:8], vectors_s.at[8]
        part, wg = lax.axis_index("part"), lax.axis_index("wg")
        m0 = lax.axis_index("tile") * TILE
        first_row, last_row = plan_g[part, 0], plan_g[part, 1]
        row_count = last_row - first_row + 1

        # Few arrays of barriers: each keeps its phases in a register of every thread.
        def kv_full(slot, half):
            return lone_ready.at[slot * 2 + half]

        def kv_free(slot, half):
            return lone_ready.at[4 + slot * 2 + half]

        def p_ready(slot):
            return lone_ready.at[8 + slot]

        q_free, sum_ready, sum_free = (shared_ready.at[i] for i in range(3))

        def arrive_once(barrier):
            """One thread arrives for the warpgroup, which must be done as a whole."""
            meet(interpret)
            plgpu.barrier_arrive(barrier)

        def segment(i):
            """Of the part's i-th row: row, its length, first block, blocks taken here."""
            b = first_row + i
            begin = jnp.where(i == 0, plan_g[part, 2], 0)
            end = jnp.where(b == last_row, plan_g[part, 3], plan_g[parts + b, 0])
            return b, plan_g[parts + b, 3], begin, end - begin

        mask: Any = {
            "queries": queries, "heads": heads, "max_pages": max_pages, "first_row": lambda: m0
        }  # fmt: skip

        def filling_warpgroup():
            plgpu.set_max_registers(_FILL_REGISTERS, action="decrease")

            def look_up(b, block):
                """A block's page, and the tokens that are there from its first one on."""
                page = pages_g[b, jnp.minimum(block, max_pages - 1)]
                return jnp.clip(page, 0, last_page), plan_g[parts + b, 3] - block * BLOCK

            def fetch(page):
                if interpret is not None:
                    return ()
                page = kv_g.at[page]
                announce_rope(page)
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
                there = jnp.arange(BLOCK)[:, None] < tokens
                columns = latent[:, half * HALF : (half + 1) * HALF]
                v_s[slot, half] = jnp.where(there, columns, jnp.zeros_like(columns))
                if half:
                    rope_s[slot] = rope

            def fill(n, held, page, tokens, next_page):
                """Block n of the part to its slot, from registers; then the next one to them."""
                slot = n & 1

                @pl.when(n >= SLOTS)
                def _():
                    for half in range(2):
                        plgpu.barrier_wait(kv_free(slot, half))

                if interpret is not None:
                    for half in range(2):
                        interpreted_fill(slot, half, page, tokens)
                        arrive_once(kv_full(slot, half))
                    return held
                held = list(held)
                copy_rope(rope_s.at[slot], kv_g.at[page])
                for half in range(2):
                    mine = slice(2 * half, 2 * half + 2)
                    words, scales = held[mine]
                    store_half(v_s.at[slot, half], words, scales, tokens)
                    if half:
                        rope_copied()
                    show()
                    arrive_once(kv_full(slot, half))
                    held[mine] = fetch_half(kv_g.at[next_page], half)
                announce_rope(kv_g.at[next_page])
                return tuple(held)

            def run_segment(i, carry):
                done, *carry = carry
                b, _, begin, count = segment(i)

                def step(j, carry):
                    held, page, tokens = carry
                    more = j + 1 < count
                    next_page, next_tokens = look_up(
                        jnp.where(more, b, jnp.minimum(b + 1, last_row)),
                        jnp.where(more, begin + j + 1, 0),
                    )
                    held = fill(done + j, held, page, tokens, next_page)

                    @pl.when((j == 0) & (i > 0))
                    def _():
                        plgpu.barrier_wait(q_free)
                        fetch_queries(b)

                    return held, next_page, next_tokens

                return done + count, *lax.fori_loop(0, count, step, tuple(carry))

            @pl.when(row_count > 0)
            def _():
                fetch_queries(first_row)
                page, tokens = look_up(first_row, plan_g[part, 2])
                carry = jnp.int32(0), fetch(page), page, tokens
                done = lax.fori_loop(0, row_count, run_segment, carry)[0]
                # Nobody leaves before all that is still to arrive at its barriers has come.
                plgpu.barrier_wait(q_free)
                for slot in range(SLOTS):

                    @pl.when(done > slot)
                    def _(slot=slot):
                        for half in range(2):
                            plgpu.barrier_wait(kv_free(slot, half))

        def computing_warpgroup(own):
            """``own``: the parity of the blocks whose scores it takes, and their slot."""
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            other = 1 - own

            def add_scores(acc, k, halves=(0, 1)):
                # Zero, but not to the compiler: it would else compute the descriptors before the
                # loop, and keep them in registers.
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
                """acc + P V."""

                def multiply(acc_ref):
                    if interpret is None:
                        acc_ref[...] = acc
                    plgpu.wgmma(acc_ref, rope_s.at[slot], v_s.at[slot, own])
                    return acc_ref[...]

                added = pl.run_scoped(multiply, ACC((TILE, HALF), jnp.float32))
                return added if interpret is None else acc + added

            def softmax(s, before, length, block, own_max, total):
                """Leaves P to all, and the maximum and its factor; returns them and the sum."""
                whole = length - (queries - 1)  # tokens that every query sees
                whole = jnp.minimum(whole, max_pages * BLOCK)
                s = lax.cond(
                    (block + 1) * BLOCK <= whole,
                    lambda: s,
                    lambda: masked_scores(s, length, block, **mask),
                )
                top = s.max(axis=1) * (scale * LOG2E)
                running = jnp.where(top > before + SLACK, top, before)
                alpha = jnp.exp2(before - running)
                max_s[own] = running
                alpha_s[own] = alpha
                plgpu.barrier_arrive(max_ready.at[own])
                p = jnp.exp2(
                    s * (scale * LOG2E) - lax.broadcast_in_dim(running, (TILE, BLOCK), [0])
                )
                rope_s[own] = p.astype(jnp.bfloat16)
                show(interpret)
                arrive_once(p_ready(own))
                total = total * jnp.exp2(own_max - running) + p.sum(axis=1)
                return alpha, running, total

            def run_segment(i, done):
                b, length, begin, count = segment(i)
                first = (own + done) & 1
                mine = lax.shift_right_logical(jnp.maximum(count - first + 1, 0), jnp.int32(1))
                zeros: Any = plgpu.layout_cast(jnp.full((TILE, HALF), 0.0, jnp.float32), WGMMA)
                nothing = zeros, row_vector(NO_SCORE), row_vector(0.0)
                plgpu.barrier_wait(q_full)

                def first_block():
                    """The segment's first, if it is mine."""
                    s = scores(done)

                    @pl.when(done >= 1)
                    def _():
                        plgpu.barrier_wait(max_ready.at[other])

                    acc, *sums = nothing
                    sums = softmax(s, row_vector(NO_SCORE), length, begin, *sums)[1:]
                    return finish_last(add_values(acc, own), count > 1), *sums

                def finish_last(acc, more):
                    @pl.when(more)
                    def _():
                        arrive_once(kv_free(own, own))

                    return acc

                def add_block(k, carry):
                    """Scores of my block j, values of j - 1 under its softmax, values of j."""
                    acc, *sums = carry
                    j = first + 2 * k

                    def rescaled():
                        plgpu.barrier_wait(max_ready.at[other])
                        alpha = plgpu.layout_cast(alpha_s[other], ROW)
                        scaled = scale_rows(acc, alpha, interpret=interpret)
                        plgpu.barrier_wait(p_ready(other))
                        return scaled

                    def soft(s):
                        before = plgpu.layout_cast(max_s[other], ROW)
                        return softmax(s, before, length, begin + j, *sums)

                    def overlapped(s_ref, acc_ref):
                        add_scores(s_ref, k, halves=(0,))
                        acc_ref[...] = rescaled()
                        plgpu.wgmma(acc_ref, rope_s.at[other], v_s.at[other, own])
                        add_scores(s_ref, k, halves=(1,))
                        plgpu.wgmma_wait(2)  # all but this half and the rope
                        arrive_once(kv_free(other, own))
                        kept = soft(plgpu.wgmma_accumulator_load(s_ref, wait_n=0))
                        return acc_ref[...], *kept

                    if interpret is None:
                        acc, alpha, *sums = pl.run_scoped(
                            overlapped,
                            ACC((TILE, BLOCK), jnp.float32),
                            ACC((TILE, HALF), jnp.float32),
                        )
                    else:  # it has no two accumulators at once
                        s = scores(k, (0,))
                        acc = add_values(rescaled(), other)
                        s = s + scores(k, (1,))
                        arrive_once(kv_free(other, own))
                        alpha, *sums = soft(s)
                    acc = add_values(scale_rows(acc, alpha, interpret=interpret), own)
                    return finish_last(acc, j + 1 < count), *sums

                carry = lax.cond(first == 0, first_block, lambda: nothing)
                carry = lax.fori_loop(1 - first, mine, add_block, carry)
                acc, *sums = carry
                plgpu.barrier_arrive(q_free)

                def add_last():
                    """The segment's last block, if it is not mine."""
                    plgpu.barrier_wait(p_ready(other))
                    alpha = plgpu.layout_cast(alpha_s[other], ROW)
                    return add_values(scale_rows(acc, alpha, interpret=interpret), other)

                slot = (done + count - 1) & 1
                acc = lax.cond(slot == own, lambda: acc, add_last)
                finish_row(i, b, slot, acc, *sums)
                return done + count

            def finish_row(i, b, slot, acc, own_max, own_sum):
                @pl.when(i > 0)
                def _():
                    plgpu.barrier_wait(sum_free)

                sum_max_s[own], sum_s[own] = own_max, own_sum
                plgpu.barrier_arrive(sum_ready)
                plgpu.barrier_wait(sum_ready)
                maxima = [plgpu.layout_cast(sum_max_s[k], ROW) for k in range(2)]
                sums = [plgpu.layout_cast(sum_s[k], ROW) for k in range(2)]
                plgpu.barrier_arrive(sum_free)
                top = jnp.maximum(*maxima)
                total = sums[0] * jnp.exp2(maxima[0] - top) + sums[1] * jnp.exp2(maxima[1] - top)
                inverse = jnp.where(total > 0.0, 1.0 / total, 0.0)
                acc = acc * lax.broadcast_in_dim(inverse, (TILE, HALF), [0])
                pieces = plan_g[parts + b, 1]

                @pl.when(own == 0)
                def _():
                    lse = (top + jnp.log(total) * LOG2E) * (1.0 / LOG2E)
                    lse_s[...] = jnp.where(total > 0.0, lse, jnp.full_like(lse, -jnp.inf))
                    plgpu.commit_smem()

                @pl.when(pieces == 1)
                def _():
                    # Into the half of the last block that only this warpgroup reads.
                    v_s[slot, own] = acc.astype(jnp.bfloat16)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(
                        v_s.at[slot, own, pl.ds(0, rows)],
                        out_g.at[b, pl.ds(m0, rows), pl.ds(own * HALF, HALF)],
                    )

                    @pl.when(own == 0)
                    def _():
                        plgpu.copy_smem_to_gmem(
                            lse_s.at[pl.ds(0, rows)], lse_g.at[b, pl.ds(m0, rows)]
                        )

                @pl.when(pieces > 1)
                def _():
                    piece = plan_g[parts + b, 2] + part
                    piece_g[piece, pl.ds(m0, TILE), pl.ds(own * HALF, HALF)] = acc

                    @pl.when(own == 0)
                    def _():
                        plgpu.copy_smem_to_gmem(lse_s, piece_lse_g.at[piece, pl.ds(m0, TILE)])

                plgpu.wait_smem_to_gmem(0)
                arrive_once(kv_free(slot, own))

            done = lax.fori_loop(0, row_count, run_segment, jnp.int32(0))

            # Nobody leaves before all that is still to arrive at its barriers has come.
            @pl.when((done >= 1) & ((done & 1) == own))
            def _():
                plgpu.barrier_wait(max_ready.at[other])

            @pl.when(row_count > 0)
            def _():
                plgpu.barrier_wait(sum_free)

        pl.when(wg == 2)(filling_warpgroup)
        for own in range(2):  # each its own code, whose addresses are then constants
            pl.when(wg == own)(functools.partial(computing_warpgroup, own))

    out, lse, *pieces = plgpu.kernel(
        mla_decode_float8,
        out_type=results(B, M, parts),
        scratch_types=[
            tiles_of(2, TILE, HALF),
            tiles_of(TILE, ROPE),
            tiles_of(SLOTS, 2, BLOCK, HALF),
            tiles_of(SLOTS, BLOCK, ROPE),
            plgpu.SMEM((9, TILE), jnp.float32),  # one array: each is rounded up to 1 KiB
            plgpu.Barrier(num_arrivals=3),
            plgpu.Barrier(num_barriers=SLOTS),
            plgpu.Barrier(num_arrivals=2, num_barriers=3),
            plgpu.ClusterBarrier(collective_axes=("one",), num_barriers=5 * SLOTS),
        ],
        # The last axis runs fastest: tiles that read the same pages run together.
        grid=(parts, tiles),
        grid_names=("part", "tile"),
        cluster=(1,),  # of one program, for its barriers: one thread arrives for a warpgroup
        cluster_names=("one",),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(q_latent, q_rope, pages, block_tables, schedule.table)
    return out, lse, tuple(pieces)
