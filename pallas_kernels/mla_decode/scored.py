"""The Hopper kernel of mla_decode for a float8 cache and at most 32 query rows.

A CTA processes the query rows of its sequences over one partition of the split-KV schedule, one key
block of 64 cached tokens after the other. As in :mod:`few_queries` the matmuls are transposed, so
that N of wgmma is query rows (:mod:`transposed`).

**Budget.** HBM delivers a key block (41 KB) to each SM every 2,500 cycles of 1.98 GHz. If both
matmuls read it from shared memory, they would take 68 wgmma instructions of 42 cycles each, 2,860.
But who unpacks a block has the keys in registers, which are an operand of wgmma too: then the
matmuls take 2,000 cycles, and shared memory is busy for 1,980. The unpacking warpgroups therefore
also compute the scores. Each has 5,000 cycles until its next block, and needs up to 3,000.

**Roles.** Four warpgroups, which synchronise only through mbarriers:

* The producer (:class:`transposed.Producer`) copies pages as they are cached, by TMA, a quarter
  (the 16 tokens of one warp) per stage of a ring buffer. Another of its warps copies queries.
* Two scorers (:class:`Scorer`) take the even and the odd key blocks. Each loads its block's float8
  latents into registers and multiplies them by their scales. There they are the operand of S^T = K
  Q^T, and from there they are stored as bfloat16 values in the scorer's slot. It writes P = 2^(S -
  maximum) next to them. The running maximum passes from one scorer to the other.
* One value warpgroup (:class:`ValueWarpgroup`) accumulates O^T += V^T P^T of all blocks in
  registers and stores the results.

**Loop.** A scorer's matmul of 64 latent columns runs while it unpacks the next 64, and the value
warpgroup multiplies one block while the scorers unpack the next two. A scorer waits for three
things: the bytes of its block, its slot, and the other scorer's maximum.

On an H200 it takes up to 15 % less time than a kernel that unpacks to shared memory, with many long
sequences, and 2 % more with short ones.
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
from jaxtyping import Array, BFloat16, Int, UInt8

from pallas_kernels.hopper import Index, Ref
from pallas_kernels.hopper.barriers import Barriers, TmaCopy
from pallas_kernels.hopper.launch import LANE, grid_kernel, overlap_preceding_kernel
from pallas_kernels.hopper.lowered_once import lowered_once
from pallas_kernels.hopper.online_softmax import NO_SCORE
from pallas_kernels.hopper.ring import CountedRing
from pallas_kernels.hopper.split_kv import BLOCK, Outputs, Partition, Schedule, output_types
from pallas_kernels.hopper.tiles import ACC, COLUMN, WGMMA, spread_columns, tiles_of
from pallas_kernels.hopper.warpgroup import WARPS, cond, when
from pallas_kernels.hopper.wgmma import keep_live
from pallas_kernels.mla_decode import float8_registers as registers
from pallas_kernels.mla_decode.float8_cache import LATENT, ROPE, TOKEN_BYTES
from pallas_kernels.mla_decode.float8_registers import QUARTER_BYTES, WARP_TOKENS
from pallas_kernels.mla_decode.transposed import (
    Producer,
    QueryBuffer,
    Results,
    Softmax,
    Values,
    add_values,
    column_vector,
    reduce_threads,
)

MAX_ROWS = 32  # query rows of a CTA
SCORERS = 2
_SHARED_BYTES = 232448 - 10 * 1024  # of a CTA, less barriers and vectors
_MOST_STAGES = 12
# In the interpreter, who waits for a barrier must wait for all its phases. With eight stages each
# belongs to one warp of one scorer. On a GPU the scorers take turns.
_INTERPRETED_STAGES = 8
# Registers per thread. Four warpgroups have 512 together.
_SCORER_REGISTERS, _VALUE_REGISTERS, _PRODUCER_REGISTERS = 152, 176, 24


# ---- plan, shared memory and barriers ------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static parameters of one call."""

    M: int  # query rows per sequence, a multiple of 8
    interpret: Any

    @property
    def gpu(self) -> bool:
        return self.interpret is None

    @property
    def tiles(self) -> int:
        """CTAs that share the query rows of a sequence."""
        return -(-self.M // MAX_ROWS)

    @property
    def rows(self) -> int:
        """Query rows of a CTA: 8, 16 or 32. With 24, ptxas spills a register."""
        return next(n for n in (8, 16, 32) if n * self.tiles >= self.M)

    @property
    def stages(self) -> int:
        """Stages of the ring buffer. At least 4, because the warps of a scorer wait for each
        other."""
        if not self.gpu:
            return _INTERPRETED_STAGES
        queries_and_p = 2 * self.rows * (LATENT + ROPE + 2 * BLOCK)
        room = (_SHARED_BYTES - queries_and_p - 2 * 2 * BLOCK * LATENT) // QUARTER_BYTES
        return min(room, _MOST_STAGES)

    @property
    def ahead(self) -> int:
        """Operands of eight per block that a scorer loads before it unpacks the first one. The
        more, the sooner the ring's stage is free, and the more registers it takes."""
        return 4 if self.rows <= 16 else 3


@dataclasses.dataclass(frozen=True, eq=False)
class Memory:
    """A CTA's buffers in shared memory, in the order of :meth:`types`. Slot s is scorer s's."""

    ring: Ref  # quarters of pages as they are cached, uint8 [stages, 16, 656]
    values: Ref  # unpacked latents, bfloat16 [2, 8, 64, 64]: slot, 64 columns, tokens
    p: Ref  # P, bfloat16 [2, N, 64]
    vectors: Ref  # numbers per query row, float32 [6, N]
    scratch: Ref  # each scorer's scratch for reductions over its threads, float32 [2, 4 N]
    raised: Ref  # whether the maximum was raised at the block in each slot, int32 [2]

    @staticmethod
    def types(plan: Plan) -> list[Any]:
        return [
            plgpu.SMEM((plan.stages, WARP_TOKENS, TOKEN_BYTES), jnp.uint8),
            tiles_of(SCORERS, LATENT // BLOCK, BLOCK, BLOCK),
            tiles_of(SCORERS, plan.rows, BLOCK),
            plgpu.SMEM((3 * SCORERS, plan.rows), jnp.float32),
            plgpu.SMEM((SCORERS, WARPS * plan.rows), jnp.float32),
            plgpu.SMEM((SCORERS,), jnp.int32),
        ]

    @property
    def maxima(self) -> Any:
        """Running maximum when the block in each slot was scored."""
        return self.vectors.at[0:2]

    @property
    def sums(self) -> Any:
        """Sums of exponentials of each scorer."""
        return self.vectors.at[2:4]

    @property
    def sum_maxima(self) -> Any:
        """Maxima to which :attr:`sums` are relative."""
        return self.vectors.at[4:6]


@dataclasses.dataclass(frozen=True, eq=False)
class Signals:
    """The barriers of the ring, of the slots and of the sums. Block n of a partition is use n // 2
    of its slot and of the slot's barriers."""

    ring: CountedRing
    """Fill 4 n + w is the quarter of block n that warp w of its scorer reads and releases."""
    blocks: Barriers  # the ring's barriers, then those at the indices below
    sums_ready: Barriers
    """One barrier. Both scorers have written the sums of the partition's i-th sequence."""

    @staticmethod
    def types(plan: Plan) -> list[Any]:
        counts = (2 * plan.stages + 3 * SCORERS + 1, 1), (1, SCORERS)
        return [Barriers.scratch(*each, plan.interpret) for each in counts]

    @classmethod
    def of(cls, plan: Plan, scratch: Sequence[Any]) -> Signals:
        blocks, sums_ready = (Barriers(each, plan.interpret) for each in scratch)
        return cls(CountedRing(plan.stages, blocks), blocks, sums_ready)

    def initialise(self) -> None:
        """Initialises all barriers. Every thread calls it."""
        # A quarter is copied and released by one warp each.
        self.blocks.initialise([1] * (2 * self.ring.stages) + [WARPS] * (3 * SCORERS + 1))
        self.sums_ready.initialise([SCORERS * WARPS])

    def max_ready(self, slot: Index) -> Index:
        return 2 * self.ring.stages + slot

    def p_ready(self, slot: Index) -> Index:
        """Index of the barrier at which P and the values of a slot are complete."""
        return 2 * self.ring.stages + SCORERS + slot

    def free(self, slot: Index) -> Index:
        """Index of the barrier at which P and the values of a slot have been read."""
        return 2 * self.ring.stages + 2 * SCORERS + slot

    @property
    def sums_free(self) -> Index:
        """Index of the barrier at which a sequence's sums have been read."""
        return 2 * self.ring.stages + 3 * SCORERS


@dataclasses.dataclass(frozen=True, eq=False)
class Cta:
    """Static parameters, references and barriers that all warpgroups of a CTA share."""

    plan: Plan
    pages: Ref
    memory: Memory
    signals: Signals
    queries: QueryBuffer
    partition: Partition


# ---- launch --------------------------------------------------------------------------------------


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
    """As :func:`float8.attend`, with M = T * H a multiple of 8. Results are padded to Mp."""
    B, M, _ = q_latent.shape
    plan, partitions = Plan(M, interpret), schedule.partitions
    N, padded = plan.rows, plan.rows * plan.tiles
    q_latent, q_rope = (jnp.pad(x, ((0, 0), (0, padded - M), (0, 0))) for x in (q_latent, q_rope))
    if plan.gpu:
        q_latent, q_rope = registers.permute_queries(q_latent, q_rope)
    buffers = Memory.types(plan)

    def first_query_row():
        """Returns the CTA's first query row, recomputed to save a register."""
        return lax.axis_index("tile") * N

    softmax = Softmax(
        N, queries, heads, scale, block_tables.shape[1], interpret, first_query_row, padded=True
    )

    def mla_decode_scored(ql_g, qr_g, kv_g, tables_g, schedule_g, *refs):
        results, (ql_s, qr_s), scratch = refs[:4], refs[4:6], refs[6:]
        memory = Memory(*scratch[: len(buffers)])
        *barriers, q_full, q_free = scratch[len(buffers) :]
        signals = Signals.of(plan, barriers)
        signals.initialise()
        q_barriers = (Barriers(each, interpret) for each in (q_full, q_free))
        arrays = (ql_g, qr_g), (ql_s, qr_s)
        query_buffer = QueryBuffer(*arrays, *q_barriers, first_row=first_query_row)
        query_buffer.initialise(consumers=SCORERS)
        overlap_preceding_kernel(interpret=interpret)
        partition, wg = lax.axis_index("partition"), lax.axis_index("wg")
        partition = Partition(schedule_g, tables_g, partitions, partition, kv_g.shape[0])
        cta = Cta(plan, kv_g, memory, signals, query_buffer, partition)

        @when(wg < SCORERS)
        def _score():
            plgpu.set_max_registers(_SCORER_REGISTERS, action="increase")
            Scorer(cta, wg, 1 - wg, softmax).run()

        @when(wg == SCORERS)
        def _add():
            plgpu.set_max_registers(_VALUE_REGISTERS, action="increase")
            outputs = Results(*results, rows=lambda: pl.ds(first_query_row(), N), swapped=plan.gpu)
            ValueWarpgroup(cta, outputs).run()

        @when(wg == SCORERS + 1)
        def _produce():
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            copy = functools.partial(copy_page, cta)

            def wait_for_arrivals(done):
                signals.ring.wait_for_arrivals(WARPS * done)

            Producer(query_buffer, partition, interpret, copy, wait_for_arrivals).run()

    out, lse, *partials = grid_kernel(
        mla_decode_scored,
        output_types(B, padded, LATENT, partitions, part_rows=padded),
        [
            tiles_of(1, N, LATENT),
            tiles_of(1, N, ROPE),
            *buffers,
            *Signals.types(plan),
            Barriers.scratch(1, 2, interpret),
            Barriers.scratch(1, SCORERS, interpret),
        ],
        # The last axis varies fastest, so tiles that read the same pages run concurrently.
        grid={"partition": partitions, "tile": plan.tiles},
        warpgroups=SCORERS + 2,
        interpret=interpret,
        approx_math=True,
        lowering_semantics=LANE,
    )(q_latent, q_rope, pages, block_tables, schedule.table)
    return out, lse, (partials[0], partials[1])


# ---- producer ------------------------------------------------------------------------------------


def copy_page(
    cta: Cta, block: tuple[Any, Any], count: Index, page: Index, next_page: Index
) -> None:
    """Copies a block of a partition to the ring, quarter by quarter, and prefetches the next one
    into the L2 cache. See :class:`Producer`."""
    pages, ring, (done, j) = cta.pages, cta.signals.ring, block
    if cta.plan.gpu:
        when(j + 1 < count)(lambda: registers.prefetch_page(pages.at[next_page]))

    for warp in range(WARPS):
        stage, use = ring.position(WARPS * (done + j) + warp)
        ring.wait_until_free(stage, use)
        window = page, pl.ds(WARP_TOKENS * warp, WARP_TOKENS), pl.ds(0, TOKEN_BYTES)
        target = cta.memory.ring.at[stage]
        copy = TmaCopy(pages, window, target, tiled=False, swizzle=None, contiguous=True)
        cta.signals.blocks.fill(ring.full(stage), [copy])


# ---- scorers -------------------------------------------------------------------------------------


def half_of(n: Index) -> jax.Array:
    """Returns ``n // 2``, the use of a slot by block n."""
    return lax.shift_right_logical(n, jnp.int32(1))


@dataclasses.dataclass(frozen=True, eq=False)
class Scorer:
    """Unpacks every other key block of a partition, and computes its S^T and P."""

    cta: Cta
    slot: Index  # parity of this warpgroup's key blocks, and their slot
    other: Index  # that of the other scorer
    softmax: Softmax

    def run(self) -> None:
        slot, blocks, signals = self.slot, self.cta.signals.blocks, self.cta.signals
        sequence_count = self.cta.partition.sequence_count()
        done = lax.fori_loop(0, sequence_count, self.run_segment, jnp.int32(0))

        # A CTA may exit only after every arrival at its barriers has happened.
        @when((done >= 1) & ((done & 1) == slot))
        def _():
            blocks.wait(signals.max_ready(self.other), half_of(done - 1))

        when(done > slot)(lambda: blocks.wait(signals.free(slot), half_of(done - slot - 1)))
        when(sequence_count > 0)(lambda: blocks.wait(signals.sums_free, sequence_count - 1))

    def run_segment(self, i: Index, done: Index) -> Index:
        """Processes one segment; ``done`` counts the partition's blocks before it."""
        partition, queries, N = self.cta.partition, self.cta.queries, self.cta.plan.rows
        b, begin, count = partition.segment(i)
        length = partition.length(b)
        first = (self.slot + done) & 1
        block_count = half_of(jnp.maximum(count - first + 1, 0))
        queries.full.wait(0, i)
        when(block_count == 0)(lambda: queries.free.arrive(0))

        def process_block(k, carry):
            total, maximum = carry
            j = first + 2 * k
            n = done + j
            tokens = length - (begin + j) * BLOCK

            @when(n >= 2)
            def _():
                self.cta.signals.blocks.wait(self.cta.signals.free(self.slot), half_of(n) - 1)

            s = self.scores(n, k, tokens)
            when(k == block_count - 1)(lambda: queries.free.arrive(0))
            s = self.softmax.masked(s, length, begin + j)
            sums, raised = self.store_p(s, j, n)
            return total * jnp.exp2(maximum - raised) + sums, raised

        carry = column_vector(N, 0.0), column_vector(N, NO_SCORE)
        total, maximum = lax.fori_loop(0, block_count, process_block, carry)
        self.store_sums(i, block_count, total, maximum)
        return done + count

    def store_p(self, s: jax.Array, j: Index, n: Index) -> tuple[jax.Array, jax.Array]:
        """Stores P and maximum of block j of the segment, n of the partition. Returns sums of a
        thread's P, and the maximum."""
        signals, memory, softmax = self.cta.signals, self.cta.memory, self.softmax
        when(n >= 1)(lambda: signals.blocks.wait(signals.max_ready(self.other), half_of(n - 1)))

        def load_maximum():
            return plgpu.layout_cast(memory.maxima[self.other], COLUMN)

        before = cond(j == 0, lambda: column_vector(softmax.N, NO_SCORE), load_maximum)
        p_ref = memory.p.at[self.slot]
        p = softmax.store_p(p_ref, s, before)

        def raise_maximum(sums, before):
            del sums
            return softmax.raise_maximum(p_ref, s, before, memory.scratch.at[self.slot])[::-1]

        above, sums = softmax.exceeds_slack(p), softmax.thread_sums(p)
        sums, maximum = cond(above, raise_maximum, lambda *same: same, sums, before)
        memory.maxima[self.slot] = maximum
        memory.raised[self.slot] = above.astype(jnp.int32)
        signals.blocks.arrive(signals.max_ready(self.slot))
        signals.blocks.arrive(signals.p_ready(self.slot))
        return sums, maximum

    def store_sums(
        self, i: Index, block_count: Index, total: jax.Array, maximum: jax.Array
    ) -> None:
        """Stores the sums of the partition's i-th sequence, when those before have been read."""
        signals, memory = self.cta.signals, self.cta.memory

        # A warpgroup without a block has had no barrier since it last read the scratch.
        def reduce_total(total):
            scratch = memory.scratch.at[self.slot]
            return reduce_threads(total, "add", scratch, gpu=self.cta.plan.gpu)

        total = cond(block_count > 0, reduce_total, lambda total: total, total)
        when(i > 0)(lambda: signals.blocks.wait(signals.sums_free, i - 1))
        memory.sums[self.slot], memory.sum_maxima[self.slot] = total, maximum
        signals.sums_ready.arrive(0)

    def scores(self, n: Index, k: Index, tokens: Index) -> jax.Array:
        """Returns S^T of block n, this scorer's k-th of the segment, and stores its ``tokens``
        valid values in the slot."""
        memory, ahead = self.cta.memory, self.cta.plan.ahead
        # Always zero, but the compiler cannot tell. Otherwise it would keep all descriptors in
        # registers.
        zero = lax.shift_right_logical(k, jnp.int32(24))
        if not self.cta.plan.gpu:
            return self.interpreted_scores(n, tokens)
        ring, blocks = self.cta.signals.ring, self.cta.signals.blocks
        stage, use = ring.position(WARPS * n + registers.warp_index())
        # The stage's previous use may be another warp's, which this one has not waited for. A
        # barrier tells only the parity of its use: it must not be behind the use before this one.
        ring.wait_until_free(stage, use)
        blocks.wait(ring.full(stage), use)
        q_latent, q_rope = self.cta.queries.targets

        def multiply(acc):
            slot, units = memory.values.at[self.slot], LATENT // BLOCK
            factors = registers.load_factors(memory.ring, stage, tokens)
            rope = registers.load_rope(memory.ring, stage)
            words = [registers.load_words(memory.ring, stage, unit) for unit in range(ahead)]

            def release_quarter():
                loaded = registers.when_loaded(words[-1], zero, stage)
                blocks.arrive(ring.free(loaded))

            plgpu.wgmma(acc, rope, q_rope.at[zero].T)
            # The matmul of an operand runs while the next one is unpacked. Its registers are stored
            # afterwards, so that they are not used for anything else meanwhile.
            previous: Any = None
            for unit in range(units):
                operand = registers.unpack(words[unit], factors, unit)
                if unit + ahead < units:
                    words.append(registers.load_words(memory.ring, stage, unit + ahead))
                    if unit + ahead == units - 1:
                        release_quarter()
                q = q_latent.at[zero, :, pl.ds(registers.COLUMNS * unit, BLOCK)]
                plgpu.wgmma(acc, operand, q.T)
                plgpu.wgmma_wait(1)
                if previous is None:
                    keep_live(rope)
                else:
                    registers.store_values(slot, previous, unit - 1)
                previous = operand
            s = acc[...]
            registers.store_values(slot, previous, units - 1)
            return s

        return pl.run_scoped(multiply, ACC((BLOCK, self.cta.plan.rows), jnp.float32))

    def interpreted_scores(self, n: Index, tokens: Index) -> jax.Array:
        """Does :meth:`scores` with whole arrays instead of a thread's registers."""
        signals, memory, ring = self.cta.signals, self.cta.memory, self.cta.signals.ring
        quarters = []
        for warp in range(WARPS):
            stage, use = ring.position(WARPS * n + warp)
            signals.blocks.wait(ring.full(stage), use)
            quarters.append(memory.ring[stage])
            plgpu.commit_smem()
            signals.blocks.arrive(ring.free(stage))
        latent, rope = registers.unpacked_page(jnp.concatenate(quarters), tokens)
        for unit in range(LATENT // BLOCK):
            memory.values[self.slot, unit] = latent[:, BLOCK * unit : BLOCK * (unit + 1)]
        q_latent, q_rope = self.cta.queries.targets
        operands = (latent, q_latent[0]), (rope, q_rope[0])
        # A fence between reading the queries and the copy that overwrites them. On a GPU only
        # wgmma reads them.
        plgpu.commit_smem()
        products = [
            jnp.dot(keys.astype(jnp.float32), q.astype(jnp.float32).T, precision="highest")
            for keys, q in operands
        ]
        return products[0] + products[1]


# ---- values and results --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class ValueWarpgroup:
    """Accumulates O^T of all key blocks of a partition, and stores its sequences' results."""

    cta: Cta
    outputs: Results

    def run(self) -> None:
        lax.fori_loop(0, self.cta.partition.sequence_count(), self.run_segment, jnp.int32(0))

    def run_segment(self, i: Index, done: Index) -> Index:
        """Processes one segment; ``done`` counts the partition's blocks before it."""
        gpu, N, signals = self.cta.plan.gpu, self.cta.plan.rows, self.cta.signals
        memory, partition = self.cta.memory, self.cta.partition
        b, _, count = partition.segment(i)

        def add_block(j, carry):
            acc, maximum = carry
            n = done + j
            slot, use = n & 1, half_of(n)
            signals.blocks.wait(signals.p_ready(slot), use)

            def rescale(acc, maximum):
                raised = plgpu.layout_cast(memory.maxima[slot], COLUMN)
                return acc * spread_columns(jnp.exp2(maximum - raised), LATENT), raised

            acc, maximum = cond(memory.raised[slot] != 0, rescale, lambda *same: same, acc, maximum)
            return add_values(acc, memory.p.at[slot], self.values(slot), gpu=gpu), maximum

        acc = plgpu.layout_cast(jnp.full((LATENT, N), 0.0, jnp.float32), WGMMA)
        acc, maximum = lax.fori_loop(0, count, add_block, (acc, column_vector(N, NO_SCORE)))
        signals.sums_ready.wait(0, i)
        total = column_vector(N, 0.0)
        for scorer in range(SCORERS):
            sum_maximum = plgpu.layout_cast(memory.sum_maxima[scorer], COLUMN)
            sums = plgpu.layout_cast(memory.sums[scorer], COLUMN)
            total = total + sums * jnp.exp2(sum_maximum - maximum)
        signals.blocks.arrive(signals.sums_free)
        self.outputs.store(partition, b, (acc, maximum, total), gpu=gpu)
        return done + count

    def values(self, slot: Index) -> list[Values]:
        """Returns the values of a slot, which the last of their matmuls releases."""

        def release():
            self.cta.signals.blocks.arrive(self.cta.signals.free(slot))

        values, tiles = self.cta.memory.values, LATENT // BLOCK
        releases = [None] * (tiles - 1) + [release]
        return [Values(BLOCK * n, values.at[slot, n], releases[n]) for n in range(tiles)]
