"""mla_decode's Hopper kernel for few query rows: 32 at most, as of 16 heads with two tokens.

The products are transposed. S^T = K Q^T and O^T += V^T P^T have tokens or latent columns as the 64
rows of a wgmma and N query rows across, so that nothing is padded; both read a block of 64 cached
tokens where the copy put it, as K row by row, as V^T column by column. O^T takes 4 N registers a
thread: one warpgroup holds it all.

* Each of one or two warpgroups takes every other block of a part through all of this, with a
  maximum, sums and O^T of its own, out of a ring of its own. Where a row ends, the one that took
  its last block adds what the other hands over.
* A warp of a third keeps the rings filled, in pieces of a block that are given back one by one, and
  runs ahead into the rows that follow. Another fetches their queries.

So a multiprocessor has 150 KB and more under way or in use, and no block waits for the one before
it. HBM gives a multiprocessor a block in 3,900 cycles. Shared memory needs about 2,000 for it: 576
to copy in, 1,360 for 68 products of 2.5 KB (N = 16). Nor is a block's own chain, about 2,000 too,
longer, and one warpgroup's hides under the other's.

A maximum stays until a score exceeds it by SLACK, see kernel_parts. Whether one does is voted on
when P has been written, at the barrier that P needs anyway; if so, P is written again.
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
_SHARED_BYTES = 232448 - 6 * 1024  # what a program may have, less barriers and vectors
_COPY_REGISTERS, _REGISTERS = 24, 240  # of 3 * 168


@dataclasses.dataclass(frozen=True)
class FewQueries:
    """What may be tuned; ``warpgroups`` decides where sums are rounded."""

    warpgroups: int = 2
    """That compute side by side: 1 or 2."""

    width: int | None = None
    """Columns of a block in a piece of a ring: 64 or 192; of these what leaves less memory idle."""

    stages: int | None = None
    """Pieces in all rings together; if missing, as many as there is room for."""

    early: bool = True
    """Launched before the kernel ahead has ended, whose end is then awaited."""


def rings(N: int, config: FewQueries) -> tuple[int, int]:
    """Columns of a piece, and pieces in each warpgroup's ring."""
    if config.warpgroups not in (1, 2):
        raise ValueError(f"expected 1 or 2 warpgroups, got {config}")
    room = _SHARED_BYTES - N * 2 * (_WIDTH + config.warpgroups * 2 * BLOCK)
    found = []
    for width in (config.width,) if config.width else (64, 192):
        bytes_ = BLOCK * width * 2
        most = room // bytes_ if config.stages is None else config.stages
        found.append((most // config.warpgroups * bytes_, width, most // config.warpgroups))
    _, width, stages = max(found)
    if stages * width < _WIDTH or room < config.warpgroups * stages * BLOCK * width * 2:
        raise ValueError(f"expected rings that fit and hold a block or more each, got {config}")
    return width, stages


_Pieces = tuple[Float32[Array, "pieces M C"], Float32[Array, "pieces M"]]


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
) -> tuple[BFloat16[Array, "B M C"], Float32[Array, "B M"], _Pieces]:
    """As :func:`mosaic_gpu_kernel.attend`, of M = T * H query rows in eights, 32 at most."""
    B, N, _ = q_latent.shape
    W = config.warpgroups
    width, ring = rings(N, config)
    pieces = _WIDTH // width  # of a block
    parts = schedule.parts
    gpu = interpret is None
    early = config.early and gpu and hasattr(plgpu, "griddepcontrol_wait")
    # Table entries past a row's length may be anything; they must not lead out of the pool.
    last_page, max_pages = pages.shape[0] - 1, block_tables.shape[1]
    i32 = jnp.int32

    def mla_decode(ql_g, qr_g, kv_g, pages_g, plan_g, out_g, lse_g, piece_g, piece_lse_g,
                   ql_s, qr_s, kv_s, p_s, scratch_s, ready, q_full, q_free,
                   *handed_s):  # fmt: skip
        ready, q_full, q_free = (Barriers(each, interpret) for each in (ready, q_full, q_free))
        ready.initialise([1] * (W * ring) + [WARPS] * (W * ring + W))
        q_full.initialise([2])
        q_free.initialise([W * WARPS])
        if early:
            plgpu.griddepcontrol_launch_dependents()
            plgpu.griddepcontrol_wait()
        part, wg = lax.axis_index("part"), lax.axis_index("wg")

        # Block n of a part goes to warpgroup n % W, as number n // W of its ring's blocks.
        def owner(n):
            return n & (W - 1)

        def number(n):
            return lax.shift_right_logical(n, i32(W - 1))

        def full(w, slot):
            return w * ring + slot

        def free(w, slot):
            return (W + w) * ring + slot

        def handed(w):
            return 2 * W * ring + w

        def spots(r):
            """Of the pieces of a ring's r-th block: the slot, and which of its uses this is. They
            go round the ring's end once at most, for it holds a block or more."""
            first = r * pieces
            use = lax.div(first, i32(ring))
            slot = first - use * ring
            found = []
            for k in range(pieces):
                around = slot + k >= ring
                found.append((jnp.where(around, slot + (k - ring), slot + k),
                              jnp.where(around, use + 1, use)))  # fmt: skip
            return found

        def piece_of(w, slot):
            return kv_s.at[w * ring + slot]

        def of_part():
            """First and last row, first block, end block: read together, in one latency."""
            return tuple(plan_g[part, k] for k in range(4))

        def segment(i, held):
            """Of the part's i-th row: row, first block, blocks taken here."""
            first_row, last_row, first_block, end_block = held
            b = first_row + i
            begin = jnp.where(i == 0, first_block, 0)
            return b, begin, jnp.where(b == last_row, end_block, plan_g[parts + b, 0]) - begin

        def page_of(b, block):
            page = pages_g[b, jnp.minimum(block, max_pages - 1)]
            return jnp.clip(page, 0, last_page)

        def copy_warpgroup():
            if W == 2:
                plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")
            row_count = plan_g[part, 1] - plan_g[part, 0] + 1

            def fetch_queries(i):
                @pl.when(i > 0)
                def _():
                    q_free.wait(0, i - 1)

                b = plan_g[part, 0] + i
                for source, target, columns in ((ql_g, ql_s, LATENT), (qr_g, qr_s, ROPE)):
                    window = b, pl.ds(0, N), pl.ds(0, columns)
                    q_full.copy(0, source, window, target.at[0], None)

            def fetch_blocks(i, done):
                held = of_part()
                page = page_of(held[0] + i, jnp.where(i == 0, held[2], 0))
                b, begin, count = segment(i, held)

                def fetch(j, page):
                    ahead = page_of(b, begin + j + 1)
                    w = owner(done + j)
                    for k, (slot, use) in enumerate(spots(number(done + j))):

                        @pl.when(use > 0)
                        def _(slot=slot, use=use):
                            ready.wait(free(w, slot), use - 1)

                        window = page, pl.ds(0, BLOCK), pl.ds(k * width, width)
                        ready.copy(full(w, slot), kv_g, window, piece_of(w, slot), None)
                    return ahead

                lax.fori_loop(0, count, fetch, page)
                return done + count

            def fetch_both(i, done):
                fetch_queries(i)
                return fetch_blocks(i, done)

            def leave(done):
                """When all that is still to arrive at the barriers waited for here has come."""
                for w in range(W):
                    used = number(done + (W - 1 - w)) * pieces
                    for slot in range(ring):
                        uses = lax.div(used + (ring - 1 - slot), i32(ring))

                        @pl.when(uses > 0)
                        def _(w=w, slot=slot, uses=uses):
                            ready.wait(free(w, slot), uses - 1)

            def await_queries():
                @pl.when(row_count > 0)
                def _():
                    q_free.wait(0, row_count - 1)

            if not gpu:  # where a warpgroup is one thread
                leave(lax.fori_loop(0, row_count, fetch_both, i32(0)))
                await_queries()
                return

            @pl.when(warp_is(0))
            def _():
                leave(lax.fori_loop(0, row_count, fetch_blocks, i32(0)))

            @pl.when(warp_is(1))
            def _():
                lax.fori_loop(0, row_count, lambda i, _: fetch_queries(i), None)
                await_queries()

        def compute_warpgroup():
            if W == 2:
                plgpu.set_max_registers(_REGISTERS, action="increase")
            row_count = plan_g[part, 1] - plan_g[part, 0] + 1
            scratch = scratch_s.at[wg]

            def spread(vector, rows):
                return lax.broadcast_in_dim(vector, (rows, N), [1])

            def scores(r, at):
                """S^T of the ring's r-th block."""
                # Zero, but not to the compiler: it would else keep all descriptors in registers.
                zero = lax.shift_right_logical(r, i32(24))

                def multiply(acc):
                    for k, (slot, use) in enumerate(at):
                        ready.wait(full(wg, slot), use)
                        keys, first = piece_of(wg, slot), k * width
                        latents = max(0, min(width, LATENT - first))
                        if latents:
                            q = ql_s.at[zero, :, pl.ds(first, latents)]
                            plgpu.wgmma(acc, keys.at[:, pl.ds(0, latents)], q.T)
                        if latents < width:
                            plgpu.wgmma(acc, keys.at[:, pl.ds(latents, ROPE)], qr_s.at[zero].T)
                    return acc[...]

                return pl.run_scoped(multiply, ACC((BLOCK, N), jnp.float32))

            def masked(s, length, block):
                """-inf where a query does not see a token."""
                token = plgpu.broadcasted_iota(i32, (BLOCK, N), 0, layout=WGMMA)
                seen = length - (queries - 1) - block * BLOCK
                if queries > 1:
                    row = plgpu.broadcasted_iota(i32, (BLOCK, N), 1, layout=WGMMA)
                    seen = seen + lax.div(row, i32(heads))
                return jnp.where(
                    token < jnp.minimum(seen, max_pages * BLOCK - block * BLOCK), s, -jnp.inf
                )

            def put(p_own, s, top):
                """P, for the tensor cores too when the warpgroup has met."""
                p = jnp.exp2(s - spread(top, BLOCK))
                registers.put_transposed(p_own, p.astype(jnp.bfloat16), gpu=gpu)
                publish(interpret)
                return p

            def add_values(acc, p_own, at, release):
                """O^T + V^T P^T. ``release``: whether to give the pieces back."""

                def let_go(slot):
                    @pl.when(release)
                    def _():
                        ready.arrive(free(wg, slot))

                def multiply(acc_ref):
                    for k, (slot, _) in enumerate(at):
                        first, columns = k * width, min(width, LATENT - k * width)
                        if columns > 0:
                            values = piece_of(wg, slot).at[:, pl.ds(0, columns)]
                            plgpu.wgmma(acc_ref.at[pl.ds(first, columns)], values.T, p_own.T)
                    if not gpu:
                        return acc_ref[...]
                    products = -(-LATENT // width)
                    for k, (slot, _) in enumerate(at):
                        if k < products:
                            plgpu.wgmma_wait(products - 1 - k)
                        let_go(slot)
                    return None

                if gpu:
                    return pl.run_state(multiply)(ACC.init(acc))
                # The interpreter cannot carry an accumulator through run_state.
                acc = acc + pl.run_scoped(multiply, ACC((LATENT, N), jnp.float32))
                plgpu.commit_smem()
                for slot, _ in at:
                    let_go(slot)
                return acc

            def run_segment(i, carry):
                done, taken = carry
                b, begin, count = segment(i, of_part())
                length = plan_g[parts + b, 3]
                first = owner(wg - done)
                mine = number(count - first + (W - 1))
                finishes = owner(done + count - 1) == wg
                q_full.wait(0, i)

                @pl.when(mine == 0)
                def _():
                    q_free.arrive(0)

                def take_block(k, carry):
                    acc, total, top = carry
                    j = first + k * W
                    last = k == mine - 1
                    r = number(done + j)
                    at = spots(r)
                    # Of two in turn: other warps' products may still read the last one.
                    p_own = p_s.at[wg, r & 1]
                    s = scores(r, at)

                    @pl.when(last)
                    def _():
                        q_free.arrive(0)

                    s = masked(s * (scale * LOG2E), length, begin + j)
                    p = put(p_own, s, top)

                    def keep(acc, total, more, top):
                        del total
                        return acc, more, top

                    def raise_maximum(acc, total, more, top):
                        del more
                        highest = registers.over_rows(s, "max", gpu=gpu)
                        highest = registers.over_threads(highest, "max", scratch, gpu=gpu)
                        raised = jnp.where(highest > top + SLACK, highest, top)
                        alpha = jnp.exp2(top - raised)
                        p = put(p_own, s, raised)
                        meet(interpret)
                        total = total * alpha + registers.over_rows(p, "add", gpu=gpu)
                        return acc * spread(alpha, LATENT), total, raised

                    above = registers.any_above(p, 2.0**SLACK, gpu=gpu)
                    more = total + registers.over_rows(p, "add", gpu=gpu)
                    acc, total, top = lax.cond(above, raise_maximum, keep, acc, total, more, top)
                    tokens = length - (begin + j) * BLOCK
                    # The same spots, but not to the compiler, which need not keep them till here.
                    at = spots(r + lax.shift_right_logical(length, i32(31)))

                    @pl.when(tokens < BLOCK)
                    def _():
                        # What no score counts must not be NaN: 0 * NaN.
                        for k, (slot, _) in enumerate(at):
                            latents, piece = min(width, LATENT - k * width), piece_of(wg, slot)
                            if latents > 0:
                                of_piece = pl.ds(0, latents)
                                clear_tokens(piece, of_piece, tokens, interpret=interpret)
                        publish(interpret)
                        meet(interpret)

                    acc = add_values(acc, p_own, at, ~last | finishes)
                    return acc, total, top

                acc = plgpu.layout_cast(jnp.full((LATENT, N), 0.0, jnp.float32), WGMMA)
                nothing = column_vector(N, 0.0), column_vector(N, NO_SCORE)
                acc, total, top = lax.fori_loop(0, mine, take_block, (acc, *nothing))
                # Without a block the warpgroup has not met since it last read the scratch.
                whole = functools.partial(
                    registers.over_threads, kind="add", scratch=scratch, gpu=gpu
                )
                total = lax.cond(mine > 0, whole, lambda total: total, total)

                if W == 2:
                    # The last block that the one without the row's end took is given back by the
                    # other, who finds there what is handed over. Its ring has no room for another
                    # block meanwhile: nobody hands over twice before the other took once.
                    def block_of(w):
                        return spots(number(done + count - 1 - w))

                    @pl.when(~finishes & (mine > 0))
                    def _hand():
                        meet(interpret)  # all four warps' products have read the block
                        if gpu:
                            block = [piece_of(wg, slot) for slot, _ in block_of(wg)]
                            registers.hand_over(block, acc, top, total)
                        else:
                            handed_s[0][pl.ds(0, LATENT)] = acc
                            handed_s[0][LATENT], handed_s[0][LATENT + 1] = top, total
                        ready.arrive(handed(wg))

                    def take(acc, top, total):
                        other = 1 - wg
                        ready.wait(handed(other), taken)
                        at = block_of(other)
                        block = [piece_of(other, slot) for slot, _ in at]
                        if gpu:
                            its_top, its_total = registers.taken_vectors(block, N, 2)
                        else:
                            its_top, its_total = handed_s[0][LATENT], handed_s[0][LATENT + 1]
                        highest = jnp.maximum(top, its_top)
                        kept, added = jnp.exp2(top - highest), jnp.exp2(its_top - highest)
                        if gpu:
                            acc = registers.add_taken(block, acc, kept, added)
                        else:
                            its_acc = handed_s[0][pl.ds(0, LATENT)]
                            acc = acc * spread(kept, LATENT) + its_acc * spread(added, LATENT)
                        publish(interpret)
                        for slot, _ in at:
                            ready.arrive(free(other, slot))
                        return acc, highest, total * kept + its_total * added

                    both = finishes & (count > 1)
                    acc, top, total = lax.cond(both, take, lambda *own: own, acc, top, total)
                    taken = taken + both.astype(i32)

                @pl.when(finishes)
                def _finish():
                    inverse = jnp.where(total > 0.0, 1.0 / total, 0.0)
                    out = acc * spread(inverse, LATENT)
                    lse = (top + jnp.log(total) * LOG2E) * (1.0 / LOG2E)
                    lse = jnp.where(total > 0.0, lse, jnp.full_like(lse, -jnp.inf))
                    cut = plan_g[parts + b, 1] > 1

                    @pl.when(jnp.logical_not(cut))
                    def _():
                        rounded = out.astype(jnp.bfloat16)
                        registers.store(out_g.at[b], lse_g.at[b], rounded, lse, gpu=gpu)

                    @pl.when(cut)
                    def _():
                        piece = plan_g[parts + b, 2] + part
                        there = piece_g.at[piece], piece_lse_g.at[piece]
                        registers.store(*there, out, lse, gpu=gpu)

                return done + count, taken

            lax.fori_loop(0, row_count, run_segment, (i32(0), i32(0)))

        pl.when(wg == W)(copy_warpgroup)
        pl.when(wg < W)(compute_warpgroup)

    # The interpreter cannot look at bfloat16 as float32.
    handed_s = () if gpu else (plgpu.SMEM((LATENT + 2, N), jnp.float32),)
    out, lse, *pieces_ = plgpu.kernel(
        mla_decode,
        out_type=results(B, N, parts, padded=N),
        scratch_types=[
            tiles_of(1, N, LATENT),
            tiles_of(1, N, ROPE),
            tiles_of(W * ring, BLOCK, width),
            tiles_of(W, 2, N, BLOCK),
            plgpu.SMEM((W, 4 * N), jnp.float32),
            Barriers.scratch(2 * W * ring + W, 1, interpret),
            Barriers.scratch(1, 2, interpret),
            Barriers.scratch(1, W, interpret),
            *handed_s,
        ],
        grid=(parts,),
        grid_names=("part",),
        num_threads=W + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        **({} if gpu else {"interpret": interpret}),
    )(q_latent, q_rope, pages, block_tables, schedule.table)
    return out, lse, tuple(pieces_)
