"""The Hopper kernel of mla_prefill: programs draw tiles, 128 queries of one head, from a queue.

Two compute warpgroups hold 64 queries each; a third copies keys and values by TMA into a ring. A
compute warpgroup issues ``S' = Q K'^T`` of the next block of keys, multiplies O by what the last
maximum changed meanwhile, issues ``O += P V`` of this block, and works on the softmax of S' while
the tensor cores finish the second product. It waits for that in the middle of the softmax: then the
first half of the new P is packed into the registers that the old one has left, while the special
function units take the powers of the second half.

Blocks of keys run from the last visible one down to the first: the blocks that need a mask (the
diagonal, the row's end) come first, and the loop over all others has none.

A program stays on its multiprocessor and draws a tile whenever it has copied the beginning of
one, so that the next tile's queries, keys and values arrive while this one's output is made.
Tiles with most keys come first, so that the multiprocessors end together.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import multiprocessors
from pallas_kernels.mla_prefill.held_registers import hold
from pallas_kernels.mla_prefill.mask import beside, first_columns
from pallas_kernels.mla_prefill.queue import draw, same

WARPGROUPS = 2
"""That compute; one more copies."""
ROWS = 64
"""Queries of a warpgroup: the height of a wgmma."""
TILE = WARPGROUPS * ROWS
COLUMNS = 64
"""bfloat16 in the 128 bytes of a swizzled row."""

_COMPUTE_REGISTERS, _COPY_REGISTERS = 240, 24
"""Of a thread: 2 x 240 + 24 of the 504 that three warpgroups have."""

_PARTS = 8
"""Partial sums of a row: two for each of the four threads that hold it."""

_LOG2E = math.log2(math.e)
_LOWEST = -1e30
"""Where a row's maximum starts: finite, so that a row that sees nothing gets exp2(-inf) = 0."""
# What jax leaves untyped, or types for its own use.
_ACC: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
_as_layout: Any = plgpu.layout_cast
_run_state: Any = pl.run_state
_WGMMA = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel is cut.

    Attributes:
      block: keys a step, a multiple of 64.
      stages: blocks of keys, and of values, that SMEM holds; at least 2.
      l2_bytes: heads whose keys and values fit here run side by side.
      programs: that share the tiles; one for each multiprocessor where None.
    """

    block: int = 128
    stages: int = 2
    l2_bytes: int = 24 << 20
    programs: int | None = None

    def __post_init__(self):
        # The values of a block must be there before the last block's are let go.
        if self.block <= 0 or self.block % 64 or self.stages < 2:
            raise ValueError(f"expected a block of 64, 128, ... and 2 stages or more, got {self}")
        if self.programs is not None and self.programs <= 0:
            raise ValueError(f"expected a program or more, got {self.programs}")


def _transforms() -> tuple[Any, ...]:
    return (plgpu.TilingTransform((8, COLUMNS)), plgpu.SwizzleTransform(128))


def _smem(*shape: int) -> Any:
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=_transforms())


def heads_together(heads: int, bytes_a_head: int, budget: int) -> int:
    """The largest divisor of ``heads`` whose keys and values fit into ``budget``; at least 1."""
    fit = max(1, budget // bytes_a_head)
    return max(n for n in range(1, heads + 1) if heads % n == 0 and n <= fit)


@functools.partial(jax.jit, static_argnames=("scale", "config", "interpret"))
def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    config: Config,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """out [B, T, H, V], lse [B, H, >= T] of bfloat16 arrays whose T and S are multiples of 8."""
    B, T, H, K = q.shape
    S, V = k.shape[1], v.shape[-1]
    block, stages = config.block, config.stages
    half = block // 2
    to_log2 = scale * _LOG2E
    interpreted = interpret is not None
    q_tiles = pl.cdiv(T, TILE)
    tiles = B * H * q_tiles
    programs = min(config.programs or multiprocessors(), tiles)
    after_values = 2 * stages  # The barriers of ``next_s`` come after those of keys and values.
    together = heads_together(B * H, S * (K + V) * 2, config.l2_bytes)

    def mla_prefill(
        q_g, k_g, v_g, starts_g, lengths_g, out_g, lse_g,
        q_s, k_s, v_s, out_s, lse_s, next_s,
        q_full, q_free, full, free, clean,
        p_s: Any = None,
    ):  # fmt: skip
        wg = lax.axis_index("wg")
        first_tile = lax.axis_index("program")

        def place(index):
            """Row b, head h and first query t0 of a tile."""
            section, index = lax.div(index, together * q_tiles), lax.rem(index, together * q_tiles)
            row_head = section * together + lax.rem(index, together)
            b, h = lax.div(row_head, H), lax.rem(row_head, H)
            return b, h, (q_tiles - 1 - lax.div(index, together)) * TILE

        def shared(x):
            return x if interpreted else same(x)

        def in_ring(i):
            """``i % stages``: the sign, which it has not, would cost instructions."""
            return i & (stages - 1) if stages & (stages - 1) == 0 else lax.rem(i, stages)

        def blocks_of(start, length):
            """Blocks of keys to visit: those that the tile's last query sees, or one."""
            seen = jnp.clip(jnp.minimum(length, start + TILE), 0, S)
            return jnp.maximum(lax.div(seen + block - 1, block), 1)

        def copy():
            drawn = None if interpreted else pl.get_global(plgpu.SemaphoreType.REGULAR)

            def fetch(source, ring, first, b, h, blocks, i):
                slot = in_ring(i)
                plgpu.barrier_wait(free.at[first + slot])
                keys = pl.ds((blocks - 1 - i) * block, block)
                plgpu.copy_gmem_to_smem(source.at[b, keys, h], ring.at[slot], full.at[first + slot])

            def of_tile(carry):
                n, tile = carry
                b, h, t0 = place(tile)
                blocks = blocks_of(starts_g[b] + t0, lengths_g[b])
                keys = functools.partial(fetch, k_g, k_s, 0, b, h, blocks)
                values = functools.partial(fetch, v_g, v_s, stages, b, h, blocks)
                keys(jnp.int32(0))
                for w in range(WARPGROUPS):
                    plgpu.barrier_wait(q_free.at[w])
                    rows = pl.ds(t0 + w * ROWS, ROWS)
                    plgpu.copy_gmem_to_smem(q_g.at[b, rows, h], q_s.at[w], q_full.at[w])
                values(jnp.int32(0))
                following = announce(lax.rem(n, 2), tile)

                def step(i, carry):
                    keys(i)
                    values(i)
                    return carry

                lax.fori_loop(1, blocks, step, None)
                return n + 1, following

            def announce(slot, tile):
                """Draws the next tile, and tells the other warpgroups."""
                # The interpreter has no atomic addition: there each program takes every
                # ``programs``-th tile, and only a GPU runs what ``draw`` does.
                plgpu.barrier_wait(free.at[after_values + slot])
                if interpreted:
                    next_s[slot] = tile + programs
                else:
                    draw(drawn, next_s, slot, programs)
                plgpu.commit_smem()
                plgpu.barrier_arrive(full.at[after_values + slot])
                return next_s[slot]

            lax.while_loop(lambda c: c[1] < tiles, of_tile, (jnp.int32(0), first_tile))
            # A barrier may not end in a phase that nobody has seen.
            for w in range(WARPGROUPS):
                plgpu.barrier_wait(q_free.at[w])
            for i in range(2 * stages + 2):
                plgpu.barrier_wait(free.at[i])

        def spread(rows, columns):
            return lax.broadcast_in_dim(rows, (ROWS, columns), [0])

        def begin(s, top, total, bound):
            """P of a block's first half, the other scores, and maxima, sums and factors of rows."""
            if bound is not None:
                start, length, first = bound
                row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=_ROW)
                visible = jnp.minimum(row + (start + 1 - first), length - first)
                if interpreted:
                    column = lax.broadcasted_iota(jnp.int32, (ROWS, block), 1)
                    s = jnp.where(column < spread(visible, block), s, -jnp.inf)
                else:
                    s = first_columns(s, visible)
            new_top = jnp.maximum(top, s.max(axis=1) * to_log2)
            alpha = jnp.exp2(top - new_top)
            total = total * spread(alpha, _PARTS)
            p, total = powers(s[:, :half], new_top, total)
            return p, s[:, half:], new_top, total, alpha

        def powers(s, top, total):
            """P of half a block, and the sums with it."""
            p = jnp.exp2(s * to_log2 - spread(top, half))
            for c in range(0, half, _PARTS):
                total = total + p[:, c : c + _PARTS]
            return p, total

        def joined(first, second):
            """P of a block in bfloat16."""
            first, second = first.astype(jnp.bfloat16), second.astype(jnp.bfloat16)
            if interpreted:
                return jnp.concatenate([first, second], axis=1)
            return beside(first, second)

        def zeros(columns):
            return _as_layout(jnp.zeros((ROWS, columns), jnp.float32), _WGMMA)

        def product(issue, columns):
            """What ``issue`` adds up in an accumulator of zeros."""

            def scope(ref):
                issue(ref)
                return ref[...]

            return pl.run_scoped(scope, _ACC((ROWS, columns), jnp.float32))

        def scores(ref, slot):
            plgpu.wgmma(ref, q_s.at[wg], k_s.at[slot].transpose((1, 0)))

        def values(ref, p, slot):
            plgpu.wgmma(ref, p, v_s.at[slot])

        def add_values(acc, p, slot):
            """``acc + P V``."""
            if interpreted:
                p_s[wg] = p
                plgpu.commit_smem()
                return acc + product(lambda ref: values(ref, p_s.at[wg], slot), V)
            return _run_state(lambda ref: values(ref, p, slot))(_ACC.init(acc))

        def values_clean(slot, first, length):
            """Zeroes the values past the row's end, which may be NaN; half the columns each."""
            for c in range(V // COLUMNS):

                @pl.when(wg == c % WARPGROUPS)
                def _(c=c):
                    part = v_s.at[slot, :, pl.ds(c * COLUMNS, COLUMNS)]
                    shape = (block, COLUMNS)
                    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_WGMMA)
                    held = _as_layout(part[...], _WGMMA)
                    part[...] = jnp.where(row < length - first, held, jnp.zeros_like(held))

            plgpu.commit_smem()
            plgpu.barrier_arrive(clean)
            plgpu.barrier_wait(clean)

        def step(slot, before, carry, bound):
            """Adds the values of the block before; scores and softmax of the block in ``slot``."""
            acc, alpha, top, total, p = carry
            plgpu.barrier_wait(full.at[slot])

            def after_scores(s):
                plgpu.barrier_arrive(free.at[slot])
                return begin(s, top, total, bound)

            def overlapped(refs):
                acc_ref, s_ref, *rest_refs = refs
                scores(s_ref, slot)
                old = plgpu.wgmma_accumulator_load(acc_ref, wait_n=None)
                acc_ref[...] = old * spread(alpha, V)
                values(acc_ref, p, before)
                s = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
                # Without this, and the branch in the wait for the next values, the
                # compilers move the softmax past the wait for the second product.
                rest = lax.optimization_barrier(after_scores(s))
                for ref, x in zip(rest_refs, rest, strict=True):
                    ref[...] = x
                plgpu.barrier_wait(full.at[stages + slot])

            if interpreted:
                acc = add_values(acc * spread(alpha, V), p, before)
                first, s, top, total, alpha = after_scores(
                    product(lambda ref: scores(ref, slot), block)
                )
                plgpu.barrier_wait(full.at[stages + slot])
            else:
                s, part = zeros(block), zeros(half)
                # The old values stand in for the new ones until these are known.
                acc, _, first, s, top, total, alpha = _run_state(overlapped)(
                    (_ACC.init(acc), _ACC.init(s), part, part, top, total, top)
                )
                alpha = hold(alpha, acc, p)
            plgpu.barrier_arrive(free.at[stages + before])
            # Only now: a register that a product in flight reads may not be written.
            return finish(acc, alpha, top, total, first, s)

        def finish(acc, alpha, top, total, first, s):
            """The second half of P; what the next block needs."""
            second, total = powers(s, top, total)
            return acc, alpha, top, total, joined(first, second)

        def of_tile(carry):
            n, tile, start, length = carry
            t0 = place(tile)[2]
            blocks = blocks_of(start + t0, length)
            start = start + t0 + wg * ROWS
            # Blocks below this one are visible to each of the warpgroup's queries.
            whole = jnp.clip(lax.div(jnp.minimum(length, start + 1), block), 0, blocks - 1)
            first = (blocks - 1) * block

            plgpu.barrier_wait(q_full.at[wg])
            plgpu.barrier_wait(full.at[0])
            s = product(lambda ref: scores(ref, 0), block)
            plgpu.barrier_arrive(free.at[0])
            top = _as_layout(jnp.full((ROWS,), _LOWEST, jnp.float32), _ROW)
            p, s, top, total, alpha = begin(s, top, zeros(_PARTS), (start, length, first))
            carry = finish(zeros(V), alpha, top, total, p, s)
            plgpu.barrier_wait(full.at[stages])

            @pl.when(blocks * block > length)
            def _():
                values_clean(0, first, length)

            def visit(masked, i, carry):
                slot, before = in_ring(i), in_ring(i - 1)
                bound = (start, length, (blocks - 1 - i) * block) if masked else None
                return step(slot, before, carry, bound)

            masked = blocks - whole
            carry = lax.fori_loop(1, masked, functools.partial(visit, True), carry)
            carry = lax.fori_loop(masked, blocks, functools.partial(visit, False), carry)
            plgpu.barrier_arrive(q_free.at[wg])
            following = learn(n)
            acc, alpha, top, total, p = carry
            slot = in_ring(blocks - 1)
            acc = add_values(acc * spread(alpha, V), p, slot)
            plgpu.barrier_arrive(free.at[stages + slot])
            store(*place(shared(tile)), acc, top, total.sum(axis=1))
            return n + 1, *following

        def with_row(tile):
            """The tile, its row's start and length."""
            b = place(jnp.minimum(tile, tiles - 1))[0]
            return tuple(shared(x) for x in (tile, starts_g[b], lengths_g[b]))

        def learn(n):
            """The next tile, its row's start and length."""
            slot = lax.rem(n, 2)
            plgpu.barrier_wait(full.at[after_values + slot])
            tile = next_s[slot]
            plgpu.barrier_arrive(free.at[after_values + slot])
            return with_row(tile)

        def store(b, h, t0, acc, top, total):
            rows = pl.ds(t0 + wg * ROWS, ROWS)
            seen = total > 0.0
            lse = top * (1.0 / _LOG2E) + jnp.log(total)
            acc = acc * spread(jnp.where(seen, 1.0 / total, 0.0), V)
            for c in range(V // COLUMNS):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                columns = slice(c * COLUMNS, (c + 1) * COLUMNS)
                out_s[wg] = acc[:, columns].astype(jnp.bfloat16)
                if c == 0:
                    lse_s[wg] = jnp.where(seen, lse, -jnp.inf)
                plgpu.commit_smem()
                if c == 0:
                    plgpu.copy_smem_to_gmem(lse_s.at[wg], lse_g.at[b, h, rows])
                columns = pl.ds(c * COLUMNS, COLUMNS)
                plgpu.copy_smem_to_gmem(out_s.at[wg], out_g.at[b, rows, h, columns])

        @pl.when(wg == WARPGROUPS)
        def _copy():
            plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")
            copy()

        @pl.when(wg < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            plgpu.barrier_arrive(q_free.at[wg])
            for i in range(2 * stages + 2):
                plgpu.barrier_arrive(free.at[i])

            lax.while_loop(lambda c: c[1] < tiles, of_tile, (jnp.int32(0), *with_row(first_tile)))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    kernel = plgpu.kernel(
        mla_prefill,
        out_type=[
            jax.ShapeDtypeStruct((B, T, H, V), jnp.bfloat16),
            # Whole tiles: a copy of float32 in one piece is not cut at T, and would run on.
            jax.ShapeDtypeStruct((B, H, q_tiles * TILE), jnp.float32),
        ],
        scratch_types=[
            _smem(WARPGROUPS, ROWS, K),
            _smem(stages, block, K),
            _smem(stages, block, V),
            _smem(WARPGROUPS, ROWS, COLUMNS),
            plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32),
            plgpu.SMEM((2,), jnp.int32),
            plgpu.Barrier(num_barriers=WARPGROUPS),
            plgpu.Barrier(num_barriers=WARPGROUPS),
            # Of the slots of keys, of those of values, and of the next tile's.
            plgpu.Barrier(num_barriers=2 * stages + 2),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=2 * stages + 2),
            plgpu.Barrier(num_arrivals=WARPGROUPS),
            *([_smem(WARPGROUPS, ROWS, block)] if interpreted else []),
        ],
        grid=(programs,),
        grid_names=("program",),
        num_threads=WARPGROUPS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
        ),
        **({"interpret": interpret} if interpreted else {}),
    )
    return tuple(kernel(q, k, v, starts, lengths))
