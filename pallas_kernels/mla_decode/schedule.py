"""Who reads what in mla_decode's Hopper kernel: rows' cached blocks dealt out to the GPU.

The kernel runs as ``parts`` equal programs, each of which takes a run of consecutive blocks of
consecutive rows. A row that falls into several parts is attended in pieces, which a second kernel
merges. The schedule depends on lengths alone: one serves all layers of a step.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

BLOCK = 64
"""Cached tokens a block: the kernel's page."""

_ROW_COST = 2  # what starting and finishing a row costs a part, in blocks
_MERGE_COST = 3  # what merging anything costs a step, in blocks
_CUTS_COST = 7  # and besides what writing and reading the pieces costs if every part is cut
_LEAST_BLOCKS = 4  # of a part: smaller pieces cost more to merge than they save


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Schedule:
    """Made by :func:`schedule` once a step, read by every layer's mla_decode."""

    table: Int[Array, "places 4"]
    """One place a part, then one a row. Parts: first row, last row, first block of the first row,
    end block of the last row; a part without work has its last row before its first. Rows: blocks;
    pieces; the index of the row's first piece among all pieces of split rows, less the number of
    its first part (so that part p's piece is the sum of that and p); cached tokens."""

    split: Int[Array, "parts 4"]
    """Rows in several pieces: row, its first piece, its pieces; and how many such rows there are,
    the same in all. Beyond the last one, 0 pieces."""

    @property
    def parts(self) -> int:
        return self.split.shape[0]


@dataclasses.dataclass(frozen=True)
class Costs:
    """What the deal weighs, in blocks; by default as the kernel of many query rows has it."""

    row: int = _ROW_COST
    merge: int = _MERGE_COST
    cuts: int = _CUTS_COST
    least: int = _LEAST_BLOCKS


FEW_QUERIES = Costs(row=2, merge=1, cuts=2, least=2)
"""For 16 query rows: a block is 2.2 us of a multiprocessor's share of HBM, a merge two latencies,
the pieces of all parts are 9 MB to write and read; two blocks of a part are attended side by side.
By arithmetic a row costs nothing, as it begins and ends behind the fetching of the next; measured,
a cost of 2 is better than 1 (benchmarks/NOTES.md)."""


def schedule(
    lengths: Int[Array, " B"], *, max_pages: int, parts: int, costs: Costs | None = None
) -> Schedule:
    """Cuts the rows' blocks evenly, or deals out whole rows where that, unmerged, ends no later.

    Args:
      lengths: cached tokens a row. An empty row counts as one block, for its zeros to be written.
      max_pages: width of the block table, in pages of ``BLOCK`` tokens.
      parts: programs that run side by side.
      costs: those of many query rows if missing.
    """
    costs = costs or Costs()
    B = lengths.shape[0]
    i32 = jnp.int32
    blocks = jnp.clip((lengths.astype(i32) + BLOCK - 1) // BLOCK, 1, max_pages)
    cost = blocks + costs.row
    # Masked sums, not scans: XLA makes one kernel of them.
    number = jnp.arange(B)
    begin = jnp.sum(jnp.where(number[None] < number[:, None], cost, 0), axis=1, dtype=i32)
    share = jnp.maximum(-(-jnp.sum(cost, dtype=i32) // parts), costs.least)
    edge = jnp.arange(parts + 1, dtype=i32)
    even = edge[None] * share - begin[:, None]
    cuts = jnp.sum((even > 0) & (even < blocks[:, None]), dtype=i32)
    rows_a_part = -(-B // parts)
    first_whole = jnp.append(begin, jnp.sum(cost, dtype=i32))[jnp.minimum(edge * rows_a_part, B)]
    longest = jnp.max(first_whole[1:] - first_whole[:-1])
    saved = costs.merge + cuts * costs.cuts // parts
    edges = jnp.where(longest <= share + saved, first_whole, edge * share)

    # [B, parts]: the blocks of each row that fall between two edges.
    cut = jnp.clip(edges[None] - begin[:, None], 0, blocks[:, None])
    low, high = cut[:, :-1], cut[:, 1:]
    held = high > low
    pieces = jnp.sum(held, axis=1, dtype=i32)
    first_row = jnp.argmax(held, axis=0).astype(i32)
    last_row = jnp.where(
        jnp.any(held, axis=0), B - 1 - jnp.argmax(held[::-1], axis=0).astype(i32), -1
    )
    part = jnp.arange(parts)
    taken = [first_row, last_row, low[first_row, part], high[last_row, part]]

    extra = jnp.where(pieces > 1, pieces, 0)
    before = number[None] < number[:, None]
    first_piece = jnp.sum(jnp.where(before, extra, 0), axis=1, dtype=i32)
    # A split row's place among the split ones; the others are dropped.
    place = jnp.sum(jnp.where(before, extra > 0, False), axis=1, dtype=i32)
    place = jnp.where(extra > 0, place, parts)
    split = jnp.stack([number.astype(i32), first_piece, extra], axis=1)
    split = jnp.zeros((parts, 3), i32).at[place].set(split, mode="drop")
    count = jnp.full((parts, 1), jnp.sum(extra > 0), i32)
    first_part = jnp.argmax(held, axis=1).astype(i32)
    rows = [blocks, pieces, first_piece - first_part, lengths.astype(i32)]
    return Schedule(
        table=jnp.concatenate([jnp.stack(taken, axis=1), jnp.stack(rows, axis=1)]),
        split=jnp.concatenate([split, count], axis=1),
    )
