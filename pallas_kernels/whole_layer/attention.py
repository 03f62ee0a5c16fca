"""Attention as a phase of a persistent kernel: one or two tokens of one sequence, in parts.

A program has a part of the cached tokens, some whole pages, and a group of 16 query rows. So there
are as many parts as programs per group, at most MOST_PARTS, and no more than there are pages. The
keys of a part's first page are loaded to registers before the queries are known. Only the new
tokens' own keys are not in the cache then, and are loaded with the queries.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.decoder_layer.stream import Totals
from pallas_kernels.hopper.branch import when
from pallas_kernels.hopper.math import LOG2E, NO_SCORE
from pallas_kernels.whole_layer import registers
from pallas_kernels.whole_layer.registers import (
    ACC,
    KEYS,
    LATENT,
    PAGE,
    PROBABILITY_STRIDE,
    QUERY_ROWS,
    QUERY_STRIDE,
    ROPE,
    RUNNING,
    WARPS,
)

MOST_PARTS = 64
"""With more, the programs that merge them would take longer than a second page per part."""
MOST_POSITIONS = 8192
"""Positions of a block table."""
MOST_QUERIES = 2
"""Tokens of the sequence that attend."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes and settings. :meth:`check` refuses what the phase does not take."""

    tokens: int
    heads: int
    latent: int
    rope: int
    scale: float
    programs: int

    def check(self, page: int, columns: int, positions: int, interpret: Any) -> None:
        """Raises NotImplementedError unless the phase takes this cache.

        Args:
          columns: of a page.
          positions: of the block table.
        """
        if not 1 <= self.tokens <= MOST_QUERIES:
            raise NotImplementedError(f"takes 1 or {MOST_QUERIES} tokens, got {self.tokens}")
        if self.heads % QUERY_ROWS or self.groups > self.programs:
            raise NotImplementedError(
                f"takes a multiple of {QUERY_ROWS} heads, and a program for as many query rows, got"
                f" {self.heads} heads"
            )
        if page != PAGE:
            raise NotImplementedError(f"takes pages of {PAGE} tokens, got {page}")
        if positions > MOST_POSITIONS:
            raise NotImplementedError(
                f"takes block tables of {MOST_POSITIONS} positions at most, got {positions}"
            )
        widths = self.latent, self.rope, columns
        if interpret is None and widths != (LATENT, ROPE, LATENT + ROPE):
            raise NotImplementedError(
                f"takes {LATENT} latent and {ROPE} rope columns, and pages of no others, got"
                f" {widths}"
            )

    @property
    def rows(self) -> int:
        """Query rows: all heads of the first token, then of the second."""
        return self.tokens * self.heads

    @property
    def groups(self) -> int:
        return self.rows // QUERY_ROWS

    @property
    def parts(self) -> int:
        """The most parts."""
        return min(MOST_PARTS, self.programs // self.groups)

    def split(self, start: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the number of pages, the pages of a part, and the number of parts.

        Args:
          start: tokens that were cached before the new ones.
        """
        pages = _divide_up(start + self.tokens, PAGE)
        each = _divide_up(pages, self.parts)
        return pages, each, lax.div(pages + each - 1, each)


def _divide_up(n: jax.Array, by: int) -> jax.Array:
    return lax.div(n + (by - 1), jnp.int32(by))


class Refs(NamedTuple):
    """References to arrays in global memory."""

    q_latent: Any
    """Flat [rows C]."""
    q_rope: Any
    """[rows, R]"""
    pages: Any
    """[P 64, columns]: a row for each token."""
    table: Any
    """[pages] of the sequence."""
    start: Any
    """[1], the tokens that were cached before."""
    partials: Any
    """float32 [parts, rows, C], the results of the parts."""
    lse: Any
    """float32 [parts, rows], their log-sum-exps, -inf of a query that sees nothing of a part."""


class Memory(NamedTuple):
    """References to shared memory: flat, of these sizes or larger."""

    queries: Any
    """bfloat16, QUERY_NUMBERS"""
    probabilities: Any
    """bfloat16, PROBABILITY_NUMBERS"""
    numbers: Any
    """float32, REDUCED_NUMBERS"""


QUERY_NUMBERS = QUERY_ROWS * QUERY_STRIDE
PROBABILITY_NUMBERS = QUERY_ROWS * PROBABILITY_STRIDE
REDUCED_NUMBERS = 2 * WARPS * QUERY_ROWS


class Attention:
    """The phase in one program. Its methods emit the consumers' code."""

    def __init__(
        self, sizes: Sizes, refs: Refs, memory: Memory, totals: Totals, program: jax.Array,
        wg: jax.Array, interpret: Any,
    ):  # fmt: skip
        self.sizes, self.refs, self.memory, self.totals = sizes, refs, memory, totals
        self.wg, self.interpret = wg, interpret
        groups = jnp.int32(sizes.groups)
        self.part, group = lax.div(program, groups), lax.rem(program, groups)
        self.row = group * QUERY_ROWS
        self.token = lax.div(self.row, jnp.int32(sizes.heads))

    def locate(self, start: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the cached tokens, and the first page and the number of pages of the part."""
        pages, each, _ = self.sizes.split(start)
        first = jnp.minimum(self.part * each, pages - 1)
        count = jnp.clip(pages - self.part * each, 0, each)
        return start, first, jnp.where(self.part < self.sizes.parts, count, 0)

    def prefetch(self) -> None:
        """Brings the part's first page into the L2 cache. A warp of the producer calls it."""
        if self.interpret is None:
            located = self.locate(self.refs.start[0])
            first, count = located[1:]

            @when(count > 0)
            def _() -> None:
                registers.prefetch(self.refs.pages, self.refs.table[first])

    def load_start(self) -> None:
        """Loads the length. What depends on it waits for the load, so that it should come later."""
        self.start = self.refs.start[0]

    def find_page(self) -> None:
        """Loads the number of the part's first page."""
        self.start, self.first, self.count = self.locate(self.start)
        self.page = self.refs.table[self.first]

    def load_early(self) -> None:
        """Loads what is known before the queries are: the keys of the first page."""
        if self.interpret is None:
            cached = jnp.where(self.count > 0, self.start - self.first * PAGE, 0)
            none = registers.zeros(KEYS)
            self.keys = registers.load_keys(none, self.refs.pages, self.page, jnp.int32(0), cached)

    def run(self) -> None:
        """Stores the results of this program's part and group."""
        when(self.count > 0)(self.attend if self.interpret is None else self.attend_in_interpreter)

    def attend(self) -> None:
        refs, memory, sizes = self.refs, self.memory, self.sizes
        maxima = memory.numbers.at[pl.ds(0, REDUCED_NUMBERS // 2)]
        sums = memory.numbers.at[pl.ds(REDUCED_NUMBERS // 2, REDUCED_NUMBERS // 2)]
        end, before = self.start + sizes.tokens, self.first * PAGE
        keys = registers.load_keys(
            self.keys, refs.pages, self.page, self.start - before, end - before
        )
        registers.copy_queries(refs.q_latent, refs.q_rope, self.row, memory.queries)
        self.totals.meet()

        def attend_page(i: jax.Array, carry: Any) -> Any:
            keys, page, running, acc = carry
            before = (self.first + i) * PAGE
            visible = self.start + self.token + 1 - before
            scale = sizes.scale * LOG2E
            last = jnp.minimum(end - before, PAGE) - 1
            # Half of the values: with all of them, registers would not suffice for the keys.
            left = registers.load_values(refs.pages, page, last, 0)
            scored = registers.scores(keys, memory.queries, scale, visible, maxima)
            right = registers.load_values(refs.pages, page, last, 1)
            self.totals.meet()
            running, factors = registers.probabilities(
                scored, running, maxima, memory.probabilities
            )
            following = jnp.where(i + 1 < self.count, self.first + i + 1, self.first)
            page = refs.table[following]
            tokens = jnp.where(i + 1 < self.count, end - before - PAGE, 0)
            self.totals.meet()
            acc = registers.add_values(acc, factors, left, memory.probabilities, 0)
            acc = registers.add_values(acc, factors, right, memory.probabilities, 1)
            # Zeros, because the old keys would need their registers until here.
            none = registers.zeros(KEYS)
            keys = registers.load_keys(none, refs.pages, page, jnp.int32(0), tokens)
            return keys, page, running, acc

        carry = keys, self.page, registers.zeros(RUNNING, NO_SCORE, NO_SCORE), registers.zeros(ACC)
        _, _, running, acc = lax.fori_loop(0, self.count, attend_page, carry)
        registers.store_sums(running, sums)
        self.totals.meet()
        first = self.part * sizes.rows + self.row
        registers.store_results(acc, running, sums, refs.partials, refs.lse, first)

    def attend_in_interpreter(self) -> None:
        """Does :meth:`attend`. Each warpgroup computes all scores, and half of the results."""
        refs, sizes, f32 = self.refs, self.sizes, jnp.float32
        C, R = sizes.latent, sizes.rope
        latent = refs.q_latent[pl.ds(self.row * C, QUERY_ROWS * C)].reshape(QUERY_ROWS, C)
        q = jnp.concatenate([latent, refs.q_rope[pl.ds(self.row, QUERY_ROWS)]], axis=-1)
        columns = pl.ds(self.wg * (C // 2), C // 2)
        visible = self.start + self.token + 1

        def attend_page(i: jax.Array, carry: Any) -> Any:
            maximum, total, acc = carry
            page = refs.table[self.first + i]
            position = (self.first + i) * PAGE + jnp.arange(PAGE)
            exists = position < self.start + sizes.tokens
            rows = refs.pages[pl.ds(page * PAGE, PAGE), pl.ds(0, C + R)]
            rows = jnp.where(exists[:, None], rows, 0).astype(f32)
            values = refs.pages[pl.ds(page * PAGE, PAGE), columns]
            values = jnp.where(exists[:, None], values, 0).astype(f32)
            scores = jnp.dot(q.astype(f32), rows.T, precision=lax.Precision.HIGHEST) * sizes.scale
            scores = jnp.where(position < visible, scores, -jnp.inf)
            raised = jnp.maximum(maximum, jnp.max(scores, axis=1))
            factor, own = jnp.exp(maximum - raised), jnp.exp(scores - raised[:, None])
            rounded = own.astype(latent.dtype).astype(f32)
            products = jnp.dot(rounded, values, precision=lax.Precision.HIGHEST)
            return raised, total * factor + jnp.sum(own, axis=1), acc * factor[:, None] + products

        zero = jnp.zeros((QUERY_ROWS,), f32)
        carry = zero + NO_SCORE, zero, jnp.zeros((QUERY_ROWS, C // 2), f32)
        maximum, total, acc = lax.fori_loop(0, self.count, attend_page, carry)
        own = pl.ds(self.row, QUERY_ROWS)
        least = jnp.where(total == 0.0, 1.0, total)
        refs.partials[self.part, own, columns] = acc / least[:, None]

        @when(self.wg == 0)
        def _() -> None:
            refs.lse[self.part, own] = jnp.where(total == 0.0, -jnp.inf, maximum + jnp.log(least))
