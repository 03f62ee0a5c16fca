"""sparse_mla_decode on Hopper GPUs: bfloat16 queries, latent width 512, rope width 64.

The cache is bfloat16 or in the format of :mod:`float8_cache`, in pages of any size. The kernel
takes tiles of 64 heads of a query. A CTA processes consecutive pieces of queries, in key blocks of
64 tokens. Every query has the same number of key blocks, so the division of the work depends on
shapes alone. All queries are cut into pieces alike: a query's result does not depend on its place
in the batch, to the last bit. The three warpgroups are specialised and synchronise only through
barriers:

* The producer gathers the tokens of a key block into one of two slots in shared memory, 16 bytes
  per thread and instruction (:mod:`gather`). It looks tokens up three blocks ahead and may prefetch
  them into the L2 cache one block ahead. It writes zeros for tokens that do not exist. Tokens of a
  float8 cache go through registers, where they become bfloat16, half of a block at a time.
* Two consumers compute. Consumer 0 computes the scores S = Q K^T of the first block of each pair,
  consumer 1 those of the second, and each overwrites its block's rope keys, which are no longer
  needed, with P = exp(S - maximum). Both accumulate P V, each for 256 of the 512 output columns, in
  registers. The running maximum is passed from one to the other. The tensor cores compute half of a
  block's scores, then P V of the other consumer's last block, then the other half.

So one consumer's softmax overlaps with the other's matmuls. Scores are scaled to base 2. If queries
are cut into pieces, :func:`merge.merge_partials` merges the partial results.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float, Float32, Int, Int32, UInt8

from pallas_kernels.hopper import multiprocessors, require_hopper
from pallas_kernels.hopper.barriers import Barriers
from pallas_kernels.hopper.launch import grid_kernel, overlap_preceding_kernel
from pallas_kernels.hopper.lowered_once import lowered_once
from pallas_kernels.hopper.online_softmax import (
    LOG2E,
    NO_SCORE,
    SUM_COLUMNS,
    merge_sums,
    partial_row_sums,
)
from pallas_kernels.hopper.split_kv import output_types
from pallas_kernels.hopper.tiles import COLUMN, ROW, WGMMA, row_vector
from pallas_kernels.hopper.warpgroup import WARPS, fence_async_proxy, first_warp, when
from pallas_kernels.mla_decode.float8_cache import LATENT, ROPE, ROPE_AT, TOKEN_BYTES
from pallas_kernels.mla_decode.float8_registers import store_half, wait_rope_copies
from pallas_kernels.mla_decode.merge import merge_partials
from pallas_kernels.mla_decode.row_tiles import (
    HALF,
    SLOTS,
    TILE,
    Consumer,
    ConsumerSignals,
    Part,
    TileMemory,
    TileResults,
    load_sums,
)
from pallas_kernels.sparse_mla_decode import gather
from pallas_kernels.sparse_mla_decode.gradients import differentiable

BLOCK = 64  # tokens per key block

PAIR = 2 * BLOCK
"""Tokens per pair of key blocks. The number of indices per query is padded to a multiple of it."""

# In units of the time that a pair of key blocks takes.
_PIECE_COST = 1  # prologue and epilogue
_MERGE_COST = 3  # the second kernel, and writing and reading partial results
_MIN_PAIRS = 2  # per piece: smaller partial results cost more to merge than they save
# Registers per thread of consumers and producer: 2 * consumer + producer <= 504.
_REGISTERS, _FLOAT8_REGISTERS = (224, 56), (208, 88)
_Partials = tuple[Float32[Array, "partials Mp C"], Float32[Array, "partials Mp"]]
PENALTIES, MAXIMUM, P = range(3)  # barriers of a slot in ready

Q_FREE, SUMS_READY = range(2)  # indices in by_both


def sparse_mla_decode(
    q_latent: Float[Array, "B T H C"],
    q_rope: Float[Array, "B T H R"],
    pages: Float[Array, "P page width"] | UInt8[Array, "P page bytes"],
    block_tables: Int[Array, "B max_pages"],
    indices: Int[Array, "B T K"],
    *,
    scale: float,
    prefetch: bool = True,
    interpret: Any = None,
) -> tuple[Float[Array, "B T H C"], Float32[Array, "B T H"]]:
    """Implements :func:`pallas_kernels.sparse_mla_decode`.

    Args:
      prefetch: whether tokens may be prefetched into the L2 cache before they are copied. Those of
        a bfloat16 cache are, for several tiles of heads: it gains 3 % there, and loses elsewhere.
    """
    require_hopper(interpret)
    B, T, H, C = q_latent.shape
    float8 = pages.dtype == jnp.uint8
    dtypes = {str(x.dtype) for x in (q_latent, q_rope, *([] if float8 else [pages]))}
    if dtypes != {"bfloat16"}:
        raise NotImplementedError(f"takes bfloat16, got {', '.join(sorted(dtypes))}")
    Q, (_, page, width) = B * T, pages.shape
    if (C, q_rope.shape[-1]) != (LATENT, ROPE):
        raise NotImplementedError(
            f"takes {LATENT} latent and {ROPE} rope columns, got {(C, q_rope.shape[-1])}"
        )
    if float8 and width != TOKEN_BYTES:
        raise NotImplementedError(f"takes float8 tokens of {TOKEN_BYTES} bytes, got {width}")
    if not float8 and (width < LATENT + ROPE or width % 8):
        raise NotImplementedError(
            f"takes tokens of {LATENT + ROPE} columns or more in multiples of 8, got {width}"
        )
    if H % 8:
        raise NotImplementedError(f"takes a multiple of 8 heads, got {H}")
    if 0 in indices.shape or not len(pages):
        raise NotImplementedError(f"takes no empty arrays, got indices {indices.shape}")
    if scale < 0:
        raise NotImplementedError(f"takes a scale of 0 or more, got {scale}")
    # Pad to pairs of key blocks, and to whole tiles of heads unless there is only one tile.
    indices = jnp.pad(
        indices.reshape(Q, -1).astype(jnp.int32),
        ((0, 0), (0, -indices.shape[-1] % PAIR)),
        constant_values=-1,
    )
    work = plan(Q, H, indices.shape[-1])
    padding = ((0, 0), (0, -H % TILE if H > TILE else 0), (0, 0))
    out, lse, (partials, partial_lse) = attend(
        jnp.pad(q_latent.reshape(Q, H, C), padding),
        jnp.pad(q_rope.reshape(Q, H, ROPE), padding),
        pages.reshape(-1, width),
        block_tables.astype(jnp.int32),
        indices,
        work=work,
        page=page,
        scale=scale,
        prefetch=prefetch and H > TILE and not float8,
        interpret=interpret,
    )
    if work.pieces > 1:
        out, lse = merge_partials(
            out, lse, partials, partial_lse, jnp.asarray(work.partial_results()),
            interpret=interpret,
        )  # fmt: skip
    return out[:, :H].reshape(B, T, H, C), lse[:, :H].reshape(B, T, H)


def sparse_mla_prefill(
    q_latent: Float[Array, "B T H C"],
    q_rope: Float[Array, "B T H R"],
    latents: Float[Array, "B S CR"],
    indices: Int[Array, "B T K"],
    *,
    scale: float,
    interpret: Any = None,
) -> tuple[Float[Array, "B T H C"], Float32[Array, "B T H"]]:
    """Implements :func:`pallas_kernels.sparse_mla_prefill`.

    Each sequence is one page.
    """
    one_page_each = jnp.arange(len(latents), dtype=jnp.int32)[:, None]

    def attend(q_latent, q_rope, latents, indices):
        # No prefetch: queries of the same sequence have brought most tokens into the L2 cache.
        return sparse_mla_decode(
            q_latent, q_rope, latents, one_page_each, indices, scale=scale, prefetch=False,
            interpret=interpret,
        )  # fmt: skip

    return differentiable(attend, scale=scale)(q_latent, q_rope, latents, indices)


def plan(queries: int, heads: int, indices: int) -> Work:
    """Divides the work of all sequences' ``queries`` so that the CTAs fill the default device once.
    ``indices`` is padded."""
    tiles = -(-heads // TILE)
    return divide(queries, indices, max(1, multiprocessors() // tiles))


@dataclasses.dataclass(frozen=True)
class Work:
    """Pieces of queries, numbered consecutively. A CTA processes ``share`` of them."""

    queries: int  # number of queries of all sequences
    pairs: int  # pairs of key blocks per query

    pieces: int
    """Pieces per query. If there are several, each gives a partial result, and they are merged."""

    piece: int  # Pairs per piece. The last piece of a query may have fewer.
    share: int  # Pieces per CTA. The last CTA may have fewer.

    @property
    def total(self) -> int:
        """Number of pieces of all queries."""
        return self.queries * self.pieces

    @property
    def ctas(self) -> int:
        """Number of CTAs for each tile of heads."""
        return -(-self.total // self.share)

    def query(self, number: Any) -> Any:
        """Returns the query of a piece."""
        return lax.div(number, jnp.int32(self.pieces))

    def first_pair(self, number: Any) -> Any:
        """Returns the first pair of a piece, counted over all queries."""
        q = self.query(number)
        return q * self.pairs + (number - q * self.pieces) * self.piece

    def is_first_block(self, block: Any) -> Any:
        """Returns whether a key block, counted over all queries, is the first of a piece."""
        of_query = lax.rem(block, jnp.int32(2 * self.pairs))
        return lax.rem(of_query, jnp.int32(2 * self.piece)) == 0

    def partial_results(self) -> npt.NDArray[np.int32]:
        """Returns the partial results of each query, as ``merge_partials`` takes them."""
        table = np.zeros((self.total, 4), np.int32)
        q = np.arange(self.queries)
        table[: self.queries, 0], table[: self.queries, 1] = q, q * self.pieces
        table[: self.queries, 2], table[:, 3] = self.pieces, self.queries
        return table


def divide(queries: int, indices: int, ctas: int) -> Work:
    """Chooses the number of pieces with which ``ctas`` concurrent CTAs finish first. ``indices``
    per query are padded to a multiple of PAIR."""
    pairs = indices // PAIR

    def cut(piece: int) -> Work:
        pieces = -(-pairs // piece)
        return Work(queries, pairs, pieces, piece, -(-queries * pieces // ctas))

    def cost(work: Work) -> int:
        merge = _MERGE_COST if work.pieces > 1 else 0
        return work.share * (work.piece + _PIECE_COST) + merge

    return min(map(cut, range(pairs, min(_MIN_PAIRS, pairs) - 1, -1)), key=cost)


@dataclasses.dataclass(frozen=True, eq=False)
class Signals:
    """Barriers of a CTA, in the order of :meth:`scratch`. Use n of the first three is that of the
    CTA's n-th pair, of the others that of its n-th piece."""

    full: Barriers  # half h of slot s, at index 2 s + h, is filled
    free: Barriers  # the consumer of half h has read it in slot s, at index 2 s + h

    ready: Barriers
    """Penalties, maximum and P of the block in slot s, at indices 3 s, 3 s + 1 and 3 s + 2."""

    q_full: Barriers  # the queries of a piece are filled, by three copies

    by_both: Barriers
    """Both consumers have read the queries (Q_FREE), or have written their sums (SUMS_READY)."""

    @staticmethod
    def scratch(interpret: Any) -> list[Any]:
        """Returns the scratch types of the five arrays of barriers."""
        counts = (2 * SLOTS, 1), (2 * SLOTS, 1), (3 * SLOTS, 1), (1, 3), (2, 2)
        return [Barriers.scratch(count, arrivals, interpret) for count, arrivals in counts]

    @classmethod
    def of(cls, scratch: Sequence[Any], interpret: Any) -> Signals:
        return cls(*(Barriers(each, interpret) for each in scratch))

    def initialise(self, arrivals_when_full: int) -> None:
        """Initialises all barriers. Those of ``full`` take ``arrivals_when_full`` per phase."""
        self.full.initialise([arrivals_when_full] * (2 * SLOTS))
        self.free.initialise([WARPS] * (2 * SLOTS))
        self.ready.initialise([WARPS] * (3 * SLOTS))
        self.q_full.initialise([3])
        self.by_both.initialise([2 * WARPS] * 2)

    def announce(self, kind: int, slot: Any) -> None:
        """Arrives at the barrier of PENALTIES, MAXIMUM or P of the block in a slot."""
        self.ready.arrive(3 * slot + kind)

    def wait_for(self, kind: int, slot: Any, n: Any) -> None:
        self.ready.wait(3 * slot + kind, n)


@lowered_once("work", "page", "scale", "prefetch", "interpret")
def attend(
    q_latent: BFloat16[Array, "Q M C"],
    q_rope: BFloat16[Array, "Q M R"],
    tokens: BFloat16[Array, "slots width"] | UInt8[Array, "slots 656"],
    block_tables: Int32[Array, "B max_pages"],
    indices: Int32[Array, "Q K"],
    *,
    work: Work,
    page: int,
    scale: float,
    prefetch: bool,
    interpret: Any = None,
) -> tuple[BFloat16[Array, "Q M C"], Float32[Array, "Q M"], _Partials]:
    """Attention of each query's M heads, padded to whole tiles if M > 64, to its K tokens.

    Returns:
      ``out`` and ``lse``, and the partial results and their log-sum-exps. Only the latter are
      written if queries are cut into several pieces, and otherwise only the former.
    """
    Q, M, _ = q_latent.shape
    rows, tiles = min(TILE, M), -(-M // TILE)
    float8, buffers = tokens.dtype == jnp.uint8, TileMemory.scratch()
    registers = _FLOAT8_REGISTERS if float8 else _REGISTERS
    gpu, queries = interpret is None, Q // len(block_tables)

    def sparse_mla(ql_g, qr_g, kv_g, tables_g, indices_g, *refs):
        results_g, scratch = refs[:4], refs[4:]
        memory, sums_s = TileMemory(*scratch[: len(buffers)]), scratch[len(buffers)]
        signals = Signals.of(scratch[len(buffers) + 1 :], interpret)
        # By cp.async every thread signals its own copies.
        signals.initialise(WARPS if float8 else gather.THREADS)
        overlap_preceding_kernel(interpret=interpret)
        # The other kernels store sums of exponentials in this memory.
        penalties_s = memory.sums
        wg, m0 = lax.axis_index("wg"), lax.axis_index("tile") * TILE
        outputs = TileResults(
            *results_g,
            lse_staging=memory.lse,
            first_row=lambda: m0,
            rows=rows,
            rows_per_copy=rows,
            interpret=interpret,
        )
        first_piece = lax.axis_index("cta") * work.share
        # Only the last CTA may have fewer pieces. With a minimum instead, ptxas serialized the
        # matmuls of some shapes (C7518).
        piece_count = jnp.int32(work.share)
        if work.total % work.share:
            piece_count = jnp.where(
                first_piece + work.share <= work.total, work.share, work.total % work.share
            )
        begin = work.first_pair(first_piece)

        def producer_warpgroup():
            plgpu.set_max_registers(registers[1], action="decrease")
            cache = Cache(kv_g, tables_g, indices_g, page, queries, interpret)

            def fetch_queries(i):
                m, q = pl.ds(m0, rows), work.query(first_piece + i)
                for half in range(2):
                    window = q, m, pl.ds(HALF * half, HALF)
                    target = memory.q_latent.at[half, pl.ds(0, rows)]
                    signals.q_full.copy(0, ql_g, window, target)
                window = q, m, pl.ds(0, ROPE)
                signals.q_full.copy(0, qr_g, window, memory.q_rope.at[0, pl.ds(0, rows)])

            targets = memory.latents, memory.rope, penalties_s
            fill_slots(
                cache, targets, signals, work, (first_piece, piece_count), fetch_queries,
                prefetch=prefetch,
            )  # fmt: skip

        def wait_full(number, half, n):
            signals.full.wait(2 * number + half, n)
            fence_async_proxy(interpret)  # cp.async writes like an ordinary store

        def consumer_warpgroup(number):
            """Runs a consumer. ``number``: its blocks' index in a pair, slot, and output half."""
            plgpu.set_max_registers(registers[0], action="increase")
            other = 1 - number
            consumer = Consumer(
                number,
                memory,
                ConsumerSignals(
                    wait_full=functools.partial(wait_full, number),
                    max_ready=lambda: signals.announce(MAXIMUM, number),
                    p_ready=lambda: signals.announce(P, number),
                    wait_other_max=lambda n: signals.wait_for(MAXIMUM, other, n),
                    wait_other_p=lambda n: signals.wait_for(P, other, n),
                    release=lambda slot: signals.free.arrive(2 * slot + number),
                ),
                lambda n: gather.opaque_zero() if gpu else 0,
                interpret,
            )

            def softmax(s, n, before, old_maximum, total):
                """Publishes P, the maximum and its factor; returns (factor, maximum, row sums)."""
                signals.wait_for(PENALTIES, number, n)
                penalties = plgpu.layout_cast(penalties_s[number], COLUMN)
                s = s * (scale * LOG2E) + lax.broadcast_in_dim(penalties, s.shape, [1])
                maximum = s.max(axis=1)
                p, running, alpha = consumer.store_p(
                    maximum, before, lambda running: s - lax.broadcast_in_dim(running, s.shape, [0])
                )
                # Row sums of eight columns each. A thread's are reduced at the end.
                block_sums = partial_row_sums(p)
                factor = jnp.exp2(old_maximum - running)
                total = total * lax.broadcast_in_dim(factor, total.shape, [0]) + block_sums
                return alpha, running, total

            def first_block(n, acc, *sums):
                """Processes consumer 0's first block of a piece; nothing overlaps with it."""
                _, *sums = softmax(consumer.scores(n), n, row_vector(NO_SCORE), *sums)
                return release(consumer.add_values(acc, number)), *sums

            def add_block(n, acc, *sums):
                def softmax_of(s):
                    return softmax(s, n, plgpu.layout_cast(memory.maxima[other], ROW), *sums)

                # Consumer 0 adds block 1 of the previous pair.
                return consumer.add_block(n, n - other, acc, softmax_of)

            def release(acc):
                signals.free.arrive(2 * number + number)
                return acc

            def run_piece(i, done):
                """Attends to the CTA's i-th piece; ``done`` counts the pairs before it."""
                piece = first_piece + i
                count = work.first_pair(piece + 1) - begin - done
                zeros = [
                    plgpu.layout_cast(jnp.full((TILE, width), 0.0, jnp.float32), WGMMA)
                    for width in (HALF, SUM_COLUMNS)
                ]
                state: Any = zeros[0], row_vector(NO_SCORE), zeros[1]
                signals.q_full.wait(0, i)
                if number == 0:
                    state = first_block(done, *state)

                    def step(k, state):
                        acc, *sums = add_block(done + k, *state)
                        return release(acc), *sums

                    state = lax.fori_loop(1, count, step, state)
                else:

                    def step_of_second(k, state):
                        state = add_block(done + k, *state)
                        # The piece's last slot stays: its half becomes the output's buffer.
                        when(k < count - 1)(lambda: signals.free.arrive(2 * number + number))
                        return state

                    state = lax.fori_loop(0, count, step_of_second, state)
                acc, *sums = state
                signals.by_both.arrive(Q_FREE)
                if number == 0:
                    acc = consumer.add_values(consumer.rescaled(acc, done + count - 1), other)
                finish_piece(i, piece, acc, *sums)
                return done + count

            def finish_piece(i, piece, acc, old_maximum, row_sums):
                # Double buffered: the other consumer may still read the previous piece's sums.
                buffer = 2 * (i & 1)
                sums_s[0, buffer + number], sums_s[1, buffer + number] = (
                    old_maximum,
                    row_sums.sum(axis=1),
                )
                signals.by_both.arrive(SUMS_READY)
                signals.by_both.wait(SUMS_READY, i)
                of_piece = [sums_s.at[kind].at[pl.ds(buffer, 2)] for kind in range(2)]
                maximum, total = merge_sums(*load_sums(*of_piece))
                inverse = jnp.where(total > 0.0, 1.0 / total, 0.0)
                acc = acc * lax.broadcast_in_dim(inverse, (TILE, HALF), [0])
                if number == 0:
                    outputs.stage_lse(maximum, total)
                # Staged in the half of slot 1 that only this warpgroup reads.
                part = Part(
                    slice(None),
                    pl.ds(number * HALF, HALF),
                    lambda m: memory.latents.at[1, number, m],
                )
                if work.pieces == 1:
                    outputs.store(work.query(piece), acc, [part], number == 0)
                else:
                    outputs.store_partial(piece, acc, [part], number == 0)
                plgpu.wait_smem_to_gmem(0)
                signals.free.arrive(2 * 1 + number)

            lax.fori_loop(0, piece_count, run_piece, jnp.int32(0))

        when(wg == 2)(producer_warpgroup)
        for number in range(2):  # separate code for each, so that addresses are constants
            when(wg == number)(functools.partial(consumer_warpgroup, number))

    out, lse, *partials = grid_kernel(
        sparse_mla,
        output_types(Q, M, LATENT, 1 if work.pieces == 1 else -(-work.total // 2)),
        [*buffers, plgpu.SMEM((2, 4, TILE), jnp.float32), *Signals.scratch(interpret)],
        # The last axis varies fastest, so that tiles that read the same tokens run concurrently.
        grid={"cta": work.ctas, "tile": tiles},
        warpgroups=3,
        interpret=interpret,
        approx_math=True,
        reduction_scratch_bytes=0,
    )(q_latent, q_rope, tokens, block_tables, indices)
    return out, lse, tuple(partials)


@dataclasses.dataclass(frozen=True, eq=False)
class Cache:
    """The cached tokens, and which of them the queries attend to. All in global memory."""

    tokens: Any  # tokens of all pages, bfloat16 [slots, 576 or more] or uint8 [slots, 656]
    tables: Any  # block tables [B, max_pages]
    indices: Any  # positions [queries, K] of each query's tokens, or -1
    page: int  # tokens per page
    queries: int  # queries per sequence
    interpret: Any

    def load(self, block: Any) -> Any:
        """Loads the indices of a key block, counted over all queries."""
        return gather.load_indices(self.indices, block) if self.interpret is None else block

    def find(self, block: Any, indices: Any) -> Any:
        """Returns the slots of a key block's tokens, from the result of :meth:`load`."""
        b = lax.div(block, jnp.int32(self.indices.shape[1] // BLOCK * self.queries))
        pages = self.tokens.shape[0] // self.page
        if self.interpret is None:
            return gather.find_slots(self.tables, b, indices, self.page, pages)
        return gather.interpreted_slots(self.indices, self.tables, indices, b, self.page, pages)


def fill_slots(
    cache: Cache,
    targets: tuple[Any, Any, Any],
    signals: Signals,
    work: Work,
    pieces: tuple[Any, Any],
    fetch_queries: Callable[[Any], None],
    *,
    prefetch: bool,
) -> None:
    """Fills the slots with all key blocks of a CTA, and fetches the queries of its pieces: the
    first one and their number. ``targets`` in shared memory are latents [SLOTS, 2, 64, 256], rope
    keys [SLOTS, 64, 64] and penalties [SLOTS, 64]. With ``prefetch`` a block is brought into the L2
    cache before it is copied."""
    (v_s, rope_s, penalties_s), tokens, gpu = targets, cache.tokens, cache.interpret is None
    float8, (first_piece, piece_count) = tokens.dtype == jnp.uint8, pieces
    first = 2 * work.first_pair(first_piece)
    end = 2 * work.first_pair(first_piece + piece_count)

    def load(n):
        return cache.load(jnp.minimum(first + n, end - 1))

    def find(n, indices):
        return cache.find(jnp.minimum(first + n, end - 1), indices)

    def fetch(slots, half) -> Any:
        return gather.fetch_half(tokens, slots, half) if float8 and gpu else ()

    def copy(slot, half, slots, fetched: Any):
        v, rope = v_s.at[slot, half], rope_s.at[slot]
        if gpu and float8:
            if half:
                gather.copy_columns(rope, tokens, slots, ROPE_AT)
            words, scales = fetched
            store_half(v, words, scales, jnp.int32(BLOCK))
            if half:
                wait_rope_copies()
            fence_async_proxy()
            signals.full.arrive(2 * slot + half)
            return
        if gpu:
            gather.copy_columns(v, tokens, slots, half * LATENT)
            if half:
                gather.copy_columns(rope, tokens, slots, 2 * LATENT)
            gather.arrive_when_copied(signals.full.memory, 2 * slot + half)
            return
        block = gather.interpreted_tokens(tokens, slots)
        v[...] = block[:, half * HALF : (half + 1) * HALF]
        if half:
            rope[...] = block[:, LATENT : LATENT + ROPE]
        signals.full.arrive(2 * slot + half)

    def write_penalties(slot, slots):
        if gpu:
            gather.write_penalties(penalties_s.at[slot], slots)
        else:
            penalties_s[slot] = jnp.where(slots < 0, -jnp.inf, 0.0)
        signals.announce(PENALTIES, slot)

    def fetch_when_free(i):
        @when(first_warp(gpu))
        def _():
            when(i > 0)(lambda: signals.by_both.wait(Q_FREE, i - 1))
            fetch_queries(i)

    def fill(n, carry):
        """Copies block n. The carry has the slots of blocks n and n + 1, and more."""
        slots, next_slots, indices, fetched_pieces, fetched = carry
        later_slots, indices = find(n + 2, indices), load(n + 3)
        if prefetch and gpu:
            gather.prefetch_tokens(tokens, next_slots)
        slot, use = n & 1, lax.shift_right_logical(n, jnp.int32(1))
        for half in range(2):

            @when(use > 0)
            def _(half=half):
                signals.free.wait(2 * slot + half, use - 1)

            if half:
                write_penalties(slot, slots)
            copy(slot, half, slots, fetched)
            fetched = fetch(next_slots if half else slots, 1 - half)
        is_first = work.is_first_block(first + n)
        when(is_first)(lambda: fetch_when_free(fetched_pieces))
        fetched_pieces = fetched_pieces + is_first.astype(jnp.int32)
        return next_slots, later_slots, indices, fetched_pieces, fetched

    slots, next_slots = (find(n, load(n)) for n in range(2))
    carry = slots, next_slots, load(2), jnp.int32(0), fetch(slots, 0)
    lax.fori_loop(0, end - first, fill, carry)
    # A CTA may exit only after every arrival at its barriers has happened.
    for i in range(2 * SLOTS):
        signals.free.wait(i, lax.shift_right_logical(end - first, jnp.int32(1)) - 1)

    @when(first_warp(gpu))
    def _():
        signals.by_both.wait(Q_FREE, piece_count - 1)
