"""Division of sparse attention's work among the programs of the Hopper kernel.

Every query has the same number of key blocks, so the division depends on shapes alone. It is made
when the program is traced and costs no kernel.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

BLOCK = 64
"""Tokens per key block."""

PAIR = 2 * BLOCK
"""Tokens per pair of key blocks. The number of indices per query is padded to a multiple of it."""

# In units of the time that a pair of key blocks takes.
_MERGE_COST = 2  # the second kernel, and writing and reading partial results
_MIN_PAIRS = 2  # per partition: smaller partial results cost more to merge than they save


@dataclasses.dataclass(frozen=True)
class Work:
    """Pairs of key blocks of all queries, numbered consecutively and cut into equal shares."""

    queries: int
    """Number of queries of all sequences."""

    pairs: int
    """Pairs of key blocks per query."""

    partitions: int
    """Number of shares. A program processes one share for 64 heads."""

    share: int
    """Pairs of a partition; the last ones may have fewer or none."""

    @property
    def total(self) -> int:
        return self.queries * self.pairs

    def segments(self) -> npt.NDArray[np.int32]:
        """Returns (segments, partial offset) of each query, [queries, 2].

        ``segments`` is the number of partitions that a query falls into. If it exceeds 1, partition
        p writes the query's partial result at index ``partial offset + p``.
        """
        first_partition, counts = self._spans()
        partials = np.where(counts > 1, counts, 0)
        first_partial = np.cumsum(partials) - partials
        return np.stack([counts, first_partial - first_partition], axis=1).astype(np.int32)

    def split_queries(self) -> npt.NDArray[np.int32]:
        """Returns the queries that are split, as ``merge_partials`` takes them."""
        _, counts = self._spans()
        split = np.flatnonzero(counts > 1)
        table = np.zeros((self.partitions, 4), np.int32)
        table[: len(split), 0] = split
        table[: len(split), 1] = np.cumsum(counts[split]) - counts[split]
        table[: len(split), 2] = counts[split]
        table[:, 3] = len(split)
        return table

    def _spans(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns the first partition of each query and the number of its partitions."""
        first = np.arange(self.queries) * self.pairs
        first_partition = first // self.share
        return first_partition, (first + self.pairs - 1) // self.share - first_partition + 1


def divide(queries: int, indices: int, partitions: int, *, whole: bool = False) -> Work:
    """Divides evenly, or into whole queries if that takes no longer than the merge would.

    Args:
      queries: number of queries of all sequences.
      indices: padded number of indices per query, a multiple of PAIR.
      partitions: number of programs that run concurrently for each tile of heads.
      whole: whether a query must not be split, so that its result depends on no other query.
    """
    pairs = indices // PAIR
    even = max(-(-queries * pairs // partitions), min(_MIN_PAIRS, pairs))
    of_whole_queries = -(-queries // partitions) * pairs
    share = of_whole_queries if whole or of_whole_queries <= even + _MERGE_COST else even
    return Work(queries, pairs, min(partitions, -(-queries * pairs // share)), share)
