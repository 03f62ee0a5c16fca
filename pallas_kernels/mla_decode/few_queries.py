"""The Hopper kernel of mla_decode for a bfloat16 cache and at most 32 query rows (16 heads x 2
tokens).

A CTA processes all query rows of its sequences over one partition of the split-KV schedule. The
matmuls are transposed (:mod:`transposed`), so that no query rows are padded. Both read a key block
of 64 cached tokens from shared memory: as K row by row, as V^T column by column.

**Budget.** HBM delivers a key block (72 KB) to each SM every 3,900 cycles, and nothing else takes
as long: shared memory needs about 2,000 cycles per block, 576 for the copy and 1,360 for 68 wgmma
operands of 2.5 KB (N = 16). The dependent chain of one block (S, softmax, P V) is about 2,000
cycles too. So the kernel is bound by HBM if enough bytes are in flight: an SM has at least 150 KB
in flight or in use, and no key block waits for its predecessor.

**Roles.** Three warpgroups, which synchronise only through mbarriers:

* Two consumers (:class:`Consumer`) process the partition's key blocks in turn. Each has its own
  ring buffer, running maximum, sums and O^T, so that neither waits for the other.
* The producer (:class:`transposed.Producer`) keeps the rings filled by TMA and runs ahead into the
  following sequences: one warp copies key blocks, another one queries. A key block is stored in
  column slices. Each occupies one stage and is released on its own.

**Loop.** A consumer computes S^T of its block, P, and O^T += V^T P^T, and releases each slice when
its matmul has ended. The running maximum is raised only when a score exceeds it by more than SLACK
(:mod:`online_softmax`). The threads vote on this after writing P, at the barrier that P needs
anyway; if it is raised, P is rewritten. At the end of a sequence, the consumer that processed its
last block merges the other's results into its own (:class:`Handover`) and stores them.
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
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, math
from jaxtyping import Array, BFloat16, Int

from pallas_kernels.hopper import Index, Ref
from pallas_kernels.hopper.barriers import Barriers
from pallas_kernels.hopper.ir import (
    Registers,
    array,
    asm,
    asm_numbers,
    const,
    f32,
    float_pair,
    inline,
    instruction,
    item,
    shared_address,
)
from pallas_kernels.hopper.launch import LANE, grid_kernel, overlap_preceding_kernel
from pallas_kernels.hopper.lowered_once import lowered_once
from pallas_kernels.hopper.online_softmax import NO_SCORE
from pallas_kernels.hopper.ring import CountedRing
from pallas_kernels.hopper.split_kv import BLOCK, Outputs, Partition, Schedule, output_types
from pallas_kernels.hopper.tiles import ACC, COLUMN, TILES, WGMMA, spread_columns, tiles_of
from pallas_kernels.hopper.warpgroup import WARPS, cond, fence_async_proxy, sync_warpgroup, when
from pallas_kernels.mla_decode.float8_cache import LATENT, ROPE
from pallas_kernels.mla_decode.row_tiles import clear_tokens
from pallas_kernels.mla_decode.transposed import (
    TILE_BYTES,
    Producer,
    QueryBuffer,
    Results,
    Softmax,
    State,
    Values,
    add_values,
    batched,
    column_vector,
    reduce_threads,
    thread_index,
    vector_type,
)

CONSUMERS = 2
_WIDTH = LATENT + ROPE
_SHARED_BYTES = 232448 - 6 * 1024  # of a CTA, less barriers and vectors
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 240, 24  # per thread: 2 * 240 + 24 <= 504


# ---- shared memory -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Slice:
    """Consecutive columns of a key block, which occupy one stage."""

    first: int  # first column among the 512 latent and 64 rope columns of a token
    width: int

    @property
    def latents(self) -> int:
        """Number of latent columns, which come before the rope columns."""
        return max(0, min(self.width, LATENT - self.first))


@dataclasses.dataclass(frozen=True)
class Layout:
    """Ring buffers for N query rows."""

    width: int  # columns per slice of a key block
    stages: int  # stages of each consumer's ring

    @classmethod
    def of(cls, N: int) -> Layout:
        """Chooses the width, 64 or 192, that leaves less shared memory unused."""
        room = _SHARED_BYTES - N * 2 * (_WIDTH + CONSUMERS * 2 * BLOCK)
        candidates = []
        for width in (64, 192):
            bytes_ = BLOCK * width * 2
            stages = room // bytes_ // CONSUMERS
            candidates.append((stages * bytes_, width, stages))
        _, width, stages = max(candidates)
        return cls(width, stages)

    @property
    def slices(self) -> tuple[Slice, ...]:
        """Slices of a key block, in the order of its stages."""
        return tuple(Slice(first, self.width) for first in range(0, _WIDTH, self.width))


Stages = list[tuple[jax.Array, jax.Array]]  # (stage, use of the stage) of each slice of a key block


def consumer_of(n: jax.Array) -> jax.Array:
    """Returns the consumer of a partition's block n. It is block ``index_of(n)`` of its ring."""
    return n & (CONSUMERS - 1)


def index_of(n: Index) -> Index:
    return lax.shift_right_logical(n, jnp.int32(CONSUMERS - 1))


@dataclasses.dataclass(frozen=True, eq=False)
class Rings:
    """One ring buffer of stages per consumer, and the barriers of every stage."""

    layout: Layout
    memory: Ref  # stages of both rings, [CONSUMERS * stages, 64, width], in shared memory
    barriers: Barriers  # for each stage "full" and "free", then one "handover" per consumer

    def initialise(self) -> None:
        stages = CONSUMERS * self.layout.stages
        self.barriers.initialise([1] * stages + [WARPS] * (stages + CONSUMERS))

    def of(self, w: Index) -> CountedRing:
        return CountedRing(self.layout.stages, self.barriers, w, CONSUMERS)

    def handover(self, w: Index) -> Index:
        """Returns the index of the barrier at which consumer w hands over its results."""
        return 2 * CONSUMERS * self.layout.stages + w

    def stage_ref(self, w: Index, stage: Index) -> Any:
        """Returns a stage of ring w, [64, width]."""
        return self.memory.at[w * self.layout.stages + stage]

    def stages_of(self, r: Index) -> Stages:
        """Returns the stages of a ring's r-th block. They wrap around at most once."""
        stages, count = self.layout.stages, len(self.layout.slices)
        first = r * count
        use = lax.div(first, jnp.int32(stages))
        stage = first - use * stages
        return [
            (
                jnp.where(stage + k >= stages, stage + (k - stages), stage + k),
                jnp.where(stage + k >= stages, use + 1, use),
            )
            for k in range(count)
        ]

    def wait_for_arrivals(self, done: Index) -> None:
        """Waits for all releases of a partition's ``done`` blocks."""
        for w in range(CONSUMERS):
            blocks = index_of(done + (CONSUMERS - 1 - w))
            self.of(w).wait_for_arrivals(blocks * len(self.layout.slices))


@dataclasses.dataclass(frozen=True, eq=False)
class Cta:
    """Buffers and barriers that both consumers share."""

    rings: Rings
    queries: QueryBuffer
    partition: Partition
    interpret: Any


# ---- launch --------------------------------------------------------------------------------------


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
    """As :func:`dense.attend`, with M = T * H a multiple of 8 and at most 32."""
    B, N, _ = q_latent.shape
    gpu, layout, partitions = interpret is None, Layout.of(N), schedule.partitions
    softmax = Softmax(N, queries, heads, scale, block_tables.shape[1], interpret)

    def mla_decode(ql_g, qr_g, kv_g, tables_g, schedule_g, out_g, lse_g, partial_g, partial_lse_g,
                   ql_s, qr_s, kv_s, p_s, scratch_s, stage_barriers, q_full, q_free,
                   *handover_s):  # fmt: skip
        stage_barriers, q_full, q_free = (
            Barriers(each, interpret) for each in (stage_barriers, q_full, q_free)
        )
        rings = Rings(layout, kv_s, stage_barriers)
        rings.initialise()
        query_buffer = QueryBuffer((ql_g, qr_g), (ql_s, qr_s), q_full, q_free)
        query_buffer.initialise(consumers=CONSUMERS)
        overlap_preceding_kernel(interpret=interpret)
        partition, wg = lax.axis_index("partition"), lax.axis_index("wg")
        partition = Partition(schedule_g, tables_g, partitions, partition, kv_g.shape[0])
        cta = Cta(rings, query_buffer, partition, interpret)

        @when(wg == CONSUMERS)
        def _produce():
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            copy = functools.partial(copy_block, kv_g, rings)
            Producer(query_buffer, partition, interpret, copy, rings.wait_for_arrivals).run()

        @when(wg < CONSUMERS)
        def _consume():
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
            handover = Handover(rings, None if gpu else handover_s[0], interpret)
            outputs = Results(out_g, lse_g, partial_g, partial_lse_g)
            Consumer(cta, wg, softmax, p_s, scratch_s, handover, outputs).run()

    # The interpreter cannot reinterpret bfloat16 memory as float32.
    handover_s = () if gpu else (plgpu.SMEM((LATENT + 2, N), jnp.float32),)
    out, lse, *partials = grid_kernel(
        mla_decode,
        output_types(B, N, LATENT, partitions, part_rows=N),
        [
            tiles_of(1, N, LATENT),
            tiles_of(1, N, ROPE),
            tiles_of(CONSUMERS * layout.stages, BLOCK, layout.width),
            tiles_of(CONSUMERS, 2, N, BLOCK),
            plgpu.SMEM((CONSUMERS, 4 * N), jnp.float32),
            Barriers.scratch((2 * layout.stages + 1) * CONSUMERS, 1, interpret),
            Barriers.scratch(1, 2, interpret),
            Barriers.scratch(1, CONSUMERS, interpret),
            *handover_s,
        ],
        warpgroups=CONSUMERS + 1,
        grid={"partition": partitions},
        interpret=interpret,
        approx_math=True,
        lowering_semantics=LANE,
    )(q_latent, q_rope, pages, block_tables, schedule.table)
    return out, lse, (partials[0], partials[1])


# ---- producer ------------------------------------------------------------------------------------


def copy_block(
    pages: Ref, rings: Rings, block: tuple[Any, Any], count: Index, page: Index, next_page: Index
) -> None:
    """Copies a block of a partition to its ring, slice by slice. See :class:`Producer`."""
    del count, next_page
    n = block[0] + block[1]
    w = consumer_of(n)
    ring, stages = rings.of(w), rings.stages_of(index_of(n))
    for columns, (stage, use) in zip(rings.layout.slices, stages, strict=True):
        ring.wait_until_free(stage, use)
        window = page, pl.ds(0, BLOCK), pl.ds(columns.first, columns.width)
        rings.barriers.copy(ring.full(stage), pages, window, rings.stage_ref(w, stage))


# ---- consumers -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Consumer:
    """Attends to every other key block of a partition, and stores results of its sequences."""

    cta: Cta
    index: Index  # 0 or 1
    softmax: Softmax
    p: Ref  # P, bfloat16 [CONSUMERS, 2, N, 64] in shared memory
    scratch: Ref  # for reductions over threads, float32 [CONSUMERS, 4 N] in shared memory
    handover: Handover
    outputs: Results

    @property
    def gpu(self) -> bool:
        return self.cta.interpret is None

    def run(self) -> None:
        i32, sequence_count = jnp.int32, self.cta.partition.sequence_count()
        lax.fori_loop(0, sequence_count, self.run_segment, (i32(0), i32(0)))

    def run_segment(self, i: Index, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        """Processes a segment. The carry is the blocks before it, and how often this consumer has
        merged."""
        done, handovers = carry
        partition, queries, N, gpu = self.cta.partition, self.cta.queries, self.softmax.N, self.gpu
        b, begin, count = partition.segment(i)
        length = partition.length(b)
        first = consumer_of(self.index - done)
        block_count = index_of(count - first + (CONSUMERS - 1))
        has_last_block = consumer_of(done + count - 1) == self.index
        queries.full.wait(0, i)
        when(block_count == 0)(lambda: queries.free.arrive(0))

        def process_block(k, carry):
            j = first + k * CONSUMERS
            is_last = k == block_count - 1
            return self.process_block(
                index_of(done + j), begin + j, length, carry,
                is_last=is_last, has_last_block=has_last_block,
            )  # fmt: skip

        acc = plgpu.layout_cast(jnp.full((LATENT, N), 0.0, jnp.float32), WGMMA)
        initial = acc, column_vector(N, 0.0), column_vector(N, NO_SCORE)
        acc, total, maximum = lax.fori_loop(0, block_count, process_block, initial)
        # A warpgroup without a block has had no barrier since it last read the scratch.
        reduce_total = functools.partial(
            reduce_threads, kind="add", scratch=self.scratch.at[self.index], gpu=gpu
        )
        total = cond(block_count > 0, reduce_total, lambda total: total, total)

        def last_block_of(w):
            return self.cta.rings.stages_of(index_of(done + count - 1 - w))

        @when(~has_last_block & (block_count > 0))
        def _give():
            self.handover.give(self.index, last_block_of(self.index), (acc, maximum, total))

        def merge_other(*state):
            other = 1 - self.index
            return self.handover.merge(other, last_block_of(other), handovers, state)

        must_merge = has_last_block & (count > 1)
        state = cond(must_merge, merge_other, lambda *same: same, acc, maximum, total)
        when(has_last_block)(lambda: self.outputs.store(partition, b, state, gpu=gpu))
        return done + count, handovers + must_merge.astype(jnp.int32)

    def process_block(
        self, r: Index, block: Index, length: Index, carry: tuple[Any, Any, Any], *,
        is_last: jax.Array | bool, has_last_block: jax.Array | bool,
    ) -> tuple[Any, Any, Any]:  # fmt: skip
        """Adds a key block of the sequence, number r of the ring, to O^T, the sums and the running
        maximum. ``is_last``: it is this consumer's last one of the segment. Unless this consumer
        ``has_last_block`` of the segment, the stages of its own last one will hold its results."""
        acc, total, maximum = carry
        softmax, rings = self.softmax, self.cta.rings
        stages = rings.stages_of(r)
        # Double buffered: other warps' matmuls may still read the previous P.
        p_ref = self.p.at[self.index, r & 1]
        s = self.scores(r, stages)
        when(is_last)(lambda: self.cta.queries.free.arrive(0))
        s = softmax.masked(s, length, block)
        p = softmax.store_p(p_ref, s, maximum)

        def raise_maximum(acc, total, _, maximum):
            raised, sums = softmax.raise_maximum(p_ref, s, maximum, self.scratch.at[self.index])
            alpha = jnp.exp2(maximum - raised)
            total = total * alpha + sums
            return acc * spread_columns(alpha, LATENT), total, raised

        above = softmax.exceeds_slack(p)
        new_total = total + softmax.thread_sums(p)
        state = acc, total, new_total, maximum
        acc, total, maximum = cond(above, raise_maximum, lambda a, _, t, m: (a, t, m), *state)
        tokens = length - block * BLOCK
        # The same stages, recomputed so that they need no registers until here.
        stages = rings.stages_of(r + lax.shift_right_logical(length, jnp.int32(31)))
        self.clear_values(tokens, stages)
        values = self.values(stages, ~is_last | has_last_block)
        return add_values(acc, p_ref, values, gpu=self.gpu), total, maximum

    def scores(self, r: Index, stages: Stages) -> jax.Array:
        rings, ring, (q_latent, q_rope) = (
            self.cta.rings, self.cta.rings.of(self.index), self.cta.queries.targets,
        )  # fmt: skip
        # Always zero, but the compiler cannot tell. Otherwise it would keep all descriptors in
        # registers.
        zero = lax.shift_right_logical(r, jnp.int32(24))

        def multiply(acc):
            for columns, (stage, use) in zip(rings.layout.slices, stages, strict=True):
                rings.barriers.wait(ring.full(stage), use)
                keys, latents = rings.stage_ref(self.index, stage), columns.latents
                if latents:
                    q = q_latent.at[zero, :, pl.ds(columns.first, latents)]
                    plgpu.wgmma(acc, keys.at[:, pl.ds(0, latents)], q.T)
                if latents < columns.width:
                    plgpu.wgmma(acc, keys.at[:, pl.ds(latents, ROPE)], q_rope.at[zero].T)
            return acc[...]

        return pl.run_scoped(multiply, ACC((BLOCK, self.softmax.N), jnp.float32))

    def clear_values(self, tokens: Index, stages: Stages) -> None:
        """Zeroes values past the sequence's end, after ``tokens`` of the block."""
        rings, interpret = self.cta.rings, self.cta.interpret

        @when(tokens < BLOCK)
        def _():
            for columns, (stage, _) in zip(rings.layout.slices, stages, strict=True):
                if columns.latents:
                    values = rings.stage_ref(self.index, stage)
                    clear_tokens(values, pl.ds(0, columns.latents), tokens, interpret=interpret)
            fence_async_proxy(interpret)
            sync_warpgroup(interpret)

    def values(self, stages: Stages, releases: Any) -> list[Values]:
        """Returns the values of a block, whose stages are released if ``releases``."""
        rings = self.cta.rings

        def release_stage(stage):
            when(releases)(lambda: rings.barriers.arrive(rings.of(self.index).free(stage)))

        return [
            Values(
                columns.first,
                rings.stage_ref(self.index, stage).at[:, pl.ds(0, columns.latents)]
                if columns.latents
                else None,
                functools.partial(release_stage, stage),
            )
            for columns, (stage, _) in zip(rings.layout.slices, stages, strict=True)
        ]


# ---- merge of the two consumers ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Handover:
    """The exchange of results between two consumers. The one that did not process the sequence's
    last block hands over its results in the stages of its own last block, and the other one
    releases them. Until then its ring has no room for another block, so it cannot hand over twice
    before the first results are read."""

    rings: Rings
    memory: Ref
    """Float32 [514, N] in shared memory for the interpreter, which cannot reinterpret bfloat16
    memory as float32. None on a GPU."""
    interpret: Any

    def give(self, wg: Index, block: Stages, state: State) -> None:
        """Stores a consumer's results in the stages of its last block."""
        acc, maximum, total = state
        sync_warpgroup(self.interpret)  # the matmuls of all four warps have read the block
        if self.memory is None:
            write_handover(self._refs(wg, block), acc, maximum, total)
        else:
            self.memory[pl.ds(0, LATENT)] = acc
            self.memory[LATENT], self.memory[LATENT + 1] = maximum, total
        self.rings.barriers.arrive(self.rings.handover(wg))

    def merge(self, other: Index, block: Stages, use: Index, state: State) -> State:
        """Returns results merged with those of the consumer ``other``, and releases its stages:
        those of its last ``block``. ``use`` is the number of mergers before."""
        acc, maximum, total = state
        self.rings.barriers.wait(self.rings.handover(other), use)
        stages = self._refs(other, block)
        if self.memory is None:
            other_maximum, other_total = read_handover_vectors(stages, acc.shape[1], 2)
        else:
            other_maximum, other_total = self.memory[LATENT], self.memory[LATENT + 1]
        new_maximum = jnp.maximum(maximum, other_maximum)
        factor = jnp.exp2(maximum - new_maximum)
        other_factor = jnp.exp2(other_maximum - new_maximum)
        if self.memory is None:
            acc = add_handover(stages, acc, factor, other_factor)
        else:
            other_acc = self.memory[pl.ds(0, LATENT)]
            other_acc = other_acc * spread_columns(other_factor, LATENT)
            acc = acc * spread_columns(factor, LATENT) + other_acc
        fence_async_proxy(self.interpret)
        for stage, _ in block:
            self.rings.barriers.arrive(self.rings.of(other).free(stage))
        return acc, new_maximum, total * factor + other_total * other_factor

    def _refs(self, w: Index, block: Stages) -> list[Any]:
        return [self.rings.stage_ref(w, stage) for stage, _ in block]


def write_handover(stages: Sequence[Any], acc: jax.Array, *vectors: jax.Array) -> None:
    """Stores ``acc`` [512, N] and vectors [N] in a key block's stages, in the threads' own order.
    ``acc`` overwrites the latent columns, and the vectors the rope keys."""

    @inline([TILES] * len(stages), WGMMA, *(COLUMN for _ in vectors))
    def write(stages: Any, acc: Registers, *vectors: Any):
        vector_pairs = [pair for each in vectors for pair in each.registers.flat]
        for pairs, addresses in zip([*_tiles(acc), vector_pairs], _addresses(stages), strict=True):
            for (address, offset), some in zip(addresses, batched(pairs, 2), strict=False):
                words = [item(pair, i) for pair in some for i in range(2)]
                asm(f"st.shared.v4.f32 [$0 + {offset}], {{$1, $2, $3, $4}};",
                    "r,f,f,f,f,~{memory}", address, *words, effects=True)  # fmt: skip

    write(list(stages), acc, *vectors)


def read_handover_vectors(stages: Sequence[Any], N: int, count: int) -> tuple[jax.Array, ...]:
    """Loads the vectors [N] that another warpgroup stored with :func:`write_handover`."""

    @inline([TILES] * len(stages), returns=(vector_type(N),) * count)
    def read(stages: Any):
        pairs = _load_fours(_addresses(stages)[-1], count * (N // 8))
        return tuple(array(some, (N,), COLUMN) for some in batched(pairs, N // 8))

    return read(list(stages))


def add_handover(
    stages: Sequence[Any], acc: jax.Array, factor: jax.Array, other_factor: jax.Array
) -> jax.Array:
    """Returns ``acc * factor + other_acc * other_factor``. :func:`write_handover` stored
    ``other_acc``, which is loaded 64 rows at a time: registers have room for only one [512, N]."""
    N = acc.shape[1]
    result = plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=WGMMA)

    @inline([TILES] * len(stages), WGMMA, COLUMN, COLUMN, returns=result)
    def add(stages: Any, acc: Registers, factor: Registers, other_factor: Registers):
        results = []
        for tile, (pairs, tile_addresses) in enumerate(
            zip(_tiles(acc), _addresses(stages), strict=False)
        ):
            if tile % 2 == 0:
                # Otherwise ptxas loads everything before it adds any.
                instruction("bar.warp.sync 0xffffffff;")
            for n, (a, b) in enumerate(
                zip(pairs, _load_fours(tile_addresses, N // 4), strict=True)
            ):
                factors = factor.registers.flat[n // 2], other_factor.registers.flat[n // 2]
                results.append(math.fma(a, factors[0], arith.mulf(b, factors[1])))
        return array(results, (LATENT, N), WGMMA)

    return add(list(stages), acc, factor, other_factor)


def _tiles(acc: Registers) -> list[list[Any]]:
    """Groups a thread's register pairs by 64 latent columns."""
    return batched(acc.registers.flat, acc.registers.size * 64 // LATENT)


def _load_fours(addresses: Sequence[tuple[ir.Value, int]], pairs: int) -> list[ir.Value]:
    results = []
    for address, offset in addresses[: pairs // 2]:
        text = f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4 + {offset}];"
        kinds = "=f,=f,=f,=f,r,~{memory}"
        words = asm_numbers(text, kinds, address, kind=f32(), count=4)
        results += [float_pair(*words[:2]), float_pair(*words[2:])]
    return results


def _addresses(stages: Sequence[ir.Value]) -> list[list[tuple[ir.Value, int]]]:
    """Returns (address, offset) of a thread's groups of four float32, for each 64 block columns."""
    thread = thread_index()
    results = []
    for ref in stages:
        at = arith.addi(shared_address(ref), arith.shli(thread, const(4)))
        _, tiles, _, _ = ir.MemRefType(ref.type).shape
        for tile in range(tiles):
            results.append([(at, 8 * tile * TILE_BYTES + 2048 * i) for i in range(4)])
    return results
