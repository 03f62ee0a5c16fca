"""The producer warpgroup of the sparse attention kernel: fills the slots of shared memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.branch import when
from pallas_kernels.hopper.warpgroup import first_warp, publish
from pallas_kernels.mla_decode.float8_cache import LATENT, ROPE
from pallas_kernels.mla_decode.float8_registers import store_half, wait_rope_copies
from pallas_kernels.mla_decode.row_tiles import HALF, SLOTS
from pallas_kernels.sparse_mla_decode import gather, unpack
from pallas_kernels.sparse_mla_decode.signals import Q_FREE, Signals, penalties_ready
from pallas_kernels.sparse_mla_decode.work import BLOCK, Work


@dataclasses.dataclass(frozen=True, eq=False)
class Cache:
    """The cached tokens, and which of them the queries attend to. All in global memory."""

    tokens: Any
    """Tokens of all pages, bfloat16 [slots, 576 or more] or uint8 [slots, 656]."""

    tables: Any
    """Block tables [B, max_pages]."""

    indices: Any
    """Positions [queries, K] of each query's tokens, or -1."""

    page: int
    """Tokens per page."""

    queries: int
    """Queries per sequence."""

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
    """Fills the slots with all key blocks of a program, and fetches the queries of its pieces.

    Args:
      targets: latents [SLOTS, 2, 64, 256], rope keys [SLOTS, 64, 64] and penalties [SLOTS, 64] in
        shared memory.
      pieces: the program's first piece and their number.
      fetch_queries: starts copying the queries of a piece, in one warp.
      prefetch: whether to prefetch each block into the L2 cache before it is copied.
    """
    (v_s, rope_s, penalties_s), tokens, gpu = targets, cache.tokens, cache.interpret is None
    float8, (first_piece, piece_count) = tokens.dtype == jnp.uint8, pieces
    first = 2 * work.first_pair(first_piece)
    end = 2 * work.first_pair(first_piece + piece_count)

    def load(n):
        return cache.load(jnp.minimum(first + n, end - 1))

    def find(n, indices):
        return cache.find(jnp.minimum(first + n, end - 1), indices)

    def fetch(slots, half) -> Any:
        return unpack.fetch_half(tokens, slots, half) if float8 and gpu else ()

    def copy(slot, half, slots, fetched: Any):
        v, rope = v_s.at[slot, half], rope_s.at[slot]
        if gpu and float8:
            if half:
                unpack.copy_rope(rope, tokens, slots)
            words, scales = fetched
            store_half(v, words, scales, jnp.int32(BLOCK))
            if half:
                wait_rope_copies()
            publish()
            signals.full.arrive(2 * slot + half)
            return
        if gpu:
            gather.copy_half(v, rope, tokens, slots, half)
            gather.arrive_when_copied(signals.full.memory, 2 * slot + half)
            return
        block = (unpack if float8 else gather).interpreted_tokens(tokens, slots)
        v[...] = block[:, half * HALF : (half + 1) * HALF]
        if half:
            rope[...] = block[:, LATENT : LATENT + ROPE]
        signals.full.arrive(2 * slot + half)

    def write_penalties(slot, slots):
        if gpu:
            gather.write_penalties(penalties_s.at[slot], slots)
        else:
            penalties_s[slot] = jnp.where(slots < 0, -jnp.inf, 0.0)
        signals.ready.arrive(penalties_ready(slot))

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
    # A program may exit only after every arrival at its barriers has happened.
    for i in range(2 * SLOTS):
        signals.free.wait(i, lax.shift_right_logical(end - first, jnp.int32(1)) - 1)

    @when(first_warp(gpu))
    def _():
        signals.by_both.wait(Q_FREE, piece_count - 1)
