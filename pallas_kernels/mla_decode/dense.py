"""The Hopper kernel of mla_decode for a bfloat16 cache and more than 32 query rows.

A CTA processes one tile of 64 query rows (of a sequence's T * H) over one partition of the split-KV
schedule, one key block of 64 cached tokens after the other.

**Budget.** A key block takes 64 x 64 x (576 + 512) multiply-adds, 2,176 cycles of an SM's tensor
cores. It is 72 KB, which HBM delivers to each SM every 3,900 cycles, or every 1,950 if two SMs
share it. With 128 query rows the kernel is therefore bound by the tensor cores, and must keep them
busy during the softmax. Shared memory has the queries (72 KB) and two key blocks (144 KB).

**Roles.** Four warpgroups, as in FlashMLA's "seesaw" but with the matmuls apart. They synchronise
only through mbarriers:

* Two score warpgroups (:class:`ScoreWarpgroup`) take the even and the odd key blocks, each with its
  own slot of shared memory. Each copies its blocks by TMA, computes S = Q K^T, and overwrites the
  block's rope keys, which are no longer needed, with P = 2^(S - maximum). The running maximum
  passes from one to the other through shared memory.
* Two value warpgroups (:class:`ValueWarpgroup`) each accumulate P V for 256 of the 512 output
  columns: 128 registers per thread. So they get 160, and the score warpgroups 96.

**Loop.** While the value warpgroups multiply P V of block n, one score warpgroup computes S of
block n + 1 and its softmax. A slot is released half by half, and its next block is copied at once.
At the end of a sequence the score warpgroups leave their sums in shared memory, and the value
warpgroups divide by them and store the result, or a partial result if the sequence is split.

Two CTAs whose tiles belong to the same sequence form a cluster: each copies half of a key block to
both (TMA multicast), which halves the traffic from the L2 cache.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Int

from pallas_kernels.hopper.barriers import Barriers
from pallas_kernels.hopper.launch import overlap_preceding_kernel
from pallas_kernels.hopper.lowered_once import lowered_once
from pallas_kernels.hopper.online_softmax import (
    LOG2E,
    NO_SCORE,
    SUM_COLUMNS,
    merge_sums,
    partial_row_sums,
    raised_maximum,
    reciprocal,
    scale_rows,
)
from pallas_kernels.hopper.split_kv import BLOCK, Outputs, Partition, Schedule
from pallas_kernels.hopper.tiles import ACC, ROW, WGMMA, row_vector
from pallas_kernels.hopper.warpgroup import (
    WARPS,
    cond,
    fence_async_proxy,
    first_warp,
    sync_warpgroup,
    when,
)
from pallas_kernels.mla_decode.float8_cache import LATENT, ROPE
from pallas_kernels.mla_decode.row_tiles import (
    HALF,
    SLOTS,
    TILE,
    Part,
    TileMemory,
    TilePlan,
    TileResults,
    clear_tokens,
    launch,
    load_sums,
)

_VALUE_REGISTERS, _SCORE_REGISTERS = 160, 96  # per thread; together 512 in four warpgroups
_VALUE_COLUMNS = HALF // 2  # output columns of a value warpgroup in each half


# ---- barriers and launch -------------------------------------------------------------------------

Q_FREE, SUM_READY, SUM_FREE = range(3)
"""Indices in :attr:`Signals.sequences`."""


@dataclasses.dataclass(frozen=True, eq=False)
class Signals:
    """Barriers of a CTA, in the order of :meth:`scratch`. A slot has halves 0 and 1."""

    q_full: Barriers
    """The queries of a sequence are filled, by three copies. Use i is the partition's i-th
    sequence."""

    blocks: Barriers
    """Barriers at :func:`kv_full`, :func:`max_ready` and :func:`p_ready`. Key block n of a
    partition is use n // 2 of its slot and of the slot's barriers."""

    sequences: Barriers
    """Both score warpgroups have read the queries (Q_FREE) or written their sums (SUM_READY), and
    both value warpgroups have read the sums (SUM_FREE). Use i is the partition's i-th sequence."""

    kv_free: Any
    """Half h of slot s, at index 2 s + h, has been read by the CTAs of the cluster."""

    @staticmethod
    def scratch(interpret: Any) -> list[Any]:
        """Returns the scratch types of the four arrays of barriers."""
        free = plgpu.ClusterBarrier(
            collective_axes=("pair",), num_arrivals=2, num_barriers=2 * SLOTS
        )
        counts = (1, 3), (5 * SLOTS, 1), (3, 2)
        return [*(Barriers.scratch(*count, interpret) for count in counts), free]

    @classmethod
    def of(cls, scratch: Sequence[Any], interpret: Any) -> Signals:
        *barriers, kv_free = scratch
        return cls(*(Barriers(each, interpret) for each in barriers), kv_free=kv_free)

    def initialise(self) -> None:
        """Initialises all barriers. Every thread calls it."""
        self.q_full.initialise([3])
        self.blocks.initialise([1] * (3 * SLOTS) + [WARPS] * (2 * SLOTS))
        self.sequences.initialise([2 * WARPS] * 3)


def kv_full(slot: Any, half: int) -> Any:
    """Index in :attr:`Signals.blocks` of a filled half; half 2 is the rope keys."""
    return slot * 3 + half


def max_ready(slot: Any) -> Any:
    return 3 * SLOTS + slot


def p_ready(slot: Any) -> Any:
    return 4 * SLOTS + slot


@dataclasses.dataclass(frozen=True, eq=False)
class Cta:
    """Static parameters, references and barriers that all warpgroups of a CTA share."""

    plan: TilePlan
    queries: tuple[Any, Any]
    """Latent and rope parts in global memory."""

    pages: Any
    memory: TileMemory
    signals: Signals
    partition: Partition

    @property
    def is_staged(self) -> bool:
        """Whether results go through shared memory: a copy can write part of a tile, a store of
        registers cannot."""
        return self.plan.rows < TILE

    def first_query_row(self) -> Any:
        """Returns the tile's first query row, recomputed at each use to save a register."""
        return (lax.axis_index("tile") * self.plan.pair + lax.axis_index("pair")) * TILE


@lowered_once("queries", "heads", "scale", "interpret")
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
    interpret: Any = None,
) -> Outputs:
    """Attention of M = T * H query rows, padded to whole tiles if M > 64. Row m is query m // H."""
    M, buffers = q_latent.shape[1], TileMemory.scratch()
    plan = TilePlan(M, queries, heads, scale, interpret)

    def mla_decode(q_latent, q_rope, pages, tables, table, *refs):
        results, scratch = refs[:4], refs[4:]
        memory = TileMemory(*scratch[: len(buffers)])
        signals = Signals.of(scratch[len(buffers) :], interpret)
        signals.initialise()
        overlap_preceding_kernel(interpret=interpret)
        index, wg = lax.axis_index("partition"), lax.axis_index("wg")
        partition = Partition(table, tables, schedule.partitions, index, pages.shape[0])
        cta = Cta(plan, (q_latent, q_rope), pages, memory, signals, partition)

        @when(wg >= 2)
        def _score():
            plgpu.set_max_registers(_SCORE_REGISTERS, action="decrease")
            sequence_count, slot = partition.sequence_count(), wg - 2
            ScoreWarpgroup(cta, slot, 1 - slot).run(sequence_count)

        @when(wg < 2)
        def _add():
            plgpu.set_max_registers(_VALUE_REGISTERS, action="increase")
            outputs = TileResults.of(results, memory, plan, cta.first_query_row, rows_per_copy=8)
            ValueWarpgroup(cta, wg, outputs).run()

    arrays = q_latent, q_rope, pages, block_tables
    return launch(mla_decode, plan, arrays, schedule, Signals.scratch(interpret), warpgroups=4)


# ---- scores --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class ScoreWarpgroup:
    """Copies every other key block of a partition, and computes its S and P."""

    cta: Cta

    slot: Any
    """Parity of this warpgroup's key blocks, and their slot."""

    other: Any
    """That of the other score warpgroup."""

    def run(self, sequence_count: Any) -> None:
        cta, signals, slot = self.cta, self.cta.signals, self.slot
        done = lax.fori_loop(0, sequence_count, self.run_segment, jnp.int32(0))

        # A CTA may exit only after every arrival at its barriers has happened.
        @when((done >= 1) & ((done & 1) == slot))
        def _():
            use = lax.shift_right_logical(done - 1, jnp.int32(1))
            signals.blocks.wait(max_ready(self.other), use)

        @when((done > slot) & first_warp(cta.plan.interpret is None))
        def _():
            for half in range(2):
                plgpu.barrier_wait(signals.kv_free.at[slot * 2 + half])

        when(sequence_count > 0)(lambda: signals.sequences.wait(SUM_FREE, sequence_count - 1))

    def copy_queries(self, i: Any, b: Any) -> None:
        """Copies the queries of the partition's i-th sequence, when the buffer is free."""
        cta, signals = self.cta, self.cta.signals

        @when((self.slot == 0) & first_warp(cta.plan.interpret is None))
        def _():
            signals.sequences.wait(Q_FREE, i)
            first_row, rows = cta.first_query_row(), cta.plan.rows
            cta.memory.copy_queries(signals.q_full, cta.queries, b, first_row, rows)

    def copy_block(self, page: Any, *, wait: bool) -> None:
        """Copies a page into this warpgroup's slot.

        With ``wait``, each half is copied when the slot's previous block releases it.
        """
        signals, memory, slot = self.cta.signals, self.cta.memory, self.slot
        pages, axis = self.cta.pages, "pair" if self.cta.plan.pair == 2 else None

        @when(first_warp(self.cta.plan.interpret is None))
        def _():
            for half in range(2):
                if wait:
                    plgpu.barrier_wait(signals.kv_free.at[slot * 2 + half])
                window = page, pl.ds(0, BLOCK), pl.ds(HALF * half, HALF)
                target = memory.values.at[slot, half]
                signals.blocks.copy(kv_full(slot, half), pages, window, target, axis)
            window = page, pl.ds(0, BLOCK), pl.ds(LATENT, ROPE)
            signals.blocks.copy(kv_full(slot, 2), pages, window, memory.rope.at[slot], axis)

    def run_segment(self, i: Any, done: Any) -> Any:
        """Processes one segment; ``done`` counts the partition's blocks before it."""
        plan, signals, partition = self.cta.plan, self.cta.signals, self.cta.partition
        first = (self.slot + done) & 1
        first_sequence, _, first_block, _ = entry = partition.entry()
        next_page = partition.page(first_sequence + i, jnp.where(i == 0, first_block, 0) + first)
        b, begin, count, _ = partition.segment_and_end(i, entry)
        length = partition.length(b)
        block_count = lax.shift_right_logical(jnp.maximum(count - first + 1, 0), jnp.int32(1))
        # Blocks that need no mask, and how many of them this warpgroup processes.
        unmasked = jnp.clip(lax.div(length - plan.queries + 1, BLOCK) - begin, 0, count)
        unmasked = lax.shift_right_logical(jnp.maximum(unmasked - first + 1, 0), jnp.int32(1))

        signals.sequences.arrive(Q_FREE)
        self.copy_queries(i, b)
        for fresh in (True, False):

            @when((first < count) & ((done + first < SLOTS) == fresh))
            def _(fresh=fresh):
                self.copy_block(next_page, wait=not fresh)

        signals.q_full.wait(0, i)

        def process_block(k, carry, *, masked):
            running, total = carry
            j = first + 2 * k
            # Loaded early to hide the latency behind the matmul. Masked blocks come last:
            # they rarely have a successor, and have no register to spare.
            next_page = None if masked else partition.page(b, begin + j + 2)
            use = lax.shift_right_logical(done + j, jnp.int32(1))
            s = self.scores(k, use)
            if masked:
                max_pages, first_row = partition.max_pages, self.cta.first_query_row
                s = plan.masked(s, length, begin + j, max_pages, first_row)
            p, new_running = self.softmax(s, use, j, done + j)
            block_sums = partial_row_sums(p)
            rescale = jnp.exp2(running - new_running)
            total = total * lax.broadcast_in_dim(rescale, total.shape, [0]) + block_sums

            @when(j + 2 < count)
            def _():
                self.copy_block(partition.page(b, begin + j + 2) if masked else next_page,
                                wait=True)  # fmt: skip

            return new_running, total

        # A thread's own row sums are reduced at the end.
        zeros = jnp.full((TILE, SUM_COLUMNS), 0.0, jnp.float32)
        carry = row_vector(NO_SCORE), plgpu.layout_cast(zeros, WGMMA)
        carry = lax.fori_loop(0, unmasked, functools.partial(process_block, masked=False), carry)
        carry = lax.fori_loop(
            unmasked, block_count, functools.partial(process_block, masked=True), carry
        )
        self.store_sums(i, *carry)
        return done + count

    def scores(self, k: Any, use: Any) -> Any:
        """Returns S of this warpgroup's k-th block of a segment, in base 1."""
        signals, memory = self.cta.signals, self.cta.memory
        # Always zero, but the compiler cannot tell. Otherwise it would compute all 72 descriptors
        # before the loop and keep them in registers, which are too few.
        zero = lax.shift_right_logical(k, jnp.int32(24))
        slot = self.slot + zero

        def multiply(acc):
            for half in range(2):
                signals.blocks.wait(kv_full(self.slot, half), use)
                keys = memory.values.at[slot, half]
                plgpu.wgmma(acc, memory.q_latent.at[half + zero], keys.transpose((1, 0)))
            signals.blocks.wait(kv_full(self.slot, 2), use)
            plgpu.wgmma(acc, memory.q_rope.at[zero], memory.rope.at[slot].transpose((1, 0)))
            return acc[...]

        return pl.run_scoped(multiply, ACC((TILE, BLOCK), jnp.float32))

    def softmax(self, s: Any, use: Any, j: Any, n: Any) -> tuple[Any, Any]:
        """Stores a block's P, its maximum and the factor of earlier results. Returns P and maximum.

        Args:
          use: the block's use of its slot.
          j, n: the block's number in the segment, and in the partition.
        """
        signals, memory, slot, other = self.cta.signals, self.cta.memory, self.slot, self.other
        interpret, to_log2 = self.cta.plan.interpret, self.cta.plan.scale * LOG2E
        block_max = s.max(axis=1) * to_log2

        @when(n >= 1)
        def _():
            # This waits for the maximum of the previous block. Its use is one less if the block is
            # in slot 1, and only the parity of a use counts.
            signals.blocks.wait(max_ready(other), use + slot + 1)

        before = cond(
            j == 0,
            lambda: row_vector(NO_SCORE),
            lambda: plgpu.layout_cast(memory.maxima[other], ROW),
        )
        running = raised_maximum(block_max, before)
        memory.maxima[slot] = running
        memory.factors[slot] = jnp.exp2(before - running)
        signals.blocks.arrive(max_ready(slot))
        p = jnp.exp2(s * to_log2 - lax.broadcast_in_dim(running, (TILE, BLOCK), [0]))
        sync_warpgroup(interpret)  # the matmuls of all four warps have read the rope keys
        memory.rope[slot] = p.astype(jnp.bfloat16)
        fence_async_proxy(interpret)  # every warp arrives below, so no barrier is needed here
        signals.blocks.arrive(p_ready(slot))
        return p, running

    def store_sums(self, i: Any, maximum: Any, partial_sums: Any) -> None:
        """Stores the sums of the partition's i-th sequence, when those before have been read."""
        signals, memory = self.cta.signals, self.cta.memory
        when(i > 0)(lambda: signals.sequences.wait(SUM_FREE, i - 1))
        total = partial_sums.sum(axis=1)
        memory.sum_maxima[self.slot], memory.sums[self.slot] = maximum, total
        signals.sequences.arrive(SUM_READY)


# ---- values and results --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class ValueWarpgroup:
    """Accumulates P V of all key blocks of a partition, and stores its sequences' results."""

    cta: Cta

    index: Any
    """0 or 1. It computes columns ``index * 128`` to ``index * 128 + 127`` of each half."""

    outputs: TileResults

    def run(self) -> None:
        lax.fori_loop(0, self.cta.partition.sequence_count(), self.run_segment, jnp.int32(0))

    @property
    def columns(self) -> Any:
        return pl.ds(self.index * _VALUE_COLUMNS, _VALUE_COLUMNS)

    def run_segment(self, i: Any, done: Any) -> Any:
        """Processes one segment; ``done`` counts the partition's blocks before it."""
        partition, is_staged = self.cta.partition, self.cta.is_staged
        b, begin, count, has_last_block = partition.segment_and_end(i)
        acc: Any = plgpu.layout_cast(jnp.full((TILE, HALF), 0.0, jnp.float32), WGMMA)
        acc = lax.fori_loop(0, count - 1, lambda j, acc: self.add_block(done + j, acc), acc)
        last = done + count - 1
        slot = last & 1
        valid_tokens = jnp.where(
            has_last_block, partition.length(b) - (begin + count - 1) * BLOCK, BLOCK
        )
        acc = self.add_block(last, acc, valid_tokens=valid_tokens, releases=not is_staged)
        self.store(i, b, slot, acc)
        if is_staged:
            for half in range(2):
                self.release(slot, half)
        return done + count

    def add_block(
        self, block: Any, acc: Any, *, valid_tokens: Any = None, releases: bool = True
    ) -> Any:
        """Adds P V of one block.

        Args:
          valid_tokens: number of valid tokens in the block; the values of the others are zeroed.
            Passed only for the last block of a segment.
          releases: whether to release the slot.
        """
        signals, memory, interpret = self.cta.signals, self.cta.memory, self.cta.plan.interpret
        columns, slot = self.columns, block & 1
        use = lax.shift_right_logical(block, jnp.int32(1))
        signals.blocks.wait(max_ready(slot), use)
        factors = plgpu.layout_cast(memory.factors[slot], ROW)
        acc = scale_rows(acc, factors, interpret=interpret)
        signals.blocks.wait(p_ready(slot), use)
        if valid_tokens is not None:

            @when(valid_tokens < BLOCK)
            def _():
                for half in range(2):
                    values = memory.values.at[slot, half]
                    clear_tokens(values, columns, valid_tokens, interpret=interpret)
                plgpu.commit_smem()

        def multiply(acc_ref):
            for half in range(2):
                acc_half = acc_ref.at[:, half * _VALUE_COLUMNS : (half + 1) * _VALUE_COLUMNS]
                values = memory.values.at[slot, half, :, columns]
                plgpu.wgmma(acc_half, memory.rope.at[slot], values)
            if releases:
                plgpu.wgmma_wait(1)
                self.release(slot, 0)
            return acc_ref[...] if interpret is not None else None

        if interpret is not None:  # the interpreter cannot carry it through run_state
            acc = acc + pl.run_scoped(multiply, ACC((TILE, HALF), jnp.float32))
        else:
            acc = pl.run_state(multiply)(ACC.init(acc))
        if releases:
            self.release(slot, 1)
        return acc

    def release(self, slot: Any, half: int) -> None:
        sync_warpgroup(self.cta.plan.interpret)  # one thread arrives for all warps
        plgpu.barrier_arrive(self.cta.signals.kv_free.at[slot * 2 + half])

    def store(self, i: Any, b: Any, slot: Any, acc: Any) -> None:
        """Stores the result of sequence b, the i-th here, whose last block is in ``slot``."""
        memory, partition, signals = self.cta.memory, self.cta.partition, self.cta.signals
        columns, outputs = self.columns, self.outputs
        signals.sequences.wait(SUM_READY, i)
        maximum, total = merge_sums(*load_sums(memory.sum_maxima, memory.sums))
        signals.sequences.arrive(SUM_FREE)
        acc = acc * lax.broadcast_in_dim(reciprocal(total), (TILE, HALF), [0])

        def parts():
            return [
                Part(
                    slice(half * _VALUE_COLUMNS, (half + 1) * _VALUE_COLUMNS),
                    pl.ds(half * HALF + self.index * _VALUE_COLUMNS, _VALUE_COLUMNS),
                    # In the columns of the last block that only this warpgroup reads.
                    (lambda m, half=half: memory.values.at[slot, half, m, columns])
                    if self.cta.is_staged
                    else None,
                )
                for half in range(2)
            ]

        outputs.store_sequence(partition, b, acc, (maximum, total), parts, self.index == 0)
