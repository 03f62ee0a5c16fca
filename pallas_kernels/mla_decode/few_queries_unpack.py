"""The producer of the kernel for few query rows that unpacks a float8 cache.

An unpacker warpgroup loads a key block's float8 latents into registers while it stores the previous
one: half of the latents (256 columns) are multiplied by their scales and stored as bfloat16, then
the same registers receive that half of the next block. Rope keys are copied unchanged. Registers
cannot hold enough bytes in flight for the latency of HBM, so one instruction prefetches the block
after the next one into the L2 cache.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mla_decode.few_queries_ring import Rings, Stages, Work
from pallas_kernels.mla_decode.float8_cache import LATENT, dequantize_latent
from pallas_kernels.mla_decode.float8_registers import (
    copy_rope,
    fetch_half,
    prefetch_page,
    store_slices,
    wait_rope_copies,
    with_rounded_scales,
)
from pallas_kernels.mla_decode.query_buffer import QueryBuffer
from pallas_kernels.mla_decode.rescale import publish
from pallas_kernels.mla_decode.schedule import BLOCK
from pallas_kernels.mosaic_ir import first_warp

_HALF_SLICES = 4  # of 64 columns
_NONE = -1  # sequence of a block that the partition does not have
_Position = tuple[Any, Any, Any]
"""(sequence, block of the sequence, end of the sequence's blocks in the partition)."""
_Block = tuple[Any, Any, Any]
"""(sequence or _NONE, page, number of valid tokens from the page's first slot on)."""


def unpack_blocks(
    unpacker: Any, pages: Any, rings: Rings, queries: QueryBuffer, work: Work, *, interpret: Any
) -> None:
    """Fills blocks ``unpacker``, ``unpacker + producers``, ... of a partition.

    Unpacker 0 also fills the query buffer. It does so after the first of its blocks that may need
    the new queries, because the buffer is free only when the preceding block has been scored.

    Args:
      unpacker: index of this warpgroup among the producers.
      pages: the cache [P, 64, 656] in global memory.
      interpret: interpreter parameters, or None on a GPU.
    """
    i32, step = jnp.int32, rings.plan.producers
    first_sequence, last_sequence, first_block, end_block = work.range()
    sequence_count = last_sequence - first_sequence + 1
    fetches_queries = (unpacker == 0) & first_warp(interpret is None)

    def end_of(b):
        return jnp.where(b == last_sequence, end_block, work.blocks(b))

    def advance(position: _Position, blocks: Any) -> _Position:
        """Returns the position that is ``blocks`` later in the partition."""

        def is_past(position):
            b, index, end = position
            return (index >= end) & (b < last_sequence)

        def next_sequence(position):
            b, index, end = position
            return b + 1, index - end, end_of(b + 1)

        b, index, end = position
        return lax.while_loop(is_past, next_sequence, (b, index + blocks, end))

    def block_at(position: _Position, other_page: Any) -> _Block:
        """Returns the block there. If there is none, its page is ``other_page``."""
        b, index, end = position
        exists = index < end
        page = jnp.where(exists, work.page(b, index), other_page)
        return jnp.where(exists, b, _NONE), page, work.length(b) - index * BLOCK

    def fetch(page):
        if interpret is not None:
            return ()
        return *fetch_half(pages.at[page], 0), *fetch_half(pages.at[page], 1)

    def prefetch(block: _Block):
        if interpret is None:

            @pl.when(block[0] != _NONE)
            def _():
                prefetch_page(pages.at[block[1]])

    def fill(n: Any, registers: tuple[jax.Array, ...], block: _Block, next_page: Any):
        """Stores block n of the partition from registers, and loads the next page into them."""
        w, (_, page, tokens) = rings.owner(n), block
        (rope, rope_use), *latents = stages = rings.stages_of(rings.index(n))
        rings.wait_until_free(w, rope, rope_use)
        if interpret is not None:
            _interpreted_fill(rings, w, stages, pages, page, tokens)
            return registers
        copy_rope(rings.stage_ref(w, rope), pages.at[page])
        registers = list(registers)
        for half in range(2):
            half_latents = latents[half * _HALF_SLICES : (half + 1) * _HALF_SLICES]
            for stage, use in half_latents:
                rings.wait_until_free(w, stage, use)
            of_half = slice(2 * half, 2 * half + 2)
            ring, stage = rings.plan.ring, half_latents[0][0]
            store_slices(rings.memory, w * ring, stage, ring, *registers[of_half], tokens)
            if half == 0:
                wait_rope_copies()
                half_latents = [stages[0], *half_latents]
            publish()
            for stage, _ in half_latents:
                rings.barriers.arrive(rings.full(w, stage))
            registers[of_half] = fetch_half(pages.at[next_page], half)
        return tuple(registers)

    def fetch_queries(first, end):
        """Fetches the queries of the partition's sequences ``first`` to ``end - 1``."""

        @pl.when(fetches_queries)
        def _():
            lax.fori_loop(first, end, lambda i, _: queries.fetch(i, first_sequence + i), None)

        return jnp.maximum(first, end)

    def fill_next(carry):
        n, fetched, position, (now, following, later), registers = carry
        position = advance(position, step)
        last = block_at(position, later[1])
        prefetch(later)
        registers = fill(n, registers, now, following[1])
        fetched = fetch_queries(fetched, now[0] - first_sequence + 1)
        return n + step, fetched, position, (following, later, last), registers

    @pl.when(sequence_count > 0)
    def _():
        fetched = fetch_queries(i32(0), i32(1))
        position = advance((first_sequence, first_block, end_of(first_sequence)), unpacker)
        blocks = [block_at(position, 0)]
        for _ in range(2):
            position = advance(position, step)
            blocks.append(block_at(position, blocks[-1][1]))
        prefetch(blocks[1])
        registers = fetch(blocks[0][1])
        carry = jnp.asarray(unpacker, i32), fetched, position, tuple(blocks), registers
        n, fetched, *_ = lax.while_loop(lambda carry: carry[3][0][0] != _NONE, fill_next, carry)
        fetch_queries(fetched, sequence_count)
        if step == 1:
            for w in range(rings.plan.warpgroups):
                rings.wait_for_arrivals(w, rings.index(n + (rings.plan.warpgroups - 1 - w)))
        else:
            rings.wait_for_arrivals(unpacker, rings.index(n))

        @pl.when(fetches_queries)
        def _():
            queries.wait_for_arrivals(sequence_count)


def _interpreted_fill(
    rings: Rings, w: Any, stages: Stages, pages: Any, page: Any, tokens: Any
) -> None:
    """Fills a block's stages, of which the first is free, with whole arrays."""
    latent, rope = dequantize_latent(with_rounded_scales(pages[page]), jnp.bfloat16)
    valid = jnp.arange(BLOCK)[:, None] < tokens
    for k, (columns, (stage, use)) in enumerate(zip(rings.plan.slices, stages, strict=True)):
        if k > 0:
            rings.wait_until_free(w, stage, use)
        values = latent[:, columns.first : columns.first + columns.width]
        is_latent = columns.first < LATENT
        rings.stage_ref(w, stage)[...] = (
            jnp.where(valid, values, jnp.zeros_like(values)) if is_latent else rope
        )
        publish(interpret=object())
        rings.barriers.arrive(rings.full(w, stage))
