"""The Hopper kernel of mla_decode for a bfloat16 cache and more than 32 query rows.

A CTA computes one tile of 64 query rows (of a sequence's T * H) over one partition of the split-KV
schedule (:mod:`split_kv`): a run of consecutive key blocks of 64 cached tokens. Block n of the
partition is in slot n % 2 of shared memory. The blocks of one sequence are a *segment*.

**Budget.** A key block takes 64 x 64 x (576 + 512) multiply-adds, 2,176 cycles of an SM's tensor
cores. It is 72 KB, which HBM delivers to each SM every 3,900 cycles, or every 1,950 if two SMs
share it. With 128 query rows the kernel is therefore bound by the tensor cores, and must keep them
busy during the softmax. Shared memory has the queries (72 KB) and two key blocks (144 KB).

**Roles.** Four warpgroups. Unlike those of FlashMLA's "seesaw", none computes both S and P V. They
synchronise only through mbarriers (:class:`Signals`):

* Two score warpgroups (:class:`ScoreWarpgroup`) take the even and the odd key blocks, each with its
  own slot. Each copies its blocks by TMA, computes S = Q K^T, and overwrites the block's rope keys,
  which are no longer needed, with P = 2^(S - maximum). The running maximum passes from one to the
  other through shared memory.
* Two value warpgroups (:class:`ValueWarpgroup`) each accumulate P V of every block, for 256 of the
  512 output columns: 128 registers per thread. So they get 160, and the score warpgroups 96.

**Loop.** While the value warpgroups multiply P V of block n, one score warpgroup computes S of
block n + 1 and its softmax. The value warpgroups release a slot half by half, and each half of its
next block is copied at once. At the end of a segment the score warpgroups leave their row sums in
shared memory, and the value warpgroups divide by them and store the result, or a partial result if
the sequence is split.

Two CTAs whose tiles belong to the same sequence form a cluster: each copies half of a key block to
both (TMA multicast), which halves the traffic from the L2 cache.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Int

from pallas_kernels.hopper import Index, Ref
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
    """Barriers of a CTA, in the order of :meth:`scratch`.

    ========= ====================================== ===============================================
    barrier   completed by                           waited for by
    ========= ====================================== ===============================================
    q_full    the three copies of the queries        both score warpgroups
    kv_full   the copy of a third of the slot        the slot's score warpgroup
    max_ready the slot's score warpgroup             the other score and both value warpgroups
    p_ready   the slot's score warpgroup             both value warpgroups
    kv_free   value warpgroups of all CTAs           the slot's score warpgroup (its first warp)
    Q_FREE    both score warpgroups                  score warpgroup 0 (its first warp)
    SUM_READY both score warpgroups                  both value warpgroups
    SUM_FREE  both value warpgroups                  both score warpgroups
    ========= ====================================== ===============================================

    No barrier completes twice before all its waiters have seen the first completion: the arrivals
    for the second depend on them. So a wait may compare the parities of uses.
    """

    q_full: Barriers  # use i is the partition's i-th segment
    blocks: Barriers
    """Barriers at :func:`kv_full`, :func:`max_ready` and :func:`p_ready`. Key block n of the
    partition is use n // 2 of its slot's barriers."""
    sequences: Barriers
    """Use i is the partition's i-th segment. For Q_FREE it means that the queries *before* it have
    been read: the score warpgroups arrive when a segment begins, also the first one."""
    kv_free: Any  # Half h of slot s is at index 2 s + h. Pallas tracks its phase.

    @staticmethod
    def scratch(interpret: Any) -> list[Any]:
        free = plgpu.ClusterBarrier(
            collective_axes=("pair",), num_arrivals=2, num_barriers=2 * SLOTS
        )
        counts = (1, 3), (5 * SLOTS, 1), (3, 2)  # barriers, and arrivals in the interpreter
        return [*(Barriers.scratch(*count, interpret) for count in counts), free]

    @classmethod
    def of(cls, scratch: Sequence[Any], interpret: Any) -> Signals:
        *barriers, kv_free = scratch
        return cls(*(Barriers(each, interpret) for each in barriers), kv_free=kv_free)

    def initialise(self) -> None:
        """Initialises the barriers on a GPU, where each warp of a warpgroup arrives. Every thread
        calls it."""
        self.q_full.initialise([3])
        self.blocks.initialise([1] * (3 * SLOTS) + [WARPS] * (2 * SLOTS))
        self.sequences.initialise([2 * WARPS] * 3)


def kv_full(slot: Index, half: int) -> Index:
    """Index in :attr:`Signals.blocks`. Half 2 is the rope keys."""
    return slot * 3 + half


def max_ready(slot: Index) -> Index:
    return 3 * SLOTS + slot


def p_ready(slot: Index) -> Index:
    return 4 * SLOTS + slot


@dataclasses.dataclass(frozen=True, eq=False)
class Cta:
    """Static parameters, references and barriers that all warpgroups of a CTA share."""

    plan: TilePlan
    queries: tuple[Any, Any]  # latent and rope parts in global memory
    pages: Ref
    memory: TileMemory
    signals: Signals
    partition: Partition

    @property
    def is_staged(self) -> bool:
        """Whether results go through shared memory: a copy can write part of a tile, a store of
        registers cannot."""
        return self.plan.rows < TILE

    def first_query_row(self) -> jax.Array:
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

    def mla_decode(q_latent, q_rope, pages, block_tables, table, *refs):
        results, scratch = refs[:4], refs[4:]
        memory = TileMemory(*scratch[: len(buffers)])
        signals = Signals.of(scratch[len(buffers) :], interpret)
        signals.initialise()
        overlap_preceding_kernel(interpret=interpret)
        index, wg = lax.axis_index("partition"), lax.axis_index("wg")
        partition = Partition(table, block_tables, schedule.partitions, index, pages.shape[0])
        cta = Cta(plan, (q_latent, q_rope), pages, memory, signals, partition)

        @when(wg >= 2)
        def _score():
            plgpu.set_max_registers(_SCORE_REGISTERS, action="decrease")
            sequence_count, slot = partition.sequence_count(), wg - 2
            ScoreWarpgroup(cta, slot, 1 - slot).run(sequence_count)

        @when(wg < 2)
        def _accumulate():
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
    slot: Index  # parity of this warpgroup's key blocks, and their slot
    other: Index  # that of the other score warpgroup

    def run(self, sequence_count: Index) -> None:
        cta, signals, slot = self.cta, self.cta.signals, self.slot
        done = lax.fori_loop(0, sequence_count, self.run_segment, jnp.int32(0))

        # Waits for completions that are left. A CTA must not exit before the other CTA of its
        # cluster has arrived at its kv_free. The other waits only the interpreter requires.
        @when((done >= 1) & ((done & 1) == slot))
        def _():
            use = lax.shift_right_logical(done - 1, jnp.int32(1))
            signals.blocks.wait(max_ready(self.other), use)

        @when((done > slot) & first_warp(cta.plan.interpret is None))
        def _():
            for half in range(2):
                plgpu.barrier_wait(signals.kv_free.at[slot * 2 + half])

        when(sequence_count > 0)(lambda: signals.sequences.wait(SUM_FREE, sequence_count - 1))

    def copy_queries(self, i: Index, b: Index) -> None:
        """Copies the queries of sequence b, the partition's i-th, when the buffer is free."""
        cta, signals = self.cta, self.cta.signals

        @when((self.slot == 0) & first_warp(cta.plan.interpret is None))
        def _():
            signals.sequences.wait(Q_FREE, i)
            first_row, rows = cta.first_query_row(), cta.plan.rows
            cta.memory.copy_queries(signals.q_full, cta.queries, b, first_row, rows)

    def copy_block(self, page: Any, *, wait: bool) -> None:
        """Copies a page into this warpgroup's slot. With ``wait``, each half is copied when the
        slot's previous block releases it."""
        signals, memory, slot = self.cta.signals, self.cta.memory, self.slot
        pages, axis = self.cta.pages, "pair" if self.cta.plan.pair == 2 else None

        @when(first_warp(self.cta.plan.interpret is None))
        def _():
            for half in range(2):
                if wait:
                    plgpu.barrier_wait(signals.kv_free.at[slot * 2 + half])
                window = page, pl.ds(0, BLOCK), pl.ds(HALF * half, HALF)
                target = memory.latents.at[slot, half]
                signals.blocks.copy(kv_full(slot, half), pages, window, target, axis)
            window = page, pl.ds(0, BLOCK), pl.ds(LATENT, ROPE)
            signals.blocks.copy(kv_full(slot, 2), pages, window, memory.rope.at[slot], axis)

    def run_segment(self, i: Index, done: Index) -> Index:
        """Processes the i-th segment. ``done`` counts the partition's blocks before it. Block j of
        the segment is block ``done + j`` of the partition. This warpgroup's k-th block is ``j =
        first + 2 k``. It may have none."""
        plan, signals, partition = self.cta.plan, self.cta.signals, self.cta.partition
        first = (self.slot + done) & 1
        first_sequence, _, first_block, _ = entry = partition.entry()
        first_page = partition.page(first_sequence + i, jnp.where(i == 0, first_block, 0) + first)
        b, begin, count, _ = partition.segment_and_end(i, entry)
        length = partition.length(b)
        block_count = lax.shift_right_logical(jnp.maximum(count - first + 1, 0), jnp.int32(1))
        # The blocks that need no mask, because every query sees all their tokens: first those of
        # the segment, then those of this warpgroup.
        unmasked = jnp.clip(lax.div(length - plan.queries + 1, BLOCK) - begin, 0, count)
        unmasked = lax.shift_right_logical(jnp.maximum(unmasked - first + 1, 0), jnp.int32(1))

        signals.sequences.arrive(Q_FREE)
        self.copy_queries(i, b)
        for is_first_use in (True, False):  # of the slot: nothing has to be released

            @when((first < count) & ((done + first < SLOTS) == is_first_use))
            def _(is_first_use=is_first_use):
                self.copy_block(first_page, wait=not is_first_use)

        signals.q_full.wait(0, i)

        def process_block(k, carry, *, masked):
            maximum, sums = carry
            j = first + 2 * k
            # Loaded early to hide the latency behind the matmul. Masked blocks come last:
            # they rarely have a successor, and have no register to spare.
            next_page = None if masked else partition.page(b, begin + j + 2)
            use = lax.shift_right_logical(done + j, jnp.int32(1))
            s = self.scores(k, use)
            if masked:
                max_pages, first_row = partition.max_pages, self.cta.first_query_row
                s = plan.masked(s, length, begin + j, max_pages, first_row)
            p, new_maximum = self.softmax(s, use, j, done + j)
            block_sums = partial_row_sums(p)
            rescale = jnp.exp2(maximum - new_maximum)
            sums = sums * lax.broadcast_in_dim(rescale, sums.shape, [0]) + block_sums

            @when(j + 2 < count)
            def _():
                self.copy_block(partition.page(b, begin + j + 2) if masked else next_page,
                                wait=True)  # fmt: skip

            return new_maximum, sums

        # The running maximum at this warpgroup's last block, and the row sums of its own blocks
        # relative to it. Each thread sums what it has of a row; the segment's end reduces them.
        zeros = jnp.full((TILE, SUM_COLUMNS), 0.0, jnp.float32)
        carry = row_vector(NO_SCORE), plgpu.layout_cast(zeros, WGMMA)
        carry = lax.fori_loop(0, unmasked, functools.partial(process_block, masked=False), carry)
        carry = lax.fori_loop(
            unmasked, block_count, functools.partial(process_block, masked=True), carry
        )
        self.store_sums(i, *carry)
        return done + count

    def scores(self, k: Index, use: Index) -> jax.Array:
        """Returns Q K^T, not scaled yet, of this warpgroup's k-th block of a segment."""
        signals, memory = self.cta.signals, self.cta.memory
        # Always zero, but the compiler cannot tell. Otherwise it would compute all 72 descriptors
        # before the loop and keep them in registers, which are too few.
        zero = lax.shift_right_logical(k, jnp.int32(24))
        slot = self.slot + zero

        def multiply(acc):
            for half in range(2):
                signals.blocks.wait(kv_full(self.slot, half), use)
                keys = memory.latents.at[slot, half]
                plgpu.wgmma(acc, memory.q_latent.at[half + zero], keys.transpose((1, 0)))
            signals.blocks.wait(kv_full(self.slot, 2), use)
            plgpu.wgmma(acc, memory.q_rope.at[zero], memory.rope.at[slot].transpose((1, 0)))
            return acc[...]

        return pl.run_scoped(multiply, ACC((TILE, BLOCK), jnp.float32))

    def softmax(self, s: jax.Array, use: Index, j: Index, n: Index) -> tuple[jax.Array, jax.Array]:
        """Stores P, the running maximum, and the factor that rescales earlier results to it.
        Returns P and the running maximum. The block is number j of the segment, n of the partition,
        and use ``use`` of its slot."""
        signals, memory, slot, other = self.cta.signals, self.cta.memory, self.slot, self.other
        interpret, to_log2 = self.cta.plan.interpret, self.cta.plan.scale * LOG2E
        block_max = s.max(axis=1) * to_log2

        @when(n >= 1)
        def _():
            # Waits for the maximum of block n - 1, also where a segment begins: the other score
            # warpgroup has then read the maximum of block n - 2, which is overwritten below. Block
            # n - 1 is use ``use + slot - 1`` of its slot, and only the parity counts.
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
        memory.p[slot] = p.astype(jnp.bfloat16)
        fence_async_proxy(interpret)  # every warp arrives below, so no barrier is needed here
        signals.blocks.arrive(p_ready(slot))
        return p, running

    def store_sums(self, i: Index, maximum: jax.Array, partial_sums: Ref) -> None:
        """Stores the row sums of the i-th segment, when those of the one before have been read."""
        signals, memory = self.cta.signals, self.cta.memory
        when(i > 0)(lambda: signals.sequences.wait(SUM_FREE, i - 1))
        total = partial_sums.sum(axis=1)
        memory.sum_maxima[self.slot], memory.sums[self.slot] = maximum, total
        signals.sequences.arrive(SUM_READY)


# ---- values and results --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class ValueWarpgroup:
    """Accumulates P V of every key block for 256 output columns, and stores the results."""

    cta: Cta
    index: Index
    """0 or 1. Of each half of the latents, it computes the first or the second 128 columns, so that
    both value warpgroups release half 0 after half of their work."""
    outputs: TileResults

    def run(self) -> None:
        lax.fori_loop(0, self.cta.partition.sequence_count(), self.run_segment, jnp.int32(0))

    @property
    def columns(self) -> Any:
        """This warpgroup's columns of each half."""
        return pl.ds(self.index * _VALUE_COLUMNS, _VALUE_COLUMNS)

    def run_segment(self, i: Index, done: Index) -> Index:
        """Processes the i-th segment. ``done`` counts the partition's blocks before it."""
        partition, is_staged = self.cta.partition, self.cta.is_staged
        b, begin, count, has_last_block = partition.segment_and_end(i)
        acc: jax.Array = plgpu.layout_cast(jnp.full((TILE, HALF), 0.0, jnp.float32), WGMMA)
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
        self, block: Index, acc: jax.Array, *, valid_tokens: Any = None, releases: bool = True
    ) -> Any:
        """Rescales ``acc`` to the maximum of the partition's block, and adds P V of the block. With
        ``valid_tokens``, for the last block of a segment, the values of later tokens are zeroed.
        ``releases``: whether to release the slot."""
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
                    values = memory.latents.at[slot, half]
                    clear_tokens(values, columns, valid_tokens, interpret=interpret)
                plgpu.commit_smem()

        def multiply(acc_ref):
            for half in range(2):
                acc_half = acc_ref.at[:, half * _VALUE_COLUMNS : (half + 1) * _VALUE_COLUMNS]
                values = memory.latents.at[slot, half, :, columns]
                plgpu.wgmma(acc_half, memory.p.at[slot], values)
            if releases:
                plgpu.wgmma_wait(1)  # the matmul of half 0 is complete
                self.release(slot, 0)
            return acc_ref[...] if interpret is not None else None

        if interpret is not None:  # the interpreter cannot carry it through run_state
            acc = acc + pl.run_scoped(multiply, ACC((TILE, HALF), jnp.float32))
        else:
            acc = pl.run_state(multiply)(ACC.init(acc))
        if releases:
            self.release(slot, 1)
        return acc

    def release(self, slot: Index, half: int) -> None:
        """Releases half of a slot in both CTAs, because each CTA copies to both."""
        sync_warpgroup(self.cta.plan.interpret)  # one thread arrives for all warps
        plgpu.barrier_arrive(self.cta.signals.kv_free.at[slot * 2 + half])

    def store(self, i: Index, b: Index, slot: Index, acc: jax.Array) -> None:
        """Stores the result of sequence b, the i-th here, whose last block is in ``slot``. The
        running maximum never falls. So the greater one of the score warpgroups' maxima is that of
        the segment's last block, to which ``acc`` is relative."""
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
                    (lambda m, half=half: memory.latents.at[slot, half, m, columns])
                    if self.cta.is_staged
                    else None,
                )
                for half in range(2)
            ]

        outputs.store_sequence(partition, b, acc, (maximum, total), parts, self.index == 0)
