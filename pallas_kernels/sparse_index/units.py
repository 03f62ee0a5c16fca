"""Division of the pages that sparse_index scores among the CTAs of its kernel.

A row is a set of queries that are scored together, of one sequence: ``groups * group_queries``
queries. There are two divisions:

* Units of a fixed number of pages, which the CTAs take in turn. With few queries per sequence
  most units are full, so this is balanced, and it is faster than equal shares, in which the pages
  that CTAs read at a time are far apart. But many queries of a sequence see different numbers
  of pages, and a CTA whose turns fall on the first pages of every row has more to do than one
  whose turns fall on the last.
* Equal shares: the pages of all rows in order, cut into as many pieces as there are CTAs. A
  CTA finds its own piece from the lengths. Pieces are measured in tokens, so that sums have a
  closed form, and a row counts ``ROW_COST`` pages more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

PAGE = 64
ROW_COST = 1  # the beginning and end of a row or unit, in pages


class Unit(NamedTuple):
    """A range of pages of a sequence, and groups of its queries."""

    sequence: jax.Array
    group: jax.Array  # the first one
    first: jax.Array  # page in the table
    seen: jax.Array  # pages from there on with tokens that a query sees
    in_table: jax.Array  # pages from there on
    length: jax.Array  # of the sequence


Units = tuple[jax.Array, Callable[[jax.Array], Unit]]
"""The number of a CTA's units, and the function that returns the i-th."""


@dataclasses.dataclass(frozen=True)
class Lanes:
    """The threads of a warp, which look at one sequence each. Their other values are equal."""

    count: int
    index: jax.Array
    sum: Callable[[jax.Array], jax.Array]
    """Returns the sum of an integer of each lane. All lanes get it."""
    max: Callable[[jax.Array], jax.Array]  # returns the largest integer of any lane
    prefix_sum: Callable[[jax.Array], jax.Array]
    """Returns the sum of the integers of the lanes up to this one."""


@dataclasses.dataclass(frozen=True)
class Work:
    """Sizes of the whole operation."""

    sequences: int
    sets: int  # rows of a sequence
    groups: int  # groups of queries of a row
    group_queries: int  # Queries of a group. The last groups of a sequence may have fewer.
    queries: int  # queries of a sequence
    max_pages: int

    def seen_pages(self, length: jax.Array, group: jax.Array) -> jax.Array:
        """Returns the pages that the row with this first group sees."""
        last = (group + self.groups) * self.group_queries
        tokens = length + jnp.minimum(last - self.queries, 0)
        return jnp.clip(lax.div(tokens + (PAGE - 1), jnp.int32(PAGE)), 0, self.max_pages)


def in_turn(work: Work, pages: int, cta: jax.Array, ctas: int, lengths: Any) -> Units:
    """Returns every ``ctas``-th unit of ``pages`` pages."""
    chunks, sets = -(-work.max_pages // pages), work.sets
    units = work.sequences * sets * chunks
    count = lax.div(units - cta + (ctas - 1), jnp.int32(ctas))

    def unit_of(i: jax.Array) -> Unit:
        number = cta + i * ctas
        of_pages, rest = lax.rem(number, jnp.int32(chunks)), lax.div(number, jnp.int32(chunks))
        b, group = lax.div(rest, jnp.int32(sets)), lax.rem(rest, jnp.int32(sets))
        group, first = group * work.groups, of_pages * pages
        length = lengths[b]
        in_table = jnp.minimum(work.max_pages - first, pages)
        seen = jnp.clip(work.seen_pages(length, group) - first, 0, in_table)
        return Unit(b, group, first, seen, in_table, length)

    return count, unit_of


def equal_shares(work: Work, cta: jax.Array, ctas: int, lengths: Any, lanes: Lanes) -> Units:
    """Returns the rows of a CTA's share, and of the first and the last maybe a part. The CTA with
    the last page of a row also has those pages that no query sees."""
    sets, rows = work.sets, work.sequences * work.sets
    row_queries = work.groups * work.group_queries
    n, zero = work.sequences, jnp.int32(0)
    chunks = -(-n // lanes.count)

    def tokens_before(b: jax.Array, row: Any) -> jax.Array:
        """Returns the tokens of the first rows of a sequence, with the cost of each row."""
        before = jnp.clip(lengths[b] - work.queries, 0, work.max_pages * PAGE)
        triangle = lax.div(row * (row + 1), jnp.int32(2))
        return row * (before + ROW_COST * PAGE) + row_queries * triangle

    def of_lane(chunk: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the lane's sequence, and its tokens."""
        b = chunk * lanes.count + lanes.index
        return b, jnp.where(b < n, tokens_before(jnp.minimum(b, n - 1), jnp.int32(sets)), 0)

    total = lax.fori_loop(0, chunks, lambda i, sum: sum + lanes.sum(of_lane(i)[1]), zero)
    share = lax.div(total + (ctas - 1), jnp.int32(ctas))
    begin = share * cta
    end = begin + share

    def find(chunk: Any, carry: Any) -> Any:
        """Keeps the last sequences that begin by ``begin`` and ``end``, and the tokens before."""
        before, *results = carry
        b, tokens = of_lane(chunk)
        starts, places = before + lanes.prefix_sum(tokens) - tokens, []
        for position, old in zip((begin, end), results, strict=True):
            begins = (b < n) & (starts <= position)  # and so do all lanes below
            newest = (lanes.max(jnp.where(begins, x, 0)) for x in (b, starts))
            places.append(tuple(map(jnp.maximum, old, newest)))
        return before + lanes.sum(tokens), *places

    _, first, last = lax.fori_loop(0, chunks, find, (zero, (zero, zero), (zero, zero)))

    def locate(position: jax.Array, b: jax.Array, before: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the row of a position, of all rows, and the page in it."""
        row, step = zero, 1 << (sets - 1).bit_length()
        while step := step // 2:
            is_later = (row + step < sets) & (before + tokens_before(b, row + step) <= position)
            row = jnp.where(is_later, row + step, row)
        page = lax.div(position - before - tokens_before(b, row), jnp.int32(PAGE))
        is_past = position >= total
        return jnp.where(is_past, rows, b * sets + row), jnp.where(is_past, 0, page)

    (first_row, first_page), (last_row, last_page) = locate(begin, *first), locate(end, *last)

    def unit_of(i: jax.Array) -> Unit:
        row = first_row + i
        b, group = lax.div(row, jnp.int32(sets)), lax.rem(row, jnp.int32(sets)) * work.groups
        length = lengths[b]
        visible = work.seen_pages(length, group)
        start = jnp.where(i == 0, jnp.minimum(first_page, visible), 0)
        stop = jnp.where(row == last_row, jnp.minimum(last_page, visible), visible)
        in_table = jnp.where(row == last_row, stop, work.max_pages) - start
        return Unit(b, group, start, stop - start, in_table, length)

    # The last row is another CTA's too, unless it is past the end.
    return jnp.minimum(last_row + 1, rows) - first_row, unit_of
