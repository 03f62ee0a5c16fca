"""The Hopper kernels of mla_decode for a float8 cache and more than 32 query rows.

A CTA processes one tile of 64 query rows (of a sequence's T * H) over one partition of the split-KV
schedule, one key block of 64 cached tokens after the other.

**Budget.** The matmuls of a key block take 2,176 cycles of an SM's tensor cores, as in
:mod:`dense`, and HBM delivers its 41 KB every 2,200. Neither limits the kernel: it takes 4,300. The
two slots of shared memory hold bfloat16, and refilling a slot, half of the scores, P V and the
release of the slot mostly follow one another. With an even number of tiles (128 heads) two CTAs of
a sequence form a cluster and unpack together: each unpacks half of the columns and sends them to
the other through distributed shared memory, in 0.82 of the time. With an odd number, as with 64
heads, a tile of padding would cost more, and each CTA unpacks for itself.

**Roles.** Three warpgroups, which synchronise only through mbarriers:

* The producer fills two slots of shared memory (:class:`SingleProducer`, :class:`PairProducer`). It
  has the next block's float8 latents in registers while the previous block is in use. When a slot
  is released it multiplies them by their scales and stores them as bfloat16. Rope keys are copied.
* Two consumers (:class:`ConsumerWarpgroup`, :class:`row_tiles.Consumer`) take the scores S = Q K^T
  of the even and of the odd key blocks. Each overwrites its block's rope keys, which are no longer
  needed, with P = 2^(S - maximum). Both accumulate P V of all blocks, each for 256 of the 512
  output columns: 128 registers per thread. The running maximum passes from one to the other.

**Loop.** The tensor cores compute half of a block's scores, then the consumer's share of P V of the
previous block, which releases its slot, then the other half. So one consumer's softmax overlaps
with the other's matmuls. At a sequence's end the consumers merge their sums, and each stores its
half of the result.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Int, UInt8

from pallas_kernels.hopper import Index, Ref
from pallas_kernels.hopper.barriers import Barriers, send_quarter
from pallas_kernels.hopper.launch import overlap_preceding_kernel
from pallas_kernels.hopper.lowered_once import lowered_once
from pallas_kernels.hopper.online_softmax import LOG2E, NO_SCORE, merge_sums, reciprocal, scale_rows
from pallas_kernels.hopper.split_kv import (
    BLOCK,
    NO_BLOCK,
    Block,
    BlockWalk,
    Outputs,
    Partition,
    Schedule,
)
from pallas_kernels.hopper.tiles import ROW, WGMMA, row_vector
from pallas_kernels.hopper.warpgroup import (
    WARPS,
    cond,
    fence_async_proxy,
    first_warp,
    sync_warpgroup,
    when,
)
from pallas_kernels.mla_decode import float8_registers
from pallas_kernels.mla_decode.float8_cache import ROPE, ROPE_AT
from pallas_kernels.mla_decode.row_tiles import (
    HALF,
    SLOTS,
    TILE,
    Consumer,
    ConsumerSignals,
    Part,
    TileMemory,
    TilePlan,
    TileResults,
    launch,
    load_sums,
)

# Registers per thread of consumers and producer: 2 * consumer + producer <= 504.
_SINGLE_REGISTERS, _PAIR_REGISTERS = (192, 120), (216, 72)


# ---- barriers ------------------------------------------------------------------------------------

Q_FREE, SUM_READY, SUM_FREE = range(3)
"""Indices in ``sequences``: both consumers have read the queries, or have written or read their
sums. Use i is the partition's i-th sequence."""


@dataclasses.dataclass(frozen=True, eq=False)
class SingleSignals:
    """Barriers of a CTA that unpacks for itself. Slot s has halves 0 and 1. They are Pallas'
    barriers, as :class:`Barriers` uses them in the interpreter: they count their uses themselves.
    They are few arrays, because each keeps its phases in a register per thread."""

    interpret: Any
    q_full: Barriers  # One barrier. The queries of a sequence are filled, by three copies.
    max_ready: Barriers  # the maximum of the block in each slot is in shared memory
    sequences: Barriers
    blocks: Barriers  # halves that are filled, halves that are free, and P that is ready

    @staticmethod
    def scratch() -> list[Any]:
        return [
            plgpu.Barrier(num_arrivals=3, num_barriers=1),
            plgpu.Barrier(num_barriers=SLOTS),
            plgpu.Barrier(num_arrivals=2, num_barriers=3),
            # Cluster barriers let one thread arrive for a warpgroup.
            plgpu.ClusterBarrier(collective_axes=("pair",), num_barriers=5 * SLOTS),
        ]

    def kv_full(self, slot: Index, half: int) -> Index:
        return slot * 2 + half

    def kv_free(self, slot: Index, half: int) -> Index:
        return 4 + slot * 2 + half

    def p_ready(self, slot: Index) -> Index:
        return 8 + slot

    def of_consumer(self, index: int) -> ConsumerSignals:
        """Returns the barriers of the consumer that scores the blocks in slot ``index``."""
        other = 1 - index
        return ConsumerSignals(
            wait_full=lambda half, n: self.blocks.wait(self.kv_full(index, half), n),
            max_ready=lambda: self.max_ready.arrive(index),
            p_ready=lambda: self.arrive_once(self.p_ready(index)),
            wait_other_max=lambda n: self.wait_max(other, n),
            wait_other_p=lambda n: self.wait_p(other, n),
            release=lambda slot: self.release(slot, index),
        )

    def use_of(self, block: Index, k: Index | None) -> Any:
        return k  # of any use: the barriers count

    def wait_max(self, slot: Index, block: Index) -> None:
        self.max_ready.wait(slot, block)

    def wait_p(self, slot: Index, block: Index) -> None:
        self.blocks.wait(self.p_ready(slot), block)

    def release(self, slot: Index, half: int) -> None:
        self.arrive_once(self.kv_free(slot, half))

    def arrive_once(self, i: Index) -> None:
        """Arrives at barrier i of ``blocks`` once, after all threads have come here."""
        sync_warpgroup(self.interpret)
        self.blocks.arrive(i)


@dataclasses.dataclass(frozen=True, eq=False)
class PairSignals:
    """Barriers of a CTA of a pair. Key block n of a partition is use n // 2 of its slot."""

    q_full: Barriers
    blocks: Barriers  # barriers at kv_full, max_ready and p_ready
    sequences: Barriers
    free: Barriers  # half h of slot s has been read by that consumer of both CTAs, see kv_free
    rank: Index  # the CTA's number in its pair: the half of each block that it unpacks

    @staticmethod
    def scratch(interpret: Any) -> list[Any]:
        counts = (1, 3, None), (5 * SLOTS, 1, None), (3, 2, None), (2 * SLOTS, 1, "pair")
        return [Barriers.scratch(n, arrivals, interpret, axis) for n, arrivals, axis in counts]

    @classmethod
    def of(cls, scratch: Sequence[Any], rank: Index, interpret: Any) -> PairSignals:
        q_full, blocks, sequences, free = (Barriers(each, interpret) for each in scratch)
        return cls(q_full, blocks, sequences, free, rank)

    def initialise(self) -> None:
        self.q_full.initialise([3], cluster=False)
        halves_and_rope = [WARPS, WARPS, 1]
        self.blocks.initialise(halves_and_rope * SLOTS + [WARPS] * (2 * SLOTS), cluster=False)
        self.sequences.initialise([2 * WARPS] * 3, cluster=False)
        self.free.initialise([2 * WARPS] * (2 * SLOTS))

    def kv_full(self, slot: Index, half: Index) -> Index:
        """Index of a filled half; half 2 is the rope keys."""
        return slot * 3 + half

    def max_ready(self, slot: Index) -> Index:
        return 3 * SLOTS + slot

    def p_ready(self, slot: Index) -> Index:
        return 4 * SLOTS + slot

    def kv_free(self, slot: Index, half: Index) -> Index:
        """Index in :attr:`free`. The slots of a half are consecutive."""
        return half * SLOTS + slot

    def of_consumer(self, index: int) -> ConsumerSignals:
        """Returns the barriers of the consumer that scores the blocks in slot ``index``."""
        other = 1 - index

        def wait_full(step: int, use: Index) -> None:
            zero = lax.shift_right_logical(use, jnp.int32(24))  # so that no address is kept
            half = (self.rank ^ step) + zero  # the other CTA's half comes second
            self.blocks.wait(self.kv_full(index, half), use)
            if step:
                self.blocks.wait(self.kv_full(index, 2), use)

        return ConsumerSignals(
            wait_full=wait_full,
            max_ready=lambda: self.blocks.arrive(self.max_ready(index)),
            p_ready=lambda: self.blocks.arrive(self.p_ready(index)),
            # The block before its own: if it is in slot 1, of the use before.
            wait_other_max=lambda use: self.blocks.wait(self.max_ready(other), use - other),
            wait_other_p=lambda use: self.blocks.wait(self.p_ready(other), use - other),
            release=lambda slot: self.release(slot, index),
        )

    def use_of(self, block: Index, k: Index | None) -> Any:
        """Returns the use of a block's slot. The block is the consumer's k-th of the segment."""
        return lax.shift_right_logical(block, jnp.int32(1))

    def wait_max(self, slot: Index, block: Index) -> None:
        self.blocks.wait(self.max_ready(slot), self.use_of(block, None))

    def wait_p(self, slot: Index, block: Index) -> None:
        self.blocks.wait(self.p_ready(slot), self.use_of(block, None))

    def release(self, slot: Index, half: int) -> None:
        self.free.arrive(self.kv_free(slot, half), ctas=2)


# ---- launch --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Cta:
    """Static parameters, references and barriers that all warpgroups of a CTA share."""

    plan: TilePlan
    queries: tuple[Any, Any]  # latent and rope parts in global memory
    pages: Ref
    memory: TileMemory
    signals: Any  # SingleSignals or PairSignals
    partition: Partition
    first_query_row: Callable[[], Any]
    bounds: Callable[[], tuple[Any, Any, Any]]
    """Returns the partition's first and last sequence, and their number."""


@lowered_once("queries", "heads", "scale", "interpret")
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
) -> Outputs:
    """As :func:`dense.attend`, over a float8 cache."""
    M, buffers = q_latent.shape[1], TileMemory.scratch()
    plan = TilePlan(M, queries, heads, scale, interpret)
    is_pair, partitions = plan.pair == 2, schedule.partitions
    registers = _PAIR_REGISTERS if is_pair else _SINGLE_REGISTERS

    def kernel(q_latent, q_rope, pages, tables, table, *refs):
        results, scratch = refs[:4], refs[4:]
        memory, barriers = TileMemory(*scratch[: len(buffers)]), scratch[len(buffers) :]
        if is_pair:
            signals: Any = PairSignals.of(barriers, lax.axis_index("pair"), interpret)
            signals.initialise()
            overlap_preceding_kernel(interpret=interpret)
        else:
            signals = SingleSignals(interpret, *(Barriers(each, "Pallas") for each in barriers))
        index, wg = lax.axis_index("partition"), lax.axis_index("wg")
        partition = Partition(table, tables, partitions, index, pages.shape[0])

        def first_query_row():
            return (lax.axis_index("tile") * plan.pair + lax.axis_index("pair")) * TILE

        def bounds():
            first_sequence, last_sequence = (table[index, k] for k in range(2))
            return first_sequence, last_sequence, last_sequence - first_sequence + 1

        if not is_pair:  # where they are not read again for each sequence, which saves registers
            m0, known = lax.axis_index("tile") * TILE, bounds()
            first_query_row, bounds = (lambda: m0), (lambda: known)
        shared = (q_latent, q_rope), pages, memory, signals, partition
        cta = Cta(plan, *shared, first_query_row, bounds)

        def consume(index):
            plgpu.set_max_registers(registers[0], action="increase")
            outputs = TileResults.of(results, memory, plan, first_query_row, plan.rows)
            ConsumerWarpgroup.of(cta, index, outputs).run()

        @when(wg == 2)
        def _produce():
            plgpu.set_max_registers(registers[1], action="decrease")
            (PairProducer if is_pair else SingleProducer)(cta, first_query_row()).run()

        for index_of_consumer in range(2):  # separate code, so that addresses are constants
            when(wg == index_of_consumer)(functools.partial(consume, index_of_consumer))

    kernel.__name__ = "mla_decode_float8_pairs" if is_pair else "mla_decode_float8"
    arrays = q_latent, q_rope, pages, block_tables
    barriers = PairSignals.scratch(interpret) if is_pair else SingleSignals.scratch()
    return launch(kernel, plan, arrays, schedule, barriers, warpgroups=3)


# ---- producers -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class SingleProducer:
    """Fills the two slots with all key blocks of a partition, and copies its sequences' queries."""

    cta: Cta
    first_query_row: Index

    def run(self) -> None:
        cta, signals = self.cta, self.cta.signals
        first_sequence, _, sequence_count = cta.bounds()

        @when(sequence_count > 0)
        def _():
            self.copy_queries(first_sequence)
            first_block = cta.partition.table[cta.partition.index, 2]
            page, tokens = self.page_and_tokens(first_sequence, first_block)
            carry = jnp.int32(0), self.fetch(page), page, tokens
            done = lax.fori_loop(0, sequence_count, self.run_segment, carry)[0]
            # A CTA may exit only after every arrival at its barriers has happened.
            signals.sequences.wait(Q_FREE, None)
            for slot in range(SLOTS):
                when(done > slot)(functools.partial(self.wait_free, slot))

    def run_segment(self, i: Index, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        """Processes a segment. The carry is the partition's blocks before it, and the next block:
        its bytes in registers, its page, and the valid tokens from the page's first slot on."""
        done, *next_block = carry
        signals, (first_sequence, last_sequence, _) = self.cta.signals, self.cta.bounds()
        b, _, begin, count = self.cta.partition.segment_and_length(i, first_sequence, last_sequence)

        def step(j, carry):
            registers, page, tokens = carry
            more = j + 1 < count
            next_page, next_tokens = self.page_and_tokens(
                jnp.where(more, b, jnp.minimum(b + 1, last_sequence)),
                jnp.where(more, begin + j + 1, 0),
            )
            registers = self.fill(done + j, registers, page, tokens, next_page)

            @when((j == 0) & (i > 0))
            def _():
                signals.sequences.wait(Q_FREE, None)
                self.copy_queries(b)

            return registers, next_page, next_tokens

        return done + count, *lax.fori_loop(0, count, step, tuple(next_block))

    def page_and_tokens(self, b: Index, block: Index) -> tuple[Any, Any]:
        page, length = self.cta.partition.page(b, block), self.cta.partition.length(b)
        return page, length - block * BLOCK

    def copy_queries(self, b: Index) -> None:
        cta, first_row = self.cta, self.first_query_row
        cta.memory.copy_queries(cta.signals.q_full, cta.queries, b, first_row, cta.plan.rows)

    def wait_free(self, slot: Index) -> None:
        for half in range(2):
            self.cta.signals.blocks.wait(self.cta.signals.kv_free(slot, half), None)

    def fetch(self, page: Index) -> tuple[Any, ...]:
        """Loads a page's latents and scales into registers, and its rope keys into the L2 cache."""
        if self.cta.plan.interpret is not None:
            return ()
        page = self.cta.pages.at[page]
        float8_registers.prefetch_rope(page)
        return *float8_registers.fetch_half(page, 0), *float8_registers.fetch_half(page, 1)

    def fill(self, n: Index, registers: Any, page: Index, tokens: Index, next_page: Index) -> Any:
        """Stores block n of the partition from registers, and loads the next block."""
        signals, memory, pages = self.cta.signals, self.cta.memory, self.cta.pages
        slot = n & 1
        when(n >= SLOTS)(lambda: self.wait_free(slot))
        if self.cta.plan.interpret is not None:
            latent, rope = float8_registers.unpacked_page(pages[page], tokens)
            for half in range(2):
                memory.latents[slot, half] = latent[:, half * HALF : (half + 1) * HALF]
                if half:
                    memory.rope[slot] = rope
                signals.arrive_once(signals.kv_full(slot, half))
            return registers
        registers = list(registers)
        float8_registers.copy_rope(memory.rope.at[slot], pages.at[page])
        for half in range(2):
            of_half = slice(2 * half, 2 * half + 2)
            words, scales = registers[of_half]
            float8_registers.store_half(memory.latents.at[slot, half], words, scales, tokens)
            if half:
                float8_registers.wait_rope_copies()
            fence_async_proxy()
            signals.arrive_once(signals.kv_full(slot, half))
            registers[of_half] = float8_registers.fetch_half(pages.at[next_page], half)
        float8_registers.prefetch_rope(pages.at[next_page])
        return tuple(registers)


@dataclasses.dataclass(frozen=True, eq=False)
class PairProducer:
    """Fills half of the two slots of both CTAs with all key blocks of a partition.

    CTA r of a pair loads half r of each key block's latents (256 columns) from global memory to
    registers. When both CTAs have released that half of a slot, it unpacks the latents to bfloat16
    and stores them there, and each warp sends what it has stored to the other CTA. Then it loads
    the next block: not earlier, because the fence after the stores waits for loads. One instruction
    prefetches the page after the next one into the L2 cache. Rope keys are copied by TMA."""

    cta: Cta
    first_query_row: Index

    @property
    def gpu(self) -> bool:
        return self.cta.plan.interpret is None

    @property
    def rank(self) -> Any:
        return self.cta.signals.rank

    def run(self) -> None:
        signals, walk = self.cta.signals, BlockWalk.of(self.cta.partition)

        def fill_next(carry):
            n, copied, position, (now, following), registers = carry
            position = walk.after(position)
            later = walk.block_at(position, following[1])
            self.prefetch(later)
            self.fill(n, now, registers)
            registers = self.load(following)
            # After the block's keys: the buffer is free when the sequence before has been scored.
            copied = self.copy_queries(walk, copied, now[0] - walk.first_sequence + 1)
            return n + 1, copied, position, (following, later), registers

        @when(walk.sequence_count > 0)
        def _():
            copied = self.copy_queries(walk, jnp.int32(0), jnp.int32(1))
            position = walk.start()
            first = walk.block_at(position, 0)
            position = walk.after(position)
            second = walk.block_at(position, first[1])
            self.prefetch(second)
            carry = jnp.int32(0), copied, position, (first, second), self.load(first)
            n = lax.while_loop(lambda carry: carry[3][0][0] != NO_BLOCK, fill_next, carry)[0]
            # A CTA may exit only after every arrival at its barriers has happened.
            for half in range(2):
                signals.free.wait_for_arrivals(signals.kv_free(0, half), SLOTS, n)

            @when(first_warp(self.gpu))
            def _():
                signals.sequences.wait(Q_FREE, walk.sequence_count - 1)

    def load(self, block: Block) -> tuple[Any, ...]:
        """Loads this CTA's half of a block into registers, and its scales."""
        page = self.cta.pages.at[block[1]]
        return float8_registers.fetch_half(page, self.rank) if self.gpu else ()

    def prefetch(self, block: Block) -> None:
        if self.gpu:

            @when((block[0] != NO_BLOCK) & (self.rank == 0))
            def _():
                float8_registers.prefetch_page(self.cta.pages.at[block[1]])

    def wait_free(self, n: Index, half: Index) -> None:
        signals, use = self.cta.signals, lax.shift_right_logical(n, jnp.int32(1))
        when(use > 0)(lambda: signals.free.wait(signals.kv_free(n & 1, half), use - 1))

    def fill(self, n: Index, block: Block, registers: tuple[Any, ...]) -> None:
        """Fills block n in both CTAs."""
        signals, memory, pages = self.cta.signals, self.cta.memory, self.cta.pages
        slot, (_, page, tokens) = n & 1, block
        self.wait_free(n, self.rank)
        if not self.gpu:
            self.wait_free(n, 1 - self.rank)
            self.interpreted_fill(slot, page, tokens)
            return
        target = memory.latents.at[slot, self.rank]
        words, scales = registers
        float8_registers.store_half(target, words, scales, tokens)
        fence_async_proxy()
        full = signals.kv_full(slot, self.rank)
        signals.blocks.arrive(full)
        send_quarter(target, BLOCK * HALF * 2 // WARPS, signals.blocks, full)

        @when(first_warp(self.gpu))
        def _():
            self.wait_free(n, 1 - self.rank)  # P is where the rope keys will be
            window = page, pl.ds(0, BLOCK), pl.ds(ROPE_AT, 2 * ROPE)
            signals.blocks.copy(signals.kv_full(slot, 2), pages, window, memory.rope.at[slot])

    def interpreted_fill(self, slot: Index, page: Index, tokens: Index) -> None:
        """Unpacks both halves: the interpreter has no stores to another CTA's memory."""
        signals, memory = self.cta.signals, self.cta.memory
        latent, memory.rope[slot] = float8_registers.unpacked_page(self.cta.pages[page], tokens)
        for half in range(2):
            memory.latents[slot, half] = latent[:, half * HALF : (half + 1) * HALF]
        fence_async_proxy(self.cta.plan.interpret)
        for part in range(3):
            signals.blocks.arrive(signals.kv_full(slot, part))

    def copy_queries(self, walk: BlockWalk, first: Index, end: Index) -> jax.Array:
        """Copies the queries of the partition's sequences ``first`` to ``end - 1``."""
        cta, signals = self.cta, self.cta.signals

        def copy(i: Index, _: Any) -> None:
            when(i > 0)(lambda: signals.sequences.wait(Q_FREE, i - 1))
            b, first_row = walk.first_sequence + i, self.first_query_row
            cta.memory.copy_queries(signals.q_full, cta.queries, b, first_row, TILE)

        when(first_warp(self.gpu))(lambda: lax.fori_loop(first, end, copy, None))
        return jnp.maximum(first, end)


# ---- consumers and results -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class ConsumerWarpgroup:
    """Attends to all key blocks of a partition, and stores half of its sequences' results."""

    cta: Cta
    consumer: Consumer
    outputs: TileResults

    @classmethod
    def of(cls, cta: Cta, index: int, outputs: TileResults) -> ConsumerWarpgroup:
        consumer = Consumer(
            index,
            cta.memory,
            cta.signals.of_consumer(index),
            lambda n: lax.shift_right_logical(n, jnp.int32(24)),
            cta.plan.interpret,
            hides_rope=False,
            # The half that its own CTA unpacks is scored while the other one is on its way.
            first_half=cta.signals.rank if cta.plan.pair == 2 else 0,
        )
        return cls(cta, consumer, outputs)

    @property
    def few_registers(self) -> bool:
        """Whether row sums follow the running maximum as the accumulator does. Otherwise their own
        maximum is kept. A pair's consumers also read their partition again for each sequence."""
        return self.cta.plan.pair == 2

    def run(self) -> None:
        signals, bounds, zero = self.cta.signals, self.cta.bounds, jnp.int32(0)
        if self.few_registers:
            done = lax.while_loop(
                lambda carry: carry[0] < bounds()[2],
                lambda carry: (carry[0] + 1, self.run_segment(*carry)),
                (zero, zero),
            )[1]
        else:
            done = lax.fori_loop(0, bounds()[2], self.run_segment, zero)

        # A CTA may exit only after every arrival at its barriers has happened.
        @when((done >= 1) & ((done & 1) == self.consumer.index))
        def _():
            signals.wait_max(1 - self.consumer.index, done - 1)

        sequence_count = bounds()[2]
        when(sequence_count > 0)(lambda: signals.sequences.wait(SUM_FREE, sequence_count - 1))

    def run_segment(self, i: Index, done: Index) -> Index:
        """Processes one segment; ``done`` counts the partition's blocks before it."""
        memory, signals, consumer = self.cta.memory, self.cta.signals, self.consumer
        index, other, few_registers = consumer.index, 1 - consumer.index, self.few_registers
        partition, bounds = self.cta.partition, self.cta.bounds
        _, length, begin, count = partition.segment_and_length(i, *bounds()[:2])
        first = (index + done) & 1
        block_count = lax.shift_right_logical(jnp.maximum(count - first + 1, 0), jnp.int32(1))
        zeros: Any = plgpu.layout_cast(jnp.full((TILE, HALF), 0.0, jnp.float32), WGMMA)
        initial = zeros, row_vector(NO_SCORE), row_vector(0.0)
        if few_registers:
            initial = zeros, row_vector(0.0)
        signals.q_full.wait(0, i)

        def first_block():
            """Processes the segment's first block, if this warpgroup scores it."""
            s = consumer.scores(signals.use_of(done, done))
            when(done >= 1)(lambda: signals.wait_max(other, done - 1))
            acc, *sums = initial
            sums = self.softmax(s, row_vector(NO_SCORE), length, begin, sums)[1:]
            acc = consumer.add_values(acc, index)
            when(count > 1)(lambda: signals.release(index, index))
            return acc, *sums

        def add_block(k, carry):
            """Computes the scores of block j, P V of j - 1 meanwhile, then P V of j."""
            acc, *sums = carry
            j = first + 2 * k

            def softmax_of(s):
                before, state = plgpu.layout_cast(memory.maxima[other], ROW), sums
                if few_registers:
                    state = [sums[0] * plgpu.layout_cast(memory.factors[other], ROW)]
                return self.softmax(s, before, length, begin + j, state)

            n = signals.use_of(done + j, k)
            acc, *sums = consumer.add_block(n, n, acc, softmax_of)
            when(j + 1 < count)(lambda: signals.release(index, index))
            return acc, *sums

        carry = cond(first == 0, first_block, lambda: initial)
        carry = lax.fori_loop(1 - first, block_count, add_block, carry)
        acc, *sums = carry
        signals.sequences.arrive(Q_FREE)

        def add_last():
            """Adds P V of the segment's last block, if the other warpgroup scored it."""
            signals.wait_p(other, done + count - 1)
            alpha = plgpu.layout_cast(memory.factors[other], ROW)
            scaled = scale_rows(acc, alpha, interpret=self.cta.plan.interpret)
            added = consumer.add_values(scaled, other)
            return (added, sums[0] * alpha) if few_registers else added

        slot = (done + count - 1) & 1
        if few_registers:
            acc, total = cond(slot == index, lambda: (acc, sums[0]), add_last)
            sums = plgpu.layout_cast(memory.maxima[slot], ROW), total
        else:
            acc = cond(slot == index, lambda: acc, add_last)
        self.store(i, bounds()[0] + i, slot, acc, *sums)
        return done + count

    def softmax(
        self, s: jax.Array, before: jax.Array, length: Index, block: Index, sums: Sequence[Any]
    ) -> tuple[Any, ...]:
        """Stores P of a block, its maximum and factor. Returns the factor, and the row sums."""
        plan, max_pages = self.cta.plan, self.cta.partition.max_pages
        fully_visible = length - (plan.queries - 1)  # tokens that every query sees
        fully_visible = jnp.minimum(fully_visible, max_pages * BLOCK)
        s = cond(
            (block + 1) * BLOCK <= fully_visible,
            lambda: s,
            lambda: plan.masked(s, length, block, max_pages, self.cta.first_query_row),
        )
        to_log2 = plan.scale * LOG2E
        p, running, alpha = self.consumer.store_p(
            s.max(axis=1) * to_log2,
            before,
            lambda running: s * to_log2 - lax.broadcast_in_dim(running, (TILE, BLOCK), [0]),
        )
        if self.few_registers:
            return alpha, sums[0] * alpha + p.sum(axis=1)
        maximum, total = sums
        total = total * jnp.exp2(maximum - running) + p.sum(axis=1)
        return alpha, running, total

    def store(
        self, i: Index, b: Index, slot: Index, acc: jax.Array, maximum: jax.Array, total: jax.Array
    ) -> None:
        """Merges the consumers' sums, and stores the result of sequence b, the partition's i-th,
        whose last block is in ``slot``."""
        index, memory, outputs = self.consumer.index, self.cta.memory, self.outputs
        signals, partition = self.cta.signals, self.cta.partition
        when(i > 0)(lambda: signals.sequences.wait(SUM_FREE, i - 1))
        memory.sum_maxima[index], memory.sums[index] = maximum, total
        signals.sequences.arrive(SUM_READY)
        signals.sequences.wait(SUM_READY, i)
        maxima, sums = load_sums(memory.sum_maxima, memory.sums)
        signals.sequences.arrive(SUM_FREE)
        maximum, total = merge_sums(maxima, sums)
        acc = acc * lax.broadcast_in_dim(reciprocal(total), (TILE, HALF), [0])
        # Staged in the half of the last block that only this warpgroup reads. Not so in a pair: the
        # other CTA may still be sent its copy.
        staging = None if self.cta.plan.pair == 2 else (lambda m: memory.latents.at[slot, index, m])
        part = Part(slice(None), pl.ds(index * HALF, HALF), staging)
        outputs.store_sequence(partition, b, acc, (maximum, total), lambda: [part], index == 0)
        signals.release(slot, index)
