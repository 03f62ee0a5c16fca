"""Split-KV scheduling for mla_decode's Hopper kernels: assigns key blocks to partitions.

The cached tokens of all sequences are divided into ``partitions`` shares of about equal cost. Each
partition is a run of consecutive key blocks of consecutive sequences, and one program (or one per
tile of 64 query rows) processes it. A sequence that falls into several partitions is split: each
partition computes a partial output and its log-sum-exp, and a second kernel merges them. The
schedule depends only on the lengths, so one schedule serves all layers of a step.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

BLOCK = 64
"""Cached tokens per key block. It equals the page size that the kernels take."""

# Costs are in units of the time that one key block takes.
_SEQUENCE_COST = 2  # prologue and epilogue of a sequence in a partition
_MERGE_COST = 3  # fixed cost of a merge
_PARTIALS_COST = 7  # writing and reading the partial results if every partition boundary splits
_MIN_BLOCKS = 4  # per partition: smaller partial results cost more to merge than they save


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Schedule:
    """The work of every partition. Computed once per step and read by mla_decode in every layer."""

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
        """Number of partitions."""
        return self.split_sequences.shape[0]


@dataclasses.dataclass(frozen=True)
class Costs:
    """Cost model of the scheduler, in key blocks. The defaults are for tiles of 64 query rows."""

    sequence: int = _SEQUENCE_COST
    """Prologue and epilogue of a sequence in a partition."""

    merge: int = _MERGE_COST
    """Fixed cost of merging, paid once if any sequence is split."""

    partials: int = _PARTIALS_COST
    """Cost of writing and reading the partial results if every partition boundary splits."""

    min_blocks: int = _MIN_BLOCKS
    """Least cost of a partition's share."""


FEW_QUERIES_COSTS = Costs(sequence=2, merge=1, partials=2, min_blocks=2)
"""Cost model of the kernel for few query rows, derived for 16 of them.

A key block takes 2.2 us of a multiprocessor's share of HBM bandwidth and a merge takes two memory
latencies. The partial results of all partitions are 9 MB to write and read. Two blocks of a
partition are processed concurrently. By this arithmetic a sequence costs nothing, because its
prologue and epilogue overlap with fetching the next one; measured, a cost of 2 is better than 1
(docs/kernels/mla_decode.md)."""


def whole_sequences(lengths: Int[Array, " B"], *, max_pages: int) -> Schedule:
    """Gives each sequence a partition of its own.

    The result for a sequence then depends on no other one, to the last bit. With fewer long
    sequences than multiprocessors it takes longer than :func:`schedule`, which splits them.

    Args:
      lengths, max_pages: as :func:`schedule` takes them.
    """
    i32 = jnp.int32
    (B,) = lengths.shape
    blocks = jnp.clip((lengths.astype(i32) + BLOCK - 1) // BLOCK, 1, max_pages)
    sequence, zero = jnp.arange(B, dtype=i32), jnp.zeros(B, i32)
    partition_entries = [sequence, sequence, zero, blocks]
    sequence_entries = [blocks, zero + 1, -sequence, lengths.astype(i32)]
    return Schedule(
        table=jnp.concatenate(
            [jnp.stack(partition_entries, axis=1), jnp.stack(sequence_entries, axis=1)]
        ),
        split_sequences=jnp.zeros((B, 4), i32),
    )


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
    partition_entries = [
        first_sequence,
        last_sequence,
        low[first_sequence, partition],
        high[last_sequence, partition],
    ]

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
    return Schedule(
        table=jnp.concatenate(
            [jnp.stack(partition_entries, axis=1), jnp.stack(sequence_entries, axis=1)]
        ),
        split_sequences=jnp.concatenate([split_entries, count], axis=1),
    )
