"""The producer of the kernel of two programs that unpack a float8 cache together.

Program r of a pair loads half r of each key block's latents (256 columns) from global memory to
registers. When both programs have released that half of a slot, it unpacks the latents to bfloat16
and stores them there, and each warp sends what it has stored to the other program. Then it loads
the next block: not earlier, because the fence after the stores waits for loads. One instruction
prefetches the page after the next one into the L2 cache.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.branch import when
from pallas_kernels.hopper.peer import send_quarter
from pallas_kernels.hopper.warpgroup import WARPS, first_warp, publish
from pallas_kernels.mla_decode.block_walk import NONE, Block, BlockWalk
from pallas_kernels.mla_decode.float8_cache import ROPE, ROPE_AT, dequantize_latent
from pallas_kernels.mla_decode.float8_pairs_signals import (
    Q_FREE,
    PairSignals,
    kv_free,
    kv_full,
)
from pallas_kernels.mla_decode.float8_registers import (
    fetch_half,
    prefetch_page,
    store_half,
    with_rounded_scales,
)
from pallas_kernels.mla_decode.kernel_parts import SLOTS, TILE
from pallas_kernels.mla_decode.schedule import BLOCK
from pallas_kernels.mla_decode.tile_memory import HALF, TileMemory
from pallas_kernels.mla_decode.work import Work

_QUARTER_BYTES = BLOCK * HALF * 2 // WARPS


def fill_slots(
    sources: tuple[Any, Any, Any],
    memory: TileMemory,
    signals: PairSignals,
    work: Work,
    first_query_row: Any,
) -> None:
    """Fills the two slots with all key blocks of a partition, and copies its sequences' queries.

    Args:
      sources: queries' latent and rope parts and the cache in global memory.
      first_query_row: first query row of the program's tile.
    """
    (ql_g, qr_g, pages), program = sources, signals.program
    gpu, walk = signals.interpret is None, BlockWalk.of(work)

    def load(block: Block) -> tuple[Any, ...]:
        """Loads this program's half of a block into registers, and its scales."""
        if not gpu:
            return ()
        return fetch_half(pages.at[block[1]], program)

    def prefetch(block: Block) -> None:
        if gpu:

            @when((block[0] != NONE) & (program == 0))
            def _():
                prefetch_page(pages.at[block[1]])

    def wait_free(n: Any, half: Any) -> None:
        use = lax.shift_right_logical(n, jnp.int32(1))

        @when(use > 0)
        def _():
            signals.free.wait(kv_free(n & 1, half), use - 1)

    def fill(n: Any, block: Block, registers: tuple[Any, ...]) -> None:
        """Fills block n in both programs."""
        slot, (_, page, tokens) = n & 1, block
        wait_free(n, program)
        if not gpu:
            wait_free(n, 1 - program)
            interpreted_fill(slot, page, tokens)
            return
        target = memory.values.at[slot, program]
        words, scales = registers
        store_half(target, words, scales, tokens)
        publish()
        signals.blocks.arrive(kv_full(slot, program))
        send_quarter(target, _QUARTER_BYTES, signals.blocks, kv_full(slot, program))

        @when(first_warp(gpu))
        def _():
            wait_free(n, 1 - program)  # P is where the rope keys will be
            window = page, pl.ds(0, BLOCK), pl.ds(ROPE_AT, 2 * ROPE)
            signals.blocks.copy(kv_full(slot, 2), pages, window, memory.rope.at[slot])

    def interpreted_fill(slot: Any, page: Any, tokens: Any) -> None:
        """Unpacks both halves: the interpreter has no stores to another program's memory."""
        latent, rope = dequantize_latent(with_rounded_scales(pages[page]), jnp.bfloat16)
        valid = jnp.arange(BLOCK)[:, None] < tokens
        latent = jnp.where(valid, latent, jnp.zeros_like(latent))
        for half in range(2):
            memory.values[slot, half] = latent[:, half * HALF : (half + 1) * HALF]
        memory.rope[slot] = rope
        publish(signals.interpret)
        for part in range(3):
            signals.blocks.arrive(kv_full(slot, part))

    def fetch_queries(first: Any, end: Any) -> Any:
        """Copies the queries of the partition's sequences ``first`` to ``end - 1``."""

        def fetch(i: Any, _: Any) -> None:
            when(i > 0)(lambda: signals.sequences.wait(Q_FREE, i - 1))
            b, m = walk.first_sequence + i, pl.ds(first_query_row, TILE)
            for half in range(2):
                window = b, m, pl.ds(HALF * half, HALF)
                signals.q_full.copy(0, ql_g, window, memory.q_latent.at[half])
            signals.q_full.copy(0, qr_g, (b, m, pl.ds(0, ROPE)), memory.q_rope.at[0])

        @when(first_warp(gpu))
        def _():
            lax.fori_loop(first, end, fetch, None)

        return jnp.maximum(first, end)

    def fill_next(carry):
        n, fetched, position, (now, following), registers = carry
        position = walk.after(position)
        later = walk.block_at(position, following[1])
        prefetch(later)
        fill(n, now, registers)
        registers = load(following)
        # After the block's keys: the buffer is free when the sequence before has been scored.
        fetched = fetch_queries(fetched, now[0] - walk.first_sequence + 1)
        return n + 1, fetched, position, (following, later), registers

    @when(walk.sequence_count > 0)
    def _():
        fetched = fetch_queries(jnp.int32(0), jnp.int32(1))
        position, blocks = walk.first_blocks(2)
        prefetch(blocks[1])
        carry = jnp.int32(0), fetched, position, tuple(blocks), load(blocks[0])
        n = lax.while_loop(lambda carry: carry[3][0][0] != NONE, fill_next, carry)[0]
        # A program may exit only after every arrival at its barriers has happened.
        for half in range(2):
            signals.free.wait_for_arrivals(kv_free(0, half), SLOTS, n)

        @when(first_warp(gpu))
        def _():
            signals.sequences.wait(Q_FREE, walk.sequence_count - 1)
