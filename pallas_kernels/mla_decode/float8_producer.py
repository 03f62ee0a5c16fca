"""The producer warpgroup of the kernel for a float8 cache: unpacks key blocks, copies queries."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.branch import when
from pallas_kernels.hopper.warpgroup import publish
from pallas_kernels.mla_decode.float8_cache import dequantize_latent
from pallas_kernels.mla_decode.float8_registers import (
    copy_rope,
    fetch_half,
    prefetch_rope,
    store_half,
    wait_rope_copies,
    with_rounded_scales,
)
from pallas_kernels.mla_decode.float8_signals import Signals
from pallas_kernels.mla_decode.kernel_parts import SLOTS
from pallas_kernels.mla_decode.schedule import BLOCK
from pallas_kernels.mla_decode.tile_memory import HALF, TileMemory
from pallas_kernels.mla_decode.work import Work


def fill_slots(
    sources: tuple[Any, Any, Any],
    memory: TileMemory,
    signals: Signals,
    work: Work,
    first_query_row: Any,
    rows: int,
    bounds: tuple[Any, Any, Any],
) -> None:
    """Fills the two slots with all key blocks of a partition, and copies its sequences' queries.

    Args:
      sources: queries' latent and rope parts and the cache in global memory.
      first_query_row, rows: query rows of the program's tile.
      bounds: the partition's first and last sequence, and their number.
    """
    (ql_g, qr_g, kv_g), interpret = sources, signals.interpret
    first_sequence, last_sequence, sequence_count = bounds

    def page_and_tokens(b, block):
        """Returns a key block's page and how many valid tokens follow its first slot."""
        return work.page(b, block), work.length(b) - block * BLOCK

    def fetch(page):
        if interpret is not None:
            return ()
        page = kv_g.at[page]
        prefetch_rope(page)
        return *fetch_half(page, 0), *fetch_half(page, 1)

    def fetch_queries(b):
        m = pl.ds(first_query_row, rows)
        for half in range(2):
            plgpu.copy_gmem_to_smem(
                ql_g.at[b, m, pl.ds(HALF * half, HALF)],
                memory.q_latent.at[half, pl.ds(0, rows)],
                signals.q_full,
            )
        plgpu.copy_gmem_to_smem(
            qr_g.at[b, m, :], memory.q_rope.at[0, pl.ds(0, rows)], signals.q_full
        )

    def interpreted_fill(slot, half, page, tokens):
        latent, rope = dequantize_latent(with_rounded_scales(kv_g[page]), jnp.bfloat16)
        valid = jnp.arange(BLOCK)[:, None] < tokens
        columns = latent[:, half * HALF : (half + 1) * HALF]
        memory.values[slot, half] = jnp.where(valid, columns, jnp.zeros_like(columns))
        if half:
            memory.rope[slot] = rope

    def fill(n, registers, page, tokens, next_page):
        """Stores block n of the partition from registers, and loads the next block."""
        slot = n & 1

        @when(n >= SLOTS)
        def _():
            for half in range(2):
                plgpu.barrier_wait(signals.kv_free(slot, half))

        if interpret is not None:
            for half in range(2):
                interpreted_fill(slot, half, page, tokens)
                signals.arrive_once(signals.kv_full(slot, half))
            return registers
        registers = list(registers)
        copy_rope(memory.rope.at[slot], kv_g.at[page])
        for half in range(2):
            of_half = slice(2 * half, 2 * half + 2)
            words, scales = registers[of_half]
            store_half(memory.values.at[slot, half], words, scales, tokens)
            if half:
                wait_rope_copies()
            publish()
            signals.arrive_once(signals.kv_full(slot, half))
            registers[of_half] = fetch_half(kv_g.at[next_page], half)
        prefetch_rope(kv_g.at[next_page])
        return tuple(registers)

    def run_segment(i, carry):
        done, *carry = carry
        b, _, begin, count = work.segment_and_length(i, first_sequence, last_sequence)

        def step(j, carry):
            registers, page, tokens = carry
            more = j + 1 < count
            next_page, next_tokens = page_and_tokens(
                jnp.where(more, b, jnp.minimum(b + 1, last_sequence)),
                jnp.where(more, begin + j + 1, 0),
            )
            registers = fill(done + j, registers, page, tokens, next_page)

            @when((j == 0) & (i > 0))
            def _():
                plgpu.barrier_wait(signals.q_free)
                fetch_queries(b)

            return registers, next_page, next_tokens

        return done + count, *lax.fori_loop(0, count, step, tuple(carry))

    @when(sequence_count > 0)
    def _():
        fetch_queries(first_sequence)
        page, tokens = page_and_tokens(first_sequence, work.schedule[work.partition, 2])
        carry = jnp.int32(0), fetch(page), page, tokens
        done = lax.fori_loop(0, sequence_count, run_segment, carry)[0]
        # A program may exit only after every arrival at its barriers has happened.
        plgpu.barrier_wait(signals.q_free)
        for slot in range(SLOTS):

            @when(done > slot)
            def _(slot=slot):
                for half in range(2):
                    plgpu.barrier_wait(signals.kv_free(slot, half))
