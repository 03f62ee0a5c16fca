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

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.branch import when
from pallas_kernels.hopper.lowered_once import lowered_once
from pallas_kernels.hopper.math import NO_SCORE
from pallas_kernels.hopper.tiles import ACC, ROW, ROWS, WGMMA, spread_rows, tiles_of
from pallas_kernels.mla_prefill.epilogue import Results
from pallas_kernels.mla_prefill.live_registers import keep_live
from pallas_kernels.mla_prefill.plan import COLUMNS, PARTIAL_SUMS, TILE, WARPGROUPS, Config, Plan
from pallas_kernels.mla_prefill.producer import produce
from pallas_kernels.mla_prefill.queue import uniform
from pallas_kernels.mla_prefill.softmax import finish_softmax, start_softmax

_COMPUTE_REGISTERS, _COPY_REGISTERS = 240, 24
"""Registers per thread. Three warpgroups have 504 together, and 2 x 240 + 24 = 504."""

# Names that jax types for its own use.
_as_layout: Any = plgpu.layout_cast
_run_state: Any = pl.run_state


@lowered_once("scale", "config", "interpret")
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
    (B, T, H, K), S, V = q.shape, k.shape[1], v.shape[-1]
    plan = Plan(B, T, S, H, K, V, scale, config, interpret is not None)
    block, stages, half = config.block, config.stages, plan.half
    interpreted, tile_barriers = plan.interpreted, plan.tile_barriers

    def mla_prefill(
        q_g, k_g, v_g, starts_g, lengths_g, out_g, lse_g,
        q_s, k_s, v_s, out_s, lse_s, next_s,
        q_full, q_free, full, free, values_cleared,
        p_s: Any = None,
    ):  # fmt: skip
        wg = lax.axis_index("wg")
        first_tile = lax.axis_index("program")
        results = Results(out_g, lse_g, out_s, lse_s)

        def make_uniform(x):
            return x if interpreted else uniform(x)

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

                @when(wg == c % WARPGROUPS)
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
                return start_softmax(plan, s, maximum, total, bound)

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
            return finish_softmax(plan, acc, alpha, maximum, total, first, s)

        def process_tile(carry):
            n, tile, start, length = carry
            t0 = plan.position_of(tile)[2]
            blocks = plan.blocks_of(start + t0, length)
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
                plan, s, maximum, zeros(PARTIAL_SUMS), (start, length, first)
            )
            carry = finish_softmax(plan, zeros(V), alpha, maximum, total, p, s)
            plgpu.barrier_wait(full.at[stages])

            @when(blocks * block > length)
            def _():
                clear_values(0, first, length)

            def visit(masked, i, carry):
                slot, previous = plan.in_ring(i), plan.in_ring(i - 1)
                bound = (start, length, (blocks - 1 - i) * block) if masked else None
                return step(slot, previous, carry, bound)

            masked = blocks - unmasked
            carry = lax.fori_loop(1, masked, functools.partial(visit, True), carry)
            carry = lax.fori_loop(masked, blocks, functools.partial(visit, False), carry)
            plgpu.barrier_arrive(q_free.at[wg])
            next_tile = receive_tile(n)
            acc, alpha, maximum, total, p = carry
            slot = plan.in_ring(blocks - 1)
            acc = add_values(acc * spread_rows(alpha, V), p, slot)
            plgpu.barrier_arrive(free.at[stages + slot])
            results.store(
                wg, *plan.position_of(make_uniform(tile)), acc, maximum, total.sum(axis=1)
            )
            return n + 1, *next_tile

        def with_sequence(tile):
            """Returns the tile and its sequence's start and length."""
            b = plan.position_of(jnp.minimum(tile, plan.tiles - 1))[0]
            return tuple(make_uniform(x) for x in (tile, starts_g[b], lengths_g[b]))

        def receive_tile(n):
            """Receives the next tile; returns it and its sequence's start and length."""
            slot = lax.rem(n, 2)
            plgpu.barrier_wait(full.at[tile_barriers + slot])
            tile = next_s[slot]
            plgpu.barrier_arrive(free.at[tile_barriers + slot])
            return with_sequence(tile)

        @when(wg == WARPGROUPS)
        def _produce():
            plgpu.set_max_registers(_COPY_REGISTERS, action="decrease")
            produce(
                plan, (q_g, k_g, v_g), (q_s, k_s, v_s), (starts_g, lengths_g), next_s,
                (q_full, q_free), (full, free),
            )  # fmt: skip

        @when(wg < WARPGROUPS)
        def _consume():
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            plgpu.barrier_arrive(q_free.at[wg])
            for i in range(2 * stages + 2):
                plgpu.barrier_arrive(free.at[i])

            lax.while_loop(
                lambda c: c[1] < plan.tiles,
                process_tile,
                (jnp.int32(0), *with_sequence(first_tile)),
            )
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    kernel = plgpu.kernel(
        mla_prefill,
        out_type=[
            jax.ShapeDtypeStruct((B, T, H, V), jnp.bfloat16),
            # Padded to whole tiles, because a one-dimensional float32 copy is not clipped at T.
            jax.ShapeDtypeStruct((B, H, plan.q_tiles * TILE), jnp.float32),
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
        grid=(plan.programs,),
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
