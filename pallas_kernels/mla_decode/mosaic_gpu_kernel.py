"""The Hopper kernels behind mla_decode: attention by parts of a schedule, and the merge of pieces.

One program takes 64 query rows (of a row's T * H) through one part of the schedule, block after
block of 64 cached tokens, with four warpgroups that wait for each other at barriers alone:

* two score warpgroups take the even and the odd blocks. Each fetches its blocks into its own half
  of the shared memory, multiplies S = Q K^T, and leaves P = exp(S - maximum) in place of the
  block's rope keys, which nobody needs any more. The running maximum passes from one to the other.
* two value warpgroups hold 256 of the 512 output columns each, in registers, and add P V.

So one block's softmax runs under the products of its neighbours, and a block is fetched while the
other is in use. Two programs whose query rows belong to the same row of the batch form a cluster:
each fetches half of a block for both (multicast), which halves what they ask of the L2 cache.
Scores are kept in base 2.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int

from pallas_kernels.mla_decode.barriers import WARPS, Barriers
from pallas_kernels.mla_decode.clear import clear_tokens
from pallas_kernels.mla_decode.float8_cache import LATENT, ROPE
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
from pallas_kernels.mla_decode.rescale import publish, scale_rows
from pallas_kernels.mla_decode.schedule import BLOCK, Schedule
from pallas_kernels.mosaic_ir import first_warp, meet

_HALF = LATENT // 2  # latent columns that are fetched, multiplied and given back together
_OWN = _HALF // 2  # of a half, a value warpgroup's output columns
_COLUMNS = 8  # of a WGMMA tile of registers: the least that a slice can take

# 4 * 128 registers a thread are the SM's: what the value warpgroups take, the others give.
_VALUE_REGISTERS, _SCORE_REGISTERS = 160, 96


@dataclasses.dataclass(frozen=True)
class Config:
    """What may be tuned without changing a result."""

    multicast: bool = True
    """Two programs of a row share the fetching of its blocks."""

    early: bool = True
    """Launched before the kernel ahead has ended, whose end is then awaited."""


def _store(ref: Any, value: jax.Array, interpret: Any) -> None:
    """Also half a sector of 32 bytes at a time, which jax 0.12 wants to be asked for."""
    if interpret is None and hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        ref[...] = value


_Pieces = tuple[Float32[Array, "pieces Mp C"], Float32[Array, "pieces Mp"]]


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
) -> tuple[BFloat16[Array, "B M C"], Float32[Array, "B M"], _Pieces]:
    """M = T * H rounded up to whole tiles, or less than one; query row m is query m // H.

    Returns:
      ``out`` and ``lse`` of the rows that one part took whole, and the pieces of all others.
    """
    B, M, _ = q_latent.shape
    rows = min(TILE, M)
    tiles = -(-M // TILE)
    staged = rows < TILE  # registers cannot be stored in part: copies can
    pair = 2 if tiles % 2 == 0 and config.multicast else 1
    parts = schedule.parts
    shared = "pair" if pair == 2 else None  # the axis over which copies are multicast
    early = config.early and interpret is None and hasattr(plgpu, "griddepcontrol_wait")
    # Table entries past a row's length may be anything; they must not lead out of the pool.
    last_page, max_pages = pages.shape[0] - 1, block_tables.shape[1]

    def mla_decode(ql_g, qr_g, kv_g, pages_g, plan_g, out_g, lse_g, piece_g, piece_lse_g,
             ql_s, qr_s, v_s, rope_s, vectors_s,
             query_barrier, ready, shared_ready, kv_free):  # fmt: skip
        loaded, ready, shared_ready = (
            Barriers(each, interpret) for each in (query_barrier, ready, shared_ready)
        )
        loaded.initialise([3])
        ready.initialise([1] * (3 * SLOTS) + [WARPS] * (2 * SLOTS))
        shared_ready.initialise([2 * WARPS] * 3)
        if early:
            plgpu.griddepcontrol_launch_dependents()
            plgpu.griddepcontrol_wait()
        max_s, alpha_s = vectors_s.at[0:2], vectors_s.at[2:4]
        sum_s, sum_max_s, lse_s = vectors_s.at[4:6], vectors_s.at[6:8], vectors_s.at[8]
        part, wg = lax.axis_index("part"), lax.axis_index("wg")

        def m0():
            """The tile's first query row: computed where it is used, not kept."""
            return (lax.axis_index("tile") * pair + lax.axis_index("pair")) * TILE

        # Block n of a part is use n // 2 of its slot, and of the slot's barriers.
        def kv_full(slot, half):  # the third: rope keys
            return slot * 3 + half

        def max_ready(slot):
            return 3 * SLOTS + slot

        def p_ready(slot):
            return 4 * SLOTS + slot

        q_free, sum_ready, sum_free = range(3)  # use i of each is the part's i-th row

        def of_part():
            """First and last row, first block, end block: read together, in one latency."""
            return tuple(plan_g[part, k] for k in range(4))

        def segment(i, held):
            """Of the part's i-th row: row, first block, blocks taken here, whether to its end."""
            first_row, last_row, first_block, end_block = held
            b = first_row + i
            blocks = plan_g[parts + b, 0]
            begin = jnp.where(i == 0, first_block, 0)
            end = jnp.where(b == last_row, end_block, blocks)
            return b, begin, end - begin, end == blocks

        mask: Any = {
            "queries": queries, "heads": heads, "max_pages": max_pages, "first_row": m0
        }  # fmt: skip

        def score_warpgroup():
            plgpu.set_max_registers(_SCORE_REGISTERS, action="decrease")
            row_count = plan_g[part, 1] - plan_g[part, 0] + 1
            own = wg - 2  # the parity of its blocks, and their slot
            other = 1 - own

            def page_of(b, block):
                page = pages_g[b, jnp.minimum(block, max_pages - 1)]
                return jnp.clip(page, 0, last_page)

            def fetch(page, *, wait):
                """Into this warpgroup's slot, half by half as its last block is done with."""

                @pl.when(first_warp(interpret is None))
                def _():
                    for half in range(2):
                        if wait:
                            plgpu.barrier_wait(kv_free.at[own * 2 + half])
                        window = page, pl.ds(0, BLOCK), pl.ds(_HALF * half, _HALF)
                        ready.copy(kv_full(own, half), kv_g, window, v_s.at[own, half], shared)
                    window = page, pl.ds(0, BLOCK), pl.ds(LATENT, ROPE)
                    ready.copy(kv_full(own, 2), kv_g, window, rope_s.at[own], shared)

            def run_segment(i, done):
                """``done``: blocks of the part before this segment, whoever took them."""
                first = (own + done) & 1
                first_row, _, first_block, _ = held = of_part()
                ahead = page_of(first_row + i, jnp.where(i == 0, first_block, 0) + first)
                b, begin, count, _ = segment(i, held)
                length = plan_g[parts + b, 3]
                mine = lax.shift_right_logical(jnp.maximum(count - first + 1, 0), jnp.int32(1))
                # Blocks that every query sees whole, and how many of them are mine.
                whole = jnp.clip(lax.div(length - queries + 1, BLOCK) - begin, 0, count)
                whole = lax.shift_right_logical(jnp.maximum(whole - first + 1, 0), jnp.int32(1))

                shared_ready.arrive(q_free)

                @pl.when((own == 0) & first_warp(interpret is None))
                def _():
                    shared_ready.wait(q_free, i)
                    m = pl.ds(m0(), rows)
                    for half in range(2):
                        window = b, m, pl.ds(_HALF * half, _HALF)
                        loaded.copy(0, ql_g, window, ql_s.at[half, pl.ds(0, rows)], None)
                    window = b, m, pl.ds(0, ROPE)
                    loaded.copy(0, qr_g, window, qr_s.at[0, pl.ds(0, rows)], None)

                for fresh in (True, False):

                    @pl.when((first < count) & ((done + first < SLOTS) == fresh))
                    def _(fresh=fresh):
                        fetch(ahead, wait=not fresh)

                loaded.wait(0, i)

                def scores(k, use):
                    # Zero, but not to the compiler: it would else compute all 72 descriptors before
                    # the loop, and keep them in registers that this warpgroup does not have.
                    zero = lax.shift_right_logical(k, jnp.int32(24))
                    slot = own + zero

                    def multiply(acc):
                        for half in range(2):
                            ready.wait(kv_full(own, half), use)
                            keys = v_s.at[slot, half]
                            plgpu.wgmma(acc, ql_s.at[half + zero], keys.transpose((1, 0)))
                        ready.wait(kv_full(own, 2), use)
                        plgpu.wgmma(acc, qr_s.at[zero], rope_s.at[slot].transpose((1, 0)))
                        return acc[...]

                    return pl.run_scoped(multiply, ACC((TILE, BLOCK), jnp.float32))

                def take_block(k, carry, *, masked):
                    own_max, total = carry
                    j = first + 2 * k
                    # Early, for its latency to hide behind the product; but the masked blocks, the
                    # last, have rarely one to follow, and no register for it.
                    ahead = None if masked else page_of(b, begin + j + 2)
                    use = lax.shift_right_logical(done + j, jnp.int32(1))
                    s = scores(k, use)
                    if masked:
                        s = masked_scores(s, length, begin + j, **mask)
                    top = s.max(axis=1) * (scale * LOG2E)

                    @pl.when(done + j >= 1)
                    def _():
                        # Of the block before: use - 1 if that is in the second slot.
                        ready.wait(max_ready(other), use + own + 1)

                    before = lax.cond(
                        j == 0,
                        lambda: row_vector(NO_SCORE),
                        lambda: plgpu.layout_cast(max_s[other], ROW),
                    )
                    running = jnp.where(top > before + SLACK, top, before)
                    max_s[own] = running
                    alpha_s[own] = jnp.exp2(before - running)
                    ready.arrive(max_ready(own))
                    p = jnp.exp2(
                        s * (scale * LOG2E) - lax.broadcast_in_dim(running, (TILE, BLOCK), [0])
                    )
                    meet(interpret)  # all four warps' products have read the rope keys
                    rope_s[own] = p.astype(jnp.bfloat16)
                    publish(interpret)  # every thread arrives after that: no need to meet before
                    ready.arrive(p_ready(own))
                    # Sums of eight columns: what a thread holds of them is added up in the end.
                    added = functools.reduce(
                        jnp.add, (p[:, c : c + _COLUMNS] for c in range(0, BLOCK, _COLUMNS))
                    )
                    kept = jnp.exp2(own_max - running)
                    total = total * lax.broadcast_in_dim(kept, total.shape, [0]) + added

                    @pl.when(j + 2 < count)
                    def _():
                        fetch(page_of(b, begin + j + 2) if masked else ahead, wait=True)

                    return running, total

                nothing = jnp.full((TILE, _COLUMNS), 0.0, jnp.float32)
                carry = row_vector(NO_SCORE), plgpu.layout_cast(nothing, WGMMA)
                carry = lax.fori_loop(0, whole, functools.partial(take_block, masked=False), carry)
                carry = lax.fori_loop(
                    whole, mine, functools.partial(take_block, masked=True), carry
                )

                @pl.when(i > 0)
                def _():
                    shared_ready.wait(sum_free, i - 1)

                sum_max_s[own], sum_s[own] = carry[0], carry[1].sum(axis=1)
                shared_ready.arrive(sum_ready)
                return done + count

            done = lax.fori_loop(0, row_count, run_segment, jnp.int32(0))

            # Nobody leaves before all that is still to arrive at its barriers has come.
            @pl.when((done >= 1) & ((done & 1) == own))
            def _():
                ready.wait(max_ready(other), lax.shift_right_logical(done - 1, jnp.int32(1)))

            @pl.when((done > own) & first_warp(interpret is None))
            def _():
                for half in range(2):
                    plgpu.barrier_wait(kv_free.at[own * 2 + half])

            @pl.when(row_count > 0)
            def _():
                shared_ready.wait(sum_free, row_count - 1)

        def value_warpgroup():
            plgpu.set_max_registers(_VALUE_REGISTERS, action="increase")

            columns = pl.ds(wg * _OWN, _OWN)
            row_count = plan_g[part, 1] - plan_g[part, 0] + 1

            def release(slot, half):
                # One thread arrives for the warpgroup, which must be done as a whole.
                meet(interpret)
                plgpu.barrier_arrive(kv_free.at[slot * 2 + half])

            def add_block(block, acc, *, clear=None, keep=False):
                """Adds P V. ``clear``: only in the last block of a segment: tokens of the block
                that are there, for what follows them is to be zeroed. ``keep``: does not yet give
                the slot back."""
                slot = block & 1
                use = lax.shift_right_logical(block, jnp.int32(1))
                ready.wait(max_ready(slot), use)
                alpha = plgpu.layout_cast(alpha_s[slot], ROW)
                acc = scale_rows(acc, alpha, interpret=interpret)
                ready.wait(p_ready(slot), use)
                if clear is not None:

                    @pl.when(clear < BLOCK)
                    def _():
                        for half in range(2):
                            clear_tokens(v_s.at[slot, half], columns, clear, interpret=interpret)
                        plgpu.commit_smem()

                def multiply(acc_ref):
                    for half in range(2):
                        part = acc_ref.at[:, half * _OWN : (half + 1) * _OWN]
                        plgpu.wgmma(part, rope_s.at[slot], v_s.at[slot, half, :, columns])
                    if not keep:
                        plgpu.wgmma_wait(1)
                        release(slot, 0)
                    return acc_ref[...] if interpret is not None else None

                if interpret is not None:  # it cannot carry an accumulator through run_state
                    acc = acc + pl.run_scoped(multiply, ACC((TILE, _HALF), jnp.float32))
                else:
                    acc = pl.run_state(multiply)(ACC.init(acc))
                if not keep:
                    release(slot, 1)
                return acc

            def run_segment(i, done):
                b, begin, count, to_end = segment(i, of_part())

                def step(j, acc):
                    return add_block(done + j, acc)

                acc: Any = plgpu.layout_cast(jnp.full((TILE, _HALF), 0.0, jnp.float32), WGMMA)
                acc = lax.fori_loop(0, count - 1, step, acc)
                last = done + count - 1
                slot = last & 1
                clear = jnp.where(to_end, plan_g[parts + b, 3] - (begin + count - 1) * BLOCK, BLOCK)
                acc = add_block(last, acc, clear=clear, keep=staged)

                shared_ready.wait(sum_ready, i)
                maxima = [plgpu.layout_cast(sum_max_s[k], ROW) for k in range(2)]
                sums = [plgpu.layout_cast(sum_s[k], ROW) for k in range(2)]
                top = jnp.maximum(*maxima)
                total = sums[0] * jnp.exp2(maxima[0] - top) + sums[1] * jnp.exp2(maxima[1] - top)
                shared_ready.arrive(sum_free)
                inverse = jnp.where(total > 0.0, 1.0 / total, 0.0)
                acc = acc * lax.broadcast_in_dim(inverse, (TILE, _HALF), [0])
                pieces = plan_g[parts + b, 1]

                @pl.when(wg == 0)
                def _():
                    lse = (top + jnp.log(total) * LOG2E) * (1.0 / LOG2E)
                    lse_s[...] = jnp.where(total > 0.0, lse, jnp.full_like(lse, -jnp.inf))
                    plgpu.commit_smem()

                def columns_of(half):
                    return acc[:, half * _OWN : (half + 1) * _OWN]

                def place(half):
                    return pl.ds(half * _HALF + wg * _OWN, _OWN)

                @pl.when(pieces == 1)
                def _():
                    if staged:
                        # Into the columns of the block that only this warpgroup reads.
                        for half in range(2):
                            v_s[slot, half, :, columns] = columns_of(half).astype(jnp.bfloat16)
                        plgpu.commit_smem()
                        # A copy takes what lies together: eight rows.
                        for half, m in itertools.product(range(2), range(0, rows, 8)):
                            plgpu.copy_smem_to_gmem(
                                v_s.at[slot, half, pl.ds(m, 8), columns],
                                out_g.at[b, pl.ds(m0() + m, 8), place(half)],
                            )
                    else:
                        for half in range(2):
                            part = columns_of(half).astype(jnp.bfloat16)
                            _store(out_g.at[b, pl.ds(m0(), TILE), place(half)], part, interpret)

                    @pl.when(wg == 0)
                    def _():
                        plgpu.copy_smem_to_gmem(
                            lse_s.at[pl.ds(0, rows)], lse_g.at[b, pl.ds(m0(), rows)]
                        )

                @pl.when(pieces > 1)
                def _():
                    piece = plan_g[parts + b, 2] + lax.axis_index("part")
                    for half in range(2):
                        piece_g[piece, pl.ds(m0(), TILE), place(half)] = columns_of(half)

                    @pl.when(wg == 0)
                    def _():
                        plgpu.copy_smem_to_gmem(lse_s, piece_lse_g.at[piece, pl.ds(m0(), TILE)])

                plgpu.wait_smem_to_gmem(0)
                if staged:
                    for half in range(2):
                        release(slot, half)
                return done + count

            lax.fori_loop(0, row_count, run_segment, jnp.int32(0))

        pl.when(wg >= 2)(score_warpgroup)
        pl.when(wg < 2)(value_warpgroup)

    out, lse, *pieces = plgpu.kernel(
        mla_decode,
        out_type=results(B, M, parts),
        scratch_types=[
            tiles_of(2, TILE, _HALF),
            tiles_of(1, TILE, ROPE),
            tiles_of(SLOTS, 2, BLOCK, _HALF),
            tiles_of(SLOTS, BLOCK, ROPE),
            plgpu.SMEM((9, TILE), jnp.float32),  # one array: each is rounded up to 1 KiB
            Barriers.scratch(1, 3, interpret),
            Barriers.scratch(5 * SLOTS, 1, interpret),
            Barriers.scratch(3, 2, interpret),
            plgpu.ClusterBarrier(collective_axes=("pair",), num_arrivals=2, num_barriers=2 * SLOTS),
        ],
        # The last axis runs fastest: tiles that read the same pages run together.
        grid=(parts, tiles // pair),
        grid_names=("part", "tile"),
        cluster=(pair,),
        cluster_names=("pair",),
        num_threads=4,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )(q_latent, q_rope, pages, block_tables, schedule.table)
    return out, lse, tuple(pieces)
