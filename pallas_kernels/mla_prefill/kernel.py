"""The Hopper kernel of mla_prefill: a persistent kernel with a dynamic tile scheduler.

A tile is 128 queries of one head. Two consumer warpgroups process 64 queries each. A producer
warpgroup copies keys and values by TMA into a ring buffer. As in FlashAttention-3, a consumer
overlaps the softmax with the matmuls: it issues ``S' = Q K'^T`` of the next key block, meanwhile
rescales O for the change of the running maximum, issues ``O += P V`` of the current block, and
computes the softmax of S' while the tensor cores finish the second matmul. It waits for that matmul
in the middle of the softmax. Then the first half of the new P is packed into the registers that the
old P has vacated, while the special function units compute the exponentials of the second half.

Key blocks are visited from the last visible one to the first. So the blocks that need a mask (the
diagonal and the sequence's end) come first, and the loop over all others is unmasked.

Each program claims its next tile as soon as it has started to copy the current one, so that the
next tile's queries, keys and values arrive during this tile's epilogue. Tiles with the most keys
come first, so that all multiprocessors finish at about the same time.
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

from pallas_kernels.hopper import multiprocessors
from pallas_kernels.hopper.math import LOG2E, NO_SCORE
from pallas_kernels.hopper.tiles import ACC, ROW, ROWS, WGMMA, spread_rows, tiles_of
from pallas_kernels.mla_prefill.live_registers import keep_live
from pallas_kernels.mla_prefill.mask import concatenate_columns, mask_columns
from pallas_kernels.mla_prefill.queue import claim_tile, uniform

WARPGROUPS = 2
"""Number of consumer warpgroups. One more is the producer."""
TILE = WARPGROUPS * ROWS
"""Queries per tile. A consumer warpgroup has ROWS of them."""
COLUMNS = 64
"""Number of bfloat16 in a 128-byte swizzled row."""

_COMPUTE_REGISTERS, _COPY_REGISTERS = 240, 24
"""Registers per thread. Three warpgroups have 504 together, and 2 x 240 + 24 = 504."""

_PARTIAL_SUMS = 8
"""Partial sums per row: two for each of the four threads that hold the row."""

# Names that jax types for its own use.
_as_layout: Any = plgpu.layout_cast
_run_state: Any = pl.run_state


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile sizes and scheduling.

    Attributes:
      block: keys per block, a multiple of 64.
      stages: pipeline stages of the key ring and of the value ring; at least 2.
      l2_bytes: share of the L2 cache for keys and values. As many heads as fit run concurrently.
      programs: number of persistent programs. None: one per multiprocessor.
    """

    block: int = 128
    stages: int = 2
    l2_bytes: int = 24 << 20
    programs: int | None = None

    def __post_init__(self):
        # The values of a block must arrive before those of the previous block are released.
        if self.block <= 0 or self.block % 64 or self.stages < 2:
            raise ValueError(f"expected a block of 64, 128, ... and 2 stages or more, got {self}")
        if self.programs is not None and self.programs <= 0:
            raise ValueError(f"programs: expected 1 or more, got {self.programs}")


def heads_together(heads: int, bytes_a_head: int, budget: int) -> int:
    """Returns how many heads run concurrently.

    This is the largest divisor of ``heads`` whose keys and values fit in ``budget`` bytes, or 1.
    """
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
    """Returns out [B, T, H, V] and lse [B, H, T padded to tiles].

    Inputs are bfloat16, and T and S are multiples of 8.
    """
    B, T, H, K = q.shape
    S, V = k.shape[1], v.shape[-1]
    block, stages = config.block, config.stages
    half = block // 2
    to_log2 = scale * LOG2E
    interpreted = interpret is not None
    q_tiles = pl.cdiv(T, TILE)
    tiles = B * H * q_tiles
    programs = min(config.programs or multiprocessors(), tiles)
    tile_barriers = 2 * stages  # index of next_s's barriers, after those of keys and values
    concurrent_heads = heads_together(B * H, S * (K + V) * 2, config.l2_bytes)

    def mla_prefill(
        q_g, k_g, v_g, starts_g, lengths_g, out_g, lse_g,
        q_s, k_s, v_s, out_s, lse_s, next_s,
        q_full, q_free, full, free, values_cleared,
        p_s: Any = None,
    ):  # fmt: skip
        wg = lax.axis_index("wg")
        first_tile = lax.axis_index("program")

        def position_of(index):
            """Returns the sequence b, head h and first query t0 of a tile."""
            section, index = (
                lax.div(index, concurrent_heads * q_tiles),
                lax.rem(index, concurrent_heads * q_tiles),
            )
            sequence_head = section * concurrent_heads + lax.rem(index, concurrent_heads)
            b, h = lax.div(sequence_head, H), lax.rem(sequence_head, H)
            return b, h, (q_tiles - 1 - lax.div(index, concurrent_heads)) * TILE

        def make_uniform(x):
            return x if interpreted else uniform(x)

        def in_ring(i):
            """Returns ``i % stages`` for i >= 0, without instructions for the sign."""
            return i & (stages - 1) if stages & (stages - 1) == 0 else lax.rem(i, stages)

        def blocks_of(start, length):
            """Returns how many key blocks the tile's last query sees, at least 1."""
            visible = jnp.clip(jnp.minimum(length, start + TILE), 0, S)
            return jnp.maximum(lax.div(visible + block - 1, block), 1)

        def produce():
            tile_counter = None if interpreted else pl.get_global(plgpu.SemaphoreType.REGULAR)

            def fetch(source, ring, first, b, h, blocks, i):
                slot = in_ring(i)
                plgpu.barrier_wait(free.at[first + slot])
                keys = pl.ds((blocks - 1 - i) * block, block)
                plgpu.copy_gmem_to_smem(source.at[b, keys, h], ring.at[slot], full.at[first + slot])

            def process_tile(carry):
                n, tile = carry
                b, h, t0 = position_of(tile)
                blocks = blocks_of(starts_g[b] + t0, lengths_g[b])
                keys = functools.partial(fetch, k_g, k_s, 0, b, h, blocks)
                values = functools.partial(fetch, v_g, v_s, stages, b, h, blocks)
                keys(jnp.int32(0))
                for w in range(WARPGROUPS):
                    plgpu.barrier_wait(q_free.at[w])
                    rows = pl.ds(t0 + w * ROWS, ROWS)
                    plgpu.copy_gmem_to_smem(q_g.at[b, rows, h], q_s.at[w], q_full.at[w])
                values(jnp.int32(0))
                next_tile = claim_and_publish(lax.rem(n, 2), tile)

                def step(i, carry):
                    keys(i)
                    values(i)
                    return carry

                lax.fori_loop(1, blocks, step, None)
                return n + 1, next_tile

            def claim_and_publish(slot, tile):
                """Claims the next tile, and passes it to the consumers."""
                # The interpreter has no atomic addition. There each program takes every
                # ``programs``-th tile, so that only a GPU runs ``claim_tile``.
                plgpu.barrier_wait(free.at[tile_barriers + slot])
                if interpreted:
                    next_s[slot] = tile + programs
                else:
                    claim_tile(tile_counter, next_s, slot, programs)
                plgpu.commit_smem()
                plgpu.barrier_arrive(full.at[tile_barriers + slot])
                return next_s[slot]

            lax.while_loop(lambda c: c[1] < tiles, process_tile, (jnp.int32(0), first_tile))
            # Every completed phase of a barrier must be waited for before the program exits.
            for w in range(WARPGROUPS):
                plgpu.barrier_wait(q_free.at[w])
            for i in range(2 * stages + 2):
                plgpu.barrier_wait(free.at[i])

        def start_softmax(s, maximum, total, bound):
            """Masks scores and starts the softmax.

            Returns P of the block's first half, the scores of the second half, and per row the
            maximum, the partial sums and the factor that rescales earlier sums.
            """
            if bound is not None:
                start, length, first = bound
                row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
                visible = jnp.minimum(row + (start + 1 - first), length - first)
                if interpreted:
                    column = lax.broadcasted_iota(jnp.int32, (ROWS, block), 1)
                    s = jnp.where(column < spread_rows(visible, block), s, -jnp.inf)
                else:
                    s = mask_columns(s, visible)
            new_maximum = jnp.maximum(maximum, s.max(axis=1) * to_log2)
            alpha = jnp.exp2(maximum - new_maximum)
            total = total * spread_rows(alpha, _PARTIAL_SUMS)
            p, total = exponentials(s[:, :half], new_maximum, total)
            return p, s[:, half:], new_maximum, total, alpha

        def exponentials(s, maximum, total):
            """Returns P of half a block, and the updated partial sums."""
            p = jnp.exp2(s * to_log2 - spread_rows(maximum, half))
            for c in range(0, half, _PARTIAL_SUMS):
                total = total + p[:, c : c + _PARTIAL_SUMS]
            return p, total

        def pack(first, second):
            """Returns P of a block in bfloat16, from its two halves."""
            first, second = first.astype(jnp.bfloat16), second.astype(jnp.bfloat16)
            if interpreted:
                return jnp.concatenate([first, second], axis=1)
            return concatenate_columns(first, second)

        def zeros(columns):
            return _as_layout(jnp.zeros((ROWS, columns), jnp.float32), WGMMA)

        def accumulate(issue, columns):
            """Returns the accumulator, initially zero, after ``issue`` has accumulated into it."""

            def scope(ref):
                issue(ref)
                return ref[...]

            return pl.run_scoped(scope, ACC((ROWS, columns), jnp.float32))

        def scores(ref, slot):
            plgpu.wgmma(ref, q_s.at[wg], k_s.at[slot].transpose((1, 0)))

        def values(ref, p, slot):
            plgpu.wgmma(ref, p, v_s.at[slot])

        def add_values(acc, p, slot):
            """Returns ``acc + P V``."""
            if interpreted:
                p_s[wg] = p
                plgpu.commit_smem()
                return acc + accumulate(lambda ref: values(ref, p_s.at[wg], slot), V)
            return _run_state(lambda ref: values(ref, p, slot))(ACC.init(acc))

        def clear_values(slot, first, length):
            """Zeroes values past the sequence's end, which may be NaN. Each consumer does half."""
            for c in range(V // COLUMNS):

                @pl.when(wg == c % WARPGROUPS)
                def _(c=c):
                    part = v_s.at[slot, :, pl.ds(c * COLUMNS, COLUMNS)]
                    shape = (block, COLUMNS)
                    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA)
                    old = _as_layout(part[...], WGMMA)
                    part[...] = jnp.where(row < length - first, old, jnp.zeros_like(old))

            plgpu.commit_smem()
            plgpu.barrier_arrive(values_cleared)
            plgpu.barrier_wait(values_cleared)

        def step(slot, previous, carry, bound):
            """Adds P V of the previous block, and computes P of the block in ``slot``."""
            acc, alpha, maximum, total, p = carry
            plgpu.barrier_wait(full.at[slot])

            def softmax_of(s):
                plgpu.barrier_arrive(free.at[slot])
                return start_softmax(s, maximum, total, bound)

            def overlapped(refs):
                acc_ref, s_ref, *rest_refs = refs
                scores(s_ref, slot)
                old = plgpu.wgmma_accumulator_load(acc_ref, wait_n=None)
                acc_ref[...] = old * spread_rows(alpha, V)
                values(acc_ref, p, previous)
                s = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
                # Without this barrier, and the branch in the wait for the next values, the
                # compilers move the softmax past the wait for the second matmul.
                rest = lax.optimization_barrier(softmax_of(s))
                for ref, x in zip(rest_refs, rest, strict=True):
                    ref[...] = x
                plgpu.barrier_wait(full.at[stages + slot])

            if interpreted:
                acc = add_values(acc * spread_rows(alpha, V), p, previous)
                first, s, maximum, total, alpha = softmax_of(
                    accumulate(lambda ref: scores(ref, slot), block)
                )
                plgpu.barrier_wait(full.at[stages + slot])
            else:
                s, part = zeros(block), zeros(half)
                # Placeholders for the results, of the right types and layouts.
                acc, _, first, s, maximum, total, alpha = _run_state(overlapped)(
                    (ACC.init(acc), ACC.init(s), part, part, maximum, total, maximum)
                )
                alpha = keep_live(alpha, acc, p)
            plgpu.barrier_arrive(free.at[stages + previous])
            # Only now, because registers that a wgmma in flight reads must not be written.
            return finish_softmax(acc, alpha, maximum, total, first, s)

        def finish_softmax(acc, alpha, maximum, total, first, s):
            """Computes the second half of P, and returns the carry for the next block."""
            second, total = exponentials(s, maximum, total)
            return acc, alpha, maximum, total, pack(first, second)

        def process_tile(carry):
            n, tile, start, length = carry
            t0 = position_of(tile)[2]
            blocks = blocks_of(start + t0, length)
            start = start + t0 + wg * ROWS
            # All queries of the warpgroup see the blocks below this one.
            unmasked = jnp.clip(lax.div(jnp.minimum(length, start + 1), block), 0, blocks - 1)
            first = (blocks - 1) * block

            plgpu.barrier_wait(q_full.at[wg])
            plgpu.barrier_wait(full.at[0])
            s = accumulate(lambda ref: scores(ref, 0), block)
            plgpu.barrier_arrive(free.at[0])
            maximum = _as_layout(jnp.full((ROWS,), NO_SCORE, jnp.float32), ROW)
            p, s, maximum, total, alpha = start_softmax(
                s, maximum, zeros(_PARTIAL_SUMS), (start, length, first)
            )
            carry = finish_softmax(zeros(V), alpha, maximum, total, p, s)
            plgpu.barrier_wait(full.at[stages])

            @pl.when(blocks * block > length)
            def _():
                clear_values(0, first, length)

            def visit(masked, i, carry):
                slot, previous = in_ring(i), in_ring(i - 1)
                bound = (start, length, (blocks - 1 - i) * block) if masked else None
                return step(slot, previous, carry, bound)

            masked = blocks - unmasked
            carry = lax.fori_loop(1, masked, functools.partial(visit, True), carry)
            carry = lax.fori_loop(masked, blocks, functools.partial(visit, False), carry)
            plgpu.barrier_arrive(q_free.at[wg])
            next_tile = receive_tile(n)
            acc, alpha, maximum, total, p = carry
            slot = in_ring(blocks - 1)
            acc = add_values(acc * spread_rows(alpha, V), p, slot)
            plgpu.barrier_arrive(free.at[stages + slot])
            store(*position_of(make_uniform(tile)), acc, maximum, total.sum(axis=1))
            return n + 1, *next_tile

        def with_sequence(tile):
            """Returns the tile and its sequence's start and length."""
            b = position_of(jnp.minimum(tile, tiles - 1))[0]
            return tuple(make_uniform(x) for x in (tile, starts_g[b], lengths_g[b]))

        def receive_tile(n):
            """Receives the next tile; returns it and its sequence's start and length."""
            slot = lax.rem(n, 2)
            plgpu.barrier_wait(full.at[tile_barriers + slot])
            tile = next_s[slot]
            plgpu.barrier_arrive(free.at[tile_barriers + slot])
            return with_sequence(tile)

        def store(b, h, t0, acc, maximum, total):
            rows = pl.ds(t0 + wg * ROWS, ROWS)
            visible = total > 0.0
            lse = maximum * (1.0 / LOG2E) + jnp.log(total)
            acc = acc * spread_rows(jnp.where(visible, 1.0 / total, 0.0), V)
            for c in range(V // COLUMNS):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                columns = slice(c * COLUMNS, (c + 1) * COLUMNS)
                out_s[wg] = acc[:, columns].astype(jnp.bfloat16)
                if c == 0:
                    lse_s[wg] = jnp.where(visible, lse, -jnp.inf)
                plgpu.commit_smem()
                if c == 0:
                    plgpu.copy_smem_to_gmem(lse_s.at[wg], lse_g.at[b, h, rows])
                columns = pl.ds(c * COLUMNS, COLUMNS)
                plgpu.copy_smem_to_gmem(out_s.at[wg], out_g.at[b, rows, h, columns])

        @pl.when(wg == WARPGROUPS)
        def _produce():
            plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")
            produce()

        @pl.when(wg < WARPGROUPS)
        def _consume():
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            plgpu.barrier_arrive(q_free.at[wg])
            for i in range(2 * stages + 2):
                plgpu.barrier_arrive(free.at[i])

            lax.while_loop(
                lambda c: c[1] < tiles, process_tile, (jnp.int32(0), *with_sequence(first_tile))
            )
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    kernel = plgpu.kernel(
        mla_prefill,
        out_type=[
            jax.ShapeDtypeStruct((B, T, H, V), jnp.bfloat16),
            # Padded to whole tiles, because a one-dimensional float32 copy is not clipped at T.
            jax.ShapeDtypeStruct((B, H, q_tiles * TILE), jnp.float32),
        ],
        scratch_types=[
            tiles_of(WARPGROUPS, ROWS, K),
            tiles_of(stages, block, K),
            tiles_of(stages, block, V),
            tiles_of(WARPGROUPS, ROWS, COLUMNS),
            plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32),
            plgpu.SMEM((2,), jnp.int32),
            plgpu.Barrier(num_barriers=WARPGROUPS),
            plgpu.Barrier(num_barriers=WARPGROUPS),
            # One for each stage of the keys, each stage of the values, and each slot of next_s.
            plgpu.Barrier(num_barriers=2 * stages + 2),
            plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=2 * stages + 2),
            plgpu.Barrier(num_arrivals=WARPGROUPS),
            *([tiles_of(WARPGROUPS, ROWS, block)] if interpreted else []),
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
