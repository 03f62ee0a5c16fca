"""A value warpgroup of the kernel for a bfloat16 cache: accumulates P V and stores the results."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.branch import when
from pallas_kernels.hopper.tiles import ACC, ROW, WGMMA
from pallas_kernels.hopper.warpgroup import meet
from pallas_kernels.mla_decode.clear import clear_tokens
from pallas_kernels.mla_decode.epilogue import Part, TileResults, load_sums, merge_sums
from pallas_kernels.mla_decode.kernel_parts import TILE
from pallas_kernels.mla_decode.plan import Plan
from pallas_kernels.mla_decode.rescale import scale_rows
from pallas_kernels.mla_decode.schedule import BLOCK
from pallas_kernels.mla_decode.signals import (
    SUM_FREE,
    SUM_READY,
    Signals,
    max_ready,
    p_ready,
)
from pallas_kernels.mla_decode.tile_memory import HALF, TileMemory
from pallas_kernels.mla_decode.work import Work

_VALUE_COLUMNS = HALF // 2  # output columns of a value warpgroup in each half


def add_values(
    plan: Plan, wg: Any, memory: TileMemory, signals: Signals, work: Work, outputs: TileResults
) -> None:
    """Accumulates P V of all key blocks of a partition, and stores the results of its sequences.

    Args:
      wg: number of this warpgroup, which computes columns ``wg * 128`` to ``wg * 128 + 127`` of
        each half.
    """
    interpret = plan.interpret
    columns = pl.ds(wg * _VALUE_COLUMNS, _VALUE_COLUMNS)
    sequence_count = work.sequence_count()

    def release(slot, half):
        # One thread arrives for the warpgroup, after all its warps have finished.
        meet(interpret)
        plgpu.barrier_arrive(signals.kv_free.at[slot * 2 + half])

    def add_block(block, acc, *, valid_tokens=None, keep_slot=False):
        """Adds P V of one block.

        Args:
          valid_tokens: number of valid tokens in the block; the values of the others are
            zeroed. Passed only for the last block of a segment.
          keep_slot: whether to leave the slot unreleased.
        """
        slot = block & 1
        use = lax.shift_right_logical(block, jnp.int32(1))
        signals.blocks.wait(max_ready(slot), use)
        alpha = plgpu.layout_cast(memory.factors[slot], ROW)
        acc = scale_rows(acc, alpha, interpret=interpret)
        signals.blocks.wait(p_ready(slot), use)
        if valid_tokens is not None:

            @when(valid_tokens < BLOCK)
            def _():
                for half in range(2):
                    clear_tokens(
                        memory.values.at[slot, half], columns, valid_tokens, interpret=interpret
                    )
                plgpu.commit_smem()

        def multiply(acc_ref):
            for half in range(2):
                acc_half = acc_ref.at[:, half * _VALUE_COLUMNS : (half + 1) * _VALUE_COLUMNS]
                plgpu.wgmma(
                    acc_half, memory.rope.at[slot], memory.values.at[slot, half, :, columns]
                )
            if not keep_slot:
                plgpu.wgmma_wait(1)
                release(slot, 0)
            return acc_ref[...] if interpret is not None else None

        if interpret is not None:  # the interpreter cannot carry it through run_state
            acc = acc + pl.run_scoped(multiply, ACC((TILE, HALF), jnp.float32))
        else:
            acc = pl.run_state(multiply)(ACC.init(acc))
        if not keep_slot:
            release(slot, 1)
        return acc

    def run_segment(i, done):
        b, begin, count, has_last_block = work.segment_and_end(i, work.range())

        def step(j, acc):
            return add_block(done + j, acc)

        acc: Any = plgpu.layout_cast(jnp.full((TILE, HALF), 0.0, jnp.float32), WGMMA)
        acc = lax.fori_loop(0, count - 1, step, acc)
        last = done + count - 1
        slot = last & 1
        valid_tokens = jnp.where(
            has_last_block,
            work.length(b) - (begin + count - 1) * BLOCK,
            BLOCK,
        )
        acc = add_block(last, acc, valid_tokens=valid_tokens, keep_slot=plan.is_staged)

        signals.sequences.wait(SUM_READY, i)
        maximum, total = merge_sums(*load_sums(memory.sum_maxima, memory.sums))
        signals.sequences.arrive(SUM_FREE)
        inverse = jnp.where(total > 0.0, 1.0 / total, 0.0)
        acc = acc * lax.broadcast_in_dim(inverse, (TILE, HALF), [0])
        segments = work.segments(b)

        @when(wg == 0)
        def _():
            outputs.stage_lse(maximum, total)

        # Staged in the columns of the last block that only this warpgroup reads.
        parts = [
            Part(
                slice(half * _VALUE_COLUMNS, (half + 1) * _VALUE_COLUMNS),
                pl.ds(half * HALF + wg * _VALUE_COLUMNS, _VALUE_COLUMNS),
                (lambda m, half=half: memory.values.at[slot, half, m, columns])
                if plan.is_staged
                else None,
            )
            for half in range(2)
        ]

        @when(segments == 1)
        def _():
            outputs.store(b, acc, parts, wg == 0)

        @when(segments > 1)
        def _():
            partial = work.partial(b)
            outputs.store_partial(partial, acc, parts, wg == 0)

        plgpu.wait_smem_to_gmem(0)
        if plan.is_staged:
            for half in range(2):
                release(slot, half)
        return done + count

    lax.fori_loop(0, sequence_count, run_segment, jnp.int32(0))
