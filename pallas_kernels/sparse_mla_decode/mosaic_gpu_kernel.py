"""The Hopper kernel of attention to selected tokens, for tiles of 64 heads of a query.

A program processes consecutive pieces of queries (:mod:`work`), in key blocks of 64 tokens. Its
three warpgroups are specialised and synchronise only through barriers:

* The producer (:mod:`producer`) gathers the tokens of a key block into one of two slots in shared
  memory, 16 bytes per thread and instruction (:mod:`gather`). It looks tokens up three blocks ahead
  and may prefetch them into the L2 cache one block ahead. It writes zeros for tokens that do not
  exist. Tokens of a float8 cache go through registers, where they become bfloat16, half of a block
  at a time (:mod:`unpack`).
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
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int32, UInt8

from pallas_kernels.hopper.branch import when
from pallas_kernels.hopper.launch import overlap_preceding_kernel
from pallas_kernels.hopper.lowered_once import lowered_once
from pallas_kernels.hopper.math import LOG2E, NO_SCORE
from pallas_kernels.hopper.online_softmax import merge_sums
from pallas_kernels.hopper.split_kv import output_types
from pallas_kernels.hopper.tiles import ROW, WGMMA, row_vector
from pallas_kernels.hopper.warpgroup import WARPS, publish
from pallas_kernels.mla_decode.float8_cache import LATENT, ROPE
from pallas_kernels.mla_decode.row_tiles import (
    HALF,
    TILE,
    Consumer,
    ConsumerSignals,
    Part,
    TileMemory,
    TileResults,
    load_sums,
)
from pallas_kernels.sparse_mla_decode import gather
from pallas_kernels.sparse_mla_decode.producer import Cache, fill_slots
from pallas_kernels.sparse_mla_decode.signals import (
    Q_FREE,
    SUMS_READY,
    Signals,
    max_ready,
    p_ready,
    penalties_ready,
)
from pallas_kernels.sparse_mla_decode.work import BLOCK, Work

_COLUMN = plgpu.Layout.WGMMA.reduce(0)  # layout of a vector with one number per column of a tile
_SUM_COLUMNS = 8  # of a WGMMA register tile: the narrowest slice
# Registers per thread of consumers and producer: 2 * consumer + producer <= 504.
_REGISTERS, _FLOAT8_REGISTERS = (224, 56), (208, 88)
_Partials = tuple[Float32[Array, "partials Mp C"], Float32[Array, "partials Mp"]]


@dataclasses.dataclass(frozen=True)
class Config:
    """Tuning parameters that do not change any result."""

    prefetch: bool | None = None
    """Whether tokens are prefetched into the L2 cache before they are copied. By default only those
    of a bfloat16 cache, for several tiles of heads: there it gains 3 %, and elsewhere it loses."""

    early: bool = True
    """Whether to launch before the preceding kernel has ended (programmatic dependent launch)."""


@lowered_once("work", "page", "scale", "config", "interpret")
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
    config: Config,
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
    prefetch = config.prefetch
    if prefetch is None:
        prefetch = tiles > 1 and not float8
    registers = _FLOAT8_REGISTERS if float8 else _REGISTERS
    gpu, queries = interpret is None, Q // len(block_tables)

    def sparse_mla(ql_g, qr_g, kv_g, tables_g, indices_g, *refs):
        results_g, scratch = refs[:4], refs[4:]
        memory, sums_s = TileMemory(*scratch[: len(buffers)]), scratch[len(buffers)]
        signals = Signals.of(scratch[len(buffers) + 1 :], interpret)
        # By cp.async every thread signals its own copies.
        signals.initialise(WARPS if float8 else gather.THREADS)
        overlap_preceding_kernel(config.early, interpret=interpret)
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
        first_piece = lax.axis_index("program") * work.share
        # Only the last program may have fewer pieces. With a minimum instead, ptxas serialized the
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

            targets = memory.values, memory.rope, penalties_s
            fill_slots(
                cache, targets, signals, work, (first_piece, piece_count), fetch_queries,
                prefetch=prefetch,
            )  # fmt: skip

        def wait_full(own, half, n):
            signals.full.wait(2 * own + half, n)
            publish(interpret)  # cp.async writes like an ordinary store

        def consumer_warpgroup(own):
            """Runs a consumer. ``own``: its blocks' index in a pair, slot, and output half."""
            plgpu.set_max_registers(registers[0], action="increase")
            other = 1 - own
            consumer = Consumer(
                own,
                memory,
                ConsumerSignals(
                    wait_full=functools.partial(wait_full, own),
                    max_ready=lambda: signals.ready.arrive(max_ready(own)),
                    p_ready=lambda: signals.ready.arrive(p_ready(own)),
                    wait_other_max=lambda n: signals.ready.wait(max_ready(other), n),
                    wait_other_p=lambda n: signals.ready.wait(p_ready(other), n),
                    release=lambda slot: signals.free.arrive(2 * slot + own),
                ),
                lambda n: gather.opaque_zero() if gpu else 0,
                interpret,
            )

            def softmax(s, n, before, own_max, total):
                """Publishes P, the maximum and its factor; returns (factor, maximum, row sums)."""
                signals.ready.wait(penalties_ready(own), n)
                penalties = plgpu.layout_cast(penalties_s[own], _COLUMN)
                s = s * (scale * LOG2E) + lax.broadcast_in_dim(penalties, s.shape, [1])
                maximum = s.max(axis=1)
                p, running, alpha = consumer.store_p(
                    maximum, before, lambda running: s - lax.broadcast_in_dim(running, s.shape, [0])
                )
                # Row sums of eight columns each. A thread's own are reduced at the end.
                block_sums = functools.reduce(
                    jnp.add, (p[:, c : c + _SUM_COLUMNS] for c in range(0, BLOCK, _SUM_COLUMNS))
                )
                factor = jnp.exp2(own_max - running)
                total = total * lax.broadcast_in_dim(factor, total.shape, [0]) + block_sums
                return alpha, running, total

            def first_block(n, acc, *sums):
                """Processes consumer 0's first block of a piece; nothing overlaps with it."""
                _, *sums = softmax(consumer.scores(n), n, row_vector(NO_SCORE), *sums)
                return release(consumer.add_values(acc, own)), *sums

            def add_block(n, acc, *sums):
                def softmax_of(s):
                    return softmax(s, n, plgpu.layout_cast(memory.maxima[other], ROW), *sums)

                # Consumer 0 adds block 1 of the previous pair.
                return consumer.add_block(n, n - other, acc, softmax_of)

            def release(acc):
                signals.free.arrive(2 * own + own)
                return acc

            def run_piece(i, done):
                """Attends to the program's i-th piece; ``done`` counts the pairs before it."""
                piece = first_piece + i
                count = work.first_pair(piece + 1) - begin - done
                zeros = [
                    plgpu.layout_cast(jnp.full((TILE, width), 0.0, jnp.float32), WGMMA)
                    for width in (HALF, _SUM_COLUMNS)
                ]
                state: Any = zeros[0], row_vector(NO_SCORE), zeros[1]
                signals.q_full.wait(0, i)
                if own == 0:
                    state = first_block(done, *state)

                    def step(k, state):
                        acc, *sums = add_block(done + k, *state)
                        return release(acc), *sums

                    state = lax.fori_loop(1, count, step, state)
                else:

                    def step_of_second(k, state):
                        return keep_last(k, add_block(done + k, *state))

                    def keep_last(k, state):
                        # The piece's last slot stays: its half becomes the output's buffer.
                        when(k < count - 1)(lambda: signals.free.arrive(2 * own + own))
                        return state

                    state = lax.fori_loop(0, count, step_of_second, state)
                acc, *sums = state
                signals.by_both.arrive(Q_FREE)
                if own == 0:
                    acc = consumer.add_values(consumer.rescaled(acc, done + count - 1), other)
                finish_piece(i, piece, acc, *sums)
                return done + count

            def finish_piece(i, piece, acc, own_max, own_sums):
                # Double buffered: the other consumer may still read the previous piece's sums.
                buffer = 2 * (i & 1)
                sums_s[0, buffer + own], sums_s[1, buffer + own] = own_max, own_sums.sum(axis=1)
                signals.by_both.arrive(SUMS_READY)
                signals.by_both.wait(SUMS_READY, i)
                of_piece = [sums_s.at[kind].at[pl.ds(buffer, 2)] for kind in range(2)]
                maximum, total = merge_sums(*load_sums(*of_piece))
                inverse = jnp.where(total > 0.0, 1.0 / total, 0.0)
                acc = acc * lax.broadcast_in_dim(inverse, (TILE, HALF), [0])
                if own == 0:
                    outputs.stage_lse(maximum, total)
                # Staged in the half of slot 1 that only this warpgroup reads.
                part = Part(
                    slice(None), pl.ds(own * HALF, HALF), lambda m: memory.values.at[1, own, m]
                )
                if work.pieces == 1:
                    outputs.store(work.query(piece), acc, [part], own == 0)
                else:
                    outputs.store_partial(piece, acc, [part], own == 0)
                plgpu.wait_smem_to_gmem(0)
                signals.free.arrive(2 * 1 + own)

            lax.fori_loop(0, piece_count, run_piece, jnp.int32(0))

        when(wg == 2)(producer_warpgroup)
        for own in range(2):  # separate code for each, so that addresses are constants
            when(wg == own)(functools.partial(consumer_warpgroup, own))

    out, lse, *partials = plgpu.kernel(
        sparse_mla,
        out_type=output_types(Q, M, LATENT, 1 if work.pieces == 1 else -(-work.total // 2)),
        scratch_types=[
            *buffers,
            plgpu.SMEM((2, 4, TILE), jnp.float32),
            *Signals.scratch(interpret),
        ],
        # The last axis varies fastest, so that tiles that read the same tokens run concurrently.
        grid=(work.programs, tiles),
        grid_names=("program", "tile"),
        num_threads=3,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        **({} if gpu else {"interpret": interpret}),
    )(q_latent, q_rope, tokens, block_tables, indices)
    return out, lse, tuple(partials)
