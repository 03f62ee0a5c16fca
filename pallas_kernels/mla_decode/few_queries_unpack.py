"""The producer of the kernel for few query rows that unpacks a float8 cache.

One or two unpacker warpgroups fill every key block, each its halves of the latents (256 columns).
An unpacker has its halves of a block's float8 latents in registers. When the stages are free it
multiplies the latents by their scales and stores them as bfloat16. Then it loads the next block:
not earlier, because the fence before a stage is full waits for loads too. Rope keys are copied by
TMA. Registers cannot hold enough bytes in flight for the latency of HBM, so one instruction
prefetches the block after the next one into the L2 cache.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.branch import when
from pallas_kernels.hopper.warpgroup import first_warp, publish, warp_is
from pallas_kernels.mla_decode.block_walk import NONE, Block, BlockWalk
from pallas_kernels.mla_decode.few_queries_ring import Rings, Stages
from pallas_kernels.mla_decode.float8_cache import LATENT, ROPE, ROPE_AT, dequantize_latent
from pallas_kernels.mla_decode.float8_registers import (
    HALF,
    fetch_half,
    prefetch_page,
    store_slices,
    with_rounded_scales,
)
from pallas_kernels.mla_decode.query_buffer import QueryBuffer
from pallas_kernels.mla_decode.schedule import BLOCK
from pallas_kernels.mla_decode.work import Work

_HALF_SLICES = 4  # of 64 columns


def unpack_blocks(
    unpacker: int, pages: Any, rings: Rings, queries: QueryBuffer, work: Work, *, interpret: Any
) -> None:
    """Fills an unpacker's halves of all blocks of a partition.

    Unpacker 0 also copies the rope keys and the queries. It copies a sequence's queries after it
    has filled its first block, because the buffer is free only when the preceding sequence has been
    scored.

    Args:
      unpacker: number of this warpgroup among the producers.
      pages: the cache [P, 64, 656] in global memory.
      interpret: interpreter parameters, or None on a GPU.
    """
    i32, gpu = jnp.int32, interpret is None
    halves = range(unpacker, 2, rings.plan.producers)
    walk = BlockWalk.of(work)
    first_sequence, sequence_count = walk.first_sequence, walk.sequence_count

    def fetch(page: Any) -> tuple[Any, ...]:
        return tuple(fetch_half(pages.at[page], half) for half in halves) if gpu else ()

    def prefetch(block: Block) -> None:
        if gpu and unpacker == 0:

            @when(block[0] != NONE)
            def _():
                prefetch_page(pages.at[block[1]])

    def copy_rope(w: Any, page: Any, stage: Any, use: Any) -> None:
        rings.wait_until_free(w, stage, use)
        full = rings.full(w, stage)

        @when(warp_is(0))
        def _():
            window = page, pl.ds(0, BLOCK), pl.ds(ROPE_AT, 2 * ROPE)
            rings.barriers.copy(full, pages, window, rings.stage_ref(w, stage), None)

        @when(~warp_is(0))
        def _():
            rings.barriers.arrive(full)

    def fill(n: Any, registers: tuple[Any, ...], block: Block, next_page: Any) -> tuple[Any, ...]:
        """Stores block n of the partition from registers, and loads the next page into them."""
        w, (_, page, tokens) = rings.owner(n), block
        rope, *latents = stages = rings.stages_of(rings.index(n))
        if not gpu:
            _interpreted_fill(rings, w, stages, halves, pages, page, tokens)
            return registers
        if unpacker == 0:
            copy_rope(w, page, *rope)
        for half, (words, scales) in zip(halves, registers, strict=True):
            half_stages = latents[half * _HALF_SLICES : (half + 1) * _HALF_SLICES]
            for stage, use in half_stages:
                rings.wait_until_free(w, stage, use)
            ring, stage = rings.plan.ring, half_stages[0][0]
            store_slices(rings.memory, w * ring, stage, ring, words, scales, tokens)
            publish()
            for stage, _ in half_stages:
                rings.barriers.arrive(rings.full(w, stage))
        return fetch(next_page)

    def fetch_queries(first: Any, end: Any) -> Any:
        """Fetches the queries of the partition's sequences ``first`` to ``end - 1``."""
        if unpacker == 0:

            @when(first_warp(gpu))
            def _():
                lax.fori_loop(first, end, lambda i, _: queries.fetch(i, first_sequence + i), None)

        return jnp.maximum(first, end)

    def fill_next(carry):
        n, fetched, position, (now, following, later), registers = carry
        position = walk.after(position)
        last = walk.block_at(position, later[1])
        prefetch(later)
        registers = fill(n, registers, now, following[1])
        fetched = fetch_queries(fetched, now[0] - first_sequence + 1)
        return n + 1, fetched, position, (following, later, last), registers

    @when(sequence_count > 0)
    def _():
        fetched = fetch_queries(i32(0), i32(1))
        position, blocks = walk.first_blocks(3)
        prefetch(blocks[1])
        carry = i32(0), fetched, position, tuple(blocks), fetch(blocks[0][1])
        n = lax.while_loop(lambda carry: carry[3][0][0] != NONE, fill_next, carry)[0]
        W = rings.plan.warpgroups
        for w in range(W):
            rings.wait_for_arrivals(w, rings.index(n + (W - 1 - w)))
        if unpacker == 0:

            @when(first_warp(gpu))
            def _():
                queries.wait_for_arrivals(sequence_count)


def _interpreted_fill(
    rings: Rings, w: Any, stages: Stages, halves: range, pages: Any, page: Any, tokens: Any
) -> None:
    """Fills an unpacker's stages of a block with whole arrays.

    It waits for the other unpacker's stages too, because the interpreter's barriers count the
    phases that a warpgroup has waited for.
    """
    latent, rope = dequantize_latent(with_rounded_scales(pages[page]), jnp.bfloat16)
    valid = jnp.arange(BLOCK)[:, None] < tokens
    for columns, (stage, use) in zip(rings.plan.slices, stages, strict=True):
        rings.wait_until_free(w, stage, use)
        is_latent = columns.first < LATENT
        if (columns.first // HALF if is_latent else 0) not in halves:
            continue
        values = latent[:, columns.first : columns.first + columns.width]
        rings.stage_ref(w, stage)[...] = (
            jnp.where(valid, values, jnp.zeros_like(values)) if is_latent else rope
        )
        publish(interpret=True)
        rings.barriers.arrive(rings.full(w, stage))
