"""Split-KV: the division of cached tokens among CTAs, and the merge of what they compute.

The cached tokens of all sequences are divided into ``partitions`` shares of about equal cost
(:func:`schedule`). A partition is a run of consecutive key blocks of consecutive sequences, and one
CTA processes it (or one CTA per tile of query rows). A sequence's blocks in a partition are a
*segment*, of one block or more. A sequence that falls into several partitions is *split*: each of
them computes a partial output and its log-sum-exp, and these parts are merged afterwards. The
schedule depends only on the lengths, so one schedule serves all layers of a step.

Inside a kernel, :class:`Partition` reads a CTA's entry of the schedule, :class:`BlockWalk` goes
from one key block to the next, and :func:`add_parts` merges parts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float32, Int

from pallas_kernels.hopper.launch import Index, Ref
from pallas_kernels.hopper.tiles import ROWS
from pallas_kernels.hopper.warpgroup import cond

BLOCK = 64
"""Cached tokens per key block. It equals the page size that the kernels take."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Schedule:
    """The partitions. Computed once per step and read by mla_decode in every layer."""

    table: Int[Array, "entries 4"]
    """One entry per partition, followed by one entry per sequence.

    A partition's entry is (first sequence, last sequence, first block of the first sequence, end
    block of the last sequence). A partition without work has its last sequence before its first.

    A sequence's entry is (blocks, segments, partial offset, cached tokens). ``segments`` is the
    number of partitions that it falls into; it is split if that exceeds 1, and then partition p
    writes the sequence's partial result at index ``partial offset + p``: the offset is the index of
    the sequence's first partial result less the number of its first partition."""
    split_sequences: Int[Array, "partitions 4"]
    """Sequences that are split, as (sequence, index of its first partial result, number of its
    partial results, number of split sequences). The last column is the same in every entry.
    Entries past the last split sequence have 0 partial results."""

    @property
    def partitions(self) -> int:
        return self.split_sequences.shape[0]


@dataclasses.dataclass(frozen=True)
class Costs:
    """Cost model of the scheduler, in units of the time that one key block takes. The defaults are
    for tiles of 64 query rows."""

    sequence: ClassVar[int] = 2  # prologue and epilogue of a sequence in a partition
    merge: int = 3  # fixed cost of merging, paid once if any sequence is split
    partials: int = 7
    """Cost of writing and reading the partial results if every partition boundary splits."""
    min_blocks: int = 4
    """Least cost of a partition's share: smaller parts cost more to merge than they save."""


def whole_sequences(lengths: Int[Array, " B"], *, max_pages: int) -> Schedule:
    """Makes one partition per sequence, with arguments as :func:`schedule` takes them. The result
    for a sequence then depends on no other one, to the last bit. With fewer long sequences than
    multiprocessors it takes longer than :func:`schedule`, which splits them."""
    i32 = jnp.int32
    (B,) = lengths.shape
    blocks = jnp.clip((lengths.astype(i32) + BLOCK - 1) // BLOCK, 1, max_pages)
    sequence, zero = jnp.arange(B, dtype=i32), jnp.zeros(B, i32)
    partition_entries = [sequence, sequence, zero, blocks]
    sequence_entries = [blocks, zero + 1, -sequence, lengths.astype(i32)]
    return Schedule(_table(partition_entries, sequence_entries), jnp.zeros((B, 4), i32))


def _table(*entries: list[jax.Array]) -> jax.Array:
    return jnp.concatenate([jnp.stack(each, axis=1) for each in entries])


def schedule(
    lengths: Int[Array, " B"], *, max_pages: int, partitions: int, costs: Costs | None = None
) -> Schedule:
    """Divides the key blocks evenly, or assigns whole sequences if that finishes no later.

    Whole sequences need no merge, so they are preferred when the longest partition is longer than
    the even share by no more than the merge would cost.

    Args:
      lengths: cached tokens per sequence. An empty sequence counts as one block, because its zeros
        must be written.
      max_pages: width of the block table, in pages of ``BLOCK`` tokens.
      partitions: number of partitions, which run concurrently.
      costs: cost model, by default that of tiles of 64 query rows.
    """
    costs = costs or Costs()
    B = lengths.shape[0]
    i32 = jnp.int32
    blocks = jnp.clip((lengths.astype(i32) + BLOCK - 1) // BLOCK, 1, max_pages)
    cost = blocks + costs.sequence
    # Masked sums instead of scans: XLA compiles them to one kernel.
    sequence = jnp.arange(B)
    begin = jnp.sum(jnp.where(sequence[None] < sequence[:, None], cost, 0), axis=1, dtype=i32)
    share = jnp.maximum(-(-jnp.sum(cost, dtype=i32) // partitions), costs.min_blocks)
    edge = jnp.arange(partitions + 1, dtype=i32)
    # A sequence's cost is its blocks, then the fixed cost: an edge in the latter splits nothing.
    even = edge[None] * share - begin[:, None]
    split_count = jnp.sum((even > 0) & (even < blocks[:, None]), dtype=i32)
    sequences_per_partition = -(-B // partitions)
    whole_edges = jnp.append(begin, jnp.sum(cost, dtype=i32))[
        jnp.minimum(edge * sequences_per_partition, B)
    ]
    longest = jnp.max(whole_edges[1:] - whole_edges[:-1])
    merge_cost = costs.merge + split_count * costs.partials // partitions
    edges = jnp.where(longest <= share + merge_cost, whole_edges, edge * share)

    # [B, partitions]: the blocks of each sequence that fall between two edges.
    cut = jnp.clip(edges[None] - begin[:, None], 0, blocks[:, None])
    low, high = cut[:, :-1], cut[:, 1:]
    is_assigned = high > low
    segments = jnp.sum(is_assigned, axis=1, dtype=i32)
    first_sequence = jnp.argmax(is_assigned, axis=0).astype(i32)
    last_sequence = jnp.where(
        jnp.any(is_assigned, axis=0), B - 1 - jnp.argmax(is_assigned[::-1], axis=0).astype(i32), -1
    )
    partition = jnp.arange(partitions)
    ends = low[first_sequence, partition], high[last_sequence, partition]
    partition_entries = [first_sequence, last_sequence, *ends]

    partial_count = jnp.where(segments > 1, segments, 0)
    before = sequence[None] < sequence[:, None]
    first_partial = jnp.sum(jnp.where(before, partial_count, 0), axis=1, dtype=i32)
    # Index of each split sequence among the split ones; the others are dropped.
    split_index = jnp.sum(jnp.where(before, partial_count > 0, False), axis=1, dtype=i32)
    split_index = jnp.where(partial_count > 0, split_index, partitions)
    split_entries = jnp.stack([sequence.astype(i32), first_partial, partial_count], axis=1)
    split_entries = jnp.zeros((partitions, 3), i32).at[split_index].set(split_entries, mode="drop")
    count = jnp.full((partitions, 1), jnp.sum(partial_count > 0), i32)
    first_partition = jnp.argmax(is_assigned, axis=1).astype(i32)
    sequence_entries = [blocks, segments, first_partial - first_partition, lengths.astype(i32)]
    table = _table(partition_entries, sequence_entries)
    return Schedule(table, jnp.concatenate([split_entries, count], axis=1))


class Parts(NamedTuple):
    """Attention's results before the parts of split sequences are merged. Query rows are all heads
    of a sequence's first query, then of the next. What a field does not define may be anything, NaN
    included."""

    out: Float[Array, "B rows C"]
    """The results of sequences that are not split. There may be more rows than query rows."""
    partials: Float32[Array, "parts rows C"]
    """The results of the parts: softmax attention to some of a split sequence's tokens."""
    lse: Float32[Array, "parts rows"]
    """Their log-sum-exps, -inf of a query that sees none of a part's tokens."""
    split_sequences: Int[Array, "partitions 4"]  # see :class:`Schedule`

    def of_sequence(self, b: int) -> tuple[Any, Any]:
        """Returns the first part of sequence b, and the number of its parts, 0 if it is not split.
        A kernel may call it: the fields are then references."""
        first, count = jnp.int32(0), jnp.int32(0)
        # A split sequence is in one of the first entries: there is one for each.
        for i in range(min(b + 1, self.split_sequences.shape[0])):
            entry = [self.split_sequences[i, k] for k in range(3)]
            is_in = (entry[0] == b) & (entry[2] > 0)
            first, count = (
                jnp.where(is_in, new, old)
                for new, old in zip(entry[1:], (first, count), strict=True)
            )
        return first, count

    def merged(self) -> Float[Array, "B rows C"]:
        """Returns the output of all sequences, merged in float32 and rounded to ``out``'s dtype."""
        outs = []
        for b, out in enumerate(self.out):
            first, count = self.of_sequence(b)
            number = jnp.arange(len(self.lse))
            is_in = (number >= first) & (number < first + count)
            lse = jnp.where(is_in[:, None], self.lse, -jnp.inf)
            maximum = jnp.max(lse, axis=0)
            weights = jnp.exp(lse - jnp.where(jnp.isfinite(maximum), maximum, 0.0))
            partials = jnp.where(is_in[:, None, None], self.partials, 0.0)
            total, weight = jnp.sum(weights[..., None] * partials, axis=0), jnp.sum(weights, axis=0)
            total = total / jnp.where(weight == 0.0, 1.0, weight)[:, None]
            outs.append(jnp.where(count > 0, total.astype(out.dtype), out))
        return jnp.stack(outs)


Outputs = tuple[
    BFloat16[Array, "B rows C"],
    Float32[Array, "B rows"],
    tuple[Float32[Array, "parts padded C"], Float32[Array, "parts padded"]],
]
"""Outputs of a split-KV kernel: ``out`` and ``lse``, written for sequences that are not split, and
the partial results and their log-sum-exps, written for those that are."""


def output_types(
    B: int, rows: int, columns: int, partitions: int, *, part_rows: int | None = None
) -> list[jax.ShapeDtypeStruct]:
    """Returns the types of :data:`Outputs`. There are two partial results per partition, because
    only its first and its last sequence can be split. They have ``part_rows`` query rows, by
    default ``rows`` rounded up to whole tiles."""
    f32, part_rows = jnp.float32, part_rows or -(-rows // ROWS) * ROWS
    return [
        jax.ShapeDtypeStruct((B, rows, columns), jnp.bfloat16),
        jax.ShapeDtypeStruct((B, rows), f32),
        jax.ShapeDtypeStruct((2 * partitions, part_rows, columns), f32),
        jax.ShapeDtypeStruct((2 * partitions, part_rows), f32),
    ]


def add_parts(
    row: tuple[Any, Any, Any], numbers: Sequence[Any], count: Index, lses: Sequence[Any],
    values: Sequence[Any],
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Adds parts of one query row in a kernel, and returns the row with them. A row is the weighted
    sum of the outputs, the sum of the weights, and the maximum of the log-sum-exps, to which both
    are relative; the output is their quotient. A part has a number, which counts only if it is
    below ``count``, a log-sum-exp, and values in registers."""
    total, weight, maximum = row
    new_maximum = functools.reduce(jnp.maximum, lses, maximum)
    rescale = jnp.exp(maximum - new_maximum)
    total, weight = total * rescale, weight * rescale
    for n, lse, value in zip(numbers, lses, values, strict=True):
        factor = jnp.where(n < count, jnp.exp(lse - new_maximum), 0.0)
        total, weight = total + factor * value, weight + factor
    return total, weight, new_maximum


@dataclasses.dataclass(frozen=True, eq=False)
class Partition:
    """The partition of a CTA, read from the schedule in global memory."""

    table: Ref  # :attr:`Schedule.table`, [partitions + B, 4]
    block_tables: Ref  # block tables, [B, max_pages]
    partitions: int  # number of partitions
    index: Index  # index of this partition
    pages: int
    """Number of pages in the pool. Table entries past a sequence's length may be anything, and are
    clipped to the pool."""

    @property
    def max_pages(self) -> int:
        return self.block_tables.shape[1]

    def entry(self) -> tuple[Any, ...]:
        """Returns the partition's entry of the schedule, read in one memory latency."""
        return tuple(self.table[self.index, k] for k in range(4))

    def first_sequence(self) -> jax.Array:
        return self.table[self.index, 0]

    def sequence_count(self) -> jax.Array:
        """Returns the number of sequences in the partition. Each has one segment."""
        return self.table[self.index, 1] - self.table[self.index, 0] + 1

    def segment(self, i: Index, entry: tuple[Any, ...] | None = None) -> tuple[Any, Any, Any]:
        """Returns the partition's i-th sequence, its first block here, and how many are here. A
        caller that has read the :meth:`entry` passes it."""
        first_sequence, last_sequence, first_block, end_block = entry or self.entry()
        b = first_sequence + i
        begin = jnp.where(i == 0, first_block, 0)
        return b, begin, jnp.where(b == last_sequence, end_block, self.blocks(b)) - begin

    def segment_and_end(
        self, i: Index, entry: tuple[Any, ...] | None = None
    ) -> tuple[Any, Any, Any, Any]:
        """Returns :meth:`segment`, and whether it has the sequence's last block."""
        first_sequence, last_sequence, first_block, end_block = entry or self.entry()
        b = first_sequence + i
        blocks = self.blocks(b)
        begin = jnp.where(i == 0, first_block, 0)
        end = jnp.where(b == last_sequence, end_block, blocks)
        return b, begin, end - begin, end == blocks

    def segment_and_length(self, i: Index, first: Index, last: Any) -> tuple[Any, Any, Any, Any]:
        """Returns the i-th sequence, its length, its first block here, and how many are here.
        ``first`` and ``last`` are the partition's. It reads the blocks of the entry again each
        time, which takes fewer registers."""
        b = first + i
        begin = jnp.where(i == 0, self.table[self.index, 2], 0)
        end = jnp.where(b == last, self.table[self.index, 3], self.blocks(b))
        return b, self.length(b), begin, end - begin

    def blocks(self, b: Index) -> jax.Array:
        """Returns the number of key blocks of a sequence, in all partitions."""
        return self.table[self.partitions + b, 0]

    def length(self, b: Index) -> jax.Array:
        """Returns the cached tokens of a sequence."""
        return self.table[self.partitions + b, 3]

    def segments(self, b: Index) -> jax.Array:
        """Returns the number of partitions into which a sequence falls."""
        return self.table[self.partitions + b, 1]

    def partial(self, b: Index) -> jax.Array:
        """Returns the index of this partition's partial result of a sequence."""
        return self.table[self.partitions + b, 2] + self.index

    def page(self, b: Index, block: Index) -> jax.Array:
        """Returns the page of a key block; of the table's last entry if the block is past it."""
        page = self.block_tables[b, jnp.minimum(block, self.max_pages - 1)]
        return jnp.clip(page, 0, self.pages - 1)


NO_BLOCK = -1
"""Sequence of a block that the partition does not have."""

Position = tuple[jax.Array, jax.Array, jax.Array]
"""(sequence, block of the sequence, end of the sequence's blocks in the partition)."""

Block = tuple[Any, Any, Any]
"""(sequence or NO_BLOCK, page, number of valid tokens from the page's first slot on)."""


@dataclasses.dataclass(frozen=True, eq=False)
class BlockWalk:
    """The key blocks of a partition one after the other, for a producer that looks ahead."""

    partition: Partition
    first_sequence: jax.Array
    last_sequence: jax.Array
    first_block: jax.Array
    end_block: jax.Array

    @classmethod
    def of(cls, partition: Partition) -> BlockWalk:
        return cls(partition, *partition.entry())

    @property
    def sequence_count(self) -> jax.Array:
        return self.last_sequence - self.first_sequence + 1

    def start(self) -> Position:
        return self.first_sequence, self.first_block, self._end_of(self.first_sequence)

    def after(self, position: Position) -> Position:
        """Returns the next position in the partition."""
        b, index, end = position
        return cond(
            (index + 1 >= end) & (b < self.last_sequence),
            lambda: (b + 1, jnp.int32(0), self._end_of(b + 1)),
            lambda: (b, index + 1, end),
        )

    def block_at(self, position: Position, other_page: Index) -> Block:
        """Returns the block there. If there is none, its page is ``other_page``."""
        b, index, end = position
        exists = index < end
        page = jnp.where(exists, self.partition.page(b, index), other_page)
        return jnp.where(exists, b, NO_BLOCK), page, self.partition.length(b) - index * BLOCK

    def _end_of(self, b: Index) -> jax.Array:
        return jnp.where(b == self.last_sequence, self.end_block, self.partition.blocks(b))
